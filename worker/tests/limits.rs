//! Sends LIMITS, as a supervisor does, over a real link to real worker processes: an SDK worker, which is
//! this program, and the `exec` host.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION};
use bulkhead_shared::codec;
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Scratch};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::worker_protocol::{Empty, Job, LINK_VARIABLE, Limits, WorkerWelcome, capability};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Maximum time to wait for a condition, which on an idle machine becomes true almost immediately.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Environment variable that makes this program run as a worker. The value selects the role of the worker.
const ROLE: &str = "LIMITS_TEST_WORKER";

/// Number of `meet` jobs that wait for one another to start.
const MEETING_SIZE: usize = 3;

#[test]
#[ignore = "not a test: the worker process that the tests start"]
fn helper_child_runs_as_worker() {
    match std::env::var(ROLE).as_deref() {
        Ok("threads") => {
            let (met, all) = (Mutex::new(0), Condvar::new());
            bulkhead_worker::serve(move |job, ctx| {
                if ctx.operation() == "meet" {
                    let mut count = met.lock().unwrap();
                    *count += 1;
                    all.notify_all();
                    drop(all.wait_while(count, |count| *count < MEETING_SIZE).unwrap());
                }
                Ok(job.payload().to_vec())
            });
        }
        #[cfg(feature = "tokio")]
        Ok("tasks") => {
            let all = tokio::sync::Barrier::new(MEETING_SIZE);
            bulkhead_worker::serve_async(async move |job, ctx| {
                if ctx.operation() == "meet" {
                    all.wait().await;
                }
                Ok(job.payload().to_vec())
            });
        }
        _ => {}
    }
}

/// A worker process, and the supervisor's end of its link. The process is killed on drop.
struct Worker {
    child: Child,
    link: UnixStream,
    inbox: Inbox,
    scratch: Scratch,
    read: Vec<(u8, u64, Vec<u8>)>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    /// Starts this test program as a worker with the given role. The roles are defined in
    /// [`helper_child_runs_as_worker`].
    fn sdk(role: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let arguments = ["helper_child_runs_as_worker", "--exact", "--ignored", "--nocapture"];
        Self::start(program.to_str().unwrap(), &arguments, &[(ROLE, role)])
    }

    /// Starts the host, which runs a script for each job.
    #[cfg(feature = "host")]
    fn exec_host(script: &str, folder: &str) -> Self {
        let host = env!("CARGO_BIN_EXE_bulkhead-worker");
        Self::start(host, &["exec", "--ok", "0", "--", "/bin/sh", "-c", script], &[("FOLDER", folder)])
    }

    fn start(program: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let (link, theirs) = UnixStream::pair().unwrap();
        // The shell moves the link to descriptor 3, closes all other copies, and executes the worker.
        let child = Command::new("/bin/sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 </dev/null", program])
            .args(arguments)
            .env(LINK_VARIABLE, "3")
            .envs(variables.iter().copied())
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (inbox, scratch) = (Inbox::default(), Scratch::default());
        Self { child, link, inbox, scratch, read: Vec::new() }
    }

    /// Waits for the hello. Then sends the welcome and the frames from `more` in a single write.
    fn welcome(&mut self, max_in_flight: u32, more: impl FnOnce(&mut Outbox)) {
        let (hello, number, metadata) = self.next();
        assert_eq!((hello, number), (kind::HELLO, MAGIC));
        let (hello, _) = codec::decode::<Hello<'_>>(&metadata, &[]).unwrap();
        assert_ne!(hello.capabilities & capability::RESIZE, 0);
        let welcome = WorkerWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: 1 << 20,
            capabilities: 0,
            slot: 0,
            generation: 1,
            max_in_flight,
            heartbeat_ms: 0,
            result_bytes_max: 1 << 16,
            bulkhead: "b",
        };
        self.send(|outbox| {
            outbox.push(kind::WORKER_WELCOME, MAGIC, &welcome, &[], Payload::NONE).unwrap();
            more(outbox);
        });
    }

    /// Completes the handshake like `welcome`, and then waits until the worker is ready.
    fn open(&mut self, max_in_flight: u32, more: impl FnOnce(&mut Outbox)) {
        self.welcome(max_in_flight, more);
        assert_eq!(self.next().0, kind::READY);
    }

    fn send(&self, fill: impl FnOnce(&mut Outbox)) {
        let mut outbox = Outbox::default();
        fill(&mut outbox);
        assert!(outbox.flush(&self.link, &mut BufferPool::default()).unwrap());
    }

    /// Returns the kind, number and metadata of the next frame.
    fn next(&mut self) -> (u8, u64, Vec<u8>) {
        while self.read.is_empty() {
            let patience = Timespec::try_from(TIMEOUT).unwrap();
            let count = poll(&mut [PollFd::new(&self.link, PollFlags::IN)], Some(&patience)).unwrap();
            assert_eq!(count, 1, "the worker sent nothing");
            let (_, mut batch) = self.inbox.receive(&self.link, &mut self.scratch).unwrap();
            while let Some(Item::Frame { header, metadata, .. }) = batch.next().unwrap() {
                self.read.push((header.kind, header.number, metadata.to_vec()));
            }
        }
        self.read.remove(0)
    }

    /// Returns the job numbers of the next `count` results, in order of arrival.
    fn results(&mut self, count: usize) -> Vec<u64> {
        let mut result = || {
            let (kind, number, metadata) = self.next();
            assert_eq!(kind, kind::RESULT, "{}", String::from_utf8_lossy(&metadata));
            number
        };
        (0..count).map(|_| result()).collect()
    }

    /// Waits until there are `expected` handler threads.
    fn wait_threads(&self, expected: usize) {
        let began = Instant::now();
        while self.handler_threads() != expected {
            assert!(began.elapsed() < TIMEOUT, "{} handler threads", self.handler_threads());
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }

    fn handler_threads(&self) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // A thread can exit before its name is read.
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name == "handler\n").count()
    }

    /// Waits until the worker has exited.
    fn end(mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < TIMEOUT, "the worker did not exit");
            std::thread::park_timeout(Duration::from_millis(2));
        }
    }
}

fn push_limits(outbox: &mut Outbox, max_in_flight: u32) {
    outbox.push(kind::LIMITS, 0, &Limits { max_in_flight }, &[], Payload::NONE).unwrap();
}

fn push_job(outbox: &mut Outbox, number: u64, operation: &str) {
    let job = Job { operation, tenant: "", remaining_us: 60_000_000 };
    outbox.push(kind::JOB, number, &job, &[], Payload::Copied(b"x")).unwrap();
}

fn push_drain(outbox: &mut Outbox) {
    outbox.push(kind::DRAIN, 0, &Empty, &[], Payload::NONE).unwrap();
}

/// Raises the limit and runs jobs that wait for one another. Then lowers the limit and runs more jobs.
fn check_limits(mut worker: Worker) {
    worker.open(1, |_| {});
    worker.send(|outbox| {
        push_limits(outbox, MEETING_SIZE as u32);
        (1..=MEETING_SIZE as u64).for_each(|number| push_job(outbox, number, "meet"));
    });
    let met: BTreeSet<u64> = worker.results(MEETING_SIZE).into_iter().collect();
    assert_eq!(met, BTreeSet::from([1, 2, 3]));
    worker.wait_threads(MEETING_SIZE);
    worker.send(|outbox| push_limits(outbox, 1));
    worker.wait_threads(1);
    // With a limit of one, the jobs run one after another.
    worker.send(|outbox| (4..=20).for_each(|number| push_job(outbox, number, "")));
    assert_eq!(worker.results(17), Vec::from_iter(4..=20));
    assert_eq!(worker.handler_threads(), 1);
    worker.send(push_drain);
    assert_eq!(worker.end().code(), Some(0));
}

#[test]
fn handler_thread_count_follows_limits() {
    check_limits(Worker::sdk("threads"));
}

#[cfg(feature = "tokio")]
#[test]
fn async_handler_count_follows_limits() {
    check_limits(Worker::sdk("tasks"));
}

#[test]
fn limits_sent_along_with_welcome_take_effect() {
    let mut worker = Worker::sdk("threads");
    worker.open(1, |outbox| push_limits(outbox, MEETING_SIZE as u32));
    worker.send(|outbox| (1..=MEETING_SIZE as u64).for_each(|number| push_job(outbox, number, "meet")));
    assert_eq!(worker.results(MEETING_SIZE).len(), MEETING_SIZE);
}

#[test]
fn limit_changes_during_drain_do_not_lose_jobs() {
    let mut worker = Worker::sdk("threads");
    worker.open(2, |_| {});
    worker.send(|outbox| {
        (1..=MEETING_SIZE as u64).for_each(|number| push_job(outbox, number, "meet"));
        push_drain(outbox);
        push_limits(outbox, 0);
    });
    // Two of the three jobs are running and wait for the third, which needs a third thread.
    worker.send(|outbox| push_limits(outbox, 3));
    assert_eq!(worker.results(MEETING_SIZE).len(), MEETING_SIZE);
    assert_eq!(worker.end().code(), Some(0));
}

#[test]
fn drain_sent_along_with_welcome_takes_effect() {
    let mut worker = Worker::sdk("threads");
    worker.welcome(1, push_drain);
    assert_eq!(worker.end().code(), Some(0));
}

#[cfg(feature = "host")]
#[test]
fn exec_host_follows_limits() {
    let folder = tempfile::tempdir().unwrap();
    // Each program waits until all three programs have started.
    let script = "read -r _; : > \"$FOLDER/$BULKHEAD_JOB\"; set -- \"$FOLDER\"/*; \
                  until [ $# -ge 3 ]; do sleep 0.01; set -- \"$FOLDER\"/*; done";
    let mut worker = Worker::exec_host(script, folder.path().to_str().unwrap());
    worker.open(1, |_| {});
    worker.send(|outbox| {
        push_limits(outbox, 3);
        (1..=3).for_each(|number| push_job(outbox, number, ""));
    });
    assert_eq!(worker.results(3).len(), 3);
    worker.send(|outbox| push_limits(outbox, 1));
    worker.wait_threads(1);
    worker.send(|outbox| push_job(outbox, 4, ""));
    assert_eq!(worker.results(1), [4]);
}

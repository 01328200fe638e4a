//! A storm of events from one bulkhead must not make other events unreadable or unavailable to later readers.

use std::time::Instant;

use bulkhead_client::blocking::Client;
use bulkhead_tests::{Supervisor, heavy, outcome, programs, wait_for};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Number of programs that crash immediately after their start.
const CRASHES: u64 = 800;
const CALLERS: u64 = 8;

/// Rate limit for frequent events, copied from `observe/events.rs`. Consists of a burst size and a number of events
/// per second.
const BURST: u64 = 512;
const PER_SECOND: u64 = 10;

#[test]
fn event_storm_is_rate_limited_and_fully_counted() {
    let _turn = heavy();
    let supervisor = Supervisor::start(
        "[bulkhead.storm]\nexec = [\"sh\", \"-c\", \"kill -9 $$\"]\nmax_in_flight = 8\ndeadline = \"60s\"\n\
         [bulkhead.quiet]\nexec = [\"cat\"]\n",
    );
    supervisor.wait_number("storm", "limit", 8);
    supervisor.resize("quiet", r#"{"max_queue": 7}"#);
    let began = Instant::now();
    let client = Client::connect(supervisor.socket()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..CALLERS {
            scope.spawn(|| {
                for _ in 0..CRASHES / CALLERS {
                    assert_eq!(outcome(&client.job("storm", "").send()), "crashed/signal");
                }
            });
        }
    });
    assert_eq!(supervisor.number("storm", "crashed"), CRASHES);
    let told = wait_for("each crash is reported or counted", || {
        let told = supervisor.events("job_crashed");
        let mut rest = supervisor.events("events_suppressed");
        rest.retain(|event| event["of"] == "job_crashed" && event["bulkhead"] == "storm");
        let suppressed = told.iter().chain(&rest).filter_map(|event| event["suppressed"].as_u64());
        (told.len() as u64 + suppressed.sum::<u64>() == CRASHES).then_some(told.len() as u64)
    });
    // Rounds up, because each second that has begun allows more events.
    let seconds = began.elapsed().as_secs() + 2;
    assert!(told <= BURST + PER_SECOND * seconds, "{told} in {seconds} s");
    let changed = supervisor.events("limits_changed");
    assert_eq!((changed.len(), &changed[0]["bulkhead"]), (1, &"quiet".into()), "{changed:?}");
}

/// Number of events, chosen to exceed the capacity of the channel to the control plane
/// (`supervisor/plane/src/notices.rs`).
const STORM: usize = 17_000;
const AT_ONCE: usize = 250;

/// A stopped thread of another process. Dropping this value lets the thread continue.
struct Stopped(Pid);

impl Stopped {
    fn thread_of(process: u32, name: &str) -> Self {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
        let is_named = |path: &std::path::Path| {
            std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name)
        };
        let thread = threads
            .map(|entry| entry.path())
            .find(|path| is_named(path))
            .expect("the process has this thread");
        let number = thread.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let thread = Pid::from_raw(number);
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = ptrace::detach(self.0, None);
    }
}

/// The control plane is stopped when the events arrive. The descriptors for a new worker's output are therefore
/// still queued.
#[test]
fn event_storm_does_not_lose_output_from_new_workers() {
    let _turn = heavy();
    let hostile = programs().join("hostile");
    let supervisor = Supervisor::start(&format!(
        "[bulkhead.storm]\ncommand = [{hostile:?}]\nmax_in_flight = 8\nmax_queue = 1000\ndeadline = \"60s\"\n\
         [bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n"
    ));
    let client = Client::connect(supervisor.socket()).unwrap();
    let control = Stopped::thread_of(supervisor.pid(), "control");
    for _ in 0..STORM / AT_ONCE {
        // Each job produces one event, because a child process of the worker makes a forbidden system call.
        let jobs: Vec<_> = (0..AT_ONCE)
            .map(|_| client.job("storm", "{}").operation("load-bpf-in-a-child").start().unwrap())
            .collect();
        jobs.into_iter().for_each(|job| drop(job.wait().unwrap()));
    }
    assert_eq!(outcome(&client.job("b", "").operation("abort").send()), "crashed/signal");
    let said = client.job("b", "still heard").operation("say").send();
    assert_eq!(said.map_err(|error| error.to_string()).unwrap().payload(), b"said");
    drop(control);
    wait_for("the output is read", || supervisor.log().contains("still heard").then_some(()));
}

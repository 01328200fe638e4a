//! A worker that misbehaves on request. Without arguments, it uses the SDK, and the operation selects the
//! misbehaviour. With `raw MODE`, it implements the protocol without the SDK and violates the protocol.

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bulkhead_shared::client_protocol::{Hello, role};
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Scratch};
use bulkhead_shared::crash_record;
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::worker_protocol::{self, Empty, LINK_VARIABLE, Status, WorkerWelcome, capability};
use bulkhead_worker::{Ctx, Fault, HandlerError, Job, Server};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => Server::new()
            .handler(misbehave)
            .async_operation("async-sleep", async |job, _| {
                tokio::time::sleep(Duration::from_millis(number(job))).await;
                Ok("slept")
            })
            .serve(),
        ["registers-twice"] => {
            Server::new().operation("turn", |_, _| Ok("left")).operation("turn", |_, _| Ok("right")).serve()
        }
        ["exit-at-start"] => ExitCode::from(3),
        ["hang-at-start"] => forever(),
        ["init-fails"] => Server::new()
            .init(|_| Err::<(), _>(HandlerError::new("no_model", "the model file is missing")))
            .handler(|_: &Job, _: &Ctx<()>| Ok(Vec::new()))
            .serve(),
        ["init-hangs", "extends"] => Server::new()
            .init(|start| -> Result<(), HandlerError> {
                start.extend(Duration::MAX);
                forever()
            })
            .handler(|_: &Job, _: &Ctx<()>| Ok(Vec::new()))
            .serve(),
        ["init-hangs"] => Server::new()
            .init(|_| -> Result<(), HandlerError> { forever() })
            .handler(|_: &Job, _: &Ctx<()>| Ok(Vec::new()))
            .serve(),
        // The first process becomes ready immediately. Later processes become ready when the file `go` exists.
        ["slow-again", once] => {
            let once = once.to_owned();
            Server::new()
                .init(move |_| -> Result<(), HandlerError> {
                    if !count_up(&once).is_ok_and(|before| before == 0) {
                        wait_for_file("go", || false);
                    }
                    Ok(())
                })
                .handler(|job: &Job, ctx: &Ctx<()>| match ctx.operation().strip_prefix("steps:") {
                    Some(steps) => take_steps(steps, job, ctx.traceparent(), || ctx.is_cancelled()),
                    None => Ok(job.payload().to_vec()),
                })
                .serve()
        }
        ["forked"] => forked(None, u32::MAX),
        ["forked", "threads"] => forked(Some("left-behind"), u32::MAX),
        ["forked", "twice"] => forked(None, 2),
        ["forked", "stray"] => forked_stray(),
        ["raw", "hoard"] => hoard(),
        ["raw", "liar"] => liar(),
        ["raw", "scribbler"] => scribbler(),
        ["raw", "beater"] => beater(),
        ["raw", mode] => raw(mode),
        _ => ExitCode::from(2),
    }
}

/// Runs a template. The `who` operation returns the PIDs of the template and of the worker that handles the job. After
/// `forks_max` forks, a process limit makes all further forks fail.
fn forked(thread: Option<&'static str>, forks_max: u32) -> ExitCode {
    Server::new()
        .init(move |start| {
            start.status("initialises");
            if let Some(name) = thread {
                let (runs, is_running) = std::sync::mpsc::channel();
                std::thread::Builder::new().name(name.into()).spawn(move || {
                    let _ = runs.send(());
                    forever()
                })?;
                // A new thread sets its own name. Waits until the name is set.
                let _ = is_running.recv();
            }
            Ok::<_, HandlerError>((std::process::id(), 0))
        })
        .before_fork(move |(_, forks)| {
            *forks += 1;
            if *forks > forks_max {
                setrlimit(Resource::RLIMIT_NPROC, 1, 1).expect("less is always allowed");
            }
        })
        .after_fork(
            |(_, forks), _| if *forks > 0 { Ok(()) } else { Err(HandlerError::new("hook", "not called")) },
        )
        .operation("who", |_, ctx| {
            // SAFETY: no other thread of this process calls `rand`.
            #[expect(unsafe_code, reason = "uses the C library's random numbers")]
            let drawn = unsafe { libc::rand() };
            Ok(format!("{} {} {drawn}", ctx.state().0, std::process::id()))
        })
        .operation("leave", |_, _| {
            let script = "setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo $!";
            let output =
                Command::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin").output()?;
            Ok::<_, HandlerError>(output.stdout)
        })
        .operation("sleep", |job, _| {
            std::thread::sleep(Duration::from_millis(number(job)));
            Ok::<_, HandlerError>("slept")
        })
        .operation("attributes", |_, _| Ok::<_, HandlerError>(attributes()))
        .operation("alter-template", |_, ctx| {
            alter(ctx.state().0);
            Ok::<_, HandlerError>(attributes())
        })
        .operation("chains", |job, _| {
            leave_chains(number(job));
            Ok::<_, HandlerError>("left")
        })
        .handler(|job, _| Ok(job.payload().to_vec()))
        .serve()
}

/// Returns attributes that a worker inherits from its template and that another process could have changed in
/// the template.
fn attributes() -> String {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let status = read("status");
    let processors = status.lines().find(|line| line.starts_with("Cpus_allowed_list")).unwrap_or_default();
    // SAFETY: both calls only return numbers.
    #[expect(unsafe_code, reason = "these calls have no safe form")]
    let (nice, io) =
        unsafe { (libc::getpriority(libc::PRIO_PROCESS, 0), libc::syscall(libc::SYS_ioprio_get, 1, 0)) };
    let rest = ["limits", "oom_score_adj", "timerslack_ns"].map(read).join("");
    format!("{processors}\nnice {nice}\nI/O {io}\n{rest}")
}

/// Tries to change the [`attributes`] of another process. Ignores errors.
#[expect(unsafe_code, reason = "these calls have no safe form for another process")]
fn alter(pid: u32) {
    let first = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap();
    let first = (0..nix::sched::CpuSet::count()).find(|&cpu| first.is_set(cpu).unwrap()).unwrap();
    let mut one = nix::sched::CpuSet::new();
    one.set(first).unwrap();
    let _ = nix::sched::sched_setaffinity(Pid::from_raw(pid as i32), &one);
    const IDLE: libc::c_int = 3 << 13;
    let files = libc::rlimit64 { rlim_cur: 99, rlim_max: 99 };
    // SAFETY: the structure outlives the call.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, pid, 5);
        libc::syscall(libc::SYS_ioprio_set, 1, pid, IDLE);
        libc::syscall(libc::SYS_prlimit64, pid, libc::RLIMIT_NOFILE, &raw const files, 0);
    }
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), "900");
    let _ = std::fs::write(format!("/proc/{pid}/timerslack_ns"), "77000");
}

/// Time after which the process chains created by [`leave_chains`] exit on their own.
const CHAINS_MAX: Duration = Duration::from_secs(20);

/// Leaves chains of processes behind. Each process in a chain forks a successor and exits.
#[expect(unsafe_code, reason = "fork")]
fn leave_chains(count: u64) {
    let end = Instant::now() + CHAINS_MAX;
    // SAFETY: only changes which process adopts this process's orphans.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) };
    for _ in 0..count {
        // SAFETY: the child makes only system calls.
        if unsafe { libc::fork() } == 0 {
            // SAFETY: only system calls.
            unsafe {
                libc::setsid();
                while Instant::now() < end {
                    if libc::fork() > 0 {
                        break;
                    }
                }
                libc::_exit(0)
            }
        }
    }
}

/// Runs a worker that forks a child in `init` and in a handler. In the child, both functions return normally instead of
/// exiting.
fn forked_stray() -> ExitCode {
    Server::new()
        .init(|_| Ok::<_, HandlerError>(fork_stray()))
        .operation("template", |_, ctx| Ok(ctx.state().clone()))
        .operation("worker", |_, _| Ok(fork_stray()))
        .operation("who", |_, _| Ok(std::process::id().to_string()))
        .serve()
}

/// Forks a child and returns in both processes. The parent waits for the child and returns the result of the wait.
fn fork_stray() -> String {
    // SAFETY: the child only does what the SDK does when a handler returns.
    #[expect(unsafe_code, reason = "fork(2) has no safe form")]
    match unsafe { nix::unistd::fork() }.expect("a child") {
        nix::unistd::ForkResult::Child => {
            nix::unistd::alarm::set(60);
            "child".into()
        }
        nix::unistd::ForkResult::Parent { child } => {
            format!("{:?}", nix::sys::wait::waitpid(child, None).map(|status| status.pid().is_some()))
        }
    }
}

fn forever() -> ! {
    loop {
        std::thread::park();
    }
}

fn number(job: &Job) -> u64 {
    std::str::from_utf8(job.payload()).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn shell(script: &str) {
    let _ = Command::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin").status();
}

fn die_later(after: Duration, how: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        std::thread::sleep(after);
        how();
    });
}

/// Appends text to a file.
fn append(path: &str, text: &str) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(text.as_bytes())
}

fn count_up(path: &str) -> std::io::Result<u64> {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(b".")?;
    Ok(file.metadata()?.len() - 1)
}

fn wait_for_file(path: &str, is_over: impl Fn() -> bool) {
    while !std::path::Path::new(path).exists() && !is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Number of jobs that this process is running.
static RUNNING: AtomicU32 = AtomicU32::new(0);

struct Running;

impl Running {
    fn begin() -> Self {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs the steps of an operation. The steps are separated by semicolons.
fn take_steps(
    steps: &str,
    job: &Job,
    trace: Option<&str>,
    is_cancelled: impl Fn() -> bool,
) -> Result<Vec<u8>, HandlerError> {
    let mut answer = b"done".to_vec();
    for step in steps.split(';') {
        match step.split(' ').collect::<Vec<_>>()[..] {
            // Aborts the worker for the first `count` jobs, which are counted in a file.
            ["die-first", count, path] => {
                if count_up(path)? < count.parse().unwrap_or(0) {
                    std::process::abort();
                }
            }
            // Stops the whole worker process for the first `count` jobs, so that it reads nothing.
            ["freeze-first", count, path] => {
                if count_up(path)? < count.parse().unwrap_or(0) {
                    kill(Pid::this(), Signal::SIGSTOP)?;
                    forever();
                }
            }
            ["die-on", payload] if payload.as_bytes() == job.payload() => std::process::abort(),
            ["die-on", _] => {}
            ["die"] => std::process::abort(),
            ["count", path] => drop(count_up(path)?),
            // Appends the trace context to a file.
            ["trace", path] => append(path, &format!("{}\n", trace.unwrap_or("none")))?,
            // Records the beginning and end of a job that takes `ms` milliseconds.
            ["ledger", path, ms, id] => {
                append(path, &format!("begin {id}\n"))?;
                std::thread::sleep(Duration::from_millis(ms.parse().unwrap_or(0)));
                append(path, &format!("end {id}\n"))?;
            }
            // Waits for a file whose name contains this process's PID.
            ["wait-own"] => wait_for_file(&format!("end-{}", std::process::id()), &is_cancelled),
            ["wait", path] => wait_for_file(path, &is_cancelled),
            ["sleep", ms] => std::thread::sleep(Duration::from_millis(ms.parse().unwrap_or(0))),
            // Returns the place where the payload was stored, and the sum of the payload's bytes.
            ["sum"] => {
                let place = if job.mapped_payload().is_some() { "file" } else { "bytes" };
                let sum: u64 = job.payload().iter().map(|byte| u64::from(*byte)).sum();
                answer = format!("{place} {sum}").into_bytes();
            }
            ["echo"] => answer = job.payload().to_vec(),
            ["pid"] => answer = std::process::id().to_string().into_bytes(),
            // Returns the peak number of concurrent jobs in this process during `ms` milliseconds.
            ["peak", ms] => {
                let until = Instant::now() + Duration::from_millis(ms.parse().unwrap_or(0));
                let mut peak = RUNNING.load(Ordering::SeqCst);
                while Instant::now() < until {
                    std::thread::yield_now();
                    peak = peak.max(RUNNING.load(Ordering::SeqCst));
                }
                answer = peak.to_string().into_bytes();
            }
            _ => return Err(HandlerError::new("unknown_step", step)),
        }
    }
    Ok(answer)
}

fn misbehave(job: &Job, ctx: &Ctx) -> Result<Vec<u8>, HandlerError> {
    let _running = Running::begin();
    if let Some(steps) = ctx.operation().strip_prefix("steps:") {
        return take_steps(steps, job, ctx.traceparent(), || ctx.is_cancelled());
    }
    match ctx.operation() {
        "" | "echo" => return Ok(job.payload().to_vec()),
        "trace" => return Ok(ctx.traceparent().unwrap_or("none").into()),
        "where" => return Ok(if job.mapped_payload().is_some() { "file" } else { "bytes" }.into()),
        // Inverts the payload's bytes, in place if possible.
        "invert" => {
            let place = job.mapped_payload().and_then(|payload| job.result_in_place(payload.len()));
            if let (Some(payload), Some(mut result)) = (job.mapped_payload(), place) {
                payload.read(0, &mut result);
                result.iter_mut().for_each(|byte| *byte = !*byte);
                result.finish();
                return Ok(Vec::new());
            }
            return Ok(job.payload().iter().map(|byte| !byte).collect());
        }
        "die-if-file" => {
            if job.mapped_payload().is_some() {
                std::process::abort();
            }
            return Ok(job.payload().to_vec());
        }
        // Removes the file that the payload names, and aborts. Succeeds if the file does not exist.
        "die-once" => {
            if std::fs::remove_file(&*String::from_utf8_lossy(job.payload())).is_ok() {
                std::process::abort();
            }
        }
        "pid" => return Ok(std::process::id().to_string().into_bytes()),
        "sleep" => std::thread::sleep(Duration::from_millis(number(job))),
        // Returns when the job is cancelled.
        "yield" => {
            while !ctx.is_cancelled() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return Err(HandlerError::new("cancelled", "told to stop"));
        }
        "hang" => {
            ctx.progress(0.0, "about to hang");
            forever();
        }
        "spin" => loop {
            std::hint::spin_loop();
        },
        "stop" => {
            kill(Pid::this(), Signal::SIGSTOP)?;
            forever();
        }
        // Rust's handler mistakes the first SIGSEGV for a stack overflow and then removes itself.
        "segv" => loop {
            raise(Signal::SIGSEGV)?;
        },
        "abort" => std::process::abort(),
        "panic-in-c" => panic_in_c(),
        "unrecorded-segv" => die_without_record()?,
        "forged-record" => {
            forge_record()?;
            die_without_record()?;
        }
        "exit" => std::process::exit(i32::try_from(number(job)).unwrap_or(1)),
        "panic" => panic!("a handler panicked"),
        "say" => {
            use std::io::Write;
            writeln!(std::io::stdout(), "{}", String::from_utf8_lossy(job.payload()))?;
            writeln!(std::io::stderr(), "{}", String::from_utf8_lossy(job.payload()))?;
            return Ok(b"said".to_vec());
        }
        "fail" => {
            return Err(HandlerError {
                code: "bad_input".into(),
                message: "the input is bad".into(),
                retryable: false,
                fault: Fault::Caller,
            });
        }
        "big" => return Ok(vec![b'x'; usize::try_from(number(job)).unwrap_or(0)]),
        // Aborts the worker while its large result is being sent.
        "die-answering" => {
            die_later(Duration::from_millis(2), || std::process::abort());
            return Ok(vec![b'x'; 32 << 20]);
        }
        "flood" => {
            let line = format!("{}\n", "flood ".repeat(100));
            for _ in 0..number(job) {
                eprint!("{line}");
            }
        }
        // Leaks memory. The payload is the amount in MiB.
        "hoard" => {
            let bytes = usize::try_from(number(job)).unwrap_or(0) << 20;
            std::mem::forget(vec![1_u8; bytes]);
            std::thread::sleep(Duration::from_millis(20));
        }
        "leak" => {
            let mut kept = Vec::new();
            loop {
                kept.push(vec![1_u8; 1 << 20]);
                if ctx.is_cancelled() {
                    break;
                }
            }
        }
        "threads" => {
            let wanted = number(job);
            let started =
                (0..wanted).map_while(|_| std::thread::Builder::new().spawn(std::thread::park).ok()).count();
            return Ok(started.to_string().into_bytes());
        }
        // Starts a process tree that tries to outlive the worker. The payload marks the command lines of the
        // tree's processes.
        "tree" => {
            let marker = String::from_utf8_lossy(job.payload()).into_owned();
            shell(&format!(
                "trap '' TERM INT HUP; (setsid sh -c 'sleep 1000 # {marker}' &) ; \
                 (sh -c 'trap \"\" TERM; sleep 1000 # {marker}; :' &) ; \
                 setsid sh -c '(sh -c \"sleep 1000 # {marker}; :\" &)' ; true"
            ));
            forever();
        }
        // Sends SIGKILL to the PIDs in the payload.
        "kill" => {
            for pid in String::from_utf8_lossy(job.payload()).split_whitespace() {
                let pid = pid.parse().map_err(|_| HandlerError::new("no_pid", pid))?;
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        // Writes `+` to a file at the beginning and `-` at the end, so that the number of concurrent jobs can
        // be computed.
        "mark" => {
            use std::io::Write;
            let path = String::from_utf8_lossy(job.payload()).into_owned();
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
            file.write_all(b"+")?;
            std::thread::sleep(Duration::from_millis(200));
            file.write_all(b"-")?;
        }
        "progress" => {
            for step in 1..=4 {
                ctx.progress(step as f32 / 4.0, &format!("step {step}"));
                // The pause is long enough for the client to receive each report.
                std::thread::sleep(Duration::from_millis(110));
            }
        }
        "progress-often" => {
            for step in 1..=20_000 {
                ctx.progress(step as f32 / 20_000.0, &format!("step {step}"));
            }
        }
        // Reports progress twice, then nothing until the file named in the payload exists.
        "progress-and-wait" => {
            ctx.progress(0.5, "first");
            ctx.progress(0.6, "second");
            let path = String::from_utf8_lossy(job.payload()).into_owned();
            wait_for_file(&path, || ctx.is_cancelled());
        }
        // Stops the process whose PID is the payload.
        "freeze" => kill(Pid::from_raw(number(job) as i32), Signal::SIGSTOP)?,
        other => return Err(HandlerError::new("unknown_operation", other)),
    }
    Ok(b"done".to_vec())
}

// Workers that implement the protocol without the SDK.

struct Raw {
    socket: UnixStream,
    inbox: Inbox,
    scratch: Scratch,
    /// Jobs that have not been processed yet, each with its number and operation.
    jobs: std::collections::VecDeque<(u64, String)>,
}

fn raw(mode: &str) -> ExitCode {
    if mode == "never-hello" {
        forever();
    }
    let mut raw = Raw::by_hand();
    if mode == "text-first" {
        raw.bytes(b"GET / HTTP/1.1\r\n");
        forever();
    }
    if mode == "rubbish-first" {
        raw.bytes(&[0xa5; 4096]);
        forever();
    }
    let version = if mode == "wrong-version" { 99 } else { 1 };
    raw.hello(version);
    if mode == "wrong-version" {
        forever();
    }
    raw.next();
    raw.send(kind::READY, 0, b"");
    loop {
        let job = raw.next();
        raw.misbehave(mode, job);
    }
}

/// Runs a worker that cannot be resized and that answers no jobs until the file `go` exists. The result of each job is
/// the largest number of jobs that the worker had at once. Creates the file `too-many` if the worker receives more jobs
/// than the welcome allows, and the file `told` if it receives a LIMITS frame.
fn hoard() -> ExitCode {
    use std::os::fd::AsFd;
    let mut raw = Raw::by_hand();
    raw.hello(1);
    let (mut allowed, mut jobs, mut peak, mut is_draining) = (u32::MAX, Vec::new(), 0, false);
    loop {
        let mut poll = [nix::poll::PollFd::new(raw.socket.as_fd(), nix::poll::PollFlags::POLLIN)];
        let _ = nix::poll::poll(&mut poll, nix::poll::PollTimeout::from(2_u8));
        let mut is_welcome = false;
        if poll[0].any() == Some(true) {
            let Ok((received, mut batch)) = raw.inbox.receive(&raw.socket, &mut raw.scratch) else {
                return ExitCode::SUCCESS;
            };
            while let Ok(Some(item)) = batch.next() {
                let Item::Frame { header, metadata, .. } = item else { continue };
                match header.kind {
                    kind::WORKER_WELCOME => {
                        let welcome = bulkhead_shared::codec::decode::<WorkerWelcome<'_>>(metadata, &[]);
                        allowed = welcome.map_or(0, |(welcome, _)| welcome.max_in_flight);
                        is_welcome = true;
                    }
                    kind::JOB => jobs.push(header.number),
                    kind::CANCEL_JOB => {}
                    kind::LIMITS => drop(count_up("told")),
                    kind::DRAIN => is_draining = true,
                    _ => {}
                }
            }
            if received == bulkhead_shared::connection::Received::Closed {
                return ExitCode::SUCCESS;
            }
        }
        if is_welcome {
            raw.send(kind::READY, 0, b"");
        }
        peak = jobs.len().max(peak);
        if jobs.len() > allowed as usize {
            let _ = count_up("too-many");
        }
        if std::path::Path::new("go").exists() {
            for job in jobs.drain(..) {
                raw.send(kind::RESULT, job, peak.to_string().as_bytes());
            }
        }
        if is_draining && jobs.is_empty() {
            return ExitCode::SUCCESS;
        }
    }
}

/// Capabilities that a worker needs to receive prefetched jobs.
const LOOKS_AHEAD: u64 = capability::RESIZE | capability::PREFETCH;

/// Runs a worker that immediately replies to every job, except for three operations. For `lie`, the worker sends a
/// result for the next job instead. For `ignore`, the worker begins the job and then stops reading, replying and
/// sending heartbeats. For the first `ignore all`, the worker stops without even beginning the job.
fn liar() -> ExitCode {
    let mut raw = Raw::by_hand();
    raw.hello_as(1, LOOKS_AHEAD);
    let journal = std::fs::File::from(raw.lent().expect("a journal"));
    raw.next();
    raw.send(kind::READY, 0, b"");
    let mut arrival = 0_u64;
    loop {
        let (mut job, operation) = raw.next_job();
        arrival += 1;
        if operation == "ignore all" && matches!(count_up("ignores"), Ok(0)) {
            forever();
        }
        if !raw.begin(&journal, job, arrival) {
            continue;
        }
        if operation == "ignore" {
            let _ = count_up("ignores");
            forever();
        }
        if operation == "lie" {
            job = raw.next_job().0;
        }
        raw.send(kind::RESULT, job, b"done");
    }
}

/// Runs a worker that immediately replies to every job, except for two operations. For `scribble garbage`, the worker
/// writes garbage into its journal and dies. For `scribble results`, the worker writes results for other jobs into the
/// journal, followed by a result for this job, and dies.
fn scribbler() -> ExitCode {
    use std::os::unix::fs::FileExt;
    let mut raw = Raw::by_hand();
    raw.hello_as(1, LOOKS_AHEAD);
    let journal = std::fs::File::from(raw.lent().expect("a journal"));
    raw.next();
    raw.send(kind::READY, 0, b"");
    let mut begun = 0_u64;
    loop {
        let (job, operation) = raw.next_job();
        begun += 1;
        journal.write_all_at(&begun.to_le_bytes(), 8).expect("a journal is writable");
        let frames = match operation.as_str() {
            "scribble garbage" => vec![0xa5; 60_000],
            "scribble results" => {
                let mut frames = Vec::new();
                for number in [0, u64::MAX, job + (1 << 24), job, job] {
                    let header =
                        Header { length: 12, kind: kind::RESULT, flags: 0, metadata_length: 8, number };
                    frames.extend_from_slice(&header.encode());
                    frames.extend_from_slice(b"\0\0\0\0\0\0\0\0mine");
                }
                frames
            }
            _ => {
                raw.send(kind::RESULT, job, b"done");
                continue;
            }
        };
        let length = if operation.ends_with("garbage") { u64::MAX } else { frames.len() as u64 };
        journal.write_all_at(&length.to_le_bytes(), 0).expect("a journal is writable");
        let begun = if operation.ends_with("garbage") { u64::MAX } else { begun };
        journal.write_all_at(&begun.to_le_bytes(), 8).expect("a journal is writable");
        journal.write_all_at(&frames, 64).expect("a journal is writable");
        assert!(
            journal.set_len(0).is_err() && journal.set_len(1 << 30).is_err(),
            "the size of the journal is sealed"
        );
        std::process::abort();
    }
}

/// Runs a worker that writes heartbeats to its journal until the file `still` exists.
fn beater() -> ExitCode {
    use std::os::unix::fs::FileExt;
    let mut raw = Raw::by_hand();
    raw.hello_as(1, LOOKS_AHEAD | capability::DISPATCH_THREAD | capability::JOURNAL_HEARTBEATS);
    let journal = std::fs::File::from(raw.lent().expect("a journal"));
    raw.next();
    raw.send(kind::READY, 0, b"");
    loop {
        if !std::path::Path::new("still").exists() {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
            journal.write_all_at(&now.to_le_bytes(), 16).expect("a journal is writable");
            let _ = count_up("beats");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Raw {
    /// Claims a job in the journal. Returns false if the job was recalled.
    fn begin(&mut self, journal: &std::fs::File, job: u64, arrival: u64) -> bool {
        use std::os::unix::fs::FileExt;
        let is_taken = || {
            let mut bytes = [0; 8];
            journal.read_exact_at(&mut bytes, 24).expect("a journal is readable");
            u64::from_le_bytes(bytes) >= arrival
        };
        if is_taken() {
            self.send(kind::HEARTBEAT, 0, b"");
            return false;
        }
        journal.write_all_at(&arrival.to_le_bytes(), 8).expect("a journal is writable");
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        if is_taken() {
            let mut outbox = Outbox::default();
            let extension = (bulkhead_shared::codec::tag::ARRIVAL, &arrival.to_le_bytes()[..]);
            outbox
                .push(kind::RETURNED, job, &Empty, &[extension], Payload::NONE)
                .expect("the message fits into a frame");
            let _ = outbox.flush(&self.socket, &mut BufferPool::default());
            return false;
        }
        true
    }

    /// Receives the descriptor of the journal, which is sent before the welcome frame.
    fn lent(&mut self) -> Option<OwnedFd> {
        use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
        let (mut frame, mut space) =
            ([0; 24], [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [std::io::IoSliceMut::new(&mut frame)];
        rustix::net::recvmsg(&self.socket, &mut buffers, &mut control, RecvFlags::WAITALL).ok()?;
        control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        })
    }

    fn by_hand() -> Self {
        let fd = std::env::var(LINK_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(-1);
        #[expect(unsafe_code, reason = "takes over an inherited descriptor")]
        // SAFETY: the supervisor passed this descriptor, and nothing else in this process uses it.
        let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(fd) });
        let jobs = std::collections::VecDeque::new();
        Self { socket, inbox: Inbox::default(), scratch: Scratch::default(), jobs }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        use std::io::Write;
        if self.socket.write_all(bytes).is_err() {
            std::process::exit(0);
        }
    }

    fn frame(&mut self, kind: u8, number: u64, message: &impl bincode::Encode, payload: &[u8]) {
        let mut outbox = Outbox::default();
        outbox
            .push(kind, number, message, &[], Payload::Copied(payload))
            .expect("the message fits into a frame");
        if outbox.flush(&self.socket, &mut BufferPool::default()).is_err() {
            std::process::exit(0);
        }
    }

    fn send(&mut self, kind: u8, number: u64, payload: &[u8]) {
        self.frame(kind, number, &Empty, payload);
    }

    fn hello(&mut self, version: u16) {
        self.hello_as(version, 0);
    }

    fn hello_as(&mut self, version: u16, capabilities: u64) {
        let hello = Hello {
            version_min: version,
            version_max: version,
            role: role::WORKER,
            frame_bytes_max: u32::MAX,
            capabilities,
            name: "misbehave",
            version: "0",
        };
        self.frame(kind::HELLO, MAGIC, &hello, b"");
    }

    /// Waits for the next job frame or welcome frame. Returns the number of the frame.
    fn next(&mut self) -> u64 {
        self.next_job().0
    }

    /// Waits for the next job frame or welcome frame. Returns the number of the frame and the operation.
    fn next_job(&mut self) -> (u64, String) {
        use std::os::fd::AsFd;
        loop {
            if let Some(job) = self.jobs.pop_front() {
                return job;
            }
            let mut poll = [nix::poll::PollFd::new(self.socket.as_fd(), nix::poll::PollFlags::POLLIN)];
            let _ = nix::poll::poll(&mut poll, nix::poll::PollTimeout::NONE);
            let Ok((received, mut batch)) = self.inbox.receive(&self.socket, &mut self.scratch) else {
                std::process::exit(0);
            };
            while let Ok(Some(item)) = batch.next() {
                let Item::Frame { header, metadata, .. } = item else { continue };
                if matches!(header.kind, kind::JOB | kind::WORKER_WELCOME) {
                    let job = bulkhead_shared::codec::decode::<worker_protocol::Job<'_>>(metadata, &[]);
                    let operation = job.map_or_else(|_| String::new(), |(job, _)| job.operation.to_owned());
                    self.jobs.push_back((header.number, operation));
                }
            }
            if received == bulkhead_shared::connection::Received::Closed {
                std::process::exit(0);
            }
        }
    }

    fn misbehave(&mut self, mode: &str, job: u64) {
        match mode {
            "rubbish" => self.bytes(&[0xa5; 65_536]),
            "text" => self.bytes(b"hello world, this is not a frame\n"),
            "huge" => {
                let header = Header {
                    length: u32::MAX,
                    kind: kind::RESULT,
                    flags: 0,
                    metadata_length: 8,
                    number: job,
                };
                self.bytes(&header.encode());
                self.bytes(&[0; 8]);
                self.bytes(&[0; 1 << 20]);
            }
            "half-answer" => {
                let header =
                    Header { length: 1 << 20, kind: kind::RESULT, flags: 0, metadata_length: 8, number: job };
                self.bytes(&header.encode()[..HEADER_BYTES]);
                self.bytes(&[0; 8]);
                self.bytes(&[7; 100_000]);
                std::process::abort();
            }
            "twice" => {
                self.send(kind::RESULT, job, b"first");
                self.send(kind::RESULT, job, b"second");
            }
            "stranger" => {
                self.send(kind::RESULT, job + (1 << 24), b"not yours");
                self.send(kind::RESULT, 0, b"nobody's");
                self.send(kind::RESULT, job, b"yours");
            }
            "reply-and-die" => {
                self.send(kind::RESULT, job, b"my last words");
                std::process::abort();
            }
            "close" => {
                let _ = self.socket.shutdown(std::net::Shutdown::Both);
                forever();
            }
            "hello-twice" => self.hello(1),
            "bad-metadata" => {
                self.frame(kind::FAILED, job, &Status { text: "not what a failure looks like" }, b"");
            }
            _ => self.send(kind::RESULT, job, b"well"),
        }
    }
}

/// Panics in a function that cannot unwind, so that the process aborts.
#[inline(never)]
extern "C" fn panic_in_c() {
    panic!("a function called from C panicked");
}

/// Restores the default action of SIGSEGV and raises this signal.
fn die_without_record() -> Result<(), HandlerError> {
    #[expect(unsafe_code, reason = "sets the disposition of a signal")]
    // SAFETY: no handler function is installed.
    unsafe { nix::sys::signal::signal(Signal::SIGSEGV, nix::sys::signal::SigHandler::SigDfl) }?;
    raise(Signal::SIGSEGV)?;
    Ok(())
}

/// Writes a crash record with random registers and a random stack. The mapped files are not programs.
fn forge_record() -> Result<(), HandlerError> {
    use std::hash::{BuildHasher, Hasher, RandomState};
    use std::os::unix::fs::{FileExt, MetadataExt};
    let random = || RandomState::new().build_hasher().finish();
    let is_journal = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().contains("memfd:journal"))
    };
    let journal = std::fs::read_dir("/proc/self/fd")?.flatten().find(is_journal);
    let journal = std::fs::File::options()
        .write(true)
        .open(journal.ok_or(std::io::Error::from(std::io::ErrorKind::NotFound))?.path())?;
    let fifo = std::env::temp_dir().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)?;
    let own = std::env::current_exe()?;
    let mut maps = String::new();
    for (index, path) in
        ["/etc/passwd".as_ref(), fifo.as_path(), "/dev/zero".as_ref(), &own].into_iter().enumerate()
    {
        let found = std::fs::metadata(path)?;
        let (start, device) = (0x10_0000 * index, found.dev());
        let (major, minor) = (libc::major(device), libc::minor(device));
        maps += &format!(
            "{start:x}-{:x} r-xp {:08x} {major:02x}:{minor:02x} {} {}\n",
            start + 0x10_0000,
            random() % 0x10_0000,
            found.ino(),
            path.display()
        );
    }
    let stack: Vec<u8> = (0..1000).flat_map(|_| (random() % 0x40_0000).to_le_bytes()).collect();
    let header = crash_record::Header {
        machine: crash_record::MACHINE,
        signal: libc::SIGSEGV,
        code: random() as i32,
        thread: random() as u32,
        address: random(),
        maps_bytes: maps.len() as u32,
        stack_bytes: stack.len() as u32,
        stack_start: 0x1000,
        registers: std::array::from_fn(|_| random() % 0x40_0000),
        ..crash_record::Header::EMPTY
    };
    let mut bytes = [0; crash_record::HEADER_BYTES];
    header.encode(&mut bytes);
    let start = crash_record::RECORD_OFFSET as u64;
    journal.write_all_at(maps.as_bytes(), start + crash_record::MAPS_OFFSET as u64)?;
    journal.write_all_at(&stack, start + crash_record::STACK_OFFSET as u64)?;
    Ok(journal.write_all_at(&bytes, start)?)
}

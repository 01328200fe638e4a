//! An application with an embedded supervisor. The same program also runs as the supervisor's keeper. The first
//! argument selects the scenario. Each scenario runs in its own folder, and the `MISBEHAVE` environment variable names
//! the worker's program. Panics on any failure.

use std::io::{BufRead, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_client::{Executed, JobError, Reply};
use bulkhead_supervisor::{
    KeeperProgram, LocalSupervisor, StartError, Supervisor, config, keeper_main_if_asked,
};
use bulkhead_tests::attempts::{ATTEMPTS, KERNELS_OWN, Setting};
use bulkhead_tests::confined::Ended;
use bulkhead_tests::{
    PATIENCE, descriptors, is_alive, kill_pid, name, outcome, refuses_descriptors, run, wait_for,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var_os("FORGETS").is_none() {
        keeper_main_if_asked();
    }
    // This timeout is longer than any wait in a scenario, but shorter than the time limit of the test that reports the
    // failure.
    nix::unistd::alarm::set(5 * 60);
    match arguments.first().map(String::as_str) {
        Some("jobs") => jobs(),
        Some("lends-files") => lends_files(),
        Some("admission") => admission(),
        Some("is-killed") => is_killed(),
        Some("waits-for-all") => waits_for_all(),
        Some("keeps-its-own") => keeps_its_own(),
        Some("loses-its-keeper") => loses_its_keeper(),
        Some("loses-starting-keepers") => loses_starting_keepers(),
        Some("loses-all-keepers") => on_this_thread(loses_all_keepers()),
        Some("holds") => holds(),
        Some("attempts") => attempts(&arguments[1]),
        Some("backtrace") => backtrace(),
        Some("two") => two(),
        Some("refused") => refused(),
        Some("relative-paths") => relative_paths(),
        Some("forgets") => forgets(),
        Some("drains") => drains(),
        Some("async") => run(in_a_runtime()),
        Some("local") => on_this_thread(local()),
        Some("local-ends") => on_this_thread(local_ends()),
        Some("local-limits-files") => on_this_thread(local_limits_files()),
        Some("local-holds") => on_this_thread(local_holds()),
        Some("local-goes-on") => local_goes_on(),
        Some("local-polled-once") => on_this_thread(local_polled_once()),
        Some("ends-for-good") => ends_for_good(),
        Some("local-is-told") => on_this_thread(local_is_told()),
        Some("is-told") => is_told(),
        Some("after") => after(&arguments[1], &arguments[2]),
        Some("local-is-killed") => on_this_thread(local_is_killed()),
        Some("adopts") => adopts(),
        Some("forks") => forks(),
        Some("leaves-a-fork") => leaves_a_fork(),
        other => panic!("{other:?}"),
    }
    println!("done");
}

/// Returns a configuration with a single bulkhead `a` and the given additional keys.
fn settings(supervisor_keys: &str, keys: &str) -> config::Config {
    let worker = std::env::var("MISBEHAVE").unwrap();
    let text = format!(
        "[supervisor]\n{supervisor_keys}\n[defaults.sandbox]\nprofile = \"none\"\n\
         [bulkhead.a]\ncommand = [\"{worker}\"]\n{keys}\n"
    );
    config::parse_embedded(&text, Path::new("workers.toml")).unwrap_or_else(|errors| panic!("{errors}"))
}

fn start(keys: &str) -> (Supervisor, Client) {
    let supervisor = Supervisor::start_blocking(settings("drain_timeout = \"20s\"", keys)).unwrap();
    let client = supervisor.blocking_client().unwrap();
    (supervisor, client)
}

fn send(client: &Client, operation: &str, payload: &str) -> Result<Reply, JobError> {
    client.job("a", payload).operation(operation).deadline(Duration::from_secs(30)).send()
}

fn number(client: &Client, operation: &str) -> u32 {
    let reply = send(client, operation, "").unwrap();
    std::str::from_utf8(reply.payload()).unwrap().parse().unwrap()
}

fn parent(pid: u32) -> u32 {
    bulkhead_tests::parent(pid).unwrap()
}

/// Returns the PIDs of a worker, its keeper, and the keeper's guard.
fn line(client: &Client) -> [u32; 3] {
    let worker = number(client, "pid");
    let keeper = parent(worker);
    let guard = parent(keeper);
    assert_eq!([name(keeper), name(guard)].map(Option::unwrap), ["bulkhead-keeper", "bulkhead-guard"]);
    [worker, keeper, guard]
}

fn assert_gone(processes: &[u32]) {
    let left: Vec<_> = processes.iter().filter(|&&pid| is_alive(pid)).collect();
    assert!(left.is_empty(), "{left:?} of {processes:?}");
}

fn jobs() {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::write("secret", "sesame\n").unwrap();
    std::fs::set_permissions("secret", std::fs::Permissions::from_mode(0o600)).unwrap();
    let (supervisor, client) = start("processes = 1\ngrace = \"100ms\"\nenv_files = { SECRET = \"secret\" }");
    assert_eq!(send(&client, "echo", "hello").unwrap().payload(), b"hello");
    let large = "x".repeat(3 << 20);
    assert_eq!(send(&client, "echo", &large).unwrap().payload(), large.as_bytes());
    assert_eq!(outcome(&send(&client, "fail", "")), "failed/bad_input");
    let [first, keeper, guard] = line(&client);
    let environment = std::fs::read(format!("/proc/{first}/environ")).unwrap();
    assert!(environment.split(|byte| *byte == 0).any(|variable| variable == b"SECRET=sesame"));
    let hangs = client.job("a", "").operation("hang").deadline(Duration::from_millis(200)).send();
    assert_eq!(outcome(&hangs), "deadline_exceeded/running");
    wait_for("the worker that hung is killed", || (!is_alive(first)).then_some(()));
    let [second, ..] = line(&client);
    assert_eq!(outcome(&send(&client, "segv", "")), "crashed/signal");
    let [third, same_keeper, _] = line(&client);
    assert!(first != second && second != third && keeper == same_keeper);
    assert_ne!(parent(guard), std::process::id());
    supervisor.shutdown().unwrap();
    assert_gone(&[first, second, third, keeper, guard]);
    let late = send(&client, "echo", "");
    assert!(matches!(late, Err(JobError::Disconnected { .. })), "{late:?}");
}

/// Checks that large payloads are passed in memory files.
fn lends_files() {
    let supervisor = Supervisor::start_blocking(settings("max_pooled = \"64MiB\"", "")).unwrap();
    let client = supervisor.blocking_client().unwrap();
    let large = "x".repeat(4 << 20);
    wait_for("a payload is in a file", || {
        (send(&client, "where", &large).unwrap().payload() == b"file").then_some(())
    });
    assert_eq!(send(&client, "echo", &large).unwrap().payload(), large.as_bytes());
    supervisor.shutdown().unwrap();
}

/// Checks that in-process clients are subject to the same limits as clients that connect to a socket.
fn admission() {
    let keys = "max_in_flight = 1\nmax_queue = 1\nmax_payload = \"1KiB\"\n";
    let config = settings("max_clients = 4", keys);
    let supervisor = Supervisor::start_blocking(config).unwrap();
    let client = supervisor.blocking_client().unwrap();
    assert_eq!(outcome(&client.job("b", "").send()), "rejected/not_found");
    assert_eq!(outcome(&send(&client, "echo", &"x".repeat(2000))), "rejected/too_large");
    let running = client.job("a", "").operation("steps:wait go").start().unwrap();
    wait_for("one more job is waiting and one is rejected", || {
        let results = [(); 2].map(|()| {
            let job = client.job("a", "").operation("echo").deadline(Duration::from_millis(50));
            job.start().unwrap()
        });
        let results = results.map(|handle| outcome(&handle.wait()));
        results.contains(&"rejected/queue_full".to_owned()).then_some(())
    });
    // Dropping the job cancels it, and the next job runs.
    drop(running);
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    // Dropping the client cancels the client's jobs.
    let other = supervisor.blocking_client().unwrap();
    let gone = other.job("a", "").operation("steps:wait go").start().unwrap();
    std::mem::drop((gone, other));
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    wait_for("clients above `max_clients` are rejected and others are served", || {
        let crowd: Vec<_> = (0..8).map(|_| supervisor.blocking_client().unwrap()).collect();
        let send = |client: &Client| client.job("a", "").deadline(Duration::from_secs(2)).send();
        let threads: Vec<_> =
            crowd.into_iter().map(|client| std::thread::spawn(move || (send(&client), client))).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let said = results.iter().any(|(result, _)| {
            matches!(result, Err(JobError::Disconnected { message, .. }) if message.contains("max_clients"))
        });
        let served = results.iter().filter(|(result, _)| result.is_ok()).count();
        (said && served >= 1).then_some(())
    });
    wait_for("another client is served", || supervisor.blocking_client().unwrap().job("a", "").send().ok());
}

/// Prints the PIDs of the supervisor's processes and waits to be killed. With the argument `forks`, a forked child
/// holds copies of all descriptors of this process.
fn is_killed() {
    let (_supervisor, client) = start("processes = 2");
    let mut told = line(&client).map(|pid| pid.to_string()).to_vec();
    if std::env::args().any(|argument| argument == "forks") {
        told.push(fork_and_sleep().to_string());
    }
    println!("{}", told.join(" "));
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

#[expect(unsafe_code, reason = "a fork has no safe form")]
fn fork_and_sleep() -> i32 {
    // SAFETY: the child makes only two system calls.
    unsafe {
        match libc::fork() {
            0 => {
                libc::sleep(1000);
                libc::_exit(0)
            }
            pid => pid,
        }
    }
}

static SEEN: AtomicUsize = AtomicUsize::new(0);
static STRANGER: AtomicI32 = AtomicI32::new(0);
static OWN: AtomicI32 = AtomicI32::new(0);

#[expect(unsafe_code, reason = "reads the signal information from the kernel")]
extern "C" fn on_child(_: i32, told: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SEEN.fetch_add(1, Ordering::SeqCst);
    // SAFETY: this field is valid for SIGCHLD.
    let pid = unsafe { (*told).si_pid() };
    if pid != OWN.load(Ordering::SeqCst) {
        STRANGER.store(pid, Ordering::SeqCst);
    }
}

/// Checks that the application is notified only of the exit of its own child, although a worker, a keeper and the
/// supervisor exit as well.
#[expect(unsafe_code, reason = "installs a signal handler, and waits for any child")]
fn waits_for_all() {
    let action = nix::sys::signal::SigAction::new(
        SigHandler::SigAction(on_child),
        nix::sys::signal::SaFlags::SA_RESTART,
        nix::sys::signal::SigSet::empty(),
    );
    // SAFETY: the handler only accesses atomics.
    unsafe { nix::sys::signal::sigaction(Signal::SIGCHLD, &action) }.unwrap();
    let found = Arc::new(Mutex::new(Vec::new()));
    let seen = found.clone();
    std::thread::spawn(move || {
        loop {
            // SAFETY: the status pointer may be null.
            match unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } {
                pid if pid > 0 => seen.lock().unwrap().push(pid),
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    });
    let (supervisor, client) = start("");
    let [worker, keeper, guard] = line(&client);
    assert_eq!(outcome(&send(&client, "abort", "")), "crashed/signal");
    wait_for("the worker is dead", || (!is_alive(worker)).then_some(()));
    kill_pid(keeper, Signal::SIGKILL);
    wait_for("the guard of the killed keeper is dead", || (!is_alive(guard)).then_some(()));
    wait_for("another keeper serves jobs", || send(&client, "echo", "").ok());
    let [_, _, second] = line(&client);
    assert_ne!(guard, second);
    supervisor.shutdown().unwrap();
    assert_eq!((found.lock().unwrap().len(), SEEN.load(Ordering::SeqCst)), (0, 0));
    let (ends, may_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    // SAFETY: the child makes only three system calls.
    let own = unsafe {
        match libc::fork() {
            0 => {
                libc::close(may_end.as_raw_fd());
                // Blocks until the parent closes its end of the pipe. By then, the parent knows the child's PID.
                libc::read(ends.as_raw_fd(), [0_u8].as_mut_ptr().cast(), 1);
                libc::_exit(0)
            }
            pid => pid,
        }
    };
    OWN.store(own, Ordering::SeqCst);
    drop(may_end);
    wait_for("the application's child is reaped", || found.lock().unwrap().contains(&own).then_some(()));
    assert_eq!(*found.lock().unwrap(), [own]);
    assert!(SEEN.load(Ordering::SeqCst) == 1 && STRANGER.load(Ordering::SeqCst) == 0);
}

/// Returns the masks of blocked, ignored and caught signals from a `/proc` status file.
fn signals(status: &str) -> Vec<String> {
    let text = std::fs::read_to_string(status).unwrap();
    let wanted = |line: &&str| ["SigBlk", "SigIgn", "SigCgt"].iter().any(|name| line.starts_with(name));
    text.lines().filter(wanted).map(str::to_owned).collect()
}

/// Returns the parts of this process's state that an embedded supervisor must not change.
fn process_state() -> Vec<String> {
    let mut state = signals("/proc/thread-self/status");
    for resource in [Resource::RLIMIT_NOFILE, Resource::RLIMIT_FSIZE, Resource::RLIMIT_AS] {
        state.push(format!("{resource:?} {:?}", getrlimit(resource).unwrap()));
    }
    state.push(format!("subreaper {:?}", rustix::process::child_subreaper().unwrap()));
    state.push(format!("cwd {:?}", std::env::current_dir().unwrap()));
    state.push(format!("session {:?}", nix::unistd::getsid(None).unwrap()));
    state.extend(std::env::vars().map(|(name, value)| format!("{name}={value}")));
    state.push(std::fs::read_to_string("/proc/self/oom_score_adj").unwrap());
    state.push(std::fs::read_to_string("/proc/self/timerslack_ns").unwrap_or_default());
    state
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);
static HANDLED_BY: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(_: i32) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
    HANDLED_BY.store(nix::unistd::gettid().as_raw(), Ordering::SeqCst);
}

/// Checks that the supervisor changes no process state and leaves no descriptors behind, and that signals arrive on the
/// application's threads.
#[expect(unsafe_code, reason = "handlers")]
fn keeps_its_own() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1] {
        // SAFETY: the handler only accesses atomics and requests a thread ID.
        unsafe { nix::sys::signal::signal(signal, SigHandler::Handler(on_signal)) }.unwrap();
    }
    once();
    let (before, open) = (process_state(), descriptors(std::process::id()));
    let (supervisor, client) = start("");
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    assert_same_state(&before);
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        let name = std::fs::read_to_string(task.join("comm")).unwrap();
        let masks = signals(task.join("status").to_str().unwrap());
        let is_ours = task.ends_with(std::process::id().to_string()) || name.starts_with("bulkhead-client");
        let blocked = u64::from_str_radix(masks[0].split_whitespace().last().unwrap(), 16).unwrap();
        // SIGKILL and SIGSTOP cannot be blocked, and the C library reserves two more signals.
        assert!(is_ours || blocked | 1 << 31 | 1 << 32 == !(1 << 8 | 1 << 18), "{name}: {masks:?}");
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1] {
        let count = HANDLED.load(Ordering::SeqCst);
        kill_pid(std::process::id(), signal);
        wait_for("the application's handler runs", || (HANDLED.load(Ordering::SeqCst) > count).then_some(()));
        let thread = format!("/proc/self/task/{}/comm", HANDLED_BY.load(Ordering::SeqCst));
        let thread = std::fs::read_to_string(thread).unwrap();
        assert!(thread.starts_with("application") || thread.starts_with("bulkhead-client"), "{thread}");
    }
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    drop(client);
    supervisor.shutdown().unwrap();
    assert_nothing_open(open);
    assert_same_state(&before);
}

/// Performs one-time initialisation that would distort later measurements. The first thread makes the C library reserve
/// a signal, and tokio creates a socket pair.
fn once() {
    std::thread::spawn(|| run(async {})).join().unwrap();
}

/// Waits until this process has no more than `before` open descriptors. Waiting is necessary because a client's thread
/// closes its descriptors only when the thread exits.
fn assert_nothing_open(before: usize) {
    wait_for("no descriptors are left", || (descriptors(std::process::id()) <= before).then_some(()));
}

fn assert_same_state(before: &[String]) {
    for (now, before) in process_state().iter().zip(before) {
        assert_eq!(now, before);
    }
}

/// Kills the keeper, and checks that all jobs get outcomes, a new keeper starts, and the application's own children
/// survive.
fn loses_its_keeper() {
    let mut own =
        Command::new("sleep").arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let (supervisor, client) = start("processes = 1");
    for lost in [1, 2] {
        let line = line(&client);
        let operation = format!("steps:count began-{lost};wait never");
        let running = client.job("a", "").operation(operation).start().unwrap();
        wait_for("the job is running", || Path::new(&format!("began-{lost}")).exists().then_some(()));
        kill_pid(line[lost], Signal::SIGKILL);
        let told = outcome(&running.wait());
        assert!(told.starts_with("crashed"), "{lost}: {told}");
        wait_for("another worker serves jobs", || {
            let pid = send(&client, "pid", "").ok()?.outcome().worker_pid;
            (pid != Some(line[0])).then_some(())
        });
        assert_gone(&line);
    }
    assert!(own.try_wait().unwrap().is_none(), "the application's own child was killed");
    supervisor.shutdown().unwrap();
    own.kill().unwrap();
    own.wait().unwrap();
}

/// Checks that the keeper is replaced if it is killed while starting.
fn loses_starting_keepers() {
    let folder = std::env::var("FOLDER").unwrap();
    let is_own = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(&folder)
    };
    let (supervisor, client) = start("processes = 1");
    let mut killed = std::collections::HashSet::new();
    while killed.len() < 12 {
        for pid in bulkhead_tests::processes_with("bulkhead-keeper").into_iter().filter(is_own) {
            killed.insert(pid);
            kill_pid(pid, Signal::SIGKILL);
        }
    }
    wait_for("a worker serves jobs", || send(&client, "pid", "").ok());
    supervisor.shutdown().unwrap();
}

/// Removes the keeper's program and kills the keeper. Checks that the supervisor then fails, both with the data plane
/// on a separate thread and with the data plane on this thread.
async fn loses_all_keepers() {
    let program = std::env::current_dir().unwrap().join("keeper");
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &program).unwrap();
    let builder = || Supervisor::builder(settings("", "")).keeper(KeeperProgram::Program(program.clone()));
    let other = builder().start().await.unwrap();
    let other_client = other.client();
    let other_keeper = parent(pid_of(&other_client).await);
    let mut local = builder().start_local().unwrap();
    let client = local.client();
    let keeper = parent(local.run_until(pid_of(&client)).await.unwrap());
    std::fs::remove_file(&program).unwrap();
    [keeper, other_keeper].into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
    let disconnected = tokio::spawn(async move {
        while !matches!(send_to(&other_client, "echo").await, Err(JobError::Disconnected { .. })) {}
    });
    let error = local.run_until(std::future::pending::<()>()).await.unwrap_err().to_string();
    assert!(error.contains(program.to_str().unwrap()), "{error}");
    assert_eq!(local.shutdown().await.unwrap_err().to_string(), error);
    disconnected.await.unwrap();
    let ended = tokio::task::spawn_blocking(|| other.shutdown()).await.unwrap();
    let error = ended.unwrap_err().to_string();
    assert!(error.contains(program.to_str().unwrap()), "{error}");
}

/// Runs all of the hostile worker's attacks on its sandbox, with the given profile. The file `workers.toml` configures
/// the bulkheads, and the file `targets` contains the targets.
fn attempts(profile: &str) {
    let config = config::load_embedded("workers.toml".as_ref()).unwrap_or_else(|errors| panic!("{errors}"));
    let supervisor = Supervisor::start_blocking(config).unwrap();
    let client = supervisor.blocking_client().unwrap();
    let mut targets: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string("targets").unwrap()).unwrap();
    let patient = |bulkhead: &str, operation: &str, targets: &serde_json::Value| {
        client.job(bulkhead, targets.to_string()).operation(operation).deadline(PATIENCE).send()
    };
    // Uses `read-shadow` to find the worker's PID, because this attempt needs no target process.
    let sibling = patient("sibling", "read-shadow", &targets).unwrap().outcome().worker_pid.unwrap();
    targets["sibling"] = sibling.into();
    targets["supervisor"] = std::process::id().into();
    let mut above = std::iter::successors(Some(sibling), |&pid| bulkhead_tests::parent(pid));
    targets["keeper"] =
        above.find(|&pid| name(pid).is_some_and(|it| it == "bulkhead-keeper")).unwrap().into();
    let mut wrong = Vec::new();
    for attempt in ATTEMPTS.iter().flat_map(|(_, attempts)| *attempts) {
        if KERNELS_OWN.contains(&attempt.name) && !refuses_descriptors() {
            continue;
        }
        let bulkhead = match attempt.setting {
            Setting::Plain => "plain",
            Setting::Limited => "limited",
        };
        let ended = Ended::of(patient(bulkhead, attempt.name, &targets));
        let expected = if profile == "strict" { attempt.strict } else { attempt.default };
        println!("{}: {ended:?}", attempt.name);
        if !ended.is(expected) {
            wrong.push(format!("{}: {ended:?}, expected {expected:?}", attempt.name));
        }
    }
    assert!(wrong.is_empty(), "{} attempts have an unexpected result:\n{}", wrong.len(), wrong.join("\n"));
    supervisor.shutdown().unwrap();
}

const HOLDS: &str = "processes = 2\nmax_in_flight = 2\nmax_queue = 100";

fn holds() {
    let (supervisor, client) = start(HOLDS);
    keep_books(move |operation| send(&client, operation, ""));
    supervisor.shutdown().unwrap();
}

/// Runs the checks of [`keep_books`] with the data plane on this thread and the clients on other threads.
async fn local_holds() {
    let (mut supervisor, client) = start_local(HOLDS);
    let books =
        tokio::task::spawn_blocking(move || keep_books(move |operation| run(send_to(&client, operation))));
    supervisor.run_until(books).await.unwrap().unwrap();
    supervisor.shutdown().await.unwrap();
}

/// Checks that each job has one outcome, that no job begins twice, and that no job reported as not executed has run,
/// while workers, keepers and guards are being killed. The second argument of the program is the duration in seconds.
fn keep_books(send: impl Fn(&str) -> Result<Reply, JobError> + Clone + Send + 'static) {
    const LANES: usize = 8;
    const JOBS: usize = 60;
    const KILLS_MIN: usize = 3;
    let lasts = std::env::args().nth(2).map(|seconds| Duration::from_secs(seconds.parse().unwrap()));
    let began = std::time::Instant::now();
    let is_over = Arc::new(AtomicUsize::new(0));
    let kills = Arc::new(AtomicUsize::new(0));
    let killer = std::thread::spawn({
        let (send, is_over, kills) = (send.clone(), is_over.clone(), kills.clone());
        move || {
            while is_over.load(Ordering::SeqCst) == 0 {
                let found = send("pid").ok().and_then(|reply| reply.outcome().worker_pid);
                let Some(worker) = found.filter(|&pid| is_alive(pid)) else { continue };
                let killed = kills.load(Ordering::SeqCst);
                let ancestor = (0..killed % 3).try_fold(worker, |pid, _| bulkhead_tests::parent(pid));
                // The victim may have exited and its PID may have been reused, so the name is checked as well.
                let Some(victim) = ancestor.filter(|&pid| name(pid).is_some_and(|it| OURS.contains(&&*it)))
                else {
                    continue;
                };
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(victim as i32), Signal::SIGKILL);
                kills.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(30));
            }
        }
    });
    let lanes: Vec<_> = (0..LANES)
        .map(|lane| {
            let (send, kills) = (send.clone(), kills.clone());
            std::thread::spawn(move || {
                let has_more = |job| job < JOBS || kills.load(Ordering::SeqCst) < KILLS_MIN;
                let goes_on = |job| lasts.map_or_else(|| has_more(job), |lasts| began.elapsed() < lasts);
                let mut told_of = 0;
                for job in (0..).take_while(|&job| goes_on(job)) {
                    told_of += 1;
                    let file = format!("job-{lane}-{job}");
                    let told = send(&format!("steps:count {file};sleep 5;count {file}-end"));
                    let bytes = |name: &str| std::fs::metadata(name).map_or(0, |found| found.len());
                    let (began, ended) = (bytes(&file), bytes(&format!("{file}-end")));
                    assert!(began <= 1 && ended <= began, "{file}: {began}, {ended}");
                    match &told {
                        Ok(_) => assert_eq!((began, ended), (1, 1), "{file}"),
                        Err(error) if error.executed() == Executed::No => {
                            assert_eq!(began, 0, "{file}: {error}")
                        }
                        Err(error) => assert!(error.outcome().is_some(), "{file}: {error}"),
                    }
                    for name in [file.clone(), format!("{file}-end")] {
                        let _ = std::fs::remove_file(name);
                    }
                }
                told_of
            })
        })
        .collect();
    let told: usize = lanes.into_iter().map(|lane| lane.join().unwrap()).sum();
    is_over.store(1, Ordering::SeqCst);
    killer.join().unwrap();
    let killed = kills.load(Ordering::SeqCst);
    println!("{told} jobs, {killed} processes killed");
    assert!(killed >= KILLS_MIN);
}

/// Configuration of a bulkhead that runs one job at a time and can queue `WAITS` further jobs.
const WAITING: &str = "max_in_flight = 1\nmax_queue = 1000\ndeadline = \"60s\"";
const WAITS: usize = 1000;

/// Checks that a job failed and that the job's error does not report the job as executed.
fn assert_told(told: &Result<Reply, JobError>) {
    let told = told.as_ref().expect_err("no job was served");
    assert!(told.executed() != Executed::Yes, "{told}");
}

/// Checks that each of a thousand waiting jobs gets an outcome when the supervisor stops.
fn is_told() {
    let (supervisor, client) = start(WAITING);
    let running = client.job("a", "").operation("steps:count began;wait never").start().unwrap();
    wait_for("the job is running", || Path::new("began").exists().then_some(()));
    let waiting: Vec<_> = (0..WAITS).map(|_| client.job("a", "").start().unwrap()).collect();
    supervisor.stop();
    drop(supervisor);
    assert_told(&running.wait());
    waiting.into_iter().for_each(|job| assert_told(&job.wait()));
    assert!(matches!(send(&client, "echo", ""), Err(JobError::Disconnected { .. })));
}

/// Runs the scenario of [`is_told`] with the data plane on this thread, first with a regular stop, then with a
/// supervisor that is dropped before it can send the outcomes.
async fn local_is_told() {
    for is_dropped in [false, true] {
        let (mut supervisor, client) = start_local(WAITING);
        let begin = async {
            let mut handles = Vec::new();
            for _ in 0..=WAITS {
                let operation = if handles.is_empty() { "steps:count began;wait never" } else { "" };
                handles.push(client.job("a", "").operation(operation).start().await.unwrap());
            }
            while !Path::new("began").exists() {
                tokio::task::yield_now().await;
            }
            handles
        };
        let handles = supervisor.run_until(begin).await.unwrap();
        std::fs::remove_file("began").unwrap();
        if is_dropped {
            drop(supervisor);
        } else {
            supervisor.stop();
            supervisor.shutdown().await.unwrap();
        }
        for handle in handles {
            assert_told(&handle.await);
        }
        assert!(matches!(send_to(&client, "echo").await, Err(JobError::Disconnected { .. })));
    }
}

/// Checks that the supervisor survives panics in the application, dropped futures, and calls from other threads and
/// runtimes.
fn local_goes_on() {
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let keys = "max_in_flight = 4\nmax_queue = 300\ngrace = \"100ms\"";
    let (mut supervisor, client) = {
        let _within = threads.enter();
        start_local(keys)
    };
    let echo = |supervisor: &mut LocalSupervisor, runtime: &tokio::runtime::Runtime| {
        let reply = runtime.block_on(supervisor.run_until(send_to(&client, "echo"))).unwrap();
        assert_eq!(reply.unwrap().payload(), b"hello");
    };
    echo(&mut supervisor, &threads);
    let panics = std::panic::AssertUnwindSafe(|| {
        let panics = async {
            let _running = client.job("a", "").operation("steps:wait never").start().await;
            panic!("the application's own");
        };
        threads.block_on(supervisor.run_until(panics)).unwrap()
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    echo(&mut supervisor, &threads);
    for _ in 0..20 {
        let given_up = async {
            let waits = supervisor.run_until(send_to(&client, "steps:wait never"));
            tokio::time::timeout(Duration::from_millis(5), waits).await
        };
        assert!(threads.block_on(given_up).is_err());
    }
    echo(&mut supervisor, &threads);
    // Jobs are sent from all threads at once, while a future keeps this thread busy.
    let jobs = (0..200).map(|_| threads.spawn(client.job("a", vec![7; 100_000]).operation("echo").send()));
    let jobs: Vec<_> = jobs.collect();
    let all = async {
        for job in jobs {
            assert_eq!(job.await.unwrap().unwrap().payload(), [7; 100_000]);
        }
    };
    threads.block_on(supervisor.run_until(all)).unwrap();
    // Another runtime now drives the supervisor, and the first runtime is shut down.
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    echo(&mut supervisor, &other);
    threads.shutdown_background();
    echo(&mut supervisor, &other);
    other.block_on(supervisor.shutdown()).unwrap();
    assert_told(&other.block_on(send_to(&client, "echo")));
}

/// Repeatedly drops the future returned by `run_until` after the first poll, as happens in a `select!` with a channel
/// that is always ready.
async fn local_polled_once() {
    let (mut supervisor, client) = start_local("max_in_flight = 4\nmax_queue = 100");
    let mut jobs = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let job = client.job("a", "hello").operation("echo").deadline(Duration::from_secs(30));
        jobs.spawn(job.send());
    }
    let mut ended = 0;
    while ended < 100 {
        {
            let mut driven = std::pin::pin!(supervisor.run_until(std::future::pending::<()>()));
            std::future::poll_fn(|context| {
                assert!(driven.as_mut().poll(context).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
        }
        tokio::task::yield_now().await;
        while let Some(told) = jobs.try_join_next() {
            assert_eq!(told.unwrap().unwrap().payload(), b"hello");
            ended += 1;
        }
    }
    supervisor.shutdown().await.unwrap();
}

/// Time after which the kernel kills a forked child, in seconds. Without this limit, a child would hang forever if
/// another thread held a lock during the fork.
const CHILD_SECONDS_MAX: u32 = 60;

/// Checks that clients get an error as soon as the supervisor has stopped, and that a forked child cannot shut down the
/// parent's supervisor.
#[expect(unsafe_code, reason = "a fork has no safe form")]
fn ends_for_good() {
    let (supervisor, client) = start("");
    let line = line(&client);
    // SAFETY: the child only uses its copy of the supervisor and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        nix::unistd::alarm::set(CHILD_SECONDS_MAX);
        let refused = supervisor
            .shutdown()
            .is_err_and(|error| error.to_string().contains("was forked from that process"));
        // SAFETY: only exits.
        unsafe { libc::_exit(if refused { 7 } else { 8 }) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7);
    assert_eq!(self::line(&client), line);
    let another = supervisor.blocking_client().unwrap();
    assert_eq!(outcome(&send(&another, "echo", "")), "ok");
    supervisor.shutdown().unwrap();
    for client in [&client, &another] {
        wait_for("the client reports that the supervisor has stopped", || {
            let told = send(client, "echo", "").unwrap_err();
            assert!(matches!(told, JobError::Disconnected { executed: Executed::No, .. }), "{told}");
            told.to_string().contains("in this process has stopped").then_some(())
        });
    }
}

/// Process names of workers, keepers and guards.
const OURS: [&str; 3] = ["misbehave", "bulkhead-keeper", "bulkhead-guard"];

fn two() {
    let (first, of_first) = start("");
    let (second, of_second) = start("");
    let (one, other) = (line(&of_first), line(&of_second));
    assert!(one.iter().all(|pid| !other.contains(pid)));
    assert_eq!(outcome(&send(&of_first, "abort", "")), "crashed/signal");
    assert_eq!(line(&of_second), other);
    first.shutdown().unwrap();
    assert_gone(&one);
    assert_eq!(line(&of_second), other);
    second.shutdown().unwrap();
    assert_gone(&other);
    // Starts more supervisors, one after another.
    for _ in 0..3 {
        let (third, client) = start("");
        assert_eq!(outcome(&send(&client, "echo", "")), "ok");
        third.shutdown().unwrap();
    }
}

/// Checks that starting a supervisor with invalid settings fails and leaves nothing behind.
fn refused() {
    once();
    let open = descriptors(std::process::id());
    let parse = |text: &str| config::parse_embedded(text, Path::new("workers.toml"));
    let errors = parse(
        "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.a]\ncommand = [\"/bin/true\"]\n[[access]]\nuid = 1\n",
    );
    let errors = errors.unwrap_err().to_string();
    assert!(errors.contains("workers.toml:2") && errors.contains("no sockets"), "{errors}");
    assert!(errors.contains("[[access]]"), "{errors}");
    let missing = config::load_embedded(Path::new("/no/such/file")).unwrap_err().to_string();
    assert!(missing.contains("/no/such/file"), "{missing}");
    let of_process = "[supervisor]\nsocket = \"jobs.sock\"\n[bulkhead.a]\ncommand = [\"/bin/true\"]\n";
    let of_process = config::parse(of_process, Path::new("workers.toml")).unwrap();
    assert!(matches!(Supervisor::start_blocking(of_process), Err(StartError::HasSockets)));
    let started = |program: &str| {
        let program = KeeperProgram::Program(program.into());
        Supervisor::builder(settings("", "")).keeper(program).start_blocking().unwrap_err().to_string()
    };
    for (program, words) in [("/no/such/keeper", "/no/such/keeper"), ("/bin/true", "did not become a keeper")]
    {
        let error = started(program);
        assert!(error.contains("failed to start the keeper") && error.contains(words), "{error}");
    }
    // An application that does not call `keeper_main_if_asked` must get an error instead of starting itself
    // recursively.
    let own = std::env::current_exe().unwrap();
    let forgets = Command::new(&own).args(["forgets"]).env("FORGETS", "").output().unwrap();
    assert!(forgets.status.success(), "{forgets:?}");
    let crash_dir = settings("crash_dir = \"/proc/crashes\"", "");
    let error = Supervisor::start_blocking(crash_dir).unwrap_err().to_string();
    assert!(error.contains("/proc/crashes"), "{error}");
    // A valid start still works afterwards.
    let (supervisor, client) = start("");
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    drop(client);
    supervisor.shutdown().unwrap();
    assert_nothing_open(open);
}

/// Checks that relative paths of the keeper and of the host program are resolved against the current directory at the
/// start. A keeper that is restarted later uses the same paths.
fn relative_paths() {
    let own = std::env::current_exe().unwrap();
    std::os::unix::fs::symlink(&own, "keeper").unwrap();
    std::os::unix::fs::symlink(own.with_file_name("bulkhead-worker"), "host").unwrap();
    let text = "[defaults.sandbox]\nprofile = \"none\"\n[bulkhead.a]\nexec = [\"cat\"]\n";
    let config = config::parse_embedded(text, Path::new("workers.toml")).unwrap();
    let start = |host: &str| {
        let keeper = KeeperProgram::Program("keeper".into());
        Supervisor::builder(config.clone()).keeper(keeper).host(host).start_blocking()
    };
    let error = start("missing").unwrap_err().to_string();
    let missing = std::env::current_dir().unwrap().join("missing");
    assert!(error.contains(missing.to_str().unwrap()) && error.contains("bulkhead 'a'"), "{error}");
    let supervisor = start("./host").unwrap();
    let client = supervisor.blocking_client().unwrap();
    let served = send(&client, "", "hello").unwrap();
    assert_eq!(served.payload(), b"hello");
    std::env::set_current_dir("/").unwrap();
    kill_pid(parent(served.outcome().worker_pid.unwrap()), Signal::SIGKILL);
    wait_for("another keeper serves jobs", || {
        send(&client, "", "hello")
            .ok()
            .filter(|reply| reply.outcome().worker_pid != served.outcome().worker_pid)
    });
    supervisor.shutdown().unwrap();
}

/// Tries to start a supervisor without having called `keeper_main_if_asked`.
fn forgets() {
    let error = Supervisor::start_blocking(settings("", "")).unwrap_err();
    assert!(matches!(error, StartError::NotAKeeper), "{error}");
    assert_eq!(format!("{error:?}"), error.to_string());
    let program = KeeperProgram::Program(std::env::current_exe().unwrap());
    let error =
        Supervisor::builder(settings("", "")).keeper(program).start_blocking().unwrap_err().to_string();
    assert!(error.contains("did not become a keeper"), "{error}");
}

/// Checks that an embedded supervisor writes crash reports to files.
fn backtrace() {
    let (supervisor, client) = start_with_crash_dir();
    crash_with_backtrace(&client);
    drop(client);
    supervisor.shutdown().unwrap();
}

/// Starts a supervisor that writes crash reports to the folder `crashes`.
fn start_with_crash_dir() -> (Supervisor, Client) {
    let folder = std::env::current_dir().unwrap().join("crashes");
    let keys = format!("crash_dir = {folder:?}");
    let supervisor = Supervisor::start_blocking(settings(&keys, "")).unwrap();
    let client = supervisor.blocking_client().unwrap();
    (supervisor, client)
}

/// Crashes a worker, and waits until the report in the folder `crashes` has a backtrace.
fn crash_with_backtrace(client: &Client) {
    assert_eq!(outcome(&send(client, "segv", "")), "crashed/signal");
    wait_for("the report has a backtrace", || {
        let files = std::fs::read_dir("crashes").ok()?.flatten();
        let texts = files.map(|file| std::fs::read_to_string(file.path()));
        texts.flatten().any(|text| text.contains("\"function\": \"misbehave::misbehave\"")).then_some(())
    });
}

/// Checks that running jobs can finish after the supervisor has been dropped.
fn drains() {
    let (supervisor, client) = start("max_in_flight = 2");
    let line = line(&client);
    let running = client.job("a", "").operation("steps:count began;wait go;echo").start().unwrap();
    wait_for("the job is running", || Path::new("began").exists().then_some(()));
    let dropped = std::thread::spawn(move || drop(supervisor));
    wait_for("new jobs are rejected", || {
        (outcome(&send(&client, "echo", "")) == "rejected/draining").then_some(())
    });
    std::fs::write("go", "").unwrap();
    assert_eq!(outcome(&running.wait()), "ok");
    dropped.join().unwrap();
    assert_gone(&line);
    // After a second stop, the supervisor does not wait for running jobs.
    std::fs::remove_file("go").unwrap();
    let (supervisor, client) = start("");
    let running = client.job("a", "").operation("steps:wait go").start().unwrap();
    supervisor.stop();
    supervisor.shutdown().unwrap();
    assert_ne!(outcome(&running.wait()), "ok");
}

/// Starts supervisors within a runtime while many threads allocate memory.
async fn in_a_runtime() {
    let is_over = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..16)
        .map(|_| {
            let is_over = is_over.clone();
            std::thread::spawn(move || {
                while is_over.load(Ordering::SeqCst) == 0 {
                    for bytes in 10_000..10_020 {
                        std::hint::black_box(vec![0_u8; bytes]);
                    }
                    // A shorter sleep would use too much CPU time.
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
        })
        .collect();
    for _ in 0..3 {
        let keys = settings("", "processes = 2\nmax_in_flight = 8\nmax_queue = 200");
        let supervisor = Supervisor::start(keys).await.unwrap();
        let client = supervisor.client();
        let jobs = (0..200).map(|n: u32| {
            let job = client.job("a", n.to_string()).operation("echo");
            tokio::spawn(async move { (n, job.send().await) })
        });
        for job in jobs.collect::<Vec<_>>() {
            let (n, reply) = job.await.unwrap();
            assert_eq!(reply.unwrap().payload(), n.to_string().as_bytes());
        }
        tokio::task::spawn_blocking(|| supervisor.shutdown()).await.unwrap().unwrap();
    }
    is_over.store(1, Ordering::SeqCst);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    // Dropping the future that starts a supervisor must stop all of its processes and threads.
    drop(tokio::time::timeout(Duration::ZERO, Supervisor::start(settings("", ""))).await);
    tokio::task::spawn_blocking(|| {
        wait_for("no thread of a supervisor is left", || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap();
            let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
            (!names.flatten().any(|name| name.trim() == "bulkhead")).then_some(())
        });
    })
    .await
    .unwrap();
}

/// Sends a misbehaving job and prints its outcome, first with the data plane on a separate thread, then with the data
/// plane on this thread. Checks that the next job succeeds in both cases.
fn after(operation: &str, payload: &str) {
    let (supervisor, client) = start("deadline = \"20s\"");
    let told = client.job("a", payload).operation(operation).send();
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    supervisor.shutdown().unwrap();
    println!("{}", outcome(&told));
    on_this_thread(async {
        let (mut supervisor, client) = start_local("deadline = \"20s\"");
        let both = async {
            let told = client.job("a", payload).operation(operation).send().await;
            (told, send_to(&client, "echo").await)
        };
        let (told, next) = supervisor.run_until(both).await.unwrap();
        assert_eq!(outcome(&next), "ok");
        supervisor.shutdown().await.unwrap();
        println!("{}", outcome(&told));
    });
}

fn on_this_thread(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
}

fn start_local(keys: &str) -> (LocalSupervisor, bulkhead_client::Client) {
    let supervisor = Supervisor::builder(settings("drain_timeout = \"20s\"", keys)).start_local().unwrap();
    let client = supervisor.client();
    (supervisor, client)
}

async fn send_to(client: &bulkhead_client::Client, operation: &str) -> Result<Reply, JobError> {
    client.job("a", "hello").operation(operation).deadline(Duration::from_secs(30)).send().await
}

async fn pid_of(client: &bulkhead_client::Client) -> u32 {
    send_to(client, "pid").await.unwrap().outcome().worker_pid.unwrap()
}

/// Checks that a supervisor whose data plane runs on this thread serves jobs and leaves the thread unchanged.
async fn local() {
    std::thread::spawn(|| run(async {})).join().unwrap();
    let before = process_state();
    let (mut supervisor, client) = start_local("max_in_flight = 4\nmax_queue = 100\ngrace = \"100ms\"");
    let line = supervisor.run_until(async {
        assert_eq!(send_to(&client, "echo").await.unwrap().payload(), b"hello");
        assert_same_state(&before);
        let jobs = (0..100).map(|_| client.job("a", vec![7; 100_000]).operation("echo"));
        let jobs: Vec<_> = jobs.map(|job| tokio::spawn(job.send())).collect();
        for job in jobs {
            assert_eq!(job.await.unwrap().unwrap().payload(), [7; 100_000]);
        }
        let first = pid_of(&client).await;
        let hangs = client.job("a", "").operation("hang").deadline(Duration::from_millis(200)).send().await;
        assert_eq!(outcome(&hangs), "deadline_exceeded/running");
        assert_eq!(outcome(&send_to(&client, "segv").await), "crashed/signal");
        let second = pid_of(&client).await;
        assert_ne!(first, second);
        [second, parent(second), parent(parent(second))]
    });
    let line = line.await.unwrap();
    // A supervisor that is not driven receives nothing, and its timers do not advance. Workers do not count as hung.
    // The deadline is shorter than the pause below, but long enough for a slow worker to run the job after the pause.
    let waits = client.job("a", "").operation("echo").deadline(Duration::from_secs(5));
    let waits = tokio::spawn(waits.send());
    std::thread::sleep(Duration::from_secs(6));
    assert!(line.iter().all(|&pid| is_alive(pid)) && !waits.is_finished());
    let (waited, pid) =
        supervisor.run_until(async { (waits.await.unwrap(), pid_of(&client).await) }).await.unwrap();
    assert_eq!(
        (waited.is_ok() || outcome(&waited).starts_with("deadline_exceeded"), pid),
        (true, line[0]),
        "{waited:?}"
    );
    kill_pid(line[1], Signal::SIGKILL);
    let next = supervisor.run_until(async {
        loop {
            match send_to(&client, "pid").await.map(|reply| reply.outcome().worker_pid.unwrap()) {
                // The worker may reply once more before the kernel kills it.
                Ok(pid) if pid == line[0] => {}
                Ok(pid) => return pid,
                Err(_) => {}
            }
        }
    });
    let next = next.await.unwrap();
    assert_gone(&line);
    supervisor.shutdown().await.unwrap();
    assert_gone(&[next]);
    assert_same_state(&before);
    assert!(matches!(send_to(&client, "echo").await, Err(JobError::Disconnected { .. })));
}

/// Ends supervisors in three ways: by stopping them, by dropping them, and by dropping them before the first iteration.
async fn local_ends() {
    let (mut supervisor, client) = start_local("max_in_flight = 2");
    let pid = supervisor.run_until(pid_of(&client)).await.unwrap();
    let running = client.job("a", "").operation("steps:count began;wait go;echo").start();
    let running = supervisor.run_until(running).await.unwrap().unwrap();
    let began = async {
        while !Path::new("began").exists() {
            tokio::task::yield_now().await
        }
    };
    supervisor.run_until(began).await.unwrap();
    supervisor.stop();
    let refused = supervisor.run_until(send_to(&client, "echo")).await.unwrap();
    assert_eq!(outcome(&refused), "rejected/draining");
    std::fs::write("go", "").unwrap();
    assert_eq!(outcome(&supervisor.run_until(running).await.unwrap()), "ok");
    supervisor.shutdown().await.unwrap();
    assert_gone(&[pid]);

    let (mut supervisor, client) = start_local("");
    let pid = supervisor.run_until(pid_of(&client)).await.unwrap();
    let line = [pid, parent(pid), parent(parent(pid))];
    drop(supervisor);
    assert_gone(&line);
    // This supervisor was never driven.
    drop(start_local(""));
}

/// Checks that the data plane does not raise SIGXFSZ on this thread. A worker's journal and the file for the stacks of
/// a hung worker are larger than the file size limit.
async fn local_limits_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, 64 * 1024, hard).unwrap();
    let (mut supervisor, client) = start_local("grace = \"100ms\"");
    let jobs = async {
        assert_eq!(send_to(&client, "echo").await.unwrap().payload(), b"hello");
        let hangs = client.job("a", "").operation("hang").deadline(Duration::from_millis(200)).send().await;
        assert_eq!(outcome(&hangs), "deadline_exceeded/running");
        assert_eq!(outcome(&send_to(&client, "segv").await), "crashed/signal");
    };
    supervisor.run_until(jobs).await.unwrap();
    supervisor.shutdown().await.unwrap();
}

/// Does not drive the data plane and waits to be killed. The keeper must detect on its own that the application has
/// exited.
async fn local_is_killed() {
    let (mut supervisor, client) = start_local("");
    let pid = supervisor.run_until(pid_of(&client)).await.unwrap();
    println!("{pid} {} {}", parent(pid), parent(parent(pid)));
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

/// Runs a supervisor in an application that is a child subreaper, such as the first process of a container.
fn adopts() {
    rustix::process::set_child_subreaper(Some(rustix::process::Pid::INIT)).unwrap();
    let mut own =
        Command::new("sleep").arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // These starts fail because of an invalid keeper program or an invalid folder for crash reports.
    let not_a_keeper =
        Supervisor::builder(settings("", "")).keeper(KeeperProgram::Program("/bin/true".into()));
    not_a_keeper.start_blocking().unwrap_err();
    Supervisor::start_blocking(settings("crash_dir = \"/proc/crashes\"", "")).unwrap_err();
    let (supervisor, client) = start_with_crash_dir();
    let line = line(&client);
    assert_eq!(parent(line[2]), std::process::id());
    kill_pid(line[1], Signal::SIGKILL);
    wait_for("another keeper serves jobs", || send(&client, "echo", "").ok());
    // The symbolizer has a separate keeper.
    crash_with_backtrace(&client);
    assert!(own.try_wait().unwrap().is_none());
    supervisor.shutdown().unwrap();
    own.kill().unwrap();
    own.wait().unwrap();
    let left = nix::sys::wait::waitpid(None, Some(nix::sys::wait::WaitPidFlag::WNOHANG));
    assert_eq!(left, Err(nix::errno::Errno::ECHILD), "the application has a leftover child");
}

/// Checks that a forked child can drop its copy of a supervisor without affecting the original.
#[expect(unsafe_code, reason = "a fork has no safe form")]
fn forks() {
    let (supervisor, client) = start("");
    let line = line(&client);
    // SAFETY: the child only drops its copy and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        nix::unistd::alarm::set(CHILD_SECONDS_MAX);
        drop(supervisor);
        // SAFETY: only exits.
        unsafe { libc::_exit(7) };
    }
    let mut status = 0;
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 7);
    assert_eq!(self::line(&client), line);
    supervisor.shutdown().unwrap();
    assert_gone(&line);
}

/// Checks that a supervisor shuts down while a forked child holds copies of all descriptors. Another supervisor can
/// then use the same folder for crash reports.
fn leaves_a_fork() {
    let (supervisor, client) = start_with_crash_dir();
    let line = line(&client);
    let child = ForkedChild(fork_and_sleep() as u32);
    supervisor.shutdown().unwrap();
    assert_gone(&line);
    let (supervisor, client) = start_with_crash_dir();
    assert_eq!(outcome(&send(&client, "echo", "")), "ok");
    supervisor.shutdown().unwrap();
    assert!(is_alive(child.0));
}

/// A forked child, which is killed when this value is dropped. Otherwise, its copies of the standard output and error
/// would keep the test waiting after a failure.
struct ForkedChild(u32);

impl Drop for ForkedChild {
    fn drop(&mut self) {
        kill_pid(self.0, Signal::SIGKILL);
    }
}

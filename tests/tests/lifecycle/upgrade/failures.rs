//! Upgrades in which a program dies, hangs, or cannot start. Afterwards, exactly one program serves clients.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bulkhead_tests::{children, heavy, name, not_run, programs};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::load::{Load, read_record};
use super::*;
use bulkhead_tests::in_time;

#[test]
fn failed_start_leaves_the_old_program_in_service() {
    let manager = start(ONE);
    let old = manager.main();
    let client = Client::connect(manager.socket()).unwrap();
    let fails = |supervisor_keys: &str, bulkheads: &str, arguments: &[&str], why: &str| {
        manager.configure(supervisor_keys, bulkheads);
        let output = upgrade(&manager, arguments);
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(why), "{why}: {text}");
        assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
        assert_eq!((manager.main(), manager.restarts()), (old, 0));
        wait_for("the new program has exited", || (manager.supervisors() == [old]).then_some(()));
    };
    fails("", "[bulkhead.b]\n", &[], "command");
    fails("crash_dir = \"crashes\"", ONE, &[], "crash_dir");
    fails(
        "",
        &ONE.replace("[\"MISBEHAVE\"]", "[\"/bin/false\"]"),
        &[],
        "the bulkhead 'b' is ready in the previous",
    );
    fails("", ONE, &["--program", "/no/such/program"], "/no/such/program");
    fails("", ONE, &["--program", "/bin/true"], "has exited");
    manager.configure("", ONE);
    upgraded(&manager);
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
}

/// Points at which a program dies. Each point is just before a message is sent, or just after a message was received.
const DEATHS: [&str; 26] = [
    "send 1",
    "receive 1",
    "send 2",
    "receive 2",
    "send 3",
    "receive 3",
    "send 6",
    "receive 6",
    "send 7",
    "receive 7",
    "send 8",
    "receive 8",
    "send 10",
    "receive 10",
    "send 11",
    "receive 11",
    "send 12",
    "receive 12",
    "send 15",
    "receive 15",
    "send 16",
    "receive 16",
    "send 32",
    "receive 32",
    "send 33",
    "receive 33",
];

/// Number of upgrades during which a program dies. The environment variable `BULKHEAD_UPGRADE_DEATHS` overrides the
/// default.
fn deaths() -> usize {
    std::env::var("BULKHEAD_UPGRADE_DEATHS").ok().and_then(|count| count.parse().ok()).unwrap_or(10)
}

/// Number of upgrades to run concurrently. In each upgrade, either the old or the new program dies.
const DEATHS_AT_ONCE: usize = 5;

#[test]
fn one_program_serves_if_the_other_dies_at_any_message() {
    let _heavy = heavy();
    let seed = std::env::var("BULKHEAD_UPGRADE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: usize = seed.unwrap_or_else(|| std::process::id() as usize);
    println!("seed {seed}");
    let next = AtomicUsize::new(0);
    let all = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..DEATHS_AT_ONCE {
            scope.spawn(|| {
                loop {
                    let step = next.fetch_add(1, Ordering::SeqCst);
                    if step >= deaths() {
                        return;
                    }
                    for (outcome, count) in die_at(DEATHS[(seed + step * 7) % DEATHS.len()]) {
                        *all.lock().unwrap().entry(outcome).or_insert(0) += count;
                    }
                }
            });
        }
    });
    println!("{} deaths: {:?}", deaths(), all.lock().unwrap());
}

/// Runs an upgrade under load, during which one of the two programs dies at the given point. Returns the number of jobs
/// by outcome.
fn die_at(death: &str) -> BTreeMap<String, usize> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("death");
    let variables = [("BULKHEAD_UPGRADE_DEATH", file.to_str().unwrap().to_owned())];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    let manager = Manager::start(folder, "", ONE, &variables);
    let load = Load::start_tolerant(&manager);
    // An idle connection moves to the new program. A running job holds a permit at the switch and releases it
    // afterwards.
    let _idle = Raw::connect(&manager.socket());
    let gate = manager.folder.path().join("gate");
    let mut running = Raw::connect(&manager.socket());
    let begun = manager.folder.path().join("begun");
    running.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    wait_for("the job runs", || begun.exists().then_some(()));
    std::fs::write(&file, death).unwrap();
    let upgrading = Upgrading::start(&manager);
    while let Some(line) = upgrading.line() {
        if line.starts_with("switched") {
            std::fs::write(&gate, "").unwrap();
        }
    }
    let (code, message) = upgrading.end();
    std::fs::write(&gate, "").unwrap();
    let text = format!("{death}: {code:?} {message}\n{}", manager.log());
    println!("{death}: {code:?} {message}");
    wait_for(&format!("{death}: the program has died"), || (!file.exists()).then_some(()));
    // One program serves, and the other one has exited.
    wait_for(&format!("{death}: one program is left"), || {
        (manager.supervisors() == [manager.main()]).then_some(())
    });
    wait_for(&format!("{death}: a job runs"), || {
        let client = Client::connect(manager.socket()).ok()?;
        in_time("the job has an outcome", move || client.job("b", "x").send().ok())
    });
    let outcomes = load.stop();
    assert!(outcomes.keys().all(|outcome| !outcome.starts_with("refused")), "{outcomes:?}\n{text}");
    // Also checks that no job began twice.
    read_record(&manager.folder.path().join("record"));
    assert!(manager.restarts() <= 1, "{text}");
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)), "{text}");
    outcomes
}

#[test]
fn old_program_serves_after_death_of_its_successor() {
    let manager = start(ONE);
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, "", b"");
    assert_eq!(raw.outcome(), (1, (0, 0)));
    kill_pid(new, Signal::SIGKILL);
    assert_eq!(raw.0.read(&mut [0]).unwrap_or(0), 0, "the connection ends with the new program");
    assert_eq!(upgrading.end().0, Some(1));
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, "", b"");
    assert_eq!(raw.outcome(), (1, (0, 0)));
    assert_eq!((manager.main(), manager.restarts()), (old, 0));
    wait_for("all permits are free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 4).then_some(()));
    upgraded(&manager);
}

/// A thread of the new program fails, and the new program shuts down cleanly. The listeners and socket files that both
/// programs share must remain usable.
#[test]
fn old_program_serves_after_shutdown_of_its_successor() {
    if !cfg!(debug_assertions) {
        not_run!("a release build does not panic on request");
        return;
    }
    for thread in ["CONTROL", "ONLOOKERS"] {
        let (manager, jobs_http) = start_with_jobs_http(ONE);
        let old = manager.main();
        let [program, sign] = ["program", "panic"].map(|name| manager.folder.path().join(name));
        let supervisor = programs().join("bulkhead-supervisor");
        let (text, supervisor) = (sign.display(), supervisor.display());
        let script = format!("#!/bin/sh\nexport BULKHEAD_PANIC_{thread}={text}\nexec {supervisor} \"$@\"\n");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let upgrading = Upgrading::start_with(&manager, &["--program", program.to_str().unwrap()]);
        upgrading.until_switched(&manager, old);
        std::fs::write(&sign, "").unwrap();
        let (code, message) = upgrading.end();
        assert!(code == Some(1) && message.contains("has exited"), "{code:?}: {message}");
        let client = Client::connect(manager.socket()).unwrap();
        assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
        assert_eq!(get(&manager, "/v1/bulkheads/b")["name"], "b");
        assert_eq!(jobs_http.ask("GET", "/healthz", &[], b"").status, 200);
        assert_eq!((manager.supervisors(), manager.main(), manager.restarts()), (vec![old], old, 0));
    }
}

/// A thread that is stopped while the other threads of its process continue to run.
struct StoppedThread(Pid);

impl StoppedThread {
    fn new(thread: u32) -> Self {
        let thread = Pid::from_raw(thread as i32);
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        Self(thread)
    }

    fn resume(self) {
        ptrace::detach(self.0, None).unwrap();
    }
}

#[test]
fn hung_new_program_is_killed_and_old_program_serves() {
    // Stops first the whole program, and then only its data plane, which runs on the first thread.
    for is_whole in [true, false] {
        let manager = start(ONE);
        let old = manager.main();
        let upgrading = Upgrading::start(&manager);
        let new = upgrading.until_switched(&manager, old);
        if is_whole {
            kill_pid(new, Signal::SIGSTOP);
        } else {
            StoppedThread::new(new);
        }
        let (code, text) = upgrading.end();
        assert!(code == Some(1) && text.contains("has not responded for 3 s"), "{code:?}: {text}");
        let client = Client::connect(manager.socket()).unwrap();
        assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
        assert_eq!((manager.supervisors(), manager.main(), manager.restarts()), (vec![old], old, 0));
    }
}

#[test]
fn permits_of_killed_program_are_freed_when_its_workers_exit() {
    let manager = start(&ONE.replace("processes = 2\nmax_in_flight = 2", "processes = 1\nmax_in_flight = 1"));
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    let [begun, next] = ["begun", "next"].map(|name| manager.folder.path().join(name));
    let gate = manager.folder.path().join("gate");
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    wait_for("the job runs", || begun.exists().then_some(()));
    let worker = get(&manager, "/v1/bulkheads/b")["workers"][0]["pid"].as_u64().unwrap() as u32;
    let keeper = keeper_of(new);
    // The worker cannot exit on its own, and the keeper cannot kill the worker. SIGSTOP would not keep the keeper
    // stopped, because a process stopped by a signal resumes when the new program exits.
    kill_pid(worker, Signal::SIGSTOP);
    let stopped = StoppedThread::new(keeper);
    kill_pid(new, Signal::SIGKILL);
    let (socket, operation) = (manager.socket(), format!("steps:count {}", next.display()));
    let client = std::thread::spawn(move || {
        let mut raw = Raw::connect(&socket);
        raw.submit(1, &operation, b"");
        raw.outcome()
    });
    // Gives the old program time to start the job too early.
    for _ in 0..30 {
        assert!(!next.exists(), "a job began while the killed program's worker had one");
        std::thread::sleep(Duration::from_millis(10));
    }
    stopped.resume();
    wait_for("the next job runs", || next.exists().then_some(()));
    assert!(!is_alive(worker), "the worker is still running");
    assert_eq!(client.join().unwrap(), (1, (0, 0)));
    assert_eq!(upgrading.end().0, Some(1));
}

/// The old program waits for the dead program's workers to exit before it serves clients again. A connection that
/// becomes idle in the meantime must not be passed on.
#[test]
fn idle_connection_survives_death_of_the_successor() {
    let manager = start(ONE);
    let old = manager.main();
    let [begun, gate] = ["begun", "gate"].map(|name| manager.folder.path().join(name));
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    wait_for("the job runs", || begun.exists().then_some(()));
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    // A keeper that is stopped does not kill its workers.
    let stopped = StoppedThread::new(keeper_of(new));
    kill_pid(new, Signal::SIGKILL);
    wait_for("the new program has exited", || (!is_alive(new)).then_some(()));
    std::fs::write(&gate, "").unwrap();
    assert_eq!(raw.outcome(), (1, (0, 0)));
    raw.submit(2, "", b"");
    stopped.resume();
    assert_eq!(raw.outcome(), (2, (0, 0)));
    assert_eq!(upgrading.end().0, Some(1));
}

fn keeper_of(supervisor: u32) -> u32 {
    let is_keeper = |pid: &u32| name(*pid).is_some_and(|name| name == "bulkhead-keeper");
    children(supervisor).into_iter().find(is_keeper).unwrap()
}

#[test]
fn upgrade_fails_if_service_manager_cannot_be_notified() {
    let manager = start(ONE);
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    // The new program rejects requests whose effects would be lost.
    for (request, status) in operators_requests(&manager) {
        assert_eq!(status, 409, "{request}");
    }
    std::fs::remove_file(manager.folder.path().join("notify.sock")).unwrap();
    let (code, text) = upgrading.end();
    assert!(code == Some(1) && text.contains("the old program continues to serve"), "{code:?}: {text}");
    let client = Client::connect(manager.socket()).unwrap();
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
    assert_eq!((manager.supervisors(), manager.main(), manager.restarts()), (vec![old], old, 0));
}

#[test]
fn successor_becomes_main_process_if_predecessor_dies() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("death");
    // The predecessor dies before it sends MAIN.
    std::fs::write(&file, "send 12").unwrap();
    let variables = [("BULKHEAD_UPGRADE_DEATH", file.to_str().unwrap().to_owned())];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    let manager = Manager::start(folder, "", ONE, &variables);
    let old = manager.main();
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    upgrading.end();
    wait_for("the new program is the main process", || (manager.main() == new).then_some(()));
    wait_for("the new program notifies the service manager", || manager.has_notified(new).then_some(()));
    assert_eq!((manager.supervisors(), manager.restarts()), (vec![new], 0));
}

#[test]
fn start_timeout_comes_from_the_new_configuration() {
    // The limit is 10 s more than `start.ready`.
    let with_limit = |limit: &str, once: &str| {
        ONE.replace("[\"MISBEHAVE\"]", &format!("[\"MISBEHAVE\", \"slow-again\", \"{once}\"]"))
            + &format!("start = {{ ready = \"{limit}\" }}\n")
    };
    let one_worker = |bulkheads: String| bulkheads.replace("processes = 2", "processes = 1");
    let manager = start(&one_worker(with_limit("500ms", "first")));
    let old = manager.main();
    // Every worker of the new program waits for the file `go`.
    std::fs::write(manager.folder.path().join("second"), ".").unwrap();
    manager.configure("", &one_worker(with_limit("60s", "second")));
    let upgrading = Upgrading::start(&manager);
    upgrading.until("started");
    // A signal has no response, so the log must say that nothing was reloaded.
    kill_pid(old, Signal::SIGHUP);
    wait_for("the refused reload is reported", || manager.log().contains("config_rejected").then_some(()));
    std::thread::sleep(Duration::from_secs(11));
    assert_eq!(manager.supervisors().len(), 2, "the old program did not wait long enough\n{}", manager.log());
    std::fs::write(manager.folder.path().join("go"), "").unwrap();
    upgrading.until_switched(&manager, old);
}

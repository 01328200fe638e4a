//! Upgrades in which a program dies, hangs, or cannot start. Afterwards, exactly one program serves clients.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bulkhead_tests::confined::{WORKER_UIDS, is_root};
use bulkhead_tests::{children, heavy, name, not_run, processes_with, programs};
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

// Kinds of messages that are only sent if a test causes them.
const TENANT: u8 = 4;
const WORKER_ID: u8 = 5;
const QUARANTINED: u8 = 9;
const MAIN: u8 = 12;
const STOP: u8 = 13;
const FAILED: u8 = 14;

/// Kinds of messages at which a program dies, either just before it sends the message or just after it has received the
/// message.
const KINDS: [u8; 18] =
    [1, 2, 3, TENANT, WORKER_ID, 6, 7, 8, QUARANTINED, 10, 11, MAIN, STOP, FAILED, 15, 16, 32, 33];

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
                    let point = (seed + step * 7) % (2 * KINDS.len());
                    for (outcome, count) in die_at(["send", "receive"][point % 2], KINDS[point / 2]) {
                        *all.lock().unwrap().entry(outcome).or_insert(0) += count;
                    }
                }
            });
        }
    });
    println!("{} deaths: {:?}", deaths(), all.lock().unwrap());
}

/// Returns additional keys for `[supervisor]`, and bulkheads that cause messages of the given kind.
fn configuration_for(kind: u8) -> (&'static str, String) {
    match kind {
        TENANT => {
            ("", format!("{ONE}{}tenants = {{ isolate = true }}\n", ONE.replace("bulkhead.b", "bulkhead.c")))
        }
        QUARANTINED => {
            ("", format!("{ONE}{}poison = {{ crashes = 1 }}\n", ONE.replace("bulkhead.b", "bulkhead.c")))
        }
        WORKER_ID => {
            let programs = programs();
            let programs = programs.display();
            let sandbox = |user: &str, folder: &str| {
                format!(
                    "sandbox = {{ user = \"{user}\", write = [\"{folder}\"], read = [\"{programs}\"] }}\n"
                )
            };
            let own = "[bulkhead.c]\ncommand = [\"MISBEHAVE\"]\n";
            (WORKER_UIDS, format!("{ONE}{}{own}{}", sandbox("shared", "."), sandbox("auto", "own")))
        }
        _ => ("", ONE.to_owned()),
    }
}

/// Changes the state of the service so that an upgrade sends messages of the given kind.
fn cause(kind: u8, manager: &Manager) {
    match kind {
        TENANT => {
            let place = Place::Unix(manager.folder.path().join("admin.sock"));
            let headers = ["Content-Type: application/json"];
            let answer = place.ask("PATCH", "/v1/bulkheads/c/tenants/x", &headers, b"{\"max_queue\": 10}");
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
        QUARANTINED => {
            let client = Client::connect(manager.socket()).unwrap();
            let end = || client.job("c", "x").operation("steps:die").send().unwrap_err().to_string();
            let crashed = end();
            assert!(end().contains("quarantined"), "{crashed}");
        }
        _ => {}
    }
}

/// Creates a program that fails to start because its configuration file does not exist. Returns the program's path.
fn program_without_configuration(manager: &Manager) -> String {
    let path = manager.folder.path().join("program");
    let supervisor = programs().join("bulkhead-supervisor");
    let script = format!(
        "#!/bin/sh\noption=$1 file=$2\nshift 2\nexec {} $option $file.missing \"$@\"\n",
        supervisor.display()
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Runs an upgrade under load, during which one of the two programs dies when it sends or receives a message of the
/// given kind. Returns the number of jobs by outcome.
fn die_at(deed: &str, kind: u8) -> BTreeMap<String, usize> {
    // Without root, workers have no IDs of their own.
    if kind == WORKER_ID && !is_root() {
        return BTreeMap::new();
    }
    let death = format!("{deed} {kind}");
    let (keys, bulkheads) = configuration_for(kind);
    let (manager, file) = start_mortal(keys, &bulkheads);
    cause(kind, &manager);
    let load = Load::start_tolerant(&manager);
    // An idle connection moves to the new program. A running job holds a permit at the switch and releases it
    // afterwards.
    let _idle = Raw::connect(&manager.socket());
    let gate = manager.folder.path().join("gate");
    let mut running = Raw::connect(&manager.socket());
    let begun = manager.folder.path().join("begun");
    running.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    wait_for("the job runs", || begun.exists().then_some(()));
    std::fs::write(&file, &death).unwrap();
    let upgrading = match kind {
        FAILED => Upgrading::start_with(&manager, &["--program", &program_without_configuration(&manager)]),
        _ => Upgrading::start(&manager),
    };
    while let Some(line) = upgrading.line() {
        if line.starts_with("switched") {
            std::fs::write(&gate, "").unwrap();
            if kind == STOP {
                manager.begin_stop();
            }
        }
    }
    let (code, message) = upgrading.end();
    std::fs::write(&gate, "").unwrap();
    let text = format!("{death}: {code:?} {message}\n{}", manager.log());
    println!("{death}: {code:?} {message}");
    wait_for(&format!("{death}: the program has died"), || (!file.exists()).then_some(()));
    let outcomes = if kind == STOP {
        let status = manager.ended();
        // The main process sends the message, and would otherwise outlive the new program.
        assert_eq!(matches!(status, WaitStatus::Exited(_, 0)), deed == "receive", "{status:?}\n{text}");
        load.stop()
    } else {
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
        assert!(manager.restarts() <= 1, "{text}");
        assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)), "{text}");
        outcomes
    };
    // Also checks that no job began twice.
    read_record(&manager.folder.path().join("record"));
    wait_for(&format!("{death}: no process is left"), || manager.processes().is_empty().then_some(()));
    // A killed main process cannot remove its sockets.
    if death != format!("send {STOP}") {
        for socket in ["jobs.sock", "admin.sock"] {
            assert!(!manager.folder.path().join(socket).exists(), "{socket} is left\n{text}");
        }
    }
    outcomes
}

/// Starts a service whose programs kill themselves at the point that the returned file names. The file does not exist
/// yet.
fn start_mortal(supervisor_keys: &str, bulkheads: &str) -> (Manager, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("own")).unwrap();
    let file = folder.path().join("death");
    let variables = [("BULKHEAD_UPGRADE_DEATH", file.to_str().unwrap())];
    (Manager::start(folder, supervisor_keys, bulkheads, &variables), file.clone())
}

/// The new program dies before or after the service manager has learned that it is the main process. In both cases, the
/// service must not stop.
#[test]
fn death_of_new_main_process_restarts_the_service_once() {
    // A release build does not die on request.
    let cases = if cfg!(debug_assertions) { &[false, true][..] } else { &[false] };
    std::thread::scope(|scope| {
        for &is_named in cases {
            scope.spawn(move || {
                let (manager, file) = start_mortal("", ONE);
                let old = manager.main();
                if is_named {
                    std::fs::write(&file, format!("receive {MAIN}")).unwrap();
                } else {
                    manager.kill_next_main();
                }
                let upgrading = Upgrading::start(&manager);
                let new = upgrading.until_switched(&manager, old);
                upgrading.end();
                wait_for("the service restarts", || (manager.restarts() == 1).then_some(()));
                wait_for("a job runs", || {
                    let client = Client::connect(manager.socket()).ok()?;
                    in_time("the job has an outcome", move || client.job("b", "x").send().ok())
                });
                let main = manager.main();
                assert_eq!((manager.supervisors(), manager.restarts()), (vec![main], 1), "{}", manager.log());
                assert!(main != old && main != new);
                assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)), "{}", manager.log());
            });
        }
    });
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

/// The new program hangs after SWITCH has been sent, and before or after it has taken over.
#[test]
fn new_program_that_hangs_at_the_switch_is_killed() {
    if !cfg!(debug_assertions) {
        not_run!("a release build does not hang on request");
        return;
    }
    for point in ["receive 10", "send 11"] {
        let (manager, file) = start_mortal("", ONE);
        let old = manager.main();
        let [begun, gate] = ["begun", "gate"].map(|name| manager.folder.path().join(name));
        let mut running = Raw::connect(&manager.socket());
        running.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
        wait_for("the job runs", || begun.exists().then_some(()));
        let mut idle = Raw::connect(&manager.socket());
        std::fs::write(&file, format!("hang {point}")).unwrap();
        let upgrading = Upgrading::start(&manager);
        wait_for("the new program hangs", || (!file.exists()).then_some(()));
        // The job and the connection wait until the old program serves again.
        idle.submit(1, "", b"");
        let mut late = Raw::connect(&manager.socket());
        late.submit(1, "", b"");
        std::fs::write(&gate, "").unwrap();
        for client in [&mut running, &mut idle, &mut late] {
            assert_eq!(client.outcome(), (1, (0, 0)), "{point}");
        }
        let (code, text) = upgrading.end();
        assert!(code == Some(1) && text.contains("within 1 s"), "{point}: {code:?}: {text}");
        assert_eq!((manager.supervisors(), manager.main(), manager.restarts()), (vec![old], old, 0));
        wait_for("all permits are free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 4).then_some(()));
    }
}

/// Without a service manager, the death of the old program has no effect on the new one.
#[test]
fn unmanaged_new_program_serves_after_the_old_one() {
    std::thread::scope(|scope| {
        for is_killed in [false, true] {
            scope.spawn(move || {
                let mut supervisor = Supervisor::start(ONE);
                let old = supervisor.pid();
                let config = supervisor.folder.path().join("workers.toml").display().to_string();
                let programs = KilledOnDrop(config);
                let mut command = supervisor.command();
                let upgrading = Upgrading::run(command.args(["upgrade", "--unmanaged"]));
                upgrading.until("switched");
                let new = programs.list().into_iter().find(|&pid| pid != old).expect("two programs run");
                if is_killed {
                    supervisor.signal(Signal::SIGKILL);
                }
                let status = supervisor.wait();
                let (code, text) = upgrading.end();
                let expected = if is_killed { (None, Some(69)) } else { (Some(0), Some(0)) };
                assert_eq!((status.code(), code), expected, "{text}\n{}", supervisor.log());
                let client = Client::connect(supervisor.socket()).unwrap();
                assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
                supervisor.wait_number("b", "limit", 4);
                assert_eq!(programs.list(), [new]);
                // The new program accepts the requests that it rejects during an upgrade.
                wait_for("the upgrade has ended", || {
                    (supervisor.post("/v1/bulkheads/b/drain").0 == 200).then_some(())
                });
                kill_pid(new, Signal::SIGTERM);
                wait_for("the new program exits", || programs.list().is_empty().then_some(()));
                assert!(!supervisor.socket().exists(), "the socket still exists");
            });
        }
    });
}

/// Kills all processes whose command line contains the text when dropped.
struct KilledOnDrop(String);

impl KilledOnDrop {
    fn list(&self) -> Vec<u32> {
        processes_with(&self.0)
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        self.list().into_iter().for_each(|pid| kill_pid(pid, Signal::SIGKILL));
    }
}

/// Configuration with a single permit.
fn one_permit() -> String {
    ONE.replace("processes = 2\nmax_in_flight = 2", "processes = 1\nmax_in_flight = 1")
}

/// Submits two jobs that need the same permit. Returns when the first job runs and the second one waits. The workers
/// create the files `begun-1` and `begun-2`. The jobs end when the files `gate-1` and `gate-2` exist.
fn submit_two(manager: &Manager) -> Raw {
    let mut raw = Raw::connect(&manager.socket());
    let path = |name: &str, number: u64| manager.folder.path().join(format!("{name}-{number}"));
    for number in [1, 2] {
        let (begun, gate) = (path("begun", number), path("gate", number));
        raw.submit(number, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
    }
    wait_for("the jobs are in the old program", || {
        let snapshot = get(manager, "/v1/bulkheads/b");
        (snapshot["in_flight"] == 1 && snapshot["queued"] == 1 && path("begun", 1).exists()).then_some(())
    });
    raw
}

#[test]
fn old_program_replaces_its_keeper_and_runs_waiting_jobs() {
    let manager = start(&one_permit());
    let old = manager.main();
    let [begun, gate] = ["begun-2", "gate-2"].map(|name| manager.folder.path().join(name));
    let mut of_old = submit_two(&manager);
    let upgrading = Upgrading::start(&manager);
    upgrading.until_switched(&manager, old);
    let keeper = keeper_of(old);
    kill_pid(keeper, Signal::SIGKILL);
    let (number, (outcome, _)) = of_old.outcome();
    assert_eq!((number, outcome), (1, outcome_code::CRASHED));
    wait_for("the waiting job runs", || begun.exists().then_some(()));
    assert_ne!(keeper_of(old), keeper);
    // The permit belongs to the job in the old program.
    let mut of_new = Raw::connect(&manager.socket());
    of_new.submit(1, "", b"");
    wait_for("the job waits in the new program", || {
        let snapshot = get(&manager, "/v1/bulkheads/b");
        assert_eq!(snapshot["in_flight"], 0, "{snapshot}");
        (snapshot["queued"] == 1 && snapshot["limit"] == 0).then_some(())
    });
    std::fs::write(&gate, "").unwrap();
    assert_eq!(of_old.outcome(), (2, (0, 0)));
    assert_eq!(of_new.outcome(), (1, (0, 0)));
    assert_eq!((upgrading.end().0, manager.restarts()), (Some(0), 0), "{}", manager.log());
    wait_for("the old program has exited", || (manager.supervisors() == [manager.main()]).then_some(()));
}

/// The old program dies after the new program has become the main process. Its permits stay reserved until its workers
/// have exited, even if it had replaced its keeper.
#[test]
fn new_program_serves_after_death_of_the_old_one_with_jobs() {
    let manager = start(&one_permit());
    let old = manager.main();
    let path = |name: &str| manager.folder.path().join(name);
    let mut of_old = submit_two(&manager);
    let upgrading = Upgrading::start(&manager);
    let new = upgrading.until_switched(&manager, old);
    kill_pid(keeper_of(old), Signal::SIGKILL);
    assert_eq!(of_old.outcome().0, 1);
    wait_for("the second job runs", || path("begun-2").exists().then_some(()));
    let keeper = keeper_of(old);
    // A worker in a PID namespace is a child of the namespace's first process.
    let mut inner = children(keeper).into_iter().flat_map(|pid| [vec![pid], children(pid)].concat());
    let is_worker = |pid: &u32| name(*pid).is_some_and(|name| name == "misbehave");
    let worker = inner.find(is_worker).expect("a worker runs the job");
    let (code, text) = upgrading.end();
    assert_eq!(code, Some(0), "{text}");
    wait_for("the new program is the main process", || (manager.main() == new).then_some(()));
    // The worker cannot exit on its own, and the keeper cannot kill the worker.
    kill_pid(worker, Signal::SIGSTOP);
    let stopped = StoppedThread::new(keeper);
    kill_pid(old, Signal::SIGKILL);
    assert_eq!(of_old.0.read(&mut [0]).unwrap_or(0), 0, "the connection ends with the old program");
    let (socket, next) = (manager.socket(), path("next"));
    let operation = format!("steps:count {}", next.display());
    let client = std::thread::spawn(move || {
        let mut raw = Raw::connect(&socket);
        raw.submit(1, &operation, b"");
        raw.outcome()
    });
    // Gives the new program time to start the job too early.
    for _ in 0..30 {
        assert!(!next.exists(), "a job began while the killed program's worker had one");
        std::thread::sleep(Duration::from_millis(10));
    }
    stopped.resume();
    wait_for("the next job runs", || next.exists().then_some(()));
    assert!(!is_alive(worker), "the worker is still running");
    assert_eq!(client.join().unwrap(), (1, (0, 0)));
    wait_for("the permit is free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 1).then_some(()));
    assert_eq!((manager.supervisors(), manager.main(), manager.restarts()), (vec![new], new, 0));
    // The service can be upgraded again.
    let next = wait_for("the upgrade has ended", || {
        Some(upgrade(&manager, &["--program", "/bin/true"])).filter(|output| output.status.code() != Some(75))
    });
    assert!(String::from_utf8_lossy(&next.stdout).contains("has exited"), "{next:?}");
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)), "{}", manager.log());
    wait_for("no process is left", || manager.processes().is_empty().then_some(()));
}

#[test]
fn permits_of_killed_program_are_freed_when_its_workers_exit() {
    let manager = start(&one_permit());
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
    let (manager, file) = start_mortal("", ONE);
    // The predecessor dies before it sends MAIN.
    std::fs::write(&file, format!("send {MAIN}")).unwrap();
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

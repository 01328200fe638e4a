//! Upgrades: the supervisor's program is replaced while clients use it. Each test runs real processes under a stand-in for
//! the service manager. The workers' own record shows how many jobs ran at once, and whether a job began twice.

use std::collections::{BTreeMap, HashSet};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_shared::client_protocol::{Hello, OutcomeMessage, Submit, role};
use bulkhead_shared::codec;
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_tests::http::Place;
use bulkhead_tests::manager::Manager;
use bulkhead_tests::{PATIENCE, Supervisor, heavy, is_alive, kill_pid, wait_for};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use serde_json::Value;

const ONE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 2\nmax_queue = 1000\n\
                   deadline = \"60s\"\ncwd = \".\"\n";

/// Maximum number of jobs of the bulkhead that run at once.
const BOUND: usize = 4;

fn start(bulkheads: &str) -> Manager {
    Manager::start(tempfile::tempdir().unwrap(), "", bulkheads, &[])
}

fn upgrade(manager: &Manager, arguments: &[&str]) -> Output {
    manager.command().arg("--json").arg("upgrade").args(arguments).output().unwrap()
}

/// Upgrades, and returns the pid of the new program.
fn upgraded(manager: &Manager) -> u32 {
    let before = manager.main();
    let output = upgrade(manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let lines = String::from_utf8(output.stdout).unwrap();
    let steps: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = steps.iter().map(|step| step["step"].as_str().unwrap()).collect();
    assert_eq!(names, ["started", "ready", "switched", "finished"]);
    let main = steps[3]["pid"].as_u64().unwrap() as u32;
    assert_ne!(main, before);
    wait_for("the service manager knows the new main process", || (manager.main() == main).then_some(()));
    wait_for("the old program has ended", || (manager.supervisors() == [main]).then_some(()));
    assert_eq!(manager.restarts(), 0);
    main
}

fn get(manager: &Manager, path: &str) -> Value {
    let place = Place::Unix(manager.folder.path().join("admin.sock"));
    let answer = place.ask("GET", path, &[], b"");
    assert_eq!(answer.status, 200, "{path}");
    serde_json::from_slice(&answer.body).unwrap()
}

fn post(manager: &Manager, path: &str) -> u16 {
    Place::Unix(manager.folder.path().join("admin.sock")).ask("POST", path, &[], b"").status
}

/// Reads the workers' record. Returns the number of jobs that began, and the maximum number that ran at once.
fn read_record(path: &Path) -> (usize, usize) {
    let (mut begun, mut running, mut most) = (HashSet::new(), 0, 0);
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        match line.split_once(' ').unwrap() {
            ("begin", id) => {
                assert!(begun.insert(id.to_owned()), "the job {id} began twice");
                running += 1;
                most = most.max(running);
            }
            ("end", _) => running -= 1,
            _ => panic!("{line}"),
        }
    }
    (begun.len(), most)
}

/// A client that encodes its frames itself.
struct Raw(UnixStream);

impl Raw {
    fn connect(path: &Path) -> Self {
        let mut raw = Self(UnixStream::connect(path).unwrap());
        raw.0.set_read_timeout(Some(PATIENCE)).unwrap();
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            role: role::CLIENT,
            frame_bytes_max: u32::MAX,
            capabilities: 0,
            name: "raw",
            version: "0",
        };
        let mut outbox = Outbox::default();
        outbox.push(kind::HELLO, MAGIC, &hello, &[], Payload::NONE).unwrap();
        outbox.flush(&raw.0, &mut BufferPool::default()).unwrap();
        assert_eq!(raw.frame().0.kind, kind::CLIENT_WELCOME);
        raw
    }

    fn submit_bytes(number: u64, operation: &str, payload: &[u8]) -> Vec<u8> {
        let submit = Submit {
            bulkhead: "b",
            operation,
            tenant: "",
            deadline_us: 0,
            priority: 1,
            idempotent: 0,
            cost: 1,
        };
        let mut bytes = vec![0; HEADER_BYTES];
        codec::encode(&submit, &[], &mut bytes).unwrap();
        let metadata_length = (bytes.len() - HEADER_BYTES) as u16;
        bytes.extend_from_slice(payload);
        let length = (bytes.len() - HEADER_BYTES) as u32;
        let header = Header { length, kind: kind::SUBMIT, flags: 0, metadata_length, number };
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        bytes
    }

    fn submit(&mut self, number: u64, operation: &str, payload: &[u8]) {
        self.0.write_all(&Self::submit_bytes(number, operation, payload)).unwrap();
    }

    fn frame(&mut self) -> (Header, Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        self.0.read_exact(&mut header).unwrap();
        let header = Header::decode(&header);
        let mut rest = vec![0; header.length as usize];
        self.0.read_exact(&mut rest).unwrap();
        (header, rest)
    }

    /// Reads the next outcome. Returns the number of its job, and the outcome with its reason.
    fn outcome(&mut self) -> (u64, (u8, u8)) {
        loop {
            let (header, rest) = self.frame();
            if header.kind == kind::OUTCOME {
                let metadata = &rest[..header.metadata_length.into()];
                let (message, _) = codec::decode::<OutcomeMessage<'_>>(metadata, &[]).unwrap();
                return (header.number, (message.outcome, message.reason));
            }
        }
    }

    fn outcome_text(&mut self) -> String {
        match self.outcome() {
            (_, (0, 0)) => "ok".into(),
            other => format!("raw: {other:?}"),
        }
    }
}

/// Maximum number of the raw client's jobs whose outcomes are not read yet.
const UNREAD_MAX: u64 = 3;

/// Clients of all kinds that submit jobs until they are stopped.
struct Load {
    is_over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<BTreeMap<String, usize>>>,
    /// The raw client, with the number of submitted jobs.
    raw: Option<Arc<Mutex<(Raw, u64)>>>,
}

impl Load {
    fn start(manager: &Manager, jobs_http: Option<&Place>) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ids = Arc::new(AtomicU64::new(0));
        let record = manager.folder.path().join("record");
        let operation = format!("steps:ledger {} 2", record.display());
        let socket = manager.socket();
        let mut clients = Vec::new();
        let mut add = |run: Box<dyn FnMut(String) -> String + Send>| {
            let (is_over, ids) = (is_over.clone(), ids.clone());
            let mut run = run;
            clients.push(std::thread::spawn(move || {
                let mut outcomes = BTreeMap::new();
                while !is_over.load(Ordering::SeqCst) {
                    let id = ids.fetch_add(1, Ordering::SeqCst).to_string();
                    *outcomes.entry(run(id)).or_insert(0) += 1;
                }
                outcomes
            }));
        };
        // The library, with one connection for all jobs.
        let client = Client::connect(&socket).unwrap();
        for _ in 0..2 {
            let (client, operation) = (client.clone(), operation.clone());
            add(Box::new(move |id| match client.job("b", id).operation(&operation).send() {
                Ok(_) => "ok".into(),
                Err(error) => format!("library: {error}"),
            }));
        }
        // The library, with a connection for each job.
        let (path, of_library) = (socket.clone(), operation.clone());
        add(Box::new(move |id| {
            let client = Client::connect(&path).unwrap();
            match client.job("b", id).operation(&of_library).send() {
                Ok(_) => "ok".into(),
                Err(error) => format!("connection for each job: {error}"),
            }
        }));
        // A client without library that always has several jobs in progress on its connection.
        let raw = Arc::new(Mutex::new((Raw::connect(&socket), 0)));
        let (of_raw, operation_of_raw) = (raw.clone(), operation.clone());
        add(Box::new(move |id| {
            let (raw, submitted) = &mut *of_raw.lock().unwrap();
            *submitted += 1;
            raw.submit(*submitted, &operation_of_raw, id.as_bytes());
            if *submitted <= UNREAD_MAX { "ok".into() } else { raw.outcome_text() }
        }));
        // Jobs over HTTP.
        if let Some(place) = jobs_http {
            let place = place.clone();
            let mut connection = place.keep_alive();
            let headers = [
                "Authorization: Bearer a-token-for-the-jobs".to_owned(),
                format!("Bulkhead-Operation: {operation}"),
            ];
            add(Box::new(move |id| {
                let headers = headers.each_ref().map(String::as_str);
                let answer = connection.ask("POST", "/v1/bulkheads/b/jobs", &headers, id.as_bytes());
                match answer {
                    Some(answer) => {
                        if answer.headers.get("connection").is_some_and(|it| it == "close") {
                            connection = place.keep_alive();
                        }
                        if answer.status == 200 { "ok".into() } else { format!("HTTP: {answer:?}") }
                    }
                    None => {
                        connection = place.keep_alive();
                        "HTTP: no answer".into()
                    }
                }
            }));
        }
        Self { is_over, clients, raw: Some(raw) }
    }

    /// Stops the clients. Returns the number of jobs by outcome.
    fn stop(self) -> BTreeMap<String, usize> {
        self.is_over.store(true, Ordering::SeqCst);
        let mut outcomes = BTreeMap::new();
        for client in self.clients {
            for (outcome, count) in client.join().unwrap() {
                *outcomes.entry(outcome).or_insert(0) += count;
            }
        }
        // The raw client's first jobs were counted at their submission.
        if let Some(raw) = self.raw {
            let (raw, submitted) = &mut *raw.lock().unwrap();
            for _ in 0..(*submitted).min(UNREAD_MAX) {
                let outcome = raw.outcome_text();
                if outcome != "ok" {
                    *outcomes.entry(outcome).or_insert(0) += 1;
                }
            }
        }
        outcomes
    }
}

/// Number of upgrades under load. More with `BULKHEAD_UPGRADES`.
fn upgrades() -> usize {
    std::env::var("BULKHEAD_UPGRADES").ok().and_then(|count| count.parse().ok()).unwrap_or(2)
}

#[test]
fn upgrades_under_load_lose_refuse_and_repeat_no_job() {
    let _heavy = heavy();
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("jobs");
    std::fs::write(&token, "a-token-for-the-jobs").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let uid = nix::unistd::getuid();
    let bulkheads = format!("[[access]]\ntoken_file = \"jobs\"\n[[access]]\nuid = {uid}\n{ONE}");
    let manager = Manager::start(folder, "jobs_http = \"127.0.0.1:0\"", &bulkheads, &[]);
    let address = wait_for("the log has the address", || {
        let log = manager.log();
        let (_, rest) = log.split_once("jobs_http on ")?;
        rest.split(char::is_whitespace).next()?.parse().ok()
    });
    let load = Load::start(&manager, Some(&Place::Tcp(address)));
    for _ in 0..upgrades() {
        upgraded(&manager);
    }
    let outcomes = load.stop();
    let submitted: usize = outcomes.values().sum();
    assert_eq!(outcomes.keys().collect::<Vec<_>>(), ["ok"], "{outcomes:?}\n{}", manager.log());
    let record = manager.folder.path().join("record");
    let (begun, most) = read_record(&record);
    assert!(most <= BOUND, "{most} jobs ran at once");
    assert_eq!(begun, submitted);
    assert!(submitted > 1000, "{submitted}");
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    assert!(!manager.socket().exists(), "the socket is left");
}

#[test]
fn jobs_of_the_old_program_count_towards_the_limit() {
    let manager = start(&ONE.replace("processes = 2\nmax_in_flight = 2", "processes = 1\nmax_in_flight = 1"));
    let gate = manager.folder.path().join("gate");
    let mut first = Raw::connect(&manager.socket());
    first.submit(1, &format!("steps:wait {}", gate.display()), b"");
    wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
    let old = manager.main();
    // The rest of a request is sent after the upgrade.
    let mut half = Raw::connect(&manager.socket());
    let bytes = Raw::submit_bytes(7, "", b"half");
    half.0.write_all(&bytes[..20]).unwrap();
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    let new = wait_for("another main process", || Some(manager.main()).filter(|&main| main != old));
    assert!(is_alive(old), "the old program has a job");
    half.0.write_all(&bytes[20..]).unwrap();
    // On the connection that has a job, a new one waits for the end of that job.
    first.submit(2, "", b"");
    wait_for("the job waits in the new program", || {
        let snapshot = get(&manager, "/v1/bulkheads/b");
        assert_eq!(snapshot["in_flight"], 0, "{snapshot}");
        (snapshot["queued"] == 1 && snapshot["limit"] == 0).then_some(())
    });
    assert_eq!(upgrade(&manager, &[]).status.code(), Some(75), "the old program still has a job");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(first.outcome(), (1, (0, 0)));
    assert_eq!(half.outcome(), (7, (0, 0)));
    assert_eq!(first.outcome(), (2, (0, 0)));
    wait_for("the old program has ended", || (manager.supervisors() == [new]).then_some(()));
    wait_for("all permits are free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 1).then_some(()));
    let finished = wait_for("the new program reports the end", || {
        let place = Place::Unix(manager.folder.path().join("admin.sock"));
        let events = place.ask("GET", "/v1/events?follow=false", &[], b"");
        let events = String::from_utf8(events.body).unwrap();
        events.lines().find(|line| line.contains("upgrade_finished")).map(str::to_owned)
    });
    let finished: Value = serde_json::from_str(&finished).unwrap();
    assert_eq!(finished["pid"], new);
    assert!(finished["seq"].as_u64().unwrap() > 1 << 24, "{finished}");
}

#[test]
fn job_of_the_old_program_delays_no_later_job_of_its_client() {
    let manager = start(ONE);
    let (gate, begun) = (manager.folder.path().join("gate"), manager.folder.path().join("begun"));
    let client = Arc::new(Client::connect(manager.socket()).unwrap());
    let operation = format!("steps:count {};wait {}", begun.display(), gate.display());
    let long = {
        let client = client.clone();
        std::thread::spawn(move || client.job("b", "").operation(&operation).send().map(drop))
    };
    wait_for("the job runs", || begun.exists().then_some(()));
    let output = upgrade(&manager, &[]);
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    for _ in 0..10 {
        assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
    }
    assert!(!long.is_finished());
    std::fs::write(&gate, "").unwrap();
    long.join().unwrap().unwrap();
    wait_for("the old program has ended", || (manager.supervisors() == [manager.main()]).then_some(()));
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
}

#[test]
fn decisions_of_operators_survive_an_upgrade() {
    let two = ONE.replace("bulkhead.b", "bulkhead.c");
    let manager = start(&format!("{ONE}{two}"));
    let resize = |arguments: &[&str]| {
        let output = manager.command().arg("resize").args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    resize(&["b", "--processes", "3", "--rate", "500"]);
    resize(&["c", "--breaker", "forced_open"]);
    assert_eq!(post(&manager, "/v1/bulkheads/c/drain"), 200);
    upgraded(&manager);
    let (b, c) = (get(&manager, "/v1/bulkheads/b"), get(&manager, "/v1/bulkheads/c"));
    assert_eq!((&b["processes"], &b["rate_limit"]["per_second"]), (&3.into(), &500.0.into()), "{b}");
    assert_eq!((&c["breaker"], &c["state"]), (&"forced_open".into(), &"draining".into()), "{c}");
    wait_for("the third worker is ready", || (get(&manager, "/v1/bulkheads/b")["limit"] == 6).then_some(()));
}

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
        wait_for("the new program has ended", || (manager.supervisors() == [old]).then_some(()));
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
    fails("", ONE, &["--program", "/bin/true"], "ended");
    manager.configure("", ONE);
    upgraded(&manager);
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
}

#[test]
fn supervisor_that_cannot_be_upgraded_says_so() {
    let supervisor = Supervisor::start(ONE);
    let refused = supervisor.command().arg("upgrade").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("--unmanaged"), "{text}");
    let (reader, writer) = std::io::pipe().unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&reader);
    nix::fcntl::fcntl(&reader, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let supervisor = Supervisor::start_as(&["--while-open", &number.to_string()], &[], ONE);
    let refused = supervisor.command().args(["upgrade", "--unmanaged"]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("--while-open"), "{text}");
    drop(writer);
}

#[test]
fn operators_wait_while_an_upgrade_is_under_way() {
    // The workers of the new program do not become ready.
    let manager = start(ONE);
    let slow = ONE.replace("[\"MISBEHAVE\"]", "[\"MISBEHAVE\", \"init-hangs\"]");
    manager.configure("", &slow);
    let mut upgrading = manager.command().arg("upgrade").spawn().unwrap();
    wait_for("two programs run", || (manager.supervisors().len() == 2).then_some(()));
    assert_eq!(upgrade(&manager, &[]).status.code(), Some(75));
    for path in ["/v1/reload", "/v1/bulkheads/b/drain", "/v1/bulkheads/b/restart"] {
        assert_eq!(post(&manager, path), 409, "{path}");
    }
    // A signal ends the new program, and then the old one.
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    assert_eq!(upgrading.wait().unwrap().code(), Some(1));
}

#[test]
fn signal_stops_both_programs_after_their_jobs() {
    for is_new_main in [false, true] {
        let manager = start(ONE);
        let gate = manager.folder.path().join("gate");
        let operation = format!("steps:wait {}", gate.display());
        let mut of_old = Raw::connect(&manager.socket());
        of_old.submit(1, &operation, b"");
        wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
        let old = manager.main();
        let mut upgrading =
            manager.command().arg("upgrade").stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(upgrading.stdout.take().unwrap()));
        let wanted = if is_new_main { "finished" } else { "switched" };
        while !lines.next().expect("the step is reached").unwrap().starts_with(wanted) {}
        let mut of_new = Raw::connect(&manager.socket());
        of_new.submit(1, &operation, b"");
        wait_for("the job runs", || (get(&manager, "/v1/bulkheads/b")["in_flight"] == 1).then_some(()));
        assert_eq!(manager.main() != old, is_new_main);
        let stopped = std::thread::scope(|scope| {
            let stopped = scope.spawn(|| manager.stop());
            wait_for("both programs drain", || {
                (manager.log().matches("draining").count() >= 2).then_some(())
            });
            std::fs::write(&gate, "").unwrap();
            assert_eq!(of_old.outcome(), (1, (0, 0)));
            assert_eq!(of_new.outcome(), (1, (0, 0)));
            stopped.join().unwrap()
        });
        assert!(matches!(stopped, WaitStatus::Exited(_, 0)), "{stopped:?}");
        assert!(!manager.socket().exists(), "the socket is left");
        let _ = upgrading.wait();
    }
}

/// Kinds of messages at which a program dies: before it sends the message, or when it has received it.
const DEATHS: [&str; 22] = [
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
    "send 32",
    "receive 32",
    "send 33",
    "receive 33",
];

/// Number of deaths that are tried. More with `BULKHEAD_UPGRADE_DEATHS`.
fn deaths() -> usize {
    std::env::var("BULKHEAD_UPGRADE_DEATHS").ok().and_then(|count| count.parse().ok()).unwrap_or(10)
}

#[test]
fn one_program_serves_after_a_death_at_any_message() {
    let _heavy = heavy();
    let seed = std::env::var("BULKHEAD_UPGRADE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: usize = seed.unwrap_or_else(|| std::process::id() as usize);
    println!("seed {seed}");
    for step in 0..deaths() {
        let death = DEATHS[(seed + step * 7) % DEATHS.len()];
        println!("{death}");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("death");
        let variable = [("BULKHEAD_UPGRADE_DEATH", file.to_str().unwrap())];
        let variable = variable.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let variables = [(variable[0].0.as_str(), variable[0].1.as_str())];
        let manager = Manager::start(folder, "", ONE, &variables);
        let load = Load::start_tolerant(&manager);
        // An idle connection moves. A running job needs a permit at the switch, and no longer after it.
        let _idle = Raw::connect(&manager.socket());
        let gate = manager.folder.path().join("gate");
        let mut running = Raw::connect(&manager.socket());
        let begun = manager.folder.path().join("begun");
        running.submit(1, &format!("steps:count {};wait {}", begun.display(), gate.display()), b"");
        wait_for("the job runs", || begun.exists().then_some(()));
        std::fs::write(&file, death).unwrap();
        let mut upgrading =
            manager.command().arg("upgrade").stdout(std::process::Stdio::piped()).spawn().unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(upgrading.stdout.take().unwrap()));
        for line in lines.map_while(Result::ok) {
            if line.starts_with("switched") {
                std::fs::write(&gate, "").unwrap();
            }
        }
        let status = upgrading.wait().unwrap();
        std::fs::write(&gate, "").unwrap();
        let text = format!("{death}: {status}\n{}", manager.log());
        wait_for("the program has died", || (!file.exists()).then_some(()));
        // One program serves, and the other one is gone.
        wait_for(&format!("{death}: one program is left"), || {
            (manager.supervisors() == [manager.main()]).then_some(())
        });
        wait_for(&format!("{death}: a job runs"), || {
            let client = Client::connect(manager.socket()).ok()?;
            client.job("b", "x").send().ok()
        });
        let outcomes = load.stop();
        assert!(outcomes.keys().all(|outcome| !outcome.starts_with("refused")), "{outcomes:?}\n{text}");
        // Also checks that no job began twice.
        read_record(&manager.folder.path().join("record"));
        assert!(manager.restarts() <= 1, "{text}");
        assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)), "{text}");
    }
}

impl Load {
    /// Starts clients that connect again after their connection has ended, as after the crash of a supervisor.
    fn start_tolerant(manager: &Manager) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ids = Arc::new(AtomicU64::new(0));
        let record = manager.folder.path().join("record");
        let operation = format!("steps:ledger {} 2", record.display());
        let clients = (0..3).map(|_| {
            let (is_over, ids, operation, socket) =
                (is_over.clone(), ids.clone(), operation.clone(), manager.socket());
            std::thread::spawn(move || {
                let mut outcomes = BTreeMap::new();
                let mut client = None;
                while !is_over.load(Ordering::SeqCst) {
                    let Some(open) = client.take().or_else(|| Client::connect(&socket).ok()) else {
                        std::thread::sleep(Duration::from_millis(5));
                        continue;
                    };
                    let id = ids.fetch_add(1, Ordering::SeqCst).to_string();
                    let outcome = match open.job("b", id).operation(&operation).send() {
                        Ok(_) => {
                            client = Some(open);
                            "ok".to_owned()
                        }
                        Err(error) => match error.outcome() {
                            Some(outcome) if outcome.verdict.name() == "rejected" => {
                                format!("refused: {error}")
                            }
                            _ => "unknown".to_owned(),
                        },
                    };
                    *outcomes.entry(outcome).or_insert(0) += 1;
                }
                outcomes
            })
        });
        let clients = clients.collect();
        Self { is_over, clients, raw: None }
    }
}

#[test]
fn keeper_and_kept_connection_of_dead_successor_are_gone() {
    let manager = start(ONE);
    let old = manager.main();
    let mut upgrading =
        manager.command().arg("upgrade").stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(upgrading.stdout.take().unwrap()));
    while !lines.next().expect("the step is reached").unwrap().starts_with("switched") {}
    let new = wait_for("two programs run", || manager.supervisors().into_iter().find(|&pid| pid != old));
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, "", b"");
    assert_eq!(raw.outcome(), (1, (0, 0)));
    kill_pid(new, Signal::SIGKILL);
    assert_eq!(raw.0.read(&mut [0]).unwrap_or(0), 0, "the connection ends with the new program");
    assert_eq!(upgrading.wait().unwrap().code(), Some(1));
    let mut raw = Raw::connect(&manager.socket());
    raw.submit(1, "", b"");
    assert_eq!(raw.outcome(), (1, (0, 0)));
    assert_eq!((manager.main(), manager.restarts()), (old, 0));
    wait_for("all permits are free", || (get(&manager, "/v1/bulkheads/b")["limit"] == 4).then_some(()));
    upgraded(&manager);
}

//! Upgrades under load: clients of all kinds submit jobs to three bulkheads, and the workers record each job.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bulkhead_tests::http::Place;
use bulkhead_tests::manager::Manager;
use bulkhead_tests::{SetOnDrop, heavy, not_run, programs};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::wait::WaitStatus;

use super::*;

/// Three bulkheads: one with a queue, one with separate workers for each tenant, and one that receives payloads in
/// memory files.
const THREE: &str = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\nmax_in_flight = 2\nmax_queue = 1000\n\
                     [bulkhead.tenants]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1000\n\
                     tenants = { isolate = true, max_active = 4 }\n\
                     [bulkhead.files]\ncommand = [\"MISBEHAVE\"]\nmax_queue = 1000\n\
                     [defaults]\ndeadline = \"60s\"\ncwd = \".\"\n";

/// Names of files in which workers record their jobs. The number is the maximum number of jobs in the file that can
/// run at the same time.
const RECORDS: [(&str, usize); 4] =
    [("record-b", 4), ("record-tenants-x", 1), ("record-tenants-y", 1), ("record-files", 1)];

/// Size of the payloads that are sent in memory files, in bytes.
const FILE_BYTES: usize = 128 * 1024;

/// Maximum number of outcomes that the raw client leaves unread. The raw client encodes frames without the client
/// library.
const UNREAD_MAX: u64 = 3;

/// Reads a file in which workers have recorded their jobs. Returns the number of jobs that began, and the maximum
/// number that ran at the same time.
pub(super) fn read_record(path: &Path) -> (usize, usize) {
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

type Outcomes = BTreeMap<String, usize>;

/// Clients that submit jobs until they are stopped.
pub(super) struct Load {
    is_over: Arc<AtomicBool>,
    ids: Arc<AtomicU64>,
    clients: Vec<JoinHandle<Outcomes>>,
    began: Instant,
    /// Client that encodes its own frames instead of using the client library, and the number of jobs that it has
    /// submitted.
    raw: Option<Arc<Mutex<(Raw, u64)>>>,
    /// Number of jobs whose payload was passed to a worker in a leased memory file.
    lent: Arc<AtomicU64>,
}

/// Returns an operation that lasts two milliseconds and records the beginning and the end of the job.
fn recorded(manager: &Manager, record: &str, id: &str) -> String {
    format!("steps:ledger {} 2 {id}", manager.folder.path().join(record).display())
}

impl Load {
    fn new() -> Self {
        Self {
            is_over: Arc::default(),
            ids: Arc::default(),
            clients: Vec::new(),
            began: Instant::now(),
            raw: None,
            lent: Arc::default(),
        }
    }

    /// Adds a client thread. `run` runs a job with the given ID and returns the job's outcome.
    fn add(&mut self, mut run: impl FnMut(&str) -> String + Send + 'static) {
        let (is_over, ids) = (self.is_over.clone(), self.ids.clone());
        self.clients.push(std::thread::spawn(move || {
            let mut outcomes = Outcomes::new();
            while !is_over.load(Ordering::SeqCst) {
                let id = ids.fetch_add(1, Ordering::SeqCst).to_string();
                *outcomes.entry(run(&id)).or_insert(0) += 1;
            }
            outcomes
        }));
    }

    /// Starts clients of all kinds.
    fn start(manager: &Manager, jobs_http: &Place) -> Self {
        let mut load = Self::new();
        let socket = manager.socket();
        let operation = |record: &str| {
            let base = recorded(manager, record, "");
            move |id: &str| format!("{base}{id}")
        };
        // Uses the library, with one connection for all jobs.
        let client = Client::connect(&socket).unwrap();
        for _ in 0..2 {
            let (client, operation) = (client.clone(), operation("record-b"));
            load.add(move |id| text(client.job("b", "").operation(operation(id)).send()));
        }
        for tenant in ["x", "x", "y", "y"] {
            let (client, operation) = (client.clone(), operation(&format!("record-tenants-{tenant}")));
            load.add(move |id| {
                text(client.job("tenants", "").tenant(tenant).operation(operation(id)).send())
            });
        }
        // Payloads in memory files. The worker reports where the payload was, and the sum of its bytes.
        for _ in 0..2 {
            let (client, operation, lent) = (client.clone(), operation("record-files"), load.lent.clone());
            load.add(move |id| {
                let operation = operation(id) + ";sum";
                let reply = client.job("files", vec![1; FILE_BYTES]).operation(&operation).send();
                let answer = reply.as_ref().map(|reply| String::from_utf8_lossy(reply.payload()));
                match answer.as_deref().map(|answer| answer.split_once(' ')) {
                    Ok(Some((place, sum))) if sum == FILE_BYTES.to_string() => {
                        lent.fetch_add(u64::from(place == "file"), Ordering::SeqCst);
                        "ok".into()
                    }
                    _ => format!("file: {reply:?}"),
                }
            });
        }
        // Uses the library, with a connection for each job.
        let (path, operation_of_each) = (socket.clone(), operation("record-b"));
        load.add(move |id| {
            let client = Client::connect(&path).unwrap();
            text(client.job("b", "").operation(operation_of_each(id)).send())
        });
        // A client that does not use the library and always has several jobs in progress on its connection.
        let raw = Arc::new(Mutex::new((Raw::connect(&socket), 0)));
        let (of_raw, operation_of_raw) = (raw.clone(), operation("record-b"));
        load.add(move |id| {
            let (raw, submitted) = &mut *of_raw.lock().unwrap();
            *submitted += 1;
            raw.submit(*submitted, &operation_of_raw(id), b"");
            if *submitted <= UNREAD_MAX { "ok".into() } else { raw.outcome_text() }
        });
        load.raw = Some(raw);
        // Jobs over HTTP.
        let (place, operation_of_http) = (jobs_http.clone(), operation("record-b"));
        let mut connection = place.keep_alive();
        load.add(move |id| {
            let headers = [
                "Authorization: Bearer a-token-for-the-jobs".to_owned(),
                format!("Bulkhead-Operation: {}", operation_of_http(id)),
            ];
            let headers = headers.each_ref().map(String::as_str);
            match connection.ask("POST", "/v1/bulkheads/b/jobs", &headers, b"") {
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
        });
        load.add_python(manager);
        load
    }

    /// Adds a Python client with two threads.
    fn add_python(&mut self, manager: &Manager) {
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python/src");
        let spawned = Command::new("python3")
            .args(["-c", PYTHON])
            .arg(manager.socket())
            .arg(recorded(manager, "record-b", "python-"))
            .env("PYTHONPATH", package)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(child) = spawned else {
            not_run!("the Python client: python3 is not installed");
            return;
        };
        let is_over = self.is_over.clone();
        self.clients.push(std::thread::spawn(move || {
            while !is_over.load(Ordering::SeqCst) {
                std::thread::park_timeout(Duration::from_millis(10));
            }
            // `wait_with_output` closes the standard input, which stops the client.
            let output = child.wait_with_output().unwrap();
            serde_json::from_slice(&output.stdout).expect("the Python client prints its outcomes")
        }));
    }

    /// Starts clients that reconnect when their connection is lost. Used by tests in which a supervisor dies.
    pub(super) fn start_tolerant(manager: &Manager) -> Self {
        let mut load = Self::new();
        for _ in 0..3 {
            let (operation, socket) = (recorded(manager, "record", ""), manager.socket());
            let mut client = None;
            load.add(move |id| {
                let open = client.take().or_else(|| Client::connect(&socket).ok());
                let Some(open) = open else {
                    std::thread::sleep(Duration::from_millis(5));
                    return "not connected".into();
                };
                match open.job("b", "").operation(format!("{operation}{id}")).send() {
                    Ok(_) => {
                        client = Some(open);
                        "ok".into()
                    }
                    Err(error) => match error.outcome() {
                        Some(outcome) if outcome.verdict.name() == "rejected" => format!("refused: {error}"),
                        _ => "unknown".into(),
                    },
                }
            });
        }
        load
    }

    /// Stops the clients. Returns the number of jobs by outcome.
    pub(super) fn stop(self) -> Outcomes {
        self.is_over.store(true, Ordering::SeqCst);
        let mut outcomes = Outcomes::new();
        for client in self.clients {
            wait_for("the client's last job has an outcome", || client.is_finished().then_some(()));
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

fn text(ended: Result<bulkhead_client::Reply, bulkhead_client::JobError>) -> String {
    ended.map_or_else(|error| format!("library: {error}"), |_| "ok".into())
}

/// Submits jobs from two threads until standard input ends. Prints the number of jobs by outcome.
const PYTHON: &str = "
import collections, json, sys, threading
import bulkhead
client, outcomes, is_over = bulkhead.Client(sys.argv[1]), collections.Counter(), threading.Event()
def submit(name):
    number = 0
    while not is_over.is_set():
        number += 1
        try:
            client.call('b', operation=f'{sys.argv[2]}{name}-{number}')
            outcome = 'ok'
        except bulkhead.JobError as error:
            outcome = f'Python: {error}'
        with lock:
            outcomes[outcome] += 1
lock = threading.Lock()
threads = [threading.Thread(target=submit, args=(name,)) for name in range(2)]
[thread.start() for thread in threads]
sys.stdin.read()
is_over.set()
[thread.join() for thread in threads]
print(json.dumps(outcomes))
";

/// Number of upgrades under load. The environment variable `BULKHEAD_UPGRADES` overrides the default.
fn upgrades() -> usize {
    std::env::var("BULKHEAD_UPGRADES").ok().and_then(|count| count.parse().ok()).unwrap_or(2)
}

/// The environment variable `BULKHEAD_UPGRADE_PROGRAM` is the path of a supervisor of another release. The service is
/// then upgraded to this program, and back.
#[test]
fn upgrades_under_load_never_lose_reject_or_repeat_a_job() {
    let _heavy = heavy();
    let (manager, jobs_http) = start_with_jobs_http(THREE);
    let load = Load::start(&manager, &jobs_http);
    let own = programs().join("bulkhead-supervisor");
    for number in 0..upgrades() {
        match std::env::var("BULKHEAD_UPGRADE_PROGRAM") {
            Ok(other) => {
                let program = if number % 2 == 0 { other.as_str() } else { own.to_str().unwrap() };
                upgraded_with(&manager, &["--program", program]);
            }
            Err(_) => drop(upgraded(&manager)),
        }
    }
    let (began, lent) = (load.began, load.lent.clone());
    let outcomes = load.stop();
    let submitted: usize = outcomes.values().sum();
    let lent = lent.load(Ordering::SeqCst);
    println!(
        "{} upgrades, {submitted} jobs ({lent} in memory files), {:.0} jobs/s",
        upgrades(),
        submitted as f64 / began.elapsed().as_secs_f64()
    );
    assert_eq!(outcomes.keys().collect::<Vec<_>>(), ["ok"], "{outcomes:?}\n{}", manager.log());
    let mut all = 0;
    for (record, bound) in RECORDS {
        let (begun, most) = read_record(&manager.folder.path().join(record));
        println!("{record}: {begun} jobs, at most {most} of {bound} at once");
        assert!(begun > 0 && most <= bound, "{record}: {begun} jobs began, {most} ran at once");
        all += begun;
    }
    assert_eq!(all, submitted);
    assert!(submitted > 1000 && lent > 0, "{submitted} jobs, {lent} in memory files");
    assert!(matches!(manager.stop(), WaitStatus::Exited(_, 0)));
    assert!(!manager.socket().exists(), "the socket still exists");
}

#[test]
fn job_in_old_program_does_not_delay_later_jobs_of_its_client() {
    let manager = start(ONE);
    let (gate, begun) = (manager.folder.path().join("gate"), manager.folder.path().join("begun"));
    let client = Arc::new(Client::connect(manager.socket()).unwrap());
    let operation = format!("steps:count {};wait {}", begun.display(), gate.display());
    let long = {
        let client = client.clone();
        std::thread::spawn(move || client.job("b", "").operation(&operation).send().map(drop))
    };
    wait_for("the job runs", || begun.exists().then_some(()));
    let is_over = Arc::new(AtomicBool::new(false));
    let short = {
        let (client, is_over) = (client.clone(), is_over.clone());
        std::thread::spawn(move || {
            let (mut jobs, mut longest) = (0, Duration::ZERO);
            while !is_over.load(Ordering::SeqCst) {
                let began = Instant::now();
                client.job("b", "").operation("steps:sleep 5").send().unwrap();
                (jobs, longest) = (jobs + 1, longest.max(began.elapsed()));
            }
            (jobs, longest)
        })
    };
    let output = upgrade(&manager, &[]);
    is_over.store(true, Ordering::SeqCst);
    wait_for("the last short job has an outcome", || short.is_finished().then_some(()));
    let (jobs, longest) = short.join().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}\n{}", manager.log());
    println!("{jobs} jobs of 5 ms beside a job that ran all the time: the longest took {longest:?}");
    assert!(jobs > 0);
    for _ in 0..10 {
        assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
    }
    assert!(!long.is_finished());
    std::fs::write(&gate, "").unwrap();
    wait_for("the long job has an outcome", || long.is_finished().then_some(()));
    long.join().unwrap().unwrap();
    wait_for("the old program has exited", || (manager.supervisors() == [manager.main()]).then_some(()));
    assert_eq!(client.job("b", "x").send().unwrap().payload(), b"x");
}

/// Number of open connections in the measurement of waits.
const SESSIONS: usize = 1000;

/// Number of upgrades in the measurement of waits, and of periods of the same length without an upgrade.
const ROUNDS: usize = 3;

/// Prints the longest wait of a library client whose jobs take one millisecond, with and without an upgrade.
#[test]
#[ignore = "takes a minute, and only prints figures"]
fn longest_wait_of_a_client_during_an_upgrade() {
    // Each connection has one descriptor in this process.
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let keys = format!("max_clients = {}\n", 2 * SESSIONS);
    let manager = Manager::start(tempfile::tempdir().unwrap(), &keys, ONE, &[]);
    let sessions: Vec<Raw> = (0..SESSIONS).map(|_| Raw::connect(&manager.socket())).collect();
    let client = Client::connect(manager.socket()).unwrap();
    for round in 1..=ROUNDS {
        for is_upgrade in [false, true] {
            let is_over = AtomicBool::new(false);
            let (jobs, longest) = std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    let (mut jobs, mut longest) = (0, Duration::ZERO);
                    while !is_over.load(Ordering::SeqCst) {
                        let began = Instant::now();
                        client.job("b", "").operation("steps:sleep 1").send().unwrap();
                        (jobs, longest) = (jobs + 1, longest.max(began.elapsed()));
                    }
                    (jobs, longest)
                });
                let _guard = SetOnDrop(&is_over);
                if is_upgrade {
                    upgraded(&manager);
                } else {
                    std::thread::sleep(Duration::from_secs(11));
                }
                is_over.store(true, Ordering::SeqCst);
                waits.join().unwrap()
            });
            let with = if is_upgrade { "with an upgrade" } else { "without an upgrade" };
            println!("round {round}, {with}: {jobs} jobs of 1 ms, the longest took {longest:?}");
        }
    }
    for mut session in sessions {
        session.submit(1, "", b"");
        assert_eq!(session.outcome(), (1, (0, 0)));
    }
}

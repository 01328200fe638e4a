//! Two supervisors behind HAProxy, with the configuration of `deploy/haproxy`. Hosts are stopped and killed under load,
//! and each host records the jobs that it runs.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bulkhead_tests::http::{Answer, Place};
use bulkhead_tests::ports::free_port;
use bulkhead_tests::{PATIENCE, Supervisor, not_run, tally, wait_for};
use nix::sys::signal::Signal;
use tempfile::TempDir;

const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/haproxy/haproxy.cfg");
const CALLERS: usize = 16;
/// Maximum time that a caller spends sending jobs. The limit only bounds the duration of a failing test.
const LOAD_TIME_MAX: Duration = Duration::from_secs(8 * PATIENCE.as_secs());
const TOKEN: &str = "Authorization: Bearer a-token-for-the-jobs";
const BULKHEAD: &str = "[[access]]\ntoken_file = \"jobs\"\n[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\n\
                        max_in_flight = 4\nmax_queue = 50\ncwd = \".\"\n";

/// A running HAProxy process, which is killed when this value is dropped.
struct Proxy {
    child: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Proxy {
    /// Starts HAProxy in front of the hosts. Prints a note and returns `None` if HAProxy is not installed.
    fn start(hosts: [SocketAddr; 2]) -> Option<Self> {
        Self::start_with(hosts, "inter 250ms")
    }

    /// Starts HAProxy with another interval between health checks.
    fn start_with(hosts: [SocketAddr; 2], interval: &str) -> Option<Self> {
        if Command::new("haproxy").arg("-v").output().is_err() {
            not_run!("haproxy is not installed: install Debian's package haproxy");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let mut text = std::fs::read_to_string(CONFIG).unwrap();
        let places = [
            ("bind :8080", format!("bind {address}")),
            ("10.0.0.1:9465", hosts[0].to_string()),
            ("10.0.0.2:9465", hosts[1].to_string()),
            // On a busy machine, a healthy host can need longer to respond.
            ("timeout connect 1s", "timeout connect 30s".to_owned()),
            ("timeout check 1s", "timeout check 30s".to_owned()),
            ("inter 250ms", interval.to_owned()),
        ];
        for (from, to) in places {
            assert!(text.contains(from), "the configuration names {from}");
            text = text.replace(from, &to);
        }
        let path = folder.path().join("haproxy.cfg");
        std::fs::write(&path, text).unwrap();
        let checked = Command::new("haproxy").arg("-c").arg("-f").arg(&path).output().unwrap();
        let notes = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(checked.status.success() && !notes.contains("[WARNING]"), "{notes}");
        let child = Command::new("haproxy").arg("-f").arg(&path).stdout(Stdio::null()).spawn().unwrap();
        let proxy = Self { child, address, _folder: folder };
        wait_for("the proxy listens", || std::net::TcpStream::connect(proxy.address).ok());
        Some(proxy)
    }

    fn place(&self) -> Place {
        Place::Tcp(self.address)
    }
}

/// A host that runs a supervisor. The supervisor's listener keeps its port when the supervisor is replaced.
struct Host {
    supervisor: Supervisor,
    address: SocketAddr,
}

impl Host {
    fn start(keys: &str) -> Self {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        Self { supervisor: launch(address, keys, ""), address }
    }

    /// Stops the supervisor the way a service manager does, and starts a new one.
    fn restart(&mut self, keys: &str) {
        self.supervisor.signal(Signal::SIGTERM);
        assert_eq!(self.supervisor.wait().code(), Some(0));
        self.supervisor = launch(self.address, keys, &self.runs());
    }

    /// Returns the trace contexts of the jobs that began on this host, one per line.
    fn runs(&self) -> String {
        std::fs::read_to_string(self.supervisor.file("runs")).unwrap_or_default()
    }
}

/// Starts a supervisor in a new folder. `runs` lists the jobs that have already begun on the host.
fn launch(address: SocketAddr, keys: &str, runs: &str) -> Supervisor {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("runs"), runs).unwrap();
    write_token(folder.path());
    let keys = format!("jobs_http = \"{address}\"\n{keys}");
    Supervisor::launch(folder, &keys, BULKHEAD).until_ready()
}

fn write_token(folder: &Path) {
    let path = folder.join("jobs");
    std::fs::write(&path, "a-token-for-the-jobs").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Result of a job as seen by its caller.
#[derive(Debug)]
struct Seen {
    number: usize,
    idempotent: bool,
    /// HTTP status, reason, and execution status of the job. Empty if the caller received no response.
    told: String,
}

/// Sends jobs from `CALLERS` concurrent callers until `is_over` returns true. `is_over` is called with the number of
/// jobs sent so far.
fn load(proxy: &Proxy, is_over: impl Fn(usize) -> bool + Sync) -> Vec<Seen> {
    let begun = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(|| call(proxy, &begun, &is_over))).collect();
        callers.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
    })
}

fn call(proxy: &Proxy, begun: &AtomicUsize, is_over: impl Fn(usize) -> bool) -> Vec<Seen> {
    let mut seen = Vec::new();
    let mut connection = proxy.place().keep_alive();
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < LOAD_TIME_MAX, "the load does not end");
        let number = begun.fetch_add(1, Ordering::SeqCst);
        if is_over(number) {
            return seen;
        }
        let idempotent = number.is_multiple_of(2);
        let headers = [
            TOKEN.to_owned(),
            "Bulkhead-Operation: steps:trace runs;sleep 5".to_owned(),
            format!("Bulkhead-Idempotent: {idempotent}"),
            format!("traceparent: {}", trace(number)),
        ];
        let headers = headers.each_ref().map(String::as_str);
        let answer = connection.ask("POST", "/v1/bulkheads/b/jobs", &headers, b"x");
        let told = answer.as_ref().map(|answer| {
            let (reason, executed) = (answer.header("bulkhead-reason"), answer.header("bulkhead-executed"));
            format!("{} {reason} {executed}", answer.status)
        });
        if answer.is_none_or(|answer| answer.header("connection") == "close") {
            connection = proxy.place().keep_alive();
        }
        seen.push(Seen { number, idempotent, told: told.unwrap_or_default() });
    }
}

fn trace(number: usize) -> String {
    format!("00-{:032x}-b7ad6b7169203331-01", number + 1)
}

/// Returns the number of times each job began.
fn runs(hosts: &[&Host]) -> BTreeMap<String, usize> {
    tally(hosts.iter().flat_map(|host| host.runs().lines().map(str::to_owned).collect::<Vec<_>>()))
}

/// Checks that every successful job ran, that jobs reported as not executed did not run, and that only idempotent jobs
/// ran twice.
#[track_caller]
fn check_runs(seen: &[Seen], runs: &BTreeMap<String, usize>) {
    for Seen { number, idempotent, told } in seen {
        let count = runs.get(&trace(*number)).copied().unwrap_or(0);
        assert!(count <= if *idempotent { 2 } else { 1 }, "job {number} ran {count} times: {told}");
        match told.as_str() {
            "200  yes" => assert!(count >= 1, "job {number} never ran"),
            _ if told.ends_with(" no") => assert_eq!(count, 0, "job {number}: {told}"),
            _ => {}
        }
    }
}

fn results(seen: &[Seen]) -> BTreeMap<&str, usize> {
    tally(seen.iter().map(|seen| seen.told.as_str()))
}

#[test]
fn stop_with_drain_notice_does_not_fail_any_jobs() {
    let keys = "drain_notice = \"1s\"";
    let hosts = [Host::start(keys), Host::start(keys)];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    let [first, second] = &hosts;
    let stopped = AtomicUsize::new(0);
    let seen = load(&proxy, |number| {
        if number == 200 {
            first.supervisor.signal(Signal::SIGTERM);
            stopped.store(1, Ordering::SeqCst);
        }
        number >= 1000
    });
    assert_eq!(stopped.load(Ordering::SeqCst), 1);
    assert_eq!(results(&seen), BTreeMap::from([("200  yes", 1000)]));
    check_runs(&seen, &runs(&[first, second]));
    println!("{} jobs ran on the host that stayed up", second.runs().lines().count());
}

#[test]
fn killed_host_fails_only_jobs_in_flight() {
    let hosts = [Host::start(""), Host::start("")];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    let [first, second] = &hosts;
    let seen = load(&proxy, |number| {
        if number == 300 {
            first.supervisor.signal(Signal::SIGKILL);
        }
        number >= 1000
    });
    let lost: Vec<_> = seen.iter().filter(|seen| seen.told != "200  yes").collect();
    assert!(lost.iter().all(|lost| !lost.idempotent && lost.told.starts_with("502 ")), "{lost:?}");
    assert!(lost.iter().all(|lost| lost.told.ends_with(" unknown")), "{lost:?}");
    assert!(lost.len() <= CALLERS, "{lost:?}");
    check_runs(&seen, &runs(&[first, second]));
    println!("lost: {}, {:?}", lost.len(), results(&seen));
}

/// Connections are not reset if hosts are stopped under load. Each host is stopped four times, without a drain notice,
/// while jobs are running and waiting.
#[test]
fn stopping_hosts_under_load_does_not_reset_connections() {
    const STOPS: usize = 8;
    let mut hosts = [Host::start(""), Host::start("")];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    let stops = AtomicUsize::new(0);
    let seen = std::thread::scope(|scope| {
        let load = scope.spawn(|| load(&proxy, |_| stops.load(Ordering::SeqCst) >= STOPS));
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..STOPS {
                let host = &mut hosts[round % 2];
                let before = host.runs().lines().count();
                wait_for("the host has jobs", || (host.runs().lines().count() > before + 5).then_some(()));
                host.restart("");
                // A new job on the host shows that the proxy uses the host again.
                let before = host.runs().lines().count();
                wait_for("the host has jobs again", || (host.runs().lines().count() > before).then_some(()));
                stops.fetch_add(1, Ordering::SeqCst);
            }
        }));
        // Ends the load even after a panic. Otherwise, the scope would wait for the callers forever.
        stops.store(STOPS, Ordering::SeqCst);
        let seen = load.join().unwrap();
        if let Err(panic) = stopped {
            std::panic::resume_unwind(panic);
        }
        seen
    });
    let results = results(&seen);
    println!("{} jobs: {results:?}", seen.len());
    // The proxy may not know yet that the other host is back. A rejected retry of an idempotent job becomes 502.
    let is_refusal = |Seen { idempotent, told, .. }: &Seen| match told.as_str() {
        "502  unknown" => *idempotent,
        told => told.starts_with("503 ") && told.ends_with(" no"),
    };
    assert!(seen.iter().all(|seen| seen.told == "200  yes" || is_refusal(seen)), "{results:?}");
    assert!(results["200  yes"] > seen.len() / 2, "{results:?}");
    let [first, second] = &hosts;
    check_runs(&seen, &runs(&[first, second]));
}

/// Sends an idempotent job that aborts its worker after recording itself in `runs`.
fn send_crashing_job(proxy: &Proxy) -> Answer {
    let headers = [TOKEN, "Bulkhead-Idempotent: true"];
    proxy.place().job("b", "steps:trace runs;die", &headers, b"x")
}

/// Checks that the answer does not claim that the job did not run. The status 503 would claim the same.
#[track_caller]
fn check_may_have_run(answer: &Answer) {
    let told = (answer.status, answer.header("bulkhead-executed"), answer.header("bulkhead-retryable"));
    assert_eq!(told, (502, "unknown", "true"), "{}", answer.text());
    assert_ne!(answer.json()["executed"], "no");
}

#[test]
fn rejected_retry_does_not_hide_an_earlier_crash() {
    let hosts = [Host::start(""), Host::start("")];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    let [first, second] = &hosts;
    // The health check of a drained bulkhead's host still succeeds.
    assert_eq!(second.supervisor.post("/v1/bulkheads/b/drain").0, 200);
    // Each attempt is sent to the first host, to the second, or to both in either order.
    wait_for("the second host rejects a retry", || {
        let before = first.runs().lines().count();
        let answer = send_crashing_job(&proxy);
        check_may_have_run(&answer);
        let has_run = first.runs().lines().count() > before;
        (has_run && answer.header("bulkhead-reason").is_empty()).then_some(())
    });
}

#[test]
fn unreachable_host_does_not_hide_an_earlier_crash() {
    let mut hosts = [Host::start(""), Host::start("")];
    // The proxy notices the death of a host only when it connects to the host.
    let Some(proxy) = Proxy::start_with([hosts[0].address, hosts[1].address], "inter 1h") else { return };
    hosts[1].supervisor.signal(Signal::SIGKILL);
    hosts[1].supervisor.wait();
    check_may_have_run(&send_crashing_job(&proxy));
    assert!(!hosts[0].runs().is_empty());
}

#[test]
fn job_that_no_host_was_sent_is_reported_as_not_executed() {
    let mut hosts = [Host::start(""), Host::start("")];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    for host in &mut hosts {
        host.supervisor.signal(Signal::SIGKILL);
        host.supervisor.wait();
    }
    wait_for("the proxy knows that both hosts are down", || {
        let answer = send_crashing_job(&proxy);
        (answer.status == 503 && answer.header("bulkhead-executed") == "no").then_some(())
    });
}

#[test]
fn disconnecting_from_the_proxy_cancels_the_job() {
    let hosts = [Host::start(""), Host::start("")];
    let Some(proxy) = Proxy::start([hosts[0].address, hosts[1].address]) else { return };
    let total = |field| hosts.iter().map(|host| host.supervisor.number("b", field)).sum::<u64>();
    for (idempotent, cancelled) in [("false", 1), ("true", 2)] {
        let mut connection = proxy.place().keep_alive();
        let idempotent = format!("Bulkhead-Idempotent: {idempotent}");
        let headers = [TOKEN, "Bulkhead-Operation: steps:wait never", idempotent.as_str()];
        connection.send("POST", "/v1/bulkheads/b/jobs", &headers, b"x");
        wait_for("the job runs", || (total("in_flight") == 1).then_some(()));
        drop(connection);
        wait_for("the job is cancelled", || (total("cancelled") == cancelled).then_some(()));
        wait_for("the job has ended", || (total("in_flight") == 0).then_some(()));
    }
}

/// Clients that connect to a host directly see no resets when the host stops. The clients use a new connection for each
/// job, or keep-alive connections.
#[test]
fn direct_clients_see_no_reset_when_a_host_stops() {
    for (keeps, stops) in [(false, 1), (true, 2)] {
        for _ in 0..stops {
            let host = Host::start("");
            let place = Place::Tcp(host.address);
            let Host { mut supervisor, .. } = host;
            let seen: Vec<String> = std::thread::scope(|scope| {
                let callers: Vec<_> =
                    (0..CALLERS).map(|_| scope.spawn(|| call_until_refused(&place, keeps))).collect();
                wait_for("jobs run", || (supervisor.number("b", "done") > 50).then_some(()));
                supervisor.signal(Signal::SIGTERM);
                callers.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
            });
            assert_eq!(supervisor.wait().code(), Some(0));
            let told = tally(&seen);
            assert!(seen.iter().all(|told| told == "200 yes" || told == "503 no"), "{told:?}");
        }
    }
}

/// Sends jobs until the host refuses connections. Returns the answers.
fn call_until_refused(place: &Place, keeps: bool) -> Vec<String> {
    let Place::Tcp(address) = place else { unreachable!() };
    let mut seen = Vec::new();
    let mut kept = None;
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < LOAD_TIME_MAX, "the host still accepts connections");
        let (mut connection, is_reused) = match kept.take() {
            Some(connection) => (connection, true),
            None => match std::net::TcpStream::connect_timeout(address, Duration::from_secs(5)) {
                Ok(socket) => (bulkhead_tests::http::KeptAlive::new(socket), false),
                Err(_) => return seen,
            },
        };
        let headers = [TOKEN, "Bulkhead-Operation: steps:sleep 2"];
        connection.send("POST", "/v1/bulkheads/b/jobs", &headers, b"x");
        // The host closes connections on which no request arrives for a short time.
        if is_reused && connection.is_closed() {
            continue;
        }
        match connection.answer() {
            Some(answer) => {
                seen.push(format!("{} {}", answer.status, answer.header("bulkhead-executed")));
                if keeps && answer.header("connection") != "close" {
                    kept = Some(connection);
                }
            }
            None => seen.push("no answer".into()),
        }
    }
}

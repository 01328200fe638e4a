//! Failures of agents, supervisors and servers, which are killed, frozen or stopped.

use std::fs::File;
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bulkhead_fleet::{Fleet, FleetError};
use bulkhead_tests::fleet::{
    HOST_LOST_AFTER, NatsServer, TestFleet, VERSIONS, result_of, server_program, streams, streams_with,
};
use bulkhead_tests::machine::is_root;
use bulkhead_tests::ports::free_port;
use bulkhead_tests::{PATIENCE, SAME_NUMBERS, Supervisor, programs, run, wait_for};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;

use super::commands::get;
use super::jobs::{BULKHEADS, settings};

/// Starts a fleet with one server and two hosts.
fn two_hosts() -> Option<TestFleet> {
    let mut fleet = TestFleet::start(VERSIONS[0], 1, &settings())?;
    for name in ["host-a", "host-b"] {
        fleet.add_host(name, &format!("{BULKHEADS}{SAME_NUMBERS}"));
    }
    Some(fleet)
}

/// Submits a job that appends a line to `begun` and then waits for the file `go`. Returns the index of the host that
/// runs the job.
async fn begin(fleet: &TestFleet, client: &Fleet, id: &str, is_idempotent: bool) -> usize {
    let folder = fleet.folder.path().display();
    let operation = format!("steps:trace {folder}/begun;trace here;wait {folder}/go;echo");
    let job = client.job("b", id.as_bytes().to_vec()).operation(operation).id(id).idempotent(is_idempotent);
    job.submit().await.unwrap();
    wait_for("the job has begun", || {
        fleet.hosts.iter().position(|host| host.supervisor.file("here").exists())
    })
}

fn begun(fleet: &TestFleet) -> usize {
    std::fs::read_to_string(fleet.folder.path().join("begun")).unwrap_or_default().lines().count()
}

async fn outcome(client: &Fleet, id: &str) -> String {
    match client.result("", id, bulkhead_tests::PATIENCE).await {
        Ok(_) => "ok".into(),
        Err(FleetError::Job(error)) => {
            error.outcome().unwrap().verdict.reason().unwrap_or_default().to_owned()
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn idempotent_job_from_a_lost_host_runs_on_another_host() {
    let Some(mut fleet) = two_hosts() else { return };
    run(async {
        let client = fleet.connect().await;
        let host = begin(&fleet, &client, "again", true).await;
        fleet.hosts[host].kill_agent();
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "again").await, "ok");
    });
    assert_eq!(begun(&fleet), 2);
}

#[test]
fn non_idempotent_job_on_a_lost_host_ends_as_host_lost() {
    let Some(mut fleet) = two_hosts() else { return };
    run(async {
        let client = fleet.connect().await;
        let host = begin(&fleet, &client, "once", false).await;
        fleet.hosts[host].kill_agent();
        assert_eq!(outcome(&client, "once").await, "host_lost");
    });
    assert_eq!(begun(&fleet), 1);
    let (code, lines) = fleet.json(&["result", "once"]);
    assert_eq!((code, &lines[0]["executed"], &lines[0]["retryable"]), (70, &"unknown".into(), &false.into()));
}

#[test]
fn job_does_not_wait_behind_a_long_job_while_a_host_is_idle() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS.replace("max_in_flight = 4", "max_in_flight = 1");
    for name in ["host-a", "host-b"] {
        fleet.add_host(name, &format!("{bulkheads}{SAME_NUMBERS}"));
    }
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "long", false).await;
        // The busy host pulls one of these jobs.
        let mut short = Vec::new();
        for _ in 0..6 {
            let job = client.job("b", "").deadline(Duration::from_secs(20));
            short.push(job.submit().await.unwrap());
        }
        for submitted in short {
            result_of(submitted).await.unwrap();
        }
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "long").await, "ok");
    });
}

#[test]
fn deadline_ends_waiting_jobs_behind_a_long_job() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS
        .replace("max_in_flight = 4", "max_in_flight = 1")
        .replace("deadline = \"30s\"", "deadline = \"1h\"");
    fleet.add_host("host-a", &format!("{bulkheads}{SAME_NUMBERS}"));
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "long", false).await;
        let patient = ["patient-1", "patient-2", "patient-3"];
        for id in patient {
            client.job("b", "").id(id).submit().await.unwrap();
        }
        let ids: Vec<_> = (0..5).map(|number| format!("late-{number}")).collect();
        for id in &ids {
            client.job("b", "").id(id).deadline(Duration::from_secs(3)).submit().await.unwrap();
        }
        for id in &ids {
            assert_eq!(outcome(&client, id).await, "queued");
        }
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        for id in ["long"].into_iter().chain(patient) {
            assert_eq!(outcome(&client, id).await, "ok");
        }
    });
    fleet.wait_drained("b");
    assert_eq!(begun(&fleet), 1);
}

#[test]
fn outcome_from_a_frozen_agent_is_discarded() {
    let Some(fleet) = two_hosts() else { return };
    run(async {
        let client = fleet.connect().await;
        let host = begin(&fleet, &client, "frozen", false).await;
        fleet.hosts[host].signal_agent(Signal::SIGSTOP);
        assert_eq!(outcome(&client, "frozen").await, "host_lost");
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        fleet.hosts[host].signal_agent(Signal::SIGCONT);
        wait_for("the outcome was dropped", || fleet.hosts[host].log().contains("was dropped").then_some(()));
        assert_eq!(outcome(&client, "frozen").await, "host_lost");
    });
    assert_eq!(begun(&fleet), 1);
}

#[test]
fn outage_of_all_servers_does_not_end_running_jobs() {
    let Some(mut fleet) = two_hosts() else { return };
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "patient", false).await;
        fleet.servers[0].kill();
        std::thread::park_timeout(HOST_LOST_AFTER + HOST_LOST_AFTER / 2);
        fleet.servers[0].restart();
        wait_for("the server listens", || fleet.servers[0].is_listening().then_some(()));
        // The other host receives the message too, but leaves the job to the host that already holds it.
        std::thread::park_timeout(HOST_LOST_AFTER / 2);
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "patient").await, "ok");
    });
    assert_eq!(begun(&fleet), 1);
}

#[test]
fn outcome_during_an_outage_is_recorded_afterwards() {
    let Some(mut fleet) = two_hosts() else { return };
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "kept", false).await;
        fleet.servers[0].kill();
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        std::thread::park_timeout(HOST_LOST_AFTER);
        fleet.servers[0].restart();
        assert_eq!(outcome(&client, "kept").await, "ok");
    });
    assert_eq!(begun(&fleet), 1);
}

#[test]
fn frozen_leader_does_not_end_running_jobs() {
    // On a busy machine, the other servers can need many seconds to elect a leader.
    let settings = format!("{}[bulkhead.b]\n", streams_with(3, 10 * HOST_LOST_AFTER));
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 3, &settings) else { return };
    for name in ["host-a", "host-b"] {
        fleet.add_host(name, &format!("{BULKHEADS}{SAME_NUMBERS}"));
    }
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "led", false).await;
        let leader = fleet.leader("BH_JOBS");
        fleet.servers[leader].signal(Signal::SIGSTOP);
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "led").await, "ok");
        fleet.servers[leader].signal(Signal::SIGCONT);
    });
    assert_eq!(begun(&fleet), 1);
}

#[test]
fn calls_end_while_the_send_queue_is_full() {
    // Each submission queues a subscription and a message. The client's queue has room for 2,048.
    const SUBMISSIONS: usize = 1_200;
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    run(async {
        let client = fleet.connect().await;
        fleet.servers[0].kill();
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..SUBMISSIONS {
            let client = client.clone();
            calls.spawn(async move { client.job("b", "").submit().await.map(drop) });
        }
        let results = tokio::time::timeout(PATIENCE, calls.join_all()).await.expect("all submissions end");
        for result in results {
            assert!(matches!(result, Err(FleetError::Unreachable { .. })), "{result:?}");
        }
        let read = tokio::time::timeout(PATIENCE, client.result("", "never", Duration::ZERO)).await;
        let error = read.expect("the call ends").unwrap_err();
        assert!(matches!(error, FleetError::Unreachable { .. }), "{error}");
    });
}

#[test]
fn submission_without_a_quorum_is_unavailable() {
    for version in VERSIONS {
        let settings = format!("{}[bulkhead.b]\n", streams(3));
        let Some(mut fleet) = TestFleet::start(version, 3, &settings) else { return };
        // Without its leader, the stream of jobs has no responders.
        let leader = fleet.leader("BH_JOBS");
        for index in [leader, (leader + 1) % 3] {
            fleet.servers[index].kill();
        }
        let (code, lines) = fleet.json(&["submit", "b", "-n"]);
        assert!(code == 69 || code == 75, "{version}: {code}, {lines:?}");
        fleet.servers.iter_mut().for_each(|server| {
            server.kill();
            server.restart();
        });
        fleet.add_host("host-a", BULKHEADS);
        assert_eq!(fleet.json(&["submit", "b", "-n"]).0, 0);
        assert_eq!(fleet.json(&["submit", "nowhere", "-n"]).0, 66);
    }
}

#[test]
fn job_waits_until_the_supervisor_is_back() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    fleet.add_host("host-a", BULKHEADS);
    fleet.hosts[0].kill_supervisor();
    wait_for("the agent stops pulling", || fleet.hosts[0].log().contains("cannot be reached").then_some(()));
    run(async {
        let client = fleet.connect().await;
        let submitted = client.job("b", b"x".to_vec()).submit().await.unwrap();
        fleet.hosts[0].restart_supervisor();
        assert_eq!(result_of(submitted).await.unwrap().payload(), b"x");
    });
}

#[test]
fn idle_http_connections_do_not_stop_the_agent() {
    use std::os::unix::fs::PermissionsExt;
    const DESCRIPTORS: usize = 128;
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let program = fleet.folder.path().join("limited-agent");
    let agent = programs().join("bulkhead-fleet");
    let script = format!("#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec {} \"$@\"\n", agent.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let host = fleet.prepare_host("host-a", Supervisor::start(BULKHEADS));
    fleet.hosts[host].start_agent_with(&program, &[]);
    fleet.wait_agent("host-a");
    let port = fleet.hosts[host].http;
    let idle: Vec<_> =
        (0..2 * DESCRIPTORS).map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()).collect();
    assert_eq!(get(port, "/healthz").0, 200);
    // The agent needs descriptors to connect to the new supervisor.
    fleet.hosts[host].kill_supervisor();
    fleet.hosts[host].restart_supervisor();
    run(async {
        let client = fleet.connect().await;
        result_of(client.job("b", "").submit().await.unwrap()).await.unwrap();
    });
    drop(idle);
}

#[test]
fn losing_a_supervisor_ends_only_non_idempotent_jobs() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    fleet.add_host("host-a", &format!("{BULKHEADS}{SAME_NUMBERS}"));
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "again", true).await;
        let operation = format!("steps:trace there;wait {}/go", fleet.folder.path().display());
        client.job("b", "").operation(operation).id("once").submit().await.unwrap();
        wait_for("the second job has begun", || {
            fleet.hosts[0].supervisor.file("there").exists().then_some(())
        });
        fleet.hosts[0].kill_supervisor();
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "once").await, "host_lost");
        fleet.hosts[0].restart_supervisor();
        assert_eq!(outcome(&client, "again").await, "ok");
    });
    assert_eq!(begun(&fleet), 2);
}

#[test]
fn agent_whose_log_cannot_be_written_keeps_running() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let host = fleet.prepare_host("host-a", Supervisor::start(BULKHEADS));
    // Standard error without room, and without a reader.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (_, closed) = std::io::pipe().unwrap();
    for log in [Stdio::from(full), Stdio::from(closed)] {
        fleet.hosts[host].start_agent_logging_to(log);
        fleet.wait_agent("host-a");
        run(async {
            let client = fleet.connect().await;
            result_of(client.job("b", "").submit().await.unwrap()).await.unwrap();
        });
        fleet.hosts[host].signal_agent(Signal::SIGTERM);
        let agent = fleet.hosts[host].agent.as_mut().unwrap();
        let status = wait_for("the agent exits", || agent.try_wait().unwrap());
        assert_eq!(status.code(), Some(0));
    }
}

#[test]
fn drained_agent_finishes_its_jobs_and_returns_the_others() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let bulkheads = BULKHEADS.replace("max_in_flight = 4", "max_in_flight = 1");
    fleet.add_host("host-a", &format!("{bulkheads}{SAME_NUMBERS}"));
    run(async {
        let client = fleet.connect().await;
        begin(&fleet, &client, "held", false).await;
        let waiting = client.job("b", b"next".to_vec()).id("waiting").submit().await.unwrap();
        let other = fleet.prepare_host("host-b", Supervisor::start(&bulkheads));
        fleet.hosts[0].signal_agent(Signal::SIGTERM);
        fleet.hosts[other].start_agent();
        assert_eq!(result_of(waiting).await.unwrap().payload(), b"next");
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        assert_eq!(outcome(&client, "held").await, "ok");
        let agent = fleet.hosts[0].agent.as_mut().unwrap();
        let status = wait_for("the agent exits", || agent.try_wait().unwrap());
        assert_eq!(status.code(), Some(0));
    });
}

/// Compiles a library that sets a process's clock five seconds ahead.
pub(crate) fn clock_library(folder: &Path) -> PathBuf {
    let library = folder.join("clock.so");
    let compile = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(format!("-DSTEP_FILE=\"{}/step\"", folder.display()))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fleet/clock.c"))
        .status();
    assert!(compile.expect("a C compiler").success());
    library
}

#[test]
fn host_clock_that_is_ahead_does_not_shorten_deadlines() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let library = clock_library(fleet.folder.path());
    let host = fleet.prepare_host("host-a", Supervisor::start(BULKHEADS));
    fleet.hosts[host].start_agent_under(&library);
    fleet.wait_agent("host-a");
    wait_for("the agent warns", || {
        fleet.hosts[host].log().contains("this host's clock differs").then_some(())
    });
    run(async {
        let client = fleet.connect().await;
        // The clock is five seconds ahead. If this difference shortened the deadlines, no job would succeed. On a busy
        // machine, some of the jobs can miss their deadline.
        let (began, mut served) = (Instant::now(), 0);
        while served < 10 {
            assert!(began.elapsed() < PATIENCE, "only {served} jobs ended before their deadline");
            let job = client.job("b", b"x".to_vec()).deadline(Duration::from_secs(3));
            let Ok(submitted) = job.submit().await else { continue };
            if let Ok(reply) = result_of(submitted).await {
                assert_eq!(reply.payload(), b"x");
                served += 1;
            }
        }
    });
}

#[test]
fn step_of_the_host_clock_ends_no_jobs() {
    let Some(mut fleet) = TestFleet::start(VERSIONS[0], 1, &settings()) else { return };
    let library = clock_library(fleet.folder.path());
    let host = fleet.prepare_host("host-a", Supervisor::start(BULKHEADS));
    fleet.hosts[host].start_agent_under(&library);
    fleet.wait_agent("host-a");
    run(async {
        let client = fleet.connect().await;
        std::fs::write(fleet.folder.path().join("step"), "").unwrap();
        for _ in 0..5 {
            let job = client.job("b", "").deadline(Duration::from_secs(3600));
            result_of(job.submit().await.unwrap()).await.unwrap();
        }
    });
    let port = fleet.hosts[host].http;
    let page = get(port, "/metrics").1;
    assert!(page.contains("bulkhead_fleet_clock_offset_seconds -720"), "{page}");
}

#[test]
fn full_disk_rejects_jobs_but_loses_none() {
    let Some(program) = server_program(VERSIONS[0]).filter(|_| is_root()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let disk = Disk::mount(folder.path().join("n0"));
    let port = free_port();
    let text = format!(
        "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{}\", max_file_store: 1GB }}\n",
        disk.folder.display()
    );
    let server = NatsServer::start_configured(&program, folder.path(), "n0", port, &text);
    let mut fleet = TestFleet::prepare(folder, vec![server], &settings(), (String::new(), "nats"));
    fleet.add_host("host-a", &format!("{BULKHEADS}{SAME_NUMBERS}"));
    run(async {
        let client = fleet.connect().await;
        let place = fleet.folder.path().display();
        let operation = format!("steps:trace {place}/begun;wait {place}/go;echo");
        // Small records would still fit into the space that the ledger's file occupies.
        let job = client.job("b", vec![b'x'; 100_000]).operation(operation);
        let running = job.submit().await.unwrap();
        wait_for("the job has begun", || (begun(&fleet) == 1).then_some(()));
        let mut accepted = Vec::new();
        // No agent serves this bulkhead yet. Smaller and smaller jobs fill the disk completely.
        for bytes in [500_000, 20_000, 1_000, 0] {
            let error = loop {
                match client.job("other", vec![b'x'; bytes]).submit().await {
                    Ok(submitted) => accepted.push(submitted),
                    Err(error) => break error,
                }
            };
            assert!(error.to_string().contains("unavailable"), "{error}");
        }
        assert!(accepted.len() > 5, "{}", accepted.len());
        std::fs::write(fleet.folder.path().join("go"), "").unwrap();
        wait_for("the outcome is refused", || {
            fleet.hosts[0].log().contains("failed to store the record").then_some(())
        });
        disk.grow();
        assert_eq!(result_of(running).await.unwrap().payload().len(), 100_000);
        fleet.add_host("host-b", &BULKHEADS.replace("[bulkhead.b]", "[bulkhead.other]"));
        for submitted in accepted {
            result_of(submitted).await.unwrap();
        }
    });
    assert_eq!(begun(&fleet), 1);
    drop(fleet);
    drop(disk);
}

/// A small file system that is unmounted when this value is dropped.
struct Disk {
    folder: PathBuf,
}

impl Disk {
    fn mount(folder: PathBuf) -> Self {
        std::fs::create_dir(&folder).unwrap();
        mount(Some("tmpfs"), &folder, Some("tmpfs"), MsFlags::empty(), Some("size=12m")).unwrap();
        Self { folder }
    }

    fn grow(&self) {
        mount(Some("tmpfs"), &self.folder, Some("tmpfs"), MsFlags::MS_REMOUNT, Some("size=100m")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(&self.folder, MntFlags::MNT_DETACH);
    }
}

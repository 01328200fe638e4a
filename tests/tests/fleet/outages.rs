//! A single long fault under load: frozen agents and leaders, stopped servers, a wrong clock, or a power failure. No
//! job held by a live agent is lost.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use bulkhead_tests::fleet::{
    HOST_LOST_AFTER, NatsServer, TestFleet, VERSIONS, cluster, server_program, streams,
};
use bulkhead_tests::machine::{has_program, is_root};
use bulkhead_tests::ports::free_port;
use bulkhead_tests::{heavy, run, wait_for};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use super::chaos::{Plan, Report, pause, prepare_host, submit_during};
use super::failures::clock_library;
use super::jobs::settings;

/// Duration of the load before and after the fault, in seconds.
const MARGIN: u64 = 6;

/// Returns a plan for a fault that lasts `fault_seconds`. The plan requires the outcome `ok` for every job.
fn plan(version: &'static str, fault_seconds: u64) -> Plan {
    let seconds = 2 * MARGIN + fault_seconds;
    Plan {
        version,
        seconds,
        seed: 0,
        rate: 200,
        run_ms: 20,
        copied: 5,
        planted: None,
        outcomes: &["ok"],
        has_short_deadlines: false,
        is_thorough: false,
    }
}

/// Runs a plan in a fleet of three servers and two hosts. Injects the fault by calling `fault` once [`MARGIN`] has
/// passed. Returns `None` if the server program is missing.
fn during(plan: &Plan, is_clock_ahead: bool, fault: impl FnOnce(&mut TestFleet)) -> Option<Report> {
    let settings = format!("{}[bulkhead.b]\n", streams(3));
    let fleet = TestFleet::start(plan.version, 3, &settings)?;
    Some(during_in(fleet, plan, is_clock_ahead, fault))
}

fn during_in(
    mut fleet: TestFleet,
    plan: &Plan,
    is_clock_ahead: bool,
    fault: impl FnOnce(&mut TestFleet),
) -> Report {
    for name in ["host-a", "host-b"] {
        let host = prepare_host(&mut fleet, name);
        match is_clock_ahead && host == 1 {
            true => fleet.hosts[host].start_agent_under(&clock_library(fleet.folder.path())),
            false => fleet.hosts[host].start_agent(),
        }
        fleet.wait_agent(name);
    }
    let report = submit_during(plan, &mut fleet, |fleet| {
        pause(Duration::from_secs(MARGIN));
        fault(fleet);
    });
    report.unwrap_or_else(|violation| panic!("{}: {violation}", plan.version))
}

/// Freezes the leader of a stream for the given time.
fn freeze_leader(fleet: &mut TestFleet, stream: &str, time: Duration) {
    let leader = fleet.leader(stream);
    fleet.servers[leader].signal(Signal::SIGSTOP);
    pause(time);
    fleet.servers[leader].signal(Signal::SIGCONT);
}

/// Kills all servers, and restarts them after the given time.
fn stop_servers(fleet: &mut TestFleet, time: Duration) {
    fleet.servers.iter_mut().for_each(NatsServer::kill);
    pause(time);
    fleet.servers.iter_mut().for_each(NatsServer::restart);
}

#[test]
#[ignore = "takes two minutes"]
fn freezing_the_leader_for_twelve_seconds_loses_no_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        for stream in ["BH_JOBS", "BH_LEDGER"] {
            let frozen = |fleet: &mut TestFleet| freeze_leader(fleet, stream, Duration::from_secs(12));
            let Some(report) = during(&plan(version, 12), false, frozen) else { return };
            println!("the leader of {stream}: {report:?}");
        }
    }
}

#[test]
#[ignore = "takes three minutes"]
fn stopping_all_servers_for_a_minute_loses_no_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        let stopped = |fleet: &mut TestFleet| stop_servers(fleet, Duration::from_secs(60));
        let Some(_) = during(&plan(version, 60), false, stopped) else { return };
    }
}

#[test]
#[ignore = "takes a minute"]
fn freezing_an_agent_too_long_loses_only_its_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        let plan = Plan { outcomes: &["ok", "crashed/host_lost"], ..plan(version, 12) };
        let frozen = |fleet: &mut TestFleet| {
            fleet.hosts[0].signal_agent(Signal::SIGSTOP);
            pause(3 * HOST_LOST_AFTER);
            fleet.hosts[0].signal_agent(Signal::SIGCONT);
        };
        let Some(report) = during(&plan, false, frozen) else { return };
        let lost = report.outcomes.get("crashed/host_lost").copied().unwrap_or(0);
        // The host has eight permits.
        assert!(lost <= 8, "{report:?}");
    }
}

#[test]
#[ignore = "takes a minute"]
fn host_whose_clock_is_ahead_loses_no_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        let stopped = |fleet: &mut TestFleet| stop_servers(fleet, 2 * HOST_LOST_AFTER);
        let plan = Plan { has_short_deadlines: true, ..plan(version, 8) };
        let Some(report) = during(&plan, true, stopped) else { return };
        assert_eq!(report.ran_again, 0, "{report:?}");
    }
}

/// A file system on which a power cut can be simulated.
struct Disk {
    folder: tempfile::TempDir,
}

impl Disk {
    /// Creates `count` disks. Prints a note and returns `None` if this machine cannot mount file systems.
    fn create(count: usize) -> Option<Vec<Self>> {
        if !is_root() || !has_program("/usr/sbin/mkfs.ext4") || !has_program("/dev/loop-control") {
            return None;
        }
        let disks = (0..count).map(|_| Self { folder: tempfile::tempdir().unwrap() });
        let disks: Vec<_> = disks.collect();
        for disk in &disks {
            std::fs::create_dir(disk.mounted()).unwrap();
            std::fs::File::create(disk.image()).unwrap().set_len(512 << 20).unwrap();
            succeed(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-F"]).arg(disk.image()));
            disk.mount();
        }
        Some(disks)
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn mounted(&self) -> PathBuf {
        self.folder.path().join("mounted")
    }

    fn mount(&self) {
        succeed(Command::new("mount").args(["-o", "loop"]).arg(self.image()).arg(self.mounted()));
    }

    /// Simulates a power failure of a server. All data that the server has not synchronized to the disk is lost.
    fn cut_power(&self, server: &mut NatsServer) {
        server.signal(Signal::SIGSTOP);
        // EXT4_IOC_SHUTDOWN with NOLOGFLUSH: nothing more is written, not even the journal.
        let shut_down = "import fcntl, os, sys\n\
                         fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, (2).to_bytes(4, 'little'))";
        succeed(Command::new("python3").args(["-c", shut_down]).arg(self.mounted()));
        server.kill();
    }

    fn restore_power(&self, server: &mut NatsServer) {
        umount2(&self.mounted(), MntFlags::MNT_DETACH).unwrap();
        // Mount namespaces of workers still hold the old file system.
        let old = self.folder.path().join("old");
        std::fs::rename(self.image(), &old).unwrap();
        succeed(Command::new("cp").arg("--sparse=always").arg(&old).arg(self.image()));
        self.mount();
        server.restart();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(&self.mounted(), MntFlags::MNT_DETACH);
    }
}

#[track_caller]
fn succeed(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// Starts one server on each disk.
fn start_on(disks: &[Disk], version: &str, settings: &str, server_settings: &str) -> Option<TestFleet> {
    let program = server_program(version)?;
    let folder = tempfile::tempdir().unwrap();
    let routes: Vec<u16> = disks.iter().map(|_| free_port()).collect();
    let start = |(index, disk): (usize, &Disk)| {
        let (name, port) = (format!("n{index}"), free_port());
        let of_cluster = if disks.len() > 1 { cluster(&routes, index) } else { String::new() };
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\nserver_name: {name}\njetstream {{ store_dir: \"{}\", max_file_store: \
             1GB\n{server_settings} }}\n{of_cluster}",
            disk.mounted().display()
        );
        NatsServer::start_configured(&program, folder.path(), &name, port, &text)
    };
    let servers = disks.iter().enumerate().map(start).collect();
    Some(TestFleet::prepare(folder, servers, settings, (String::new(), "nats")))
}

/// Submits 50 jobs to a single server without agents, then simulates a power failure and restarts the server. Returns
/// the number of jobs that have survived.
fn jobs_after_a_power_cut(version: &str, server_settings: &str) -> Option<u64> {
    let disks = Disk::create(1)?;
    let mut fleet = start_on(&disks, version, &settings(), server_settings)?;
    run(async {
        let client = fleet.connect().await;
        for _ in 0..50 {
            client.job("b", b"x".to_vec()).submit().await.unwrap();
        }
    });
    disks[0].cut_power(&mut fleet.servers[0]);
    disks[0].restore_power(&mut fleet.servers[0]);
    // Creates the streams again if they were lost.
    wait_for("the streams are prepared", || fleet.command(&["init"]).status.success().then_some(()));
    Some(wait_for("the server counts the jobs", || fleet.pending("b")))
}

#[test]
fn power_cut_loses_only_unsynchronized_jobs() {
    for version in VERSIONS {
        let Some(synchronized) = jobs_after_a_power_cut(version, "sync_interval: always") else { return };
        assert_eq!(synchronized, 50);
        // Without synchronization, some jobs must be lost. This shows that the test really cuts the power.
        let lost = jobs_after_a_power_cut(version, "").unwrap();
        assert!(lost < 50, "{lost}");
        println!("{version}: without synchronization, {lost} of 50 jobs remain");
    }
}

#[test]
#[ignore = "takes a minute"]
fn power_cut_under_load_loses_no_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        let Some(disks) = Disk::create(1) else { return };
        let Some(fleet) = start_on(&disks, version, &settings(), "sync_interval: always") else { return };
        let plan = Plan { rate: 100, ..plan(version, 3) };
        during_in(fleet, &plan, false, |fleet| {
            disks[0].cut_power(&mut fleet.servers[0]);
            pause(Duration::from_secs(3));
            disks[0].restore_power(&mut fleet.servers[0]);
        });
    }
}

#[test]
#[ignore = "takes two minutes"]
fn power_cut_to_one_of_three_servers_loses_no_jobs() {
    let _heavy = heavy();
    for version in VERSIONS {
        for stream in ["BH_JOBS", "BH_LEDGER"] {
            let Some(disks) = Disk::create(3) else { return };
            let settings = format!("{}[bulkhead.b]\n", streams(3));
            let Some(fleet) = start_on(&disks, version, &settings, "") else { return };
            during_in(fleet, &plan(version, 3), false, |fleet| {
                let leader = fleet.leader(stream);
                disks[leader].cut_power(&mut fleet.servers[leader]);
                pause(Duration::from_secs(3));
                disks[leader].restore_power(&mut fleet.servers[leader]);
            });
        }
    }
}

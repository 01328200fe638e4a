//! Measures how much an attack slows down honest jobs, in comparison with busy loops. Honest jobs are sent on a fixed
//! schedule, so that a stall counts for every job that it delays. The result is the p99 latency.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bulkhead_client::Client;
use tempfile::TempDir;

use crate::Result;
use crate::pairs::paired;
use crate::processes::{self, Process};
use crate::report::{Figure, Report, Target};

/// Prefix of the names of the measurements in this module.
pub(crate) const GROUP: &str = "attack";

/// Number and duration of the rounds in this module's measurements.
pub(crate) struct Plan {
    /// Number of pairs of rounds. Each pair consists of one round alongside busy loops and one round alongside the
    /// attack.
    pub(crate) pairs: usize,
    /// Duration of a round.
    pub(crate) duration: Duration,
}

/// Interval between the starts of consecutive honest jobs.
const JOB_INTERVAL: Duration = Duration::from_millis(2);

/// Interval between jobs that crash an honest worker.
const DEATH_INTERVAL: Duration = Duration::from_millis(100);

/// Interval between the starts of consecutive honest programs.
const PROGRAM_INTERVAL: Duration = Duration::from_millis(25);

/// Shell script for the programs that the worker runs. An honest program copies its input and exits. The hostile
/// program attacks the worker and the other programs until it is killed.
const PROGRAMS: &str = "case $BULKHEAD_OPERATION in \
    neighbours) PIN trap '' TERM INT HUP; while :; do \
        for process in $(cat /proc/$PPID/task/*/children) $PPID; do \
            [ $process = $$ ] && continue; \
            kill -9 $process; \
            for file in mem fd/1 fd/3; do echo forged > /proc/$process/$file; done; \
        done; \
    done 2> /dev/null;; \
    *) cat;; esac";

/// Latency recorded for an honest job that ends with the wrong outcome.
const WRONG_OUTCOME_LATENCY: Duration = Duration::from_secs(60);

/// UID of an unprivileged user (`nobody`).
const UNPRIVILEGED_UID: u32 = 65_534;

/// Source of an attack.
#[derive(Clone, Copy)]
enum Attacker {
    /// Hostile clients. Contains the kind of client and the number of client processes.
    Clients(&'static str, usize),
    /// Hostile workers of a bulkhead. Contains the kind of worker and the number of workers.
    Workers(&'static str, usize),
    /// Jobs that attack when they run. Contains the name of their bulkhead and the number of jobs to keep in flight.
    Jobs(&'static str, usize),
}

/// Honest work whose latency is measured during the attack.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// Jobs in another bulkhead.
    Jobs,
    /// Jobs that crash their worker. The latency is the time until the client receives the outcome.
    Deaths,
    /// Programs that run in the same worker as the attacker's programs.
    Programs,
}

const ATTACKS: [(&str, Attacker, Victim); 11] = [
    ("A1 a client passes descriptors", Attacker::Clients("descriptors", 1), Victim::Jobs),
    ("A1 a worker passes descriptors", Attacker::Workers("descriptors", 1), Victim::Jobs),
    ("A2 600 frames announced, not sent", Attacker::Clients("announcements", 1), Victim::Jobs),
    ("A3 /readyz by four, 4,000 tenants", Attacker::Clients("readyz", 4), Victim::Jobs),
    ("A4 a worker floods frames", Attacker::Workers("frames", 1), Victim::Jobs),
    ("A4 four workers flood frames", Attacker::Workers("frames", 4), Victim::Jobs),
    ("A4 200 connections, unknown bulkhead", Attacker::Clients("unknown-many", 1), Victim::Jobs),
    ("A5 a worker leaves 1,500 orphans", Attacker::Jobs("orphans", 1), Victim::Deaths),
    ("A6 a storm of deaths and death events", Attacker::Jobs("storm", 4), Victim::Jobs),
    ("A7 a program leaves a writer behind", Attacker::Jobs("loud", 2), Victim::Jobs),
    ("A8 a program attacks neighbour programs", Attacker::Jobs("neighbours", 1), Victim::Programs),
];

/// Takes all requested measurements. Must be called within a `LocalSet`.
pub(crate) async fn all(plan: &Plan, report: &Report) -> Result<()> {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("not root: attackers run as the same user as the bench");
    }
    for (name, attacker, victim) in ATTACKS {
        for is_other_user in [true, false] {
            for is_pinned in [true, false] {
                let user = if is_other_user { "another user" } else { "the same user" };
                let place = if is_pinned { "pinned" } else { "free" };
                let name = format!("{GROUP}: {name}, {user}, {place}");
                if (is_other_user && !is_root) || !report.wants(&name) {
                    continue;
                }
                report.add(one(plan, name, Scene { attacker, victim, is_other_user, is_pinned }).await?);
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Scene {
    attacker: Attacker,
    victim: Victim,
    is_other_user: bool,
    is_pinned: bool,
}

async fn one(plan: &Plan, name: String, scene: Scene) -> Result<Figure> {
    let mut pairs = Vec::new();
    for _ in 0..plan.pairs {
        let beside_loops = round(plan, scene, true).await?;
        let beside_attack = round(plan, scene, false).await?;
        pairs.push((beside_loops, beside_attack));
    }
    Ok(paired(name, "µs", &pairs, Target::AtMost, 1.5))
}

/// Returns the p99 latency of the honest jobs in µs, measured during the attack. If `is_loop` is true, the same
/// number of busy loops runs instead of the attackers.
async fn round(plan: &Plan, scene: Scene, is_loop: bool) -> Result<f64> {
    let host = Host::start(scene, is_loop).await?;
    let mut attackers = Vec::new();
    let mut lanes = Vec::new();
    match scene.attacker {
        Attacker::Clients(kind, count) => {
            for _ in 0..count {
                attackers
                    .push(Process::start(&mut host.attacker(scene, if is_loop { "spin" } else { kind })?)?);
            }
        }
        // The supervisor has already started the hostile workers.
        Attacker::Workers(..) => {}
        Attacker::Jobs(bulkhead, count) => {
            for _ in 0..count {
                if is_loop {
                    attackers.push(Process::start(&mut host.attacker(scene, "spin")?)?);
                } else {
                    let client = host.client.clone();
                    // Every bench worker supports the `crash` operation.
                    let operation = if bulkhead == "storm" { "crash" } else { bulkhead };
                    lanes.push(tokio::task::spawn_local(async move {
                        loop {
                            // Ignores the outcome, because the attack continues in any case.
                            let _ = client.job(bulkhead, "").operation(operation).send().await;
                        }
                    }));
                }
            }
        }
    }
    // Gives the attack time to take effect.
    tokio::time::sleep(plan.duration / 5).await;
    let p99 = match scene.victim {
        Victim::Jobs => scheduled(&host.client, plan.duration, JOB_INTERVAL, "one", "").await?,
        Victim::Programs => {
            scheduled(&host.client, plan.duration, PROGRAM_INTERVAL, "neighbours", "").await?
        }
        Victim::Deaths => scheduled(&host.client, plan.duration, DEATH_INTERVAL, "dies", "crash").await?,
    };
    lanes.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(p99)
}

/// Sends jobs on a fixed schedule without waiting for outcomes. Returns the p99 latency in µs, measured from the
/// scheduled time of each job.
async fn scheduled(
    client: &Client,
    duration: Duration,
    every: Duration,
    bulkhead: &'static str,
    operation: &'static str,
) -> Result<f64> {
    let began = Instant::now();
    let mut jobs = tokio::task::JoinSet::new();
    let mut due = Duration::ZERO;
    while due < duration {
        tokio::time::sleep_until((began + due).into()).await;
        let client = client.clone();
        jobs.spawn_local(async move {
            let ended = client.job(bulkhead, "x").operation(operation).send().await;
            let is_as_expected = match &ended {
                Ok(_) => operation.is_empty(),
                Err(error) => {
                    let reason = error.outcome().and_then(|outcome| outcome.verdict.reason());
                    operation == "crash" && reason == Some("signal")
                }
            };
            let took = if is_as_expected { began.elapsed() - due } else { WRONG_OUTCOME_LATENCY };
            took.as_secs_f64() * 1e6
        });
        due += every;
    }
    let mut took = Vec::new();
    while let Some(job) = jobs.join_next().await {
        took.push(job?);
    }
    took.sort_unstable_by(f64::total_cmp);
    Ok(took[(took.len() * 99).div_ceil(100).saturating_sub(1)])
}

/// A supervisor configured with the bulkheads for one measurement.
struct Host {
    client: Client,
    _supervisor: Process,
    folder: TempDir,
}

impl Host {
    async fn start(scene: Scene, is_loop: bool) -> Result<Self> {
        let programs = processes::programs()?;
        let folder = tempfile::tempdir()?;
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755))?;
        let file = folder.path().join("workers.toml");
        std::fs::write(&file, config(scene, is_loop)?)?;
        let mut command = Command::new(programs.join("bulkhead-supervisor"));
        command.args(["--log-level", "error", "--config"]).arg(&file);
        let supervisor = Process::start(command.stdin(Stdio::null()).stderr(Stdio::null()))?;
        let socket = folder.path().join("jobs.sock");
        processes::wait_for(&socket)?;
        let client = Client::connect(&socket).await?;
        client.job("one", "ready?").send().await?;
        if let Attacker::Clients("readyz", _) = scene.attacker {
            remember_tenants(&client).await?;
        }
        Ok(Self { client, _supervisor: supervisor, folder })
    }

    fn attacker(&self, scene: Scene, kind: &str) -> Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["attack", kind]).arg(self.folder.path().join("jobs.sock"));
        if scene.is_pinned {
            command.arg("--pin");
        }
        if scene.is_other_user {
            command.gid(UNPRIVILEGED_UID).uid(UNPRIVILEGED_UID);
        }
        command.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }
}

/// Submits jobs for 4,000 tenants, so that the supervisor holds a record for each of them.
async fn remember_tenants(client: &Client) -> Result<()> {
    let client = Rc::new(client.clone());
    let mut jobs = tokio::task::JoinSet::new();
    for number in 0..4_000 {
        let client = client.clone();
        jobs.spawn_local(async move {
            // Even a job that is rejected because there are no workers creates a record of its tenant.
            let _ = client.job("tenants", "x").tenant(format!("tenant-{number}")).send().await;
        });
        if jobs.len() >= 256 {
            jobs.join_next().await;
        }
    }
    while jobs.join_next().await.is_some() {}
    Ok(())
}

fn config(scene: Scene, is_loop: bool) -> Result<String> {
    let own = std::env::current_exe()?;
    let own = own.to_str().ok_or("the path of this program is not UTF-8")?;
    let worker = processes::worker()?;
    let honest = |name: &str| format!("[bulkhead.{name}]\ncommand = [{worker}]\nmax_queue = 1000\n");
    let mut config = "[supervisor]\nsocket = \"jobs.sock\"\nmax_clients = 2000\n".to_owned();
    if rustix::process::geteuid().is_root() {
        config +=
            &format!("[[access]]\nuid = 0\n[[access]]\nuid = {UNPRIVILEGED_UID}\nbulkheads = [\"open\"]\n");
    }
    config += &["one", "dies", "open"].map(honest).concat();
    match scene.attacker {
        Attacker::Clients("readyz", _) => {
            config += &honest("tenants");
            config += "tenants = { isolate = true, max_active = 8, idle = \"60s\" }\n";
        }
        Attacker::Clients(..) => {}
        Attacker::Workers(kind, processes) => {
            let kind = if is_loop { "spin" } else { kind };
            let pin = if scene.is_pinned { ", \"--pin\"" } else { "" };
            let user = if scene.is_other_user { ", user = \"nobody\"" } else { "" };
            config += &format!(
                "[bulkhead.hostile]\ncommand = [{own:?}, \"hostile-worker\", {kind:?}{pin}]\n\
                 processes = {processes}\nhealth = {{ heartbeat = \"60s\", missed = 5 }}\n\
                 sandbox = {{ network = true{user} }}\n"
            );
        }
        Attacker::Jobs("orphans", _) => {
            config += &honest("orphans");
            config += "rlimits = { nproc = \"unlimited\" }\n";
        }
        Attacker::Jobs("storm", processes) => {
            let pin = if scene.is_pinned { "\"taskset\", \"-c\", \"0\", " } else { "" };
            config += &format!(
                "[bulkhead.storm]\ncommand = [{pin}{worker}]\nmax_queue = 1000\nprocesses = {processes}\n\
                 restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000, within = \"1s\" }}\n"
            );
        }
        Attacker::Jobs("neighbours", _) => {
            let pin = if scene.is_pinned { "taskset -p -c 0 $$ > /dev/null;" } else { "" };
            let programs = PROGRAMS.replace("PIN", pin);
            config += &format!(
                "[bulkhead.neighbours]\nexec = [\"/bin/sh\", \"-c\", {programs:?}]\nmax_in_flight = 3\n\
                 max_queue = 1000\ndeadline = \"60s\"\n"
            );
        }
        Attacker::Jobs(..) => {
            let pin = if scene.is_pinned { ", \"--pin\"" } else { "" };
            config += &format!(
                "[bulkhead.loud]\nexec = [{own:?}, \"attack\", \"loud\", \"-\"{pin}]\nmax_in_flight = 2\n"
            );
        }
    }
    Ok(config)
}

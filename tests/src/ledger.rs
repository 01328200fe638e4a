//! Independent bookkeeping of all jobs. Clients record every outcome. Workers record the beginning and end of
//! each job in a file, and use file locks to detect whether more jobs run at once than allowed.
//!
//! During a run, workers are killed, stopped and continued, the configuration is reloaded, and hostile
//! clients flood the jobs socket. After the run, both records are compared.

pub mod chaos;
pub mod clients;
pub mod embedded;
pub mod worker;

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bulkhead_api::Snapshot;
use bulkhead_client::Client;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::{PATIENCE, Supervisor, descriptors, processes_with, programs, resident_bytes, tally};
use chaos::{Chaos, Deed};
use clients::{Entry, Told};
use worker::{Attempt, Mark, Record};

/// Name of a bulkhead that prefetches many jobs, because most of its jobs have the same priority and tenant.
pub const AHEAD: &str = "ahead";

/// Bulkheads that are put under load, each with the number of jobs that it can run at once. This number stays the same
/// throughout the run.
pub const BULKHEADS: [Bulkhead; 9] = [
    Bulkhead { name: AHEAD, processes: 1, max_in_flight: 1, keys: "lookahead = \"20ms\"" },
    Bulkhead {
        name: "single",
        processes: 2,
        max_in_flight: 1,
        keys: "recycle = { jobs = 50 }\nlookahead = \"50ms\"",
    },
    Bulkhead {
        name: "shared",
        processes: 2,
        max_in_flight: 4,
        keys: "recycle = { age = \"2s\" }\nlookahead = \"50ms\"",
    },
    Bulkhead { name: "fresh", processes: 2, max_in_flight: 1, keys: "recycle = { jobs = 1 }" },
    Bulkhead {
        name: "spares",
        processes: 2,
        max_in_flight: 1,
        keys: "recycle = { jobs = 5 }\nstart = { spares = 2 }",
    },
    Bulkhead {
        name: "adaptive",
        processes: 3,
        max_in_flight: 1,
        keys: "adaptive = { max = 3, target = \"20ms\" }\nlookahead = \"50ms\"",
    },
    Bulkhead {
        name: "forked",
        processes: 2,
        max_in_flight: 2,
        keys: "recycle = { jobs = 50 }\nstart = { mode = \"fork\", spares = 1 }\nlookahead = \"20ms\"",
    },
    Bulkhead {
        name: "forked-fresh",
        processes: 2,
        max_in_flight: 1,
        keys: "recycle = { jobs = 1 }\nstart = { mode = \"fork\", spares = 2 }",
    },
    Bulkhead { name: "bare", processes: 1, max_in_flight: 2, keys: "sandbox = { profile = \"none\" }" },
];

/// A bulkhead under load.
pub struct Bulkhead {
    /// Name of the bulkhead.
    pub name: &'static str,
    /// Number of worker processes.
    pub processes: usize,
    /// Maximum number of concurrent jobs per worker.
    pub max_in_flight: usize,
    /// Additional configuration keys for the bulkhead, in TOML syntax.
    pub keys: &'static str,
}

impl Bulkhead {
    /// Returns the maximum number of concurrent jobs in the bulkhead.
    pub fn bound(&self) -> usize {
        self.processes * self.max_in_flight
    }

    /// Returns the range of possible values of the bulkhead's limit while no job is running. With `recycle.jobs`, a
    /// worker has at most as many permits as it has jobs left to run, but at least one.
    fn limits_at_rest(&self) -> RangeInclusive<u64> {
        let lowest = if self.keys.contains("jobs = ") { self.processes } else { self.bound() };
        lowest as u64..=self.bound() as u64
    }
}

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Duration of the load.
    pub lasts: Duration,
    /// Seed for random choices. Timing still depends on the machine.
    pub seed: u64,
    /// True if jobs hang and workers are stopped, so that the supervisor has to kill workers. A worker that is being
    /// killed can overlap with its successor for a moment. Without hangs, the limit on concurrent jobs is never
    /// exceeded.
    pub has_hangs: bool,
}

/// Results of a run.
#[derive(Debug, Default)]
pub struct Findings {
    /// Number of jobs for each combination of outcome and reason.
    pub outcomes: std::collections::BTreeMap<String, usize>,
    /// Number of injected faults of each kind.
    pub deeds: std::collections::BTreeMap<&'static str, usize>,
    /// Number of jobs that were started at least once.
    pub begun: usize,
    /// Number of jobs that exceeded the concurrency limit because a worker that was being killed was still running a
    /// job.
    pub beside_killed: usize,
    /// Number of jobs that were reported as executed but were not recorded by any worker. There can be a few, because a
    /// worker can die between claiming a job and recording it.
    pub executed_unseen: usize,
    /// Descriptions of violated invariants.
    pub faults: Vec<String>,
    /// Number of descriptors that the idle supervisor had open before and after the load.
    pub descriptors: (usize, usize),
    /// Resident memory of the idle supervisor after a fifth of the load and at the end, in bytes.
    pub resident: (u64, u64),
}

/// Value of `grace` for all bulkheads in a run in which jobs hang.
const GRACE: Duration = Duration::from_millis(50);

/// Maximum time that a worker can continue to start jobs after the supervisor has decided to kill the worker, in µs.
const KILL_TIMEOUT_US: u64 = 500_000;

/// Maximum number of faults of each kind that are reported in full.
const TOLD_MAX: usize = 5;

/// Maximum number of additional descriptors that the idle supervisor can have open after the load.
const DESCRIPTORS_SLACK: usize = 12;

/// Maximum growth of the resident memory between the two measurements, in bytes. Allocators keep some memory after
/// floods of clients, and in a short run the first flood can come after the first measurement. In a run of ten minutes,
/// the growth was 4 MiB.
const RESIDENT_SLACK: u64 = 96 << 20;

/// Runs the load and returns the results.
pub fn keep(plan: Plan) -> Findings {
    // Workers write to this folder, so it is not part of the supervisor's folder.
    let notes = TempDir::new().expect("a temporary folder");
    open_to_all(notes.path());
    let temporary = TempDir::new().expect("a temporary folder");
    let supervisor = launch(notes.path(), temporary.path(), plan);
    let mut findings = Findings { descriptors: (at_rest(&supervisor), 0), ..Findings::default() };

    let fifth = plan.lasts / 5;
    let (first, mut deeds) = load(&supervisor, notes.path(), Plan { lasts: fifth, ..plan }, 0);
    at_rest(&supervisor);
    fill_all(&supervisor);
    findings.resident.0 = resident_bytes(supervisor.pid());
    let rest = Plan { lasts: plan.lasts - fifth, seed: plan.seed.wrapping_add(1), ..plan };
    let (second, more) = load(&supervisor, notes.path(), rest, 1);
    deeds.extend(more);
    fill_all(&supervisor);
    // Each crash record that waits for the symbolizer keeps descriptors open.
    let began = Instant::now();
    findings.descriptors.1 = at_rest(&supervisor);
    while has_more_descriptors(&findings) && began.elapsed() < PATIENCE {
        findings.descriptors.1 = at_rest(&supervisor);
    }
    findings.resident.1 = resident_bytes(supervisor.pid());
    stop(supervisor, notes.path(), temporary.path(), &mut findings);
    let told = first.into_iter().chain(second).collect();
    judge(told, deeds, findings, notes.path(), plan)
}

/// Compares the clients' records with the workers' records, and adds the results to the findings.
fn judge(
    told: HashMap<u64, Entry>,
    deeds: Vec<Deed>,
    mut findings: Findings,
    notes: &Path,
    plan: Plan,
) -> Findings {
    findings.deeds = tally(deeds.iter().map(|deed| deed.1));
    findings.outcomes = tally(told.values().map(|entry| entry.told.name()));
    compare(&told, &worker::read(notes), &deeds, &mut findings, plan);
    judge_rest(&mut findings);
    findings
}

/// Lets all users write to the folder. The folder must not be sticky, because with `fs.protected_regular`, opening
/// another user's file with `O_CREAT` fails in a sticky folder.
fn open_to_all(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o777)).expect("our own folder");
}

fn launch(notes: &Path, temporary: &Path, plan: Plan) -> Supervisor {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("notes"), notes.to_str().expect("an ordinary path"))
        .expect("a writable folder");
    let variables = [("TMPDIR", temporary.to_str().expect("an ordinary path"))];
    Supervisor::launch_with_variables(folder, &variables, "drain_timeout = \"20s\"", &config(notes, 0, plan))
        .until_ready()
}

/// Returns the configuration of the bulkheads, in TOML syntax. A different `revision` changes the workers' environment,
/// so that a reload replaces all workers.
pub fn config(notes: &Path, revision: u64, plan: Plan) -> String {
    let grace = if plan.has_hangs { GRACE } else { Duration::from_secs(60) };
    let program = programs().join("ledger");
    let quoted = |path: &Path| format!("{:?}", path.to_str().expect("an ordinary path"));
    let one = |bulkhead: &Bulkhead| {
        let Bulkhead { name, processes, max_in_flight, keys } = bulkhead;
        let sandbox = if keys.contains("sandbox") {
            String::new()
        } else {
            format!("sandbox = {{ write = [{}] }}\n", quoted(notes))
        };
        format!(
            "[bulkhead.{name}]\ncommand = [{}, \"worker\", {}, \"{name}\", \"{}\"]\n\
             env = {{ REVISION = \"{revision}\" }}\nprocesses = {processes}\nmax_in_flight = {max_in_flight}\n\
             max_queue = 200\ndeadline = \"2s\"\ngrace = \"{}ms\"\nhealth = {{ heartbeat = \"200ms\", missed = 5 }}\n\
             retry = {{ attempts = 3, budget = 1.0 }}\n{keys}\n{sandbox}",
            quoted(&program),
            quoted(notes),
            bulkhead.bound(),
            grace.as_millis(),
        )
    };
    BULKHEADS.iter().map(one).collect()
}

/// Runs clients and injects faults until the time is up and every job has an outcome.
fn load(supervisor: &Supervisor, notes: &Path, plan: Plan, round: u64) -> (HashMap<u64, Entry>, Vec<Deed>) {
    let is_over = Arc::new(AtomicBool::new(false));
    let chaos = Chaos::begin(supervisor, notes, plan, is_over.clone());
    let told = clients::run(&supervisor.socket(), plan, round);
    is_over.store(true, Ordering::SeqCst);
    (told, chaos.end())
}

/// Checks that every bulkhead can run its maximum number of jobs at once.
fn fill_all(supervisor: &Supervisor) {
    clients::on_this_thread(async {
        let client = Client::connect(supervisor.socket()).await.expect("the supervisor runs");
        clients::fill_all(&client).await;
    });
}

/// Number of measurements of the idle supervisor.
const LOOKS_AT_REST: usize = 20;

/// Waits until no job is in flight and all limits are back to normal. Counts the supervisor's descriptors several times
/// and returns the lowest count, because recycling by age briefly needs more descriptors.
fn at_rest(supervisor: &Supervisor) -> usize {
    let began = Instant::now();
    let mut counts = Vec::new();
    loop {
        let busy: Vec<Snapshot> =
            BULKHEADS.iter().filter_map(|bulkhead| busy(supervisor, bulkhead)).collect();
        if busy.is_empty() {
            counts.push(descriptors(supervisor.pid()));
        }
        if counts.len() == LOOKS_AT_REST {
            return counts.into_iter().min().expect("at least one measurement");
        }
        assert!(
            began.elapsed() < PATIENCE,
            "waited {PATIENCE:?} without success for idle bulkheads; not idle: {busy:#?}\n{}",
            log_of(supervisor, &busy)
        );
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// Returns the most recent log lines that mention these bulkheads.
fn log_of(supervisor: &Supervisor, busy: &[Snapshot]) -> String {
    let log = supervisor.log();
    let tells = |line: &&str| busy.iter().any(|state| line.contains(&state.name));
    let told: Vec<&str> = log.lines().filter(tells).collect();
    told[told.len().saturating_sub(60)..].join("\n")
}

/// Returns the state of a bulkhead, or `None` if the bulkhead has no jobs and its limit is the normal limit.
fn busy(supervisor: &Supervisor, bulkhead: &Bulkhead) -> Option<Snapshot> {
    let state = supervisor.state(bulkhead.name);
    let is_limited = match &state.adaptive {
        Some(adaptive) => state.limit == adaptive.limit.min(bulkhead.bound() as u64),
        None => bulkhead.limits_at_rest().contains(&state.limit),
    };
    let is_at_rest = (state.in_flight, state.queued) == (0, 0) && is_limited;
    (!is_at_rest).then_some(state)
}

fn stop(mut supervisor: Supervisor, notes: &Path, temporary: &Path, findings: &mut Findings) {
    supervisor.signal(Signal::SIGTERM);
    let status = supervisor.wait();
    if status.code() != Some(0) {
        findings.faults.push(format!("the supervisor exited with {status}"));
    }
    findings.faults.extend(left_of(notes, temporary));
    if supervisor.socket().exists() {
        findings.faults.push("the jobs socket still exists".into());
    }
}

/// Describes the processes and files that remain after a supervisor has exited.
fn left_of(notes: &Path, temporary: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let processes = processes_with(notes.to_str().expect("an ordinary path"));
    if !processes.is_empty() {
        left.push(format!("processes are left: {processes:?}"));
    }
    let files = files_below(temporary);
    if !files.is_empty() {
        left.push(format!("temporary files are left: {files:?}"));
    }
    left
}

/// Returns the files and worker folders that are left in a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                waiting.push(entry.path());
                if entry.file_name().to_string_lossy().starts_with("worker") {
                    found.push(entry.path());
                }
            } else {
                found.push(entry.path());
            }
        }
    }
    found
}

/// Compares the clients' outcomes with the workers' records.
fn compare(
    told: &HashMap<u64, Entry>,
    records: &[Record],
    deeds: &[Deed],
    findings: &mut Findings,
    plan: Plan,
) {
    let mut begun: HashMap<u64, usize> = HashMap::new();
    let mut ended: HashSet<u64> = HashSet::new();
    let mut ended_attempts: HashSet<Attempt> = HashSet::new();
    let mut workers: HashMap<Attempt, u64> = HashMap::new();
    let mut last_begun_us: HashMap<u64, u64> = HashMap::new();
    let mut faults: HashMap<&'static str, Vec<String>> = HashMap::new();
    for record in records {
        match record.mark {
            Mark::Begun => {
                *begun.entry(record.job).or_default() += 1;
                workers.insert(record.attempt(), record.worker);
                last_begun_us.insert(record.worker, record.at_us);
            }
            Mark::Ended => {
                ended.insert(record.job);
                ended_attempts.insert(record.attempt());
            }
            Mark::OverBound | Mark::Held => {}
        }
    }
    findings.begun = begun.len();
    for (at, record) in records.iter().enumerate().filter(|(_, record)| record.mark == Mark::OverBound) {
        let held = records[at + 1..].iter().take_while(|held| held.mark == Mark::Held);
        // A job that stayed frozen for longer than `GRACE` can still end before its worker is dead.
        let is_killed = |held: &Record| {
            let is_late = record.at_us >= held.began_us + GRACE.as_micros() as u64;
            let has_failed = !told.get(&held.job).is_some_and(|entry| entry.told.is_ok());
            let last_us = workers.get(&held.attempt()).and_then(|worker| last_begun_us.get(worker));
            let is_dead = last_us.is_some_and(|last_us| *last_us < record.at_us + KILL_TIMEOUT_US);
            let is_retried = begun.get(&held.job).is_some_and(|times| *times > 1);
            !ended_attempts.contains(&held.attempt()) || is_late && is_dead && (has_failed || is_retried)
        };
        if plan.has_hangs && held.clone().any(is_killed) {
            findings.beside_killed += 1;
        } else {
            let held: Vec<Attempt> = held.map(Record::attempt).collect();
            let beside = beside(record, records, told);
            let what = format!("{}, held by {held:?}, {beside}", around(record, deeds));
            faults.entry("the limit was exceeded").or_default().push(what);
        }
    }
    for (job, times) in &begun {
        match told.get(job) {
            None => faults.entry("a job began that no client had sent").or_default().push(job.to_string()),
            Some(entry) if !entry.is_idempotent && *times > 1 => {
                let what = format!("{job}: {times} times, {:?}", entry.told);
                faults.entry("a job that is not idempotent began twice").or_default().push(what);
            }
            Some(_) => {}
        }
    }
    for (job, entry) in told {
        let (begun, ended) = (begun.contains_key(job), ended.contains(job));
        let what = || format!("{job}: {:?}, idempotent {}", entry.told, entry.is_idempotent);
        if matches!(entry.told, Told::WrongResult | Told::Lost(_)) {
            faults.entry("a job has a wrong result or a lost connection").or_default().push(what());
        }
        if entry.told == Told::Nothing {
            faults.entry("a job has no outcome").or_default().push(what());
        }
        if entry.told.is_ok() && !ended {
            faults.entry("a job with outcome ok never ended").or_default().push(what());
        }
        findings.executed_unseen += usize::from(entry.told.says_executed() && !begun);
        if entry.told.says_not_executed() && begun {
            faults.entry("a job reported as not executed began").or_default().push(what());
        }
    }
    for (kind, found) in faults {
        let some = found.iter().take(TOLD_MAX).cloned().collect::<Vec<_>>().join("; ");
        findings.faults.push(format!("{kind} ({} times): {some}", found.len()));
    }
}

/// Describes a worker's record, including the faults that were injected in the preceding 1.5 seconds.
fn around(record: &Record, deeds: &[Deed]) -> String {
    let before = deeds.iter().filter_map(|(at_us, deed)| {
        let ago = record.at_us.checked_sub(*at_us).filter(|ago| *ago < 1_500_000)?;
        Some(format!("{deed} {} ms before", ago / 1_000))
    });
    format!("{record:?}, {}", before.collect::<Vec<_>>().join(", "))
}

/// Describes all records that the bulkhead's workers wrote within 0.15 s of a given record.
fn beside(record: &Record, records: &[Record], told: &HashMap<u64, Entry>) -> String {
    let bulkhead = told.get(&record.job).map(|entry| entry.bulkhead);
    let lines =
        records.iter().filter(|other| other.at_us.abs_diff(record.at_us) < 150_000).filter_map(|other| {
            let entry = told.get(&other.job).filter(|entry| Some(entry.bulkhead) == bulkhead)?;
            let after_us = other.at_us as i64 - record.at_us as i64;
            let Record { mark, job, worker, .. } = other;
            Some(format!(
                "\n{after_us} µs: {mark:?} job {job} in worker {worker}, {:?}, {:?}",
                entry.operation, entry.told
            ))
        });
    format!("bulkhead {bulkhead:?}:{}", lines.collect::<String>())
}

fn has_more_descriptors(findings: &Findings) -> bool {
    let (before, after) = findings.descriptors;
    after > before + DESCRIPTORS_SLACK
}

fn judge_rest(findings: &mut Findings) {
    let (before, after) = findings.descriptors;
    if has_more_descriptors(findings) {
        findings.faults.push(format!("{before} descriptors before the load, {after} after it"));
    }
    let (before, after) = findings.resident;
    if after > before + before / 4 + RESIDENT_SLACK {
        findings
            .faults
            .push(format!("{before} resident bytes after a fifth of the load, {after} at its end"));
    }
}

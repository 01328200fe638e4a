//! A ledger of jobs that clients and workers keep, and the supervisor does not: clients write down every
//! outcome, workers write down every beginning and end in a file of their own, and the kernel counts how many jobs
//! of a bulkhead run at once. Meanwhile workers are killed, stopped and continued, the configuration is reloaded,
//! and hostile clients flood the jobs socket. Afterwards the two sides are compared.

pub mod chaos;
pub mod clients;
pub mod embedded;
pub mod worker;

use std::collections::HashMap;
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
use worker::{Mark, Record};

/// The bulkhead whose jobs are mostly alike, so that many of them travel ahead of its worker.
pub const AHEAD: &str = "ahead";

/// The bulkheads under load, and how many jobs each may run at once. No chaos changes these numbers.
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

/// One bulkhead under load.
pub struct Bulkhead {
    /// Its name.
    pub name: &'static str,
    /// Worker processes.
    pub processes: usize,
    /// Jobs for each.
    pub max_in_flight: usize,
    /// Further keys.
    pub keys: &'static str,
}

impl Bulkhead {
    /// Jobs that may run at once.
    pub fn bound(&self) -> usize {
        self.processes * self.max_in_flight
    }

    /// The limit when nothing runs. A worker has no more permits than jobs that it may still begin, and one at least.
    fn limits_at_rest(&self) -> RangeInclusive<u64> {
        let lowest = if self.keys.contains("jobs = ") { self.processes } else { self.bound() };
        lowest as u64..=self.bound() as u64
    }
}

/// How long, and by which random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How long the load lasts.
    pub lasts: Duration,
    /// The seed of what happens; the moments at which it happens are the machine's.
    pub seed: u64,
    /// Whether jobs hang and workers are stopped, so that the supervisor has workers to kill. A worker that it has sent
    /// SIGKILL may still run for a moment while its successor does; without them the bound is never passed.
    pub has_hangs: bool,
}

/// What both sides wrote down.
#[derive(Debug, Default)]
pub struct Findings {
    /// Jobs by outcome and reason.
    pub outcomes: std::collections::BTreeMap<String, usize>,
    /// What was done to the supervisor and its workers, by kind.
    pub deeds: std::collections::BTreeMap<&'static str, usize>,
    /// Jobs that began at least once.
    pub begun: usize,
    /// Jobs that began while as many ran as may, one of which never ended: a worker that was sent SIGKILL may still
    /// be there when its spare begins.
    pub beside_killed: usize,
    /// Jobs reported as executed of which no worker recorded a beginning. A worker can die between the claim of a job
    /// and the record, so a few are possible.
    pub executed_unseen: usize,
    /// What must never happen and did, a sentence each.
    pub faults: Vec<String>,
    /// Descriptors of the supervisor: at rest before the load, and after.
    pub descriptors: (usize, usize),
    /// Resident bytes of the supervisor: at rest after a fifth of the load, and at the end.
    pub resident: (u64, u64),
}

/// Faults of one kind that are told apart; the rest is counted.
const TOLD_MAX: usize = 5;

/// Descriptors that the supervisor may hold at rest beyond those of the beginning.
const DESCRIPTORS_SLACK: usize = 12;

/// Bytes by which the supervisor may grow between the two rests: allocators keep some of what floods took, and in a
/// run of seconds the first of these may come after the first rest. In ten minutes it grew by 4 MiB.
const RESIDENT_SLACK: u64 = 96 << 20;

/// Runs it all.
pub fn keep(plan: Plan) -> Findings {
    // Workers write in this folder; it is not the supervisor's.
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
    findings.descriptors.1 = at_rest(&supervisor);
    findings.resident.1 = resident_bytes(supervisor.pid());
    stop(supervisor, notes.path(), temporary.path(), &mut findings);
    let told = first.into_iter().chain(second).collect();
    judge(told, deeds, findings, notes.path(), plan)
}

/// Holds all that was seen against what must be.
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

fn open_to_all(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o1777)).expect("our own folder");
}

fn launch(notes: &Path, temporary: &Path, plan: Plan) -> Supervisor {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("notes"), notes.to_str().expect("an ordinary path"))
        .expect("a writable folder");
    let variables = [("TMPDIR", temporary.to_str().expect("an ordinary path"))];
    Supervisor::launch_with_variables(folder, &variables, "drain_timeout = \"20s\"", &config(notes, 0, plan))
        .until_ready()
}

/// The bulkheads in TOML. Another `revision` has another environment, so that a reload replaces all workers.
pub fn config(notes: &Path, revision: u64, plan: Plan) -> String {
    let grace = if plan.has_hangs { "50ms" } else { "60s" };
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
             max_queue = 200\ndeadline = \"2s\"\ngrace = \"{grace}\"\nhealth = {{ heartbeat = \"200ms\", missed = 5 }}\n\
             retry = {{ attempts = 3, budget = 1.0 }}\n{keys}\n{sandbox}",
            quoted(&program),
            quoted(notes),
            bulkhead.bound(),
        )
    };
    BULKHEADS.iter().map(one).collect()
}

/// Clients and chaos at once, until time is up and every job has its outcome.
fn load(supervisor: &Supervisor, notes: &Path, plan: Plan, round: u64) -> (HashMap<u64, Entry>, Vec<Deed>) {
    let is_over = Arc::new(AtomicBool::new(false));
    let chaos = Chaos::begin(supervisor, notes, plan, is_over.clone());
    let told = clients::run(&supervisor.socket(), plan, round);
    is_over.store(true, Ordering::SeqCst);
    (told, chaos.end())
}

/// Waits until all room can be taken at once.
fn fill_all(supervisor: &Supervisor) {
    clients::on_this_thread(async {
        let client = Client::connect(supervisor.socket()).await.expect("the supervisor runs");
        clients::fill_all(&client).await;
    });
}

/// How often the supervisor must have been at rest when it was looked at.
const LOOKS_AT_REST: usize = 20;

/// Waits until nothing is in flight and all room is there; returns how many descriptors the supervisor has then. Workers
/// are recycled by age meanwhile, which takes some for a moment: the fewest count.
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
            return counts.into_iter().min().expect("there are some");
        }
        assert!(
            began.elapsed() < PATIENCE,
            "waited {PATIENCE:?} in vain for rest; not at rest: {busy:#?}\n{}",
            log_of(supervisor, &busy)
        );
        std::thread::park_timeout(Duration::from_millis(2));
    }
}

/// The last that the supervisor logged of these bulkheads.
fn log_of(supervisor: &Supervisor, busy: &[Snapshot]) -> String {
    let log = supervisor.log();
    let tells = |line: &&str| busy.iter().any(|state| line.contains(&state.name));
    let told: Vec<&str> = log.lines().filter(tells).collect();
    told[told.len().saturating_sub(60)..].join("\n")
}

/// The state of a bulkhead that has work, or less room for it than its configuration says.
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
        findings.faults.push(format!("the supervisor ended with {status}"));
    }
    findings.faults.extend(left_of(notes, temporary));
    if supervisor.socket().exists() {
        findings.faults.push("the jobs socket is left".into());
    }
}

/// What is left of a supervisor that has ended, a sentence each.
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

/// Files and folders that are left of workers.
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

/// Holds what clients were told against what workers wrote down.
fn compare(
    told: &HashMap<u64, Entry>,
    records: &[Record],
    deeds: &[Deed],
    findings: &mut Findings,
    plan: Plan,
) {
    let mut begun: HashMap<u64, usize> = HashMap::new();
    let mut ended: HashMap<u64, usize> = HashMap::new();
    let mut faults: HashMap<&'static str, Vec<String>> = HashMap::new();
    for record in records {
        match record.mark {
            Mark::Begun => *begun.entry(record.job).or_default() += 1,
            Mark::Ended => *ended.entry(record.job).or_default() += 1,
            Mark::OverBound | Mark::Held => {}
        }
    }
    findings.begun = begun.len();
    for (at, record) in records.iter().enumerate().filter(|(_, record)| record.mark == Mark::OverBound) {
        let held = records[at + 1..].iter().take_while(|held| held.mark == Mark::Held);
        let is_killed = held.clone().any(|held| !ended.contains_key(&held.job));
        if is_killed && plan.has_hangs {
            findings.beside_killed += 1;
        } else {
            let what = format!("{}, held by {:?}", around(record, deeds), held.collect::<Vec<_>>());
            faults.entry("the bound was passed").or_default().push(what);
        }
    }
    for (job, times) in &begun {
        match told.get(job) {
            None => faults.entry("a job began that no client sent").or_default().push(job.to_string()),
            Some(entry) if !entry.is_idempotent && *times > 1 => {
                let what = format!("{job}: {times} times, {:?}", entry.told);
                faults.entry("a job that is not idempotent began twice").or_default().push(what);
            }
            Some(_) => {}
        }
    }
    for (job, entry) in told {
        let (begun, ended) = (begun.contains_key(job), ended.contains_key(job));
        let what = || format!("{job}: {:?}, idempotent {}", entry.told, entry.is_idempotent);
        if matches!(entry.told, Told::WrongResult | Told::Lost(_)) {
            faults.entry("a job was answered wrongly").or_default().push(what());
        }
        if entry.told == Told::Nothing {
            faults.entry("a job has no outcome").or_default().push(what());
        }
        if entry.told.is_ok() && !ended {
            faults.entry("a job is ok that never ended").or_default().push(what());
        }
        findings.executed_unseen += usize::from(entry.told.says_executed() && !begun);
        if entry.told.says_not_executed() && begun {
            faults.entry("a job began that is told as not executed").or_default().push(what());
        }
    }
    for (kind, found) in faults {
        let some = found.iter().take(TOLD_MAX).cloned().collect::<Vec<_>>().join("; ");
        findings.faults.push(format!("{kind} ({} times): {some}", found.len()));
    }
}

/// A record, and what was done in the second before it.
fn around(record: &Record, deeds: &[Deed]) -> String {
    let before = deeds.iter().filter_map(|(at_us, deed)| {
        let ago = record.at_us.checked_sub(*at_us).filter(|ago| *ago < 1_500_000)?;
        Some(format!("{deed} {} ms before", ago / 1_000))
    });
    format!("{record:?}, {}", before.collect::<Vec<_>>().join(", "))
}

fn judge_rest(findings: &mut Findings) {
    let (before, after) = findings.descriptors;
    if after > before + DESCRIPTORS_SLACK {
        findings.faults.push(format!("{before} descriptors before the load, {after} after it"));
    }
    let (before, after) = findings.resident;
    if after > before + before / 4 + RESIDENT_SLACK {
        findings
            .faults
            .push(format!("{before} resident bytes after a fifth of the load, {after} at its end"));
    }
}

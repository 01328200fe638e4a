//! `GET /v1/bulkheads/{name}/advice`, and periodic samples of the workers' resource usage, which the advice
//! needs besides the data plane's counters.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bulkhead_policy::Time;

use super::answers::{not_found, stuck};
use super::{Control, Shared};
use crate::advice::{Machine, Setup, Work, advise, seen};
use crate::observe::process;
use bulkhead_config::{BulkheadConfig, Program, Resource};
use bulkhead_plane::command::{Command, WorkerProcess};
use bulkhead_plane::demand::InForce;
use bulkhead_plane::windows::Pair;

/// Interval between samples of the workers.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of workers per sample. With more workers, consecutive samples cover different workers.
const LOOKED_AT_MAX: usize = 512;

/// Recent resource usage of the workers.
pub(super) struct Works {
    origin: Instant,
    by_bulkhead: HashMap<Arc<str>, Pair<Work>>,
    /// Last sample of each process, by pid.
    looks: HashMap<u32, Look>,
    /// Index of the first worker in the next sample.
    next: usize,
}

/// A sample of a process.
#[derive(Clone, Copy)]
struct Look {
    /// Processor time used so far, in milliseconds.
    cpu_ms: u64,
    /// Number of jobs that the bulkhead had answered at that time.
    answered: u64,
}

impl Default for Works {
    fn default() -> Self {
        Self { origin: Instant::now(), by_bulkhead: HashMap::new(), looks: HashMap::new(), next: 0 }
    }
}

impl Works {
    fn now(&self) -> Time {
        Time::ZERO + self.origin.elapsed()
    }

    /// Samples the workers that may have worked since their last sample, up to `LOOKED_AT_MAX` workers.
    fn look(&mut self, processes: &[WorkerProcess]) {
        let there: HashSet<u32> = processes.iter().map(|process| process.pid).collect();
        self.looks.retain(|pid, _| there.contains(pid));
        let may_have_worked = |process: &&WorkerProcess| {
            let last = self.looks.get(&process.pid);
            process.is_busy || last.is_none_or(|last| last.answered != process.answered)
        };
        let worked: Vec<&WorkerProcess> = processes.iter().filter(may_have_worked).collect();
        let first = if self.next < worked.len() { self.next } else { 0 };
        self.next = first + LOOKED_AT_MAX;
        for process in worked.into_iter().skip(first).take(LOOKED_AT_MAX) {
            self.look_at(process);
        }
    }

    fn look_at(&mut self, process: &WorkerProcess) {
        let Some((rss_bytes, cpu_ms)) = process::work(process.pid) else { return };
        let look = Look { cpu_ms, answered: process.answered };
        // The process usually used the time before the first sample for its start.
        let before = self.looks.insert(process.pid, look).map_or(cpu_ms, |last| last.cpu_ms);
        let now = self.now();
        let pair = self.by_bulkhead.entry(process.bulkhead.clone()).or_default();
        pair.roll(now);
        let work = &mut pair.current;
        work.cpu_ms += cpu_ms.saturating_sub(before);
        work.rss_max_bytes = work.rss_max_bytes.max(Some(rss_bytes));
    }

    fn of(&mut self, bulkhead: &str) -> Work {
        let now = self.now();
        let Some(pair) = self.by_bulkhead.get_mut(bulkhead) else { return Work::default() };
        pair.roll(now);
        let [current, previous] = pair.both();
        Work {
            cpu_ms: current.cpu_ms + previous.cpu_ms,
            rss_max_bytes: current.rss_max_bytes.max(previous.rss_max_bytes),
        }
    }

    /// Drops the usage of all other bulkheads.
    fn keep_only(&mut self, bulkheads: &HashSet<&str>) {
        self.by_bulkhead.retain(|name, _| bulkheads.contains(&**name));
    }
}

/// Samples the workers until the control plane ends.
pub(super) async fn watch(control: Shared) {
    let look = |control: Shared| async move {
        if let Some(processes) = control.commander.ask(|reply| Command::WorkerProcesses { reply }).await {
            control.works().look(&processes);
        }
    };
    control.every(LOOK_INTERVAL, look).await;
}

pub(super) async fn show(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    let bulkhead = name.clone();
    let observe = |reply| Command::Observe { bulkhead, reply };
    let Some(answer) = control.commander.ask(observe).await else { return stuck() };
    let config = control.config();
    let bulkhead = config.bulkheads.iter().find(|bulkhead| bulkhead.name == name);
    let (Some(observation), Some(bulkhead)) = (answer, bulkhead) else { return not_found(&name) };
    let Some(processes) = control.commander.ask(|reply| Command::WorkerProcesses { reply }).await else {
        return stuck();
    };
    let own = processes.iter().filter(|process| *process.bulkhead == *name).take(LOOKED_AT_MAX);
    let mut work = {
        let mut works = control.works();
        own.for_each(|process| works.look_at(process));
        works.of(&name)
    };
    // The memory of the exec host does not reflect the memory of the programs.
    if matches!(bulkhead.program, Program::Exec { .. }) {
        work.rss_max_bytes = None;
    }
    let setup = Setup { adaptive: observation.adaptive.clone(), ..setup(bulkhead, &observation.numbers) };
    axum::Json(advise(name, seen(&observation, work), &setup, &machine())).into_response()
}

/// Combines the file's settings with the numbers in force, which an operator can have changed.
fn setup(bulkhead: &BulkheadConfig, numbers: &InForce) -> Setup {
    let is_bound = |resource| matches!(resource, Resource::As | Resource::Data);
    let has_rlimit =
        bulkhead.rlimits.iter().any(|rlimit| is_bound(rlimit.resource) && rlimit.limit.is_some());
    Setup {
        processes: numbers.processes,
        max_in_flight: numbers.max_in_flight,
        max_queue: numbers.max_queue,
        queue_timeout: numbers.queue_timeout,
        deadline: numbers.deadline,
        deadline_max: numbers.deadline_max,
        adaptive: None,
        spares: bulkhead.start.spares,
        sets_of_workers: bulkhead.isolation().map_or(1, |isolation| isolation.max_active),
        cgroup_memory: bulkhead.cgroup.as_ref().and_then(|cgroup| cgroup.memory),
        is_memory_bounded: bulkhead.recycle.rss.is_some() || has_rlimit,
    }
}

fn machine() -> Machine {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    Machine { processors, memory_bytes: process::machine_memory() }
}

impl Control {
    fn works(&self) -> std::sync::MutexGuard<'_, Works> {
        self.works.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the usage of all other bulkheads.
    pub(super) fn keep_works(&self, bulkheads: &HashSet<&str>) {
        self.works().keep_only(bulkheads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_had_no_work_is_not_looked_at_again() {
        let mut works = Works::default();
        let pid = std::process::id();
        let process =
            |answered, is_busy| WorkerProcess { bulkhead: "b".into(), pid, generation: 1, answered, is_busy };
        works.look(&[process(0, false)]);
        // Detects a sample: each sample overwrites this value.
        let mut is_looked_at = |process| {
            works.looks.get_mut(&pid).unwrap().cpu_ms = u64::MAX;
            works.look(&[process]);
            works.looks[&pid].cpu_ms != u64::MAX
        };
        assert!(!is_looked_at(process(0, false)));
        assert!(is_looked_at(process(0, true)), "it has a job");
        assert!(is_looked_at(process(1, false)), "it had one since");
        assert!(!is_looked_at(process(1, false)));
        works.look(&[]);
        assert!(works.looks.is_empty(), "it is gone");
    }
}

//! Handles `GET /v1/bulkheads/{name}/advice`. Also samples the workers' resource usage periodically, because advice
//! needs these samples in addition to the counters of the data plane. `crate::advice` derives the proposals. Advice
//! never changes a setting.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bulkhead_policy::Time;

use super::responses::{not_found, stuck};
use super::{Control, Shared};
use crate::advice::{Machine, ResourceUsage, Settings, advise, observations};
use crate::observe::process;
use bulkhead_config::{BulkheadConfig, Program, Resource};
use bulkhead_plane::command::{Command, WorkerProcess};
use bulkhead_plane::demand::CurrentLimits;
use bulkhead_plane::windows::WindowPair;

/// Interval between samples of the workers' resource usage.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);

/// Maximum number of workers to include in one sample. If there are more workers, successive samples cover different
/// workers.
const SAMPLED_WORKERS_MAX: usize = 512;

/// Resource usage of the workers during the current hour and the previous hour.
pub(super) struct UsageSamples {
    origin: Instant,
    by_bulkhead: HashMap<Arc<str>, WindowPair<ResourceUsage>>,
    /// Latest sample of each worker, by process ID.
    last_samples: HashMap<u32, ProcessSample>,
    /// Index of the first worker to include in the next sample.
    next: usize,
}

#[derive(Clone, Copy)]
struct ProcessSample {
    /// Total processor time used by the process, in milliseconds.
    cpu_ms: u64,
    /// Number of jobs given to the worker before the sample was taken.
    jobs_given: u64,
}

impl Default for UsageSamples {
    fn default() -> Self {
        Self { origin: Instant::now(), by_bulkhead: HashMap::new(), last_samples: HashMap::new(), next: 0 }
    }
}

impl UsageSamples {
    fn now(&self) -> Time {
        Time::ZERO + self.origin.elapsed()
    }

    /// Samples up to `SAMPLED_WORKERS_MAX` workers. Skips workers that have been idle since they were last sampled.
    fn sample(&mut self, processes: &[WorkerProcess]) {
        let present: HashSet<u32> = processes.iter().map(|process| process.pid).collect();
        self.last_samples.retain(|pid, _| present.contains(pid));
        let may_have_worked = |process: &&WorkerProcess| {
            let last = self.last_samples.get(&process.pid);
            process.is_busy || last.is_none_or(|last| last.jobs_given != process.jobs_given)
        };
        let worked: Vec<&WorkerProcess> = processes.iter().filter(may_have_worked).collect();
        let first = if self.next < worked.len() { self.next } else { 0 };
        self.next = first + SAMPLED_WORKERS_MAX;
        for process in worked.into_iter().skip(first).take(SAMPLED_WORKERS_MAX) {
            let is_repeated = self.last_samples.contains_key(&process.pid);
            let had_jobs = process.jobs_given > 0;
            if let Some(usage) = self.sample_process(process).filter(|_| had_jobs) {
                usage.samples += 1;
                usage.repeated_samples += u64::from(is_repeated);
            }
        }
    }

    /// Samples one worker. Returns the resource usage of its bulkhead, or `None` if the worker no longer exists.
    fn sample_process(&mut self, process: &WorkerProcess) -> Option<&mut ResourceUsage> {
        let (rss_bytes, cpu_ms) = process::peak_usage(process.pid)?;
        let sample = ProcessSample { cpu_ms, jobs_given: process.jobs_given };
        // Processor time before the first sample is ignored, because it was mostly spent on starting the process.
        let before = self.last_samples.insert(process.pid, sample).map_or(cpu_ms, |last| last.cpu_ms);
        let now = self.now();
        let pair = self.by_bulkhead.entry(process.bulkhead.clone()).or_default();
        pair.roll(now);
        let usage = &mut pair.current;
        usage.cpu_ms += cpu_ms.saturating_sub(before);
        usage.rss_max_bytes = usage.rss_max_bytes.max(Some(rss_bytes));
        Some(usage)
    }

    fn usage_of(&mut self, bulkhead: &str) -> ResourceUsage {
        let now = self.now();
        let Some(pair) = self.by_bulkhead.get_mut(bulkhead) else { return ResourceUsage::default() };
        pair.roll(now);
        let [current, previous] = pair.both();
        ResourceUsage {
            cpu_ms: current.cpu_ms + previous.cpu_ms,
            samples: current.samples + previous.samples,
            repeated_samples: current.repeated_samples + previous.repeated_samples,
            rss_max_bytes: current.rss_max_bytes.max(previous.rss_max_bytes),
        }
    }

    /// Drops the recorded resource usage of all bulkheads that are not in `bulkheads`.
    fn keep_only(&mut self, bulkheads: &HashSet<&str>) {
        self.by_bulkhead.retain(|name, _| bulkheads.contains(&**name));
    }
}

/// Samples the workers periodically until the control plane shuts down.
pub(super) async fn watch(control: Shared) {
    let sample = |control: Shared| async move {
        if let Some(processes) = control.commands.request(|reply| Command::WorkerProcesses { reply }).await {
            control.usage_samples().sample(&processes);
        }
    };
    control.every(SAMPLE_INTERVAL, sample).await;
}

pub(super) async fn show(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    let bulkhead = name.clone();
    let observe = |reply| Command::Observe { bulkhead, reply };
    let Some(reply) = control.commands.request(observe).await else { return stuck() };
    let config = control.config();
    let bulkhead = config.bulkheads.iter().find(|bulkhead| bulkhead.name == name);
    let (Some(observation), Some(bulkhead)) = (reply, bulkhead) else { return not_found(&name) };
    let Some(processes) = control.commands.request(|reply| Command::WorkerProcesses { reply }).await else {
        return stuck();
    };
    let own = processes.iter().filter(|process| *process.bulkhead == *name).take(SAMPLED_WORKERS_MAX);
    let mut usage = {
        let mut samples = control.usage_samples();
        for process in own {
            let is_new = !samples.last_samples.contains_key(&process.pid);
            samples.sample_process(process);
            // The entry is removed. Otherwise, the next periodic sample would count as a repeated sample, although only
            // a moment has passed since the first sample.
            if is_new {
                samples.last_samples.remove(&process.pid);
            }
        }
        samples.usage_of(&name)
    };
    // The memory usage of the `exec` host says nothing about the programs that it starts.
    if matches!(bulkhead.program, Program::Exec { .. }) {
        usage.rss_max_bytes = None;
    }
    let settings =
        Settings { adaptive: observation.adaptive.clone(), ..settings(bulkhead, &observation.limits) };
    axum::Json(advise(name, observations(&observation, usage), &settings, &machine())).into_response()
}

/// Combines the configured settings with the limits in effect, which an operator may have changed.
fn settings(bulkhead: &BulkheadConfig, limits: &CurrentLimits) -> Settings {
    let bounds_memory = |resource| matches!(resource, Resource::As | Resource::Data);
    let has_rlimit =
        bulkhead.rlimits.iter().any(|rlimit| bounds_memory(rlimit.resource) && rlimit.limit.is_some());
    let target = bulkhead.adaptive.as_ref().map(|adaptive| adaptive.target);
    Settings {
        processes: limits.processes,
        max_in_flight: limits.max_in_flight,
        max_queue: limits.max_queue,
        queue_timeout: limits.queue_timeout,
        deadline: limits.deadline,
        deadline_max: limits.deadline_max,
        has_deadline_max: bulkhead.has_deadline_max,
        deadline_max_least: bulkhead.run_limit.max(target).unwrap_or_default(),
        adaptive: None,
        adaptive_ceiling: fewest_tenant_permits(bulkhead).unwrap_or(u64::MAX),
        spares: bulkhead.start.spares,
        worker_sets: bulkhead.isolation().map_or(1, |isolation| isolation.max_active),
        cgroup_memory: bulkhead.cgroup.as_ref().and_then(|cgroup| cgroup.memory),
        has_memory_limit: bulkhead.recycle.rss.is_some() || has_rlimit,
    }
}

/// Returns the smallest number of permits of any isolated tenant whose own limits do not grow with those of the
/// bulkhead, or `None` if there is no such tenant.
fn fewest_tenant_permits(bulkhead: &BulkheadConfig) -> Option<u64> {
    bulkhead.isolation()?;
    let own = bulkhead.tenant.values().filter_map(|tenant| match (tenant.processes, tenant.max_in_flight) {
        (None, None) => None,
        (None, Some(in_flight)) if in_flight >= bulkhead.max_in_flight => None,
        (processes, in_flight) => {
            let processes = processes.unwrap_or(bulkhead.processes);
            Some(u64::from(processes) * u64::from(in_flight.unwrap_or(bulkhead.max_in_flight)))
        }
    });
    own.min()
}

fn machine() -> Machine {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    Machine { processors, memory_bytes: process::machine_memory() }
}

impl Control {
    fn usage_samples(&self) -> std::sync::MutexGuard<'_, UsageSamples> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the recorded resource usage of all bulkheads that are not in `bulkheads`.
    pub(super) fn keep_usage(&self, bulkheads: &HashSet<&str>) {
        self.usage_samples().keep_only(bulkheads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_workers_are_not_sampled_again() {
        let mut samples = UsageSamples::default();
        let pid = std::process::id();
        let process = |jobs_given, is_busy| WorkerProcess {
            bulkhead: "b".into(),
            pid,
            generation: 1,
            jobs_given,
            is_busy,
        };
        samples.sample(&[process(0, false)]);
        // Returns true if the process is sampled. A sample overwrites the marker value `u64::MAX`.
        let mut is_sampled = |process| {
            samples.last_samples.get_mut(&pid).unwrap().cpu_ms = u64::MAX;
            samples.sample(&[process]);
            samples.last_samples[&pid].cpu_ms != u64::MAX
        };
        assert!(!is_sampled(process(0, false)));
        assert!(is_sampled(process(0, true)), "the worker has a job");
        assert!(is_sampled(process(1, false)), "the worker has been given a job since");
        assert!(!is_sampled(process(1, false)));
        samples.sample(&[]);
        assert!(samples.last_samples.is_empty(), "the worker is gone");
    }
    #[test]
    fn counts_repeated_samples_of_workers_with_jobs() {
        let pid = std::process::id();
        let process = |jobs_given| WorkerProcess {
            bulkhead: "b".into(),
            pid,
            generation: 1,
            jobs_given,
            is_busy: jobs_given > 0,
        };
        let counts = |samples: &mut UsageSamples| {
            let usage = samples.usage_of("b");
            (usage.samples, usage.repeated_samples)
        };
        let mut samples = UsageSamples::default();
        samples.sample(&[process(0)]);
        assert_eq!(counts(&mut samples), (0, 0), "the worker had no job");
        samples.sample(&[process(3)]);
        samples.sample(&[process(5)]);
        assert_eq!(counts(&mut samples), (2, 2));
        // Workers that exit before the next sample are never sampled twice.
        for _ in 0..3 {
            samples.sample(&[]);
            samples.sample(&[process(1)]);
        }
        assert_eq!(counts(&mut samples), (5, 2));
    }
}

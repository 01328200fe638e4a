//! Whether a worker is silent because it hangs, or because the machine gives it no processor: how long each of
//! its threads was ready to run and did not, from `/proc`. The policy asks; it also decides. The files are read on
//! the background thread.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bulkhead_policy::{Event, Time, WorkerId};

use super::journal::Journal;
use super::slab::{CompartmentIndex, LinkIndex, SlabIndex};
use super::{DataPlane, Incoming};

/// Threads that are looked at; a worker with more is judged by these.
const THREADS_MAX: usize = 256;

/// Workers of which it is looked up at once when they were alive.
const BEATS_AT_ONCE: usize = 128;

/// In the time of a heartbeat it is looked so often which workers are silent.
const LOOKS_PER_BEAT: u128 = 4;

/// A worker's threads since its silence was noticed.
pub(super) struct Watch {
    pid: u32,
    begun: OnceLock<Figures>,
}

struct Figures {
    read_at: Instant,
    /// By thread: nanoseconds that it was ready to run and did not.
    waited_ns: HashMap<u32, u64>,
}

impl DataPlane {
    pub(super) fn watch(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        let Some(index) = self.link_of(compartment, worker) else { return };
        self.look_up_beats(index);
        if !self.compartments[compartment].policy.is_silent(worker) {
            return;
        }
        let Some(running) = self.links[index].running_mut() else { return };
        let watch = Arc::new(Watch::new(running.pid));
        running.watch = self.background.watch(&watch).then_some(watch);
    }

    /// Looks up when workers were alive that write that down: this one and its neighbours, so that they are not looked
    /// up each in a turn of its own.
    fn look_up_beats(&mut self, index: LinkIndex) {
        if !self.links[index].has_beats {
            return;
        }
        let first = index.number() / BEATS_AT_ONCE * BEATS_AT_ONCE;
        for number in first..first + BEATS_AT_ONCE {
            let Some(link) = self.links.get(LinkIndex::from_number(number)) else { continue };
            let (compartment, worker) = (link.compartment, link.worker);
            let journal = link.journal.as_ref().filter(|_| link.has_beats);
            if let Some(since) = journal.and_then(Journal::since_beat) {
                let at = beat_at(self.now, since, self.owner(compartment).heartbeat);
                self.apply(compartment, Event::WasAlive { worker, at }, Incoming::None);
            }
        }
    }

    /// Compares; policy is told in a later turn.
    pub(super) fn look(&mut self, compartment: CompartmentIndex, worker: WorkerId) {
        let index = self.link_of(compartment, worker);
        if let Some(index) = index {
            self.look_up_beats(index);
            if !self.compartments[compartment].policy.is_silent(worker) {
                return;
            }
        }
        let running = index.and_then(|index| self.links[index].running_mut());
        match running.and_then(|running| running.watch.take()) {
            // It is dead, which policy is told as soon as nothing is left of it.
            _ if self.keeper.is_replaced() => self.links.looked.push((compartment, worker, true)),
            Some(watch) => self.background.look(compartment, worker, watch),
            // The machine does not even get to look.
            None => self.links.looked.push((compartment, worker, true)),
        }
    }

    pub(super) fn report_looks(&mut self) {
        for (compartment, worker, is_starved) in std::mem::take(&mut self.links.looked) {
            self.report_look(compartment, worker, is_starved);
        }
    }

    pub(super) fn report_look(&mut self, compartment: CompartmentIndex, worker: WorkerId, is_starved: bool) {
        self.apply(compartment, Event::Looked { worker, is_starved }, Incoming::None);
    }
}

/// When a worker was alive, to a part of its heartbeat: those that were so at nearly the same time are due together for
/// the next look, in place of a wake-up for each.
fn beat_at(now: Time, since: Duration, heartbeat: Duration) -> Time {
    let grid = u64::try_from(heartbeat.as_nanos() / LOOKS_PER_BEAT).unwrap_or(u64::MAX).max(1);
    let at = now - since;
    Time(at.0.checked_next_multiple_of(grid).unwrap_or(at.0)).min(now)
}

impl Watch {
    fn new(pid: u32) -> Self {
        Self { pid, begun: OnceLock::new() }
    }

    /// Takes the figures to compare with.
    pub(super) fn begin(&self) {
        self.begun.get_or_init(|| Figures::of(self.pid));
    }

    /// Whether a thread has waited for a processor for most of the time since then.
    pub(super) fn is_starved(&self) -> bool {
        self.begun.get().is_some_and(|begun| Figures::of(self.pid).is_starved_since(begun))
    }
}

impl Figures {
    fn of(pid: u32) -> Self {
        Self { read_at: Instant::now(), waited_ns: waited(pid) }
    }

    fn is_starved_since(&self, before: &Self) -> bool {
        let half = self.read_at.duration_since(before.read_at) / 2;
        self.waited_ns.iter().any(|(thread, waited_ns)| {
            let before_ns = before.waited_ns.get(thread).copied().unwrap_or(*waited_ns);
            Duration::from_nanos(waited_ns.saturating_sub(before_ns)) >= half
        })
    }
}

/// By thread: nanoseconds that it was ready to run and did not. Without such figures in this kernel, nothing.
fn waited(pid: u32) -> HashMap<u32, u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let figure = |entry: std::fs::DirEntry| {
        let thread = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read_to_string(entry.path().join("schedstat")).ok()?;
        Some((thread, line.split(' ').nth(1)?.parse().ok()?))
    };
    threads.take(THREADS_MAX).filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_that_were_alive_at_nearly_the_same_time_are_due_together() {
        let (second, ms) = (Duration::from_secs(1), Duration::from_millis);
        let now = Time::ZERO + ms(10_000);
        let of = |since| beat_at(now, ms(since), second);
        assert_eq!(
            [of(1), of(700), of(749), of(750)],
            [10_000, 9_500, 9_500, 9_250].map(|at| Time::ZERO + ms(at))
        );
        assert_eq!(beat_at(Time(7), Duration::ZERO, second), Time(7), "never later than now");
        assert_eq!(beat_at(Time(7), Duration::ZERO, Duration::ZERO), Time(7));
    }

    #[test]
    fn a_process_that_sleeps_is_not_starved() {
        let now = Figures::of(std::process::id());
        if now.waited_ns.is_empty() {
            eprintln!("skipped: this kernel does not tell how long threads wait for a processor");
            return;
        }
        // An hour, of which no thread waited half an hour.
        let later = Figures {
            read_at: now.read_at + Duration::from_secs(3600),
            waited_ns: waited(std::process::id()),
        };
        assert!(!later.is_starved_since(&now));
        let never = now.waited_ns.keys().map(|&thread| (thread, 0)).collect();
        let never = Figures { read_at: now.read_at, waited_ns: never };
        assert!(now.is_starved_since(&never), "any wait is half of no time");
        let watch = Watch::new(std::process::id());
        assert!(!watch.is_starved(), "there is nothing to compare with");
    }
}

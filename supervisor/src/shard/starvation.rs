//! Whether a worker is silent because it hangs, or because the machine gives it no processor: how long each of
//! its threads was ready to run and did not, from `/proc`. The policy asks; it also decides.

use std::collections::HashMap;
use std::time::Duration;

use bulkhead_policy::{Event, Time, WorkerId};

use super::{Incoming, Shard};

/// Threads that are looked at; a worker with more is judged by these.
const THREADS_MAX: usize = 256;

/// A worker's threads when its silence was noticed.
pub(super) struct Watch {
    since: Time,
    waited_ns: HashMap<u32, u64>,
}

impl Shard {
    pub(super) fn watch(&mut self, compartment: usize, worker: WorkerId) {
        let now = self.now;
        let Some(index) = self.link_of(compartment, worker) else { return };
        if let Some(link) = self.links[index].as_mut() {
            link.watch = link.pid.map(|pid| Watch { since: now, waited_ns: waited(pid) });
        }
    }

    /// Compares; policy is told at the end of the turn.
    pub(super) fn look(&mut self, compartment: usize, worker: WorkerId) {
        let now = self.now;
        let link = self.link_of(compartment, worker).and_then(|index| self.links[index].as_mut());
        let watched = link.and_then(|link| Some((link.watch.take()?, link.pid?)));
        let is_starved = watched.is_some_and(|(watch, pid)| watch.is_starved(pid, now));
        self.looked.push((compartment, worker, is_starved));
    }

    pub(super) fn report_looks(&mut self) {
        for (compartment, worker, is_starved) in std::mem::take(&mut self.looked) {
            self.apply(compartment, Event::Looked { worker, is_starved }, Incoming::None);
        }
    }
}

impl Watch {
    /// Whether a thread has waited for a processor for most of the time.
    fn is_starved(&self, pid: u32, now: Time) -> bool {
        let half = now.since(self.since) / 2;
        waited(pid).iter().any(|(thread, waited_ns)| {
            let before = self.waited_ns.get(thread).copied().unwrap_or(*waited_ns);
            Duration::from_nanos(waited_ns.saturating_sub(before)) >= half
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
    fn a_process_that_sleeps_is_not_starved() {
        let pid = std::process::id();
        let figures = waited(pid);
        if figures.is_empty() {
            eprintln!("skipped: this kernel does not tell how long threads wait for a processor");
            return;
        }
        let watch = Watch { since: Time::ZERO, waited_ns: figures };
        // An hour, of which nobody waited half an hour.
        assert!(!watch.is_starved(pid, Time::ZERO + Duration::from_secs(3600)));
        let never =
            Watch { since: Time::ZERO, waited_ns: waited(pid).into_keys().map(|id| (id, 0)).collect() };
        assert!(never.is_starved(pid, Time::ZERO), "any wait is half of no time");
    }
}

//! Measures whether a silent worker gets no processor time. `/proc` shows how long each thread was ready without
//! running. The background thread reads these statistics at policy's request. Policy decides whether the worker hangs.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use bulkhead_policy::Time;

/// Maximum number of threads examined per worker.
const THREADS_MAX: usize = 256;

/// Number of checks for silent workers per heartbeat interval.
const CHECKS_PER_HEARTBEAT: u128 = 4;

/// Scheduling statistics of a worker's threads, recorded when the worker fell silent.
pub(super) struct Watch {
    pid: u32,
    begun: OnceLock<SchedStats>,
}

struct SchedStats {
    read_at: Instant,
    threads: HashMap<u32, Thread>,
}

/// Scheduling statistics of one thread.
#[derive(Clone, Copy, Debug, Default)]
struct Thread {
    ran_ns: u64,
    /// Total time in nanoseconds that the thread has spent ready but not running. The kernel adds the time of a wait
    /// only once the wait has ended.
    waited_ns: u64,
    /// True if the thread is running or ready to run.
    is_ready: bool,
}

/// Rounds the time of a worker's last heartbeat up to a multiple of a quarter of the heartbeat interval. Workers with
/// similar times are then checked together, with a single wake-up.
pub(super) fn beat_at(now: Time, since: Duration, heartbeat: Duration) -> Time {
    let grid = u64::try_from(heartbeat.as_nanos() / CHECKS_PER_HEARTBEAT).unwrap_or(u64::MAX).max(1);
    let at = now - since;
    Time(at.0.checked_next_multiple_of(grid).unwrap_or(at.0)).min(now)
}

impl Watch {
    pub(super) fn new(pid: u32) -> Self {
        Self { pid, begun: OnceLock::new() }
    }

    /// Records the scheduling statistics of the worker's threads, so that later statistics can be compared with them.
    pub(super) fn begin(&self) {
        self.begun.get_or_init(|| SchedStats::of(self.pid));
    }

    /// Returns true if a thread has spent at least half of the time since [`Watch::begin`] waiting for a
    /// processor.
    pub(super) fn is_starved(&self) -> bool {
        self.begun.get().is_some_and(|begun| SchedStats::of(self.pid).is_starved_since(begun))
    }
}

impl SchedStats {
    fn of(pid: u32) -> Self {
        Self { read_at: Instant::now(), threads: threads(pid) }
    }

    fn is_starved_since(&self, before: &Self) -> bool {
        let passed = self.read_at.duration_since(before.read_at);
        self.threads.iter().any(|(thread, now)| {
            let before = before.threads.get(thread).unwrap_or(now);
            now.waited_since(before, passed) >= passed / 2
        })
    }
}

impl Thread {
    /// Returns the time that the thread spent ready but not running between two readings, `before` and `self`, of its
    /// statistics. `passed` is the time between the readings.
    fn waited_since(&self, before: &Self, passed: Duration) -> Duration {
        let since = |now: u64, before: u64| Duration::from_nanos(now.saturating_sub(before));
        let waited = since(self.waited_ns, before.waited_ns);
        if self.is_ready && before.is_ready {
            // The kernel's statistics do not include a wait that is still in progress.
            return passed.saturating_sub(since(self.ran_ns, before.ran_ns)).max(waited);
        }
        waited
    }
}

/// Returns the statistics of all threads of a process, by thread ID. The map is empty if the kernel does not
/// provide statistics.
fn threads(pid: u32) -> HashMap<u32, Thread> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let stats = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let read = |name| std::fs::read_to_string(entry.path().join(name)).ok();
        Some((number, Thread::read(&read("schedstat")?, &read("stat")?)?))
    };
    threads.take(THREADS_MAX).filter_map(stats).collect()
}

impl Thread {
    /// Parses the contents of a thread's `schedstat` and `stat` files.
    fn read(schedstat: &str, stat: &str) -> Option<Self> {
        let mut stats = schedstat.split(' ').map(str::parse);
        // The name before the state can contain any character, even a parenthesis.
        let (_, state) = stat.rsplit_once(") ")?;
        Some(Self {
            ran_ns: stats.next()?.ok()?,
            waited_ns: stats.next()?.ok()?,
            is_ready: state.starts_with('R'),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_workers_with_similar_heartbeat_times_together() {
        let (second, ms) = (Duration::from_secs(1), Duration::from_millis);
        let now = Time::ZERO + ms(10_000);
        let of = |since| beat_at(now, ms(since), second);
        assert_eq!(
            [of(1), of(700), of(749), of(750)],
            [10_000, 9_500, 9_500, 9_250].map(|at| Time::ZERO + ms(at))
        );
        assert_eq!(
            beat_at(Time(7), Duration::ZERO, second),
            Time(7),
            "the result must not be later than now"
        );
        assert_eq!(beat_at(Time(7), Duration::ZERO, Duration::ZERO), Time(7));
    }

    #[test]
    fn sleeping_process_is_not_starved() {
        let own = std::process::id();
        let (mut now, mut later) = (SchedStats::of(own), SchedStats::of(own));
        if now.threads.is_empty() {
            eprintln!("NOT RUN: this kernel does not report how long threads wait for a processor");
            return;
        }
        // The two records are made to appear one hour apart. No thread is marked as ready, because a thread that is
        // ready in both records would count as starved.
        for thread in now.threads.values_mut().chain(later.threads.values_mut()) {
            thread.is_ready = false;
        }
        later.read_at = now.read_at + Duration::from_secs(3600);
        assert!(!later.is_starved_since(&now));
        let watch = Watch::new(own);
        assert!(!watch.is_starved(), "there are no earlier statistics to compare with");
    }

    /// Within ten seconds, the thread runs for `ran_s` seconds and waits for `waited_s` seconds.
    #[test]
    fn thread_that_is_ready_but_rarely_runs_is_starved() {
        let after = |ran_s: u64, waited_s: u64, ready: [bool; 2]| {
            let thread = |seconds: [u64; 2], is_ready| {
                let [ran_ns, waited_ns] = seconds.map(|seconds| (7 + seconds) * 1_000_000_000);
                HashMap::from([(1, Thread { ran_ns, waited_ns, is_ready })])
            };
            let read_at = Instant::now();
            let before = SchedStats { read_at, threads: thread([0, 0], ready[0]) };
            let now = SchedStats {
                read_at: read_at + Duration::from_secs(10),
                threads: thread([ran_s, waited_s], ready[1]),
            };
            now.is_starved_since(&before)
        };
        assert!(after(1, 5, [false, false]), "the thread waited and is sleeping again");
        assert!(after(0, 0, [true, true]), "the thread has been waiting the whole time");
        assert!(after(3, 1, [true, true]));
        assert!(!after(0, 4, [false, false]), "the thread slept for more than half of the time");
        assert!(!after(10, 0, [true, true]), "the thread has been running the whole time");
        assert!(!after(6, 0, [true, true]));
        assert!(!after(0, 0, [false, true]) && !after(0, 0, [true, false]), "the thread might have slept");
    }

    #[test]
    fn parses_scheduling_statistics_for_any_thread_name() {
        let read = |stat| Thread::read("12 34 5\n", stat);
        let thread = read("7 (a) S b) R 1 2 3\n").unwrap();
        assert_eq!((thread.ran_ns, thread.waited_ns, thread.is_ready), (12, 34, true));
        assert!(!read("7 (R) S 1 2 3\n").unwrap().is_ready);
        assert!(read("").is_none() && Thread::read("12\n", "7 (a) R 1").is_none());
        let own = SchedStats::of(std::process::id());
        assert!(
            own.threads.is_empty() || own.threads.values().any(|thread| thread.is_ready),
            "the current thread must be running"
        );
    }
}

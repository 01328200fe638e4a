//! An adaptive limit on the number of running jobs, based on measured run times. When run times exceed `target`, the
//! limit is lowered in proportion to the excess. This is the gradient of Netflix's `Gradient2Limit` and Envoy's
//! adaptive concurrency, but with a configured target instead of an estimated baseline. While all permits are in use,
//! the limit grows by its square root, which is also the headroom in both algorithms. After an increase that made jobs
//! too slow, the algorithm waits twice as long before the next increase, so that the limit settles.
//!
//! Each tenant has one vote, regardless of its number of jobs. The latency in a window is the lower median of the
//! tenants' 90th percentiles, so the slow jobs of a single tenant do not lower the limit for the others.
//!
//! This module does not read any clock, and only computes the limit. The limit changes when a job ends or the
//! configuration changes. `bulkhead::adapt` passes in run times and applies the limit.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::time::Time;

/// Bounds, target and mode of an adaptive limit.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each field corresponds to the configuration key of the same name")]
pub struct AdaptiveLimits {
    pub min: u32,
    pub max: u32,
    pub target: Duration,
    pub mode: AdaptiveMode,
}

vocabulary! {
    /// Whether an adaptive limit is enforced or only computed.
    AdaptiveMode {
        /// The number of running jobs is limited.
        Enforce = "enforce",
        /// The limit is computed and reported, but not enforced.
        Monitor = "monitor",
    }
}

/// Minimum length of a measurement window, even if twice `target` is shorter.
const WINDOW_MIN: Duration = Duration::from_millis(100);
/// Maximum window length derived from `target`. A window can still last longer, because it must contain [`RUNS_MIN`]
/// run times.
const WINDOW_MAX: Duration = Duration::from_secs(10);

/// Minimum number of run times that a window must contain before the limit can change.
const RUNS_MIN: usize = 10;

/// Maximum number of run times stored for one tenant, or for a group of tenants that is treated as one tenant. New run
/// times replace the oldest run times.
const RUNS_MAX: usize = 128;

/// Maximum number of tenants in a window whose latencies are computed separately. All further tenants are treated as
/// one tenant.
const TENANTS_MAX: usize = 64;

/// Maximum number of measurement windows that must pass before the limit can grow again.
const PAUSE_MAX: u32 = 32;

/// Minimum time between two reports about changes to the limit.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// State of an adaptive limit, used in snapshots.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptiveView {
    /// Configuration of the adaptive limit.
    pub limits: AdaptiveLimits,
    /// Current limit. In monitor mode, this is the limit that would apply.
    pub limit: u32,
    /// Latency of the last complete window: the lower median of the tenants' 90th-percentile run times.
    pub latency: Option<Duration>,
}

/// A change to the adaptive limit that must be reported to operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitReport {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) latency: Duration,
}

/// Most recent run times, in nanoseconds, of one tenant or of a group of tenants that is treated as one tenant.
#[derive(Debug, Default)]
struct Runs {
    times: Vec<u64>,
    /// Index at which the next run time is stored. Once `times` is full, the run time at this index is overwritten.
    oldest: usize,
}

impl Runs {
    fn add(&mut self, time: u64) {
        match self.times.get_mut(self.oldest) {
            Some(oldest) => *oldest = time,
            None => self.times.push(time),
        }
        self.oldest = (self.oldest + 1) % RUNS_MAX;
    }

    fn percentile_90(&mut self) -> u64 {
        let rank = (self.times.len() * 9).div_ceil(10).saturating_sub(1);
        *self.times.select_nth_unstable(rank).1
    }
}

#[derive(Debug)]
pub(crate) struct Adaptive {
    limits: AdaptiveLimits,
    limit: u32,
    window_from: Time,
    /// Run times in the current window, grouped by vote. The key is the number of the tenant, or `None` for the vote
    /// that is shared by all tenants without a separate vote.
    runs: BTreeMap<Option<u32>, Runs>,
    /// Maximum number of permits in use in the current window, sampled each time a job ends.
    in_use_max: u32,
    /// True if a job in the current window ended while every permit was either in use or reserved for critical jobs.
    was_full: bool,
    /// True if a job has been counted since the last call to [`Self::is_due`].
    has_new_runs: bool,
    /// Jobs dispatched before this time are ignored, because they started under a higher limit.
    counts_from: Time,
    /// True if no complete window has been measured since the limit was last raised.
    has_grown: bool,
    /// Number of measurement windows that must pass before the limit can grow again.
    pause: u32,
    /// Number of windows for which the limit must not grow after it is next lowered.
    next_pause: u32,
    latency: Option<Duration>,
    reported: u32,
    reported_at: Option<Time>,
}

impl Adaptive {
    /// Creates a limit that starts at the configured maximum.
    pub(crate) fn new(limits: AdaptiveLimits, now: Time) -> Self {
        let limit = limits.max;
        Self {
            limits,
            limit,
            window_from: now,
            runs: BTreeMap::new(),
            in_use_max: 0,
            was_full: false,
            has_new_runs: false,
            counts_from: Time::ZERO,
            has_grown: false,
            pause: 0,
            next_pause: 1,
            latency: None,
            reported: limit,
            reported_at: None,
        }
    }

    /// Replaces the configuration. Keeps the current limit, clamped to the new bounds.
    pub(crate) fn reconfigure(&mut self, limits: AdaptiveLimits, now: Time) {
        if self.limits == limits {
            return;
        }
        self.limit = self.limit.clamp(limits.min, limits.max);
        self.reported = self.limit;
        self.limits = limits;
        self.begin_window(now);
    }

    /// Returns the maximum number of running jobs, or `None` in monitor mode.
    pub(crate) fn bound(&self) -> Option<u32> {
        (self.limits.mode == AdaptiveMode::Enforce).then_some(self.limit)
    }

    /// Counts a job that has ended or been abandoned by its client. `in_use` is the number of permits in use just
    /// before the job ended, and `reserved` is the number of permits reserved for critical jobs at that time. An
    /// unsuccessful job counts only if it ran longer than `target`.
    pub(crate) fn count_ended(
        &mut self,
        now: Time,
        since: Time,
        tenant: u32,
        is_ok: bool,
        (in_use, reserved): (u32, u32),
    ) {
        let ran = now.since(since);
        if since < self.counts_from || !is_ok && ran <= self.limits.target {
            return;
        }
        self.in_use_max = self.in_use_max.max(in_use);
        self.was_full |= in_use.saturating_add(reserved) >= self.limit;
        self.has_new_runs = true;
        if ran <= self.limits.target || self.is_late_since_this_window(since) {
            self.record_run(tenant, ran);
        }
    }

    /// Returns true if the current window is complete. The caller must then call [`count_running`](Self::count_running)
    /// for each running job, followed by [`close_window`](Self::close_window).
    pub(crate) fn is_due(&mut self, now: Time) -> bool {
        let length = (self.limits.target * 2).clamp(WINDOW_MIN, WINDOW_MAX);
        std::mem::take(&mut self.has_new_runs)
            && now.since(self.window_from) >= length
            && self.runs.values().map(|runs| runs.times.len()).sum::<usize>() >= RUNS_MIN
    }

    /// Records the current run time of a job that is still running but has already exceeded `target`. If only jobs that
    /// have ended were counted, a window would contain only the fast ones. Each job counts only in the window in which
    /// it exceeds `target`.
    pub(crate) fn count_running(&mut self, now: Time, since: Time, tenant: u32) {
        let ran = now.since(since);
        if since >= self.counts_from && ran > self.limits.target && self.is_late_since_this_window(since) {
            self.record_run(tenant, ran);
        }
    }

    fn is_late_since_this_window(&self, since: Time) -> bool {
        since + self.limits.target >= self.window_from
    }

    fn record_run(&mut self, tenant: u32, ran: Duration) {
        let ran = u64::try_from(ran.as_nanos()).unwrap_or(u64::MAX);
        let has_room = self.runs.len() < TENANTS_MAX || self.runs.contains_key(&Some(tenant));
        self.runs.entry(has_room.then_some(tenant)).or_default().add(ran);
    }

    /// Ends the current window, adjusts the limit based on the window's run times, and starts the next window. Returns
    /// the direction of the change.
    pub(crate) fn close_window(&mut self, now: Time) -> Ordering {
        let mut votes: Vec<u64> = self.runs.values_mut().map(Runs::percentile_90).collect();
        let lower_median = votes.len().saturating_sub(1) / 2;
        let &mut latency = votes.select_nth_unstable(lower_median).1;
        let target = u64::try_from(self.limits.target.as_nanos()).unwrap_or(u64::MAX);
        let before = self.limit;
        if latency > target {
            self.decrease(now, latency, target);
        } else {
            self.increase(latency, target);
        }
        self.latency = Some(Duration::from_nanos(latency));
        self.begin_window(now);
        self.limit.cmp(&before)
    }

    /// Returns the time at which the latest change to the limit must be reported, or `None` if there is no unreported
    /// change.
    pub(crate) fn report_due_at(&self) -> Option<Time> {
        let at = self.reported_at.map_or(Time::ZERO, |at| at + REPORT_INTERVAL);
        (self.limit != self.reported && self.latency.is_some()).then_some(at)
    }

    /// If a report is due, returns the change to the limit and marks the change as reported.
    pub(crate) fn take_report(&mut self, now: Time) -> Option<LimitReport> {
        let latency = self.latency.filter(|_| self.report_due_at().is_some_and(|at| at <= now))?;
        self.reported_at = Some(now);
        let from = std::mem::replace(&mut self.reported, self.limit);
        Some(LimitReport { from, to: self.limit, latency })
    }

    /// Lowers the limit by the same factor by which the latency exceeds `target`, but at most by half.
    fn decrease(&mut self, now: Time, latency: u64, target: u64) {
        let from = match self.limits.mode {
            AdaptiveMode::Enforce => self.limit,
            // In monitor mode, the limit is not enforced, so the latency reflects the number of jobs that actually
            // ran.
            AdaptiveMode::Monitor => self.in_use_max,
        };
        let to = scaled(from, target, latency).max(self.limit / 2).min(self.limit);
        self.limit = to.clamp(self.limits.min, self.limits.max);
        if std::mem::take(&mut self.has_grown) {
            self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
        }
        (self.pause, self.counts_from) = (self.next_pause, now);
    }

    /// Raises the limit by its square root if all permits were in use. Assumes that run times grow in proportion to the
    /// limit, and does not raise the limit past the point at which the run times would reach `target`. An increase by
    /// one is always allowed, because only a trial shows whether one more job is too many.
    fn increase(&mut self, latency: u64, target: u64) {
        if std::mem::take(&mut self.has_grown) {
            self.next_pause = (self.next_pause / 2).max(1);
        }
        if self.pause > 0 {
            self.pause -= 1;
        } else if self.was_full && self.limit < self.limits.max {
            let most = scaled(self.limit, target, latency.max(1)).max(self.limit + 1);
            self.limit = (self.limit + self.limit.isqrt()).min(most).min(self.limits.max);
            self.has_grown = true;
        }
    }

    fn begin_window(&mut self, now: Time) {
        self.runs.clear();
        (self.window_from, self.in_use_max, self.was_full) = (now, 0, false);
    }

    pub(crate) fn view(&self) -> AdaptiveView {
        AdaptiveView { limits: self.limits.clone(), limit: self.limit, latency: self.latency }
    }
}

/// Returns `count` × `numerator` / `denominator`, rounded down.
fn scaled(count: u32, numerator: u64, denominator: u64) -> u32 {
    let scaled = u128::from(count) * u128::from(numerator) / u128::from(denominator);
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_beyond_the_maximum_share_one_vote() {
        let ms = Duration::from_millis;
        let limits = AdaptiveLimits { min: 1, max: 8, target: ms(50), mode: AdaptiveMode::Enforce };
        let mut adaptive = Adaptive::new(limits, Time::ZERO);
        let now = Time::ZERO + ms(500);
        for tenant in 0..1000 {
            let ran = if tenant < 40 { ms(5) } else { ms(400) };
            let since = Time::ZERO + (ms(500) - ran);
            for _ in 0..2 * RUNS_MAX {
                adaptive.count_ended(now, since, tenant, true, (8, 0));
            }
        }
        assert_eq!(adaptive.runs.len(), TENANTS_MAX + 1);
        assert!(adaptive.runs.values().all(|runs| runs.times.len() == RUNS_MAX));
        assert!(adaptive.is_due(now));
        // 40 tenants are fast and 24 are slow. The other 936 tenants share one slow vote.
        assert_eq!((adaptive.close_window(now), adaptive.latency), (Ordering::Equal, Some(ms(5))));
    }
}

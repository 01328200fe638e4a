//! An adaptive limit on the number of running jobs, driven by run times. The limit falls in proportion when most jobs
//! take longer than `target`. This is the gradient of Netflix's `Gradient2Limit` and Envoy's adaptive concurrency, with
//! a configured target instead of a guessed base line. The limit grows by its square root, the headroom of both, while
//! all of it is in use. After growth that was too much, the next growth waits twice as long, so that the limit settles.
//!
//! Each tenant has one vote, whatever its number of jobs: the latency of a window is the lower median of the tenants'
//! 90th percentiles. So the slow jobs of one tenant do not lower the limit for the others.
//!
//! It reads no clock, and moves only when a job has ended.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::time::Time;

/// What the limit may be, and what it follows.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each is the configuration's key of the same name")]
pub struct AdaptiveLimits {
    pub min: u32,
    pub max: u32,
    pub target: Duration,
    pub mode: AdaptiveMode,
}

vocabulary! {
    /// What an adaptive limit does.
    AdaptiveMode {
        /// It bounds how many jobs run.
        Enforce = "enforce",
        /// It only says what it would be.
        Monitor = "monitor",
    }
}

/// A window is no shorter than this, and no shorter than twice `target`;
const WINDOW_MIN: Duration = Duration::from_millis(100);
/// but not longer than this, if enough jobs have ended in it.
const WINDOW_MAX: Duration = Duration::from_secs(10);

/// So many run times are looked at before a limit moves.
const RUNS_MIN: usize = 10;

/// Maximum number of run times kept for each vote of a window, the newest ones.
const RUNS_MAX: usize = 128;

/// Maximum number of tenants with a separate vote in a window. Further tenants share one more vote.
const TENANTS_MAX: usize = 64;

/// The longest that growth waits, in windows.
const PAUSE_MAX: u32 = 32;

/// One change in so long is told to operators.
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// An adaptive limit from outside.
#[derive(Clone, Debug, PartialEq)]
pub struct AdaptiveView {
    /// The configured numbers.
    pub numbers: AdaptiveLimits,
    /// The limit, or what it would be.
    pub limit: u32,
    /// The latency of the last full window: the lower median of the tenants' 90th percentiles.
    pub latency: Option<Duration>,
}

/// A change that operators are to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) latency: Duration,
}

/// The newest run times of one vote, in nanoseconds.
#[derive(Debug, Default)]
struct Runs {
    times: Vec<u64>,
    /// Index of the oldest one, once there are [`RUNS_MAX`].
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
    numbers: AdaptiveLimits,
    limit: u32,
    window_from: Time,
    /// Run times of this window by vote, which is the number of a tenant; `None` is the vote that tenants beyond [`TENANTS_MAX`] share.
    runs: BTreeMap<Option<u32>, Runs>,
    /// The most permits that were taken when a job ended.
    in_use_max: u32,
    /// Whether all of the limit was taken then, or kept for critical jobs.
    was_full: bool,
    /// Whether a run was seen since it was last asked whether the window has ended.
    has_news: bool,
    /// Jobs that began before the limit fell say nothing of what it is now.
    counts_from: Time,
    /// Whether the last change was growth that has not proved itself yet.
    has_grown: bool,
    /// Windows until it may grow.
    pause: u32,
    /// How many it waits for after the next fall.
    next_pause: u32,
    latency: Option<Duration>,
    told: u32,
    told_at: Option<Time>,
}

impl Adaptive {
    /// It begins with all that it may be: as long as jobs are quick enough, a bulkhead is as if it had none.
    pub(crate) fn new(numbers: AdaptiveLimits, now: Time) -> Self {
        let limit = numbers.max;
        Self {
            numbers,
            limit,
            window_from: now,
            runs: BTreeMap::new(),
            in_use_max: 0,
            was_full: false,
            has_news: false,
            counts_from: Time::ZERO,
            has_grown: false,
            pause: 0,
            next_pause: 1,
            latency: None,
            told: limit,
            told_at: None,
        }
    }

    /// Puts other numbers in force. What was learned holds within them.
    pub(crate) fn reconfigure(&mut self, numbers: AdaptiveLimits, now: Time) {
        if self.numbers == numbers {
            return;
        }
        self.limit = self.limit.clamp(numbers.min, numbers.max);
        self.told = self.limit;
        self.numbers = numbers;
        self.begin_window(now);
    }

    /// How many jobs may run, if it is in force.
    pub(crate) fn bound(&self) -> Option<u32> {
        (self.numbers.mode == AdaptiveMode::Enforce).then_some(self.limit)
    }

    /// Counts a job that has ended, or that its client no longer waits for. `in_use` permits were taken then, and `kept`
    /// more were reserved for critical jobs. A job that did not succeed counts only if it took too long.
    pub(crate) fn ended(
        &mut self,
        now: Time,
        since: Time,
        tenant: u32,
        is_ok: bool,
        (in_use, kept): (u32, u32),
    ) {
        let ran = now.since(since);
        if since < self.counts_from || !is_ok && ran <= self.numbers.target {
            return;
        }
        self.in_use_max = self.in_use_max.max(in_use);
        self.was_full |= in_use.saturating_add(kept) >= self.limit;
        self.has_news = true;
        if ran <= self.numbers.target || self.is_late_since_this_window(since) {
            self.see(tenant, ran);
        }
    }

    /// Whether a window has ended with a job. Then [those that still run](Self::running) are to be told of, and it is
    /// [closed](Self::close).
    pub(crate) fn is_due(&mut self, now: Time) -> bool {
        let length = (self.numbers.target * 2).clamp(WINDOW_MIN, WINDOW_MAX);
        std::mem::take(&mut self.has_news)
            && now.since(self.window_from) >= length
            // With fewer runs than this there would be few votes.
            && self.runs.values().map(|runs| runs.times.len()).sum::<usize>() >= RUNS_MIN
    }

    /// Counts a running job that is late already; otherwise only quick jobs would count. A job counts only in the
    /// window in which it became late.
    pub(crate) fn running(&mut self, now: Time, since: Time, tenant: u32) {
        let ran = now.since(since);
        if since >= self.counts_from && ran > self.numbers.target && self.is_late_since_this_window(since) {
            self.see(tenant, ran);
        }
    }

    fn is_late_since_this_window(&self, since: Time) -> bool {
        since + self.numbers.target >= self.window_from
    }

    fn see(&mut self, tenant: u32, ran: Duration) {
        let ran = u64::try_from(ran.as_nanos()).unwrap_or(u64::MAX);
        let has_room = self.runs.len() < TENANTS_MAX || self.runs.contains_key(&Some(tenant));
        self.runs.entry(has_room.then_some(tenant)).or_default().add(ran);
    }

    /// Moves the limit by what was seen in the window, and begins the next one. Says whether it grew or fell.
    pub(crate) fn close(&mut self, now: Time) -> Ordering {
        let mut votes: Vec<u64> = self.runs.values_mut().map(Runs::percentile_90).collect();
        let lower_median = votes.len().saturating_sub(1) / 2;
        let &mut latency = votes.select_nth_unstable(lower_median).1;
        let target = u64::try_from(self.numbers.target.as_nanos()).unwrap_or(u64::MAX);
        let before = self.limit;
        if latency > target {
            self.fall(now, latency, target);
        } else {
            self.grow(latency, target);
        }
        self.latency = Some(Duration::from_nanos(latency));
        self.begin_window(now);
        self.limit.cmp(&before)
    }

    /// When the change since the last one that was told is to be told; `None` if there is none.
    pub(crate) fn tells_at(&self) -> Option<Time> {
        let at = self.told_at.map_or(Time::ZERO, |at| at + TELL_AGAIN_AFTER);
        (self.limit != self.told && self.latency.is_some()).then_some(at)
    }

    /// The change that is to be told now, if there is one.
    pub(crate) fn take_told(&mut self, now: Time) -> Option<Told> {
        let latency = self.latency.filter(|_| self.tells_at().is_some_and(|at| at <= now))?;
        self.told_at = Some(now);
        let from = std::mem::replace(&mut self.told, self.limit);
        Some(Told { from, to: self.limit, latency })
    }

    /// By as much as jobs took too long, and at most to the half.
    fn fall(&mut self, now: Time, latency: u64, target: u64) {
        let from = match self.numbers.mode {
            AdaptiveMode::Enforce => self.limit,
            // Nothing held them back, so that what ran is what took too long.
            AdaptiveMode::Monitor => self.in_use_max,
        };
        let to = scaled(from, target, latency).max(self.limit / 2).min(self.limit);
        self.limit = to.clamp(self.numbers.min, self.numbers.max);
        if std::mem::take(&mut self.has_grown) {
            self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
        }
        (self.pause, self.counts_from) = (self.next_pause, now);
    }

    /// By its square root, if all of it was in use; but not to where jobs would take too long if their time grew with
    /// their number, except by one: how else would one know?
    fn grow(&mut self, latency: u64, target: u64) {
        if std::mem::take(&mut self.has_grown) {
            self.next_pause = (self.next_pause / 2).max(1);
        }
        if self.pause > 0 {
            self.pause -= 1;
        } else if self.was_full && self.limit < self.numbers.max {
            let most = scaled(self.limit, target, latency.max(1)).max(self.limit + 1);
            self.limit = (self.limit + self.limit.isqrt()).min(most).min(self.numbers.max);
            self.has_grown = true;
        }
    }

    fn begin_window(&mut self, now: Time) {
        self.runs.clear();
        (self.window_from, self.in_use_max, self.was_full) = (now, 0, false);
    }

    pub(crate) fn view(&self) -> AdaptiveView {
        AdaptiveView { numbers: self.numbers.clone(), limit: self.limit, latency: self.latency }
    }
}

/// `count` × `numerator` / `denominator`, rounded down.
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
        let numbers = AdaptiveLimits { min: 1, max: 8, target: ms(50), mode: AdaptiveMode::Enforce };
        let mut adaptive = Adaptive::new(numbers, Time::ZERO);
        let now = Time::ZERO + ms(500);
        for tenant in 0..1000 {
            let ran = if tenant < 40 { ms(5) } else { ms(400) };
            let since = Time::ZERO + (ms(500) - ran);
            for _ in 0..2 * RUNS_MAX {
                adaptive.ended(now, since, tenant, true, (8, 0));
            }
        }
        assert_eq!(adaptive.runs.len(), TENANTS_MAX + 1);
        assert!(adaptive.runs.values().all(|runs| runs.times.len() == RUNS_MAX));
        assert!(adaptive.is_due(now));
        // 40 tenants are quick, 24 slow, and the other 936 are one more.
        assert_eq!((adaptive.close(now), adaptive.latency), (Ordering::Equal, Some(ms(5))));
    }
}

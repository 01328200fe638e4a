//! Decides whether the dependency behind a bulkhead can be called (closed → open → half-open → closed). `bulkhead` asks
//! for each job, rejects the job if necessary, and reports the result of each call. The states follow resilience4j, and
//! the window of buckets follows Hystrix. The breaker counts calls and probes, and stores no jobs.

use std::ops::Add;
use std::time::Duration;

use bulkhead_shared::vocabulary;

use crate::time::Time;

/// Number of buckets in a sliding window. The window advances by whole buckets, so it covers between 90 % and 100 % of
/// its configured length.
const BUCKETS: usize = 10;

/// Maximum factor by which repeated openings of the breaker extend `open_for`.
const OPEN_FOR_FACTOR_MAX: u32 = 8;

/// Configuration of a circuit breaker.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerLimits {
    /// Length of the window over which calls are counted.
    pub window: Duration,
    /// Minimum number of calls that the window must contain for the breaker to open.
    pub min_calls: u32,
    /// Ratio of failed calls at which the breaker opens.
    pub failure_rate: f64,
    /// Run time above which a call counts as slow.
    pub slow_call: Option<Duration>,
    /// Ratio of slow calls at which the breaker opens.
    pub slow_rate: f64,
    /// Time that the breaker stays open before it admits probes. Doubles each time the breaker opens again.
    pub open_for: Duration,
    /// Number of probes whose results decide whether the breaker closes.
    pub probes: u32,
}

impl BreakerLimits {
    /// Returns the number of probes. It is at least one, because a half-open breaker without probes would never close.
    fn probes(&self) -> u32 {
        self.probes.max(1)
    }

    fn open_for(&self, earlier_openings: u32) -> Duration {
        let factor = 1_u32.checked_shl(earlier_openings).unwrap_or(u32::MAX);
        self.open_for.saturating_mul(factor.min(OPEN_FOR_FACTOR_MAX))
    }

    /// Returns true if the failed or slow calls in `seen` reach the configured ratio of all `calls`. As in
    /// resilience4j, equality is enough, because a ratio of 1 cannot be exceeded. Even with a ratio of 0, at least one
    /// failed or slow call is required.
    fn are_reached_by(&self, seen: Tally, calls: u32) -> bool {
        let reaches = |count: u32, rate: f64| count > 0 && share(count, calls) >= rate;
        reaches(seen.failures, self.failure_rate) || reaches(seen.slow, self.slow_rate)
    }
}

vocabulary! {
    /// State of a circuit breaker.
    #[derive(Default)]
    BreakerState {
        /// All calls are admitted, and their results are counted.
        #[default]
        Closed = "closed",
        /// No calls are admitted until the open time has expired.
        Open = "open",
        /// Only a limited number of calls are admitted, as probes.
        HalfOpen = "half_open",
        /// No calls are admitted until an operator releases the breaker.
        ForcedOpen = "forced_open",
    }
}

/// The breaker's decision about a newly submitted job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// The job can be dispatched.
    Closed,
    /// The job can be dispatched as a probe.
    Probe,
    /// The job is rejected because the maximum number of probes is already running. It is not known when the breaker
    /// can admit another job.
    Probing,
    /// This job and all further jobs are rejected for `retry_after`. The duration is zero if the open time has expired
    /// but no worker is ready for a probe.
    Open { retry_after: Duration },
    /// The job is rejected until an operator releases the breaker.
    ForcedOpen,
}

impl Admission {
    pub(crate) const fn is_admitted(self) -> bool {
        matches!(self, Self::Closed | Self::Probe)
    }
}

/// Permission to make one call. Must be passed to [`Breaker::record`] or [`Breaker::return_claim`]. Does not implement
/// `Clone`, so that no call is counted twice.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "dropping a probe claim leaves the breaker half-open forever"]
pub(crate) enum Claim {
    /// A call made while the breaker is closed.
    Call { epoch: u64 },
    /// A probe made while the breaker is half-open.
    Probe { epoch: u64 },
}

impl Claim {
    const fn epoch(&self) -> u64 {
        match *self {
            Self::Call { epoch } | Self::Probe { epoch } => epoch,
        }
    }
}

/// Result of a call, as counted by the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallResult {
    /// The dependency worked, possibly slowly.
    Success,
    /// The call counts as a failure of the dependency. Either the handler blamed the dependency, the worker crashed, or
    /// the deadline passed while the job was running.
    Failure,
    /// The call says nothing about the dependency, for example because it was cancelled, never ran, or failed because
    /// of the caller.
    Ignored,
}

/// A change in the breaker's state, with statistics about the calls counted in the previous state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transition {
    /// Previous state.
    pub from: BreakerState,
    /// New state.
    pub to: BreakerState,
    /// Ratio of failed calls to all calls counted in the previous state.
    pub failure_rate: f64,
    /// Ratio of slow calls to all calls counted in the previous state.
    pub slow_rate: f64,
    /// Number of calls counted in the previous state.
    pub calls: u32,
}

/// Circuit breaker for one bulkhead.
#[derive(Debug)]
pub(crate) struct Breaker {
    /// Configuration of the breaker. If this is `None`, only an operator can open the breaker.
    limits: Option<BreakerLimits>,
    state: State,
    /// Number of state changes so far. The breaker ignores the results of calls that it admitted before the latest
    /// change.
    epoch: u64,
    /// Number of times that the breaker has opened in a row. Starts again from zero once the breaker has been closed
    /// for a full window.
    openings: u32,
}

#[derive(Debug)]
enum State {
    Closed { since: Time, window: Box<Window<Tally>> },
    Open { until: Time },
    HalfOpen { outstanding: u32, seen: Tally },
    ForcedOpen,
}

impl Breaker {
    /// Returns a closed breaker that has not counted any calls.
    pub(crate) fn new(limits: Option<BreakerLimits>) -> Self {
        let state = State::closed(Time::ZERO, limits.as_ref());
        Self { limits, state, epoch: 0, openings: 0 }
    }

    pub(crate) const fn state(&self) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::HalfOpen { .. } => BreakerState::HalfOpen,
            State::ForcedOpen => BreakerState::ForcedOpen,
        }
    }

    /// Returns the time at which [`Self::advance`] is due. Returns `None` if no worker is ready. In that case, the
    /// breaker stays open until a worker is ready, and a deadline in the past would cause a busy loop.
    pub(crate) fn next_deadline(&self, has_ready_worker: bool) -> Option<Time> {
        match self.state {
            State::Open { until } if has_ready_worker => Some(until),
            _ => None,
        }
    }

    // Admission.

    /// Returns the decision about a newly arrived job. Does not change the state, so that a job that is later rejected
    /// for another reason does not use up a probe (like Semian's `request_allowed?`).
    pub(crate) fn peek(&self, now: Time, has_ready_worker: bool) -> Admission {
        match self.state {
            State::Closed { .. } => Admission::Closed,
            State::ForcedOpen => Admission::ForcedOpen,
            State::Open { until } if until > now => Admission::Open { retry_after: until.since(now) },
            _ if !has_ready_worker => Admission::Open { retry_after: Duration::ZERO },
            State::Open { .. } => Admission::Probe,
            State::HalfOpen { outstanding, seen } if self.has_room(outstanding, seen) => Admission::Probe,
            State::HalfOpen { .. } => Admission::Probing,
        }
    }

    /// Changes an open breaker to half-open if its open time has expired. Must be called at [`Self::next_deadline`] and
    /// when a worker becomes ready.
    pub(crate) fn advance(&mut self, now: Time, has_ready_worker: bool) -> Option<Transition> {
        match self.state {
            State::Open { until } if until <= now && has_ready_worker => {
                Some(self.enter(State::half_open(), Tally::default()))
            }
            _ => None,
        }
    }

    /// Claims a call for the next job if the breaker admits the job. If the breaker is open and its open time has
    /// expired, claiming the first probe also changes the state to half-open.
    pub(crate) fn claim(&mut self, now: Time, has_ready_worker: bool) -> Option<(Claim, Option<Transition>)> {
        let admission = self.peek(now, has_ready_worker);
        if !admission.is_admitted() {
            return None;
        }
        let transition = self.advance(now, has_ready_worker);
        let epoch = self.epoch;
        let claim = match &mut self.state {
            State::HalfOpen { outstanding, .. } => {
                *outstanding += 1;
                Claim::Probe { epoch }
            }
            _ => Claim::Call { epoch },
        };
        Some((claim, transition))
    }

    /// Returns true if the breaker admits every job and records no results.
    pub(crate) const fn is_disabled(&self) -> bool {
        self.limits.is_none() && matches!(self.state, State::Closed { .. })
    }

    /// Gives back the claim of a call whose result says nothing about the dependency. If the call was a probe, another
    /// call can then take its place. Otherwise, the breaker could stay half-open forever (resilience4j #544 and #935).
    pub(crate) fn return_claim(&mut self, claim: Claim) {
        if claim.epoch() == self.epoch
            && let State::HalfOpen { outstanding, .. } = &mut self.state
        {
            *outstanding = outstanding.saturating_sub(1);
        }
    }

    fn has_room(&self, outstanding: u32, seen: Tally) -> bool {
        let probes = self.limits.as_ref().map_or(1, BreakerLimits::probes);
        outstanding.saturating_add(seen.calls) < probes
    }

    // Results of calls.

    /// Counts a call by its result and run time. Calls claimed before the last transition are ignored. Otherwise, slow
    /// calls that were still running when the breaker opened could open it again when they end.
    pub(crate) fn record(
        &mut self,
        now: Time,
        claim: Claim,
        result: CallResult,
        took: Duration,
    ) -> Option<Transition> {
        if claim.epoch() != self.epoch {
            return None;
        }
        if result == CallResult::Ignored {
            self.return_claim(claim);
            return None;
        }
        let limits = self.limits.as_ref()?;
        let call = Tally::of(result == CallResult::Failure, limits.slow_call.is_some_and(|slow| took > slow));
        match &mut self.state {
            State::Closed { window, .. } => {
                let bucket = window.bucket(now);
                *bucket = *bucket + call;
                let seen = window.sum(now);
                let is_bad = seen.calls >= limits.min_calls && limits.are_reached_by(seen, seen.calls);
                is_bad.then(|| self.open(now, seen))
            }
            State::HalfOpen { outstanding, seen } => {
                *outstanding = outstanding.saturating_sub(1);
                *seen = *seen + call;
                let seen = *seen;
                self.judge_probes(now, seen)
            }
            State::Open { .. } | State::ForcedOpen => None,
        }
    }

    /// Opens a half-open breaker as soon as a configured ratio will be reached even if all remaining probes succeed.
    /// Otherwise, closes the breaker after the last probe.
    fn judge_probes(&mut self, now: Time, seen: Tally) -> Option<Transition> {
        let limits = self.limits.as_ref()?;
        if limits.are_reached_by(seen, limits.probes()) {
            return Some(self.open(now, seen));
        }
        (seen.calls >= limits.probes()).then(|| self.close(now, seen))
    }

    fn open(&mut self, now: Time, seen: Tally) -> Transition {
        let Some(limits) = self.limits.as_ref() else { return self.close(now, seen) };
        if let State::Closed { since, .. } = self.state
            && now.since(since) >= limits.window
        {
            self.openings = 0;
        }
        let until = now + limits.open_for(self.openings);
        self.openings = self.openings.saturating_add(1);
        self.enter(State::Open { until }, seen)
    }

    fn close(&mut self, now: Time, seen: Tally) -> Transition {
        self.enter(State::closed(now, self.limits.as_ref()), seen)
    }

    fn enter(&mut self, state: State, seen: Tally) -> Transition {
        let from = self.state();
        self.state = state;
        self.epoch += 1;
        Transition {
            from,
            to: self.state(),
            failure_rate: share(seen.failures, seen.calls),
            slow_rate: share(seen.slow, seen.calls),
            calls: seen.calls,
        }
    }

    /// Returns the number of calls counted in the current state, by result.
    fn seen(&self, now: Time) -> Tally {
        match &self.state {
            State::Closed { window, .. } => window.sum(now),
            State::HalfOpen { seen, .. } => *seen,
            State::Open { .. } | State::ForcedOpen => Tally::default(),
        }
    }

    /// Replaces the configuration and discards the counts, because they belong to the previous limits. An open breaker
    /// stays open until its current open time expires. A half-open breaker starts a new set of probes. A breaker that
    /// was forced open stays open.
    pub(crate) fn reconfigure(&mut self, now: Time, limits: Option<BreakerLimits>) -> Option<Transition> {
        self.limits = limits;
        let transition = match self.state {
            State::ForcedOpen => return None,
            _ if self.limits.is_none() => {
                self.openings = 0;
                self.close(now, Tally::default())
            }
            State::Open { .. } => return None,
            State::HalfOpen { .. } => self.enter(State::half_open(), Tally::default()),
            State::Closed { .. } => self.close(now, Tally::default()),
        };
        (transition.from != transition.to).then_some(transition)
    }

    // Operator commands.

    /// Blocks all calls until [`Self::release`] or [`Self::reset`] is called.
    pub(crate) fn force_open(&mut self, now: Time) -> Option<Transition> {
        let seen = self.seen(now);
        (self.state() != BreakerState::ForcedOpen).then(|| self.enter(State::ForcedOpen, seen))
    }

    /// Closes a breaker that was forced open. Discards earlier results, because they are outdated.
    pub(crate) fn release(&mut self, now: Time) -> Option<Transition> {
        (self.state() == BreakerState::ForcedOpen).then(|| self.close(now, Tally::default()))
    }

    /// Closes the breaker, even if it was forced open, and discards all counts.
    pub(crate) fn reset(&mut self, now: Time) -> Option<Transition> {
        self.openings = 0;
        let seen = self.seen(now);
        let transition = self.close(now, seen);
        (transition.from != BreakerState::Closed).then_some(transition)
    }
}

impl State {
    fn closed(since: Time, limits: Option<&BreakerLimits>) -> Self {
        let span = limits.map_or(Duration::ZERO, |limits| limits.window);
        Self::Closed { since, window: Box::new(Window::new(span)) }
    }

    fn half_open() -> Self {
        Self::HalfOpen { outstanding: 0, seen: Tally::default() }
    }
}

/// Number of counted calls, with the numbers of failed and of slow calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Tally {
    calls: u32,
    failures: u32,
    slow: u32,
}

impl Tally {
    fn of(is_failure: bool, is_slow: bool) -> Self {
        Self { calls: 1, failures: u32::from(is_failure), slow: u32::from(is_slow) }
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            calls: self.calls.saturating_add(other.calls),
            failures: self.failures.saturating_add(other.failures),
            slow: self.slow.saturating_add(other.slow),
        }
    }
}

/// Returns the ratio `count` ÷ `of`, or 0 if `of` is 0.
pub(crate) fn share(count: u32, of: u32) -> f64 {
    if of == 0 { 0.0 } else { f64::from(count) / f64::from(of) }
}

/// Sliding window of counters that uses a fixed amount of memory. Counts are discarded one bucket at a time.
#[derive(Debug)]
pub(crate) struct Window<T> {
    /// Length of a bucket, in nanoseconds.
    width_ns: u64,
    /// Buckets, indexed by bucket number modulo [`BUCKETS`]. Each entry contains its bucket number, so that an expired
    /// bucket is detected when its entry is reused.
    buckets: [(u64, T); BUCKETS],
}

impl<T: Copy + Default + Add<Output = T>> Window<T> {
    /// Returns an empty window that covers `span`.
    pub(crate) fn new(span: Duration) -> Self {
        let span_ns = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Self { width_ns: (span_ns / BUCKETS as u64).max(1), buckets: [(0, T::default()); BUCKETS] }
    }

    /// Returns the bucket that contains `now`.
    pub(crate) fn bucket(&mut self, now: Time) -> &mut T {
        let number = now.0 / self.width_ns;
        let bucket = &mut self.buckets[(number % BUCKETS as u64) as usize];
        if bucket.0 != number {
            *bucket = (number, T::default());
        }
        &mut bucket.1
    }

    pub(crate) fn sum(&self, now: Time) -> T {
        let number = now.0 / self.width_ns;
        let recent = self.buckets.iter().filter(|(n, _)| number.saturating_sub(*n) < BUCKETS as u64);
        recent.fold(T::default(), |sum, (_, counted)| sum + *counted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CallResult::{Failure, Ignored, Success};

    const SECOND: Duration = Duration::from_secs(1);
    const SLOW: Duration = Duration::from_secs(5);
    const FAST: Duration = Duration::ZERO;

    /// Returns the settings that resilience4j uses in `CircuitBreakerStateMachineTest`, but with a longer window.
    fn limits() -> BreakerLimits {
        BreakerLimits {
            window: 10 * SECOND,
            min_calls: 5,
            failure_rate: 0.5,
            slow_call: Some(4 * SECOND),
            slow_rate: 0.5,
            open_for: 5 * SECOND,
            probes: 4,
        }
    }

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn breaker() -> Breaker {
        Breaker::new(Some(limits()))
    }

    /// Returns a breaker that opened at `now`.
    fn opened(now: Time) -> Breaker {
        let mut breaker = breaker();
        trip(&mut breaker, now);
        breaker
    }

    fn trip(breaker: &mut Breaker, now: Time) {
        let before = breaker.state();
        let calls = if before == BreakerState::Closed { 5 } else { 2 };
        let claims: Vec<_> = (0..calls).map(|_| claim(breaker, now)).collect();
        let transitions: Vec<_> =
            claims.into_iter().filter_map(|claim| breaker.record(now, claim, Failure, FAST)).collect();
        assert!(matches!(transitions[..], [Transition { to: BreakerState::Open, .. }]), "{transitions:?}");
    }

    /// Claims a call. Panics if the breaker does not admit the call.
    #[expect(clippy::panic, reason = "a test reports failures by panicking")]
    fn claim(breaker: &mut Breaker, now: Time) -> Claim {
        let Some((claim, _)) = breaker.claim(now, true) else {
            panic!("the breaker refused a claim: {breaker:?}")
        };
        claim
    }

    /// Claims a call and records its result.
    fn call(breaker: &mut Breaker, now: Time, result: CallResult, took: Duration) -> Option<Transition> {
        let claim = claim(breaker, now);
        breaker.record(now, claim, result, took)
    }

    fn retry_after(breaker: &Breaker, now: Time) -> Option<Duration> {
        match breaker.peek(now, true) {
            Admission::Open { retry_after } => Some(retry_after),
            _ => None,
        }
    }

    /// This test is adapted from `shouldOpenAfterFailureRateThresholdExceeded` in resilience4j. The breaker opens after
    /// the fifth call even though that call succeeds.
    #[test]
    fn breaker_opens_at_failure_rate() {
        let mut breaker = breaker();
        for result in [Failure, Failure, Failure, Success] {
            assert_eq!(call(&mut breaker, at(0), result, FAST), None);
        }
        let transition = call(&mut breaker, at(0), Success, FAST);
        let expected = Transition {
            from: BreakerState::Closed,
            to: BreakerState::Open,
            failure_rate: 0.6,
            slow_rate: 0.0,
            calls: 5,
        };
        assert_eq!(transition, Some(expected));
        assert_eq!(breaker.state().name(), "open");
        assert_eq!(breaker.claim(at(4), true), None);
    }

    /// This test is adapted from `shouldOpenAfterSlowCallRateThresholdExceeded` in resilience4j.
    #[test]
    fn breaker_opens_at_slow_call_rate() {
        let mut breaker = breaker();
        for (result, took) in [(Failure, SLOW), (Success, SLOW), (Success, FAST), (Success, 4 * SECOND)] {
            assert_eq!(call(&mut breaker, at(0), result, took), None);
        }
        let transition = call(&mut breaker, at(0), Success, SLOW);
        assert!(transition.is_some_and(|t| (t.failure_rate, t.slow_rate) == (0.2, 0.6)), "{transition:?}");
    }

    /// This test is adapted from `testLowVolumeDoesNotTripCircuit` in Hystrix.
    #[test]
    fn low_volume_does_not_open_the_breaker() {
        let mut breaker = breaker();
        for second in 0..300 {
            // Every third second has a call, so that no ten-second window contains five calls.
            if second % 3 == 0 {
                assert_eq!(call(&mut breaker, at(second), Failure, SLOW), None);
            }
        }
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    /// This test is adapted from `HealthCountsStream` in Hystrix. Calls are not counted once they have left the window.
    #[test]
    fn old_failures_leave_the_window() {
        let mut breaker = breaker();
        for _ in 0..4 {
            assert_eq!(call(&mut breaker, at(0), Failure, FAST), None);
        }
        assert_eq!(call(&mut breaker, at(10), Failure, FAST), None);
        for _ in 0..3 {
            assert_eq!(call(&mut breaker, at(19), Failure, FAST), None);
        }
        assert!(call(&mut breaker, at(19), Failure, FAST).is_some());
    }

    /// This test is adapted from `request_allowed?` in Semian. The method returns true for an open circuit whose open
    /// time has expired, but does not change the state.
    #[test]
    fn peek_does_not_change_the_state() {
        let mut breaker = opened(at(0));
        for now in [at(0), at(4), at(5), at(60)] {
            let before = format!("{breaker:?}");
            for _ in 0..100 {
                breaker.peek(now, true);
                breaker.peek(now, false);
            }
            assert_eq!(format!("{breaker:?}"), before);
        }
        assert_eq!(breaker.peek(at(60), true), Admission::Probe);
        assert_eq!(breaker.state(), BreakerState::Open);
        assert!(matches!(breaker.claim(at(60), true), Some((Claim::Probe { .. }, Some(_)))));
    }

    #[test]
    fn retry_after_is_the_remaining_open_time() {
        let breaker = opened(at(100));
        assert_eq!(retry_after(&breaker, at(100)), Some(5 * SECOND));
        let now = at(103) + Duration::from_nanos(1);
        assert_eq!(retry_after(&breaker, now), Some(Duration::from_nanos(1_999_999_999)));
        assert_eq!(retry_after(&breaker, at(105)), None);
    }

    /// This test is adapted from `shouldOnlyPermitFourCallsInHalfOpenState` and
    /// `shouldIncreaseCounterOnReleasePermission` in resilience4j.
    #[test]
    fn half_open_breaker_limits_number_of_probes() {
        let mut breaker = opened(at(0));
        let mut claims: Vec<_> = (0..4).map(|_| claim(&mut breaker, at(5))).collect();
        for _ in 0..2 {
            assert_eq!(breaker.peek(at(5), true), Admission::Probing);
            assert_eq!(breaker.claim(at(5), true), None);
        }
        if let Some(claim) = claims.pop() {
            breaker.return_claim(claim);
        }
        assert_eq!(breaker.peek(at(5), true), Admission::Probe);
        claims.push(claim(&mut breaker, at(5)));
        assert_eq!(breaker.claim(at(5), true), None);
        let transitions: Vec<_> =
            claims.into_iter().filter_map(|claim| breaker.record(at(6), claim, Success, FAST)).collect();
        let expected = Transition {
            from: BreakerState::HalfOpen,
            to: BreakerState::Closed,
            failure_rate: 0.0,
            slow_rate: 0.0,
            calls: 4,
        };
        assert_eq!(transitions, [expected]);
        assert_eq!(breaker.seen(at(6)), Tally::default());
    }

    /// This test is adapted from resilience4j #544 (`shouldReleasePermissionWhenExceptionIgnored`) and #935. The result
    /// of the last probe is ignored.
    #[test]
    fn ignored_probe_is_repeated() {
        let mut breaker = opened(at(0));
        for _ in 0..3 {
            assert_eq!(call(&mut breaker, at(5), Success, FAST), None);
        }
        for _ in 0..100 {
            assert_eq!(call(&mut breaker, at(5), Ignored, SLOW), None);
            assert_eq!(breaker.state(), BreakerState::HalfOpen);
        }
        let transition = call(&mut breaker, at(5), Success, FAST);
        assert!(transition.is_some_and(|t| t.to == BreakerState::Closed && t.calls == 4));
    }

    /// Taken from `maxWaitDurationInHalfOpenState` in resilience4j (#2028). This breaker does not need such a setting,
    /// because a hanging probe ends as a failure at its deadline.
    #[test]
    fn probe_that_exceeds_its_deadline_reopens_the_breaker() {
        let mut breaker = Breaker::new(Some(BreakerLimits { probes: 1, ..limits() }));
        trip(&mut breaker, at(0));
        let probe = claim(&mut breaker, at(5));
        assert_eq!(breaker.peek(at(34), true), Admission::Probing);
        let transition = breaker.record(at(35), probe, Failure, 30 * SECOND);
        assert!(transition.is_some_and(|t| t.to == BreakerState::Open && t.slow_rate == 1.0));
        assert_eq!(retry_after(&breaker, at(35)), Some(10 * SECOND));
    }

    /// Taken from `shouldTransitionBackToOpenStateWhenFailureRateIsAboveThreshold` in resilience4j, its counterpart for
    /// slow calls, and `shouldTransitionBackToClosedStateWhenFailureIsBelowThreshold`. Unlike in resilience4j, this
    /// breaker opens as soon as the remaining probes can no longer prevent it.
    #[test]
    fn probe_results_open_or_close_the_breaker() {
        for bad in [(Failure, FAST), (Success, SLOW)] {
            let mut breaker = opened(at(0));
            assert_eq!(call(&mut breaker, at(5), bad.0, bad.1), None);
            let transition = call(&mut breaker, at(5), bad.0, bad.1);
            assert!(transition.is_some_and(|t| t.to == BreakerState::Open && t.calls == 2));

            let mut breaker = opened(at(0));
            for (result, took) in [bad, (Success, FAST), (Success, FAST)] {
                assert_eq!(call(&mut breaker, at(5), result, took), None);
            }
            let transition = call(&mut breaker, at(5), Success, FAST);
            assert!(transition.is_some_and(|t| t.to == BreakerState::Closed && t.calls == 4));
        }
    }

    /// A call claimed before the breaker opened can end while the breaker is half-open. This call is not counted and
    /// does not make room for another probe.
    #[test]
    fn ignores_calls_claimed_before_the_breaker_opened() {
        let mut breaker = breaker();
        let old: Vec<_> = (0..50).map(|_| claim(&mut breaker, at(0))).collect();
        trip(&mut breaker, at(0));
        let probes: Vec<_> = (0..4).map(|_| claim(&mut breaker, at(5))).collect();
        for (i, claim) in old.into_iter().enumerate() {
            let result = [Failure, Ignored, Success][i % 3];
            assert_eq!(breaker.record(at(6), claim, result, SLOW), None);
        }
        assert_eq!(breaker.peek(at(6), true), Admission::Probing);
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        for claim in probes {
            breaker.record(at(6), claim, Success, FAST);
        }
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    /// Taken from `shouldTransitionToHalfOpenAfterWaitInterval` in resilience4j, with an exponential interval.
    /// resilience4j resets the interval each time the breaker closes, so a flapping breaker never slows down. Here, the
    /// interval is reset only after the breaker has been closed for a whole window.
    #[test]
    fn open_time_doubles_up_to_eight_times_open_for() {
        let mut breaker = opened(at(0));
        let mut now = at(0);
        for expected in [5, 10, 20, 40, 40, 40] {
            let wait = retry_after(&breaker, now);
            assert_eq!(wait, Some(expected * SECOND));
            now = now + expected * SECOND;
            trip(&mut breaker, now);
        }
        let close = |breaker: &mut Breaker, now: Time| {
            for _ in 0..4 {
                call(breaker, now, Success, FAST);
            }
            assert_eq!(breaker.state(), BreakerState::Closed);
        };
        now = now + 40 * SECOND;
        close(&mut breaker, now);
        now = now + 9 * SECOND;
        trip(&mut breaker, now);
        assert_eq!(
            retry_after(&breaker, now),
            Some(40 * SECOND),
            "the breaker has not been closed for a whole window"
        );
        now = now + 40 * SECOND;
        close(&mut breaker, now);
        now = now + 10 * SECOND;
        trip(&mut breaker, now);
        assert_eq!(retry_after(&breaker, now), Some(5 * SECOND));
    }

    #[test]
    fn breaker_stays_open_without_a_ready_worker() {
        let mut breaker = opened(at(0));
        let not_ready = Admission::Open { retry_after: Duration::ZERO };
        assert_eq!(breaker.next_deadline(true), Some(at(5)));
        assert_eq!(breaker.next_deadline(false), None);
        assert_eq!(breaker.advance(at(4), true), None);
        assert_eq!(breaker.advance(at(9), false), None);
        assert_eq!(breaker.peek(at(9), false), not_ready);
        assert_eq!(breaker.claim(at(9), false), None);
        assert!(breaker.advance(at(9), true).is_some_and(|t| t.to == BreakerState::HalfOpen));
        assert_eq!(breaker.next_deadline(true), None);
        assert_eq!(breaker.peek(at(9), false), not_ready);
        assert_eq!(breaker.claim(at(9), false), None);
        assert!(matches!(breaker.claim(at(9), true), Some((Claim::Probe { .. }, None))));
    }

    /// This test is adapted from `shouldForceOpenCircuitBreaker` in resilience4j.
    #[test]
    fn forced_open_breaker_closes_only_on_release_or_reset() {
        for mut breaker in [breaker(), opened(at(0)), Breaker::new(None)] {
            let before = breaker.state();
            assert!(breaker.force_open(at(1)).is_some_and(|t| t.from == before));
            assert_eq!(breaker.force_open(at(2)), None);
            assert_eq!(breaker.state().name(), "forced_open");
            assert_eq!(breaker.peek(at(1000), true), Admission::ForcedOpen);
            assert_eq!(breaker.claim(at(1000), true), None);
            assert_eq!(breaker.next_deadline(true), None);
            assert!(breaker.release(at(1000)).is_some_and(|t| t.to == BreakerState::Closed));
            assert_eq!(breaker.release(at(1000)), None);
            assert_eq!(breaker.peek(at(1000), true), Admission::Closed);
            breaker.force_open(at(1001));
            assert!(breaker.reset(at(1002)).is_some_and(|t| t.to == BreakerState::Closed));
        }
    }

    /// This test is adapted from `shouldResetToClosedState` and `shouldResetClosedState` in resilience4j.
    #[test]
    fn reset_closes_the_breaker_and_discards_all_counts() {
        let mut breaker = opened(at(0));
        trip(&mut breaker, at(5));
        assert!(breaker.reset(at(6)).is_some_and(|t| t.from == BreakerState::Open));
        let old = claim(&mut breaker, at(6));
        for _ in 0..4 {
            assert_eq!(call(&mut breaker, at(6), Failure, FAST), None);
        }
        assert_eq!(breaker.reset(at(6)), None);
        assert_eq!(breaker.record(at(6), old, Failure, FAST), None);
        assert_eq!(breaker.seen(at(6)), Tally::default());
        trip(&mut breaker, at(7));
        assert_eq!(retry_after(&breaker, at(7)), Some(5 * SECOND));
    }

    /// The breaker must not open just because an old success leaves the window or a call is ignored.
    #[test]
    fn only_failed_or_slow_calls_open_the_breaker() {
        let mut breaker = breaker();
        for _ in 0..6 {
            assert_eq!(call(&mut breaker, at(0), Success, FAST), None);
        }
        for _ in 0..5 {
            assert_eq!(call(&mut breaker, at(5), Failure, FAST), None);
        }
        assert_eq!(call(&mut breaker, at(12), Ignored, SLOW), None);
        assert_eq!(breaker.state(), BreakerState::Closed);
        assert!(call(&mut breaker, at(12), Success, FAST).is_some_and(|t| t.calls == 6));
    }

    /// Seeded random sequence (SplitMix64).
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % end
        }

        fn one_in(&mut self, n: u64) -> bool {
            self.below(n) == 0
        }
    }

    /// Test model that consists of a breaker, the calls in progress, and a list of the calls counted since the last
    /// state change.
    struct World {
        random: Random,
        limits: BreakerLimits,
        breaker: Breaker,
        now: Time,
        is_ready: bool,
        under_way: Vec<Claim>,
        judged: Vec<(Time, Tally)>,
        /// Number of times that each state was entered.
        entered: [u32; 4],
    }

    impl World {
        fn new(seed: u64) -> Self {
            let mut random = Random(seed);
            let limits = BreakerLimits {
                window: Duration::from_millis(100 + random.below(5000)),
                min_calls: random.below(12) as u32,
                failure_rate: random.below(11) as f64 / 10.0,
                slow_call: (!random.one_in(4)).then_some(SECOND),
                slow_rate: random.below(11) as f64 / 10.0,
                open_for: Duration::from_millis(random.below(3000)),
                probes: random.below(6) as u32,
            };
            let breaker = Breaker::new(Some(limits.clone()));
            let (under_way, judged) = (Vec::new(), Vec::new());
            let now = Time(random.below(1 << 40));
            Self { random, limits, breaker, now, is_ready: true, under_way, judged, entered: [0; 4] }
        }

        fn step(&mut self) {
            let epoch = self.breaker.epoch;
            match self.random.below(100) {
                0..40 => self.claim(),
                40..80 => self.end_one(),
                80..95 => self.now = self.now + Duration::from_millis(self.random.below(400)),
                95..97 => self.is_ready = !self.is_ready,
                97..99 => self.advance(),
                _ => self.by_hand(),
            }
            if self.breaker.epoch != epoch {
                self.entered[self.breaker.state() as usize] += 1;
                self.judged.clear();
            }
            self.check();
        }

        fn claim(&mut self) {
            let admission = self.breaker.peek(self.now, self.is_ready);
            let claimed = self.breaker.claim(self.now, self.is_ready);
            assert_eq!(admission.is_admitted(), claimed.is_some(), "{admission:?}");
            let Some((claim, transition)) = claimed else { return };
            assert_eq!(claim.epoch(), self.breaker.epoch);
            assert_eq!(matches!(claim, Claim::Probe { .. }), admission == Admission::Probe);
            assert!(transition.is_none_or(|t| t.to == BreakerState::HalfOpen));
            self.under_way.push(claim);
        }

        fn end_one(&mut self) {
            if self.under_way.is_empty() {
                return;
            }
            let which = self.random.below(self.under_way.len() as u64) as usize;
            let claim = self.under_way.swap_remove(which);
            let result = [Success, Success, Failure, Ignored][self.random.below(4) as usize];
            let took = if self.random.one_in(3) { SLOW } else { FAST };
            let is_counted = result != Ignored && claim.epoch() == self.breaker.epoch;
            if is_counted {
                let is_slow = self.limits.slow_call.is_some() && took == SLOW;
                self.judged.push((self.now, Tally::of(result == Failure, is_slow)));
            }
            let expected = if is_counted { self.expected() } else { None };
            let transition = self.breaker.record(self.now, claim, result, took);
            assert_eq!(transition.map(|t| (t.to, t.calls)), expected);
        }

        /// Returns the state change that the latest result must cause. Computed from the list of calls.
        fn expected(&self) -> Option<(BreakerState, u32)> {
            let is_half_open = self.breaker.state() == BreakerState::HalfOpen;
            let seen = if is_half_open { self.judged.clone() } else { self.in_window() };
            let count = |is: fn(&Tally) -> u32| seen.iter().map(|(_, call)| is(call)).sum::<u32>();
            let (calls, failures, slow) = (count(|c| c.calls), count(|c| c.failures), count(|c| c.slow));
            let probes = self.limits.probes.max(1);
            let of = f64::from(if is_half_open { probes } else { calls });
            let is_bad = failures > 0 && f64::from(failures) / of >= self.limits.failure_rate
                || slow > 0 && f64::from(slow) / of >= self.limits.slow_rate;
            match is_half_open {
                true if is_bad => Some((BreakerState::Open, calls)),
                true => (calls >= probes).then_some((BreakerState::Closed, calls)),
                false => (is_bad && calls >= self.limits.min_calls).then_some((BreakerState::Open, calls)),
            }
        }

        /// Returns the calls that the window must contain. These are the calls in the current bucket and in the nine
        /// buckets before it.
        fn in_window(&self) -> Vec<(Time, Tally)> {
            let tenth = (self.limits.window.as_nanos() / 10) as u64;
            let from = (self.now.0 / tenth * tenth).saturating_sub(9 * tenth);
            self.judged.iter().copied().filter(|(at, _)| at.0 >= from).collect()
        }

        fn advance(&mut self) {
            self.breaker.advance(self.now, self.is_ready);
            let next = self.breaker.next_deadline(self.is_ready);
            assert!(next.is_none_or(|at| at > self.now), "a deadline in the past must not remain");
        }

        fn by_hand(&mut self) {
            let now = self.now;
            match self.random.below(12) {
                0 => _ = self.breaker.force_open(now),
                1 => _ = self.breaker.reset(now),
                2..8 => _ = self.breaker.release(now),
                _ => self.never_stuck(),
            }
        }

        /// Checks that the breaker admits calls again after all claims are returned, enough time has passed, and a
        /// worker is ready.
        fn never_stuck(&mut self) {
            for claim in std::mem::take(&mut self.under_way) {
                self.breaker.return_claim(claim);
            }
            self.now = self.now + 8 * self.limits.open_for;
            self.is_ready = true;
            let is_forced = self.breaker.state() == BreakerState::ForcedOpen;
            assert_eq!(self.breaker.peek(self.now, true).is_admitted(), !is_forced, "{:?}", self.breaker);
            self.claim();
        }

        fn check(&self) {
            let epoch = self.breaker.epoch;
            let is_probe = |c: &&Claim| matches!(c, Claim::Probe { .. }) && c.epoch() == epoch;
            let probes = self.under_way.iter().filter(is_probe).count() as u32;
            match &self.breaker.state {
                State::HalfOpen { outstanding, seen } => {
                    assert_eq!(*outstanding, probes);
                    assert!(outstanding + seen.calls <= self.limits.probes.max(1));
                    assert_eq!(seen.calls as usize, self.judged.len());
                }
                State::Closed { window, .. } => {
                    assert_eq!(probes, 0);
                    let naive = self.in_window().iter().fold(Tally::default(), |sum, (_, c)| sum + *c);
                    assert_eq!(window.sum(self.now), naive);
                }
                State::Open { until } => {
                    assert_eq!(probes, 0);
                    assert!(until.since(self.now) <= 8 * self.limits.open_for);
                }
                State::ForcedOpen => assert_eq!(probes, 0),
            }
        }
    }

    #[test]
    fn random_call_histories_match_a_simple_model() {
        let mut entered = [0; 4];
        for seed in 0..200 {
            let mut world = World::new(seed);
            for _ in 0..2000 {
                world.step();
            }
            world.never_stuck();
            for (sum, count) in entered.iter_mut().zip(world.entered) {
                *sum += count;
            }
        }
        assert!(entered.iter().all(|&count| count > 100), "a state was entered too few times: {entered:?}");
    }
}

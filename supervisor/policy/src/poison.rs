//! Quarantine for payloads that kill workers. If a worker dies while running a single job, the crash is recorded under
//! the digest of the job's payload, which the caller computes. After several such crashes, jobs with this payload are
//! rejected. Similarly, message queues move messages that fail repeatedly to a dead-letter queue (SQS,
//! `maxReceiveCount`).

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use crate::time::Time;

/// Capacity of the list of crashes, and also of the list of quarantined payloads. When a list is full, the oldest entry
/// in that list is dropped.
const REMEMBERED_MAX: usize = 4096;

/// Digest of an operation and its payload. The caller must use a collision-resistant hash function, so that no client
/// can craft a different payload with the same digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest(u64, u64);

impl From<u128> for Digest {
    fn from(number: u128) -> Self {
        Self((number >> 64) as u64, number as u64)
    }
}

impl From<Digest> for u128 {
    fn from(digest: Digest) -> Self {
        Self::from(digest.0) << 64 | Self::from(digest.1)
    }
}

impl fmt::Display for Digest {
    /// Writes the digest as 32 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0, self.1)
    }
}

/// Quarantine settings.
#[derive(Clone, Debug, PartialEq)]
pub struct PoisonLimits {
    /// Number of crashes after which a payload is quarantined.
    pub crashes: u32,
    /// Time window in which crashes are counted. A quarantine also lasts this long after the payload's last crash.
    pub within: Duration,
}

/// Recorded crashes and quarantined payloads of one bulkhead.
#[derive(Debug)]
pub(crate) struct Poison {
    /// Settings of the quarantine, or `None` if the quarantine is disabled. No crashes are recorded while it is
    /// disabled.
    limits: Option<PoisonLimits>,
    /// All recorded crashes, oldest first. A linear search is fast enough, because the list is searched only after a
    /// crash. A flood of new payloads can displace recorded crashes, but not quarantined payloads.
    crashes: VecDeque<(Time, Digest)>,
    /// Digests of the quarantined payloads, each with the time of the payload's last crash. Searched for every job.
    /// This is a `BTreeMap` because a `HashMap` would be seeded randomly.
    quarantined: BTreeMap<Digest, Time>,
}

impl Poison {
    /// Creates a quarantine with no recorded crashes.
    pub(crate) fn new(limits: Option<PoisonLimits>) -> Self {
        Self { limits, crashes: VecDeque::new(), quarantined: BTreeMap::new() }
    }

    /// Replaces the settings. The new settings also apply to crashes that are already recorded.
    pub(crate) fn reconfigure(&mut self, now: Time, limits: Option<PoisonLimits>) {
        match (std::mem::replace(&mut self.limits, limits), &self.limits) {
            (_, None) => self.reset(),
            (Some(before), Some(_)) => self.forget(now, before.within),
            (None, Some(_)) => {}
        }
    }

    /// Records the death of a worker whose only running job had the given payload. Returns true if the payload is now
    /// quarantined.
    pub(crate) fn record_crash(&mut self, now: Time, digest: Digest) -> bool {
        let Some(limits) = &self.limits else { return false };
        let (crashes_min, within) = (limits.crashes.max(1) as usize, limits.within);
        self.forget(now, within);
        if self.crashes.len() == REMEMBERED_MAX {
            self.crashes.pop_front();
        }
        self.crashes.push_back((now, digest));
        if self.crashes.iter().filter(|(_, d)| *d == digest).count() >= crashes_min {
            self.quarantine(now, digest);
        }
        self.quarantined.contains_key(&digest)
    }

    pub(crate) fn is_quarantined(&self, now: Time, digest: Digest) -> bool {
        let Some(limits) = &self.limits else { return false };
        self.quarantined.get(&digest).is_some_and(|&since| now.since(since) < limits.within)
    }

    /// Returns the number of quarantined payloads.
    pub(crate) fn len(&self, now: Time) -> usize {
        let Some(limits) = &self.limits else { return 0 };
        self.quarantined.values().filter(|&&since| now.since(since) < limits.within).count()
    }

    pub(crate) fn quarantined(&self, now: Time) -> impl Iterator<Item = Digest> {
        let within = self.limits.as_ref().map_or(Duration::ZERO, |limits| limits.within);
        let current = self.quarantined.iter().filter(move |(_, since)| now.since(**since) < within);
        current.map(|(digest, _)| *digest)
    }

    /// Releases all quarantined payloads and forgets all recorded crashes.
    pub(crate) fn reset(&mut self) {
        self.crashes.clear();
        self.quarantined.clear();
    }

    /// Quarantines a payload, and records `now` as the time of the payload's last crash.
    pub(crate) fn quarantine(&mut self, now: Time, digest: Digest) {
        if self.limits.is_none() {
            return;
        }
        self.quarantined.insert(digest, now);
        if self.quarantined.len() > REMEMBERED_MAX
            && let Some((&oldest, _)) = self.quarantined.iter().min_by_key(|(_, since)| **since)
        {
            self.quarantined.remove(&oldest);
        }
    }

    fn forget(&mut self, now: Time, within: Duration) {
        while self.crashes.front().is_some_and(|&(at, _)| now.since(at) >= within) {
            self.crashes.pop_front();
        }
        self.quarantined.retain(|_, since| now.since(*since) < within);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn d(number: u128) -> Digest {
        number.into()
    }

    fn poison() -> Poison {
        Poison::new(Some(PoisonLimits { crashes: 3, within: HOUR }))
    }

    fn at(minutes: u64) -> Time {
        Time::ZERO + Duration::from_secs(60 * minutes)
    }

    /// The third crash of a payload quarantines only that payload. In SQS, a `maxReceiveCount` of 3 has the same
    /// effect.
    #[test]
    fn third_crash_quarantines_only_that_payload() {
        let mut poison = poison();
        assert!(!poison.record_crash(at(0), d(7)));
        assert!(!poison.record_crash(at(1), d(8)));
        assert!(!poison.record_crash(at(2), d(7)));
        assert!(!poison.is_quarantined(at(2), d(7)));
        assert!(poison.record_crash(at(3), d(7)));
        assert!(poison.is_quarantined(at(3), d(7)));
        assert!(!poison.is_quarantined(at(3), d(8)));
        assert_eq!(poison.len(at(3)), 1);
    }

    /// Only crashes within the configured period are counted. The restart intensity of an Erlang `supervisor` works in
    /// the same way.
    #[test]
    fn old_crashes_do_not_count() {
        let mut poison = poison();
        for i in 0..50 {
            assert!(!poison.record_crash(at(30 * i), d(7)), "crash {i} must not cause a quarantine");
        }
    }

    #[test]
    fn quarantine_ends_after_the_last_crash_expires() {
        let mut poison = poison();
        for minute in [0, 20, 40] {
            poison.record_crash(at(minute), d(7));
        }
        assert!(poison.is_quarantined(at(99), d(7)));
        assert!(!poison.is_quarantined(at(100), d(7)));
        assert_eq!(poison.len(at(100)), 0);
        assert!(!poison.record_crash(at(100), d(7)), "earlier crashes must be forgotten");
    }

    /// A job that was dispatched before its payload was quarantined can still crash. The crash extends the quarantine.
    #[test]
    fn crash_during_quarantine_extends_the_quarantine() {
        let mut poison = poison();
        for minute in [0, 1, 2, 50] {
            poison.record_crash(at(minute), d(7));
        }
        assert!(poison.is_quarantined(at(61), d(7)));
        assert!(poison.is_quarantined(at(109), d(7)));
        assert!(!poison.is_quarantined(at(110), d(7)));
    }

    /// The number of recorded payloads stays limited even if many different payloads crash.
    #[test]
    fn flood_of_payloads_leaves_the_quarantine_unchanged() {
        let mut poison = poison();
        for _ in 0..3 {
            poison.record_crash(at(0), d(7));
        }
        for digest in 1000..1000 + 3 * REMEMBERED_MAX as u128 {
            assert!(!poison.record_crash(at(1), d(digest)));
        }
        assert_eq!(poison.crashes.len(), REMEMBERED_MAX);
        assert!(poison.is_quarantined(at(1), d(7)));
    }

    #[test]
    fn full_quarantine_releases_the_oldest_payload() {
        let mut poison = Poison::new(Some(PoisonLimits { crashes: 1, within: HOUR }));
        for i in 0..=REMEMBERED_MAX as u64 {
            assert!(poison.record_crash(Time(i), d(u128::from(u64::MAX - i))));
        }
        let now = Time(REMEMBERED_MAX as u64);
        assert_eq!(poison.len(now), REMEMBERED_MAX);
        assert!(!poison.is_quarantined(now, d(u128::from(u64::MAX))));
        assert!(poison.is_quarantined(now, d(u128::from(u64::MAX - 1))));
    }

    #[test]
    fn reset_or_missing_limits_release_all_payloads() {
        let mut poison = poison();
        for _ in 0..3 {
            poison.record_crash(at(0), d(7));
        }
        poison.reset();
        assert_eq!(poison.len(at(0)), 0);
        assert!(!poison.record_crash(at(0), d(7)));
        let mut off = Poison::new(None);
        assert!(!off.record_crash(at(0), d(7)));
        assert!(!off.is_quarantined(at(0), d(7)));
    }
}

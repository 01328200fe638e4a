//! Payloads that kill their workers. A payload that was alone in a worker when that died is remembered by
//! its digest, which the caller makes; after a few such deaths it is quarantined. As in a message queue's
//! dead letters (SQS, `maxReceiveCount`), others are served while it is kept out.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use crate::time::Time;

/// So many crashes are remembered, and so many digests quarantined, whatever comes. The oldest go first.
const REMEMBERED_MAX: usize = 4096;

/// What tells a payload, with what is to be done with it, from all others. Its maker chooses a function
/// under which no client can find a second payload for the same digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest(u64, u64);

impl From<u128> for Digest {
    fn from(number: u128) -> Self {
        Self((number >> 64) as u64, number as u64)
    }
}

impl fmt::Display for Digest {
    /// 32 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.0, self.1)
    }
}

/// When a payload is quarantined, and for how long.
#[derive(Clone, Debug, PartialEq)]
pub struct PoisonLimits {
    /// After so many crashes.
    pub crashes: u32,
    /// Within this time; and for this time after the last of them.
    pub within: Duration,
}

/// The payloads of one bulkhead that crashed it.
#[derive(Debug)]
pub(crate) struct Poison {
    /// Without limits nothing is remembered.
    limits: Option<PoisonLimits>,
    /// Every crash, the oldest first. A crash is rare and costs a process, so that a search through all of
    /// them does not matter then; and a stream of ever new payloads cannot push out a quarantined one.
    crashes: VecDeque<(Time, Digest)>,
    /// Digests that are quarantined, and since when. This is asked for every job. It is ordered because a
    /// hash table would draw a random key.
    quarantined: BTreeMap<Digest, Time>,
}

impl Poison {
    /// A bulkhead that no payload has crashed yet.
    pub(crate) fn new(limits: Option<PoisonLimits>) -> Self {
        Self { limits, crashes: VecDeque::new(), quarantined: BTreeMap::new() }
    }

    /// What was seen, and not forgotten yet, is judged by these from now on.
    pub(crate) fn reconfigure(&mut self, now: Time, limits: Option<PoisonLimits>) {
        match (std::mem::replace(&mut self.limits, limits), &self.limits) {
            (_, None) => self.reset(),
            (Some(before), Some(_)) => self.forget(now, before.within),
            (None, Some(_)) => {}
        }
    }

    /// Remembers that a worker died with this payload, and no other, in its hands. Returns whether the
    /// payload is quarantined now.
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

    /// Whether this payload is kept out.
    pub(crate) fn is_quarantined(&self, now: Time, digest: Digest) -> bool {
        let Some(limits) = &self.limits else { return false };
        self.quarantined.get(&digest).is_some_and(|&since| now.since(since) < limits.within)
    }

    /// How many payloads are kept out.
    pub(crate) fn len(&self, now: Time) -> usize {
        let Some(limits) = &self.limits else { return 0 };
        self.quarantined.values().filter(|&&since| now.since(since) < limits.within).count()
    }

    /// Lets all in again, and forgets their crashes.
    pub(crate) fn reset(&mut self) {
        self.crashes.clear();
        self.quarantined.clear();
    }

    fn quarantine(&mut self, now: Time, digest: Digest) {
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

    /// SQS, `maxReceiveCount`: the third failure puts it aside, and nothing else.
    #[test]
    fn the_third_crash_quarantines_that_payload_and_no_other() {
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

    /// Erlang's `supervisor`, restart intensity: only what falls within the period counts.
    #[test]
    fn crashes_far_apart_do_not_count_together() {
        let mut poison = poison();
        for i in 0..50 {
            assert!(!poison.record_crash(at(30 * i), d(7)), "crash {i}");
        }
    }

    #[test]
    fn quarantine_lasts_from_the_last_crash_and_then_starts_afresh() {
        let mut poison = poison();
        for minute in [0, 20, 40] {
            poison.record_crash(at(minute), d(7));
        }
        assert!(poison.is_quarantined(at(99), d(7)));
        assert!(!poison.is_quarantined(at(100), d(7)));
        assert_eq!(poison.len(at(100)), 0);
        assert!(!poison.record_crash(at(100), d(7)), "its earlier crashes are forgotten");
    }

    /// A job that was dispatched before its twin was quarantined.
    #[test]
    fn a_crash_while_quarantined_renews_it() {
        let mut poison = poison();
        for minute in [0, 1, 2, 50] {
            poison.record_crash(at(minute), d(7));
        }
        assert!(poison.is_quarantined(at(61), d(7)));
        assert!(poison.is_quarantined(at(109), d(7)));
        assert!(!poison.is_quarantined(at(110), d(7)));
    }

    #[test]
    fn a_flood_of_new_payloads_takes_no_more_memory_and_frees_no_quarantined_one() {
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
    fn of_too_many_quarantined_the_oldest_goes_first() {
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
    fn reset_and_no_limits_let_all_in() {
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

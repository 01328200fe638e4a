//! What a worker says that answers no job: heartbeats, progress, words about itself, frames that are not known.
//! They are heard together, once for each read, and have a budget: over it the worker's link is read less often, so
//! that what it sends beyond waits in its own socket; far over it the worker is taken for broken.

use std::time::Duration;

use bulkhead_policy::{Event, Time};

use super::slab::LinkIndex;
use super::{DataPlane, Incoming};

/// Notices a second that any worker may send; each begun 8 KiB counts as one.
const PER_SECOND: i64 = 1000;

/// What each job that it may have at once adds: twice what the SDK sends of a job's progress.
const PER_SECOND_AND_JOB: i64 = 20;

/// Notices that a job adds once, such as RETURNED and the heartbeat that follows.
const FOR_A_JOB: i64 = 2;

/// For how long a worker that is over its budget is not read at most: less than makes it seem to hang.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Notices beyond the budget, and beyond what a pause makes up for, after which a worker counts as broken; in
/// `docs/protocol.md`. A worker that has its whole budget again begins anew.
const BEYOND_MAX: i64 = 300_000;

/// A link's notices.
pub(super) struct Notices {
    /// What is left for now: a second's worth at most. Less than nothing is made up for by a pause.
    left: i64,
    filled_at: Time,
    beyond: i64,
    /// Not read before this.
    paused_until: Option<Time>,
    /// Of one read: whether the worker said anything, and what of itself.
    is_heard: bool,
    said: Option<String>,
}

impl Default for Notices {
    fn default() -> Self {
        Self {
            left: PER_SECOND,
            filled_at: Time::ZERO,
            beyond: 0,
            paused_until: None,
            is_heard: false,
            said: None,
        }
    }
}

impl Notices {
    /// It was given a job.
    pub(super) fn add_job(&mut self) {
        self.left += FOR_A_JOB;
    }

    /// A notice of so many bytes came.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.is_heard = true;
        self.left -= 1 + (bytes / 8192) as i64;
    }

    /// It said this of itself; what it said before in the same breath is passed over.
    pub(super) fn say(&mut self, text: String) {
        self.said = Some(text);
    }

    /// After a read: fills up, and judges.
    fn settle(&mut self, now: Time, jobs: u32) -> Result<(), String> {
        let rate = PER_SECOND + PER_SECOND_AND_JOB * i64::from(jobs);
        let passed = i64::try_from(now.since(self.filled_at).as_micros()).unwrap_or(i64::MAX).min(1_000_000);
        let more = rate * passed / 1_000_000;
        if more > 0 {
            self.filled_at = now;
        }
        self.left = (self.left + more).min(rate);
        if self.left == rate {
            self.beyond = 0;
        }
        if self.left < 0 {
            let most = rate * PAUSE_MAX.as_millis() as i64 / 1000;
            let owed = most.min(-self.left);
            self.beyond += -self.left - owed;
            self.left = -owed;
            self.paused_until = Some(now + Duration::from_micros((owed * 1_000_000 / rate) as u64));
        }
        if self.beyond > BEYOND_MAX {
            return Err(format!(
                "it sent more than {BEYOND_MAX} frames beyond its budget that answer nothing, such as heartbeats, \
                 progress and status"
            ));
        }
        Ok(())
    }
}

impl DataPlane {
    /// Whether a link is not to be read for now.
    pub(super) fn is_paused(&self, index: LinkIndex) -> bool {
        let link = self.links.get(index);
        link.is_some_and(|link| link.notices.paused_until.is_some())
    }

    /// Tells policy what one read brought beside answers. Errors are for a worker that is to be ended.
    pub(super) fn hear_notices(&mut self, index: LinkIndex) -> Result<(), String> {
        let now = self.now;
        let link = &mut self.links[index];
        if !std::mem::take(&mut link.notices.is_heard) {
            return Ok(());
        }
        let (compartment, worker) = (link.compartment, link.worker);
        let said = link.notices.said.take();
        let jobs = self.compartments[compartment].policy.limits().max_in_flight;
        let settled = link.notices.settle(now, jobs);
        if let Some(until) = link.notices.paused_until {
            self.links.resume_by(until);
        }
        if let Some(text) = said {
            self.apply(compartment, Event::Said { worker, text }, Incoming::None);
        }
        self.apply(compartment, Event::Heard { worker }, Incoming::None);
        settled
    }

    /// Reads links again whose pause is over.
    pub(super) fn resume_links(&mut self) {
        if self.links.resume_at.is_none_or(|at| self.now < at) {
            return;
        }
        self.links.resume_at = None;
        for index in self.links.indices() {
            let Some(link) = self.links.get_mut(index) else { continue };
            match link.notices.paused_until {
                Some(until) if until <= self.now => {
                    link.notices.paused_until = None;
                    self.links.again.push(index);
                }
                Some(until) => {
                    self.links.resume_by(until);
                }
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds from the start.
    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_worker_within_its_budget_is_never_paused() {
        let mut notices = Notices::default();
        for ms in 0..100_000 {
            notices.add_job();
            // RETURNED and a heartbeat each, and a word more.
            (0..3).for_each(|_| notices.spend(8));
            notices.settle(at(ms), 1).unwrap();
            assert_eq!((notices.paused_until, notices.beyond), (None, 0), "{ms}");
        }
    }

    /// Sends so many notices a read for as long as it is read, up to an hour; returns the seconds until it is ended.
    fn flood(notices_per_read: u32) -> Option<u64> {
        let (mut notices, mut now) = (Notices::default(), at(0));
        loop {
            (0..notices_per_read).for_each(|_| notices.spend(8));
            let settled = notices.settle(now, 1);
            let seconds = now.since(Time::ZERO).as_secs();
            if settled.is_err() || seconds >= 3600 {
                return settled.is_err().then_some(seconds);
            }
            let pause = notices.paused_until.take().map_or(Duration::ZERO, |until| until.since(now));
            assert!(pause <= PAUSE_MAX);
            now = now + pause.max(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_that_is_over_it_is_read_less_often_and_one_that_floods_is_ended() {
        // As many as a socket holds if each is sent by itself.
        assert_eq!(flood(250), None);
        assert!(flood(5000).is_some_and(|seconds| (10..30).contains(&seconds)), "{:?}", flood(5000));
        // Large ones count for what they are.
        let mut notices = Notices::default();
        notices.spend(2000 * 8192);
        assert_eq!(notices.left, -1001);
    }

    #[test]
    fn a_burst_now_and_then_is_forgiven() {
        let mut notices = Notices::default();
        for burst in 0..1000 {
            (0..5000).for_each(|_| notices.spend(8));
            notices.settle(at(burst * 10_000), 1).unwrap();
            for second in 1..9 {
                notices.spend(8);
                notices.settle(at(burst * 10_000 + second * 1000), 1).unwrap();
            }
        }
    }
}

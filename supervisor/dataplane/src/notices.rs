//! Notices: frames of a worker that answer no job, such as heartbeats, progress, status, and unknown frames. Notices
//! are handled together after each read, within a budget. A worker over budget is read less often, so that further
//! frames wait in the worker's own socket. A worker far over budget counts as broken.

use std::time::Duration;

use bulkhead_policy::{Event, Time};

use super::slab::LinkIndex;
use super::{DataPlane, Incoming};

/// Number of notices that every worker can send per second. A notice of `n` bytes counts as `1 + n / 8192`.
const PER_SECOND: i64 = 1000;

/// Additional notices per second for each concurrent job: twice the SDK's rate of progress notices for a job.
const PER_SECOND_AND_JOB: i64 = 20;

/// Additional notices for each job, such as RETURNED and the heartbeat that follows.
const FOR_A_JOB: i64 = 2;

/// Maximum time for which a worker over budget is not read. During a longer pause, the worker would seem to hang.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Maximum number of notices beyond the budget and beyond what pauses compensate (see `docs/protocol.md`). A worker
/// that sends more counts as broken. The count starts again when the budget is full.
const BEYOND_MAX: i64 = 300_000;

/// Notices of a link.
pub(super) struct Notices {
    /// Remaining budget, at most one second's worth. A pause compensates for a negative value.
    left: i64,
    filled_at: Time,
    beyond: i64,
    /// The link is not read before this time.
    paused_until: Option<Time>,
    /// State of a read: true if a notice came, and the last status text.
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
    /// Adds the budget of a job.
    pub(super) fn add_job(&mut self) {
        self.left += FOR_A_JOB;
    }

    /// Charges a notice of this size.
    pub(super) fn spend(&mut self, bytes: usize) {
        self.is_heard = true;
        self.left -= 1 + (bytes / 8192) as i64;
    }

    /// Records a status text, in place of an earlier text from this read.
    pub(super) fn say(&mut self, text: String) {
        self.said = Some(text);
    }

    /// Refills the budget after a read, and starts a pause if the budget is exceeded. Returns an error if the worker
    /// counts as broken.
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
                "the worker sent more than {BEYOND_MAX} frames beyond the budget for frames that answer no \
                 job, such as heartbeats, progress and status"
            ));
        }
        Ok(())
    }
}

impl DataPlane {
    /// Returns true if the link must not be read now.
    pub(super) fn is_paused(&self, index: LinkIndex) -> bool {
        let link = self.links.get(index);
        link.is_some_and(|link| link.notices.paused_until.is_some())
    }

    /// Passes the notices of a read to policy. Returns an error message if the worker must be ended.
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
            self.apply(compartment, Event::StartStatus { worker, text }, Incoming::None);
        }
        self.apply(compartment, Event::FrameReceived { worker }, Incoming::None);
        settled
    }

    /// Reads links again when a pause is over.
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

    /// Returns the time `ms` milliseconds after the start.
    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn a_worker_within_its_budget_is_never_paused() {
        let mut notices = Notices::default();
        for ms in 0..100_000 {
            notices.add_job();
            // RETURNED, a heartbeat, and another notice.
            (0..3).for_each(|_| notices.spend(8));
            notices.settle(at(ms), 1).unwrap();
            assert_eq!((notices.paused_until, notices.beyond), (None, 0), "{ms}");
        }
    }

    /// Sends `notices_per_read` notices in each read, for up to an hour. Returns the number of seconds until the
    /// worker is ended.
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
    fn pauses_worker_over_budget_and_ends_flooding_worker() {
        // As many notices as a socket holds if each is sent by itself.
        assert_eq!(flood(250), None);
        assert!(flood(5000).is_some_and(|seconds| (10..30).contains(&seconds)), "{:?}", flood(5000));
        // Large notices count by size.
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

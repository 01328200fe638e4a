//! Notices: frames of a worker that answer no job, such as heartbeats, progress, status, and unknown frames. Notices
//! are handled together after each read, within a budget. A worker over budget is read less often, so that further
//! frames wait in the worker's own socket. A worker far over budget counts as broken.

use std::time::Duration;

use bulkhead_policy::Time;

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
const EXCESS_MAX: i64 = 300_000;

/// Notices of a link.
pub(crate) struct UnsolicitedFrames {
    /// Remaining budget, at most one second's worth. A pause compensates for a negative value.
    remaining: i64,
    filled_at: Time,
    excess: i64,
    /// The link is not read before this time.
    paused_until: Option<Time>,
    /// State of a read: true if a notice came, and the last status text.
    has_frames: bool,
    status: Option<String>,
}

impl Default for UnsolicitedFrames {
    fn default() -> Self {
        Self {
            remaining: PER_SECOND,
            filled_at: Time::ZERO,
            excess: 0,
            paused_until: None,
            has_frames: false,
            status: None,
        }
    }
}

impl UnsolicitedFrames {
    /// Adds the budget of a job.
    pub(crate) fn add_job(&mut self) {
        self.remaining += FOR_A_JOB;
    }

    /// Charges a notice of this size.
    pub(crate) fn charge(&mut self, bytes: usize) {
        self.has_frames = true;
        self.remaining -= 1 + (bytes / 8192) as i64;
    }

    /// Records a status text, in place of an earlier text from this read.
    pub(super) fn set_status(&mut self, text: String) {
        self.status = Some(text);
    }

    /// Returns true if the link must not be read now.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Returns the end of the pause, if the link must not be read now.
    pub(super) fn paused_until(&self) -> Option<Time> {
        self.paused_until
    }

    /// Ends the pause. Returns true if the pause was over.
    pub(super) fn resume(&mut self, now: Time) -> bool {
        let is_over = self.paused_until.is_some_and(|until| until <= now);
        if is_over {
            self.paused_until = None;
        }
        is_over
    }

    /// Ends a read. Returns `None` if no frames came, and otherwise the last status text, and an error message if the
    /// worker counts as broken.
    pub(super) fn end_read(&mut self, now: Time, jobs: u32) -> Option<(Option<String>, Result<(), String>)> {
        if !std::mem::take(&mut self.has_frames) {
            return None;
        }
        Some((self.status.take(), self.update_budget(now, jobs)))
    }

    /// Refills the budget after a read, and starts a pause if the budget is exceeded. Returns an error if the worker
    /// counts as broken.
    fn update_budget(&mut self, now: Time, jobs: u32) -> Result<(), String> {
        let rate = PER_SECOND + PER_SECOND_AND_JOB * i64::from(jobs);
        let passed = i64::try_from(now.since(self.filled_at).as_micros()).unwrap_or(i64::MAX).min(1_000_000);
        let more = rate * passed / 1_000_000;
        if more > 0 {
            self.filled_at = now;
        }
        self.remaining = (self.remaining + more).min(rate);
        if self.remaining == rate {
            self.excess = 0;
        }
        if self.remaining < 0 {
            let most = rate * PAUSE_MAX.as_millis() as i64 / 1000;
            let owed = most.min(-self.remaining);
            self.excess += -self.remaining - owed;
            self.remaining = -owed;
            self.paused_until = Some(now + Duration::from_micros((owed * 1_000_000 / rate) as u64));
        }
        if self.excess > EXCESS_MAX {
            return Err(format!(
                "the worker sent more than {EXCESS_MAX} frames beyond the budget for frames without a \
                 result, such as heartbeats, progress and status"
            ));
        }
        Ok(())
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
        let mut frames = UnsolicitedFrames::default();
        for ms in 0..100_000 {
            frames.add_job();
            // RETURNED, a heartbeat, and another notice.
            (0..3).for_each(|_| frames.charge(8));
            frames.update_budget(at(ms), 1).unwrap();
            assert_eq!((frames.paused_until, frames.excess), (None, 0), "{ms}");
        }
    }

    /// Sends `notices_per_read` notices in each read, for up to an hour. Returns the number of seconds until the
    /// worker is ended.
    fn flood(notices_per_read: u32) -> Option<u64> {
        let (mut frames, mut now) = (UnsolicitedFrames::default(), at(0));
        loop {
            (0..notices_per_read).for_each(|_| frames.charge(8));
            let settled = frames.update_budget(now, 1);
            let seconds = now.since(Time::ZERO).as_secs();
            if settled.is_err() || seconds >= 3600 {
                return settled.is_err().then_some(seconds);
            }
            let pause = frames.paused_until.take().map_or(Duration::ZERO, |until| until.since(now));
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
        let mut frames = UnsolicitedFrames::default();
        frames.charge(2000 * 8192);
        assert_eq!(frames.remaining, -1001);
    }

    #[test]
    fn a_burst_now_and_then_is_forgiven() {
        let mut frames = UnsolicitedFrames::default();
        for burst in 0..1000 {
            (0..5000).for_each(|_| frames.charge(8));
            frames.update_budget(at(burst * 10_000), 1).unwrap();
            for second in 1..9 {
                frames.charge(8);
                frames.update_budget(at(burst * 10_000 + second * 1000), 1).unwrap();
            }
        }
    }
}

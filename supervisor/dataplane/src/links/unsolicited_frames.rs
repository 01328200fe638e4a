//! Limits the notices from one worker. A notice is any frame other than a reply to a job: heartbeats, progress, status,
//! and frames of unknown kinds. A worker that exceeds its budget is read less often, and a worker that exceeds the
//! budget by far must be killed. This module only decides; the wiring pauses the reads and kills the worker.

use std::time::Duration;

use bulkhead_policy::Time;

/// Number of notices that a worker can send per second without being paused. A notice of `n` bytes counts as `1 + n /
/// 8192` notices.
const PER_SECOND: i64 = 1000;

/// Additional number of notices per second for each job that the worker can run concurrently. Twice the rate at which
/// the SDK reports the progress of a job.
const PER_SECOND_AND_JOB: i64 = 20;

/// Number of additional notices allowed for each job: a RETURNED frame, and the heartbeat that follows the frame.
const FOR_A_JOB: i64 = 2;

/// Maximum time for which a link is not read after the worker has exceeded its budget. After a longer pause, the worker
/// would appear to be hanging.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// Maximum number of excess notices that are not compensated by pauses (see `docs/protocol.md`). A worker that exceeds
/// this number is killed. The count is reset when the budget is full.
const EXCESS_MAX: i64 = 300_000;

/// Budget for the notices that a worker sends.
pub(crate) struct UnsolicitedFrames {
    /// Number of notices left in the worker's budget. Never exceeds the budget for one second. Reading from the link is
    /// paused while the number is negative.
    remaining: i64,
    filled_at: Time,
    excess: i64,
    /// Time at which the current pause ends. The link is not read until then.
    paused_until: Option<Time>,
    /// True if a notice arrived during the current read.
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
    /// Increases the budget by the number of notices allowed for one job.
    pub(crate) fn add_job(&mut self) {
        self.remaining += FOR_A_JOB;
    }

    /// Charges the budget for a notice with a size of `bytes`.
    pub(crate) fn charge(&mut self, bytes: usize) {
        self.has_frames = true;
        self.remaining -= 1 + (bytes / 8192) as i64;
    }

    /// Stores a worker's status text. Replaces any text received earlier in the same read.
    pub(super) fn set_status(&mut self, text: String) {
        self.status = Some(text);
    }

    /// Returns true if the link must not be read now.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Returns the time at which the pause ends, or `None` if the link can be read now.
    pub(super) fn paused_until(&self) -> Option<Time> {
        self.paused_until
    }

    /// Resumes reading if the pause is over. Returns true if reading was resumed.
    pub(super) fn resume(&mut self, now: Time) -> bool {
        let is_over = self.paused_until.is_some_and(|until| until <= now);
        if is_over {
            self.paused_until = None;
        }
        is_over
    }

    /// Completes a read. Returns `None` if no notice arrived. Otherwise, returns the last status text, if any, and an
    /// error if the worker must be killed.
    pub(super) fn end_read(&mut self, now: Time, jobs: u32) -> Option<(Option<String>, Result<(), String>)> {
        if !std::mem::take(&mut self.has_frames) {
            return None;
        }
        Some((self.status.take(), self.update_budget(now, jobs)))
    }

    /// Refills the budget after a read, and starts a pause if the budget is exceeded. Returns an error if the
    /// worker must be killed.
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

    /// Returns the point in time that is `ms` milliseconds after `Time::ZERO`.
    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn never_pauses_worker_within_its_budget() {
        let mut frames = UnsolicitedFrames::default();
        for ms in 0..100_000 {
            frames.add_job();
            // For each job, the worker sends a RETURNED frame, a heartbeat, and one other notice.
            (0..3).for_each(|_| frames.charge(8));
            frames.update_budget(at(ms), 1).unwrap();
            assert_eq!((frames.paused_until, frames.excess), (None, 0), "{ms}");
        }
    }

    /// Sends `notices_per_read` notices per read for up to one hour. Returns the number of seconds after which the
    /// worker is killed, or `None` if the worker survives.
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
    fn kills_worker_only_after_a_flood_of_notices() {
        // A full socket holds about 250 notices if each notice is sent separately.
        assert_eq!(flood(250), None);
        assert!(flood(5000).is_some_and(|seconds| (10..30).contains(&seconds)), "{:?}", flood(5000));
        // Large notices are charged by their size.
        let mut frames = UnsolicitedFrames::default();
        frames.charge(2000 * 8192);
        assert_eq!(frames.remaining, -1001);
    }

    #[test]
    fn does_not_kill_worker_after_occasional_bursts() {
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

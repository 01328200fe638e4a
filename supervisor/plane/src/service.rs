//! Service level of a bulkhead, computed from the outcomes of the last minute. The service level does not depend on the
//! state of the workers, because all workers can be ready while no job ends `ok`. Counting a job takes only a few
//! additions. The counts in the window are added up only when the level is read.

use std::collections::BTreeMap;
use std::time::Duration;

use bulkhead_api::Service;
use bulkhead_policy::Time;
use bulkhead_shared::limits::truncate;
use bulkhead_shared::text::escape;
use bulkhead_shared::{CrashReason, Fault, RejectReason, Verdict};

/// Length of a time slice. The window over which outcomes are counted consists of several slices.
const SLICE: Duration = Duration::from_secs(5);

/// Number of time slices in the window over which outcomes are counted. Together, the slices cover one minute.
const SLICES: usize = 12;

/// Number of jobs that must have ended in the last minute for the service level to differ from `ok`.
const JOBS_MIN: u64 = 10;

/// Percentage of unsuccessful jobs above which the service counts as degraded.
const DEGRADED_ABOVE_PERCENT: u64 = 5;

/// Percentage of unsuccessful jobs above which the service counts as failing.
const FAILING_ABOVE_PERCENT: u64 = 50;

/// Maximum length of a handler's error code in the explanation of a degraded service, in bytes.
const CODE_BYTES_MAX: usize = 64;

/// Maximum number of different error codes that are counted separately in a time slice.
const CODES_MAX: usize = 8;

// Indices of outcomes in the counts of a slice. `REJECTED` and `CRASHED` are the first indices for reject and crash
// reasons, whose codes start at 1 and are contiguous.
const OK: usize = 0;
const FAILED: usize = 1;
const DEADLINE_QUEUED: usize = 2;
const DEADLINE_RUNNING: usize = 3;
const REJECTED: usize = 4;
const CRASHED: usize = REJECTED + RejectReason::ALL.len();
const OUTCOMES: usize = CRASHED + CrashReason::ALL.len();

/// Returns the index of a verdict in the counts. Returns `None` if the caller is at fault, because the verdict then
/// does not affect the service level.
fn outcome_index(verdict: &Verdict) -> Option<usize> {
    match verdict {
        Verdict::Ok => Some(OK),
        Verdict::Failed(failure) => (failure.fault == Fault::Dependency).then_some(FAILED),
        Verdict::Rejected { reason, .. } => {
            (!reason.is_caller_fault()).then_some(REJECTED + usize::from(reason.code()) - 1)
        }
        Verdict::DeadlineQueued => Some(DEADLINE_QUEUED),
        Verdict::DeadlineRunning => Some(DEADLINE_RUNNING),
        Verdict::Crashed { reason, .. } => Some(CRASHED + usize::from(reason.code()) - 1),
        Verdict::Cancelled { .. } => None,
    }
}

/// Number of jobs that ended in the last minute, by outcome.
#[derive(Debug, Default)]
pub struct Window {
    /// Counts for each time slice. Allocated only when the first job ends, because in a large configuration most
    /// bulkheads are idle.
    slices: Vec<Slice>,
}

#[derive(Clone, Debug)]
struct Slice {
    /// Sequence number of the time slice. Slices older than a minute are ignored.
    number: u64,
    counts: [u32; OUTCOMES],
    /// Number of failed jobs in the slice, by error code of the handler. Only the first [`CODES_MAX`] different codes
    /// are counted separately.
    codes: Vec<(String, u32)>,
}

const EMPTY: Slice = Slice { number: 0, counts: [0; OUTCOMES], codes: Vec::new() };

fn number_of(now: Time) -> u64 {
    // The number of a slice in use is always above 0, because 0 marks an empty slice.
    now.since(Time::ZERO).as_secs() / SLICE.as_secs() + SLICES as u64
}

impl Window {
    #[inline]
    pub fn count(&mut self, now: Time, verdict: &Verdict) {
        let Some(outcome) = outcome_index(verdict) else { return };
        if self.slices.is_empty() {
            self.slices = vec![EMPTY; SLICES];
        }
        let number = number_of(now);
        let slice = &mut self.slices[number as usize % SLICES];
        if slice.number != number {
            *slice = Slice { number, ..EMPTY };
        }
        slice.counts[outcome] = slice.counts[outcome].saturating_add(1);
        if let Verdict::Failed(failure) = verdict {
            slice.count_code(truncate(&failure.code, CODE_BYTES_MAX));
        }
    }

    #[inline]
    pub fn service(&self, now: Time) -> Service {
        Totals::of(self, now).service()
    }

    /// Returns the service level, and a description of the cause unless the level is `ok`.
    pub fn service_with_cause(&self, now: Time) -> (Service, Option<String>) {
        let sum = Totals::of(self, now);
        let service = sum.service();
        (service, (service != Service::Ok).then(|| sum.cause()))
    }
}

impl Slice {
    fn count_code(&mut self, code: &str) {
        let has_room = self.codes.len() < CODES_MAX;
        match self.codes.iter_mut().find(|(known, _)| known == code) {
            Some((_, count)) => *count = count.saturating_add(1),
            None if has_room => self.codes.push((code.to_owned(), 1)),
            None => {}
        }
    }
}

struct Totals<'a> {
    counts: [u64; OUTCOMES],
    codes: BTreeMap<&'a str, u64>,
    jobs: u64,
}

impl<'a> Totals<'a> {
    fn of(window: &'a Window, now: Time) -> Self {
        let oldest = number_of(now) + 1 - SLICES as u64;
        let mut counts = [0; OUTCOMES];
        let mut codes = BTreeMap::new();
        for slice in window.slices.iter().filter(|slice| slice.number >= oldest) {
            for (sum, count) in counts.iter_mut().zip(slice.counts) {
                *sum += u64::from(count);
            }
            for (code, count) in &slice.codes {
                *codes.entry(code.as_str()).or_default() += u64::from(*count);
            }
        }
        Self { counts, codes, jobs: counts.iter().sum() }
    }

    fn not_ok(&self) -> u64 {
        self.jobs - self.counts[OK]
    }

    fn service(&self) -> Service {
        let is_above = |percent| self.not_ok() * 100 > self.jobs * percent;
        match self.jobs {
            0..JOBS_MIN => Service::Ok,
            _ if is_above(FAILING_ABOVE_PERCENT) => Service::Failing,
            _ if is_above(DEGRADED_ABOVE_PERCENT) => Service::Degraded,
            _ => Service::Ok,
        }
    }

    /// Returns a description of the most frequent outcome other than `ok`, with the reason and the number of
    /// jobs. Failed jobs with different error codes count as different outcomes.
    fn cause(&self) -> String {
        let failed = self.codes.iter().map(|(code, count)| (format!("failed/{}", escape(code)), *count));
        let uncounted = self.counts[FAILED].saturating_sub(self.codes.values().sum());
        let rest = (uncounted > 0).then(|| ("failed/other codes".to_owned(), uncounted));
        let others = self.counts.iter().enumerate().skip(FAILED + 1);
        let others = others.filter(|(_, count)| **count > 0).map(|(outcome, count)| (name(outcome), *count));
        let all = failed.chain(others).chain(rest).rev();
        let (first, most) = all.max_by_key(|(_, count)| *count).unwrap_or_default();
        let (jobs, not_ok) = (self.jobs, self.not_ok());
        let all = if not_ok > most { format!("; {not_ok} jobs were not ok") } else { String::new() };
        format!("{first}: {most} of {jobs} jobs in the last minute{all}")
    }
}

/// Returns the name of an outcome. The outcome must not be `ok` or `failed`.
fn name(outcome: usize) -> String {
    let code_of = |first: usize| u8::try_from(outcome + 1 - first).unwrap_or_default();
    match outcome {
        DEADLINE_QUEUED => "deadline_exceeded/queued".to_owned(),
        DEADLINE_RUNNING => "deadline_exceeded/running".to_owned(),
        REJECTED..CRASHED => {
            let reason = RejectReason::from_code(code_of(REJECTED));
            format!("rejected/{}", reason.map_or("", RejectReason::name))
        }
        _ => format!("crashed/{}", CrashReason::from_code(code_of(CRASHED)).map_or("", CrashReason::name)),
    }
}

#[cfg(test)]
mod tests {
    use bulkhead_shared::{Executed, HandlerFailure};

    use super::*;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    fn failed(fault: Fault) -> Verdict {
        failed_with("db_down", fault)
    }

    fn failed_with(code: &str, fault: Fault) -> Verdict {
        let code = code.to_owned();
        Verdict::Failed(HandlerFailure { code, message: String::new(), retryable: true, fault })
    }

    fn count(window: &mut Window, now: Time, verdict: &Verdict, times: usize) {
        (0..times).for_each(|_| window.count(now, verdict));
    }

    #[test]
    fn service_level_requires_at_least_ten_jobs() {
        let level = |ok: usize, late: usize| {
            let mut window = Window::default();
            count(&mut window, at(100), &Verdict::Ok, ok);
            count(&mut window, at(100), &Verdict::DeadlineRunning, late);
            assert_eq!(window.service(at(100)), window.service_with_cause(at(100)).0);
            window.service(at(100)).name()
        };
        assert_eq!((level(0, 0), level(0, 9), level(0, 10)), ("ok", "ok", "failing"));
        assert_eq!((level(19, 1), level(18, 1), level(95, 5)), ("ok", "degraded", "ok"));
        assert_eq!((level(10, 10), level(10, 11)), ("degraded", "failing"));
    }

    #[test]
    fn service_level_ignores_caller_faults() {
        let callers = [
            failed(Fault::Caller),
            Verdict::rejected(RejectReason::Invalid),
            Verdict::rejected(RejectReason::TooLarge),
            Verdict::rejected(RejectReason::NotFound),
            Verdict::rejected(RejectReason::Unauthenticated),
            Verdict::rejected(RejectReason::Forbidden),
            Verdict::rejected(RejectReason::RateLimited),
            Verdict::rejected(RejectReason::TenantQuota),
            Verdict::rejected(RejectReason::Quarantined),
            Verdict::Cancelled { executed: Executed::Yes },
        ];
        let mut window = Window::default();
        callers.iter().for_each(|verdict| count(&mut window, at(1), verdict, 100));
        assert_eq!(window.service_with_cause(at(1)), (Service::Ok, None));
        count(&mut window, at(1), &Verdict::Ok, 4);
        count(&mut window, at(1), &Verdict::rejected(RejectReason::QueueFull), 6);
        assert_eq!(window.service(at(1)), Service::Failing);
    }

    #[test]
    fn service_level_forgets_outcomes_after_a_minute() {
        let mut window = Window::default();
        count(&mut window, at(0), &failed(Fault::Dependency), 20);
        for second in 0..55 {
            assert_eq!(window.service(at(second)), Service::Failing, "{second}");
        }
        assert_eq!(window.service(at(60)), Service::Ok);
        assert_eq!(window.service(at(3600)), Service::Ok);
        // A later time slice overwrites the counts at the same index.
        count(&mut window, at(60), &Verdict::Ok, 10);
        assert_eq!(window.service(at(60)), Service::Ok);
    }

    #[test]
    fn reported_cause_is_most_frequent_failure() {
        let cause = |verdicts: &[(Verdict, usize)]| {
            let mut window = Window::default();
            verdicts.iter().for_each(|(verdict, times)| count(&mut window, at(7), verdict, *times));
            window.service_with_cause(at(7)).1.expect("no cause is given")
        };
        assert_eq!(
            cause(&[(Verdict::Ok, 9), (Verdict::DeadlineRunning, 31)]),
            "deadline_exceeded/running: 31 of 40 jobs in the last minute"
        );
        let crashed = |reason| Verdict::Crashed { reason, status: None, message: String::new() };
        assert_eq!(
            cause(&[(crashed(CrashReason::Signal), 6), (Verdict::DeadlineQueued, 5)]),
            "crashed/signal: 6 of 11 jobs in the last minute; 11 jobs were not ok"
        );
        assert!(cause(&[(failed(Fault::Dependency), 10)]).starts_with("failed/db_down: 10 of 10"));
        let failed_with = |code: &str| failed_with(code, Fault::Dependency);
        assert_eq!(
            cause(&[(failed_with("exit_3"), 9), (Verdict::DeadlineQueued, 8), (failed_with("exit_7"), 1)]),
            "failed/exit_3: 9 of 18 jobs in the last minute; 18 jobs were not ok"
        );
        // Error codes beyond the maximum number of codes are counted together.
        let many: Vec<_> = (0..20).map(|number| (failed_with(&format!("exit_{number}")), 1)).collect();
        assert!(cause(&many).starts_with("failed/other codes: 12 of 20"), "{}", cause(&many));
        for reason in RejectReason::ALL.iter().filter(|reason| !reason.is_caller_fault()) {
            let actual = cause(&[(Verdict::rejected(*reason), 10)]);
            assert!(actual.starts_with(&format!("rejected/{reason}: 10 of 10")), "{actual}");
        }
        for reason in CrashReason::ALL {
            let actual = cause(&[(crashed(reason), 10)]);
            assert!(actual.starts_with(&format!("crashed/{reason}: 10 of 10")), "{actual}");
        }
    }
}

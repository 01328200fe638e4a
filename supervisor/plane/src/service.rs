//! The service level of a bulkhead, derived from the outcomes of the last minute. This is separate from the
//! state of its workers, which can all be ready while no job ends `ok`. Counting a job costs a few additions.
//! The window is only summed when the level is read.

use std::time::Duration;

use bulkhead_api::Service;
use bulkhead_policy::Time;
use bulkhead_shared::limits::truncate;
use bulkhead_shared::{CrashReason, Fault, RejectReason, Verdict};

/// Length of one part of the window.
const PART: Duration = Duration::from_secs(5);

/// Number of parts in the window, which make up one minute.
const PARTS: usize = 12;

/// Minimum number of jobs for a level other than `ok`.
const JOBS_MIN: u64 = 10;

/// Percentages of jobs not ended `ok` above which the service is degraded or failing.
const DEGRADED_ABOVE_PERCENT: u64 = 5;
const FAILING_ABOVE_PERCENT: u64 = 50;

/// Maximum length of a handler's error code in a cause, in bytes.
const CODE_BYTES_MAX: usize = 64;

// Indices of the outcomes. Codes of reasons begin at 1 and are contiguous.
const OK: usize = 0;
const FAILED: usize = 1;
const LATE_QUEUED: usize = 2;
const LATE_RUNNING: usize = 3;
const REJECTED: usize = 4;
const CRASHED: usize = REJECTED + RejectReason::ALL.len();
const ENDS: usize = CRASHED + CrashReason::ALL.len();

/// Returns the index of a verdict, or `None` if the caller is responsible.
fn place(verdict: &Verdict) -> Option<usize> {
    match verdict {
        Verdict::Ok => Some(OK),
        Verdict::Failed(failure) => (failure.fault == Fault::Dependency).then_some(FAILED),
        Verdict::Rejected { reason, .. } => {
            (!reason.is_caller_fault()).then_some(REJECTED + usize::from(reason.code()) - 1)
        }
        Verdict::DeadlineQueued => Some(LATE_QUEUED),
        Verdict::DeadlineRunning => Some(LATE_RUNNING),
        Verdict::Crashed { reason, .. } => Some(CRASHED + usize::from(reason.code()) - 1),
        Verdict::Cancelled { .. } => None,
    }
}

/// Outcomes of the last minute.
#[derive(Debug, Default)]
pub struct Window {
    /// Allocated with the first job, because most bulkheads of a large configuration are idle.
    parts: Vec<Part>,
    /// Error code of the last failure, as given by the handler.
    code: String,
}

#[derive(Clone, Debug)]
struct Part {
    /// Number of the time slice. Parts with a number outside the window are ignored.
    number: u64,
    ends: [u32; ENDS],
}

const EMPTY: Part = Part { number: 0, ends: [0; ENDS] };

fn number_of(now: Time) -> u64 {
    // Larger than 0, so that an empty part never matches.
    now.since(Time::ZERO).as_secs() / PART.as_secs() + PARTS as u64
}

impl Window {
    #[inline]
    pub fn count(&mut self, now: Time, verdict: &Verdict) {
        let Some(place) = place(verdict) else { return };
        if self.parts.is_empty() {
            self.parts = vec![EMPTY; PARTS];
        }
        let number = number_of(now);
        let part = &mut self.parts[number as usize % PARTS];
        if part.number != number {
            *part = Part { number, ..EMPTY };
        }
        part.ends[place] = part.ends[place].saturating_add(1);
        if let Verdict::Failed(failure) = verdict {
            let code = truncate(&failure.code, CODE_BYTES_MAX);
            if self.code != code {
                self.code.replace_range(.., code);
            }
        }
    }

    #[inline]
    pub fn service(&self, now: Time) -> Service {
        Sum::of(self, now).service()
    }

    /// Returns the service level, and its cause unless the level is `ok`.
    pub fn told(&self, now: Time) -> (Service, Option<String>) {
        let sum = Sum::of(self, now);
        let service = sum.service();
        (service, (service != Service::Ok).then(|| sum.cause(&self.code)))
    }
}

struct Sum {
    ends: [u64; ENDS],
    jobs: u64,
}

impl Sum {
    fn of(window: &Window, now: Time) -> Self {
        let oldest = number_of(now) + 1 - PARTS as u64;
        let mut ends = [0; ENDS];
        for part in window.parts.iter().filter(|part| part.number >= oldest) {
            for (sum, count) in ends.iter_mut().zip(part.ends) {
                *sum += u64::from(count);
            }
        }
        Self { ends, jobs: ends.iter().sum() }
    }

    fn bad(&self) -> u64 {
        self.jobs - self.ends[OK]
    }

    fn service(&self) -> Service {
        let is_above = |percent| self.bad() * 100 > self.jobs * percent;
        match self.jobs {
            0..JOBS_MIN => Service::Ok,
            _ if is_above(FAILING_ABOVE_PERCENT) => Service::Failing,
            _ if is_above(DEGRADED_ABOVE_PERCENT) => Service::Degraded,
            _ => Service::Ok,
        }
    }

    /// Describes the most frequent bad outcome with its reason and count.
    fn cause(&self, code: &str) -> String {
        let (mut first, mut most) = (FAILED, 0);
        for (place, &count) in self.ends.iter().enumerate().skip(OK + 1) {
            if count > most {
                (first, most) = (place, count);
            }
        }
        let (jobs, bad) = (self.jobs, self.bad());
        let all = if bad > most { format!("; {bad} did not end ok") } else { String::new() };
        format!("{}: {most} of {jobs} jobs in the last minute{all}", words(first, code))
    }
}

fn words(place: usize, code: &str) -> String {
    let code_of = |first: usize| u8::try_from(place + 1 - first).unwrap_or_default();
    match place {
        FAILED => format!("failed/{code}"),
        LATE_QUEUED => "deadline_exceeded/queued".to_owned(),
        LATE_RUNNING => "deadline_exceeded/running".to_owned(),
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
        let code = "db_down".to_owned();
        Verdict::Failed(HandlerFailure { code, message: String::new(), retryable: true, fault })
    }

    fn count(window: &mut Window, now: Time, verdict: &Verdict, times: usize) {
        (0..times).for_each(|_| window.count(now, verdict));
    }

    #[test]
    fn shares_of_at_least_ten_jobs_decide() {
        let told = |ok: usize, late: usize| {
            let mut window = Window::default();
            count(&mut window, at(100), &Verdict::Ok, ok);
            count(&mut window, at(100), &Verdict::DeadlineRunning, late);
            assert_eq!(window.service(at(100)), window.told(at(100)).0);
            window.service(at(100)).name()
        };
        assert_eq!((told(0, 0), told(0, 9), told(0, 10)), ("ok", "ok", "failing"));
        assert_eq!((told(19, 1), told(18, 1), told(95, 5)), ("ok", "degraded", "ok"));
        assert_eq!((told(10, 10), told(10, 11)), ("degraded", "failing"));
    }

    #[test]
    fn the_callers_own_faults_count_neither_for_nor_against() {
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
        assert_eq!(window.told(at(1)), (Service::Ok, None));
        count(&mut window, at(1), &Verdict::Ok, 4);
        count(&mut window, at(1), &Verdict::rejected(RejectReason::QueueFull), 6);
        assert_eq!(window.service(at(1)), Service::Failing);
    }

    #[test]
    fn a_minute_later_it_is_forgotten() {
        let mut window = Window::default();
        count(&mut window, at(0), &failed(Fault::Dependency), 20);
        for second in 0..55 {
            assert_eq!(window.service(at(second)), Service::Failing, "{second}");
        }
        assert_eq!(window.service(at(60)), Service::Ok);
        assert_eq!(window.service(at(3600)), Service::Ok);
        // The ring index is reused by a later time slice.
        count(&mut window, at(60), &Verdict::Ok, 10);
        assert_eq!(window.service(at(60)), Service::Ok);
    }

    #[test]
    fn the_cause_is_the_most_frequent() {
        let cause = |verdicts: &[(Verdict, usize)]| {
            let mut window = Window::default();
            verdicts.iter().for_each(|(verdict, times)| count(&mut window, at(7), verdict, *times));
            window.told(at(7)).1.expect("it does not serve")
        };
        assert_eq!(
            cause(&[(Verdict::Ok, 9), (Verdict::DeadlineRunning, 31)]),
            "deadline_exceeded/running: 31 of 40 jobs in the last minute"
        );
        let crashed = |reason| Verdict::Crashed { reason, status: None, message: String::new() };
        assert_eq!(
            cause(&[(crashed(CrashReason::Signal), 6), (Verdict::DeadlineQueued, 5)]),
            "crashed/signal: 6 of 11 jobs in the last minute; 11 did not end ok"
        );
        assert!(cause(&[(failed(Fault::Dependency), 10)]).starts_with("failed/db_down: 10 of 10"));
        for reason in RejectReason::ALL.iter().filter(|reason| !reason.is_caller_fault()) {
            let told = cause(&[(Verdict::rejected(*reason), 10)]);
            assert!(told.starts_with(&format!("rejected/{reason}: 10 of 10")), "{told}");
        }
        for reason in CrashReason::ALL {
            let told = cause(&[(crashed(reason), 10)]);
            assert!(told.starts_with(&format!("crashed/{reason}: 10 of 10")), "{told}");
        }
    }
}

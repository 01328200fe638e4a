//! Counts the deaths of workers that had not become ready yet, by cause. With these counts, `crashes` sends operators a
//! single report instead of hundreds if a program never starts. Reports about start failures have a separate rate
//! limit, so that they do not displace reports about jobs. Policy decides whether the worker is started again.

use bulkhead_api::{Cause, CrashId};

use super::ReportLimit;

/// Maximum number of causes remembered per bulkhead. The least recent cause is discarded to make room for a new
/// cause.
const CAUSES_MAX: usize = 8;

#[derive(Debug, Default)]
pub(super) struct StartFailures {
    /// Rate limit for crash reports about start failures.
    pub(super) limit: ReportLimit,
    /// Causes for which a crash report exists, ordered by their most recent occurrence.
    seen: Vec<Seen>,
}

#[derive(Debug)]
struct Seen {
    cause: Cause,
    report: CrashId,
    count: u32,
}

impl StartFailures {
    /// Counts a start failure whose cause already has a crash report. Returns the ID of this report and the new count.
    pub(super) fn count_again(&mut self, cause: &Cause) -> Option<(CrashId, u32)> {
        let place = self.seen.iter().position(|seen| seen.cause.has_same_cause(cause))?;
        let mut seen = self.seen.remove(place);
        seen.count = seen.count.saturating_add(1);
        let counted = (seen.report, seen.count);
        self.seen.push(seen);
        Some(counted)
    }

    /// Records a new cause and its crash report.
    pub(super) fn begin(&mut self, cause: Cause, report: CrashId) {
        if self.seen.len() == CAUSES_MAX {
            self.seen.remove(0);
        }
        self.seen.push(Seen { cause, report, count: 1 });
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use bulkhead_policy::Death;

    use super::*;
    use bulkhead_plane::crash::cause_of;

    #[test]
    fn forgets_least_recently_seen_start_failure() {
        let mut failures = StartFailures::default();
        let cause = |code| cause_of(&Death::Exit(code).into()).expect("a failed start must have a cause");
        let id = |code: i32| CrashId::new(SystemTime::UNIX_EPOCH, code as u32);
        for code in 1..=8 {
            assert_eq!(failures.count_again(&cause(code)), None);
            failures.begin(cause(code), id(code));
        }
        assert_eq!(failures.count_again(&cause(1)), Some((id(1), 2)));
        assert_eq!(failures.count_again(&cause(1)), Some((id(1), 3)));
        failures.begin(cause(9), id(9));
        assert_eq!(failures.count_again(&cause(2)), None, "the cause seen least recently must be forgotten");
        assert_eq!(failures.count_again(&cause(1)), Some((id(1), 4)));
    }
}

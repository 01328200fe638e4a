//! Checks the time limits for jobs: deadlines, `run_limit`, and the target of the adaptive limit. No limit can be
//! longer than the longest deadline. Also checks `lookahead`, which has no effect with `exec`. Policy enforces the
//! limits at run time.

use std::time::Duration;

use super::Checker;
use crate::file::RawBulkhead;
use crate::keys::bulkhead::Program;
use crate::reader::Origin;
use crate::resolved::Resolved;
use crate::units;

/// Maximum time that a job can take, and the name of the key that sets this limit.
pub(super) struct LongestTime<'r>(&'static str, &'r Resolved<Duration>);

impl Checker<'_> {
    pub(super) fn check_deadlines<'r>(
        &mut self,
        raw: &RawBulkhead,
        deadline: &'r Resolved<Duration>,
        max: &'r Resolved<Duration>,
    ) -> LongestTime<'r> {
        if raw.deadline_max.is_absent() {
            return LongestTime("deadline", deadline);
        }
        self.ordered(("deadline", deadline), ("deadline_max", max), units::duration_literal);
        LongestTime("deadline_max", max)
    }

    /// Checks `run_limit`. Ignores a value in `[defaults]` for bulkheads whose deadline is shorter.
    pub(super) fn run_limit(
        &mut self,
        raw: &RawBulkhead,
        &LongestTime(name, longest): &LongestTime<'_>,
    ) -> Option<Duration> {
        let given = raw.run_limit.given()?;
        if given.value <= longest.value {
            return Some(given.value);
        }
        if given.origin != Origin::Defaults || !longest.is_own() {
            let limit = raw.run_limit.resolved(given.value);
            self.ordered(("run_limit", &limit), (name, longest), units::duration_literal);
        }
        None
    }

    /// Rejects an adaptive target above the longest time that a job can take. With such a target, the adaptive limit
    /// would never decrease.
    pub(super) fn check_target(&mut self, raw: &RawBulkhead, &LongestTime(name, longest): &LongestTime<'_>) {
        let Some(given) = raw.adaptive.target.given() else { return };
        let target = raw.adaptive.target.resolved(given.value);
        self.ordered(("adaptive.target", &target), (name, longest), units::duration_literal);
    }

    /// Checks `lookahead`, which has no effect with `exec`. Bulkheads with `exec` ignore a value in `[defaults]`.
    pub(super) fn lookahead(&mut self, raw: &RawBulkhead, program: &Program) -> Duration {
        let lookahead = raw.lookahead.resolved();
        if !matches!(program, Program::Exec { .. }) {
            return lookahead.value;
        }
        if let Some(given) = raw.lookahead.field.given()
            && given.origin == Origin::Own
            && !given.value.is_zero()
        {
            self.problems.report(
                given.span.clone(),
                "`lookahead` has no effect with `exec`: each job runs a new program, so no job can be prefetched",
                "remove `lookahead`",
            );
        }
        Duration::ZERO
    }
}

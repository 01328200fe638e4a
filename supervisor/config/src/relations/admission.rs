//! What spans the keys of admission control: a table that says too little, and what only a queue can use.

use super::{Checker, leaf};
use crate::key::{self, Key};
use crate::keys::admission::{BreakerKeys, PressureKeys, PriorityKeys, RateLimitKeys};
use crate::reader::{Field, Origin};
use crate::resolved::{Resolved, blame};
use crate::schema;
use crate::table::{ByRows as _, WithDefault};
use crate::units;
use crate::{BreakerConfig, Overflow, PressureConfig, PriorityConfig, RateLimitConfig};

impl Checker<'_> {
    pub(super) fn priority(&mut self, raw: &PriorityKeys) -> Option<PriorityConfig> {
        let critical_reserve =
            self.required(&raw.here, key::PRIORITY, ("critical_reserve", &raw.critical_reserve))?;
        Some(PriorityConfig { critical_reserve })
    }

    pub(super) fn overflow(&mut self, raw: &WithDefault<Overflow>, queue: &Resolved<u32>) -> Overflow {
        let overflow = raw.resolved();
        if overflow.value == Overflow::EvictOldest
            && queue.value == 0
            && let Some(place) = blame(&overflow, queue)
        {
            self.problems.report(
                place,
                format!(
                    "`overflow` ({}) needs a queue (`max_queue` is {})",
                    overflow.told(format_args!("\"{}\"", overflow.value.name())),
                    queue.told(0)
                ),
                format!("write `max_queue = 1` or more, or `overflow = \"{}\"`", Overflow::Reject.name()),
            );
        }
        overflow.value
    }

    /// In `[defaults]` it is for those bulkheads that have a queue.
    pub(super) fn pressure(&mut self, raw: &PressureKeys, queue: &Resolved<u32>) -> PressureConfig {
        if raw.here.given().is_some_and(|here| here.origin == Origin::Own)
            && queue.value == 0
            && let Some(place) = blame(&raw.here.resolved(()), queue)
        {
            self.problems.report(
                place,
                format!("`pressure` needs a queue (`max_queue` is {})", queue.told(0)),
                "write `max_queue = 1` or more, or remove `pressure`",
            );
        }
        let reject = raw.reject.resolved();
        // A file that asks for an early rejection has not asked for a late warning.
        let warn = raw.warn.field.resolved(raw.warn.default.min(reject.value));
        self.ordered(("pressure.warn", &warn), ("pressure.reject", &reject), units::share_literal);
        PressureConfig { warn: warn.value, reject: reject.value }
    }

    pub(super) fn rate_limit(&mut self, raw: &RateLimitKeys) -> Option<RateLimitConfig> {
        let per_second = self.required(&raw.here, key::RATE_LIMIT, ("per_second", &raw.per_second))?;
        let burst = burst(&raw.burst, per_second);
        Some(RateLimitConfig { per_second, burst, per: raw.per.value() })
    }

    pub(super) fn breaker(&mut self, raw: &BreakerKeys) -> Option<BreakerConfig> {
        if let Some(slow_rate) = raw.slow_rate.given()
            && raw.slow_call.is_absent()
        {
            self.problems.report(
                slow_rate.span.clone(),
                "`breaker.slow_rate` needs `breaker.slow_call`: it says which jobs are slow",
                "add `slow_call = \"1s\"`, or remove `slow_rate`",
            );
        }
        raw.checked_if_here()
    }

    /// The one key without which a table says nothing.
    pub(super) fn required<T: Clone>(
        &mut self,
        here: &Field<()>,
        table: &'static str,
        (name, field): (&'static str, &Field<T>),
    ) -> Option<T> {
        let here = here.given()?;
        if field.is_absent() {
            let table_name = leaf(table);
            let example = schema::find(table, name).as_ref().map(Key::example).unwrap_or_default();
            self.problems.report(
                here.span.clone(),
                format!("`{table_name}` needs `{name}`"),
                format!("add `{name} = {example}`, or remove `{table_name}`"),
            );
        }
        field.value()
    }
}

/// What may come at once at a rate that is known. `RATE_CEILING` bounds the one as the other, and fits.
pub(super) fn burst(burst: &Field<u32>, per_second: f64) -> u32 {
    burst.value_or(per_second.ceil() as u32)
}

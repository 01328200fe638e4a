//! What spans the keys of admission control: a table that says too little, and what only a queue can use.

use super::{Checker, leaf};
use crate::checked::*;
use crate::defaults;
use crate::raw::{RawBreaker, RawPoison, RawPressure, RawPriority, RawRateLimit, RawRetry};
use crate::reader::{Field, Origin};
use crate::schema::{self, Key};
use crate::settled::{Settled, blame};
use crate::units;

impl Checker<'_> {
    pub(super) fn priority(&mut self, raw: &RawPriority) -> Option<PriorityConfig> {
        let critical_reserve =
            self.required(&raw.here, schema::PRIORITY, ("critical_reserve", &raw.critical_reserve))?;
        Some(PriorityConfig { critical_reserve })
    }

    pub(super) fn overflow(&mut self, raw: &Field<&'static str>, queue: &Settled<u64>) -> Overflow {
        let word = raw.settle(defaults::OVERFLOW);
        let overflow = Overflow::ALL.into_iter().find(|overflow| overflow.name() == word.value);
        if overflow == Some(Overflow::EvictOldest)
            && queue.value == 0
            && let Some(place) = blame(&word, queue)
        {
            self.problems.report(
                place,
                format!(
                    "`overflow` ({}) needs a queue (`max_queue` is {})",
                    word.told(format_args!("\"{}\"", word.value)),
                    queue.told(0)
                ),
                format!("write `max_queue = 1` or more, or `overflow = \"{}\"`", Overflow::Reject.name()),
            );
        }
        overflow.unwrap_or(Overflow::Reject)
    }

    /// In `[defaults]` it is for those bulkheads that have a queue.
    pub(super) fn pressure(&mut self, raw: &RawPressure, queue: &Settled<u64>) -> PressureConfig {
        if raw.here.given().is_some_and(|here| here.origin == Origin::Own)
            && queue.value == 0
            && let Some(place) = blame(&raw.here.settle(()), queue)
        {
            self.problems.report(
                place,
                format!("`pressure` needs a queue (`max_queue` is {})", queue.told(0)),
                "write `max_queue = 1` or more, or remove `pressure`",
            );
        }
        let reject = raw.reject.settle(defaults::PRESSURE_REJECT);
        // Whoever asks for an early rejection has not asked for a late warning.
        let warn = raw.warn.settle(defaults::PRESSURE_WARN.min(reject.value));
        self.ordered(("pressure.warn", &warn), ("pressure.reject", &reject), units::share_literal);
        PressureConfig { warn: warn.value, reject: reject.value }
    }

    pub(super) fn rate_limit(&mut self, raw: &RawRateLimit) -> Option<RateLimitConfig> {
        let per_second = self.required(&raw.here, schema::RATE_LIMIT, ("per_second", &raw.per_second))?;
        let per = raw.per.value_or(defaults::RATE_PER);
        let per = RatePer::ALL.into_iter().find(|who| who.name() == per).unwrap_or(RatePer::Bulkhead);
        Some(raw.limit(per_second, per))
    }

    pub(super) fn breaker(&mut self, raw: &RawBreaker) -> Option<BreakerConfig> {
        if let Some(slow_rate) = raw.slow_rate.given()
            && raw.slow_call.is_absent()
        {
            self.problems.report(
                slow_rate.span.clone(),
                "`breaker.slow_rate` needs `breaker.slow_call`: it says which jobs are slow",
                "add `slow_call = \"1s\"`, or remove `slow_rate`",
            );
        }
        raw.here.given()?;
        Some(BreakerConfig {
            window: raw.window.value_or(defaults::BREAKER_WINDOW),
            min_calls: raw.min_calls.value_or(defaults::BREAKER_MIN_CALLS) as u32,
            failure_rate: raw.failure_rate.value_or(defaults::BREAKER_FAILURE_RATE),
            slow_call: raw.slow_call.optional(),
            slow_rate: raw.slow_rate.value_or(defaults::BREAKER_SLOW_RATE),
            open_for: raw.open_for.value_or(defaults::BREAKER_OPEN_FOR),
            probes: raw.probes.value_or(defaults::BREAKER_PROBES) as u32,
        })
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
        field.optional()
    }
}

impl RawRateLimit {
    /// The limit for a rate that is known.
    pub(super) fn limit(&self, per_second: f64, per: RatePer) -> RateLimitConfig {
        // `RATE_CEILING` bounds the one as the other, and fits.
        let burst = self.burst.value_or(per_second.ceil() as u64) as u32;
        RateLimitConfig { per_second, burst, per }
    }
}

pub(super) fn retry(raw: &RawRetry) -> Option<RetryConfig> {
    raw.here.given()?;
    Some(RetryConfig {
        attempts: raw.attempts.value_or(defaults::RETRY_ATTEMPTS) as u32,
        budget: raw.budget.value_or(defaults::RETRY_BUDGET),
    })
}

pub(super) fn poison(raw: &RawPoison) -> Option<PoisonConfig> {
    raw.here.given()?;
    Some(PoisonConfig {
        crashes: raw.crashes.value_or(defaults::POISON_CRASHES) as u32,
        within: raw.within.value_or(defaults::POISON_WITHIN),
    })
}

//! Checks the keys for admission control, including required keys, keys that need a queue, and limits that depend on
//! the number of permits. `relations` calls these checks for each bulkhead. The data plane uses the same messages for
//! live changes, and the `policy` crate applies the limits.

use std::fmt::Display;

use super::{Checker, Permits, key_name};
use crate::key::Key;
use crate::keys::admission::{AdaptiveKeys, BreakerKeys, PressureKeys, PriorityKeys, RateLimitKeys};
use crate::reader::{Field, Origin};
use crate::resolved::{Resolved, report_position, report_position_of};
use crate::schema;
use crate::table::{ByRows as _, Table as _, WithDefault};
use crate::units;
use crate::{AdaptiveConfig, BreakerConfig, Overflow, PressureConfig, PriorityConfig, RateLimitConfig};

/// Returns the error message and help text for an `overflow` key in a bulkhead without a queue. The key can be in a
/// configuration file or in a live change.
pub fn overflow_needs_queue(overflow: impl Display, queue: impl Display) -> (String, String) {
    (
        format!("`overflow` ({overflow}) needs a queue (`max_queue` is {queue})"),
        format!("write `max_queue = 1` or more, or `overflow = \"{}\"`", Overflow::Reject.name()),
    )
}

/// Returns the error message and help text for a `pressure` table in a bulkhead without a queue.
pub fn pressure_needs_queue(queue: impl Display) -> (String, String) {
    (
        format!("`pressure` needs a queue (`max_queue` is {queue})"),
        "write `max_queue = 1` or more, or remove `pressure`".to_owned(),
    )
}

impl PressureKeys {
    /// Returns true if `pressure` is set in the bulkhead's own table rather than in `[defaults]`.
    pub(super) fn is_own(&self) -> bool {
        self.presence.given().is_some_and(|presence| presence.origin == Origin::Own)
    }
}

impl Checker<'_> {
    pub(super) fn priority(&mut self, raw: &PriorityKeys) -> Option<PriorityConfig> {
        let critical_reserve =
            self.required(&raw.presence, PriorityKeys::PATH, ("critical_reserve", &raw.critical_reserve))?;
        Some(PriorityConfig { critical_reserve })
    }

    pub(super) fn overflow(&mut self, raw: &WithDefault<Overflow>, queue: &Resolved<u32>) -> Overflow {
        let overflow = raw.resolved();
        if overflow.value == Overflow::EvictOldest
            && queue.value == 0
            && let Some(position) = report_position(&overflow, queue)
        {
            let overflow = overflow.with_origin(format_args!("\"{}\"", overflow.value.name()));
            let (what, help) = overflow_needs_queue(overflow, queue.with_origin(0));
            self.problems.report(position, what, help);
        }
        overflow.value
    }

    /// Checks that a bulkhead with its own `pressure` table has a queue. A `pressure` table in `[defaults]` applies
    /// only to bulkheads with a queue.
    pub(super) fn pressure(&mut self, raw: &PressureKeys, queue: &Resolved<u32>) -> PressureConfig {
        if raw.is_own()
            && queue.value == 0
            && let Some(position) = report_position(&raw.presence.resolved(()), queue)
        {
            let (what, help) = pressure_needs_queue(queue.with_origin(0));
            self.problems.report(position, what, help);
        }
        let reject = raw.reject.resolved();
        // Jobs are already rejected at the level `reject`, so a warning above this level would come too late. The
        // default of `warn` is therefore at most `reject`.
        let warn = raw.warn.field.resolved(raw.warn.default.min(reject.value));
        self.ordered(("pressure.warn", &warn), ("pressure.reject", &reject), units::share_literal);
        PressureConfig { warn: warn.value, reject: reject.value }
    }

    pub(super) fn rate_limit(&mut self, raw: &RateLimitKeys) -> Option<RateLimitConfig> {
        let per_second =
            self.required(&raw.presence, RateLimitKeys::PATH, ("per_second", &raw.per_second))?;
        let burst = burst(&raw.burst, per_second);
        Some(RateLimitConfig { per_second, burst, per: raw.per.value() })
    }

    pub(super) fn breaker(&mut self, raw: &BreakerKeys) -> Option<BreakerConfig> {
        if let Some(slow_rate) = raw.slow_rate.given()
            && raw.slow_call.is_absent()
        {
            self.problems.report(
                slow_rate.span.clone(),
                "`breaker.slow_rate` needs `breaker.slow_call`, which sets when a job counts as slow",
                "add `slow_call = \"1s\"`, or remove `slow_rate`",
            );
        }
        raw.checked_if_present()
    }

    pub(super) fn adaptive(&mut self, raw: &AdaptiveKeys) -> Option<AdaptiveConfig> {
        let max = self.required(&raw.presence, AdaptiveKeys::PATH, ("max", &raw.max));
        let target = self.required(&raw.presence, AdaptiveKeys::PATH, ("target", &raw.target));
        let (max, target) = (max?, target?);
        let min = raw.min.resolved();
        self.ordered(("adaptive.min", &min), ("adaptive.max", &raw.max.resolved(max)), |count| {
            count.to_string()
        });
        Some(AdaptiveConfig { min: min.value, max, target, mode: raw.mode.value() })
    }

    /// Checks that the maximum of the adaptive limit does not exceed the number of permits.
    pub(super) fn check_adaptive(&mut self, raw: &AdaptiveKeys, permits: &Permits) {
        let Some(max) = raw.max.given() else { return };
        let Permits {
            processes: (processes_name, processes), in_flight: (in_flight_name, in_flight), ..
        } = permits;
        let most = u64::from(processes.value) * u64::from(in_flight.value);
        if u64::from(max.value) <= most {
            return;
        }
        let max = raw.max.resolved(max.value);
        let Some(position) = report_position_of(&[&max, processes, in_flight]) else { return };
        let help = match most {
            0 => "write `max_in_flight = 1` or more, or remove `adaptive`".to_owned(),
            most => format!("set `max` to at most {most}, or raise `processes` or `max_in_flight`"),
        };
        self.problems.report(
            position,
            format!(
                "`adaptive.max` ({}) exceeds `{processes_name}` ({}) × `{in_flight_name}` ({})",
                max.with_origin(max.value),
                processes.with_origin(processes.value),
                in_flight.with_origin(in_flight.value)
            ),
            help,
        );
    }

    /// Returns the value of a key that its table requires. Reports an error if the table is present without the key.
    pub(super) fn required<T: Clone>(
        &mut self,
        presence: &Field<()>,
        table: &'static str,
        (name, field): (&'static str, &Field<T>),
    ) -> Option<T> {
        let presence = presence.given()?;
        if field.is_absent() {
            let table_name = key_name(table);
            let example = schema::find(table, name).as_ref().map(Key::example).unwrap_or_default();
            self.problems.report(
                presence.span.clone(),
                format!("`{table_name}` needs `{name}`"),
                format!("add `{name} = {example}`, or remove `{table_name}`"),
            );
        }
        field.value()
    }
}

/// Returns the burst size. By default, a burst is the number of jobs that the rate allows in one second. The result
/// fits in 32 bits, because `RATE_CEILING` limits both the rate and the burst.
pub(super) fn burst(burst: &Field<u32>, per_second: f64) -> u32 {
    burst.value_or(per_second.ceil() as u32)
}

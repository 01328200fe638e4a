//! Determines which metric series are possible under a bulkhead's configuration. A possible series is exported from the
//! start, because Prometheus can compute a rate only if there is a zero before the first count. All other series are
//! omitted as long as they are zero.

use bulkhead_config::TenantConfig;
use bulkhead_policy::{BreakerState, Limits, Overflow, RestartCause};
use bulkhead_shared::{Priority, RejectReason};

/// Features and rejection reasons that can occur in a bulkhead. They determine which metric series exist.
#[derive(Clone, Copy, Debug, Default)]
pub struct PossibleSeries {
    /// True if the configuration contains `[[access]]`, so that jobs can be rejected as `forbidden`.
    pub has_access: bool,
    /// True if the bulkhead has fallbacks. Its jobs can then be rejected for any reason that is possible in a fallback.
    pub has_fallback: bool,
    /// True if another bulkhead uses this bulkhead as a fallback.
    pub has_guests: bool,
    pub has_spares: bool,
    /// True if an operator has ever forced the breaker open. This is possible even without a `breaker` table.
    pub was_opened: bool,
    has_breaker: bool,
    has_poison: bool,
    has_rate: bool,
    has_quota: bool,
    has_pressure: bool,
    has_queue_timeout: bool,
    evicts: bool,
    recycles: [bool; 3],
}

impl PossibleSeries {
    /// Determines the possible metric series from the bulkhead's limits and its per-tenant limits.
    pub fn new<'t>(limits: &Limits, own: impl IntoIterator<Item = &'t TenantConfig>) -> Self {
        let (tenants, recycle) = (&limits.tenants, &limits.recycle);
        let mut possible = Self {
            has_spares: limits.start.spares > 0,
            has_breaker: limits.breaker.is_some(),
            has_poison: limits.poison.is_some(),
            has_rate: limits.rate_limit.is_some(),
            has_quota: tenants.max_in_flight.is_some() || tenants.max_queue.is_some(),
            has_pressure: limits.pressure.reject < 1.0,
            has_queue_timeout: limits.queue_timeout.is_some(),
            evicts: limits.overflow == Overflow::EvictOldest,
            recycles: [recycle.jobs.is_some(), recycle.rss.is_some(), recycle.age.is_some()],
            ..Self::default()
        };
        for tenant in own {
            possible.has_rate |= tenant.rate_limit.is_some();
            possible.has_quota |= tenant.max_in_flight.is_some() || tenant.max_queue.is_some();
        }
        possible
    }

    /// Adds the series that are possible under another configuration of the bulkhead. Series are never removed, so that
    /// no exported series disappears after a reload.
    pub fn add(&mut self, other: &Self) {
        self.has_access |= other.has_access;
        self.has_fallback |= other.has_fallback;
        self.has_guests |= other.has_guests;
        self.has_spares |= other.has_spares;
        self.was_opened |= other.was_opened;
        self.has_breaker |= other.has_breaker;
        self.has_poison |= other.has_poison;
        self.has_rate |= other.has_rate;
        self.has_quota |= other.has_quota;
        self.has_pressure |= other.has_pressure;
        self.has_queue_timeout |= other.has_queue_timeout;
        self.evicts |= other.evicts;
        for (possible, other) in self.recycles.iter_mut().zip(other.recycles) {
            *possible |= other;
        }
    }

    /// Returns true if jobs of this priority can be rejected for this reason.
    pub fn can_reject(&self, priority: Priority, reason: RejectReason) -> bool {
        use RejectReason::*;
        match reason {
            // Jobs rejected for these reasons are not counted for any bulkhead, because the bulkhead does not exist or
            // the client was not admitted.
            NotFound | Unauthenticated => false,
            // Any job that is not critical can be displaced by a more important job, either in this bulkhead or in a
            // fallback.
            Shed => priority != Priority::Critical,
            Forbidden => self.has_access,
            _ if self.has_fallback => true,
            RateLimited => self.has_rate,
            TenantQuota => self.has_quota,
            Backpressure => self.has_pressure && priority != Priority::Critical,
            QueueTimeout => self.has_queue_timeout,
            Evicted => self.evicts,
            CircuitOpen => self.has_breaker || self.was_opened,
            Quarantined => self.has_poison,
            Invalid | TooLarge | QueueFull | Draining | Unavailable | Overloaded => true,
        }
    }

    /// Returns true if a newer job can evict a queued job.
    pub fn can_evict(&self) -> bool {
        self.evicts
    }

    /// Returns true if workers can be restarted for this cause.
    pub fn can_restart(&self, cause: RestartCause) -> bool {
        let [jobs, memory, age] = self.recycles;
        match cause {
            RestartCause::Jobs => jobs,
            RestartCause::Memory => memory,
            RestartCause::Age => age,
            _ => true,
        }
    }

    /// Returns true if the breaker can be in this state. An operator can open the breaker even without a `breaker`
    /// table.
    pub fn can_be(&self, state: BreakerState) -> bool {
        self.has_breaker || matches!(state, BreakerState::Closed | BreakerState::ForcedOpen)
    }

    /// Returns true if this breaker transition is possible.
    pub fn can_change(&self, from: BreakerState, to: BreakerState) -> bool {
        use BreakerState::*;
        let is_transition = match (from, to) {
            (Closed, HalfOpen) | (ForcedOpen, Open | HalfOpen) => false,
            _ => from != to,
        };
        is_transition && self.can_be(from) && self.can_be(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_policy::BreakerLimits;
    use std::time::Duration;

    fn reasons(possible: &PossibleSeries, priority: Priority) -> Vec<&'static str> {
        let is_possible = |reason: &&RejectReason| possible.can_reject(priority, **reason);
        RejectReason::ALL.iter().filter(is_possible).map(|reason| reason.name()).collect()
    }

    #[test]
    fn metrics_omit_series_that_cannot_occur() {
        let always = ["invalid", "too_large", "queue_full", "draining", "unavailable", "overloaded"];
        let plain = PossibleSeries::new(&Limits::default(), []);
        assert_eq!(reasons(&plain, Priority::Critical), always);
        assert_eq!(reasons(&plain, Priority::Normal).len(), always.len() + 1, "normal jobs can also be shed");
        let opened = PossibleSeries { was_opened: true, ..plain };
        assert!(opened.can_reject(Priority::Normal, RejectReason::CircuitOpen));
        let transitions = |possible: &PossibleSeries| {
            let all = BreakerState::ALL;
            all.iter().flat_map(|from| all.iter().filter(|to| possible.can_change(*from, **to))).count()
        };
        assert_eq!(transitions(&plain), 2);
        let limits = BreakerLimits {
            window: Duration::from_secs(10),
            min_calls: 1,
            failure_rate: 1.0,
            slow_call: None,
            slow_rate: 1.0,
            open_for: Duration::from_secs(1),
            probes: 1,
        };
        let breaker = PossibleSeries::new(&Limits { breaker: Some(limits), ..Limits::default() }, []);
        assert_eq!(transitions(&breaker), 9);
        assert!(reasons(&breaker, Priority::Critical).contains(&"circuit_open"));
        let own = TenantConfig { max_queue: Some(1), ..TenantConfig::default() };
        assert!(
            reasons(&PossibleSeries::new(&Limits::default(), [&own]), Priority::Normal)
                .contains(&"tenant_quota")
        );
        let elsewhere = PossibleSeries { has_fallback: true, ..plain };
        assert!(reasons(&elsewhere, Priority::Normal).contains(&"quarantined"));
        let mut reloaded = plain;
        reloaded.add(&breaker);
        assert_eq!(transitions(&reloaded), 9, "reported transitions must stay");
    }
}

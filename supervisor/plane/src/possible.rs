//! What can be counted of a bulkhead as it is configured: a series that cannot grow is not told while it is zero. Each
//! that can is told from the start, since what has no zero before its first count has no rate.

use bulkhead_config::TenantConfig;
use bulkhead_policy::{BreakerState, Limits, Overflow, RestartCause};
use bulkhead_shared::{Priority, RejectReason};

/// What can happen in a bulkhead.
#[derive(Clone, Copy, Debug, Default)]
pub struct Possible {
    /// Its clients may not do everything.
    pub has_access: bool,
    /// It has fallbacks, so that its jobs can meet what is configured there.
    pub has_fallback: bool,
    /// It is a fallback.
    pub has_guests: bool,
    pub has_spares: bool,
    /// An operator has opened its breaker, which may not be configured.
    pub was_opened: bool,
    has_breaker: bool,
    has_poison: bool,
    has_rate: bool,
    has_shares: bool,
    has_pressure: bool,
    has_queue_timeout: bool,
    evicts: bool,
    recycles: [bool; 3],
}

impl Possible {
    /// By the numbers of the bulkhead, and those that single tenants have in place of them.
    pub fn new<'t>(limits: &Limits, own: impl IntoIterator<Item = &'t TenantConfig>) -> Self {
        let (tenants, recycle) = (&limits.tenants, &limits.recycle);
        let mut possible = Self {
            has_spares: limits.start.spares > 0,
            has_breaker: limits.breaker.is_some(),
            has_poison: limits.poison.is_some(),
            has_rate: limits.rate_limit.is_some(),
            has_shares: tenants.max_in_flight.is_some() || tenants.max_queue.is_some(),
            has_pressure: limits.pressure.reject < 1.0,
            has_queue_timeout: limits.queue_timeout.is_some(),
            evicts: limits.overflow == Overflow::EvictOldest,
            recycles: [recycle.jobs.is_some(), recycle.rss.is_some(), recycle.age.is_some()],
            ..Self::default()
        };
        for tenant in own {
            possible.has_rate |= tenant.rate_limit.is_some();
            possible.has_shares |= tenant.max_in_flight.is_some() || tenant.max_queue.is_some();
        }
        possible
    }

    /// What was possible before stays so: no series that was told goes because of a reload.
    pub fn add(&mut self, other: &Self) {
        self.has_access |= other.has_access;
        self.has_fallback |= other.has_fallback;
        self.has_guests |= other.has_guests;
        self.has_spares |= other.has_spares;
        self.was_opened |= other.was_opened;
        self.has_breaker |= other.has_breaker;
        self.has_poison |= other.has_poison;
        self.has_rate |= other.has_rate;
        self.has_shares |= other.has_shares;
        self.has_pressure |= other.has_pressure;
        self.has_queue_timeout |= other.has_queue_timeout;
        self.evicts |= other.evicts;
        for (own, others) in self.recycles.iter_mut().zip(other.recycles) {
            *own |= others;
        }
    }

    /// Whether jobs of this priority can be rejected for this.
    pub fn rejects(&self, priority: Priority, reason: RejectReason) -> bool {
        use RejectReason::*;
        match reason {
            // A job for a bulkhead that there is not, or of a client that was not let in, belongs to no bulkhead.
            NotFound | Unauthenticated => false,
            // By a more important one, at its own bulkhead or at a fallback.
            Shed => priority != Priority::Critical,
            Forbidden => self.has_access,
            _ if self.has_fallback => true,
            RateLimited => self.has_rate,
            TenantQuota => self.has_shares,
            Backpressure => self.has_pressure && priority != Priority::Critical,
            QueueTimeout => self.has_queue_timeout,
            Evicted => self.evicts,
            CircuitOpen => self.has_breaker || self.was_opened,
            Quarantined => self.has_poison,
            Invalid | TooLarge | QueueFull | Draining | Unavailable | Overloaded => true,
        }
    }

    /// Whether a job can have to leave the queue for a newer one.
    pub fn evicts(&self) -> bool {
        self.evicts
    }

    /// Whether a worker can follow another for this.
    pub fn restarts(&self, cause: RestartCause) -> bool {
        let [jobs, memory, age] = self.recycles;
        match cause {
            RestartCause::Jobs => jobs,
            RestartCause::Memory => memory,
            RestartCause::Age => age,
            _ => true,
        }
    }

    /// Whether the breaker can be in this state: without one, operators can open it all the same.
    pub fn is_state(&self, state: BreakerState) -> bool {
        self.has_breaker || matches!(state, BreakerState::Closed | BreakerState::ForcedOpen)
    }

    /// Whether the breaker can go from one state to the other.
    pub fn goes(&self, from: BreakerState, to: BreakerState) -> bool {
        use BreakerState::*;
        let is_a_way = match (from, to) {
            (Closed, HalfOpen) | (ForcedOpen, Open | HalfOpen) => false,
            _ => from != to,
        };
        is_a_way && self.is_state(from) && self.is_state(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_policy::BreakerLimits;
    use std::time::Duration;

    fn reasons(possible: &Possible, priority: Priority) -> Vec<&'static str> {
        let is_possible = |reason: &&RejectReason| possible.rejects(priority, **reason);
        RejectReason::ALL.iter().filter(is_possible).map(|reason| reason.name()).collect()
    }

    #[test]
    fn what_is_not_configured_cannot_happen() {
        let always = ["invalid", "too_large", "queue_full", "draining", "unavailable", "overloaded"];
        let plain = Possible::new(&Limits::default(), []);
        assert_eq!(reasons(&plain, Priority::Critical), always);
        assert_eq!(reasons(&plain, Priority::Normal).len(), always.len() + 1, "and shed");
        let opened = Possible { was_opened: true, ..plain };
        assert!(opened.rejects(Priority::Normal, RejectReason::CircuitOpen));
        let ways = |possible: &Possible| {
            let all = BreakerState::ALL;
            all.iter().flat_map(|from| all.iter().filter(|to| possible.goes(*from, **to))).count()
        };
        assert_eq!(ways(&plain), 2);
        let limits = BreakerLimits {
            window: Duration::from_secs(10),
            min_calls: 1,
            failure_rate: 1.0,
            slow_call: None,
            slow_rate: 1.0,
            open_for: Duration::from_secs(1),
            probes: 1,
        };
        let breaker = Possible::new(&Limits { breaker: Some(limits), ..Limits::default() }, []);
        assert_eq!(ways(&breaker), 9);
        assert!(reasons(&breaker, Priority::Critical).contains(&"circuit_open"));
        let own = TenantConfig { max_queue: Some(1), ..TenantConfig::default() };
        assert!(
            reasons(&Possible::new(&Limits::default(), [&own]), Priority::Normal).contains(&"tenant_quota")
        );
        let elsewhere = Possible { has_fallback: true, ..plain };
        assert!(reasons(&elsewhere, Priority::Normal).contains(&"quarantined"));
        let mut reloaded = plain;
        reloaded.add(&breaker);
        assert_eq!(ways(&reloaded), 9, "what was told stays");
    }
}

//! Distributes the permits for one bulkhead's jobs to lanes, in the order of the requests. If tenants are isolated, a
//! job also needs a permit of the job's tenant. `supervisor` sets the number of permits to follow the supervisor's
//! limit. `pulls` returns a message that gets no permit in time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Number of jobs per tenant that can wait for a permit even if the tenant has no permits.
const WAITERS_MIN: usize = 4;

/// A set of permits whose size can be changed.
#[derive(Debug)]
pub(crate) struct Permits {
    semaphore: Arc<Semaphore>,
    state: Arc<Mutex<State>>,
    usage: Arc<Usage>,
}

/// Usage counters of a set of permits.
#[derive(Debug, Default)]
struct Usage {
    in_use: AtomicUsize,
    /// Number of times that a permit was acquired or returned.
    moves: AtomicU64,
    moved: Notify,
    /// Number of jobs that wait for a permit in separate tasks, so that they do not block the lanes.
    waiters: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    limit: usize,
    /// Number of permits in use that will be removed when they are returned.
    surplus: usize,
}

/// A permit for one job.
#[derive(Debug)]
pub(crate) struct Permit {
    permit: Option<OwnedSemaphorePermit>,
    state: Arc<Mutex<State>>,
    usage: Arc<Usage>,
}

/// The permits of a bulkhead's isolated tenants. Without these, the jobs of one tenant could occupy all permits of the
/// bulkhead, even though other tenants have idle workers.
#[derive(Debug, Default)]
pub(crate) struct TenantPermits {
    /// Limits per tenant, or `None` if tenants are not isolated.
    limits: Option<TenantLimits>,
    /// Permit sets of the tenants whose jobs hold a permit or wait for one.
    sets: BTreeMap<String, Arc<Permits>>,
}

/// Number of permits of each isolated tenant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TenantLimits {
    /// Limits of tenants that have workers.
    pub(crate) by_tenant: BTreeMap<String, usize>,
    /// Limit of all other tenants.
    pub(crate) default: usize,
}

impl TenantLimits {
    fn of(&self, tenant: &str) -> usize {
        self.by_tenant.get(tenant).copied().unwrap_or(self.default).max(1)
    }
}

impl TenantPermits {
    /// Sets the number of permits of each tenant, and removes permit sets that are not in use.
    pub(crate) fn set_limits(&mut self, limits: Option<TenantLimits>) {
        self.limits = limits;
        self.sets.retain(|_, set| Arc::strong_count(set) > 1 || set.numbers().1 > 0);
        if let Some(limits) = &self.limits {
            self.sets.iter().for_each(|(tenant, set)| set.resize(limits.of(tenant)));
        }
    }

    /// Returns the permits of a tenant, or `None` if tenants are not isolated.
    pub(crate) fn of(&mut self, tenant: &str) -> Option<Arc<Permits>> {
        let limits = self.limits.as_ref()?;
        if let Some(set) = self.sets.get(tenant) {
            return Some(set.clone());
        }
        let set = Arc::new(Permits::new());
        set.resize(limits.of(tenant));
        self.sets.insert(tenant.to_owned(), set.clone());
        Some(set)
    }
}

impl Usage {
    fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
        self.moved.notify_waiters();
    }
}

impl Permits {
    /// Creates a set with no permits.
    pub(crate) fn new() -> Self {
        let semaphore = Arc::new(Semaphore::new(0));
        Self { semaphore, state: Arc::default(), usage: Arc::default() }
    }

    /// Sets the number of permits. Surplus permits that are in use are removed when they are returned.
    pub(crate) fn resize(&self, limit: usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if limit > state.limit {
            let added = limit - state.limit;
            let kept = added.min(state.surplus);
            state.surplus -= kept;
            self.semaphore.add_permits(added - kept);
        } else {
            let removed = state.limit - limit;
            state.surplus += removed - self.semaphore.forget_permits(removed);
        }
        state.limit = limit;
    }

    /// Returns the number of free permits.
    pub(crate) fn free(&self) -> usize {
        self.semaphore.available_permits()
    }

    /// Returns the total number of permits and the number in use.
    pub(crate) fn numbers(&self) -> (usize, usize) {
        let limit = self.state.lock().unwrap_or_else(PoisonError::into_inner).limit;
        (limit, self.usage.in_use.load(Ordering::Relaxed))
    }

    /// Returns the number of times that a permit was acquired or returned.
    pub(crate) fn moves(&self) -> u64 {
        self.usage.moves.load(Ordering::Relaxed)
    }

    /// Waits for a permit. Callers receive permits in the order in which they called.
    pub(crate) async fn acquire(&self) -> Permit {
        // The semaphore is never closed.
        let permit = self.semaphore.clone().acquire_owned().await.ok();
        self.usage.in_use.fetch_add(1, Ordering::Relaxed);
        self.usage.moved();
        Permit { permit, state: self.state.clone(), usage: self.usage.clone() }
    }

    /// Registers a waiting job. Returns `None` if enough jobs are waiting to use all permits for a while, even if some
    /// of them are just being returned to the server.
    pub(crate) fn try_wait(&self) -> Option<Waiting> {
        let (limit, _) = self.numbers();
        let max = 2 * limit + WAITERS_MIN;
        let waiting = Waiting(self.usage.clone());
        (self.usage.waiters.fetch_add(1, Ordering::Relaxed) < max).then_some(waiting)
    }

    /// Waits until a permit is returned or acquired.
    pub(crate) async fn until_moved(&self) {
        self.usage.moved.notified().await;
    }
}

/// A job that is waiting for a permit.
#[derive(Debug)]
pub(crate) struct Waiting(Arc<Usage>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.usage.in_use.fetch_sub(1, Ordering::Relaxed);
        // The semaphore gets the permit back only at the end of this function. A waiter that runs earlier finds no
        // permit and tries again after a pause.
        self.usage.moved();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.surplus > 0 {
            state.surplus -= 1;
            if let Some(permit) = self.permit.take() {
                permit.forget();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn permits_in_use_are_removed_on_return() {
        let permits = Permits::new();
        permits.resize(3);
        let (a, b) = (permits.acquire().await, permits.acquire().await);
        permits.resize(1);
        assert_eq!((permits.free(), permits.numbers(), permits.moves()), (0, (1, 2), 2));
        drop(a);
        assert_eq!(permits.moves(), 3);
        assert_eq!(permits.free(), 0);
        permits.resize(2);
        assert_eq!(permits.free(), 1);
        drop(b);
        assert_eq!((permits.free(), permits.numbers()), (2, (2, 0)));
    }

    #[tokio::test]
    async fn permits_of_isolated_tenants_are_separate() {
        let mut tenants = TenantPermits::default();
        assert!(tenants.of("acme").is_none());
        let limits =
            |acme| TenantLimits { by_tenant: BTreeMap::from([("acme".to_owned(), acme)]), default: 1 };
        tenants.set_limits(Some(limits(2)));
        let held = tenants.of("acme").unwrap().acquire().await;
        assert_eq!(tenants.of("acme").unwrap().free(), 1);
        assert_eq!(tenants.of("quiet").unwrap().free(), 1);
        tenants.set_limits(Some(limits(3)));
        assert_eq!(tenants.sets.keys().collect::<Vec<_>>(), ["acme"]);
        assert_eq!(tenants.of("acme").unwrap().free(), 2);
        drop(held);
        tenants.set_limits(None);
        assert!(tenants.of("acme").is_none() && tenants.sets.is_empty());
    }

    #[test]
    fn number_of_waiting_jobs_is_limited() {
        let permits = Permits::new();
        permits.resize(2);
        let waiting = [(); 8].map(|()| permits.try_wait());
        assert!(waiting.iter().all(Option::is_some) && permits.try_wait().is_none());
        drop(waiting);
        assert!(permits.try_wait().is_some());
    }

    #[tokio::test]
    async fn growing_set_keeps_surplus_permits() {
        let permits = Permits::new();
        permits.resize(2);
        let held = [permits.acquire().await, permits.acquire().await];
        permits.resize(0);
        permits.resize(3);
        assert_eq!(permits.free(), 1);
        drop(held);
        assert_eq!(permits.free(), 3);
    }
}

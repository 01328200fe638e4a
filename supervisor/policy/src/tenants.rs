//! Table of a bulkhead's tenants, with each tenant's number of jobs, rate-limit bucket and settings. `bulkhead` updates
//! these values and enforces the limits; the table rejects no jobs. A tenant's number is valid while the tenant has
//! jobs. Once `IDLE_MAX` tenants have no jobs, a new tenant replaces the tenant that has been idle the longest. A
//! replaced tenant that returns keeps its settings, but starts with an empty bucket and new counters.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::growth::reserve_one;
use crate::limits::{TenantLimits, TenantOverrides};
use crate::rate::{Bucket, RateLimit};
use crate::time::Time;

/// Number that identifies a tenant. Remains valid while the tenant has jobs. After that, the number can be reused for
/// another tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub(crate) u32);

impl TenantId {
    /// Number used for jobs without a tenant.
    pub const NONE: Self = Self(0);
}

/// Maximum number of idle tenants to remember. A tenant is idle if it has no jobs.
const IDLE_MAX: usize = 16_384;

const NONE: u32 = u32::MAX;

#[derive(Default)]
pub(crate) struct Tenant {
    name: Arc<str>,
    /// Number of the tenant's jobs, whether queued, in flight or passed on to another bulkhead, plus the number of places
    /// withheld from the tenant's quota.
    jobs: u32,
    pub(crate) in_flight: u32,
    /// Number of places in the tenant's quota that cannot be used, because the tenant's jobs may have killed workers.
    pub(crate) withheld: u32,
    pub(crate) prefetched: u32,
    pub(crate) bucket: Bucket,
    pub(crate) overrides: TenantOverrides,
    /// Index of the tenant in the sorted list of tenants with separate metrics. Equals the list's length if the
    /// tenant is not listed.
    pub(crate) label: u32,
    /// Number of jobs submitted for the tenant, regardless of their outcome. Jobs passed on from other bulkheads count
    /// neither here nor in `rejected`.
    pub(crate) submitted: u64,
    pub(crate) rejected: u64,
    /// Time at which throttling of this tenant was last reported.
    pub(crate) throttled_at: Option<Time>,
    /// Neighbours in the list of idle tenants. The list is ordered by the time at which each tenant became idle.
    older: u32,
    newer: u32,
}

pub(crate) struct Tenants {
    table: Vec<Tenant>,
    by_name: HashMap<Arc<str>, u32>,
    /// Tenant-specific settings, by tenant name. Includes tenants that are not in the table.
    overrides: HashMap<Box<str>, TenantOverrides>,
    labelled: Arc<[String]>,
    oldest: u32,
    newest: u32,
    idle: usize,
    idle_max: usize,
}

impl Tenants {
    /// Returns an empty table.
    pub(crate) fn new(limits: &TenantLimits) -> Self {
        Self::with_idle_max(limits, IDLE_MAX)
    }

    fn with_idle_max(limits: &TenantLimits, idle_max: usize) -> Self {
        let overrides = limits.overrides.iter().map(|(name, overrides)| (name.as_str().into(), *overrides));
        let mut tenants = Self {
            table: Vec::new(),
            by_name: HashMap::new(),
            overrides: overrides.collect(),
            labelled: limits.labelled.clone(),
            oldest: NONE,
            newest: NONE,
            idle: 0,
            idle_max,
        };
        // The entry for jobs without a tenant is given one job, so that it never becomes idle and is never removed.
        tenants.add("");
        tenants.get(TenantId::NONE).jobs = 1;
        tenants
    }

    /// Returns the number of a tenant, adding the tenant if necessary. The number stays valid as long as the tenant has
    /// jobs, and at least until this function is called again.
    pub(crate) fn find_or_add(&mut self, name: &str) -> TenantId {
        if name.is_empty() {
            return TenantId::NONE;
        }
        let index = match self.by_name.get(name) {
            Some(&index) if self.table[index as usize].jobs > 0 => return TenantId(index),
            Some(&index) => {
                self.unlink(index);
                index
            }
            None => self.add(name),
        };
        self.link(index);
        TenantId(index)
    }

    /// Replaces the tenant-specific settings of one tenant. Returns the tenant's number if the tenant is in the table.
    pub(crate) fn set_overrides(
        &mut self,
        now: Time,
        name: &str,
        overrides: TenantOverrides,
        general: Option<&RateLimit>,
    ) -> Option<TenantId> {
        if overrides == TenantOverrides::default() {
            self.overrides.remove(name);
        } else {
            self.overrides.insert(name.into(), overrides);
        }
        let index = if name.is_empty() { TenantId::NONE.0 } else { *self.by_name.get(name)? };
        let tenant = &mut self.table[index as usize];
        let before = std::mem::replace(&mut tenant.overrides, overrides).rate_limit;
        if let Some(after) = overrides.rate_limit.as_ref().or(general) {
            tenant.bucket.rescale(now, before.as_ref().or(general), after);
        }
        Some(TenantId(index))
    }

    /// Replaces the tenant-specific settings of all tenants.
    pub(crate) fn reconfigure(
        &mut self,
        now: Time,
        overrides: &BTreeMap<String, TenantOverrides>,
        general: Option<&RateLimit>,
    ) {
        let gone = self
            .overrides
            .keys()
            .filter(|name| !overrides.contains_key(&***name))
            .cloned()
            .collect::<Vec<_>>();
        for name in gone {
            self.set_overrides(now, &name, TenantOverrides::default(), general);
        }
        for (name, overrides) in overrides {
            self.set_overrides(now, name, *overrides, general);
        }
    }

    /// Returns the numbers of all tenants in the table.
    pub(crate) fn ids(&self) -> impl Iterator<Item = TenantId> + use<> {
        (0..self.table.len() as u32).map(TenantId)
    }

    /// Rescales the tenants' rate-limit buckets when the general rate limit changes. Skips tenants with their own rate
    /// limit.
    pub(crate) fn rescale(&mut self, now: Time, before: Option<&RateLimit>, after: &RateLimit) {
        for tenant in self.table.iter_mut().filter(|tenant| tenant.overrides.rate_limit.is_none()) {
            tenant.bucket.rescale(now, before, after);
        }
    }

    pub(crate) fn get(&mut self, id: TenantId) -> &mut Tenant {
        &mut self.table[id.0 as usize]
    }

    pub(crate) fn look_up(&self, id: TenantId) -> &Tenant {
        &self.table[id.0 as usize]
    }

    pub(crate) fn name(&self, id: TenantId) -> &Arc<str> {
        &self.table[id.0 as usize].name
    }

    /// Records that one of the tenant's jobs was accepted.
    pub(crate) fn add_job(&mut self, id: TenantId) {
        let tenant = self.get(id);
        tenant.jobs += 1;
        if tenant.jobs == 1 {
            self.unlink(id.0);
        }
    }

    /// Records that one of the tenant's jobs has ended.
    pub(crate) fn remove_job(&mut self, id: TenantId) {
        let tenant = self.get(id);
        tenant.jobs -= 1;
        if tenant.jobs == 0 {
            self.link(id.0);
        }
    }

    /// Returns all tenants in the table. Excludes the entry for jobs without a tenant.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (TenantId, &Tenant)> {
        self.by_name.values().map(|&index| (TenantId(index), &self.table[index as usize]))
    }

    /// Assigns a number to a new tenant. If the number of idle tenants has reached the maximum, reuses the number of
    /// the tenant that has been idle the longest.
    fn add(&mut self, name: &str) -> u32 {
        let name: Arc<str> = name.into();
        let label = self.labelled.binary_search_by(|label| (**label).cmp(&name));
        let tenant = Tenant {
            label: label.unwrap_or(self.labelled.len()) as u32,
            name: name.clone(),
            overrides: self.overrides.get(&*name).copied().unwrap_or_default(),
            older: NONE,
            newer: NONE,
            ..Tenant::default()
        };
        let index = if self.idle >= self.idle_max && self.oldest != NONE {
            let index = self.oldest;
            self.unlink(index);
            self.by_name.remove(&self.table[index as usize].name);
            self.table[index as usize] = tenant;
            index
        } else {
            reserve_one(&mut self.table);
            self.table.push(tenant);
            self.table.len() as u32 - 1
        };
        // The entry for jobs without a tenant cannot be found by name.
        if !name.is_empty() {
            self.by_name.insert(name, index);
        }
        index
    }

    fn link(&mut self, index: u32) {
        let older = self.newest;
        let tenant = &mut self.table[index as usize];
        (tenant.older, tenant.newer) = (older, NONE);
        match self.table.get_mut(older as usize) {
            Some(tenant) => tenant.newer = index,
            None => self.oldest = index,
        }
        self.newest = index;
        self.idle += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Tenant { older, newer, .. } = self.table[index as usize];
        match self.table.get_mut(older as usize) {
            Some(tenant) => tenant.newer = newer,
            None => self.oldest = newer,
        }
        match self.table.get_mut(newer as usize) {
            Some(tenant) => tenant.older = older,
            None => self.newest = older,
        }
        self.idle -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_longest_idle_tenant_first() {
        let mut tenants = Tenants::with_idle_max(&TenantLimits::default(), 2);
        let busy = tenants.find_or_add("busy");
        tenants.add_job(busy);
        let (a, b) = (tenants.find_or_add("a"), tenants.find_or_add("b"));
        assert_eq!(tenants.find_or_add("a"), a);
        // Tenant b has been idle the longest, so its number is reused.
        let c = tenants.find_or_add("c");
        assert_eq!(c, b);
        let known = |name: &str| tenants.by_name.get(name).copied();
        assert_eq!((known("b"), known("a"), known("busy")), (None, Some(a.0), Some(busy.0)));
        tenants.remove_job(busy);
        assert_eq!(tenants.find_or_add("d"), a);
        assert_eq!(tenants.find_or_add(""), TenantId::NONE);
    }

    #[test]
    fn number_of_idle_tenants_is_bounded() {
        let mut tenants = Tenants::with_idle_max(&TenantLimits::default(), 100);
        for number in 0..10_000 {
            let id = tenants.find_or_add(&format!("tenant {number}"));
            if number % 3 == 0 {
                tenants.add_job(id);
                tenants.remove_job(id);
            }
        }
        assert!(tenants.table.len() <= 102 && tenants.by_name.len() <= 102);
        assert_eq!(tenants.iter().count(), tenants.by_name.len());
    }
}

//! Isolated tenants: which of them have workers, and which must release workers for another.
//!
//! A tenant's compartment is kept when no workers are left, with rate limit, breaker and restart history. A tenant
//! therefore cannot reset these by a pause. The compartments that have rested the longest are forgotten first.

use std::sync::Arc;

use bulkhead_plane::latency::Latency;
use bulkhead_policy::{Activity, BreakerState, Event, Submission};
use bulkhead_shared::JobId;

use super::bulkheads::{BulkheadEntry, Compartment, Layout, TenantState};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, Incoming, JobData};

/// Maximum number of tenants remembered per bulkhead, more than can ever have workers at once.
const REMEMBERED_MAX: usize = 4096;

impl DataPlane {
    pub(super) fn owner(&self, compartment: CompartmentIndex) -> &BulkheadEntry {
        &self.bulkheads[self.compartments[compartment].bulkhead]
    }

    /// Returns the compartment for a tenant's jobs. Creates the compartment if necessary.
    #[inline]
    pub(super) fn compartment_for(&mut self, bulkhead: BulkheadIndex, tenant: &str) -> CompartmentIndex {
        match &self.bulkheads[bulkhead].layout {
            Layout::Shared(compartment) => *compartment,
            Layout::Isolated(isolated) => match isolated.by_tenant.get(tenant) {
                Some(&compartment) => compartment,
                None => self.add_tenant(bulkhead, tenant),
            },
        }
    }

    /// Submits a job to a compartment. A compartment without workers gets some if the job is accepted and the tenant
    /// may have workers. A rejected job therefore takes no workers from other tenants.
    pub(super) fn submit_to_compartment(
        &mut self,
        compartment: CompartmentIndex,
        submission: Submission<Box<JobData>>,
        payload: Incoming<'_>,
    ) -> Option<JobId> {
        let entry = &self.compartments[compartment];
        let bulkhead = entry.bulkhead;
        let can_get_workers = entry.tenant.is_some()
            && entry.policy.activity() == Activity::Resting
            && self.can_get_workers(bulkhead, compartment);
        if can_get_workers {
            self.apply(compartment, Event::Await, Incoming::None);
        }
        let job = self.apply(compartment, Event::Submit(submission), payload);
        if can_get_workers {
            match job {
                Some(_) => self.wait_for_workers(bulkhead, compartment),
                None => drop(self.apply(compartment, Event::Rest, Incoming::None)),
            }
        }
        job
    }

    /// Returns all compartments of a bulkhead.
    pub(super) fn compartments_of(&self, bulkhead: BulkheadIndex) -> Vec<CompartmentIndex> {
        match &self.bulkheads[bulkhead].layout {
            Layout::Shared(compartment) => vec![*compartment],
            Layout::Isolated(isolated) => isolated.by_tenant.values().copied().collect(),
        }
    }

    /// Creates a compartment for a tenant. If there are too many, the compartment that has rested the longest is
    /// replaced.
    fn add_tenant(&mut self, bulkhead: BulkheadIndex, tenant: &str) -> CompartmentIndex {
        let (now, name) = (self.now, Arc::<str>::from(tenant));
        let isolated = self.bulkheads[bulkhead].tenants();
        let limits = isolated.limits_of(tenant);
        let is_full = isolated.by_tenant.len() >= REMEMBERED_MAX;
        let oldest = isolated.resting.iter().map(|&(_, place)| place);
        let compartments = &self.compartments;
        // A compartment with jobs in other bulkheads still has to count the ends of these jobs.
        let has_no_claims = |place: &CompartmentIndex| compartments[*place].policy.counters().elsewhere == 0;
        let victim = if is_full { oldest.take(16).find(has_no_claims) } else { None };
        let seed = self.compartments.next_seed(now);
        let mut compartment = Compartment::new(bulkhead, Some(name.clone()), limits, seed, now);
        let place = match victim {
            Some(place) => {
                std::mem::swap(&mut self.compartments[place], &mut compartment);
                self.compartments[place].is_touched = compartment.is_touched;
                self.forget_tenant(bulkhead, place, &compartment);
                place
            }
            None => self.compartments.insert(compartment),
        };
        let isolated = self.bulkheads[bulkhead].tenants();
        isolated.by_tenant.insert(name, place);
        isolated.resting.insert((now, place));
        let (is_draining, is_forced_open) = (isolated.is_draining, isolated.is_forced_open);
        if self.is_stopping {
            self.apply(place, Event::Stop { by: now }, Incoming::None);
        }
        // These commands were given for the bulkhead as a whole.
        if is_draining {
            self.apply_quietly(place, Event::Drain);
        }
        if is_forced_open {
            self.apply_quietly(place, Event::ForceBreaker { open: true });
        }
        place
    }

    /// Forgets a tenant, but keeps the counters of the compartment.
    fn forget_tenant(&mut self, bulkhead: BulkheadIndex, place: CompartmentIndex, gone: &Compartment) {
        let isolated = self.bulkheads[bulkhead].tenants();
        isolated.tripped.remove(&place);
        isolated.active.remove(&place);
        isolated.forgotten_counters.add(gone.policy.counters());
        isolated.forgotten_restarts += gone.policy.restarts();
        if let Some(tenant) = &gone.tenant {
            isolated.by_tenant.remove(tenant);
        }
        if let TenantState::Resting(since) = gone.tenant_state {
            isolated.resting.remove(&(since, place));
        }
        self.add_forgotten_to_snapshot(bulkhead, place, gone);
    }

    /// Applies an event to a compartment when a single event for operators covers all tenants.
    pub(super) fn apply_quietly(&mut self, place: CompartmentIndex, event: Event<Box<JobData>>) {
        self.reporter.is_quiet = self.compartments[place].tenant.is_some();
        self.apply(place, event, Incoming::None);
        self.reporter.is_quiet = false;
    }

    // Tenants with workers.

    /// Returns true if a tenant without workers can get some. There must be room for another tenant, or an idle
    /// tenant, or more tenants that are ending workers than tenants that wait for workers.
    fn can_get_workers(&mut self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) -> bool {
        self.remove_idle_waiters(bulkhead);
        let has_workers = self.compartments[compartment].tenant_state == TenantState::Leaving;
        let isolated = self.bulkheads[bulkhead].tenants();
        let waiting = isolated.waiting.len();
        let room = isolated.max_active.saturating_sub(isolated.running) + isolated.ending;
        !isolated.is_draining && (has_workers || room > waiting || !isolated.idle.is_empty())
    }

    fn wait_for_workers(&mut self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) {
        self.bulkheads[bulkhead].tenants().waiting.push_back(compartment);
        self.schedule_tenant_update(bulkhead);
    }

    /// Removes waiting tenants that have no jobs left, because the clients have gone.
    fn remove_idle_waiters(&mut self, bulkhead: BulkheadIndex) {
        let compartments = &self.compartments;
        let isolated = self.bulkheads[bulkhead].tenants();
        let is_gone = |place: &CompartmentIndex| compartments[*place].policy.has_no_jobs();
        let gone: Vec<CompartmentIndex> = isolated.waiting.iter().copied().filter(is_gone).collect();
        if gone.is_empty() {
            return;
        }
        isolated.waiting.retain(|place| !gone.contains(place));
        for place in gone {
            self.apply(place, Event::Rest, Incoming::None);
        }
    }

    /// Updates the bulkhead's records about a tenant's compartment.
    pub(super) fn update_tenant_state(&mut self, place: CompartmentIndex) {
        let entry = &self.compartments[place];
        let (bulkhead, before, after) =
            (entry.bulkhead, entry.tenant_state, entry.current_tenant_state(self.now));
        let is_tripped = entry.policy.breaker() != BreakerState::Closed;
        if is_tripped != entry.is_listed_tripped {
            self.compartments[place].is_listed_tripped = is_tripped;
            let tripped = &mut self.bulkheads[bulkhead].tenants().tripped;
            let _ = if is_tripped { tripped.insert(place) } else { tripped.remove(&place) };
        }
        if before == after {
            return;
        }
        self.compartments[place].tenant_state = after;
        let isolated = self.bulkheads[bulkhead].tenants();
        let runs = |tenant_state| {
            matches!(tenant_state, TenantState::Idle(_) | TenantState::Busy | TenantState::Leaving)
        };
        match before {
            TenantState::Resting(since) => drop(isolated.resting.remove(&(since, place))),
            TenantState::Idle(since) => drop(isolated.idle.remove(&(since, place))),
            TenantState::Leaving => isolated.ending -= 1,
            TenantState::Awaiting | TenantState::Busy => {}
        }
        match after {
            TenantState::Resting(since) => {
                isolated.active.remove(&place);
                isolated.resting.insert((since, place));
                self.compartments[place].latency = Latency::default();
            }
            TenantState::Idle(since) => drop(isolated.idle.insert((since, place))),
            TenantState::Leaving => isolated.ending += 1,
            TenantState::Awaiting | TenantState::Busy => {}
        }
        if !matches!(after, TenantState::Resting(_)) {
            isolated.active.insert(place);
        }
        isolated.running = isolated.running + usize::from(runs(after)) - usize::from(runs(before));
        if !isolated.waiting.is_empty() {
            self.schedule_tenant_update(bulkhead);
        }
    }

    pub(super) fn schedule_tenant_update(&mut self, bulkhead: BulkheadIndex) {
        if let Some(isolated) = self.bulkheads[bulkhead].isolated()
            && !std::mem::replace(&mut isolated.needs_update, true)
        {
            self.bulkheads.needing_update.push(bulkhead);
        }
    }

    /// Starts workers for waiting tenants while there is room, and ends the workers of idle tenants for the rest.
    pub(super) fn assign_workers(&mut self) {
        while let Some(bulkhead) = self.bulkheads.needing_update.pop() {
            // The bulkhead may have been removed meanwhile.
            if self.bulkheads.get(bulkhead).is_none() {
                continue;
            }
            self.remove_idle_waiters(bulkhead);
            while let Some((place, event)) = self.next_assignment(bulkhead) {
                self.apply(place, event, Incoming::None);
            }
            self.bulkheads[bulkhead].tenants().needs_update = false;
        }
    }

    fn next_assignment(
        &mut self,
        bulkhead: BulkheadIndex,
    ) -> Option<(CompartmentIndex, Event<Box<JobData>>)> {
        let compartments = &self.compartments;
        let isolated = self.bulkheads[bulkhead].tenants();
        let &next = isolated.waiting.front()?;
        if compartments[next].policy.activity() != Activity::Awaiting {
            // The compartment was stopped meanwhile.
            isolated.waiting.pop_front();
            return self.next_assignment(bulkhead);
        }
        let is_its_own = compartments[next].tenant_state == TenantState::Leaving;
        if is_its_own || isolated.running < isolated.max_active {
            isolated.waiting.pop_front();
            return Some((next, Event::Start));
        }
        let idle = isolated.idle.first().filter(|_| isolated.ending < isolated.waiting.len());
        idle.map(|&(_, place)| (place, Event::Rest))
    }
}

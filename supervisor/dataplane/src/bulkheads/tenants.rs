//! Isolated tenants: which of them have workers, and which must release workers for another.
//!
//! A tenant's compartment is kept when no workers are left, with rate limit, breaker and restart history. A tenant
//! therefore cannot reset these by a pause. The compartments that have rested the longest are forgotten first.

use std::sync::Arc;

use bulkhead_plane::command::SteerAction;
use bulkhead_plane::latency::Latency;
use bulkhead_policy::{Activity, BreakerState, Event, Time};

use super::{Bulkheads, Compartment, CompartmentEvent, Compartments, Isolated, Layout};
use crate::JobData;
use crate::slab::{BulkheadIndex, CompartmentIndex};

/// Maximum number of tenants remembered per bulkhead, more than can ever have workers at once.
const REMEMBERED_MAX: usize = 4096;

/// Maximum number of resting tenants examined to find one that can be forgotten.
const FORGET_CANDIDATES_MAX: usize = 16;

/// Work for the wiring. Perform effects in order, right after the call that caused them.
pub(crate) enum Effect {
    Apply(CompartmentIndex, Event<Box<JobData>>),
    /// Applies an event that was reported for the bulkhead as a whole already.
    ApplyQuietly(CompartmentIndex, Event<Box<JobData>>),
    /// Adds a tenant that was forgotten to the snapshots that have not visited the tenant.
    Forgotten(BulkheadIndex, CompartmentIndex, Box<Compartment>),
}

/// State of a tenant's compartment, as recorded in [`Isolated`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TenantState {
    /// No workers since this time.
    ScaledToZero(Time),
    /// No workers, and waits for some.
    StartAnnounced,
    /// Workers, but no jobs since this time.
    Idle(Time),
    /// Workers and jobs.
    Busy,
    /// All workers are ending.
    Leaving,
}

impl TenantState {
    fn has_workers(self) -> bool {
        matches!(self, Self::Idle(_) | Self::Busy | Self::Leaving)
    }
}

impl Compartment {
    /// Returns the current state. If the compartment has just started to rest, the state contains `now`.
    fn current_tenant_state(&self, now: Time) -> TenantState {
        match (self.policy.activity(), self.policy.idle_since()) {
            (Activity::Started, Some(since)) => TenantState::Idle(since),
            (Activity::Started, None) => TenantState::Busy,
            (_, _) if !self.policy.has_no_workers() => TenantState::Leaving,
            (Activity::StartAnnounced, _) => TenantState::StartAnnounced,
            (Activity::ScaledToZero, _) => match self.tenant_state {
                TenantState::ScaledToZero(since) => TenantState::ScaledToZero(since),
                _ => TenantState::ScaledToZero(now),
            },
        }
    }
}

impl Isolated {
    /// Removes and returns a waiting tenant that has no jobs left, because the clients have gone.
    fn take_idle_waiter(&mut self, compartments: &Compartments) -> Option<CompartmentIndex> {
        let at = self.waiting.iter().position(|index| compartments[*index].policy.has_no_jobs())?;
        self.waiting.remove(at)
    }

    /// Returns the next tenant to get workers, or to release workers for a waiting tenant.
    fn next_assignment(&mut self, compartments: &Compartments) -> Option<CompartmentEvent> {
        // A compartment can have been stopped meanwhile.
        while let Some(&next) = self.waiting.front()
            && compartments[next].policy.activity() != Activity::StartAnnounced
        {
            self.waiting.pop_front();
        }
        let &next = self.waiting.front()?;
        let has_own = compartments[next].tenant_state == TenantState::Leaving;
        if has_own || self.running < self.max_active {
            self.waiting.pop_front();
            return Some((next, Event::Start));
        }
        let idle = self.idle.first().filter(|_| self.ending < self.waiting.len());
        idle.map(|&(_, index)| (index, Event::ScaleToZero))
    }
}

impl Bulkheads {
    #[inline]
    pub(crate) fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Returns the compartments of a tenant's bulkhead. The caller must have a compartment of a tenant.
    fn tenants(&mut self, bulkhead: BulkheadIndex) -> &mut Isolated {
        match self.slab[bulkhead].isolated_mut() {
            Some(isolated) => isolated,
            None => unreachable!("the layout of a bulkhead never changes"),
        }
    }

    /// Returns the compartment for a tenant's jobs. Creates the compartment if necessary.
    #[inline]
    pub(crate) fn compartment_for(
        &mut self,
        compartments: &mut Compartments,
        (now, is_stopping): (Time, bool),
        bulkhead: BulkheadIndex,
        tenant: &str,
    ) -> CompartmentIndex {
        match &self.slab[bulkhead].layout {
            Layout::Shared(compartment) => *compartment,
            Layout::Isolated(isolated) => match isolated.by_tenant.get(tenant) {
                Some(&compartment) => compartment,
                None => self.add_tenant(compartments, (now, is_stopping), bulkhead, tenant),
            },
        }
    }

    /// Creates a compartment for a tenant. If there are too many, the compartment that has rested the longest is
    /// replaced.
    fn add_tenant(
        &mut self,
        compartments: &mut Compartments,
        (now, is_stopping): (Time, bool),
        bulkhead: BulkheadIndex,
        tenant: &str,
    ) -> CompartmentIndex {
        let name = Arc::<str>::from(tenant);
        let isolated = self.tenants(bulkhead);
        let limits = isolated.limits_of(tenant);
        let is_full = isolated.by_tenant.len() >= REMEMBERED_MAX;
        let mut oldest = isolated.resting.iter().map(|&(_, index)| index).take(FORGET_CANDIDATES_MAX);
        // A compartment with jobs in other bulkheads still has to count the ends of these jobs.
        let has_no_claims = |index: &CompartmentIndex| compartments[*index].policy.counters().elsewhere == 0;
        let forgotten = if is_full { oldest.find(has_no_claims) } else { None };
        let seed = compartments.next_seed(now);
        let mut compartment = Compartment::new(bulkhead, Some(name.clone()), limits, seed, now);
        let index = match forgotten {
            Some(index) => {
                std::mem::swap(&mut compartments[index], &mut compartment);
                compartments[index].is_touched = compartment.is_touched;
                self.forget_tenant(bulkhead, index, compartment);
                index
            }
            None => compartments.insert(compartment),
        };
        let isolated = self.tenants(bulkhead);
        isolated.by_tenant.insert(name, index);
        isolated.resting.insert((now, index));
        // These commands were given for the bulkhead as a whole.
        let (is_draining, is_forced_open) = (isolated.is_draining, isolated.is_forced_open);
        let stop = is_stopping.then(|| Effect::Apply(index, Event::Stop { by: now }));
        let drain = is_draining.then(|| Effect::ApplyQuietly(index, Event::Drain));
        let force = is_forced_open.then(|| Effect::ApplyQuietly(index, Event::ForceBreaker { open: true }));
        self.effects.extend([stop, drain, force].into_iter().flatten());
        index
    }

    /// Forgets a tenant, but keeps the counters of the compartment.
    fn forget_tenant(&mut self, bulkhead: BulkheadIndex, index: CompartmentIndex, gone: Compartment) {
        let isolated = self.tenants(bulkhead);
        isolated.tripped.remove(&index);
        isolated.active.remove(&index);
        isolated.forgotten_counters.add(gone.policy.counters());
        isolated.forgotten_restarts += gone.policy.restarts();
        if let Some(tenant) = &gone.tenant {
            isolated.by_tenant.remove(tenant);
        }
        if let TenantState::ScaledToZero(since) = gone.tenant_state {
            isolated.resting.remove(&(since, index));
        }
        self.effects.push_back(Effect::Forgotten(bulkhead, index, Box::new(gone)));
    }

    // Tenants with workers.

    /// Returns true if a tenant without workers can get some for the next job. There must be room for another tenant,
    /// or an idle tenant, or more tenants that are ending workers than tenants that wait for workers.
    #[inline]
    pub(crate) fn can_wake(&mut self, compartments: &Compartments, index: CompartmentIndex) -> bool {
        let compartment = &compartments[index];
        compartment.tenant.is_some()
            && compartment.policy.activity() == Activity::ScaledToZero
            && self.has_room_for(compartments, compartment)
    }

    fn has_room_for(&mut self, compartments: &Compartments, compartment: &Compartment) -> bool {
        let bulkhead = compartment.bulkhead;
        while let Some(idle) = self.tenants(bulkhead).take_idle_waiter(compartments) {
            self.effects.push_back(Effect::Apply(idle, Event::ScaleToZero));
        }
        let has_workers = compartment.tenant_state == TenantState::Leaving;
        let isolated = self.tenants(bulkhead);
        let waiting = isolated.waiting.len();
        let room = isolated.max_active.saturating_sub(isolated.running) + isolated.ending;
        !isolated.is_draining && (has_workers || room > waiting || !isolated.idle.is_empty())
    }

    /// Queues a tenant without workers whose job was accepted.
    pub(crate) fn wait_for_workers(&mut self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) {
        self.tenants(bulkhead).waiting.push_back(compartment);
        self.schedule_update(bulkhead);
    }

    /// Updates the bulkhead's records about a tenant's compartment after an event.
    pub(crate) fn update_tenant(
        &mut self,
        compartments: &mut Compartments,
        index: CompartmentIndex,
        now: Time,
    ) {
        let compartment = &mut compartments[index];
        let (bulkhead, after) = (compartment.bulkhead, compartment.current_tenant_state(now));
        let is_tripped = compartment.policy.breaker() != BreakerState::Closed;
        let isolated = self.tenants(bulkhead);
        if std::mem::replace(&mut compartment.is_listed_tripped, is_tripped) != is_tripped {
            let tripped = &mut isolated.tripped;
            let _ = if is_tripped { tripped.insert(index) } else { tripped.remove(&index) };
        }
        let before = std::mem::replace(&mut compartment.tenant_state, after);
        if before == after {
            return;
        }
        match before {
            TenantState::ScaledToZero(since) => drop(isolated.resting.remove(&(since, index))),
            TenantState::Idle(since) => drop(isolated.idle.remove(&(since, index))),
            TenantState::Leaving => isolated.ending -= 1,
            TenantState::StartAnnounced | TenantState::Busy => {}
        }
        match after {
            TenantState::ScaledToZero(since) => {
                isolated.active.remove(&index);
                isolated.resting.insert((since, index));
                compartment.latency = Latency::default();
            }
            TenantState::Idle(since) => drop(isolated.idle.insert((since, index))),
            TenantState::Leaving => isolated.ending += 1,
            TenantState::StartAnnounced | TenantState::Busy => {}
        }
        if !matches!(after, TenantState::ScaledToZero(_)) {
            isolated.active.insert(index);
        }
        isolated.running =
            isolated.running + usize::from(after.has_workers()) - usize::from(before.has_workers());
        if !isolated.waiting.is_empty() {
            self.schedule_update(bulkhead);
        }
    }

    /// Schedules an update of the assignment of workers to tenants.
    pub(crate) fn schedule_update(&mut self, bulkhead: BulkheadIndex) {
        if let Some(isolated) = self.slab[bulkhead].isolated_mut()
            && !std::mem::replace(&mut isolated.needs_update, true)
        {
            self.needing_update.push(bulkhead);
        }
    }

    /// Returns the next event of the scheduled updates. Workers start for waiting tenants while there is room, and the
    /// workers of idle tenants end for the other waiting tenants. The event must be applied before the next call.
    pub(crate) fn next_assignment(&mut self, compartments: &Compartments) -> Option<CompartmentEvent> {
        while let Some(&bulkhead) = self.needing_update.last() {
            // The bulkhead may have been removed meanwhile.
            if let Some(isolated) = self.slab.get_mut(bulkhead).and_then(|entry| entry.isolated_mut()) {
                if let Some(idle) = isolated.take_idle_waiter(compartments) {
                    return Some((idle, Event::ScaleToZero));
                }
                if let Some(assignment) = isolated.next_assignment(compartments) {
                    return Some(assignment);
                }
                isolated.needs_update = false;
            }
            self.needing_update.pop();
        }
        None
    }

    // Commands for a whole bulkhead.

    /// Applies a command to future compartments of a bulkhead with isolated tenants. Returns true if a single event
    /// for operators must cover all tenants.
    pub(crate) fn steer(&mut self, bulkhead: BulkheadIndex, action: SteerAction) -> bool {
        let Some(isolated) = self.slab[bulkhead].isolated_mut() else { return false };
        match action {
            SteerAction::Drain => isolated.is_draining = true,
            SteerAction::Resume => isolated.is_draining = false,
            SteerAction::Reset => isolated.is_forced_open = false,
            SteerAction::Restart => {}
        }
        true
    }

    /// Forces the breaker of future compartments. Returns the previous value if tenants are isolated.
    pub(crate) fn force_breaker(&mut self, bulkhead: BulkheadIndex, open: bool) -> Option<bool> {
        let isolated = self.slab[bulkhead].isolated_mut()?;
        Some(std::mem::replace(&mut isolated.is_forced_open, open))
    }
}

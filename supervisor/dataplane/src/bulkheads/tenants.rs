//! Decides which isolated tenants have workers, and which tenants must release their workers to make room for others.
//! `wiring/tenants.rs` applies the resulting events to the compartments. Policy decides how many workers a tenant's
//! compartment starts.
//!
//! A tenant's compartment outlives its workers, because it contains the rate limit, the breaker and the restart
//! history. Otherwise, a tenant could reset them by submitting no jobs for a while. If there are too many compartments,
//! the compartment that has been unused the longest is removed first.

use std::sync::Arc;

use bulkhead_plane::command::SteerAction;
use bulkhead_plane::latency::Latency;
use bulkhead_policy::{Activity, BreakerState, Event, Time};

use super::{Bulkheads, Compartment, CompartmentEvent, Compartments, Isolated, Layout};
use crate::JobData;
use crate::slab::{BulkheadIndex, CompartmentIndex};

/// Maximum number of tenant compartments kept per bulkhead. Higher than the number of tenants that can have
/// workers at the same time.
const REMEMBERED_MAX: usize = 4096;

/// An action that the caller must perform. Actions must be performed in order, immediately after the call that produced
/// them.
pub(crate) enum Effect {
    Apply(CompartmentIndex, Event<Box<JobData>>),
    /// Applies an event to a compartment without reporting the event, because a single report covers all compartments
    /// of the bulkhead.
    ApplyQuietly(CompartmentIndex, Event<Box<JobData>>),
    /// Adds the values of a removed compartment to all unfinished snapshots that have not visited the compartment yet.
    Forgotten(BulkheadIndex, CompartmentIndex, Box<Compartment>),
}

/// State of a tenant's compartment. The state determines in which lists of [`Isolated`] the compartment appears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TenantState {
    /// The compartment has had no workers and no jobs since the given time. Jobs that were passed on to other bulkheads
    /// count as jobs of the compartment.
    Unused(Time),
    /// The compartment has no workers, but some of its jobs were passed on to other bulkheads. The compartment must
    /// still count the outcomes of these jobs.
    AwaitingFallback,
    /// The compartment has no workers yet and is waiting for some.
    StartAnnounced,
    /// The compartment has workers but has had no jobs since the given time.
    Idle(Time),
    /// The compartment has workers and jobs.
    Busy,
    /// All workers of the compartment are exiting.
    Leaving,
}

impl TenantState {
    fn has_workers(self) -> bool {
        matches!(self, Self::Idle(_) | Self::Busy | Self::Leaving)
    }
}

impl Compartment {
    /// Returns the current state of a compartment. `now` becomes part of the state if the compartment has just become
    /// unused.
    fn current_tenant_state(&self, now: Time) -> TenantState {
        match (self.policy.activity(), self.policy.idle_since()) {
            (Activity::Started, Some(since)) => TenantState::Idle(since),
            (Activity::Started, None) => TenantState::Busy,
            (_, _) if !self.policy.has_no_workers() => TenantState::Leaving,
            (Activity::StartAnnounced, _) => TenantState::StartAnnounced,
            (Activity::ScaledToZero, _) if self.policy.counters().elsewhere > 0 => {
                TenantState::AwaitingFallback
            }
            (Activity::ScaledToZero, _) => match self.tenant_state {
                TenantState::Unused(since) => TenantState::Unused(since),
                _ => TenantState::Unused(now),
            },
        }
    }
}

impl Isolated {
    /// Finds a waiting tenant that no longer has any jobs, removes the tenant from the waiting list, and returns it. A
    /// waiting job can end because its client disconnects.
    fn take_idle_waiter(&mut self, compartments: &Compartments) -> Option<CompartmentIndex> {
        let at = self.waiting.iter().position(|index| compartments[*index].policy.has_no_jobs())?;
        self.waiting.remove(at)
    }

    /// Returns true if one more waiting tenant could get workers after all idle tenants have released theirs.
    fn has_room(&self) -> bool {
        let busy = self.running - self.ending - self.idle.len();
        self.waiting.len() + busy < self.max_active
    }

    /// Returns the next event that changes the assignment of workers. The event gives workers to a waiting tenant or
    /// makes an idle tenant release its workers.
    fn next_assignment(&mut self, compartments: &Compartments) -> Option<CompartmentEvent> {
        // A waiting compartment might have been stopped in the meantime.
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

    /// Returns a bulkhead's tenant compartments. Must be called only for bulkheads with isolated tenants.
    fn tenants(&mut self, bulkhead: BulkheadIndex) -> &mut Isolated {
        match self.slab[bulkhead].isolated_mut() {
            Some(isolated) => isolated,
            None => unreachable!("the bulkhead's tenants are not isolated"),
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

    /// Creates a tenant's compartment. If there are too many compartments, removes the compartment that has been unused
    /// the longest.
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
        let oldest = isolated.unused.first().map(|&(_, index)| index);
        let forgotten = oldest.filter(|_| is_full);
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
        isolated.unused.insert((now, index));
        // Stop, drain and force-open commands apply to the whole bulkhead, including compartments created later.
        let (is_draining, is_forced_open) = (isolated.is_draining, isolated.is_forced_open);
        let stop = is_stopping.then(|| Effect::Apply(index, Event::Stop { by: now }));
        let drain = is_draining.then(|| Effect::ApplyQuietly(index, Event::Drain));
        let force = is_forced_open.then(|| Effect::ApplyQuietly(index, Event::ForceBreaker { open: true }));
        self.effects.extend([stop, drain, force].into_iter().flatten());
        index
    }

    /// Removes a tenant's compartment and keeps its counters.
    fn forget_tenant(&mut self, bulkhead: BulkheadIndex, index: CompartmentIndex, gone: Compartment) {
        let isolated = self.tenants(bulkhead);
        isolated.tripped.remove(&index);
        isolated.failed.remove(&index);
        isolated.active.remove(&index);
        isolated.forgotten_counters.add(gone.policy.counters());
        isolated.forgotten_restarts += gone.policy.restarts();
        if let Some(tenant) = &gone.tenant {
            isolated.by_tenant.remove(tenant);
        }
        if let TenantState::Unused(since) = gone.tenant_state {
            isolated.unused.remove(&(since, index));
        }
        self.effects.push_back(Effect::Forgotten(bulkhead, index, Box::new(gone)));
    }

    // Tenants with workers.

    /// Returns true if a tenant without workers can get workers for its next job. This is the case if fewer than
    /// `max_active` tenants are waiting or busy. Tenants that are idle or releasing their workers do not count.
    #[inline]
    pub(crate) fn can_wake(&mut self, compartments: &Compartments, index: CompartmentIndex) -> bool {
        let compartment = &compartments[index];
        compartment.tenant.is_some()
            && compartment.policy.activity() == Activity::ScaledToZero
            && self.has_room_for(compartments, compartment)
    }

    fn has_room_for(&mut self, compartments: &Compartments, compartment: &Compartment) -> bool {
        let bulkhead = compartment.bulkhead;
        let has_workers = compartment.tenant_state == TenantState::Leaving;
        if !has_workers && !self.tenants(bulkhead).has_room() {
            while let Some(idle) = self.tenants(bulkhead).take_idle_waiter(compartments) {
                self.effects.push_back(Effect::Apply(idle, Event::ScaleToZero));
            }
        }
        let isolated = self.tenants(bulkhead);
        !isolated.is_draining && (has_workers || isolated.has_room())
    }

    /// Adds a tenant to the list of tenants waiting for workers. Called when the tenant's job has been accepted.
    pub(crate) fn wait_for_workers(&mut self, bulkhead: BulkheadIndex, compartment: CompartmentIndex) {
        self.tenants(bulkhead).waiting.push_back(compartment);
        self.schedule_update(bulkhead);
    }

    /// Updates the lists of compartments after an event was applied to a tenant's compartment.
    pub(crate) fn update_tenant(
        &mut self,
        compartments: &mut Compartments,
        index: CompartmentIndex,
        now: Time,
    ) {
        let compartment = &mut compartments[index];
        let (bulkhead, after) = (compartment.bulkhead, compartment.current_tenant_state(now));
        let is_tripped = compartment.policy.breaker() != BreakerState::Closed;
        let is_failed =
            compartment.policy.activity() == Activity::ScaledToZero && compartment.counted_state().is_some();
        let isolated = self.tenants(bulkhead);
        if std::mem::replace(&mut compartment.is_listed_tripped, is_tripped) != is_tripped {
            let tripped = &mut isolated.tripped;
            let _ = if is_tripped { tripped.insert(index) } else { tripped.remove(&index) };
        }
        if std::mem::replace(&mut compartment.is_listed_failed, is_failed) != is_failed {
            let failed = &mut isolated.failed;
            let _ = if is_failed { failed.insert(index) } else { failed.remove(&index) };
        }
        let before = std::mem::replace(&mut compartment.tenant_state, after);
        if before == after {
            return;
        }
        match before {
            TenantState::Unused(since) => drop(isolated.unused.remove(&(since, index))),
            TenantState::Idle(since) => drop(isolated.idle.remove(&(since, index))),
            TenantState::Leaving => isolated.ending -= 1,
            TenantState::AwaitingFallback | TenantState::StartAnnounced | TenantState::Busy => {}
        }
        match after {
            TenantState::Unused(since) => drop(isolated.unused.insert((since, index))),
            TenantState::Idle(since) => drop(isolated.idle.insert((since, index))),
            TenantState::Leaving => isolated.ending += 1,
            TenantState::AwaitingFallback | TenantState::StartAnnounced | TenantState::Busy => {}
        }
        if matches!(after, TenantState::Unused(_) | TenantState::AwaitingFallback) {
            isolated.active.remove(&index);
            compartment.latency = Latency::default();
        } else {
            isolated.active.insert(index);
        }
        isolated.running =
            isolated.running + usize::from(after.has_workers()) - usize::from(before.has_workers());
        if !isolated.waiting.is_empty() {
            self.schedule_update(bulkhead);
        }
    }

    /// Schedules an update that assigns workers to tenants.
    pub(crate) fn schedule_update(&mut self, bulkhead: BulkheadIndex) {
        if let Some(isolated) = self.slab[bulkhead].isolated_mut()
            && !std::mem::replace(&mut isolated.needs_update, true)
        {
            self.needing_update.push(bulkhead);
        }
    }

    /// Returns the next event of the scheduled updates. Waiting tenants get workers until the maximum number of tenants
    /// is reached. After that, idle tenants release their workers to make room. The event must be applied before the
    /// next call.
    pub(crate) fn next_assignment(&mut self, compartments: &Compartments) -> Option<CompartmentEvent> {
        while let Some(&bulkhead) = self.needing_update.last() {
            // The bulkhead might have been removed in the meantime.
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

    // Commands that apply to a whole bulkhead.

    /// Applies an operator's command to compartments that will be created later. Returns false if tenants are
    /// not isolated. If the result is true, the caller must report a single event for all tenants.
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

    /// Sets whether compartments created later start with a forced-open breaker. Returns the previous setting, or
    /// `None` if tenants are not isolated.
    pub(crate) fn force_breaker(&mut self, bulkhead: BulkheadIndex, open: bool) -> Option<bool> {
        let isolated = self.slab[bulkhead].isolated_mut()?;
        Some(std::mem::replace(&mut isolated.is_forced_open, open))
    }
}

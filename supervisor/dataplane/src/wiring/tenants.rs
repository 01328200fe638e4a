//! Starts and stops workers of tenants by applying events to the tenants' compartments. The `bulkheads` module decides
//! which tenants have workers.

use bulkhead_policy::{Event, Submission};
use bulkhead_shared::JobId;

use crate::bulkheads::Effect;
use crate::slab::{BulkheadIndex, CompartmentIndex};
use crate::{DataPlane, Incoming, JobData};

impl DataPlane {
    fn perform_tenant_effects(&mut self) {
        while let Some(effect) = self.bulkheads.next_effect() {
            match effect {
                Effect::Apply(index, event) => drop(self.apply(index, event, Incoming::None)),
                Effect::ApplyQuietly(index, event) => self.apply_quietly(index, event),
                Effect::Forgotten(bulkhead, index, gone) => {
                    let mut snapshots = std::mem::take(&mut self.snapshots);
                    snapshots.add_forgotten(&self.snapshot_source(), (bulkhead, index), &gone);
                    self.snapshots = snapshots;
                }
            }
        }
    }

    /// Returns the compartment for a tenant's jobs. Creates the compartment if necessary.
    #[inline]
    pub(crate) fn compartment_for(&mut self, bulkhead: BulkheadIndex, tenant: &str) -> CompartmentIndex {
        let moment = (self.now, self.is_stopping);
        let index = self.bulkheads.compartment_for(&mut self.compartments, moment, bulkhead, tenant);
        self.perform_tenant_effects();
        index
    }

    /// Submits a job to a compartment. If the compartment has no workers and its tenant is allowed to have some, starts
    /// workers once the job has been accepted. Because of this order, a rejected job does not take workers away from
    /// other tenants.
    pub(crate) fn submit_to_compartment(
        &mut self,
        index: CompartmentIndex,
        submission: Submission<Box<JobData>>,
        payload: Incoming<'_>,
    ) -> Option<JobId> {
        let can_wake = self.bulkheads.can_wake(&self.compartments, index);
        self.perform_tenant_effects();
        if can_wake {
            self.apply(index, Event::AnnounceStart, Incoming::None);
        }
        let job = self.apply(index, Event::Submit(submission), payload);
        match job {
            Some(_) if can_wake => {
                self.bulkheads.wait_for_workers(self.compartments[index].bulkhead, index);
            }
            None if can_wake => drop(self.apply(index, Event::ScaleToZero, Incoming::None)),
            _ => {}
        }
        job
    }

    /// Applies an event to a compartment. If the compartment belongs to a tenant, nothing is reported to operators,
    /// because a single report covers all tenants of the bulkhead.
    pub(crate) fn apply_quietly(&mut self, index: CompartmentIndex, event: Event<Box<JobData>>) {
        self.reporter.set_quiet(self.compartments[index].tenant.is_some());
        self.apply(index, event, Incoming::None);
        self.reporter.set_quiet(false);
    }

    /// Starts workers for waiting tenants until the maximum number of tenants is reached. After that, ends the workers
    /// of idle tenants to make room for the others.
    pub(crate) fn assign_workers(&mut self) {
        while let Some((index, event)) = self.bulkheads.next_assignment(&self.compartments) {
            self.apply(index, event, Incoming::None);
        }
    }
}

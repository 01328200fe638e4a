//! Charges the memory of jobs, and frees memory if the limit is exceeded. `memory` and `shares` count the memory and
//! choose the frame, payload or job to evict. Before any eviction, leases that exceed the budget are recalled.

use std::sync::atomic::Ordering;

use bulkhead_policy::Event;
use bulkhead_shared::JobId;

use crate::memory::{ChargeKind, Eviction};
use crate::shares::Holder;
use crate::slab::{BulkheadIndex, CompartmentIndex};
use crate::{DataPlane, Incoming};

impl DataPlane {
    pub(crate) fn charge(&mut self, index: CompartmentIndex, job: JobId, kind: ChargeKind) {
        let compartment = &mut self.compartments[index];
        let Some(record) = compartment.policy.record_mut(job) else {
            debug_assert!(false, "{job} has no record, although the job was just taken or dispatched");
            return;
        };
        let priority = record.priority;
        let connection = self.sessions.holder(record.session);
        let holder = self.memory.charge(record, kind, connection, compartment.bulkhead);
        if kind == ChargeKind::Waiting {
            let compartments = &self.compartments;
            let is_waiting =
                |at, job| compartments.get(at).is_some_and(|compartment| compartment.policy.is_waiting(job));
            self.memory.list_waiting((holder, priority), (index, job), is_waiting);
        }
    }

    /// Publishes the total amount of memory in use, and the amount guaranteed to payloads that arrive over HTTP.
    pub(crate) fn publish_memory(&self) {
        self.counters.buffered.store(self.memory.held(), Ordering::Relaxed);
        let share = self.memory.equal_share(self.limits.buffered_bytes_max);
        self.counters.spool_share.store(share, Ordering::Relaxed);
    }

    /// Enforces the memory limit. The holders that exceed their fair share the most must free memory. `wants` contains
    /// the connection and the bulkhead that currently need memory.
    pub(crate) fn enforce_memory_limit(&mut self, wants: Option<(Holder, Option<BulkheadIndex>)>) {
        self.memory.recount_spools();
        if self.leases.bytes() > 0 {
            self.recall_leases_over_budget();
        }
        while let Some(eviction) = self.memory.next_eviction(wants, self.limits.buffered_bytes_max) {
            let before = self.memory.held_in_all();
            match eviction {
                Eviction::Spool(spool, bytes) => self.memory.free_spool(spool, bytes),
                Eviction::Frame(connection) => self.evict_frame(connection),
                Eviction::Job(holder) => self.evict_job(holder),
            }
            if self.memory.held_in_all() >= before {
                debug_assert!(false, "{eviction:?} freed nothing");
                return;
            }
        }
    }

    /// Frees memory by rejecting the holder's newest waiting job in the lowest priority class.
    fn evict_job(&mut self, holder: Holder) {
        while let Some((index, job)) = self.memory.pop_waiting(holder) {
            let Some(compartment) = self.compartments.get_mut(index) else { continue };
            let policy = &mut compartment.policy;
            if policy.is_waiting(job)
                && policy.record_mut(job).is_some_and(|record| record.charge.is_of_waiting(holder))
            {
                self.apply(index, Event::MemoryExhausted { job }, Incoming::None);
                return;
            }
        }
    }
}

//! Applies a new version of the configuration while jobs are running. The control plane has already validated the
//! configuration and compared the two versions. This module adds, changes and removes bulkheads, and passes the new
//! limits on to policy.
//!
//! A bulkhead or compartment keeps its index as long as it has workers or jobs, including jobs that were passed on to
//! other bulkheads. References that can outlive a bulkhead (a fallback, an entry in `[[access]]`) use its name.

use bulkhead_api::{EventKind, Severity};
use bulkhead_plane::command::SteerError;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::reload::{ChangedBulkhead, LiveDropped, Reload};
use bulkhead_policy::Event;

use crate::slab::{BulkheadIndex, CompartmentIndex};
use crate::{DataPlane, Incoming};

impl DataPlane {
    pub(crate) fn apply_reload(&mut self, reload: Reload) -> Result<LiveDropped, SteerError> {
        if self.is_stopping {
            return Err(SteerError::Stopping);
        }
        if self.handover.is_under_way() {
            return Err(SteerError::Upgrading);
        }
        let dropped = self.bulkheads.dropped_changes(&self.compartments, &reload);
        let Reload { removed, changed, added, rebuilt, access, limits } = reload;
        let result_bytes_max = self.limits.result_bytes_max.max(limits.result_bytes_max);
        self.limits = DataPlaneLimits { result_bytes_max, ..limits };
        let closed: Vec<_> = rebuilt
            .iter()
            .map(|(name, _)| self.bulkheads.closed_by_operator(&self.compartments, name))
            .collect();
        removed.iter().for_each(|name| self.bulkheads.start_removal(name));
        changed.into_iter().for_each(|reconfigured| self.reconfigure(reconfigured));
        for spec in added {
            let bulkhead = self.bulkheads.add(&mut self.compartments, spec, self.now);
            // Other bulkheads may use this bulkhead as a fallback.
            self.recall_leases_needing_bytes(bulkhead);
            if let Some(compartment) = self.bulkheads[bulkhead].shared_compartment() {
                self.apply(compartment, Event::Start, Incoming::None);
            }
        }
        if let Some(access) = access {
            self.access = access.with_unrelated(self.access.unrelated());
            self.update_grants();
        }
        for ((name, _), closed) in rebuilt.iter().zip(closed) {
            for (compartment, event) in self.bulkheads.close_again(name, closed) {
                self.apply(compartment, event, Incoming::None);
            }
        }
        Ok(dropped)
    }

    fn reconfigure(&mut self, reconfigured: ChangedBulkhead) {
        let Some(bulkhead) = self.bulkheads.find(&reconfigured.spec.name) else { return };
        let merged = self.bulkheads[bulkhead].merge_live_changes(&self.compartments, &reconfigured);
        let ChangedBulkhead { spec, replaces_workers, .. } = reconfigured;
        if replaces_workers {
            self.bulkheads[bulkhead].program = spec.program.clone();
            for compartment in self.bulkheads[bulkhead].compartments() {
                self.update_templates(|templates, _| templates.replace(compartment));
                self.apply(compartment, Event::ReplaceWorkers, Incoming::None);
            }
        }
        let events = self.bulkheads[bulkhead].reconfigure(&self.compartments, &spec, merged);
        self.recall_leases_needing_bytes(bulkhead);
        for (compartment, event) in events {
            self.apply(compartment, event, Incoming::None);
        }
        self.bulkheads.schedule_update(bulkhead);
    }

    // Removing bulkheads.

    /// Resumes the removal of bulkheads that are no longer in the configuration.
    pub(crate) fn continue_removals(&mut self) {
        for bulkhead in self.bulkheads.leaving() {
            if self.stop_idle_compartments(bulkhead) {
                self.finish_removal(bulkhead);
            }
        }
    }

    /// Stops those compartments of the bulkhead that have no jobs. Returns true if the bulkhead can now be removed.
    fn stop_idle_compartments(&mut self, bulkhead: BulkheadIndex) -> bool {
        let by = self.now + self.limits.drain_timeout;
        let is_replayed = |index: CompartmentIndex| self.compartments[index].bulkhead == bulkhead;
        let mut is_over = !self.replays.compartments().any(is_replayed);
        for compartment in self.bulkheads[bulkhead].compartments() {
            let policy = &self.compartments[compartment].policy;
            if policy.has_no_jobs() && !policy.is_stopping() {
                self.apply(compartment, Event::Stop { by }, Incoming::None);
            }
            let policy = &self.compartments[compartment].policy;
            // A compartment must not be removed while jobs that it passed on are running elsewhere, because the
            // compartment must still count their outcomes.
            is_over &= policy.is_stopped() && policy.counters().elsewhere == 0;
        }
        is_over
    }

    fn finish_removal(&mut self, bulkhead: BulkheadIndex) {
        let snapshot = self.snapshot_source().snapshot(bulkhead);
        let what = EventKind::BulkheadRemoved { submitted: snapshot.submitted, done: snapshot.done };
        self.reporter.bulkhead_event(Severity::Info, &self.bulkheads[bulkhead].name, what);
        for compartment in self.bulkheads[bulkhead].compartments() {
            self.update_templates(|templates, _| templates.end(compartment));
            self.compartments.vacate(compartment);
        }
        self.rejections.forget(bulkhead);
        self.crashes.forget(bulkhead);
        self.samples.forget(bulkhead);
        self.bulkheads.finish_removal(bulkhead);
    }
}

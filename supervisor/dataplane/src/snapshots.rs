//! Snapshots in pieces. A bulkhead can have thousands of tenants, and visiting all of them would delay jobs for too
//! long. Each part is counted once, even if the part is forgotten before the visit.

use std::collections::VecDeque;
use std::sync::Arc;

use bulkhead_api::Snapshot;
use tokio::sync::oneshot;

use super::DataPlane;
use super::bulkheads::{Compartment, Layout, Presence};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::snapshot_sums::Sum;

/// Maximum number of parts visited per iteration. A snapshot of fewer parts shows a single moment.
const COMPARTMENTS_PER_ITERATION_MAX: usize = 256;

/// A snapshot in progress.
pub(super) struct PartialSnapshot {
    reply: oneshot::Sender<Vec<Snapshot>>,
    /// Bulkheads to visit, by index and name.
    wanted: VecDeque<(BulkheadIndex, Arc<str>)>,
    visit: Option<BulkheadVisit>,
    done: Vec<Snapshot>,
}

/// A partly visited bulkhead.
struct BulkheadVisit {
    bulkhead: BulkheadIndex,
    name: Arc<str>,
    /// Parts to visit.
    left: Vec<CompartmentIndex>,
    sum: Sum,
}

impl DataPlane {
    /// Starts a snapshot, which usually completes at once.
    pub(super) fn start_snapshot(&mut self, bulkhead: Option<&str>, reply: oneshot::Sender<Vec<Snapshot>>) {
        let wanted = self
            .configured_bulkheads()
            .into_iter()
            .map(|bulkhead| (bulkhead, self.bulkheads[bulkhead].name.clone()));
        let wanted = wanted.filter(|(_, name)| bulkhead.is_none_or(|wanted| wanted == &**name)).collect();
        self.commands.snapshots.push_back(PartialSnapshot { reply, wanted, visit: None, done: Vec::new() });
        if self.commands.snapshots.len() == 1 {
            self.continue_snapshot();
        }
    }

    /// Continues the oldest snapshot.
    pub(super) fn continue_snapshot(&mut self) {
        let Some(mut snapshot) = self.commands.snapshots.pop_front() else { return };
        if snapshot.reply.is_closed() {
            return;
        }
        let mut compartments = COMPARTMENTS_PER_ITERATION_MAX;
        while compartments > 0 {
            if snapshot.visit.is_none() {
                snapshot.visit =
                    snapshot.wanted.pop_front().and_then(|(bulkhead, name)| self.begin_visit(bulkhead, name));
            }
            match snapshot.visit.take() {
                Some(mut visit) => {
                    let is_whole = self.visit_compartments(&mut visit, &mut compartments);
                    if !self.is_there(&visit) {
                        continue;
                    }
                    if is_whole {
                        snapshot.done.push(self.complete_snapshot(visit.bulkhead, visit.sum));
                    } else {
                        snapshot.visit = Some(visit);
                    }
                }
                None if snapshot.wanted.is_empty() => {
                    // The caller may have gone.
                    let _ = snapshot.reply.send(snapshot.done);
                    return;
                }
                None => {}
            }
        }
        self.commands.snapshots.push_front(snapshot);
    }

    fn begin_visit(&self, bulkhead: BulkheadIndex, name: Arc<str>) -> Option<BulkheadVisit> {
        let mut visit = BulkheadVisit { bulkhead, name, left: Vec::new(), sum: Sum::default() };
        if !self.is_there(&visit) {
            return None;
        }
        visit.left = self.compartments_of(bulkhead);
        if let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout {
            visit.sum.add_past(isolated);
        }
        Some(visit)
    }

    /// Returns true if the bulkhead was not removed, and the index not reused.
    fn is_there(&self, visit: &BulkheadVisit) -> bool {
        let entry = self.bulkheads.get(visit.bulkhead);
        entry.is_some_and(|entry| entry.presence == Presence::Here && Arc::ptr_eq(&entry.name, &visit.name))
    }

    /// Visits further parts. Returns true if all have been visited.
    fn visit_compartments(&self, visit: &mut BulkheadVisit, compartments: &mut usize) -> bool {
        while *compartments > 0
            && let Some(place) = visit.left.pop()
        {
            *compartments -= 1;
            // The part may have been removed meanwhile.
            if let Some(compartment) = self.compartments.get(place) {
                visit.sum.add(&self.links, compartment, self.now);
            }
        }
        visit.left.is_empty()
    }

    /// Adds a tenant's part that is being forgotten, unless already visited.
    pub(super) fn add_forgotten_to_snapshot(
        &mut self,
        bulkhead: BulkheadIndex,
        place: CompartmentIndex,
        gone: &Compartment,
    ) {
        let snapshots = self.commands.snapshots.iter_mut();
        for visit in snapshots.filter_map(|snapshot| snapshot.visit.as_mut()) {
            if visit.bulkhead == bulkhead
                && let Some(at) = visit.left.iter().position(|&left| left == place)
            {
                visit.left.swap_remove(at);
                visit.sum.add(&self.links, gone, self.now);
            }
        }
    }
}

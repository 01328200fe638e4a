//! Snapshots in pieces. A bulkhead can have thousands of tenants, and visiting all of them would delay jobs for too
//! long. Each part is counted once, even if the part is forgotten before the visit.

use std::collections::VecDeque;
use std::sync::Arc;

use bulkhead_api::Snapshot;
use tokio::sync::oneshot;

use super::DataPlane;
use super::bulkheads::{Compartment, Layout, Presence};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::view::Sum;

/// Maximum number of parts visited per iteration. A snapshot of fewer parts shows a single moment.
const PARTS_PER_TURN: usize = 256;

/// A snapshot in progress.
pub(super) struct SnapshotInPieces {
    reply: oneshot::Sender<Vec<Snapshot>>,
    /// Bulkheads to visit, by index and name.
    wanted: VecDeque<(BulkheadIndex, Arc<str>)>,
    begun: Option<Begun>,
    done: Vec<Snapshot>,
}

/// A partly visited bulkhead.
struct Begun {
    bulkhead: BulkheadIndex,
    name: Arc<str>,
    /// Parts to visit.
    left: Vec<CompartmentIndex>,
    sum: Sum,
}

impl DataPlane {
    /// Starts a snapshot, which usually completes at once.
    pub(super) fn want_snapshot(&mut self, bulkhead: Option<&str>, reply: oneshot::Sender<Vec<Snapshot>>) {
        let wanted =
            self.present().into_iter().map(|bulkhead| (bulkhead, self.bulkheads[bulkhead].name.clone()));
        let wanted = wanted.filter(|(_, name)| bulkhead.is_none_or(|wanted| wanted == &**name)).collect();
        self.orders.snapshots.push_back(SnapshotInPieces { reply, wanted, begun: None, done: Vec::new() });
        if self.orders.snapshots.len() == 1 {
            self.show_a_piece();
        }
    }

    /// Continues the oldest snapshot.
    pub(super) fn show_a_piece(&mut self) {
        let Some(mut snapshot) = self.orders.snapshots.pop_front() else { return };
        if snapshot.reply.is_closed() {
            return;
        }
        let mut parts = PARTS_PER_TURN;
        while parts > 0 {
            if snapshot.begun.is_none() {
                snapshot.begun =
                    snapshot.wanted.pop_front().and_then(|(bulkhead, name)| self.begin(bulkhead, name));
            }
            match snapshot.begun.take() {
                Some(mut begun) => {
                    let is_whole = self.look_at_parts(&mut begun, &mut parts);
                    if !self.is_there(&begun) {
                        continue;
                    }
                    if is_whole {
                        snapshot.done.push(self.whole(begun.bulkhead, begun.sum));
                    } else {
                        snapshot.begun = Some(begun);
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
        self.orders.snapshots.push_front(snapshot);
    }

    fn begin(&self, bulkhead: BulkheadIndex, name: Arc<str>) -> Option<Begun> {
        let mut begun = Begun { bulkhead, name, left: Vec::new(), sum: Sum::default() };
        if !self.is_there(&begun) {
            return None;
        }
        begun.left = self.compartments_of(bulkhead);
        if let Layout::Isolated(isolated) = &self.bulkheads[bulkhead].layout {
            begun.sum.add_past(isolated);
        }
        Some(begun)
    }

    /// Returns true if the bulkhead was not removed, and the index not reused.
    fn is_there(&self, begun: &Begun) -> bool {
        let entry = self.bulkheads.get(begun.bulkhead);
        entry.is_some_and(|entry| entry.presence == Presence::Here && Arc::ptr_eq(&entry.name, &begun.name))
    }

    /// Visits further parts. Returns true if all have been visited.
    fn look_at_parts(&self, begun: &mut Begun, parts: &mut usize) -> bool {
        while *parts > 0
            && let Some(place) = begun.left.pop()
        {
            *parts -= 1;
            // The part may have been removed meanwhile.
            if let Some(part) = self.compartments.get(place) {
                begun.sum.add(&self.links, part, self.now);
            }
        }
        begun.left.is_empty()
    }

    /// Adds a tenant's part that is being forgotten, unless already visited.
    pub(super) fn add_gone_to_snapshot(
        &mut self,
        bulkhead: BulkheadIndex,
        place: CompartmentIndex,
        gone: &Compartment,
    ) {
        let snapshots = self.orders.snapshots.iter_mut();
        for begun in snapshots.filter_map(|snapshot| snapshot.begun.as_mut()) {
            if begun.bulkhead == bulkhead
                && let Some(at) = begun.left.iter().position(|&left| left == place)
            {
                begun.left.swap_remove(at);
                begun.sum.add(&self.links, gone, self.now);
            }
        }
    }
}

//! All links to workers, by index and by spawn number, and work that is deferred to the end of an iteration.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bulkhead_plane::worker_ids::Ids;
use bulkhead_policy::{Time, WorkerId};

use super::keeper_reports::Reaping;
use super::links::Link;
use super::slab::{CompartmentIndex, LinkIndex, Slab, owns_slab};

#[derive(Default)]
pub(super) struct Links {
    slab: Slab<LinkIndex, Link>,
    /// Links by the worker's spawn number.
    pub(super) by_spawn: HashMap<u64, LinkIndex>,
    /// Number of workers and templates ordered so far.
    pub(super) spawned: u64,
    /// Pool of user ids, if each worker has a separate user id.
    ids: Option<Arc<Ids>>,
    /// Dead workers whose descendants are still being reaped.
    pub(super) reaping: HashMap<u64, Reaping>,
    /// Links of dead workers. The descriptors are closed after the clients have been answered.
    pub(super) closed: Vec<Link>,
    /// Links with more input than the maximum per iteration.
    pub(super) unfinished_reads: Vec<LinkIndex>,
    /// Next time to read a paused link.
    pub(super) resume_at: Option<Time>,
    /// Workers that could not be ordered. Reported to policy at the end of the iteration.
    pub(super) failed_spawns: Vec<(CompartmentIndex, WorkerId, String)>,
    /// Results about silent workers that needed no check. Reported to policy at the end of the iteration.
    pub(super) starvation_results: Vec<(CompartmentIndex, WorkerId, bool)>,
}

owns_slab!(Links, LinkIndex, Link);

impl Links {
    pub(super) fn new(ids: Option<Arc<Ids>>) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Returns the link of the worker with this spawn number.
    pub(super) fn of_spawn(&self, spawn: u64) -> Option<&Link> {
        self.slab.get(*self.by_spawn.get(&spawn)?)
    }

    pub(super) fn of_spawn_mut(&mut self, spawn: u64) -> Option<&mut Link> {
        self.slab.get_mut(*self.by_spawn.get(&spawn)?)
    }

    /// Takes a user id for a worker, if each worker has a separate user id.
    pub(super) fn take_id(&self) -> io::Result<Option<u32>> {
        self.ids.as_ref().map(|ids| ids.take()).transpose()
    }

    /// Returns the user id of a worker to the pool. None of the worker's processes must be left.
    pub(super) fn give_back(&self, id: Option<u32>) {
        if let (Some(ids), Some(id)) = (&self.ids, id) {
            ids.give_back(id);
        }
    }

    /// Schedules another read of a link in the next iteration.
    pub(super) fn schedule_read(&mut self, index: LinkIndex) {
        if !self.unfinished_reads.contains(&index) {
            self.unfinished_reads.push(index);
        }
    }

    /// Schedules the next read of a paused link.
    pub(super) fn schedule_resume(&mut self, at: Time) {
        self.resume_at = Some(self.resume_at.map_or(at, |before| before.min(at)));
    }
}

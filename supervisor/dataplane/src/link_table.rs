//! All links to workers: by their places and by the keeper's names, and what of them is put off to the end of a turn.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bulkhead_plane::worker_ids::Ids;
use bulkhead_policy::{Time, WorkerId};

use super::links::Link;
use super::reports::Sweeping;
use super::slab::{CompartmentIndex, LinkIndex, Slab, owns_slab};

#[derive(Default)]
pub(super) struct Links {
    slab: Slab<LinkIndex, Link>,
    /// By the keeper's name for the worker.
    pub(super) by_spawn: HashMap<u64, LinkIndex>,
    /// How many workers were ordered.
    pub(super) spawned: u64,
    /// The user ids of workers, where each has its own.
    ids: Option<Arc<Ids>>,
    /// Workers that are gone, and what they left behind is not.
    pub(super) sweeping: HashMap<u64, Sweeping>,
    /// Of workers that are gone: what they had open is closed when their clients have been told.
    pub(super) gone: Vec<Link>,
    /// Those that had more to read than one turn takes.
    pub(super) again: Vec<LinkIndex>,
    /// When a link that is read less often is read again.
    pub(super) resume_at: Option<Time>,
    /// Workers that could not even be ordered; policy is told at the end of the turn.
    pub(super) failed_spawns: Vec<(CompartmentIndex, WorkerId, String)>,
    /// What is known of silent workers without a look; policy is told at the end of the turn.
    pub(super) looked: Vec<(CompartmentIndex, WorkerId, bool)>,
}

owns_slab!(Links, LinkIndex, Link);

impl Links {
    pub(super) fn new(ids: Option<Arc<Ids>>) -> Self {
        Self { ids, ..Self::default() }
    }

    /// The link of a worker that the keeper knows by this name.
    pub(super) fn of_spawn(&self, spawn: u64) -> Option<&Link> {
        self.slab.get(*self.by_spawn.get(&spawn)?)
    }

    pub(super) fn of_spawn_mut(&mut self, spawn: u64) -> Option<&mut Link> {
        self.slab.get_mut(*self.by_spawn.get(&spawn)?)
    }

    /// A user id for a worker, where each has its own.
    pub(super) fn take_id(&self) -> io::Result<Option<u32>> {
        self.ids.as_ref().map(|ids| ids.take()).transpose()
    }

    /// Takes back the id of a worker of which nothing is left.
    pub(super) fn give_back(&self, id: Option<u32>) {
        if let (Some(ids), Some(id)) = (&self.ids, id) {
            ids.give_back(id);
        }
    }

    /// More is to be read of a link in the next turn.
    pub(super) fn read_again(&mut self, index: LinkIndex) {
        if !self.again.contains(&index) {
            self.again.push(index);
        }
    }

    /// A link is read less often, and not before this.
    pub(super) fn resume_by(&mut self, at: Time) {
        self.resume_at = Some(self.resume_at.map_or(at, |before| before.min(at)));
    }
}

//! All sessions by index, the order of reading, and totals.

use std::collections::HashMap;

use bulkhead_policy::Time;
use bulkhead_shared::JobId;

use super::allowance::Allowance;
use super::sessions::Session;
use super::shares::{Holder, Owner};
use super::slab::{CompartmentIndex, SessionId, SessionIndex, Slab, owns_slab};
use super::turns::Turns;

pub(super) struct Sessions {
    pub(super) slab: Slab<SessionIndex, Session>,
    /// Number of sessions so far.
    pub(super) epochs: u64,
    /// Number of clients, without clients of the control plane.
    pub(super) clients: usize,
    /// Clients with input.
    pub(super) turns: Turns,
    /// Clients with input that can wait, and the time budget for reading them.
    pub(super) patient: Turns,
    pub(super) patience: Allowance,
    /// Total size of unread output to clients, in bytes.
    pub(super) undelivered: usize,
}

owns_slab!(Sessions, SessionIndex, Session);

/// Reciprocal of the processor share for reading clients that can wait.
const PATIENT_PART: i64 = 16;

impl Sessions {
    pub(super) fn new() -> Self {
        Self {
            slab: Slab::default(),
            epochs: 0,
            clients: 0,
            turns: Turns::default(),
            patient: Turns::default(),
            patience: Allowance::one_in(PATIENT_PART),
            undelivered: 0,
        }
    }

    /// Returns true if clients that can wait should be read now.
    pub(super) fn may_read_patient(&mut self, now: Time) -> bool {
        !self.patient.is_empty() && self.patience.may_work(now)
    }

    /// Returns the next time to read clients that can wait.
    pub(super) fn patient_at(&self) -> Option<Time> {
        (!self.patient.is_empty()).then(|| self.patience.resume_at())
    }

    /// Returns the session with this id, if still open.
    #[inline]
    pub(super) fn of(&self, id: SessionId) -> Option<&Session> {
        self.slab.get(id.index).filter(|session| session.epoch == id.epoch)
    }

    #[inline]
    pub(super) fn of_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.slab.get_mut(id.index).filter(|session| session.epoch == id.epoch)
    }

    /// Queues a client that may have input.
    pub(super) fn want_read(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            let turns = if session.standing.can_wait() { &mut self.patient } else { &mut self.turns };
            turns.wait(session.owner, index, &mut session.standing);
        }
    }

    /// Records the job of a request, so that the client can cancel the job.
    pub(super) fn remember_request(
        &mut self,
        id: SessionId,
        number: u64,
        compartment: CompartmentIndex,
        job: JobId,
    ) {
        if let Some(session) = self.of_mut(id) {
            session.requests.insert(number, (compartment, job));
        }
    }

    /// Returns the memory holder of a session.
    pub(super) fn holder(&self, id: SessionId) -> Option<Holder> {
        Some(self.of(id)?.holder)
    }

    /// Returns the idle connection to close for a new client of `owner`. Only the user with the most connections
    /// must give up a connection. Returns `None` if `owner` would then have more connections than that user, or if that
    /// user has no idle connection. So a single user can have all connections, and gives some up when another user
    /// finds none free.
    pub(super) fn idle_for(&self, owner: Owner) -> Option<SessionIndex> {
        // Clients of the control plane have separate permits.
        let clients = || self.slab.iter().filter(|(_, session)| session.place.is_none());
        let mut counts = HashMap::new();
        clients().for_each(|(_, session)| *counts.entry(session.owner).or_insert(0_usize) += 1);
        let own = counts.remove(&owner).unwrap_or(0);
        let (giver, most) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        if own >= most {
            return None;
        }
        let mut of_giver: Vec<_> = clients().filter(|(_, session)| session.owner == giver).collect();
        of_giver.sort_unstable_by_key(|(_, session)| session.active_at);
        of_giver.into_iter().find(|(_, session)| session.is_idle()).map(|(index, _)| index)
    }
}

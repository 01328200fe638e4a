//! All sessions: by their places, whose turn it is to be read, and what they add up to.

use std::collections::HashMap;

use bulkhead_policy::Time;
use bulkhead_shared::JobId;

use super::allowance::Allowance;
use super::sessions::Session;
use super::shares::Holder;
use super::slab::{CompartmentIndex, SessionId, SessionIndex, Slab, owns_slab};
use super::turns::Turns;

pub(super) struct Sessions {
    pub(super) slab: Slab<SessionIndex, Session>,
    /// How many there have been.
    pub(super) epochs: u64,
    /// Those of clients at the jobs socket.
    pub(super) clients: usize,
    /// Clients that have something to be read.
    pub(super) turns: Turns,
    /// Those of them that can wait for the others, and the time that goes into them.
    pub(super) patient: Turns,
    pub(super) patience: Allowance,
    /// Bytes of results that clients have not read.
    pub(super) undelivered: usize,
}

owns_slab!(Sessions, SessionIndex, Session);

/// For those that can wait: one part in so many of a processor's time.
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

    /// Whether those that can wait are to be read now.
    pub(super) fn may_read_patient(&mut self, now: Time) -> bool {
        !self.patient.is_empty() && self.patience.may_work(now)
    }

    /// When those that can wait are to be read.
    pub(super) fn patient_at(&self) -> Option<Time> {
        (!self.patient.is_empty()).then(|| self.patience.resume_at())
    }

    /// The session that had this place then, if it is still there.
    #[inline]
    pub(super) fn of(&self, id: SessionId) -> Option<&Session> {
        self.slab.get(id.index).filter(|session| session.epoch == id.epoch)
    }

    #[inline]
    pub(super) fn of_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.slab.get_mut(id.index).filter(|session| session.epoch == id.epoch)
    }

    /// The connection of a client may have something to be read.
    pub(super) fn want_read(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            let turns = if session.standing.can_wait() { &mut self.patient } else { &mut self.turns };
            turns.wait(session.uid, index, &mut session.standing);
        }
    }

    /// Where a client's job is, for the day it wants to cancel it.
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

    /// The holder of what this session sends.
    pub(super) fn holder(&self, id: SessionId) -> Option<Holder> {
        Some(self.of(id)?.holder)
    }

    /// The connection that is to go for one of this user: none if that user would have more than the one that gives,
    /// or if the one that gives has no idle ones. The places that clients share are so shared by users: one alone may
    /// have all of them, and gives when another finds none free.
    pub(super) fn idle_for(&self, uid: u32) -> Option<SessionIndex> {
        // Those of the control plane have places of their own.
        let clients = || self.slab.iter().filter(|(_, session)| session.place.is_none());
        let mut counts = HashMap::new();
        clients().for_each(|(_, session)| *counts.entry(session.uid).or_insert(0_usize) += 1);
        let own = counts.remove(&uid).unwrap_or(0);
        let (giver, most) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        if own >= most {
            return None;
        }
        let mut of_giver: Vec<_> = clients().filter(|(_, session)| session.uid == giver).collect();
        of_giver.sort_unstable_by_key(|(_, session)| session.active_at);
        of_giver.into_iter().find(|(_, session)| session.is_idle()).map(|(index, _)| index)
    }
}

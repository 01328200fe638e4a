//! All sessions by index, the order of reading, and totals.

use std::collections::HashMap;

use bulkhead_policy::Time;
use bulkhead_shared::JobId;

use super::fair_queue::FairQueue;
use super::sessions::Session;
use super::shares::Holder;
use super::slab::{CompartmentIndex, SessionId, SessionIndex, Slab, owns_slab};
use super::time_budget::TimeBudget;

pub(super) struct Sessions {
    pub(super) slab: Slab<SessionIndex, Session>,
    /// Number of sessions so far.
    pub(super) last_epoch: u64,
    /// Number of clients, without clients of the control plane.
    pub(super) clients: usize,
    /// Clients with input.
    pub(super) fair_queue: FairQueue,
    /// Clients with input that can wait, and the time budget for reading them.
    pub(super) low_priority: FairQueue,
    pub(super) low_priority_budget: TimeBudget,
    /// Total size of unread output to clients, in bytes.
    pub(super) unread_bytes: usize,
}

owns_slab!(Sessions, SessionIndex, Session);

/// Reciprocal of the processor share for reading clients that can wait.
const LOW_PRIORITY_PART: i64 = 16;

impl Sessions {
    pub(super) fn new() -> Self {
        Self {
            slab: Slab::default(),
            last_epoch: 0,
            clients: 0,
            fair_queue: FairQueue::default(),
            low_priority: FairQueue::default(),
            low_priority_budget: TimeBudget::one_in(LOW_PRIORITY_PART),
            unread_bytes: 0,
        }
    }

    /// Returns true if clients that can wait should be read now.
    pub(super) fn can_read_low_priority(&mut self, now: Time) -> bool {
        !self.low_priority.is_empty() && self.low_priority_budget.has_time(now)
    }

    /// Returns the next time to read clients that can wait.
    pub(super) fn low_priority_at(&self) -> Option<Time> {
        (!self.low_priority.is_empty()).then(|| self.low_priority_budget.resume_at())
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
    pub(super) fn schedule_client_read(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            let queue = if session.queue_state.is_low_priority() {
                &mut self.low_priority
            } else {
                &mut self.fair_queue
            };
            queue.push(session.uid, index, &mut session.queue_state);
        }
    }

    /// Records the job of a request, so that the client can cancel the job.
    pub(super) fn record_request(
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

    /// Returns the idle connection to close for a new client of user `uid`. Only the user with the most connections
    /// must give up a connection. Returns `None` if `uid` would then have more connections than that user, or if that
    /// user has no idle connection. So a single user can have all connections, and gives some up when another user
    /// finds none free.
    pub(super) fn idle_session_for(&self, uid: u32) -> Option<SessionIndex> {
        // Clients of the control plane have separate permits.
        let clients = || self.slab.iter().filter(|(_, session)| session.permit.is_none());
        let mut counts = HashMap::new();
        clients().for_each(|(_, session)| *counts.entry(session.uid).or_insert(0_usize) += 1);
        let own = counts.remove(&uid).unwrap_or(0);
        let (next_eviction, most) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        if own >= most {
            return None;
        }
        let mut of_giver: Vec<_> = clients().filter(|(_, session)| session.uid == next_eviction).collect();
        of_giver.sort_unstable_by_key(|(_, session)| session.active_at);
        of_giver.into_iter().find(|(_, session)| session.is_idle()).map(|(index, _)| index)
    }
}

//! Client connections: state, timeouts, requests, and the order of reading and writing.
//!
//! This part reads and writes no socket. `wiring` moves bytes between the endpoints and the buffers of a session.

pub(super) mod endpoint;
mod fair_queue;
mod outcomes;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use bulkhead_linux::peer::Peer;
use bulkhead_plane::access::Grant;
use bulkhead_policy::Time;
use bulkhead_shared::client_protocol::{ClientWelcome, Refused};
use bulkhead_shared::connection::{Inbox, Outbox, Payload, Received};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{JobId, RejectReason};
use foldhash::quality::RandomState;
use tokio::sync::OwnedSemaphorePermit;

pub(super) use outcomes::OutcomeExtensions;

use super::memory::{self, Counted};
use super::shares::Holder;
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId, SessionIndex, Slab, owns_slab};
use super::time_budget::TimeBudget;
use super::unread_loans::ReceiverLoans;
use endpoint::ClientEndpoint;
use fair_queue::{FairQueue, QUANTUM_BYTES, QueueState, read_cost};

/// Timeout for a client's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for a whole frame, from the first byte.
const FRAME_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time in which a client with pending output reads nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Send backlog above which a client is not read, in bytes.
const UNREAD_BYTES_PAUSE: usize = 1024 * 1024;

/// Reciprocal of the processor share for reading clients that can wait.
const LOW_PRIORITY_PART: i64 = 16;

/// Maximum number of unfinished jobs per client.
pub(super) const REQUESTS_MAX: usize = 1 << 20;

/// Capacity up to which a client's request table never shrinks.
const REQUESTS_CAPACITY_KEPT: usize = 1024;

pub(super) struct Session {
    pub(super) end: ClientEndpoint,
    /// Process that connected, if known.
    pub(super) peer: Option<Peer>,
    pub(super) grant: Grant,
    pub(super) phase: Phase,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Memory holder of the client's data.
    pub(super) holder: Holder,
    /// Bulkhead of the current large frame, or else of the last job.
    pub(super) frame_for: Option<BulkheadIndex>,
    /// Memory files that were lent to the client and may be unread.
    pub(super) unread: ReceiverLoans,
    /// Jobs with compartments, by request number.
    pub(super) requests: HashMap<u64, (CompartmentIndex, JobId), RandomState>,
    /// Memory of the current frame, as last counted.
    pub(super) counted_frame: Counted,
    epoch: u64,
    /// State in the fair queue.
    queue_state: QueueState,
    /// Size of the outbox in bytes, as last counted.
    counted_unread: usize,
    mid_frame_since: Option<Time>,
    /// Value of [`Inbox::frames_begun`] after the last read.
    frames_begun: u64,
    unread_since: Option<Time>,
    is_dirty: bool,
    /// True if the client is not read because of the send backlog.
    is_paused: bool,
    /// Permit of a control-plane client, which does not count as a client of the jobs socket.
    permit: Option<OwnedSemaphorePermit>,
    uid: u32,
    /// Time of the last input or output.
    active_at: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    AwaitingHello {
        since: Time,
    },
    Open,
    /// Rejected. The session is closed when the rejection is sent.
    Closing,
}

/// Violation of the protocol, which ends the session, and the message for the client.
pub(super) struct Violation(pub(super) RejectReason, pub(super) String);

/// Identity of a client.
pub(super) struct Client {
    /// Process that connected, if known.
    pub(super) peer: Option<Peer>,
    pub(super) grant: Grant,
    pub(super) uid: u32,
    /// Permit of a control-plane client.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

impl Session {
    /// Extends the timeouts by the length of a pause of the supervisor, because the client could not continue either.
    fn extend_timeouts(&mut self, late: Duration, now: Time) {
        let hello_since = match &mut self.phase {
            Phase::AwaitingHello { since } => Some(since),
            Phase::Open | Phase::Closing => None,
        };
        let times = [hello_since, self.mid_frame_since.as_mut(), self.unread_since.as_mut()];
        times.into_iter().flatten().for_each(|since| *since = (*since + late).min(now));
    }

    /// Returns true if the client has no jobs and nothing is being sent or received.
    fn is_idle(&self) -> bool {
        let has_nothing = self.requests.is_empty() && self.outbox.is_empty() && !self.inbox.is_mid_frame();
        // Input that has just arrived makes the session busy.
        self.phase != Phase::Closing && has_nothing && self.end.is_quiet()
    }

    /// Returns true if the client must not be read because of the send backlog.
    pub(super) fn pause_if_behind(&mut self) -> bool {
        let is_behind = self.outbox.waiting_bytes() > UNREAD_BYTES_PAUSE;
        self.is_paused |= is_behind;
        is_behind
    }

    /// Completes the handshake.
    pub(super) fn welcome(&mut self, welcome: &ClientWelcome<'_>) {
        self.phase = Phase::Open;
        let _ = self.outbox.push(kind::CLIENT_WELCOME, MAGIC, welcome, &[], Payload::NONE);
    }
}

/// All sessions by index, the order of reading, and totals.
pub(super) struct Sessions {
    slab: Slab<SessionIndex, Session>,
    /// Number of sessions so far.
    last_epoch: u64,
    /// Number of clients, without clients of the control plane.
    clients: usize,
    /// Clients with input.
    fair_queue: FairQueue,
    /// Clients with input that can wait, and the time budget for reading them.
    low_priority: FairQueue,
    low_priority_budget: TimeBudget,
    /// Total size of unread output to clients, in bytes.
    unread_bytes: usize,
    /// Sessions with pending output.
    dirty: VecDeque<SessionIndex>,
    /// True if a timeout may be running.
    needs_checks: bool,
}

owns_slab!(Sessions, SessionIndex, Session);

/// Next step for a session after a flush.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterFlush {
    Keep,
    /// Everything was sent to a rejected client.
    Finish,
    /// The client has too many unread bytes. Closes this session, which may be another client's.
    CloseBehind(SessionIndex),
}

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
            dirty: VecDeque::new(),
            needs_checks: false,
        }
    }

    // Opening and closing.

    /// Returns the number of the next session, which is unique.
    pub(super) fn next_epoch(&mut self) -> u64 {
        self.last_epoch += 1;
        self.last_epoch
    }

    /// Adds a session with a unique number and a memory holder.
    pub(super) fn open(
        &mut self,
        end: ClientEndpoint,
        client: Client,
        phase: Phase,
        (epoch, holder): (u64, Holder),
        now: Time,
    ) -> SessionIndex {
        let Client { peer, grant, uid, permit } = client;
        self.clients += usize::from(permit.is_none());
        self.needs_checks |= matches!(phase, Phase::AwaitingHello { .. });
        self.slab.insert(Session {
            end,
            peer,
            grant,
            phase,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            holder,
            frame_for: None,
            unread: ReceiverLoans::default(),
            epoch,
            queue_state: QueueState::default(),
            requests: HashMap::default(),
            counted_frame: Counted::fixed(holder, 0),
            counted_unread: 0,
            mid_frame_since: None,
            frames_begun: 0,
            unread_since: None,
            is_dirty: false,
            is_paused: false,
            permit,
            uid,
            active_at: now,
        })
    }

    /// Removes a session. Returns the session and the memory counted for its frame.
    pub(super) fn close(&mut self, index: SessionIndex) -> Option<(Session, Counted)> {
        let session = self.slab.retire(index)?;
        // A free index must not be flushed for the former session.
        self.dirty.retain(|dirty| *dirty != index);
        self.unread_bytes -= session.counted_unread;
        self.clients -= usize::from(session.permit.is_none());
        let counted = session.counted_frame;
        Some((session, counted))
    }

    /// Returns the number of clients, without clients of the control plane.
    pub(super) fn clients(&self) -> usize {
        self.clients
    }

    /// Returns the total size of unread output to clients, in bytes.
    pub(super) fn unread_bytes(&self) -> usize {
        self.unread_bytes
    }

    pub(super) fn id(&self, index: SessionIndex) -> SessionId {
        SessionId { index, epoch: self.slab[index].epoch }
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

    /// Returns the memory holder of a session.
    pub(super) fn holder(&self, id: SessionId) -> Option<Holder> {
        Some(self.of(id)?.holder)
    }

    /// Returns the session with this memory holder.
    pub(super) fn of_holder(&self, holder: Holder) -> Option<SessionIndex> {
        self.slab.iter().find(|(_, session)| session.holder == holder).map(|(index, _)| index)
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
        let (giver, most) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        if own >= most {
            return None;
        }
        let mut of_giver: Vec<_> = clients().filter(|(_, session)| session.uid == giver).collect();
        of_giver.sort_unstable_by_key(|(_, session)| session.active_at);
        of_giver.into_iter().find(|(_, session)| session.is_idle()).map(|(index, _)| index)
    }

    /// Begins to close a session, and queues the reason for the client. Returns false if the session is closing
    /// already.
    pub(super) fn reject(&mut self, index: SessionIndex, reason: RejectReason, message: &str) -> bool {
        let Some(session) = self.slab.get_mut(index) else { return false };
        if session.phase == Phase::Closing {
            return false;
        }
        session.phase = Phase::Closing;
        let refused = Refused { reason: reason.code(), message };
        // The message is the supervisor's own and short, so it fits.
        let _ = session.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
        self.needs_checks = true;
        self.schedule_flush(index);
        true
    }

    // Reading.

    /// Queues a client that may have input.
    pub(super) fn schedule_read(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            let is_low_priority = session.queue_state.is_low_priority();
            let queue = if is_low_priority { &mut self.low_priority } else { &mut self.fair_queue };
            queue.push(session.uid, index, &mut session.queue_state);
        }
    }

    /// Returns true if clients should be read now.
    pub(super) fn has_input(&self) -> bool {
        !self.fair_queue.is_empty()
    }

    /// Returns true if clients that can wait should be read now.
    pub(super) fn can_read_low_priority(&mut self, now: Time) -> bool {
        !self.low_priority.is_empty() && self.low_priority_budget.has_time(now)
    }

    /// Returns the next time to read clients that can wait.
    pub(super) fn low_priority_at(&self) -> Option<Time> {
        (!self.low_priority.is_empty()).then(|| self.low_priority_budget.resume_at())
    }

    /// Charges the time since `began` for reading clients that can wait.
    pub(super) fn charge_low_priority(&mut self, began: Instant) {
        self.low_priority_budget.charge(began);
    }

    /// Begins the read of the next client, or of the next client that can wait. Returns the client and the maximum
    /// number of bytes to read.
    pub(super) fn begin_read(&mut self, is_low_priority: bool) -> Option<(SessionIndex, usize)> {
        let slab = &mut self.slab;
        let begin =
            |index, round| slab.get_mut(index).is_some_and(|session| session.queue_state.try_begin(round));
        if is_low_priority {
            Some((self.low_priority.begin_read(begin)?, QUANTUM_BYTES))
        } else {
            let index = self.fair_queue.begin_read(begin)?;
            Some((index, self.fair_queue.quantum()))
        }
    }

    /// Ends a read. Returns the cost, even if the client is gone, so that disconnecting clients are bounded like
    /// others. `frames_before` is the value of [`Inbox::frames_begun`] before the read.
    pub(super) fn end_read(&mut self, index: SessionIndex, bytes: usize, frames_before: u64) -> usize {
        let Some(session) = self.slab.get_mut(index) else { return read_cost(bytes, 0) };
        let frames = session.inbox.frames_begun().saturating_sub(frames_before) as usize;
        session.queue_state.end_read(bytes, frames)
    }

    /// Records the result of a read that did not end the session.
    pub(super) fn received(&mut self, index: SessionIndex, received: Received, now: Time) {
        let session = &mut self.slab[index];
        session.active_at = now;
        let is_another = session.inbox.frames_begun() != session.frames_begun;
        session.frames_begun = session.inbox.frames_begun();
        session.mid_frame_since = match (session.inbox.is_mid_frame(), session.mid_frame_since) {
            (true, Some(since)) if !is_another => Some(since),
            (true, _) => Some(now),
            (false, _) => None,
        };
        self.needs_checks |= session.mid_frame_since.is_some();
        let is_read_closed = session.queue_state.is_read_closed();
        if received == Received::More || received == Received::Drained && is_read_closed {
            self.schedule_read(index);
        }
    }

    /// Records that the peer has closed its side. The end of the stream can follow bytes that arrived at the same
    /// time, and is not reported again. The connection must therefore be read to the end.
    pub(super) fn peer_closed(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            session.queue_state.close_read();
        }
    }

    /// Handles a signal of an in-process client, which has written, read or closed the connection.
    pub(super) fn in_process_signalled(&mut self, id: SessionId) {
        let Some(session) = self.of_mut(id) else { return };
        let ClientEndpoint::InProcess(end) = &session.end else { return };
        if end.is_closed() {
            session.queue_state.close_read();
        }
        if !session.outbox.is_empty() {
            self.schedule_flush(id.index);
        }
        self.schedule_read(id.index);
    }

    /// Counts a frame that was rejected before becoming a job.
    pub(super) fn count_rejection(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            session.queue_state.count_rejection();
        }
    }

    /// Returns the memory of the incomplete frame as last counted, and the memory to count from now on. `leaf` returns
    /// the holder for a connection in a bulkhead.
    pub(super) fn count_frame(
        &mut self,
        index: SessionIndex,
        leaf: impl FnOnce(Holder, BulkheadIndex) -> Holder,
    ) -> Option<(Counted, Counted)> {
        let session = self.slab.get_mut(index)?;
        let held = session.inbox.held_bytes();
        let is_large = session.inbox.is_storing();
        // The frame can be given up if no job is lost with the connection.
        let is_alone = session.requests.is_empty() && held >= memory::FRAME_BYTES_MIN;
        let holder = match session.frame_for.filter(|_| is_large) {
            Some(bulkhead) => leaf(session.holder, bulkhead),
            None => session.holder,
        };
        let counted = match is_large || is_alone {
            true => Counted::frame(holder, held),
            false => Counted::fixed(holder, held),
        };
        Some((std::mem::replace(&mut session.counted_frame, counted), counted))
    }

    // Requests.

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

    /// Records a job that a client has just submitted.
    pub(super) fn record_job(
        &mut self,
        id: SessionId,
        number: u64,
        place: (CompartmentIndex, JobId),
        bulkhead: BulkheadIndex,
    ) {
        if let Some(session) = self.of_mut(id) {
            session.requests.insert(number, place);
            session.queue_state.count_job();
            session.frame_for = Some(bulkhead);
        }
    }

    pub(super) fn request(&self, index: SessionIndex, number: u64) -> Option<(CompartmentIndex, JobId)> {
        self.slab.get(index)?.requests.get(&number).copied()
    }

    /// Forgets a request that has its outcome. Returns true if the client is still connected.
    pub(super) fn finish_request(&mut self, id: SessionId, number: u64) -> bool {
        let Some(session) = self.of_mut(id) else { return false };
        session.requests.remove(&number);
        // Frees the memory of a burst of requests.
        let (len, capacity) = (session.requests.len(), session.requests.capacity());
        if capacity > REQUESTS_CAPACITY_KEPT && len < capacity / 8 {
            session.requests.shrink_to(2 * len);
        }
        true
    }

    /// Forgets and returns the jobs of all requests of a client.
    pub(super) fn take_requests(&mut self, index: SessionIndex) -> Vec<(CompartmentIndex, JobId)> {
        let requests = self.slab.get_mut(index).map(|session| std::mem::take(&mut session.requests));
        requests.unwrap_or_default().into_values().collect()
    }

    // Writing.

    /// Schedules a write of the session's output for the end of the iteration.
    #[inline]
    pub(super) fn schedule_flush(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index)
            && !std::mem::replace(&mut session.is_dirty, true)
        {
            self.dirty.push_back(index);
        }
    }

    /// Returns the next session with pending output. [`Self::flushed`] follows.
    pub(super) fn next_dirty(&mut self) -> Option<SessionIndex> {
        self.dirty.pop_front()
    }

    /// Sends a frame without contents to a client that has completed the handshake.
    pub(super) fn send_signal(&mut self, client: SessionId, kind: u8, number: u64) {
        if let Some(session) = self.of_mut(client)
            && session.phase == Phase::Open
        {
            let _ = session.outbox.push(kind, number, &Empty, &[], Payload::NONE);
            self.schedule_flush(client.index);
        }
    }

    /// Records a flush that has left `before - waiting_bytes` bytes fewer in the outbox. `result_bytes_max` is the
    /// maximum size of a result, and `buffered_bytes_max` the memory budget.
    pub(super) fn flushed(
        &mut self,
        index: SessionIndex,
        before: usize,
        now: Time,
        (result_bytes_max, buffered_bytes_max): (u64, usize),
    ) -> AfterFlush {
        let Some(session) = self.slab.get_mut(index) else { return AfterFlush::Keep };
        session.is_dirty = false;
        if before > 0 {
            session.active_at = now;
        }
        let waiting = session.outbox.waiting_bytes();
        self.unread_bytes = self.unread_bytes - session.counted_unread + waiting;
        session.counted_unread = waiting;
        if waiting == 0 {
            session.unread_since = None;
            if session.phase == Phase::Closing {
                return AfterFlush::Finish;
            }
        } else {
            if waiting < before || session.unread_since.is_none() {
                session.unread_since = Some(now);
            }
            self.needs_checks = true;
        }
        if session.is_paused && waiting <= UNREAD_BYTES_PAUSE {
            session.is_paused = false;
            self.schedule_read(index);
        }
        match waiting {
            0 => AfterFlush::Keep,
            _ => self.enforce_unread_limit(index, result_bytes_max, buffered_bytes_max),
        }
    }

    /// Chooses a client to disconnect because of unread output: this client if its output exceeds the maximum size of
    /// a result by more than 16 MiB, or the client with the most if the output of all clients exceeds the memory
    /// budget.
    fn enforce_unread_limit(
        &self,
        index: SessionIndex,
        result_bytes_max: u64,
        buffered_bytes_max: usize,
    ) -> AfterFlush {
        let own = self.slab[index].counted_unread;
        let result_bytes_max = usize::try_from(result_bytes_max).unwrap_or(usize::MAX);
        if own > result_bytes_max.saturating_add(16 * UNREAD_BYTES_PAUSE) {
            return AfterFlush::CloseBehind(index);
        }
        if self.unread_bytes <= buffered_bytes_max {
            return AfterFlush::Keep;
        }
        let worst = self.slab.iter().max_by_key(|(_, session)| session.counted_unread);
        worst.map_or(AfterFlush::Keep, |(worst, _)| AfterFlush::CloseBehind(worst))
    }

    // Timeouts.

    /// Returns true if a timeout may be running.
    pub(super) fn needs_checks(&self) -> bool {
        self.needs_checks
    }

    /// Returns the clients over a timeout. A client with a message must be rejected, and a client without a message
    /// does not read.
    pub(super) fn check_timeouts(&mut self, now: Time) -> Vec<(SessionIndex, Option<&'static str>)> {
        let over = |since: Option<Time>, limit: Duration| since.is_some_and(|at| now.since(at) > limit);
        let (mut late, mut is_any_watched) = (Vec::new(), false);
        for (index, session) in self.slab.iter() {
            let hello_since = match session.phase {
                Phase::AwaitingHello { since } => Some(since),
                _ => None,
            };
            let times = [hello_since, session.mid_frame_since, session.unread_since];
            is_any_watched |= times.iter().any(Option::is_some) || session.phase == Phase::Closing;
            if over(session.unread_since, READ_TIMEOUT) {
                late.push((index, None));
            } else if over(hello_since, HELLO_TIMEOUT) {
                late.push((index, Some("the client did not say hello in time")));
            } else if !session.is_paused && over(session.mid_frame_since, FRAME_TIMEOUT) {
                late.push((index, Some("the client did not finish sending a frame in time")));
            }
        }
        self.needs_checks = is_any_watched;
        late
    }

    /// Extends the timeouts of all clients by the length of a pause of the supervisor.
    pub(super) fn extend_timeouts(&mut self, late: Duration, now: Time) {
        self.slab.values_mut().for_each(|session| session.extend_timeouts(late, now));
    }
}

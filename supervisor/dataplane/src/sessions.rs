//! Client connections: their states, timeouts and requests, and the order in which they are read and written.
//!
//! This module does not use sockets. The wiring moves bytes between the endpoints and a session's buffers.

pub(super) mod endpoint;
mod fair_queue;
mod outcomes;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_api::Text;
use bulkhead_linux::peer::Peer;
use bulkhead_plane::access::{Grant, HttpClient, TokenGrant};
use bulkhead_plane::handover::{SessionClient, SessionState};
use bulkhead_policy::Time;
use bulkhead_shared::client_protocol::{ClientWelcome, Refused, client_capability};
use bulkhead_shared::connection::{Inbox, Outbox, Payload, Received};
use bulkhead_shared::frame::{MAGIC, kind};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{JobId, RejectReason};
use foldhash::quality::RandomState;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(super) use outcomes::OutcomeExtensions;

use super::CLIENT_CAPABILITIES;
use super::memory::{self, Counted};
use super::shares::{Holder, Owner};
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId, SessionIndex, Slab, owns_slab};
use super::time_budget::TimeBudget;
use super::unread_loans::ReceiverLoans;
use endpoint::ClientEndpoint;
use fair_queue::{FairQueue, QUANTUM_BYTES, QueueState, read_cost};

/// Maximum time to wait for a client's HELLO.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time between the arrival of a frame's first byte and the arrival of its last byte.
const FRAME_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time that a client can leave pending output unread.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Size of a client's send backlog, in bytes, above which the data plane stops reading from the client.
const UNREAD_BYTES_PAUSE: usize = 1024 * 1024;

/// Maximum number of jobs listed in GOAWAY. If a client has more jobs than this, GOAWAY is delayed until enough jobs
/// have ended.
const GOAWAY_JOBS_MAX: usize = 4096;

/// Maximum time that a client without jobs can keep its connection open after GOAWAY.
const LEFT_OVER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time that a client without jobs has to read its last outcomes after an upgrade. The old supervisor exits
/// only after its last connection has been closed.
const LAST_READ_TIMEOUT: Duration = Duration::from_secs(600);

/// Divisor for the time spent on reading from low-priority clients, which is at most `1 / LOW_PRIORITY_PART` of one
/// processor's time.
const LOW_PRIORITY_PART: i64 = 16;

/// Maximum number of unfinished jobs per client.
pub(super) const REQUESTS_MAX: usize = 1 << 20;

/// Capacity below which a client's request table is not shrunk.
const REQUESTS_CAPACITY_KEPT: usize = 1024;

pub(super) struct Session {
    pub(super) end: ClientEndpoint,
    /// Process that opened the connection, or `None` if unknown.
    pub(super) peer: Option<Peer>,
    pub(super) grant: Grant,
    pub(super) phase: Phase,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Holder that is charged for the client's memory.
    pub(super) holder: Holder,
    /// Bulkhead to which the large frame that is being received is addressed. If no such frame is being received, the
    /// bulkhead of the client's last job.
    pub(super) frame_for: Option<BulkheadIndex>,
    /// Number of memory-file loans in messages that the client might not have read yet.
    pub(super) unread: ReceiverLoans,
    /// Compartments and IDs of the client's jobs, by request number.
    pub(super) requests: HashMap<u64, (CompartmentIndex, JobId), RandomState>,
    /// Memory used by the frame that is being received, as of the last update of the memory accounting.
    pub(super) counted_frame: Counted,
    epoch: u64,
    /// State of the connection in the fair queue.
    queue_state: QueueState,
    /// Size of the outbox in bytes, as included in the total of all clients' unread output.
    counted_unread: usize,
    mid_frame_since: Option<Time>,
    /// Value of [`Inbox::frames_begun`] after the last read.
    frames_begun: u64,
    unread_since: Option<Time>,
    is_dirty: bool,
    /// Time at which reading from the client was paused because its send backlog is too large. `None` if reading is not
    /// paused.
    paused_since: Option<Time>,
    /// Permit that the client holds if the control plane accepted the client. Clients with a permit are not counted as
    /// clients of the jobs socket.
    permit: Option<OwnedSemaphorePermit>,
    /// True if the next request in the inbox must be handled by the successor. The data plane reads no more from such a
    /// client.
    pub(super) is_held_back: bool,
    /// True if the client supports GOAWAY.
    takes_goaway: bool,
    /// True if GOAWAY was sent. Requests that arrive after GOAWAY are dropped.
    pub(super) is_going_away: bool,
    /// Time at which the client was first found to have no jobs. Set only after GOAWAY, or if the connection cannot be
    /// passed on to another supervisor that has taken over.
    left_over_since: Option<Time>,
    /// Number of SUBMIT frames handled so far, including those of rejected jobs.
    submits: u64,
    owner: Owner,
    /// Time of the most recent input or output.
    active_at: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    AwaitingHello {
        since: Time,
    },
    Open,
    /// The client was rejected. The session is closed once the rejection has been sent.
    Closing,
}

/// Protocol violation that ends the session. Contains the reason code and the message for the client.
pub(super) struct Violation(pub(super) RejectReason, pub(super) String);

/// Identity and permissions of a client.
pub(super) struct Client {
    /// Process that opened the connection, or `None` if unknown.
    pub(super) peer: Option<Peer>,
    pub(super) grant: Grant,
    pub(super) owner: Owner,
    /// Permit held by a client accepted by the control plane.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

impl Client {
    /// Returns the identity of a client accepted by the control plane.
    pub(super) fn over_http(client: HttpClient, permit: OwnedSemaphorePermit) -> Self {
        let (grant, owner) = identity_of(client);
        Self { peer: None, grant, owner, permit: Some(permit) }
    }

    /// Returns the identity of a client that the previous supervisor's control plane accepted. The previous
    /// supervisor enforces the limit on such connections.
    pub(super) fn passed_on(client: HttpClient) -> Self {
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().ok();
        let (grant, owner) = identity_of(client);
        Self { peer: None, grant, owner, permit }
    }
}

fn identity_of(client: HttpClient) -> (Grant, Owner) {
    match client {
        HttpClient::Operator { uid } => (Grant::Unrestricted, Owner::User(uid)),
        HttpClient::Token(TokenGrant { id, rules, .. }) => (Grant::Rules(rules), Owner::Token(id)),
    }
}

impl Session {
    /// Returns the connection's state for another supervisor.
    pub(super) fn state(&self) -> SessionState {
        let client = match (self.owner, &self.permit) {
            (Owner::Token(id), _) => SessionClient::Token { id },
            (Owner::User(uid), Some(_)) => SessionClient::Operator { uid },
            (Owner::User(_) | Owner::Workers, _) => SessionClient::Peer,
        };
        SessionState {
            is_open: self.phase == Phase::Open,
            capabilities: CLIENT_CAPABILITIES,
            client,
            takes_goaway: self.takes_goaway,
            submits: self.submits,
        }
    }

    /// Restores the state of a connection that another supervisor passed on. `unread` contains bytes that the other
    /// supervisor had received but not handled.
    pub(super) fn restore(&mut self, state: &SessionState, unread: &[u8]) {
        (self.takes_goaway, self.submits) = (state.takes_goaway, state.submits);
        self.inbox = Inbox::with_partial(unread.to_vec());
    }

    /// Returns a short name for the client, used in job lists.
    pub(super) fn client_name(&self) -> Text {
        match (self.peer, self.owner, &self.end) {
            (_, _, ClientEndpoint::InProcess(_)) => "application".into(),
            (Some(Peer { pid: Some(pid), .. }), ..) => format!("pid:{pid}").into(),
            (Some(Peer { uid, .. }), ..) => format!("uid:{uid}").into(),
            (None, Owner::Token(_), _) => "token".into(),
            (None, ..) => "http".into(),
        }
    }

    /// Extends the client's timeouts by the length of a pause. The client could not make progress during the pause,
    /// because the supervisor did not read.
    fn extend_timeouts(&mut self, late: Duration, now: Time) {
        let hello_since = match &mut self.phase {
            Phase::AwaitingHello { since } => Some(since),
            Phase::Open | Phase::Closing => None,
        };
        let own = [&mut self.mid_frame_since, &mut self.unread_since, &mut self.paused_since];
        let times = own.into_iter().flatten().chain(hello_since);
        times.for_each(|since| *since = (*since + late).min(now));
    }

    /// Returns true if the client has no jobs and no data is in transit.
    fn is_idle(&self) -> bool {
        let has_nothing = self.requests.is_empty() && self.outbox.is_empty() && !self.inbox.is_mid_frame();
        // A session is also not idle if the socket contains unread input.
        self.phase != Phase::Closing && has_nothing && self.end.is_quiet()
    }

    /// Returns true if GOAWAY must be sent. While a client has jobs or leases, its connection cannot be moved to the
    /// successor, so new jobs would have to wait.
    fn can_go_away(&self, has_leases: bool) -> bool {
        let jobs = self.requests.len();
        let is_kept = (jobs > 0 || has_leases) && jobs <= GOAWAY_JOBS_MAX;
        // A large frame is counted as soon as its beginning arrives, but becomes a request only when it is complete.
        let is_complete = is_kept && !self.inbox.is_within_large();
        self.takes_goaway && !self.is_going_away && self.phase == Phase::Open && is_complete
    }

    /// Returns true if the client's lease returns cannot be read, because they arrive behind a request for the
    /// successor. A client that supports GOAWAY sends this request over a new connection instead.
    pub(super) fn hides_lease_returns(&self) -> bool {
        self.is_held_back && !self.takes_goaway
    }

    pub(super) fn count_submit(&mut self) {
        self.submits += 1;
    }

    /// Returns true if a client without jobs has kept its connection open for too long. The time limit is longer until
    /// the client has read all outcomes. Input does not extend the limit, because a client could otherwise keep the old
    /// supervisor from exiting. Must be called repeatedly after GOAWAY was sent, and once another supervisor has taken
    /// over.
    pub(super) fn is_left_over(&mut self, now: Time) -> bool {
        // A large frame has its own time limit, which is suspended while reading from the client is paused.
        let is_sending = self.inbox.is_storing() && self.paused_since.is_none();
        if !self.requests.is_empty() || is_sending {
            self.left_over_since = None;
            return false;
        }
        let since = *self.left_over_since.get_or_insert(now);
        let is_read = self.is_going_away && self.outbox.is_empty();
        now.since(since) >= if is_read { LEFT_OVER_TIMEOUT } else { LAST_READ_TIMEOUT }
    }

    /// Returns true if the client has closed its side of the connection.
    pub(super) fn has_closed(&self) -> bool {
        self.queue_state.is_read_closed()
    }

    /// Pauses reading if the client's send backlog is too large. Returns true if reading is paused.
    pub(super) fn pause_if_behind(&mut self, now: Time) -> bool {
        let is_behind = self.outbox.waiting_bytes() > UNREAD_BYTES_PAUSE;
        if is_behind {
            self.paused_since.get_or_insert(now);
        }
        is_behind
    }

    /// Ends the pause in reading once the client has read enough of its output. Returns true if a pause has ended.
    /// Extends the time limit for an incomplete frame by the pause, because the rest of the frame may have arrived
    /// during the pause.
    fn end_pause(&mut self, now: Time) -> bool {
        if self.outbox.waiting_bytes() > UNREAD_BYTES_PAUSE {
            return false;
        }
        let Some(since) = self.paused_since.take() else { return false };
        self.mid_frame_since = self.mid_frame_since.map(|begun| begun + now.since(since));
        true
    }

    /// Completes the handshake.
    pub(super) fn welcome(&mut self, welcome: &ClientWelcome<'_>, client_capabilities: u64) {
        self.phase = Phase::Open;
        self.takes_goaway = client_capabilities & client_capability::GOAWAY != 0;
        let _ = self.outbox.push(kind::CLIENT_WELCOME, MAGIC, welcome, &[], Payload::NONE);
    }
}

/// All sessions by index, queues of clients to read from, and totals.
pub(super) struct Sessions {
    slab: Slab<SessionIndex, Session>,
    /// Epoch of the newest session. Each session has a unique epoch.
    last_epoch: u64,
    /// Number of clients, excluding clients accepted by the control plane.
    clients: usize,
    /// Clients with input to read.
    fair_queue: FairQueue,
    /// Low-priority clients with input to read, and the time budget for reading from them.
    low_priority: FairQueue,
    low_priority_budget: TimeBudget,
    /// Total size of all clients' unread output, in bytes.
    unread_bytes: usize,
    /// Sessions with output to write.
    dirty: VecDeque<SessionIndex>,
    /// True if at least one session might have a timeout that has to be checked.
    needs_checks: bool,
}

owns_slab!(Sessions, SessionIndex, Session);

/// Action to take after output of a session was written.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterFlush {
    Keep,
    /// All output to a rejected client was written, so its connection must now be shut down.
    Finish,
    /// A client has too much unread output, and its session must be closed. This can be a different session from
    /// the one whose output was written.
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

    /// Returns the epoch for the next session. Each epoch is used only once.
    pub(super) fn next_epoch(&mut self) -> u64 {
        self.last_epoch += 1;
        self.last_epoch
    }

    /// Adds a session with its epoch and its memory holder.
    pub(super) fn open(
        &mut self,
        end: ClientEndpoint,
        client: Client,
        phase: Phase,
        (epoch, holder): (u64, Holder),
        now: Time,
    ) -> SessionIndex {
        let Client { peer, grant, owner, permit } = client;
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
            paused_since: None,
            permit,
            is_held_back: false,
            takes_goaway: false,
            is_going_away: false,
            left_over_since: None,
            submits: 0,
            owner,
            active_at: now,
        })
    }

    /// Removes a session. Returns the session, and the memory counted for its incomplete frame.
    pub(super) fn close(&mut self, index: SessionIndex) -> Option<(Session, Counted)> {
        let session = self.slab.retire(index)?;
        // If the index remained queued, it would refer to the next session with the same index.
        self.dirty.retain(|dirty| *dirty != index);
        self.unread_bytes -= session.counted_unread;
        self.clients -= usize::from(session.permit.is_none());
        let counted = session.counted_frame;
        Some((session, counted))
    }

    /// Returns the number of clients, excluding clients accepted by the control plane.
    pub(super) fn clients(&self) -> usize {
        self.clients
    }

    /// Returns the total size of all clients' unread output, in bytes.
    pub(super) fn unread_bytes(&self) -> usize {
        self.unread_bytes
    }

    pub(super) fn id(&self, index: SessionIndex) -> SessionId {
        SessionId { index, epoch: self.slab[index].epoch }
    }

    /// Returns the session with this ID, or `None` if the session was closed.
    #[inline]
    pub(super) fn of(&self, id: SessionId) -> Option<&Session> {
        self.slab.get(id.index).filter(|session| session.epoch == id.epoch)
    }

    #[inline]
    pub(super) fn of_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.slab.get_mut(id.index).filter(|session| session.epoch == id.epoch)
    }

    pub(super) fn holder(&self, id: SessionId) -> Option<Holder> {
        Some(self.of(id)?.holder)
    }

    pub(super) fn of_holder(&self, holder: Holder) -> Option<SessionIndex> {
        self.slab.iter().find(|(_, session)| session.holder == holder).map(|(index, _)| index)
    }

    /// Returns the idle connection to close to make room for a new client of `owner`. The connection belongs to the
    /// user with the most connections. Returns `None` if `owner` would then have more connections than that user, or if
    /// that user has no idle connection. A single user can therefore have all connections, but loses idle ones when
    /// another user connects.
    fn idle_session_for(&self, owner: Owner) -> Option<SessionIndex> {
        // Clients accepted by the control plane have separate permits and are not counted.
        let clients = || self.slab.iter().filter(|(_, session)| session.permit.is_none());
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

    /// Returns the idle connection to close to make room for a new client of `owner`, or `None` if there is still room.
    /// If no connection can be closed, returns an error message for the client.
    pub(super) fn find_room(
        &self,
        owner: Owner,
        is_full: bool,
        clients_max: usize,
    ) -> Result<Option<SessionIndex>, String> {
        if !is_full {
            return Ok(None);
        }
        self.idle_session_for(owner).map(Some).ok_or_else(|| {
            format!(
                "{clients_max} clients are already connected, which is the maximum that max_clients and the limit on \
                 open files allow; try again later"
            )
        })
    }

    /// Rejects a client. Sends the reason, and then closes the session. Returns false if the session is already being
    /// closed.
    pub(super) fn reject(&mut self, index: SessionIndex, reason: RejectReason, message: &str) -> bool {
        let Some(session) = self.slab.get_mut(index) else { return false };
        if session.phase == Phase::Closing {
            return false;
        }
        session.phase = Phase::Closing;
        let refused = Refused { reason: reason.code(), message };
        // The rejection fits into a frame, because the supervisor's own messages are short.
        let _ = session.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
        self.needs_checks = true;
        self.schedule_flush(index);
        true
    }

    // Reading.

    /// Schedules a read from a client that might have input.
    pub(super) fn schedule_read(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            let is_low_priority = session.queue_state.is_low_priority();
            let queue = if is_low_priority { &mut self.low_priority } else { &mut self.fair_queue };
            queue.push(session.owner, index, &mut session.queue_state);
        }
    }

    /// Resumes reading from each client that has a held-back request.
    pub(super) fn read_held_back(&mut self) {
        self.slab.values_mut().for_each(|session| session.left_over_since = None);
        let held_back = |(index, session): (SessionIndex, &Session)| session.is_held_back.then_some(index);
        for index in self.slab.iter().filter_map(held_back).collect::<Vec<_>>() {
            self.slab[index].is_held_back = false;
            self.schedule_read(index);
        }
    }

    /// Returns true if a client with normal priority has input.
    pub(super) fn has_input(&self) -> bool {
        !self.fair_queue.is_empty()
    }

    /// Returns true if a low-priority client has input and the time budget allows reading it.
    pub(super) fn can_read_low_priority(&mut self, now: Time) -> bool {
        !self.low_priority.is_empty() && self.low_priority_budget.has_time(now)
    }

    /// Returns the time at which reading from low-priority clients can resume.
    pub(super) fn low_priority_at(&self) -> Option<Time> {
        (!self.low_priority.is_empty()).then(|| self.low_priority_budget.resume_at())
    }

    /// Charges the time since `began` to the time budget for reading from low-priority clients.
    pub(super) fn charge_low_priority(&mut self, began: Instant) {
        self.low_priority_budget.charge(began);
    }

    /// Begins a read from the next client in a queue. Returns the client and the maximum number of bytes to
    /// read.
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

    /// Completes a read from a client and returns the cost of the read. The cost is charged even if the session is
    /// gone, so that clients cannot avoid the limits by disconnecting. `frames_before` is the value of
    /// [`Inbox::frames_begun`] before the read.
    pub(super) fn end_read(&mut self, index: SessionIndex, bytes: usize, frames_before: u64) -> usize {
        let Some(session) = self.slab.get_mut(index) else { return read_cost(bytes, 0) };
        let frames = session.inbox.frames_begun().saturating_sub(frames_before) as usize;
        session.queue_state.end_read(bytes, frames)
    }

    /// Records the result of a read from a client's connection.
    pub(super) fn received(&mut self, index: SessionIndex, received: Received, now: Time) {
        let session = &mut self.slab[index];
        session.active_at = now;
        let is_another = session.inbox.frames_begun() != session.frames_begun;
        session.frames_begun = session.inbox.frames_begun();
        session.mid_frame_since = match (session.inbox.is_mid_frame(), session.mid_frame_since) {
            // The request is complete, but is held until the client's jobs have ended.
            _ if session.is_held_back => None,
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

    /// Records that the client has closed its side. Bytes that arrived before the end of the stream are not reported
    /// again by the event loop, so the connection must be read to the end.
    pub(super) fn peer_closed(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            session.queue_state.close_read();
        }
    }

    /// Handles a signal by which an in-process client announces a read, a write or the end of the connection.
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

    /// Counts a frame that was rejected before it became a job.
    pub(super) fn count_rejection(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            session.queue_state.count_rejection();
        }
    }

    /// Returns the memory used by an incomplete frame: the amount that was last counted, and the current amount. `leaf`
    /// returns the holder for a connection in a bulkhead.
    pub(super) fn count_frame(
        &mut self,
        index: SessionIndex,
        leaf: impl FnOnce(Holder, BulkheadIndex) -> Holder,
    ) -> Option<(Counted, Counted)> {
        let session = self.slab.get_mut(index)?;
        let held = session.inbox.held_bytes();
        let is_large = session.inbox.is_storing();
        // Discarding an incomplete frame also closes the connection, so a frame can be discarded only if the connection
        // has no jobs.
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

    /// Records the job that was submitted under a request number, so that the client can cancel the job by this number.
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

    /// Removes a request whose outcome is known. Returns true if the client is still connected.
    pub(super) fn finish_request(&mut self, id: SessionId, number: u64) -> bool {
        let Some(session) = self.of_mut(id) else { return false };
        session.requests.remove(&number);
        // Shrinks the table, which may have grown during a burst of requests.
        let (len, capacity) = (session.requests.len(), session.requests.capacity());
        if capacity > REQUESTS_CAPACITY_KEPT && len < capacity / 8 {
            session.requests.shrink_to(2 * len);
        }
        true
    }

    /// Removes all requests of a client whose session is being closed, and returns their jobs. Marks the session as
    /// closing, because cancelling one job can cause the rejection of another, which must not be passed on to a
    /// fallback.
    pub(super) fn begin_closing(&mut self, index: SessionIndex) -> Vec<(CompartmentIndex, JobId)> {
        let Some(session) = self.slab.get_mut(index) else { return Vec::new() };
        session.phase = Phase::Closing;
        std::mem::take(&mut session.requests).into_values().collect()
    }

    // Writing.

    /// Schedules the session's output to be written at the end of the iteration.
    #[inline]
    pub(super) fn schedule_flush(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index)
            && !std::mem::replace(&mut session.is_dirty, true)
        {
            self.dirty.push_back(index);
        }
    }

    /// Returns the next session that has output to write. The caller must then call [`Self::flushed`].
    pub(super) fn next_dirty(&mut self) -> Option<SessionIndex> {
        self.dirty.pop_front()
    }

    /// Returns true if GOAWAY must be sent to a client.
    pub(super) fn can_go_away(
        &self,
        index: SessionIndex,
        has_leases: impl FnOnce(SessionId) -> bool,
    ) -> bool {
        self.slab.get(index).is_some_and(|session| session.can_go_away(has_leases(self.id(index))))
    }

    /// Sends GOAWAY, which asks a client to open a new connection.
    pub(super) fn send_goaway(&mut self, index: SessionIndex) {
        if let Some(session) = self.slab.get_mut(index) {
            session.is_going_away = true;
            self.needs_checks = true;
            // The held-back request is dropped because the client will submit it again over the new connection.
            session.is_held_back = false;
            let taken: Vec<u8> = session.requests.keys().flat_map(|number| number.to_le_bytes()).collect();
            let payload = Payload::Copied(&taken);
            let _ = session.outbox.push(kind::GOAWAY, session.submits, &Empty, &[], payload);
            self.schedule_flush(index);
            self.schedule_read(index);
        }
    }

    /// Sends a frame without contents to a client whose handshake is complete.
    pub(super) fn send_signal(&mut self, client: SessionId, kind: u8, number: u64) {
        if let Some(session) = self.of_mut(client)
            && session.phase == Phase::Open
        {
            let _ = session.outbox.push(kind, number, &Empty, &[], Payload::NONE);
            self.schedule_flush(client.index);
        }
    }

    /// Records that `before - waiting_bytes` bytes of the output were written. `result_bytes_max` is the maximum size
    /// of a result, and `buffered_bytes_max` is the memory budget.
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
        if session.end_pause(now) {
            self.schedule_read(index);
        }
        match waiting {
            0 => AfterFlush::Keep,
            _ => self.enforce_unread_limit(index, result_bytes_max, buffered_bytes_max),
        }
    }

    /// Chooses a client to disconnect because it does not read its output. The given client is chosen if its unread
    /// output exceeds the maximum size of a result by more than 16 MiB. If the unread output of all clients together
    /// exceeds the memory budget, the client with the most unread output is chosen.
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

    /// Returns true if at least one session might have a timeout that has to be checked.
    pub(super) fn needs_checks(&self) -> bool {
        self.needs_checks
    }

    /// Returns the clients that have exceeded a timeout. Clients with a message must be rejected. Clients without a
    /// message must be disconnected, because they do not read their output or did not disconnect after GOAWAY.
    pub(super) fn check_timeouts(&mut self, now: Time) -> Vec<(SessionIndex, Option<&'static str>)> {
        let over = |since: Option<Time>, limit: Duration| since.is_some_and(|at| now.since(at) > limit);
        let (mut late, mut is_any_watched) = (Vec::new(), false);
        for index in self.slab.indices() {
            let Some(session) = self.slab.get_mut(index) else { continue };
            let hello_since = match session.phase {
                Phase::AwaitingHello { since } => Some(since),
                _ => None,
            };
            let times = [hello_since, session.mid_frame_since, session.unread_since];
            is_any_watched |=
                times.iter().any(Option::is_some) || session.phase == Phase::Closing || session.is_going_away;
            if over(session.unread_since, READ_TIMEOUT) || session.is_going_away && session.is_left_over(now)
            {
                late.push((index, None));
            } else if over(hello_since, HELLO_TIMEOUT) {
                late.push((index, Some("the client did not send HELLO in time")));
            } else if session.paused_since.is_none() && over(session.mid_frame_since, FRAME_TIMEOUT) {
                late.push((index, Some("the client did not finish sending a frame in time")));
            }
        }
        self.needs_checks = is_any_watched;
        late
    }

    /// Extends the timeouts of all clients by the length of a pause during which the supervisor did not read.
    pub(super) fn extend_timeouts(&mut self, late: Duration, now: Time) {
        self.slab.values_mut().for_each(|session| session.extend_timeouts(late, now));
    }
}

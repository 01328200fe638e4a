//! Accepts client connections, moves bytes between the sockets and the sessions, and closes sessions. `acceptor` limits
//! the time for accepting, and `sessions` decides which client is read next. `frames` decodes the bytes, `submissions`
//! checks jobs, and `outcomes` sends replies.

mod frames;
mod outcomes;
mod submissions;

use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bulkhead_api::Severity;
use bulkhead_plane::access::{Grant, HttpClient};
use bulkhead_plane::peer_check::{self, ClientRejection, SocketKind};
use bulkhead_policy::Event;
use bulkhead_shared::connection::Inbox;
use bulkhead_shared::{RejectReason, in_process};
use tokio::sync::OwnedSemaphorePermit;

use crate::memory::memory_full_rejection;
use crate::rejections::RejectionEvent;
use crate::sessions::endpoint::ClientEndpoint;
use crate::sessions::{AfterFlush, Client, Phase};
use crate::shares::{Holder, Owner};
use crate::slab::SessionIndex;
use crate::{CHECK_INTERVAL, DataPlane, Endpoint, Incoming};

/// Maximum number of connections accepted per iteration. The limit is low because identifying a new client takes
/// time, and connected clients take precedence.
const ACCEPTS_PER_ITERATION_MAX: usize = 4;

/// Time budget per iteration for accepting connections.
const ACCEPT_TIME: Duration = Duration::from_micros(100);

/// Maximum cost of reading from clients per iteration. The cost is the number of bytes plus a fixed amount per frame.
/// The limit is enough for a few hundred small jobs.
const READ_COST_MAX: usize = 64 * 1024;

/// Time budget per iteration for reading from clients. Once it is used up, no further client is read. Needed in
/// addition to [`READ_COST_MAX`] because closing a client's session takes longer than reading from the client.
const READ_TIME: Duration = Duration::from_micros(100);

impl DataPlane {
    // Connecting.

    /// Accepts waiting connections until the iteration's budget is used up.
    pub(crate) fn accept(&mut self) {
        self.acceptor.arrived();
        let mut first = None;
        for _ in 0..ACCEPTS_PER_ITERATION_MAX {
            if !self.acceptor.can_accept(&self.poll, self.now) {
                if let Some(what) = self.acceptor.delayed(self.now) {
                    self.reporter.supervisor_event(Severity::Warning, what);
                }
                break;
            }
            let began = Instant::now();
            if began.duration_since(*first.get_or_insert(began)) > ACCEPT_TIME {
                break;
            }
            match self.acceptor.accept(&self.poll) {
                Ok(Some(socket)) => self.open_socket_session(socket),
                Ok(None) => break,
                Err(error) => {
                    self.reporter.trouble("failed to accept a client", &error.to_string());
                    break;
                }
            }
            self.acceptor.charge(began);
        }
    }

    fn open_socket_session(&mut self, socket: UnixStream) {
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        let (peer, grant, rejection) = match self.admit(&socket) {
            Ok((peer, grant)) => (Some(peer), grant, None),
            Err(refusal) => (refusal.peer, Grant::none(), Some(refusal)),
        };
        // All clients of unknown identity count as one user.
        let owner = Owner::User(peer.map_or(u32::MAX, |peer| peer.uid));
        let client = Client { peer, grant, owner, permit: None };
        let phase = Phase::AwaitingHello { since: self.now };
        let index = self.open_session(ClientEndpoint::Socket(socket), client, phase);
        if let Some(refusal) = rejection {
            self.reject_session(index, refusal.reason, &refusal.message);
            // Sends the rejection and closes the session immediately, so that rejected clients cannot use up the
            // descriptors needed for accepted ones.
            self.flush_session(index);
            if refusal.reason != RejectReason::Overloaded {
                self.report_rejection(SocketKind::Jobs, refusal);
            }
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.sessions.clients() + self.intake.closing() >= self.limits.clients_max
    }

    /// Opens a session for an in-process client. The data plane treats the client like a jobs-socket client whose
    /// identity is known.
    pub(crate) fn open_in_process_session(&mut self, end: in_process::Endpoint) {
        let is_full = self.is_full();
        let owner = Owner::User(rustix::process::geteuid().as_raw());
        let client = Client { peer: None, grant: Grant::Unrestricted, owner, permit: None };
        let phase = Phase::AwaitingHello { since: self.now };
        let index = self.open_session(ClientEndpoint::InProcess(end), client, phase);
        if is_full {
            let most = self.limits.clients_max;
            let message = format!(
                "{most} clients are already connected, which is the maximum that max_clients and the limit on open \
                 files allow; clone an existing client to share its connection"
            );
            self.reject_session(index, RejectReason::Overloaded, &message);
        }
    }

    /// Opens a session for a client accepted by the control plane.
    pub(crate) fn open_control_session(
        &mut self,
        socket: UnixStream,
        permit: OwnedSemaphorePermit,
        client: HttpClient,
    ) {
        let client = Client::over_http(client, permit);
        self.open_session(ClientEndpoint::Socket(socket), client, Phase::Open);
    }

    /// Opens a session. If `end` is a socket, it must be non-blocking. If the client is rejected, the session might
    /// already be closed when this function returns.
    pub(crate) fn open_session(&mut self, end: ClientEndpoint, client: Client, phase: Phase) -> SessionIndex {
        let epoch = self.sessions.next_epoch();
        let holder = self.memory.open(client.owner, epoch);
        let index = self.sessions.open(end, client, phase, (epoch, holder), self.now);
        self.publish_clients();
        let end = &self.sessions[index].end;
        if end.register(self.poll.registry(), Endpoint::Session(index).token()).is_err() {
            self.close_session(index);
        } else if let ClientEndpoint::InProcess(end) = end {
            self.in_process_waker.register_session(self.sessions.id(index), end);
        }
        index
    }

    pub(crate) fn publish_clients(&self) {
        self.counters.clients.store(self.sessions.clients() as u64, Ordering::Relaxed);
    }

    /// Identifies a connecting client. Returns the client's process and permissions, or a rejection. Performs the fast
    /// checks first.
    fn admit(&mut self, socket: &UnixStream) -> Result<(bulkhead_linux::peer::Peer, Grant), ClientRejection> {
        let peer = peer_check::peer_of(socket)?;
        let grant = self.access.grant(peer, socket);
        let is_crowded = grant.is_ok() && self.is_full();
        let room = self.sessions.find_room(Owner::User(peer.uid), is_crowded, self.limits.clients_max);
        let idle = room.map_err(|message| ClientRejection {
            reason: RejectReason::Overloaded,
            ..ClientRejection::forbidden(peer, message)
        })?;
        // A connecting worker is reported as a worker, even if its user would be rejected anyway.
        if grant.is_ok() || self.access.is_own_user(peer) {
            self.access.check_descent(socket, peer)?;
        }
        let grant = grant?;
        if let Some(idle) = idle {
            self.close_idle_session(idle);
        }
        Ok((peer, grant))
    }

    /// Updates the permissions of all clients after `[[access]]` has changed. A client that has lost its permissions
    /// stays connected to receive the outcomes of its earlier jobs, but any further requests are rejected as
    /// `forbidden`.
    pub(crate) fn update_grants(&mut self) {
        for session in self.sessions.values_mut() {
            let peer = session.peer.filter(|_| session.phase != Phase::Closing);
            if let (Some(peer), ClientEndpoint::Socket(socket)) = (peer, &session.end) {
                session.grant = self.access.grant(peer, socket).unwrap_or_else(|_| Grant::none());
            }
        }
    }

    // Disconnecting.

    /// Closes an idle connection to make room for a connection of another user.
    pub(crate) fn close_idle_session(&mut self, index: SessionIndex) {
        let message = "this idle connection was closed to make room for another user: the limit of max_clients \
                       was reached, and your user has the most connections; connect again";
        self.reject_session(index, RejectReason::Overloaded, message);
        self.flush_session(index);
        self.close_session(index);
    }

    pub(crate) fn reject_session(&mut self, index: SessionIndex, reason: RejectReason, message: &str) {
        if self.sessions.reject(index, reason, message) {
            self.cancel_requests(index);
        }
    }

    pub(crate) fn close_session(&mut self, index: SessionIndex) {
        self.cancel_requests(index);
        if self.sessions.get(index).is_some() {
            self.end_leases_of_client(self.sessions.id(index));
        }
        let Some((session, counted)) = self.sessions.close(index) else { return };
        self.memory.close(session.holder, counted);
        self.publish_clients();
        session.end.close(self.poll.registry(), &self.intake);
    }

    fn cancel_requests(&mut self, index: SessionIndex) {
        for (compartment, job) in self.sessions.begin_closing(index) {
            self.apply(compartment, Event::Cancel { job, unless_begun: false }, Incoming::None);
        }
    }

    /// Closes the sessions of clients that have exceeded a timeout, and retries accepting connections.
    pub(crate) fn check_sessions(&mut self) {
        self.accept();
        if self.handover.pauses_reading() {
            // While reading is paused, clients cannot make progress, so their timeouts are extended until the next
            // check.
            return self.sessions.extend_timeouts(CHECK_INTERVAL, self.now);
        }
        for (index, message) in self.sessions.check_timeouts(self.now) {
            match message {
                Some(message) => self.reject_session(index, RejectReason::Invalid, message),
                None => self.close_session(index),
            }
        }
    }

    // Incomplete frames.

    /// Updates the amount of memory that is counted for a session's incomplete frame.
    fn count_frame(&mut self, index: SessionIndex) {
        let memory = &mut self.memory;
        let counted = self.sessions.count_frame(index, |holder, bulkhead| memory.leaf(holder, bulkhead));
        if let Some((was, is)) = counted {
            self.memory.recount(was, is);
        }
    }

    /// Discards a connection's incomplete frame. If the connection has no jobs, closes the connection.
    pub(crate) fn evict_frame(&mut self, holder: Holder) {
        let Some(index) = self.sessions.of_holder(holder) else { return };
        let is_alone = self.sessions[index].requests.is_empty();
        let (reason, message) = memory_full_rejection(self.limits.buffered_bytes_max);
        self.abandon_frame(index, reason, &message);
        if is_alone {
            if let Some(session) = self.sessions.get_mut(index) {
                session.inbox = Inbox::default();
            }
            self.reject_session(index, reason, &message);
        }
        self.count_frame(index);
    }

    /// Rejects the job whose large frame is being received, and discards the rest of the frame. The
    /// connection stays open. Does nothing if no large frame is being received.
    pub(crate) fn abandon_frame(&mut self, index: SessionIndex, reason: RejectReason, message: &str) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if let Some((header, metadata)) = session.inbox.abandon_large() {
            self.reject_submission(index, header, &metadata, reason, message);
        }
    }

    // Reading and writing.

    /// Reads from clients that have sent data, until the iteration's budget is used up.
    pub(crate) fn read_clients(&mut self) {
        if self.handover.pauses_reading() {
            return;
        }
        if self.sessions.has_input() {
            let (began, mut cost) = (Instant::now(), 0);
            while let Some(next) = self.sessions.begin_read(false) {
                cost += self.read_client(next);
                // Most iterations read from one client, and need not look at the clock again.
                if !self.sessions.has_input() || cost >= READ_COST_MAX || began.elapsed() >= READ_TIME {
                    break;
                }
            }
        }
        if self.sessions.can_read_low_priority(self.now) {
            let began = Instant::now();
            while began.elapsed() < READ_TIME
                && let Some(next) = self.sessions.begin_read(true)
            {
                self.read_client(next);
            }
            self.sessions.charge_low_priority(began);
        }
    }

    fn read_client(&mut self, (index, most): (SessionIndex, usize)) -> usize {
        let before = self.sessions[index].inbox.frames_begun();
        let bytes = self.read_session(index, most);
        self.sessions.end_read(index, bytes, before)
    }

    pub(crate) fn flush_session(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        let before = session.outbox.waiting_bytes();
        let is_failed = session.end.flush(&mut session.outbox, &mut self.buffers.pool).is_err();
        let limits = (self.limits.result_bytes_max, self.limits.buffered_bytes_max);
        match self.sessions.flushed(index, before, self.now, limits) {
            _ if is_failed => self.close_session(index),
            AfterFlush::Keep => {}
            AfterFlush::Finish => {
                self.sessions[index].end.finish();
                self.close_session(index);
            }
            AfterFlush::CloseBehind(behind) => self.close_session(behind),
        }
    }

    // Events.

    /// Records the rejection of a connection or of a job. Also sends an event about rejections if such an event is due.
    pub(crate) fn report_rejection(&mut self, socket: SocketKind, refusal: ClientRejection) {
        let (links, compartments) = (&self.links, &self.compartments);
        let worker =
            |ancestors: &[u32]| Some(compartments[links.of_process(ancestors)?.compartment()].bulkhead);
        if let Some(event) = self.rejections.add(self.now, socket, refusal, worker) {
            self.send_rejection_event(event);
        }
    }

    pub(crate) fn report_skipped_rejections(&mut self) {
        for event in self.rejections.due(self.now) {
            self.send_rejection_event(event);
        }
    }

    fn send_rejection_event(&mut self, (bulkhead, severity, what): RejectionEvent) {
        match bulkhead {
            Some(bulkhead) => {
                self.reporter.bulkhead_event(severity, &self.bulkheads[bulkhead].name, what);
            }
            None => self.reporter.supervisor_event(severity, what),
        }
    }
}

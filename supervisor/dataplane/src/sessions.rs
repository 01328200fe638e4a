//! Client connections: accepting, writing, and disconnecting clients that misbehave.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bulkhead_api::Severity;
use bulkhead_plane::access::{Grant, HttpClient, TokenGrant};
use bulkhead_plane::peer_check::{self, ClientRejection, SocketKind};
use bulkhead_policy::{Event, Time};
use bulkhead_shared::client_protocol::Refused;
use bulkhead_shared::connection::{Inbox, Outbox, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::in_process;
use bulkhead_shared::{JobId, RejectReason};
use foldhash::quality::RandomState;
use tokio::sync::OwnedSemaphorePermit;

use super::client_end::ClientEnd;
use super::lends::Unread;
use super::memory::Counted;
use super::shares::{Holder, Kind, Owner};
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId, SessionIndex};
use super::turns::Standing;
use super::{DataPlane, Endpoint, Incoming, JobData, memory};
use bulkhead_linux::peer::Peer;

/// Maximum number of connections accepted per iteration. Connected clients have precedence, because identifying a new
/// client takes time.
const ACCEPTS_PER_TURN: usize = 4;

/// Time after which an iteration accepts no further connection.
const ACCEPT_TIME: Duration = Duration::from_micros(100);

/// Timeout for a client's hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// Timeout for a whole frame, from the first byte.
const FRAME_WITHIN: Duration = Duration::from_secs(30);

/// Maximum time in which a client with pending output reads nothing.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// Send backlog above which a client is not read, in bytes.
pub(super) const UNREAD_BYTES_PAUSE: usize = 1024 * 1024;

pub(super) struct Session {
    pub(super) end: ClientEnd,
    /// Process that connected, if known.
    pub(super) peer: Option<Peer>,
    /// State in the fair queue.
    pub(super) standing: Standing,
    pub(super) grant: Grant,
    pub(super) epoch: u64,
    pub(super) stage: Stage,
    pub(super) inbox: Inbox,
    pub(super) outbox: Outbox,
    /// Jobs with compartments, by request number.
    pub(super) requests: HashMap<u64, (CompartmentIndex, JobId), RandomState>,
    /// Memory holder of the client's data.
    pub(super) holder: Holder,
    /// Memory of the current frame, as last counted.
    pub(super) counted_held: Counted,
    /// Bulkhead of the current large frame, or else of the last job.
    pub(super) frame_for: Option<BulkheadIndex>,
    pub(super) counted_unread: usize,
    pub(super) mid_frame_since: Option<Time>,
    /// Value of [`Inbox::frames_begun`] after the last read.
    pub(super) frames_begun: u64,
    pub(super) unread_since: Option<Time>,
    /// Memory files that were lent to the client and may be unread.
    pub(super) unread: Unread,
    /// The most recent revoked leases, which the client did not return in time.
    pub(super) leases_lost: VecDeque<u64>,
    pub(super) is_dirty: bool,
    pub(super) is_paused: bool,
    /// Permit of a control-plane client, which does not count as a client of the jobs socket.
    pub(super) place: Option<OwnedSemaphorePermit>,
    pub(super) owner: Owner,
    /// Time of the last input or output.
    pub(super) active_at: Time,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    AwaitingHello {
        since: Time,
    },
    Open,
    /// Rejected. The session is closed when the rejection is sent.
    Closing,
}

/// Reason for disconnecting a client, and the message for the client.
pub(super) struct Breach(pub(super) RejectReason, pub(super) String);

impl Session {
    pub(super) fn new(
        end: ClientEnd,
        (peer, grant): (Option<Peer>, Grant),
        stage: Stage,
        (owner, holder): (Owner, Holder),
        (epoch, now): (u64, Time),
    ) -> Self {
        Self {
            end,
            peer,
            standing: Standing::default(),
            grant,
            epoch,
            stage,
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            requests: HashMap::default(),
            counted_held: Counted { holder, bytes: 0, kind: Kind::Fixed },
            frame_for: None,
            holder,
            counted_unread: 0,
            mid_frame_since: None,
            frames_begun: 0,
            unread_since: None,
            unread: Unread::default(),
            leases_lost: VecDeque::new(),
            is_dirty: false,
            is_paused: false,
            place: None,
            owner,
            active_at: now,
        }
    }

    /// Extends the timeouts by the length of a pause of the supervisor, because the client could not continue either.
    pub(super) fn excuse(&mut self, late: Duration, now: Time) {
        let hello_since = match &mut self.stage {
            Stage::AwaitingHello { since } => Some(since),
            Stage::Open | Stage::Closing => None,
        };
        let times = [hello_since, self.mid_frame_since.as_mut(), self.unread_since.as_mut()];
        times.into_iter().flatten().for_each(|since| *since = (*since + late).min(now));
    }

    /// Returns true if the client has no jobs and nothing is being sent or received.
    pub(super) fn is_idle(&self) -> bool {
        let has_nothing = self.requests.is_empty() && self.outbox.is_empty() && !self.inbox.is_mid_frame();
        // Input that has just arrived makes the session busy.
        self.stage != Stage::Closing && has_nothing && self.end.is_quiet()
    }
}

impl DataPlane {
    // Connecting and disconnecting.

    /// Accepts some of the waiting connections, within the time budget. `accept_pending` stays set if more may be
    /// waiting.
    pub(super) fn accept(&mut self) {
        self.entrance.accept_pending = true;
        let began = Instant::now();
        for _ in 0..ACCEPTS_PER_TURN {
            if began.elapsed() > ACCEPT_TIME {
                break;
            }
            if !self.entrance.may_accept(&self.poll, self.now) {
                if let Some(what) = self.entrance.delay(self.now) {
                    self.event(Severity::Warning, None, what);
                }
                break;
            }
            let began = Instant::now();
            let Some(listener) = &self.entrance.listener else {
                self.entrance.all_accepted();
                break;
            };
            let accepted = listener.accept();
            match accepted {
                Ok((socket, _)) => {
                    self.entrance.count_accepted();
                    self.welcome_socket(socket);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.entrance.all_accepted();
                    let heard = self.entrance.hear_arrivals(&self.poll);
                    let error = heard.err().unwrap_or(error);
                    if error.kind() != io::ErrorKind::WouldBlock {
                        // Usually, no descriptors are free. The connection stays in the backlog and is not reported
                        // again, so try again later.
                        self.note_trouble("a client could not be accepted", &error.to_string());
                        self.want_housekeeping();
                    }
                    break;
                }
            }
            self.entrance.allowance.spend(began);
        }
    }

    fn welcome_socket(&mut self, socket: UnixStream) {
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        let (peer, grant, refusal) = match self.admit(&socket) {
            Ok((peer, grant)) => (Some(peer), grant, None),
            Err(refusal) => (refusal.peer, Grant::none(), Some(refusal)),
        };
        self.sessions.clients += 1;
        self.reporter.counters.clients.store(self.sessions.clients as u64, Ordering::Relaxed);
        let stage = Stage::AwaitingHello { since: self.now };
        // All clients of unknown identity share a user.
        let owner = Owner::User(peer.map_or(u32::MAX, |peer| peer.uid));
        let index = self.open_session(ClientEnd::Socket(socket), (peer, grant), stage, None, owner);
        self.want_housekeeping();
        if let Some(refusal) = refusal {
            self.refuse_session(index, refusal.reason, &refusal.message);
            // Sent and closed at once, so that a crowd of rejected clients cannot take the descriptors of accepted
            // ones.
            self.flush_session(index);
            if refusal.reason != RejectReason::Overloaded {
                self.note_refusal(SocketKind::Jobs, refusal);
            }
        }
    }

    /// Serves an in-process client like a client of the jobs socket, except that the identity is known.
    pub(super) fn welcome_embedded(&mut self, end: in_process::Endpoint) {
        let own = rustix::process::geteuid().as_raw();
        let is_full = self.sessions.clients + self.entrance.intake.closing() >= self.limits.clients_max;
        self.sessions.clients += 1;
        self.reporter.counters.clients.store(self.sessions.clients as u64, Ordering::Relaxed);
        let stage = Stage::AwaitingHello { since: self.now };
        let end = ClientEnd::InProcess(end);
        let index = self.open_session(end, (None, Grant::Unrestricted), stage, None, Owner::User(own));
        self.want_housekeeping();
        if is_full {
            let most = self.limits.clients_max;
            let message = format!(
                "{most} clients are connected already, the maximum that max_clients and the limit of open \
                 files allow; share a client by cloning the client"
            );
            self.refuse_session(index, RejectReason::Overloaded, &message);
        }
    }

    /// Serves a client of the control plane.
    pub(super) fn welcome_own(
        &mut self,
        socket: UnixStream,
        place: OwnedSemaphorePermit,
        client: HttpClient,
    ) {
        let (grant, owner) = match client {
            HttpClient::Operator { uid } => (Grant::Unrestricted, Owner::User(uid)),
            HttpClient::Token(TokenGrant { id, rules, .. }) => (Grant::Rules(rules), Owner::Token(id)),
        };
        self.open_session(ClientEnd::Socket(socket), (None, grant), Stage::Open, Some(place), owner);
    }

    /// Opens a session. A socket must be non-blocking. If the session cannot be served, the session is already closed
    /// on return.
    fn open_session(
        &mut self,
        end: ClientEnd,
        (peer, grant): (Option<Peer>, Grant),
        stage: Stage,
        place: Option<OwnedSemaphorePermit>,
        owner: Owner,
    ) -> SessionIndex {
        self.sessions.epochs += 1;
        let holder = self.memory.shares.open(owner, self.sessions.epochs);
        let (epoch, now) = (self.sessions.epochs, self.now);
        let index = self.sessions.slab.insert(Session {
            place,
            ..Session::new(end, (peer, grant), stage, (owner, holder), (epoch, now))
        });
        let token = Endpoint::Session(index).token();
        let session = &self.sessions[index];
        if session.end.register(self.poll.registry(), token).is_err() {
            self.drop_session(index);
        } else if let ClientEnd::InProcess(end) = &session.end {
            self.bell.give_rope(SessionId { index, epoch: session.epoch }, end);
        }
        index
    }

    /// Identifies a client that connects, and returns its permissions or the reason for rejecting it. Cheap checks
    /// come first.
    fn admit(&mut self, socket: &UnixStream) -> Result<(Peer, Grant), ClientRejection> {
        let peer = peer_check::peer_of(socket)?;
        let grant = self.entrance.access.grant(peer, socket);
        let most = self.limits.clients_max;
        let is_full = self.sessions.clients + self.entrance.intake.closing() >= most;
        let idle =
            if grant.is_ok() && is_full { self.sessions.idle_for(Owner::User(peer.uid)) } else { None };
        if grant.is_ok() && is_full && idle.is_none() {
            let message = format!(
                "{most} clients are connected already, the maximum that max_clients and the limit of open \
                 files allow; try again later"
            );
            return Err(ClientRejection {
                reason: RejectReason::Overloaded,
                ..ClientRejection::forbidden(peer, message)
            });
        }
        // A worker that connects is reported as a worker, even if the user has no access anyway.
        if grant.is_ok() || self.entrance.access.is_own_user(peer) {
            self.entrance.access.check_descent(socket, peer)?;
        }
        let grant = grant?;
        if let Some(idle) = idle {
            self.close_idle(idle);
        }
        Ok((peer, grant))
    }

    /// Updates the permissions of all clients after a change of `[[access]]`. A client without permissions stays
    /// connected to receive the outcomes of earlier jobs. Further requests are `forbidden`.
    pub(super) fn grant_again(&mut self) {
        for session in self.sessions.values_mut() {
            let peer = session.peer.filter(|_| session.stage != Stage::Closing);
            if let (Some(peer), ClientEnd::Socket(socket)) = (peer, &session.end) {
                session.grant = self.entrance.access.grant(peer, socket).unwrap_or_else(|_| Grant::none());
            }
        }
    }

    /// Closes an idle connection in favour of another user.
    fn close_idle(&mut self, index: SessionIndex) {
        let message = "this connection was idle, and this user has most of the connections that max_clients \
                       allows: another user needs a connection; connect again";
        self.refuse_session(index, RejectReason::Overloaded, message);
        self.flush_session(index);
        self.drop_session(index);
    }

    pub(super) fn refuse_session(&mut self, index: SessionIndex, reason: RejectReason, message: &str) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if session.stage == Stage::Closing {
            return;
        }
        session.stage = Stage::Closing;
        let refused = Refused { reason: reason.code(), message };
        // The message is the supervisor's own and short, so it fits.
        let _ = session.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
        self.cancel_requests(index);
        self.mark_dirty(Endpoint::Session(index));
        self.want_housekeeping();
    }

    pub(super) fn drop_session(&mut self, index: SessionIndex) {
        self.cancel_requests(index);
        if let Some(session) = self.sessions.get(index) {
            self.drop_leases_of(SessionId { index, epoch: session.epoch });
        }
        let Some(session) = self.sessions.slab.retire(index) else { return };
        // A free index must not be flushed for the former session.
        self.dirty.retain(|&endpoint| endpoint != Endpoint::Session(index));
        let nothing = Counted { holder: session.holder, bytes: 0, kind: Kind::Fixed };
        self.memory.recount(session.counted_held, nothing);
        self.memory.shares.close(session.holder);
        self.sessions.undelivered -= session.counted_unread;
        if session.place.is_none() {
            self.sessions.clients -= 1;
            self.reporter.counters.clients.store(self.sessions.clients as u64, Ordering::Relaxed);
        }
        session.end.close(self.poll.registry(), &self.entrance.intake);
    }

    pub(super) fn cancel_requests(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        let requests = std::mem::take(&mut session.requests);
        for (compartment, job) in requests.into_values() {
            self.apply(compartment, Event::Cancel { job, unless_begun: false }, Incoming::None);
        }
    }

    /// Counts the memory of the incomplete frame. It can be given up if no job is lost with it.
    pub(super) fn count_frame(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        let held = session.inbox.held_bytes();
        let is_large = session.inbox.is_storing();
        let is_alone = session.requests.is_empty() && held >= memory::FRAME_BYTES_MIN;
        let kind = if is_large || is_alone { Kind::Frame } else { Kind::Fixed };
        let holder = match session.frame_for.filter(|_| is_large) {
            Some(bulkhead) => self.memory.shares.leaf(session.holder, bulkhead),
            None => session.holder,
        };
        let counted = Counted { holder, bytes: held, kind };
        let was = std::mem::replace(&mut session.counted_held, counted);
        self.memory.recount(was, counted);
    }

    /// Gives up the incomplete frame of a connection. Closes a connection without jobs.
    pub(super) fn give_frame(&mut self, holder: Holder) {
        let found = self.sessions.iter().find(|(_, session)| session.holder == holder);
        let Some((index, session)) = found else { return };
        let is_alone = session.requests.is_empty();
        let (reason, message) = self.memory_full();
        self.give_up_frame(index, reason, &message);
        if is_alone {
            if let Some(session) = self.sessions.get_mut(index) {
                session.inbox = Inbox::default();
            }
            self.refuse_session(index, reason, &message);
        }
        self.count_frame(index);
    }

    /// Gives up an incomplete large frame, if any, and rejects the job. The connection stays open.
    pub(super) fn give_up_frame(&mut self, index: SessionIndex, reason: RejectReason, message: &str) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if let Some((header, metadata)) = session.inbox.abandon_large() {
            self.reject_frame(index, header, &metadata, reason, message);
        }
    }

    /// Releases the memory of a finished job.
    pub(super) fn free_job(&mut self, record: &mut JobData) {
        self.memory.discharge(&mut record.charge);
        if let Some(payload) = record.held.payload.take() {
            self.buffers.pool.put(payload);
        }
    }

    pub(super) fn flush_session(&mut self, index: SessionIndex) {
        let now = self.now;
        let Some(session) = self.sessions.slab.get_mut(index) else { return };
        session.is_dirty = false;
        let before = session.outbox.waiting_bytes();
        if before > 0 {
            session.active_at = now;
        }
        let flushed = session.end.flush(&mut session.outbox, &mut self.buffers.pool);
        let waiting = session.outbox.waiting_bytes();
        self.sessions.undelivered = self.sessions.undelivered - session.counted_unread + waiting;
        session.counted_unread = waiting;
        match flushed {
            Err(_) => self.drop_session(index),
            Ok(true) => {
                session.unread_since = None;
                if session.stage == Stage::Closing {
                    session.end.finish();
                    self.drop_session(index);
                } else if std::mem::take(&mut session.is_paused) {
                    self.sessions.want_read(index);
                }
            }
            Ok(false) => {
                if waiting < before || session.unread_since.is_none() {
                    session.unread_since = Some(now);
                }
                if session.is_paused && waiting <= UNREAD_BYTES_PAUSE {
                    session.is_paused = false;
                    self.sessions.want_read(index);
                }
                self.want_housekeeping();
                self.bound_undelivered(index);
            }
        }
    }

    /// Disconnects a client whose unread output exceeds the maximum size of a result by more than 16 MiB. If the
    /// unread output of all clients exceeds the memory budget, disconnects the client with the most.
    fn bound_undelivered(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get(index) else { return };
        let own = session.counted_unread;
        let one = usize::try_from(self.limits.result_bytes_max).unwrap_or(usize::MAX);
        let is_too_much = own > one.saturating_add(16 * UNREAD_BYTES_PAUSE);
        let is_over_budget = self.sessions.undelivered > self.limits.buffered_bytes_max;
        if is_too_much {
            self.drop_session(index);
        } else if is_over_budget {
            let worst = self.sessions.iter().max_by_key(|(_, session)| session.counted_unread);
            if let Some((worst, _)) = worst {
                self.drop_session(worst);
            }
        }
    }

    // Stalled clients.

    pub(super) fn look_after_sessions(&mut self) {
        self.accept();
        let now = self.now;
        for index in self.sessions.indices() {
            let Some(session) = self.sessions.get(index) else { continue };
            let over = |since: Option<Time>, limit: Duration| since.is_some_and(|at| now.since(at) > limit);
            let hello_since = match session.stage {
                Stage::AwaitingHello { since } => Some(since),
                _ => None,
            };
            let is_watched = hello_since.is_some()
                || session.mid_frame_since.is_some()
                || session.unread_since.is_some()
                || session.stage == Stage::Closing;
            if over(session.unread_since, READ_WITHIN) {
                self.drop_session(index);
            } else if over(hello_since, HELLO_WITHIN) {
                self.refuse_session(index, RejectReason::Invalid, "no hello came in time");
            } else if !session.is_paused && over(session.mid_frame_since, FRAME_WITHIN) {
                self.refuse_session(
                    index,
                    RejectReason::Invalid,
                    "a frame was begun and not finished in time",
                );
            }
            if is_watched {
                self.want_housekeeping();
            }
        }
    }
}

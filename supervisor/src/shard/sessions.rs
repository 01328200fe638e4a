//! The clients' side: accepting, handshake, jobs in, outcomes out, and cutting off who misbehaves.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bulkhead_policy::{Answer, Event, Submission, Time};
use bulkhead_shared::client_protocol::{
    ClientWelcome, Hello, OutcomeMessage, PROTOCOL_VERSION, Progress, Refused, Submit, role,
};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::connection::{Inbox, Item, Outbox, Payload, Received};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::{
    FRAME_OVERHEAD_BYTES_MAX, INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX,
};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{JobId, Priority, RejectReason, Verdict};
use foldhash::quality::RandomState;
use mio::unix::SourceFd;
use tokio::sync::OwnedSemaphorePermit;

use super::fallback::FallbackState;
use super::memory::Counted;
use super::shares::{Holder, Kind, Owner};
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId, SessionIndex};
use super::turns::Standing;
use super::{Charge, DataPlane, Endpoint, Held, INTEREST, Incoming, JobData, memory};
use crate::access::{self, Grant};
use crate::descriptors::{CAME_WITH_DESCRIPTORS, NOT_TAKEN};
use crate::entry::{self, Door, Refusal};
use bulkhead_linux::peer::Peer;

/// Connections that one turn of the loop takes. Clients that are in come first: to find out who comes is work.
const ACCEPTS_PER_TURN: usize = 4;

/// The time after which it takes no further one.
const ACCEPT_TIME: Duration = Duration::from_micros(100);

/// Time for a client's hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);

/// Time for a frame to arrive whole, from its first byte.
const FRAME_WITHIN: Duration = Duration::from_secs(30);

/// Time in which a client must read something of what waits for it.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// A client with so many unread bytes is not listened to until it reads.
const UNREAD_BYTES_PAUSE: usize = 1024 * 1024;

/// Jobs that one client can have under way.
const REQUESTS_MAX: usize = 1 << 20;

/// Places for requests that a client keeps when it has only a few.
const REQUESTS_KEPT: usize = 1024;

/// By its specification one that makes no sense is as good as none.
fn traceparent(extensions: &Extensions<'_>) -> Option<Traceparent> {
    let text = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok())?;
    Traceparent::parse(text)
}

/// The payload of an answer.
fn result_for<'p>(verdict: &Verdict, incoming: &mut Incoming<'p>) -> Payload<'p> {
    if *verdict == Verdict::Ok { incoming.take() } else { Payload::NONE }
}

pub(super) struct Session {
    socket: UnixStream,
    /// The process that connected, if that could be told.
    pub(super) peer: Option<Peer>,
    /// When it is read.
    pub(super) standing: Standing,
    /// What they may do.
    grant: Grant,
    pub(super) epoch: u64,
    stage: Stage,
    pub(super) inbox: Inbox,
    outbox: Outbox,
    /// By request number: the job, and whose it is.
    pub(super) requests: HashMap<u64, (CompartmentIndex, JobId), RandomState>,
    /// Who what it sends is held for.
    pub(super) holder: Holder,
    /// As last added to the totals of the plane.
    counted_held: Counted,
    /// The bulkhead that a large frame, or else the last job, is for.
    frame_for: Option<BulkheadIndex>,
    pub(super) counted_unread: usize,
    mid_frame_since: Option<Time>,
    /// As of the last read, see [`Inbox::frames_begun`].
    frames_begun: u64,
    unread_since: Option<Time>,
    pub(super) is_dirty: bool,
    is_paused: bool,
    /// Of a client of the control plane's, which does not count among those of the jobs socket.
    pub(super) place: Option<OwnedSemaphorePermit>,
    pub(super) uid: u32,
    /// When something came or went last.
    pub(super) active_at: Time,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    AwaitingHello {
        since: Time,
    },
    Open,
    /// Refused: closed as soon as the refusal is sent.
    Closing,
}

/// Why a client is cut off, and what it is told.
struct Breach(RejectReason, String);

fn is_hello(header: Header) -> bool {
    header.kind == kind::HELLO && header.number == MAGIC
}

fn no_hello() -> Breach {
    let message = "this socket speaks the Bulkhead protocol and expects a hello first; \
                   HTTP is spoken on the admin socket";
    Breach(RejectReason::Invalid, message.into())
}

impl Session {
    /// Whether nothing is in flight, waits or is under way.
    pub(super) fn is_idle(&self) -> bool {
        let has_nothing = self.requests.is_empty() && self.outbox.is_empty() && !self.inbox.is_mid_frame();
        // What has just come makes it another.
        let mut byte = [0];
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        self.stage != Stage::Closing
            && has_nothing
            && matches!(rustix::net::recv(&self.socket, &mut byte, flags), Err(rustix::io::Errno::AGAIN))
    }
}

impl DataPlane {
    // Coming and going.

    /// Lets in some of those who wait; if there may be more, `accept_pending` stays set.
    pub(super) fn accept(&mut self) {
        self.entrance.accept_pending = true;
        let began = Instant::now();
        for taken in 0..ACCEPTS_PER_TURN {
            if taken > 0 && began.elapsed() > ACCEPT_TIME {
                return;
            }
            match self.entrance.listener.accept() {
                Ok((socket, _)) => self.welcome_socket(socket),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.entrance.accept_pending = false;
                    if error.kind() != io::ErrorKind::WouldBlock {
                        // Out of descriptors, as a rule. The connection stays in the backlog; edges do not
                        // come twice, so ask again.
                        self.note_trouble("a client could not be accepted", &error.to_string());
                        self.want_housekeeping();
                    }
                    return;
                }
            }
        }
    }

    fn welcome_socket(&mut self, socket: UnixStream) {
        if socket.set_nonblocking(true).is_err() {
            return;
        }
        let (peer, grant, refusal) = match self.admit(&socket) {
            Ok((peer, grant)) => (Some(peer), grant, None),
            Err(refusal) => (refusal.peer, Grant::nothing(), Some(refusal)),
        };
        self.sessions.clients += 1;
        self.reporter.pulse.clients.store(self.sessions.clients as u64, Ordering::Relaxed);
        let stage = Stage::AwaitingHello { since: self.now };
        // One that cannot be told has its share with all such.
        let uid = peer.map_or(u32::MAX, |peer| peer.uid);
        let index = self.open_session(socket, (peer, grant), stage, None, uid);
        self.want_housekeeping();
        if let Some(refusal) = refusal {
            self.refuse_session(index, refusal.reason, &refusal.message);
            // At once: a crowd that is turned away must not take the descriptors of those who are in.
            self.flush_session(index);
            if refusal.reason != RejectReason::Overloaded {
                self.note_refusal(Door::Jobs, refusal);
            }
        }
    }

    /// Serves a client of the control plane's.
    pub(super) fn welcome_own(&mut self, socket: UnixStream, place: OwnedSemaphorePermit, uid: u32) {
        self.open_session(socket, (None, Grant::Everything), Stage::Open, Some(place), uid);
    }

    /// A session on a socket that does not block. One that cannot be served is gone already.
    fn open_session(
        &mut self,
        socket: UnixStream,
        (peer, grant): (Option<Peer>, Grant),
        stage: Stage,
        place: Option<OwnedSemaphorePermit>,
        uid: u32,
    ) -> SessionIndex {
        self.sessions.epochs += 1;
        let holder = self.memory.shares.open(Owner::User(uid), self.sessions.epochs);
        let fd = socket.as_raw_fd();
        let index = self.sessions.slab.insert(Session {
            socket,
            peer,
            standing: Standing::default(),
            grant,
            epoch: self.sessions.epochs,
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
            is_dirty: false,
            is_paused: false,
            place,
            uid,
            active_at: self.now,
        });
        let token = Endpoint::Session(index).token();
        if self.poll.registry().register(&mut SourceFd(&fd), token, INTEREST).is_err() {
            self.drop_session(index);
        }
        index
    }

    /// Who connected, and what they may do; or why they may not come in. The cheap looks come first.
    fn admit(&mut self, socket: &UnixStream) -> Result<(Peer, Grant), Refusal> {
        let peer = entry::peer_of(socket)?;
        let grant = self.entrance.access.grant(peer, socket);
        let most = self.limits.clients_max;
        let is_full = self.sessions.clients + self.entrance.intake.closing() >= most;
        let idle = if grant.is_ok() && is_full { self.sessions.idle_for(peer.uid) } else { None };
        if grant.is_ok() && is_full && idle.is_none() {
            let message = format!(
                "{most} clients are connected already, which is as many as max_clients and the limit of open \
                 files allow; try again later"
            );
            return Err(Refusal { reason: RejectReason::Overloaded, ..Refusal::forbidden(peer, message) });
        }
        // A worker that tries is told of as one, also where its user may not come in anyway.
        if grant.is_ok() || self.entrance.access.is_own(peer) {
            self.entrance.access.check_descent(socket, peer)?;
        }
        let grant = grant?;
        if let Some(idle) = idle {
            self.close_idle(idle);
        }
        Ok((peer, grant))
    }

    /// Asks anew what each client may do: `[[access]]` is another. One that may nothing any more stays, since its
    /// jobs in hand are to have their outcomes; what it sends from here on is `forbidden`.
    pub(super) fn grant_again(&mut self) {
        for session in self.sessions.values_mut() {
            if let Some(peer) = session.peer.filter(|_| session.stage != Stage::Closing) {
                session.grant =
                    self.entrance.access.grant(peer, &session.socket).unwrap_or_else(|_| Grant::nothing());
            }
        }
    }

    /// Closes a connection that is idle, for another user.
    fn close_idle(&mut self, index: SessionIndex) {
        let message = "this connection was idle, and its user has most of the connections that there may be \
                       (max_clients): another user needs one; connect again";
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
        // The message is ours and short: it always fits.
        let _ = session.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
        self.cancel_requests(index);
        self.mark_dirty(Endpoint::Session(index));
        self.want_housekeeping();
    }

    pub(super) fn drop_session(&mut self, index: SessionIndex) {
        self.cancel_requests(index);
        let Some(session) = self.sessions.slab.retire(index) else { return };
        // A place that is free again must not be flushed for its former owner.
        self.dirty.retain(|&endpoint| endpoint != Endpoint::Session(index));
        let _ = self.poll.registry().deregister(&mut SourceFd(&session.socket.as_raw_fd()));
        let nothing = Counted { holder: session.holder, bytes: 0, kind: Kind::Fixed };
        self.memory.recount(session.counted_held, nothing);
        self.memory.shares.close(session.holder);
        self.sessions.undelivered -= session.counted_unread;
        if session.place.is_none() {
            self.sessions.clients -= 1;
            self.reporter.pulse.clients.store(self.sessions.clients as u64, Ordering::Relaxed);
        }
        self.entrance.intake.close(session.socket);
    }

    fn cancel_requests(&mut self, index: SessionIndex) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        let requests = std::mem::take(&mut session.requests);
        for (compartment, job) in requests.into_values() {
            self.apply(compartment, Event::Cancel { job }, Incoming::None);
        }
    }

    // Frames in. A session goes when it is flushed, or has been read: not while its frames are handled.

    /// Reads once: frames of up to so many bytes together, or the rest of one that has begun. Returns how many
    /// bytes came.
    pub(super) fn session_readable(&mut self, index: SessionIndex, most: usize) -> usize {
        let Some(session) = self.sessions.get_mut(index) else { return 0 };
        if session.outbox.waiting_bytes() > UNREAD_BYTES_PAUSE {
            session.is_paused = true;
            return 0;
        }
        let most = most.max(session.inbox.missing_bytes());
        let (growth, holder, frame_for) = (session.inbox.growth(), session.holder, session.frame_for);
        if growth > 0 && !self.may_hold(holder, frame_for, growth) {
            self.give_frame(holder);
        }
        let session = &mut self.sessions[index];
        session.inbox.grow(&mut self.buffers.pool);
        // Taken out while its frames are handled, so that they can reach everything else.
        let mut inbox = std::mem::take(&mut session.inbox);
        let mut scratch = std::mem::take(&mut self.buffers.scratch);
        let mut bytes = 0;
        let result = self.read_session(index, &mut inbox, &mut scratch, (most, &mut bytes));
        self.buffers.scratch = scratch;
        self.sessions[index].inbox = inbox;
        match result {
            Ok(received) => self.after_read(index, received),
            Err(Some(Breach(reason, message))) => self.refuse_session(index, reason, &message),
            Err(None) => self.drop_session(index),
        }
        bytes
    }

    fn read_session(
        &mut self,
        index: SessionIndex,
        inbox: &mut Inbox,
        scratch: &mut bulkhead_shared::connection::Scratch,
        (most, bytes): (usize, &mut usize),
    ) -> Result<Received, Option<Breach>> {
        let session = &self.sessions[index];
        let is_closing = session.stage == Stage::Closing;
        let is_large = inbox.is_within_large();
        let mut is_cut = false;
        let read = inbox.receive_by(scratch, |buffer| {
            let most = if is_large { buffer.len() } else { most.min(buffer.len()) };
            *bytes = self.entrance.intake.receive(&session.socket, &mut buffer[..most])?;
            is_cut = *bytes == most;
            Ok(*bytes)
        });
        let (received, mut batch) = read.map_err(|error| {
            let is_foreign = error.raw_os_error() == Some(CAME_WITH_DESCRIPTORS.raw_os_error());
            (is_foreign && !is_closing).then(|| Breach(RejectReason::Invalid, NOT_TAKEN.into()))
        })?;
        let received = if is_cut && received == Received::Drained { Received::More } else { received };
        if is_closing {
            return Ok(received);
        }
        let invalid = |error: &dyn std::fmt::Display| Some(Breach(RejectReason::Invalid, error.to_string()));
        while let Some(item) = batch.next().map_err(|error| invalid(&error))? {
            match item {
                Item::Frame { header, metadata, payload } => {
                    self.client_frame(index, header, metadata, Incoming::Borrowed(payload))?;
                }
                Item::Large { header, metadata, payload } => {
                    self.client_frame(index, header, &metadata, Incoming::Owned(payload))?;
                }
                Item::Announced { header, metadata } => {
                    if self.client_announces(index, header, metadata)? {
                        let fit = self.buffers.pool.take(batch.buffer_bytes());
                        batch.accept(fit);
                    }
                }
            }
        }
        let is_awaited = self
            .sessions
            .get(index)
            .is_some_and(|session| matches!(session.stage, Stage::AwaitingHello { .. }));
        if is_awaited && inbox.pending_header().is_some_and(|header| !is_hello(header)) {
            return Err(Some(no_hello()));
        }
        Ok(received)
    }

    fn after_read(&mut self, index: SessionIndex, received: Received) {
        let now = self.now;
        self.count_frame(index);
        let session = &mut self.sessions[index];
        session.active_at = now;
        let is_another = session.inbox.frames_begun() != session.frames_begun;
        session.frames_begun = session.inbox.frames_begun();
        session.mid_frame_since = match (session.inbox.is_mid_frame(), session.mid_frame_since) {
            (true, Some(since)) if !is_another => Some(since),
            (true, _) => Some(now),
            (false, _) => None,
        };
        let is_mid_frame = session.mid_frame_since.is_some();
        let is_read_closed = session.standing.is_read_closed;
        if is_mid_frame {
            self.want_housekeeping();
        }
        match received {
            Received::More => self.sessions.want_read(index),
            Received::Drained if is_read_closed => self.sessions.want_read(index),
            Received::Drained => {}
            Received::Closed => self.drop_session(index),
        }
        let wants = self.sessions.get(index).map(|session| (session.holder, session.frame_for));
        self.settle_memory(wants);
    }

    fn client_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Option<Breach>> {
        let session = &self.sessions[index];
        match (session.stage, header.kind) {
            (Stage::AwaitingHello { .. }, _) => self.client_hello(index, header, metadata).map_err(Some),
            (Stage::Open, kind::SUBMIT) => self.submit(index, header, metadata, payload).map_err(Some),
            (Stage::Open, kind::CANCEL) => {
                codec::decode::<Empty>(metadata, &[])
                    .map_err(|error| Some(Breach(RejectReason::Invalid, error.to_string())))?;
                self.cancel_request(index, header.number);
                Ok(())
            }
            (Stage::Open, unknown) if header.is_critical() => {
                let message = format!("a frame of kind {unknown} must be understood, and is not");
                Err(Some(Breach(RejectReason::Invalid, message)))
            }
            (Stage::Open | Stage::Closing, _) => Ok(()),
        }
    }

    fn client_hello(&mut self, index: SessionIndex, header: Header, metadata: &[u8]) -> Result<(), Breach> {
        let invalid = |message: String| Breach(RejectReason::Invalid, message);
        if !is_hello(header) {
            return Err(no_hello());
        }
        let (hello, _) = codec::decode::<Hello<'_>>(metadata, &[]).map_err(|e| invalid(e.to_string()))?;
        if hello.role != role::CLIENT {
            return Err(invalid("only clients connect here; workers are started by the supervisor".into()));
        }
        if !(hello.version_min..=hello.version_max).contains(&PROTOCOL_VERSION) {
            return Err(invalid(format!(
                "{} {} speaks the protocol versions {} to {}, this supervisor version {PROTOCOL_VERSION}: \
                 use a matching client library",
                bulkhead_shared::limits::cut(hello.name, 64),
                bulkhead_shared::limits::cut(hello.version, 64),
                hello.version_min,
                hello.version_max
            )));
        }
        let welcome = ClientWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: (self.limits.payload_bytes_max + FRAME_OVERHEAD_BYTES_MAX as u64)
                .min(u64::from(u32::MAX)) as u32,
            capabilities: 0,
            server_version: env!("CARGO_PKG_VERSION"),
        };
        if let Some(session) = self.sessions.get_mut(index) {
            session.stage = Stage::Open;
            let _ = session.outbox.push(kind::CLIENT_WELCOME, MAGIC, &welcome, &[], Payload::NONE);
        }
        self.mark_dirty(Endpoint::Session(index));
        Ok(())
    }

    /// A large frame begins: whether its payload is wanted. If not, its sender is told here.
    fn client_announces(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<bool, Option<Breach>> {
        let session = &self.sessions[index];
        if session.stage != Stage::Open || header.kind != kind::SUBMIT {
            self.client_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        self.check_number(index, header.number).map_err(Some)?;
        match self.check_submit(session, header, metadata) {
            // What would be turned away when it is there need not come.
            Ok(_) if self.stopping => {
                self.reject_frame(
                    index,
                    header,
                    metadata,
                    RejectReason::Draining,
                    "the supervisor is stopping",
                );
                Ok(false)
            }
            Ok((bulkhead, ..)) => {
                if let Some(session) = self.sessions.get_mut(index) {
                    session.frame_for = Some(bulkhead);
                }
                Ok(true)
            }
            Err((reason, message)) => {
                self.reject_frame(index, header, metadata, reason, &message);
                Ok(false)
            }
        }
    }

    // Jobs.

    fn submit(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Breach> {
        self.check_number(index, header.number)?;
        let session = &self.sessions[index];
        let id = SessionId { index, epoch: session.epoch };
        let has_room = session.requests.len() < REQUESTS_MAX;
        let (bulkhead, submit, traceparent) = match self.check_submit(session, header, metadata) {
            Ok(_) if !has_room => {
                let message = format!("this client has {REQUESTS_MAX} jobs under way");
                self.reject_frame(index, header, metadata, RejectReason::Overloaded, &message);
                return Ok(());
            }
            Ok(checked) => checked,
            Err((reason, message)) => {
                self.reject_frame(index, header, metadata, reason, &message);
                return Ok(());
            }
        };
        let (priority, idempotent) =
            (Priority::from_code(submit.priority).unwrap_or_default(), submit.idempotent != 0);
        let compartment = self.compartment_for(bulkhead, submit.tenant);
        let tenant = self.compartments[compartment].policy.tenant(submit.tenant);
        let label = self.compartments[compartment].policy.label(tenant) as u32;
        let entry = &mut self.bulkheads[bulkhead];
        entry.tally.submit(priority);
        let has_chain = !entry.fallback.is_empty();
        let keeps = idempotent && (entry.retries || has_chain);
        let is_repeatable = keeps || payload.len() <= INLINE_PAYLOAD_BYTES_MAX;
        let digest = entry.digest(submit.operation, payload.bytes());
        let deadline = (submit.deadline_us > 0).then(|| Duration::from_micros(submit.deadline_us));
        let fallback = has_chain.then(|| {
            let limits = self.compartments[compartment].policy.limits();
            Box::new(FallbackState {
                entry: (bulkhead, compartment),
                chain: entry.fallback.clone(),
                next: 0,
                received: self.now,
                limit: deadline.map_or(limits.deadline, |asked| asked.min(limits.deadline_max)),
                priority,
                idempotent,
                cost: submit.cost,
                before: None,
            })
        });
        let trace = self.trace(traceparent);
        let submission = Submission {
            cargo: self.buffers.record(JobData {
                session: id,
                request: header.number,
                operation: submit.operation.into(),
                tenant: submit.tenant.into(),
                trace,
                payload_bytes: payload.len(),
                priority,
                label,
                held: Held { is_repeatable, ..Held::default() },
                given: super::unread::Given::default(),
                charge: Charge::default(),
                fallback,
            }),
            deadline,
            priority,
            idempotent,
            tenant,
            cost: submit.cost,
            is_repeatable,
            digest,
            is_guest: false,
        };
        let job = self.enter(compartment, submission, payload);
        if let Some(job) = job {
            self.sessions.remember_request(id, header.number, compartment, job);
            if let Some(session) = self.sessions.get_mut(index) {
                session.frame_for = Some(bulkhead);
            }
        }
        Ok(())
    }

    /// Whether a job's client is still there.
    pub(super) fn is_awaited(&self, cargo: &JobData) -> bool {
        self.sessions.of(cargo.session).is_some_and(|session| session.stage == Stage::Open)
    }

    /// A number that is in use would have two outcomes.
    fn check_number(&self, index: SessionIndex, number: u64) -> Result<(), Breach> {
        match self.sessions.get(index) {
            Some(session) if session.requests.contains_key(&number) => {
                let message = format!("the request number {number} is in use already");
                Err(Breach(RejectReason::Invalid, message))
            }
            _ => Ok(()),
        }
    }

    /// The checks of shape and of what the client may do, before policy hears of the job.
    fn check_submit<'m>(
        &self,
        session: &Session,
        header: Header,
        metadata: &'m [u8],
    ) -> Result<(BulkheadIndex, Submit<'m>, Option<Traceparent>), (RejectReason, String)> {
        let (submit, extensions) = codec::decode::<Submit<'_>>(metadata, &[])
            .map_err(|error| (RejectReason::Invalid, error.to_string()))?;
        let found = self.bulkheads.by_name.get(submit.bulkhead).copied();
        if let Grant::Entries(entries) = &session.grant
            && let Some(message) = access::refusal(entries, (submit.bulkhead, found.is_some()), submit.tenant)
        {
            return Err((RejectReason::Forbidden, message));
        }
        let Some(bulkhead) = found else {
            let name = bulkhead_shared::limits::cut(submit.bulkhead, 64);
            return Err((RejectReason::NotFound, format!("there is no bulkhead '{}'", name.escape_debug())));
        };
        let invalid = |message: String| Err((RejectReason::Invalid, message));
        if submit.operation.len() > OPERATION_BYTES_MAX {
            return invalid(format!("the operation's name is longer than {OPERATION_BYTES_MAX} bytes"));
        }
        if submit.tenant.len() > TENANT_BYTES_MAX {
            return invalid(format!("the tenant's name is longer than {TENANT_BYTES_MAX} bytes"));
        }
        if submit.operation.contains('\0') || submit.tenant.contains('\0') {
            return invalid("the names of operation and tenant must not hold a NUL byte".into());
        }
        if Priority::from_code(submit.priority).is_none() {
            return invalid(format!("there is no priority {}", submit.priority));
        }
        let size = header.payload_length() as u64;
        let most = self.bulkheads[bulkhead].max_payload;
        if size > most {
            return Err((RejectReason::TooLarge, format!("{size} bytes of payload; max_payload is {most}")));
        }
        // Some of it may be held already.
        let more = (size as usize + memory::JOB_BYTES).saturating_sub(session.counted_held.bytes);
        if !self.may_hold(session.holder, Some(bulkhead), more) {
            return Err(self.memory_full());
        }
        Ok((bulkhead, submit, traceparent(&extensions)))
    }

    /// Counts what is held for the frame that has begun. It can be given up if nothing else is lost with it.
    fn count_frame(&mut self, index: SessionIndex) {
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

    /// A connection gives up its half-received frame; if it has no jobs under way, it is closed.
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

    /// Gives up a large frame that comes in, if one does, and says so: the connection goes on.
    pub(super) fn give_up_frame(&mut self, index: SessionIndex, reason: RejectReason, message: &str) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if let Some((header, metadata)) = session.inbox.abandon_large() {
            self.reject_frame(index, header, &metadata, reason, message);
        }
    }

    /// Gives back what is held for a job that is over.
    pub(super) fn free_job(&mut self, cargo: &mut JobData) {
        self.memory.discharge(&mut cargo.charge);
        if let Some(payload) = cargo.held.payload.take() {
            self.buffers.pool.give(payload);
        }
    }

    /// Answers a submit that policy never hears of.
    fn reject_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        reason: RejectReason,
        message: &str,
    ) {
        let told = codec::decode::<Submit<'_>>(metadata, &[]).ok();
        let name = told.as_ref().map_or("", |(submit, _)| submit.bulkhead);
        if let Some((submit, _)) = &told
            && let Some(&bulkhead) = self.bulkheads.by_name.get(name)
        {
            let priority = Priority::from_code(submit.priority).unwrap_or_default();
            // Who may not speak for a tenant does not count as it.
            let is_forbidden = reason == RejectReason::Forbidden;
            let tenant = if is_forbidden { "" } else { submit.tenant };
            self.count_refused(bulkhead, (priority, self.label_of(tenant)), reason);
        }
        let peer = self.sessions.get(index).and_then(|session| session.peer);
        if let (RejectReason::Forbidden, Some(peer)) = (reason, peer) {
            self.note_refusal(Door::Jobs, Refusal::forbidden(peer, message.to_owned()));
        }
        let verdict = Verdict::Rejected { reason, message: message.to_owned() };
        let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
        let name = bulkhead_shared::limits::cut(name, 64);
        let span = told.and_then(|(submit, extensions)| {
            self.span_of_refused(&submit, traceparent(&extensions), header.payload_length(), &verdict)
        });
        let message = OutcomeMessage {
            retryable: verdict.is_retryable(false).into(),
            ..OutcomeMessage::of_verdict(&verdict, name)
        };
        let message = message.with_times(Duration::ZERO, Duration::ZERO, Duration::ZERO, retry_after);
        self.send_outcome(index, header.number, &message, (None, span), Payload::NONE);
    }

    fn cancel_request(&mut self, index: SessionIndex, number: u64) {
        let request = self.sessions.get(index).and_then(|s| s.requests.get(&number).copied());
        if let Some((compartment, job)) = request {
            self.apply(compartment, Event::Cancel { job }, Incoming::None);
        }
    }

    // Outcomes out.

    pub(super) fn answer(
        &mut self,
        compartment: CompartmentIndex,
        answer: Answer<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) {
        let mut answer = answer;
        if self.compartments[compartment].is_replay {
            return self.replay_answered(compartment, answer);
        }
        self.count_visit(compartment, &answer);
        if answer.cargo.fallback.is_some() {
            match self.pass_on(compartment, answer, incoming) {
                Some(own) => answer = own,
                None => return,
            }
        }
        self.free_job(&mut answer.cargo);
        if answer.attempts > 0 {
            let (now, entry) = (self.now, &mut self.compartments[compartment]);
            let (ran, queued) = (answer.ran, answer.queued);
            if entry.tenant.is_some() {
                entry.latency.record(now, ran, queued);
            }
            let own = entry.policy.limits().deadline;
            let bulkhead = &mut self.bulkheads[entry.bulkhead];
            bulkhead.latency.record(now, ran, queued);
            bulkhead.demand.served(ran, queued);
            if answer.verdict == Verdict::DeadlineRunning {
                bulkhead.demand.was_late(answer.deadline, own);
            }
        }
        if matches!(answer.verdict, Verdict::DeadlineRunning | Verdict::Crashed { .. }) {
            self.note_answer(compartment, &answer);
            self.reporter.last_crashed =
                answer.job.map(|job| (job, answer.cargo.operation.clone(), answer.cargo.tenant.clone()));
        }
        let (id, request) = (answer.cargo.session, answer.cargo.request);
        let index = id.index;
        let is_there = match self.sessions.of_mut(id) {
            Some(session) => {
                session.requests.remove(&request);
                // What a flood took is given back.
                let (len, capacity) = (session.requests.len(), session.requests.capacity());
                if capacity > REQUESTS_KEPT && len < capacity / 8 {
                    session.requests.shrink_to(2 * len);
                }
                true
            }
            None => false,
        };
        let span = answer.cargo.span();
        if answer.cargo.fallback.is_some() || span.is_some() {
            let outcome = self.outcome_in_all(compartment, &answer);
            self.count_end(compartment, &answer.cargo, &outcome.verdict);
            if span.is_some() {
                self.end_span(compartment, &mut answer.cargo, &outcome);
            }
            if is_there {
                let payload = result_for(&outcome.verdict, incoming);
                let about = (outcome.job, span);
                self.send_outcome(index, request, &OutcomeMessage::from_outcome(&outcome), about, payload);
            }
            self.buffers.keep_record(answer.cargo);
            return;
        }
        self.count_end(compartment, &answer.cargo, &answer.verdict);
        if is_there {
            let name = self.owner(compartment).name.clone();
            let message = OutcomeMessage {
                retryable: answer.retryable.into(),
                attempts: answer.attempts,
                worker_pid: answer.worker_pid.unwrap_or(0),
                ..OutcomeMessage::of_verdict(&answer.verdict, &name)
            };
            let message = message.with_times(answer.queued, answer.ran, answer.deadline, answer.retry_after);
            let payload = result_for(&answer.verdict, incoming);
            self.send_outcome(index, request, &message, (answer.job, None), payload);
        }
        self.buffers.keep_record(answer.cargo);
    }

    fn send_outcome(
        &mut self,
        index: SessionIndex,
        request: u64,
        message: &OutcomeMessage<'_>,
        (job, span): (Option<JobId>, Option<Traceparent>),
        payload: Payload<'_>,
    ) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if session.stage == Stage::Closing {
            return;
        }
        // Every text in an outcome is bounded where it enters, so that the metadata fits.
        let number = job.unwrap_or(JobId(0)).to_bytes();
        let number = (tag::JOB, &number[..]);
        let span = span.as_ref().map(|span| (tag::TRACEPARENT, span.as_str().as_bytes()));
        let both = [number, span.unwrap_or(number)];
        let extensions = &both[usize::from(job.is_none())..1 + usize::from(span.is_some())];
        let pushed = session.outbox.push_pooled(
            kind::OUTCOME,
            request,
            message,
            extensions,
            payload,
            &mut self.buffers.pool,
        );
        debug_assert!(pushed.is_ok(), "an outcome did not fit");
        self.mark_dirty(Endpoint::Session(index));
    }

    pub(super) fn send_progress(&mut self, session: SessionId, request: u64, progress: Progress<'_>) {
        let Some(entry) = self.sessions.of_mut(session) else { return };
        // Progress is a courtesy: a client that does not keep up goes without.
        if entry.outbox.waiting_bytes() < UNREAD_BYTES_PAUSE {
            let _ = entry.outbox.push(kind::PROGRESS, request, &progress, &[], Payload::NONE);
            self.mark_dirty(Endpoint::Session(session.index));
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
        let flushed = session.outbox.flush(&session.socket, &mut self.buffers.pool);
        let waiting = session.outbox.waiting_bytes();
        self.sessions.undelivered = self.sessions.undelivered - session.counted_unread + waiting;
        session.counted_unread = waiting;
        match flushed {
            Err(_) => self.drop_session(index),
            Ok(true) => {
                session.unread_since = None;
                if session.stage == Stage::Closing {
                    let _ = session.socket.shutdown(std::net::Shutdown::Write);
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

    /// A client that lets more results pile up than one of the largest, while the memory for all is used
    /// up, or far more than that, is cut off.
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

    // Slow ones.

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

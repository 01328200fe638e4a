//! Frames from clients: reading, decoding, dispatch to handlers. A session is removed after a read or during a flush,
//! but not while frames of the session are handled.

use bulkhead_shared::RejectReason;
use bulkhead_shared::client_protocol::{ClientWelcome, Hello, PROTOCOL_VERSION, capability, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{Inbox, Item, Payload, Received};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::{FRAME_OVERHEAD_BYTES_MAX, cut};
use bulkhead_shared::worker_protocol::Empty;

use super::sessions::{Stage, UNREAD_BYTES_PAUSE, Violation};
use super::slab::SessionIndex;
use super::{DataPlane, Endpoint, Incoming};
use crate::descriptors::{CAME_WITH_DESCRIPTORS, NOT_TAKEN};

fn is_hello(header: Header) -> bool {
    header.kind == kind::HELLO && header.number == MAGIC
}

fn no_hello() -> Violation {
    let message = "this socket speaks the Bulkhead protocol and expects a hello first; \
                   HTTP is spoken on the admin socket";
    Violation(RejectReason::Invalid, message.into())
}

/// Checks that the protocol versions of a peer include the supervisor's. The error message contains `help` for the
/// peer.
pub(super) fn check_version(hello: &Hello<'_>, help: &str) -> Result<(), String> {
    let Hello { version_min, version_max, .. } = *hello;
    if (version_min..=version_max).contains(&PROTOCOL_VERSION) {
        return Ok(());
    }
    let (name, version) = (cut(hello.name, 64), cut(hello.version, 64));
    Err(format!(
        "{name} {version} speaks the protocol versions {version_min} to {version_max}, this supervisor \
         speaks version {PROTOCOL_VERSION}: {help}"
    ))
}

impl DataPlane {
    /// Reads once: frames of up to `most` bytes in total, or the rest of an incomplete frame. Returns the number of
    /// bytes read.
    pub(super) fn read_session_input(&mut self, index: SessionIndex, most: usize) -> usize {
        let Some(session) = self.sessions.get_mut(index) else { return 0 };
        if session.outbox.waiting_bytes() > UNREAD_BYTES_PAUSE {
            session.is_paused = true;
            return 0;
        }
        let most = most.max(session.inbox.missing_bytes());
        let (growth, holder, frame_for) = (session.inbox.growth(), session.holder, session.frame_for);
        if growth > 0 && !self.can_hold(holder, frame_for, growth) {
            self.evict_frame(holder);
        }
        let session = &mut self.sessions[index];
        session.inbox.grow(&mut self.buffers.pool);
        // Taken out of the session so that the handlers of frames can access the whole data plane.
        let mut inbox = std::mem::take(&mut session.inbox);
        let mut scratch = std::mem::take(&mut self.buffers.scratch);
        let mut bytes = 0;
        let result = self.read_session(index, &mut inbox, &mut scratch, (most, &mut bytes));
        self.buffers.scratch = scratch;
        self.sessions[index].inbox = inbox;
        match result {
            Ok(received) => self.finish_read(index, received),
            Err(Some(Violation(reason, message))) => self.reject_session(index, reason, &message),
            Err(None) => self.close_session(index),
        }
        bytes
    }

    pub(super) fn read_session(
        &mut self,
        index: SessionIndex,
        inbox: &mut Inbox,
        scratch: &mut bulkhead_shared::connection::Scratch,
        (most, bytes): (usize, &mut usize),
    ) -> Result<Received, Option<Violation>> {
        let session = &self.sessions[index];
        let is_closing = session.stage == Stage::Closing;
        let is_large = inbox.is_within_large();
        let mut is_cut = false;
        let read = inbox.receive_by(scratch, |buffer| {
            let most = if is_large { buffer.len() } else { most.min(buffer.len()) };
            *bytes = session.end.receive(&self.acceptor.intake, &mut buffer[..most])?;
            is_cut = *bytes == most;
            Ok(*bytes)
        });
        let (received, mut batch) = read.map_err(|error| {
            let is_foreign = error.raw_os_error() == Some(CAME_WITH_DESCRIPTORS.raw_os_error());
            (is_foreign && !is_closing).then(|| Violation(RejectReason::Invalid, NOT_TAKEN.into()))
        })?;
        let received = if is_cut && received == Received::Drained { Received::More } else { received };
        if is_closing {
            return Ok(received);
        }
        let invalid =
            |error: &dyn std::fmt::Display| Some(Violation(RejectReason::Invalid, error.to_string()));
        while let Some(item) = batch.next().map_err(|error| invalid(&error))? {
            match item {
                Item::Frame { header, metadata, payload } => {
                    self.handle_client_frame(index, header, metadata, Incoming::Borrowed(payload))?;
                }
                Item::Large { header, metadata, payload } => {
                    self.handle_client_frame(index, header, &metadata, Incoming::Owned(payload))?;
                }
                Item::Announced { header, metadata } => {
                    if self.handle_client_announcement(index, header, metadata)? {
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

    pub(super) fn finish_read(&mut self, index: SessionIndex, received: Received) {
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
        let is_read_closed = session.queue_state.is_read_closed;
        if is_mid_frame {
            self.schedule_checks();
        }
        match received {
            Received::More => self.sessions.schedule_client_read(index),
            Received::Drained if is_read_closed => self.sessions.schedule_client_read(index),
            Received::Drained => {}
            Received::Closed => self.close_session(index),
        }
        let wants = self.sessions.get(index).map(|session| (session.holder, session.frame_for));
        self.enforce_memory_limit(wants);
    }

    pub(super) fn handle_client_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Option<Violation>> {
        let session = &self.sessions[index];
        match (session.stage, header.kind) {
            (Stage::AwaitingHello { .. }, _) => {
                self.handle_client_hello(index, header, metadata).map_err(Some)
            }
            (Stage::Open, kind::SUBMIT) => self.submit(index, header, metadata, payload).map_err(Some),
            (Stage::Open, kind::CANCEL) => {
                let (_, extensions) = codec::decode::<Empty>(metadata, &[tag::UNLESS_BEGUN])
                    .map_err(|error| Some(Violation(RejectReason::Invalid, error.to_string())))?;
                self.cancel_request(index, header.number, extensions.get(tag::UNLESS_BEGUN).is_some());
                Ok(())
            }
            (Stage::Open, kind::LEASE | kind::LEASE_TAKEN | kind::LEASE_RETURNED) => {
                self.lease_frame(index, header, metadata).map_err(Some)
            }
            (Stage::Open, unknown) if header.is_critical() => {
                let message = format!("a frame of the unknown kind {unknown} must be understood");
                Err(Some(Violation(RejectReason::Invalid, message)))
            }
            (Stage::Open, _) => {
                if let Some(session) = self.sessions.get_mut(index) {
                    session.queue_state.count_rejection();
                }
                Ok(())
            }
            (Stage::Closing, _) => Ok(()),
        }
    }

    pub(super) fn handle_client_hello(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<(), Violation> {
        let invalid = |message: String| Violation(RejectReason::Invalid, message);
        if !is_hello(header) {
            return Err(no_hello());
        }
        let (hello, _) = codec::decode::<Hello<'_>>(metadata, &[]).map_err(|e| invalid(e.to_string()))?;
        if hello.role != role::CLIENT {
            return Err(invalid("only clients connect here; workers are started by the supervisor".into()));
        }
        check_version(&hello, "use a matching client library").map_err(invalid)?;
        let welcome = ClientWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: (self.limits.payload_bytes_max + FRAME_OVERHEAD_BYTES_MAX as u64)
                .min(u64::from(u32::MAX)) as u32,
            capabilities: capability::RUN_LIMIT | capability::MEMORY_FILES | capability::CANCEL_UNLESS_BEGUN,
            server_version: env!("CARGO_PKG_VERSION"),
        };
        if let Some(session) = self.sessions.get_mut(index) {
            session.stage = Stage::Open;
            let _ = session.outbox.push(kind::CLIENT_WELCOME, MAGIC, &welcome, &[], Payload::NONE);
        }
        self.schedule_flush(Endpoint::Session(index));
        Ok(())
    }

    /// Handles the beginning of a large frame. Returns true if the payload is wanted. Otherwise the client has
    /// already been answered.
    pub(super) fn handle_client_announcement(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<bool, Option<Violation>> {
        if self.sessions[index].stage != Stage::Open || header.kind != kind::SUBMIT {
            self.handle_client_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        self.check_request_number(index, header.number).map_err(Some)?;
        match self.check_submit(index, header, metadata) {
            // The job would be rejected on arrival, so the payload is not received.
            Ok(_) if self.is_stopping => {
                self.reject_submission(
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
                self.reject_submission(index, header, metadata, reason, &message);
                Ok(false)
            }
        }
    }
}

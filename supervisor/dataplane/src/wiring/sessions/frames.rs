//! Reads and decodes client frames, and calls their handlers. A session can be removed after a read or during a flush,
//! but never while one of its frames is being handled.

use bulkhead_shared::RejectReason;
use bulkhead_shared::client_protocol::{ClientWelcome, Hello, PROTOCOL_VERSION, role};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{Inbox, Item, Received, Scratch};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::FRAME_OVERHEAD_BYTES_MAX;
use bulkhead_shared::worker_protocol::Empty;

use crate::descriptors::{CAME_WITH_DESCRIPTORS, NOT_TAKEN};
use crate::handshake::check_version;
use crate::sessions::{Phase, Violation};
use crate::slab::SessionIndex;
use crate::{CLIENT_CAPABILITIES, DataPlane, Incoming};

fn is_hello(header: Header) -> bool {
    header.kind == kind::HELLO && header.number == MAGIC
}

/// Returns the kind of a frame if the frame is a new request. A complete large frame is not a new request, because it
/// was announced earlier.
fn requested_kind(item: &Item<'_>) -> Option<u8> {
    match item {
        Item::Frame { header, .. } | Item::Announced { header, .. } => {
            Some(header.kind).filter(|kind| matches!(*kind, kind::SUBMIT | kind::LEASE))
        }
        Item::Large { .. } => None,
    }
}

fn no_hello() -> Violation {
    let message = "this socket uses the Bulkhead protocol, in which HELLO comes first; \
                   for HTTP, use the admin socket";
    Violation(RejectReason::Invalid, message.into())
}

impl DataPlane {
    /// Reads once from a client: either frames of up to `most` bytes in total, or the rest of an incomplete frame.
    /// Returns the number of bytes read.
    pub(crate) fn read_session(&mut self, index: SessionIndex, most: usize) -> usize {
        let Some(session) = self.sessions.get_mut(index) else { return 0 };
        if session.pause_if_behind(self.now) {
            return 0;
        }
        if session.is_held_back {
            // The end of the stream must be checked here, because nothing is read from a client that has a held-back
            // request.
            if session.has_closed() {
                self.close_session(index);
            }
            return 0;
        }
        let most = most.max(session.inbox.missing_bytes());
        let (growth, holder, frame_for) = (session.inbox.growth_bytes(), session.holder, session.frame_for);
        let budget = self.limits.buffered_bytes_max;
        if growth > 0 && !self.memory.can_hold(holder, frame_for, growth, budget) {
            self.evict_frame(holder);
        }
        let session = &mut self.sessions[index];
        session.inbox.grow(&mut self.buffers.pool);
        // The inbox is temporarily moved out of the session, so that frame handlers can borrow the whole data plane.
        let mut inbox = std::mem::take(&mut session.inbox);
        let mut scratch = std::mem::take(&mut self.buffers.scratch);
        let mut bytes = 0;
        let result = self.read_frames(index, &mut inbox, &mut scratch, (most, &mut bytes));
        self.buffers.scratch = scratch;
        self.sessions[index].inbox = inbox;
        match result {
            Ok(received) => self.finish_read(index, received),
            Err(Some(Violation(reason, message))) => self.reject_session(index, reason, &message),
            Err(None) => self.close_session(index),
        }
        bytes
    }

    fn read_frames(
        &mut self,
        index: SessionIndex,
        inbox: &mut Inbox,
        scratch: &mut Scratch,
        (most, bytes): (usize, &mut usize),
    ) -> Result<Received, Option<Violation>> {
        let session = &self.sessions[index];
        let is_closing = session.phase == Phase::Closing;
        let is_large = inbox.is_within_large();
        let mut is_cut = false;
        let read = inbox.receive_by(scratch, |buffer| {
            let most = if is_large { buffer.len() } else { most.min(buffer.len()) };
            *bytes = session.end.receive(&self.intake, &mut buffer[..most])?;
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
        let leaves_requests = self.handover.is_released() && !self.is_stopping;
        while let Some(item) = batch.next().map_err(|error| invalid(&error))? {
            let requested = requested_kind(&item);
            if let (Some(kind), Some(session)) = (requested, self.sessions.get_mut(index)) {
                if session.is_going_away {
                    self.drop_request(index, &item);
                    continue;
                }
                if leaves_requests {
                    session.is_held_back = true;
                    batch.return_frame();
                    return Ok(received);
                }
                if kind == kind::SUBMIT {
                    session.count_submit();
                }
            }
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
            .is_some_and(|session| matches!(session.phase, Phase::AwaitingHello { .. }));
        if is_awaited && inbox.pending_header().is_some_and(|header| !is_hello(header)) {
            return Err(Some(no_hello()));
        }
        Ok(received)
    }

    fn finish_read(&mut self, index: SessionIndex, received: Received) {
        self.count_frame(index);
        self.sessions.received(index, received, self.now);
        if received == Received::Closed {
            self.close_session(index);
        }
        let wants = self.sessions.get(index).map(|session| (session.holder, session.frame_for));
        self.enforce_memory_limit(wants);
    }

    fn handle_client_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), Option<Violation>> {
        let session = &self.sessions[index];
        match (session.phase, header.kind) {
            (Phase::AwaitingHello { .. }, _) => {
                self.handle_client_hello(index, header, metadata).map_err(Some)
            }
            (Phase::Open, kind::SUBMIT) => self.submit(index, header, metadata, payload).map_err(Some),
            (Phase::Open, kind::CANCEL) => {
                let (_, extensions) = codec::decode::<Empty>(metadata, &[tag::UNLESS_BEGUN])
                    .map_err(|error| Some(Violation(RejectReason::Invalid, error.to_string())))?;
                self.cancel_request(index, header.number, extensions.get(tag::UNLESS_BEGUN).is_some());
                Ok(())
            }
            (Phase::Open, kind::LEASE | kind::LEASE_TAKEN | kind::LEASE_RETURNED) => {
                self.handle_lease_frame(index, header, metadata).map_err(Some)
            }
            (Phase::Open, unknown) if header.is_critical() => {
                let message = format!("the client sent a critical frame of unknown kind {unknown}");
                Err(Some(Violation(RejectReason::Invalid, message)))
            }
            (Phase::Open, _) => {
                self.sessions.count_rejection(index);
                Ok(())
            }
            (Phase::Closing, _) => Ok(()),
        }
    }

    fn handle_client_hello(
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
            return Err(invalid(
                "only clients can connect to this socket; workers are started by the supervisor".into(),
            ));
        }
        check_version(&hello, "use a matching client library").map_err(invalid)?;
        let welcome = ClientWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: (self.limits.payload_bytes_max + FRAME_OVERHEAD_BYTES_MAX as u64)
                .min(u64::from(u32::MAX)) as u32,
            capabilities: CLIENT_CAPABILITIES,
            server_version: env!("CARGO_PKG_VERSION"),
        };
        self.sessions[index].welcome(&welcome, hello.capabilities);
        self.sessions.schedule_flush(index);
        Ok(())
    }

    /// Drops a request that arrived after GOAWAY. A lease request is refused. A submission needs no reply, because the
    /// client submits the job again over another connection.
    fn drop_request(&mut self, index: SessionIndex, item: &Item<'_>) {
        if let Item::Frame { header, .. } = item
            && header.kind == kind::LEASE
        {
            let client = self.sessions.id(index);
            self.sessions.send_signal(client, kind::LEASE_REFUSED, header.number);
        }
    }

    /// Handles the beginning of a large frame. Returns true if the frame's payload must be received. Otherwise, the
    /// outcome has already been sent to the client.
    fn handle_client_announcement(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<bool, Option<Violation>> {
        if self.sessions[index].phase != Phase::Open || header.kind != kind::SUBMIT {
            self.handle_client_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        self.check_request_number(index, header.number).map_err(Some)?;
        // The control plane has just stopped counting a payload that it received in chunks.
        self.memory.recount_spools();
        let checked = match self.check_submission(index, header, metadata) {
            // Rejects the job before its payload is received, because a complete job would be rejected as well.
            Ok(_) if self.is_stopping => {
                Err((RejectReason::Draining, "the supervisor is stopping".to_owned()))
            }
            checked => checked,
        };
        match checked {
            Ok((bulkhead, ..)) => {
                self.sessions[index].frame_for = Some(bulkhead);
                Ok(true)
            }
            Err((reason, message)) => {
                self.reject_submission(index, header, metadata, reason, &message);
                Ok(false)
            }
        }
    }
}

//! Reads frames from workers, checks each frame, and applies handshakes, replies and notices. A worker is trusted no
//! more than a client, so a worker that violates the protocol is killed. Policy decides what a reply means for the job.
//! The parent module sends frames to workers.
//!
//! A link is removed when the keeper reports the death of its worker. Such reports are deferred during a read, so a
//! link's index stays valid.

use std::os::fd::AsFd;
use std::time::Duration;

use bulkhead_policy::{Capabilities, Death, Event, RARE_HEARTBEATS_MISSED, Reply, WorkerId};
use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION, Refused, role};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::connection::{Inbox, Item, Payload, Received, Scratch};
use bulkhead_shared::frame::{Header, MAGIC, kind};
use bulkhead_shared::limits::{
    CODE_BYTES_MAX, FRAME_OVERHEAD_BYTES_MAX, INLINE_PAYLOAD_BYTES_MAX, MESSAGE_BYTES_MAX, truncate,
};
use bulkhead_shared::memory_files::LeaseRef;
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use bulkhead_shared::worker_protocol::{
    Empty, Extend, Failed, ProgramCrashed, Progressed, Status, WorkerWelcome, capability, welcome_capability,
};
use bulkhead_shared::{Fault, HandlerFailure, JobId, RejectReason};

use crate::descriptors::{CAME_WITH_DESCRIPTORS, NOT_TAKEN};
use crate::handshake::check_version;
use crate::journal::Journal;
use crate::links::Link;
use crate::memory_files::lend;
use crate::slab::{CompartmentIndex, LinkIndex};
use crate::{DataPlane, Incoming};

/// Maximum number of reads from the same link in one iteration.
const READS_PER_ITERATION_MAX: usize = 8;

/// Maximum size of a worker's status text, in bytes.
const STATUS_BYTES_MAX: usize = 256;

/// Highest signal number on Linux.
const SIGNAL_MAX: i32 = 64;

impl DataPlane {
    pub(crate) fn read_link(&mut self, index: LinkIndex) {
        // A link is not read until its process is known, so that every event can refer to a process.
        let can_read =
            |plane: &Self| plane.links.get(index).is_some_and(|link| !link.unsolicited.is_paused());
        if !self.links.get(index).is_some_and(Link::is_running) || !can_read(self) {
            return;
        }
        for _ in 0..READS_PER_ITERATION_MAX {
            if !self.read_link_once(index) || !can_read(self) {
                return;
            }
        }
        self.links.schedule_read(index);
    }

    /// Performs a single read from a link. Returns true if the link might contain more input.
    pub(crate) fn read_link_once(&mut self, index: LinkIndex) -> bool {
        let link = &mut self.links[index];
        if link.is_closed() {
            return false;
        }
        let (compartment, worker) = link.key();
        let mut inbox = std::mem::take(&mut link.inbox);
        let mut scratch = std::mem::take(&mut self.buffers.scratch);
        let result = self.read_link_frames(index, &mut inbox, &mut scratch);
        self.buffers.scratch = scratch;
        let unsolicited = self.apply_unsolicited_frames(index);
        let result = result.and_then(|received| unsolicited.map(|()| received));
        let link = &mut self.links[index];
        link.inbox = inbox;
        let (is_mid_frame, is_closing) = (link.inbox.is_mid_frame(), link.is_closing());
        let begun = link.inbox.pending_header().filter(|_| !link.has_violated_protocol());
        let is_new = link.awaits_hello();
        let result = result.and_then(|received| {
            begun.map_or(Ok(()), |header| check_begun(header, is_new))?;
            Ok(received)
        });
        if is_mid_frame && result.is_ok() {
            // A worker that is sending a large reply counts as alive, regardless of how long the reply takes to arrive.
            self.apply(compartment, Event::FrameReceived { worker }, Incoming::None);
        }
        match result {
            Ok(Received::More) => true,
            Ok(Received::Drained) => is_closing,
            Ok(Received::Closed) => {
                self.links.set_closed(index, self.now);
                false
            }
            Err(message) => {
                self.end_link_for_violation(index, message);
                false
            }
        }
    }

    /// Passes all notices received in one read to policy. Returns an error if the worker must be killed.
    fn apply_unsolicited_frames(&mut self, index: LinkIndex) -> Result<(), String> {
        let (compartment, worker) = self.links[index].key();
        let jobs = self.compartments[compartment].policy.limits().max_in_flight;
        let Some((status, budget)) = self.links.end_read(index, self.now, jobs) else { return Ok(()) };
        if let Some(text) = status {
            self.apply(compartment, Event::StartStatus { worker, text }, Incoming::None);
        }
        self.apply(compartment, Event::FrameReceived { worker }, Incoming::None);
        budget
    }

    /// Handles a worker's protocol violation. Further frames from the worker are ignored.
    pub(crate) fn end_link_for_violation(&mut self, index: LinkIndex, message: String) {
        let Some(link) = self.links.get_mut(index) else { return };
        link.violate_protocol();
        let (compartment, worker) = link.key();
        self.apply(compartment, Event::ProtocolViolated { worker, message }, Incoming::None);
    }

    fn read_link_frames(
        &mut self,
        index: LinkIndex,
        inbox: &mut Inbox,
        scratch: &mut Scratch,
    ) -> Result<Received, String> {
        let link = &self.links[index];
        let is_violated = link.has_violated_protocol();
        let (received, mut batch) =
            match inbox.receive_by(scratch, |buffer| self.intake.receive(&link.socket, buffer)) {
                Ok(read) => read,
                Err(error) if error.raw_os_error() == Some(CAME_WITH_DESCRIPTORS.raw_os_error()) => {
                    return if is_violated { Ok(Received::Drained) } else { Err(NOT_TAKEN.into()) };
                }
                Err(_) => return Ok(Received::Closed),
            };
        if is_violated {
            return Ok(received);
        }
        let mut is_oversized = link.is_oversized();
        while let Some(item) = batch.next().map_err(|error| error.to_string())? {
            // The next frame begins only after the end of the oversized frame.
            if std::mem::take(&mut is_oversized) {
                self.end_oversized(index);
            }
            match item {
                Item::Frame { header, metadata, payload } => {
                    self.handle_worker_frame(index, header, metadata, Incoming::Borrowed(payload))?;
                }
                Item::Large { header, metadata, payload } => {
                    self.handle_worker_frame(index, header, &metadata, Incoming::Owned(payload))?;
                }
                Item::Announced { header, metadata } => {
                    if self.handle_worker_announcement(index, header, metadata)? {
                        let fit = self.buffers.pool.take(batch.buffer_bytes());
                        batch.accept(fit);
                    } else {
                        is_oversized = self.links.get(index).is_some_and(Link::is_oversized);
                    }
                }
            }
        }
        if is_oversized && !batch.is_skipping() {
            self.end_oversized(index);
        }
        Ok(received)
    }

    // Journals of workers.

    /// Lends a journal to a worker that has sent HELLO. A worker without a journal is not sent prefetched jobs, and
    /// its jobs are not recalled.
    fn lend_journal(&mut self, index: LinkIndex, capabilities: u64) {
        let link = &mut self.links[index];
        let is_replay = self.compartments[link.compartment()].is_replay;
        if link.program().runs_programs() || !link.outbox.is_empty() || is_replay {
            return;
        }
        let Ok(journal) = Journal::make(capabilities) else { return };
        let Ok(sent) = lend(&link.socket, (kind::JOURNAL, 0), &Empty, &[journal.file.as_fd()]) else {
            return;
        };
        link.read_position.add_written(sent);
        link.journal = Some(journal);
    }

    /// Applies the replies in a dead worker's journal. Must not be called until all bytes have been read from the
    /// worker's link. If the bulkhead prefetches jobs, returns the number of jobs that the worker has started, as
    /// recorded in the journal.
    pub(crate) fn apply_journal(&mut self, index: LinkIndex) -> Option<u64> {
        let link = self.links.get_mut(index)?;
        let compartment = link.compartment();
        let (begun, frames) = link.journal.as_ref()?.read();
        if !frames.is_empty() {
            self.apply_journal_frames(index, &frames);
        }
        let is_on = !self.compartments[compartment].policy.limits().lookahead.is_zero();
        // A count of zero means that the worker has never written the count.
        (is_on && begun > 0).then_some(begun)
    }

    /// Handles the frames in a worker's journal as if they had arrived over the worker's link.
    fn apply_journal_frames(&mut self, index: LinkIndex, frames: &[u8]) {
        let (compartment, worker) = self.links[index].key();
        let (mut inbox, mut scratch) = (Inbox::default(), std::mem::take(&mut self.buffers.scratch));
        let read = inbox.receive_by(&mut scratch, |buffer| {
            buffer[..frames.len()].copy_from_slice(frames);
            Ok(frames.len())
        });
        if let Ok((_, mut batch)) = read {
            while let Ok(Some(Item::Frame { header, metadata, payload })) = batch.next() {
                let is_answer = matches!(header.kind, kind::RESULT | kind::FAILED);
                // If the worker died before removing a reply from the journal, the reply may also have been received
                // over the link.
                let is_owed = self.compartments[compartment].policy.holds(worker, JobId(header.number));
                if self.links[index].is_welcomed() && is_answer && is_owed {
                    let _ = self.handle_worker_frame(index, header, metadata, Incoming::Borrowed(payload));
                }
            }
        }
        self.buffers.scratch = scratch;
    }

    // Frames.

    /// Handles the beginning of a large frame. Returns true if the frame's payload must be received.
    fn handle_worker_announcement(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<bool, String> {
        let link = &self.links[index];
        if link.awaits_hello() || header.kind != kind::RESULT {
            self.handle_worker_frame(index, header, metadata, Incoming::None)?;
            return Ok(false);
        }
        let compartment = link.compartment();
        let most = link.result_bytes_max();
        let size = header.payload_length() as u64;
        if size <= most {
            return Ok(true);
        }
        check_empty(metadata)?;
        let (worker, job, failure) = (link.worker(), JobId(header.number), too_large(size, most));
        self.links[index].begin_oversized((job, failure.clone()));
        self.apply(compartment, Event::ResultTooLarge { worker, job, failure }, Incoming::None);
        Ok(false)
    }

    /// Handles the end of an oversized result. Releases the permit that was held by the job.
    fn end_oversized(&mut self, index: LinkIndex) {
        let link = &mut self.links[index];
        let (compartment, worker) = link.key();
        if let Some((job, failure)) = link.take_oversized() {
            self.apply_reply(compartment, worker, job.0, Reply::Failed(failure), Incoming::None);
        }
    }

    fn handle_worker_frame(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
        payload: Incoming<'_>,
    ) -> Result<(), String> {
        let link = &self.links[index];
        let (compartment, worker) = link.key();
        if link.awaits_hello() {
            return self.handle_worker_hello(index, header, metadata);
        }
        if link.has_violated_protocol() {
            return Ok(());
        }
        let number = header.number;
        match header.kind {
            kind::RESULT => {
                let most = self.links[index].result_bytes_max();
                let mut size = payload.len() as u64;
                let (named, status) = check_result(metadata)?;
                self.record_exit_status((compartment, worker), JobId(number), status);
                if let Some(named) = named {
                    if size > 0 {
                        return Err(
                            "the worker sent a result both in a memory file and in the frame".to_owned()
                        );
                    }
                    let spawn = self.links[index].spawn();
                    self.record_result_file((compartment, worker), spawn, JobId(number), named)?;
                    size = named.bytes;
                }
                if size > most {
                    let reply = Reply::Failed(too_large(size, most));
                    self.apply_reply(compartment, worker, number, reply, Incoming::None);
                } else {
                    self.apply_reply(compartment, worker, number, Reply::Ok, payload);
                }
            }
            kind::FAILED => {
                let (failed, extensions) = decode_all::<Failed<'_>>(metadata, &[])?;
                self.record_exit_status((compartment, worker), JobId(number), extensions.get(tag::STATUS));
                let failure = HandlerFailure {
                    code: truncate(failed.code, CODE_BYTES_MAX).to_owned(),
                    message: truncate(failed.message, MESSAGE_BYTES_MAX).to_owned(),
                    retryable: failed.retryable != 0,
                    fault: if failed.fault == Fault::Caller as u8 {
                        Fault::Caller
                    } else {
                        Fault::Dependency
                    },
                };
                let is_allowed = payload.len() as u64 <= self.links[index].result_bytes_max();
                let payload = if is_allowed { payload } else { Incoming::None };
                self.apply_reply(compartment, worker, number, Reply::Failed(failure), payload);
            }
            kind::PROGRAM_CRASHED => {
                let (crashed, extensions) = decode_all::<ProgramCrashed<'_>>(metadata, &[])?;
                if !(1..=SIGNAL_MAX).contains(&crashed.signal) {
                    return Err(format!("the worker reported the invalid signal {}", crashed.signal));
                }
                let process = extensions.get(tag::PROCESS).and_then(|bytes| bytes.try_into().ok());
                let death = self.program_death(index, crashed.signal, process.map(u32::from_le_bytes));
                let message = match death {
                    Death::Violation(_) => format!("the program {death}"),
                    _ => truncate(crashed.message, MESSAGE_BYTES_MAX).to_owned(),
                };
                self.report_program_death(compartment, worker, JobId(number), (death, &message));
                let reply = Reply::ProgramCrashed { death, message };
                self.apply_reply(compartment, worker, number, reply, Incoming::None);
                self.crashes.death_applied();
            }
            kind::FILES_TAKEN => {
                check_empty(metadata)?;
                let link = &mut self.links[index];
                link.unsolicited.charge(header.length as usize);
                if !self.leases.loan_confirmed(link.spawn(), number) {
                    link.count_unknown_reply();
                }
            }
            kind::RETURNED => {
                let (_, extensions) = decode_all::<Empty>(metadata, &[])?;
                let send_number = extensions.get(tag::ARRIVAL).and_then(|bytes| bytes.try_into().ok());
                let send_number =
                    send_number.ok_or("the worker returned a job without a valid send number")?;
                self.links[index].unsolicited.charge(0);
                // The job was recalled before the worker started it.
                let (job, send_number) = (JobId(number), u64::from_le_bytes(send_number));
                self.apply(compartment, Event::JobReturned { worker, job, send_number }, Incoming::None);
            }
            _ => self.handle_unsolicited_frame(index, header, metadata)?,
        }
        self.links.get(index).map_or(Ok(()), Link::check_unknown_replies)
    }

    /// Handles a frame that is not a reply to a job.
    fn handle_unsolicited_frame(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<(), String> {
        let link = &mut self.links[index];
        let (compartment, worker) = link.key();
        link.unsolicited.charge(header.length as usize);
        let event = match header.kind {
            kind::READY | kind::HEARTBEAT | kind::STOPPING => {
                check_empty(metadata)?;
                match header.kind {
                    kind::READY => {
                        // Frees the buffers, because the next job might not arrive for a long time.
                        self.links[index].outbox.free_buffers();
                        Event::Ready { worker }
                    }
                    kind::STOPPING => Event::Stopping { worker },
                    _ => return Ok(()),
                }
            }
            kind::EXTEND_START => {
                let extend = decode::<Extend>(metadata)?;
                Event::ExtendStart { worker, more: Duration::from_millis(extend.more_ms.into()) }
            }
            kind::STATUS => {
                let status = decode::<Status<'_>>(metadata)?;
                let text = truncate(status.text, STATUS_BYTES_MAX).to_owned();
                link.set_status(text);
                return Ok(());
            }
            kind::PROGRESSED => {
                let progress = decode::<Progressed<'_>>(metadata)?;
                self.forward_progress(compartment, worker, header.number, progress);
                return Ok(());
            }
            kind::HELLO => return Err("the worker sent HELLO twice".into()),
            unknown if header.is_critical() => {
                return Err(format!("the worker sent a critical frame of unknown kind {unknown}"));
            }
            _ => return Ok(()),
        };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn handle_worker_hello(
        &mut self,
        index: LinkIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<(), String> {
        if header.kind != kind::HELLO || header.number != MAGIC {
            return Err("the worker's first frame is not HELLO".into());
        }
        let hello = decode::<Hello<'_>>(metadata)?;
        let link = &mut self.links[index];
        let (compartment, worker) = link.key();
        if hello.role != role::WORKER {
            return Err("the worker's HELLO declared the client role".into());
        }
        if let Err(message) = check_version(&hello, "build the worker with a matching SDK") {
            let refused = Refused { reason: RejectReason::Invalid.code(), message: &message };
            let _ = link.outbox.push(kind::REFUSED, 0, &refused, &[], Payload::NONE);
            self.flush_link(index);
            return Err(message);
        }
        let says = |bit| hello.capabilities & bit != 0;
        // The journal is sent before the WELCOME frame, so that the worker has a journal from the start.
        if says(capability::RESIZE) && (says(capability::PREFETCH) || says(capability::STACK_TEXT)) {
            self.lend_journal(index, hello.capabilities);
        }
        let link = &mut self.links[index];
        link.set_beats_in_journal(hello.capabilities & capability::JOURNAL_HEARTBEATS != 0);
        let compartment_of_link = &self.compartments[compartment];
        let (entry, limits) =
            (self.bulkheads.owner(compartment_of_link), compartment_of_link.policy.limits());
        // Heartbeats in the journal can be sent less often, so that the worker wakes up less often.
        let can_be_rarer = link.beats_in_journal() && limits.health.missed >= RARE_HEARTBEATS_MISSED;
        let interval = entry.heartbeat.saturating_mul(if can_be_rarer { 2 } else { 1 });
        let welcome = WorkerWelcome {
            version: PROTOCOL_VERSION,
            frame_bytes_max: (entry.max_result + FRAME_OVERHEAD_BYTES_MAX as u64).min(u64::from(u32::MAX))
                as u32,
            capabilities: if link.beats_in_journal() { welcome_capability::JOURNAL_HEARTBEATS } else { 0 },
            slot: link.slot(),
            generation: worker.generation,
            max_in_flight: limits.max_in_flight,
            heartbeat_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            result_bytes_max: entry.max_result,
            bulkhead: &entry.name,
        };
        let result_bytes_max = welcome.result_bytes_max;
        let program = link.program().clone();
        let seal = program.sandbox().seal().map(|seal| (tag::SEAL, seal));
        let _ = link.outbox.push(kind::WORKER_WELCOME, MAGIC, &welcome, seal.as_slice(), Payload::NONE);
        link.welcome(result_bytes_max);
        if hello.capabilities & capability::MEMORY_FILES != 0 && !compartment_of_link.is_replay {
            self.leases.worker_ready(link.spawn());
        }
        self.links.schedule_flush(index);
        let capabilities = Capabilities {
            has_dispatch_thread: says(capability::DISPATCH_THREAD),
            can_resize: says(capability::RESIZE),
        };
        // A worker without the PREFETCH capability uses the journal file only for writing stacks as text.
        let journal =
            self.links[index].journal.as_ref().filter(|_| says(capability::PREFETCH)).map(Journal::claims);
        let event = Event::Hello { worker, capabilities, journal };
        self.apply(compartment, event, Incoming::None);
        Ok(())
    }

    fn apply_reply(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        number: u64,
        reply: Reply,
        payload: Incoming<'_>,
    ) {
        let (size, job) = (payload.len(), JobId(number));
        // A reply to a job that has been cancelled is late, but not a protocol violation.
        let is_owed = self.compartments[compartment].policy.holds(worker, job);
        let late = |plane: &Self| plane.compartments[compartment].policy.counters().late_replies;
        let before = late(self);
        if self.leases.any_live()
            && let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker))
        {
            self.end_file_use((compartment, self.links[index].spawn()), job);
        }
        self.apply(compartment, Event::Replied { worker, job, reply }, payload);
        let count = late(self) - before;
        self.bulkheads.count_late_replies(&self.compartments[compartment], count);
        if !is_owed
            && let Some(index) = self.links.of_worker(&self.compartments, (compartment, worker))
            && let Some(link) = self.links.get_mut(index)
        {
            link.unsolicited.charge(size);
            link.count_unknown_reply();
        }
    }

    /// Records that a job's result was written to a result file. Returns an error if the file was not lent to this
    /// worker.
    fn record_result_file(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        spawn: u64,
        job: JobId,
        named: LeaseRef,
    ) -> Result<(), String> {
        let policy = &mut self.compartments[compartment].policy;
        if !policy.holds(worker, job) {
            return Ok(());
        }
        // A cancelled job might no longer have a record.
        let Some(record) = policy.record_mut(job) else { return Ok(()) };
        let payload = record.held.file.as_deref_mut();
        match payload.is_some_and(|payload| payload.result_written(spawn, named)) {
            true => Ok(()),
            false => {
                Err("the worker reported a result in a memory file that belongs to another job".to_owned())
            }
        }
    }

    /// Records the exit status that was sent along with a job's result.
    fn record_exit_status(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        job: JobId,
        status: Option<&[u8]>,
    ) {
        let Some(status) = status.and_then(|bytes| bytes.try_into().ok()) else { return };
        let policy = &mut self.compartments[compartment].policy;
        if policy.holds(worker, job)
            && let Some(record) = policy.record_mut(job)
        {
            record.status = Some(i32::from_le_bytes(status));
        }
    }

    fn forward_progress(
        &mut self,
        compartment: CompartmentIndex,
        worker: WorkerId,
        number: u64,
        progress: Progressed<'_>,
    ) {
        let policy = &mut self.compartments[compartment].policy;
        if !policy.holds(worker, JobId(number)) || !progress.fraction.is_finite() {
            return;
        }
        let Some(record) = policy.record_mut(JobId(number)) else { return };
        record.position.start();
        let (session, request) = (record.session, record.request);
        let text = truncate(progress.text, MESSAGE_BYTES_MAX);
        let fraction = progress.fraction.clamp(0.0, 1.0);
        self.sessions.send_progress(session, request, Progressed { fraction, text });
    }
}

fn decode<'m, M: bincode::BorrowDecode<'m, ()>>(metadata: &'m [u8]) -> Result<M, String> {
    decode_all(metadata, &[]).map(|(message, _)| message)
}

/// Decodes metadata and its extensions. Returns an error if a critical extension's tag is not in `known`.
fn decode_all<'m, M: bincode::BorrowDecode<'m, ()>>(
    metadata: &'m [u8],
    known: &[u16],
) -> Result<(M, Extensions<'m>), String> {
    codec::decode(metadata, known).map_err(|error| error.to_string())
}

/// Checks the header of an incomplete frame. Without this check, arbitrary bytes would usually look like the start of a
/// very long frame whose end never arrives.
fn check_begun(header: Header, is_new: bool) -> Result<(), String> {
    if is_new && header.kind != kind::HELLO {
        return Err(format!("the worker did not send HELLO: the first frame has kind {}", header.kind));
    }
    // The length limit does not apply to results, because an oversized result is discarded while it arrives.
    let most = FRAME_OVERHEAD_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX;
    if header.kind != kind::RESULT && header.length as usize > most {
        return Err(format!(
            "the worker began to send a frame of kind {} with {} bytes, which is too large",
            header.kind, header.length
        ));
    }
    Ok(())
}

/// Checks metadata that must contain only extensions. Returns an error if any extension is critical.
fn check_empty(metadata: &[u8]) -> Result<(), String> {
    if metadata == [0; 8] { Ok(()) } else { decode::<Empty>(metadata).map(|_| ()) }
}

/// Decodes a result's metadata. Returns the location of a result in a memory file, and the program's exit status.
/// Both are optional.
fn check_result(metadata: &[u8]) -> Result<(Option<LeaseRef>, Option<&[u8]>), String> {
    if metadata == [0; 8] {
        return Ok((None, None));
    }
    let (_, extensions) = decode_all::<Empty>(metadata, &[tag::LEASE])?;
    let named = extensions.get(tag::LEASE).map(|bytes| {
        LeaseRef::from_bytes(bytes).ok_or_else(|| "the lease name is not 16 bytes long".to_owned())
    });
    Ok((named.transpose()?, extensions.get(tag::STATUS)))
}

fn too_large(size: u64, most: u64) -> HandlerFailure {
    HandlerFailure {
        code: RESULT_TOO_LARGE.to_owned(),
        message: format!("the result has {size} bytes; max_result is {most}"),
        retryable: false,
        fault: Fault::Dependency,
    }
}

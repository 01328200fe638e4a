//! The jobs under way on one connection: a table of waiters, in which a request's number finds its waiter
//! without a search, and what waits to be written, within a bound.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bulkhead_shared::client_protocol::{
    OutcomeMessage, Progress as ProgressMessage, Refused, Submit, capability, outcome_code, read_run_limit,
    run_limit_bytes,
};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::memory_files::{LeaseWanted, Named, WORTH_A_FILE_BYTES, receive_with_files};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{Executed, JobId, RejectReason};
use rustix::net::RecvFlags;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot};

use crate::answer::{JobError, Progress, Reply};
use crate::leases::{Lease, Leases, Taken, TakesBack};
use crate::mapped::MappedResult;
use crate::order::Order;

/// Bytes that wait to be written before further jobs wait for their turn. A job that fits is taken whole, so
/// that there can be one payload more.
const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes of a job's frame that are not its payload: names are checked before.
const SUBMIT_OVERHEAD_BYTES_MAX: u64 = 4096;

/// What is in flight is written in about so many parts, of so many frames, so that the supervisor and the
/// workers have some to do while others are on their way. One write for all would have each wait for the
/// others.
const BATCHES: usize = 6;
const BATCH_MIN: usize = 8;
const BATCH_MAX: usize = 64;

/// A job that was sent: where its outcome comes, and the right to it.
pub(crate) type Sent = (oneshot::Receiver<Result<Reply, JobError>>, Ticket);

/// Why a job was not sent.
pub(crate) enum SubmitError {
    /// It cannot be.
    Refused(JobError),
    /// It has to wait for room.
    Full,
    /// The connection is of no more use.
    Closed,
}

struct Waiter {
    outcome: oneshot::Sender<Result<Reply, JobError>>,
    progress: Option<mpsc::Sender<Progress>>,
    /// Where the job's frame ends, in bytes ever put into the outbox.
    frame_end: u64,
    /// Where its payload is, and its result may be.
    lease: Option<Box<Lease>>,
    maps_result: bool,
}

struct Slot {
    /// Counts the requests that had this slot: half of a request's number.
    generation: u32,
    waiter: Option<Waiter>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// No clone submits any more: the end of the last job tells the driver.
    Ending,
    /// A write has failed. The driver is about to find out why.
    Broken,
    /// Every waiter has been told.
    Closed,
}

#[derive(Default)]
struct State {
    stage: Stage,
    slots: Vec<Slot>,
    free: Vec<u32>,
    waiting: usize,
    outbox: Outbox,
    /// Bytes ever put into the outbox.
    pushed_bytes: u64,
    pool: BufferPool,
    leases: Leases,
    /// Whether the driver has been told that there is something to write.
    is_flush_due: bool,
    /// How many wait for room in the outbox.
    queued: usize,
    /// Frames since the last write.
    unflushed: usize,
}

/// One connection's requests.
pub(crate) struct Requests {
    state: Mutex<State>,
    pub(crate) socket: UnixStream,
    /// The process that connected. What it forks has the socket, too, and must not end the connection.
    owner: u32,
    pub(crate) flush_due: Notify,
    /// Wakes the first that waits for room in the outbox, or, when the connection ends, all.
    pub(crate) room: Notify,
    idle: Notify,
    frame_bytes_max: u32,
    /// Whether descriptors may come.
    expects_files: AtomicBool,
    /// What the supervisor can do: a sum of [`capability`].
    capabilities: u64,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Requests")
    }
}

impl Requests {
    pub(crate) fn new(socket: UnixStream, frame_bytes_max: u32, capabilities: u64) -> Self {
        Self {
            state: Mutex::default(),
            socket,
            owner: std::process::id(),
            flush_due: Notify::new(),
            room: Notify::new(),
            idle: Notify::new(),
            frame_bytes_max,
            expects_files: AtomicBool::new(false),
            capabilities,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Jobs out.

    /// Sends a job, unless others wait for room already. If it is sent, its payload has been taken out of
    /// it, and the reports of its progress go to the sender that was there.
    pub(crate) fn submit(
        self: &Arc<Self>,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<Sent, SubmitError> {
        self.submit_after(0, job, progress)
    }

    /// Takes a place among those that wait for room.
    pub(crate) fn queue(self: &Arc<Self>) -> Place<'_> {
        self.lock().queued += 1;
        Place { requests: self, goes_before: 1 }
    }

    /// Sends a job if no more than `queued_max` wait for room. The first job on an idle connection is written
    /// at once; the others wait for a few more, or for the driver's turn.
    fn submit_after(
        self: &Arc<Self>,
        queued_max: usize,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<Sent, SubmitError> {
        let payload_bytes = job.payload_bytes();
        if payload_bytes as u64 + SUBMIT_OVERHEAD_BYTES_MAX > u64::from(self.frame_bytes_max) {
            let message = format!("{payload_bytes} bytes of payload are more than the supervisor takes");
            return Err(SubmitError::Refused(job.refused(RejectReason::TooLarge, message)));
        }
        if job.run_limit.is_some() && self.capabilities & capability::RUN_LIMIT == 0 {
            let message =
                "the supervisor is older and knows no run limit: send the job without one, or update it";
            return Err(SubmitError::Refused(job.refused(RejectReason::Invalid, message.into())));
        }
        let mut state = self.lock();
        state.check_room(queued_max)?;
        let mut lease = None;
        if payload_bytes > WORTH_A_FILE_BYTES && self.capabilities & capability::MEMORY_FILES != 0 {
            lease = self.lease_for(&mut state, job, payload_bytes);
        }
        if lease.is_some() || job.source.is_some() {
            drop(state);
            let written = match &mut lease {
                Some(lease) => job.fill(lease.payload.first_mut(payload_bytes)),
                None => job.load(),
            };
            if let Err(error) = written {
                lease.into_iter().for_each(|lease| self.put_back(*lease));
                return Err(SubmitError::Refused(error));
            }
            state = self.lock();
            if lease.is_none() {
                state.check_room(queued_max)?;
            } else if state.stage != Stage::Open {
                return Err(SubmitError::Closed);
            }
        }
        let (sender, outcome) = oneshot::channel();
        let named = lease.as_ref().map(|lease| Named { lease: lease.number, bytes: payload_bytes as u64 });
        let maps_result = job.maps_result;
        let waiter = Waiter { outcome: sender, progress: progress.take(), frame_end: 0, lease, maps_result };
        let number = state.enter(waiter);
        // Large ones are handed over, not copied.
        let payload = std::mem::take(&mut job.payload);
        let payload = if named.is_some() { Payload::NONE } else { Payload::Owned(payload) };
        if state.push_job(number, job, named, payload).is_err() {
            state.leave(number);
            let message = "the job does not fit in a frame".into();
            return Err(SubmitError::Refused(job.refused(RejectReason::TooLarge, message)));
        }
        self.schedule_flush(&mut state);
        drop(state);
        Ok((outcome, Ticket { requests: Some(self.clone()), number }))
    }

    /// A lease for a job, if there is one. If not, one is asked for, for the jobs to come.
    fn lease_for(&self, state: &mut State, job: &Order, bytes: usize) -> Option<Box<Lease>> {
        let hears = || rustix::io::ioctl_fionread(&self.socket).is_ok_and(|unread| unread == 0);
        match state.leases.take((&job.bulkhead, &job.tenant), bytes, hears) {
            Taken::Lease(lease) => return Some(Box::new(lease)),
            Taken::TooSmall(lease) => state.tell(kind::LEASE_RETURNED, lease.number),
            Taken::Doubtful => return None,
            Taken::None => {}
        }
        let number = state.leases.ask(&job.bulkhead, &job.tenant)?;
        // Before it can come.
        self.expects_files.store(true, Ordering::SeqCst);
        let wanted = LeaseWanted { bulkhead: &job.bulkhead, tenant: &job.tenant, bytes: bytes as u64 };
        let _ = state.push(kind::LEASE, number, &wanted, &[], Payload::NONE);
        None
    }

    /// A lease is of no more use to a job.
    pub(crate) fn put_back(&self, lease: Lease) {
        let mut state = self.lock();
        if state.stage == Stage::Closed {
            return;
        }
        if let Some(number) = state.leases.put_back(lease) {
            state.tell(kind::LEASE_RETURNED, number);
            self.schedule_flush(&mut state);
        }
    }

    /// A lease that is of no more use.
    fn give_back(&self, lease: Lease) {
        let mut state = self.lock();
        if state.stage != Stage::Closed {
            state.leases.forget(lease.number);
            state.tell(kind::LEASE_RETURNED, lease.number);
            self.schedule_flush(&mut state);
        }
    }

    /// Reads without waiting, with the descriptors that may come.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        if !self.expects_files.load(Ordering::SeqCst) {
            return rustix::net::recv(&self.socket, buffer, RecvFlags::DONTWAIT).map(|(_, count)| count);
        }
        let mut files = Vec::new();
        let count = receive_with_files(&self.socket, buffer, &mut files)?;
        if !files.is_empty() {
            self.lock().leases.coming = files;
        }
        Ok(count)
    }

    /// What the supervisor says of leases.
    fn lease_frame(&self, header: Header, metadata: &[u8]) -> Result<(), String> {
        let mut state = self.lock();
        match header.kind {
            kind::LEASED => {
                let named = decode::<Named>(metadata)?;
                let is_good = state.leases.come(header.number, named) == Some(true);
                state.tell(if is_good { kind::LEASE_TAKEN } else { kind::LEASE_RETURNED }, named.lease);
            }
            kind::LEASE_REFUSED => state.leases.refused(header.number),
            _ => {
                if let Some(number) = state.leases.ended(header.number) {
                    state.tell(kind::LEASE_RETURNED, number);
                }
            }
        }
        self.expects_files.store(state.leases.is_waiting(), Ordering::SeqCst);
        let _ = self.try_flush(&mut state);
        if !state.outbox.is_empty() {
            self.schedule_flush(&mut state);
        }
        Ok(())
    }

    /// The result of a job where it stands, or a copy.
    fn result_in_file(self: &Arc<Self>, waiter: &mut Waiter, named: &[u8]) -> Result<Found, String> {
        let named = Named::from_bytes(named);
        let lease = waiter.lease.take().filter(|lease| {
            named.is_some_and(|named| named.lease == lease.number && named.bytes <= lease.result.len() as u64)
        });
        let (Some(lease), Some(named)) = (lease, named) else {
            return Err("the supervisor told of a result in a file that this client does not have".into());
        };
        let bytes = named.bytes as usize;
        if !lease.is_whole() {
            waiter.lease = Some(lease);
            return Ok(Found::Lost);
        }
        if waiter.maps_result {
            let requests: Arc<dyn TakesBack> = self.clone();
            let requests = Arc::downgrade(&requests);
            return Ok(Found::Mapped(MappedResult { lease: Some(lease), bytes, requests }));
        }
        let mut copy = self.lock().pool.take(bytes);
        copy.clear();
        lease.result.copy_to(bytes, &mut copy);
        let is_whole = lease.is_whole();
        waiter.lease = Some(lease);
        Ok(if is_whole { Found::Copy(copy) } else { Found::Lost })
    }

    fn schedule_flush(&self, state: &mut State) {
        state.unflushed += 1;
        if state.waiting <= 1
            || state.unflushed >= state.waiting.div_ceil(BATCHES).clamp(BATCH_MIN, BATCH_MAX)
        {
            let _ = self.try_flush(state);
        }
        if !state.outbox.is_empty() && !std::mem::replace(&mut state.is_flush_due, true) {
            self.flush_due.notify_one();
        }
    }

    /// Writes what the socket takes; returns whether that is all.
    fn try_flush(&self, state: &mut State) -> io::Result<bool> {
        state.unflushed = 0;
        let State { outbox, pool, .. } = state;
        let result = outbox.flush(&self.socket, pool);
        if result.is_err() && state.stage != Stage::Closed {
            state.stage = Stage::Broken;
        }
        if state.queued > 0 && state.has_room() {
            self.room.notify_one();
        }
        result
    }

    /// Writes what waits; returns whether all is written. For the driver.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut state = self.lock();
        state.is_flush_due = false;
        self.try_flush(&mut state)
    }

    /// Cancels a job whose caller no longer waits.
    fn abandon(&self, number: u64) {
        let mut state = self.lock();
        if let Some(waiter) = self.release(&mut state, number) {
            if let Some(lease) = waiter.lease.filter(|_| state.stage != Stage::Closed) {
                // Behind the cancellation.
                let _ = state.push(kind::CANCEL, number, &Empty, &[], Payload::NONE);
                state.leases.forget(lease.number);
                state.tell(kind::LEASE_RETURNED, lease.number);
                let _ = self.try_flush(&mut state);
                self.schedule_flush(&mut state);
            } else {
                self.send_cancel(&mut state, number);
            }
        }
    }

    /// Cancels a job and goes on waiting for its outcome.
    fn cancel(&self, number: u64) {
        let mut state = self.lock();
        if state.slot(number).is_some_and(|slot| slot.waiter.is_some()) {
            self.send_cancel(&mut state, number);
        }
    }

    fn send_cancel(&self, state: &mut State, number: u64) {
        if state.stage == Stage::Closed {
            return;
        }
        // An empty message always fits.
        let _ = state.push(kind::CANCEL, number, &Empty, &[], Payload::NONE);
        // At once: a program that cancels as a rule ends soon, and its driver with it.
        let _ = self.try_flush(state);
        self.schedule_flush(state);
    }

    // Frames in.

    /// A buffer for the payload of an outcome that begins; `None` if its caller no longer waits.
    pub(crate) fn buffer_for(&self, header: Header) -> Option<Vec<u8>> {
        let mut state = self.lock();
        state.slot(header.number)?.waiter.as_ref()?;
        Some(state.pool.take(header.payload_length()))
    }

    /// A frame has come. An error ends the connection.
    pub(crate) fn frame(
        self: &Arc<Self>,
        header: Header,
        metadata: &[u8],
        payload: Vec<u8>,
    ) -> Result<(), String> {
        match header.kind {
            kind::OUTCOME => {
                let (message, extensions) = decode_with::<OutcomeMessage<'_>>(metadata)?;
                // A caller that does not wait any more has cancelled.
                let Some(mut waiter) = self.release(&mut self.lock(), header.number) else { return Ok(()) };
                let (mut payload, mut mapped, mut is_lost) = (payload, None, false);
                if let Some(named) = extensions.get(tag::LEASE) {
                    match self.result_in_file(&mut waiter, named)? {
                        Found::Copy(copy) => payload = copy,
                        Found::Mapped(result) => mapped = Some(Arc::new(result)),
                        Found::Lost => is_lost = true,
                    }
                }
                if let Some(lease) = waiter.lease.take() {
                    // A worker may still be at what it was not asked to end.
                    let is_answered = matches!(message.outcome, outcome_code::OK | outcome_code::FAILED);
                    if is_answered { self.put_back(*lease) } else { self.give_back(*lease) }
                }
                let mut result = match message.to_outcome() {
                    Some(_) if is_lost => Err(JobError::result_lost()),
                    Some(mut outcome) => {
                        outcome.job = extensions.get(tag::JOB).and_then(JobId::from_bytes);
                        outcome.run_limit = extensions.get(tag::RUN_LIMIT).and_then(read_run_limit);
                        JobError::from_outcome(outcome, payload)
                    }
                    None => Err(JobError::unintelligible(&message)),
                };
                if let (Ok(reply), Some(_)) = (&mut result, &mapped) {
                    reply.mapped = mapped;
                }
                let _ = waiter.outcome.send(result);
                Ok(())
            }
            kind::LEASED | kind::LEASE_ENDED | kind::LEASE_REFUSED => self.lease_frame(header, metadata),
            kind::PROGRESS => {
                let message = decode::<ProgressMessage<'_>>(metadata)?;
                // Whatever a handler says.
                let fraction = if message.fraction.is_nan() { 0.0 } else { message.fraction.clamp(0.0, 1.0) };
                self.lock().progress(header.number, Progress { fraction, text: message.text.to_owned() });
                Ok(())
            }
            kind::REFUSED => {
                let message = decode::<Refused<'_>>(metadata)?.message;
                Err(format!("the supervisor ended it: {message}"))
            }
            unknown if header.is_critical() => Err(format!(
                "the supervisor sent a frame of the unknown kind {unknown}, which must be understood: \
                 update this program"
            )),
            _ => Ok(()),
        }
    }

    // The end.

    fn release(&self, state: &mut State, number: u64) -> Option<Waiter> {
        let waiter = state.leave(number);
        if state.stage == Stage::Ending && state.waiting == 0 {
            self.idle.notify_one();
        }
        waiter
    }

    /// Waits until no caller waits. Call it when no job will be submitted any more.
    pub(crate) async fn idle(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.stage == Stage::Open {
                    state.stage = Stage::Ending;
                }
                if state.waiting == 0 {
                    return;
                }
            }
            self.idle.notified().await;
        }
    }

    /// The connection is gone: every waiter is told.
    pub(crate) fn close(&self, why: &str) {
        let mut state = self.lock();
        state.stage = Stage::Closed;
        state.waiting = 0;
        let sent_bytes = state.pushed_bytes - state.outbox.waiting_bytes() as u64;
        let slots = std::mem::take(&mut state.slots);
        drop(state);
        // Not left to the last that holds it: the supervisor is to know now. It may be gone itself.
        if self.owner == std::process::id() {
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
        self.room.notify_waiters();
        for waiter in slots.into_iter().filter_map(|slot| slot.waiter) {
            // The supervisor begins nothing before it has the whole frame.
            let executed = if waiter.frame_end > sent_bytes { Executed::No } else { Executed::Unknown };
            let _ = waiter.outcome.send(Err(JobError::lost(executed, why)));
        }
    }
}

fn decode<'m, M: codec::Message<'m>>(metadata: &'m [u8]) -> Result<M, String> {
    decode_with(metadata).map(|(message, _)| message)
}

fn decode_with<'m, M: codec::Message<'m>>(metadata: &'m [u8]) -> Result<(M, Extensions<'m>), String> {
    let malformed = |error| format!("the supervisor sent what cannot be read: {error}");
    codec::decode::<M>(metadata, &[tag::LEASE]).map_err(malformed)
}

/// A place among those that wait for room in the outbox. Leaving it lets the next one try.
pub(crate) struct Place<'r> {
    requests: &'r Arc<Requests>,
    /// How many may wait, this one included, without being asked first.
    goes_before: usize,
}

impl Place<'_> {
    /// Tries to send a job: the first time only if no other waits, and from then on, as it is called again
    /// when it is this one's turn, whichever wait.
    pub(crate) fn submit(
        &mut self,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<Sent, SubmitError> {
        let queued_max = std::mem::replace(&mut self.goes_before, usize::MAX);
        self.requests.submit_after(queued_max, job, progress)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.requests.lock();
        state.queued -= 1;
        if state.queued > 0 && state.has_room() {
            self.requests.room.notify_one();
        }
    }
}

impl TakesBack for Requests {
    fn take_back(&self, lease: Lease) {
        self.put_back(lease);
    }
}

/// A result that was in a file.
enum Found {
    Copy(Vec<u8>),
    Mapped(MappedResult),
    /// It was there no more.
    Lost,
}

impl State {
    fn check_room(&self, queued_max: usize) -> Result<(), SubmitError> {
        match self.stage {
            Stage::Open => {}
            Stage::Ending | Stage::Broken | Stage::Closed => return Err(SubmitError::Closed),
        }
        if self.queued > queued_max || !self.has_room() { Err(SubmitError::Full) } else { Ok(()) }
    }

    /// Appends a frame that says all by its kind and number.
    fn tell(&mut self, kind: u8, number: u64) {
        // An empty message always fits.
        let _ = self.push(kind, number, &Empty, &[], Payload::NONE);
    }

    fn has_room(&self) -> bool {
        self.outbox.waiting_bytes() < OUTBOX_BYTES_MAX
    }

    /// Appends a frame and counts its bytes.
    fn push<'m>(
        &mut self,
        kind: u8,
        number: u64,
        message: &impl codec::Message<'m>,
        extensions: &[(u16, &[u8])],
        payload: Payload<'_>,
    ) -> Result<(), codec::CodecError> {
        let before = self.outbox.waiting_bytes();
        self.outbox.push_pooled(kind, number, message, extensions, payload, &mut self.pool)?;
        self.pushed_bytes += (self.outbox.waiting_bytes() - before) as u64;
        Ok(())
    }

    fn push_job(
        &mut self,
        number: u64,
        job: &Order,
        named: Option<Named>,
        payload: Payload<'_>,
    ) -> Result<(), codec::CodecError> {
        let submit = Submit {
            bulkhead: &job.bulkhead,
            operation: &job.operation,
            tenant: &job.tenant,
            deadline_us: job.deadline.map_or(0, |limit| micros(limit).max(1)),
            priority: job.priority.code(),
            idempotent: job.is_idempotent.into(),
            cost: job.cost,
        };
        let trace = job.trace_extension();
        match job.run_limit.map(run_limit_bytes) {
            limit if named.is_some() => {
                let named = named.map(Named::to_bytes);
                let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
                let limit = limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
                let given: Vec<_> = named.into_iter().chain(limit).chain(trace).collect();
                self.push(kind::SUBMIT, number, &submit, &given, payload)?;
            }
            None => self.push(kind::SUBMIT, number, &submit, trace.as_slice(), payload)?,
            Some(limit) => {
                let limit = (tag::RUN_LIMIT, &limit[..]);
                let both = [limit, trace.unwrap_or(limit)];
                let given = &both[..1 + usize::from(trace.is_some())];
                self.push(kind::SUBMIT, number, &submit, given, payload)?;
            }
        }
        let frame_end = self.pushed_bytes;
        if let Some(waiter) = self.slot(number).and_then(|slot| slot.waiter.as_mut()) {
            waiter.frame_end = frame_end;
        }
        Ok(())
    }

    fn enter(&mut self, waiter: Waiter) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, waiter: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.waiter = Some(waiter);
        self.waiting += 1;
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    fn slot(&mut self, number: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(number as u32 as usize)?;
        (u64::from(slot.generation) == number >> 32).then_some(slot)
    }

    fn leave(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.slot(number)?.waiter.take()?;
        self.free.push(number as u32);
        self.waiting -= 1;
        Some(waiter)
    }

    fn progress(&mut self, number: u64, progress: Progress) {
        let waiter = self.slot(number).and_then(|slot| slot.waiter.as_ref());
        if let Some(sender) = waiter.and_then(|waiter| waiter.progress.as_ref()) {
            let _ = sender.try_send(progress);
        }
    }
}

/// The right to an outcome. Dropped before that has come, it cancels the job.
#[derive(Debug)]
pub(crate) struct Ticket {
    requests: Option<Arc<Requests>>,
    number: u64,
}

impl Ticket {
    pub(crate) fn cancel(&self) {
        if let Some(requests) = &self.requests {
            requests.cancel(self.number);
        }
    }

    pub(crate) fn disarm(&mut self) {
        self.requests = None;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(requests) = self.requests.take() {
            requests.abandon(self.number);
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A process that was forked off has the socket of its parent, and lets go of it when it ends.
    #[tokio::test]
    async fn only_the_process_that_connected_ends_the_connection() {
        let (here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let mut requests = Requests::new(UnixStream::from_std(here).unwrap(), 1 << 20, 0);
        requests.owner = std::process::id() + 1;
        requests.close("the child has ended");
        let open = there.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the parent's connection goes on");
        requests.owner = std::process::id();
        requests.close("the parent has ended");
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
    }
}

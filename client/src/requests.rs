//! The pending jobs of one connection: waiters for outcomes, and a bounded queue of frames to write.

mod frames;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bulkhead_shared::client_protocol::{Submit, capability, encode_run_limit};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest, MEMORY_FILE_THRESHOLD_BYTES};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{Executed, RejectReason};
use tokio::sync::{Notify, mpsc};

use crate::answer::{JobError, Progress};
use crate::leases::{Lease, Leases, Taken, TakesBack};
use crate::order::Order;
use crate::waiters::{Told, Waiter, Waiters};
use crate::wire::Wire;

pub(crate) use frames::Frames;

/// Size of the send queue, in bytes, at which further jobs have to wait. A job that starts below the limit is
/// queued completely, so the queue can exceed the limit by one payload.
const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Upper bound on the bytes of a job's frame without the payload. The lengths of names are checked before.
const SUBMIT_OVERHEAD_BYTES_MAX: u64 = 4096;

/// Approximate number of batches in which pending jobs are written, so that supervisor and workers can work
/// on some jobs while others are being sent. A batch has between [`BATCH_MIN`] and [`BATCH_MAX`] frames. With
/// a single write, each side would wait for the other.
const BATCHES: usize = 6;
const BATCH_MIN: usize = 8;
const BATCH_MAX: usize = 64;

/// The reason why a job was not sent.
pub(crate) enum SubmitError {
    /// The request is invalid.
    Refused(JobError),
    /// The job has to wait for room.
    Full,
    /// The connection is unusable.
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// No clone can submit jobs any more. The driver is notified at the end of the last job.
    Ending,
    /// A write has failed. The driver will determine the reason.
    Broken,
    /// Every waiter has its outcome.
    Closed,
}

#[derive(Default)]
struct State {
    stage: Stage,
    waiters: Waiters,
    outbox: Outbox,
    /// Total number of bytes ever appended to the outbox.
    pushed_bytes: u64,
    pool: BufferPool,
    leases: Leases,
    /// True if the driver has been notified of bytes to write.
    is_flush_due: bool,
    /// Number of submitters that wait for room in the outbox.
    queued: usize,
    /// Number of frames since the last write.
    unflushed: usize,
}

/// The requests of one connection.
pub(crate) struct Requests {
    state: Mutex<State>,
    pub(crate) wire: Wire,
    /// Process that connected. A forked process shares the socket and must not end the connection.
    owner: u32,
    pub(crate) flush_due: Notify,
    /// Wakes the first submitter that waits for room in the outbox; at the end of the connection, wakes all.
    pub(crate) room: Notify,
    idle: Notify,
    frame_bytes_max: u32,
    /// True if descriptors may arrive.
    expects_files: AtomicBool,
    /// Capabilities of the supervisor: a sum of [`capability`].
    capabilities: u64,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Requests")
    }
}

impl Requests {
    pub(crate) fn new(wire: Wire, frame_bytes_max: u32, capabilities: u64) -> Self {
        Self {
            state: Mutex::default(),
            wire,
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

    /// Sends a job, unless others already wait for room. On success, takes the payload from the job and the
    /// sender for progress reports from `progress`. The outcome wakes `waker`.
    pub(crate) fn submit(
        self: &Arc<Self>,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<&Waker>,
    ) -> Result<Ticket, SubmitError> {
        self.submit_after(0, job, progress, waker.cloned())
    }

    /// Joins the queue of submitters that wait for room.
    pub(crate) fn queue(self: &Arc<Self>) -> Place<'_> {
        let mut state = self.lock();
        let is_turn = state.queued == 0;
        state.queued += 1;
        drop(state);
        Place { requests: self, is_turn }
    }

    /// Sends a job if at most `queued_max` submitters wait for room. The first job on an idle connection is
    /// written immediately. Later jobs are written in batches, or by the driver.
    fn submit_after(
        self: &Arc<Self>,
        queued_max: usize,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<Waker>,
    ) -> Result<Ticket, SubmitError> {
        let payload_bytes = job.payload_bytes();
        if payload_bytes as u64 + SUBMIT_OVERHEAD_BYTES_MAX > u64::from(self.frame_bytes_max) {
            let message = format!("the supervisor does not accept {payload_bytes} bytes of payload");
            return Err(SubmitError::Refused(job.refused(RejectReason::TooLarge, message)));
        }
        if job.run_limit.is_some() && self.capabilities & capability::RUN_LIMIT == 0 {
            let message =
                "the supervisor is too old: send the job without a run limit, or update the supervisor";
            return Err(SubmitError::Refused(job.refused(RejectReason::Invalid, message.into())));
        }
        let mut state = self.lock();
        state.check_room(queued_max)?;
        let mut lease = None;
        if payload_bytes > MEMORY_FILE_THRESHOLD_BYTES && self.capabilities & capability::MEMORY_FILES != 0 {
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
        let named = lease.as_ref().map(|lease| LeaseRef { lease: lease.number, bytes: payload_bytes as u64 });
        let waiter = Waiter {
            bulkhead: String::new(),
            progress: progress.take(),
            frame_end: 0,
            lease,
            maps_result: job.maps_result,
        };
        let number = state.waiters.enter(waiter, waker);
        // `Payload::Owned` avoids a copy of large payloads.
        let payload = std::mem::take(&mut job.payload);
        let payload = if named.is_some() { Payload::NONE } else { Payload::Owned(payload) };
        if state.push_job(number, job, named, payload).is_err() {
            let left = state.waiters.leave(number);
            drop(state);
            drop(left);
            let message = "the job does not fit in a frame".into();
            return Err(SubmitError::Refused(job.refused(RejectReason::TooLarge, message)));
        }
        self.schedule_flush(&mut state);
        drop(state);
        Ok(Ticket { requests: Some(self.clone()), number })
    }

    /// Returns a free lease that fits the job. Otherwise asks the supervisor for a lease for later jobs.
    fn lease_for(&self, state: &mut State, job: &Order, bytes: usize) -> Option<Box<Lease>> {
        let hears = || self.wire.is_read();
        match state.leases.take((&job.bulkhead, &job.tenant), bytes, hears) {
            Taken::Lease(lease) => return Some(Box::new(lease)),
            Taken::TooSmall(lease) => state.tell(kind::LEASE_RETURNED, lease.number),
            Taken::Doubtful => return None,
            Taken::None => {}
        }
        let number = state.leases.ask(&job.bulkhead, &job.tenant)?;
        // Must be set before the lease can arrive.
        self.expects_files.store(true, Ordering::SeqCst);
        let wanted = LeaseRequest { bulkhead: &job.bulkhead, tenant: &job.tenant, bytes: bytes as u64 };
        let _ = state.push(kind::LEASE, number, &wanted, &[], Payload::NONE);
        None
    }

    /// Makes a lease available to other jobs, or hands it back if the supervisor has recalled it.
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

    /// Hands a lease back to the supervisor.
    fn give_back(&self, lease: Lease) {
        let mut state = self.lock();
        if state.stage != Stage::Closed {
            state.leases.forget(lease.number);
            state.tell(kind::LEASE_RETURNED, lease.number);
            self.schedule_flush(&mut state);
        }
    }

    /// Reads without blocking, with descriptors if they may arrive.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        if !self.expects_files.load(Ordering::SeqCst) {
            return self.wire.receive(buffer, None);
        }
        let mut files = Vec::new();
        let count = self.wire.receive(buffer, Some(&mut files))?;
        if !files.is_empty() {
            self.lock().leases.coming = files;
        }
        Ok(count)
    }

    fn schedule_flush(&self, state: &mut State) {
        state.unflushed += 1;
        if state.waiters.waiting() <= 1
            || state.unflushed >= state.waiters.waiting().div_ceil(BATCHES).clamp(BATCH_MIN, BATCH_MAX)
        {
            let _ = self.try_flush(state);
        }
        if !state.outbox.is_empty() && !std::mem::replace(&mut state.is_flush_due, true) {
            self.flush_due.notify_one();
        }
    }

    /// Writes what the socket takes. Returns true if nothing is left.
    fn try_flush(&self, state: &mut State) -> io::Result<bool> {
        state.unflushed = 0;
        let State { outbox, pool, .. } = state;
        let result = self.wire.flush(outbox, pool);
        if result.is_err() && state.stage != Stage::Closed {
            state.stage = Stage::Broken;
        }
        if state.queued > 0 && state.has_room() {
            self.room.notify_one();
        }
        result
    }

    /// Writes the send queue. Returns true if nothing is left. Called by the driver.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut state = self.lock();
        state.is_flush_due = false;
        self.try_flush(&mut state)
    }

    /// Cancels a job whose caller no longer waits.
    fn abandon(&self, number: u64) {
        let mut state = self.lock();
        let Some(mut left) = state.waiters.leave(number) else { return };
        self.tell_idle(&state);
        if let Some(waiter) = left.waiter.take().filter(|_| state.stage != Stage::Closed) {
            state.tell(kind::CANCEL, number);
            if let Some(lease) = waiter.lease {
                // The lease must be returned after the cancellation.
                state.leases.forget(lease.number);
                state.tell(kind::LEASE_RETURNED, lease.number);
            }
            self.flush_soon(&mut state);
        }
        drop(state);
        drop(left);
    }

    /// Asks for the cancellation of a job whose caller still waits for the outcome.
    fn cancel(&self, number: u64, unless_begun: bool) {
        let extension: &[u8] = &[];
        let only = unless_begun.then_some((tag::UNLESS_BEGUN, extension));
        let mut state = self.lock();
        let is_known = !unless_begun || self.capabilities & capability::CANCEL_UNLESS_BEGUN != 0;
        if is_known && state.stage != Stage::Closed && state.waiters.get(number).is_some() {
            // Such a short message always fits.
            let _ = state.push(kind::CANCEL, number, &Empty, only.as_slice(), Payload::NONE);
            self.flush_soon(&mut state);
        }
    }

    /// Writes immediately as much as the socket takes. A program that cancels a job often ends soon
    /// afterwards, together with its driver.
    fn flush_soon(&self, state: &mut State) {
        let _ = self.try_flush(state);
        self.schedule_flush(state);
    }

    // The end.

    /// Notifies the driver if the last job has ended.
    fn tell_idle(&self, state: &State) {
        if state.stage == Stage::Ending && state.waiters.waiting() == 0 {
            self.idle.notify_one();
        }
    }

    /// Polls the outcome of a request.
    #[inline]
    fn poll(&self, number: u64, cx: &Context<'_>) -> Poll<Told> {
        // Dropped after the lock is released.
        let mut unwanted = None;
        self.lock().waiters.poll(number, cx, &mut unwanted).map(|told| {
            told.unwrap_or_else(|| Err(JobError::lost(Executed::Unknown, "the outcome was already taken")))
        })
    }

    /// Waits until no caller waits for an outcome. Must be called only when no further job can be submitted.
    pub(crate) async fn idle(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.stage == Stage::Open {
                    state.stage = Stage::Ending;
                }
                if state.waiters.waiting() == 0 {
                    return;
                }
            }
            self.idle.notified().await;
        }
    }

    /// Closes the connection. Every waiter gets an error.
    pub(crate) fn close(&self, why: &str) {
        let mut state = self.lock();
        state.stage = Stage::Closed;
        let sent_bytes = state.pushed_bytes - state.outbox.waiting_bytes() as u64;
        drop(state);
        // Closes the wire explicitly so that the supervisor notices now, even if other references to the
        // socket exist.
        if self.owner == std::process::id() {
            self.wire.close();
        }
        self.room.notify_waiters();
        let (_left, wakers) = self.lock().waiters.tell_all(|waiter| {
            // The supervisor begins a job only after it has the complete frame.
            let is_unsent = waiter.is_some_and(|waiter| waiter.frame_end > sent_bytes);
            let executed = if is_unsent { Executed::No } else { Executed::Unknown };
            Err(JobError::lost(executed, why))
        });
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A place in the queue for room in the outbox. Dropping it lets the next submitter try.
pub(crate) struct Place<'r> {
    requests: &'r Arc<Requests>,
    /// True if the queue was empty when this place was taken. Of several concurrent submitters one must see
    /// this, or each would wait for the others.
    is_turn: bool,
}

impl Place<'_> {
    /// Tries to send a job. The first attempt succeeds only if the queue was empty before. The caller repeats
    /// the call when it is this place's turn; then the queue no longer matters.
    pub(crate) fn submit(
        &mut self,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<Ticket, SubmitError> {
        let queued_max = if std::mem::replace(&mut self.is_turn, true) { usize::MAX } else { 0 };
        self.requests.submit_after(queued_max, job, progress, None)
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

impl State {
    fn check_room(&self, queued_max: usize) -> Result<(), SubmitError> {
        match self.stage {
            Stage::Open => {}
            Stage::Ending | Stage::Broken | Stage::Closed => return Err(SubmitError::Closed),
        }
        if self.queued > queued_max || !self.has_room() { Err(SubmitError::Full) } else { Ok(()) }
    }

    /// Appends a frame without content: only kind and number.
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
        job: &mut Order,
        named: Option<LeaseRef>,
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
        let (named, limit) = (named.map(LeaseRef::to_bytes), job.run_limit.map(encode_run_limit));
        let named = named.as_ref().map(|named| (tag::LEASE, &named[..]));
        let limit = limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
        let (mut given, mut count) = ([(0, &[][..]); 3], 0);
        for extension in [named, limit, trace].into_iter().flatten() {
            given[count] = extension;
            count += 1;
        }
        self.push(kind::SUBMIT, number, &submit, &given[..count], payload)?;
        let frame_end = self.pushed_bytes;
        if let Some(waiter) = self.waiters.get(number) {
            waiter.frame_end = frame_end;
            waiter.bulkhead = std::mem::take(&mut job.bulkhead);
        }
        Ok(())
    }
}

/// The right to an outcome. Dropping it before the outcome has arrived cancels the job.
#[derive(Debug)]
pub(crate) struct Ticket {
    requests: Option<Arc<Requests>>,
    number: u64,
}

impl Ticket {
    pub(crate) fn cancel(&self, unless_begun: bool) {
        if let Some(requests) = &self.requests {
            requests.cancel(self.number, unless_begun);
        }
    }

    /// Polls the outcome.
    #[inline]
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<Told> {
        let Some(requests) = &self.requests else {
            return Poll::Ready(Err(JobError::lost(Executed::Unknown, "the outcome was already taken")));
        };
        let told = requests.poll(self.number, cx);
        if told.is_ready() {
            self.requests = None;
        }
        told
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
    use std::task::Wake;

    use bulkhead_shared::Verdict;
    use bulkhead_shared::client_protocol::OutcomeMessage;
    use bulkhead_shared::frame::Header;
    use bulkhead_shared::in_process::{self, Endpoint};

    use super::*;

    /// Creates requests over an in-memory connection.
    fn in_memory() -> (Arc<Requests>, Endpoint) {
        let (here, there) = in_process::pair();
        (Arc::new(Requests::new(Wire::InProcess(here), 1 << 20, 0)), there)
    }

    fn header(kind: u8, number: u64, metadata: &[u8]) -> Header {
        let length = metadata.len() as u32;
        Header { length, kind, flags: 0, metadata_length: length as u16, number }
    }

    /// A task that drops its job when it is woken.
    struct Goes(Mutex<Option<Ticket>>);

    impl Wake for Goes {
        fn wake(self: Arc<Self>) {
            drop(self.0.lock().unwrap().take());
        }
    }

    #[test]
    fn a_task_that_goes_when_it_is_told_of_progress_may_have_jobs() {
        let (requests, _there) = in_memory();
        let (sender, mut receiver) = mpsc::channel(1);
        let mut job = Order::new("resize".into(), b"picture".to_vec());
        let Ok(ticket) = requests.submit(&mut job, &mut Some(sender), None) else {
            panic!("it was not sent")
        };
        let number = ticket.number;
        let waker = Waker::from(Arc::new(Goes(Mutex::new(Some(ticket)))));
        assert!(receiver.poll_recv(&mut Context::from_waker(&waker)).is_pending());
        let mut metadata = Vec::new();
        let message = bulkhead_shared::client_protocol::Progress { fraction: 0.5, text: "half" };
        codec::encode(&message, &[], &mut metadata).unwrap();
        let header = header(kind::PROGRESS, number, &metadata);
        Frames::of(&requests).take(header, &metadata, Vec::new()).unwrap();
        assert_eq!(requests.lock().waiters.waiting(), 0);
        assert!(receiver.try_recv().is_ok());
    }

    /// Models several threads that submit when a connection becomes available.
    #[test]
    fn simultaneous_jobs_are_submitted_in_queue_order() {
        let (requests, _there) = in_memory();
        let send = |place: &mut Place<'_>| {
            place.submit(&mut Order::new("resize".into(), b"picture".to_vec()), &mut None)
        };
        let mut places = [requests.queue(), requests.queue(), requests.queue()];
        let cx = &mut Context::from_waker(Waker::noop());
        let mut turns = [0; 2].map(|_| Box::pin(requests.room.notified()));
        assert!(turns.iter_mut().all(|turn| turn.as_mut().poll(cx).is_pending()));
        assert!(places[1..].iter_mut().all(|place| send(place).is_err()), "it is not their turn");
        let mut tickets: Vec<Ticket> = Vec::new();
        for (at, mut place) in places.into_iter().enumerate() {
            assert!(at == 0 || turns[at - 1].as_mut().poll(cx).is_ready(), "the one before has gone");
            tickets.extend(send(&mut place));
        }
        assert_eq!((tickets.len(), requests.lock().queued), (3, 0));
    }

    /// Such an outcome ends the connection, which also ends the job.
    #[test]
    fn result_in_a_missing_file_leaves_no_caller_waiting() {
        let (requests, _there) = in_memory();
        let mut job = Order::new("resize".into(), b"picture".to_vec());
        let Ok(mut ticket) = requests.submit(&mut job, &mut None, None) else { panic!("it was not sent") };
        let named = LeaseRef { lease: 7, bytes: 1 }.to_bytes();
        let message = OutcomeMessage::from_verdict(&Verdict::Ok, "resize");
        let mut metadata = Vec::new();
        codec::encode(&message, &[(tag::LEASE, &named)], &mut metadata).unwrap();
        let header = header(kind::OUTCOME, ticket.number, &metadata);
        let why = Frames::of(&requests).take(header, &metadata, Vec::new()).unwrap_err();
        requests.close(&why);
        let told = ticket.poll(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Err(error)) = told else { panic!("{told:?}") };
        assert_eq!(error.executed(), Executed::Unknown, "{error}");
        assert_eq!(requests.lock().waiters.waiting(), 0);
    }

    /// A forked process shares the socket of its parent, and releases it when it ends.
    #[tokio::test]
    async fn only_the_process_that_connected_ends_the_connection() {
        let (here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let mut requests =
            Requests::new(Wire::Socket(tokio::net::UnixStream::from_std(here).unwrap()), 1 << 20, 0);
        requests.owner = std::process::id() + 1;
        requests.close("the child has ended");
        let open = there.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the parent's connection goes on");
        requests.owner = std::process::id();
        requests.close("the parent has ended");
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
    }
}

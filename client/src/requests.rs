//! The jobs under way on one connection: those that wait for an outcome, and what waits to be written, within a bound.

mod frames;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bulkhead_shared::client_protocol::{Submit, capability, run_limit_bytes};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::memory_files::{LeaseWanted, Named, WORTH_A_FILE_BYTES};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{Executed, RejectReason};
use tokio::sync::{Notify, mpsc};

use crate::answer::{JobError, Progress};
use crate::leases::{Lease, Leases, Taken, TakesBack};
use crate::order::Order;
use crate::waiters::{Told, Waiter, Waiters};
use crate::wire::Wire;

pub(crate) use frames::Frames;

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

/// Why a job was not sent.
pub(crate) enum SubmitError {
    /// It cannot be.
    Refused(JobError),
    /// It has to wait for room.
    Full,
    /// The connection is of no more use.
    Closed,
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
    waiters: Waiters,
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
    pub(crate) wire: Wire,
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

    /// Sends a job, unless others wait for room already. If it is sent, its payload has been taken out of
    /// it, and the reports of its progress go to the sender that was there. The waker is woken by its outcome.
    pub(crate) fn submit(
        self: &Arc<Self>,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<&Waker>,
    ) -> Result<Ticket, SubmitError> {
        self.submit_after(0, job, progress, waker.cloned())
    }

    /// Takes a place among those that wait for room.
    pub(crate) fn queue(self: &Arc<Self>) -> Place<'_> {
        let mut state = self.lock();
        let is_turn = state.queued == 0;
        state.queued += 1;
        drop(state);
        Place { requests: self, is_turn }
    }

    /// Sends a job if no more than `queued_max` wait for room. The first job on an idle connection is written
    /// at once; the others wait for a few more, or for the driver's turn.
    fn submit_after(
        self: &Arc<Self>,
        queued_max: usize,
        job: &mut Order,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<Waker>,
    ) -> Result<Ticket, SubmitError> {
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
        let named = lease.as_ref().map(|lease| Named { lease: lease.number, bytes: payload_bytes as u64 });
        let waiter = Waiter {
            bulkhead: String::new(),
            progress: progress.take(),
            frame_end: 0,
            lease,
            maps_result: job.maps_result,
        };
        let number = state.waiters.enter(waiter, waker);
        // Large ones are handed over, not copied.
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

    /// A lease for a job, if there is one. If not, one is asked for, for the jobs to come.
    fn lease_for(&self, state: &mut State, job: &Order, bytes: usize) -> Option<Box<Lease>> {
        let hears = || self.wire.is_read();
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

    /// Writes what the socket takes; returns whether that is all.
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

    /// Writes what waits; returns whether all is written. For the driver.
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
                // Behind the cancellation.
                state.leases.forget(lease.number);
                state.tell(kind::LEASE_RETURNED, lease.number);
            }
            self.flush_soon(&mut state);
        }
        drop(state);
        drop(left);
    }

    /// Cancels a job and goes on waiting for its outcome.
    fn cancel(&self, number: u64, unless_begun: bool) {
        let extension: &[u8] = &[];
        let only = unless_begun.then_some((tag::UNLESS_BEGUN, extension));
        let mut state = self.lock();
        let is_known = !unless_begun || self.capabilities & capability::CANCEL_UNLESS_BEGUN != 0;
        if is_known && state.stage != Stage::Closed && state.waiters.get(number).is_some() {
            // So short a message always fits.
            let _ = state.push(kind::CANCEL, number, &Empty, only.as_slice(), Payload::NONE);
            self.flush_soon(&mut state);
        }
    }

    /// Sends what waits at once, as far as the supervisor takes it: a program that cancels as a rule ends soon, and its
    /// driver with it.
    fn flush_soon(&self, state: &mut State) {
        let _ = self.try_flush(state);
        self.schedule_flush(state);
    }

    // The end.

    /// The driver waits for the end of the last job.
    fn tell_idle(&self, state: &State) {
        if state.stage == Stage::Ending && state.waiters.waiting() == 0 {
            self.idle.notify_one();
        }
    }

    /// The outcome of a request. If it is not there, the task is woken when it is.
    #[inline]
    fn poll(&self, number: u64, cx: &Context<'_>) -> Poll<Told> {
        // Dropped behind the lock.
        let mut unwanted = None;
        self.lock().waiters.poll(number, cx, &mut unwanted).map(|told| {
            told.unwrap_or_else(|| Err(JobError::lost(Executed::Unknown, "its outcome was taken before")))
        })
    }

    /// Waits until no caller waits. Call it when no job will be submitted any more.
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

    /// The connection is gone: every waiter is told.
    pub(crate) fn close(&self, why: &str) {
        let mut state = self.lock();
        state.stage = Stage::Closed;
        let sent_bytes = state.pushed_bytes - state.outbox.waiting_bytes() as u64;
        drop(state);
        // Not left to the last that holds it: the supervisor is to know now. It may be gone itself.
        if self.owner == std::process::id() {
            self.wire.close();
        }
        self.room.notify_waiters();
        let (_left, wakers) = self.lock().waiters.tell_all(|waiter| {
            // The supervisor begins nothing before it has the whole frame.
            let is_unsent = waiter.is_some_and(|waiter| waiter.frame_end > sent_bytes);
            let executed = if is_unsent { Executed::No } else { Executed::Unknown };
            Err(JobError::lost(executed, why))
        });
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A place among those that wait for room in the outbox. Leaving it lets the next one try.
pub(crate) struct Place<'r> {
    requests: &'r Arc<Requests>,
    /// Whether none was there before it. Of those that come at once on several threads one has to be, or each would
    /// wait for the others.
    is_turn: bool,
}

impl Place<'_> {
    /// Tries to send a job: the first time only if no other was there before, and from then on, as it is called again
    /// when it is this one's turn, whichever wait.
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
        job: &mut Order,
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
        let (named, limit) = (named.map(Named::to_bytes), job.run_limit.map(run_limit_bytes));
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

/// The right to an outcome. Dropped before that has come, it cancels the job.
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

    /// The outcome, if it is there. Otherwise the task is woken when it is.
    #[inline]
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<Told> {
        let Some(requests) = &self.requests else {
            return Poll::Ready(Err(JobError::lost(Executed::Unknown, "its outcome was taken before")));
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
    use bulkhead_shared::in_process::{self, End};

    use super::*;

    /// Requests whose other end is in memory.
    fn in_memory() -> (Arc<Requests>, End) {
        let (here, there) = in_process::pair();
        (Arc::new(Requests::new(Wire::InProcess(here), 1 << 20, 0)), there)
    }

    fn header(kind: u8, number: u64, metadata: &[u8]) -> Header {
        let length = metadata.len() as u32;
        Header { length, kind, flags: 0, metadata_length: length as u16, number }
    }

    /// A task that goes when it is woken, and its job with it.
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

    /// As they do on several threads, once there is a connection for which many have waited.
    #[test]
    fn of_jobs_that_take_a_place_at_once_the_first_goes_and_then_the_next() {
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

    /// The connection ends of such an outcome, and so does the job.
    #[test]
    fn a_result_in_a_file_that_there_is_not_leaves_no_caller_waiting() {
        let (requests, _there) = in_memory();
        let mut job = Order::new("resize".into(), b"picture".to_vec());
        let Ok(mut ticket) = requests.submit(&mut job, &mut None, None) else { panic!("it was not sent") };
        let named = Named { lease: 7, bytes: 1 }.to_bytes();
        let message = OutcomeMessage::of_verdict(&Verdict::Ok, "resize");
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

    /// A process that was forked off has the socket of its parent, and lets go of it when it ends.
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

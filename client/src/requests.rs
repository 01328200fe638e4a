//! Pending jobs of one connection: the waiters for outcomes, and a bounded queue of frames to write.

mod frames;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bulkhead_shared::client_protocol::{Submit, capability, encode_run_limit};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{BufferPool, Outbox, Payload};
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{Executed, RejectReason};
use tokio::sync::{Notify, mpsc};

use crate::job_request::JobRequest;
use crate::leases::{Lease, LeaseOwner, LeaseSearch, Leases};
use crate::reply::{JobError, Progress};
use crate::transport::Transport;
use crate::waiters::{JobResult, Waiter, Waiters};

pub(crate) use frames::Frames;

/// Size of the send queue, in bytes, from which further jobs have to wait. A job that is submitted below this
/// size is queued completely, so the queue can exceed the size by one payload.
const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Upper bound on the size of a SUBMIT frame without the payload, in bytes. Names that would make the frame
/// larger are rejected earlier.
const SUBMIT_OVERHEAD_BYTES_MAX: u64 = 4096;

/// Approximate number of batches in which the frames of all pending jobs are written. With several batches,
/// the supervisor and the workers can process some jobs while the client sends others. With a single write,
/// each side would wait for the other. A batch has between [`BATCH_MIN`] and [`BATCH_MAX`] frames.
const BATCHES: usize = 6;
const BATCH_MIN: usize = 8;
const BATCH_MAX: usize = 64;

/// The reason why a job was not sent.
pub(crate) enum SubmitError {
    /// The request is invalid.
    Rejected(JobError),
    /// The send queue is full, so that the job has to wait.
    Full,
    /// The connection is unusable.
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// All clones of the client were dropped, so no further job can be submitted. The driver is notified when
    /// the last job ends.
    Ending,
    /// A write has failed. The driver will determine the reason.
    Broken,
    /// The connection is closed. Pending jobs end with an error.
    Closed,
}

#[derive(Default)]
struct State {
    phase: Phase,
    waiters: Waiters,
    outbox: Outbox,
    /// Total number of bytes ever appended to the outbox.
    pushed_bytes: u64,
    pool: BufferPool,
    leases: Leases,
    /// True if the driver was notified that the outbox contains bytes to write.
    is_flush_due: bool,
    /// Number of submitters that are waiting for space in the outbox.
    queued_submitters: usize,
    /// Number of frames queued since the last write.
    unflushed: usize,
}

/// The requests of one connection.
pub(crate) struct Requests {
    state: Mutex<State>,
    pub(crate) transport: Transport,
    /// Id of the process that opened the connection. A forked process shares the socket and must not close
    /// the connection.
    owner: u32,
    pub(crate) flush_due: Notify,
    /// Wakes the first submitter that is waiting for space in the outbox. When the connection closes, all
    /// such submitters are woken.
    pub(crate) space: Notify,
    idle: Notify,
    frame_bytes_max: u32,
    /// True if the supervisor can send descriptors, because a requested lease has not arrived yet.
    expects_files: AtomicBool,
    /// Capabilities of the supervisor: a sum of [`capability`] values.
    capabilities: u64,
}

impl std::fmt::Debug for Requests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Requests")
    }
}

impl Requests {
    pub(crate) fn new(transport: Transport, frame_bytes_max: u32, capabilities: u64) -> Self {
        Self {
            state: Mutex::default(),
            transport,
            owner: std::process::id(),
            flush_due: Notify::new(),
            space: Notify::new(),
            idle: Notify::new(),
            frame_bytes_max,
            expects_files: AtomicBool::new(false),
            capabilities,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Submission.

    /// Sends a job, unless other submitters are waiting for space. On success, takes the payload out of
    /// `job`, and the sender for progress reports out of `progress`. `waker` is called when the outcome
    /// arrives.
    pub(crate) fn submit(
        self: &Arc<Self>,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<&Waker>,
    ) -> Result<PendingOutcome, SubmitError> {
        self.submit_after(0, job, progress, waker.cloned())
    }

    /// Adds the caller to the queue of submitters that are waiting for space.
    pub(crate) fn queue(self: &Arc<Self>) -> QueuePosition<'_> {
        let mut state = self.lock();
        let is_first = state.queued_submitters == 0;
        state.queued_submitters += 1;
        drop(state);
        QueuePosition { requests: self, is_first }
    }

    /// Sends a job if at most `queued_max` submitters are waiting for space. The first job on an idle
    /// connection is written immediately. Further jobs are written in batches, or by the driver.
    fn submit_after(
        self: &Arc<Self>,
        queued_max: usize,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<Waker>,
    ) -> Result<PendingOutcome, SubmitError> {
        let payload_bytes = job.payload_bytes();
        if payload_bytes as u64 + SUBMIT_OVERHEAD_BYTES_MAX > u64::from(self.frame_bytes_max) {
            let message =
                format!("the payload of {payload_bytes} bytes is larger than the supervisor accepts");
            return Err(SubmitError::Rejected(job.rejection(RejectReason::TooLarge, message)));
        }
        if job.options.run_limit.is_some() && self.capabilities & capability::RUN_LIMIT == 0 {
            let message = "the supervisor is too old for run limits: send the job without a run limit, or \
                           update the supervisor";
            return Err(SubmitError::Rejected(job.rejection(RejectReason::Invalid, message.into())));
        }
        let mut state = self.lock();
        state.check_space(queued_max)?;
        let mut lease = None;
        if payload_bytes > INLINE_PAYLOAD_BYTES_MAX && self.capabilities & capability::MEMORY_FILES != 0 {
            lease = self.take_lease(&mut state, job, payload_bytes);
        }
        if lease.is_some() || job.source.is_some() {
            drop(state);
            let written = match &mut lease {
                Some(lease) => job.fill(lease.payload.first_mut(payload_bytes)),
                None => job.load(),
            };
            if let Err(error) = written {
                lease.into_iter().for_each(|lease| self.reuse_lease(*lease));
                return Err(SubmitError::Rejected(error));
            }
            state = self.lock();
            if lease.is_none() {
                state.check_space(queued_max)?;
            } else if state.phase != Phase::Open {
                return Err(SubmitError::Closed);
            }
        }
        let lease_ref =
            lease.as_ref().map(|lease| LeaseRef { lease: lease.number, bytes: payload_bytes as u64 });
        let waiter = Waiter {
            bulkhead: String::new(),
            progress: progress.take(),
            frame_end: 0,
            lease,
            maps_result: job.maps_result,
        };
        let number = state.waiters.insert(waiter, waker);
        // `Payload::Owned` avoids a copy of large payloads.
        let payload = std::mem::take(&mut job.payload);
        let payload = if lease_ref.is_some() { Payload::NONE } else { Payload::Owned(payload) };
        if state.push_job(number, job, lease_ref, payload).is_err() {
            let left = state.waiters.remove(number);
            drop(state);
            drop(left);
            let message = "the job does not fit in a frame: send a smaller payload".into();
            return Err(SubmitError::Rejected(job.rejection(RejectReason::TooLarge, message)));
        }
        self.schedule_flush(&mut state);
        drop(state);
        Ok(PendingOutcome { requests: Some(self.clone()), number })
    }

    /// Returns a free lease that fits the job. If there is none, requests a lease for later jobs from the
    /// supervisor and returns `None`.
    fn take_lease(&self, state: &mut State, job: &JobRequest, bytes: usize) -> Option<Box<Lease>> {
        let has_read_all = || self.transport.has_no_unread_bytes();
        match state.leases.take((&job.bulkhead, &job.options.tenant), bytes, has_read_all) {
            LeaseSearch::Found(lease) => return Some(Box::new(lease)),
            LeaseSearch::TooSmall(lease) => state.push_empty(kind::LEASE_RETURNED, lease.number),
            LeaseSearch::MayBeRevoked => return None,
            LeaseSearch::None => {}
        }
        let number = state.leases.request(&job.bulkhead, &job.options.tenant)?;
        // Must be set before the supervisor can send the lease.
        self.expects_files.store(true, Ordering::SeqCst);
        let wanted =
            LeaseRequest { bulkhead: &job.bulkhead, tenant: &job.options.tenant, bytes: bytes as u64 };
        let _ = state.push(kind::LEASE, number, &wanted, &[], Payload::NONE);
        None
    }

    /// Makes a lease available to other jobs. If the supervisor has recalled the lease, returns it to the
    /// supervisor instead.
    pub(crate) fn reuse_lease(&self, lease: Lease) {
        let mut state = self.lock();
        if state.phase == Phase::Closed {
            return;
        }
        if let Some(number) = state.leases.release(lease) {
            state.push_empty(kind::LEASE_RETURNED, number);
            self.schedule_flush(&mut state);
        }
    }

    /// Returns a lease to the supervisor.
    fn return_lease(&self, lease: Lease) {
        let mut state = self.lock();
        if state.phase != Phase::Closed {
            state.leases.forget(lease.number);
            state.push_empty(kind::LEASE_RETURNED, lease.number);
            self.schedule_flush(&mut state);
        }
    }

    /// Reads from the connection without blocking. Also receives descriptors if a requested lease can arrive.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        if !self.expects_files.load(Ordering::SeqCst) {
            return self.transport.receive(buffer, None);
        }
        let mut files = Vec::new();
        let count = self.transport.receive(buffer, Some(&mut files))?;
        if !files.is_empty() {
            self.lock().leases.received_files = files;
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

    /// Writes as many queued bytes as the connection accepts. Returns true if all bytes were written.
    fn try_flush(&self, state: &mut State) -> io::Result<bool> {
        state.unflushed = 0;
        let State { outbox, pool, .. } = state;
        let result = self.transport.flush(outbox, pool);
        if result.is_err() && state.phase != Phase::Closed {
            state.phase = Phase::Broken;
        }
        if state.queued_submitters > 0 && state.has_space() {
            self.space.notify_one();
        }
        result
    }

    /// Writes queued bytes for the driver. Returns true if all bytes were written.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut state = self.lock();
        state.is_flush_due = false;
        self.try_flush(&mut state)
    }

    /// Cancels a job whose handle was dropped.
    fn abandon(&self, number: u64) {
        let mut state = self.lock();
        let Some(mut left) = state.waiters.remove(number) else { return };
        self.notify_if_idle(&state);
        if let Some(waiter) = left.waiter.take().filter(|_| state.phase != Phase::Closed) {
            state.push_empty(kind::CANCEL, number);
            if let Some(lease) = waiter.lease {
                // The cancellation must be sent before the lease is returned.
                state.leases.forget(lease.number);
                state.push_empty(kind::LEASE_RETURNED, lease.number);
            }
            self.flush_now(&mut state);
        }
        drop(state);
        drop(left);
    }

    /// Asks the supervisor to cancel a job. The caller continues to wait for the outcome.
    fn cancel(&self, number: u64, unless_begun: bool) {
        let extension: &[u8] = &[];
        let only = unless_begun.then_some((tag::UNLESS_BEGUN, extension));
        let mut state = self.lock();
        let is_known = !unless_begun || self.capabilities & capability::CANCEL_UNLESS_BEGUN != 0;
        if is_known && state.phase != Phase::Closed && state.waiters.get(number).is_some() {
            // A cancellation always fits in a frame.
            let _ = state.push(kind::CANCEL, number, &Empty, only.as_slice(), Payload::NONE);
            self.flush_now(&mut state);
        }
    }

    /// Writes queued bytes immediately instead of leaving them to the driver. A program that cancels a job
    /// often exits soon afterwards, which ends the driver as well.
    fn flush_now(&self, state: &mut State) {
        let _ = self.try_flush(state);
        self.schedule_flush(state);
    }

    // Outcomes, and the end of the connection.

    /// Notifies the driver if the last job has ended.
    fn notify_if_idle(&self, state: &State) {
        if state.phase == Phase::Ending && state.waiters.waiting() == 0 {
            self.idle.notify_one();
        }
    }

    /// Polls for the outcome of a request.
    #[inline]
    fn poll(&self, number: u64, cx: &Context<'_>) -> Poll<JobResult> {
        // The replaced waker is dropped after the lock is released.
        let mut replaced = None;
        self.lock().waiters.poll(number, cx, &mut replaced).map(|result| {
            result.unwrap_or_else(|| Err(JobError::lost(Executed::Unknown, "the outcome was already taken")))
        })
    }

    /// Waits until no job is pending. Must be called only when no further job can be submitted.
    pub(crate) async fn idle(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.phase == Phase::Open {
                    state.phase = Phase::Ending;
                }
                if state.waiters.waiting() == 0 {
                    return;
                }
            }
            self.idle.notified().await;
        }
    }

    /// Closes the connection. Every pending job ends with an error.
    pub(crate) fn close(&self, reason: &str) {
        let mut state = self.lock();
        state.phase = Phase::Closed;
        let sent_bytes = state.pushed_bytes - state.outbox.waiting_bytes() as u64;
        drop(state);
        // Closes the connection explicitly, so that the supervisor notices immediately even if other
        // references to the socket exist.
        if self.owner == std::process::id() {
            self.transport.close();
        }
        self.space.notify_waiters();
        let (_left, wakers) = self.lock().waiters.finish_all(|waiter| {
            // The supervisor begins a job only after the complete frame has arrived.
            let is_unsent = waiter.is_some_and(|waiter| waiter.frame_end > sent_bytes);
            let executed = if is_unsent { Executed::No } else { Executed::Unknown };
            Err(JobError::lost(executed, reason))
        });
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// Position of a submitter in the queue for space in the outbox. Dropping the position wakes the next
/// submitter if there is space.
pub(crate) struct QueuePosition<'r> {
    requests: &'r Arc<Requests>,
    /// True if the queue was empty when this submitter joined. Exactly one of several concurrent submitters
    /// gets true; otherwise each would wait for the others.
    is_first: bool,
}

impl QueuePosition<'_> {
    /// Tries to send a job. The first call fails if other submitters were already queued when this one
    /// joined. The caller calls this again when `Requests::space` wakes it; later calls ignore the length of
    /// the queue.
    pub(crate) fn submit(
        &mut self,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<PendingOutcome, SubmitError> {
        let queued_max = if std::mem::replace(&mut self.is_first, true) { usize::MAX } else { 0 };
        self.requests.submit_after(queued_max, job, progress, None)
    }
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let mut state = self.requests.lock();
        state.queued_submitters -= 1;
        if state.queued_submitters > 0 && state.has_space() {
            self.requests.space.notify_one();
        }
    }
}

impl LeaseOwner for Requests {
    fn release_lease(&self, lease: Lease) {
        self.reuse_lease(lease);
    }
}

impl State {
    fn check_space(&self, queued_max: usize) -> Result<(), SubmitError> {
        match self.phase {
            Phase::Open => {}
            Phase::Ending | Phase::Broken | Phase::Closed => return Err(SubmitError::Closed),
        }
        if self.queued_submitters > queued_max || !self.has_space() { Err(SubmitError::Full) } else { Ok(()) }
    }

    /// Queues a frame that has only a kind and a number.
    fn push_empty(&mut self, kind: u8, number: u64) {
        // An empty message always fits in a frame.
        let _ = self.push(kind, number, &Empty, &[], Payload::NONE);
    }

    fn has_space(&self) -> bool {
        self.outbox.waiting_bytes() < OUTBOX_BYTES_MAX
    }

    /// Queues a frame and adds its size to `pushed_bytes`.
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
        job: &mut JobRequest,
        lease_ref: Option<LeaseRef>,
        payload: Payload<'_>,
    ) -> Result<(), codec::CodecError> {
        let submit = Submit::new(&job.bulkhead, &job.options);
        let trace = job.trace_extension();
        let (lease_ref, limit) =
            (lease_ref.map(LeaseRef::to_bytes), job.options.run_limit.map(encode_run_limit));
        let lease_ref = lease_ref.as_ref().map(|lease_ref| (tag::LEASE, &lease_ref[..]));
        let limit = limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
        let (mut given, mut count) = ([(0, &[][..]); 3], 0);
        for extension in [lease_ref, limit, trace].into_iter().flatten() {
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

/// The pending outcome of a job. Dropping it before the outcome has arrived cancels the job.
#[derive(Debug)]
pub(crate) struct PendingOutcome {
    requests: Option<Arc<Requests>>,
    number: u64,
}

impl PendingOutcome {
    pub(crate) fn cancel(&self, unless_begun: bool) {
        if let Some(requests) = &self.requests {
            requests.cancel(self.number, unless_begun);
        }
    }

    /// Polls for the outcome.
    #[inline]
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<JobResult> {
        let Some(requests) = &self.requests else {
            return Poll::Ready(Err(JobError::lost(Executed::Unknown, "the outcome was already taken")));
        };
        let result = requests.poll(self.number, cx);
        if result.is_ready() {
            self.requests = None;
        }
        result
    }
}

impl Drop for PendingOutcome {
    fn drop(&mut self) {
        if let Some(requests) = self.requests.take() {
            requests.abandon(self.number);
        }
    }
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

    /// Creates requests over an in-process connection.
    fn in_memory() -> (Arc<Requests>, Endpoint) {
        let (here, there) = in_process::pair();
        (Arc::new(Requests::new(Transport::InProcess(here), 1 << 20, 0)), there)
    }

    fn header(kind: u8, number: u64, metadata: &[u8]) -> Header {
        let length = metadata.len() as u32;
        Header { length, kind, flags: 0, metadata_length: length as u16, number }
    }

    /// A task that drops a job when it is woken.
    struct DropsJob(Mutex<Option<PendingOutcome>>);

    impl Wake for DropsJob {
        fn wake(self: Arc<Self>) {
            drop(self.0.lock().unwrap().take());
        }
    }

    #[test]
    fn task_woken_by_progress_can_drop_its_job() {
        let (requests, _there) = in_memory();
        let (sender, mut receiver) = mpsc::channel(1);
        let mut job = JobRequest::new("resize".into(), b"picture".to_vec());
        let Ok(pending) = requests.submit(&mut job, &mut Some(sender), None) else {
            panic!("the job was not sent")
        };
        let number = pending.number;
        let waker = Waker::from(Arc::new(DropsJob(Mutex::new(Some(pending)))));
        assert!(receiver.poll_recv(&mut Context::from_waker(&waker)).is_pending());
        let mut metadata = Vec::new();
        let message = bulkhead_shared::client_protocol::Progress { fraction: 0.5, text: "half" };
        codec::encode(&message, &[], &mut metadata).unwrap();
        let header = header(kind::PROGRESS, number, &metadata);
        Frames::new(&requests).handle(header, &metadata, Vec::new()).unwrap();
        assert_eq!(requests.lock().waiters.waiting(), 0);
        assert!(receiver.try_recv().is_ok());
    }

    /// Models several threads that submit jobs as soon as a connection is available.
    #[test]
    fn simultaneous_jobs_are_submitted_in_queue_order() {
        let (requests, _there) = in_memory();
        let send = |position: &mut QueuePosition<'_>| {
            position.submit(&mut JobRequest::new("resize".into(), b"picture".to_vec()), &mut None)
        };
        let mut positions = [requests.queue(), requests.queue(), requests.queue()];
        let cx = &mut Context::from_waker(Waker::noop());
        let mut turns = [0; 2].map(|_| Box::pin(requests.space.notified()));
        assert!(turns.iter_mut().all(|turn| turn.as_mut().poll(cx).is_pending()));
        assert!(
            positions[1..].iter_mut().all(|position| send(position).is_err()),
            "later submitters have to wait"
        );
        let mut pending: Vec<PendingOutcome> = Vec::new();
        for (at, mut position) in positions.into_iter().enumerate() {
            assert!(
                at == 0 || turns[at - 1].as_mut().poll(cx).is_ready(),
                "the previous submitter has finished"
            );
            pending.extend(send(&mut position));
        }
        assert_eq!((pending.len(), requests.lock().queued_submitters), (3, 0));
    }

    /// An outcome that names an unknown lease is a protocol violation. The client closes the connection, and
    /// the job ends as `Disconnected`.
    #[test]
    fn result_with_unknown_lease_fails_its_job() {
        let (requests, _there) = in_memory();
        let mut job = JobRequest::new("resize".into(), b"picture".to_vec());
        let Ok(mut pending) = requests.submit(&mut job, &mut None, None) else {
            panic!("the job was not sent")
        };
        let lease_ref = LeaseRef { lease: 7, bytes: 1 }.to_bytes();
        let message = OutcomeMessage::from_verdict(&Verdict::Ok, "resize");
        let mut metadata = Vec::new();
        codec::encode(&message, &[(tag::LEASE, &lease_ref)], &mut metadata).unwrap();
        let header = header(kind::OUTCOME, pending.number, &metadata);
        let reason = Frames::new(&requests).handle(header, &metadata, Vec::new()).unwrap_err();
        requests.close(&reason);
        let result = pending.poll(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Err(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.executed(), Executed::Unknown, "{error}");
        assert_eq!(requests.lock().waiters.waiting(), 0);
    }

    /// A forked process shares the parent's socket, and must not close the connection.
    #[tokio::test]
    async fn forked_child_leaves_parents_connection_open() {
        let (here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let mut requests =
            Requests::new(Transport::Socket(tokio::net::UnixStream::from_std(here).unwrap()), 1 << 20, 0);
        requests.owner = std::process::id() + 1;
        requests.close("the child has ended");
        let open = there.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the parent's connection stays open");
        requests.owner = std::process::id();
        requests.close("the parent has ended");
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
    }
}

//! Owns one connection's pending jobs, its queue of frames to write, and its leases. Callers submit and cancel jobs
//! here, and `frames` handles the supervisor's replies. After a loss, this module decides which jobs are sent again
//! over another connection. `connection` opens connections, and runs the task that reads from the socket.

mod frames;

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

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
use crate::waiters::{Decision, Ended, JobResult, Move, Polled, Taken, Waiter, Waiters};

pub(crate) use frames::Frames;

/// Size of the send queue, in bytes, at which jobs start to wait for space. A job submitted while the queue is
/// smaller is queued as a whole, so the queue can exceed this size by one payload.
const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Upper bound on the size of a SUBMIT frame without the payload, in bytes. Names that would make the frame
/// larger are rejected earlier.
const SUBMIT_OVERHEAD_BYTES_MAX: u64 = 4096;

/// Maximum time for which an idle connection stays open so that the caller can read mapped results. The supervisor
/// revokes a recalled lease after the same time.
const MAPPED_RESULTS_TIMEOUT: Duration = Duration::from_secs(5);

/// Minimum interval between checks for jobs without an outcome. A job ends only if no earlier job's outcome has arrived
/// during the last interval. If a check is late by more than this, the client was paused, possibly together with the
/// supervisor. The supervisor then gets this much more time.
const OUTCOME_CHECK_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// Approximate number of batches in which the frames of all pending jobs are written. With several batches, the
/// supervisor and the workers process some jobs while the client sends others. With a single batch, each side would
/// wait for the other. A batch has between [`BATCH_MIN`] and [`BATCH_MAX`] frames.
const BATCHES: usize = 6;
const BATCH_MIN: usize = 8;
const BATCH_MAX: usize = 64;

/// Reason why a job was not sent.
pub(crate) enum SubmitError {
    /// The request is invalid.
    Rejected(JobError),
    /// The send queue is full, so the job has to wait.
    Full,
    /// The connection is unusable.
    Closed,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    /// All clones of the client have been dropped, so no further job can be submitted. The driver is notified when
    /// the last job ends.
    Ending,
    /// The supervisor accepts no further jobs on this connection. The driver is notified when the last of the
    /// accepted jobs ends.
    Leaving,
    /// A write has failed. The driver will determine the reason.
    Broken,
    /// The connection is closed. Jobs that are still pending will be sent over another connection.
    Closed,
}

#[derive(Default)]
struct State {
    phase: Phase,
    waiters: Waiters<PendingOutcome>,
    outbox: Outbox,
    /// Total number of bytes ever added to the outbox.
    pushed_bytes: u64,
    /// Total number of jobs ever added to the outbox.
    submits: u64,
    pool: BufferPool,
    leases: Leases,
    /// Number of mapped results that the caller has not dropped.
    mapped_results: usize,
    /// True if the driver has been notified that the outbox contains bytes to write.
    is_flush_due: bool,
    /// Number of submitters that are waiting for space in the outbox.
    queued_submitters: usize,
    /// Number of frames queued since the last write.
    unflushed: usize,
    /// Lower bound of the earliest time at which the client stops waiting for the outcome of a pending job.
    first_outcome_due: Option<Instant>,
    /// Number of jobs whose outcomes are counted in `backlog_outcomes`: the first ones that were submitted.
    backlog_submits: u64,
    backlog_outcomes: u64,
    /// Submission number of the job whose large outcome was announced last.
    large_outcome: u64,
    /// Request numbers of the jobs to send over another connection, in submission order.
    detached: VecDeque<u64>,
}

/// Pending requests of one connection, and the frames to be written.
pub(crate) struct Requests {
    state: Mutex<State>,
    pub(crate) transport: Transport,
    /// PID of the process that opened the connection. A forked child shares the socket and the memory files, and must
    /// not use them or close the connection.
    owner: u32,
    pub(crate) flush_due: Notify,
    /// Wakes the first submitter that is waiting for space in the outbox. When the connection closes, wakes all
    /// waiting submitters.
    pub(crate) space: Notify,
    idle: Notify,
    /// Notified when `first_outcome_due` becomes earlier.
    outcome_due: Notify,
    /// Notified when the last mapped result has been dropped, or the connection has closed.
    unmapped: Notify,
    /// Notifies the driver that a new connection is needed because the supervisor has sent GOAWAY.
    leaving: Notify,
    frame_bytes_max: u32,
    /// True while a requested lease has not arrived. During this time, the supervisor may send descriptors.
    expects_files: AtomicBool,
    /// Number of reads that returned bytes of large outcomes.
    pub(crate) large_reads: AtomicU64,
    /// Bit mask of the supervisor's [`capability`] values.
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
            outcome_due: Notify::new(),
            unmapped: Notify::new(),
            leaving: Notify::new(),
            frame_bytes_max,
            expects_files: AtomicBool::new(false),
            large_reads: AtomicU64::new(0),
            capabilities,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns false in a forked child. A forked child must not acquire the lock, because the lock can be held by a
    /// thread that exists only in the parent.
    fn is_owner(&self) -> bool {
        self.owner == std::process::id()
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

    /// Adds the caller to the queue of submitters that are waiting for space in the outbox.
    pub(crate) fn queue(self: &Arc<Self>) -> QueuePosition<'_> {
        let mut state = self.lock();
        let is_first = state.queued_submitters == 0;
        state.queued_submitters += 1;
        drop(state);
        QueuePosition { requests: self, is_first }
    }

    /// Sends a job if at most `queued_max` submitters are waiting for space in the outbox. The first job on an idle
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
        let has_files = self.capabilities & capability::MEMORY_FILES != 0;
        if payload_bytes > INLINE_PAYLOAD_BYTES_MAX && has_files && self.is_owner() {
            lease = self.take_lease(&mut state, job, payload_bytes);
        }
        let mut loaded = None;
        if lease.is_some() || job.source.is_some() {
            drop(state);
            let written = match &mut lease {
                Some(lease) => job.fill(lease.payload.first_mut(payload_bytes)).map(|()| None),
                None => job.load(),
            };
            loaded = match written {
                Ok(loaded) => loaded,
                Err(error) => {
                    lease.into_iter().for_each(|lease| self.reuse_lease(*lease));
                    return Err(SubmitError::Rejected(error));
                }
            };
            state = self.lock();
            if lease.is_none() {
                state.check_space(queued_max)?;
            } else if state.phase != Phase::Open {
                return Err(SubmitError::Closed);
            }
        }
        let waiter = Waiter {
            progress: progress.take(),
            lease,
            maps_result: job.maps_result,
            may_have_run: job.losses > 0,
            ..Waiter::default()
        };
        let outcome_due = job.outcome_due();
        let number = state.waiters.insert(std::mem::take(job), waiter, waker);
        if state.push_job(number, loaded, payload_bytes).is_err() {
            let left = state.waiters.remove(number);
            drop(state);
            let message = "the job does not fit in a frame: send a smaller payload".into();
            let rejection = left.as_ref().map(|left| left.request.rejection(RejectReason::TooLarge, message));
            return Err(SubmitError::Rejected(
                rejection.unwrap_or_else(|| unreachable!("the job was inserted")),
            ));
        }
        if let Some(due) = outcome_due
            && state.first_outcome_due.is_none_or(|first| due < first)
        {
            state.first_outcome_due = outcome_due;
            self.outcome_due.notify_one();
        }
        self.schedule_flush(&mut state);
        drop(state);
        Ok(PendingOutcome { requests: Some(self.clone()), number, request: None })
    }

    /// Returns a free lease that fits the job. If there is no such lease, returns `None`, and may request a lease for
    /// later jobs from the supervisor.
    fn take_lease(&self, state: &mut State, job: &JobRequest, bytes: usize) -> Option<Box<Lease>> {
        let has_read_all = || self.transport.has_no_unread_bytes();
        match state.leases.take((&job.bulkhead, &job.options.tenant), bytes, has_read_all) {
            LeaseSearch::Found(lease) => return Some(Box::new(lease)),
            LeaseSearch::TooSmall(lease) => state.push_empty(kind::LEASE_RETURNED, lease.number),
            LeaseSearch::MayBeRevoked => return None,
            LeaseSearch::None => {}
        }
        let number = state.leases.request(&job.bulkhead, &job.options.tenant)?;
        // The flag must be set before the supervisor can send the lease.
        self.expects_files.store(true, Ordering::SeqCst);
        let wanted =
            LeaseRequest { bulkhead: &job.bulkhead, tenant: &job.options.tenant, bytes: bytes as u64 };
        let _ = state.push(kind::LEASE, number, &wanted, &[], Payload::NONE);
        None
    }

    /// Makes a lease available to other jobs, or returns it to the supervisor if the supervisor has recalled it.
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

    /// Reads from the connection without blocking. Also receives descriptors if a requested lease may arrive. Sets
    /// `may_have_more` to true if more bytes may have arrived. A read ends at a message with descriptors, even if this
    /// process has reached its descriptor limit and receives none of them.
    pub(crate) fn receive(&self, buffer: &mut [u8], may_have_more: &mut bool) -> rustix::io::Result<usize> {
        if !self.expects_files.load(Ordering::SeqCst) {
            return self.transport.receive(buffer, None);
        }
        let mut files = Vec::new();
        let count = self.transport.receive(buffer, Some(&mut files))?;
        *may_have_more = count > 0;
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
        let result = match self.is_owner() {
            true => self.transport.flush(outbox, pool),
            false => Err(io::Error::other("the connection belongs to the parent process")),
        };
        if result.is_err() && state.phase != Phase::Closed {
            state.phase = Phase::Broken;
        }
        if state.queued_submitters > 0 && state.has_space() {
            self.space.notify_one();
        }
        result
    }

    /// Writes the queued bytes on behalf of the driver. Returns true if all bytes were written.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut state = self.lock();
        state.is_flush_due = false;
        self.try_flush(&mut state)
    }

    /// Cancels a job whose handle has been dropped.
    fn abandon(&self, number: u64) {
        if !self.is_owner() {
            return;
        }
        let mut state = self.lock();
        let Some(mut left) = state.waiters.remove(number) else { return };
        self.notify_if_idle(&state);
        let is_sent = |waiter: &Waiter| state.phase != Phase::Closed && !waiter.is_detached();
        if let Some(waiter) = left.waiter.take().filter(is_sent) {
            state.push_withdrawal(number, &waiter);
            self.flush_now(&mut state);
        }
        drop(state);
        drop(left);
    }

    /// Asks the supervisor to cancel a job. The caller continues to wait for the outcome.
    fn cancel(&self, number: u64, unless_begun: bool) {
        if !self.is_owner() {
            return;
        }
        let extension: &[u8] = &[];
        let only = unless_begun.then_some((tag::UNLESS_BEGUN, extension));
        let mut state = self.lock();
        if let Some(pending) = state.waiters.cancel_elsewhere(number, unless_begun) {
            // Connections are always locked in the order in which they were opened.
            pending.cancel(unless_begun);
            return;
        }
        let is_known = !unless_begun || self.capabilities & capability::CANCEL_UNLESS_BEGUN != 0;
        let Some(waiter) = state.waiters.get(number) else { return };
        if waiter.is_detached() {
            let ended = state.waiters.end_detached(number, unless_begun);
            self.notify_if_idle(&state);
            drop(state);
            ended.wake();
        } else if is_known {
            waiter.is_cancelled = true;
            // A cancellation always fits in a frame.
            let _ = state.push(kind::CANCEL, number, &Empty, only.as_slice(), Payload::NONE);
            self.flush_now(&mut state);
        }
    }

    /// Writes queued bytes immediately instead of leaving them to the driver. A program often exits soon after it
    /// cancels a job, and the driver then stops as well.
    fn flush_now(&self, state: &mut State) {
        let _ = self.try_flush(state);
        self.schedule_flush(state);
    }

    // Methods that handle outcomes and close the connection.

    /// Ends jobs whose outcomes have not arrived within [`OUTCOME_MARGIN`](crate::reply::OUTCOME_MARGIN) after their
    /// deadlines. Never returns. Does nothing for a supervisor in the same process, because different runtimes can
    /// drive such a connection, but only one runtime can drive a timer.
    pub(crate) async fn end_unanswered(&self) -> ! {
        if matches!(self.transport, Transport::InProcess(_)) {
            std::future::pending::<()>().await;
        }
        loop {
            let first = self.lock().first_outcome_due;
            let Some(first) = first.map(tokio::time::Instant::from_std) else {
                self.outcome_due.notified().await;
                continue;
            };
            let check = first.checked_sub(OUTCOME_CHECK_INTERVAL_MIN).unwrap_or(first);
            tokio::select! {
                () = tokio::time::sleep_until(check) => {}
                () = self.outcome_due.notified() => continue,
            }
            let submits = self.backlog_received().await;
            self.end_unanswered_at(tokio::time::Instant::now().into_std(), submits);
        }
    }

    /// Waits until no outcome of the jobs submitted so far arrives for [`OUTCOME_CHECK_INTERVAL_MIN`], because a slow
    /// client can have a long backlog of outcomes to read. Outcomes of later jobs do not extend the wait. Returns the
    /// number of jobs submitted before the call.
    async fn backlog_received(&self) -> u64 {
        let submits = {
            let mut state = self.lock();
            state.backlog_submits = state.submits;
            state.submits
        };
        let mut before = self.backlog(submits);
        let mut was_paused = false;
        loop {
            let check = tokio::time::Instant::now() + OUTCOME_CHECK_INTERVAL_MIN;
            tokio::time::sleep_until(check).await;
            let is_paused = check.elapsed() > OUTCOME_CHECK_INTERVAL_MIN;
            let backlog = self.backlog(submits);
            let is_silent = backlog == before;
            if is_silent && (was_paused || !is_paused) {
                return submits;
            }
            (before, was_paused) = (backlog, is_silent && is_paused);
        }
    }

    /// Returns the number of outcomes that have arrived for the first `submits` jobs. While a large outcome of one of
    /// these jobs is arriving, also returns the number of reads.
    fn backlog(&self, submits: u64) -> (u64, Option<u64>) {
        let state = self.lock();
        let is_large = state.large_outcome <= submits;
        let reads = is_large.then(|| self.large_reads.load(Ordering::Relaxed));
        (state.backlog_outcomes, reads)
    }

    /// Ends and cancels those of the first `submits` jobs whose outcomes are overdue at `now`. Outcomes of these jobs
    /// that arrive later are ignored.
    fn end_unanswered_at(&self, now: Instant, submits: u64) {
        let mut state = self.lock();
        let mut first = None;
        let (_, ended) = state.waiters.detach(|job| match job {
            Some((waiter, job)) if !waiter.is_detached() => match job.outcome_due() {
                Some(due) if due <= now && waiter.submit_number <= submits => {
                    Decision::Ends(JobError::unanswered())
                }
                due => {
                    first = first.into_iter().chain(due).min();
                    Decision::Stays
                }
            },
            // The time limit for outcomes does not apply to a job that is waiting for another connection.
            _ => Decision::Stays,
        });
        state.first_outcome_due = first.map(|first| first.max(now + OUTCOME_CHECK_INTERVAL_MIN));
        if state.phase != Phase::Closed && !ended.waiters.is_empty() {
            ended.waiters.iter().for_each(|(number, waiter)| state.push_withdrawal(*number, waiter));
            self.flush_now(&mut state);
        }
        self.notify_if_idle(&state);
        drop(state);
        ended.wake();
    }

    /// Notifies the driver if the last job has ended.
    fn notify_if_idle(&self, state: &State) {
        if state.phase != Phase::Open && state.waiters.waiting() == 0 {
            self.idle.notify_one();
        }
    }

    /// Polls for the outcome of a job. Once the outcome has arrived, moves the job to `request` if retries are
    /// enabled for the job.
    #[inline]
    fn poll(
        &self,
        number: u64,
        cx: &Context<'_>,
        request: &mut Option<Box<JobRequest>>,
    ) -> Poll<Polled<PendingOutcome>> {
        // The replaced waker is dropped after the lock is released.
        let mut taken = Taken::default();
        let polled = self.lock().waiters.poll(number, cx, &mut taken);
        if let Some(job) = taken.request.filter(|job| job.retries) {
            *request = Some(Box::new(job));
        }
        polled
    }

    /// Waits until no job is pending, and then at most [`MAPPED_RESULTS_TIMEOUT`] until no mapped result exists. Must
    /// be called only if no further jobs will be submitted.
    pub(crate) async fn idle(&self) {
        loop {
            {
                let mut state = self.lock();
                if state.phase == Phase::Open {
                    state.phase = Phase::Ending;
                }
                if state.waiters.waiting() == 0 {
                    // Passes the notification on to the next task, because several tasks can wait.
                    self.idle.notify_one();
                    break;
                }
            }
            self.idle.notified().await;
        }
        let _ = tokio::time::timeout(MAPPED_RESULTS_TIMEOUT, self.unmapped()).await;
    }

    /// Waits until no mapped result exists or the connection has closed.
    async fn unmapped(&self) {
        loop {
            {
                let state = self.lock();
                if state.mapped_results == 0 || state.phase == Phase::Closed {
                    // Passes the notification on to the next task, because several tasks can wait.
                    self.unmapped.notify_one();
                    return;
                }
            }
            self.unmapped.notified().await;
        }
    }

    /// Closes the connection. If `is_replaced` is true, jobs that can be sent again stay pending, and
    /// [`Requests::move_jobs`] sends them over another connection. All other jobs end with an error.
    pub(crate) fn close(&self, reason: &str, is_replaced: bool) {
        let mut state = self.lock();
        state.phase = Phase::Closed;
        drop(state);
        // Closes the connection explicitly, so that the supervisor notices immediately even if other
        // references to the socket exist.
        if self.is_owner() {
            self.transport.close();
        }
        self.space.notify_waiters();
        self.unmapped.notify_one();
        state = self.lock();
        let sent_bytes = state.pushed_bytes - state.outbox.waiting_bytes() as u64;
        // Releases the queued payloads. The jobs keep their own references.
        let unsent = std::mem::take(&mut state.outbox);
        let ended = state.detach(reason, |waiter, job| {
            if waiter.is_detached() && is_replaced {
                // The job already waits for another connection, because this supervisor is being replaced.
                return Decision::Stays;
            }
            // The supervisor begins a job only after the complete frame has arrived.
            job.lost(waiter.frame_end <= sent_bytes);
            let lost = || JobError::lost(job.executed(), reason);
            if waiter.is_cancelled {
                Decision::Ends(job.cancelled(true).unwrap_or_else(lost))
            } else if is_replaced && job.can_be_sent_again() && !job.is_overdue() {
                Decision::SentAgain
            } else {
                Decision::Ends(lost())
            }
        });
        self.notify_if_idle(&state);
        drop(state);
        drop(unsent);
        ended.wake();
    }

    /// Handles GOAWAY. The supervisor has accepted only the first `taken` jobs, and the other jobs will be sent
    /// over another connection.
    fn go_away(&self, taken: u64) {
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Open | Phase::Ending) {
            return;
        }
        state.phase = Phase::Leaving;
        let (again, ended) = state.waiters.detach(|job| match job {
            Some((waiter, _)) if waiter.is_detached() || waiter.submit_number <= taken => Decision::Stays,
            Some((waiter, job)) => match waiter.is_cancelled.then(|| job.cancelled(false)).flatten() {
                Some(error) => Decision::Ends(error),
                None => {
                    job.not_taken();
                    Decision::SentAgain
                }
            },
            None => Decision::Stays,
        });
        state.detached.extend(again);
        self.notify_if_idle(&state);
        drop(state);
        ended.wake();
        self.space.notify_waiters();
        self.leaving.notify_one();
    }

    /// Waits until the supervisor stops accepting jobs on this connection.
    pub(crate) async fn leaving(&self) {
        self.leaving.notified().await;
    }

    // Methods that move jobs to another connection.

    /// Sends the jobs that were detached from this connection over another one. `place` is the caller's position in
    /// the other connection's queue. Returns true once all of these jobs have been sent or have ended, and false if
    /// the other connection is unusable.
    pub(crate) async fn move_jobs(&self, place: &mut QueuePosition<'_>) -> bool {
        let to = place.requests;
        let mut space = pin!(to.space.notified());
        loop {
            // Registers for notifications before the attempt, so that no notification is missed.
            space.as_mut().enable();
            match self.move_next(place) {
                Moved::One => {
                    // Yields to other tasks on the runtime, because moving a job can involve reading the payload from a
                    // file.
                    tokio::task::coop::consume_budget().await;
                }
                Moved::Full => {
                    space.as_mut().await;
                    space.set(to.space.notified());
                }
                Moved::All => return true,
                Moved::Closed => return false,
            }
        }
    }

    fn move_next(&self, position: &mut QueuePosition<'_>) -> Moved {
        let (number, mut job, mut progress) = {
            let mut state = self.lock();
            loop {
                let Some(number) = state.detached.pop_front() else { return Moved::All };
                // A job whose handle has been dropped is skipped.
                if let Some((job, progress)) = state.waiters.begin_move(number) {
                    break (number, job, progress);
                }
            }
        };
        let may_have_run = job.losses > 0;
        let corrected = |error: JobError| if may_have_run { error.after_loss() } else { error };
        let sent = match job.update_remaining() {
            Ok(()) => position.submit(&mut job, &mut progress),
            Err(error) => Err(SubmitError::Rejected(error)),
        };
        let (moved, result) = match sent {
            Ok(pending) => (Move::Sent(pending), Moved::One),
            Err(SubmitError::Rejected(error)) => (Move::Ended(corrected(error)), Moved::One),
            Err(SubmitError::Full) => (Move::PutBack(Box::new(job), progress), Moved::Full),
            Err(SubmitError::Closed) => (Move::PutBack(Box::new(job), progress), Moved::Closed),
        };
        let mut state = self.lock();
        if matches!(moved, Move::PutBack(..)) {
            state.detached.push_front(number);
        }
        let end = state.waiters.end_move(number, moved);
        if let Some(unless_begun) = end.cancel
            && let Some(sent) = state.waiters.cancel_elsewhere(number, unless_begun)
        {
            sent.cancel(unless_begun);
        }
        self.notify_if_idle(&state);
        drop(state);
        if let Some(waker) = end.waker {
            waker.wake();
        }
        result
    }

    /// Returns true if any job has no outcome and has not been sent over another connection.
    pub(crate) fn has_pending_jobs(&self) -> bool {
        self.lock().waiters.waiting() > 0
    }

    /// Returns true if any job is still waiting to be sent over another connection.
    pub(crate) fn has_detached_jobs(&self) -> bool {
        !self.lock().detached.is_empty()
    }

    /// Returns the earliest time at which a job stops waiting for another connection.
    pub(crate) fn first_wait_ends(&self) -> Option<Instant> {
        let mut state = self.lock();
        let State { waiters, detached, .. } = &mut *state;
        let ends = |number: &u64| waiters.get_with_request(*number).and_then(|(_, job)| job.waits_until);
        detached.iter().filter_map(ends).min()
    }

    /// Ends the jobs that have waited too long for another connection. `problem` says why there is no connection.
    pub(crate) fn end_overdue(&self, problem: &str) {
        let mut state = self.lock();
        let (_, ended) = state.waiters.detach(|job| match job {
            Some((waiter, job)) if waiter.is_detached() && job.is_overdue() => {
                Decision::Ends(job.not_reconnected(problem))
            }
            // All other jobs are kept, including jobs whose outcomes are being processed.
            _ => Decision::Stays,
        });
        self.notify_if_idle(&state);
        drop(state);
        ended.wake();
    }
}

/// Result of trying to send the next job over another connection.
enum Moved {
    One,
    All,
    /// The other connection has no space at the moment.
    Full,
    /// The other connection is unusable.
    Closed,
}

/// Position of a submitter in the queue for space in the outbox. Dropping the position wakes the next submitter if
/// there is space in the outbox.
pub(crate) struct QueuePosition<'r> {
    requests: &'r Arc<Requests>,
    /// True if the queue was empty when this submitter joined it. Of several submitters that join at the same time,
    /// exactly one is first; otherwise each would wait for the others.
    is_first: bool,
}

impl QueuePosition<'_> {
    /// Tries to send a job. The first call fails if other submitters were already in the queue when this submitter
    /// joined it. Later calls, which are made after `Requests::space` has woken the caller, ignore the length of the
    /// queue.
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
        if !self.is_owner() {
            return;
        }
        self.reuse_lease(lease);
        let mut state = self.lock();
        state.mapped_results -= 1;
        if state.mapped_results == 0 {
            self.unmapped.notify_one();
        }
    }
}

impl State {
    /// Decides which pending jobs to send again, and adds their numbers to `detached`.
    fn detach(
        &mut self,
        problem: &str,
        mut decide: impl FnMut(&mut Waiter, &mut JobRequest) -> Decision,
    ) -> Ended {
        let (again, ended) = self.waiters.detach(|job| match job {
            Some((waiter, job)) => decide(waiter, job),
            // The outcome could not be processed, because the supervisor violated the protocol.
            None => Decision::Ends(JobError::lost(Executed::Unknown, problem)),
        });
        self.detached.extend(again);
        ended
    }

    fn check_space(&self, queued_max: usize) -> Result<(), SubmitError> {
        match self.phase {
            Phase::Open => {}
            Phase::Ending | Phase::Leaving | Phase::Broken | Phase::Closed => {
                return Err(SubmitError::Closed);
            }
        }
        if self.queued_submitters > queued_max || !self.has_space() { Err(SubmitError::Full) } else { Ok(()) }
    }

    /// Queues an empty frame with the given kind and number.
    fn push_empty(&mut self, kind: u8, number: u64) {
        // An empty message always fits in a frame.
        let _ = self.push(kind, number, &Empty, &[], Payload::NONE);
    }

    /// Queues the cancellation of a job whose outcome will be ignored, followed by the return of the job's lease. The
    /// lease must not be returned before the cancellation.
    fn push_withdrawal(&mut self, number: u64, waiter: &Waiter) {
        self.push_empty(kind::CANCEL, number);
        if let Some(lease) = &waiter.lease {
            self.leases.forget(lease.number);
            self.push_empty(kind::LEASE_RETURNED, lease.number);
        }
    }

    fn has_space(&self) -> bool {
        self.outbox.waiting_bytes() < OUTBOX_BYTES_MAX
    }

    /// Queues a frame and adds the size of the frame to `pushed_bytes`.
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

    /// Queues the frame of a job. `loaded` is the payload if it was read from its source. If the job has a lease, the
    /// payload is in a memory file and not in the frame.
    fn push_job(
        &mut self,
        number: u64,
        loaded: Option<Vec<u8>>,
        payload_bytes: usize,
    ) -> Result<(), codec::CodecError> {
        let Self { waiters, outbox, pool, pushed_bytes, .. } = self;
        let Some((waiter, job)) = waiters.get_with_request(number) else { return Ok(()) };
        let lease_ref = waiter.lease.as_ref().map(|lease| lease.number);
        let lease_ref = lease_ref.map(|lease| LeaseRef { lease, bytes: payload_bytes as u64 }.to_bytes());
        let limit = job.options.run_limit.map(encode_run_limit);
        let payload = match loaded {
            _ if lease_ref.is_some() => Payload::NONE,
            // `Payload::Owned` avoids a copy of large payloads.
            Some(loaded) => Payload::Owned(loaded),
            None => job.payload.share(),
        };
        let submit = Submit::new(&job.bulkhead, &job.options);
        let trace = job.traceparent.as_ref().map(|text| (tag::TRACEPARENT, text.as_bytes()));
        let lease_ref = lease_ref.as_ref().map(|lease_ref| (tag::LEASE, &lease_ref[..]));
        let limit = limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
        let (mut given, mut count) = ([(0, &[][..]); 3], 0);
        for extension in [lease_ref, limit, trace].into_iter().flatten() {
            given[count] = extension;
            count += 1;
        }
        let before = outbox.waiting_bytes();
        outbox.push_pooled(kind::SUBMIT, number, &submit, &given[..count], payload, pool)?;
        *pushed_bytes += (outbox.waiting_bytes() - before) as u64;
        waiter.frame_end = *pushed_bytes;
        self.submits += 1;
        waiter.submit_number = self.submits;
        Ok(())
    }
}

/// The pending outcome of a job. If this value is dropped before the outcome has arrived, the job is cancelled.
#[derive(Debug)]
pub(crate) struct PendingOutcome {
    requests: Option<Arc<Requests>>,
    pub(crate) number: u64,
    /// The job to retry. Set when the outcome is taken, if retries are enabled for the job.
    request: Option<Box<JobRequest>>,
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
        loop {
            let Some(requests) = &self.requests else {
                return Poll::Ready(Err(JobError::lost(Executed::Unknown, "the outcome was already taken")));
            };
            let polled = match requests.poll(self.number, cx, &mut self.request) {
                Poll::Ready(polled) => polled,
                Poll::Pending => return Poll::Pending,
            };
            self.requests = None;
            match polled {
                Polled::Outcome(result) => return Poll::Ready(result),
                Polled::Moved(pending) => *self = pending,
                Polled::Missing => {}
            }
        }
    }

    /// Removes and returns the job, if retries are enabled for the job. Must be called after the outcome has been
    /// taken.
    pub(crate) fn take_request(&mut self) -> Option<Box<JobRequest>> {
        self.request.take()
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
    use bulkhead_shared::connection::{Inbox, Item, Scratch};
    use bulkhead_shared::frame::Header;
    use bulkhead_shared::in_process::{self, Endpoint};

    use super::*;
    use crate::reply::OUTCOME_MARGIN;

    /// Creates a [`Requests`] value for an in-process connection.
    fn in_memory() -> (Arc<Requests>, Endpoint) {
        let (here, there) = in_process::pair();
        (Arc::new(Requests::new(Transport::InProcess(here), 1 << 20, 0)), there)
    }

    fn header(kind: u8, number: u64, metadata: &[u8]) -> Header {
        let length = metadata.len() as u32;
        Header { length, kind, flags: 0, metadata_length: length as u16, number }
    }

    /// A waker that drops a pending job when called.
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

    /// Simulates several threads that submit jobs when a connection becomes available.
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
        requests.close(&reason, false);
        let result = pending.poll(&Context::from_waker(Waker::noop()));
        let Poll::Ready(Err(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.executed(), Executed::Unknown, "{error}");
        assert_eq!(requests.lock().waiters.waiting(), 0);
    }

    /// If overdue jobs were sent again, a job that breaks every connection would be sent forever.
    #[test]
    fn incompletely_sent_overdue_job_is_not_sent_again() {
        for is_overdue in [false, true] {
            let (here, _there) = in_process::pair();
            let requests = Arc::new(Requests::new(Transport::InProcess(here), 4 << 20, 0));
            let mut job = JobRequest::new("resize".into(), vec![0; 2 << 20]);
            job.waits_until = is_overdue.then(Instant::now);
            let Ok(mut pending) = requests.submit(&mut job, &mut None, None) else {
                panic!("the job was not sent")
            };
            assert!(requests.lock().outbox.waiting_bytes() > 0, "the job is not sent completely");
            requests.close("the supervisor closed the connection", true);
            match pending.poll(&Context::from_waker(Waker::noop())) {
                Poll::Pending => assert!(!is_overdue),
                Poll::Ready(Err(error)) => {
                    assert!(is_overdue, "{error}");
                    assert_eq!(error.executed(), Executed::No, "{error}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn job_returned_by_goaway_gets_a_new_wait_limit() {
        let (requests, _there) = in_memory();
        let mut job = JobRequest::new("resize".into(), b"picture".to_vec());
        job.waits_until = Some(Instant::now());
        job.reconnect_timeout = Some(Duration::from_secs(3600));
        let Ok(mut pending) = requests.submit(&mut job, &mut None, None) else {
            panic!("the job was not sent")
        };
        requests.go_away(0);
        requests.end_overdue("the supervisor is being replaced");
        let polled = pending.poll(&Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "{polled:?}");
    }

    /// Creates a [`Requests`] value with a free lease for payloads of `bytes` bytes.
    fn with_lease(bytes: usize) -> (Arc<Requests>, Endpoint, LeaseRef) {
        let (here, there) = in_process::pair();
        let transport = Transport::InProcess(here);
        let requests = Arc::new(Requests::new(transport, 1 << 20, capability::MEMORY_FILES));
        let file = || {
            let file = rustix::fs::memfd_create("lease", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, bytes as u64).unwrap();
            // Clears the permission bits, which would mark the file as revoked.
            rustix::fs::fchmod(&file, rustix::fs::Mode::empty()).unwrap();
            file
        };
        let mut state = requests.lock();
        let request = state.leases.request("resize", "").unwrap();
        state.leases.received_files = vec![file(), file()];
        let lease_ref = LeaseRef { lease: 7, bytes: bytes as u64 };
        assert_eq!(state.leases.receive(request, lease_ref), Some(true));
        drop(state);
        (requests, there, lease_ref)
    }

    /// A late outcome of the job is ignored, even if the result is in a file that the client has already returned.
    #[test]
    fn unanswered_job_is_cancelled_and_forgotten() {
        let bytes = 2 * INLINE_PAYLOAD_BYTES_MAX;
        let (requests, there, lease_ref) = with_lease(bytes);
        let submit = |job: &mut JobRequest| {
            job.begin();
            requests.submit(job, &mut None, None).unwrap_or_else(|_| panic!("the job was not sent"))
        };
        let mut limited = JobRequest::new("resize".into(), vec![0; bytes]);
        limited.options.deadline = Some(Duration::from_secs(1));
        let mut limited = submit(&mut limited);
        let mut unlimited = submit(&mut JobRequest::new("resize".into(), b"picture".to_vec()));
        let due = requests.lock().first_outcome_due.unwrap();
        assert!(due - Instant::now() > OUTCOME_MARGIN, "the supervisor has time to report a missed deadline");
        let cx = &Context::from_waker(Waker::noop());
        requests.end_unanswered_at(due - Duration::from_millis(1), 2);
        assert!(limited.poll(cx).is_pending());
        requests.end_unanswered_at(due, 2);
        let Poll::Ready(Err(error)) = limited.poll(cx) else { panic!("the job still waits") };
        assert!(matches!(error, JobError::Disconnected { executed: Executed::Unknown, .. }), "{error}");
        assert!(!error.is_retryable());

        let (mut inbox, mut scratch) = (Inbox::default(), Scratch::with_read_bytes(4096));
        let (_, mut batch) =
            inbox.receive_by(&mut scratch, |buffer| there.read(buffer, &mut Vec::new())).unwrap();
        let mut frames = Vec::new();
        while let Some(Item::Frame { header, .. }) = batch.next().unwrap() {
            frames.push((header.kind, header.number));
        }
        let last = frames.len().saturating_sub(2);
        let expected = [(kind::CANCEL, limited.number), (kind::LEASE_RETURNED, lease_ref.lease)];
        assert_eq!(frames[last..], expected, "{frames:?}");

        let message = OutcomeMessage::from_verdict(&Verdict::Ok, "resize");
        let mut metadata = Vec::new();
        codec::encode(&message, &[(tag::LEASE, &lease_ref.to_bytes())], &mut metadata).unwrap();
        let header = header(kind::OUTCOME, limited.number, &metadata);
        Frames::new(&requests).handle(header, &metadata, Vec::new()).unwrap();
        assert!(unlimited.poll(cx).is_pending());
        assert_eq!(requests.lock().first_outcome_due, None);
    }

    /// If the client closed the connection while a mapped result exists, the supervisor would revoke the result.
    #[tokio::test]
    async fn connection_is_in_use_until_mapped_results_are_dropped() {
        let bytes = 2 * INLINE_PAYLOAD_BYTES_MAX;
        let (requests, _there, lease_ref) = with_lease(bytes);
        let mut job = JobRequest::new("resize".into(), vec![0; bytes]);
        job.maps_result = true;
        let Ok(mut pending) = requests.submit(&mut job, &mut None, None) else {
            panic!("the job was not sent")
        };
        let message = OutcomeMessage::from_verdict(&Verdict::Ok, "resize");
        let mut metadata = Vec::new();
        codec::encode(&message, &[(tag::LEASE, &lease_ref.to_bytes())], &mut metadata).unwrap();
        let header = header(kind::OUTCOME, pending.number, &metadata);
        Frames::new(&requests).handle(header, &metadata, Vec::new()).unwrap();
        let cx = &mut Context::from_waker(Waker::noop());
        let Poll::Ready(Ok(reply)) = pending.poll(cx) else { panic!("the job has no result") };
        assert!(reply.mapped().is_some());
        let mut idle = pin!(requests.idle());
        assert!(idle.as_mut().poll(cx).is_pending());
        drop(reply);
        assert!(idle.as_mut().poll(cx).is_ready());
    }

    /// Creates a [`Requests`] value that belongs to the parent of this process.
    fn inherited() -> (Requests, std::os::unix::net::UnixStream) {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let transport = Transport::Socket(tokio::net::UnixStream::from_std(here).unwrap());
        let mut requests = Requests::new(transport, 1 << 20, 0);
        requests.owner = std::process::id() + 1;
        (requests, there)
    }

    /// Frames from a forked child would corrupt its parent's byte stream and cancel its parent's jobs.
    #[tokio::test]
    async fn forked_child_writes_nothing_to_parents_connection() {
        let (requests, mut there) = inherited();
        let requests = Arc::new(requests);
        let is_unused = |there: &mut std::os::unix::net::UnixStream| {
            there.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        };
        let mut job = JobRequest::new("resize".into(), b"picture".to_vec());
        let Ok(pending) = requests.submit(&mut job, &mut None, None) else { panic!("the job is rejected") };
        assert!(is_unused(&mut there));
        // A lock that another thread of the parent held at the time of the fork is never released in the child.
        let held = requests.lock();
        pending.cancel(false);
        drop(pending);
        drop(held);
        assert!(is_unused(&mut there));
    }

    /// A forked child shares its parent's socket and must not close the connection.
    #[tokio::test]
    async fn forked_child_leaves_parents_connection_open() {
        let (mut requests, mut there) = inherited();
        requests.close("the child has ended", false);
        let open = there.read(&mut [0]).unwrap_err();
        assert_eq!(open.kind(), std::io::ErrorKind::WouldBlock, "the parent's connection stays open");
        requests.owner = std::process::id();
        requests.close("the parent has ended", true);
        assert_eq!(there.read(&mut [0]).unwrap(), 0);
    }
}

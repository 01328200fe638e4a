//! Samples the stacks of workers on separate threads, so that the keeper can serve other workers in the meantime.
//!
//! Only one thread runs at a time. It exits after each sample, because the kernel then resumes all threads of the
//! worker that are still stopped. While the thread runs, the keeper does not reap orphans, because the kernel reports
//! stopped threads in the same way as dead children.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Poll, Token, Waker};
use nix::errno::Errno;

use super::{EventLoop, SAMPLED};
use crate::protocol::ReportMessage;
use crate::sample::{ProcessStart, SAMPLE_TIMEOUT, SampleRequest};

/// Maximum number of workers waiting to be sampled.
const WAITING_MAX: usize = 16;

/// Time after which the keeper resumes reaping orphans even if the sampling thread is still running. A hostile process
/// can block this thread until the process dies.
const BUSY_MAX: Duration = SAMPLE_TIMEOUT.saturating_add(Duration::from_millis(5));

/// Period after a sample in which the keeper assumes that any stopped thread was stopped by the sampling thread.
const LATE_STOP_TIME: Duration = Duration::from_millis(500);

/// Stack size of the sampling thread, in bytes.
const THREAD_STACK_BYTES: usize = 256 * 1024;

/// Current and pending samples.
pub(super) struct Samples {
    waker: Arc<Waker>,
    waiting: VecDeque<Order>,
    current: Option<Current>,
    /// Time at which the last sample ended.
    ended_at: Option<Instant>,
}

struct Order {
    worker: u64,
    job: Option<String>,
    /// File for the records. If the worker writes its stacks as text, also the worker's journal.
    descriptors: Vec<OwnedFd>,
}

struct Current {
    worker: u64,
    since: Instant,
    has_ended: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), Errno>>,
}

impl Samples {
    pub(super) fn new(poll: &Poll) -> io::Result<Self> {
        let waker = Arc::new(Waker::new(poll.registry(), Token(SAMPLED))?);
        Ok(Self { waker, waiting: VecDeque::new(), current: None, ended_at: None })
    }

    /// Returns true if a stopped thread might have been stopped for a sample instead of at its own request. This is
    /// possible even after the sampling thread has exited, because threads can stop late.
    pub(super) fn may_have_stopped(&self, now: Instant) -> bool {
        self.current.is_some() || self.ended_at.is_some_and(|end| now < end + LATE_STOP_TIME)
    }

    /// Returns true if a sample might be in progress. Waiting for children could then return a thread that was stopped
    /// for the sample.
    pub(super) fn is_busy(&self, now: Instant) -> bool {
        self.next_due(now).is_some()
    }

    /// Returns the time at which the keeper stops waiting for the sampling thread and resumes reaping orphans.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        self.current.as_ref().map(|current| current.since + BUSY_MAX).filter(|due| *due > now)
    }
}

impl EventLoop {
    /// Adds a worker to the queue for sampling. If the queue is full, reports an error.
    pub(super) fn sample(&mut self, worker: u64, job: Option<&str>, descriptors: Vec<OwnedFd>) {
        if self.samples.waiting.len() >= WAITING_MAX {
            return self.report_sample(worker, Err(Errno::EBUSY));
        }
        self.samples.waiting.push_back(Order { worker, job: job.map(str::to_owned), descriptors });
    }

    /// Reports the current sample if it is complete, and starts the next one.
    pub(super) fn advance_samples(&mut self) {
        let has_ended = |current: &mut Current| current.has_ended.load(Ordering::Acquire);
        if let Some(current) = self.samples.current.take_if(has_ended) {
            // A panic is reported as a failed sample.
            let result = current.thread.join().unwrap_or(Err(Errno::EIO));
            self.samples.ended_at = Some(Instant::now());
            self.report_sample(current.worker, result);
        }
        while self.samples.current.is_none()
            && let Some(order) = self.samples.waiting.pop_front()
        {
            let worker = order.worker;
            match self.start_sample(order) {
                Ok(current) => self.samples.current = Some(current),
                Err(errno) => self.report_sample(worker, Err(errno)),
            }
        }
    }

    fn start_sample(&self, order: Order) -> Result<Current, Errno> {
        let Order { worker, job, descriptors } = order;
        let child = self.by_worker.get(&worker).and_then(|pid| self.children.get(pid));
        let process = child.and_then(|child| ProcessStart::of(child.process)).ok_or(Errno::ESRCH)?;
        let mut descriptors = descriptors.into_iter();
        let (file, text) = (descriptors.next().ok_or(Errno::EBADF)?, descriptors.next());
        let request = SampleRequest { process, job, file, text };
        let has_ended = Arc::new(AtomicBool::new(false));
        let end = End { has_ended: has_ended.clone(), waker: self.samples.waker.clone() };
        let builder = std::thread::Builder::new().name("sampler".into()).stack_size(THREAD_STACK_BYTES);
        let thread = builder.spawn(move || {
            let _end = end;
            request.take()
        });
        let thread = thread.map_err(|_| Errno::EAGAIN)?;
        Ok(Current { worker, since: Instant::now(), has_ended, thread })
    }

    fn report_sample(&mut self, worker: u64, result: Result<(), Errno>) {
        let errno = result.map_or_else(|errno| errno as i32, |()| 0);
        self.report(&ReportMessage::Sampled { worker, errno }, None);
    }
}

/// Wakes the keeper's loop when the sampling thread exits, even after a panic.
struct End {
    has_ended: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Release);
        // Fails only if the loop has exited.
        let _ = self.waker.wake();
    }
}

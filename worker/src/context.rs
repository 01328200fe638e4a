//! Defines the types that a handler uses. [`Job`] holds the payload, and [`Ctx`] provides the metadata, cancellation
//! and progress reports. [`StartCtx`] is for the init function. `pool` creates these values and sends the results, and
//! the supervisor enforces the deadlines.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bulkhead_shared::JobId;
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::{MESSAGE_BYTES_MAX, truncate};
use bulkhead_shared::template_protocol::{TEXT_BYTES_MAX, TemplateMessage};
use bulkhead_shared::worker_protocol::{Extend, Status};
use rustix::event::{EventfdFlags, eventfd};

use crate::files::{Loan, MappedPayload, ResultInPlace};
use crate::link::Writer;
use crate::ownership;
use crate::progress::Progress;
use crate::template::Template;

/// A job, as passed to a handler.
pub struct Job {
    pub(crate) payload: Vec<u8>,
    /// Memory files of the job, if the client sent the payload in a memory file.
    pub(crate) loan: Option<Box<Loan>>,
}

impl Job {
    /// Returns the payload exactly as the client sent it. A payload in a memory file is copied on the first call.
    pub fn payload(&self) -> &[u8] {
        self.loan.as_ref().map_or(&self.payload, |loan| loan.copy())
    }

    /// Returns the payload in its memory file, without copying it. The client can modify the payload while
    /// the handler reads it.
    ///
    /// Returns `None` if the payload was sent over the socket. Whether the payload is in a memory file
    /// depends on the client, the payload size and the worker that runs the job.
    pub fn mapped_payload(&self) -> Option<MappedPayload<'_>> {
        self.loan.as_deref().map(MappedPayload)
    }

    /// Returns a buffer for a result of `bytes` bytes in a memory file that the client reads. The initial
    /// contents of the buffer are unspecified.
    ///
    /// Returns `None` if `bytes` is 0, if the job has no [mapped payload](Self::mapped_payload), or if the
    /// result does not fit. A result as large as the payload always fits.
    ///
    /// ```no_run
    /// use bulkhead_worker::{HandlerError, Job};
    ///
    /// fn invert(job: &Job) -> Result<Vec<u8>, HandlerError> {
    ///     let invert = |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| *byte = !*byte);
    ///     if let (Some(payload), Some(mut result)) =
    ///         (job.mapped_payload(), job.mapped_payload().and_then(|p| job.result_in_place(p.len())))
    ///     {
    ///         payload.read(0, &mut result);
    ///         invert(&mut result);
    ///         result.finish();
    ///         return Ok(Vec::new());
    ///     }
    ///     let mut result = job.payload().to_vec();
    ///     invert(&mut result);
    ///     Ok(result)
    /// }
    /// ```
    pub fn result_in_place(&self, bytes: usize) -> Option<ResultInPlace<'_>> {
        ResultInPlace::new(self.loan.as_deref()?, bytes)
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.loan.as_ref().map_or(self.payload.len(), |loan| loan.bytes());
        write!(f, "Job({bytes} bytes)")
    }
}

/// Cancellation flag and progress of a running job, shared between threads.
#[derive(Default)]
pub(crate) struct Handle {
    cancelled: AtomicBool,
    /// Descriptor that becomes readable on cancellation. Created when a handler first requests it.
    event: OnceLock<OwnedFd>,
    /// State of the job's progress reports, created when the handler first reports progress.
    pub(crate) progress: OnceLock<Box<Progress>>,
    #[cfg(feature = "tokio")]
    notify: tokio::sync::Notify,
}

impl Handle {
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.signal_event();
        #[cfg(feature = "tokio")]
        self.notify.notify_waiters();
    }

    #[cfg(feature = "tokio")]
    pub(crate) async fn cancelled(&self) {
        // Created before the check, because a `Notified` receives every notification sent after its creation,
        // even before its first poll.
        let notified = self.notify.notified();
        if !self.is_cancelled() {
            notified.await;
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    fn signal_event(&self) {
        if let Some(event) = self.event.get() {
            // A write fails only if the counter is full, in which case the descriptor is already readable.
            let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
        }
    }
}

/// Metadata of a job.
pub(crate) struct JobMetadata {
    pub(crate) number: u64,
    pub(crate) operation: Box<str>,
    pub(crate) tenant: Box<str>,
    pub(crate) traceparent: Option<Box<str>>,
    pub(crate) deadline: Instant,
    pub(crate) handle: Arc<Handle>,
}

/// The context of a job: operation, tenant, deadline, and the state that [`crate::Server::init`] created.
pub struct Ctx<S = ()> {
    // Replaced for each job. The other fields are the same for all jobs on a thread.
    pub(crate) metadata: JobMetadata,
    pub(crate) result_bytes_max: u64,
    pub(crate) writer: Arc<Writer>,
    pub(crate) state: Arc<S>,
}

impl<S> Ctx<S> {
    /// Returns the operation that the client requested, or an empty string if there is none.
    pub fn operation(&self) -> &str {
        &self.metadata.operation
    }

    /// Returns the job's tenant, or an empty string if the client set no tenant.
    pub fn tenant(&self) -> &str {
        &self.metadata.tenant
    }

    /// Returns the W3C `traceparent` of the job, if the client sent one.
    pub fn traceparent(&self) -> Option<&str> {
        self.metadata.traceparent.as_deref()
    }

    /// Returns the job ID as a number. Outcomes, events, logs and crash reports contain this number in
    /// hexadecimal, which is the format in which [`id`](Self::id) prints it.
    pub fn number(&self) -> u64 {
        self.metadata.number
    }

    /// Returns the job ID. `Display` prints the ID in hexadecimal, as in events and logs.
    pub fn id(&self) -> JobId {
        JobId(self.metadata.number)
    }

    /// Returns the deadline of the job. When the deadline passes, the client receives the outcome `deadline_exceeded`.
    pub fn deadline(&self) -> Instant {
        self.metadata.deadline
    }

    /// Returns the time left until the deadline, or zero if the deadline has passed.
    pub fn remaining(&self) -> Duration {
        self.metadata.deadline.saturating_duration_since(Instant::now())
    }

    /// Returns the maximum size of the job's result, in bytes.
    pub fn result_bytes_max(&self) -> u64 {
        self.result_bytes_max
    }

    /// Returns true if no client is waiting for the result any more. A handler that checks this regularly and
    /// returns early prevents the supervisor from killing the worker.
    pub fn is_cancelled(&self) -> bool {
        self.metadata.handle.is_cancelled()
    }

    /// Returns a descriptor that becomes readable when the job is cancelled, for handlers that wait in `poll(2)`. Fails
    /// if `eventfd(2)` fails.
    pub fn cancellation(&self) -> std::io::Result<BorrowedFd<'_>> {
        if self.metadata.handle.event.get().is_none() {
            let fresh = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let _ = self.metadata.handle.event.set(fresh);
            if self.is_cancelled() {
                self.metadata.handle.signal_event();
            }
        }
        let event = self
            .metadata
            .handle
            .event
            .get()
            .ok_or_else(|| std::io::Error::other("the cancellation descriptor was not created"))?;
        Ok(event.as_fd())
    }

    /// Returns the state that [`crate::Server::init`] created.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// Reports progress to the client: `fraction` from 0 to 1, and a short text. Handlers can call this at
    /// any rate. The client gets at most ten reports per second, and always the last report before the
    /// result. Has no effect in a process that the handler forked.
    pub fn progress(&self, fraction: f32, text: &str) {
        if !ownership::is_worker() {
            return;
        }
        let progress = self.metadata.handle.progress.get_or_init(Box::default);
        progress.report(&self.writer, self.metadata.number, fraction, truncate(text, MESSAGE_BYTES_MAX));
    }
}

/// Context of the init function that is set with [`crate::Server::init`].
pub struct StartCtx {
    pub(crate) to: StatusReceiver,
}

/// Recipient of a starting process's status messages and requests for more time.
pub(crate) enum StatusReceiver {
    /// The supervisor, which receives messages from a worker.
    Supervisor(Arc<Writer>),
    /// The keeper, which receives messages from a template.
    Keeper(Arc<Template>),
}

impl StartCtx {
    /// Extends the time limit for the start. The process must be ready within `more` from now. Each call can
    /// request at most `start.ready`.
    pub fn extend(&self, more: Duration) {
        let more_ms = u32::try_from(more.as_millis()).unwrap_or(u32::MAX);
        match &self.to {
            StatusReceiver::Supervisor(writer) => writer.send(kind::EXTEND_START, 0, &Extend { more_ms }),
            StatusReceiver::Keeper(template) => template.report(TemplateMessage::Extend(more_ms)),
        }
    }

    /// Reports the current activity of this process to operators.
    pub fn status(&self, text: &str) {
        let text = truncate(text, MESSAGE_BYTES_MAX);
        match &self.to {
            StatusReceiver::Supervisor(writer) => writer.send(kind::STATUS, 0, &Status { text }),
            StatusReceiver::Keeper(template) => {
                template.report(TemplateMessage::Status(truncate(text, TEXT_BYTES_MAX)))
            }
        }
    }
}

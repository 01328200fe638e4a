//! What a handler sees: the job, and its surroundings.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bulkhead_shared::JobId;
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::{MESSAGE_BYTES_MAX, cut};
use bulkhead_shared::template_protocol::{TEXT_BYTES_MAX, Word};
use bulkhead_shared::worker_protocol::{Extend, Status};
use rustix::event::{EventfdFlags, eventfd};

use crate::files::{Leased, MappedPayload, ResultInPlace};
use crate::link::Writer;
use crate::ownership;
use crate::progress::Progress;
use crate::template::Template;

/// One job, as handed to a handler.
pub struct Job {
    pub(crate) payload: Vec<u8>,
    /// If it is in a file.
    pub(crate) leased: Option<Box<Leased>>,
}

impl Job {
    /// The bytes that the client sent.
    pub fn payload(&self) -> &[u8] {
        self.leased.as_ref().map_or(&self.payload, |leased| leased.copy())
    }

    /// The same where they stand, without a copy, if that is in a memory file: the client may change them meanwhile.
    /// Whether it is depends on the client, on the size, and on which worker has the job.
    pub fn mapped_payload(&self) -> Option<MappedPayload<'_>> {
        self.leased.as_deref().map(MappedPayload)
    }

    /// Room for a result of so many bytes where the client reads it, if there is some: only for jobs with a
    /// [mapped payload](Self::mapped_payload), up to about its size. What it holds is of no meaning.
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
        ResultInPlace::new(self.leased.as_deref()?, bytes)
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.leased.as_ref().map_or(self.payload.len(), |leased| leased.bytes());
        write!(f, "Job({bytes} bytes)")
    }
}

/// How others reach a job that runs.
#[derive(Default)]
pub(crate) struct Handle {
    cancelled: AtomicBool,
    /// Made only for handlers that wait for the cancellation.
    event: OnceLock<OwnedFd>,
    /// Made only for handlers that report progress.
    pub(crate) progress: OnceLock<Box<Progress>>,
    #[cfg(feature = "tokio")]
    notify: tokio::sync::Notify,
}

impl Handle {
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.ring();
        #[cfg(feature = "tokio")]
        self.notify.notify_waiters();
    }

    #[cfg(feature = "tokio")]
    pub(crate) async fn cancelled(&self) {
        // A waiter that has asked for a notification before it is sent gets it.
        let notified = self.notify.notified();
        if !self.is_cancelled() {
            notified.await;
        }
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    fn ring(&self) {
        if let Some(event) = self.event.get() {
            // A counter that is full rings as well.
            let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
        }
    }
}

/// What was said of a job beside its payload.
pub(crate) struct Order {
    pub(crate) number: u64,
    pub(crate) operation: Box<str>,
    pub(crate) tenant: Box<str>,
    pub(crate) traceparent: Option<Box<str>>,
    pub(crate) deadline: Instant,
    pub(crate) handle: Arc<Handle>,
}

/// The surroundings of a job: what is asked for, for which tenant, until when, and what [`crate::Server::init`] made.
pub struct Ctx<S = ()> {
    // Changes from job to job; a thread keeps the rest.
    pub(crate) order: Order,
    pub(crate) result_bytes_max: u64,
    pub(crate) writer: Arc<Writer>,
    pub(crate) state: Arc<S>,
}

impl<S> Ctx<S> {
    /// What the client wants done; empty if it did not say.
    pub fn operation(&self) -> &str {
        &self.order.operation
    }

    /// The tenant; empty if the client did not say.
    pub fn tenant(&self) -> &str {
        &self.order.tenant
    }

    /// The W3C `traceparent` that the client sent along, if it did.
    pub fn traceparent(&self) -> Option<&str> {
        self.order.traceparent.as_deref()
    }

    /// The number under which outcomes, events, logs and crash reports know the job. They write it as [`id`](Self::id)
    /// does, in hexadecimal digits.
    pub fn number(&self) -> u64 {
        self.order.number
    }

    /// The same, to be written in the one notation of all: `format!("job {}", ctx.id())`.
    pub fn id(&self) -> JobId {
        JobId(self.order.number)
    }

    /// When the client is told that it took too long.
    pub fn deadline(&self) -> Instant {
        self.order.deadline
    }

    /// The time until then; zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.order.deadline.saturating_duration_since(Instant::now())
    }

    /// The largest result that will be taken, in bytes.
    pub fn result_bytes_max(&self) -> u64 {
        self.result_bytes_max
    }

    /// Whether no client waits for the result any more. A handler that looks now and then, and returns, is
    /// spared from being killed.
    pub fn is_cancelled(&self) -> bool {
        self.order.handle.is_cancelled()
    }

    /// A descriptor that becomes readable when the job is cancelled, for handlers that wait in `poll(2)`.
    /// Errors are those of `eventfd(2)`.
    pub fn cancellation(&self) -> std::io::Result<BorrowedFd<'_>> {
        if self.order.handle.event.get().is_none() {
            let fresh = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let _ = self.order.handle.event.set(fresh);
            if self.is_cancelled() {
                self.order.handle.ring();
            }
        }
        let event = self.order.handle.event.get().ok_or_else(|| std::io::Error::other("no event"))?;
        Ok(event.as_fd())
    }

    /// What [`crate::Server::init`] made.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// Tells the client how far the job is: `fraction` from 0 to 1, and a few words. However often it is called,
    /// the client hears ten times a second at most, and the last word before the result. Does nothing in a process that
    /// the handler forked.
    pub fn progress(&self, fraction: f32, text: &str) {
        if !ownership::is_worker() {
            return;
        }
        let progress = self.order.handle.progress.get_or_init(Box::default);
        progress.say(&self.writer, self.order.number, fraction, cut(text, MESSAGE_BYTES_MAX));
    }
}

/// The surroundings of [`crate::Server::init`].
pub struct StartCtx {
    pub(crate) to: Listener,
}

/// What hears of a start.
pub(crate) enum Listener {
    /// The supervisor.
    Supervisor(Arc<Writer>),
    /// The keeper, of a template.
    Keeper(Arc<Template>),
}

impl StartCtx {
    /// Asks for more time than `start.ready`: so much from now, each time at most `start.ready`.
    pub fn extend(&self, more: Duration) {
        let more_ms = u32::try_from(more.as_millis()).unwrap_or(u32::MAX);
        match &self.to {
            Listener::Supervisor(writer) => writer.send(kind::EXTEND_START, 0, &Extend { more_ms }),
            Listener::Keeper(template) => template.tell(Word::Extend(more_ms)),
        }
    }

    /// Tells operators what the worker is doing.
    pub fn status(&self, text: &str) {
        let text = cut(text, MESSAGE_BYTES_MAX);
        match &self.to {
            Listener::Supervisor(writer) => writer.send(kind::STATUS, 0, &Status { text }),
            Listener::Keeper(template) => template.tell(Word::Status(cut(text, TEXT_BYTES_MAX))),
        }
    }
}

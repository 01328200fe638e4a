//! Holds a job and its payload until the outcome arrives, because the client may have to send the job again. Determines
//! whether and how long a job waits for another connection. `job` builds the request, and `requests` sends it. `job`
//! also decides about retries.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_shared::connection::Payload;
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::{Executed, JobOptions, Outcome, RejectReason, Verdict};

use crate::reply::{JobError, OUTCOME_MARGIN};

/// Maximum length of a bulkhead name or traceparent that the client sends, in bytes. The supervisor's limits are lower.
const TEXT_BYTES_MAX: usize = 1024;

/// Source of a payload.
#[derive(Clone)]
pub(crate) enum Source {
    /// A file that begins with the payload, and the payload's size in bytes.
    File(Arc<File>, usize),
    /// A function that writes the payload. The second field is the payload's size in bytes.
    Function(Fill, usize),
}

type Fill = Arc<dyn Fn(&mut [u8]) + Send + Sync>;

impl Source {
    fn bytes(&self) -> usize {
        match self {
            Self::File(_, bytes) | Self::Function(_, bytes) => *bytes,
        }
    }

    fn fill(&self, target: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file, _) => file.read_exact_at(target, 0),
            Self::Function(fill, _) => {
                fill(target);
                Ok(())
            }
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Source({} bytes)", self.bytes())
    }
}

/// Maximum number of times that a job is sent again after it may have reached a supervisor. Without this limit, a job
/// that crashes every supervisor would be sent forever.
pub(crate) const RESENDS_MAX: u32 = 3;

/// Maximum time that a job without a deadline waits for the client to reconnect.
pub(crate) const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The payload of a job. Kept until the outcome arrives, because the job may have to be sent again. A large payload
/// is shared with the send queue instead of being copied.
#[derive(Clone, Debug)]
pub(crate) enum KeptPayload {
    Owned(Vec<u8>),
    Shared(Arc<Vec<u8>>),
}

impl Default for KeptPayload {
    fn default() -> Self {
        Self::Owned(Vec::new())
    }
}

impl From<Vec<u8>> for KeptPayload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Owned(bytes)
    }
}

impl std::ops::Deref for KeptPayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl KeptPayload {
    /// Returns the payload for the send queue. A large payload is shared, not copied.
    pub(crate) fn share(&mut self) -> Payload<'_> {
        if let Self::Owned(bytes) = self
            && bytes.len() > INLINE_PAYLOAD_BYTES_MAX
        {
            *self = Self::Shared(Arc::new(std::mem::take(bytes)));
        }
        match self {
            Self::Owned(bytes) => Payload::Copied(bytes),
            Self::Shared(bytes) => Payload::Shared(bytes.clone()),
        }
    }

    /// Takes the buffer of a payload that is too large to be sent inline. Returns `None` if the payload is small, or
    /// if the send queue still uses the buffer.
    pub(crate) fn take_large(&mut self) -> Option<Vec<u8>> {
        if self.len() <= INLINE_PAYLOAD_BYTES_MAX {
            return None;
        }
        match std::mem::take(self) {
            Self::Owned(bytes) => Some(bytes),
            Self::Shared(bytes) => Arc::into_inner(bytes),
        }
    }
}

/// The deadline of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    /// Time limit that the caller has set.
    pub(crate) limit: Duration,
    /// Time at which the time limit expires.
    pub(crate) at: Instant,
}

/// A job to be sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobRequest {
    pub(crate) bulkhead: String,
    pub(crate) payload: KeptPayload,
    /// Source of the payload, or `None` if the `payload` field contains the payload.
    pub(crate) source: Option<Source>,
    /// Deadline of the job, measured from the first submission. [`JobOptions::deadline`] contains the remaining time.
    pub(crate) deadline: Option<Deadline>,
    /// Maximum time to wait for the client to reconnect, if the caller has set one.
    pub(crate) reconnect_timeout: Option<Duration>,
    /// Number of times that the connection was lost after the job had been sent over it.
    pub(crate) losses: u32,
    /// Time at which a job whose connection was lost stops waiting for the client to reconnect.
    pub(crate) waits_until: Option<Instant>,
    /// True if retries are enabled for the job. The job is retried only if the outcome also permits a retry.
    pub(crate) retries: bool,
    /// True if a large result stays in the memory file instead of being copied.
    pub(crate) maps_result: bool,
    pub(crate) options: JobOptions<String>,
    pub(crate) traceparent: Option<String>,
}

impl JobRequest {
    pub(crate) fn new(bulkhead: String, payload: Vec<u8>) -> Self {
        Self {
            bulkhead,
            payload: payload.into(),
            options: JobOptions { cost: 1, ..JobOptions::default() },
            ..Self::default()
        }
    }

    /// Starts the clock for the job's time limit.
    pub(crate) fn begin(&mut self) {
        // A time limit beyond the range of the clock counts as no time limit.
        self.deadline = self
            .options
            .deadline
            .and_then(|limit| Instant::now().checked_add(limit).map(|at| Deadline { limit, at }));
    }

    /// Prepares the job for a retry. The caller must have checked that the deadline has not passed.
    pub(crate) fn begin_again(&mut self) {
        (self.losses, self.waits_until) = (0, None);
        if let Some(deadline) = self.deadline {
            self.options.deadline = Some(deadline.at.saturating_duration_since(Instant::now()));
        }
    }

    /// Updates the time that remains until the deadline. Returns an error if the deadline has passed.
    pub(crate) fn update_remaining(&mut self) -> Result<(), JobError> {
        let Some(deadline) = self.deadline else { return Ok(()) };
        let left = deadline.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.deadline_error(deadline.limit));
        }
        self.options.deadline = Some(left);
        Ok(())
    }

    /// Returns the time after which the client stops waiting for the outcome. Returns `None` if the job has no
    /// deadline.
    pub(crate) fn outcome_due(&self) -> Option<Instant> {
        self.deadline.and_then(|deadline| deadline.at.checked_add(OUTCOME_MARGIN))
    }

    /// Records that the connection was lost. `was_sent` is true if the whole job had been sent over that
    /// connection.
    pub(crate) fn lost(&mut self, was_sent: bool) {
        if was_sent {
            self.losses += 1;
            self.waits_until = None;
        }
        self.wait_at_most(self.reconnect_limit());
    }

    /// Records that the job was not accepted because the supervisor is being replaced. The job waits for the new
    /// supervisor, even if the client's timeout for reconnecting is zero.
    pub(crate) fn not_taken(&mut self) {
        // The limit of an earlier wait can have expired while this supervisor had the job.
        self.waits_until = None;
        self.wait_at_most(
            self.reconnect_limit().map(|limit| if limit.is_zero() { RECONNECT_TIMEOUT } else { limit }),
        );
    }

    /// Limits the job's wait for another connection to `limit`. Does nothing if the job is already waiting.
    fn wait_at_most(&mut self, limit: Option<Duration>) {
        if self.waits_until.is_none() {
            let limit = limit.and_then(|limit| Instant::now().checked_add(limit));
            let deadline = self.deadline.map(|deadline| deadline.at);
            self.waits_until = limit.into_iter().chain(deadline).min();
        }
    }

    /// Returns the maximum time to wait for the client to reconnect, or `None` if the job waits until its deadline.
    pub(crate) fn reconnect_limit(&self) -> Option<Duration> {
        self.reconnect_timeout.or(self.deadline.is_none().then_some(RECONNECT_TIMEOUT))
    }

    /// Returns true if the job can be sent again after the loss of its connection.
    pub(crate) fn can_be_sent_again(&self) -> bool {
        let may_run_again = self.losses == 0 || self.options.is_idempotent && self.losses <= RESENDS_MAX;
        may_run_again && self.reconnect_timeout.is_none_or(|limit| !limit.is_zero())
    }

    /// Returns true if the job has waited too long for another connection.
    pub(crate) fn is_overdue(&self) -> bool {
        self.waits_until.is_some_and(|until| until <= Instant::now())
    }

    /// Returns whether the handler may have begun the job. The job must have no outcome and must not be in the send
    /// queue.
    pub(crate) fn executed(&self) -> Executed {
        if self.losses == 0 { Executed::No } else { Executed::Unknown }
    }

    pub(crate) fn payload_bytes(&self) -> usize {
        self.source.as_ref().map_or(self.payload.len(), Source::bytes)
    }

    /// Writes the payload to `target`, which must be exactly as large as the payload.
    pub(crate) fn fill(&self, target: &mut [u8]) -> Result<(), JobError> {
        match &self.source {
            None => {
                target.copy_from_slice(&self.payload);
                Ok(())
            }
            Some(source) => {
                // A panic must not end the task that serves the connection.
                let message = match catch_unwind(AssertUnwindSafe(|| source.fill(target))) {
                    Ok(Ok(())) => return Ok(()),
                    Ok(Err(error)) => format!("the payload file cannot be read: {error}"),
                    Err(_) => "the function that writes the payload panicked".to_owned(),
                };
                Err(self.rejection(RejectReason::Invalid, message))
            }
        }
    }

    /// Reads the payload from its source. Returns `None` if the job has no source.
    pub(crate) fn load(&self) -> Result<Option<Vec<u8>>, JobError> {
        let Some(source) = &self.source else { return Ok(None) };
        let mut payload = vec![0; source.bytes()];
        self.fill(&mut payload)?;
        Ok(Some(payload))
    }

    /// Returns an error if a name or the traceparent is too long.
    pub(crate) fn check(&self) -> Result<(), JobError> {
        let name_too_long = |owner: &str, bytes_max: usize| {
            let message = format!("the {owner}'s name is longer than {bytes_max} bytes");
            Err(self.rejection(RejectReason::Invalid, message))
        };
        if self.options.operation.len() > OPERATION_BYTES_MAX {
            return name_too_long("operation", OPERATION_BYTES_MAX);
        }
        if self.options.tenant.len() > TENANT_BYTES_MAX {
            return name_too_long("tenant", TENANT_BYTES_MAX);
        }
        let traceparent = self.traceparent.as_deref().unwrap_or_default();
        for (field, text) in [("bulkhead's name", self.bulkhead.as_str()), ("traceparent", traceparent)] {
            if text.len() > TEXT_BYTES_MAX {
                let message = format!("the {field} is longer than {TEXT_BYTES_MAX} bytes");
                return Err(self.rejection(RejectReason::Invalid, message));
            }
        }
        Ok(())
    }

    pub(crate) fn rejection(&self, reason: RejectReason, message: String) -> JobError {
        JobError::Rejected(Box::new(self.unsent_outcome(Verdict::Rejected { reason, message })))
    }

    /// Returns the error for a job whose deadline passed before it could be sent.
    pub(crate) fn deadline_error(&self, deadline: Duration) -> JobError {
        let outcome = self.unsent_outcome(Verdict::DeadlineQueued);
        JobError::DeadlineExceeded(Box::new(Outcome { queued: deadline, deadline, ..outcome }))
    }

    /// Returns the cancellation error for a job that has no connection. Returns `None` if `unless_begun` is true
    /// and the job may have begun.
    pub(crate) fn cancelled(&self, unless_begun: bool) -> Option<JobError> {
        let executed = self.executed();
        if unless_begun && executed != Executed::No {
            return None;
        }
        Some(JobError::Cancelled(Box::new(self.unsent_outcome(Verdict::Cancelled { executed }))))
    }

    /// Returns the error for a job that waited too long for the client to reconnect.
    pub(crate) fn not_reconnected(&self, problem: &str) -> JobError {
        JobError::unreachable(self.executed(), problem)
    }

    /// Creates an outcome for a job that ended before the supervisor reported one.
    fn unsent_outcome(&self, verdict: Verdict) -> Outcome {
        Outcome {
            job: None,
            bulkhead: self.bulkhead.clone(),
            attempts: 0,
            queued: Duration::ZERO,
            ran: Duration::ZERO,
            worker_pid: None,
            retryable: verdict.is_retryable(self.options.is_idempotent),
            retry_after: None,
            deadline: self
                .deadline
                .map(|deadline| deadline.limit)
                .or(self.options.deadline)
                .unwrap_or_default(),
            run_limit: self.options.run_limit,
            status: None,
            report: None,
            verdict,
        }
    }
}

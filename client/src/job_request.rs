//! Job requests: jobs that the client has prepared and not yet sent to the supervisor.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::codec::tag;
use bulkhead_shared::limits::{OPERATION_BYTES_MAX, TENANT_BYTES_MAX};
use bulkhead_shared::{JobOptions, Outcome, RejectReason, Verdict};

use crate::reply::JobError;

/// Maximum length of a bulkhead name or traceparent that the client sends, in bytes. The limits of the
/// supervisor are lower.
const TEXT_BYTES_MAX: usize = 1024;

/// Source of a payload.
#[derive(Clone)]
pub(crate) enum Source {
    /// The given number of bytes from the beginning of a file.
    File(Arc<File>, usize),
    /// A function that writes the given number of bytes.
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

/// A job to be sent.
#[derive(Clone, Debug)]
pub(crate) struct JobRequest {
    pub(crate) bulkhead: String,
    pub(crate) payload: Vec<u8>,
    /// Source of the payload; `None` if `payload` contains the payload.
    pub(crate) source: Option<Source>,
    /// True if a large result stays in the memory file instead of being copied.
    pub(crate) maps_result: bool,
    pub(crate) options: JobOptions<String>,
    pub(crate) traceparent: Option<String>,
}

impl JobRequest {
    pub(crate) fn new(bulkhead: String, payload: Vec<u8>) -> Self {
        Self {
            bulkhead,
            payload,
            source: None,
            maps_result: false,
            options: JobOptions { cost: 1, ..JobOptions::default() },
            traceparent: None,
        }
    }

    pub(crate) fn payload_bytes(&self) -> usize {
        self.source.as_ref().map_or(self.payload.len(), Source::bytes)
    }

    /// Writes the payload to `target`, which must have the size of the payload.
    pub(crate) fn fill(&self, target: &mut [u8]) -> Result<(), JobError> {
        match &self.source {
            None => {
                target.copy_from_slice(&self.payload);
                Ok(())
            }
            Some(source) => source.fill(target).map_err(|error| {
                let message = format!("the payload's file cannot be read: {error}");
                self.rejection(RejectReason::Invalid, message)
            }),
        }
    }

    /// Loads the payload from its source into `payload`.
    pub(crate) fn load(&mut self) -> Result<(), JobError> {
        if let Some(source) = &self.source {
            let mut payload = vec![0; source.bytes()];
            self.fill(&mut payload)?;
            (self.payload, self.source) = (payload, None);
        }
        Ok(())
    }

    /// Returns an error if a name or the traceparent is too long.
    pub(crate) fn check(&self) -> Result<(), JobError> {
        let name_too_long = |what: &str, bytes_max: usize| {
            let message = format!("the {what}'s name is longer than {bytes_max} bytes");
            Err(self.rejection(RejectReason::Invalid, message))
        };
        if self.options.operation.len() > OPERATION_BYTES_MAX {
            return name_too_long("operation", OPERATION_BYTES_MAX);
        }
        if self.options.tenant.len() > TENANT_BYTES_MAX {
            return name_too_long("tenant", TENANT_BYTES_MAX);
        }
        let traceparent = self.traceparent.as_deref().unwrap_or_default();
        for (what, text) in [("bulkhead's name", self.bulkhead.as_str()), ("traceparent", traceparent)] {
            if text.len() > TEXT_BYTES_MAX {
                let message = format!("the {what} is longer than {TEXT_BYTES_MAX} bytes");
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

    /// Returns the outcome of a job that the supervisor never received.
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
            deadline: self.options.deadline.unwrap_or_default(),
            run_limit: self.options.run_limit,
            status: None,
            report: None,
            verdict,
        }
    }

    pub(crate) fn trace_extension(&self) -> Option<(u16, &[u8])> {
        self.traceparent.as_ref().map(|text| (tag::TRACEPARENT, text.as_bytes()))
    }
}

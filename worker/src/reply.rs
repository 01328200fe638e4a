//! What a handler answers.

use std::fmt;

use bulkhead_shared::Fault;

/// Why a handler could not do its job.
///
/// Every [`std::error::Error`] becomes one by `?`, with the code `error`, as the dependency's fault and
/// not worth a retry.
#[derive(Clone, PartialEq, Eq)]
pub struct HandlerError {
    /// A short word for programs; up to 128 bytes reach the client.
    pub code: String,
    /// A sentence for people; up to 8 KiB reach the client.
    pub message: String,
    /// Whether the same job may succeed later.
    pub retryable: bool,
    /// The party to blame; the caller's own faults do not speak against the bulkhead.
    pub fault: Fault,
}

impl HandlerError {
    /// The dependency's fault, not worth a retry.
    ///
    /// ```
    /// use bulkhead_worker::HandlerError;
    /// let error = HandlerError::new("bad_header", "the magic is missing").caller();
    /// assert_eq!(error.fault, bulkhead_worker::Fault::Caller);
    /// ```
    pub fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), retryable: false, fault: Fault::Dependency }
    }

    /// The caller is to blame.
    #[must_use]
    pub fn caller(self) -> Self {
        Self { fault: Fault::Caller, ..self }
    }

    /// The same job may succeed later.
    #[must_use]
    pub fn retryable(self) -> Self {
        Self { retryable: true, ..self }
    }
}

impl fmt::Display for HandlerError {
    /// Writes one line for people: `bad_header: the magic is missing`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

bulkhead_shared::debug_by_display!(HandlerError);

impl<E: std::error::Error> From<E> for HandlerError {
    fn from(error: E) -> Self {
        Self::new("error", error.to_string())
    }
}

/// What becomes of a job, as the protocol can say it.
#[doc(hidden)]
pub enum Reply {
    /// It is done.
    Result(Vec<u8>),
    /// It could not be done.
    Failed(HandlerError),
    /// A program has exited.
    Exited {
        /// Exit status.
        status: i32,
        /// Error of the job; `None` if it is done.
        error: Option<HandlerError>,
        /// Result, or the payload of the error, of which the first 64 KiB reach the client.
        output: Vec<u8>,
    },
    /// The program that did it died by a signal.
    ProgramCrashed {
        /// What it was, as we number processes.
        process: u32,
        /// The signal's number.
        signal: i32,
        /// A sentence for people.
        message: String,
    },
}

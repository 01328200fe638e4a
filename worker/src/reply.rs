//! The types for results and errors that handlers return. `pool` encodes and sends them to the supervisor.

use std::fmt;

use bulkhead_shared::Fault;

/// Error returned by a handler that could not complete a job.
///
/// The `?` operator converts every [`std::error::Error`] into a `HandlerError` with the code `error`,
/// `fault` set to `Dependency`, and `retryable` set to false.
#[derive(Clone, PartialEq, Eq)]
pub struct HandlerError {
    /// Short, machine-readable error code. Longer codes are truncated to 128 bytes.
    pub code: String,
    /// Human-readable message. Longer messages are truncated to 8 KiB.
    pub message: String,
    /// True if the same job might succeed later.
    pub retryable: bool,
    /// The party that caused the error. Errors caused by the caller do not count against the health of the
    /// bulkhead.
    pub fault: Fault,
}

impl HandlerError {
    /// Creates a non-retryable error with `fault` set to `Dependency`.
    ///
    /// ```
    /// use bulkhead_worker::HandlerError;
    /// let error = HandlerError::new("bad_header", "the magic is missing").caller();
    /// assert_eq!(error.fault, bulkhead_worker::Fault::Caller);
    /// ```
    pub fn new(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), retryable: false, fault: Fault::Dependency }
    }

    /// Sets `fault` to `Caller`.
    #[must_use]
    pub fn caller(self) -> Self {
        Self { fault: Fault::Caller, ..self }
    }

    /// Marks the error as retryable.
    #[must_use]
    pub fn retryable(self) -> Self {
        Self { retryable: true, ..self }
    }
}

impl fmt::Display for HandlerError {
    /// Formats the error as its code and message, such as `bad_header: the magic is missing`.
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

/// A handler's reply to a job, in any form that the protocol supports.
#[doc(hidden)]
pub enum Reply {
    /// The job succeeded.
    Result(Vec<u8>),
    /// The job failed.
    Failed(HandlerError),
    /// A program ran the job and exited.
    Exited {
        /// Exit status.
        status: i32,
        /// The error, if the job failed, or `None` if the job succeeded.
        error: Option<HandlerError>,
        /// Result of a successful job, or the error payload of a failed job. The client gets at most the
        /// first 64 KiB of an error payload.
        output: Vec<u8>,
    },
    /// A program ran the job and was killed by a signal.
    ProgramCrashed {
        /// PID of the program, in the worker's PID namespace.
        process: u32,
        /// Signal number.
        signal: i32,
        /// Human-readable message.
        message: String,
    },
}

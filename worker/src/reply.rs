//! Results and errors of handlers.

use std::fmt;

use bulkhead_shared::Fault;

/// The error of a handler that could not do the job.
///
/// The `?` operator converts every [`std::error::Error`] into a `HandlerError` with the code `error`,
/// `fault` set to `Dependency`, and `retryable` set to false.
#[derive(Clone, PartialEq, Eq)]
pub struct HandlerError {
    /// Error code for programs, a short word. At most 128 bytes reach the client.
    pub code: String,
    /// Message for people. At most 8 KiB reach the client.
    pub message: String,
    /// True if the same job may succeed later.
    pub retryable: bool,
    /// The party at fault. Faults of the caller do not count as failures of the bulkhead.
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

/// The reply to a job, with all forms that the protocol supports.
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
        /// Error of the job; `None` if the job succeeded.
        error: Option<HandlerError>,
        /// Result of a successful job, or payload of the error. The client gets at most the first 64 KiB of
        /// an error's payload.
        output: Vec<u8>,
    },
    /// The program that ran the job was killed by a signal.
    ProgramCrashed {
        /// Process id of the program, as the worker sees it.
        process: u32,
        /// Signal number.
        signal: i32,
        /// Message for people.
        message: String,
    },
}

//! Writes results to standard output and messages to standard error, and formats the outcomes of jobs. `Failure` is the
//! error type of all commands, and contains the exit code and the message. The commands decide what to print, and
//! `main` reports their failures.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

pub(crate) use bulkhead_api::exit;
use bulkhead_api::text;
pub(crate) use bulkhead_api::text::escape;
use bulkhead_api::{CommandFailure, JobOutcome};
use bulkhead_client::{ConnectError, Executed, JobError, Outcome, RejectReason, Reply};
use bulkhead_linux::blocking::Blocking;
use bulkhead_linux::standard_output;
use serde_json::{Value, json};

/// An error that ends the command early.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    /// Error message. `None` if the reader of standard output has closed the pipe, which is not an error.
    message: Option<String>,
    /// Reason for the rejection, if the supervisor rejected the job.
    reason: Option<RejectReason>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: Some(message.into()), reason: None }
    }

    /// Returns the exit status.
    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// Returns the error message, which is empty if there is nothing to report.
    pub(crate) fn message(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }

    /// Replaces the exit status.
    pub(crate) fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    pub(crate) fn rejected(reason: RejectReason, message: impl Into<String>) -> Self {
        Self { reason: Some(reason), ..Self::new(reason.exit_code(), message) }
    }

    pub(crate) fn report(self) -> ExitCode {
        if let Some(message) = &self.message {
            to_stderr(&format!("bulkhead: {message}"));
        }
        ExitCode::from(self.code)
    }

    /// Formats the failure as a JSON object that contains the applicable fields of a job's outcome.
    pub(crate) fn json(&self) -> Value {
        json!(self.document())
    }

    /// Formats the failure as the outcome of a job.
    pub(crate) fn job_json(&self, bulkhead: &str) -> Value {
        json!(self.document().for_job(bulkhead, Executed::No))
    }

    fn document(&self) -> CommandFailure {
        CommandFailure::new(self.code, self.reason, self.message.clone())
    }

    /// Replaces the exit status with `code` if the reader of standard output has closed the pipe. The exit status then
    /// reflects the work done so far instead of the closed pipe.
    pub(crate) fn or_code(self, code: u8) -> Self {
        Self { code: if self.message.is_none() { code } else { self.code }, ..self }
    }

    /// Makes a pipe that its reader has closed an error like any other failed write. For output that must not be lost.
    pub(crate) fn or_lost_output(self) -> Self {
        match self.message {
            None => Self::new(
                exit::OUTPUT_FAILED,
                "failed to write to standard output: the reader has closed the pipe",
            ),
            Some(_) => self,
        }
    }

    /// Appends a note to the message.
    pub(crate) fn with_note(self, note: &str) -> Self {
        Self { message: self.message.map(|message| format!("{message}; {note}")), ..self }
    }

    /// Ignores the failure if the reader of standard output has closed the pipe. The command then continues without
    /// output.
    pub(crate) fn unless_closed_pipe(self) -> Result<(), Self> {
        if self.message.is_none() { Ok(()) } else { Err(self) }
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let reason = match &error {
            ConnectError::Refused { reason, .. } => RejectReason::from_code(*reason),
            ConnectError::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some(RejectReason::Forbidden)
            }
            _ => None,
        };
        let code = reason.map_or(exit::UNREACHABLE, RejectReason::exit_code);
        let elsewhere = match &error {
            ConnectError::Unreachable { .. } if reason.is_none() => {
                "; if the socket is elsewhere, use --socket or BULKHEAD_SOCKET"
            }
            _ => "",
        };
        Self { reason, ..Self::new(code, format!("{error}{elsewhere}")) }
    }
}

/// Writes bytes to standard output. If the reader has closed the pipe, returns a failure without a message. For any
/// other error, the exit status is `OUTPUT_FAILED`, because a lost result must not look like a success.
pub(crate) fn raw(bytes: &[u8]) -> Result<(), Failure> {
    standard_output::write(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure { code: exit::OK, message: None, reason: None },
        _ => Failure::new(exit::OUTPUT_FAILED, format!("failed to write to standard output: {error}")),
    })
}

/// Writes a line to standard output.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    raw(format!("{text}\n").as_bytes())
}

/// Writes a line to standard error.
pub(crate) fn to_stderr(text: &str) {
    let _ = writeln!(Blocking(io::stderr()), "{text}");
}

/// Writes a line of JSON to standard output.
pub(crate) fn json(json: impl Display) -> Result<(), Failure> {
    line(&text::escape_json(&json.to_string()))
}

/// Escapes line breaks and control characters, so that a worker cannot imitate this command's output.
fn one_line(text: &str) -> String {
    escape(text).replace('\n', "\\n")
}

/// Returns true if standard error is a terminal and can therefore show a progress bar.
pub(crate) fn has_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Describes a job's outcome in one line.
pub(crate) fn describe(result: &Result<Reply, JobError>) -> String {
    match result {
        Ok(reply) => format!("ok: {}", timing(reply.outcome())),
        Err(error) => match error.outcome() {
            Some(outcome) => format!("{} ({})", one_line(&error.to_string()), timing(outcome)),
            None => one_line(&error.to_string()),
        },
    }
}

fn timing(outcome: &Outcome) -> String {
    let mut text = format!(
        "{} queued {:.1} ms, ran {:.1} ms",
        outcome.bulkhead,
        millis(outcome.queued),
        millis(outcome.ran)
    );
    // An exit status of 0 is not shown, because it is the normal case.
    if let Some(status) = outcome.status.filter(|status| *status != 0) {
        text.push_str(&format!(", exit status {status}"));
    }
    if let Some(pid) = outcome.worker_pid {
        text.push_str(&format!(", worker {pid}"));
    }
    if let Some(job) = outcome.job {
        text.push_str(&format!(", job {job}"));
    }
    text
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Formats the outcome of a job as a flat JSON object.
pub(crate) fn outcome_json(bulkhead: &str, result: &Result<Reply, JobError>) -> Value {
    json!(match result {
        Ok(reply) => JobOutcome::with_payload(reply.outcome(), reply.payload()),
        Err(error) => match error.outcome() {
            Some(outcome) => JobOutcome::with_payload(outcome, error.payload()),
            None => JobOutcome {
                retryable: error.is_retryable(),
                ..JobOutcome::without_outcome(
                    "unreachable",
                    bulkhead,
                    error.executed(),
                    Some(error.to_string())
                )
            },
        },
    })
}

/// Formats the outcome of a job that this command cancelled, if the supervisor has not reported an outcome.
pub(crate) fn cancelled_json(bulkhead: &str) -> Value {
    json!(JobOutcome::without_outcome("cancelled", bulkhead, Executed::Unknown, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_breaks_in_worker_text_are_escaped() {
        assert_eq!(one_line("bad\nok: job 7"), "bad\\nok: job 7");
    }
}

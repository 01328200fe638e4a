//! Writes the results and errors of all `bulkhead-fleet` commands, and determines their exit codes. Formats the outcome
//! of a job as text or as JSON. Each command builds its own tables. The agent's log is written with `tracing` instead.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

pub(crate) use bulkhead_api::exit;
use bulkhead_api::text::{escape, escape_json};
use bulkhead_api::{CommandFailure, JobOutcome};
use bulkhead_client::{Executed, RejectReason, Reply};
use bulkhead_fleet::FleetError;
use bulkhead_linux::blocking::Blocking;
use bulkhead_linux::standard_output;
use serde_json::{Value, json};

/// An error that ends the program, with the exit code to use.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    /// Error message, or `None` if the reader of the output has closed the pipe.
    message: Option<String>,
    /// Reason, if a request was rejected.
    reason: Option<RejectReason>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: Some(message.into()), reason: None }
    }

    pub(crate) fn rejected(reason: RejectReason, message: impl Into<String>) -> Self {
        Self { reason: Some(reason), ..Self::new(reason.exit_code(), message) }
    }

    pub(crate) fn unreachable(error: impl std::fmt::Display) -> Self {
        Self::new(exit::UNREACHABLE, error.to_string())
    }

    pub(crate) fn report(self) -> ExitCode {
        if let Some(message) = &self.message {
            to_stderr(&format!("bulkhead-fleet: {}", escape(message)));
        }
        ExitCode::from(self.code)
    }

    pub(crate) fn code(&self) -> u8 {
        self.code
    }

    /// Formats the failure as a JSON object that contains the applicable fields of a job's outcome.
    pub(crate) fn json(&self) -> Value {
        json!(self.document())
    }

    /// Formats the failure as the outcome of a job that was not sent, or whose outcome was not read.
    pub(crate) fn job_json(&self, bulkhead: &str, id: Option<&str>, executed: Executed) -> Value {
        with_id(&self.document().for_job(bulkhead, executed), id)
    }

    fn document(&self) -> CommandFailure {
        CommandFailure::new(self.code, self.reason, self.message.clone())
    }

    /// Replaces the exit status with `code` if the reader of standard output has closed the pipe.
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

    pub(crate) fn message(&self) -> &str {
        self.message.as_deref().unwrap_or_default()
    }
}

/// Writes bytes to standard output. If the reader has closed the pipe, returns a failure without a message.
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

/// Writes a line of JSON to standard output.
pub(crate) fn json(value: &Value) -> Result<(), Failure> {
    line(&escape_json(&value.to_string()))
}

/// Writes a line to standard error.
pub(crate) fn to_stderr(text: &str) {
    let _ = writeln!(Blocking(io::stderr()), "{text}");
}

/// Writes a payload to `file`, or to standard output if `file` is `-` or `None`.
pub(crate) fn payload(file: Option<&Path>, bytes: &[u8]) -> Result<(), Failure> {
    match file.filter(|file| *file != Path::new("-")) {
        Some(file) => std::fs::write(file, bytes).map_err(|error| {
            Failure::new(exit::OUTPUT_FAILED, format!("failed to write {}: {error}", file.display()))
        }),
        None => raw(bytes),
    }
}

/// Formats a job's result as one line of text.
pub(crate) fn describe(id: &str, result: &Result<Reply, FleetError>) -> String {
    let text = match result {
        Ok(reply) => {
            format!("ok: {} ran {:.1} ms", reply.outcome().bulkhead, reply.outcome().ran.as_secs_f64() * 1e3)
        }
        Err(error) => error.to_string(),
    };
    format!("{}, id {}", escape(&text).replace('\n', "\\n"), escape(id))
}

/// Returns a job's result as a flat JSON object that contains the ID and the fields that `bulkhead submit --json`
/// prints.
pub(crate) fn outcome_json(bulkhead: &str, id: &str, result: &Result<Reply, FleetError>) -> Value {
    let outcome = match result {
        Ok(reply) => Some(reply.outcome()),
        Err(FleetError::Job(error)) => error.outcome(),
        Err(_) => None,
    };
    let payload = payload_of(result).unwrap_or_default();
    let document = match (outcome, result) {
        (Some(outcome), _) => JobOutcome::with_payload(outcome, payload),
        (None, Err(error)) => {
            let (state, reason) = match error {
                FleetError::Overdue { .. } => ("deadline_exceeded", Some("queued".into())),
                _ => ("unreachable", None),
            };
            let message = Some(error.to_string());
            JobOutcome {
                reason,
                retryable: error.is_retryable(),
                ..JobOutcome::without_outcome(state, bulkhead, error.executed(), message)
            }
        }
        (None, Ok(_)) => unreachable!("a reply has an outcome"),
    };
    with_id(&document, Some(id))
}

/// Returns the JSON object for a job whose outcome is not known yet because the command ends early.
pub(crate) fn unfinished_json(state: &'static str, bulkhead: &str, id: &str, message: String) -> Value {
    let document = JobOutcome::without_outcome(state, bulkhead, Executed::Unknown, Some(message));
    with_id(&JobOutcome { retryable: state == "unreachable", ..document }, Some(id))
}

fn with_id(document: &JobOutcome, id: Option<&str>) -> Value {
    let mut value = json!(document);
    value["id"] = json!(id);
    value
}

/// Returns the result of a job, or the error payload of a failed job. Returns `None` if there is nothing to write.
pub(crate) fn payload_of(result: &Result<Reply, FleetError>) -> Option<&[u8]> {
    match result {
        Ok(reply) => Some(reply.payload()),
        Err(FleetError::Job(error)) => Some(error.payload()).filter(|payload| !payload.is_empty()),
        Err(_) => None,
    }
}

/// Returns the exit code for a job's result.
pub(crate) fn code(result: &Result<Reply, FleetError>) -> u8 {
    result.as_ref().map_or_else(FleetError::exit_code, |_| exit::OK)
}

//! How the command ends and what it prints.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use bulkhead_client::{ConnectError, CrashReason, JobError, Outcome, RejectReason, Reply, Verdict};
use serde_json::{Map, Value, json};

use crate::args::{Args, Command};

/// The exit codes that are not an outcome's.
pub(crate) mod exit {
    pub(crate) const OK: u8 = 0;
    pub(crate) const FAILED: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const NOT_FOUND: u8 = 66;
    pub(crate) const UNREACHABLE: u8 = 69;
    pub(crate) const FORBIDDEN: u8 = 77;
    pub(crate) const CANCELLED: u8 = 130;
}

/// Why the command could not do what it was to.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn report(self, args: &Args) -> ExitCode {
        if args.json && matches!(args.command, Command::Submit(_)) {
            let outcome = if self.code == exit::UNREACHABLE { "unreachable" } else { "error" };
            line(&json!({"outcome": outcome, "reason": null, "message": self.message}).to_string());
        }
        note(&format!("bulkhead: {}", self.message));
        ExitCode::from(self.code)
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let code = match &error {
            ConnectError::Refused { reason, .. } => {
                RejectReason::from_code(*reason).map_or(exit::UNREACHABLE, RejectReason::exit_code)
            }
            ConnectError::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                exit::FORBIDDEN
            }
            _ => exit::UNREACHABLE,
        };
        Self::new(code, format!("failed to {error}"))
    }
}

/// Bytes to standard output. Whoever closed it does not want them.
pub(crate) fn raw(bytes: &[u8]) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(bytes).and_then(|()| out.flush());
}

/// A line to standard output.
pub(crate) fn line(text: &str) {
    raw(format!("{text}\n").as_bytes());
}

/// A line to standard error.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Text from elsewhere, with what could steer a terminal escaped.
pub(crate) fn harmless(text: &str) -> String {
    let escape = |c: char| {
        if c.is_control() && c != '\n' && c != '\t' { c.escape_default().to_string() } else { c.into() }
    };
    text.chars().map(escape).collect()
}

/// Whether there is somebody to watch a progress bar.
pub(crate) fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Why a job did not end `ok`, in one line.
pub(crate) fn describe(result: &Result<Reply, JobError>) -> String {
    match result {
        Ok(reply) => format!("ok: {}", timing(reply.outcome())),
        Err(error) => match error.outcome() {
            Some(outcome) => format!("{}; {}", harmless(&outcome.to_string()), timing(outcome)),
            None => harmless(&error.to_string()),
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
    if let Some(pid) = outcome.worker_pid {
        text.push_str(&format!(", worker {pid}"));
    }
    if let Some(wait) = outcome.retry_after {
        text.push_str(&format!(", retry after {:.0} ms", millis(wait)));
    }
    text
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn rounded(duration: std::time::Duration) -> Value {
    json!((duration.as_secs_f64() * 1e6).round() / 1e3)
}

/// A job's end as one JSON object, its fields flat.
pub(crate) fn outcome_json(result: &Result<Reply, JobError>) -> Value {
    let mut object = Map::new();
    let mut put = |name: &str, value: Value| object.insert(name.to_owned(), value);
    let (outcome, bytes) = match result {
        Ok(reply) => (reply.outcome(), Some(reply.payload().len())),
        Err(error) => match error.outcome() {
            Some(outcome) => (outcome, None),
            None => {
                put("outcome", json!("unreachable"));
                put("reason", Value::Null);
                put("message", json!(error.to_string()));
                put("executed", json!(error.executed().name()));
                put("retryable", json!(error.is_retryable()));
                return Value::Object(object);
            }
        },
    };
    let verdict = &outcome.verdict;
    put("outcome", json!(verdict.name()));
    put("reason", json!(verdict.reason()));
    put("bulkhead", json!(outcome.bulkhead));
    put("attempts", json!(outcome.attempts));
    put("queued_ms", rounded(outcome.queued));
    put("ran_ms", rounded(outcome.ran));
    put("deadline_ms", rounded(outcome.deadline));
    put("executed", json!(verdict.executed().name()));
    put("retryable", json!(outcome.retryable));
    if let Some(pid) = outcome.worker_pid {
        put("worker_pid", json!(pid));
    }
    if let Some(wait) = outcome.retry_after {
        put("retry_after_ms", rounded(wait));
    }
    if let Some(message) = verdict.message() {
        put("message", json!(message));
    }
    match verdict {
        Verdict::Failed(failure) => {
            put("code", json!(failure.code));
            put("message", json!(failure.message));
            put("fault", json!(failure.fault.name()));
        }
        Verdict::Crashed { reason: CrashReason::Exit, status: Some(code), .. } => {
            put("exit_code", json!(code));
        }
        Verdict::Crashed { status: Some(signal), message, .. } => {
            let name = message.split([' ', ':']).find(|word| word.starts_with("SIG"));
            put("signal", name.map_or_else(|| json!(signal), |name| json!(name)));
        }
        _ => {}
    }
    if let Some(bytes) = bytes {
        put("result_bytes", json!(bytes));
    }
    Value::Object(object)
}

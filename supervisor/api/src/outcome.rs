//! Converts outcomes of jobs to flat documents, and defines problem documents for failed jobs and failed requests. The
//! control plane sends these documents, and the command-line programs print them. This file decides no outcome.

use std::time::Duration;

use bulkhead_shared::{CrashReason, Executed, Fault, Outcome, RejectReason, Verdict, exit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::crash::base64_text;
use crate::{RejectedConfig, Text, Word};

/// The outcome of a job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[expect(missing_docs, reason = "the field names are part of the contract and are self-explanatory")]
pub struct JobOutcome {
    pub attempts: u32,
    pub bulkhead: String,
    /// Error code returned by the handler, if the job failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<f64>,
    pub executed: Word<Executed>,
    /// Exit status of the worker that crashed or, with `exec`, of the program that ran the job. Absent if the process
    /// did not exit on its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The party that is responsible for a failure: `caller` or `dependency`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<Word<Fault>>,
    /// Job ID, if one was assigned.
    pub job: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[schemars(extend("enum" = ["failed", "rejected", "deadline_exceeded", "crashed", "cancelled"]))]
    pub outcome: Text,
    pub queued_ms: f64,
    pub ran_ms: f64,
    pub reason: Option<Text>,
    /// Payload of a failed job, in base64: data from the handler, or the first 64 KiB of a program's standard output.
    #[serde(with = "base64_text", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub payload: Option<Vec<u8>>,
    /// ID of the crash report about this job, for `GET /v1/crashes/{id}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<f64>,
    pub retryable: bool,
    /// Maximum run time of each attempt in milliseconds. Absent if there is no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_limit_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Exit status of the program that ran an `exec` job. Equal to `exit_code`. In a problem document, `status` is the
    /// HTTP status instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_pid: Option<u32>,
}

impl JobOutcome {
    /// Creates the document for an outcome. Does not set the name of the signal.
    pub fn new(outcome: &Outcome) -> Self {
        let verdict = &outcome.verdict;
        let failure = match verdict {
            Verdict::Failed(failure) => Some(failure),
            _ => None,
        };
        Self {
            attempts: outcome.attempts,
            bulkhead: outcome.bulkhead.clone(),
            code: failure.map(|failure| failure.code.clone()),
            deadline_ms: Some(millis(outcome.deadline)),
            executed: verdict.executed().into(),
            exit_code: match verdict {
                Verdict::Crashed { reason: CrashReason::Exit, status, .. } => *status,
                _ => outcome.status,
            },
            fault: failure.map(|failure| failure.fault.into()),
            job: outcome.job.map(|job| job.to_string()),
            message: failure.map(|failure| failure.message.clone()),
            outcome: verdict.name().into(),
            queued_ms: millis(outcome.queued),
            ran_ms: millis(outcome.ran),
            reason: verdict.reason().map(|reason| reason.to_owned().into()),
            report: outcome.report.clone(),
            retry_after_ms: outcome.retry_after.map(millis),
            retryable: outcome.retryable,
            run_limit_ms: outcome.run_limit.map(millis),
            status: outcome.status,
            worker_pid: outcome.worker_pid,
            ..Self::default()
        }
    }

    /// Creates the document that the command-line programs print for an outcome. Contains the message and the signal of
    /// every outcome that has one.
    pub fn described(outcome: &Outcome) -> Self {
        let document = Self::new(outcome);
        let message = outcome.verdict.message().map(str::to_owned).or(document.message);
        Self { message, signal: signal(&outcome.verdict), ..document }
    }

    /// Creates the document that the command-line programs print for a job. `payload` is the result, or the error
    /// payload of a failed job.
    pub fn with_payload(outcome: &Outcome, payload: &[u8]) -> Self {
        let is_ok = outcome.verdict == Verdict::Ok;
        let error_payload = (!is_ok && !payload.is_empty()).then(|| payload.to_vec());
        let result_bytes = is_ok.then_some(payload.len());
        Self { payload: error_payload, result_bytes, ..Self::described(outcome) }
    }

    /// Creates the document for a job without a known outcome. `state` takes the place of the outcome. As in the outcome
    /// of a rejected job, a deadline of 0 means that no deadline was set.
    pub fn without_outcome(
        state: &'static str,
        bulkhead: &str,
        executed: Executed,
        message: Option<String>,
    ) -> Self {
        Self {
            attempts: u32::from(executed != Executed::No),
            bulkhead: bulkhead.to_owned(),
            deadline_ms: Some(0.0),
            executed: executed.into(),
            message,
            outcome: state.into(),
            ..Self::default()
        }
    }
}

/// Returns the signal name from the crash message, or the signal number if the message contains no name.
fn signal(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Crashed { reason: CrashReason::Exit, .. } => None,
        Verdict::Crashed { status: Some(signal), message, .. } => {
            let name = message.split([' ', ':']).find(|word| word.starts_with("SIG"));
            Some(name.map_or_else(|| signal.to_string(), str::to_owned))
        }
        _ => None,
    }
}

/// Failure of a command, as the command-line programs print it with `--json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CommandFailure {
    message: Option<String>,
    outcome: &'static str,
    reason: Option<&'static str>,
    retryable: bool,
}

impl CommandFailure {
    /// Creates the document for a command that ends with `exit_code`. `reason` is set if a request was rejected.
    pub fn new(exit_code: u8, reason: Option<RejectReason>, message: Option<String>) -> Self {
        let (outcome, retryable) = match (reason, exit_code) {
            (Some(reason), _) => ("rejected", reason.is_retryable()),
            (None, exit::UNREACHABLE) => ("unreachable", true),
            (None, exit::TRY_LATER) => ("error", true),
            (None, _) => ("error", false),
        };
        Self { message, outcome, reason: reason.map(RejectReason::name), retryable }
    }

    /// Creates the document for a job that was not sent, or whose outcome was not read, because of the failure.
    pub fn for_job(self, bulkhead: &str, executed: Executed) -> JobOutcome {
        let Self { message, outcome, reason, retryable } = self;
        let document = JobOutcome::without_outcome(outcome, bulkhead, executed, message);
        JobOutcome { reason: reason.map(Text::from), retryable, ..document }
    }
}

/// Returns the duration in milliseconds, rounded to three decimal places.
pub fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// A problem document (RFC 9457). The document for a failed job includes the fields of the job's outcome.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Problem {
    /// Human-readable explanation, to be displayed after the title.
    pub detail: String,
    /// HTTP status code.
    pub status: u16,
    /// Name of the HTTP status.
    pub title: Text,
    /// Always `about:blank`, because no page describes the problem.
    #[serde(rename = "type")]
    pub kind: Text,
    /// Additional fields.
    #[serde(flatten)]
    #[schemars(with = "ProblemFields")]
    pub fields: Map<String, Value>,
}

/// Additional fields that a problem document can have: the fields of a job's outcome, a trace ID, and the errors of a
/// configuration.
#[derive(Serialize, JsonSchema)]
struct ProblemFields {
    #[serde(flatten)]
    outcome: Option<JobOutcome>,
    #[serde(flatten)]
    config: Option<RejectedConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
}

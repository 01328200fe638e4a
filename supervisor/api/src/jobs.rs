//! Defines the list of unfinished jobs, which `GET /v1/jobs` returns and `bulkhead jobs` shows. The data plane builds
//! the list in `bulkheads/job_list.rs`. This module contains only types.

use bulkhead_policy::JobProgress;
use bulkhead_shared::Priority;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Text, Word};

/// Response of `GET /v1/jobs`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Jobs {
    /// The oldest jobs that match the request, oldest first.
    pub jobs: Vec<Job>,
    /// Number of jobs that match the request, including jobs that are not listed.
    pub total: u64,
}

/// A job whose client is waiting for the outcome.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Job {
    /// Job ID, in hexadecimal digits.
    pub job: String,
    /// Name of the bulkhead that holds the job. If the job was passed on to a fallback, the name of the fallback.
    pub bulkhead: String,
    /// Progress of the job.
    pub state: Word<JobProgress>,
    /// Milliseconds since the supervisor received the job.
    pub age_ms: f64,
    /// Milliseconds since the job was sent to its current worker. `null` if no worker is running the job.
    pub ran_ms: Option<f64>,
    /// Milliseconds until the job's deadline. For a running job, milliseconds until the deadline or the end of the run
    /// limit, whichever is earlier.
    pub left_ms: f64,
    /// Priority of the job.
    pub priority: Word<Priority>,
    /// Tenant of the job. Empty if the job has no tenant.
    pub tenant: String,
    /// Operation of the job. Empty if the job has no operation.
    pub operation: String,
    /// The client: `pid:` and a process ID, `uid:` and a user ID, `http`, `token`, or `application` for the
    /// application that embeds the supervisor.
    pub client: Text,
    /// Process ID of the worker to which the job was sent.
    pub worker_pid: Option<u32>,
    /// Number of attempts, including the current one.
    pub attempts: u32,
    /// Size of the payload in bytes.
    pub payload_bytes: u64,
    /// Trace ID of the job, if the job is traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

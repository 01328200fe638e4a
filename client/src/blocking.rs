//! The client without async: the same jobs and errors, from any number of threads.
//!
//! ```no_run
//! let client = bulkhead_client::blocking::Client::connect("/run/bulkhead/jobs.sock")?;
//! let reply = client.job("thumbnail", b"...".to_vec()).tenant("acme").send()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::Priority;
use tokio::runtime::Runtime;

use crate::{ConnectError, JobError, Reply};

/// A connection to a supervisor, with a thread of its own that serves it. Clones share both.
#[derive(Clone, Debug)]
pub struct Client {
    runtime: Arc<Runtime>,
    client: crate::Client,
}

impl Client {
    /// Connects to the jobs socket of a supervisor. Must not be called within an async runtime.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let path = path.as_ref();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("bulkhead-client")
            .enable_all()
            .build()
            .map_err(|source| ConnectError::Unreachable {
                path: path.to_owned(),
                hint: "no thread could be started",
                source,
            })?;
        let client = runtime.block_on(crate::Client::connect(path))?;
        Ok(Self { runtime: Arc::new(runtime), client })
    }

    /// Begins a job for a bulkhead.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> Job {
        Job { runtime: self.runtime.clone(), job: self.client.job(bulkhead, payload) }
    }
}

/// A job that is being put together; see [`crate::Job`].
#[must_use = "a job does nothing before it is sent"]
#[derive(Clone, Debug)]
pub struct Job {
    runtime: Arc<Runtime>,
    job: crate::Job,
}

impl Job {
    fn map(self, change: impl FnOnce(crate::Job) -> crate::Job) -> Self {
        Self { runtime: self.runtime, job: change(self.job) }
    }

    /// What the handler is to do; up to 256 bytes.
    pub fn operation(self, name: impl Into<String>) -> Self {
        self.map(|job| job.operation(name))
    }

    /// On whose behalf; up to 256 bytes.
    pub fn tenant(self, name: impl Into<String>) -> Self {
        self.map(|job| job.tenant(name))
    }

    /// How long the job may take, from its receipt to its answer, queue included.
    pub fn deadline(self, limit: Duration) -> Self {
        self.map(|job| job.deadline(limit))
    }

    /// How much the job matters.
    pub fn priority(self, priority: Priority) -> Self {
        self.map(|job| job.priority(priority))
    }

    /// What the job counts against a rate limit.
    pub fn cost(self, cost: u32) -> Self {
        self.map(|job| job.cost(cost))
    }

    /// Whether the job may safely run twice.
    pub fn idempotent(self, is_idempotent: bool) -> Self {
        self.map(|job| job.idempotent(is_idempotent))
    }

    /// A W3C `traceparent`, handed on to the handler.
    pub fn traceparent(self, text: impl Into<String>) -> Self {
        self.map(|job| job.traceparent(text))
    }

    /// Sends the job and waits for its outcome.
    ///
    /// Errors: every outcome but `ok`, and [`JobError::Disconnected`].
    pub fn send(self) -> Result<Reply, JobError> {
        self.runtime.block_on(self.job.send())
    }
}

//! Wraps the async client in blocking functions, with the same jobs and errors. Any number of threads can use a client
//! at the same time. The functions panic if they are called within an async runtime; use [`crate::Client`] there.
//!
//! ```no_run
//! let client = bulkhead_client::blocking::Client::connect("/run/bulkhead/jobs.sock")?;
//! let reply = client.job("thumbnail", b"...".to_vec()).tenant("acme").send()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::Priority;
use tokio::runtime::Runtime;

use crate::{ConnectError, JobError, Progress, Reply};

/// The thread that serves a connection. Dropping this value does not wait for the thread to exit.
#[derive(Debug)]
struct Server(Option<Runtime>);

impl Server {
    fn start() -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("bulkhead-client").enable_all();
        builder.build().map(Some).map(Self)
    }

    fn wait<F: Future>(&self, future: F) -> F::Output {
        match &self.0 {
            Some(runtime) => runtime.block_on(future),
            None => unreachable!("the runtime is taken only when the server is dropped"),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A connection to a supervisor, and the thread that serves the connection. Clones share the connection and
/// the thread.
#[derive(Clone, Debug)]
pub struct Client {
    // Declared first, so that the client is dropped before the thread that serves its connection.
    client: crate::Client,
    server: Arc<Server>,
}

impl Client {
    /// Connects to the jobs socket of a supervisor; see [`crate::Client::connect`].
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let path = path.as_ref();
        let server = Server::start().map_err(|source| ConnectError::Unreachable {
            path: path.to_owned(),
            hint: "failed to start a thread; check the limits on threads and descriptors",
            source,
        })?;
        let client = server.wait(crate::Client::connect(path))?;
        Ok(Self { client, server: Arc::new(server) })
    }

    /// Creates a client for a supervisor in the same process; see [`crate::Client::in_process`]. Returns an
    /// error if the thread that serves the connection cannot be started.
    pub fn in_process(connector: crate::Connector) -> io::Result<Self> {
        let server = Server::start()?;
        let client = server.wait(async { crate::Client::in_process(connector) });
        Ok(Self { client, server: Arc::new(server) })
    }

    /// Sets whether this client's jobs are retried; see [`crate::Client::retry`].
    #[must_use = "the setting applies only to the returned client"]
    pub fn retry(self, retries: bool) -> Self {
        Self { client: self.client.retry(retries), server: self.server }
    }

    /// Sets the maximum time that this client's jobs wait for a lost connection to be re-established; see
    /// [`crate::Client::reconnect_timeout`].
    #[must_use = "the setting applies only to the returned client"]
    pub fn reconnect_timeout(self, limit: Duration) -> Self {
        Self { client: self.client.reconnect_timeout(limit), server: self.server }
    }

    /// Creates a job for `bulkhead`.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> Job {
        Job { job: self.client.job(bulkhead, payload), server: self.server.clone() }
    }
}

/// Builder for a job; see [`crate::Job`].
#[must_use = "a job does nothing until `send` or `start` is called"]
#[derive(Clone, Debug)]
pub struct Job {
    job: crate::Job,
    server: Arc<Server>,
}

/// Defines builder methods that forward to [`crate::Job`].
macro_rules! forward {
    ($($(#[$about:meta])* $name:ident($($argument:ident: $type:ty),*);)*) => {
        impl Job {$(
            $(#[$about])*
            pub fn $name(self, $($argument: $type),*) -> Self {
                Self { job: self.job.$name($($argument),*), server: self.server }
            }
        )*}
    };
}

forward! {
    /// Sets a function that writes the payload; see [`crate::Job::payload_in_place`].
    payload_in_place(bytes: usize, fill: impl Fn(&mut [u8]) + Send + Sync + 'static);

    /// Leaves a large result in the memory file in which it arrived; see [`crate::Job::map_result`]. Read the result
    /// before you drop the client.
    map_result();

    /// Sets the operation that the handler performs. The name has at most 256 bytes; see [`crate::Job::operation`].
    operation(name: impl Into<String>);

    /// Sets the tenant that the job belongs to. The name has at most 256 bytes.
    tenant(name: impl Into<String>);

    /// Sets the time limit of the job; see [`crate::Job::deadline`].
    deadline(limit: Duration);

    /// Sets the maximum run time of each attempt; see [`crate::Job::run_limit`].
    run_limit(limit: Duration);

    /// Sets the priority of the job.
    priority(priority: Priority);

    /// Sets the cost of the job for rate limiting. The default is 1.
    cost(cost: u32);

    /// Declares whether the job can safely run twice; see [`crate::Job::idempotent`].
    idempotent(is_idempotent: bool);

    /// Sets whether [`Job::send`] retries the job after an error; see [`crate::Job::retry`].
    retry(retries: bool);

    /// Sets a W3C `traceparent` to pass to the handler.
    traceparent(text: impl Into<String>);
}

impl Job {
    /// Uses the contents of a file as the payload; see [`crate::Job::payload_file`].
    pub fn payload_file(self, file: std::fs::File) -> io::Result<Self> {
        Ok(Self { job: self.job.payload_file(file)?, server: self.server })
    }

    /// Sends the job and waits for the outcome.
    ///
    /// Returns the same errors as [`crate::Job::send`].
    pub fn send(self) -> Result<Reply, JobError> {
        self.server.wait(self.job.send())
    }

    /// Sends the job and returns a handle to the job's progress and outcome, without waiting for the outcome.
    /// Dropping the handle cancels the job.
    ///
    /// Returns only errors that the client detects before the supervisor replies.
    ///
    /// ```no_run
    /// # let client = bulkhead_client::blocking::Client::connect("/run/bulkhead/jobs.sock")?;
    /// let mut handle = client.job("thumbnail", b"...".to_vec()).start()?;
    /// while let Some(progress) = handle.progress() {
    ///     println!("{:.0} % {}", progress.fraction * 100.0, progress.text);
    /// }
    /// let reply = handle.wait()?;
    /// # drop(reply);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn start(self) -> Result<JobHandle, JobError> {
        let handle = self.server.wait(self.job.start())?;
        Ok(JobHandle { handle, server: self.server })
    }
}

/// Handle to a submitted job; see [`crate::JobHandle`].
#[must_use = "dropping the handle cancels the job"]
#[derive(Debug)]
pub struct JobHandle {
    handle: crate::JobHandle,
    server: Arc<Server>,
}

impl JobHandle {
    /// Waits for the next progress report. Returns `None` when the job has ended.
    pub fn progress(&mut self) -> Option<Progress> {
        self.server.wait(self.handle.progress())
    }

    /// Asks the supervisor to cancel the job; see [`crate::JobHandle::cancel`].
    pub fn cancel(&self) {
        self.handle.cancel();
    }

    /// Asks the supervisor to cancel the job unless the job has begun; see [`crate::JobHandle::cancel_unless_begun`].
    pub fn cancel_unless_begun(&self) {
        self.handle.cancel_unless_begun();
    }

    /// Waits for the outcome.
    ///
    /// Returns the same errors as [`Job::send`].
    pub fn wait(self) -> Result<Reply, JobError> {
        self.server.wait(self.handle)
    }
}

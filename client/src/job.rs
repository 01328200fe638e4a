//! A job that is being put together.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bulkhead_shared::Priority;
use tokio::sync::mpsc;

use crate::answer::{JobError, Reply};
use crate::connection::{Begun, Client};
use crate::handle::JobHandle;
use crate::order::{Order, Source};

/// Progress reports that wait for a slow reader; later ones are dropped.
pub(crate) const PROGRESS_MAX: usize = 16;

/// A job that is being put together. Nothing is sent before [`Job::send`] or [`Job::start`].
#[must_use = "a job does nothing before it is sent"]
#[derive(Clone, Debug)]
pub struct Job {
    client: Client,
    order: Order,
}

impl Client {
    /// Begins a job for a bulkhead.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> Job {
        Job { client: self.clone(), order: Order::new(bulkhead.into(), payload.into()) }
    }
}

/// Reads a file that does not tell its size, from its beginning on.
fn read_whole(file: &File) -> io::Result<Vec<u8>> {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        match file.read_at(&mut piece, bytes.len() as u64) {
            Ok(0) => return Ok(bytes),
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl Job {
    /// Takes the payload from a file, all that is in it now, in place of what [`Client::job`] was given. It is read when
    /// the job is sent, on the thread that sends it: straight into shared memory, where there is some.
    ///
    /// It is an ordinary file: of a pipe, a socket or a device there is no telling how much is in it, which is an error of
    /// the kind `InvalidInput`. One that does not tell its size, as those of `/proc`, is read at once. Errors are those of
    /// `fstat(2)` and `pread(2)`; what cannot be read when the job is sent is refused as `invalid`.
    ///
    /// ```no_run
    /// # async fn example(client: bulkhead_client::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let picture = std::fs::File::open("picture.png")?;
    /// let reply = client.job("thumbnail", []).payload_file(picture)?.send().await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub fn payload_file(mut self, file: File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            let why = "it is no ordinary file, and does not tell how much is in it: read it, and send what was read";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        match usize::try_from(metadata.len()).map_err(io::Error::other)? {
            0 => (self.order.payload, self.order.source) = (read_whole(&file)?, None),
            bytes => self.order.source = Some(Source::File(Arc::new(file), bytes)),
        }
        Ok(self)
    }

    /// Has the payload, of so many bytes, written by a function when the job is sent: straight into shared memory, where
    /// there is some. What the function finds there is of no meaning; it may be called more than once.
    pub fn payload_in_place(
        mut self,
        bytes: usize,
        fill: impl Fn(&mut [u8]) + Send + Sync + 'static,
    ) -> Self {
        self.order.source = Some(Source::Function(Arc::new(fill), bytes));
        self
    }

    /// Leaves a large result where the worker wrote it, as [`Reply::mapped`](crate::Reply::mapped), if it is in shared
    /// memory: the worker may change it while it is read. Without this the result is a copy.
    pub fn map_result(mut self) -> Self {
        self.order.maps_result = true;
        self
    }

    /// What the handler is to do; up to 256 bytes.
    pub fn operation(mut self, name: impl Into<String>) -> Self {
        self.order.operation = name.into();
        self
    }

    /// The tenant; up to 256 bytes.
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.order.tenant = name.into();
        self
    }

    /// How long the job may take, from [`Job::send`] to its outcome, queue included. Without it the
    /// bulkhead's own `deadline` applies; what is more than its `deadline_max` is clamped, see
    /// [`Outcome::deadline`](crate::Outcome::deadline).
    ///
    /// The supervisor keeps the time from the job's receipt on; what the client waited for a connection, or
    /// for room on it, is subtracted before.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.order.deadline = Some(limit);
        self
    }

    /// How long each attempt may run, from the moment when a worker is given the job, whatever it waited before. The
    /// lower of this and the bulkhead's own `run_limit` counts, see [`Outcome::run_limit`](crate::Outcome::run_limit); a
    /// miss is `deadline_exceeded`/`running`. A limit of the client's own never ends a worker that other jobs share.
    ///
    /// A supervisor that is too old for this refuses the job as `invalid`.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = bulkhead_client::Client::connect("jobs.sock").await?;
    /// let job = client.job("thumbnail", "...").deadline(Duration::from_secs(10));
    /// let reply = job.run_limit(Duration::from_millis(200)).send().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_limit(mut self, limit: Duration) -> Self {
        self.order.run_limit = Some(limit);
        self
    }

    /// How much the job matters.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.order.priority = priority;
        self
    }

    /// What the job counts against a rate limit.
    pub fn cost(mut self, cost: u32) -> Self {
        self.order.cost = cost;
        self
    }

    /// Whether the job may safely run twice.
    pub fn idempotent(mut self, is_idempotent: bool) -> Self {
        self.order.is_idempotent = is_idempotent;
        self
    }

    /// A W3C `traceparent`, handed on to the handler.
    pub fn traceparent(mut self, text: impl Into<String>) -> Self {
        self.order.traceparent = Some(text.into());
        self
    }

    /// Sends the job and waits for its outcome. Dropping the future cancels the job.
    ///
    /// Errors: every outcome but `ok`, and [`JobError::Disconnected`].
    ///
    /// ```no_run
    /// # async fn example(client: bulkhead_client::Client) {
    /// match client.job("thumbnail", b"...".to_vec()).send().await {
    ///     Ok(reply) => println!("{} bytes", reply.payload().len()),
    ///     Err(error) if error.is_retryable() => println!("again in {:?}: {error}", error.retry_after()),
    ///     Err(error) => println!("{error}"),
    /// }
    /// # }
    /// ```
    pub async fn send(mut self) -> Result<Reply, JobError> {
        self.order.check()?;
        let mut handle: Option<JobHandle> = None;
        // In one, so that the task is known when the outcome comes, without a second look.
        let result = std::future::poll_fn(|cx| match &mut handle {
            Some(handle) => handle.poll_outcome(cx).map(Ok),
            None => match self.client.begin_now(&mut self.order, &mut None, Some(cx.waker())) {
                Begun::Sent(sent) => {
                    handle = Some(sent);
                    Poll::Pending
                }
                Begun::Refused(error) => Poll::Ready(Ok(Err(error))),
                Begun::Not(broken) => Poll::Ready(Err(broken)),
            },
        });
        match result.await {
            Ok(result) => result,
            // Rare, and not to make every future that sends a job larger.
            Err(broken) => {
                Box::pin(self.client.begin_patiently(&mut self.order, &mut None, broken)).await?.await
            }
        }
    }

    /// Sends the job and returns as soon as it is on its way, with a handle for its progress and its outcome.
    /// Dropping the handle cancels the job.
    ///
    /// Errors: those that need no answer from the supervisor.
    ///
    /// ```no_run
    /// # async fn example(client: bulkhead_client::Client) -> Result<(), bulkhead_client::JobError> {
    /// let mut handle = client.job("thumbnail", b"...".to_vec()).start().await?;
    /// while let Some(progress) = handle.progress().await {
    ///     println!("{:.0} % {}", progress.fraction * 100.0, progress.text);
    /// }
    /// let reply = handle.await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn start(mut self) -> Result<JobHandle, JobError> {
        self.order.check()?;
        let (sender, progress) = mpsc::channel(PROGRESS_MAX);
        let mut handle = self.client.begin(&mut self.order, &mut Some(sender)).await?;
        handle.progress = Some(progress);
        Ok(handle)
    }
}

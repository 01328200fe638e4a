//! [`Job`] builds a job, sends it, and retries it if retries are enabled. `JobRequest` stores the options. The
//! connection sends the job, and sends it again after a lost connection.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bulkhead_shared::{Executed, Priority};
use tokio::sync::mpsc;

use crate::budget::RetryBudget;
use crate::connection::{Client, SubmitAttempt};
use crate::handle::JobHandle;
use crate::job_request::{Deadline, JobRequest, Source};
use crate::reply::{JobError, Reply};

/// Maximum number of unread progress reports per job. Further reports are dropped.
pub(crate) const PROGRESS_MAX: usize = 16;

/// Maximum number of retries of a job; see [`Job::retry`].
const RETRIES_MAX: u32 = 3;

/// Pause before the first retry of a job, unless the supervisor has specified a time. The pause doubles with each
/// retry.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(100);

/// Builder for a job. Nothing is sent until [`Job::send`] or [`Job::start`] is called.
#[must_use = "a job does nothing until `send` or `start` is called"]
#[derive(Clone, Debug)]
pub struct Job {
    client: Client,
    request: JobRequest,
}

impl Client {
    /// Creates a job for `bulkhead`.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> Job {
        let request = JobRequest {
            retries: self.retries,
            reconnect_timeout: self.reconnect_timeout,
            ..JobRequest::new(bulkhead.into(), payload.into())
        };
        Job { client: self.clone(), request }
    }
}

/// Reads a whole file. Ignores the reported size, because files in `/proc` report a size of 0.
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
    /// Uses the contents of a file as the payload, replacing the payload given to [`Client::job`]. This call fixes the
    /// size of the payload. The file is read when the job is sent, on the thread that sends the job, and is read once
    /// more if the job is sent again over another connection. If the client has a memory file, the payload is read
    /// directly into shared memory.
    ///
    /// Only regular files are accepted. Pipes, sockets and devices have no known size and cause an error of
    /// kind `InvalidInput`. Files that report a size of 0, such as those in `/proc`, are read immediately.
    /// Returns the errors of `fstat(2)` and `pread(2)`. If the file cannot be read when the job is sent, the
    /// job is rejected as `invalid`.
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
            let reason = "the payload is not a regular file, so its size is unknown: read the file, and send \
                       the contents";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        match usize::try_from(metadata.len()).map_err(io::Error::other)? {
            0 => (self.request.payload, self.request.source) = (read_whole(&file)?.into(), None),
            bytes => self.request.source = Some(Source::File(Arc::new(file), bytes)),
        }
        Ok(self)
    }

    /// Sets a function that writes a payload of `bytes` bytes. The function runs when the job is sent, and writes
    /// directly into shared memory if the client has a memory file. The initial contents of the buffer are
    /// unspecified. The function can be called more than once. If it panics, the job is rejected as `invalid`.
    pub fn payload_in_place(
        mut self,
        bytes: usize,
        fill: impl Fn(&mut [u8]) + Send + Sync + 'static,
    ) -> Self {
        self.request.source = Some(Source::Function(Arc::new(fill), bytes));
        self
    }

    /// Leaves a large result in the memory file in which it arrived, instead of copying it.
    /// [`Reply::mapped`](crate::Reply::mapped) returns such a result. A misbehaving worker can modify the file while
    /// the client reads it. Results that are not in a memory file are copied as usual.
    pub fn map_result(mut self) -> Self {
        self.request.maps_result = true;
        self
    }

    /// Sets the operation that the handler performs. The name has at most 256 bytes.
    pub fn operation(mut self, name: impl Into<String>) -> Self {
        self.request.options.operation = name.into();
        self
    }

    /// Sets the tenant that the job belongs to. The name has at most 256 bytes.
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.request.options.tenant = name.into();
        self
    }

    /// Sets the time limit of the job, from [`Job::send`] to the outcome, including time in the queue. The default is
    /// the bulkhead's `deadline`. Values above the bulkhead's `deadline_max` are clamped; see
    /// [`Outcome::deadline`](crate::Outcome::deadline).
    ///
    /// The supervisor measures the time from receipt of the job. Before the client sends the job, it subtracts the
    /// time spent waiting for a connection or for space in the send queue, and the time spent on a connection that
    /// was lost. If the supervisor does not respond within 10 s after the deadline, the job ends as
    /// [`JobError::Disconnected`].
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.request.options.deadline = Some(limit);
        self
    }

    /// Sets the maximum run time of each attempt, from dispatch to a worker; time in the queue does not
    /// count. The lower of this limit and the bulkhead's `run_limit` applies; see
    /// [`Outcome::run_limit`](crate::Outcome::run_limit). When the limit is exceeded, the outcome is
    /// `deadline_exceeded`/`running`. A limit set by a client never causes the supervisor to kill a worker
    /// that other jobs share.
    ///
    /// If the supervisor is too old to support run limits, the job is rejected as `invalid`.
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
        self.request.options.run_limit = Some(limit);
        self
    }

    /// Sets the priority of the job.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.request.options.priority = priority;
        self
    }

    /// Sets the cost of the job for rate limiting. The default is 1.
    pub fn cost(mut self, cost: u32) -> Self {
        self.request.options.cost = cost;
        self
    }

    /// Declares whether the job can safely run twice. An idempotent job can run again after its worker has died, and
    /// is sent again after a lost connection, at most three times.
    pub fn idempotent(mut self, is_idempotent: bool) -> Self {
        self.request.options.is_idempotent = is_idempotent;
        self
    }

    /// Sets whether [`Job::send`] retries the job after an error that [is
    /// retryable](crate::JobError::is_retryable). The default is [`Client::retry`](crate::Client::retry).
    /// [`Job::start`] never retries.
    ///
    /// A retry waits for the time that the supervisor [asks for](crate::JobError::retry_after). If the
    /// supervisor specifies no time, the retries wait for 100 ms, 200 ms and 400 ms. A job is retried at most
    /// three times, and never beyond its deadline. In any ten seconds, a client retries at most 20 % of the
    /// jobs for which retries are enabled, but ten retries are always allowed. If there is no further retry,
    /// the last error is returned. If an attempt [may have run](crate::JobError::executed) and later attempts
    /// did not, the error of the attempt that may have run is returned instead.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # async fn example(client: bulkhead_client::Client) -> Result<(), bulkhead_client::JobError> {
    /// let job = client.job("thumbnail", "...").deadline(Duration::from_secs(10));
    /// let reply = job.idempotent(true).retry(true).send().await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub fn retry(mut self, retries: bool) -> Self {
        self.request.retries = retries;
        self
    }

    /// Sets a W3C `traceparent` to pass to the handler.
    pub fn traceparent(mut self, text: impl Into<String>) -> Self {
        self.request.traceparent = Some(text.into());
        self
    }

    /// Sends the job and waits for the outcome. Dropping the future cancels the job.
    ///
    /// Returns an error for every outcome other than `ok`. Returns [`JobError::Disconnected`] if the connection
    /// fails and the job cannot be sent again.
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
        self.request.check()?;
        self.request.begin();
        if self.request.retries {
            return Box::pin(self.send_with_retries()).await;
        }
        self.attempt().await
    }

    async fn attempt(&mut self) -> Result<Reply, JobError> {
        let mut handle: Option<JobHandle> = None;
        // A single future sends the job and waits for the outcome, so that the task's waker is registered
        // when the job is sent.
        let result = std::future::poll_fn(|cx| match &mut handle {
            Some(handle) => handle.poll_outcome(cx).map(Ok),
            None => match self.client.try_submit(&mut self.request, &mut None, Some(cx.waker())) {
                SubmitAttempt::Sent(sent) => {
                    handle = Some(sent);
                    Poll::Pending
                }
                SubmitAttempt::Rejected(error) => Poll::Ready(Ok(Err(error))),
                SubmitAttempt::Waits(broken) => Poll::Ready(Err(broken)),
            },
        });
        let result = match result.await {
            Ok(result) => result,
            Err(broken) => {
                // Boxed because this path is rare and would enlarge the future of every job.
                let mut no_progress = None;
                let sending = self.client.submit_when_connected(&mut self.request, &mut no_progress, broken);
                match Box::pin(sending).await {
                    Ok(sent) => handle.insert(sent).await,
                    Err(error) => Err(error),
                }
            }
        };
        if let Some(request) = handle.as_mut().and_then(JobHandle::take_request) {
            self.request = *request;
        }
        result
    }

    /// Sends the job, with retries if they are enabled; see [`Job::retry`].
    async fn send_with_retries(mut self) -> Result<Reply, JobError> {
        self.client.with_budget(RetryBudget::job);
        // Keeps a copy of the deadline, because the request is lost if the deadline passes while the client is
        // reconnecting.
        let deadline = self.request.deadline;
        let ran = |error: &JobError| error.executed() != Executed::No;
        let mut reported: Option<JobError> = None;
        let mut backoff = RETRY_PAUSE_MIN;
        let mut retries = 0;
        loop {
            let error = match self.attempt().await {
                Ok(reply) => return Ok(reply),
                Err(error) => error,
            };
            let pause = error.retry_after().unwrap_or(backoff);
            let until = Instant::now().checked_add(pause);
            let fits = |deadline: Deadline| until.is_some_and(|until| until < deadline.at);
            let is_retried = retries < RETRIES_MAX
                && error.is_retryable()
                && deadline.is_none_or(fits)
                && self.client.with_budget(RetryBudget::try_retry);
            // Keeps the error of an attempt that may have run. The error of a later attempt that did not run would hide
            // the fact that the job may have run.
            let error = match reported.take() {
                Some(earlier) if ran(&earlier) && !ran(&error) => earlier,
                _ => error,
            };
            if !is_retried {
                return Err(error);
            }
            reported = Some(error);
            tokio::time::sleep(pause).await;
            retries += 1;
            backoff *= 2;
            self.request.begin_again();
        }
    }

    /// Sends the job and returns a handle to the job's progress and outcome, without waiting for the outcome.
    /// Dropping the handle cancels the job.
    ///
    /// Returns only errors that the client detects before the supervisor replies.
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
        self.request.check()?;
        self.request.begin();
        self.request.retries = false;
        let (sender, progress) = mpsc::channel(PROGRESS_MAX);
        let mut handle = self.client.submit(&mut self.request, &mut Some(sender)).await?;
        handle.progress = Some(progress);
        Ok(handle)
    }
}

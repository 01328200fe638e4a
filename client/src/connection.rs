//! Defines the [`Client`], and the task that serves the client's connection and reconnects after a loss. `requests`
//! keeps the pending jobs of one connection and handles the frames. `job` decides about retries.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use bulkhead_shared::Executed;
use bulkhead_shared::client_protocol::{
    ClientWelcome, Hello, PROTOCOL_VERSION, Refused, client_capability, role,
};
use bulkhead_shared::codec;
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::in_process;
use bulkhead_shared::limits::{FRAME_OVERHEAD_BYTES_MAX, PAYLOAD_BYTES_CEILING};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use crate::budget::RetryBudget;
use crate::handle::JobHandle;
use crate::job_request::{JobRequest, RECONNECT_TIMEOUT};
use crate::reply::{JobError, Progress};
use crate::requests::{Frames, QueuePosition, Requests, SubmitError};
use crate::transport::Transport;

/// Maximum time to wait for the supervisor to accept the connection. The wait for the welcome frame has the same
/// limit.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum interval between checks for jobs that have waited too long for the client to reconnect.
const OVERDUE_CHECK_INTERVAL_MIN: Duration = Duration::from_millis(5);

/// Pause before the second attempt to reconnect. The pause doubles after each attempt, up to
/// [`RECONNECT_PAUSE_MAX`]. A connection that lasts at least [`RECONNECT_PAUSE_MAX`] resets the pause.
const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(10);
const RECONNECT_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Maximum size of a frame that this client accepts, in bytes, not counting the header. The client announces
/// this limit to the supervisor, and closes the connection if a frame is larger. No bulkhead can be
/// configured to send larger frames.
const FRAME_BYTES_MAX: u32 = PAYLOAD_BYTES_CEILING as u32 + (FRAME_OVERHEAD_BYTES_MAX - HEADER_BYTES) as u32;

/// Maximum number of reads before yielding to other tasks of the runtime.
const READS_PER_POLL_MAX: usize = 16;

/// Time for which the client keeps reading after a failed write, because the supervisor may have sent a reason before
/// it closed the connection.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// Error returned when a client cannot connect.
#[derive(thiserror::Error)]
pub enum ConnectError {
    /// The socket could not be opened.
    #[error("failed to connect to {}: {hint}: {source}", path.display())]
    Unreachable {
        /// Path of the socket.
        path: PathBuf,
        /// Suggested fix.
        hint: &'static str,
        /// Error from the operating system.
        source: io::Error,
    },
    /// The supervisor refused this client.
    #[error("failed to connect to {}: the supervisor rejected the connection: {message}", path.display())]
    Refused {
        /// Path of the socket.
        path: PathBuf,
        /// Reason given by the supervisor.
        message: String,
        /// Code of a [`bulkhead_shared::RejectReason`].
        reason: u8,
    },
    /// The peer does not speak the protocol.
    #[error("failed to complete the handshake with the supervisor at {}: {message}", path.display())]
    Protocol {
        /// Path of the socket.
        path: PathBuf,
        /// Description of the violation.
        message: String,
    },
}

bulkhead_shared::debug_by_display!(ConnectError);

/// A connection to a supervisor. Clones share the connection. A client must be used within the tokio runtime
/// in which it was created.
///
/// The connection closes when all clones, all [`Job`](crate::Job)s and all [`JobHandle`]s have been dropped.
/// Jobs can therefore outlive the client that created them. While a [mapped result](crate::Reply::mapped) exists, the
/// connection stays open for up to five more seconds.
///
/// When the connection is lost, the client sends two kinds of jobs again over the next connection: jobs that were
/// not sent completely, and [idempotent](crate::Job::idempotent) jobs. All other jobs end as
/// [`JobError::Disconnected`] with `executed: unknown`.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    /// Default for [`Job::retry`](crate::Job::retry).
    pub(crate) retries: bool,
    /// Maximum time that jobs wait for the client to reconnect, if the caller has set one.
    pub(crate) reconnect_timeout: Option<Duration>,
}

/// A function that opens connections to a supervisor in the same process. An error of kind `NotConnected`
/// means that the supervisor has stopped permanently.
pub type Connector = Arc<dyn Fn() -> io::Result<in_process::Endpoint> + Send + Sync>;

/// Location of the supervisor.
#[derive(Clone)]
enum Target {
    /// The supervisor listens on a jobs socket.
    Path(PathBuf),
    /// The supervisor runs in this process.
    InProcess(Connector),
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Target {
    fn path(&self) -> PathBuf {
        match self {
            Self::Path(path) => path.clone(),
            Self::InProcess(_) => IN_PROCESS.into(),
        }
    }

    /// Formats the location for messages, in which the location follows the words "the supervisor".
    fn describe(&self) -> String {
        match self {
            Self::Path(path) => format!("at {}", path.display()),
            Self::InProcess(_) => IN_PROCESS.to_owned(),
        }
    }

    /// Returns a message saying that the supervisor is not reachable.
    fn problem(&self, reason: &str) -> String {
        format!("the supervisor {} is not reachable ({reason})", self.describe())
    }
}

/// Location of an in-process supervisor, shown in messages in place of a socket path.
const IN_PROCESS: &str = "in this process";

#[derive(Debug)]
struct Shared {
    target: Target,
    current: watch::Receiver<Connection>,
    /// Notified when a job cannot be sent because there is no connection.
    needed: Arc<Notify>,
    /// Budget for retries.
    budget: Mutex<RetryBudget>,
    /// Time at which the client was created. Times in the retry budget are relative to this instant.
    created: Instant,
}

/// Result of an attempt to send a job immediately.
pub(crate) enum SubmitAttempt {
    Sent(JobHandle),
    Rejected(JobError),
    /// The job must wait until there is a connection, or space in the send queue. Contains the current connection if
    /// it is broken and must not be used again.
    Waits(Option<Arc<Requests>>),
}

#[derive(Debug)]
enum Connection {
    Up(Arc<Requests>),
    Down(Loss),
}

/// A lost connection that has not been replaced yet.
#[derive(Clone, Debug)]
struct Loss {
    since: Instant,
    /// Number of failed attempts to reconnect.
    attempts: u64,
    /// Human-readable reason why there is no connection.
    reason: String,
    /// True if the client will not reconnect.
    is_final: bool,
}

impl Loss {
    fn now(reason: &str) -> Self {
        Self { since: Instant::now(), attempts: 0, reason: reason.to_owned(), is_final: false }
    }
}

impl Client {
    /// Connects to the jobs socket of a supervisor. Error messages suggest a fix.
    ///
    /// If the connection is lost, the client reconnects automatically, with pauses of up to a second between
    /// attempts. Until then, jobs with a [deadline](crate::Job::deadline) wait until their deadline. Jobs without
    /// a deadline wait until five seconds after the loss. A job without a deadline that is submitted later
    /// triggers another attempt to reconnect, and waits for the result of that attempt.
    /// [`Client::reconnect_timeout`] sets another limit for all jobs.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let target = Target::Path(path.as_ref().to_owned());
        let requests = open(&target).await?;
        let (client, served) = Self::of(target, Some(requests));
        tokio::spawn(served);
        Ok(client)
    }

    /// Creates a client for a supervisor in the same process. The supervisor serves the other endpoint of
    /// each connection that `connector` opens; see `Supervisor::client` of `bulkhead-supervisor`. The client
    /// connects in the background, and jobs wait for the connection. In all other respects the client behaves
    /// as with [`Client::connect`]. Must be called within a tokio runtime.
    pub fn in_process(connector: Connector) -> Self {
        let (client, served) = Self::in_process_served_by(connector);
        tokio::spawn(served);
        client
    }

    /// Creates a client for a supervisor in the same process. Also returns a future that serves the client's
    /// connection and must be polled within a tokio runtime.
    pub fn in_process_served_by(connector: Connector) -> (Self, impl Future<Output = ()> + Send + 'static) {
        Self::of(Target::InProcess(connector), None)
    }

    /// Creates a client, and the future that serves its connection.
    fn of(target: Target, requests: Option<Arc<Requests>>) -> (Self, impl Future<Output = ()> + Send) {
        let down = || Connection::Down(Loss::now("the client is not connected yet"));
        let (sender, current) = watch::channel(requests.clone().map_or_else(down, Connection::Up));
        let needed = Arc::<Notify>::default();
        let driver = Driver {
            target: target.clone(),
            requests,
            retired: Vec::new(),
            closed_after_goaway: Arc::default(),
            current: sender,
            needed: needed.clone(),
        };
        let shared =
            Arc::new(Shared { target, current, needed, budget: Mutex::default(), created: Instant::now() });
        (Self { shared, retries: false, reconnect_timeout: None }, driver.run())
    }

    /// Sets the default for [`Job::retry`](crate::Job::retry) for this client's jobs. Other clones of the
    /// client keep their setting. All clones share one retry budget.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = bulkhead_client::Client::connect("jobs.sock").await?.retry(true);
    /// let reply = client.job("thumbnail", "...").send().await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "the setting applies only to the returned client"]
    pub fn retry(mut self, retries: bool) -> Self {
        self.retries = retries;
        self
    }

    /// Sets the maximum time that this client's jobs wait for a lost connection to be re-established. Jobs still end at
    /// their deadline. If the time is zero, jobs end when the connection is lost, and no job is sent again. Only jobs
    /// that a supervisor being replaced has not accepted still wait up to five seconds for the new supervisor. Other
    /// clones of the client keep their setting.
    #[must_use = "the setting applies only to the returned client"]
    pub fn reconnect_timeout(mut self, limit: Duration) -> Self {
        self.reconnect_timeout = Some(limit);
        self
    }

    /// Calls `use_budget` with the retry budget and the current time. All clones of the client share the budget.
    pub(crate) fn with_budget<T>(&self, use_budget: impl FnOnce(&mut RetryBudget, Duration) -> T) -> T {
        let now = self.shared.created.elapsed();
        use_budget(&mut self.shared.budget.lock().unwrap_or_else(PoisonError::into_inner), now)
    }

    /// Sends a job. If necessary, first waits for a connection or for space in the send queue. The job's progress
    /// reports are sent to `progress`.
    pub(crate) async fn submit(
        &self,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
    ) -> Result<JobHandle, JobError> {
        match self.try_submit(job, progress, None) {
            SubmitAttempt::Sent(handle) => Ok(handle),
            SubmitAttempt::Rejected(error) => Err(error),
            SubmitAttempt::Waits(broken) => Box::pin(self.submit_when_connected(job, progress, broken)).await,
        }
    }

    /// Sends a job if no wait is necessary. `waker` is called when the outcome arrives.
    pub(crate) fn try_submit(
        &self,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
        waker: Option<&Waker>,
    ) -> SubmitAttempt {
        let Some(requests) = self.shared.connected() else { return SubmitAttempt::Waits(None) };
        match requests.submit(job, progress, waker) {
            Ok(sent) => SubmitAttempt::Sent(JobHandle::new(sent)),
            Err(SubmitError::Rejected(error)) => SubmitAttempt::Rejected(error),
            Err(SubmitError::Full) => SubmitAttempt::Waits(None),
            Err(SubmitError::Closed) => SubmitAttempt::Waits(Some(requests)),
        }
    }

    /// Waits for a connection other than `broken` that has space for the job, and sends the job. Subtracts the
    /// waiting time from the job's deadline.
    pub(crate) async fn submit_when_connected(
        &self,
        job: &mut JobRequest,
        progress: &mut Option<mpsc::Sender<Progress>>,
        mut broken: Option<Arc<Requests>>,
    ) -> Result<JobHandle, JobError> {
        let deadline = job.deadline.map(|deadline| Instant::from_std(deadline.at));
        loop {
            let requests = self.wait_for_connection(broken.as_ref(), job).await?;
            let mut position = requests.queue();
            let mut space = pin!(requests.space.notified());
            // Registers for notifications before the first attempt, so that no notification is missed.
            space.as_mut().enable();
            loop {
                job.update_remaining()?;
                match position.submit(job, progress) {
                    Ok(sent) => return Ok(JobHandle::new(sent)),
                    Err(SubmitError::Rejected(error)) => return Err(error),
                    Err(SubmitError::Full) => {}
                    Err(SubmitError::Closed) => break,
                }
                match deadline {
                    // The next iteration of the loop checks the deadline.
                    Some(at) => drop(tokio::time::timeout_at(at, space.as_mut()).await),
                    None => space.as_mut().await,
                }
                space.set(requests.space.notified());
                space.as_mut().enable();
            }
            broken = Some(requests.clone());
        }
    }

    /// Waits for a connection other than `broken`. If the time limit for reconnecting has already passed, waits only
    /// for one more attempt to connect.
    async fn wait_for_connection(
        &self,
        broken: Option<&Arc<Requests>>,
        job: &JobRequest,
    ) -> Result<Arc<Requests>, JobError> {
        let mut current = self.shared.current.clone();
        let is_replacement = |connection: &Connection| match connection {
            Connection::Up(requests) => broken.is_none_or(|broken| !Arc::ptr_eq(broken, requests)),
            Connection::Down(_) => false,
        };
        let loss = match &*current.borrow() {
            Connection::Up(_) => None,
            Connection::Down(loss) => Some(loss.clone()),
        };
        let since = loss.as_ref().map_or_else(Instant::now, |loss| loss.since);
        let limit = job.reconnect_limit().and_then(|limit| since.checked_add(limit));
        let has_timed_out = limit.is_some_and(|limit| limit <= Instant::now());
        let limit = if has_timed_out { Some(Instant::now() + RECONNECT_TIMEOUT) } else { limit };
        let deadline = job.deadline.map(|deadline| Instant::from_std(deadline.at));
        let attempts_before = loss.map_or(0, |loss| loss.attempts);
        let is_usable = |connection: &Connection| match connection {
            Connection::Up(_) => is_replacement(connection),
            Connection::Down(loss) => loss.is_final || has_timed_out && loss.attempts > attempts_before,
        };
        self.shared.needed.notify_one();
        // If the driver has been dropped, the wait ends immediately.
        let wait = current.wait_for(is_usable);
        match limit.into_iter().chain(deadline).min() {
            Some(until) => drop(tokio::time::timeout_at(until, wait).await),
            None => drop(wait.await),
        }
        let found = current.borrow();
        match &*found {
            Connection::Up(requests) if is_replacement(&found) => Ok(requests.clone()),
            Connection::Up(_) => Err(self.unreachable("the connection was lost a moment ago")),
            Connection::Down(loss) if loss.is_final => Err(JobError::Disconnected {
                executed: Executed::No,
                message: format!("{}; the job was not sent", loss.reason),
            }),
            Connection::Down(loss) => Err(self.unreachable(&loss.reason)),
        }
    }

    fn unreachable(&self, reason: &str) -> JobError {
        JobError::unreachable(Executed::No, &self.shared.target.problem(reason))
    }
}

impl Shared {
    fn connected(&self) -> Option<Arc<Requests>> {
        match &*self.current.borrow() {
            Connection::Up(requests) => Some(requests.clone()),
            Connection::Down(_) => None,
        }
    }
}

/// Opens a connection to the supervisor and performs the handshake.
async fn open(target: &Target) -> Result<Arc<Requests>, ConnectError> {
    let path = &target.path();
    let connected = match target {
        Target::Path(path) => connect(path).await.map(Transport::Socket),
        Target::InProcess(connector) => connector().map(Transport::InProcess),
    };
    let transport = connected.map_err(|source| {
        let hint = match source.kind() {
            _ if matches!(target, Target::InProcess(_)) => "the supervisor did not accept the client",
            io::ErrorKind::NotFound => "the socket does not exist; is the supervisor running?",
            io::ErrorKind::ConnectionRefused => {
                "no process is listening on the socket; is the supervisor running?"
            }
            io::ErrorKind::PermissionDenied => {
                "this user has no access to the socket; see `socket_mode` and `[[access]]` in workers.toml"
            }
            io::ErrorKind::WouldBlock => "too many clients are waiting to be accepted; try again later",
            _ => "the socket cannot be opened; check that the path is correct",
        };
        ConnectError::Unreachable { path: path.to_owned(), hint, source }
    })?;
    let protocol = |message: String| ConnectError::Protocol { path: path.to_owned(), message };
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(&transport)).await {
        Err(_) => {
            let message = format!("the supervisor did not send a welcome frame within {HANDSHAKE_TIMEOUT:?}");
            Err(protocol(message))
        }
        Ok(Err(HandshakeError::Protocol(message))) => Err(protocol(message)),
        Ok(Err(HandshakeError::Refused { reason, message })) => {
            Err(ConnectError::Refused { path: path.to_owned(), message, reason })
        }
        Ok(Ok((bytes_max, capabilities))) => Ok(Arc::new(Requests::new(transport, bytes_max, capabilities))),
    }
}

/// Connects to a Unix socket. Retries on `WouldBlock`, which means that the socket's backlog is full.
async fn connect(path: &Path) -> io::Result<UnixStream> {
    let until = Instant::now() + HANDSHAKE_TIMEOUT;
    let mut pause = RECONNECT_PAUSE_MIN;
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RECONNECT_PAUSE_MAX);
            }
            result => return result,
        }
    }
}

enum HandshakeError {
    Refused { reason: u8, message: String },
    Protocol(String),
}

impl From<String> for HandshakeError {
    fn from(message: String) -> Self {
        Self::Protocol(message)
    }
}

/// Performs the handshake. Returns the maximum size, in bytes, of a frame that the supervisor accepts, and
/// the supervisor's capabilities.
async fn handshake(transport: &Transport) -> Result<(u32, u64), HandshakeError> {
    let text = |error: &dyn std::fmt::Display| HandshakeError::Protocol(error.to_string());
    let hello = Hello {
        version_min: PROTOCOL_VERSION,
        version_max: PROTOCOL_VERSION,
        role: role::CLIENT,
        frame_bytes_max: FRAME_BYTES_MAX,
        capabilities: client_capability::GOAWAY,
        name: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
    };
    let mut outbox = Outbox::default();
    outbox.push(kind::HELLO, MAGIC, &hello, &[], Payload::NONE).map_err(|error| text(&error))?;
    // Ignores errors, because a supervisor that refuses the client may have closed the connection already.
    // The reason for the refusal can still be read.
    let _ = transport.flush(&mut outbox, &mut BufferPool::default());
    let (mut inbox, mut scratch) = (Inbox::default(), Scratch::with_read_bytes(4096));
    loop {
        transport.readable().await.map_err(|error| text(&error))?;
        let read = transport.try_io(Interest::READABLE, || {
            let (received, mut batch) =
                inbox.receive_by(&mut scratch, |buffer| transport.receive(buffer, None))?;
            let item = batch.next().map_err(io::Error::other)?;
            let answer = match item {
                Some(Item::Frame { header, metadata, .. } | Item::Announced { header, metadata }) => {
                    Some((header.kind, metadata.to_vec()))
                }
                Some(Item::Large { .. }) | None => None,
            };
            match (answer, received) {
                (None, Received::Drained) => Err(io::ErrorKind::WouldBlock.into()),
                other => Ok(other),
            }
        });
        let (answer, received) = match read {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            other => other.map_err(|error| text(&error))?,
        };
        match answer {
            Some((kind::CLIENT_WELCOME, metadata)) => {
                let (welcome, _) =
                    codec::decode::<ClientWelcome<'_>>(&metadata, &[]).map_err(|error| text(&error))?;
                if welcome.version != PROTOCOL_VERSION {
                    return Err(format!(
                        "the supervisor chose protocol version {}, but this client supports only \
                         version {PROTOCOL_VERSION}",
                        welcome.version
                    )
                    .into());
                }
                return Ok((welcome.frame_bytes_max, welcome.capabilities));
            }
            Some((kind::REFUSED, metadata)) => {
                let (refused, _) =
                    codec::decode::<Refused<'_>>(&metadata, &[]).map_err(|error| text(&error))?;
                let (reason, message) = (refused.reason, refused.message.to_owned());
                return Err(HandshakeError::Refused { reason, message });
            }
            Some((kind, _)) => {
                return Err(
                    format!("the supervisor sent a frame of kind {kind} instead of a welcome frame").into()
                );
            }
            None if received == Received::Closed => {
                return Err("the supervisor closed the connection before the welcome frame"
                    .to_owned()
                    .into());
            }
            None => {}
        }
    }
}

/// Task that serves a client's connection, and reconnects when the connection is lost. Ends when the client has been
/// dropped and no job is left, or when an in-process supervisor has stopped permanently.
struct Driver {
    target: Target,
    /// The current connection. `None` while the client is not connected.
    requests: Option<Arc<Requests>>,
    /// Connections that accept no further jobs but have pending jobs. Oldest first. Jobs of a lost connection are
    /// waiting to be sent over the next connection. After GOAWAY, the supervisor still finishes accepted jobs.
    retired: Vec<Arc<Requests>>,
    /// Notified when a connection that received GOAWAY has closed. From then on, the jobs of this connection that can
    /// be sent again wait for the next connection.
    closed_after_goaway: Arc<Notify>,
    current: watch::Sender<Connection>,
    needed: Arc<Notify>,
}

impl Driver {
    async fn run(mut self) {
        let mut pause = Duration::ZERO;
        loop {
            if let Some(requests) = self.requests.clone() {
                let began = Instant::now();
                // Takes the first place in the queue before the connection is announced. Jobs of the lost connection
                // are therefore sent before the jobs of waiting callers.
                let mut first_place = self.has_detached_jobs().then(|| requests.queue());
                self.current.send_replace(Connection::Up(requests.clone()));
                let mut serving = Box::pin(serve(requests.clone()));
                let message = loop {
                    tokio::select! {
                        message = &mut serving => break Some(message),
                        () = requests.leaving() => break None,
                        () = self.end_overdue_until_close() => {
                            self.forget_finished();
                            if first_place.is_none() && self.has_detached_jobs() {
                                first_place = Some(requests.queue());
                            }
                        }
                        () = self.send_again(&mut first_place), if first_place.is_some() => {
                            first_place = None;
                            self.forget_finished();
                        }
                        () = self.wait_until_unused() => return,
                    }
                };
                if began.elapsed() >= RECONNECT_PAUSE_MAX {
                    pause = Duration::ZERO;
                }
                match message {
                    Some(message) => self.disconnect(&message, self.can_reconnect()),
                    None => {
                        pause = Duration::ZERO;
                        self.leave(serving);
                    }
                }
            }
            let reconnected = {
                let mut reconnect = pin!(self.reconnect(&mut pause));
                loop {
                    tokio::select! {
                        requests = &mut reconnect => break requests,
                        () = self.end_overdue_until_close() => {}
                        () = self.wait_until_unused() => return,
                    }
                }
            };
            let Some(reconnected) = reconnected else { return };
            self.forget_finished();
            self.requests = Some(reconnected);
        }
    }

    /// Waits until all handles that can submit jobs have been dropped and all connections are idle.
    async fn wait_until_unused(&self) {
        self.current.closed().await;
        // Waits for the retired connections first, because their jobs can move to the current connection.
        for requests in self.retired.iter().chain(&self.requests) {
            requests.idle().await;
        }
    }

    /// Returns true if any job is waiting to be sent over another connection.
    fn has_detached_jobs(&self) -> bool {
        self.retired.iter().any(|retired| retired.has_detached_jobs())
    }

    /// Removes retired connections that have no pending jobs.
    fn forget_finished(&mut self) {
        self.retired.retain(|retired| retired.has_pending_jobs());
    }

    /// Returns true if jobs on a lost connection can be sent again over a new connection. An in-process supervisor that
    /// has stopped is never replaced.
    fn can_reconnect(&self) -> bool {
        matches!(self.target, Target::Path(_))
    }

    /// Closes the connection. Marks the connection as lost before the pending jobs get an error, so that a
    /// caller that retries immediately does not use the broken connection. If `is_replaced` is true, jobs
    /// that can be sent again wait for the next connection.
    fn disconnect(&mut self, message: &str, is_replaced: bool) {
        self.current.send_replace(Connection::Down(Loss::now(message)));
        if let Some(requests) = self.requests.take() {
            requests.close(message, is_replaced);
            self.retired.push(requests);
        }
    }

    /// Handles GOAWAY. The connection stays open until it is idle. Jobs submitted in the meantime wait for a new
    /// connection.
    fn leave(&mut self, serving: impl Future<Output = String> + Send + Unpin + 'static) {
        self.current.send_replace(Connection::Down(Loss::now("the supervisor is being replaced")));
        let Some(requests) = self.requests.take() else { return };
        self.retired.push(requests.clone());
        let has_closed = self.closed_after_goaway.clone();
        tokio::spawn(async move {
            let message = tokio::select! {
                message = serving => message,
                () = requests.idle() => "the last job has ended".to_owned(),
            };
            requests.close(&message, true);
            has_closed.notify_one();
        });
    }

    /// Resends the jobs of retired connections over the current connection. Never returns if the current connection
    /// is unusable.
    async fn send_again(&self, place: &mut Option<QueuePosition<'_>>) {
        let Some(place) = place else { return };
        for retired in &self.retired {
            if !retired.move_jobs(place).await {
                std::future::pending().await
            }
        }
    }

    /// Fails jobs that have waited too long for a connection, until a connection that received GOAWAY has closed.
    async fn end_overdue_until_close(&self) {
        let mut has_closed = pin!(self.closed_after_goaway.notified());
        loop {
            let first = self.retired.iter().filter_map(|retired| retired.first_wait_ends()).min();
            let Some(first) = first else { return has_closed.await };
            let earliest = Instant::now() + OVERDUE_CHECK_INTERVAL_MIN;
            tokio::select! {
                () = tokio::time::sleep_until(Instant::from_std(first).max(earliest)) => {}
                () = &mut has_closed => return,
            }
            let problem = match &*self.current.borrow() {
                Connection::Down(loss) => self.target.problem(&loss.reason),
                Connection::Up(_) => "too many jobs are waiting to be sent again".to_owned(),
            };
            self.retired.iter().for_each(|retired| retired.end_overdue(&problem));
        }
    }

    /// Attempts to reconnect until an attempt succeeds. Returns `None` if the supervisor has stopped permanently.
    async fn reconnect(&self, pause: &mut Duration) -> Option<Arc<Requests>> {
        loop {
            tokio::select! {
                () = tokio::time::sleep(*pause) => {}
                () = self.wait_until_needed() => {}
            }
            *pause = (*pause * 2).clamp(RECONNECT_PAUSE_MIN, RECONNECT_PAUSE_MAX);
            match open(&self.target).await {
                Ok(requests) => return Some(requests),
                Err(ConnectError::Unreachable { source, .. }) if self.has_ended(&source) => {
                    let reason = format!("the supervisor {IN_PROCESS} has stopped");
                    let loss = Loss { is_final: true, ..Loss::now(&reason) };
                    self.current.send_replace(Connection::Down(loss));
                    return None;
                }
                Err(error) => self.current.send_modify(|current| {
                    if let Connection::Down(loss) = current {
                        loss.attempts += 1;
                        loss.reason = error.to_string();
                    }
                }),
            }
        }
    }

    /// Returns true if this error means that the supervisor has stopped permanently.
    fn has_ended(&self, error: &io::Error) -> bool {
        matches!(self.target, Target::InProcess(_)) && error.kind() == io::ErrorKind::NotConnected
    }

    /// Waits until a caller needs a connection, but at least for [`RECONNECT_PAUSE_MIN`].
    async fn wait_until_needed(&self) {
        tokio::time::sleep(RECONNECT_PAUSE_MIN).await;
        self.needed.notified().await;
    }
}

impl Drop for Driver {
    /// Fails the pending jobs. Otherwise, callers outside the async runtime could wait forever for outcomes.
    fn drop(&mut self) {
        // If the supervisor has stopped permanently, the pending jobs already have an error.
        if matches!(&*self.current.borrow(), Connection::Down(loss) if loss.is_final) {
            return;
        }
        const REASON: &str = "the async runtime that served the connection has shut down";
        self.retired.iter().for_each(|retired| retired.close(REASON, false));
        self.disconnect(REASON, false);
    }
}

/// Reads and writes frames, and ends unanswered jobs, until the connection closes. Returns the reason for the closure.
async fn serve(requests: Arc<Requests>) -> String {
    tokio::select! {
        // Reads outcomes that have arrived before checking for jobs without outcomes, because the runtime may have
        // been blocked for a while.
        biased;
        message = read(&requests) => message,
        message = write(&requests) => message,
        never = requests.end_unanswered() => never,
    }
}

async fn read(requests: &Arc<Requests>) -> String {
    let mut inbox = Inbox::default();
    let mut scratch = Scratch::default();
    loop {
        if let Err(error) = requests.transport.readable().await {
            return error.to_string();
        }
        let mut has_more = true;
        for _ in 0..READS_PER_POLL_MAX {
            match read_once(requests, &mut inbox, &mut scratch) {
                Ok(Received::More) => {}
                Ok(Received::Drained) => {
                    has_more = false;
                    break;
                }
                Ok(Received::Closed) if inbox.is_mid_frame() => {
                    return "the supervisor closed the connection in the middle of a frame".to_owned();
                }
                Ok(Received::Closed) => return "the supervisor closed the connection".to_owned(),
                Err(message) => return message,
            }
        }
        if has_more {
            tokio::task::yield_now().await;
        }
    }
}

async fn write(requests: &Requests) -> String {
    loop {
        requests.flush_due.notified().await;
        // Yields, so that other tasks that are ready can add their frames to this write.
        tokio::task::yield_now().await;
        loop {
            // Flushes within `try_io`, because only `try_io` clears tokio's readiness correctly if the socket
            // has become writable in the meantime.
            let written = requests.transport.try_io(Interest::WRITABLE, || match requests.flush() {
                Ok(true) => Ok(()),
                Ok(false) => Err(io::ErrorKind::WouldBlock.into()),
                Err(error) => Err(error),
            });
            match written {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Err(error) = requests.transport.writable().await {
                        return error.to_string();
                    }
                }
                Err(error) => {
                    // Gives `read` time to return a better reason, such as a message that the supervisor sent before
                    // closing the connection.
                    tokio::time::sleep(CLOSE_REASON_TIMEOUT).await;
                    return error.to_string();
                }
            }
        }
    }
}

fn read_once(requests: &Arc<Requests>, inbox: &mut Inbox, scratch: &mut Scratch) -> Result<Received, String> {
    let mut problem = None;
    let read = requests.transport.try_io(tokio::io::Interest::READABLE, || {
        let mut may_have_more = false;
        let is_storing = inbox.is_storing();
        let (received, mut batch) = inbox.receive_by(scratch, |buffer| {
            let count = requests.receive(buffer, &mut may_have_more)?;
            requests.large_reads.fetch_add(u64::from(is_storing), Ordering::Relaxed);
            Ok(count)
        })?;
        let mut frames = Frames::new(requests);
        loop {
            let result = match batch.next() {
                Ok(None) => break,
                Ok(Some(Item::Frame { header, metadata, payload })) => {
                    frames.handle(header, metadata, payload.to_vec())
                }
                Ok(Some(Item::Large { header, metadata, payload })) => {
                    frames.handle(header, &metadata, payload)
                }
                Ok(Some(Item::Announced { header, metadata })) => {
                    match announced(&mut frames, header, metadata) {
                        Ok(Some(buffer)) => {
                            batch.accept(buffer);
                            Ok(())
                        }
                        other => other.map(drop),
                    }
                }
                Err(error) => Err(error.to_string()),
            };
            if let Err(message) = result {
                problem = Some(message);
                break;
            }
        }
        match received {
            // Makes tokio wait until more bytes arrive.
            Received::Drained if !may_have_more => Err(io::ErrorKind::WouldBlock.into()),
            other => Ok(other),
        }
    });
    if let Some(message) = problem {
        return Err(message);
    }
    match read {
        Ok(received) => Ok(received),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Drained),
        Err(error) => Err(error.to_string()),
    }
}

/// Handles the announcement of a large frame. Returns a buffer for the payload, or `None` if the payload is to be
/// discarded as it arrives.
fn announced(frames: &mut Frames<'_>, header: Header, metadata: &[u8]) -> Result<Option<Vec<u8>>, String> {
    if header.length > FRAME_BYTES_MAX {
        let length = header.length;
        return Err(format!(
            "the supervisor announced a frame of {length} bytes, but this client accepts at most \
             {FRAME_BYTES_MAX}"
        ));
    }
    if header.kind == kind::OUTCOME {
        return Ok(frames.buffer_for(header));
    }
    frames.handle(header, metadata, Vec::new())?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use bulkhead_shared::Verdict;
    use bulkhead_shared::client_protocol::OutcomeMessage;

    use super::*;
    use crate::job_request::Deadline;
    use crate::reply::OUTCOME_MARGIN;
    use crate::requests::PendingOutcome;

    /// Creates a [`Requests`] value, and the supervisor's end of the connection.
    fn connected() -> (Arc<Requests>, std::os::unix::net::UnixStream) {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        here.set_nonblocking(true).unwrap();
        let transport = Transport::Socket(UnixStream::from_std(here).unwrap());
        (Arc::new(Requests::new(transport, 1 << 20, 0)), there)
    }

    /// Submits a job. With a deadline, the client stops waiting for the outcome after a second.
    fn submit(requests: &Arc<Requests>, has_deadline: bool) -> PendingOutcome {
        let mut job = JobRequest::new("resize".into(), b"picture".to_vec());
        if has_deadline {
            let at = Instant::now() + Duration::from_secs(1) - OUTCOME_MARGIN;
            job.deadline = Some(Deadline { limit: Duration::from_secs(1), at: at.into_std() });
        }
        requests.submit(&mut job, &mut None, None).unwrap_or_else(|_| panic!("the job was not sent"))
    }

    fn outcome_frame(number: u64, payload: &[u8]) -> Vec<u8> {
        let message = OutcomeMessage::from_verdict(&Verdict::Ok, "resize");
        let mut metadata = Vec::new();
        codec::encode(&message, &[], &mut metadata).unwrap();
        let length = (metadata.len() + payload.len()) as u32;
        let metadata_length = metadata.len() as u16;
        let header = Header { length, kind: kind::OUTCOME, flags: 0, metadata_length, number };
        [&header.encode()[..], &metadata, payload].concat()
    }

    /// The tasks keep the runtime's only thread busy, so that most outcomes are still in the socket, or not even sent,
    /// when the client would stop waiting.
    #[tokio::test]
    async fn slow_client_receives_outcomes_after_the_wait_limit() {
        for (jobs, bytes) in [(100, 50_000), (2, 10 << 20)] {
            let (requests, mut there) = connected();
            let pending: Vec<_> = (0..jobs).map(|_| submit(&requests, true)).collect();
            let numbers: Vec<u64> = pending.iter().map(|pending| pending.number).collect();
            let supervisor = std::thread::spawn(move || {
                let payload = vec![0; bytes];
                numbers.iter().try_for_each(|number| there.write_all(&outcome_frame(*number, &payload)))?;
                Ok::<_, io::Error>(there)
            });
            let serving = tokio::spawn(serve(requests));
            let busy = tokio::spawn(async {
                loop {
                    std::thread::sleep(Duration::from_millis(30));
                    tokio::task::yield_now().await;
                }
            });
            for mut pending in pending {
                let reply = std::future::poll_fn(|cx| pending.poll(cx)).await.unwrap();
                assert_eq!(reply.payload().len(), bytes);
            }
            busy.abort();
            serving.abort();
            supervisor.join().unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn outcomes_of_later_jobs_do_not_extend_the_wait() {
        let (requests, mut there) = connected();
        let mut unanswered = submit(&requests, true);
        let serving = tokio::spawn(serve(requests.clone()));
        let others = tokio::spawn(async move {
            loop {
                let mut other = submit(&requests, false);
                there.write_all(&outcome_frame(other.number, b"")).unwrap();
                std::future::poll_fn(|cx| other.poll(cx)).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let error = std::future::poll_fn(|cx| unanswered.poll(cx)).await.unwrap_err();
        assert!(matches!(error, JobError::Disconnected { executed: Executed::Unknown, .. }), "{error}");
        others.abort();
        serving.abort();
    }
}

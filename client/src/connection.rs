//! Connecting, and the task that serves a connection and makes the next one.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bulkhead_shared::Executed;
use bulkhead_shared::client_protocol::{ClientWelcome, Hello, PROTOCOL_VERSION, Refused, role};
use bulkhead_shared::codec;
use bulkhead_shared::connection::{BufferPool, Inbox, Item, Outbox, Payload, Received, Scratch};
use bulkhead_shared::frame::{MAGIC, kind};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};

use crate::job::{Job, JobError, JobHandle, Progress};
use crate::requests::{Requests, SubmitError};

/// How long the supervisor may take to say welcome.
const WELCOME_WITHIN: Duration = Duration::from_secs(10);

/// How long a job waits for a connection that is being made anew.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// The pause before the second attempt to reconnect; it doubles up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// Reads in a row before the others of the runtime have a turn.
const READS_PER_TURN: usize = 16;

/// Why there is no connection. Fits after "failed to".
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket could not be opened.
    #[error("connect to {}: {hint}: {source}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// What to do.
        hint: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The supervisor does not want this client.
    #[error("be served at {}: {message}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The supervisor's own words.
        message: String,
        /// The code of a [`bulkhead_shared::RejectReason`].
        reason: u8,
    },
    /// Whoever listens there does not speak the protocol.
    #[error("talk to {}: {message}", path.display())]
    Protocol {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
}

/// A connection to a supervisor. Clones share it. Must be used within the tokio runtime that made it.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// The connection; `None` while there is none.
    current: watch::Receiver<Option<Arc<Requests>>>,
}

impl Client {
    /// Connects to the jobs socket of a supervisor.
    ///
    /// Errors say what to do. Once connected, the client reconnects by itself: jobs wait for that up to
    /// five seconds.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self, ConnectError> {
        let path = path.as_ref().to_owned();
        let requests = open(&path).await?;
        let (sender, current) = watch::channel(Some(requests.clone()));
        let shared = Arc::new(Shared { path, current });
        tokio::spawn(drive(Arc::downgrade(&shared), requests, sender));
        Ok(Self { shared })
    }

    /// Begins a job for a bulkhead.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> Job {
        Job::new(self.clone(), bulkhead.into(), payload.into())
    }

    pub(crate) async fn begin(
        &self,
        job: Job,
        progress: Option<mpsc::Sender<Progress>>,
    ) -> Result<JobHandle, JobError> {
        let (mut job, mut progress) = (job, progress);
        loop {
            let requests = self.requests().await?;
            match requests.submit(job, progress) {
                Ok((outcome, ticket)) => return Ok(JobHandle { outcome, progress: None, ticket }),
                Err(SubmitError::Refused(error)) => return Err(error),
                Err(SubmitError::Closed(back)) => (job, progress) = *back,
            }
            // The driver is about to find out, or has.
            tokio::task::yield_now().await;
        }
    }

    async fn requests(&self) -> Result<Arc<Requests>, JobError> {
        if let Some(requests) = self.shared.current.borrow().as_ref() {
            return Ok(requests.clone());
        }
        let mut current = self.shared.current.clone();
        let wait = current.wait_for(Option::is_some);
        match tokio::time::timeout(RECONNECT_PATIENCE, wait).await {
            Ok(Ok(found)) => match found.as_ref() {
                Some(requests) => Ok(requests.clone()),
                None => Err(self.unreachable()),
            },
            _ => Err(self.unreachable()),
        }
    }

    fn unreachable(&self) -> JobError {
        let path = self.shared.path.display();
        let message = format!("the supervisor at {path} is not reachable; is it running?");
        JobError::Disconnected { executed: Executed::No, message }
    }
}

/// Connects and shakes hands.
async fn open(path: &Path) -> Result<Arc<Requests>, ConnectError> {
    let socket = UnixStream::connect(path).await.map_err(|source| {
        let hint = match source.kind() {
            io::ErrorKind::NotFound => "there is no such socket; is the supervisor running?",
            io::ErrorKind::ConnectionRefused => "nobody listens there; is the supervisor running?",
            io::ErrorKind::PermissionDenied => "you may not; see `socket_mode` in workers.toml",
            _ => "the socket cannot be opened",
        };
        ConnectError::Unreachable { path: path.to_owned(), hint, source }
    })?;
    let protocol = |message: String| ConnectError::Protocol { path: path.to_owned(), message };
    match tokio::time::timeout(WELCOME_WITHIN, shake_hands(&socket)).await {
        Err(_) => Err(protocol(format!("no welcome within {WELCOME_WITHIN:?}"))),
        Ok(Err(Unwelcome::Protocol(message))) => Err(protocol(message)),
        Ok(Err(Unwelcome::Refused { reason, message })) => {
            Err(ConnectError::Refused { path: path.to_owned(), message, reason })
        }
        Ok(Ok(frame_bytes_max)) => Ok(Arc::new(Requests::new(socket, frame_bytes_max))),
    }
}

enum Unwelcome {
    Refused { reason: u8, message: String },
    Protocol(String),
}

impl From<String> for Unwelcome {
    fn from(message: String) -> Self {
        Self::Protocol(message)
    }
}

async fn shake_hands(socket: &UnixStream) -> Result<u32, Unwelcome> {
    let text = |error: &dyn std::fmt::Display| Unwelcome::Protocol(error.to_string());
    let hello = Hello {
        version_min: PROTOCOL_VERSION,
        version_max: PROTOCOL_VERSION,
        role: role::CLIENT,
        frame_bytes_max: u32::MAX,
        capabilities: 0,
        name: env!("CARGO_PKG_NAME"),
        version: env!("CARGO_PKG_VERSION"),
    };
    let mut outbox = Outbox::default();
    outbox.push(kind::HELLO, MAGIC, &hello, &[], Payload::NONE).map_err(|error| text(&error))?;
    // A supervisor that refuses may have closed already; its words are still there to be read.
    let _ = outbox.flush(socket, &mut BufferPool::default());
    let (mut inbox, mut scratch) = (Inbox::default(), Scratch::with_read_bytes(4096));
    loop {
        socket.readable().await.map_err(|error| text(&error))?;
        let read = socket.try_io(tokio::io::Interest::READABLE, || {
            let (received, mut batch) = inbox.receive(socket, &mut scratch)?;
            let item = batch.next().map_err(io::Error::other)?;
            let answer = match item {
                Some(Item::Frame { header, metadata, .. }) => Some((header.kind, metadata.to_vec())),
                _ => None,
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
                return Ok(welcome.frame_bytes_max);
            }
            Some((kind::REFUSED, metadata)) => {
                let (refused, _) =
                    codec::decode::<Refused<'_>>(&metadata, &[]).map_err(|error| text(&error))?;
                let (reason, message) = (refused.reason, refused.message.to_owned());
                return Err(Unwelcome::Refused { reason, message });
            }
            Some((kind, _)) => return Err(format!("a frame of kind {kind} instead of a welcome").into()),
            None if received == Received::Closed => {
                return Err("the connection was closed before a welcome".to_owned().into());
            }
            None => {}
        }
    }
}

/// Serves connection after connection, as long as there is a client.
async fn drive(client: Weak<Shared>, first: Arc<Requests>, current: watch::Sender<Option<Arc<Requests>>>) {
    let mut requests = first;
    loop {
        let message = tokio::select! {
            message = serve(&requests) => message,
            () = current.closed() => return,
        };
        current.send_replace(None);
        requests.close(&format!("the connection to the supervisor broke: {message}"));
        let Some(path) = client.upgrade().map(|shared| shared.path.clone()) else { return };
        let reconnected = tokio::select! {
            requests = reconnect(&path) => requests,
            () = current.closed() => return,
        };
        requests = reconnected;
        current.send_replace(Some(requests.clone()));
    }
}

async fn reconnect(path: &Path) -> Arc<Requests> {
    let mut pause = BACKOFF;
    loop {
        if let Ok(requests) = open(path).await {
            return requests;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(BACKOFF_MAX);
    }
}

/// Reads and writes until the connection ends; returns why.
async fn serve(requests: &Requests) -> String {
    let mut inbox = Inbox::default();
    let mut scratch = Scratch::default();
    let reading = async {
        loop {
            if let Err(error) = requests.socket.readable().await {
                return error.to_string();
            }
            for _ in 0..READS_PER_TURN {
                match read_once(requests, &mut inbox, &mut scratch) {
                    Ok(Received::More) => {}
                    Ok(Received::Drained) => break,
                    Ok(Received::Closed) => return "the supervisor closed it".to_owned(),
                    Err(message) => return message,
                }
            }
            tokio::task::yield_now().await;
        }
    };
    let writing = async {
        loop {
            requests.flush_due.notified().await;
            // Whoever else is ready adds to the same write.
            tokio::task::yield_now().await;
            loop {
                match requests.flush() {
                    Ok(true) => break,
                    Ok(false) => {
                        let blocked = || -> io::Result<()> { Err(io::ErrorKind::WouldBlock.into()) };
                        let _ = requests.socket.try_io(tokio::io::Interest::WRITABLE, blocked);
                        if requests.socket.writable().await.is_err() {
                            return "it cannot be written to".to_owned();
                        }
                    }
                    // Reading finds out why, and what was said before.
                    Err(_) => std::future::pending::<()>().await,
                }
            }
        }
    };
    tokio::select! {
        message = reading => message,
        message = writing => message,
    }
}

fn read_once(requests: &Requests, inbox: &mut Inbox, scratch: &mut Scratch) -> Result<Received, String> {
    let mut problem = None;
    let read = requests.socket.try_io(tokio::io::Interest::READABLE, || {
        let (received, mut batch) = inbox.receive(&requests.socket, scratch)?;
        loop {
            let result = match batch.next() {
                Ok(None) => break,
                Ok(Some(Item::Frame { header, metadata, payload })) => {
                    requests.frame(header, metadata, payload.to_vec())
                }
                Ok(Some(Item::Large { header, metadata, payload })) => {
                    requests.frame(header, &metadata, payload)
                }
                Ok(Some(Item::Announced { header, .. })) => {
                    batch.accept(requests.buffer(header.payload_length()));
                    Ok(())
                }
                Err(error) => Err(error.to_string()),
            };
            if let Err(message) = result {
                problem = Some(message);
                break;
            }
        }
        match received {
            // Tells tokio to wait for the next arrival.
            Received::Drained => Err(io::ErrorKind::WouldBlock.into()),
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

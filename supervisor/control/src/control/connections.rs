//! Passes accepted connections to the thread that serves them. The requested path selects the main thread or the
//! low-priority reader thread. Listeners such as `admin_socket` and `tcp` decide which connections are admitted.
//! `service` serves the requests, and `connection` enforces the time limits.

mod connection;
mod progress;
mod service;
mod socket;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::Instant;

pub(super) use progress::{Active, Progress};
pub(super) use service::serve;
pub(super) use socket::Socket;

use super::jobs::session::SessionSlot;
use super::paths;

/// Time limit for sending the head of a request, for handling the request, and for reading the rest of the response
/// after a client without a valid token has paused.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time, at shutdown, for accepting the remaining connections and receiving their requests.
pub(super) const LAST_ACCEPT_TIMEOUT: Duration = Duration::from_millis(100);

/// Age above which a connection without a request is closed at shutdown. Longer than `LAST_ACCEPT_TIMEOUT`, because a
/// new client may not have been scheduled yet. Connections that a browser opens in advance are usually older.
const LAST_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time, at shutdown, for reading a request that has already arrived.
const LAST_PEEK_TIMEOUT: Duration = Duration::from_millis(100);

/// Number of bytes at the beginning of a request that are inspected to find the requested path.
pub(super) const HEAD_BYTES: usize = 512;

/// Returns true if the listener's backlog contains a connection. Shutdown is delayed only if there are such
/// connections.
pub(super) fn has_waiting(listener: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&listener, PollFlags::IN)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// Result of the admission checks for a connection.
#[derive(Clone, Debug)]
pub(super) struct Admission {
    /// Reason for rejecting the connection, as a sentence. `None` if the connection is admitted.
    pub(super) rejection: Option<Arc<str>>,
    /// ID of the user who sent the request. For a TCP connection, this is the supervisor's own user ID, because the
    /// client's user is unknown.
    pub(super) uid: u32,
    pub(super) progress: Arc<Progress>,
    /// Session with the data plane for the jobs of a kept-alive connection. `None` if the connection is closed after
    /// the first response.
    pub(super) session: Option<SessionSlot>,
}

impl Admission {
    /// Admits a TCP connection for one request.
    pub(super) fn new() -> Self {
        let uid = rustix::process::geteuid().as_raw();
        Self { rejection: None, uid, progress: Progress::new(false), session: None }
    }

    /// Admits a TCP connection for one health check.
    pub(super) fn health_check() -> Self {
        Self { progress: Progress::new(true), ..Self::new() }
    }

    /// Admits a TCP connection for any number of requests.
    pub(super) fn kept_alive() -> Self {
        Self { session: Some(SessionSlot::default()), ..Self::new() }
    }

    /// Admits a connection to the admin socket.
    pub(super) fn of_user(uid: u32) -> Self {
        let admission = Self { uid, ..Self::new() };
        admission.progress.set_identified();
        admission
    }

    pub(super) fn rejected(why: &str) -> Self {
        Self { rejection: Some(why.into()), ..Self::new() }
    }
}

/// An accepted connection. If the connection failed the admission checks, the response contains the reason.
pub(super) struct NewConnection<S> {
    socket: S,
    admission: Admission,
    accepted: Instant,
    permit: OwnedSemaphorePermit,
}

impl<S> NewConnection<S> {
    pub(super) fn new(socket: S, admission: Admission, permit: OwnedSemaphorePermit) -> Self {
        Self { socket, admission, accepted: Instant::now(), permit }
    }
}

/// Channel to a thread that serves connections.
type Channel<S> = mpsc::Sender<NewConnection<<S as Socket>::Std>>;

/// A listener's channels to the threads that serve connections: the main thread and the low-priority reader thread.
pub(super) struct Dispatcher<S: Socket> {
    main: Channel<S>,
    /// Channel to the low-priority reader thread. `None` if one thread serves all requests.
    readers: Option<Channel<S>>,
    /// The listener's connections that are being served, one list for each thread.
    active: Arc<[Arc<Active>]>,
    /// True once the control plane is shutting down. From then on, the supervisor waits only briefly for clients that
    /// have sent nothing.
    shutdown: watch::Receiver<bool>,
}

impl<S: Socket> Clone for Dispatcher<S> {
    fn clone(&self) -> Self {
        Self {
            main: self.main.clone(),
            readers: self.readers.clone(),
            active: self.active.clone(),
            shutdown: self.shutdown.clone(),
        }
    }
}

impl<S: Socket> Dispatcher<S> {
    /// Passes a connection to the thread that should serve it, once the requested path is known. Runs as a separate
    /// task so that other connections do not have to wait.
    pub(super) fn dispatch(&self, connection: NewConnection<S>) {
        let mut dispatcher = self.clone();
        tokio::spawn(async move {
            let NewConnection { socket, admission, accepted, permit } = connection;
            let mut head = [0; HEAD_BYTES];
            let count = match &admission.rejection {
                Some(_) => 0,
                None => match dispatcher.peek_head(&socket, &mut head, accepted).await {
                    Some(count) => count,
                    None => return,
                },
            };
            dispatcher.dispatch_to(NewConnection { socket, admission, accepted, permit }, &head[..count]);
        });
    }

    /// Closes an idle connection to make room for another client. Returns false if all connections are busy.
    pub(super) fn close_idle(&self) -> bool {
        self.active.iter().any(|active| active.close_idle())
    }

    /// Waits for the beginning of a request and peeks at it. Returns the number of bytes peeked, or `None` if the
    /// client sent nothing.
    pub(super) async fn peek_head(
        &mut self,
        socket: &S,
        head: &mut [u8],
        accepted: Instant,
    ) -> Option<usize> {
        let shutdown_timeout = async {
            let _ = self.shutdown.wait_for(|has_begun| *has_begun).await;
            let end = (Instant::now() + LAST_ACCEPT_TIMEOUT).max(accepted + LAST_REQUEST_TIMEOUT);
            tokio::time::sleep_until(end).await;
        };
        let has_begun = tokio::select! {
            biased;
            // If there is no byte, the client has disconnected.
            count = socket.peek(head) => return count.ok().filter(|count| *count > 0),
            () = tokio::time::sleep_until(accepted + REQUEST_TIMEOUT) => false,
            () = shutdown_timeout => true,
        };
        // The runtime notices newly arrived bytes only at its next poll, so a short wait is necessary.
        let last = tokio::time::timeout(LAST_PEEK_TIMEOUT, socket.peek(head));
        if has_begun { last.await.ok()?.ok() } else { None }
    }

    /// Passes a connection to the thread that serves the requested path. `head` contains the first bytes of the
    /// request.
    pub(super) fn dispatch_to(&self, connection: NewConnection<S>, head: &[u8]) {
        let NewConnection { socket, admission, accepted, permit } = connection;
        let readers = self.readers.as_ref().filter(|_| paths::is_for_readers(head));
        let sender = readers.unwrap_or(&self.main);
        // The connection is closed if the socket cannot be moved, or if the thread no longer serves
        // connections.
        if let Ok(socket) = socket.into_std_socket() {
            let _ = sender.try_send(NewConnection { socket, admission, accepted, permit });
        }
    }
}

/// Receiver of admitted connections.
pub(super) struct Queue<S: Socket> {
    receiver: mpsc::Receiver<NewConnection<S::Std>>,
    active: Arc<Active>,
}

impl<S: Socket> Queue<S> {
    fn new(receiver: mpsc::Receiver<NewConnection<S::Std>>) -> Self {
        Self { receiver, active: Active::new() }
    }

    pub(super) fn active(&self) -> Arc<Active> {
        self.active.clone()
    }
}

/// Creates two channels for a listener, with their receivers: one to the main thread and one to the low-priority reader
/// thread. Each connection holds one of `max` permits, so the channels never overflow.
pub(super) fn channels<S: Socket>(
    shutdown: watch::Receiver<bool>,
    max: usize,
) -> (Dispatcher<S>, Queue<S>, Queue<S>) {
    let ((main, from_main), (readers, from_readers)) = (mpsc::channel(max), mpsc::channel(max));
    let (own, of_readers) = (Queue::new(from_main), Queue::new(from_readers));
    let active = [own.active(), of_readers.active()].into();
    (Dispatcher { main, readers: Some(readers), active, shutdown }, own, of_readers)
}

/// Creates the channel of a listener whose requests are all served by the same thread.
pub(super) fn channel<S: Socket>(shutdown: watch::Receiver<bool>, max: usize) -> (Dispatcher<S>, Queue<S>) {
    let (main, receiver) = mpsc::channel(max);
    let queue = Queue::new(receiver);
    (Dispatcher { main, readers: None, active: [queue.active()].into(), shutdown }, queue)
}

#[cfg(test)]
mod tests {
    use std::os::unix;

    use super::*;

    #[test]
    fn waiting_client_is_detected_before_accept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = unix::net::UnixListener::bind(&path).unwrap();
        assert!(!has_waiting(&listener));
        let _client = unix::net::UnixStream::connect(&path).unwrap();
        assert!(has_waiting(&listener));
    }
}

//! Serves admitted connections. The requested path determines which of two threads serves a connection. Time
//! limits ensure that each connection is closed.

use std::io::{self, IoSlice};
use std::net;
use std::os::fd::AsFd;
use std::os::unix;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, Interest};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::{Instant, Sleep};

use super::paths;

/// Maximum time from accepting a connection until the response has been sent. After this time the connection
/// is closed.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time for which a client can stop reading its response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time to wait for the client to close the connection after the response has been sent.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are read and discarded while waiting for the client to close the connection.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// When the control plane ends, maximum time for accepting the remaining connections and receiving their
/// requests.
pub(super) const LAST_ACCEPT_TIMEOUT: Duration = Duration::from_millis(100);

/// When the control plane ends, a connection without a request is only awaited until it has been open for
/// this time. The time is longer than `LAST_ACCEPT_TIMEOUT`, because a client may have had no processor time
/// yet. Connections that a browser keeps in reserve are usually older.
const LAST_REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// When the control plane ends, maximum time for reading a request that has already arrived.
const LAST_PEEK_TIMEOUT: Duration = Duration::from_millis(100);

/// When the control plane ends, maximum time for sending the remaining responses.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of bytes of a request that are inspected to find the requested path.
pub(super) const HEAD_BYTES: usize = 512;

/// Returns true if a connection is waiting to be accepted. Only such connections delay the shutdown.
pub(super) fn has_waiting(listener: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&listener, PollFlags::IN)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// Result of the admission checks for a connection.
#[derive(Clone, Debug)]
pub(super) struct Admission {
    /// Reason, as a sentence, why the connection is rejected. `None` if it is admitted.
    pub(super) rejection: Option<Arc<str>>,
    /// Id of the user who sent the request. For TCP connections, whose user is unknown, the id of the
    /// supervisor's user.
    pub(super) uid: u32,
    /// True if the general time limit does not apply, because the handler enforces its own limits.
    has_no_time_limit: Arc<AtomicBool>,
}

impl Admission {
    pub(super) fn new() -> Self {
        Self::of_user(rustix::process::geteuid().as_raw())
    }

    pub(super) fn of_user(uid: u32) -> Self {
        Self { rejection: None, uid, has_no_time_limit: Arc::default() }
    }

    pub(super) fn rejected(why: &str) -> Self {
        Self { rejection: Some(why.into()), ..Self::new() }
    }

    /// Disables the general time limit for a request whose handler enforces its own limits.
    pub(super) fn lift_time_limit(&self) {
        self.has_no_time_limit.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_no_time_limit(&self) -> bool {
        self.has_no_time_limit.load(Ordering::Relaxed)
    }
}

/// A stream socket that can be moved to another runtime.
pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + Sync + Sized + 'static {
    /// Type of the socket when it is not registered with a runtime.
    type Std: Send + 'static;

    fn into_std_socket(self) -> io::Result<Self::Std>;

    fn from_std_socket(socket: Self::Std) -> io::Result<Self>;

    /// Waits for data, and reads it without removing it from the socket.
    fn peek(&self, bytes: &mut [u8]) -> impl Future<Output = io::Result<usize>> + Send;
}

impl Socket for UnixStream {
    type Std = unix::net::UnixStream;

    fn into_std_socket(self) -> io::Result<Self::Std> {
        self.into_std()
    }

    fn from_std_socket(socket: Self::Std) -> io::Result<Self> {
        Self::from_std(socket)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let peek = || Ok(rustix::net::recv(self, &mut *bytes, RecvFlags::PEEK)?.0);
        self.async_io(Interest::READABLE, peek).await
    }
}

impl Socket for TcpStream {
    type Std = net::TcpStream;

    fn into_std_socket(self) -> io::Result<Self::Std> {
        self.into_std()
    }

    fn from_std_socket(socket: Self::Std) -> io::Result<Self> {
        Self::from_std(socket)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Self::peek(self, bytes).await
    }
}

/// An admitted connection, or a rejected connection to which the reason will be sent.
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

/// Channels of one listener to the control plane's main thread and to the thread of the low-priority readers.
pub(super) struct Dispatcher<S: Socket> {
    main: Channel<S>,
    readers: Channel<S>,
    /// True once the control plane ends. Clients that have sent nothing are then no longer awaited.
    shutdown: watch::Receiver<bool>,
}

impl<S: Socket> Clone for Dispatcher<S> {
    fn clone(&self) -> Self {
        Self { main: self.main.clone(), readers: self.readers.clone(), shutdown: self.shutdown.clone() }
    }
}

impl<S: Socket> Dispatcher<S> {
    /// Passes a connection on as soon as the requested path is known. Runs as a separate task, so that other
    /// connections do not have to wait.
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

    /// Waits for the beginning of a request and copies it to `head`, without removing it from the socket.
    /// Returns the number of copied bytes.
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
            count = socket.peek(head) => return count.ok(),
            () = tokio::time::sleep_until(accepted + REQUEST_TIMEOUT) => false,
            () = shutdown_timeout => true,
        };
        // A short wait is necessary, because the runtime only notices bytes that have just arrived when it
        // polls the next time.
        let last = tokio::time::timeout(LAST_PEEK_TIMEOUT, socket.peek(head));
        if has_begun { last.await.ok()?.ok() } else { None }
    }

    /// Passes a connection on to the thread that serves requests which begin with `head`.
    pub(super) fn dispatch_to(&self, connection: NewConnection<S>, head: &[u8]) {
        let NewConnection { socket, admission, accepted, permit } = connection;
        let sender = if paths::is_for_readers(head) { &self.readers } else { &self.main };
        // The connection is closed if the socket cannot be moved, or if the thread no longer serves
        // connections.
        if let Ok(socket) = socket.into_std_socket() {
            let _ = sender.try_send(NewConnection { socket, admission, accepted, permit });
        }
    }
}

/// Receiver of admitted connections, which axum uses as a listener.
pub(super) struct Queue<S: Socket> {
    receiver: mpsc::Receiver<NewConnection<S::Std>>,
    /// True once the listener is closed and all connections have been taken from the queue.
    is_empty: watch::Sender<bool>,
    /// Number of connections that are being served.
    active: Arc<watch::Sender<usize>>,
}

impl<S: Socket> Queue<S> {
    fn new(receiver: mpsc::Receiver<NewConnection<S::Std>>) -> Self {
        Self { receiver, is_empty: watch::Sender::new(false), active: Arc::new(watch::Sender::new(0)) }
    }
}

/// Creates the channels of a listener to the main thread and to the low-priority readers. The capacity of
/// each is `max`. Each connection holds one of `max` permits, so that a channel is never full.
pub(super) fn channels<S: Socket>(
    shutdown: watch::Receiver<bool>,
    max: usize,
) -> (Dispatcher<S>, Queue<S>, Queue<S>) {
    let ((main, from_main), (readers, from_readers)) = (mpsc::channel(max), mpsc::channel(max));
    (Dispatcher { main, readers, shutdown }, Queue::new(from_main), Queue::new(from_readers))
}

impl<S: Socket> axum::serve::Listener for Queue<S> {
    type Io = Connection<S>;
    type Addr = Admission;

    async fn accept(&mut self) -> (Connection<S>, Admission) {
        loop {
            let Some(NewConnection { socket, admission, accepted, permit }) = self.receiver.recv().await
            else {
                // The listener is closed. Connections that have been taken from the queue are still served.
                self.is_empty.send_replace(true);
                return std::future::pending().await;
            };
            if let Ok(socket) = S::from_std_socket(socket) {
                self.active.send_modify(|active| *active += 1);
                let active = ActiveGuard(self.active.clone());
                return (Connection::new(socket, &admission, accepted, (permit, active)), admission);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Admission> {
        Ok(Admission::new())
    }
}

impl<S: Socket> Connected<IncomingStream<'_, Queue<S>>> for Admission {
    fn connect_info(stream: IncomingStream<'_, Queue<S>>) -> Self {
        stream.remote_addr().clone()
    }
}

/// Serves connections. Returns when the control plane has ended and all connections that were admitted before
/// have been served.
pub(super) async fn serve<S: Socket>(connections: Queue<S>, router: Router) {
    let mut is_empty = connections.is_empty.subscribe();
    let mut active = connections.active.subscribe();
    let shutdown = async move {
        let _ = is_empty.wait_for(|is_empty| *is_empty).await;
        // The graceful shutdown of axum begins only after this wait, because it drops connections whose
        // request has not been read. No other signal is needed, because each connection is closed after its
        // response.
        let _ = tokio::time::timeout(LAST_RESPONSE_TIMEOUT, active.wait_for(|active| *active == 0)).await;
    };
    let service = router.into_make_service_with_connect_info::<Admission>();
    if let Err(error) = axum::serve(connections, service).with_graceful_shutdown(shutdown).await {
        tracing::error!("the admin API has stopped: {error}");
    }
}

/// A connection that is being served. It holds a permit for a limited time, and is closed after one request.
pub(super) struct Connection<S> {
    socket: S,
    timer: Pin<Box<Sleep>>,
    has_no_time_limit: Arc<AtomicBool>,
    state: Phase,
    _permit: (OwnedSemaphorePermit, ActiveGuard),
}

/// A guard for a connection that counts as being served until the guard is dropped.
struct ActiveGuard(Arc<watch::Sender<usize>>);

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        self.0.send_modify(|active| *active -= 1);
    }
}

#[derive(PartialEq)]
enum Phase {
    /// The request is incomplete, or the response has not begun.
    Requesting,
    /// The response is being sent. Its parts are sent as they are produced.
    Responding,
    /// There is data to send, but the client is not reading.
    Stalled,
    /// The response has been sent. Further input is discarded for a short time. Closing a socket with unread
    /// bytes would reset the connection, and the client could lose the response.
    Lingering { bytes_left: usize },
}

impl<S> Connection<S> {
    fn new(
        socket: S,
        admission: &Admission,
        accepted: Instant,
        permit: (OwnedSemaphorePermit, ActiveGuard),
    ) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(accepted + REQUEST_TIMEOUT));
        let has_no_time_limit = admission.has_no_time_limit.clone();
        Self { socket, timer, has_no_time_limit, state: Phase::Requesting, _permit: permit }
    }

    /// Returns `Poll::Pending`, or an error if the time limit for the current phase has passed.
    fn pending<T>(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<T>> {
        if self.state == Phase::Requesting && self.has_no_time_limit.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        self.timer.as_mut().poll(cx).map(|()| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Pending if self.state == Phase::Requesting => self.pending(cx),
            other => other,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        if result.is_ready() {
            self.state = Phase::Responding;
            return result;
        }
        if self.state != Phase::Stalled {
            self.state = Phase::Stalled;
            self.timer.as_mut().reset(tokio::time::Instant::now() + READ_TIMEOUT);
        }
        self.pending(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        if !matches!(self.state, Phase::Lingering { .. }) {
            std::task::ready!(Pin::new(&mut self.socket).poll_shutdown(cx))?;
            self.state = Phase::Lingering { bytes_left: LINGER_BYTES_MAX };
            self.timer.as_mut().reset(tokio::time::Instant::now() + LINGER_TIMEOUT);
        }
        let mut discarded = [std::mem::MaybeUninit::uninit(); 4096];
        loop {
            if self.timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = tokio::io::ReadBuf::uninit(&mut discarded);
            match std::task::ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
            let count = buffer.filled().len();
            match &mut self.state {
                Phase::Lingering { bytes_left } if *bytes_left > count => *bytes_left -= count,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
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

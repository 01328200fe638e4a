//! Admitted connections: dispatched to one of two threads according to the requested path, served, and closed
//! in time.

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

/// Time limit for receiving a request and answering it. After this time the connection is closed.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Maximum time for which a client can leave its response unread.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// Maximum time to wait for the client to close an answered connection.
const LINGER: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are discarded while waiting for the client to close.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Time limit, once the control plane ends, for accepting the remaining connections and receiving their
/// requests.
pub(super) const LAST_WITHIN: Duration = Duration::from_millis(100);

/// Time limit, once the control plane ends, for a request on a new connection. Longer than `LAST_WITHIN`,
/// because the client may not have had processor time yet. A browser's spare connection that has been silent
/// for longer is closed.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// Time limit, once the control plane ends, for reading a request that has already arrived.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Time limit, once the control plane ends, for answering the remaining requests.
const ANSWERED_LAST_WITHIN: Duration = Duration::from_secs(2);

/// Number of bytes of a request that are inspected to find the requested path.
pub(super) const HEAD_BYTES: usize = 512;

/// Returns true if a connection waits to be accepted. Shutdown is delayed only for such connections.
pub(super) fn has_waiting(listener: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&listener, PollFlags::IN)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// Admission result of a connection.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Reason why the connection is not served, in one sentence.
    pub(super) refusal: Option<Arc<str>>,
    /// The user who sent the request. Over TCP, where the user is unknown, the supervisor's own user.
    pub(super) uid: u32,
    /// True if the request has no general time limit, because its handler enforces a limit.
    is_patient: Arc<AtomicBool>,
}

impl Entry {
    pub(super) fn new() -> Self {
        Self::of(rustix::process::geteuid().as_raw())
    }

    pub(super) fn of(uid: u32) -> Self {
        Self { refusal: None, uid, is_patient: Arc::default() }
    }

    pub(super) fn refused(why: &str) -> Self {
        Self { refusal: Some(why.into()), ..Self::new() }
    }

    /// Lifts the general time limit. The handler then enforces its own limits.
    pub(super) fn be_patient(&self) {
        self.is_patient.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_patient(&self) -> bool {
        self.is_patient.load(Ordering::Relaxed)
    }
}

/// A stream socket that can move between runtimes.
pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + Sync + Sized + 'static {
    /// The socket without a runtime.
    type Alone: Send + 'static;

    fn leave(self) -> io::Result<Self::Alone>;

    fn enter(alone: Self::Alone) -> io::Result<Self>;

    /// Waits for data and peeks at it.
    fn peek(&self, bytes: &mut [u8]) -> impl Future<Output = io::Result<usize>> + Send;
}

impl Socket for UnixStream {
    type Alone = unix::net::UnixStream;

    fn leave(self) -> io::Result<Self::Alone> {
        self.into_std()
    }

    fn enter(alone: Self::Alone) -> io::Result<Self> {
        Self::from_std(alone)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let look = || Ok(rustix::net::recv(self, &mut *bytes, RecvFlags::PEEK)?.0);
        self.async_io(Interest::READABLE, look).await
    }
}

impl Socket for TcpStream {
    type Alone = net::TcpStream;

    fn leave(self) -> io::Result<Self::Alone> {
        self.into_std()
    }

    fn enter(alone: Self::Alone) -> io::Result<Self> {
        Self::from_std(alone)
    }

    async fn peek(&self, bytes: &mut [u8]) -> io::Result<usize> {
        Self::peek(self, bytes).await
    }
}

/// An admitted connection, or a refused connection that is about to be sent the reason.
pub(super) struct Arrival<S> {
    socket: S,
    entry: Entry,
    came: Instant,
    place: OwnedSemaphorePermit,
}

impl<S> Arrival<S> {
    pub(super) fn new(socket: S, entry: Entry, place: OwnedSemaphorePermit) -> Self {
        Self { socket, entry, came: Instant::now(), place }
    }
}

/// A channel to the thread that serves the arrivals.
type Way<S> = mpsc::Sender<Arrival<<S as Socket>::Alone>>;

/// Channels of one listener: to the control plane's own thread, and to the thread of low-priority readers.
pub(super) struct Ways<S: Socket> {
    own: Way<S>,
    readers: Way<S>,
    /// True once silent clients must not be waited for any more.
    end: watch::Receiver<bool>,
}

impl<S: Socket> Clone for Ways<S> {
    fn clone(&self) -> Self {
        Self { own: self.own.clone(), readers: self.readers.clone(), end: self.end.clone() }
    }
}

impl<S: Socket> Ways<S> {
    /// Passes a connection on as soon as the requested path is known. Other connections do not wait
    /// meanwhile.
    pub(super) fn send(&self, arrival: Arrival<S>) {
        let mut ways = self.clone();
        tokio::spawn(async move {
            let Arrival { socket, entry, came, place } = arrival;
            let mut head = [0; HEAD_BYTES];
            let count = match &entry.refusal {
                Some(_) => 0,
                None => match ways.asks(&socket, &mut head, came).await {
                    Some(count) => count,
                    None => return,
                },
            };
            ways.send_on(Arrival { socket, entry, came, place }, &head[..count]);
        });
    }

    /// Waits for the beginning of a request. Returns the number of bytes that were peeked.
    pub(super) async fn asks(&mut self, socket: &S, head: &mut [u8], came: Instant) -> Option<usize> {
        let over = async {
            let _ = self.end.wait_for(|is_over| *is_over).await;
            tokio::time::sleep_until((Instant::now() + LAST_WITHIN).max(came + HEARD_WITHIN)).await;
        };
        let is_over = tokio::select! {
            biased;
            count = socket.peek(head) => return count.ok(),
            () = tokio::time::sleep_until(came + ANSWERED_WITHIN) => false,
            () = over => true,
        };
        // The runtime does not report bytes that arrived just now before it has polled once.
        let last = tokio::time::timeout(LAST_LOOK, socket.peek(head));
        if is_over { last.await.ok()?.ok() } else { None }
    }

    /// Passes a connection on, to the thread that serves requests with this beginning.
    pub(super) fn send_on(&self, arrival: Arrival<S>, head: &[u8]) {
        let Arrival { socket, entry, came, place } = arrival;
        let way = if paths::is_for_readers(head) { &self.readers } else { &self.own };
        // If the socket cannot move or the thread has stopped serving, the socket is closed.
        if let Ok(socket) = socket.leave() {
            let _ = way.try_send(Arrival { socket, entry, came, place });
        }
    }
}

/// Receiver of admitted connections, as an axum listener.
pub(super) struct Arrivals<S: Socket> {
    queue: mpsc::Receiver<Arrival<S::Alone>>,
    /// True once the listener is closed and all its connections have been accepted.
    is_empty: watch::Sender<bool>,
    /// Number of connections that are being served.
    inside: Arc<watch::Sender<usize>>,
}

impl<S: Socket> Arrivals<S> {
    fn new(queue: mpsc::Receiver<Arrival<S::Alone>>) -> Self {
        Self { queue, is_empty: watch::Sender::new(false), inside: Arc::new(watch::Sender::new(0)) }
    }
}

/// Creates the channels of a listener and their receivers, for the control plane's own thread and for the
/// low-priority readers. Each connection holds one of `places` permits, so that the channels never overflow.
pub(super) fn ways<S: Socket>(
    end: watch::Receiver<bool>,
    places: usize,
) -> (Ways<S>, Arrivals<S>, Arrivals<S>) {
    let ((own, to_own), (readers, to_readers)) = (mpsc::channel(places), mpsc::channel(places));
    (Ways { own, readers, end }, Arrivals::new(to_own), Arrivals::new(to_readers))
}

impl<S: Socket> axum::serve::Listener for Arrivals<S> {
    type Io = Placed<S>;
    type Addr = Entry;

    async fn accept(&mut self) -> (Placed<S>, Entry) {
        loop {
            let Some(Arrival { socket, entry, came, place }) = self.queue.recv().await else {
                // The listener is closed. Accepted connections are still served.
                self.is_empty.send_replace(true);
                return std::future::pending().await;
            };
            if let Ok(socket) = S::enter(socket) {
                self.inside.send_modify(|inside| *inside += 1);
                let inside = Inside(self.inside.clone());
                return (Placed::new(socket, &entry, came, (place, inside)), entry);
            }
        }
    }

    fn local_addr(&self) -> io::Result<Entry> {
        Ok(Entry::new())
    }
}

impl<S: Socket> Connected<IncomingStream<'_, Arrivals<S>>> for Entry {
    fn connect_info(stream: IncomingStream<'_, Arrivals<S>>) -> Self {
        stream.remote_addr().clone()
    }
}

/// Serves connections until the control plane ends, then the connections that were admitted before.
pub(super) async fn serve<S: Socket>(arrivals: Arrivals<S>, router: Router) {
    let mut is_empty = arrivals.is_empty.subscribe();
    let mut inside = arrivals.inside.subscribe();
    let shutdown = async move {
        let _ = is_empty.wait_for(|is_empty| *is_empty).await;
        // A graceful shutdown would drop connections whose request is still unread. Each connection closes
        // after its response anyway.
        let _ = tokio::time::timeout(ANSWERED_LAST_WITHIN, inside.wait_for(|inside| *inside == 0)).await;
    };
    let service = router.into_make_service_with_connect_info::<Entry>();
    if let Err(error) = axum::serve(arrivals, service).with_graceful_shutdown(shutdown).await {
        tracing::error!("the admin API is not served any more: {error}");
    }
}

/// A connection that holds a permit for a limited time. One request is served on each connection.
pub(super) struct Placed<S> {
    socket: S,
    patience: Pin<Box<Sleep>>,
    is_patient: Arc<AtomicBool>,
    state: Turn,
    _place: (OwnedSemaphorePermit, Inside),
}

/// Guard that counts a connection as being served.
struct Inside(Arc<watch::Sender<usize>>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.send_modify(|inside| *inside -= 1);
    }
}

/// Phase of a connection.
#[derive(PartialEq)]
enum Turn {
    /// The request is incomplete or unanswered.
    Asking,
    /// The response is being sent as it is produced.
    Answering,
    /// There is data to send, and the client does not read.
    Stalled,
    /// The response is sent. Further input is discarded for a short time, because closing a socket with
    /// unread bytes resets the connection, and the client can lose the response.
    Lingering { bytes_left: usize },
}

impl<S> Placed<S> {
    fn new(socket: S, entry: &Entry, came: Instant, place: (OwnedSemaphorePermit, Inside)) -> Self {
        let patience = Box::pin(tokio::time::sleep_until(came + ANSWERED_WITHIN));
        let is_patient = entry.is_patient.clone();
        Self { socket, patience, is_patient, state: Turn::Asking, _place: place }
    }

    /// Returns pending, or an error if the time limit has passed.
    fn pending<T>(&mut self, cx: &mut Context<'_>) -> Poll<std::io::Result<T>> {
        if self.state == Turn::Asking && self.is_patient.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        self.patience.as_mut().poll(cx).map(|()| Err(std::io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Placed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Pending if self.state == Turn::Asking => self.pending(cx),
            other => other,
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Placed<S> {
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
            self.state = Turn::Answering;
            return result;
        }
        if self.state != Turn::Stalled {
            self.state = Turn::Stalled;
            self.patience.as_mut().reset(tokio::time::Instant::now() + READ_WITHIN);
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
        if !matches!(self.state, Turn::Lingering { .. }) {
            std::task::ready!(Pin::new(&mut self.socket).poll_shutdown(cx))?;
            self.state = Turn::Lingering { bytes_left: LINGER_BYTES_MAX };
            self.patience.as_mut().reset(tokio::time::Instant::now() + LINGER);
        }
        let mut thrown_away = [std::mem::MaybeUninit::uninit(); 4096];
        loop {
            if self.patience.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = tokio::io::ReadBuf::uninit(&mut thrown_away);
            match std::task::ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
            let count = buffer.filled().len();
            match &mut self.state {
                Turn::Lingering { bytes_left } if *bytes_left > count => *bytes_left -= count,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_tells_whether_a_client_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = unix::net::UnixListener::bind(&path).unwrap();
        assert!(!has_waiting(&listener));
        let _client = unix::net::UnixStream::connect(&path).unwrap();
        assert!(has_waiting(&listener));
    }
}

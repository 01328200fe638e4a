//! Connections, from the moment in which they were let in: sorted by what they ask for, served by one thread or the
//! other, and closed in time.

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

/// How long a request may take to come and to be answered, before its connection is closed.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// How long a client may read nothing of its answer.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// How long a connection that is answered waits for its other side to close.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes that it throws away meanwhile, at most.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// When the control plane ends: how long connections that have come by then may take to be let in and to be heard.
pub(super) const LAST_WITHIN: Duration = Duration::from_millis(100);

/// The same for one that came a moment ago: its client may have had no processor yet. A browser's spare connection that
/// has been silent for longer is not waited for.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// How long a request may take to be seen that has come by then.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// How long these may take to be answered.
const ANSWERED_LAST_WITHIN: Duration = Duration::from_secs(2);

/// Bytes of a request that tell what it asks for.
pub(super) const HEAD_BYTES: usize = 512;

/// True if a connection waits to be accepted. A stop delays for no other reason.
pub(super) fn has_waiting(listener: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&listener, PollFlags::IN)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// How a connection is served.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// If it is not, why, in a sentence.
    pub(super) refusal: Option<Arc<str>>,
    /// The user whose request it is; over TCP, where that cannot be told, the supervisor's own.
    pub(super) uid: u32,
    /// Whether the request takes as long as it takes: its handler sees to its end.
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

    /// From now on the request has no time limit but what its handler gives it.
    pub(super) fn be_patient(&self) {
        self.is_patient.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_patient(&self) -> bool {
        self.is_patient.load(Ordering::Relaxed)
    }
}

/// A stream socket that can change from one runtime to another.
pub(super) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + Sync + Sized + 'static {
    /// Without a runtime.
    type Alone: Send + 'static;

    fn leave(self) -> io::Result<Self::Alone>;

    fn enter(alone: Self::Alone) -> io::Result<Self>;

    /// Waits for something to read and has a look at it.
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

/// A connection that was let in, or is to be told why not.
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

/// Where arrivals are served.
type Way<S> = mpsc::Sender<Arrival<<S as Socket>::Alone>>;

/// The ways of a listener: to the control plane's own thread, and to that of low-priority readers.
pub(super) struct Ways<S: Socket> {
    own: Way<S>,
    readers: Way<S>,
    /// True once clients that say nothing are not waited for any more.
    end: watch::Receiver<bool>,
}

impl<S: Socket> Clone for Ways<S> {
    fn clone(&self) -> Self {
        Self { own: self.own.clone(), readers: self.readers.clone(), end: self.end.clone() }
    }
}

impl<S: Socket> Ways<S> {
    /// Sends a connection on as soon as it is known what it asks for. No other one waits meanwhile.
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

    /// Waits until a client says what it wants; returns how many bytes of that there are to be seen.
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
        // What has come by now is not seen before the runtime has looked.
        let last = tokio::time::timeout(LAST_LOOK, socket.peek(head));
        if is_over { last.await.ok()?.ok() } else { None }
    }

    /// Sends a connection on whose request begins so.
    pub(super) fn send_on(&self, arrival: Arrival<S>, head: &[u8]) {
        let Arrival { socket, entry, came, place } = arrival;
        let way = if paths::is_for_readers(head) { &self.readers } else { &self.own };
        // A socket that cannot change, or is not served any more, is closed.
        if let Ok(socket) = socket.leave() {
            let _ = way.try_send(Arrival { socket, entry, came, place });
        }
    }
}

/// The connections that came, as a listener.
pub(super) struct Arrivals<S: Socket> {
    queue: mpsc::Receiver<Arrival<S::Alone>>,
    /// True once the listener is closed, and all that came are inside.
    is_empty: watch::Sender<bool>,
    /// How many are inside.
    inside: Arc<watch::Sender<usize>>,
}

impl<S: Socket> Arrivals<S> {
    fn new(queue: mpsc::Receiver<Arrival<S::Alone>>) -> Self {
        Self { queue, is_empty: watch::Sender::new(false), inside: Arc::new(watch::Sender::new(0)) }
    }
}

/// The ways of a listener, and what comes to the control plane's own thread and to that of low-priority readers. Each
/// connection holds one of so many `places`, so that there is room for all that wait to be served.
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
                // The listener is closed. Connections that are inside are served.
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

/// Serves connections that come until the control plane ends, and then those that had come by that time.
pub(super) async fn serve<S: Socket>(arrivals: Arrivals<S>, router: Router) {
    let mut is_empty = arrivals.is_empty.subscribe();
    let mut inside = arrivals.inside.subscribe();
    let shutdown = async move {
        let _ = is_empty.wait_for(|is_empty| *is_empty).await;
        // A shutdown would drop those that are not read yet. Each is closed by itself after its answer.
        let _ = tokio::time::timeout(ANSWERED_LAST_WITHIN, inside.wait_for(|inside| *inside == 0)).await;
    };
    let service = router.into_make_service_with_connect_info::<Entry>();
    if let Err(error) = axum::serve(arrivals, service).with_graceful_shutdown(shutdown).await {
        tracing::error!("the admin API is not served any more: {error}");
    }
}

/// A connection that holds its place, and not for ever: one request is served on each.
pub(super) struct Placed<S> {
    socket: S,
    patience: Pin<Box<Sleep>>,
    is_patient: Arc<AtomicBool>,
    state: Turn,
    _place: (OwnedSemaphorePermit, Inside),
}

/// One that is counted as inside.
struct Inside(Arc<watch::Sender<usize>>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.send_modify(|inside| *inside -= 1);
    }
}

/// What a connection waits for.
#[derive(PartialEq)]
enum Turn {
    /// The request is not all there, or not answered yet.
    Asking,
    /// The answer goes out as it comes.
    Answering,
    /// There is something to send, and the client does not read.
    Stalled,
    /// All is sent. What still comes is thrown away for a moment: a connection that is closed with bytes
    /// unread is reset, and the answer may be lost with it.
    Lingering { bytes_left: usize },
}

impl<S> Placed<S> {
    fn new(socket: S, entry: &Entry, came: Instant, place: (OwnedSemaphorePermit, Inside)) -> Self {
        let patience = Box::pin(tokio::time::sleep_until(came + ANSWERED_WITHIN));
        let is_patient = entry.is_patient.clone();
        Self { socket, patience, is_patient, state: Turn::Asking, _place: place }
    }

    /// Pending, unless patience is at its end.
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

//! Serves the requests of each admitted connection with hyper, and passes them to the router. Closes a connection at
//! shutdown, or when another client needs its permit. `connection` enforces the time limits, and `progress` chooses the
//! connection to close.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::connect_info::ConnectInfo;
use axum::http::{HeaderValue, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::Service as _;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::connection::Connection;
use super::progress::Progress;
use super::{Admission, NewConnection, Queue, Socket};

/// Maximum size of a request's head, in bytes. Also the maximum size of a single read from a connection.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of headers in a request.
const HEADERS_MAX: usize = 100;

/// Maximum time that a closing connection waits for a request that the client has already sent.
const LAST_REQUEST_WAIT: Duration = Duration::from_millis(100);

/// Maximum number of unread request bytes to discard so that the connection can be kept alive, and the maximum time for
/// doing so.
const DISCARDED_BYTES_MAX: u64 = 64 * 1024;
const DISCARD_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum time to wait for an idle connection to finish a graceful shutdown.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves connections until the listener has closed, then waits for the remaining connections to finish.
pub(in crate::control) async fn serve<S: Socket>(mut connections: Queue<S>, router: Router) {
    while let Some(connection) = connections.receiver.recv().await {
        let NewConnection { socket, admission, accepted, permit } = connection;
        let Ok(socket) = S::from_std_socket(socket) else { continue };
        let guard = connections.active.add(admission.progress.clone());
        let io = Connection::new(socket, admission.progress.clone(), accepted);
        let router = router.clone();
        tokio::spawn(async move {
            serve_connection(io, admission, router, permit).await;
            drop(guard);
        });
    }
    connections.active.close_all();
    connections.active.wait_until_empty().await;
}

async fn serve_connection<S: Socket>(
    io: Connection<S>,
    admission: Admission,
    router: Router,
    permit: OwnedSemaphorePermit,
) {
    let progress = admission.progress.clone();
    let handler = TowerToHyperService::new(router);
    let service = hyper::service::service_fn(move |mut request: hyper::Request<Incoming>| {
        admission.progress.begin_request();
        let guard = ResponseGuard(admission.progress.clone());
        request.extensions_mut().insert(ConnectInfo(admission.clone()));
        let expects_continue = request.headers().contains_key(header::EXPECT);
        let (parts, body) = request.into_parts();
        let body = RequestBody(Arc::new(Mutex::new(ReceivedBody { body, is_read: false })));
        let response = handler.call(hyper::Request::from_parts(parts, body.clone()));
        async move {
            let mut response = response.await?;
            // Without `Connection: close`, the client could send another request on a connection that is about to
            // close.
            let closes = response.headers().contains_key(header::CONNECTION);
            if !closes && !body.discard_rest(expects_continue).await {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| TrackedBody { body, _guard: guard }))
        }
    });
    let served = http1::Builder::new()
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(io), service);
    let mut served = pin!(served);
    tokio::select! {
        biased;
        // Errors are ignored, because the client has then disconnected or received an error response.
        _ = served.as_mut() => return,
        () = progress.close_requested() => {}
    }
    if timeout(LAST_REQUEST_WAIT, served.as_mut()).await.is_ok()
        || progress.is_displaced() && progress.is_waiting()
    {
        return;
    }
    served.as_mut().graceful_shutdown();
    // An idle connection gives up its permit immediately, because another client is waiting for it.
    let permit = Some(permit).filter(|_| !progress.is_waiting());
    while timeout(CLOSE_TIMEOUT, served.as_mut()).await.is_err() && !progress.is_waiting() {}
    drop(permit);
}

/// The body of a request. A handler may respond without reading all of it.
#[derive(Clone)]
struct RequestBody(Arc<Mutex<ReceivedBody>>);

struct ReceivedBody {
    body: Incoming,
    /// True if the body was read to its end. `Incoming` does not know the end of a chunked body.
    is_read: bool,
}

impl RequestBody {
    fn lock(&self) -> MutexGuard<'_, ReceivedBody> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Discards the unread rest of a small body so that the connection can be kept alive. Returns false if this
    /// fails, for example because the rest is too large or does not arrive in time.
    async fn discard_rest(&self, expects_continue: bool) -> bool {
        let (is_complete, least) = {
            let received = self.lock();
            (received.is_read || received.body.is_end_stream(), received.body.size_hint().lower())
        };
        // The client waits for `100 Continue` before it sends the body.
        if is_complete || expects_continue || least > DISCARDED_BYTES_MAX {
            return is_complete;
        }
        let mut left = DISCARDED_BYTES_MAX;
        let discard = async {
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut self.lock().body).poll_frame(cx)).await {
                let Ok(frame) = frame else { return false };
                let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
                let Some(rest) = left.checked_sub(bytes) else { return false };
                left = rest;
            }
            true
        };
        timeout(DISCARD_TIMEOUT, discard).await.unwrap_or(false)
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let mut received = self.lock();
        let frame = Pin::new(&mut received.body).poll_frame(cx);
        received.is_read |= matches!(frame, Poll::Ready(None));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.lock().body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.lock().body.size_hint()
    }
}

/// Guard that, when dropped, records that the response is complete.
struct ResponseGuard(Arc<Progress>);

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        self.0.answer_request();
    }
}

/// Response body that records when the response is complete.
struct TrackedBody {
    body: Body,
    _guard: ResponseGuard,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

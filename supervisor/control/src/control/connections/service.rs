//! Serves the requests of each connection with hyper.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::connect_info::ConnectInfo;
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

/// Maximum size of a request's head, in bytes. Also the maximum size of what is read from a connection at once.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of headers of a request.
const HEADERS_MAX: usize = 100;

/// Time in which a connection that must close still receives a request that was sent before.
const LAST_REQUEST_WAIT: Duration = Duration::from_millis(100);

/// Maximum time for which a closing connection without a request is waited for.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves connections until the listener has closed, then waits for the connections that were admitted before.
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
        let response = handler.call(request);
        async move { response.await.map(|response| response.map(|body| TrackedBody { body, _guard: guard })) }
    });
    let served = http1::Builder::new()
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(io), service);
    let mut served = pin!(served);
    tokio::select! {
        biased;
        // The client has disconnected, or was sent the reason.
        _ = served.as_mut() => return,
        () = progress.close_requested() => {}
    }
    if timeout(LAST_REQUEST_WAIT, served.as_mut()).await.is_ok() {
        return;
    }
    served.as_mut().graceful_shutdown();
    // An idle connection no longer counts, because another client waits for the permit.
    let permit = Some(permit).filter(|_| !progress.is_waiting());
    while timeout(CLOSE_TIMEOUT, served.as_mut()).await.is_err() && !progress.is_waiting() {}
    drop(permit);
}

/// Guard that records the end of a response.
struct ResponseGuard(Arc<Progress>);

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        self.0.answer_request();
    }
}

/// The body of a response.
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

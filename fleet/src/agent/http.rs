//! Serves the agent's metrics and health checks over HTTP, if the configuration sets an address. `metrics` formats the
//! text. `supervisor` decides whether a bulkhead accepts jobs. Jobs are never submitted over HTTP.
//!
//! The number and duration of connections are limited, because idle connections must not use up the file descriptors
//! that the agent needs for its work.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::Shared;

/// Maximum number of open connections. A further client replaces the oldest connection.
const CONNECTIONS_MAX: usize = 64;
/// Maximum duration of a connection, which serves a single request.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed attempt to accept a connection, for example because there are no free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Serves the metrics and health endpoints until the agent stops.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || StatusCode::OK))
        .route("/readyz", get(ready))
        .with_state(shared);
    let mut tasks = JoinSet::new();
    let mut connections: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!("failed to accept a connection for metrics or health checks: {error}");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        while tasks.try_join_next().is_some() {}
        connections.retain(|connection| !connection.is_finished());
        if connections.len() == CONNECTIONS_MAX
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        connections.push_back(tasks.spawn(serve_one(socket, routes.clone())));
    }
}

async fn serve_one(socket: TcpStream, routes: Router) {
    let service = TowerToHyperService::new(routes);
    let connection = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(socket), service);
    // Errors are ignored, because the client has then disconnected or received an error response.
    let _ = timeout(CONNECTION_TIMEOUT, connection).await;
}

async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], shared.metrics.text(shared.clock.offset_seconds()))
}

/// Responds with status 200 if at least one of the agent's bulkheads accepts jobs.
async fn ready(State(shared): State<Arc<Shared>>) -> StatusCode {
    match shared.bulkheads.values().any(|served| served.gate.is_open()) {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    }
}

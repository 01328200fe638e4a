//! Serves the agent's metrics and health checks over HTTP, if the configuration sets an address. `metrics` formats the
//! text. `supervisor` decides whether a bulkhead accepts jobs. Jobs are never submitted over HTTP.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use super::Shared;

/// Serves the metrics and health endpoints until the agent stops.
pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(async || StatusCode::OK))
        .route("/readyz", get(ready))
        .with_state(shared);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!("failed to serve metrics and health checks: {error}");
    }
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

//! Jobs over HTTP for load balancers and remote clients (`jobs_http`): a listener that accepts only jobs and health
//! checks, and keeps connections alive. A separate thread serves the listener, so clients cannot delay the admin API,
//! regardless of their number. The listener closes after the data plane has shut down.

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use bulkhead_config::{Role, SupervisorConfig};
use bulkhead_plane::access::TokenGrant;
use bulkhead_plane::threads::{ThreadMonitor, panic_on_request};
use bulkhead_shared::RejectReason;
use tokio::net::TcpStream;

use super::connections::{self, Active, Admission, serve};
use super::http::{complete_with, limit_time};
use super::outcomes::reject_request;
use super::paths::HEALTH_PATHS;
use super::responses::problem;
use super::waiting::{HEALTH_MAX, ListenerRules, REFUSED_MAX, WaitingConnections};
use super::{CLOSE_TIMEOUT, Shared, routes, tcp, tokens};
use crate::observe::metrics::JobsHttpNumbers;

/// Returns the maximum number of descriptors that `jobs_http` clients can use. Each served client uses three
/// descriptors, two of them for a connection to the data plane. Each waiting client uses one.
pub(super) fn descriptors(config: &SupervisorConfig) -> u64 {
    let connections = config.jobs_http.map_or(0, |_| 4 * config.jobs_http_max + HEALTH_MAX + REFUSED_MAX);
    connections as u64
}

/// Counters of the `jobs_http` listener, from which the metrics are computed.
#[derive(Debug, Default)]
pub(super) struct JobsHttpCounters {
    /// Connections in progress. Empty if there is no listener.
    active: OnceLock<Arc<Active>>,
    /// Number of connections that were refused because all connections were in use.
    refused: Arc<AtomicU64>,
    /// Number of jobs rejected because their requests contained no valid token.
    unauthenticated: AtomicU64,
}

impl JobsHttpCounters {
    /// Closes all connections and waits until they are closed. A connection that is serving a request is closed after
    /// the response.
    pub(super) async fn close_all(&self) {
        if let Some(active) = self.active.get() {
            active.close_all();
            active.wait_until_empty().await;
        }
    }

    /// Returns the current counters, or `None` if there is no listener.
    pub(super) fn read(&self) -> Option<JobsHttpNumbers> {
        Some(JobsHttpNumbers {
            connections: self.active.get()?.count() as u64,
            refused: self.refused.load(Ordering::Relaxed),
            unauthenticated: self.unauthenticated.load(Ordering::Relaxed),
        })
    }
}

/// Starts the thread that serves `jobs_http` connections until the control plane has shut down.
pub(super) fn start(
    control: Shared,
    socket: TcpListener,
    threads: &ThreadMonitor,
) -> io::Result<JoinHandle<()>> {
    socket.set_nonblocking(true)?;
    tracing::info!("jobs_http on {}", socket.local_addr()?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let tasks = threads.clone();
    let run = move || {
        runtime.block_on(async {
            let listening = tasks.wrap_task("jobs over HTTP", listen(control.clone(), socket));
            let listening = tokio::spawn(listening);
            control.until_shutdown(panic_on_request("JOBS_HTTP")).await;
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, listening).await;
        });
    };
    threads.spawn("jobs-http", run)
}

async fn listen(control: Shared, socket: TcpListener) {
    let listener = match tokio::net::TcpListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("failed to listen on the jobs_http address: {error}"),
    };
    let max = control.config().supervisor.jobs_http_max;
    let (dispatcher, queue) =
        connections::channel::<TcpStream>(control.shutdown.subscribe(), max + HEALTH_MAX);
    let rules = ListenerRules {
        served_max: max,
        waiting_max: max,
        keeps_alive: true,
        refusal: "all jobs_http_max connections are in use; try again later",
    };
    // The listener is only started once.
    let _ = control.jobs_http.active.set(queue.active());
    let waiting = WaitingConnections::new(dispatcher, rules, control.jobs_http.refused.clone());
    tokio::join!(
        tcp::accept_until_shutdown(&control, (listener, control.inherited.jobs_http), waiting),
        serve(queue, router(control.clone()))
    );
}

fn router(control: Shared) -> Router {
    let not_found = async || {
        let detail = "this address serves only POST /v1/bulkheads/NAME/jobs, GET /healthz and GET /readyz";
        problem(StatusCode::NOT_FOUND, detail)
    };
    let identify = from_fn_with_state(control.clone(), identify);
    routes::jobs_router(|jobs| jobs.layer(identify))
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
        .layer(from_fn(limit_time))
        .layer(from_fn_with_state(control.clone(), complete))
        .with_state(control)
}

/// Rejects a job if the request does not contain the token of an `[[access]]` entry.
async fn identify(
    State(control): State<Shared>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    mut request: Request,
    next: Next,
) -> Response {
    // The router rejects all other methods.
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let token = tokens::bearer_token(request.headers()).and_then(|secret| control.tokens.find(secret));
    match token {
        Some(token) if token.role == Role::Jobs => {
            admission.progress.set_identified();
            request.extensions_mut().insert(token.clone());
            let mut response = next.run(request).await;
            response.extensions_mut().insert(token);
            response
        }
        Some(_) => {
            let detail = "this token can only read the admin API: use the token of an [[access]] entry with \
                          `role = \"jobs\"`";
            reject_request(&request, RejectReason::Forbidden, detail)
        }
        None => {
            control.jobs_http.unauthenticated.fetch_add(1, Ordering::Relaxed);
            let detail =
                "send the `Authorization: Bearer TOKEN` header with the token of an [[access]] entry";
            let mut response = reject_request(&request, RejectReason::Unauthenticated, detail);
            let challenge = HeaderValue::from_static("Bearer realm=\"bulkhead\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            response
        }
    }
}

/// Completes a response. While the supervisor is stopping, and after it has handed over to a successor, also closes the
/// connection. The client then sends its next request to another host or to the successor.
async fn complete(
    State(control): State<Shared>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    request: Request,
    next: Next,
) -> Response {
    let is_health = HEALTH_PATHS.contains(&request.uri().path());
    let is_leaving = || control.is_stopping.load(Ordering::SeqCst) || !control.handover.is_listening();
    let closes = || admission.session.is_none() || is_leaving();
    // `identify` adds the token to the response.
    let has_access = |response: &Response, bulkhead: &str| {
        response.extensions().get::<TokenGrant>().is_some_and(|token| token.allows_bulkhead(bulkhead))
    };
    complete_with(request, next, (&control.counters, has_access), !is_health, closes).await
}

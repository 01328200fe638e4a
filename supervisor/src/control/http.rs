//! HTTP on the admin socket: routes, problem documents, streams.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, map_response};
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use futures_util::stream::{self, Stream, StreamExt};
use serde::{Deserialize, Deserializer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, oneshot};
use tokio::time::Sleep;

use super::{Control, browser, routes};
use crate::command::{Change, Command, Commander, SteerError, TenantChange, Verb};
use crate::entry::{self, Refusal};

/// Connections at once that are told why they are not served; the next ones are told nothing. As many reports
/// of such wait for the data plane.
const REFUSED_MAX: usize = 16;

/// Connections served at once; the next ones wait.
pub(crate) const CONNECTIONS_MAX: usize = 384;

/// How many of them may be streams, which last as long as their readers like.
pub(super) const STREAMS_MAX: usize = 128;

/// How long a request may take to come and to be answered, before its connection is closed.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// How long whoever asked may read nothing of the answer.
const READ_WITHIN: Duration = Duration::from_secs(30);

/// How long a connection that is answered waits for its other side to close.
const LINGER: Duration = Duration::from_secs(1);

/// Bytes that it throws away meanwhile, at most.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Bytes of a request's body, but for payloads.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Silence after which a stream says that it still is one.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Events and lines that one answer holds, unless it asks for fewer.
pub(super) const LIMIT: usize = 4096;

pub(super) type Shared = Arc<Control>;

/// Serves until the control plane ends.
pub(super) async fn serve(control: Shared, listener: UnixListener, own: u32) {
    let mut end = control.end.subscribe();
    let listener = Guarded {
        listener,
        own,
        commander: control.commander.clone(),
        places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        places_for_refused: Arc::new(Semaphore::new(REFUSED_MAX)),
        places_for_reports: Arc::new(Semaphore::new(REFUSED_MAX)),
    };
    let shutdown = async move {
        let _ = end.wait_for(|is_over| *is_over).await;
    };
    let service = router(control).into_make_service_with_connect_info::<Entry>();
    let served = axum::serve(listener, service).with_graceful_shutdown(shutdown).await;
    if let Err(error) = served {
        tracing::error!("the admin socket is not served any more: {error}");
    }
}

/// What is the same on all sockets.
pub(super) fn router(control: Shared) -> Router {
    routes::router()
        .fallback(async || problem(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            problem(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(let_in))
        .layer(map_response(complete))
        .with_state(control)
}

/// A listener that takes only so many, and finds out whom it may serve.
struct Guarded {
    listener: UnixListener,
    /// The user who may, beside root.
    own: u32,
    commander: Commander,
    places: Arc<Semaphore>,
    places_for_refused: Arc<Semaphore>,
    places_for_reports: Arc<Semaphore>,
}

/// How a connection is served.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// If it is not, why, in a sentence.
    refusal: Option<Arc<str>>,
    /// Whether the request takes as long as it takes: whoever serves it sees to its end.
    is_patient: Arc<AtomicBool>,
}

impl Entry {
    pub(super) fn new() -> Self {
        Self { refusal: None, is_patient: Arc::default() }
    }

    fn refused(why: &str) -> Self {
        Self { refusal: Some(why.into()), ..Self::new() }
    }

    /// From now on the request has no time limit but what its handler gives it.
    pub(super) fn be_patient(&self) {
        self.is_patient.store(true, Ordering::Relaxed);
    }

    fn is_patient(&self) -> bool {
        self.is_patient.load(Ordering::Relaxed)
    }
}

impl Connected<IncomingStream<'_, Guarded>> for Entry {
    fn connect_info(stream: IncomingStream<'_, Guarded>) -> Self {
        stream.remote_addr().clone()
    }
}

async fn let_in(ConnectInfo(entry): ConnectInfo<Entry>, request: Request, next: Next) -> Response {
    if let Some(why) = entry.refusal {
        return problem(StatusCode::FORBIDDEN, &why);
    }
    // Also on the Unix socket: somebody may have made it a port for their browser.
    if let Some(refusal) = browser::refuse(&request) {
        return refusal;
    }
    let mut answer = pin!(next.run(request));
    match tokio::time::timeout(ANSWERED_WITHIN, &mut answer).await {
        Ok(answer) => answer,
        Err(_) if entry.is_patient() => answer.await,
        // Who waits for `100 Continue` has had it, so that nothing else looks at the time any more.
        Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the request did not come whole in time"),
    }
}

impl Guarded {
    fn check(&self, socket: &UnixStream) -> Result<(), Refusal> {
        let peer = entry::peer_of(socket)?;
        let (uid, own) = (peer.uid, self.own);
        if uid != own && uid != 0 {
            let message = format!("user {uid} may not use the admin socket: only user {own} and root may");
            return Err(Refusal::forbidden(peer, message));
        }
        entry::check_descent(socket, peer)
    }

    /// Reports it. Returns what there is to say and a place to say it in, if there is one.
    fn refuse(&self, refusal: Refusal) -> Option<(Entry, OwnedSemaphorePermit)> {
        let place = self.places_for_refused.clone().try_acquire_owned();
        let entry = Entry::refused(&refusal.message);
        // A crowd must not fill the queue of commands, and has been heard of.
        if let Ok(place) = self.places_for_reports.clone().try_acquire_owned() {
            let _ = self.commander.send(Command::Refused { refusal, _place: place });
        }
        Some((entry, place.ok()?))
    }
}

/// A connection that holds its place, and not for ever: one request is served on each.
pub(super) struct Placed<S> {
    socket: S,
    patience: Pin<Box<Sleep>>,
    is_patient: Arc<AtomicBool>,
    state: Turn,
    _place: OwnedSemaphorePermit,
}

/// Whose turn it is on a connection.
#[derive(PartialEq)]
enum Turn {
    /// The request is not all there, or not answered yet.
    Asking,
    /// The answer goes out as it comes.
    Answering,
    /// There is something to send, and nobody reads.
    Stalled,
    /// All is sent. What still comes is thrown away for a moment: a connection that is closed with bytes
    /// unread is reset, and the answer may be lost with it.
    Lingering { bytes_left: usize },
}

impl<S> Placed<S> {
    pub(super) fn new(socket: S, entry: &Entry, place: OwnedSemaphorePermit) -> Self {
        let patience = Box::pin(tokio::time::sleep(ANSWERED_WITHIN));
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

impl axum::serve::Listener for Guarded {
    type Io = Placed<UnixStream>;
    type Addr = Entry;

    async fn accept(&mut self) -> (Placed<UnixStream>, Entry) {
        let Ok(place) = self.places.clone().acquire_owned().await else {
            // The semaphore is never closed.
            return std::future::pending().await;
        };
        loop {
            let Ok((socket, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            match self.check(&socket) {
                Ok(()) => {
                    let entry = Entry::new();
                    return (Placed::new(socket, &entry, place), entry);
                }
                Err(refusal) => {
                    if let Some((entry, place)) = self.refuse(refusal) {
                        return (Placed::new(socket, &entry, place), entry);
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Entry> {
        Ok(Entry::new())
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
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, bytes);
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

// Answers.

pub(super) const PROBLEM: &str = "application/problem+json";
pub(super) const JSON: &str = "application/json";

/// A problem document (RFC 9457).
pub(super) fn problem(status: StatusCode, detail: &str) -> Response {
    problem_with(status, detail, json!({}))
}

/// The same with fields of its own.
pub(super) fn problem_with(status: StatusCode, detail: &str, mut body: serde_json::Value) -> Response {
    body["type"] = json!("about:blank");
    body["title"] = json!(status.canonical_reason().unwrap_or("error"));
    body["status"] = json!(status.as_u16());
    body["detail"] = json!(detail);
    (status, [(header::CONTENT_TYPE, PROBLEM)], body.to_string()).into_response()
}

/// What the router's own parts refuse, such as a query that makes no sense, is told like everything else;
/// and whoever is put off hears until when.
pub(super) async fn complete(mut response: Response) -> Response {
    let status = response.status();
    let is_plain =
        response.headers().get(header::CONTENT_TYPE).is_none_or(|kind| kind != PROBLEM && kind != JSON);
    if is_plain && (status.is_client_error() || status.is_server_error()) {
        let said = axum::body::to_bytes(response.into_body(), BODY_BYTES_MAX).await.unwrap_or_default();
        response = problem(status, &String::from_utf8_lossy(&said));
    }
    let headers = response.headers_mut();
    // A place is not to be held by whoever may ask again some day.
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    // Workers' output and results are theirs: no browser is to make a page or a script of them.
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(HeaderValue::from_static(INERT));
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    }
    response
}

/// The policy of whatever is not the dashboard.
const INERT: &str = "default-src 'none'; frame-ancestors 'none'";

pub(super) fn too_many_streams() -> Response {
    let detail = format!("{STREAMS_MAX} streams are open already; end one, or ask with follow=false");
    problem(StatusCode::SERVICE_UNAVAILABLE, &detail)
}

pub(super) fn stuck() -> Response {
    problem(StatusCode::SERVICE_UNAVAILABLE, "the data plane does not answer")
}

pub(super) fn not_found(name: &str) -> Response {
    problem(StatusCode::NOT_FOUND, &format!("there is no bulkhead '{}'", name.escape_debug()))
}

pub(super) async fn healthz(State(control): State<Shared>) -> Response {
    match control.snapshots(Some("")).await {
        Some(_) => "ok\n".into_response(),
        None => stuck(),
    }
}

#[derive(Deserialize)]
pub(super) struct ReadyQuery {
    bulkhead: Option<String>,
}

pub(super) async fn readyz(State(control): State<Shared>, Query(query): Query<ReadyQuery>) -> Response {
    let Some(snapshots) = control.snapshots(query.bulkhead.as_deref()).await else { return stuck() };
    let is_serving = |state: &str| matches!(state, "ready" | "degraded");
    let (is_ready, status) = match query.bulkhead.as_deref() {
        Some(name) => match snapshots.first() {
            None => return not_found(name),
            Some(snapshot) => (is_serving(snapshot.state), snapshot.state),
        },
        None if control.is_stopping.load(Ordering::SeqCst) => (false, "draining"),
        None if control.is_started.load(Ordering::SeqCst) => (true, "ready"),
        None => (false, "starting"),
    };
    let degraded: Vec<_> = snapshots
        .iter()
        .filter(|snapshot| snapshot.state != "ready")
        .map(|snapshot| json!({"name": snapshot.name, "state": snapshot.state, "detail": snapshot.detail}))
        .collect();
    let code = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, axum::Json(json!({"status": status, "degraded": degraded}))).into_response()
}

pub(super) async fn bulkheads(State(control): State<Shared>) -> Response {
    match control.snapshots(None).await {
        Some(snapshots) => axum::Json(json!({"bulkheads": snapshots})).into_response(),
        None => stuck(),
    }
}

#[derive(Deserialize)]
pub(super) struct TenantQuery {
    tenant: Option<String>,
}

pub(super) async fn bulkhead(
    State(control): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<TenantQuery>,
) -> Response {
    if let Some(tenant) = query.tenant {
        return match control.tenant_snapshot(&name, tenant).await {
            Some(Ok(snapshot)) => axum::Json(snapshot).into_response(),
            Some(Err(error)) => not_done(&name, &error),
            None => stuck(),
        };
    }
    match control.snapshots(Some(&name)).await {
        Some(snapshots) => match snapshots.first() {
            Some(snapshot) => axum::Json(snapshot).into_response(),
            None => not_found(&name),
        },
        None => stuck(),
    }
}

pub(super) async fn change(State(control): State<Shared>, Path(name): Path<String>, body: Bytes) -> Response {
    let change = match read_body(&body, Change::problem) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    let (reply, answer) = oneshot::channel();
    let command = Command::Change { bulkhead: name.clone(), change, reply };
    changed(&control, &name, command, answer).await
}

pub(super) async fn change_tenant(
    State(control): State<Shared>,
    Path((name, tenant)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let change = match read_body(&body, TenantChange::problem) {
        Ok(change) => change,
        Err(sentence) => return problem(StatusCode::BAD_REQUEST, &sentence),
    };
    let (reply, answer) = oneshot::channel();
    let command = Command::ChangeTenant { bulkhead: name.clone(), tenant, change, reply };
    changed(&control, &name, command, answer).await
}

/// Sends a command, and tells what came of it.
async fn changed<T: serde::Serialize>(
    control: &Control,
    name: &str,
    command: Command,
    answer: oneshot::Receiver<Result<T, SteerError>>,
) -> Response {
    if control.commander.send(command).is_err() {
        return stuck();
    }
    match tokio::time::timeout(super::ANSWER_WITHIN, answer).await {
        Ok(Ok(Ok(state))) => axum::Json(state).into_response(),
        Ok(Ok(Err(error))) => not_done(name, &error),
        Ok(Err(_)) | Err(_) => stuck(),
    }
}

/// Reads what to change; in one sentence, what is wrong with it.
fn read_body<T: serde::de::DeserializeOwned>(
    body: &[u8],
    judge: impl Fn(&T) -> Option<String>,
) -> Result<T, String> {
    let value: serde_json::Value =
        serde_json::from_slice(body).map_err(|error| format!("the body is not JSON: {error}"))?;
    let change: T = serde_path_to_error::deserialize(value).map_err(|error| error.to_string())?;
    match judge(&change) {
        Some(problem) => Err(problem),
        None => Ok(change),
    }
}

fn not_done(name: &str, error: &SteerError) -> Response {
    match error {
        SteerError::NotFound => not_found(name),
        SteerError::Stopping => problem(StatusCode::CONFLICT, &error.to_string()),
        SteerError::NoTenant => problem(StatusCode::NOT_FOUND, &error.to_string()),
        SteerError::Unfit(sentence) => problem(StatusCode::BAD_REQUEST, sentence),
    }
}

pub(super) async fn restart(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Restart, "restart").await
}

pub(super) async fn drain(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Drain, "drain").await
}

pub(super) async fn resume(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Resume, "resume").await
}

pub(super) async fn reset(State(control): State<Shared>, Path(name): Path<String>) -> Response {
    steer(&control, name, Verb::Reset, "reset").await
}

async fn steer(control: &Control, name: String, verb: Verb, done: &str) -> Response {
    let (reply, answer) = oneshot::channel();
    if control.commander.send(Command::Steer { bulkhead: name.clone(), verb, reply }).is_err() {
        return stuck();
    }
    match tokio::time::timeout(super::ANSWER_WITHIN, answer).await {
        Ok(Ok(Ok(()))) => axum::Json(json!({"bulkhead": name, "done": done})).into_response(),
        Ok(Ok(Err(error))) => not_done(&name, &error),
        Ok(Err(_)) | Err(_) => stuck(),
    }
}

// Streams.

#[derive(Deserialize)]
pub(super) struct StreamQuery {
    since: Option<u64>,
    bulkhead: Option<String>,
    limit: Option<usize>,
    #[serde(default, deserialize_with = "switch")]
    follow: Option<bool>,
}

/// `?follow`, `?follow=true` and `?follow=1` are the same.
pub(super) fn switch<'de, D: Deserializer<'de>>(value: D) -> Result<Option<bool>, D::Error> {
    match String::deserialize(value)?.as_str() {
        "" | "1" | "true" => Ok(Some(true)),
        "0" | "false" => Ok(Some(false)),
        _ => Err(serde::de::Error::custom("must be true or false")),
    }
}

/// What comes on a live channel, until the control plane ends. A reader that is too slow hears of it.
pub(super) fn live<T: Clone + Send + 'static>(
    control: &Shared,
    receiver: broadcast::Receiver<T>,
    place: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<T, u64>> + Send + 'static {
    let end = control.end.subscribe();
    stream::unfold((receiver, end, place), async |(mut receiver, mut end, place)| {
        let next = tokio::select! {
            // What was sent before the end comes before it.
            biased;
            next = receiver.recv() => next,
            _ = end.wait_for(|is_over| *is_over) => return None,
        };
        match next {
            Ok(item) => Some((Ok(item), (receiver, end, place))),
            Err(broadcast::error::RecvError::Lagged(count)) => Some((Err(count), (receiver, end, place))),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    })
}

/// Events are server-sent events, unless whoever asks takes only something else.
fn takes_stream(accept: &str) -> bool {
    ["text/event-stream", "text/*", "*/*"].iter().any(|kind| accept.contains(kind))
}

/// A reader of server-sent events that was cut off says where it was.
pub(super) fn last_event_id(headers: &HeaderMap) -> Option<u64> {
    headers.get("last-event-id")?.to_str().ok()?.parse().ok()
}

pub(super) async fn events(
    State(control): State<Shared>,
    headers: HeaderMap,
    Query(query): Query<StreamQuery>,
) -> Response {
    if let Some(name) = query.bulkhead.as_ref().filter(|name| !control.reloads.has(name)) {
        return not_found(name);
    }
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let is_stream = query.follow.unwrap_or_else(|| accept.is_none_or(takes_stream));
    let since = query.since.or(last_event_id(&headers)).unwrap_or(0);
    let limit = query.limit.unwrap_or(LIMIT);
    let (kept, receiver) = control.events.follow(since, query.bulkhead.as_deref(), limit);
    if !is_stream {
        let body: String = kept.iter().map(|event| format!("{}\n", event.json)).collect();
        return ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response();
    }
    let Ok(place) = control.streams.clone().try_acquire_owned() else { return too_many_streams() };
    let bulkhead = query.bulkhead;
    let coming = live(&control, receiver, place).filter_map(move |item| {
        let wanted = match &item {
            Ok(event) => bulkhead.as_deref().is_none_or(|name| event.bulkhead.as_deref() == Some(name)),
            Err(_) => true,
        };
        std::future::ready(wanted.then_some(item))
    });
    let sse = stream::iter(kept).map(Ok).chain(coming).map(|item| match item {
        Ok(event) => Ok::<_, Infallible>(
            axum::response::sse::Event::default().id(event.seq.to_string()).data(&event.json),
        ),
        Err(count) => {
            Ok(axum::response::sse::Event::default().comment(format!("{count} events were missed")))
        }
    });
    let keep_alive = axum::response::sse::KeepAlive::new().interval(KEEP_ALIVE);
    axum::response::Sse::new(sse).keep_alive(keep_alive).into_response()
}

pub(super) async fn logs(
    State(control): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<StreamQuery>,
) -> Response {
    if !control.reloads.has(&name) {
        return not_found(&name);
    }
    let (kept, receiver) = control.output.follow(&name, query.limit.unwrap_or(LIMIT));
    let kept = stream::iter(kept).map(|line| Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))));
    let body = if query.follow == Some(true) {
        let Ok(place) = control.streams.clone().try_acquire_owned() else { return too_many_streams() };
        let coming = live(&control, receiver, place).map(|item| match item {
            Ok(line) => Ok(Bytes::from(format!("{line}\n"))),
            Err(count) => Ok(Bytes::from(format!("{}\n", json!({"dropped": count})))),
        });
        Body::from_stream(kept.chain(coming))
    } else {
        Body::from_stream(kept)
    };
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

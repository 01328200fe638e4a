//! Handles `GET /v1/events` and `GET /v1/bulkheads/{name}/logs`, whose responses can continue as streams. Also contains
//! the functions with which `watch` streams its data. The `observe` modules `events` and `output` store the events and
//! lines.

use std::convert::Infallible;
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, broadcast};

use super::Shared;
use super::responses::{not_found, parse_bool, problem};
use crate::observe::events::{Piece, Reader, rfc3339};

/// Maximum number of concurrent streams. Lower than the maximum number of connections, because streams can stay open
/// forever.
pub(super) const STREAMS_MAX: usize = 128;

/// Maximum number of events or lines in one response, unless the client requests another number.
pub(super) const LIMIT_DEFAULT: usize = 4096;

/// Time without data after which a keep-alive comment is sent on a stream.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

const KEEP_ALIVE_COMMENT: Bytes = Bytes::from_static(b":\n\n");

pub(super) fn too_many_streams() -> Response {
    let detail = format!("{STREAMS_MAX} streams are already open; close a stream, or use follow=false");
    problem(StatusCode::SERVICE_UNAVAILABLE, &detail)
}

/// Formats a server-sent event. `data` must not contain a newline.
pub(super) fn frame(kind: &str, data: &str) -> Bytes {
    debug_assert!(!data.contains('\n'));
    format!("event: {kind}\ndata: {data}\n\n").into()
}

/// Returns a response that streams server-sent events. Each item of `frames` consists of one or more complete
/// events.
pub(super) fn server_sent(frames: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let alive = stream::unfold(Box::pin(frames), async |mut frames| {
        let next = tokio::time::timeout(KEEP_ALIVE_INTERVAL, frames.next())
            .await
            .unwrap_or(Some(KEEP_ALIVE_COMMENT));
        next.map(|bytes| (Ok::<_, Infallible>(bytes), frames))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(alive)).into_response()
}

/// Returns a stream of the events that the reader receives. The stream ends when the control plane shuts down.
pub(super) fn pieces(
    control: &Shared,
    reader: Reader,
    permit: OwnedSemaphorePermit,
) -> impl Stream<Item = Piece> + Send + 'static {
    let state = (control.clone(), reader, control.shutdown.subscribe(), permit);
    stream::unfold(state, async |(control, mut reader, mut shutdown, permit)| {
        let piece = tokio::select! {
            // Events that were added before the control plane shuts down must be delivered first.
            biased;
            piece = reader.next(&control.events) => piece,
            _ = shutdown.wait_for(|has_begun| *has_begun) => return None,
        };
        Some((piece, (control, reader, shutdown, permit)))
    })
}

/// Returns a stream of the items sent on a broadcast channel. If the stream is read too slowly and misses items, it
/// yields the number of missed items. The stream ends when the control plane shuts down.
pub(super) fn live<T: Clone + Send + 'static>(
    control: &Shared,
    receiver: broadcast::Receiver<T>,
    permit: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<T, u64>> + Send + 'static {
    let shutdown = control.shutdown.subscribe();
    stream::unfold((receiver, shutdown, permit), async |(mut receiver, mut shutdown, permit)| {
        let next = tokio::select! {
            // Items that were sent before the control plane shuts down must be delivered first.
            biased;
            next = receiver.recv() => next,
            _ = shutdown.wait_for(|has_begun| *has_begun) => return None,
        };
        match next {
            Ok(item) => Some((Ok(item), (receiver, shutdown, permit))),
            Err(broadcast::error::RecvError::Lagged(count)) => {
                Some((Err(count), (receiver, shutdown, permit)))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamQuery {
    since: Option<u64>,
    bulkhead: Option<String>,
    limit: Option<usize>,
    #[serde(default, deserialize_with = "parse_bool")]
    follow: Option<bool>,
}

/// Returns true if the `Accept` header allows server-sent events.
fn accepts_stream(accept: &str) -> bool {
    ["text/event-stream", "text/*", "*/*"].iter().any(|kind| accept.contains(kind))
}

/// Returns the ID of the last event that the client received. A client sends this ID when it reconnects to a stream of
/// server-sent events. The ID is newer than the value of `since`, because a client repeats the original URL.
pub(super) fn last_event_id(headers: &HeaderMap) -> Option<u64> {
    headers.get("last-event-id")?.to_str().ok()?.parse().ok()
}

pub(super) async fn events(
    State(control): State<Shared>,
    headers: HeaderMap,
    Query(query): Query<StreamQuery>,
) -> Response {
    if let Some(name) = query.bulkhead.as_ref().filter(|name| !control.reloads.has(name)) {
        // The events of a removed bulkhead can still be read.
        if control.events.kept(0, Some(name), 1).is_empty() {
            return not_found(name);
        }
    }
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let is_stream = query.follow.unwrap_or_else(|| accept.is_none_or(accepts_stream));
    let since = last_event_id(&headers).or(query.since).unwrap_or(0);
    let limit = query.limit.unwrap_or(LIMIT_DEFAULT);
    if !is_stream {
        let kept = control.events.kept(since, query.bulkhead.as_deref(), limit);
        let body: Vec<u8> = kept.iter().flat_map(|event| [event.json(), b"\n"]).flatten().copied().collect();
        return ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response();
    }
    let Ok(permit) = control.streams.clone().try_acquire_owned() else { return too_many_streams() };
    let reader = control.events.reader(since, query.bulkhead, limit);
    server_sent(pieces(&control, reader, permit).map(|piece| {
        let missed = match piece.missed {
            0 => String::new(),
            count => format!(": {count} events were missed\n\n"),
        };
        concatenate(missed, "", &piece)
    }))
}

/// Returns `head` followed by the frames of a group of events, with `before` in front of each frame.
pub(super) fn concatenate(head: impl Into<Vec<u8>>, before: &str, piece: &Piece) -> Bytes {
    let mut bytes: Vec<u8> = head.into();
    for event in &piece.events {
        bytes.extend_from_slice(before.as_bytes());
        bytes.extend_from_slice(event.frame());
    }
    bytes.into()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LogsQuery {
    since: Option<u64>,
    limit: Option<usize>,
    #[serde(default, deserialize_with = "parse_bool")]
    follow: Option<bool>,
}

pub(super) async fn logs(
    State(control): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<LogsQuery>,
) -> Response {
    if !control.reloads.has(&name) {
        return not_found(&name);
    }
    let limit = query.limit.unwrap_or(LIMIT_DEFAULT);
    let (kept, receiver) = control.output.follow(&name, query.since.unwrap_or(0), limit);
    let kept = stream::iter(kept).map(|line| Ok::<_, Infallible>(Bytes::from(format!("{line}\n"))));
    let body = if query.follow == Some(true) {
        let Ok(permit) = control.streams.clone().try_acquire_owned() else { return too_many_streams() };
        let coming = live(&control, receiver, permit).map(move |item| match item {
            Ok(line) => Ok(Bytes::from(format!("{line}\n"))),
            Err(count) => {
                let at = rfc3339(SystemTime::now());
                Ok(Bytes::from(format!("{}\n", json!({"at": at, "bulkhead": name, "dropped": count}))))
            }
        });
        Body::from_stream(kept.chain(coming))
    } else {
        Body::from_stream(kept)
    };
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

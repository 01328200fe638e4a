//! Handler for `GET /v1/watch`. The response streams all events, and the states of all bulkheads once per second, to
//! watchers such as the dashboard. The data plane is queried once for all watchers together, and not at all if there
//! are none.

use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::Response;
use futures_util::stream::{self, Stream, StreamExt};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{Notify, watch};

use super::Control;
use super::Shared;
use super::streams::{
    LIMIT_DEFAULT, concatenate, frame, last_event_id, pieces, server_sent, too_many_streams,
};
use crate::observe::events::rfc3339;

/// Interval between updates of the bulkhead states sent to watchers.
const INTERVAL: Duration = Duration::from_secs(1);

/// State shared by all watchers.
pub(super) struct Watch {
    /// Server-sent event that contains the states of the bulkheads, formatted once for all watchers. `None` while there
    /// are no watchers.
    states: watch::Sender<Option<Bytes>>,
    /// Notified when a watcher joins.
    joined: Notify,
    /// Start time of this process. Watchers use it to detect that the supervisor was restarted or upgraded, in which
    /// case the counters begin at 0 again. Event numbers begin at 1 again only after a restart.
    started: SystemTime,
}

impl Default for Watch {
    fn default() -> Self {
        let states = watch::channel(None).0;
        Self { states, joined: Notify::new(), started: SystemTime::now() }
    }
}

impl Watch {
    fn join(&self) -> watch::Receiver<Option<Bytes>> {
        let mut receiver = self.states.subscribe();
        receiver.mark_changed();
        self.joined.notify_one();
        receiver
    }

    async fn wait_for_watcher(&self) {
        while self.states.receiver_count() == 0 {
            self.states.send_replace(None);
            self.joined.notified().await;
        }
    }
}

/// Publishes the states of the bulkheads to all watchers until the control plane shuts down.
pub(super) async fn publish(control: Shared) {
    let publishing = async {
        loop {
            control.watch.wait_for_watcher().await;
            let states = match control.snapshots(None).await {
                Some(bulkheads) => {
                    let document = json!({"at": rfc3339(SystemTime::now()), "bulkheads": bulkheads});
                    frame("bulkheads", &document.to_string())
                }
                // The data plane did not respond in time.
                None => frame("stuck", "{}"),
            };
            control.watch.states.send_replace(Some(states));
            tokio::time::sleep(INTERVAL).await;
        }
    };
    control.until_shutdown(publishing).await;
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WatchQuery {
    since: Option<u64>,
    limit: Option<usize>,
}

pub(super) async fn show(
    State(control): State<Shared>,
    headers: HeaderMap,
    Query(query): Query<WatchQuery>,
) -> Response {
    let Ok(permit) = control.streams.clone().try_acquire_owned() else { return too_many_streams() };
    let since = last_event_id(&headers).or(query.since).unwrap_or(0);
    let reader = control.events.reader(since, None, query.limit.unwrap_or(LIMIT_DEFAULT));
    let events = pieces(&control, reader, permit).map(|piece| {
        let missed = match piece.missed {
            0 => Bytes::new(),
            count => frame("missed", &json!({"count": count}).to_string()),
        };
        concatenate(missed, "event: event\n", &piece)
    });
    let coming = stream::select(states(&control), events);
    server_sent(stream::once(std::future::ready(hello(&control))).chain(coming))
}

/// Returns the first event of a stream. The event contains the version, the host and the process ID of this supervisor.
fn hello(control: &Control) -> Bytes {
    let hello = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "host": host_name(),
        "pid": std::process::id(),
        "started": rfc3339(control.watch.started),
    });
    frame("hello", &hello.to_string())
}

/// Returns the name of this host, or an empty string if the name is unknown.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// Returns a stream of the bulkheads' states. A slow reader misses old states but gets the newest.
fn states(control: &Shared) -> impl Stream<Item = Bytes> + Send + 'static {
    let (states, shutdown) = (control.watch.join(), control.shutdown.subscribe());
    stream::unfold((states, shutdown), async |(mut states, mut shutdown)| {
        loop {
            tokio::select! {
                biased;
                _ = shutdown.wait_for(|has_begun| *has_begun) => return None,
                changed = states.changed() => changed.ok()?,
            }
            let now = states.borrow_and_update().clone();
            if let Some(frame) = now {
                return Some((frame, (states, shutdown)));
            }
        }
    })
}

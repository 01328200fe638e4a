//! Handles `/healthz` and `/readyz` for `routes`. `watchdog` and `take_over` use the same health check. Each `/healthz`
//! request queries the data plane. `/readyz` uses a cache, which queries the data plane at most ten times per second,
//! and again after an operator command, a reload, the start or a stop. The rest of the control plane determines
//! whether the supervisor has started or is stopping.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bulkhead_plane::command::{BulkheadReadiness, Command, CommandSender};
use bulkhead_plane::counters::SharedCounters;
use bulkhead_policy::BulkheadState;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::responses::{not_found, stuck};
use super::{Control, Shared};

/// Maximum age of the cached readiness of the bulkheads.
const STATES_AGE_MAX: Duration = Duration::from_millis(100);

type States = Arc<[BulkheadReadiness]>;

/// Cache of the readiness of all bulkheads. Requests that arrive during an update wait for the result.
#[derive(Default)]
pub(super) struct Readiness {
    cached: Mutex<Option<CachedStates>>,
}

struct CachedStates {
    at: Instant,
    revision: u64,
    states: Option<States>,
}

impl Readiness {
    /// Returns the readiness of all bulkheads, or `None` if the data plane does not respond in time.
    pub(super) async fn states(&self, commands: &CommandSender, counters: &SharedCounters) -> Option<States> {
        let mut cached = self.cached.lock().await;
        let revision = counters.revision.load(Ordering::SeqCst);
        if let Some(cached) = &*cached
            && cached.revision == revision
            && cached.at.elapsed() < STATES_AGE_MAX
        {
            return cached.states.clone();
        }
        let states = fetch_states(commands).await;
        *cached = Some(CachedStates { at: Instant::now(), revision, states: states.clone() });
        states
    }
}

async fn fetch_states(commands: &CommandSender) -> Option<States> {
    Some(commands.request(|reply| Command::Readiness { reply }).await?.into())
}

pub(super) async fn healthz(State(control): State<Shared>) -> Response {
    if control.is_healthy().await { "ok\n".into_response() } else { stuck() }
}

impl Control {
    /// Returns true if the data plane responds in time.
    pub(super) async fn is_healthy(&self) -> bool {
        self.snapshots(Some("")).await.is_some()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReadyQuery {
    bulkhead: Option<String>,
}

pub(super) async fn readyz(State(control): State<Shared>, Query(query): Query<ReadyQuery>) -> Response {
    let name = query.bulkhead.as_deref();
    let Some(states) = control.readiness.states(&control.commands, &control.counters).await else {
        return stuck();
    };
    let mut states = states.to_vec();
    states.retain(|it| name.is_none_or(|name| name == it.state.name));
    let is_stopping = control.is_stopping.load(Ordering::SeqCst);
    let (is_ready, status) = match name {
        Some(name) => match states.first() {
            None => return not_found(name),
            Some(_) if is_stopping => (false, BulkheadState::Draining.into()),
            Some(one) => (one.is_serving, one.state.state.clone()),
        },
        None if is_stopping => (false, BulkheadState::Draining.into()),
        None if control.is_started.load(Ordering::SeqCst) => (true, BulkheadState::Ready.into()),
        None => (false, BulkheadState::Starting.into()),
    };
    let states = states.into_iter().map(|it| it.state);
    let degraded = states.filter(|it| it.state != BulkheadState::Ready).collect();
    let code = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    // One second, which is also the default for the `Retry-After` header.
    let retry_after_ms = (!is_ready).then_some(1000.0);
    (code, axum::Json(json!(bulkhead_api::Readiness { degraded, status, retry_after_ms }))).into_response()
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::mpsc::sync_channel;
    use std::task::Poll;

    use super::*;

    #[test]
    fn readiness_requests_within_interval_share_one_command() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (sender, receiver) = sync_channel(8);
        let commands = CommandSender::new(sender, waker);
        let mut asked = 0_u128;
        let began = std::time::Instant::now();
        runtime.block_on(async {
            let (readiness, counters) = (Readiness::default(), SharedCounters::default());
            for _ in 0..1000 {
                // Replies in the same poll that sends the command, because a request fails if no reply arrives within
                // two seconds.
                let reply = poll_fn(|_| {
                    while let Ok(Command::Readiness { reply }) = receiver.try_recv() {
                        asked += 1;
                        reply.send(vec![BulkheadReadiness::default()]).unwrap();
                    }
                    Poll::<Option<States>>::Pending
                });
                let states = tokio::select! {
                    biased;
                    states = readiness.states(&commands, &counters) => states,
                    states = reply => states,
                };
                assert_eq!(states.unwrap().len(), 1);
            }
        });
        let most = 1 + began.elapsed().as_millis() / STATES_AGE_MAX.as_millis();
        assert!((1..=most).contains(&asked), "{asked} of {most}");
    }
}

//! Holds TCP connections until the beginning of the request has arrived and a permit is free. Any process can open many
//! connections, so the oldest waiting connection is refused when there are too many. Health checks have separate
//! permits. `tcp` and `jobs_http` accept the connections, and `connections` serves the admitted ones.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::connections::{Admission, Dispatcher, HEAD_BYTES, NewConnection, REQUEST_TIMEOUT, Socket};
use super::{outcomes, paths};

/// Maximum number of waiting connections to the admin API.
pub(crate) const WAITING_MAX: usize = 128;

/// Maximum number of health checks served at the same time.
pub(crate) const HEALTH_MAX: usize = 16;

/// Maximum number of refused clients to which a response is being sent at the same time. Further refused connections
/// are closed without a response.
pub(crate) const REFUSED_MAX: usize = 256;

/// Maximum time to wait for an idle connection to close so that another client can be served.
const IDLE_CLOSE_TIMEOUT: Duration = Duration::from_millis(250);

/// Maximum time to wait for a refused client to close the connection, and the maximum number of bytes to discard in the
/// meantime. If a socket were closed with unread bytes, the connection would be reset, and the client could lose the
/// response.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);
const REFUSED_BYTES_MAX: u64 = 1024 * 1024;

/// Limits on a listener's connections, and the response to refused clients.
pub(super) struct ListenerRules {
    /// Maximum number of connections served at the same time.
    pub(super) served_max: usize,
    /// Maximum number of waiting connections.
    pub(super) waiting_max: usize,
    /// True if connections are kept alive. A client is then refused if all connections are busy, instead of waiting.
    pub(super) keeps_alive: bool,
    /// Explanation that is sent to refused clients.
    pub(super) refusal: &'static str,
}

/// Connections of a listener that are waiting, and the permits for which they wait.
pub(super) struct WaitingConnections<S: Socket> {
    listener: Arc<Listener<S>>,
    last_number: u64,
}

struct Listener<S: Socket> {
    dispatcher: Dispatcher<S>,
    rules: ListenerRules,
    permits: Arc<Semaphore>,
    health_permits: Arc<Semaphore>,
    refused_permits: Arc<Semaphore>,
    refused: Arc<AtomicU64>,
    /// Numbers of the waiting connections, oldest first. If a newer connection displaces a waiting connection, the
    /// displaced connection is notified.
    waiting: Mutex<VecDeque<(u64, Arc<Notify>)>>,
}

impl<S: Socket> Listener<S> {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(u64, Arc<Notify>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a request and a permit. Returns `None` if the client must be refused.
    async fn admit(&self, socket: &S, accepted: Instant) -> Result<Option<Admitted>, Silent> {
        let mut head = [0; HEAD_BYTES];
        let mut dispatcher = self.dispatcher.clone();
        let count = dispatcher.peek_head(socket, &mut head, accepted).await.ok_or(Silent)?;
        let is_health = paths::is_health_check(&head[..count]);
        let permit = self.permit(is_health, accepted).await;
        Ok(permit.map(|permit| Admitted { head, count, is_health, permit }))
    }

    async fn permit(&self, is_health: bool, accepted: Instant) -> Option<OwnedSemaphorePermit> {
        let permits = if is_health { &self.health_permits } else { &self.permits };
        let mut permit = pin!(permits.clone().acquire_owned());
        let end = accepted + REQUEST_TIMEOUT;
        if is_health {
            return timeout_at(end, permit).await.ok()?.ok();
        }
        loop {
            let has_room = permits.available_permits() > 0 || self.dispatcher.close_idle();
            if !has_room && self.rules.keeps_alive {
                return permits.clone().try_acquire_owned().ok();
            }
            match timeout(IDLE_CLOSE_TIMEOUT, permit.as_mut()).await {
                Ok(permit) => return permit.ok(),
                Err(_) if self.rules.keeps_alive || Instant::now() >= end => return None,
                // Another connection may be idle by now.
                Err(_) => {}
            }
        }
    }

    fn dispatch(&self, socket: S, admitted: Admitted) {
        let Admitted { head, count, is_health, permit } = admitted;
        // The connection of a health check is not kept alive, so that it does not hold its permit for long.
        let admission = match self.rules.keeps_alive {
            _ if is_health => Admission::health_check(),
            true => Admission::kept_alive(),
            false => Admission::new(),
        };
        self.dispatcher.dispatch_to(NewConnection::new(socket, admission, permit), &head[..count]);
    }

    /// Refuses a client, and sends it the reason.
    async fn refuse(&self, mut socket: S) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let Ok(_permit) = self.refused_permits.clone().try_acquire_owned() else { return };
        let response = outcomes::raw(StatusCode::SERVICE_UNAVAILABLE, self.rules.refusal);
        let send = async {
            socket.write_all(&response).await?;
            socket.shutdown().await?;
            tokio::io::copy(&mut (&mut socket).take(REFUSED_BYTES_MAX), &mut tokio::io::sink()).await
        };
        // The client may have disconnected.
        let _ = timeout(REFUSED_TIMEOUT, send).await;
    }
}

/// A connection that is about to be served.
struct Admitted {
    head: [u8; HEAD_BYTES],
    count: usize,
    is_health: bool,
    permit: OwnedSemaphorePermit,
}

/// Error returned if a client sends nothing within the time limit.
struct Silent;

/// A guard that, when dropped, removes a connection from the list of waiting connections.
struct WaitGuard<S: Socket> {
    number: u64,
    listener: Arc<Listener<S>>,
}

impl<S: Socket> Drop for WaitGuard<S> {
    fn drop(&mut self) {
        self.listener.waiting().retain(|(number, _)| *number != self.number);
    }
}

impl<S: Socket> WaitingConnections<S> {
    pub(super) fn new(dispatcher: Dispatcher<S>, rules: ListenerRules, refused: Arc<AtomicU64>) -> Self {
        let listener = Listener {
            dispatcher,
            permits: Arc::new(Semaphore::new(rules.served_max)),
            health_permits: Arc::new(Semaphore::new(HEALTH_MAX)),
            refused_permits: Arc::new(Semaphore::new(REFUSED_MAX)),
            refused,
            waiting: Mutex::default(),
            rules,
        };
        Self { listener: Arc::new(listener), last_number: 0 }
    }

    /// Adds a connection. If too many are waiting, refuses the oldest.
    pub(super) fn add(&mut self, socket: S) {
        self.last_number += 1;
        let displaced = Arc::new(Notify::new());
        let listener = self.listener.clone();
        let mut waiting = listener.waiting();
        waiting.push_back((self.last_number, displaced.clone()));
        if waiting.len() > listener.rules.waiting_max
            && let Some((_, oldest)) = waiting.pop_front()
        {
            oldest.notify_one();
        }
        drop(waiting);
        let wait = WaitGuard { number: self.last_number, listener };
        tokio::spawn(async move {
            let (listener, accepted) = (wait.listener.clone(), Instant::now());
            let admitted = tokio::select! {
                biased;
                admitted = listener.admit(&socket, accepted) => admitted,
                () = displaced.notified() => Ok(None),
            };
            drop(wait);
            match admitted {
                Ok(Some(admitted)) => listener.dispatch(socket, admitted),
                Ok(None) => listener.refuse(socket).await,
                Err(Silent) => {}
            }
        });
    }
}

//! TCP connections that have not sent a request yet, or that wait for a permit. Any process can open such
//! connections, so the oldest waiting connection is closed when there are too many. Health checks have
//! separate permits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::connections::{Admission, Dispatcher, HEAD_BYTES, NewConnection, REQUEST_TIMEOUT, Socket};
use super::paths;

/// Maximum number of TCP connections that wait for a request or a permit.
pub(crate) const WAITING_MAX: usize = 128;

/// Maximum number of health checks that are served at the same time.
pub(crate) const HEALTH_MAX: usize = 16;

/// Waiting connections with their numbers, oldest first.
#[derive(Default)]
struct WaitList(Mutex<VecDeque<(u64, AbortHandle)>>);

impl WaitList {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, AbortHandle)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard that removes a connection from the list when it is dropped.
struct WaitGuard {
    number: u64,
    waiting: Arc<WaitList>,
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        self.waiting.lock().retain(|(number, _)| *number != self.number);
    }
}

/// Waiting connections of a listener, and the permits that they wait for.
pub(super) struct WaitingConnections<S: Socket> {
    dispatcher: Dispatcher<S>,
    permits: Arc<Semaphore>,
    health_permits: Arc<Semaphore>,
    waiting: Arc<WaitList>,
    last_number: u64,
}

impl<S: Socket> WaitingConnections<S> {
    /// Creates an empty list. `permits` is the maximum number of connections that are served at the same
    /// time.
    pub(super) fn new(dispatcher: Dispatcher<S>, permits: usize) -> Self {
        Self {
            dispatcher,
            permits: Arc::new(Semaphore::new(permits)),
            health_permits: Arc::new(Semaphore::new(HEALTH_MAX)),
            waiting: Arc::default(),
            last_number: 0,
        }
    }

    /// Adds a connection. If there are then too many waiting connections, closes the oldest one.
    pub(super) fn add(&mut self, socket: S) {
        self.last_number += 1;
        let wait = WaitGuard { number: self.last_number, waiting: self.waiting.clone() };
        let (mut dispatcher, permits) =
            (self.dispatcher.clone(), [self.permits.clone(), self.health_permits.clone()]);
        let accepted = Instant::now();
        let mut waiting = self.waiting.lock();
        let task = tokio::spawn(async move {
            let mut head = [0; HEAD_BYTES];
            let Some(count) = dispatcher.peek_head(&socket, &mut head, accepted).await else { return };
            let [permits, health_permits] = permits;
            let is_health = paths::is_health_check(&head[..count]);
            let permits = if is_health { health_permits } else { permits };
            let Ok(Ok(permit)) = timeout_at(accepted + REQUEST_TIMEOUT, permits.acquire_owned()).await else {
                return;
            };
            drop(wait);
            dispatcher.dispatch_to(NewConnection::new(socket, Admission::new(), permit), &head[..count]);
        });
        waiting.push_back((self.last_number, task.abort_handle()));
        let oldest = if waiting.len() > WAITING_MAX { waiting.pop_front() } else { None };
        drop(waiting);
        if let Some((_, task)) = oldest {
            task.abort();
        }
    }
}

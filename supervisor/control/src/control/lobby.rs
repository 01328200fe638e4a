//! TCP connections whose request is still unknown, or that wait for a permit. Any process can open many, so
//! the oldest waiting connection is closed when there are too many. Health checks have separate permits.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::connections::{ANSWERED_WITHIN, Arrival, Entry, HEAD_BYTES, Socket, Ways};
use super::paths;

/// Maximum number of waiting connections.
pub(crate) const WAITING_MAX: usize = 128;

/// Maximum number of concurrent health checks.
pub(crate) const HEALTH_MAX: usize = 16;

/// Waiting connections by number, oldest first.
#[derive(Default)]
struct Waiting(Mutex<VecDeque<(u64, AbortHandle)>>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, AbortHandle)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that removes a connection from the waiting list.
struct Wait {
    number: u64,
    waiting: Arc<Waiting>,
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.waiting.lock().retain(|(number, _)| *number != self.number);
    }
}

/// The waiting connections of a listener.
pub(super) struct Lobby<S: Socket> {
    ways: Ways<S>,
    places: Arc<Semaphore>,
    places_for_health: Arc<Semaphore>,
    waiting: Arc<Waiting>,
    entered: u64,
}

impl<S: Socket> Lobby<S> {
    /// Creates a lobby with permits for `places` served connections.
    pub(super) fn new(ways: Ways<S>, places: usize) -> Self {
        Self {
            ways,
            places: Arc::new(Semaphore::new(places)),
            places_for_health: Arc::new(Semaphore::new(HEALTH_MAX)),
            waiting: Arc::default(),
            entered: 0,
        }
    }

    /// Adds a connection. If too many wait, closes the oldest one.
    pub(super) fn enter(&mut self, socket: S) {
        self.entered += 1;
        let wait = Wait { number: self.entered, waiting: self.waiting.clone() };
        let (mut ways, places) = (self.ways.clone(), [self.places.clone(), self.places_for_health.clone()]);
        let came = Instant::now();
        let mut waiting = self.waiting.lock();
        let task = tokio::spawn(async move {
            let mut head = [0; HEAD_BYTES];
            let Some(count) = ways.asks(&socket, &mut head, came).await else { return };
            let [places, places_for_health] = places;
            let is_health = paths::asks_for_health(&head[..count]);
            let places = if is_health { places_for_health } else { places };
            let Ok(Ok(place)) = timeout_at(came + ANSWERED_WITHIN, places.acquire_owned()).await else {
                return;
            };
            drop(wait);
            ways.send_on(Arrival::new(socket, Entry::new(), place), &head[..count]);
        });
        waiting.push_back((self.entered, task.abort_handle()));
        let most_patient = if waiting.len() > WAITING_MAX { waiting.pop_front() } else { None };
        drop(waiting);
        if let Some((_, task)) = most_patient {
            task.abort();
        }
    }
}

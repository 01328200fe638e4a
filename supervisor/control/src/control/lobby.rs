//! Connections over TCP that have not said yet what they want, or wait for a place. Any process may open
//! many, so that the one that has waited for longest goes when there are too many; and requests that ask whether the
//! supervisor is well have places of their own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::connections::{ANSWERED_WITHIN, Arrival, Entry, HEAD_BYTES, Socket, Ways};
use super::paths;

/// Connections that wait.
pub(crate) const WAITING_MAX: usize = 128;

/// Connections at once that ask for health.
pub(crate) const HEALTH_MAX: usize = 16;

/// Connections that wait, by number, the one that has for longest first.
#[derive(Default)]
struct Waiting(Mutex<VecDeque<(u64, AbortHandle)>>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, AbortHandle)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a connection from those that wait when it does not any more.
struct Wait {
    number: u64,
    waiting: Arc<Waiting>,
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.waiting.lock().retain(|(number, _)| *number != self.number);
    }
}

/// Where they wait.
pub(super) struct Lobby<S: Socket> {
    ways: Ways<S>,
    places: Arc<Semaphore>,
    places_for_health: Arc<Semaphore>,
    waiting: Arc<Waiting>,
    entered: u64,
}

impl<S: Socket> Lobby<S> {
    /// From where as many as `places` go on to be served.
    pub(super) fn new(ways: Ways<S>, places: usize) -> Self {
        Self {
            ways,
            places: Arc::new(Semaphore::new(places)),
            places_for_health: Arc::new(Semaphore::new(HEALTH_MAX)),
            waiting: Arc::default(),
            entered: 0,
        }
    }

    /// A connection comes, and perhaps another one goes.
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

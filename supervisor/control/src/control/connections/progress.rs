//! Tracks the progress of a listener's open connections, and selects an idle connection to close if another client is
//! waiting. `waiting` asks for this, and `connection` enforces the time limits. A connection with an unfinished
//! response counts as idle only if its client has no valid token and does not read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

/// Special value of `waiting_since` for a connection whose request is still being served.
const SERVING: u64 = u64::MAX;

/// Special value of `stalled_since` for a connection without unsent output.
const NOT_STALLED: u64 = u64::MAX;

/// Progress of one connection. Shared by the socket and the task that serves the requests.
#[derive(Debug)]
pub(in crate::control) struct Progress {
    began: Instant,
    /// Time at which the connection started to wait for a request, in milliseconds after `began`.
    waiting_since: AtomicU64,
    /// Time at which the client stopped reading its response, in milliseconds after `began`.
    stalled_since: AtomicU64,
    /// True if the general time limit is disabled for the current request because the handler enforces its own limits.
    has_no_time_limit: AtomicBool,
    /// True if the response's body is complete. Its last bytes may not have been written to the socket yet.
    is_answered: AtomicBool,
    /// True if the client has sent a valid token or is a permitted user of the admin socket.
    is_identified: AtomicBool,
    /// True if the connection uses one of the permits for health checks.
    is_health_check: bool,
    /// True once the connection must close.
    is_closing: AtomicBool,
    /// True if the connection must close because another client needs its permit.
    is_displaced: AtomicBool,
    /// Notified when `is_closing` becomes true.
    close: Notify,
    /// Marker for an unfinished request. Dropped when the response is complete.
    held: Mutex<Option<Arc<()>>>,
}

impl Progress {
    pub(in crate::control) fn new(is_health_check: bool) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            waiting_since: AtomicU64::new(0),
            stalled_since: AtomicU64::new(NOT_STALLED),
            has_no_time_limit: AtomicBool::new(false),
            is_answered: AtomicBool::new(false),
            is_identified: AtomicBool::new(false),
            is_health_check,
            is_closing: AtomicBool::new(false),
            is_displaced: AtomicBool::new(false),
            close: Notify::new(),
            held: Mutex::default(),
        })
    }

    /// Returns the age of the connection, in milliseconds.
    fn age(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1)
    }

    /// Records that the complete head of a request has arrived.
    pub(super) fn begin_request(&self) {
        self.has_no_time_limit.store(false, Ordering::Relaxed);
        self.is_answered.store(false, Ordering::Relaxed);
        self.waiting_since.store(SERVING, Ordering::Relaxed);
    }

    /// Stores `marker` and drops it when the response to the current request is complete.
    pub(in crate::control) fn hold(&self, marker: Arc<()>) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(marker);
    }

    pub(super) fn answer_request(&self) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.is_answered.store(true, Ordering::Relaxed);
    }

    /// Records that all output has been written to the socket. If the response is complete, the connection starts to
    /// wait for the next request.
    pub(super) fn flushed(&self) {
        self.stalled_since.store(NOT_STALLED, Ordering::Relaxed);
        if self.is_answered.swap(false, Ordering::Relaxed) {
            self.waiting_since.store(self.age(), Ordering::Relaxed);
        }
    }

    /// Records that there is output that the client does not read.
    pub(super) fn stalled(&self) {
        if self.stalled_since.load(Ordering::Relaxed) == NOT_STALLED {
            self.stalled_since.store(self.age(), Ordering::Relaxed);
        }
    }

    /// Returns true if no request is being served.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting_since.load(Ordering::Relaxed) != SERVING
    }

    /// Disables the general time limit for a request whose handler enforces its own limits.
    pub(in crate::control) fn lift_time_limit(&self) {
        self.has_no_time_limit.store(true, Ordering::Relaxed);
    }

    pub(in crate::control) fn has_no_time_limit(&self) -> bool {
        self.has_no_time_limit.load(Ordering::Relaxed)
    }

    pub(in crate::control) fn set_identified(&self) {
        self.is_identified.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_identified(&self) -> bool {
        self.is_identified.load(Ordering::Relaxed)
    }

    /// Returns true if another client needs the connection, and the connection's client has no valid token.
    pub(super) fn is_displaced(&self) -> bool {
        self.is_displaced.load(Ordering::Relaxed) && !self.is_identified()
    }

    fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.close.notify_one();
    }

    /// Waits until the connection must close.
    pub(super) async fn close_requested(&self) {
        self.close.notified().await;
    }

    /// Returns a sort key for closing connections to make room: connections without a valid token come first, then the
    /// longest-idle connections. A client without a valid token is also idle if it does not read its response. Returns
    /// `None` if the connection is busy or closing.
    fn idle_order(&self) -> Option<(bool, Instant)> {
        let is_identified = self.is_identified();
        let since = match self.waiting_since.load(Ordering::Relaxed) {
            SERVING if is_identified => return None,
            SERVING => {
                Some(self.stalled_since.load(Ordering::Relaxed)).filter(|since| *since != NOT_STALLED)?
            }
            since => since,
        };
        if self.is_health_check || self.is_closing.load(Ordering::Relaxed) {
            return None;
        }
        let since = self.began.checked_add(Duration::from_millis(since)).unwrap_or(self.began);
        Some((is_identified, since))
    }
}

/// A listener's connections that are being served.
#[derive(Debug)]
pub(in crate::control) struct Active {
    connections: Mutex<Connections>,
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Connections {
    by_number: HashMap<u64, Arc<Progress>>,
    last_number: u64,
}

impl Active {
    pub(in crate::control) fn new() -> Arc<Self> {
        Arc::new(Self { connections: Mutex::default(), count: watch::Sender::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection. Dropping the returned guard removes the connection.
    pub(super) fn add(self: &Arc<Self>, progress: Arc<Progress>) -> ActiveGuard {
        let mut connections = self.lock();
        connections.last_number += 1;
        let number = connections.last_number;
        connections.by_number.insert(number, progress);
        self.count.send_replace(connections.by_number.len());
        ActiveGuard { active: self.clone(), number }
    }

    /// Closes an idle connection so that another client can use its permit. Returns false if all connections are busy.
    pub(in crate::control) fn close_idle(&self) -> bool {
        let connections = self.lock();
        let idle =
            connections.by_number.values().filter_map(|progress| Some((progress.idle_order()?, progress)));
        idle.min_by_key(|(order, _)| *order).is_some_and(|(_, progress)| {
            progress.is_displaced.store(true, Ordering::Relaxed);
            progress.close();
            true
        })
    }

    /// Closes all connections. A connection that is serving a request is closed after the response.
    pub(in crate::control) fn close_all(&self) {
        self.lock().by_number.values().for_each(|progress| progress.close());
    }

    /// Waits until there are no connections left.
    pub(in crate::control) async fn wait_until_empty(&self) {
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Returns the number of connections, for metrics.
    pub(in crate::control) fn count(&self) -> usize {
        *self.count.borrow()
    }
}

/// Guard that removes the connection from [`Active`] when it is dropped.
pub(super) struct ActiveGuard {
    active: Arc<Active>,
    number: u64,
}

impl Drop for ActiveGuard {
    fn drop(&mut self) {
        let mut connections = self.active.lock();
        connections.by_number.remove(&self.number);
        self.active.count.send_replace(connections.by_number.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closing(progress: &Progress) -> bool {
        progress.is_closing.load(Ordering::Relaxed)
    }

    #[test]
    fn idle_connections_without_token_are_closed_first() {
        let active = Active::new();
        let health_check = Progress::new(true);
        let [busy, known, stranger, later, stalled, known_stalled] = [(); 6].map(|()| Progress::new(false));
        let guards = [&health_check, &busy, &known, &stranger, &later, &stalled, &known_stalled]
            .map(|progress| active.add(progress.clone()));
        busy.begin_request();
        for progress in [&stalled, &known_stalled] {
            progress.begin_request();
            progress.stalled_since.store(7, Ordering::Relaxed);
        }
        known_stalled.set_identified();
        for (progress, since) in [(&known, 1), (&stranger, 5), (&later, 600_000)] {
            progress.waiting_since.store(since, Ordering::Relaxed);
        }
        known.set_identified();
        for expected in [&stranger, &stalled, &later, &known] {
            assert!(active.close_idle() && is_closing(expected));
        }
        assert!(
            !active.close_idle()
                && ![&health_check, &busy, &known_stalled].into_iter().any(|p| is_closing(p))
        );
        assert_eq!(active.count(), 7);
        drop(guards);
        assert_eq!(active.count(), 0);
    }

    #[test]
    fn connection_is_waiting_after_response_is_written() {
        let progress = Progress::new(false);
        assert!(progress.is_waiting());
        progress.begin_request();
        progress.flushed();
        assert!(!progress.is_waiting(), "only part of the response was written");
        progress.answer_request();
        assert!(!progress.is_waiting());
        progress.flushed();
        assert!(progress.is_waiting());
    }
}

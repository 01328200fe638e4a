//! Decides whether the agent pulls jobs for one bulkhead. `supervisor`, `watch`, `runner` and the shutdown record the
//! conditions, and `pulls` waits until the gate is open. A closed gate does not affect jobs that are already running.
//! The number of jobs that can run is limited by `permits`.

use std::sync::Mutex;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Conditions that determine whether the gate is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Conditions {
    /// The supervisor is reachable and the bulkhead accepts jobs.
    is_ready: bool,
    /// The ledger has space for more outcomes.
    has_space: bool,
    /// The agent is draining.
    is_draining: bool,
}

/// The gate of one bulkhead. The agent pulls jobs only while the gate is open.
#[derive(Debug)]
pub(crate) struct Gate {
    conditions: watch::Sender<Conditions>,
    /// Time at which the current pause ends.
    paused_until: Mutex<Instant>,
}

impl Gate {
    /// Creates a closed gate.
    pub(crate) fn new() -> Self {
        let conditions = Conditions { has_space: true, ..Conditions::default() };
        Self { conditions: watch::Sender::new(conditions), paused_until: Mutex::new(Instant::now()) }
    }

    fn update(&self, change: impl FnOnce(&mut Conditions)) {
        self.conditions.send_if_modified(|conditions| {
            let before = *conditions;
            change(conditions);
            before != *conditions
        });
    }

    /// Records whether the supervisor is ready to accept jobs.
    pub(crate) fn set_ready(&self, is_ready: bool) {
        self.update(|conditions| conditions.is_ready = is_ready);
    }

    /// Records whether the ledger has space.
    pub(crate) fn set_space(&self, has_space: bool) {
        self.update(|conditions| conditions.has_space = has_space);
    }

    /// Closes the gate permanently.
    pub(crate) fn drain(&self) {
        self.update(|conditions| conditions.is_draining = true);
    }

    /// Pauses the pulling of jobs for the given time.
    pub(crate) fn pause(&self, time: Duration) {
        let mut until = self.paused_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *until = (*until).max(Instant::now() + time);
    }

    /// Returns true if the gate is open. A pause does not affect the result.
    pub(crate) fn is_open(&self) -> bool {
        is_open(&self.conditions.borrow())
    }

    /// Waits until the gate is open and any pause has ended. Never returns once the agent is draining.
    pub(crate) async fn until_open(&self) {
        let mut changes = self.conditions.subscribe();
        // Cannot fail, because `self` owns the sender.
        let _ = changes.wait_for(is_open).await;
        let until = *self.paused_until.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tokio::time::sleep_until(until).await;
    }

    /// Waits until the gate is closed.
    pub(crate) async fn until_closed(&self) {
        let _ = self.conditions.subscribe().wait_for(|conditions| !is_open(conditions)).await;
    }
}

fn is_open(conditions: &Conditions) -> bool {
    conditions.is_ready && conditions.has_space && !conditions.is_draining
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn gate_opens_only_if_all_conditions_hold() {
        let gate = Gate::new();
        assert!(!gate.is_open());
        gate.set_ready(true);
        gate.until_open().await;
        gate.set_space(false);
        gate.until_closed().await;
        gate.set_space(true);
        assert!(gate.is_open());
        gate.drain();
        gate.until_closed().await;
    }
}

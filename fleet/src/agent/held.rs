//! Records the messages that this agent is processing, and sends the heartbeats that prevent their redelivery. `pulls`
//! adds the messages, and `runner` releases them. `decide` decides when a message is acknowledged.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_nats::connection::State;
use async_nats::subject::Subject;
use bytes::Bytes;
use tokio::sync::Notify;

use super::Shared;
use crate::server::messages::send;

/// JetStream acknowledgement for a message that is still being processed.
const IN_PROGRESS: &[u8] = b"+WPI";

/// Reply subjects of the messages that this agent holds, by stream sequence number.
#[derive(Debug, Default)]
pub(crate) struct Held {
    messages: Mutex<HashMap<u64, Subject>>,
    changed: Notify,
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Subject>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message. If the agent already holds the message, replaces the reply subject and returns false.
    pub(crate) fn hold(&self, sequence: u64, reply: Subject) -> bool {
        self.lock().insert(sequence, reply).is_none()
    }

    /// Returns the latest reply subject of a held message.
    pub(crate) fn reply(&self, sequence: u64) -> Option<Subject> {
        self.lock().get(&sequence).cloned()
    }

    /// Returns a guard that releases the message when the guard is dropped, even if the task panics.
    pub(crate) fn guard(&self, sequence: u64) -> HeldGuard<'_> {
        HeldGuard { held: self, sequence }
    }

    /// Releases a message.
    pub(crate) fn release(&self, sequence: u64) {
        self.lock().remove(&sequence);
        self.changed.notify_waiters();
    }

    /// Returns the number of held messages.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Waits until the agent holds no messages.
    pub(crate) async fn until_empty(&self) {
        loop {
            let changed = self.changed.notified();
            if self.len() == 0 {
                return;
            }
            changed.await;
        }
    }

    fn replies(&self) -> Vec<Subject> {
        self.lock().values().cloned().collect()
    }
}

/// Guard that releases a held message when it is dropped.
pub(crate) struct HeldGuard<'a> {
    held: &'a Held,
    sequence: u64,
}

impl Drop for HeldGuard<'_> {
    fn drop(&mut self) {
        self.held.release(self.sequence);
    }
}

/// Sends heartbeats for all held messages. The interval is a third of `ack_wait`.
pub(crate) async fn keep(shared: Arc<Shared>) {
    let mut interval = tokio::time::interval(shared.settings.streams.ack_wait() / 3);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // Without a connection, heartbeats would only accumulate in the send buffer.
        if shared.client.connection_state() != State::Connected {
            continue;
        }
        for reply in shared.held.replies() {
            in_progress(&shared, reply).await;
        }
    }
}

/// Sends one heartbeat.
pub(crate) async fn in_progress(shared: &Shared, reply: Subject) {
    // A lost heartbeat does no harm, because another heartbeat follows.
    send(&shared.client, reply, Bytes::from_static(IN_PROGRESS)).await;
}

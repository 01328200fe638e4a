//! Publishes this agent's presence in a key-value bucket with expiring entries. The same writes measure the clock
//! offset, which `clock` stores. Only `operate` reads the entries of all hosts; no decision about a job depends on
//! them.

use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use serde_json::{Map, Value, json};

use super::Shared;
use super::clock::time_since_boot;
use crate::decide::Timestamp;
use crate::names::{AGENTS, escape};
use crate::server::messages::{Published, publish, read_last};

/// Interval at which the agent renews its presence record. The record expires after three times this interval.
const INTERVAL: Duration = Duration::from_secs(5);
/// Clock offset, in seconds, above which the agent logs a warning.
const OFFSET_SECONDS_MAX: f64 = 1.0;

/// Renews this agent's presence record at regular intervals.
pub(crate) async fn announce(shared: Arc<Shared>) {
    let mut was_off = false;
    loop {
        let key = format!("$KV.{AGENTS}.{}", escape(&shared.host));
        if let Some((before, stored, after)) = write(&shared, &key).await {
            shared.clock.measure(before, stored, after);
        }
        let offset = shared.clock.offset_seconds();
        let is_off = offset.abs() > OFFSET_SECONDS_MAX;
        if is_off && !was_off {
            tracing::warn!(
                "this host's clock differs by {offset:.1} s from the server's clock; synchronise the clocks"
            );
        }
        was_off = is_off;
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Renews this agent's presence record. Returns the time since boot before the request, the server's time, and the time
/// since boot after the request.
async fn write(shared: &Shared, key: &str) -> Option<(Duration, Timestamp, Duration)> {
    let before = time_since_boot();
    let body = document(shared).to_string().into();
    let published = publish(&shared.client, key.to_owned(), HeaderMap::new(), body, None).await;
    let after = time_since_boot();
    let Published::Stored(sequence) = published else {
        tracing::warn!("failed to renew the presence record: {published:?}");
        return None;
    };
    let message = read_last(&shared.client, &format!("KV_{AGENTS}"), key).await.ok()??;
    if message.sequence != sequence {
        return None;
    }
    let stored = async_nats::datetime::parse_rfc3339(&message.stored_at).ok()?;
    let nanos = u64::try_from(stored.unix_timestamp_nanos()).ok()?;
    Some((before, Duration::from_nanos(nanos), after))
}

fn document(shared: &Shared) -> Value {
    let bulkheads: Map<String, Value> = shared
        .bulkheads
        .iter()
        .map(|(name, served)| {
            let (limit, in_use) = served.permits.numbers();
            (name.clone(), json!({"takes_jobs": served.gate.is_open(), "limit": limit, "in_flight": in_use}))
        })
        .collect();
    json!({
        "host": shared.host,
        "instance": shared.instance,
        "version": env!("CARGO_PKG_VERSION"),
        "clock_offset_seconds": shared.clock.offset_seconds(),
        "bulkheads": bulkheads,
    })
}

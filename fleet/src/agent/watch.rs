//! Monitors the streams and stops pulling jobs before the ledger is full, because a full ledger would also refuse
//! outcomes. Logs a warning about each consumer that does not match the configuration. Only `init` creates or changes
//! streams and consumers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Served, Shared};
use crate::names::{DEAD, JOBS, LEDGER, bulkhead_filter};
use crate::server::messages::api;
use crate::server::streams;

const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum interval between checks of the consumers.
const CONSUMER_CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Minimum interval between checks of the consumers.
const CONSUMER_CHECK_PAUSE: Duration = Duration::from_secs(2);
/// Fill level of the ledger, as a fraction of its maximum size, at which the agent stops pulling jobs.
const LEDGER_RATIO_MAX: f64 = 0.9;

/// Monitors the streams until the agent stops.
pub(crate) async fn run(shared: Arc<Shared>) {
    loop {
        for stream in [JOBS, LEDGER, DEAD] {
            if let Some(ratio) = stored_ratio(&shared, stream).await {
                shared.metrics.set_stored(stream, ratio);
                if stream == LEDGER {
                    apply_ratio(&shared, ratio);
                }
            }
        }
        for served in shared.bulkheads.values() {
            update_pending(&shared, served).await;
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Logs a warning for each consumer that no longer matches the configuration.
pub(crate) async fn check_consumers(shared: Arc<Shared>) {
    let mut known = BTreeMap::new();
    loop {
        let _ = tokio::time::timeout(CONSUMER_CHECK_INTERVAL, shared.pull_failed.notified()).await;
        // An `init` that replaces consumers needs a moment to create the new consumers.
        tokio::time::sleep(CONSUMER_CHECK_PAUSE).await;
        match streams::mismatches(&shared.client, &shared.settings).await {
            Ok(found) => {
                for (_, problem) in found.iter().filter(|(name, problem)| known.get(*name) != Some(*problem))
                {
                    tracing::warn!("{problem}");
                }
                known = found;
            }
            Err(error) => tracing::debug!("the consumers could not be checked: {}", error.description),
        }
    }
}

async fn stored_ratio(shared: &Shared, stream: &str) -> Option<f64> {
    let info: Value = api(&shared.client, &format!("STREAM.INFO.{stream}"), Value::Null).await.ok()?;
    Some(info["state"]["bytes"].as_f64()? / info["config"]["max_bytes"].as_f64()?)
}

fn apply_ratio(shared: &Shared, ratio: f64) {
    let has_space = ratio < LEDGER_RATIO_MAX;
    if !has_space {
        tracing::error!(
            "the ledger is {:.0} % full: no new jobs are accepted, so that running jobs can still be recorded; raise \
             max_bytes of the {LEDGER} stream, or wait until records expire",
            ratio * 100.0
        );
    }
    shared.bulkheads.values().for_each(|served| served.gate.set_space(has_space));
}

async fn update_pending(shared: &Shared, served: &Served) {
    let body = json!({"subjects_filter": bulkhead_filter(&served.name)});
    let info: Result<Value, _> = api(&shared.client, &format!("STREAM.INFO.{JOBS}"), body).await;
    if let (Ok(info), Some(counters)) = (info, shared.metrics.of(&served.name)) {
        let subjects = info["state"]["subjects"].as_object();
        let pending = subjects.into_iter().flatten().filter_map(|(_, count)| count.as_u64()).sum();
        counters.pending.store(pending, Ordering::Relaxed);
    }
}

//! Helpers for tests of isolated tenants.

use crate::{SAME_NUMBERS, Supervisor, children, wait_for};
use serde_json::Value;

/// Returns the configuration of a bulkhead `b` with isolated tenants. `more` contains additional keys.
pub fn isolated(tenants: &str, more: &str) -> String {
    format!(
        "{SAME_NUMBERS}[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\ndeadline = \"60s\"\n\
         tenants = {{ isolate = true, {tenants} }}\n{more}\n"
    )
}

/// Sends a PATCH request to a path below `/v1/bulkheads/`. Returns the status and the body of the response.
pub fn patch(supervisor: &Supervisor, path: &str, body: &str) -> (u16, Value) {
    supervisor.patch(&format!("/v1/bulkheads/{path}"), body)
}

/// Returns the snapshot of one tenant of the bulkhead `b`.
pub fn part(supervisor: &Supervisor, tenant: &str) -> Value {
    supervisor.get(&format!("/v1/bulkheads/b?tenant={tenant}"))
}

/// Waits until a numeric field of a tenant's snapshot has the given value. The tenant need not exist yet.
pub fn wait_part(supervisor: &Supervisor, tenant: &str, field: &str, value: u64) {
    wait_for(&format!("{field} of {tenant} is {value}"), || {
        let (status, body) = supervisor.try_get(&format!("/v1/bulkheads/b?tenant={tenant}"))?;
        let part: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
        (part[field].as_u64() == Some(value)).then_some(())
    });
}

/// Returns the PIDs of a tenant's workers.
pub fn pids(supervisor: &Supervisor, tenant: &str) -> Vec<u32> {
    let part = part(supervisor, tenant);
    let workers = part["workers"].as_array().expect("workers");
    workers.iter().filter_map(|w| w["pid"].as_u64()).map(|pid| pid as u32).collect()
}

/// Waits until the bulkhead `b` has no workers, neither in the snapshot nor among the keeper's child processes.
pub fn wait_for_rest(supervisor: &Supervisor) {
    wait_for("no worker is running", || {
        let is_at_rest = supervisor.worker_pids("b").is_empty() && children(supervisor.keeper()).is_empty();
        is_at_rest.then_some(())
    });
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Returns the number of rejected jobs in a snapshot.
pub fn rejected(snapshot: &Value) -> u64 {
    snapshot["rejected"].as_object().expect("by reason").values().map(number).sum()
}

/// Returns the number of jobs in a snapshot that have an outcome.
pub fn outcomes(snapshot: &Value) -> u64 {
    let ended = ["done", "failed", "crashed", "deadline_exceeded", "cancelled"];
    ended.iter().map(|field| number(&snapshot[*field])).sum::<u64>() + rejected(snapshot)
}

/// Checks that every submitted job in a snapshot is finished, running, queued, or in a fallback.
pub fn assert_balanced(snapshot: &Value) {
    let underway: u64 =
        ["in_flight", "queued", "elsewhere"].iter().map(|field| number(&snapshot[*field])).sum();
    assert_eq!(number(&snapshot["submitted"]), outcomes(snapshot) + underway, "{snapshot}");
}

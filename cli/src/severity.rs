//! Ranks bulkheads by the severity of their problems, for `status` and `top`, and selects the bulkheads for the option
//! `--failed`. The severity depends on the state of the workers and on the service level, which the supervisor
//! computes. `bulkhead_api::Severity` is the unrelated severity of an event.

use bulkhead_api::{BulkheadState, Service, Snapshot, Word};

/// Returns the severity of a bulkhead's problems. Higher is worse. The state and the service level have separate
/// severities. The first number is the maximum of the two, and the second number is their sum. Unknown states count as
/// healthy.
pub(crate) fn rank(bulkhead: &Snapshot) -> (u8, u8) {
    let state = match &bulkhead.state {
        Word::Known(BulkheadState::Failed) => 3,
        Word::Known(BulkheadState::Degraded) => 2,
        Word::Known(BulkheadState::Starting | BulkheadState::Draining) => 1,
        Word::Known(BulkheadState::Ready) | Word::Other(_) => 0,
    };
    let service = match &bulkhead.service {
        Some(Word::Known(Service::Failing)) => 3,
        Some(Word::Known(Service::Degraded)) => 2,
        Some(Word::Known(Service::Ok) | Word::Other(_)) | None => 0,
    };
    (state.max(service), state + service)
}

/// Returns true if an operator should investigate the bulkhead, because its state is failed or degraded, or its service
/// is failing or degraded.
pub(crate) fn is_failed(bulkhead: &Snapshot) -> bool {
    rank(bulkhead) >= (2, 0)
}

/// Sorts by severity, worst first, then by name.
pub(crate) fn sort(bulkheads: &mut [Snapshot]) {
    bulkheads.sort_by_cached_key(|bulkhead| (std::cmp::Reverse(rank(bulkhead)), bulkhead.name.clone()));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn bulkheads_are_sorted_from_worst_to_best() {
        let snapshots = [
            ("idle", "ready", "ok"),
            ("new", "starting", "ok"),
            ("slow", "ready", "degraded"),
            ("late", "ready", "failing"),
            ("dead", "failed", "ok"),
            ("lost", "failed", "failing"),
            ("half", "degraded", "ok"),
            ("also", "ready", "ok"),
        ];
        let mut all: Vec<_> = snapshots
            .iter()
            .map(|(name, state, service)| json!({"name": name, "state": state, "service": service}))
            .collect();
        all.push(json!({"name": "older", "state": "ready"}));
        let mut all: Vec<Snapshot> = serde_json::from_value(all.into()).unwrap();
        sort(&mut all);
        let names: Vec<&str> = all.iter().map(|one| &*one.name).collect();
        assert_eq!(names, ["lost", "dead", "late", "half", "slow", "new", "also", "idle", "older"]);
    }
}

//! Which bulkhead needs to be looked at first: by the state of its workers and how well it serves.

use serde_json::Value;

/// How bad a state is; a word that is not known is no reason for alarm.
fn of_state(state: &str) -> u8 {
    match state {
        "failed" => 3,
        "degraded" => 2,
        "starting" | "draining" => 1,
        _ => 0,
    }
}

fn of_service(service: &str) -> u8 {
    match service {
        "failing" => 3,
        "degraded" => 2,
        _ => 0,
    }
}

/// Larger is worse: first the worse of the two, then both together.
pub(crate) fn rank(state: &str, service: &str) -> (u8, u8) {
    let (state, service) = (of_state(state), of_service(service));
    (state.max(service), state + service)
}

/// The worst first; those that are alike by name.
pub(crate) fn sort(bulkheads: &mut [Value]) {
    let word = |bulkhead: &Value, field: &str| bulkhead[field].as_str().unwrap_or_default().to_owned();
    bulkheads.sort_by_cached_key(|bulkhead| {
        let rank = rank(&word(bulkhead, "state"), &word(bulkhead, "service"));
        (std::cmp::Reverse(rank), word(bulkhead, "name"))
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_worst_comes_first() {
        let told = [
            ("idle", "ready", "ok"),
            ("new", "starting", "ok"),
            ("slow", "ready", "degraded"),
            ("late", "ready", "failing"),
            ("dead", "failed", "ok"),
            ("lost", "failed", "failing"),
            ("half", "degraded", "ok"),
            ("also", "ready", "ok"),
        ];
        let mut all: Vec<Value> = told
            .iter()
            .map(|(name, state, service)| json!({"name": name, "state": state, "service": service}))
            .collect();
        all.push(json!({"name": "older", "state": "ready"}));
        sort(&mut all);
        let names: Vec<&str> = all.iter().filter_map(|one| one["name"].as_str()).collect();
        assert_eq!(names, ["lost", "dead", "late", "half", "slow", "new", "also", "idle", "older"]);
    }
}

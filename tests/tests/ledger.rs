//! Jobs under kills, stops, reloads and floods, in the books of clients and workers. For longer:
//! `cargo run --release -p bulkhead-tests --bin ledger -- SECONDS SEED`.

use std::time::Duration;

use bulkhead_tests::ledger::{self, Plan};

#[test]
fn every_job_has_one_outcome_that_is_true_and_begins_once_within_the_bound() {
    for has_hangs in [true, false] {
        let findings = ledger::keep(Plan { lasts: Duration::from_secs(10), seed: 20_261_122, has_hangs });
        assert!(findings.faults.is_empty(), "{findings:#?}");
        assert!(findings.outcomes.get("ok").is_some_and(|&count| count > 100), "{findings:#?}");
    }
}

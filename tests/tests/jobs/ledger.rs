//! Jobs under kills, stops, reloads and floods, recorded by clients and workers. For longer runs:
//! `cargo run --release -p bulkhead-tests --bin ledger -- SECONDS SEED`, followed by `embedded` or
//! `embedded-local` for a supervisor in the clients' process.

use std::time::Duration;

use bulkhead_tests::ledger::{self, Plan};

/// The number of concurrent jobs must never exceed the limit.
#[test]
fn every_job_begins_once_and_has_one_outcome() {
    for has_hangs in [true, false] {
        let findings = ledger::keep(Plan { lasts: Duration::from_secs(10), seed: 20_261_122, has_hangs });
        assert!(findings.faults.is_empty(), "{findings:#?}");
        assert!(findings.outcomes.get("ok").is_some_and(|&count| count > 100), "{findings:#?}");
    }
}

/// Runs the embedded supervisor first on a separate thread, and then on the clients' thread.
#[test]
fn embedded_supervisor_gives_each_job_exactly_one_outcome() {
    for mode in ["embedded", "embedded-local"] {
        let kept = ledger::embedded::keep_in_process(&["10", "20261123", mode]);
        kept.unwrap_or_else(|fault| panic!("{mode}: {fault}"));
    }
}

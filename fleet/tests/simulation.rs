//! Simulates random histories of a fleet with a virtual clock. Agents run the real decision code against a model of the
//! server, which delays, reorders, repeats and loses messages like a real server.
//!
//! `BULKHEAD_SIM_SEED` replays one history. `BULKHEAD_SIM_HISTORIES` sets the number of histories.

#![expect(clippy::expect_used, clippy::panic, reason = "tests report failures by panicking")]

mod support;

use std::time::{Duration, Instant};

use bulkhead_fleet::decide::Faults;
use support::world::{Coverage, World};

const HISTORIES: u64 = 400;
/// Time limit of the search for a history in which the injected fault violates an invariant.
const FAULT_TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn random_histories_do_not_violate_invariants() {
    let mut coverage = Coverage::default();
    if let Some(seed) = variable("BULKHEAD_SIM_SEED") {
        let result = World::new(seed, Faults::default()).run(&mut coverage);
        result.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        return println!("{coverage:#?}");
    }
    let histories = variable("BULKHEAD_SIM_HISTORIES").unwrap_or(HISTORIES);
    for seed in 1..=histories {
        let result = World::new(seed, Faults::default()).run(&mut coverage);
        result.unwrap_or_else(|violation| panic!("seed {seed} (BULKHEAD_SIM_SEED={seed}): {violation}"));
    }
    println!("{histories} histories: {coverage:#?}");
    if histories >= HISTORIES {
        coverage.demand_all();
    }
}

/// Searches for a history in which the injected fault violates an invariant, and returns the violation.
fn find(faults: Faults) -> String {
    let began = Instant::now();
    let mut seed = 0;
    while began.elapsed() < FAULT_TIMEOUT {
        seed += 1;
        if let Err(violation) = World::new(seed, faults).run(&mut Coverage::default()) {
            println!("history {seed}, after {:?}: {violation}", began.elapsed());
            return violation;
        }
    }
    panic!("{faults:?} was not found in {seed} histories");
}

#[test]
fn simulation_finds_acknowledgement_before_record() {
    let violation = find(Faults { acknowledges_before_record: true, ..Faults::default() });
    assert!(violation.contains("lost"), "{violation}");
}

#[test]
fn simulation_finds_claim_without_expected_sequence() {
    find(Faults { claims_without_expectation: true, ..Faults::default() });
}

#[test]
fn simulation_finds_takeover_at_first_redelivery() {
    let violation = find(Faults { takes_over_at_first_redelivery: true, ..Faults::default() });
    assert!(violation.contains("living"), "{violation}");
}

#[test]
fn simulation_finds_pending_write_mistaken_for_refusal() {
    find(Faults { mistakes_pending_write_for_refusal: true, ..Faults::default() });
}

#[test]
fn simulation_finds_claim_despite_unreadable_record() {
    let violation = find(Faults { claims_despite_unreadable_record: true, ..Faults::default() });
    assert!(violation.contains("foreign"), "{violation}");
}

#[test]
fn simulation_finds_restored_dead_letter() {
    let violation = find(Faults { restores_dead_letters: true, ..Faults::default() });
    assert!(violation.contains("dead letter"), "{violation}");
}

fn variable(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().expect("a number"))
}

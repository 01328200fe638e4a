//! Runs the ledger for as long as it is told to and prints what was found: `ledger [SECONDS [SEED [calm]]]`, where
//! `calm` leaves out what the supervisor kills workers for. With
//! `worker` it is the worker behind it.

use std::process::ExitCode;
use std::time::Duration;

use bulkhead_tests::ledger::{self, Plan};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (seconds, seed) = match arguments[..] {
        ["worker", notes, bulkhead, bound] => return ledger::worker::serve(notes, bulkhead, bound),
        [] => (Some(600), Some(1)),
        [seconds] => (seconds.parse().ok(), Some(1)),
        [seconds, seed] | [seconds, seed, "calm"] => (seconds.parse().ok(), seed.parse().ok()),
        _ => (None, None),
    };
    let (Some(seconds), Some(seed)) = (seconds, seed) else {
        eprintln!("usage: ledger [SECONDS [SEED [calm]]]");
        return ExitCode::from(2);
    };
    let findings = ledger::keep(Plan {
        lasts: Duration::from_secs(seconds),
        seed,
        has_hangs: !arguments.contains(&"calm"),
    });
    println!("{findings:#?}");
    if findings.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

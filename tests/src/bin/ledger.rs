//! Runs the ledger test and prints the results: `ledger [SECONDS [SEED [calm]]] [embedded | embedded-local]`.
//!
//! - `calm` leaves out everything that makes the supervisor kill workers.
//! - `embedded` and `embedded-local` run the supervisor in the clients' process.
//! - `worker` and `in` are internal: a ledger worker, and the process of an embedded supervisor.

use std::process::ExitCode;
use std::time::Duration;

use bulkhead_supervisor::observe::logging::{self, LogFilter, LogFormat};
use bulkhead_tests::ledger::{self, Findings, Plan};

const EMBEDDED: [&str; 2] = ["embedded", "embedded-local"];

fn main() -> ExitCode {
    bulkhead_supervisor::keeper_main_if_asked();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["worker", notes, bulkhead, bound] => ledger::worker::serve(notes, bulkhead, bound),
        ["in", notes, ref rest @ .., mode] => match plan(rest) {
            Some(plan) => {
                // Maximum duration of a run, excluding the load. Limits how long the test waits for a hanging run.
                const REST_MAX: Duration = Duration::from_secs(10 * 60);
                let seconds = (plan.lasts + REST_MAX).as_secs();
                nix::unistd::alarm::set(u32::try_from(seconds).unwrap_or(u32::MAX));
                // If the supervisor stops early, the log says why.
                let filter = LogFilter { level: "error", has_output: false };
                logging::init(LogFormat::Text, filter).expect("a valid level");
                told(&ledger::embedded::keep(notes.as_ref(), plan, mode == EMBEDDED[1]))
            }
            None => usage(),
        },
        [ref rest @ .., mode] if EMBEDDED.contains(&mode) && plan(rest).is_some() => {
            match ledger::embedded::keep_in_process(&arguments) {
                Ok(findings) => {
                    println!("{findings}");
                    ExitCode::SUCCESS
                }
                Err(fault) => {
                    println!("{fault}");
                    ExitCode::FAILURE
                }
            }
        }
        ref all => plan(all).map_or_else(usage, |plan| told(&ledger::keep(plan))),
    }
}

fn plan(arguments: &[&str]) -> Option<Plan> {
    let (seconds, seed) = match arguments {
        [] => (600, 1),
        [seconds] => (seconds.parse().ok()?, 1),
        [seconds, seed] | [seconds, seed, "calm"] => (seconds.parse().ok()?, seed.parse().ok()?),
        _ => return None,
    };
    Some(Plan { lasts: Duration::from_secs(seconds), seed, has_hangs: !arguments.contains(&"calm") })
}

fn told(findings: &Findings) -> ExitCode {
    println!("{findings:#?}");
    if findings.faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage() -> ExitCode {
    eprintln!("usage: ledger [SECONDS [SEED [calm]]] [embedded | embedded-local]]");
    ExitCode::from(2)
}

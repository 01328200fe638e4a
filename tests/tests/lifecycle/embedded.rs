//! Embedded supervisors. The application is `tests/src/bin/application.rs`, which runs as a separate process for each
//! test.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use bulkhead_tests::{heavy, is_alive, kill_pid, programs, wait_for};
use nix::sys::signal::Signal;
use tempfile::TempDir;

fn application(folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(programs().join("application"));
    command.args(arguments).current_dir(folder.path()).env("MISBEHAVE", programs().join("misbehave"));
    command
}

/// Runs a scenario to the end, and checks for success.
fn runs(scenario: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = application(&folder, &[scenario]).stdin(Stdio::null()).output().unwrap();
    let (said, error) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.ends_with("done\n"), "{}\n{said}\n{error}", ended.status);
}

/// No process is left after the shutdown.
#[test]
fn embedded_jobs_have_the_usual_outcomes() {
    runs("jobs");
}

#[test]
fn large_payloads_travel_in_memory_files() {
    runs("lends-files");
}

#[test]
fn clients_are_held_to_the_rules_of_the_jobs_socket() {
    runs("admission");
}

#[test]
fn application_reaps_only_its_own_children() {
    runs("waits-for-all");
}

/// Covers signals, resource limits and descriptors.
#[test]
fn process_state_of_application_is_unchanged() {
    runs("keeps-its-own");
}

/// The application's own children survive.
#[test]
fn killed_keeper_or_guard_is_replaced() {
    runs("loses-its-keeper");
}

/// No job begins twice.
#[test]
fn each_job_has_one_outcome_while_processes_are_killed() {
    let _turn = heavy();
    runs("holds");
}

#[test]
fn outcomes_hold_on_the_application_thread() {
    let _turn = heavy();
    runs("local-holds");
}

#[test]
fn each_of_a_thousand_jobs_that_wait_is_told_of_the_end() {
    runs("is-told");
    runs("local-is-told");
}

/// Also covers use from other threads and runtimes.
#[test]
fn supervisor_survives_panics_and_dropped_futures() {
    runs("local-goes-on");
}

#[test]
fn each_poll_drives_it_even_if_there_is_no_second_one() {
    runs("local-polled-once");
}

#[test]
fn the_end_is_told_for_good_and_a_copy_ends_nothing() {
    runs("ends-for-good");
}

#[test]
fn one_process_can_have_two() {
    runs("two");
}

#[test]
fn what_is_wrong_is_an_error_and_leaves_nothing() {
    runs("refused");
}

#[test]
fn to_drop_it_drains() {
    runs("drains");
}

#[test]
fn it_starts_in_a_runtime_beside_many_threads() {
    runs("async");
}

#[test]
fn its_data_plane_can_be_on_the_thread_of_the_application() {
    runs("local");
}

#[test]
fn on_the_thread_of_the_application_it_ends_in_order_too() {
    runs("local-ends");
}

#[test]
fn an_application_that_adopts_orphans_is_left_with_none() {
    runs("adopts");
}

#[test]
fn a_process_that_is_forked_off_ends_nothing() {
    runs("forks");
}

/// Also covers an application whose forked child inherits all descriptors, so that no pipe or socket reports an end of
/// file.
#[test]
fn an_application_that_is_killed_leaves_nothing() {
    for arguments in [&["is-killed"][..], &["is-killed", "forks"], &["local-is-killed"]] {
        let folder = tempfile::tempdir().unwrap();
        let mut running =
            application(&folder, arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut told = String::new();
        BufReader::new(running.stdout.take().unwrap()).read_line(&mut told).unwrap();
        let pids: Vec<u32> = told.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        assert!(pids.len() >= 3 && pids.iter().all(|&pid| is_alive(pid)), "{told:?}");
        running.kill().unwrap();
        running.wait().unwrap();
        wait_for("its workers, their keeper and its guard are gone", || {
            (!pids[..3].iter().any(|&pid| is_alive(pid))).then_some(())
        });
        if let Some(&forked) = pids.get(3) {
            assert!(is_alive(forked), "it is the application's");
            kill_pid(forked, Signal::SIGKILL);
        }
    }
}

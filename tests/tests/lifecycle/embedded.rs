//! Embedded supervisors. The application is `tests/src/bin/application.rs`, which runs as a separate process for each
//! test.

use std::process::{Command, Stdio};

use bulkhead_tests::{heavy, is_alive, kill_pid, programs, wait_for};
use nix::sys::signal::Signal;
use tempfile::TempDir;

fn application(folder: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(programs().join("application"));
    command.args(arguments).current_dir(folder.path());
    command.env("MISBEHAVE", programs().join("misbehave")).env("FOLDER", folder.path());
    command
}

/// Runs a scenario in the `application` program and checks that it succeeds.
fn runs(scenario: &str) {
    let folder = tempfile::tempdir().unwrap();
    let ended = bulkhead_tests::output(&mut application(&folder, &[scenario]));
    let (said, error) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success() && said.ends_with("done\n"), "{}\n{said}\n{error}", ended.status);
}

/// The shutdown must leave no processes behind.
#[test]
fn embedded_supervisor_runs_jobs_and_restarts_workers() {
    runs("jobs");
}

#[test]
fn embedded_supervisor_reports_backtraces() {
    runs("backtrace");
}

#[test]
fn embedded_clients_use_memory_files() {
    runs("lends-files");
}

#[test]
fn embedded_clients_have_the_same_limits_as_socket_clients() {
    runs("admission");
}

#[test]
fn application_reaps_only_its_own_children() {
    runs("waits-for-all");
}

/// The application's signal handlers, resource limits and file descriptors must stay the same.
#[test]
fn embedding_does_not_change_process_state() {
    runs("keeps-its-own");
}

/// The application's other child processes must survive.
#[test]
fn killed_keeper_or_guard_is_replaced() {
    runs("loses-its-keeper");
}

#[test]
fn keeper_killed_during_its_start_is_replaced() {
    runs("loses-starting-keepers");
}

#[test]
fn supervisor_fails_if_the_keeper_cannot_be_replaced() {
    runs("loses-all-keepers");
}

/// A job must never begin twice.
#[test]
fn each_job_has_one_outcome_despite_killed_processes() {
    let _turn = heavy();
    runs("holds");
}

#[test]
fn local_supervisor_keeps_outcomes_despite_killed_processes() {
    let _turn = heavy();
    runs("local-holds");
}

#[test]
fn shutdown_answers_a_thousand_waiting_jobs() {
    runs("is-told");
    runs("local-is-told");
}

/// The test covers clients on other threads and in other runtimes.
#[test]
fn supervisor_survives_panics_and_dropped_futures() {
    runs("local-goes-on");
}

#[test]
fn dropping_run_until_after_each_poll_loses_no_jobs() {
    runs("local-polled-once");
}

#[test]
fn clients_get_errors_after_shutdown_but_not_after_fork() {
    runs("ends-for-good");
}

#[test]
fn two_supervisors_can_run_in_one_process() {
    runs("two");
}

#[test]
fn failed_start_leaves_no_descriptors() {
    runs("refused");
}

#[test]
fn relative_program_paths_refer_to_the_directory_at_the_start() {
    runs("relative-paths");
}

#[test]
fn dropping_the_supervisor_finishes_running_jobs() {
    runs("drains");
}

#[test]
fn supervisor_starts_in_multithreaded_async_application() {
    runs("async");
}

#[test]
fn local_supervisor_runs_on_the_application_thread() {
    runs("local");
}

#[test]
fn local_supervisor_shuts_down_cleanly() {
    runs("local-ends");
}

#[test]
fn file_size_limit_does_not_kill_the_application() {
    runs("local-limits-files");
}

#[test]
fn subreaper_application_has_no_leftover_children() {
    runs("adopts");
}

#[test]
fn dropping_supervisor_in_forked_child_has_no_effect() {
    runs("forks");
}

#[test]
fn forked_child_does_not_keep_a_stopped_supervisor_locked() {
    runs("leaves-a-fork");
}

/// The test also covers an application with a forked child that keeps all inherited descriptors open, so that no pipe
/// or socket reports an end of file.
#[test]
fn killed_application_leaves_no_processes() {
    for arguments in [&["is-killed"][..], &["is-killed", "forks"], &["local-is-killed"]] {
        let folder = tempfile::tempdir().unwrap();
        let line = folder.path().join("line");
        let stdout = std::fs::File::create(&line).unwrap();
        let mut running =
            application(&folder, arguments).stdin(Stdio::piped()).stdout(stdout).spawn().unwrap();
        let told = wait_for("the application prints its processes", || {
            std::fs::read_to_string(&line).ok().filter(|told| told.ends_with('\n'))
        });
        let pids: Vec<u32> = told.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        assert!(pids.len() >= 3 && pids.iter().all(|&pid| is_alive(pid)), "{told:?}");
        running.kill().unwrap();
        running.wait().unwrap();
        wait_for("the worker, the keeper and the guard have exited", || {
            (!pids[..3].iter().any(|&pid| is_alive(pid))).then_some(())
        });
        if let Some(&forked) = pids.get(3) {
            assert!(is_alive(forked), "the application's own child was killed");
            kill_pid(forked, Signal::SIGKILL);
        }
    }
}

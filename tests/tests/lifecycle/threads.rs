//! Panics of essential threads. The supervisor stops its workers, logs the reason and exits. The tests require a debug
//! build, because a release build has no way to trigger a panic.

use bulkhead_tests::{Supervisor, is_alive, not_run, wait_for};

/// The keeper and the workers must exit together with the supervisor.
#[test]
fn panic_of_essential_thread_stops_the_supervisor() {
    if !cfg!(debug_assertions) {
        not_run!("a release build does not panic on request");
        return;
    }
    // Covers one task on the `control` thread, and the whole `onlookers` thread. The log names exactly one task or
    // thread.
    for thread in ["CONTROL", "ONLOOKERS"] {
        let signs = tempfile::tempdir().unwrap();
        let sign = signs.path().join("panic");
        let variable = format!("BULKHEAD_PANIC_{thread}");
        let variables = [(variable.as_str(), sign.to_str().unwrap())];
        let bulkheads = "[bulkhead.b]\ncommand = [\"MISBEHAVE\"]\nprocesses = 2\n";
        let mut supervisor = Supervisor::start_as(&[], &variables, bulkheads);
        let (keeper, workers) = (supervisor.keeper(), supervisor.worker_pids("b"));
        assert_eq!(workers.len(), 2);
        std::fs::write(&sign, "").unwrap();
        let status = supervisor.wait();
        assert_eq!(status.code(), Some(1), "{status}: {}", supervisor.log());
        let told = "has exited; the supervisor cannot continue and is stopping";
        assert_eq!(supervisor.log().matches(told).count(), 1, "{}", supervisor.log());
        for process in workers.into_iter().chain([keeper]) {
            wait_for("the keeper and all workers have exited", || (!is_alive(process)).then_some(()));
        }
        for socket in ["jobs.sock", "admin.sock"] {
            assert!(!supervisor.file(socket).exists(), "{socket} still exists");
        }
    }
}

//! Default resource limits of confined workers.

use bulkhead_tests::confined::{
    DEFAULT_LAYERS, NOBODY, Place, STRICT_LAYERS, Setup, WORKER_UIDS, has_layers, is_root,
};
use bulkhead_tests::wait_for;

/// Returns the soft and hard limits on the resource `name`, as a worker or program sees them in `/proc`.
fn limit(place: &Place, bulkhead: &str, name: &str) -> (String, String) {
    let limits = place.ask(bulkhead, "limits");
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).expect("the limit is listed");
    let mut words = line.split_whitespace().map(str::to_owned);
    (words.next().unwrap(), words.next().unwrap())
}

fn both(value: &str) -> (String, String) {
    (value.to_owned(), value.to_owned())
}

const PROCESSES: &str = "Max processes";
const FILE: &str = "Max file size";
const WORKER: &str = "command = [\"HOSTILE\"]";
const PROGRAM: &str = "exec = [\"HOSTILE\", \"once\"]";

fn bulkheads(sandbox: &str, limits: &str) -> String {
    let one = |name: &str, runs: &str| {
        format!("[bulkhead.{name}]\n{runs}\ncwd = \"work\"\n{limits}\nsandbox = {{ {sandbox} }}\n")
    };
    one("worker", WORKER) + &one("program", PROGRAM)
}

fn is_bounded(place: &Place, processes: bool) {
    for name in ["worker", "program"] {
        assert_eq!(limit(place, name, FILE), both("4294967296"), "{name}");
        assert_eq!(limit(place, name, PROCESSES) == both("1024"), processes, "{name}");
        assert_eq!(place.confinement(name)[0].has_process_bound, processes, "{name}");
    }
}

#[test]
fn file_size_and_process_limits_apply_to_each_worker() {
    if !has_layers(DEFAULT_LAYERS) || !is_root() {
        return;
    }
    let each = bulkheads("profile = \"default\", user = \"auto\"", "");
    is_bounded(&Setup { supervisor: WORKER_UIDS, bulkheads: &each, ..Setup::default() }.start(), true);
    // `RLIMIT_NPROC` does not apply to root.
    let root = bulkheads("profile = \"default\", user = \"root\"", "");
    is_bounded(&Setup { bulkheads: &root, ..Setup::default() }.start(), false);
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let strict = bulkheads("profile = \"strict\", best_effort = [\"identity\"]", "");
    is_bounded(&Setup { supervisor: WORKER_UIDS, bulkheads: &strict, ..Setup::default() }.start(), true);
    is_bounded(&Setup { bulkheads: &strict, user: Some(NOBODY), ..Setup::default() }.start(), true);
}

#[test]
fn configured_rlimits_replace_the_defaults() {
    if !has_layers(DEFAULT_LAYERS) || !is_root() {
        return;
    }
    let limits = "rlimits = { nproc = 77, fsize = \"1MiB\" }";
    let own = bulkheads("profile = \"default\", user = \"auto\"", limits);
    let place = Setup { supervisor: WORKER_UIDS, bulkheads: &own, ..Setup::default() }.start();
    for name in ["worker", "program"] {
        assert_eq!(limit(&place, name, PROCESSES), both("77"));
        assert_eq!(limit(&place, name, FILE), both("1048576"));
    }
    let none = bulkheads("profile = \"none\"", "");
    let place = Setup { bulkheads: &none, ..Setup::default() }.start();
    for name in ["worker", "program"] {
        assert_ne!(limit(&place, name, PROCESSES), both("1024"));
        assert_ne!(limit(&place, name, FILE), both("4294967296"));
    }
}

/// The temporary folder is an ordinary folder on disk without a size limit, so the supervisor periodically checks
/// the size of its contents.
#[test]
fn worker_that_exceeds_sandbox_tmp_is_killed() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let users: &[Option<u32>] = if is_root() { &[None, Some(NOBODY)] } else { &[None] };
    for user in users {
        let sandbox = "profile = \"default\", tmp = \"1MiB\"";
        let place = Setup { bulkheads: &bulkheads(sandbox, ""), user: *user, ..Setup::default() }.start();
        let client = place.client();
        for name in ["worker", "program"] {
            let before = place.worker(name);
            let ended = place.attempt(&client, name, "fill-temporary-folder", &place.targets(name));
            assert!(
                matches!(&ended, bulkhead_tests::confined::Ended::Violation(text) if text.contains("sandbox.tmp")),
                "{ended:?}"
            );
            // The next worker serves jobs.
            place.ask(name, "pid");
            assert_ne!(place.worker(name), before);
            wait_for("an event names `sandbox.tmp`", || {
                let events = place.supervisor.try_get(&format!("/v1/events?bulkhead={name}&follow=false"));
                events.is_some_and(|(_, events)| events.contains("sandbox.tmp")).then_some(())
            });
        }
    }
}

//! Layers of confinement: the snapshot compared with `/proc`, missing layers, users and resource limits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bulkhead_tests::attempts::Expected;
use bulkhead_tests::confined::{
    Confinement, DEFAULT_LAYERS, Ended, NOBODY, Place, STRICT_LAYERS, Setup, WORKER_UIDS, has_layers,
    is_root, namespaces, status_field,
};
use bulkhead_tests::{PATIENCE, descriptors, kill_pid, not_run, outcome, wait_for};
use nix::sys::signal::Signal;
use serde_json::json;

const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";
const WORKER: &str = "command = [\"HOSTILE\"]";

/// Returns the configuration of a bulkhead with the given program and sandbox.
fn bulkhead(name: &str, runs: &str, sandbox: &str) -> String {
    format!(
        "[bulkhead.{name}]\n{runs}\ncwd = \"work\"\nmax_queue = 10\ndeadline = \"60s\"\n\
         restart = {{ backoff = \"1ms\", max = 1 }}\nsandbox = {{ {sandbox} }}\n"
    )
}

fn only(place: &Place, name: &str) -> Confinement {
    wait_for("the snapshot has the worker's confinement", || {
        place.confinement(name).pop().filter(|one| !one.profile.is_empty())
    })
}

/// Checks in `/proc`, independently of the snapshot, that a process has no privileges.
fn assert_powerless(pid: u32) {
    assert_powerless_but_for_bounds(pid);
    assert_eq!(status_field(pid, "CapBnd").trim_start_matches('0'), "", "CapBnd of {pid}");
}

/// Checks the same properties as [`assert_powerless`], except the bounding set, which an unprivileged supervisor
/// cannot empty. The bounding set has no effect on a process that cannot gain privileges.
fn assert_powerless_but_for_bounds(pid: u32) {
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status_field(pid, set).trim_start_matches('0'), "", "{set} of {pid}");
    }
    assert_eq!(status_field(pid, "NoNewPrivs"), "1", "of {pid}");
    assert_eq!(status_field(pid, "Seccomp"), "2", "of {pid}");
}

const NAMESPACES: [&str; 6] = ["user", "pid", "mnt", "net", "ipc", "uts"];

fn foreign_namespaces(pid: u32) -> BTreeSet<String> {
    let own = namespaces(std::process::id());
    let theirs = namespaces(pid);
    let differs = |name: &str| theirs.get(name).is_some_and(|id| own.get(name) != Some(id));
    NAMESPACES.into_iter().filter(|name| differs(name)).map(str::to_owned).collect()
}

#[test]
fn snapshot_reports_the_confinement_in_force() {
    if !has_layers(DEFAULT_LAYERS) || !has_layers(STRICT_LAYERS) {
        return;
    }
    for user in [None, Some(NOBODY)] {
        if user.is_some() && !is_root() {
            return;
        }
        let bulkheads = bulkhead("none", WORKER, "profile = \"none\"")
            + &bulkhead("default", WORKER, DEFAULT)
            + &bulkhead("strict", WORKER, STRICT);
        let place = Setup { bulkheads: &bulkheads, user, ..Setup::default() }.start();
        let none = only(&place, "none");
        assert_eq!((none.profile.as_str(), none.is_filtered, none.no_new_privs), ("none", false, false));
        for name in ["default", "strict"] {
            let told = only(&place, name);
            assert_eq!(told.profile, name);
            assert!(told.is_filtered && told.no_new_privs && !told.has_capabilities, "{told:?}");
            assert!(told.landlock.is_some(), "{told:?}");
            match user {
                None => assert_powerless(told.pid),
                Some(_) => assert_powerless_but_for_bounds(told.pid),
            }
            let foreign = foreign_namespaces(told.pid);
            let expected: &[&str] = match (name, user) {
                ("strict", _) | (_, Some(_)) => &NAMESPACES,
                _ => &["pid", "mnt", "ipc", "uts"],
            };
            let expected = expected.iter().filter(|kind| name == "strict" || **kind != "net");
            assert_eq!(foreign, expected.map(|name| (*name).to_owned()).collect(), "{name}");
            // The snapshot does not list IPC and UTS namespaces, which come with the PID namespace.
            let told_of: Vec<_> = told.namespaces.iter().map(String::as_str).collect();
            let expected: &[&str] = match (name, user) {
                ("strict", _) => &["user", "pid", "mount", "network"],
                (_, Some(_)) => &["user", "pid", "mount"],
                (_, None) => &["pid", "mount"],
            };
            assert_eq!(told_of, expected, "{told:?}");
            assert_eq!(status_field(told.pid, "Uid").split(' ').nth(1), Some(told.uid.to_string().as_str()));
            let is_shared = user.is_some() || !is_root();
            let missing: &[&str] = if name == "strict" && is_shared { &["identity"] } else { &[] };
            assert_eq!(told.missing, missing, "{told:?}");
        }
    }
}

/// The snapshot contains the worker's PID, not the PID of the first process in the worker's PID namespace.
#[test]
fn snapshot_contains_the_workers_pid() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    for sandbox in [DEFAULT, STRICT] {
        let place = Setup { bulkheads: &bulkhead("x", WORKER, sandbox), ..Setup::default() }.start();
        let pid = place.worker("x");
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(line.contains("hostile"), "{sandbox}: {line}");
        let reply = place.client().job("x", "").operation("pid").deadline(PATIENCE).send().unwrap();
        let inside = String::from_utf8_lossy(reply.payload()).into_owned();
        assert_eq!(status_field(pid, "NSpid").split(' ').next_back(), Some(inside.as_str()), "{sandbox}");
        assert!(inside.parse::<u32>().unwrap() < 10, "{sandbox}: {inside}");
        assert_eq!(reply.outcome().worker_pid, Some(pid), "{sandbox}");
    }
}

/// The test covers systems on which a new `/proc` cannot be mounted, as in many containers.
#[test]
fn default_profile_reports_missing_pid_namespace() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    for without in ["pid_namespace", "own_/proc", "mount_namespace", "ipc_namespace"] {
        let place = Setup { bulkheads: &bulkhead("x", WORKER, DEFAULT), without, ..Setup::default() }.start();
        let told = only(&place, "x");
        assert_eq!((told.missing.as_slice(), told.namespaces.len()), (&["pid_namespace".to_owned()][..], 0));
        assert_eq!(place.ask("x", "pid"), told.pid.to_string());
    }
}

/// Hides the layers in `missing` and starts two bulkheads. The bulkhead that requires all layers of `profile` must fail
/// with an error that names `layer`. The bulkhead with `best_effort` must run and report `layer` as missing.
fn assert_error_or_told(profile: &str, layer: &str, missing: &[&str], user: Option<u32>) {
    let lenient: String = missing.iter().map(|layer| format!(", \"{layer}\"")).collect();
    let sandbox = |more: &str| format!("profile = \"{profile}\", best_effort = [\"identity\"{more}]");
    let bulkheads =
        bulkhead("required", WORKER, &sandbox("")) + &bulkhead("lenient", WORKER, &sandbox(&lenient));
    let without = missing.join(",");
    let place = Setup { bulkheads: &bulkheads, without: &without, user, ..Setup::default() }.start();
    let told = only(&place, "lenient");
    assert!(told.missing.iter().any(|missing| missing == layer), "{profile} without {layer}: {told:?}");
    assert!(place.ask("lenient", "pid").parse::<u32>().is_ok(), "{profile} without {layer}");
    let why = place.failure("required");
    assert!(why.contains(layer), "{profile} without {layer}: {why}");
    assert_eq!(outcome(&place.client().job("required", "").send()), "rejected/unavailable");
}

#[test]
fn missing_landlock_or_seccomp_fails_start_unless_best_effort() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let of_both = [("landlock", &["landlock"][..]), ("seccomp", &["seccomp"])];
    // The kernel accepts neither Landlock rules nor filters from a process that can still gain privileges.
    let of_both = of_both.into_iter().chain([("no_new_privs", &["no_new_privs", "landlock", "seccomp"][..])]);
    for (layer, missing) in of_both {
        assert_error_or_told("default", layer, missing, None);
        assert_error_or_told("strict", layer, missing, None);
    }
}

#[test]
fn missing_pid_namespace_fails_strict_start_unless_best_effort() {
    if has_layers(STRICT_LAYERS) {
        assert_error_or_told("strict", "pid_namespace", &["pid_namespace"], None);
    }
}

#[test]
fn missing_mount_namespace_fails_start_unless_best_effort() {
    if has_layers(STRICT_LAYERS) {
        assert_error_or_told("strict", "mount_namespace", &["mount_namespace"], None);
    }
}

#[test]
fn missing_network_namespace_fails_start_unless_best_effort() {
    if has_layers(STRICT_LAYERS) {
        assert_error_or_told("strict", "network_namespace", &["network_namespace"], None);
    }
}

/// Hides Landlock scopes and starts two bulkheads: one that requires them, and one for which they are optional.
fn without_scopes(supervisor: &str, sandbox: &str, user: Option<u32>) -> Place {
    let bulkheads = bulkhead("required", WORKER, sandbox)
        + &bulkhead("lenient", WORKER, &format!("{sandbox}, best_effort = [\"landlock_scopes\"]"));
    let without = if sandbox.contains("auto") || sandbox.contains("strict") {
        "landlock_scopes"
    } else {
        "landlock_scopes,pid_namespace"
    };
    Setup { bulkheads: &bulkheads, without, user, supervisor, ..Setup::default() }.start()
}

/// A profile promises that workers cannot signal other processes. Without Landlock scopes, separate user IDs or PID
/// namespaces keep this promise. If neither of them is available, no worker starts.
#[test]
fn workers_cannot_signal_others_even_without_landlock_scopes() {
    if !is_root() || !has_layers(STRICT_LAYERS) {
        return;
    }
    let signals = ["signal-supervisor", "signal-keeper", "signal-sibling", "signal-sibling-by-descriptor"];
    let shared = [(None, "profile = \"default\", user = \"root\""), (Some(NOBODY), DEFAULT)];
    for (user, sandbox) in shared {
        let place = without_scopes("", sandbox, user);
        let why = place.failure("required");
        assert!(why.contains("landlock_scopes") && why.contains("doctor"), "{user:?}: {why}");
        let told = only(&place, "lenient");
        assert_eq!(told.missing, ["pid_namespace", "landlock_scopes"], "{user:?}");
    }
    let own =
        [(WORKER_UIDS, "profile = \"default\", user = \"auto\""), (WORKER_UIDS, "profile = \"strict\"")];
    for (supervisor, sandbox) in own {
        let place = without_scopes(supervisor, sandbox, None);
        let client = place.client();
        for name in signals {
            let ended = place.attempt(&client, "required", name, &place.targets("lenient"));
            assert!(matches!(ended, Ended::Refused(..)), "{sandbox}: {name}: {ended:?}");
        }
    }
}

/// Checks that no worker starts under the given outer seccomp filter. The error message must name `step`.
fn assert_noticed(sandbox: &str, filter: &[&str], user: Option<u32>, step: &str) {
    let bulkheads = bulkhead("x", WORKER, sandbox);
    let place = Setup { bulkheads: &bulkheads, filter, user, ..Setup::default() }.start();
    let why = place.failure("x");
    assert!(why.contains(step), "{sandbox} under {filter:?} as {user:?}: {why}");
}

/// An outer seccomp filter can make a system call report success without doing anything.
#[test]
fn worker_start_fails_if_sandbox_calls_have_no_effect() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    for user in [None, Some(NOBODY)].into_iter().take(1 + usize::from(is_root())) {
        for sandbox in [DEFAULT, STRICT] {
            assert_noticed(sandbox, &["landlock_restrict_self=0"], user, "landlock");
            assert_noticed(sandbox, &["landlock_restrict_self=1"], user, "landlock");
        }
        assert_noticed(STRICT, &["mount_setattr=0"], user, "mount_namespace");
        assert_noticed(STRICT, &["mount_setattr=1"], user, "mount_namespace");
    }
}

/// Runs `doctor` under a seccomp filter. Returns the rows of the output.
fn doctor_layers(filter: &[&str]) -> Vec<serde_json::Value> {
    let programs = bulkhead_tests::programs();
    let mut command = Command::new(programs.join("filtered"));
    command.args(filter).arg("--").arg(programs.join("bulkhead-supervisor")).args(["doctor", "--json"]);
    let output = bulkhead_tests::output(&mut command).stdout;
    serde_json::from_slice(&output).unwrap()
}

/// Runs `doctor` under a seccomp filter. Returns whether each layer is available.
fn doctor(filter: &[&str]) -> BTreeMap<String, bool> {
    let one =
        |layer: &serde_json::Value| (layer["layer"].as_str().unwrap().to_owned(), layer["available"] == true);
    doctor_layers(filter).iter().map(one).collect()
}

#[test]
fn check_names_writable_path_on_read_only_file_system() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("data")).unwrap();
    let config = "[bulkhead.x]\nexec = [\"cat\"]\n[bulkhead.x.sandbox]\nread = [\"data\"]\nwrite = [\"/dev/null\", \"data\"]\n";
    std::fs::write(folder.path().join("workers.toml"), config).unwrap();
    let check = |mount: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-c", &format!("{mount} || exit 99; exec \"$@\"")]);
        command.arg("sh").arg(bulkhead_tests::programs().join("bulkhead-supervisor"));
        command
            .args(["--check", "--config", "workers.toml"])
            .env("XDG_RUNTIME_DIR", "/run")
            .current_dir(&folder);
        bulkhead_tests::output(&mut command)
    };
    let ended = check("mount -t tmpfs -o ro none data");
    if !matches!(ended.status.code(), Some(0 | 2)) {
        not_run!("this machine does not permit mounts in a user namespace: {ended:?}");
        return;
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{said}");
    let path = folder.path().join("data");
    let expected = format!("`sandbox.write`: {} is on a read-only file system", path.display());
    assert!(said.contains(&expected) && said.contains(": 1 error"), "{said}");
    assert!(said.contains(&format!("ReadWritePaths={}", path.display())), "{said}");
    let ended = check("mount -t tmpfs none data");
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}

#[test]
fn doctor_detects_layers_that_have_no_effect() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let lost = [
        (&["landlock_restrict_self=1"][..], &["landlock", "landlock scopes"][..]),
        (&["landlock_restrict_self=0"], &["landlock", "landlock scopes"]),
        (&["mount_setattr=1"], &["mount_setattr"]),
        (&["mount_setattr=0"], &["mount_setattr"]),
        (&["seccomp=1"], &["seccomp"]),
        (&["seccomp=0"], &["seccomp"]),
    ];
    let all = doctor(&[]);
    for (filter, layers) in lost {
        let found = doctor(filter);
        for layer in layers {
            assert!(all[*layer] && !found[*layer], "{layer} under {filter:?}");
        }
        assert!(found["pidfd"] && found["user namespace"], "{filter:?}");
    }
}

/// The layer is missing because of an outer seccomp filter. The advice must therefore not recommend a newer kernel.
#[test]
fn doctor_names_filter_that_blocks_landlock() {
    if !has_layers(DEFAULT_LAYERS) {
        return;
    }
    for call in ["landlock_create_ruleset=1", "landlock_restrict_self=1"] {
        let layer = doctor_layers(&[call]).into_iter().find(|layer| layer["layer"] == "landlock").unwrap();
        let text = |name: &str| layer[name].as_str().unwrap_or_default().to_owned();
        assert!(text("why_not").contains("a seccomp filter that this process inherited"), "{layer}");
        assert!(
            text("what_to_do").contains("deploy/seccomp.json") && !text("what_to_do").contains("kernel 5"),
            "{layer}"
        );
    }
}

/// The container filter allows all system calls that both profiles need, so no layer is missing under the filter.
#[test]
fn workers_start_under_a_container_seccomp_filter() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    const FILTER: &str = concat!("@", env!("CARGO_MANIFEST_DIR"), "/../deploy/seccomp.json");
    for user in [None, Some(NOBODY)].into_iter().take(1 + usize::from(is_root())) {
        for sandbox in [DEFAULT, STRICT] {
            let bulkheads = bulkhead("x", WORKER, sandbox);
            let start = |filter: &[&str]| {
                let place = Setup { bulkheads: &bulkheads, filter, user, ..Setup::default() }.start();
                let told = only(&place, "x");
                (told.missing, told.namespaces, told.landlock, told.is_filtered)
            };
            assert_eq!(start(&[FILTER]), start(&[]), "{sandbox} as {user:?}");
        }
    }
}

/// Root does not need a user namespace to create the other namespaces and drop privileges.
#[test]
fn root_confines_workers_without_user_namespace() {
    if !has_layers(STRICT_LAYERS) || !is_root() {
        return;
    }
    let bulkheads = bulkhead("x", WORKER, STRICT);
    let place = Setup { bulkheads: &bulkheads, without: "user_namespace", ..Setup::default() }.start();
    let told = only(&place, "x");
    assert_eq!(told.namespaces, ["pid", "mount", "network"], "{told:?}");
    assert_powerless(told.pid);
    let client = place.client();
    for name in ["read-neighbour", "mount", "signal-supervisor", "open-kernel-log", "write-core-pattern"] {
        let ended = place.attempt(&client, "x", name, &place.targets("x"));
        assert!(matches!(ended, Ended::Refused(..)), "{name}: {ended:?}");
    }
}

/// The test covers an unprivileged supervisor on a system without user namespaces.
#[test]
fn missing_user_namespace_fails_start_unless_best_effort() {
    if has_layers(STRICT_LAYERS) && is_root() {
        let missing = ["user_namespace", "pid_namespace", "mount_namespace", "network_namespace"];
        assert_error_or_told("strict", "user_namespace", &missing, Some(NOBODY));
    }
}

/// `BULKHEAD_WITHOUT` hides a layer from the supervisor in tests. All other layers must still apply.
#[test]
fn missing_landlock_leaves_other_layers_in_force() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let sandbox = "profile = \"strict\", best_effort = [\"identity\", \"landlock\"]";
    let bulkheads = bulkhead("x", WORKER, sandbox);
    let place = Setup { bulkheads: &bulkheads, without: "landlock", ..Setup::default() }.start();
    assert_powerless(place.worker("x"));
    assert_eq!(foreign_namespaces(place.worker("x")).len(), NAMESPACES.len());
    let client = place.client();
    for name in ["read-neighbour", "connect-by-tcp", "mount", "signal-supervisor"] {
        let ended = place.attempt(&client, "x", name, &place.targets("x"));
        assert!(matches!(ended, Ended::Refused(..)), "{name}: {ended:?}");
    }
}

/// A process can use `F_SETOWN` to make the kernel send SIGIO to another process when input arrives on a descriptor.
#[test]
fn worker_cannot_send_io_signals_to_another_worker() {
    let all = [("profile = \"none\"", &[][..]), (DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];
    for (sandbox, layers) in all {
        if !has_layers(layers) {
            continue;
        }
        let bulkheads = bulkhead("x", WORKER, sandbox) + &bulkhead("sibling", WORKER, sandbox);
        let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
        let targets = place.targets("sibling");
        place.attempt(&place.client(), "x", "kill-sibling-by-input", &targets);
        if sandbox.contains("none") {
            // Without confinement, the attempt succeeds.
            place.supervisor.wait_number("sibling", "restarts", 1);
            continue;
        }
        // A signal would have arrived before this answer.
        place.ask("sibling", "pid");
        assert_eq!(targets["sibling"], place.worker("sibling"), "{sandbox}");
        assert_eq!(place.supervisor.number("sibling", "restarts"), 0, "{sandbox}");
    }
}

// Users.

fn uids(pids: &[u32]) -> BTreeSet<u32> {
    let effective = |pid: &u32| status_field(*pid, "Uid").split(' ').nth(1)?.parse().ok();
    pids.iter().filter_map(effective).collect()
}

#[test]
fn each_worker_has_its_own_user_id() {
    if !is_root() || !has_layers(STRICT_LAYERS) {
        return;
    }
    for profile in ["default", "strict"] {
        let sandbox = format!("profile = \"{profile}\", user = \"auto\"");
        let bulkheads = bulkhead("x", &format!("{WORKER}\nprocesses = 3"), &sandbox)
            + &bulkhead("y", "exec = [\"/usr/bin/id\", \"-u\"]", &sandbox);
        let place = Setup { supervisor: WORKER_UIDS, bulkheads: &bulkheads, ..Setup::default() }.start();
        let mut pids = wait_for("all workers run", || {
            Some(place.supervisor.worker_pids("x")).filter(|pids| pids.len() == 3)
        });
        pids.push(place.worker("y"));
        let ids = uids(&pids);
        assert_eq!(ids.len(), 4, "{profile}: {ids:?}");
        assert!(ids.iter().all(|id| (1_879_048_192..=1_879_048_447).contains(id)), "{profile}: {ids:?}");
        for &pid in &pids {
            assert_powerless(pid);
            assert_eq!(status_field(pid, "Groups"), "", "{profile}");
            assert_eq!(status_field(pid, "Uid").split(' ').collect::<BTreeSet<_>>().len(), 1, "{profile}");
            assert_eq!(status_field(pid, "Gid").split(' ').collect::<BTreeSet<_>>().len(), 1, "{profile}");
            assert_ne!(status_field(pid, "Gid").split(' ').next(), Some("0"), "{profile}");
        }
        assert!(outcome(&place.client().job("y", "").send()) == "ok");
        // The file belongs to the supervisor's user, so the worker cannot change the file's mode, with or without
        // Landlock.
        let ended = place.attempt(&place.client(), "x", "chmod-neighbour", &place.targets("y"));
        assert!(matches!(ended, Ended::Refused(..)), "{profile}: {ended:?}");
    }
}

#[test]
fn worker_runs_as_the_named_user() {
    if !is_root() || !has_layers(DEFAULT_LAYERS) {
        return;
    }
    let bulkheads = bulkhead("x", WORKER, "profile = \"default\", user = \"nobody\"");
    let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
    assert_eq!(uids(&[place.worker("x")]), BTreeSet::from([NOBODY]));
    assert_powerless(place.worker("x"));
}

#[test]
fn nproc_limit_applies_to_unprivileged_worker_users() {
    if !is_root() || !has_layers(STRICT_LAYERS) {
        return;
    }
    for profile in ["default", "strict"] {
        let sandbox = format!("profile = \"{profile}\", user = \"auto\"");
        let bulkheads = bulkhead("x", &format!("{WORKER}\nrlimits = {{ nproc = 20 }}"), &sandbox);
        let place = Setup { supervisor: WORKER_UIDS, bulkheads: &bulkheads, ..Setup::default() }.start();
        let ended = place.attempt(&place.client(), "x", "make-many-processes", &json!({}));
        assert!(ended.is(Expected::Refused(&["EAGAIN"], "")), "{profile}: {ended:?}");
    }
}

/// A set-user-ID program owned by root must not give root privileges to a worker.
#[test]
fn set_user_id_program_grants_no_privileges() {
    if !is_root() || !has_layers(STRICT_LAYERS) {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let sandbox = |profile: &str| format!("{profile}, read = [\"PLACE/read\"]");
    let bulkheads = bulkhead("none", "exec = [\"HOSTILE\", \"once\"]", "profile = \"none\"")
        + &bulkhead("default", "exec = [\"HOSTILE\", \"once\"]", &sandbox(DEFAULT))
        + &bulkhead("strict", "exec = [\"HOSTILE\", \"once\"]", &sandbox(STRICT));
    let place = Setup { bulkheads: &bulkheads, user: Some(NOBODY), ..Setup::default() }.start();
    let program = place.path().join("read/become-root");
    std::fs::copy(place.path().join("bin/hostile"), &program).unwrap();
    std::os::unix::fs::chown(&program, Some(0), Some(0)).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let targets = json!({ "set_user_id": program.to_str().unwrap() });
    let client = place.client();
    let attempt = |name: &str| place.attempt(&client, name, "run-set-user-id-program", &targets);
    match attempt("none") {
        Ended::Succeeded(_) => {}
        other => not_run!("set-user-ID programs do not work on this machine: {other:?}"),
    }
    for name in ["default", "strict"] {
        let ended = attempt(name);
        assert!(matches!(ended, Ended::Refused(..)), "{name}: {ended:?}");
    }
}

// Limits.

/// Parses `/proc/PID/limits`. Returns the soft and hard limits by name.
fn limits(text: &str) -> BTreeMap<String, (String, String)> {
    let one = |line: &str| {
        let (name, rest) = line.split_at_checked(26)?;
        let mut values = rest.split_whitespace().map(str::to_owned);
        Some((name.trim().to_owned(), (values.next()?, values.next()?)))
    };
    text.lines().filter_map(one).collect()
}

const RLIMITS: &str = "rlimits = { as = \"3GiB\", cpu = \"100s\", nofile = 77, fsize = \"5MiB\", \
    nproc = 300, stack = \"4MiB\", memlock = 0, core = 0 }\n";

const EXPECTED: [(&str, &str, &str); 8] = [
    ("Max address space", "3221225472", "3221225472"),
    ("Max cpu time", "100", "101"),
    ("Max open files", "77", "77"),
    ("Max file size", "5242880", "5242880"),
    ("Max processes", "300", "300"),
    ("Max stack size", "4194304", "4194304"),
    ("Max locked memory", "0", "0"),
    ("Max core file size", "1", "1"),
];

fn compile_library(folder: &Path) -> PathBuf {
    let source = "#include <bulkhead.h>\nBULKHEAD_LIBRARY\n\
        int bulkhead_handle(const bulkhead_job *job, const bulkhead_host *host) { return 0; }\n";
    let (input, output) = (folder.join("library.c"), folder.join("library.so"));
    std::fs::write(&input, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/include");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-I"]).arg(include).arg("-o").arg(&output).arg(&input);
    assert!(cc.status().expect("a C compiler named `cc`").success());
    output
}

#[test]
fn rlimits_apply_to_commands_libraries_and_programs() {
    let folder = tempfile::tempdir().unwrap();
    let library = compile_library(folder.path());
    let all = [("profile = \"none\"", &[][..]), (DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];
    for (sandbox, layers) in all {
        if !has_layers(layers) {
            continue;
        }
        let bulkheads = bulkhead("command", &format!("{WORKER}\n{RLIMITS}"), sandbox)
            + &bulkhead("library", &format!("library = {library:?}\n{RLIMITS}"), sandbox)
            + &bulkhead("exec", &format!("exec = [\"/bin/cat\", \"/proc/self/limits\"]\n{RLIMITS}"), sandbox);
        let place = Setup { bulkheads: &bulkheads, ..Setup::default() }.start();
        let of = |name: &str| {
            let path = format!("/proc/{}/limits", place.worker(name));
            std::fs::read_to_string(path).unwrap()
        };
        let texts = [("command", of("command")), ("library", of("library")), ("exec", place.ask("exec", ""))];
        for (name, text) in texts {
            let limits = limits(&text);
            for (limit, soft, hard) in EXPECTED {
                let expected = (soft.to_owned(), hard.to_owned());
                assert_eq!(limits.get(limit), Some(&expected), "{sandbox}, {name}: {limit}");
            }
        }
    }
}

#[test]
fn exceeding_the_memory_rlimit_crashes_the_worker() {
    for (sandbox, layers) in [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)] {
        if !has_layers(layers) {
            continue;
        }
        let runs = format!("{WORKER}\nrlimits = {{ as = \"200MiB\" }}");
        let place = Setup { bulkheads: &bulkhead("x", &runs, sandbox), ..Setup::default() }.start();
        let client = place.client();
        let send = |operation: &str| outcome(&client.job("x", "{}").operation(operation).send());
        assert_eq!(send("touch-much-memory"), "crashed/signal", "{sandbox}");
        assert_eq!(send("pid"), "ok", "{sandbox}");
    }
}

#[test]
fn exceeding_the_cgroup_memory_limit_is_reported_as_oom() {
    if !has_layers(&["cgroup leaf", "cgroup memory"]) {
        return;
    }
    let runs = format!("{WORKER}\ncgroup = {{ memory = \"100MiB\" }}");
    let place = Setup { bulkheads: &bulkhead("x", &runs, DEFAULT), ..Setup::default() }.start();
    let client = place.client();
    let send = |operation: &str| outcome(&client.job("x", "{}").operation(operation).send());
    assert_eq!(send("touch-much-memory"), "crashed/oom");
    assert_eq!(send("pid"), "ok");
}

// Without privileges.

#[test]
fn unprivileged_supervisor_confines_workers() {
    if !is_root() || !has_layers(STRICT_LAYERS) {
        return;
    }
    let bulkheads = bulkhead("default", WORKER, DEFAULT)
        + &bulkhead("strict", &format!("{WORKER}\nprocesses = 2"), STRICT)
        + &bulkhead("program", "exec = [\"/usr/bin/id\", \"-u\"]", STRICT);
    let mut place = Setup { bulkheads: &bulkheads, user: Some(NOBODY), ..Setup::default() }.start();
    for name in ["default", "strict"] {
        assert_eq!(uids(&[place.worker(name)]), BTreeSet::from([NOBODY]));
        assert_powerless_but_for_bounds(place.worker(name));
        let before = descriptors(place.supervisor.keeper());
        let pid = place.worker(name);
        kill_pid(pid, Signal::SIGKILL);
        wait_for("the worker is replaced", || {
            (!place.supervisor.worker_pids(name).contains(&pid)).then_some(())
        });
        assert!(place.ask(name, "status").contains("NoNewPrivs:\t1"));
        wait_for("the keeper has no more descriptors than before", || {
            (descriptors(place.supervisor.keeper()) <= before).then_some(())
        });
    }
    place.ask("program", "");
    let backtraces = |id: &str| {
        wait_for("the backtraces", || {
            let report = place.supervisor.crash_report(id);
            report.get("native").is_some().then_some(report)
        })
    };
    let has_frame = |thread: &serde_json::Value, function: &str| {
        let frames = thread["frames"].as_array().into_iter().flatten();
        frames.filter_map(|frame| frame["function"].as_str()).any(|name| name.contains(function))
    };
    for name in ["default", "strict"] {
        let client = place.client();
        // A bulkhead produces at most one report per second, and on a busy machine the threads might not stop in time.
        wait_for("the report has stacks", || {
            let job = client.job(name, "{}").operation("hang").deadline(Duration::from_millis(200));
            let id = job.send().unwrap_err().outcome()?.report.clone()?;
            let report = backtraces(&id);
            let threads = report["native"]["threads"].as_array()?;
            threads.iter().any(|thread| has_frame(thread, "hostile::tell")).then_some(())
        });
        let error = client.job(name, "{}").operation("crash").send().unwrap_err();
        let report = backtraces(&error.outcome().and_then(|outcome| outcome.report.clone()).unwrap());
        assert_eq!(report["signal"], "SIGABRT");
        assert!(has_frame(&report["native"]["threads"][0], "hostile::tell"), "{:#}", report["native"]);
    }
    place.supervisor.signal(Signal::SIGTERM);
    assert_eq!(place.supervisor.wait().code(), Some(0));
}

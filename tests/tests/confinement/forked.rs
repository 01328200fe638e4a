//! Sandboxed workers that are forked from a template (`start.mode = "fork"`). Covers attempts by a worker against
//! sibling workers and the template, and the attempts in the table for all workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bulkhead_client::blocking::Client;
use bulkhead_tests::attempts::{ATTEMPTS, Attempt, BETWEEN_FORKED, Expected, KERNELS_OWN, Setting};
use bulkhead_tests::confined::{
    DEFAULT_LAYERS, Ended, Place, STRICT_LAYERS, Setup, has_layers, is_root, status_field,
};
use bulkhead_tests::{is_alive, kill_pid, overrun_blocking, refuses_descriptors, wait_for};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const NONE: &str = "profile = \"none\"";
const DEFAULT: &str = "profile = \"default\"";
const STRICT: &str = "profile = \"strict\"";

fn bulkhead(name: &str, sandbox: &str, more: &str) -> String {
    format!(
        "[bulkhead.{name}]\ncommand = [\"HOSTILE\"]\ncwd = \"work\"\nmax_queue = 10\ndeadline = \"60s\"\n\
         start.mode = \"fork\"\nrestart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000 }}\n\
         sandbox = {{ {sandbox} }}\n{more}\n"
    )
}

fn start(bulkheads: &str) -> Place {
    Setup { bulkheads, ..Setup::default() }.start()
}

/// Returns the profiles that this machine supports.
fn profiles() -> impl Iterator<Item = &'static str> {
    let all = [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)];
    all.into_iter().filter(|(_, layers)| is_root() && has_layers(layers)).map(|(profile, _)| profile)
}

fn ask(client: &Client, bulkhead: &str, operation: &str) -> String {
    let reply =
        client.job(bulkhead, "").operation(operation).deadline(Duration::from_secs(60)).send().unwrap();
    String::from_utf8(reply.payload().to_vec()).unwrap()
}

fn parent(pid: u32) -> u32 {
    status_field(pid, "PPid").parse().unwrap()
}

/// Returns the PID that a process has in its innermost PID namespace.
fn inner(pid: u32) -> u32 {
    status_field(pid, "NSpid").split(' ').next_back().unwrap().parse().unwrap()
}

/// Returns the PID of a worker's template. The template and the worker have the same parent.
fn template_of(worker: u32, workers: &[u32]) -> u32 {
    let beside = bulkhead_tests::children(parent(worker));
    let is_template = |pid: &u32| {
        !workers.contains(pid)
            && std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with("hostile"))
    };
    beside.into_iter().find(is_template).unwrap()
}

/// Waits for two ready workers. Returns their PIDs in the test's namespace.
fn pair(place: &Place) -> [u32; 2] {
    wait_for("two workers are ready", || {
        let state = place.supervisor.state("pair");
        let ready = state.workers.iter().filter(|worker| &*worker.state == "ready");
        let pids: Vec<u32> = ready.filter_map(|worker| worker.pid).collect();
        <[u32; 2]>::try_from(pids).ok()
    })
}

/// Returns the targets of the attempts, which are two workers, their template, and the temporary files of the workers.
fn targets(place: &Place, client: &Client) -> Value {
    let workers = pair(place);
    let template = template_of(workers[0], &workers);
    let mut files = BTreeMap::new();
    wait_for("each worker has left a file", || {
        let leave =
            || client.job("pair", "20").operation("leave-a-file").deadline(Duration::from_secs(30)).send();
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(leave);
            (leave(), one.join().unwrap())
        });
        let path = |reply: bulkhead_client::Reply| String::from_utf8(reply.payload().to_vec()).unwrap();
        files.extend([one, other].into_iter().flatten().map(|reply| (path(reply), ())));
        // Without a sandbox, the workers share a folder.
        (files.len() == 2 || files.keys().any(|path| path.ends_with("/outside/left"))).then_some(())
    });
    let files: Vec<&String> = files.keys().collect();
    json!({ "sibling": workers.map(inner), "template": inner(template), "temporary file of sibling": files })
}

fn try_between(profile: &str, expected: impl Fn(&Attempt) -> Expected) {
    // Without a sandbox, all workers share one temporary folder.
    let folder = if profile == NONE { "env = { TMPDIR = \"PLACE/outside\" }" } else { "" };
    let place = start(&bulkhead("pair", profile, &format!("processes = 2\n{folder}")));
    let client = place.client();
    let mut wrong = Vec::new();
    for attempt in BETWEEN_FORKED {
        let ended = place.attempt(&client, "pair", attempt.name, &targets(&place, &client));
        if !ended.is(expected(attempt)) {
            wrong.push(format!("{}: {ended:?}, expected {:?}", attempt.name, expected(attempt)));
        }
    }
    assert!(
        wrong.is_empty(),
        "{profile}: {} attempts have an unexpected result:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// Checks that the attempts succeed without confinement.
#[test]
fn forked_workers_without_sandbox_can_reach_each_other() {
    if is_root() {
        try_between(NONE, |attempt| attempt.none);
    }
}

#[test]
fn default_profile_isolates_forked_workers_from_each_other() {
    if profiles().any(|profile| profile == DEFAULT) {
        try_between(DEFAULT, |attempt| attempt.default);
        // Without separate user IDs, other layers have to keep the workers apart.
        try_between("profile = \"default\", user = \"shared\"", |attempt| attempt.default);
    }
}

#[test]
fn strict_profile_isolates_forked_workers_from_each_other() {
    if profiles().any(|profile| profile == STRICT) {
        try_between(STRICT, |attempt| attempt.strict);
        try_between("profile = \"strict\", user = \"shared\"", |attempt| attempt.strict);
    }
}

/// Makes forked workers run every attempt in the table.
fn try_all(profile: &str, expected: impl Fn(&Attempt) -> Expected) {
    let given = "read = [\"PLACE/read\"], write = [\"PLACE/write\"], tmp = \"1MiB\"";
    let sandbox = format!("{profile}, user = \"shared\", {given}");
    let limits = "recycle = { jobs = 1 }\nrlimits = { nofile = 64, fsize = \"1MiB\", as = \"1GiB\" }";
    let bulkheads = bulkhead("plain", &sandbox, "recycle = { jobs = 1 }")
        + &bulkhead("limited", &sandbox, limits)
        + &bulkhead("sibling", &sandbox, "");
    let place = start(&bulkheads);
    let client = place.client();
    let mut wrong = Vec::new();
    let all = ATTEMPTS.iter().flat_map(|(_, attempts)| *attempts);
    for attempt in all.filter(|attempt| refuses_descriptors() || !KERNELS_OWN.contains(&attempt.name)) {
        let bulkhead = match attempt.setting {
            Setting::Plain => "plain",
            Setting::Limited => "limited",
        };
        let ended = place.attempt(&client, bulkhead, attempt.name, &place.targets("sibling"));
        if !ended.is(expected(attempt)) {
            wrong.push(format!("{}: {ended:?}, expected {:?}", attempt.name, expected(attempt)));
        }
    }
    assert!(
        wrong.is_empty(),
        "{profile}: {} attempts have an unexpected result:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn default_profile_stops_attempts_by_forked_workers() {
    if profiles().any(|profile| profile == DEFAULT) {
        try_all(DEFAULT, |attempt| attempt.default);
    }
}

#[test]
fn strict_profile_stops_attempts_by_forked_workers() {
    if profiles().any(|profile| profile == STRICT) {
        // All workers of a template share `/tmp`. Landlock lets each worker access only one folder in `/tmp`.
        let of_all = Expected::Refused(&["EACCES"], "Landlock");
        try_all(
            STRICT,
            |attempt| if attempt.name == "list-temporary-files" { of_all } else { attempt.strict },
        );
    }
}

#[test]
fn forked_workers_inherit_confinement_of_their_template() {
    for profile in profiles() {
        let place = start(&bulkhead("pair", profile, "processes = 2"));
        let workers = pair(&place);
        let template = template_of(workers[0], &workers);
        assert_eq!(parent(workers[0]), parent(workers[1]));
        assert_eq!(parent(parent(template)), place.supervisor.keeper());
        let state = place.supervisor.state("pair");
        let mut sessions = BTreeSet::new();
        for worker in &state.workers {
            let pid = worker.pid.unwrap();
            let confinement = worker.confinement.clone().unwrap();
            assert!(confinement.inherited && confinement.no_new_privs, "{confinement:?}");
            assert_eq!(confinement.capabilities, "0000000000000000");
            let told = confinement.uid.unwrap().to_string();
            for process in [pid, template] {
                assert_eq!(status_field(process, "Uid"), [told.as_str(); 4].join(" "));
                assert_eq!(status_field(process, "NoNewPrivs"), "1");
            }
            // A worker inherits the filter of the template and adds a second filter.
            let filters = |pid| status_field(pid, "Seccomp_filters").parse::<u32>().unwrap();
            assert_eq!(filters(pid), filters(template) + 1, "{profile}");
            sessions.insert(nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid as i32))).unwrap());
        }
        assert_eq!(sessions.len(), 2, "each worker leads a session");
    }
}

#[test]
fn forked_worker_has_private_temporary_folder() {
    for profile in profiles() {
        let place =
            start(&bulkhead("fresh", &format!("{profile}, tmp = \"1MiB\""), "recycle = { jobs = 1 }"));
        let client = place.client();
        let mut paths = BTreeSet::new();
        for _ in 0..8 {
            let environment: Value = serde_json::from_str(&ask(&client, "fresh", "environment")).unwrap();
            let folder = environment["TMPDIR"].as_str().unwrap().to_owned();
            assert_eq!(environment["HOME"], environment["TMPDIR"]);
            assert!(folder.rsplit('/').next().unwrap().len() > 32, "{folder}");
            paths.insert(folder);
            ask(&client, "fresh", "leave-a-file");
        }
        assert_eq!(paths.len(), 8);
        let worker = place.worker("fresh");
        let within = |path: &String| format!("/proc/{worker}/root{path}");
        wait_for("the temporary folders are removed", || {
            paths.iter().all(|path| !std::path::Path::new(&within(path)).exists()).then_some(())
        });
    }
}

#[test]
fn exceeding_sandbox_tmp_kills_only_one_forked_worker() {
    if !profiles().any(|profile| profile == DEFAULT) {
        return;
    }
    let place = start(&bulkhead("pair", &format!("{DEFAULT}, tmp = \"1MiB\""), "processes = 2"));
    let client = place.client();
    let before = pair(&place);
    let template = template_of(before[0], &before);
    let ended = place.attempt(&client, "pair", "fill-temporary-folder", &json!({}));
    assert!(matches!(&ended, Ended::Violation(text) if text.contains("tmp")), "{ended:?}");
    let after = pair(&place);
    assert_eq!(before.iter().filter(|pid| after.contains(pid)).count(), 1, "{before:?} {after:?}");
    assert!(is_alive(template));
}

#[test]
fn violation_kills_only_one_forked_worker() {
    for profile in profiles() {
        let place = start(&bulkhead("pair", profile, "processes = 2"));
        let client = place.client();
        let before = pair(&place);
        for attempt in ["load-bpf", "load-bpf-in-a-thread"] {
            let ended = place.attempt(&client, "pair", attempt, &json!({}));
            assert!(matches!(&ended, Ended::Violation(text) if text.contains("bpf")), "{profile}: {ended:?}");
        }
        // A violation in a child process kills only the child.
        let workers = pair(&place);
        let ended = place.attempt(&client, "pair", "load-bpf-in-a-child", &json!({}));
        assert!(matches!(&ended, Ended::Refused(how, _) if how == "SIGKILL"), "{profile}: {ended:?}");
        assert_eq!(pair(&place), workers);
        let template = template_of(workers[0], &workers);
        assert!(parent(template) == parent(workers[0]) && before != workers);
    }
}

/// The death of the template does not affect running workers, which keep their user ID.
#[test]
fn forked_workers_outlive_their_template() {
    for profile in profiles() {
        let place = start(&bulkhead("pair", profile, "processes = 2"));
        let before = pair(&place);
        let (template, first) = (template_of(before[0], &before), parent(before[0]));
        let user = status_field(template, "Uid");
        kill_pid(template, Signal::SIGKILL);
        wait_for("the template is dead", || (!is_alive(template)).then_some(()));
        assert_eq!(pair(&place), before);
        kill_pid(before[0], Signal::SIGKILL);
        let after = wait_for("a worker is replaced", || Some(pair(&place)).filter(|now| *now != before));
        let other = *after.iter().find(|pid| **pid != before[1]).unwrap();
        assert_ne!(parent(other), first);
        assert_ne!(
            status_field(other, "Uid"),
            user,
            "a user id that is in use was given to another template"
        );
        assert_eq!(status_field(before[1], "Uid"), user);
        kill_pid(before[1], Signal::SIGKILL);
        wait_for("the first process of the old pid namespace has exited", || {
            (!is_alive(first)).then_some(())
        });
        let after = wait_for("the other worker is replaced", || {
            Some(pair(&place)).filter(|now| !now.contains(&before[1]))
        });
        assert!(after.iter().all(|pid| parent(*pid) == parent(other)));
    }
}

/// Each worker has a separate cgroup. The template's cgroup also contains the first process of the PID namespace.
#[test]
fn each_forked_worker_has_its_own_cgroup() {
    if !has_layers(&["cgroup leaf"]) {
        return;
    }
    let group = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
        text.lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned)).unwrap()
    };
    for profile in [NONE].into_iter().filter(|_| is_root()).chain(profiles()) {
        let place = start(&bulkhead("pair", profile, "processes = 2\ncgroup = {}"));
        let before = pair(&place);
        let template = template_of(before[0], &before);
        let groups = BTreeSet::from([group(template), group(before[0]), group(before[1])]);
        assert_eq!(groups.len(), 3, "{profile}: {groups:?}");
        let state = place.supervisor.state("pair");
        assert!(state.workers.iter().all(|worker| worker.confinement.as_ref().unwrap().cgroup));
        place.supervisor.configure(
            "",
            &bulkhead("pair", profile, "processes = 2\ncgroup = {}\nenv = { A = \"1\" }")
                .replace("HOSTILE", &place.path().join("bin/hostile").to_string_lossy()),
        );
        place.supervisor.signal(Signal::SIGHUP);
        let is_new = |now: &[u32; 2]| now.iter().all(|pid| !before.contains(pid));
        let after = wait_for("both workers are replaced", || Some(pair(&place)).filter(is_new));
        let other = template_of(after[0], &after);
        kill_pid(other, Signal::SIGKILL);
        wait_for("the new template is dead", || (!is_alive(other)).then_some(()));
        assert_eq!(pair(&place), after);
        assert_eq!(
            place
                .supervisor
                .events("worker_exited")
                .iter()
                // The supervisor kills a replaced worker that takes too long to exit.
                .filter(|event| event["signal"] == "SIGKILL" && event["killed"].is_null())
                .count(),
            0
        );
    }
}

/// When the first process of a PID namespace dies, the kernel kills all processes in the namespace. Other bulkheads
/// are not affected.
#[test]
fn death_of_first_process_restarts_whole_pid_namespace() {
    for profile in profiles() {
        let place = start(&(bulkhead("pair", profile, "processes = 2") + &bulkhead("other", profile, "")));
        let client = place.client();
        let (before, other) = (pair(&place), place.worker("other"));
        let template = template_of(before[0], &before);
        kill_pid(parent(before[0]), Signal::SIGKILL);
        wait_for("the template and its workers have exited", || {
            (!before.iter().chain([&template]).any(|&pid| is_alive(pid))).then_some(())
        });
        let is_new = |now: &[u32; 2]| now.iter().all(|pid| !before.contains(pid));
        wait_for("both workers are replaced", || Some(pair(&place)).filter(is_new));
        assert_eq!(place.worker("other"), other);
        ask(&client, "pair", "pid");
    }
}

#[test]
fn descendants_of_forked_workers_are_reaped() {
    if !profiles().any(|profile| profile == DEFAULT) {
        return;
    }
    let place = start(&(bulkhead("pair", DEFAULT, "processes = 2\nrecycle = { jobs = 1 }")));
    let client = place.client();
    for _ in 0..10 {
        place.attempt(&client, "pair", "leave-processes-behind", &json!({}));
    }
    let workers = pair(&place);
    let nest = parent(workers[0]);
    wait_for("only the template and its workers remain", || {
        let workers = pair(&place);
        let beside = bulkhead_tests::children(nest);
        (beside.len() == 3 && workers.iter().all(|worker| beside.contains(worker))).then_some(())
    });
    assert_eq!(place.supervisor.events("worker_not_started").len(), 0);
}

/// The leftover process forks and exits faster than the keeper can signal it, so the keeper must first stop the
/// whole PID namespace.
#[test]
fn quickly_forking_leftover_process_is_killed() {
    if !profiles().any(|profile| profile == DEFAULT) {
        return;
    }
    let place = start(&bulkhead("pair", DEFAULT, "processes = 2"));
    let client = place.client();
    let before = pair(&place);
    let nest = parent(before[0]);
    let from: u32 = ask(&client, "pair", "leave-a-runner").parse().unwrap();
    let [from, sibling] = if inner(before[0]) == from { before } else { [before[1], before[0]] };
    kill_pid(from, Signal::SIGKILL);
    let after = wait_for("a worker is replaced", || Some(pair(&place)).filter(|now| *now != before));
    // The template and two workers remain.
    wait_for("the leftover process is killed", || (bulkhead_tests::children(nest).len() == 3).then_some(()));
    assert!(after.contains(&sibling) && is_alive(sibling));
    ask(&client, "pair", "pid");
}

/// The test stops the template with SIGSTOP, so the template does not answer fork orders.
#[test]
fn hanging_template_does_not_delay_other_bulkheads() {
    // A template has ten seconds to answer. On a busy machine, the jobs can take longer.
    if profiles().any(|profile| profile == DEFAULT) {
        assert!((0..5).any(|_| serves_while_template_hangs()), "the jobs wait for the template");
    }
}

/// Stops one bulkhead's template and kills a forked worker. Returns true if another bulkhead serves its jobs before the
/// keeper gives up on forking a new worker.
fn serves_while_template_hangs() -> bool {
    let place = start(
        &(bulkhead("pair", DEFAULT, "processes = 2") + &bulkhead("other", DEFAULT, "recycle = { jobs = 1 }")),
    );
    let client = place.client();
    let before = pair(&place);
    let template = template_of(before[0], &before);
    kill_pid(template, Signal::SIGSTOP);
    kill_pid(before[0], Signal::SIGKILL);
    wait_for("the killed worker has exited", || (!is_alive(before[0])).then_some(()));
    let mut seen = BTreeSet::new();
    wait_for("three workers have run jobs", || {
        place.attempt(&client, "other", "leave-processes-behind", &json!({}));
        seen.insert(place.worker("other"));
        (seen.len() >= 3).then_some(())
    });
    let is_pending = place.supervisor.events("worker_not_started").is_empty();
    place.supervisor.wait_events("worker_not_started", 1);
    assert_ne!(pair(&place), before);
    is_pending
}

#[test]
fn deadline_kills_hanging_forked_worker() {
    for profile in profiles() {
        let place = start(&bulkhead("pair", profile, "processes = 2\ngrace = \"10ms\"").replace("60s", "3s"));
        let client = place.client();
        let before = pair(&place);
        let nest = parent(before[0]);
        let late = overrun_blocking(&client.job("pair", "").operation("hang"));
        assert_eq!(bulkhead_tests::outcome(&late), "deadline_exceeded/running");
        let after = wait_for("a worker is replaced", || Some(pair(&place)).filter(|now| *now != before));
        assert_eq!(before.iter().filter(|pid| after.contains(pid)).count(), 1);
        assert_eq!(after.map(parent), [nest; 2]);
    }
}

#[test]
fn sandboxed_fork_requires_signal_scoping() {
    if !is_root() {
        return;
    }
    for layer in ["landlock_scopes", "landlock", "pid_namespace"] {
        let best = "best_effort = [\"landlock\", \"landlock_scopes\", \"pid_namespace\"]";
        let bulkheads = bulkhead("b", &format!("{DEFAULT}, {best}"), "");
        let place = Setup { bulkheads: &bulkheads, without: layer, ..Setup::default() }.start();
        let why = wait_for("the failed start is reported", || {
            place.supervisor.events("worker_not_started").first().map(ToString::to_string)
        });
        assert!(why.contains("start.mode") && why.contains(layer), "{layer}: {why}");
        assert!(place.supervisor.worker_pids("b").is_empty());
    }
}

#[test]
fn template_and_forked_workers_die_with_the_supervisor() {
    for profile in profiles() {
        let mut place = start(&bulkhead("pair", profile, "processes = 2"));
        let before = pair(&place);
        let template = template_of(before[0], &before);
        let keeper = place.supervisor.keeper();
        kill_pid(keeper, Signal::SIGSTOP);
        kill_pid(keeper, Signal::SIGKILL);
        place.supervisor.signal(Signal::SIGKILL);
        let _ = place.supervisor.wait();
        wait_for("the template and its workers have exited", || {
            (!before.iter().chain([&template]).any(|&pid| is_alive(pid))).then_some(())
        });
    }
}

/// The test covers unprivileged supervisors. The workers run either as the supervisor's user or, in a user namespace,
/// with separate user IDs.
#[test]
fn unprivileged_supervisor_forks_sandboxed_workers() {
    use bulkhead_tests::confined::NOBODY;
    use bulkhead_tests::subuid::User;
    let users = [(Some(NOBODY), None), (None, User::with_ids())];
    for profile in profiles() {
        let bulkheads = bulkhead("pair", profile, "processes = 2");
        for (user, user_with_ids) in users.iter().filter(|(user, ids)| user.is_some() || ids.is_some()) {
            let (user, user_with_ids) = (*user, *user_with_ids);
            let place = Setup { bulkheads: &bulkheads, user, user_with_ids, ..Setup::default() }.start();
            let client = place.client();
            let before = pair(&place);
            let template = template_of(before[0], &before);
            for attempt in
                ["signal-sibling", "open-memory-of-sibling", "become-child-of-keeper", "signal-template"]
            {
                let ended = place.attempt(&client, "pair", attempt, &targets(&place, &client));
                assert!(matches!(ended, Ended::Refused(..)), "{profile} {user:?} {attempt}: {ended:?}");
            }
            place.attempt(&client, "pair", "leave-processes-behind", &json!({}));
            assert_eq!(
                bulkhead_tests::outcome(&client.job("pair", "").operation("crash").send()),
                "crashed/signal"
            );
            let nest = parent(template);
            wait_for("only the template and its workers remain", || {
                pair(&place);
                (bulkhead_tests::children(nest).len() == 3).then_some(())
            });
        }
    }
}

/// The test covers templates that fork without an order, send false reports of forks, or flood the keeper with
/// messages.
#[test]
fn hostile_template_does_not_affect_other_bulkheads() {
    let hows = [
        "forks-unasked",
        "names-a-grandchild",
        "invents-a-worker",
        "has-twins",
        "lies",
        "talks",
        "floods",
        "shouts",
    ];
    let play = |profile: &str, how: &str| {
        let bad = bulkhead("bad", profile, "").replace(
            "command = [\"HOSTILE\"]",
            &format!("command = [\"HOSTILE\", \"template\", \"{how}\"]\nprocesses = 2"),
        );
        let bad = bad.replace(
            "start.mode = \"fork\"",
            "start = { mode = \"fork\", ready = \"2s\", handshake = \"2s\" }",
        );
        let place = Setup {
            bulkheads: &(bad + &bulkhead("other", profile, "recycle = { jobs = 1 }")),
            ..Setup::default()
        }
        .launch();
        let client =
            wait_for("the jobs socket accepts clients", || Client::connect(place.supervisor.socket()).ok());
        wait_for("the other bulkhead serves jobs", || client.job("other", "").operation("pid").send().ok());
        let keeper = place.supervisor.keeper();
        let failed = |how: &str| !place.supervisor.events(how).is_empty();
        wait_for(&format!("{profile} {how}: the failure is reported"), || {
            ask(&client, "other", "pid");
            (failed("worker_not_started") || failed("worker_exited")).then_some(())
        });
        // After the bulkhead is removed from the configuration, no process of the bulkhead remains.
        place.supervisor.configure(
            "",
            &bulkhead("other", profile, "")
                .replace("HOSTILE", &place.path().join("bin/hostile").to_string_lossy()),
        );
        place.supervisor.signal(Signal::SIGHUP);
        wait_for(&format!("{profile} {how}: all processes of the bulkhead have exited"), || {
            let marker = format!("template\0{how}");
            (bulkhead_tests::processes_with(&marker).iter().all(|pid| !below(&place, *pid))).then_some(())
        });
        ask(&client, "other", "pid");
        assert_eq!(place.supervisor.keeper(), keeper, "{profile} {how}");
    };
    for profile in profiles() {
        std::thread::scope(|scope| {
            let plays = hows.map(|how| scope.spawn(move || play(profile, how)));
            plays.into_iter().for_each(|played| played.join().unwrap());
        });
    }
}

/// Maximum number of replaced workers of a bulkhead that can be exiting at the same time.
const EXITING_MAX: usize = 16;

/// Each job gets a fresh process, and spares are kept ready. The number of processes, including exiting ones, stays
/// bounded, and dead workers leave no open descriptors. The `BULKHEAD_FORKS` environment variable sets the number of
/// jobs.
#[test]
fn many_forks_leak_no_processes_or_descriptors() {
    const SLOTS: usize = 2;
    const SPARES: usize = 2;
    let forks = std::env::var("BULKHEAD_FORKS").map_or(300, |forks| forks.parse().unwrap());
    for profile in profiles() {
        let keys = format!("processes = {SLOTS}\nstart.spares = {SPARES}\nrecycle = {{ jobs = 1 }}");
        let place = start(&bulkhead("fresh", profile, &keys));
        let client = place.client();
        let first: u32 = wait_for("a worker serves", || {
            let workers = place.supervisor.state("fresh").workers;
            workers.iter().find(|worker| &*worker.state == "ready").and_then(|worker| worker.pid).map(parent)
        });
        let serve = |count: usize| {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let watched = scope.spawn(|| {
                    let (mut most, mut before) = (0, BTreeSet::new());
                    while !is_over.load(Ordering::Relaxed) {
                        let path = format!("/proc/{first}/task/{first}/children");
                        let children = std::fs::read_to_string(path).unwrap_or_default();
                        let now: BTreeSet<String> = children.split_whitespace().map(str::to_owned).collect();
                        // Counts processes that are in two consecutive lists, because all of these existed at the same
                        // time.
                        most = most.max(now.intersection(&before).count());
                        before = now;
                    }
                    most
                });
                let served: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| (0..count / 4).for_each(|_| drop(ask(&client, "fresh", "pid")))))
                    .collect();
                let ended: Vec<_> = served.into_iter().map(|served| served.join()).collect();
                // Ends the other thread even if a job has failed. Otherwise, the scope would wait for it forever.
                is_over.store(true, Ordering::Relaxed);
                let most = watched.join().unwrap();
                ended.into_iter().for_each(|ended| ended.unwrap());
                // Counts the template, slots, spares, and workers that have finished their jobs and are exiting.
                assert!(most <= 1 + SLOTS + SPARES + EXITING_MAX, "{profile}: {most} processes at once");
            });
        };
        let processes = [place.supervisor.pid(), place.supervisor.keeper(), first];
        serve(40);
        wait_for("all slots and spares have workers", || {
            let workers = place.supervisor.state("fresh").workers;
            let ready = workers.iter().filter(|worker| &*worker.state == "ready").count();
            (ready == SLOTS + SPARES).then_some(())
        });
        let before = processes.map(bulkhead_tests::descriptors);
        serve(forks);
        // The supervisor closes the pipes of dead workers only after it has read the output to the end.
        wait_for(&format!("{profile}: as many descriptors as before, {before:?}"), || {
            let after = processes.map(bulkhead_tests::descriptors);
            before.iter().zip(after).all(|(before, after)| after <= before + 8).then_some(())
        });
    }
}

/// The supervisor must not wait forever for a dead worker's output when another process keeps the pipes open.
#[test]
fn template_that_keeps_pipes_open_leaks_no_descriptors() {
    for profile in profiles() {
        let bad = bulkhead("bad", profile, "").replace(
            "command = [\"HOSTILE\"]",
            "command = [\"HOSTILE\", \"template\", \"keeps-descriptors\"]",
        );
        let place = Setup { bulkheads: &bad, ..Setup::default() }.launch();
        let after = |generations: u64| {
            wait_for(&format!("{profile}: {generations} workers have ended"), || {
                place.supervisor.try_get("/v1/events?follow=false")?;
                let ended = place.supervisor.events("worker_exited");
                (ended.last()?["generation"].as_u64()? >= generations).then_some(())
            });
            bulkhead_tests::descriptors(place.supervisor.pid())
        };
        let few = after(100);
        after(400);
        // The supervisor closes the descriptors of the last workers a moment later.
        wait_for(&format!("{profile}: fewer than {few} + 100 descriptors"), || {
            (bulkhead_tests::descriptors(place.supervisor.pid()) < few + 100).then_some(())
        });
    }
}

/// Returns true if the process is a descendant of the supervisor.
fn below(place: &Place, pid: u32) -> bool {
    let mut here = pid;
    while here > 1 {
        if here == place.supervisor.pid() {
            return true;
        }
        here = status_field(here, "PPid").parse().unwrap_or(0);
    }
    false
}

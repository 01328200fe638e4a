//! Confined workers leave no processes, descriptors, mounts, namespaces, cgroups or files behind.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bulkhead_tests::confined::{
    DEFAULT_LAYERS, Ended, NOBODY, Place, STRICT_LAYERS, Setup, has_layers, is_root, namespaces,
};
use bulkhead_tests::{children, descriptors, heavy, is_alive, kill_pid, outcome, processes_with, wait_for};
use nix::sys::signal::Signal;
use serde_json::json;

/// Number of workers to start and kill.
const STARTS: usize = 300;

/// Time limit for starting and killing all `STARTS` workers.
const PATIENCE: Duration = Duration::from_secs(300);

const STRICT: &str = "profile = \"strict\", best_effort = [\"identity\"]";
const DEFAULT: &str = "profile = \"default\"";

fn bulkhead(sandbox: &str, processes: u32) -> String {
    format!(
        "[bulkhead.x]\ncommand = [\"HOSTILE\"]\ncwd = \"work\"\nprocesses = {processes}\nmax_queue = 100\n\
         deadline = \"60s\"\nsandbox = {{ {sandbox} }}\n\
         restart = {{ backoff = \"1ms\", backoff_max = \"1ms\", max = 1000, within = \"1ms\" }}\n"
    )
}

/// All resources that a worker could leak. Some fields are counts, others are names.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    descriptors_of_supervisor: usize,
    descriptors_of_keeper: usize,
    processes: usize,
    zombies: usize,
    mounts_of_keeper: BTreeSet<String>,
    mounts_of_machine: BTreeSet<String>,
    namespaces: BTreeMap<String, usize>,
    temporary: usize,
}

impl Traces {
    fn of(place: &Place) -> Self {
        let (supervisor, keeper) = (place.supervisor.pid(), place.supervisor.keeper());
        let family = descendants(supervisor);
        let mounts = |pid: u32| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        };
        let mut different: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (pid, _) in &family {
            for (kind, id) in namespaces(*pid) {
                different.entry(kind).or_default().insert(id);
            }
        }
        Self {
            descriptors_of_supervisor: descriptors(supervisor),
            descriptors_of_keeper: descriptors(keeper),
            processes: family.len(),
            zombies: family.iter().filter(|(_, state)| *state == 'Z').count(),
            mounts_of_keeper: mounts(keeper),
            mounts_of_machine: mounts(1),
            namespaces: different.into_iter().map(|(kind, ids)| (kind, ids.len())).collect(),
            temporary: walk(place.path().join("tmp")),
        }
    }
}

/// Returns the PID and state of each descendant of a process.
fn descendants(of: u32) -> Vec<(u32, char)> {
    let stat = |pid: u32| -> Option<(u32, char)> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
        let state = fields.next()?.chars().next()?;
        Some((fields.next()?.parse().ok()?, state))
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let all: BTreeMap<u32, (u32, char)> = pids.filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let is_below = |pid: u32| {
        // The number of steps is limited, because the kernel can reuse a PID while the processes are being listed. The
        // parents in the list can then form a cycle.
        let ancestors = std::iter::successors(Some(pid), |pid| all.get(pid).map(|(parent, _)| *parent));
        ancestors.skip(1).take(all.len()).any(|ancestor| ancestor == of)
    };
    all.iter().filter(|(pid, _)| is_below(**pid)).map(|(pid, (_, state))| (*pid, *state)).collect()
}

/// Counts the files and folders in a folder, recursively.
fn walk(folder: PathBuf) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| 1 + if entry.path().is_dir() { walk(entry.path()) } else { 0 }).sum()
}

/// Returns the cgroup of a process, as a path below the cgroup mount.
fn cgroup(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

fn cgroup_exists(path: &str) -> bool {
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    roots.iter().any(|root| std::path::Path::new(&format!("{root}{path}/cgroup.procs")).exists())
}

/// Starts workers and kills or crashes them until `STARTS` workers have died. Uses `lanes` threads. Returns the
/// workers' cgroups.
fn start_and_kill(place: &Place, lanes: usize) -> BTreeSet<String> {
    let done = AtomicUsize::new(0);
    let cgroups = Mutex::new(BTreeSet::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(|| {
                let client = place.client();
                while done.fetch_add(1, Ordering::Relaxed) < STARTS {
                    assert!(began.elapsed() < PATIENCE, "{} of {STARTS}", done.load(Ordering::Relaxed));
                    let found = client.job("x", "").operation("pid").deadline(PATIENCE).send();
                    let pid = found.ok().and_then(|reply| reply.outcome().worker_pid);
                    cgroups.lock().unwrap().extend(pid.and_then(cgroup));
                    match pid {
                        Some(pid) if pid % 4 == 0 => kill_pid(pid, Signal::SIGKILL),
                        _ => {
                            let result = client.job("x", "").operation("crash").deadline(PATIENCE).send();
                            assert!(outcome(&result).starts_with("crashed/"), "{result:?}");
                        }
                    }
                }
            });
        }
    });
    cgroups.into_inner().unwrap()
}

fn assert_no_traces(sandbox: &str, user: Option<u32>) {
    const PROCESSES: u32 = 4;
    let bulkheads = bulkhead(sandbox, PROCESSES);
    let mut place = Setup { bulkheads: &bulkheads, user, ..Setup::default() }.start();
    let settled = || place.supervisor.wait_number("x", "limit", PROCESSES.into());
    // Objects that are created only once must exist before the first count.
    settled();
    place.ask("x", "leave-a-file");
    let crashed = place.client().job("x", "").operation("crash").send().unwrap_err();
    settled();
    // After a crash caused by a signal, a symbolizer runs under a separate keeper.
    if let Some(report) = crashed.outcome().and_then(|outcome| outcome.report.clone()) {
        wait_for("the symbolizer has exited", || {
            let report = place.supervisor.crash_report(&report);
            let is_alone = children(place.supervisor.pid()).len() == 1;
            (is_alone && report.get("native").is_some()).then_some(())
        });
    }
    // On a busy machine, the keeper may not have reaped the crashed worker's processes yet.
    let before =
        wait_for("all zombies are reaped", || Some(Traces::of(&place)).filter(|traces| traces.zombies == 0));
    let own = cgroup(place.supervisor.pid());
    let cgroups = start_and_kill(&place, PROCESSES as usize);
    settled();
    let began = Instant::now();
    loop {
        let mut after = Traces::of(&place);
        // A smaller number is also correct, because the first count can include a connection of the test, or the
        // crashed worker's folder.
        after.descriptors_of_supervisor =
            after.descriptors_of_supervisor.max(before.descriptors_of_supervisor);
        after.descriptors_of_keeper = after.descriptors_of_keeper.max(before.descriptors_of_keeper);
        after.temporary = after.temporary.max(before.temporary);
        // Another test may have unmounted a file system.
        after.mounts_of_keeper.extend(before.mounts_of_keeper.iter().cloned());
        after.mounts_of_machine.extend(before.mounts_of_machine.iter().cloned());
        if after == before {
            break;
        }
        assert!(began.elapsed() < bulkhead_tests::PATIENCE, "before: {before:?}\nafter: {after:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let restarts = place.supervisor.number("x", "restarts");
    assert!(restarts as usize > STARTS / 2, "{restarts}");
    // Workers that are still alive have cgroups, which the shutdown has to remove.
    let living: BTreeSet<String> = place.supervisor.worker_pids("x").into_iter().filter_map(cgroup).collect();
    place.supervisor.signal(Signal::SIGTERM);
    place.supervisor.wait();
    for path in cgroups.union(&living).filter(|path| Some(*path) != own.as_ref()) {
        assert!(!cgroup_exists(path), "the cgroup {path} still exists");
    }
    assert_eq!(walk(place.path().join("tmp")), 0, "files were left behind");
}

#[test]
fn killed_strict_workers_leave_no_traces() {
    let _turn = heavy();
    if has_layers(STRICT_LAYERS) {
        assert_no_traces(STRICT, None);
    }
}

#[test]
fn killed_unprivileged_strict_workers_leave_no_traces() {
    let _turn = heavy();
    if is_root() && has_layers(STRICT_LAYERS) {
        assert_no_traces(STRICT, Some(NOBODY));
    }
}

#[test]
fn killed_default_workers_leave_no_traces() {
    let _turn = heavy();
    if has_layers(DEFAULT_LAYERS) {
        assert_no_traces(DEFAULT, None);
    }
}

/// Returns a path that appears in the command line of every worker that runs in `place`.
fn marker(place: &Place) -> String {
    place.path().join("bin/hostile").to_str().unwrap().to_owned()
}

#[test]
fn worker_death_kills_its_descendants() {
    for (sandbox, layers) in
        [("profile = \"none\"", &[][..]), (DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)]
    {
        if !has_layers(layers) {
            continue;
        }
        let place = Setup { bulkheads: &bulkhead(sandbox, 1), ..Setup::default() }.start();
        let left = place.attempt(&place.client(), "x", "leave-processes-behind", &json!({}));
        assert!(matches!(left, Ended::Succeeded(_)), "{sandbox}: {left:?}");
        let family = || processes_with(&marker(&place));
        let before = wait_for("the worker has descendants", || Some(family()).filter(|all| all.len() >= 6));
        let worker = place.worker("x");
        kill_pid(worker, Signal::SIGKILL);
        wait_for("all descendants have exited", || (!before.iter().any(|&pid| is_alive(pid))).then_some(()));
        place.supervisor.wait_number("x", "limit", 1);
    }
}

#[test]
fn killed_supervisor_leaves_no_traces_of_workers() {
    for (sandbox, layers) in [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)] {
        if !has_layers(layers) {
            continue;
        }
        let mut place = Setup { bulkheads: &bulkhead(sandbox, 2), ..Setup::default() }.start();
        place.ask("x", "leave-a-file");
        let left = place.attempt(&place.client(), "x", "leave-processes-behind", &json!({}));
        assert!(matches!(left, Ended::Succeeded(_)), "{sandbox}: {left:?}");
        let own = cgroup(place.supervisor.pid());
        let family = descendants(place.supervisor.pid());
        let cgroups: BTreeSet<_> = family.iter().filter_map(|(pid, _)| cgroup(*pid)).collect();
        place.supervisor.signal(Signal::SIGKILL);
        place.supervisor.wait();
        wait_for("every process has exited", || {
            (!family.iter().any(|(pid, _)| is_alive(*pid))).then_some(())
        });
        wait_for("every cgroup is removed", || {
            (!cgroups.iter().filter(|path| Some(*path) != own.as_ref()).any(|path| cgroup_exists(path)))
                .then_some(())
        });
        wait_for("the temporary folders are removed", || (walk(place.path().join("tmp")) == 0).then_some(()));
    }
}

#[test]
fn killed_keeper_leaves_no_strict_workers() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let place = Setup { bulkheads: &bulkhead(STRICT, 2), ..Setup::default() }.start();
    let keeper = place.supervisor.keeper();
    let family: Vec<u32> = descendants(keeper).into_iter().map(|(pid, _)| pid).collect();
    kill_pid(keeper, Signal::SIGKILL);
    wait_for("all workers have exited", || (!family.iter().any(|&pid| is_alive(pid))).then_some(()));
    place.supervisor.wait_number("x", "limit", 2);
    assert_ne!(place.supervisor.keeper(), keeper);
}

/// Once both the supervisor and the keeper have died, only the kernel can kill the descendants of a worker, including
/// processes in other sessions and process groups.
#[test]
fn killing_supervisor_and_keeper_leaves_no_processes() {
    if !has_layers(STRICT_LAYERS) {
        return;
    }
    let users = [None, Some(NOBODY)];
    for user in users.into_iter().take(1 + usize::from(is_root())) {
        for sandbox in [DEFAULT, STRICT] {
            let mut place = Setup { bulkheads: &bulkhead(sandbox, 2), user, ..Setup::default() }.start();
            let left = place.attempt(&place.client(), "x", "leave-processes-behind", &json!({}));
            assert!(matches!(left, Ended::Succeeded(_)), "{sandbox}: {left:?}");
            let family = wait_for("the worker has descendants", || {
                Some(processes_with(&marker(&place))).filter(|all| all.len() >= 6)
            });
            let (supervisor, keeper) = (place.supervisor.pid(), place.supervisor.keeper());
            // The processes are stopped first, so that neither can act between the two deaths.
            for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
                kill_pid(keeper, signal);
                kill_pid(supervisor, signal);
            }
            place.supervisor.wait();
            wait_for("all descendants have exited", || {
                (!family.iter().any(|&pid| is_alive(pid))).then_some(())
            });
        }
    }
}

#[test]
fn hostile_temporary_folder_is_removed_safely() {
    for (sandbox, layers) in [(DEFAULT, DEFAULT_LAYERS), (STRICT, STRICT_LAYERS)] {
        for user in [None, Some(NOBODY)] {
            if !has_layers(layers) || (user.is_some() && !is_root()) {
                continue;
            }
            let place = Setup { bulkheads: &bulkhead(sandbox, 1), user, ..Setup::default() }.start();
            let targets = place.targets("x");
            let before = walk(place.path().join("tmp"));
            let precious = place.path().join("outside/precious");
            std::fs::write(&precious, "x").unwrap();
            let ended = place.attempt(&place.client(), "x", "booby-trap-temporary-folder", &targets);
            // The size check can kill the worker before the attempt ends, because the folder is nested too deeply.
            let is_seen = |why: &String| why.contains("temporary directory");
            let folder = match &ended {
                Ended::Succeeded(folder) => folder,
                Ended::Violation(why) if is_seen(why) => "the folder",
                _ => panic!("{sandbox}: {ended:?}"),
            };
            kill_pid(place.worker("x"), Signal::SIGKILL);
            // The next worker starts without waiting for the removal of the folder.
            wait_for("the next worker serves jobs", || place.client().job("x", "").send().ok());
            let temporary = || walk(place.path().join("tmp"));
            wait_for(&format!("{folder} is removed, {sandbox}"), || (temporary() == before).then_some(()));
            assert_eq!(std::fs::read(&precious).unwrap(), b"x", "{sandbox}, {user:?}");
        }
    }
}

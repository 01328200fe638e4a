//! Tests with real control groups, below the control group of the test process. In each test, a new group stands in
//! for the delegated group.
#![expect(unsafe_code, reason = "starting programs in a cgroup, and waiting for them")]

use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree;
use rustix::io::Errno;

use super::folder::Folder;
use super::owner::Owner;
use super::{
    APPLICATION_ADVICE, CONTROLLER_ADVICE, DELEGATE_ADVICE, DelegatedGroup, Failure, KERNEL_ADVICE, Leaf,
    Limits, MAIN_GROUP, SEPARATE_GROUP_ADVICE, StaleLeaves, fork_into, root_path,
};

/// Maximum time to wait for a condition, far longer than any condition should take to become true.
const PATIENCE: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "timed out after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A cgroup for a single test. Dropping this value kills the processes in the cgroup and removes the cgroup.
struct TestGroup(Folder);

impl TestGroup {
    /// Creates a cgroup for a test. If this is not possible on this machine, prints a message and returns `None`.
    fn new(test: &str) -> Option<Self> {
        let name = format!("bulkhead-test-{}-{test}", std::process::id());
        let made = root_path().and_then(|path| Folder::open(&path)?.make_child(&name));
        match made {
            Ok(folder) => Some(Self(folder)),
            Err(error) => {
                eprintln!("NOT RUN: {test}: failed to {error}");
                None
            }
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns this group as a keeper's delegated group. The test process acts as the keeper, and `supervisor` is the
    /// supervisor's PID.
    fn root(&self, supervisor: u32) -> DelegatedGroup {
        DelegatedGroup::from_folder(Folder::open(self.path()).unwrap(), supervisor).unwrap()
    }

    fn leaf(&self, worker: u64) -> Leaf {
        self.root(0).create_leaf(worker, &Limits::default()).unwrap()
    }

    /// Returns true if the controller can be used in child groups. Otherwise prints a message and returns false.
    fn has_controller(&self, controller: &str) -> bool {
        let has = self.0.read_words("cgroup.controllers").unwrap().iter().any(|name| name == controller);
        if !has {
            eprintln!("NOT RUN: no controller `{controller}` in {}", self.path().display());
        }
        has
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = self.0.write("cgroup.kill", "1");
        wait_until("the test's cgroups are removed", || self.0.remove().is_ok_and(|is_gone| is_gone));
    }
}

/// A shell process in a control group.
struct Shell(libc::pid_t);

impl Shell {
    fn start(folder: &Folder, script: &str) -> Self {
        let texts = ["/bin/sh", "-c", script].map(|text| CString::new(text).unwrap());
        let mut arguments = texts.each_ref().map(|text| text.as_ptr()).to_vec();
        arguments.push(std::ptr::null());
        let environment = [c"PATH=/usr/bin:/bin".as_ptr(), std::ptr::null()];
        // SAFETY: the child makes two system calls on prepared data.
        let pid = unsafe { fork_into(std::os::fd::AsFd::as_fd(folder), 0) }.unwrap();
        if pid == 0 {
            // SAFETY: both lists are null-terminated.
            unsafe {
                libc::execve(arguments[0], arguments.as_ptr(), environment.as_ptr());
                libc::_exit(127)
            }
        }
        Self(pid)
    }

    fn pid(&self) -> u32 {
        self.0 as u32
    }

    /// Waits until the shell has exited. Returns its wait status.
    fn wait(self) -> i32 {
        let mut status = 0;
        // SAFETY: the PID is that of a child that has not been waited for, and the pointer refers to a local variable.
        assert_eq!(unsafe { libc::waitpid(self.0, &mut status, libc::__WALL) }, self.0);
        std::mem::forget(self);
        status
    }

    fn wait_for_signal(self) -> i32 {
        let status = self.wait();
        assert!(libc::WIFSIGNALED(status), "status {status:#x}");
        libc::WTERMSIG(status)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // SAFETY: the child has not been waited for, so the PID still belongs to it.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL);
        }
    }
}

fn processes(path: &Path) -> Vec<u32> {
    Folder::open(path).unwrap().read_processes().unwrap()
}

/// Opens a leaf group's folder, so that a process can be started in the group.
fn folder(leaf: &Leaf) -> Folder {
    Folder::open(leaf.path()).unwrap()
}

fn remove(leaf: &Leaf) {
    wait_until("the leaf is removed", || leaf.remove().unwrap());
    assert!(!leaf.path().exists());
}

impl Leaf {
    /// Freezes or thaws all processes in the group. The kernel does this asynchronously.
    fn freeze(&self, is_frozen: bool) -> std::io::Result<()> {
        std::fs::write(self.path().join("cgroup.freeze"), if is_frozen { "1" } else { "0" })
    }

    fn event_is_set(&self, event: &str) -> std::io::Result<bool> {
        let events = std::fs::read_to_string(self.path().join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == event))
    }

    /// Returns true if the group contains no live process. Zombies do not count.
    fn is_empty(&self) -> std::io::Result<bool> {
        self.event_is_set("populated 0")
    }

    /// Returns true if all processes in the group are frozen.
    fn is_frozen(&self) -> std::io::Result<bool> {
        self.event_is_set("frozen 1")
    }
}

#[test]
fn forked_process_starts_in_its_cgroup() {
    let Some(group) = TestGroup::new("first-moment") else { return };
    let leaf = group.leaf(1);
    assert!(leaf.is_empty().unwrap());
    // The shell checks its own control group, which proves that it was started in the group and not moved there later.
    let script =
        format!("grep -q '^0::.*/{}$' /proc/self/cgroup", leaf.path().file_name().unwrap().to_str().unwrap());
    assert_eq!(Shell::start(&folder(&leaf), &script).wait(), 0);
    let shell = Shell::start(&folder(&leaf), "sleep 1000; :");
    assert!(!leaf.is_empty().unwrap());
    assert!(processes(leaf.path()).contains(&shell.pid()));
    assert_eq!(leaf.oom_kills().unwrap(), 0);
    leaf.kill().unwrap();
    assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    wait_until("no process is left", || leaf.is_empty().unwrap());
    remove(&leaf);
}

#[test]
fn cgroup_kill_reaches_processes_in_other_sessions() {
    let Some(group) = TestGroup::new("kill") else { return };
    let leaf = group.leaf(1);
    let script = "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & sleep 1000' &) & \
        (trap '' TERM HUP; (setsid setsid sleep 1000 &) &) & while :; do sleep 1000; done";
    let shell = Shell::start(&folder(&leaf), script);
    // The script starts six `sleep` processes: two direct children, two by double forks, one by a triple
    // fork, and one in the loop.
    wait_until("all six `sleep` processes run", || {
        let names: Vec<String> = processes(leaf.path())
            .iter()
            .filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok())
            .collect();
        names.iter().filter(|name| *name == "sleep\n").count() >= 6
    });
    leaf.kill().unwrap();
    assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    wait_until("no process is left", || leaf.is_empty().unwrap());
    remove(&leaf);
}

#[test]
fn cgroup_kill_stops_fork_bombs() {
    let Some(group) = TestGroup::new("forking") else { return };
    let leaf = group.leaf(1);
    let shell = Shell::start(&folder(&leaf), "while :; do (: & : &) & done");
    wait_until("the shell forks", || processes(leaf.path()).len() > 1);
    leaf.kill().unwrap();
    assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    wait_until("no process is left", || leaf.is_empty().unwrap());
    remove(&leaf);
}

#[test]
fn cgroup_kill_reaches_frozen_processes() {
    let Some(group) = TestGroup::new("freeze") else { return };
    let leaf = group.leaf(1);
    let shell = Shell::start(&folder(&leaf), "while :; do :; done");
    leaf.freeze(true).unwrap();
    wait_until("the group is frozen", || leaf.is_frozen().unwrap());
    assert!(!leaf.is_empty().unwrap());
    leaf.freeze(false).unwrap();
    wait_until("the group is thawed", || !leaf.is_frozen().unwrap());
    leaf.freeze(true).unwrap();
    wait_until("the group is frozen again", || leaf.is_frozen().unwrap());
    leaf.kill().unwrap();
    assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    remove(&leaf);
}

#[test]
fn only_empty_cgroup_leaf_can_be_removed() {
    let Some(group) = TestGroup::new("remove") else { return };
    let leaf = group.leaf(1);
    let shell = Shell::start(&folder(&leaf), "sleep 1000; :");
    assert_eq!(leaf.remove(), Ok(false));
    assert!(leaf.path().exists());
    leaf.kill().unwrap();
    drop(shell);
    remove(&leaf);
    assert_eq!(leaf.remove(), Ok(true));
    assert!(leaf.kill().is_err() && leaf.is_empty().is_err());
    // SAFETY: the fork is expected to fail. If it succeeds, the child only exits.
    let cloned = unsafe { fork_into(leaf.fd(), 0) };
    if cloned == Ok(0) {
        // SAFETY: exits without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    assert!(cloned.is_err());
}

#[test]
fn worker_cannot_create_child_cgroups() {
    let Some(group) = TestGroup::new("undivided") else { return };
    let leaf = group.leaf(1);
    let error = folder(&leaf).make_child("inner").unwrap_err();
    assert_eq!(error.errno, Errno::AGAIN, "{error}");
    assert_eq!(group.root(0).create_leaf(1, &Limits::default()).unwrap_err().errno, Errno::EXIST);
}

#[test]
fn nested_cgroups_are_removed_with_their_leaf() {
    let Some(group) = TestGroup::new("nested") else { return };
    let leaf = group.leaf(1);
    // Removes the limit on nested groups, as a worker that is allowed to create groups could do.
    folder(&leaf).write("cgroup.max.descendants", "max").unwrap();
    let deep = leaf.path().join("deep/".repeat(300));
    fs::create_dir_all(&deep).unwrap();
    for number in 0..20 {
        fs::create_dir_all(leaf.path().join(format!("a{number}/b/c"))).unwrap();
    }
    let shells = [leaf.path().join("a3/b/c"), deep]
        .map(|path| Shell::start(&Folder::open(&path).unwrap(), "sleep 1000; :"));
    assert!(!leaf.is_empty().unwrap());
    assert_eq!(leaf.remove(), Ok(false));
    leaf.kill().unwrap();
    for shell in shells {
        assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    }
    remove(&leaf);
}

/// Removing a group fails if groups are nested beyond the maximum depth.
#[test]
fn too_deeply_nested_cgroups_are_an_error() {
    let Some(group) = TestGroup::new("abyss") else { return };
    let mut here = Folder::open(group.path()).unwrap();
    for _ in 0..1100 {
        match here.make_child("d") {
            Ok(child) => here = child,
            Err(error) => return eprintln!("NOT RUN: deep cgroup: failed to {error}"),
        }
    }
    let error = group.0.remove().unwrap_err();
    assert_eq!(error.errno, Errno::LOOP, "{error}");
    // Removes the innermost levels, so that dropping `group` can remove the remaining ones.
    for _ in 0..200 {
        let parent = here.parent().unwrap();
        assert_eq!(parent.remove_child("d"), Ok(true));
        here = parent;
    }
}

#[test]
fn only_leaf_cgroups_of_dead_keepers_are_removed() {
    let Some(group) = TestGroup::new("stale") else { return };
    let root = group.root(0);
    let living = Owner::this_process().unwrap();
    let mut keeper = Command::new("sleep").arg("1000").spawn().unwrap();
    let other = Owner { pid: keeper.id(), started: process_tree::start_time(keeper.id()).unwrap(), ..living };
    let foreign = Owner { namespace: living.namespace + 1, ..other };
    let names = [other.leaf_name(1), other.leaf_name(2), foreign.leaf_name(1), living.leaf_name(1)];
    let folders = names.each_ref().map(|name| group.0.make_child(name).unwrap());
    group.0.make_child("bulkhead-main").unwrap();
    group.0.make_child("another").unwrap();
    let shells = folders.each_ref().map(|folder| Shell::start(folder, "sleep 1000; :"));
    fs::create_dir(folders[0].path().join("inner")).unwrap();
    assert_eq!(root.remove_stale_leaves(), Ok(StaleLeaves::default()), "the keeper of these leaves is alive");

    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let mut removed = 0;
    wait_until("the groups of the dead keeper are removed", || {
        let stale = root.remove_stale_leaves().unwrap();
        removed += stale.removed;
        stale.left == 0
    });
    assert_eq!(removed, 2);
    let [first, second, third, fourth] = shells;
    assert_eq!(first.wait_for_signal(), libc::SIGKILL);
    assert_eq!(second.wait_for_signal(), libc::SIGKILL);
    assert!(processes(folders[2].path()).contains(&third.pid()));
    assert!(processes(folders[3].path()).contains(&fourth.pid()));
    let left = group.0.children(10, |_| true).unwrap().len();
    assert_eq!(left, 4);
    assert_eq!(root.remove_stale_leaves(), Ok(StaleLeaves::default()));
}

/// Tests that the supervisor's processes are moved out of the delegated group, and that any other process in the group
/// is an error.
#[test]
fn only_supervisor_processes_leave_delegated_cgroup() {
    let Some(group) = TestGroup::new("vacate") else { return };
    // The shell and its child stand in for the supervisor and another process of the supervisor. Both descend from this
    // process, like the keeper's own children.
    let supervisor = Shell::start(&group.0, "sleep 1000 & sleep 1000");
    wait_until("both processes run", || processes(group.path()).len() >= 2);
    let root = group.root(supervisor.pid());
    root.move_processes_out().unwrap();
    assert!(processes(group.path()).is_empty());
    let main = group.path().join(MAIN_GROUP);
    assert!(processes(&main).contains(&supervisor.pid()));
    root.move_processes_out().unwrap();

    // Starts an orphan whose origin is unknown, because the process that created the orphan has exited and another
    // process has adopted it.
    assert_eq!(Shell::start(&group.0, "(exec setsid sleep 1234 </dev/null >/dev/null 2>&1) & :").wait(), 0);
    wait_until("the process is an orphan", || {
        let inside = processes(group.path());
        let ours = process_tree::descendants_of(std::process::id()).unwrap();
        inside.len() == 1 && !ours.contains(&inside[0])
    });
    let orphan = processes(group.path())[0];
    wait_until("the orphan runs `sleep`", || {
        fs::read_to_string(format!("/proc/{orphan}/comm")).is_ok_and(|name| name == "sleep\n")
    });
    let error = root.move_processes_out().unwrap_err();
    assert_eq!(error.errno, Errno::BUSY);
    assert!(error.attempted.ends_with(&format!("{orphan} (sleep)")), "{error}");
    assert!(error.to_string().contains("DelegateSubgroup=bulkhead-main"), "{error}");
    assert_eq!(processes(group.path()), [orphan], "the orphan was moved");
}

/// The supervisor also has children other than the keeper, such as symbolizers. They must be moved as well.
#[test]
fn all_children_of_the_supervisor_leave_delegated_cgroup() {
    let Some(group) = TestGroup::new("symbolizer") else { return };
    // The script becomes an orphan, so that it is not a descendant of this process, which acts as the keeper.
    let script = "(exec setsid sh -c 'sleep 1000 & exec sleep 1234' </dev/null >/dev/null 2>&1) & :";
    assert_eq!(Shell::start(&group.0, script).wait(), 0);
    let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut inside = Vec::new();
    wait_until("both processes run", || {
        inside = processes(group.path());
        inside.len() == 2 && inside.iter().all(|pid| name(pid).starts_with("sleep"))
    });
    let supervisor = *inside.iter().find(|pid| name(pid).contains("1234")).unwrap();
    wait_until("the supervisor is an orphan", || {
        !process_tree::descendants_of(std::process::id()).unwrap().contains(&supervisor)
    });
    group.root(supervisor).move_processes_out().unwrap();
    assert!(processes(group.path()).is_empty());
    assert_eq!(processes(&group.path().join(MAIN_GROUP)).len(), 2);
}

#[test]
fn cgroup_limit_without_controller_is_an_error() {
    let Some(group) = TestGroup::new("absent") else { return };
    let root = group.root(0);
    let all = [
        ("memory", Limits { memory_bytes: Some(64 << 20), ..Limits::default() }),
        ("pids", Limits { pids: Some(10), ..Limits::default() }),
        ("cpu", Limits { cpu_cores: Some(0.5), ..Limits::default() }),
    ];
    let have = group.0.read_words("cgroup.controllers").unwrap();
    for (number, (controller, limits)) in all.into_iter().enumerate() {
        if have.iter().any(|name| name == controller) {
            eprintln!(
                "NOT RUN: error without the controller `{controller}`, because this machine has the controller"
            );
            continue;
        }
        let error = root.create_leaf(number as u64, &limits).unwrap_err();
        assert!(error.attempted.starts_with(&format!("use the `{controller}` controller in /")), "{error}");
        assert!(error.to_string().ends_with(CONTROLLER_ADVICE), "{error}");
    }
    if have.is_empty() {
        assert!(group.0.children(10, |_| true).unwrap().is_empty(), "a group was created despite the error");
    }
}

#[test]
fn cgroup_controllers_are_enabled_after_moving_processes() {
    let Some(group) = TestGroup::new("enable") else { return };
    // Uses the first available controller, because the test does not depend on a particular one.
    let have = group.0.read_words("cgroup.controllers").unwrap();
    let Some(controller) = have.first() else {
        return eprintln!("NOT RUN: no controller at all in {}", group.path().display());
    };
    let supervisor = Shell::start(&group.0, "sleep 1000; :");
    let root = group.root(supervisor.pid());
    root.enable(&[controller]).unwrap();
    root.enable(&[controller]).unwrap();
    assert_eq!(group.0.read_words("cgroup.subtree_control").unwrap(), std::slice::from_ref(controller));
    assert!(processes(&group.path().join(MAIN_GROUP)).contains(&supervisor.pid()));
    let leaf = root.create_leaf(1, &Limits::default()).unwrap();
    assert_eq!(Shell::start(&folder(&leaf), ":").wait(), 0);
    remove(&leaf);
}

#[test]
fn memory_limit_kills_all_worker_processes() {
    let Some(group) = TestGroup::new("memory") else { return };
    if !group.has_controller("memory") {
        return;
    }
    let limits = Limits { memory_bytes: Some(32 << 20), ..Limits::default() };
    let leaf = group.root(0).create_leaf(1, &limits).unwrap();
    assert_eq!(fs::read_to_string(leaf.path().join("memory.max")).unwrap(), "33554432\n");
    // A child of the shell exceeds the memory limit.
    let shell = Shell::start(&folder(&leaf), "tail /dev/zero & sleep 1000");
    assert_eq!(shell.wait_for_signal(), libc::SIGKILL);
    assert!(leaf.oom_kills().unwrap() >= 1);
    remove(&leaf);
}

#[test]
fn pids_limit_prevents_further_forks() {
    let Some(group) = TestGroup::new("pids") else { return };
    if !group.has_controller("pids") {
        return;
    }
    let leaf = group.root(0).create_leaf(1, &Limits { pids: Some(2), ..Limits::default() }).unwrap();
    let shell = Shell::start(&folder(&leaf), "sleep 1000 & sleep 1000 & wait");
    // The limit is two processes, so the shell cannot fork a second time.
    assert!(libc::WEXITSTATUS(shell.wait()) != 0);
    leaf.kill().unwrap();
    remove(&leaf);
}

#[test]
fn cpu_limit_is_written_to_cgroup() {
    let Some(group) = TestGroup::new("cpu") else { return };
    if !group.has_controller("cpu") {
        return;
    }
    let leaf = group.root(0).create_leaf(1, &Limits { cpu_cores: Some(0.25), ..Limits::default() }).unwrap();
    assert_eq!(fs::read_to_string(leaf.path().join("cpu.max")).unwrap(), "25000 100000\n");
    remove(&leaf);
}

#[test]
fn missing_cgroup_write_access_is_reported_with_advice() {
    let Some(group) = TestGroup::new("delegated") else { return };
    if !rustix::process::geteuid().is_root() {
        return eprintln!("NOT RUN: only root can switch to an unprivileged user");
    }
    const NOBODY: libc::c_long = 65534;
    let path = group.path();
    let error = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            // SAFETY: changes the identity of only this thread, which exits afterwards.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(changed, 0);
            DelegatedGroup::from_folder(Folder::open(path).unwrap(), 0).unwrap_err()
        });
        other.join().unwrap()
    });
    assert_eq!(error.errno, Errno::ACCESS, "{error}");
    assert!(error.attempted.ends_with(&format!(" {}", path.display())), "{error}");
    assert!(error.to_string().ends_with(DELEGATE_ADVICE), "{error}");
}

#[test]
fn folder_outside_cgroup_file_system_is_rejected() {
    match DelegatedGroup::find(std::process::id()) {
        Ok(root) => assert!(root.path().join("cgroup.procs").exists()),
        Err(Failure { attempted, advice, .. }) => {
            eprintln!("NOT RUN: failed to {attempted}; {advice}");
        }
    }
    let elsewhere = Folder::open(Path::new("/")).unwrap_err();
    assert_eq!(elsewhere.errno, Errno::NODEV, "{elsewhere}");
}

#[test]
fn advice_for_applications_names_no_standalone_supervisor() {
    for advice in [DELEGATE_ADVICE, SEPARATE_GROUP_ADVICE] {
        let failure = Failure { attempted: String::new(), errno: Errno::BUSY, advice };
        assert_eq!(failure.for_application().advice, APPLICATION_ADVICE);
    }
    let failure = Failure { attempted: String::new(), errno: Errno::NOENT, advice: KERNEL_ADVICE };
    assert_eq!(failure.clone().for_application(), failure);
}

//! Control groups (version 2). Each worker has a leaf group, with limits for the worker and all its descendants.
//!
//! The leaves are children of the keeper's own group, which must have been delegated to the keeper. This
//! module never changes groups above the keeper's own group, and moves only the supervisor's own processes.
//! The caller is responsible for emptying and removing a leaf. No function blocks. If an action is not
//! possible yet, the caller tries again later.
//!
//! - `folder`: a group as a folder of files, with size limits for reads and writes.
//! - `leaf`: the group of a worker.
//! - `limits`: the files that set limits.
//! - `owner`: the owner of a leaf, which is part of the leaf's name.
//! - `clone`: starts a process in a group.
//! - `parse`: parsers of the kernel's files.

mod clone;
mod folder;
mod leaf;
mod limits;
mod owner;
mod parse;

use std::fmt;
use std::path::{Path, PathBuf};

use bulkhead_linux::errno;
use bulkhead_linux::process_tree::descendants_of;
use rustix::io::Errno;

use folder::Folder;
use owner::Owner;

pub(crate) use clone::fork_into;
pub(crate) use leaf::Leaf;
pub(crate) use limits::Limits;

/// Name of the child group to which the supervisor and the keeper are moved. The kernel applies limits to the children
/// of a group only if the group itself contains no process. With `DelegateSubgroup=`, systemd starts the supervisor in
/// this child group.
const MAIN_GROUP: &str = "bulkhead-main";

/// Value that replaces the PID of a process that is not visible in this PID namespace.
const NO_PROCESS: u32 = 0;

/// Maximum number of passes when moving all processes out of a group. Processes forked during one pass are moved in
/// the next pass.
const MOVE_ROUNDS_MAX: usize = 16;

/// Maximum number of leaf groups of previous keepers to clean up per call.
const STALE_LEAVES_MAX: usize = 4096;

/// Maximum number of processes to list in the error about processes that do not belong to the supervisor.
const NAMED_PROCESSES_MAX: usize = 3;

/// Advice for administrators, appended to errors about control groups.
pub(crate) const MOUNT_ADVICE: &str =
    "boot with cgroup v2: systemd.unified_cgroup_hierarchy=1; in a container, mount cgroup v2";
pub(crate) const DELEGATE_ADVICE: &str = "delegate a cgroup: set Delegate=yes in the supervisor's unit, or \
                                          start the supervisor with `systemd-run --user --scope -p \
                                          Delegate=yes`";
pub(crate) const CONTROLLER_ADVICE: &str =
    "delegate the controller (Delegate=yes); if cgroup v1 uses the controller, boot with cgroup v2 only";
const KERNEL_ADVICE: &str = "run kernel 5.14 or later";
const SEPARATE_GROUP_ADVICE: &str = "start the supervisor in a separate cgroup: as a unit with Delegate=yes and \
     DelegateSubgroup=bulkhead-main, or as the only program of a container";
/// Used instead of the other advice if an application embeds the supervisor, because the keeper must not move the
/// application's processes.
const APPLICATION_ADVICE: &str = "start the application in a child of a delegated cgroup: as a unit with Delegate=yes \
     and DelegateSubgroup=bulkhead-main";
const GROUP_LIMITS_ADVICE: &str =
    "raise cgroup.max.descendants and cgroup.max.depth of the cgroup, or of its parent cgroups";
const INSPECT_ADVICE: &str = "check which processes (cgroup.procs) and child cgroups keep the cgroup in use";

/// A failed operation on a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Description of the failed action, including the file. Completes a sentence that begins with "failed to".
    pub(crate) attempted: String,
    /// Error number from the kernel, or the closest match if the keeper itself detected the failure.
    pub(crate) errno: Errno,
    /// Advice for the administrator on how to fix the failure.
    pub(crate) advice: &'static str,
}

impl Failure {
    /// Adapts the error to a supervisor that is embedded in an application. Replaces advice that applies only to a
    /// standalone supervisor.
    pub(crate) fn for_application(self) -> Self {
        let advice = match self.advice {
            DELEGATE_ADVICE | SEPARATE_GROUP_ADVICE => APPLICATION_ADVICE,
            advice => advice,
        };
        Self { advice, ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempted, errno, advice } = self;
        write!(formatter, "{attempted}: {}; {advice}", std::io::Error::from(*errno))
    }
}

fn failure(attempted: String, errno: Errno) -> Failure {
    let advice = match errno {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => DELEGATE_ADVICE,
        Errno::NOENT => KERNEL_ADVICE,
        Errno::AGAIN => GROUP_LIMITS_ADVICE,
        _ => INSPECT_ADVICE,
    };
    Failure { attempted, errno, advice }
}

/// Returns the path of the delegated group, in which this process creates child groups.
pub(crate) fn root_path() -> Result<PathBuf, Failure> {
    open_root().map(|folder| folder.path().to_owned())
}

fn open_root() -> Result<Folder, Failure> {
    let own = open_own_group()?;
    // If this process is in the main group, systemd or an earlier keeper has moved it there from the delegated group.
    let is_main = own.path().file_name().is_some_and(|name| name == MAIN_GROUP);
    if is_main { own.parent() } else { Ok(own) }
}

/// Opens the control group of this process.
fn open_own_group() -> Result<Folder, Failure> {
    let mounts = folder::read_proc("/proc/self/mountinfo")?;
    let cgroups = folder::read_proc("/proc/self/cgroup")?;
    let mut found = Err(Failure {
        attempted: "find the cgroup v2 file system that contains the supervisor's cgroup".into(),
        errno: Errno::NOENT,
        advice: MOUNT_ADVICE,
    });
    for path in parse::own_group_paths(&mounts, &cgroups) {
        // Tries all paths, because another file system may be mounted over some of them.
        found = Folder::open(&path);
        if found.is_ok() {
            break;
        }
    }
    found
}

/// The group that was delegated to this process, and in which this process creates child groups.
#[derive(Debug)]
pub(crate) struct DelegatedGroup {
    folder: Folder,
    owner: Owner,
    /// PID of the supervisor, which is moved to the main group with all of its descendants. [`NO_PROCESS`] if the
    /// supervisor is in another PID namespace.
    supervisor: u32,
}

/// Result of cleaning up the leaf groups of previous keepers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StaleLeaves {
    pub(crate) removed: usize,
    /// Number of leaf groups that still contain processes, because the killed processes have not exited yet. Unless
    /// this number is zero, the caller must try again later.
    pub(crate) left: usize,
}

impl DelegatedGroup {
    /// Finds this process's group, and checks that the group was delegated, so that this process can create child
    /// groups and move processes. `supervisor` is the PID of the parent process.
    pub(crate) fn find(supervisor: u32) -> Result<Self, Failure> {
        Self::from_folder(open_root()?, supervisor)
    }

    fn from_folder(folder: Folder, supervisor: u32) -> Result<Self, Failure> {
        folder.check_writable(".")?;
        folder.check_writable("cgroup.procs")?;
        Ok(Self { folder, owner: Owner::this_process()?, supervisor })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Kills the processes in leaf groups of previous keepers, and removes these groups. Continues after a failure, and
    /// returns the first one. Call this again after a pause until no such groups are left.
    pub(crate) fn remove_stale_leaves(&self) -> Result<StaleLeaves, Failure> {
        let is_stale =
            |name: &str| Owner::from_leaf_name(name).is_some_and(|owner| self.owner.outlived(&owner));
        let mut stale = StaleLeaves::default();
        let mut failed = None;
        for name in self.folder.children(STALE_LEAVES_MAX, is_stale)? {
            match self.folder.child(&name).and_then(|leaf| leaf.write("cgroup.kill", "1")) {
                // Ignores these errors. An empty leaf is removed below even if it has no `cgroup.kill` file.
                Ok(()) | Err(Failure { errno: Errno::NOENT | Errno::NODEV, .. }) => {}
                Err(error) => _ = failed.get_or_insert(error),
            }
            match self.folder.remove_child(&name) {
                Ok(true) => stale.removed += 1,
                Ok(false) => stale.left += 1,
                Err(error) => _ = failed.get_or_insert(error),
            }
        }
        failed.map_or(Ok(stale), Err)
    }

    /// Creates a worker's control group and applies the limits. `worker` must be a spawn number that has never been
    /// used.
    pub(crate) fn create_leaf(&self, worker: u64, limits: &Limits) -> Result<Leaf, Failure> {
        let settings = limits.settings()?;
        let controllers = limits.controllers();
        if !controllers.is_empty() {
            self.enable(&controllers)?;
        }
        let name = self.owner.leaf_name(worker);
        let folder = self.folder.make_child(&name)?;
        match settings.iter().try_for_each(|setting| setting.write(&folder)) {
            Ok(()) => Ok(Leaf::new(folder)),
            Err(error) => {
                let _ = self.folder.remove_child(&name); // The leaf is empty. Reports the first failure.
                Err(error)
            }
        }
    }

    /// Enables controllers for this group's child groups.
    fn enable(&self, controllers: &[&str]) -> Result<(), Failure> {
        let available = self.folder.read_words("cgroup.controllers")?;
        if let Some(missing) = controllers.iter().find(|name| !available.iter().any(|have| have == *name)) {
            let have = if available.is_empty() { "none".to_owned() } else { available.join(" ") };
            let path = self.path().display();
            return Err(Failure {
                attempted: format!("use the `{missing}` controller in {path} (available: {have})"),
                errno: Errno::OPNOTSUPP,
                advice: CONTROLLER_ADVICE,
            });
        }
        // Moves the processes first, even where the kernel does not require it. A group that contains a
        // process can enable `cpu` and `pids`, but then its children cannot contain processes.
        self.move_processes_out()?;
        let enabled = self.folder.read_words("cgroup.subtree_control")?;
        let wanted = controllers.iter().filter(|name| !enabled.iter().any(|have| have == *name));
        let switches: Vec<String> = wanted.map(|name| format!("+{name}")).collect();
        if switches.is_empty() {
            return Ok(());
        }
        self.folder.write("cgroup.subtree_control", &switches.join(" "))
    }

    /// Moves the supervisor and its descendants, including the keeper, into a child group. Fails if the group contains
    /// any other process, because other processes must not be moved. Ignores processes that disappear from the group,
    /// such as processes that were exiting when their parents were looked up.
    fn move_processes_out(&self) -> Result<(), Failure> {
        // The root cgroup, which is the only one without a `cgroup.type` file, can contain processes in addition to
        // child groups with limits.
        if !self.folder.has_file("cgroup.type")? {
            return Ok(());
        }
        let mut others_before = Vec::new();
        for _ in 0..MOVE_ROUNDS_MAX {
            let inside = self.folder.read_processes()?;
            if inside.is_empty() {
                return Ok(());
            }
            let ours = self.own_processes()?;
            let (ours, others): (Vec<u32>, Vec<u32>) = inside.iter().partition(|pid| ours.contains(pid));
            let left: Vec<u32> = others.iter().copied().filter(|pid| others_before.contains(pid)).collect();
            if !left.is_empty() {
                return Err(self.foreign_processes_failure(&left));
            }
            self.move_to_main_group(&ours)?;
            others_before = others;
        }
        Err(failure(format!("move the supervisor's processes out of {}", self.path().display()), Errno::BUSY))
    }

    fn own_processes(&self) -> Result<Vec<u32>, Failure> {
        let keeper = std::process::id();
        let top = if self.supervisor == NO_PROCESS { keeper } else { self.supervisor };
        let mut ours = descendants_of(top).map_err(|error| {
            let errno = errno::from_io(&error, Errno::IO);
            failure("read /proc for the supervisor's processes".into(), errno)
        })?;
        ours.extend([keeper, top]);
        Ok(ours)
    }

    fn move_to_main_group(&self, processes: &[u32]) -> Result<(), Failure> {
        let main = match self.folder.make_child(MAIN_GROUP) {
            Err(Failure { errno: Errno::EXIST, .. }) => self.folder.child(MAIN_GROUP),
            made => made,
        }?;
        for pid in processes {
            match main.write("cgroup.procs", &pid.to_string()) {
                Ok(()) | Err(Failure { errno: Errno::SRCH, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn foreign_processes_failure(&self, others: &[u32]) -> Failure {
        let name = |pid: &u32| match folder::read_proc(&format!("/proc/{pid}/comm")) {
            Ok(name) => format!("{pid} ({})", name.trim_end().escape_default()),
            // The kernel shows 0 as the PID of a process outside this PID namespace.
            Err(_) => pid.to_string(),
        };
        let mut names: Vec<String> = others.iter().take(NAMED_PROCESSES_MAX).map(name).collect();
        names.extend(
            (others.len() > NAMED_PROCESSES_MAX)
                .then(|| format!("{} more", others.len() - NAMED_PROCESSES_MAX)),
        );
        Failure {
            attempted: format!(
                "divide the cgroup {}, which contains processes other than the supervisor's: {}",
                self.path().display(),
                names.join(", ")
            ),
            errno: Errno::BUSY,
            advice: SEPARATE_GROUP_ADVICE,
        }
    }
}

#[cfg(test)]
mod tests;

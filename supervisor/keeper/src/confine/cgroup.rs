//! Control groups of version 2: a leaf for each worker, with the limits of it and all that it starts.
//!
//! The leaves lie in the cgroup that the keeper itself is in, if that was delegated to it; anything above
//! is never touched, and no process is moved that is not the supervisor's own. A leaf is emptied and
//! removed by its caller, never by itself: nothing here waits, and what cannot be done yet is
//! to be tried again.
//!
//! - `folder`: a cgroup as files, read and written within bounds.
//! - `leaf`: what can be done with a worker's own.
//! - `limits`: which files say what.
//! - `owner`: the owner of a leaf, by its name.
//! - `clone`: starting a process in one.
//! - `texts`: what the kernel says, taken apart.

mod clone;
mod folder;
mod leaf;
mod limits;
mod owner;
mod texts;

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

/// Where the supervisor and the keeper go when their own cgroup has to be free of processes: the kernel
/// gives limits to the parts of a cgroup only if none is in it itself. systemd puts the supervisor there
/// right away with `DelegateSubgroup=`.
const MAIN: &str = "bulkhead-main";

/// Looks at a cgroup that is being emptied: what is forked meanwhile is found the next time.
const VACATE_ROUNDS_MAX: usize = 16;

/// Leaves of keepers that are gone, taken on at a time.
const STALE_MAX: usize = 4096;

/// Processes that are in the way, by name, in one sentence.
const NAMED_MAX: usize = 3;

/// What to do where no cgroup can be used.
pub(crate) const MOUNT_IT: &str =
    "boot with cgroup v2: systemd.unified_cgroup_hierarchy=1; in a container, have it mounted";
pub(crate) const DELEGATE: &str = "delegate a cgroup: Delegate=yes in the supervisor's unit, or start it by `systemd-run --user --scope -p Delegate=yes`";
pub(crate) const FREE_IT: &str =
    "delegate it (Delegate=yes); where cgroup v1 holds it, boot with cgroup v2 alone";
const NEWER_KERNEL: &str = "run a kernel of 5.14 or later";
const ALONE: &str = "start the supervisor in a cgroup of its own: as a unit with Delegate=yes and \
     DelegateSubgroup=bulkhead-main, or as the only program of a container";
const UNDIVIDED: &str = "raise its cgroup.max.descendants and cgroup.max.depth, or those above it";
const LOOK: &str = "see what holds it: its cgroup.procs, and the folders in it";

/// Why something cannot be done with a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Fits after "failed to"; names the file.
    pub(crate) attempted: String,
    /// What the kernel said, or would.
    pub(crate) errno: Errno,
    /// What an administrator can do about it.
    pub(crate) what_to_do: &'static str,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { attempted, errno, what_to_do } = self;
        write!(formatter, "{attempted}: {}; {what_to_do}", std::io::Error::from(*errno))
    }
}

fn failure(attempted: String, errno: Errno) -> Failure {
    let what_to_do = match errno {
        Errno::ACCESS | Errno::PERM | Errno::ROFS => DELEGATE,
        Errno::NOENT => NEWER_KERNEL,
        Errno::AGAIN => UNDIVIDED,
        _ => LOOK,
    };
    Failure { attempted, errno, what_to_do }
}

/// The cgroup that is ours to divide, if it was delegated, where it is mounted.
pub(crate) fn root_path() -> Result<PathBuf, Failure> {
    open_root().map(|folder| folder.path().to_owned())
}

fn open_root() -> Result<Folder, Failure> {
    let own = open_own()?;
    // An earlier keeper, or systemd, has put us there.
    let is_main = own.path().file_name().is_some_and(|name| name == MAIN);
    if is_main { own.parent() } else { Ok(own) }
}

/// The cgroup that this process is in.
fn open_own() -> Result<Folder, Failure> {
    let mounts = folder::read_proc("/proc/self/mountinfo")?;
    let cgroups = folder::read_proc("/proc/self/cgroup")?;
    let mut found = Err(Failure {
        attempted: "find the file system of cgroup v2 that shows the supervisor's own".into(),
        errno: Errno::NOENT,
        what_to_do: MOUNT_IT,
    });
    for path in texts::own_cgroups(&mounts, &cgroups) {
        // Something else may be mounted over one of them.
        found = Folder::open(&path);
        if found.is_ok() {
            break;
        }
    }
    found
}

/// The cgroup that is ours to divide.
#[derive(Debug)]
pub(crate) struct Root {
    folder: Folder,
    owner: Owner,
    /// Our parent, which is moved with us.
    supervisor: u32,
}

/// What became of the leaves of keepers that are gone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub(crate) removed: usize,
    /// Killed, and not yet empty: to be swept again.
    pub(crate) left: usize,
}

impl Root {
    /// Finds the own cgroup, and sees that it was delegated: that its parts and processes are ours to
    /// arrange. `supervisor` is the process that started this one.
    pub(crate) fn find(supervisor: u32) -> Result<Self, Failure> {
        Self::in_folder(open_root()?, supervisor)
    }

    fn in_folder(folder: Folder, supervisor: u32) -> Result<Self, Failure> {
        folder.check_writable(".")?;
        folder.check_writable("cgroup.procs")?;
        Ok(Self { folder, owner: Owner::this_process()?, supervisor })
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Kills and removes the leaves of keepers that are gone. To be called again, after a pause, while
    /// something is left; the first failure is told when all have been tried.
    pub(crate) fn sweep(&self) -> Result<Swept, Failure> {
        let is_stale = |name: &str| Owner::of_leaf(name).is_some_and(|owner| self.owner.outlived(&owner));
        let mut swept = Swept::default();
        let mut failed = None;
        for name in self.folder.children(STALE_MAX, is_stale)? {
            match self.folder.child(&name).and_then(|leaf| leaf.write("cgroup.kill", "1")) {
                // Without its kill file it may still be empty.
                Ok(()) | Err(Failure { errno: Errno::NOENT | Errno::NODEV, .. }) => {}
                Err(error) => _ = failed.get_or_insert(error),
            }
            match self.folder.remove_child(&name) {
                Ok(true) => swept.removed += 1,
                Ok(false) => swept.left += 1,
                Err(error) => _ = failed.get_or_insert(error),
            }
        }
        failed.map_or(Ok(swept), Err)
    }

    /// Makes the leaf of a worker, with its limits in force. `worker` is never used twice.
    pub(crate) fn leaf(&self, worker: u64, limits: &Limits) -> Result<Leaf, Failure> {
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
                let _ = self.folder.remove_child(&name); // Empty; and the first failure is the one to tell.
                Err(error)
            }
        }
    }

    /// Sees that the parts of this cgroup can be given such limits.
    fn enable(&self, controllers: &[&str]) -> Result<(), Failure> {
        let available = self.folder.read_words("cgroup.controllers")?;
        if let Some(missing) = controllers.iter().find(|name| !available.iter().any(|have| have == *name)) {
            let have = if available.is_empty() { "none".to_owned() } else { available.join(" ") };
            let path = self.path().display();
            return Err(Failure {
                attempted: format!("have the controller `{missing}` in {path} (there: {have})"),
                errno: Errno::OPNOTSUPP,
                what_to_do: FREE_IT,
            });
        }
        // First, and not only if the kernel insists: with a process in it, a cgroup can be given `cpu` and
        // `pids`, and from then on refuses to have processes in its parts.
        self.vacate()?;
        let enabled = self.folder.read_words("cgroup.subtree_control")?;
        let wanted = controllers.iter().filter(|name| !enabled.iter().any(|have| have == *name));
        let switches: Vec<String> = wanted.map(|name| format!("+{name}")).collect();
        if switches.is_empty() {
            return Ok(());
        }
        self.folder.write("cgroup.subtree_control", &switches.join(" "))
    }

    /// Moves the supervisor, the keeper and what descends from it out of this cgroup, into a part of it.
    /// No other process is moved: one that is there is an error.
    fn vacate(&self) -> Result<(), Failure> {
        // The root of all cgroups, the only one without a type, may have both.
        if !self.folder.has("cgroup.type")? {
            return Ok(());
        }
        for _ in 0..VACATE_ROUNDS_MAX {
            let inside = self.folder.read_processes()?;
            if inside.is_empty() {
                return Ok(());
            }
            let ours = self.own_processes()?;
            let (ours, others): (Vec<u32>, Vec<u32>) = inside.iter().partition(|pid| ours.contains(pid));
            if !others.is_empty() {
                return Err(self.in_the_way(&others));
            }
            self.move_to_main(&ours)?;
        }
        Err(failure(format!("move the supervisor's processes out of {}", self.path().display()), Errno::BUSY))
    }

    fn own_processes(&self) -> Result<Vec<u32>, Failure> {
        let keeper = std::process::id();
        let mut ours = descendants_of(keeper).map_err(|error| {
            let errno = errno::of(&error, Errno::IO);
            failure("read /proc for the keeper's processes".into(), errno)
        })?;
        ours.extend([keeper, self.supervisor]);
        Ok(ours)
    }

    fn move_to_main(&self, processes: &[u32]) -> Result<(), Failure> {
        let main = match self.folder.make_child(MAIN) {
            Err(Failure { errno: Errno::EXIST, .. }) => self.folder.child(MAIN),
            made => made,
        }?;
        for pid in processes {
            match main.write("cgroup.procs", &pid.to_string()) {
                // It has ended meanwhile.
                Ok(()) | Err(Failure { errno: Errno::SRCH, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn in_the_way(&self, others: &[u32]) -> Failure {
        let name = |pid: &u32| match folder::read_proc(&format!("/proc/{pid}/comm")) {
            Ok(name) => format!("{pid} ({})", name.trim_end().escape_default()),
            // Number 0 is what a process outside of our namespace is shown as.
            Err(_) => pid.to_string(),
        };
        let mut names: Vec<String> = others.iter().take(NAMED_MAX).map(name).collect();
        names.extend((others.len() > NAMED_MAX).then(|| format!("{} more", others.len() - NAMED_MAX)));
        Failure {
            attempted: format!(
                "divide the cgroup {}, in which there are other processes than the supervisor's: {}",
                self.path().display(),
                names.join(", ")
            ),
            errno: Errno::BUSY,
            what_to_do: ALONE,
        }
    }
}

#[cfg(test)]
mod tests;

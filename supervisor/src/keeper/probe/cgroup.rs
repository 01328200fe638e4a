//! Tries the control groups: whether this process may divide its own, and what the parts could be given.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::thread::gettid;

use super::{Ability, check, explain};

/// The leaves that a try makes are called so, and a number.
const LEAF_PREFIX: &str = "bulkhead-probe-";

const MOUNT_IT: &str = "boot with cgroup v2: systemd.unified_cgroup_hierarchy=1";
const DELEGATE: &str = "delegate a cgroup: Delegate=yes in the supervisor's unit, or start it by `systemd-run --user --scope -p Delegate=yes`";
const FREE_IT: &str = "delegate it (Delegate=yes); where cgroup v1 holds it, boot with cgroup v2 alone";

pub(super) fn probe() -> Vec<Ability> {
    let own = own();
    let leaf = own.clone().and_then(|own| Leaf::make(&own));
    let in_leaf = |task: fn(&Leaf) -> Result<(), String>| {
        leaf.as_ref().map_err(Clone::clone).and_then(task).map(|()| None)
    };
    // Without a leaf, nothing is known of what could be done in it.
    let or_delegate = |what_to_do| if leaf.is_ok() { what_to_do } else { DELEGATE };
    let controller = |name| own.clone().and_then(|own| can_enable(&own, name));
    vec![
        Ability::of("cgroup", own.clone().map(|own| Some(own.display().to_string())), MOUNT_IT),
        Ability::of("cgroup leaf", in_leaf(Leaf::takes_processes), DELEGATE),
        Ability::of(
            "cgroup clone",
            in_leaf(Leaf::clone_into),
            or_delegate("run a kernel of 5.7 or later, where nothing bars clone3"),
        ),
        Ability::of("cgroup kill", in_leaf(Leaf::kill), or_delegate("run a kernel of 5.14 or later")),
        Ability::of("cgroup memory", controller("memory"), FREE_IT),
        Ability::of("cgroup pids", controller("pids"), FREE_IT),
        Ability::of("cgroup cpu", controller("cpu"), FREE_IT),
    ]
}

/// The folder of the cgroup that this process is in.
fn own() -> Result<PathBuf, String> {
    let read = |path| fs::read_to_string(path).map_err(|error| format!("failed to read {path}: {error}"));
    let (mounts, cgroups) = (read("/proc/self/mountinfo")?, read("/proc/self/cgroup")?);
    find(&mounts, &cgroups)
        .ok_or_else(|| "no file system of cgroup v2 is mounted that shows our own".to_owned())
}

/// From the lines of `/proc/self/mountinfo` and of `/proc/self/cgroup`.
fn find(mounts: &str, cgroups: &str) -> Option<PathBuf> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        let is_ours = after.split(' ').next() == Some("cgroup2");
        let below = Path::new(own).strip_prefix(root).ok()?;
        // Component by component: to join nothing would leave a slash behind.
        is_ours.then(|| Path::new(place).components().chain(below.components()).collect())
    })
}

/// A cgroup of our own below ours, while this lives.
struct Leaf(PathBuf);

impl Leaf {
    fn make(own: &Path) -> Result<Self, String> {
        let path = own.join(format!("{LEAF_PREFIX}{}", gettid().as_raw_nonzero()));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(format!("failed to make a cgroup in {}: {error}", own.display())),
        }
    }

    fn takes_processes(&self) -> Result<(), String> {
        let path = self.0.join("cgroup.procs");
        let opened = fs::OpenOptions::new().write(true).open(&path);
        opened.map(drop).map_err(|error| format!("failed to open {}: {error}", path.display()))
    }

    fn kill(&self) -> Result<(), String> {
        fs::write(self.0.join("cgroup.kill"), "1")
            .map_err(|error| format!("failed to write cgroup.kill: {error}"))
    }

    /// Starts a process in there.
    fn clone_into(&self) -> Result<(), String> {
        let folder = File::open(&self.0).map_err(|error| error.to_string())?;
        let pid = clone3_into(&folder).map_err(explain)?;
        // SAFETY: the number is that of a child that ends at once, and the status is not asked for.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) };
        Ok(())
    }
}

impl Drop for Leaf {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0); // Empty: whoever was in there has been waited for.
    }
}

/// What `clone3(2)` takes.
#[repr(C)]
#[derive(Default)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Starts a process in this cgroup, which ends at once.
fn clone3_into(cgroup: &File) -> Result<libc::pid_t, Errno> {
    const CLONE_INTO_CGROUP: u64 = 1 << 33;
    let arguments = CloneArguments {
        flags: CLONE_INTO_CGROUP,
        exit_signal: libc::SIGCHLD as u64,
        cgroup: cgroup.as_raw_fd() as u64,
        ..CloneArguments::default()
    };
    // SAFETY: like a fork, with a copy of all memory; the child only exits.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &arguments, size_of::<CloneArguments>()) };
    if pid == 0 {
        // SAFETY: ends the process, without a thing being run that the parent registered.
        unsafe { libc::_exit(0) };
    }
    check(pid).map(|()| pid as libc::pid_t)
}

/// Whether the parts of this cgroup could be given such a limit. Switches it on and off again for that.
fn can_enable(own: &Path, controller: &str) -> Result<Option<String>, String> {
    let lists = |file: &str| -> Result<bool, String> {
        let text =
            fs::read_to_string(own.join(file)).map_err(|error| format!("failed to read {file}: {error}"))?;
        Ok(text.split_whitespace().any(|word| word == controller))
    };
    if !lists("cgroup.controllers")? {
        return Err(format!("{} has no such controller", own.display()));
    }
    let switch = own.join("cgroup.subtree_control");
    if lists("cgroup.subtree_control")? {
        return Ok(None);
    }
    match fs::write(&switch, format!("+{controller}")) {
        Ok(()) => {
            let _ = fs::write(&switch, format!("-{controller}")); // In use by now: then not for us to take.
            Ok(None)
        }
        // A cgroup has limits on its parts or processes, not both.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Ok(Some("once no process is in this cgroup itself".to_owned()))
        }
        Err(error) => Err(format!("failed to write {}: {error}", switch.display())),
    }
}

/// The leaves that there are of this process.
#[cfg(test)]
pub(super) fn leaves() -> Vec<String> {
    let Ok(own) = own() else { return Vec::new() };
    let names = fs::read_dir(own).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let ours = format!("{LEAF_PREFIX}{}", gettid().as_raw_nonzero());
    names.filter(|name| *name == ours).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_found_below_whatever_is_mounted() {
        let mounts = "24 1 0:22 / /proc rw - proc proc rw\n\
            30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
            31 23 0:27 /a /sys/fs/cgroup rw,nosuid shared:10 - cgroup2 cgroup2 rw\n";
        let find = |own: &str| find(mounts, &format!("4:memory:/x\n0::{own}\n"));
        assert_eq!(find("/a/b"), Some("/sys/fs/cgroup/b".into()));
        assert_eq!(find("/a").unwrap().as_os_str(), "/sys/fs/cgroup");
        assert_eq!(find("/c"), None);
    }
}

//! Determines for `probe` whether this process can create child groups in its own control group, and which controllers
//! the child groups can use. `confine::cgroup` creates the groups of workers.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use bulkhead_linux::wait::wait_for_exit_code;
use rustix::thread::gettid;

use super::error_text;
use crate::confine::cgroup::{self, CONTROLLER_ADVICE, DELEGATE_ADVICE, MOUNT_ADVICE};
use crate::protocol::LayerSupport;

/// Name prefix of the control groups created by trials. The thread ID follows the prefix.
const LEAF_PREFIX: &str = "bulkhead-probe-";

pub(super) fn probe() -> Vec<LayerSupport> {
    let own = own_group();
    let leaf = own.clone().and_then(|own| ProbeLeaf::create(&own));
    let in_leaf = |task: fn(&ProbeLeaf) -> Result<(), String>| {
        leaf.as_ref().map_err(Clone::clone).and_then(task).map(|()| None)
    };
    // If no leaf group could be created, all trials that need a leaf group failed for this reason.
    let or_delegate = |what_to_do| if leaf.is_ok() { what_to_do } else { DELEGATE_ADVICE };
    let controller = |name| own.clone().and_then(|own| can_enable(&own, name));
    vec![
        LayerSupport::of("cgroup", own.clone().map(|own| Some(own.display().to_string())), MOUNT_ADVICE),
        LayerSupport::of("cgroup leaf", in_leaf(ProbeLeaf::accepts_processes), DELEGATE_ADVICE),
        LayerSupport::of(
            "cgroup clone",
            in_leaf(ProbeLeaf::clone_into),
            or_delegate("run kernel 5.7 or later, and allow clone3 in seccomp filters"),
        ),
        LayerSupport::of("cgroup kill", in_leaf(ProbeLeaf::kill), or_delegate("run kernel 5.14 or later")),
        LayerSupport::of("cgroup memory", controller("memory"), CONTROLLER_ADVICE),
        LayerSupport::of("cgroup pids", controller("pids"), CONTROLLER_ADVICE),
        LayerSupport::of("cgroup cpu", controller("cpu"), CONTROLLER_ADVICE),
    ]
}

fn own_group() -> Result<PathBuf, String> {
    cgroup::root_path()
        .map_err(|failure| format!("failed to {}: {}", failure.attempted, error_text(failure.errno)))
}

/// A child group of this process's control group. Dropping this value removes the group.
struct ProbeLeaf(PathBuf);

impl ProbeLeaf {
    fn create(own: &Path) -> Result<Self, String> {
        let path = own.join(format!("{LEAF_PREFIX}{}", gettid().as_raw_nonzero()));
        match fs::create_dir(&path) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(format!("failed to create a cgroup in {}: {error}", own.display())),
        }
    }

    fn accepts_processes(&self) -> Result<(), String> {
        let path = self.0.join("cgroup.procs");
        let opened = fs::OpenOptions::new().write(true).open(&path);
        opened.map(drop).map_err(|error| format!("failed to open {}: {error}", path.display()))
    }

    fn kill(&self) -> Result<(), String> {
        fs::write(self.0.join("cgroup.kill"), "1")
            .map_err(|error| format!("failed to write cgroup.kill: {error}"))
    }

    /// Starts a process directly in the group.
    fn clone_into(&self) -> Result<(), String> {
        let folder = File::open(&self.0).map_err(|error| error.to_string())?;
        // SAFETY: the child does nothing but exit.
        let pid = unsafe { cgroup::fork_into(folder.as_fd(), 0) }.map_err(error_text)?;
        if pid == 0 {
            // SAFETY: exits without running the parent's exit handlers.
            unsafe { libc::_exit(0) };
        }
        wait_for_exit_code(pid).map(drop).map_err(error_text)
    }
}

impl Drop for ProbeLeaf {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0); // The group is empty, because its processes have been reaped.
    }
}

/// Checks that the controller can be enabled for child groups of this process's group. Temporarily enables the
/// controller if necessary.
fn can_enable(own: &Path, controller: &str) -> Result<Option<String>, String> {
    let lists = |file: &str| -> Result<bool, String> {
        let text =
            fs::read_to_string(own.join(file)).map_err(|error| format!("failed to read {file}: {error}"))?;
        Ok(text.split_whitespace().any(|word| word == controller))
    };
    if !lists("cgroup.controllers")? {
        return Err(format!("the controller is not available in {}", own.display()));
    }
    let switch = own.join("cgroup.subtree_control");
    if lists("cgroup.subtree_control")? {
        return Ok(None);
    }
    match fs::write(&switch, format!("+{controller}")) {
        Ok(()) => {
            let _ = fs::write(&switch, format!("-{controller}")); // Fails if the controller is already in use.
            Ok(None)
        }
        // The kernel does not allow a control group to contain processes and also have child groups with limits.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            Ok(Some("available once the cgroup itself contains no processes".to_owned()))
        }
        Err(error) => Err(format!("failed to write {}: {error}", switch.display())),
    }
}

/// Returns the names of groups that trials on this thread have left behind.
#[cfg(test)]
pub(super) fn leaves() -> Vec<String> {
    let Ok(own) = own_group() else { return Vec::new() };
    let names = fs::read_dir(own).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let ours = format!("{LEAF_PREFIX}{}", gettid().as_raw_nonzero());
    names.filter(|name| *name == ours).collect()
}

//! Accesses a control group as a folder of small files. Limits the size of each read and write, and names the file in
//! each error. `cgroup`, `leaf` and `limits` decide which files they read and write.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bulkhead_linux::errno;
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::parse;
use super::{Failure, MOUNT_ADVICE, failure};

/// Maximum size of a control group's interface file, in bytes. The longest such file is `cgroup.procs`, the list of
/// processes.
const FILE_BYTES_MAX: usize = 64 * 1024;

/// Maximum size of a file in `/proc`, in bytes. The longest such file is the list of mounts, which has thousands of
/// lines on busy machines.
const PROC_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Maximum depth of nested groups, and maximum number of steps between levels in one call. Without these limits, a
/// process that keeps creating groups could make a call run forever.
const DEPTH_MAX: usize = 1024;
const STEPS_MAX: usize = 4 * DEPTH_MAX;

/// Magic number of the cgroup v2 file system.
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// Mode of a new group's folder. Only the owner can change the group, but all users can read it.
const GROUP_MODE: Mode = Mode::from_raw_mode(0o755);

/// An open control group.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    descriptor: OwnedFd,
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |errno| failure(format!("open the cgroup {}", path.display()), errno);
        let descriptor = open_folder(rustix::fs::CWD, path).map_err(failed)?;
        let system = rustix::fs::fstatfs(&descriptor).map_err(failed)?;
        // The cast is needed because the type of the field differs between architectures.
        if system.f_type as u64 != CGROUP2_MAGIC {
            let attempted =
                format!("find cgroup v2 at {}, where another file system is mounted", path.display());
            return Err(Failure { attempted, errno: Errno::NODEV, advice: MOUNT_ADVICE });
        }
        Ok(Self { path: path.to_owned(), descriptor })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the parent group.
    pub(super) fn parent(&self) -> Result<Self, Failure> {
        let path = self.path.parent().unwrap_or(&self.path);
        Self::open(path)
    }

    pub(super) fn child(&self, name: &str) -> Result<Self, Failure> {
        let path = self.path.join(name);
        match open_folder(&self.descriptor, name) {
            Ok(descriptor) => Ok(Self { path, descriptor }),
            Err(errno) => Err(failure(format!("open the cgroup {}", path.display()), errno)),
        }
    }

    pub(super) fn make_child(&self, name: &str) -> Result<Self, Failure> {
        match rustix::fs::mkdirat(&self.descriptor, name, GROUP_MODE) {
            Ok(()) => self.child(name),
            Err(errno) => Err(self.failed("create the cgroup", name, errno)),
        }
    }

    /// Returns the names of at most `max` child groups for which `is_wanted` returns true.
    pub(super) fn children(
        &self,
        max: usize,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, Failure> {
        let failed = |errno| self.failed("list", ".", errno);
        let mut wanted = Vec::new();
        for name in child_names(&self.descriptor).map_err(failed)? {
            let name = name.map_err(failed)?.into_string();
            wanted.extend(name.ok().filter(|name| is_wanted(name)));
            if wanted.len() == max {
                break;
            }
        }
        Ok(wanted)
    }

    pub(super) fn has_file(&self, file: &str) -> Result<bool, Failure> {
        match rustix::fs::statat(&self.descriptor, file, AtFlags::empty()) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(self.failed("look for", file, errno)),
        }
    }

    pub(super) fn check_writable(&self, file: &str) -> Result<(), Failure> {
        rustix::fs::accessat(&self.descriptor, file, Access::WRITE_OK, AtFlags::EACCESS)
            .map_err(|errno| self.failed("get write access to", file, errno))
    }

    pub(super) fn write(&self, file: &str, value: &str) -> Result<(), Failure> {
        let written =
            rustix::fs::openat(&self.descriptor, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                .and_then(|file| rustix::io::retry_on_intr(|| rustix::io::write(&file, value.as_bytes())));
        match written {
            Ok(count) if count == value.len() => Ok(()),
            Ok(_) => Err(self.failed(&format!("write `{value}` to"), file, Errno::IO)),
            Err(errno) => Err(self.failed(&format!("write `{value}` to"), file, errno)),
        }
    }

    pub(super) fn read<T>(&self, file: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, Failure> {
        let failed = |errno| self.failed("read", file, errno);
        let bytes = read_all(&self.descriptor, file, FILE_BYTES_MAX).map_err(failed)?;
        let text = String::from_utf8(bytes).map_err(|_| self.failed("parse", file, Errno::ILSEQ))?;
        parse(&text).ok_or_else(|| self.failed("parse", file, Errno::BADMSG))
    }

    pub(super) fn read_words(&self, file: &str) -> Result<Vec<String>, Failure> {
        self.read(file, parse::words)
    }

    pub(super) fn read_processes(&self) -> Result<Vec<u32>, Failure> {
        self.read("cgroup.procs", parse::processes)
    }

    /// Removes a child group and all groups inside it; see [`Folder::remove`].
    pub(super) fn remove_child(&self, name: &str) -> Result<bool, Failure> {
        match self.child(name) {
            Ok(child) => child.remove_from(&self.descriptor),
            Err(Failure { errno: Errno::NOENT, .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Removes this group and all groups in it, innermost first. Returns `false` if a process is still running in one
    /// of the groups, or if there are more groups than one call can remove. In the second case, call this function
    /// again to continue.
    pub(super) fn remove(&self) -> Result<bool, Failure> {
        match open_folder(&self.descriptor, c"..") {
            Ok(parent) => self.remove_from(&parent),
            Err(errno) if is_gone(errno) => Ok(true),
            Err(errno) => Err(self.failed("open the cgroup above", ".", errno)),
        }
    }

    fn remove_from(&self, parent: &OwnedFd) -> Result<bool, Failure> {
        let failed = |errno| self.failed("remove", ".", errno);
        let Some(name) = self.path.file_name() else { return Err(failed(Errno::INVAL)) };
        let remove = || match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::BUSY) => Ok(false),
            Err(errno) if is_gone(errno) => Ok(true),
            Err(errno) => Err(failed(errno)),
        };
        if remove()? {
            return Ok(true);
        }
        match self.read("cgroup.events", parse::is_populated) {
            Ok(true) => return Ok(false),
            Err(error) if !is_gone(error.errno) => return Err(error),
            Ok(false) | Err(_) => {}
        }
        match remove_children(&self.descriptor) {
            Ok(true) => remove(),
            // Removing a nested group can fail because another keeper is removing the same groups.
            Ok(false) | Err(Errno::NOENT | Errno::NODEV) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    fn failed(&self, attempted: &str, file: &str, errno: Errno) -> Failure {
        let path = if file == "." { self.path.clone() } else { self.path.join(file) };
        failure(format!("{attempted} {}", path.display()), errno)
    }
}

/// Reads a file in `/proc`. Replaces invalid UTF-8, because parts of the text come from other processes.
pub(super) fn read_proc(path: &str) -> Result<String, Failure> {
    let read = read_all(rustix::fs::CWD, path, PROC_BYTES_MAX);
    let bytes = read.map_err(|errno| failure(format!("read {path}"), errno))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn open_folder(at: impl AsFd, path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

/// Reads a whole file. Fails if the file contains more than `max` bytes.
fn read_all(at: impl AsFd, path: &str, max: usize) -> Result<Vec<u8>, Errno> {
    let file = rustix::fs::openat(at, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let read = File::from(file).take(max as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| errno::from_io(&error, Errno::IO))?;
    if bytes.len() > max { Err(Errno::FBIG) } else { Ok(bytes) }
}

/// Returns true if this error means that the group no longer exists.
fn is_gone(errno: Errno) -> bool {
    matches!(errno, Errno::NOENT | Errno::NODEV)
}

fn child_names(folder: &OwnedFd) -> Result<impl Iterator<Item = Result<CString, Errno>> + use<>, Errno> {
    let entries = rustix::fs::Dir::read_from(folder)?;
    let is_dots = |name: &CStr| name == c"." || name == c"..";
    Ok(entries.filter_map(move |entry| match entry {
        Ok(entry) if entry.file_type() != FileType::Directory || is_dots(entry.file_name()) => None,
        Ok(entry) => Some(Ok(entry.file_name().to_owned())),
        Err(errno) => Some(Err(errno)),
    }))
}

/// Removes all groups below `top`. Descends to a group without children, goes up one level and removes that
/// group, so that paths stay short enough for the kernel. Stores only the names of the groups on the way
/// down. Returns `false` if groups are left.
fn remove_children(top: &OwnedFd) -> Result<bool, Errno> {
    let mut here = top.try_clone().map_err(|_| Errno::MFILE)?;
    let mut path_down: Vec<CString> = Vec::new();
    for _ in 0..STEPS_MAX {
        if let Some(name) = child_names(&here)?.next().transpose()? {
            if path_down.len() == DEPTH_MAX {
                return Err(Errno::LOOP);
            }
            here = open_folder(&here, &name)?;
            path_down.push(name);
            continue;
        }
        let Some(name) = path_down.pop() else { return Ok(true) };
        here = open_folder(&here, c"..")?;
        match rustix::fs::unlinkat(&here, &name, AtFlags::REMOVEDIR) {
            Ok(()) => {}
            Err(Errno::BUSY) => return Ok(false),
            Err(errno) if is_gone(errno) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

//! A private root folder for a worker, assembled from parts of the system's root folder. Nearly all parts are
//! read-only.
//!
//! The keeper decides the layout before the fork. The child makes the mounts in a private mount namespace,
//! with system calls only.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use bulkhead_linux::errno::check;
use rustix::fs::Mode;
use rustix::io::Errno;

use super::super::progress::StepError;
use super::super::{ROOT_STEP, SpawnError};
use super::proc_entries;
use super::{Access, ENTRIES_MAX, mount, restrict, too_many_entries};
use crate::confine::paths;
use crate::confine::reach::{GrantedPaths, Unreachable};
use crate::protocol::confinement::{Identity, Layers, TemporaryFiles};

/// Path at which the system's root folder is available while the private root folder is assembled. A granted path must
/// not be inside this path.
const OLD_ROOT: &CStr = c"/.bulkhead-old-root";
const OLD_PROC: &CStr = c"/.bulkhead-old-root/proc";
const OLD_NULL: &CStr = c"/.bulkhead-old-root/dev/null";

/// Name of [`OLD_ROOT`] in the new root folder.
const OLD_ROOT_NAME: &CStr = c".bulkhead-old-root";

/// Folder at which the new root folder is first mounted. This folder exists on every system, and its contents are not
/// needed until the root is changed.
const STAGING_FOLDER: &CStr = c"/proc";

/// Mount options of the file system that contains the folders and links of the new root folder. This file system is
/// made read-only at the end.
const ROOT_OPTIONS: &CStr = c"size=1m,nr_inodes=65536,mode=0755";

/// A private `/tmp` can contain one file for each `BYTES_PER_FILE` bytes of its size. The limit is never lower than
/// `FILES_MIN`.
const BYTES_PER_FILE: u64 = 4096;
const FILES_MIN: u64 = 1024;

/// Links that programs expect in `/dev`, each with its target and its name. `/dev/shm` links to the private `/tmp`.
const LINKS: [(&CStr, &CStr); 5] = [
    (c"/proc/self/fd", c"/dev/fd"),
    (c"/proc/self/fd/0", c"/dev/stdin"),
    (c"/proc/self/fd/1", c"/dev/stdout"),
    (c"/proc/self/fd/2", c"/dev/stderr"),
    (c"/tmp", c"/dev/shm"),
];

/// A step in creating a root folder or the contents of a covered folder.
pub(crate) enum LayoutStep {
    Folder(CString),
    File(CString),
    Link {
        to: CString,
        at: CString,
    },
    Bind {
        from: CString,
        at: CString,
        access: Access,
    },
    /// Hides the contents of a file or folder.
    Hide {
        at: CString,
        is_folder: bool,
    },
}

/// All steps for creating a root folder. The steps are decided before the fork.
pub(crate) struct PrivateRoot {
    steps: Vec<LayoutStep>,
    /// Folders that are not shown as a whole. Instead, the entries of these folders are shown one by one.
    expanded: Vec<CString>,
    has_pid_namespace: bool,
    tmp_options: Option<CString>,
}

/// Maximum number of entries to show individually if a folder contains withheld paths. A folder with more entries is
/// shown as a whole, and its withheld paths are hidden.
const SHOWN_ENTRIES_MAX: usize = 512;

/// Lowest step number that has the same meaning for every root folder. Lower numbers are indexes into
/// [`PrivateRoot::steps`].
const COMMON_STEPS_FIRST: u32 = 1 << 16;
const COMMON_STEPS: [&str; 6] =
    ["make mounts private", "change the root", "mount /proc", "mount /tmp", "make /dev", "close the root"];

impl PrivateRoot {
    /// Decides the layout of the root folder. Fails if a configured path cannot be shown.
    pub(crate) fn prepare(
        granted: &GrantedPaths<'_>,
        withheld: &[&Path],
        unreachable: &Unreachable,
        layers: &Layers,
    ) -> Result<Self, SpawnError> {
        let mut layout = Layout::default();
        for path in paths::SYSTEM_FOLDERS {
            layout.add_system_folder(Path::new(path));
        }
        for path in paths::world_readable() {
            layout.add_world_readable_file(&path);
        }
        for path in paths::DEVICES.iter().chain(&paths::RANDOM_DEVICES) {
            layout.bind(Path::new(path), Access::Device);
        }
        let inner_links = layout.add_granted(granted, withheld, unreachable)?;
        layout.check_names(granted.directory)?;
        let expanded = layout.expanded.iter().filter_map(|folder| c_string(folder)).collect();
        let mut steps = layout.steps();
        for folder in &layout.expanded {
            steps.extend(folders_to(folder).into_iter().map(LayoutStep::Folder));
        }
        // Creates the working directory, which must exist even if the worker cannot access its contents.
        if paths::is_fixed(granted.directory, granted.write) {
            steps.extend(folders_to(granted.directory).into_iter().map(LayoutStep::Folder));
        }
        for (at, to) in inner_links {
            if let (None, Some(at), Some(to)) = (layout.access_above(&at), c_string(&at), c_string(&to)) {
                steps.push(LayoutStep::Link { to, at });
            }
        }
        for path in withheld {
            steps.extend(layout.hide(path));
        }
        let tmp_options = match layers.temporary {
            TemporaryFiles::PrivateTmp(bytes) => tmp_options(bytes, layers.identity),
            TemporaryFiles::None | TemporaryFiles::Folder | TemporaryFiles::MountedTmpfs(_) => None,
        };
        Ok(Self { steps, expanded, has_pid_namespace: layers.namespaces.pid, tmp_options })
    }

    /// Returns the folders whose entries are shown individually. The Landlock rules must not contain these folders.
    pub(crate) fn expanded(&self) -> &[CString] {
        &self.expanded
    }

    /// Describes a step for an error message.
    pub(crate) fn describe(&self, step: u32) -> String {
        if let Some(common) = step.checked_sub(COMMON_STEPS_FIRST) {
            return COMMON_STEPS.get(common as usize).copied().unwrap_or_default().to_owned();
        }
        let text = |path: &CString| path.to_string_lossy().into_owned();
        match self.steps.get(step as usize) {
            Some(LayoutStep::Folder(at) | LayoutStep::File(at)) => format!("make {}", text(at)),
            Some(LayoutStep::Link { at, .. }) => format!("make the link {}", text(at)),
            Some(LayoutStep::Bind { at, .. }) => format!("show {}", text(at)),
            Some(LayoutStep::Hide { at, .. }) => format!("hide {}", text(at)),
            None => String::new(),
        }
    }

    /// Makes this folder the root folder of the calling process, which must be the only process in its mount
    /// namespace. In a new PID namespace, the calling process must be the first process.
    pub(crate) fn enter(&self) -> Result<(), StepError> {
        let common = |number, result: Result<(), Errno>| {
            result.map_err(|errno| StepError { errno, detail: COMMON_STEPS_FIRST + number })
        };
        common(0, mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE, None))?;
        common(1, change_root())?;
        // `/proc` and `/tmp` are mounted before the system's paths are shown, because some of these paths can
        // be inside them.
        common(2, self.mount_proc())?;
        common(3, self.mount_tmp())?;
        for (number, step) in self.steps.iter().enumerate() {
            step.execute().map_err(|errno| StepError { errno, detail: number as u32 })?;
        }
        common(4, LINKS.iter().try_for_each(|(to, at)| ignore_existing(rustix::fs::symlink(*to, *at))))?;
        common(5, close_root())
    }

    fn mount_proc(&self) -> Result<(), Errno> {
        make_folder(c"/proc")?;
        if !self.has_pid_namespace {
            return bind(OLD_PROC, c"/proc", Access::Read);
        }
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_RDONLY;
        mount(Some(c"proc"), c"/proc", Some(c"proc"), flags, None)?;
        proc_entries::hide()
    }

    fn mount_tmp(&self) -> Result<(), Errno> {
        make_folder(c"/tmp")?;
        let Some(options) = &self.tmp_options else { return Ok(()) };
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
        mount(Some(c"tmpfs"), c"/tmp", Some(c"tmpfs"), flags, Some(options))
    }
}

impl LayoutStep {
    pub(crate) fn execute(&self) -> Result<(), Errno> {
        match self {
            Self::Folder(at) => make_folder(at),
            Self::File(at) => {
                let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::CLOEXEC;
                rustix::fs::open(at, flags, Mode::from_raw_mode(0o444)).map(drop)
            }
            Self::Link { to, at } => ignore_existing(rustix::fs::symlink(to, at)),
            Self::Bind { from, at, access } => bind(from, at, *access),
            // Nothing needs to be hidden if a parent folder denies access. The worker cannot get access later
            // either, because the Landlock rules also apply.
            Self::Hide { at, .. }
                if rustix::fs::access(at, rustix::fs::Access::EXISTS) == Err(Errno::ACCESS) =>
            {
                Ok(())
            }
            Self::Hide { at, is_folder: false } => mount(Some(OLD_NULL), at, None, libc::MS_BIND, None),
            Self::Hide { at, is_folder: true } => {
                let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_RDONLY;
                mount(Some(c"tmpfs"), at, Some(c"tmpfs"), flags, Some(c"size=4k,nr_inodes=2,mode=0555"))
            }
        }
    }
}

/// Contents of the root folder. Ordered by path, so that each folder comes before its contents.
#[derive(Default)]
struct Layout {
    binds: BTreeMap<PathBuf, (PathBuf, Access)>,
    links: BTreeMap<PathBuf, PathBuf>,
    /// Folders that are not shown as a whole. Instead, the entries of these folders are shown one by one.
    expanded: BTreeSet<PathBuf>,
}

impl Layout {
    /// Adds a system folder. If the path is a symbolic link on this system, adds the link instead.
    fn add_system_folder(&mut self, path: &Path) {
        match std::fs::read_link(path) {
            Ok(to) => drop(self.links.insert(path.to_owned(), to)),
            Err(_) => self.bind(path, Access::Read),
        }
    }

    /// Adds the granted paths. Returns the links in folders whose entries are granted one by one, each with its
    /// target. Fails if a path does not exist.
    fn add_granted(
        &mut self,
        granted: &GrantedPaths<'_>,
        withheld: &[&Path],
        unreachable: &Unreachable,
    ) -> Result<Vec<(PathBuf, PathBuf)>, SpawnError> {
        let mut links = Vec::new();
        for folder in paths::program_folders(granted.programs, Some(granted.directory), granted.write) {
            links.extend(self.add_program_folder(&folder, granted, withheld, unreachable)?);
        }
        let named = granted.read.iter().map(|path| (*path, Access::Read));
        for (path, access) in named.chain(granted.write.iter().map(|path| (*path, Access::Write))) {
            if !path.exists() {
                let step = format!("{ROOT_STEP}: show {}", path.display());
                return Err(SpawnError::new(&step, Errno::NOENT));
            }
            if paths::is_fixed(path, granted.write) {
                if access == Access::Read && is_expanded(path, unreachable) {
                    links.extend(self.add_program_folder(path, granted, withheld, unreachable)?);
                } else {
                    self.bind(path, access);
                }
            }
        }
        Ok(links)
    }

    /// Checks that no path is inside [`OLD_ROOT`]. Otherwise, the child would change the system's root folder.
    fn check_names(&self, directory: &Path) -> Result<(), SpawnError> {
        let old_root = Path::new(OsStr::from_bytes(OLD_ROOT.to_bytes()));
        let real_directory = std::fs::canonicalize(directory).ok();
        let shown = self.binds.keys().chain(&self.expanded).chain(&real_directory).map(PathBuf::as_path);
        match shown.chain([directory]).find(|path| path.starts_with(old_root)) {
            None => Ok(()),
            Some(path) => {
                let (path, old_root) = (path.display(), old_root.display());
                let step = format!(
                    "{ROOT_STEP}: show {path}: Bulkhead needs the name {old_root}; rename the directory"
                );
                Err(SpawnError::new(&step, Errno::EXIST))
            }
        }
    }

    /// Makes a path visible under the given name and under its real path.
    fn bind(&mut self, path: &Path, access: Access) {
        let Ok(real) = std::fs::canonicalize(path) else { return };
        if real == Path::new("/") {
            return paths::root_entries().iter().for_each(|entry| self.bind(entry, access));
        }
        for place in [path.to_path_buf(), real.clone()] {
            let entry = self.binds.entry(place).or_insert((real.clone(), access));
            entry.1 = entry.1.max(access);
        }
    }

    /// Adds a folder. If paths inside the folder are withheld, adds the other entries individually. Mounting something
    /// over a withheld path would not be enough, because a file that later takes the place of the withheld one would be
    /// visible. The entries are also added individually if the folder denies access to the worker's user. Returns the
    /// links in the folder, each with its target. Fails if a folder that denies access has too many entries.
    fn add_program_folder(
        &mut self,
        folder: &Path,
        granted: &GrantedPaths<'_>,
        withheld: &[&Path],
        unreachable: &Unreachable,
    ) -> Result<Vec<(PathBuf, PathBuf)>, SpawnError> {
        let entries = |folder: &Path| {
            let entries = std::fs::read_dir(folder).ok()?.flatten();
            let is_link = |path: &PathBuf| path.is_symlink();
            Some(entries.map(|entry| entry.path()).filter(|path| !is_link(path)).collect::<Vec<_>>())
        };
        let is_expanded = is_expanded(folder, unreachable);
        let parts = match paths::grantable_parts(folder, withheld, granted.write) {
            Ok(parts) if parts == [folder] && is_expanded => entries(folder),
            Ok(parts) if parts != [folder] => Some(parts),
            _ => None,
        };
        let entries_max = if is_expanded { ENTRIES_MAX } else { SHOWN_ENTRIES_MAX };
        let parts = match parts {
            Some(parts) if parts.len() <= entries_max => parts,
            Some(_) if is_expanded => return Err(too_many_entries(folder)),
            _ => {
                self.bind(folder, Access::Read);
                return Ok(Vec::new());
            }
        };
        parts.iter().for_each(|part| self.bind(part, Access::Read));
        let expanded: BTreeSet<&Path> =
            parts.iter().filter_map(|part| part.parent()).chain([folder]).collect();
        self.expanded.extend(expanded.iter().map(|folder| folder.to_path_buf()));
        let entries = expanded.into_iter().filter_map(|folder| std::fs::read_dir(folder).ok());
        let links = entries.flatten().flatten().filter_map(|entry| {
            let path = entry.path();
            Some((path.clone(), std::fs::read_link(path).ok()?))
        });
        Ok(links.collect())
    }

    /// Adds a system file under the given name, if every user can read the file.
    fn add_world_readable_file(&mut self, path: &Path) {
        use std::os::unix::fs::PermissionsExt;
        let is_world_readable = |found: &std::fs::Metadata| found.permissions().mode() & 0o004 != 0;
        if let Ok(real) = std::fs::canonicalize(path)
            && std::fs::metadata(&real).is_ok_and(|found| is_world_readable(&found))
        {
            self.binds.insert(path.to_owned(), (real, Access::Read));
        }
    }

    fn steps(&self) -> Vec<LayoutStep> {
        let mut made = BTreeSet::new();
        let mut steps: Vec<LayoutStep> = self
            .links
            .iter()
            .filter_map(|(at, to)| Some(LayoutStep::Link { to: c_string(to)?, at: c_string(at)? }))
            .collect();
        for (at, (from, access)) in &self.binds {
            let above = self.access_above(at);
            // Skips a path that is already visible, or that is reached through a link.
            if above.is_some_and(|above| *access <= above) || self.is_behind_link(at) {
                continue;
            }
            let (Some(source), Some(place)) = (old_path(from), c_string(at)) else { continue };
            if above.is_none() {
                steps.extend(
                    folders_above(at).into_iter().filter(|f| made.insert(f.clone())).map(LayoutStep::Folder),
                );
                let node = place.clone();
                steps.push(if from.is_dir() { LayoutStep::Folder(node) } else { LayoutStep::File(node) });
            }
            steps.push(LayoutStep::Bind { from: source, at: place, access: *access });
        }
        steps
    }

    /// Returns the access that was granted to the nearest visible folder above this path, or `None` if there is no such
    /// folder.
    fn access_above(&self, path: &Path) -> Option<Access> {
        path.ancestors().skip(1).find_map(|above| {
            let (_, access) = self.binds.get(above)?;
            (!self.is_behind_link(above)).then_some(*access)
        })
    }

    fn is_behind_link(&self, path: &Path) -> bool {
        path.ancestors().any(|above| self.links.contains_key(above))
    }

    /// Hides a path everywhere it would be visible, unless access to the path was granted explicitly.
    fn hide(&self, path: &Path) -> Vec<LayoutStep> {
        let Ok(real) = std::fs::canonicalize(path) else { return Vec::new() };
        let is_folder = real.is_dir();
        let places: BTreeSet<PathBuf> = self
            .binds
            .iter()
            .filter(|(at, _)| !self.is_behind_link(at))
            .filter_map(|(at, (from, _))| Some(at.join(real.strip_prefix(from).ok()?)))
            .filter(|at| !self.binds.contains_key(at))
            .collect();
        places.iter().filter_map(|at| Some(LayoutStep::Hide { at: c_string(at)?, is_folder })).collect()
    }
}

/// Returns the mount options of an in-memory file system with this size in bytes.
pub(crate) fn tmp_options(bytes: u64, owner: Option<Identity>) -> Option<CString> {
    let files = (bytes / BYTES_PER_FILE).max(FILES_MIN);
    let owner = owner.map(|own| format!(",uid={},gid={}", own.uid, own.gid)).unwrap_or_default();
    CString::new(format!("size={bytes},nr_inodes={files},mode=0700{owner}")).ok()
}

/// Returns true if the folder's entries are shown individually because the worker's user cannot access the folder
/// itself.
pub(crate) fn is_expanded(folder: &Path, unreachable: &Unreachable) -> bool {
    !unreachable.expanded.is_empty()
        && std::fs::canonicalize(folder).is_ok_and(|real| unreachable.expanded.contains(&real))
}

/// Returns the parent folders of a path, outermost first. Excludes the root folder.
fn folders_above(path: &Path) -> Vec<CString> {
    path.parent().map(folders_to).unwrap_or_default()
}

/// Returns the parent folders of a path, and the path itself. If the path contains `..`, the result includes the
/// folders that the path enters and then leaves.
fn folders_to(path: &Path) -> Vec<CString> {
    let mut folders = Vec::new();
    let mut so_far = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(_) => {
                so_far.push(part);
                folders.extend(c_string(&so_far));
            }
            Component::ParentDir => so_far.push(part),
            _ => {}
        }
    }
    folders
}

pub(crate) fn c_string(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}

/// Returns the path under which a system file can be reached while the new root folder is being assembled.
fn old_path(path: &Path) -> Option<CString> {
    CString::new([OLD_ROOT.to_bytes(), path.as_os_str().as_bytes()].concat()).ok()
}

/// Mounts a new `/proc` over the system's `/proc`, for the PID namespace of this process, which must be the first
/// process in this namespace. Only this process and its descendants see the new `/proc`.
pub(crate) fn mount_private_proc() -> Result<(), Errno> {
    // Later unmounts in the system propagate to this namespace, but mounts in this namespace do not propagate
    // back.
    mount(None, c"/", None, libc::MS_REC | libc::MS_SLAVE, None)?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(Some(c"proc"), c"/proc", Some(c"proc"), flags, None)?;
    let mut first = [std::mem::MaybeUninit::uninit(); 16];
    let (own, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, c"/proc/self", &mut first[..])?;
    if own == b"1" { Ok(()) } else { Err(Errno::PERM) }
}

/// Mounts an empty file system as the root. The previous root becomes the folder [`OLD_ROOT`] in the new root.
fn change_root() -> Result<(), Errno> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    mount(Some(c"tmpfs"), STAGING_FOLDER, Some(c"tmpfs"), flags, Some(ROOT_OPTIONS))?;
    rustix::process::chdir(STAGING_FOLDER)?;
    make_folder(OLD_ROOT_NAME)?;
    // SAFETY: the strings are NUL-terminated.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), OLD_ROOT_NAME.as_ptr()) } as i32)?;
    rustix::process::chdir(c"/")
}

/// Unmounts the old root, and makes the new root read-only.
fn close_root() -> Result<(), Errno> {
    // SAFETY: the string is NUL-terminated.
    check(unsafe { libc::umount2(OLD_ROOT.as_ptr(), libc::MNT_DETACH) })?;
    rustix::fs::rmdir(OLD_ROOT)?;
    let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
    mount(None, c"/", None, flags, None)
}

fn make_folder(at: &CStr) -> Result<(), Errno> {
    ignore_existing(rustix::fs::mkdir(at, Mode::from_raw_mode(0o755)))
}

fn ignore_existing(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::EXIST) => Ok(()),
        result => result,
    }
}

/// Makes `from`, with all mounts below it, visible at `at` as well.
fn bind(from: &CStr, at: &CStr, access: Access) -> Result<(), Errno> {
    mount(Some(from), at, None, libc::MS_BIND | libc::MS_REC, None)?;
    restrict(at, access)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_the_old_root_are_rejected() {
        for path in [OLD_PROC, OLD_NULL] {
            assert!(path.to_bytes().starts_with(OLD_ROOT.to_bytes()));
        }
        let mut layout = Layout::default();
        layout.bind(Path::new("/usr"), Access::Read);
        assert!(layout.check_names(Path::new("/old")).is_ok());
        for path in ["/.bulkhead-old-root", "/.bulkhead-old-root/data"] {
            assert_eq!(layout.check_names(Path::new(path)).unwrap_err().errno, Errno::EXIST);
        }
        let hidden = PathBuf::from("/.bulkhead-old-root/data");
        layout.binds.insert(hidden, (PathBuf::from("/usr"), Access::Read));
        let error = layout.check_names(Path::new("/usr")).unwrap_err();
        assert!(
            error.step.contains("show /.bulkhead-old-root/data: Bulkhead needs the name"),
            "{}",
            error.step
        );
    }
}

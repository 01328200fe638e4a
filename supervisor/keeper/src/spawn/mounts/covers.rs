//! Makes granted paths visible that the worker's user cannot reach in the system's root folder.
//!
//! In a private mount namespace, each folder that denies access to the user is covered with a new folder that
//! contains only the granted paths. The keeper decides the layout before the fork. The child makes the mounts
//! while it is still root, with system calls only.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::super::SpawnError;
use super::super::progress::StepError;
use super::root::{LayoutStep, c_string, is_expanded};
use super::{Access, ENTRIES_MAX, mount, restrict, too_many_entries};
use crate::confine::landlock::Ruleset;
use crate::confine::reach::{Purpose, Unreachable};
use crate::protocol::confinement::Identity;
use bulkhead_linux::errno::{self, check};

/// Maximum number of folders that can be covered by another file system. Each covered folder needs a descriptor in the
/// child.
const COVERS_MAX: usize = 32;

/// Mount options of the file system that covers a folder. This file system contains only folders and mount points. It
/// is made read-only at the end.
const COVER_OPTIONS: &CStr = c"size=1m,nr_inodes=16384,mode=0755";

/// Layout of the file systems that are mounted over folders that the user cannot traverse. Decided before the fork.
pub(crate) struct Covers {
    covers: Vec<CString>,
    /// Folders and files that serve as mount points.
    nodes: Vec<LayoutStep>,
    binds: Vec<Bind>,
    /// Folders that are not shown as a whole. Instead, the entries of these folders are shown one by one.
    expanded: Vec<CString>,
}

struct Bind {
    /// Index of the covered folder that contains the source, or `None` if the source is in the root folder.
    cover: Option<usize>,
    /// Path of the source, relative to the covered folder or to the root folder.
    from: CString,
    at: CString,
    access: Access,
}

/// Lowest step number that has the same meaning in every layout. The meaning of lower numbers depends on the layout.
const COMMON_STEPS_FIRST: u32 = 1 << 16;

impl Covers {
    /// Decides the layout. Returns `None` if the user can reach everything. Fails if a folder cannot be covered, or if
    /// it has too many entries.
    pub(crate) fn prepare(
        unreachable: &Unreachable,
        withheld: &[&Path],
        identity: Option<Identity>,
    ) -> Result<Option<Self>, SpawnError> {
        if unreachable.folders.is_empty() {
            return Ok(None);
        }
        let is_root = |folder: &&PathBuf| folder.as_path() == Path::new("/");
        if let Some(folder) = unreachable.folders.iter().find(is_root).or(unreachable.folders.get(COVERS_MAX))
        {
            return Err(unreachable_folder(folder, identity));
        }
        let withheld_paths: BTreeSet<PathBuf> =
            withheld.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
        let mut folders = BTreeSet::new();
        let mut binds: BTreeMap<PathBuf, (PathBuf, Access)> = BTreeMap::new();
        let mut add = |place: PathBuf, real: PathBuf, access: Access| {
            let entry = binds.entry(place).or_insert((real, access));
            entry.1 = entry.1.max(access);
        };
        for hidden in &unreachable.hidden {
            let is_expanded = unreachable.expanded.contains(&hidden.real);
            match hidden.purpose {
                Purpose::WorkingDirectory | Purpose::MountPoint => drop(folders.insert(hidden.place.clone())),
                Purpose::Read if is_expanded => {
                    folders.insert(hidden.place.clone());
                    for (name, real) in entries(&hidden.real, &withheld_paths)? {
                        add(hidden.place.join(name), real, Access::Read);
                    }
                }
                Purpose::Read => add(hidden.place.clone(), hidden.real.clone(), Access::Read),
                Purpose::Write => add(hidden.place.clone(), hidden.real.clone(), Access::Write),
            }
        }
        Ok(Some(Self::from_paths(unreachable, &folders, &binds)))
    }

    fn from_paths(
        unreachable: &Unreachable,
        folders: &BTreeSet<PathBuf>,
        binds: &BTreeMap<PathBuf, (PathBuf, Access)>,
    ) -> Self {
        let covered = |path: &Path| unreachable.folders.iter().position(|folder| path.starts_with(folder));
        let above = |path: &Path| {
            path.ancestors().skip(1).find_map(|above| binds.get(above)).map(|(_, access)| *access)
        };
        let mut made = BTreeSet::new();
        let mut shown = Self {
            covers: unreachable.folders.iter().filter_map(|folder| c_string(folder)).collect(),
            nodes: Vec::new(),
            binds: Vec::new(),
            expanded: Vec::new(),
        };
        for folder in folders.iter().filter(|folder| above(folder).is_none()) {
            shown.make_folders(unreachable, folder, &mut made);
            if is_expanded(folder, unreachable) {
                shown.expanded.extend(c_string(folder));
            }
        }
        for (place, (real, access)) in binds {
            let above = above(place);
            // Skips a path that is visible as part of a parent folder, or that is not inside a covered folder.
            if above.is_some_and(|above| *access <= above) || (above.is_none() && covered(place).is_none()) {
                continue;
            }
            if above.is_none() {
                let parent = place.parent().unwrap_or(Path::new("/"));
                shown.make_folders(unreachable, parent, &mut made);
                let node = if real.is_dir() { LayoutStep::Folder } else { LayoutStep::File };
                if made.insert(place.clone()) {
                    shown.nodes.extend(c_string(place).map(node));
                }
            }
            let cover = covered(real);
            let from = match cover {
                Some(cover) => real.strip_prefix(&unreachable.folders[cover]).unwrap_or(real),
                None => real,
            };
            if let (Some(from), Some(at)) = (c_string(from), c_string(place)) {
                shown.binds.push(Bind { cover, from, at, access: *access });
            }
        }
        shown
    }

    /// Adds `folder` and each of its ancestors up to, but not including, the folder that is covered.
    fn make_folders(&mut self, unreachable: &Unreachable, folder: &Path, made: &mut BTreeSet<PathBuf>) {
        let mut missing: Vec<&Path> = folder
            .ancestors()
            .take_while(|path| {
                unreachable.folders.iter().any(|cover| path.starts_with(cover) && *path != cover)
            })
            .collect();
        missing.reverse();
        for path in missing {
            if made.insert(path.to_owned()) {
                self.nodes.extend(c_string(path).map(LayoutStep::Folder));
            }
        }
    }

    /// Describes a step for an error message.
    pub(crate) fn describe(&self, step: u32) -> String {
        let shown = |path: &CString| path.to_string_lossy().into_owned();
        match step.checked_sub(COMMON_STEPS_FIRST) {
            Some(0) => "make mounts private".to_owned(),
            Some(cover) => {
                let cover = self.covers.get(cover as usize - 1).map(shown).unwrap_or_default();
                format!("mount an empty directory over {cover}")
            }
            None => {
                let at = match self.nodes.get(step as usize) {
                    Some(LayoutStep::Folder(at) | LayoutStep::File(at)) => Some(at),
                    _ => self.binds.get(step as usize - self.nodes.len()).map(|bind| &bind.at),
                };
                format!("show {}", at.map(shown).unwrap_or_default())
            }
        }
    }

    /// Makes the mounts in a private mount namespace, and adds the mounts to the rules. Creates the namespace
    /// if `has_mount_namespace` is false. Runs in the forked child, and makes only system calls.
    pub(crate) fn enter(
        &self,
        ruleset: Option<&Ruleset>,
        has_mount_namespace: bool,
    ) -> Result<(), StepError> {
        let common = |number: usize, result: Result<(), Errno>| {
            result.map_err(|errno| StepError { errno, detail: COMMON_STEPS_FIRST + number as u32 })
        };
        if !has_mount_namespace {
            common(0, create_mount_namespace())?;
        }
        // Opens each folder before covering it, because the folder's contents can afterwards be reached only through
        // the descriptor.
        let mut descriptors = [const { None::<OwnedFd> }; COVERS_MAX];
        for (number, (cover, slot)) in self.covers.iter().zip(&mut descriptors).enumerate() {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let opened = rustix::fs::open(cover, flags, Mode::empty()).map(|opened| *slot = Some(opened));
            common(1 + number, opened)?;
        }
        for (number, cover) in self.covers.iter().enumerate() {
            let flags = libc::MS_NOSUID | libc::MS_NODEV;
            let mounted = mount(Some(c"tmpfs"), cover, Some(c"tmpfs"), flags, Some(COVER_OPTIONS));
            common(1 + number, mounted)?;
        }
        for (number, node) in self.nodes.iter().enumerate() {
            node.execute().map_err(|errno| StepError { errno, detail: number as u32 })?;
        }
        for (number, bind) in self.binds.iter().enumerate() {
            let folder = bind.cover.and_then(|cover| descriptors[cover].as_ref());
            let step = (self.nodes.len() + number) as u32;
            bind.make(folder).map_err(|errno| StepError { errno, detail: step })?;
        }
        for (number, cover) in self.covers.iter().enumerate() {
            let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
            common(1 + number, mount(None, cover, None, flags, None))?;
        }
        for folder in &self.expanded {
            let added = ruleset.map_or(Ok(()), |ruleset| ruleset.add_readable(folder));
            common(0, added)?;
        }
        Ok(())
    }
}

/// Returns the entries of a folder that are not withheld, with their real paths. Fails if the folder has too many.
fn entries(folder: &Path, withheld_paths: &BTreeSet<PathBuf>) -> Result<Vec<(PathBuf, PathBuf)>, SpawnError> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let entries = found.filter_map(|entry| {
        let name = PathBuf::from(entry.file_name());
        // Skips a symbolic link unless its target is in the same folder.
        let real = std::fs::canonicalize(entry.path()).ok()?;
        let is_in_folder = real.parent() == Some(folder);
        let is_secret = withheld_paths.iter().any(|secret| secret.starts_with(&real));
        let kind = std::fs::metadata(&real).ok()?;
        (is_in_folder && !is_secret && (kind.is_dir() || kind.is_file())).then_some((name, real))
    });
    let entries: Vec<_> = entries.take(ENTRIES_MAX + 1).collect();
    if entries.len() > ENTRIES_MAX { Err(too_many_entries(folder)) } else { Ok(entries) }
}

/// Returns the error for a folder that the worker's user cannot traverse, and that cannot be covered.
pub(crate) fn unreachable_folder(folder: &Path, identity: Option<Identity>) -> SpawnError {
    let uid = identity.map_or(0, |identity| identity.uid);
    let folder = folder.display();
    let step = format!(
        "user {uid} cannot traverse {folder}, which contains paths granted to the worker: run `chmod o+x \
         {folder}`, or set `user` in `sandbox` to a user that can"
    );
    SpawnError::new(&step, Errno::ACCESS)
}

fn create_mount_namespace() -> Result<(), Errno> {
    // SAFETY: the process has one thread, and shares no state that the call changes.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // Later unmounts in the system propagate to this namespace, but mounts in this namespace do not propagate
    // back.
    mount(None, c"/", None, libc::MS_REC | libc::MS_SLAVE, None)
}

impl Bind {
    fn make(&self, folder: Option<&OwnedFd>) -> Result<(), Errno> {
        const OPEN_TREE_CLONE: libc::c_uint = 1;
        const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
        let here = folder.map_or(libc::AT_FDCWD, |folder| folder.as_raw_fd());
        let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_RECURSIVE as libc::c_uint;
        // SAFETY: the string is NUL-terminated. Nothing else owns the returned descriptor.
        let copy = unsafe {
            match libc::syscall(libc::SYS_open_tree, here, self.from.as_ptr(), flags) {
                -1 => return Err(errno::last()),
                descriptor => OwnedFd::from_raw_fd(descriptor as i32),
            }
        };
        // SAFETY: both strings are NUL-terminated.
        check(unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                copy.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_FDCWD,
                self.at.as_ptr(),
                MOVE_MOUNT_F_EMPTY_PATH,
            )
        } as i32)?;
        restrict(&self.at, self.access)
    }
}

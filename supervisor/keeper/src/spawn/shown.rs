//! What a worker is given and its user cannot reach, shown at its own place.
//!
//! Over each folder that keeps the user out lies an empty one, in a mount namespace of the worker's own, with
//! nothing in it but what was given. What is to be where is settled in the keeper, before the fork; the child,
//! still root, makes it with system calls and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::mounts::{Access, mount, restrict};
use super::progress::Stop;
use super::root::{Make, is_opened, text};
use crate::confine::landlock::Ruleset;
use crate::confine::reach::{Closed, Purpose};
use bulkhead_linux::errno::{self, check};

/// Folders that can be covered: each takes a descriptor of the child's.
const COVERS_MAX: usize = 32;

/// Entries of a folder that are shown one by one.
const ENTRIES_MAX: usize = 4096;

/// What holds folders and mount points, nothing else; it is read-only in the end.
const COVER_OPTIONS: &CStr = c"size=1m,nr_inodes=16384,mode=0755";

/// Everything that is to be shown, settled.
pub(super) struct Shown {
    /// Folders that an empty one is laid over.
    covers: Vec<CString>,
    /// Folders and files to mount on.
    nodes: Vec<Make>,
    binds: Vec<Bind>,
    /// Folders whose entries stand for them.
    opened: Vec<CString>,
}

struct Bind {
    /// Below which of the covered folders it lies, or below the root folder.
    cover: Option<usize>,
    /// From there.
    from: CString,
    at: CString,
    access: Access,
}

/// Steps that are the same for all have numbers above those of the others.
const COMMON: u32 = 1 << 16;

impl Shown {
    /// Settles it. `None`: the user reaches everything. Errors: a folder that cannot be covered.
    pub(super) fn prepare(closed: &Closed, withheld: &[&Path]) -> Result<Option<Self>, PathBuf> {
        if closed.folders.is_empty() {
            return Ok(None);
        }
        let is_too_much = |folder: &&PathBuf| folder.as_path() == Path::new("/");
        if let Some(folder) = closed.folders.iter().find(is_too_much).or(closed.folders.get(COVERS_MAX)) {
            return Err(folder.clone());
        }
        let secrets: BTreeSet<PathBuf> =
            withheld.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
        let mut folders = BTreeSet::new();
        let mut binds: BTreeMap<PathBuf, (PathBuf, Access)> = BTreeMap::new();
        let mut add = |place: PathBuf, real: PathBuf, access: Access| {
            let entry = binds.entry(place).or_insert((real, access));
            entry.1 = entry.1.max(access);
        };
        for hidden in &closed.hidden {
            let is_opened = closed.opened.contains(&hidden.real);
            match hidden.purpose {
                Purpose::Start | Purpose::Mount => drop(folders.insert(hidden.place.clone())),
                Purpose::Read if is_opened => {
                    folders.insert(hidden.place.clone());
                    for (name, real) in entries(&hidden.real, &secrets) {
                        add(hidden.place.join(name), real, Access::Read);
                    }
                }
                Purpose::Read => add(hidden.place.clone(), hidden.real.clone(), Access::Read),
                Purpose::Write => add(hidden.place.clone(), hidden.real.clone(), Access::Write),
            }
        }
        Ok(Some(Self::lay_out(closed, &folders, &binds)))
    }

    fn lay_out(
        closed: &Closed,
        folders: &BTreeSet<PathBuf>,
        binds: &BTreeMap<PathBuf, (PathBuf, Access)>,
    ) -> Self {
        let covered = |path: &Path| closed.folders.iter().position(|folder| path.starts_with(folder));
        let above = |path: &Path| {
            path.ancestors().skip(1).find_map(|above| binds.get(above)).map(|(_, access)| *access)
        };
        let mut made = BTreeSet::new();
        let mut shown = Self {
            covers: closed.folders.iter().filter_map(|folder| text(folder)).collect(),
            nodes: Vec::new(),
            binds: Vec::new(),
            opened: Vec::new(),
        };
        for folder in folders.iter().filter(|folder| above(folder).is_none()) {
            shown.make_folders(closed, folder, &mut made);
            if is_opened(folder, closed) {
                shown.opened.extend(text(folder));
            }
        }
        for (place, (real, access)) in binds {
            let above = above(place);
            // Seen with the folder that it lies in.
            if above.is_some_and(|above| *access <= above) || (above.is_none() && covered(place).is_none()) {
                continue;
            }
            if above.is_none() {
                let parent = place.parent().unwrap_or(Path::new("/"));
                shown.make_folders(closed, parent, &mut made);
                let node = if real.is_dir() { Make::Folder } else { Make::File };
                if made.insert(place.clone()) {
                    shown.nodes.extend(text(place).map(node));
                }
            }
            let cover = covered(real);
            let from = match cover {
                Some(cover) => real.strip_prefix(&closed.folders[cover]).unwrap_or(real),
                None => real,
            };
            if let (Some(from), Some(at)) = (text(from), text(place)) {
                shown.binds.push(Bind { cover, from, at, access: *access });
            }
        }
        shown
    }

    /// What leads to a folder from the one that is covered, and the folder itself.
    fn make_folders(&mut self, closed: &Closed, folder: &Path, made: &mut BTreeSet<PathBuf>) {
        let mut missing: Vec<&Path> = folder
            .ancestors()
            .take_while(|path| closed.folders.iter().any(|cover| path.starts_with(cover) && *path != cover))
            .collect();
        missing.reverse();
        for path in missing {
            if made.insert(path.to_owned()) {
                self.nodes.extend(text(path).map(Make::Folder));
            }
        }
    }

    /// What a step does, for people.
    pub(super) fn describe(&self, step: u32) -> String {
        let shown = |path: &CString| path.to_string_lossy().into_owned();
        match step.checked_sub(COMMON) {
            Some(0) => "make mounts its own".to_owned(),
            Some(cover) => {
                let cover = self.covers.get(cover as usize - 1).map(shown).unwrap_or_default();
                format!("lay an empty folder over {cover}")
            }
            None => {
                let at = match self.nodes.get(step as usize) {
                    Some(Make::Folder(at) | Make::File(at)) => Some(at),
                    _ => self.binds.get(step as usize - self.nodes.len()).map(|bind| &bind.at),
                };
                format!("show {}", at.map(shown).unwrap_or_default())
            }
        }
    }

    /// Makes it, in a mount namespace of this process, which it may have already, and adds it to the rules. For a
    /// forked child: system calls and nothing else.
    pub(super) fn enter(&self, ruleset: Option<&Ruleset>, has_own_mounts: bool) -> Result<(), Stop> {
        let common = |number: usize, result: Result<(), Errno>| {
            result.map_err(|errno| Stop { errno, detail: COMMON + number as u32 })
        };
        if !has_own_mounts {
            common(0, own_mounts())?;
        }
        // What lies in a folder is reached by its descriptor, once it is covered.
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
            node.make().map_err(|errno| Stop { errno, detail: number as u32 })?;
        }
        for (number, bind) in self.binds.iter().enumerate() {
            let folder = bind.cover.and_then(|cover| descriptors[cover].as_ref());
            let step = (self.nodes.len() + number) as u32;
            bind.make(folder).map_err(|errno| Stop { errno, detail: step })?;
        }
        for (number, cover) in self.covers.iter().enumerate() {
            let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV;
            common(1 + number, mount(None, cover, None, flags, None))?;
        }
        for folder in &self.opened {
            let added = ruleset.map_or(Ok(()), |ruleset| ruleset.add_given(folder));
            common(0, added)?;
        }
        Ok(())
    }
}

/// What is in a folder and is not withheld, and where it really is.
fn entries(folder: &Path, secrets: &BTreeSet<PathBuf>) -> Vec<(PathBuf, PathBuf)> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let entries = found.filter_map(|entry| {
        let name = PathBuf::from(entry.file_name());
        // A link gives nothing but what lies beside it.
        let real = std::fs::canonicalize(entry.path()).ok()?;
        let is_beside = real.parent() == Some(folder);
        let is_secret = secrets.iter().any(|secret| secret.starts_with(&real));
        let kind = std::fs::metadata(&real).ok()?;
        (is_beside && !is_secret && (kind.is_dir() || kind.is_file())).then_some((name, real))
    });
    entries.take(ENTRIES_MAX).collect()
}

fn own_mounts() -> Result<(), Errno> {
    // SAFETY: the process has one thread, and does not share what it leaves.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    // What the system unmounts later goes here as well; nothing of this is seen there.
    mount(None, c"/", None, libc::MS_REC | libc::MS_SLAVE, None)
}

impl Bind {
    fn make(&self, folder: Option<&OwnedFd>) -> Result<(), Errno> {
        const OPEN_TREE_CLONE: libc::c_uint = 1;
        const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
        let here = folder.map_or(libc::AT_FDCWD, |folder| folder.as_raw_fd());
        let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_RECURSIVE as libc::c_uint;
        // SAFETY: the text ends with NUL; what is returned is owned here alone.
        let copy = unsafe {
            match libc::syscall(libc::SYS_open_tree, here, self.from.as_ptr(), flags) {
                -1 => return Err(errno::last()),
                descriptor => OwnedFd::from_raw_fd(descriptor as i32),
            }
        };
        // SAFETY: both texts end with NUL.
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

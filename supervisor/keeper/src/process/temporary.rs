//! Creates and removes temporary folders of workers that have no separate file system for temporary files. `starts`
//! creates a folder if the order asks for one. The worker's `host::folder` creates a further folder for each `exec`
//! program.
//!
//! All folders are in one base folder. The keeper holds a lock on its base folder, so that base folders left
//! behind by killed keepers can be recognised.
//!
//! The contents of a worker's folder are not trusted. They are removed on a separate thread, because they can be large.
//! The removal follows no links, and is not recursive, because folders can be nested deeply.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Instant;

use bulkhead_linux::folder::{self, FOLDER_FLAGS};
use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, Uid};
use rustix::io::Errno;

use crate::protocol::confinement::Identity;

/// Prefix of the base folder's name. The user ID follows the prefix.
const PREFIX: &str = "bulkhead-";

/// Mode of the base folder. Other users can traverse the folder but not list it.
const BASE_MODE: u32 = 0o711;

/// Maximum number of attempts to create the base folder under an unused name.
const NAME_ATTEMPTS_MAX: u32 = 100;

/// Maximum number of folders waiting to be removed. Also the maximum number of folders that are only partially
/// removed.
const PENDING_REMOVALS_MAX: usize = 16 * 1024;

/// Maximum number of base folders of killed keepers to remove. The number is limited because each folder needs an open
/// descriptor.
const STALE_FOLDERS_MAX: usize = 64;

/// Maximum number of entries to remove from one folder before the remover turns to the next folder. Needed because a
/// template can add entries to a worker's folder while the remover is emptying the folder.
const ENTRIES_PER_STEP: usize = 16 * 1024;

/// The base folder. Created when the first worker needs a temporary folder.
#[derive(Default)]
pub(super) struct TemporaryFolders {
    base: Option<Base>,
}

struct Base {
    path: PathBuf,
    /// Lock on the base folder, held until the keeper exits.
    lock: OwnedFd,
    /// Sends folders to the thread that removes them. The thread exits when this sender is dropped.
    removals: SyncSender<PathBuf>,
}

/// Returns the folder that contains the base folders: `TMPDIR`, or `/tmp` if `TMPDIR` is not an absolute path. A
/// relative path cannot be used, because the supervisor, the keeper and the workers have different working directories.
pub(super) fn parent_folder() -> PathBuf {
    absolute_or_tmp(std::env::temp_dir())
}

fn absolute_or_tmp(folder: PathBuf) -> PathBuf {
    if folder.is_absolute() { folder } else { "/tmp".into() }
}

impl TemporaryFolders {
    pub(super) fn create(&mut self, worker: u64, identity: Option<Identity>) -> io::Result<PathBuf> {
        // Programs that clean up `/tmp` can remove the base folder. Another user can then create a folder of the same
        // name, in which the keeper must not create anything.
        if !self.base.as_ref().is_some_and(Base::is_in_place) {
            let parent = self.base.as_ref().and_then(|base| base.path.parent()).map(Path::to_owned);
            self.base = Some(Base::create(&parent.unwrap_or_else(parent_folder))?);
        }
        let Some(base) = &self.base else { return Err(Errno::NOENT.into()) };
        // Restores the mode of the base folder, which workers that run as the keeper's user can change.
        rustix::fs::fchmod(&base.lock, Mode::from_raw_mode(BASE_MODE))?;
        let name = worker.to_string();
        rustix::fs::mkdirat(&base.lock, &name, Mode::RWXU)?;
        if let Some(Identity { uid, gid }) = identity {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            rustix::fs::chownat(&base.lock, &name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(base.path.join(name))
    }

    /// Schedules the removal of a worker's folder. Any folder that is still left is removed when the keeper exits
    /// normally.
    pub(super) fn remove(&self, folder: PathBuf) {
        if let Some(base) = &self.base {
            // If the queue is full, or if the process exits first, the folder is removed together with the
            // base folder.
            let _ = base.removals.try_send(folder);
        }
    }
}

/// Returns the temporary folders of the workers of a keeper, each with the spawn number of its worker. The keeper has
/// the PID `keeper`, and runs as this user.
pub fn temporary_folders(keeper: u32) -> Vec<(u64, PathBuf)> {
    let own = rustix::process::geteuid().as_raw();
    let paths =
        (0..NAME_ATTEMPTS_MAX).map(|number| parent_folder().join(format!("{}{keeper}-{number}", prefix())));
    let is_ours =
        |path: &PathBuf| path.symlink_metadata().is_ok_and(|found| found.is_dir() && found.uid() == own);
    // Restores the mode, because workers that run as the keeper's user can change it.
    let open_up = |path: &PathBuf| {
        let _ = std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(BASE_MODE));
    };
    let bases = paths.filter(is_ours).inspect(open_up);
    let entries = bases.filter_map(|path| std::fs::read_dir(path).ok()).flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path()))).collect()
}

impl Drop for TemporaryFolders {
    fn drop(&mut self) {
        if let Some(base) = &self.base {
            remove(&base.path, usize::MAX);
        }
    }
}

impl Base {
    fn create(parent: &Path) -> io::Result<Self> {
        let (path, lock) = create_base(parent)?;
        let (removals, folders) = sync_channel::<PathBuf>(PENDING_REMOVALS_MAX);
        let parent = parent.to_owned();
        let remover = move || run_remover(stale_folders(&parent), &folders);
        std::thread::Builder::new().name("remover".into()).spawn(remover)?;
        Ok(Self { path, lock, removals })
    }

    /// Returns true if the path still refers to the locked folder.
    fn is_in_place(&self) -> bool {
        is_named(&self.lock, &self.path) == Ok(true)
    }
}

/// Creates a base folder that other users can traverse but not list, and locks it.
fn create_base(parent: &Path) -> io::Result<(PathBuf, OwnedFd)> {
    let prefix = prefix();
    for number in 0..NAME_ATTEMPTS_MAX {
        let path = parent.join(format!("{prefix}{}-{number}", std::process::id()));
        match std::fs::DirBuilder::new().mode(BASE_MODE).create(&path) {
            // Another keeper may remove the folder before it is locked.
            Ok(()) => match lock(&path) {
                Ok(lock) => return Ok((path, lock)),
                Err(Errno::NOENT | Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(errno.into()),
            },
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Locks the folder with this name. Fails with `NOENT` or `WOULDBLOCK` if another keeper was faster. In that case, the
/// folder is gone, is being removed, or has been replaced by a new folder of the same name.
fn lock(path: &Path) -> rustix::io::Result<OwnedFd> {
    let lock = rustix::fs::open(path, FOLDER_FLAGS, Mode::empty())?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    if !is_named(&lock, path)? {
        return Err(Errno::NOENT);
    }
    // Sets the mode again, because the keeper's umask may have removed permissions.
    rustix::fs::fchmod(&lock, Mode::from_raw_mode(BASE_MODE))?;
    Ok(lock)
}

/// Returns true if `path` refers to the open folder `folder`.
fn is_named(folder: &OwnedFd, path: &Path) -> rustix::io::Result<bool> {
    let (opened, named) = (rustix::fs::fstat(folder)?, rustix::fs::lstat(path)?);
    Ok((opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino))
}

fn prefix() -> String {
    format!("{PREFIX}{}-", rustix::process::geteuid().as_raw())
}

/// A folder that is being removed.
struct Removal {
    folder: PathBuf,
    /// Lock on the base folder of a killed keeper. Only the holder of the lock is allowed to remove the base
    /// folder.
    _lock: Option<OwnedFd>,
}

/// Finds and locks the base folders that killed keepers of this user left behind.
fn stale_folders(parent: &Path) -> VecDeque<Removal> {
    let prefix = prefix();
    let own = rustix::process::geteuid().as_raw();
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let stale = entries.filter_map(|entry| {
        let is_named = entry.file_name().to_str()?.starts_with(&prefix);
        let is_ours = || entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == own);
        let folder = (is_named && is_ours()).then(|| entry.path())?;
        // Locking fails for the folder of a running keeper.
        let lock = lock(&folder).ok()?;
        Some(Removal { folder, _lock: Some(lock) })
    });
    stale.take(STALE_FOLDERS_MAX).collect()
}

/// Removes the folders in `left`, and then the received folders. Switches between folders after a limited number of
/// entries, so that a large folder does not delay the others.
fn run_remover(mut left: VecDeque<Removal>, folders: &Receiver<PathBuf>) {
    let removal = |folder| Removal { folder, _lock: None };
    loop {
        if left.is_empty() {
            let Ok(folder) = folders.recv() else { return };
            left.push_back(removal(folder));
        }
        while left.len() < PENDING_REMOVALS_MAX {
            match folders.try_recv() {
                Ok(folder) => left.push_back(removal(folder)),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        let begun_at = Instant::now();
        if let Some(next) = left.pop_front()
            && !remove(&next.folder, ENTRIES_PER_STEP)
        {
            left.push_back(next);
            // Sleeps as long as the removal took, so that at most half of a processor is used even if a folder is
            // constantly refilled.
            std::thread::sleep(begun_at.elapsed());
        }
    }
}

/// Removes a folder and its contents as far as possible. Returns `false` if the folder has more than `entries_max`
/// entries.
fn remove(path: &Path, entries_max: usize) -> bool {
    if let Ok(folder) = folder::open(rustix::fs::CWD, path, Mode::RWXU) {
        // Ignores errors. Remaining entries are visible to an operator, and the next keeper tries again.
        if folder::empty(&folder, entries_max) == Ok(false) {
            return false;
        }
    }
    let _ = std::fs::remove_dir(path);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn remove_stale(parent: &Path) {
        stale_folders(parent).iter().for_each(|stale| assert!(remove(&stale.folder, usize::MAX)));
    }

    /// Releases the lock on a base folder, as the kernel does when a keeper dies. Closing the descriptor is not enough,
    /// because a child that another test has just forked still has a copy.
    fn unlock(lock: &OwnedFd) {
        rustix::fs::flock(lock, FlockOperation::Unlock).unwrap();
    }

    /// Sets a flag when dropped, so that the threads of a scope exit even if the test fails inside the scope.
    struct SetOnDrop<'a>(&'a AtomicBool);

    impl Drop for SetOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Folders of killed keepers are removed on another thread, so that removing many files does not delay the start of
    /// the first worker.
    #[test]
    fn another_thread_removes_folders_of_killed_keepers() {
        let parent = tempfile::tempdir().unwrap();
        let (stale, lock) = create_base(parent.path()).unwrap();
        std::fs::write(stale.join("file"), "x").unwrap();
        unlock(&lock);
        let base = Base::create(parent.path()).unwrap();
        let until = Instant::now() + std::time::Duration::from_secs(60);
        while stale.exists() {
            assert!(Instant::now() < until, "the stale directory was not removed");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(base.path.exists());
    }

    #[test]
    fn folder_filled_during_removal_does_not_delay_others() {
        let mut folders = TemporaryFolders::default();
        let (filled, other) = (folders.create(1, None).unwrap(), folders.create(2, None).unwrap());
        let wait = |is_done: &dyn Fn() -> bool, what: &str| {
            let until = Instant::now() + std::time::Duration::from_secs(300);
            while !is_done() {
                assert!(Instant::now() < until, "{what}");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _end = SetOnDrop(&is_over);
            let fill = |number: usize| {
                for file in (number..).step_by(2).take_while(|_| !is_over.load(Ordering::Relaxed)) {
                    let _ = std::fs::create_dir(&filled);
                    let _ = std::fs::write(filled.join(file.to_string()), "");
                }
            };
            (0..2).for_each(|number| drop(scope.spawn(move || fill(number))));
            wait(&|| filled.join("9").exists(), "the directory contains files");
            folders.remove(filled.clone());
            folders.remove(other.clone());
            wait(&|| !other.exists(), "the other directory is removed");
        });
        folders.remove(filled.clone());
        wait(&|| !filled.exists(), "the filled directory is removed");
    }

    #[test]
    fn deep_and_locked_folder_trees_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().join("top");
        std::fs::create_dir(&top).unwrap();
        // Nests the folders so deeply that no path can refer to the innermost one.
        let mut here = rustix::fs::open(&top, FOLDER_FLAGS, Mode::empty()).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&here, "d", Mode::RWXU).unwrap();
            rustix::fs::symlinkat("/etc", &here, "link").unwrap();
            here = rustix::fs::openat(&here, "d", FOLDER_FLAGS, Mode::empty()).unwrap();
        }
        std::fs::write(top.join("file"), "x").unwrap();
        std::fs::create_dir(top.join("locked")).unwrap();
        std::fs::write(top.join("locked/file"), "x").unwrap();
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o000);
        std::fs::set_permissions(top.join("locked"), closed).unwrap();
        remove(&top, usize::MAX);
        assert!(!top.exists());
        assert!(Path::new("/etc").exists());
    }

    /// Runs the removal as an unprivileged user, who cannot move a folder without access to it. Root can access every
    /// folder.
    #[test]
    #[expect(unsafe_code, reason = "the system call changes the user of this thread only")]
    fn unprivileged_keeper_removes_nested_locked_folders() {
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: libc::uid_t = 65534;
        let remove_all = || {
            if rustix::process::geteuid().is_root() {
                // SAFETY: accesses no memory.
                let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
                assert_eq!(changed, 0);
            }
            let parent = tempfile::tempdir().unwrap();
            let (top, away) = (parent.path().join("top"), parent.path().join("away"));
            let locked = ["a", "a/b", "a/b/c", "a/b/c/d"].map(|name| top.join(name));
            std::fs::create_dir_all(&locked[3]).unwrap();
            std::fs::create_dir(&away).unwrap();
            for folder in &locked {
                std::fs::write(folder.join("file"), "x").unwrap();
                std::os::unix::fs::symlink(&away, folder.join("link")).unwrap();
            }
            for folder in locked.iter().rev().chain([&top, &away]) {
                std::fs::set_permissions(folder, PermissionsExt::from_mode(0o000)).unwrap();
            }
            remove(&top, usize::MAX);
            assert!(!top.exists());
            assert_eq!(
                std::fs::metadata(&away).unwrap().permissions().mode() & 0o777,
                0,
                "a link was followed"
            );
        };
        std::thread::scope(|scope| scope.spawn(remove_all).join().unwrap());
    }

    #[test]
    fn temporary_base_folder_mode_is_restored() {
        use std::os::unix::fs::PermissionsExt;
        let parent = tempfile::tempdir().unwrap();
        let base = Base::create(parent.path()).unwrap();
        let all = base.path.clone();
        let mut folders = TemporaryFolders { base: Some(base) };
        folders.create(1, None).unwrap();
        std::fs::set_permissions(&all, PermissionsExt::from_mode(0o000)).unwrap();
        folders.create(2, None).unwrap();
        assert_eq!(std::fs::metadata(&all).unwrap().permissions().mode() & 0o7777, BASE_MODE);
        drop(folders);
        assert!(!all.exists());
    }

    #[test]
    fn relative_temporary_folder_is_replaced_by_tmp() {
        let cases = [("/var/tmp", "/var/tmp"), ("", "/tmp"), (".", "/tmp"), ("tmp", "/tmp")];
        for (given, expected) in cases {
            assert_eq!(absolute_or_tmp(given.into()), Path::new(expected), "{given}");
        }
    }

    /// Moves the base folder away, as if a program that cleans up `/tmp` had removed it.
    #[test]
    fn missing_temporary_base_folder_is_created_again() {
        let (parent, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let base = Base::create(parent.path()).unwrap();
        let first = base.path.clone();
        let mut folders = TemporaryFolders { base: Some(base) };
        folders.create(1, None).unwrap();
        std::fs::rename(&first, other.path().join("away")).unwrap();
        assert!(folders.create(2, None).unwrap().is_dir());
        // Another user creates a folder of the same name.
        let second = folders.base.as_ref().unwrap().path.clone();
        std::fs::rename(&second, other.path().join("away again")).unwrap();
        let planted = other.path().join("planted");
        std::fs::create_dir(&planted).unwrap();
        // Locks the folder, because an unlocked folder would be removed as the folder of a killed keeper.
        let _lock = lock(&planted).unwrap();
        std::fs::rename(&planted, &second).unwrap();
        assert!(folders.create(3, None).unwrap().is_dir());
        assert_eq!(std::fs::read_dir(&second).unwrap().count(), 0);
    }

    #[test]
    fn occupied_temporary_names_do_not_prevent_removal() {
        let parent = tempfile::tempdir().unwrap();
        let (top, at_once) = (parent.path().join("top"), 256);
        for number in 0..=at_once {
            std::fs::create_dir_all(top.join(format!(".bulkhead-{number}/in/it"))).unwrap();
        }
        assert!((0..20).any(|_| remove(&top, at_once)), "a few attempts are sufficient");
        assert!(!top.exists());
    }

    #[test]
    fn concurrent_removals_of_same_folder_succeed() {
        let parent = tempfile::tempdir().unwrap();
        let top = parent.path().join("top");
        for folder in 0..20 {
            let folder = top.join(folder.to_string());
            std::fs::create_dir_all(folder.join("inner")).unwrap();
            (0..200).for_each(|file| std::fs::write(folder.join(file.to_string()), "").unwrap());
            (0..20).for_each(|file| std::fs::write(folder.join(format!("inner/{file}")), "").unwrap());
        }
        let folder = rustix::fs::open(&top, FOLDER_FLAGS, Mode::empty()).unwrap();
        std::thread::scope(|scope| {
            let removers: Vec<_> =
                (0..3).map(|_| scope.spawn(|| folder::empty(&folder, usize::MAX))).collect();
            for remover in removers {
                assert!(remover.join().unwrap().unwrap());
            }
        });
        std::fs::remove_dir(&top).unwrap();
    }

    /// Runs another keeper's cleanup in the same parent folder while folders are being created.
    #[test]
    fn concurrent_cleanup_keeps_new_folders() {
        let parent = tempfile::tempdir().unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let end = SetOnDrop(&is_over);
            let sweeper = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    remove_stale(parent.path());
                }
            });
            let all_made = (0..300).all(|_| {
                create_base(parent.path()).is_ok_and(|(path, _lock)| {
                    let is_there = path.is_dir();
                    remove(&path, usize::MAX);
                    is_there
                })
            });
            drop(end);
            sweeper.join().unwrap();
            assert!(all_made);
        });
    }

    #[test]
    fn cleanup_removes_only_folders_of_killed_keepers() {
        let parent = tempfile::tempdir().unwrap();
        let (left, lock) = create_base(parent.path()).unwrap();
        std::fs::write(left.join("file"), "x").unwrap();
        remove_stale(parent.path());
        assert!(left.exists());
        unlock(&lock);
        remove_stale(parent.path());
        assert!(!left.exists());
        let other = parent.path().join("bulkhead-x");
        std::fs::create_dir(&other).unwrap();
        remove_stale(parent.path());
        assert!(other.exists());
    }
}

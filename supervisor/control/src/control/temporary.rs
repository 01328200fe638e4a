//! Measures workers' temporary folders that are not separate file systems, and reports large folders to the data plane,
//! which kills workers over the limit. The contents are not trusted, so links are not followed, and the number of
//! entries and descriptors per measurement is limited. On average, measurements use at most a tenth of one processor.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bulkhead_linux::folder;
use bulkhead_shared::template_protocol::parse_folder_name;
use rustix::fs::{AtFlags, Dir, FileType, Mode};
use rustix::io::Errno;

use super::Control;
use bulkhead_keeper as keeper;
use bulkhead_plane::command::Command;

/// Minimum pause between two measurements of the temporary folders.
const INTERVAL: Duration = Duration::from_secs(1);

/// Minimum pause after measuring the temporary folders, as a multiple of the time that the measurement took.
const PAUSE_FACTOR: u32 = 10;

/// Maximum number of entries to visit when measuring one temporary folder. A folder with more entries counts as too
/// large.
const ENTRIES_MAX: u64 = 1 << 20;

/// Minimum number of bytes counted for each entry of a temporary folder. Otherwise, a worker could evade the limit
/// with many small or empty files.
const ENTRY_BYTES: u64 = 4096;

/// Maximum number of forked workers per template whose temporary folders are measured individually. If a template has
/// more workers, their folders count as part of the template's folder.
const WORKERS_MAX: usize = 4096;

/// Maximum nesting depth of folders. A temporary folder with deeper nesting counts as too large.
const DEPTH_MAX: usize = 128;

const BLOCK_BYTES: u64 = 512;

/// Permissions that the supervisor needs on a folder to measure it. Without execute permission, entries can be listed,
/// but their sizes cannot be read.
const FOLDER_ACCESS: Mode = Mode::RUSR.union(Mode::XUSR);

/// Measures the temporary folders periodically until the control plane shuts down.
pub(super) async fn watch(control: Arc<Control>) {
    let mut shutdown = control.shutdown.subscribe();
    let mut pause = INTERVAL;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = shutdown.wait_for(|has_begun| *has_begun) => return,
        }
        // Nothing has to be measured if no bulkhead limits the size of temporary folders.
        let Some((min, max)) = control.reloads.temporary_bytes() else { continue };
        let measuring = control.clone();
        let start = Instant::now();
        let task = tokio::task::spawn_blocking(move || measure_all(&measuring, min, max));
        let _ = task.await;
        pause = INTERVAL.max(start.elapsed() * PAUSE_FACTOR);
    }
}

fn measure_all(control: &Control, min: u64, max: u64) {
    let keeper = control.counters.keeper_pid.load(Ordering::Relaxed);
    for (worker, folder) in keeper::temporary_folders(keeper) {
        let bytes = measure(&folder, max, false);
        let forked = forked_worker_folders(&folder);
        let without_forked = if forked.is_empty() { bytes } else { measure(&folder, max, true) };
        let report = |worker, (bytes, without_forked), template| {
            if bytes > min {
                // If the command queue is full, the command is dropped, and the next measurement reports the
                // folder again.
                let _ = control.commands.send(Command::ReportTemporaryFolder {
                    worker,
                    bytes,
                    bytes_without_forked: without_forked,
                    template,
                });
            }
        };
        report(worker, (bytes, without_forked), None);
        for (forked_worker, path) in forked {
            let bytes = measure(&path, max, false);
            report(forked_worker, (bytes, bytes), Some(worker));
        }
    }
}

/// Returns the subfolders that belong to forked workers, according to their names. Returns an empty list if there are
/// too many.
fn forked_worker_folders(path: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(top) = folder::open(rustix::fs::CWD, path, FOLDER_ACCESS) else { return Vec::new() };
    let Ok(entries) = Dir::read_from(&top) else { return Vec::new() };
    let named = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().to_str().ok()?;
        Some((parse_folder_name(name)?, path.join(name)))
    });
    let named: Vec<_> = named.take(WORKERS_MAX + 1).collect();
    if named.len() > WORKERS_MAX { Vec::new() } else { named }
}

/// Returns the disk usage of a folder in bytes, optionally without the folders of forked workers. Stops early
/// if the disk usage exceeds `max`.
fn measure(path: &Path, max: u64, without_workers: bool) -> u64 {
    measure_entries(path, max, ENTRIES_MAX, without_workers)
}

fn measure_entries(path: &Path, max: u64, entries_max: u64, without_workers: bool) -> u64 {
    let top = match folder::open(rustix::fs::CWD, path, FOLDER_ACCESS) {
        Ok(top) => top,
        // The worker has removed the permissions again during the measurement, which a well-behaved worker would not
        // do.
        Err(Errno::ACCESS) => return u64::MAX,
        Err(_) => return 0,
    };
    let Ok(entries) = Dir::read_from(&top) else { return 0 };
    let (mut bytes, mut entry_count) = (0_u64, 0);
    let mut open = vec![(top, entries)];
    while let (depth, Some((here, entries))) = (open.len(), open.last_mut()) {
        let Some(Ok(entry)) = entries.next() else {
            open.pop();
            continue;
        };
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        if without_workers && depth == 1 && name.to_str().ok().and_then(parse_folder_name).is_some() {
            continue;
        }
        entry_count += 1;
        let stat = match rustix::fs::statat(&*here, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::ACCESS) => return u64::MAX,
            Err(_) => continue,
        };
        #[allow(clippy::useless_conversion, reason = "the type differs between machines")]
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        // A file with several hard links is counted once per link.
        bytes = bytes.saturating_add((blocks * BLOCK_BYTES).max(ENTRY_BYTES));
        if bytes > max {
            return bytes;
        }
        if entry_count > entries_max {
            return u64::MAX;
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            && let Ok(inner) = folder::open(here.as_fd(), name, FOLDER_ACCESS)
            && let Ok(entries) = Dir::read_from(&inner)
        {
            if open.len() >= DEPTH_MAX {
                return u64::MAX;
            }
            open.push((inner, entries));
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn disk_usage_includes_folders_without_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let enough = 1 << 30;
        let empty = measure(folder.path(), enough, false);
        assert_eq!(empty, 0);
        std::fs::create_dir_all(path("a/b/c")).unwrap();
        std::fs::write(path("a/b/c/file"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/usr", path("link")).unwrap();
        let mut bytes = 0;
        for (name, mode) in [("a/b", 0o000), ("a/b", 0o400), ("a/b/c", 0o300), ("", 0o300)] {
            std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(mode)).unwrap();
            bytes = measure(folder.path(), enough, false);
            assert!((1 << 20..2 << 20).contains(&bytes), "{bytes} with {name} {mode:o}");
        }
        // A sparse file takes up no space on disk.
        std::fs::File::create(path("hole")).unwrap().set_len(1 << 40).unwrap();
        assert!(measure(folder.path(), enough, false) < 2 << 20);
        for number in 0..1000 {
            std::fs::write(path(&format!("small-{number}")), "").unwrap();
        }
        assert!(measure(folder.path(), enough, false) > bytes + 1000 * ENTRY_BYTES);
        assert!((bytes..enough).contains(&measure_entries(folder.path(), enough, 1100, false)));
        assert_eq!(measure_entries(folder.path(), enough, 500, false), u64::MAX);
        assert!(measure(folder.path(), 10 * ENTRY_BYTES, false) <= 12 * ENTRY_BYTES + (1 << 21));
        let deep = (0..DEPTH_MAX + 1).fold(path("deep"), |path, _| path.join("d"));
        std::fs::create_dir_all(deep).unwrap();
        assert_eq!(measure(folder.path(), enough, false), u64::MAX);
    }
}

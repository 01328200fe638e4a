//! Looks at how much workers have in temporary folders that are no file systems of their own, and tells the data
//! plane of those that have more than they may. Nothing in such a folder is trusted: no link is followed, and a
//! look costs a bounded number of entries, descriptors and, in the long run, a tenth of one processor.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bulkhead_linux::folder;
use bulkhead_shared::template_protocol::worker_of_folder;
use rustix::fs::{AtFlags, Dir, FileType, Mode};
use rustix::io::Errno;

use super::Control;
use bulkhead_keeper as keeper;
use bulkhead_plane::command::Command;

/// Between two looks, unless they take long.
const INTERVAL: Duration = Duration::from_secs(1);

/// After a look, so many times as long as it took nothing is looked at.
const REST: u32 = 10;

/// Entries of one folder that are looked at.
const ENTRIES_MAX: u64 = 1 << 20;

/// What an entry takes at least, be it empty: so a folder that holds many is full as well.
const ENTRY_BYTES: u64 = 4096;

/// Folders of forked workers in that of a template that are looked at one by one; with more, they are its own.
const WORKERS_MAX: usize = 4096;

/// Folders within each other that are looked at; what is deeper counts as too much.
const DEPTH_MAX: usize = 128;

const BLOCK_BYTES: u64 = 512;

/// One that may be listed and not gone through has names, and does not tell what they take.
const LOOKED_INTO: Mode = Mode::RUSR.union(Mode::XUSR);

/// Looks until the end.
pub(super) async fn watch(control: Arc<Control>) {
    let mut end = control.end.subscribe();
    let mut pause = INTERVAL;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = end.wait_for(|is_over| *is_over) => return,
        }
        // Only where a bulkhead has such folders.
        let Some((least, most)) = control.reloads.temporary_bytes() else { continue };
        let looker = control.clone();
        let began = Instant::now();
        let looked = tokio::task::spawn_blocking(move || look(&looker, least, most));
        let _ = looked.await;
        pause = INTERVAL.max(began.elapsed() * REST);
    }
}

fn look(control: &Control, least: u64, most: u64) {
    let keeper = control.pulse.keeper.load(Ordering::Relaxed);
    for (worker, folder) in keeper::temporary_folders(keeper) {
        let bytes = bytes_in(&folder, most, false);
        let parts = workers_in(&folder);
        let apart = if parts.is_empty() { bytes } else { bytes_in(&folder, most, true) };
        let tell = |worker, (bytes, apart), of| {
            if bytes > least {
                // Lost if the data plane is busy; the next look comes soon.
                let _ = control.commander.send(Command::Temporary { worker, bytes, apart, of });
            }
        };
        tell(worker, (bytes, apart), None);
        for (part, path) in parts {
            let bytes = bytes_in(&path, most, false);
            tell(part, (bytes, bytes), Some(worker));
        }
    }
}

/// What in a folder is called like the folder of a forked worker. If that is too much, there is none.
fn workers_in(path: &Path) -> Vec<(u64, PathBuf)> {
    let Ok(top) = folder::open(rustix::fs::CWD, path, LOOKED_INTO) else { return Vec::new() };
    let Ok(entries) = Dir::read_from(&top) else { return Vec::new() };
    let named = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().to_str().ok()?;
        Some((worker_of_folder(name)?, path.join(name)))
    });
    let named: Vec<_> = named.take(WORKERS_MAX + 1).collect();
    if named.len() > WORKERS_MAX { Vec::new() } else { named }
}

/// Bytes that a folder takes, perhaps without those of forked workers; it is not looked at further when that is more
/// than `most`.
fn bytes_in(path: &Path, most: u64, without_workers: bool) -> u64 {
    let top = match folder::open(rustix::fs::CWD, path, LOOKED_INTO) {
        Ok(top) => top,
        // Locked again meanwhile: no honest worker does that.
        Err(Errno::ACCESS) => return u64::MAX,
        Err(_) => return 0,
    };
    let Ok(entries) = Dir::read_from(&top) else { return 0 };
    let (mut bytes, mut seen) = (0_u64, 0);
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
        if without_workers && depth == 1 && name.to_str().is_ok_and(|name| worker_of_folder(name).is_some()) {
            continue;
        }
        seen += 1;
        let stat = match rustix::fs::statat(&*here, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::ACCESS) => return u64::MAX,
            Err(_) => continue,
        };
        #[allow(clippy::useless_conversion, reason = "the type differs between machines")]
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        // A file with several names may be elsewhere as well, but it is here.
        bytes = bytes.saturating_add((blocks * BLOCK_BYTES).max(ENTRY_BYTES));
        if bytes > most || seen > ENTRIES_MAX {
            return bytes;
        }
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            && let Ok(inner) = folder::open(here.as_fd(), name, LOOKED_INTO)
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
    fn what_a_folder_takes_is_counted_however_it_is_hidden() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let enough = 1 << 30;
        let empty = bytes_in(folder.path(), enough, false);
        assert_eq!(empty, 0);
        std::fs::create_dir_all(path("a/b/c")).unwrap();
        std::fs::write(path("a/b/c/file"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/usr", path("link")).unwrap();
        let mut bytes = 0;
        for (name, mode) in [("a/b", 0o000), ("a/b", 0o400), ("a/b/c", 0o300), ("", 0o300)] {
            std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(mode)).unwrap();
            bytes = bytes_in(folder.path(), enough, false);
            assert!((1 << 20..2 << 20).contains(&bytes), "{bytes} with {name} {mode:o}");
        }
        // A hole takes nothing.
        std::fs::File::create(path("hole")).unwrap().set_len(1 << 40).unwrap();
        assert!(bytes_in(folder.path(), enough, false) < 2 << 20);
        for number in 0..1000 {
            std::fs::write(path(&format!("small-{number}")), "").unwrap();
        }
        assert!(bytes_in(folder.path(), enough, false) > bytes + 1000 * ENTRY_BYTES);
        assert!(bytes_in(folder.path(), 10 * ENTRY_BYTES, false) <= 12 * ENTRY_BYTES + (1 << 21));
        let deep = (0..DEPTH_MAX + 1).fold(path("deep"), |path, _| path.join("d"));
        std::fs::create_dir_all(deep).unwrap();
        assert_eq!(bytes_in(folder.path(), enough, false), u64::MAX);
    }
}

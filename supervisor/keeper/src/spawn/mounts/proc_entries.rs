//! Hides those entries of a private `/proc` that describe the machine. Does not hide entries that language runtimes
//! read.
//!
//! The `subset=pid` mount option is not used, because it would also hide the entries that language runtimes read.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Access, mount, restrict};

/// Entries of `/proc` that stay visible, because C libraries, allocators, Node, Java, Go, Python and shell tools read
/// them. They show processors, memory, times, and the kernel's version, settings, file systems and control groups.
const VISIBLE_ENTRIES: [&str; 11] = [
    "cgroups",
    "cpuinfo",
    "filesystems",
    "loadavg",
    "meminfo",
    "self",
    "stat",
    "sys",
    "thread-self",
    "uptime",
    "version",
];

/// File and folder to mount over hidden entries. No process has permission to open either of them. Both are removed
/// from the root folder once all entries are hidden.
const EMPTY_FILE: &CStr = c"/no-file";
const EMPTY_FOLDER: &CStr = c"/no-folder";

/// Entries of `/proc` to hide. These are all entries except links, processes and the visible entries. Looked up only
/// once, because they are the same for all workers.
static HIDDEN_ENTRIES: OnceLock<Vec<HiddenEntry>> = OnceLock::new();

struct HiddenEntry {
    at: CString,
    is_folder: bool,
}

/// Looks up the entries to hide. Runs in the keeper, before the fork.
pub(crate) fn prepare() {
    HIDDEN_ENTRIES.get_or_init(|| {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let hidden = entries.filter_map(|entry| {
            let name = entry.file_name();
            let name = name.to_str()?;
            let kind = entry.file_type().ok()?;
            let is_shown =
                kind.is_symlink() || VISIBLE_ENTRIES.contains(&name) || name.parse::<u32>().is_ok();
            let at = CString::new(entry.path().as_os_str().as_bytes()).ok()?;
            (!is_shown).then(|| HiddenEntry { at, is_folder: kind.is_dir() })
        });
        hidden.collect()
    });
}

/// Hides the entries that [`prepare`] has found. Skips entries that no longer exist. Runs in the forked
/// child, and makes only system calls.
pub(super) fn hide() -> Result<(), Errno> {
    let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::RDONLY;
    drop(rustix::fs::open(EMPTY_FILE, flags, Mode::empty())?);
    rustix::fs::mkdir(EMPTY_FOLDER, Mode::empty())?;
    for HiddenEntry { at, is_folder } in HIDDEN_ENTRIES.get().into_iter().flatten() {
        let with = if *is_folder { EMPTY_FOLDER } else { EMPTY_FILE };
        match mount(Some(with), at, None, libc::MS_BIND, None) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    // Restricts `/proc`, and also the mounts that hide entries of `/proc`.
    restrict(c"/proc", Access::Read)?;
    rustix::fs::unlink(EMPTY_FILE)?;
    rustix::fs::rmdir(EMPTY_FOLDER)
}

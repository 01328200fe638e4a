//! Hides the machine's entries in a private `/proc`, except entries that language runtimes read.
//!
//! (The kernel's own option, `subset=pid`, would hide these too.)

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::mounts::{Access, mount, restrict};

/// Entries that stay visible. C libraries, allocators, Node, Java, Go, Python and shell tools read these
/// entries. The entries show processors, memory, times, and the kernel's version, settings, file systems and
/// control groups.
const KEPT: [&str; 11] = [
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

/// Files mounted over hidden entries. No process may open these files. Both are removed from the root folder
/// when all entries are hidden.
const NO_FILE: &CStr = c"/no-file";
const NO_FOLDER: &CStr = c"/no-folder";

/// All other entries of `/proc` that are not processes. Looked up once, because they are the same for all
/// workers.
static HIDDEN: OnceLock<Vec<Hidden>> = OnceLock::new();

struct Hidden {
    at: CString,
    is_folder: bool,
}

/// Looks up the entries to hide. Runs in the keeper, before the fork.
pub(super) fn prepare() {
    HIDDEN.get_or_init(|| {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let hidden = entries.filter_map(|entry| {
            let name = entry.file_name();
            let name = name.to_str()?;
            let kind = entry.file_type().ok()?;
            let is_shown = kind.is_symlink() || KEPT.contains(&name) || name.parse::<u32>().is_ok();
            let at = CString::new(entry.path().as_os_str().as_bytes()).ok()?;
            (!is_shown).then(|| Hidden { at, is_folder: kind.is_dir() })
        });
        hidden.collect()
    });
}

/// Hides the entries. Runs in the forked child, and makes only system calls. Skips entries that no longer
/// exist.
pub(super) fn hide() -> Result<(), Errno> {
    let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::RDONLY;
    drop(rustix::fs::open(NO_FILE, flags, Mode::empty())?);
    rustix::fs::mkdir(NO_FOLDER, Mode::empty())?;
    for Hidden { at, is_folder } in HIDDEN.get().into_iter().flatten() {
        let with = if *is_folder { NO_FOLDER } else { NO_FILE };
        match mount(Some(with), at, None, libc::MS_BIND, None) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    // Also restricts the mounts that hide the entries.
    restrict(c"/proc", Access::Read)?;
    rustix::fs::unlink(NO_FILE)?;
    rustix::fs::rmdir(NO_FOLDER)
}

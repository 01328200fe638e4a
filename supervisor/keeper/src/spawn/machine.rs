//! What a `/proc` of its own shows beside a worker's processes: the machine. Of that it keeps what runtimes read.
//!
//! (The kernel's own option for it, `subset=pid`, hides that as well.)

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::mounts::{Access, mount, restrict};

/// Read by C libraries, allocators, Node, Java, Go, Python and the tools of a shell: processors and memory, times,
/// the kernel's version and settings, its kinds of file systems and control groups.
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

/// What hides the others: no process may open it. They are gone from the root folder when all is hidden.
const NO_FILE: &CStr = c"/no-file";
const NO_FOLDER: &CStr = c"/no-folder";

/// Everything else in `/proc` that is no process; looked up once, for it is the same for all.
static HIDDEN: OnceLock<Vec<Hidden>> = OnceLock::new();

struct Hidden {
    at: CString,
    is_folder: bool,
}

/// Looks up what is to be hidden: for the keeper, before the fork.
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

/// Hides it. For a forked child: system calls and nothing else. What the kernel has no more is nothing to hide.
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
    // Nor is anything to be done with what hides.
    restrict(c"/proc", Access::Read)?;
    rustix::fs::unlink(NO_FILE)?;
    rustix::fs::rmdir(NO_FOLDER)
}

//! Attempts to create files with set-user-id and set-group-id bits. A user outside the sandbox who executes such a file
//! gains the rights of the file's owner.
//!
//! The files are empty and not executable, and each attempt removes them.

use std::ffi::CString;
use std::fs;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::Gone;
use crate::Targets;
use crate::calls::{At, Refused, Tried, address, call, close};

const HERE: usize = libc::AT_FDCWD as usize;
const SET_USER_ID: usize = 0o4600;
const SET_GROUP_ID: usize = 0o2600;
/// The number of `fchmodat2` on all architectures. `libc` does not define it for every one.
const FCHMODAT2: libc::c_long = 452;

/// Returns a path in the temporary folder that no other process uses.
fn fresh(what: &str) -> PathBuf {
    std::env::temp_dir().join(format!("{what}-{}", std::process::id()))
}

fn text(path: &Path) -> Result<CString, Refused> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Refused::nothing("a path"))
}

/// Combines the results of several variants of an attempt. Succeeds if any variant succeeds; otherwise returns the
/// first refusal. Ignores variants that the kernel or the architecture does not support.
fn any(ways: impl IntoIterator<Item = (&'static str, Result<usize, Errno>)>) -> Tried {
    let mut refusal = None;
    for (name, result) in ways {
        match result {
            Ok(_) => return Ok(format!("by {name}")),
            Err(Errno::ENOSYS) => {}
            Err(errno) => refusal = refusal.or(Some((name, errno))),
        }
    }
    match refusal {
        Some((name, errno)) => Err(errno).at(&format!("set the bit by {name}")),
        None => Err(Refused::nothing("set the bit")),
    }
}

pub(super) fn by_changing_the_mode(_: &Targets) -> Tried {
    let path = fresh("mode");
    let _gone = Gone(&path);
    let file = File::create(&path).at("create a file in its own temporary folder")?;
    let (path, file) = (text(&path)?, file.as_raw_fd() as usize);
    let path = path.as_ptr() as usize;
    let mut results = Vec::new();
    for mode in [SET_USER_ID, SET_GROUP_ID] {
        #[cfg(target_arch = "x86_64")]
        results.push(("chmod", call(libc::SYS_chmod, [path, mode])));
        results.push(("fchmod", call(libc::SYS_fchmod, [file, mode])));
        results.push(("fchmodat", call(libc::SYS_fchmodat, [HERE, path, mode])));
        results.push(("fchmodat2", call(FCHMODAT2, [HERE, path, mode, 0])));
    }
    any(results)
}

pub(super) fn of_a_folder(_: &Targets) -> Tried {
    let path = fresh("folder");
    fs::create_dir(&path).at("create a folder in its own temporary folder")?;
    let name = text(&path)?;
    let result = call(libc::SYS_fchmodat, [HERE, name.as_ptr() as usize, 0o2700]);
    fs::remove_dir(&path).at("remove it again")?;
    any([("fchmodat", result)])
}

pub(super) fn by_making_a_file(_: &Targets) -> Tried {
    let folder = text(&std::env::temp_dir())?;
    let path = fresh("start");
    let _gone = Gone(&path);
    let name = text(&path)?;
    let name = name.as_ptr() as usize;
    let flags = (libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC) as usize;
    let unnamed = (libc::O_TMPFILE | libc::O_WRONLY | libc::O_CLOEXEC) as usize;
    let again =
        |result: Result<usize, Errno>| result.map(close).map(|()| fs::remove_file(&path).map_or(0, |()| 0));
    let mut results = Vec::new();
    for mode in [SET_USER_ID, SET_GROUP_ID] {
        #[cfg(target_arch = "x86_64")]
        {
            results.push(("open", again(call(libc::SYS_open, [name, flags, mode]))));
            results.push(("creat", again(call(libc::SYS_creat, [name, mode]))));
        }
        results.push(("openat", again(call(libc::SYS_openat, [HERE, name, flags, mode]))));
        let unnamed = call(libc::SYS_openat, [HERE, folder.as_ptr() as usize, unnamed, mode]);
        results.push(("openat of an unnamed file", unnamed.inspect(|&file| close(file))));
        let regular = libc::S_IFREG as usize;
        let made = call(libc::SYS_mknodat, [HERE, name, mode | regular, 0]);
        results.push(("mknodat", made.inspect(|_| drop(fs::remove_file(&path)))));
    }
    any(results)
}

pub(super) fn past_the_filter(_: &Targets) -> Tried {
    /// `struct open_how` of `openat2(2)`.
    #[repr(C)]
    struct How {
        flags: u64,
        mode: u64,
        resolve: u64,
    }
    let path = fresh("how");
    let _gone = Gone(&path);
    let name = text(&path)?;
    let flags = (libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC) as u64;
    let how = How { flags, mode: SET_USER_ID as u64, resolve: 0 };
    let arguments = [HERE, name.as_ptr() as usize, address(&how), size_of::<How>()];
    close(call(libc::SYS_openat2, arguments).at("create a file with a set-user-id bit with openat2")?);
    Ok("by openat2".into())
}

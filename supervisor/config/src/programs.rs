//! Resolves relative paths and bare program names in the configuration, and checks that the files and folders exist and
//! are accessible. `relations` calls these checks. Does not run programs or create folders. Apart from this module, the
//! crate reads only configuration files and secrets from disk.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, StatVfsMountFlags, accessat, statvfs};

use super::defaults;
use super::diagnostics::shown;
use super::values::{ValueError, split_help};

/// Resolves `path` against `folder` and removes `.` components. Keeps symbolic links and `..`, which only the kernel
/// can resolve correctly.
pub(super) fn resolve(folder: &Path, path: &str) -> PathBuf {
    folder.join(path).components().collect()
}

/// Resolves the name of a program. A name that contains `/` is a path relative to the folder of the configuration file.
/// Any other name is looked up in `search_path`.
pub(super) fn program(
    label: &str,
    name: &str,
    folder: &Path,
    search_path: Option<&OsStr>,
) -> Result<PathBuf, ValueError> {
    if name.contains('/') {
        let path = resolve(folder, name);
        check_program(label, &path, folder)?;
        return Ok(path);
    }
    let search_path = search_path.unwrap_or(OsStr::new(defaults::SEARCH_PATH));
    // Ignores empty and relative entries, which would make the choice of the program depend on the supervisor's working
    // directory.
    let folders: Vec<PathBuf> =
        std::env::split_paths(search_path).filter(|entry| entry.is_absolute()).collect();
    let candidates = folders.iter().map(|folder| folder.join(name));
    if let Some(found) = candidates.into_iter().find(|path| runs(path)) {
        return Ok(found);
    }
    let searched = folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(":");
    let help = if runs(&folder.join(name)) {
        format!("the program is in the directory of the configuration file: write \"./{}\"", shown(name))
    } else if name.contains(char::is_whitespace) {
        split_help(label.trim_end_matches("[0]"), name)
    } else {
        format!(
            "install the program in PATH ({searched}), or write a path, as in \"./{0}\" or \"/opt/{0}\"",
            shown(name)
        )
    };
    Err(ValueError::new(format!("`{label}`: there is no program `{}` in PATH", shown(name)), help))
}

fn runs(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file()) && may(path, Access::EXEC_OK).is_ok()
}

/// Checks access to a path with the effective user ID, which the kernel also uses when a file is opened.
fn may(path: &Path, access: Access) -> rustix::io::Result<()> {
    accessat(CWD, path, access, AtFlags::EACCESS)
}

/// Checks that the supervisor's user has the required access to a path.
fn check_access(
    label: &str,
    path: &Path,
    access: Access,
    (done, able): (&str, &str),
) -> Result<(), ValueError> {
    may(path, access).map_err(|error| {
        let message = format!("`{label}`: {} cannot be {done}: {error}", path.display());
        ValueError::new(message, format!("make sure that the path is {able} by the supervisor's user"))
    })
}

fn check_program(label: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    check_regular_file(label, "program", path, folder)?;
    may(path, Access::EXEC_OK).map_err(|_| {
        ValueError::new(
            format!("`{label}`: {} is not executable", path.display()),
            format!("run `chmod +x {}`, or configure another program", path.display()),
        )
    })
}

/// Checks that a library is a readable file.
pub(super) fn library(label: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    check_regular_file(label, "library", path, folder)?;
    check_access(label, path, Access::READ_OK, ("read", "readable"))
}

/// Checks that a folder can be the working directory of workers.
pub(super) fn working_folder(label: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    let found = look_up(label, "directory", path, folder)?;
    if !found.is_dir() {
        let parent = path.parent().unwrap_or(Path::new("/"));
        return Err(ValueError::new(
            format!("`{label}`: {} is not a directory", path.display()),
            format!("specify a directory, as in \"{}\"", parent.display()),
        ));
    }
    check_access(label, path, Access::EXEC_OK, ("entered", "accessible"))
}

/// Checks that `path` either is a usable folder or does not exist yet. Does not check the parent folders.
pub(super) fn future_folder(label: &str, path: &Path) -> Result<(), ValueError> {
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => Err(ValueError::new(
            format!("`{label}`: {} is not a directory", path.display()),
            "specify an existing directory, or a path that does not exist yet",
        )),
        Ok(_) => check_access(label, path, Access::WRITE_OK | Access::EXEC_OK, ("written to", "writable")),
        Err(_) => Ok(()),
    }
}

/// Checks that a file or folder exists.
pub(super) fn present(label: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    look_up(label, "file or directory", path, folder).map(drop)
}

/// Checks that a file or folder exists and is not on a read-only file system. Devices are exempt, because they can be
/// written to on any file system.
pub(super) fn writable(label: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    let found = look_up(label, "file or directory", path, folder)?;
    let is_on_disk = found.is_file() || found.is_dir();
    let is_read_only = || statvfs(path).is_ok_and(|about| about.f_flag.contains(StatVfsMountFlags::RDONLY));
    if is_on_disk && is_read_only() {
        return Err(ValueError::new(
            format!("`{label}`: {} is on a read-only file system", path.display()),
            format!(
                "mount it with write permission (`ReadWritePaths={}` in a unit with ProtectSystem=), or write another \
                 path",
                path.display()
            ),
        ));
    }
    Ok(())
}

fn check_regular_file(label: &str, what: &str, path: &Path, folder: &Path) -> Result<(), ValueError> {
    let found = look_up(label, what, path, folder)?;
    if found.is_file() {
        return Ok(());
    }
    let kind = if found.is_dir() { "a directory" } else { "not a regular file" };
    Err(ValueError::new(
        format!("`{label}`: {} is {kind}, not a {what}", path.display()),
        format!("specify the path of the {what} itself"),
    ))
}

fn look_up(label: &str, what: &str, path: &Path, folder: &Path) -> Result<fs::Metadata, ValueError> {
    fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => ValueError::new(
            format!("`{label}`: there is no {what} {}", path.display()),
            format!("relative paths start at the directory of the configuration file, {}", folder.display()),
        ),
        _ => ValueError::new(
            format!("`{label}`: {} cannot be inspected: {error}", path.display()),
            "make each parent directory accessible to the supervisor's user",
        ),
    })
}

/// Checks that `path` is short enough for a Unix socket and is not a directory.
pub(super) fn socket(label: &str, path: &Path) -> Result<(), ValueError> {
    let bytes = path.as_os_str().len();
    if bytes > defaults::SOCKET_PATH_BYTES_MAX {
        return Err(ValueError::new(
            format!(
                "`{label}`: the path of a Unix socket can have at most {} bytes, but this path has {bytes}: {}",
                defaults::SOCKET_PATH_BYTES_MAX,
                path.display()
            ),
            "choose a shorter path, as in \"/run/bulkhead/jobs.sock\"",
        ));
    }
    if path.file_name().is_none() || path.is_dir() {
        return Err(ValueError::new(
            format!("`{label}`: {} is a directory, not a socket", path.display()),
            format!(
                "specify the path of a file in that directory, as in \"{}\"",
                path.join(defaults::SOCKET_NAME).display()
            ),
        ));
    }
    Ok(())
}

/// Returns true if both paths refer to the same file once the symbolic links in their folders are resolved. The file
/// itself does not have to exist.
pub(super) fn is_same_file(a: &Path, b: &Path) -> bool {
    let folder = |path: &Path| path.parent().and_then(|folder| fs::canonicalize(folder).ok());
    a == b || (a.file_name() == b.file_name() && folder(a).is_some() && folder(a) == folder(b))
}

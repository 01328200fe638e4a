//! Checks whether a file can be written, so that a command can fail before it does any work. `bulkhead submit` and
//! `bulkhead-fleet submit` check the files for results.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, openat};
use rustix::io::Errno;

/// Maximum number of symbolic links to follow, the same as in Linux.
const LINKS_MAX: usize = 40;

/// Returns an error if a file cannot be written to `path`. Does not create the file.
pub fn check(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(found) if found.is_file() => OpenOptions::new().append(true).open(path).map(drop),
        // Opening a pipe would wait for a reader.
        Ok(_) => Ok(accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => try_create(&folder_of(path)?),
        Err(error) => Err(error),
    }
}

/// Creates a temporary file and removes it, because permissions do not tell whether a file can be created, for example
/// on a read-only file system. The file has no name, unless the file system does not support such files.
fn try_create(folder: &Path) -> io::Result<()> {
    let mode = Mode::RUSR | Mode::WUSR;
    match openat(CWD, folder, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        created => return Ok(created.map(drop)?),
    }
    let path = folder.join(format!(".bulkhead-output-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)
}

/// Returns the folder in which a file would be created if `path` were opened. Follows symbolic links in the last
/// component of `path`, because opening a dangling link creates the link's target.
fn folder_of(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let bytes = path.as_os_str().as_encoded_bytes();
        if path.file_name().is_none() || bytes.ends_with(b"/") || bytes.ends_with(b"/.") {
            return Err(io::ErrorKind::NotFound.into());
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match std::fs::read_link(&path) {
            Ok(target) => path = folder.join(target),
            Err(_) => return Ok(folder.to_owned()),
        }
    }
    Err(Errno::LOOP.into())
}

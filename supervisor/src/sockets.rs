//! The supervisor's listening sockets: made with the right mode from the first moment, listening from the
//! first moment, never taken from a supervisor that lives, cleared of one that died.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;

use crate::keeper;
use crate::succession::{self, NoLock};

/// A bound socket. Dropping it removes the path; the lock lasts as long.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    /// Device and inode: whether the path is still ours.
    identity: (u64, u64),
    listener: Option<UnixListener>,
    _lock: File,
}

/// Why a socket could not be had. Fits after "failed to".
#[derive(Debug, thiserror::Error)]
#[error("listen on {}: {problem}", path.display())]
pub struct BindError {
    path: PathBuf,
    problem: String,
}

impl Bound {
    /// Binds `path` with exactly `mode`. A missing parent folder is made, with exactly `folder_mode`.
    ///
    /// Changes the process's umask for a moment: call it while there is one thread.
    pub fn bind(path: &Path, mode: u32, folder_mode: u32) -> Result<Self, BindError> {
        let fail = |problem: String| BindError { path: path.to_owned(), problem };
        if let Some(parent) = path.parent() {
            let made = with_umask(0, || DirBuilder::new().recursive(true).mode(folder_mode).create(parent));
            made.map_err(|error| fail(format!("the folder {} cannot be made: {error}", parent.display())))?;
        }
        let lock = lock(path).map_err(fail)?;
        clear_stale(path).map_err(fail)?;
        let listener = appear(path, mode).map_err(fail)?;
        let identity = identity(path).map_err(|error| fail(error.to_string()))?;
        Ok(Self { path: path.to_owned(), identity, listener: Some(listener), _lock: lock })
    }

    /// Hands out the listener, once.
    pub fn take_listener(&mut self) -> io::Result<UnixListener> {
        self.listener.take().ok_or_else(|| io::Error::other("the listener was taken before"))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Gone already is as good. If somebody has removed it, another supervisor's may be there.
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Binds a socket and lets it appear at `path` only once it listens and has its mode: between `bind(2)` and
/// `listen(2)` whoever finds a socket is refused.
fn appear(path: &Path, mode: u32) -> Result<UnixListener, String> {
    let aside = with_suffix(path, ".new");
    // Where that is too long for an address, the moment cannot be helped.
    let is_short = SocketAddr::from_pathname(&aside).is_ok();
    let first = if is_short { &aside } else { path };
    if is_short {
        // What a supervisor that was killed just then has left.
        let _ = std::fs::remove_file(first);
    }
    let listener = with_umask(0o777, || UnixListener::bind(first)).map_err(|error| error.to_string())?;
    // Connections inherit it. Older kernels do not know it: see `descriptors`.
    if let Err(error) = keeper::refuse_descriptors(&listener)
        && error != Errno::NOPROTOOPT
    {
        return Err(format!("it cannot be kept from taking descriptors: {error}"));
    }
    std::fs::set_permissions(first, Permissions::from_mode(mode))
        .map_err(|error| format!("its mode cannot be set: {error}"))?;
    if is_short {
        std::fs::rename(first, path).map_err(|error| format!("it cannot be put in its place: {error}"))?;
    }
    Ok(listener)
}

fn with_umask<T>(mask: u32, make: impl FnOnce() -> T) -> T {
    let before = rustix::process::umask(Mode::from_raw_mode(mask));
    let made = make();
    rustix::process::umask(before);
    made
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whoever holds the lock beside the socket owns the path. It is never removed: a lock on a removed file
/// and one on its successor would both be held.
fn lock(path: &Path) -> Result<File, String> {
    let name = with_suffix(path, ".lock");
    succession::lock(&name).map_err(|why| match why {
        NoLock::Held => {
            "another supervisor is running on this socket; stop it, or configure another path".into()
        }
        NoLock::Unopened(error) => {
            format!("the lock file {} cannot be opened: {error}", name.display())
        }
        NoLock::Refused(errno) => format!("the lock file {} cannot be locked: {errno}", name.display()),
    })
}

fn clear_stale(path: &Path) -> Result<(), String> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(
                "something that is not a socket is there; remove it, or configure another path".into()
            );
        }
        Ok(_) => {}
    }
    let reach = || match UnixStream::connect(path) {
        Ok(_) => Err(()),
        Err(error) => Ok(error),
    };
    match succession::try_while_taken(reach, |()| true) {
        Ok(error) if error.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|error| format!("a stale socket cannot be removed: {error}"))
        }
        Ok(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(error) => Err(format!("a socket is there, and whether it is in use cannot be told: {error}")),
        Err(()) => Err("some program listens there already; stop it, or configure another path".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// The umask is the process's, and tests are threads.
    static UMASK: Mutex<()> = Mutex::new(());

    #[test]
    fn a_stale_socket_is_cleared_and_a_live_one_is_not_taken() {
        let _alone = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/jobs.sock");
        let bound = Bound::bind(&path, 0o600, 0o700).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        let error = Bound::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");
        drop(bound);
        assert!(!path.exists());

        drop(UnixListener::bind(&path).unwrap());
        drop(Bound::bind(&path, 0o660, 0o700).unwrap());

        let removed = Bound::bind(&path, 0o600, 0o700).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(removed);
        assert!(path.exists(), "another's socket");
        let error = Bound::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("listens there already"), "{error}");

        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(Bound::bind(&path, 0o600, 0o700).unwrap_err().to_string().contains("not a socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn a_folder_that_is_made_has_its_mode_and_one_that_is_there_keeps_it() {
        let _alone = UMASK.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let jobs = folder.path().join("a/b/jobs.sock");
        let _jobs = Bound::bind(&jobs, 0o666, 0o755).unwrap();
        assert_eq!([mode(&folder.path().join("a")), mode(&folder.path().join("a/b"))], [0o755, 0o755]);
        let admin = folder.path().join("a/b/admin.sock");
        let _admin = Bound::bind(&admin, 0o600, 0o700).unwrap();
        assert_eq!(mode(&folder.path().join("a/b")), 0o755);
        assert_eq!([mode(&jobs), mode(&admin)], [0o666, 0o600]);
        // Whoever could open a lock file could hold the lock.
        for socket in [&jobs, &admin] {
            assert_eq!(mode(&with_suffix(socket, ".lock")), 0o600);
        }
    }
}

//! Binds the jobs socket and the admin socket, which are Unix sockets. A socket file appears only after its mode has
//! been set and the socket is listening. The socket of a dead supervisor is removed, but that of a running supervisor
//! is never replaced. TCP listeners are bound by the `supervisor` crate.

use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;

use bulkhead_linux::scm_rights::refuse_descriptors;
use bulkhead_plane::handover::inherited;
use bulkhead_plane::lock::{self, LockError};

/// Maximum number of connections in the backlog. The kernel may impose a lower limit.
const BACKLOG_MAX: i32 = 4096;

/// A bound Unix socket with a lock on its path. Dropping this value releases the lock. It also removes the socket file,
/// unless the file belongs to the service manager.
#[derive(Debug)]
pub struct BoundSocket {
    path: PathBuf,
    mode: u32,
    folder_mode: u32,
    /// Device and inode of the socket file. Used to check whether the file at the path is still the file of this
    /// socket.
    identity: (u64, u64),
    listener: Option<UnixListener>,
    lock: File,
    /// True while this supervisor serves the socket. False for a successor that has not taken over yet, and for a
    /// predecessor that has handed over.
    is_owner: bool,
    /// True if the service manager bound the socket.
    is_inherited: bool,
}

/// Flags for the sockets that were bound by the service manager. The service manager also listens on these sockets, so
/// this process must not shut them down.
#[derive(Clone, Copy, Debug, Default)]
pub struct InheritedSockets {
    /// The jobs socket.
    pub jobs: bool,
    /// The admin socket.
    pub admin: bool,
    /// The `http` TCP socket.
    pub http: bool,
    /// The `jobs_http` TCP socket.
    pub jobs_http: bool,
}

impl InheritedSockets {
    fn each(&mut self) -> [(&'static str, &mut bool); 4] {
        let Self { jobs, admin, http, jobs_http } = self;
        [
            (inherited::JOBS, jobs),
            (inherited::ADMIN, admin),
            (inherited::HTTP, http),
            (inherited::JOBS_HTTP, jobs_http),
        ]
    }

    /// Returns flags for the sockets that the service manager bound, given the names of these sockets. During an
    /// upgrade, the predecessor sends the names.
    pub fn from_names(names: &[String]) -> Self {
        let mut sockets = Self::default();
        for (name, is_inherited) in sockets.each() {
            *is_inherited = names.iter().any(|found| found == name);
        }
        sockets
    }

    /// Returns the names of the sockets that the service manager bound. During an upgrade, the predecessor sends these
    /// names to the successor.
    pub fn names(mut self) -> Vec<String> {
        let names = self.each().into_iter().filter(|(_, is_inherited)| **is_inherited);
        names.map(|(name, _)| name.to_owned()).collect()
    }
}

/// The jobs socket and the admin socket. Each has a mutex so that its file can be checked while other threads
/// use the listeners.
#[derive(Debug)]
pub struct Sockets {
    /// Socket for clients that submit jobs.
    pub jobs: Mutex<BoundSocket>,
    /// Socket for operators.
    pub admin: Mutex<BoundSocket>,
}

impl Sockets {
    /// Returns true if this supervisor serves at least one of the sockets.
    pub fn has_owned(&self) -> bool {
        self.each().any(|bound| bound.is_owner())
    }

    /// Sets for both sockets whether this supervisor serves them.
    pub fn set_owner(&self, is_owner: bool) {
        self.each().for_each(|mut bound| bound.set_owner(is_owner));
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, BoundSocket>> {
        [&self.jobs, &self.admin]
            .into_iter()
            .map(|bound| bound.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Error for a socket that cannot be bound. The message is worded to follow "failed to".
#[derive(Debug, thiserror::Error)]
#[error("listen on {}: {problem}", path.display())]
pub struct BindError {
    path: PathBuf,
    problem: String,
}

impl BoundSocket {
    /// Binds a socket at `path` and listens on it. The file mode is exactly `mode`, regardless of the umask. Missing
    /// parent folders are created with exactly `folder_mode`.
    pub fn bind(path: &Path, mode: u32, folder_mode: u32) -> Result<Self, BindError> {
        let fail = |problem: String| BindError { path: path.to_owned(), problem };
        create_folders(path, folder_mode).map_err(fail)?;
        let lock = lock(path).map_err(fail)?;
        let (listener, identity) = listen_at(path, mode).map_err(fail)?;
        let listener = Some(listener);
        Ok(Self {
            path: path.to_owned(),
            mode,
            folder_mode,
            identity,
            listener,
            lock,
            is_owner: true,
            is_inherited: false,
        })
    }

    /// Takes over a socket that the previous supervisor is still serving during an upgrade.
    ///
    /// `is_inherited` is true if the service manager has bound the socket.
    pub fn take_over(
        path: &Path,
        (mode, folder_mode): (u32, u32),
        (listener, is_inherited): (UnixListener, bool),
        lock: OwnedFd,
    ) -> Self {
        // If the file is missing, the identity is a default value that matches no file. The socket can then be
        // recreated later.
        let identity = identity(path).unwrap_or_default();
        let (path, listener, lock) = (path.to_owned(), Some(listener), lock.into());
        Self { path, mode, folder_mode, identity, listener, lock, is_owner: false, is_inherited }
    }

    /// Sets whether this supervisor serves the socket. The file is checked, recreated and removed only while this
    /// supervisor serves the socket. The new owner sets the file's mode, which the other supervisor's configuration
    /// may not share.
    pub fn set_owner(&mut self, is_owner: bool) {
        let was_owner = std::mem::replace(&mut self.is_owner, is_owner);
        if was_owner || !is_owner || self.is_inherited || !self.exists() {
            return;
        }
        if let Err(error) = std::fs::set_permissions(&self.path, Permissions::from_mode(self.mode)) {
            tracing::warn!("failed to set the mode of {}: {error}", self.path.display());
        }
    }

    /// Returns true if this supervisor serves the socket.
    pub fn is_owner(&self) -> bool {
        self.is_owner
    }

    /// Returns a duplicate of the lock's descriptor for another supervisor.
    pub fn lock_descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.lock.try_clone()?.into())
    }

    /// Adopts a socket that the service manager bound at `path`. The supervisor changes neither the socket file nor its
    /// mode, because the service manager manages them.
    pub fn inherit(path: &Path, listener: UnixListener) -> Result<Self, BindError> {
        let fail = |problem: String| BindError { path: path.to_owned(), problem };
        let bound = listener.local_addr().map_err(|error| fail(error.to_string()))?;
        let at = bound.as_pathname();
        let identity =
            at.and_then(|at| identity(at).ok()).filter(|found| identity(path).ok() == Some(*found));
        let Some(identity) = identity else {
            let at = at.map_or_else(|| "no path".to_owned(), |at| at.display().to_string());
            return Err(fail(format!(
                "the service manager passed in a socket with a different path ({at}); use the same path for \
                 ListenStream= in the socket unit and in the configuration file"
            )));
        };
        let lock = lock(path).map_err(fail)?;
        set_refusal(&listener).map_err(fail)?;
        let (path, listener) = (path.to_owned(), Some(listener));
        Ok(Self {
            path,
            mode: 0,
            folder_mode: 0,
            identity,
            listener,
            lock,
            is_owner: true,
            is_inherited: true,
        })
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns true if the file at the path is still the file of this socket.
    pub fn exists(&self) -> bool {
        identity(&self.path).is_ok_and(|found| found == self.identity)
    }

    /// Binds a new socket at the same path after the file was removed. Creates missing parent folders. The returned
    /// listener replaces the previous one.
    pub fn recreate(&mut self) -> Result<UnixListener, BindError> {
        let fail = |problem: String| BindError { path: self.path.clone(), problem };
        if self.is_inherited {
            return Err(fail(
                "the service manager's socket file was removed; restart the socket unit".to_owned(),
            ));
        }
        create_folders(&self.path, self.folder_mode).map_err(fail)?;
        let own = self.lock.metadata().map(|found| (found.dev(), found.ino()));
        // If the lock file was removed as well, another supervisor may have created and locked a new one.
        let has_lock = own.is_ok_and(|own| identity(&lock_path(&self.path)).is_ok_and(|found| found == own));
        if !has_lock {
            self.lock = lock(&self.path).map_err(fail)?;
        }
        let (listener, identity) = listen_at(&self.path, self.mode).map_err(fail)?;
        self.identity = identity;
        Ok(listener)
    }

    /// Returns the listener. Fails if the listener has already been taken.
    pub fn take_listener(&mut self) -> io::Result<UnixListener> {
        self.listener.take().ok_or_else(|| io::Error::other("the listener was already taken"))
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // The file is removed only if it belongs to this socket, because another supervisor may have bound a socket at
        // the path. Errors are ignored, because the file may be missing.
        let is_removable = self.is_owner && !self.is_inherited;
        if is_removable && identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates a socket's missing parent folders. Their mode is exactly `mode`, regardless of the umask.
fn create_folders(path: &Path, mode: u32) -> Result<(), String> {
    let missing: Vec<&Path> = path.ancestors().skip(1).take_while(|folder| !folder.exists()).collect();
    for folder in missing.into_iter().rev().filter(|folder| !folder.as_os_str().is_empty()) {
        // The mode is set again, because the umask may have removed permissions.
        let made = DirBuilder::new().mode(mode).create(folder);
        let made = made.and_then(|()| std::fs::set_permissions(folder, Permissions::from_mode(mode)));
        match made {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(format!("the directory {} cannot be created: {error}", folder.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns a listening socket at this path, and the device and inode of its file.
fn listen_at(path: &Path, mode: u32) -> Result<(UnixListener, (u64, u64)), String> {
    remove_stale_socket(path)?;
    let listener = bind_listening(path, mode)?;
    let identity = identity(path).map_err(|error| error.to_string())?;
    Ok((listener, identity))
}

/// Binds a socket at a temporary path, and moves the file to `path` once the socket is listening and has the right
/// mode. If the socket were bound at `path` directly, clients that connect between `bind(2)` and `listen(2)` would be
/// refused.
fn bind_listening(path: &Path, mode: u32) -> Result<UnixListener, String> {
    let temporary = with_suffix(path, ".new");
    // If the temporary path is too long for a socket address, the socket is bound directly at `path`.
    let is_short = SocketAddr::from_pathname(&temporary).is_ok();
    let first = if is_short { &temporary } else { path };
    if is_short {
        // A supervisor that was killed while binding a socket may have left a file.
        remove_stale_socket(first).map_err(|problem| format!("{}: {problem}", first.display()))?;
    }
    let listener = bind_without_permissions(first).map_err(|error| error.to_string())?;
    set_refusal(&listener)?;
    std::fs::set_permissions(first, Permissions::from_mode(mode))
        .map_err(|error| format!("the socket's mode cannot be set: {error}"))?;
    if is_short {
        std::fs::rename(first, path).map_err(|error| format!("the socket cannot be renamed: {error}"))?;
    }
    Ok(listener)
}

/// Makes a listener refuse descriptors sent by clients. Accepted connections inherit this option. If the kernel
/// does not support the option, the data plane's `descriptors` module handles received descriptors.
fn set_refusal(listener: &UnixListener) -> Result<(), String> {
    match refuse_descriptors(listener) {
        Err(error) if error != Errno::NOPROTOOPT => {
            Err(format!("the socket option that prevents received descriptors cannot be set: {error}"))
        }
        _ => Ok(()),
    }
}

/// Binds a socket whose file has no permissions, so that no client can connect yet. On Linux, the file gets the mode
/// that the socket had before `bind(2)`.
fn bind_without_permissions(path: &Path) -> io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::empty())?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG_MAX)?;
    Ok(socket.into())
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

fn lock_path(socket: &Path) -> PathBuf {
    with_suffix(socket, ".lock")
}

/// Locks a socket's lock file. Only the supervisor that holds the lock may use the path. The lock file is never
/// removed. Otherwise, another supervisor could lock a new file while this one still holds the lock on the removed
/// file.
fn lock(path: &Path) -> Result<File, String> {
    let name = lock_path(path);
    lock::lock(&name).map_err(|why| match why {
        LockError::Held => {
            "another supervisor is using this socket; stop that supervisor, or configure another path".into()
        }
        LockError::Open(error) => {
            format!("the lock file {} cannot be opened: {error}", name.display())
        }
        LockError::Unsupported(errno) => {
            format!("the lock file {} cannot be locked: {errno}", name.display())
        }
    })
}

/// Removes the socket of a dead process. Fails if the path leads to another kind of file, or if a process is listening
/// on the socket.
fn remove_stale_socket(path: &Path) -> Result<(), String> {
    let mode = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error.to_string()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(
                "the path exists and is not a socket; remove the file, or configure another path".into()
            );
        }
        Ok(found) => found.permissions().mode() & 0o777,
    };
    // The connection stays open during the retries, so that a program that accepts no connections gets only one in its
    // backlog.
    let mut connection = None;
    let connect = || {
        if connection.as_ref().is_some_and(is_connected) {
            return Err(());
        }
        match connect_without_waiting(path) {
            Ok(connected) => {
                connection = Some(connected);
                Err(())
            }
            // The listener's backlog is full.
            Err(Errno::AGAIN) => Err(()),
            Err(errno) => Ok(errno),
        }
    };
    match lock::retry_while_taken(connect, |()| true) {
        // Only root can connect to a socket without permissions, which a supervisor leaves if it is killed while
        // binding the socket.
        Ok(errno) if errno == Errno::CONNREFUSED || errno == Errno::ACCESS && mode == 0 => {
            std::fs::remove_file(path).map_err(|error| format!("a stale socket cannot be removed: {error}"))
        }
        Ok(Errno::NOENT) => Ok(()),
        Ok(errno) => {
            Err(format!("failed to check whether the existing socket is in use: {}", io::Error::from(errno)))
        }
        Err(()) => {
            Err("another program is already listening on this socket; stop that program, or configure \
                        another path"
                .into())
        }
    }
}

/// Connects to a socket without blocking. A blocking `connect(2)` would wait while the listener's backlog is full.
fn connect_without_waiting(path: &Path) -> Result<OwnedFd, Errno> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns false if the connection has been closed by the listener or by the process that accepted the connection.
fn is_connected(connection: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(connection, PollFlags::empty())];
    let is_ready = poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
    !(is_ready && polled[0].revents().contains(PollFlags::HUP))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bind_replaces_only_stale_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/jobs.sock");
        let bound = BoundSocket::bind(&path, 0o600, 0o700).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");
        drop(bound);
        assert!(!path.exists());

        drop(UnixListener::bind(&path).unwrap());
        drop(BoundSocket::bind(&path, 0o660, 0o700).unwrap());

        let removed = BoundSocket::bind(&path, 0o600, 0o700).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(removed);
        assert!(path.exists(), "the socket of another process was removed");
        let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("is already listening on this socket"), "{error}");

        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert!(BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string().contains("not a socket"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn temporary_path_is_freed_only_of_stale_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let (path, temporary) = (folder.path().join("jobs.sock"), folder.path().join("jobs.sock.new"));
        drop(bind_without_permissions(&temporary).unwrap());
        drop(BoundSocket::bind(&path, 0o600, 0o700).unwrap());
        assert!(!temporary.exists());

        let _other = UnixListener::bind(&temporary).unwrap();
        let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("jobs.sock.new: another program is already listening"), "{error}");

        std::fs::remove_file(&temporary).unwrap();
        std::fs::write(&temporary, "precious").unwrap();
        let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("jobs.sock.new: the path exists and is not a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&temporary).unwrap(), "precious");
    }

    #[test]
    fn missing_socket_folders_are_created_with_given_mode() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let jobs = folder.path().join("a/b/jobs.sock");
        let _jobs = BoundSocket::bind(&jobs, 0o666, 0o755).unwrap();
        assert_eq!([mode(&folder.path().join("a")), mode(&folder.path().join("a/b"))], [0o755, 0o755]);
        let admin = folder.path().join("a/b/admin.sock");
        let _admin = BoundSocket::bind(&admin, 0o600, 0o700).unwrap();
        assert_eq!(mode(&folder.path().join("a/b")), 0o755);
        assert_eq!([mode(&jobs), mode(&admin)], [0o666, 0o600]);
        // Other users must not be able to open a lock file, because they could take the lock.
        for socket in [&jobs, &admin] {
            assert_eq!(mode(&with_suffix(socket, ".lock")), 0o600);
        }
    }

    /// The backlog of the program that listens on the socket is full. A blocking connect would never return.
    #[test]
    fn bind_fails_if_other_program_accepts_no_connections() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.sock");
        let other = bind_without_permissions(&path).unwrap();
        rustix::net::listen(&other, 1).unwrap();
        let mut connections = Vec::new();
        for _ in 0..2 {
            let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
            assert!(error.contains("is already listening on this socket"), "{error}");
            connections.extend(std::iter::from_fn(|| connect_without_waiting(&path).ok()));
            assert_eq!(connect_without_waiting(&path).unwrap_err(), Errno::AGAIN);
        }
        assert!(path.exists());
    }

    /// Checks that a removed socket is recreated unless its path is taken, and that a second supervisor cannot bind the
    /// path of a recreated socket.
    #[test]
    fn removed_socket_is_recreated_unless_path_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/jobs.sock");
        let mut bound = BoundSocket::bind(&path, 0o660, 0o755).unwrap();
        assert!(bound.exists());
        std::fs::remove_file(&path).unwrap();
        assert!(!bound.exists());
        let first = bound.recreate().unwrap();
        assert!(bound.exists() && UnixStream::connect(&path).is_ok());
        first.accept().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o660);

        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let _second = bound.recreate().unwrap();
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o755);
        let error = BoundSocket::bind(&path, 0o600, 0o700).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");

        std::fs::remove_dir_all(folder.path().join("run")).unwrap();
        let _other = BoundSocket::bind(&path, 0o600, 0o700).unwrap();
        assert!(!bound.exists() && bound.recreate().is_err());
    }

    /// Checks that the file of an inherited socket is neither removed nor recreated, and that a second supervisor
    /// cannot use the socket.
    #[test]
    fn inherited_socket_keeps_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.sock");
        let service_manager = UnixListener::bind(&path).unwrap();
        let mut inherited = BoundSocket::inherit(&path, service_manager.try_clone().unwrap()).unwrap();
        let error =
            BoundSocket::inherit(&path, service_manager.try_clone().unwrap()).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");
        UnixStream::connect(&path).unwrap();
        assert!(inherited.take_listener().unwrap().accept().is_ok());
        drop(inherited);
        assert!(path.exists() && UnixStream::connect(&path).is_ok());

        let mut inherited = BoundSocket::inherit(&path, service_manager.try_clone().unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!inherited.exists());
        let error = inherited.recreate().unwrap_err().to_string();
        assert!(error.contains("restart the socket unit"), "{error}");
        drop(inherited);
        for other in ["other.sock", "jobs.sock"] {
            let path = folder.path().join(other);
            let error =
                BoundSocket::inherit(&path, service_manager.try_clone().unwrap()).unwrap_err().to_string();
            assert!(error.contains("with a different path"), "{error}");
        }
    }

    #[test]
    fn new_owner_sets_mode_of_socket_unless_inherited() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("jobs.sock");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        let mut before = BoundSocket::bind(&path, 0o600, 0o700).unwrap();
        let take_over = |is_inherited| {
            let listener = before.listener.as_ref().unwrap().try_clone().unwrap();
            let lock = before.lock_descriptor().unwrap();
            BoundSocket::take_over(&path, (0o666, 0o700), (listener, is_inherited), lock)
        };
        let (mut after, mut inherited) = (take_over(false), take_over(true));
        inherited.set_owner(true);
        assert_eq!(mode(), 0o600);
        before.set_owner(false);
        after.set_owner(true);
        assert_eq!(mode(), 0o666);
        // The upgrade fails, and the previous owner serves the socket again.
        after.set_owner(false);
        before.set_owner(true);
        assert_eq!(mode(), 0o600);
        // An operator changes the mode, and the next upgrade fails before the successor takes over.
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        before.set_owner(true);
        assert_eq!(mode(), 0o640);
    }

    #[test]
    fn new_socket_initially_has_no_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("closed.sock");
        let _listener = bind_without_permissions(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0);
    }
}

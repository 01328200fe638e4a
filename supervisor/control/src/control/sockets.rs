//! Checks every second that the socket files exist, and reports a removed file, because clients can then no longer
//! connect. A reload creates missing files again. `crate::sockets` binds the sockets. The data plane and `admin_socket`
//! accept the connections.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bulkhead_api::{EventKind, Severity};
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::Control;
use crate::sockets::{BoundSocket, Sockets};
use bulkhead_plane::command::{Command, Event};
use bulkhead_plane::handover::inherited;

/// Interval between checks that the socket files still exist.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Sockets whose files are checked, and a channel that delivers the new listener when the admin socket has been
/// recreated.
pub(super) struct SocketFiles {
    /// The sockets to check. `None` in an embedded supervisor, which has no sockets.
    sockets: Option<Arc<Sockets>>,
    next_admin: watch::Sender<Option<Arc<std::os::unix::net::UnixListener>>>,
    /// True for each socket whose file was missing at the last check.
    missing: Mutex<[bool; 2]>,
    /// Duplicate of the admin socket's listener, which is passed to a successor.
    admin: Mutex<Option<OwnedFd>>,
}

/// Receiver for new listeners of the admin socket. Each listener replaces the previous one.
pub(super) struct NextAdmin(watch::Receiver<Option<Arc<std::os::unix::net::UnixListener>>>);

impl NextAdmin {
    pub(super) async fn listener(&mut self) -> UnixListener {
        loop {
            if self.0.changed().await.is_err() {
                return std::future::pending().await;
            }
            let listener = self.0.borrow_and_update().as_ref().map(|listener| listener.try_clone());
            let listener = listener.and_then(Result::ok).map(UnixListener::from_std);
            if let Some(Ok(listener)) = listener {
                return listener;
            }
        }
    }
}

impl SocketFiles {
    pub(super) fn new(sockets: Option<Arc<Sockets>>, admin: Option<OwnedFd>) -> Self {
        let admin = Mutex::new(admin);
        Self { sockets, next_admin: watch::Sender::new(None), missing: Mutex::default(), admin }
    }

    /// Records whether this supervisor owns the socket files. During an upgrade, the predecessor or successor can own
    /// them instead.
    pub(super) fn set_owner(&self, is_owner: bool) {
        self.sockets.iter().for_each(|sockets| sockets.set_owner(is_owner));
    }

    /// Returns the descriptors that a successor needs: the locks of both sockets and the listener of the admin socket.
    /// Each descriptor is returned with the socket's name and path.
    pub(super) fn descriptors(&self) -> io::Result<Vec<(&'static str, String, OwnedFd)>> {
        let locks = [inherited::JOBS_LOCK, inherited::ADMIN_LOCK];
        let mut found = Vec::new();
        for ((_, bound), name) in self.each().zip(locks) {
            let bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
            found.push((name, path_of(&bound), bound.lock_descriptor()?));
        }
        if let Some(admin) = &*self.admin.lock().unwrap_or_else(PoisonError::into_inner) {
            found.push((inherited::ADMIN, String::new(), admin.try_clone()?));
        }
        Ok(found)
    }

    pub(super) fn next_admin(&self) -> NextAdmin {
        NextAdmin(self.next_admin.subscribe())
    }

    fn each(&self) -> impl Iterator<Item = (&'static str, &Mutex<BoundSocket>)> {
        let sockets = self.sockets.iter();
        sockets.flat_map(|sockets| [("jobs", &sockets.jobs), ("admin", &sockets.admin)])
    }
}

/// Periodically checks that the socket files still exist, and reports files that were removed. Ends when the control
/// plane shuts down.
pub(super) async fn watch(control: Arc<Control>) {
    control.every(CHECK_INTERVAL, |control| async move { control.check_sockets() }).await;
}

impl Control {
    fn check_sockets(&self) {
        for (index, (socket, bound)) in self.sockets.each().enumerate() {
            let bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
            let is_missing = bound.is_owner() && !bound.exists();
            let mut missing = self.sockets.missing.lock().unwrap_or_else(PoisonError::into_inner);
            if is_missing && !std::mem::replace(&mut missing[index], is_missing) {
                let help = "the socket's file was removed, so clients cannot connect: send SIGHUP to create the \
                            file again";
                let (socket, path, message) = (socket.to_owned(), path_of(&bound), help.to_owned());
                self.report_socket(Severity::Warning, EventKind::SocketRemoved { socket, path, message });
            }
            missing[index] = is_missing;
        }
    }

    /// Recreates each socket whose file is missing.
    pub(super) fn recreate_sockets(&self) {
        for (socket, bound) in self.sockets.each() {
            let mut bound = bound.lock().unwrap_or_else(PoisonError::into_inner);
            if !bound.is_owner() || bound.exists() {
                continue;
            }
            let recreated = bound.recreate().map_err(|error| error.to_string());
            let used = recreated.and_then(|listener| {
                self.use_listener(socket, listener).map_err(|error| format!("use it: {error}"))
            });
            let (socket, path) = (socket.to_owned(), path_of(&bound));
            match used {
                Ok(()) => self.report_socket(Severity::Info, EventKind::SocketRenewed { socket, path }),
                Err(problem) => {
                    // The file is removed, because the new listener is already closed and the next attempt binds the
                    // socket only if the file is missing.
                    if bound.exists() {
                        let _ = std::fs::remove_file(bound.path());
                    }
                    let message = format!("failed to {problem}");
                    self.report_socket(
                        Severity::Critical,
                        EventKind::SocketNotRenewed { socket, path, message },
                    );
                }
            }
        }
    }

    fn use_listener(&self, socket: &str, listener: std::os::unix::net::UnixListener) -> io::Result<()> {
        if socket == "jobs" {
            return self.commands.send(Command::Listen(listener)).map_err(io::Error::other);
        }
        listener.set_nonblocking(true)?;
        let kept = listener.try_clone()?.into();
        *self.sockets.admin.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
        self.sockets.next_admin.send_replace(Some(Arc::new(listener)));
        Ok(())
    }

    fn report_socket(&self, severity: Severity, what: EventKind) {
        self.events.add(Event::new(severity, None, what));
    }
}

fn path_of(bound: &BoundSocket) -> String {
    bound.path().display().to_string()
}

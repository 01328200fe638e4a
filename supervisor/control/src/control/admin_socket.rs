//! Accepts connections on the admin socket, limits their number, and checks who connects. Only root and the
//! supervisor's user are accepted, and no descendant of the supervisor. `connections` serves the requests.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Control;
use super::connections::{Admission, Dispatcher, LAST_ACCEPT_TIMEOUT, NewConnection, has_waiting};
use super::sockets::NextAdmin;
use bulkhead_linux::peer::UnrelatedProcesses;
use bulkhead_plane::command::{Command, CommandSender};
use bulkhead_plane::peer_check::{self, ClientRejection};

/// Maximum number of rejected clients to respond to at the same time. Further rejected connections are closed without a
/// response. Also the maximum number of queued reports about rejected connections.
const REJECTED_MAX: usize = 16;

/// Maximum number of connections served at the same time. Further connections wait in the listener's backlog.
pub(crate) const CONNECTIONS_MAX: usize = 384;

/// Maximum total number of connections, including those of rejected clients that are waiting for a response.
pub(super) const ADMITTED_MAX: usize = CONNECTIONS_MAX + REJECTED_MAX;

/// Accepts connections to the admin socket until the control plane shuts down.
pub(super) async fn accept_all(
    control: &Control,
    listener: UnixListener,
    own_uid: u32,
    dispatcher: Dispatcher<UnixStream>,
) {
    let mut next = control.sockets.next_admin();
    let mut admin = AdminListener {
        listener,
        own_uid,
        unrelated: control.unrelated.clone(),
        commands: control.commands.clone(),
        permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        rejection_permits: Arc::new(Semaphore::new(REJECTED_MAX)),
        report_permits: Arc::new(Semaphore::new(REJECTED_MAX)),
    };
    control.until_shutdown(admin.run(control, &mut next, &dispatcher)).await;
    // Connections in the backlog are accepted by another supervisor, or by the next process of the service.
    if control.inherited.admin || !control.handover.is_listening() {
        return;
    }
    // Connections in the backlog are still accepted, so that these clients get a response instead of a reset.
    if has_waiting(&admin.listener) {
        let _ = tokio::time::timeout(LAST_ACCEPT_TIMEOUT, admin.run(control, &mut next, &dispatcher)).await;
    }
    admin.close(&dispatcher);
}

/// The listener of the admin socket. Limits the number of connections and checks each client.
struct AdminListener {
    listener: UnixListener,
    /// ID of the user who can connect to the admin socket, in addition to root.
    own_uid: u32,
    unrelated: Arc<UnrelatedProcesses>,
    commands: CommandSender,
    permits: Arc<Semaphore>,
    rejection_permits: Arc<Semaphore>,
    report_permits: Arc<Semaphore>,
}

impl AdminListener {
    /// Accepts connections until the task is cancelled. If the listener is replaced, continues with the new listener.
    async fn run(&mut self, control: &Control, next: &mut NextAdmin, dispatcher: &Dispatcher<UnixStream>) {
        let mut listening = control.handover.watch_listening();
        loop {
            let is_listening = *listening.borrow_and_update();
            tokio::select! {
                connection = self.accept(), if is_listening => dispatcher.dispatch(connection),
                listener = next.listener() => {
                    self.close(dispatcher);
                    self.listener = listener;
                }
                _ = listening.changed() => {}
            }
        }
    }

    /// Returns the user ID of the client, or a rejection if this user has no access.
    fn check(&self, socket: &UnixStream) -> Result<u32, ClientRejection> {
        let peer = peer_check::peer_of(socket)?;
        let (uid, own) = (peer.uid, self.own_uid);
        if uid != own && uid != 0 {
            let message = format!("user {uid} cannot use the admin socket: only user {own} and root can");
            return Err(ClientRejection::forbidden(peer, message));
        }
        peer_check::check_descent(socket, peer, &self.unrelated)?;
        Ok(uid)
    }

    /// Reports a rejected client to the data plane. Returns the response for the client and a permit to send the
    /// response, or `None` if no permit is free.
    fn reject(&self, rejection: ClientRejection) -> Option<(Admission, OwnedSemaphorePermit)> {
        let permit = self.rejection_permits.clone().try_acquire_owned();
        let admission = Admission::rejected(&rejection.message);
        // The number of reports is limited, so that many rejected clients cannot fill the command queue.
        if let Ok(permit) = self.report_permits.clone().try_acquire_owned() {
            let _ = self.commands.send(Command::ReportRejection { rejection, _permit: permit });
        }
        Some((admission, permit.ok()?))
    }

    /// Closes the listener. Connections that are still in the listener's backlog are served or rejected as usual.
    fn close(&self, dispatcher: &Dispatcher<UnixStream>) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, flags) {
            let Ok(socket) = UnixStream::from_std(socket.into()) else { continue };
            let Ok(permit) = self.permits.clone().try_acquire_owned() else { return };
            match self.check(&socket) {
                Ok(uid) => dispatcher.dispatch(NewConnection::new(socket, Admission::of_user(uid), permit)),
                Err(rejection) => {
                    if let Some((admission, permit)) = self.reject(rejection) {
                        dispatcher.dispatch(NewConnection::new(socket, admission, permit));
                    }
                }
            }
        }
    }

    async fn accept(&self) -> NewConnection<UnixStream> {
        let Ok(permit) = self.permits.clone().acquire_owned().await else {
            // Unreachable, because the semaphore is never closed.
            return std::future::pending().await;
        };
        loop {
            let Ok((socket, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            match self.check(&socket) {
                Ok(uid) => return NewConnection::new(socket, Admission::of_user(uid), permit),
                Err(rejection) => {
                    if let Some((admission, permit)) = self.reject(rejection) {
                        return NewConnection::new(socket, admission, permit);
                    }
                }
            }
        }
    }
}

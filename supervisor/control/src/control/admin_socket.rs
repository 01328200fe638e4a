//! The admin socket: accepts connections and checks the connecting users.

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

/// Maximum number of rejected connections that are sent the reason; further rejected connections are closed
/// without a response. Also the maximum number of queued reports about rejected connections.
const REJECTED_MAX: usize = 16;

/// Maximum number of connections that are served at once; further connections wait.
pub(crate) const CONNECTIONS_MAX: usize = 384;

/// Maximum number of served and rejected connections together.
pub(super) const ADMITTED_MAX: usize = CONNECTIONS_MAX + REJECTED_MAX;

/// Accepts connections until the control plane ends.
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
        unrelated: UnrelatedProcesses::default(),
        commands: control.commands.clone(),
        permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        rejection_permits: Arc::new(Semaphore::new(REJECTED_MAX)),
        report_permits: Arc::new(Semaphore::new(REJECTED_MAX)),
    };
    control.until_shutdown(admin.run(&mut next, &dispatcher)).await;
    // Clients that have already connected get a response instead of a reset.
    if has_waiting(&admin.listener) {
        let _ = tokio::time::timeout(LAST_ACCEPT_TIMEOUT, admin.run(&mut next, &dispatcher)).await;
    }
    admin.close(&dispatcher);
}

/// A listener that bounds the number of connections and checks each client.
struct AdminListener {
    listener: UnixListener,
    /// User id that can connect, besides root.
    own_uid: u32,
    unrelated: UnrelatedProcesses,
    commands: CommandSender,
    permits: Arc<Semaphore>,
    rejection_permits: Arc<Semaphore>,
    report_permits: Arc<Semaphore>,
}

impl AdminListener {
    /// Accepts clients of this listener and of each replacement listener.
    async fn run(&mut self, next: &mut NextAdmin, dispatcher: &Dispatcher<UnixStream>) {
        loop {
            tokio::select! {
                connection = self.accept() => dispatcher.dispatch(connection),
                listener = next.listener() => {
                    self.close(dispatcher);
                    self.listener = listener;
                }
            }
        }
    }

    /// Returns the connected user if this user has access.
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

    /// Reports a rejected client to the data plane. Returns the response, and a permit to send it if one is
    /// free.
    fn reject(&self, rejection: ClientRejection) -> Option<(Admission, OwnedSemaphorePermit)> {
        let permit = self.rejection_permits.clone().try_acquire_owned();
        let admission = Admission::rejected(&rejection.message);
        // Many rejected clients must not fill the command queue. The first reports suffice.
        if let Ok(permit) = self.report_permits.clone().try_acquire_owned() {
            let _ = self.commands.send(Command::ReportRejection { rejection, _permit: permit });
        }
        Some((admission, permit.ok()?))
    }

    /// Closes the listener and passes on the connections in its backlog, because the accept loop may not have
    /// reached them.
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
            // The semaphore is never closed.
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

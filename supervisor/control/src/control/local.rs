//! The admin socket: accepts connections and checks the connecting users.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Control;
use super::connections::{Arrival, Entry, LAST_WITHIN, Ways, has_waiting};
use super::sockets::NextAdmin;
use bulkhead_linux::peer::UnrelatedProcesses;
use bulkhead_plane::command::{Command, Commander};
use bulkhead_plane::entry::{self, Refusal};

/// Maximum number of refused connections that are sent the reason; further refused connections are closed
/// without a response. Also the maximum number of queued reports about refused connections.
const REFUSED_MAX: usize = 16;

/// Maximum number of connections that are served at once; further connections wait.
pub(crate) const CONNECTIONS_MAX: usize = 384;

/// Maximum number of served and refused connections together.
pub(super) const PLACES: usize = CONNECTIONS_MAX + REFUSED_MAX;

/// Accepts connections until the control plane ends.
pub(super) async fn let_in(control: &Control, listener: UnixListener, own: u32, ways: Ways<UnixStream>) {
    let mut next = control.sockets.next_admin();
    let mut door = Guarded {
        listener,
        own,
        unrelated: UnrelatedProcesses::default(),
        commander: control.commander.clone(),
        places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        places_for_refused: Arc::new(Semaphore::new(REFUSED_MAX)),
        places_for_reports: Arc::new(Semaphore::new(REFUSED_MAX)),
    };
    control.until_end(door.open(&mut next, &ways)).await;
    // Clients that have already connected get a response instead of a reset.
    if has_waiting(&door.listener) {
        let _ = tokio::time::timeout(LAST_WITHIN, door.open(&mut next, &ways)).await;
    }
    door.close(&ways);
}

/// A listener that bounds the number of connections and checks each client.
struct Guarded {
    listener: UnixListener,
    /// User id that can connect, besides root.
    own: u32,
    unrelated: UnrelatedProcesses,
    commander: Commander,
    places: Arc<Semaphore>,
    places_for_refused: Arc<Semaphore>,
    places_for_reports: Arc<Semaphore>,
}

impl Guarded {
    /// Accepts clients of this listener and of each replacement listener.
    async fn open(&mut self, next: &mut NextAdmin, ways: &Ways<UnixStream>) {
        loop {
            tokio::select! {
                arrival = self.accept() => ways.send(arrival),
                listener = next.listener() => {
                    self.close(ways);
                    self.listener = listener;
                }
            }
        }
    }

    /// Returns the connected user if this user has access.
    fn check(&self, socket: &UnixStream) -> Result<u32, Refusal> {
        let peer = entry::peer_of(socket)?;
        let (uid, own) = (peer.uid, self.own);
        if uid != own && uid != 0 {
            let message = format!("user {uid} may not use the admin socket: only user {own} and root may");
            return Err(Refusal::forbidden(peer, message));
        }
        entry::check_descent(socket, peer, &self.unrelated)?;
        Ok(uid)
    }

    /// Reports a refused client to the data plane. Returns the response, and a permit to send it if one is
    /// free.
    fn refuse(&self, refusal: Refusal) -> Option<(Entry, OwnedSemaphorePermit)> {
        let place = self.places_for_refused.clone().try_acquire_owned();
        let entry = Entry::refused(&refusal.message);
        // Many refused clients must not fill the command queue. The first reports suffice.
        if let Ok(place) = self.places_for_reports.clone().try_acquire_owned() {
            let _ = self.commander.send(Command::Refused { refusal, _place: place });
        }
        Some((entry, place.ok()?))
    }

    /// Closes the listener and passes on the connections in its backlog, because the accept loop may not have
    /// reached them.
    fn close(&self, ways: &Ways<UnixStream>) {
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, flags) {
            let Ok(socket) = UnixStream::from_std(socket.into()) else { continue };
            let Ok(place) = self.places.clone().try_acquire_owned() else { return };
            match self.check(&socket) {
                Ok(uid) => ways.send(Arrival::new(socket, Entry::of(uid), place)),
                Err(refusal) => {
                    if let Some((entry, place)) = self.refuse(refusal) {
                        ways.send(Arrival::new(socket, entry, place));
                    }
                }
            }
        }
    }

    async fn accept(&self) -> Arrival<UnixStream> {
        let Ok(place) = self.places.clone().acquire_owned().await else {
            // The semaphore is never closed.
            return std::future::pending().await;
        };
        loop {
            let Ok((socket, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            match self.check(&socket) {
                Ok(uid) => return Arrival::new(socket, Entry::of(uid), place),
                Err(refusal) => {
                    if let Some((entry, place)) = self.refuse(refusal) {
                        return Arrival::new(socket, entry, place);
                    }
                }
            }
        }
    }
}

//! Checks each client that connects to the jobs socket or the admin socket. The peer process must be identifiable, and
//! must not be a descendant of the supervisor. The data plane and the control plane reject the clients that fail.
//! `access` checks the permissions of the other clients.

use std::os::fd::AsFd;

use bulkhead_shared::{RejectReason, vocabulary};
use rustix::io::Errno;

use bulkhead_linux::peer::{Descent, Peer, UnrelatedProcesses};

vocabulary! {
    /// Kind of socket on which the supervisor accepts clients. Events contain these names.
    SocketKind {
        /// The jobs socket.
        Jobs = "jobs",
        /// The admin socket.
        Admin = "admin",
    }
}

/// A rejected client connection.
#[derive(Clone, Debug)]
pub struct ClientRejection {
    /// Reason code sent to the client.
    pub reason: RejectReason,
    /// Explanation sent to the client.
    pub message: String,
    /// The client, or `None` if the client cannot be identified.
    pub peer: Option<Peer>,
    /// PIDs of the client and its ancestors up to this process. Empty unless the client is a descendant of this
    /// process.
    pub ancestry: Vec<u32>,
}

impl ClientRejection {
    /// Creates a rejection for an identified client that lacks permission.
    pub fn forbidden(peer: Peer, message: String) -> Self {
        Self { reason: RejectReason::Forbidden, message, peer: Some(peer), ancestry: Vec::new() }
    }

    /// Creates a rejection for a client that cannot be identified.
    pub fn unidentified(peer: Option<Peer>, error: &std::io::Error) -> Self {
        // EMFILE and ENFILE are not the client's fault. They mean that the supervisor is overloaded.
        let is_full =
            [Errno::MFILE, Errno::NFILE].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()));
        let reason = if is_full { RejectReason::Overloaded } else { RejectReason::Unauthenticated };
        Self {
            reason,
            message: format!("the supervisor cannot identify the client: {error}"),
            peer,
            ancestry: Vec::new(),
        }
    }
}

/// Returns the peer process that connected to this socket.
pub fn peer_of(socket: &impl AsFd) -> Result<Peer, ClientRejection> {
    Peer::of(socket).map_err(|error| ClientRejection::unidentified(None, &error))
}

/// Rejects the peer if it is a worker or a descendant of one, regardless of which user it runs as. `unrelated` caches
/// the processes that have already passed this check.
pub fn check_descent(
    socket: &impl AsFd,
    peer: Peer,
    unrelated: &UnrelatedProcesses,
) -> Result<(), ClientRejection> {
    match peer.descent(socket, unrelated) {
        Ok(Descent::Unrelated) => Ok(()),
        Ok(Descent::Descendant(ancestry)) => {
            let message = "workers and their descendants cannot connect to their own supervisor; connect from another \
                           process";
            Err(ClientRejection { ancestry, ..ClientRejection::forbidden(peer, message.into()) })
        }
        Ok(Descent::Ended) => {
            let message = "the process that connected has exited, so the supervisor cannot identify the client; \
                           connect from a process that stays alive";
            Err(ClientRejection {
                reason: RejectReason::Unauthenticated,
                ..ClientRejection::forbidden(peer, message.into())
            })
        }
        Err(error) => Err(ClientRejection::unidentified(Some(peer), &error)),
    }
}

//! The process that comes in at either socket, beyond what the one or the other asks: a process that can be told, and none
//! that descends from here.

use std::os::fd::AsFd;

use bulkhead_shared::{RejectReason, vocabulary};
use rustix::io::Errno;

use bulkhead_linux::peer::{Descent, Outsiders, Peer};

vocabulary! {
    /// One of the supervisor's sockets, as events have it.
    SocketKind {
        /// For jobs.
        Jobs = "jobs",
        /// For operators.
        Admin = "admin",
    }
}

/// Why a client is turned away.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// What it is told: this and the message.
    pub reason: RejectReason,
    /// What it is told, in a sentence.
    pub message: String,
    /// The client; `None` if it cannot be identified.
    pub peer: Option<Peer>,
    /// Of a process that descends from this one: its line of ancestors up to here, itself the first.
    pub line: Vec<u32>,
}

impl Refusal {
    /// Of a client that is known, and may not.
    pub fn forbidden(peer: Peer, message: String) -> Self {
        Self { reason: RejectReason::Forbidden, message, peer: Some(peer), line: Vec::new() }
    }

    /// Of a client of which too little can be told.
    pub fn unknown(peer: Option<Peer>, error: &std::io::Error) -> Self {
        // Without a descriptor to look with, it is for want of room.
        let is_full =
            [Errno::MFILE, Errno::NFILE].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()));
        let reason = if is_full { RejectReason::Overloaded } else { RejectReason::Unauthenticated };
        Self {
            reason,
            message: format!("the supervisor cannot tell who you are: {error}"),
            peer,
            line: Vec::new(),
        }
    }
}

/// The process that connected this socket.
pub fn peer_of(socket: &impl AsFd) -> Result<Peer, Refusal> {
    Peer::of(socket).map_err(|error| Refusal::unknown(None, &error))
}

/// A worker has no business at our sockets, whatever user it runs as, and nor has what it started. Processes in
/// `outsiders` were found before to have come from elsewhere.
pub fn check_descent(socket: &impl AsFd, peer: Peer, outsiders: &Outsiders) -> Result<(), Refusal> {
    match peer.descent_beside(socket, outsiders) {
        Ok(Descent::Outside) => Ok(()),
        Ok(Descent::Ours(line)) => {
            let message = "workers, and what they start, may not connect to the supervisor that runs them; \
                           connect from a process of your own";
            Err(Refusal { line, ..Refusal::forbidden(peer, message.into()) })
        }
        Ok(Descent::Ended) => {
            let message = "the process that connected has ended, so that the supervisor cannot tell who it \
                           was; connect from the process that goes on";
            Err(Refusal { reason: RejectReason::Unauthenticated, ..Refusal::forbidden(peer, message.into()) })
        }
        Err(error) => Err(Refusal::unknown(Some(peer), &error)),
    }
}

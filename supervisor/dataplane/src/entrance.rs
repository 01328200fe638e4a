//! Where clients come in: the jobs socket's listener, which can become another one, and which clients may pass.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;

use bulkhead_plane::access::Access;
use bulkhead_policy::Time;
use mio::unix::SourceFd;
use mio::{Interest, Poll};

use super::allowance::Allowance;
use super::refusals::Refusals;
use super::{DataPlane, LISTENER};
use crate::descriptors::Intake;

pub(super) struct Entrance {
    pub(super) listener: UnixListener,
    pub(super) intake: Intake,
    pub(super) access: Access,
    pub(super) refusals: Refusals,
    /// Whether connections may wait to be accepted.
    pub(super) accept_pending: bool,
    /// The time that goes into it.
    pub(super) allowance: Allowance,
}

/// For those who come in: one part in so many of a processor's time.
const ACCEPT_PART: i64 = 8;

impl Entrance {
    pub(super) fn new(poll: &Poll, listener: UnixListener, access: Access) -> io::Result<Self> {
        register(poll, &listener)?;
        let (intake, refusals) = (Intake::new()?, Refusals::default());
        Ok(Self {
            listener,
            intake,
            access,
            refusals,
            accept_pending: false,
            allowance: Allowance::one_in(ACCEPT_PART),
        })
    }
}

impl Entrance {
    /// When connections are to be accepted, if any wait.
    pub(super) fn accept_at(&self) -> Option<Time> {
        self.accept_pending.then(|| self.allowance.resume_at())
    }
}

/// Has the loop told of clients that come to this listener.
fn register(poll: &Poll, listener: &UnixListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    poll.registry().register(&mut SourceFd(&listener.as_raw_fd()), LISTENER, Interest::READABLE)
}

impl DataPlane {
    /// Takes clients from this listener from now on. The file of the one before is gone, so that none comes there.
    pub(super) fn listen(&mut self, listener: UnixListener) {
        if let Err(error) = register(&self.poll, &listener) {
            return self.note_trouble("the jobs socket cannot be listened to", &error.to_string());
        }
        let _ = self.poll.registry().deregister(&mut SourceFd(&self.entrance.listener.as_raw_fd()));
        self.entrance.listener = listener;
        self.entrance.accept_pending = true;
    }
}

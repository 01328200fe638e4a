//! The jobs socket's listener, which can become another one.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;

use mio::unix::SourceFd;
use mio::{Interest, Poll};

use super::{LISTENER, Shard};

/// Has the loop told of clients that come to this listener.
pub(super) fn register(poll: &Poll, listener: &UnixListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    poll.registry().register(&mut SourceFd(&listener.as_raw_fd()), LISTENER, Interest::READABLE)
}

impl Shard {
    /// Takes clients from this listener from now on. The file of the one before is gone, so that none comes there.
    pub(super) fn listen(&mut self, listener: UnixListener) {
        if let Err(error) = register(&self.poll, &listener) {
            return self.note_trouble("the jobs socket cannot be listened to", &error.to_string());
        }
        let _ = self.poll.registry().deregister(&mut SourceFd(&self.listener.as_raw_fd()));
        self.listener = listener;
        self.is_called = true;
    }
}

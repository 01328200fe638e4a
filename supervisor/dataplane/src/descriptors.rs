//! Handles descriptors that clients and workers attach to their data in violation of the protocols. Closing a
//! descriptor can take as long as its sender wants, so the data plane itself never closes received descriptors.
//!
//! Since Linux 6.16, the kernel can refuse descriptors when a peer tries to send them. On an older kernel, the data
//! plane receives the descriptors and passes them to closing threads. The buffer has room for the maximum number of
//! descriptors per message. The closing threads also close sockets with unread data, because the data might contain
//! descriptors. While too many descriptors are waiting to be closed, the data plane peeks before each read, and
//! receives no further descriptors.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags, SocketType,
};

use bulkhead_linux::scm_rights::refuse_descriptors;

/// Maximum number of descriptors per message (`SCM_MAX_FD` in the kernel).
const MESSAGE_DESCRIPTORS_MAX: usize = 253;

/// Maximum number of received descriptors waiting to be closed.
const HELD_MAX: usize = 2 * MESSAGE_DESCRIPTORS_MAX;

/// Number of threads that close descriptors. A close operation that blocks occupies only one thread. Other
/// descriptors are delayed only when all threads are blocked.
const CLOSERS: usize = 4;

/// Error from [`Intake::receive`] if the peer sent descriptors along with the bytes.
pub(crate) const CAME_WITH_DESCRIPTORS: Errno = Errno::PERM;

/// Error message about a peer that sent descriptors.
pub(crate) const NOT_TAKEN: &str = "the peer sent descriptors, which this socket does not accept";

/// Returns the number of open files that this process must reserve for descriptors received from peers.
pub fn reserve() -> u64 {
    if kernel_refuses() { 0 } else { HELD_MAX as u64 }
}

/// Returns true if the running kernel can refuse descriptors when a peer tries to send them.
fn kernel_refuses() -> bool {
    static REFUSES: OnceLock<bool> = OnceLock::new();
    *REFUSES.get_or_init(|| {
        let pair =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        pair.is_ok_and(|(socket, _)| refuse_descriptors(&socket).is_ok())
    })
}

/// Method of reading from sockets and closing them. The choice depends on whether the kernel can refuse descriptors
/// that a peer sends.
pub(crate) enum Intake {
    /// The kernel refuses descriptors.
    Refusing,
    /// The kernel cannot refuse descriptors, so the supervisor receives and closes them.
    Closing(Closers),
}

impl Intake {
    /// Selects how descriptors are handled, depending on what the running kernel supports.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(if kernel_refuses() { Self::Refusing } else { Self::Closing(Closers::start()?) })
    }

    /// Prepares the supervisor's end of a socket pair, so that it refuses descriptors if the kernel supports this.
    /// Accepted sockets need no preparation.
    pub(crate) fn prepare(&self, socket: &impl AsFd) -> io::Result<()> {
        match self {
            Self::Refusing => Ok(refuse_descriptors(socket)?),
            Self::Closing(_) => Ok(()),
        }
    }

    /// Reads from a socket without blocking. Returns an error from `recv(2)`, or [`CAME_WITH_DESCRIPTORS`] if the peer
    /// sent descriptors.
    pub(crate) fn receive(&self, socket: &UnixStream, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Self::Refusing => rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT).map(|(_, count)| count),
            Self::Closing(closers) => closers.receive(socket, buffer),
        }
    }

    /// Closes a socket that might still contain descriptors sent by the peer.
    pub(crate) fn close(&self, socket: UnixStream) {
        if let Self::Closing(closers) = self {
            closers.close(socket);
        }
    }

    /// Prepares a socket that its owner is about to drop. Unless the kernel refuses descriptors, shuts the socket down
    /// and lets a closing thread read and discard unread data.
    pub(crate) fn close_soon(&self, socket: &UnixStream) {
        if let Self::Closing(closers) = self
            && let Ok(copy) = socket.try_clone()
        {
            closers.close(copy);
        }
    }

    /// Returns the number of sockets that are still being closed.
    pub(crate) fn closing(&self) -> usize {
        match self {
            Self::Refusing => 0,
            Self::Closing(closers) => closers.backlog.sockets.load(Ordering::Relaxed),
        }
    }
}

/// Numbers of descriptors and sockets that have not been closed yet.
#[derive(Default)]
struct Backlog {
    descriptors: AtomicUsize,
    sockets: AtomicUsize,
}

enum Unwanted {
    Descriptors(Vec<OwnedFd>),
    Socket(UnixStream),
}

/// Channel to the closing threads. The channel itself is unbounded, but [`HELD_MAX`] limits the number of descriptors
/// in it, and the sockets in it still count as clients. The threads exit when the channel is closed.
pub(crate) struct Closers {
    unwanted: Sender<Unwanted>,
    backlog: Arc<Backlog>,
}

impl Closers {
    fn start() -> io::Result<Self> {
        let (unwanted, coming) = channel();
        let coming = Arc::new(Mutex::new(coming));
        let backlog = Arc::<Backlog>::default();
        for _ in 0..CLOSERS {
            let (coming, backlog) = (coming.clone(), backlog.clone());
            let close = move || close_all(&coming, &backlog);
            std::thread::Builder::new().name("closer".into()).spawn(close)?;
        }
        Ok(Self { unwanted, backlog })
    }

    fn receive(&self, socket: &UnixStream, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        if self.backlog.descriptors.load(Ordering::Relaxed) + MESSAGE_DESCRIPTORS_MAX > HELD_MAX {
            return receive_unless_descriptors(socket, buffer);
        }
        let (count, descriptors) = receive_with_descriptors(socket, buffer)?;
        if descriptors.is_empty() {
            return Ok(count);
        }
        self.backlog.descriptors.fetch_add(descriptors.len(), Ordering::Relaxed);
        self.hand_over(Unwanted::Descriptors(descriptors));
        Err(CAME_WITH_DESCRIPTORS)
    }

    fn close(&self, socket: UnixStream) {
        // No data can arrive after the socket is shut down, so a socket without unread bytes cannot contain
        // descriptors.
        let is_shut = socket.shutdown(Shutdown::Both).is_ok();
        if is_shut && rustix::io::ioctl_fionread(&socket) == Ok(0) {
            return;
        }
        self.backlog.sockets.fetch_add(1, Ordering::Relaxed);
        self.hand_over(Unwanted::Socket(socket));
    }

    fn hand_over(&self, unwanted: Unwanted) {
        // Cannot fail, because the threads outlive the channel. If it failed, leaking the descriptor would still be
        // better than closing it on this thread.
        if let Err(unsent) = self.unwanted.send(unwanted) {
            std::mem::forget(unsent);
        }
    }
}

fn close_all(coming: &Mutex<Receiver<Unwanted>>, backlog: &Backlog) {
    loop {
        // The lock is held while a thread waits for the next item, and released before the item is closed.
        let next = coming.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match next {
            Ok(Unwanted::Descriptors(descriptors)) => {
                let count = descriptors.len();
                close_descriptors(descriptors);
                backlog.descriptors.fetch_sub(count, Ordering::Relaxed);
            }
            Ok(Unwanted::Socket(socket)) => {
                let mut bytes = [0; 4096];
                while let Ok((1.., descriptors)) = receive_with_descriptors(&socket, &mut bytes) {
                    close_descriptors(descriptors);
                }
                drop(socket);
                backlog.sockets.fetch_sub(1, Ordering::Relaxed);
            }
            Err(_) => return,
        }
    }
}

fn close_descriptors(descriptors: Vec<OwnedFd>) {
    for descriptor in descriptors {
        // A slow close is usually caused by `SO_LINGER`, so lingering is turned off. This fails for descriptors that
        // are not sockets.
        let _ = rustix::net::sockopt::set_socket_linger(&descriptor, None);
    }
}

/// Reads bytes, and any descriptors that were sent along with them.
fn receive_with_descriptors(
    socket: &UnixStream,
    buffer: &mut [u8],
) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(buffer)];
    let received = rustix::net::recvmsg(socket, &mut slices, &mut ancillary, flags)?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((received.bytes, descriptors))
}

/// Reads bytes. Fails if descriptors were sent along with them.
fn receive_unless_descriptors(socket: &UnixStream, buffer: &mut [u8]) -> rustix::io::Result<usize> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut slices = [IoSliceMut::new(&mut *buffer)];
    let seen = rustix::net::recvmsg(socket, &mut slices, &mut RecvAncillaryBuffer::default(), flags)?;
    // A peek stops at the first message with descriptors, and sets `CTRUNC`, because the buffer has no room for
    // descriptors.
    if seen.flags.contains(ReturnFlags::CTRUNC) {
        return Err(CAME_WITH_DESCRIPTORS);
    }
    rustix::net::recv(socket, &mut buffer[..seen.bytes], RecvFlags::DONTWAIT).map(|(_, count)| count)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::IoSlice;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn send(socket: &UnixStream, bytes: &[u8], descriptors: usize) -> rustix::io::Result<usize> {
        let files: Vec<File> = (0..descriptors).map(|_| File::open("/dev/null").unwrap()).collect();
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_DESCRIPTORS_MAX))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(rights.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        sendmsg(socket, &[IoSlice::new(bytes)], &mut rights, SendFlags::empty())
    }

    /// Returns a [`Closers`] and the receiving end of its channel. No threads close descriptors, so the test can
    /// inspect the channel.
    fn closers() -> (Closers, Receiver<Unwanted>) {
        let (unwanted, coming) = channel();
        (Closers { unwanted, backlog: Arc::default() }, coming)
    }

    #[test]
    fn reading_thread_never_closes_received_descriptors() {
        let (closers, coming) = closers();
        let mut buffer = [0; 100];
        // The first messages are received with their descriptors. The later messages remain in the socket.
        for round in 0..5 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            send(&theirs, b"frames", 0).unwrap();
            assert_eq!(closers.receive(&ours, &mut buffer), Ok(6));
            send(&theirs, b"plain", 0).unwrap();
            send(&theirs, b"loaded", MESSAGE_DESCRIPTORS_MAX).unwrap();
            assert_eq!(closers.receive(&ours, &mut buffer), Err(CAME_WITH_DESCRIPTORS));
            let held = closers.backlog.descriptors.load(Ordering::Relaxed);
            assert_eq!(held, MESSAGE_DESCRIPTORS_MAX * (round + 1).min(2));
            closers.close(ours);
        }
        assert_eq!(
            closers.backlog.sockets.load(Ordering::Relaxed),
            3,
            "only sockets with unread bytes must be passed to the closing threads"
        );
        let backlog = closers.backlog.clone();
        drop(closers);
        close_all(&Mutex::new(coming), &backlog);
        let left = [&backlog.descriptors, &backlog.sockets].map(|count| count.load(Ordering::Relaxed));
        assert_eq!(left, [0, 0]);
    }

    #[test]
    fn kernel_refuses_descriptors_when_they_are_sent() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        if let Err(error) = refuse_descriptors(&ours) {
            assert_eq!(error, Errno::NOPROTOOPT);
            eprintln!("NOT RUN: this kernel cannot reject descriptors");
            return;
        }
        assert_eq!(send(&theirs, b"loaded", 1), Err(Errno::PERM));
        assert_eq!(send(&theirs, b"plain", 0), Ok(5));
    }
}

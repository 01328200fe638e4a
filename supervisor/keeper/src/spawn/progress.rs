//! What a child and the keeper say to each other until the child's program runs.
//!
//! A `SOCK_SEQPACKET` pair that `execve` closes: the end of file is the good news. Each message of the
//! child comes with its process number as the keeper sees it, whatever it is in the child's namespace.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// The child waits for its users to be mapped.
const MAP: u8 = b'U';

/// The child has been confined, and waits for the word to execute its program.
const READY: u8 = b'R';

/// The keeper's word to go on.
const GO: u8 = b'G';

/// Two ends: the keeper's, which never blocks, and the child's.
pub(super) fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::sockopt::set_socket_passcred(&ours, true)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// What a child says when it fails: two numbers and an error's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) step: u32,
    pub(crate) detail: u32,
    pub(crate) errno: i32,
}

/// Why a step failed; `detail` is the resource's number for limits, and the number of its own step for
/// the root folder.
pub(super) struct Stop {
    pub(super) errno: Errno,
    pub(super) detail: u32,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self { errno, detail: 0 }
    }
}

impl Failure {
    const BYTES: usize = 12;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let numbers = [self.step.to_le_bytes(), self.detail.to_le_bytes(), self.errno.to_le_bytes()];
        for (to, from) in bytes.chunks_exact_mut(4).zip(numbers) {
            to.copy_from_slice(&from);
        }
        bytes
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let number = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        Self {
            step: u32::from_le_bytes(number(0)),
            detail: u32::from_le_bytes(number(4)),
            errno: i32::from_le_bytes(number(8)),
        }
    }
}

/// How far a child has come.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Still on its way, or stuck on a file system.
    Underway,
    /// It has a user namespace, and waits for [`go_on`] until it has users in it.
    WantsMap,
    /// It is confined, and waits for [`go_on`] to execute its program.
    Ready {
        /// Its process, which need not be the one that was forked.
        pid: u32,
        /// Where the kernel tells of forbidden system calls.
        listener: Option<OwnedFd>,
    },
    /// It is the worker's program (or was killed before it came to that).
    Executed,
    /// A step failed.
    Failed(Failure),
}

/// Reads what a child says.
pub(crate) fn read(socket: &OwnedFd) -> Progress {
    let mut bytes = [0; Failure::BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    });
    let (mut pid, mut listener) = (0, None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(descriptors) => listener = descriptors.last(),
            RecvAncillaryMessage::ScmCredentials(sender) => pid = sender.pid.as_raw_nonzero().get() as u32,
            _ => {}
        }
    }
    match received.map(|message| message.bytes) {
        Ok(Failure::BYTES) => Progress::Failed(Failure::decode(bytes)),
        Ok(1) if bytes[0] == MAP => Progress::WantsMap,
        Ok(1) if bytes[0] == READY => Progress::Ready { pid, listener },
        Err(Errno::AGAIN) => Progress::Underway,
        Ok(_) | Err(_) => Progress::Executed,
    }
}

/// Lets a child go on that waits for it. One that is gone does not need it.
pub(crate) fn go_on(socket: &OwnedFd) {
    let _ = rustix::net::send(socket, &[GO], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

// The child's side: system calls and nothing else.

/// Tells that a step failed. If even this fails, the supervisor sees a worker that ends at once.
pub(super) fn fail(socket: BorrowedFd<'_>, failure: &Failure) {
    let _ = rustix::net::send(socket, &failure.encode(), SendFlags::NOSIGNAL);
}

/// Asks for users, and waits for them.
pub(super) fn want_map(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::send(socket, &[MAP], SendFlags::NOSIGNAL)?;
    wait(socket)
}

/// Tells that the child is confined, hands the listener over, and waits for the word to go on.
pub(super) fn ready(socket: BorrowedFd<'_>, listener: Option<RawFd>) -> Result<(), Errno> {
    // SAFETY: the kernel has just made it for this process, and nothing else uses it. Close-on-exec
    // ends it: it is not to be closed here, where a filter may have made `close` fatal.
    let listener = listener.map(|listener| unsafe { BorrowedFd::borrow_raw(listener) });
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(listener.as_slice())) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&[READY])], &mut ancillary, SendFlags::NOSIGNAL)?;
    wait(socket)
}

/// Waits for the keeper; that one being gone is an error.
fn wait(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut word = [0];
    let (length, _) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut word, RecvFlags::empty()))?;
    if length == 1 && word[0] == GO { Ok(()) } else { Err(Errno::SRCH) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn what_a_child_says_arrives() {
        let (ours, theirs) = pair().unwrap();
        assert!(matches!(read(&ours), Progress::Underway));
        go_on(&ours);
        want_map(theirs.as_fd()).unwrap();
        assert!(matches!(read(&ours), Progress::WantsMap));
        go_on(&ours);
        let null = std::fs::File::open("/dev/null").unwrap();
        ready(theirs.as_fd(), Some(null.as_raw_fd())).unwrap();
        let Progress::Ready { pid, listener: Some(_) } = read(&ours) else { panic!("not ready") };
        assert_eq!(pid, std::process::id());
        go_on(&ours);
        ready(theirs.as_fd(), None).unwrap();
        assert!(matches!(read(&ours), Progress::Ready { listener: None, .. }));
        let failure = Failure { step: 3, detail: 4, errno: 5 };
        fail(theirs.as_fd(), &failure);
        assert!(matches!(read(&ours), Progress::Failed(said) if said == failure));
        drop(ours);
        assert!(want_map(theirs.as_fd()).is_err());
        let (ours, theirs) = pair().unwrap();
        drop(theirs);
        assert!(matches!(read(&ours), Progress::Executed));
    }
}

//! Exchanges messages between a child and the keeper until the child's program runs. The child's steps in `steps` and
//! `child` send them. `process::starts` reads them and decides when the child continues.
//!
//! The connection is a `SOCK_SEQPACKET` pair that `execve` closes, so the end of file means success. Each message from
//! the child carries the child's PID in the keeper's PID namespace.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Message from a child that is waiting for its user and group ID maps to be written.
const WAITS_FOR_ID_MAPS: u8 = b'U';

/// Message from a child that is confined and is waiting for permission to execute its program.
const CONFINED: u8 = b'R';

/// Message with which the keeper lets a child continue.
const CONTINUE: u8 = b'G';

/// Creates the socket pair between the keeper and a child. Returns the keeper's end, which is non-blocking, and the
/// child's end.
pub(super) fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::sockopt::set_socket_passcred(&ours, true)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// The failed step of a child, with a detail and the error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepFailure {
    pub(crate) step: u32,
    pub(crate) detail: u32,
    pub(crate) errno: i32,
}

/// Error from a step. For a resource limit, `detail` is the number of the resource. For the root folder, `detail` is
/// the number of the inner step.
pub(super) struct StepError {
    pub(super) errno: Errno,
    pub(super) detail: u32,
}

impl From<Errno> for StepError {
    fn from(errno: Errno) -> Self {
        Self { errno, detail: 0 }
    }
}

impl StepFailure {
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

#[derive(Debug)]
pub(crate) enum Progress {
    /// The child is still starting, or is blocked on a file system.
    Pending,
    /// The child is in a user namespace without ID maps, and waits for [`let_continue`].
    WaitsForIdMaps,
    /// The child is confined, and waits for [`let_continue`] to execute its program.
    Confined {
        /// PID of the confined process. In a PID namespace, this is a child of the process that the keeper forked.
        pid: u32,
        /// Descriptor on which the kernel notifies the keeper of forbidden system calls.
        listener: Option<OwnedFd>,
    },
    /// The child no longer sends messages, because it has executed the worker's program or was killed earlier.
    Executed,
    /// A step failed.
    Failed(StepFailure),
}

/// Reads the next message from a child.
pub(crate) fn read(socket: &OwnedFd) -> Progress {
    let mut bytes = [0; StepFailure::BYTES];
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
        Ok(StepFailure::BYTES) => Progress::Failed(StepFailure::decode(bytes)),
        Ok(1) if bytes[0] == WAITS_FOR_ID_MAPS => Progress::WaitsForIdMaps,
        Ok(1) if bytes[0] == CONFINED => Progress::Confined { pid, listener },
        Err(Errno::AGAIN) => Progress::Pending,
        Ok(_) | Err(_) => Progress::Executed,
    }
}

/// Lets a waiting child continue. Does nothing if the child has exited.
pub(crate) fn let_continue(socket: &OwnedFd) {
    let _ = rustix::net::send(socket, &[CONTINUE], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

// Functions that run in the child. They make only system calls.

/// Reports a failed step to the keeper. If the report cannot be sent, the supervisor learns only that the worker exited
/// immediately.
pub(super) fn report_failure(socket: BorrowedFd<'_>, failure: &StepFailure) {
    let _ = rustix::net::send(socket, &failure.encode(), SendFlags::NOSIGNAL);
}

/// Requests user and group ID maps from the keeper, and waits until the keeper has written them.
pub(super) fn request_id_maps(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::send(socket, &[WAITS_FOR_ID_MAPS], SendFlags::NOSIGNAL)?;
    wait_for_keeper(socket)
}

/// Maximum number of retries when sending the seccomp listener. All attempts together take two seconds, which is well
/// within `start.handshake`.
const LISTENER_RETRIES_MAX: u32 = 200;

/// Interval between attempts to send the seccomp listener.
const LISTENER_RETRY_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Reports that the child is confined, passes the seccomp listener to the keeper, and waits for permission to continue.
pub(super) fn report_confined(socket: BorrowedFd<'_>, listener: Option<RawFd>) -> Result<(), Errno> {
    // SAFETY: the kernel has just created the descriptor for this process, and nothing else uses it. The
    // descriptor is close-on-exec. `close` must not be called here, because the filter can make that call
    // fatal.
    let listener = listener.map(|listener| unsafe { BorrowedFd::borrow_raw(listener) });
    let mut retries = 0;
    while let Err(errno) = send_listener(socket, listener) {
        // The kernel limits how many of a user's descriptors are in flight, and other processes of the user can
        // briefly exhaust this limit.
        if errno != Errno::TOOMANYREFS || retries == LISTENER_RETRIES_MAX {
            return Err(errno);
        }
        retries += 1;
        let _ = rustix::thread::nanosleep(&LISTENER_RETRY_INTERVAL);
    }
    wait_for_keeper(socket)
}

/// Tells the keeper that the child is confined. The message includes the seccomp listener, if there is one.
fn send_listener(socket: BorrowedFd<'_>, listener: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(listener.as_slice())) {
        return Err(Errno::INVAL);
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&[CONFINED])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Waits until the keeper permits this process to continue. Fails if the keeper is gone.
fn wait_for_keeper(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut word = [0];
    let (length, _) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut word, RecvFlags::empty()))?;
    if length == 1 && word[0] == CONTINUE { Ok(()) } else { Err(Errno::SRCH) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use bulkhead_linux::wait::wait_until_readable;

    use super::*;

    #[test]
    fn child_progress_messages_reach_the_keeper() {
        let (ours, theirs) = pair().unwrap();
        assert!(matches!(read(&ours), Progress::Pending));
        let_continue(&ours);
        request_id_maps(theirs.as_fd()).unwrap();
        assert!(matches!(read(&ours), Progress::WaitsForIdMaps));
        let_continue(&ours);
        let null = std::fs::File::open("/dev/null").unwrap();
        report_confined(theirs.as_fd(), Some(null.as_raw_fd())).unwrap();
        let Progress::Confined { pid, listener: Some(_) } = read(&ours) else { panic!("not ready") };
        assert_eq!(pid, std::process::id());
        let_continue(&ours);
        report_confined(theirs.as_fd(), None).unwrap();
        assert!(matches!(read(&ours), Progress::Confined { listener: None, .. }));
        let failure = StepFailure { step: 3, detail: 4, errno: 5 };
        report_failure(theirs.as_fd(), &failure);
        assert!(matches!(read(&ours), Progress::Failed(reported) if reported == failure));
        drop(ours);
        assert!(request_id_maps(theirs.as_fd()).is_err());
        let (ours, theirs) = pair().unwrap();
        drop(theirs);
        // A child that another test has forked can still have a copy of `theirs`.
        assert!(wait_until_readable(&ours, std::time::Duration::from_secs(60)).unwrap());
        assert!(matches!(read(&ours), Progress::Executed));
    }
}

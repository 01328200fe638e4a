//! Receives notifications of forbidden system calls from a seccomp listener, and sends the responses that the caller
//! chooses. Does not block if the caller polls the listener first. `violations` decides which process is killed, and
//! `seccomp` creates the filters.
#![expect(unsafe_code, reason = "the listener's ioctls have no safe wrapper")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{seccomp_notif, seccomp_notif_resp, seccomp_notif_sizes};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use bulkhead_linux::errno;

/// Notification of a system call that blocks until the keeper responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notification {
    /// ID of the notification. The response must contain the same ID.
    pub id: u64,
    /// ID of the calling thread, which can belong to any process of the worker. Zero if the thread is not in this PID
    /// namespace.
    pub thread: u32,
    /// Number of the system call.
    pub number: u32,
    /// Arguments of the call. The memory to which a pointer argument refers can change at any time.
    pub arguments: [u64; 6],
}

/// State of a seccomp listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ListenerState {
    /// A notification is waiting, so [`receive`] does not block.
    Pending,
    /// No notification is waiting now.
    Idle,
    /// No further notification can arrive, because no process is left that uses the filter.
    Closed,
}

/// Checks whether a notification can be received. Does not block.
pub(crate) fn poll_listener(listener: &OwnedFd) -> rustix::io::Result<ListenerState> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&at_once)))?;
    let found = fds[0].revents();
    Ok(match (found.contains(PollFlags::IN), found.is_empty()) {
        (true, _) => ListenerState::Pending,
        (false, true) => ListenerState::Idle,
        (false, false) => ListenerState::Closed,
    })
}

/// Receives a notification. Call this only if [`poll_listener`] has returned [`ListenerState::Pending`]. Otherwise,
/// kernels before 6.11 block forever, even if no process is left to make a call. Returns `None` if the call was
/// interrupted or its process was killed in the meantime.
pub(crate) fn receive(listener: &OwnedFd) -> io::Result<Option<Notification>> {
    let sizes = sizes()?;
    let mut buffer = zeroed(sizes.seccomp_notif, size_of::<seccomp_notif>());
    match ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &mut buffer) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    // SAFETY: the buffer has at least the size and alignment of the structure, in which every bit pattern is
    // valid.
    let seccomp_notif { id, pid, data, .. } = unsafe { buffer.as_ptr().cast::<seccomp_notif>().read() };
    Ok(Some(Notification { id, thread: pid, number: data.nr as u32, arguments: data.args }))
}

/// Makes a call fail with this error. Succeeds even if the call is no longer waiting for a response.
pub(crate) fn respond_with_error(listener: &OwnedFd, id: u64, errno: Errno) -> io::Result<()> {
    let sizes = sizes()?;
    let mut buffer = zeroed(sizes.seccomp_notif_resp, size_of::<seccomp_notif_resp>());
    let answer = seccomp_notif_resp { id, val: 0, error: -errno.raw_os_error(), flags: 0 };
    // SAFETY: the buffer has at least the size and alignment of the structure.
    unsafe { buffer.as_mut_ptr().cast::<seccomp_notif_resp>().write(answer) };
    match ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &mut buffer) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Checks that a call is still blocked. While the call is blocked, the thread ID in the call's notification is valid.
pub(crate) fn check_pending(listener: &OwnedFd, id: u64) -> Result<(), Errno> {
    ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &mut [id])
}

/// Returns a zeroed buffer that also fits a newer kernel's larger version of the structure. The kernel requires the
/// whole buffer to be zero.
fn zeroed(in_kernel: u16, here: usize) -> Vec<u64> {
    vec![0; usize::from(in_kernel).max(here).div_ceil(size_of::<u64>())]
}

fn sizes() -> io::Result<seccomp_notif_sizes> {
    let mut sizes = seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
    // SAFETY: the pointer refers to a local variable of the type that the call fills. This type has never grown.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
    if result == -1 { Err(errno::last().into()) } else { Ok(sizes) }
}

fn ioctl(listener: &OwnedFd, request: libc::Ioctl, buffer: &mut [u64]) -> Result<(), Errno> {
    let buffer: *mut c_void = buffer.as_mut_ptr().cast();
    // SAFETY: all callers have made the buffer as large as the kernel's structure for the request. A
    // descriptor that is not a listener does not support the request.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), request, buffer) };
    if result == -1 { Err(errno::last()) } else { Ok(()) }
}

//! The keeper's end of a listener: which call it was, and the answer to it.
//!
//! It never waits by itself: the caller has polled the listener. It decides nothing.
#![expect(unsafe_code, reason = "the listener's ioctls have no safe form")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{seccomp_notif, seccomp_notif_resp, seccomp_notif_sizes};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use bulkhead_linux::errno;

/// A call that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notification {
    /// Names it in the answer.
    pub id: u64,
    /// The number of the thread that makes it, which need not be the worker's first one, nor of the
    /// worker's own process. 0: it is not in our pid namespace.
    pub thread: u32,
    /// The call's number.
    pub number: u32,
    /// Its arguments; what they point to may change at any time.
    pub arguments: [u64; 6],
}

/// What there is to hear from a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// A call waits: [`receive`] does not.
    Call,
    /// Nothing now.
    None,
    /// Nothing ever again, for no process is under the filter any more.
    Over,
}

/// Looks whether there is something to receive.
pub(crate) fn news(listener: &OwnedFd) -> rustix::io::Result<News> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&at_once)))?;
    let found = fds[0].revents();
    Ok(match (found.contains(PollFlags::IN), found.is_empty()) {
        (true, _) => News::Call,
        (false, true) => News::None,
        (false, false) => News::Over,
    })
}

/// Takes a notification from a listener that has one, by [`news`]: without, kernels before 6.11 wait for
/// ever, also when no process is left to make a call. `None`: the call has been interrupted, or its process
/// killed, since.
pub(crate) fn receive(listener: &OwnedFd) -> io::Result<Option<Notification>> {
    let sizes = sizes()?;
    let mut buffer = zeroed(sizes.seccomp_notif, size_of::<seccomp_notif>());
    match control(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &mut buffer) {
        Ok(()) => {}
        Err(Errno::NOENT | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    }
    // SAFETY: the buffer is as large and as aligned as the structure, in which every bit pattern is valid.
    let seccomp_notif { id, pid, data, .. } = unsafe { buffer.as_ptr().cast::<seccomp_notif>().read() };
    Ok(Some(Notification { id, thread: pid, number: data.nr as u32, arguments: data.args }))
}

/// Lets a call fail with this error. One that does not wait any more is none.
pub(crate) fn refuse(listener: &OwnedFd, id: u64, errno: Errno) -> io::Result<()> {
    let sizes = sizes()?;
    let mut buffer = zeroed(sizes.seccomp_notif_resp, size_of::<seccomp_notif_resp>());
    let answer = seccomp_notif_resp { id, val: 0, error: -errno.raw_os_error(), flags: 0 };
    // SAFETY: the buffer is as large and as aligned as the structure.
    unsafe { buffer.as_mut_ptr().cast::<seccomp_notif_resp>().write(answer) };
    match control(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &mut buffer) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether a call still waits for its answer, so that its thread is what it was when it was told.
pub(crate) fn is_waiting(listener: &OwnedFd, id: u64) -> Result<(), Errno> {
    control(listener, libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &mut [id])
}

/// The kernel's structures grow: it writes as many bytes as it has, and wants all of them zero before.
fn zeroed(in_kernel: u16, here: usize) -> Vec<u64> {
    vec![0; usize::from(in_kernel).max(here).div_ceil(size_of::<u64>())]
}

fn sizes() -> io::Result<seccomp_notif_sizes> {
    let mut sizes = seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
    // SAFETY: the pointer is to a local of the type that the call fills, which has not grown since it exists.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes) };
    if result == -1 { Err(errno::last().into()) } else { Ok(sizes) }
}

fn control(listener: &OwnedFd, request: libc::Ioctl, buffer: &mut [u64]) -> Result<(), Errno> {
    let buffer: *mut c_void = buffer.as_mut_ptr().cast();
    // SAFETY: all callers have made the buffer as large as the kernel's structure for the request, and a
    // descriptor that is no listener does not know the request.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), request, buffer) };
    if result == -1 { Err(errno::last()) } else { Ok(()) }
}

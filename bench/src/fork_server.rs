//! The bare fork server: a process with one thread that forks a child for each socket it is sent. The child answers one
//! job on it, and ends.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::WaitOptions;

use crate::Result;
use crate::processes::Process;

/// Bytes of a job, and of its answer.
const JOB_BYTES: usize = 64;

/// The server, until the other end of its standard input is closed.
pub(crate) fn serve() -> Result<()> {
    let orders = std::io::stdin().as_fd().try_clone_to_owned()?;
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(&orders, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
        if got.bytes == 0 {
            return Ok(());
        }
        let links = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        for link in links.flatten() {
            // SAFETY: this process has one thread.
            #[expect(unsafe_code, reason = "fork(2) has no safe form")]
            match unsafe { libc::fork() } {
                -1 => return Err(std::io::Error::last_os_error().into()),
                0 => std::process::exit(i32::from(answer(link).is_err())),
                _ => {}
            }
        }
        while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
    }
}

fn answer(link: OwnedFd) -> std::io::Result<()> {
    let mut link = UnixStream::from(link);
    let mut job = [0; JOB_BYTES];
    link.read_exact(&mut job)?;
    link.write_all(&job)
}

/// The server, as those have it who want jobs done.
pub(crate) struct ForkServer {
    orders: Mutex<UnixStream>,
    _process: Process,
}

impl ForkServer {
    pub(crate) fn start() -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("fork-server").stdin(Stdio::from(OwnedFd::from(theirs)));
        Ok(Self { orders: Mutex::new(ours), _process: Process::start(&mut command)? })
    }

    /// Jobs a second, so many at once, each by a thread that does one after the other.
    pub(crate) fn run(&self, at_once: usize, total: usize) -> Result<f64> {
        let began = Instant::now();
        std::thread::scope(|scope| {
            let lane = || (0..total / at_once).try_for_each(|_| self.one());
            let lanes: Vec<_> = (0..at_once).map(|_| scope.spawn(lane)).collect();
            lanes
                .into_iter()
                .try_for_each(|lane| lane.join().unwrap_or_else(|_| Err(ErrorKind::Other.into())))
        })?;
        Ok((total / at_once * at_once) as f64 / began.elapsed().as_secs_f64())
    }

    fn one(&self) -> std::io::Result<()> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let descriptors = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let orders = self.orders.lock().map_err(|_| ErrorKind::Other)?;
        rustix::net::sendmsg(&*orders, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        drop((orders, control));
        drop(theirs);
        let mut job = [b'x'; JOB_BYTES];
        ours.write_all(&job)?;
        ours.read_exact(&mut job)
    }
}

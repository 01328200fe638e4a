//! The bare fork server: a process with one thread that forks a child for each socket it is sent. The child answers one
//! job on it, and ends. With layers it is confined as a template is, and the child as what that forks (`layers.rs`).

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::WaitOptions;

use crate::layers::Layers;
use crate::processes::Process;
use crate::{Result, layers};

/// Bytes of a job, and of its answer.
const JOB_BYTES: usize = 64;

/// The first byte of a job that kills its process.
const KILLS: u8 = b'k';

/// The server, until the other end of its standard input is closed. `layers`: of which profile, and the folder of the
/// children's temporary folders.
pub(crate) fn serve(layers: Option<(&str, &Path)>) -> Result<()> {
    let orders = std::io::stdin().as_fd().try_clone_to_owned()?;
    let mut layers = layers.map(|(profile, folder)| Layers::enter(profile, folder)).transpose()?;
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
            match layers::fork()? {
                None => {
                    let entered = layers.as_mut().map_or(Ok(()), Layers::enter_child);
                    std::process::exit(i32::from(entered.and_then(|()| answer(link)).is_err()))
                }
                Some(pid) => {
                    if let Some(layers) = &mut layers {
                        layers.forked(pid);
                    }
                }
            }
        }
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            if let Some(layers) = &mut layers {
                layers.ended(pid);
            }
        }
    }
}

fn answer(link: OwnedFd) -> std::io::Result<()> {
    let mut link = UnixStream::from(link);
    let mut job = [0; JOB_BYTES];
    link.read_exact(&mut job)?;
    if job[0] == KILLS {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    link.write_all(&job)
}

/// The server, as those have it who want jobs done.
pub(crate) struct ForkServer {
    orders: Mutex<UnixStream>,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl ForkServer {
    /// With the layers of a profile.
    pub(crate) fn start(profile: &str) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("fork-server").stdin(Stdio::from(OwnedFd::from(theirs)));
        if profile != "none" {
            command.arg(profile).arg(folder.path());
        }
        let server =
            Self { orders: Mutex::new(ours), _process: Process::start(&mut command)?, _folder: folder };
        // It is there, or has said why not.
        server.one()?;
        Ok(server)
    }

    /// From a job that kills its process to the next answer, in ms.
    pub(crate) fn recovery(&self) -> Result<f64> {
        let mut dying = self.link()?;
        let began = Instant::now();
        dying.write_all(&[KILLS; JOB_BYTES])?;
        if dying.read(&mut [0])? != 0 {
            return Err("a job that kills its process was answered".into());
        }
        self.one()?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
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
        let mut link = self.link()?;
        let mut job = [b'x'; JOB_BYTES];
        link.write_all(&job)?;
        link.read_exact(&mut job)
    }

    /// To a process of its own.
    fn link(&self) -> std::io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let descriptors = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let orders = self.orders.lock().map_err(|_| ErrorKind::Other)?;
        rustix::net::sendmsg(&*orders, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        Ok(ours)
    }
}

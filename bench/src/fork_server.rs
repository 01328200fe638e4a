//! A client of the bare fork server (`../parts/src/fork_server.rs`), which starts a process for each job without a
//! supervisor. `fresh` compares the supervisor with this server.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::Mutex;
use std::time::Instant;

use bulkhead_bench_parts::{JOB_BYTES, KILLS};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::Result;
use crate::processes::{self, Process};

/// A running fork server.
pub(crate) struct ForkServer {
    orders: Mutex<UnixStream>,
    _process: Process,
    _folder: tempfile::TempDir,
}

impl ForkServer {
    /// Starts a fork server that applies the confinement layers of the given profile.
    pub(crate) fn start(profile: &str) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let folder = tempfile::tempdir()?;
        let mut command = processes::parts()?;
        command.arg("fork-server").stdin(Stdio::from(OwnedFd::from(theirs)));
        if profile != "none" {
            command.arg(profile).arg(folder.path());
        }
        let server =
            Self { orders: Mutex::new(ours), _process: Process::start(&mut command)?, _folder: folder };
        // The reply to the first job shows that the server is running.
        server.one()?;
        Ok(server)
    }

    /// Sends a job that kills the process running it. Returns the time until the next reply, in ms.
    pub(crate) fn recovery(&self) -> Result<f64> {
        let mut dying = self.link()?;
        let began = Instant::now();
        dying.write_all(&[KILLS; JOB_BYTES])?;
        if dying.read(&mut [0])? != 0 {
            return Err("the process replied to a job that should have killed it".into());
        }
        self.one()?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }

    /// Runs `total` jobs on `at_once` threads, one job at a time per thread. Returns the number of jobs per second.
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

    /// Returns a connection to a newly forked process.
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

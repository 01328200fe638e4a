//! The process at the other end of a socket: its credentials as of its `connect(2)`, and whether it is one of the
//! processes that descend from here.
//!
//! It tells, and decides nothing. Nothing in it waits; a look at a process's descent reads some small files
//! of `/proc`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::errno;
use crate::process_tree::{lineage, started};
use crate::wait::is_readable;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Supplementary groups that are asked for at first; as a rule there are fewer.
const GROUPS_FIRST: usize = 64;

/// The most that a process of Linux can have.
const GROUPS_MAX: usize = 65_536;

/// Processes that are remembered as outsiders, the latest.
const OUTSIDERS_MAX: usize = 16;

/// The process that connected, as it was then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
    /// Its number; `None` if it is in a PID namespace that cannot be seen from this one.
    pub pid: Option<u32>,
}

/// Where a process comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Descent {
    /// From elsewhere.
    Outside,
    /// From this process: itself, its ancestors, and this process at the end.
    Ours(Vec<u32>),
    /// It has ended, so that it cannot be told.
    Ended,
}

impl Peer {
    /// The process that connected this socket. Errors are those of `getsockopt(2)`.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        let found = getsockopt(socket, PeerCredentials)?;
        let pid = u32::try_from(found.pid()).ok().filter(|&pid| pid != 0);
        Ok(Self { uid: found.uid(), gid: found.gid(), pid })
    }

    /// Where the process comes from that connected this socket. It must be alive to tell: one that ends
    /// before could have been any process, and handed the connection on.
    ///
    /// Every child of a process that ends goes to the nearest subreaper above it, and the keeper and this
    /// process are some: no process that descends from here can leave its line, by no number of forks and
    /// sessions. Nor can it hide in a PID namespace of its own, for those can be seen from here.
    ///
    /// A process that `outsiders` know is not looked up again.
    /// Errors: a line of ancestors that cannot be told; this process has as many descriptors as it may.
    pub fn descent_beside(&self, socket: &impl AsFd, outsiders: &Outsiders) -> io::Result<Descent> {
        let Some(pid) = self.pid else { return Ok(Descent::Outside) };
        let own = std::process::id();
        if pid == own {
            return Ok(Descent::Outside);
        }
        let Some(pidfd) = pin(socket, pid)? else { return Ok(Descent::Ended) };
        let process = started(pid).map(|started| (pid, started));
        let is_known = process.is_some_and(|process| outsiders.know(process));
        let line = if is_known { Ok(vec![pid]) } else { lineage(pid, own) };
        // Alive at the end, so that the number was its own all the while.
        if is_readable(&pidfd, Duration::ZERO)? {
            return Ok(Descent::Ended);
        }
        let line = line?;
        if line.last() == Some(&own) {
            return Ok(Descent::Ours(line));
        }
        if let Some(process) = process.filter(|_| !is_known) {
            outsiders.remember(process);
        }
        Ok(Descent::Outside)
    }
}

/// Processes that were found to come from elsewhere, by number and start. That can never change: a process that loses its
/// parent goes to another one above it. So processes that connect again and again, as scrapers do, are looked up once.
#[derive(Debug, Default)]
pub struct Outsiders(Mutex<VecDeque<(u32, u64)>>);

impl Outsiders {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u32, u64)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn know(&self, process: (u32, u64)) -> bool {
        self.lock().contains(&process)
    }

    fn remember(&self, process: (u32, u64)) {
        let mut known = self.lock();
        known.truncate(OUTSIDERS_MAX - 1);
        known.push_front(process);
    }
}

/// A descriptor of the process that connected; `None` if it is gone.
fn pin(socket: &impl AsFd, pid: u32) -> io::Result<Option<OwnedFd>> {
    use nix::errno::Errno::{EINVAL, ENODATA, ENOPROTOOPT, ESRCH};
    match getsockopt(socket, PeerPidfd) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(EINVAL | ENODATA | ESRCH) => Ok(None),
        // Before Linux 6.5. The number may have been given to another process since; there is no better one.
        Err(ENOPROTOOPT) => {
            let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(pidfd) => Ok(Some(pidfd)),
                Err(Errno::SRCH | Errno::INVAL) => Ok(None),
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

/// The supplementary groups of the process that connected, as they were then. Errors are those of
/// `getsockopt(2)`.
#[expect(unsafe_code, reason = "SO_PEERGROUPS has no safe form")]
pub fn groups(socket: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; GROUPS_FIRST];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        let (fd, into) = (socket.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most as many bytes as it is told there are, and any are a number.
        let got =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, into, &raw mut bytes) };
        let count = bytes as usize / size_of::<u32>();
        match errno::check(got) {
            Ok(()) => {
                groups.truncate(count);
                return Ok(groups);
            }
            // It says how many there are.
            Err(Errno::RANGE) if count > groups.len() && count <= GROUPS_MAX => groups.resize(count, 0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether [`Peer::descent`] can work here: `/proc` is that of this PID namespace, and hides no process.
pub fn check_sight() -> io::Result<()> {
    let own = std::process::id();
    let seen = std::fs::read_link("/proc/self")?;
    if seen.to_str() != Some(&own.to_string()) {
        return Err(io::Error::other("it is that of another PID namespace"));
    }
    // No process has the number 0, so that this goes all the way.
    lineage(own, 0).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Has another process connect, which lives until it is killed, unless `then` says otherwise.
    fn caller(path: &std::path::Path, then: &str) -> Child {
        let script = format!(
            "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('{}'); {then}",
            path.display()
        );
        Command::new("python3").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_client_is_told_by_descent() {
        if Command::new("python3").arg("--version").output().is_err() {
            eprintln!("NOT RUN: this test has python3 connect");
            return;
        }
        check_sight().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();

        let mut child = caller(&path, "time.sleep(100)");
        let (socket, _) = listener.accept().unwrap();
        let peer = Peer::of(&socket).unwrap();
        let own = std::process::id();
        assert_eq!((peer.uid, peer.pid), (rustix::process::getuid().as_raw(), Some(child.id())));
        let ours = Descent::Ours(vec![child.id(), own]);
        let outsiders = Outsiders::default();
        for _ in 0..2 {
            assert_eq!(peer.descent_beside(&socket, &outsiders).unwrap(), ours);
        }
        // What is known is that process, and no other that has its number.
        let began = started(child.id()).unwrap();
        outsiders.remember((child.id(), began + 1));
        assert_eq!(peer.descent_beside(&socket, &outsiders).unwrap(), ours);
        for other in 0..OUTSIDERS_MAX as u32 {
            outsiders.remember((other, 0));
        }
        assert_eq!(outsiders.lock().len(), OUTSIDERS_MAX);
        outsiders.remember((child.id(), began));
        assert_eq!(peer.descent_beside(&socket, &outsiders).unwrap(), Descent::Outside);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(peer.descent_beside(&socket, &outsiders).unwrap(), Descent::Ended);

        // Dead, and its number still taken.
        let mut child = caller(&path, "0");
        let (socket, _) = listener.accept().unwrap();
        let peer = Peer::of(&socket).unwrap();
        while !is_readable(pin(&socket, child.id()).unwrap().unwrap(), Duration::ZERO).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(peer.descent_beside(&socket, &Outsiders::default()).unwrap(), Descent::Ended);
        child.wait().unwrap();

        let _ourselves = UnixStream::connect(&path).unwrap();
        let (socket, _) = listener.accept().unwrap();
        assert_eq!(
            Peer::of(&socket).unwrap().descent_beside(&socket, &Outsiders::default()).unwrap(),
            Descent::Outside
        );
        let own = nix::unistd::getgroups().unwrap().into_iter().map(nix::unistd::Gid::as_raw);
        assert_eq!(groups(&socket).unwrap(), own.collect::<Vec<_>>());
    }

    /// What a look costs; `cargo test -p bulkhead-linux --release --lib -- --ignored --nocapture cost`.
    #[test]
    #[ignore = "a measurement"]
    fn the_cost_of_a_look() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut child = caller(&path, "time.sleep(100)");
        let (socket, _) = listener.accept().unwrap();
        let peer = Peer::of(&socket).unwrap();
        const LOOKS: u32 = 20_000;
        let began = std::time::Instant::now();
        for _ in 0..LOOKS {
            assert_ne!(peer.descent_beside(&socket, &Outsiders::default()).unwrap(), Descent::Ended);
        }
        println!("a child of ours: {:?}", began.elapsed() / LOOKS);
        let began = std::time::Instant::now();
        let mut length = 0;
        for _ in 0..LOOKS {
            length = lineage(child.id(), 0).unwrap().len();
        }
        println!("a line of {length}: {:?}", began.elapsed() / LOOKS);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! Determines the process at the other end of a socket: its credentials at the time of `connect(2)`, and whether it
//! descends from this process. `bulkhead_plane::peer_check` decides which clients to reject.
//!
//! No function blocks. Determining the ancestors of a process takes a few reads of small files in `/proc`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::errno;
use crate::process_tree::{ancestors, start_time};
use crate::wait::wait_until_readable;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{PeerCredentials, PeerPidfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Initial buffer capacity for supplementary groups. Most processes have fewer groups than this.
const GROUPS_INITIAL: usize = 64;

/// Maximum number of supplementary groups that Linux allows a process to have.
const GROUPS_MAX: usize = 65_536;

/// Maximum number of processes remembered as unrelated to the supervisor. The oldest entries are dropped first.
const UNRELATED_MAX: usize = 16;

/// The process that connected a socket, with its credentials at the time of `connect(2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Effective user ID.
    pub uid: u32,
    /// Effective group ID.
    pub gid: u32,
    /// Process ID, or `None` if the process is in a PID namespace that this process cannot see.
    pub pid: Option<u32>,
}

/// Relationship of a process to this supervisor process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Descent {
    /// The process is not a descendant of this one.
    Unrelated,
    /// The process is a descendant of this process, or of the process set with [`UnrelatedProcesses::set_other_root`].
    /// Contains the PIDs of the descendant and of its ancestors, up to and including this process or the other process.
    Descendant(Vec<u32>),
    /// The process has exited, and its ancestors can no longer be determined.
    Ended,
}

impl Peer {
    /// Returns the process that connected this socket. Fails if `getsockopt(2)` fails.
    pub fn of(socket: &impl AsFd) -> io::Result<Self> {
        let found = getsockopt(socket, PeerCredentials)?;
        let pid = u32::try_from(found.pid()).ok().filter(|&pid| pid != 0);
        Ok(Self { uid: found.uid(), gid: found.gid(), pid })
    }

    /// Determines whether the process that connected this socket descends from this process. Returns [`Descent::Ended`]
    /// if the connecting process has exited. In that case, any process could have opened the connection, and could then
    /// have passed it to another process.
    ///
    /// When a process exits, its children are reparented to the nearest subreaper above. The keeper and this process
    /// are subreapers, so a descendant cannot leave the tree by forking or starting sessions. It cannot hide in a PID
    /// namespace either, because nested namespaces are visible from here.
    ///
    /// A process in `unrelated` is not looked up again. Fails if the ancestors cannot be read, or if this
    /// process has reached its descriptor limit.
    pub fn descent(&self, socket: &impl AsFd, unrelated: &UnrelatedProcesses) -> io::Result<Descent> {
        let Some(pid) = self.pid else { return Ok(Descent::Unrelated) };
        let own = std::process::id();
        if pid == own {
            return Ok(Descent::Unrelated);
        }
        let Some(pidfd) = open_pidfd(socket, pid)? else { return Ok(Descent::Ended) };
        let process = start_time(pid).map(|started| (pid, started));
        let is_known = process.is_some_and(|process| unrelated.contains(process));
        let chain = if is_known { Ok(vec![pid]) } else { ancestors(pid, own) };
        // Checks that the connecting process is still alive. If so, its PID was not reused during the lookup.
        if wait_until_readable(&pidfd, Duration::ZERO)? {
            return Ok(Descent::Ended);
        }
        let mut chain = chain?;
        if chain.last() == Some(&own) {
            return Ok(Descent::Descendant(chain));
        }
        let other = unrelated.other_root.load(Ordering::SeqCst);
        if let Some(at) = chain.iter().skip(1).position(|&ancestor| ancestor == other && other != 0) {
            chain.truncate(at + 2);
            return Ok(Descent::Descendant(chain));
        }
        if let Some(process) = process.filter(|_| !is_known) {
            unrelated.remember(process);
        }
        Ok(Descent::Unrelated)
    }
}

/// Processes known not to descend from this one, by PID and start time. They stay unrelated, because an orphan's new
/// parent is one of its ancestors. Processes that connect often, such as scrapers, are therefore looked up only once.
#[derive(Debug, Default)]
pub struct UnrelatedProcesses {
    known: Mutex<VecDeque<(u32, u64)>>,
    /// PID of a second process whose descendants count as descendants of this process, or 0 if there is none.
    other_root: AtomicU32,
}

impl UnrelatedProcesses {
    /// Treats the descendants of the process `pid` like descendants of this process until the next call. Passing `None`
    /// ends this treatment. Needed during an upgrade, when two supervisors run workers.
    pub fn set_other_root(&self, pid: Option<u32>) {
        self.lock().clear();
        self.other_root.store(pid.unwrap_or(0), Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u32, u64)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contains(&self, process: (u32, u64)) -> bool {
        self.lock().contains(&process)
    }

    fn remember(&self, process: (u32, u64)) {
        let mut known = self.lock();
        known.truncate(UNRELATED_MAX - 1);
        known.push_front(process);
    }
}

/// Opens a pidfd of the process that connected. Returns `None` if the process is gone.
fn open_pidfd(socket: &impl AsFd, pid: u32) -> io::Result<Option<OwnedFd>> {
    use nix::errno::Errno::{EINVAL, ENODATA, ENOPROTOOPT, ESRCH};
    match getsockopt(socket, PeerPidfd) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(EINVAL | ENODATA | ESRCH) => Ok(None),
        // Before Linux 6.5, the kernel provides only the PID, which may have been reused since.
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

/// Returns the supplementary groups that the process had when it connected. Fails if `getsockopt(2)` fails.
#[expect(unsafe_code, reason = "SO_PEERGROUPS has no safe wrapper")]
pub fn groups(socket: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; GROUPS_INITIAL];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        let (fd, into) = (socket.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most `bytes` bytes to `groups`, and any bytes are valid numbers.
        let got =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, into, &raw mut bytes) };
        let count = bytes as usize / size_of::<u32>();
        match errno::check(got) {
            Ok(()) => {
                groups.truncate(count);
                return Ok(groups);
            }
            // The kernel has set `bytes` to the required size.
            Err(Errno::RANGE) if count > groups.len() && count <= GROUPS_MAX => groups.resize(count, 0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Checks that [`Peer::descent`] works on this machine. For this, `/proc` must belong to this PID namespace and must
/// not hide processes.
pub fn check_proc_visibility() -> io::Result<()> {
    let own = std::process::id();
    let seen = std::fs::read_link("/proc/self")?;
    if seen.to_str() != Some(&own.to_string()) {
        return Err(io::Error::other("/proc belongs to another PID namespace"));
    }
    // Reads all ancestors of this process, because no process has PID 0.
    ancestors(own, 0).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Maximum time that a test waits for a condition. Conditions normally become true much sooner.
    const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

    /// Accepts a connection, or panics if no process connects in time.
    fn accept(listener: &UnixListener) -> UnixStream {
        assert!(wait_until_readable(listener, WAIT_TIMEOUT).unwrap(), "no process has connected");
        listener.accept().unwrap().0
    }

    /// Starts a process that connects to the socket at `path` and then runs `then` as Python code.
    fn connecting_process(path: &std::path::Path, then: &str) -> Child {
        let script = format!(
            "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('{}'); {then}",
            path.display()
        );
        Command::new("python3").args(["-c", &script]).stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn connecting_process_is_recognised_as_descendant() {
        if Command::new("python3").arg("--version").output().is_err() {
            eprintln!("NOT RUN: python3 is not installed");
            return;
        }
        check_proc_visibility().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();

        let mut child = connecting_process(&path, "time.sleep(1000)");
        let socket = accept(&listener);
        let peer = Peer::of(&socket).unwrap();
        let own = std::process::id();
        assert_eq!((peer.uid, peer.pid), (rustix::process::getuid().as_raw(), Some(child.id())));
        let ours = Descent::Descendant(vec![child.id(), own]);
        let unrelated = UnrelatedProcesses::default();
        for _ in 0..2 {
            assert_eq!(peer.descent(&socket, &unrelated).unwrap(), ours);
        }
        // The cache identifies a process by PID and start time, so another process with the same PID does not match.
        let began = start_time(child.id()).unwrap();
        unrelated.remember((child.id(), began + 1));
        assert_eq!(peer.descent(&socket, &unrelated).unwrap(), ours);
        for other in 0..UNRELATED_MAX as u32 {
            unrelated.remember((other, 0));
        }
        assert_eq!(unrelated.lock().len(), UNRELATED_MAX);
        unrelated.remember((child.id(), began));
        assert_eq!(peer.descent(&socket, &unrelated).unwrap(), Descent::Unrelated);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(peer.descent(&socket, &unrelated).unwrap(), Descent::Ended);

        // This process is dead but not reaped, so its PID is still in use.
        let mut child = connecting_process(&path, "0");
        let socket = accept(&listener);
        let peer = Peer::of(&socket).unwrap();
        let pidfd = open_pidfd(&socket, child.id()).unwrap().unwrap();
        assert!(wait_until_readable(pidfd, WAIT_TIMEOUT).unwrap());
        assert_eq!(peer.descent(&socket, &UnrelatedProcesses::default()).unwrap(), Descent::Ended);
        child.wait().unwrap();

        let _ourselves = UnixStream::connect(&path).unwrap();
        let (socket, _) = listener.accept().unwrap();
        assert_eq!(
            Peer::of(&socket).unwrap().descent(&socket, &UnrelatedProcesses::default()).unwrap(),
            Descent::Unrelated
        );
        let own = nix::unistd::getgroups().unwrap().into_iter().map(nix::unistd::Gid::as_raw);
        assert_eq!(groups(&socket).unwrap(), own.collect::<Vec<_>>());
    }

    /// Measures the time that a lookup takes. Run this test with `cargo test -p bulkhead-linux --release --lib --
    /// --ignored --nocapture cost`.
    #[test]
    #[ignore = "a measurement"]
    fn measures_cost_of_peer_lookup() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut child = connecting_process(&path, "time.sleep(100)");
        let (socket, _) = listener.accept().unwrap();
        let peer = Peer::of(&socket).unwrap();
        const LOOKUPS: u32 = 20_000;
        let began = std::time::Instant::now();
        for _ in 0..LOOKUPS {
            assert_ne!(peer.descent(&socket, &UnrelatedProcesses::default()).unwrap(), Descent::Ended);
        }
        println!("a direct child: {:?}", began.elapsed() / LOOKUPS);
        let began = std::time::Instant::now();
        let mut length = 0;
        for _ in 0..LOOKUPS {
            length = ancestors(child.id(), 0).unwrap().len();
        }
        println!("a chain of {length}: {:?}", began.elapsed() / LOOKUPS);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! The supervisor's end of the connection to the keeper. Sends orders and receives reports without blocking.
//!
//! Also starts the keeper process, shuts it down, and waits until it has exited. The data plane keeps the list of
//! workers.

pub(crate) mod detached;

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_shared::codec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;

use self::detached::{DetachedKeeper, ProbeMachine, ProbeResult};
use crate::protocol::socket::{self, OrderSocket, Outbox, Received};
use crate::protocol::{
    KEEPER_ARGUMENT, Order, REPORT_BYTES_MAX, Report, ReportMessage, SERVICE_MANAGER_VARIABLES, SpawnOrder,
};
use crate::{SubordinateIds, wait};

/// Maximum number of pending orders. Once the limit is reached, orders to spawn or fork a worker are
/// rejected. Kill and ping orders are always accepted; there can be at most one kill per worker and one ping.
/// The keeper executes an order within about a millisecond.
const PENDING_ORDERS_MAX: usize = 1024;

/// Maximum time to wait for the keeper to exit. This is slightly longer than the keeper's own time limit for killing
/// all workers.
const EXIT_TIMEOUT: Duration = Duration::from_secs(65);

/// Maximum time for killing the processes left behind by a keeper that was killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum number of orphans reaped in one call.
const ORPHANS_PER_CALL_MAX: usize = 64;

/// Returns advice for the operator if a worker failed to start at the step `step`. The advice can be empty.
pub fn spawn_failure_advice(step: &str, error: &io::Error) -> &'static str {
    match step {
        "exec" if error.kind() == io::ErrorKind::ArgumentListTooLong => {
            " (the total size of the arguments, `env` and the contents of `env_files` is too large)"
        }
        _ if step.starts_with("env_files") => "",
        _ if error.kind() != io::ErrorKind::PermissionDenied => "",
        "exec" | "working directory" => INACCESSIBLE_PATH_ADVICE,
        _ if step.starts_with("mount namespace: show") => INACCESSIBLE_PATH_ADVICE,
        _ if step.starts_with("rlimit") => " (a limit above the supervisor's own requires CAP_SYS_RESOURCE)",
        _ => "",
    }
}

const INACCESSIBLE_PATH_ADVICE: &str =
    " (check that the worker's user can access the path and every directory above it)";

/// The supervisor's handle to a keeper process.
///
/// Dropping the handle orders the keeper to exit. [`Keeper::shut_down`] also waits for the exit. If the keeper is not a
/// child of this process, dropping the handle waits for up to ten seconds.
#[derive(Debug)]
pub struct Keeper {
    // The socket must be dropped before `process`. Dropping `process` waits for the keeper, which exits only after the
    // socket is closed.
    socket: OrderSocket,
    process: KeeperProcess,
    /// Path of the program that was started as the keeper.
    program: PathBuf,
    outbox: Outbox,
    buffer: Vec<u8>,
    /// Workers without a pidfd, because this process reached its file descriptor limit when it received the descriptor.
    /// Such workers are killed and reported as failed.
    without_pidfd: HashSet<u64>,
    /// Subordinate user IDs for workers. If this keeper is lost, the IDs are sent to the next keeper.
    ids: Option<Arc<SubordinateIds>>,
    /// Descriptor that the keeper keeps open until it exits. Also sent to a replacement keeper.
    lifeline: Option<Arc<OwnedFd>>,
}

#[derive(Debug)]
enum KeeperProcess {
    /// The keeper is a child of this process.
    Child(Child),
    /// The keeper was started by a guard and is not a child of this process.
    Detached(DetachedKeeper),
}

/// Starts a replacement for a lost keeper. The replacement uses the same program, subordinate user IDs and lifeline
/// (see [`Keeper::send_lifeline`]).
#[derive(Clone, Debug)]
pub struct KeeperLauncher {
    program: PathBuf,
    is_detached: bool,
    ids: Option<Arc<SubordinateIds>>,
    lifeline: Option<Arc<OwnedFd>>,
}

impl KeeperLauncher {
    /// Returns the path of the program that is started as the keeper.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Starts the keeper, and sends it the subordinate user IDs for workers and the lifeline (see
    /// [`Keeper::send_lifeline`]).
    pub fn start(&self) -> io::Result<Keeper> {
        self.hand_over(match self.is_detached {
            true => Keeper::launch_detached(&self.program, ProbeMachine::No)?.0,
            false => Keeper::start(&self.program)?,
        })
    }

    /// Sends a new keeper the descriptors of this launcher.
    fn hand_over(&self, mut keeper: Keeper) -> io::Result<Keeper> {
        let sent = match &self.ids {
            Some(ids) => keeper.send_subordinate_ids(ids.clone()),
            None => Ok(()),
        };
        let sent = sent.and_then(|()| match &self.lifeline {
            Some(lifeline) => keeper.send_lifeline(lifeline.clone()),
            None => Ok(()),
        });
        // After an error, the dropped keeper has no workers and exits. Killing all descendants would kill the workers
        // of other keepers.
        sent.map(|()| keeper)
    }
}

impl Keeper {
    /// Starts a keeper for an application that embeds the supervisor. The keeper is not a child of the
    /// application. If the keeper is killed, a guard process kills the processes that the keeper left behind. The
    /// keeper exits when this process exits, or when the handle is dropped.
    ///
    /// `program` must have the same version as this library. In `main`, `program` must first check whether its first
    /// argument is [`KEEPER_ARGUMENT`] and, if so, call [`crate::run_as_keeper`].
    ///
    /// Blocks until the keeper is running, usually for about ten milliseconds.
    pub fn start_detached(program: &Path) -> io::Result<(Self, ProbeResult)> {
        Self::launch_detached(program, ProbeMachine::Yes)
    }

    fn launch_detached(program: &Path, probe: ProbeMachine) -> io::Result<(Self, ProbeResult)> {
        let (socket, theirs) = OrderSocket::pair()?;
        let (process, found) = DetachedKeeper::start(program, probe, &socket, theirs)?;
        Ok((Self::new(KeeperProcess::Detached(process), program, socket), found))
    }

    /// Starts `program` as the keeper. `program` must call [`crate::run_as_keeper`] if its first argument is
    /// [`KEEPER_ARGUMENT`]. The usual program is `/proc/self/exe`. The keeper sends [`Report::Started`] when it is
    /// ready.
    pub fn start(program: &Path) -> io::Result<Self> {
        let (socket, theirs) = OrderSocket::pair()?;
        let mut command = Command::new(program);
        command.arg0("bulkhead-keeper").arg(KEEPER_ARGUMENT).stdin(theirs).stdout(Stdio::null());
        for name in SERVICE_MANAGER_VARIABLES {
            command.env_remove(name);
        }
        Ok(Self::new(KeeperProcess::Child(command.spawn()?), program, socket))
    }

    fn new(process: KeeperProcess, program: &Path, socket: OrderSocket) -> Self {
        Self {
            socket,
            process,
            program: program.to_owned(),
            outbox: Outbox::default(),
            buffer: vec![0; REPORT_BYTES_MAX],
            without_pidfd: HashSet::new(),
            ids: None,
            lifeline: None,
        }
    }

    /// Sends the keeper the user namespace for workers that use [`crate::Layers::subordinate_ids`].
    pub fn send_subordinate_ids(&mut self, ids: Arc<SubordinateIds>) -> io::Result<()> {
        self.send_order(Order::Namespace.encode()?, vec![ids.namespace()?])?;
        self.ids = Some(ids);
        Ok(())
    }

    /// Sends the keeper a descriptor that stays open until the keeper has killed all workers and exits. Replacement
    /// keepers receive the descriptor as well.
    pub fn send_lifeline(&mut self, lifeline: Arc<OwnedFd>) -> io::Result<()> {
        self.send_order(Order::Lifeline.encode()?, vec![lifeline.try_clone()?])?;
        self.lifeline = Some(lifeline);
        Ok(())
    }

    /// Returns a launcher that can start another keeper if this keeper is lost.
    pub fn launcher(&self) -> KeeperLauncher {
        let is_detached = matches!(self.process, KeeperProcess::Detached(_));
        KeeperLauncher {
            program: self.program.clone(),
            is_detached,
            ids: self.ids.clone(),
            lifeline: self.lifeline.clone(),
        }
    }

    /// Returns the PID of the keeper.
    pub fn pid(&self) -> u32 {
        match &self.process {
            KeeperProcess::Child(process) => process.id(),
            KeeperProcess::Detached(process) => process.keeper_pid(),
        }
    }

    /// Orders the keeper to start a worker. `link` becomes descriptor 3 of the worker. The worker's standard
    /// input is empty.
    ///
    /// No order is sent if this function returns an error. It fails if:
    ///
    /// - the order is too long or contains a NUL,
    /// - too many orders are pending ([`io::ErrorKind::WouldBlock`]), or
    /// - the keeper is gone ([`io::ErrorKind::BrokenPipe`]).
    pub fn spawn(
        &mut self,
        order: &SpawnOrder<'_>,
        link: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        self.send_spawn_order(order.encode()?, [link, stdout, stderr])
    }

    /// Orders the keeper to start a template. [`SpawnOrder::is_template`] must be set.
    pub fn spawn_template(
        &mut self,
        order: &SpawnOrder<'_>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        debug_assert!(order.is_template);
        self.send_order(order.encode()?, vec![stdout, stderr])
    }

    /// Orders a template to fork a worker. Call this only when the template is ready. The keeper replies with
    /// [`Report::Spawned`] or [`Report::SpawnFailed`]. This function fails in the same cases as
    /// [`Keeper::spawn`].
    pub fn fork(
        &mut self,
        (worker, template): (u64, u64),
        link: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        self.send_spawn_order(Order::Fork { worker, template }.encode()?, [link, stdout, stderr])
    }

    fn send_spawn_order(&mut self, message: Vec<u8>, descriptors: [OwnedFd; 3]) -> io::Result<()> {
        if self.outbox.len() >= PENDING_ORDERS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                "too many orders are waiting for the keeper",
            ));
        }
        self.send_order(message, descriptors.into())
    }

    /// Orders the keeper to kill a worker and all descendants of the worker immediately. Call this at most
    /// once per worker. The keeper then sends [`Report::Exited`], unless the worker has already exited. An
    /// error means that the keeper is gone.
    pub fn kill(&mut self, worker: u64) -> io::Result<()> {
        self.send_order(Order::Kill { worker }.encode()?, Vec::new())
    }

    /// Orders the keeper to sample the stacks of a worker and of its descendants, within 15 ms. With `job`, samples
    /// only the descendants that run this job or, if there are none, all descendants. The keeper writes the number of
    /// bytes to `file` as a 64-bit integer, followed by [records](bulkhead_shared::crash_record::Records). If the
    /// worker can also write its stacks as text, `text` is the worker's journal. The keeper then sends
    /// [`Report::Sampled`].
    pub fn sample(
        &mut self,
        worker: u64,
        job: Option<&str>,
        file: OwnedFd,
        text: Option<OwnedFd>,
    ) -> io::Result<()> {
        let descriptors = [Some(file), text].into_iter().flatten().collect();
        self.send_order(Order::Sample { worker, job }.encode()?, descriptors)
    }

    /// Sends a ping to the keeper. A responsive keeper answers with [`Report::Pong`] within a few milliseconds.
    pub fn ping(&mut self) -> io::Result<()> {
        self.send_order(Order::Ping.encode()?, Vec::new())
    }

    /// Reaps exited children other than the keeper. Such children are orphans, which this process inherits if it is
    /// process 1 of a container or a child subreaper. Returns true if more exited children might be left. Does nothing
    /// for an embedded supervisor, because the application reaps its own children.
    pub fn reap_orphans(&self) -> bool {
        let KeeperProcess::Child(keeper) = &self.process else { return false };
        for _ in 0..ORPHANS_PER_CALL_MAX {
            match bulkhead_linux::wait::peek_ended() {
                Some(pid) if pid != keeper.id() => drop(wait::try_reap(pid)),
                _ => return false,
            }
        }
        true
    }

    /// Kills an unresponsive keeper. The next call to [`Keeper::receive`] then returns an error.
    pub fn kill_keeper(&mut self) -> io::Result<()> {
        self.process.kill()
    }

    fn send_order(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        self.outbox.push(message, descriptors);
        self.flush()
    }

    /// Sends pending orders until all are sent or the socket's buffer is full. Call this when the socket is
    /// writable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&self.socket).map(drop)
    }

    /// Returns true if orders are waiting for the socket to become writable.
    pub fn has_pending_orders(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Returns the next report, or `None` if no report has arrived.
    ///
    /// After any error, the keeper must be replaced and its workers are lost; see [`reap_after_keeper`].
    /// [`io::ErrorKind::UnexpectedEof`] means that the keeper has exited.
    pub fn receive(&mut self) -> io::Result<Option<Report>> {
        loop {
            match socket::receive(&self.socket, &mut self.buffer)? {
                Received::Nothing => return Ok(None),
                Received::Closed => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper has exited"));
                }
                Received::Message(length, descriptors) => {
                    if let Some(report) = self.decode_report(length, descriptors)? {
                        return Ok(Some(report));
                    }
                }
            }
        }
    }

    /// Waits for the next report. Returns `None` if no report arrives before the deadline. Returns the same errors as
    /// [`Keeper::receive`].
    pub fn wait(&mut self, deadline: Instant) -> io::Result<Option<Report>> {
        loop {
            self.flush()?;
            if let Some(report) = self.receive()? {
                return Ok(Some(report));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let wanted =
                if self.has_pending_orders() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let _ = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&self.socket, wanted)], Some(&left)));
        }
    }

    fn decode_report(&mut self, length: usize, descriptors: Vec<OwnedFd>) -> io::Result<Option<Report>> {
        let (message, _) = codec::decode::<ReportMessage<'_>>(&self.buffer[..length], &[])
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(match message {
            ReportMessage::Started { scan_always } => Some(Report::Started { scan_always }),
            ReportMessage::Spawned { worker, pid, observed } => match descriptors.into_iter().next() {
                Some(pidfd) => Some(Report::Spawned { worker, pid, pidfd, observed }),
                None => Some(self.kill_without_pidfd(worker)?),
            },
            ReportMessage::Violation { worker, process, call } => {
                Some(Report::Violation { worker, process, call })
            }
            ReportMessage::SpawnFailed { worker, step, errno } => {
                let (step, error) = (step.to_owned(), io::Error::from_raw_os_error(errno));
                Some(Report::SpawnFailed { worker, step, error })
            }
            ReportMessage::Exited { worker, .. } if self.without_pidfd.contains(&worker) => None,
            ReportMessage::Exited { worker, exit, usage } => Some(Report::Exited { worker, exit, usage }),
            ReportMessage::Reaped { worker } if self.without_pidfd.remove(&worker) => None,
            ReportMessage::Reaped { worker } => Some(Report::Reaped { worker }),
            ReportMessage::Template { worker, message } => Some(Report::Template { worker, message }),
            ReportMessage::Sampled { worker, errno: 0 } => Some(Report::Sampled { worker, result: Ok(()) }),
            ReportMessage::Sampled { worker, errno } => {
                Some(Report::Sampled { worker, result: Err(io::Error::from_raw_os_error(errno)) })
            }
            ReportMessage::Pong => Some(Report::Pong),
            ReportMessage::Unkillable { count } => Some(Report::Unkillable { count }),
        })
    }

    /// Kills a worker whose pidfd is missing. Without the pidfd, the worker's exit could not be detected.
    fn kill_without_pidfd(&mut self, worker: u64) -> io::Result<Report> {
        self.without_pidfd.insert(worker);
        self.kill(worker)?;
        let error = rustix::io::Errno::MFILE.into();
        Ok(Report::SpawnFailed { worker, step: "pidfd".to_owned(), error })
    }

    /// Orders the keeper to kill all workers with their descendants and then to exit. Waits until the keeper has
    /// exited, which usually takes a few milliseconds, but can take up to a minute if processes cannot be killed.
    pub fn shut_down(self) -> io::Result<()> {
        let Self { process, socket, .. } = self;
        drop(socket);
        let mut process = match process {
            KeeperProcess::Child(process) => process,
            KeeperProcess::Detached(process) => {
                return if process.wait(EXIT_TIMEOUT)? {
                    Ok(())
                } else {
                    process.kill_and_wait(KILL_TIMEOUT)
                };
            }
        };
        if wait::exits_within(&process, EXIT_TIMEOUT)? {
            let status = process.wait()?;
            return if status.success() {
                Ok(())
            } else {
                Err(io::Error::other(format!("the keeper failed: {status}")))
            };
        }
        process.kill()?;
        wait::kill_all_descendants(KILL_TIMEOUT)?;
        Err(io::Error::new(io::ErrorKind::TimedOut, "the keeper could not kill the workers"))
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Keeper {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_fd().as_raw_fd()
    }
}

/// Makes this process a child subreaper, so that it inherits the descendants of a killed keeper and
/// [`reap_after_keeper`] can kill them. The supervisor calls this function at startup.
pub fn become_subreaper() -> io::Result<()> {
    // The argument is only a flag, so any nonzero PID makes this process a subreaper.
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

/// Kills a lost keeper and **all other descendants of this process**, and waits until none is left. Call this before
/// starting the next keeper, which would otherwise be killed as well.
///
/// The calling program must have called [`become_subreaper`] and must have no other children, because this function
/// kills and reaps all children. Usually blocks for a few milliseconds.
///
/// If the keeper was started by [`Keeper::start_detached`], the guard kills only the processes that belong to
/// the keeper.
pub fn reap_after_keeper(lost: Keeper) -> io::Result<()> {
    match lost.process {
        KeeperProcess::Child(mut process) => {
            process.kill()?;
            // Also reaps the keeper. It might be in uninterruptible sleep, so no other wait has a time limit.
            wait::kill_all_descendants(KILL_TIMEOUT)
        }
        KeeperProcess::Detached(process) => process.kill_and_wait(KILL_TIMEOUT),
    }
}

impl KeeperProcess {
    fn kill(&mut self) -> io::Result<()> {
        match self {
            Self::Child(process) => process.kill(),
            Self::Detached(process) => process.kill_keeper(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_launch_kills_no_other_processes() {
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let (socket, theirs) = OrderSocket::pair().unwrap();
        drop(theirs);
        let program = Path::new("true");
        let process = Command::new(program).spawn().unwrap();
        let keeper = Keeper::new(KeeperProcess::Child(process), program, socket);
        let lifeline: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let launcher = KeeperLauncher { lifeline: Some(Arc::new(lifeline)), ..keeper.launcher() };
        assert_eq!(launcher.hand_over(keeper).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

//! The supervisor's end of the keeper: orders in, reports out, without blocking.
//!
//! It owns the keeper process: its start, its end and its wait. It does not know which workers there
//! are; the data plane does.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bincode::{BorrowDecode, Encode};
use bulkhead_shared::codec;
use rustix::process::Pid;

use super::detached::{Detached, Found, IsFirst};
use super::socket::{self, Outbox, Received};
use super::{
    Exit, KEEPER_ARGUMENT, Observed, Order, REPORT_BYTES_MAX, ReportMessage, SpawnOrder, SubordinateIds,
    Usage, WITHHELD, wait,
};

/// Orders that may wait for the keeper before no worker is ordered any more; it takes each within a millisecond or
/// so. Beyond them there is room for one kill of each worker that was ordered before, and for a question whether
/// the keeper is there: these are never refused.
const ORDERS_WAITING_MAX: usize = 1024;

/// How long the end of the keeper may take before it is killed: it ends everything first, and has a
/// little less patience itself.
const END_PATIENCE: Duration = Duration::from_secs(65);

/// How long whatever a killed keeper left behind may take to die.
const SWEEP_PATIENCE: Duration = Duration::from_secs(30);

/// Maximum number of orphans that are reaped in one go.
const ORPHANS_MAX: usize = 64;

/// What to do about a start that failed at this step, where that can be known.
pub fn advice(step: &str, error: &io::Error) -> &'static str {
    match step {
        _ if error.kind() != io::ErrorKind::PermissionDenied => "",
        "exec" | "working directory" => UNREACHABLE,
        _ if step.starts_with("mount namespace: show") => UNREACHABLE,
        _ if step.starts_with("rlimit") => " (a limit above the supervisor's own takes CAP_SYS_RESOURCE)",
        _ => "",
    }
}

const UNREACHABLE: &str = " (see whether the worker's user can reach it, and every folder above it)";

/// News from the keeper.
///
/// Each [`Keeper::spawn`] is answered by either `Spawned`, `Exited` and `Swept`, in this order, or by
/// `SpawnFailed`.
#[derive(Debug)]
pub enum Report {
    /// The keeper is up; the first report.
    Started {
        /// This kernel does not hand orphans to a process's first thread, so each death takes a look
        /// at every process of the machine.
        scan_always: bool,
    },
    /// The worker's program runs.
    Spawned {
        /// The worker.
        worker: u64,
        /// Its process.
        pid: u32,
        /// Names the process for ever, and is readable when it has ended.
        pidfd: OwnedFd,
        /// How far it is confined, as the kernel says.
        observed: Observed,
    },
    /// A process of the worker's made a system call that its filter forbids, and is killed for it.
    Violation {
        /// The worker.
        worker: u64,
        /// The process, by the number that it has for the worker.
        process: u32,
        /// The call's number; see [`super::call_name`].
        call: u32,
    },
    /// The worker's program never ran.
    SpawnFailed {
        /// The worker.
        worker: u64,
        /// What failed on the way, such as `exec` or `rlimit as`.
        step: String,
        /// Why.
        error: io::Error,
    },
    /// The worker is dead. What it left behind is being ended.
    Exited {
        /// The worker.
        worker: u64,
        /// How it ended.
        exit: Exit,
        /// What it used.
        usage: Usage,
    },
    /// All that a dead worker left behind is gone.
    Swept {
        /// The worker.
        worker: u64,
    },
    /// A template says something.
    Template {
        /// The template.
        worker: u64,
        /// What it says.
        word: TemplateWord,
    },
    /// The keeper is there; see [`Keeper::ping`].
    Pong,
    /// Processes have survived SIGKILL for two seconds. The workers reported next have left them.
    Remains {
        /// How many.
        count: u64,
    },
}

/// What a template says before it forks; see [`Keeper::fork`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub enum TemplateWord {
    /// It can fork.
    Ready,
    /// What it is doing.
    Status(String),
    /// Why it ends.
    Refused(String),
    /// It needs so much more time from now.
    Extend(Duration),
}

/// The keeper as the supervisor has it.
///
/// Dropping it orders the keeper to end; [`Keeper::end`] also waits for that.
#[derive(Debug)]
pub struct Keeper {
    process: Process,
    /// How it was started.
    program: PathBuf,
    socket: OwnedFd,
    outbox: Outbox,
    buffer: Vec<u8>,
    /// Workers that we had no descriptor left for: reported as failed, and killed.
    disowned: HashSet<u64>,
    /// Where ids of workers come from that the next keeper needs as well.
    ids: Option<Arc<SubordinateIds>>,
}

/// The keeper's process.
#[derive(Debug)]
enum Process {
    /// A child of this one.
    Child(Child),
    /// No child, and behind a guard.
    Detached(Detached),
}

/// What it takes to start another keeper like one before.
#[derive(Clone, Debug)]
pub struct KeeperOrigin {
    program: PathBuf,
    is_detached: bool,
    ids: Option<Arc<SubordinateIds>>,
}

impl KeeperOrigin {
    /// Starts it, and hands over what the one before had.
    pub fn start(self) -> io::Result<Keeper> {
        let mut keeper = match self.is_detached {
            true => Keeper::start_detached(&self.program, IsFirst::No)?.0,
            false => Keeper::start(&self.program)?,
        };
        self.ids.map_or(Ok(()), |ids| keeper.give(ids))?;
        Ok(keeper)
    }
}

impl Keeper {
    /// Starts the keeper of an application that goes on with its own work: no process of the application's is its
    /// parent, and what it leaves behind when it is killed is ended by its guard. It ends when this process does, or
    /// when it is dropped. `program` must call [`super::run_as_keeper`] first thing in `main` when its first argument is
    /// [`KEEPER_ARGUMENT`], and be of this version.
    ///
    /// Waits until the keeper is there: some ten milliseconds.
    pub fn start_beside(program: &Path) -> io::Result<(Self, Found)> {
        Self::start_detached(program, IsFirst::Yes)
    }

    fn start_detached(program: &Path, is_first: IsFirst) -> io::Result<(Self, Found)> {
        let (socket, theirs) = socket::pair()?;
        let (process, found) = Detached::start(program, is_first, &socket, theirs)?;
        Ok((Self::of(Process::Detached(process), program, socket), found))
    }

    /// Starts the keeper: `program`, which must call [`super::run_as_keeper`] when its first argument
    /// is [`KEEPER_ARGUMENT`]; normally `/proc/self/exe`. [`Report::Started`] follows.
    pub fn start(program: &Path) -> io::Result<Self> {
        let (socket, theirs) = socket::pair()?;
        let mut command = Command::new(program);
        command.arg0("bulkhead-keeper").arg(KEEPER_ARGUMENT).stdin(theirs).stdout(Stdio::null());
        for name in WITHHELD {
            command.env_remove(name);
        }
        Ok(Self::of(Process::Child(command.spawn()?), program, socket))
    }

    fn of(process: Process, program: &Path, socket: OwnedFd) -> Self {
        Self {
            process,
            program: program.to_owned(),
            socket,
            outbox: Outbox::default(),
            buffer: vec![0; REPORT_BYTES_MAX],
            disowned: HashSet::new(),
            ids: None,
        }
    }

    /// Hands over the user namespace that workers with [`super::Terms::subordinate`] enter.
    pub fn give(&mut self, ids: Arc<SubordinateIds>) -> io::Result<()> {
        self.order(Order::Namespace.encode()?, vec![ids.namespace()?])?;
        self.ids = Some(ids);
        Ok(())
    }

    /// How the keeper that follows this one is started.
    pub fn origin(&self) -> KeeperOrigin {
        let is_detached = matches!(self.process, Process::Detached(_));
        KeeperOrigin { program: self.program.clone(), is_detached, ids: self.ids.clone() }
    }

    /// The keeper's process.
    pub fn pid(&self) -> u32 {
        match &self.process {
            Process::Child(process) => process.id(),
            Process::Detached(process) => process.keeper_pid(),
        }
    }

    /// Orders a worker. `link` becomes its descriptor 3; standard input is empty.
    ///
    /// Errors, with which nothing has been ordered: the order is too long or contains a NUL; too many
    /// orders wait ([`io::ErrorKind::WouldBlock`]); the keeper is gone ([`io::ErrorKind::BrokenPipe`]).
    pub fn spawn(
        &mut self,
        order: &SpawnOrder<'_>,
        link: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        self.order_start(order.encode()?, [link, stdout, stderr])
    }

    /// Orders a template: [`SpawnOrder::is_template`] is set.
    pub fn spawn_template(
        &mut self,
        order: &SpawnOrder<'_>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        debug_assert!(order.is_template);
        self.order(order.encode()?, vec![stdout, stderr])
    }

    /// Has a template fork a worker, once it has said that it is ready: [`Report::Spawned`] or
    /// [`Report::SpawnFailed`] follows. Errors are those of [`Keeper::spawn`].
    pub fn fork(
        &mut self,
        (worker, template): (u64, u64),
        link: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    ) -> io::Result<()> {
        self.order_start(Order::Fork { worker, template }.encode()?, [link, stdout, stderr])
    }

    fn order_start(&mut self, message: Vec<u8>, descriptors: [OwnedFd; 3]) -> io::Result<()> {
        if self.outbox.len() >= ORDERS_WAITING_MAX {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "too many orders wait for the keeper"));
        }
        self.order(message, descriptors.into())
    }

    /// Orders a worker to be killed at once, with all it leaves behind; once is enough. [`Report::Exited`]
    /// follows, if it does not come anyway. An error means that the keeper is gone.
    pub fn kill(&mut self, worker: u64) -> io::Result<()> {
        self.order(Order::Kill { worker }.encode()?, Vec::new())
    }

    /// Asks the keeper whether it is there. [`Report::Pong`] follows within milliseconds, or something is
    /// wrong with it.
    pub fn ping(&mut self) -> io::Result<()> {
        self.order(Order::Ping.encode()?, Vec::new())
    }

    /// Waits for children that have ended and are not this keeper: the orphans that process 1 of a container, or a
    /// child subreaper, inherits. Returns true if there may be more. Reaps nothing in an application, whose children
    /// are its own.
    pub fn reap_orphans(&self) -> bool {
        let Process::Child(keeper) = &self.process else { return false };
        for _ in 0..ORPHANS_MAX {
            match bulkhead_linux::wait::peek() {
                Some(pid) if pid != keeper.id() => drop(wait::take(pid)),
                _ => return false,
            }
        }
        true
    }

    /// Kills a keeper that does not answer: [`Keeper::receive`] says so next.
    pub fn kill_keeper(&mut self) -> io::Result<()> {
        self.process.kill()
    }

    fn order(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        self.outbox.push(message, descriptors);
        self.flush()
    }

    /// Sends waiting orders as far as the socket takes them; to be called when it is writable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(&self.socket).map(drop)
    }

    /// Whether orders wait for the socket to be writable.
    pub fn has_waiting(&self) -> bool {
        self.outbox.len() > 0
    }

    /// The next report; `None` if there is none at present.
    ///
    /// Any error means that this keeper is lost, [`io::ErrorKind::UnexpectedEof`] that it has ended:
    /// its workers die with it. See [`sweep_after_keeper`].
    pub fn receive(&mut self) -> io::Result<Option<Report>> {
        loop {
            match socket::receive(&self.socket, &mut self.buffer)? {
                Received::Nothing => return Ok(None),
                Received::Closed => {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper has ended"));
                }
                Received::Message(length, descriptors) => {
                    if let Some(report) = self.understand(length, descriptors)? {
                        return Ok(Some(report));
                    }
                }
            }
        }
    }

    fn understand(&mut self, length: usize, descriptors: Vec<OwnedFd>) -> io::Result<Option<Report>> {
        let (message, _) = codec::decode::<ReportMessage<'_>>(&self.buffer[..length], &[])
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(match message {
            ReportMessage::Started { scan_always } => Some(Report::Started { scan_always }),
            ReportMessage::Spawned { worker, pid, observed } => match descriptors.into_iter().next() {
                Some(pidfd) => Some(Report::Spawned { worker, pid, pidfd, observed }),
                None => Some(self.disown(worker)?),
            },
            ReportMessage::Violation { worker, process, call } => {
                Some(Report::Violation { worker, process, call })
            }
            ReportMessage::SpawnFailed { worker, step, errno } => {
                let (step, error) = (step.to_owned(), io::Error::from_raw_os_error(errno));
                Some(Report::SpawnFailed { worker, step, error })
            }
            ReportMessage::Exited { worker, .. } if self.disowned.contains(&worker) => None,
            ReportMessage::Exited { worker, exit, usage } => Some(Report::Exited { worker, exit, usage }),
            ReportMessage::Swept { worker } if self.disowned.remove(&worker) => None,
            ReportMessage::Swept { worker } => Some(Report::Swept { worker }),
            ReportMessage::Template { worker, word } => Some(Report::Template { worker, word }),
            ReportMessage::Pong => Some(Report::Pong),
            ReportMessage::Remains { count } => Some(Report::Remains { count }),
        })
    }

    /// This process has as many descriptors as it may: a worker that cannot be watched must not run.
    fn disown(&mut self, worker: u64) -> io::Result<Report> {
        self.disowned.insert(worker);
        self.kill(worker)?;
        let error = rustix::io::Errno::MFILE.into();
        Ok(Report::SpawnFailed { worker, step: "pidfd".to_owned(), error })
    }

    /// Has the keeper end, with all workers and whatever descends from them, and waits for it: some
    /// milliseconds as a rule, up to a minute if processes cannot be killed.
    pub fn end(self) -> io::Result<()> {
        let Self { process, socket, .. } = self;
        drop(socket);
        let mut process = match process {
            Process::Child(process) => process,
            Process::Detached(process) => {
                return if process.wait(END_PATIENCE)? { Ok(()) } else { process.sweep(SWEEP_PATIENCE) };
            }
        };
        if wait::ends_within(&process, END_PATIENCE)? {
            let status = process.wait()?;
            return if status.success() {
                Ok(())
            } else {
                Err(io::Error::other(format!("the keeper ended with {status}")))
            };
        }
        process.kill()?;
        process.wait()?;
        wait::end_all(SWEEP_PATIENCE)?;
        Err(io::Error::new(io::ErrorKind::TimedOut, "the keeper could not end its workers"))
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for Keeper {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Makes this process the one that inherits the descendants of a killed keeper, for
/// [`sweep_after_keeper`]. For the supervisor's own program, when it starts.
pub fn become_subreaper() -> io::Result<()> {
    // The kernel takes any number but zero for yes.
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

/// Kills a lost keeper and **whatever else descends from this process**, until nothing is left. Then
/// another keeper may be started, and not before: it would be killed as well.
///
/// Only for a program that called [`become_subreaper`] and has no children of its own: they would be
/// killed and waited for. Blocks, for some milliseconds as a rule.
///
/// With [`Keeper::start_beside`] it is the keeper's guard that does so, and it spares what is not the keeper's.
pub fn sweep_after_keeper(old: Keeper) -> io::Result<()> {
    match old.process {
        Process::Child(mut process) => {
            process.kill()?;
            process.wait()?;
            wait::end_all(SWEEP_PATIENCE)
        }
        Process::Detached(process) => process.sweep(SWEEP_PATIENCE),
    }
}

impl Process {
    fn kill(&mut self) -> io::Result<()> {
        match self {
            Self::Child(process) => process.kill(),
            Self::Detached(process) => process.kill_keeper(),
        }
    }
}

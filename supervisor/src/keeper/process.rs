//! The keeper process itself: a loop over orders and deaths, and the sweeping up after the dead.
//!
//! It owns the kill and the wait of every worker. It never blocks on the supervisor, on a program's
//! file system or on a process that will not die; and it restarts nothing.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bulkhead_shared::codec;
use bulkhead_shared::process_tree::kill_descendants;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use super::confine::cgroup::Leaf;
use super::confine::seccomp::{self, News};
use super::confinement::{Identity, Observed, Seccomp, Temporary, Terms};
use super::groups::Groups;
use super::socket::{self, Outbox, Received};
use super::spawn::{
    self, Barriers, Ends, Filters, Forker, Job, LINK_FD, OPEN_FILES, Prepared, Progress, Refusal, Standing,
    put_at,
};
use super::temporary::Folders;
use super::wait::{self, Waited};
use super::{
    Exit, ORDER_BYTES_MAX, Order, ReportMessage, Rlimit, STEP_BYTES_MAX, SpawnOrder, Usage, maps, observe,
};

/// No order is taken while this many reports wait for the supervisor; what then still can come is the
/// two last reports of each worker.
const REPORTS_WAITING_MAX: usize = 1024;

/// Something that survives SIGKILL this long is left to the kernel, and its worker reported.
const SWEEP_PATIENCE: Duration = Duration::from_secs(2);

/// The pauses between two looks at all processes while something is being swept up.
const SCAN_PAUSE_MIN: Duration = Duration::from_millis(2);
const SCAN_PAUSE_MAX: Duration = Duration::from_millis(64);

/// After a death all processes are looked at once more, so late and at most so often: a worker that
/// forks with CLONE_PARENT makes siblings of itself instead of descendants.
const AUDIT_PAUSE: Duration = Duration::from_secs(1);

/// How long the keeper tries to kill everything before it gives up and ends.
const END_PATIENCE: Duration = Duration::from_secs(60);

/// The nice value of the keeper, if it may have that.
const PRIORITY: i32 = -20;

/// What one turn of the loop takes from the kernel; the rest comes with the next.
const EVENTS_MAX: usize = 64;

/// The token of a worker's listener is its process number, and this.
const LISTENER: usize = 1 << 32;

// A worker's progress has its process number as token, and no worker is number 0 or 1.
const ORDERS: Token = Token(0);
const DEATHS: Token = Token(1);

/// Runs the keeper; it ends with everything that descends from it.
///
/// A program that starts a [`super::Keeper`] of its own executable calls this first thing in `main`,
/// before there is a thread, if its first argument is [`super::KEEPER_ARGUMENT`].
pub fn run_as_keeper() -> ! {
    let result = prepare().and_then(Process::start).and_then(Process::run);
    if let Err(error) = &result {
        // Standard error is the supervisor's own; if that is closed, there is nobody left to tell.
        let _ = writeln!(io::stderr(), "bulkhead-keeper: failed to keep the workers: {error}");
    }
    std::process::exit(i32::from(result.is_err()))
}

/// Makes the process what it has to be before its second thread starts. Returns the order socket, and
/// how this process stands before it takes precedence.
fn prepare() -> io::Result<(OwnedFd, Standing)> {
    rustix::thread::set_name(c"bulkhead-keeper")?;
    set_signals()?;
    close_inherited()?;
    // The socket came as standard input. Its number has to be this one: see `LINK_FD`.
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), LINK_FD)?;
    assert_eq!(socket.as_raw_fd(), LINK_FD, "everything above standard error was just closed");
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    put_at(&null, libc::STDIN_FILENO)?;
    put_at(&null, libc::STDOUT_FILENO)?;
    rustix::process::chdir("/")?;
    // Fails only for the leader of a process group, which a spawned process becomes by request only.
    let _ = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(Pid::INIT))?;
    let score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    let standing = Standing {
        nice: rustix::process::getpriority_process(None)?,
        is_spared: score.trim().parse::<i32>().is_ok_and(|score| score < 0),
        open_files: take_all_descriptors(),
    };
    take_precedence();
    Ok((socket, standing))
}

/// Raises the limit of open files as far as it goes. What it was before.
fn take_all_descriptors() -> (u64, u64) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let own = getrlimit(Resource::Nofile);
    let all = Rlimit { current: own.maximum, maximum: own.maximum };
    let _ = setrlimit(Resource::Nofile, all); // What there is has to do then.
    (own.current.unwrap_or(u64::MAX), own.maximum.unwrap_or(u64::MAX))
}

/// Whoever has to end a fork bomb must not wait for its turn behind a thousand processes. Workers start
/// with the priority of before. Where privileges are missing, the keeper takes its turn like others.
fn take_precedence() {
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    // With autogroups (a kernel setting) each session has a share, and this is what weighs ours.
    let _ = std::fs::write("/proc/self/autogroup", PRIORITY.to_string());
}

/// Nothing but end of file ends the keeper: signals meant for the supervisor's group, or sent by
/// somebody who saw the process in a list, must not take the workers away. SIGCHLD is read from a
/// descriptor, and must not be ignored by inheritance, which would let children vanish unseen.
#[expect(unsafe_code, reason = "setting what a signal does")]
fn set_signals() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    const IGNORED: [Signal; 11] = [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGPIPE,
        Signal::SIGALRM,
        Signal::SIGTERM,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
    ];
    for number in IGNORED {
        // SAFETY: no function of ours is installed.
        unsafe { signal(number, SigHandler::SigIgn) }?;
    }
    // SAFETY: as above.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }?;
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGCHLD);
    blocked.thread_set_mask()?;
    Ok(())
}

/// Descriptors that the supervisor's program did not mark to be closed would live as long as we do,
/// and a connection that the supervisor closes has to be closed.
#[expect(unsafe_code, reason = "closing descriptors by number")]
fn close_inherited() -> io::Result<()> {
    let last = libc::c_uint::MAX;
    // SAFETY: this process has just started and opened nothing of its own yet.
    match unsafe { libc::syscall(libc::SYS_close_range, LINK_FD as libc::c_uint, last, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the kernel has killed something in a worker's group for want of memory.
fn is_out_of_memory(leaf: &Leaf) -> bool {
    leaf.oom_kills().is_ok_and(|kills| kills > 0)
}

fn not_an_order() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "this is not an order of this version")
}

/// A child that has not been waited for.
struct Child {
    worker: u64,
    pidfd: OwnedFd,
    stage: Stage,
    terms: Terms,
    rlimits: Vec<Rlimit>,
    /// Whether it was let go on to its program.
    is_confined: bool,
    /// The worker's process, once it is known: in a pid namespace it is a child of this one.
    process: u32,
    /// Where the kernel tells of forbidden system calls.
    listener: Option<OwnedFd>,
    /// The first such call of the worker's process itself.
    violation: Option<u32>,
    /// Its folder, which goes when nothing is left of it.
    folder: Option<PathBuf>,
    leaf: Option<Leaf>,
    observed: Observed,
    /// Where the first process of a pid namespace tells how the worker ended.
    status: Option<OwnedFd>,
}

impl Child {
    /// Reads its status back once its program runs: to execute can give, and must not have given. What is not
    /// as ordered, by name; of a process that has ended already there is nothing to say.
    fn look_again(&mut self) -> Option<&'static str> {
        let mut observed = self.observed;
        observe::status(self.process, &mut observed).ok()?;
        self.observed = observed;
        if self.terms == Terms::default() {
            return None;
        }
        // It may have lowered its limits by now.
        let limit = || observe::limit_exceeded(self.process, &self.rlimits).ok().flatten();
        observed.mismatch(&self.terms).or_else(limit)
    }
}

enum Stage {
    /// On its way to `execve`.
    Starting(Ends),
    /// Reported as spawned.
    Running,
    /// Reported as failed; it only has to be waited for.
    Failed,
}

/// A worker that is dead and waited for, while what it left behind is swept up.
struct Leaving {
    worker: u64,
    exit: Exit,
    usage: Usage,
    folder: Option<PathBuf>,
    leaf: Option<Leaf>,
    since: Instant,
}

/// The looks at all processes: what has been found, and when the next is due.
struct Scans {
    /// The kernel does not tell orphans from workers: only a scan shows whether something is left.
    always: bool,
    next: Option<Instant>,
    pause: Duration,
    /// What the last scan killed.
    found: usize,
    /// What was given up on: as many are expected to be found again.
    stuck: usize,
    audit: Option<Instant>,
}

struct Process {
    poll: Poll,
    socket: OwnedFd,
    deaths: SignalFd,
    forker: Forker,
    children: HashMap<u32, Child>,
    own: observe::Own,
    filters: Filters,
    folders: Folders,
    groups: Groups,
    leaving: Vec<Leaving>,
    scans: Scans,
    outbox: Outbox,
    /// Whether the socket had more orders when it was last looked at.
    has_orders: bool,
    /// Whether the outbox waits for the socket.
    is_blocked: bool,
    order: Vec<u8>,
}

impl Process {
    fn start((socket, standing): (OwnedFd, Standing)) -> io::Result<Self> {
        let forker = Forker::start(standing)?;
        let always = !wait::tells_orphans_apart(&forker)?;
        let mut blocked = SigSet::empty();
        blocked.add(nix::sys::signal::SIGCHLD);
        let deaths = SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let poll = Poll::new()?;
        poll.registry().register(&mut SourceFd(&deaths.as_raw_fd()), DEATHS, Interest::READABLE)?;
        poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), ORDERS, Interest::READABLE)?;
        let pause = SCAN_PAUSE_MIN;
        let mut process = Self {
            poll,
            socket,
            deaths,
            forker,
            children: HashMap::new(),
            own: observe::Own::read(),
            filters: Filters::default(),
            folders: Folders::default(),
            groups: Groups::default(),
            leaving: Vec::new(),
            scans: Scans { always, next: None, pause, found: 0, stuck: 0, audit: None },
            outbox: Outbox::default(),
            has_orders: true,
            is_blocked: false,
            order: vec![0; ORDER_BYTES_MAX],
        };
        process.report(&ReportMessage::Started { scan_always: always }, None);
        Ok(process)
    }

    /// Serves until the supervisor is gone or talks nonsense; then ends everything.
    fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS_MAX);
        let served = loop {
            match self.turn(&mut events) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        for &pid in self.children.keys() {
            wait::kill_group(pid);
        }
        wait::end_all(END_PATIENCE)?;
        match served {
            // The supervisor went away while we wrote to it: an end like another.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            served => served,
        }
    }

    /// One turn of the loop; `false` is the order to end.
    fn turn(&mut self, events: &mut Events) -> io::Result<bool> {
        self.flush()?;
        match self.poll.poll(events, self.timeout(Instant::now())) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            result => result?,
        }
        for event in events.iter() {
            match event.token() {
                // Or closed, or writable: then the look is for nothing.
                ORDERS => self.has_orders = true,
                DEATHS => while self.deaths.read_signal()?.is_some() {},
                Token(token) if token & LISTENER != 0 => self.look_at_violation((token & !LISTENER) as u32),
                Token(pid) => self.look_at_start(pid as u32),
            }
        }
        // One order a turn, so that deaths do not wait for a hundred spawns.
        if self.can_take_order() && !self.take_order()? {
            return Ok(false);
        }
        let now = Instant::now();
        self.reap(now);
        self.sweep(now);
        Ok(true)
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.can_take_order() {
            return Some(Duration::ZERO);
        }
        let overdue = self.leaving.iter().map(|leaving| leaving.since + SWEEP_PATIENCE).min();
        let due = [self.scans.next, self.scans.audit, overdue].into_iter().flatten().min();
        due.map(|due| due.saturating_duration_since(now))
    }

    fn can_take_order(&self) -> bool {
        self.has_orders && self.outbox.len() < REPORTS_WAITING_MAX
    }

    fn take_order(&mut self) -> io::Result<bool> {
        let mut buffer = std::mem::take(&mut self.order);
        let received = socket::receive(&self.socket, &mut buffer);
        let goes_on = match received {
            Ok(Received::Closed) => Ok(false),
            Ok(Received::Nothing) => {
                self.has_orders = false;
                Ok(true)
            }
            Ok(Received::Message(length, descriptors)) => self.obey(&buffer[..length], descriptors),
            Err(error) => Err(error),
        };
        self.order = buffer;
        goes_on
    }

    fn obey(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<bool> {
        match Order::decode(message) {
            Some((Order::Spawn { worker, counts, rlimits, terms }, texts)) => {
                let order = SpawnOrder::decode(worker, counts, rlimits, terms, texts);
                let order = order.ok_or_else(not_an_order)?;
                if let Err(refusal) = self.spawn(&order, descriptors) {
                    self.report_failure(worker, &refusal);
                }
                Ok(true)
            }
            Some((Order::Kill { worker }, _)) => {
                // Whoever is in the table has not been waited for.
                let child = self.children.iter().find(|(_, child)| child.worker == worker);
                if let Some((&pid, _)) = child {
                    self.kill(pid);
                }
                Ok(true)
            }
            Some((Order::Ping, _)) => {
                self.report(&ReportMessage::Pong, None);
                Ok(true)
            }
            None => Err(not_an_order()),
        }
    }

    fn spawn(&mut self, order: &SpawnOrder<'_>, descriptors: Vec<OwnedFd>) -> Result<(), Refusal> {
        let terms = order.confinement.terms;
        let folder = match terms.temporary {
            Temporary::Folder => Some(self.make_folder(order.worker, terms.identity)?),
            Temporary::None | Temporary::FileSystem(_) => None,
        };
        let leaf = terms.cgroup.map(|limits| self.groups.make(order.worker, &limits)).transpose();
        let started = leaf.and_then(|leaf| {
            let started = self.start_in(order, descriptors, folder.as_deref(), leaf.as_ref());
            match started {
                Ok(started) => Ok((started, leaf)),
                Err(refusal) => {
                    leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
                    Err(refusal)
                }
            }
        });
        match started {
            Ok(((pid, pidfd, mut ends, observed), leaf)) => {
                let status = ends.status.take();
                let child = Child {
                    worker: order.worker,
                    pidfd,
                    stage: Stage::Starting(ends),
                    terms,
                    rlimits: order.rlimits.clone(),
                    // Who is not confined asks nobody.
                    is_confined: terms == Terms::default(),
                    process: pid,
                    listener: None,
                    violation: None,
                    folder,
                    leaf,
                    observed,
                    status,
                };
                self.children.insert(pid, child);
                Ok(())
            }
            Err(refusal) => {
                folder.into_iter().for_each(|folder| self.folders.remove(folder));
                Err(refusal)
            }
        }
    }

    fn make_folder(&mut self, worker: u64, identity: Option<Identity>) -> Result<PathBuf, Refusal> {
        self.folders.make(worker, identity).map_err(|error| {
            Refusal::of(&format!("temporary folder in {}", std::env::temp_dir().display()), &error)
        })
    }

    fn start_in(
        &mut self,
        order: &SpawnOrder<'_>,
        descriptors: Vec<OwnedFd>,
        folder: Option<&Path>,
        leaf: Option<&Leaf>,
    ) -> Result<(u32, OwnedFd, Ends, Observed), Refusal> {
        let barriers = Barriers::prepare(&order.confinement, order.directory, folder, &mut self.filters)?;
        let observed = Observed { landlock: barriers.landlock(), ..Observed::default() };
        let program = spawn::Program::new(order, folder)?;
        let cgroup = leaf.map(|leaf| leaf.fd().try_clone_to_owned()).transpose();
        let cgroup = cgroup.map_err(|error| Refusal::of("cgroup", &error))?;
        let (prepared, ends) = Prepared::new(program, descriptors, barriers, cgroup)?;
        let step = spawn::fork_step(order.confinement.terms.namespaces);
        let in_fork = |error: io::Error| Refusal::of(step, &error);
        let pid = self.forker.fork(Job::Worker(prepared)).map_err(in_fork)?;
        match self.watch(pid, &ends.progress) {
            Ok(pidfd) => Ok((pid, pidfd, ends, observed)),
            Err(error) => {
                wait::kill_child(pid);
                Err(in_fork(error))
            }
        }
    }

    fn watch(&self, pid: u32, progress: &OwnedFd) -> io::Result<OwnedFd> {
        let number = Pid::from_raw(pid as i32).ok_or(rustix::io::Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        let mut source = SourceFd(&progress.as_raw_fd());
        self.poll.registry().register(&mut source, Token(pid as usize), Interest::READABLE)?;
        Ok(pidfd)
    }

    /// Reads what a starting child says, does what it waits for, and reports how it ends.
    fn look_at_start(&mut self, pid: u32) {
        while let Some(Child { stage: Stage::Starting(ends), terms, .. }) = self.children.get(&pid) {
            let refusal = match spawn::read_progress(&ends.progress) {
                Progress::Underway => return,
                Progress::WantsMap => match maps::write(pid, terms.identity) {
                    Ok(()) => {
                        spawn::go_on(&ends.progress);
                        continue;
                    }
                    Err(error) => Some(Refusal::of("user namespace", &error)),
                },
                Progress::Ready { pid: process, listener } => match self.confined(pid, process, listener) {
                    Ok(()) => continue,
                    Err(refusal) => Some(refusal),
                },
                Progress::Failed(failure) => Some(ends.refusal(&failure)),
                Progress::Executed => None,
            };
            self.started(pid, refusal);
        }
    }

    /// A child says that it is confined. If it is, it may execute its program.
    fn confined(&mut self, pid: u32, process: u32, listener: Option<OwnedFd>) -> Result<(), Refusal> {
        let Some(child) = self.children.get_mut(&pid) else { return Ok(()) };
        let failed = |error: io::Error| Refusal::of("read-back from /proc", &error);
        child.process = process;
        child.observed.namespaces = self.own.compare(process).map_err(failed)?;
        // Beside those it keeps there are this one's other end, and the listener.
        let closing = 1 + u32::from(listener.is_some());
        let open = observe::descriptors(process).map_err(failed)?;
        child.observed.descriptors = open.saturating_sub(closing);
        child.observed.cgroup = child.leaf.as_ref().is_some_and(|leaf| observe::is_in(process, leaf.path()));
        observe::status(process, &mut child.observed).map_err(failed)?;
        let limit = observe::limit_mismatch(process, &child.rlimits, OPEN_FILES).map_err(failed)?;
        // The supervisor may be under a filter itself, which counts for nothing here.
        let filters = observe::filters(process);
        let is_bare = child.terms.seccomp != Seccomp::Off && filters != 0 && filters <= self.own.filters;
        let filter = is_bare.then_some("Seccomp_filters");
        if let Some(what) = child.observed.mismatch(&child.terms).or(limit).or(filter) {
            let step = format!("read-back from /proc: {what} is not as ordered");
            return Err(Refusal::new(&step, rustix::io::Errno::PERM));
        }
        if let Some(listener) = listener {
            let token = Token(pid as usize | LISTENER);
            let mut source = SourceFd(&listener.as_raw_fd());
            self.poll.registry().register(&mut source, token, Interest::READABLE).map_err(failed)?;
            child.listener = Some(listener);
        }
        child.is_confined = true;
        if let Stage::Starting(ends) = &child.stage {
            spawn::go_on(&ends.progress);
        }
        Ok(())
    }

    /// A child has come to its program, or has failed.
    fn started(&mut self, pid: u32, refusal: Option<Refusal>) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let stage = if refusal.is_some() { Stage::Failed } else { Stage::Running };
        if let Stage::Starting(ends) = std::mem::replace(&mut child.stage, stage) {
            // Closing alone would not do: a child that is being forked may have a copy, which keeps it
            // registered. There is nothing to be done if it fails.
            let _ = self.poll.registry().deregister(&mut SourceFd(&ends.progress.as_raw_fd()));
        }
        let worker = child.worker;
        if let Some(refusal) = refusal {
            self.kill(pid);
            return self.report_failure(worker, &refusal);
        }
        if !child.is_confined {
            // It was killed on its way, for it never got the word to go on. Its end is reported next.
            self.kill(pid);
        } else if let Some(what) = child.look_again() {
            child.stage = Stage::Failed;
            self.kill(pid);
            let step = format!("read-back from /proc: {what} is not as ordered once the program runs");
            return self.report_failure(worker, &Refusal::new(&step, rustix::io::Errno::PERM));
        }
        let Some(child) = self.children.get_mut(&pid) else { return };
        let (process, observed) = (child.process, child.observed);
        // The kernel takes a descriptor of its own along with the message, as soon as that is sent.
        match child.pidfd.try_clone() {
            Ok(pidfd) => self.report(&ReportMessage::Spawned { worker, pid: process, observed }, Some(pidfd)),
            Err(error) => {
                child.stage = Stage::Failed;
                self.kill(pid);
                self.report_failure(worker, &Refusal::of("descriptors", &error));
            }
        }
    }

    /// The kernel tells of forbidden calls.
    fn look_at_violation(&mut self, pid: u32) {
        let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid) else { return };
        let received = match seccomp::news(listener) {
            Ok(News::Call) => seccomp::receive(listener),
            Ok(News::None) => return,
            Ok(News::Over) => return self.drop_listener(pid),
            Err(errno) => Err(errno.into()),
        };
        let Ok(received) = received else { return self.drop_listener(pid) };
        // Others may wait in their calls, and of those that came meanwhile there is no event.
        let (token, mut source) = (Token(pid as usize | LISTENER), SourceFd(&listener.as_raw_fd()));
        let _ = self.poll.registry().reregister(&mut source, token, Interest::READABLE);
        if let Some(notification) = received {
            self.end_violator(pid, &notification);
        }
    }

    /// The process that made a forbidden call is killed, and the news goes out before that of its death can.
    fn end_violator(&mut self, pid: u32, notification: &seccomp::Notification) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let (worker, worker_process, call) = (child.worker, child.process, notification.number);
        let Some(listener) = &child.listener else { return };
        let found = observe::process_of(notification.thread).and_then(|(process, inner)| {
            let number = Pid::from_raw(process as i32).ok_or(rustix::io::Errno::SRCH)?;
            Ok((process, inner, rustix::process::pidfd_open(number, PidfdFlags::empty())?))
        });
        // Still waiting: then numbers and descriptor are those of the thread that waits, and of its process.
        if seccomp::is_waiting(listener, notification.id).is_err() {
            return;
        }
        // Who cannot be found is taken for the worker itself: then all of it goes.
        let (process, inner, pidfd) = match found {
            Ok((process, inner, pidfd)) => (process, inner, Some(pidfd)),
            Err(_) => (worker_process, worker_process, None),
        };
        let other = pidfd.filter(|_| process != worker_process);
        if other.is_none() {
            child.violation.get_or_insert(call);
        }
        self.report_violation(worker, inner, call);
        let Some(pidfd) = other else { return wait::kill_group(pid) };
        if rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL).is_err()
            && let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid)
        {
            let _ = seccomp::refuse(listener, notification.id, rustix::io::Errno::PERM);
        }
    }

    /// A worker can have as many processes made and killed as it likes: where the supervisor does not keep up,
    /// their end has to do as news.
    fn report_violation(&mut self, worker: u64, process: u32, call: u32) {
        if self.outbox.len() < REPORTS_WAITING_MAX {
            self.report(&ReportMessage::Violation { worker, process, call }, None);
        }
        let _ = self.flush();
    }

    fn drop_listener(&mut self, pid: u32) {
        let listener = self.children.get_mut(&pid).and_then(|child| child.listener.take());
        if let Some(listener) = listener {
            let _ = self.poll.registry().deregister(&mut SourceFd(&listener.as_raw_fd()));
        }
    }

    fn report_failure(&mut self, worker: u64, refusal: &Refusal) {
        let step = bulkhead_shared::limits::cut(&refusal.step, STEP_BYTES_MAX);
        let errno = refusal.errno.raw_os_error();
        self.report(&ReportMessage::SpawnFailed { worker, step, errno }, None);
    }

    fn report(&mut self, message: &ReportMessage<'_>, pidfd: Option<OwnedFd>) {
        let mut bytes = Vec::new();
        // It fails only beyond 64 KiB.
        let encoded = codec::encode(message, &[], &mut bytes);
        debug_assert!(encoded.is_ok() && bytes.len() <= super::REPORT_BYTES_MAX);
        self.outbox.push(bytes, pidfd.into_iter().collect());
    }

    /// Sends what waits, and has the loop told when there is room, if there is none now.
    fn flush(&mut self) -> io::Result<()> {
        if self.outbox.len() == 0 {
            return Ok(());
        }
        let is_blocked = !self.outbox.flush(&self.socket)?;
        if is_blocked != self.is_blocked {
            self.is_blocked = is_blocked;
            // Asked for only then: otherwise each report that the supervisor reads would wake us up.
            let interest =
                if is_blocked { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
            self.poll.registry().reregister(&mut SourceFd(&self.socket.as_raw_fd()), ORDERS, interest)?;
        }
        Ok(())
    }

    /// Waits for whatever has ended, worker or orphan.
    fn reap(&mut self, now: Instant) {
        while let Some(pid) = wait::peek() {
            if self.children.contains_key(&pid) {
                // What it said at the start, it said before it ended.
                self.look_at_start(pid);
                wait::kill_group(pid);
            }
            match wait::take(pid) {
                Waited::NoChild | Waited::Nothing => return,
                Waited::Stopped { pid } => wait::kill_child(pid),
                Waited::Ended { pid, exit, usage } => {
                    if let Some(child) = self.children.remove(&pid) {
                        self.left(child, (exit, usage), now);
                    }
                }
            }
        }
    }

    /// A child has been waited for.
    fn left(&mut self, child: Child, (exit, usage): (Exit, Usage), now: Instant) {
        if let Some(listener) = &child.listener {
            let _ = self.poll.registry().deregister(&mut SourceFd(&listener.as_raw_fd()));
        }
        let Child { worker, stage, violation, status, folder, leaf, .. } = child;
        // What it leaves behind goes with it.
        leaf.iter().for_each(|leaf| _ = leaf.kill());
        if !matches!(stage, Stage::Running) {
            return self.clear(folder, leaf);
        }
        // The first process of a pid namespace has told of the worker; if not, it was killed first.
        let (exit, usage) = status.as_ref().and_then(spawn::read_status).unwrap_or((exit, usage));
        let exit = match (exit, violation) {
            (_, Some(call)) => Exit::Violation { call },
            (Exit::Signal { number: libc::SIGKILL, .. }, None)
                if leaf.as_ref().is_some_and(is_out_of_memory) =>
            {
                Exit::Oom
            }
            (exit, None) => exit,
        };
        self.leaving.push(Leaving { worker, exit, usage, folder, leaf, since: now });
        self.scans.audit.get_or_insert(now + AUDIT_PAUSE);
    }

    /// Kills what the dead left behind, and reports those of whom nothing is left.
    fn sweep(&mut self, now: Instant) {
        if self.leaving.is_empty() {
            self.audit(now);
        } else if self.is_swept(now) {
            for gone in std::mem::take(&mut self.leaving) {
                self.report_exit(gone);
            }
        } else {
            self.give_up_on_overdue(now);
        }
        if self.leaving.is_empty() {
            self.scans.next = None;
            self.scans.pause = SCAN_PAUSE_MIN;
        }
    }

    /// Whether nothing is left behind. If something is, kills it; its death wakes us.
    fn is_swept(&mut self, now: Instant) -> bool {
        if !self.scans.always && !wait::has_own_children() {
            self.scans.stuck = 0;
            return true;
        }
        if self.scans.next.is_some_and(|next| now < next) {
            return false;
        }
        self.scans.next = Some(now + self.scans.pause);
        self.scans.pause = (self.scans.pause * 2).min(SCAN_PAUSE_MAX);
        self.scan().is_ok_and(|found| found <= self.scans.stuck)
    }

    fn scan(&mut self) -> io::Result<usize> {
        let living: HashSet<u32> = self.children.keys().copied().collect();
        self.scans.found = kill_descendants(&living)?;
        Ok(self.scans.found)
    }

    fn give_up_on_overdue(&mut self, now: Instant) {
        let (overdue, waiting) =
            std::mem::take(&mut self.leaving).into_iter().partition(|l| now >= l.since + SWEEP_PATIENCE);
        self.leaving = waiting;
        let overdue: Vec<Leaving> = overdue;
        if overdue.is_empty() {
            return;
        }
        self.scans.stuck = self.scans.found.max(1);
        self.report(&ReportMessage::Remains { count: self.scans.stuck as u64 }, None);
        for gone in overdue {
            self.report_exit(gone);
        }
    }

    fn report_exit(&mut self, gone: Leaving) {
        let Leaving { worker, exit, usage, folder, leaf, .. } = gone;
        self.clear(folder, leaf);
        self.report(&ReportMessage::Exited { worker, exit, usage }, None);
    }

    /// Removes what a worker had, when nothing is left of it.
    fn clear(&mut self, folder: Option<PathBuf>, leaf: Option<Leaf>) {
        folder.into_iter().for_each(|folder| self.folders.remove(folder));
        leaf.into_iter().for_each(|leaf| self.groups.remove(leaf));
    }

    /// Kills a worker and all that it has started, as far as one call reaches.
    fn kill(&self, pid: u32) {
        if let Some(Child { leaf: Some(leaf), .. }) = self.children.get(&pid) {
            // What it misses the other ways reach.
            let _ = leaf.kill();
        }
        wait::kill_group(pid);
    }

    fn audit(&mut self, now: Instant) {
        if self.scans.audit.is_some_and(|due| due <= now) {
            // Until a look finds nothing: who kills, finds the victims' children the next time.
            let found_something = !matches!(self.scan(), Ok(0)) | !self.groups.retry();
            self.scans.audit = found_something.then(|| now + AUDIT_PAUSE);
        }
    }
}

//! The keeper process itself: a loop over orders and deaths, and the sweeping up after the dead.
//!
//! It owns the kill and the wait of every worker. It never blocks on the supervisor, on a program's
//! file system or on a process that will not die; and it restarts nothing.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bulkhead_shared::codec;
use bulkhead_shared::process_tree::kill_descendants;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use super::socket::{self, Outbox, Received};
use super::spawn::{Forker, Job, LINK_FD, Prepared, Progress, put_at, read_failure};
use super::wait::{self, Waited};
use super::{Exit, ORDER_BYTES_MAX, Order, ReportMessage, Rlimit, Usage};

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

// A worker's error pipe has its process number as token, and no worker is number 0 or 1.
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
/// the nice value for workers.
fn prepare() -> io::Result<(OwnedFd, i32)> {
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
    let nice = rustix::process::getpriority_process(None)?;
    take_precedence();
    Ok((socket, nice))
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

/// A child that has not been waited for.
struct Child {
    worker: u64,
    pidfd: OwnedFd,
    stage: Stage,
}

enum Stage {
    /// On its way to `execve`; what goes wrong comes through this pipe.
    Starting(OwnedFd),
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
    fn start((socket, nice): (OwnedFd, i32)) -> io::Result<Self> {
        let forker = Forker::start(nice)?;
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
            Some((Order::Spawn { worker, argument_count, rlimits }, texts)) => {
                if let Err((step, errno)) = self.spawn(worker, texts, argument_count, rlimits, descriptors) {
                    self.report(&ReportMessage::SpawnFailed { worker, step, errno }, None);
                }
                Ok(true)
            }
            Some((Order::Kill { worker }, _)) => {
                // Whoever is in the table has not been waited for.
                let child = self.children.iter().find(|(_, child)| child.worker == worker);
                if let Some((&pid, _)) = child {
                    wait::kill_group(pid);
                }
                Ok(true)
            }
            Some((Order::Ping, _)) => {
                self.report(&ReportMessage::Pong, None);
                Ok(true)
            }
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "this is not an order of this version")),
        }
    }

    fn spawn(
        &mut self,
        worker: u64,
        texts: &[u8],
        argument_count: u32,
        rlimits: Vec<Rlimit>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), (&'static str, i32)> {
        let (prepared, pipe) = Prepared::new(texts, argument_count, rlimits, descriptors)
            .map_err(|(step, errno)| (step, errno.raw_os_error()))?;
        let in_fork = |error: io::Error| ("fork", error.raw_os_error().unwrap_or(libc::EIO));
        let pid = self.forker.fork(Job::Worker(prepared)).map_err(in_fork)?;
        match self.watch(pid, &pipe) {
            Ok(pidfd) => {
                self.children.insert(pid, Child { worker, pidfd, stage: Stage::Starting(pipe) });
                Ok(())
            }
            Err(error) => {
                wait::kill_child(pid);
                Err(in_fork(error))
            }
        }
    }

    fn watch(&self, pid: u32, pipe: &OwnedFd) -> io::Result<OwnedFd> {
        let number = Pid::from_raw(pid as i32).ok_or(rustix::io::Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
        let mut source = SourceFd(&pipe.as_raw_fd());
        self.poll.registry().register(&mut source, Token(pid as usize), Interest::READABLE)?;
        Ok(pidfd)
    }

    /// Reads the error pipe of a starting child, and reports what it says.
    fn look_at_start(&mut self, pid: u32) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let Stage::Starting(pipe) = &child.stage else { return };
        let progress = read_failure(pipe);
        if matches!(progress, Progress::Underway) {
            return;
        }
        // Closing alone would not do: a child that is being forked may have a copy, which keeps it
        // registered. There is nothing to be done if it fails.
        let _ = self.poll.registry().deregister(&mut SourceFd(&pipe.as_raw_fd()));
        let worker = child.worker;
        if let Progress::Failed { step, errno } = progress {
            child.stage = Stage::Failed;
            self.report(&ReportMessage::SpawnFailed { worker, step: &step, errno }, None);
            return;
        }
        child.stage = Stage::Running;
        // The kernel takes a descriptor of its own along with the message, as soon as that is sent.
        match child.pidfd.try_clone() {
            Ok(pidfd) => self.report(&ReportMessage::Spawned { worker, pid }, Some(pidfd)),
            Err(error) => {
                wait::kill_child(pid);
                child.stage = Stage::Failed;
                let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
                self.report(&ReportMessage::SpawnFailed { worker, step: "descriptors", errno }, None);
            }
        }
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
                    if let Some(Child { worker, stage: Stage::Running, .. }) = self.children.remove(&pid) {
                        self.leaving.push(Leaving { worker, exit, usage, since: now });
                        self.scans.audit.get_or_insert(now + AUDIT_PAUSE);
                    }
                }
            }
        }
    }

    /// Kills what the dead left behind, and reports those of whom nothing is left.
    fn sweep(&mut self, now: Instant) {
        if self.leaving.is_empty() {
            self.audit(now);
        } else if self.is_swept(now) {
            for gone in std::mem::take(&mut self.leaving) {
                self.report_exit(&gone);
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
            self.report_exit(&gone);
        }
    }

    fn report_exit(&mut self, gone: &Leaving) {
        let &Leaving { worker, exit, usage, .. } = gone;
        self.report(&ReportMessage::Exited { worker, exit, usage }, None);
    }

    fn audit(&mut self, now: Instant) {
        if self.scans.audit.is_some_and(|due| due <= now) {
            // Until a look finds nothing: who kills, finds the victims' children the next time.
            let found_something = !matches!(self.scan(), Ok(0));
            self.scans.audit = found_something.then(|| now + AUDIT_PAUSE);
        }
    }
}

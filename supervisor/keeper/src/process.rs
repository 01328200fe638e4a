//! The keeper process itself: a loop over orders, starts, forbidden calls and deaths.
//!
//! It owns the kill and the wait of every worker. It never blocks on the supervisor, on a program's
//! file system or on a process that will not die; and it restarts nothing.

mod becoming;
pub(crate) mod guard;
mod inherited;
mod nests;
mod precedence;
mod starts;
mod sweeping;
mod templates;
mod violations;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_shared::codec;
use bulkhead_shared::limits::cut;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use self::becoming::{Owners, prepare};
use self::guard::{FIRST_ARGUMENT, GUARDED_ARGUMENT, guard};
use self::nests::{Home, Nest};
use self::precedence::Precedence;
use self::sweeping::Sweep;
use self::templates::{Held, Template};
use super::confine::cgroup::Leaf;
use super::confinement::{Observed, Terms};
use super::groups::Groups;
use super::socket::{self, Outbox, Received};
use super::spawn::{Ends, Filters, Forker, Refusal, Standing};
use super::temporary::Folders;
use super::wait;
use super::{Exit, ORDER_BYTES_MAX, Order, ReportMessage, Rlimit, STEP_BYTES_MAX, observe};

/// No order is taken while this many reports wait for the supervisor; what then still can come is the
/// three last reports of each worker.
const REPORTS_WAITING_MAX: usize = 1024;

/// How long the keeper tries to kill everything before it gives up and ends.
const END_PATIENCE: Duration = Duration::from_secs(60);

/// What one turn of the loop takes from the kernel; the rest comes with the next.
const EVENTS_MAX: usize = 64;

// The tokens of a worker's descriptors are its process number, and one of these.
/// Of its listener.
const LISTENER: usize = 1 << 32;
/// Of its pidfd.
const END: usize = 1 << 33;
/// Of what the first process of its namespace tells.
const STATUS: usize = 1 << 34;
/// Of the socket of a template.
const FORKS: usize = 1 << 35;
/// Of the first process of a nest.
const NEST: usize = 1 << 36;
const NUMBER: usize = LISTENER - 1;

/// Of the guard and the application, where there are some: their ends.
const OWNERS: usize = 1 << 37;

// A worker's progress has its process number alone as token, and no worker is number 0 or 1.
const ORDERS: usize = 0;
const DEATHS: usize = 1;

/// Runs the keeper; it ends with everything that descends from it.
///
/// A program that starts a [`super::Keeper`] of its own executable calls this first thing in `main`,
/// before there is a thread, if its first argument is [`super::KEEPER_ARGUMENT`].
pub fn run_as_keeper() -> ! {
    let mut arguments = std::env::args().skip(2);
    let guard = match arguments.next().as_deref() {
        Some(GUARDED_ARGUMENT) => {
            let version = arguments.next();
            let is_first = arguments.next().as_deref() == Some(FIRST_ARGUMENT);
            guard(version.as_deref(), is_first).map(Some)
        }
        _ => Ok(None),
    };
    let result = guard.and_then(prepare).and_then(Process::start).and_then(Process::run);
    if let Err(error) = &result {
        // Standard error is the supervisor's own; if that is closed, the error cannot be reported.
        let _ = writeln!(io::stderr(), "bulkhead-keeper: failed to keep the workers: {error}");
    }
    std::process::exit(i32::from(result.is_err()))
}

/// Has `poll` tell by `token` when the descriptor becomes readable.
fn register(poll: &Poll, descriptor: &impl AsRawFd, token: usize) -> io::Result<()> {
    let mut source = SourceFd(&descriptor.as_raw_fd());
    poll.registry().register(&mut source, Token(token), Interest::READABLE)
}

/// Has `poll` tell again that a descriptor is readable, if it is, and that it is writable if it `is_blocked`.
fn register_again(poll: &Poll, descriptor: &impl AsRawFd, token: usize, is_blocked: bool) -> io::Result<()> {
    let interest = if is_blocked { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
    poll.registry().reregister(&mut SourceFd(&descriptor.as_raw_fd()), Token(token), interest)
}

/// Has `poll` forget a descriptor. Closing alone would not do: a child that is being forked may have a copy, which keeps
/// it registered. There is nothing to be done if it fails.
fn deregister(poll: &Poll, descriptor: &impl AsRawFd) {
    let _ = poll.registry().deregister(&mut SourceFd(&descriptor.as_raw_fd()));
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
    /// If it forks other workers.
    template: Option<Template>,
    /// If it does so in a namespace, where all of them live.
    nest: Option<Nest>,
    /// If it is one of them.
    home: Option<Home>,
}

impl Child {
    /// How it ended, by this status and by what else is known of it.
    fn cause(&self, exit: Exit) -> Exit {
        let is_out_of_memory = |leaf: &Leaf| leaf.oom_kills().is_ok_and(|kills| kills > 0);
        match (exit, self.violation) {
            (_, Some(call)) => Exit::Violation { call },
            (Exit::Signal { number: libc::SIGKILL, .. }, None)
                if self.leaf.as_ref().is_some_and(is_out_of_memory) =>
            {
                Exit::Oom
            }
            (exit, None) => exit,
        }
    }

    fn forget_descriptors(&mut self, poll: &Poll) {
        let forks = self.template.as_ref().map(Template::socket);
        let nest = self.nest.as_ref().map(Nest::socket);
        let all = [self.listener.as_ref(), self.status.as_ref(), forks, nest, Some(&self.pidfd)];
        for descriptor in all.into_iter().flatten() {
            deregister(poll, descriptor);
        }
    }

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
    /// Reported as ended, while the first process of its namespace has not.
    Ended,
}

struct Process {
    poll: Poll,
    socket: OwnedFd,
    /// Whose ends are this one's.
    owners: Option<Owners>,
    deaths: SignalFd,
    forker: Forker,
    /// The user namespace of subordinate ids, if there is one.
    namespace: Option<Arc<OwnedFd>>,
    children: HashMap<u32, Child>,
    /// The same by the supervisor's names for them.
    by_worker: HashMap<u64, u32>,
    /// Those of them that fork, or did.
    templates: BTreeSet<u32>,
    own: observe::Own,
    filters: Filters,
    folders: Folders,
    groups: Groups,
    sweep: Sweep,
    /// What is forked when processes are not hunted any more.
    held: VecDeque<Held>,
    precedence: Precedence,
    outbox: Outbox,
    /// Whether the socket had more orders when it was last looked at.
    has_orders: bool,
    /// Whether the outbox waits for the socket.
    is_blocked: bool,
    order: Vec<u8>,
}

impl Process {
    fn start((socket, owners, standing): (OwnedFd, Option<Owners>, Standing)) -> io::Result<Self> {
        let forker = Forker::start(standing)?;
        let always = !wait::tells_orphans_apart(&forker)?;
        let mut blocked = SigSet::empty();
        blocked.add(nix::sys::signal::SIGCHLD);
        let deaths = SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let poll = Poll::new()?;
        register(&poll, &deaths, DEATHS)?;
        register(&poll, &socket, ORDERS)?;
        owners.iter().flat_map(Owners::each).try_for_each(|owner| register(&poll, owner, OWNERS))?;
        let mut process = Self {
            poll,
            socket,
            owners,
            deaths,
            forker,
            namespace: None,
            children: HashMap::new(),
            by_worker: HashMap::new(),
            templates: BTreeSet::new(),
            own: observe::Own::read(),
            filters: Filters::default(),
            folders: Folders::default(),
            groups: Groups::default(),
            sweep: Sweep::new(always),
            held: VecDeque::new(),
            precedence: Precedence::new(standing.nice),
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
        self.precedence.take();
        // What lives in a nest ends with that.
        for (&pid, _) in self.children.iter().filter(|(_, child)| child.home.is_none()) {
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
            match event.token().0 {
                // Or closed, or writable: then the look is for nothing.
                ORDERS => self.has_orders = true,
                OWNERS if self.owners.is_some() => return Ok(false),
                DEATHS => while self.deaths.read_signal()?.is_some() {},
                token => {
                    let pid = (token & NUMBER) as u32;
                    match token & !NUMBER {
                        LISTENER => self.look_at_violation(pid),
                        STATUS => self.hear_end(pid),
                        FORKS => self.hear_template(pid),
                        NEST => self.hear_nest(pid),
                        END => self.reap_worker(pid, Instant::now()),
                        _ => self.look_at_start(pid),
                    }
                }
            }
        }
        // A death is told before there is time for a spawn or for a look at all processes.
        self.flush()?;
        // One order a turn, so that deaths do not wait for a hundred spawns.
        if self.can_take_order() && !self.take_order()? {
            return Ok(false);
        }
        let now = Instant::now();
        self.reap(now);
        self.flush()?;
        self.sweep(now);
        self.end_hung_templates(now);
        self.tidy_nests(now);
        self.fork_held();
        Ok(true)
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.can_take_order() {
            return Some(Duration::ZERO);
        }
        let due = self.sweep.due(now).into_iter().chain(self.forks_due()).chain(self.nests_due()).min();
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
            Ok(Received::Message(length, descriptors)) => {
                self.obey(&buffer[..length], descriptors).map(|()| true)
            }
            Err(error) => Err(error),
        };
        self.order = buffer;
        goes_on
    }

    fn obey(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let refused = || io::Error::new(io::ErrorKind::InvalidData, "this is not an order of this version");
        match Order::decode(message).ok_or_else(refused)? {
            Order::Spawn(order) => {
                if let Err(refusal) = self.spawn(&order, descriptors) {
                    self.report_failure(order.worker, &refusal);
                }
            }
            Order::Fork { worker, template } => {
                if let Err(refusal) = self.fork(Held { worker, template, descriptors }) {
                    self.report_failure(worker, &refusal);
                }
            }
            Order::Namespace => self.namespace = descriptors.into_iter().next().map(Arc::new),
            Order::Kill { worker } => {
                // A child in the table has not been waited for.
                if let Some(&pid) = self.by_worker.get(&worker) {
                    let is_in_nest = |child: &Child| child.nest.is_some() || child.home.is_some();
                    if !self.children.get(&pid).is_some_and(is_in_nest) {
                        // Given back when nothing is left of it.
                        self.precedence.take();
                    }
                    self.kill(pid);
                } else {
                    self.doom(worker);
                }
            }
            Order::Ping => self.report(&ReportMessage::Pong, None),
        }
        Ok(())
    }

    fn insert(&mut self, pid: u32, child: Child) {
        self.by_worker.insert(child.worker, pid);
        if child.template.is_some() {
            self.templates.insert(pid);
        }
        self.children.insert(pid, child);
    }

    fn remove(&mut self, pid: u32) -> Option<Child> {
        let child = self.children.remove(&pid)?;
        self.by_worker.remove(&child.worker);
        self.templates.remove(&pid);
        Some(child)
    }

    fn report_failure(&mut self, worker: u64, refusal: &Refusal) {
        let step = cut(&refusal.step, STEP_BYTES_MAX);
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
            register_again(&self.poll, &self.socket, ORDERS, is_blocked)?;
        }
        Ok(())
    }
}

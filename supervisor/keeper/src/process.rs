//! The keeper process. Runs a loop that handles orders, workers that are starting, forbidden system calls, and exited
//! processes.
//!
//! The keeper kills and reaps every worker, but never restarts one. It never blocks on the supervisor or on a process
//! that survives SIGKILL, and only briefly on the file system of a program.

mod cgroups;
mod guard;
mod hung_paths;
mod id_maps;
mod observe;
mod priority;
mod reaping;
mod samples;
mod setup;
mod starts;
mod templates;
pub(crate) mod temporary;
mod violations;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_shared::codec;
use bulkhead_shared::limits::truncate;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use nix::sys::signal::SigSet;
use nix::sys::signalfd::{SfdFlags, SignalFd};

use self::cgroups::WorkerGroups;
use self::guard::become_guard;
use self::hung_paths::HungPaths;
use self::priority::PriorityBoost;
use self::reaping::DescendantReaper;
use self::samples::Samples;
use self::setup::{WatchedProcesses, set_up};
use self::templates::namespaces::{NamespaceMember, TemplateNamespace};
use self::templates::{DeferredFork, Template};
use self::temporary::TemporaryFolders;
use crate::confine::cgroup::Leaf;
use crate::protocol::confinement::{Layers, Observed};
use crate::protocol::socket::{self, Outbox, Received};
use crate::protocol::{
    Exit, GUARDED_ARGUMENT, ORDER_BYTES_MAX, Order, PROBE_ARGUMENT, REPORT_BYTES_MAX, ReportMessage, Rlimit,
    STEP_BYTES_MAX,
};
use crate::spawn::{
    ChildConnections, FilterCache, Forker, OriginalSettings, SpawnError, distinguishes_orphans,
};
use crate::wait;

/// Maximum number of pending reports. Once this limit is reached, the keeper accepts no further orders. After that,
/// each worker can still add up to three final reports.
const PENDING_REPORTS_MAX: usize = 1024;

/// Maximum number of deferred fork orders. Each of them holds three descriptors. When this limit is reached, the
/// keeper accepts no further orders.
const DEFERRED_FORKS_MAX: usize = 256;

/// Maximum time for killing all processes before the keeper exits. The keeper then exits even if some processes are
/// left.
const KILL_ALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of events handled per iteration of the loop. Further events are handled in the next
/// iteration.
const EVENTS_MAX: usize = 64;

// The token of a worker's descriptor consists of the process ID and one of the following bits.
/// `poll` token bit for a child's seccomp listener.
const LISTENER: usize = 1 << 32;
/// `poll` token bit for a child's pidfd.
const EXIT: usize = 1 << 33;
/// `poll` token bit for a status pipe from the first process in a PID namespace.
const STATUS: usize = 1 << 34;
/// `poll` token bit for a template's socket.
const TEMPLATE: usize = 1 << 35;
/// `poll` token bit for the socket to the first process in a template's PID namespace.
const NAMESPACE: usize = 1 << 36;
const PID_MASK: usize = LISTENER - 1;

/// The `poll` token for the pidfds of the guard and the application. A pidfd becomes readable when its process exits.
const WATCHED: usize = 1 << 37;

/// `poll` token with which the sampling thread wakes the loop.
const SAMPLED: usize = 1 << 38;

// The token of a worker's progress socket is the PID without any bits. The values 0 and 1 are free, because no worker
// has these PIDs.
const ORDERS: usize = 0;
const SIGCHLD: usize = 1;

/// Runs the keeper process. When the keeper exits, it kills all its descendants.
///
/// A program that starts its own executable as a [`crate::Keeper`] must call this function first in `main`,
/// before it creates a thread, if its first argument is [`crate::KEEPER_ARGUMENT`].
pub fn run_as_keeper() -> ! {
    let mut arguments = std::env::args().skip(2);
    let guard = match arguments.next().as_deref() {
        Some(GUARDED_ARGUMENT) => {
            let version = arguments.next();
            let probe = arguments.next().as_deref() == Some(PROBE_ARGUMENT);
            become_guard(version.as_deref(), probe).map(Some)
        }
        _ => Ok(None),
    };
    let result = guard.and_then(set_up).and_then(EventLoop::start).and_then(EventLoop::run);
    if let Err(error) = &result {
        // The keeper writes the error to standard error, which it inherits from the supervisor. If standard error is
        // closed, the error is lost.
        let _ = writeln!(io::stderr(), "bulkhead-keeper: failed to manage the workers: {error}");
    }
    std::process::exit(i32::from(result.is_err()))
}

/// Registers a descriptor with `poll`, which then reports `token` whenever the descriptor becomes readable.
fn register(poll: &Poll, descriptor: &impl AsRawFd, token: usize) -> io::Result<()> {
    let mut source = SourceFd(&descriptor.as_raw_fd());
    poll.registry().register(&mut source, Token(token), Interest::READABLE)
}

/// Registers descriptors of a child process with `poll`. Each token consists of `pid` and the bit for the descriptor.
fn register_each<'d>(
    poll: &Poll,
    pid: u32,
    mut descriptors: impl Iterator<Item = (&'d OwnedFd, usize)>,
) -> io::Result<()> {
    descriptors.try_for_each(|(descriptor, bit)| register(poll, descriptor, pid as usize | bit))
}

/// Registers the descriptor again, so that `poll` reports it even if it was already readable before. If `is_blocked` is
/// true, `poll` also reports when the descriptor becomes writable.
fn register_again(poll: &Poll, descriptor: &impl AsRawFd, token: usize, is_blocked: bool) -> io::Result<()> {
    let interest = if is_blocked { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
    poll.registry().reregister(&mut SourceFd(&descriptor.as_raw_fd()), Token(token), interest)
}

/// Removes a descriptor from `poll`. Closing the descriptor would not be enough, because a child that is being forked
/// might hold a copy, which stays registered. Ignores errors, because no caller could handle them.
fn deregister(poll: &Poll, descriptor: &impl AsRawFd) {
    let _ = poll.registry().deregister(&mut SourceFd(&descriptor.as_raw_fd()));
}

/// A child process that has not been reaped.
struct Child {
    worker: u64,
    pidfd: OwnedFd,
    stage: Stage,
    layers: Layers,
    rlimits: Vec<Rlimit>,
    /// True if the keeper has allowed the child to execute its program.
    is_confined: bool,
    /// PID of the worker or, until it is known, of the process that the keeper forked. In a PID namespace, the worker
    /// is a child of the forked process.
    process: u32,
    /// Descriptor on which the kernel notifies the keeper of forbidden system calls.
    listener: Option<OwnedFd>,
    /// First forbidden system call made by the worker's main process.
    violation: Option<u32>,
    /// Temporary folder, which is removed when all processes of the worker are gone.
    folder: Option<PathBuf>,
    leaf: Option<Leaf>,
    observed: Observed,
    /// Pipe on which the first process of the worker's PID namespace reports how the worker exited.
    status: Option<OwnedFd>,
    /// State of the template, if this child is a template.
    template: Option<Template>,
    /// The PID namespace that a template shares with its workers. `None` unless this child is a template with such a
    /// namespace.
    namespace: Option<TemplateNamespace>,
    /// The worker's place in its template's PID namespace. `None` unless this child is a worker in such a namespace.
    member: Option<NamespaceMember>,
}

impl Child {
    /// Creates a child with all optional fields unset.
    fn new(
        worker: u64,
        pid: u32,
        pidfd: OwnedFd,
        stage: Stage,
        layers: Layers,
        rlimits: Vec<Rlimit>,
        observed: Observed,
    ) -> Self {
        Self {
            worker,
            pidfd,
            stage,
            layers,
            rlimits,
            is_confined: true,
            process: pid,
            listener: None,
            violation: None,
            folder: None,
            leaf: None,
            observed,
            status: None,
            template: None,
            namespace: None,
            member: None,
        }
    }

    /// Determines the cause of a worker's exit. Combines the exit status with information that the keeper has recorded
    /// about the worker.
    fn exit_cause(&self, exit: Exit) -> Exit {
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

    /// Returns the descriptors on which a template and the first process of a PID namespace send reports,
    /// each with its token bit. All descriptors must be registered, because otherwise the keeper would miss
    /// exits.
    fn report_descriptors(&self) -> impl Iterator<Item = (&OwnedFd, usize)> {
        let template = self.template.as_ref().map(Template::socket);
        let namespace = self.namespace.as_ref().map(TemplateNamespace::socket);
        let all = [(self.status.as_ref(), STATUS), (template, TEMPLATE), (namespace, NAMESPACE)];
        all.into_iter().filter_map(|(descriptor, bit)| Some((descriptor?, bit)))
    }

    fn deregister_all(&self, poll: &Poll) {
        let reports = self.report_descriptors().map(|(descriptor, _)| descriptor);
        reports
            .chain(&self.listener)
            .chain([&self.pidfd])
            .for_each(|descriptor| deregister(poll, descriptor));
    }

    /// Checks the worker's confinement again once its program is running, because executing the program could have
    /// given the worker privileges. Returns the name of the first value that does not match the order. Returns `None`
    /// if all values match, or if the process has already exited.
    fn recheck_confinement(&mut self) -> Option<&'static str> {
        let mut observed = self.observed;
        observe::read_status(self.process, &mut observed).ok()?;
        self.observed = observed;
        if self.layers == Layers::default() {
            return None;
        }
        // Compares only whether limits are too high, because the worker may already have lowered its own limits.
        let limit = || observe::limit_exceeded(self.process, &self.rlimits).ok().flatten();
        observed.mismatch(&self.layers).or_else(limit)
    }
}

enum Stage {
    /// The child has not executed its program yet.
    Starting(ChildConnections),
    /// The worker's program is running, and this was reported to the supervisor.
    Running,
    /// The start has failed, and this was reported to the supervisor. The child must still be reaped.
    Failed,
    /// The worker has exited, and this was reported to the supervisor. The first process of the worker's PID namespace
    /// is still running.
    Ended,
    /// The worker was reported as reaped although a process in its PID namespace survives SIGKILL. The first process
    /// of the namespace must still be reaped.
    Abandoned,
}

struct EventLoop {
    poll: Poll,
    socket: OwnedFd,
    /// The guard and the application. When either of them exits, the keeper exits too.
    watched: Option<WatchedProcesses>,
    sigchld: SignalFd,
    forker: Forker,
    /// User namespace with the subordinate IDs. `None` if the supervisor has not sent one.
    subordinate_namespace: Option<Arc<OwnedFd>>,
    /// Descriptor that stays open until the keeper exits. The process at the other end is notified when the descriptor
    /// is closed.
    lifeline: Option<OwnedFd>,
    children: HashMap<u32, Child>,
    /// Maps the spawn number of each worker to its PID.
    by_worker: HashMap<u64, u32>,
    templates: BTreeSet<u32>,
    own_status: observe::KeeperStatus,
    filters: FilterCache,
    hung_paths: HungPaths,
    folders: TemporaryFolders,
    groups: WorkerGroups,
    reaper: DescendantReaper,
    /// Fork orders that are deferred until the current search for leftover processes has ended.
    deferred_forks: VecDeque<DeferredFork>,
    priority: PriorityBoost,
    samples: Samples,
    outbox: Outbox,
    /// True if the socket might contain unread orders.
    has_orders: bool,
    /// True if queued reports are waiting for the socket to become writable.
    is_blocked: bool,
    order_buffer: Vec<u8>,
}

impl EventLoop {
    fn start(
        (socket, watched, original): (OwnedFd, Option<WatchedProcesses>, OriginalSettings),
    ) -> io::Result<Self> {
        let forker = Forker::start(original)?;
        let scan_always = !distinguishes_orphans(&forker)?;
        let mut blocked = SigSet::empty();
        blocked.add(nix::sys::signal::SIGCHLD);
        let sigchld = SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let poll = Poll::new()?;
        register(&poll, &sigchld, SIGCHLD)?;
        register(&poll, &socket, ORDERS)?;
        watched
            .iter()
            .flat_map(WatchedProcesses::all)
            .try_for_each(|owner| register(&poll, owner, WATCHED))?;
        let samples = Samples::new(&poll)?;
        let is_embedded = watched.is_some();
        let mut event_loop = Self {
            poll,
            socket,
            watched,
            sigchld,
            forker,
            subordinate_namespace: None,
            lifeline: None,
            children: HashMap::new(),
            by_worker: HashMap::new(),
            templates: BTreeSet::new(),
            own_status: observe::KeeperStatus::read(),
            filters: FilterCache::default(),
            hung_paths: HungPaths::default(),
            folders: TemporaryFolders::default(),
            groups: WorkerGroups::new(is_embedded),
            reaper: DescendantReaper::new(scan_always),
            deferred_forks: VecDeque::new(),
            priority: PriorityBoost::new(original.nice),
            samples,
            outbox: Outbox::default(),
            has_orders: true,
            is_blocked: false,
            order_buffer: vec![0; ORDER_BYTES_MAX],
        };
        event_loop.report(&ReportMessage::Started { scan_always }, None);
        Ok(event_loop)
    }

    /// Executes orders until the supervisor is gone or sends an invalid order, and then kills all workers and their
    /// descendants.
    fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS_MAX);
        let served = loop {
            match self.run_iteration(&mut events) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.priority.raise();
        // The processes in a PID namespace die together with the namespace's first process.
        for (&pid, _) in self.children.iter().filter(|(_, child)| child.member.is_none()) {
            wait::kill_group(pid);
        }
        wait::kill_all_descendants(KILL_ALL_TIMEOUT)?;
        match served {
            // Not an error: the supervisor exited while the keeper was writing to it.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            served => served,
        }
    }

    /// Performs one iteration of the loop. Returns `false` if the keeper must exit.
    fn run_iteration(&mut self, events: &mut Events) -> io::Result<bool> {
        self.flush()?;
        match self.poll.poll(events, self.timeout(Instant::now())) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            result => result?,
        }
        for event in events.iter() {
            match event.token().0 {
                // The event can also mean that the socket is closed or writable. In that case, there is no order to
                // receive.
                ORDERS => self.has_orders = true,
                WATCHED if self.watched.is_some() => return Ok(false),
                SAMPLED => {}
                SIGCHLD => while self.sigchld.read_signal()?.is_some() {},
                token => {
                    let pid = (token & PID_MASK) as u32;
                    match token & !PID_MASK {
                        LISTENER => self.handle_violation(pid),
                        STATUS => self.handle_init_status(pid, Instant::now()),
                        TEMPLATE => self.handle_template_messages(pid),
                        NAMESPACE => self.handle_namespace_messages(pid),
                        EXIT => self.reap_worker(pid, Instant::now()),
                        _ => self.advance_start(pid),
                    }
                }
            }
        }
        // Sends exit reports before starting a worker or scanning processes, because both of these can take a long
        // time.
        self.flush()?;
        // Executes only one order per iteration, so that exit reports do not wait behind a hundred spawns.
        if self.can_receive_order() && !self.receive_order()? {
            return Ok(false);
        }
        let now = Instant::now();
        self.advance_samples();
        self.reap(now);
        self.flush()?;
        self.reap_descendants(now);
        self.kill_hung_templates(now);
        self.clean_namespaces(now);
        self.run_deferred_forks();
        Ok(true)
    }

    fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.can_receive_order() {
            return Some(Duration::ZERO);
        }
        let due = self
            .reaper
            .next_due(now)
            .into_iter()
            .chain(self.next_fork_timeout())
            .chain(self.next_namespace_kill())
            .chain(self.samples.next_due(now))
            .min();
        due.map(|due| due.saturating_duration_since(now))
    }

    fn can_receive_order(&self) -> bool {
        self.has_orders && has_room(self.outbox.len(), self.deferred_forks.len())
    }

    fn receive_order(&mut self) -> io::Result<bool> {
        let mut buffer = std::mem::take(&mut self.order_buffer);
        let received = socket::receive(&self.socket, &mut buffer);
        let result = match received {
            Ok(Received::Closed) => Ok(false),
            Ok(Received::Nothing) => {
                self.has_orders = false;
                Ok(true)
            }
            Ok(Received::Message(length, descriptors)) => {
                self.execute_order(&buffer[..length], descriptors).map(|()| true)
            }
            Err(error) => Err(error),
        };
        self.order_buffer = buffer;
        result
    }

    fn execute_order(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let refused = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the keeper received an order that its version does not support",
            )
        };
        match Order::decode(message).ok_or_else(refused)? {
            Order::Spawn(order) => {
                if let Err(error) = self.spawn(&order, descriptors) {
                    self.report_failure(order.worker, &error);
                }
            }
            Order::Fork { worker, template } => {
                if let Err(error) = self.fork(DeferredFork { worker, template, descriptors }) {
                    self.report_failure(worker, &error);
                }
            }
            Order::Namespace => self.subordinate_namespace = descriptors.into_iter().next().map(Arc::new),
            Order::Lifeline => self.lifeline = descriptors.into_iter().next(),
            Order::Kill { worker } => {
                // A child in the table has not been reaped, so the PID is valid.
                if let Some(&pid) = self.by_worker.get(&worker) {
                    let is_in_namespace = |child: &Child| child.namespace.is_some() || child.member.is_some();
                    if !self.children.get(&pid).is_some_and(is_in_namespace) {
                        // The priority is restored when all processes of the worker are gone.
                        self.priority.raise();
                    }
                    self.kill(pid);
                } else {
                    self.cancel_fork(worker);
                }
            }
            Order::Sample { worker, job } => self.sample(worker, job, descriptors),
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

    fn report_failure(&mut self, worker: u64, error: &SpawnError) {
        let step = truncate(&error.step, STEP_BYTES_MAX);
        let errno = error.errno.raw_os_error();
        self.report(&ReportMessage::SpawnFailed { worker, step, errno }, None);
    }

    fn report(&mut self, message: &ReportMessage<'_>, pidfd: Option<OwnedFd>) {
        let mut bytes = Vec::new();
        // Encoding fails only for messages over 64 KiB.
        let encoded = codec::encode(message, &[], &mut bytes);
        debug_assert!(encoded.is_ok() && bytes.len() <= REPORT_BYTES_MAX);
        self.outbox.push(bytes, pidfd.into_iter().collect());
    }

    /// Sends pending reports. If the socket is full, the rest is sent as soon as the socket is writable again.
    fn flush(&mut self) -> io::Result<()> {
        if self.outbox.is_empty() {
            return Ok(());
        }
        let is_blocked = !self.outbox.flush(&self.socket)?;
        if is_blocked != self.is_blocked {
            self.is_blocked = is_blocked;
            // Polls for writability only while reports are pending. Otherwise, the keeper would wake up each time the
            // supervisor reads a report.
            register_again(&self.poll, &self.socket, ORDERS, is_blocked)?;
        }
        Ok(())
    }
}

/// Returns true if the keeper can accept another order now.
fn has_room(pending_reports: usize, deferred_forks: usize) -> bool {
    pending_reports < PENDING_REPORTS_MAX && deferred_forks < DEFERRED_FORKS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_poll_registration_is_an_error() {
        let poll = Poll::new().unwrap();
        let (readable, _writer) = rustix::pipe::pipe().unwrap();
        register_each(&poll, 2, [(&readable, STATUS)].into_iter()).unwrap();
        // Uses a regular file, because registering it fails.
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into();
        let error = register_each(&poll, 2, [(&file, TEMPLATE)].into_iter());
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn pending_reports_and_forks_delay_new_orders() {
        assert!(has_room(PENDING_REPORTS_MAX - 1, DEFERRED_FORKS_MAX - 1));
        assert!(!has_room(PENDING_REPORTS_MAX, 0));
        assert!(!has_room(0, DEFERRED_FORKS_MAX));
    }
}

//! The data plane: a thread that owns the jobs, the bulkheads, and the connections of clients, workers and the keeper.
//!
//! Each iteration of the event loop receives new events, such as a frame, a death, a timer or a command. The loop
//! applies each event to a bulkhead, performs the actions that policy returns, and writes each socket once at the end.
//! Policy decides about the jobs of a bulkhead. Other parts of this crate decide about memory, leases, fallbacks and
//! crash reports. The loop never blocks on other work, and never formats text or writes logs. Work that can block runs
//! on another thread (`background.rs`).
//!
//! From `/proc`, the data plane reads only `stat`, which takes about 7 µs. This happens for the ancestors of a process
//! that connects for the first time. The other case is a worker that closed its link a second ago but has not been
//! reported dead.

mod acceptor;
mod background;
mod buffers;
mod bulkheads;
mod commands;
mod crashes;
pub mod descriptors;
mod fallback;
mod handover;
mod handshake;
mod in_process_waker;
mod journal;
mod keeper_link;
mod leases;
mod links;
mod memory;
mod memory_files;
mod operator_events;
mod pauses;
mod rejections;
mod replays;
mod reporter;
mod samples;
mod sessions;
mod shares;
mod slab;
mod spans;
mod starvation;
mod submissions;
mod templates;
mod time_budget;
mod unread_loans;
mod wiring;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll as Readiness};
use std::time::{Duration, Instant};

use bulkhead_api::Severity;
use bulkhead_config::Config;
use bulkhead_keeper::{Keeper, Report};
use bulkhead_linux::peer::UnrelatedProcesses;
use bulkhead_plane::access::Access;
use bulkhead_plane::command::{Command, CommandSender, WorkerProcess};
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::notices::{Milestone, NoticeSender};
use bulkhead_plane::open_files;
use bulkhead_plane::peer_check::SocketKind;
use bulkhead_plane::reload::{BulkheadSpec, SpecInputs};
use bulkhead_plane::scrape::Scrape;
use bulkhead_plane::span::SpanSender;
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_policy::{Action, Event, Time};
use bulkhead_shared::client_protocol::capability;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::worker_protocol::{Empty, Limits};
use bulkhead_shared::{JobId, Priority, RejectReason};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

use acceptor::Acceptor;
use background::{Background, Done};
use buffers::Buffers;
use bulkheads::{Bulkheads, Compartments, JobListQueue, JobListSource, SnapshotQueue, SnapshotSource};
use commands::CommandQueue;
use crashes::{Crashes, RetriedCrash};
use descriptors::Intake;
use fallback::FallbackState;
use handover::Handover;
use in_process_waker::InProcessWaker;
use keeper_link::{KeeperLink, WorkerOrder};
use leases::{LeasedPayload, Leases};
use links::{JobPosition, Link, Links, death_of};
use memory::{Charge, ChargeKind, Memory};
use pauses::PauseDetector;
use rejections::RejectionReports;
use replays::Replays;
use reporter::Reporter;
use samples::{HeldAction, Samples};
use sessions::{Session, Sessions};
use shares::Owner;
use slab::{CompartmentIndex, LinkIndex, SessionId, SessionIndex, SlabIndex};
use spans::{Spans, Trace};
use templates::Templates;
use unread_loans::UnreadLoans;
use wiring::samples::SampleSubject;

/// Maximum number of socket events handled per iteration.
const EVENTS_PER_ITERATION_MAX: usize = 1024;

/// Interval between periodic checks, such as the check for stalled peers. The checks run only while there is something
/// to check.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const KEEPER: Token = Token(2);
const TRANSFER: Token = Token(3);
const FIRST_CONNECTION: usize = 4;

/// Readiness events for which sockets are registered. `PRIORITY` reports out-of-band data, which is a protocol
/// violation.
const INTEREST: Interest = Interest::READABLE.add(Interest::WRITABLE).add(Interest::PRIORITY);

/// Capabilities that the supervisor announces to each client.
const CLIENT_CAPABILITIES: u64 =
    capability::RUN_LIMIT | capability::MEMORY_FILES | capability::CANCEL_UNLESS_BEGUN;

/// Typical size of the header and metadata in a job's frame, in bytes. Does not include names.
const FRAME_BYTES: usize = 128;

/// Error message about a peer that sent out-of-band data.
const OUT_OF_BAND: &str = "the peer sent out-of-band data, which the protocol does not allow";

/// The data plane's record of a job. Policy stores it boxed and moves the box with every action.
#[derive(Default)]
pub(crate) struct JobData {
    session: SessionId,
    request: u64,
    operation: Box<str>,
    tenant: Box<str>,
    trace: Option<Box<Trace>>,
    payload_bytes: usize,
    priority: Priority,
    /// Metrics label of the job's tenant.
    label: u32,
    /// Number of attempts in all bulkheads that passed the job on. Policy does not count these attempts.
    earlier_attempts: u32,
    held: HeldPayload,
    /// Position of the job's frame among the bytes sent to the worker.
    position: JobPosition,
    charge: Charge,
    /// Exit status of the program that ran the job, if known.
    status: Option<i32>,
    /// Last crash after which policy decided to retry the job in the current bulkhead.
    retried: Option<Box<RetriedCrash>>,
    /// State needed to pass the job on to a fallback.
    fallback: Option<Box<FallbackState>>,
}

impl JobData {
    /// Returns the payload, if it is in memory.
    fn payload(&self) -> Option<&[u8]> {
        match self.payload_bytes {
            0 => Some(&[]),
            _ if self.held.file.is_some() => None,
            _ => self.held.copy.as_deref().or(self.held.payload.as_deref()),
        }
    }

    fn trace_id(&self) -> Option<&str> {
        self.trace.as_deref().map(Trace::id)
    }

    /// Prepares the record of a job that is passed on after `attempts` attempts in the current bulkhead.
    fn pass_on(&mut self, attempts: u32) {
        self.earlier_attempts += attempts;
        (self.status, self.retried) = (None, None);
    }
}

/// Returns the number of bytes that a job occupies on the link to a worker. `own` is the total size of the job's
/// payload and names.
fn link_bytes(own: usize) -> u32 {
    u32::try_from(own + FRAME_BYTES).unwrap_or(u32::MAX)
}

/// Payload of an unfinished job, as held by the data plane.
#[derive(Default)]
struct HeldPayload {
    /// Payload of a job that is waiting. If the job can be retried, a large payload is kept until the job ends. Counts
    /// towards the memory limit for waiting data.
    payload: Option<Vec<u8>>,
    /// Copy of a small payload, kept while a worker has the job.
    copy: Option<Box<[u8]>>,
    /// Location of the payload, if the payload is in a memory file.
    file: Option<Box<LeasedPayload>>,
    /// True if the payload might have to be sent again. Always true for small payloads, because a worker can die
    /// before reading the job.
    is_resendable: bool,
}

impl HeldPayload {
    fn is_empty(&self) -> bool {
        self.payload.is_none() && self.copy.is_none() && self.file.is_none()
    }

    /// Returns the number of bytes that count towards the memory limit for waiting data.
    fn bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, Vec::capacity)
    }

    /// Returns the payload to send to a worker: the stored payload or, if there is none, `coming`. Keeps the payload if
    /// the job might have to be sent again.
    fn take_for_worker<'p>(&'p mut self, coming: Payload<'p>) -> Payload<'p> {
        if self.copy.is_some() {
            return self.copy.as_deref().map_or(Payload::NONE, Payload::Copied);
        }
        let payload = match self.payload.take() {
            Some(waited) => Payload::Owned(waited),
            None => coming,
        };
        match payload {
            payload if !self.is_resendable => payload,
            payload @ Payload::File(..) => payload,
            Payload::Owned(bytes) if bytes.len() > INLINE_PAYLOAD_BYTES_MAX => {
                Payload::Copied(self.payload.insert(bytes))
            }
            Payload::Owned(bytes) => {
                self.copy = Some(bytes.as_slice().into());
                Payload::Owned(bytes)
            }
            Payload::Shared(bytes) => {
                self.copy = Some(bytes.as_slice().into());
                Payload::Shared(bytes)
            }
            Payload::Copied(bytes) => {
                self.copy = Some(bytes.into());
                Payload::Copied(bytes)
            }
        }
    }
}

/// The data plane: the event loop and the parts that handle its events.
pub struct DataPlane {
    // The event loop.
    poll: Poll,
    events: Events,
    /// True if the last call to `poll` returned the maximum number of events, so that further events might be pending.
    has_more_events: bool,
    origin: Instant,
    now: Time,
    /// Time of the next periodic checks, or `None` if no part of the data plane needs checks.
    check_at: Option<Time>,
    /// Time of the next deadline, computed by the most recent call to [`DataPlane::finish_iteration`].
    due: Option<Time>,
    limits: DataPlaneLimits,
    is_stopping: bool,
    has_started: bool,
    threads: ThreadMonitor,
    counters: Arc<SharedCounters>,
    // Input and output.
    acceptor: Acceptor,
    access: Access,
    background: Background,
    buffers: Buffers,
    in_process_waker: InProcessWaker,
    intake: Intake,
    keeper: KeeperLink,
    reporter: Reporter,
    unread_loans: UnreadLoans,
    // Parts that do not perform I/O.
    bulkheads: Bulkheads,
    commands: CommandQueue,
    compartments: Compartments,
    crashes: Crashes,
    samples: Samples<SampleSubject>,
    handover: Handover,
    job_lists: JobListQueue,
    leases: Leases,
    links: Links,
    /// Memory used by waiting data: queued jobs, kept payloads, and frames that workers have not read.
    memory: Memory,
    pause_detector: PauseDetector,
    rejections: RejectionReports,
    replays: Replays,
    sessions: Sessions,
    snapshots: SnapshotQueue,
    spans: Spans,
    templates: Templates,
}

/// A connection whose events the event loop handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Session(SessionIndex),
    Link(LinkIndex),
}

impl Endpoint {
    fn token(self) -> Token {
        match self {
            Self::Session(index) => Token(FIRST_CONNECTION + 2 * index.number()),
            Self::Link(index) => Token(FIRST_CONNECTION + 2 * index.number() + 1),
        }
    }

    fn of(token: Token) -> Option<Self> {
        let number = token.0.checked_sub(FIRST_CONNECTION)?;
        Some(if number.is_multiple_of(2) {
            Self::Session(SessionIndex::from_number(number / 2))
        } else {
            Self::Link(LinkIndex::from_number(number / 2))
        })
    }
}

/// Payload of the frame that caused the current event, if any.
enum Incoming<'p> {
    None,
    Borrowed(&'p [u8]),
    Owned(Vec<u8>),
}

impl<'p> Incoming<'p> {
    fn take(&mut self) -> Payload<'p> {
        match std::mem::replace(self, Self::None) {
            Self::None => Payload::NONE,
            Self::Borrowed(bytes) => Payload::Copied(bytes),
            Self::Owned(bytes) => Payload::Owned(bytes),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }

    fn len(&self) -> usize {
        self.bytes().len()
    }
}

/// Dependencies needed to build a [`DataPlane`].
pub struct Components {
    /// Initial configuration.
    pub config: Arc<Config>,
    /// Confinement mechanisms that are available on this machine.
    pub support: Arc<SandboxSupport>,
    /// The bound jobs socket, or `None` in an embedded supervisor, whose clients connect with
    /// [`bulkhead_plane::command::Command::AddInProcessClient`].
    pub listener: Option<UnixListener>,
    /// The keeper, which is already running.
    pub keeper: Keeper,
    /// Channels that carry notices to the control plane.
    pub notices: NoticeSender,
    /// Channel for spans of sampled jobs, or `None` if tracing is off.
    pub spans: Option<SpanSender>,
    /// Counters shared with the control plane.
    pub counters: Arc<SharedCounters>,
    /// Path of the program that `exec` and `library` bulkheads use as their host. `None` if no bulkhead needs this
    /// program.
    pub host: Option<std::path::PathBuf>,
    /// Sorted names of the tenants with separate metrics.
    pub labels: Arc<[String]>,
    /// Monitor of the essential threads.
    pub threads: ThreadMonitor,
    /// Cache of processes known not to be descendants of the supervisor.
    pub unrelated: Arc<UnrelatedProcesses>,
}

impl DataPlane {
    /// Creates a data plane without workers. Also returns a handle for sending commands to the data plane.
    pub fn new(components: Components) -> io::Result<(Self, CommandSender)> {
        let Components {
            config,
            support,
            listener,
            keeper,
            notices,
            spans,
            counters,
            host,
            labels,
            threads,
            unrelated,
        } = components;
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let (sender, commands) = std::sync::mpsc::sync_channel(bulkhead_plane::command::COMMANDS_MAX);
        threads.set_waker(waker.clone());
        let command_sender = CommandSender::new(sender, waker.clone());
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut SourceFd(&keeper.as_raw_fd()), KEEPER, interest)?;
        let (own, own_spool) = (rustix::process::geteuid().as_raw(), counters.own_spool.clone());
        let open_files = open_files::current_limit();
        let unread_loans_max = usize::try_from(open_files / open_files::LIMIT_PER_UNREAD);
        let mut plane = Self {
            acceptor: Acceptor::new(&poll, listener)?,
            poll,
            events: Events::with_capacity(EVENTS_PER_ITERATION_MAX),
            has_more_events: false,
            origin: Instant::now(),
            now: Time::ZERO,
            check_at: None,
            due: None,
            limits: DataPlaneLimits::new(&config.supervisor),
            is_stopping: false,
            has_started: false,
            access: Access::new(&config, own).with_unrelated(unrelated),
            in_process_waker: InProcessWaker::new(waker.clone()),
            background: Background::start(&threads, waker)?,
            threads,
            buffers: Buffers::default(),
            intake: Intake::new()?,
            keeper: KeeperLink::new(keeper),
            reporter: Reporter::new(notices, counters.clone()),
            unread_loans: UnreadLoans::new(unread_loans_max.unwrap_or(usize::MAX)),
            bulkheads: Bulkheads::new(labels),
            commands: CommandQueue::new(commands, command_sender.stop_requests()),
            compartments: Compartments::new(seed()),
            crashes: Crashes::new(),
            samples: Samples::new(),
            handover: Handover::default(),
            leases: Leases::new(open_files),
            links: Links::new(support.ids()),
            memory: Memory::new(own, own_spool),
            pause_detector: PauseDetector::default(),
            rejections: RejectionReports::default(),
            replays: Replays::default(),
            sessions: Sessions::new(),
            job_lists: JobListQueue::default(),
            snapshots: SnapshotQueue::default(),
            spans: Spans::new(spans, counters.clone()),
            templates: Templates::default(),
            counters,
        };
        for bulkhead in &config.bulkheads {
            let inputs =
                SpecInputs { host: host.as_deref(), support: &support, labels: plane.bulkheads.labels() };
            let spec = BulkheadSpec::new(bulkhead, inputs);
            spec.program.log_warnings(&bulkhead.name);
            plane.bulkheads.add(&mut plane.compartments, spec, plane.now);
        }
        Ok((plane, command_sender))
    }

    /// Runs the data plane until all bulkheads have stopped. Returns an error if [`DataPlane::run_iteration`] or
    /// [`DataPlane::end`] fails.
    pub fn run(mut self) -> io::Result<()> {
        self.start();
        while self.is_running() {
            let wait_time = self.finish_iteration();
            self.run_iteration(wait_time)?;
        }
        self.end()
    }

    /// Starts the first workers. A thread that also does other work calls this function instead of [`DataPlane::run`].
    /// Such a thread must call [`DataPlane::finish_iteration`] and [`DataPlane::run_iteration`] alternately while
    /// [`DataPlane::is_running`] returns true.
    pub fn start(&mut self) {
        self.threads.mark_started();
        self.read_clock();
        for index in self.compartments.indices() {
            self.apply(index, Event::Start, Incoming::None);
        }
    }

    /// Returns false once all bulkheads have stopped or an essential thread has exited.
    pub fn is_running(&self) -> bool {
        !self.is_over() && self.threads.lost().is_none()
    }

    /// Completes the previous iteration and writes its output. Returns the maximum time that the caller may
    /// sleep before the next iteration, or `None` if no timer is set. The caller must wake up earlier if
    /// [`DataPlane::event_descriptor`] becomes readable.
    pub fn finish_iteration(&mut self) -> Option<Duration> {
        self.report_failed_spawns();
        self.report_starvation_results();
        self.assign_workers();
        self.advance_replays();
        self.continue_removals();
        self.enforce_memory_limit(None);
        self.advance_handover();
        self.flush_connections();
        self.links.drop_closed();
        self.offer_leases();
        self.flush_connections();
        self.pass_on_sessions();
        self.spawn_queued_workers();
        self.set_timers();
        self.publish_memory();
        self.sessions.recycle();
        self.links.recycle();
        self.check_started();
        self.schedule_checks();
        self.due = self.next_due();
        self.wait_time(self.due)
    }

    /// Returns a descriptor that becomes readable when an event arrives.
    pub fn event_descriptor(&self) -> io::Result<OwnedFd> {
        self.poll.registry().as_fd().try_clone_to_owned()
    }

    /// Waits for events for at most `wait_time`, and handles them. Returns an error if `epoll_wait(2)` fails, or if the
    /// keeper is lost and cannot be replaced.
    pub fn run_iteration(&mut self, wait_time: Option<Duration>) -> io::Result<()> {
        let may_wait = wait_time != Some(Duration::ZERO) && self.in_process_waker.prepare_sleep();
        let wait_time = if may_wait { wait_time } else { Some(Duration::ZERO) };
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let polled = self.poll.poll(&mut events, wait_time);
        self.in_process_waker.unpark();
        let heard = match polled {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            // There are no events if a signal has interrupted the call.
            Ok(()) | Err(_) => {
                self.has_more_events = events.iter().nth(EVENTS_PER_ITERATION_MAX - 1).is_some();
                self.read_clock();
                let was_paused = self.detect_pause();
                self.handle_events(&events, was_paused)
            }
        };
        self.events = events;
        heard
    }

    /// Returns `Ready` if an in-process client has signaled activity, in which case it is enough to call
    /// [`DataPlane::handle_in_process_clients`]. Otherwise, the next signal wakes the task to which `context` belongs.
    pub fn poll_in_process_clients(&self, context: &mut Context<'_>) -> Readiness<()> {
        self.in_process_waker.poll_ready(context)
    }

    /// Handles the input of in-process clients without waiting. Does not handle socket events, which are handled in the
    /// next iteration.
    pub fn handle_in_process_clients(&mut self) -> io::Result<()> {
        self.in_process_waker.unpark();
        self.read_clock();
        let was_paused = self.detect_pause();
        self.handle_events(&Events::with_capacity(0), was_paused)
    }

    /// Shuts down the keeper and all workers. Returns an error if an essential thread exited before this function was
    /// called.
    pub fn end(self) -> io::Result<()> {
        match self.threads.lost() {
            Some(name) => Err(self.abort(name)),
            None => {
                self.shut_down();
                Ok(())
            }
        }
    }

    fn handle_events(&mut self, events: &Events, was_paused: bool) -> io::Result<()> {
        // Workers and the keeper come first, so that a large number of clients cannot delay heartbeats and reports.
        for link in self.links.take_unfinished_reads(self.now) {
            self.read_link(link);
        }
        self.receive_transfers();
        let mut has_others = self.acceptor.is_pending();
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (KEEPER, _) => self.keeper_ready(),
                (TRANSFER, _) if event.is_read_closed() && self.handover.is_under_way() => {
                    self.close_transfer();
                }
                (_, Some(link @ Endpoint::Link(_))) => self.handle_readiness(link, event),
                _ => has_others = true,
            }
        }
        self.handle_deferred_reports();
        if has_others {
            self.handle_other_events(events)?;
        }
        let sessions = &mut self.sessions;
        self.in_process_waker.drain(|session| sessions.in_process_signalled(session));
        self.run_commands();
        self.read_clients();
        if !was_paused {
            self.check_timers();
        }
        Ok(())
    }

    /// Handles clients, new connections, commands, and the results of the background threads.
    fn handle_other_events(&mut self, events: &Events) -> io::Result<()> {
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (LISTENER, _) => self.acceptor.arrived(),
                (WAKER, _) => {
                    self.commands.arrived();
                    self.handle_background_results()?;
                }
                (_, Some(session @ Endpoint::Session(_))) => self.handle_readiness(session, event),
                _ => {}
            }
        }
        if self.acceptor.is_pending() {
            self.accept();
        }
        Ok(())
    }

    fn handle_readiness(&mut self, endpoint: Endpoint, event: &mio::event::Event) {
        if event.is_writable() {
            match endpoint {
                Endpoint::Session(index) => self.sessions.schedule_flush(index),
                Endpoint::Link(index) => self.links.schedule_flush(index),
            }
        }
        if event.is_read_closed() {
            match endpoint {
                Endpoint::Session(index) => self.sessions.peer_closed(index),
                Endpoint::Link(index) => {
                    if let Some(link) = self.links.get_mut(index) {
                        link.peer_closed();
                    }
                }
            }
        }
        if event.is_priority() {
            self.out_of_band(endpoint);
        }
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            match endpoint {
                Endpoint::Session(index) => self.sessions.schedule_read(index),
                Endpoint::Link(index) => self.read_link(index),
            }
        }
    }

    /// Rejects a peer that has sent out-of-band bytes. Such bytes cannot be handled like other input, because the
    /// kernel reports them only once and does not preserve their order relative to other bytes.
    fn out_of_band(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => self.reject_session(index, RejectReason::Invalid, OUT_OF_BAND),
            // If the worker's process is not known yet, `worker_spawned` checks for out-of-band bytes later.
            Endpoint::Link(index) if self.links.get(index).is_some_and(Link::is_running) => {
                self.end_link_for_violation(index, OUT_OF_BAND.to_owned());
            }
            Endpoint::Link(_) => {}
        }
    }

    // Time.

    fn read_clock(&mut self) {
        self.now = Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    fn next_due(&self) -> Option<Time> {
        let low_priority_at = self.sessions.low_priority_at().filter(|_| !self.handover.pauses_reading());
        let accept_at = self.acceptor.accept_at();
        let (timer, resume_at) = (self.compartments.next_timer(), self.links.resume_at());
        let sample_at = self.samples.next_due();
        [timer, self.check_at, resume_at, accept_at, low_priority_at, sample_at].into_iter().flatten().min()
    }

    fn wait_time(&self, due: Option<Time>) -> Option<Duration> {
        let has_more = self.has_more_events
            || self.links.has_unfinished_reads()
            || self.sessions.has_input() && !self.handover.pauses_reading()
            || self.commands.is_waiting()
            || !self.snapshots.is_empty()
            || !self.job_lists.is_empty();
        // A report about a failed spawn can cause further failures, and there may be more workers to start.
        if has_more || self.links.has_failed_spawns() || self.keeper.has_worker_orders() {
            return Some(Duration::ZERO);
        }
        // Counts from the start of the iteration, because another clock reading would cost more than it gains. epoll has
        // a resolution of one millisecond. Rounds up, so that the loop does not wake just before the deadline.
        let wait = due?.since(self.now);
        Some(Duration::from_millis(u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)))
    }

    /// Updates the timers of all compartments to which events were applied. Called once per iteration.
    fn set_timers(&mut self) {
        while let Some(index) = self.compartments.next_touched() {
            self.bulkheads.record_load(&mut self.compartments, index, self.now);
            self.compartments.set_timer(index);
        }
    }

    fn check_timers(&mut self) {
        self.check_samples();
        self.set_timers();
        while let Some(index) = self.compartments.pop_due(self.now) {
            self.apply(index, Event::Tick, Incoming::None);
        }
        if self.check_at.is_some_and(|at| at <= self.now) {
            self.check_at = None;
            self.check_sessions();
            self.report_skipped_rejections();
            self.check_links();
            self.check_leases();
            self.check_templates();
            self.check_keeper();
            self.report_skipped_crashes();
            self.report_skipped_fallbacks();
        }
    }

    /// Schedules the next periodic checks if any part of the data plane needs checks.
    fn schedule_checks(&mut self) {
        let needs_checks = self.sessions.needs_checks()
            || self.acceptor.needs_checks()
            || self.links.needs_checks()
            || self.leases.needs_checks()
            || self.handover.needs_checks()
            || self.unread_loans.needs_checks()
            || self.keeper.awaits_pong()
            || self.templates.needs_checks()
            || self.rejections.needs_checks()
            || self.crashes.needs_checks()
            || self.bulkheads.needs_checks();
        if needs_checks && self.check_at.is_none() {
            self.check_at = Some(self.now + CHECK_INTERVAL);
        }
    }

    /// Detects a pause of the supervisor. Returns true if timers must not fire until the next iteration, so that
    /// replies that arrived during the pause are handled first.
    fn detect_pause(&mut self) -> bool {
        let clock = clock_gettime(ClockId::Boottime);
        let boot_ns = clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64;
        let Some((late, event)) = self.pause_detector.detect(self.now, boot_ns, self.due) else {
            return false;
        };
        self.keeper.restart_timeout(self.now);
        self.sessions.extend_timeouts(late, self.now);
        for index in self.compartments.indices() {
            self.apply(index, Event::SupervisorPaused, Incoming::None);
        }
        event.into_iter().for_each(|what| self.reporter.supervisor_event(Severity::Warning, what));
        true
    }

    /// Reports that the supervisor has started, if all compartments have started and this has not been reported yet.
    fn check_started(&mut self) {
        if !self.has_started && self.compartments.values().all(|compartment| compartment.has_started()) {
            self.has_started = true;
            self.reporter.states_have_changed();
            self.reporter.milestone(Milestone::Started);
        }
    }

    // Events and actions.

    /// Applies an event to a compartment and performs the resulting actions.
    fn apply(
        &mut self,
        index: CompartmentIndex,
        event: Event<Box<JobData>>,
        mut incoming: Incoming<'_>,
    ) -> Option<JobId> {
        let now = self.now;
        // An event can arrive after its compartment has been removed.
        let compartment = self.compartments.get_mut(index)?;
        // The list is moved out of `self`, because performing an action can apply another event, which also needs a
        // list.
        let mut actions = std::mem::take(&mut self.buffers.actions);
        let job = compartment.policy.apply(now, event, &mut actions);
        for action in actions.drain(..) {
            self.perform(index, action, &mut incoming);
        }
        self.buffers.actions = actions;
        self.compartments.touch(index);
        if self.compartments[index].tenant.is_some() {
            self.bulkheads.update_tenant(&mut self.compartments, index, now);
        }
        if let Some(job) = job {
            self.keep_payload(index, job, incoming);
        }
        job
    }

    /// Keeps the payload of a job that was accepted but not yet dispatched, and charges its memory. A payload in a
    /// memory file is charged, but stays in the file.
    fn keep_payload(&mut self, index: CompartmentIndex, job: JobId, incoming: Incoming<'_>) {
        let policy = &mut self.compartments[index].policy;
        if policy.record_mut(job).is_some_and(|record| record.held.file.is_some()) {
            if policy.is_waiting(job) {
                self.charge(index, job, ChargeKind::Waiting);
            }
            return;
        }
        let payload = match incoming {
            Incoming::None => return,
            Incoming::Borrowed([]) => Vec::new(),
            Incoming::Borrowed(bytes) => bytes.to_vec(),
            Incoming::Owned(bytes) => bytes,
        };
        if let Some(record) = self.compartments[index].policy.record_mut(job) {
            record.held.payload = Some(payload);
            self.charge(index, job, ChargeKind::Waiting);
        }
    }

    fn perform(
        &mut self,
        index: CompartmentIndex,
        action: Action<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) {
        match action {
            Action::Dispatch { worker, job, remaining, is_prefetched } => {
                self.dispatch((index, worker), job, (remaining, is_prefetched), incoming);
            }
            Action::SendOutcome(answer) => self.answer(index, answer, incoming),
            Action::Recalled { worker, job } => self.job_recalled(index, worker, job),
            Action::Cancel { worker, job } => {
                let link = self.links.of_worker(&self.compartments, (index, worker));
                if !self.is_held(link, HeldAction::Cancel(job)) {
                    self.send((index, worker), (kind::CANCEL_JOB, job.0), &Empty);
                }
            }
            Action::Spawn { worker, slot, restart_cause } => {
                self.bulkheads.count_restart(&self.compartments[index], restart_cause);
                self.keeper.queue_worker(WorkerOrder { compartment: index, worker, slot });
            }
            Action::Drain { worker } => self.send((index, worker), (kind::DRAIN, 0), &Empty),
            Action::Kill { worker, reason } => self.kill(index, worker, &reason),
            Action::RecordCpuTime { worker } => self.watch(index, worker),
            Action::CheckCpuTime { worker } => self.check_starvation(index, worker),
            Action::SetMaxInFlight { worker, max_in_flight } => {
                self.send((index, worker), (kind::LIMITS, 0), &Limits { max_in_flight });
            }
            Action::Report(note) => self.report_note(index, note),
        }
    }

    /// Writes the output of the current iteration, once per connection.
    fn flush_connections(&mut self) {
        // Disconnecting a client that has too many unread bytes cancels its jobs, which produces further output.
        loop {
            if let Some(index) = self.sessions.next_dirty() {
                self.flush_session(index);
            } else if let Some(index) = self.links.next_dirty() {
                self.flush_link(index);
            } else {
                return;
            }
        }
    }

    fn snapshot_source(&self) -> SnapshotSource<'_> {
        SnapshotSource::new(&self.bulkheads, &self.compartments, &self.links, self.now)
    }

    // Reports from the keeper.

    fn keeper_ready(&mut self) {
        if self.keeper.serving().and_then(Keeper::flush).is_err() {
            return self.keeper_lost();
        }
        loop {
            // Deferred reports come first, because they are older.
            self.handle_deferred_reports();
            match self.keeper.serving().and_then(Keeper::receive) {
                Ok(Some(report)) => self.handle_report(report),
                Ok(None) => break,
                Err(_) => return self.keeper_lost(),
            }
        }
    }

    fn handle_deferred_reports(&mut self) {
        while let Some(report) = self.keeper.next_deferred_report() {
            self.handle_report(report);
        }
    }

    fn handle_report(&mut self, report: Report) {
        self.keeper.report_received();
        match report {
            Report::Started { .. } => {
                self.counters.keeper_pid.store(self.keeper.pid().unwrap_or(0), Ordering::Relaxed);
            }
            Report::Spawned { worker, pid, .. } if self.templates.spawned(self.now, worker, pid) => {
                self.forward_template_outputs();
            }
            Report::Spawned { worker, pid, pidfd, observed } => {
                self.worker_spawned(worker, pid, pidfd, observed);
            }
            Report::Sampled { worker, result } => self.sample_taken(worker, Some(result)),
            Report::Violation { worker, process, call } => self.report_violation(worker, process, call),
            Report::SpawnFailed { worker, step, error } => {
                let message = format!("failed to start the template: {step}: {error}");
                if !self.update_templates(|it, _| it.failed(worker, &message)) {
                    self.spawn_failed(worker, &step, &error);
                }
            }
            Report::Template { worker, message } => {
                self.update_templates(|it, now| it.message(now, worker, message));
            }
            Report::Exited { worker, exit, usage } => {
                if !self.update_templates(|it, _| it.ended(worker, Some(death_of(exit, None)))) {
                    self.worker_exited(worker, exit, usage);
                }
            }
            Report::Reaped { worker } => {
                self.worker_reaped(worker);
                self.update_templates(|it, _| it.reaped(worker));
            }
            Report::Pong => {}
            Report::Unkillable { count } => {
                let detail = format!("{count} remain");
                self.reporter.trouble("processes of a dead worker cannot be killed", &detail);
            }
        }
    }

    /// Handles the results of the background threads. Returns an error if the keeper cannot be replaced.
    fn handle_background_results(&mut self) -> io::Result<()> {
        while let Some(done) = self.background.done() {
            match done {
                Done::KeeperSwept(swept) => {
                    swept?;
                    self.update_templates(|it, _| it.keeper_lost());
                    self.keeper_reaped();
                }
                Done::Keeper(keeper) => self.keeper_replaced(keeper)?,
                Done::Looked { compartment, worker, is_starved } => {
                    self.apply(compartment, Event::CpuTimeChecked { worker, is_starved }, Incoming::None);
                }
                Done::FilesMade { lease, bytes, files } => {
                    self.update_leases(|it, _| it.files_created(lease, bytes, files));
                }
                Done::Watched | Done::FilesFreed => {}
            }
        }
        Ok(())
    }

    // Commands.

    /// Performs pending commands, up to the maximum per iteration.
    fn run_commands(&mut self) {
        for _ in 0..self.commands.take_stops() {
            self.stop();
        }
        if !self.snapshots.is_empty() {
            let mut snapshots = std::mem::take(&mut self.snapshots);
            snapshots.advance(&self.snapshot_source());
            self.snapshots = snapshots;
        }
        if !self.job_lists.is_empty() {
            self.update_job_lists(|lists, source| lists.advance(source));
        }
        while let Some(command) = self.commands.next() {
            self.run_command(command);
        }
    }

    fn update_job_lists(&mut self, update: impl FnOnce(&mut JobListQueue, &JobListSource<'_>)) {
        let mut lists = std::mem::take(&mut self.job_lists);
        let source = JobListSource {
            bulkheads: &self.bulkheads,
            compartments: &self.compartments,
            client: &|session| self.sessions.of(session).map(Session::client_name),
            now: self.now,
        };
        update(&mut lists, &source);
        self.job_lists = lists;
    }

    fn run_command(&mut self, command: Command) {
        self.count_http_rejections();
        // The result is dropped if the sender of the command is gone.
        match command {
            Command::Listen(listener) => {
                if let Err(error) = self.acceptor.replace_listener(&self.poll, listener) {
                    self.reporter.trouble("failed to listen on the jobs socket", &error.to_string());
                }
            }
            Command::Handover(command) => self.run_handover_command(*command),
            Command::Snapshot { bulkhead, reply } => {
                let mut snapshots = std::mem::take(&mut self.snapshots);
                snapshots.request(&self.snapshot_source(), bulkhead.as_deref(), reply);
                self.snapshots = snapshots;
            }
            Command::ListJobs { request, reply } => {
                self.update_job_lists(|lists, source| lists.request(source, request, reply));
            }
            Command::CancelJob { bulkhead, job, reply } => {
                self.reply(reply, |it| it.cancel_job(&bulkhead, job));
            }
            Command::Readiness { reply } => drop(reply.send(self.bulkheads.readiness(&self.compartments))),
            Command::Scrape { reply } => drop(reply.send(self.scrape())),
            Command::Steer { bulkhead, action, reply } => self.reply(reply, |it| it.steer(&bulkhead, action)),
            Command::Change { bulkhead, change, reply } => {
                self.reply(reply, |it| it.change(&bulkhead, &change));
            }
            Command::TenantSnapshot { bulkhead, tenant, reply } => {
                drop(reply.send(self.snapshot_source().tenant_snapshot(&bulkhead, &tenant)));
            }
            Command::ChangeTenant { bulkhead, tenant, change, reply } => {
                self.reply(reply, |it| it.change_tenant(&bulkhead, &tenant, &change));
            }
            Command::Observe { bulkhead, reply } => {
                let (compartments, now) = (&mut self.compartments, self.now);
                drop(reply.send(self.bulkheads.observation(compartments, now, &bulkhead)));
            }
            Command::WorkerProcesses { reply } => drop(reply.send(self.worker_processes())),
            Command::ReportMemory { bulkhead, pid, generation, rss_bytes } => {
                self.report_worker_memory(&bulkhead, pid, generation, rss_bytes);
            }
            Command::ReportTemporaryFolder { worker, bytes, bytes_without_forked, template } => {
                self.check_temporary_folder(worker, (bytes, bytes_without_forked), template);
            }
            Command::Replay { request, accepted, done } => {
                let _ = accepted.send(self.replay(request, done));
            }
            Command::AddInProcessClient { end } => self.open_in_process_session(end),
            Command::AddClient { socket, permit, client } => {
                self.open_control_session(socket, permit, client)
            }
            Command::AddSpool { token, spool } => self.memory.add_spool(Owner::Token(token), spool),
            Command::ReportRejection { rejection, .. } => {
                self.report_rejection(SocketKind::Admin, rejection);
            }
            Command::Reload { reload, reply } => self.reply(reply, |it| it.apply_reload(*reload)),
            Command::TryReload { reload, reply } => {
                drop(reply.send(self.bulkheads.dropped_changes(&self.compartments, &reload)));
            }
            Command::Summarise => self.send_summary(),
            Command::ReapOrphans { reply } => drop(reply.send(self.keeper.reap_orphans())),
        }
    }

    /// Performs a command that changes the state of bulkheads, and sends the reply.
    fn reply<T>(&mut self, reply: oneshot::Sender<T>, perform: impl FnOnce(&mut Self) -> T) {
        let result = perform(self);
        self.reporter.states_have_changed();
        // Fails only if the receiver of the reply is gone.
        let _ = reply.send(result);
    }

    /// Adds the jobs that the HTTP server has rejected to the statistics.
    fn count_http_rejections(&mut self) {
        for (job, count) in self.counters.rejected_jobs.take() {
            let Some(bulkhead) = self.bulkheads.find(&job.bulkhead) else { continue };
            let key = (job.priority, &*job.tenant);
            for _ in 0..count {
                self.bulkheads.count_rejected(&mut self.compartments, self.now, bulkhead, key, job.reason);
            }
        }
    }

    /// Collects the values for the metrics.
    fn scrape(&mut self) -> Scrape {
        Scrape {
            clients: self.sessions.clients() as u64,
            buffered_bytes: self.memory.held_in_all() as u64,
            memory_file_bytes: self.leases.bytes(),
            labels: self.bulkheads.labels().clone(),
            bulkheads: self.bulkheads.scrape(&self.compartments, self.now, self.access.has_rules()),
        }
    }

    /// Returns the processes of all workers, each with its bulkhead.
    fn worker_processes(&self) -> Vec<WorkerProcess> {
        let process = |link: &Link| {
            let compartment = &self.compartments[link.compartment()];
            Some(self.bulkheads.worker_process(compartment, link.pid()?, link.worker()))
        };
        self.links.values().filter_map(process).collect()
    }

    // Shutdown.

    fn is_over(&self) -> bool {
        self.is_stopping && self.compartments.values().all(|c| c.policy.is_stopped())
    }

    /// Waits at most one second for clients to read their last outcomes, and then shuts down the keeper.
    fn shut_down(mut self) {
        self.threads.begin_shutdown();
        self.counters.has_ended.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        self.handle_last_events();
        self.counters.has_answered_all.store(true, Ordering::SeqCst);
        loop {
            for index in self.sessions.indices() {
                self.flush_session(index);
            }
            if self.sessions.unread_bytes() == 0 || Instant::now() >= until {
                break;
            }
            let mut events = Events::with_capacity(EVENTS_PER_ITERATION_MAX);
            let polled = self.poll.poll(&mut events, Some(Duration::from_millis(20)));
            if polled.is_err_and(|error| error.kind() != std::io::ErrorKind::Interrupted) {
                break;
            }
        }
        self.end_keeper();
    }

    /// Shuts down the keeper and all workers, because an essential thread has exited.
    fn abort(self, name: &str) -> io::Error {
        self.threads.begin_shutdown();
        self.counters.has_ended.store(true, Ordering::SeqCst);
        self.end_keeper();
        io::Error::other(format!("the thread or task '{name}' has exited"))
    }

    /// Reads from all clients one last time. All bulkheads have stopped, so every new job is rejected.
    fn handle_last_events(&mut self) {
        while let Some(command) = self.commands.next_unlimited() {
            if let Command::AddClient { .. } | Command::AddInProcessClient { .. } = command {
                self.run_command(command);
            }
        }
        for index in self.sessions.indices() {
            self.read_session(index, usize::MAX);
            // A client that keeps sending is disconnected like the others, because all its outcomes have already been
            // sent.
            self.abandon_frame(index, RejectReason::Draining, "the supervisor is stopping");
        }
    }

    fn end_keeper(self) {
        if let Err(error) = self.keeper.end(&self.background) {
            tracing::error!("failed to shut down the keeper: {error}");
        }
    }
}

/// Returns a number that differs between runs of the supervisor. Used only for jitter.
fn seed() -> u64 {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    clock.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40)
}

//! The data plane: a thread that owns every socket, every bulkhead and every job.
//!
//! Each iteration of the event loop takes new events (a frame, a death, a timer, a command) and applies each event to
//! a bulkhead. The loop then performs the actions that policy returns, and writes each socket once at the end. The
//! data plane decides nothing itself. It never blocks or sleeps, and never formats text or writes a log. Work that
//! could block runs on another thread (`background.rs`).
//!
//! From `/proc` the data plane reads only `stat`, at about 7 µs each. This happens for the ancestors of a process
//! that connects for the first time, and for a worker that closed the link a second ago and is not reported dead.

mod acceptor;
mod background;
mod buffers;
mod bulkheads;
mod client_end;
mod client_frames;
mod command_queue;
mod commands;
mod compartments;
mod crashes;
mod demand;
pub mod descriptors;
mod fair_queue;
mod fallback;
mod in_process_waker;
mod journal;
mod keeper_link;
mod keeper_reports;
mod last_iteration;
mod leases;
mod link_table;
mod links;
mod memory;
mod memory_files;
mod metrics;
mod operator_events;
mod outcomes;
mod output;
mod pauses;
mod prefetch;
mod read_position;
mod rejections;
mod reload;
mod replay;
mod reporter;
mod session_table;
mod sessions;
mod shares;
mod slab;
mod snapshot_sums;
mod snapshots;
mod spans;
mod start_failures;
mod starvation;
mod submits;
mod templates;
mod temporary_folders;
mod tenants;
mod time_budget;
mod unread_loans;
mod unsolicited_frames;
mod worker_frames;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll as Readiness};
use std::time::{Duration, Instant};

use bulkhead_config::Config;
use bulkhead_keeper::Keeper;
use bulkhead_plane::access::Access;
use bulkhead_plane::command::Commander;
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::notices::Speaker;
use bulkhead_plane::reload::{BulkheadSpec, SpecInputs};
use bulkhead_plane::span::SpanSender;
use bulkhead_plane::threads::Fate;
use bulkhead_policy::{Action, Event, Time};
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::worker_protocol::{Empty, Limits};
use bulkhead_shared::{JobId, Priority, RejectReason};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use acceptor::Acceptor;
use background::Background;
use buffers::Buffers;
use bulkheads::Bulkheads;
use command_queue::CommandQueue;
use compartments::Compartments;
use fallback::FallbackState;
use in_process_waker::InProcessWaker;
use keeper_link::{KeeperLink, WorkerOrder};
use leases::{LeasedPayload, Leases};
use link_table::Links;
use memory::{Charge, Memory};
use reporter::Reporter;
use session_table::Sessions;
use slab::{CompartmentIndex, LinkIndex, SessionId, SessionIndex, SlabIndex};
use spans::Trace;

/// Maximum number of socket events per iteration.
const EVENTS_PER_ITERATION_MAX: usize = 1024;

/// Interval between periodic checks, such as checks for stalled peers. Checks run only while needed.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const KEEPER: Token = Token(2);
const FIRST_CONNECTION: usize = 4;

/// Readiness events to poll for. `PRIORITY` reports out-of-band data, which is a protocol violation.
const INTEREST: Interest = Interest::READABLE.add(Interest::WRITABLE).add(Interest::PRIORITY);

/// Message for a peer that has sent out-of-band data.
const OUT_OF_BAND: &str = "the peer sent bytes out of band, which the protocol does not have";

/// The data plane's record of a job. Policy stores each record boxed and moves the box with every action, so keep
/// records small.
#[derive(Default)]
pub(crate) struct JobData {
    session: SessionId,
    request: u64,
    operation: Box<str>,
    tenant: Box<str>,
    trace: Option<Box<Trace>>,
    payload_bytes: usize,
    priority: Priority,
    /// Label of the tenant in the metrics.
    label: u32,
    held: Held,
    /// Position on the link of the job's worker.
    position: read_position::JobPosition,
    charge: Charge,
    /// Exit status of the program that ran the job.
    status: Option<i32>,
    /// State of a job that can go, or has gone, to a fallback.
    fallback: Option<Box<FallbackState>>,
}

impl JobData {
    /// Returns the payload if it is held in memory.
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
}

/// Payload of a job while it is held here.
#[derive(Default)]
struct Held {
    /// Payload of a waiting job. A large payload of a repeatable job is kept until the job's end. Counts towards the
    /// memory for waiting payloads.
    payload: Option<Vec<u8>>,
    /// Copy of a small payload while a worker has the job.
    copy: Option<Box<[u8]>>,
    /// Set if the payload is in a memory file.
    file: Option<Box<LeasedPayload>>,
    /// True if another worker may need the payload. Always true for a small payload, because a worker can die before
    /// reading the job.
    is_repeatable: bool,
}

impl Held {
    fn is_empty(&self) -> bool {
        self.payload.is_none() && self.copy.is_none() && self.file.is_none()
    }

    /// Returns the number of bytes that count towards the memory for waiting data.
    fn bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, Vec::capacity)
    }

    /// Returns the payload for a worker: the held payload if any, otherwise `coming`. Keeps the payload if it is
    /// repeatable.
    fn take_for_worker<'p>(&'p mut self, coming: Payload<'p>) -> Payload<'p> {
        if self.copy.is_some() {
            return self.copy.as_deref().map_or(Payload::NONE, Payload::Copied);
        }
        let payload = match self.payload.take() {
            Some(waited) => Payload::Owned(waited),
            None => coming,
        };
        match payload {
            payload if !self.is_repeatable => payload,
            payload @ Payload::File(..) => payload,
            Payload::Owned(bytes) if bytes.len() > INLINE_PAYLOAD_BYTES_MAX => {
                Payload::Copied(self.payload.insert(bytes))
            }
            Payload::Owned(bytes) => {
                self.copy = Some(bytes.as_slice().into());
                Payload::Owned(bytes)
            }
            Payload::Copied(bytes) => {
                self.copy = Some(bytes.into());
                Payload::Copied(bytes)
            }
        }
    }
}

/// The data plane: the event loop, and the parts that handle the events.
pub struct DataPlane {
    poll: Poll,
    in_process_waker: InProcessWaker,
    origin: Instant,
    now: Time,
    acceptor: Acceptor,
    commands: CommandQueue,
    reporter: Reporter,
    keeper: KeeperLink,
    background: Background,
    bulkheads: Bulkheads,
    compartments: Compartments,
    sessions: Sessions,
    links: Links,
    templates: templates::Templates,
    /// Memory of waiting data: jobs in queues, kept payloads, and frames that workers have not read.
    memory: Memory,
    leases: Leases,
    buffers: Buffers,
    /// Connections with pending writes.
    dirty: Vec<Endpoint>,
    limits: DataPlaneLimits,
    check_at: Option<Time>,
    /// Next deadline, as of the last `settle`.
    due: Option<Time>,
    events: Events,
    /// True if there were more events than the maximum per iteration.
    has_more_events: bool,
    pause_detector: pauses::PauseDetector,
    is_stopping: bool,
    has_started: bool,
    fate: Fate,
}

/// A connection that the event loop serves.
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

/// Payload that came with the current event.
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

/// Components that a [`DataPlane`] is built from.
pub struct Parts {
    /// Configuration at the start.
    pub config: Arc<Config>,
    /// Confinement mechanisms that this machine supports.
    pub support: Arc<SandboxSupport>,
    /// The bound jobs socket. `None` in an embedded supervisor, whose clients connect with
    /// [`bulkhead_plane::command::Command::Connect`].
    pub listener: Option<UnixListener>,
    /// The running keeper.
    pub keeper: Keeper,
    /// Channels for notices to the control plane.
    pub notices: Speaker,
    /// Channel for spans of sampled jobs, if tracing is on.
    pub spans: Option<SpanSender>,
    /// Counters shared with the control plane.
    pub pulse: Arc<SharedCounters>,
    /// Path of the host for `exec` and `library`, if needed.
    pub host: Option<std::path::PathBuf>,
    /// Sorted names of the tenants that metrics report.
    pub labels: Arc<[String]>,
    /// Supervision of the essential threads.
    pub fate: Fate,
}

impl DataPlane {
    /// Creates a data plane that has not started anything, and the handle for sending commands to the data plane.
    pub fn new(parts: Parts) -> io::Result<(Self, Commander)> {
        let Parts { config, support, listener, keeper, notices, spans, pulse, host, labels, fate } = parts;
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let (sender, commands) = std::sync::mpsc::sync_channel(bulkhead_plane::command::COMMANDS_MAX);
        fate.wake_by(waker.clone());
        let commander = Commander::new(sender, waker.clone());
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut SourceFd(&keeper.as_raw_fd()), KEEPER, interest)?;
        let own = rustix::process::geteuid().as_raw();
        let mut plane = Self {
            origin: Instant::now(),
            now: Time::ZERO,
            acceptor: Acceptor::new(&poll, listener, Access::new(&config, own))?,
            poll,
            commands: CommandQueue::new(commands, commander.stops()),
            reporter: Reporter::new(notices, pulse, spans),
            keeper: KeeperLink::new(keeper),
            in_process_waker: InProcessWaker::new(waker.clone()),
            background: Background::start(&fate, waker)?,
            bulkheads: Bulkheads::new(labels),
            compartments: Compartments::new(seed()),
            sessions: Sessions::new(),
            links: Links::new(support.ids()),
            templates: templates::Templates::default(),
            memory: Memory::new(own),
            leases: Leases::new(),
            buffers: Buffers::default(),
            dirty: Vec::new(),
            limits: DataPlaneLimits::new(&config.supervisor),
            check_at: None,
            due: None,
            events: Events::with_capacity(EVENTS_PER_ITERATION_MAX),
            has_more_events: false,
            pause_detector: pauses::PauseDetector::default(),
            is_stopping: false,
            has_started: false,
            fate,
        };
        for bulkhead in &config.bulkheads {
            let inputs =
                SpecInputs { host: host.as_deref(), support: &support, labels: &plane.bulkheads.labels };
            let spec = BulkheadSpec::new(bulkhead, inputs);
            spec.program.log_warnings(&bulkhead.name);
            plane.add_bulkhead(spec);
        }
        Ok((plane, commander))
    }

    /// Runs until everything is stopped. Errors are those of [`DataPlane::run_iteration`] and [`DataPlane::end`].
    pub fn run(mut self) -> io::Result<()> {
        self.start();
        while self.is_running() {
            let wait_time = self.finish_iteration();
            self.run_iteration(wait_time)?;
        }
        self.end()
    }

    /// Orders the first workers. A thread with other work can use this in place of [`DataPlane::run`], and then call
    /// [`DataPlane::settle`] and [`DataPlane::run_iteration`] in turns while [`DataPlane::is_running`] returns true.
    pub fn start(&mut self) {
        self.fate.begin();
        for index in self.compartments.indices() {
            self.apply(index, Event::Start, Incoming::None);
        }
        // Compartments without workers cause no event, so check here as well.
        self.check_started();
    }

    /// Returns true until everything is stopped or an essential thread has ended.
    pub fn is_running(&self) -> bool {
        !self.is_over() && self.fate.lost().is_none()
    }

    /// Completes the previous iteration and writes the output. Returns for how long the caller can sleep unless
    /// [`DataPlane::event_descriptor`] becomes readable, or `None` if no timer is set.
    pub fn finish_iteration(&mut self) -> Option<Duration> {
        self.report_failed_spawns();
        self.report_starvation_results();
        self.assign_workers();
        self.advance_replays();
        self.continue_removals();
        self.enforce_memory_limit(None);
        self.flush_connections();
        self.links.closed.clear();
        self.offer_leases();
        self.spawn_queued_workers();
        self.set_timers();
        self.publish_memory();
        self.sessions.recycle();
        self.links.recycle();
        self.due = self.next_due();
        self.wait_time(self.due)
    }

    /// Returns a descriptor that is readable when an event has arrived.
    pub fn event_descriptor(&self) -> io::Result<OwnedFd> {
        self.poll.registry().as_fd().try_clone_to_owned()
    }

    /// Waits up to `wait_time` for events and applies them. Errors are those of `epoll_wait(2)`, and of a keeper that
    /// can neither be reached nor replaced.
    pub fn run_iteration(&mut self, wait_time: Option<Duration>) -> io::Result<()> {
        let may_wait = wait_time != Some(Duration::ZERO) && self.in_process_waker.prepare_sleep();
        let wait_time = if may_wait { wait_time } else { Some(Duration::ZERO) };
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let polled = self.poll.poll(&mut events, wait_time);
        self.in_process_waker.unpark();
        let heard = match polled {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                self.has_more_events = events.iter().nth(EVENTS_PER_ITERATION_MAX - 1).is_some();
                self.read_clock();
                let was_paused = self.detect_pause(self.due);
                self.handle_events(&events, was_paused)
            }
        };
        self.events = events;
        heard
    }

    /// Returns ready when an in-process client has signalled; [`DataPlane::handle_in_process_clients`] is then sufficient.
    /// Otherwise registers the task to be woken.
    pub fn poll_in_process_clients(&self, context: &mut Context<'_>) -> Readiness<()> {
        self.in_process_waker.poll_ready(context)
    }

    /// Handles the input of in-process clients without waiting. Works like [`DataPlane::run_iteration`], but leaves all
    /// socket events for the next iteration.
    pub fn handle_in_process_clients(&mut self) -> io::Result<()> {
        self.in_process_waker.unpark();
        self.read_clock();
        let was_paused = self.detect_pause(self.due);
        self.handle_events(&Events::with_capacity(0), was_paused)
    }

    /// Ends the keeper and all workers. Returns an error if an essential thread had ended before.
    pub fn end(self) -> io::Result<()> {
        match self.fate.lost() {
            Some(name) => Err(self.abort(name)),
            None => {
                self.shut_down();
                Ok(())
            }
        }
    }

    fn handle_events(&mut self, events: &Events, was_paused: bool) -> io::Result<()> {
        // Workers and the keeper come first, so that a crowd of clients cannot delay their heartbeats and reports.
        self.resume_links();
        let again = std::mem::take(&mut self.links.unfinished_reads);
        again.into_iter().for_each(|link| self.read_link_input(link));
        let mut has_others = self.acceptor.accept_pending;
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (KEEPER, _) => self.keeper_ready(),
                (_, Some(link @ Endpoint::Link(_))) => self.handle_readiness(link, event),
                _ => has_others = true,
            }
        }
        self.handle_deferred_reports();
        if has_others {
            self.handle_other_events(events)?;
        }
        self.handle_in_process_signals();
        self.run_commands();
        self.read_clients();
        if !was_paused {
            self.check_timers();
        }
        Ok(())
    }

    /// Handles clients, new connections, commands, and results of the background threads.
    fn handle_other_events(&mut self, events: &Events) -> io::Result<()> {
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (LISTENER, _) => self.acceptor.accept_pending = true,
                (WAKER, _) => {
                    self.commands.has_commands = true;
                    self.handle_background_results()?;
                }
                (_, Some(session @ Endpoint::Session(_))) => self.handle_readiness(session, event),
                _ => {}
            }
        }
        if self.acceptor.accept_pending {
            self.accept();
        }
        Ok(())
    }

    fn handle_readiness(&mut self, endpoint: Endpoint, event: &mio::event::Event) {
        if event.is_writable() {
            self.schedule_flush(endpoint);
        }
        if event.is_read_closed() {
            self.peer_closed(endpoint);
        }
        if event.is_priority() {
            self.out_of_band(endpoint);
        }
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            self.readable(endpoint);
        }
    }

    /// Records that the peer has closed its side. The end of the stream can follow bytes that arrived at the same
    /// time, and is not reported again. The connection must therefore be read to the end.
    fn peer_closed(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => {
                if let Some(session) = self.sessions.get_mut(index) {
                    session.queue_state.is_read_closed = true;
                }
            }
            Endpoint::Link(index) => {
                if let Some(link) = self.links.get_mut(index) {
                    link.reads.close();
                }
            }
        }
    }

    fn readable(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => self.sessions.schedule_client_read(index),
            Endpoint::Link(index) => self.read_link_input(index),
        }
    }

    /// Ends a connection with out-of-band bytes, which break the order of all other bytes and are reported only once.
    fn out_of_band(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => self.reject_session(index, RejectReason::Invalid, OUT_OF_BAND),
            // If the process of a worker is not known yet, `worker_spawned` checks for out-of-band bytes later.
            Endpoint::Link(index) if self.links.get(index).is_some_and(|link| link.running().is_some()) => {
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
        let (accept_at, low_priority_at) = (self.acceptor.accept_at(), self.sessions.low_priority_at());
        [self.compartments.next_timer(), self.check_at, self.links.resume_at, accept_at, low_priority_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn wait_time(&self, due: Option<Time>) -> Option<Duration> {
        let has_more = self.has_more_events
            || !self.links.unfinished_reads.is_empty()
            || !self.sessions.fair_queue.is_empty()
            || self.commands.is_waiting();
        // Reporting failed spawns can cause more failures, and workers can be waiting to be ordered.
        if has_more || !self.links.failed_spawns.is_empty() || self.keeper.has_worker_orders() {
            return Some(Duration::ZERO);
        }
        // epoll counts in milliseconds. The time is rounded up so that the loop does not wake just before the
        // deadline.
        let wait = due?.since(Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)));
        Some(Duration::from_millis(u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)))
    }

    /// Updates the timers of all compartments with events, once per iteration.
    fn set_timers(&mut self) {
        while let Some(index) = self.compartments.next_touched() {
            self.record_load(index);
            self.compartments.set_timer(index);
        }
    }

    fn check_timers(&mut self) {
        self.set_timers();
        while let Some(index) = self.compartments.pop_due(self.now) {
            self.apply(index, Event::Tick, Incoming::None);
        }
        if self.check_at.is_some_and(|at| at <= self.now) {
            self.check_at = None;
            self.check_sessions();
            self.report_skipped_rejections();
            self.check_closed_links();
            self.check_leases();
            self.check_templates();
            self.forward_pending_outputs();
            self.check_keeper();
            self.report_skipped_crashes();
        }
    }

    fn schedule_checks(&mut self) {
        if self.check_at.is_none() {
            self.check_at = Some(self.now + CHECK_INTERVAL);
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
        // A late event can refer to a compartment that was removed.
        let compartment = self.compartments.get_mut(index)?;
        // Taken out because an action can apply another event, which needs a list too.
        let mut actions = std::mem::take(&mut self.buffers.actions);
        let job = compartment.policy.apply(now, event, &mut actions);
        for action in actions.drain(..) {
            self.perform(index, action, &mut incoming);
        }
        self.buffers.actions = actions;
        self.compartments.touch(index);
        if self.compartments[index].tenant.is_some() {
            self.update_tenant_state(index);
        }
        if let Some(job) = job {
            self.keep_payload(index, job, incoming);
        }
        job
    }

    /// Keeps the payload of a job that was accepted but not dispatched, unless the payload is in a memory file.
    fn keep_payload(&mut self, index: CompartmentIndex, job: JobId, incoming: Incoming<'_>) {
        let policy = &mut self.compartments[index].policy;
        if policy.cargo_mut(job).is_some_and(|record| record.held.file.is_some()) {
            if policy.is_waiting(job) {
                self.charge_waiting(index, job);
            }
            return;
        }
        let payload = match incoming {
            Incoming::None => return,
            Incoming::Borrowed([]) => Vec::new(),
            Incoming::Borrowed(bytes) => bytes.to_vec(),
            Incoming::Owned(bytes) => bytes,
        };
        if let Some(record) = self.compartments[index].policy.cargo_mut(job) {
            record.held.payload = Some(payload);
            self.charge_waiting(index, job);
        }
    }

    fn perform(
        &mut self,
        index: CompartmentIndex,
        action: Action<Box<JobData>>,
        incoming: &mut Incoming<'_>,
    ) {
        match action {
            Action::Dispatch { worker, job, remaining, is_ahead } => {
                self.dispatch(index, worker, job, (remaining, is_ahead), incoming);
            }
            Action::Answer(answer) => self.answer(index, answer, incoming),
            Action::TookBack { worker, job } => self.job_recalled(index, worker, job),
            Action::Cancel { worker, job } => self.send((index, worker), (kind::CANCEL_JOB, job.0), &Empty),
            Action::Spawn { worker, slot, again } => {
                self.count_restart(index, again);
                self.keeper.queue_worker(WorkerOrder { compartment: index, worker, slot });
            }
            Action::Drain { worker } => self.send((index, worker), (kind::DRAIN, 0), &Empty),
            Action::Kill { worker, .. } => self.kill(index, worker),
            Action::Watch { worker } => self.watch(index, worker),
            Action::Look { worker } => self.check_starvation(index, worker),
            Action::Limit { worker, max_in_flight } => {
                self.send((index, worker), (kind::LIMITS, 0), &Limits { max_in_flight });
            }
            Action::Note(note) => self.report_note(index, note),
        }
    }

    fn schedule_flush(&mut self, endpoint: Endpoint) {
        let is_dirty = match endpoint {
            Endpoint::Session(index) => self.sessions.get_mut(index).map(|s| &mut s.is_dirty),
            Endpoint::Link(index) => self.links.get_mut(index).map(|l| &mut l.is_dirty),
        };
        if let Some(flag) = is_dirty
            && !std::mem::replace(flag, true)
        {
            self.dirty.push(endpoint);
        }
    }

    /// Writes the output of this iteration, with a single write per connection.
    fn flush_connections(&mut self) {
        // A client that is disconnected for unread bytes leaves jobs to cancel, which produces more output.
        while !self.dirty.is_empty() {
            let mut dirty = std::mem::take(&mut self.dirty);
            for endpoint in dirty.drain(..) {
                match endpoint {
                    Endpoint::Session(index) => self.flush_session(index),
                    Endpoint::Link(index) => self.flush_link(index),
                }
            }
            if self.dirty.is_empty() {
                self.dirty = dirty;
            }
        }
    }

    // Shutdown.

    fn is_over(&self) -> bool {
        self.is_stopping && self.compartments.values().all(|c| c.policy.is_stopped())
    }

    /// Waits up to a second for clients to read their last answers, then ends the keeper.
    fn shut_down(mut self) {
        self.fate.expect_end();
        self.reporter.pulse.is_over.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        self.handle_last_events();
        loop {
            for index in self.sessions.indices() {
                self.flush_session(index);
            }
            if self.sessions.unread_bytes == 0 || Instant::now() >= until {
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

    /// Ends the keeper and all workers after an essential thread has ended.
    fn abort(self, name: &str) -> io::Error {
        self.fate.expect_end();
        self.reporter.pulse.is_over.store(true, Ordering::SeqCst);
        self.end_keeper();
        io::Error::other(format!("the thread or task '{name}' has ended"))
    }

    fn end_keeper(self) {
        if let Err(error) = self.keeper.end(&self.background) {
            tracing::error!("the keeper ended with an error: {error}");
        }
    }
}

/// Returns a number that differs between runs, used only for jitter.
fn seed() -> u64 {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    clock.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40)
}

//! The data plane: a thread that owns every socket, every bulkhead and every job.
//!
//! Each iteration of the event loop takes new events (a frame, a death, a timer, a command) and applies each event to
//! a bulkhead. The loop then performs the actions that policy returns, and writes each socket once at the end. The
//! data plane decides nothing itself. It never blocks or sleeps, and never formats text or writes a log. Work that
//! could block runs on another thread (`background.rs`).
//!
//! From `/proc` the data plane reads only `stat`, at about 7 µs each. This happens for the ancestors of a process
//! that connects for the first time, and for a worker that closed the link a second ago and is not reported dead.

mod ahead;
mod allowance;
mod background;
mod bell;
mod buffers;
mod bulkheads;
mod client_end;
mod client_frames;
mod commands;
mod compartments;
mod crashes;
mod demand;
pub mod descriptors;
mod ending;
mod entrance;
mod fallback;
mod held_up;
mod journal;
mod keeper_link;
mod leases;
mod lends;
mod link_table;
mod links;
mod memory;
mod memory_files;
mod metrics;
mod notes;
mod notices;
mod outcomes;
mod output;
mod refusals;
mod reload;
mod replay;
mod reporter;
mod reports;
mod session_table;
mod sessions;
mod shares;
mod slab;
mod snapshots;
mod spans;
mod start_failures;
mod starvation;
mod steer;
mod submits;
mod templates;
mod temporary;
mod tenants;
mod turns;
mod unread;
mod view;
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
use bulkhead_plane::command::CommandSender;
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::notices::NoticeSender;
use bulkhead_plane::reload::{BulkheadSpec, SpecInputs};
use bulkhead_plane::span::SpanSender;
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_policy::{Action, Event, Time};
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::kind;
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::worker_protocol::{Empty, Limits};
use bulkhead_shared::{JobId, Priority, RejectReason};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};

use background::Background;
use bell::Bell;
use buffers::Buffers;
use bulkheads::Bulkheads;
use commands::Orders;
use compartments::Compartments;
use entrance::Entrance;
use fallback::FallbackState;
use keeper_link::{KeeperLink, Wanted};
use leases::{Leased, Leases};
use link_table::Links;
use memory::{Charge, Memory};
use reporter::Reporter;
use session_table::Sessions;
use slab::{CompartmentIndex, LinkIndex, SessionId, SessionIndex, SlabIndex};
use spans::Trace;

/// Maximum number of socket events per iteration.
const EVENTS_PER_TURN: usize = 1024;

/// Interval between periodic checks, such as checks for stalled peers. Checks run only while needed.
const HOUSEKEEPING: Duration = Duration::from_millis(250);

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
    given: unread::Given,
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
    file: Option<Box<Leased>>,
    /// True if another worker may need the payload. Always true for a small payload, because a worker can die before
    /// reading the job.
    is_resendable: bool,
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
    fn give<'p>(&'p mut self, coming: Payload<'p>) -> Payload<'p> {
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
    bell: Bell,
    origin: Instant,
    now: Time,
    entrance: Entrance,
    orders: Orders,
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
    housekeeping_at: Option<Time>,
    /// Next deadline, as of the last `settle`.
    due: Option<Time>,
    events: Events,
    /// True if there were more events than the maximum per iteration.
    has_more_events: bool,
    pauses: held_up::Pauses,
    stopping: bool,
    started: bool,
    threads: ThreadMonitor,
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
    /// [`bulkhead_plane::command::Command::AddInProcessClient`].
    pub listener: Option<UnixListener>,
    /// The running keeper.
    pub keeper: Keeper,
    /// Channels for notices to the control plane.
    pub notices: NoticeSender,
    /// Channel for spans of sampled jobs, if tracing is on.
    pub spans: Option<SpanSender>,
    /// Counters shared with the control plane.
    pub counters: Arc<SharedCounters>,
    /// Path of the host for `exec` and `library`, if needed.
    pub host: Option<std::path::PathBuf>,
    /// Sorted names of the tenants that metrics report.
    pub labels: Arc<[String]>,
    /// Supervision of the essential threads.
    pub threads: ThreadMonitor,
}

impl DataPlane {
    /// Creates a data plane that has not started anything, and the handle for sending commands to the data plane.
    pub fn new(parts: Parts) -> io::Result<(Self, CommandSender)> {
        let Parts { config, support, listener, keeper, notices, spans, counters, host, labels, threads } =
            parts;
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let (sender, commands) = std::sync::mpsc::sync_channel(bulkhead_plane::command::COMMANDS_MAX);
        threads.set_waker(waker.clone());
        let command_sender = CommandSender::new(sender, waker.clone());
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut SourceFd(&keeper.as_raw_fd()), KEEPER, interest)?;
        let (own, own_spool) = (rustix::process::geteuid().as_raw(), counters.own_spool.clone());
        let mut plane = Self {
            origin: Instant::now(),
            now: Time::ZERO,
            entrance: Entrance::new(&poll, listener, Access::new(&config, own))?,
            poll,
            orders: Orders::new(commands, command_sender.stop_requests()),
            reporter: Reporter::new(notices, counters, spans),
            keeper: KeeperLink::new(keeper),
            bell: Bell::new(waker.clone()),
            background: Background::start(&threads, waker)?,
            bulkheads: Bulkheads::new(labels),
            compartments: Compartments::new(seed()),
            sessions: Sessions::new(),
            links: Links::new(support.ids()),
            templates: templates::Templates::default(),
            memory: Memory::new(own, own_spool),
            leases: Leases::new(),
            buffers: Buffers::default(),
            dirty: Vec::new(),
            limits: DataPlaneLimits::new(&config.supervisor),
            housekeeping_at: None,
            due: None,
            events: Events::with_capacity(EVENTS_PER_TURN),
            has_more_events: false,
            pauses: held_up::Pauses::default(),
            stopping: false,
            started: false,
            threads,
        };
        for bulkhead in &config.bulkheads {
            let inputs =
                SpecInputs { host: host.as_deref(), support: &support, labels: &plane.bulkheads.labels };
            let spec = BulkheadSpec::new(bulkhead, inputs);
            spec.program.log_warnings(&bulkhead.name);
            plane.open(spec);
        }
        Ok((plane, command_sender))
    }

    /// Runs until everything is stopped. Errors are those of [`DataPlane::take_turn`] and [`DataPlane::end`].
    pub fn run(mut self) -> io::Result<()> {
        self.start();
        while self.goes_on() {
            let patience = self.settle();
            self.take_turn(patience)?;
        }
        self.end()
    }

    /// Orders the first workers. A thread with other work can use this in place of [`DataPlane::run`], and then call
    /// [`DataPlane::settle`] and [`DataPlane::take_turn`] in turns while [`DataPlane::goes_on`] returns true.
    pub fn start(&mut self) {
        self.threads.mark_started();
        for index in self.compartments.indices() {
            self.apply(index, Event::Start, Incoming::None);
        }
        // Compartments without workers cause no event, so check here as well.
        self.check_started();
    }

    /// Returns true until everything is stopped or an essential thread has ended.
    pub fn goes_on(&self) -> bool {
        !self.is_over() && self.threads.lost().is_none()
    }

    /// Completes the previous iteration and writes the output. Returns for how long the caller can sleep unless
    /// [`DataPlane::arrivals`] becomes readable, or `None` if no timer is set.
    pub fn settle(&mut self) -> Option<Duration> {
        self.report_failed_spawns();
        self.report_looks();
        self.settle_tenants();
        self.settle_replays();
        self.settle_leaving();
        self.settle_memory(None);
        self.flush_dirty();
        self.links.gone.clear();
        self.offer_leases();
        self.order_wanted();
        self.set_timers();
        self.tell_memory();
        self.sessions.recycle();
        self.links.recycle();
        self.due = self.next_due();
        self.patience(self.due)
    }

    /// Returns a descriptor that is readable when an event has arrived.
    pub fn arrivals(&self) -> io::Result<OwnedFd> {
        self.poll.registry().as_fd().try_clone_to_owned()
    }

    /// Waits up to `patience` for events and applies them. Errors are those of `epoll_wait(2)`, and of a keeper that
    /// can neither be reached nor replaced.
    pub fn take_turn(&mut self, patience: Option<Duration>) -> io::Result<()> {
        let may_wait = patience != Some(Duration::ZERO) && self.bell.may_sleep();
        let patience = if may_wait { patience } else { Some(Duration::ZERO) };
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let polled = self.poll.poll(&mut events, patience);
        self.bell.rise();
        let heard = match polled {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
            Ok(()) => {
                self.has_more_events = events.iter().nth(EVENTS_PER_TURN - 1).is_some();
                self.read_clock();
                let was_paused = self.mind_pause(self.due);
                self.turn(&events, was_paused)
            }
        };
        self.events = events;
        heard
    }

    /// Returns ready when an in-process client has signalled; [`DataPlane::hear_clients`] is then sufficient.
    /// Otherwise registers the task to be woken.
    pub fn poll_clients(&self, context: &mut Context<'_>) -> Readiness<()> {
        self.bell.poll_rung(context)
    }

    /// Handles the input of in-process clients without waiting. Works like [`DataPlane::take_turn`], but leaves all
    /// socket events for the next iteration.
    pub fn hear_clients(&mut self) -> io::Result<()> {
        self.bell.rise();
        self.read_clock();
        let was_paused = self.mind_pause(self.due);
        self.turn(&Events::with_capacity(0), was_paused)
    }

    /// Ends the keeper and all workers. Returns an error if an essential thread had ended before.
    pub fn end(self) -> io::Result<()> {
        match self.threads.lost() {
            Some(name) => Err(self.give_up(name)),
            None => {
                self.finish();
                Ok(())
            }
        }
    }

    fn turn(&mut self, events: &Events, was_paused: bool) -> io::Result<()> {
        // Workers and the keeper come first, so that a crowd of clients cannot delay their heartbeats and reports.
        self.resume_links();
        let again = std::mem::take(&mut self.links.again);
        again.into_iter().for_each(|link| self.link_readable(link));
        let mut has_others = self.entrance.accept_pending;
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (KEEPER, _) => self.keeper_ready(),
                (_, Some(link @ Endpoint::Link(_))) => self.ready(link, event),
                _ => has_others = true,
            }
        }
        self.hear_late_reports();
        if has_others {
            self.hear_others(events)?;
        }
        self.hear_bell();
        self.obey();
        self.read_clients();
        if !was_paused {
            self.tick();
        }
        Ok(())
    }

    /// Handles clients, new connections, commands, and results of the background threads.
    fn hear_others(&mut self, events: &Events) -> io::Result<()> {
        for event in events {
            match (event.token(), Endpoint::of(event.token())) {
                (LISTENER, _) => self.entrance.accept_pending = true,
                (WAKER, _) => {
                    self.orders.has_commands = true;
                    self.hear_background()?;
                }
                (_, Some(session @ Endpoint::Session(_))) => self.ready(session, event),
                _ => {}
            }
        }
        if self.entrance.accept_pending {
            self.accept();
        }
        Ok(())
    }

    fn ready(&mut self, endpoint: Endpoint, event: &mio::event::Event) {
        if event.is_writable() {
            self.mark_dirty(endpoint);
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
                    session.standing.is_read_closed = true;
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
            Endpoint::Session(index) => self.sessions.want_read(index),
            Endpoint::Link(index) => self.link_readable(index),
        }
    }

    /// Ends a connection with out-of-band bytes, which break the order of all other bytes and are reported only once.
    fn out_of_band(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => self.refuse_session(index, RejectReason::Invalid, OUT_OF_BAND),
            // If the process of a worker is not known yet, `process_runs` checks for out-of-band bytes later.
            Endpoint::Link(index) if self.links.get(index).is_some_and(|link| link.running().is_some()) => {
                self.break_link(index, OUT_OF_BAND.to_owned());
            }
            Endpoint::Link(_) => {}
        }
    }

    // Time.

    fn read_clock(&mut self) {
        self.now = Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    fn next_due(&self) -> Option<Time> {
        let (accept_at, patient_at) = (self.entrance.accept_at(), self.sessions.patient_at());
        [self.compartments.next_timer(), self.housekeeping_at, self.links.resume_at, accept_at, patient_at]
            .into_iter()
            .flatten()
            .min()
    }

    fn patience(&self, due: Option<Time>) -> Option<Duration> {
        let has_more = self.has_more_events
            || !self.links.again.is_empty()
            || !self.sessions.turns.is_empty()
            || self.orders.is_waiting();
        // Reporting failed spawns can cause more failures, and workers can be waiting to be ordered.
        if has_more || !self.links.failed_spawns.is_empty() || self.keeper.has_wanted() {
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
            self.count_demand(index);
            self.compartments.set_timer(index);
        }
    }

    fn tick(&mut self) {
        self.set_timers();
        while let Some(index) = self.compartments.pop_due(self.now) {
            self.apply(index, Event::Tick, Incoming::None);
        }
        if self.housekeeping_at.is_some_and(|at| at <= self.now) {
            self.housekeeping_at = None;
            self.look_after_sessions();
            self.look_after_refusals();
            self.look_after_links();
            self.look_after_leases();
            self.look_after_templates();
            self.hand_outputs_over();
            self.look_after_keeper();
            self.tell_unreported();
        }
    }

    fn want_housekeeping(&mut self) {
        if self.housekeeping_at.is_none() {
            self.housekeeping_at = Some(self.now + HOUSEKEEPING);
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
            self.observe_tenant(index);
        }
        if let Some(job) = job {
            self.keep_payload(index, job, incoming);
        }
        job
    }

    /// Keeps the payload of a job that was accepted but not dispatched, unless the payload is in a memory file.
    fn keep_payload(&mut self, index: CompartmentIndex, job: JobId, incoming: Incoming<'_>) {
        let policy = &mut self.compartments[index].policy;
        if policy.record_mut(job).is_some_and(|record| record.held.file.is_some()) {
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
        if let Some(record) = self.compartments[index].policy.record_mut(job) {
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
            Action::Dispatch { worker, job, remaining, is_prefetched } => {
                self.dispatch(index, worker, job, (remaining, is_prefetched), incoming);
            }
            Action::SendOutcome(answer) => self.answer(index, answer, incoming),
            Action::Recalled { worker, job } => self.job_taken_back(index, worker, job),
            Action::Cancel { worker, job } => self.send((index, worker), (kind::CANCEL_JOB, job.0), &Empty),
            Action::Spawn { worker, slot, restart_cause } => {
                self.count_restart(index, restart_cause);
                self.keeper.want(Wanted { compartment: index, worker, slot });
            }
            Action::Drain { worker } => self.send((index, worker), (kind::DRAIN, 0), &Empty),
            Action::Kill { worker, .. } => self.kill(index, worker),
            Action::RecordCpuTime { worker } => self.watch(index, worker),
            Action::CheckCpuTime { worker } => self.look(index, worker),
            Action::SetMaxInFlight { worker, max_in_flight } => {
                self.send((index, worker), (kind::LIMITS, 0), &Limits { max_in_flight });
            }
            Action::Report(note) => self.note(index, note),
        }
    }

    fn mark_dirty(&mut self, endpoint: Endpoint) {
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
    fn flush_dirty(&mut self) {
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
        self.stopping && self.compartments.values().all(|c| c.policy.is_stopped())
    }

    /// Waits up to a second for clients to read their last answers, then ends the keeper.
    fn finish(mut self) {
        self.threads.begin_shutdown();
        self.reporter.counters.has_ended.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        self.hear_the_last();
        self.reporter.counters.has_answered_all.store(true, Ordering::SeqCst);
        loop {
            for index in self.sessions.indices() {
                self.flush_session(index);
            }
            if self.sessions.undelivered == 0 || Instant::now() >= until {
                break;
            }
            let mut events = Events::with_capacity(EVENTS_PER_TURN);
            let polled = self.poll.poll(&mut events, Some(Duration::from_millis(20)));
            if polled.is_err_and(|error| error.kind() != std::io::ErrorKind::Interrupted) {
                break;
            }
        }
        self.end_keeper();
    }

    /// Ends the keeper and all workers after an essential thread has ended.
    fn give_up(self, name: &str) -> io::Error {
        self.threads.begin_shutdown();
        self.reporter.counters.has_ended.store(true, Ordering::SeqCst);
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

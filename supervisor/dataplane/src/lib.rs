//! The data plane: one thread that owns every socket, every bulkhead and every job.
//!
//! It selects what happened (a frame, a death, a timer, a command), applies it to the bulkhead
//! concerned, performs the actions that come back, and flushes each socket once at the end of the turn.
//! It decides nothing itself, never blocks or sleeps, and never renders, formats or writes a log; what would is done on
//! a thread beside it (`background.rs`). Of `/proc` it reads `stat` alone, some 7 µs each: for the ancestors of a process
//! that connects for the first time, and for a worker that has closed its link a second ago and not been reported dead.

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

/// Sockets that one turn of the loop looks at.
const EVENTS_PER_TURN: usize = 1024;

/// How often slow peers are looked at, while there are any.
const HOUSEKEEPING: Duration = Duration::from_millis(250);

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const KEEPER: Token = Token(2);
const FIRST_CONNECTION: usize = 4;

/// What is heard of a connection: also that something came out of band, which ends it.
const INTEREST: Interest = Interest::READABLE.add(Interest::WRITABLE).add(Interest::PRIORITY);

/// What its peer is told.
const OUT_OF_BAND: &str = "it sent bytes out of band, which the protocol does not have";

/// What the data plane knows of a job beyond what policy decides on. Policy carries it along in a box: it moves with
/// every decision, so that it had better be small.
#[derive(Default)]
pub(crate) struct JobData {
    session: SessionId,
    request: u64,
    operation: Box<str>,
    tenant: Box<str>,
    trace: Option<Box<Trace>>,
    payload_bytes: usize,
    priority: Priority,
    /// The label of its tenant in the metrics.
    label: u32,
    held: Held,
    /// Where it stands on the link of the worker that has it.
    given: unread::Given,
    charge: Charge,
    /// Exit status of the program that ran the job.
    status: Option<i32>,
    /// Of a job that may go, or has gone, to another bulkhead than it was sent to.
    fallback: Option<Box<FallbackState>>,
}

impl JobData {
    /// The payload, if it is held here.
    fn payload(&self) -> Option<&[u8]> {
        match self.payload_bytes {
            0 => Some(&[]),
            _ if self.held.file.is_some() => None,
            _ => self.held.copy.as_deref().or(self.held.payload.as_deref()),
        }
    }

    /// The trace that the job is part of.
    fn trace_id(&self) -> Option<&str> {
        self.trace.as_deref().map(Trace::id)
    }
}

/// What is kept of a job's payload.
#[derive(Default)]
struct Held {
    /// While the job waits; one that is large and may be wanted again, until the job's end. It counts towards
    /// the memory for waiting payloads.
    payload: Option<Vec<u8>>,
    /// A small one while a worker has the job.
    copy: Option<Box<[u8]>>,
    /// If it is in a file.
    file: Option<Box<Leased>>,
    /// Whether another worker may want it. A small one always may: workers die before they read their job.
    is_repeatable: bool,
}

impl Held {
    fn is_empty(&self) -> bool {
        self.payload.is_none() && self.copy.is_none() && self.file.is_none()
    }

    /// Bytes that count towards the memory for what waits.
    fn bytes(&self) -> usize {
        self.payload.as_ref().map_or(0, Vec::capacity)
    }

    /// The payload for a worker: what is held, or else what comes in just now.
    fn give<'p>(&'p mut self, coming: Payload<'p>) -> Payload<'p> {
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

/// The data plane: the loop, and the parts that it hands each event to.
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
    /// Of what waits, be it for a permit, for its own end, or for a worker to read.
    memory: Memory,
    leases: Leases,
    buffers: Buffers,
    /// Connections that something is to be written to.
    dirty: Vec<Endpoint>,
    limits: DataPlaneLimits,
    housekeeping_at: Option<Time>,
    /// When something is due, as of the last look.
    due: Option<Time>,
    events: Events,
    /// Whether there were more events than one turn takes.
    has_more_events: bool,
    pauses: held_up::Pauses,
    stopping: bool,
    started: bool,
    fate: Fate,
}

/// One end of a connection that the loop serves.
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

/// The payload that came with the event being applied.
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

/// Everything a [`DataPlane`] is made of that exists before it.
pub struct Parts {
    /// The configuration.
    pub config: Arc<Config>,
    /// What there is to confine workers by.
    pub support: Arc<SandboxSupport>,
    /// The bound jobs socket; none in an application, whose clients come by [`bulkhead_plane::command::Command::Connect`].
    pub listener: Option<UnixListener>,
    /// The running keeper.
    pub keeper: Keeper,
    /// Where notices go.
    pub notices: Speaker,
    /// Where the spans of sampled jobs go, if they are taken.
    pub spans: Option<SpanSender>,
    /// Counts for the control plane.
    pub pulse: Arc<SharedCounters>,
    /// The host for `exec` and `library`, if one is needed.
    pub host: Option<std::path::PathBuf>,
    /// The tenants that metrics name, sorted.
    pub labels: Arc<[String]>,
    /// Threads that must not end.
    pub fate: Fate,
}

impl DataPlane {
    /// A data plane that has not started anything yet, and the handle for commands to it.
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
            entrance: Entrance::new(&poll, listener, Access::new(&config, own))?,
            poll,
            orders: Orders::new(commands, commander.stops()),
            reporter: Reporter::new(notices, pulse, spans),
            keeper: KeeperLink::new(keeper),
            bell: Bell::new(waker.clone()),
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
            housekeeping_at: None,
            due: None,
            events: Events::with_capacity(EVENTS_PER_TURN),
            has_more_events: false,
            pauses: held_up::Pauses::default(),
            stopping: false,
            started: false,
            fate,
        };
        for bulkhead in &config.bulkheads {
            let inputs =
                SpecInputs { host: host.as_deref(), support: &support, labels: &plane.bulkheads.labels };
            let spec = BulkheadSpec::new(bulkhead, inputs);
            spec.program.log_warnings(&bulkhead.name);
            plane.open(spec);
        }
        Ok((plane, commander))
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

    /// Orders the first workers. The rest of what [`DataPlane::run`] does is then, for a thread that has other work too, to
    /// settle and take turns, as long as it goes on.
    pub fn start(&mut self) {
        self.fate.begin();
        for index in self.compartments.indices() {
            self.apply(index, Event::Start, Incoming::None);
        }
        // Those without workers have nothing to say of themselves.
        self.check_started();
    }

    /// Whether it has not come to its end.
    pub fn goes_on(&self) -> bool {
        !self.is_over() && self.fate.lost().is_none()
    }

    /// Does what the last turn left to be done, and writes what it produced. Returns for how long there is nothing to do
    /// unless something comes, which [`DataPlane::arrivals`] tells.
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

    /// A descriptor that is readable when something has come.
    pub fn arrivals(&self) -> io::Result<OwnedFd> {
        self.poll.registry().as_fd().try_clone_to_owned()
    }

    /// Waits as long as that for something to come, and applies it. Errors are those of `epoll_wait(2)`, and of a keeper
    /// that can neither be reached nor started again.
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

    /// Ready when a client of this process wants to be heard, for which [`DataPlane::hear_clients`] is enough; until then
    /// that wakes this task.
    pub fn poll_clients(&self, context: &mut Context<'_>) -> Readiness<()> {
        self.bell.poll_rung(context)
    }

    /// As [`DataPlane::take_turn`] without waiting, for what clients of this process have sent. What has come otherwise is
    /// left for the next turn.
    pub fn hear_clients(&mut self) -> io::Result<()> {
        self.bell.rise();
        self.read_clock();
        let was_paused = self.mind_pause(self.due);
        self.turn(&Events::with_capacity(0), was_paused)
    }

    /// Ends the keeper, and all workers with it. An error tells what else has ended before.
    pub fn end(self) -> io::Result<()> {
        match self.fate.lost() {
            Some(name) => Err(self.give_up(name)),
            None => {
                self.finish();
                Ok(())
            }
        }
    }

    fn turn(&mut self, events: &Events, was_paused: bool) -> io::Result<()> {
        // Workers and their keeper first: a crowd of clients is not to keep us from hearing that they live.
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

    /// Clients, connections that want to be one, and whether the control plane has something to say.
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

    /// The peer has closed its side. Its end may stand behind bytes that came together with it, and is not
    /// announced again: such a connection is read to the end.
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

    /// Bytes out of band break the order of all others, and are not announced again.
    fn out_of_band(&mut self, endpoint: Endpoint) {
        match endpoint {
            Endpoint::Session(index) => self.refuse_session(index, RejectReason::Invalid, OUT_OF_BAND),
            // Of a worker whose process is not known yet, they are looked for when it is.
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
        // Failed spawns that came up when those before them were told, and workers that are to be ordered.
        if has_more || !self.links.failed_spawns.is_empty() || self.keeper.has_wanted() {
            return Some(Duration::ZERO);
        }
        // epoll counts in milliseconds; a sleep that ends just before its time would turn idly.
        let wait = due?.since(Time(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)));
        Some(Duration::from_millis(u64::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)))
    }

    /// Once for all that happened in a turn.
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

    // Applying and performing.

    /// Tells a bulkhead what happened and does what it wants done.
    fn apply(
        &mut self,
        index: CompartmentIndex,
        event: Event<Box<JobData>>,
        mut incoming: Incoming<'_>,
    ) -> Option<JobId> {
        let now = self.now;
        // What is told late may be about a compartment of which nothing is left.
        let compartment = self.compartments.get_mut(index)?;
        // An action can apply another event, which has actions of its own.
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

    /// A job that was taken but not dispatched keeps its payload here, unless it stands in a file.
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
            Action::TookBack { worker, job } => self.job_taken_back(index, worker, job),
            Action::Cancel { worker, job } => self.send((index, worker), (kind::CANCEL_JOB, job.0), &Empty),
            Action::Spawn { worker, slot, again } => {
                self.count_restart(index, again);
                self.keeper.want(Wanted { compartment: index, worker, slot });
            }
            Action::Drain { worker } => self.send((index, worker), (kind::DRAIN, 0), &Empty),
            Action::Kill { worker, .. } => self.kill(index, worker),
            Action::Watch { worker } => self.watch(index, worker),
            Action::Look { worker } => self.look(index, worker),
            Action::Limit { worker, max_in_flight } => {
                self.send((index, worker), (kind::LIMITS, 0), &Limits { max_in_flight });
            }
            Action::Note(note) => self.note(index, note),
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

    /// Writes what this turn has produced: one write for each connection.
    fn flush_dirty(&mut self) {
        // A client that is dropped for what it did not read leaves jobs to be cancelled, and so more to send.
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

    // The end.

    fn is_over(&self) -> bool {
        self.stopping && self.compartments.values().all(|c| c.policy.is_stopped())
    }

    /// Gives the last answers a moment to leave, and ends the keeper.
    fn finish(mut self) {
        self.fate.expect_end();
        self.reporter.pulse.is_over.store(true, Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(1);
        self.hear_the_last();
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

    /// A thread of the supervisor has ended. No worker is to outlive that.
    fn give_up(self, name: &str) -> io::Error {
        self.fate.expect_end();
        self.reporter.pulse.is_over.store(true, Ordering::SeqCst);
        self.end_keeper();
        io::Error::other(format!("the thread or task '{name}' has ended"))
    }

    fn end_keeper(self) {
        if let Err(error) = self.keeper.end(&self.background) {
            tracing::error!("the keeper did not end well: {error}");
        }
    }
}

/// A number that differs from run to run; only jitter depends on it.
fn seed() -> u64 {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    clock.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40)
}

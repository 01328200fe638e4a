//! What a bulkhead is told and what it answers. `T` is the caller's own record of a job; it is carried
//! along, and comes back with the job's answer.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{HandlerFailure, JobId, Priority, RejectReason, Verdict, vocabulary};

use crate::adaptive::AdaptiveLimits;
use crate::breaker::Transition;
use crate::limits::{Limits, OwnNumbers};
use crate::poison::Digest;
use crate::rate::RateLimit;
use crate::tenants::TenantId;
use crate::time::Time;

/// One incarnation of a worker. A message from an earlier one does not match it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId {
    /// The place in the bulkhead's table of workers.
    pub place: u32,
    /// Counts every worker the bulkhead has started.
    pub generation: u32,
}

/// A job that asks to be taken.
#[derive(Clone, Debug)]
pub struct Submission<T> {
    /// The caller's own record of it.
    pub cargo: T,
    /// The least sequence number that the job can have: its [`JobId`] is made of that. A caller with several bulkheads
    /// counts over all of them, so that no two jobs have the same.
    pub sequence: u64,
    /// The time limit asked for; `None` for the bulkhead's own. Clamped to `deadline_max`.
    pub deadline: Option<Duration>,
    /// The longest run of each attempt, from its dispatch; the bulkhead's own applies beside it.
    pub run_limit: Option<Duration>,
    /// How much it matters.
    pub priority: Priority,
    /// Whether it may safely run twice.
    pub idempotent: bool,
    /// Whether the caller keeps what it takes to give it to another worker.
    pub is_repeatable: bool,
    /// What tells its operation and payload from all others, if poison is watched for.
    pub digest: Option<Digest>,
    /// Whether another bulkhead passed it on: it was counted and charged there, and its deadline stands.
    pub is_guest: bool,
    /// The tenant of the job: what [`crate::Bulkhead::tenant`] said just before.
    pub tenant: TenantId,
    /// What it counts against the rate limit and its tenant's share of the turns.
    pub cost: u32,
    /// What it takes on the link of a worker.
    pub bytes: u32,
    /// The worker that it is to go to, if that one has a permit when the job comes.
    pub prefers: Option<WorkerId>,
}

impl<T> Submission<T> {
    /// A job that asks for nothing special.
    pub fn new(cargo: T) -> Self {
        Self {
            cargo,
            sequence: 0,
            deadline: None,
            run_limit: None,
            priority: Priority::Normal,
            idempotent: false,
            is_repeatable: true,
            digest: None,
            is_guest: false,
            tenant: TenantId::NONE,
            cost: 1,
            bytes: 0,
            prefers: None,
        }
    }
}

/// What a worker says of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It is done.
    Ok,
    /// The handler could not.
    Failed(HandlerFailure),
    /// The program that ran it died by a signal; the worker is well.
    ProgramCrashed {
        /// How: by a signal, as the worker saw it, or by what the supervisor knows to be behind that.
        death: Death,
        /// A sentence for people.
        message: String,
    },
}

/// How a worker's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// With this exit status.
    Exit(i32),
    /// By the signal of this number.
    Signal(i32),
    /// It made this system call, which its sandbox forbids; empty if it cannot be named.
    Violation(&'static str),
    /// The kernel killed it, since it had more memory than it may.
    Oom,
    /// It was ended, since it had more in its temporary folder than it may.
    Overfull,
}

/// What a worker can, beyond what every worker can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// Its heartbeats can be demanded while jobs run.
    pub has_dispatch_thread: bool,
    /// It can be told another `max_in_flight` than it was welcomed with.
    pub can_resize: bool,
}

/// Agreement between a worker and the supervisor on the jobs that the worker has begun. A worker begins jobs in the
/// order in which they were sent, and writes the number of each job before it begins.
pub trait Claims: std::fmt::Debug + Send {
    /// Number of the last job begun, counted from 1 in the order of sending.
    fn begun(&self) -> u64;

    /// Takes back all jobs up to number `up_to`, the last one sent, except jobs already begun. Returns the number of
    /// the last job begun. If the worker was just about to begin that job, it gives the job back by
    /// [`Event::Returned`].
    fn take_back(&self, up_to: u64) -> u64;
}

/// What happened.
#[derive(Debug)]
pub enum Event<T> {
    /// The supervisor starts.
    Start,
    /// Time has passed: see [`crate::Bulkhead::next_deadline`].
    Tick,
    /// A client hands over a job.
    Submit(Submission<T>),
    /// The client no longer wants a job, or went away.
    Cancel {
        /// Which.
        job: JobId,
        /// True if a job that has begun continues.
        unless_begun: bool,
    },
    /// There is no memory for a job that waits: it is to make room. One that a worker has stays.
    GiveUp {
        /// Which.
        job: JobId,
    },
    /// A worker's process runs.
    Spawned {
        /// Which.
        worker: WorkerId,
        /// Its process.
        pid: u32,
    },
    /// A worker's process could not be started. It will not be heard of again.
    SpawnFailed {
        /// Which.
        worker: WorkerId,
        /// Why, for people.
        message: String,
    },
    /// A worker has said hello, and was welcomed.
    Hello {
        /// Which.
        worker: WorkerId,
        /// What it can.
        can: Abilities,
        /// The worker's record of begun jobs. Without a record no job is sent ahead or taken back.
        claims: Option<Box<dyn Claims>>,
    },
    /// A worker needs more time to initialise.
    ExtendStart {
        /// Which.
        worker: WorkerId,
        /// How much from now.
        more: Duration,
    },
    /// A worker says what it is doing. What it said last before it failed to start is told with the failure.
    Said {
        /// Which.
        worker: WorkerId,
        /// Its words.
        text: String,
    },
    /// A worker can take jobs.
    Ready {
        /// Which.
        worker: WorkerId,
    },
    /// A worker was heard: a heartbeat or anything else.
    Heard {
        /// Which.
        worker: WorkerId,
    },
    /// A worker was alive at this time, by what it wrote where that is looked up when it has been silent.
    WasAlive {
        /// Which.
        worker: WorkerId,
        /// When; not later than now.
        at: Time,
    },
    /// The answer to [`Action::Look`].
    Looked {
        /// Which worker.
        worker: WorkerId,
        /// Whether it wanted to run since [`Action::Watch`] and hardly could: its silence is the machine's.
        is_starved: bool,
    },
    /// A worker answers for a job.
    Replied {
        /// Which.
        worker: WorkerId,
        /// The job, as the worker claims.
        job: JobId,
        /// What it says.
        reply: Reply,
    },
    /// A worker gives back a job that was taken back as it was about to begin it.
    Returned {
        /// Which.
        worker: WorkerId,
        /// The job, as the worker claims.
        job: JobId,
        /// The job's number in the order of sending, according to the worker.
        arrival: u64,
    },
    /// A worker has begun to send a result that is too large. All that is heard of the worker from here on is a
    /// part of it, until [`Event::Replied`] says that it has ended.
    Oversized {
        /// Which.
        worker: WorkerId,
        /// The job, as the worker claims.
        job: JobId,
        /// What the client is told.
        failure: HandlerFailure,
    },
    /// A worker broke the protocol, or closed its link and lives on. It is not to be believed further.
    Broke {
        /// Which.
        worker: WorkerId,
        /// How, for people.
        message: String,
    },
    /// A worker says that it takes no more jobs and will exit.
    Stopping {
        /// Which.
        worker: WorkerId,
    },
    /// A worker that is gone, as will be told next, has not read anything of this job and cannot any more: it
    /// has not begun it.
    Unread {
        /// Which.
        worker: WorkerId,
        /// Its job.
        job: JobId,
    },
    /// The same by the word of the worker alone, which it left where it outlives it.
    Unbegun {
        /// Which.
        worker: WorkerId,
        /// Its job.
        job: JobId,
    },
    /// A worker's process is gone. What descends from it may live on, and its slot is taken until
    /// [`Event::Swept`] follows.
    Exited {
        /// Which.
        worker: WorkerId,
        /// How.
        death: Death,
    },
    /// All that descended from a worker that has exited is gone as well.
    Swept {
        /// Which.
        worker: WorkerId,
    },
    /// The supervisor itself had to end a worker and all that descended from it, with everything else: its
    /// keeper died. Nothing follows.
    Lost {
        /// Which.
        worker: WorkerId,
    },
    /// How many bytes a worker holds.
    Memory {
        /// Which.
        worker: WorkerId,
        /// Resident bytes.
        rss_bytes: u64,
    },
    /// The supervisor itself was held up: silence until now says nothing about the workers.
    HeldUp,
    /// Replace each worker, one after the other.
    Restart,
    /// Take no more jobs.
    Drain,
    /// Take jobs again.
    Resume,
    /// Forget the restart history; failed slots try again now; the breaker closes.
    Reset,
    /// Put other numbers in force, at once and without dropping a job.
    Change(Change),
    /// Put all of these in force, at once and without dropping a job. Deadlines and queue timeouts are those of
    /// the time a job came in.
    Reconfigure(Box<Limits>),
    /// Workers that are started from now on run something else: replace each, one after the other, when such a
    /// one is ready. Until then it goes on.
    Replace,
    /// Put one tenant's own numbers in force.
    ChangeTenant {
        /// Which.
        tenant: String,
        /// All that it has of its own from now on.
        numbers: OwnNumbers,
    },
    /// Nothing is to be done here for now: stop the workers, and start them again with [`Event::Start`].
    Rest,
    /// [`Event::Start`] will come soon: jobs may wait for it.
    Await,
    /// Open the breaker by hand, or leave it to itself again.
    ForceBreaker {
        /// Whether it is to be open.
        open: bool,
    },
    /// Stop: in-flight jobs may go on until `by`.
    Stop {
        /// When patience ends.
        by: Time,
    },
}

/// What is to be done.
#[derive(Debug)]
pub enum Action<T> {
    /// Start a process for this worker.
    Spawn {
        /// Which.
        worker: WorkerId,
        /// The slot it is for.
        slot: u32,
        /// Why the slot gets another one; `None` for its first.
        again: Option<RestartCause>,
    },
    /// Give a job to a worker. The caller's record is at [`crate::Bulkhead::cargo_mut`].
    Dispatch {
        /// The worker that gets it.
        worker: WorkerId,
        /// Which job.
        job: JobId,
        /// The time that is left for it.
        remaining: Duration,
        /// Whether it only waits there, as far as anybody is concerned.
        is_ahead: bool,
    },
    /// A job was taken back from a worker that had not begun it.
    TookBack {
        /// The worker.
        worker: WorkerId,
        /// Which job.
        job: JobId,
    },
    /// Ask a worker to stop work on a job.
    Cancel {
        /// The worker.
        worker: WorkerId,
        /// Which job.
        job: JobId,
    },
    /// A worker is silent. Note how much processor time it has had, and has waited for.
    Watch {
        /// Which.
        worker: WorkerId,
    },
    /// It still is. Compare, and say so by [`Event::Looked`], in any case.
    Look {
        /// Which.
        worker: WorkerId,
    },
    /// Tell a worker how many jobs it may be given at once from now on.
    Limit {
        /// The worker.
        worker: WorkerId,
        /// How many.
        max_in_flight: u32,
    },
    /// Ask a worker to finish what it has and exit.
    Drain {
        /// The worker.
        worker: WorkerId,
    },
    /// Kill a worker and all that descends from it. It is over when it is reported as exited.
    Kill {
        /// The worker.
        worker: WorkerId,
        /// Why.
        reason: KillReason,
    },
    /// Tell the client what became of its job.
    Answer(Answer<T>),
    /// Tell the operator what happened.
    Note(Note),
}

/// Numbers to put in force; what is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Change {
    /// Worker processes. Those that are too many finish what they have.
    pub processes: Option<u32>,
    /// Jobs in flight per worker. Where there are more, as many go on until they end.
    pub max_in_flight: Option<u32>,
    /// Jobs that may wait. A queue that is longer empties by itself.
    pub max_queue: Option<u32>,
    /// Another rate limit, or none. What was charged stays charged.
    pub rate_limit: Option<Option<RateLimit>>,
}

impl Change {
    /// Puts the numbers into others.
    pub fn put_into(self, limits: &mut Limits) {
        limits.processes = self.processes.unwrap_or(limits.processes);
        limits.max_in_flight = self.max_in_flight.unwrap_or(limits.max_in_flight);
        limits.max_queue = self.max_queue.unwrap_or(limits.max_queue);
        limits.rate_limit = self.rate_limit.unwrap_or(limits.rate_limit);
    }
}

/// What became of a job.
#[derive(Debug)]
pub struct Answer<T> {
    /// Which job; `None` if it was never entered.
    pub job: Option<JobId>,
    /// The caller's record of it.
    pub cargo: T,
    /// What became of it.
    pub verdict: Verdict,
    /// How often a worker was given it.
    pub attempts: u32,
    /// How long it waited.
    pub queued: Duration,
    /// How long a worker had it.
    pub ran: Duration,
    /// The process that had it last.
    pub worker_pid: Option<u32>,
    /// Whether the same job may be sent again.
    pub retryable: bool,
    /// How long to wait before that.
    pub retry_after: Option<Duration>,
    /// The limit that applied.
    pub deadline: Duration,
    /// The limit of each run, if one applied.
    pub run_limit: Option<Duration>,
}

/// Why the supervisor kills a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// A job in it would not end.
    Deadline,
    /// It was not heard.
    Hung,
    /// It broke the protocol, and how.
    Protocol(String),
    /// It did not say hello in time.
    NoHello,
    /// It was not ready in time.
    NotReady,
    /// It was replaced, or is to stop, and does not go by itself.
    Overdue,
    /// It had not begun yet, and is not needed any more.
    Unwanted,
    /// The keeper of the workers died.
    KeeperDied,
}

impl KillReason {
    /// A sentence for people.
    pub fn describe(&self) -> String {
        match self {
            Self::Deadline => "a job in it went on after its deadline, run limit or cancellation, or after a result that \
                               was too large"
                .into(),
            Self::Hung => "it no longer sent heartbeats".into(),
            Self::Protocol(how) => format!("it broke the protocol: {how}"),
            Self::NoHello => "it did not say hello within start.handshake; \
                              a program that is not built with the worker SDK wants `exec` instead of `command`"
                .into(),
            Self::NotReady => "it was not ready within start.ready".into(),
            Self::Overdue => "it was asked to stop and did not".into(),
            Self::Unwanted => "it had not begun, and is not needed any more".into(),
            Self::KeeperDied => "the keeper died, and all workers with it by SIGKILL".into(),
        }
    }
}

vocabulary! {
    /// Why a worker that works is replaced.
    RecycleReason {
        /// `recycle.jobs`.
        Jobs = "jobs",
        /// `recycle.rss`.
        Memory = "rss",
        /// `recycle.age`.
        Age = "age",
        /// By hand.
        Restart = "restart",
        /// It cannot be told how many jobs it may be given now.
        Resize = "resize",
        /// It runs what is not to be run any more.
        Reload = "reload",
    }
}

vocabulary! {
    /// Why a slot gets another worker, as metrics have it.
    #[repr(u8)]
    #[expect(missing_docs, reason = "the names say it")]
    RestartCause {
        // How the one before ended by itself.
        Exit = "exit",
        Signal = "signal",
        Oom = "oom",
        Violation = "violation",
        // Why it was killed.
        Protocol = "protocol",
        Hung = "hung",
        Deadline = "deadline",
        NotReady = "not_ready",
        Stopped = "stopped",
        KeeperDied = "keeper_died",
        /// It could not be started at all.
        NotStarted = "not_started",
        // Why it was replaced.
        Jobs = RecycleReason::Jobs.name(),
        Memory = RecycleReason::Memory.name(),
        Age = RecycleReason::Age.name(),
        Restart = RecycleReason::Restart.name(),
        Resize = RecycleReason::Resize.name(),
        Reload = RecycleReason::Reload.name(),
    }
}

impl RestartCause {
    /// Returns true if the worker before was only replaced in time, as `recycle` asks.
    pub(crate) const fn is_recycling(self) -> bool {
        matches!(self, Self::Jobs | Self::Memory | Self::Age)
    }

    /// Of a worker that is gone.
    pub(crate) const fn of_end(death: Death, killed: Option<&KillReason>) -> Self {
        match (killed, death) {
            (Some(KillReason::Deadline), _) => Self::Deadline,
            (Some(KillReason::Hung), _) => Self::Hung,
            (Some(KillReason::Protocol(_)), _) => Self::Protocol,
            (Some(KillReason::NoHello | KillReason::NotReady), _) => Self::NotReady,
            (Some(KillReason::Overdue | KillReason::Unwanted), _) => Self::Stopped,
            (Some(KillReason::KeeperDied), _) => Self::KeeperDied,
            (None, Death::Exit(_)) => Self::Exit,
            (None, Death::Signal(_)) => Self::Signal,
            (None, Death::Violation(_) | Death::Overfull) => Self::Violation,
            (None, Death::Oom) => Self::Oom,
        }
    }
}

impl From<RecycleReason> for RestartCause {
    fn from(reason: RecycleReason) -> Self {
        match reason {
            RecycleReason::Jobs => Self::Jobs,
            RecycleReason::Memory => Self::Memory,
            RecycleReason::Age => Self::Age,
            RecycleReason::Restart => Self::Restart,
            RecycleReason::Resize => Self::Resize,
            RecycleReason::Reload => Self::Reload,
        }
    }
}

/// Why a slot has no worker and gets none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Its workers failed too often.
    Failed,
    /// `restart.policy` says so.
    Policy,
}

/// What an operator may want to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// A process runs.
    WorkerStarted {
        /// Which.
        worker: WorkerId,
        /// Its slot.
        slot: u32,
        /// Its process.
        pid: u32,
    },
    /// It can take jobs.
    WorkerReady {
        /// Which.
        worker: WorkerId,
        /// Its process.
        pid: u32,
        /// How long that took since the spawn.
        after: Duration,
    },
    /// It could not be started.
    WorkerNotStarted {
        /// Its slot.
        slot: u32,
        /// Why, for people.
        message: String,
    },
    /// It is gone.
    WorkerExited {
        /// Which.
        worker: WorkerId,
        /// Its slot.
        slot: u32,
        /// Its process.
        pid: u32,
        /// How.
        death: Death,
        /// Why, if the supervisor killed it.
        killed: Option<KillReason>,
        /// How long it ran.
        uptime: Duration,
        /// How many jobs it answered.
        served: u64,
        /// How many it held.
        in_flight: u32,
    },
    /// It is being killed.
    WorkerKilled {
        /// Its process.
        pid: u32,
        /// Why.
        reason: KillReason,
    },
    /// A spare has taken a slot.
    SpareTookOver {
        /// Which.
        worker: WorkerId,
        /// The slot.
        slot: u32,
        /// Its process.
        pid: u32,
    },
    /// Its replacement is ready, and it is being drained.
    WorkerRecycled {
        /// Its process.
        pid: u32,
        /// Why.
        reason: RecycleReason,
    },
    /// What is to be run now does not start: the worker that runs what was before goes on.
    ReplacementFailed {
        /// The slot.
        slot: u32,
        /// Why, for people.
        message: String,
        /// When it is tried again.
        again_in: Duration,
    },
    /// The next worker of a slot is started later.
    RestartBackoff {
        /// The slot.
        slot: u32,
        /// In how long.
        delay: Duration,
    },
    /// No slot has a worker, or will have one soon.
    BulkheadFailed {
        /// Why the last one stopped.
        reason: StopReason,
        /// What went wrong last, for people.
        message: String,
    },
    /// A job whose worker died is given to another.
    JobRetried {
        /// Which.
        job: JobId,
        /// How often it was given out so far.
        attempts: u32,
        /// How it ended the last time.
        crash: Verdict,
        /// The process that had it.
        worker_pid: Option<u32>,
    },
    /// A payload has killed so many workers that it is kept out.
    JobQuarantined {
        /// The job that was the last of them.
        job: JobId,
        /// The payload.
        digest: Digest,
    },
    /// The breaker has opened, closed, or begun to probe.
    Breaker(Transition),
    /// The queue fills.
    QueuePressure {
        /// Jobs that wait.
        queued: usize,
        /// Jobs that may.
        capacity: usize,
    },
    /// The adaptive limit has moved since it was last told.
    LimitAdapted {
        /// What it was.
        from: u32,
        /// What it is.
        to: u32,
        /// 90th percentile of run times: the lower median over the tenants.
        latency: Duration,
        /// What it follows.
        numbers: AdaptiveLimits,
    },
    /// Jobs are turned away for their rate.
    TenantThrottled {
        /// The tenant over its own limit, empty for jobs without a tenant. `None`: the limit is that of the bulkhead.
        tenant: Option<Arc<str>>,
        /// When the next one would pass.
        retry_after: Duration,
    },
    /// A tenant has more than half of the recent evictions.
    TenantEvictions {
        /// Which.
        tenant: Arc<str>,
        /// Its share, from 0 to 1.
        share: f64,
    },
    /// It takes no more jobs.
    Draining,
    /// It takes jobs again.
    Resumed,
}

/// A rejection that names no worker and keeps no state.
pub(crate) fn rejection(reason: RejectReason) -> Verdict {
    Verdict::rejected(reason)
}

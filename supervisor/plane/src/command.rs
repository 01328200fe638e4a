//! The commands from the control plane to the data plane, and droppable notices in the other direction. The channels
//! are bounded, and neither plane blocks on the other. The event loop of the data plane executes the commands. Notices
//! that must not be lost are in `notices`.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, SystemTime};

use bulkhead_api::{
    Cause, Change, CrashId, CrashReport, EventKind, JobProgress, Jobs, Severity, ShortState, Snapshot,
    TenantChange,
};
use bulkhead_shared::{JobId, Verdict};
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::access::HttpClient;
use crate::counters::SpoolCounters;
use crate::crash::CrashRecord;
use crate::demand::Observation;
use crate::handover::HandoverCommand;
use crate::peer_check::ClientRejection;
use crate::reload::{LiveDropped, Reload};
use crate::scrape::Scrape;
use bulkhead_config::defaults::{
    IN_FLIGHT_CEILING, PERMITS_CEILING, PROCESSES_CEILING, QUEUE_CEILING, RATE_CEILING,
};

/// Maximum number of commands in the queue to the data plane.
pub const COMMANDS_MAX: usize = 1024;

/// Time without a reply after which the data plane is considered stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval between attempts to queue a command while the queue is full.
const QUEUE_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// A worker process and its activity.
#[derive(Clone, Debug)]
pub struct WorkerProcess {
    pub bulkhead: Arc<str>,
    pub pid: u32,
    pub generation: u32,
    /// Number of jobs that have been sent to the worker since it started.
    pub jobs_given: u64,
    /// True if the worker has unfinished jobs.
    pub is_busy: bool,
}

/// Readiness of a bulkhead.
#[derive(Clone, Debug, Default)]
pub struct BulkheadReadiness {
    /// Name and state of the bulkhead.
    pub state: ShortState,
    /// True if the bulkhead accepts jobs, and has a ready worker or starts workers on demand.
    pub is_serving: bool,
}

/// A request from the control plane to the data plane.
#[derive(Debug)]
pub enum Command {
    /// Listen on a new jobs socket, because the file of the previous socket was removed.
    Listen(std::os::unix::net::UnixListener),
    /// Perform a step of an upgrade.
    Handover(Box<HandoverCommand>),
    /// Return a snapshot of one bulkhead. If `bulkhead` is `None`, return snapshots of all bulkheads.
    Snapshot {
        bulkhead: Option<String>,
        /// Channel for the reply, a list of snapshots. The list is empty if the bulkhead does not exist.
        reply: oneshot::Sender<Vec<Snapshot>>,
    },
    /// Return the readiness of each bulkhead.
    Readiness {
        reply: oneshot::Sender<Vec<BulkheadReadiness>>,
    },
    /// Return the state of one isolated tenant.
    TenantSnapshot {
        bulkhead: String,
        tenant: String,
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// Return the oldest jobs whose clients are waiting for the outcome.
    ListJobs {
        request: JobsRequest,
        reply: oneshot::Sender<Jobs>,
    },
    /// Cancel a job on behalf of an operator.
    CancelJob {
        bulkhead: String,
        job: JobId,
        reply: oneshot::Sender<Result<(), SteerError>>,
    },
    /// Return a consistent copy of all values shown in the metrics.
    Scrape {
        reply: oneshot::Sender<Scrape>,
    },
    /// Perform an operator's action on one bulkhead.
    Steer {
        bulkhead: String,
        action: SteerAction,
        reply: oneshot::Sender<Result<(), SteerError>>,
    },
    /// Change the limits of one bulkhead.
    Change {
        bulkhead: String,
        change: Change,
        /// Channel for the reply: a snapshot of the bulkhead after the change, or an error.
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// Change the limits of one tenant in a bulkhead.
    ChangeTenant {
        bulkhead: String,
        tenant: String,
        change: TenantChange,
        /// Channel for the reply: the tenant's own limits after the change, or an error.
        reply: oneshot::Sender<Result<TenantChange, SteerError>>,
    },
    /// Return the observed demand for a bulkhead, which is used to compute sizing advice.
    Observe {
        bulkhead: String,
        /// Channel for the reply: the observation, or `None` if there is no such bulkhead.
        reply: oneshot::Sender<Option<Box<Observation>>>,
    },
    WorkerProcesses {
        reply: oneshot::Sender<Vec<WorkerProcess>>,
    },
    /// Report a worker's resident memory, which the control plane has read from `/proc`.
    ReportMemory {
        bulkhead: String,
        pid: u32,
        generation: u32,
        /// Resident set size in bytes.
        rss_bytes: u64,
    },
    /// Report the size of a worker's temporary folder. Sent only if the size exceeds the lowest limit that is
    /// configured for any bulkhead.
    ReportTemporaryFolder {
        /// The worker's spawn number.
        worker: u64,
        /// Disk usage of the folder, in bytes.
        bytes: u64,
        /// Disk usage of the folder in bytes, excluding folders whose names mark them as folders of forked workers.
        bytes_without_forked: u64,
        /// Spawn number of the template whose folder contains this folder, if any. The data plane ignores the report if
        /// the worker was forked from a different template, because any worker can create a folder named like another
        /// worker's folder.
        template: Option<u64>,
    },
    /// Rerun a job from a crash report in a separate worker.
    Replay {
        request: ReplayRequest,
        /// Channel for the reply: `Ok` when the replay has begun, or the reason why it cannot begin.
        accepted: oneshot::Sender<Result<(), ReplayError>>,
        /// Channel for the result, which is sent after the worker has exited. The channel is closed without a
        /// result if the supervisor stops first.
        done: oneshot::Sender<ReplayResult>,
    },
    /// Serve a connection that the control plane opened for an HTTP client. The control plane has already checked the
    /// permissions, and the connection does not need a handshake.
    AddClient {
        /// The data plane's end of the connection.
        socket: UnixStream,
        /// Permit that limits the number of connections opened by the control plane. Released when the data plane
        /// closes the connection.
        permit: OwnedSemaphorePermit,
        /// HTTP client that submits the jobs.
        client: HttpClient,
    },
    /// Start tracking the memory used by a token's incoming payloads of unknown length.
    AddSpool {
        /// The token's number.
        token: u32,
        spool: Arc<SpoolCounters>,
    },
    /// Serve a client that runs inside the application that embeds this supervisor.
    AddInProcessClient {
        /// The data plane's end of the connection.
        end: bulkhead_shared::in_process::Endpoint,
    },
    /// Report a client that the admin socket has rejected.
    ReportRejection {
        /// Contains the rejected client and the reason for the rejection.
        rejection: ClientRejection,
        /// Permit that limits the number of reports waiting for the data plane.
        _permit: OwnedSemaphorePermit,
    },
    /// Apply a new version of the configuration.
    Reload {
        reload: Box<Reload>,
        /// Channel for the reply: the operators' live changes that the reload discarded, or an error if the reload was
        /// not applied.
        reply: oneshot::Sender<Result<LiveDropped, SteerError>>,
    },
    /// Return the operators' live changes that a reload would discard, without applying the reload.
    TryReload {
        reload: Box<Reload>,
        reply: oneshot::Sender<LiveDropped>,
    },
    /// Report summary events about all bulkheads and the supervisor.
    Summarise,
    /// Reap orphaned processes that were reparented to this process and have exited.
    ReapOrphans {
        /// Channel for the reply: true if there might be more exited orphans.
        reply: oneshot::Sender<bool>,
    },
}

impl Command {
    /// Returns true if the command can be skipped because the sender has stopped waiting for the reply.
    pub fn is_abandoned(&self) -> bool {
        match self {
            Self::Snapshot { reply, .. } => reply.is_closed(),
            Self::Readiness { reply, .. } => reply.is_closed(),
            Self::TenantSnapshot { reply, .. } => reply.is_closed(),
            Self::ListJobs { reply, .. } => reply.is_closed(),
            Self::Scrape { reply } => reply.is_closed(),
            Self::Observe { reply, .. } => reply.is_closed(),
            Self::WorkerProcesses { reply } => reply.is_closed(),
            // If the sender has stopped waiting, it has already told its client that no job was started.
            Self::Replay { accepted, .. } => accepted.is_closed(),
            _ => false,
        }
    }

    /// Returns the relative cost of the command. The data plane limits the total cost per iteration.
    pub fn weight(&self) -> usize {
        match self {
            Self::AddClient { .. }
            | Self::AddInProcessClient { .. }
            | Self::AddSpool { .. }
            | Self::ReportRejection { .. }
            | Self::ReportMemory { .. } => 1,
            Self::Snapshot { .. } | Self::ListJobs { .. } | Self::Scrape { .. } | Self::Summarise => 8,
            _ => 4,
        }
    }
}

/// A request for a list of jobs.
#[derive(Clone, Debug, Default)]
pub struct JobsRequest {
    /// Name of the bulkhead whose jobs are listed, or `None` for all bulkheads.
    pub bulkhead: Option<String>,
    /// Progress of the jobs to list. `None` means that all jobs are listed.
    pub progress: Option<JobProgress>,
    /// Maximum number of jobs in the list.
    pub limit: usize,
}

/// Maximum number of jobs that one request can list.
pub const JOBS_LISTED_MAX: usize = 1000;

/// An operator's action on a bulkhead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteerAction {
    /// Replace all workers. Each old worker stays in service until its replacement is ready. Workers that are still
    /// starting are killed and restarted.
    Restart,
    /// Reject new jobs.
    Drain,
    /// Accept new jobs again.
    Resume,
    /// Clear the restart history, so that a worker is started immediately in each failed slot.
    Reset,
}

/// Checks that each number in a change is within its allowed range, regardless of the bulkhead's other settings.
/// Returns a sentence that describes the problem, if there is one.
pub fn change_problem(change: &Change) -> Option<String> {
    let rate = change.rate_limit.iter().flatten().next().map(|rate| (rate.per_second, rate.burst));
    check_numbers((0, IN_FLIGHT_CEILING), change.max_in_flight, change.processes, change.max_queue, rate)
}

/// Checks that each number in a change for one tenant is within its allowed range, regardless of other settings.
/// Returns a sentence that describes the problem, if there is one.
pub fn tenant_change_problem(change: &TenantChange) -> Option<String> {
    let rate = change.rate_limit.as_ref().map(|rate| (rate.per_second, rate.burst));
    check_numbers((1, PERMITS_CEILING), change.max_in_flight, change.processes, change.max_queue, rate)
}

fn check_numbers(
    (in_flight_min, in_flight_max): (u32, u64),
    max_in_flight: Option<u32>,
    processes: Option<u32>,
    max_queue: Option<u32>,
    rate: Option<(f64, Option<u32>)>,
) -> Option<String> {
    let check_range = |name: &str, value: Option<u32>, min: u32, max: u64| {
        let is_out_of_range = value.is_some_and(|value| value < min || u64::from(value) > max);
        is_out_of_range.then(|| format!("{name} must be from {min} to {max}"))
    };
    check_range("max_in_flight", max_in_flight, in_flight_min, in_flight_max)
        .or_else(|| check_range("processes", processes, 1, PROCESSES_CEILING))
        .or_else(|| check_range("max_queue", max_queue, 0, QUEUE_CEILING))
        .or_else(|| check_rate(rate?))
}

fn check_rate((per_second, burst): (f64, Option<u32>)) -> Option<String> {
    if !(per_second > 0.0 && per_second <= RATE_CEILING as f64) {
        return Some(format!("rate_limit.per_second must be above 0 and at most {RATE_CEILING}"));
    }
    let is_out_of_range = burst.is_some_and(|burst| burst == 0 || u64::from(burst) > RATE_CEILING);
    is_out_of_range.then(|| format!("rate_limit.burst must be from 1 to {RATE_CEILING}"))
}

/// Reason why the data plane did not execute a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SteerError {
    /// There is no bulkhead with this name.
    #[error("there is no bulkhead with this name")]
    NotFound,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// An upgrade is under way.
    #[error("an upgrade is under way; try again when it has finished")]
    Upgrading,
    /// The bulkhead has no record of the tenant, because the tenant has not submitted any job recently.
    #[error("this tenant has not submitted any jobs to this bulkhead recently")]
    UnknownTenant,
    /// The bulkhead has no such job. `holder` is the name of another bulkhead that has the job, for example a fallback.
    #[error("this bulkhead has no such job: {}", place_of(.holder))]
    UnknownJob { holder: Option<String> },
    /// The request conflicts with other settings. The string explains the conflict and how to resolve it.
    #[error("{0}")]
    Conflict(String),
}

fn place_of(holder: &Option<String>) -> String {
    match holder {
        Some(holder) => format!("the job is in bulkhead `{holder}`"),
        None => "the job has ended, or the job number is wrong".to_owned(),
    }
}

/// A request to rerun a job from a crash report.
#[derive(Debug)]
pub struct ReplayRequest {
    /// Name of the bulkhead in which the crash occurred.
    pub bulkhead: String,
    pub operation: String,
    pub tenant: String,
    pub payload: Vec<u8>,
}

/// Reason why a replay cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The bulkhead named in the crash report is no longer configured.
    #[error("the job's bulkhead is no longer configured")]
    NotConfigured,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The maximum number of concurrent replays has been reached.
    #[error("{REPLAYS_MAX} replays are already running; try again when a replay has ended")]
    Busy,
}

/// Maximum number of concurrent replays. Each replay starts a worker in addition to the configured workers.
pub const REPLAYS_MAX: usize = 2;

#[derive(Debug)]
pub struct ReplayResult {
    /// PID of the worker that was started to rerun the job, if any.
    pub pid: Option<u32>,
    /// Verdict on the job, or the reason why the job did not run.
    pub verdict: Result<Verdict, String>,
    /// Cause of death of the worker or program, or `None` if neither crashed.
    pub cause: Option<Cause>,
    /// Time from the dispatch of the job until its result arrived or the worker died.
    pub ran: Duration,
}

/// Reason why a command could not be sent to the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandSendError {
    /// The queue already contains [`COMMANDS_MAX`] commands.
    #[error("too many commands are waiting for the supervisor: try again later")]
    Busy,
    /// The data plane has stopped.
    #[error("the supervisor has exited")]
    Ended,
}

/// Sender for commands to the data plane.
#[derive(Clone, Debug)]
pub struct CommandSender {
    commands: SyncSender<Command>,
    waker: Arc<mio::Waker>,
    stop_requests: Arc<AtomicU32>,
}

impl CommandSender {
    /// Creates a sender for the `commands` channel. Sending a command also wakes the data plane through `waker`.
    pub fn new(commands: SyncSender<Command>, waker: Arc<mio::Waker>) -> Self {
        Self { commands, waker, stop_requests: Arc::default() }
    }

    /// Asks the data plane to stop. After the first call, jobs in flight have up to `drain_timeout` to finish. After
    /// the second call, the data plane stops immediately. The calls increment a counter instead of using the command
    /// queue, so that a full queue cannot delay the stop.
    pub fn stop(&self) -> Result<(), CommandSendError> {
        self.stop_requests.fetch_add(1, Ordering::SeqCst);
        self.waker.wake().map_err(|_| CommandSendError::Busy)
    }

    pub fn stop_requests(&self) -> Arc<AtomicU32> {
        self.stop_requests.clone()
    }

    /// Adds a command to the queue without blocking.
    pub fn send(&self, command: Command) -> Result<(), CommandSendError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => CommandSendError::Busy,
            TrySendError::Disconnected(_) => CommandSendError::Ended,
        })?;
        self.waker.wake().map_err(|_| CommandSendError::Busy)
    }

    /// Queues a command. If the queue is full, waits up to `limit` for space.
    pub async fn send_within(&self, command: Command, limit: Duration) -> Result<(), CommandSendError> {
        let end = tokio::time::Instant::now() + limit;
        let mut command = command;
        loop {
            match self.commands.try_send(command) {
                Ok(()) => return self.waker.wake().map_err(|_| CommandSendError::Busy),
                Err(TrySendError::Full(rest)) if tokio::time::Instant::now() < end => command = rest,
                Err(TrySendError::Full(_)) => return Err(CommandSendError::Busy),
                Err(TrySendError::Disconnected(_)) => return Err(CommandSendError::Ended),
            }
            tokio::time::sleep(QUEUE_RETRY_INTERVAL).await;
        }
    }

    /// Calls `command` with a new reply channel, sends the resulting command, and waits for the reply. Returns `None`
    /// if the queue is full or if no reply arrives within two seconds.
    pub async fn request<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, reply_receiver) = oneshot::channel();
        self.send(command(reply)).ok()?;
        tokio::time::timeout(REPLY_TIMEOUT, reply_receiver).await.ok()?.ok()
    }
}

/// A notice that can be dropped under load. Messages that must not be lost have separate channels in
/// [`crate::notices`].
#[derive(Debug)]
pub enum DroppableNotice {
    /// An operator event.
    Event(Box<Event>),
    /// A worker or program has crashed. The control plane adds the last output of the process to the report.
    Crash {
        report: Box<CrashReport>,
        /// Permit that limits the number of crash reports waiting to be stored.
        permit: OwnedSemaphorePermit,
        /// Record of the crash, from which the control plane extracts the backtrace.
        record: Option<CrashRecord>,
    },
}

/// An operator event that has not been assigned a sequence number yet.
#[derive(Clone, Debug)]
pub struct Event {
    pub at: SystemTime,
    pub severity: Severity,
    /// Kind of event, with the fields specific to that kind.
    pub kind: EventKind,
    pub bulkhead: Option<Arc<str>>,
    /// Name of the isolated tenant that the event is about, if any.
    pub tenant: Option<Arc<str>>,
    /// ID of the crash report that belongs to the event, if any.
    pub report: Option<CrashId>,
    /// End of the output that the dead process wrote to standard error, if the event reports the death of a process.
    pub stderr_tail: Option<String>,
    /// Number of events of this kind that were suppressed since the last event of this kind was reported.
    pub suppressed: Option<u64>,
}

impl Event {
    pub fn new(severity: Severity, bulkhead: Option<Arc<str>>, kind: EventKind) -> Self {
        let at = SystemTime::now();
        Self { at, severity, kind, bulkhead, tenant: None, report: None, stderr_tail: None, suppressed: None }
    }

    /// Returns all fields except the kind, in the order in which the log shows them.
    pub fn fields(&self) -> Vec<(&'static str, Value)> {
        let mut fields = self.kind.fields();
        let has_tenant = fields.iter().any(|(name, _)| *name == "tenant");
        fields.extend(self.tenant.as_deref().filter(|_| !has_tenant).map(|tenant| ("tenant", json!(tenant))));
        fields.extend(self.report.map(|report| ("report", json!(report))));
        fields.extend(self.stderr_tail.as_ref().map(|tail| ("stderr_tail", json!(tail))));
        fields.extend(self.suppressed.map(|count| ("suppressed", json!(count))));
        fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_request_is_accepted_when_command_queue_is_full() {
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (sender, _receiver) = std::sync::mpsc::sync_channel(1);
        let commands = CommandSender::new(sender, waker);
        commands.send(Command::Summarise).unwrap();
        assert!(commands.send(Command::Summarise).is_err());
        commands.stop().unwrap();
        commands.clone().stop().unwrap();
        assert_eq!(commands.stop_requests().load(Ordering::SeqCst), 2);
    }

    #[test]
    fn command_is_abandoned_if_its_receiver_is_gone() {
        let (reply, reply_receiver) = oneshot::channel();
        let command = Command::Readiness { reply };
        assert!(!command.is_abandoned());
        drop(reply_receiver);
        assert!(command.is_abandoned());
        assert!(!Command::Summarise.is_abandoned());
    }
}

//! Commands from the control plane to the data plane, and the notices that come back. Both directions are
//! bounded, and neither side blocks on the other.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, SystemTime};

use bulkhead_api::{
    Cause, Change, CrashId, CrashReport, EventKind, Severity, ShortState, Snapshot, TenantChange,
};
use bulkhead_shared::Verdict;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::access::HttpClient;
use crate::counters::SpoolCounters;
use crate::demand::Observation;
use crate::peer_check::ClientRejection;
use crate::reload::{LiveDropped, Reload};
use crate::scrape::Scrape;
use bulkhead_config::defaults::{
    IN_FLIGHT_CEILING, PERMITS_CEILING, PROCESSES_CEILING, QUEUE_CEILING, RATE_CEILING,
};

/// Maximum number of queued commands.
pub const COMMANDS_MAX: usize = 1024;

/// Maximum time for the data plane to reply, before it counts as stuck.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval between attempts to queue a command while the queue is full.
const QUEUE_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// The process of a worker, with its recent activity.
#[derive(Clone, Debug)]
pub struct WorkerProcess {
    pub bulkhead: Arc<str>,
    pub pid: u32,
    pub generation: u32,
    /// Number of jobs with an outcome.
    pub answered: u64,
    /// True if the bulkhead has jobs in flight.
    pub is_busy: bool,
}

/// A request of the control plane.
#[derive(Debug)]
pub enum Command {
    /// Accept clients on this listener from now on. The old socket file was removed.
    Listen(std::os::unix::net::UnixListener),
    /// Return the state of one bulkhead, or of all.
    Snapshot {
        bulkhead: Option<String>,
        /// Receives the snapshots; empty if there is no such bulkhead.
        reply: oneshot::Sender<Vec<Snapshot>>,
    },
    /// Return the short state of each bulkhead.
    States {
        reply: oneshot::Sender<Vec<ShortState>>,
    },
    /// Return the state of one isolated tenant's compartment.
    TenantSnapshot {
        bulkhead: String,
        tenant: String,
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// Return a consistent copy of all numbers behind the metrics.
    Scrape {
        reply: oneshot::Sender<Scrape>,
    },
    /// Carry out an operator's action on one bulkhead.
    Steer {
        bulkhead: String,
        action: SteerAction,
        reply: oneshot::Sender<Result<(), SteerError>>,
    },
    /// Change limits of one bulkhead.
    Change {
        bulkhead: String,
        change: Change,
        /// Receives the snapshot after the change.
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// Change limits of one tenant of a bulkhead.
    ChangeTenant {
        bulkhead: String,
        tenant: String,
        change: TenantChange,
        /// Receives all limits that the tenant then has in place of the bulkhead's.
        reply: oneshot::Sender<Result<TenantChange, SteerError>>,
    },
    /// Return the recent demand of a bulkhead, for advice.
    Observe {
        bulkhead: String,
        /// Receives the observation, or `None` if there is no such bulkhead.
        reply: oneshot::Sender<Option<Box<Observation>>>,
    },
    WorkerProcesses {
        reply: oneshot::Sender<Vec<WorkerProcess>>,
    },
    /// Report the memory of a worker, as read from `/proc`.
    ReportMemory {
        bulkhead: String,
        pid: u32,
        generation: u32,
        /// Resident set size in bytes.
        rss_bytes: u64,
    },
    /// Report a worker's temporary folder that holds more than expected.
    ReportTemporaryFolder {
        /// Spawn number of the worker.
        worker: u64,
        /// Disk usage of the folder, in bytes.
        bytes: u64,
        /// Disk usage without subfolders that have the name of a forked worker's folder, in bytes.
        bytes_without_forked: u64,
        /// Spawn number of the template whose folder contains this one, if any. The name alone proves
        /// nothing, because any worker can create a folder with such a name.
        template: Option<u64>,
    },
    /// Run a job of a crash report again, in a separate worker.
    Replay {
        request: ReplayRequest,
        /// Receives whether the replay has begun.
        accepted: oneshot::Sender<Result<(), ReplayError>>,
        /// Receives the result when the worker is gone. Dropped if the supervisor stops first.
        done: oneshot::Sender<ReplayResult>,
    },
    /// Serve a client connection opened by the control plane. Its handshake and permissions have been
    /// checked.
    AddClient {
        /// The data plane's end of the connection.
        socket: UnixStream,
        /// Permit that limits the number of such connections. Released when the data plane has closed the
        /// connection.
        permit: OwnedSemaphorePermit,
        /// Sender of the jobs.
        client: HttpClient,
    },
    /// Count the payloads of unknown length that the control plane receives for a token.
    AddSpool {
        /// Number of the token.
        token: u32,
        spool: Arc<SpoolCounters>,
    },
    /// Serve a client in the application that embeds this supervisor.
    AddInProcessClient {
        /// The data plane's end of the connection.
        end: bulkhead_shared::in_process::Endpoint,
    },
    /// Report a client that was rejected at the admin socket.
    ReportRejection {
        /// The client and the reason.
        rejection: ClientRejection,
        /// Permit that limits the number of pending reports.
        _permit: OwnedSemaphorePermit,
    },
    /// Apply another version of the configuration.
    Reload {
        reload: Box<Reload>,
        /// Receives the live changes that were dropped, or an error if nothing was applied.
        reply: oneshot::Sender<Result<LiveDropped, SteerError>>,
    },
    /// Return the live changes that a reload would drop, without applying it.
    TryReload {
        reload: Box<Reload>,
        reply: oneshot::Sender<LiveDropped>,
    },
    /// Write a summary of the state to the log.
    Summarise,
    /// Reap exited orphans that this process has inherited.
    ReapOrphans {
        /// Receives true if there may be more.
        reply: oneshot::Sender<bool>,
    },
}

impl Command {
    /// True if the sender no longer waits for the reply and the command must have no effect.
    pub fn is_abandoned(&self) -> bool {
        match self {
            Self::Snapshot { reply, .. } => reply.is_closed(),
            Self::States { reply, .. } => reply.is_closed(),
            Self::TenantSnapshot { reply, .. } => reply.is_closed(),
            Self::Scrape { reply } => reply.is_closed(),
            Self::Observe { reply, .. } => reply.is_closed(),
            Self::WorkerProcesses { reply } => reply.is_closed(),
            // The client has a response which says that no job began.
            Self::Replay { accepted, .. } => accepted.is_closed(),
            _ => false,
        }
    }

    /// Returns the relative cost of the command in one iteration of the data plane.
    pub fn weight(&self) -> usize {
        match self {
            Self::AddClient { .. }
            | Self::AddInProcessClient { .. }
            | Self::AddSpool { .. }
            | Self::ReportRejection { .. }
            | Self::ReportMemory { .. } => 1,
            Self::Snapshot { .. } | Self::Scrape { .. } | Self::Summarise => 8,
            _ => 4,
        }
    }
}

/// An operator's action on a bulkhead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SteerAction {
    /// Replace each worker once its replacement is ready.
    Restart,
    /// Reject new jobs.
    Drain,
    /// Accept jobs again.
    Resume,
    /// Forget the restart history, so that failed slots retry at once.
    Reset,
}

/// Validates a change on its own. Returns the problem as a sentence.
pub fn change_problem(change: &Change) -> Option<String> {
    let rate = change.rate_limit.iter().flatten().next().map(|rate| (rate.per_second, rate.burst));
    check_numbers((0, IN_FLIGHT_CEILING), change.max_in_flight, change.processes, change.max_queue, rate)
}

/// Validates a change of one tenant on its own. Returns the problem as a sentence.
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
        is_out_of_range.then(|| format!("{name} must be {min} to {max}"))
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
    is_out_of_range.then(|| format!("rate_limit.burst must be 1 to {RATE_CEILING}"))
}

/// An error while carrying out a command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SteerError {
    /// There is no bulkhead with this name.
    #[error("there is no bulkhead with this name")]
    NotFound,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The tenant has sent no job recently, or none at all.
    #[error("this tenant has sent no job to this bulkhead")]
    UnknownTenant,
    /// The request conflicts with other settings. Holds the reason and the fix.
    #[error("{0}")]
    Conflict(String),
}

/// A job of a crash report, to run again.
#[derive(Debug)]
pub struct ReplayRequest {
    /// The bulkhead whose worker died.
    pub bulkhead: String,
    pub operation: String,
    pub tenant: String,
    pub payload: Vec<u8>,
}

/// An error that prevents a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// The bulkhead is no longer configured.
    #[error("the job's bulkhead is no longer configured")]
    NotConfigured,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The limit of concurrent replays is reached.
    #[error("{REPLAYS_MAX} replays are already running; try again when a replay has ended")]
    Busy,
}

/// Maximum number of concurrent replays. Each uses a worker beyond the configured ones.
pub const REPLAYS_MAX: usize = 2;

#[derive(Debug)]
pub struct ReplayResult {
    /// Process id of the worker that was started.
    pub pid: Option<u32>,
    /// The verdict of the job, or the reason why it did not run.
    pub verdict: Result<Verdict, String>,
    /// The cause of death of the worker or program, if it died.
    pub cause: Option<Cause>,
    /// Time that the worker had the job.
    pub ran: Duration,
}

/// An error while sending a command to the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandSendError {
    /// The queue already holds [`COMMANDS_MAX`] commands.
    #[error("the supervisor accepts no commands at the moment")]
    Busy,
    /// The data plane has ended.
    #[error("the supervisor has ended")]
    Ended,
}

/// Sends commands to the data plane.
#[derive(Clone, Debug)]
pub struct CommandSender {
    commands: SyncSender<Command>,
    waker: Arc<mio::Waker>,
    stop_requests: Arc<AtomicU32>,
}

impl CommandSender {
    /// Creates a sender for `commands`. The receiver sleeps until `waker` is called.
    pub fn new(commands: SyncSender<Command>, waker: Arc<mio::Waker>) -> Self {
        Self { commands, waker, stop_requests: Arc::default() }
    }

    /// Stops the data plane: drains for up to `drain_timeout`, or, if it is already stopping, ends at once.
    /// Uses a counter instead of the queue, so a full queue cannot delay a stop.
    pub fn stop(&self) -> Result<(), CommandSendError> {
        self.stop_requests.fetch_add(1, Ordering::SeqCst);
        self.waker.wake().map_err(|_| CommandSendError::Busy)
    }

    /// Returns the counter of stop requests.
    pub fn stop_requests(&self) -> Arc<AtomicU32> {
        self.stop_requests.clone()
    }

    /// Queues a command without blocking.
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

    /// Queues the command that `command` builds around a reply channel, and waits for the reply. Returns
    /// `None` if the queue is full or no reply arrives within two seconds.
    pub async fn request<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, reply_receiver) = oneshot::channel();
        self.send(command(reply)).ok()?;
        tokio::time::timeout(REPLY_TIMEOUT, reply_receiver).await.ok()?.ok()
    }
}

/// A notice that may be dropped under load. [`crate::notices`] has separate channels for messages that must
/// not be lost.
#[derive(Debug)]
pub enum DroppableNotice {
    /// An event of interest to operators.
    Event(Box<Event>),
    /// A worker or program crashed. The control plane still adds the tail of its output.
    Crash {
        report: Box<CrashReport>,
        /// Permit that limits the number of reports that wait to be stored.
        permit: OwnedSemaphorePermit,
    },
}

/// An event before it gets its number.
#[derive(Clone, Debug)]
pub struct Event {
    pub at: SystemTime,
    pub severity: Severity,
    /// Kind of the event, with its fields.
    pub kind: EventKind,
    pub bulkhead: Option<Arc<str>>,
    /// The isolated tenant concerned, if any.
    pub tenant: Option<Arc<str>>,
    /// Id of the related crash report.
    pub report: Option<CrashId>,
    /// Last output of the process.
    pub stderr_tail: Option<String>,
    /// Number of suppressed events of this kind since the previous one.
    pub suppressed: Option<u64>,
}

impl Event {
    pub fn new(severity: Severity, bulkhead: Option<Arc<str>>, kind: EventKind) -> Self {
        let at = SystemTime::now();
        Self { at, severity, kind, bulkhead, tenant: None, report: None, stderr_tail: None, suppressed: None }
    }

    /// Returns the fields in log order, without the kind.
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
    fn stop_request_needs_no_queue_space() {
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
    fn detects_abandoned_commands() {
        let (reply, reply_receiver) = oneshot::channel();
        let command = Command::States { reply };
        assert!(!command.is_abandoned());
        drop(reply_receiver);
        assert!(command.is_abandoned());
        assert!(!Command::Summarise.is_abandoned());
    }
}

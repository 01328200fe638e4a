//! How the control plane talks to the data plane and hears from it: commands in, notices out. Both
//! ways are bounded; neither side ever waits for the other's work.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, SystemTime};

use bulkhead_api::{Cause, Change, CrashId, CrashReport, Severity, ShortState, Snapshot, TenantChange, What};
use bulkhead_shared::Verdict;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::demand::Observation;
use crate::entry::Refusal;
use crate::reload::{LiveDropped, Reload};
use crate::scrape::Scrape;
use bulkhead_config::defaults::{
    IN_FLIGHT_CEILING, PERMITS_CEILING, PROCESSES_CEILING, QUEUE_CEILING, RATE_CEILING,
};

/// Commands that wait for the data plane at most.
pub const COMMANDS_MAX: usize = 1024;

/// How long the data plane may take for an answer before it counts as stuck.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// The process of a worker, and whether it has had work.
#[derive(Clone, Debug)]
pub struct WorkerProcess {
    /// Whose it is.
    pub bulkhead: Arc<str>,
    /// Its number.
    pub pid: u32,
    /// Which incarnation.
    pub generation: u32,
    /// Jobs that its bulkhead has answered.
    pub answered: u64,
    /// Whether its bulkhead has jobs in flight.
    pub is_busy: bool,
}

/// What the control plane may ask of the data plane.
#[derive(Debug)]
pub enum Command {
    /// Clients come to this listener from now on: the file of the one before was removed.
    Listen(std::os::unix::net::UnixListener),
    /// The state of every bulkhead, or of one.
    Snapshot {
        /// Which; `None` for all.
        bulkhead: Option<String>,
        /// Empty if there is no such bulkhead.
        reply: oneshot::Sender<Vec<Snapshot>>,
    },
    /// The state of each bulkhead in a word.
    States {
        /// Of all.
        reply: oneshot::Sender<Vec<ShortState>>,
    },
    /// The state of one tenant's part of a bulkhead whose tenants are kept apart.
    TenantSnapshot {
        /// Which bulkhead.
        bulkhead: String,
        /// The tenant.
        tenant: String,
        /// What it is like.
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// All numbers behind the metrics, of one moment.
    Scrape {
        /// What they are.
        reply: oneshot::Sender<Scrape>,
    },
    /// Do something to one bulkhead.
    Steer {
        /// Which.
        bulkhead: String,
        /// What.
        verb: Verb,
        /// Whether it was done.
        reply: oneshot::Sender<Result<(), SteerError>>,
    },
    /// Put other numbers in force for one bulkhead.
    Change {
        /// Which.
        bulkhead: String,
        /// Which numbers.
        change: Change,
        /// The bulkhead as it is then.
        reply: oneshot::Sender<Result<Box<Snapshot>, SteerError>>,
    },
    /// Put other numbers in force for one tenant of a bulkhead.
    ChangeTenant {
        /// Which bulkhead.
        bulkhead: String,
        /// Which tenant.
        tenant: String,
        /// Which numbers.
        change: TenantChange,
        /// All numbers of its own that the tenant has then.
        reply: oneshot::Sender<Result<TenantChange, SteerError>>,
    },
    /// What was seen of a bulkhead lately, for advice.
    Observe {
        /// Which.
        bulkhead: String,
        /// `None` if there is no such bulkhead.
        reply: oneshot::Sender<Option<Box<Observation>>>,
    },
    /// The processes of all workers.
    WorkerProcesses { reply: oneshot::Sender<Vec<WorkerProcess>> },
    /// How much memory a worker holds, as read from `/proc`.
    Memory {
        /// The worker's bulkhead.
        bulkhead: String,
        /// The worker's process.
        pid: u32,
        /// Which incarnation.
        generation: u32,
        /// Resident bytes.
        rss_bytes: u64,
    },
    /// A worker's temporary folder holds much.
    Temporary {
        /// The worker, as the keeper numbers it.
        worker: u64,
        /// What the folder takes on disk.
        bytes: u64,
        /// The same without what in there is called like a folder of a forked worker.
        apart: u64,
        /// The folder that it lies in, by the number of the template that has it; what is called so can be anyone's.
        of: Option<u64>,
    },
    /// Run a job of a crash report again, in a worker that is started for it alone.
    Replay {
        /// What to run.
        order: ReplayOrder,
        /// Whether it is begun.
        accepted: oneshot::Sender<Result<(), ReplayError>>,
        /// What came of it, when the worker is gone. Dropped if the supervisor stops before.
        done: oneshot::Sender<Replayed>,
    },
    /// Serve a client of the control plane's own, whose hello and rights are out of question.
    Client {
        /// The data plane's end of the connection.
        socket: UnixStream,
        /// Of the few that may be; it is free again when the data plane has done with the client.
        place: OwnedSemaphorePermit,
        /// The user that it is for.
        uid: u32,
    },
    /// Serve a client of the application that this supervisor is in.
    Connect {
        /// The data plane's end of the connection.
        end: bulkhead_shared::in_process::End,
    },
    /// A client was turned away at the admin socket.
    Refused {
        /// The client, and why.
        refusal: Refusal,
        /// Of the few that may wait.
        _place: OwnedSemaphorePermit,
    },
    /// Put another version of the file in force.
    Reload {
        /// What is different.
        reload: Box<Reload>,
        /// Whether it is in force, and what was dropped for it.
        reply: oneshot::Sender<Result<LiveDropped, SteerError>>,
    },
    /// Say what a reload would drop, and change nothing.
    TryReload {
        /// What is different.
        reload: Box<Reload>,
        /// What would be dropped.
        reply: oneshot::Sender<LiveDropped>,
    },
    /// Write a summary of the state to the log.
    Summarise,
    /// Wait for orphans that this process inherited and that have ended.
    ReapOrphans {
        /// True if there may be more.
        reply: oneshot::Sender<bool>,
    },
}

impl Command {
    /// Whether its sender does not wait for the answer any more, and nothing else is to come of it.
    pub fn is_abandoned(&self) -> bool {
        match self {
            Self::Snapshot { reply, .. } => reply.is_closed(),
            Self::States { reply, .. } => reply.is_closed(),
            Self::TenantSnapshot { reply, .. } => reply.is_closed(),
            Self::Scrape { reply } => reply.is_closed(),
            Self::Observe { reply, .. } => reply.is_closed(),
            Self::WorkerProcesses { reply } => reply.is_closed(),
            _ => false,
        }
    }

    /// How much of a turn of the data plane it takes, compared with others.
    pub fn weight(&self) -> usize {
        match self {
            Self::Client { .. } | Self::Connect { .. } | Self::Refused { .. } | Self::Memory { .. } => 1,
            Self::Snapshot { .. } | Self::Scrape { .. } | Self::Summarise => 8,
            _ => 4,
        }
    }
}

/// The four things an operator can do to a bulkhead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Replace each worker, the replacement ready first.
    Restart,
    /// Take no more jobs.
    Drain,
    /// Take jobs again.
    Resume,
    /// Forget the restart history, so that failed slots try again now.
    Reset,
}

/// What is wrong with a change by itself, in one sentence.
pub fn problem_of_change(change: &Change) -> Option<String> {
    let rate = change.rate_limit.iter().flatten().next().map(|rate| (rate.per_second, rate.burst));
    check_numbers((0, IN_FLIGHT_CEILING), change.max_in_flight, change.processes, change.max_queue, rate)
}

/// The same of one tenant's.
pub fn problem_of_tenant_change(change: &TenantChange) -> Option<String> {
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
    let out_of = |name: &str, value: Option<u32>, least: u32, most: u64| {
        let is_out = value.is_some_and(|value| value < least || u64::from(value) > most);
        is_out.then(|| format!("{name} must be {least} to {most}"))
    };
    out_of("max_in_flight", max_in_flight, in_flight_min, in_flight_max)
        .or_else(|| out_of("processes", processes, 1, PROCESSES_CEILING))
        .or_else(|| out_of("max_queue", max_queue, 0, QUEUE_CEILING))
        .or_else(|| check_rate(rate?))
}

fn check_rate((per_second, burst): (f64, Option<u32>)) -> Option<String> {
    if !(per_second > 0.0 && per_second <= RATE_CEILING as f64) {
        return Some(format!("rate_limit.per_second must be above 0 and at most {RATE_CEILING}"));
    }
    let is_out = burst.is_some_and(|burst| burst == 0 || u64::from(burst) > RATE_CEILING);
    is_out.then(|| format!("rate_limit.burst must be 1 to {RATE_CEILING}"))
}

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SteerError {
    /// No bulkhead has that name.
    #[error("there is no bulkhead of that name")]
    NotFound,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The tenant has not been here, or not for a long time.
    #[error("this tenant has sent no job to this bulkhead")]
    NoTenant,
    /// It does not fit what else is in force; why, and what to do.
    #[error("{0}")]
    Unfit(String),
}

/// A job of a crash report.
#[derive(Debug)]
pub struct ReplayOrder {
    /// The bulkhead whose worker died of it.
    pub bulkhead: String,
    /// What the handler is to do.
    pub operation: String,
    /// The tenant of the job.
    pub tenant: String,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Why a job of a crash report was not run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// No bulkhead has that name any more.
    #[error("its bulkhead is not configured any more")]
    NotConfigured,
    /// The supervisor is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// As many as may be are under way.
    #[error("{REPLAYS_MAX} replays are under way already; try again when one has ended")]
    Busy,
}

/// Replays under way at once: each has a worker beyond those that are configured.
pub const REPLAYS_MAX: usize = 2;

/// What came of a job that was run again.
#[derive(Debug)]
pub struct Replayed {
    /// The worker that was started for it.
    pub pid: Option<u32>,
    /// How the job ended, or why it was not run.
    pub end: Result<Verdict, String>,
    /// What worker or program died of, if one did.
    pub cause: Option<Cause>,
    /// How long the worker had it.
    pub ran: Duration,
}

/// Why the data plane does not hear a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unheard {
    /// It has [`COMMANDS_MAX`] before this one.
    #[error("the supervisor does not take commands at the moment")]
    Busy,
    /// It is gone.
    #[error("the supervisor has ended")]
    Ended,
}

/// Sends commands to the data plane.
#[derive(Clone, Debug)]
pub struct Commander {
    commands: SyncSender<Command>,
    waker: Arc<mio::Waker>,
    stops: Arc<AtomicU32>,
}

impl Commander {
    /// Sends into `commands`, whose receiver sleeps until `waker` wakes it.
    pub fn new(commands: SyncSender<Command>, waker: Arc<mio::Waker>) -> Self {
        Self { commands, waker, stops: Arc::default() }
    }

    /// Has the data plane stop: drain for as long as `drain_timeout`, or, if it is stopping already, at once. This
    /// has a way of its own, which is never full.
    pub fn stop(&self) -> Result<(), Unheard> {
        self.stops.fetch_add(1, Ordering::SeqCst);
        self.waker.wake().map_err(|_| Unheard::Busy)
    }

    /// How often it was asked to stop.
    pub fn stops(&self) -> Arc<AtomicU32> {
        self.stops.clone()
    }

    /// Hands over a command; never waits.
    pub fn send(&self, command: Command) -> Result<(), Unheard> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => Unheard::Busy,
            TrySendError::Disconnected(_) => Unheard::Ended,
        })?;
        self.waker.wake().map_err(|_| Unheard::Busy)
    }

    /// Sends the command that has the answer come to this sender. `None` if the data plane has too much to do, or does
    /// not answer in time.
    pub async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply)).ok()?;
        tokio::time::timeout(ANSWER_WITHIN, answer).await.ok()?.ok()
    }
}

/// What the data plane tells the control plane of what happens; some of it is dropped when it is too much. What must
/// not be has ways of its own: see [`crate::notices`].
#[derive(Debug)]
pub enum Notice {
    /// Something happened that an operator may want to know.
    Event(Box<Event>),
    /// A worker or a program crashed. What it wrote last is still to be added.
    Crash {
        /// What is known of it.
        report: Box<CrashReport>,
        /// Its place among those that are to be kept.
        place: OwnedSemaphorePermit,
    },
}

/// One event, before it has a number.
#[derive(Clone, Debug)]
pub struct Event {
    /// When it happened.
    pub at: SystemTime,
    /// How much it matters.
    pub severity: Severity,
    /// What has happened.
    pub what: What,
    /// The bulkhead concerned, if one is.
    pub bulkhead: Option<Arc<str>>,
    /// The tenant whose part of the bulkhead it is, where tenants are apart.
    pub tenant: Option<Arc<str>>,
    /// The crash report about it.
    pub report: Option<CrashId>,
    /// What the process said last.
    pub stderr_tail: Option<String>,
    /// How many of the kind were left out before it.
    pub suppressed: Option<u64>,
}

impl Event {
    /// Something that happens now.
    pub fn new(severity: Severity, bulkhead: Option<Arc<str>>, what: What) -> Self {
        let at = SystemTime::now();
        Self { at, severity, what, bulkhead, tenant: None, report: None, stderr_tail: None, suppressed: None }
    }

    /// What is told of it beside its kind, in the order in which the log has it.
    pub fn fields(&self) -> Vec<(&'static str, Value)> {
        let mut fields = self.what.fields();
        let is_told = fields.iter().any(|(name, _)| *name == "tenant");
        fields.extend(self.tenant.as_deref().filter(|_| !is_told).map(|tenant| ("tenant", json!(tenant))));
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
    fn a_stop_is_heard_where_no_command_has_room() {
        let poll = mio::Poll::new().unwrap();
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).unwrap());
        let (sender, _commands) = std::sync::mpsc::sync_channel(1);
        let commander = Commander::new(sender, waker);
        commander.send(Command::Summarise).unwrap();
        assert!(commander.send(Command::Summarise).is_err());
        commander.stop().unwrap();
        commander.clone().stop().unwrap();
        assert_eq!(commander.stops().load(Ordering::SeqCst), 2);
    }

    #[test]
    fn abandoned_commands_are_known() {
        let (reply, answer) = oneshot::channel();
        let command = Command::States { reply };
        assert!(!command.is_abandoned());
        drop(answer);
        assert!(command.is_abandoned());
        assert!(!Command::Summarise.is_abandoned());
    }
}

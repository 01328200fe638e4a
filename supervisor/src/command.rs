//! How the control plane talks to the data plane and hears from it: commands in, notices out. Both
//! ways are bounded; neither side ever waits for the other's work.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::config::defaults::QUEUE_CEILING;
use crate::snapshot::Snapshot;

/// Commands that wait for the data plane at most.
pub const COMMANDS_MAX: usize = 1024;

/// Notices that wait for the control plane at most; what comes beyond is dropped and counted.
pub const NOTICES_MAX: usize = 16 * 1024;

/// What the control plane may ask of the data plane.
#[derive(Debug)]
pub enum Command {
    /// The state of every bulkhead, or of one.
    Snapshot {
        /// Which; `None` for all.
        bulkhead: Option<String>,
        /// Empty if there is no such bulkhead.
        reply: oneshot::Sender<Vec<Snapshot>>,
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
    /// How much memory a worker holds, as read from `/proc`.
    Memory {
        /// Whose worker.
        bulkhead: String,
        /// The worker's process.
        pid: u32,
        /// Which incarnation.
        generation: u32,
        /// Resident bytes.
        rss_bytes: u64,
    },
    /// Stop: drain for as long as `drain_timeout`, or, if already stopping, at once.
    Stop,
    /// Write a summary of the state to the log.
    Summarise,
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

/// What can be changed while a bulkhead runs. What is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// Jobs that may wait. Those that wait already stay.
    pub max_queue: Option<u32>,
    /// How fast jobs may come.
    pub rate_limit: Option<ChangedRate>,
    /// `forced_open`, or `auto` to leave it to itself.
    pub breaker: Option<BreakerMode>,
}

/// `rate_limit`, as in the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangedRate {
    /// Above 0.
    pub per_second: f64,
    /// At least 1; `per_second`, rounded up, if absent.
    pub burst: Option<u32>,
    /// Who shares it; the bulkhead if absent.
    #[serde(default)]
    pub per: ChangedPer,
}

/// Who shares a rate limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChangedPer {
    /// All jobs.
    #[default]
    Bulkhead,
    /// The jobs of each tenant.
    Tenant,
}

/// Who decides whether a breaker is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakerMode {
    /// It is open until further notice.
    ForcedOpen,
    /// What it sees.
    Auto,
}

impl Change {
    /// What is wrong with it, for whoever asked.
    pub(crate) fn problem(&self) -> Option<String> {
        let queue_max = QUEUE_CEILING;
        if self.max_queue.is_some_and(|most| u64::from(most) > queue_max) {
            return Some(format!("max_queue must be at most {queue_max}"));
        }
        let rate = self.rate_limit.as_ref()?;
        if !(rate.per_second > 0.0 && rate.per_second <= 1e9) {
            return Some("rate_limit.per_second must be above 0 and at most 1000000000".into());
        }
        (rate.burst == Some(0)).then(|| "rate_limit.burst must be at least 1".into())
    }
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
}

/// The data plane is gone, or has [`COMMANDS_MAX`] commands before this one.
#[derive(Debug, thiserror::Error)]
#[error("the supervisor does not take commands at the moment")]
pub struct Busy;

/// Sends commands to the data plane.
#[derive(Clone, Debug)]
pub struct Commander {
    commands: SyncSender<Command>,
    waker: Arc<mio::Waker>,
}

impl Commander {
    /// Sends into `commands`, whose receiver sleeps until `waker` wakes it.
    pub fn new(commands: SyncSender<Command>, waker: Arc<mio::Waker>) -> Self {
        Self { commands, waker }
    }

    /// Hands over a command; never waits.
    pub fn send(&self, command: Command) -> Result<(), Busy> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) | TrySendError::Disconnected(_) => Busy,
        })?;
        self.waker.wake().map_err(|_| Busy)
    }
}

/// What the data plane tells the control plane.
#[derive(Debug)]
pub enum Notice {
    /// Something happened that an operator may want to know.
    Event(Event),
    /// A worker was started; these are the reading ends of its standard output and error.
    Output {
        /// Whose worker.
        bulkhead: Arc<str>,
        /// Its process.
        pid: u32,
        /// Its standard output.
        stdout: OwnedFd,
        /// Its standard error.
        stderr: OwnedFd,
    },
    /// Every bulkhead's first start has ended, ready or failed.
    Started,
    /// The supervisor has begun to stop.
    Stopping,
}

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Severity {
    Info,
    Warning,
    Critical,
}

/// One event of the contract's §6, before it has a number.
#[derive(Clone, Debug)]
pub struct Event {
    /// When it happened.
    pub at: SystemTime,
    /// How much it matters.
    pub severity: Severity,
    /// One of the contract's kinds, such as `worker_exited`.
    pub kind: &'static str,
    /// The bulkhead concerned, if one is.
    pub bulkhead: Option<Arc<str>>,
    /// The kind's own fields. `worker_exited` has `pid`, so that the tail of its standard error can be added.
    pub fields: Vec<(&'static str, serde_json::Value)>,
}

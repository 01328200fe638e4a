//! The client library, which submits jobs to a fleet and waits for their outcomes. Stores a job as a message and reads
//! the outcome from the ledger. Agents pull and run the jobs. Queries and changes by operators are in `operate`.

use std::fmt;
use std::time::Duration;

use async_nats::{Client, Subscriber};
use bulkhead_client::{Executed, JobError, Priority, RejectReason, Reply};
use bulkhead_shared::Verdict;
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use crate::decide::Terms;
use crate::decide::delivery::outcome;
use crate::job::{DEADLINE_DEFAULT, HEADER_BYTES_RESERVED, JobOptions};
use crate::names::{LEDGER, job_subject, ledger_subject, notice_subject};
use crate::record::{Phase, ReadError};
use crate::server::connection::{ConnectError, connect_with_refusals};
use crate::server::ledger;
use crate::server::messages::{
    ApiError, Published, REPEAT_DELAY, fleet_api, publish, read_subject, subscribe,
};
use crate::server::refusals::Refusals;
use crate::settings::{Nats, Streams};

/// Maximum time for retrying an unacknowledged submission. Leader elections take up to ten seconds.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum delay between two reads of the ledger.
const READ_PAUSE_MAX: Duration = Duration::from_secs(15);
/// Delays, in milliseconds, before successive reads of the ledger after a job's outcome has been announced. Several
/// reads can be necessary, because the replica that serves a read may not have the record yet.
const READ_PAUSES_AFTER_NOTICE: [u64; 6] = [0, 5, 20, 50, 150, 400];

/// A connection to a fleet. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Fleet {
    client: Client,
    refusals: Refusals,
    tenant: String,
    host_lost_after: Duration,
}

/// Error returned for a job that has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetError {
    /// The job's outcome is not `ok`, or the fleet rejected the submission.
    Job(JobError),
    /// No outcome was recorded in time. The job may still run, and its outcome can be queried later with the same ID.
    Overdue {
        /// ID of the job.
        id: String,
        /// Time spent waiting.
        waited: Duration,
    },
    /// The servers did not respond or did not acknowledge the submission. The job may still run. Submitting it again
    /// with the same ID is safe.
    Unreachable {
        /// ID of the job.
        id: String,
        /// Human-readable description.
        message: String,
    },
    /// The job has an outcome, but this program cannot read the record. A later version could have written the record.
    Unreadable {
        /// ID of the job.
        id: String,
        /// Human-readable reason.
        message: String,
    },
}

impl FleetError {
    /// Returns whether the handler began the job.
    pub fn executed(&self) -> Executed {
        match self {
            Self::Job(error) => error.executed(),
            Self::Overdue { .. } | Self::Unreachable { .. } | Self::Unreadable { .. } => Executed::Unknown,
        }
    }

    /// Returns true if the same job can succeed when submitted again.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Job(error) if error.is_retryable()) || matches!(self, Self::Unreachable { .. })
    }

    /// Returns the exit code that `bulkhead fleet` uses for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Job(error) => error.exit_code(),
            Self::Overdue { .. } => 124,
            Self::Unreachable { .. } => 69,
            Self::Unreadable { .. } => 65,
        }
    }
}

impl fmt::Display for FleetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(error) => error.fmt(f),
            Self::Overdue { id, waited } => write!(
                f,
                "no outcome within {} s; the job may have run; ask again with: bulkhead fleet result {id}",
                waited.as_secs()
            ),
            Self::Unreachable { id, message } => write!(
                f,
                "the fleet's servers are not responding: {message}; the job may have been accepted; \
                 submit the job again with the same ID ({id}): it runs only once"
            ),
            Self::Unreadable { id, message } => {
                write!(f, "the outcome of the job {id} cannot be read: {message}; update this program")
            }
        }
    }
}

impl std::error::Error for FleetError {}

impl From<JobError> for FleetError {
    fn from(error: JobError) -> Self {
        Self::Job(error)
    }
}

impl Fleet {
    /// Connects to the servers of a fleet, such as `nats://127.0.0.1:4222`. Several addresses are separated by
    /// commas.
    pub async fn connect(servers: &str) -> Result<Self, ConnectError> {
        let servers = servers.split(',').map(|server| server.trim().to_owned()).collect();
        Self::connect_with(&Nats::new(servers), &Streams::default()).await
    }

    /// Connects with the settings in the `[nats]` and `[streams]` tables of a configuration.
    pub async fn connect_with(nats: &Nats, streams: &Streams) -> Result<Self, ConnectError> {
        let (client, refusals) = connect_with_refusals(nats, "bulkhead-fleet client").await?;
        let tenant = nats.tenant.clone().unwrap_or_default();
        Ok(Self { client, refusals, tenant, host_lost_after: streams.host_lost_after })
    }

    /// Creates a job for `bulkhead`, with a random ID.
    pub fn job(&self, bulkhead: impl Into<String>, payload: impl Into<Vec<u8>>) -> FleetJob {
        let id = format!("{:016x}{:016x}", crate::random::number(), crate::random::number());
        let mut options = JobOptions::new(bulkhead.into(), id);
        options.tenant = self.tenant.clone();
        // A job without a deadline would get the fleet's `deadline_max`, which submitters do not know.
        options.deadline = Some(DEADLINE_DEFAULT);
        FleetJob { fleet: self.clone(), options, payload: Bytes::from(payload.into()) }
    }

    /// Waits for the outcome of a job that was submitted earlier, possibly by another process. Returns
    /// [`FleetError::Overdue`] if there is no outcome after `wait`.
    pub async fn result(&self, tenant: &str, id: &str, wait: Duration) -> Result<Reply, FleetError> {
        let subject = notice_subject(tenant, id);
        let notices = subscribe(&self.client, subject)
            .await
            .map_err(|message| FleetError::Unreachable { id: id.to_owned(), message })?;
        let (id, ledger) = (id.to_owned(), ledger_subject(tenant, id));
        Submitted { fleet: self.clone(), id, ledger, notices, began: Instant::now(), wait }.result().await
    }

    /// Reads the ledger once. Returns `Ok(None)` if the job has no outcome yet, and an error message if the servers do not
    /// respond.
    async fn ending(&self, ledger: &str, id: &str) -> Result<Option<Result<Reply, FleetError>>, String> {
        let phase = match ledger::read(&self.client, ledger).await {
            Ok(stored) => stored.map(|stored| stored.record.phase),
            // The record of a job without an outcome can still be replaced by a record that this program can read.
            Err(ReadError::Unreadable { is_decided: false, .. }) => None,
            Err(ReadError::Unreadable { message, .. }) => {
                return Ok(Some(Err(FleetError::Unreadable { id: id.to_owned(), message })));
            }
            Err(ReadError::Failed(message)) => return Err(message),
        };
        let Some(Phase::Decided { ending, .. }) = phase else { return Ok(None) };
        let result = JobError::from_outcome(Box::new(ending.outcome), ending.payload.to_vec());
        Ok(Some(result.map_err(FleetError::Job)))
    }
}

/// Builder for a fleet job. Nothing is sent until [`FleetJob::submit`] is called.
#[must_use = "a job does nothing until it is submitted"]
#[derive(Clone, Debug)]
pub struct FleetJob {
    fleet: Fleet,
    options: JobOptions,
    payload: Bytes,
}

impl FleetJob {
    /// Sets the ID, which has 1 to 128 bytes. If a tenant submits several jobs with the same ID, only one of them
    /// runs, and all of them have its outcome.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.options.id = id.into();
        self
    }

    /// Sets the operation that the handler performs. The name has at most 256 bytes.
    pub fn operation(mut self, name: impl Into<String>) -> Self {
        self.options.operation = name.into();
        self
    }

    /// Sets the tenant that the job belongs to. The name has at most 256 bytes.
    pub fn tenant(mut self, name: impl Into<String>) -> Self {
        self.options.tenant = name.into();
        self
    }

    /// Sets the time limit from submission to outcome, which includes waiting time and all attempts. The default is
    /// one hour, and the maximum is the fleet's `deadline_max`.
    pub fn deadline(mut self, limit: Duration) -> Self {
        self.options.deadline = Some(limit);
        self
    }

    /// Sets the maximum run time of each attempt.
    pub fn run_limit(mut self, limit: Duration) -> Self {
        self.options.run_limit = Some(limit);
        self
    }

    /// Sets the job's priority in the supervisor's queue.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.options.priority = priority;
        self
    }

    /// Sets the job's cost for rate limiting.
    pub fn cost(mut self, cost: u32) -> Self {
        self.options.cost = cost;
        self
    }

    /// Declares whether the job can safely run twice.
    pub fn idempotent(mut self, is_idempotent: bool) -> Self {
        self.options.is_idempotent = is_idempotent;
        self
    }

    /// Sets a W3C `traceparent` to pass to the handler.
    pub fn traceparent(mut self, text: impl Into<String>) -> Self {
        self.options.traceparent = Some(text.into());
        self
    }

    /// Returns the options of the job.
    pub fn options(&self) -> &JobOptions {
        &self.options
    }

    /// Submits the job. When this returns, the job has been stored and survives the loss of any host.
    ///
    /// Retries an unacknowledged submission for up to 15 s. The ledger prevents duplicates from running.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let fleet = bulkhead_fleet::Fleet::connect("nats://127.0.0.1:4222").await?;
    /// let job = fleet.job("thumbnail", b"...".to_vec()).id("picture-17").idempotent(true);
    /// let submitted = job.submit().await?;
    /// println!("{} bytes", submitted.result().await?.payload().len());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn submit(self) -> Result<Submitted, FleetError> {
        let (fleet, options) = (&self.fleet, &self.options);
        options.check().map_err(|message| self.rejected(RejectReason::Invalid, message))?;
        let max = fleet.client.max_payload().saturating_sub(HEADER_BYTES_RESERVED);
        if self.payload.len() > max {
            let message =
                format!("the payload has {} bytes; the fleet accepts at most {max}", self.payload.len());
            return Err(self.rejected(RejectReason::TooLarge, message).into());
        }
        // Subscribes before submitting the job, so that no notice is missed.
        let notices = subscribe(&fleet.client, notice_subject(&options.tenant, &options.id)).await;
        let notices = notices.map_err(|message| self.unreachable(message))?;
        self.publish(Instant::now()).await?;
        // The deadline counts from the time at which the job is stored.
        let began = Instant::now();
        let wait = options.deadline.unwrap_or(DEADLINE_DEFAULT).saturating_add(fleet.host_lost_after);
        let (id, ledger) = (options.id.clone(), ledger_subject(&options.tenant, &options.id));
        Ok(Submitted { fleet: fleet.clone(), id, ledger, notices, began, wait })
    }

    /// Publishes the job and retries until the stream stores or refuses it.
    async fn publish(&self, began: Instant) -> Result<(), FleetError> {
        let subject = job_subject(&self.options.bulkhead, &self.options.tenant);
        let mut may_be_stored = false;
        loop {
            let (headers, payload) = (self.options.to_headers(), self.payload.clone());
            let published = tokio::select! {
                published = publish(&self.fleet.client, subject.clone(), headers, payload, None) => published,
                message = self.fleet.refusals.of(&subject) => Published::Refused(message),
            };
            let has_time = began.elapsed() < SUBMIT_TIMEOUT;
            let (reason, message) = match published {
                Published::Stored(_) => return Ok(()),
                Published::NoStream => {
                    // In a cluster, a stream can be without a leader for some time.
                    let may_elect = has_time && self.fleet.client.server_info().cluster.is_some();
                    let reason = match may_elect {
                        true => None,
                        false => Some(self.why_no_stream(&subject).await),
                    };
                    match reason {
                        Some(reason) if !has_time || reason.0 == RejectReason::NotFound => reason,
                        _ => {
                            tokio::time::sleep(REPEAT_DELAY).await;
                            continue;
                        }
                    }
                }
                Published::Unknown(_) | Published::Conflict(_) | Published::Pending if has_time => {
                    may_be_stored = true;
                    tokio::time::sleep(REPEAT_DELAY).await;
                    continue;
                }
                other => match other.rejection() {
                    Some(rejection) => rejection,
                    None => return Err(self.unreachable(format!("{other:?}"))),
                },
            };
            return Err(match may_be_stored {
                true => self.unreachable(message),
                false => self.rejected(reason, message).into(),
            });
        }
    }

    /// Returns the reason why no stream accepts the subject. The bulkhead does not exist only if the servers confirm that
    /// no stream has the subject, because a stream without a leader or quorum does not respond either.
    async fn why_no_stream(&self, subject: &str) -> (RejectReason, String) {
        const CALL: &str = "STREAM.NAMES";
        let (call_subject, request) = (format!("$JS.API.{CALL}"), json!({"subject": subject}));
        let names: Result<StreamNames, ApiError> = tokio::select! {
            names = fleet_api(&self.fleet.client, CALL, request) => names,
            description = self.fleet.refusals.of(&call_subject) => {
                Err(ApiError { description, ..ApiError::default() })
            }
        };
        match names {
            Ok(StreamNames { total: 0 }) => (RejectReason::NotFound, "the fleet has no such bulkhead".into()),
            Ok(_) => (RejectReason::Unavailable, "the job stream has no leader".into()),
            Err(error) => {
                let message = format!(
                    "the job stream does not respond, or the fleet has no such bulkhead; the servers did not say \
                     which: {}",
                    error.description
                );
                (RejectReason::Unavailable, message)
            }
        }
    }

    fn rejected(&self, reason: RejectReason, message: String) -> JobError {
        let options = &self.options;
        let deadline = options.deadline.unwrap_or(DEADLINE_DEFAULT);
        let terms =
            Terms { bulkhead: options.bulkhead.clone(), deadline, is_idempotent: options.is_idempotent };
        JobError::Rejected(Box::new(outcome(&terms, Verdict::Rejected { reason, message }, 0)))
    }

    fn unreachable(&self, message: String) -> FleetError {
        FleetError::Unreachable { id: self.options.id.clone(), message }
    }
}

/// The server's response to the question which streams have a subject.
#[derive(Deserialize)]
struct StreamNames {
    total: u64,
}

/// Handle to a submitted job. Dropping the handle does not cancel the job.
#[derive(Debug)]
pub struct Submitted {
    fleet: Fleet,
    id: String,
    ledger: String,
    notices: Subscriber,
    began: Instant,
    wait: Duration,
}

impl Submitted {
    /// Returns the ID of the job.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Waits for the outcome. Gives up once `host_lost_after` has passed since the deadline.
    pub async fn result(mut self) -> Result<Reply, FleetError> {
        let mut pause = Duration::from_secs(1);
        let request = read_subject(LEDGER, &self.ledger);
        loop {
            let read = tokio::select! {
                read = self.fleet.ending(&self.ledger, &self.id) => read,
                message = self.fleet.refusals.of(&request) => return Err(self.forbidden(message)),
            };
            let last_error = match read {
                Ok(Some(result)) => return result,
                Ok(None) => None,
                Err(error) => Some(error),
            };
            let left = self.wait.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                return Err(self.overdue(last_error));
            }
            let notice = tokio::time::timeout(pause.min(left), self.notices.next()).await;
            if notice.is_ok()
                && let Some(result) = self.read_after_notice().await
            {
                return result;
            }
            pause = (pause * 2).min(READ_PAUSE_MAX);
        }
    }

    async fn read_after_notice(&self) -> Option<Result<Reply, FleetError>> {
        for pause in READ_PAUSES_AFTER_NOTICE {
            tokio::time::sleep(Duration::from_millis(pause)).await;
            if let Ok(Some(result)) = self.fleet.ending(&self.ledger, &self.id).await {
                return Some(result);
            }
        }
        None
    }

    fn forbidden(&self, message: String) -> FleetError {
        let terms = Terms { bulkhead: String::new(), deadline: self.wait, is_idempotent: false };
        let verdict = Verdict::Rejected { reason: RejectReason::Forbidden, message };
        FleetError::Job(JobError::Rejected(Box::new(outcome(&terms, verdict, 0))))
    }

    fn overdue(self, error: Option<String>) -> FleetError {
        let id = self.id;
        match error {
            Some(message) => FleetError::Unreachable { id, message },
            None => FleetError::Overdue { id, waited: self.began.elapsed() },
        }
    }
}

//! Performs operators' requests on a fleet, such as creating its streams, querying its status and managing dead
//! letters. The commands in `program` call [`Operator`] and print the results. `fleet` submits new jobs, and the agent
//! runs them.

use std::collections::BTreeMap;
use std::fmt;

use async_nats::Client;
use bulkhead_shared::limits::truncate;
use bulkhead_shared::{Outcome, RejectReason, Verdict};
use futures_util::StreamExt;
use serde::Serialize;
use serde_json::{Value, json};

use crate::format;
use crate::job::{ID_BYTES_MAX, JobOptions};
use crate::names::{AGENTS, DEAD, JOBS, LEDGER, bulkhead_filter, escape, job_subject, parse_dead_subject};
use crate::server::connection::{ConnectError, connect};
use crate::server::messages::{ApiError, Published, StoredMessage, api, publish, read_last};
use crate::server::streams::{self, Finding, InitError};
use crate::settings::Settings;

/// Number of concurrent reads.
const READS: usize = 32;

/// An operator's connection to a fleet.
#[derive(Clone, Debug)]
pub struct Operator {
    client: Client,
    settings: Settings,
}

/// A failed operator request.
#[derive(Debug)]
pub struct OperateError {
    message: String,
    /// Reason if the request concerned a single job and was refused, or `None` if the server did not respond as
    /// expected.
    reason: Option<RejectReason>,
}

impl fmt::Display for OperateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for OperateError {}

impl OperateError {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), reason: None }
    }

    fn rejected(reason: RejectReason, message: impl Into<String>) -> Self {
        Self { message: message.into(), reason: Some(reason) }
    }

    /// Returns the reason if only this job was refused, so that requests for other jobs can succeed.
    pub fn reason(&self) -> Option<RejectReason> {
        self.reason
    }

    fn api(object: &str, error: &ApiError) -> Self {
        let hint = if error.code == 404 { "; run: bulkhead fleet init" } else { "" };
        Self::new(format!("failed to read {object}: {}{hint}", error.description))
    }
}

/// State of the whole fleet.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Agents that reported their presence in the last 15 s.
    pub agents: Vec<Value>,
    /// The fleet's bulkheads.
    pub bulkheads: Vec<BulkheadStatus>,
    /// The fleet's streams.
    pub streams: Vec<StreamStatus>,
}

/// State of a bulkhead in a fleet.
#[derive(Clone, Debug, Serialize)]
pub struct BulkheadStatus {
    /// Name of the bulkhead.
    pub name: String,
    /// Number of jobs without an outcome.
    pub pending: u64,
    /// Number of tenants that have jobs without an outcome.
    pub tenants: usize,
    /// Number of agents that pull jobs for the bulkhead.
    pub agents: usize,
}

/// State of a stream.
#[derive(Clone, Debug, Serialize)]
pub struct StreamStatus {
    /// Name of the stream.
    pub name: String,
    /// Number of messages.
    pub messages: u64,
    /// Total size of all messages, in bytes.
    pub bytes: u64,
    /// Maximum size, in bytes.
    pub max_bytes: u64,
    /// Number of up-to-date replicas.
    pub replicas: usize,
    /// Name of the server that leads the stream. `None` if there is no cluster, or during an election.
    pub leader: Option<String>,
}

/// A job that ended neither as `ok` nor as `cancelled`.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// Options of the job.
    pub options: JobOptions,
    /// Outcome of the job.
    pub outcome: Outcome,
    /// Time at which the dead letter was stored, in RFC 3339.
    pub at: String,
    /// Payload of the job. Empty if the payload was dropped.
    pub payload: bytes::Bytes,
    /// Size of the payload in bytes, if the letter was stored without the payload because the complete letter was too
    /// large for the server.
    pub dropped_payload_bytes: Option<u64>,
    sequence: u64,
}

impl DeadLetter {
    fn requeue_error(&self, reason: RejectReason, cause: &str) -> OperateError {
        let again = if reason.is_retryable() { "; try again later" } else { "" };
        let id = &self.options.id;
        OperateError::rejected(reason, format!("failed to requeue the dead letter {id}: {cause}{again}"))
    }

    /// Returns an error if the letter does not contain the whole job, so that the job cannot be submitted again.
    pub fn check_requeue(&self) -> Result<(), OperateError> {
        let id = &self.options.id;
        if let Some(bytes) = self.dropped_payload_bytes {
            let message = format!(
                "the dead letter {id} does not contain the job's payload of {bytes} bytes, which was too large for the \
                 server: submit the job again with its payload, and then drop the letter"
            );
            return Err(OperateError::rejected(RejectReason::TooLarge, message));
        }
        if let Verdict::Rejected { reason: RejectReason::Invalid, message } = &self.outcome.verdict {
            let message = format!(
                "the dead letter {id} belongs to an invalid job ({message}), and might not contain all options: \
                 submit the job again with valid options, and then drop the letter"
            );
            return Err(OperateError::rejected(RejectReason::Invalid, message));
        }
        Ok(())
    }
}

/// A dead letter that this program cannot decode. A later version could have written the letter.
#[derive(Clone, Debug)]
pub struct UnreadableLetter {
    /// Name of the bulkhead, or an empty string if the letter's subject is not valid.
    pub bulkhead: String,
    /// Tenant that the job belongs to, or an empty string.
    pub tenant: String,
    /// ID of the job, or the letter's subject if the subject is not valid.
    pub id: String,
    /// Time at which the dead letter was stored, in RFC 3339.
    pub at: String,
    /// Human-readable reason.
    pub error: String,
    sequence: u64,
}

impl From<Box<UnreadableLetter>> for OperateError {
    fn from(letter: Box<UnreadableLetter>) -> Self {
        let message = format!("the dead letter {} cannot be read: {}", letter.id, letter.error);
        Self::rejected(RejectReason::Invalid, message)
    }
}

/// Filter for dead letters. A field that is `None` matches all values.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Name of the bulkhead.
    pub bulkhead: Option<String>,
    /// Name of the tenant.
    pub tenant: Option<String>,
    /// ID of the job.
    pub id: Option<String>,
}

impl Operator {
    /// Connects to the servers of a fleet.
    pub async fn connect(settings: &Settings) -> Result<Self, ConnectError> {
        let client = connect(&settings.nats, "bulkhead-fleet operator", false).await?;
        Ok(Self { client, settings: settings.clone() })
    }

    /// Creates missing streams and consumers. Adds the subjects of new bulkheads, and replaces consumers if the
    /// number of lanes has changed. Reports all other differences from the configuration, but does not change them.
    /// Passes each finding to `report` at once, also before an error.
    pub async fn init(&self, report: impl FnMut(Finding)) -> Result<(), InitError> {
        streams::prepare(&self.client, &self.settings, report).await
    }

    /// Returns the state of the fleet.
    pub async fn status(&self) -> Result<Status, OperateError> {
        let agents = self.agents().await?;
        let mut bulkheads = Vec::new();
        for name in self.settings.bulkhead.keys() {
            bulkheads.push(self.bulkhead(name, &agents).await?);
        }
        let mut streams = Vec::new();
        for name in [JOBS, LEDGER, DEAD] {
            streams.push(self.stream(name).await?);
        }
        Ok(Status { agents, bulkheads, streams })
    }

    async fn agents(&self) -> Result<Vec<Value>, OperateError> {
        let stream = format!("KV_{AGENTS}");
        let mut agents = Vec::new();
        for subject in self.subjects(&stream, &format!("$KV.{AGENTS}.>")).await? {
            // The entry may have expired since it was listed.
            if let Ok(Some(message)) = read_last(&self.client, &stream, &subject).await
                && let Ok(agent) = serde_json::from_slice(&message.body)
            {
                agents.push(agent);
            }
        }
        Ok(agents)
    }

    async fn bulkhead(&self, name: &str, agents: &[Value]) -> Result<BulkheadStatus, OperateError> {
        let body = json!({"subjects_filter": bulkhead_filter(name)});
        let info = self.info(JOBS, body).await?;
        let subjects = info["state"]["subjects"].as_object();
        let pending = subjects.into_iter().flatten().filter_map(|(_, count)| count.as_u64()).sum();
        let serving = agents.iter().filter(|agent| agent["bulkheads"][name]["takes_jobs"] == true).count();
        Ok(BulkheadStatus {
            name: name.to_owned(),
            pending,
            tenants: subjects.map_or(0, serde_json::Map::len),
            agents: serving,
        })
    }

    async fn stream(&self, name: &str) -> Result<StreamStatus, OperateError> {
        let info = self.info(name, Value::Null).await?;
        let replicas = info["cluster"]["replicas"].as_array();
        let current =
            replicas.map_or(0, |all| all.iter().filter(|replica| replica["current"] == true).count());
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        Ok(StreamStatus {
            name: name.to_owned(),
            messages: number(&info["state"]["messages"]),
            bytes: number(&info["state"]["bytes"]),
            max_bytes: number(&info["config"]["max_bytes"]),
            replicas: current + 1,
            leader: info["cluster"]["leader"].as_str().map(str::to_owned),
        })
    }

    async fn info(&self, stream: &str, body: Value) -> Result<Value, OperateError> {
        let info = api(&self.client, &format!("STREAM.INFO.{stream}"), body).await;
        info.map_err(|error| OperateError::api(stream, &error))
    }

    /// Returns the subjects of all messages that match the filter. Sends as many requests as necessary, because the
    /// number of subjects per response is limited.
    async fn subjects(&self, stream: &str, filter: &str) -> Result<Vec<String>, OperateError> {
        let mut found = Vec::new();
        loop {
            let body = json!({"subjects_filter": filter, "offset": found.len()});
            let info = self.info(stream, body).await?;
            let page = info["state"]["subjects"].as_object();
            let count = found.len();
            found.extend(page.into_iter().flatten().map(|(subject, _)| subject.clone()));
            if found.len() == count || found.len() as u64 >= info["total"].as_u64().unwrap_or_default() {
                return Ok(found);
            }
        }
    }

    /// Returns the subjects of all matching dead letters.
    pub async fn dead_subjects(&self, filter: &DeadFilter) -> Result<Vec<String>, OperateError> {
        let token = |name: &Option<String>| name.as_deref().map_or("*".to_owned(), escape);
        let (bulkhead, tenant, id) = (token(&filter.bulkhead), token(&filter.tenant), token(&filter.id));
        self.subjects(DEAD, &format!("bh.dead.{bulkhead}.{tenant}.{id}")).await
    }

    /// Returns the dead letter with this subject, or `None` if the letter has been removed.
    pub async fn dead_letter(&self, subject: &str) -> Result<Option<DeadLetter>, OperateError> {
        let letter = self.read_letter(subject).await?;
        letter.transpose().map_err(OperateError::from)
    }

    async fn read_letter(
        &self,
        subject: &str,
    ) -> Result<Option<Result<DeadLetter, Box<UnreadableLetter>>>, OperateError> {
        let message = read_last(&self.client, DEAD, subject).await.map_err(OperateError::new)?;
        Ok(message.map(letter))
    }

    /// Returns the newest matching dead letters, at most `limit`, newest first.
    pub async fn dead(
        &self,
        filter: &DeadFilter,
        limit: usize,
    ) -> Result<Vec<Result<DeadLetter, Box<UnreadableLetter>>>, OperateError> {
        let subjects = self.dead_subjects(filter).await?;
        let reads = subjects.iter().map(|subject| self.read_letter(subject));
        let mut reads = futures_util::stream::iter(reads).buffer_unordered(READS);
        let mut newest = BTreeMap::new();
        while let Some(letter) = reads.next().await {
            newest.extend(letter?.map(|letter| (sequence(&letter), letter)));
            if newest.len() > limit {
                newest.pop_first();
            }
        }
        Ok(newest.into_values().rev().collect())
    }

    /// Resubmits the job from a dead letter and removes the letter. Returns the new ID, which is derived from the
    /// letter so that repeating the request does not run the job twice. Returns an error and keeps the letter if
    /// [`DeadLetter::check_requeue`] fails.
    pub async fn requeue(&self, letter: &DeadLetter) -> Result<String, OperateError> {
        letter.check_requeue()?;
        let mut options = letter.options.clone();
        options.id = requeued_id(&options.id, letter.sequence);
        let subject = job_subject(&options.bulkhead, &options.tenant);
        let published =
            publish(&self.client, subject, options.to_headers(), letter.payload.clone(), None).await;
        match published {
            Published::Stored(_) => {}
            Published::NoStream => {
                // Fails if the stream has no leader.
                self.info(JOBS, Value::Null).await?;
                let cause = format!("the fleet has no bulkhead {}", options.bulkhead);
                return Err(letter.requeue_error(RejectReason::NotFound, &cause));
            }
            other => {
                return Err(match other.rejection() {
                    Some((reason, cause)) => letter.requeue_error(reason, &cause),
                    None => {
                        OperateError::new(format!("the server did not accept the job: {other:?}; try again"))
                    }
                });
            }
        }
        self.remove_letter(letter.sequence).await?;
        Ok(options.id)
    }

    /// Removes the dead letter with this subject, even if the letter cannot be decoded. Returns the ID of the job, or
    /// `None` if the letter has been removed already.
    pub async fn drop_letter(&self, subject: &str) -> Result<Option<String>, OperateError> {
        let Some(letter) = self.read_letter(subject).await? else { return Ok(None) };
        self.remove_letter(sequence(&letter)).await?;
        Ok(Some(letter.map_or_else(|letter| letter.id, |letter| letter.options.id)))
    }

    async fn remove_letter(&self, sequence: u64) -> Result<(), OperateError> {
        const NOT_DELETED: u64 = 10057;
        let call = format!("STREAM.MSG.DELETE.{DEAD}");
        let removed: Result<Value, ApiError> = api(&self.client, &call, json!({"seq": sequence})).await;
        match removed {
            Ok(_) => Ok(()),
            Err(error) if error.err_code == NOT_DELETED && error.description.contains("no message found") => {
                Ok(())
            }
            Err(error) => {
                Err(OperateError::new(format!("failed to remove the dead letter: {}", error.description)))
            }
        }
    }
}

fn requeued_id(id: &str, sequence: u64) -> String {
    let suffix = format!(".requeued-{sequence}");
    format!("{}{suffix}", truncate(id, ID_BYTES_MAX - suffix.len()))
}

fn sequence(letter: &Result<DeadLetter, Box<UnreadableLetter>>) -> u64 {
    letter.as_ref().map_or_else(|letter| letter.sequence, |letter| letter.sequence)
}

fn letter(message: StoredMessage) -> Result<DeadLetter, Box<UnreadableLetter>> {
    let names = parse_dead_subject(&message.subject);
    let outcome = match message.headers.get(format::OUTCOME) {
        _ if names.is_none() => Err("the subject is not valid".to_owned()),
        None => Err(format!("the {} header is missing", format::OUTCOME)),
        Some(text) => format::parse_outcome(text.as_str()),
    };
    let StoredMessage { subject, sequence, stored_at: at, .. } = message;
    let (bulkhead, tenant, id) = names.unwrap_or_else(|| (String::new(), String::new(), subject));
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            return Err(Box::new(UnreadableLetter { bulkhead, tenant, id, at, error, sequence }));
        }
    };
    let (mut options, invalid) = JobOptions::parse((bulkhead, tenant), Some(&message.headers), sequence);
    options.id = id;
    // A job that was rejected as invalid has no valid options, and cannot be requeued.
    let is_rejected = matches!(outcome.verdict, Verdict::Rejected { reason: RejectReason::Invalid, .. });
    if let Some(error) = invalid.filter(|_| !is_rejected) {
        let JobOptions { bulkhead, tenant, id, .. } = options;
        return Err(Box::new(UnreadableLetter { bulkhead, tenant, id, at, error, sequence }));
    }
    let dropped = message.headers.get(format::PAYLOAD_DROPPED);
    Ok(DeadLetter {
        options,
        outcome,
        at,
        payload: message.body,
        dropped_payload_bytes: dropped.map(|bytes| bytes.as_str().parse().unwrap_or_default()),
        sequence,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requeued_id_is_short_enough_and_stable() {
        assert_eq!(requeued_id("a", 7), "a.requeued-7");
        let long = "ö".repeat(64);
        let id = requeued_id(&long, u64::MAX);
        assert!(id.len() <= ID_BYTES_MAX && id.ends_with(&u64::MAX.to_string()), "{id}");
    }
}

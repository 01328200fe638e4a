//! Processes one delivered message by performing the actions that a [`Handling`] requests. Submits the job to the
//! supervisor, writes the ledger record, and publishes notices and dead letters. `pulls` starts this for each message
//! that has a permit. All decisions about the job are made in `decide`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::subject::Subject;
use async_nats::{HeaderMap, Message};
use bulkhead_client::{JobError, Reply};
use bulkhead_shared::{Executed, RejectReason, Verdict};
use bytes::Bytes;
use serde_json::json;

use super::metrics::count;
use super::{JobPermits, Served, Shared, result_bytes_max};
use crate::decide::delivery::outcome as local_outcome;
use crate::decide::outcome::{AttemptEnd, Pause};
use crate::decide::{self, Action, Conclusion, Event, Handling, RETURN_DELAY_MIN, Rules, Step, Terms};
use crate::format;
use crate::job::JobOptions;
use crate::names::{DEAD, dead_subject, ledger_subject, notice_subject};
use crate::random;
use crate::record::{Ending, ReadError, Stored};
use crate::server::ledger;
use crate::server::messages::{Published, publish, read_last, request, send};

/// A delivered message and its properties.
pub(crate) struct Delivered {
    pub(crate) message: decide::Message,
    /// Bulkhead and tenant, taken from the subject.
    pub(crate) names: (String, String),
    pub(crate) reply: Subject,
    pub(crate) content: Message,
}

/// A job that is being processed.
struct Run {
    shared: Arc<Shared>,
    served: Arc<Served>,
    options: JobOptions,
    /// Reason why the message is not a valid job, or `None` if the message is valid.
    invalid: Option<String>,
    sequence: u64,
    ledger: String,
    content: Message,
}

/// Processes a delivered message to completion. Without permits, the job is not run, and the message is delivered again
/// after the given delay.
async fn run(
    shared: Arc<Shared>,
    served: Arc<Served>,
    delivered: Delivered,
    permits: Result<JobPermits, Duration>,
) {
    let Delivered { message, names, content, .. } = delivered;
    let sequence = message.stream_sequence;
    let held = shared.clone();
    let guard = held.held.guard(sequence);
    let (options, invalid) = JobOptions::parse(names, content.headers.as_ref(), sequence);
    let terms = terms(&served, &options);
    let nonce = format!("{}.{}", shared.instance, random::text());
    let is_rate_limit_shared = served.is_rate_limit_shared.load(Ordering::Relaxed);
    let is_isolated = served.is_isolated.load(Ordering::Relaxed);
    let rules = Rules { is_rate_limit_shared, is_isolated, ..served.rules.clone() };
    let host = shared.host.clone();
    let (handling, step) = match permits {
        Ok(_) => Handling::begin(message, terms, rules, host, nonce, random::fraction()),
        Err(delay) => {
            // Limits the delay, so that the job has another chance before its deadline.
            let max = terms.time_left(&message, shared.clock.now()) / 2;
            let delay = delay.min(max.max(RETURN_DELAY_MIN));
            Handling::begin_without_permit(message, terms, rules, host, nonce, delay)
        }
    };
    let ledger = ledger_subject(&options.tenant, &options.id);
    let run = Run { shared, served, options, invalid, sequence, ledger, content };
    let conclusion = run.perform_all(handling, step).await;
    let pause = run.conclude(conclusion, permits.is_ok()).await;
    drop(guard);
    drop(run);
    // A pause of zero is skipped, because even the shortest sleep lasts until the next millisecond.
    if !pause.is_zero() {
        // If tenants are isolated, only the tenant's permit stays in use during the pause.
        let _kept = permits.map(|JobPermits { tenant, bulkhead }| tenant.unwrap_or(bulkhead));
        tokio::time::sleep(pause).await;
    }
}

fn terms(served: &Served, options: &JobOptions) -> Terms {
    let max = served.settings.deadline_max;
    let deadline = options.deadline.map_or(max, |deadline| deadline.min(max));
    Terms { bulkhead: served.name.clone(), deadline, is_idempotent: options.is_idempotent }
}

/// Starts a task that processes a delivered message to completion.
pub(crate) fn spawn(shared: &Arc<Shared>, served: &Arc<Served>, delivered: Delivered, permits: JobPermits) {
    tokio::spawn(run(shared.clone(), served.clone(), delivered, Ok(permits)));
}

/// Returns true if the job's deadline has passed.
pub(crate) fn is_late(shared: &Shared, served: &Served, delivered: &Delivered) -> bool {
    let Delivered { message, names, content, .. } = delivered;
    let (options, _) = JobOptions::parse(names.clone(), content.headers.as_ref(), message.stream_sequence);
    terms(served, &options).time_left(message, shared.clock.now()).is_zero()
}

/// Processes a message whose job this agent cannot run. If the job's deadline has passed, records the outcome.
/// Otherwise, the message is delivered again after the given delay.
pub(crate) async fn run_without_permit(
    shared: &Arc<Shared>,
    served: &Arc<Served>,
    delivered: Delivered,
    delay: Duration,
) {
    run(shared.clone(), served.clone(), delivered, Err(delay)).await;
}

/// Returns a message whose job this agent cannot run. After the delay, the server redelivers the message to any agent.
pub(crate) async fn give_back(
    shared: &Arc<Shared>,
    served: &Arc<Served>,
    delivered: Delivered,
    delay: Duration,
) {
    let sequence = delivered.message.stream_sequence;
    if delivered.message.delivery > 1 {
        // Another agent might hold the job, so the ledger must be checked.
        let (shared, served) = (shared.clone(), served.clone());
        tokio::spawn(async move { run_without_permit(&shared, &served, delivered, delay).await });
        return;
    }
    negative(shared, sequence, delay).await;
    shared.held.release(sequence);
}

async fn negative(shared: &Shared, sequence: u64, delay: Duration) {
    let Some(reply) = shared.held.reply(sequence) else { return };
    let nanos = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
    let body = format!("-NAK {}", json!({"delay": nanos}));
    // If this request is lost, the server redelivers the message after `ack_wait`.
    send(&shared.client, reply, body.into()).await;
}

impl Run {
    async fn perform_all(&self, mut handling: Handling, mut step: Step) -> Conclusion {
        loop {
            let (action, delay) = match step {
                Step::Do(action, delay) => (action, delay),
                Step::Done(conclusion) => return conclusion,
            };
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            let event = self.perform(action).await;
            handling.set_result_bytes_max(result_bytes_max(&self.shared.client));
            step = handling.apply(event, self.shared.clock.now());
        }
    }

    async fn perform(&self, action: Action) -> Event {
        let client = &self.shared.client;
        match action {
            Action::Read => Event::Read(self.read().await),
            Action::Write(write) => Event::Written(ledger::write(client, &self.ledger, &write).await),
            Action::Submit(left) => Event::Ended(self.submit(left).await),
            Action::Announce { ending, is_dead, record } => {
                Event::Announced(self.announce(&ending, is_dead, record).await)
            }
            Action::Acknowledge => {
                self.acknowledge().await;
                Event::Acknowledged
            }
        }
    }

    async fn read(&self) -> Result<Option<Stored>, ReadError> {
        let read = ledger::read(&self.shared.client, &self.ledger).await;
        match &read {
            Ok(_) => {}
            Err(ReadError::Failed(error)) => {
                tracing::warn!("the record {} cannot be read: {error}; trying again", self.ledger);
            }
            Err(ReadError::Unreadable { message, .. }) => {
                if let Some(counters) = self.shared.metrics.of(&self.served.name) {
                    count(&counters.unreadable);
                }
                tracing::error!("the record {} is invalid: {message}; the job does not run", self.ledger);
            }
        }
        read
    }

    /// Submits the job to the supervisor and waits for the outcome.
    async fn submit(&self, left: Duration) -> AttemptEnd {
        if let Some(error) = &self.invalid {
            let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message: error.clone() };
            let outcome = local_outcome(&terms(&self.served, &self.options), verdict, 0);
            return AttemptEnd::Reported(Ending { outcome, payload: Bytes::new() });
        }
        let Some(client) = self.shared.supervisor.client() else { return AttemptEnd::NOT_SENT };
        let options = &self.options;
        let mut job = client
            .job(&options.bulkhead, self.content.payload.to_vec())
            .operation(&options.operation)
            .tenant(&options.tenant)
            .priority(options.priority)
            .cost(options.cost)
            .idempotent(options.is_idempotent)
            .deadline(left);
        if let Some(limit) = options.run_limit {
            job = job.run_limit(limit);
        }
        if let Some(traceparent) = &options.traceparent {
            job = job.traceparent(traceparent);
        }
        attempt_end(job.send().await)
    }

    /// Publishes a notice that the job has an outcome. If the job needs a dead letter, first stores one. Returns
    /// false if the dead letter could not be stored.
    async fn announce(&self, ending: &Ending, is_dead: bool, record: u64) -> bool {
        if is_dead && !self.store_dead_letter(ending, record).await {
            return false;
        }
        // If the notice is lost, the submitter finds the outcome the next time it reads the ledger.
        let subject = notice_subject(&self.options.tenant, &self.options.id);
        send(&self.shared.client, subject, Bytes::new()).await;
        true
    }

    async fn store_dead_letter(&self, ending: &Ending, record: u64) -> bool {
        let JobOptions { tenant, id, bulkhead, .. } = &self.options;
        let subject = dead_subject(bulkhead, tenant, id);
        let mut headers = self.options.to_headers();
        headers.insert(format::OUTCOME, format::outcome_text(&ending.outcome));
        headers.insert(format::LEDGER_SEQUENCE, record.to_string());
        let mut payload = self.content.payload.clone();
        let mut expects = 0;
        loop {
            let client = &self.shared.client;
            let published =
                publish(client, subject.clone(), headers.clone(), payload.clone(), Some(expects)).await;
            match published {
                Published::Stored(_) => return true,
                Published::Conflict(last) if last != expects => {
                    match self.is_dead_letter_of(&subject, last, record).await {
                        Ok(true) => return true,
                        // The dead letter belongs to an earlier job with the same ID.
                        Ok(false) => expects = last,
                        Err(error) => {
                            tracing::warn!("failed to read the dead letter {subject}: {error}; trying again");
                            return false;
                        }
                    }
                }
                // Without the payload, the dead letter is usually small enough.
                Published::TooLarge if !payload.is_empty() => {
                    tracing::warn!(
                        "the dead letter {subject} is stored without its payload of {} bytes, which is too large for \
                         the server",
                        payload.len()
                    );
                    headers.insert(format::PAYLOAD_DROPPED, payload.len().to_string());
                    payload = Bytes::new();
                }
                Published::TooLarge => {
                    tracing::error!(
                        "the dead letter {subject} is too large for the server and is not stored"
                    );
                    return true;
                }
                other => {
                    tracing::warn!("failed to store a dead letter: {other:?}; trying again");
                    return false;
                }
            }
        }
    }

    /// Returns true if the dead letter with sequence number `last` belongs to the job with this ledger record.
    async fn is_dead_letter_of(&self, subject: &str, last: u64, record: u64) -> Result<bool, String> {
        match read_last(&self.shared.client, DEAD, subject).await? {
            Some(letter) if letter.sequence >= last => {
                let of = letter.headers.get(format::LEDGER_SEQUENCE).map(|value| value.as_str());
                Ok(of == Some(&*record.to_string()))
            }
            // An operator has removed the dead letter.
            None if last == 0 => Ok(false),
            _ => Err("the server returned an outdated version of the message".to_owned()),
        }
    }

    async fn acknowledge(&self) {
        let Some(reply) = self.shared.held.reply(self.sequence) else { return };
        let body = Bytes::from_static(b"+ACK");
        if let Err(error) = request(&self.shared.client, reply, HeaderMap::new(), body).await {
            tracing::debug!(
                "an acknowledgement was not confirmed: {error}; the message may be delivered again"
            );
        }
    }

    /// Reports the conclusion to the server. Returns the time for which the job's permit stays in use.
    async fn conclude(&self, conclusion: Conclusion, is_attempted: bool) -> Duration {
        let counters = self.shared.metrics.of(&self.served.name);
        let add = |counter: fn(&super::metrics::Counters) -> &std::sync::atomic::AtomicU64| {
            if let Some(counters) = counters {
                count(counter(counters));
            }
        };
        match conclusion {
            Conclusion::Decided => add(|of| &of.decided),
            Conclusion::Repeated => {}
            Conclusion::Returned { delay, pause } => {
                if is_attempted {
                    add(|of| &of.returned);
                }
                if let Pause::Pulls(time) = pause {
                    self.served.gate.pause(time);
                }
                negative(&self.shared, self.sequence, delay).await;
                if let Pause::Permit(time) = pause {
                    return time;
                }
            }
            Conclusion::Left(Some(delay)) => negative(&self.shared, self.sequence, delay).await,
            Conclusion::Left(None) => {}
            Conclusion::Fenced => {
                add(|of| &of.fenced);
                tracing::warn!("an outcome was dropped because another agent has taken over {}", self.ledger);
            }
        }
        Duration::ZERO
    }
}

fn attempt_end(result: Result<Reply, JobError>) -> AttemptEnd {
    match result {
        Ok(reply) => {
            let outcome = reply.outcome().clone();
            AttemptEnd::Reported(Ending { outcome, payload: reply.into_payload().into() })
        }
        Err(error) => match error.outcome() {
            Some(outcome) => {
                let payload = Bytes::copy_from_slice(error.payload());
                AttemptEnd::Reported(Ending { outcome: outcome.clone(), payload })
            }
            None => AttemptEnd::Disconnected { executed: disconnected(&error) },
        },
    }
}

fn disconnected(error: &JobError) -> Executed {
    match error {
        JobError::Disconnected { executed, .. } => *executed,
        _ => Executed::Unknown,
    }
}

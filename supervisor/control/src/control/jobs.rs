//! Handles jobs over HTTP (`POST /v1/bulkheads/{name}/jobs`). Each job is sent to the data plane with the jobs
//! protocol, like the job of any other client. Therefore all jobs go through the same admission, and losing the HTTP
//! connection cancels the job. The data plane also accounts for the payloads and results of slow clients.

mod headers;
mod responses;
pub(super) mod session;
mod upload;

use std::pin::pin;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use bulkhead_config::Config;
use bulkhead_plane::access::{HttpClient, TokenGrant};
use bulkhead_plane::counters::RejectedJob;
use bulkhead_shared::client_protocol::{OutcomeMessage, decode_run_limit};
use bulkhead_shared::codec::{self, Extensions, tag};
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_CEILING};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{JobId, JobOptions, Outcome, Priority, RejectReason, Verdict};
use tokio::io::AsyncReadExt;
use tokio::sync::OwnedSemaphorePermit;

use super::connections::Admission;
use super::outcomes::{local_outcome, outcome_problem, rejected};
use super::{Control, Shared};
use headers::JobHeaders;
use responses::{dropped, result, upload_timed_out};
use session::{Session, SessionSlot, read_outcome, submit_frame};
use upload::{Announced, Length, Upload};

/// Maximum number of concurrent jobs over the admin API. Further jobs are rejected as `overloaded`. The key
/// `jobs_http_max` limits the jobs of clients with a token from `[[access]]`.
pub(super) const JOBS_MAX: usize = 128;

/// Maximum time to receive a payload over HTTP. The same time limit applies to frames that the data plane receives.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time to wait until the data plane has closed the connection's earlier session and released the session's
/// permit.
const SESSION_TIMEOUT: Duration = Duration::from_secs(1);

/// Request and response header with the W3C trace context of a job.
pub(super) const TRACEPARENT: &str = "traceparent";

/// Handles `POST /v1/bulkheads/{name}/jobs`.
pub(super) async fn submit(
    State(control): State<Shared>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    token: Option<Extension<TokenGrant>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    // The deadline of the job and the time limit for the upload replace the general time limit.
    admission.progress.lift_time_limit();
    admission.progress.hold(control.job_requests.clone());
    let (parts, body) = request.into_parts();
    let submitter = Submitter::new(admission, token.map(|Extension(token)| token));
    // A client without access to a bulkhead must not affect the bulkhead's counters.
    let has_access = submitter.client.allows_bulkhead(&name);
    let count = |tenant: &str, priority, reason| {
        if !has_access {
            return;
        }
        let (bulkhead, tenant) = (name.clone(), tenant.to_owned());
        control.counters.rejected_jobs.count(RejectedJob { bulkhead, tenant, priority, reason });
    };
    let job = match JobHeaders::parse(&parts.headers) {
        Ok(job) => job,
        Err(sentence) => {
            count("", Priority::default(), RejectReason::Invalid);
            return rejected(&name, None, RejectReason::Invalid, sentence);
        }
    };
    let deadline = submitter.deadline_of(&control.config(), &name, &job.options);
    // A client without permission for a tenant must not affect the tenant's counters.
    let is_permitted = submitter.client.allows((&name, true), job.options.tenant);
    let tenant = if is_permitted { job.options.tenant } else { "" };
    let upload = submitter.upload(&control, &name, &parts.headers, body);
    let mut response = match run(&control, submitter, &name, &job, upload).await {
        Ok(response) => response,
        Err(Failure::Timeout) => {
            count(tenant, job.options.priority, RejectReason::Invalid);
            upload_timed_out(&name, deadline)
        }
        Err(Failure::Overloaded(sentence)) => {
            count(tenant, job.options.priority, RejectReason::Overloaded);
            rejected(&name, deadline, RejectReason::Overloaded, sentence)
        }
        // The request did not become a job, usually because the client has disconnected.
        Err(Failure::Broken) => {
            let sentence = "the payload does not match the request headers".into();
            rejected(&name, deadline, RejectReason::Invalid, sentence)
        }
        Err(Failure::Dropped) => dropped(&name, deadline, job.options.is_idempotent),
        Err(Failure::Draining) => {
            rejected(&name, deadline, RejectReason::Draining, "the supervisor is stopping".into())
        }
    };
    // If the job has a span, the response already contains the `traceparent` of the span.
    if let Some(trace) = job.traceparent.filter(|_| !response.headers().contains_key(TRACEPARENT)) {
        set_traceparent(&mut response, trace);
    }
    response
}

fn set_traceparent(response: &mut Response, trace: Traceparent) {
    if let Ok(value) = HeaderValue::from_str(trace.as_str()) {
        response.headers_mut().insert(TRACEPARENT, value);
    }
}

/// Reason why the data plane returned no outcome for a job.
enum Failure {
    /// The payload did not arrive within the time limit.
    Timeout,
    /// No memory, descriptor or permit is available for the job.
    Overloaded(String),
    /// The client aborted the request or violated the HTTP protocol.
    Broken,
    /// The data plane closed the job's connection without returning an outcome.
    Dropped,
    /// The data plane shut down before it received the job.
    Draining,
}

/// The client that submits a job, and the session that belongs to the client's HTTP connection.
struct Submitter {
    client: HttpClient,
    /// Session that belongs to the HTTP connection. `None` if the connection is closed after the response.
    slot: Option<SessionSlot>,
}

impl Submitter {
    fn new(admission: Admission, token: Option<TokenGrant>) -> Self {
        let client = match token {
            Some(token) => HttpClient::Token(token),
            None => HttpClient::Operator { uid: admission.uid },
        };
        Self { client, slot: admission.session }
    }

    /// Returns the deadline of a job, or `None` if it is unknown. For a client without access to the bulkhead, ignores
    /// the configured deadline, which would reveal that the bulkhead exists.
    fn deadline_of(&self, config: &Config, name: &str, options: &JobOptions<&str>) -> Option<Duration> {
        let bulkhead = config.bulkheads.iter().find(|bulkhead| bulkhead.name == name);
        let is_permitted = self.client.allows((name, bulkhead.is_some()), options.tenant);
        match bulkhead.filter(|_| is_permitted) {
            Some(it) => Some(options.deadline.map_or(it.deadline, |asked| asked.min(it.deadline_max))),
            None => options.deadline,
        }
    }

    fn upload(&self, control: &Control, name: &str, headers: &HeaderMap, body: Body) -> Upload {
        let spool = match &self.client {
            HttpClient::Token(token) if headers.contains_key(header::TRANSFER_ENCODING) => {
                control.tokens.spool(token.id, &control.commands)
            }
            _ => control.counters.own_spool.clone(),
        };
        let config = control.config();
        // A client without access must not learn from the handling of its payload that the bulkhead exists.
        let has_access = self.client.allows_bulkhead(name);
        let configured =
            config.bulkheads.iter().find(|b| has_access && b.name == name).map(|b| b.max_payload);
        // Once a successor has taken over, it checks the size according to its own configuration.
        let max_bytes =
            if control.handover.is_listening() { configured } else { Some(PAYLOAD_BYTES_CEILING) };
        Upload::new(&config, (control.counters.clone(), spool), max_bytes, headers, body)
    }

    /// Returns the session that belongs to the HTTP connection, or a permit to open a new session.
    async fn session_or_permit(&self, control: &Control) -> Result<SessionOrPermit, Failure> {
        if let Some(session) = self.slot.as_ref().and_then(|slot| slot.take(&self.client)) {
            return Ok(SessionOrPermit::Session(session));
        }
        let (permit, max) = match &self.client {
            HttpClient::Operator { .. } => (control.jobs.clone().try_acquire_owned().ok(), JOBS_MAX),
            // Each connection has at most one session, but the data plane may not have closed earlier sessions yet.
            HttpClient::Token(_) => {
                let permit = control.token_jobs.clone().acquire_owned();
                let permit = tokio::time::timeout(SESSION_TIMEOUT, permit).await;
                (permit.ok().and_then(Result::ok), control.config().supervisor.jobs_http_max)
            }
        };
        let sentence = || format!("{max} jobs submitted over HTTP are in progress, which is the maximum");
        Ok(SessionOrPermit::Permit(permit.ok_or_else(|| Failure::Overloaded(sentence()))?))
    }
}

enum SessionOrPermit {
    Session(Session),
    Permit(OwnedSemaphorePermit),
}

/// Submits a job and waits for its outcome. Dropping the future closes the session and thereby cancels the job.
async fn run(
    control: &Control,
    submitter: Submitter,
    name: &str,
    job: &JobHeaders<'_>,
    mut upload: Upload,
) -> Result<Response, Failure> {
    // The permit is acquired first, so that no payload is received without a permit.
    let session = submitter.session_or_permit(control).await?;
    let deadline = tokio::time::Instant::now() + UPLOAD_TIMEOUT;
    let announced =
        tokio::time::timeout_at(deadline, upload.announce()).await.map_err(|_| Failure::Timeout)??;
    let Submitter { client, slot } = submitter;
    let mut session = match session {
        SessionOrPermit::Session(session) => session,
        SessionOrPermit::Permit(permit) => Session::open(&control.commands, permit, client).await?,
    };
    session.number += 1;
    let frame = submit_frame(name, job, &announced, session.number)?;
    let mut is_sent = false;
    let (metadata, result_bytes) = {
        let Session { reader, writer, number, .. } = &mut session;
        let mut outcome = pin!(read_outcome(reader, *number, &control.counters));
        let sent = tokio::time::timeout_at(deadline, upload.send(frame, &announced, writer));
        tokio::select! {
            // The outcome is polled first, because the payload of a rejected job does not have to be received.
            biased;
            result = &mut outcome => result?,
            sent = sent => match sent {
                Ok(result @ (Ok(()) | Err(Failure::Dropped))) => {
                    is_sent = result.is_ok();
                    outcome.await?
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(Failure::Timeout),
            },
        }
    };
    // If the payload was not sent in full, the session cannot be used for another job.
    let slot = slot.filter(|_| is_sent);
    let (message, extensions) =
        codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).map_err(|_| Failure::Dropped)?;
    let outcome = outcome_of(message, &extensions, &announced, &upload)?;
    let mut response = match outcome.verdict {
        Verdict::Ok => result(&outcome, result_bytes, session, slot).await?,
        _ => {
            let mut payload = Vec::new();
            // The payload of a failed job is never larger than this maximum.
            let max = result_bytes.min(INLINE_PAYLOAD_BYTES_MAX as u64);
            let read = (&mut session.reader).take(max).read_to_end(&mut payload).await;
            let is_complete = read.map_err(|_| Failure::Dropped)? as u64 == result_bytes;
            if let Some(slot) = slot.filter(|_| is_complete) {
                slot.put(session);
            }
            outcome_problem(None, &outcome, payload, job.traceparent)
        }
    };
    let span = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok());
    if let Some(span) = span.and_then(Traceparent::parse) {
        set_traceparent(&mut response, span);
    }
    Ok(response)
}

/// Converts the data plane's message to an outcome. Adds the fields that the message encodes as extensions.
fn outcome_of(
    message: OutcomeMessage<'_>,
    extensions: &Extensions<'_>,
    announced: &Announced,
    upload: &Upload,
) -> Result<Outcome, Failure> {
    let mut outcome = message.to_outcome().ok_or(Failure::Dropped)?;
    outcome.job = extensions.get(tag::JOB).and_then(JobId::from_bytes);
    outcome.run_limit = extensions.get(tag::RUN_LIMIT).and_then(decode_run_limit);
    let report = extensions.get(tag::CRASH_REPORT).and_then(|id| std::str::from_utf8(id).ok());
    outcome.report = report.map(str::to_owned);
    // The announced size is not the actual size of the payload, so the data plane's message does not contain a size.
    if let (Announced::Withheld, Verdict::Rejected { reason: RejectReason::TooLarge, message }) =
        (announced, &mut outcome.verdict)
    {
        let Some(max) = upload.max_bytes else {
            // The data plane has counted this job as `too_large`.
            let message = "a reload was just adding this bulkhead: submit the job again".into();
            let verdict = Verdict::Rejected { reason: RejectReason::Overloaded, message };
            let (deadline, wait) = (Some(outcome.deadline), Some(Duration::from_secs(1)));
            return Ok(local_outcome(&outcome.bulkhead, deadline, verdict, wait));
        };
        *message = match upload.length {
            Length::Known(bytes) => {
                format!("the payload of {bytes} bytes is larger than max_payload ({max} bytes)")
            }
            Length::Unknown => {
                format!("the payload of more than {max} bytes is larger than max_payload ({max} bytes)")
            }
        };
    }
    Ok(outcome)
}

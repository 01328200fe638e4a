//! Jobs over HTTP: each job connects to the data plane as a separate client, on a socketpair, with the jobs
//! protocol. Therefore all jobs go through the same admission, and a lost HTTP connection cancels the job. The
//! data plane counts the bytes of payloads and results that are sent or read slowly.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::JobOutcome;
use bulkhead_shared::client_protocol::{OutcomeMessage, Refused, Submit, decode_run_limit, encode_run_limit};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::frame::{HEADER_BYTES, Header, kind};
use bulkhead_shared::limits::{
    BULKHEAD_NAME_BYTES_MAX, INLINE_PAYLOAD_BYTES_MAX, OPERATION_BYTES_MAX, PAYLOAD_BYTES_CEILING,
    TENANT_BYTES_MAX, truncate,
};
use bulkhead_shared::trace::Traceparent;
use bulkhead_shared::{CrashReason, JobId, JobOptions, Outcome, Priority, RejectReason, Verdict};
use futures_util::stream::{self, StreamExt};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::Shared;
use super::answers::{problem, problem_with};
use super::connections::Entry;
use bulkhead_plane::command::Command;
use bulkhead_plane::counters::SharedCounters;

/// Maximum number of concurrent jobs over HTTP. Further jobs are rejected as `overloaded`.
pub const JOBS_MAX: usize = 128;

/// Time limit for receiving a payload. The data plane allows the same time for a frame, from its first byte.
const UPLOADED_WITHIN: Duration = Duration::from_secs(30);

/// Maximum size of the chunks in which a result is sent, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// Size of the segments that hold a payload of unknown length, in bytes.
const SEGMENT_BYTES: usize = 256 * 1024;

/// Request number of the only job on its connection.
const NUMBER: u64 = 1;

/// Announced size of a payload whose size is unknown or invalid. Exceeds the size up to which payloads are
/// sent unannounced, so that the data plane answers before it receives a byte of the payload.
const LARGE_ENOUGH: u64 = INLINE_PAYLOAD_BYTES_MAX as u64 + 1;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Handles `POST /v1/bulkheads/{name}/jobs`.
pub(super) async fn submit(
    State(control): State<Shared>,
    ConnectInfo(entry): ConnectInfo<Entry>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    // The job's deadline and the upload limit replace the general time limit.
    entry.be_patient();
    let (parts, body) = request.into_parts();
    let count = |priority, reason| control.pulse.refused.count(&name, priority, reason);
    let asked = match Asked::read(&parts.headers) {
        Ok(asked) => asked,
        Err(sentence) => {
            count(Priority::default(), RejectReason::Invalid);
            return refused(&name, RejectReason::Invalid, sentence);
        }
    };
    let mut response =
        match run(&control, entry.uid, &name, &asked, Upload::new(&control, &name, &parts.headers, body))
            .await
        {
            Ok(response) => response,
            Err(Cut::Slow) => {
                count(asked.options.priority, RejectReason::Invalid);
                slow(&name)
            }
            Err(Cut::Overloaded(sentence)) => {
                count(asked.options.priority, RejectReason::Overloaded);
                refused(&name, RejectReason::Overloaded, sentence)
            }
            // The request did not become a job, and the sender is usually gone.
            Err(Cut::Broken) => {
                refused(&name, RejectReason::Invalid, "the payload is not what its headers announce".into())
            }
            Err(Cut::Ended) => ended(&name),
            Err(Cut::Draining) => refused(&name, RejectReason::Draining, "the supervisor is stopping".into()),
        };
    // The response of a job with a span already has a `traceparent`.
    if let Some(given) = asked.traceparent.filter(|_| !response.headers().contains_key(TRACEPARENT)) {
        tell_trace(&mut response, given);
    }
    response
}

fn tell_trace(response: &mut Response, trace: Traceparent) {
    if let Ok(value) = HeaderValue::from_str(trace.as_str()) {
        response.headers_mut().insert(TRACEPARENT, value);
    }
}

/// Reasons why a job has no outcome.
enum Cut {
    /// The payload took too long.
    Slow,
    /// There is no memory or permit for the job.
    Overloaded(String),
    /// The sender aborted the request or violated HTTP.
    Broken,
    /// The data plane dropped the job.
    Ended,
    /// The data plane ended before it received the job.
    Draining,
}

// Request headers.

/// Parsed headers of a job request.
struct Asked<'h> {
    options: JobOptions<&'h str>,
    traceparent: Option<Traceparent>,
}

impl<'h> Asked<'h> {
    /// Parses the headers. The error is a message for the client.
    fn read(headers: &'h HeaderMap) -> Result<Self, String> {
        let options = JobOptions { cost: 1, ..JobOptions::default() };
        let mut asked = Self { options, traceparent: None };
        for name in headers.keys().filter(|name| name.as_str().starts_with("bulkhead-")) {
            let mut values = headers.get_all(name).iter();
            let (Some(value), None) = (values.next(), values.next()) else {
                return Err(format!("the header {name} stands there more than once"));
            };
            let value = std::str::from_utf8(value.as_bytes())
                .map_err(|_| format!("the value of the header {name} is not UTF-8"))?;
            asked.take(name.as_str(), value).map_err(|why| format!("the header {name}: {why}"))?;
        }
        // W3C Trace Context: an invalid `traceparent` is ignored, and so are duplicates.
        let mut given = headers.get_all(TRACEPARENT).iter();
        if let (Some(value), None) = (given.next(), given.next()) {
            asked.traceparent = value.to_str().ok().and_then(Traceparent::parse);
        }
        Ok(asked)
    }

    fn take(&mut self, name: &str, value: &'h str) -> Result<(), String> {
        let number = || format!("'{}' is no number that makes sense", truncate(value, 32).escape_debug());
        match name {
            "bulkhead-operation" => self.options.operation = text(value, OPERATION_BYTES_MAX)?,
            "bulkhead-tenant" => self.options.tenant = text(value, TENANT_BYTES_MAX)?,
            "bulkhead-priority" => self.options.priority = truncate(value, 32).parse()?,
            "bulkhead-deadline-ms" => self.options.deadline = Some(millis(value).ok_or_else(number)?),
            "bulkhead-run-limit-ms" => self.options.run_limit = Some(millis(value).ok_or_else(number)?),
            "bulkhead-cost" => self.options.cost = value.parse().map_err(|_| number())?,
            "bulkhead-idempotent" => {
                self.options.is_idempotent = match value {
                    "true" | "1" => true,
                    "false" | "0" => false,
                    _ => return Err("write true or false".into()),
                }
            }
            _ => return Err("there is no such header; see the documentation of jobs over HTTP".into()),
        }
        Ok(())
    }
}

/// Maximum deadline or run limit that is passed on. The data plane reduces it to the bulkhead's own limit.
const LIMIT_MS_MAX: u64 = 366 * 24 * 3600 * 1000;

fn millis(value: &str) -> Option<Duration> {
    let ms: u64 = value.parse().ok().filter(|ms| *ms > 0)?;
    Some(Duration::from_millis(ms.min(LIMIT_MS_MAX)))
}

fn text(value: &str, bytes_max: usize) -> Result<&str, String> {
    if value.len() > bytes_max { Err(format!("it is longer than {bytes_max} bytes")) } else { Ok(value) }
}

// Payloads.

/// An incoming payload.
struct Upload {
    body: BodyDataStream,
    length: Length,
    /// The bulkhead's `max_payload`; `None` if the bulkhead does not exist.
    most: Option<u64>,
    spool: Spool,
}

enum Length {
    Known(u64),
    /// Chunked: the length is unknown until the end.
    Open,
}

/// Size of a payload as announced to the data plane, and the source of its bytes.
enum Announced {
    /// The bytes are passed on as they arrive.
    Coming(u64),
    /// The bytes are already in memory.
    Spooled(u64),
    /// No bytes will be sent. The data plane must reject this size.
    Hopeless(u64),
}

impl Upload {
    fn new(control: &Shared, name: &str, headers: &HeaderMap, body: Body) -> Self {
        let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let length = match length {
            Some(length) if !headers.contains_key(header::TRANSFER_ENCODING) => Length::Known(length),
            _ if headers.contains_key(header::TRANSFER_ENCODING) => Length::Open,
            _ => Length::Known(0),
        };
        let config = control.config();
        let most = config.bulkheads.iter().find(|b| b.name == name).map(|b| b.max_payload);
        let room = usize::try_from(config.supervisor.max_buffered).unwrap_or(usize::MAX);
        Self { body: body.into_data_stream(), length, most, spool: Spool::new(control.pulse.clone(), room) }
    }

    /// Determines the length of the payload. A chunked payload must be received completely first.
    async fn announce(&mut self) -> Result<Announced, Cut> {
        let most = self.most.unwrap_or(0);
        // If `max_payload` was raised meanwhile, the data plane accepts this size, but no bytes ever follow.
        let hopeless = |bytes: u64| Announced::Hopeless(bytes.clamp(LARGE_ENOUGH, PAYLOAD_BYTES_CEILING + 1));
        match self.length {
            Length::Known(bytes) if bytes > most => return Ok(hopeless(bytes)),
            Length::Known(bytes) => return Ok(Announced::Coming(bytes)),
            Length::Open => {}
        }
        let pulse = self.spool.pulse.clone();
        loop {
            let called = pulse.spool_called.notified();
            let chunk = tokio::select! {
                chunk = next_chunk(&mut self.body) => chunk?,
                () = called => {
                    self.spool.give_way()?;
                    continue;
                }
            };
            let Some(chunk) = chunk else { break };
            if self.spool.bytes as u64 + chunk.len() as u64 > most {
                return Ok(hopeless(most.saturating_add(1)));
            }
            self.spool.add(&chunk)?;
        }
        Ok(Announced::Spooled(self.spool.bytes as u64))
    }

    async fn send(&mut self, announced: &Announced, socket: &mut OwnedWriteHalf) -> Result<(), Cut> {
        match *announced {
            Announced::Hopeless(_) => std::future::pending().await,
            Announced::Spooled(_) => {
                for segment in self.spool.hand_over() {
                    socket.write_all(&segment).await.map_err(|_| Cut::Ended)?;
                }
            }
            Announced::Coming(bytes) => {
                let mut left = bytes;
                while left > 0 {
                    let chunk = next_chunk(&mut self.body).await?.ok_or(Cut::Broken)?;
                    left = left.checked_sub(chunk.len() as u64).ok_or(Cut::Broken)?;
                    socket.write_all(&chunk).await.map_err(|_| Cut::Ended)?;
                }
            }
        }
        Ok(())
    }
}

async fn next_chunk(body: &mut BodyDataStream) -> Result<Option<Bytes>, Cut> {
    match body.next().await {
        Some(Ok(chunk)) => Ok(Some(chunk)),
        Some(Err(_)) => Err(Cut::Broken),
        None => Ok(None),
    }
}

/// A payload of unknown length, held in memory. Its bytes count as buffered.
struct Spool {
    segments: Vec<Vec<u8>>,
    bytes: usize,
    /// Number of bytes included in the shared counter.
    counted: usize,
    pulse: Arc<SharedCounters>,
    room: usize,
}

impl Spool {
    fn new(pulse: Arc<SharedCounters>, room: usize) -> Self {
        Self { segments: Vec::new(), bytes: 0, counted: 0, pulse, room }
    }

    /// Copies the bytes, because a small chunk can keep a large buffer alive.
    fn add(&mut self, mut chunk: &[u8]) -> Result<(), Cut> {
        while !chunk.is_empty() {
            let room = self.segments.last().map_or(0, |last| SEGMENT_BYTES - last.len());
            if room == 0 {
                self.count(SEGMENT_BYTES)?;
                self.segments.push(Vec::with_capacity(SEGMENT_BYTES));
                continue;
            }
            let (now, later) = chunk.split_at(chunk.len().min(room));
            if let Some(last) = self.segments.last_mut() {
                last.extend_from_slice(now);
            }
            self.bytes += now.len();
            chunk = later;
        }
        Ok(())
    }

    fn count(&mut self, more: usize) -> Result<(), Cut> {
        self.give_way()?;
        self.counted += more;
        let spooled = self.pulse.spooled.fetch_add(more, Ordering::Relaxed) + more;
        let in_all = spooled.saturating_add(self.pulse.buffered.load(Ordering::Relaxed));
        if in_all > self.room && spooled > self.pulse.spool_share.load(Ordering::Relaxed) {
            return Err(self.full());
        }
        Ok(())
    }

    /// Fails if the data plane needs memory and this payload holds some, unless other payloads have already
    /// given up enough.
    fn give_way(&self) -> Result<(), Cut> {
        let take = |unwanted: usize| (unwanted > 0).then(|| unwanted.saturating_sub(self.counted));
        let unwanted = &self.pulse.spool_unwanted;
        match self.counted > 0 && unwanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            true => Err(self.full()),
            false => Ok(()),
        }
    }

    fn full(&self) -> Cut {
        Cut::Overloaded(format!("what waits holds max_buffered ({} bytes)", self.room))
    }

    /// Takes all segments. From here on, the data plane counts the bytes.
    fn hand_over(&mut self) -> impl Iterator<Item = Vec<u8>> + use<> {
        self.uncount();
        std::mem::take(&mut self.segments).into_iter()
    }

    fn uncount(&mut self) {
        let counted = std::mem::take(&mut self.counted);
        if counted > 0 && self.pulse.spooled.fetch_sub(counted, Ordering::Relaxed) == counted {
            // No payload is left that could give up memory.
            self.pulse.spool_unwanted.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.uncount();
    }
}

// Exchange with the data plane.

/// Submits a job and waits for its outcome. Dropping the future closes the connection and so cancels the job.
async fn run(
    control: &Shared,
    uid: u32,
    name: &str,
    asked: &Asked<'_>,
    mut upload: Upload,
) -> Result<Response, Cut> {
    // Acquires a permit first, so that no payload is received without one.
    let Ok(place) = control.jobs.clone().try_acquire_owned() else {
        let sentence = format!("{JOBS_MAX} jobs over HTTP are under way, which is as many as may be");
        return Err(Cut::Overloaded(sentence));
    };
    let within = tokio::time::Instant::now() + UPLOADED_WITHIN;
    let announced = tokio::time::timeout_at(within, upload.announce()).await.map_err(|_| Cut::Slow)??;
    let (here, there) = pair()
        .map_err(|error| Cut::Overloaded(format!("the supervisor is short of descriptors: {error}")))?;
    control
        .commander
        .send(Command::Client { socket: there, place, uid })
        .map_err(|error| if is_over(control) { Cut::Draining } else { Cut::Overloaded(error.to_string()) })?;
    let (mut reader, mut writer) = here.into_split();
    let head = head(name, asked, &announced)?;
    // If the write fails, the data plane's answer gives the reason.
    let _ = writer.write_all(&head).await;
    let (metadata, result_bytes) = {
        let mut answer = pin!(read_outcome(control, &mut reader));
        let sent = tokio::time::timeout_at(within, upload.send(&announced, &mut writer));
        tokio::select! {
            // The payload of a rejected job need not be received.
            biased;
            answer = &mut answer => answer?,
            sent = sent => match sent {
                Ok(Ok(())) | Ok(Err(Cut::Ended)) => answer.await?,
                Ok(Err(cut)) => return Err(cut),
                Err(_) => return Err(Cut::Slow),
            },
        }
    };
    let (told, extensions) = codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).map_err(|_| Cut::Ended)?;
    let mut outcome = told.to_outcome().ok_or(Cut::Ended)?;
    outcome.job = extensions.get(tag::JOB).and_then(JobId::from_bytes);
    outcome.run_limit = extensions.get(tag::RUN_LIMIT).and_then(decode_run_limit);
    let report = extensions.get(tag::CRASH_REPORT).and_then(|id| std::str::from_utf8(id).ok());
    outcome.report = report.map(str::to_owned);
    // The data plane's message contains the announced size instead of the real size.
    if let (Announced::Hopeless(_), Verdict::Rejected { reason: RejectReason::TooLarge, message }) =
        (&announced, &mut outcome.verdict)
    {
        let most = upload.most.unwrap_or(0);
        *message = match upload.length {
            Length::Known(bytes) => format!("{bytes} bytes of payload; max_payload is {most}"),
            Length::Open => format!("more than {most} bytes of payload; max_payload is {most}"),
        };
    }
    let mut response = match outcome.verdict {
        Verdict::Ok => result(&outcome, result_bytes, reader, writer),
        _ => {
            let mut payload = Vec::new();
            // The data plane sends no more than this for a failed job.
            let most = result_bytes.min(INLINE_PAYLOAD_BYTES_MAX as u64);
            reader.take(most).read_to_end(&mut payload).await.map_err(|_| Cut::Ended)?;
            outcome_problem(None, &outcome, payload, asked.traceparent)
        }
    };
    let span = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok());
    if let Some(span) = span.and_then(Traceparent::parse) {
        tell_trace(&mut response, span);
    }
    Ok(response)
}

/// Returns true if the data plane has sent its last answers.
fn is_over(control: &Shared) -> bool {
    control.pulse.is_over.load(Ordering::SeqCst)
}

fn pair() -> io::Result<(UnixStream, std::os::unix::net::UnixStream)> {
    let (here, there) = std::os::unix::net::UnixStream::pair()?;
    here.set_nonblocking(true)?;
    there.set_nonblocking(true)?;
    Ok((UnixStream::from_std(here)?, there))
}

/// Encodes the frame without the payload.
fn head(name: &str, asked: &Asked<'_>, announced: &Announced) -> Result<Vec<u8>, Cut> {
    let (Announced::Coming(payload) | Announced::Spooled(payload) | Announced::Hopeless(payload)) =
        *announced;
    let run_limit = asked.options.run_limit.map(encode_run_limit);
    let trace = asked.traceparent.as_ref().map(|trace| (tag::TRACEPARENT, trace.as_str().as_bytes()));
    let limit = run_limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
    let extensions: Vec<_> = trace.into_iter().chain(limit).collect();
    let mut bytes = vec![0; HEADER_BYTES];
    // No bulkhead has a name of this length, so the truncated name cannot match a bulkhead.
    let message = Submit::new(truncate(name, BULKHEAD_NAME_BYTES_MAX + 1), &asked.options);
    codec::encode(&message, &extensions, &mut bytes).map_err(|_| Cut::Broken)?;
    let metadata = bytes.len() - HEADER_BYTES;
    let length = u32::try_from(metadata as u64 + payload).map_err(|_| Cut::Broken)?;
    let header =
        Header { length, kind: kind::SUBMIT, flags: 0, metadata_length: metadata as u16, number: NUMBER };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(bytes)
}

/// Reads up to the result. Returns the outcome's metadata and the number of bytes that follow.
async fn read_outcome(control: &Shared, reader: &mut OwnedReadHalf) -> Result<(Vec<u8>, u64), Cut> {
    let mut is_begun = false;
    loop {
        let mut bytes = [0; HEADER_BYTES];
        // Before the data plane ends, it answers every job that it has received. A job without any answer was
        // never received.
        let end = |_| if !is_begun && is_over(control) { Cut::Draining } else { Cut::Ended };
        bytes[0] = reader.read_u8().await.map_err(end)?;
        is_begun = true;
        reader.read_exact(&mut bytes[1..]).await.map_err(|_| Cut::Ended)?;
        let header = Header::decode(&bytes).check().map_err(|_| Cut::Ended)?;
        let mut metadata = vec![0; usize::from(header.metadata_length)];
        reader.read_exact(&mut metadata).await.map_err(|_| Cut::Ended)?;
        match header.kind {
            kind::OUTCOME => return Ok((metadata, header.payload_length() as u64)),
            // The frame was not completed in time. The data plane refuses frames for no other reason here.
            kind::REFUSED => {
                let (refused, _) = codec::decode::<Refused<'_>>(&metadata, &[]).map_err(|_| Cut::Ended)?;
                let is_for_memory = refused.reason == RejectReason::Overloaded.code();
                return Err(if is_for_memory { Cut::Overloaded(refused.message.into()) } else { Cut::Slow });
            }
            // Usually a progress message. Only outcomes have a payload.
            _ => {}
        }
    }
}

// Responses.

/// Returns the fields of an outcome, including the payload of a failed job.
fn fields(outcome: &Outcome, payload: Vec<u8>) -> Map<String, Value> {
    let signal = match &outcome.verdict {
        Verdict::Crashed { reason: CrashReason::Signal, status, .. } => {
            status.map(bulkhead_linux::signals::name)
        }
        _ => None,
    };
    let payload = (!payload.is_empty()).then_some(payload);
    match json!(JobOutcome { signal, payload, ..JobOutcome::new(outcome) }) {
        Value::Object(fields) => fields,
        _ => unreachable!("a structure is written as an object"),
    }
}

/// Converts the documented fields into headers.
fn headers(fields: &Map<String, Value>) -> HeaderMap {
    let told = [
        ("bulkhead-outcome", "outcome"),
        ("bulkhead-reason", "reason"),
        ("bulkhead-job", "job"),
        ("bulkhead-served-by", "bulkhead"),
        ("bulkhead-attempts", "attempts"),
        ("bulkhead-queued-ms", "queued_ms"),
        ("bulkhead-ran-ms", "ran_ms"),
        ("bulkhead-deadline-ms", "deadline_ms"),
        ("bulkhead-run-limit-ms", "run_limit_ms"),
        ("bulkhead-worker-pid", "worker_pid"),
        ("bulkhead-status", "status"),
        ("bulkhead-report", "report"),
    ];
    let value = |field: &str| match fields.get(field)? {
        Value::Null => None,
        // A message from a handler may not be a valid header value.
        Value::String(text) => HeaderValue::from_str(text).ok(),
        other => HeaderValue::from_str(&other.to_string()).ok(),
    };
    told.into_iter()
        .filter_map(|(name, field)| Some((HeaderName::from_static(name), value(field)?)))
        .collect()
}

fn result(outcome: &Outcome, bytes: u64, reader: OwnedReadHalf, writer: OwnedWriteHalf) -> Response {
    // Keeps the writing half until the end. Closing it would end the connection, and the data plane would not
    // send the rest.
    let body = stream::unfold((reader, writer, bytes), async |(mut reader, writer, left)| {
        if left == 0 {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES)));
        match (&mut reader).take(left).read_buf(&mut chunk).await {
            Ok(count) if count > 0 => Some((Ok(Bytes::from(chunk)), (reader, writer, left - count as u64))),
            Ok(_) => Some((Err(io::Error::from(io::ErrorKind::UnexpectedEof)), (reader, writer, 0))),
            Err(error) => Some((Err(error), (reader, writer, 0))),
        }
    });
    let mut response = Body::from_stream(body).into_response();
    response.headers_mut().extend(headers(&fields(outcome, Vec::new())));
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
    response
}

/// Returns a problem document with the fields of the outcome. Without `status`, the verdict determines the
/// HTTP status.
fn outcome_problem(
    status: Option<StatusCode>,
    outcome: &Outcome,
    payload: Vec<u8>,
    traceparent: Option<Traceparent>,
) -> Response {
    // Status 499 is non-standard.
    let status = status.or_else(|| StatusCode::from_u16(outcome.verdict.http_status()).ok());
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut fields = fields(outcome, payload);
    let told = headers(&fields);
    // In a problem document, `status` is the HTTP status.
    fields.remove("status");
    fields.extend(traceparent.map(|trace| ("trace_id".to_owned(), json!(trace.trace_id()))));
    let detail = outcome.verdict.message().map_or_else(|| outcome.to_string(), str::to_owned);
    let mut response = problem_with(status, &detail, fields);
    response.headers_mut().extend(told);
    if let Some(wait) = outcome.retry_after {
        let seconds = wait.as_millis().div_ceil(1000).max(1) as u64;
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Refuses a request at admission. For a job request, the response has the form of an outcome.
pub(super) fn turned_away(request: &Request, reason: RejectReason, message: &str) -> Response {
    let path = request.uri().path();
    let bulkhead = path.strip_prefix("/v1/bulkheads/").and_then(|rest| rest.strip_suffix("/jobs"));
    match bulkhead.filter(|name| request.method() == Method::POST && !name.contains('/')) {
        Some(name) => refused(name, reason, message.to_owned()),
        None if reason == RejectReason::Unauthenticated => problem(StatusCode::UNAUTHORIZED, message),
        None => problem(StatusCode::FORBIDDEN, message),
    }
}

/// Rejects a job that was not sent to the data plane.
fn refused(name: &str, reason: RejectReason, message: String) -> Response {
    let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
    no_outcome(name, Verdict::Rejected { reason, message }, retry_after)
}

/// Rejects a job whose payload did not arrive in time. The response has a separate status.
fn slow(name: &str) -> Response {
    let message = format!("the payload did not come within {} s", UPLOADED_WITHIN.as_secs());
    let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message };
    outcome_problem(Some(StatusCode::REQUEST_TIMEOUT), &unseen(name, verdict, None), Vec::new(), None)
}

/// Responds that the data plane has ended, or dropped a result for lack of memory.
fn ended(name: &str) -> Response {
    let message = "the supervisor is stopping, or short of memory; whether the job ran is unknown".into();
    no_outcome(name, Verdict::Crashed { reason: CrashReason::Stopped, status: None, message }, None)
}

/// Responds with an outcome that did not come from the data plane.
fn no_outcome(name: &str, verdict: Verdict, retry_after: Option<Duration>) -> Response {
    outcome_problem(None, &unseen(name, verdict, retry_after), Vec::new(), None)
}

fn unseen(name: &str, verdict: Verdict, retry_after: Option<Duration>) -> Outcome {
    Outcome {
        job: None,
        bulkhead: truncate(name, BULKHEAD_NAME_BYTES_MAX).to_owned(),
        attempts: 0,
        queued: Duration::ZERO,
        ran: Duration::ZERO,
        worker_pid: None,
        retryable: verdict.is_retryable(false),
        retry_after,
        deadline: Duration::ZERO,
        run_limit: None,
        status: None,
        report: None,
        verdict,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&'static str, &str)]) -> Result<String, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let asked = Asked::read(&headers)?;
        Ok(format!(
            "{} {} {:?} {} {} {} {:?}",
            asked.options.operation,
            asked.options.tenant,
            asked.options.deadline,
            asked.options.priority,
            asked.options.cost,
            asked.options.is_idempotent,
            asked.traceparent
        ))
    }

    #[test]
    fn headers_are_read_or_refused() {
        assert_eq!(read(&[("accept", "x")]).unwrap(), "  None normal 1 false None");
        let all = [
            ("bulkhead-operation", "decode"),
            ("bulkhead-tenant", "acme"),
            ("bulkhead-deadline-ms", "250"),
            ("bulkhead-priority", "best-effort"),
            ("bulkhead-cost", "7"),
            ("bulkhead-idempotent", "1"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ];
        assert!(read(&all).unwrap().starts_with("decode acme Some(250ms) best-effort 7 true Some(00-0af"));
        assert!(read(&[all[6], all[6]]).unwrap().ends_with(" None"), "two traces are none");
        let wrong = [
            ("bulkhead-deadline-ms", "0"),
            ("bulkhead-deadline-ms", "-1"),
            ("bulkhead-deadline-ms", "1.5"),
            ("bulkhead-deadline-ms", "99999999999999999999"),
            ("bulkhead-run-limit-ms", "0"),
            ("bulkhead-run-limit-ms", "1s"),
            ("bulkhead-cost", "-1"),
            ("bulkhead-cost", "4294967296"),
            ("bulkhead-priority", "urgent"),
            ("bulkhead-idempotent", "yes"),
            ("bulkhead-dealine-ms", "5"),
        ];
        for (name, value) in wrong {
            assert!(read(&[(name, value)]).is_err(), "{name}: {value}");
        }
        assert!(read(&[("bulkhead-tenant", &"x".repeat(257))]).is_err());
        assert!(read(&[("bulkhead-tenant", "a"), ("bulkhead-tenant", "b")]).is_err());
    }

    #[test]
    fn a_spool_counts_what_it_holds_until_it_is_gone() {
        let pulse = Arc::new(SharedCounters::default());
        let mut spool = Spool::new(pulse.clone(), 3 * SEGMENT_BYTES);
        let payload: Vec<u8> = (0..2 * SEGMENT_BYTES + 5).map(|i| i as u8).collect();
        for piece in payload.chunks(1000) {
            assert!(spool.add(piece).is_ok());
        }
        assert_eq!(pulse.spooled.load(Ordering::Relaxed), 3 * SEGMENT_BYTES);
        assert!(matches!(spool.add(&payload), Err(Cut::Overloaded(_))));
        drop(spool);
        assert_eq!(pulse.spooled.load(Ordering::Relaxed), 0);

        let mut spool = Spool::new(pulse.clone(), 3 * SEGMENT_BYTES);
        assert!(spool.add(&payload).is_ok());
        let segments = spool.hand_over();
        assert_eq!(pulse.spooled.load(Ordering::Relaxed), 0);
        assert_eq!(segments.flatten().collect::<Vec<u8>>(), payload);
    }
}

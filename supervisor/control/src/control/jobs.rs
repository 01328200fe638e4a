//! Handler of jobs that are submitted over HTTP. Each job connects to the data plane as a separate client,
//! over a socket pair and with the jobs protocol. Therefore jobs over HTTP go through the usual admission,
//! and a lost HTTP connection cancels the job. The data plane accounts for payloads and results that a client
//! sends or reads slowly.

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
use super::connections::Admission;
use super::responses::{problem, problem_with};
use bulkhead_plane::command::Command;
use bulkhead_plane::counters::SharedCounters;

/// Maximum number of concurrent jobs over HTTP. Further jobs over HTTP are rejected as `overloaded`.
pub const JOBS_MAX: usize = 128;

/// Maximum time for receiving a payload. The data plane has an equal time limit for receiving a frame.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of the chunks in which a result is sent to the client, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// Size of the memory segments that hold a payload of unknown length, in bytes.
const SEGMENT_BYTES: usize = 256 * 1024;

/// Request number of each job, which is the only job on its connection.
const NUMBER: u64 = 1;

/// Minimum size that is announced for a payload that is too large. It exceeds the maximum size of payloads
/// that need no announcement, so that the data plane rejects the job before it receives any byte of the
/// payload.
const ANNOUNCED_BYTES_MIN: u64 = INLINE_PAYLOAD_BYTES_MAX as u64 + 1;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Handles `POST /v1/bulkheads/{name}/jobs`.
pub(super) async fn submit(
    State(control): State<Shared>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    // The deadline of the job and the time limit for the upload replace the general time limit.
    admission.lift_time_limit();
    let (parts, body) = request.into_parts();
    let count = |priority, reason| control.counters.rejected_jobs.count(&name, priority, reason);
    let job = match JobHeaders::parse(&parts.headers) {
        Ok(job) => job,
        Err(sentence) => {
            count(Priority::default(), RejectReason::Invalid);
            return rejected(&name, RejectReason::Invalid, sentence);
        }
    };
    let mut response =
        match run(&control, admission.uid, &name, &job, Upload::new(&control, &name, &parts.headers, body))
            .await
        {
            Ok(response) => response,
            Err(Failure::Timeout) => {
                count(job.options.priority, RejectReason::Invalid);
                upload_timed_out(&name)
            }
            Err(Failure::Overloaded(sentence)) => {
                count(job.options.priority, RejectReason::Overloaded);
                rejected(&name, RejectReason::Overloaded, sentence)
            }
            // The request did not become a job. The client has usually disconnected.
            Err(Failure::Broken) => rejected(
                &name,
                RejectReason::Invalid,
                "the payload does not match the headers of the request".into(),
            ),
            Err(Failure::Dropped) => dropped(&name),
            Err(Failure::Draining) => {
                rejected(&name, RejectReason::Draining, "the supervisor is stopping".into())
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
    /// The data plane closed the connection of the job without an outcome.
    Dropped,
    /// The data plane ended before it received the job.
    Draining,
}

// Headers of a job request.

/// Options of a job, parsed from the headers of the request.
struct JobHeaders<'h> {
    options: JobOptions<&'h str>,
    traceparent: Option<Traceparent>,
}

impl<'h> JobHeaders<'h> {
    /// Parses the headers of a job request. An error is a message for the client.
    fn parse(headers: &'h HeaderMap) -> Result<Self, String> {
        let options = JobOptions { cost: 1, ..JobOptions::default() };
        let mut job = Self { options, traceparent: None };
        for name in headers.keys().filter(|name| name.as_str().starts_with("bulkhead-")) {
            let mut values = headers.get_all(name).iter();
            let (Some(value), None) = (values.next(), values.next()) else {
                return Err(format!("the header {name} occurs more than once"));
            };
            let value = std::str::from_utf8(value.as_bytes())
                .map_err(|_| format!("the value of the header {name} is not UTF-8"))?;
            job.set(name.as_str(), value).map_err(|why| format!("the header {name}: {why}"))?;
        }
        // As W3C Trace Context requires, a `traceparent` that is invalid or occurs more than once is ignored.
        let mut given = headers.get_all(TRACEPARENT).iter();
        if let (Some(value), None) = (given.next(), given.next()) {
            job.traceparent = value.to_str().ok().and_then(Traceparent::parse);
        }
        Ok(job)
    }

    fn set(&mut self, name: &str, value: &'h str) -> Result<(), String> {
        let number = || format!("'{}' is not a valid number", truncate(value, 32).escape_debug());
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
            _ => return Err("unknown header; see the documentation of jobs over HTTP".into()),
        }
        Ok(())
    }
}

/// Maximum deadline and run limit, in milliseconds, that are passed on. The data plane reduces them to the
/// limits of the bulkhead.
const LIMIT_MS_MAX: u64 = 366 * 24 * 3600 * 1000;

fn millis(value: &str) -> Option<Duration> {
    let ms: u64 = value.parse().ok().filter(|ms| *ms > 0)?;
    Some(Duration::from_millis(ms.min(LIMIT_MS_MAX)))
}

fn text(value: &str, max: usize) -> Result<&str, String> {
    if value.len() > max { Err(format!("the value is longer than {max} bytes")) } else { Ok(value) }
}

// Payload of a job request.

/// A payload that is being received.
struct Upload {
    body: BodyDataStream,
    length: Length,
    /// Value of `max_payload` of the bulkhead. `None` if the bulkhead does not exist.
    max_bytes: Option<u64>,
    spool: Spool,
}

enum Length {
    Known(u64),
    /// The payload is sent in chunks, and the length is not known before the last chunk.
    Unknown,
}

/// Size of a payload in bytes, as announced to the data plane, and how the bytes are sent.
enum Announced {
    /// The payload is passed on while it is being received.
    Streamed(u64),
    /// The complete payload is in memory.
    Spooled(u64),
    /// The payload is too large and will not be sent. The data plane will reject the announced size.
    TooLarge(u64),
}

impl Upload {
    fn new(control: &Shared, name: &str, headers: &HeaderMap, body: Body) -> Self {
        let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let length = match length {
            Some(length) if !headers.contains_key(header::TRANSFER_ENCODING) => Length::Known(length),
            _ if headers.contains_key(header::TRANSFER_ENCODING) => Length::Unknown,
            _ => Length::Known(0),
        };
        let config = control.config();
        let max_bytes = config.bulkheads.iter().find(|b| b.name == name).map(|b| b.max_payload);
        let capacity = usize::try_from(config.supervisor.max_buffered).unwrap_or(usize::MAX);
        Self {
            body: body.into_data_stream(),
            length,
            max_bytes,
            spool: Spool::new(control.counters.clone(), capacity),
        }
    }

    /// Determines the size of the payload. For a payload in chunks, this requires receiving all chunks.
    async fn announce(&mut self) -> Result<Announced, Failure> {
        let max = self.max_bytes.unwrap_or(0);
        // If a reload has raised `max_payload` in the meantime, the data plane accepts this size, but no
        // bytes will follow.
        let too_large =
            |bytes: u64| Announced::TooLarge(bytes.clamp(ANNOUNCED_BYTES_MIN, PAYLOAD_BYTES_CEILING + 1));
        match self.length {
            Length::Known(bytes) if bytes > max => return Ok(too_large(bytes)),
            Length::Known(bytes) => return Ok(Announced::Streamed(bytes)),
            Length::Unknown => {}
        }
        let counters = self.spool.counters.clone();
        loop {
            let memory_needed = counters.spool_free_requested.notified();
            let chunk = tokio::select! {
                chunk = next_chunk(&mut self.body) => chunk?,
                () = memory_needed => {
                    self.spool.check_memory_pressure()?;
                    continue;
                }
            };
            let Some(chunk) = chunk else { break };
            if self.spool.bytes as u64 + chunk.len() as u64 > max {
                return Ok(too_large(max.saturating_add(1)));
            }
            self.spool.add(&chunk)?;
        }
        Ok(Announced::Spooled(self.spool.bytes as u64))
    }

    async fn send(&mut self, announced: &Announced, socket: &mut OwnedWriteHalf) -> Result<(), Failure> {
        match *announced {
            Announced::TooLarge(_) => std::future::pending().await,
            Announced::Spooled(_) => {
                for segment in self.spool.take_segments() {
                    socket.write_all(&segment).await.map_err(|_| Failure::Dropped)?;
                }
            }
            Announced::Streamed(bytes) => {
                let mut left = bytes;
                while left > 0 {
                    let chunk = next_chunk(&mut self.body).await?.ok_or(Failure::Broken)?;
                    left = left.checked_sub(chunk.len() as u64).ok_or(Failure::Broken)?;
                    socket.write_all(&chunk).await.map_err(|_| Failure::Dropped)?;
                }
            }
        }
        Ok(())
    }
}

async fn next_chunk(body: &mut BodyDataStream) -> Result<Option<Bytes>, Failure> {
    match body.next().await {
        Some(Ok(chunk)) => Ok(Some(chunk)),
        Some(Err(_)) => Err(Failure::Broken),
        None => Ok(None),
    }
}

/// A payload of unknown length that is kept in memory while it is received. The bytes count towards
/// `max_buffered`.
struct Spool {
    segments: Vec<Vec<u8>>,
    bytes: usize,
    /// Number of bytes that this payload has added to the shared counter `spooled`.
    charged: usize,
    counters: Arc<SharedCounters>,
    capacity: usize,
}

impl Spool {
    fn new(counters: Arc<SharedCounters>, capacity: usize) -> Self {
        Self { segments: Vec::new(), bytes: 0, charged: 0, counters, capacity }
    }

    /// Adds a chunk to the payload. The chunk is copied, because a small chunk can keep a large buffer alive.
    fn add(&mut self, mut chunk: &[u8]) -> Result<(), Failure> {
        while !chunk.is_empty() {
            let room = self.segments.last().map_or(0, |last| SEGMENT_BYTES - last.len());
            if room == 0 {
                self.charge(SEGMENT_BYTES)?;
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

    fn charge(&mut self, more: usize) -> Result<(), Failure> {
        self.check_memory_pressure()?;
        self.charged += more;
        let spooled = self.counters.spooled.fetch_add(more, Ordering::Relaxed) + more;
        let total = spooled.saturating_add(self.counters.buffered.load(Ordering::Relaxed));
        if total > self.capacity && spooled > self.counters.spool_share.load(Ordering::Relaxed) {
            return Err(self.memory_full());
        }
        Ok(())
    }

    /// Returns an error if this payload must be dropped because the data plane needs the memory. No payload
    /// is dropped if others have already released enough memory.
    fn check_memory_pressure(&self) -> Result<(), Failure> {
        let take = |unwanted: usize| (unwanted > 0).then(|| unwanted.saturating_sub(self.charged));
        let unwanted = &self.counters.spool_bytes_to_free;
        match self.charged > 0 && unwanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            true => Err(self.memory_full()),
            false => Ok(()),
        }
    }

    fn memory_full(&self) -> Failure {
        Failure::Overloaded(format!(
            "waiting data has reached the limit max_buffered ({} bytes)",
            self.capacity
        ))
    }

    /// Returns all segments and stops counting their bytes, because the data plane counts them from now on.
    fn take_segments(&mut self) -> impl Iterator<Item = Vec<u8>> + use<> {
        self.release();
        std::mem::take(&mut self.segments).into_iter()
    }

    fn release(&mut self) {
        let charged = std::mem::take(&mut self.charged);
        if charged > 0 && self.counters.spooled.fetch_sub(charged, Ordering::Relaxed) == charged {
            // No payload is left that could release memory.
            self.counters.spool_bytes_to_free.store(0, Ordering::Relaxed);
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.release();
    }
}

// Communication with the data plane.

/// Submits a job and waits for the outcome. Dropping the future closes the connection to the data plane,
/// which cancels the job.
async fn run(
    control: &Shared,
    uid: u32,
    name: &str,
    job: &JobHeaders<'_>,
    mut upload: Upload,
) -> Result<Response, Failure> {
    // The permit is acquired first, so that no payload is received without a permit.
    let Ok(permit) = control.jobs.clone().try_acquire_owned() else {
        let sentence = format!("{JOBS_MAX} jobs over HTTP are in progress, which is the maximum");
        return Err(Failure::Overloaded(sentence));
    };
    let deadline = tokio::time::Instant::now() + UPLOAD_TIMEOUT;
    let announced =
        tokio::time::timeout_at(deadline, upload.announce()).await.map_err(|_| Failure::Timeout)??;
    let (here, there) = pair()
        .map_err(|error| Failure::Overloaded(format!("the supervisor has no free descriptors: {error}")))?;
    control.commands.send(Command::AddClient { socket: there, permit, uid }).map_err(|error| {
        if data_plane_ended(control) { Failure::Draining } else { Failure::Overloaded(error.to_string()) }
    })?;
    let (mut reader, mut writer) = here.into_split();
    let frame = submit_frame(name, job, &announced)?;
    // If the write fails, the reply of the data plane contains the reason.
    let _ = writer.write_all(&frame).await;
    let (metadata, result_bytes) = {
        let mut outcome = pin!(read_outcome(control, &mut reader));
        let sent = tokio::time::timeout_at(deadline, upload.send(&announced, &mut writer));
        tokio::select! {
            // The outcome is polled first, because the payload of a rejected job need not be received.
            biased;
            result = &mut outcome => result?,
            sent = sent => match sent {
                Ok(Ok(())) | Ok(Err(Failure::Dropped)) => outcome.await?,
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(Failure::Timeout),
            },
        }
    };
    let (message, extensions) =
        codec::decode::<OutcomeMessage<'_>>(&metadata, &[]).map_err(|_| Failure::Dropped)?;
    let mut outcome = message.to_outcome().ok_or(Failure::Dropped)?;
    outcome.job = extensions.get(tag::JOB).and_then(JobId::from_bytes);
    outcome.run_limit = extensions.get(tag::RUN_LIMIT).and_then(decode_run_limit);
    let report = extensions.get(tag::CRASH_REPORT).and_then(|id| std::str::from_utf8(id).ok());
    outcome.report = report.map(str::to_owned);
    // The message of the data plane contains the announced size, which is not the real size of the payload.
    if let (Announced::TooLarge(_), Verdict::Rejected { reason: RejectReason::TooLarge, message }) =
        (&announced, &mut outcome.verdict)
    {
        let max = upload.max_bytes.unwrap_or(0);
        *message = match upload.length {
            Length::Known(bytes) => {
                format!("the payload of {bytes} bytes is larger than max_payload ({max} bytes)")
            }
            Length::Unknown => {
                format!("the payload of more than {max} bytes is larger than max_payload ({max} bytes)")
            }
        };
    }
    let mut response = match outcome.verdict {
        Verdict::Ok => result(&outcome, result_bytes, reader, writer),
        _ => {
            let mut payload = Vec::new();
            // The payload of a failed job is never larger than this maximum.
            let max = result_bytes.min(INLINE_PAYLOAD_BYTES_MAX as u64);
            reader.take(max).read_to_end(&mut payload).await.map_err(|_| Failure::Dropped)?;
            outcome_problem(None, &outcome, payload, job.traceparent)
        }
    };
    let span = extensions.get(tag::TRACEPARENT).and_then(|bytes| std::str::from_utf8(bytes).ok());
    if let Some(span) = span.and_then(Traceparent::parse) {
        set_traceparent(&mut response, span);
    }
    Ok(response)
}

/// Returns true if the data plane has ended and sends no more replies.
fn data_plane_ended(control: &Shared) -> bool {
    control.counters.has_ended.load(Ordering::SeqCst)
}

fn pair() -> io::Result<(UnixStream, std::os::unix::net::UnixStream)> {
    let (here, there) = std::os::unix::net::UnixStream::pair()?;
    here.set_nonblocking(true)?;
    there.set_nonblocking(true)?;
    Ok((UnixStream::from_std(here)?, there))
}

/// Encodes the SUBMIT frame of a job, without the payload.
fn submit_frame(name: &str, job: &JobHeaders<'_>, announced: &Announced) -> Result<Vec<u8>, Failure> {
    let (Announced::Streamed(payload) | Announced::Spooled(payload) | Announced::TooLarge(payload)) =
        *announced;
    let run_limit = job.options.run_limit.map(encode_run_limit);
    let trace = job.traceparent.as_ref().map(|trace| (tag::TRACEPARENT, trace.as_str().as_bytes()));
    let limit = run_limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
    let extensions: Vec<_> = trace.into_iter().chain(limit).collect();
    let mut bytes = vec![0; HEADER_BYTES];
    // A name is truncated to a length that is invalid for a bulkhead, so that it cannot match any bulkhead.
    let message = Submit::new(truncate(name, BULKHEAD_NAME_BYTES_MAX + 1), &job.options);
    codec::encode(&message, &extensions, &mut bytes).map_err(|_| Failure::Broken)?;
    let metadata = bytes.len() - HEADER_BYTES;
    let length = u32::try_from(metadata as u64 + payload).map_err(|_| Failure::Broken)?;
    let header =
        Header { length, kind: kind::SUBMIT, flags: 0, metadata_length: metadata as u16, number: NUMBER };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(bytes)
}

/// Reads frames until the metadata of the outcome has been read. Returns this metadata and the number of
/// result bytes that follow.
async fn read_outcome(control: &Shared, reader: &mut OwnedReadHalf) -> Result<(Vec<u8>, u64), Failure> {
    let mut has_response = false;
    loop {
        let mut bytes = [0; HEADER_BYTES];
        // Before the data plane ends, it sends an outcome for every job that it has received. If there is no
        // outcome, the data plane has never received the job.
        let end = |_| {
            if !has_response && data_plane_ended(control) { Failure::Draining } else { Failure::Dropped }
        };
        bytes[0] = reader.read_u8().await.map_err(end)?;
        has_response = true;
        reader.read_exact(&mut bytes[1..]).await.map_err(|_| Failure::Dropped)?;
        let header = Header::decode(&bytes).check().map_err(|_| Failure::Dropped)?;
        let mut metadata = vec![0; usize::from(header.metadata_length)];
        reader.read_exact(&mut metadata).await.map_err(|_| Failure::Dropped)?;
        match header.kind {
            kind::OUTCOME => return Ok((metadata, header.payload_length() as u64)),
            // The data plane rejects frames of this connection only if the payload was not sent in time, or
            // if it has no memory for the payload.
            kind::REFUSED => {
                let (refused, _) =
                    codec::decode::<Refused<'_>>(&metadata, &[]).map_err(|_| Failure::Dropped)?;
                let is_for_memory = refused.reason == RejectReason::Overloaded.code();
                return Err(if is_for_memory {
                    Failure::Overloaded(refused.message.into())
                } else {
                    Failure::Timeout
                });
            }
            // Other frames, which are usually progress messages, have no payload and are skipped.
            _ => {}
        }
    }
}

// Responses to job requests.

/// Returns the fields of an outcome as JSON, including the payload of a failed job.
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
        _ => unreachable!("structs serialize to objects"),
    }
}

/// Converts those fields of an outcome that are documented as headers.
fn headers(fields: &Map<String, Value>) -> HeaderMap {
    let names = [
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
        // A message from a handler can contain characters that are invalid in a header.
        Value::String(text) => HeaderValue::from_str(text).ok(),
        other => HeaderValue::from_str(&other.to_string()).ok(),
    };
    names
        .into_iter()
        .filter_map(|(name, field)| Some((HeaderName::from_static(name), value(field)?)))
        .collect()
}

fn result(outcome: &Outcome, bytes: u64, reader: OwnedReadHalf, writer: OwnedWriteHalf) -> Response {
    // The write half is kept until the whole result has been read. If it were closed, the data plane would
    // close the connection without sending the rest of the result.
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

/// Returns a problem document with the fields of an outcome. If `status` is `None`, the verdict determines
/// the HTTP status.
fn outcome_problem(
    status: Option<StatusCode>,
    outcome: &Outcome,
    payload: Vec<u8>,
    traceparent: Option<Traceparent>,
) -> Response {
    // The conversion can fail in principle, because statuses such as 499 are not standard.
    let status = status.or_else(|| StatusCode::from_u16(outcome.verdict.http_status()).ok());
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut fields = fields(outcome, payload);
    let outcome_headers = headers(&fields);
    // The outcome's field `status` is removed, because a problem document has the HTTP status in a field of
    // this name.
    fields.remove("status");
    fields.extend(traceparent.map(|trace| ("trace_id".to_owned(), json!(trace.trace_id()))));
    let detail = outcome.verdict.message().map_or_else(|| outcome.to_string(), str::to_owned);
    let mut response = problem_with(status, &detail, fields);
    response.headers_mut().extend(outcome_headers);
    if let Some(wait) = outcome.retry_after {
        let seconds = wait.as_millis().div_ceil(1000).max(1) as u64;
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Returns the response that rejects a request before any handler runs. For a job request, the response
/// contains the fields of an outcome.
pub(super) fn reject_request(request: &Request, reason: RejectReason, message: &str) -> Response {
    let path = request.uri().path();
    let bulkhead = path.strip_prefix("/v1/bulkheads/").and_then(|rest| rest.strip_suffix("/jobs"));
    match bulkhead.filter(|name| request.method() == Method::POST && !name.contains('/')) {
        Some(name) => rejected(name, reason, message.to_owned()),
        None if reason == RejectReason::Unauthenticated => problem(StatusCode::UNAUTHORIZED, message),
        None => problem(StatusCode::FORBIDDEN, message),
    }
}

/// Returns the response for a job that was rejected without being sent to the data plane.
fn rejected(name: &str, reason: RejectReason, message: String) -> Response {
    let retry_after = reason.is_retryable().then_some(Duration::from_secs(1));
    local_outcome_response(name, Verdict::Rejected { reason, message }, retry_after)
}

/// Returns the response for a job whose payload did not arrive in time. The HTTP status is 408.
fn upload_timed_out(name: &str) -> Response {
    let message = format!("the payload did not arrive within {} s", UPLOAD_TIMEOUT.as_secs());
    let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message };
    outcome_problem(Some(StatusCode::REQUEST_TIMEOUT), &local_outcome(name, verdict, None), Vec::new(), None)
}

/// Returns the response for a job whose connection the data plane closed without an outcome, because it has
/// ended or had no memory for the result.
fn dropped(name: &str) -> Response {
    let message = "the supervisor is stopping or out of memory; it is unknown whether the job ran".into();
    local_outcome_response(
        name,
        Verdict::Crashed { reason: CrashReason::Stopped, status: None, message },
        None,
    )
}

/// Returns a response with an outcome that the control plane has created itself.
fn local_outcome_response(name: &str, verdict: Verdict, retry_after: Option<Duration>) -> Response {
    outcome_problem(None, &local_outcome(name, verdict, retry_after), Vec::new(), None)
}

fn local_outcome(name: &str, verdict: Verdict, retry_after: Option<Duration>) -> Outcome {
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
        let job = JobHeaders::parse(&headers)?;
        Ok(format!(
            "{} {} {:?} {} {} {} {:?}",
            job.options.operation,
            job.options.tenant,
            job.options.deadline,
            job.options.priority,
            job.options.cost,
            job.options.is_idempotent,
            job.traceparent
        ))
    }

    #[test]
    fn invalid_job_headers_are_rejected() {
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
        assert!(read(&[all[6], all[6]]).unwrap().ends_with(" None"), "two trace headers count as none");
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
    fn spooled_payload_counts_as_memory_until_dropped() {
        let counters = Arc::new(SharedCounters::default());
        let mut spool = Spool::new(counters.clone(), 3 * SEGMENT_BYTES);
        let payload: Vec<u8> = (0..2 * SEGMENT_BYTES + 5).map(|i| i as u8).collect();
        for piece in payload.chunks(1000) {
            assert!(spool.add(piece).is_ok());
        }
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 3 * SEGMENT_BYTES);
        assert!(matches!(spool.add(&payload), Err(Failure::Overloaded(_))));
        drop(spool);
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 0);

        let mut spool = Spool::new(counters.clone(), 3 * SEGMENT_BYTES);
        assert!(spool.add(&payload).is_ok());
        let segments = spool.take_segments();
        assert_eq!(counters.spooled.load(Ordering::Relaxed), 0);
        assert_eq!(segments.flatten().collect::<Vec<u8>>(), payload);
    }
}

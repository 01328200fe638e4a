//! Creates the HTTP responses to jobs that ended as `ok`, and to jobs for which the data plane returned no outcome.
//! `jobs` runs the jobs. `outcomes` creates the problem documents for all other outcomes.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_shared::{CrashReason, Outcome, RejectReason, Verdict};
use futures_util::stream::{self, Stream};
use tokio::io::AsyncReadExt;

use super::session::{Session, SessionSlot};
use super::{Failure, UPLOAD_TIMEOUT};
use crate::control::outcomes::{fields, headers, local_outcome, outcome_problem};

/// Maximum size of the chunks in which a result is sent to the client, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// Returns the response to a job whose outcome is `ok`. The body is read from the session.
pub(super) async fn result(
    outcome: &Outcome,
    bytes: u64,
    mut session: Session,
    slot: Option<SessionSlot>,
) -> Result<Response, Failure> {
    let body = if bytes <= CHUNK_BYTES as u64 {
        let mut result = Vec::with_capacity(bytes as usize);
        let count = (&mut session.reader).take(bytes).read_to_end(&mut result).await;
        if count.map_err(|_| Failure::Dropped)? as u64 != bytes {
            return Err(Failure::Dropped);
        }
        if let Some(slot) = slot {
            slot.put(session);
        }
        Body::from(result)
    } else {
        Body::from_stream(chunks(session, slot, bytes))
    };
    let mut response = body.into_response();
    response.headers_mut().extend(headers(&fields(outcome, Vec::new())));
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
    Ok(response)
}

/// Reads a result in chunks. Once the last chunk has been read, the session can be used for another job.
fn chunks(
    session: Session,
    slot: Option<SessionSlot>,
    bytes: u64,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::unfold((Some((session, slot)), bytes), async |(session, left)| {
        let (mut session, slot) = session?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES)));
        match (&mut session.reader).take(left).read_buf(&mut chunk).await {
            Ok(0) => Some((Err(io::Error::from(io::ErrorKind::UnexpectedEof)), (None, 0))),
            Err(error) => Some((Err(error), (None, 0))),
            Ok(count) => {
                let left = left - count as u64;
                let mut rest = Some((session, slot));
                // The body might not be polled again after the last byte.
                if left == 0
                    && let Some((session, Some(slot))) = rest.take()
                {
                    slot.put(session);
                }
                Some((Ok(Bytes::from(chunk)), (rest, left)))
            }
        }
    })
}

/// Returns a response with HTTP status 408 for a job whose payload did not arrive in time.
pub(super) fn upload_timed_out(name: &str, deadline: Option<Duration>) -> Response {
    let message = format!("the payload did not arrive within {} s", UPLOAD_TIMEOUT.as_secs());
    let verdict = Verdict::Rejected { reason: RejectReason::Invalid, message };
    let outcome = local_outcome(name, deadline, verdict, None);
    outcome_problem(Some(StatusCode::REQUEST_TIMEOUT), &outcome, Vec::new(), None)
}

/// Returns the response for a job whose connection was closed by the data plane before it sent an outcome. The data
/// plane does this if it shuts down or has no memory for the result.
pub(super) fn dropped(name: &str, deadline: Option<Duration>, is_idempotent: bool) -> Response {
    let message = "the supervisor is stopping or out of memory; the job may have run".into();
    let verdict = Verdict::Crashed { reason: CrashReason::Stopped, status: None, message };
    let retryable = verdict.is_retryable(is_idempotent);
    let outcome = Outcome { retryable, ..local_outcome(name, deadline, verdict, None) };
    outcome_problem(None, &outcome, Vec::new(), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idempotent_job_without_an_outcome_is_retryable() {
        for (is_idempotent, retryable) in [(false, "false"), (true, "true")] {
            let response = dropped("b", None, is_idempotent);
            assert_eq!(response.headers()["bulkhead-retryable"], retryable);
        }
    }
}

//! Sends requests to JetStream, such as acknowledged publications and direct reads. Also parses the responses, because
//! the agent's decisions depend on the error codes. `ledger` and `streams` use these requests. The callers decide
//! whether to repeat a failed request.

use std::time::Duration;

use async_nats::subject::ToSubject;
use async_nats::{
    Client, HeaderMap, Message, Request, RequestError, RequestErrorKind, StatusCode, Subscriber,
};
use bulkhead_shared::RejectReason;
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use super::connection::REQUEST_TIMEOUT;

/// Error code for a write that expected a different last sequence number. The error message contains the actual number.
const WRONG_LAST_SEQUENCE: u64 = 10071;
/// Error code for a write that was rejected because another write to the same subject is pending.
const WRITE_IN_PROCESS: u64 = 10164;
/// Error code for headers that exceed the server's fixed limit of 64 KiB.
const HEADERS_TOO_LARGE: u64 = 10097;
/// Error code for a message that exceeds the stream's size limit.
const MESSAGE_TOO_LARGE: u64 = 10054;
/// Error code for a server that lacks disk space or memory.
const NO_RESOURCES: u64 = 10023;
/// Error code for a cluster without quorum.
const NO_QUORUM: u64 = 10008;
/// Error code for an account without JetStream.
const NOT_ENABLED_FOR_ACCOUNT: u64 = 10039;
/// Error code for a full stream or subject.
const STORE_FAILED: u64 = 10077;

/// Header that contains the sequence number of a stored message.
const SEQUENCE: &str = "Nats-Sequence";

/// The result of publishing a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// The stream stored the message.
    Stored(u64),
    /// No stream covers this subject, or the stream has no leader.
    NoStream,
    /// The write was rejected because the subject's last sequence number was not the expected one. Contains the
    /// actual number.
    Conflict(u64),
    /// The write was rejected because another write to the same subject is pending.
    Pending,
    /// The subject has reached its maximum number of messages.
    SubjectFull,
    /// The stream is full.
    StreamFull,
    /// The message cannot be stored, because the server lacks disk space or the cluster lacks quorum.
    Unavailable(String),
    /// The message exceeds one of the server's size limits.
    TooLarge,
    /// The user does not have permission to publish to the subject.
    Refused(String),
    /// The server did not respond, so the message may or may not have been stored.
    Unknown(String),
}

impl Published {
    /// Returns the reason and a description if the server has refused the message, and `None` for all other results.
    pub(crate) fn rejection(&self) -> Option<(RejectReason, String)> {
        Some(match self {
            Self::SubjectFull => (RejectReason::TenantQuota, "the tenant has too many waiting jobs".into()),
            Self::StreamFull => (RejectReason::QueueFull, "the job stream is full".into()),
            Self::TooLarge => {
                (RejectReason::TooLarge, "the payload is larger than the server accepts".into())
            }
            Self::Refused(message) => (RejectReason::Forbidden, message.clone()),
            Self::Unavailable(message) => (RejectReason::Unavailable, message.clone()),
            _ => return None,
        })
    }
}

#[derive(Debug, Deserialize)]
struct Answer {
    error: Option<ApiError>,
    #[serde(default)]
    seq: u64,
}

/// An error from a JetStream API request.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ApiError {
    pub(crate) code: u64,
    pub(crate) err_code: u64,
    pub(crate) description: String,
}

/// Sends a request and waits for the response. The time limit also covers the time until the request is in the client's
/// send queue. The queue is full after a long outage, and the library would wait for room without a time limit.
pub(crate) async fn request(
    client: &Client,
    subject: impl ToSubject,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Message, RequestError> {
    let request = Request::new().headers(headers).payload(body);
    let response = timeout(REQUEST_TIMEOUT, client.send_request(subject, request)).await;
    response.unwrap_or_else(|_| Err(RequestError::new(RequestErrorKind::TimedOut)))
}

/// Sends a message that needs no response. The message is dropped if the client's send queue stays full.
pub(crate) async fn send(client: &Client, subject: impl ToSubject, body: Bytes) {
    let _ = timeout(REQUEST_TIMEOUT, client.publish(subject, body)).await;
}

/// Subscribes to a subject. Fails if the client's send queue stays full.
pub(crate) async fn subscribe(client: &Client, subject: impl ToSubject) -> Result<Subscriber, String> {
    match timeout(REQUEST_TIMEOUT, client.subscribe(subject)).await {
        Ok(subscribed) => subscribed.map_err(|error| error.to_string()),
        Err(_) => Err("the subscription was not sent in time".to_owned()),
    }
}

/// Publishes a message to a stream and waits for the acknowledgement.
pub(crate) async fn publish(
    client: &Client,
    subject: String,
    mut headers: HeaderMap,
    body: Bytes,
    expects: Option<u64>,
) -> Published {
    if let Some(expected) = expects {
        headers.insert("Nats-Expected-Last-Subject-Sequence", expected.to_string());
    }
    match request(client, subject, headers, body).await {
        Ok(answer) => classify(&answer.payload),
        Err(error) => match error.kind() {
            RequestErrorKind::NoResponders => Published::NoStream,
            RequestErrorKind::MaxPayloadExceeded => Published::TooLarge,
            RequestErrorKind::InvalidSubject => Published::Refused(error.to_string()),
            _ => Published::Unknown(error.to_string()),
        },
    }
}

fn classify(payload: &[u8]) -> Published {
    let Ok(answer) = serde_json::from_slice::<Answer>(payload) else {
        return Published::Unknown("the server's response is not an acknowledgement".into());
    };
    let Some(error) = answer.error else { return Published::Stored(answer.seq) };
    match error.err_code {
        WRITE_IN_PROCESS => Published::Pending,
        WRONG_LAST_SEQUENCE => {
            match error.description.rsplit(' ').next().and_then(|last| last.parse().ok()) {
                Some(last) => Published::Conflict(last),
                None => Published::Pending,
            }
        }
        STORE_FAILED if error.description.contains("per subject") => Published::SubjectFull,
        STORE_FAILED if error.description.contains("maximum") => Published::StreamFull,
        STORE_FAILED if error.description.contains("no space") => Published::Unavailable(error.description),
        HEADERS_TOO_LARGE | MESSAGE_TOO_LARGE => Published::TooLarge,
        NO_RESOURCES | NO_QUORUM => Published::Unavailable(error.description),
        _ => Published::Unknown(error.description),
    }
}

/// A stored message, returned by a direct read.
#[derive(Debug)]
pub(crate) struct StoredMessage {
    pub(crate) subject: String,
    pub(crate) sequence: u64,
    /// Time at which the message was stored, in RFC 3339.
    pub(crate) stored_at: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// True if the stored message is itself the server's response to a read.
    pub(crate) is_copy: bool,
}

/// Returns the API subject for a direct read of the last message on `subject`.
pub(crate) fn read_subject(stream: &str, subject: &str) -> String {
    format!("$JS.API.DIRECT.GET.{stream}.{subject}")
}

/// Reads the last message on a subject from any replica. The message can be stale, because a replica can lag behind the
/// leader.
pub(crate) async fn read_last(
    client: &Client,
    stream: &str,
    subject: &str,
) -> Result<Option<StoredMessage>, String> {
    let answer = request(client, read_subject(stream, subject), HeaderMap::new(), Bytes::new()).await;
    parse_read(answer.map_err(|error| error.to_string())?)
}

/// Returns the message that the response to a direct read contains. A stored message can also have a status, because
/// older servers, such as 2.11, store it. The server adds a sequence number only to stored messages.
fn parse_read(answer: Message) -> Result<Option<StoredMessage>, String> {
    let is_stored = answer.headers.as_ref().is_some_and(|headers| headers.get(SEQUENCE).is_some());
    match answer.status.filter(|_| !is_stored) {
        Some(StatusCode::NOT_FOUND) => Ok(None),
        Some(status) => Err(format!("status {status}")),
        None => stored_message(answer).map(Some),
    }
}

fn stored_message(message: Message) -> Result<StoredMessage, String> {
    let headers = message.headers.unwrap_or_default();
    // The server appends its own headers to those of the stored message.
    let text = |name: &str| {
        headers
            .get_last(name)
            .map(|value| value.as_str().to_owned())
            .ok_or_else(|| format!("the {name} header is missing"))
    };
    Ok(StoredMessage {
        subject: text("Nats-Subject")?,
        sequence: text(SEQUENCE)?
            .parse()
            .map_err(|_| "the sequence number of the message is invalid".to_owned())?,
        stored_at: text("Nats-Time-Stamp")?,
        body: message.payload,
        is_copy: headers.get_all("Nats-Subject").count() > 1,
        headers,
    })
}

/// Calls the JetStream API. Errors contain the server's description.
pub(crate) async fn api<T: DeserializeOwned>(
    client: &Client,
    call: &str,
    body: Value,
) -> Result<T, ApiError> {
    let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
    let answer = request(client, format!("$JS.API.{call}"), HeaderMap::new(), body).await;
    parse_api(&answer.map_err(local_error)?.payload)
}

/// Calls the JetStream API of the fleet's account, which can differ from the client's account. If the client's account
/// imports the call, the server sends two responses. Ignores the response for the client's own account.
pub(crate) async fn fleet_api<T: DeserializeOwned>(
    client: &Client,
    call: &str,
    body: Value,
) -> Result<T, ApiError> {
    let inbox = client.new_inbox();
    let mut responses = subscribe(client, inbox.clone()).await.map_err(local_error)?;
    let sent = client.publish_with_reply(format!("$JS.API.{call}"), inbox, body.to_string().into());
    let response = async {
        sent.await.map_err(local_error)?;
        while let Some(message) = responses.next().await {
            if message.status == Some(StatusCode::NO_RESPONDERS) {
                break;
            }
            match parse_api(&message.payload) {
                Err(error) if error.err_code == NOT_ENABLED_FOR_ACCOUNT => {}
                parsed => return parsed,
            }
        }
        Err(local_error("no responders"))
    };
    timeout(REQUEST_TIMEOUT, response).await.unwrap_or_else(|_| Err(local_error("the request timed out")))
}

fn parse_api<T: DeserializeOwned>(payload: &[u8]) -> Result<T, ApiError> {
    let value: Value = serde_json::from_slice(payload)
        .map_err(|error| local_error(format!("the response is not JSON: {error}")))?;
    if let Some(error) = value.get("error") {
        return Err(serde_json::from_value(error.clone()).unwrap_or_default());
    }
    serde_json::from_value(value).map_err(|error| local_error(format!("the response is unknown: {error}")))
}

/// Returns an error that the server has not sent.
fn local_error(description: impl ToString) -> ApiError {
    ApiError { description: description.to_string(), ..ApiError::default() }
}

/// Time to wait before publishing a message again after a failure.
pub(crate) const REPEAT_DELAY: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u64, description: &str) -> Published {
        let error = serde_json::json!({"code": 400, "err_code": code, "description": description});
        classify(serde_json::json!({"error": error, "stream": "S", "seq": 0}).to_string().as_bytes())
    }

    fn read(status: StatusCode, headers: &[(&str, &str)]) -> Result<Option<StoredMessage>, String> {
        let mut map = HeaderMap::new();
        headers.iter().for_each(|&(name, value)| map.insert(name, value));
        parse_read(Message {
            subject: "_INBOX.a".into(),
            reply: None,
            payload: Bytes::new(),
            headers: Some(map).filter(|map| !map.is_empty()),
            status: Some(status),
            description: None,
            length: 0,
        })
    }

    #[test]
    fn stored_message_with_a_status_is_found() {
        let stored = [("Nats-Subject", "s"), ("Nats-Sequence", "7"), ("Nats-Time-Stamp", "t")];
        for status in [StatusCode::NOT_FOUND, StatusCode::TIMEOUT] {
            assert_eq!(read(status, &stored).unwrap().unwrap().sequence, 7);
        }
        assert!(read(StatusCode::NOT_FOUND, &[]).unwrap().is_none());
        assert!(read(StatusCode::TIMEOUT, &[]).is_err());
    }

    #[test]
    fn acknowledgement_contains_the_sequence_number() {
        assert_eq!(classify(br#"{"stream":"S","seq":7}"#), Published::Stored(7));
    }

    #[test]
    fn conflict_error_requires_a_sequence_number() {
        assert_eq!(error(10071, "wrong last sequence: 42"), Published::Conflict(42));
        assert_eq!(error(10071, "wrong last sequence"), Published::Pending);
        assert_eq!(error(10164, "wrong last sequence"), Published::Pending);
    }

    #[test]
    fn message_above_a_size_limit_is_definitely_refused() {
        assert_eq!(error(10097, "header size exceeds maximum allowed of 64k"), Published::TooLarge);
        assert_eq!(error(10054, "message size exceeds maximum allowed"), Published::TooLarge);
    }

    #[test]
    fn full_subject_and_full_stream_are_distinguished() {
        assert_eq!(error(10077, "maximum messages per subject exceeded"), Published::SubjectFull);
        assert_eq!(error(10077, "maximum bytes exceeded"), Published::StreamFull);
        assert!(matches!(error(10077, "no space left on device"), Published::Unavailable(_)));
        assert!(matches!(error(10023, "insufficient resources"), Published::Unavailable(_)));
        assert!(matches!(error(10077, "raft: stepped down"), Published::Unknown(_)));
        assert!(matches!(classify(b"<html>"), Published::Unknown(_)));
    }
}

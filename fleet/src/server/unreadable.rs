//! Deletes messages whose headers or subject `async-nats` cannot parse. Such a message makes the library close the
//! connection or panic. No agent can handle the message, so the server would redeliver it forever. Called after a lane
//! has lost its connection.

use async_nats::{Client, HeaderName, HeaderValue, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use super::messages::{ApiError, api};
use crate::names::{JOBS, bulkhead_filter};

/// Maximum number of messages that one search examines.
const MESSAGES_MAX: usize = 256;
/// Total size of received payloads, in base64, at which a search stops. The server sends the payload of each examined
/// message along with the headers.
const BYTES_MAX: usize = 16 << 20;

#[derive(Deserialize)]
struct Found {
    message: StoredJob,
}

#[derive(Deserialize)]
struct StoredJob {
    subject: String,
    seq: u64,
    /// Headers in base64.
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
}

/// Deletes the unreadable messages among a bulkhead's waiting and running jobs. Searches in order of the sequence
/// numbers, beginning with `start`. Returns the sequence number at which the next search has to start.
pub(crate) async fn delete(client: &Client, bulkhead: &str, start: u64) -> u64 {
    let filter = bulkhead_filter(bulkhead);
    let (mut next, mut bytes, mut deleted) = (start, 0, 0_u32);
    for _ in 0..MESSAGES_MAX {
        let request = json!({"seq": next, "next_by_subj": filter});
        let found: Result<Found, ApiError> = api(client, &format!("STREAM.MSG.GET.{JOBS}"), request).await;
        // There are no further messages, or the server does not respond. The next search starts from the beginning.
        let Ok(Found { message }) = found else {
            next = 1;
            break;
        };
        next = message.seq + 1;
        bytes += message.data.len();
        // The server replaces invalid UTF-8 in a subject when it encodes the response as JSON.
        let is_utf8 = !message.subject.contains(char::REPLACEMENT_CHARACTER);
        if !(is_utf8 && is_readable(&message.hdrs)) && delete_one(client, &message).await {
            deleted += 1;
        }
        if bytes > BYTES_MAX {
            break;
        }
    }
    if deleted == 0 {
        return next;
    }
    tracing::warn!(
        "deleted {deleted} messages for {bulkhead} because their headers or subjects could not be parsed"
    );
    1
}

async fn delete_one(client: &Client, message: &StoredJob) -> bool {
    let request = json!({"seq": message.seq, "no_erase": true});
    let deleted: Result<Value, ApiError> = api(client, &format!("STREAM.MSG.DELETE.{JOBS}"), request).await;
    match deleted {
        Ok(_) => true,
        // Another agent has deleted the message.
        Err(error) if error.description.contains("no message found") => false,
        Err(error) => {
            tracing::error!(
                "failed to delete message {} of {}, which cannot be parsed: {}; if the stream {JOBS} does not \
                 permit deletion, create it again",
                message.seq,
                message.subject,
                error.description
            );
            false
        }
    }
}

/// Returns true if `async-nats` can parse the headers, which are encoded in base64. Imitates `try_read_op`, the
/// library's own parser.
fn is_readable(headers: &str) -> bool {
    let Ok(headers) = STANDARD.decode(headers) else { return true };
    if headers.is_empty() {
        return true;
    }
    let Ok(text) = std::str::from_utf8(&headers) else { return false };
    let mut lines = text.lines().peekable();
    let Some(status) = lines.next().and_then(|line| line.strip_prefix("NATS/1.0")) else { return false };
    let status = status.trim().split(' ').next().unwrap_or_default();
    if !status.is_empty() && status.parse::<StatusCode>().is_err() {
        return false;
    }
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let Some((name, value)) = line.split_once(':') else { return false };
        let mut value = value.trim_start().to_owned();
        while let Some(more) = lines.next_if(|line| line.starts_with(char::is_whitespace)) {
            value.push_str(more);
        }
        if name.parse::<HeaderName>().is_err() || value.trim_end().parse::<HeaderValue>().is_err() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_headers_that_the_library_cannot_parse_are_unreadable() {
        for headers in [
            "",
            "NATS/1.0\r\n\r\n",
            "NATS/1.0 408 Request Timeout\r\n\r\n",
            "NATS/1.0\r\nBulkhead-Id: größe\r\nA:\r\n continued\r\n\tmore\r\n\r\n",
            "NATS/1.0\nA:b:c \r \n\n",
        ] {
            assert!(is_readable(&STANDARD.encode(headers)), "{headers:?}");
        }
        for headers in [
            b"GARBAGE\r\n\r\n".as_slice(),
            b"NATS/1.0 99\r\n\r\n",
            b"NATS/1.0\r\nno colon\r\n\r\n",
            b"NATS/1.0\r\nA: \xff\r\n\r\n",
            b"NATS/1.0\r\nA: b\rc\r\n\r\n",
            b"NATS/1.0\r\nA\x01: b\r\n\r\n",
            "NATS/1.0\r\nGröße: b\r\n\r\n".as_bytes(),
        ] {
            assert!(!is_readable(&STANDARD.encode(headers)), "{headers:?}");
        }
    }
}

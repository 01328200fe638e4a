//! Reads and writes the records of jobs in the ledger stream. A write succeeds only if the stored record still has the
//! expected sequence number. `decide` chooses the record and handles the result, and `format` encodes the record.
//! Nothing is retried here.

use async_nats::Client;

use super::messages::{self, Published};
use crate::decide::{Write, WriteResult};
use crate::format;
use crate::names::LEDGER;
use crate::record::{ReadError, Stored};

/// Reads the record of a job. The record can be stale.
pub(crate) async fn read(client: &Client, subject: &str) -> Result<Option<Stored>, ReadError> {
    let read = messages::read_last(client, LEDGER, subject).await.map_err(ReadError::Failed)?;
    let Some(message) = read else { return Ok(None) };
    if message.subject != subject {
        let received = message.subject;
        return Err(ReadError::Failed(format!("requested the record {subject}, but received {received}")));
    }
    let sequence = message.sequence;
    if message.is_copy {
        let message = "the record is a copy of another message".to_owned();
        return Err(ReadError::Unreadable { sequence, is_decided: false, message });
    }
    let is_decided = format::is_decided(&message.headers);
    format::decode(&message.headers, message.body)
        .map(|record| Some(Stored { sequence, record }))
        .map_err(|message| ReadError::Unreadable { sequence, is_decided, message })
}

/// Writes a record if the current record has the expected sequence number.
pub(crate) async fn write(client: &Client, subject: &str, write: &Write) -> WriteResult {
    let (headers, body) = format::encode(&write.record);
    match messages::publish(client, subject.to_owned(), headers, body, write.expects).await {
        Published::Stored(sequence) => WriteResult::Stored(sequence),
        Published::Conflict(last) => WriteResult::Conflict(last),
        Published::Pending => WriteResult::Pending,
        Published::TooLarge => {
            tracing::warn!("the record {subject} is too large for the server");
            WriteResult::TooLarge
        }
        other => {
            tracing::warn!("failed to store the record {subject} in the ledger: {other:?}; trying again");
            WriteResult::Unknown
        }
    }
}

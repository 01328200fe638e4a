//! Reads and writes the records of jobs in the ledger stream. A write succeeds only if the stored record still has the
//! expected sequence number. `decide` chooses the record and handles the result, and `format` encodes the record.
//! Nothing is retried here.

use async_nats::Client;

use super::messages::{self, Published};
use crate::decide::{Write, WriteResult};
use crate::format;
use crate::names::LEDGER;
use crate::record::Stored;

/// Reads the record of a job. The record can be stale.
pub(crate) async fn read(client: &Client, subject: &str) -> Result<Option<Stored>, String> {
    let Some(message) = messages::read_last(client, LEDGER, subject).await? else { return Ok(None) };
    if message.subject != subject {
        return Err(format!("requested the record {subject}, but received {}", message.subject));
    }
    let record = format::decode(&message.headers, message.body)?;
    Ok(Some(Stored { sequence: message.sequence, record }))
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

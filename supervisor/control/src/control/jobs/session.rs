//! Connects a job over HTTP to the data plane, as a client that uses the jobs protocol. The jobs of a kept-alive HTTP
//! connection share one connection to the data plane, and use it one at a time. `jobs` runs each job, and `upload`
//! sends the payload.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bulkhead_plane::access::HttpClient;
use bulkhead_plane::command::{Command, CommandSendError, CommandSender};
use bulkhead_plane::counters::SharedCounters;
use bulkhead_shared::RejectReason;
use bulkhead_shared::client_protocol::{Refused, Submit, encode_run_limit};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::frame::{HEADER_BYTES, Header, kind};
use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, truncate};
use tokio::io::{AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::OwnedSemaphorePermit;

use super::Failure;
use super::headers::JobHeaders;
use super::upload::Announced;

/// Maximum time to wait for space in the command queue.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(1);

/// Size of the buffer for reading outcomes, in bytes. Large enough for the outcomes of most jobs.
const READ_BUFFER_BYTES: usize = 8 * 1024;

pub(super) type Reader = BufReader<OwnedReadHalf>;

/// A connection to the data plane that is not processing a job.
#[derive(Debug)]
pub(in crate::control) struct Session {
    pub(super) reader: Reader,
    pub(super) writer: OwnedWriteHalf,
    /// Sequence number of the last request sent in this session.
    pub(super) number: u64,
    client: HttpClient,
}

/// Holds the session that belongs to an HTTP connection while no job is using it.
#[derive(Clone, Debug, Default)]
pub(in crate::control) struct SessionSlot(Arc<Mutex<Option<Session>>>);

impl SessionSlot {
    /// Takes the session if it is still open and was opened under the access rules that apply to `client`.
    pub(super) fn take(&self, client: &HttpClient) -> Option<Session> {
        let session = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        session.filter(|session| session.is_for(client) && session.is_quiet())
    }

    pub(super) fn put(&self, session: Session) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(session);
    }
}

impl Session {
    /// Opens a session. The data plane releases the permit when it has closed the session.
    pub(super) async fn open(
        commands: &CommandSender,
        permit: OwnedSemaphorePermit,
        client: HttpClient,
    ) -> Result<Self, Failure> {
        let no_descriptors =
            |error| Failure::Overloaded(format!("the supervisor has run out of file descriptors: {error}"));
        let (here, there) = pair().map_err(no_descriptors)?;
        let command = Command::AddClient { socket: there, permit, client: client.clone() };
        commands.send_within(command, COMMAND_TIMEOUT).await.map_err(|error| match error {
            CommandSendError::Ended => Failure::Draining,
            CommandSendError::Busy => Failure::Overloaded(error.to_string()),
        })?;
        let (reader, writer) = here.into_split();
        let reader = BufReader::with_capacity(READ_BUFFER_BYTES, reader);
        Ok(Self { reader, writer, number: 0, client })
    }

    fn is_for(&self, client: &HttpClient) -> bool {
        match (&self.client, client) {
            // Rules are compared by address, because each reload creates new rules.
            (HttpClient::Token(one), HttpClient::Token(other)) => Arc::ptr_eq(&one.rules, &other.rules),
            _ => false,
        }
    }

    /// Returns true if the session is still open and no data from the data plane is waiting to be read.
    fn is_quiet(&self) -> bool {
        let read = self.reader.get_ref().try_read(&mut [0]);
        self.reader.buffer().is_empty() && read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }
}

fn pair() -> io::Result<(UnixStream, std::os::unix::net::UnixStream)> {
    let (here, there) = std::os::unix::net::UnixStream::pair()?;
    here.set_nonblocking(true)?;
    there.set_nonblocking(true)?;
    Ok((UnixStream::from_std(here)?, there))
}

/// Encodes the SUBMIT frame of a job, without the payload.
pub(super) fn submit_frame(
    name: &str,
    job: &JobHeaders<'_>,
    announced: &Announced,
    number: u64,
) -> Result<Vec<u8>, Failure> {
    let run_limit = job.options.run_limit.map(encode_run_limit);
    let trace = job.traceparent.as_ref().map(|trace| (tag::TRACEPARENT, trace.as_str().as_bytes()));
    let limit = run_limit.as_ref().map(|limit| (tag::RUN_LIMIT, &limit[..]));
    let extensions: Vec<_> = trace.into_iter().chain(limit).collect();
    let mut bytes = vec![0; HEADER_BYTES];
    // A long name is truncated to a length that is invalid for a bulkhead, so that it cannot match any bulkhead.
    let message = Submit::new(truncate(name, BULKHEAD_NAME_BYTES_MAX + 1), &job.options);
    codec::encode(&message, &extensions, &mut bytes).map_err(|_| Failure::Broken)?;
    let metadata = bytes.len() - HEADER_BYTES;
    let length = u32::try_from(metadata as u64 + announced.bytes()).map_err(|_| Failure::Broken)?;
    let header = Header { length, kind: kind::SUBMIT, flags: 0, metadata_length: metadata as u16, number };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(bytes)
}

/// Reads frames up to the metadata of the outcome. Returns the metadata and the number of result bytes that follow.
pub(super) async fn read_outcome(
    reader: &mut Reader,
    number: u64,
    counters: &SharedCounters,
) -> Result<(Vec<u8>, u64), Failure> {
    let mut has_response = false;
    loop {
        let mut bytes = [0; HEADER_BYTES];
        // A data plane that shuts down properly sends an outcome for every job it has received, so a job without an
        // outcome never began.
        let end = |_| {
            let is_unread = !has_response && counters.has_answered_all.load(Ordering::SeqCst);
            if is_unread { Failure::Draining } else { Failure::Dropped }
        };
        bytes[0] = reader.read_u8().await.map_err(end)?;
        has_response = true;
        reader.read_exact(&mut bytes[1..]).await.map_err(|_| Failure::Dropped)?;
        let header = Header::decode(&bytes).check().map_err(|_| Failure::Dropped)?;
        let mut metadata = vec![0; usize::from(header.metadata_length)];
        reader.read_exact(&mut metadata).await.map_err(|_| Failure::Dropped)?;
        match header.kind {
            kind::OUTCOME if header.number == number => {
                return Ok((metadata, header.payload_length() as u64));
            }
            kind::OUTCOME => return Err(Failure::Dropped),
            // The data plane rejects frames from this connection only if the payload was not sent in time or there is
            // no memory for it.
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

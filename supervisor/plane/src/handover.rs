//! Encodes and decodes the messages of an upgrade, in which a supervisor hands over to its successor. Also defines the
//! commands with which a control plane directs its data plane. `upgrade` and `take_over` in the control plane decide
//! about the steps. `docs/operations/upgrade.md` describes the order of the messages.
//!
//! There are two `SOCK_SEQPACKET` sockets. The control planes use the *link* to agree on the handover. After that, the
//! data planes use the *transfer socket*: the predecessor passes on connections and returns permits. Each message is
//! one frame of the protocol (header, metadata, payload). If the message has a descriptor, the descriptor is sent along
//! with it. Unknown kinds and unknown extensions are skipped unless they are critical.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bincode::{BorrowDecode, Encode};
use bulkhead_policy::Digest;
use bulkhead_shared::codec::{self, CodecError, Message};
use bulkhead_shared::frame::{HEADER_BYTES, Header};
use bulkhead_shared::limits::{INLINE_PAYLOAD_BYTES_MAX, METADATA_BYTES_MAX, READ_BYTES_MAX};
use tokio::sync::oneshot;

use crate::access::TokenGrant;

/// Message version that this supervisor supports.
pub const VERSION: u16 = 1;

/// Maximum size of a message in bytes. The largest message contains the unread bytes of a connection: an incomplete
/// frame, and the bytes from one more read.
pub const MESSAGE_BYTES_MAX: usize =
    2 * HEADER_BYTES + 2 * METADATA_BYTES_MAX + INLINE_PAYLOAD_BYTES_MAX + READ_BYTES_MAX;

/// Gap between the job, lease and event numbers of a supervisor and those of its successor. If the upgrade fails and
/// the predecessor continues with its own numbers, the gap prevents a number from being used twice. The successor
/// cannot use this many numbers in the ten seconds during which the upgrade can fail. A job number has 40 bits, which
/// is enough for tens of thousands of upgrades.
pub const NUMBERS_PER_ATTEMPT: u64 = 1 << 24;

/// Numbers that identify the kinds of messages. A number never changes its meaning between versions.
#[expect(missing_docs, reason = "each kind is documented on the message type of the same name")]
pub mod kind {
    // The link.
    pub const HELLO: u8 = 1;
    pub const INHERITED: u8 = 2;
    pub const BULKHEAD: u8 = 3;
    pub const TENANT: u8 = 4;
    pub const WORKER_ID: u8 = 5;
    pub const STATE: u8 = 6;
    pub const READY: u8 = 7;
    pub const HELD_AT_SWITCH: u8 = 8;
    pub const QUARANTINED: u8 = 9;
    pub const SWITCH: u8 = 10;
    pub const ACTIVE: u8 = 11;
    pub const MAIN: u8 = 12;
    pub const STOP: u8 = 13;
    pub const FAILED: u8 = 14;
    pub const PING: u8 = 15;
    pub const PONG: u8 = 16;

    // The transfer socket.
    pub const SESSION: u8 = 32;
    pub const HELD: u8 = 33;
}

/// HELLO, from the successor.
#[derive(Debug, Encode, BorrowDecode)]
pub struct Hello<'a> {
    /// Oldest message version that the successor supports.
    pub oldest: u16,
    /// Newest message version that the successor supports.
    pub newest: u16,
    /// Version of the program.
    pub program: &'a str,
    /// Highest start timeout (`start.ready`) of any bulkhead in the successor's configuration, in milliseconds.
    pub start_limit_ms: u64,
}

/// INHERITED: passes a descriptor to the successor.
#[derive(Debug, Encode, BorrowDecode)]
pub struct InheritedName<'a> {
    /// Name of the descriptor, which is one of the constants in [`inherited`].
    pub name: &'a str,
    /// Path or address of a socket, or path of a locked file or folder. Empty for all other kinds of descriptors.
    pub place: &'a str,
}

/// Names of descriptors.
#[expect(missing_docs, reason = "self-explanatory names")]
pub mod inherited {
    pub const JOBS: &str = "jobs";
    pub const JOBS_LOCK: &str = "jobs lock";
    pub const ADMIN: &str = "admin";
    pub const ADMIN_LOCK: &str = "admin lock";
    pub const HTTP: &str = "http";
    pub const JOBS_HTTP: &str = "jobs_http";
    pub const CRASHES_LOCK: &str = "crash_dir lock";
    /// Read end of a pipe that reaches end-of-file once the predecessor and all its keepers have exited.
    pub const LIFELINE: &str = "lifeline";
    /// Write end of a pipe that the successor and its keepers hold open until they exit. If the upgrade fails, the
    /// predecessor waits for these processes to exit before it uses their workers' permits.
    pub const SUCCESSOR_LIFELINE: &str = "successor lifeline";
    /// The successor's end of the transfer socket.
    pub const TRANSFER: &str = "transfer";
}

/// Limits that an operator can change while the supervisor is running.
#[derive(Clone, Copy, Debug, PartialEq, Encode, BorrowDecode)]
pub struct Numbers {
    /// Number of worker processes.
    pub processes: Option<u32>,
    /// Maximum number of jobs in flight per worker.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs.
    pub max_queue: Option<u32>,
    /// Rate limit: cost per second, burst, and whether the limit applies to each tenant separately.
    pub rate_limit: Option<(f64, u32, bool)>,
}

/// Operator actions that keep a bulkhead from accepting new jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Encode, BorrowDecode)]
pub struct ClosedByOperator {
    /// True if the bulkhead rejects new jobs.
    pub is_draining: bool,
    /// True if the breaker is forced open.
    pub is_forced_open: bool,
}

/// BULKHEAD: the state of a bulkhead, including changes made by operators.
#[derive(Clone, Debug, PartialEq, Encode, BorrowDecode)]
pub struct BulkheadState {
    pub name: String,
    /// True if the bulkhead can run jobs.
    pub is_ready: bool,
    pub closed: ClosedByOperator,
    /// Limits in the predecessor's configuration file.
    pub file: Numbers,
    /// Limits in effect, including changes made by operators.
    pub live: Numbers,
}

/// TENANT: the changes that operators have made to a tenant's limits.
#[derive(Clone, Debug, PartialEq, Encode, BorrowDecode)]
pub struct TenantState {
    pub bulkhead: String,
    pub tenant: String,
    /// Limits in the predecessor's configuration file.
    pub file: Numbers,
    /// Limits in effect, including changes made by operators.
    pub live: Numbers,
}

/// WORKER_ID: the permanent UID that all workers of a bulkhead share. Sent only for bulkheads whose workers write
/// files.
#[derive(Debug, Encode, BorrowDecode)]
pub struct WorkerId<'a> {
    pub bulkhead: &'a str,
    pub id: u32,
}

/// STATE: the last of the messages that describe the predecessor's state.
#[derive(Clone, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct State {
    /// Message version that both supervisors support.
    pub version: u16,
    /// The predecessor's PID.
    pub pid: u32,
    /// True if the upgrade must continue even if a bulkhead that is ready in the predecessor fails in the successor.
    pub is_forced: bool,
    /// Soft resource limits that applied before the predecessor raised them. Each limit is paired with its resource
    /// number. `u64::MAX` means unlimited.
    pub soft_limits: Vec<(u32, u64)>,
    /// Names of the passed descriptors whose sockets were created by the service manager.
    pub activated: Vec<String>,
}

/// Name of a compartment, which is either a bulkhead or an isolated tenant in a bulkhead.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, BorrowDecode)]
pub struct CompartmentName {
    pub bulkhead: String,
    /// Name of the isolated tenant, if any.
    pub tenant: Option<String>,
}

/// HELD_AT_SWITCH and HELD: the number of permits that the predecessor still needs. This number can only decrease.
#[derive(Clone, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Held {
    pub compartment: CompartmentName,
    pub permits: u32,
    /// Number of jobs that are waiting for a permit in the predecessor.
    pub waiting: u32,
}

/// QUARANTINED: a quarantined payload.
#[derive(Clone, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Quarantined {
    pub compartment: CompartmentName,
    pub digest: [u8; 16],
}

impl Quarantined {
    /// Creates a message that reports the payload with this digest as quarantined.
    pub fn new(compartment: CompartmentName, digest: Digest) -> Self {
        Self { compartment, digest: u128::from(digest).to_le_bytes() }
    }

    pub fn digest(&self) -> Digest {
        u128::from_le_bytes(self.digest).into()
    }
}

/// SWITCH: tells the successor to serve clients from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Switch {
    /// Exclusive lower bound for the successor's job numbers.
    pub jobs_after: u64,
    /// Exclusive lower bound for the successor's lease numbers.
    pub leases_after: u64,
    /// Exclusive lower bound for the successor's event sequence numbers.
    pub events_after: u64,
}

/// SESSION: a connection. Its socket is sent along with the message. The payload consists of bytes that were received
/// but have not been handled yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct SessionState {
    /// True if the handshake with the client is complete.
    pub is_open: bool,
    /// Capabilities that the predecessor announced in its welcome.
    pub capabilities: u64,
    /// Origin of the connection.
    pub client: SessionClient,
    /// True if the client supports GOAWAY.
    pub takes_goaway: bool,
    /// Number of SUBMIT frames handled on this connection.
    pub submits: u64,
}

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub enum SessionClient {
    /// The peer of the socket, whose credentials the kernel reports.
    Peer,
    /// The connection was opened by the control plane on behalf of a user of the admin API.
    Operator {
        /// The user's UID.
        uid: u32,
    },
    /// The connection was opened by the control plane on behalf of a client with a token.
    Token {
        /// The token's number.
        id: u32,
    },
}

/// FAILED: tells the predecessor why the successor exits.
#[derive(Debug, Encode, BorrowDecode)]
pub struct Failed<'a> {
    /// The reason, as a sentence.
    pub message: &'a str,
}

/// A message without contents.
#[derive(Debug, Encode, BorrowDecode)]
pub struct Nothing {}

/// Encodes a message.
pub fn encode<'a>(kind: u8, message: &impl Message<'a>, payload: &[u8]) -> Result<Vec<u8>, CodecError> {
    let mut bytes = vec![0; HEADER_BYTES];
    codec::encode(message, &[], &mut bytes)?;
    let metadata = bytes.len() - HEADER_BYTES;
    bytes.extend_from_slice(payload);
    let header = Header {
        length: (bytes.len() - HEADER_BYTES) as u32,
        kind,
        flags: 0,
        metadata_length: metadata as u16,
        number: 0,
    };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(bytes)
}

/// A received message.
#[derive(Debug)]
pub struct Frame<'a> {
    /// Kind of the message: a constant from [`kind`], or a number that only later versions define.
    pub kind: u8,
    metadata: &'a [u8],
    pub payload: &'a [u8],
    is_critical: bool,
}

/// Reason why a message cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes are not a complete message.
    #[error("the message is truncated")]
    CutOff,
    /// The metadata does not match the kind of message.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The descriptor that belongs to the message is missing, because this process had reached its limit on open files.
    #[error("the descriptor of a message is missing: raise the limit on open files")]
    NoDescriptor,
    /// The message is critical, but this version does not know its kind.
    #[error("this version does not support message kind {0}")]
    Unknown(u8),
}

impl<'a> Frame<'a> {
    /// Splits a message into its parts.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(FrameError::CutOff)?;
        let header = Header::decode(header).check().map_err(|_| FrameError::CutOff)?;
        if rest.len() != header.length as usize {
            return Err(FrameError::CutOff);
        }
        let (metadata, payload) = rest.split_at(header.metadata_length.into());
        Ok(Self { kind: header.kind, metadata, payload, is_critical: header.is_critical() })
    }

    /// Decodes the metadata.
    pub fn message<M: Message<'a>>(&self) -> Result<M, FrameError> {
        Ok(codec::decode(self.metadata, &[])?.0)
    }

    /// Skips a message of an unknown kind. Returns an error if the message is critical.
    pub fn skip(&self) -> Result<(), FrameError> {
        if self.is_critical { Err(FrameError::Unknown(self.kind)) } else { Ok(()) }
    }
}

/// Kills this process in debug builds if the file named by the environment variable `BULKHEAD_UPGRADE_DEATH` contains
/// `deed` ("send" or "receive") and the kind of message. If the file contains "hang" before that, stops the process
/// with SIGSTOP instead. Removes the file first. Used in tests.
pub fn die_on_request(deed: &str, kind: u8) {
    use rustix::process::{Signal, getpid, kill_process};
    let file = if cfg!(debug_assertions) { std::env::var_os("BULKHEAD_UPGRADE_DEATH") } else { None };
    let Some(file) = file else { return };
    let Ok(wanted) = std::fs::read_to_string(&file) else { return };
    let (is_hang, point) = match wanted.strip_prefix("hang ") {
        Some(point) => (true, point),
        None => (false, wanted.as_str()),
    };
    if point != format!("{deed} {kind}") || std::fs::remove_file(&file).is_err() {
        return;
    }
    let _ = kill_process(getpid(), if is_hang { Signal::STOP } else { Signal::KILL });
    // SIGSTOP can be delivered to another thread first, so this thread must not continue.
    loop {
        std::thread::park();
    }
}

/// Commands from the control plane that concern an upgrade.
#[derive(Debug)]
pub enum HandoverCommand {
    /// Prepare to hand over: refuse operator commands, stop lending files, recall leases, and pass the lifeline to the
    /// keeper.
    Prepare { lifeline: Arc<OwnedFd>, reply: oneshot::Sender<Result<Prepared, String>> },
    /// Once clients have returned their leases, stop accepting connections and reading from clients.
    Switch {
        /// This process's end of the transfer socket.
        transfer: OwnedFd,
        /// Channel for the reply: the state that the successor needs in order to take over.
        reply: oneshot::Sender<SwitchState>,
    },
    /// The successor now serves clients. Pass on connections, and handle only frames about jobs that were already
    /// accepted.
    Release,
    /// The successor has failed. Serve clients again, using the given listener for the jobs socket.
    TakeBack(Option<std::os::unix::net::UnixListener>),
    /// The upgrade can no longer fail. Stop idle workers now, and shut down once the last job has ended.
    Leave,
    /// Apply the changes that operators made in the predecessor.
    Restore {
        bulkheads: Vec<BulkheadState>,
        tenants: Vec<TenantState>,
        /// Channel for the reply: an error if a change cannot be applied.
        reply: oneshot::Sender<Result<(), String>>,
    },
    /// Take over from the predecessor.
    TakeOver {
        held: Vec<Held>,
        quarantined: Vec<Quarantined>,
        switch: Switch,
        /// This process's end of the transfer socket.
        transfer: OwnedFd,
        /// Permissions of each token. The data plane needs them to take over the connections of HTTP clients.
        tokens: Vec<TokenGrant>,
        reply: oneshot::Sender<()>,
    },
    /// The predecessor and all of its workers have exited.
    PredecessorEnded,
}

/// State of the bulkheads and tenants, and a duplicate of the jobs socket's listener. The `file` fields contain the
/// limits in effect until the control plane replaces them with the limits in the configuration file.
pub type Prepared = (Vec<BulkheadState>, Vec<TenantState>, Option<std::os::unix::net::UnixListener>);

/// State of the data plane when it stops serving clients.
#[derive(Debug, Default)]
pub struct SwitchState {
    /// Number of permits that each compartment still needs for its remaining jobs.
    pub held: Vec<Held>,
    /// Payloads in quarantine.
    pub quarantined: Vec<Quarantined>,
    /// Lower bounds for the numbers that the successor assigns. The control plane adds its last event number to
    /// `events_after`.
    pub switch: Switch,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_unchanged_after_encoding_and_decoding() {
        let compartment = CompartmentName { bulkhead: "b".into(), tenant: Some("t".into()) };
        let held = Held { compartment, permits: 3, waiting: 4 };
        let bytes = encode(kind::HELD, &held, b"rest").unwrap();
        let frame = Frame::decode(&bytes).unwrap();
        assert_eq!((frame.kind, frame.payload), (kind::HELD, &b"rest"[..]));
        assert_eq!(frame.message::<Held>().unwrap(), held);
        for length in 0..bytes.len() {
            assert_eq!(Frame::decode(&bytes[..length]).unwrap_err(), FrameError::CutOff);
        }
        let quarantined = Quarantined::new(held.compartment, Digest::from(7 << 90 | 5));
        let bytes = encode(kind::QUARANTINED, &quarantined, &[]).unwrap();
        let decoded: Quarantined = Frame::decode(&bytes).unwrap().message().unwrap();
        assert_eq!(decoded.digest(), Digest::from(7 << 90 | 5));
    }

    #[test]
    fn skips_unknown_message_unless_it_is_critical() {
        let mut bytes = encode(200, &Nothing {}, &[]).unwrap();
        Frame::decode(&bytes).unwrap().skip().unwrap();
        bytes[5] = bulkhead_shared::frame::FLAG_CRITICAL;
        assert_eq!(Frame::decode(&bytes).unwrap().skip(), Err(FrameError::Unknown(200)));
    }
}

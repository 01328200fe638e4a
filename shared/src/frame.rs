//! Encodes and decodes the 16-byte header of every frame, and lists the kinds of frames. `codec` encodes the metadata,
//! and `connection` reads and writes frames.
//!
//! ```text
//! offset  0       4      5       6               8                 16
//!         length  kind   flags   metadata length  number            metadata, payload
//!         u32     u8     u8      u16              u64               (little-endian throughout)
//! ```
//!
//! `length` is the number of bytes after the header: metadata, then payload. `number` identifies the request
//! (between client and supervisor) or the job (between supervisor and worker).

/// Size of a header in bytes.
pub const HEADER_BYTES: usize = 16;

/// Magic number that identifies the protocol. Sent as the frame number of [`kind::HELLO`].
pub const MAGIC: u64 = u64::from_le_bytes(*b"BULKHEAD");

/// Flag of a frame that the receiver must understand. A receiver that does not know the kind of frame must
/// close the connection. Without this flag, the receiver skips frames of unknown kinds.
pub const FLAG_CRITICAL: u8 = 1;

/// Kinds of frames. The meaning of a number never changes; new kinds get new numbers. Earlier versions used
/// the numbers 52 and 65, which must not be assigned again.
#[expect(missing_docs, reason = "each kind is documented on the message type of the same name")]
pub mod kind {
    // Kinds that are used in both protocols, for the first frames of a connection.
    pub const HELLO: u8 = 1;
    pub const CLIENT_WELCOME: u8 = 2;
    pub const REFUSED: u8 = 3;
    pub const WORKER_WELCOME: u8 = 4;

    // Client to supervisor.
    pub const SUBMIT: u8 = 16;
    pub const CANCEL: u8 = 17;
    pub const LEASE: u8 = 18;
    pub const LEASE_TAKEN: u8 = 19;
    pub const LEASE_RETURNED: u8 = 20;

    // Supervisor to client.
    pub const OUTCOME: u8 = 32;
    pub const PROGRESS: u8 = 33;
    pub const LEASED: u8 = 34;
    pub const LEASE_ENDED: u8 = 35;
    pub const LEASE_REFUSED: u8 = 36;
    /// The supervisor accepts no further requests on this connection. The frame's number is the count of SUBMIT frames
    /// that the supervisor has processed.
    pub const GOAWAY: u8 = 37;

    // Supervisor to worker.
    pub const JOB: u8 = 48;
    pub const CANCEL_JOB: u8 = 49;
    pub const DRAIN: u8 = 50;
    pub const LIMITS: u8 = 51;
    pub const JOURNAL: u8 = 53;
    pub const FILES: u8 = 54;
    pub const FILES_ENDED: u8 = 55;

    // Worker to supervisor.
    pub const READY: u8 = 64;
    pub const RESULT: u8 = 66;
    pub const FAILED: u8 = 67;
    pub const PROGRESSED: u8 = 68;
    pub const STATUS: u8 = 69;
    pub const EXTEND_START: u8 = 70;
    pub const HEARTBEAT: u8 = 71;
    pub const STOPPING: u8 = 72;
    pub const PROGRAM_CRASHED: u8 = 73;
    pub const RETURNED: u8 = 74;
    pub const FILES_TAKEN: u8 = 75;
}

/// A decoded header. The fields must not be trusted until [`Header::check`] has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of bytes after the header.
    pub length: u32,
    /// Kind of the frame. Either a value from [`kind`] or a value from a later protocol version.
    pub kind: u8,
    /// Bit mask of flags, such as [`FLAG_CRITICAL`].
    pub flags: u8,
    /// Size of the metadata in bytes. [`Header::length`] includes this size.
    pub metadata_length: u16,
    /// Number that identifies the request or job.
    pub number: u64,
}

/// Framing error. The connection cannot continue, because the start of the next frame is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The metadata would be longer than the frame.
    #[error(
        "a frame announces {metadata_length} bytes of metadata, but a total length of only {length} bytes"
    )]
    MetadataBeyondFrame {
        /// Announced size of the metadata.
        metadata_length: u16,
        /// Announced length of the frame.
        length: u32,
    },
}

impl Header {
    /// Encodes the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4] = self.kind;
        bytes[5] = self.flags;
        bytes[6..8].copy_from_slice(&self.metadata_length.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Decodes a header without checking it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [l0, l1, l2, l3, kind, flags, m0, m1, number @ ..] = *bytes;
        Self {
            length: u32::from_le_bytes([l0, l1, l2, l3]),
            kind,
            flags,
            metadata_length: u16::from_le_bytes([m0, m1]),
            number: u64::from_le_bytes(number),
        }
    }

    /// Returns an error if the metadata would be longer than the frame.
    pub fn check(self) -> Result<Self, FrameError> {
        if u32::from(self.metadata_length) > self.length {
            return Err(FrameError::MetadataBeyondFrame {
                metadata_length: self.metadata_length,
                length: self.length,
            });
        }
        Ok(self)
    }

    /// Returns the size of the payload in bytes.
    pub fn payload_length(self) -> usize {
        (self.length as usize).saturating_sub(usize::from(self.metadata_length))
    }

    /// Returns true if a receiver that does not know this kind of frame must close the connection.
    pub fn is_critical(self) -> bool {
        self.flags & FLAG_CRITICAL != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_header_has_fixed_layout() {
        let header =
            Header { length: 0x0102, kind: kind::SUBMIT, flags: 1, metadata_length: 0x30, number: 0x0a0b };
        let bytes = header.encode();
        assert_eq!(bytes, [0x02, 0x01, 0, 0, 16, 1, 0x30, 0, 0x0b, 0x0a, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Header::decode(&bytes), header);
    }

    #[test]
    fn header_check_rejects_metadata_longer_than_frame() {
        let header = Header { length: 4, kind: 1, flags: 0, metadata_length: 5, number: 0 };
        assert!(header.check().is_err());
    }
}

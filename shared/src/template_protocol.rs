//! The protocol between the keeper and a *template*: a process that was initialised once and forks the workers of its
//! bulkhead. Messages are whole packets on a `SOCK_SEQPACKET` socket. The first byte is the kind of message; numbers
//! are little-endian. The keeper's `process::templates` and the worker libraries send and receive them.

/// Environment variable that makes a process a template instead of a worker. In a template, the link descriptor is a
/// socket that is connected to the keeper.
pub const TEMPLATE_VARIABLE: &str = "BULKHEAD_TEMPLATE";

/// Number of descriptors sent with [`TemplateOrder::Fork`]: link, standard output and standard error of the new
/// worker.
pub const FORK_DESCRIPTORS: usize = 3;

/// Maximum size of a message's text, in bytes.
pub const TEXT_BYTES_MAX: usize = 512;

/// Maximum size of a message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 1 + TEXT_BYTES_MAX;

/// An order from the keeper to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateOrder {
    /// Orders the template to fork a worker. The fields determine the name of the worker's temporary folder; see
    /// [`folder_name`].
    Fork {
        /// Spawn number of the worker.
        worker: u64,
        /// Random part of the folder's name, which makes the name unpredictable.
        secret: u128,
    },
    /// Orders the template to remove a worker's temporary folder. Sent after all processes of the worker have exited.
    Remove {
        /// Spawn number of the worker.
        worker: u64,
        /// Random part of the folder's name.
        secret: u128,
    },
}

impl TemplateOrder {
    /// Encodes the message.
    pub fn encode(self) -> [u8; 25] {
        let (kind, worker, secret) = match self {
            Self::Fork { worker, secret } => (b'F', worker, secret),
            Self::Remove { worker, secret } => (b'R', worker, secret),
        };
        let mut bytes = [kind; 25];
        bytes[1..9].copy_from_slice(&worker.to_le_bytes());
        bytes[9..].copy_from_slice(&secret.to_le_bytes());
        bytes
    }

    /// Decodes a message. Returns `None` if the bytes are invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let (worker, rest) = rest.split_first_chunk()?;
        let (worker, secret) = (u64::from_le_bytes(*worker), u128::from_le_bytes(rest.try_into().ok()?));
        match kind {
            b'F' => Some(Self::Fork { worker, secret }),
            b'R' => Some(Self::Remove { worker, secret }),
            _ => None,
        }
    }
}

/// Returns the name of a forked worker's temporary folder, which is a subfolder of the template's temporary
/// folder.
pub fn folder_name(worker: u64, secret: u128) -> String {
    format!("{worker}-{secret:032x}")
}

/// Extracts the worker's spawn number from the name of a temporary folder. Returns `None` if the name does not have
/// the expected format.
pub fn parse_folder_name(name: &str) -> Option<u64> {
    name.split_once('-')?.0.parse().ok()
}

/// A message to the keeper from a template or a forked worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateMessage<'a> {
    /// The template is initialised and can fork.
    Ready,
    /// Human-readable description of the template's current activity.
    Status(&'a str),
    /// The template failed to start for the given reason and is about to exit.
    StartFailed(&'a str),
    /// The template needs more time to start. Contains the new time limit, in milliseconds from now.
    Extend(u32),
    /// The template has forked a worker.
    Forked {
        /// Spawn number of the worker.
        worker: u64,
        /// PID of the worker, in the template's PID namespace.
        pid: u32,
    },
    /// The fork failed, or the forked process failed to become a worker.
    ForkFailed {
        /// Spawn number of the worker.
        worker: u64,
        /// Error number, as in `errno`.
        errno: i32,
        /// Step that failed. Empty if the fork itself failed.
        step: &'a str,
    },
    /// A forked worker has started. The worker sends this message itself, and the kernel reports the worker's process
    /// ID to the keeper.
    Started {
        /// Spawn number of the worker.
        worker: u64,
    },
}

impl<'a> TemplateMessage<'a> {
    /// Writes the message to `out` and returns its length. Strings in the message must not exceed [`TEXT_BYTES_MAX`].
    pub fn encode(&self, out: &mut [u8; MESSAGE_BYTES_MAX]) -> usize {
        let mut length = 0;
        let mut put = |bytes: &[u8]| {
            let bytes = &bytes[..bytes.len().min(MESSAGE_BYTES_MAX - length)];
            out[length..length + bytes.len()].copy_from_slice(bytes);
            length += bytes.len();
        };
        match *self {
            Self::Ready => put(b"R"),
            Self::Status(text) => [b"S", text.as_bytes()].into_iter().for_each(put),
            Self::StartFailed(text) => [b"E", text.as_bytes()].into_iter().for_each(put),
            Self::Extend(more_ms) => {
                put(b"M");
                put(&more_ms.to_le_bytes());
            }
            Self::Forked { worker, pid } => {
                put(b"D");
                put(&worker.to_le_bytes());
                put(&pid.to_le_bytes());
            }
            Self::ForkFailed { worker, errno, step } => {
                put(b"X");
                put(&worker.to_le_bytes());
                put(&errno.to_le_bytes());
                put(step.as_bytes());
            }
            Self::Started { worker } => {
                put(b"B");
                put(&worker.to_le_bytes());
            }
        }
        length
    }

    /// Decodes a message. Returns `None` if the bytes are invalid.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let text = || std::str::from_utf8(rest).ok();
        let pair = || {
            let (worker, rest) = rest.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*worker), <[u8; 4]>::try_from(rest).ok()?))
        };
        Some(match kind {
            b'R' if rest.is_empty() => Self::Ready,
            b'S' => Self::Status(text()?),
            b'E' => Self::StartFailed(text()?),
            b'M' => Self::Extend(u32::from_le_bytes(rest.try_into().ok()?)),
            b'D' => pair().map(|(worker, pid)| Self::Forked { worker, pid: u32::from_le_bytes(pid) })?,
            b'X' => {
                let (worker, rest) = rest.split_first_chunk()?;
                let (errno, step) = rest.split_first_chunk()?;
                let (worker, errno) = (u64::from_le_bytes(*worker), i32::from_le_bytes(*errno));
                Self::ForkFailed { worker, errno, step: std::str::from_utf8(step).ok()? }
            }
            b'B' => Self::Started { worker: u64::from_le_bytes(rest.try_into().ok()?) },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_messages_survive_encoding() {
        let words = [
            TemplateMessage::Ready,
            TemplateMessage::Status("loads"),
            TemplateMessage::StartFailed("threads"),
            TemplateMessage::Extend(7),
            TemplateMessage::Forked { worker: 8, pid: 9 },
            TemplateMessage::ForkFailed { worker: 8, errno: 11, step: "" },
            TemplateMessage::ForkFailed { worker: 8, errno: 11, step: "landlock" },
            TemplateMessage::Started { worker: u64::MAX },
        ];
        for word in words {
            let mut bytes = [0; MESSAGE_BYTES_MAX];
            let length = word.encode(&mut bytes);
            assert_eq!(TemplateMessage::decode(&bytes[..length]), Some(word));
        }
        for garbage in [&b""[..], b"R1", b"B123", b"D12345678123", b"S\xff", b"?"] {
            assert_eq!(TemplateMessage::decode(garbage), None, "{garbage:?}");
        }
        let orders = [
            TemplateOrder::Fork { worker: 3, secret: u128::MAX },
            TemplateOrder::Remove { worker: 3, secret: 1 },
        ];
        for order in orders {
            assert_eq!(TemplateOrder::decode(&order.encode()), Some(order));
        }
        assert_eq!(TemplateOrder::decode(b"F123"), None);
        assert_eq!(TemplateOrder::decode(&[b'G'; 25]), None);
        assert_eq!(parse_folder_name(&folder_name(17, 5)), Some(17));
        assert_eq!(parse_folder_name("x"), None);
    }
}

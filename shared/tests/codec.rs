//! Compares the serializer with a hand-written encoder. The encoder follows only the rules in `docs/protocol.md`, which
//! shows that this document is sufficient for implementing the protocol in other languages.

use bulkhead_shared::client_protocol::{ClientWelcome, Hello, OutcomeMessage, Progress, Refused, Submit};
use bulkhead_shared::codec;
use bulkhead_shared::worker_protocol::{
    Empty, Extend, Failed, Job, Limits, ProgramCrashed, Status, WorkerWelcome,
};

/// A value that can be encoded according to the rules in `docs/protocol.md`.
trait ByHand {
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl ByHand for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 i32 f32 }

impl ByHand for &str {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u64).put(out);
        out.extend_from_slice(self.as_bytes());
    }
}

/// Encodes the extensions that follow a message.
fn put_extensions(extensions: &[(u16, &[u8])], out: &mut Vec<u8>) {
    (extensions.len() as u64).put(out);
    for (tag, bytes) in extensions {
        tag.put(out);
        (bytes.len() as u64).put(out);
        out.extend_from_slice(bytes);
    }
}

/// Decodes a message. The type of the first argument determines the type of the message.
fn decode_like<'a, M: codec::Message<'a>>(
    _: &M,
    bytes: &'a [u8],
    known: &[u16],
) -> (M, codec::Extensions<'a>) {
    codec::decode(bytes, known).unwrap()
}

/// Encodes a message both with the serializer and by hand, checks that the bytes are equal, and decodes the bytes.
macro_rules! same {
    ($extensions:expr, $message:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let message = $message { $($field: $value),* };
        let (mut coded, mut by_hand) = (Vec::new(), Vec::new());
        codec::encode(&message, $extensions, &mut coded).unwrap();
        $(message.$field.put(&mut by_hand);)*
        put_extensions($extensions, &mut by_hand);
        assert_eq!(coded, by_hand, "{message:?}");
        let tags: Vec<u16> = $extensions.iter().map(|(tag, _)| *tag).collect();
        let (back, extensions) = decode_like(&message, &by_hand, &tags);
        assert_eq!(back, message);
        for (tag, bytes) in $extensions {
            assert_eq!(extensions.get(*tag), Some(*bytes));
        }
    }};
}

#[test]
fn hand_written_encoder_writes_same_bytes_as_codec() {
    let long = "ä".repeat(150);
    let extensions: [&[(u16, &[u8])]; 3] = [
        &[],
        &[(codec::tag::JOB, &[7; 8])],
        &[(codec::tag::TRACEPARENT, b"00-1"), (codec::tag::SEAL, &[0; 300])],
    ];
    for (text, numbers) in [("", 0u64), ("é\0x", 0x0123_4567_89ab_cdef), (&long, u64::MAX)] {
        let (byte, short, word, signed) = (numbers as u8, numbers as u16, numbers as u32, numbers as i32);
        for extensions in extensions {
            same!(
                extensions,
                Hello {
                    version_min: short,
                    version_max: short,
                    role: byte,
                    frame_bytes_max: word,
                    capabilities: numbers,
                    name: text,
                    version: text,
                }
            );
            same!(
                extensions,
                ClientWelcome {
                    version: short,
                    frame_bytes_max: word,
                    capabilities: numbers,
                    server_version: text,
                }
            );
            same!(
                extensions,
                WorkerWelcome {
                    version: short,
                    frame_bytes_max: word,
                    capabilities: numbers,
                    slot: word,
                    generation: word,
                    max_in_flight: word,
                    heartbeat_ms: word,
                    result_bytes_max: numbers,
                    bulkhead: text,
                }
            );
            same!(extensions, Refused { reason: byte, message: text });
            same!(
                extensions,
                Submit {
                    bulkhead: text,
                    operation: text,
                    tenant: text,
                    deadline_us: numbers,
                    priority: byte,
                    idempotent: byte,
                    cost: word,
                }
            );
            same!(extensions, Progress { fraction: f32::from(short), text: text });
            same!(
                extensions,
                OutcomeMessage {
                    outcome: byte,
                    reason: byte,
                    executed: byte,
                    retryable: byte,
                    fault: byte,
                    attempts: word,
                    queued_us: numbers,
                    ran_us: numbers,
                    deadline_us: numbers,
                    worker_pid: word,
                    has_retry_after: byte,
                    retry_after_us: numbers,
                    has_status: byte,
                    status: signed,
                    bulkhead: text,
                    code: text,
                    message: text,
                }
            );
            same!(extensions, Job { operation: text, tenant: text, remaining_us: numbers });
            same!(extensions, Limits { max_in_flight: word });
            same!(extensions, Failed { code: text, message: text, retryable: byte, fault: byte });
            same!(extensions, Status { text: text });
            same!(extensions, Extend { more_ms: word });
            same!(extensions, ProgramCrashed { signal: signed, message: text });
            let (mut coded, mut by_hand) = (Vec::new(), Vec::new());
            codec::encode(&Empty, extensions, &mut coded).unwrap();
            put_extensions(extensions, &mut by_hand);
            assert_eq!(coded, by_hand);
        }
    }
}

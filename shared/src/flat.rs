//! Implements a fast encoding of messages that consist of integers and strings, for messages that are sent with every
//! job. The `flat!` macro generates the code for each message type. The output is identical to that of bincode's
//! derived traits, which write and check each field separately. `codec` calls the encoding and adds the extensions.

use bincode::de::BorrowDecoder;
use bincode::de::read::BorrowReader;
use bincode::enc::Encoder;
use bincode::enc::write::Writer;
use bincode::error::{DecodeError, EncodeError};

/// Implements [`Encode`](bincode::Encode) and [`BorrowDecode`](bincode::BorrowDecode) for a structure that consists of
/// strings, followed by integers, followed by more strings. The three lists name the fields in order of declaration.
macro_rules! flat {
    ($name:ident: [$($before:ident),*], [$($field:ident: $type:ty),*], [$($after:ident),*]) => {
        impl ::bincode::Encode for $name<'_> {
            #[inline]
            fn encode<E: ::bincode::enc::Encoder>(
                &self,
                encoder: &mut E,
            ) -> Result<(), ::bincode::error::EncodeError> {
                $($crate::flat::put_text(encoder, self.$before)?;)*
                const BYTES: usize = 0 $(+ size_of::<$type>())*;
                let (mut integers, mut at) = ([0; BYTES], 0);
                $(
                    integers[at..at + size_of::<$type>()].copy_from_slice(&self.$field.to_le_bytes());
                    at += size_of::<$type>();
                )*
                debug_assert_eq!(at, BYTES);
                ::bincode::enc::write::Writer::write(encoder.writer(), &integers)?;
                $($crate::flat::put_text(encoder, self.$after)?;)*
                Ok(())
            }
        }

        impl<'de, C> ::bincode::BorrowDecode<'de, C> for $name<'de> {
            #[inline]
            fn borrow_decode<D: ::bincode::de::BorrowDecoder<'de, Context = C>>(
                decoder: &mut D,
            ) -> Result<Self, ::bincode::error::DecodeError> {
                $(let $before = $crate::flat::take_text(decoder)?;)*
                const BYTES: usize = 0 $(+ size_of::<$type>())*;
                let (integers, mut at) = ($crate::flat::take::<BYTES, D>(decoder)?, 0);
                $(
                    let mut bytes = [0; size_of::<$type>()];
                    bytes.copy_from_slice(&integers[at..at + size_of::<$type>()]);
                    let $field = <$type>::from_le_bytes(bytes);
                    at += size_of::<$type>();
                )*
                debug_assert_eq!(at, BYTES);
                $(let $after = $crate::flat::take_text(decoder)?;)*
                Ok(Self { $($before,)* $($field,)* $($after,)* })
            }
        }
    };
}

pub(crate) use flat;

#[inline]
pub(crate) fn put_text(encoder: &mut impl Encoder, text: &str) -> Result<(), EncodeError> {
    encoder.writer().write(&(text.len() as u64).to_le_bytes())?;
    if text.is_empty() { Ok(()) } else { encoder.writer().write(text.as_bytes()) }
}

/// Reads the next `BYTES` bytes of the input, and counts these bytes towards the decoder's byte limit.
#[inline]
pub(crate) fn take<'de, const BYTES: usize, D: BorrowDecoder<'de>>(
    decoder: &mut D,
) -> Result<&'de [u8; BYTES], DecodeError> {
    let bytes = take_slice(decoder, BYTES)?;
    bytes.first_chunk().ok_or(DecodeError::UnexpectedEnd { additional: BYTES })
}

#[inline]
pub(crate) fn take_text<'de, D: BorrowDecoder<'de>>(decoder: &mut D) -> Result<&'de str, DecodeError> {
    let length = u64::from_le_bytes(*take::<8, D>(decoder)?);
    if length == 0 {
        return Ok("");
    }
    let length = usize::try_from(length).map_err(|_| DecodeError::OutsideUsizeRange(length))?;
    std::str::from_utf8(take_slice(decoder, length)?).map_err(|inner| DecodeError::Utf8 { inner })
}

#[inline]
fn take_slice<'de, D: BorrowDecoder<'de>>(decoder: &mut D, length: usize) -> Result<&'de [u8], DecodeError> {
    decoder.claim_bytes_read(length)?;
    decoder.borrow_reader().take_bytes(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::{client_protocol, codec, worker_protocol};

    /// Copies of the structures that use `flat`. The copies use bincode's derived traits, so that the tests can compare
    /// both encodings.
    mod derived {
        use bincode::{BorrowDecode, Encode};

        #[derive(Debug, Encode, BorrowDecode)]
        pub(super) struct Submit<'a> {
            pub(super) bulkhead: &'a str,
            pub(super) operation: &'a str,
            pub(super) tenant: &'a str,
            pub(super) deadline_us: u64,
            pub(super) priority: u8,
            pub(super) idempotent: u8,
            pub(super) cost: u32,
        }

        #[derive(Debug, Encode, BorrowDecode)]
        pub(super) struct OutcomeMessage<'a> {
            pub(super) outcome: u8,
            pub(super) reason: u8,
            pub(super) executed: u8,
            pub(super) retryable: u8,
            pub(super) fault: u8,
            pub(super) attempts: u32,
            pub(super) queued_us: u64,
            pub(super) ran_us: u64,
            pub(super) deadline_us: u64,
            pub(super) worker_pid: u32,
            pub(super) has_retry_after: u8,
            pub(super) retry_after_us: u64,
            pub(super) has_status: u8,
            pub(super) status: i32,
            pub(super) bulkhead: &'a str,
            pub(super) code: &'a str,
            pub(super) message: &'a str,
        }

        #[derive(Debug, Encode, BorrowDecode)]
        pub(super) struct Job<'a> {
            pub(super) operation: &'a str,
            pub(super) tenant: &'a str,
            pub(super) remaining_us: u64,
        }

        #[derive(Debug, Encode, BorrowDecode)]
        pub(super) struct Failed<'a> {
            pub(super) code: &'a str,
            pub(super) message: &'a str,
            pub(super) retryable: u8,
            pub(super) fault: u8,
        }
    }

    /// Checks that decoding and encoding an `F`, which uses `flat`, returns the original bytes. Also checks that `F`
    /// and `D`, which uses the derived traits, agree on every prefix of the bytes and on a corrupted copy.
    fn compare<'m, F, D>(bytes: &'m [u8], changed: &'m [u8])
    where
        F: codec::Message<'m> + std::fmt::Debug,
        D: codec::Message<'m> + std::fmt::Debug,
    {
        let (flat, _) = codec::decode::<F>(bytes, &[]).unwrap();
        let mut written = Vec::new();
        codec::encode(&flat, &[], &mut written).unwrap();
        assert_eq!(written, bytes);
        for given in (0..=bytes.len()).map(|end| &bytes[..end]).chain([changed]) {
            let (flat, derived) = (codec::decode::<F>(given, &[]), codec::decode::<D>(given, &[]));
            match (flat, derived) {
                (Ok((flat, _)), Ok((derived, _))) => assert_eq!(format!("{flat:?}"), format!("{derived:?}")),
                (flat, derived) => assert!(flat.is_err() && derived.is_err(), "{flat:?} {derived:?}"),
            }
        }
    }

    fn written<M: bincode::Encode>(message: &M, (at, to): (usize, u8)) -> (Vec<u8>, Vec<u8>) {
        let mut bytes = Vec::new();
        codec::encode(message, &[], &mut bytes).unwrap();
        let mut changed = bytes.clone();
        let at = at % bytes.len();
        changed[at] = to;
        (bytes, changed)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn flat_encoder_writes_same_bytes_as_derived_traits(
            texts in ("\\PC{0,20}", "[a-z]{0,200}", "\\PC{0,8}"),
            long in any::<[u64; 4]>(),
            short in any::<[u32; 2]>(),
            bytes in any::<[u8; 7]>(),
            status: i32,
            change: (usize, u8),
        ) {
            let (a, b, c) = (texts.0.as_str(), texts.1.as_str(), texts.2.as_str());
            let (deadline_us, [x, y, z, ..]) = (long[0], bytes);
            let submit = derived::Submit {
                bulkhead: a, operation: b, tenant: c, deadline_us, priority: x, idempotent: y, cost: short[0],
            };
            let (whole, changed) = written(&submit, change);
            compare::<client_protocol::Submit<'_>, derived::Submit<'_>>(&whole, &changed);

            let outcome = derived::OutcomeMessage {
                outcome: x, reason: y, executed: z, retryable: bytes[3], fault: bytes[4], attempts: short[0],
                queued_us: long[1], ran_us: long[2], deadline_us, worker_pid: short[1],
                has_retry_after: bytes[5], retry_after_us: long[3], has_status: bytes[6], status,
                bulkhead: c, code: a, message: b,
            };
            let (whole, changed) = written(&outcome, change);
            compare::<client_protocol::OutcomeMessage<'_>, derived::OutcomeMessage<'_>>(&whole, &changed);

            let job = derived::Job { operation: a, tenant: c, remaining_us: long[1] };
            let (whole, changed) = written(&job, change);
            compare::<worker_protocol::Job<'_>, derived::Job<'_>>(&whole, &changed);

            let failed = derived::Failed { code: c, message: b, retryable: x, fault: y };
            let (whole, changed) = written(&failed, change);
            compare::<worker_protocol::Failed<'_>, derived::Failed<'_>>(&whole, &changed);
        }
    }
}

//! The crash record of a worker: registers, memory mappings and stack of a thread that received a fatal
//! signal. The worker's signal handler writes the record into the part of the [journal](crate::journal)'s
//! memory file that follows the journal. The supervisor reads it after the worker has exited.
//!
//! ```text
//! offset  0         512                 98304
//!         header    /proc/self/maps     stack, from the lowest address
//! ```
//!
//! The header is written last, so that a record with a header is complete. A reader must not trust any part of a
//! record.

use crate::journal::JOURNAL_BYTES;

/// Size of a crash record in bytes.
pub const RECORD_BYTES: usize = 256 * 1024;

/// Offset of the crash record in the memory file.
pub const RECORD_OFFSET: usize = JOURNAL_BYTES;

/// Size in bytes of a memory file that has a journal and a crash record.
pub const FILE_BYTES: usize = RECORD_OFFSET + RECORD_BYTES;

/// Size of an encoded [`Header`] in bytes.
pub const HEADER_BYTES: usize = MAPS_OFFSET;

/// Offset of the memory mappings in the record.
pub const MAPS_OFFSET: usize = 512;

/// Maximum size of the text of the memory mappings, in bytes. A longer text is truncated.
pub const MAPS_BYTES_MAX: usize = STACK_OFFSET - MAPS_OFFSET;

/// Offset of the stack in the record.
pub const STACK_OFFSET: usize = 96 * 1024;

/// Maximum size of the recorded part of the stack, in bytes.
pub const STACK_BYTES_MAX: usize = RECORD_BYTES - STACK_OFFSET;

/// Maximum number of registers.
pub const REGISTERS_MAX: usize = 33;

/// Signals for which a worker writes a crash record. Each is a number of Linux on x86-64 and 64-bit ARM: SIGILL, SIGTRAP,
/// SIGABRT, SIGBUS, SIGFPE, SIGSEGV.
pub const RECORDED_SIGNALS: [i32; 6] = [4, 5, 6, 7, 8, 11];

/// First bytes of a complete record. Contains the version of the format.
const MAGIC: [u8; 8] = *b"crashed1";

/// The header of a crash record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Architecture of the process, as in the field `e_machine` of an ELF file.
    pub machine: u32,
    /// Number of the signal.
    pub signal: i32,
    /// Cause of the signal (`si_code`).
    pub code: i32,
    /// Id of the thread, as seen by the worker.
    pub thread: u32,
    /// Address that the signal is about (`si_addr`).
    pub address: u64,
    /// Size of the text of the memory mappings, in bytes.
    pub maps_bytes: u32,
    /// Size of the recorded part of the stack, in bytes. Pages that could not be read are zero.
    pub stack_bytes: u32,
    /// Lowest address of the recorded part of the stack.
    pub stack_start: u64,
    /// Registers in the order of the architecture: for x86-64, `r8` to `r15`, `rdi`, `rsi`, `rbp`, `rbx`, `rdx`,
    /// `rax`, `rcx`, `rsp`, `rip`; for 64-bit ARM, `x0` to `x30`, `sp`, `pc`.
    pub registers: [u64; REGISTERS_MAX],
}

impl Header {
    /// Writes the header. Allocates no memory, so that a signal handler can call this function.
    pub fn encode(&self, bytes: &mut [u8; HEADER_BYTES]) {
        bytes.fill(0);
        let mut at = 0;
        let mut put = |value: &[u8]| {
            for byte in value {
                bytes[at] = *byte;
                at += 1;
            }
        };
        put(&MAGIC);
        put(&self.machine.to_le_bytes());
        put(&self.signal.to_le_bytes());
        put(&self.code.to_le_bytes());
        put(&self.thread.to_le_bytes());
        put(&self.address.to_le_bytes());
        put(&self.maps_bytes.to_le_bytes());
        put(&self.stack_bytes.to_le_bytes());
        put(&self.stack_start.to_le_bytes());
        for register in &self.registers {
            put(&register.to_le_bytes());
        }
    }

    /// Reads a header. Returns `None` if the bytes are not a header, or if a size is above its maximum.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let half = |at: usize| bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        let header = Self {
            machine: half(8),
            signal: half(12).cast_signed(),
            code: half(16).cast_signed(),
            thread: half(20),
            address: word(24),
            maps_bytes: half(32),
            stack_bytes: half(36),
            stack_start: word(40),
            registers: std::array::from_fn(|index| word(48 + 8 * index)),
        };
        let is_valid = bytes.starts_with(&MAGIC)
            && header.maps_bytes as usize <= MAPS_BYTES_MAX
            && header.stack_bytes as usize <= STACK_BYTES_MAX;
        is_valid.then_some(header)
    }
}

const _: () = assert!(48 + 8 * REGISTERS_MAX <= HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_survives_encoding() {
        let header = Header {
            machine: 62,
            signal: 11,
            code: -6,
            thread: 7,
            address: u64::MAX,
            maps_bytes: MAPS_BYTES_MAX as u32,
            stack_bytes: STACK_BYTES_MAX as u32,
            stack_start: 0x7fff_0000_0000,
            registers: std::array::from_fn(|index| index as u64 * 3),
        };
        let mut bytes = [0xff; HEADER_BYTES];
        header.encode(&mut bytes);
        assert_eq!(Header::decode(&bytes), Some(header));
        assert_eq!(Header::decode(&[0; HEADER_BYTES]), None);
        for too_large in [
            Header { maps_bytes: MAPS_BYTES_MAX as u32 + 1, ..header },
            Header { stack_bytes: u32::MAX, ..header },
        ] {
            too_large.encode(&mut bytes);
            assert_eq!(Header::decode(&bytes), None);
        }
    }
}

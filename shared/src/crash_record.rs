//! The crash record of a worker: registers, memory mappings and stack of a thread that received a fatal
//! signal. The worker's signal handler writes the record into the part of the [journal](crate::journal)'s
//! memory file that follows the journal. The supervisor reads it after the worker has exited.
//!
//! ```text
//! offset  0         512                 98304
//!         header    /proc/self/maps     stack, from the lowest address
//! ```
//!
//! The header is written last, so that a record with a header is complete.
//!
//! The keeper writes [`Records`] in the same format for a process that has run for too long. A reader must not trust
//! any part of a record.

use crate::journal::JOURNAL_BYTES;

/// Size of a crash record in bytes.
pub const RECORD_BYTES: usize = 256 * 1024;

/// Offset of the crash record in the memory file.
pub const RECORD_OFFSET: usize = JOURNAL_BYTES;

/// Size, in bytes, of a memory file that contains a journal and a crash record.
pub const FILE_BYTES: usize = RECORD_OFFSET + RECORD_BYTES;

/// Size of an encoded [`Header`] in bytes.
pub const HEADER_BYTES: usize = MAPS_OFFSET;

/// Offset of the memory mappings in the record.
pub const MAPS_OFFSET: usize = 512;

/// Maximum size of the memory mappings as text, in bytes. Longer text is truncated.
pub const MAPS_BYTES_MAX: usize = STACK_OFFSET - MAPS_OFFSET;

/// Offset of the stack in the record.
pub const STACK_OFFSET: usize = 96 * 1024;

/// Maximum size of the recorded part of the stack, in bytes.
pub const STACK_BYTES_MAX: usize = RECORD_BYTES - STACK_OFFSET;

/// Maximum number of registers.
pub const REGISTERS_MAX: usize = 33;

/// Signals that make a worker write a crash record: SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE and SIGSEGV, as
/// numbered on x86-64 and 64-bit ARM.
pub const RECORDED_SIGNALS: [i32; 6] = [4, 5, 6, 7, 8, 11];

/// ELF machine type (`e_machine`) of x86-64.
#[cfg(target_arch = "x86_64")]
pub const MACHINE: u32 = 62;
/// ELF machine type (`e_machine`) of 64-bit ARM.
#[cfg(target_arch = "aarch64")]
pub const MACHINE: u32 = 183;

/// Magic bytes at the start of a complete record, including the format version.
const MAGIC: [u8; 8] = *b"crashed1";

/// The header of a crash record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// ELF machine type (`e_machine`) of the process.
    pub machine: u32,
    /// Number of the signal.
    pub signal: i32,
    /// Cause of the signal (`si_code`).
    pub code: i32,
    /// Thread ID in the worker's PID namespace.
    pub thread: u32,
    /// Faulting address or other signal-specific address (`si_addr`).
    pub address: u64,
    /// Size of the memory mappings as text, in bytes.
    pub maps_bytes: u32,
    /// Size of the recorded part of the stack, in bytes. Pages that could not be read are filled with zeros.
    pub stack_bytes: u32,
    /// Lowest address of the recorded part of the stack.
    pub stack_start: u64,
    /// Registers in the order of the architecture: for x86-64, `r8` to `r15`, `rdi`, `rsi`, `rbp`, `rbx`, `rdx`,
    /// `rax`, `rcx`, `rsp`, `rip`; for 64-bit ARM, `x0` to `x30`, `sp`, `pc`.
    pub registers: [u64; REGISTERS_MAX],
    /// PID of the process as seen by the keeper, or 0 if the process itself wrote the record after a signal.
    pub process: u32,
    /// State of the thread, as in `/proc/PID/stat`. 0 if the process itself wrote the record.
    pub state: u8,
    /// Name of the thread, padded with NULs. Empty if the process itself wrote the record.
    pub thread_name: [u8; NAME_BYTES_MAX],
    /// Name of the process, padded with NULs. Empty if the process itself wrote the record.
    pub process_name: [u8; NAME_BYTES_MAX],
    /// Kernel function in which the thread is sleeping, as in `/proc/PID/wchan`.
    pub wait_channel: [u8; WAIT_CHANNEL_BYTES_MAX],
}

/// Size of the field for the name of a thread or process, in bytes.
pub const NAME_BYTES_MAX: usize = 16;

/// Maximum size of a [`Header::wait_channel`] in bytes.
pub const WAIT_CHANNEL_BYTES_MAX: usize = 48;

// Offsets in the header.
const REGISTERS_AT: usize = 48;
const PROCESS_AT: usize = REGISTERS_AT + 8 * REGISTERS_MAX;
const STATE_AT: usize = PROCESS_AT + 4;
const THREAD_NAME_AT: usize = PROCESS_AT + 8;
const PROCESS_NAME_AT: usize = THREAD_NAME_AT + NAME_BYTES_MAX;
const WAIT_CHANNEL_AT: usize = PROCESS_NAME_AT + NAME_BYTES_MAX;

impl Header {
    /// A header in which all fields are zero.
    pub const EMPTY: Self = Self {
        machine: 0,
        signal: 0,
        code: 0,
        thread: 0,
        address: 0,
        maps_bytes: 0,
        stack_bytes: 0,
        stack_start: 0,
        registers: [0; REGISTERS_MAX],
        process: 0,
        state: 0,
        thread_name: [0; NAME_BYTES_MAX],
        process_name: [0; NAME_BYTES_MAX],
        wait_channel: [0; WAIT_CHANNEL_BYTES_MAX],
    };

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
        put(&self.process.to_le_bytes());
        put(&[self.state, 0, 0, 0]);
        put(&self.thread_name);
        put(&self.process_name);
        put(&self.wait_channel);
    }

    /// Decodes a header. Returns `None` if the bytes are not a header, or if a size exceeds its maximum.
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
            registers: std::array::from_fn(|index| word(REGISTERS_AT + 8 * index)),
            process: half(PROCESS_AT),
            state: bytes[STATE_AT],
            thread_name: text(bytes, THREAD_NAME_AT),
            process_name: text(bytes, PROCESS_NAME_AT),
            wait_channel: text(bytes, WAIT_CHANNEL_AT),
        };
        let is_valid = bytes.starts_with(&MAGIC)
            && header.maps_bytes as usize <= MAPS_BYTES_MAX
            && header.stack_bytes as usize <= STACK_BYTES_MAX;
        is_valid.then_some(header)
    }
}

/// Returns the fixed-size text field at offset `at`.
fn text<const BYTES: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; BYTES] {
    bytes[at..].first_chunk().copied().unwrap_or([0; BYTES])
}

const _: () = assert!(WAIT_CHANNEL_AT + WAIT_CHANNEL_BYTES_MAX <= HEADER_BYTES);

/// Maximum total size of [`Records`], in bytes.
pub const RECORDS_BYTES_MAX: usize = 4 << 20;

/// Consecutive records of several threads. Each record consists of a header, the memory mappings and the stack. The
/// mappings are empty if the thread belongs to the same process as the thread of the previous record.
#[derive(Debug)]
pub struct Records<'r> {
    rest: &'r [u8],
}

/// The record of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'r> {
    /// The header.
    pub header: Header,
    /// Text in the format of `/proc/PID/maps`.
    pub maps: &'r [u8],
    /// Recorded part of the stack, starting at the lowest address.
    pub stack: &'r [u8],
}

impl<'r> Records<'r> {
    /// Returns an iterator over the records. The iterator stops before the first invalid record.
    pub fn new(bytes: &'r [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'r> Iterator for Records<'r> {
    type Item = Record<'r>;

    fn next(&mut self) -> Option<Record<'r>> {
        let (header, rest) = self.rest.split_first_chunk::<HEADER_BYTES>()?;
        let header = Header::decode(header)?;
        let (maps, rest) = rest.split_at_checked(header.maps_bytes as usize)?;
        let (stack, rest) = rest.split_at_checked(header.stack_bytes as usize)?;
        self.rest = rest;
        Some(Record { header, maps, stack })
    }
}

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
            process: 8,
            state: b'S',
            thread_name: *b"a thread\0\0\0\0\0\0\0\0",
            process_name: *b"exactly 16 bytes",
            wait_channel: [b'w'; WAIT_CHANNEL_BYTES_MAX],
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

    #[test]
    fn records_end_before_the_first_invalid_record() {
        let record = |thread, maps: &[u8], stack: &[u8]| {
            let (maps_bytes, stack_bytes) = (maps.len() as u32, stack.len() as u32);
            let mut header = [0; HEADER_BYTES];
            Header { thread, maps_bytes, stack_bytes, ..Header::EMPTY }.encode(&mut header);
            [&header[..], maps, stack].concat()
        };
        let bytes = [record(1, b"maps", b"stack"), record(2, b"", b"other")].concat();
        let found = |bytes: &[u8]| -> Vec<(u32, Vec<u8>, Vec<u8>)> {
            Records::new(bytes)
                .map(|record| (record.header.thread, record.maps.to_vec(), record.stack.to_vec()))
                .collect()
        };
        let first = (1, b"maps".to_vec(), b"stack".to_vec());
        let second = (2, Vec::new(), b"other".to_vec());
        assert_eq!(found(&bytes), [first.clone(), second.clone()]);
        assert_eq!(found(&[&bytes[..], &[7; 600]].concat()), [first.clone(), second]);
        assert_eq!(found(&bytes[..bytes.len() - 1]), [first]);
        assert_eq!(found(&bytes[..HEADER_BYTES + 8]), []);
    }
}

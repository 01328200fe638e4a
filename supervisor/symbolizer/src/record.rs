//! Parses records of threads, which a crashed worker or the keeper has written. The records are untrusted. `unwind`
//! computes return addresses from the registers and stacks, and `modules` opens the mapped files.

use std::collections::BTreeMap;

use bulkhead_api::{NATIVE_THREADS_MAX, hex};
use bulkhead_shared::crash_record::{Header, REGISTERS_MAX, Records};

/// Register names, in the order used in records.
#[cfg(target_arch = "x86_64")]
const REGISTER_NAMES: [&str; 17] = [
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx",
    "rsp", "rip",
];
#[cfg(target_arch = "aarch64")]
const REGISTER_NAMES: [&str; REGISTERS_MAX] = [
    "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
    "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29", "x30",
    "sp", "pc",
];

const _: () = assert!(REGISTER_NAMES.len() <= REGISTERS_MAX);

/// Maximum number of executable mappings per process.
const MAPPINGS_MAX: usize = 4096;

/// A recorded process: its executable mappings, and the registers and stack of each recorded thread.
pub(crate) struct Process<'r> {
    pub(crate) mappings: Mappings<'r>,
    pub(crate) threads: Vec<Thread<'r>>,
}

/// Registers and stack of a thread.
pub(crate) struct Thread<'r> {
    pub(crate) header: Header,
    stack: &'r [u8],
}

/// Executable mappings of files, sorted by address, without overlaps.
pub(crate) struct Mappings<'r>(Vec<Mapping<'r>>);

/// An executable mapping of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'r> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Offset of the mapping in the file.
    pub(crate) offset: u64,
    /// Major and minor device numbers.
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    pub(crate) path: &'r str,
}

/// Groups the records by process. A record without mappings belongs to the same process as the previous record.
pub(crate) fn processes(bytes: &[u8]) -> Vec<Process<'_>> {
    let mut processes: Vec<Process<'_>> = Vec::new();
    for record in Records::new(bytes).take(NATIVE_THREADS_MAX) {
        let thread = Thread { header: record.header, stack: record.stack };
        match processes.last_mut() {
            Some(process) if record.maps.is_empty() => process.threads.push(thread),
            _ => processes.push(Process { mappings: Mappings::read(record.maps), threads: vec![thread] }),
        }
    }
    processes
}

impl<'r> Mappings<'r> {
    fn read(maps: &'r [u8]) -> Self {
        let lines = maps.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
        let mut mappings: Vec<Mapping<'_>> = lines.filter_map(mapping).take(MAPPINGS_MAX).collect();
        mappings.sort_by_key(|mapping| mapping.start);
        let mut end = 0;
        mappings.retain(|mapping| {
            let is_separate = mapping.start >= end;
            end = if is_separate { mapping.end } else { end };
            is_separate
        });
        Self(mappings)
    }

    /// Returns the mapping that contains an address.
    pub(crate) fn at(&self, address: u64) -> Option<&Mapping<'r>> {
        let after = self.0.partition_point(|mapping| mapping.start <= address);
        self.0[..after].last().filter(|mapping| address < mapping.end)
    }
}

impl Thread<'_> {
    /// Returns the word on the stack at an address.
    pub(crate) fn stack_word(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address.checked_sub(self.header.stack_start)?).ok()?;
        self.stack.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    pub(crate) fn registers(&self) -> BTreeMap<String, String> {
        let pairs = REGISTER_NAMES.iter().zip(self.header.registers);
        pairs.map(|(name, value)| ((*name).to_owned(), hex(value))).collect()
    }
}

/// Parses a line of `/proc/PID/maps`. Returns `None` if the line does not describe an executable mapping of a file.
fn mapping(line: &str) -> Option<Mapping<'_>> {
    let mut rest = line;
    let mut field = || {
        let (field, after) = rest.trim_start_matches(' ').split_once(' ')?;
        rest = after;
        Some(field)
    };
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = field()?.split_once('-')?;
    let (start, end) = (number(start)?, number(end)?);
    let is_executable = field()?.as_bytes().get(2) == Some(&b'x');
    let offset = number(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = field()?.parse().ok()?;
    let path = rest.trim_start_matches(' ');
    let is_file = path.starts_with('/') && !path.contains('\0') && start < end;
    (is_executable && is_file).then_some(Mapping { start, end, offset, device, inode, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_lines_are_parsed() {
        let line = "7f0000001000-7f0000002000 r-xp 00001000 fd:01 42                         /usr/lib/a b.so";
        let expected = Mapping {
            start: 0x7f00_0000_1000,
            end: 0x7f00_0000_2000,
            offset: 0x1000,
            device: (0xfd, 1),
            inode: 42,
            path: "/usr/lib/a b.so",
        };
        assert_eq!(mapping(line), Some(expected));
        for other in [
            line.replace("r-xp", "r--p"),
            line.replace("/usr", "[usr"),
            line.replace("7f0000002000", "7f0000001000"),
            line[..20].to_owned(),
            String::new(),
        ] {
            assert_eq!(mapping(&other), None, "{other}");
        }
    }
}

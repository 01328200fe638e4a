//! The symbolizer: turns the [crash record](bulkhead_shared::crash_record) of a dead worker into a backtrace.
//!
//! The record, and each file that it names, come from a process that may be hostile. So the symbolizer runs as a
//! separate process, which the keeper confines at least as strictly as the worker. It reads one record from its
//! link, writes one JSON document to the link, and exits. The supervisor limits its time and memory, and checks
//! the document again.
//!
//! - `record`: the parts of a record.
//! - `modules`: the files of programs and libraries, with their unwind tables.
//! - `unwind`: from registers and stack to return addresses.
//! - `names`: from addresses to functions, files and lines.

use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};

use bulkhead_api::{NATIVE_FRAMES_MAX, NativeCrash, NativeFrame, NativeThread, hex};
use bulkhead_shared::crash_record::RECORD_BYTES;
use bulkhead_shared::worker_protocol::LINK_VARIABLE;

mod modules;
mod names;
mod record;
mod unwind;

use modules::Modules;
use record::Record;

/// Reads a record from the link, writes the backtrace to the link, and exits.
pub fn run_as_symbolizer() -> ! {
    let result = inherited_link().and_then(|link| serve(&mut std::fs::File::from(link)));
    if let Err(error) = &result {
        // The supervisor discards standard error. An engineer who starts this program by hand sees the message.
        let _ =
            writeln!(io::stderr(), "the symbolizer failed: {error}; only bulkhead-supervisor can start it");
    }
    std::process::exit(i32::from(result.is_err()))
}

/// Takes ownership of the link, whose number is in the environment.
fn inherited_link() -> io::Result<OwnedFd> {
    let number = std::env::var(LINK_VARIABLE).ok().and_then(|number| number.parse().ok());
    let number: i32 = number.filter(|number| *number > 2).ok_or(io::ErrorKind::NotFound)?;
    // SAFETY: the keeper passes the link under this number, and nothing else in this process uses descriptors
    // before.
    #[expect(unsafe_code, reason = "a descriptor crosses from the parent process")]
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn serve(link: &mut std::fs::File) -> io::Result<()> {
    let mut bytes = Vec::new();
    Read::take(&*link, RECORD_BYTES as u64).read_to_end(&mut bytes)?;
    serde_json::to_writer(&mut *link, &symbolize(&bytes))?;
    link.flush()
}

/// Returns the backtrace of a record, or the reason why it is missing. The result is always within the limits of
/// [`NativeCrash::is_valid`].
pub fn symbolize(bytes: &[u8]) -> NativeCrash {
    let Some(record) = Record::read(bytes) else {
        return NativeCrash::unavailable("the crash record is not valid");
    };
    if record.header.machine != record::MACHINE {
        return NativeCrash::unavailable("the worker has another processor architecture than the supervisor");
    }
    let mut modules = Modules::new(&record);
    let addresses = unwind::unwind(&record, &mut modules);
    let mut frames = names::frames(&modules, &addresses);
    frames.truncate(NATIVE_FRAMES_MAX);
    frames.iter_mut().for_each(NativeFrame::truncate_texts);
    let header = &record.header;
    NativeCrash {
        unavailable: None,
        signal_code: Some(header.code),
        address: Some(hex(header.address)),
        threads: vec![NativeThread { id: header.thread, registers: record.registers(), frames }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_api::NATIVE_BYTES_MAX;
    use bulkhead_shared::crash_record::{HEADER_BYTES, Header, MAPS_OFFSET, STACK_OFFSET};
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;
    use std::path::{Path, PathBuf};

    /// Returns a record with these mappings. The header can contradict itself.
    fn record(registers: Vec<u64>, maps: &[u8], stack: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0; RECORD_BYTES];
        let header = Header {
            machine: record::MACHINE,
            signal: 11,
            code: 1,
            thread: 7,
            address: 0,
            maps_bytes: maps.len() as u32,
            stack_bytes: (8 * stack.len()) as u32,
            stack_start: 0x1000,
            registers: std::array::from_fn(|index| registers[index % registers.len()]),
        };
        header.encode(bytes.first_chunk_mut::<HEADER_BYTES>().unwrap());
        bytes[MAPS_OFFSET..][..maps.len()].copy_from_slice(maps);
        for (place, word) in bytes[STACK_OFFSET..].chunks_exact_mut(8).zip(stack) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Returns a line of `/proc/PID/maps` for a file.
    fn mapping_line(start: u64, end: u64, offset: u64, path: &Path) -> String {
        let found = std::fs::metadata(path).unwrap();
        let device = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        let (major, minor) = device;
        format!(
            "{start:x}-{end:x} r-xp {offset:08x} {major:02x}:{minor:02x} {} {}\n",
            found.ino(),
            path.display()
        )
    }

    /// Returns the path of a small library that this process has mapped, and the offset of its code in the file.
    fn a_library() -> (PathBuf, u64) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let fields = maps.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let code =
            fields.filter(|fields| fields.len() == 6 && fields[1] == "r-xp" && fields[5].contains("/lib"));
        let libraries =
            code.map(|fields| (PathBuf::from(fields[5]), u64::from_str_radix(fields[2], 16).unwrap()));
        libraries.min_by_key(|(path, _)| std::fs::metadata(path).unwrap().len()).unwrap()
    }

    #[test]
    fn invalid_records_have_no_backtrace() {
        let valid = record(vec![0], b"", &[]);
        assert_eq!(symbolize(&valid).threads[0].frames.len(), 1);
        for invalid in [&valid[..RECORD_BYTES - 1], &[][..], &[0; RECORD_BYTES][..]] {
            assert!(symbolize(invalid).unavailable.is_some());
        }
    }

    #[test]
    fn only_the_mapped_regular_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let ((library, code), copy) = (a_library(), folder.path().join("copy"));
        std::fs::copy(&library, &copy).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&copy, &link).unwrap();
        let line = |path: &Path| mapping_line(0x10_0000, 0x20_0000, code, path);
        let build_id = |maps: String| {
            let crash = symbolize(&record(vec![0x11_0000], maps.as_bytes(), &[]));
            let frame = &crash.threads[0].frames[0];
            assert!(frame.module.is_some(), "{frame:?}");
            frame.build_id.clone()
        };
        assert!(build_id(line(&library)).is_some());
        assert!(build_id(line(&copy)).is_some());
        // Another file with the same name, a link, and files that are not regular.
        assert_eq!(build_id(line(&copy).replace(copy.to_str().unwrap(), library.to_str().unwrap())), None);
        assert_eq!(build_id(line(&link)), None);
        let fifo = folder.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
        for other in [&fifo, Path::new("/dev/zero"), folder.path()] {
            assert_eq!(build_id(line(other)), None);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        /// Registers, stack and mappings are random, and the files are libraries with random changes.
        #[test]
        fn forged_records_give_bounded_documents(
            registers in prop::collection::vec(prop_oneof![0..0x60_0000_u64, any::<u64>()], 33),
            stack in prop::collection::vec(prop_oneof![0..0x60_0000_u64, 0x1000..0x3000_u64, any::<u64>()], 0..600),
            changes in prop::collection::vec((0..4096_usize, any::<u8>()), 0..8),
            late_changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..64),
            maps_changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            offset in prop_oneof![Just(None), prop::option::of(0..0x4_0000_u64), prop::option::of(any::<u64>())],
            header_changes in prop::collection::vec((0..64_usize, any::<u8>()), 0..2),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let ((library, code), forged) = (a_library(), folder.path().join("forged"));
            let mut elf = std::fs::read(&library).unwrap();
            for (at, byte) in changes {
                elf[at] = byte;
            }
            for (at, byte) in late_changes {
                let at = at.index(elf.len());
                elf[at] = byte;
            }
            std::fs::write(&forged, &elf).unwrap();
            let mut maps = mapping_line(0x10_0000, 0x20_0000, offset.unwrap_or(code), &forged)
                + &mapping_line(0x20_0000, 0x30_0000, code, &library)
                + &mapping_line(0x28_0000, 0x50_0000, 0, "/dev/zero".as_ref());
            let mut maps = std::mem::take(&mut maps).into_bytes();
            for (at, byte) in maps_changes {
                let at = at.index(maps.len());
                maps[at] = byte;
            }
            let mut bytes = record(registers, &maps, &stack);
            for (at, byte) in header_changes {
                bytes[at] = byte;
            }
            let crash = symbolize(&bytes);
            prop_assert!(crash.is_valid(), "{crash:?}");
            prop_assert!(serde_json::to_vec(&crash).unwrap().len() as u64 <= NATIVE_BYTES_MAX);
        }
    }
}

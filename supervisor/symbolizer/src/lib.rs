//! The symbolizer: turns [records of threads](bulkhead_shared::crash_record) into backtraces.
//!
//! The records, and the files named in them, come from a process that may be hostile. The symbolizer therefore runs as
//! a separate process, which the keeper confines at least as strictly as the worker. It reads records from its link,
//! writes one JSON document to the link, and exits. The supervisor limits the time and memory of the symbolizer, and
//! validates the document.
//!
//! - `record`: parses the records.
//! - `modules`: opens programs and libraries, and finds their unwind tables.
//! - `unwind`: computes return addresses from registers and stack.
//! - `names`: resolves addresses to functions, files and lines.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};

use bulkhead_api::{NATIVE_FRAMES_MAX, NATIVE_FRAMES_TOTAL_MAX, NativeCrash, NativeFrame, NativeThread, hex};
use bulkhead_shared::crash_record::{MACHINE, RECORDS_BYTES_MAX};
use bulkhead_shared::worker_protocol::LINK_VARIABLE;

mod modules;
mod names;
mod record;
mod unwind;

use modules::Modules;
use record::Process;
use unwind::ProcessUnwinder;

/// Reads crash records from the link, writes the backtraces to the link, and exits. `debug_folders` contains additional
/// folders with separate debug information, in the layout of `/usr/lib/debug`.
pub fn run_as_symbolizer(debug_folders: &[String]) -> ! {
    let result = inherited_link().and_then(|link| serve(&mut std::fs::File::from(link), debug_folders));
    if let Err(error) = &result {
        // The supervisor discards standard error. An engineer who starts this program by hand sees the message.
        let _ =
            writeln!(io::stderr(), "the symbolizer failed: {error}; only bulkhead-supervisor can start it");
    }
    std::process::exit(i32::from(result.is_err()))
}

/// Takes ownership of the link's descriptor. The number of the descriptor is passed in an environment variable.
fn inherited_link() -> io::Result<OwnedFd> {
    let number = std::env::var(LINK_VARIABLE).ok().and_then(|number| number.parse().ok());
    let number: i32 = number.filter(|number| *number > 2).ok_or(io::ErrorKind::NotFound)?;
    // SAFETY: the keeper passes the link under this number, and nothing else in this process has used descriptors
    // before.
    #[expect(unsafe_code, reason = "the descriptor is inherited from the parent process")]
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn serve(link: &mut std::fs::File, debug_folders: &[String]) -> io::Result<()> {
    let mut bytes = Vec::new();
    Read::take(&*link, RECORDS_BYTES_MAX as u64).read_to_end(&mut bytes)?;
    serde_json::to_writer(&mut *link, &symbolize(&bytes, debug_folders))?;
    link.flush()
}

/// Returns the backtraces of all threads, or the reason why there are none. The result always satisfies
/// [`NativeCrash::is_valid`].
pub fn symbolize(bytes: &[u8], debug_folders: &[String]) -> NativeCrash {
    let processes = record::processes(bytes);
    let Some(first) = processes.first().and_then(|process| process.threads.first()) else {
        return NativeCrash::unavailable("the thread records are invalid");
    };
    if first.header.machine != MACHINE {
        return NativeCrash::unavailable("the worker's processor architecture differs from the supervisor's");
    }
    let has_crashed = first.header.signal != 0;
    let mut threads = Vec::new();
    let mut frames_left = NATIVE_FRAMES_TOTAL_MAX;
    for process in &processes {
        backtraces((process, debug_folders), &mut frames_left, &mut threads);
    }
    NativeCrash {
        unavailable: None,
        signal_code: has_crashed.then_some(first.header.code),
        address: has_crashed.then(|| hex(first.header.address)),
        threads,
    }
}

/// Appends the backtraces of all threads of one process to `threads`.
fn backtraces(
    (process, debug_folders): (&Process<'_>, &[String]),
    frames_left: &mut usize,
    threads: &mut Vec<NativeThread>,
) {
    let mut modules = Modules::new(&process.mappings, debug_folders);
    let mut unwinder = ProcessUnwinder::new(&mut modules);
    // All registers are zero if the thread could not be stopped.
    let has_registers = |thread: &&record::Thread<'_>| thread.header.registers.iter().any(|it| *it != 0);
    let addresses: Vec<_> = process
        .threads
        .iter()
        .map(|thread| Some(thread).filter(has_registers).map_or_else(Vec::new, |it| unwinder.unwind(it)))
        .collect();
    let mut named = names::frames(&modules, &addresses.concat()).into_iter();
    for (thread, addresses) in process.threads.iter().zip(addresses) {
        let of_thread = named.by_ref().take(addresses.len()).flatten();
        let mut frames: Vec<NativeFrame> = of_thread.collect();
        frames.truncate(NATIVE_FRAMES_MAX.min(*frames_left));
        *frames_left -= frames.len();
        frames.iter_mut().for_each(NativeFrame::truncate_texts);
        let header = &thread.header;
        let is_running = header.process != 0;
        threads.push(NativeThread {
            id: header.thread,
            name: text(&header.thread_name),
            process: is_running.then_some(header.process),
            program: text(&header.process_name),
            state: text(&[header.state]),
            waits_in: text(&header.wait_channel),
            registers: if is_running { BTreeMap::new() } else { thread.registers() },
            frames,
        });
    }
}

/// Returns the string up to the first NUL, or `None` if the string is empty.
fn text(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    (end > 0).then(|| String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_api::NATIVE_BYTES_MAX;
    use bulkhead_shared::crash_record::{HEADER_BYTES, Header};
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;
    use std::path::{Path, PathBuf};

    /// Returns a record with the given registers, mappings and stack. The header can be inconsistent with this data.
    fn record(registers: Vec<u64>, maps: &[u8], stack: &[u64]) -> Vec<u8> {
        let mut bytes = [0; HEADER_BYTES];
        let header = Header {
            machine: MACHINE,
            signal: 11,
            code: 1,
            thread: 7,
            address: 0,
            maps_bytes: maps.len() as u32,
            stack_bytes: (8 * stack.len()) as u32,
            stack_start: 0x1000,
            registers: std::array::from_fn(|index| registers[index % registers.len()]),
            ..Header::EMPTY
        };
        header.encode(&mut bytes);
        let stack = stack.iter().flat_map(|word| word.to_le_bytes());
        bytes.iter().chain(maps).copied().chain(stack).collect()
    }

    /// Returns a line of `/proc/PID/maps` that describes a mapping of a file.
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
        let valid = record(vec![1], b"", &[7]);
        assert_eq!(symbolize(&valid, &[]).threads[0].frames.len(), 1);
        for invalid in [&valid[..valid.len() - 1], &[][..], &[0; 4096][..]] {
            assert!(symbolize(invalid, &[]).unavailable.is_some());
        }
    }

    #[test]
    fn threads_of_all_processes_have_backtraces() {
        let change = |mut bytes: Vec<u8>, change: &dyn Fn(&mut Header)| {
            let place = bytes.first_chunk_mut::<HEADER_BYTES>().unwrap();
            let mut header = Header::decode(place).unwrap();
            change(&mut header);
            header.encode(place);
            bytes
        };
        let (library, code) = a_library();
        let maps = mapping_line(0x10_0000, 0x20_0000, code, &library);
        let with_maps = record(vec![0x11_0000], maps.as_bytes(), &[]);
        let running = |header: &mut Header| (header.signal, header.process, header.state) = (0, 9, b'S');
        let bytes = [
            change(with_maps.clone(), &running),
            change(record(vec![0x11_0000], b"", &[]), &|header| {
                running(header);
                header.thread = 8;
                header.wait_channel[..4].copy_from_slice(b"nap\0");
            }),
            // A thread of another process. The thread could not be stopped.
            change(record(vec![0], b" ", &[]), &|header| (header.process, header.thread) = (10, 10)),
        ];
        let crash = symbolize(&bytes.concat(), &[]);
        assert!(crash.is_valid() && crash.signal_code.is_none() && crash.unavailable.is_none());
        let found: Vec<_> = crash.threads.iter().map(|it| (it.process, it.id, it.frames.len())).collect();
        assert_eq!(found, [(Some(9), 7, 1), (Some(9), 8, 1), (Some(10), 10, 0)]);
        assert_eq!(crash.threads[1].frames, crash.threads[0].frames);
        assert_eq!(crash.threads[0].frames[0].module.as_deref(), library.to_str());
        assert_eq!(crash.threads[1].waits_in.as_deref(), Some("nap"));
        assert!(crash.threads.iter().all(|thread| thread.registers.is_empty()));
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
            let crash = symbolize(&record(vec![0x11_0000], maps.as_bytes(), &[]), &[]);
            let frame = &crash.threads[0].frames[0];
            assert!(frame.module.is_some(), "{frame:?}");
            frame.build_id.clone()
        };
        assert!(build_id(line(&library)).is_some());
        assert!(build_id(line(&copy)).is_some());
        // Rejects another file with the same name, a link, and files that are not regular.
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

        /// Records with random registers, stacks and mappings produce documents of bounded size. The mapped files are
        /// libraries that have been modified at random.
        #[test]
        fn forged_records_produce_bounded_documents(
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
            let crash = symbolize(&bytes, &[]);
            prop_assert!(crash.is_valid(), "{crash:?}");
            prop_assert!(serde_json::to_vec(&crash).unwrap().len() as u64 <= NATIVE_BYTES_MAX);
        }
    }
}

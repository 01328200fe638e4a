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
        // Nobody reads standard error, unless an engineer starts this program by hand.
        let _ = writeln!(io::stderr(), "the symbolizer failed: {error}; only bulkhead-supervisor can start it");
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

/// Returns the backtrace of a record, or the reason why there is none. The result is always within the limits of
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

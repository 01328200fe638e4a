//! Reads the payload of a job from a file or from standard input.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use bulkhead_client::{PAYLOAD_BYTES_CEILING, RejectReason};
use bulkhead_linux::blocking::Blocking;

use crate::args::Submit;
use crate::output::{self, Failure, exit};

/// Delay before the command prints a notice that it is still waiting for the payload.
const NOTICE_DELAY: Duration = Duration::from_secs(2);

/// Returns the payload for `submit`: the contents of a file or of standard input. If standard input is a
/// terminal, the payload is empty, because people do not type payloads.
pub(crate) fn for_submit(submit: &Submit) -> Result<Vec<u8>, Failure> {
    match &submit.request.payload_file {
        Some(file) => read(file),
        None if submit.no_input || io::stdin().is_terminal() => Ok(Vec::new()),
        None => read(Path::new("-")),
    }
}

/// Reads a payload from a file, or from standard input if `file` is `-`. Returns an error if the payload is
/// larger than any bulkhead accepts.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    let is_input = file == Path::new("-");
    let name = if is_input { "standard input".to_owned() } else { file.display().to_string() };
    let mut bytes = Vec::new();
    let max = PAYLOAD_BYTES_CEILING + 1;
    let read = read_with_notice(&name, is_input, || match is_input {
        true => Blocking(io::stdin().lock()).take(max).read_to_end(&mut bytes),
        false => File::open(file).and_then(|file| file.take(max).read_to_end(&mut bytes)),
    });
    read.map_err(|error| {
        Failure::new(exit::USAGE, format!("failed to read the payload from {name}: {error}"))
    })?;
    if bytes.len() as u64 == max {
        let message = format!(
            "the payload from {name} has at least {max} bytes, which is more than any bulkhead accepts"
        );
        return Err(Failure::rejected(RejectReason::TooLarge, message));
    }
    Ok(bytes)
}

/// Calls `read`, and prints a notice if it takes longer than [`NOTICE_DELAY`]. Without the notice, a pipe that is never
/// closed would look like a supervisor that does not respond.
fn read_with_notice<T>(name: &str, is_input: bool, read: impl FnOnce() -> T) -> T {
    let (done, waiting) = channel::<()>();
    let hint = if is_input { "; -n sends an empty payload instead" } else { "" };
    let notice = format!("bulkhead: reading the payload from {name} until end of input{hint}");
    // If the thread cannot be started, only the notice is missing.
    let _ = std::thread::Builder::new().spawn(move || {
        if waiting.recv_timeout(NOTICE_DELAY) == Err(RecvTimeoutError::Timeout) {
            output::to_stderr(&notice);
        }
    });
    let result = read();
    drop(done);
    result
}

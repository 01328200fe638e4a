//! Where the payload of a job comes from: a file, standard input, or nowhere.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use bulkhead_client::{PAYLOAD_BYTES_CEILING, RejectReason};

use crate::args::Submit;
use crate::output::{self, Failure, exit};

/// How long nothing is said while the end of the payload has not come.
const SILENT_FOR: Duration = Duration::from_secs(2);

/// The payload that `submit` was given: that of a file, or what standard input has unless it is a terminal, on which
/// a person does not type a payload.
pub(crate) fn of_submit(submit: &Submit) -> Result<Vec<u8>, Failure> {
    match &submit.request.payload_file {
        Some(file) => read(file),
        None if submit.no_input || io::stdin().is_terminal() => Ok(Vec::new()),
        None => read(Path::new("-")),
    }
}

/// Reads a payload; `-` is standard input. What no bulkhead can be configured to take is not read whole.
pub(crate) fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    let is_input = file == Path::new("-");
    let name = if is_input { "standard input".to_owned() } else { file.display().to_string() };
    let mut bytes = Vec::new();
    let most = PAYLOAD_BYTES_CEILING + 1;
    let read = telling_what_is_waited_for(&name, is_input, || match is_input {
        true => io::stdin().lock().take(most).read_to_end(&mut bytes),
        false => File::open(file).and_then(|file| file.take(most).read_to_end(&mut bytes)),
    });
    read.map_err(|error| {
        Failure::new(exit::USAGE, format!("failed to read the payload from {name}: {error}"))
    })?;
    if bytes.len() as u64 == most {
        let message = format!("the payload from {name} is larger than any bulkhead takes");
        return Err(Failure::rejected(RejectReason::TooLarge, message));
    }
    Ok(bytes)
}

/// A pipe that is never closed would otherwise look like a supervisor that hangs.
fn telling_what_is_waited_for<T>(name: &str, is_input: bool, read: impl FnOnce() -> T) -> T {
    let (done, waiting) = channel::<()>();
    let hint = if is_input { "; -n sends an empty payload instead" } else { "" };
    let notice = format!("bulkhead: waiting for the end of {name}, which is the payload{hint}");
    // Without the thread nothing is told, and all else is the same.
    let _ = std::thread::Builder::new().spawn(move || {
        if waiting.recv_timeout(SILENT_FOR) == Err(RecvTimeoutError::Timeout) {
            output::note(&notice);
        }
    });
    let result = read();
    drop(done);
    result
}

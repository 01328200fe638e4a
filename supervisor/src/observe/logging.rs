//! Log lines, to standard error. Writing happens on a thread of its own behind a bounded channel: a
//! standard error that nobody reads costs log lines, never time.

use std::io::{self, IsTerminal, Write};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Lines that wait to be written; what comes beyond is dropped and counted.
const LINES_MAX: usize = 4096;

/// How long the end waits for the last lines to be written.
const SETTLE_WITHIN: Duration = Duration::from_secs(1);

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Lines that are not written yet.
static WAITING: AtomicU64 = AtomicU64::new(0);

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends what is logged from now on to standard error. An error is a sentence about `level`.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    let filter = filter(level)?;
    let (lines, received) = sync_channel(LINES_MAX);
    std::thread::Builder::new()
        .name("log".into())
        .spawn(move || write_lines(&received))
        .map_err(|error| format!("the logging thread cannot be started: {error}"))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Lines { lines, format });
    match format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Waits until the lines logged so far are written, or until it is plain that nobody reads them.
pub fn settle() {
    let began = Instant::now();
    while WAITING.load(Ordering::Acquire) > 0 && began.elapsed() < SETTLE_WITHIN {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A word alone is a level: as a filter, a misspelt one would name a target that nobody logs to.
fn filter(level: &str) -> Result<EnvFilter, String> {
    let fail =
        |error| format!("'{level}' is no log level: write error, warn, info, debug or trace ({error})");
    if level.contains(['=', ',']) {
        return EnvFilter::try_new(level).map_err(|error| fail(error.to_string()));
    }
    let level = LevelFilter::from_str(level).map_err(|error| fail(error.to_string()))?;
    Ok(EnvFilter::default().add_directive(level.into()))
}

fn write_lines(received: &Receiver<Vec<u8>>) {
    while let Ok(line) = received.recv() {
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        let mut out = io::stderr().lock();
        if dropped > 0 {
            let _ = writeln!(out, "{dropped} log lines were dropped: standard error is not read fast enough");
        }
        // A closed standard error leaves nobody to tell.
        let _ = out.write_all(&line);
        WAITING.fetch_sub(1, Ordering::Release);
    }
}

struct Lines {
    lines: SyncSender<Vec<u8>>,
    format: LogFormat,
}

struct Line {
    lines: SyncSender<Vec<u8>>,
    format: LogFormat,
    bytes: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { lines: self.lines.clone(), format: self.format, bytes: Vec::new() }
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        WAITING.fetch_add(1, Ordering::Relaxed);
        let bytes = std::mem::take(&mut self.bytes);
        let line = if self.format == LogFormat::Json { without_controls(bytes) } else { bytes };
        if self.lines.try_send(line).is_err() {
            WAITING.fetch_sub(1, Ordering::Relaxed);
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A line of JSON that no terminal obeys, whatever texts are in it. (Those of the other format are escaped where
/// they are written.)
fn without_controls(line: Vec<u8>) -> Vec<u8> {
    let text = String::from_utf8_lossy(&line);
    let json = text.trim_end_matches('\n');
    if !json.contains(char::is_control) {
        return line;
    }
    format!("{}\n", super::events::escaped(json)).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_json_has_no_control_characters() {
        let plain = b"{\"a\":\"b\"}\n".to_vec();
        assert_eq!(without_controls(plain.clone()), plain);
        let hostile = "{\"a\":\"\u{9b}31m\u{7f}\"}\n".as_bytes().to_vec();
        assert_eq!(without_controls(hostile), b"{\"a\":\"\\u009b31m\\u007f\"}\n");
    }
}

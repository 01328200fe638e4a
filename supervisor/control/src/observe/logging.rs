//! Writes log lines to standard error. A separate thread takes the lines from a bounded channel. If nothing reads
//! standard error, log lines are lost, but no other thread blocks.

use std::io::{self, IsTerminal, Write};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use bulkhead_linux::blocking::Blocking;
use bulkhead_shared::text;
use serde_json::{Map, Value};
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Maximum number of log lines waiting to be written. Further lines are dropped and counted.
const LINES_MAX: usize = 4096;

/// Maximum time to wait at shutdown until the remaining lines have been written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(1);

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Number of log lines that are waiting to be written.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable text.
    Text,
    /// Each log line is a JSON object.
    Json,
}

/// Channel for lines that are formatted by this module and not by `tracing`. Unset unless the log format is JSON.
static JSON_LINES: OnceLock<SyncSender<Vec<u8>>> = OnceLock::new();

/// `tracing` target of log lines that contain workers' output.
pub(crate) const WORKER_TARGET: &str = "worker";

/// Filter that determines which lines are logged.
#[derive(Clone, Copy, Debug)]
pub struct LogFilter<'a> {
    /// A single log level, or a filter that sets levels for individual targets.
    pub level: &'a str,
    /// True if the workers' output is logged.
    pub has_output: bool,
}

/// Starts logging to standard error. On failure, returns an error message for the user, usually about an invalid
/// level.
pub fn init(format: LogFormat, log_filter: LogFilter<'_>) -> Result<(), String> {
    let mut filter = filter(log_filter.level)?;
    if !log_filter.has_output {
        let off = format!("{WORKER_TARGET}=off").parse().map_err(|error| format!("{error}"))?;
        filter = filter.add_directive(off);
    }
    let (lines, receiver) = sync_channel(LINES_MAX);
    std::thread::Builder::new()
        .name("log".into())
        .spawn(move || {
            // The process exits if the logging thread panics, because otherwise further failures would be invisible.
            // The keeper then kills the workers.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| write_lines(&receiver, format)))
                .is_err()
            {
                std::process::exit(1);
            }
        })
        .map_err(|error| format!("failed to start the logging thread: {error}"))?;
    if format == LogFormat::Json {
        JSON_LINES.get_or_init(|| lines.clone());
    }
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(LineWriters { lines, format });
    match format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Returns an error if the text is neither a log level nor a filter.
pub fn check_level(level: &str) -> Result<(), String> {
    filter(level).map(drop)
}

/// Returns true if each line is a JSON object.
pub(crate) fn is_json() -> bool {
    JSON_LINES.get().is_some()
}

/// Names of the fields that every JSON line has in addition to the message.
pub(crate) const LINE_FIELDS: [&str; 3] = ["timestamp", "level", "target"];

/// Logs a JSON object with the given fields and the [`LINE_FIELDS`]. Does nothing if the log format is text.
pub(crate) fn write_json(level: &Level, target: &str, fields: Map<String, Value>) {
    let Some(lines) = JSON_LINES.get() else { return };
    send(lines, json_line(level, target, fields));
}

fn json_line(level: &Level, target: &str, fields: Map<String, Value>) -> Vec<u8> {
    let mut object = Map::new();
    object.insert("timestamp".into(), humantime::format_rfc3339_micros(SystemTime::now()).to_string().into());
    object.insert("level".into(), level.as_str().into());
    object.extend(fields);
    object.insert("target".into(), target.into());
    let line = format!("{}\n", Value::Object(object));
    escape_unseen(line.into_bytes(), LogFormat::Json)
}

fn send(lines: &SyncSender<Vec<u8>>, line: Vec<u8>) {
    UNWRITTEN.fetch_add(1, Ordering::Relaxed);
    if lines.try_send(line).is_err() {
        UNWRITTEN.fetch_sub(1, Ordering::Relaxed);
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until all log lines have been written, or until the time limit has passed.
pub fn finish() {
    let start = Instant::now();
    while UNWRITTEN.load(Ordering::Acquire) > 0 && start.elapsed() < FINISH_TIMEOUT {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Parses a log level or a filter. A single word must be a level, because otherwise a misspelt level would be accepted
/// as the name of a target that does not exist.
fn filter(level: &str) -> Result<EnvFilter, String> {
    let fail =
        |error| format!("'{level}' is not a log level: use error, warn, info, debug or trace ({error})");
    if level.contains(['=', ',']) {
        return EnvFilter::try_new(level).map_err(|error| fail(error.to_string()));
    }
    let level = LevelFilter::from_str(level).map_err(|error| fail(error.to_string()))?;
    Ok(EnvFilter::default().add_directive(level.into()))
}

fn write_lines(receiver: &Receiver<Vec<u8>>, format: LogFormat) {
    while let Ok(line) = receiver.recv() {
        let dropped = DROPPED.swap(0, Ordering::Relaxed);
        // Not locked while it waits, because the lock would hold up panic messages and the last error message.
        let mut out = Blocking(io::stderr());
        if dropped > 0 {
            let message =
                format!("{dropped} log lines were dropped: standard error is not being read fast enough");
            let _ = match format {
                LogFormat::Text => writeln!(out, "{message}"),
                LogFormat::Json => {
                    let fields = Map::from_iter([("message".to_owned(), message.into())]);
                    out.write_all(&json_line(&Level::WARN, module_path!(), fields))
                }
            };
        }
        // Errors are ignored, because there is nowhere else to report that standard error is closed.
        let _ = out.write_all(&line);
        UNWRITTEN.fetch_sub(1, Ordering::Release);
    }
}

struct LineWriters {
    lines: SyncSender<Vec<u8>>,
    format: LogFormat,
}

struct LineWriter {
    lines: SyncSender<Vec<u8>>,
    format: LogFormat,
    bytes: Vec<u8>,
}

impl<'a> MakeWriter<'a> for LineWriters {
    type Writer = LineWriter;

    fn make_writer(&'a self) -> LineWriter {
        LineWriter { lines: self.lines.clone(), format: self.format, bytes: Vec::new() }
    }
}

impl Write for LineWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LineWriter {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        send(&self.lines, escape_unseen(bytes, self.format));
    }
}

/// Escapes characters in a log line that a terminal would interpret or not display. Control characters are kept in the
/// text format, where they set colours. Text from workers has already been escaped.
fn escape_unseen(line: Vec<u8>, format: LogFormat) -> Vec<u8> {
    let needs_escape = |c: char| text::is_unprintable(c) && (format == LogFormat::Json || !c.is_control());
    let whole = String::from_utf8_lossy(&line);
    let body = whole.trim_end_matches('\n');
    if !body.contains(needs_escape) {
        return line;
    }
    let escape = |c: char| if needs_escape(c) { c.escape_default().to_string() } else { c.to_string() };
    let safe = match format {
        LogFormat::Json => text::escape_json(body),
        LogFormat::Text => body.chars().map(escape).collect(),
    };
    format!("{safe}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_escape_invisible_characters() {
        let plain = b"{\"a\":\"b\"}\n".to_vec();
        assert_eq!(escape_unseen(plain.clone(), LogFormat::Json), plain);
        let hostile = "{\"a\":\"\u{9b}31m\u{7f}\u{202e}\"}\n".as_bytes().to_vec();
        assert_eq!(escape_unseen(hostile, LogFormat::Json), b"{\"a\":\"\\u009b31m\\u007f\\u202e\"}\n");
        let coloured = "\u{1b}[32m INFO\u{1b}[0m a\u{202e}b\n".as_bytes().to_vec();
        assert_eq!(escape_unseen(coloured, LogFormat::Text), b"\x1b[32m INFO\x1b[0m a\\u{202e}b\n");
    }
}

//! Reads the workers' output (stdout and stderr) continuously, so that a full pipe never blocks a worker. Keeps and
//! logs a limited amount of output. `control::streams` serves the lines over HTTP, and crash reports contain the end of
//! standard error.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bulkhead_plane::notices::WorkerOutput;
use bulkhead_shared::limits::OUTPUT_LINE_BYTES_MAX;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde_json::{Value, json};
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{broadcast, watch};

use super::events::{line, rfc3339};
use super::logging::{self, WORKER_TARGET};

/// Maximum number of lines kept for each bulkhead, and their maximum total size in bytes.
const LINES_MAX: usize = 1000;
const LINES_BYTES_MAX: usize = 256 * 1024;

/// Maximum number of lines and maximum number of bytes that are logged immediately, for each bulkhead and second.
const LINES_PER_SECOND: u32 = 900;
const BYTES_PER_SECOND: usize = 960 * 1024;

/// Maximum number of lines and maximum number of bytes that are logged with a delay, for each bulkhead and second. If
/// more lines arrive than can be logged immediately, the last ones are kept and logged when the second ends or the
/// process exits. All other lines are dropped and counted.
const DELAYED_LINES_PER_SECOND: usize = 100;
const DELAYED_BYTES_PER_SECOND: usize = 64 * 1024;

const SECOND: Duration = Duration::from_secs(1);

/// Maximum number of bytes of standard error output kept for a process, and maximum number of processes whose standard
/// error output is kept.
const TAIL_BYTES: usize = 8 * 1024;
const TAILS_MAX: usize = 256;

/// Maximum number of bytes to read at once.
const READ_BYTES: usize = 64 * 1024;

/// Maximum number of reads from a pipe after its process has exited. Enough to empty a full pipe.
const LAST_READS_MAX: usize = 16;

/// Minimum number of processes that must start before the supervisor checks again which processes have exited. If many
/// processes are running, the minimum is one start per `PROCESSES_FOR_EACH_START` processes.
const STARTS_BETWEEN_CHECKS: usize = 16;
const PROCESSES_FOR_EACH_START: usize = 8;

/// Reads the output of all workers and keeps the most recent lines.
#[derive(Debug, Default)]
pub struct Output {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bulkheads: HashMap<Arc<str>, Lines>,
    tails: HashMap<u32, VecDeque<u8>>,
    tails_order: VecDeque<u32>,
    /// Processes whose pipes are being read, by process ID.
    readers: HashMap<u32, ProcessReader>,
    /// Number of processes started since the last search for exited processes.
    starts: usize,
}

/// A process whose pipes are being read. Reading stops some time after the process has exited, even if another process,
/// such as the template that forked it, keeps the pipes open.
#[derive(Debug)]
struct ProcessReader {
    /// Sender that, when dropped, stops the tasks that read the process's pipes. Each task holds a receiver.
    stop: watch::Sender<()>,
    /// True if the process is a template. The pipes of a template are read even after it has exited, because its forked
    /// workers write to the same pipes.
    is_template: bool,
    is_stderr_closed: bool,
    /// True if the last check found that the process had exited.
    has_ended: bool,
}

#[derive(Debug, Default)]
struct Lines {
    lines: VecDeque<Arc<str>>,
    bytes: usize,
    /// Sequence number of the newest line.
    seq: u64,
    /// Channel to the clients that follow the output. Created for the first follower, because the channel
    /// allocates memory for many lines.
    live: Option<broadcast::Sender<Arc<str>>>,
    second: Option<Instant>,
    lines_this_second: u32,
    bytes_this_second: usize,
    delayed: DelayedLines,
    /// Number of lines that have been logged with a delay in the current second.
    delayed_logged: usize,
}

/// The most recent of the lines that could not be logged immediately because of the rate limit. They are logged later.
#[derive(Debug, Default)]
struct DelayedLines {
    lines: VecDeque<(LineSource, Box<[u8]>)>,
    bytes: usize,
    /// Number of lines dropped because too many lines were delayed.
    dropped: u64,
}

/// Process and stream that produced a line.
#[derive(Clone, Debug)]
struct LineSource {
    bulkhead: Arc<str>,
    pid: u32,
    stream: &'static str,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts reading the pipes of a worker or template.
    pub fn read(self: &Arc<Self>, output: WorkerOutput) {
        let WorkerOutput { bulkhead, pid, is_template, stdout, stderr } = output;
        let stop = self.lock().register(pid, is_template);
        for (stream, fd, stop) in [("stdout", stdout, stop.clone()), ("stderr", stderr, stop)] {
            let source = LineSource { bulkhead: bulkhead.clone(), pid, stream };
            match Receiver::from_owned_fd(fd) {
                Ok(pipe) => drop(tokio::spawn(self.clone().read_pipe(source, pipe, stop))),
                Err(error) => {
                    tracing::warn!(%bulkhead, pid, stream, "failed to read the output of a worker: {error}");
                    self.lock().pipe_closed(&source, &stop);
                }
            }
        }
    }

    /// Removes the stored lines of all bulkheads that are not in `bulkheads`. Lines are stored again if a removed
    /// bulkhead's workers are still running and write more output.
    pub fn keep_only(&self, bulkheads: &HashSet<&str>) {
        self.lock().bulkheads.retain(|name, _| bulkheads.contains(&**name));
    }

    async fn read_pipe(self: Arc<Self>, source: LineSource, pipe: Receiver, mut stop: watch::Receiver<()>) {
        let mut partial = Vec::new();
        // The buffer is allocated for each read, so that idle pipes do not hold a buffer.
        let mut read_once = || {
            let mut buffer = vec![0; READ_BYTES];
            let count = pipe.try_read(&mut buffer)?;
            self.split_lines(&source, &buffer[..count], &mut partial);
            Ok::<usize, std::io::Error>(count)
        };
        loop {
            tokio::select! {
                biased;
                _ = stop.changed() => {
                    let _ = (0..LAST_READS_MAX).all(|_| read_once().is_ok_and(|count| count > 0));
                    break;
                }
                readable = pipe.readable() => if readable.is_err() { break },
            }
            match read_once() {
                Ok(0) => break,
                Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break,
                Ok(_) | Err(_) => {}
            }
            // A worker that produces a lot of output must not starve the others.
            tokio::task::yield_now().await;
        }
        if !partial.is_empty() {
            self.line(&source, &partial);
        }
        self.log_delayed_of(&source.bulkhead);
        self.lock().pipe_closed(&source, &stop);
    }

    /// Returns true if the process's standard error pipe is still open, so that more output can follow.
    pub fn has_open_stderr(&self, pid: u32) -> bool {
        self.lock().readers.get(&pid).is_some_and(|readers| !readers.is_stderr_closed)
    }

    fn split_lines(self: &Arc<Self>, source: &LineSource, bytes: &[u8], partial: &mut Vec<u8>) {
        if source.stream == "stderr" {
            self.lock().append_tail(source.pid, bytes);
        }
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&b| b == b'\n') {
            if partial.is_empty() {
                self.line(source, &rest[..end]);
            } else {
                partial.extend_from_slice(&rest[..end.min(OUTPUT_LINE_BYTES_MAX)]);
                self.line(source, partial);
                partial.clear();
            }
            rest = &rest[end + 1..];
        }
        // One byte more than the maximum is kept, to show that the line must be truncated when it is complete.
        let room = (OUTPUT_LINE_BYTES_MAX + 1).saturating_sub(partial.len());
        partial.extend_from_slice(&rest[..rest.len().min(room)]);
    }

    fn line(self: &Arc<Self>, source: &LineSource, bytes: &[u8]) {
        let mut state = self.lock();
        let lines = state.bulkheads.entry(source.bulkhead.clone()).or_default();
        let before = lines.begin_second();
        if lines.is_within_limits(bytes.len()) {
            drop(state);
            self.log_delayed(&source.bulkhead, before);
            return self.log(source, bytes);
        }
        let is_first = lines.delayed.dropped == 0 && lines.delayed.lines.is_empty();
        lines.delay(source, bytes);
        let left = lines.second.map_or(SECOND, |began| SECOND.saturating_sub(began.elapsed()));
        drop(state);
        self.log_delayed(&source.bulkhead, before);
        if is_first {
            let (output, bulkhead) = (self.clone(), source.bulkhead.clone());
            tokio::spawn(async move {
                tokio::time::sleep(left).await;
                output.log_delayed_of(&bulkhead);
            });
        }
    }

    /// Logs a bulkhead's delayed lines, preceded by the number of dropped lines.
    fn log_delayed_of(&self, bulkhead: &Arc<str>) {
        let delayed = self.lock().bulkheads.get_mut(bulkhead).map(Lines::take_delayed);
        self.log_delayed(bulkhead, delayed.unwrap_or_default());
    }

    fn log_delayed(&self, bulkhead: &Arc<str>, delayed: DelayedLines) {
        let DelayedLines { lines, dropped, .. } = delayed;
        if dropped > 0 {
            let object =
                json!({ "at": rfc3339(SystemTime::now()), "bulkhead": &**bulkhead, "dropped": dropped });
            self.keep(bulkhead, object);
            tracing::warn!(target: WORKER_TARGET, %bulkhead, dropped, "lines of output were dropped");
        }
        lines.iter().for_each(|(source, bytes)| self.log(source, bytes));
    }

    fn keep(&self, bulkhead: &Arc<str>, object: Value) {
        self.lock().bulkheads.entry(bulkhead.clone()).or_default().keep(object);
    }

    fn log(&self, source: &LineSource, bytes: &[u8]) {
        let mut text = String::from_utf8_lossy(&bytes[..bytes.len().min(OUTPUT_LINE_BYTES_MAX)]).into_owned();
        if bytes.len() > OUTPUT_LINE_BYTES_MAX {
            text.push_str(" [cut]");
        }
        let object = json!({
            "at": rfc3339(SystemTime::now()), "bulkhead": &*source.bulkhead, "pid": source.pid,
            "stream": source.stream, "line": &text,
        });
        self.keep(&source.bulkhead, object);
        let LineSource { bulkhead, pid, stream } = source;
        if logging::is_json() {
            // The text needs no escaping here, because the JSON format escapes control characters.
            tracing::info!(target: WORKER_TARGET, %bulkhead, pid, stream, "{text}");
        } else {
            tracing::info!(target: WORKER_TARGET, %bulkhead, pid, stream, "{}", text.escape_debug());
        }
    }

    /// Returns lines from a bulkhead's workers as JSON objects, and a receiver for later lines. Returns at most the
    /// newest `limit` lines, all with sequence numbers greater than `since`.
    pub fn follow(
        &self,
        bulkhead: &str,
        since: u64,
        limit: usize,
    ) -> (Vec<Arc<str>>, broadcast::Receiver<Arc<str>>) {
        let mut state = self.lock();
        let lines = state.bulkheads.entry(bulkhead.into()).or_default();
        // If `since` is above the newest number, the client received it from an earlier supervisor.
        let since = if since > lines.seq { 0 } else { since };
        // Sequence numbers have no gaps.
        let new = usize::try_from(lines.seq.saturating_sub(since)).unwrap_or(usize::MAX);
        let skip = lines.lines.len().saturating_sub(limit.min(new));
        let live = lines.live.get_or_insert_with(|| broadcast::channel(512).0);
        (lines.lines.iter().skip(skip).cloned().collect(), live.subscribe())
    }

    /// Returns the last part of a process's standard error output.
    pub fn tail(&self, pid: u32) -> Option<String> {
        let state = self.lock();
        let bytes: Vec<u8> = state.tails.get(&pid)?.iter().copied().collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl State {
    /// Registers a process whose pipes will be read. Clears the output of any earlier process with this process ID.
    fn register(&mut self, pid: u32, is_template: bool) -> watch::Receiver<()> {
        self.starts += 1;
        if self.starts > STARTS_BETWEEN_CHECKS.max(self.readers.len() / PROCESSES_FOR_EACH_START) {
            self.starts = 0;
            self.stop_reading_ended_processes();
        }
        let (stop, until) = watch::channel(());
        self.readers
            .insert(pid, ProcessReader { stop, is_template, is_stderr_closed: false, has_ended: false });
        if let Some(tail) = self.tails.get_mut(&pid) {
            tail.clear();
        }
        until
    }

    /// Stops reading the output of each process that has exited and had already exited at the previous check. The delay
    /// gives the process's descendants time to write their last output.
    fn stop_reading_ended_processes(&mut self) {
        self.readers.retain(|pid, readers| {
            let number = Pid::from_raw(*pid as i32);
            let has_ended = number.is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH));
            let had_ended = std::mem::replace(&mut readers.has_ended, has_ended);
            !(has_ended && had_ended) || readers.is_template
        });
    }

    /// Records that one of a process's pipes has been closed.
    fn pipe_closed(&mut self, source: &LineSource, stop: &watch::Receiver<()>) {
        // The process ID may have been reused by another process, so the channel is compared as well.
        let of = |readers: &&mut ProcessReader| readers.stop.subscribe().same_channel(stop);
        if let Some(readers) = self.readers.get_mut(&source.pid).filter(of) {
            readers.is_stderr_closed |= source.stream == "stderr";
            // The closed pipe was the process's last open pipe.
            if readers.stop.receiver_count() == 1 {
                self.readers.remove(&source.pid);
            }
        }
    }

    fn append_tail(&mut self, pid: u32, bytes: &[u8]) {
        if !self.tails.contains_key(&pid) {
            self.tails_order.push_back(pid);
            if self.tails_order.len() > TAILS_MAX
                && let Some(oldest) = self.tails_order.pop_front()
            {
                self.tails.remove(&oldest);
            }
        }
        let tail = self.tails.entry(pid).or_default();
        tail.extend(&bytes[bytes.len().saturating_sub(TAIL_BYTES)..]);
        let surplus = tail.len().saturating_sub(TAIL_BYTES);
        tail.drain(..surplus);
    }
}

impl Lines {
    /// Begins a new second if the current second is over. Returns the delayed lines of the previous second, which must
    /// now be logged.
    fn begin_second(&mut self) -> DelayedLines {
        let now = Instant::now();
        if self.second.is_some_and(|began| now.duration_since(began) < SECOND) {
            return DelayedLines::default();
        }
        let delayed = self.take_delayed();
        self.second = Some(now);
        (self.lines_this_second, self.bytes_this_second, self.delayed_logged) = (0, 0, 0);
        delayed
    }

    fn take_delayed(&mut self) -> DelayedLines {
        let delayed = std::mem::take(&mut self.delayed);
        self.delayed_logged += delayed.lines.len();
        delayed
    }

    /// Adds a line to the delayed lines. Drops the oldest delayed lines if there are too many.
    fn delay(&mut self, source: &LineSource, bytes: &[u8]) {
        // One byte more than the maximum is kept, to show that the line is too long.
        let bytes = &bytes[..bytes.len().min(OUTPUT_LINE_BYTES_MAX + 1)];
        let DelayedLines { lines, bytes: held_bytes, dropped } = &mut self.delayed;
        lines.push_back((source.clone(), bytes.into()));
        *held_bytes += bytes.len();
        while lines.len() + self.delayed_logged > DELAYED_LINES_PER_SECOND
            || *held_bytes > DELAYED_BYTES_PER_SECOND
        {
            let Some((_, first)) = lines.pop_front() else { break };
            *held_bytes -= first.len();
            *dropped += 1;
        }
    }

    fn is_within_limits(&mut self, bytes: usize) -> bool {
        self.lines_this_second = self.lines_this_second.saturating_add(1);
        self.bytes_this_second = self.bytes_this_second.saturating_add(bytes);
        self.lines_this_second <= LINES_PER_SECOND && self.bytes_this_second <= BYTES_PER_SECOND
    }

    /// Assigns a sequence number to a line, and stores the line.
    fn keep(&mut self, mut object: Value) {
        self.seq += 1;
        object["seq"] = self.seq.into();
        let line: Arc<str> = line(&object).into();
        self.bytes += line.len();
        self.lines.push_back(line.clone());
        while self.lines.len() > LINES_MAX || self.bytes > LINES_BYTES_MAX {
            let Some(oldest) = self.lines.pop_front() else { break };
            self.bytes -= oldest.len();
        }
        if self.live.as_ref().is_some_and(|live| live.send(line).is_err()) {
            // The last follower has disconnected.
            self.live = None;
        }
    }
}

//! What workers write to their standard output and error: read without end, so that a full pipe never
//! stops a worker; kept and logged within bounds.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use serde_json::json;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::broadcast;

use super::events::{line, rfc3339};
use super::logging::{self, WORKER_TARGET};

/// Bytes of one line; what is longer is cut.
const LINE_BYTES_MAX: usize = 8 * 1024;

/// Lines kept for each bulkhead, and their bytes.
const LINES_MAX: usize = 1000;
const LINES_BYTES_MAX: usize = 256 * 1024;

/// Lines and bytes a second taken from one bulkhead; what is beyond is read and thrown away.
const LINES_PER_SECOND: u32 = 1000;
const BYTES_PER_SECOND: usize = 1024 * 1024;

/// Bytes of the tail of standard error kept for each process, and processes whose tail is kept.
const TAIL_BYTES: usize = 8 * 1024;
const TAILS_MAX: usize = 256;

/// Bytes that one read takes.
const READ_BYTES: usize = 64 * 1024;

/// The output of all workers.
#[derive(Debug, Default)]
pub struct Output {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    bulkheads: HashMap<Arc<str>, Lines>,
    tails: HashMap<u32, VecDeque<u8>>,
    tails_order: VecDeque<u32>,
    /// Processes whose standard error has not ended.
    speaking: HashSet<u32>,
}

#[derive(Debug, Default)]
struct Lines {
    kept: VecDeque<Arc<str>>,
    bytes: usize,
    /// Only while it is followed: it holds room for many lines.
    live: Option<broadcast::Sender<Arc<str>>>,
    second: Option<Instant>,
    lines_this_second: u32,
    bytes_this_second: usize,
    dropped: u64,
}

/// Where a line comes from.
#[derive(Clone, Debug)]
struct Source {
    bulkhead: Arc<str>,
    pid: u32,
    stream: &'static str,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to read a worker's two pipes.
    pub fn read(self: &Arc<Self>, bulkhead: Arc<str>, pid: u32, stdout: OwnedFd, stderr: OwnedFd) {
        self.lock().begin(pid);
        for (stream, fd) in [("stdout", stdout), ("stderr", stderr)] {
            let source = Source { bulkhead: bulkhead.clone(), pid, stream };
            match Receiver::from_owned_fd(fd) {
                Ok(pipe) => drop(tokio::spawn(self.clone().read_pipe(source, pipe))),
                Err(error) => {
                    tracing::warn!(%bulkhead, pid, stream, "a worker's output cannot be read: {error}");
                    self.end(&source);
                }
            }
        }
    }

    /// Forgets the lines of all other bulkheads. Those that finish what they have may write some more.
    pub fn keep_only(&self, bulkheads: &HashSet<&str>) {
        self.lock().bulkheads.retain(|name, _| bulkheads.contains(&**name));
    }

    async fn read_pipe(self: Arc<Self>, source: Source, pipe: Receiver) {
        let mut partial = Vec::new();
        while pipe.readable().await.is_ok() {
            // Not held across waits: a thousand idle pipes hold no buffers.
            let mut buffer = vec![0; READ_BYTES];
            match pipe.try_read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => self.take(&source, &buffer[..count], &mut partial),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
            // A flood from one worker leaves the others their turns.
            tokio::task::yield_now().await;
        }
        if !partial.is_empty() {
            self.line(&source, &partial);
        }
        self.end(&source);
    }

    fn end(&self, source: &Source) {
        if source.stream == "stderr" {
            self.lock().speaking.remove(&source.pid);
        }
    }

    /// Whether there may be more to come of what a process wrote to its standard error.
    pub fn is_read_from(&self, pid: u32) -> bool {
        self.lock().speaking.contains(&pid)
    }

    fn take(&self, source: &Source, bytes: &[u8], partial: &mut Vec<u8>) {
        if source.stream == "stderr" {
            self.lock().keep_tail(source.pid, bytes);
        }
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&b| b == b'\n') {
            if partial.is_empty() {
                self.line(source, &rest[..end]);
            } else {
                partial.extend_from_slice(&rest[..end.min(LINE_BYTES_MAX)]);
                self.line(source, partial);
                partial.clear();
            }
            rest = &rest[end + 1..];
        }
        // What is longer than a line may be is cut when the line ends.
        let room = (LINE_BYTES_MAX + 1).saturating_sub(partial.len());
        partial.extend_from_slice(&rest[..rest.len().min(room)]);
    }

    fn line(&self, source: &Source, bytes: &[u8]) {
        let mut inner = self.lock();
        let lines = inner.bulkheads.entry(source.bulkhead.clone()).or_default();
        let dropped = lines.begin_second();
        if !lines.may_take(bytes.len()) {
            return;
        }
        let mut text = String::from_utf8_lossy(&bytes[..bytes.len().min(LINE_BYTES_MAX)]).into_owned();
        if bytes.len() > LINE_BYTES_MAX {
            text.push_str(" [cut]");
        }
        let object = json!({
            "at": rfc3339(SystemTime::now()), "bulkhead": &*source.bulkhead, "pid": source.pid,
            "stream": source.stream, "line": &text,
        });
        lines.keep(line(&object).into());
        drop(inner);
        let Source { bulkhead, pid, stream } = source;
        if dropped > 0 {
            tracing::warn!(target: WORKER_TARGET, %bulkhead, dropped, "lines of output were dropped");
        }
        if logging::is_json() {
            // JSON escapes it where it must.
            tracing::info!(target: WORKER_TARGET, %bulkhead, pid, stream, "{text}");
        } else {
            tracing::info!(target: WORKER_TARGET, %bulkhead, pid, stream, "{}", text.escape_debug());
        }
    }

    /// The lines kept of a bulkhead, as JSON objects, and the way to those that come.
    pub fn follow(&self, bulkhead: &str, limit: usize) -> (Vec<Arc<str>>, broadcast::Receiver<Arc<str>>) {
        let mut inner = self.lock();
        let lines = inner.bulkheads.entry(bulkhead.into()).or_default();
        let skip = lines.kept.len().saturating_sub(limit);
        let live = lines.live.get_or_insert_with(|| broadcast::channel(512).0);
        (lines.kept.iter().skip(skip).cloned().collect(), live.subscribe())
    }

    /// The end of what a process wrote to its standard error.
    pub fn tail(&self, pid: u32) -> Option<String> {
        let inner = self.lock();
        let bytes: Vec<u8> = inner.tails.get(&pid)?.iter().copied().collect();
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Inner {
    /// What an earlier process of this number said is not this one's.
    fn begin(&mut self, pid: u32) {
        self.speaking.insert(pid);
        if let Some(tail) = self.tails.get_mut(&pid) {
            tail.clear();
        }
    }

    fn keep_tail(&mut self, pid: u32, bytes: &[u8]) {
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
    /// Returns how many lines were dropped in the second that has ended, if one has.
    fn begin_second(&mut self) -> u64 {
        let now = Instant::now();
        if self.second.is_some_and(|began| now.duration_since(began).as_secs() < 1) {
            return 0;
        }
        self.second = Some(now);
        self.lines_this_second = 0;
        self.bytes_this_second = 0;
        std::mem::take(&mut self.dropped)
    }

    fn may_take(&mut self, bytes: usize) -> bool {
        self.lines_this_second = self.lines_this_second.saturating_add(1);
        self.bytes_this_second = self.bytes_this_second.saturating_add(bytes);
        let may = self.lines_this_second <= LINES_PER_SECOND && self.bytes_this_second <= BYTES_PER_SECOND;
        self.dropped += u64::from(!may);
        may
    }

    fn keep(&mut self, line: Arc<str>) {
        self.bytes += line.len();
        self.kept.push_back(line.clone());
        while self.kept.len() > LINES_MAX || self.bytes > LINES_BYTES_MAX {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.bytes -= oldest.len();
        }
        if self.live.as_ref().is_some_and(|live| live.send(line).is_err()) {
            // The last follower has gone.
            self.live = None;
        }
    }
}

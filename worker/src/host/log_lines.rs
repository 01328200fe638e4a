//! Forwards the output of jobs' programs to the log. All programs of a host share the host's standard error, from which
//! the supervisor reads lines. [`LogLines`] ends a program's last line, and never mixes output of two programs in one
//! line.

use std::io::{self, Stderr, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bulkhead_shared::limits::OUTPUT_LINE_BYTES_MAX;

/// Maximum number of bytes kept of a line that has not ended. The extra byte shows the supervisor that the line must be
/// truncated.
const UNFINISHED_BYTES_MAX: usize = OUTPUT_LINE_BYTES_MAX + 1;

/// State of the log that all programs of a host share.
#[derive(Clone, Default)]
pub(super) struct SharedLog(Arc<Mutex<LogState>>);

#[derive(Default)]
struct LogState {
    /// Number of streams that have written something and can still write.
    streams: usize,
    /// Stream whose unfinished line is at the end of the log.
    open_line: Option<u64>,
    next_stream: u64,
}

/// Output of one program on one stream. Dropping this value ends the last line.
pub(super) struct LogLines<W: Write = Stderr> {
    shared: SharedLog,
    log: W,
    /// Number of this stream, or `None` if nothing has been written yet.
    stream: Option<u64>,
    /// Beginning of the line that has not ended and has not been forwarded.
    unfinished: Vec<u8>,
}

impl LogLines {
    pub(super) fn new(shared: &SharedLog) -> Self {
        Self::to(shared, io::stderr())
    }
}

impl SharedLog {
    fn lock(&self) -> MutexGuard<'_, LogState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W: Write> LogLines<W> {
    fn to(shared: &SharedLog, log: W) -> Self {
        Self { shared: shared.clone(), log, stream: None, unfinished: Vec::new() }
    }

    /// Forwards output. If another program is writing to the log, keeps the beginning of an unfinished line. Otherwise,
    /// the beginning is forwarded, because the host could be killed before the line ends. Ignores errors, because a job
    /// must not fail if the log cannot be written.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let shared = self.shared.clone();
        let mut state = shared.lock();
        let stream = *self.stream.get_or_insert_with(|| {
            state.streams += 1;
            state.next_stream += 1;
            state.next_stream
        });
        let whole_lines = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
        let is_open = state.open_line == Some(stream);
        let forwards_all = state.open_line.is_none_or(|_| is_open) && state.streams == 1;
        let (now, later) = match whole_lines {
            _ if forwards_all => (bytes, &[][..]),
            0 if is_open => (bytes, &[][..]),
            end => bytes.split_at(end),
        };
        if !now.is_empty() {
            self.unfinished.extend_from_slice(now);
            self.forward(&mut state);
            state.open_line = (!now.ends_with(b"\n")).then_some(stream);
        }
        let room = UNFINISHED_BYTES_MAX.saturating_sub(self.unfinished.len());
        self.unfinished.extend_from_slice(&later[..later.len().min(room)]);
    }

    /// Writes the kept bytes, and first ends the unfinished line of another stream. The caller sets `open_line`.
    fn forward(&mut self, state: &mut LogState) {
        if state.open_line.is_some() && state.open_line != self.stream {
            self.unfinished.insert(0, b'\n');
        }
        let _ = self.log.write_all(&self.unfinished);
        self.unfinished.clear();
    }
}

impl<W: Write> Drop for LogLines<W> {
    fn drop(&mut self) {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if self.stream.is_none() {
            return;
        }
        if !self.unfinished.is_empty() || state.open_line == self.stream {
            self.unfinished.push(b'\n');
            self.forward(&mut state);
            state.open_line = None;
        }
        state.streams -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Log<'a>(&'a std::cell::RefCell<Vec<u8>>);

    impl Write for Log<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.borrow_mut().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_concurrent_programs_are_not_mixed() {
        let (log, shared) = (std::cell::RefCell::new(Vec::new()), SharedLog::default());
        let mut first = LogLines::to(&shared, Log(&log));
        let mut second = LogLines::to(&shared, Log(&log));
        first.write(b"one\n\xff\0");
        second.write(b"tw");
        first.write(b"end\n\nleft");
        second.write(b"o\n");
        drop(second);
        first.write(b"");
        drop(first);
        assert_eq!(*log.borrow(), b"one\n\xff\0end\n\ntwo\nleft\n");
    }

    #[test]
    fn unfinished_line_is_forwarded_while_no_other_program_writes() {
        let (log, shared) = (std::cell::RefCell::new(Vec::new()), SharedLog::default());
        let mut first = LogLines::to(&shared, Log(&log));
        first.write(b"continue? ");
        assert_eq!(*log.borrow(), b"continue? ");
        let mut second = LogLines::to(&shared, Log(&log));
        second.write(b"two\n");
        first.write(b"[y/N]");
        drop(first);
        drop(second);
        let mut third = LogLines::to(&shared, Log(&log));
        third.write(b"last");
        assert_eq!(*log.borrow(), b"continue? \ntwo\n[y/N]\nlast");
        drop(third);
        assert_eq!(shared.lock().streams, 0);
    }

    #[test]
    fn endless_line_is_cut() {
        let (log, shared) = (std::cell::RefCell::new(Vec::new()), SharedLog::default());
        let mut other = LogLines::to(&shared, io::sink());
        other.write(b"\n");
        let mut lines = LogLines::to(&shared, Log(&log));
        for _ in 0..100 {
            lines.write(&[b'x'; 1000]);
            assert!(lines.unfinished.len() <= UNFINISHED_BYTES_MAX);
        }
        lines.write(b"\nnext");
        drop(lines);
        assert_eq!(*log.borrow(), [vec![b'x'; UNFINISHED_BYTES_MAX], b"\nnext\n".to_vec()].concat());
    }
}

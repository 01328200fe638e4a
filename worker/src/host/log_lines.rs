//! Forwards the output of a job's program to the log. All programs of a host share the host's standard error, from which
//! the supervisor reads lines. [`LogLines`] therefore forwards only whole lines, so that a line never contains output of
//! two programs.

use std::io::{self, Stderr, Write};

use bulkhead_shared::limits::OUTPUT_LINE_BYTES_MAX;

/// Maximum number of bytes kept of a line that has not ended. The extra byte shows the supervisor that the line must be
/// truncated.
const UNFINISHED_BYTES_MAX: usize = OUTPUT_LINE_BYTES_MAX + 1;

/// Output of one program on one stream. Dropping this value ends the last line.
pub(super) struct LogLines<W: Write = Stderr> {
    log: W,
    /// Beginning of the line that has not ended.
    unfinished: Vec<u8>,
}

impl LogLines {
    pub(super) fn new() -> Self {
        Self::to(io::stderr())
    }
}

impl<W: Write> LogLines<W> {
    fn to(log: W) -> Self {
        Self { log, unfinished: Vec::new() }
    }

    /// Forwards the lines that end in `bytes`, and keeps the rest. Ignores errors, because a job must not fail if the
    /// log cannot be written.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
        let (lines, rest) = bytes.split_at(end);
        if !lines.is_empty() {
            self.unfinished.extend_from_slice(lines);
            self.forward();
        }
        let room = UNFINISHED_BYTES_MAX.saturating_sub(self.unfinished.len());
        self.unfinished.extend_from_slice(&rest[..rest.len().min(room)]);
    }

    /// Writes the kept bytes. One call, because other jobs of the host write to the same log.
    fn forward(&mut self) {
        let _ = self.log.write_all(&self.unfinished);
        self.unfinished.clear();
    }
}

impl<W: Write> Drop for LogLines<W> {
    fn drop(&mut self) {
        if !self.unfinished.is_empty() {
            self.unfinished.push(b'\n');
            self.forward();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_concurrent_programs_are_not_mixed() {
        let log = std::cell::RefCell::new(Vec::new());
        struct Log<'a>(&'a std::cell::RefCell<Vec<u8>>);
        impl Write for Log<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.borrow_mut().write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (mut first, mut second) = (LogLines::to(Log(&log)), LogLines::to(Log(&log)));
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
    fn endless_line_is_cut() {
        let mut log = Vec::new();
        let mut lines = LogLines::to(&mut log);
        for _ in 0..100 {
            lines.write(&[b'x'; 1000]);
            assert!(lines.unfinished.len() <= UNFINISHED_BYTES_MAX);
        }
        lines.write(b"\nnext");
        drop(lines);
        assert_eq!(log, [vec![b'x'; UNFINISHED_BYTES_MAX], b"\nnext\n".to_vec()].concat());
    }
}

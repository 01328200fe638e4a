//! Blocking reads and writes on standard streams. An inherited descriptor can be non-blocking. For example, if an asyncio
//! program sets `O_NONBLOCK`, the flag applies to all processes that share the stream.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;

/// A stream whose reads and writes wait until the descriptor is ready, even if the descriptor is non-blocking.
#[derive(Debug)]
pub struct Blocking<T>(pub T);

impl<T: AsFd> Blocking<T> {
    /// Calls `attempt` until it returns something other than `EAGAIN`. Waits for `readiness` after each `EAGAIN`.
    fn retry<R>(
        &mut self,
        readiness: PollFlags,
        mut attempt: impl FnMut(&mut T) -> io::Result<R>,
    ) -> io::Result<R> {
        loop {
            match attempt(&mut self.0) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    retry_on_intr(|| poll(&mut [PollFd::new(&self.0, readiness)], None))?;
                }
                result => return result,
            }
        }
    }
}

impl<T: AsFd + Read> Read for Blocking<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.retry(PollFlags::IN, |stream| stream.read(buffer))
    }
}

impl<T: AsFd + Write> Write for Blocking<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.retry(PollFlags::OUT, |stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.retry(PollFlags::OUT, Write::flush)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::ioctl_fionbio;

    use super::*;

    #[test]
    fn non_blocking_pipe_loses_no_bytes() {
        let (reader, writer) = io::pipe().unwrap();
        ioctl_fionbio(&reader, true).unwrap();
        ioctl_fionbio(&writer, true).unwrap();
        let bytes: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_ne_bytes).collect();
        let mut received = Vec::new();
        std::thread::scope(|scope| {
            let mut writer = Blocking(writer);
            let bytes = &bytes;
            scope.spawn(move || writer.write_all(bytes).unwrap());
            Blocking(reader).read_to_end(&mut received).unwrap();
        });
        assert!(received == bytes);
    }

    #[test]
    fn closed_pipe_ends_the_wait() {
        let (reader, mut writer) = io::pipe().unwrap();
        ioctl_fionbio(&writer, true).unwrap();
        while writer.write(&[0; 4096]).is_ok() {}
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| Blocking(writer).write_all(b"x"));
            drop(reader);
            assert_eq!(blocked.join().unwrap().unwrap_err().kind(), ErrorKind::BrokenPipe);
        });
    }
}

//! Writes an outbox's queued bytes to an in-process connection. The client and the data plane call this for such
//! connections. [`Outbox::flush`] writes to sockets.

use std::io;

use super::{BufferPool, FILE_CHUNK_BYTES_MAX, Outbox, Segment};
use crate::in_process::Endpoint;

impl Outbox {
    /// Writes as many queued bytes as the in-process connection accepts. Returns true if all bytes were written. For
    /// sockets, [`Outbox::flush`] does the same.
    pub fn flush_in_process(&mut self, end: &Endpoint, pool: &mut BufferPool) -> io::Result<bool> {
        while self.bytes > 0 {
            let written = match &self.segments[0] {
                Segment::Bytes(bytes) => end.write(&bytes[self.sent..]),
                Segment::Shared(bytes) => end.write(&bytes[self.sent..]),
                Segment::File(file, bytes) => {
                    let mut chunk = vec![0; (bytes - self.sent).min(FILE_CHUNK_BYTES_MAX)];
                    match rustix::io::pread(file, &mut chunk, self.sent as u64) {
                        // Reports an error, because the file is shorter than announced.
                        Ok(0) => Err(rustix::io::Errno::IO),
                        Ok(count) => end.write(&chunk[..count]),
                        Err(error) => Err(error),
                    }
                }
            };
            match written {
                Ok(count) => self.advance(count, pool),
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

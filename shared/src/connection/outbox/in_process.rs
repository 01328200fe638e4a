//! Sending within the process.

use std::io;

use super::{BufferPool, FILE_PIECE_BYTES, Outbox, Segment};
use crate::in_process::End;

impl Outbox {
    /// Writes as much as the other end has room for. Returns true if nothing is left. The in-process form of
    /// [`Outbox::flush`].
    pub fn flush_in_process(&mut self, end: &End, pool: &mut BufferPool) -> io::Result<bool> {
        while self.bytes > 0 {
            let written = match &self.segments[0] {
                Segment::Bytes(bytes) => end.write(&bytes[self.sent..]),
                Segment::File(file, bytes) => {
                    let mut piece = vec![0; (bytes - self.sent).min(FILE_PIECE_BYTES)];
                    match rustix::io::pread(file, &mut piece, self.sent as u64) {
                        // The file is shorter than announced.
                        Ok(0) => Err(rustix::io::Errno::IO),
                        Ok(count) => end.write(&piece[..count]),
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

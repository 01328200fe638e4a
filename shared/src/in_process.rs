//! Connects an embedded supervisor with clients in the same process, without a socket. Each direction is a bounded,
//! ordered stream of bytes and files. The endpoints wake each other through wakers, without system calls. `connection`
//! encodes and decodes the frames.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

/// Maximum number of unread bytes per direction. Matches the send buffer size of a socket that carries large payloads.
const UNREAD_BYTES_MAX: usize = 1024 * 1024;

/// Maximum number of unread writes that contain files, per direction.
const UNREAD_FILES_MAX: usize = 4;

/// Maximum capacity that a buffer keeps when it becomes empty, in bytes.
const SPARE_BYTES_MAX: usize = 32 * 1024;

/// An endpoint of an in-process connection. Dropping an endpoint closes the connection.
///
/// ```
/// use bulkhead_shared::in_process;
///
/// let (here, there) = in_process::pair();
/// here.write(b"word")?;
/// let mut buffer = [0; 10];
/// assert_eq!(there.read(&mut buffer, &mut Vec::new()), Ok(4));
/// assert_eq!(there.read(&mut buffer, &mut Vec::new()), Err(rustix::io::Errno::AGAIN));
/// drop(here);
/// assert_eq!(there.read(&mut buffer, &mut Vec::new()), Ok(0));
/// # Ok::<(), rustix::io::Errno>(())
/// ```
pub struct Endpoint {
    pipes: Arc<[Mutex<Pipe>; 2]>,
    /// Index, in `pipes`, of the pipe for incoming data. The other pipe carries outgoing data.
    incoming_index: usize,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Endpoint")
    }
}

#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Total number of bytes read so far.
    read: u64,
    /// Unread files. Each entry contains the files of one write, and the stream position of the first byte of this
    /// write.
    files: VecDeque<(u64, Vec<OwnedFd>)>,
    reader: Side,
    writer: Side,
    is_closed: bool,
}

/// The reading or writing side of a pipe, with its waker.
#[derive(Default)]
struct Side {
    waker: Option<Waker>,
    is_waiting: bool,
}

impl Pipe {
    fn free_bytes(&self) -> usize {
        UNREAD_BYTES_MAX.saturating_sub(self.bytes.len())
    }
}

impl Side {
    /// Registers a waker and returns the previous one. The caller must release the lock before dropping the previous
    /// waker, because that can drop a task that owns other endpoints.
    #[must_use = "the returned waker must be dropped after the lock is released"]
    fn set_waker(&mut self, waker: &Waker) -> Option<Waker> {
        self.is_waiting = true;
        if self.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            return None;
        }
        self.waker.replace(waker.clone())
    }

    /// Returns the waker if this side's reader or writer is waiting. The caller must release the lock before calling
    /// the waker.
    fn waker_if_waiting(&mut self) -> Option<Waker> {
        if std::mem::take(&mut self.is_waiting) { self.waker.clone() } else { None }
    }
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Creates two connected endpoints.
pub fn pair() -> (Endpoint, Endpoint) {
    let pipes: Arc<[Mutex<Pipe>; 2]> = Arc::default();
    (Endpoint { pipes: pipes.clone(), incoming_index: 0 }, Endpoint { pipes, incoming_index: 1 })
}

impl Endpoint {
    fn incoming(&self) -> MutexGuard<'_, Pipe> {
        self.pipes[self.incoming_index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outgoing(&self) -> MutexGuard<'_, Pipe> {
        self.pipes[1 - self.incoming_index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads without blocking. Returns `Ok(0)` at the end of the stream, and `AGAIN` if there is nothing to
    /// read. Files that accompany the bytes replace the contents of `files`. A single read returns the files
    /// of at most one write.
    pub fn read(&self, buffer: &mut [u8], files: &mut Vec<OwnedFd>) -> rustix::io::Result<usize> {
        let mut pipe = self.incoming();
        if pipe.bytes.is_empty() {
            pipe.reader.is_waiting = true;
            return if pipe.is_closed { Ok(0) } else { Err(Errno::AGAIN) };
        }
        let mut count = buffer.len().min(pipe.bytes.len());
        let read = pipe.read;
        if let Some(&(at, _)) = pipe.files.front()
            && at < read + count as u64
        {
            *files = pipe.files.pop_front().map(|(_, files)| files).unwrap_or_default();
            if let Some(&(next, _)) = pipe.files.front() {
                count = count.min((next - read) as usize);
            }
        }
        let (first, second) = pipe.bytes.as_slices();
        let split = count.min(first.len());
        buffer[..split].copy_from_slice(&first[..split]);
        buffer[split..count].copy_from_slice(&second[..count - split]);
        pipe.read += count as u64;
        if count == pipe.bytes.len() {
            pipe.bytes.clear();
            pipe.bytes.shrink_to(SPARE_BYTES_MAX);
            // The buffer is empty, so the reader is marked as waiting. The next write then wakes the reader, even if
            // the reader does not try to read again.
            pipe.reader.is_waiting = true;
        } else {
            pipe.bytes.drain(..count);
        }
        // Wakes the writer when half of the buffer is free, rather than after every read.
        let writer =
            if pipe.bytes.len() <= UNREAD_BYTES_MAX / 2 { pipe.writer.waker_if_waiting() } else { None };
        drop(pipe);
        wake(writer);
        Ok(count)
    }

    /// Writes as many bytes as the buffer has room for. Returns `AGAIN` if the buffer is full, and `PIPE` if
    /// the connection is closed.
    pub fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let mut pipe = self.outgoing();
        if pipe.is_closed {
            return Err(Errno::PIPE);
        }
        let count = bytes.len().min(pipe.free_bytes());
        if count == 0 && !bytes.is_empty() {
            pipe.writer.is_waiting = true;
            return Err(Errno::AGAIN);
        }
        pipe.bytes.extend(&bytes[..count]);
        let reader = pipe.reader.waker_if_waiting();
        drop(pipe);
        wake(reader);
        Ok(count)
    }

    /// Writes all bytes. The files accompany the first byte. Returns `AGAIN` if the buffer has too little room, or if
    /// the reader has too many unread writes with files. In either case, the endpoint's waker is not called when there
    /// is room again.
    pub fn write_with_files(&self, bytes: &[u8], files: Vec<OwnedFd>) -> rustix::io::Result<()> {
        let mut pipe = self.outgoing();
        if pipe.is_closed {
            return Err(Errno::PIPE);
        }
        if pipe.free_bytes() < bytes.len() || pipe.files.len() >= UNREAD_FILES_MAX {
            return Err(Errno::AGAIN);
        }
        let at = pipe.read + pipe.bytes.len() as u64;
        pipe.files.push_back((at, files));
        pipe.bytes.extend(bytes);
        let reader = pipe.reader.waker_if_waiting();
        drop(pipe);
        wake(reader);
        Ok(())
    }

    /// Returns the number of bytes that have arrived but have not been read.
    pub fn readable_bytes(&self) -> usize {
        self.incoming().bytes.len()
    }

    /// Returns true if the connection was closed by either endpoint.
    pub fn is_closed(&self) -> bool {
        self.incoming().is_closed
    }

    /// Registers a waker for both directions, and calls it immediately if unread bytes are available or the connection
    /// is closed. After a read that emptied the buffer, the waker is called when more bytes arrive or the stream ends.
    /// After a write that found the buffer full, the waker is called when the buffer has room again.
    pub fn watch(&self, waker: &Waker) {
        let mut incoming = self.incoming();
        let _replaced_reader = incoming.reader.set_waker(waker);
        let is_readable = !incoming.bytes.is_empty() || incoming.is_closed;
        drop(incoming);
        let _replaced_writer = self.outgoing().writer.waker.replace(waker.clone());
        if is_readable {
            waker.wake_by_ref();
        }
    }

    /// Returns `Ready` when bytes can be read, or at the end of the stream.
    pub fn poll_readable(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut pipe = self.incoming();
        if !pipe.bytes.is_empty() || pipe.is_closed {
            return Poll::Ready(());
        }
        let replaced = pipe.reader.set_waker(context.waker());
        drop(pipe);
        drop(replaced);
        Poll::Pending
    }

    /// Returns `Ready` when at least half of the buffer is free, or when the connection is closed.
    pub fn poll_writable(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut pipe = self.outgoing();
        if pipe.bytes.len() <= UNREAD_BYTES_MAX / 2 || pipe.is_closed {
            return Poll::Ready(());
        }
        let replaced = pipe.writer.set_waker(context.waker());
        drop(pipe);
        drop(replaced);
        Poll::Pending
    }

    /// Closes both directions. The other endpoint can still read the bytes that this endpoint has already written.
    pub fn close(&self) {
        let mut wakers = Vec::new();
        for (at, pipe) in self.pipes.iter().enumerate() {
            let mut pipe = pipe.lock().unwrap_or_else(PoisonError::into_inner);
            if at == self.incoming_index {
                pipe.bytes = VecDeque::new();
                pipe.files.clear();
            }
            if !std::mem::replace(&mut pipe.is_closed, true) {
                // Calls all wakers, including wakers that are not marked as waiting, because `watch` registers a
                // writer's waker without this mark.
                wakers.extend(pipe.reader.waker.take());
                wakers.extend(pipe.writer.waker.take());
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Counts {
        fn take(&self) -> usize {
            self.0.swap(0, Ordering::SeqCst)
        }
    }

    fn read(end: &Endpoint, most: usize) -> rustix::io::Result<(Vec<u8>, usize)> {
        let (mut buffer, mut files) = (vec![0; most], Vec::new());
        let count = end.read(&mut buffer, &mut files)?;
        buffer.truncate(count);
        Ok((buffer, files.len()))
    }

    #[test]
    fn bytes_arrive_in_order_within_buffer_limit() {
        let (here, there) = pair();
        let bytes: Vec<u8> = (0..3 * UNREAD_BYTES_MAX + 77).map(|at| (at % 251) as u8).collect();
        let (mut sent, mut found) = (0, Vec::new());
        while found.len() < bytes.len() {
            while let Ok(count) = here.write(&bytes[sent..]) {
                sent += count;
                assert!(there.readable_bytes() <= UNREAD_BYTES_MAX);
                if sent == bytes.len() {
                    break;
                }
            }
            found.extend(read(&there, 70_001).unwrap().0);
        }
        assert!(found == bytes);
        assert_eq!(read(&there, 1), Err(Errno::AGAIN));
        assert!(
            there.incoming().bytes.capacity() <= SPARE_BYTES_MAX,
            "an idle connection keeps only a small buffer"
        );
    }

    #[test]
    fn endpoint_is_woken_only_if_it_can_make_progress() {
        let (here, there) = pair();
        let (ours, theirs) = (Arc::<Counts>::default(), Arc::<Counts>::default());
        there.watch(&theirs.clone().into());
        here.watch(&ours.clone().into());
        here.write(b"a").unwrap();
        here.write(b"b").unwrap();
        assert_eq!(theirs.take(), 1, "the reader has not read yet");
        assert_eq!(read(&there, 1).unwrap().0, b"a");
        here.write(b"c").unwrap();
        assert_eq!(theirs.take(), 0, "some bytes are unread");
        assert_eq!(read(&there, 10).unwrap().0, b"bc");
        here.write(b"d").unwrap();
        assert_eq!(theirs.take(), 1);
        let full = vec![0; UNREAD_BYTES_MAX];
        assert_eq!(here.write(&full), Ok(UNREAD_BYTES_MAX - 1));
        assert_eq!(here.write(&full), Err(Errno::AGAIN));
        read(&there, 1000).unwrap();
        assert_eq!(ours.take(), 0, "too little space is free");
        read(&there, UNREAD_BYTES_MAX / 2).unwrap();
        assert_eq!(ours.take(), 1);
    }

    /// A task that owns an endpoint. The endpoint is dropped with the task.
    struct Task(#[expect(dead_code, reason = "the endpoint is dropped with the task")] Endpoint);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {}
    }

    /// Replacing a waker can drop the last reference to the other endpoint, which closes the connection.
    #[test]
    fn replaced_waker_can_close_the_other_endpoint() {
        let waits: [fn(&Endpoint, &mut Context<'_>) -> Poll<()>; 2] =
            [Endpoint::poll_readable, Endpoint::poll_writable];
        for wait in waits {
            let (here, there) = pair();
            while here.write(&[0; 4096]).is_ok() {}
            let task = Waker::from(Arc::new(Task(there)));
            assert!(wait(&here, &mut Context::from_waker(&task)).is_pending());
            drop(task);
            let waker = Waker::from(Arc::<Counts>::default());
            assert!(wait(&here, &mut Context::from_waker(&waker)).is_pending());
            assert!(here.is_closed());
        }
    }

    #[test]
    fn bytes_written_before_close_can_be_read() {
        let (here, there) = pair();
        let theirs = Arc::<Counts>::default();
        there.watch(&theirs.clone().into());
        here.write(b"the end").unwrap();
        theirs.take();
        drop(here);
        assert!(theirs.take() >= 1, "a reader with unread bytes is woken too");
        assert_eq!(there.write(b"late"), Err(Errno::PIPE));
        assert_eq!(read(&there, 100).unwrap().0, b"the end");
        assert_eq!(read(&there, 100).unwrap().0, b"");
    }

    #[test]
    fn files_arrive_with_the_bytes_they_were_sent_with() {
        let open = || std::fs::File::open("/dev/null").unwrap().into();
        let (here, there) = pair();
        here.write(b"before ").unwrap();
        here.write_with_files(b"one ", vec![open(), open()]).unwrap();
        here.write_with_files(b"two", vec![open()]).unwrap();
        assert_eq!(read(&there, 3), Ok((b"bef".to_vec(), 0)));
        assert_eq!(read(&there, 100), Ok((b"ore one ".to_vec(), 2)), "a read returns the files of one write");
        assert_eq!(there.incoming().files.len(), 1);
        there.close();
        assert_eq!(there.incoming().files.len(), 0);
    }
}

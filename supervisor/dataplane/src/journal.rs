//! Creates and reads journals, which are memory files in which workers store replies that they have not sent yet (see
//! [`bulkhead_shared::journal`]). Each link to a worker has at most one. Policy reads the counters to decide which jobs
//! the worker has begun.
//!
//! Only the counters at the beginning of a journal are mapped here. The frames are copied after the worker has exited,
//! and are as untrusted as bytes from the worker's link.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_linux::shared_words::SharedWords;
use bulkhead_policy::JobJournal;
use bulkhead_shared::crash_record;
use bulkhead_shared::journal::{
    BEGUN_OFFSET, FRAMES_BYTES_MAX, FRAMES_OFFSET, HEARTBEAT_OFFSET, JOURNAL_BYTES, RECALLED_OFFSET,
};
use bulkhead_shared::worker_protocol::capability;

use rustix::fs::{FallocateFlags, SeekFrom};

use super::memory_files::sealed_file;

/// A journal, which is a memory file shared with a worker.
pub(super) struct Journal {
    pub(super) file: OwnedFd,
    words: Arc<SharedWords>,
    /// True if the worker writes a crash record into the journal file when it crashes.
    has_crash_record: bool,
    /// True if the worker can write the stacks of its threads into the file.
    has_stack_text: bool,
}

/// Maximum size of the stacks that a worker writes as text, in bytes.
const STACK_TEXT_BYTES_MAX: usize = 64 * 1024;

/// Counters in a worker's journal, in the form in which policy reads them.
#[derive(Debug)]
struct JournalClaims(Arc<SharedWords>);

impl JobJournal for JournalClaims {
    fn begun(&self) -> u64 {
        self.0.load(BEGUN_OFFSET / WORD_BYTES)
    }

    fn recall(&self, up_to: u64) -> u64 {
        self.0.store_then_load((RECALLED_OFFSET / WORD_BYTES, up_to), BEGUN_OFFSET / WORD_BYTES)
    }
}

const WORD_BYTES: usize = size_of::<u64>();

impl Journal {
    /// Creates a journal with enough space for a worker with these [capabilities](capability). Unwritten parts
    /// of the file use no memory.
    pub(super) fn make(capabilities: u64) -> io::Result<Self> {
        let has_crash_record = capabilities & capability::CRASH_RECORDS != 0;
        let has_stack_text = capabilities & capability::STACK_TEXT != 0;
        let bytes = if has_crash_record || has_stack_text { crash_record::FILE_BYTES } else { JOURNAL_BYTES };
        let file = sealed_file(c"journal", bytes as u64)?;
        let words = Arc::new(SharedWords::map(&file, FRAMES_OFFSET / WORD_BYTES)?);
        Ok(Self { file, words, has_crash_record, has_stack_text })
    }

    /// Prepares the file for the stacks that the worker writes as text. Returns a duplicate of the file for the keeper,
    /// or `None` if the worker does not write stacks.
    pub(super) fn expect_stack_text(&self) -> Option<OwnedFd> {
        let erased = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, bytes) = (crash_record::RECORD_OFFSET as u64, crash_record::RECORD_BYTES as u64);
        let prepared = self.has_stack_text
            && rustix::fs::fallocate(&self.file, erased, start, bytes).is_ok()
            && rustix::fs::seek(&self.file, SeekFrom::Start(start)).is_ok();
        prepared.then(|| self.file.try_clone().ok()).flatten()
    }

    /// Returns the stacks that the worker wrote as text. The text is untrusted.
    pub(super) fn stack_text(&self) -> Option<String> {
        if !self.has_stack_text {
            return None;
        }
        let mut text = vec![0; STACK_TEXT_BYTES_MAX];
        let filled = self.fill(&mut text, crash_record::RECORD_OFFSET);
        let end = text[..filled].iter().position(|byte| *byte == 0).unwrap_or(filled);
        (end > 0).then(|| String::from_utf8_lossy(&text[..end]).into_owned())
    }

    pub(super) fn claims(&self) -> Box<dyn JobJournal> {
        Box::new(JournalClaims(self.words.clone()))
    }

    /// Returns the journal file if it has space for a crash record.
    pub(super) fn into_crash_record(self) -> Option<OwnedFd> {
        self.has_crash_record.then_some(self.file)
    }

    /// Returns the time since the worker's last heartbeat. Returns `None` if there has been no heartbeat, or if the
    /// heartbeat's timestamp is in the future.
    pub(super) fn since_beat(&self) -> Option<Duration> {
        let beat = Some(self.words.load(HEARTBEAT_OFFSET / WORD_BYTES)).filter(|beat| *beat > 0)?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        now.checked_sub(Duration::from_nanos(beat))
    }

    /// Returns the number of jobs that the worker has started, and the frames in the journal. A worker can write any
    /// value, so the size of the frames is limited.
    pub(super) fn read(&self) -> (u64, Vec<u8>) {
        let mut head = [0; FRAMES_OFFSET];
        let filled = self.fill(&mut head, 0);
        let number = |at: usize| head[at..].first_chunk().map_or(0, |number| u64::from_le_bytes(*number));
        let (said, begun) = (number(0), number(BEGUN_OFFSET));
        if filled < head.len() {
            return (begun, Vec::new());
        }
        let count = usize::try_from(said).unwrap_or(usize::MAX).min(FRAMES_BYTES_MAX);
        let mut frames = vec![0; count];
        let filled = self.fill(&mut frames, FRAMES_OFFSET);
        frames.truncate(filled);
        (begun, frames)
    }

    /// Fills `bytes` with the contents of the journal, starting at offset `from`. Returns the number of bytes
    /// read.
    fn fill(&self, bytes: &mut [u8], from: usize) -> usize {
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::pread(&self.file, &mut bytes[filled..], (from + filled) as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
        }
        filled
    }
}

//! The worker's side of the journal, which holds unsent replies and survives this process. Also claims jobs that the
//! supervisor can recall. `link` and `pool` call it; only the supervisor reads replies from the journal, after the
//! worker has exited. See [`bulkhead_shared::journal`] for the format.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use bulkhead_shared::journal::{
    BEGUN_OFFSET, FRAMES_BYTES_MAX, FRAMES_OFFSET, HEARTBEAT_OFFSET, JOURNAL_BYTES, RECALLED_OFFSET,
};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Counters in the journal that decide, for each job, whether the worker runs it or the supervisor recalls it. The
/// references are valid until the process exits.
#[derive(Clone, Copy)]
pub(crate) struct Claims {
    begun: &'static AtomicU64,
    recalled: &'static AtomicU64,
}

impl Claims {
    /// Returns true if the supervisor recalled the job with this arrival number.
    pub(crate) fn is_recalled(self, arrival: u64) -> bool {
        arrival <= u64::from_le(self.recalled.load(Ordering::Acquire))
    }

    /// Recalls all jobs up to the arrival number `up_to`, as the supervisor would. Returns the arrival number of
    /// the last job that has begun.
    #[cfg(test)]
    pub(crate) fn recall(self, up_to: u64) -> u64 {
        self.recalled.store(up_to.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        u64::from_le(self.begun.load(Ordering::Acquire))
    }

    /// Claims the job with this arrival number, so that the supervisor can no longer recall it. Returns false
    /// if the supervisor has already recalled the job. Must not be called by two threads at the same time.
    pub(crate) fn begin(self, arrival: u64) -> bool {
        self.begun.store(arrival.to_le(), Ordering::Release);
        // The supervisor stores `recalled` before it loads `begun`. The fences ensure that at least one side
        // sees the value stored by the other.
        fence(Ordering::SeqCst);
        !self.is_recalled(arrival)
    }
}

/// The mapped journal. The mapping is never removed.
pub(crate) struct Journal {
    base: NonNull<u8>,
    used: usize,
}

// SAFETY: the mapping is not tied to a thread, and only the owner of this value writes frames to it.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Send for Journal {}

impl Journal {
    /// Maps the journal file received from the supervisor.
    pub(crate) fn map(file: &OwnedFd) -> io::Result<Self> {
        // The file is larger than the journal if it also has room for a crash record.
        if rustix::fs::fstat(file)?.st_size < JOURNAL_BYTES as i64 {
            return Err(io::Error::other("the journal has an unexpected size"));
        }
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: this creates a new mapping at an address that the kernel chooses. The file is at least
        // as long as the mapping and is sealed against shrinking.
        #[expect(unsafe_code, reason = "mmap(2) has no safe form")]
        let base = unsafe { mmap(null, JOURNAL_BYTES, protection, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("the journal was mapped at address 0"))?;
        Ok(Self { base, used: 0 })
    }

    /// Returns the location in the journal where the worker stores its last heartbeat time. The reference is valid
    /// for the lifetime of the process.
    pub(crate) fn heartbeat_time(&self) -> &'static AtomicU64 {
        self.number::<HEARTBEAT_OFFSET>()
    }

    /// Returns the counters of begun and recalled jobs.
    pub(crate) fn claims(&self) -> Claims {
        Claims { begun: self.number::<BEGUN_OFFSET>(), recalled: self.number::<RECALLED_OFFSET>() }
    }

    fn number<const AT: usize>(&self) -> &'static AtomicU64 {
        const { assert!(AT.is_multiple_of(8) && AT + 8 <= FRAMES_OFFSET) };
        // SAFETY: the number is aligned and within the mapping, which is never removed.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            AtomicU64::from_ptr(self.base.as_ptr().add(AT).cast())
        }
    }

    /// Appends a frame. Returns false if the frame does not fit.
    pub(crate) fn append(&mut self, frame: &[u8]) -> bool {
        if frame.len() > FRAMES_BYTES_MAX - self.used {
            return false;
        }
        // SAFETY: the frame fits in the mapping, as checked above, and nothing else in this process points to
        // the written bytes.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            let at = self.base.as_ptr().add(FRAMES_OFFSET + self.used);
            std::ptr::copy_nonoverlapping(frame.as_ptr(), at, frame.len());
        }
        self.used += frame.len();
        self.publish_length();
        true
    }

    /// Removes all frames. Called once the frames have been sent.
    pub(crate) fn clear(&mut self) {
        if self.used > 0 {
            self.used = 0;
            self.publish_length();
        }
    }

    /// Publishes the number of valid bytes to the supervisor. Must be called after writing the bytes.
    fn publish_length(&self) {
        // SAFETY: the mapping begins with the number of valid bytes, is page-aligned, and lives as long as
        // the process.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        let count = unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast()) };
        count.store((self.used as u64).to_le(), Ordering::Release);
    }
}

//! Answers that have not been sent yet, where they outlive this process: see [`bulkhead_shared::journal`].

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use bulkhead_shared::journal::{BEAT_AT, BEGUN_AT, FRAMES_AT, FRAMES_BYTES_MAX, JOURNAL_BYTES, TAKEN_AT};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// The numbers by which a worker and the supervisor agree on who has a job. They live as long as the process.
#[derive(Clone, Copy)]
pub(crate) struct Claims {
    begun: &'static AtomicU64,
    taken: &'static AtomicU64,
}

impl Claims {
    /// Whether the job that came as this one was taken back.
    pub(crate) fn is_taken(self, arrival: u64) -> bool {
        arrival <= u64::from_le(self.taken.load(Ordering::Acquire))
    }

    /// Takes back as the supervisor does: what has begun then.
    #[cfg(test)]
    pub(crate) fn take_back(self, up_to: u64) -> u64 {
        self.taken.store(up_to.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        u64::from_le(self.begun.load(Ordering::Acquire))
    }

    /// Begins the next job that was not taken back. Returns false if the supervisor took the job back just then. Only
    /// one thread at a time may call this.
    pub(crate) fn begin(self, arrival: u64) -> bool {
        self.begun.store(arrival.to_le(), Ordering::Release);
        // The supervisor stores its number and then loads ours.
        fence(Ordering::SeqCst);
        !self.is_taken(arrival)
    }
}

/// The journal in this process's memory, as long as the process lives.
pub(crate) struct Journal {
    base: NonNull<u8>,
    used: usize,
}

// SAFETY: the mapping belongs to no thread, and only the owner of this value writes to it.
#[expect(unsafe_code, reason = "a pointer to a mapping of our own")]
unsafe impl Send for Journal {}

impl Journal {
    /// Maps the file that the supervisor lent.
    pub(crate) fn map(file: OwnedFd) -> io::Result<Self> {
        if rustix::fs::fstat(&file)?.st_size != JOURNAL_BYTES as i64 {
            return Err(io::Error::other("the journal has an odd size"));
        }
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        // SAFETY: a new mapping at an address of the kernel's choice, of a file as long as that, which is sealed
        // against becoming shorter.
        #[expect(unsafe_code, reason = "mmap(2) has no safe form")]
        let base = unsafe { mmap(null, JOURNAL_BYTES, protection, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { base, used: 0 })
    }

    /// Where this process says when it was last alive. It stays as long as the process.
    pub(crate) fn beat(&self) -> &'static AtomicU64 {
        self.number::<BEAT_AT>()
    }

    /// The numbers by which this process announces begun jobs and the supervisor announces jobs taken back.
    pub(crate) fn claims(&self) -> Claims {
        Claims { begun: self.number::<BEGUN_AT>(), taken: self.number::<TAKEN_AT>() }
    }

    fn number<const AT: usize>(&self) -> &'static AtomicU64 {
        const { assert!(AT.is_multiple_of(8) && AT + 8 <= FRAMES_AT) };
        // SAFETY: within the mapping, aligned, and never unmapped.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        unsafe {
            AtomicU64::from_ptr(self.base.as_ptr().add(AT).cast())
        }
    }

    /// Keeps a frame. Returns whether there was room for it.
    pub(crate) fn keep(&mut self, frame: &[u8]) -> bool {
        if frame.len() > FRAMES_BYTES_MAX - self.used {
            return false;
        }
        // SAFETY: within the mapping, as was just seen, and nothing else in this process points there.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        unsafe {
            let at = self.base.as_ptr().add(FRAMES_AT + self.used);
            std::ptr::copy_nonoverlapping(frame.as_ptr(), at, frame.len());
        }
        self.used += frame.len();
        self.count();
        true
    }

    /// What was kept has been sent.
    pub(crate) fn clear(&mut self) {
        if self.used > 0 {
            self.used = 0;
            self.count();
        }
    }

    /// Says how much counts, after it is there.
    fn count(&self) {
        // SAFETY: the mapping begins with this number, aligned to a page, and lives as long as the process.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        let count = unsafe { AtomicU64::from_ptr(self.base.as_ptr().cast()) };
        count.store((self.used as u64).to_le(), Ordering::Release);
    }
}

//! Accesses 64-bit numbers at the start of a memory file that is shared with an untrusted process. The data plane's
//! `journal` uses them to read a worker's counters and to recall jobs. The other process can store any value, so the
//! caller must check each number.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

/// The beginning of a memory file, mapped as an array of 64-bit numbers in little-endian order.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping is not tied to a thread, and all accesses are atomic.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Send for SharedWords {}
// SAFETY: as for `Send`.
#[expect(unsafe_code, reason = "the pointer refers to a mapping that this value owns")]
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the first `count` numbers of a file. The file must be sealed against shrinking. Without the seal, another
    /// process that shares the file could kill this process by truncating the file.
    ///
    /// Fails if `mmap(2)` fails, if the file is too short or not sealed, or if the kernel lacks the memory barrier for
    /// [`SharedWords::store_then_load`].
    pub fn map(file: impl AsFd, count: usize) -> io::Result<Self> {
        let bytes = count * size_of::<u64>();
        let is_sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !is_sealed || rustix::fs::fstat(&file)?.st_size < bytes as i64 {
            return Err(io::Error::other("the memory file is too short or not sealed"));
        }
        if !membarrier_query().contains_command(MembarrierCommand::GlobalExpedited) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address chosen by the kernel. The file is at least as long as the
        // mapping, and the seal prevents it from shrinking.
        #[expect(unsafe_code, reason = "mmap(2) has no safe wrapper")]
        let base = unsafe { mmap(null, bytes, protection, flags, file, 0) }?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| io::Error::other("the kernel mapped the memory file at address 0"))?;
        Ok(Self { base, count })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count, "index {at} is out of range for {} words", self.count);
        // SAFETY: the address is within the mapping, which is page-aligned and lives as long as this value. All
        // accesses by this process are atomic. Accesses by the other process are outside this program's memory model.
        #[expect(unsafe_code, reason = "this value owns the mapping")]
        unsafe {
            self.base.add(at).as_ref()
        }
    }

    /// Loads the number at index `at`.
    pub fn load(&self, at: usize) -> u64 {
        u64::from_le(self.word(at).load(Ordering::Acquire))
    }

    /// Stores a number at index `at`, then loads the number at index `from`.
    ///
    /// If the process that shares the file stores at `from` and then loads at `at`, at least one of the two sees the
    /// other's store. The other process must prevent its load from moving before its store, with a fence or by
    /// registering for global expedited barriers (`membarrier(2)`).
    pub fn store_then_load(&self, (at, number): (usize, u64), from: usize) -> u64 {
        self.word(at).store(number.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        // The barrier cannot fail, because `map` has checked that the kernel supports it.
        let _ = membarrier(MembarrierCommand::GlobalExpedited);
        self.load(from)
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by this value with this length, and nothing borrows from the mapping any longer.
        #[expect(unsafe_code, reason = "munmap(2) has no safe wrapper")]
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.count * size_of::<u64>()) };
    }
}

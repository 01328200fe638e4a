//! Numbers at the beginning of a file in memory that another process, which is not trusted, writes as well.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

/// A mapping of the first bytes of such a file, as numbers of 64 bits in little-endian.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping belongs to no thread, and is read and written by atomic accesses alone.
#[expect(unsafe_code, reason = "a pointer to a mapping of our own")]
unsafe impl Send for SharedWords {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer to a mapping of our own")]
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps `count` numbers. The file must be sealed against becoming shorter: otherwise the other process could end
    /// this one by making it so.
    ///
    /// Errors: that of `mmap(2)`; a file that is too short or not sealed; a kernel without the memory barrier that
    /// [`SharedWords::store_then_load`] takes.
    pub fn map(file: impl AsFd, count: usize) -> io::Result<Self> {
        let bytes = count * size_of::<u64>();
        let is_sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !is_sealed || rustix::fs::fstat(&file)?.st_size < bytes as i64 {
            return Err(io::Error::other("the file is too short, or not sealed"));
        }
        if !membarrier_query().contains_command(MembarrierCommand::GlobalExpedited) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that has and keeps these bytes.
        #[expect(unsafe_code, reason = "mmap(2) has no safe form")]
        let base = unsafe { mmap(null, bytes, protection, flags, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { base, count })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < self.count, "word {at} of {}", self.count);
        // SAFETY: within the mapping, which is page-aligned and lives as long as this value. All accesses of this
        // process are atomic; accesses of the other process are outside of this program's memory model.
        #[expect(unsafe_code, reason = "a mapping of our own")]
        unsafe {
            self.base.add(at).as_ref()
        }
    }

    /// The number at this place.
    pub fn load(&self, at: usize) -> u64 {
        u64::from_le(self.word(at).load(Ordering::Acquire))
    }

    /// Stores a number at one place, then loads the number at another. If the other process stores there and loads
    /// here, at least one side sees the other's store. For this the other process must keep its store before its load,
    /// by a fence or by registering for global expedited barriers (`membarrier(2)`).
    pub fn store_then_load(&self, (at, number): (usize, u64), from: usize) -> u64 {
        self.word(at).store(number.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        // It was there when this was mapped.
        let _ = membarrier(MembarrierCommand::GlobalExpedited);
        self.load(from)
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and nothing borrows from it any more.
        #[expect(unsafe_code, reason = "munmap(2) has no safe form")]
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.count * size_of::<u64>()) };
    }
}

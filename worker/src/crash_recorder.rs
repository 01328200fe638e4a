//! Records the state of a thread that receives a fatal signal; see [`bulkhead_shared::crash_record`]. `server` installs
//! the recorder if the supervisor has lent a journal. The recorder resolves no names, because the supervisor does so in
//! a separate process.
//!
//! The signal handler makes only system calls, and never allocates memory or takes a lock. It copies memory
//! with `pwrite(2)`, which returns an error where a copy in user space would fault again. After the record is
//! written, the previous action for the signal takes effect, so that the worker dies as it would without a
//! recorder. If several threads crash, the first one records its state, and the others wait.
#![expect(unsafe_code, reason = "there is no safe way to install a signal handler")]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use bulkhead_shared::crash_record::{
    FILE_BYTES, HEADER_BYTES, Header, MACHINE, MAPS_BYTES_MAX, MAPS_OFFSET, RECORD_OFFSET, RECORDED_SIGNALS,
    REGISTERS_MAX, STACK_BYTES_MAX, STACK_OFFSET,
};
use libc::{c_int, c_void};
use rustix::fs::{Mode, OFlags, Timespec};
use rustix::process::{Resource, getrlimit};

/// Size of the x86-64 red zone in bytes. Functions can use this area below the stack pointer without allocating a
/// stack frame.
const RED_ZONE_BYTES: usize = 128;

const PAGE_BYTES: usize = 4096;

/// Interval and maximum number of a thread's waits for the death of the process by another thread's signal.
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const WAITS_MAX: u32 = 100;

/// State that the signal handler needs.
struct Recorder {
    /// PID of the worker process that received the welcome from the supervisor.
    process: u32,
    file: BorrowedFd<'static>,
    /// Device and inode number of the file. A different file at the same descriptor number means that the worker's code
    /// has closed the descriptor and the number has been reused.
    identity: (u64, u64),
    maps: BorrowedFd<'static>,
    /// Signal actions that were set before the recorder's own, in the order of [`RECORDED_SIGNALS`].
    previous: [libc::sigaction; RECORDED_SIGNALS.len()],
    /// Thread that records its state, or 0.
    thread: AtomicI32,
    /// Scratch buffer for the thread that writes the record. Signal stacks are too small for a buffer of this size.
    buffer: UnsafeCell<[u8; PAGE_BYTES]>,
}

// SAFETY: only the thread that has changed `thread` from 0 uses `buffer`. The pointers in `previous` are never
// dereferenced.
unsafe impl Send for Recorder {}
// SAFETY: as for `Send`.
unsafe impl Sync for Recorder {}

static RECORDER: OnceLock<Recorder> = OnceLock::new();

/// Installs handlers for fatal signals, which write crash records to `file`, the memory file that also contains the
/// journal. Does nothing if the file has no room for a record or is not writable. The worker then runs without a crash
/// recorder.
pub(crate) fn install(file: OwnedFd) {
    let is_writable = getrlimit(Resource::Fsize).current.is_none_or(|bytes| bytes >= FILE_BYTES as u64);
    let Ok(found) = rustix::fs::fstat(&file) else { return };
    if found.st_size < FILE_BYTES as i64 || !is_writable {
        return;
    }
    let Ok(maps) = rustix::fs::open("/proc/self/maps", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    else {
        return;
    };
    let mut previous = [EMPTY_ACTION; RECORDED_SIGNALS.len()];
    for (signal, action) in RECORDED_SIGNALS.iter().zip(&mut previous) {
        // SAFETY: reads the current action for the signal into a valid place.
        if unsafe { libc::sigaction(*signal, std::ptr::null(), action) } != 0 {
            return;
        }
    }
    let recorder = Recorder {
        process: std::process::id(),
        file: forever(file),
        identity: (found.st_dev, found.st_ino),
        maps: forever(maps),
        previous,
        thread: AtomicI32::new(0),
        buffer: UnsafeCell::new([0; PAGE_BYTES]),
    };
    if RECORDER.set(recorder).is_err() {
        return;
    }
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handle;
    let action = libc::sigaction {
        sa_sigaction: handler as *const () as usize,
        sa_flags: libc::SA_SIGINFO | libc::SA_ONSTACK,
        ..EMPTY_ACTION
    };
    for signal in RECORDED_SIGNALS {
        // SAFETY: the handler makes only calls that are safe in a signal handler.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// A signal action without a handler and with an empty mask.
// SAFETY: all fields are numbers or optional pointers, for which zero is valid.
const EMPTY_ACTION: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };

/// Leaks a descriptor so that it stays open until the process exits.
fn forever(descriptor: OwnedFd) -> BorrowedFd<'static> {
    // SAFETY: nothing closes the descriptor, unless the worker's code closes descriptors that it does not own.
    unsafe { BorrowedFd::borrow_raw(descriptor.into_raw_fd()) }
}

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(recorder) = RECORDER.get() else { return };
    // SAFETY: the kernel passes valid pointers to a handler with `SA_SIGINFO`.
    let (info, context) = unsafe { (&*info, &*context.cast::<libc::ucontext_t>()) };
    // Processes forked by the worker's code inherit the handler, but must not write a record.
    let is_worker = rustix::process::getpid().as_raw_nonzero().get().cast_unsigned() == recorder.process;
    if is_worker {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        match recorder.thread.compare_exchange(0, thread, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => recorder.record(signal, info, context),
            Err(recording) if recording != thread => wait_for_death(),
            Err(_) => {}
        }
    }
    if let Some(index) = RECORDED_SIGNALS.iter().position(|recorded| *recorded == signal) {
        // The handler in Rust's standard library ignores a SIGSEGV or SIGBUS that a process has sent. The worker would
        // continue, and the report about a later crash would contain this record.
        let is_ignored = info.si_code <= 0 && matches!(signal, libc::SIGSEGV | libc::SIGBUS);
        let action = if is_ignored { &EMPTY_ACTION } else { &recorder.previous[index] };
        // SAFETY: the kernel returned this action in `install`, or it is the default action.
        unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
    }
    resend(signal, info);
}

/// Waits while another thread writes the record and its signal kills the process. The time is limited, because the
/// previous action for that signal may let the process continue.
fn wait_for_death() {
    for _ in 0..WAITS_MAX {
        let _ = rustix::thread::nanosleep(&WAIT);
    }
}

/// Sends the signal to this thread again, unless the signal recurs by itself. A fault recurs when the handler returns.
/// A signal from a process does not recur. Neither does a breakpoint, because the thread continues after the
/// breakpoint.
fn resend(signal: c_int, info: &libc::siginfo_t) {
    if info.si_code <= 0 || signal == libc::SIGTRAP {
        // SAFETY: sends a signal to this thread, which receives it when the handler returns.
        unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), signal) };
    }
}

impl Recorder {
    fn record(&self, signal: c_int, info: &libc::siginfo_t, context: &libc::ucontext_t) {
        let identity = rustix::fs::fstat(self.file).map(|found| (found.st_dev, found.st_ino));
        // A write beyond the limit would replace the signal with SIGXFSZ.
        let is_writable = getrlimit(Resource::Fsize).current.is_none_or(|bytes| bytes >= FILE_BYTES as u64);
        if identity != Ok(self.identity) || !is_writable {
            return;
        }
        // SAFETY: only the thread that records uses the buffer.
        let buffer = unsafe { &mut *self.buffer.get() };
        let maps_bytes = self.copy_maps(buffer);
        let (registers, stack_pointer) = registers(context);
        let stack_start = (stack_pointer as usize).saturating_sub(RED_ZONE_BYTES);
        let stack_bytes = self.copy_stack(stack_start);
        // SAFETY: `si_addr` only reads a field, which every signal has.
        let address = unsafe { info.si_addr() };
        let header = Header {
            machine: MACHINE,
            signal,
            code: info.si_code,
            thread: rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned(),
            address: if info.si_code > 0 { address as u64 } else { 0 },
            maps_bytes: maps_bytes as u32,
            stack_bytes: stack_bytes as u32,
            stack_start: stack_start as u64,
            registers,
            ..Header::EMPTY
        };
        if let Some(bytes) = buffer.first_chunk_mut::<HEADER_BYTES>() {
            header.encode(bytes);
            let _ = rustix::io::pwrite(self.file, bytes, RECORD_OFFSET as u64);
        }
    }

    /// Copies the list of memory mappings into the record. Returns the number of bytes copied.
    fn copy_maps(&self, buffer: &mut [u8; PAGE_BYTES]) -> usize {
        let mut copied = 0;
        while copied < MAPS_BYTES_MAX {
            let part = &mut buffer[..PAGE_BYTES.min(MAPS_BYTES_MAX - copied)];
            let Ok(count @ 1..) = rustix::io::pread(self.maps, &mut *part, copied as u64) else { break };
            let offset = (RECORD_OFFSET + MAPS_OFFSET + copied) as u64;
            let Ok(count @ 1..) = rustix::io::pwrite(self.file, &part[..count], offset) else { break };
            copied += count;
        }
        copied
    }

    /// Copies the stack page by page, from `start` to the end of the mapping or up to the maximum size. Returns the
    /// number of bytes copied. If the stack has overflowed into its guard page, the first pages cannot be read.
    fn copy_stack(&self, start: usize) -> usize {
        let (mut at, mut end) = (0, 0);
        while at < STACK_BYTES_MAX {
            let address = start.saturating_add(at);
            let length = (PAGE_BYTES - address % PAGE_BYTES).min(STACK_BYTES_MAX - at);
            let offset = (RECORD_OFFSET + STACK_OFFSET + at) as libc::off_t;
            let file = std::os::fd::AsRawFd::as_raw_fd(&self.file.as_fd());
            // SAFETY: the kernel reads the bytes, and returns an error if they cannot be read. The address is not
            // dereferenced here.
            let copied = unsafe { libc::pwrite(file, address as *const c_void, length, offset) };
            at += length;
            match copied {
                1.. => end = at,
                _ if end > 0 => break,
                _ => {}
            }
        }
        end
    }
}

/// Returns the registers and the stack pointer. The registers are in the order that the crash record uses.
#[cfg(target_arch = "x86_64")]
fn registers(context: &libc::ucontext_t) -> ([u64; REGISTERS_MAX], u64) {
    let mut registers = [0; REGISTERS_MAX];
    // The kernel's first 17 registers are in the order of the record.
    for (register, value) in registers.iter_mut().zip(context.uc_mcontext.gregs.iter().take(17)) {
        *register = value.cast_unsigned();
    }
    (registers, context.uc_mcontext.gregs[libc::REG_RSP as usize].cast_unsigned())
}

/// Returns the registers and the stack pointer. The registers are in the order that the crash record uses.
#[cfg(target_arch = "aarch64")]
fn registers(context: &libc::ucontext_t) -> ([u64; REGISTERS_MAX], u64) {
    let mut registers = [0; REGISTERS_MAX];
    registers[..31].copy_from_slice(&context.uc_mcontext.regs);
    registers[31] = context.uc_mcontext.sp;
    registers[32] = context.uc_mcontext.pc;
    (registers, context.uc_mcontext.sp)
}

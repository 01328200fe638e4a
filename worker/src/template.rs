//! A template (`start.mode = "fork"`): this process initialises once and forks the bulkhead's workers, each as a child
//! of the keeper. It runs no job itself.
//!
//! A process is forked as its calling thread alone. So a template has one thread, or says which others it has and
//! ends. What a worker does not inherit: the template's socket, parent-death signal, session and being a subreaper.
#![expect(unsafe_code, reason = "fork as a sibling has no safe form, and descriptors change their numbers")]

use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use bulkhead_shared::limits::cut;
use bulkhead_shared::template_protocol::{
    MESSAGE_BYTES_MAX, ORDER_DESCRIPTORS, Order, TEMPLATE_VARIABLE, TEXT_BYTES_MAX, Word,
};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use rustix::process::{Pid, Signal};

/// Threads that are named where there should be one.
const THREADS_NAMED_MAX: usize = 8;

/// Whether this process is to be a template.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os(TEMPLATE_VARIABLE).is_some()
}

/// The template's end of the keeper's socket.
pub(crate) struct Template {
    socket: OwnedFd,
    keeper: Option<Pid>,
}

impl Template {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, keeper: rustix::process::getppid() }
    }

    fn say(&self, word: Word<'_>) -> rustix::io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let length = word.encode(&mut bytes);
        let send = || rustix::net::send(&self.socket, &bytes[..length], SendFlags::NOSIGNAL);
        rustix::io::retry_on_intr(send).map(drop)
    }

    pub(crate) fn status(&self, text: &str) {
        // The keeper is gone, and this process goes with it.
        let _ = self.say(Word::Status(cut(text, TEXT_BYTES_MAX)));
    }

    pub(crate) fn extend(&self, more: Duration) {
        let more_ms = u32::try_from(more.as_millis()).unwrap_or(u32::MAX);
        let _ = self.say(Word::Extend(more_ms));
    }

    pub(crate) fn refuse(&self, text: &str) {
        let _ = self.say(Word::Refused(cut(text, TEXT_BYTES_MAX)));
    }

    /// Says that it is ready, and forks a worker for each order. Returns the worker's link in a worker, and in the
    /// template only an error.
    pub(crate) fn serve(&self, mut before_fork: impl FnMut()) -> Result<OwnedFd, String> {
        self.check_threads()?;
        let failed = |error: Errno| format!("the keeper's socket: {error}");
        self.say(Word::Ready).map_err(failed)?;
        loop {
            let (worker, descriptors) = self.next().map_err(failed)?;
            before_fork();
            self.check_threads()?;
            // What is not written would be written twice.
            let _ = io::stdout().flush();
            match fork() {
                Ok(0) => {
                    if self.become_worker(worker, &descriptors).is_err() {
                        // The keeper has given it up.
                        exit(1)
                    }
                    let [link, ..] = descriptors;
                    return Ok(link);
                }
                Ok(pid) => self.say(Word::Forked { worker, pid }).map_err(failed)?,
                Err(errno) => {
                    let word = Word::NotForked { worker, errno: errno.raw_os_error() };
                    self.say(word).map_err(failed)?;
                }
            }
        }
    }

    /// Waits for an order.
    fn next(&self) -> rustix::io::Result<(u64, [OwnedFd; ORDER_DESCRIPTORS])> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ORDER_DESCRIPTORS))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = rustix::io::retry_on_intr(|| {
                let slices = &mut [IoSliceMut::new(&mut bytes)];
                rustix::net::recvmsg(&self.socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC)
            })?;
            if received.bytes == 0 {
                return Err(Errno::CONNRESET);
            }
            let mut descriptors = Vec::with_capacity(ORDER_DESCRIPTORS);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    descriptors.extend(files);
                }
            }
            let Some(Order { worker }) = Order::decode(&bytes[..received.bytes]) else { continue };
            match descriptors.try_into() {
                Ok(descriptors) => return Ok((worker, descriptors)),
                // It may not have that many.
                Err(_) => self.say(Word::NotForked { worker, errno: Errno::MFILE.raw_os_error() })?,
            }
        }
    }

    /// The kernel says how many threads there are; their names are for people.
    fn check_threads(&self) -> Result<(), String> {
        // With the folder itself and its own folders, the links of `/proc/self/task` are two more than threads.
        let count = rustix::fs::stat(c"/proc/self/task").map(|found| found.st_nlink as usize);
        if count == Ok(3) {
            return Ok(());
        }
        let threads = std::fs::read_dir("/proc/self/task");
        let threads = threads.map_err(|error| format!("failed to read its threads: {error}"))?;
        let own = rustix::thread::gettid().as_raw_nonzero().get().to_string();
        let others: Vec<String> = threads
            .flatten()
            .filter(|entry| entry.file_name().to_str() != Some(&own))
            .take(THREADS_NAMED_MAX)
            .filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok())
            .map(|name| format!("'{}'", name.trim().escape_debug()))
            .collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(format!(
            "`start.mode = \"fork\"` takes a process of one thread, and `init` or `before_fork` left {} beside it: \
             start threads in `after_fork`, or leave `start.mode` out",
            others.join(", ")
        ))
    }

    /// What a forked process does before it is a worker like others.
    fn become_worker(
        &self,
        worker: u64,
        [_, stdout, stderr]: &[OwnedFd; ORDER_DESCRIPTORS],
    ) -> Result<(), Errno> {
        rustix::process::setsid()?;
        // The kernel takes any number but zero for yes.
        rustix::process::set_child_subreaper(Some(Pid::INIT))?;
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        if rustix::process::getppid() != self.keeper {
            return Err(Errno::SRCH);
        }
        put_at(stdout, libc::STDOUT_FILENO)?;
        put_at(stderr, libc::STDERR_FILENO)?;
        reseed()?;
        self.say(Word::Born { worker })
    }
}

/// Forks a child of this process's parent. Returns 0 in the child.
fn fork() -> Result<u32, Errno> {
    const NONE: usize = 0;
    let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as usize;
    // SAFETY: without a stack and without shared memory this is a fork; this process has one thread, so that no lock
    // is held in the child by a thread that it does not have.
    match unsafe { libc::syscall(libc::SYS_clone, flags, NONE, NONE, NONE, NONE) } {
        -1 => Err(Errno::from_raw_os_error(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
        pid => Ok(pid as u32),
    }
}

/// Makes a number mean this descriptor.
fn put_at(descriptor: &OwnedFd, number: RawFd) -> Result<(), Errno> {
    // SAFETY: what had the number is standard output or error.
    match unsafe { libc::dup2(descriptor.as_raw_fd(), number) } {
        -1 => Err(Errno::from_raw_os_error(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
        _ => Ok(()),
    }
}

/// The C library's random numbers, which all workers would draw alike.
fn reseed() -> Result<(), Errno> {
    let mut seed = [0; 8];
    // SAFETY: the buffer has that many bytes.
    if unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) } != seed.len() as isize {
        return Err(Errno::IO);
    }
    let [a, b, c, d, e, f, g, h] = seed;
    let (low, high) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
    // SAFETY: they change state of the C library, which no other thread is there to use.
    unsafe {
        libc::srand(low);
        libc::srand48(high.into());
    }
    Ok(())
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process, without a thing being run that the template registered.
    unsafe { libc::_exit(code) }
}

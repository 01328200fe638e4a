//! Implements templates (`start.mode = "fork"`). A template is initialised once and then forks the workers of a
//! bulkhead, but runs no jobs. Each worker becomes a child of the template's parent, which is the keeper or the first
//! process in the template's PID namespace. The keeper orders each fork, and kills a template that takes too long.
//!
//! `fork` copies only the calling thread, so a template must have a single thread. A template with more
//! threads reports the thread names and exits. A forked worker replaces the template's socket with its link,
//! and sets a new session, parent-death signal and child-subreaper attribute.
//!
//! In a sandbox, each worker applies additional Landlock rules, so that it cannot reach the template or other
//! workers. Before the first job, the seal (`seal.rs`) takes away the ability to fork siblings, which only
//! the template needs.
#![expect(unsafe_code, reason = "there is no safe way to fork a sibling or to renumber descriptors")]

use std::collections::VecDeque;
use std::ffi::CString;
use std::io::{self, IoSliceMut, Write};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use bulkhead_linux::errno;
use bulkhead_shared::template_protocol::{
    FORK_DESCRIPTORS, MESSAGE_BYTES_MAX, TEMPLATE_VARIABLE, TemplateMessage, TemplateOrder, folder_name,
};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags};
use rustix::process::{Pid, Signal};

use crate::log;
use crate::ownership;
use crate::rules::{FOLDER_VARIABLES, Rules, Temporary};

/// Maximum number of threads to name in the error message about surplus threads.
const THREADS_NAMED_MAX: usize = 8;

/// Maximum number of entries to remove from temporary folders before the template checks for the next order.
const REMOVED_ENTRIES_MAX: usize = 256;

/// Returns true if this process was started as a template.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os(TEMPLATE_VARIABLE).is_some()
}

/// A template, with a socket to the keeper.
pub(crate) struct Template {
    /// Socket that connects the template to the keeper. In a forked worker, the link reuses the socket's descriptor
    /// number.
    socket: ManuallyDrop<OwnedFd>,
    /// Parent of this process. The parent is the keeper or the first process in the PID namespace.
    parent: Option<Pid>,
    /// Grants from which the Landlock rules of each forked worker are created.
    rules: Rules,
}

/// Name of a failed step, and the error number.
type StepError = (&'static str, Errno);

fn in_step(step: &'static str) -> impl Fn(Errno) -> StepError {
    move |errno| (step, errno)
}

fn fork_failed(worker: u64, errno: Errno, step: &str) -> TemplateMessage<'_> {
    TemplateMessage::ForkFailed { worker, errno: errno.raw_os_error(), step }
}

impl Template {
    /// Reads the Landlock rules that the keeper has passed on standard input.
    pub(crate) fn new(socket: OwnedFd) -> Result<Self, String> {
        let failed = |error: io::Error| format!("failed to read the sandbox rules from the keeper: {error}");
        let rules = Rules::inherited().map_err(failed)?;
        if rules.has_rules() {
            let nothing = std::fs::File::open("/dev/null").map_err(failed)?;
            duplicate_to(&nothing.into(), libc::STDIN_FILENO).map_err(|errno| failed(errno.into()))?;
            if rules.exposes_temporary_files() {
                log::line(
                    "workers can access each other's temporary directories: check the paths in `read` and \
                     `write`",
                );
            }
        }
        Ok(Self { socket: ManuallyDrop::new(socket), parent: rustix::process::getppid(), rules })
    }

    fn send(&self, message: TemplateMessage<'_>) -> rustix::io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let length = message.encode(&mut bytes);
        let send = || rustix::net::send(&*self.socket, &bytes[..length], SendFlags::NOSIGNAL);
        rustix::io::retry_on_intr(send).map(drop)
    }

    /// Sends a message to the keeper. Does nothing in a process that was forked during initialisation.
    pub(crate) fn report(&self, message: TemplateMessage<'_>) {
        if ownership::is_worker() {
            // Fails only if the keeper is gone, in which case the kernel kills this process.
            let _ = self.send(message);
        }
    }

    /// Reports that the template is ready, then forks a worker for each fork order. In each forked worker,
    /// returns the link. In the template, returns only on an error.
    pub(crate) fn serve(&self, mut before_fork: impl FnMut()) -> Result<OwnedFd, String> {
        self.check_threads()?;
        let failed = |error: Errno| format!("failed to communicate with the keeper: {error}");
        self.send(TemplateMessage::Ready).map_err(failed)?;
        let template = rustix::process::getpid();
        let mut removals = VecDeque::new();
        loop {
            let ((worker, secret), descriptors) = self.next_fork(&mut removals).map_err(failed)?;
            before_fork();
            self.check_threads()?;
            // Flushes the buffered output before the fork, because otherwise both processes would write it.
            let _ = io::stdout().flush();
            match fork() {
                Ok(0) => {
                    if let Err((step, errno)) = self.become_worker((worker, secret), template, &descriptors) {
                        // Fails only if the keeper is gone.
                        let _ = self.send(fork_failed(worker, errno, step));
                        // SAFETY: the call terminates the process. `_exit` does not run exit handlers that
                        // the template has registered.
                        unsafe { libc::_exit(1) }
                    }
                    let [link, ..] = descriptors;
                    return self.replace_socket(&link).map_err(failed);
                }
                Ok(pid) => self.send(TemplateMessage::Forked { worker, pid }).map_err(failed)?,
                Err(errno) => self.send(fork_failed(worker, errno, "")).map_err(failed)?,
            }
        }
    }

    /// Replaces the socket to the keeper with the worker's link. The link gets the same descriptor number, which is
    /// stored in the environment variable `BULKHEAD_LINK_FD`.
    fn replace_socket(&self, link: &OwnedFd) -> Result<OwnedFd, Errno> {
        let number = self.socket.as_raw_fd();
        // SAFETY: nothing in this process uses the socket any more, and `self.socket` is never dropped.
        errno::check(unsafe { libc::dup3(link.as_raw_fd(), number, libc::O_CLOEXEC) })?;
        // SAFETY: `dup3` has just opened this descriptor, and `self.socket` is never dropped.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Waits for an order to fork. Until an order arrives, removes the folders in `removals`.
    fn next_fork(
        &self,
        removals: &mut VecDeque<CString>,
    ) -> rustix::io::Result<((u64, u128), [OwnedFd; FORK_DESCRIPTORS])> {
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FORK_DESCRIPTORS))];
        loop {
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let waits = if removals.is_empty() { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
            let received = rustix::io::retry_on_intr(|| {
                let slices = &mut [IoSliceMut::new(&mut bytes)];
                rustix::net::recvmsg(&*self.socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC | waits)
            });
            let received = match received {
                Err(Errno::AGAIN) => {
                    self.remove_some(removals);
                    continue;
                }
                received => received?,
            };
            if received.bytes == 0 {
                return Err(Errno::CONNRESET);
            }
            let mut descriptors = Vec::with_capacity(FORK_DESCRIPTORS);
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    descriptors.extend(files);
                }
            }
            let (worker, secret) = match TemplateOrder::decode(&bytes[..received.bytes]) {
                Some(TemplateOrder::Fork { worker, secret }) => (worker, secret),
                Some(TemplateOrder::Remove { worker, secret }) => {
                    removals.extend(CString::new(folder_name(worker, secret)));
                    continue;
                }
                None => continue,
            };
            match descriptors.try_into() {
                Ok(descriptors) => return Ok(((worker, secret), descriptors)),
                // Descriptors are missing if this process has reached its descriptor limit.
                Err(_) => self.send(fork_failed(worker, Errno::MFILE, "descriptors"))?,
            }
        }
    }

    /// Removes some entries of the first folder in `removals`, which is the queue of dead workers' folders.
    fn remove_some(&self, removals: &mut VecDeque<CString>) {
        let (Some(name), Some(temporary)) = (removals.front(), self.rules.temporary()) else {
            return removals.clear();
        };
        if temporary.remove(name, REMOVED_ENTRIES_MAX) {
            removals.pop_front();
        }
    }

    /// Returns an error if this process has more than one thread. The error names the other threads.
    fn check_threads(&self) -> Result<(), String> {
        // The link count of `/proc/self/task` is the number of threads plus 2.
        let count = rustix::fs::stat(c"/proc/self/task").map(|found| found.st_nlink as usize);
        if count == Ok(3) {
            return Ok(());
        }
        let threads = std::fs::read_dir("/proc/self/task");
        let threads = threads.map_err(|error| format!("failed to list the threads: {error}"))?;
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
            "`start.mode = \"fork\"` needs a process with a single thread, but `init` or `before_fork` left \
             {}: start threads in `after_fork`, or remove `start.mode`",
            others.join(", ")
        ))
    }

    /// Turns a forked process into a worker.
    fn become_worker(
        &self,
        (worker, secret): (u64, u128),
        template: Pid,
        [_, stdout, stderr]: &[OwnedFd; FORK_DESCRIPTORS],
    ) -> Result<(), StepError> {
        rustix::process::setsid().map_err(in_step("session"))?;
        // Any nonzero value means true.
        rustix::process::set_child_subreaper(Some(Pid::INIT)).map_err(in_step("child subreaper"))?;
        let signal = Some(Signal::KILL);
        rustix::process::set_parent_process_death_signal(signal).map_err(in_step("parent-death signal"))?;
        if rustix::process::getppid() != self.parent {
            return Err(("parent-death signal", Errno::SRCH));
        }
        duplicate_to(stdout, libc::STDOUT_FILENO).map_err(in_step("stdio"))?;
        duplicate_to(stderr, libc::STDERR_FILENO).map_err(in_step("stdio"))?;
        reseed().map_err(in_step("random numbers"))?;
        self.isolate(worker, secret, template)?;
        self.send(TemplateMessage::Started { worker }).map_err(in_step("keeper"))
    }

    /// Creates a temporary folder for this worker, and restricts this process with additional Landlock rules.
    fn isolate(&self, worker: u64, secret: u128, template: Pid) -> Result<(), StepError> {
        if !self.rules.has_rules() {
            return Ok(());
        }
        let temporary = self.rules.temporary();
        let folder = temporary.map(|temporary| {
            let name = folder_name(worker, secret);
            Ok((temporary.path.join(&name), temporary.make(&name)?))
        });
        let folder = folder.transpose().map_err(in_step("temporary directory"))?;
        let failed = |error: io::Error| ("landlock", errno::from_io(&error, Errno::IO));
        let ruleset =
            self.rules.for_program(folder.as_ref().map(|(_, place)| place.as_fd())).map_err(failed)?;
        let hidden_folder = temporary.map(Temporary::hidden_folder).transpose().map_err(failed)?.flatten();
        if let Some(ruleset) = ruleset {
            ruleset.restrict(hidden_folder.as_ref().map(AsFd::as_fd)).map_err(failed)?;
        }
        // Verifies that the rules are enforced: this process must not be able to signal the template.
        match rustix::process::test_kill_process(template) {
            Err(Errno::PERM) => {}
            Err(errno) => return Err(("the worker's template has exited", errno)),
            Ok(()) => return Err(("landlock check: the worker can signal the template", Errno::PERM)),
        }
        if let (Some((path, _)), Some(temporary)) = (&folder, temporary) {
            for variable in FOLDER_VARIABLES {
                if std::env::var_os(variable).is_none_or(|value| value == temporary.path.as_os_str()) {
                    // SAFETY: this process has one thread.
                    unsafe { std::env::set_var(variable, path) };
                }
            }
        }
        Ok(())
    }
}

/// Forks a sibling, which is a child of this process's parent. Returns 0 in the sibling.
fn fork() -> Result<u32, Errno> {
    const NONE: usize = 0;
    let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as usize;
    // SAFETY: without a new stack and without shared memory, `clone` is a fork. This process has one thread,
    // so no lock in the child is held by a thread that does not exist there.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, NONE, NONE, NONE, NONE) };
    errno::check(pid).map(|()| pid as u32)
}

/// Duplicates a descriptor to the given number.
fn duplicate_to(descriptor: &OwnedFd, number: RawFd) -> Result<(), Errno> {
    // SAFETY: `number` is that of a standard stream, which no value in this process owns.
    errno::check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })
}

/// Seeds the C library's random number generators. Otherwise, all workers would generate the same numbers.
fn reseed() -> Result<(), Errno> {
    let mut seed = [0; 8];
    // SAFETY: the buffer has the given length.
    if unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) } != seed.len() as isize {
        return Err(Errno::IO);
    }
    let [a, b, c, d, e, f, g, h] = seed;
    let (low, high) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
    // SAFETY: these calls change global state in the C library, and this process has only one thread.
    unsafe {
        libc::srand(low);
        libc::srand48(high.into());
    }
    Ok(())
}

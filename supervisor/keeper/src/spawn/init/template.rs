//! The first process of a PID namespace that contains a template and the workers forked by the template.
//!
//! The template and the workers are children of this process, because a template forks siblings of itself.
//! Processes that a worker leaves behind become children as well. This process reports each exit to the
//! keeper, and the last report of an iteration also lists the remaining children. The keeper decides which
//! children to kill, because this process knows only which child is the template. When this process exits,
//! the kernel kills all other processes in the namespace.
//!
//! This process is a fork of the keeper, and keeps only the capability to signal the other processes. Its
//! code makes only system calls.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bulkhead_linux::wait::wait4;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::thread::CapabilitySet;

use super::super::{FAILED_EXIT_CODE, exit};
use super::{STATUS_BYTES, become_init, decode, encode};
use crate::protocol::{Exit, Usage};
use crate::wait;

/// File in which the kernel lists a thread's children. Some kernels are built without this file.
const CHILDREN_FILE: &std::ffi::CStr = c"/proc/thread-self/children";

/// Maximum number of children to list in an exit report. A flag in the report says whether there are more.
const CHILDREN_MAX: usize = 4096;

/// Size of the fixed part of an exit report, in bytes. This part contains the PID, the status and resource
/// usage, and the kind of list that follows.
const FIXED_BYTES: usize = 4 + STATUS_BYTES + 1;

/// Maximum size of an exit report, including the list of children, in bytes.
pub(crate) const EXIT_BYTES_MAX: usize = FIXED_BYTES + 4 * CHILDREN_MAX;

/// Maximum number of children to kill with one order. Any further children are listed in the next order.
pub(crate) const NAMED_CHILDREN_MAX: usize = 4096;

const ORDER_BYTES_MAX: usize = 1 + 4 * NAMED_CHILDREN_MAX;

/// Maximum number of orders and maximum number of exits handled per iteration. A job can cause exits faster than this
/// process reports them, so orders are handled first.
const ORDERS_PER_ITERATION: usize = 16;
const EXITS_PER_ITERATION: usize = 64;

/// Maximum time for which an order can keep the other processes in the namespace stopped.
const STOP_TIME_MAX: Duration = Duration::from_millis(250);

/// Maximum duration of one wait for killed processes while the namespace is stopped, and the number of unsuccessful
/// waits after which the remaining processes are resumed. A killed process does not exit immediately if it is waiting
/// for a disk.
const EXIT_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const FAILED_WAITS_MAX: u32 = 8;

/// An order that the keeper sends to the first process of a namespace. Contains PIDs as they are inside the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order<'a> {
    /// Kills the listed children and the process groups that they lead.
    Kill(&'a [u32]),
    /// Kills the template.
    KillTemplate,
    /// Stops all processes, and kills all children except the template and the listed children. Descendants that become
    /// children of the first process in the meantime are killed as well. Then resumes the remaining processes.
    KillAllExcept(&'a [u32]),
}

impl Order<'_> {
    /// Encodes the order. Omits children beyond [`NAMED_CHILDREN_MAX`].
    pub(crate) fn encode(self) -> Vec<u8> {
        let (kind, named): (u8, &[u32]) = match self {
            Self::Kill(named) => (b'K', named),
            Self::KillTemplate => (b'T', &[]),
            Self::KillAllExcept(named) => (b'A', named),
        };
        let numbers = named.iter().take(NAMED_CHILDREN_MAX).flat_map(|pid| pid.to_le_bytes());
        std::iter::once(kind).chain(numbers).collect()
    }
}

/// A report that a child has exited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChildExit {
    /// PID of the child inside the namespace.
    pub(crate) pid: u32,
    pub(crate) exit: Exit,
    pub(crate) usage: Usage,
    /// PIDs of the remaining children, as seen inside the namespace. `None` if they are listed in a later report of the
    /// same iteration.
    pub(crate) children: Option<Vec<u32>>,
    /// True if there might be more children than are listed.
    pub(crate) has_more: bool,
}

/// Values of the last byte in the fixed part of an exit report. The byte says which list follows: a complete one, an
/// incomplete one, or none because another exit report follows.
const ALL_CHILDREN: u8 = 0;
const SOME_CHILDREN: u8 = 1;
const ANOTHER_EXIT: u8 = 2;

impl ChildExit {
    /// Decodes an exit report. Returns `None` if the bytes are malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (pid, rest) = bytes.split_first_chunk()?;
        let (end, rest) = rest.split_first_chunk()?;
        let (&follows, numbers) = rest.split_first()?;
        let (exit, usage) = decode(end)?;
        let (numbers, []) = numbers.as_chunks::<4>() else { return None };
        Some(Self {
            pid: u32::from_le_bytes(*pid),
            exit,
            usage,
            children: (follows != ANOTHER_EXIT)
                .then(|| numbers.iter().map(|number| u32::from_le_bytes(*number)).collect()),
            has_more: follows != ALL_CHILDREN,
        })
    }
}

/// Opens the file in which the kernel lists the children of the calling thread.
pub(crate) fn open_children() -> Result<OwnedFd, Errno> {
    rustix::fs::open(CHILDREN_FILE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Runs the first process of the namespace. `template` is the PID of the child that becomes the template.
pub(crate) fn run(template: u32, socket: &OwnedFd, children: OwnedFd) -> ! {
    let Ok(sigchld) = watch_sigchld() else { exit(FAILED_EXIT_CODE) };
    // Killing requires CAP_KILL, because the processes in the namespace may run as another user. This process cannot
    // kill processes outside, because it sees only the namespace.
    let mut kept = [socket.as_raw_fd(), children.as_raw_fd(), sigchld.as_raw_fd()];
    become_init(CapabilitySet::KILL, &mut kept);
    let init = TemplateInit { template, socket, children, sigchld };
    loop {
        let has_more = init.execute_orders() | (init.reap() == EXITS_PER_ITERATION);
        let mut events = [PollFd::new(socket, PollFlags::IN), PollFd::new(&init.sigchld, PollFlags::IN)];
        match rustix::event::poll(&mut events, has_more.then_some(&Timespec::default())) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => exit(0),
        }
        init.clear_sigchld();
    }
}

/// Creates a descriptor that becomes readable when a child might have exited.
fn watch_sigchld() -> Result<OwnedFd, Errno> {
    // SAFETY: the set is a local variable, which the calls fill and read. Nothing else owns the new descriptor.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        bulkhead_linux::errno::check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        let made = libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
        bulkhead_linux::errno::check(made)?;
        Ok(OwnedFd::from_raw_fd(made))
    }
}

/// State of the first process.
struct TemplateInit<'s> {
    template: u32,
    socket: &'s OwnedFd,
    children: OwnedFd,
    /// Descriptor that becomes readable when a child might have exited.
    sigchld: OwnedFd,
}

impl TemplateInit<'_> {
    /// Reads the pending signal from the `sigchld` descriptor. A single read is enough, because SIGCHLD is not queued
    /// more than once.
    fn clear_sigchld(&self) {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let _ = rustix::io::read(&self.sigchld, &mut info);
    }

    /// Reaps at most `EXITS_PER_ITERATION` exited children and reports their exits. Returns the number of reaped
    /// children. Exits this process when no child is left.
    fn reap(&self) -> usize {
        let (mut count, mut last) = (0, None);
        let has_no_child = loop {
            match wait4(-1, libc::WNOHANG) {
                Ok((0, ..)) => break false,
                // A child stops only if it has asked this process to trace it (`PTRACE_TRACEME`), which only hostile
                // programs do.
                Ok((pid, status, _)) if libc::WIFSTOPPED(status) => kill(pid as i32),
                Ok((pid, status, rusage)) => {
                    let before = last.replace((pid, status, wait::usage(&rusage)));
                    before.iter().for_each(|end| self.report_exit(end, false));
                    count += 1;
                    if count == EXITS_PER_ITERATION {
                        break false;
                    }
                }
                Err(Errno::INTR) => {}
                Err(_) => break true,
            }
        };
        last.iter().for_each(|end| self.report_exit(end, true));
        if has_no_child {
            exit(0)
        }
        count
    }

    /// Reports an exit to the keeper. If `lists` is true, which is the case only for the last report of an iteration,
    /// the report also lists the remaining children.
    fn report_exit(&self, (pid, status, usage): &(u32, i32, Usage), lists: bool) {
        let mut bytes = [0; EXIT_BYTES_MAX];
        let mut length = 0;
        let mut put = |more: &[u8]| {
            bytes[length..length + more.len()].copy_from_slice(more);
            length += more.len();
        };
        put(&pid.to_le_bytes());
        put(&encode(*status, usage));
        let mut numbers = [0; CHILDREN_MAX];
        let (count, follows) = match lists {
            false => (0, ANOTHER_EXIT),
            true => match self.list_children(&mut numbers) {
                (count, true) => (count, SOME_CHILDREN),
                (count, false) => (count, ALL_CHILDREN),
            },
        };
        put(&[follows]);
        numbers[..count].iter().for_each(|number| put(&number.to_le_bytes()));
        let send = || rustix::net::send(self.socket, &bytes[..length], SendFlags::NOSIGNAL);
        if rustix::io::retry_on_intr(send).is_err() {
            // The keeper is gone, so all processes in the namespace must be killed.
            exit(0)
        }
    }

    /// Fills `numbers` with the PIDs of the remaining children. Returns the number of PIDs, and whether there might
    /// be more children.
    fn list_children(&self, numbers: &mut [u32; CHILDREN_MAX]) -> (usize, bool) {
        let (mut count, mut offset, mut number) = (0, 0, 0_u32);
        let mut text = [0; 4096];
        loop {
            let read = rustix::io::retry_on_intr(|| rustix::io::pread(&self.children, &mut text, offset));
            let read = match read {
                // If reading fails, further children might not have been listed.
                Err(_) => return (count, true),
                Ok(0) => return (count, false),
                Ok(read) => read,
            };
            offset += read as u64;
            for byte in &text[..read] {
                match byte {
                    b'0'..=b'9' => number = number.wrapping_mul(10).wrapping_add((byte - b'0').into()),
                    _ if number == 0 => {}
                    _ if count == CHILDREN_MAX => return (count, true),
                    _ => {
                        numbers[count] = number;
                        count += 1;
                        number = 0;
                    }
                }
            }
        }
    }

    /// Executes pending orders. Returns true if there might be more orders.
    fn execute_orders(&self) -> bool {
        let mut bytes = [0; ORDER_BYTES_MAX];
        for _ in 0..ORDERS_PER_ITERATION {
            let received =
                rustix::io::retry_on_intr(|| rustix::net::recv(self.socket, &mut bytes, RecvFlags::DONTWAIT));
            let length = match received {
                Err(Errno::AGAIN) => return false,
                // The keeper is gone, so all processes in the namespace must be killed.
                Ok((0, _)) | Err(_) => exit(0),
                Ok((length, _)) => length.min(ORDER_BYTES_MAX),
            };
            let (named, _) = bytes[1..length].as_chunks::<4>();
            match bytes[0] {
                b'T' => kill_child(self.template),
                b'K' => named.iter().for_each(|pid| kill_child(u32::from_le_bytes(*pid))),
                b'A' => self.kill_all_except(named),
                _ => exit(0),
            }
        }
        true
    }

    /// Kills all children except the template and those in `named`. All processes are stopped in the meantime and
    /// cannot fork, so each round removes one level of a process tree.
    fn kill_all_except(&self, named: &[[u8; 4]]) {
        let end = Instant::now() + STOP_TIME_MAX;
        let mut failed_waits = 0;
        while failed_waits < FAILED_WAITS_MAX && Instant::now() < end {
            // Stops all processes again in each round, because a process that was not stopped yet could have
            // resumed another. SAFETY: signals all processes in the namespace except this one.
            unsafe { libc::kill(-1, libc::SIGSTOP) };
            let mut numbers = [0; CHILDREN_MAX];
            let (count, _) = self.list_children(&mut numbers);
            let is_named = |pid: u32| pid == self.template || named.contains(&pid.to_le_bytes());
            let mut left = numbers[..count].iter().filter(|pid| !is_named(**pid)).peekable();
            if left.peek().is_none() {
                break;
            }
            left.for_each(|pid| kill(*pid as i32));
            let mut events = [PollFd::new(&self.sigchld, PollFlags::IN)];
            let _ = rustix::event::poll(&mut events, Some(&EXIT_WAIT));
            self.clear_sigchld();
            failed_waits = if self.reap() == 0 { failed_waits + 1 } else { 0 };
        }
        // SAFETY: signals all processes in the namespace except this one.
        unsafe { libc::kill(-1, libc::SIGCONT) };
    }
}

/// Kills a child and, if it leads a process group, the whole group. Does nothing if the child has been reaped, because
/// its PID might have been reused.
fn kill_child(pid: u32) {
    if pid > 1 && bulkhead_linux::wait::is_child(pid) {
        kill(-(pid as i32));
        kill(pid as i32);
    }
}

fn kill(pid: i32) {
    // SAFETY: signals only processes in the namespace. It does not matter if they have already exited.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_report_of_template_child_survives_encoding() {
        let (ours, theirs) = crate::protocol::socket::pair().unwrap();
        let sigchld = watch_sigchld().unwrap();
        let init = TemplateInit { template: 2, socket: &theirs, children: open_children().unwrap(), sigchld };
        let usage = Usage { user_us: 1, system_us: u64::MAX, maxrss_kib: 3 };
        let exit = Exit::Signal { number: libc::SIGSEGV, core_dumped: true };
        let mut bytes = [0; EXIT_BYTES_MAX];
        // The expected lists are empty, because the test's thread has no children.
        let (mut length, followed) = (0, [(false, None, true), (true, Some(Vec::new()), false)]);
        for (lists, children, has_more) in followed {
            init.report_exit(&(7, libc::SIGSEGV | 0x80, usage), lists);
            (length, _) = rustix::net::recv(&ours, &mut bytes, RecvFlags::empty()).unwrap();
            let end = ChildExit::decode(&bytes[..length]).unwrap();
            assert_eq!(end, ChildExit { pid: 7, exit, usage, children, has_more });
        }
        assert_eq!(ChildExit::decode(&bytes[..length - 1]), None);
        assert_eq!(ChildExit::decode(&bytes[..length + 3]), None);
        assert_eq!(Order::Kill(&[1, 256]).encode(), [b'K', 1, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(Order::KillTemplate.encode(), *b"T");
        assert_eq!(Order::KillAllExcept(&[0; NAMED_CHILDREN_MAX + 1]).encode().len(), ORDER_BYTES_MAX);
    }

    #[test]
    fn template_init_lists_all_its_children() {
        std::thread::scope(|scope| {
            let counted = scope.spawn(|| {
                let init = TemplateInit {
                    template: 2,
                    socket: &rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap(),
                    children: open_children().unwrap(),
                    sigchld: watch_sigchld().unwrap(),
                };
                // The children are started by this thread, because only the children of this thread are listed.
                let mut sleeping: Vec<_> = (0..40)
                    .map(|_| std::process::Command::new("sleep").arg("100").spawn().unwrap())
                    .collect();
                let mut numbers = [0; CHILDREN_MAX];
                let (count, has_more) = init.list_children(&mut numbers);
                let spawned: Vec<u32> = sleeping.iter().map(std::process::Child::id).collect();
                for child in &mut sleeping {
                    child.kill().unwrap();
                    child.wait().unwrap();
                }
                assert_eq!((&numbers[..count], has_more), (&spawned[..], false));
            });
            counted.join().unwrap();
        });
    }
}

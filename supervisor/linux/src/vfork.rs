//! Starting a process that borrows the memory of the thread that starts it until it becomes another program: no page
//! table is copied, which is most of what a fork costs.
//!
//! As the C library's `posix_spawn` does it: the thread stands still meanwhile (`CLONE_VFORK`), the child has a stack
//! of its own and lets no signal handler run in memory that is not its own.
#![expect(unsafe_code, reason = "clone has no safe form")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::Pid;

use crate::{errno, wait};

/// What the child may use until it is another program; it makes some system calls.
const STACK_BYTES: usize = 64 * 1024;

/// Nothing but the exit of one that did not become a program; the error says why.
const NOT_EXECUTED: c_int = 127;

/// A child that has become another program, and is to be waited for.
#[derive(Debug)]
pub struct Child {
    /// Its number.
    pub pid: Pid,
    /// It and no other, whatever becomes of the number.
    pub pidfd: OwnedFd,
}

/// Starts a process that runs `execute`, which makes it another program or returns why not.
///
/// Its signals are those of a new program: none is blocked, what was caught has its default, and so has SIGPIPE.
///
/// # Safety
/// `execute` runs in this process's memory while other threads run. It may make system calls and use what was made
/// before, neither allocate nor take a lock nor panic, and leaves nothing that is to be dropped.
pub unsafe fn spawn<F: FnMut() -> Errno>(execute: F) -> Result<Child, Errno> {
    let mut call = Call { execute, caught: caught(), error: None };
    let mut stack = stack();
    let top = stack.spare_capacity_mut().as_mut_ptr_range().end;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let mut pidfd: RawFd = -1;
    let blocked = Blocked::all();
    // SAFETY: the child has the stack, whose upper end is aligned as it must be, and `call`, to itself: this thread
    // goes on when the child is another program or gone.
    let pid =
        unsafe { libc::clone(run::<F>, top.cast(), flags, (&raw mut call).cast::<c_void>(), &raw mut pidfd) };
    let failed = errno::check(pid);
    drop(blocked);
    failed?;
    // SAFETY: the call has succeeded, and so has put a new descriptor there.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let Some(pid) = Pid::from_raw(pid) else { return Err(Errno::CHILD) };
    match call.error {
        None => Ok(Child { pid, pidfd }),
        Some(error) => {
            wait::wait4(pid.as_raw_pid(), 0)?;
            Err(error)
        }
    }
}

/// The same for a process that is to be no child of this one: a child that starts it and ends at once makes it an orphan.
/// Neither is seen by a `waitpid(-1)` of this process, and neither's end is told by SIGCHLD, unless this process is the
/// one that adopts orphans. (An exit signal of 0 alone would not do: `execve` makes it SIGCHLD.)
///
/// # Safety
/// That of [`spawn`].
pub unsafe fn spawn_orphan<F: FnMut() -> Errno>(execute: F) -> Result<Child, Errno> {
    let caught = look_up_caught();
    let (mut inner, mut outer) = (stack(), stack());
    let mut between = Between {
        call: Call { execute, caught: &caught, error: None },
        top: inner.spare_capacity_mut().as_mut_ptr_range().end.cast(),
        pid: -1,
        pidfd: -1,
    };
    let top = outer.spare_capacity_mut().as_mut_ptr_range().end;
    // With our descriptors, so that the orphan's is put among them; and no exit signal.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    let blocked = Blocked::all();
    // SAFETY: as above: the child has `outer` and `between` to itself until it is gone.
    let pid =
        unsafe { libc::clone(leave_orphan::<F>, top.cast(), flags, (&raw mut between).cast::<c_void>()) };
    let failed = errno::check(pid);
    drop(blocked);
    failed?;
    // It has ended, or is about to.
    let _ = wait::exit_code(pid);
    // SAFETY: where there is one, the call has put a new descriptor there.
    let pidfd = (between.pidfd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(between.pidfd) });
    match (between.call.error, Pid::from_raw(between.pid.max(0)), pidfd) {
        (None, Some(pid), Some(pidfd)) => Ok(Child { pid, pidfd }),
        (error, ..) => Err(error.unwrap_or(Errno::CHILD)),
    }
}

/// A list as `execve` takes it: pointers to the texts, and a null pointer. The texts must outlive it.
pub fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

struct Call<'c, F> {
    execute: F,
    caught: &'c [c_int],
    error: Option<Errno>,
}

struct Between<'c, F> {
    call: Call<'c, F>,
    /// The stack of the orphan.
    top: *mut c_void,
    pid: c_int,
    pidfd: RawFd,
}

fn stack() -> Vec<MaybeUninit<u128>> {
    Vec::with_capacity(STACK_BYTES / size_of::<u128>())
}

/// The child that leaves an orphan.
extern "C" fn leave_orphan<F: FnMut() -> Errno>(between: *mut c_void) -> c_int {
    // SAFETY: it is the caller's, who stands still, as this child does while the orphan becomes a program; and it exits
    // without unwinding anything.
    unsafe {
        let between = &mut *between.cast::<Between<'_, F>>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let call = (&raw mut between.call).cast::<c_void>();
        between.pid = libc::clone(run::<F>, between.top, flags, call, &raw mut between.pidfd);
        if between.pid < 0 {
            between.call.error = Some(errno::last());
        }
        libc::_exit(0)
    }
}

/// The child.
extern "C" fn run<F: FnMut() -> Errno>(call: *mut c_void) -> c_int {
    // SAFETY: it is the caller's, who stands still; and it exits without unwinding anything.
    unsafe {
        let call = &mut *call.cast::<Call<'_, F>>();
        // All signals are blocked until no handler is left that one could run.
        let default: libc::sigaction = std::mem::zeroed();
        for &signal in call.caught {
            libc::sigaction(signal, &default, std::ptr::null_mut());
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        call.error = Some((call.execute)());
        libc::_exit(NOT_EXECUTED)
    }
}

/// The signals that this process catches, and SIGPIPE, which Rust's programs ignore. They are looked up once: handlers
/// are there before the first child.
fn caught() -> &'static [c_int] {
    static CAUGHT: OnceLock<Vec<c_int>> = OnceLock::new();
    CAUGHT.get_or_init(look_up_caught)
}

fn look_up_caught() -> Vec<c_int> {
    let is_caught = |&signal: &c_int| {
        // SAFETY: all zeros is a valid `sigaction`, which the call fills.
        let (result, action) = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (libc::sigaction(signal, std::ptr::null(), &mut action), action)
        };
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        signal == libc::SIGPIPE || result == 0 && is_handled
    };
    (1..=libc::SIGRTMAX()).filter(is_caught).collect()
}

/// All signals of this thread, blocked until this is dropped.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> Self {
        // SAFETY: all zeros is a valid set; the calls fill the sets, and cannot fail with these arguments.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            Self(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one of before.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn execute(program: &std::ffi::CStr, argument: &std::ffi::CStr) -> Result<Child, Errno> {
        let arguments = [program.as_ptr(), c"-c".as_ptr(), argument.as_ptr(), ptr::null()];
        let environment = [ptr::null()];
        // SAFETY: one system call, with lists that end with a null pointer.
        unsafe {
            spawn(|| {
                libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
                errno::last()
            })
        }
    }

    fn status(child: &Child) -> i32 {
        wait::wait4(child.pid.as_raw_pid(), 0).unwrap().1
    }

    #[test]
    fn it_becomes_a_program_or_says_why_not() {
        let child = execute(c"/bin/sh", c"exit 7").unwrap();
        assert_eq!(status(&child), 7 << 8);
        assert_eq!(execute(c"/no/such/program", c"").err(), Some(Errno::NOENT));
        // What failed is waited for, and this thread goes on as before.
        let child = execute(c"/bin/sh", c"kill -TERM $$; exit 1").unwrap();
        assert_eq!(status(&child), libc::SIGTERM);
    }

    /// Its end is seen by its descriptor alone; no child is left to wait for.
    #[test]
    fn an_orphan_is_no_child_of_ours() {
        use rustix::event::{PollFd, PollFlags, poll};
        let arguments = [c"/bin/sh".as_ptr(), c"-c".as_ptr(), c"exit 7".as_ptr(), ptr::null()];
        let environment = [ptr::null()];
        let start = |program: &std::ffi::CStr| {
            // SAFETY: one system call, with lists that end with a null pointer.
            unsafe {
                spawn_orphan(|| {
                    libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
                    errno::last()
                })
            }
        };
        let orphan = start(c"/bin/sh").unwrap();
        assert!(!wait::is_child(orphan.pid.as_raw_pid() as u32));
        poll(&mut [PollFd::new(&orphan.pidfd, PollFlags::IN)], None).unwrap();
        assert_eq!(start(c"/no/such/program").err(), Some(Errno::NOENT));
    }

    #[test]
    fn many_at_once_each_have_their_own() {
        std::thread::scope(|scope| {
            for lane in 1..5 {
                scope.spawn(move || {
                    let script = std::ffi::CString::new(format!("exit {lane}")).unwrap();
                    for _ in 0..50 {
                        let child = execute(c"/bin/sh", &script).unwrap();
                        assert_eq!(status(&child), lane << 8);
                    }
                });
            }
        });
    }

    /// SIGPIPE is ignored in this process, and a thread may have blocked any.
    #[test]
    fn its_signals_are_those_of_a_new_program() {
        let _blocked = Blocked::all();
        for (name, signal) in [("PIPE", libc::SIGPIPE), ("USR1", libc::SIGUSR1), ("TERM", libc::SIGTERM)] {
            let script = std::ffi::CString::new(format!("kill -{name} $$; exit 1")).unwrap();
            let child = execute(c"/bin/sh", &script).unwrap();
            assert_eq!(status(&child), signal, "{name}");
        }
    }
}

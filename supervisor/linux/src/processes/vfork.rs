//! Starts a process that shares this process's memory until it executes another program, because copying page tables
//! is most of the cost of a fork. `sibling`, the keeper's `client::detached` and the worker's `host::launch` pass the
//! function that executes the program. The calling thread is suspended until then. The child has a separate stack and
//! runs no signal handlers. Does not fork the keeper's workers, which `spawn::forker` in the keeper does.
#![expect(unsafe_code, reason = "clone has no safe wrapper")]

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::Pid;

use crate::{errno, wait};

/// Size of the stack that the child uses until `execve`, in bytes. The child makes only a few system calls.
const STACK_BYTES: usize = 64 * 1024;

/// Exit code of a child that could not execute a program. The child stores the error in shared memory.
const NOT_EXECUTED: c_int = 127;

/// A child process that is running another program. The caller must reap the child.
#[derive(Debug)]
pub struct Child {
    /// Process ID.
    pub pid: Pid,
    /// Descriptor that refers to the process even if the PID is reused.
    pub pidfd: OwnedFd,
}

/// Starts a child process that calls `execute`. `execute` must replace the process's program, and returns the error if
/// this fails.
///
/// In the new program, no signal is blocked, and caught signals and SIGPIPE have the default action.
///
/// # Safety
/// `execute` runs in this process's memory while other threads run. It is allowed to make system calls and to use data
/// that was prepared in advance. It must not allocate, take a lock, panic, or leave anything that needs to be dropped.
pub unsafe fn spawn<F: FnMut() -> Errno>(execute: F) -> Result<Child, Errno> {
    // SAFETY: the caller fulfils the same requirements.
    unsafe { spawn_as(0, execute) }
}

/// Starts a process like [`spawn`], but as a child of this process's parent (`CLONE_PARENT`). The parent must reap the
/// process, even if `execute` fails. Fails with `EINVAL` in the first process of a PID namespace.
///
/// # Safety
/// The requirements of [`spawn`] apply.
pub unsafe fn spawn_sibling<F: FnMut() -> Errno>(execute: F) -> Result<Child, Errno> {
    // SAFETY: the caller fulfils the same requirements.
    unsafe { spawn_as(libc::CLONE_PARENT, execute) }
}

/// Starts a process, and adds `flag` to the flags of `clone(2)`.
///
/// # Safety
/// The requirements of [`spawn`] apply.
unsafe fn spawn_as<F: FnMut() -> Errno>(flag: c_int, execute: F) -> Result<Child, Errno> {
    let mut call = Call { execute, caught: caught_signals(), error: None };
    let mut stack = child_stack();
    let top = stack.spare_capacity_mut().as_mut_ptr_range().end;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD | flag;
    let mut pidfd: RawFd = -1;
    let blocked = BlockedSignals::all();
    // SAFETY: the child has exclusive use of `call` and of the stack, whose upper end is aligned as required.
    // This thread continues only when the child has executed another program or is gone.
    let pid = unsafe {
        libc::clone(run_child::<F>, top.cast(), flags, (&raw mut call).cast::<c_void>(), &raw mut pidfd)
    };
    let failed = errno::check(pid);
    drop(blocked);
    failed?;
    // SAFETY: the call has succeeded, so it has stored a new descriptor.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let Some(pid) = Pid::from_raw(pid) else { return Err(Errno::CHILD) };
    match call.error {
        None => Ok(Child { pid, pidfd }),
        Some(error) if flag & libc::CLONE_PARENT != 0 => Err(error),
        Some(error) => {
            // Waits for the failed child even if interrupted by a signal, so that no zombie is left.
            wait::wait_for_exit_code(pid.as_raw_pid())?;
            Err(error)
        }
    }
}

/// Starts a process like [`spawn`], but not as a child of this process. An intermediate child starts the
/// process and exits immediately, so the process becomes an orphan.
///
/// A `waitpid(-1)` in this process finds neither the intermediate child nor the orphan, and neither raises SIGCHLD,
/// unless this process is a child subreaper and so becomes the orphan's parent. (Starting a direct child with an exit
/// signal of 0 would not be enough, because `execve` changes the exit signal to SIGCHLD.)
///
/// # Safety
/// The requirements of [`spawn`] apply.
pub unsafe fn spawn_orphan<F: FnMut() -> Errno>(execute: F) -> Result<Child, Errno> {
    let caught = query_caught_signals();
    let (mut inner, mut outer) = (child_stack(), child_stack());
    let mut intermediate = Intermediate {
        call: Call { execute, caught: &caught, error: None },
        top: inner.spare_capacity_mut().as_mut_ptr_range().end.cast(),
        pid: -1,
        pidfd: -1,
    };
    let top = outer.spare_capacity_mut().as_mut_ptr_range().end;
    // The intermediate child shares this process's descriptor table, so that the orphan's pidfd is also open in this
    // process.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    let blocked = BlockedSignals::all();
    // SAFETY: as in `spawn`: the child has exclusive use of `outer` and `intermediate` until it is gone.
    let pid = unsafe {
        libc::clone(leave_orphan::<F>, top.cast(), flags, (&raw mut intermediate).cast::<c_void>())
    };
    let failed = errno::check(pid);
    drop(blocked);
    failed?;
    // The intermediate child has exited, or is about to exit.
    let _ = wait::wait_for_exit_code(pid);
    // SAFETY: if the number is not negative, the call has stored a new descriptor.
    let pidfd = (intermediate.pidfd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(intermediate.pidfd) });
    match (intermediate.call.error, Pid::from_raw(intermediate.pid.max(0)), pidfd) {
        (None, Some(pid), Some(pidfd)) => Ok(Child { pid, pidfd }),
        (error, ..) => Err(error.unwrap_or(Errno::CHILD)),
    }
}

/// Converts strings to the list of pointers that `execve` expects, which ends with a null pointer. The strings must
/// outlive the list.
pub fn null_terminated(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
}

struct Call<'c, F> {
    execute: F,
    caught: &'c [c_int],
    error: Option<Errno>,
}

struct Intermediate<'c, F> {
    call: Call<'c, F>,
    /// Upper end of the memory used as the orphan's stack.
    top: *mut c_void,
    pid: c_int,
    pidfd: RawFd,
}

fn child_stack() -> Vec<MaybeUninit<u128>> {
    Vec::with_capacity(STACK_BYTES / size_of::<u128>())
}

/// Runs in the intermediate child. Starts the orphan and exits.
extern "C" fn leave_orphan<F: FnMut() -> Errno>(intermediate: *mut c_void) -> c_int {
    // SAFETY: `intermediate` belongs to the caller, which is suspended. This child is also suspended while
    // the orphan executes the program. The child exits without unwinding.
    unsafe {
        let intermediate = &mut *intermediate.cast::<Intermediate<'_, F>>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
        let call = (&raw mut intermediate.call).cast::<c_void>();
        intermediate.pid =
            libc::clone(run_child::<F>, intermediate.top, flags, call, &raw mut intermediate.pidfd);
        if intermediate.pid < 0 {
            intermediate.call.error = Some(errno::last());
        }
        libc::_exit(0)
    }
}

/// Runs in the child. Restores the default signal actions, unblocks all signals, and calls `execute`.
extern "C" fn run_child<F: FnMut() -> Errno>(call: *mut c_void) -> c_int {
    // SAFETY: `call` belongs to the caller, which is suspended. The child exits without unwinding.
    unsafe {
        let call = &mut *call.cast::<Call<'_, F>>();
        // All signals stay blocked until every handler is replaced, so no handler can run in the child.
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

/// Returns the signals that this process catches, and SIGPIPE, which Rust programs ignore. The set is determined only
/// once, because all handlers are installed before the first child is started.
fn caught_signals() -> &'static [c_int] {
    static CAUGHT: OnceLock<Vec<c_int>> = OnceLock::new();
    CAUGHT.get_or_init(query_caught_signals)
}

fn query_caught_signals() -> Vec<c_int> {
    let is_caught = |&signal: &c_int| {
        // SAFETY: an all-zero `sigaction` is valid, and the call fills it.
        let (result, action) = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            (libc::sigaction(signal, std::ptr::null(), &mut action), action)
        };
        let is_handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        signal == libc::SIGPIPE || result == 0 && is_handled
    };
    (1..=libc::SIGRTMAX()).filter(is_caught).collect()
}

/// Blocks all signals in the calling thread until this value is dropped.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: an all-zero set is valid. The calls fill the sets, and cannot fail with these arguments.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the previous signal mask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;
    use std::time::Duration;

    use super::*;

    fn execute(program: &std::ffi::CStr, argument: &std::ffi::CStr) -> Result<Child, Errno> {
        let arguments = [program.as_ptr(), c"-c".as_ptr(), argument.as_ptr(), ptr::null()];
        let environment = [ptr::null()];
        // SAFETY: makes one system call with null-terminated lists.
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
    fn vfork_executes_program_or_returns_error() {
        let child = execute(c"/bin/sh", c"exit 7").unwrap();
        assert_eq!(status(&child), 7 << 8);
        assert_eq!(execute(c"/no/such/program", c"").err(), Some(Errno::NOENT));
        // The child that failed was reaped, and this thread can still start children.
        let child = execute(c"/bin/sh", c"kill -TERM $$; exit 1").unwrap();
        assert_eq!(status(&child), libc::SIGTERM);
    }

    /// The orphan's exit is visible only through a pidfd, because the orphan is not a child of this process.
    #[test]
    fn spawned_orphan_is_not_a_child() {
        let arguments = [c"/bin/sh".as_ptr(), c"-c".as_ptr(), c"exit 7".as_ptr(), ptr::null()];
        let environment = [ptr::null()];
        let start = |program: &std::ffi::CStr| {
            // SAFETY: makes one system call with null-terminated lists.
            unsafe {
                spawn_orphan(|| {
                    libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr());
                    errno::last()
                })
            }
        };
        let orphan = start(c"/bin/sh").unwrap();
        assert!(!wait::is_child(orphan.pid.as_raw_pid() as u32));
        assert!(wait::wait_until_readable(&orphan.pidfd, Duration::from_secs(60)).unwrap());
        assert_eq!(start(c"/no/such/program").err(), Some(Errno::NOENT));
    }

    #[test]
    fn concurrent_vfork_spawns_do_not_interfere() {
        std::thread::scope(|scope| {
            for code in 1..5 {
                scope.spawn(move || {
                    let script = std::ffi::CString::new(format!("exit {code}")).unwrap();
                    for _ in 0..50 {
                        let child = execute(c"/bin/sh", &script).unwrap();
                        assert_eq!(status(&child), code << 8);
                    }
                });
            }
        });
    }

    /// The child's signals have their default actions, even though this process ignores SIGPIPE and a thread might
    /// have blocked any signal.
    #[test]
    fn spawned_child_has_default_signal_dispositions() {
        let _blocked = BlockedSignals::all();
        for (name, signal) in [("PIPE", libc::SIGPIPE), ("USR1", libc::SIGUSR1), ("TERM", libc::SIGTERM)] {
            let script = std::ffi::CString::new(format!("kill -{name} $$; exit 1")).unwrap();
            let child = execute(c"/bin/sh", &script).unwrap();
            assert_eq!(status(&child), signal, "{name}");
        }
    }
}

//! Raw system calls, and the results of attempts.

use std::io;

use nix::errno::Errno;

/// Error from an attempt that was refused.
pub(crate) struct Refused {
    /// Name of the error number, or of the signal that killed a child. Can also be another word, such as `NOTHING` for
    /// an attempt that did not reach its goal.
    pub(crate) errno: String,
    /// The action that was attempted.
    pub(crate) what: String,
}

/// Result of an attempt: a description of what succeeded, or the error that prevented it.
pub(crate) type Tried = Result<String, Refused>;

impl Refused {
    pub(crate) fn because(word: &str, what: impl Into<String>) -> Self {
        Self { errno: word.to_owned(), what: what.into() }
    }

    /// Returns a refusal for an attempt in which no call failed but the goal was not reached.
    pub(crate) fn nothing(what: impl Into<String>) -> Self {
        Self::because("NOTHING", what)
    }
}

/// Converts an error into a refusal by adding the attempted action.
pub(crate) trait At<T> {
    fn at(self, what: &str) -> Result<T, Refused>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, what: &str) -> Result<T, Refused> {
        self.map_err(|errno| Refused::because(&format!("{errno:?}"), what))
    }
}

impl<T> At<T> for Result<T, rustix::io::Errno> {
    fn at(self, what: &str) -> Result<T, Refused> {
        self.map_err(io::Error::from).at(what)
    }
}

impl<T> At<T> for io::Result<T> {
    fn at(self, what: &str) -> Result<T, Refused> {
        self.map_err(|error| match error.raw_os_error() {
            Some(number) => Refused::because(&format!("{:?}", Errno::from_raw(number)), what),
            None => Refused::because("OTHER", format!("{what}: {error}")),
        })
    }
}

/// Makes a raw system call, which bypasses checks in libraries that would stop some attacks. Safe only with the
/// arguments listed in the SAFETY comment.
pub(crate) fn call<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> Result<usize, Errno> {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    let [a, b, c, d, e, f] = all;
    #[expect(unsafe_code, reason = "no library offers the attempted calls")]
    // SAFETY: callers pass numbers, null, addresses that are not mapped, or addresses of their own variables.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 { Err(Errno::last()) } else { Ok(result as usize) }
}

/// Returns the address of a value, for use as a system call argument.
pub(crate) fn address<T>(value: &T) -> usize {
    std::ptr::from_ref(value) as usize
}

/// Returns the address of a value that a system call overwrites, for use as a system call argument.
pub(crate) fn address_mut<T>(value: &mut T) -> usize {
    std::ptr::from_mut(value) as usize
}

/// The value -1 as a system call argument.
pub(crate) const MINUS_ONE: usize = usize::MAX;

pub(crate) fn close(descriptor: usize) {
    let _ = call(libc::SYS_close, [descriptor]);
}

/// Evaluates the result of a call that was made with intentionally invalid arguments. The errors in `behind` occur only
/// after the permission check, so they count as success.
pub(crate) fn reached(result: Result<usize, Errno>, behind: &[Errno], what: &str) -> Tried {
    match result {
        Ok(_) => Ok(format!("{what}: done")),
        Err(errno) if behind.contains(&errno) => Ok(format!("{what}: permitted, then {errno:?}")),
        Err(errno) => Err(errno).at(what),
    }
}

/// Converts the wait status of a child into the result of an attempt.
pub(crate) fn ended(status: i32, what: &str) -> Tried {
    if libc::WIFSIGNALED(status) {
        let number = libc::WTERMSIG(status);
        let name = nix::sys::signal::Signal::try_from(number).map_or("a signal", |signal| signal.as_str());
        return Err(Refused::because(name, what));
    }
    match libc::WEXITSTATUS(status) {
        0 => Ok(format!("{what}: done")),
        errno => Err(Errno::from_raw(errno)).at(what),
    }
}

/// Creates a child with the given `clone(2)` flags. The child exits with 0 or with the error number. The task must make
/// only raw system calls, because the child is forked from a process with several threads.
pub(crate) fn child(flags: i32, task: impl FnOnce() -> Result<(), Errno>) -> Result<i32, Errno> {
    let flags = (flags | libc::SIGCHLD) as usize;
    let pid = call(libc::SYS_clone, [flags, 0, 0, 0, 0])?;
    if pid == 0 {
        let code = task().err().map_or(0, |errno| errno as usize);
        let _ = call(libc::SYS_exit_group, [code]);
    }
    wait(pid)
}

/// Waits for a child and returns its raw status.
pub(crate) fn wait(pid: usize) -> Result<i32, Errno> {
    let mut status = 0_i32;
    loop {
        match call(libc::SYS_wait4, [pid, address_mut(&mut status), libc::__WALL as usize, 0]) {
            Ok(_) => return Ok(status),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Runs the task on a temporary thread, so that the task can change attributes of that thread.
pub(crate) fn thread<T: Send>(task: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(task).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

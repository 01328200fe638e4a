//! Raw system calls, and how an attempt says that it was refused.

use std::io;

use nix::errno::Errno;

/// How an attempt that did not succeed was refused.
pub(crate) struct Refused {
    /// The name of the error, of the signal that ended a child, or a word for what is no error of the kernel:
    /// `NOTHING` for an answer without worth.
    pub(crate) errno: String,
    /// What was attempted.
    pub(crate) what: String,
}

/// What came of an attempt: what it got, or how it was refused.
pub(crate) type Tried = Result<String, Refused>;

impl Refused {
    pub(crate) fn because(word: &str, what: impl Into<String>) -> Self {
        Self { errno: word.to_owned(), what: what.into() }
    }

    /// It was answered, with nothing that is worth anything.
    pub(crate) fn nothing(what: impl Into<String>) -> Self {
        Self::because("NOTHING", what)
    }
}

/// Names what was attempted.
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

/// Makes a system call. Not safe in general, whatever the signature says: to go around whatever a library
/// would look at is what this program is for.
pub(crate) fn call<const N: usize>(number: libc::c_long, arguments: [usize; N]) -> Result<usize, Errno> {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    let [a, b, c, d, e, f] = all;
    #[expect(unsafe_code, reason = "what is attempted here, no library offers")]
    // SAFETY: callers pass numbers, null, addresses that are not mapped, or those of their own variables.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 { Err(Errno::last()) } else { Ok(result as usize) }
}

/// The address of a value, as an argument.
pub(crate) fn address<T>(value: &T) -> usize {
    std::ptr::from_ref(value) as usize
}

/// The same of one that the kernel writes to.
pub(crate) fn address_mut<T>(value: &mut T) -> usize {
    std::ptr::from_mut(value) as usize
}

/// -1 as an argument.
pub(crate) const MINUS_ONE: usize = usize::MAX;

pub(crate) fn close(descriptor: usize) {
    let _ = call(libc::SYS_close, [descriptor]);
}

/// Where a call whose arguments cannot work got to: these errors come only after the kernel has looked at the
/// caller, so that they are as good as success.
pub(crate) fn reached(result: Result<usize, Errno>, behind: &[Errno], what: &str) -> Tried {
    match result {
        Ok(_) => Ok(format!("{what}: done")),
        Err(errno) if behind.contains(&errno) => Ok(format!("{what}: permitted, then {errno:?}")),
        Err(errno) => Err(errno).at(what),
    }
}

/// How a child ended.
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

/// Makes a child with these flags of `clone(2)`. What it does may only be raw calls: it is a copy of one
/// thread of many. It ends with the number that it returns: zero or an error.
pub(crate) fn child(flags: i32, task: impl FnOnce() -> Result<(), Errno>) -> Result<i32, Errno> {
    let flags = (flags | libc::SIGCHLD) as usize;
    let pid = call(libc::SYS_clone, [flags, 0, 0, 0, 0])?;
    if pid == 0 {
        let code = task().err().map_or(0, |errno| errno as usize);
        let _ = call(libc::SYS_exit_group, [code]);
    }
    wait(pid)
}

/// Waits for a child, and returns its raw status.
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

/// Runs this on a thread that ends with it: what it does to itself, it does to no other thread.
pub(crate) fn thread<T: Send>(task: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| match scope.spawn(task).join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

//! Wrappers for Landlock's system calls. Access rights are plain numbers. No function allocates memory, so all
//! functions can be used between `fork` and `execve`.
#![expect(unsafe_code, reason = "no safe wrapper makes these system calls without allocating memory")]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Result;

use crate::errno;

/// `struct landlock_ruleset_attr`, which lists the rights that a ruleset denies unless a rule grants them. A kernel
/// that does not know a field accepts the structure if that field is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct HandledAccess {
    /// Rights for files and folders.
    pub files: u64,
    /// Rights for TCP sockets.
    pub network: u64,
    /// Scopes, which deny access to processes and sockets outside the sandbox.
    pub scopes: u64,
}

/// Returns the kernel's Landlock version. Fails with `NOSYS` if the kernel was built without Landlock, and with
/// `OPNOTSUPP` if Landlock is disabled.
pub fn abi_version() -> Result<u32> {
    const VERSION: libc::c_uint = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag, the call uses no memory and creates no descriptor.
    let result = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    if result > 0 { Ok(result as u32) } else { Err(errno::last()) }
}

const NO_FLAGS: libc::c_uint = 0;

/// Creates a ruleset that denies all rights in `handled`.
pub fn create_ruleset(handled: HandledAccess) -> Result<OwnedFd> {
    let size = size_of::<HandledAccess>();
    // SAFETY: the pointer refers to a local variable of the given size.
    let result =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const handled, size, NO_FLAGS) };
    errno::check(result)?;
    // SAFETY: the call has just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

/// Grants rights for a file or folder, and for everything below it. Fails with `INVAL` if `rights` contains rights that
/// apply only to folders and `place` is not a folder.
pub fn add_path_rule(ruleset: BorrowedFd<'_>, place: BorrowedFd<'_>, rights: u64) -> Result<()> {
    /// `struct landlock_path_beneath_attr`.
    #[repr(C, packed)]
    struct PathBeneathAttr {
        allowed_access: u64,
        parent_fd: i32,
    }
    const RULE_PATH_BENEATH: libc::c_int = 1;
    let rule = PathBeneathAttr { allowed_access: rights, parent_fd: place.as_raw_fd() };
    let ruleset = ruleset.as_raw_fd();
    // SAFETY: the pointer refers to a local variable of the type that the kernel reads for this kind of rule.
    errno::check(unsafe {
        libc::syscall(libc::SYS_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &raw const rule, NO_FLAGS)
    })
}

/// Enforces the rules on the calling thread, and on all threads and processes that it starts. This cannot be
/// undone.
///
/// If the Landlock version `abi` supports it, actions that are denied to the calling program itself are not written to
/// the audit log. Pass 0 as `abi` to keep them in the log.
pub fn restrict_self(ruleset: BorrowedFd<'_>, abi: u32) -> Result<()> {
    const LOG_SAME_EXEC_OFF: libc::c_uint = 1;
    const LOG_SINCE: u32 = 7;
    let flags = if abi >= LOG_SINCE { LOG_SAME_EXEC_OFF } else { NO_FLAGS };
    // SAFETY: takes two numbers and accesses no memory of this process.
    errno::check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), flags) })
}

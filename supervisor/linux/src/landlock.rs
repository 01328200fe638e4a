//! The system calls of Landlock, where rights are numbers. Safe to use between `fork` and `execve`: nothing here
//! allocates.
#![expect(unsafe_code, reason = "these system calls have no safe form without an allocation")]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Result;

use crate::errno;

/// `struct landlock_ruleset_attr`: what is withheld. Older kernels know less of it, and take what they do not know as
/// long as it is zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Withheld {
    /// What can be done with files.
    pub files: u64,
    /// What can be done with TCP.
    pub network: u64,
    /// What can be done with processes and sockets outside.
    pub scopes: u64,
}

/// The kernel's version of Landlock. `NOSYS`: built without; `OPNOTSUPP`: switched off.
pub fn kernel_abi() -> Result<u32> {
    const VERSION: libc::c_uint = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call takes no memory, and makes no descriptor.
    let result = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    if result > 0 { Ok(result as u32) } else { Err(errno::last()) }
}

const NO_FLAGS: libc::c_uint = 0;

/// A ruleset that refuses all that is withheld.
pub fn create_ruleset(withheld: Withheld) -> Result<OwnedFd> {
    let size = size_of::<Withheld>();
    // SAFETY: the pointer is to a local of the size that is told.
    let result =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const withheld, size, NO_FLAGS) };
    errno::check(result)?;
    // SAFETY: the call has made this descriptor, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

/// Gives these rights to a file or folder, and to what lies below it. `INVAL`: rights of folders, and it is none.
pub fn give(ruleset: BorrowedFd<'_>, place: BorrowedFd<'_>, rights: u64) -> Result<()> {
    /// `struct landlock_path_beneath_attr`.
    #[repr(C, packed)]
    struct PathBeneathAttr {
        allowed_access: u64,
        parent_fd: i32,
    }
    const RULE_PATH_BENEATH: libc::c_int = 1;
    let rule = PathBeneathAttr { allowed_access: rights, parent_fd: place.as_raw_fd() };
    let ruleset = ruleset.as_raw_fd();
    // SAFETY: the pointer is to a local of the form that the kernel reads for this kind of rule.
    errno::check(unsafe {
        libc::syscall(libc::SYS_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &raw const rule, NO_FLAGS)
    })
}

/// Puts the calling thread under the rules, for ever, and all that it starts. What it tries itself is not written to
/// the audit log, by kernels whose version `abi` can leave it out; 0 is of one that cannot.
pub fn restrict_self(ruleset: BorrowedFd<'_>, abi: u32) -> Result<()> {
    const LOG_SAME_EXEC_OFF: libc::c_uint = 1;
    const LOG_SINCE: u32 = 7;
    let flags = if abi >= LOG_SINCE { LOG_SAME_EXEC_OFF } else { NO_FLAGS };
    // SAFETY: takes two numbers, and touches no memory of ours.
    errno::check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), flags) })
}

//! Runs a program as if on a kernel that lacks `SO_PASSRIGHTS`, as Linux did before version 6.16. Usage: `older-kernel
//! PROGRAM [ARGUMENT...]`.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

const SO_PASSRIGHTS: u32 = 83;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else { return ExitCode::from(2) };
    if let Err(error) = forget_pass_rights() {
        eprintln!("error: failed to filter setsockopt: {error}");
        return ExitCode::FAILURE;
    }
    let error = Command::new(program).args(arguments).exec();
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Makes every later call of `setsockopt(2)` with the option `SO_PASSRIGHTS` fail with the error `ENOPROTOOPT`, even
/// after `execve(2)`.
fn forget_pass_rights() -> std::io::Result<()> {
    // Offsets of the system call number and of the lower halves of the arguments (little-endian).
    const NUMBER: u32 = 0;
    const ARGUMENTS: u32 = 16;
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let is_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let answer = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        op(load, 0, 0, NUMBER),
        op(is_equal, 0, 5, libc::SYS_setsockopt as u32),
        op(load, 0, 0, ARGUMENTS + 8),
        op(is_equal, 0, 3, libc::SOL_SOCKET as u32),
        op(load, 0, 0, ARGUMENTS + 16),
        op(is_equal, 0, 1, SO_PASSRIGHTS),
        op(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32),
        op(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    #[expect(unsafe_code, reason = "no library installs such a filter")]
    // SAFETY: the filter and the array outlive the calls, which only read them.
    let done = unsafe {
        // Root can install a filter without no_new_privs, and therefore keeps its privileges.
        if libc::geteuid() != 0 {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        }
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

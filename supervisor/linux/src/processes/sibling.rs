//! Starts a program as a child of this process's parent. A supervisor starts its successor this way during an upgrade,
//! because a child would be killed together with the other descendants when the keeper dies. The caller passes the
//! state to the successor.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::Access;

use super::vfork::{self, Child};
use crate::errno;

/// Starts `program` with these arguments, the first of which is the program's name. The program inherits the working
/// directory, the standard streams, and the environment without the variables in `withheld`. It also inherits the
/// descriptor `inherited` under the same number.
///
/// Returns an error if the program cannot be executed, or if this process is the first process of a PID
/// namespace (`EINVAL`).
#[expect(unsafe_code, reason = "there are no safe wrappers for the two system calls of the child")]
pub fn spawn(
    program: &Path,
    arguments: &[OsString],
    withheld: &[&str],
    inherited: BorrowedFd<'_>,
) -> io::Result<Child> {
    // Checks the program before the process starts. If the program could not be executed, the process would exit, and
    // the parent would have to reap it.
    rustix::fs::access(program, Access::EXEC_OK)?;
    let path = CString::new(program.as_os_str().as_bytes())?;
    let arguments: Vec<CString> =
        arguments.iter().map(|argument| CString::new(argument.as_bytes())).collect::<Result<_, _>>()?;
    let environment: Vec<CString> = std::env::vars_os()
        .filter(|(name, _)| !withheld.iter().any(|withheld| name == withheld))
        .filter_map(|(mut entry, value)| {
            entry.push("=");
            entry.push(value);
            CString::new(entry.into_vec()).ok()
        })
        .collect();
    let (argv, envp) = (vfork::null_terminated(&arguments), vfork::null_terminated(&environment));
    let number = inherited.as_raw_fd();
    // SAFETY: the child makes only two system calls. Their arguments were prepared in advance, and the lists end with
    // a null pointer. The child has a copy of the descriptor table.
    let started = unsafe {
        vfork::spawn_sibling(|| {
            if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                return errno::last();
            }
            libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
            errno::last()
        })
    };
    Ok(started?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn sibling_is_a_child_of_the_parent() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        // Redirects to a path, because some shells accept only one digit after `>&`.
        let script =
            format!("(echo $PPID; echo ${{WITHHELD-none}}) > /proc/self/fd/{}", writer.as_fd().as_raw_fd());
        let arguments = ["sh", "-c", &script].map(OsString::from);
        let child = spawn(Path::new("/bin/sh"), &arguments, &["WITHHELD"], writer.as_fd()).unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
        assert_eq!(text, format!("{parent}\nnone\n"));
        assert!(!crate::wait::is_child(child.pid.as_raw_pid() as u32));
    }

    #[test]
    fn spawning_an_unexecutable_program_fails() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let missing = spawn(Path::new("/no/such/program"), &["x".into()], &[], writer.as_fd());
        assert_eq!(missing.unwrap_err().kind(), io::ErrorKind::NotFound);
        let denied = spawn(Path::new("/etc/passwd"), &["x".into()], &[], writer.as_fd());
        assert_eq!(denied.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}

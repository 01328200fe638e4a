//! Prepares and starts the program of one job for `exec`. Builds the arguments and the environment, and sets up the
//! child process before `execve`. `exec` exchanges data with the program, and `orphans` kills its descendants.

use std::ffi::{CString, OsStr, OsString, c_char};
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use bulkhead_linux::errno;
use bulkhead_linux::vfork::{self, Child, null_terminated};
use bulkhead_linux::wait::wait4;
use bulkhead_shared::worker_protocol::{LINK_VARIABLE, PROGRAM_VARIABLE};
use rustix::fs::{Access, access};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::process::{Resource, Rlimit, Signal, WaitId, WaitIdOptions, waitid};

use crate::context::Ctx;
use crate::rules::{FOLDER_VARIABLES, Ruleset};

/// Size of a script's head in which the kernel looks for the interpreter, in bytes.
const SCRIPT_HEAD_BYTES: u64 = 256;

/// Maximum number of files that are checked if interpreters are scripts, too.
const INTERPRETERS_MAX: u32 = 5;

/// Environment variables that are set for each job.
const JOB_VARIABLES: [&str; 4] =
    ["BULKHEAD_OPERATION", "BULKHEAD_TENANT", "BULKHEAD_JOB", "BULKHEAD_DEADLINE_MS"];

/// Environment variables that all programs share, and the names of the variables that are set separately for each
/// program.
pub(super) struct Environment {
    common: Vec<CString>,
    /// Names of the variables in [`FOLDER_VARIABLES`] that are set to the program's temporary folder.
    folder_variables: Vec<&'static str>,
}

impl Environment {
    /// Derives the programs' environment from the host's environment. `temporary` is the host's temporary folder.
    pub(super) fn new(temporary: Option<&Path>) -> Self {
        let is_own = |name: &OsStr, value: &OsStr| {
            FOLDER_VARIABLES.iter().any(|own| name == *own)
                && temporary.is_some_and(|path| value == path.as_os_str())
        };
        let is_ours = |name: &OsStr| name == LINK_VARIABLE || name == PROGRAM_VARIABLE;
        let is_common = |name: &OsStr| !is_ours(name) && !JOB_VARIABLES.iter().any(|own| name == *own);
        let all = || std::env::vars_os();
        let common = all().filter(|(name, value)| is_common(name) && !is_own(name, value));
        let is_set = |own: &&&str| all().any(|(name, value)| name == **own && !is_own(&name, &value));
        let folder_variables =
            FOLDER_VARIABLES.iter().filter(|own| temporary.is_some() && !is_set(own)).copied().collect();
        let common = common.filter_map(|(name, value)| variable(name, &value).ok()).collect();
        Self { common, folder_variables }
    }

    /// Returns the environment for a job whose program has the temporary folder `folder`.
    pub(super) fn for_job<S>(&self, ctx: &Ctx<S>, folder: Option<&Path>) -> io::Result<Vec<CString>> {
        let values = [
            ctx.operation().to_owned(),
            ctx.tenant().to_owned(),
            ctx.id().to_string(),
            ctx.remaining().as_millis().to_string(),
        ];
        let mut all = self.common.clone();
        for (name, value) in JOB_VARIABLES.into_iter().zip(values) {
            all.push(variable(name.into(), OsStr::new(&value))?);
        }
        for name in folder.iter().flat_map(|_| &self.folder_variables) {
            all.push(variable(name.into(), folder.unwrap_or(Path::new("")).as_os_str())?);
        }
        Ok(all)
    }
}

fn variable(name: OsString, value: &OsStr) -> io::Result<CString> {
    let mut text = name;
    text.push("=");
    text.push(value);
    Ok(CString::new(text.into_vec())?)
}

/// Settings that the child process applies before it executes the program.
pub(super) struct ChildSetup<'s> {
    pub(super) rlimits: &'s [(Resource, Rlimit)],
    pub(super) ruleset: Option<&'s Ruleset>,
    /// Folder that the program must not be able to list. The child tries to list the folder to verify that the
    /// rules are enforced.
    pub(super) hidden_folder: Option<BorrowedFd<'s>>,
    /// Working directory of the program. `None` selects the host's working directory.
    pub(super) directory: Option<BorrowedFd<'s>>,
}

/// A program that is ready to be executed.
pub(super) struct Launch {
    program: CString,
    /// Owned strings that `arguments` and `environment` point to.
    _texts: Vec<CString>,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
}

impl Launch {
    /// Prepares a program for execution. `place` is the path passed to `execve`, and `name` is passed as `argv[0]`.
    pub(super) fn new(
        (name, place): (&str, &str),
        arguments: &[String],
        environment: Vec<CString>,
    ) -> io::Result<Self> {
        let program = CString::new(place)?;
        let mut texts = vec![CString::new(name)?];
        for argument in arguments {
            texts.push(CString::new(argument.as_str())?);
        }
        let (arguments, variables) = (null_terminated(&texts), null_terminated(&environment));
        texts.extend(environment);
        Ok(Self { program, _texts: texts, arguments, environment: variables })
    }

    /// Starts the program with pipes for its standard streams.
    pub(super) fn start(self, setup: &ChildSetup<'_>) -> io::Result<Program> {
        let (child_stdin, stdin) = pipe()?;
        let ((stdout, child_stdout), (stderr, child_stderr)) = (pipe()?, pipe()?);
        for own in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()] {
            ioctl_fionbio(own, true)?;
        }
        let streams = [child_stdin.as_raw_fd(), child_stdout.as_raw_fd(), child_stderr.as_raw_fd()];
        let host = rustix::process::getpid();
        let execute = || {
            let apply_setup = || -> io::Result<()> {
                rustix::process::setsid()?;
                rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // If the host died before the parent-death signal was set, the signal is never sent.
                if rustix::process::getppid() != Some(host) {
                    return Err(Errno::INTR.into());
                }
                install_streams(streams)?;
                if let Some(directory) = setup.directory {
                    rustix::process::fchdir(directory)?;
                }
                if let Some(ruleset) = setup.ruleset {
                    ruleset.restrict(setup.hidden_folder)?;
                }
                // Set last, because the limits could make the calls above fail.
                for (resource, limit) in setup.rlimits {
                    rustix::process::setrlimit(*resource, *limit)?;
                }
                Ok(())
            };
            match apply_setup() {
                Ok(()) => self.execute(),
                Err(error) => errno::from_io(&error, Errno::IO),
            }
        };
        // SAFETY: the closure makes only system calls, returns errors that are plain numbers, and uses memory
        // that was prepared in advance. The closure neither allocates memory nor takes a lock.
        #[expect(unsafe_code, reason = "the child of vfork(2) shares this process's memory")]
        let child = unsafe { vfork::spawn(execute) }?;
        Ok(Program { child, stdin: Some(stdin), stdout: Some(stdout), stderr: Some(stderr) })
    }

    /// Executes the program. Does not use `execvp`, which would pass files in an unknown format to a shell.
    fn execute(&self) -> Errno {
        // SAFETY: both lists end with a null pointer. The lists and the strings behind them live in `self`.
        #[expect(unsafe_code, reason = "every safe wrapper of execve(2) allocates memory")]
        unsafe {
            libc::execve(self.program.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr());
        }
        errno::last()
    }
}

/// Makes `streams` the standard streams of this process. This function runs in a child that shares memory with the
/// host, so it makes only system calls.
fn install_streams(streams: [RawFd; 3]) -> Result<(), Errno> {
    for (own, stream) in streams.into_iter().zip(0..) {
        // SAFETY: both arguments are plain descriptor numbers, and the child has a separate descriptor table.
        #[expect(unsafe_code, reason = "the safe wrapper of dup2(2) must own the replaced descriptor")]
        errno::check(unsafe { libc::dup2(own, stream) })?;
    }
    Ok(())
}

/// Creates a pipe. Both descriptors are above 2, so a later `dup2` to a standard stream does not replace them.
fn pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = std::io::pipe()?;
    debug_assert!(
        reader.as_raw_fd() > 2 && writer.as_raw_fd() > 2,
        "the host's standard streams must be open"
    );
    Ok((reader, writer))
}

/// A running program, and the host's ends of its standard streams.
pub(super) struct Program {
    pub(super) child: Child,
    pub(super) stdin: Option<PipeWriter>,
    pub(super) stdout: Option<PipeReader>,
    pub(super) stderr: Option<PipeReader>,
}

impl Program {
    /// Returns the PID.
    pub(super) fn id(&self) -> u32 {
        self.child.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns true if the program was killed by a signal. The program must have terminated.
    pub(super) fn has_crashed(&self) -> io::Result<bool> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = retry_on_intr(|| waitid(WaitId::Pid(self.child.pid), look))?;
        Ok(status.is_some_and(|status| !status.exited()))
    }

    /// Kills the program's process, but not its descendants.
    pub(super) fn kill(&self) {
        // Fails if the process has already exited.
        let _ = rustix::process::pidfd_send_signal(&self.child.pidfd, Signal::KILL);
    }

    /// Waits for the program to terminate, and returns its exit status.
    pub(super) fn wait(&self) -> io::Result<ExitStatus> {
        let (_, status, _) = retry_on_intr(|| wait4(self.child.pid.as_raw_pid(), 0))?;
        Ok(ExitStatus::from_raw(status))
    }
}

/// Checks at startup that the program is executable, and that the interpreter of a script exists. Errors in the format
/// of a program are not detected, because the machine can have interpreters for any format (binfmt_misc). `place` is the
/// path that is passed to `execve`.
pub(super) fn check(program: &str, place: &str) -> Result<(), String> {
    let mut path = OsString::from(place);
    for level in 0..INTERPRETERS_MAX {
        // The working directory of a job is not known yet.
        if !Path::new(&path).is_absolute() {
            break;
        }
        if let Err(error) = access(&path, Access::EXEC_OK) {
            let error = io::Error::from(error);
            return Err(match level {
                0 => format!("{program} cannot be executed: {error}{}", advice(&error)),
                _ => format!(
                    "{program} cannot be executed: the interpreter in the first line, {path:?}, cannot be executed: \
                     {error}; check for CRLF line endings"
                ),
            });
        }
        let Some(interpreter) = interpreter(Path::new(&path)) else { break };
        path = interpreter;
    }
    Ok(())
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; set the execute permission (chmod +x), and check for a mount with `noexec`"
        }
        _ => "",
    }
}

/// Returns the interpreter that the first line of a script names, or `None` if the file is no script or cannot be read.
fn interpreter(path: &Path) -> Option<OsString> {
    let mut head = Vec::new();
    File::open(path).ok()?.take(SCRIPT_HEAD_BYTES).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| matches!(byte, b'\n' | b'\0')).next()?;
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let name = line.split(is_blank).find(|word| !word.is_empty())?;
    // The kernel rejects a name that its buffer truncates.
    let is_complete = head.len() < SCRIPT_HEAD_BYTES as usize || line.len() + 2 < head.len();
    is_complete.then(|| OsString::from_vec(name.to_vec()))
}

/// Returns a human-readable reason why a program failed to start.
pub(super) fn describe(error: &io::Error, program: &str) -> String {
    match error.raw_os_error() {
        Some(libc::ENOENT) if Path::new(program).exists() => format!(
            "{error}: the file exists, but the interpreter in its first line (check for CRLF line endings) or its \
             loader does not"
        ),
        Some(libc::ENOEXEC) => {
            format!(
                "{error}: the file is neither a program for this machine nor a script that names an \
                 interpreter (#!)"
            )
        }
        Some(libc::ENOTRECOVERABLE) => "the Landlock rules for the program are not in force".to_owned(),
        _ => error.to_string(),
    }
}

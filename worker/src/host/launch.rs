//! Starting one program: its arguments and environment, and what its process does between fork and execution.

use std::ffi::{CString, OsStr, OsString, c_char};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use bulkhead_shared::worker_protocol::{LINK_VARIABLE, PROGRAM_VARIABLE};
use rustix::process::{Resource, Rlimit, Signal};

use super::rules::Ruleset;
use crate::context::Ctx;

/// Variables that name the temporary folder, unless `env` sets them.
const OF_FOLDER: [&str; 2] = ["TMPDIR", "HOME"];

/// Variables of a job's own.
const OF_JOB: [&str; 4] = ["BULKHEAD_OPERATION", "BULKHEAD_TENANT", "BULKHEAD_JOB", "BULKHEAD_DEADLINE_MS"];

/// The environment that all programs have, and what of it is each one's own.
pub(super) struct Environment {
    common: Vec<CString>,
    /// Those of [`OF_FOLDER`] that are each program's own.
    of_folder: Vec<&'static str>,
}

impl Environment {
    /// From that of the host, whose temporary folder is this one.
    pub(super) fn new(temporary: Option<&Path>) -> Self {
        let is_own = |name: &OsStr, value: &OsStr| {
            OF_FOLDER.iter().any(|own| name == *own)
                && temporary.is_some_and(|path| value == path.as_os_str())
        };
        let is_ours = |name: &OsStr| name == LINK_VARIABLE || name == PROGRAM_VARIABLE;
        let is_common = |name: &OsStr| !is_ours(name) && !OF_JOB.iter().any(|own| name == *own);
        let all = || std::env::vars_os();
        let common = all().filter(|(name, value)| is_common(name) && !is_own(name, value));
        let is_set = |own: &&&str| all().any(|(name, value)| name == **own && !is_own(&name, &value));
        let of_folder = OF_FOLDER.iter().filter(|own| temporary.is_some() && !is_set(own)).copied().collect();
        Self { common: common.filter_map(|(name, value)| variable(name, &value).ok()).collect(), of_folder }
    }

    /// That of one job, whose program has this temporary folder.
    pub(super) fn of_job<S>(&self, ctx: &Ctx<S>, folder: Option<&Path>) -> io::Result<Vec<CString>> {
        let values = [
            ctx.operation().to_owned(),
            ctx.tenant().to_owned(),
            ctx.id().to_string(),
            ctx.remaining().as_millis().to_string(),
        ];
        let mut all = self.common.clone();
        for (name, value) in OF_JOB.into_iter().zip(values) {
            all.push(variable(name.into(), OsStr::new(&value))?);
        }
        for name in folder.iter().flat_map(|_| &self.of_folder) {
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

/// A program that is ready to be executed.
pub(super) struct Launch {
    program: CString,
    /// Behind the pointers.
    _texts: Vec<CString>,
    arguments: Pointers,
    environment: Pointers,
}

/// What `execve` takes: pointers to texts that live as long as the launch, and a null pointer.
struct Pointers(Vec<*const c_char>);

// SAFETY: what they point to is not changed, and goes where they go.
#[expect(unsafe_code, reason = "pointers to texts that are only read")]
unsafe impl Send for Pointers {}
// SAFETY: the same.
#[expect(unsafe_code, reason = "pointers to texts that are only read")]
unsafe impl Sync for Pointers {}

impl Pointers {
    fn to(texts: &[CString]) -> Self {
        Self(texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect())
    }
}

impl Launch {
    /// `place` is where the program is found, which knows itself by its name.
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
        let arguments = Pointers::to(&texts);
        let pointers = Pointers::to(&environment);
        texts.extend(environment);
        Ok(Self { program, _texts: texts, arguments, environment: pointers })
    }

    /// The command that does it, with pipes for its standard streams.
    pub(super) fn command(
        self,
        rlimits: Vec<(Resource, Rlimit)>,
        ruleset: Option<Ruleset>,
        proof: Option<OwnedFd>,
    ) -> Command {
        let mut command = Command::new(OsStr::from_bytes(self.program.as_bytes()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let host = rustix::process::getpid();
        // SAFETY: what runs between fork and exec makes system calls and touches memory that was made
        // before; it neither allocates nor takes a lock.
        #[expect(unsafe_code, reason = "the child sets up its own surroundings")]
        unsafe {
            command.pre_exec(move || {
                rustix::process::setsid()?;
                rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                // If the host died before that, the signal would not be sent.
                if rustix::process::getppid() != Some(host) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                if let Some(ruleset) = &ruleset {
                    ruleset.restrict(proof.as_ref().map(AsFd::as_fd))?;
                }
                // Last, since one of them may forbid to open what is looked at above.
                for (resource, limit) in &rlimits {
                    rustix::process::setrlimit(*resource, *limit)?;
                }
                self.execute()
            });
        }
        command
    }

    /// Becomes the program. Not by the C library's way, which has a shell run what the kernel does not know.
    fn execute(&self) -> io::Result<()> {
        // SAFETY: both lists end with a null pointer, and they and what they point to live in `self`.
        #[expect(unsafe_code, reason = "execve(2) has no safe form that allocates nothing")]
        unsafe {
            libc::execve(self.program.as_ptr(), self.arguments.0.as_ptr(), self.environment.0.as_ptr());
        }
        Err(io::Error::last_os_error())
    }
}

/// Why a program was not started, for people.
pub(super) fn describe(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOEXEC) => {
            format!(
                "{error}: it is neither a program of this machine nor a script that names its interpreter (#!)"
            )
        }
        Some(libc::ENOTRECOVERABLE) => "the Landlock rules for it are not in force".to_owned(),
        _ => error.to_string(),
    }
}

//! The rules of Landlock that each program of `exec` is put under, on top of the worker's own, so that the
//! programs of one worker, and the host, are out of each other's reach.
//!
//! Rules only ever take away, so each program's name again all that the worker has, but for its temporary
//! folder: in place of that stands the folder of this program alone. They also scope: no signals to, no
//! abstract sockets of, and no tracing of whatever is not below the program itself.
//!
//! What the worker has is told by the keeper (see [`bulkhead_shared::program_rules`]). It is opened once, at
//! the start, so that a program costs a system call for each path and no walk along it.
#![expect(unsafe_code, reason = "the calls of Landlock have no safe form here")]

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use bulkhead_linux::errno;
use bulkhead_shared::program_rules::{Grant, PROGRAM_RULES_BYTES_MAX, ProgramRules};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// To look at and to make rules of, and nothing else.
const PLACE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Rights that there are for single files; the kernel refuses a rule that has others.
const OF_FILES: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;

/// Folders above one another.
const DEPTH_MAX: usize = 256;

/// What a worker has, ready to be given to programs.
#[derive(Default)]
pub(super) struct Rules {
    handled: u64,
    scoped: u64,
    given: Vec<(OwnedFd, u64)>,
    temporary: Option<Temporary>,
}

/// The worker's temporary folder.
pub(super) struct Temporary {
    pub(super) path: PathBuf,
    pub(super) folder: OwnedFd,
    access: u64,
    /// Whether nothing else that is given leads to it.
    is_hidden: bool,
}

impl Rules {
    /// What the keeper left on standard input, which is the null device where there is nothing to tell.
    pub(super) fn inherited() -> io::Result<Self> {
        let stdin = io::stdin();
        if FileType::from_raw_mode(rustix::fs::fstat(&stdin)?.st_mode) != FileType::RegularFile {
            return Ok(Self::default());
        }
        let mut bytes = Vec::new();
        File::from(rustix::io::fcntl_dupfd_cloexec(&stdin, 3)?)
            .take(PROGRAM_RULES_BYTES_MAX)
            .read_to_end(&mut bytes)?;
        let told = ProgramRules::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        Self::open(told)
    }

    fn open(told: ProgramRules) -> io::Result<Self> {
        let ProgramRules { handled, scoped, temporary, grants } = told;
        let mut given = Vec::with_capacity(grants.len());
        for Grant { path, access } in &grants {
            match rustix::fs::open(path, PLACE, Mode::empty()) {
                Ok(place) => given.push((place, *access)),
                // It may be gone since the worker was given it.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let temporary = match temporary {
            Some(Grant { path, access }) => {
                let folder = rustix::fs::open(&path, PLACE | OFlags::DIRECTORY, Mode::empty())?;
                let is_hidden = !is_given(&folder, &given)?;
                Some(Temporary { path, folder, access, is_hidden })
            }
            None => None,
        };
        Ok(Self { handled, scoped, given, temporary })
    }

    /// Gives programs what they are executed from, where no path leads there.
    pub(super) fn give_program(&mut self, program: OwnedFd) {
        self.given.push((program, EXECUTE | READ_FILE));
    }

    pub(super) fn temporary(&self) -> Option<&Temporary> {
        self.temporary.as_ref()
    }

    /// Whether programs reach each other's temporary files, since `read` or `write` give a folder above.
    pub(super) fn leave_temporary_files_open(&self) -> bool {
        self.handled != 0 && self.temporary.as_ref().is_some_and(|temporary| !temporary.is_hidden)
    }

    /// Rules for one program, whose temporary folder is this one. `None`: there is no Landlock.
    pub(super) fn of_program(&self, folder: Option<BorrowedFd<'_>>) -> io::Result<Option<Ruleset>> {
        if self.handled == 0 {
            return Ok(None);
        }
        let ruleset = Ruleset(create_ruleset(self.handled, self.scoped)?);
        for (place, access) in &self.given {
            match ruleset.add(place.as_fd(), *access) {
                // What was a folder is a file by now.
                Err(Errno::INVAL) => ruleset.add(place.as_fd(), access & OF_FILES)?,
                result => result?,
            }
        }
        if let (Some(folder), Some(temporary)) = (folder, &self.temporary) {
            ruleset.add(folder, temporary.access)?;
        }
        Ok(Some(ruleset))
    }
}

/// Whether a folder lies in what is given to be listed.
fn is_given(folder: &OwnedFd, given: &[(OwnedFd, u64)]) -> io::Result<bool> {
    let listed = given.iter().filter(|(_, access)| access & READ_DIR != 0);
    let listed: Result<Vec<_>, _> = listed.map(|(place, _)| rustix::fs::fstat(place).map(name)).collect();
    let listed = listed?;
    let mut here = folder.try_clone()?;
    let mut last = None;
    for _ in 0..DEPTH_MAX {
        let this = name(rustix::fs::fstat(&here)?);
        if listed.contains(&this) {
            return Ok(true);
        }
        if last == Some(this) {
            return Ok(false);
        }
        last = Some(this);
        here = rustix::fs::openat(&here, "..", PLACE | OFlags::DIRECTORY, Mode::empty())?;
    }
    Ok(true)
}

fn name(stat: Stat) -> (u64, u64) {
    #[allow(clippy::useless_conversion, reason = "the types differ between machines")]
    (stat.st_dev.into(), stat.st_ino.into())
}

/// Rules that are ready to be put in force.
pub(super) struct Ruleset(OwnedFd);

impl Ruleset {
    fn add(&self, place: BorrowedFd<'_>, access: u64) -> Result<(), Errno> {
        /// `struct landlock_path_beneath_attr`.
        #[repr(C, packed)]
        struct PathBeneathAttr {
            allowed_access: u64,
            parent_fd: i32,
        }
        const RULE_PATH_BENEATH: libc::c_int = 1;
        let rule = PathBeneathAttr { allowed_access: access, parent_fd: place.as_raw_fd() };
        // SAFETY: the pointer is to a local of the form that the kernel reads for this kind of rule.
        let result = unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.0.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const rule,
                NO_FLAGS,
            )
        };
        if result == 0 { Ok(()) } else { Err(errno::last()) }
    }

    /// Puts this process under them, for ever, and all that it starts; `worker` is the worker's temporary
    /// folder, which no program can list from then on. For a forked child: system calls and nothing else.
    pub(super) fn restrict(&self, worker: Option<BorrowedFd<'_>>) -> io::Result<()> {
        // SAFETY: takes two numbers, and touches no memory of ours.
        let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.0.as_raw_fd(), NO_FLAGS) };
        if result != 0 {
            return Err(errno::last().into());
        }
        let Some(folder) = worker else { return Ok(()) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(folder, c".", flags, Mode::empty()) {
            Err(Errno::ACCESS) => Ok(()),
            // Said to be in force, and are not.
            _ => Err(Errno::NOTRECOVERABLE.into()),
        }
    }
}

impl Temporary {
    /// What proves that a program's rules are in force: that it cannot list this.
    pub(super) fn proof(&self) -> io::Result<Option<OwnedFd>> {
        self.is_hidden.then(|| self.folder.try_clone()).transpose()
    }
}

const NO_FLAGS: libc::c_uint = 0;

fn create_ruleset(handled: u64, scoped: u64) -> Result<OwnedFd, Errno> {
    /// `struct landlock_ruleset_attr`. Older kernels know less of it, and take what they do not know as long
    /// as it is zero.
    #[repr(C)]
    struct RulesetAttr {
        handled_access_fs: u64,
        handled_access_net: u64,
        scoped: u64,
    }
    // What the worker's own rules withhold of the network, they withhold from its programs.
    let attr = RulesetAttr { handled_access_fs: handled, handled_access_net: 0, scoped };
    // SAFETY: the pointer is to a local of the size that is told.
    let descriptor = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size_of::<RulesetAttr>(), NO_FLAGS)
    };
    if descriptor < 0 {
        return Err(errno::last());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

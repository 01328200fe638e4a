//! The rules of Landlock that each program of `exec` is put under, on top of the worker's own, so that the
//! programs of one worker, and the host, are out of each other's reach. Workers forked by a template get rules on top
//! of the template's in the same way. For these, read "worker" for "program" and "template" for "worker" below.
//!
//! Rules only ever take away, so each program's name again what the worker has, but for its temporary
//! folder: in place of that stands the folder of this program alone. They also scope: no signals to, no
//! abstract sockets of, and no tracing of whatever is not below the program itself.
//!
//! What the worker has is told by the keeper (see [`bulkhead_shared::program_rules`]). It is opened once, at
//! the start, so that a program costs one system call for each path, without a path lookup. In system folders only the
//! topmost folders are opened, however many of their paths the worker may use.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bulkhead_linux::folder::{self, FOLDER};
use bulkhead_linux::landlock::{self, Withheld};
use bulkhead_shared::program_rules::{Grant, PROGRAM_RULES_BYTES_MAX, ProgramRules};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
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

/// Folders of the system. `/dev` is none of them, because the worker's temporary folder is mounted at `/dev/shm` as well.
const SYSTEM: [&str; 10] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys"];

/// Variables that name the temporary folder, unless `env` sets them.
pub(crate) const OF_FOLDER: [&str; 2] = ["TMPDIR", "HOME"];

/// Of Landlock: with it the kernel logs what is tried and refused.
const NO_VERSION: u32 = 0;

/// Folders above one another.
const DEPTH_MAX: usize = 256;

/// What a worker has, ready to be given to programs.
#[derive(Default)]
pub(crate) struct Rules {
    handled: u64,
    scoped: u64,
    given: Vec<(OwnedFd, u64)>,
    temporary: Option<Temporary>,
}

/// The worker's temporary folder.
pub(crate) struct Temporary {
    pub(crate) path: PathBuf,
    pub(crate) folder: OwnedFd,
    access: u64,
    /// Whether nothing else that is given leads to it.
    is_hidden: bool,
}

impl Rules {
    /// Reads the rules that the keeper left on standard input; without rules this is the null device. The rules of a
    /// program only have to withhold the other programs' folders, because the rules of this process still apply. So
    /// system folders are granted as a whole, and the number of descriptors does not depend on the number of installed
    /// paths.
    pub(crate) fn inherited() -> io::Result<Self> {
        let stdin = io::stdin();
        if FileType::from_raw_mode(rustix::fs::fstat(&stdin)?.st_mode) != FileType::RegularFile {
            return Ok(Self::default());
        }
        let mut bytes = Vec::new();
        File::from(rustix::io::fcntl_dupfd_cloexec(&stdin, 3)?)
            .take(PROGRAM_RULES_BYTES_MAX)
            .read_to_end(&mut bytes)?;
        let told = ProgramRules::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let grants = widened(&told)?;
        // Nothing else is withheld where there is no folder to keep apart.
        let handled = if told.temporary.is_some() { told.handled } else { 0 };
        Self::open(ProgramRules { handled, grants, ..told })
    }

    /// Whether there is anything to put in force.
    pub(crate) fn are_any(&self) -> bool {
        self.handled != 0 || self.scoped != 0
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
        let open = |Grant { path, access }| -> io::Result<Temporary> {
            let folder = open_folder(&path)?;
            let is_hidden = !is_given(&folder, &given)?;
            Ok(Temporary { path, folder, access, is_hidden })
        };
        let temporary = temporary.map(open).transpose()?;
        Ok(Self { handled, scoped, given, temporary })
    }

    /// Gives programs what they are executed from, where no path leads there.
    pub(crate) fn give_program(&mut self, program: OwnedFd) {
        self.given.push((program, EXECUTE | READ_FILE));
    }

    pub(crate) fn temporary(&self) -> Option<&Temporary> {
        self.temporary.as_ref()
    }

    /// Whether programs reach each other's temporary files, since `read` or `write` give a folder above.
    pub(crate) fn leave_temporary_files_open(&self) -> bool {
        self.handled != 0 && self.temporary.as_ref().is_some_and(|temporary| !temporary.is_hidden)
    }

    /// Rules for one program, whose temporary folder is this one. `None`: there is no Landlock.
    pub(crate) fn of_program(&self, folder: Option<BorrowedFd<'_>>) -> io::Result<Option<Ruleset>> {
        if !self.are_any() {
            return Ok(None);
        }
        // What the worker's own rules withhold of the network, they withhold from its programs.
        let withheld = Withheld { files: self.handled, network: 0, scopes: self.scoped };
        let ruleset = landlock::create_ruleset(withheld)?;
        for (place, access) in self.given.iter().filter(|_| self.handled != 0) {
            match landlock::give(ruleset.as_fd(), place.as_fd(), *access) {
                // What was a folder is a file by now.
                Err(Errno::INVAL) => landlock::give(ruleset.as_fd(), place.as_fd(), access & OF_FILES)?,
                result => result?,
            }
        }
        if let (Some(folder), Some(temporary)) = (folder, &self.temporary) {
            landlock::give(ruleset.as_fd(), folder, temporary.access)?;
        }
        Ok(Some(Ruleset(ruleset)))
    }
}

/// Returns the grants with the folders of [`SYSTEM`] in place of what lies in them, unless that contains the temporary
/// folder.
fn widened(told: &ProgramRules) -> io::Result<Vec<Grant>> {
    let temporary = told.temporary.as_ref().map(|temporary| open_folder(&temporary.path)).transpose()?;
    let is_apart = |place: OwnedFd| {
        let given = [(place, READ_DIR)];
        temporary.as_ref().is_none_or(|folder| is_given(folder, &given).is_ok_and(|is_given| !is_given))
    };
    let mut wide: Vec<Grant> = Vec::new();
    for grant in &told.grants {
        let top: PathBuf = grant.path.components().take(2).collect();
        if wide.iter().any(|known| known.path == top && known.access == told.handled) {
            continue;
        }
        let is_of_system = SYSTEM.iter().any(|folder| top == Path::new(folder));
        let is_wide = is_of_system && open_folder(&top).is_ok_and(is_apart);
        wide.push(if is_wide { Grant { path: top, access: told.handled } } else { grant.clone() });
    }
    Ok(wide)
}

fn open_folder(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, PLACE | OFlags::DIRECTORY, Mode::empty())
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
pub(crate) struct Ruleset(OwnedFd);

impl Ruleset {
    /// Puts this process under them, for ever, and all that it starts; `worker` is the worker's temporary
    /// folder, which no program can list from then on. For a forked child: system calls and nothing else.
    pub(crate) fn restrict(&self, worker: Option<BorrowedFd<'_>>) -> io::Result<()> {
        landlock::restrict_self(self.0.as_fd(), NO_VERSION)?;
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
    pub(crate) fn proof(&self) -> io::Result<Option<OwnedFd>> {
        self.is_hidden.then(|| self.folder.try_clone()).transpose()
    }

    /// Makes a folder in it.
    pub(crate) fn make(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        self.open_up();
        rustix::fs::mkdirat(&self.folder, name, Mode::RWXU)?;
        rustix::fs::openat(&self.folder, name, FOLDER | OFlags::PATH, Mode::empty())
    }

    /// Programs have the host's user, and may have shut the folder that theirs lie in.
    fn open_up(&self) {
        let is_open = rustix::fs::fstat(&self.folder)
            .is_ok_and(|found| Mode::from_raw_mode(found.st_mode).contains(Mode::RWXU));
        if !is_open {
            let _ = folder::give_to_owner(&self.folder);
        }
    }

    /// Removes a folder in it, unless that has many entries; whether nothing is left to do.
    pub(crate) fn remove(&self, name: &CStr, entries_max: usize) -> bool {
        let parent = self.folder.as_fd();
        self.open_up();
        if rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) != Err(Errno::NOTEMPTY) {
            return true;
        }
        let Ok(folder) = folder::open(parent, name, Mode::RWXU) else { return true };
        // What cannot be removed goes with the worker's own folder.
        if folder::empty(&folder, entries_max) == Ok(false) {
            return false;
        }
        let _ = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
        true
    }
}

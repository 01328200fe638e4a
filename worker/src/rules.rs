//! Creates Landlock rules for each program run by `exec`, in addition to the worker's rules, which the keeper enforces.
//! The additional rules isolate a worker's programs from each other and from the host. A worker forked by a template
//! gets additional rules in the same way. For such a worker, "program" in this module means the worker, and "worker"
//! means the template.
//!
//! Additional Landlock rules can only remove rights. A program's rules therefore repeat the worker's grants,
//! with the program's temporary folder in place of the worker's temporary folder. The rules also set scopes,
//! so that a program cannot signal or trace processes that are not its descendants, or connect to their
//! abstract sockets.
//!
//! The keeper passes the worker's grants (see [`bulkhead_shared::program_rules`]). The host opens the granted
//! paths once, when it starts, so that starting a program costs one system call per granted path and no path
//! lookup. If paths in a system folder are granted, the host opens only the top-level folder.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bulkhead_linux::folder::{self, FOLDER_FLAGS};
use bulkhead_linux::landlock::{self, HandledAccess};
use bulkhead_shared::program_rules::{Grant, PROGRAM_RULES_BYTES_MAX, ProgramRules};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Flags for opening files and folders that are only inspected or referred to in rules.
const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Access rights that apply to files. The kernel rejects a rule that grants any other right on a file.
const FILE_RIGHTS: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;

/// System folders. If any path in one of these folders is granted, programs get access to the whole folder. `/dev` is
/// not in the list, because the worker's temporary folder is also mounted at `/dev/shm`.
const SYSTEM_FOLDERS: [&str; 10] =
    ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys"];

/// Environment variables that contain the path of the temporary folder, unless the `env` configuration key sets them.
pub(crate) const FOLDER_VARIABLES: [&str; 2] = ["TMPDIR", "HOME"];

/// Flags for `landlock_restrict_self(2)`. The value is zero, so that the kernel logs denied accesses.
const RESTRICT_FLAGS: u32 = 0;

/// Maximum number of parent folders to check for a grant.
const DEPTH_MAX: usize = 256;

/// The worker's grants, from which each program's rules are created. A descriptor keeps each granted path open.
#[derive(Default)]
pub(crate) struct Rules {
    handled: u64,
    scoped: u64,
    granted: Vec<(OwnedFd, u64)>,
    temporary: Option<Temporary>,
}

/// The worker's temporary folder.
pub(crate) struct Temporary {
    pub(crate) path: PathBuf,
    pub(crate) folder: OwnedFd,
    access: u64,
    /// True if no grant covers the temporary folder. Programs then cannot list the folder.
    is_hidden: bool,
}

impl Rules {
    /// Reads the rules that the keeper passes on standard input, which is the null device if there are no rules. The
    /// worker's rules continue to apply to programs, so a program's own rules only have to deny access to the folders
    /// of other programs. System folders are therefore granted as a whole, which keeps the number of open descriptors
    /// low.
    pub(crate) fn inherited() -> io::Result<Self> {
        let stdin = io::stdin();
        if FileType::from_raw_mode(rustix::fs::fstat(&stdin)?.st_mode) != FileType::RegularFile {
            return Ok(Self::default());
        }
        let mut bytes = Vec::new();
        File::from(rustix::io::fcntl_dupfd_cloexec(&stdin, 3)?)
            .take(PROGRAM_RULES_BYTES_MAX)
            .read_to_end(&mut bytes)?;
        let rules = ProgramRules::decode(&bytes).ok_or(io::ErrorKind::InvalidData)?;
        let grants = with_system_folders(&rules)?;
        // Without a temporary folder, there is nothing to hide from other programs.
        let handled = if rules.temporary.is_some() { rules.handled } else { 0 };
        Self::open(ProgramRules { handled, grants, ..rules })
    }

    /// Returns true if there are rules to enforce.
    pub(crate) fn has_rules(&self) -> bool {
        self.handled != 0 || self.scoped != 0
    }

    fn open(rules: ProgramRules) -> io::Result<Self> {
        let ProgramRules { handled, scoped, temporary, grants } = rules;
        let mut granted = Vec::with_capacity(grants.len());
        for Grant { path, access } in &grants {
            match rustix::fs::open(path, PATH_FLAGS, Mode::empty()) {
                Ok(place) => granted.push((place, *access)),
                // The path may have been removed since the worker started.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let open = |Grant { path, access }| -> io::Result<Temporary> {
            let folder = open_folder(&path)?;
            let is_hidden = !is_granted(&folder, &granted)?;
            Ok(Temporary { path, folder, access, is_hidden })
        };
        let temporary = temporary.map(open).transpose()?;
        Ok(Self { handled, scoped, granted, temporary })
    }

    /// Lets programs read and execute the file that the descriptor `program` refers to. Used if the file's path is
    /// not accessible.
    pub(crate) fn grant_program(&mut self, program: OwnedFd) {
        self.granted.push((program, EXECUTE | READ_FILE));
    }

    pub(crate) fn temporary(&self) -> Option<&Temporary> {
        self.temporary.as_ref()
    }

    /// Returns true if programs can read each other's temporary files because `read` or `write` covers the
    /// temporary folder.
    pub(crate) fn exposes_temporary_files(&self) -> bool {
        self.handled != 0 && self.temporary.as_ref().is_some_and(|temporary| !temporary.is_hidden)
    }

    /// Creates the rules for a program with the temporary folder `folder`, or returns `None` if there are no rules
    /// to enforce.
    pub(crate) fn for_program(&self, folder: Option<BorrowedFd<'_>>) -> io::Result<Option<Ruleset>> {
        if !self.has_rules() {
            return Ok(None);
        }
        // Network rights are not restricted again, because programs inherit the restrictions of the worker's
        // rules.
        let withheld = HandledAccess { files: self.handled, network: 0, scopes: self.scoped };
        let ruleset = landlock::create_ruleset(withheld)?;
        for (place, access) in self.granted.iter().filter(|_| self.handled != 0) {
            match landlock::add_path_rule(ruleset.as_fd(), place.as_fd(), *access) {
                // The path was a folder when the rules were created, and is a file now.
                Err(Errno::INVAL) => {
                    landlock::add_path_rule(ruleset.as_fd(), place.as_fd(), access & FILE_RIGHTS)?
                }
                result => result?,
            }
        }
        if let (Some(folder), Some(temporary)) = (folder, &self.temporary) {
            landlock::add_path_rule(ruleset.as_fd(), folder, temporary.access)?;
        }
        Ok(Some(Ruleset(ruleset)))
    }
}

/// Replaces grants for paths in [`SYSTEM_FOLDERS`] with a grant for the whole system folder, unless this folder
/// contains the temporary folder.
fn with_system_folders(rules: &ProgramRules) -> io::Result<Vec<Grant>> {
    let temporary = rules.temporary.as_ref().map(|temporary| open_folder(&temporary.path)).transpose()?;
    let is_apart = |place: OwnedFd| {
        let granted = [(place, READ_DIR)];
        temporary.as_ref().is_none_or(|folder| matches!(is_granted(folder, &granted), Ok(false)))
    };
    let mut wide: Vec<Grant> = Vec::new();
    for grant in &rules.grants {
        let top: PathBuf = grant.path.components().take(2).collect();
        if wide.iter().any(|known| known.path == top && known.access == rules.handled) {
            continue;
        }
        let is_of_system = SYSTEM_FOLDERS.iter().any(|folder| top == Path::new(folder));
        let is_wide = is_of_system && open_folder(&top).is_ok_and(is_apart);
        wide.push(if is_wide { Grant { path: top, access: rules.handled } } else { grant.clone() });
    }
    Ok(wide)
}

fn open_folder(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, PATH_FLAGS | OFlags::DIRECTORY, Mode::empty())
}

/// Returns true if a grant with the right to list folders covers `folder`. Also returns true if `folder` has
/// more than `DEPTH_MAX` parent folders.
fn is_granted(folder: &OwnedFd, granted: &[(OwnedFd, u64)]) -> io::Result<bool> {
    let listed = granted.iter().filter(|(_, access)| access & READ_DIR != 0);
    let listed: Result<Vec<_>, _> = listed.map(|(place, _)| rustix::fs::fstat(place).map(identity)).collect();
    let listed = listed?;
    let mut here = folder.try_clone()?;
    let mut last = None;
    for _ in 0..DEPTH_MAX {
        let this = identity(rustix::fs::fstat(&here)?);
        if listed.contains(&this) {
            return Ok(true);
        }
        if last == Some(this) {
            return Ok(false);
        }
        last = Some(this);
        here = rustix::fs::openat(&here, "..", PATH_FLAGS | OFlags::DIRECTORY, Mode::empty())?;
    }
    Ok(true)
}

fn identity(stat: Stat) -> (u64, u64) {
    #[allow(clippy::useless_conversion, reason = "the types differ between machines")]
    (stat.st_dev.into(), stat.st_ino.into())
}

/// Landlock rules, ready to be enforced.
pub(crate) struct Ruleset(OwnedFd);

impl Ruleset {
    /// Permanently restricts this process and all processes that it starts later. Then checks that the worker's
    /// temporary folder, `worker`, can no longer be listed. Makes only system calls, because this function runs in a
    /// forked child.
    pub(crate) fn restrict(&self, worker: Option<BorrowedFd<'_>>) -> io::Result<()> {
        landlock::restrict_self(self.0.as_fd(), RESTRICT_FLAGS)?;
        let Some(folder) = worker else { return Ok(()) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(folder, c".", flags, Mode::empty()) {
            Err(Errno::ACCESS) => Ok(()),
            // Landlock accepted the rules but does not enforce them.
            _ => Err(Errno::NOTRECOVERABLE.into()),
        }
    }
}

impl Temporary {
    /// Returns the temporary folder if programs must not be able to list it. If a program can list this folder, the
    /// program's rules are not enforced.
    pub(crate) fn hidden_folder(&self) -> io::Result<Option<OwnedFd>> {
        self.is_hidden.then(|| self.folder.try_clone()).transpose()
    }

    /// Creates a subfolder of the temporary folder.
    pub(crate) fn make(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        self.restore_owner_rights();
        rustix::fs::mkdirat(&self.folder, name, Mode::RWXU)?;
        rustix::fs::openat(&self.folder, name, FOLDER_FLAGS | OFlags::PATH, Mode::empty())
    }

    /// Restores the owner's permissions on the folder. Programs run as the host's user, so they can remove
    /// these permissions.
    fn restore_owner_rights(&self) {
        let is_open = rustix::fs::fstat(&self.folder)
            .is_ok_and(|found| Mode::from_raw_mode(found.st_mode).contains(Mode::RWXU));
        if !is_open {
            let _ = folder::restrict_to_owner(&self.folder);
        }
    }

    /// Removes a subfolder of the temporary folder. Each call removes at most `entries_max` entries. Returns
    /// true if no further call is needed.
    pub(crate) fn remove(&self, name: &CStr, entries_max: usize) -> bool {
        let parent = self.folder.as_fd();
        self.restore_owner_rights();
        if rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) != Err(Errno::NOTEMPTY) {
            return true;
        }
        let Ok(folder) = folder::open(parent, name, Mode::RWXU) else { return true };
        // Entries that cannot be removed now are removed later, together with the worker's temporary folder.
        if folder::empty(&folder, entries_max) == Ok(false) {
            return false;
        }
        let _ = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
        true
    }
}

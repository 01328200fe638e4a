//! Landlock rules, which restrict the files that a worker can access, and deny access to sockets and
//! processes outside the sandbox.
//!
//! The keeper prepares the rules before the fork. The child enforces the rules and tests the result (see
//! `self_test`). The rules handle all rights that both the running kernel and the library know. They grant
//! rights only for the paths in [`Rules`] and for paths that every program needs. `probe` reports the
//! features that an older kernel lacks.
//!
//! Rules refer to files, not to names. If a file is replaced with another file of the same name, a running
//! worker cannot access the new file until the worker is restarted.

mod self_test;

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bulkhead_linux::errno;
use bulkhead_linux::landlock::{abi_version, add_path_rule, restrict_self};
use bulkhead_shared::program_rules;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use self::self_test::ForbiddenAction;
use super::paths::{self, PROC_FOLDER};
use crate::protocol::confinement::NetworkAccess;

/// Newest Landlock version that the `landlock` crate supports. Used only to look up which rights apply to files as well
/// as to folders. The rights that are granted depend on the version of the running kernel.
const NEWEST_ABI: ABI = ABI::V9;

/// Paths that a worker can access in addition to the paths that every program needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules<'a> {
    /// The worker's program, and the files that the program executes or loads. The worker can read and
    /// execute all files in the folders of these files. Missing paths are not an error here, because
    /// executing the program reports the error.
    pub(crate) programs: &'a [&'a Path],
    /// The working directory. The worker can read and execute the files in it. A missing directory is not an
    /// error here, because a later step reports it.
    pub(crate) directory: Option<&'a Path>,
    /// Files and folders that the worker can read and execute. The right to execute is included because
    /// interpreters and virtual environments need it, and because a process that can read a program can run
    /// it with the dynamic loader anyway.
    pub(crate) read: &'a [&'a Path],
    /// Files and folders to which the worker has full access, except for creating device nodes.
    pub(crate) write: &'a [&'a Path],
    /// The worker's private temporary folder. Grants the same rights as `write`, except the rights that concern sockets
    /// and devices.
    pub(crate) temporary: Option<&'a Path>,
    /// Paths that the worker must not access, even inside granted folders.
    pub(crate) withheld: &'a [&'a Path],
    /// True if the worker has a private root folder. Rules for the system's root folder do not apply to a private
    /// root.
    pub(crate) has_own_root: bool,
    pub(crate) network: NetworkAccess,
    /// Ports to which the worker can connect if its network access is [`NetworkAccess::Connections`].
    pub(crate) tcp_ports: &'a [u16],
}

/// Error from preparing Landlock rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Description of the failed action. Completes a sentence that begins with "failed to".
    pub(crate) attempted: String,
    /// Error number from the kernel.
    pub(crate) errno: Errno,
}

/// Landlock rules that are ready to be enforced.
#[derive(Debug)]
pub(crate) struct Ruleset {
    descriptor: OwnedFd,
    abi: u32,
    forbidden: ForbiddenAction,
    /// Granted paths that existed when the rules were prepared, and the rights granted for each.
    granted: Vec<program_rules::Grant>,
}

/// Reason why the rules have no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestrictError {
    /// The kernel refused the rules.
    Rejected(Errno),
    /// The kernel accepted the rules, but a forbidden action succeeded.
    NotEnforced,
}

impl Ruleset {
    /// Creates the ruleset. Skips missing system paths, but fails if a path from the configuration is missing.
    pub(crate) fn prepare(rules: &Rules<'_>) -> Result<Self, Failure> {
        let abi = abi_version().map_err(|errno| failure("use Landlock", errno))?;
        let known = ABI::from(abi as i32);
        let mut ruleset =
            create(known, rules.network).map_err(|e| ruleset_failure("make a Landlock ruleset", e))?;
        add_ports(&mut ruleset, known, rules)
            .map_err(|error| ruleset_failure("add a Landlock rule for a port", error))?;
        let root = rustix::fs::stat("/").map_err(|errno| failure("inspect the root folder", errno))?;
        let mut root_is_given = false;
        let mut granted = Vec::new();
        for grant in grants(rules, known)? {
            let Some(AddedRule { identity, access }) = add(&mut ruleset, &grant)? else { continue };
            root_is_given |= identity == (root.st_dev, root.st_ino);
            granted.push(program_rules::Grant { path: grant.path, access });
        }
        let descriptor = Option::<OwnedFd>::from(ruleset);
        let descriptor = descriptor.ok_or_else(|| failure("make a Landlock ruleset", Errno::NOSYS))?;
        let forbidden = ForbiddenAction::choose(root_is_given && !rules.has_own_root, rules.temporary);
        Ok(Self { descriptor, abi, forbidden, granted })
    }

    /// Returns rules for the programs that the worker runs. Under these rules, each program can access only its own
    /// subfolder of the worker's temporary folder.
    pub(crate) fn program_rules(&self, temporary: Option<&Path>) -> program_rules::ProgramRules {
        let abi = ABI::from(self.abi as i32);
        let is_other = |grant: &&program_rules::Grant| Some(grant.path.as_path()) != temporary;
        program_rules::ProgramRules {
            handled: AccessFs::from_all(abi).bits(),
            scoped: Scope::from_all(abi).bits(),
            temporary: temporary.map(|path| program_rules::Grant {
                path: path.to_owned(),
                access: temporary_access(abi).bits(),
            }),
            grants: self.granted.iter().filter(is_other).cloned().collect(),
        }
    }

    /// Returns the ruleset's descriptor, which the child must not close when it closes all other descriptors.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the Landlock version that the kernel supports.
    pub(crate) fn abi(&self) -> u32 {
        self.abi
    }

    /// Grants access to the folders that are mounted in a private root folder: `/proc`, and `/tmp` if
    /// `has_tmp` is true. Safe in a forked child, because it makes only system calls.
    pub(crate) fn add_private_mounts(&self, has_tmp: bool) -> Result<(), Errno> {
        self.add_path(c"/proc", AccessFs::ReadFile | AccessFs::ReadDir)?;
        if has_tmp { self.add_path(c"/tmp", temporary_access(ABI::from(self.abi as i32))) } else { Ok(()) }
    }

    /// Grants access to a private temporary file system. Makes only system calls, and is therefore safe in a forked
    /// child.
    pub(crate) fn add_temporary(&self, folder: &CStr) -> Result<(), Errno> {
        self.add_path(folder, temporary_access(ABI::from(self.abi as i32)))
    }

    /// Grants read access to a folder that was mounted over a folder to which access was granted. Safe in a forked
    /// child, because it makes only system calls.
    pub(crate) fn add_readable(&self, folder: &CStr) -> Result<(), Errno> {
        self.add_path(folder, AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute)
    }

    fn add_path(&self, path: &CStr, access: BitFlags<AccessFs>) -> Result<(), Errno> {
        let folder = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        add_path_rule(self.descriptor.as_fd(), folder.as_fd(), access.bits())
    }

    /// Enforces the rules on the calling thread and on all processes that it starts. This cannot be undone. Then checks
    /// that the rules have taken effect, by attempting an action that must fail. The thread must have no capabilities,
    /// and must have set `PR_SET_NO_NEW_PRIVS`. Safe in a forked child, because it makes only system calls.
    pub(crate) fn restrict(&self) -> Result<(), RestrictError> {
        // If the user lacks a right, the action fails even without the rules, and a failure under the rules proves
        // nothing.
        let is_conclusive = self.forbidden.attempt().is_ok();
        restrict_self(self.descriptor.as_fd(), self.abi).map_err(RestrictError::Rejected)?;
        if is_conclusive && self.forbidden.attempt() != Err(Errno::ACCESS) {
            return Err(RestrictError::NotEnforced);
        }
        Ok(())
    }
}

/// Grants the right to connect to the permitted ports. Does nothing on a kernel whose version of Landlock has no rights
/// for TCP; the supervisor starts such a worker only if the configuration permits it.
fn add_ports(ruleset: &mut RulesetCreated, abi: ABI, rules: &Rules<'_>) -> Result<(), RulesetError> {
    let has_tcp = AccessNet::from_all(abi).contains(AccessNet::ConnectTcp);
    if matches!(rules.network, NetworkAccess::Connections { .. }) && has_tcp {
        for port in rules.tcp_ports {
            ruleset.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
        }
    }
    Ok(())
}

/// Creates a ruleset that denies all access.
fn create(abi: ABI, network: NetworkAccess) -> Result<RulesetCreated, RulesetError> {
    let ruleset = landlock::Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let mut ruleset = ruleset.handle_access(AccessFs::from_all(abi))?;
    let scopes = Scope::from_all(abi);
    let denied = match network {
        NetworkAccess::None => AccessNet::from_all(abi),
        NetworkAccess::Connections { .. } => {
            (AccessNet::BindTcp | AccessNet::ConnectTcp) & AccessNet::from_all(abi)
        }
        NetworkAccess::All => BitFlags::EMPTY,
    };
    if !denied.is_empty() {
        ruleset = ruleset.handle_access(denied)?;
    }
    if !scopes.is_empty() {
        ruleset = ruleset.scope(scopes)?;
    }
    ruleset.create()
}

/// A path, and the rights granted for the path and for everything below it.
struct Grant {
    path: PathBuf,
    access: BitFlags<AccessFs>,
    condition: Condition,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Condition {
    /// The path must exist, because it comes from the configuration.
    Required,
    IfPresent,
    IfWorldReadable,
}

fn grants(rules: &Rules<'_>, abi: ABI) -> Result<Vec<Grant>, Failure> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let execute = read | AccessFs::Execute;
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let write = AccessFs::from_all(abi) & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let temporary = temporary_access(abi);

    let if_present =
        |paths: &[&str], access| Grant::all(paths.iter().map(PathBuf::from), access, Condition::IfPresent);
    let required =
        |paths: &[&Path], access| Grant::all(paths.iter().map(PathBuf::from), access, Condition::Required);
    let mut grants = if_present(&paths::SYSTEM_FOLDERS, execute);
    grants.extend(Grant::all(paths::world_readable(), read, Condition::IfWorldReadable));
    grants.extend(if_present(&paths::DEVICES, device & AccessFs::from_all(abi)));
    grants.extend(if_present(&paths::RANDOM_DEVICES, AccessFs::ReadFile.into()));
    grants.extend(if_present(&[PROC_FOLDER], read));
    for folder in paths::program_folders(rules.programs, rules.directory, rules.write) {
        let parts = paths::grantable_parts(&folder, rules.withheld, rules.write);
        let parts = parts.map_err(|error| list_failure(&folder, &error))?;
        if parts.len() != 1 || parts[0] != folder {
            grants.extend(Grant::all([folder], AccessFs::ReadDir.into(), Condition::IfPresent));
        }
        grants.extend(Grant::all(parts, execute, Condition::IfPresent));
    }
    for (paths, access) in [(rules.read, execute), (rules.write, write)] {
        for path in paths {
            let is_grantable =
                paths::is_grantable(path, rules.write).map_err(|errno| link_failure(path, errno))?;
            if rules.has_own_root && std::fs::canonicalize(path).is_ok_and(|real| real == Path::new("/")) {
                // Grants access to each entry of the system's root folder, because the private root folder contains the
                // same entries.
                grants.extend(Grant::all(paths::root_entries(), access, Condition::IfPresent));
            } else if is_grantable {
                grants.extend(required(&[path], access));
            }
        }
    }
    grants.extend(required(rules.temporary.as_slice(), temporary));
    Ok(grants)
}

/// Returns the rights that a worker has in its temporary folder.
fn temporary_access(abi: ABI) -> BitFlags<AccessFs> {
    let never = AccessFs::MakeChar
        | AccessFs::MakeBlock
        | AccessFs::MakeSock
        | AccessFs::ResolveUnix
        | AccessFs::IoctlDev;
    AccessFs::from_all(abi) & !never
}

impl Grant {
    fn all(
        paths: impl IntoIterator<Item = PathBuf>,
        access: BitFlags<AccessFs>,
        condition: Condition,
    ) -> Vec<Self> {
        paths.into_iter().map(|path| Self { path, access, condition }).collect()
    }
}

/// A rule that has been added to the ruleset, identified by the file to which it applies.
struct AddedRule {
    /// Device number and inode number of the path.
    identity: (u64, u64),
    /// Granted rights, as bits.
    access: u64,
}

/// Adds a rule. Returns `None` if the path is missing and is not required.
fn add(ruleset: &mut RulesetCreated, grant: &Grant) -> Result<Option<AddedRule>, Failure> {
    let Grant { path, access, condition } = grant;
    let failed = |errno| failure(&format!("open {} for a Landlock rule", path.display()), errno);
    let descriptor = match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(descriptor) => descriptor,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP)
            if *condition != Condition::Required =>
        {
            return Ok(None);
        }
        Err(errno) => return Err(failed(errno)),
    };
    let found = rustix::fs::fstat(&descriptor).map_err(failed)?;
    let mode = found.st_mode;
    if *condition == Condition::IfWorldReadable && !Mode::from_raw_mode(mode).contains(Mode::ROTH) {
        return Ok(None);
    }
    let is_folder = FileType::from_raw_mode(mode) == FileType::Directory;
    // Removes the rights for folders from a rule for a file, because the kernel would reject the rule.
    let access = if is_folder { *access } else { *access & AccessFs::from_file(NEWEST_ABI) };
    let added = ruleset.add_rule(PathBeneath::new(descriptor, access));
    added.map_err(|error| ruleset_failure(&format!("add a Landlock rule for {}", path.display()), error))?;
    Ok(Some(AddedRule { identity: (found.st_dev, found.st_ino), access: access.bits() }))
}

fn link_failure(path: &Path, errno: Errno) -> Failure {
    let path = path.display();
    match errno {
        Errno::XDEV => failure(
            &format!(
                "grant access to {path}, which leads out of a folder in `write` through a link that the \
                 worker can change"
            ),
            errno,
        ),
        errno => failure(&format!("open {path} for a Landlock rule"), errno),
    }
}

fn list_failure(folder: &Path, error: &std::io::Error) -> Failure {
    let errno = errno::from_io(error, Errno::INVAL);
    failure(&format!("list {} for Landlock rules: {error}", folder.display()), errno)
}

fn failure(attempted: &str, errno: Errno) -> Failure {
    Failure { attempted: attempted.to_owned(), errno }
}

fn ruleset_failure(attempted: &str, error: RulesetError) -> Failure {
    let errno = Errno::from_raw_os_error(*landlock::Errno::from(error));
    failure(attempted, errno)
}

#[cfg(test)]
mod tests;

//! Landlock: which files a worker reaches, and which sockets and processes outside it does not.
//!
//! The rules are made in the keeper, before the fork; the child puts them in place with one system call.
//! All rights that the running kernel knows are withheld, and given back for the paths below alone, never
//! "as far as possible": a kernel that lacks a right has it named by [`missing`], and whether that will
//! do is for others to decide. (Rights of kernels to come are not withheld until the library knows them.)
//!
//! What rules hold on to are the files themselves, not their names. So what is replaced under its name
//! while a worker runs is closed to it until it is started anew.
#![expect(unsafe_code, reason = "two system calls that no library offers in the form needed here")]

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Programs, libraries and what belongs to them: read and executed.
const SYSTEM: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    // Where NixOS and Guix have theirs; readable by everybody, by design.
    "/nix/store",
    "/gnu/store",
];

/// What ordinary programs look up in `/etc`. A list, since rules can only add: with all of `/etc` given,
/// nothing in it could be held back. Only what others may read is given, so that a certificate store
/// that somebody locked stays locked, even if the supervisor is root.
const ETC: [&str; 52] = [
    // Programs and libraries
    "alternatives",
    "os-release",
    "debian_version",
    "redhat-release",
    "perl",
    "node",
    "OpenCL",
    "glvnd",
    "vulkan",
    "ghostscript",
    "papersize",
    "paperspecs",
    "poppler",
    // Users and groups, without their passwords
    "passwd",
    "group",
    "nsswitch.conf",
    "shells",
    // Names and numbers of the network
    "hosts",
    "host.conf",
    "hostname",
    "resolv.conf",
    "gai.conf",
    "networks",
    "protocols",
    "services",
    "rpc",
    "ethertypes",
    "netconfig",
    // Certificates and what cryptographic libraries are told; never private keys
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "gnutls",
    "pki/ca-trust",
    "pki/java",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "pki/tls/openssl.d",
    "ssl/ca-bundle.pem",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    // Time, language, types of files, fonts
    "localtime",
    "timezone",
    "inputrc",
    "terminfo",
    "mime.types",
    "magic",
    "magic.mime",
    "fonts",
    "sgml",
    "xml",
];

/// The same for names that carry a version: whatever in `/etc` begins with one of these.
const ETC_FAMILIES: [&str; 7] = ["ld.so.", "ld-musl-", "locale", "python", "java", "ImageMagick-", "lsb-"];

/// What these devices do is harmless. Requests to them have to fail as on any other file, since many a
/// program looks that way for a terminal.
const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/full"];

/// Read only: to write to them, or to send them requests, is to tamper with everybody's randomness.
const RANDOM: [&str; 2] = ["/dev/random", "/dev/urandom"];

/// All of it, since rules cannot name "my own folder in here" for a process that does not exist yet, nor
/// for its children. What matters of other processes is closed nevertheless: `environ`, `mem`, `maps`,
/// `cwd`, `root` and what `fd` leads to ask for the right to trace, which a worker does not have to
/// anything outside, once it has given up its capabilities: with CAP_PERFMON or CAP_SYS_ADMIN the kernel
/// asks for less. Names, arguments and numbers of other processes it does see.
const PROC: &str = "/proc";

/// What came with which version, as far as it matters here: a kernel of an earlier one lacks it.
const GAINS: [(u32, &str); 6] = [
    (2, "moving files between folders (always refused)"),
    (3, "truncating files (not refused)"),
    (4, "TCP (not refused)"),
    (5, "requests to devices (not refused)"),
    (6, "signals and abstract Unix sockets (not refused)"),
    (9, "Unix sockets with a path (not refused)"),
];

/// Only to name the rights that there are for single files: what the kernel lacks is not given anyway.
const NEWEST: ABI = ABI::V9;

/// What a worker may reach, beside what every program needs.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::keeper) struct Rules<'a> {
    /// The program, and what it executes or loads in turn; their folders are read and executed. They may
    /// be missing, for to execute them will say so.
    pub(in crate::keeper) programs: &'a [&'a Path],
    /// The working directory; read and executed. It may be missing: to go there will say so.
    pub(in crate::keeper) directory: Option<&'a Path>,
    /// Files and folders to read. And to execute: an interpreter or a virtual environment is given in
    /// this way, and who can read a program can have the dynamic loader run it anyway.
    pub(in crate::keeper) read: &'a [&'a Path],
    /// Files and folders to do everything with but to make device nodes.
    pub(in crate::keeper) write: &'a [&'a Path],
    /// A folder of its own: as `write`, without sockets.
    pub(in crate::keeper) temporary: Option<&'a Path>,
    /// Whether it may use TCP.
    pub(in crate::keeper) network: bool,
}

/// Why there is no ruleset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::keeper) struct Failure {
    /// Fits after "failed to".
    pub(in crate::keeper) attempted: String,
    /// What the kernel said.
    pub(in crate::keeper) errno: Errno,
}

/// Rules, ready to be put in place.
#[derive(Debug)]
pub(in crate::keeper) struct Ruleset {
    descriptor: OwnedFd,
    abi: u32,
}

impl Ruleset {
    /// Makes the rules. Paths of the system that are missing are left out, those that somebody named are
    /// not.
    pub(in crate::keeper) fn prepare(rules: &Rules<'_>) -> Result<Self, Failure> {
        let abi = kernel_abi().map_err(|errno| failure("use Landlock", errno))?;
        let known = ABI::from(abi as i32);
        let mut ruleset = create(known, rules.network).map_err(|e| refused("make a Landlock ruleset", e))?;
        for grant in grants(rules, known) {
            add(&mut ruleset, &grant)?;
        }
        let descriptor = Option::<OwnedFd>::from(ruleset);
        let descriptor = descriptor.ok_or_else(|| failure("make a Landlock ruleset", Errno::NOSYS))?;
        Ok(Self { descriptor, abi })
    }

    /// The kernel's version of Landlock; see [`missing`].
    pub(in crate::keeper) fn abi(&self) -> u32 {
        self.abi
    }

    /// Puts the calling thread under the rules, for ever, and all that it starts. It must have given up
    /// new privileges (`PR_SET_NO_NEW_PRIVS`). For a forked child: one system call and nothing else.
    pub(in crate::keeper) fn restrict(&self) -> Result<(), Errno> {
        const NO_FLAGS: libc::c_uint = 0;
        // SAFETY: takes two numbers, and touches no memory of ours.
        let result =
            unsafe { libc::syscall(libc::SYS_landlock_restrict_self, self.descriptor.as_raw_fd(), NO_FLAGS) };
        if result == 0 { Ok(()) } else { Err(last_errno()) }
    }
}

/// The kernel's version of Landlock. `NOSYS`: built without; `OPNOTSUPP`: switched off.
pub(in crate::keeper) fn kernel_abi() -> Result<u32, Errno> {
    const VERSION: libc::c_uint = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call takes no memory, and makes no descriptor.
    let result = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, VERSION) };
    if result > 0 { Ok(result as u32) } else { Err(last_errno()) }
}

/// What a kernel of this version cannot refuse, or cannot but refuse.
pub(in crate::keeper) fn missing(abi: u32) -> impl Iterator<Item = &'static str> {
    GAINS.iter().filter(move |(since, _)| abi < *since).map(|(_, what)| *what)
}

/// A ruleset that refuses everything.
fn create(abi: ABI, network: bool) -> Result<RulesetCreated, RulesetError> {
    let ruleset = landlock::Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let mut ruleset = ruleset.handle_access(AccessFs::from_all(abi))?;
    let (tcp, scopes) = (AccessNet::from_all(abi), Scope::from_all(abi));
    if !network && !tcp.is_empty() {
        ruleset = ruleset.handle_access(tcp)?;
    }
    if !scopes.is_empty() {
        ruleset = ruleset.scope(scopes)?;
    }
    ruleset.create()
}

/// One path, and what may be done with it and what lies below.
struct Grant {
    path: PathBuf,
    access: BitFlags<AccessFs>,
    condition: Condition,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Condition {
    /// Somebody asked for it, so that it has to be there.
    Always,
    IfPresent,
    IfOthersMayRead,
}

fn grants(rules: &Rules<'_>, abi: ABI) -> Vec<Grant> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let execute = read | AccessFs::Execute;
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let write = AccessFs::from_all(abi) & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let temporary = write & !(AccessFs::MakeSock | AccessFs::ResolveUnix | AccessFs::IoctlDev);

    let fixed =
        |paths: &[&str], access| Grant::all(paths.iter().map(PathBuf::from), access, Condition::IfPresent);
    let named =
        |paths: &[&Path], access| Grant::all(paths.iter().map(PathBuf::from), access, Condition::Always);
    let mut grants = fixed(&SYSTEM, execute);
    grants.extend(Grant::all(etc(), read, Condition::IfOthersMayRead));
    grants.extend(fixed(&DEVICES, device & AccessFs::from_all(abi)));
    grants.extend(fixed(&RANDOM, AccessFs::ReadFile.into()));
    grants.extend(fixed(&[PROC], read));
    grants.extend(Grant::all(own_folders(rules), execute, Condition::IfPresent));
    grants.extend(named(rules.read, execute));
    grants.extend(named(rules.write, write));
    grants.extend(named(rules.temporary.as_slice(), temporary));
    grants
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

/// The paths in `/etc` that are given if others may read them.
fn etc() -> Vec<PathBuf> {
    let etc = Path::new("/etc");
    let belongs =
        |name: &OsStr| ETC_FAMILIES.iter().any(|family| name.as_bytes().starts_with(family.as_bytes()));
    let entries = std::fs::read_dir(etc).into_iter().flatten().flatten();
    let families = entries.filter(|entry| belongs(&entry.file_name())).map(|entry| entry.path());
    ETC.iter().map(|name| etc.join(name)).chain(families).collect()
}

/// The working directory, and the folders of the programs: as they were named and where they really lie.
fn own_folders(rules: &Rules<'_>) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = rules.directory.map(PathBuf::from).into_iter().collect();
    for program in rules.programs {
        let real = std::fs::canonicalize(program).ok();
        let paths = [Some(program.to_path_buf()), real];
        folders.extend(paths.iter().flatten().filter_map(|path| path.parent()).map(PathBuf::from));
    }
    // That would open everything, which nobody who starts a program in the root folder means.
    folders.retain(|folder| std::fs::canonicalize(folder).is_ok_and(|real| real != Path::new("/")));
    folders
}

fn add(ruleset: &mut RulesetCreated, grant: &Grant) -> Result<(), Failure> {
    let Grant { path, access, condition } = grant;
    let failed = |errno| failure(&format!("open {} for a Landlock rule", path.display()), errno);
    let descriptor = match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(descriptor) => descriptor,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP)
            if *condition != Condition::Always =>
        {
            return Ok(());
        }
        Err(errno) => return Err(failed(errno)),
    };
    let mode = rustix::fs::fstat(&descriptor).map_err(failed)?.st_mode;
    if *condition == Condition::IfOthersMayRead && !Mode::from_raw_mode(mode).contains(Mode::ROTH) {
        return Ok(());
    }
    let is_folder = FileType::from_raw_mode(mode) == FileType::Directory;
    // The kernel refuses a rule that speaks of a file as of a folder.
    let access = if is_folder { *access } else { *access & AccessFs::from_file(NEWEST) };
    let added = ruleset.add_rule(PathBeneath::new(descriptor, access));
    added.map(drop).map_err(|error| refused(&format!("add a Landlock rule for {}", path.display()), error))
}

fn failure(attempted: &str, errno: Errno) -> Failure {
    Failure { attempted: attempted.to_owned(), errno }
}

fn refused(attempted: &str, error: RulesetError) -> Failure {
    let errno = Errno::from_raw_os_error(*landlock::Errno::from(error));
    failure(attempted, errno)
}

fn last_errno() -> Errno {
    // SAFETY: the address of this thread's `errno`, always there.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

#[cfg(test)]
mod tests;

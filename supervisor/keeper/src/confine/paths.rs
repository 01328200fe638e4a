//! Determines the paths that a worker needs in addition to its configured paths: those of the system, and the folders
//! of its program. Also excludes paths that a worker could redirect, and withheld files. `landlock` grants the paths by
//! rules, and `spawn/mounts/root.rs` shows them in a private root folder.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use bulkhead_linux::errno;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// System folders with programs, libraries and their data. Workers can read and execute the files in these folders.
pub(crate) const SYSTEM_FOLDERS: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    // Used by NixOS and Guix. Readable by every user by design.
    "/nix/store",
    "/gnu/store",
];

/// Entries in `/etc` that ordinary programs read. Granting all of `/etc` would leave no way to deny an entry, because
/// rules can only grant rights. An entry is granted only if other users can read it, so a certificate store that an
/// operator has made private stays private, even if the supervisor is root.
pub(crate) const ETC_ENTRIES: [&str; 52] = [
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
    // Network hosts, services and protocols
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
    // Certificates and settings of cryptographic libraries, but never private keys
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

/// Name prefixes of entries in `/etc`. The rest of each name differs between systems.
pub(crate) const ETC_PREFIXES: [&str; 7] =
    ["ld.so.", "ld-musl-", "locale", "python", "java", "ImageMagick-", "lsb-"];

/// Folders with caches outside `/usr` and `/etc`. A program that cannot read its cache would rebuild the cache on each
/// run.
const CACHES: [&str; 4] =
    ["/var/cache/fontconfig", "/var/cache/fonts", "/var/lib/ghostscript", "/var/lib/texmf"];

/// Harmless devices that workers can read and write. The rules must not change the error that an ioctl request
/// returns, because many programs use an ioctl request to detect a terminal.
pub(crate) const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/full"];

/// Devices that workers can only read. Writes and ioctl requests would affect the random numbers that all processes
/// read.
pub(crate) const RANDOM_DEVICES: [&str; 2] = ["/dev/random", "/dev/urandom"];

/// Path of the `/proc` folder, which is granted as a whole. A rule cannot refer to the folder of a process that does
/// not exist yet.
///
/// The sensitive data of other processes stays protected. `environ`, `mem`, `maps`, `cwd`, `root` and the
/// targets of `fd` require the right to trace the process. A worker without capabilities does not have this
/// right for any process outside its sandbox. (With CAP_PERFMON or CAP_SYS_ADMIN the kernel requires less.)
/// A worker can see names, arguments and PIDs of other processes.
pub(crate) const PROC_FOLDER: &str = "/proc";

/// Entries that installers create in the parent folder of a `bin` folder. They contain libraries and data, or mark a
/// virtual environment.
const BESIDE_BIN: [&str; 5] = ["lib", "lib64", "libexec", "share", "pyvenv.cfg"];

/// Name of the folder in which version managers (pyenv, rbenv, nodenv, asdf, mise) keep wrapper scripts. The
/// programs themselves are installed below the parent of this folder.
const SHIMS_FOLDER: &str = "shims";

/// Number of bytes at the start of a script that the kernel searches for the interpreter.
const SHEBANG_BYTES_MAX: u64 = 256;

/// Maximum number of entries to grant individually if a folder is not granted as a whole.
const GRANTED_ENTRIES_MAX: usize = 4096;

/// Maximum number of directory entries to search for hard links to a withheld file.
const SEARCHED_ENTRIES_MAX: usize = 100_000;

/// Returns the caches and certain entries of `/etc`. Workers are granted each of these paths that all users can read.
pub(crate) fn world_readable() -> Vec<PathBuf> {
    let etc = Path::new("/etc");
    let belongs =
        |name: &OsStr| ETC_PREFIXES.iter().any(|family| name.as_bytes().starts_with(family.as_bytes()));
    let entries = std::fs::read_dir(etc).into_iter().flatten().flatten();
    let families = entries.filter(|entry| belongs(&entry.file_name())).map(|entry| entry.path());
    let caches = CACHES.iter().map(PathBuf::from);
    ETC_ENTRIES.iter().map(|name| etc.join(name)).chain(families).chain(caches).collect()
}

/// Folders that are shared by all users, or that contain all of a user's files. A program or working directory in such
/// a folder does not imply access to the whole folder.
const SHARED_FOLDERS: [&str; 16] = [
    "/", "/boot", "/dev", "/etc", "/home", "/media", "/mnt", "/opt", "/proc", "/root", "/run", "/srv",
    "/sys", "/tmp", "/var", "/var/tmp",
];

/// Folders that are private to a worker with a private root folder.
const PRIVATE_FOLDERS: [&str; 3] = ["/proc", "/dev", "/tmp"];

/// Returns the entries of the system's root folder. Omits the folders that are private to the worker, and links to
/// these folders or to the root folder itself.
pub(crate) fn root_entries() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/").into_iter().flatten().flatten().map(|entry| entry.path());
    let is_private = |real: &Path| PRIVATE_FOLDERS.iter().any(|private| real.starts_with(private));
    let is_shown = |real: &Path| real != Path::new("/") && !is_private(real);
    entries.filter(|path| std::fs::canonicalize(path).is_ok_and(|real| is_shown(&real))).collect()
}

/// Folder that contains the users' home folders.
const HOMES_FOLDER: &str = "/home";

/// Maximum number of symbolic links to follow in a path. The kernel has the same limit.
const LINKS_MAX: usize = 40;

/// Returns the working directory, and the folders of the programs and of their interpreters, both as given and as real
/// paths. For a program in a shared folder, returns only the program.
///
/// Ignores the paths that the worker can write to, because writable paths are granted separately. Also ignores paths
/// that lead out of a written folder, and the interpreters of scripts that a worker can change. Otherwise, a worker
/// could use a symbolic link or the first line of a script to choose which paths the next worker can access.
pub(crate) fn program_folders(
    programs: &[&Path],
    directory: Option<&Path>,
    written: &WrittenFolders,
) -> Vec<PathBuf> {
    let granted: Vec<(&Path, Target)> =
        programs.iter().filter_map(|path| Some((*path, written.granted(path)?))).collect();
    let interpreters: Vec<(PathBuf, Target)> = granted
        .iter()
        .filter(|(_, target)| target.reach == Reach::Fixed && !is_in(&target.real, &written.all))
        .filter_map(|(program, _)| interpreter(program))
        .filter_map(|path| written.granted(&path).map(|target| (path, target)))
        .collect();
    let interpreters = interpreters.iter().map(|(path, target)| (path.as_path(), target));
    let programs = granted.iter().map(|(path, target)| (*path, target)).chain(interpreters);
    let mut given: Vec<PathBuf> = directory.map(PathBuf::from).into_iter().collect();
    for (program, target) in programs {
        given.extend([program, &target.real].into_iter().flat_map(installed_with));
    }
    given.retain(|path| {
        written.granted(path).is_some_and(|target| target.real.exists() && !is_shared(&target.real))
    });
    given.sort();
    given.dedup();
    given
}

/// Returns the real path of each path in `paths` that exists.
fn real_paths(paths: &[&Path]) -> Vec<PathBuf> {
    paths.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect()
}

fn is_in(path: &Path, folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| path.starts_with(folder))
}

fn is_shared(real: &Path) -> bool {
    SHARED_FOLDERS.iter().any(|shared| real == Path::new(shared))
        || real.parent() == Some(Path::new(HOMES_FOLDER))
}

/// Folders that workers of any bulkhead can write to. Their contents can be replaced with symbolic links, so a path that
/// leads through such a folder can be redirected.
#[derive(Debug, Default)]
pub(crate) struct WrittenFolders {
    /// Real paths of the folders to which the worker to be started has write access.
    own: Vec<PathBuf>,
    /// Real paths of `own` and of the folders of all other workers.
    all: Vec<PathBuf>,
}

/// Real path to which a granted path leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) real: PathBuf,
    pub(crate) reach: Reach,
}

/// Reason why a worker can access the target of a granted path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// No worker can redirect the path.
    Fixed,
    /// The path leads through another worker's folder, and its target is in that folder. The target must be opened
    /// without following links.
    Inside,
    /// The path can be redirected, but its target is in the worker's own writable folder and granted with it.
    Own,
}

impl WrittenFolders {
    /// `own` contains the paths that the worker can write to. `others` contains real paths of the folders to which
    /// other workers can write.
    pub(crate) fn new(own: &[&Path], others: &[&Path]) -> Self {
        let others = others.iter().map(|folder| folder.to_path_buf());
        let mut written = Self { own: Vec::new(), all: real_paths(own).into_iter().chain(others).collect() };
        let targets = own.iter().filter_map(|path| Some(written.resolve(path).ok()?.real));
        written.own = targets.collect();
        written
    }

    /// Returns the target of a path. Fails with `XDEV` if a worker could have redirected the path to a target that is
    /// neither in this worker's folder nor in its own writable folders.
    pub(crate) fn resolve(&self, path: &Path) -> Result<Target, Errno> {
        let (real, left) = self.follow(path)?;
        let is_below_own = real.parent().is_some_and(|folder| is_in(folder, &self.own));
        let reach = match left {
            None => return Ok(Target { real, reach: Reach::Fixed }),
            Some(false) if !is_below_own => Reach::Inside,
            Some(_) if is_in(&real, &self.own) => Reach::Own,
            Some(_) => return Err(Errno::XDEV),
        };
        match std::fs::symlink_metadata(&real) {
            Ok(_) => Ok(Target { real, reach }),
            Err(error) => Err(errno::from_io(&error, Errno::NOENT)),
        }
    }

    /// Returns the target of a path that is granted separately. Returns `None` if the path is missing, granted with the
    /// worker's own writable folder, or redirected.
    pub(crate) fn granted(&self, path: &Path) -> Option<Target> {
        self.resolve(path).ok().filter(|target| target.reach != Reach::Own)
    }

    /// Returns true if no worker can redirect the path.
    pub(crate) fn is_fixed(&self, path: &Path) -> bool {
        self.resolve(path).is_ok_and(|target| target.reach == Reach::Fixed)
    }

    /// Returns true if a real path is a written folder, or is inside one.
    pub(crate) fn has(&self, real: &Path) -> bool {
        is_in(real, &self.all)
    }

    /// Opens a path in such a way that a worker cannot redirect it.
    pub(crate) fn open(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        match self.resolve(path)? {
            Target { reach: Reach::Fixed, .. } => rustix::fs::open(path, flags, Mode::empty()),
            Target { real, .. } => open_without_links(rustix::fs::CWD, &real, flags),
        }
    }

    /// Follows all symbolic links of a path. Returns the real path, and whether it is outside any of the folders through
    /// which the path leads. Returns `None` instead if the path leads through no folder.
    fn follow(&self, path: &Path) -> Result<(PathBuf, Option<bool>), Errno> {
        let mut real = PathBuf::from("/");
        let mut remaining: Vec<OsString> = reversed_components(path);
        let mut through = BTreeSet::new();
        let mut links = 0;
        while let Some(part) = remaining.pop() {
            if part == ".." {
                real.pop();
                continue;
            }
            through.extend(self.all.iter().filter(|folder| real.starts_with(folder)));
            let next = real.join(&part);
            let Ok(to) = std::fs::read_link(&next) else {
                real = next; // Not a link. If the file is missing, opening it later reports the error.
                continue;
            };
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP);
            }
            if to.is_absolute() {
                real = PathBuf::from("/");
            }
            remaining.extend(reversed_components(&to));
        }
        let has_left = through.iter().any(|folder| !real.starts_with(folder));
        Ok((real, (!through.is_empty()).then_some(has_left)))
    }
}

/// Returns true if a path does not lead through a folder in `write`. A worker with access to these folders then cannot
/// change the path's target.
pub fn is_fixed(path: &Path, write: &[&Path]) -> bool {
    WrittenFolders::new(write, &[]).is_fixed(path)
}

/// Opens a file by its real path. Fails if a part of the path has been replaced with a symbolic link.
pub(crate) fn open_without_links(
    folder: impl AsFd,
    real: impl rustix::path::Arg,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(folder, real, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// Returns the components of a path in reverse order.
fn reversed_components(path: &Path) -> Vec<OsString> {
    let named = path.components().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    let mut parts: Vec<OsString> = named.map(|part| part.as_os_str().to_owned()).collect();
    parts.reverse();
    parts
}

/// Returns the paths that a program needs. These are usually the program's folder and, if it is a `bin` folder, the
/// entries that are installed next to it.
fn installed_with(program: &Path) -> Vec<PathBuf> {
    let Some(folder) = program.parent() else { return Vec::new() };
    if std::fs::canonicalize(folder).is_ok_and(|real| is_shared(&real)) {
        return vec![program.to_path_buf()];
    }
    let is_bin = folder.file_name().is_some_and(|name| name == "bin" || name == "sbin");
    let is_shims = folder.file_name().is_some_and(|name| name == SHIMS_FOLDER);
    if let Some(prefix) = folder.parent().filter(|_| is_shims) {
        return vec![prefix.to_path_buf()];
    }
    let beside = folder.parent().filter(|_| is_bin);
    let beside = beside.into_iter().flat_map(|prefix| BESIDE_BIN.iter().map(|name| prefix.join(name)));
    std::iter::once(folder.to_path_buf()).chain(beside).collect()
}

/// Returns the interpreter named in the first line of a script.
fn interpreter(script: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    // With these flags, opening a named pipe does not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let script = std::fs::File::from(rustix::fs::open(script, flags, Mode::empty()).ok()?);
    if !script.metadata().ok()?.is_file() {
        return None;
    }
    script.take(SHEBANG_BYTES_MAX).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let path = PathBuf::from(OsStr::from_bytes(words.next()?));
    path.is_absolute().then_some(path)
}

/// Returns the folder itself if it contains no withheld path. Otherwise returns the folder's current entries without
/// the withheld ones. Omits the entries of the worker's own writable folders, because the worker could replace them with
/// links. Writable paths are granted separately.
pub(crate) fn grantable_parts(
    folder: &Path,
    withheld: &[&Path],
    written: &WrittenFolders,
) -> io::Result<Vec<PathBuf>> {
    let real = written.resolve(folder)?.real;
    let mut secrets: Vec<PathBuf> =
        withheld.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect();
    secrets.extend(hard_links(&real, &secrets)?);
    let mut given = Vec::new();
    let mut entries_seen = 0;
    let mut folders = vec![(folder.to_path_buf(), real)];
    while let Some((named, real)) = folders.pop() {
        if secrets.contains(&real) {
            continue;
        }
        if !secrets.iter().any(|secret| secret.starts_with(&real)) {
            given.push(named);
            continue;
        }
        if is_in(&real, &written.own) {
            continue;
        }
        for entry in std::fs::read_dir(&named)? {
            let entry = entry?;
            entries_seen += 1;
            if entries_seen > GRANTED_ENTRIES_MAX {
                let text = format!(
                    "the folder has more than {GRANTED_ENTRIES_MAX} entries in addition to the supervisor's own files"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            // Skips links, because their targets are granted separately or not at all.
            if !entry.file_type()?.is_symlink() {
                folders.push((entry.path(), real.join(entry.file_name())));
            }
        }
    }
    Ok(given)
}

/// Returns the hard links in this folder to files in `secrets`. Needed because a withheld file would still be
/// accessible under its other names. Fails if a file has several names and the folder is too large to be searched.
fn hard_links(folder: &Path, secrets: &[PathBuf]) -> io::Result<Vec<PathBuf>> {
    let linked =
        |found: &Metadata| (found.is_file() && found.nlink() > 1).then(|| (found.dev(), found.ino()));
    let secrets = secrets.iter().filter_map(|path| linked(&std::fs::symlink_metadata(path).ok()?));
    let secrets: Vec<(u64, u64)> = secrets.collect();
    let mut folders: Vec<PathBuf> = secrets.first().map(|_| folder.to_path_buf()).into_iter().collect();
    let (mut names, mut entries_seen) = (Vec::new(), 0);
    while let Some(folder) = folders.pop() {
        // Ignores folders that the keeper cannot list, because the worker cannot access them either.
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            entries_seen += 1;
            if entries_seen > SEARCHED_ENTRIES_MAX {
                let text = format!(
                    "the folder has more than {SEARCHED_ENTRIES_MAX} entries, and any of them may be a hard link to the \
                     configuration: remove the other hard links to the configuration file"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) if linked(&found).is_some_and(|it| secrets.contains(&it)) => {
                    names.push(entry.path())
                }
                _ => {}
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_installed_with_program_are_granted() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["own/bin", "own/lib", "tool/bin", "tool/libexec", "tool/other"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        std::fs::write(path("own/bin/script"), format!("#! {} -x\n", path("tool/bin/run").display()))
            .unwrap();
        std::fs::write(path("tool/bin/run"), "").unwrap();
        std::fs::write(path("own/pyvenv.cfg"), "").unwrap();
        let folders = program_folders(&[&path("own/bin/script")], None, &WrittenFolders::default());
        let expected = ["own/bin", "own/lib", "own/pyvenv.cfg", "tool/bin", "tool/libexec"];
        assert_eq!(folders, expected.map(path));
        std::fs::create_dir_all(path("pyenv/shims")).unwrap();
        std::fs::write(path("pyenv/shims/python"), "").unwrap();
        assert_eq!(
            program_folders(&[&path("pyenv/shims/python")], None, &WrittenFolders::default()),
            [path("pyenv")]
        );
        assert_eq!(
            program_folders(&[Path::new("/program")], Some(Path::new("/")), &WrittenFolders::default()),
            Vec::<PathBuf>::new()
        );
    }

    #[test]
    fn paths_the_worker_can_redirect_are_not_granted() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["own/bin", "other/bin", "secret", "work"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        let program = path("own/bin/run");
        std::fs::write(&program, format!("#!{}\n", path("other/bin/run").display())).unwrap();
        std::fs::write(path("other/bin/run"), "").unwrap();
        std::os::unix::fs::symlink(path("secret"), path("own/share")).unwrap();
        std::os::unix::fs::symlink(path("secret"), path("own/cwd")).unwrap();
        std::os::unix::fs::symlink(path("own/cwd"), path("to-cwd")).unwrap();
        let given = program_folders(&[&program], None, &WrittenFolders::new(&[&path("work")], &[]));
        assert_eq!(given, ["other/bin", "own/bin", "own/share"].map(path));
        for cwd in ["own/cwd", "to-cwd", "work/../own/cwd"] {
            let given =
                program_folders(&[&program], Some(&path(cwd)), &WrittenFolders::new(&[&path("own")], &[]));
            assert_eq!(given, Vec::<PathBuf>::new(), "{cwd}");
        }
        // If only the script is writable, the worker can change the script's first line, but cannot replace the folder
        // that contains the script.
        let given = program_folders(&[&program], Some(&path("work")), &WrittenFolders::new(&[&program], &[]));
        assert_eq!(given, ["own/bin", "own/share", "work"].map(path));

        let reach = |name: &str| {
            WrittenFolders::new(&[&path("own")], &[]).resolve(&path(name)).map(|target| target.reach)
        };
        assert_eq!(reach("work"), Ok(Reach::Fixed));
        assert_eq!(reach("own"), Ok(Reach::Fixed));
        assert_eq!(reach("own/bin"), Ok(Reach::Own));
        assert_eq!(reach("own/share"), Err(Errno::XDEV));
        assert_eq!(reach("to-cwd"), Err(Errno::XDEV));
        assert_eq!(reach("own/none"), Err(Errno::NOENT));
    }

    #[test]
    fn paths_in_folder_of_other_workers_must_stay_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["shared/out/bin", "shared/own", "other", "secret", "tool"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        let script = format!("#!{}\n", path("tool/run").display());
        for (name, text) in [("shared/out/bin/run", &*script), ("tool/run", ""), ("secret/key", "")] {
            std::fs::write(path(name), text).unwrap();
        }
        let links =
            [("latest", "shared/out"), ("leak", "secret"), ("aside", "other"), ("back", "shared/own")];
        for (link, to) in links {
            std::os::unix::fs::symlink(path(to), path("shared").join(link)).unwrap();
        }
        let own = path("shared/own");
        let written = WrittenFolders::new(&[&own], &[&path("shared"), &path("other")]);
        let reach = |name: &str| written.resolve(&path(name)).map(|target| target.reach);
        for name in ["shared", "tool/run", "other", "shared/../tool"] {
            assert_eq!(reach(name), Ok(Reach::Fixed), "{name}");
        }
        for name in ["shared/out", "shared/latest/bin", "shared/own", "shared/back"] {
            assert_eq!(reach(name), Ok(Reach::Inside), "{name}");
        }
        for name in ["shared/leak", "shared/leak/key", "shared/aside"] {
            assert_eq!(reach(name), Err(Errno::XDEV), "{name}");
        }
        let given = |program: &str, cwd: &str| program_folders(&[&path(program)], Some(&path(cwd)), &written);
        // Another worker can change the first line of the script.
        assert_eq!(given("shared/out/bin/run", "shared/out"), ["shared/out", "shared/out/bin"].map(path));
        assert_eq!(given("shared/leak/key", "shared/leak"), Vec::<PathBuf>::new());
        // The other worker replaces a folder after the path has been resolved.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        assert!(written.open(&path("shared/latest"), flags).is_ok());
        std::fs::rename(path("shared/out"), path("shared/before")).unwrap();
        std::os::unix::fs::symlink(path("secret"), path("shared/out")).unwrap();
        let opened = open_without_links(rustix::fs::CWD, path("shared/out/key"), flags);
        assert_eq!(opened.unwrap_err(), Errno::LOOP);
        assert_eq!(written.open(&path("shared/latest"), flags).unwrap_err(), Errno::XDEV);
    }

    #[test]
    fn shared_folder_grants_only_the_program() {
        let own = std::env::temp_dir();
        let file = tempfile::NamedTempFile::new_in("/tmp").unwrap();
        assert_eq!(program_folders(&[file.path()], Some(&own), &WrittenFolders::default()), [file.path()]);
        let etc = Path::new("/etc");
        assert_eq!(program_folders(&[], Some(etc), &WrittenFolders::default()), Vec::<PathBuf>::new());
        assert_eq!(
            program_folders(&[], Some(Path::new("/usr/../etc/.")), &WrittenFolders::default()),
            Vec::<PathBuf>::new()
        );
        assert!(is_shared(Path::new("/home/alice")) && !is_shared(Path::new("/home/alice/work")));
    }

    #[test]
    fn named_pipe_as_script_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert_eq!(interpreter(&pipe), None);
    }

    #[test]
    fn withheld_files_are_not_granted_with_their_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("deep")).unwrap();
        for name in ["config", "deep/token", "deep/data", "data"] {
            std::fs::write(path(name), "").unwrap();
        }
        std::os::unix::fs::symlink(path("config"), path("link")).unwrap();
        let (config, token) = (path("config"), path("deep/token"));
        let parts = |folder: &Path, withheld: &[&Path], write: &[&Path]| {
            let mut given = grantable_parts(folder, withheld, &WrittenFolders::new(write, &[])).unwrap();
            given.sort();
            given
        };
        assert_eq!(parts(folder.path(), &[&config, &token], &[]), [path("data"), path("deep/data")]);
        assert_eq!(parts(folder.path(), &[&config, &token], &[&path("deep")]), [path("data")]);
        assert_eq!(parts(folder.path(), &[Path::new("/etc/passwd")], &[]), [folder.path()]);
        assert_eq!(parts(&path("deep"), &[&config], &[]), [path("deep")]);
        assert_eq!(parts(&path("deep"), &[&config], &[&path("deep")]), [path("deep")]);
        assert!(parts(&path("deep"), &[folder.path()], &[]).contains(&path("deep")));
    }
}

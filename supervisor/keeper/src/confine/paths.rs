//! Determines the paths that a worker needs in addition to its configured paths: those of the system, and the folders
//! of its program. Also excludes paths that a worker could redirect, and withheld files. `landlock` grants the paths by
//! rules, and `spawn/mounts/root.rs` shows them in a private root folder.

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
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
/// Ignores all paths that a worker can write to. Otherwise, a worker could use a symbolic link or the first
/// line of a script to choose which paths the next worker can access. Writable paths are granted separately.
pub(crate) fn program_folders(programs: &[&Path], directory: Option<&Path>, write: &[&Path]) -> Vec<PathBuf> {
    let writable = real_paths(write);
    let trusted: Vec<&Path> =
        programs.iter().copied().filter(|path| resolve_outside(path, &writable).is_some()).collect();
    let interpreters: Vec<PathBuf> = trusted
        .iter()
        .filter(|path| resolve_outside(path, &writable).is_some_and(|real| !is_in(&real, &writable)))
        .filter_map(|program| interpreter(program))
        .filter(|path| resolve_outside(path, &writable).is_some())
        .collect();
    let programs = trusted.iter().copied().chain(interpreters.iter().map(PathBuf::as_path));
    let mut given: Vec<PathBuf> = directory.map(PathBuf::from).into_iter().collect();
    for program in programs {
        let real = std::fs::canonicalize(program).ok();
        let paths = [Some(program.to_path_buf()), real];
        given.extend(paths.iter().flatten().flat_map(|path| installed_with(path)));
    }
    given.retain(|path| {
        let real = resolve_outside(path, &writable);
        real.is_some_and(|real| real.exists() && !is_shared(&real))
    });
    given.sort();
    given.dedup();
    given
}

/// Returns the real path of each path in `paths` that exists.
pub(super) fn real_paths(paths: &[&Path]) -> Vec<PathBuf> {
    paths.iter().filter_map(|path| std::fs::canonicalize(path).ok()).collect()
}

pub(super) fn is_in(path: &Path, folders: &[PathBuf]) -> bool {
    folders.iter().any(|folder| path.starts_with(folder))
}

fn is_shared(real: &Path) -> bool {
    SHARED_FOLDERS.iter().any(|shared| real == Path::new(shared))
        || real.parent() == Some(Path::new(HOMES_FOLDER))
}

/// Returns true if a rule for a configured path can be added as is. A path that leads through a folder in `write`
/// cannot be granted, because the worker can change the target of such a path. Returns `Ok(false)` for such a path if
/// its target is inside a writable folder and thus granted anyway, and an error otherwise.
pub(crate) fn is_grantable(path: &Path, write: &[&Path]) -> Result<bool, Errno> {
    let writable = real_paths(write);
    if resolve_outside(path, &writable).is_some() {
        return Ok(true);
    }
    match std::fs::canonicalize(path) {
        Ok(real) if !is_in(&real, &writable) => Err(Errno::XDEV),
        Ok(_) => Ok(false),
        Err(error) => Err(errno::from_io(&error, Errno::NOENT)),
    }
}

/// Returns true if a path does not lead through a folder in `write`. A worker with access to these folders then cannot
/// change the path's target.
pub fn is_fixed(path: &Path, write: &[&Path]) -> bool {
    is_grantable(path, write) == Ok(true)
}

/// Opens a file inside a folder in `write` without following links, so that a worker cannot redirect the path.
pub(crate) fn open_inside(path: &Path, write: &[&Path]) -> Result<OwnedFd, Errno> {
    let real = std::fs::canonicalize(path).map_err(|error| errno::from_io(&error, Errno::NOENT))?;
    let fixed: Vec<&Path> = write.iter().copied().filter(|folder| is_fixed(folder, write)).collect();
    let within = |folder: &PathBuf| Some((folder.clone(), real.strip_prefix(folder).ok()?.to_owned()));
    let (folder, inner) = real_paths(&fixed).iter().find_map(within).ok_or(Errno::XDEV)?;
    let folder = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(folder, inner, flags, Mode::empty(), resolve)
}

/// Resolves a path to a real path. Returns `None` if the path leads through one of the `writable` folders, or through
/// too many links.
fn resolve_outside(path: &Path, writable: &[PathBuf]) -> Option<PathBuf> {
    let mut real = PathBuf::from("/");
    let mut remaining: Vec<OsString> = reversed_components(path);
    let mut links = 0;
    while let Some(part) = remaining.pop() {
        if part == ".." {
            real.pop();
            continue;
        }
        if is_in(&real, writable) {
            return None;
        }
        let next = real.join(&part);
        let Ok(to) = std::fs::read_link(&next) else {
            real = next; // Not a link. If the file is missing, opening it later reports the error.
            continue;
        };
        links += 1;
        if links > LINKS_MAX {
            return None;
        }
        if to.is_absolute() {
            real = PathBuf::from("/");
        }
        remaining.extend(reversed_components(&to));
    }
    Some(real)
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
/// the withheld ones. Omits the entries of folders in `write`, because the worker could replace them with links. Writable
/// paths are granted separately.
pub(crate) fn grantable_parts(
    folder: &Path,
    withheld: &[&Path],
    write: &[&Path],
) -> io::Result<Vec<PathBuf>> {
    let real = std::fs::canonicalize(folder)?;
    let writable = real_paths(write);
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
        if is_in(&real, &writable) {
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
        let folders = program_folders(&[&path("own/bin/script")], None, &[]);
        let expected = ["own/bin", "own/lib", "own/pyvenv.cfg", "tool/bin", "tool/libexec"];
        assert_eq!(folders, expected.map(path));
        std::fs::create_dir_all(path("pyenv/shims")).unwrap();
        std::fs::write(path("pyenv/shims/python"), "").unwrap();
        assert_eq!(program_folders(&[&path("pyenv/shims/python")], None, &[]), [path("pyenv")]);
        assert_eq!(
            program_folders(&[Path::new("/program")], Some(Path::new("/")), &[]),
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
        let given = program_folders(&[&program], None, &[&path("work")]);
        assert_eq!(given, ["other/bin", "own/bin", "own/share"].map(path));
        for cwd in ["own/cwd", "to-cwd", "work/../own/cwd"] {
            let given = program_folders(&[&program], Some(&path(cwd)), &[&path("own")]);
            assert_eq!(given, Vec::<PathBuf>::new(), "{cwd}");
        }
        // If only the script is writable, the worker can change the script's first line, but cannot replace the folder
        // that contains the script.
        let given = program_folders(&[&program], Some(&path("work")), &[&program]);
        assert_eq!(given, ["own/bin", "own/share", "work"].map(path));

        let grantable = |name: &str| is_grantable(&path(name), &[&path("own")]);
        assert_eq!(grantable("work"), Ok(true));
        assert_eq!(grantable("own"), Ok(true));
        assert_eq!(grantable("own/bin"), Ok(false));
        assert_eq!(grantable("own/share"), Err(Errno::XDEV));
        assert_eq!(grantable("to-cwd"), Err(Errno::XDEV));
        assert_eq!(grantable("own/none"), Err(Errno::NOENT));
    }

    #[test]
    fn shared_folder_grants_only_the_program() {
        let own = std::env::temp_dir();
        let file = tempfile::NamedTempFile::new_in("/tmp").unwrap();
        assert_eq!(program_folders(&[file.path()], Some(&own), &[]), [file.path()]);
        let etc = Path::new("/etc");
        assert_eq!(program_folders(&[], Some(etc), &[]), Vec::<PathBuf>::new());
        assert_eq!(program_folders(&[], Some(Path::new("/usr/../etc/.")), &[]), Vec::<PathBuf>::new());
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
            let mut given = grantable_parts(folder, withheld, write).unwrap();
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

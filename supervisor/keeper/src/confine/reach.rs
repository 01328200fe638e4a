//! Finds granted paths that the worker's user cannot access because of permission bits or access control lists. Runs
//! before the fork, and changes no permissions. `spawn/mounts` makes some of these paths visible through mounts. If a
//! mount would not help, the start fails with advice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::acl::AccessList;
use super::{elf, paths};
use crate::protocol::confinement::Identity;

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// Permission bits of the file's group. If the file has an access control list, these bits are the list's mask.
const GROUP_BITS: u32 = 0o070;

/// Paths to which a worker is granted access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantedPaths<'a> {
    /// Path of the executed program.
    pub(crate) program: &'a Path,
    /// The program, and the files that the program executes or loads.
    pub(crate) programs: &'a [&'a Path],
    pub(crate) directory: &'a Path,
    pub(crate) read: &'a [&'a Path],
    pub(crate) write: &'a [&'a Path],
    pub(crate) temporary: Option<&'a Path>,
    /// True if a private file system is mounted over the temporary folder.
    pub(crate) temporary_is_mounted: bool,
}

/// Purpose for which access to a path is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    WorkingDirectory,
    /// Reading files and traversing folders.
    Read,
    Write,
    MountPoint,
}

/// A granted path that leads to or through a folder that the user cannot traverse.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HiddenPath {
    /// The granted path, either as configured or with symbolic links resolved.
    pub(crate) place: PathBuf,
    /// The real path, without symbolic links.
    pub(crate) real: PathBuf,
    pub(crate) purpose: Purpose,
}

/// Granted paths that a user cannot reach, and the folders that the user cannot traverse.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unreachable {
    /// Folders that the user cannot traverse. None of these folders is inside another, and their paths contain no
    /// symbolic links.
    pub(crate) folders: Vec<PathBuf>,
    /// Granted paths inside `folders`.
    pub(crate) hidden: Vec<HiddenPath>,
    /// Granted folders that the user cannot list or traverse. The worker is shown the entries of such a folder one by
    /// one instead of the folder itself.
    pub(crate) expanded: BTreeSet<PathBuf>,
}

impl Unreachable {
    /// Returns true if the only hidden paths are the working directory, the programs, and the paths next to the
    /// programs. In this case, the child can open the paths before it changes to the worker's user. This does not work
    /// for scripts, which the interpreter opens by name, or for libraries that load other libraries from the same
    /// folder. Returns false if the worker could redirect one of the paths.
    pub(crate) fn hides_only_programs(&self, granted: &GrantedPaths<'_>) -> bool {
        let others = granted.programs.iter();
        let others = others.filter(|path| **path != granted.program && !elf::is_self_contained(path));
        let needed_by_path: BTreeSet<PathBuf> =
            granted.read.iter().chain(others).filter_map(|path| std::fs::canonicalize(path).ok()).collect();
        let is_opened_before = |hidden: &HiddenPath| match hidden.purpose {
            Purpose::WorkingDirectory => true,
            Purpose::Read => !needed_by_path.contains(&hidden.real),
            Purpose::Write | Purpose::MountPoint => false,
        };
        let mut opened = granted.programs.iter().chain([&granted.directory]);
        self.hidden.iter().all(is_opened_before)
            && opened.all(|path| paths::is_fixed(path, granted.write))
            && elf::is_elf(granted.program)
    }

    /// Returns the path of the library or program that the host loads or runs, if the worker's user cannot access this
    /// path. Otherwise returns `None`.
    pub(crate) fn hidden_hosted_file<'g>(&self, granted: &GrantedPaths<'g>) -> Option<&'g Path> {
        let is_hidden = |path: &Path| self.hidden.iter().any(|hidden| hidden.place == path);
        granted.programs.iter().copied().find(|path| *path != granted.program && is_hidden(path))
    }
}

/// A granted path that the worker's user cannot use even through a mount, because the path's permissions forbid it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnusablePath {
    path: PathBuf,
    wanted: &'static str,
    identity: Identity,
    /// True if the worker's user ID is a subordinate ID. The supervisor's user can then change the owner of a file only
    /// inside a user namespace.
    pub(crate) is_subordinate: bool,
    /// True if the path belongs to the operating system or contains the supervisor's files, so that its owner must not
    /// be changed.
    has_other_use: bool,
}

impl UnusablePath {
    /// Records whether the path contains any of the paths in `withheld`. These are the supervisor's own files, which
    /// workers must not access.
    pub(crate) fn record_withheld(&mut self, withheld: &[&Path]) {
        let real = std::fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone());
        let is_inside = |file: &&Path| file.starts_with(&self.path) || file.starts_with(&real);
        self.has_other_use |= withheld.iter().any(is_inside);
    }
}

impl fmt::Display for UnusablePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, wanted, identity: Identity { uid, gid }, is_subordinate, has_other_use } = self;
        let path = path.display();
        let remedy = match *wanted {
            "write" if *has_other_use => {
                return write!(
                    f,
                    "user {uid} cannot write {path}: grant a directory of its own, as in \
                     `write = [\"/srv/NAME\"]`"
                );
            }
            "write" if *is_subordinate => format!(
                "`unshare --map-root-user --map-users={uid},{uid},1 --map-groups={gid},{gid},1 chown {uid}:{gid} \
                 {path}`"
            ),
            "write" => format!("`chown {uid}:{gid} {path}`"),
            "execute" => format!("`chmod go+rx {path}`"),
            _ => format!("`chmod go+r {path}`"),
        };
        let shared = if *is_subordinate { " (\"shared\")" } else { "" };
        write!(
            f,
            "user {uid} cannot {wanted} {path}: run {remedy}, or set `user` in `sandbox` to a user that \
             can{shared}"
        )
    }
}

/// Checks all granted paths. Missing paths are ignored, because a later step reports them.
pub(crate) fn check(granted: &GrantedPaths<'_>, identity: Identity) -> Result<Unreachable, UnusablePath> {
    let mut unreachable = Unreachable::default();
    let mut folders = BTreeSet::new();
    let mut known_folders = BTreeMap::new();
    let writable = paths::real_paths(granted.write);
    let unusable = |path: &Path, wanted| UnusablePath {
        path: path.to_owned(),
        wanted,
        identity,
        is_subordinate: false,
        has_other_use: std::fs::canonicalize(path).is_ok_and(|real| is_system_path(&real)),
    };
    for (path, purpose) in all_paths(granted) {
        let Ok(real) = std::fs::canonicalize(&path) else { continue };
        let Ok(found) = std::fs::metadata(&real) else { continue };
        let has = |wanted: u32| permits(&real, &found, identity, wanted);
        if found.is_dir() {
            match purpose {
                Purpose::Write if !has(READ | WRITE | SEARCH) => return Err(unusable(&path, "write")),
                // Shows a writable folder as a whole, because the worker could replace its entries with links.
                Purpose::Read if !has(READ | SEARCH) && !paths::is_in(&real, &writable) => {
                    unreachable.expanded.insert(real.clone());
                }
                Purpose::WorkingDirectory if !has(SEARCH) => drop(folders.insert(real.clone())),
                _ => {}
            }
        } else {
            match purpose {
                Purpose::Write if !has(WRITE) => return Err(unusable(&path, "write")),
                Purpose::Read if path == granted.program && !has(SEARCH) => {
                    return Err(unusable(&path, "execute"));
                }
                Purpose::Read if !has(READ) && !has(SEARCH) => return Err(unusable(&path, "read")),
                _ => {}
            }
        }
        for place in BTreeSet::from([path, real.clone()]) {
            let above = topmost_closed(&place, identity, &mut known_folders);
            let is_opened = unreachable.expanded.contains(&real);
            if above.is_none() && !is_opened {
                continue;
            }
            folders.insert(above.unwrap_or_else(|| real.clone()));
            unreachable.hidden.push(HiddenPath { place, real: real.clone(), purpose });
        }
    }
    let is_inner = |folder: &&PathBuf| !folder.ancestors().skip(1).any(|above| folders.contains(above));
    unreachable.folders = folders.iter().filter(is_inner).cloned().collect();
    Ok(unreachable)
}

/// Returns true if the operating system uses this path, or if many users do. `path` must not contain links.
fn is_system_path(path: &Path) -> bool {
    const WITH_CONTENTS: [&str; 11] =
        ["bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"];
    const WITHOUT_CONTENTS: [&str; 8] = ["dev", "home", "opt", "root", "run", "srv", "tmp", "var"];
    const WITH_FOLDERS: [&str; 2] = ["home", "var"];
    let Some(first) = path.components().nth(1) else { return true };
    let depth = path.components().count() - 1;
    let is_in = |names: &[&str]| names.iter().any(|name| first.as_os_str() == *name);
    is_in(&WITH_CONTENTS) || depth == 1 && is_in(&WITHOUT_CONTENTS) || depth <= 2 && is_in(&WITH_FOLDERS)
}

/// Returns the granted paths as given, each with its purpose. Omits paths that the worker could redirect.
fn all_paths(granted: &GrantedPaths<'_>) -> Vec<(PathBuf, Purpose)> {
    let own = paths::program_folders(granted.programs, Some(granted.directory), granted.write);
    let named = [
        (&[granted.directory][..], Purpose::WorkingDirectory),
        (granted.programs, Purpose::Read),
        (granted.read, Purpose::Read),
        (granted.write, Purpose::Write),
    ];
    let mut all: Vec<_> = own.into_iter().map(|path| (path, Purpose::Read)).collect();
    for (given, purpose) in named {
        let fixed = given.iter().filter(|path| paths::is_fixed(path, granted.write));
        all.extend(fixed.map(|path| (path.to_path_buf(), purpose)));
    }
    let temporary = if granted.temporary_is_mounted { Purpose::MountPoint } else { Purpose::Write };
    all.extend(granted.temporary.map(|path| (path.to_owned(), temporary)));
    all
}

/// Returns the topmost folder above this path that the user cannot traverse.
fn topmost_closed(
    path: &Path,
    identity: Identity,
    known_folders: &mut BTreeMap<PathBuf, bool>,
) -> Option<PathBuf> {
    let above: Vec<&Path> = path.ancestors().skip(1).collect();
    let mut is_closed = |folder: &Path| {
        if let Some(is_closed) = known_folders.get(folder) {
            return *is_closed;
        }
        let is_closed =
            std::fs::metadata(folder).is_ok_and(|found| !permits(folder, &found, identity, SEARCH));
        known_folders.insert(folder.to_owned(), is_closed);
        is_closed
    };
    let folder = above.into_iter().rev().find(|folder| is_closed(folder))?;
    std::fs::canonicalize(folder).ok()
}

/// Returns true if the user can list this folder and traverse it.
pub fn can_list(folder: &Path, identity: Identity) -> bool {
    std::fs::metadata(folder).is_ok_and(|found| permits(folder, &found, identity, READ | SEARCH))
}

/// Returns true if the file's permission bits, or its access control list, give this user all rights in `wanted`.
fn permits(path: &Path, found: &std::fs::Metadata, identity: Identity, wanted: u32) -> bool {
    let Identity { uid, gid } = identity;
    let mode = found.permissions().mode();
    let bits = match () {
        () if uid == 0 => return true,
        () if found.uid() == uid => mode >> 6,
        () => {
            // The kernel ignores the access control list if the group bits are zero.
            let list = (mode & GROUP_BITS != 0).then(|| AccessList::read(path)).flatten();
            match list {
                Some(list) => return list.permits(found.gid(), identity, wanted),
                None if found.gid() == gid => mode >> 3,
                None => mode,
            }
        }
    };
    bits & wanted == wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRANGER: Identity = Identity { uid: 61_184, gid: 61_184 };

    fn folder(path: &Path, mode: u32) {
        std::fs::create_dir_all(path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn file(path: &Path, mode: u32) {
        std::fs::write(path, "").unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Creates a home folder with the given mode. The home folder contains a checkout that includes a program, and one
    /// file outside the checkout.
    fn home(mode: u32) -> tempfile::TempDir {
        let outer = tempfile::tempdir().unwrap();
        folder(outer.path(), 0o755);
        folder(&outer.path().join("home"), 0o755);
        folder(&outer.path().join("home/checkout"), 0o755);
        file(&outer.path().join("home/checkout/program"), 0o755);
        file(&outer.path().join("home/letter"), 0o644);
        folder(&outer.path().join("home"), mode);
        outer
    }

    fn look_at(outer: &Path, read: &[&Path], write: &[&Path]) -> Result<Unreachable, UnusablePath> {
        let directory = outer.join("home/checkout");
        let program = directory.join("program");
        let programs = [program.as_path()];
        let granted = GrantedPaths {
            program: &program,
            programs: &programs,
            directory: &directory,
            read,
            write,
            temporary: None,
            temporary_is_mounted: false,
        };
        check(&granted, STRANGER)
    }

    #[test]
    fn open_folders_are_reachable_by_worker() {
        let outer = home(0o755);
        assert_eq!(look_at(outer.path(), &[], &[]), Ok(Unreachable::default()));
    }

    #[test]
    fn closed_folder_hides_granted_paths_inside() {
        let outer = home(0o700);
        let home = outer.path().join("home");
        let unreachable = look_at(outer.path(), &[], &[]).unwrap();
        assert_eq!(unreachable.folders, std::slice::from_ref(&home));
        let places: BTreeSet<_> = unreachable.hidden.iter().map(|hidden| hidden.place.clone()).collect();
        assert_eq!(places, [home.join("checkout"), home.join("checkout/program")].into());
        assert!(unreachable.expanded.is_empty());
    }

    #[test]
    fn closed_granted_folder_is_replaced_by_its_entries() {
        let outer = home(0o755);
        let checkout = outer.path().join("home/checkout");
        folder(&checkout, 0o700);
        let unreachable = look_at(outer.path(), &[], &[]).unwrap();
        assert_eq!((unreachable.folders, unreachable.expanded), (vec![checkout.clone()], [checkout].into()));
    }

    #[test]
    fn private_folder_behind_replaced_path_stays_hidden() {
        let outer = home(0o755);
        let path = |name: &str| outer.path().join(name);
        folder(&path("secret"), 0o700);
        file(&path("secret/program"), 0o755);
        folder(&path("work"), 0o777);
        std::os::unix::fs::symlink(path("secret"), path("work/link")).unwrap();
        let (work, plain) = (path("work"), path("home/checkout/program"));
        for (program, directory) in [("work/link", "work"), ("work/link/program", "work"), ("", "work/link")]
        {
            let program = if program.is_empty() { plain.clone() } else { path(program) };
            let directory = path(directory);
            let granted = GrantedPaths {
                program: &program,
                programs: &[&program],
                directory: &directory,
                read: &[],
                write: &[&work],
                temporary: None,
                temporary_is_mounted: false,
            };
            assert_eq!(check(&granted, STRANGER), Ok(Unreachable::default()), "{granted:?}");
            assert!(!Unreachable::default().hides_only_programs(&granted), "{granted:?}");
        }
    }

    #[test]
    fn access_control_list_makes_closed_path_usable() {
        use super::super::acl::grant;
        let outer = home(0o700);
        let (home, data) = (outer.path().join("home"), outer.path().join("data"));
        folder(&data, 0o700);
        if !grant(&data, STRANGER.uid, 7) {
            return eprintln!("NOT RUN: access control lists: the file system has none");
        }
        assert!(can_list(&data, STRANGER) && !can_list(&data, Identity { uid: 61_185, gid: 61_185 }));
        assert!(!look_at(outer.path(), &[], &[&data]).unwrap().folders.contains(&data));
        assert!(grant(&home, STRANGER.uid + 1, 7));
        assert_eq!(look_at(outer.path(), &[], &[]).unwrap().folders, std::slice::from_ref(&home));
        assert!(grant(&home, STRANGER.uid, 1));
        assert_eq!(look_at(outer.path(), &[], &[]), Ok(Unreachable::default()));
    }

    #[test]
    fn unusable_path_is_reported_with_remedy() {
        let outer = home(0o755);
        let (secret, place) = (outer.path().join("secret"), outer.path().join("place"));
        file(&secret, 0o600);
        folder(&place, 0o755);
        let why =
            |read: &[&Path], write: &[&Path]| look_at(outer.path(), read, write).unwrap_err().to_string();
        let read = why(&[&secret], &[]);
        assert!(
            read.contains("user 61184 cannot read") && read.contains("/secret") && read.contains("`user`")
        );
        let write = why(&[], &[&place]);
        assert!(write.contains("`chown 61184:61184") && write.contains("`user`"), "{write}");
        file(&outer.path().join("home/checkout/program"), 0o700);
        assert!(why(&[], &[]).contains("execute"));
    }

    /// Tests that the owner of a shared folder is never to be changed, because this would damage the system or the
    /// supervisor.
    #[test]
    fn owner_of_shared_folder_is_not_to_be_changed() {
        for path in
            ["/", "/etc", "/etc/ssl/certs", "/usr/lib", "/proc/1", "/var", "/var/log", "/home/ada", "/tmp"]
        {
            assert!(is_system_path(Path::new(path)), "{path}");
        }
        for path in ["/srv/data", "/var/lib/data", "/dev/kvm", "/data", "/library"] {
            assert!(!is_system_path(Path::new(path)), "{path}");
        }
        let outer = home(0o755);
        let place = outer.path().join("place");
        folder(&place, 0o755);
        let mut unusable = look_at(outer.path(), &[], &[&place]).unwrap_err();
        unusable.record_withheld(&[&outer.path().join("workers.toml")]);
        assert!(unusable.to_string().contains("chown"), "{unusable}");
        let link = outer.path().join("link");
        std::os::unix::fs::symlink(&place, &link).unwrap();
        let mut linked = look_at(outer.path(), &[], &[&link]).unwrap_err();
        linked.record_withheld(&[&place.join("jobs.sock")]);
        unusable.record_withheld(&[&place.join("jobs.sock")]);
        for unusable in [unusable, linked, look_at(outer.path(), &[], &[Path::new("/")]).unwrap_err()] {
            let text = unusable.to_string();
            assert!(text.contains("`write = [\"/srv/NAME\"]`") && !text.contains("chown"), "{text}");
        }
    }
}

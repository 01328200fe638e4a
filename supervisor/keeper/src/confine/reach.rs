//! Finds the given paths that the worker's user can reach, by the modes of files and folders.
//!
//! Access control lists are ignored. If an access control list allows more than the mode, the worker is shown
//! a path that was reachable anyway. If the list allows less, the step that fails reports the path.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::{elf, paths};
use crate::confinement::Identity;

const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// Paths given to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Given<'a> {
    /// The executed program.
    pub(crate) program: &'a Path,
    /// The program, and the files that it executes or loads.
    pub(crate) programs: &'a [&'a Path],
    /// Working directory.
    pub(crate) directory: &'a Path,
    /// Readable paths.
    pub(crate) read: &'a [&'a Path],
    /// Writable paths.
    pub(crate) write: &'a [&'a Path],
    /// Temporary folder.
    pub(crate) temporary: Option<&'a Path>,
    /// True if a private file system is mounted over the temporary folder.
    pub(crate) is_mounted: bool,
}

/// Purpose for which a path is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// Working directory.
    Start,
    /// Reading. Folders can also be traversed.
    Read,
    /// Writing.
    Write,
    /// Mount point.
    Mount,
}

/// A path in a folder that the user cannot traverse, or such a folder itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Hidden {
    /// The path as named, or its real path.
    pub(crate) place: PathBuf,
    /// The real path.
    pub(crate) real: PathBuf,
    pub(crate) purpose: Purpose,
}

/// Paths that a user cannot reach, and the folders that prevent it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Closed {
    /// Folders that the user cannot traverse. None is inside another, and the paths contain no links.
    pub(crate) folders: Vec<PathBuf>,
    /// Given paths inside of these folders.
    pub(crate) hidden: Vec<Hidden>,
    /// Given folders that the user cannot list or traverse. The entries are given instead.
    pub(crate) opened: BTreeSet<PathBuf>,
}

impl Closed {
    /// True if the only hidden paths are the working directory, and the programs with the paths next to them.
    /// These can be opened before the change of user. Scripts do not qualify, because they are found by name.
    /// Libraries that need other libraries next to them do not qualify for the same reason.
    pub(crate) fn is_only_programs(&self, given: &Given<'_>) -> bool {
        let others = given.programs.iter();
        let others = others.filter(|path| **path != given.program && !elf::is_self_contained(path));
        let asked_for: BTreeSet<PathBuf> =
            given.read.iter().chain(others).filter_map(|path| std::fs::canonicalize(path).ok()).collect();
        let is_had = |hidden: &Hidden| match hidden.purpose {
            Purpose::Start => true,
            Purpose::Read => !asked_for.contains(&hidden.real),
            Purpose::Write | Purpose::Mount => false,
        };
        self.hidden.iter().all(is_had) && elf::is_elf(given.program)
    }

    /// Returns the file that the host loads or runs, if it is hidden.
    pub(crate) fn hosted<'g>(&self, given: &Given<'g>) -> Option<&'g Path> {
        let is_hidden = |path: &Path| self.hidden.iter().any(|hidden| hidden.place == path);
        given.programs.iter().copied().find(|path| *path != given.program && is_hidden(path))
    }
}

/// A given path that this user cannot use, wherever it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Useless {
    path: PathBuf,
    wanted: &'static str,
    identity: Identity,
    /// True if the user is one of the subordinate ids, to which the supervisor's own user cannot give files
    /// directly.
    pub(crate) is_subordinate: bool,
}

impl fmt::Display for Useless {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, wanted, identity: Identity { uid, gid }, is_subordinate } = self;
        let path = path.display();
        let remedy = match *wanted {
            "write" if *is_subordinate => format!(
                "`unshare --map-root-user --map-users={uid},{uid},1 --map-groups={gid},{gid},1 chown -R {uid}:{gid} \
                 {path}`"
            ),
            "write" => format!("`chown -R {uid}:{gid} {path}`"),
            "execute" => format!("`chmod go+rx {path}`"),
            _ => format!("`chmod go+r {path}`"),
        };
        let shared = if *is_subordinate { " (\"shared\")" } else { "" };
        write!(
            f,
            "let user {uid} {wanted} {path}: {remedy}, or set `user` in `sandbox` to a user that can{shared}"
        )
    }
}

/// Checks all given paths. Ignores missing paths, because a later step reports the error.
pub(crate) fn look(given: &Given<'_>, identity: Identity) -> Result<Closed, Useless> {
    let mut closed = Closed::default();
    let mut folders = BTreeSet::new();
    let mut looked_at = BTreeMap::new();
    let useless =
        |path: &Path, wanted| Useless { path: path.to_owned(), wanted, identity, is_subordinate: false };
    for (path, purpose) in all(given) {
        let Ok(real) = std::fs::canonicalize(&path) else { continue };
        let Ok(found) = std::fs::metadata(&real) else { continue };
        let has = |wanted: u32| permits(&found, identity, wanted);
        if found.is_dir() {
            match purpose {
                Purpose::Write if !has(READ | WRITE | SEARCH) => return Err(useless(&path, "write")),
                Purpose::Read if !has(READ | SEARCH) => drop(closed.opened.insert(real.clone())),
                Purpose::Start if !has(SEARCH) => drop(folders.insert(real.clone())),
                _ => {}
            }
        } else {
            match purpose {
                Purpose::Write if !has(WRITE) => return Err(useless(&path, "write")),
                Purpose::Read if path == given.program && !has(SEARCH) => {
                    return Err(useless(&path, "execute"));
                }
                Purpose::Read if !has(READ) && !has(SEARCH) => return Err(useless(&path, "read")),
                _ => {}
            }
        }
        for place in BTreeSet::from([path, real.clone()]) {
            let above = first_closed(&place, identity, &mut looked_at);
            let is_opened = closed.opened.contains(&real);
            if above.is_none() && !is_opened {
                continue;
            }
            folders.insert(above.unwrap_or_else(|| real.clone()));
            closed.hidden.push(Hidden { place, real: real.clone(), purpose });
        }
    }
    let is_inner = |folder: &&PathBuf| !folder.ancestors().skip(1).any(|above| folders.contains(above));
    closed.folders = folders.iter().filter(is_inner).cloned().collect();
    Ok(closed)
}

/// Returns all given paths as named.
fn all(given: &Given<'_>) -> Vec<(PathBuf, Purpose)> {
    let own = paths::own_folders(given.programs, Some(given.directory), given.write);
    let mut all = vec![(given.directory.to_owned(), Purpose::Start)];
    all.extend(own.into_iter().map(|path| (path, Purpose::Read)));
    all.extend(given.programs.iter().map(|path| (path.to_path_buf(), Purpose::Read)));
    // The worker must not choose where a link in a writable folder leads; see `leads_as_named`.
    let leads = |path: &&&Path| paths::leads_as_named(path, given.write) == Ok(true);
    all.extend(given.read.iter().filter(leads).map(|path| (path.to_path_buf(), Purpose::Read)));
    all.extend(given.write.iter().filter(leads).map(|path| (path.to_path_buf(), Purpose::Write)));
    let temporary = if given.is_mounted { Purpose::Mount } else { Purpose::Write };
    all.extend(given.temporary.map(|path| (path.to_owned(), temporary)));
    all
}

/// Returns the topmost folder above this path that the user cannot traverse.
fn first_closed(path: &Path, identity: Identity, looked_at: &mut BTreeMap<PathBuf, bool>) -> Option<PathBuf> {
    let above: Vec<&Path> = path.ancestors().skip(1).collect();
    let mut is_closed = |folder: &Path| {
        if let Some(is_closed) = looked_at.get(folder) {
            return *is_closed;
        }
        let is_closed = std::fs::metadata(folder).is_ok_and(|found| !permits(&found, identity, SEARCH));
        looked_at.insert(folder.to_owned(), is_closed);
        is_closed
    };
    let folder = above.into_iter().rev().find(|folder| is_closed(folder))?;
    std::fs::canonicalize(folder).ok()
}

/// True if the mode allows this user everything in `wanted`.
fn permits(found: &std::fs::Metadata, Identity { uid, gid }: Identity, wanted: u32) -> bool {
    let mode = found.permissions().mode();
    let bits = match () {
        () if uid == 0 => return true,
        () if found.uid() == uid => mode >> 6,
        () if found.gid() == gid => mode >> 3,
        () => mode,
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

    /// Creates a home, a checkout in it with a program, and another file.
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

    fn look_at(outer: &Path, read: &[&Path], write: &[&Path]) -> Result<Closed, Useless> {
        let directory = outer.join("home/checkout");
        let program = directory.join("program");
        let programs = [program.as_path()];
        let given = Given {
            program: &program,
            programs: &programs,
            directory: &directory,
            read,
            write,
            temporary: None,
            is_mounted: false,
        };
        look(&given, STRANGER)
    }

    #[test]
    fn what_is_open_to_all_is_not_closed() {
        let outer = home(0o755);
        assert_eq!(look_at(outer.path(), &[], &[]), Ok(Closed::default()));
    }

    #[test]
    fn a_closed_home_is_named_and_what_was_given_of_it() {
        let outer = home(0o700);
        let home = outer.path().join("home");
        let closed = look_at(outer.path(), &[], &[]).unwrap();
        assert_eq!(closed.folders, std::slice::from_ref(&home));
        let places: BTreeSet<_> = closed.hidden.iter().map(|hidden| hidden.place.clone()).collect();
        assert_eq!(places, [home.join("checkout"), home.join("checkout/program")].into());
        assert!(closed.opened.is_empty());
    }

    #[test]
    fn a_closed_folder_that_is_given_is_opened() {
        let outer = home(0o755);
        let checkout = outer.path().join("home/checkout");
        folder(&checkout, 0o700);
        let closed = look_at(outer.path(), &[], &[]).unwrap();
        assert_eq!((closed.folders, closed.opened), (vec![checkout.clone()], [checkout].into()));
    }

    #[test]
    fn what_the_user_cannot_use_is_told_with_what_to_do() {
        let outer = home(0o755);
        let (secret, place) = (outer.path().join("secret"), outer.path().join("place"));
        file(&secret, 0o600);
        folder(&place, 0o755);
        let why =
            |read: &[&Path], write: &[&Path]| look_at(outer.path(), read, write).unwrap_err().to_string();
        let read = why(&[&secret], &[]);
        assert!(read.contains("let user 61184 read") && read.contains("/secret") && read.contains("`user`"));
        let write = why(&[], &[&place]);
        assert!(write.contains("chown -R 61184:61184") && write.contains("`user`"), "{write}");
        file(&outer.path().join("home/checkout/program"), 0o700);
        assert!(why(&[], &[]).contains("execute"));
    }
}

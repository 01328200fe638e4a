//! Prepares the confinement of a worker before the fork: Landlock rules, a seccomp filter, a root folder or covers, and
//! the rules for programs. The supervisor's order determines the layers. The child applies the prepared layers in
//! `steps.rs`. Control groups are created in `process/cgroups.rs`.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use super::mounts::covers::{Covers, unreachable_folder};
use super::mounts::proc_entries;
use super::mounts::root::{self, PrivateRoot};
use super::{LANDLOCK_STEP, SECCOMP_STEP, SpawnError, program_rules};
use crate::confine::landlock::{self, Ruleset};
use crate::confine::reach::{self, GrantedPaths, Unreachable};
use crate::confine::seccomp::{self, FatalAction, Filter};
use crate::protocol::SpawnOrder;
use crate::protocol::confinement::{Confinement, Layers, NetworkAccess, Seccomp, TemporaryFiles};

pub(super) const SUBORDINATE_STEP: &str = "user namespace of subordinate ids";

/// Maximum number of compiled filters in the cache. One filter serves all sandboxes that have the same system call
/// rules.
const FILTERS_MAX: usize = 1024;

/// The confinement of a child, fully prepared. The child applies the confinement step by step.
#[derive(Default)]
pub(crate) struct PreparedConfinement {
    pub(super) layers: Layers,
    pub(super) ruleset: Option<Ruleset>,
    pub(super) filter: Option<Arc<Filter>>,
    pub(super) root: Option<Arc<PrivateRoot>>,
    /// File that contains the Landlock rules for the worker's programs. The worker receives the file as its standard
    /// input, and applies the rules.
    pub(super) program_rules: Option<OwnedFd>,
    /// Mounts that make paths visible although the worker's user cannot reach them in the system's root folder. `None`
    /// if the worker has a private root folder.
    pub(super) covers: Option<Arc<Covers>>,
    /// Descriptor of the program, if it is executed by descriptor instead of by path. In this case, the child
    /// enters the working directory before it changes to the worker's user.
    pub(super) executable: Option<OwnedFd>,
    /// Descriptor of the file that the host program loads or runs. Used if the host cannot open the file by its path.
    /// The host keeps the descriptor open.
    pub(super) hosted_file: Option<OwnedFd>,
    /// Mount point and mount options of the worker's temporary file system.
    pub(super) private_temporary: Option<(CString, CString)>,
    /// Folder to mount at `/dev/shm`. Used only if the worker has a private mount namespace but not a private root
    /// folder.
    pub(super) shared_memory: Option<CString>,
    /// Existing user namespace that the worker enters before all other namespaces.
    pub(super) user_namespace: Option<Arc<OwnedFd>>,
    /// True if the child can mount file systems even before it is in a new user namespace.
    may_mount: bool,
}

/// Cache of compiled filters. Compiling a filter takes longer than all other preparations. The key contains all
/// settings that affect a filter.
#[derive(Default)]
pub(crate) struct FilterCache(HashMap<FilterKey, Arc<Filter>>);

type FilterKey = (Seccomp, bool, NetworkAccess, bool, Vec<String>, Vec<String>);

impl PreparedConfinement {
    /// Prepares the confinement of a worker. `temporary` is the worker's folder for [`TemporaryFiles::Folder`] or
    /// [`TemporaryFiles::MountedTmpfs`]. `subordinate` is the user namespace for subordinate IDs.
    pub(crate) fn prepare(
        order: &SpawnOrder<'_>,
        temporary: Option<&Path>,
        filters: &mut FilterCache,
        subordinate: Option<Arc<OwnedFd>>,
    ) -> Result<Self, SpawnError> {
        let SpawnOrder { directory, confinement: ordered, .. } = order;
        let layers = ordered.layers;
        let programs = as_paths(&ordered.programs);
        let (read, write) = (as_paths(&ordered.read), as_paths(&ordered.write));
        let withheld = as_paths(&ordered.withheld);
        let user_namespace = match (layers.subordinate_ids, subordinate) {
            (false, _) => None,
            (true, None) => return Err(SpawnError::new(SUBORDINATE_STEP, Errno::NOENT)),
            (true, found) => found,
        };
        let may_mount = user_namespace.is_some()
            || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
        let granted = GrantedPaths {
            program: Path::new(order.program),
            programs: &programs,
            directory: Path::new(directory),
            read: &read,
            write: &write,
            temporary,
            temporary_is_mounted: matches!(layers.temporary, TemporaryFiles::MountedTmpfs(_)),
        };
        let unreachable = find_unreachable(&granted, &withheld, &layers)?;
        let (executable, hosted_file) = match unreachable.folders.first() {
            Some(folder) if !may_mount => {
                // A worker with a private root folder could not access the program that was opened outside it, or the
                // working directory.
                if layers.namespaces.mount || !unreachable.hides_only_programs(&granted) {
                    return Err(unreachable_folder(folder, layers.identity));
                }
                (
                    Some(open(granted.program)?),
                    unreachable.hidden_hosted_file(&granted).map(open).transpose()?,
                )
            }
            _ => (None, None),
        };
        let ruleset = layers.landlock.then(|| create_ruleset(&granted, &withheld, ordered)).transpose()?;
        let create_root = || {
            proc_entries::prepare();
            PrivateRoot::prepare(&granted, &withheld, &unreachable, &layers)
        };
        let root = layers.namespaces.mount.then(create_root).transpose()?;
        let covers = if may_mount && root.is_none() {
            Covers::prepare(&unreachable, &withheld, layers.identity)?
        } else {
            None
        };
        // A template receives rules as well, because a template confines its forked workers like a host confines its
        // programs.
        let gets_rules = layers.program_rules || order.is_template && layers != Layers::default();
        let program_rules =
            gets_rules.then(|| program_rules::create_file(&layers, ruleset.as_ref(), temporary));
        Ok(Self {
            layers,
            program_rules: program_rules.transpose()?,
            ruleset,
            filter: filters.get(ordered, order.is_template)?,
            root: root.map(Arc::new),
            covers: covers.map(Arc::new),
            executable,
            hosted_file,
            private_temporary: private_temporary(&layers, temporary),
            shared_memory: shared_memory(&layers, temporary),
            user_namespace,
            may_mount,
        })
    }

    /// Returns the Landlock version of the rules, or `None` if there are no Landlock rules.
    pub(crate) fn landlock(&self) -> Option<u32> {
        self.ruleset.as_ref().map(Ruleset::abi)
    }

    /// Returns true if the child has any confinement. Such a child reports when it is confined, and then waits for
    /// permission to continue.
    pub(super) fn is_any(&self) -> bool {
        self.layers != Layers::default()
    }

    /// Returns true if the child creates its root folder before it enters the user namespace.
    pub(super) fn makes_root_first(&self) -> bool {
        self.root.is_some() && self.may_mount
    }

    pub(super) fn root(&self) -> Option<Arc<PrivateRoot>> {
        self.root.clone()
    }

    pub(super) fn covers(&self) -> Option<Arc<Covers>> {
        self.covers.clone()
    }

    /// Returns true if the worker has a private `/tmp`.
    pub(super) fn has_tmp(&self) -> bool {
        matches!(self.layers.temporary, TemporaryFiles::PrivateTmp(_))
    }
}

fn create_ruleset(
    granted: &GrantedPaths<'_>,
    withheld: &[&Path],
    ordered: &Confinement<'_>,
) -> Result<Ruleset, SpawnError> {
    let layers = &ordered.layers;
    let rules = landlock::Rules {
        programs: granted.programs,
        directory: Some(granted.directory),
        read: granted.read,
        write: granted.write,
        temporary: granted.temporary,
        withheld,
        has_own_root: layers.namespaces.mount,
        network: layers.network,
        tcp_ports: &ordered.tcp_ports,
    };
    Ruleset::prepare(&rules).map_err(|failure| {
        SpawnError::new(&format!("{}: {}", LANDLOCK_STEP, failure.attempted), failure.errno)
    })
}

/// If temporary files are on disk, returns the folder to mount at `/dev/shm`. For temporary files in memory, the step
/// that mounts their file system also mounts it at `/dev/shm`.
fn shared_memory(layers: &Layers, temporary: Option<&Path>) -> Option<CString> {
    let folder = temporary.filter(|_| layers.namespaces.proc && layers.temporary == TemporaryFiles::Folder);
    folder.and_then(root::c_string)
}

/// Finds the granted paths that the worker's user cannot reach. Returns nothing for a worker that runs as the keeper's
/// user.
fn find_unreachable(
    granted: &GrantedPaths<'_>,
    withheld: &[&Path],
    layers: &Layers,
) -> Result<Unreachable, SpawnError> {
    let Some(identity) = layers.identity else { return Ok(Unreachable::default()) };
    reach::check(granted, identity).map_err(|mut unusable| {
        unusable.is_subordinate = layers.subordinate_ids;
        unusable.record_withheld(withheld);
        SpawnError::new(&unusable.to_string(), Errno::ACCESS)
    })
}

/// Returns the mount point and mount options of a temporary file system. Used for workers that have the system's root
/// folder.
fn private_temporary(layers: &Layers, folder: Option<&Path>) -> Option<(CString, CString)> {
    let TemporaryFiles::MountedTmpfs(bytes) = layers.temporary else { return None };
    root::c_string(folder?).zip(root::tmp_options(bytes, layers.identity))
}

fn open(program: &Path) -> Result<OwnedFd, SpawnError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(program, flags, Mode::empty()).map_err(|errno| SpawnError::new("exec", errno))
}

impl FilterCache {
    fn get(
        &mut self,
        ordered: &Confinement<'_>,
        is_template: bool,
    ) -> Result<Option<Arc<Filter>>, SpawnError> {
        let layers = &ordered.layers;
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (allow, deny) = (owned(&ordered.allow), owned(&ordered.deny));
        let key = (layers.seccomp, layers.seccomp_names, layers.network, is_template, allow, deny);
        if let Some(filter) = self.0.get(&key) {
            return Ok(Some(filter.clone()));
        }
        let mut rules = match layers.seccomp {
            Seccomp::Off => return Ok(None),
            Seccomp::DenyList => seccomp::default(layers.network),
            Seccomp::AllowList => seccomp::strict(layers.network),
        };
        if layers.network != NetworkAccess::None && !hides_unix_sockets(layers) {
            rules = seccomp::deny_unix_sockets(rules, layers.network);
        }
        if layers.landlock && !landlock_controls_truncation() {
            rules = seccomp::deny_truncation(rules);
        }
        if is_template {
            rules = seccomp::allow_siblings(rules);
        }
        let unknown =
            |name| SpawnError::new(&format!("{}: unknown system call {name}", SECCOMP_STEP), Errno::INVAL);
        let rules = rules.with_overrides(&ordered.allow, &ordered.deny).map_err(unknown)?;
        let fatal_action = if layers.seccomp_names { FatalAction::Notify } else { FatalAction::Kill };
        let filter = Arc::new(rules.compile(fatal_action));
        if self.0.len() >= FILTERS_MAX {
            self.0.clear();
        }
        self.0.insert(key, filter.clone());
        Ok(Some(filter))
    }
}

/// Returns true if a worker with network access can reach only the Unix sockets in its own folders. Newer versions of
/// Landlock ensure this. Older versions must at least deny abstract sockets, and the worker needs a private root
/// folder.
fn hides_unix_sockets(layers: &Layers) -> bool {
    const SCOPES_SINCE: u32 = 6;
    const PATHS_SINCE: u32 = 9;
    let version = bulkhead_linux::landlock::abi_version().ok().filter(|_| layers.landlock).unwrap_or(0);
    version >= PATHS_SINCE || version >= SCOPES_SINCE && layers.namespaces.mount
}

/// Returns true if the kernel's version of Landlock can prevent a worker from truncating a file that it can only read.
fn landlock_controls_truncation() -> bool {
    const TRUNCATE_SINCE: u32 = 3;
    bulkhead_linux::landlock::abi_version().is_ok_and(|version| version >= TRUNCATE_SINCE)
}

fn as_paths<'p>(texts: &'p [&'p str]) -> Vec<&'p Path> {
    texts.iter().map(Path::new).collect()
}

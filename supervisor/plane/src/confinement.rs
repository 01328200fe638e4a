//! Decides the confinement of a bulkhead's workers from the `sandbox` table and the layers that this machine supports.
//! `program` calls this module before the first worker starts, and again when a reload changes the bulkhead. The result
//! is converted to orders for the keeper, which applies the layers.
//!
//! If this machine lacks a layer that is not in `best_effort`, the bulkhead's workers do not start. A message reports
//! the reason. No layer is left out silently.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use crate::worker_ids::{self, IdAllocator, IdUse};
use bulkhead_config::defaults::RLIMIT_NPROC;
use bulkhead_config::{BulkheadConfig, Config, Layer, Network, Profile, Program, SandboxUser, StartMode};
use bulkhead_keeper::{
    self as keeper, CgroupLimits, Confinement, Identity, LayerSupport, Layers, Namespaces, NetworkAccess,
    Observed, Seccomp, SubordinateIds, TemporaryFiles,
};

/// Sandbox layers and UIDs that are available on this machine, and paths that workers must not access.
pub struct SandboxSupport {
    abilities: BTreeMap<String, LayerSupport>,
    /// Paths that no worker can access. A reload can add paths.
    withheld: RwLock<Vec<String>>,
    config: PathBuf,
    ids: IdSource,
    /// Range in `/etc/subuid` that contains the workers' UIDs, or `None` if the UIDs come from another source.
    subordinate: Option<Arc<SubordinateIds>>,
    /// True if the configuration sets `worker_uids`.
    has_worker_uids: bool,
}

/// Source of the workers' UIDs.
enum IdSource {
    /// The UIDs come from this allocator.
    Host(Arc<IdAllocator>),
    /// No separate UIDs are available, so workers run as the supervisor's user. The string is the reason.
    Shared(String),
    /// No separate UIDs are available, and the supervisor runs as root. Workers do not start, because they would
    /// run as root. The string is the reason.
    Refused(String),
}

impl IdSource {
    fn from_result(found: Result<IdAllocator, String>) -> Self {
        match found {
            Ok(ids) => Self::Host(Arc::new(ids)),
            Err(why) if rustix::process::geteuid().is_root() => Self::Refused(why),
            Err(why) => Self::Shared(why),
        }
    }
}

impl SandboxSupport {
    /// Uses the probe results of the keeper's guard process. An embedded supervisor cannot probe the machine itself,
    /// because a probe forks, and the application can have several threads.
    pub fn from_probe(config: &Config, found: keeper::ProbeResult) -> Self {
        Self::of(config, IdUse::Run, found.layers, move || found.ids)
    }

    /// Adds the files named in `config`, such as new token files, to the paths that workers must not access. Affects
    /// only workers of programs that are resolved after this call.
    pub fn withhold(&self, config: &Config) {
        let mut withheld = self.withheld.write().unwrap_or_else(PoisonError::into_inner);
        for path in withheld_paths(config) {
            if !withheld.contains(&path) {
                withheld.push(path);
            }
        }
    }

    fn withheld(&self) -> Vec<String> {
        self.withheld.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Probes which sandbox layers this machine supports, even if no bulkhead needs any of them yet, because a later
    /// probe would have to fork while other threads are running. Callers use [`IdUse::Check`] if a supervisor with the
    /// same configuration may be running.
    pub fn probe(config: &Config, id_use: IdUse) -> Self {
        Self::of(config, id_use, keeper::probe(), || SubordinateIds::find().map(Arc::new))
    }

    fn of(
        config: &Config,
        id_use: IdUse,
        abilities: Vec<LayerSupport>,
        subordinate: impl FnOnce() -> Result<Arc<SubordinateIds>, String>,
    ) -> Self {
        let abilities = abilities.into_iter().map(|ability| (ability.layer.clone(), ability)).collect();
        let withheld = RwLock::new(withheld_paths(config));
        let ids = IdSource::Shared(String::new());
        let has_worker_uids = config.supervisor.worker_uids.is_some();
        let config_path = config.path.clone();
        let mut support =
            Self { abilities, withheld, config: config_path, ids, subordinate: None, has_worker_uids };
        let worker_uids = config.supervisor.worker_uids;
        support.ids = IdSource::from_result(match support.why_missing(Layer::Identity) {
            None => IdAllocator::new(worker_uids, id_use),
            Some(why) if rustix::process::geteuid().is_root() => Err(why),
            Some(_) => {
                let missing = |part: &str| support.why_not(part);
                worker_ids::find_subordinate(missing, subordinate, worker_uids, id_use).map(|(found, ids)| {
                    support.subordinate = Some(found);
                    ids
                })
            }
        });
        support
    }

    /// Returns the range in `/etc/subuid` from which the workers' UIDs come, or `None` if the UIDs come from another
    /// source.
    pub fn subordinate(&self) -> Option<Arc<SubordinateIds>> {
        self.subordinate.clone()
    }

    /// Returns the allocator for the workers' UIDs, or `None` if workers have no separate UIDs.
    pub fn ids(&self) -> Option<Arc<IdAllocator>> {
        match &self.ids {
            IdSource::Host(ids) => Some(ids.clone()),
            IdSource::Shared(_) | IdSource::Refused(_) => None,
        }
    }

    /// Returns the reason why a sandbox layer is not available, or `None` if all parts of the layer are available.
    fn why_missing(&self, layer: Layer) -> Option<String> {
        parts(layer).iter().find_map(|part| self.why_not(part))
    }

    /// Returns the reason why a part of a sandbox layer is not available, or `None` if the part is available.
    fn why_not(&self, part: &str) -> Option<String> {
        match self.abilities.get(part) {
            Some(ability) if ability.is_available => None,
            Some(ability) => {
                let why = ability.why_not.as_deref().unwrap_or("not available");
                let what_to_do =
                    ability.what_to_do.as_ref().map(|what| format!(" ({what})")).unwrap_or_default();
                Some(format!("{part}: {why}{what_to_do}"))
            }
            None => Some(format!("{part}: unknown")),
        }
    }

    fn has(&self, part: &str) -> bool {
        self.abilities.get(part).is_some_and(|ability| ability.is_available)
    }
}

/// Returns the names of a layer's parts, as shown by `bulkhead-supervisor doctor`.
fn parts(layer: Layer) -> &'static [&'static str] {
    match layer {
        Layer::Landlock => &["landlock"],
        Layer::LandlockScopes => &["landlock scopes"],
        Layer::LandlockTcp => &["landlock tcp"],
        Layer::Seccomp => &["seccomp", "seccomp kill"],
        Layer::UserNamespace => &["user namespace"],
        Layer::PidNamespace => &["pid namespace", "ipc namespace", "uts namespace"],
        Layer::MountNamespace => &["mount namespace", "mount_setattr", "own /proc", "pivot_root"],
        Layer::NetworkNamespace => &["network namespace"],
        Layer::Identity => &["other users"],
        Layer::Cgroup => &["cgroup leaf", "cgroup clone", "cgroup kill"],
        Layer::NoNewPrivs => &["no_new_privs"],
        Layer::ProgramScopes => &["landlock", "landlock scopes"],
    }
}

/// Returns paths that workers must not access, even if the configuration allows them to access a parent folder.
fn withheld_paths(config: &Config) -> Vec<String> {
    let Config { path, fragments, supervisor, access, bulkheads } = config;
    let mut paths: Vec<&Path> = vec![path];
    paths.extend(fragments.iter().map(PathBuf::as_path));
    // In an embedded supervisor, the socket paths are empty.
    paths.extend([supervisor.socket.as_path(), &supervisor.admin].into_iter().filter(|path| path.has_root()));
    paths.extend(supervisor.crash_dir.as_deref());
    paths.extend(supervisor.http.as_ref().map(|http| http.token_file.as_path()));
    paths.extend(access.iter().filter_map(|entry| Some(entry.who.token_file()?.path.as_path())));
    paths.extend(bulkheads.iter().flat_map(|bulkhead| &bulkhead.env_files).map(|(_, path)| path.as_path()));
    paths.into_iter().map(text).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The user that a bulkhead's workers run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerIdentity {
    /// All workers run as the supervisor's user.
    Own,
    /// All workers run as this user.
    One(Identity),
    /// Each worker has a separate UID.
    Each,
}

/// Confinement of one bulkhead's workers.
pub struct Sandbox {
    profile: Profile,
    layers: Layers,
    identity: WorkerIdentity,
    programs: Vec<String>,
    read: Vec<String>,
    write: Vec<String>,
    withheld: Vec<String>,
    tcp_ports: Vec<u16>,
    allow: Vec<String>,
    deny: Vec<String>,
    /// Names of layers, and of parts of layers, that the profile includes but this machine lacks. The configuration
    /// allows workers to start without these layers.
    missing: Vec<&'static str>,
    /// Warnings for operators about weaknesses in the confinement. Each warning is a sentence.
    warnings: Vec<String>,
    /// Encoded restrictions that an SDK-based worker applies to itself before its first job.
    seal: Option<Vec<u8>>,
    /// Reason why a worker must not run several programs at once, or `None` if there is no such restriction.
    why_single_program: Option<String>,
    /// Maximum size of a worker's temporary folder or file system, in bytes.
    temporary_bytes: u64,
    /// Reason why no worker of the bulkhead can start, or `None` if workers can start.
    obstacle: Option<String>,
}

impl Sandbox {
    /// Determines the confinement of a bulkhead's workers. `programs` contains the files that a worker executes or
    /// loads.
    pub fn resolve(bulkhead: &BulkheadConfig, programs: Vec<PathBuf>, support: &SandboxSupport) -> Self {
        let sandbox = &bulkhead.sandbox;
        let texts = |paths: &[PathBuf]| paths.iter().map(|path| text(path)).collect();
        let mut resolver = LayerResolver {
            support,
            allowed: &sandbox.best_effort,
            missing: Vec::new(),
            missing_required: Vec::new(),
            refused: None,
        };
        let identity = resolver.identity(bulkhead);
        let why_single_program = resolver.program_scopes(bulkhead);
        let layers = Layers { cgroup: resolver.cgroup(bulkhead), ..resolver.layers(bulkhead, identity) };
        resolver.require_signal_isolation(&layers, identity);
        let is_forked = bulkhead.start.mode == StartMode::Fork;
        if is_forked {
            resolver.require_fork_isolation(sandbox.profile, &layers);
        }
        let obstacle = resolver.refused.take().or_else(|| resolver.obstacle(sandbox.profile));
        let mut missing: Vec<&'static str> = resolver.missing.iter().map(|layer| layer.name()).collect();
        if layers.landlock {
            let absent = LANDLOCK_PARTS.iter().filter(|(part, _)| !support.has(part)).map(|(_, name)| *name);
            let unnamed: Vec<_> = absent.filter(|name| !missing.contains(name)).collect();
            missing.extend(unnamed);
        }
        let warnings = warnings(bulkhead, &missing, identity, support);
        if bulkhead.sandbox.profile != Profile::None && !limits_process_count(identity, &layers) {
            missing.push(PROCESS_COUNT);
        }
        let is_sealed =
            layers.seccomp == Seccomp::AllowList && !matches!(bulkhead.program, Program::Exec { .. });
        let allow = sandbox.allow.iter().map(String::as_str).collect::<Vec<_>>();
        let (network, tcp_ports) = network_access(&sandbox.network);
        let has_sockets = network != NetworkAccess::None;
        let seal = keeper::Seal { is_strict: is_sealed, network: has_sockets, allow: &allow, is_forked };
        let seal = (is_sealed || is_forked && layers.seccomp != Seccomp::Off).then(|| keeper::seal(&seal));
        Self {
            profile: sandbox.profile,
            layers,
            identity,
            programs: texts(&programs),
            read: sandbox
                .read
                .iter()
                .map(|path| text(path))
                .chain(named_files(bulkhead, &support.withheld()))
                .chain(named_folders(&bulkhead.env))
                .collect(),
            write: texts(&sandbox.write),
            withheld: support.withheld(),
            tcp_ports,
            allow: sandbox.allow.clone(),
            deny: sandbox.deny.clone(),
            missing,
            warnings,
            seal,
            why_single_program,
            temporary_bytes: sandbox.tmp_bytes,
            obstacle,
        }
    }

    /// Removes the granted paths that lead through one of these folders. The folders themselves stay granted.
    pub(crate) fn without_paths_through(mut self, folders: &[PathBuf]) -> Self {
        retain_fixed(&mut self.programs, folders);
        retain_fixed(&mut self.read, folders);
        self
    }

    /// Returns the files that a worker executes or loads.
    pub(crate) fn programs(&self) -> Vec<PathBuf> {
        self.programs.iter().map(PathBuf::from).collect()
    }

    /// Returns the reason why a worker must not run several programs at once, or `None` if there is no such
    /// restriction.
    pub fn why_single_program(&self) -> Option<&str> {
        self.why_single_program.as_deref()
    }

    /// Returns the reason why no worker can start, as a sentence. Returns `None` if workers can start.
    pub fn obstacle(&self) -> Option<&str> {
        self.obstacle.as_deref()
    }

    /// Returns warnings for operators about weaknesses in the confinement. Each warning is a sentence.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns true if the kernel enforces a separate process limit for each worker.
    pub fn limits_process_count(&self) -> bool {
        self.profile != Profile::None && !self.missing.contains(&PROCESS_COUNT)
    }

    pub fn identity(&self) -> WorkerIdentity {
        self.identity
    }

    pub fn seal(&self) -> Option<&[u8]> {
        self.seal.as_deref()
    }

    /// Returns the maximum size of a worker's temporary folder, in bytes. Returns `None` if there is no folder or
    /// if the kernel enforces the limit.
    pub fn temporary_bytes(&self) -> Option<u64> {
        let is_bounded = self.layers.temporary == TemporaryFiles::Folder && self.profile != Profile::None;
        is_bounded.then_some(self.temporary_bytes)
    }

    /// Returns true if system calls are filtered. In that case, a SIGSYS means that a worker has violated the sandbox.
    pub fn filters_calls(&self) -> bool {
        self.layers.seccomp != Seccomp::Off
    }

    /// Returns the confinement to request from the keeper for one worker. `id` is the worker's UID if each worker
    /// has a separate UID.
    pub fn order(&self, id: Option<u32>) -> Confinement<'_> {
        if self.profile == Profile::None {
            return Confinement { layers: self.layers, ..Confinement::default() };
        }
        let identity = match self.identity {
            WorkerIdentity::Own => None,
            WorkerIdentity::One(identity) => Some(identity),
            WorkerIdentity::Each => id.map(|id| Identity { uid: id, gid: id }),
        };
        Confinement {
            layers: Layers { identity, ..self.layers },
            programs: list(&self.programs),
            read: list(&self.read),
            write: list(&self.write),
            withheld: list(&self.withheld),
            tcp_ports: self.tcp_ports.clone(),
            allow: list(&self.allow),
            deny: list(&self.deny),
        }
    }

    /// Describes a worker's confinement for use in snapshots. `observed` is the state that the keeper read back from
    /// the kernel.
    pub fn describe(&self, observed: &Observed) -> bulkhead_api::Confinement {
        let Namespaces { user, pid, mount, network, proc: _ } = observed.namespaces;
        let rows = [(user, "user"), (pid, "pid"), (mount, "mount"), (network, "network")];
        let namespaces = rows.iter().filter(|(is_own, _)| *is_own).map(|(_, name)| (*name).into()).collect();
        bulkhead_api::Confinement {
            profile: self.profile.name().into(),
            no_new_privs: observed.no_new_privs,
            seccomp: if observed.seccomp == 0 { "none" } else { "filter" }.into(),
            landlock: observed.landlock,
            capabilities: format!("{:016x}", observed.capabilities),
            namespaces,
            uid: observed.uid,
            gid: observed.gid,
            cgroup: observed.cgroup,
            identity: if self.identity == WorkerIdentity::Own { "shared" } else { "own" }.into(),
            missing: self.missing.iter().map(|layer| (*layer).into()).collect(),
            inherited: observed.is_inherited,
        }
    }
}

/// Entry added to `missing` if the kernel does not enforce a separate process limit for each worker.
const PROCESS_COUNT: &str = "nproc";

/// Returns true if RLIMIT_NPROC or a cgroup limits the number of processes of each worker. The kernel counts
/// RLIMIT_NPROC per user and user namespace, and does not apply the limit to root.
fn limits_process_count(identity: WorkerIdentity, layers: &Layers) -> bool {
    let is_root = match identity {
        WorkerIdentity::Own => rustix::process::geteuid().is_root(),
        WorkerIdentity::One(identity) => identity.uid == 0,
        WorkerIdentity::Each => false,
    };
    let has_group = layers.cgroup.is_some_and(|cgroup| cgroup.pids.is_some());
    has_group || identity == WorkerIdentity::Each || layers.namespaces.user && !is_root
}

/// Landlock features that older kernels do not support. Each entry contains the name of a feature and the name
/// used for it in `missing`.
const LANDLOCK_PARTS: [(&str, &str); 2] =
    [("landlock scopes", "landlock_scopes"), ("landlock truncate", "landlock_truncate")];

/// Placeholder identity for a worker with a separate UID. No file has this owner or group.
const OWNER_OF_NOTHING: Identity = Identity { uid: u32::MAX, gid: u32::MAX };

/// Returns warnings about missing layers, and about valid settings that weaken the sandbox.
fn warnings(
    bulkhead: &BulkheadConfig,
    missing: &[&str],
    identity: WorkerIdentity,
    support: &SandboxSupport,
) -> Vec<String> {
    let mut warnings = Vec::new();
    if bulkhead.sandbox.profile == Profile::None {
        return warnings;
    }
    if !missing.is_empty() {
        warnings.push(format!("the sandbox lacks {}", missing.join(", ")));
    }
    if let IdSource::Shared(why) = &support.ids
        && support.has_worker_uids
        && missing.contains(&Layer::Identity.name())
    {
        warnings.push(format!("`worker_uids` has no effect: {why}"));
    }
    if identity == WorkerIdentity::Own && rustix::process::geteuid().is_root() {
        warnings.push(
            "workers run as root, without capabilities, and can change root's files where the sandbox \
             permits writing; without `user` in `sandbox`, workers have separate user IDs"
                .to_owned(),
        );
    }
    // Landlock cannot exclude files from a folder. If `read` or `write` contains a folder, workers can access all files
    // in that folder.
    let configured = || bulkhead.sandbox.read.iter().chain(&bulkhead.sandbox.write);
    let is_open = |secret: &&String| configured().any(|path| Path::new(secret).starts_with(path));
    if let Some(secret) = support.withheld().iter().find(is_open) {
        warnings.push(format!("`read` and `write` reach the supervisor's own files: {secret}"));
    }
    let user = match identity {
        WorkerIdentity::Own => None,
        WorkerIdentity::One(identity) => Some(identity),
        WorkerIdentity::Each => Some(OWNER_OF_NOTHING),
    };
    let is_closed = |path: &Path| user.is_some_and(|user| path.is_dir() && !keeper::can_list(path, user));
    for folder in bulkhead.sandbox.read.iter().filter(|path| is_closed(path)) {
        let folder = folder.display();
        warnings.push(format!(
            "workers see only the entries of {folder} that exist when they start, because their user cannot list the \
             directory: `chmod go+rx {folder}`"
        ));
    }
    warnings
}

/// Returns the network access to request from the keeper, and the TCP ports that workers can connect to.
fn network_access(network: &Network) -> (NetworkAccess, Vec<u16>) {
    match network {
        Network::None => (NetworkAccess::None, Vec::new()),
        Network::Connections { tcp_ports, udp } => {
            (NetworkAccess::Connections { udp: *udp }, tcp_ports.clone())
        }
        Network::All => (NetworkAccess::All, Vec::new()),
    }
}

/// Returns the files named on the command line. Workers can read these files, because a command such as `["python3",
/// "main.py"]` would not work otherwise. Excludes folders, because they can contain anything, and the supervisor's own
/// files.
fn named_files(bulkhead: &BulkheadConfig, withheld: &[String]) -> Vec<String> {
    let (Program::Command { argv, .. } | Program::Exec { argv, .. }) = &bulkhead.program else {
        return Vec::new();
    };
    let paths = argv.iter().skip(1).map(|text| bulkhead.cwd.join(text));
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let secrets: Vec<PathBuf> = withheld.iter().filter_map(|path| real(Path::new(path))).collect();
    let is_secret =
        |path: &Path| real(path).is_none_or(|real| secrets.iter().any(|one| real.starts_with(one)));
    let files = paths.filter(|path| !path.starts_with("/proc") && path.is_file() && !is_secret(path));
    files.map(|path| text(&path)).collect()
}

/// Removes the paths whose targets a worker can change by writing to `folders`.
fn retain_fixed(paths: &mut Vec<String>, folders: &[PathBuf]) {
    let folders: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
    paths.retain(|path| keeper::is_fixed(Path::new(path), &folders));
}

/// Environment variables that contain search paths for programs and libraries.
const SEARCH_PATHS: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NODE_PATH"];

/// Returns the folders that the configured environment variables list as search paths.
fn named_folders(environment: &[(String, String)]) -> Vec<String> {
    let lists = environment.iter().filter(|(name, _)| SEARCH_PATHS.contains(&name.as_str()));
    let folders = lists.flat_map(|(_, list)| list.split(':'));
    let is_folder = |text: &&str| {
        let real = std::fs::canonicalize(text);
        text.starts_with('/') && real.is_ok_and(|real| real.is_dir() && real != Path::new("/"))
    };
    folders.filter(is_folder).map(str::to_owned).collect()
}

fn list(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

/// Returns true if the configuration lets any worker of the bulkhead run several jobs at once.
fn runs_several_at_once(bulkhead: &BulkheadConfig) -> bool {
    let tenant_limits = bulkhead.tenant.values().filter_map(|tenant| tenant.max_in_flight);
    let tenant_limits = tenant_limits.filter(|_| bulkhead.isolation().is_some());
    tenant_limits.chain([bulkhead.max_in_flight]).any(|max| max > 1)
}

/// Selects the sandbox layers for one bulkhead and records the layers that are not available.
struct LayerResolver<'g> {
    support: &'g SandboxSupport,
    allowed: &'g [Layer],
    missing: Vec<Layer>,
    /// Required layers that are not available, and the reason for each.
    missing_required: Vec<(Layer, String)>,
    /// Reason why workers must not be started even if `best_effort` is set, or `None` if workers can be started.
    refused: Option<String>,
}

impl LayerResolver<'_> {
    /// Returns true if the layer is available. Otherwise returns false and records the layer as missing.
    fn require(&mut self, layer: Layer) -> bool {
        match self.support.why_missing(layer) {
            None => true,
            Some(why) => {
                self.record_missing(layer, why);
                false
            }
        }
    }

    fn record_missing(&mut self, layer: Layer, why: String) {
        let is_recorded = self.missing.contains(&layer)
            || self.missing_required.iter().any(|(recorded, _)| *recorded == layer);
        if is_recorded {
            return;
        }
        if self.allowed.contains(&layer) {
            self.missing.push(layer);
        } else {
            self.missing_required.push((layer, why));
        }
    }

    /// Requires Landlock scopes, unless a separate UID or a PID namespace already prevents a worker from sending
    /// signals to processes other than its own. Does nothing if Landlock itself is missing.
    fn require_signal_isolation(&mut self, layers: &Layers, identity: WorkerIdentity) {
        if layers.landlock && identity != WorkerIdentity::Each && !layers.namespaces.pid {
            self.require(Layer::LandlockScopes);
        }
    }

    /// Requires the layers that separate forked workers from each other, because these workers share a user and a PID
    /// namespace. The layers also prevent a forked worker from forking further workers. A PID namespace is required
    /// because its first process kills a worker's descendants. `best_effort` does not apply to these layers.
    fn require_fork_isolation(&mut self, profile: Profile, layers: &Layers) {
        if profile == Profile::None || self.refused.is_some() {
            return;
        }
        let rows = [
            (layers.no_new_privs, Layer::NoNewPrivs),
            (layers.seccomp != Seccomp::Off, Layer::Seccomp),
            (layers.landlock, Layer::Landlock),
            (self.support.has("landlock scopes"), Layer::LandlockScopes),
            (layers.namespaces.pid, Layer::PidNamespace),
        ];
        let absent = rows.iter().find(|(is_available, _)| !is_available).map(|(_, layer)| *layer);
        let why = match absent {
            Some(layer) => {
                let why = self.support.why_missing(layer).or_else(|| self.support.why_not(keeper::TREE_END));
                Some(format!("{} ({})", layer.name(), why.unwrap_or_default()))
            }
            None => self.support.why_not(keeper::FORKED_WORKERS),
        };
        self.refused = why.map(|why| {
            format!(
                "`start.mode = \"fork\"` is not available here under `profile = \"{}\"`, even with \
                 `best_effort`, because workers of a template share a user: {why}; see the requirements in \
                 `bulkhead-supervisor doctor`, or remove `start.mode`",
                profile.name(),
            )
        });
    }

    fn identity(&mut self, bulkhead: &BulkheadConfig) -> WorkerIdentity {
        let sandbox = &bulkhead.sandbox;
        match &sandbox.user {
            _ if sandbox.profile == Profile::None => WorkerIdentity::Own,
            Some(SandboxUser::Shared) => WorkerIdentity::Own,
            Some(SandboxUser::Named(name)) => self.named_identity(name),
            Some(SandboxUser::Auto) | None => self.automatic_identity(bulkhead),
        }
    }

    fn automatic_identity(&mut self, bulkhead: &BulkheadConfig) -> WorkerIdentity {
        let BulkheadConfig { name, sandbox, .. } = bulkhead;
        match &self.support.ids {
            IdSource::Host(_) if sandbox.write.is_empty() => WorkerIdentity::Each,
            IdSource::Host(ids) => match ids.permanent_id(&self.support.config, name, &sandbox.write) {
                Ok(id) => WorkerIdentity::One(Identity { uid: id, gid: id }),
                Err(error) => {
                    self.refused = Some(error.to_string());
                    WorkerIdentity::Own
                }
            },
            IdSource::Shared(why) => {
                // The layer counts as missing only if the configuration file sets `user` or `worker_uids`, or if the
                // profile is `strict`.
                let is_strict = sandbox.profile == Profile::Strict;
                if is_strict && self.support.has_worker_uids {
                    self.record_missing(Layer::Identity, why.clone());
                } else if is_strict || sandbox.user.is_some() || self.support.has_worker_uids {
                    self.missing.push(Layer::Identity);
                }
                WorkerIdentity::Own
            }
            IdSource::Refused(why) => {
                self.refused = Some(format!(
                    "the supervisor runs as root, but cannot start workers as another user: {why}; grant the \
                     missing ability, or write `user = \"root\"` in `sandbox` to start workers as root"
                ));
                WorkerIdentity::Own
            }
        }
    }

    fn named_identity(&mut self, name: &str) -> WorkerIdentity {
        let found = nix::unistd::User::from_name(name).ok().flatten();
        let Some(user) = found else {
            self.record_missing(Layer::Identity, format!("user {name} no longer exists"));
            return WorkerIdentity::Own;
        };
        let identity = Identity { uid: user.uid.as_raw(), gid: user.gid.as_raw() };
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if own == (identity.uid, identity.gid) {
            return WorkerIdentity::Own;
        }
        if self.require(Layer::Identity) { WorkerIdentity::One(identity) } else { WorkerIdentity::Own }
    }

    fn layers(&mut self, bulkhead: &BulkheadConfig, identity: WorkerIdentity) -> Layers {
        let sandbox = &bulkhead.sandbox;
        let profile = sandbox.profile;
        if profile == Profile::None {
            // Workers without a sandbox need a temporary folder only if `files` is configured.
            let has_files = bulkhead.files.is_some();
            let temporary = if has_files { TemporaryFiles::Folder } else { TemporaryFiles::None };
            return Layers { temporary, program_rules: has_files, ..Layers::default() };
        }
        let (network, _) = network_access(&sandbox.network);
        let namespaces = match profile {
            Profile::Strict => self.strict_namespaces(network),
            Profile::Default | Profile::None => self.default_namespaces(),
        };
        // A worker with a UID from `/etc/subuid` joins the user namespace that maps these UIDs, so it does not get a
        // separate user namespace.
        let subordinate_ids = identity != WorkerIdentity::Own && self.support.subordinate.is_some();
        let namespaces = Namespaces { user: namespaces.user && !subordinate_ids, ..namespaces };
        let no_new_privs = self.require(Layer::NoNewPrivs);
        if matches!(network, NetworkAccess::Connections { .. }) {
            self.require(Layer::LandlockTcp);
        }
        let seccomp = match (self.require(Layer::Seccomp), profile) {
            (false, _) => Seccomp::Off,
            (true, Profile::Strict) => Seccomp::AllowList,
            (true, _) => Seccomp::DenyList,
        };
        let temporary = match sandbox.tmp_bytes {
            0 => TemporaryFiles::None,
            bytes if namespaces.mount => TemporaryFiles::PrivateTmp(bytes),
            // With UIDs from `/etc/subuid`, the folder is in memory, because the supervisor's user could neither
            // inspect nor remove the workers' files on disk.
            bytes if subordinate_ids => TemporaryFiles::MountedTmpfs(bytes),
            _ => TemporaryFiles::Folder,
        };
        Layers {
            no_new_privs,
            no_capabilities: true,
            landlock: self.require(Layer::Landlock),
            seccomp,
            seccomp_names: self.support.has("seccomp notify"),
            namespaces,
            identity: None,
            subordinate_ids,
            network,
            temporary,
            program_rules: matches!(bulkhead.program, Program::Exec { .. }),
            cgroup: None,
        }
    }

    /// Checks that the programs of concurrent jobs in one worker can be isolated from each other. If not, returns the
    /// reason why a worker must run only one program at a time.
    fn program_scopes(&mut self, bulkhead: &BulkheadConfig) -> Option<String> {
        let is_confined = bulkhead.sandbox.profile != Profile::None;
        if !is_confined || !matches!(bulkhead.program, Program::Exec { .. }) {
            return None;
        }
        let why = self.support.why_missing(Layer::ProgramScopes)?;
        let is_allowed = self.allowed.contains(&Layer::ProgramScopes);
        if is_allowed || runs_several_at_once(bulkhead) {
            let advice = "concurrent programs in a worker would not be isolated from each other; to isolate them, \
                          set `max_in_flight = 1` and raise `processes`";
            self.record_missing(Layer::ProgramScopes, format!("{why}: {advice}"));
        }
        (!is_allowed).then_some(why)
    }

    /// Returns the configured cgroup limits, which do not depend on the profile.
    fn cgroup(&mut self, bulkhead: &BulkheadConfig) -> Option<CgroupLimits> {
        let limits = bulkhead.cgroup.as_ref()?;
        if !self.require(Layer::Cgroup) {
            return None;
        }
        // A cgroup is useful even if some controllers are missing, because it applies the remaining limits and can be
        // killed as a whole.
        let millicores = |cores: f64| (cores * 1000.0).round().max(1.0) as u64;
        Some(CgroupLimits {
            memory_bytes: self.limit_if_available("cgroup memory", limits.memory),
            pids: self
                .limit_if_available("cgroup pids", limits.pids)
                .or_else(|| self.default_processes(bulkhead)),
            cpu_millicores: self.limit_if_available("cgroup cpu", limits.cpu.map(millicores)),
        })
    }

    /// Returns the default process limit for a cgroup. Used if the `cgroup` table does not set `pids`.
    fn default_processes(&self, bulkhead: &BulkheadConfig) -> Option<u64> {
        let is_confined = bulkhead.sandbox.profile != Profile::None;
        let is_free = bulkhead.cgroup.as_ref().is_some_and(|limits| limits.pids.is_none());
        (is_confined && is_free && self.support.has("cgroup pids")).then_some(RLIMIT_NPROC)
    }

    /// Returns the cgroup limit if the controller is available. Otherwise records the controller as missing.
    fn limit_if_available(&mut self, controller: &str, limit: Option<u64>) -> Option<u64> {
        let limit = limit?;
        match self.support.why_not(controller) {
            None => Some(limit),
            Some(why) => {
                self.record_missing(Layer::Cgroup, why);
                None
            }
        }
    }

    fn strict_namespaces(&mut self, network: NetworkAccess) -> Namespaces {
        // A privileged supervisor can create the other namespaces without a user namespace. An unprivileged supervisor
        // cannot.
        let is_root = self.support.has("CAP_SYS_ADMIN");
        let user = if is_root {
            self.support.why_missing(Layer::UserNamespace).is_none()
        } else {
            self.require(Layer::UserNamespace)
        };
        Namespaces {
            user,
            pid: self.require(Layer::PidNamespace),
            mount: self.require(Layer::MountNamespace),
            network: network == NetworkAccess::None && self.require(Layer::NetworkNamespace),
            proc: false,
        }
    }

    /// Returns the namespaces of the `default` profile. These include a PID namespace, so that the kernel kills all of
    /// a worker's descendants even if the keeper is killed. If PID namespaces are not available, records the layer as
    /// missing; the keeper then kills the descendants.
    fn default_namespaces(&mut self) -> Namespaces {
        if self.support.has(keeper::TREE_END) {
            let user = !self.support.has("CAP_SYS_ADMIN");
            return Namespaces { user, pid: true, proc: true, ..Namespaces::default() };
        }
        self.missing.push(Layer::PidNamespace);
        Namespaces::default()
    }

    fn obstacle(&self, profile: Profile) -> Option<String> {
        let (first, why) = self.missing_required.first()?;
        let names: Vec<String> =
            self.missing_required.iter().map(|(layer, _)| format!("\"{}\"", layer.name())).collect();
        let names = names.join(", ");
        let without = match profile {
            Profile::None => "remove `cgroup`, or set a `profile` with `best_effort`".to_owned(),
            profile => {
                format!("set `best_effort = [{names}]`, or a `profile` other than \"{}\"", profile.name())
            }
        };
        Some(format!(
            "the sandbox layer {} is not available here: {why}; see the requirements in \
             `bulkhead-supervisor doctor`, or run without the layer: {without}",
            first.name(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_through_written_folder_are_not_fixed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["written", "written/inner", "other"] {
            std::fs::create_dir(path(name)).unwrap();
        }
        std::os::unix::fs::symlink(path("other"), path("written/link")).unwrap();
        std::os::unix::fs::symlink(path("written/link"), path("to-link")).unwrap();
        let names = ["written", "written/inner", "written/link", "to-link", "other", "written/../other"];
        let mut paths: Vec<String> = names.iter().map(|name| text(&path(name))).collect();
        retain_fixed(&mut paths, &[path("written")]);
        assert_eq!(paths, ["written", "other", "written/../other"].map(|name| text(&path(name))));
    }
}

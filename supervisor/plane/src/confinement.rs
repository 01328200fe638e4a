//! From the words of `sandbox` to what the keeper is ordered: settled once, before the first worker.
//!
//! A layer that this machine cannot give and that is not in `best_effort` stops the bulkhead's workers
//! from being started, with a sentence that says why. None is left out quietly.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::worker_ids::{self, Claim, Ids};
use bulkhead_config::defaults::RLIMIT_NPROC;
use bulkhead_config::{BulkheadConfig, Layer, Profile, Program, SandboxUser, StartMode, SupervisorConfig};
use bulkhead_keeper::{
    self as keeper, Ability, Cgroup, Confinement, Identity, Namespaces, Observed, Seccomp, SubordinateIds,
    Temporary, Terms,
};

/// What this machine can do, and what the supervisor keeps to itself.
pub struct SandboxSupport {
    abilities: BTreeMap<String, Ability>,
    withheld: Vec<String>,
    config: PathBuf,
    ids: IdSource,
    /// What these are part of, where this user gives no others.
    subordinate: Option<Arc<SubordinateIds>>,
    /// Whether the configuration says which ids these are to be.
    names_ids: bool,
}

/// Where the ids of workers come from.
enum IdSource {
    /// From a range of this host's.
    Host(Arc<Ids>),
    /// There are none, for this reason: workers have the supervisor's own user.
    Shared(String),
    /// There are none, and the supervisor's own user is root.
    Refused(String),
}

impl IdSource {
    fn of(found: Result<Ids, String>) -> Self {
        match found {
            Ok(ids) => Self::Host(Arc::new(ids)),
            Err(why) if rustix::process::geteuid().is_root() => Self::Refused(why),
            Err(why) => Self::Shared(why),
        }
    }
}

impl SandboxSupport {
    /// The same from what a keeper's guard has found: this process has threads, and forks nothing.
    pub fn found(config: &bulkhead_config::Config, found: keeper::Found) -> Self {
        Self::of(config, Claim::Lasting, found.abilities, move || found.ids)
    }

    /// Finds out what there is, also where no bulkhead is confined yet: to find out takes a fork, and later this
    /// process has threads. Beside a supervisor that may be running, `claim` is [`Claim::Trial`].
    pub fn find(config: &bulkhead_config::Config, claim: Claim) -> Self {
        Self::of(config, claim, keeper::probe(), || SubordinateIds::find().map(Arc::new))
    }

    fn of(
        config: &bulkhead_config::Config,
        claim: Claim,
        abilities: Vec<Ability>,
        subordinate: impl FnOnce() -> Result<Arc<SubordinateIds>, String>,
    ) -> Self {
        let abilities = abilities.into_iter().map(|ability| (ability.layer.clone(), ability)).collect();
        let withheld = secrets(&config.path, &config.supervisor);
        let ids = IdSource::Shared(String::new());
        let names_ids = config.supervisor.worker_uids.is_some();
        let config_path = config.path.clone();
        let mut support =
            Self { abilities, withheld, config: config_path, ids, subordinate: None, names_ids };
        let worker_uids = config.supervisor.worker_uids;
        support.ids = IdSource::of(match support.lack(Layer::Identity) {
            None => Ids::new(worker_uids, claim),
            Some(why) if rustix::process::geteuid().is_root() => Err(why),
            Some(_) => {
                let missing = |part: &str| support.misses(part);
                worker_ids::find_subordinate(missing, subordinate, worker_uids, claim).map(|(found, ids)| {
                    support.subordinate = Some(found);
                    ids
                })
            }
        });
        support
    }

    /// What the keeper needs to start workers with ids from `/etc/subuid`.
    pub fn subordinate(&self) -> Option<Arc<SubordinateIds>> {
        self.subordinate.clone()
    }

    /// The ids that workers take, where there are any.
    pub fn ids(&self) -> Option<Arc<Ids>> {
        match &self.ids {
            IdSource::Host(ids) => Some(ids.clone()),
            IdSource::Shared(_) | IdSource::Refused(_) => None,
        }
    }

    /// Why none of these layers' parts can be had, or that they all can.
    fn lack(&self, layer: Layer) -> Option<String> {
        parts(layer).iter().find_map(|part| self.misses(part))
    }

    /// Why this part cannot be had, or that it can.
    fn misses(&self, part: &str) -> Option<String> {
        match self.abilities.get(part) {
            Some(ability) if ability.is_available => None,
            Some(ability) => {
                let why = ability.why_not.as_deref().unwrap_or("it cannot be had");
                let what_to_do =
                    ability.what_to_do.as_ref().map(|what| format!(" ({what})")).unwrap_or_default();
                Some(format!("{part}: {why}{what_to_do}"))
            }
            None => Some(format!("{part}: nothing is known of it")),
        }
    }

    fn has(&self, part: &str) -> bool {
        self.abilities.get(part).is_some_and(|ability| ability.is_available)
    }
}

/// The lines of `bulkhead-supervisor doctor` that a layer stands on.
fn parts(layer: Layer) -> &'static [&'static str] {
    match layer {
        Layer::Landlock => &["landlock"],
        Layer::LandlockScopes => &["landlock scopes"],
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

/// What no worker is given, though it may lie in a folder that is.
fn secrets(config: &Path, supervisor: &SupervisorConfig) -> Vec<String> {
    let mut paths: Vec<&Path> = vec![config];
    // An embedded supervisor has no sockets.
    paths.extend([supervisor.socket.as_path(), &supervisor.admin].into_iter().filter(|path| path.has_root()));
    paths.extend(supervisor.crash_dir.as_deref());
    paths.extend(supervisor.http.as_ref().map(|http| http.token_file.as_path()));
    paths.into_iter().map(text).collect()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The user that a bulkhead's workers run as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerIdentity {
    /// The supervisor's own user.
    Own,
    /// One user for all.
    One(Identity),
    /// Each an id of its own.
    Each,
}

/// How the workers of one bulkhead are confined.
pub struct Sandbox {
    profile: Profile,
    terms: Terms,
    identity: WorkerIdentity,
    programs: Vec<String>,
    read: Vec<String>,
    write: Vec<String>,
    withheld: Vec<String>,
    allow: Vec<String>,
    deny: Vec<String>,
    /// Layers of the profile, and parts of them, that this machine does not have and need not.
    missing: Vec<&'static str>,
    /// What an operator should know of it.
    remarks: Vec<String>,
    /// What a worker with our SDK puts in force before its first job.
    seal: Option<Vec<u8>>,
    /// Why a worker runs no more than one program at once.
    one_at_once: Option<String>,
    /// How much its temporary folder or file system may hold.
    temporary_bytes: u64,
    /// Why no worker can be started.
    obstacle: Option<String>,
}

impl Sandbox {
    /// Settles what is ordered; `programs` are what a worker executes, or loads.
    pub fn settle(bulkhead: &BulkheadConfig, programs: Vec<PathBuf>, support: &SandboxSupport) -> Self {
        let sandbox = &bulkhead.sandbox;
        let texts = |paths: &[PathBuf]| paths.iter().map(|path| text(path)).collect();
        let mut settling = Settling {
            support,
            allowed: &sandbox.best_effort,
            missing: Vec::new(),
            lacking: Vec::new(),
            refused: None,
        };
        let identity = settling.identity(bulkhead);
        let one_at_once = settling.program_scopes(bulkhead);
        let terms = Terms { cgroup: settling.cgroup(bulkhead), ..settling.terms(bulkhead, identity) };
        settling.want_no_signals(&terms, identity);
        let is_forked = bulkhead.start.mode == StartMode::Fork;
        if is_forked {
            settling.want_forked_apart(sandbox.profile, &terms);
        }
        let obstacle = settling.refused.take().or_else(|| settling.obstacle(sandbox.profile));
        let mut missing: Vec<&'static str> = settling.missing.iter().map(|layer| layer.name()).collect();
        if terms.landlock {
            let absent = LANDLOCK_PARTS.iter().filter(|(part, _)| !support.has(part)).map(|(_, name)| *name);
            let unnamed: Vec<_> = absent.filter(|name| !missing.contains(name)).collect();
            missing.extend(unnamed);
        }
        let remarks = remarks(bulkhead, &missing, identity, support);
        if bulkhead.sandbox.profile != Profile::None && !counts_its_processes(identity, &terms) {
            missing.push(PROCESS_COUNT);
        }
        let is_sealed = terms.seccomp == Seccomp::Allow && !matches!(bulkhead.program, Program::Exec { .. });
        let allow = sandbox.allow.iter().map(String::as_str).collect::<Vec<_>>();
        let seal = keeper::Seal { is_strict: is_sealed, network: sandbox.network, allow: &allow, is_forked };
        let seal = (is_sealed || is_forked && terms.seccomp != Seccomp::Off).then(|| keeper::seal(&seal));
        Self {
            profile: sandbox.profile,
            terms,
            identity,
            programs: texts(&programs),
            read: sandbox
                .read
                .iter()
                .map(|path| text(path))
                .chain(named_files(bulkhead, &support.withheld))
                .chain(named_folders(&bulkhead.env))
                .collect(),
            write: texts(&sandbox.write),
            withheld: support.withheld.clone(),
            allow: sandbox.allow.clone(),
            deny: sandbox.deny.clone(),
            missing,
            remarks,
            seal,
            one_at_once,
            temporary_bytes: sandbox.tmp_bytes,
            obstacle,
        }
    }

    /// Why a worker may not run more than one job at once, if it may not.
    pub fn one_at_once(&self) -> Option<&str> {
        self.one_at_once.as_deref()
    }

    /// Why no worker can be started, for people.
    pub fn obstacle(&self) -> Option<&str> {
        self.obstacle.as_deref()
    }

    /// What an operator should know of it, each a sentence.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether the kernel counts the processes of each worker by themselves.
    pub fn counts_its_processes(&self) -> bool {
        self.profile != Profile::None && !self.missing.contains(&PROCESS_COUNT)
    }

    pub fn identity(&self) -> WorkerIdentity {
        self.identity
    }

    pub fn seal(&self) -> Option<&[u8]> {
        self.seal.as_deref()
    }

    /// How much the temporary folder may hold, if it is no file system of its own.
    pub fn temporary_bytes(&self) -> Option<u64> {
        let is_bounded = self.terms.temporary == Temporary::Folder && self.profile != Profile::None;
        is_bounded.then_some(self.temporary_bytes)
    }

    /// Whether system calls are filtered: then SIGSYS is the sandbox's.
    pub fn filters(&self) -> bool {
        self.terms.seccomp != Seccomp::Off
    }

    /// What one worker is ordered, with the id that it has if each has its own.
    pub fn order(&self, id: Option<u32>) -> Confinement<'_> {
        if self.profile == Profile::None {
            return Confinement { terms: self.terms, ..Confinement::default() };
        }
        let identity = match self.identity {
            WorkerIdentity::Own => None,
            WorkerIdentity::One(identity) => Some(identity),
            WorkerIdentity::Each => id.map(|id| Identity { uid: id, gid: id }),
        };
        Confinement {
            terms: Terms { identity, ..self.terms },
            programs: list(&self.programs),
            read: list(&self.read),
            write: list(&self.write),
            withheld: list(&self.withheld),
            allow: list(&self.allow),
            deny: list(&self.deny),
        }
    }

    /// What a snapshot says of a worker.
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

/// How it is called where nothing bounds the processes of one worker.
const PROCESS_COUNT: &str = "nproc";

/// Whether RLIMIT_NPROC, which counts per user, or a control group bounds one worker alone. In a user namespace
/// of its own a user is counted by itself, except for root, which that limit does not bind.
fn counts_its_processes(identity: WorkerIdentity, terms: &Terms) -> bool {
    let is_root = match identity {
        WorkerIdentity::Own => rustix::process::geteuid().is_root(),
        WorkerIdentity::One(identity) => identity.uid == 0,
        WorkerIdentity::Each => false,
    };
    let has_group = terms.cgroup.is_some_and(|cgroup| cgroup.pids.is_some());
    has_group || identity == WorkerIdentity::Each || terms.namespaces.user && !is_root
}

/// Parts of Landlock that came later than the rest, and what they are called where they are missing.
const LANDLOCK_PARTS: [(&str, &str); 2] =
    [("landlock scopes", "landlock_scopes"), ("landlock truncate", "landlock_truncate")];

/// What is as configured and may yet surprise.
fn remarks(
    bulkhead: &BulkheadConfig,
    missing: &[&str],
    identity: WorkerIdentity,
    support: &SandboxSupport,
) -> Vec<String> {
    let mut remarks = Vec::new();
    if bulkhead.sandbox.profile == Profile::None {
        return remarks;
    }
    if !missing.is_empty() {
        remarks.push(format!("its sandbox is without {}", missing.join(", ")));
    }
    if identity == WorkerIdentity::Own && rustix::process::geteuid().is_root() {
        remarks.push(
            "its workers are root, without capabilities, and can change what root owns where the sandbox lets \
             them: without `user` in `sandbox` they have ids of their own"
                .to_owned(),
        );
    }
    // Rules can only add: what the configuration gives is given with all that is in it.
    let given = || bulkhead.sandbox.read.iter().chain(&bulkhead.sandbox.write);
    let is_open = |secret: &&String| given().any(|path| Path::new(secret).starts_with(path));
    if let Some(secret) = support.withheld.iter().find(is_open) {
        remarks.push(format!("its `read` and `write` reach the supervisor's own files: {secret}"));
    }
    remarks
}

/// Files that the command line names: an operator who writes `["python3", "main.py"]` means it to be read. Folders are
/// not among them: they may be anything; nor are the supervisor's own files.
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

/// Variables of the environment that say where programs find programs and libraries.
const SEARCH_PATHS: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "NODE_PATH"];

/// Folders that the configured environment has programs search.
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

/// Whether a worker of the bulkhead, or of one of its tenants, runs several jobs at once.
fn runs_several_at_once(bulkhead: &BulkheadConfig) -> bool {
    let of_tenants = bulkhead.tenant.values().filter_map(|tenant| tenant.max_in_flight);
    let of_tenants = of_tenants.filter(|_| bulkhead.isolation().is_some());
    of_tenants.chain([bulkhead.max_in_flight]).any(|most| most > 1)
}

/// One bulkhead's layers, while it is found out which there are.
struct Settling<'g> {
    support: &'g SandboxSupport,
    allowed: &'g [Layer],
    missing: Vec<Layer>,
    /// Layers that there must be, and are not.
    lacking: Vec<(Layer, String)>,
    /// Why there is no user that the workers may run as.
    refused: Option<String>,
}

impl Settling<'_> {
    /// Whether a layer that the profile has can be had.
    fn want(&mut self, layer: Layer) -> bool {
        match self.support.lack(layer) {
            None => true,
            Some(why) => {
                self.lack(layer, why);
                false
            }
        }
    }

    fn lack(&mut self, layer: Layer, why: String) {
        let is_told = self.missing.contains(&layer) || self.lacking.iter().any(|(told, _)| *told == layer);
        if is_told {
            return;
        }
        if self.allowed.contains(&layer) {
            self.missing.push(layer);
        } else {
            self.lacking.push((layer, why));
        }
    }

    /// "No signals to other processes" is promised, not a layer: rules that scope keep it, an id of each worker's
    /// own, or process numbers of its own. Where the rules may be missing as a whole, so may this.
    fn want_no_signals(&mut self, terms: &Terms, identity: WorkerIdentity) {
        if terms.landlock && identity != WorkerIdentity::Each && !terms.namespaces.pid {
            self.want(Layer::LandlockScopes);
        }
    }

    /// Forked workers share a user and process numbers. What keeps them from each other, and from forking as their
    /// template does, there must be, whatever else may be missing; and the first process of a namespace to end what
    /// they leave behind.
    fn want_forked_apart(&mut self, profile: Profile, terms: &Terms) {
        if profile == Profile::None || self.refused.is_some() {
            return;
        }
        let rows = [
            (terms.no_new_privs, Layer::NoNewPrivs),
            (terms.seccomp != Seccomp::Off, Layer::Seccomp),
            (terms.landlock, Layer::Landlock),
            (self.support.has("landlock scopes"), Layer::LandlockScopes),
            (terms.namespaces.pid, Layer::PidNamespace),
        ];
        let absent = rows.iter().find(|(is_there, _)| !is_there).map(|(_, layer)| *layer);
        let why = match absent {
            Some(layer) => {
                let why = self.support.lack(layer).or_else(|| self.support.misses(keeper::TREE_END));
                Some(format!("{} ({})", layer.name(), why.unwrap_or_default()))
            }
            None => self.support.misses(keeper::FORKED),
        };
        self.refused = why.map(|why| {
            format!(
                "`start.mode = \"fork\"` takes what cannot be had here under `profile = \"{}\"`, also with \
                 `best_effort`, since workers of one template share a user: {why}; what it takes is in \
                 `bulkhead-supervisor doctor`; to run without: no `start.mode`",
                profile.name(),
            )
        });
    }

    fn identity(&mut self, bulkhead: &BulkheadConfig) -> WorkerIdentity {
        let sandbox = &bulkhead.sandbox;
        match &sandbox.user {
            _ if sandbox.profile == Profile::None => WorkerIdentity::Own,
            Some(SandboxUser::Shared) => WorkerIdentity::Own,
            Some(SandboxUser::Named(name)) => self.named(name),
            Some(SandboxUser::Auto) | None => self.auto(bulkhead),
        }
    }

    fn auto(&mut self, bulkhead: &BulkheadConfig) -> WorkerIdentity {
        let BulkheadConfig { name, sandbox, .. } = bulkhead;
        match &self.support.ids {
            IdSource::Host(_) if sandbox.write.is_empty() => WorkerIdentity::Each,
            IdSource::Host(ids) => match ids.keep(&self.support.config, name, &sandbox.write) {
                Ok(id) => WorkerIdentity::One(Identity { uid: id, gid: id }),
                Err(error) => {
                    self.refused = Some(error.to_string());
                    WorkerIdentity::Own
                }
            },
            IdSource::Shared(why) => {
                // Said where it is asked for, and where the profile promises everything.
                let is_strict = sandbox.profile == Profile::Strict;
                if is_strict && self.support.names_ids {
                    self.lack(Layer::Identity, why.clone());
                } else if is_strict || sandbox.user.is_some() {
                    self.missing.push(Layer::Identity);
                }
                WorkerIdentity::Own
            }
            IdSource::Refused(why) => {
                self.refused = Some(format!(
                    "root starts no worker as root unless it is told to, and it cannot start one as another user: \
                     {why}; give it what is missing, or write `user = \"root\"` in `sandbox`"
                ));
                WorkerIdentity::Own
            }
        }
    }

    fn named(&mut self, name: &str) -> WorkerIdentity {
        let found = nix::unistd::User::from_name(name).ok().flatten();
        let Some(user) = found else {
            self.lack(Layer::Identity, format!("there is no user {name} any more"));
            return WorkerIdentity::Own;
        };
        let identity = Identity { uid: user.uid.as_raw(), gid: user.gid.as_raw() };
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if own == (identity.uid, identity.gid) {
            return WorkerIdentity::Own;
        }
        if self.want(Layer::Identity) { WorkerIdentity::One(identity) } else { WorkerIdentity::Own }
    }

    fn terms(&mut self, bulkhead: &BulkheadConfig, identity: WorkerIdentity) -> Terms {
        let sandbox = &bulkhead.sandbox;
        let profile = sandbox.profile;
        if profile == Profile::None {
            // `files` needs a private temporary folder.
            let has_files = bulkhead.files.is_some();
            let temporary = if has_files { Temporary::Folder } else { Temporary::None };
            return Terms { temporary, programs_apart: has_files, ..Terms::default() };
        }
        let namespaces = match profile {
            Profile::Strict => self.namespaces(sandbox.network),
            Profile::Default | Profile::None => self.processes(),
        };
        // A worker of another user without our privileges is one in the namespace that has these ids.
        let subordinate = identity != WorkerIdentity::Own && self.support.subordinate.is_some();
        let namespaces = Namespaces { user: namespaces.user && !subordinate, ..namespaces };
        let no_new_privs = self.want(Layer::NoNewPrivs);
        let seccomp = match (self.want(Layer::Seccomp), profile) {
            (false, _) => Seccomp::Off,
            (true, Profile::Strict) => Seccomp::Allow,
            (true, _) => Seccomp::Deny,
        };
        let temporary = match sandbox.tmp_bytes {
            0 => Temporary::None,
            bytes if namespaces.mount => Temporary::FileSystem(bytes),
            // On disk it could neither be looked at nor removed by our user.
            bytes if subordinate => Temporary::Mounted(bytes),
            _ => Temporary::Folder,
        };
        Terms {
            no_new_privs,
            no_capabilities: true,
            landlock: self.want(Layer::Landlock),
            seccomp,
            seccomp_names: self.support.has("seccomp notify"),
            namespaces,
            identity: None,
            subordinate,
            network: sandbox.network,
            temporary,
            programs_apart: matches!(bulkhead.program, Program::Exec { .. }),
            cgroup: None,
        }
    }

    /// Whether the programs that run at once in one worker are kept from each other. Returns why no worker may
    /// ever run more than one.
    fn program_scopes(&mut self, bulkhead: &BulkheadConfig) -> Option<String> {
        let is_confined = bulkhead.sandbox.profile != Profile::None;
        if !is_confined || !matches!(bulkhead.program, Program::Exec { .. }) {
            return None;
        }
        let why = self.support.lack(Layer::ProgramScopes)?;
        let is_allowed = self.allowed.contains(&Layer::ProgramScopes);
        if is_allowed || runs_several_at_once(bulkhead) {
            let advice = "programs that run at once in one worker would reach each other; `max_in_flight = 1` with \
                          more `processes` keeps them apart";
            self.lack(Layer::ProgramScopes, format!("{why}: {advice}"));
        }
        (!is_allowed).then_some(why)
    }

    /// Its control group, whatever its profile.
    fn cgroup(&mut self, bulkhead: &BulkheadConfig) -> Option<Cgroup> {
        let limits = bulkhead.cgroup.as_ref()?;
        if !self.want(Layer::Cgroup) {
            return None;
        }
        // Where a limit may be missing, the group still ends whole trees, and has the other limits.
        let thousandths = |cores: f64| (cores * 1000.0).round().max(1.0) as u64;
        Some(Cgroup {
            memory_bytes: self.controlled("cgroup memory", limits.memory),
            pids: self.controlled("cgroup pids", limits.pids).or_else(|| self.default_processes(bulkhead)),
            cpu_thousandths: self.controlled("cgroup cpu", limits.cpu.map(thousandths)),
        })
    }

    /// How many processes a control group may have whose limit for them is not given.
    fn default_processes(&self, bulkhead: &BulkheadConfig) -> Option<u64> {
        let is_confined = bulkhead.sandbox.profile != Profile::None;
        let is_free = bulkhead.cgroup.as_ref().is_some_and(|limits| limits.pids.is_none());
        (is_confined && is_free && self.support.has("cgroup pids")).then_some(RLIMIT_NPROC)
    }

    /// A limit of a control group, if its controller can be had.
    fn controlled(&mut self, controller: &str, limit: Option<u64>) -> Option<u64> {
        let limit = limit?;
        match self.support.misses(controller) {
            None => Some(limit),
            Some(why) => {
                self.lack(Layer::Cgroup, why);
                None
            }
        }
    }

    fn namespaces(&mut self, network: bool) -> Namespaces {
        // Root makes the others without.
        let is_root = self.support.has("CAP_SYS_ADMIN");
        let user = if is_root {
            self.support.lack(Layer::UserNamespace).is_none()
        } else {
            self.want(Layer::UserNamespace)
        };
        Namespaces {
            user,
            pid: self.want(Layer::PidNamespace),
            mount: self.want(Layer::MountNamespace),
            network: !network && self.want(Layer::NetworkNamespace),
            proc: false,
        }
    }

    /// Process numbers of their own, under `default`: then the kernel ends all that a worker has started, whatever
    /// else has been killed. Where they cannot be had, that is told, and the keeper ends it.
    fn processes(&mut self) -> Namespaces {
        if self.support.has(keeper::TREE_END) {
            let user = !self.support.has("CAP_SYS_ADMIN");
            return Namespaces { user, pid: true, proc: true, ..Namespaces::default() };
        }
        self.missing.push(Layer::PidNamespace);
        Namespaces::default()
    }

    fn obstacle(&self, profile: Profile) -> Option<String> {
        let (first, why) = self.lacking.first()?;
        let names: Vec<String> =
            self.lacking.iter().map(|(layer, _)| format!("\"{}\"", layer.name())).collect();
        let names = names.join(", ");
        let without = match profile {
            Profile::None => "no `cgroup`, or a `profile` with `best_effort`".to_owned(),
            profile => format!("`best_effort = [{names}]`, or another `profile` than \"{}\"", profile.name()),
        };
        Some(format!(
            "the layer {} of the sandbox cannot be had here: {why}; what it takes is in `bulkhead-supervisor \
             doctor`; to run without: {without}",
            first.name(),
        ))
    }
}

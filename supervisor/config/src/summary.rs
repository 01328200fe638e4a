//! Formats the effective configuration, including defaults, as TOML for `--check`. Parsing the result in the same
//! folder produces the same configuration.

use indexmap::IndexMap;
use std::fmt::{Display, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use bulkhead_shared::text::is_unprintable;

use super::key::Kind;
use super::keys::admission::PressureKeys;
use super::reader::Field;
use super::table::{KeyValue, Section as _, Table as _, Write, Written, in_braces, inline_table};
use super::{
    AccessConfig, BulkheadConfig, Config, IsolationConfig, Network, PressureConfig, Profile, Program,
    Resource, Rlimit, SandboxConfig, SupervisorConfig, TenantConfig, TenantsConfig, UidRange, Who,
};
use super::{defaults, units};

impl Config {
    /// Returns the effective configuration as TOML, including defaults.
    ///
    /// Paths are resolved, except for `argv[0]`, which is passed to the program as written. A comment shows the
    /// resolved path of the program. Paths that are not UTF-8 are shown inexactly.
    ///
    /// ```no_run
    /// let config = bulkhead_config::load("workers.toml".as_ref())?;
    /// println!("{}", config.summary());
    /// # Ok::<(), bulkhead_config::ConfigErrors>(())
    /// ```
    pub fn summary(&self) -> String {
        let is_root = rustix::process::geteuid().is_root();
        self.summary_where(if is_root { WorkerIds::Host } else { WorkerIds::None })
    }

    /// Returns the effective configuration as TOML. `ids` is the source of user IDs for workers with `user = "auto"`.
    pub fn summary_where(&self, ids: WorkerIds) -> String {
        let mut out = Lines { ids, ..Lines::default() };
        out.comment(format!("{}: {}", self.path.display(), self.counted()));
        for fragment in &self.fragments {
            out.comment(fragment.display());
        }
        out.supervisor(&self.supervisor);
        for entry in &self.access {
            out.access(entry);
        }
        out.defaults(&self.bulkheads);
        for bulkhead in &self.bulkheads {
            out.bulkhead(bulkhead);
        }
        out.text
    }

    fn counted(&self) -> String {
        let in_all = |bulkhead: &BulkheadConfig| bulkhead.workers_max() + bulkhead.spares_max();
        let workers: u64 = self.bulkheads.iter().map(in_all).sum();
        let bulkheads = self.bulkheads.len() as u64;
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        // The number of workers is an upper bound, because the workers of isolated tenants are started on demand.
        let isolated = self.bulkheads.iter().any(|bulkhead| bulkhead.isolation().is_some());
        let up_to = if isolated { "up to " } else { "" };
        format!("{bulkheads} bulkhead{}, {up_to}{workers} worker{}", plural(bulkheads), plural(workers))
    }
}

/// Source of the separate user IDs under which workers can run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerIds {
    /// There are no separate IDs. Workers run as the supervisor's user.
    #[default]
    None,
    /// The supervisor can start workers with any user ID.
    Host,
    /// The supervisor can use the IDs that `/etc/subuid` assigns to its user.
    Subordinate,
}

/// Builder for the lines of the configuration summary.
#[derive(Default)]
struct Lines {
    text: String,
    ids: WorkerIds,
}

impl Lines {
    fn line(&mut self, line: impl Display) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.text, "{line}");
    }

    fn comment(&mut self, comment: impl Display) {
        self.line(format_args!("# {}", printable(&comment.to_string())));
    }

    /// Writes a key and its value. If the key is not set, writes a comment that describes the resulting behaviour.
    fn entry(&mut self, KeyValue { key, value, without }: KeyValue) {
        match value.and_then(Written::toml) {
            Some(value) => self.set(key, value),
            None => self.comment(format_args!("{key}: {}", without.replace('`', ""))),
        }
    }

    fn set(&mut self, key: &str, value: impl Display) {
        self.line(format_args!("{key} = {value}"));
    }

    fn supervisor(&mut self, supervisor: &SupervisorConfig) {
        self.line("\n[supervisor]");
        for entry in supervisor.key_values() {
            let key = entry.key;
            if key == "worker_uids" && supervisor.worker_uids.is_none() {
                self.comment(format_args!(
                    "worker_uids: {} if the supervisor can start workers as other users",
                    defaults::WORKER_UIDS
                ));
                continue;
            }
            self.entry(entry);
            if key == "socket_mode" {
                self.comment(format_args!(
                    "if the socket's directory does not exist, it is created with mode {:04o}",
                    supervisor.folder_mode
                ));
            }
        }
        match &supervisor.http {
            Some(http) => {
                self.set("http", string(&http.address.to_string()));
                self.set("http_token_file", path(&http.token_file));
            }
            None => self.comment("http: off"),
        }
    }

    fn access(&mut self, entry: &AccessConfig) {
        self.line("\n[[access]]");
        match &entry.who {
            Who::Uid(uid) => self.set("uid", uid),
            Who::Gid(gid) => self.set("gid", gid),
            Who::TokenFile(file) => {
                self.set("token_file", path(&file.path));
                self.set("role", string(entry.role.name()));
            }
        }
        match &entry.bulkheads {
            Some(names) => self.set("bulkheads", strings(names)),
            None => self.comment("bulkheads: all"),
        }
        match &entry.tenants {
            Some(names) => self.set("tenants", strings(names)),
            None => self.comment("tenants: any, or none"),
        }
    }

    /// Writes a `[defaults]` table with `pressure` if a bulkhead without a queue inherits this setting. The setting
    /// cannot be written in the bulkhead's own table, where `pressure` needs a queue.
    fn defaults(&mut self, bulkheads: &[BulkheadConfig]) {
        let unsaid =
            |bulkhead: &&BulkheadConfig| bulkhead.max_queue == 0 && bulkhead.pressure != no_pressure();
        if let Some(bulkhead) = bulkheads.iter().find(unsaid) {
            self.line("\n[defaults]");
            self.set("pressure", inline_table(bulkhead.pressure.key_values()));
        }
    }

    fn bulkhead(&mut self, bulkhead: &BulkheadConfig) {
        self.line(format_args!("\n[bulkhead.{}]", key(&bulkhead.name)));
        self.program(&bulkhead.program);
        for entry in bulkhead.key_values() {
            match (entry.key, &bulkhead.breaker) {
                ("pressure", _) if bulkhead.max_queue == 0 => self.comment("pressure: there is no queue"),
                // Omits `slow_rate`, which would be rejected without `slow_call`.
                ("breaker", Some(breaker)) if breaker.slow_call.is_none() => {
                    let said = breaker.key_values().into_iter().filter(|entry| entry.key != "slow_rate");
                    self.set("breaker", inline_table(said.collect()));
                }
                ("sandbox", _) => {
                    self.entry(entry);
                    self.sandbox_remarks(&bulkhead.sandbox);
                }
                ("rlimits", _) => {
                    self.entry(entry);
                    self.sandbox_rlimits(bulkhead);
                }
                ("fallback", _) if bulkhead.fallback.is_empty() => self.comment("fallback: none"),
                ("tenant", _) => {}
                ("output_grace" | "exit_status" | "files", _) if bulkhead.output_grace.is_none() => {}
                // Writes a comment instead of the key, because a file with both `cwd` and `files` would be rejected.
                ("cwd", _) if bulkhead.files.is_some() => self.comment("cwd: each job's directory"),
                _ => self.entry(entry),
            }
        }
        for (name, tenant) in &bulkhead.tenant {
            self.line(format_args!("\n[bulkhead.{}.tenant.{}]", key(&bulkhead.name), key(name)));
            self.tenant(tenant);
        }
    }

    /// Adds comments about the user IDs of the workers, the location of `/tmp`, and the interval at which the size of
    /// `/tmp` is checked.
    fn sandbox_remarks(&mut self, sandbox: &SandboxConfig) {
        if sandbox.wants_own_ids() {
            self.comment(worker_user(sandbox, self.ids));
        }
        if sandbox.profile == Profile::Default && sandbox.tmp_bytes > 0 {
            self.comment(match self.ids {
                WorkerIds::Subordinate if sandbox.wants_own_ids() => {
                    "sandbox.tmp: in memory, for user IDs from /etc/subuid"
                }
                _ => "sandbox.tmp: a directory on disk, whose size is checked every second",
            });
        }
    }

    /// Adds comments that show the resource limits set by the sandbox. These limits are not written as `rlimits`,
    /// because they depend on the profile.
    fn sandbox_rlimits(&mut self, bulkhead: &BulkheadConfig) {
        for Rlimit { resource, limit } in bulkhead.sandbox_rlimits() {
            let limit = limit.unwrap_or(u64::MAX);
            let told = match resource {
                Resource::Fsize => units::format_size(limit),
                _ => limit.to_string(),
            };
            let condition = if resource == Resource::Nproc { " if the limit applies per worker" } else { "" };
            self.comment(format_args!("rlimits.{}: {told}, set by the sandbox{condition}", resource.name()));
        }
    }

    fn program(&mut self, program: &Program) {
        match program {
            Program::Command { argv, path } => self.arguments("command", argv, path),
            Program::Exec { argv, path } => self.arguments("exec", argv, path),
            Program::Library { path: library, entry } => {
                self.set("library", path(library));
                self.set("entry", string(entry));
            }
        }
    }

    fn arguments(&mut self, name: &str, argv: &[String], found: &Path) {
        self.set(name, strings(argv));
        self.comment(format_args!("runs {}", found.display()));
    }

    /// Writes a tenant's settings. Omits `per`, because a tenant's rate limit applies only to that tenant.
    fn tenant(&mut self, tenant: &TenantConfig) {
        for entry in tenant.key_values() {
            match (&tenant.rate_limit, entry.key, &entry.value) {
                (Some(limit), "rate_limit", _) => {
                    let said = limit.key_values().into_iter().filter(|entry| entry.key != "per");
                    self.set("rate_limit", inline_table(said.collect()));
                }
                (_, _, Some(_)) => self.entry(entry),
                (_, _, None) => {}
            }
        }
    }
}

/// Returns the default value of `pressure`.
fn no_pressure() -> PressureConfig {
    let PressureKeys { warn, reject, .. } = PressureKeys::read(Field::Absent, None);
    PressureConfig { warn: warn.default, reject: reject.default }
}

impl Write for PathBuf {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(path(self)))
    }
}

impl Write for SocketAddr {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(string(&self.to_string())))
    }
}

impl Write for UidRange {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(string(&self.to_string())))
    }
}

impl Write for String {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(string(self)))
    }
}

impl Write for Vec<u8> {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(format!("{self:?}")))
    }
}

impl Write for Vec<String> {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(strings(self)))
    }
}

impl Write for Vec<PathBuf> {
    fn written(&self, _: Kind) -> Option<Written> {
        Some(Written::Toml(paths(self)))
    }
}

impl Write for Vec<(String, String)> {
    fn written(&self, _: Kind) -> Option<Written> {
        let variables: Vec<_> =
            self.iter().map(|(name, value)| format!("{} = {}", key(name), string(value))).collect();
        Some(Written::Toml(in_braces(&variables)))
    }
}

impl Write for Vec<(String, PathBuf)> {
    fn written(&self, _: Kind) -> Option<Written> {
        let files: Vec<_> =
            self.iter().map(|(name, file)| format!("{} = {}", key(name), path(file))).collect();
        Some(Written::Toml(in_braces(&files)))
    }
}

/// Omits tenant tables, because `Lines::tenant` writes each tenant as a separate table.
impl Write for IndexMap<String, TenantConfig> {
    fn written(&self, _: Kind) -> Option<Written> {
        None
    }
}

impl Write for TenantsConfig {
    fn written(&self, _: Kind) -> Option<Written> {
        let entries = match &self.isolation {
            Some(IsolationConfig { max_active, idle }) => vec![
                "isolate = true".to_owned(),
                format!("max_active = {max_active}"),
                format!("idle = {}", units::duration_literal(idle)),
            ],
            None => [("max_in_flight", self.max_in_flight), ("max_queue", self.max_queue)]
                .into_iter()
                .filter_map(|(key, jobs)| Some(format!("{key} = {}", jobs?)))
                .collect(),
        };
        Some(Written::Toml(in_braces(&entries)))
    }
}

/// Writes the sandbox settings as an inline table. With the `none` profile, writes only the profile, because all
/// other keys would have no effect.
impl Write for SandboxConfig {
    fn written(&self, _: Kind) -> Option<Written> {
        let Self { profile, network, read, write, tmp_bytes, user, allow, deny, best_effort } = self;
        let mut entries = vec![format!("profile = \"{}\"", profile.name())];
        if *profile != Profile::None {
            entries.push(format!("network = {}", network_access(network)));
            entries.push(format!("read = {}", paths(read)));
            entries.push(format!("write = {}", paths(write)));
            entries.push(format!("tmp = \"{}\"", units::format_size(*tmp_bytes)));
            entries.extend(user.as_ref().map(|user| format!("user = {}", string(user.name()))));
            entries.push(format!("syscalls = {{ allow = {}, deny = {} }}", strings(allow), strings(deny)));
            let layers: Vec<_> = best_effort.iter().map(|layer| layer.name().to_owned()).collect();
            entries.push(format!("best_effort = {}", strings(&layers)));
        }
        Some(Written::Toml(in_braces(&entries)))
    }
}

fn network_access(network: &Network) -> String {
    match network {
        Network::None => "false".to_owned(),
        Network::All => "true".to_owned(),
        Network::Connections { tcp_ports, udp } => format!("{{ tcp_ports = {tcp_ports:?}, udp = {udp} }}"),
    }
}

/// Describes the user IDs under which workers run if `user = "auto"`.
fn worker_user(sandbox: &SandboxConfig, ids: WorkerIds) -> &'static str {
    match (ids != WorkerIds::None, sandbox.write.is_empty()) {
        (true, true) => "sandbox.user: auto; each worker has a separate user ID",
        (true, false) => {
            "sandbox.user: auto; the bulkhead has a fixed user ID, because files written under `write` persist"
        }
        (false, _) => {
            "sandbox.user: shared; workers run as the supervisor's user because workers cannot be started as other users"
        }
    }
}

fn path(path: &Path) -> String {
    string(&path.to_string_lossy())
}

fn paths(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|each| path(each)).collect();
    format!("[{}]", paths.join(", "))
}

/// Returns `name` as a bare TOML key if possible, otherwise as a quoted key.
fn key(name: &str) -> String {
    let bare =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if bare { name.to_owned() } else { string(name) }
}

fn strings(texts: &[String]) -> String {
    let texts: Vec<_> = texts.iter().map(|text| string(text)).collect();
    format!("[{}]", texts.join(", "))
}

/// Returns `text` as a basic TOML string, including quotes.
fn string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            c if is_unprintable(c) && u32::from(c) > 0xFFFF => {
                quoted.push_str(&format!("\\U{:08X}", u32::from(c)))
            }
            c if is_unprintable(c) => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// Replaces characters that would end a TOML comment or make the comment unreadable.
fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unprintable(c) { '\u{fffd}' } else { c }).collect()
}

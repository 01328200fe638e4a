//! Compares two validated versions of the configuration and prepares a reload. The control plane calls this and sends
//! the reload to the data plane, which applies it. The prepared reload contains everything that the data plane needs,
//! so that the data plane does not read any files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use bulkhead_api::{BulkheadChange, ChangeKind, Changes};
use bulkhead_linux::rlimits::Resource;
use bulkhead_policy::Limits;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::access::Access;
use crate::confinement::SandboxSupport;
use crate::limits::DataPlaneLimits;
use crate::program::{self, Program};
use bulkhead_config::{self as config, BulkheadConfig, Config, SupervisorConfig, TenantConfig};

/// Ratio of a worker's memory limit to the maximum total size of the memory files lent to the worker.
const LENT_DIVISOR: u64 = 4;

/// A bulkhead's settings, converted to the form that the data plane uses.
pub struct BulkheadSpec {
    pub name: Arc<str>,
    pub program: Arc<Program>,
    pub limits: Limits,
    /// Per-tenant settings, by tenant name.
    pub tenants: BTreeMap<String, TenantConfig>,
    pub max_payload: u64,
    pub max_result: u64,
    pub fallback: Arc<[Arc<str>]>,
    /// Maximum number of isolated tenants that can have workers at the same time, or `None` if tenants are not
    /// isolated.
    pub max_active: Option<usize>,
    /// True if `pressure` is set in the bulkhead's own table. The bulkhead must then have a queue.
    pub has_own_pressure: bool,
    /// Memory usage in bytes at which a worker is replaced or killed, or `None` if there is no limit.
    pub memory_limit: Option<u64>,
    /// Maximum total size of the memory files lent to one worker, in bytes, or `None` if there is no limit.
    pub lent_max: Option<u64>,
}

/// A bulkhead's limits in the previous version of the configuration file. Current limits that differ from these were
/// changed live by an operator.
pub struct LimitsBefore {
    pub limits: Limits,
    /// Per-tenant settings, by tenant name.
    pub tenants: BTreeMap<String, TenantConfig>,
}

/// New settings for an existing bulkhead.
pub struct ChangedBulkhead {
    pub spec: BulkheadSpec,
    pub before: LimitsBefore,
    pub replaces_workers: bool,
}

/// Keys that an operator has changed live and that a reload resets, grouped by bulkhead.
pub type LiveDropped = BTreeMap<Arc<str>, Vec<String>>;

/// A prepared reload, to be applied by the data plane.
pub struct Reload {
    pub removed: Vec<String>,
    pub changed: Vec<ChangedBulkhead>,
    pub added: Vec<BulkheadSpec>,
    /// Bulkheads that are in both `removed` and `added`, because the reload replaces them.
    pub rebuilt: Vec<(Arc<str>, LimitsBefore)>,
    /// New permissions of clients, or `None` if the reload does not change permissions.
    pub access: Option<Access>,
    pub limits: DataPlaneLimits,
}

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reload").field("removed", &self.removed).finish_non_exhaustive()
    }
}

/// Inputs needed to resolve the configuration of any bulkhead. The inputs do not change while the supervisor is
/// running.
#[derive(Clone, Copy)]
pub struct SpecInputs<'s> {
    /// Path of the host program for `exec` and `library` programs.
    pub host: Option<&'s Path>,
    pub support: &'s SandboxSupport,
    /// Names of the tenants that have a separate label in the metrics.
    pub labels: &'s Arc<[String]>,
}

impl BulkheadSpec {
    /// Converts a bulkhead's configuration to the form used by the data plane.
    pub fn new(bulkhead: &BulkheadConfig, inputs: SpecInputs<'_>) -> Self {
        Self {
            name: bulkhead.name.as_str().into(),
            program: Arc::new(Program::new(bulkhead, inputs.host, inputs.support)),
            limits: program::limits(bulkhead, inputs.labels),
            tenants: bulkhead.tenant.clone().into_iter().collect(),
            max_payload: bulkhead.max_payload,
            max_result: bulkhead.max_result,
            fallback: bulkhead.fallback.iter().map(|name| name.as_str().into()).collect(),
            max_active: bulkhead.isolation().map(|isolation| isolation.max_active as usize),
            has_own_pressure: bulkhead.has_own_pressure,
            memory_limit: memory_limit(bulkhead),
            lent_max: lent_max(bulkhead),
        }
    }
}

/// Returns the memory usage in bytes at which a worker is replaced or killed.
fn memory_limit(bulkhead: &BulkheadConfig) -> Option<u64> {
    let cgroup = bulkhead.cgroup.as_ref().and_then(|cgroup| cgroup.memory);
    cgroup.into_iter().chain(bulkhead.recycle.rss).min()
}

/// Returns the maximum total size of the memory files lent to one worker. It is a fixed fraction of the worker's memory
/// limit, because lent files count towards the worker's memory or occupy its address space.
fn lent_max(bulkhead: &BulkheadConfig) -> Option<u64> {
    let addresses = bulkhead.rlimits.iter().filter(|rlimit| rlimit.resource == Resource::As);
    let smallest = addresses.filter_map(|rlimit| rlimit.limit).chain(memory_limit(bulkhead)).min();
    smallest.map(|smallest| smallest / LENT_DIVISOR)
}

impl Reload {
    /// Logs warnings about weaknesses in the confinement of workers that the reload starts.
    pub fn log_warnings(&self) {
        let replaced = self.changed.iter().filter(|changed| changed.replaces_workers);
        for spec in replaced.map(|changed| &changed.spec).chain(&self.added) {
            spec.program.log_warnings(&spec.name);
        }
    }
}

/// Returns the differences between two configurations.
pub fn changes(before: &Config, after: &Config) -> Changes {
    let find = |config: &Config, name: &str| config.bulkheads.iter().any(|b| b.name == name);
    let removed_bulkheads = before.bulkheads.iter().filter(|b| !find(after, &b.name));
    let removed_bulkheads =
        removed_bulkheads.map(|bulkhead| whole_change(&bulkhead.name, ChangeKind::Removed));
    let others = after.bulkheads.iter().filter_map(|bulkhead| {
        match before.bulkheads.iter().find(|b| b.name == bulkhead.name) {
            Some(old) => bulkhead_change(old, bulkhead),
            None => Some(whole_change(&bulkhead.name, ChangeKind::Added)),
        }
    });
    let (old, new) = (fields(&before.supervisor), fields(&after.supervisor));
    // `folder_mode` is derived from other keys and does not appear in the file.
    let is_changed = |key: &&String| *key != "folder_mode" && old.get(*key) != new.get(*key);
    let keys = old.keys().filter(is_changed).cloned();
    let (supervisor, mut ignored): (Vec<_>, Vec<_>) = keys.partition(|key| !config::needs_restart(key));
    // The key contains only a path. A change in the contents of this file counts as a change of the key.
    if let (Some(old), Some(new)) = (&before.supervisor.http, &after.supervisor.http)
        && old.token != new.token
    {
        ignored.push("http_token_file".to_owned());
    }
    Changes {
        bulkheads: removed_bulkheads.chain(others).collect(),
        supervisor,
        access: before.access != after.access,
        ignored,
    }
}

fn whole_change(name: &str, change: ChangeKind) -> BulkheadChange {
    BulkheadChange {
        bulkhead: name.to_owned(),
        change: change.into(),
        keys: Vec::new(),
        replaces_workers: false,
        live_dropped: Vec::new(),
    }
}

fn bulkhead_change(before: &BulkheadConfig, after: &BulkheadConfig) -> Option<BulkheadChange> {
    let keys = differing_keys(&keys(before), &keys(after));
    if keys.is_empty() {
        return None;
    }
    let is_rebuilt = before.isolation().is_some() != after.isolation().is_some();
    let change = if is_rebuilt { ChangeKind::Rebuilt } else { ChangeKind::Changed };
    let replaces_workers = !is_rebuilt && keys.iter().any(|key| config::replaces_workers(key));
    let (bulkhead, change, live_dropped) = (after.name.clone(), change.into(), Vec::new());
    Some(BulkheadChange { bulkhead, change, keys, replaces_workers, live_dropped })
}

fn names_of<'c>(changes: &'c Changes, kinds: &[ChangeKind]) -> BTreeSet<&'c str> {
    let wanted = changes.bulkheads.iter().filter(|change| kinds.iter().any(|kind| change.change == *kind));
    wanted.map(|change| change.bulkhead.as_str()).collect()
}

/// Prepares the reload from `before` to `after`. Reads files, so it must not run on the data plane.
pub fn prepare(
    changes: &Changes,
    before: &Config,
    after: &Config,
    limits: DataPlaneLimits,
    (inputs, own_uid): (SpecInputs<'_>, u32),
) -> Reload {
    let resolve = |bulkhead: &BulkheadConfig| BulkheadSpec::new(bulkhead, inputs);
    let limits_before = |old: &BulkheadConfig| LimitsBefore {
        limits: program::limits(old, inputs.labels),
        tenants: old.tenant.clone().into_iter().collect(),
    };
    let new = names_of(changes, &[ChangeKind::Added, ChangeKind::Rebuilt]);
    let added = after.bulkheads.iter().filter(|b| new.contains(b.name.as_str())).map(resolve).collect();
    let changed = after.bulkheads.iter().filter_map(|bulkhead| {
        let is_changed = |c: &&BulkheadChange| c.change == ChangeKind::Changed && c.bulkhead == bulkhead.name;
        let change = changes.bulkheads.iter().find(is_changed)?;
        let old = before.bulkheads.iter().find(|b| b.name == bulkhead.name)?;
        Some(ChangedBulkhead {
            spec: resolve(bulkhead),
            before: limits_before(old),
            replaces_workers: change.replaces_workers,
        })
    });
    let rebuilt = names_of(changes, &[ChangeKind::Rebuilt]);
    let rebuilt = before.bulkheads.iter().filter(|old| rebuilt.contains(old.name.as_str()));
    let rebuilt = rebuilt.map(|old| (old.name.as_str().into(), limits_before(old)));
    let removed = names_of(changes, &[ChangeKind::Removed, ChangeKind::Rebuilt]);
    Reload {
        removed: removed.into_iter().map(str::to_owned).collect(),
        changed: changed.collect(),
        added,
        rebuilt: rebuilt.collect(),
        access: changes.access.then(|| Access::new(after, own_uid)),
        limits,
    }
}

/// Returns the configuration that is active after a reload. It equals `after`, except that keys that require a restart
/// keep their old values.
pub fn effective_config(before: &SupervisorConfig, mut after: Config) -> Config {
    let SupervisorConfig {
        drain_notice,
        drain_timeout,
        max_clients,
        max_payload,
        max_buffered,
        max_pooled,
        ..
    } = after.supervisor;
    after.supervisor = SupervisorConfig {
        drain_notice,
        drain_timeout,
        max_clients,
        max_payload,
        max_buffered,
        max_pooled,
        ..before.clone()
    };
    after
}

// Configurations are compared in serialized form, so that no key can be overlooked.

fn fields(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(fields)) => fields,
        // Unreachable, because configuration tables always serialize to an object.
        Ok(_) | Err(_) => Map::new(),
    }
}

/// Returns a bulkhead's settings, indexed by configuration key.
fn keys(bulkhead: &BulkheadConfig) -> Map<String, Value> {
    let mut keys = fields(bulkhead);
    keys.remove("name");
    if let Some(Value::Object(program)) = keys.remove("program") {
        // A changed program counts as a single changed key, regardless of which part differs.
        keys.extend(program.into_iter().map(|(kind, value)| (kind, Value::String(value.to_string()))));
    }
    if let Some(Value::Object(tenants)) = keys.get_mut("tenants") {
        let isolation = tenants.remove("isolation");
        tenants.insert("isolate".into(), isolation.as_ref().is_some_and(Value::is_object).into());
        if let Some(Value::Object(isolation)) = isolation {
            tenants.extend(isolation);
        }
    }
    if let Some(Value::Object(sandbox)) = keys.get_mut("sandbox") {
        let calls = ["allow", "deny"].map(|list| sandbox.remove(list));
        sandbox.insert("syscalls".into(), calls.into_iter().flatten().collect());
        let bytes = sandbox.remove("tmp_bytes");
        sandbox.extend(bytes.map(|bytes| ("tmp".to_owned(), bytes)));
    }
    keys
}

/// Returns the keys whose values differ. A key within a table is named `table.key`. If a whole table was added or
/// removed, only the table's name is returned.
fn differing_keys(before: &Map<String, Value>, after: &Map<String, Value>) -> Vec<String> {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let mut keys = Vec::new();
    for name in names {
        match (before.get(name), after.get(name)) {
            (one, other) if one == other => {}
            (Some(Value::Object(one)), Some(Value::Object(other))) => {
                let inner: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
                let inner = inner.into_iter().filter(|key| one.get(*key) != other.get(*key));
                keys.extend(inner.map(|key| format!("{name}.{key}")));
            }
            _ => keys.push(name.clone()),
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(bulkheads: &str) -> Config {
        let text = format!("[supervisor]\nsocket = '/run/x/jobs.sock'\n{bulkheads}");
        config::parse(&text, "/etc/workers.toml".as_ref()).unwrap()
    }

    fn between(before: &str, after: &str) -> Changes {
        changes(&parse(before), &parse(after))
    }

    const PLAIN: &str = "[bulkhead.a]\nexec = ['cat']\n";

    #[test]
    fn finds_no_changes_between_equal_configurations() {
        assert_eq!(between(PLAIN, PLAIN), Changes::default());
        assert!(
            between(PLAIN, &format!("{PLAIN}processes = 1\n")).is_empty(),
            "an explicit default is not a change"
        );
    }

    #[test]
    fn reload_reports_keys_as_written_in_file() {
        let cases = [
            ("", "max_queue = 5", "max_queue", false),
            ("", "env = { A = 'b' }", "env", true),
            ("", "breaker = { window = '5s' }", "breaker", false),
            ("breaker = { window = '5s' }", "breaker = { window = '6s' }", "breaker.window", false),
            ("", "health = { missed = 9 }", "health.missed", false),
            ("", "health = { heartbeat = '2s' }", "health.heartbeat", true),
            ("", "sandbox = { network = true }", "sandbox.network", true),
            ("", "sandbox = { tmp = 0 }", "sandbox.tmp", true),
            ("", "sandbox = { syscalls = { deny = ['ptrace'] } }", "sandbox.syscalls", true),
            ("", "rlimits = { nofile = 64 }", "rlimits", true),
            ("", "cgroup = { pids = 5 }", "cgroup", true),
            ("", "max_result = '1KiB'", "max_result", true),
            (
                "tenants = { isolate = true }",
                "tenants = { isolate = true, idle = '9s' }",
                "tenants.idle",
                false,
            ),
            ("", "tenant.acme = { max_queue = 0 }", "tenant.acme", false),
        ];
        for (before, after, key, replaces_workers) in cases {
            let changes = between(&format!("{PLAIN}{before}\n"), &format!("{PLAIN}{after}\n"));
            let [change] = &changes.bulkheads[..] else { panic!("{after}: {changes:?}") };
            assert_eq!(change.keys, [key], "{after}");
            assert_eq!(
                (change.change.clone(), change.replaces_workers),
                (ChangeKind::Changed.into(), replaces_workers),
                "{after}"
            );
        }
        let program = between(PLAIN, "[bulkhead.a]\nexec = ['cat', '-u']\n");
        assert_eq!(program.bulkheads[0].keys, ["exec"]);
        assert!(program.bulkheads[0].replaces_workers);
    }

    /// Checks that the configuration reference documents every key that a reload can report.
    #[test]
    fn changed_keys_exist_in_configuration_reference() {
        let all = "tenants = { max_queue = 1 }\nbreaker = {}\nretry = {}\npoison = {}\npriority = { critical_reserve = 0.1 }\n\
                   rate_limit = { per_second = 5 }\nrecycle = { jobs = 5 }\ncgroup = { pids = 5 }\nmax_queue = 5\n";
        let apart = "tenants = { isolate = true }\n";
        let reference = config::reference();
        let has =
            |table: &str, name: &str| reference.iter().any(|key| key.table == table && key.name == name);
        let is_table = |table: &str| reference.iter().any(|key| key.table == table);
        for more in [all, apart] {
            for (key, value) in keys(&parse(&format!("{PLAIN}{more}")).bulkheads[0]) {
                let table = format!("bulkhead.NAME.{key}");
                match value {
                    Value::Object(inner) if key != "tenant" => {
                        for name in inner.keys() {
                            let is_known = has(&table, name) || is_table(&format!("{table}.{name}"));
                            assert!(is_known, "{key}.{name} is not a key");
                        }
                    }
                    _ => {
                        let is_known = has("bulkhead.NAME", &key) || is_table(&table) || key == "tenant";
                        assert!(is_known, "{key} is not a key");
                    }
                }
            }
        }
    }

    #[test]
    fn reload_reports_added_removed_and_rebuilt_bulkheads() {
        let both = format!("{PLAIN}[bulkhead.b]\nexec = ['cat']\n");
        assert_eq!(between(PLAIN, &both).bulkheads, [whole_change("b", ChangeKind::Added)]);
        assert_eq!(between(&both, PLAIN).bulkheads, [whole_change("b", ChangeKind::Removed)]);
        let apart = between(PLAIN, &format!("{PLAIN}tenants = {{ isolate = true }}\n"));
        assert_eq!(
            (apart.bulkheads[0].change.clone(), apart.bulkheads[0].replaces_workers),
            (ChangeKind::Rebuilt.into(), false)
        );
    }

    /// Checks that a reload applies all keys in `[supervisor]` except those that are declared to require a restart.
    #[test]
    fn reload_applies_exactly_the_reloadable_keys() {
        let all = "drain_notice = '2s'\ndrain_timeout = '1s'\njobs_http_max = 5\nmax_clients = 5\nmax_payload = '1MiB'\nmax_buffered = '2MiB'\n\
                   max_pooled = '3MiB'\n\
                   socket_mode = '0660'\nadmin = '/run/x/a.sock'\ncrash_dir = '/run/x/c'\ncrash_keep = 5\n\
                   crash_payloads = false\ncrash_symbols = ['/usr']\n\
                   tenant_labels = 5\nworker_uids = '7-9'";
        let text = format!("[supervisor]\nsocket = '/run/y/jobs.sock'\n{all}\n{PLAIN}");
        let (before, after) = (parse(PLAIN), config::parse(&text, "/etc/workers.toml".as_ref()).unwrap());
        let changes = super::changes(&before, &after);
        let of_supervisor = config::reference().into_iter().filter(|key| key.table == "supervisor");
        // HTTP addresses need token files, so they are not part of this test.
        let written = of_supervisor.filter(|key| !key.name.starts_with("http") && key.name != "jobs_http");
        let (waiting, holding): (Vec<_>, Vec<_>) =
            written.partition(|key| key.on_reload == config::OnReload::NeedsRestart);
        let names =
            |keys: Vec<config::Key>| keys.iter().map(|key| key.name.to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(BTreeSet::from_iter(changes.supervisor), names(holding));
        assert_eq!(BTreeSet::from_iter(changes.ignored), names(waiting));
        let after_it = super::changes(&effective_config(&before.supervisor, after.clone()), &after);
        assert_eq!(after_it.supervisor, [""; 0]);
    }

    #[test]
    fn new_contents_of_http_token_file_need_a_restart() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "[supervisor]\nsocket = '/run/x/jobs.sock'\nhttp = '127.0.0.1:9464'\nhttp_token_file = 'token'\n{PLAIN}"
        );
        let with = |token: &str| {
            let file = folder.path().join("token");
            std::fs::write(&file, token).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
            config::parse(&text, &folder.path().join("workers.toml")).unwrap()
        };
        let (before, after) = (with("an-earlier-secret"), with("another-new-secret"));
        let now = effective_config(&before.supervisor, after.clone());
        for active in [before, now] {
            assert_eq!(changes(&active, &after).ignored, ["http_token_file"]);
            assert_eq!(changes(&active, &active).ignored, [""; 0]);
        }
    }

    #[test]
    fn reports_keys_that_need_a_restart_on_every_reload() {
        let with = |keys: &str| {
            let text = format!("[supervisor]\nsocket = '/run/x/jobs.sock'\n{keys}\n{PLAIN}");
            config::parse(&text, "/etc/workers.toml".as_ref()).unwrap()
        };
        let (before, after) = (with(""), with("crash_keep = 5\ndrain_timeout = '1s'"));
        let reported = changes(&before, &after);
        assert_eq!(
            (reported.supervisor, reported.ignored),
            (vec!["drain_timeout".to_owned()], vec!["crash_keep".to_owned()])
        );
        let now = effective_config(&before.supervisor, after.clone());
        let again = changes(&now, &after);
        assert!(again.is_empty());
        assert_eq!(again.ignored, ["crash_keep"]);
    }
}

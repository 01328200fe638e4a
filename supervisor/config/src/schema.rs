//! List of all configuration keys, collected from `keys`. The documentation is generated from this list, and a reload
//! looks up the effect of a changed key.

use std::sync::LazyLock;

#[cfg(test)]
pub(super) use super::key::ACCESS;
pub(super) use super::key::BULKHEAD;
use super::key::{Key, Kind, OnReload, SUPERVISOR, TOP_LEVEL};
use super::keys::access::AccessKeys;
use super::keys::bulkhead::BulkheadKeys;
use super::keys::supervisor::SupervisorKeys;
use super::table::Table as _;
use super::{defaults, key};

static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let top = [
        Key::of_table(TOP_LEVEL, "supervisor"),
        Key::of_table(TOP_LEVEL, "defaults"),
        Key::of_table(TOP_LEVEL, "bulkhead"),
        Key {
            kind: Kind::Tables(defaults::ACCESS_MAX),
            example: "[{ uid = 1001 }]",
            ..Key::of_table(TOP_LEVEL, "access")
        },
    ];
    let tables = [SupervisorKeys::keys(), AccessKeys::keys(), BulkheadKeys::keys()];
    top.into_iter().chain(tables.into_iter().flatten()).collect()
});

/// Returns all keys of a configuration file, table by table. A test compares `docs/configuration.md` with
/// this list.
///
/// ```
/// use bulkhead_config as config;
/// let key = config::reference().into_iter().find(|key| key.path() == "bulkhead.NAME.grace").unwrap();
/// assert_eq!(key.default.to_string(), "`\"100ms\"`");
/// ```
pub fn reference() -> Vec<Key> {
    all().filter(|key| !matches!(key.kind, Kind::Table | Kind::Tables(_))).collect()
}

/// Returns all keys of a configuration file, including keys whose values are tables.
pub(super) fn all() -> impl Iterator<Item = Key> {
    keys().iter().copied()
}

pub(super) fn keys() -> &'static [Key] {
    &KEYS
}

/// Returns the key `name` in `table`, if it exists.
pub(super) fn find(table: &str, name: &str) -> Option<Key> {
    key::find(keys(), table, name)
}

/// Returns true if a reload replaces the workers when this bulkhead key changes. `key` is a single key, such as `cwd`
/// or `health.heartbeat`, or a whole table, such as `cgroup`.
pub fn replaces_workers(key: &str) -> bool {
    let path = format!("{BULKHEAD}.{key}");
    let matches = |key: &Key| key.path() == path || key.path().starts_with(&format!("{path}."));
    all().any(|key| matches(&key) && key.on_reload == OnReload::ReplacesWorkers)
}

/// Returns true if a new value of the key in `[supervisor]` takes effect only after a restart.
pub fn needs_restart(key: &str) -> bool {
    find(SUPERVISOR, key).is_none_or(|key| key.on_reload == OnReload::NeedsRestart)
}

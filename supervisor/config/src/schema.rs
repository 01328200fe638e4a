//! Every key, as the rows of `keys` have them: the reference for the documentation, and what a reload does with
//! a key.

use std::sync::LazyLock;

#[cfg(test)]
pub(super) use super::key::ACCESS;
pub(super) use super::key::BULKHEAD;
use super::key::{Key, Kind, OnReload, SUPERVISOR, TOP};
use super::keys::access::AccessKeys;
use super::keys::bulkhead::BulkheadKeys;
use super::keys::supervisor::SupervisorKeys;
use super::table::Table as _;
use super::{defaults, key};

static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let top = [
        Key::of_table(TOP, "supervisor"),
        Key::of_table(TOP, "defaults"),
        Key::of_table(TOP, "bulkhead"),
        Key {
            kind: Kind::Tables(defaults::ACCESS_MAX),
            example: "[{ uid = 1001 }]",
            ..Key::of_table(TOP, "access")
        },
    ];
    let tables = [SupervisorKeys::keys(), AccessKeys::keys(), BulkheadKeys::keys()];
    top.into_iter().chain(tables.into_iter().flatten()).collect()
});

/// Every key that a configuration file of this version may have, table by table: what the reader reads,
/// and what `docs/configuration.md` is tested against.
///
/// ```
/// use bulkhead_config as config;
/// let key = config::reference().into_iter().find(|key| key.path() == "bulkhead.NAME.grace").unwrap();
/// assert_eq!(key.default.to_string(), "`\"100ms\"`");
/// ```
pub fn reference() -> Vec<Key> {
    all().filter(|key| !matches!(key.kind, Kind::Table | Kind::Tables(_))).collect()
}

/// Every key that a file may have, tables included.
pub(super) fn all() -> impl Iterator<Item = Key> {
    keys().iter().copied()
}

pub(super) fn keys() -> &'static [Key] {
    &KEYS
}

/// The key `name` of `table`, if a file may have it.
pub(super) fn find(table: &str, name: &str) -> Option<Key> {
    key::find(keys(), table, name)
}

/// Whether workers are replaced if a reload finds another value under `key` of a bulkhead: `cwd`,
/// `health.heartbeat`, or a whole table such as `cgroup`.
pub fn replaces_workers(key: &str) -> bool {
    let path = format!("{BULKHEAD}.{key}");
    let is_it = |key: &Key| key.path() == path || key.path().starts_with(&format!("{path}."));
    all().any(|key| is_it(&key) && key.on_reload == OnReload::ReplacesWorkers)
}

/// Whether another value of this key of `[supervisor]` is passed over until the next start.
pub fn waits_for_start(key: &str) -> bool {
    find(SUPERVISOR, key).is_none_or(|key| key.on_reload == OnReload::Waits)
}

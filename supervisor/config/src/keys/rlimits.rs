//! Declares the keys of a bulkhead's `rlimits` table, one for each [`Resource`], and reads and writes the table.
//! `values` converts each value, and `crate::rlimits` contains units and descriptions. The `plane` crate adds defaults
//! for confined workers, and the keeper sets the limits.

use std::time::Duration;

use bulkhead_linux::rlimits::Resource;

use crate::key::{DefaultValue, Key, Kind, OnReload, RLIMITS};
use crate::reader::{Field, TableReader};
use crate::rlimits::{Measure, Rlimit, UNLIMITED, meaning};
use crate::table::{NestedTable, Write, Written, in_braces};
use crate::values;

fn row(resource: Resource) -> Key {
    let (measure, about) = meaning(resource);
    Key {
        table: RLIMITS,
        name: resource.name(),
        kind: Kind::Limit(resource),
        default: match resource {
            Resource::Core => DefaultValue::Count(0),
            Resource::Fsize => DefaultValue::Described("4GiB; without a sandbox, the supervisor's own limit"),
            Resource::Nofile => DefaultValue::Described(
                "three quarters of the supervisor's own limit; without a sandbox, that limit",
            ),
            Resource::Nproc => DefaultValue::Described(
                "1024 if the limit applies per worker (separate user ID or user namespace); otherwise the \
                 supervisor's own limit",
            ),
            _ => DefaultValue::Described("the supervisor's own limit"),
        },
        example: match measure {
            Measure::Bytes => "\"1GiB\"",
            Measure::Count => "64",
            Measure::Seconds => "\"60s\"",
            Measure::Microseconds => "\"200ms\"",
            Measure::Zero => "0",
        },
        about,
        on_reload: OnReload::ReplacesWorkers,
    }
}

/// Keys of the `rlimits` table, in the order of [`Resource::ALL`].
pub(crate) struct RawRlimits([Field<Option<u64>>; Resource::ALL.len()]);

impl NestedTable for RawRlimits {
    fn nested_keys() -> Vec<Key> {
        Resource::ALL.map(row).to_vec()
    }

    fn read_nested(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self {
        let Some(mut table) = table.and_then(|table| table.table(name, RLIMITS)) else {
            return Self(Resource::ALL.map(|_| Field::Absent));
        };
        Self(Resource::ALL.map(|resource| {
            table.read_value(resource.name(), |key, value| values::limit(key, resource, value))
        }))
    }

    fn merge_nested(self, defaults: &Self) -> Self {
        let mut own = self.0;
        for (own, default) in own.iter_mut().zip(&defaults.0) {
            *own = own.or(default);
        }
        Self(own)
    }
}

impl RawRlimits {
    /// Returns the limits that the configuration sets. Always includes `core`.
    pub(crate) fn checked(&self) -> Vec<Rlimit> {
        let written = Resource::ALL.into_iter().zip(&self.0);
        written
            .filter_map(|(resource, field)| match (resource, field.given()) {
                (Resource::Core, _) => Some(Rlimit { resource, limit: Some(0) }),
                (_, Some(given)) => Some(Rlimit { resource, limit: given.value }),
                (_, None) => None,
            })
            .collect()
    }
}

impl Write for Vec<Rlimit> {
    fn written(&self, _: Kind) -> Option<Written> {
        let limits: Vec<_> =
            self.iter().map(|rlimit| format!("{} = {}", rlimit.resource.name(), toml(rlimit))).collect();
        Some(Written::Toml(in_braces(&limits)))
    }
}

fn toml(rlimit: &Rlimit) -> String {
    let scalar = match (rlimit.limit, meaning(rlimit.resource).0) {
        (None, _) => DefaultValue::Word(UNLIMITED),
        (Some(bytes), Measure::Bytes) => DefaultValue::Size(bytes),
        (Some(seconds), Measure::Seconds) => DefaultValue::Duration(Duration::from_secs(seconds)),
        (Some(number), _) => DefaultValue::Count(number),
    };
    scalar.toml().unwrap_or_default()
}

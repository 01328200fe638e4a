//! `tenants`, and `[bulkhead.NAME.tenant]`: one table for each tenant that has numbers of its own. The keys of the
//! latter are names that the file chooses, so it has no rows but for what is in them.

use std::time::Duration;

use bulkhead_policy::{Change, OwnNumbers, RateLimit};
use bulkhead_shared::limits::TENANT_BYTES_MAX;
use serde::Serialize;
use toml::de::DeValue;

use super::kinds::*;
use crate::defaults;
use crate::defaults::*;
use crate::diagnostics::{shown, shown_key};
use crate::key::{Key, Kind, TENANT, TENANT_RATE_LIMIT, TENANTS};
use crate::reader::{Field, TableReader};
use crate::table::{Part, Table as _, as_table_option, section, table};
use crate::values::{self, Complaint};

table! {
    /// `tenants`: how much of common workers one tenant may have, or that it has its own.
    TenantsKeys, TENANTS;

    /// Maximum number of jobs of one tenant in flight in the whole bulkhead; more jobs wait. A job that ends a worker
    /// keeps this place until the worker is [replaced](#workers-that-a-tenant-ends).
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "no limit", such as "2";
    /// Jobs of one tenant that may wait; over it a job is rejected `tenant_quota`.
    max_queue: u32 as count(0, QUEUE_CEILING), without "no limit", such as "20";
    /// Whether each tenant has workers of its own. Then `processes`, `max_in_flight`, `max_queue`, `rate_limit`
    /// whatever its `per`, `breaker` and the restart history of the bulkhead are each tenant's, and the two keys
    /// above are refused.
    isolate: bool as Kind::Boolean, default false;
    /// Isolated tenants that have workers at once; for one more those of the longest idle go, and if none is idle its
    /// job is rejected `unavailable`. (`processes` + `start.spares`) × `max_active` is at most 16384. Needs `isolate`.
    max_active: u32 as count(1, TENANTS_ACTIVE_CEILING), default 64;
    /// An isolated tenant without a job for so long gives its workers back. Needs `isolate`.
    idle: Duration as at_least(SOME), default Duration::from_secs(60);
}

section! {
    /// `[bulkhead.NAME.tenant.TENANT]`.
    TenantKeys => TenantConfig, TENANT;

    /// Jobs of this tenant in flight in the whole bulkhead, as in `tenants`; with `tenants.isolate` per worker
    /// process, at most 4096.
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "as for every tenant", such as "2";
    /// Jobs of this tenant that may wait.
    max_queue: u32 as count(0, QUEUE_CEILING), without "as for every tenant", such as "20";
    /// Worker processes of this tenant. Needs `tenants.isolate`.
    processes: u32 as count(1, PROCESSES_CEILING), without "the bulkhead's `processes`", such as "2";

    tables { rate_limit: TenantRateKeys, }
}

table! {
    /// `[bulkhead.NAME.tenant.TENANT.rate_limit]`: without `per`, which would say nothing.
    TenantRateKeys, TENANT_RATE_LIMIT;

    /// Jobs of this tenant a second in the long run, each counted by its cost.
    per_second: f64 as Kind::Number(RATE_CEILING), without "required", such as "100";
    /// Jobs of this tenant that may come at once after a pause.
    burst: u32 as count(1, RATE_CEILING), without "`per_second`, rounded up", such as "1000";
}

/// `tenants`: how much of common workers one tenant may have, or that it has its own; at least one is set,
/// and `isolation` only alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantsConfig {
    /// Jobs of one tenant in flight in the whole bulkhead, at least 1; `None`: as many as there are permits.
    pub max_in_flight: Option<u32>,
    /// Jobs of one tenant that may wait; `None`: as many as there are places.
    pub max_queue: Option<u32>,
    /// Workers for each tenant; `None`: the workers are common.
    pub isolation: Option<IsolationConfig>,
}

/// `tenants.isolate = true`: what the bulkhead says of processes, jobs in flight, queue, rate, breaker and
/// restarts is said of each tenant.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IsolationConfig {
    /// Tenants that have workers at once, at least 1.
    pub max_active: u32,
    /// How long a tenant's workers stay without a job, at least 1 ms.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub idle: Duration,
}

/// `[bulkhead.NAME.tenant.TENANT]`: one tenant's own numbers, each in place of what every tenant has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TenantConfig {
    /// At least 1. Jobs of this tenant in flight: with isolation per worker, else in the whole bulkhead.
    pub max_in_flight: Option<u32>,
    /// Jobs of this tenant that may wait.
    pub max_queue: Option<u32>,
    /// Worker processes of this tenant, at least 1; `None` without isolation.
    pub processes: Option<u32>,
    /// How fast jobs of this tenant may come; always per tenant.
    #[serde(serialize_with = "as_table_option")]
    pub rate_limit: Option<RateLimit>,
}

impl TenantConfig {
    /// As a share of common workers.
    pub fn of_share(&self) -> OwnNumbers {
        let Self { max_in_flight, max_queue, rate_limit, .. } = *self;
        OwnNumbers { max_in_flight, max_queue, rate_limit }
    }

    /// As a change of the numbers of workers that are the tenant's own.
    pub fn of_workers(&self) -> Change {
        let Self { processes, max_in_flight, max_queue, rate_limit } = *self;
        Change { processes, max_in_flight, max_queue, rate_limit: rate_limit.map(Some) }
    }

    /// These numbers where they say something, and the others where they do not.
    pub fn or(self, others: Self) -> Self {
        Self {
            max_in_flight: self.max_in_flight.or(others.max_in_flight),
            max_queue: self.max_queue.or(others.max_queue),
            processes: self.processes.or(others.processes),
            rate_limit: self.rate_limit.or(others.rate_limit),
        }
    }
}

/// One tenant's table.
pub(crate) struct RawTenant {
    pub(crate) name: String,
    pub(crate) keys: TenantKeys,
}

/// In the order of the file; `[defaults]` have none.
impl Part for Vec<RawTenant> {
    fn keys_inside() -> Vec<Key> {
        TenantKeys::keys()
    }

    fn read_inside(table: Option<&mut TableReader<'_, '_>>, _: &'static str) -> Self {
        table.map(read).unwrap_or_default()
    }

    fn over_part(self, _: &Self) -> Self {
        self
    }
}

/// Reads the tables of a bulkhead's tenants, in the order of the file.
fn read(bulkhead: &mut TableReader<'_, '_>) -> Vec<RawTenant> {
    let Some(named) = bulkhead.bare_table("tenant") else { return Vec::new() };
    let mut entries: Vec<_> = named.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    if let Some((name, _)) = entries.get(defaults::TENANT_TABLES_MAX) {
        bulkhead.complain(name.span(), too_many());
        entries.truncate(defaults::TENANT_TABLES_MAX);
    }
    let mut tenants = Vec::new();
    for (name, value) in entries {
        bulkhead.found(name.span(), check_name(name.get_ref()));
        match value.get_ref() {
            DeValue::Table(table) => {
                let keys = TenantKeys::read(Field::Absent, Some(bulkhead.tenant(name.get_ref(), table)));
                tenants.push(RawTenant { name: name.get_ref().to_string(), keys });
            }
            other => {
                let is_for_all = bulkhead.is_key_of(TENANTS, name.get_ref());
                bulkhead.complain(value.span(), not_a_tenant(name.get_ref(), is_for_all, other));
            }
        }
    }
    tenants
}

fn too_many() -> Complaint {
    Complaint::new(
        format!(
            "more than {} tenants with numbers of their own in one bulkhead",
            defaults::TENANT_TABLES_MAX
        ),
        "set what most of them have in [bulkhead.NAME] or [bulkhead.NAME.tenants]",
    )
}

/// What a job can say on the wire as its tenant, but for nothing: that is no tenant's name.
pub(crate) fn check_name(name: &str) -> Result<(), Complaint> {
    if name.is_empty() {
        return Err(Complaint::new(
            "the name of a tenant is empty",
            "write [bulkhead.NAME.tenant.TENANT]; a job without a tenant has the bulkhead's own numbers",
        ));
    }
    if name.len() > TENANT_BYTES_MAX {
        return Err(Complaint::new(
            format!("`{}` cannot name a tenant: it has {} bytes", shown(name), name.len()),
            format!("no job can name it; a tenant's name has at most {TENANT_BYTES_MAX} bytes"),
        ));
    }
    values::no_nul(&format!("tenant.{}", shown_key(name)), name)
}

/// Keys straight below `tenant` are most likely meant for all tenants.
fn not_a_tenant(name: &str, is_for_all: bool, value: &DeValue<'_>) -> Complaint {
    let help = match is_for_all {
        true => "keys for every tenant go into [bulkhead.NAME.tenants], keys for one into [bulkhead.NAME.tenant.TENANT]"
            .to_owned(),
        false => format!("write a section [bulkhead.NAME.tenant.{}]", shown_key(name)),
    };
    let found = values::type_name(value);
    Complaint::new(format!("`tenant.{}` must be a table, not {found}", shown_key(name)), help)
}

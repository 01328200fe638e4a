//! Declares the keys of the `tenants` table and of the `[bulkhead.NAME.tenant.TENANT]` tables, and most types of their
//! validated values. Tenant names have no rows, because the author of the file chooses the names. `keys::bulkhead`
//! includes both kinds of tables, and `relations/tenants.rs` checks which keys can be combined. The data plane decides
//! which tenants have workers.

use std::time::Duration;

use bulkhead_policy::{LimitChange, RateLimit, TenantOverrides};
use bulkhead_shared::limits::TENANT_BYTES_MAX;
use serde::Serialize;
use toml::de::DeValue;

use super::kinds::*;
use crate::defaults;
use crate::defaults::*;
use crate::diagnostics::{shown, shown_key};
use crate::key::{Key, Kind, TENANT, TENANT_RATE_LIMIT, TENANTS};
use crate::reader::{Field, TableReader};
use crate::table::{NestedTable, Table as _, as_table_option, section, table};
use crate::values::{self, ValueError};

table! {
    /// `tenants`: limits for each tenant on shared workers, or isolation of tenants.
    TenantsKeys, TENANTS;

    /// Maximum number of jobs that each tenant can have in flight in the whole bulkhead. Further jobs wait. A
    /// job that kills its worker counts until the worker is [replaced](#workers-that-a-tenant-ends).
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "no limit", such as "2";
    /// Maximum number of jobs that each tenant can have in the queue. Further jobs are rejected as
    /// `tenant_quota`.
    max_queue: u32 as count(0, QUEUE_CEILING), without "no limit", such as "20";
    /// True if each tenant has separate workers. If true, `processes`, `max_in_flight`, `max_queue`,
    /// `rate_limit` (with any `per`), `breaker` and the restart history apply to each tenant separately, and
    /// the file must not set `tenants.max_in_flight` or `tenants.max_queue`.
    isolate: bool as Kind::Boolean, default false;
    /// Maximum number of isolated tenants that have workers at the same time. To make room for another
    /// tenant, the workers of the longest-idle tenant are stopped. If no tenant is idle, the job is rejected
    /// as `unavailable`. (`processes` + `start.spares`) × `max_active` is at most 16384. Needs `isolate`.
    max_active: u32 as count(1, TENANTS_ACTIVE_CEILING), default 64;
    /// Time without jobs after which the workers of an isolated tenant are stopped. Needs `isolate`.
    idle: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(60);
}

section! {
    /// Keys of `[bulkhead.NAME.tenant.TENANT]`.
    TenantKeys => TenantConfig, TENANT;

    /// Maximum number of this tenant's jobs in flight in the whole bulkhead. With `tenants.isolate`, the
    /// maximum per worker process, at most 4096.
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "as for other tenants", such as "2";
    /// Maximum number of queued jobs of this tenant.
    max_queue: u32 as count(0, QUEUE_CEILING), without "as for other tenants", such as "20";
    /// Number of worker processes for this tenant. Needs `tenants.isolate`.
    processes: u32 as count(1, PROCESSES_CEILING), without "the bulkhead's `processes`", such as "2";

    tables { rate_limit: TenantRateKeys, }
}

table! {
    /// Keys of `[bulkhead.NAME.tenant.TENANT.rate_limit]`. There is no key `per`, because a tenant's rate limit always
    /// applies to that tenant alone.
    TenantRateKeys, TENANT_RATE_LIMIT;

    /// Sustained rate of this tenant in jobs per second. Each job counts according to its cost.
    per_second: f64 as Kind::Number(RATE_CEILING), without "required", such as "100";
    /// Maximum number of this tenant's jobs admitted in one burst after a pause.
    burst: u32 as count(1, RATE_CEILING), without "`per_second`, rounded up", such as "1000";
}

/// Settings in the `tenants` table. They either limit each tenant's share of the workers or isolate the tenants. If
/// `isolation` is set, the other fields are `None`. At least one field is set.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantsConfig {
    /// Maximum number of jobs that each tenant can have in flight in the whole bulkhead, at least 1. `None` means no
    /// limit per tenant.
    pub max_in_flight: Option<u32>,
    /// Maximum number of jobs that each tenant can have in the queue. `None` means no limit per tenant.
    pub max_queue: Option<u32>,
    /// Settings for separate workers for each tenant. `None` means that all tenants share the workers.
    pub isolation: Option<IsolationConfig>,
}

/// Settings for isolated tenants (`tenants.isolate = true`). The bulkhead's settings for processes, jobs in
/// flight, queue, rate limit, breaker and restarts then apply to each tenant separately.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IsolationConfig {
    /// Maximum number of tenants that have workers at the same time, at least 1.
    pub max_active: u32,
    /// Time without jobs after which a tenant's workers are stopped, at least 1 ms.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub idle: Duration,
}

/// Settings for one tenant, from `[bulkhead.NAME.tenant.TENANT]`. Each field that is set overrides the corresponding
/// setting for all tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TenantConfig {
    /// Maximum number of this tenant's jobs in flight, at least 1. If tenants are isolated, the limit applies to each
    /// worker, otherwise to the whole bulkhead.
    pub max_in_flight: Option<u32>,
    /// Maximum number of this tenant's jobs in the queue.
    pub max_queue: Option<u32>,
    /// Number of worker processes for this tenant, at least 1. Always `None` if tenants share the workers.
    pub processes: Option<u32>,
    /// Maximum rate at which this tenant's jobs are admitted.
    #[serde(serialize_with = "as_table_option")]
    pub rate_limit: Option<RateLimit>,
}

impl TenantConfig {
    /// Returns the settings that apply to a tenant on shared workers.
    pub fn of_share(&self) -> TenantOverrides {
        let Self { max_in_flight, max_queue, rate_limit, .. } = *self;
        TenantOverrides { max_in_flight, max_queue, rate_limit }
    }

    /// Returns the settings of an isolated tenant, in the form of changes to the bulkhead's limits.
    pub fn of_workers(&self) -> LimitChange {
        let Self { processes, max_in_flight, max_queue, rate_limit } = *self;
        LimitChange { processes, max_in_flight, max_queue, rate_limit: rate_limit.map(Some) }
    }

    /// Returns a copy in which settings that are `None` are replaced with the settings in `others`.
    pub fn or(self, others: Self) -> Self {
        Self {
            max_in_flight: self.max_in_flight.or(others.max_in_flight),
            max_queue: self.max_queue.or(others.max_queue),
            processes: self.processes.or(others.processes),
            rate_limit: self.rate_limit.or(others.rate_limit),
        }
    }
}

/// Name of a tenant, and the keys in the tenant's table.
pub(crate) struct RawTenant {
    pub(crate) name: String,
    pub(crate) keys: TenantKeys,
}

/// Tenant tables of a bulkhead, in file order. `[defaults]` cannot contain tenant tables.
impl NestedTable for Vec<RawTenant> {
    fn nested_keys() -> Vec<Key> {
        TenantKeys::keys()
    }

    fn read_nested(table: Option<&mut TableReader<'_, '_>>, _: &'static str) -> Self {
        table.map(read).unwrap_or_default()
    }

    fn merge_nested(self, _: &Self) -> Self {
        self
    }
}

/// Reads a bulkhead's tenant tables, in file order.
fn read(bulkhead: &mut TableReader<'_, '_>) -> Vec<RawTenant> {
    let Some(named) = bulkhead.bare_table("tenant") else { return Vec::new() };
    let mut entries: Vec<_> = named.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    if let Some((name, _)) = entries.get(defaults::TENANT_TABLES_MAX) {
        bulkhead.report_error(name.span(), too_many());
        entries.truncate(defaults::TENANT_TABLES_MAX);
    }
    let mut tenants = Vec::new();
    for (name, value) in entries {
        bulkhead.ok_or_report(name.span(), check_name(name.get_ref()));
        match value.get_ref() {
            DeValue::Table(table) => {
                let keys = TenantKeys::read(Field::Absent, Some(bulkhead.tenant(name.get_ref(), table)));
                tenants.push(RawTenant { name: name.get_ref().to_string(), keys });
            }
            other => {
                let is_for_all = bulkhead.is_key_of(TENANTS, name.get_ref());
                bulkhead.report_error(value.span(), not_a_tenant(name.get_ref(), is_for_all, other));
            }
        }
    }
    tenants
}

fn too_many() -> ValueError {
    ValueError::new(
        format!("the bulkhead has separate limits for more than {} tenants", defaults::TENANT_TABLES_MAX),
        "set common limits in [bulkhead.NAME] or [bulkhead.NAME.tenants]",
    )
}

/// Checks that `name` is a valid tenant name. The empty name is rejected, because it stands for jobs without a tenant.
pub(crate) fn check_name(name: &str) -> Result<(), ValueError> {
    if name.is_empty() {
        return Err(ValueError::new(
            "the name of a tenant is empty",
            "write [bulkhead.NAME.tenant.TENANT]; jobs without a tenant have the bulkhead's own limits",
        ));
    }
    if name.len() > TENANT_BYTES_MAX {
        return Err(ValueError::new(
            format!("`{}` is not a valid tenant name: the name is {} bytes long", shown(name), name.len()),
            format!("shorten the name; in a job, a tenant's name can have at most {TENANT_BYTES_MAX} bytes"),
        ));
    }
    values::no_nul(&format!("tenant.{}", shown_key(name)), name)
}

/// Returns the error for an entry in `tenant` that is not a table. `is_for_all` is true if the entry is a key that
/// can be set for all tenants.
fn not_a_tenant(name: &str, is_for_all: bool, value: &DeValue<'_>) -> ValueError {
    let help = match is_for_all {
        true => "set a key for all tenants in [bulkhead.NAME.tenants], or for a single tenant in \
             [bulkhead.NAME.tenant.TENANT]"
            .to_owned(),
        false => format!("write a [bulkhead.NAME.tenant.{}] section", shown_key(name)),
    };
    let found = values::type_name(value);
    ValueError::new(format!("`tenant.{}` must be a table, not {found}", shown_key(name)), help)
}

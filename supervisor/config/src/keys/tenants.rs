//! `tenants` and `[bulkhead.NAME.tenant]`: one table for each tenant with separate settings. The file chooses
//! the names of these tables, so only the keys in them have rows.

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
    /// `tenants`: limits of one tenant on shared workers, or isolation of tenants.
    TenantsKeys, TENANTS;

    /// Maximum number of jobs of one tenant in flight in the whole bulkhead; further jobs wait. A job that
    /// ends a worker counts until the worker is [replaced](#workers-that-a-tenant-ends).
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "no limit", such as "2";
    /// Maximum number of queued jobs of one tenant; further jobs are rejected as `tenant_quota`.
    max_queue: u32 as count(0, QUEUE_CEILING), without "no limit", such as "20";
    /// True if each tenant has separate workers. Then `processes`, `max_in_flight`, `max_queue`, `rate_limit`
    /// (with any `per`), `breaker` and the restart history apply to each tenant separately, and
    /// `tenants.max_in_flight` and `tenants.max_queue` are refused.
    isolate: bool as Kind::Boolean, default false;
    /// Maximum number of isolated tenants with workers at the same time. For one more tenant, the workers of
    /// the longest-idle tenant end. If no tenant is idle, the job is rejected as `unavailable`. (`processes`
    /// + `start.spares`) × `max_active` is at most 16384. Needs `isolate`.
    max_active: u32 as count(1, TENANTS_ACTIVE_CEILING), default 64;
    /// Time without a job after which the workers of an isolated tenant end. Needs `isolate`.
    idle: Duration as at_least(POSITIVE_DURATION), default Duration::from_secs(60);
}

section! {
    /// `[bulkhead.NAME.tenant.TENANT]`.
    TenantKeys => TenantConfig, TENANT;

    /// Maximum number of jobs of this tenant in flight in the whole bulkhead, as in `tenants`. With
    /// `tenants.isolate` the value is per worker process, at most 4096.
    max_in_flight: u32 as count(1, PERMITS_CEILING), without "as for every tenant", such as "2";
    /// Maximum number of queued jobs of this tenant.
    max_queue: u32 as count(0, QUEUE_CEILING), without "as for every tenant", such as "20";
    /// Number of worker processes of this tenant. Needs `tenants.isolate`.
    processes: u32 as count(1, PROCESSES_CEILING), without "the bulkhead's `processes`", such as "2";

    tables { rate_limit: TenantRateKeys, }
}

table! {
    /// `[bulkhead.NAME.tenant.TENANT.rate_limit]`: without `per`, which would have no effect.
    TenantRateKeys, TENANT_RATE_LIMIT;

    /// Sustained rate of this tenant in jobs per second. Each job counts with its cost.
    per_second: f64 as Kind::Number(RATE_CEILING), without "required", such as "100";
    /// Number of jobs of this tenant that can arrive at once after a pause.
    burst: u32 as count(1, RATE_CEILING), without "`per_second`, rounded up", such as "1000";
}

/// `tenants`: limits of one tenant on shared workers, or isolation of tenants. At least one field is set, and
/// `isolation` only alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TenantsConfig {
    /// Maximum number of jobs of one tenant in flight in the whole bulkhead, at least 1. `None`: all permits.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs of one tenant. `None`: the whole queue.
    pub max_queue: Option<u32>,
    /// Separate workers for each tenant. `None`: all tenants share the workers.
    pub isolation: Option<IsolationConfig>,
}

/// `tenants.isolate = true`: the bulkhead's settings for processes, jobs in flight, queue, rate, breaker and
/// restarts apply to each tenant separately.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IsolationConfig {
    /// Maximum number of tenants with workers at the same time, at least 1.
    pub max_active: u32,
    /// Time without a job after which a tenant's workers end, at least 1 ms.
    #[serde(serialize_with = "crate::units::serialize_duration")]
    pub idle: Duration,
}

/// `[bulkhead.NAME.tenant.TENANT]`: settings of one tenant. Each replaces the setting for all tenants.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TenantConfig {
    /// Maximum number of jobs of this tenant in flight, at least 1: per worker with isolation, otherwise in
    /// the whole bulkhead.
    pub max_in_flight: Option<u32>,
    /// Maximum number of queued jobs of this tenant.
    pub max_queue: Option<u32>,
    /// Number of worker processes of this tenant, at least 1. `None` without isolation.
    pub processes: Option<u32>,
    /// Maximum rate of jobs of this tenant. Always per tenant.
    #[serde(serialize_with = "as_table_option")]
    pub rate_limit: Option<RateLimit>,
}

impl TenantConfig {
    /// Returns the settings for a tenant that shares workers.
    pub fn of_share(&self) -> TenantOverrides {
        let Self { max_in_flight, max_queue, rate_limit, .. } = *self;
        TenantOverrides { max_in_flight, max_queue, rate_limit }
    }

    /// Returns the settings for a tenant with separate workers, as a change of the bulkhead's settings.
    pub fn of_workers(&self) -> LimitChange {
        let Self { processes, max_in_flight, max_queue, rate_limit } = *self;
        LimitChange { processes, max_in_flight, max_queue, rate_limit: rate_limit.map(Some) }
    }

    /// Returns these settings, with absent ones taken from `others`.
    pub fn or(self, others: Self) -> Self {
        Self {
            max_in_flight: self.max_in_flight.or(others.max_in_flight),
            max_queue: self.max_queue.or(others.max_queue),
            processes: self.processes.or(others.processes),
            rate_limit: self.rate_limit.or(others.rate_limit),
        }
    }
}

/// The table of one tenant.
pub(crate) struct RawTenant {
    pub(crate) name: String,
    pub(crate) keys: TenantKeys,
}

/// Tables of tenants, in the order of the file. `[defaults]` has none.
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

/// Reads the tables of a bulkhead's tenants, in the order of the file.
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

/// Checks that a job can name this tenant. Rejects the empty name, which means no tenant.
pub(crate) fn check_name(name: &str) -> Result<(), ValueError> {
    if name.is_empty() {
        return Err(ValueError::new(
            "the name of a tenant is empty",
            "write [bulkhead.NAME.tenant.TENANT]; jobs without a tenant have the bulkhead's own limits",
        ));
    }
    if name.len() > TENANT_BYTES_MAX {
        return Err(ValueError::new(
            format!("`{}` cannot name a tenant: the name has {} bytes", shown(name), name.len()),
            format!("shorten the name; in a job, a tenant's name has at most {TENANT_BYTES_MAX} bytes"),
        ));
    }
    values::no_nul(&format!("tenant.{}", shown_key(name)), name)
}

/// Reports a value directly below `tenant`. Such keys are most likely meant for all tenants.
fn not_a_tenant(name: &str, is_for_all: bool, value: &DeValue<'_>) -> ValueError {
    let help = match is_for_all {
        true => "set a key for all tenants in [bulkhead.NAME.tenants], or for a single tenant in \
             [bulkhead.NAME.tenant.TENANT]"
            .to_owned(),
        false => format!("write a section [bulkhead.NAME.tenant.{}]", shown_key(name)),
    };
    let found = values::type_name(value);
    ValueError::new(format!("`tenant.{}` must be a table, not {found}", shown_key(name)), help)
}

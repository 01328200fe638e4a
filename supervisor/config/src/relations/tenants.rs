//! Checks tenant keys, which are limits on shared workers, isolation, and the tables of individual tenants. The meaning
//! of these tables depends on whether tenants are isolated. The `policy` crate applies the limits on shared workers.
//! For isolated tenants, the data plane decides which tenants have workers.

use indexmap::IndexMap;

use super::admission::burst;
use super::{Checker, Permits};
use crate::defaults;
use crate::diagnostics::shown_key;
use crate::file::RawBulkhead;
use crate::key;
use crate::keys::tenants::{RawTenant, TenantsKeys};
use crate::reader::{Field, Origin};
use crate::resolved::{report_position, report_position_of};
use crate::table::WithDefault;
use crate::{BulkheadConfig, IsolationConfig, RateLimitConfig, RatePer, TenantConfig, TenantsConfig};

impl Checker<'_> {
    pub(super) fn tenants(&mut self, raw: &TenantsKeys) -> Option<TenantsConfig> {
        self.check_without_effect("max_active", &raw.max_active, &raw.isolate);
        self.check_without_effect("idle", &raw.idle, &raw.isolate);
        self.check_common_share("max_in_flight", &raw.max_in_flight, &raw.isolate);
        self.check_common_share("max_queue", &raw.max_queue, &raw.isolate);
        let presence = raw.presence.given()?;
        let is_empty = raw.isolate.is_absent()
            && raw.max_in_flight.is_absent()
            && raw.max_queue.is_absent()
            && raw.max_active.is_absent()
            && raw.idle.is_absent();
        if is_empty {
            self.problems.report(
                presence.span.clone(),
                "`tenants` sets neither `isolate` nor `max_in_flight` nor `max_queue`",
                "add `isolate = true`, `max_in_flight = 2` or `max_queue = 20`, or remove `tenants`",
            );
        }
        let isolation = IsolationConfig { max_active: raw.max_active.value(), idle: raw.idle.value() };
        let isolation = raw.isolate.value().then_some(isolation);
        let (max_in_flight, max_queue) = (raw.max_in_flight.value(), raw.max_queue.value());
        // `isolate = false` alone sets no limits. The key only turns off isolation that is set in `[defaults]`.
        let sets_something = max_in_flight.is_some() || max_queue.is_some() || isolation.is_some();
        sets_something.then_some(TenantsConfig { max_in_flight, max_queue, isolation })
    }

    /// Rejects a key that has no effect without isolation. A key in `[defaults]` is accepted if the bulkhead's own
    /// table sets `isolate = false`.
    fn check_without_effect<T>(&mut self, name: &str, field: &Field<T>, isolate: &Field<bool>) {
        let Some(given) = field.given() else { return };
        let is_overridden =
            isolate.given().is_some_and(|isolate| isolate.value || isolate.origin > given.origin);
        if is_overridden || isolate.is_invalid() {
            return;
        }
        let elsewhere = match given.origin {
            Origin::Defaults => {
                "; for a bulkhead whose tenants share workers, set `tenants = { isolate = false }`"
            }
            Origin::Own | Origin::Tenant => "",
        };
        self.problems.report(
            given.span.clone(),
            format!("`tenants.{name}` has no effect without `tenants.isolate = true`"),
            format!("add `isolate = true`, or remove `{name}`{elsewhere}"),
        );
    }

    /// Rejects a per-tenant limit on shared workers if tenants are isolated.
    fn check_common_share(&mut self, name: &str, field: &Field<u32>, isolate: &WithDefault<bool>) {
        let isolate = isolate.resolved();
        let Some(given) = field.given() else { return };
        let share = field.resolved(given.value);
        if isolate.value
            && let Some(position) = report_position(&share, &isolate)
        {
            self.problems.report(
                position,
                format!(
                    "`tenants.{name}` ({}) limits a tenant's share of shared workers, but with \
                     `tenants.isolate` ({}) tenants do not share workers",
                    share.with_origin(share.value),
                    isolate.with_origin(true)
                ),
                format!(
                    "remove one of the two keys; with `isolate`, the bulkhead's own `{name}` applies to each tenant"
                ),
            );
        }
    }

    pub(super) fn tenant(&mut self, bulkhead: &RawBulkhead) -> IndexMap<String, TenantConfig> {
        let isolated = isolated(&bulkhead.tenants);
        let mut tenants = IndexMap::new();
        for raw in &bulkhead.tenant {
            match isolated {
                Some(true) => self.check_isolated_tenant(raw, bulkhead),
                Some(false) => self.check_common_tenant(raw, bulkhead),
                None => {}
            }
            tenants.insert(raw.name.clone(), self.tenant_config(raw));
        }
        tenants
    }

    fn tenant_config(&mut self, raw: &RawTenant) -> TenantConfig {
        let raw = &raw.keys;
        let limit = &raw.rate_limit;
        let per_second =
            self.required(&limit.presence, key::TENANT_RATE_LIMIT, ("per_second", &limit.per_second));
        TenantConfig {
            max_in_flight: raw.max_in_flight.value(),
            max_queue: raw.max_queue.value(),
            processes: raw.processes.value(),
            rate_limit: per_second.map(|per_second| RateLimitConfig {
                per_second,
                burst: burst(&limit.burst, per_second),
                per: RatePer::Tenant,
            }),
        }
    }

    /// Checks the table of a tenant that uses shared workers.
    fn check_common_tenant(&mut self, raw: &RawTenant, bulkhead: &RawBulkhead) {
        let label = shown_key(&raw.name);
        if let Some(processes) = raw.keys.processes.given() {
            self.problems.report(
                processes.span.clone(),
                format!(
                    "`tenant.{label}.processes` needs `tenants.isolate = true`: tenants share the workers"
                ),
                "add `tenants = { isolate = true }` to the bulkhead, or remove `processes`",
            );
        }
        let (limit, per) = (&raw.keys.rate_limit.presence, bulkhead.rate_limit.per.resolved());
        if limit.given().is_some()
            && bulkhead.rate_limit.presence.given().is_some()
            && per.value == RatePer::Bulkhead
            && let Some(position) = report_position(&limit.resolved(()), &per)
        {
            self.problems.report(
                position,
                format!(
                    "`tenant.{label}.rate_limit` needs `rate_limit.per = \"tenant\"` (it is {})",
                    per.with_origin(format_args!("\"{}\"", per.value.name()))
                ),
                "add `per = \"tenant\"` to the bulkhead's `rate_limit`, or remove the tenant's `rate_limit`",
            );
        }
    }

    /// Checks the table of an isolated tenant. The rules for a bulkhead's processes, permits and queue also apply to
    /// the tenant.
    fn check_isolated_tenant(&mut self, raw: &RawTenant, bulkhead: &RawBulkhead) {
        if let Some(in_flight) = raw.keys.max_in_flight.given()
            && u64::from(in_flight.value) > defaults::IN_FLIGHT_CEILING
        {
            let max = defaults::IN_FLIGHT_CEILING;
            self.problems.report(
                in_flight.span.clone(),
                format!(
                    "`tenant.{}.max_in_flight` ({}) exceeds {max}: with `tenants.isolate` the limit is per \
                     worker process",
                    shown_key(&raw.name),
                    in_flight.value
                ),
                format!("write `max_in_flight = {max}` or less"),
            );
        }
        self.check_permits(&Permits::of_tenant(raw, bulkhead));
        if raw.keys.processes.given().is_some() || raw.keys.max_in_flight.given().is_some() {
            self.check_adaptive(&bulkhead.adaptive, &Permits::of_tenant(raw, bulkhead));
        }
    }

    /// Checks the total number of worker processes and spares of all tenants.
    pub(super) fn check_workers(&mut self, raw: &RawBulkhead, bulkhead: &BulkheadConfig) {
        let ceiling = defaults::ISOLATED_WORKERS_CEILING;
        let (processes, spares) = (raw.processes.resolved(), raw.start.spares.resolved());
        let max_active = raw.tenants.max_active.resolved();
        let total = bulkhead.workers_max() + bulkhead.spares_max();
        if bulkhead.isolation().is_none() || total <= ceiling {
            return;
        }
        let each = u64::from(processes.value) + u64::from(spares.value);
        if each * u64::from(max_active.value) <= ceiling {
            return self.report_largest_tenant(raw, total);
        }
        let Some(position) = report_position_of(&[&max_active, &processes, &spares]) else { return };
        let per_tenant = format!("`processes` ({})", processes.with_origin(processes.value));
        let (per_tenant, with) = match spares.value {
            0 => (per_tenant, "this many processes"),
            some => (
                format!("({per_tenant} + `start.spares` ({}))", spares.with_origin(some)),
                "this many processes and spares",
            ),
        };
        let max_active = max_active.with_origin(max_active.value);
        self.problems.report(
            position,
            format!("{per_tenant} × `tenants.max_active` ({max_active}) exceeds {ceiling}"),
            format!("with {with}, set `max_active` to at most {}", ceiling / each),
        );
    }

    /// Reports that there are too many worker processes. The position is that of the `processes` key of the tenant with
    /// the most processes, because the bulkhead's own keys alone would not exceed the limit.
    fn report_largest_tenant(&mut self, raw: &RawBulkhead, workers: u64) {
        if raw.processes.is_invalid() || raw.tenants.max_active.is_invalid() {
            return;
        }
        let own = raw.tenant.iter().filter_map(|tenant| Some((tenant, tenant.keys.processes.given()?)));
        let Some((largest, processes)) = own.max_by_key(|(_, processes)| processes.value) else { return };
        self.problems.report(
            processes.span.clone(),
            format!(
                "with `tenant.{}.processes` ({}) there can be {workers} workers at the same time, above {}",
                shown_key(&largest.name),
                processes.value,
                defaults::ISOLATED_WORKERS_CEILING
            ),
            "reduce `processes` (here or for other tenants), `start.spares` or `tenants.max_active`",
        );
    }
}

/// Returns whether tenants have separate workers, or `None` if the value of `isolate` is invalid.
fn isolated(raw: &TenantsKeys) -> Option<bool> {
    match (&*raw.isolate, &raw.presence) {
        (Field::Given(isolate), _) => Some(isolate.value),
        (Field::Absent, Field::Absent | Field::Given(_)) => Some(raw.isolate.default),
        (Field::Absent, Field::Invalid) | (Field::Invalid, _) => None,
    }
}

//! The part of a bulkhead that is about who is let in. A table that switches something on says whether it
//! is there, apart from what is in it: `here` is the place of its name.

use std::time::Duration;

use super::tenants::{self, RawTenant};
use crate::reader::{Arguments, Field, TableReader};
use crate::schema;

/// `overflow`, and the tables of admission control.
pub(crate) struct RawAdmission {
    pub(crate) overflow: Field<&'static str>,
    pub(crate) fallback: Field<Arguments>,
    pub(crate) priority: RawPriority,
    pub(crate) pressure: RawPressure,
    pub(crate) rate_limit: RawRateLimit,
    pub(crate) tenants: RawTenants,
    /// In the order of the file; `[defaults]` have none.
    pub(crate) tenant: Vec<RawTenant>,
    pub(crate) breaker: RawBreaker,
    pub(crate) retry: RawRetry,
    pub(crate) poison: RawPoison,
}

impl RawAdmission {
    pub(super) fn read(bulkhead: &mut TableReader<'_, '_>) -> Self {
        Self {
            overflow: bulkhead.word("overflow"),
            fallback: bulkhead.names("fallback"),
            priority: RawPriority::read(bulkhead),
            pressure: RawPressure::read(bulkhead),
            rate_limit: RawRateLimit::read(bulkhead),
            tenants: RawTenants::read(bulkhead),
            tenant: tenants::read(bulkhead),
            breaker: RawBreaker::read(bulkhead),
            retry: RawRetry::read(bulkhead),
            poison: RawPoison::read(bulkhead),
        }
    }

    pub(super) fn over(self, defaults: &Self) -> Self {
        Self {
            overflow: self.overflow.or(&defaults.overflow),
            fallback: self.fallback.or(&defaults.fallback),
            priority: self.priority.over(&defaults.priority),
            pressure: self.pressure.over(&defaults.pressure),
            rate_limit: self.rate_limit.over(&defaults.rate_limit),
            tenants: self.tenants.over(&defaults.tenants),
            tenant: self.tenant,
            breaker: self.breaker.over(&defaults.breaker),
            retry: self.retry.over(&defaults.retry),
            poison: self.poison.over(&defaults.poison),
        }
    }
}

/// A table whose keys are fields: how each is read, and that it is merged with `[defaults]` key by key.
macro_rules! raw_table {
    ($(#[$about:meta])* $raw:ident, $name:literal, $schema:expr, { $($key:ident: $kind:ident -> $type:ty,)+ }) => {
        $(#[$about])*
        #[derive(Default)]
        pub(crate) struct $raw {
            pub(crate) here: Field<()>,
            $(pub(crate) $key: Field<$type>,)+
        }

        impl $raw {
            pub(super) fn read(bulkhead: &mut TableReader<'_, '_>) -> Self {
                let here = bulkhead.presence($name, $schema);
                match bulkhead.table($name, $schema) {
                    Some(mut table) => Self { here, $($key: table.$kind(stringify!($key)),)+ },
                    None => Self { here, ..Self::default() },
                }
            }

            pub(super) fn over(self, defaults: &Self) -> Self {
                Self { here: self.here.or(&defaults.here), $($key: self.$key.or(&defaults.$key),)+ }
            }
        }
    };
}
pub(super) use raw_table;

raw_table!(
    /// `priority`.
    RawPriority, "priority", schema::PRIORITY, {
        critical_reserve: share -> f64,
    }
);
raw_table!(
    /// `pressure`.
    RawPressure, "pressure", schema::PRESSURE, {
        warn: share -> f64,
        reject: share -> f64,
    }
);
raw_table!(
    /// `rate_limit`.
    RawRateLimit, "rate_limit", schema::RATE_LIMIT, {
        per_second: number -> f64,
        burst: count -> u64,
        per: word -> &'static str,
    }
);

impl RawRateLimit {
    /// The table of one tenant has no `per`.
    pub(super) fn read_of_tenant(tenant: &mut TableReader<'_, '_>) -> Self {
        let here = tenant.presence("rate_limit", schema::TENANT_RATE_LIMIT);
        match tenant.table("rate_limit", schema::TENANT_RATE_LIMIT) {
            Some(mut table) => Self {
                here,
                per_second: table.number("per_second"),
                burst: table.count("burst"),
                per: Field::Absent,
            },
            None => Self { here, ..Self::default() },
        }
    }
}

raw_table!(
    /// `tenants`.
    RawTenants, "tenants", schema::TENANTS, {
        isolate: boolean -> bool,
        max_active: count -> u64,
        idle: duration -> Duration,
        max_in_flight: count -> u64,
        max_queue: count -> u64,
    }
);
raw_table!(
    /// `breaker`.
    RawBreaker, "breaker", schema::BREAKER, {
        window: duration -> Duration,
        min_calls: count -> u64,
        failure_rate: share -> f64,
        slow_call: duration -> Duration,
        slow_rate: share -> f64,
        open_for: duration -> Duration,
        probes: count -> u64,
    }
);
raw_table!(
    /// `retry`.
    RawRetry, "retry", schema::RETRY, {
        attempts: count -> u64,
        budget: share -> f64,
    }
);
raw_table!(
    /// `poison`.
    RawPoison, "poison", schema::POISON, {
        crashes: count -> u64,
        within: duration -> Duration,
    }
);

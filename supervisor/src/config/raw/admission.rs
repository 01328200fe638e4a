//! The part of a bulkhead that is about who is let in. A table that switches something on says whether it
//! is there, apart from what is in it: `here` is the place of its name.

use std::time::Duration;

use crate::config::reader::{Field, TableReader};
use crate::config::schema;

/// `overflow`, and the tables of admission control.
pub(in crate::config) struct RawAdmission {
    pub(in crate::config) overflow: Field<&'static str>,
    pub(in crate::config) priority: RawPriority,
    pub(in crate::config) pressure: RawPressure,
    pub(in crate::config) rate_limit: RawRateLimit,
    pub(in crate::config) tenants: RawTenants,
    pub(in crate::config) breaker: RawBreaker,
}

impl RawAdmission {
    pub(super) fn read(bulkhead: &mut TableReader<'_, '_>) -> Self {
        Self {
            overflow: bulkhead.word("overflow"),
            priority: RawPriority::read(bulkhead),
            pressure: RawPressure::read(bulkhead),
            rate_limit: RawRateLimit::read(bulkhead),
            tenants: RawTenants::read(bulkhead),
            breaker: RawBreaker::read(bulkhead),
        }
    }

    pub(super) fn over(self, defaults: &Self) -> Self {
        Self {
            overflow: self.overflow.or(&defaults.overflow),
            priority: self.priority.over(&defaults.priority),
            pressure: self.pressure.over(&defaults.pressure),
            rate_limit: self.rate_limit.over(&defaults.rate_limit),
            tenants: self.tenants.over(&defaults.tenants),
            breaker: self.breaker.over(&defaults.breaker),
        }
    }
}

/// A table whose keys are fields: how each is read, and that it is merged with `[defaults]` key by key.
macro_rules! raw_table {
    ($(#[$about:meta])* $raw:ident, $name:literal, $schema:expr, { $($key:ident: $kind:ident -> $type:ty,)+ }) => {
        $(#[$about])*
        #[derive(Default)]
        pub(in crate::config) struct $raw {
            pub(in crate::config) here: Field<()>,
            $(pub(in crate::config) $key: Field<$type>,)+
        }

        impl $raw {
            fn read(bulkhead: &mut TableReader<'_, '_>) -> Self {
                let here = bulkhead.presence($name, $schema);
                match bulkhead.table($name, $schema) {
                    Some(mut table) => Self { here, $($key: table.$kind(stringify!($key)),)+ },
                    None => Self { here, ..Self::default() },
                }
            }

            fn over(self, defaults: &Self) -> Self {
                Self { here: self.here.or(&defaults.here), $($key: self.$key.or(&defaults.$key),)+ }
            }
        }
    };
}

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
raw_table!(
    /// `tenants`.
    RawTenants, "tenants", schema::TENANTS, {
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

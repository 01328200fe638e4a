//! Implements reading and default values for each type that keys can have, including vocabularies defined in `policy`.
//! The `section!` and `table!` macros use these implementations. `values` checks the range of a value, and `keys`
//! declares the keys.

use std::borrow::Cow;
use std::time::Duration;

use bulkhead_policy::{AdaptiveMode, Overflow, RatePer, RestartPolicy, StartMode};

use super::{Scalar, Value};
use crate::ids::UidRange;
use crate::key::{DefaultValue, Kind};
use crate::reader::{Arguments, Environment, Field, TableReader};
use crate::{Layer, Network, Profile, Role, values};

/// Implements the table traits for enums whose values are written as words.
macro_rules! word_types {
    ($($type:ty),+) => {$(
        impl Value for $type {
            fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
                table.read_value(name, values::word)
            }
        }

        impl Scalar for $type {
            fn default_value(&self, _: Kind) -> DefaultValue {
                DefaultValue::Word(self.name())
            }
        }
    )+};
}

word_types!(RestartPolicy, Overflow, RatePer, AdaptiveMode, StartMode, Profile, Layer, Role);

/// Implements the table traits for types whose values are read and formatted by fixed functions.
macro_rules! scalar_types {
    ($($type:ty: $read:path, |$value:ident| $default_value:expr;)+) => {
        $(
            impl Value for $type {
                fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
                    table.read_value(name, $read)
                }
            }

            impl Scalar for $type {
                fn default_value(&self, _: Kind) -> DefaultValue {
                    let $value = *self;
                    $default_value
                }
            }
        )+
    };
}

scalar_types! {
    Duration: values::duration, |duration| DefaultValue::Duration(duration);
    usize: values::count, |count| DefaultValue::Count(count as u64);
    bool: values::boolean, |is_on| DefaultValue::Boolean(is_on);
}

impl Value for u64 {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, |key, value| match key.kind {
            Kind::Size { .. } => values::size(key, value),
            _ => values::count(key, value),
        })
    }
}

impl Scalar for u64 {
    fn default_value(&self, kind: Kind) -> DefaultValue {
        if matches!(kind, Kind::Size { .. }) { DefaultValue::Size(*self) } else { DefaultValue::Count(*self) }
    }
}

impl Value for u32 {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, |key, value| match key.kind {
            Kind::Mode => values::mode(key, value),
            _ => values::count(key, value),
        })
    }
}

impl Scalar for u32 {
    fn default_value(&self, kind: Kind) -> DefaultValue {
        if kind == Kind::Mode { DefaultValue::Mode(*self) } else { DefaultValue::Count(u64::from(*self)) }
    }
}

impl Value for f64 {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, |key, value| match key.kind {
            Kind::Number(_) => values::number(key, value),
            _ => values::share(key, value),
        })
    }
}

impl Scalar for f64 {
    fn default_value(&self, kind: Kind) -> DefaultValue {
        if matches!(kind, Kind::Number(_)) { DefaultValue::Number(*self) } else { DefaultValue::Share(*self) }
    }
}

impl Value for String {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, values::text)
    }
}

/// Type of string values whose keys have a default.
impl Value for Cow<'static, str> {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, |key, value| values::text(key, value).map(Cow::Owned))
    }
}

impl Scalar for Cow<'static, str> {
    fn default_value(&self, _: Kind) -> DefaultValue {
        match self {
            Cow::Borrowed(text) => DefaultValue::Word(text),
            Cow::Owned(_) => DefaultValue::Described("as written"),
        }
    }
}

impl Value for Vec<u8> {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, values::statuses)
    }
}

impl Value for UidRange {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.read_value(name, values::ids)
    }
}

impl Value for Network {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.network(name)
    }
}

impl Scalar for Network {
    fn default_value(&self, _: Kind) -> DefaultValue {
        match self {
            Self::None => DefaultValue::Boolean(false),
            Self::All => DefaultValue::Boolean(true),
            Self::Connections { .. } => DefaultValue::Described("as written"),
        }
    }
}

impl Value for Arguments {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.strings(name)
    }
}

impl Value for Environment {
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.environment(name)
    }

    /// Merges the environment variables of a bulkhead, or the files that contain their values, with those in
    /// `[defaults]`. The bulkhead's own entries take precedence.
    fn merge(own: &Field<Self>, defaults: &Field<Self>) -> Field<Self> {
        let mut merged = own.or(defaults);
        if let (Field::Given(merged), Some(defaults)) = (&mut merged, defaults.given()) {
            for (name, given) in &defaults.value {
                merged.value.entry(name.clone()).or_insert_with(|| given.clone());
            }
        }
        merged
    }
}

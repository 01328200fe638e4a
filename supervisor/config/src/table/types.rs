//! Types of values, including the word types of `policy`.

use std::borrow::Cow;
use std::time::Duration;

use bulkhead_policy::{AdaptiveMode, Overflow, RatePer, RestartPolicy, StartMode};

use super::{Scalar, Value};
use crate::ids::UidRange;
use crate::key::{Kind, Preset};
use crate::reader::{Arguments, Environment, Field, TableReader};
use crate::{Layer, Profile, values};

/// Implements the traits for word types.
macro_rules! words {
    ($($type:ty),+) => {$(
        impl Value for $type {
            fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
                table.take(name, values::word)
            }
        }

        impl Scalar for $type {
            fn preset(&self, _: Kind) -> Preset {
                Preset::Word(self.name())
            }
        }
    )+};
}

words!(RestartPolicy, Overflow, RatePer, AdaptiveMode, StartMode, Profile, Layer);

/// Implements the traits for types with one reading function and one written form.
macro_rules! scalars {
    ($($type:ty: $read:path, |$value:ident| $preset:expr;)+) => {
        $(
            impl Value for $type {
                fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
                    table.take(name, $read)
                }
            }

            impl Scalar for $type {
                fn preset(&self, _: Kind) -> Preset {
                    let $value = *self;
                    $preset
                }
            }
        )+
    };
}

scalars! {
    Duration: values::duration, |duration| Preset::Duration(duration);
    usize: values::count, |count| Preset::Count(count as u64);
    bool: values::boolean, |is_on| Preset::Boolean(is_on);
}

impl Value for u64 {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, |key, value| match key.kind {
            Kind::Size { .. } => values::size(key, value),
            _ => values::count(key, value),
        })
    }
}

impl Scalar for u64 {
    fn preset(&self, kind: Kind) -> Preset {
        if matches!(kind, Kind::Size { .. }) { Preset::Size(*self) } else { Preset::Count(*self) }
    }
}

impl Value for u32 {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, |key, value| match key.kind {
            Kind::Mode => values::mode(key, value),
            _ => values::count(key, value),
        })
    }
}

impl Scalar for u32 {
    fn preset(&self, kind: Kind) -> Preset {
        if kind == Kind::Mode { Preset::Mode(*self) } else { Preset::Count(u64::from(*self)) }
    }
}

impl Value for f64 {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, |key, value| match key.kind {
            Kind::Number(_) => values::number(key, value),
            _ => values::share(key, value),
        })
    }
}

impl Scalar for f64 {
    fn preset(&self, kind: Kind) -> Preset {
        if matches!(kind, Kind::Number(_)) { Preset::Number(*self) } else { Preset::Share(*self) }
    }
}

impl Value for String {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, values::text)
    }
}

/// A text with a default.
impl Value for Cow<'static, str> {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, |key, value| values::text(key, value).map(Cow::Owned))
    }
}

impl Scalar for Cow<'static, str> {
    fn preset(&self, _: Kind) -> Preset {
        match self {
            Cow::Borrowed(text) => Preset::Word(text),
            Cow::Owned(_) => Preset::Described("as written"),
        }
    }
}

impl Value for Vec<u8> {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, values::statuses)
    }
}

impl Value for UidRange {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.take(name, values::ids)
    }
}

impl Value for Arguments {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.strings(name)
    }
}

impl Value for Environment {
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self> {
        table.environment(name)
    }

    /// Merges variable by variable.
    fn over(own: &Field<Self>, defaults: &Field<Self>) -> Field<Self> {
        let mut merged = own.or(defaults);
        if let (Field::Given(merged), Some(defaults)) = (&mut merged, defaults.given()) {
            for (name, value) in &defaults.value {
                merged.value.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        merged
    }
}

//! Rows of keys. A row contains the name of a key, the type and the kind of its value, the default, and a
//! description. The rows define the reader, the merge with `[defaults]`, the reference, the JSON schema, the
//! output of `--check`, and the effect of a reload.
//!
//! ```text
//! /// The sentence of the reference.
//! open_for: Duration as at_least(SOME), default Duration::from_secs(5);
//! /// A key without a default says in words what holds without it, and has an example.
//! slow_call: Duration as at_least(SOME), without "off", such as "\"5s\"";
//! ```
//!
//! `reload` gives the effect of a changed value at a reload if it does not apply immediately.
//! `kept elsewhere` means that the checked value is not in a field named like the key.

/// Declares a table; see the module documentation. Tables inside the table follow after the rows.
macro_rules! table {
    (
        $(#[$about:meta])*
        $raw:ident, $path:expr;
        $(
            $(#[doc = $sentence:literal])+
            $key:ident: $type:ty as $kind:expr, $how:ident $what:expr
            $(, such as $example:expr)? $(, reload $reload:ident)? $(, kept $elsewhere:ident)?;
        )*
        $(tables { $($inner:ident: $part:ty,)+ })?
    ) => {
        $(#[$about])*
        pub(crate) struct $raw {
            /// Position of the table's name, if the table is present.
            pub(crate) here: $crate::reader::Field<()>,
            $($(#[doc = $sentence])+ pub(crate) $key: $crate::table::slot!($how $type),)*
            $($(pub(crate) $inner: $part,)+)?
        }

        impl $crate::table::Table for $raw {
            const PATH: &'static str = $path;

            fn keys() -> Vec<$crate::key::Key> {
                let rows: Vec<$crate::key::Key> = vec![$($crate::key::Key {
                    table: $path,
                    name: stringify!($key),
                    kind: $kind,
                    default: $crate::table::preset!($how $what; $type; $kind),
                    example: $crate::table::first!($($example,)? ""),
                    about: concat!($($sentence),+).trim_ascii_start(),
                    on_reload: $crate::table::on_reload!($($reload)?),
                },)*];
                let tables: Vec<$crate::key::Key> =
                    vec![$($($crate::key::Key::of_table($path, stringify!($inner)),)+)?];
                let inside: Vec<Vec<$crate::key::Key>> =
                    vec![$($(<$part as $crate::table::Part>::keys_inside(),)+)?];
                rows.into_iter().chain(tables).chain(inside.into_iter().flatten()).collect()
            }

            fn read(
                here: $crate::reader::Field<()>,
                mut table: Option<$crate::reader::TableReader<'_, '_>>,
            ) -> Self {
                Self {
                    here,
                    $($key: $crate::table::slot_of!($how $what; $crate::table::take(&mut table, stringify!($key))),)*
                    $($($inner: $crate::table::Part::read_inside(table.as_mut(), stringify!($inner)),)+)?
                }
            }

            fn over(self, defaults: &Self) -> Self {
                Self {
                    here: self.here.or(&defaults.here),
                    $($key: self.$key.over(&defaults.$key),)*
                    $($($inner: $crate::table::Part::over_part(self.$inner, &defaults.$inner),)+)?
                }
            }
        }
    };
}
pub(crate) use table;

/// Declares a table whose checked type has fields named like the keys and the inner tables. With `by rows`
/// the checked values are built from the rows alone; otherwise `relations` builds them.
macro_rules! section {
    (
        $(#[$about:meta])*
        $raw:ident => $checked:ty, $path:expr $(, by $rows:ident)?;
        $(
            $(#[doc = $sentence:literal])+
            $key:ident: $type:ty as $kind:expr, $how:ident $what:expr
            $(, such as $example:expr)? $(, reload $reload:ident)? $(, kept $elsewhere:ident)?;
        )*
        $(tables { $($inner:ident: $part:ty,)+ })?
    ) => {
        $crate::table::table! {
            $(#[$about])*
            $raw, $path;
            $(
                $(#[doc = $sentence])+
                $key: $type as $kind, $how $what $(, such as $example)? $(, reload $reload)?;
            )*
            $(tables { $($inner: $part,)+ })?
        }

        $crate::table::checked!($($rows)?; $raw => $checked; $($key)*);

        impl $crate::table::Section for $checked {
            fn entries(&self) -> Vec<$crate::table::Entry> {
                let rows = [$($crate::table::entry!($($elsewhere)?; $how $what; self.$key; stringify!($key); $kind),)*];
                let tables: Vec<$crate::table::Entry> = vec![$($($crate::table::Entry {
                    key: stringify!($inner),
                    value: $crate::table::Write::written(&self.$inner, $crate::key::Kind::Table),
                    without: "off",
                },)+)?];
                rows.into_iter().flatten().chain(tables).collect()
            }
        }

        impl $crate::table::Write for $checked {
            fn written(&self, _: $crate::key::Kind) -> Option<$crate::table::Written> {
                let entries = $crate::table::Section::entries(self);
                Some($crate::table::Written::Toml($crate::table::inline(entries)))
            }
        }
    };
}
pub(crate) use section;

// Helpers that expand `default` and `without`.

macro_rules! slot {
    (default $type:ty) => { $crate::table::WithDefault<$type> };
    (without $type:ty) => { $crate::reader::Field<$type> };
}
pub(crate) use slot;

macro_rules! slot_of {
    (default $default:expr; $field:expr) => {
        $crate::table::WithDefault { field: $field, default: $default }
    };
    (without $words:expr; $field:expr) => {
        $field
    };
}
pub(crate) use slot_of;

macro_rules! preset {
    (default $default:expr; $type:ty; $kind:expr) => {{
        let default: $type = $default;
        $crate::table::Scalar::preset(&default, $kind)
    }};
    (without $words:expr; $type:ty; $kind:expr) => {
        $crate::key::Preset::Described($words)
    };
}
pub(crate) use preset;

macro_rules! entry {
    (elsewhere; $how:ident $what:expr; $value:expr; $name:expr; $kind:expr) => { None };
    (; default $default:expr; $value:expr; $name:expr; $kind:expr) => {
        $crate::table::entry!(; without ""; $value; $name; $kind)
    };
    (; without $words:expr; $value:expr; $name:expr; $kind:expr) => {
        Some($crate::table::Entry {
            key: $name,
            value: $crate::table::Write::written(&$value, $kind),
            without: $words,
        })
    };
}
pub(crate) use entry;

macro_rules! checked {
    (; $raw:ident => $checked:ty; $($key:ident)*) => {};
    (rows; $raw:ident => $checked:ty; $($key:ident)*) => {
        impl $crate::table::ByRows for $raw {
            type Checked = $checked;

            fn here(&self) -> &$crate::reader::Field<()> {
                &self.here
            }

            fn checked(&self) -> $checked {
                type Checked = $checked;
                Checked { $($key: self.$key.value(),)* }
            }
        }
    };
}
pub(crate) use checked;

macro_rules! first {
    ($first:expr $(, $rest:expr)*) => {
        $first
    };
}
pub(crate) use first;

macro_rules! on_reload {
    () => {
        $crate::key::OnReload::Holds
    };
    ($other:ident) => {
        $crate::key::OnReload::$other
    };
}
pub(crate) use on_reload;

//! Macros that declare tables. A table has one row per key, with the key's name, the type and kind of its value, the
//! default, and a description. The code that reads, merges and prints a key, its documentation and JSON schema, and the
//! effect of a reload are all generated from this row.
//!
//! ```text
//! /// The sentence of the reference.
//! open_for: Duration as at_least(SOME), default Duration::from_secs(5);
//! /// A key without a default describes in words the behaviour without it, and has an example.
//! slow_call: Duration as at_least(SOME), without "off", such as "\"5s\"";
//! ```
//!
//! `reload` declares the effect of a reload that changes the value. Without `reload`, the new value takes effect
//! immediately. `no field` means that the validated type has no field with the name of the key.

/// Declares a table, in the syntax that the module documentation describes. Inner tables are declared after the rows.
macro_rules! table {
    (
        $(#[$about:meta])*
        $raw:ident, $path:expr;
        $(
            $(#[doc = $sentence:literal])+
            $key:ident: $type:ty as $kind:expr, $mode:ident $arg:expr
            $(, such as $example:expr)? $(, reload $reload:ident)? $(, no $no_field:ident)?;
        )*
        $(tables { $($inner:ident: $part:ty,)+ })?
    ) => {
        $(#[$about])*
        pub(crate) struct $raw {
            /// Position of the table's name in the file, if the table is present.
            pub(crate) presence: $crate::reader::Field<()>,
            $($(#[doc = $sentence])+ pub(crate) $key: $crate::table::field_type!($mode $type),)*
            $($(pub(crate) $inner: $part,)+)?
        }

        impl $crate::table::Table for $raw {
            const PATH: &'static str = $path;

            fn keys() -> Vec<$crate::key::Key> {
                let rows: Vec<$crate::key::Key> = vec![$($crate::key::Key {
                    table: $path,
                    name: stringify!($key),
                    kind: $kind,
                    default: $crate::table::default_value!($mode $arg; $type; $kind),
                    example: $crate::table::first_of!($($example,)? ""),
                    about: concat!($($sentence),+).trim_ascii_start(),
                    on_reload: $crate::table::on_reload!($($reload)?),
                },)*];
                let tables: Vec<$crate::key::Key> =
                    vec![$($($crate::key::Key::of_table($path, stringify!($inner)),)+)?];
                let inside: Vec<Vec<$crate::key::Key>> =
                    vec![$($(<$part as $crate::table::NestedTable>::nested_keys(),)+)?];
                rows.into_iter().chain(tables).chain(inside.into_iter().flatten()).collect()
            }

            fn read(
                presence: $crate::reader::Field<()>,
                mut table: Option<$crate::reader::TableReader<'_, '_>>,
            ) -> Self {
                Self {
                    presence,
                    $($key: $crate::table::field_value!($mode $arg; $crate::table::read_optional(&mut table, stringify!($key))),)*
                    $($($inner: $crate::table::NestedTable::read_nested(table.as_mut(), stringify!($inner)),)+)?
                }
            }

            fn merge(self, defaults: &Self) -> Self {
                Self {
                    presence: self.presence.or(&defaults.presence),
                    $($key: self.$key.merge(&defaults.$key),)*
                    $($($inner: $crate::table::NestedTable::merge_nested(self.$inner, &defaults.$inner),)+)?
                }
            }
        }
    };
}
pub(crate) use table;

/// Declares a table whose validated type has a field of the same name for each key and each inner table. With `by
/// rows`, the macro also generates the conversion to the validated type. Without it, the conversion must be written in
/// `relations`.
macro_rules! section {
    (
        $(#[$about:meta])*
        $raw:ident => $checked:ty, $path:expr $(, by $rows:ident)?;
        $(
            $(#[doc = $sentence:literal])+
            $key:ident: $type:ty as $kind:expr, $mode:ident $arg:expr
            $(, such as $example:expr)? $(, reload $reload:ident)? $(, no $no_field:ident)?;
        )*
        $(tables { $($inner:ident: $part:ty,)+ })?
    ) => {
        $crate::table::table! {
            $(#[$about])*
            $raw, $path;
            $(
                $(#[doc = $sentence])+
                $key: $type as $kind, $mode $arg $(, such as $example)? $(, reload $reload)?;
            )*
            $(tables { $($inner: $part,)+ })?
        }

        $crate::table::checked!($($rows)?; $raw => $checked; $($key)*);

        impl $crate::table::Section for $checked {
            fn key_values(&self) -> Vec<$crate::table::KeyValue> {
                let rows = [$($crate::table::key_value!($($no_field)?; $mode $arg; self.$key; stringify!($key); $kind),)*];
                let tables: Vec<$crate::table::KeyValue> = vec![$($($crate::table::KeyValue {
                    key: stringify!($inner),
                    value: $crate::table::Write::written(&self.$inner, $crate::key::Kind::Table),
                    without: "off",
                },)+)?];
                rows.into_iter().flatten().chain(tables).collect()
            }
        }

        impl $crate::table::Write for $checked {
            fn written(&self, _: $crate::key::Kind) -> Option<$crate::table::Written> {
                let entries = $crate::table::Section::key_values(self);
                Some($crate::table::Written::Toml($crate::table::inline_table(entries)))
            }
        }
    };
}
pub(crate) use section;

// Helper macros that distinguish rows with `default` from rows with `without`.

macro_rules! field_type {
    (default $type:ty) => { $crate::table::WithDefault<$type> };
    (without $type:ty) => { $crate::reader::Field<$type> };
}
pub(crate) use field_type;

macro_rules! field_value {
    (default $default:expr; $field:expr) => {
        $crate::table::WithDefault { field: $field, default: $default }
    };
    (without $words:expr; $field:expr) => {
        $field
    };
}
pub(crate) use field_value;

macro_rules! default_value {
    (default $default:expr; $type:ty; $kind:expr) => {{
        let default: $type = $default;
        $crate::table::Scalar::default_value(&default, $kind)
    }};
    (without $words:expr; $type:ty; $kind:expr) => {
        $crate::key::DefaultValue::Described($words)
    };
}
pub(crate) use default_value;

macro_rules! key_value {
    (field; $mode:ident $arg:expr; $value:expr; $name:expr; $kind:expr) => { None };
    (; default $default:expr; $value:expr; $name:expr; $kind:expr) => {
        $crate::table::key_value!(; without ""; $value; $name; $kind)
    };
    (; without $words:expr; $value:expr; $name:expr; $kind:expr) => {
        Some($crate::table::KeyValue {
            key: $name,
            value: $crate::table::Write::written(&$value, $kind),
            without: $words,
        })
    };
}
pub(crate) use key_value;

macro_rules! checked {
    (; $raw:ident => $checked:ty; $($key:ident)*) => {};
    (rows; $raw:ident => $checked:ty; $($key:ident)*) => {
        impl $crate::table::ByRows for $raw {
            type Checked = $checked;

            fn presence(&self) -> &$crate::reader::Field<()> {
                &self.presence
            }

            fn checked(&self) -> $checked {
                type Checked = $checked;
                Checked { $($key: self.$key.value(),)* }
            }
        }
    };
}
pub(crate) use checked;

macro_rules! first_of {
    ($first:expr $(, $rest:expr)*) => {
        $first
    };
}
pub(crate) use first_of;

macro_rules! on_reload {
    () => {
        $crate::key::OnReload::Applies
    };
    ($other:ident) => {
        $crate::key::OnReload::$other
    };
}
pub(crate) use on_reload;

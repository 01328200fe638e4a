//! Defines the traits for reading a table, merging it with `[defaults]`, and writing it. The macros in `rows` generate
//! the implementations from the declarations in `keys`, and `types` contains the value types. `reader` and `values`
//! parse the TOML, and `relations` checks rules that involve several keys.

mod rows;
mod types;

use std::ops::Deref;

use bulkhead_shared::Vocabulary;
pub(crate) use rows::{
    checked, default_value, field_type, field_value, first_of, key_value, on_reload, section, table,
};
use serde::Serializer;
use serde::ser::SerializeMap as _;

use crate::key::{DefaultValue, Key, Kind};
use crate::reader::{Field, TableReader};
use crate::resolved::Resolved;

/// A type of value that can be read from the configuration file.
pub(crate) trait Value: Clone {
    /// Reads the value of the key `name` from a table. Reports an error if the value is invalid.
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self>;

    /// Merges the value in a bulkhead's table with the value in `[defaults]`.
    fn merge(own: &Field<Self>, defaults: &Field<Self>) -> Field<Self> {
        own.or(defaults)
    }
}

/// A type of value that can be the default of a key.
pub(crate) trait Scalar {
    fn default_value(&self, kind: Kind) -> DefaultValue;
}

/// A validated value in a form that can be written as TOML or JSON.
pub(crate) enum Written {
    Scalar(DefaultValue),
    Toml(String),
}

impl Written {
    pub(crate) fn toml(self) -> Option<String> {
        match self {
            Self::Scalar(default_value) => default_value.toml(),
            Self::Toml(toml) => Some(toml),
        }
    }
}

/// A type whose validated values can be written as TOML or JSON.
pub(crate) trait Write {
    /// Returns the formatted value, or `None` if the key should be omitted.
    fn written(&self, kind: Kind) -> Option<Written>;
}

impl<T: Scalar> Write for T {
    fn written(&self, kind: Kind) -> Option<Written> {
        Some(Written::Scalar(self.default_value(kind)))
    }
}

impl<T: Write> Write for Option<T> {
    fn written(&self, kind: Kind) -> Option<Written> {
        self.as_ref()?.written(kind)
    }
}

/// Value of a key in the file, together with the key's default.
#[derive(Clone)]
pub(crate) struct WithDefault<T> {
    pub(crate) field: Field<T>,
    pub(crate) default: T,
}

impl<T> Deref for WithDefault<T> {
    type Target = Field<T>;

    fn deref(&self) -> &Field<T> {
        &self.field
    }
}

impl<T: Clone> WithDefault<T> {
    /// Returns the value in the file, or the default.
    pub(crate) fn value(&self) -> T {
        self.field.value_or(self.default.clone())
    }

    /// Returns the value in the file or the default, and the source of the returned value.
    pub(crate) fn resolved(&self) -> Resolved<T> {
        self.field.resolved(self.default.clone())
    }
}

impl<T: Value> Field<T> {
    /// Merges the value in a bulkhead's table with the value in `[defaults]`.
    pub(crate) fn merge(self, defaults: &Self) -> Self {
        T::merge(&self, defaults)
    }
}

impl<T: Value> WithDefault<T> {
    /// Merges the value in a bulkhead's table with the value in `[defaults]`.
    pub(crate) fn merge(self, defaults: &Self) -> Self {
        Self { field: self.field.merge(&defaults.field), default: self.default }
    }
}

/// A table of the configuration file, with the position of each value.
pub(crate) trait Table: Sized {
    /// Name of the table in the schema, such as `bulkhead.NAME.restart`.
    const PATH: &'static str;

    /// Returns the keys of this table, followed by the keys of its inner tables.
    fn keys() -> Vec<Key>;

    /// Reads the keys of a table. If the table is missing from the file, all keys are absent.
    fn read(presence: Field<()>, table: Option<TableReader<'_, '_>>) -> Self;

    /// Merges this table with the table in `[defaults]`, key by key.
    fn merge(self, defaults: &Self) -> Self;
}

/// A table whose keys can be validated independently of each other.
pub(crate) trait ByRows {
    type Checked;

    /// Returns the position of the table's name in the file, if the table is present.
    fn presence(&self) -> &Field<()>;

    /// Returns the validated values.
    fn checked(&self) -> Self::Checked;

    /// Returns the validated values, if the table is present.
    fn checked_if_present(&self) -> Option<Self::Checked> {
        self.presence().given().map(|_| self.checked())
    }
}

/// A table inside another table, or a group of such tables with user-defined names.
pub(crate) trait NestedTable: Sized {
    /// Returns the keys of the inner table; see [`Table::keys`].
    fn nested_keys() -> Vec<Key>;

    /// Reads the inner table `name`. Both the inner table and the table that contains it can be absent.
    fn read_nested(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self;

    /// Merges the inner table with the inner table of the same name in `[defaults]`; see [`Table::merge`].
    fn merge_nested(self, defaults: &Self) -> Self;
}

impl<T: Table> NestedTable for T {
    fn nested_keys() -> Vec<Key> {
        Self::keys()
    }

    fn read_nested(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self {
        let Some(table) = table else { return Self::read(Field::Absent, None) };
        let presence = table.presence(name, Self::PATH);
        Self::read(presence, table.table(name, Self::PATH))
    }

    fn merge_nested(self, defaults: &Self) -> Self {
        self.merge(defaults)
    }
}

/// Reads a key. If the table itself is absent, returns an absent field.
pub(crate) fn read_optional<T: Value>(table: &mut Option<TableReader<'_, '_>>, name: &str) -> Field<T> {
    table.as_mut().map_or(Field::Absent, |table| T::read(table, name))
}

/// A table whose validated values can be listed together with their keys.
pub(crate) trait Section {
    /// Returns all keys of the table with their values.
    fn key_values(&self) -> Vec<KeyValue>;
}

/// A table key and its validated value.
pub(crate) struct KeyValue {
    pub(crate) key: &'static str,
    /// Formatted value of the key, or `None` if the key is not set.
    pub(crate) value: Option<Written>,
    /// Description of the behaviour if the key is not set.
    pub(crate) without: &'static str,
}

/// Formats the keys that have a value as an inline TOML table.
pub(crate) fn inline_table(entries: Vec<KeyValue>) -> String {
    let set = |KeyValue { key, value, .. }| Some(format!("{key} = {}", value?.toml()?));
    in_braces(&entries.into_iter().filter_map(set).collect::<Vec<_>>())
}

pub(crate) fn in_braces(entries: &[String]) -> String {
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

/// Serializes a table, with each value in the format that its key's declaration specifies. `policy` defines the table's
/// validated type.
pub(crate) fn as_table<T: Section, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    let entries = value.key_values();
    let mut map = serializer.serialize_map(Some(entries.len()))?;
    for KeyValue { key, value, .. } in entries {
        match value {
            Some(Written::Scalar(default_value)) => map.serialize_entry(key, &default_value)?,
            Some(Written::Toml(toml)) => map.serialize_entry(key, &toml)?,
            None => map.serialize_entry(key, &())?,
        }
    }
    map.end()
}

/// Serializes an optional table, with each value in the format that its key's declaration specifies. `policy` defines
/// the table's validated type.
pub(crate) fn as_table_option<T: Section, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_table(value, serializer),
        None => serializer.serialize_none(),
    }
}

/// Serializes an enum value as the word that stands for the value in the configuration file.
pub(crate) fn as_word<T: Vocabulary, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(value.name())
}

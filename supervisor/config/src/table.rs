//! Reading, merging with `[defaults]`, and writing of tables, derived from their rows. `rows` contains the
//! macros that declare a table, `types` the types of values.

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

/// A type of values that can be read from a key.
pub(crate) trait Value: Clone {
    /// Reads the value of a key of an open table, or reports the problem.
    fn read(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self>;

    /// Merges the value of a bulkhead with the value of `[defaults]`.
    fn merge(own: &Field<Self>, defaults: &Field<Self>) -> Field<Self> {
        own.or(defaults)
    }
}

/// A value that fits in a [`DefaultValue`], so that it can be a default.
pub(crate) trait Scalar {
    fn default_value(&self, kind: Kind) -> DefaultValue;
}

/// A checked value in written form.
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

/// A checked value that can be written.
pub(crate) trait Write {
    /// Returns the written form; `None` if the file would not contain the key.
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

/// A key with a default.
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
    /// Returns the value or the default.
    pub(crate) fn value(&self) -> T {
        self.field.value_or(self.default.clone())
    }

    /// Returns the value or the default, with the source.
    pub(crate) fn resolved(&self) -> Resolved<T> {
        self.field.resolved(self.default.clone())
    }
}

impl<T: Value> Field<T> {
    /// Merges the value of a bulkhead with the value of `[defaults]`.
    pub(crate) fn merge(self, defaults: &Self) -> Self {
        T::merge(&self, defaults)
    }
}

impl<T: Value> WithDefault<T> {
    /// Merges the value of a bulkhead with the value of `[defaults]`.
    pub(crate) fn merge(self, defaults: &Self) -> Self {
        Self { field: self.field.merge(&defaults.field), default: self.default }
    }
}

/// A table of the file, key by key, with positions.
pub(crate) trait Table: Sized {
    /// Name in the schema.
    const PATH: &'static str;

    /// Returns the rows, followed by the rows of the tables in this table.
    fn keys() -> Vec<Key>;

    /// Reads an open table, or an absent one.
    fn read(presence: Field<()>, table: Option<TableReader<'_, '_>>) -> Self;

    /// Merges this table with `defaults`, key by key.
    fn merge(self, defaults: &Self) -> Self;
}

/// A table whose checked values are built from the rows alone.
pub(crate) trait ByRows {
    type Checked;

    /// Returns the position of the table's name, if the table is present.
    fn presence(&self) -> &Field<()>;

    /// Returns the checked values.
    fn checked(&self) -> Self::Checked;

    /// Returns the checked values, if the table is present.
    fn checked_if_present(&self) -> Option<Self::Checked> {
        self.presence().given().map(|_| self.checked())
    }
}

/// A table, or several named tables, inside another table.
pub(crate) trait NestedTable: Sized {
    /// Returns the rows; see [`Table::keys`].
    fn nested_keys() -> Vec<Key>;

    /// Reads the table `name` inside an open or absent table.
    fn read_nested(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self;

    /// Merges the part with `defaults`; see [`Table::merge`].
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

/// Reads a key of a table that can be absent.
pub(crate) fn read_optional<T: Value>(table: &mut Option<TableReader<'_, '_>>, name: &str) -> Field<T> {
    table.as_mut().map_or(Field::Absent, |table| T::read(table, name))
}

/// The checked values of a table.
pub(crate) trait Section {
    /// Returns the keys with their values.
    fn key_values(&self) -> Vec<KeyValue>;
}

/// A key of a table with its checked value.
pub(crate) struct KeyValue {
    pub(crate) key: &'static str,
    /// `None` if the key is not set.
    pub(crate) value: Option<Written>,
    /// Description of the behaviour if the key is not set.
    pub(crate) without: &'static str,
}

/// Formats entries as an inline table of TOML.
pub(crate) fn inline_table(entries: Vec<KeyValue>) -> String {
    let set = |KeyValue { key, value, .. }| Some(format!("{key} = {}", value?.toml()?));
    in_braces(&entries.into_iter().filter_map(set).collect::<Vec<_>>())
}

pub(crate) fn in_braces(entries: &[String]) -> String {
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

/// Serialises a table of a `policy` type according to its rows.
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

/// Serialises an optional table of a `policy` type according to its rows.
pub(crate) fn as_table_option<T: Section, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_table(value, serializer),
        None => serializer.serialize_none(),
    }
}

/// Serialises a word of a `policy` type.
pub(crate) fn as_word<T: Vocabulary, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(value.name())
}

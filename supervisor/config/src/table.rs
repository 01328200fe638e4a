//! What a table of the file comes to by its rows: how it is read, merged with `[defaults]`, and written out. `rows`
//! has the macros that declare one, `types` the types that a value can have.

mod rows;
mod types;

use std::ops::Deref;

use bulkhead_shared::Vocabulary;
pub(crate) use rows::{checked, entry, first, on_reload, preset, section, slot, slot_of, table};
use serde::Serializer;
use serde::ser::SerializeMap as _;

use crate::key::{Key, Kind, Preset};
use crate::reader::{Field, TableReader};
use crate::resolved::Resolved;

/// A type that a key's value can have: how it is read.
pub(crate) trait Value: Clone {
    /// Takes the value of a key of an open table, or reports what is wrong with it.
    fn take(table: &mut TableReader<'_, '_>, name: &str) -> Field<Self>;

    /// The value of a bulkhead over that of `[defaults]`.
    fn over(own: &Field<Self>, defaults: &Field<Self>) -> Field<Self> {
        own.or(defaults)
    }
}

/// A value of one word, which can be a default.
pub(crate) trait Scalar {
    fn preset(&self, kind: Kind) -> Preset;
}

/// A checked value as it is written out.
pub(crate) enum Written {
    Scalar(Preset),
    Toml(String),
}

impl Written {
    pub(crate) fn toml(self) -> Option<String> {
        match self {
            Self::Scalar(preset) => preset.toml(),
            Self::Toml(toml) => Some(toml),
        }
    }
}

/// A checked value that can be written out.
pub(crate) trait Write {
    /// `None` if the file would have nothing.
    fn written(&self, kind: Kind) -> Option<Written>;
}

impl<T: Scalar> Write for T {
    fn written(&self, kind: Kind) -> Option<Written> {
        Some(Written::Scalar(self.preset(kind)))
    }
}

impl<T: Write> Write for Option<T> {
    fn written(&self, kind: Kind) -> Option<Written> {
        self.as_ref()?.written(kind)
    }
}

/// A key that has a default.
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
    /// What holds.
    pub(crate) fn value(&self) -> T {
        self.field.value_or(self.default.clone())
    }

    /// The same with the reason why.
    pub(crate) fn resolved(&self) -> Resolved<T> {
        self.field.resolved(self.default.clone())
    }
}

impl<T: Value> Field<T> {
    /// The value of a bulkhead over that of `[defaults]`.
    pub(crate) fn over(self, defaults: &Self) -> Self {
        T::over(&self, defaults)
    }
}

impl<T: Value> WithDefault<T> {
    /// The same.
    pub(crate) fn over(self, defaults: &Self) -> Self {
        Self { field: self.field.over(&defaults.field), default: self.default }
    }
}

/// A table of the file, key by key, each value with its place.
pub(crate) trait Table: Sized {
    /// Its name in the schema.
    const PATH: &'static str;

    /// The rows, and behind them those of the tables in it.
    fn keys() -> Vec<Key>;

    /// Reads an open table, or one that is not there.
    fn read(here: Field<()>, table: Option<TableReader<'_, '_>>) -> Self;

    /// This table with `defaults` where it is silent, key by key.
    fn over(self, defaults: &Self) -> Self;
}

/// A table whose checked values are made from its rows alone.
pub(crate) trait ByRows {
    type Checked;

    /// The name of the table, if it is there.
    fn here(&self) -> &Field<()>;

    /// What holds.
    fn checked(&self) -> Self::Checked;

    /// The same, if the table is there.
    fn checked_if_here(&self) -> Option<Self::Checked> {
        self.here().given().map(|_| self.checked())
    }
}

/// What stands in a table under the name of a table.
pub(crate) trait Part: Sized {
    /// As [`Table::keys`].
    fn keys_inside() -> Vec<Key>;

    /// Reads the table `name` inside an open one, or inside one that is not there.
    fn read_inside(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self;

    /// As [`Table::over`].
    fn over_part(self, defaults: &Self) -> Self;
}

impl<T: Table> Part for T {
    fn keys_inside() -> Vec<Key> {
        Self::keys()
    }

    fn read_inside(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self {
        let Some(table) = table else { return Self::read(Field::Absent, None) };
        let here = table.presence(name, Self::PATH);
        Self::read(here, table.table(name, Self::PATH))
    }

    fn over_part(self, defaults: &Self) -> Self {
        self.over(defaults)
    }
}

/// Takes a key of a table that may not be there.
pub(crate) fn take<T: Value>(table: &mut Option<TableReader<'_, '_>>, name: &str) -> Field<T> {
    table.as_mut().map_or(Field::Absent, |table| T::take(table, name))
}

/// The checked values of a table.
pub(crate) trait Section {
    /// Each key with its value.
    fn entries(&self) -> Vec<Entry>;
}

/// A key of a table with its checked value.
pub(crate) struct Entry {
    pub(crate) key: &'static str,
    /// `None`: nothing is set.
    pub(crate) value: Option<Written>,
    /// What holds if nothing is set.
    pub(crate) without: &'static str,
}

/// The entries as TOML, in braces.
pub(crate) fn inline(entries: Vec<Entry>) -> String {
    let set = |Entry { key, value, .. }| Some(format!("{key} = {}", value?.toml()?));
    braced(&entries.into_iter().filter_map(set).collect::<Vec<_>>())
}

pub(crate) fn braced(entries: &[String]) -> String {
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

/// Serialises a table of policy's own types by its rows.
pub(crate) fn as_table<T: Section, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    let entries = value.entries();
    let mut map = serializer.serialize_map(Some(entries.len()))?;
    for Entry { key, value, .. } in entries {
        match value {
            Some(Written::Scalar(preset)) => map.serialize_entry(key, &preset)?,
            Some(Written::Toml(toml)) => map.serialize_entry(key, &toml)?,
            None => map.serialize_entry(key, &())?,
        }
    }
    map.end()
}

/// The same of a table that may be off.
pub(crate) fn as_table_option<T: Section, S: Serializer>(
    value: &Option<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => as_table(value, serializer),
        None => serializer.serialize_none(),
    }
}

/// Serialises a word of policy's own types.
pub(crate) fn as_word<T: Vocabulary, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(value.name())
}

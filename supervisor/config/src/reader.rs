//! Reads one table of the file, key by key. Unknown keys are reported when the table is opened. Each value is either
//! converted according to the kind of its key or reported as invalid, so that nothing in the file is silently ignored.
//! `values` converts single values, and `relations` checks rules that involve several keys.

mod network;
mod strings;

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostics::{Problems, nearest, shown, shown_key};
use super::key::{self, Key, Kind};
use super::values::{self, LabelledKey, ValueError};

/// Kind of table that a value comes from, ordered from the most general to the most specific. If several values
/// together violate a rule, the problem is reported at the value with the most specific origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// The value is in `[defaults]`.
    Defaults,
    /// The value is in the bulkhead's own table, or in `[supervisor]`.
    Own,
    /// The value is in the table of one of the bulkhead's tenants.
    Tenant,
}

/// A value from the file, with its position and origin.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Given<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
    pub(super) origin: Origin,
}

/// Value of a key in a table, if the key is present and valid.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) enum Field<T> {
    #[default]
    Absent,
    /// The key is present, but its value is invalid and has been reported. Rules that involve the key are not checked.
    Invalid,
    Given(Given<T>),
}

impl<T: Clone> Field<T> {
    /// Returns this value or, if the key is absent, the value in `[defaults]`.
    pub(super) fn or(&self, defaults: &Self) -> Self {
        if matches!(self, Self::Absent) { defaults.clone() } else { self.clone() }
    }
}

impl<T> Field<T> {
    pub(super) fn given(&self) -> Option<&Given<T>> {
        if let Self::Given(given) = self { Some(given) } else { None }
    }

    /// Returns the name of the key and the position of the value, if the file contains the key.
    pub(super) fn present_key(&self, name: &'static str) -> Option<PresentKey> {
        (!self.is_absent()).then(|| (name, self.given().map(|given| given.span.clone())))
    }

    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    pub(super) fn is_invalid(&self) -> bool {
        matches!(self, Self::Invalid)
    }
}

/// Name of a key that is present in the file, and the position of the key's value. The position is `None` if the value
/// is invalid.
pub(super) type PresentKey = (&'static str, Option<Range<usize>>);

/// Strings in an array, with their positions. The array contains a program and its arguments, or a list of names, words
/// or paths.
pub(super) type Arguments = Vec<Given<String>>;

/// Environment variables of a program, by name. The strings are either the variables' values or the paths of files that
/// contain the values.
pub(super) type Environment = BTreeMap<String, Given<String>>;

/// Reader for a single table. `schema` is the table's name in the schema, such as `bulkhead.NAME.restart`, and `title`
/// is its name in the file, such as `bulkhead.thumbnail.restart`.
pub(super) struct TableReader<'t, 'p> {
    /// Keys of all tables in the schema.
    keys: &'static [Key],
    schema: &'static str,
    title: String,
    /// Prefix for key names in messages. Either empty or the path of an inner table, such as `restart.`.
    prefix: String,
    origin: Origin,
    table: &'t DeTable<'t>,
    /// Keys of this table whose names appear to be misspelled in the file.
    misspelt: Vec<&'static str>,
    problems: &'p mut Problems,
}

impl<'t, 'p> TableReader<'t, 'p> {
    /// Opens a table and reports all unknown keys.
    pub(super) fn open(
        keys: &'static [Key],
        schema: &'static str,
        title: String,
        origin: Origin,
        table: &'t DeTable<'t>,
        problems: &'p mut Problems,
    ) -> Self {
        let prefix = String::new();
        Self { keys, schema, title, prefix, origin, table, misspelt: Vec::new(), problems }
            .with_unknown_keys_reported()
    }

    /// Creates a reader for the inner table `table`, and reports all unknown keys in it.
    fn open_inside<'q>(
        &'q mut self,
        schema: &'static str,
        title: String,
        prefix: String,
        origin: Origin,
        table: &'t DeTable<'t>,
    ) -> TableReader<'t, 'q> {
        let (misspelt, problems) = (Vec::new(), &mut *self.problems);
        TableReader { keys: self.keys, schema, title, prefix, origin, table, misspelt, problems }
            .with_unknown_keys_reported()
    }

    fn with_unknown_keys_reported(mut self) -> Self {
        for (name, value) in self.table.iter() {
            if self.find(name.get_ref()).is_none() {
                self.report_error(name.span(), self.unknown_key_error(name.get_ref(), value.get_ref()));
                self.misspelt.extend(nearest(name.get_ref(), self.key_names()));
            }
        }
        self
    }

    /// Returns true if the schema contains a key with this name for the table `table`.
    pub(super) fn is_key_of(&self, table: &str, name: &str) -> bool {
        key::find(self.keys, table, name).is_some()
    }

    fn find(&self, name: &str) -> Option<Key> {
        key::find(self.keys, self.schema, name)
    }

    fn key_names(&self) -> impl Iterator<Item = &'static str> + use<> {
        let schema = self.schema;
        let is_defaults = self.origin == Origin::Defaults && schema == key::BULKHEAD;
        let is_allowed = move |name: &str| !(is_defaults && key::is_not_allowed_in_defaults(name));
        self.keys.iter().filter(move |key| key.table == schema && is_allowed(key.name)).map(|key| key.name)
    }

    /// Returns the field for a key that the table does not contain. If the key appears to be misspelled, the field is
    /// invalid rather than absent.
    fn missing<T>(&self, name: &str) -> Field<T> {
        if self.misspelt.contains(&name) { Field::Invalid } else { Field::Absent }
    }

    fn unknown_key_error(&self, name: &str, value: &DeValue<'_>) -> ValueError {
        if (self.schema, name) == (key::TENANT_RATE_LIMIT, "per") {
            let message = format!(
                "`{}` has no effect: a tenant's rate limit always applies per tenant",
                self.label(name)
            );
            return ValueError::new(message, "remove `per`");
        }
        let location = if self.title.is_empty() {
            "at the top of the file".to_owned()
        } else {
            format!("in {}", self.heading())
        };
        ValueError::new(format!("unknown key `{}` {location}", shown(name)), self.unknown_help(name, value))
    }

    /// Returns the heading of this table as written in the file.
    fn heading(&self) -> String {
        if self.schema == key::ACCESS { key::heading(self.schema) } else { format!("[{}]", self.title) }
    }

    /// Suggests the right table for a misplaced key, or the right name for a misspelled key.
    fn unknown_help(&self, name: &str, value: &DeValue<'_>) -> String {
        let here: Vec<&str> = self.key_names().collect();
        let synonym = key::SYNONYMS.iter().find(|(other, _)| self.schema == key::BULKHEAD && *other == name);
        if let (Some((_, candidates)), Some(value)) = (synonym, values::literal(value)) {
            let lines = candidates.iter().map(|(key, what)| format!("`{key} = {value}` for {what}"));
            return format!("write {}", lines.collect::<Vec<_>>().join(", or "));
        }
        // If the value is a table, the author cannot have meant a key that takes a single value.
        let is_table = matches!(value, DeValue::Table(_));
        let accepts = |key: &Key| !is_table || matches!(key.kind, Kind::Table | Kind::Environment);
        let other_tables: Vec<String> = self
            .keys
            .iter()
            .filter(|key| key.name == name && key.table != key::TOP_LEVEL && accepts(key))
            .map(|key| key::heading(key.table))
            .collect();
        if !other_tables.is_empty() {
            return format!("`{name}` belongs in {}", other_tables.join(" or "));
        }
        if let Some(key) = nearest(name, here.iter().copied()) {
            return format!("did you mean `{key}`?");
        }
        match (self.schema, value) {
            (key::TOP_LEVEL, DeValue::Table(_)) => {
                return format!("write the bulkhead as [bulkhead.{}]", shown(name));
            }
            (key::TENANTS, DeValue::Table(_)) => {
                return format!(
                    "write the limits of a single tenant as [bulkhead.NAME.tenant.{}]",
                    shown_key(name)
                );
            }
            _ => {}
        }
        format!("valid keys: {}", here.join(", "))
    }

    fn key_with_value(&self, name: &str) -> Option<(LabelledKey, &'t Spanned<DeValue<'t>>)> {
        let value = self.table.get(name)?;
        let key = self.find(name)?;
        Some((LabelledKey { key, label: self.label(name) }, value))
    }

    fn label(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub(super) fn report_error(&mut self, span: Range<usize>, error: ValueError) {
        self.problems.report(span, error.message, error.help);
    }

    /// Reads the value of the key `name` with the function `read`. If the function returns an error, reports the error.
    pub(super) fn read_value<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&LabelledKey, &DeValue<'_>) -> Result<T, ValueError>,
    ) -> Field<T> {
        self.read_partly(name, |_, key, value| read(key, value.get_ref()).map(Some))
    }

    /// Reads the value of the key `name` with the function `read`, which reports and skips invalid parts. The function
    /// returns `None` if no valid part remains.
    fn read_partly<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&mut Self, &LabelledKey, &Spanned<DeValue<'_>>) -> Result<Option<T>, ValueError>,
    ) -> Field<T> {
        let Some((key, value)) = self.key_with_value(name) else { return self.missing(name) };
        let read = read(self, &key, value);
        match self.ok_or_report(value.span(), read).flatten() {
            Some(taken) => Field::Given(Given { value: taken, span: value.span(), origin: self.origin }),
            None => Field::Invalid,
        }
    }

    /// Returns the value of a successful result. If `found` is an error, reports the error at the position `span` and
    /// returns `None`.
    pub(super) fn ok_or_report<T>(&mut self, span: Range<usize>, found: Result<T, ValueError>) -> Option<T> {
        found.map_err(|error| self.report_error(span, error)).ok()
    }

    /// Opens the inner table `name`. Returns `None` if the key is absent or the value is not a table.
    pub(super) fn table(&mut self, name: &str, schema: &'static str) -> Option<TableReader<'t, '_>> {
        let table = self.bare_table(name)?;
        // Key labels omit the name of a top-level table.
        let prefix =
            if self.schema == key::TOP_LEVEL { String::new() } else { format!("{}.", self.label(name)) };
        let title = self.title_of(name);
        Some(self.open_inside(schema, title, prefix, self.origin, table))
    }

    /// Opens all tables in the array `name`, and passes each table to `read`, in file order.
    pub(super) fn each_table(
        &mut self,
        name: &str,
        schema: &'static str,
        mut read: impl FnMut(Range<usize>, TableReader<'t, '_>),
    ) {
        let Some((key, value)) = self.key_with_value(name) else { return };
        let DeValue::Array(array) = value.get_ref() else {
            return self.report_error(value.span(), values::not_tables(&key, value.get_ref()));
        };
        let Kind::Tables(max) = key.kind else {
            return self.report_error(value.span(), values::wrong_kind(&key));
        };
        if let Some(excess) = array.get(max) {
            let message = format!("`{}` has more than {max} entries", key.label);
            self.report_error(
                excess.span(),
                ValueError::new(message, "grant access to groups instead of individual users"),
            );
        }
        for (index, element) in array.iter().take(max).enumerate() {
            let DeValue::Table(table) = element.get_ref() else {
                self.report_error(element.span(), values::not_a_table_of(&key, index, element.get_ref()));
                continue;
            };
            let (title, prefix) = (self.title_of(name), format!("{}.", self.label(name)));
            read(element.span(), self.open_inside(schema, title, prefix, self.origin, table));
        }
    }

    /// Opens the table for the tenant `name` inside the `tenant` table.
    pub(super) fn tenant(&mut self, name: &str, table: &'t DeTable<'t>) -> TableReader<'t, '_> {
        let path = format!("tenant.{}", shown_key(name));
        let (title, prefix) = (self.title_of(&path), format!("{path}."));
        self.open_inside(key::TENANT, title, prefix, Origin::Tenant, table)
    }

    /// Returns the position of the inner table's name, if the table is present. Returns [`Field::Invalid`] if the table
    /// contains an unknown key, because that key could be a misspelling of any other key.
    pub(super) fn presence(&self, name: &str, schema: &'static str) -> Field<()> {
        let Some((name, value)) = self.table.get_key_value(name) else { return Field::Absent };
        match value.get_ref() {
            DeValue::Table(table) if table.keys().all(|key| self.is_key_of(schema, key.get_ref())) => {
                Field::Given(Given { value: (), span: name.span(), origin: self.origin })
            }
            _ => Field::Invalid,
        }
    }

    /// Returns an inner table in which the user chooses the names of the keys. Reports an error if the value is not a
    /// table.
    pub(super) fn bare_table(&mut self, name: &str) -> Option<&'t DeTable<'t>> {
        let (key, value) = self.key_with_value(name)?;
        if let DeValue::Table(table) = value.get_ref() {
            return Some(table);
        }
        let is_text = matches!(value.get_ref(), DeValue::String(_));
        let candidates = key::MAIN_KEYS.iter().find(|(table, _, text)| *table == name && *text == is_text);
        self.problems.report(
            value.span(),
            format!("`{}` must be a table, not {}", key.label, values::type_name(value.get_ref())),
            match (self.schema, name) {
                (key::TOP_LEVEL, "bulkhead") => {
                    "write a [bulkhead.NAME] section for each bulkhead".to_owned()
                }
                (key::TOP_LEVEL, _) => format!("write a [{name}] section"),
                _ => match candidates.zip(values::literal(value.get_ref())) {
                    Some(((_, key, _), value)) => format!("write `{name} = {{ {key} = {value} }}`"),
                    None => format!("write `{name} = {{ … }}` or a [{}] section", self.title_of(name)),
                },
            },
        );
        None
    }

    fn title_of(&self, name: &str) -> String {
        if self.title.is_empty() { name.to_owned() } else { format!("{}.{name}", self.title) }
    }

    /// Reports keys that are not allowed in `[defaults]`.
    pub(super) fn report_not_allowed(&mut self, names: &[&str], help: &str) {
        for (name, _) in self.table.iter().filter(|(name, _)| names.contains(&name.get_ref().as_ref())) {
            self.problems.report(
                name.span(),
                format!("`{}` is not allowed in [{}]", name.get_ref(), self.title),
                help,
            );
        }
    }
}

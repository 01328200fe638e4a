//! Reads one table of the file key by key. Whoever opens a table is told at once about keys that do not
//! belong there; each value is taken as its kind, or reported. Nothing is ever silently ignored.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::Resource;
use super::diagnostics::{Problems, nearest, shown};
use super::schema::{self, Key};
use super::values::{self, Complaint};

/// Where a value comes from, the nearest last: a relation that fails is shown at the nearer of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// `[defaults]`.
    Defaults,
    /// The bulkhead itself, or `[supervisor]`.
    Own,
}

/// A value and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Given<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
    pub(super) origin: Origin,
}

/// What a table has under a key.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) enum Field<T> {
    #[default]
    Absent,
    /// There, but wrong and already reported: relations with it are not judged.
    Refused,
    Given(Given<T>),
}

impl<T: Clone> Field<T> {
    /// This value, or that of `[defaults]`.
    pub(super) fn or(&self, defaults: &Self) -> Self {
        if matches!(self, Self::Absent) { defaults.clone() } else { self.clone() }
    }
}

impl<T> Field<T> {
    pub(super) fn given(&self) -> Option<&Given<T>> {
        if let Self::Given(given) = self { Some(given) } else { None }
    }

    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// A program and its arguments, each with its place.
pub(super) type Arguments = Vec<Given<String>>;

/// One open table. `schema` is its name in the schema (`bulkhead.NAME.restart`), `title` the one in the
/// file (`bulkhead.thumbnail.restart`).
pub(super) struct TableReader<'t, 'p> {
    schema: &'static str,
    title: String,
    origin: Origin,
    table: &'t DeTable<'t>,
    /// Keys that something else in the table was most likely meant to be.
    misspelt: Vec<&'static str>,
    problems: &'p mut Problems,
}

impl<'t, 'p> TableReader<'t, 'p> {
    /// Opens a table and reports every key in it that this version does not read.
    pub(super) fn open(
        schema: &'static str,
        title: String,
        origin: Origin,
        table: &'t DeTable<'t>,
        problems: &'p mut Problems,
    ) -> Self {
        let mut reader = Self { schema, title, origin, table, misspelt: Vec::new(), problems };
        for (name, value) in table.iter() {
            if schema::find(schema, name.get_ref()).is_none() {
                let complaint = reader.not_read(name.get_ref(), value.get_ref());
                reader.problems.report(name.span(), complaint.message, complaint.help);
                reader.misspelt.extend(nearest(name.get_ref(), reader.names()));
            }
        }
        reader
    }

    fn names(&self) -> impl Iterator<Item = &'static str> + use<> {
        let schema = self.schema;
        schema::all().filter(move |key| key.table == schema).map(|key| key.name)
    }

    /// What a key that is not there leaves: if it was misspelt, that was told, and is no reason to speak
    /// of its absence.
    fn missing<T>(&self, name: &str) -> Field<T> {
        if self.misspelt.contains(&name) { Field::Refused } else { Field::Absent }
    }

    fn not_read(&self, name: &str, value: &DeValue<'_>) -> Complaint {
        if schema::LATER.contains(&(self.schema, name)) {
            let help = match (self.schema, name) {
                (schema::SANDBOX, _) => "remove it: the only sandbox of this version is `profile = \"none\"`",
                _ => "remove it: this version runs without it",
            };
            return Complaint::new(
                format!("`{}` is not supported yet", schema::label(self.schema, name)),
                help,
            );
        }
        let place = if self.title.is_empty() {
            "at the top of the file".to_owned()
        } else {
            format!("in [{}]", self.title)
        };
        Complaint::new(format!("unknown key `{}` {place}", shown(name)), self.unknown_help(name, value))
    }

    /// A key of another table was misplaced; one that is nearly a key of this table was misspelt.
    fn unknown_help(&self, name: &str, value: &DeValue<'_>) -> String {
        let here: Vec<&str> =
            schema::all().filter(|key| key.table == self.schema).map(|key| key.name).collect();
        let elsewhere: Vec<String> = schema::all()
            .filter(|key| key.name == name && key.table != schema::TOP)
            .map(|key| format!("[{}]", key.table))
            .collect();
        if !elsewhere.is_empty() {
            return format!("`{name}` belongs in {}", elsewhere.join(" or "));
        }
        let later = schema::LATER.iter().filter(|(table, _)| *table == self.schema).map(|(_, name)| *name);
        if let Some(key) = nearest(name, here.iter().copied().chain(later)) {
            return format!("did you mean `{key}`?");
        }
        if self.schema == schema::TOP && matches!(value, DeValue::Table(_)) {
            return format!("a bulkhead is written [bulkhead.{}]", shown(name));
        }
        format!("the keys here are {}", here.join(", "))
    }

    fn entry(&self, name: &str) -> Option<(Key, &'t Spanned<DeValue<'t>>)> {
        Some((schema::find(self.schema, name)?, self.table.get(name)?))
    }

    /// Takes a value by a pure function, and reports what that refuses.
    fn take<T>(
        &mut self,
        name: &str,
        read: impl FnOnce(&Key, &DeValue<'_>) -> Result<T, Complaint>,
    ) -> Field<T> {
        let Some((key, value)) = self.entry(name) else { return self.missing(name) };
        match read(&key, value.get_ref()) {
            Ok(taken) => Field::Given(Given { value: taken, span: value.span(), origin: self.origin }),
            Err(complaint) => {
                self.problems.report(value.span(), complaint.message, complaint.help);
                Field::Refused
            }
        }
    }

    pub(super) fn duration(&mut self, name: &str) -> Field<Duration> {
        self.take(name, values::duration)
    }

    pub(super) fn size(&mut self, name: &str) -> Field<u64> {
        self.take(name, values::size)
    }

    pub(super) fn count(&mut self, name: &str) -> Field<u64> {
        self.take(name, values::count)
    }

    pub(super) fn share(&mut self, name: &str) -> Field<f64> {
        self.take(name, values::share)
    }

    pub(super) fn number(&mut self, name: &str) -> Field<f64> {
        self.take(name, values::number)
    }

    pub(super) fn mode(&mut self, name: &str) -> Field<u32> {
        self.take(name, values::mode)
    }

    pub(super) fn text(&mut self, name: &str) -> Field<String> {
        self.take(name, values::text)
    }

    pub(super) fn word(&mut self, name: &str) -> Field<&'static str> {
        self.take(name, values::word)
    }

    pub(super) fn zero_for_now(&mut self, name: &str) {
        self.take(name, values::zero_for_now);
    }

    pub(super) fn limit(&mut self, resource: Resource) -> Field<Option<u64>> {
        self.take(resource.name(), |key, value| values::limit(key, resource, value))
    }

    /// Opens a table inside this one.
    pub(super) fn table(&mut self, name: &str, schema: &'static str) -> Option<TableReader<'t, '_>> {
        let table = self.bare_table(name)?;
        Some(TableReader::open(schema, self.title_of(name), self.origin, table, self.problems))
    }

    /// Whether a table is inside this one, and where its name stands. Refused if it has a key that is not
    /// read: nobody knows what that was meant to say.
    pub(super) fn presence(&self, name: &str, schema: &'static str) -> Field<()> {
        match self.table.get_key_value(name) {
            None => Field::Absent,
            Some((name, value)) => match value.get_ref() {
                DeValue::Table(table)
                    if table.keys().all(|key| schema::find(schema, key.get_ref()).is_some()) =>
                {
                    Field::Given(Given { value: (), span: name.span(), origin: self.origin })
                }
                _ => Field::Refused,
            },
        }
    }

    /// A table inside this one whose keys are not from the schema.
    pub(super) fn bare_table(&mut self, name: &str) -> Option<&'t DeTable<'t>> {
        let (key, value) = self.entry(name)?;
        if let DeValue::Table(table) = value.get_ref() {
            return Some(table);
        }
        self.problems.report(
            value.span(),
            format!("`{}` must be a table, not {}", key.label(), values::type_name(value.get_ref())),
            match (self.schema, name) {
                (schema::TOP, "bulkhead") => "write a section [bulkhead.NAME] for each".to_owned(),
                (schema::TOP, _) => format!("write a section [{name}]"),
                _ => format!("write `{name} = {{ … }}` or a section [{}]", self.title_of(name)),
            },
        );
        None
    }

    fn title_of(&self, name: &str) -> String {
        if self.title.is_empty() { name.to_owned() } else { format!("{}.{name}", self.title) }
    }

    /// Takes a program and its arguments.
    pub(super) fn arguments(&mut self, name: &str) -> Field<Arguments> {
        let Some((key, value)) = self.entry(name) else { return self.missing(name) };
        let taken = match value.get_ref() {
            DeValue::Array(array) => self.array(&key, value.span(), array),
            DeValue::String(text) => {
                let words: Vec<_> =
                    text.split_whitespace().map(|word| format!("\"{}\"", shown(word))).collect();
                let complaint = Complaint::new(
                    format!("`{name}` must be an array of strings, not a string"),
                    format!("there is no shell that would split it: write `{name} = [{}]`", words.join(", ")),
                );
                self.problems.report(value.span(), complaint.message, complaint.help);
                None
            }
            other => {
                let complaint = values::wrong_type(&key, "an array of strings", other);
                self.problems.report(value.span(), complaint.message, complaint.help);
                None
            }
        };
        match taken {
            Some(taken) => Field::Given(Given { value: taken, span: value.span(), origin: self.origin }),
            None => Field::Refused,
        }
    }

    fn array(&mut self, key: &Key, span: Range<usize>, array: &DeArray<'_>) -> Option<Arguments> {
        let mut taken = Vec::new();
        let mut program_taken = false;
        for (index, element) in array.iter().enumerate() {
            match argument(key, index, element.get_ref()) {
                Ok(value) => {
                    program_taken |= index == 0;
                    taken.push(Given { value, span: element.span(), origin: self.origin });
                }
                Err(complaint) => self.problems.report(element.span(), complaint.message, complaint.help),
            }
        }
        if array.is_empty() {
            let help = format!("write the program and its arguments: `{} = {}`", key.name, key.example());
            self.problems.report(span, format!("`{}` is empty", key.name), help);
        }
        // A wrong argument was reported; the program before it is still worth looking up.
        program_taken.then_some(taken)
    }

    /// Takes a table of strings as an environment. A variable that is wrong is reported and left out.
    pub(super) fn environment(&mut self, name: &str) -> BTreeMap<String, String> {
        let mut taken = BTreeMap::new();
        let Some((key, value)) = self.entry(name) else { return taken };
        let DeValue::Table(table) = value.get_ref() else {
            let complaint = values::wrong_type(&key, "a table of strings", value.get_ref());
            self.problems.report(value.span(), complaint.message, complaint.help);
            return taken;
        };
        for (variable, value) in table.iter() {
            if let Err(complaint) = variable_name(variable.get_ref()) {
                self.problems.report(variable.span(), complaint.message, complaint.help);
            }
            match variable_value(variable.get_ref(), value.get_ref()) {
                Ok(text) => drop(taken.insert(variable.get_ref().to_string(), text)),
                Err(complaint) => self.problems.report(value.span(), complaint.message, complaint.help),
            }
        }
        taken
    }

    /// Refuses keys that `[defaults]` may not have.
    pub(super) fn refuse(&mut self, names: &[&str]) {
        for (name, _) in self.table.iter().filter(|(name, _)| names.contains(&name.get_ref().as_ref())) {
            self.problems.report(
                name.span(),
                format!("`{}` cannot stand in [{}]", name.get_ref(), self.title),
                "each [bulkhead.NAME] says for itself what it runs",
            );
        }
    }
}

/// An argument may be empty, a program may not.
fn argument(key: &Key, index: usize, value: &DeValue<'_>) -> Result<String, Complaint> {
    let label = format!("{}[{index}]", key.name);
    let DeValue::String(text) = value else {
        let help = match value {
            DeValue::Integer(number) => format!("write \"{number}\""),
            DeValue::Float(number) => format!("write \"{number}\""),
            DeValue::Boolean(boolean) => format!("write \"{boolean}\""),
            _ => format!("write `{} = {}`", key.name, key.example()),
        };
        return Err(Complaint::new(
            format!("`{label}` must be a string, not {}", values::type_name(value)),
            help,
        ));
    };
    if index == 0 && text.is_empty() {
        return Err(Complaint::new(
            format!("`{label}` is empty, where the program should be"),
            format!("write `{} = {}`", key.name, key.example()),
        ));
    }
    values::no_nul(&label, text)?;
    Ok(text.to_string())
}

fn variable_name(name: &str) -> Result<(), Complaint> {
    if name.is_empty() {
        return Err(Complaint::new("a name in `env` is empty", "write `env = { NAME = \"value\" }`"));
    }
    if name.contains(['=', '\0']) {
        return Err(Complaint::new(
            format!("`{}` cannot name a variable: it contains `=` or a NUL byte", shown(name)),
            "write `env = { NAME = \"value\" }`",
        ));
    }
    if name.starts_with("BULKHEAD_") {
        return Err(Complaint::new(
            format!(
                "`{}` is reserved: the supervisor sets the names that start with `BULKHEAD_`",
                shown(name)
            ),
            "choose another name",
        ));
    }
    Ok(())
}

fn variable_value(name: &str, value: &DeValue<'_>) -> Result<String, Complaint> {
    let name = shown(name);
    let text = match value {
        DeValue::String(text) => text,
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) => {
            let literal = match value {
                DeValue::Integer(number) => number.to_string(),
                DeValue::Float(number) => number.to_string(),
                _ => value.as_bool().unwrap_or_default().to_string(),
            };
            return Err(Complaint::new(
                format!("`env.{name}` must be a string, not {}", values::type_name(value)),
                format!("write `{name} = \"{literal}\"`"),
            ));
        }
        other => {
            return Err(Complaint::new(
                format!("`env.{name}` must be a string, not {}", values::type_name(other)),
                format!("write `{name} = \"value\"`"),
            ));
        }
    };
    values::no_nul(&format!("env.{name}"), text)?;
    Ok(text.to_string())
}

//! Reads the parsed TOML of a configuration file into keys with positions, and merges `[defaults]` into each bulkhead.
//! Checks only names and the range of each single value. `relations` later checks rules that span several keys, and
//! files on disk.

use std::ops::{Deref, Range};

use bulkhead_shared::limits::is_bulkhead_name;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::diagnostics::{Problems, shown};
use crate::keys::access::AccessKeys;
use crate::keys::bulkhead::BulkheadKeys;
use crate::keys::supervisor::SupervisorKeys;
use crate::reader::{Field, Origin, TableReader};
use crate::table::{NestedTable as _, Table as _};
use crate::{defaults, key, schema, values};

/// Contents of a configuration file, before the rules that involve several keys are checked.
pub(crate) struct RawFile {
    pub(crate) supervisor: RawSupervisor,
    /// Keys of each `[[access]]` rule, in file order.
    pub(crate) access: Vec<RawAccess>,
    /// Bulkheads in file order, merged with `[defaults]`.
    pub(crate) bulkheads: Vec<RawBulkhead>,
    /// All bulkhead names in the file, including the names of bulkheads that could not be read.
    pub(crate) names: Vec<String>,
}

/// Keys of a table in the file, with the name and position of the table.
pub(crate) struct Raw<K> {
    /// Name of the bulkhead. Empty if the table does not belong to a bulkhead.
    pub(crate) name: String,
    /// Position of the table's heading, or the start of the file if the `[supervisor]` table is absent.
    pub(crate) heading: Range<usize>,
    keys: K,
}

/// Keys of `[supervisor]`, with their positions.
pub(crate) type RawSupervisor = Raw<SupervisorKeys>;
/// Keys of an `[[access]]` rule, with their positions.
pub(crate) type RawAccess = Raw<AccessKeys>;
/// Keys of `[bulkhead.NAME]`, with their positions.
pub(crate) type RawBulkhead = Raw<BulkheadKeys>;

impl<K> Deref for Raw<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.keys
    }
}

/// Reads a complete configuration file.
pub(crate) fn read(root: &DeTable<'_>, problems: &mut Problems) -> RawFile {
    let mut top =
        TableReader::open(schema::keys(), key::TOP_LEVEL, String::new(), Origin::Own, root, problems);
    let heading = root.get_key_value("supervisor").map_or(0..0, |(key, _)| key.span());
    let empty = DeTable::new();
    let keys = SupervisorKeys::read_nested(Some(&mut top), "supervisor");
    let supervisor = Raw { name: String::new(), heading, keys };
    let mut access = Vec::new();
    top.each_table("access", key::ACCESS, |heading, entry| {
        let keys = AccessKeys::read(Field::Absent, Some(entry));
        access.push(Raw { name: String::new(), heading, keys });
    });
    let shared = top.bare_table("defaults").unwrap_or(&empty);
    let bulkheads_table = top.bare_table("bulkhead");
    let missing = !root.contains_key("bulkhead");

    let (table, title) = (key::BULKHEAD, "defaults".to_owned());
    let mut shared = TableReader::open(schema::keys(), table, title, Origin::Defaults, shared, problems);
    shared.report_not_allowed(key::PROGRAM_KEYS, "set the program in each [bulkhead.NAME] instead");
    shared.report_not_allowed(key::TENANT_KEYS, "set the tenants in each [bulkhead.NAME] instead");
    let mut shared = BulkheadKeys::read(Field::Absent, Some(shared));
    // Keys that select the program are rejected in `[defaults]`, so bulkheads must not inherit the values of these
    // keys.
    (shared.command, shared.exec, shared.library) = (Field::Absent, Field::Absent, Field::Absent);
    shared.entry.field = Field::Absent;
    let bulkheads = read_bulkheads(bulkheads_table.unwrap_or(&empty), &shared, problems);
    let names = bulkheads_table.unwrap_or(&empty).keys().map(|name| name.get_ref().to_string()).collect();
    if missing || bulkheads_table.is_some_and(|bulkheads_table| bulkheads_table.is_empty()) {
        let position = root.get_key_value("bulkhead").map_or(0..0, |(key, _)| key.span());
        let help = "add a [bulkhead.NAME] section with a program, as in `command = [\"./worker\"]`";
        problems.report(position, "the configuration file contains no bulkheads", help);
    }
    RawFile { supervisor, access, bulkheads, names }
}

fn read_bulkheads(
    bulkheads_table: &DeTable<'_>,
    shared: &BulkheadKeys,
    problems: &mut Problems,
) -> Vec<RawBulkhead> {
    let mut entries: Vec<_> = bulkheads_table.iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    if let Some((name, _)) = entries.get(defaults::BULKHEADS_MAX) {
        problems.report(
            name.span(),
            format!("the configuration file contains more than {} bulkheads", defaults::BULKHEADS_MAX),
            "move some of the bulkheads to a second supervisor",
        );
        entries.truncate(defaults::BULKHEADS_MAX);
    }
    let mut bulkheads = Vec::new();
    for (name, value) in entries {
        check_name(name, problems);
        let title = format!("bulkhead.{}", shown(name.get_ref()));
        let DeValue::Table(table) = value.get_ref() else {
            report_not_a_bulkhead(name, value, problems);
            continue;
        };
        let reader = TableReader::open(schema::keys(), key::BULKHEAD, title, Origin::Own, table, problems);
        let keys = BulkheadKeys::read(Field::Absent, Some(reader)).merge(shared);
        bulkheads.push(Raw { name: name.get_ref().to_string(), heading: name.span(), keys });
    }
    bulkheads
}

fn check_name(name: &Spanned<toml::de::DeString<'_>>, problems: &mut Problems) {
    if is_bulkhead_name(name.get_ref()) {
        return;
    }
    let better: String = name.get_ref().to_lowercase().chars().map(name_char).take(64).collect();
    let help = match better.is_empty() {
        true => "write [bulkhead.NAME], where NAME has 1 to 64 characters from a-z, 0-9, `.`, `_` and `-`"
            .to_owned(),
        false => format!("use 1 to 64 characters from a-z, 0-9, `.`, `_` and `-`, as in `{better}`"),
    };
    problems.report(name.span(), format!("`{}` is not a valid bulkhead name", shown(name.get_ref())), help);
}

fn name_char(c: char) -> char {
    if matches!(c, 'a'..='z' | '0'..='9' | '.' | '_' | '-') { c } else { '-' }
}

/// Reports a key in `[bulkhead]` whose value is not a table. The author most likely meant to set the key for all
/// bulkheads.
fn report_not_a_bulkhead(
    name: &Spanned<toml::de::DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
    problems: &mut Problems,
) {
    let help = match schema::find(key::BULKHEAD, name.get_ref()) {
        Some(_) => "set a key for all bulkheads in [defaults], or for a single bulkhead in [bulkhead.NAME]"
            .to_owned(),
        None => format!("write a [bulkhead.{}] section", shown(name.get_ref())),
    };
    let found = values::type_name(value.get_ref());
    problems.report(
        value.span(),
        format!("bulkhead `{}` must be a table, not {found}", shown(name.get_ref())),
        help,
    );
}

//! Generates the JSON schema of the configuration file from the declared keys, for editors (`bulkhead-supervisor
//! --schema`). The schema describes the shape of the configuration file or of a file in `conf.d`. The schema does not
//! cover rules that span several keys or files on disk, which `relations` checks. A valid file is never rejected.

use bulkhead_linux::rlimits::Resource;
use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX};
use serde_json::{Map, Value, json};

use super::key::{self, DefaultValue, Key, Kind};
use super::rlimits::{Measure, UNLIMITED, meaning};
use super::{defaults, schema, units};

/// Name of the definition that describes the `[defaults]` table.
const DEFAULTS: &str = "defaults";

/// Returns the JSON schema of a configuration file (draft 7, which TOML editors support).
///
/// ```
/// use bulkhead_config as config;
/// let schema = config::json_schema();
/// let grace = &schema["definitions"]["bulkhead.NAME"]["properties"]["grace"];
/// assert_eq!(grace["default"], "100ms");
/// ```
pub fn json_schema() -> Value {
    let mut definitions = Map::new();
    let mut tables: Vec<&str> = schema::all().map(|key| key.table).collect();
    tables.sort_unstable();
    tables.dedup();
    for table in tables.into_iter().filter(|table| *table != key::TOP_LEVEL) {
        definitions.insert(table.to_owned(), table_of(&key::heading(table), table, |_| true));
    }
    let shared = |key: &Key| !key::is_not_allowed_in_defaults(key.name);
    definitions.insert(DEFAULTS.to_owned(), table_of("[defaults]", key::BULKHEAD, shared));
    let mut whole = table_of("Configuration for bulkhead-supervisor", key::TOP_LEVEL, |_| true);
    whole["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    whole["definitions"] = Value::Object(definitions);
    whole
}

fn table_of(title: &str, table: &str, is_wanted: impl Fn(&Key) -> bool) -> Value {
    let keys = schema::all().filter(|key| key.table == table && is_wanted(key));
    let properties: Map<String, Value> = keys.map(|key| (key.name.to_owned(), property(&key))).collect();
    json!({"title": title, "type": "object", "additionalProperties": false, "properties": properties})
}

fn property(key: &Key) -> Value {
    let mut property = value_schema(key);
    if key.about.is_empty() {
        return property;
    }
    property["description"] =
        json!(format!("{}\n\nValue: {}. Default: {}.", key.about, key.kind, key.default));
    // Default values are written in the same way in JSON as in TOML. A default that is computed cannot be written as a
    // value.
    if let Some(value) = default_value(&key.default) {
        property["default"] = value;
    }
    property
}

fn default_value(default: &DefaultValue) -> Option<Value> {
    serde_json::from_str(&default.toml()?).ok()
}

fn value_schema(key: &Key) -> Value {
    match key.kind {
        Kind::Duration(_) => json!({"type": "string", "pattern": anchored(&units::duration_pattern())}),
        Kind::Size { min, max } => size(min, max, &[]),
        Kind::Count { min, max } => integer(min, max),
        Kind::Share { none, all } => {
            let (from, to) = (["exclusiveMinimum", "minimum"], ["exclusiveMaximum", "maximum"]);
            json!({"type": "number", from[usize::from(none)]: 0, to[usize::from(all)]: 1})
        }
        Kind::Number(max) => json!({"type": "number", "exclusiveMinimum": 0, "maximum": max}),
        Kind::Boolean => json!({"type": "boolean"}),
        Kind::Network => {
            let ports = array(integer(1, u16::MAX.into()), 0, defaults::TCP_PORTS_MAX);
            json!({
                "type": ["boolean", "object"],
                "additionalProperties": false,
                "required": ["tcp_ports"],
                "properties": {"tcp_ports": ports, "udp": {"type": "boolean", "default": false}},
            })
        }
        Kind::Mode => json!({"type": "string", "pattern": "^0?[0-7]{3}$"}),
        Kind::Path | Kind::Text => json!({"type": "string", "minLength": 1}),
        Kind::Word(of) => json!({"type": "string", "enum": of}),
        Kind::Words(of) => array(json!({"type": "string", "enum": of}), 0, of.len()),
        Kind::Program => array(json!({"type": "string"}), 1, usize::MAX),
        Kind::Names(max) => array(json!({"type": "string"}), 0, max),
        Kind::Paths(max) => array(json!({"type": "string", "minLength": 1}), 0, max),
        Kind::Ids => json!({"type": "string", "pattern": r"^\s*[0-9]+\s*-\s*[0-9]+\s*$"}),
        Kind::Environment => json!({
            "type": "object",
            "propertyNames": {"pattern": "^(?!BULKHEAD_)[^=]+$"},
            "additionalProperties": {"type": "string"},
        }),
        Kind::Statuses => array(integer(0, u8::MAX.into()), 0, usize::MAX),
        Kind::Limit(resource) => limit(resource),
        Kind::Table => inner_table(key),
        Kind::Tables(max) => array(definition(key.name), 0, max),
    }
}

fn definition(table: &str) -> Value {
    json!({"$ref": format!("#/definitions/{table}")})
}

/// Returns the schema of an inner table. The names of the table's keys are either fixed or chosen by the user.
fn inner_table(key: &Key) -> Value {
    match (key.table, key.name) {
        (key::TOP_LEVEL, "bulkhead") => {
            let pattern = format!("^[a-z0-9._-]{{1,{BULKHEAD_NAME_BYTES_MAX}}}$");
            let mut named = named_tables(json!({"pattern": pattern}), key::BULKHEAD);
            // No minimum number of bulkheads is set, because all bulkheads can be defined in `conf.d`.
            named["maxProperties"] = json!(defaults::BULKHEADS_MAX);
            named
        }
        (key::BULKHEAD, "tenant") => {
            let mut named = named_tables(json!({"minLength": 1, "maxLength": TENANT_BYTES_MAX}), key::TENANT);
            named["maxProperties"] = json!(defaults::TENANT_TABLES_MAX);
            named
        }
        _ => definition(&key.path()),
    }
}

fn named_tables(names: Value, table: &str) -> Value {
    json!({"type": "object", "propertyNames": names, "additionalProperties": definition(table)})
}

fn integer(min: u64, max: u64) -> Value {
    let mut integer = json!({"type": "integer", "minimum": min});
    if max != defaults::NUMBER_MAX {
        integer["maximum"] = json!(max);
    }
    integer
}

fn array(items: Value, min: usize, max: usize) -> Value {
    let mut array = json!({"type": "array", "items": items});
    if min > 0 {
        array["minItems"] = json!(min);
    }
    if max < usize::MAX {
        array["maxItems"] = json!(max);
    }
    array
}

/// Returns the schema of a size, which is written as a number or as a string with a unit.
fn size(min: u64, max: u64, others: &[&str]) -> Value {
    number_or_text(min, max, &units::size_pattern(), others)
}

fn number_or_text(min: u64, max: u64, pattern: &str, others: &[&str]) -> Value {
    let patterns: Vec<&str> = [pattern].iter().chain(others).copied().collect();
    let mut either = integer(min, max);
    either["type"] = json!(["integer", "string"]);
    either["pattern"] = json!(anchored(&patterns.join("|")));
    either
}

fn limit(resource: Resource) -> Value {
    let duration = units::duration_pattern();
    match meaning(resource).0 {
        Measure::Bytes => size(0, defaults::NUMBER_MAX, &[UNLIMITED]),
        Measure::Count => number_or_text(0, defaults::NUMBER_MAX, UNLIMITED, &[]),
        Measure::Seconds => number_or_text(1, defaults::DURATION_MAX.as_secs(), &duration, &[UNLIMITED]),
        Measure::Microseconds => {
            let max = u64::try_from(defaults::DURATION_MAX.as_micros()).unwrap_or(u64::MAX);
            number_or_text(0, max, &duration, &[UNLIMITED])
        }
        Measure::Zero => size(0, 0, &[]),
    }
}

fn anchored(pattern: &str) -> String {
    format!("^(?:{pattern})$")
}

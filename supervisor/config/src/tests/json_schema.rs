//! Compares the JSON schema with the parser, using an independent validator, for every file that any test in this crate
//! parses. The schema must accept all files that the parser accepts, and reject those that the parser rejects because
//! of their shape.

use std::sync::LazyLock;

use jsonschema::Validator;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::units::UnitError;
use super::*;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/workers.schema.json");

static VALIDATOR: LazyLock<Validator> =
    LazyLock::new(|| jsonschema::draft7::new(&json_schema()).expect("the schema is invalid"));

/// Converts a TOML value to JSON. Dates and non-finite numbers become null, because JSON cannot represent them. No
/// key accepts null.
fn as_json(value: toml::Value) -> Value {
    match value {
        toml::Value::Datetime(_) => Value::Null,
        toml::Value::Array(array) => array.into_iter().map(as_json).collect(),
        toml::Value::Table(table) => {
            Value::Object(table.into_iter().map(|(key, value)| (key, as_json(value))).collect())
        }
        toml::Value::String(text) => json!(text),
        toml::Value::Integer(number) => json!(number),
        toml::Value::Float(number) => json!(number),
        toml::Value::Boolean(boolean) => json!(boolean),
    }
}

/// Returns the errors that the schema validator finds in a file, or `None` if the file is not valid TOML.
pub(super) fn complaints(text: &str) -> Option<Vec<String>> {
    let document = as_json(toml::Value::Table(toml::from_str(text).ok()?));
    Some(
        VALIDATOR.iter_errors(&document).map(|error| format!("{}: {error}", error.instance_path())).collect(),
    )
}

/// Returns true if the schema must reject a value that the parser rejected. Excludes problems that a schema cannot
/// express: decimal numbers, because JSON treats 2.0 as 2, and strings with numbers that are too large or have too many
/// decimal places.
fn is_of_shape(problem: &Problem) -> bool {
    let (message, help) = (&problem.message, problem.help.as_deref().unwrap_or_default());
    let uncounted =
        ["the longest duration is", "must be a whole number of nanoseconds", "must fit in 64 bits"];
    if uncounted.iter().any(|words| help.contains(words)) {
        return false;
    }
    let of_another_type =
        [" a string", " a number", " a table", " an array", " a boolean", " a date or time"]
            .iter()
            .any(|found| message.ends_with(&format!(", not{found}")));
    let words = [
        "unknown key `",
        " is not a valid bulkhead name",
        " is not allowed in [defaults]",
        " is not a duration: ",
        " is not a size: ",
        " is not a mode of ",
        " is not a range of IDs: ",
        " has no effect: a tenant's rate limit always applies per tenant",
        " must be one of ",
        " must be a duration with a unit, not a bare number",
        " is reserved: the supervisor sets",
    ];
    of_another_type || words.iter().any(|words| message.contains(words))
}

/// Checks that the schema accepts a file that the parser accepts. If the parser rejects the file, checks that the
/// schema also rejects the file, unless a schema cannot express the problem.
#[track_caller]
pub(super) fn compare(text: &str, parsed: &Result<Config, ConfigErrors>) {
    let Some(complaints) = complaints(text) else { return };
    match parsed {
        Ok(_) => assert!(
            complaints.is_empty(),
            "the reader accepts this, but the schema does not:\n{text}\n{complaints:#?}"
        ),
        Err(errors) => {
            let of_shape = errors.problems().iter().find(|problem| is_of_shape(problem));
            if let Some(problem) = of_shape {
                assert!(
                    !complaints.is_empty(),
                    "the schema accepts this, but the reader does not:\n{text}\n{problem:?}"
                );
            }
        }
    }
}

#[test]
fn json_schema_file_is_up_to_date() {
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(FILE, format!("{:#}\n", json_schema())).unwrap();
    }
    let file = fs::read_to_string(FILE).unwrap_or_else(|error| panic!("cannot read {FILE}: {error}"));
    let file: Value = serde_json::from_str(&file).unwrap();
    assert!(
        file == json_schema(),
        "docs/workers.schema.json is out of date; run this test with UPDATE_DOCS=1"
    );
}

/// Returns the names of the keys that the schema allows in a table.
fn properties(table: &str) -> Vec<String> {
    let schema = json_schema();
    let place = if table.is_empty() { &schema } else { &schema["definitions"][table] };
    assert_eq!(place["additionalProperties"], false, "[{table}] allows unknown keys");
    place["properties"]
        .as_object()
        .unwrap_or_else(|| panic!("[{table}] has no properties"))
        .keys()
        .cloned()
        .collect()
}

#[test]
fn json_schema_has_same_keys_as_reader() {
    let mut tables: Vec<&str> = schema::all().map(|key| key.table).collect();
    tables.sort_unstable();
    tables.dedup();
    for table in &tables {
        let read: std::collections::BTreeSet<_> =
            schema::all().filter(|key| key.table == *table).map(|key| key.name.to_owned()).collect();
        assert_eq!(
            properties(table).into_iter().collect::<std::collections::BTreeSet<_>>(),
            read,
            "[{table}]"
        );
    }
    let schema = json_schema();
    let named = schema["definitions"].as_object().unwrap().keys().map(String::as_str);
    let known = tables.iter().copied().filter(|table| !table.is_empty()).chain(["defaults"]);
    assert!(named.eq(known.collect::<std::collections::BTreeSet<_>>()));
    // The schema must allow the same keys in `[defaults]` as the parser.
    let folder = Folder::new();
    let shared = properties("defaults");
    for key in schema::all().filter(|key| key.table == schema::BULKHEAD) {
        let text = format!("[defaults]\n{} = {}\n{}", key.name, key.example_of_table(), bulkhead(""));
        let refused = folder.parse(&text).err();
        let actual = refused.iter().flat_map(|errors| errors.problems());
        let is_invalid =
            actual.into_iter().any(|problem| problem.message.contains("is not allowed in [defaults]"));
        assert_eq!(shared.iter().any(|name| name == key.name), !is_invalid, "{}", key.name);
    }
}

impl Key {
    /// Returns a valid example value as TOML. For a table, returns an empty table.
    fn example_of_table(&self) -> String {
        if self.kind == Kind::Table { "{}".to_owned() } else { self.example() }
    }
}

#[test]
fn json_schema_describes_every_key() {
    let schema = json_schema();
    for key in reference() {
        let property = &schema["definitions"][key.table]["properties"][key.name];
        let description = property["description"].as_str().unwrap_or_else(|| panic!("{}", key.path()));
        assert!(description.starts_with(key.about), "{description}");
        let is_value = !matches!(key.default, DefaultValue::Described(_));
        assert_eq!(property.get("default").is_some(), is_value, "{}", key.path());
    }
}

#[test]
fn json_schema_rejects_invalid_values() {
    for (line, is_fine) in [
        ("processes = 1024", true),
        ("processes = 1025", false),
        ("processes = 0", false),
        ("processes = \"2\"", false),
        ("processes = 1.5", false),
        ("max_payload = \"64MiB\"", true),
        ("max_payload = \"1.5 mib\"", true),
        ("max_payload = 4096", true),
        ("max_payload = -1", false),
        ("max_payload = \"64M\"", false),
        ("max_payload = \"1.5\"", false),
        ("deadline = \"1m 30s\"", true),
        ("deadline = \"1.5h\"", true),
        ("deadline = \"5\"", false),
        ("deadline = \"5M\"", false),
        ("deadline = \"s\"", false),
        ("pressure = { warn = 1.0 }", true),
        ("pressure = { warn = 0.0 }", false),
        ("priority = { critical_reserve = 0 }", true),
        ("priority = { critical_reserve = 1 }", false),
        ("rlimits = { cpu = 0 }", false),
        ("rlimits = { cpu = \"unlimited\", nofile = \"unlimited\", as = \"1GiB\", core = 0 }", true),
        ("rlimits = { nofile = \"64\" }", false),
        ("rlimits = { core = 1 }", false),
        ("env = { BULKHEAD_X = \"1\" }", false),
        ("env = { X = 1 }", false),
        ("overflow = \"drop\"", false),
        ("sandbox = { best_effort = [\"landlock\"] }", true),
        ("sandbox = { best_effort = [\"magic\"] }", false),
        ("tenant = { acme = { max_queue = 3 } }", true),
        ("tenant = { acme = { nonsense = 3 } }", false),
        ("tenant = { \"\" = {} }", false),
    ] {
        let actual = complaints(&bulkhead(line)).expect("TOML");
        assert_eq!(actual.is_empty(), is_fine, "{line}: {actual:?}");
    }
}

proptest! {
    #![proptest_config(cases(2000))]

    /// Checks that the patterns in the schema accept exactly the strings that the parser accepts.
    #[test]
    fn schema_patterns_match_values_accepted_by_reader(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..7)
    ) {
        let text = pieces.concat();
        let fits = |key: &str| complaints(&bulkhead(&format!("recycle = {{ {key} = \"{text}\" }}"))).map(|all| all.is_empty());
        let is_read = |error: Option<UnitError>| {
            error.is_none_or(|error| matches!(error, UnitError::TooLarge | UnitError::TooFine))
        };
        prop_assert_eq!(fits("age"), Some(is_read(units::parse_duration(&text).err())), "{}", text);
        prop_assert_eq!(fits("rss"), Some(is_read(units::parse_size(&text).err())), "{}", text);
    }
}

/// Fragments from which random durations and sizes are made. Each fragment is so short that a number made of seven
/// fragments does not overflow.
const PIECES: [&str; 20] = [
    "0", "1", "59", "27", " ", ".", "s", "ms", "µs", "min", "month", "d", "M", "KiB", "mib", "B", "kB", "TB",
    "k", "-",
];

/// Returns the TOML examples on a page: fenced code blocks, and here-documents in shell commands.
fn examples(text: &str) -> Vec<&str> {
    let fenced = text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
    let written = text.split("<<'TOML'\n").skip(1).filter_map(|rest| rest.split("\nTOML\n").next());
    fenced.chain(written).collect()
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn json_schema_accepts_all_documented_examples() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut files = vec![root.join("README.md")];
    files_below(&root.join("docs"), &mut files);
    files_below(&root.join("examples"), &mut files);
    let mut seen = 0;
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_ours = name.ends_with(".toml") && name != "Cargo.toml";
        let text = match is_ours || name.ends_with(".md") {
            true => fs::read_to_string(&file).unwrap(),
            false => continue,
        };
        for example in if is_ours { vec![text.as_str()] } else { examples(&text) } {
            // An example without a bulkhead must be valid when a minimal bulkhead is added.
            let whole = if example.contains("[bulkhead") {
                example.to_owned()
            } else {
                format!("{example}\n{}", bulkhead(""))
            };
            let actual =
                complaints(&whole).unwrap_or_else(|| panic!("{}: invalid TOML:\n{whole}", file.display()));
            assert!(actual.is_empty(), "{}:\n{whole}\n{actual:#?}", file.display());
            seen += 1;
        }
    }
    assert!(seen >= 8, "too few examples: {seen}");
}

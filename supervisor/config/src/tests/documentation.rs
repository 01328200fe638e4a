//! Checks that the tables in `docs/configuration.md` match the declared keys, and that the examples on the page are
//! valid. `UPDATE_DOCS=1 cargo test -p bulkhead-config` updates the tables.

use std::fmt::Write as _;

use super::*;

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");

fn docs() -> String {
    fs::read_to_string(DOCS).unwrap_or_else(|error| panic!("cannot read {DOCS}: {error}"))
}

/// Returns the generated text between `<!-- keys: TABLE -->` and `<!-- end -->`.
fn table(name: &str) -> String {
    let mut table = String::from("| key | value | default | meaning |\n| --- | --- | --- | --- |\n");
    for key in reference().into_iter().filter(|key| key.table == name) {
        writeln!(table, "| `{}` | {} | {} | {} |", key.name, key.kind, key.default, key.about).unwrap();
    }
    table
}

/// Returns the page with all generated parts updated.
fn current(docs: &str) -> String {
    let mut names: Vec<&str> = reference().into_iter().map(|key| key.table).collect();
    names.dedup();
    let parts = names.iter().map(|name| (format!("<!-- keys: {name} -->\n"), table(name)));
    let mut docs = docs.to_owned();
    for (marker, content) in parts {
        let start = docs.find(&marker).unwrap_or_else(|| panic!("{DOCS} has no {marker}")) + marker.len();
        let end = start + docs[start..].find("<!-- end -->").expect("each marker has an end");
        docs.replace_range(start..end, &content);
    }
    docs
}

#[test]
fn documentation_lists_all_configuration_keys() {
    let docs = docs();
    let current = current(&docs);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(DOCS, current).unwrap();
        return;
    }
    assert!(docs == current, "docs/configuration.md is out of date; run this test with UPDATE_DOCS=1");
}

#[test]
fn documented_examples_are_valid_configurations() {
    let docs = docs();
    let examples: Vec<&str> =
        docs.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default()).collect();
    assert!(examples.len() >= 3, "too few examples");
    let folder = Folder::new();
    for example in examples {
        let text = if example.contains("[bulkhead") {
            example.to_owned()
        } else {
            format!("{example}\n{}", bulkhead(""))
        };
        folder.accept(&text);
    }
}

#[test]
fn key_descriptions_are_sentences() {
    for key in reference() {
        assert!(key.about.ends_with('.') && !key.about.contains('|'), "{}: {}", key.path(), key.about);
        assert!(!key.example().is_empty(), "{} has no example", key.path());
    }
}

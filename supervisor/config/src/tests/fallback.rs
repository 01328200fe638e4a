//! Tests of `fallback`, an ordered list of other bulkheads in the file.

use super::*;

/// Returns a file that defines the bulkheads in `others`, and the bulkhead `a` with a `fallback` key on line 3.
fn file(fallback: &str, others: &[&str]) -> String {
    let others: String =
        others.iter().map(|name| format!("[bulkhead.{name}]\nexec = [\"tool\"]\n")).collect();
    format!("{}{others}", bulkhead(&format!("fallback = {fallback}")))
}

/// An array in a bulkhead's table replaces the array in `[defaults]` rather than extending it.
#[test]
fn fallback_list_replaces_list_in_defaults() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    let fallbacks: Vec<_> = config.bulkheads.iter().map(|bulkhead| bulkhead.fallback.as_slice()).collect();
    assert_eq!(fallbacks, [["aa", "mm"].map(str::to_owned).as_slice(), &["mm".to_owned()], &[]]);
    let config = folder.accept(&file("[\"c\", \"b\"]", &["b", "c"]));
    assert_eq!(config.bulkheads[0].fallback, ["c", "b"]);
    assert!(config.summary().contains("\nfallback = [\"c\", \"b\"]\n"));
    assert!(folder.accept(&file("[]", &[])).bulkheads[0].fallback.is_empty());
    let mutual = format!("{}fallback = [\"a\"]\n", file("[\"b\"]", &["b"]));
    assert_eq!(
        folder.accept(&mutual).bulkheads[1].fallback,
        ["a"],
        "mutual fallbacks are valid, because a job goes to each bulkhead once"
    );
}

#[test]
fn fallback_must_name_existing_bulkheads() {
    let folder = Folder::new();
    folder.reject_one(
        &file("[\"b\", \"thumbnial-safe\"]", &["b", "thumbnail-safe"]),
        (3, 18),
        "`fallback` contains `thumbnial-safe`, but there is no bulkhead of that name",
        "did you mean `thumbnail-safe`?",
    );
    folder.reject_one(
        &file("[\"xyzzy\"]", &["b", "c"]),
        (3, 13),
        "contains `xyzzy`",
        "other bulkheads: b, c",
    );
    folder.reject_one(
        &file("[\"b\"]", &[]),
        (3, 13),
        "contains `b`",
        "the configuration file has no other bulkhead: add a [bulkhead.NAME] section",
    );
    folder.reject_one(&file("[\"\"]", &["b"]), (3, 13), "contains ``", "");
    let many: Vec<String> = (0..11).map(|number| format!("other-{number}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    folder.reject_one(
        &file("[\"x\"]", &many),
        (3, 13),
        "contains `x`",
        "write the name of a bulkhead that this configuration file defines",
    );
    let problems = folder.reject(&file("[\"x\", \"y\", 3]", &["b"]));
    assert_eq!(problems.len(), 3, "{problems:#?}");
}

#[test]
fn fallback_can_name_invalid_bulkhead() {
    let text = format!("{}[bulkhead]\nb = 3\n", bulkhead("fallback = [\"b\"]"));
    Folder::new().reject_one(&text, (5, 5), "bulkhead `b` must be a table", "");
}

#[test]
fn bulkhead_cannot_be_its_own_fallback() {
    let folder = Folder::new();
    folder.reject_one(
        &file("[\"b\", \"a\"]", &["b"]),
        (3, 18),
        "bulkhead `a` is a fallback of itself",
        "write the name of another bulkhead, or remove this name",
    );
    let defaults = "[defaults]\nfallback = [\"b\"]\n[bulkhead.b]\nexec = [\"tool\"]\n";
    let text = format!("{defaults}[bulkhead.a]\nexec = [\"tool\"]\n");
    folder.reject_one(
        &text,
        (2, 13),
        "bulkhead `b` would be a fallback of itself: `fallback` in [defaults] names this bulkhead",
        "set `fallback` in [bulkhead.b], as in `fallback = []` for no fallback",
    );
    let config = folder.accept(&text.replace("[bulkhead.b]\n", "[bulkhead.b]\nfallback = []\n"));
    assert_eq!(config.bulkheads[0].fallback, [""; 0]);
    assert_eq!(config.bulkheads[1].fallback, ["b"]);
    folder.accept(&text.replace("[bulkhead.b]\n", "[bulkhead.b]\nfallback = [\"a\"]\n"));
}

#[test]
fn fallback_cannot_name_bulkhead_twice() {
    let folder = Folder::new();
    folder.reject_one(
        &file("[\"b\", \"c\", \"b\"]", &["b", "c"]),
        (3, 23),
        "`fallback` contains `b` twice",
        "remove one of the entries",
    );
    let text = "[defaults]\nfallback = [\"c\", \"c\"]\n[bulkhead.a]\nexec = [\"tool\"]\n[bulkhead.b]\n\
                exec = [\"tool\"]\n[bulkhead.c]\nexec = [\"tool\"]\nfallback = []\n";
    folder.reject_one(text, (2, 18), "`fallback` contains `c` twice", "");
}

#[test]
fn fallback_has_at_most_eight_names() {
    let folder = Folder::new();
    let names = ["b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8", "b9"];
    let array = |count: usize| format!("[\"{}\"]", names[..count].join("\", \""));
    assert_eq!(folder.accept(&file(&array(8), &names)).bulkheads[0].fallback, names[..8]);
    folder.reject_one(
        &file(&array(9), &names),
        (3, 61),
        "`fallback` has more than 8 names",
        "at most 8 remain",
    );
    folder.reject_one(
        &file("\"b\"", &["b"]),
        (3, 12),
        "`fallback` must be an array of strings, not a string",
        "write `fallback = [\"b\"]`",
    );
    folder.reject_one(
        &file("{ b = 1 }", &["b"]),
        (3, 12),
        "`fallback` must be an array of strings, not a table",
        "write `fallback = [\"other\"]`",
    );
    folder.reject_one(&file("[1]", &["b"]), (3, 13), "`fallback[0]` must be a string", "write \"1\"");
    folder.reject_one(
        &bulkhead("falback = [\"b\"]"),
        (3, 1),
        "unknown key `falback`",
        "did you mean `fallback`?",
    );
}

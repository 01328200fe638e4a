//! Tests of the messages for unknown and misplaced keys.

use super::*;

#[test]
fn all_problems_are_reported_in_file_order() {
    let folder = Folder::new();
    let text = r#"[supervisor]
socket_mode = 600
tenant_labels = 5000
max_client = 5

[defaults]
deadline = 5

[bulkhead.one]
exec = ["tool", 1]
processes = 0
max_in_flight = 0
max_queue = 5
adaptive = { min = 1, mode = "observe" }

[bulkhead.TWO]
command = "./thumbnail-worker"
max_result = "1GiB"
nonsense = true
"#;
    let problems = folder.reject(text);
    let actual: Vec<_> =
        problems.iter().map(|problem| (problem.at.unwrap().line, problem.message.as_str())).collect();
    let expected = [
        (2, "`socket_mode` must be a string, not a number"),
        (3, "`tenant_labels` must be from 0 to 1000, not 5000"),
        (4, "unknown key `max_client` in [supervisor]"),
        (7, "`deadline` must be a duration with a unit, not a bare number"),
        (10, "`exec[1]` must be a string, not a number"),
        (11, "`processes` must be from 1 to 1024, not 0"),
        (12, "`max_in_flight` (0) conflicts with the queue (`max_queue` is 5): queued jobs would never run"),
        (14, "`adaptive` needs `max`"),
        (14, "`adaptive` needs `target`"),
        (14, "`adaptive.mode` cannot be \"observe\""),
        (16, "`TWO` is not a valid bulkhead name"),
        (17, "`command` must be an array of strings, not a string"),
        (18, "`max_result` (1GiB) exceeds the supervisor's `max_payload` (64MiB, the default)"),
        (19, "unknown key `nonsense` in [bulkhead.TWO]"),
    ];
    assert_eq!(actual, expected);
    assert!(problems.iter().all(|problem| problem.help.is_some()));
}

#[test]
fn error_report_shows_position_line_and_help() {
    let folder = Folder::new();
    let path = folder.path("workers.toml");
    let errors = folder.parse(&bulkhead("deadlin = \"5s\"")).unwrap_err();
    let expected = format!(
        "\
error: unknown key `deadlin` in [bulkhead.a]
 --> {path}:3:1
  |
3 | deadlin = \"5s\"
  | ^^^^^^^
  |
  = help: did you mean `deadline`?

{path}: 1 error",
        path = path.display()
    );
    assert_eq!(errors.render(false), expected);
    assert_eq!(errors.to_string(), expected);
    assert_eq!(format!("{errors:?}"), expected);
    assert!(errors.render(true).contains("\u{1b}["));
    assert_eq!(errors.path(), path);
    let json = serde_json::to_value(errors.problems()).unwrap();
    let expected = serde_json::json!([{
        "file": path, "line": 3, "column": 1,
        "message": "unknown key `deadlin` in [bulkhead.a]", "help": "did you mean `deadline`?",
    }]);
    assert_eq!(json, expected);
}

#[test]
fn error_suggests_keys_for_terms_from_other_systems() {
    let folder = Folder::new();
    let rows = [
        (
            "timeout = \"5s\"",
            1,
            "unknown key",
            "write `deadline = \"5s\"` for the waiting and running time of a job, or `run_limit = \"5s\"`",
        ),
        ("replicas = 2", 1, "unknown key", "write `processes = 2`"),
        ("workers = 2", 1, "unknown key", "write `processes = 2`"),
        ("concurrency = 8", 1, "unknown key", "write `max_in_flight = 8`"),
        (
            "memory = \"1GiB\"",
            1,
            "unknown key",
            "write `cgroup.memory = \"1GiB\"` for all processes of a worker",
        ),
        ("max_queue: 5", 10, "`:` in place of `=`", "write `max_queue = 5`"),
        ("recycle = { jobs: 5, age = \"1h\" }", 17, "`:` in place of `=`", "write `jobs = 5`"),
        ("sandbox.network = yes", 19, "must be quoted", "write `true`"),
        ("sandbox.network = Off", 19, "must be quoted", "write `false`"),
        (
            "max_queue = -1",
            13,
            "not -1",
            "write `max_queue = 0`; `-1` does not mean unlimited, the maximum is",
        ),
        ("sandbox = \"strict\"", 11, "must be a table", "write `sandbox = { profile = \"strict\" }`"),
        ("rate_limit = 100", 14, "must be a table", "write `rate_limit = { per_second = 100 }`"),
        ("retry = 3", 9, "must be a table", "write `retry = { attempts = 3 }`"),
    ];
    for (line, column, message, help) in rows {
        folder.reject_one(&bulkhead(line), (3, column), message, help);
        let report = folder.parse(&bulkhead(line)).unwrap_err().to_string();
        assert!(report.contains(&format!("3 | {line}\n")), "{report}");
    }
    let shell = "write `exec = [\"sh\", \"-c\", \"sort -n | uniq\"]`";
    folder.reject_one("[bulkhead.a]\nexec = \"sort -n | uniq\"\n", (2, 8), "not a string", shell);
    folder.reject_one("[bulkhead.a]\nexec = [\"sort -n | uniq\"]\n", (2, 9), "there is no program", shell);
    let split = "write `exec = [\"sort\", \"-n\"]`";
    folder.reject_one("[bulkhead.a]\nexec = [\"sort -n\"]\n", (2, 9), "there is no program", split);
}

#[test]
fn error_columns_count_characters_instead_of_bytes() {
    let folder = Folder::new();
    let text = bulkhead("env = { \"größe\" = 1 }");
    folder.reject_one(&text, (3, 19), "`env.größe` must be a string", "");
    assert!(folder.parse(&text).unwrap_err().to_string().contains("workers.toml:3:19"));
}

#[test]
fn error_report_escapes_control_characters() {
    let folder = Folder::new();
    let text = bulkhead("\"\\u001b[31m\" = 1\ndeadline = \"\\u001b]0;x\\u0007\"\nenv = { \"\\u009b\" = 1 }");
    let report = folder.parse(&text).unwrap_err().to_string();
    assert!(!report.chars().any(|c| c.is_control() && c != '\n'), "{report:?}");
}

#[test]
fn error_report_shows_first_100_errors() {
    let lines: String = (0..150).map(|number| format!("x{number} = 1\n")).collect();
    let errors = Folder::new().parse(&bulkhead(&lines)).unwrap_err();
    assert_eq!(errors.problems().len(), 150);
    let report = errors.to_string();
    assert_eq!(report.matches("error: unknown key").count(), 100);
    assert!(report.ends_with("150 errors, of which the first 100 are shown"), "{report}");
}

#[test]
fn syntax_errors_have_position_and_help() {
    let folder = Folder::new();
    folder.reject_one(
        "[bulkhead.a]\ndeadline = 5s\n",
        (2, 12),
        "string values must be quoted",
        "write \"5s\"",
    );
    folder.reject_one("a = \nb = 1\n", (1, 5), "string values must be quoted", "write a value after the `=`");
    folder.reject_one("a = 1\na = 2\n", (2, 1), "duplicate key", "remove one of the two lines");
    folder.reject_one("[a]\n[a]\n", (2, 2), "duplicate key", "remove one of the two lines");
    folder.reject_one("a 1\n", (1, 3), "key with no value", "write `key = value`");
    folder.reject_one("[a\n", (1, 3), "unclosed table", "close the heading with `]`");
    folder.reject_one("a = 'x' 'y'\n", (1, 9), "unexpected key or value", "a separate line");
    folder.reject_one("a = \"x\n", (1, 7), "invalid basic string", "on the same line");
    folder.reject_one("[bulkhead.ä]\n", (1, 11), "invalid unquoted key", "quote any other");
    let problems = folder.reject("a = 1s\nb = 2s\n[c\n");
    let lines: Vec<_> = problems.iter().map(|problem| problem.at.unwrap().line).collect();
    assert_eq!(lines, [1, 2, 3], "{problems:#?}");
}

#[test]
fn configuration_requires_at_least_one_bulkhead() {
    let folder = Folder::new();
    folder.reject_one("", (1, 1), "the configuration file contains no bulkheads", "[bulkhead.NAME]");
    folder.reject_one("# nothing\n", (1, 1), "the configuration file contains no bulkheads", "");
    folder.reject_one("[defaults]\n[bulkhead]\n", (2, 2), "the configuration file contains no bulkheads", "");
    folder.reject_one(
        "bulkhead = 3\n",
        (1, 12),
        "`bulkhead` must be a table, not a number",
        "[bulkhead.NAME]",
    );
    folder.reject_one(
        "[[bulkhead]]\nexec = [\"tool\"]\n",
        (1, 1),
        "must be a table, not an array",
        "[bulkhead.NAME]",
    );
}

#[test]
fn invalid_bulkhead_names_are_rejected() {
    let folder = Folder::new();
    let named = |name: &str| format!("[bulkhead.\"{name}\"]\nexec = [\"tool\"]\n");
    folder.accept(&named("a-b_c.9"));
    folder.accept(&named(&"x".repeat(64)));
    folder.reject_one(
        &named("PDF to Text"),
        (1, 11),
        "`PDF to Text` is not a valid bulkhead name",
        "as in `pdf-to-text`",
    );
    folder.reject_one(&named(""), (1, 11), "is not a valid bulkhead name", "1 to 64 characters from a-z");
    folder.reject_one(&named(&"x".repeat(65)), (1, 11), "is not a valid bulkhead name", "1 to 64");
}

#[test]
fn error_suggests_table_for_misplaced_key() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("max_clients = 3"),
        (3, 1),
        "unknown key",
        "`max_clients` belongs in [supervisor]",
    );
    folder.reject_one(
        &bulkhead("backoff = \"1s\""),
        (3, 1),
        "",
        "`backoff` belongs in [bulkhead.NAME.restart]",
    );
    folder.reject_one(
        &bulkhead("within = \"1s\""),
        (3, 1),
        "",
        "`within` belongs in [bulkhead.NAME.poison] or [bulkhead.NAME.restart]",
    );
    folder.reject_one(
        &format!("grace = \"1s\"\n{}", bulkhead("")),
        (1, 1),
        "",
        "`grace` belongs in [bulkhead.NAME]",
    );
    folder.reject_one(
        &bulkhead("[workers]"),
        (3, 2),
        "unknown key `workers`",
        "write the bulkhead as [bulkhead.workers]",
    );
    folder.reject_one(
        &bulkhead("[suprvisor]"),
        (3, 2),
        "unknown key `suprvisor`",
        "did you mean `supervisor`?",
    );
    folder.reject_one(
        &bulkhead("colour = 1"),
        (3, 1),
        "unknown key `colour`",
        "valid keys: command, library",
    );
    folder.reject_one(
        &bulkhead("ratelimit = 1"),
        (3, 1),
        "unknown key `ratelimit`",
        "did you mean `rate_limit`?",
    );
    let problems = folder.reject("[bulkhead]\ndeadline = \"5s\"\n");
    assert_problem(
        &problems[0],
        (2, 12),
        "bulkhead `deadline` must be a table",
        "set a key for all bulkheads in [defaults]",
    );
}

#[test]
fn defaults_cannot_set_a_program() {
    let folder = Folder::new();
    for key in ["command = [\"tool\"]", "exec = [\"tool\"]", "library = \"libthumb.so\"", "entry = \"e\""] {
        let name = key.split(' ').next().unwrap();
        let text = format!("[defaults]\n{key}\n{}", bulkhead(""));
        folder.reject_one(
            &text,
            (2, 1),
            &format!("`{name}` is not allowed in [defaults]"),
            "set the program in each",
        );
    }
    folder.reject_one(
        &format!("[defaults.tenant.acme]\nmax_queue = 3\n{}", bulkhead("")),
        (1, 11),
        "`tenant` is not allowed in [defaults]",
        "set the tenants in each [bulkhead.NAME] instead",
    );
}

#[test]
fn unknown_key_in_defaults_gets_only_allowed_suggestions() {
    let folder = Folder::new();
    for key in ["colour", "comand"] {
        let problems = folder.reject(&format!("[defaults]\n{key} = 1\n{}", bulkhead("")));
        let help = problems[0].help.as_deref().unwrap();
        let keys: Vec<_> = help.strip_prefix("valid keys: ").unwrap().split(", ").collect();
        assert!(keys.contains(&"env") && keys.contains(&"tenants"), "{help}");
        let not_allowed = ["command", "exec", "library", "entry", "tenant"];
        assert!(not_allowed.iter().all(|key| !keys.contains(key)), "{help}");
    }
}

#[test]
fn invalid_default_is_reported_once() {
    let folder = Folder::new();
    let text = format!(
        "{}grace = \"1s\"\n[bulkhead.b]\nexec = [\"tool\"]\n[defaults]\ngrace = 1\ncwd = \"none\"\n",
        bulkhead("")
    );
    let problems = folder.reject(&text);
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert_problem(&problems[0], (8, 9), "`grace` must be a duration", "write `grace = \"1s\"`");
    assert_problem(&problems[1], (9, 7), "`cwd`: there is no directory", "");
}

/// Returns a file that is valid except for `line`, which sets a key in the table `table`. This key is on line 1 of the
/// file.
fn with_key(table: &str, line: &str) -> String {
    match table {
        "" => format!("{line}\n{}", bulkhead("")),
        "supervisor" => format!("supervisor.{line}\n{}", bulkhead("")),
        "access" => format!("access = [{{ {line} }}]\n{}", bulkhead("")),
        inner => {
            let inner = inner.strip_prefix("bulkhead.NAME").unwrap();
            let program = if line.starts_with("command") {
                ""
            } else {
                "bulkhead.a.command = [\"./thumbnail-worker\"]"
            };
            format!("bulkhead.a{inner}.{line}\n{program}\n")
        }
    }
}

/// Returns the name that messages use for the key `name` in the table `table`.
fn label(table: &str, name: &str) -> String {
    match table.strip_prefix("bulkhead.NAME.") {
        Some(inner) => format!("{inner}.{name}"),
        None if table == schema::ACCESS => format!("{table}.{name}"),
        None => name.to_owned(),
    }
}

#[test]
fn every_key_rejects_values_of_the_wrong_type() {
    let folder = Folder::new();
    for key in reference() {
        let text = with_key(key.table, &format!("{} = 1979-05-27", key.name));
        let problems = folder.reject(&text);
        let about_it =
            |problem: &&Problem| problem.message.contains(&format!("`{}`", label(key.table, key.name)));
        let problem =
            problems.iter().find(about_it).unwrap_or_else(|| panic!("{}: {problems:#?}", key.path()));
        assert_eq!(problem.at.unwrap().line, 1);
    }
}

#[test]
fn fork_mode_requires_command_and_shared_workers() {
    let folder = Folder::new();
    let text = |what: &str, keys: &str| format!("[bulkhead.b]\n{what}\nstart.mode = \"fork\"\n{keys}\n");
    let (command, none) = ("command = [\"/bin/true\"]", "sandbox.profile = \"none\"");
    let isolated = text(command, &format!("{none}\ntenants = {{ isolate = true, max_active = 2 }}"));
    folder.reject_one(&isolated, (3, 14), "isolated tenants would share a template", "");
    let exec = text("exec = [\"/bin/true\"]", none);
    folder.reject_one(&exec, (3, 14), "each job runs a new program", "");
    folder.reject_one(&text("library = \"/bin/true\"", none), (3, 14), "a library", "");
}

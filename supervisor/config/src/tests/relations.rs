//! Tests of values that are valid on their own but contradict each other.

use std::time::Duration;

use super::*;

#[test]
fn deadline_cannot_exceed_deadline_max() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("deadline = \"5s\"\ndeadline_max = \"2s\""),
        (3, 12),
        "`deadline` (5s) exceeds `deadline_max` (2s)",
        "set `deadline_max` to at least \"5s\", or `deadline` to at most \"2s\"",
    );
    folder.reject_one(
        &bulkhead("deadline_max = \"2s\""),
        (3, 16),
        "`deadline` (30s, the default) exceeds `deadline_max` (2s)",
        "`deadline` to at most \"2s\"",
    );
}

#[test]
fn rule_violation_is_reported_at_the_bulkhead_key() {
    let folder = Folder::new();
    let text = format!("{}[defaults]\ndeadline_max = \"40s\"\n", bulkhead("deadline = \"41s\""));
    folder.reject_one(&text, (3, 12), "(41s) exceeds `deadline_max` (40s, from [defaults])", "");
}

#[test]
fn rule_violation_in_defaults_is_reported_once() {
    let folder = Folder::new();
    let text = "[defaults]\ndeadline_max = \"1s\"\n[bulkhead.a]\nexec = [\"tool\"]\n[bulkhead.b]\nexec = [\"tool\"]\n";
    folder.reject_one(text, (2, 16), "`deadline` (30s, the default)", "");
}

#[test]
fn run_limit_cannot_exceed_longest_deadline() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("run_limit = \"40s\""),
        (3, 13),
        "`run_limit` (40s) exceeds `deadline` (30s, the default)",
        "set `deadline` to at least \"40s\", or `run_limit` to at most \"30s\"",
    );
    folder.reject_one(
        &bulkhead("run_limit = \"3s\"\ndeadline = \"1s\"\ndeadline_max = \"2s\""),
        (3, 13),
        "`run_limit` (3s) exceeds `deadline_max` (2s)",
        "set `deadline_max` to at least \"3s\", or `run_limit` to at most \"2s\"",
    );
    let text = format!("[defaults]\nrun_limit = \"40s\"\n{}", bulkhead(""));
    folder.reject_one(&text, (2, 13), "(40s, from [defaults]) exceeds `deadline` (30s, the default)", "");
    // The value is accepted, because a client can request a deadline of up to `deadline_max`.
    let long = folder.accept(&bulkhead("run_limit = \"2s\"\ndeadline = \"1s\"\ndeadline_max = \"2s\""));
    assert_eq!(long.bulkheads[0].run_limit, Some(Duration::from_secs(2)));
    // A value in `[defaults]` is ignored for bulkheads with a shorter deadline.
    let text = format!("[defaults]\nrun_limit = \"3s\"\n{}", bulkhead("deadline = \"2s\""));
    let config = folder.accept(&text);
    assert_eq!(config.bulkheads[0].run_limit, None);
    assert_eq!(folder.again(&config), config);
}

#[test]
fn adaptive_target_cannot_exceed_longest_deadline() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("adaptive = { max = 1, target = \"40s\" }"),
        (3, 32),
        "`adaptive.target` (40s) exceeds `deadline` (30s, the default)",
        "set `deadline` to at least \"40s\", or `target` to at most \"30s\"",
    );
    folder.accept(&bulkhead("adaptive = { max = 1, target = \"40s\" }\ndeadline_max = \"40s\""));
}

#[test]
fn exec_bulkhead_rejects_lookahead() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("lookahead = \"5ms\""),
        (3, 13),
        "`lookahead` has no effect with `exec`",
        "remove `lookahead`",
    );
    folder.accept(&bulkhead("lookahead = \"0s\""));
    let config = folder.accept(&format!("[defaults]\nlookahead = \"5ms\"\n{}", bulkhead("")));
    assert_eq!(config.bulkheads[0].lookahead, Duration::ZERO);
    let text = "[bulkhead.a]\nlibrary = \"libthumb.so\"\nlookahead = \"5ms\"\n";
    assert_eq!(folder.accept(text).bulkheads[0].lookahead, Duration::from_millis(5));
}

#[test]
fn queue_requires_permits() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("max_queue = 10\nmax_in_flight = 0"),
        (4, 17),
        "`max_in_flight` (0) conflicts with the queue (`max_queue` is 10)",
        "set `max_in_flight` to at least 1",
    );
    let text = format!("[defaults]\nmax_queue = 3\n{}", bulkhead("max_in_flight = 0"));
    folder.reject_one(&text, (5, 17), "(`max_queue` is 3, from [defaults])", "");
    let text = format!("[defaults]\nmax_in_flight = 0\n{}", bulkhead("max_queue = 3"));
    folder.reject_one(&text, (5, 13), "`max_in_flight` (0, from [defaults])", "");
}

#[test]
fn bulkhead_has_at_most_one_million_permits() {
    let folder = Folder::new();
    folder.accept(&bulkhead("processes = 1000\nmax_in_flight = 1000"));
    folder.reject_one(
        &bulkhead("processes = 1000\nmax_in_flight = 1001"),
        (3, 13),
        "`processes` (1000) × `max_in_flight` (1001) exceeds 1000000",
        "`max_in_flight = 1000` or less",
    );
}

#[test]
fn payload_limit_cannot_exceed_supervisor_limit() {
    let folder = Folder::new();
    for name in ["max_payload", "max_result"] {
        let message = format!("`{name}` (65MiB) exceeds the supervisor's `max_payload` (64MiB, the default)");
        let help = format!("set `{name}` to at most \"64MiB\"");
        folder.reject_one(&bulkhead(&format!("{name} = \"65MiB\"")), (3, name.len() + 4), &message, &help);
        folder.accept(&format!(
            "[supervisor]\nmax_payload = \"65MiB\"\n{}",
            bulkhead(&format!("{name} = \"65MiB\""))
        ));
    }
    let text = format!("[supervisor]\nmax_payload = \"1MiB\"\n{}", bulkhead("max_result = \"2MiB\""));
    folder.reject_one(&text, (5, 14), "(2MiB) exceeds the supervisor's `max_payload` (1MiB)", "");
}

#[test]
fn max_buffered_must_hold_largest_payload() {
    let folder = Folder::new();
    let text = format!("[supervisor]\nmax_payload = \"1GiB\"\n{}", bulkhead(""));
    folder.reject_one(
        &text,
        (2, 15),
        "`max_buffered` (512MiB, the default)",
        "write `max_buffered = \"1GiB\"`",
    );
    let text = format!("[supervisor]\nmax_buffered = 1\n{}", bulkhead(""));
    folder.reject_one(&text, (2, 16), "(1B) is below `max_payload` (64MiB, the default)", "");
}

#[test]
fn max_pooled_must_allow_at_least_two_memory_files() {
    let folder = Folder::new();
    let text = |size: &str| format!("[supervisor]\nmax_pooled = {size}\n{}", bulkhead(""));
    folder.reject_one(
        &text("1"),
        (2, 14),
        "too small for the memory files of a payload",
        "write `max_pooled = \"512KiB\"`",
    );
    folder.reject_one(&text("524287"), (2, 14), "too small", "or `max_pooled = 0` to disable memory files");
    for good in ["0", "524288"] {
        folder.accept(&text(good));
    }
}

#[test]
fn backoff_cannot_exceed_backoff_max() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("restart = { backoff_max = \"10ms\" }"),
        (3, 27),
        "`restart.backoff` (100ms, the default) exceeds `restart.backoff_max` (10ms)",
        "set `backoff_max` to at least \"100ms\", or `backoff` to at most \"10ms\"",
    );
}

#[test]
fn bulkhead_requires_exactly_one_program() {
    let folder = Folder::new();
    folder.reject_one("[bulkhead.a]\n", (1, 11), "bulkhead `a` has no program to run", "`command = [");
    folder.reject_one(
        &bulkhead("library = \"libthumb.so\"\ncommand = [\"./thumbnail-worker\"]"),
        (4, 11),
        "bulkhead `a` has `command` and `library` and `exec`",
        "keep only one key",
    );
    folder.reject_one(&bulkhead("entry = \"handle\""), (3, 9), "`entry` needs `library`", "");
}

#[test]
fn invalid_value_causes_no_second_error() {
    let folder = Folder::new();
    folder.reject_one(&bulkhead("deadline = 5\ndeadline_max = \"10s\""), (3, 12), "not a bare number", "");
    folder.reject_one(&bulkhead("max_in_flight = 0\nmax_queue = \"x\""), (4, 13), "`max_queue`", "");
    folder.reject_one("[bulkhead.a]\nexec = 3\n", (2, 8), "`exec` must be an array of strings", "");
    let text = format!("[defaults]\ndeadline = 5\n{}", bulkhead("deadline_max = \"10s\""));
    folder.reject_one(&text, (2, 12), "not a bare number", "");
}

#[test]
fn jobs_and_admin_sockets_must_differ() {
    let folder = Folder::new();
    let text = format!("[supervisor]\nsocket = \"a.sock\"\nadmin = \"./a.sock\"\n{}", bulkhead(""));
    folder.reject_one(&text, (3, 9), "`socket` and `admin` have the same path", "");
    let text = format!("[supervisor]\nsocket = \"x/admin.sock\"\n{}", bulkhead(""));
    folder.reject_one(&text, (2, 10), "`socket` and `admin` have the same path", "");
    std::os::unix::fs::symlink(folder.path("work"), folder.path("link")).unwrap();
    let text = format!("[supervisor]\nsocket = \"work/a.sock\"\nadmin = \"link/a.sock\"\n{}", bulkhead(""));
    folder.reject_one(&text, (3, 9), "`socket` and `admin` have the same path", "");
}

#[test]
fn misspelt_key_is_not_also_reported_as_missing() {
    let folder = Folder::new();
    folder.reject_one(
        "[bulkhead.a]\nexce = [\"tool\"]\n",
        (2, 1),
        "unknown key `exce`",
        "did you mean `exec`?",
    );
    let text = bulkhead("dedline = \"5s\"\ndeadline_max = \"10s\"");
    folder.reject_one(&text, (3, 1), "unknown key `dedline`", "did you mean `deadline`?");
}

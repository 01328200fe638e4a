//! Tests of the keys for `exec` programs.

use std::time::Duration;

use super::*;

#[test]
fn output_grace_can_be_zero() {
    let config = Folder::new().accept(&bulkhead("output_grace = \"0s\""));
    assert_eq!(config.bulkheads[0].output_grace, Some(Duration::ZERO));
}

#[test]
fn exit_statuses_must_be_valid_and_in_only_one_list() {
    let folder = Folder::new();
    let cases = [
        (
            "ok = [0, 256]",
            22,
            "`exit_status.ok[1]` must be an exit status from 0 to 255, not 256",
            "ok = [0, 1]",
        ),
        ("ok = [-1]", 22, "`exit_status.ok[0]` must be an exit status from 0 to 255, not -1", "ok = [0, 1]"),
        (
            "caller = [\"2\"]",
            26,
            "`exit_status.caller[0]` must be an exit status from 0 to 255, not a string",
            "",
        ),
        ("ok = 1", 22, "`exit_status.ok` must be an array of exit statuses, not a number", "ok = [0, 1]"),
        ("retryable = [3, 3]", 29, "`exit_status.retryable` lists 3 twice", "remove one"),
        (
            "ok = [0, 1], caller = [1]",
            39,
            "lists 1 in both `ok` and `caller`",
            "remove the status from one of the two lists",
        ),
        ("ok = []", 22, "`exit_status.ok` is empty, so no job could succeed", "ok = [0]"),
        (
            "retryable = [0]",
            29,
            "`exit_status.retryable` contains 0 and `ok` is not set, so no job could succeed",
            "ok = [1]",
        ),
        ("callers = [1]", 17, "unknown key `callers`", "did you mean `caller`?"),
    ];
    for (keys, column, message, help) in cases {
        folder.reject_one(&bulkhead(&format!("exit_status = {{ {keys} }}")), (3, column), message, help);
    }
    let config = folder.accept(&bulkhead("exit_status = { ok = [64] , caller = [75] }"));
    let expected = ExitStatus { ok: vec![64], caller: vec![75], retryable: vec![] };
    assert_eq!(config.bulkheads[0].exit_status, Some(expected));
}

#[test]
fn job_files_must_have_plain_names() {
    let folder = Folder::new();
    for name in ["a/b", "/etc/passwd", ".", "..", "a/"] {
        let text = bulkhead(&format!("files = {{ input = \"{name}\" }}"));
        let message = format!("the name of a file in the job's own directory, not `{name}`");
        folder.reject_one(&text, (3, 19), &message, "input = \"input.txt\"");
    }
    let long = bulkhead(&format!("files = {{ input = \"{}\" }}", "n".repeat(256)));
    folder.reject_one(&long, (3, 19), "the name of a file", "write a name of at most 255 bytes without `/`");
    folder.reject_one(&bulkhead("files = { output = \"\" }"), (3, 20), "is empty", "output = \"out.mp4\"");
    for files in ["input = \"-i x\"", "output = \".hidden\"", "input = \"same\", output = \"same\""] {
        folder.accept(&bulkhead(&format!("files = {{ {files} }}")));
    }
    folder.reject_one(
        &bulkhead("files = {}"),
        (3, 1),
        "`files` names neither `input` nor `output`",
        "remove `files`",
    );
}

#[test]
fn job_files_forbid_cwd_and_require_temporary_folder() {
    let folder = Folder::new();
    let files = "files = { input = \"in\" }";
    let text = bulkhead(&format!("cwd = \"work\"\n{files}"));
    folder.reject_one(&text, (3, 7), "`cwd` and `files` cannot be combined", "remove `cwd`");
    folder.accept(&format!("[defaults]\ncwd = \"work\"\n{}", bulkhead(files)));
    let text = bulkhead(&format!("{files}\nsandbox = {{ tmp = 0 }}"));
    folder.reject_one(&text, (4, 19), "`files` needs a temporary directory", "tmp = \"64MiB\"");
    folder.accept(&bulkhead(&format!("{files}\nsandbox = {{ profile = \"none\" }}")));
}

#[test]
fn exec_keys_require_exec_program() {
    let folder = Folder::new();
    let command = "[bulkhead.a]\ncommand = [\"tool\"]\n";
    for (key, column) in
        [("output_grace = \"2s\"", 16), ("exit_status = { ok = [1] }", 1), ("files = { input = \"x\" }", 1)]
    {
        let name = key.split(' ').next().unwrap();
        let message = format!("`{name}` has no effect: bulkhead `a` has no `exec`");
        folder.reject_one(&format!("{command}{key}\n"), (3, column), &message, &format!("remove `{name}`"));
        folder.accept(&format!("[defaults]\n{key}\n{command}"));
    }
}

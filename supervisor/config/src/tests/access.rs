//! Tests of `[[access]]`: the rules, and the resulting modes of sockets and folders.

use super::*;

/// Returns a file with a single access rule. The heading of the rule is on line 3, and `lines` contains the keys.
fn entry(lines: &str) -> String {
    bulkhead(&format!("[[access]]\n{lines}"))
}

#[test]
fn access_rule_can_set_every_key() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    let names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
    let access = |who, bulkheads, tenants| AccessConfig { who, role: Role::Jobs, bulkheads, tenants };
    let file = |name, secret: &str| {
        Who::TokenFile(TokenFile { path: folder.path(name), token: Token::new(secret.as_bytes()) })
    };
    let expected = [
        access(Who::Uid(0), names(&["aa", "zz.last"]), None),
        access(Who::Gid(0), None, None),
        access(Who::Gid(7), None, names(&["acme", "big \"tenant\"\u{85}"])),
        access(file("jobs-token", "a-token-for-the-jobs"), None, names(&["acme"])),
        AccessConfig { role: Role::Read, ..access(file("read-token", "a-token-for-readers"), None, None) },
    ];
    assert_eq!(config.access, expected);
    let json = serde_json::to_value(&config.access[4]).unwrap();
    let path = folder.path("read-token");
    assert_eq!(json["who"], serde_json::json!({ "token_file": path }));
    assert_eq!(json["role"], "read");
    let json = serde_json::to_value(&config.access[2]).unwrap();
    assert_eq!(json["who"], serde_json::json!({ "gid": 7 }));
}

#[test]
fn access_can_be_inline_or_empty() {
    let folder = Folder::new();
    let config =
        folder.accept(&format!("access = [{{ uid = 4294967294 }}, {{ gid = 0 }}]\n{}", bulkhead("")));
    let whos: Vec<_> = config.access.iter().map(|entry| entry.who.clone()).collect();
    assert_eq!(whos, [Who::Uid(u32::MAX - 1), Who::Gid(0)]);
    assert_eq!(folder.accept(&config.summary()).access, config.access);
    let config = folder.accept(&format!("access = []\n{}", bulkhead("")));
    assert_eq!((config.supervisor.socket_mode, config.access.len()), (0o600, 0));
}

#[test]
fn access_rules_open_socket_unless_mode_is_set() {
    let modes = |text: &str| {
        let supervisor = Folder::new().accept(text).supervisor;
        (supervisor.socket_mode, supervisor.folder_mode)
    };
    let with_mode = |mode: &str, text: &str| format!("[supervisor]\nsocket_mode = \"{mode}\"\n{text}");
    assert_eq!(modes(&bulkhead("")), (0o600, 0o700));
    assert_eq!(modes(&with_mode("0666", &bulkhead(""))), (0o666, 0o700));
    assert_eq!(modes(&entry("uid = 5")), (0o666, 0o755));
    assert_eq!(modes(&with_mode("0660", &entry("uid = 5"))), (0o660, 0o755));
    assert_eq!(modes(&with_mode("0600", &entry("uid = 5"))), (0o600, 0o700));
    let summary = Folder::new().accept(&entry("uid = 5")).summary();
    assert!(
        summary.contains(
            "socket_mode = \"0666\"\n# if the socket's directory does not exist, it is created with \
             mode 0755\n"
        ),
        "{summary}"
    );
}

#[test]
fn access_rule_must_name_exactly_one_user_or_group() {
    let folder = Folder::new();
    folder.reject_one(
        &entry("bulkheads = [\"a\"]"),
        (3, 1),
        "an `access` entry does not name a user, group or token",
        "add `uid = 1001`",
    );
    folder.reject_one(
        &entry("group = \"root\"\ntenants = [\"t\"]\nuid = 3"),
        (6, 7),
        "an `access` entry has `uid` and `group`, but must name a single user, group or token",
        "keep only one key",
    );
    folder.reject_one(
        &entry("usr = \"root\""),
        (4, 1),
        "unknown key `usr` in [[access]]",
        "did you mean `user`?",
    );
    folder.reject_one(&entry("uid = -1"), (4, 7), "`access.uid` must be from 0 to 4294967294, not -1", "");
    folder.reject_one(&entry("gid = 4294967295"), (4, 7), "`access.gid` must be from 0 to 4294967294", "");
    folder.reject_one(
        &entry("uid = \"1001\""),
        (4, 7),
        "`access.uid` must be a whole number",
        "`uid = 1001`",
    );
    folder.reject_one(
        &entry("user = 1001"),
        (4, 8),
        "`access.user` must be a string",
        "write `user = \"www-data\"`",
    );
}

#[test]
fn access_rule_rejects_unknown_users_and_groups() {
    let folder = Folder::new();
    assert_eq!(folder.accept(&entry("user = \"root\"")).access[0].who, Who::Uid(0));
    folder.reject_one(
        &entry("user = \"no-such-user\""),
        (4, 8),
        "`access.user`: there is no user `no-such-user`",
        "write a name that `getent passwd` lists, or create the user",
    );
    folder.reject_one(
        &entry("group = \"no such group\""),
        (4, 9),
        "`access.group`: there is no group `no such group`",
        "write a name that `getent group` lists",
    );
}

#[test]
fn access_rule_must_name_existing_bulkheads() {
    let folder = Folder::new();
    let text = |names: &str| {
        format!("[[access]]\nuid = 1\nbulkheads = {names}\n[bulkhead.thumbs]\nexec = [\"tool\"]\n")
    };
    folder.accept(&text("[\"thumbs\"]"));
    folder.reject_one(
        &text("[\"thumbs\", \"thumb\"]"),
        (3, 24),
        "`access.bulkheads` contains `thumb`, but there is no bulkhead of that name",
        "did you mean `thumbs`?",
    );
    folder.reject_one(&text("[\"pdf\"]"), (3, 14), "contains `pdf`", "available bulkheads: thumbs");
    folder.reject_one(&text("[\"thumbs\", \"thumbs\"]"), (3, 24), "contains `thumbs` twice", "remove one");
    folder.reject_one(
        &text("\"thumbs\""),
        (3, 13),
        "must be an array of strings",
        "`bulkheads = [\"thumbs\"]`",
    );
    folder.reject_one(&text("[3]"), (3, 14), "`access.bulkheads[0]` must be a string, not a number", "");
    folder.reject_one(
        &text("[]"),
        (3, 13),
        "`access.bulkheads` is empty, so the entry would allow nothing",
        "remove `bulkheads` to allow all bulkheads",
    );
    // A rule can name a bulkhead whose table is invalid.
    let text = "bulkhead.b = 3\n[[access]]\nuid = 1\nbulkheads = [\"b\"]\n";
    folder.reject_one(text, (1, 14), "bulkhead `b` must be a table", "");
}

#[test]
fn access_rule_must_name_valid_tenants() {
    let folder = Folder::new();
    let text = |names: &str| entry(&format!("uid = 1\ntenants = {names}"));
    folder.accept(&text(&format!("[\"{}\", \"Größe 3/π\"]", "x".repeat(256))));
    folder.reject_one(&text("[\"\"]"), (5, 12), "contains an empty name", "jobs without a tenant");
    folder.reject_one(&text(&format!("[\"{}\"]", "x".repeat(257))), (5, 12), "257 bytes", "at most 256");
    folder.reject_one(&text("[\"a\\u0000\"]"), (5, 12), "contains a NUL byte", "");
    folder.reject_one(&text("[\"a\", \"b\", \"a\"]"), (5, 22), "contains `a` twice", "");
    folder.reject_one(
        &text("[]"),
        (5, 11),
        "the entry would allow nothing",
        "remove `tenants` to allow all tenants",
    );
}

#[test]
fn access_is_array_of_at_most_1024_tables() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("[access]\nuid = 1"),
        (3, 1),
        "`access` must be an array of tables, not a table",
        "write [[access]], with double brackets, for each entry",
    );
    folder.reject_one(
        &format!("access = 3\n{}", bulkhead("")),
        (1, 10),
        "`access` must be an array of tables, not a number",
        "write one [[access]] section for each entry",
    );
    folder.reject_one(
        &format!("access = [{{ uid = 1 }}, 3]\n{}", bulkhead("")),
        (1, 24),
        "`access[1]` must be a table, not a number",
        "write one [[access]] section for each entry, or `access = [{ uid = 1001 }]`",
    );
    let entries = "[[access]]\nuid = 1\n".repeat(1024);
    folder.accept(&bulkhead(&entries));
    folder.reject_one(&bulkhead(&format!("{entries}[[access]]\n")), (2051, 1), "more than 1024 entries", "");
}

#[test]
fn error_suggests_table_for_misplaced_access_key() {
    let folder = Folder::new();
    folder.reject_one(&bulkhead("uid = 3"), (3, 1), "unknown key `uid`", "`uid` belongs in [[access]]");
    // Suggests only keys whose values can be tables.
    let text = format!("[bulkheads.b]\nexec = [\"tool\"]\n{}", bulkhead(""));
    folder.reject_one(&text, (1, 2), "unknown key `bulkheads`", "did you mean `bulkhead`?");
}

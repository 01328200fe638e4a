//! Tests of HTTP over TCP: addresses, token files, and token roles.

use super::*;

fn supervisor(lines: &str) -> String {
    format!("[supervisor]\n{lines}\n{}", bulkhead(""))
}

#[test]
fn http_requires_address_and_token_file() {
    let folder = Folder::new();
    assert_eq!(folder.accept(&supervisor("")).supervisor.http, None);
    let alone = supervisor("http = \"127.0.0.1:9464\"");
    folder.reject_one(&alone, (2, 8), "`http` needs `http_token_file`", "add `http_token_file = ");
    let alone = supervisor("http_token_file = \"token\"");
    folder.reject_one(&alone, (2, 19), "has no effect without `http`", "add `http = ");
}

#[test]
fn http_address_must_be_numeric() {
    let folder = Folder::new();
    let with = |address: &str| supervisor(&format!("http = \"{address}\"\nhttp_token_file = \"token\""));
    for good in ["127.0.0.1:9464", "0.0.0.0:80", "[::1]:1", "127.0.0.1:0"] {
        let http = folder.accept(&with(good)).supervisor.http.unwrap();
        assert_eq!((http.address.to_string(), http.token_file), (good.to_owned(), folder.path("token")));
    }
    for bad in ["9464", "127.0.0.1", "localhost:9464", "::1:9464", "127.0.0.1:99999", "http://127.0.0.1:1"] {
        folder.reject_one(&with(bad), (2, 8), "must be an address and a port", "127.0.0.1:9464");
    }
}

#[test]
fn token_file_must_be_private_and_hold_valid_token() {
    let folder = Folder::new();
    let with = |file: &str| supervisor(&format!("http = \"127.0.0.1:9464\"\nhttp_token_file = \"{file}\""));
    for (mode, text) in
        [(0o600, "  0123456789abcdef \n"), (0o400, "0123456789abcdef"), (0o640, "a-longer~token_/+==.x")]
    {
        folder.token("good", text, mode);
        folder.accept(&with("good"));
    }
    for mode in [0o644, 0o604, 0o602, 0o620, 0o601] {
        folder.token("open", "0123456789abcdef", mode);
        folder.reject_one(&with("open"), (3, 19), &format!("has mode {mode:04o}"), "chmod 600");
    }
    for text in [
        "",
        "\n",
        "short",
        "0123456789abcde\n",
        "0123456789 abcdef",
        "0123456789abcdef\nmore",
        &"x".repeat(5000),
        "sésame-sésame-sésame",
    ] {
        folder.token("bad", text, 0o600);
        folder.reject_one(&with("bad"), (3, 19), "does not contain a token", "create a token");
    }
    folder.reject_one(&with("missing"), (3, 19), "cannot be read", "create a token");
    folder.reject_one(&with("work"), (3, 19), "", "create a token");
    assert!(
        !format!("{:?}", folder.accept(&with("token"))).contains("0123456789abcdef"),
        "the configuration contains the token"
    );
}

/// Returns a file that sets `jobs_http` on line 2, and whose only `[[access]]` entry starts on line 5.
fn with_token(entry: &str) -> String {
    format!("[supervisor]\njobs_http = \"127.0.0.1:9465\"\n{}[[access]]\n{entry}\n", bulkhead(""))
}

#[test]
fn jobs_http_requires_address_and_token() {
    let folder = Folder::new();
    let config = folder.accept(&with_token("token_file = \"jobs-token\""));
    assert_eq!(config.supervisor.jobs_http.unwrap().to_string(), "127.0.0.1:9465");
    assert_eq!((config.supervisor.jobs_http_max, config.supervisor.drain_notice.as_secs()), (1024, 0));
    assert_eq!(folder.again(&config), config);
    for alone in ["", "[[access]]\nuid = 5\n", "access = []\n"] {
        let text = format!("{}[supervisor]\njobs_http = \"127.0.0.1:9465\"\n{}", "", bulkhead(""));
        let text = if alone.starts_with("access") { format!("{alone}{text}") } else { text + alone };
        let line = if alone.starts_with("access") { 3 } else { 2 };
        folder.reject_one(
            &text,
            (line, 13),
            "`jobs_http` needs an [[access]] entry with `token_file`",
            "add an [[access]] section",
        );
    }
    let reader = with_token("token_file = \"read-token\"\nrole = \"read\"");
    let problems = folder.reject(&reader);
    assert_eq!(problems.len(), 2, "{problems:#?}");
    for bad in ["9465", "localhost:9465", "127.0.0.1:99999"] {
        let text = with_token("token_file = \"jobs-token\"").replace("127.0.0.1:9465", bad);
        folder.reject_one(&text, (2, 13), "`jobs_http` must be an address and a port", "0.0.0.0:9465");
    }
    for max in ["0", "1000001"] {
        let text = format!("[supervisor]\njobs_http_max = {max}\n{}", bulkhead(""));
        folder.reject_one(&text, (2, 17), "`jobs_http_max` must be from 1 to", "");
    }
    let both = with_token("token_file = \"jobs-token\"")
        .replace("[supervisor]\n", "[supervisor]\nhttp_token_file = \"token\"\nhttp = \"127.0.0.1:9465\"\n");
    folder.reject_one(&both, (4, 13), "`jobs_http` and `http` are the same address", "another port");
    folder.accept(&both.replace("9465", "0"));
}

#[test]
fn token_requires_the_listener_for_its_role() {
    let folder = Folder::new();
    let entry = |lines: &str| bulkhead(&format!("[[access]]\n{lines}"));
    folder.reject_one(
        &entry("token_file = \"jobs-token\""),
        (4, 14),
        "`token_file` has no effect without `jobs_http`",
        "add `jobs_http = \"0.0.0.0:9465\"`",
    );
    folder.reject_one(
        &entry("token_file = \"read-token\"\nrole = \"read\""),
        (4, 14),
        "`token_file` has no effect without `http`",
        "add `http = \"127.0.0.1:9464\"`",
    );
    folder.reject_one(
        &entry("uid = 5\nrole = \"read\""),
        (5, 8),
        "`role` needs `token_file`",
        "remove `role`",
    );
    folder.reject_one(
        &with_token("token_file = \"jobs-token\"\nrole = \"write\""),
        (8, 8),
        "cannot be \"write\"",
        "",
    );
    folder.reject_one(
        &with_token("token_file = \"jobs-token\"\nuid = 5"),
        (8, 7),
        "an `access` entry has `uid` and `token_file`",
        "keep only one key",
    );
}

#[test]
fn token_can_have_only_one_role() {
    let folder = Folder::new();
    let with = |entries: &str| {
        let http = "[supervisor]\njobs_http = \"127.0.0.1:9465\"\nhttp = \"127.0.0.1:9464\"\nhttp_token_file = \"token\"\n";
        format!("{http}{}{entries}", bulkhead(""))
    };
    let jobs = "[[access]]\ntoken_file = \"jobs-token\"\n";
    folder.accept(&with(&format!("{jobs}[[access]]\ntoken_file = \"read-token\"\nrole = \"read\"\n")));
    // Several entries can have the same token. Their permissions are combined.
    folder.accept(&with(&format!("{jobs}tenants = [\"t\"]\n{jobs}bulkheads = [\"a\"]\n")));
    let twice = format!("{jobs}{jobs}role = \"read\"\n");
    folder.reject_one(
        &with(&twice),
        (11, 14),
        "contains a token that already has another role",
        "create another token",
    );
    let admin = jobs.replace("jobs-token", "token");
    folder.reject_one(
        &with(&admin),
        (9, 14),
        "contains the same token as `http_token_file`",
        "create another token",
    );
    for list in ["bulkheads = [\"a\"]", "tenants = [\"t\"]"] {
        let reader = format!("{jobs}[[access]]\ntoken_file = \"read-token\"\nrole = \"read\"\n{list}\n");
        let (key, _) = list.split_once(' ').unwrap();
        let column = list.find('[').unwrap() + 1;
        folder.reject_one(
            &with(&reader),
            (13, column),
            "has no effect with `role = \"read\"`",
            &format!("remove `{key}`"),
        );
    }
}

#[test]
fn access_tokens_are_checked_like_the_admin_token() {
    let folder = Folder::new();
    let text = with_token("token_file = \"mine\"");
    folder.reject_one(&text, (7, 14), "`access.token_file`: ", "create a token");
    folder.token("mine", "a-token-of-sixteen-or-more", 0o644);
    folder.reject_one(&text, (7, 14), "has mode 0644", "chmod 600");
    folder.token("mine", "short", 0o600);
    folder.reject_one(&text, (7, 14), "does not contain a token", "create a token");
    folder.token("mine", "a-token-of-sixteen-or-more", 0o600);
    let config = folder.accept(&text);
    assert!(!format!("{config:?} {}", config.summary()).contains("sixteen"));
    assert!(!serde_json::to_string(&config).unwrap().contains("sixteen"));
    // A configuration is not equal to a configuration with another token.
    folder.token("mine", "another-token-of-sixteen", 0o600);
    assert_ne!(folder.accept(&text), config);
}

#[test]
fn token_rules_leave_socket_modes_private() {
    let supervisor = Folder::new().accept(&with_token("token_file = \"jobs-token\"")).supervisor;
    assert_eq!((supervisor.socket_mode, supervisor.folder_mode), (0o600, 0o700));
}

#[test]
fn embedded_supervisor_has_no_listener() {
    let mut folder = Folder::new();
    folder.process_env.is_embedded = true;
    for key in ["jobs_http = \"127.0.0.1:9465\"", "jobs_http_max = 5", "drain_notice = \"1s\""] {
        let name = key.split(' ').next().unwrap();
        let column = key.find('=').unwrap() + 3;
        folder.reject_one(
            &supervisor(key),
            (2, column),
            &format!("so `{name}` would have no effect"),
            "remove",
        );
    }
}

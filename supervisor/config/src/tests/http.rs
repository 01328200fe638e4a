//! Tests of the keys for the admin API over TCP: address and token file.

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
        folder.reject_one(&with("open"), (3, 19), &format!("has the mode {mode:04o}"), "chmod 600");
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

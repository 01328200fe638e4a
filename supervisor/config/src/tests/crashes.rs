//! Tests of the crash report keys.

use super::*;

fn supervisor(lines: &str) -> String {
    format!("[supervisor]\n{lines}\n{}", bulkhead(""))
}

#[test]
fn crash_dir_must_be_folder_or_missing() {
    let folder = Folder::new();
    let config = folder.accept(&supervisor("crash_dir = \"./a/b\"\ncrash_keep = 10000"));
    assert_eq!(config.supervisor.crash_dir, Some(folder.path("a/b")));
    assert_eq!(config.supervisor.crash_keep, 10_000);
    folder.accept(&supervisor("crash_dir = \"work\""));
    folder.reject_one(
        &supervisor("crash_dir = \"libthumb.so\""),
        (2, 13),
        "`crash_dir`: ",
        "specify an existing directory, or a path that does not exist yet",
    );
    folder.reject_one(
        &supervisor("crash_dir = \"\""),
        (2, 13),
        "`crash_dir` is empty",
        "write `crash_dir = \"/var/lib/bulkhead/crashes\"`",
    );
}

#[test]
fn crash_keep_outside_its_range_is_rejected() {
    let folder = Folder::new();
    for (value, help) in [("0", "`crash_keep = 1`"), ("10001", "`crash_keep = 10000`")] {
        let message = format!("`crash_keep` must be from 1 to 10000, not {value}");
        folder.reject_one(&supervisor(&format!("crash_keep = {value}")), (2, 14), &message, help);
    }
    let config = folder.accept(&supervisor("crash_keep = 3"));
    assert_eq!((config.supervisor.crash_dir, config.supervisor.crash_keep), (None, 3));
}

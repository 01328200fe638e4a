//! Tests of paths to files and programs, and of the location of the configuration file.

use std::ffi::OsString;

use super::*;

#[test]
fn relative_paths_are_resolved_against_configuration_file() {
    let folder = Folder::new();
    let config =
        folder.accept("[bulkhead.a]\ncommand = [\"work/../thumbnail-worker\"]\ncwd = \"./work/.\"\n");
    let Program::Command { path, .. } = &config.bulkheads[0].program else { panic!() };
    assert_eq!(*path, folder.path("work/../thumbnail-worker"));
    assert_eq!(config.bulkheads[0].cwd, folder.path("work"));
}

/// Checks the error for a missing program. Also checks that a folder, a device and a non-executable file are
/// rejected.
#[test]
fn missing_program_error_shows_searched_path() {
    let folder = Folder::new();
    let there = folder.path("thumb").display().to_string();
    folder.reject_one(
        "[bulkhead.a]\ncommand = [\"./thumb\", \"--fast\"]\n",
        (2, 12),
        &format!("`command[0]`: there is no program {there}"),
        &format!(
            "relative paths start at the directory of the configuration file, {}",
            folder.dir.path().display()
        ),
    );
    folder.reject_one("[bulkhead.a]\nexec = [\"work/\"]\n", (2, 9), "is a directory, not a program", "");
    folder.reject_one("[bulkhead.a]\nexec = [\"./libthumb.so\"]\n", (2, 9), "is not executable", "chmod +x");
    folder.reject_one(
        "[bulkhead.a]\nexec = [\"/dev/null\"]\n",
        (2, 9),
        "is not a regular file, not a program",
        "",
    );
}

#[test]
fn bare_program_name_is_looked_up_only_in_path() {
    let folder = Folder::new();
    let bin = folder.path("bin").display().to_string();
    folder.reject_one(
        "[bulkhead.a]\nexec = [\"nosuch\"]\n",
        (2, 9),
        "there is no program `nosuch` in PATH",
        &format!("install the program in PATH ({bin})"),
    );
    folder.reject_one(
        "[bulkhead.a]\nexec = [\"thumbnail-worker\"]\n",
        (2, 9),
        "there is no program `thumbnail-worker` in PATH",
        "the program is in the directory of the configuration file: write \"./thumbnail-worker\"",
    );
}

#[test]
fn path_lookup_skips_files_that_are_not_executable() {
    let mut folder = Folder::new();
    fs::create_dir_all(folder.path("first/pdftotext")).unwrap();
    folder.write("first/tool", 0o644);
    let search: OsString = std::env::join_paths([
        PathBuf::new(),
        PathBuf::from("relative"),
        folder.path("first"),
        folder.path("missing"),
        folder.path("bin"),
    ])
    .unwrap();
    folder.process_env.search_path = Some(search);
    for name in ["tool", "pdftotext"] {
        let config = folder.accept(&format!("[bulkhead.a]\nexec = [\"{name}\"]\n"));
        let Program::Exec { path, .. } = &config.bulkheads[0].program else { panic!() };
        assert_eq!(*path, folder.path("bin").join(name));
    }
}

#[test]
fn unset_path_falls_back_to_default_search_path() {
    let mut folder = Folder::new();
    folder.process_env.search_path = None;
    folder.accept("[bulkhead.a]\nexec = [\"sh\"]\n");
    folder.process_env.search_path = Some(OsString::new());
    folder.reject_one("[bulkhead.a]\nexec = [\"sh\"]\n", (2, 9), "there is no program `sh` in PATH", "");
}

#[test]
fn library_and_working_directory_must_exist() {
    let folder = Folder::new();
    let library = |name: &str| format!("[bulkhead.a]\nlibrary = \"{name}\"\n");
    folder.reject_one(
        &library("libno.so"),
        (2, 11),
        "`library`: there is no library",
        "relative paths start",
    );
    folder.reject_one(&library("work"), (2, 11), "is a directory, not a library", "");
    folder.reject_one(&library(""), (2, 11), "`library` is empty", "write `library = \"./libworker.so\"`");
    folder.reject_one(&bulkhead("cwd = \"none\""), (3, 7), "`cwd`: there is no directory", "");
    folder.reject_one(&bulkhead("cwd = \"libthumb.so\""), (3, 7), "is not a directory", "");
    folder.reject_one(&bulkhead("cwd = \"libthumb.so/x\""), (3, 7), "`cwd`: ", "");
}

#[test]
fn socket_path_has_at_most_107_bytes() {
    let folder = Folder::new();
    let at = |bytes: usize| {
        let path = format!("/{}", "x".repeat(bytes - 1));
        format!("[supervisor]\nsocket = \"{path}\"\nadmin = \"/tmp/a\"\n{}", bulkhead(""))
    };
    folder.accept(&at(107));
    folder.reject_one(
        &at(108),
        (2, 10),
        "can have at most 107 bytes, but this path has 108",
        "choose a shorter path",
    );
    let text = format!("[supervisor]\nadmin = \"{}\"\n{}", "y".repeat(100), bulkhead(""));
    folder.reject_one(&text, (2, 9), "`admin`: the path of a Unix socket can have at most 107", "");
    let text = format!("[supervisor]\nsocket = \"work\"\n{}", bulkhead(""));
    folder.reject_one(&text, (2, 10), "is a directory, not a socket", "jobs.sock");
}

#[test]
fn default_socket_path_depends_on_user() {
    let mut folder = Folder::new();
    folder.process_env.root = false;
    folder.process_env.runtime_dir = Some("/run/user/1000".into());
    let config = folder.accept(&bulkhead(""));
    assert_eq!(config.supervisor.socket, PathBuf::from("/run/user/1000/bulkhead/jobs.sock"));
    assert_eq!(config.supervisor.admin, PathBuf::from("/run/user/1000/bulkhead/admin.sock"));

    folder.process_env.runtime_dir = None;
    let text = format!("[supervisor]\nmax_clients = 1\n{}", bulkhead(""));
    folder.reject_one(&text, (1, 2), "XDG_RUNTIME_DIR is not set", "set `socket` in [supervisor]");
    folder.reject_one(&bulkhead(""), (1, 1), "XDG_RUNTIME_DIR is not set", "set `socket`");
    folder.accept(&format!("[supervisor]\nsocket = \"jobs.sock\"\n{}", bulkhead("")));
}

#[test]
fn admin_socket_is_next_to_jobs_socket() {
    let folder = Folder::new();
    let config = folder.accept(&format!("[supervisor]\nsocket = \"s/j\"\n{}", bulkhead("")));
    assert_eq!(config.supervisor.admin, folder.path("s/admin.sock"));
}

#[test]
fn load_resolves_paths_relative_to_file() {
    let folder = Folder::new();
    let path = folder.path("workers.toml");
    fs::write(&path, "[bulkhead.a]\ncommand = [\"./thumbnail-worker\"]\n[supervisor]\nsocket = \"s\"\n")
        .unwrap();
    let config = load(&path).unwrap();
    assert_eq!(config.path, path);
    assert_eq!(config.supervisor.socket, folder.path("s"));
}

#[test]
fn error_names_unreadable_file_and_cause() {
    let folder = Folder::new();
    for (name, cause) in
        [("none.toml", "No such file"), ("work", "directory"), ("libthumb.so/x", "Not a directory")]
    {
        let errors = load(&folder.path(name)).unwrap_err();
        let text = errors.to_string();
        assert!(text.contains(&folder.path(name).display().to_string()) && text.contains(cause), "{text}");
        assert_eq!(errors.problems()[0].at, None);
    }
}

#[test]
fn large_and_endless_configuration_files_are_rejected() {
    let errors = load(Path::new("/dev/zero")).unwrap_err();
    assert!(errors.to_string().contains("not a regular file; a pipe such as `<(...)`"), "{errors}");
    let folder = Folder::new();
    let path = folder.path("workers.toml");
    fs::File::create(&path).unwrap().set_len((4 << 20) + 1).unwrap();
    let errors = load(&path).unwrap_err();
    assert!(errors.to_string().contains("larger than 4MiB"), "{errors}");
}

#[test]
fn folder_name_that_is_not_utf8_is_rejected() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new();
    let odd = folder.path("").join(std::ffi::OsStr::from_bytes(b"d\xff"));
    fs::create_dir(&odd).unwrap();
    let path = odd.join("workers.toml");
    fs::write(&path, "[bulkhead.a]\nexec = [\"cat\"]\n").unwrap();
    let actual = load(&path).unwrap_err().to_string();
    assert!(actual.contains("is not UTF-8") && actual.contains("rename the directory"), "{actual}");
}

#[test]
fn error_shows_position_of_invalid_utf8() {
    let folder = Folder::new();
    let path = folder.path("workers.toml");
    fs::write(&path, b"# gr\xc3\xbc\xc3\x9fe\nx = \"\xc3\xa4\xff\"\n").unwrap();
    let errors = load(&path).unwrap_err();
    assert_problem(&errors.problems()[0], (2, 7), "not UTF-8: byte 0xff", "save the file as UTF-8");
    assert!(errors.to_string().contains("workers.toml:2:7"), "{errors}");
    for bytes in [&b"\xff"[..], b"a = 1\n\xc3", b"\n\n\xe2\x82"] {
        fs::write(&path, bytes).unwrap();
        assert!(load(&path).unwrap_err().to_string().contains("not UTF-8"));
    }
}

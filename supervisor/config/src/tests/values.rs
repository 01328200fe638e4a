//! Tests of invalid values for each kind of key.

use super::*;

#[test]
fn invalid_durations_are_rejected_with_help() {
    let folder = Folder::new();
    let cases = [
        ("deadline = 5", "a bare number", "write `deadline = \"5s\"` for seconds, or \"5ms\""),
        ("deadline = -5", "a bare number", "write `deadline = \"5s\"`"),
        (
            "deadline = 1.5",
            "must be a duration as a string, not a decimal number",
            "write `deadline = \"30s\"`",
        ),
        ("deadline = \"5\"", "is not a duration: \"5\"", "write `deadline = \"5s\"`"),
        ("deadline = \"\"", "is not a duration", "\"500ms\", \"2s\" or \"1m 30s\""),
        ("deadline = \"soon\"", "is not a duration: \"soon\"", "\"500ms\""),
        ("deadline = \"5M\"", "is not a duration", "for minutes write `m`"),
        ("deadline = \"-5s\"", "is not a duration", ""),
        ("deadline = \"0s\"", "must be from 1ms to 365d, not 0s", "write `deadline = \"30s\"`"),
        ("deadline = \"999us\"", "must be from 1ms to 365d, not 999us", ""),
        ("deadline = \"366d\"", "must be from 1ms to 365d, not 366d", ""),
        ("deadline = \"99999999999999999999s\"", "is not a duration", "the longest duration is \"365d\""),
        ("deadline = \"99999999999999999999s soon\"", "is not a duration", "write numbers with units"),
        ("deadline = \"0.1month\"", "is not a duration", "a duration must be a whole number of nanoseconds"),
        ("deadline = \"1.5ns\"", "is not a duration", "a duration must be a whole number of nanoseconds"),
        ("deadline = \"0.1month 0\"", "is not a duration", "write numbers with units"),
        ("deadline_max = \"0s\"", "", ""),
        ("queue_timeout = \"0s\"", "", "to reject jobs instead of queueing them, set `max_queue = 0`"),
        ("grace = \"2y\"", "must be from 0s to 365d", ""),
        ("restart = { within = \"0s\" }", "`restart.within` must be from 1ms", "write `within = \"30s\"`"),
        ("start = { handshake = \"0s\" }", "`start.handshake`", ""),
        ("start = { ready = \"0s\" }", "`start.ready`", ""),
        ("health = { heartbeat = \"0s\" }", "`health.heartbeat`", ""),
        ("recycle = { age = \"0s\" }", "`recycle.age`", ""),
    ];
    for (line, message, help) in cases {
        let problem = &folder.reject(&bulkhead(line))[0];
        let column = line.rfind("= ").unwrap() + 3;
        assert_problem(problem, (3, column), message, help);
    }
}

#[test]
fn ambiguous_sizes_are_rejected_with_help() {
    let folder = Folder::new();
    let cases = [
        (
            "256M",
            "is not a size: \"256M\"",
            "write \"256MiB\" for powers of 1024, or \"256MB\" for powers of 1000",
        ),
        ("8Gi", "is not a size", "write \"8GiB\""),
        ("", "is not a size", "KiB, MiB, GiB"),
        ("MiB", "is not a size", ""),
        ("-1MiB", "is not a size", ""),
        ("1e3", "is not a size", ""),
        ("1 000", "is not a size", ""),
        ("1.MiB", "is not a size", ""),
        ("0.5", "is not a size", ""),
        ("1.2.3MiB", "is not a size", ""),
        ("0B", "must be from 1 to 1073741824 bytes (1GiB), not 0", ""),
        ("1025MiB", "not 1074790400", ""),
        ("99999999999999999999TiB", "is not a size", "64 bits"),
        ("99999999999999999999999999999999999999999999999999TiB", "is not a size", "64 bits"),
    ];
    for (size, message, help) in cases {
        folder.reject_one(&bulkhead(&format!("max_result = \"{size}\"")), (3, 14), message, help);
    }
    folder.reject_one(&bulkhead("max_result = -1"), (3, 14), "not -1", "");
    folder.reject_one(&bulkhead("max_result = true"), (3, 14), "must be a size such as \"64MiB\"", "");
    folder.reject_one(
        &bulkhead("max_result = 99999999999999999999999999999999999999999"),
        (3, 14),
        "a number that large",
        "",
    );
    for (size, bytes) in
        [("64KiB", 65536), ("1.5KiB", 1536), ("2 kB", 2000), ("77", 77), ("5B", 5), ("1mb", 1_000_000)]
    {
        assert_eq!(
            folder.accept(&bulkhead(&format!("max_result = \"{size}\""))).bulkheads[0].max_result,
            bytes
        );
    }
    let config = folder.accept(&bulkhead("max_result = 0x1_00"));
    assert_eq!(config.bulkheads[0].max_result, 256);
}

#[test]
fn numbers_outside_their_range_are_rejected() {
    let folder = Folder::new();
    let cases = [
        ("processes = 0", "`processes` must be from 1 to 1024, not 0", "write `processes = 1`"),
        ("processes = 1025", "from 1 to 1024", "write `processes = 1024`"),
        ("processes = -99999999999999999999999999999999999999999999", "far below zero", ""),
        ("processes = \"2\"", "must be a whole number, not a string", "write `processes = 2`"),
        ("processes = 2.0", "must be a whole number, not a decimal number", ""),
        ("max_in_flight = 4097", "from 0 to 4096", ""),
        ("max_queue = 1000001", "from 0 to 1000000", ""),
        ("restart = { max = 0 }", "`restart.max` must be from 1", ""),
        ("health = { missed = 0 }", "`health.missed` must be from 1", ""),
        ("recycle = { jobs = 0 }", "`recycle.jobs` must be at least 1, not 0", ""),
        ("recycle = { jobs = 18446744073709551615 }", "`recycle.jobs` must be at most ", ""),
        ("run_limit = 0", "must be a duration with a unit", "write `run_limit = \"1s\"`"),
        ("grace = 0", "must be a duration with a unit", "write `grace = \"0s\"`"),
        ("recycle = { rss = 0 }", "`recycle.rss` must be at least 1, not 0", ""),
    ];
    for (line, message, help) in cases {
        let column = line.rfind("= ").unwrap() + 3;
        folder.reject_one(&bulkhead(line), (3, column), message, help);
    }
    for (line, message) in [("max_clients = 0", "from 1 to"), ("max_payload = 0", "from 1 to")] {
        let text = format!("[supervisor]\n{line}\n{}", bulkhead(""));
        folder.reject_one(&text, (2, 15), message, "");
    }
}

#[test]
fn socket_mode_must_be_octal_string() {
    let folder = Folder::new();
    let mode = |value: &str| format!("[supervisor]\nsocket_mode = {value}\n{}", bulkhead(""));
    folder.reject_one(
        &mode("600"),
        (2, 15),
        "must be a string, not a number",
        "write `socket_mode = \"0600\"`",
    );
    folder.reject_one(&mode("0o660"), (2, 15), "must be a string, not a number", "\"0660\"");
    for wrong in ["\"0800\"", "\"rw\"", "\"\"", "\"4755\"", "\"00600\"", "\"+60\""] {
        folder.reject_one(&mode(wrong), (2, 15), "is not a mode of three octal digits", "\"0600\"");
    }
    assert_eq!(folder.accept(&mode("\"666\"")).supervisor.socket_mode, 0o666);
}

#[test]
fn unknown_words_are_rejected_with_suggestion() {
    let folder = Folder::new();
    let line = "restart = { policy = \"on_failure\" }";
    folder.reject_one(
        &bulkhead(line),
        (3, 22),
        "`restart.policy` cannot be",
        "did you mean `\"on-failure\"`?",
    );
    let line = "restart = { policy = \"sometimes\" }";
    folder.reject_one(
        &bulkhead(line),
        (3, 22),
        "cannot be \"sometimes\"",
        "one of `\"always\"`, `\"on-failure\"`",
    );
    folder.reject_one(&bulkhead("overflow = 1"), (3, 12), "`overflow` must be a string", "\"reject\"");
    folder.reject_one(&bulkhead("start = { spares = -1 }"), (3, 20), "from 0 to 64", "");
    folder.reject_one(
        &bulkhead("start = 5"),
        (3, 9),
        "`start` must be a table, not a number",
        "[bulkhead.a.start]",
    );
}

#[test]
fn program_arguments_must_be_strings_without_nul() {
    let folder = Folder::new();
    let exec = |value: &str| format!("[bulkhead.a]\nexec = {value}\n");
    folder.reject_one(&exec("[]"), (2, 8), "`exec` is empty", "write the program");
    folder.reject_one(&exec("[\"\"]"), (2, 9), "`exec[0]` is empty", "");
    folder.reject_one(&exec("[\"tool\", \"a\\u0000b\"]"), (2, 17), "`exec[1]` contains a NUL byte", "");
    folder.reject_one(&exec("[\"tool\", true]"), (2, 17), "`exec[1]` must be a string", "write \"true\"");
    folder.reject_one(
        &exec("\"tool -x\""),
        (2, 8),
        "must be an array of strings",
        "`exec = [\"tool\", \"-x\"]`",
    );
    let problems = folder.reject(&exec("[\"./none\", 1, 2.5]"));
    assert_eq!(problems.len(), 3, "{problems:#?}");
    let argument = "x".repeat(96 * 1024);
    folder.reject_one(
        &exec(&format!("[\"tool\", \"{argument}\"]")),
        (1, 11),
        "of arguments and environment",
        "file",
    );
    let text = bulkhead(&format!("env = {{ A = \"{argument}\" }}"));
    folder.reject_one(&text, (1, 11), "the maximum is 96KiB", "");
}

#[test]
fn environment_requires_valid_names_and_string_values() {
    let folder = Folder::new();
    let cases = [
        ("A = 1", 13, "`env.A` must be a string, not a number", "write `A = \"1\"`"),
        ("A = true", 13, "not a boolean", "write `A = \"true\"`"),
        ("A = []", 13, "not an array", ""),
        ("A = \"\\u0000\"", 13, "contains a NUL byte", ""),
        ("\"\" = \"x\"", 9, "a name in `env` is empty", ""),
        ("\"A=B\" = \"x\"", 9, "`A=B` cannot be the name of an environment variable", ""),
        ("BULKHEAD_JOB = \"x\"", 9, "`BULKHEAD_JOB` is reserved", ""),
    ];
    for (entry, column, message, help) in cases {
        folder.reject_one(&bulkhead(&format!("env = {{ {entry} }}")), (3, column), message, help);
    }
    folder.reject_one(&bulkhead("env = [\"A=1\"]"), (3, 7), "`env` must be a table of strings", "RUST_LOG");
}

#[test]
fn rlimit_values_must_be_in_the_resources_unit() {
    let folder = Folder::new();
    let cases = [
        ("core = 1", "`rlimits.core` must be 0", "write `core = 0`"),
        ("core = \"unlimited\"", "`rlimits.core` must be 0", ""),
        ("nofile = \"64KiB\"", "must be a number or \"unlimited\"", "write `nofile = 64`"),
        ("nofile = -1", "must be at least 0, not -1", ""),
        ("as = \"1G\"", "is not a size", "write \"1GiB\""),
        ("cpu = \"9999d\"", "`rlimits.cpu` must be at most 365d, not 9999d", "write `cpu = \"60s\"`, or"),
        ("cpu = 31536001", "`rlimits.cpu` must be at most 365d, not 31536001", "\"unlimited\""),
        ("rttime = \"366d\"", "`rlimits.rttime` must be at most 365d", "write `rttime = \"200ms\"`"),
        ("cpu = 0", "`rlimits.cpu` must be at least 1", "\"unlimited\""),
        ("cpu = \"60\"", "is not a duration", "\"60s\""),
        ("cpu = true", "must be a duration, a number or \"unlimited\"", ""),
        ("fsize = \"unlimted\"", "is not a size", ""),
        ("As = 1", "unknown key `As`", "did you mean `as`?"),
    ];
    for (entry, message, help) in cases {
        let problems = folder.reject(&bulkhead(&format!("rlimits = {{ {entry} }}")));
        let column = if message.starts_with("unknown") { 13 } else { entry.find("= ").unwrap() + 15 };
        assert_problem(&problems[0], (3, column), message, help);
        assert_eq!(problems.len(), 1);
    }
}

#[test]
fn env_files_must_name_private_files() {
    let folder = Folder::new();
    folder.token("secret", "sesame\n", 0o600);
    let of = |files: &str| bulkhead(&format!("env_files = {{ {files} }}"));
    let config = folder.accept(&of("B = \"secret\", A = \"./work/../secret\""));
    let expected =
        [("A", "work/../secret"), ("B", "secret")].map(|(name, path)| (name.into(), folder.path(path)));
    assert_eq!(config.bulkheads[0].env_files, expected);
    assert_eq!(folder.again(&config), config);
    assert!(!format!("{config:?} {}", config.summary()).contains("sesame"));

    folder.token("open", "sesame", 0o644);
    folder.token("nul", "sesame\0", 0o600);
    folder.token("large", &"sesame".repeat(11_000), 0o600);
    folder.token("empty", "", 0o600);
    folder.accept(&of("A = \"empty\""));
    for (file, message, help) in [
        ("none", "cannot be read: No such file or directory", "create the file"),
        ("work", "is not a regular file", "specify the path of a regular file"),
        ("open", "has mode 0644, so other users can read or change it", "run `chmod 600`"),
        ("nul", "contains a NUL byte", ""),
        ("large", "is larger than 65536 bytes", "use a smaller file"),
    ] {
        let message = format!("`env_files.A`: {} {message}", folder.path(file).display());
        let text = of(&format!("A = \"{file}\""));
        folder.reject_one(&text, (3, 19), &message, help);
        let problems = folder.reject(&text);
        assert!(!format!("{problems:?}").contains("sesamesesame"), "{problems:?}");
    }
}

#[test]
fn env_files_require_valid_names_and_paths() {
    let folder = Folder::new();
    for (entry, column, message, help) in [
        ("A = 1", 19, "`env_files.A` must be a string, not a number", ""),
        ("A = \"\"", 19, "`env_files.A` is empty", "specify the path"),
        ("A = \"\\u0000\"", 19, "`env_files.A` contains a NUL byte", ""),
        ("\"\" = \"token\"", 15, "a name in `env_files` is empty", "write `env_files = "),
        ("\"A=B\" = \"token\"", 15, "`A=B` cannot be the name of an environment variable", "env_files"),
        ("BULKHEAD_LINK_FD = \"token\"", 15, "`BULKHEAD_LINK_FD` is reserved", "another name"),
    ] {
        folder.reject_one(&bulkhead(&format!("env_files = {{ {entry} }}")), (3, column), message, help);
    }
    let text = bulkhead("env_files = [\"token\"]");
    folder.reject_one(&text, (3, 13), "`env_files` must be a table of strings", "DB_PASSWORD");
    let entries: Vec<String> = (0..65).map(|number| format!("V{number} = \"token\"")).collect();
    let text = bulkhead(&format!("env_files = {{ {} }}", entries.join(", ")));
    folder.reject_one(&text, (3, 13), "`env_files` has more than 64 files", "into one file");
}

#[test]
fn variable_cannot_be_in_both_env_and_env_files() {
    let folder = Folder::new();
    let (env, files) = ("env = { A = \"x\", B = \"y\" }", "env_files = { A = \"token\" }");
    let message = "`A` is set in both `env` and `env_files`";
    folder.reject_one(&bulkhead(&format!("{env}\n{files}")), (4, 19), message, "remove the variable");
    // The problem is reported in the bulkhead's own table if the other key is in `[defaults]`.
    folder.reject_one(&format!("[defaults]\n{env}\n{}", bulkhead(files)), (5, 19), message, "");
    folder.reject_one(&format!("[defaults]\n{files}\n{}", bulkhead(env)), (5, 13), message, "");
    let merged = format!("[defaults]\n{files}\n{}", bulkhead("env_files = { C = \"jobs-token\" }"));
    let config = folder.accept(&merged);
    let names: Vec<&str> = config.bulkheads[0].env_files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["A", "C"]);
}

#[test]
fn env_files_can_name_systemd_credentials() {
    let mut folder = Folder::new();
    let of = |name: &str| bulkhead(&format!("env_files = {{ A = \"credential:{name}\" }}"));
    let message = "`env_files.A` names a credential, but CREDENTIALS_DIRECTORY is not set";
    folder.reject_one(&of("token"), (3, 19), message, "add `LoadCredential=token:PATH` to the unit");
    folder.process_env.credentials = Some(folder.path(""));
    let config = folder.accept(&of("token"));
    assert_eq!(config.bulkheads[0].env_files, [("A".to_owned(), folder.path("token"))]);
    assert_eq!(folder.again(&config), config);
    folder.reject_one(&of("none"), (3, 19), "cannot be read", "");
    for name in ["", "..", "a/b", "../token"] {
        folder.reject_one(&of(name), (3, 19), "is not the name of a credential", "\"credential:db\"");
    }
}

//! Tests of valid files and the configurations they produce.

use std::time::Duration;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn absent_keys_have_documented_defaults() {
    let folder = Folder::new();
    let config = folder.accept(&bulkhead(""));
    assert_eq!(
        config.supervisor,
        SupervisorConfig {
            socket: "/run/bulkhead/jobs.sock".into(),
            socket_mode: 0o600,
            folder_mode: 0o700,
            admin: "/run/bulkhead/admin.sock".into(),
            http: None,
            jobs_http: None,
            jobs_http_max: 1024,
            drain_notice: Duration::ZERO,
            drain_timeout: ms(30_000),
            max_clients: 1024,
            max_payload: 64 << 20,
            max_buffered: 512 << 20,
            max_pooled: 256 * 1024 * 1024,
            crash_dir: None,
            crash_keep: 100,
            crash_payloads: true,
            crash_symbols: Vec::new(),
            tenant_labels: 50,
            worker_uids: None,
        }
    );
    let expected = BulkheadConfig {
        name: "a".to_owned(),
        program: Program::Exec { argv: vec!["tool".to_owned()], path: folder.path("bin/tool") },
        env: vec![],
        env_files: vec![],
        cwd: folder.dir.path().to_owned(),
        processes: 1,
        max_in_flight: 1,
        max_queue: 0,
        queue_timeout: None,
        run_limit: None,
        deadline: ms(30_000),
        deadline_max: ms(30_000),
        has_deadline_max: false,
        grace: ms(100),
        lookahead: Duration::ZERO,
        max_payload: 64 << 20,
        max_result: 64 << 20,
        overflow: Overflow::Reject,
        fallback: vec![],
        priority: None,
        pressure: PressureConfig { warn: 0.8, reject: 1.0 },
        has_own_pressure: false,
        rate_limit: None,
        tenants: None,
        tenant: Default::default(),
        breaker: None,
        retry: None,
        poison: None,
        adaptive: None,
        restart: Restart {
            policy: RestartPolicy::Always,
            backoff: ms(100),
            backoff_max: ms(30_000),
            max: 5,
            within: ms(30_000),
        },
        start: Start { handshake: ms(5_000), ready: ms(60_000), mode: StartMode::Spawn, spares: 0 },
        health: Health { heartbeat: ms(1_000), missed: 5 },
        recycle: Recycle { jobs: None, rss: None, age: None },
        rlimits: vec![Rlimit { resource: Resource::Core, limit: Some(0) }],
        sandbox: SandboxConfig {
            profile: Profile::Default,
            network: Network::None,
            read: vec![],
            write: vec![],
            tmp_bytes: 64 << 20,
            user: None,
            allow: vec![],
            deny: vec![],
            best_effort: vec![],
        },
        cgroup: None,
        output_grace: Some(ms(1_000)),
        exit_status: Some(ExitStatus { ok: vec![0], caller: vec![64, 65], retryable: vec![75] }),
        files: None,
    };
    assert_eq!(config.bulkheads, [expected]);
    assert_eq!(config.access, []);
}

#[test]
fn configuration_file_can_set_every_key() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    assert_eq!(config.path, folder.path("workers.toml"));
    assert_eq!(config.supervisor.socket, folder.path("s/jobs.sock"));
    assert_eq!(config.supervisor.admin, PathBuf::from("/run/other/admin.sock"));
    assert_eq!(config.supervisor.socket_mode, 0o660);
    let token_file = folder.path("token");
    let token = Token::read(&token_file).unwrap();
    let http = HttpConfig { address: "[::1]:9465".parse().unwrap(), token_file, token };
    assert_eq!(config.supervisor.http, Some(http));
    assert_eq!((config.supervisor.max_clients, config.supervisor.max_payload), (7, 32 << 20));
    let names: Vec<_> = config.bulkheads.iter().map(|bulkhead| bulkhead.name.as_str()).collect();
    assert_eq!(names, ["zz.last", "aa", "mm"], "bulkheads keep the order of the file");

    let [last, aa, mm] = config.bulkheads.as_slice() else { panic!() };
    assert_eq!(
        last.program,
        Program::Command {
            argv: vec!["./thumbnail-worker".to_owned(), "--fast".to_owned(), String::new()],
            path: folder.path("thumbnail-worker"),
        }
    );
    assert_eq!(last.cwd, folder.path("work"));
    assert_eq!((last.processes, last.max_in_flight, last.max_queue), (2, 3, 100));
    assert_eq!(
        (last.queue_timeout, last.deadline, last.deadline_max),
        (Some(ms(2_000)), ms(5_000), ms(90_000))
    );
    assert_eq!((last.max_payload, last.max_result), (8 << 20, 12345));
    assert_eq!(
        last.start,
        Start { handshake: ms(1_000), ready: ms(2_000), mode: StartMode::Spawn, spares: 2 }
    );
    assert_eq!(last.health, Health { heartbeat: ms(250), missed: 3 });
    assert_eq!(last.recycle, Recycle { jobs: Some(10_000), rss: Some(300 << 20), age: Some(ms(3_600_000)) });

    let library = folder.path("libthumb.so");
    assert_eq!(aa.program, Program::Library { path: library, entry: "thumb_handle".to_owned() });
    assert_eq!(
        (aa.max_payload, aa.max_result),
        (32 << 20, 32 << 20),
        "limits default to the limit of the supervisor"
    );
    let argv = ["pdftotext", "in.pdf", "out.txt"].map(str::to_owned).to_vec();
    assert_eq!(mm.program, Program::Exec { argv, path: folder.path("bin/pdftotext") });
    assert_eq!((mm.output_grace, last.output_grace), (Some(ms(5_000)), None));
    let statuses = ExitStatus { ok: vec![0, 1], caller: vec![2, 75], retryable: vec![] };
    assert_eq!(mm.exit_status, Some(statuses), "the default of a list omits statuses of the other lists");
    let files = Files { input: Some("in.pdf".to_owned()), output: Some("out.txt".to_owned()) };
    assert_eq!((&mm.files, &last.files), (&Some(files), &None));
}

#[test]
fn bulkhead_keys_override_defaults() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    let last = &config.bulkheads[0];
    let env: Vec<_> = last.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(
        env,
        [("FROM", "defaults"), ("OVER", "own"), ("odd name", "line\nend \"quoted\" \\ \u{1b}")],
        "variables are sorted by name"
    );
    assert_eq!(last.grace, ms(50));
    let expected = Restart {
        policy: RestartPolicy::OnFailure,
        backoff: ms(200),
        backoff_max: ms(1_000),
        max: 9,
        within: ms(10_000),
    };
    assert_eq!(last.restart, expected);
    assert_eq!(config.bulkheads[1].restart.backoff, ms(200));
    assert_eq!(config.bulkheads[1].env.len(), 2);
}

#[test]
fn rlimits_are_converted_to_setrlimit_units() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    let limits: Vec<_> =
        config.bulkheads[0].rlimits.iter().map(|limit| (limit.resource.name(), limit.limit)).collect();
    let expected = [
        ("as", Some(1 << 30)),
        ("cpu", Some(2)), // 1500ms, rounded up
        ("nofile", Some(64)),
        ("nproc", Some(16)),
        ("fsize", Some(16 << 20)),
        ("core", Some(0)),
        ("data", Some(2 << 30)),
        ("stack", None),
        ("memlock", Some(0)),
        ("rss", Some(1000)),
        ("locks", Some(5)),
        ("sigpending", Some(6)),
        ("msgqueue", Some(800 << 10)),
        ("nice", Some(20)),
        ("rtprio", Some(1)),
        ("rttime", Some(200_000)),
    ];
    assert_eq!(limits, expected);
    let config = folder.accept(&bulkhead("rlimits = { cpu = 60, rttime = 7, core = \"0B\" }"));
    let limits: Vec<_> = config.bulkheads[0].rlimits.iter().map(|limit| limit.limit).collect();
    assert_eq!(limits, [Some(60), Some(0), Some(7)]);
}

#[test]
fn max_in_flight_can_be_zero() {
    let config = Folder::new().accept(&bulkhead("max_in_flight = 0"));
    assert_eq!(config.bulkheads[0].max_in_flight, 0);
}

#[test]
fn grace_and_backoff_can_be_zero() {
    let config = Folder::new()
        .accept(&bulkhead("grace = \"0s\"\nrestart = { backoff = \"0s\", backoff_max = \"0ms\" }"));
    assert_eq!(config.bulkheads[0].grace, Duration::ZERO);
    assert_eq!(config.bulkheads[0].restart.backoff_max, Duration::ZERO);
}

#[test]
fn deadline_max_defaults_to_deadline() {
    let config = Folder::new().accept(&bulkhead("deadline = \"2m\""));
    assert_eq!(config.bulkheads[0].deadline_max, ms(120_000));
}

#[test]
fn configuration_summary_parses_to_same_configuration() {
    let folder = Folder::new();
    for text in [FULL.to_owned(), bulkhead("")] {
        let config = folder.accept(&text);
        assert_eq!(folder.again(&config), config);
    }
}

#[test]
fn configuration_summary_contains_all_keys() {
    let folder = Folder::new();
    let summary = folder.accept(FULL).summary();
    // The summary contains user and group IDs, not names.
    let is_name = |key: &Key| key.table == schema::ACCESS && matches!(key.name, "user" | "group");
    for key in reference().into_iter().filter(|key| !is_name(key)) {
        assert!(summary.contains(&format!("{} = ", key.name)), "{} is not in\n{summary}", key.path());
    }
}

#[test]
fn configuration_summary_mentions_unset_keys() {
    let summary = Folder::new().accept(&bulkhead("")).summary();
    for line in [
        "# crash_dir: none; reports are kept in memory",
        "# worker_uids: 61184-65519 if the supervisor can start workers as other users",
        "# cgroup: off",
    ] {
        assert!(summary.lines().any(|each| each == line), "{line} is not in\n{summary}");
    }
}

#[test]
fn json_durations_use_configuration_file_syntax() {
    let config =
        Folder::new().accept(&bulkhead("queue_timeout = \"1500ms\"\nrlimits = { stack = \"unlimited\" }"));
    let json = serde_json::to_value(&config.bulkheads[0]).unwrap();
    assert_eq!(json["deadline"], "30s");
    assert_eq!(json["queue_timeout"], "1s 500ms");
    assert_eq!(json["restart"]["policy"], "always");
    assert_eq!(json["program"]["exec"]["argv"][0], "tool");
    assert_eq!(json["rlimits"][1], serde_json::json!({ "resource": "stack", "limit": "unlimited" }));
}

#[test]
fn byte_order_mark_is_ignored() {
    let folder = Folder::new();
    folder.accept(&format!("\u{feff}{}", bulkhead("")));
    folder.reject_one(&format!("\u{feff}x = 1\n{}", bulkhead("")), (1, 1), "unknown key `x`", "");
}

#[test]
fn windows_line_endings_are_accepted() {
    let folder = Folder::new();
    folder.accept(&bulkhead("processes = 2").replace('\n', "\r\n"));
    folder.reject_one(&bulkhead("processes = 0").replace('\n', "\r\n"), (3, 13), "`processes`", "");
}

//! Tests of confinement keys: valid values, invalid values, and rules that span several keys.

use super::*;

/// Returns the configuration of a bulkhead with a `sandbox` table on line 3. The table also contains the keys in
/// `entries`.
fn sandbox(entries: &str) -> String {
    bulkhead(&format!("sandbox = {{ profile = \"default\", {entries} }}"))
}

/// Returns the column of the character after `more`, if the additional keys in the `sandbox` table begin with `more`.
fn column(more: &str) -> usize {
    "sandbox = { profile = \"default\", ".len() + more.len() + 1
}

fn strings(strings: &[&str]) -> Vec<String> {
    strings.iter().map(|string| (*string).to_owned()).collect()
}

#[test]
fn sandbox_keys_are_merged_with_defaults() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    assert_eq!(config.supervisor.worker_uids, Some(UidRange { first: 200_000, last: 200_999 }));
    let [last, aa, mm] = config.bulkheads.as_slice() else { panic!() };
    let expected = SandboxConfig {
        profile: Profile::Strict,
        network: Network::All,
        read: vec!["/usr".into(), folder.path("work/../bin")],
        write: vec![folder.path("work"), "/tmp".into()],
        tmp_bytes: 1 << 20,
        user: Some(SandboxUser::Auto),
        allow: strings(&["mlock", "mbind"]),
        deny: strings(&["getpid"]),
        best_effort: vec![Layer::UserNamespace, Layer::Cgroup],
    };
    assert_eq!(last.sandbox, expected);
    assert_eq!(aa.sandbox.profile, Profile::None);
    assert_eq!(
        (&aa.sandbox.read, &aa.sandbox.best_effort),
        (&vec![], &vec![]),
        "the profile \"none\" ignores keys of [defaults]"
    );
    let expected = SandboxConfig {
        profile: Profile::Default,
        network: Network::Connections { tcp_ports: vec![443, 5432], udp: true },
        read: vec![folder.path("work")],
        write: vec![],
        tmp_bytes: 64 << 20,
        user: Some(SandboxUser::Named("root".to_owned())),
        allow: vec![],
        deny: vec![],
        best_effort: vec![Layer::Landlock],
    };
    assert_eq!(mm.sandbox, expected);

    let cgroup = CgroupConfig { memory: Some(512 << 20), pids: Some(32), cpu: Some(1.5) };
    assert_eq!(last.cgroup, Some(cgroup));
    let cgroup = CgroupConfig { memory: Some(512 << 20), pids: None, cpu: Some(2.0) };
    assert_eq!(mm.cgroup, Some(cgroup));
    let json = serde_json::to_value(last).unwrap();
    assert_eq!(json["sandbox"]["user"], "auto");
    assert_eq!(json["sandbox"]["best_effort"][0], "user_namespace");
    assert_eq!(json["sandbox"]["network"], true);
    let json = serde_json::to_value(mm).unwrap();
    assert_eq!(json["sandbox"]["network"], serde_json::json!({ "tcp_ports": [443, 5432], "udp": true }));
}

#[test]
fn default_sandbox_profile_matches_documentation() {
    let sandbox = &Folder::new().accept(&bulkhead("")).bulkheads[0].sandbox;
    assert_eq!(sandbox.profile, Profile::Default);
    let key = reference().into_iter().find(|key| key.path() == "bulkhead.NAME.sandbox.profile").unwrap();
    assert_eq!(key.default, DefaultValue::Word("default"));
}

#[test]
fn profile_none_rejects_other_sandbox_keys() {
    let folder = Folder::new();
    for (name, value) in [
        ("network", "true"),
        ("network", "false"),
        ("network", "{ tcp_ports = [] }"),
        ("read", "[]"),
        ("write", "[\"work\"]"),
        ("tmp", "0"),
        ("user", "\"root\""),
        ("user", "\"auto\""),
        ("best_effort", "[\"identity\"]"),
    ] {
        let message = format!("`sandbox.{name}` has no effect: `sandbox.profile` is \"none\"");
        let help = format!("set `profile = \"default\"` or `profile = \"strict\"`, or remove `{name}`");
        let line = format!("sandbox = {{ profile = \"none\", {name} = {value} }}");
        let column = line.find(value).unwrap() + 1;
        folder.reject_one(&bulkhead(&line), (3, column), &message, &help);
        let defaults = format!("[defaults]\n{line}\n{}", bulkhead(""));
        folder.reject_one(&defaults, (2, column), &message, "; for a bulkhead without a sandbox, set");
        // Rejected, because the bulkhead's table sets both the key and the `none` profile. A key in `[defaults]` would
        // be accepted.
        let text = format!("[defaults]\nsandbox = {{ profile = \"strict\" }}\n{}", bulkhead(&line));
        folder.reject_one(&text, (5, column), &message, &help);
    }
    folder.reject_one(
        &bulkhead("sandbox = { profile = \"none\", syscalls = {} }"),
        (3, 31),
        "`sandbox.syscalls` has no effect",
        "",
    );
    let text = bulkhead("sandbox = { profile = \"nine\", network = true }");
    folder.reject_one(&text, (3, 23), "`sandbox.profile` cannot be \"nine\"", "did you mean `\"none\"`?");
}

#[test]
fn profile_none_ignores_sandbox_keys_in_defaults() {
    let folder = Folder::new();
    let defaults =
        "[defaults.sandbox]\nprofile = \"default\"\nnetwork = true\nsyscalls = { deny = [\"mlock\"] }\n";
    let config = folder.accept(&format!("{defaults}{}", bulkhead("sandbox = { profile = \"none\" }")));
    let sandbox = &config.bulkheads[0].sandbox;
    assert_eq!((sandbox.profile, sandbox.tmp_bytes), (Profile::None, 0));
    assert_eq!(sandbox.network, Network::None);
    assert!(sandbox.deny.is_empty());
    let config = folder.accept(&format!("{defaults}{}", bulkhead("")));
    let sandbox = &config.bulkheads[0].sandbox;
    assert_eq!((&sandbox.network, sandbox.tmp_bytes), (&Network::All, 64 << 20));
}

#[test]
fn network_can_be_a_list_of_ports() {
    let folder = Folder::new();
    let network = |text: &str| folder.accept(&sandbox(text)).bulkheads[0].sandbox.network.clone();
    let of = |tcp_ports: &[u16], udp| Network::Connections { tcp_ports: tcp_ports.to_vec(), udp };
    assert_eq!(network("network = { tcp_ports = [443, 1, 65535] }"), of(&[443, 1, 65535], false));
    assert_eq!(network("network = { tcp_ports = [], udp = true }"), of(&[], true));
    // A bulkhead's value replaces the value in `[defaults]`.
    let defaults = "[defaults.sandbox.network]\ntcp_ports = [443]\nudp = true\n";
    for (own, expected) in [
        ("network = { tcp_ports = [80] }", of(&[80], false)),
        ("network = false", Network::None),
        ("tmp = 0", of(&[443], true)),
    ] {
        let config = folder.accept(&format!("{defaults}{}", sandbox(own)));
        assert_eq!(config.bulkheads[0].sandbox.network, expected);
        assert_eq!(folder.again(&config), config);
    }
}

#[test]
fn invalid_ports_are_rejected_with_help() {
    let folder = Folder::new();
    let write = "write `tcp_ports = [443]`";
    for (value, at, message, help) in [
        (
            "tcp_ports = [0]",
            13,
            "`sandbox.network.tcp_ports[0]` must be a port from 1 to 65535, not 0",
            write,
        ),
        ("tcp_ports = [1, 65536]", 16, "`sandbox.network.tcp_ports[1]` must be a port", write),
        ("tcp_ports = [-1]", 13, "not -1", write),
        ("tcp_ports = [99999999999999999999999999999999999999999]", 13, "not a number that large", write),
        ("tcp_ports = [\"443\"]", 13, "not a string", write),
        ("tcp_ports = [443, 80, 443]", 22, "`sandbox.network.tcp_ports` contains 443 twice", "remove one"),
        (
            "tcp_ports = 443",
            12,
            "`sandbox.network.tcp_ports` must be an array of numbers, not a number",
            write,
        ),
        ("udp = true", -2, "`sandbox.network` has no `tcp_ports`", "`[]` permits no TCP connections"),
        (
            "tcp_ports = [443], udp = \"no\"",
            25,
            "`sandbox.network.udp` must be `true` or `false`",
            "udp = false",
        ),
        (
            "tcp_ports = [443], udp_ports = [53]",
            19,
            "unknown key `udp_ports` in `sandbox.network`",
            "`tcp_ports`?",
        ),
        ("tcp_port = [443]", 0, "unknown key `tcp_port` in `sandbox.network`", "did you mean `tcp_ports`?"),
        ("tcp_ports = [443], hosts = []", 19, "unknown key `hosts`", "valid keys: tcp_ports, udp"),
    ] {
        let column = column("network = { ") as i32 + at;
        let text = sandbox(&format!("network = {{ {value} }}"));
        folder.reject_one(&text, (3, column as usize), message, help);
    }
    let many = (1..=257).map(|port| port.to_string()).collect::<Vec<_>>().join(", ");
    let problems = folder.reject(&sandbox(&format!("network = {{ tcp_ports = [{many}] }}")));
    assert!(problems[0].message.contains("has more than 256 ports"), "{problems:?}");
    let text = sandbox("network = [443]");
    let message = "`sandbox.network` must be `true`, `false` or a table, not an array";
    folder.reject_one(&text, (3, column("network = ")), message, "write `network = ");
    // All problems are reported at once.
    let text = sandbox("network = { tcp_ports = [0, 443, 443, 70000], udp = 1, sctp = true }");
    assert_eq!(folder.reject(&text).len(), 5);
}

#[test]
fn sandbox_paths_must_exist() {
    let folder = Folder::new();
    for name in ["read", "write"] {
        let at = (3, column(&format!("{name} = [")));
        folder.reject_one(
            &sandbox(&format!("{name} = [\"none\"]")),
            at,
            &format!("`sandbox.{name}`: there is no file or directory {}", folder.path("none").display()),
            "relative paths start at the directory of the configuration file",
        );
        folder.reject_one(
            &sandbox(&format!("{name} = [\"\"]")),
            at,
            &format!("`sandbox.{name}[0]` is empty"),
            &format!("write `{name} = [\"/usr/share/fonts\"]`"),
        );
        folder.reject_one(&sandbox(&format!("{name} = [\"a\\u0000\"]")), at, "contains a NUL byte", "");
        folder.reject_one(
            &sandbox(&format!("{name} = [3]")),
            at,
            "must be a string, not a number",
            "write \"3\"",
        );
        folder.reject_one(
            &sandbox(&format!("{name} = \"/usr\"")),
            (3, column(&format!("{name} = "))),
            "must be an array of strings, not a string",
            &format!("write `{name} = [\"/usr\"]`"),
        );
        let twice = sandbox(&format!("{name} = [\"work\", \"work\"]"));
        folder.reject_one(&twice, (3, at.1 + 8), "contains `work` twice", "remove one");
        let many = ["\"/\""; 257].join(", ");
        let problems = folder.reject(&sandbox(&format!("{name} = [{many}]")));
        assert!(problems.iter().any(|problem| problem.message.contains("has more than 256 paths")));
    }
}

#[test]
fn sandbox_tmp_can_be_zero() {
    let folder = Folder::new();
    assert_eq!(folder.accept(&sandbox("tmp = 0")).bulkheads[0].sandbox.tmp_bytes, 0);
    let message = "`sandbox.tmp` must be at least 0, not -1";
    folder.reject_one(&sandbox("tmp = -1"), (3, column("tmp = ")), message, "write `tmp = \"64MiB\"`");
}

#[test]
fn sandbox_user_must_exist() {
    let folder = Folder::new();
    let at = (3, column("user = "));
    folder.reject_one(
        &sandbox("user = \"no-such-user\""),
        at,
        "`sandbox.user`: there is no user `no-such-user`",
        "write `user = \"auto\"` or `user = \"shared\"`, or write a name that",
    );
    folder.reject_one(
        &sandbox("user = 1001"),
        at,
        "`sandbox.user` must be a string",
        "write `user = \"auto\"`",
    );
    folder.reject_one(&sandbox("user = \"\""), at, "`sandbox.user` is empty", "");
    assert_eq!(folder.accept(&sandbox("")).bulkheads[0].sandbox.user, None);
}

#[test]
fn sandbox_uses_separate_ids_unless_user_is_named() {
    let folder = Folder::new();
    let user = |entries: &str| {
        let text = bulkhead(&format!("sandbox = {{ {entries} }}"));
        folder.accept(&text).bulkheads.remove(0).sandbox
    };
    for profile in ["default", "strict"] {
        let profile = format!("profile = \"{profile}\"");
        assert!(user(&profile).wants_own_ids());
        assert!(user(&format!("{profile}, user = \"auto\"")).wants_own_ids());
        let shared = user(&format!("{profile}, user = \"shared\""));
        assert!(!shared.wants_own_ids() && shared.user == Some(SandboxUser::Shared));
        assert!(!user(&format!("{profile}, user = \"root\"")).wants_own_ids());
    }
    assert!(!user("profile = \"none\"").wants_own_ids());
    assert!(!user("profile = \"none\", user = \"shared\"").wants_own_ids());
    let strict = |entries: &str| bulkhead(&format!("sandbox = {{ profile = \"strict\"{entries} }}"));
    let text = format!("{}[supervisor]\nworker_uids = 5\n", strict(""));
    folder.reject_one(&text, (5, 15), "`worker_uids` must be a string with the first and the last ID", "");
    let text = strict(", user = \"auto\", best_effort = [\"identiy\"]");
    folder.reject_one(&text, (3, 63), "cannot be \"identiy\"", "");
    folder.reject_one(&strict(", user = 7"), (3, 40), "`sandbox.user` must be a string", "");
}

#[test]
fn worker_uids_must_be_a_valid_range() {
    let folder = Folder::new();
    let text = |value: &str| format!("[supervisor]\nworker_uids = {value}\n{}", bulkhead(""));
    for (value, first, last) in [
        ("\"1-1000000\"", 1, 1_000_000),
        ("\" 200000 - 200999 \"", 200_000, 200_999),
        ("\"4294967294-4294967294\"", 4_294_967_294, 4_294_967_294),
    ] {
        let config = folder.accept(&text(value));
        assert_eq!(config.supervisor.worker_uids, Some(UidRange { first, last }), "{value}");
    }
    let example = "write `worker_uids = \"200000-200999\"`";
    for (value, message, help) in [
        ("\"200000\"", "is not a range of IDs: \"200000\"", example),
        ("\"\"", "is not a range of IDs", example),
        ("\"a-b\"", "is not a range of IDs: \"a-b\"", example),
        ("\"-5-7\"", "is not a range of IDs", example),
        ("\"+5-7\"", "is not a range of IDs", example),
        ("\"5-7-9\"", "is not a range of IDs", example),
        ("\"9-5\"", "has a first ID above its last ID: \"9-5\"", "write `worker_uids = \"5-9\"`"),
        ("\"0-5\"", "must be from 1 to 4294967294, not \"0-5\"", example),
        ("\"5-4294967295\"", "must be from 1 to 4294967294", example),
        ("\"5-99999999999999999999999\"", "must be from 1 to 4294967294", example),
        (
            "\"1-1000001\"",
            "has 1000001 IDs, but the maximum is 1000000",
            "write `worker_uids = \"1-1000000\"` or fewer",
        ),
        ("[200000, 200999]", "must be a string with the first and the last ID, not an array", example),
    ] {
        folder.reject_one(&text(value), (2, 15), &format!("`worker_uids` {message}"), help);
    }
}

#[test]
fn sandbox_rejects_unknown_system_calls() {
    let folder = Folder::new();
    for name in ["allow", "deny"] {
        let list = |names: &str| sandbox(&format!("syscalls = {{ {name} = [{names}] }}"));
        let at = (3, column(&format!("syscalls = {{ {name} = [")));
        folder.accept(&list("\"mlock\", \"clone3\", \"mbind\""));
        for wrong in ["", "Mlock", "mlock(2)", "SYS-mlock", "größe"] {
            let message = format!(
                "`sandbox.syscalls.{name}` contains `{wrong}`, but there is no system call of that name"
            );
            folder.reject_one(&list(&format!("\"{wrong}\"")), at, &message, "as in \"mlock\"");
        }
        let message = format!("`sandbox.syscalls.{name}[0]` must be a string, not a number");
        folder.reject_one(&list("5"), at, &message, "write \"5\"");
        folder.reject_one(&list("\"mlock\", \"mlock\""), (3, at.1 + 9), "contains `mlock` twice", "");
    }
    folder.reject_one(
        &sandbox("syscalls = { allow = [\"mlock\"], deny = [\"getpid\", \"mlock\"] }"),
        (3, column("syscalls = { allow = [\"mlock\"], deny = [\"getpid\", ")),
        "`sandbox.syscalls` both allows and denies `mlock`",
        "remove the name from `allow` or `deny`",
    );
    let text = format!(
        "[defaults.sandbox]\nsyscalls = {{ deny = [\"mlock\"] }}\n{}",
        sandbox("syscalls = { allow = [\"mlock\"] }")
    );
    folder.reject_one(&text, (5, column("syscalls = { allow = [")), "both allows and denies `mlock`", "");
}

#[test]
fn exec_cannot_deny_calls_of_its_worker() {
    let folder = Folder::new();
    let exec = |name: &str| sandbox(&format!("syscalls = {{ deny = [\"{name}\"] }}"));
    let at = (3, column("syscalls = { deny = ["));
    for name in crate::system_calls::NEEDED_FOR_EXEC {
        let message = format!("contains `{name}`, which the worker of an `exec` bulkhead needs for each job");
        folder.reject_one(&exec(name), at, &message, "remove the name");
        folder.accept(&exec(name).replace("exec", "command"));
    }
    folder.reject_one(&exec("brk"), at, "contains `brk`, which every worker needs to start", "");
    ["symlink", "socket", "mkdir", "kill", "chmod"].iter().for_each(|name| drop(folder.accept(&exec(name))));
}

#[test]
fn best_effort_rejects_unknown_layers() {
    let folder = Folder::new();
    let all: Vec<_> = Layer::ALL.iter().map(|layer| format!("\"{}\"", layer.name())).collect();
    let config = folder.accept(&sandbox(&format!("best_effort = [{}]", all.join(", "))));
    assert_eq!(config.bulkheads[0].sandbox.best_effort, Layer::ALL);
    let at = (3, column("best_effort = ["));
    folder.reject_one(
        &sandbox("best_effort = [\"pid-namespaces\"]"),
        at,
        "`sandbox.best_effort[0]` cannot be \"pid-namespaces\"",
        "did you mean `\"pid_namespace\"`?",
    );
    folder.reject_one(
        &sandbox("best_effort = [\"all\"]"),
        at,
        "cannot be \"all\"",
        "write one of `\"landlock\"`, ",
    );
}

#[test]
fn cgroup_limits_outside_their_range_are_rejected() {
    let folder = Folder::new();
    let text = |entry: &str| bulkhead(&format!("[bulkhead.a.cgroup]\n{entry}"));
    for (entry, column, message, help) in [
        ("memory = 1000", 10, "`cgroup.memory` must be at least 1MiB, not 1000", "write `memory = \"8MiB\"`"),
        ("memory = \"1023KiB\"", 10, "must be at least 1MiB, not 1047552", ""),
        ("pids = 0", 8, "`cgroup.pids` must be at least 1, not 0", "write `pids = 1`"),
        ("cpu = 0", 7, "`cgroup.cpu` must be above 0 and at most 1024, not 0", "write `cpu = 1.5`"),
        ("cpu = -0.5", 7, "must be above 0 and at most 1024, not -0.5", "write `cpu = 1.5`"),
        ("cpu = 1024.5", 7, "must be above 0 and at most 1024, not 1024.5", "write `cpu = 1024`"),
        ("cpu = nan", 7, "must be above 0", ""),
        ("cpu = \"150%\"", 7, "`cgroup.cpu` must be a number, not a string", "write `cpu = 1.5`"),
        ("memry = 5", 1, "unknown key `memry` in [bulkhead.a.cgroup]", "did you mean `memory`?"),
    ] {
        folder.reject_one(&text(entry), (4, column), message, help);
    }
    let cgroup = |entry: &str| folder.accept(&text(entry)).bulkheads.remove(0).cgroup;
    let nothing = CgroupConfig { memory: None, pids: None, cpu: None };
    assert_eq!(cgroup(""), Some(nothing.clone()), "a cgroup without limits still kills whole process trees");
    assert_eq!(cgroup("cpu = 1024"), Some(CgroupConfig { cpu: Some(1024.0), ..nothing.clone() }));
    assert_eq!(cgroup("memory = 1048576"), Some(CgroupConfig { memory: Some(1 << 20), ..nothing }));
}

#[test]
fn summary_shows_sandbox_rlimits_unless_overridden() {
    let folder = Folder::new();
    let defaults = |lines: &str| {
        let summary = folder.accept(&bulkhead(lines)).summary();
        [
            "# rlimits.fsize: 4GiB, set by the sandbox\n",
            "# rlimits.nproc: 1024, set by the sandbox if the limit applies",
        ]
        .map(|line| summary.contains(line))
    };
    assert_eq!(defaults(""), [true, true]);
    assert_eq!(defaults("rlimits = { fsize = \"1MiB\" }"), [false, true]);
    assert_eq!(defaults("rlimits = { nproc = \"unlimited\" }"), [true, false]);
    assert_eq!(defaults("sandbox = { profile = \"none\" }"), [false, false]);
}

#[test]
fn configuration_summary_shows_every_sandbox_key() {
    let folder = Folder::new();
    let summary = folder.accept(&sandbox("tmp = 0, user = \"auto\", best_effort = [\"identity\"]")).summary();
    let line = "sandbox = { profile = \"default\", network = false, read = [], write = [], tmp = \"0B\", \
                user = \"auto\", syscalls = { allow = [], deny = [] }, best_effort = [\"identity\"] }\n";
    assert!(summary.contains(line), "{summary}");
    let summary = folder.accept(&bulkhead("cgroup = {}\nsandbox = { profile = \"none\" }")).summary();
    assert!(summary.contains("\nsandbox = { profile = \"none\" }\ncgroup = {}\n"), "{summary}");
}

#[test]
fn summary_explains_tmp_check_in_default_profile() {
    let folder = Folder::new();
    let strict = "profile = \"strict\", user = \"root\"";
    for (entries, is_told) in [
        ("profile = \"default\", tmp = \"8MiB\"", true),
        ("profile = \"default\", tmp = \"64MiB\"", true),
        ("profile = \"default\"", true),
        ("profile = \"default\", tmp = 0", false),
        (&format!("{strict}, tmp = \"8MiB\""), false),
        ("profile = \"none\"", false),
    ] {
        let config = folder.accept(&bulkhead(&format!("sandbox = {{ {entries} }}")));
        let summary = config.summary();
        let comment = "\n# sandbox.tmp: a directory on disk, whose size is checked every second\n";
        assert_eq!(summary.contains(comment), is_told, "{entries}: {summary}");
        assert_eq!(folder.again(&config), config, "{entries}");
    }
}

//! Tests of isolated tenants, and of per-tenant tables.

use std::time::Duration;

use super::*;

#[track_caller]
fn accept_one(lines: &str) -> BulkheadConfig {
    Folder::new().accept(&bulkhead(lines)).bulkheads.remove(0)
}

/// Returns the configuration of a bulkhead with isolated tenants. `isolate` is set on line 3, and `lines` is inserted
/// at line 4.
fn isolated(lines: &str) -> String {
    bulkhead(&format!("tenants = {{ isolate = true }}\n{lines}"))
}

const NOTHING: TenantConfig =
    TenantConfig { max_in_flight: None, max_queue: None, processes: None, rate_limit: None };

#[test]
fn tenant_tables_can_set_every_key() {
    let config = Folder::new().accept(FULL);
    let [last, _, mm] = config.bulkheads.as_slice() else { panic!() };
    let isolation = IsolationConfig { max_active: 8, idle: Duration::from_secs(300) };
    assert_eq!(mm.isolation(), Some(&isolation));
    let tenants = TenantsConfig { max_in_flight: None, max_queue: None, isolation: Some(isolation) };
    assert_eq!(mm.tenants, Some(tenants));
    let rate_limit = RateLimitConfig { per_second: 7.0, burst: 7, per: RatePer::Tenant };
    let acme = TenantConfig {
        processes: Some(3),
        max_in_flight: Some(2),
        max_queue: Some(0),
        rate_limit: Some(rate_limit),
    };
    assert_eq!(mm.tenant, [("acme".to_owned(), acme), ("none".to_owned(), NOTHING)].into());
    let rate_limit = RateLimitConfig { per_second: 500.5, burst: 600, per: RatePer::Tenant };
    let big = TenantConfig {
        max_in_flight: Some(4),
        max_queue: Some(50),
        processes: None,
        rate_limit: Some(rate_limit),
    };
    assert_eq!(last.tenant, [("big \"tenant\"\u{85}".to_owned(), big)].into());
}

#[test]
fn tenant_isolation_can_be_switched_off() {
    let isolation = IsolationConfig { max_active: 64, idle: Duration::from_secs(60) };
    assert_eq!(accept_one("tenants.isolate = true").isolation(), Some(&isolation));
    assert_eq!(accept_one("tenants = { isolate = false }").tenants, None);
    let folder = Folder::new();
    let text = format!(
        "[defaults]\ntenants = {{ isolate = true, max_active = 5, idle = \"1s\" }}\n{}",
        bulkhead("tenants = { isolate = false }")
    );
    assert_eq!(folder.accept(&text).bulkheads[0].tenants, None);
    let config = folder.accept(&text.replace("isolate = false", "idle = \"2s\""));
    let isolation = IsolationConfig { max_active: 5, idle: Duration::from_secs(2) };
    assert_eq!(config.bulkheads[0].isolation(), Some(&isolation));
    let config = folder.accept(&text.replace("isolate = false", "isolate = false, max_queue = 3"));
    let tenants = TenantsConfig { max_in_flight: None, max_queue: Some(3), isolation: None };
    assert_eq!(config.bulkheads[0].tenants, Some(tenants));
}

#[test]
fn tenants_isolate_must_be_boolean() {
    let folder = Folder::new();
    for (value, found, help) in [
        ("\"true\"", "a string", "write `isolate = true` without quotes"),
        ("\"No\"", "a string", "write `isolate = false` without quotes"),
        ("\"maybe\"", "a string", "write `isolate = true` or `isolate = false`"),
        ("1", "a number", "write `isolate = true`"),
        ("0", "a number", "write `isolate = false`"),
        ("2", "a number", "write `isolate = true` or `isolate = false`"),
        ("{}", "a table", "write `isolate = true` or `isolate = false`"),
    ] {
        let message = format!("`tenants.isolate` must be `true` or `false`, not {found}");
        folder.reject_one(&bulkhead(&format!("tenants = {{ isolate = {value} }}")), (3, 23), &message, help);
    }
}

#[test]
fn isolation_keys_require_isolated_tenants() {
    let folder = Folder::new();
    for (entry, name) in [("max_active = 5", "max_active"), ("idle = \"5s\"", "idle")] {
        let message = format!("`tenants.{name}` has no effect without `tenants.isolate = true`");
        let help = format!("add `isolate = true`, or remove `{name}`");
        let column = 13 + name.len() + 3;
        folder.reject_one(&bulkhead(&format!("tenants = {{ {entry} }}")), (3, column), &message, &help);
        let line = format!("tenants = {{ {entry}, isolate = false }}");
        folder.reject_one(&bulkhead(&line), (3, column), &message, &help);
        let line = format!("tenants = {{ {entry}, max_queue = 5 }}");
        folder.reject_one(&bulkhead(&line), (3, column), &message, &help);
    }
    let text = format!("[defaults]\ntenants = {{ max_active = 5 }}\n{}", bulkhead(""));
    folder.reject_one(
        &text,
        (2, 26),
        "`tenants.max_active` has no effect",
        "for a bulkhead whose tenants share workers, set `tenants = { isolate = false }`",
    );
    folder.accept(&format!("{text}tenants = {{ isolate = false }}\n"));
    folder.accept(&format!("{text}tenants = {{ isolate = true }}\n"));
    let text = format!("[defaults]\ntenants = {{ isolate = false }}\n{}", bulkhead("tenants.idle = \"1s\""));
    folder.reject_one(&text, (5, 16), "`tenants.idle` has no effect", "");
    folder.reject_one(
        &bulkhead("tenants = { isolate = true, max_active = 0 }"),
        (3, 42),
        "from 1 to 1024",
        "",
    );
    folder.reject_one(
        &bulkhead("tenants = { isolate = true, idle = \"0s\" }"),
        (3, 36),
        "from 1ms",
        "\"1m\"",
    );
}

#[test]
fn isolation_rejects_limits_on_shared_workers() {
    let folder = Folder::new();
    for name in ["max_in_flight", "max_queue"] {
        folder.reject_one(
            &bulkhead(&format!("tenants = {{ isolate = true, {name} = 2 }}")),
            (3, 29 + name.len() + 3),
            &format!(
                "`tenants.{name}` (2) limits a tenant's share of shared workers, but with `tenants.isolate` (true)"
            ),
            &format!("remove one of the two keys; with `isolate`, the bulkhead's own `{name}` applies to each tenant"),
        );
    }
    let text = format!("[defaults]\ntenants = {{ max_queue = 2 }}\n{}", bulkhead("tenants.isolate = true"));
    folder.reject_one(&text, (5, 19), "`tenants.max_queue` (2, from [defaults])", "");
    folder.accept(&text.replace("isolate = true", "isolate = false"));
}

#[test]
fn isolated_tenants_have_at_most_16384_workers() {
    let folder = Folder::new();
    let text = |processes: u32, max_active: u32| {
        bulkhead(&format!(
            "processes = {processes}\ntenants = {{ isolate = true, max_active = {max_active} }}"
        ))
    };
    assert_eq!(folder.accept(&text(16, 1024)).bulkheads[0].workers_max(), 16_384);
    folder.reject_one(
        &text(17, 1024),
        (4, 42),
        "`processes` (17) × `tenants.max_active` (1024) exceeds 16384",
        "with this many processes, set `max_active` to at most 963",
    );
    let spares = |spares: u32| format!("{}start.spares = {spares}\n", text(15, 1024));
    folder.accept(&spares(1));
    folder.reject_one(
        &spares(2),
        (4, 42),
        "(`processes` (15) + `start.spares` (2)) × `tenants.max_active` (1024) exceeds 16384",
        "with this many processes and spares, set `max_active` to at most 963",
    );
    folder.reject_one(
        &bulkhead("processes = 257\ntenants = { isolate = true }"),
        (3, 13),
        "`tenants.max_active` (64, the default)",
        "set `max_active` to at most 63",
    );
    let tenants = "[bulkhead.a.tenant.x]\nprocesses = 20\n[bulkhead.a.tenant.y]\nprocesses = 15\n\
                   [bulkhead.a.tenant.z]\nprocesses = 18\n";
    folder.reject_one(
        &format!("{}{tenants}", text(16, 1024)),
        (6, 13),
        "with `tenant.x.processes` (20) there can be 16390 workers at the same time, above 16384",
        "reduce `processes` (here or for other tenants)",
    );
    assert_eq!(folder.accept(&format!("{}{tenants}", text(2, 3))).bulkheads[0].workers_max(), 53);
    assert_eq!(folder.accept(&format!("{}{tenants}", text(16, 2))).bulkheads[0].workers_max(), 38);
    assert_eq!(folder.accept(&format!("{}{tenants}", text(16, 4))).bulkheads[0].workers_max(), 70);
    assert_eq!(accept_one("processes = 3").workers_max(), 3);
}

#[test]
fn single_tenant_can_have_its_own_limits() {
    let config =
        accept_one("max_queue = 9\ntenant = { acme = { max_in_flight = 1000000, max_queue = 0 }, b = {} }");
    let acme = TenantConfig { max_in_flight: Some(1_000_000), max_queue: Some(0), ..NOTHING };
    assert_eq!(config.tenant, [("acme".to_owned(), acme), ("b".to_owned(), NOTHING)].into());
    let config = accept_one("[bulkhead.a.tenant.acme]\nrate_limit = { per_second = 2.5, burst = 9 }");
    let limit = RateLimitConfig { per_second: 2.5, burst: 9, per: RatePer::Tenant };
    assert_eq!(config.tenant["acme"].rate_limit, Some(limit));
}

#[test]
fn error_in_tenant_table_names_tenant() {
    let folder = Folder::new();
    let cases = [
        ("max_in_flight = 0", 17, "`tenant.acme.max_in_flight` must be from 1 to 1000000, not 0", "= 1`"),
        ("max_queue = -1", 13, "`tenant.acme.max_queue` must be from 0 to 1000000, not -1", "= 0`"),
        ("max_queue = true", 13, "`tenant.acme.max_queue` must be a whole number", "= 20`"),
        ("rate_limit = { per_second = 0 }", 29, "`tenant.acme.rate_limit.per_second` must be above 0", ""),
        ("rate_limit = { burst = 3 }", 1, "`rate_limit` needs `per_second`", "add `per_second = 100`"),
        (
            "rate_limit = 3",
            14,
            "`tenant.acme.rate_limit` must be a table",
            "write `rate_limit = { per_second = 3 }`",
        ),
        ("max_queu = 3", 1, "unknown key `max_queu` in [bulkhead.a.tenant.acme]", "mean `max_queue`?"),
        (
            "grace = \"1s\"",
            1,
            "unknown key `grace` in [bulkhead.a.tenant.acme]",
            "belongs in [bulkhead.NAME]",
        ),
        (
            "rate_limit = { per_second = 3, per = \"tenant\" }",
            32,
            "`tenant.acme.rate_limit.per` has no effect: a tenant's rate limit always applies per tenant",
            "remove `per`",
        ),
    ];
    for (line, column, message, help) in cases {
        folder.reject_one(
            &bulkhead(&format!("[bulkhead.a.tenant.acme]\n{line}")),
            (4, column),
            message,
            help,
        );
        folder.reject_one(
            &isolated(&format!("[bulkhead.a.tenant.acme]\n{line}")),
            (5, column),
            message,
            help,
        );
    }
    folder.reject_one(
        &isolated("[bulkhead.a.tenant.\"a b\"]\nprocesses = 0"),
        (5, 13),
        "`tenant.\"a b\".processes` must be from 1 to 1024, not 0",
        "write `processes = 1`",
    );
}

#[test]
fn invalid_tenant_names_are_rejected() {
    let folder = Folder::new();
    let named = |name: &str| bulkhead(&format!("[bulkhead.a.tenant.\"{name}\"]"));
    folder.accept(&named(&"x".repeat(256)));
    folder.accept(&named("Acme, Größe 3/π"));
    folder.reject_one(&named(""), (3, 20), "the name of a tenant is empty", "jobs without a tenant have");
    folder.reject_one(&named(&"ä".repeat(129)), (3, 20), "the name is 258 bytes long", "at most 256 bytes");
    folder.reject_one(&named("a\\u0000b"), (3, 20), "contains a NUL byte", "");
    let tables: String = (0..1025).map(|number| format!("tenant.t{number} = {{}}\n")).collect();
    folder.reject_one(&bulkhead(&tables), (3 + 1024, 8), "more than 1024 tenants", "");
    folder.accept(&bulkhead(&tables.replace("tenant.t1024 = {}\n", "")));
}

#[test]
fn error_suggests_tenants_table_for_misplaced_keys() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("[bulkhead.a.tenant]\nmax_queue = 3"),
        (4, 13),
        "`tenant.max_queue` must be a table, not a number",
        "set a key for all tenants in [bulkhead.NAME.tenants]",
    );
    folder.reject_one(
        &bulkhead("[bulkhead.a.tenant]\nacme = 3"),
        (4, 8),
        "`tenant.acme` must be a table, not a number",
        "write a [bulkhead.NAME.tenant.acme] section",
    );
    folder.reject_one(&bulkhead("tenant = 3"), (3, 10), "`tenant` must be a table, not a number", "");
    folder.reject_one(
        &bulkhead("[bulkhead.a.tenants.acme]\nmax_queue = 3"),
        (3, 21),
        "unknown key `acme` in [bulkhead.a.tenants]",
        "write the limits of a single tenant as [bulkhead.NAME.tenant.acme]",
    );
}

#[test]
fn tenant_processes_require_isolation() {
    let folder = Folder::new();
    let lines = "[bulkhead.a.tenant.acme]\nprocesses = 2";
    folder.reject_one(
        &bulkhead(lines),
        (4, 13),
        "`tenant.acme.processes` needs `tenants.isolate = true`",
        "add `tenants = { isolate = true }` to the bulkhead, or remove `processes`",
    );
    folder.accept(&isolated(lines));
    folder.accept(&format!("[defaults]\ntenants = {{ isolate = true }}\n{}", bulkhead(lines)));
    for tenants in ["tenants = 3", "tenants = { isolate = 3 }", "tenants = { isolat = true }"] {
        let problems = folder.reject(&bulkhead(&format!("{tenants}\n{lines}")));
        assert_eq!(problems.len(), 1, "{problems:#?}");
    }
}

#[test]
fn tenants_rate_limit_requires_a_limit_per_tenant() {
    let folder = Folder::new();
    let lines = |limit: &str| {
        format!("rate_limit = {{ {limit} }}\n[bulkhead.a.tenant.acme]\nrate_limit = {{ per_second = 5 }}")
    };
    folder.reject_one(
        &bulkhead(&lines("per_second = 3")),
        (5, 1),
        "`tenant.acme.rate_limit` needs `rate_limit.per = \"tenant\"` (it is \"bulkhead\", the default)",
        "add `per = \"tenant\"` to the bulkhead's `rate_limit`",
    );
    folder.reject_one(
        &bulkhead(&lines("per_second = 3, per = \"bulkhead\"")),
        (5, 1),
        "(it is \"bulkhead\")",
        "",
    );
    folder.accept(&bulkhead(&lines("per_second = 3, per = \"tenant\"")));
    folder.accept(&isolated(&lines("per_second = 3")));
    folder.reject_one(&bulkhead(&lines("per_second = 3, per = 3")), (3, 38), "must be a string", "");
}

#[test]
fn bulkhead_rules_apply_to_isolated_tenants() {
    let folder = Folder::new();
    folder.reject_one(
        &isolated("max_in_flight = 0\n[bulkhead.a.tenant.acme]\nmax_queue = 5"),
        (6, 13),
        "`max_in_flight` (0) conflicts with the queue (`tenant.acme.max_queue` is 5): queued jobs would never run",
        "set `max_in_flight` to at least 1",
    );
    folder.accept(&isolated("max_in_flight = 0\n[bulkhead.a.tenant.acme]\nmax_queue = 5\nmax_in_flight = 1"));
    folder.reject_one(
        &isolated("[bulkhead.a.tenant.acme]\nmax_in_flight = 4097"),
        (5, 17),
        "`tenant.acme.max_in_flight` (4097) exceeds 4096: with `tenants.isolate` the limit is per worker \
         process",
        "write `max_in_flight = 4096` or less",
    );
    folder.reject_one(
        &isolated("processes = 2\nmax_in_flight = 1001\n[bulkhead.a.tenant.acme]\nprocesses = 1000"),
        (7, 13),
        "`tenant.acme.processes` (1000) × `max_in_flight` (1001) exceeds 1000000",
        "write `max_in_flight = 1000` or less",
    );
    let both = "max_in_flight = 0\nmax_queue = 3\n[bulkhead.a.tenant.x]\n[bulkhead.a.tenant.y]";
    folder.reject_one(
        &isolated(both),
        (4, 17),
        "`max_in_flight` (0) conflicts with the queue (`max_queue` is 3)",
        "",
    );
}

#[test]
fn all_tenant_problems_are_reported_together() {
    let problems = Folder::new().reject(&bulkhead(
        "rate_limit = { per_second = 1 }\ntenants = { max_active = 0, idle = \"1s\" }\n[bulkhead.a.tenant.x]\n\
         processes = 2\nmax_in_flight = 0\nrate_limit = { per_second = 2, burst = 0 }\n\
         [bulkhead.a.tenant.\"\"]\nnonsense = 1",
    ));
    let lines: Vec<_> = problems.iter().map(|problem| problem.at.unwrap().line).collect();
    assert_eq!(lines, [4, 4, 6, 7, 8, 8, 9, 10], "{problems:#?}");
}

#[test]
fn configuration_summary_has_section_for_each_tenant() {
    let folder = Folder::new();
    let config = folder.accept(FULL);
    let summary = config.summary();
    for part in [
        ": 3 bulkheads, up to 15 workers\n",
        "\ntenants = { isolate = true, max_active = 8, idle = \"5m\" }\n",
        "\n[bulkhead.mm.tenant.acme]\nmax_in_flight = 2\nmax_queue = 0\nprocesses = 3\n\
         rate_limit = { per_second = 7, burst = 7 }\n",
        "\n[bulkhead.mm.tenant.none]\n",
        "\n[bulkhead.\"zz.last\".tenant.\"big \\\"tenant\\\"\\u0085\"]\n",
    ] {
        assert!(summary.contains(part), "{part} is not in\n{summary}");
    }
    let json = serde_json::to_value(&config.bulkheads[2]).unwrap();
    assert_eq!(json["tenants"]["isolation"], serde_json::json!({ "max_active": 8, "idle": "5m" }));
    assert_eq!(json["tenant"]["acme"]["rate_limit"]["per"], "tenant");
}

/// Parses a file that contains every kind of table, once with isolated tenants and once with tenants that share
/// workers.
#[test]
fn configuration_with_every_table_is_accepted() {
    let text = r#"
        [supervisor]
        socket = "/run/bulkhead/jobs.sock"
        socket_mode = "0600"
        admin = "/run/bulkhead/admin.sock"
        drain_timeout = "30s"
        crash_dir = "/var/lib/bulkhead/crashes"
        max_clients = 1024
        max_payload = "64MiB"
        max_buffered = "512MiB"
        worker_uids = "200000-200999"
        tenant_labels = 50

        [defaults]
        deadline = "5s"

        [bulkhead.thumbnail]
        command = ["./thumbnail-worker", "--fast"]
        env = { RUST_LOG = "info" }
        processes = 2
        max_in_flight = 1
        max_queue = 100
        queue_timeout = "2s"
        deadline = "5s"
        deadline_max = "60s"
        grace = "100ms"
        max_payload = "8MiB"
        max_result = "8MiB"
        priority = { critical_reserve = 0.2 }
        pressure = { warn = 0.8, reject = 0.95 }
        overflow = "reject"
        rate_limit = { per_second = 166, burst = 200, per = "tenant" }
        breaker = { window = "10s", min_calls = 20, failure_rate = 0.5, slow_call = "1s", slow_rate = 1.0, open_for = "5s", probes = 1 }
        fallback = ["thumbnail-safe"]
        retry = { attempts = 2, budget = 0.2 }
        tenants = { isolate = true, max_active = 64, idle = "60s" }
        restart = { policy = "always", backoff = "100ms", backoff_max = "30s", max = 5, within = "30s" }
        start = { handshake = "5s", ready = "60s", mode = "spawn", spares = 0 }
        health = { heartbeat = "1s", missed = 5 }
        recycle = { jobs = 10000, rss = "300MiB", age = "1h" }
        poison = { crashes = 3, within = "72h" }

        [bulkhead.thumbnail.rlimits]
        as = "1GiB"
        cpu = "60s"
        nofile = 64
        nproc = 16
        fsize = "16MiB"
        core = 0

        [bulkhead.thumbnail.sandbox]
        profile = "strict"
        network = false
        read = ["/usr/share"]
        write = []
        tmp = "64MiB"
        user = "auto"
        syscalls = { allow = [], deny = [] }
        best_effort = []

        [bulkhead.thumbnail.cgroup]
        memory = "512MiB"
        pids = 32
        cpu = 1.5

        [bulkhead.thumbnail.tenant.acme]
        rate_limit = { per_second = 500, burst = 500 }

        [[access]]
        uid = 1001
        bulkheads = ["thumbnail"]
        tenants = ["acme"]

        [bulkhead.thumbnail-safe]
        command = ["./thumbnail-worker"]
    "#;
    let folder = Folder::new();
    let isolated = folder.accept(text);
    let common = folder.accept(
        &text.replace("isolate = true, max_active = 64, idle = \"60s\"", "max_in_flight = 2, max_queue = 20"),
    );
    assert!(isolated.bulkheads[0].isolation().is_some() && common.bulkheads[0].isolation().is_none());
    for config in [isolated, common] {
        assert_eq!(folder.again(&config), config);
    }
}

#[test]
fn first_tenants_in_file_get_metric_labels() {
    let folder = Folder::new();
    let bulkheads = "[bulkhead.z]\nexec = [\"tool\"]\n[bulkhead.z.tenant]\nd = {}\nb = {}\n_other = {}\n\
                     [bulkhead.a]\nexec = [\"tool\"]\n[bulkhead.a.tenant]\na = {}\nb = {}\n\
                     [[access]]\nuid = 0\ntenants = [\"e\", \"d\"]\n";
    let labelled = |labels: &str| {
        let config = folder.accept(&format!("[supervisor]\n{labels}\n{bulkheads}"));
        config.labelled_tenants().concat()
    };
    assert_eq!(labelled(""), "abde");
    assert_eq!(labelled("tenant_labels = 3"), "abd");
    assert_eq!(labelled("tenant_labels = 2"), "bd");
    assert_eq!(labelled("tenant_labels = 1"), "d");
    assert_eq!(labelled("tenant_labels = 0"), "");
    folder.reject_one(
        &format!("[supervisor]\ntenant_labels = 1001\n{}", bulkhead("")),
        (2, 17),
        "`tenant_labels` must be from 0 to 1000, not 1001",
        "`tenant_labels = 1000`",
    );
}

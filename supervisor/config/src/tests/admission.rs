//! Tests of admission control keys: valid values, invalid values, and rules that span several keys.

use std::time::Duration;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[track_caller]
fn accept_one(lines: &str) -> BulkheadConfig {
    Folder::new().accept(&bulkhead(lines)).bulkheads.remove(0)
}

#[test]
fn admission_keys_are_merged_with_defaults() {
    let config = Folder::new().accept(FULL);
    let [last, aa, _] = config.bulkheads.as_slice() else { panic!() };
    assert_eq!(last.overflow, Overflow::EvictOldest);
    assert_eq!(last.priority, Some(PriorityConfig { critical_reserve: 0.2 }));
    assert_eq!(last.pressure, PressureConfig { warn: 0.5, reject: 0.95 });
    let rate_limit = RateLimitConfig { per_second: 166.5, burst: 200, per: RatePer::Tenant };
    assert_eq!(last.rate_limit, Some(rate_limit));
    assert_eq!(
        last.tenants,
        Some(TenantsConfig { max_in_flight: Some(2), max_queue: Some(20), isolation: None })
    );
    let breaker = BreakerConfig {
        window: ms(60_000),
        min_calls: 10,
        failure_rate: 0.25,
        slow_call: Some(ms(1_000)),
        slow_rate: 0.75,
        open_for: ms(2_000),
        probes: 3,
    };
    assert_eq!(last.breaker, Some(breaker));
    assert_eq!(last.retry, Some(RetryConfig { attempts: 3, budget: 0.5 }));
    assert_eq!(last.poison, Some(PoisonConfig { crashes: 2, within: ms(86_400_000) }));

    assert_eq!((aa.overflow, aa.pressure.warn, aa.pressure.reject), (Overflow::Reject, 0.5, 1.0));
    let breaker = aa.breaker.as_ref().unwrap();
    assert_eq!(
        (breaker.window, breaker.min_calls, breaker.probes),
        (ms(60_000), 20, 2),
        "unset keys come from [defaults]"
    );
    assert_eq!((&aa.priority, &aa.rate_limit, &aa.tenants, &aa.retry), (&None, &None, &None, &None));
    assert_eq!(aa.poison, Some(PoisonConfig { crashes: 3, within: ms(86_400_000) }));
}

#[test]
fn empty_table_enables_feature_with_defaults() {
    let config = accept_one("breaker = {}\nmax_queue = 1\npressure = {}");
    let breaker = BreakerConfig {
        window: ms(10_000),
        min_calls: 20,
        failure_rate: 0.5,
        slow_call: None,
        slow_rate: 1.0,
        open_for: ms(5_000),
        probes: 1,
    };
    assert_eq!(config.breaker, Some(breaker));
    assert_eq!(config.pressure, PressureConfig { warn: 0.8, reject: 1.0 });
    let section = accept_one("[bulkhead.a.breaker]");
    assert_eq!(section.breaker, config.breaker);
    let config = accept_one("retry = {}\npoison = {}");
    assert_eq!(config.retry, Some(RetryConfig { attempts: 2, budget: 0.2 }));
    assert_eq!(config.poison, Some(PoisonConfig { crashes: 3, within: ms(72 * 3_600_000) }));
}

#[test]
fn burst_defaults_to_rounded_up_rate() {
    for (per_second, number, burst) in [
        ("166", 166.0, 166),
        ("0.1", 0.1, 1),
        ("2.000_1", 2.0001, 3),
        ("1e9", 1e9, 1_000_000_000),
        ("0x10", 16.0, 16),
    ] {
        let config = accept_one(&format!("rate_limit = {{ per_second = {per_second} }}"));
        let expected = RateLimitConfig { per_second: number, burst, per: RatePer::Bulkhead };
        assert_eq!(config.rate_limit, Some(expected));
    }
}

#[test]
fn shares_can_be_whole_numbers() {
    let config = accept_one(
        "max_queue = 1\npressure = { warn = 1, reject = 1.0 }\npriority = { critical_reserve = -0.0 }\n\
         breaker = { failure_rate = 1 }",
    );
    assert_eq!(config.pressure, PressureConfig { warn: 1.0, reject: 1.0 });
    let reserve = config.priority.unwrap().critical_reserve;
    assert!(reserve == 0.0 && reserve.is_sign_positive());
    assert_eq!(config.breaker.unwrap().failure_rate, 1.0);
    assert_eq!(accept_one("priority.critical_reserve = 0.999").priority.unwrap().critical_reserve, 0.999);
}

#[test]
fn share_outside_its_range_is_rejected() {
    let folder = Folder::new();
    let reserve = "`priority.critical_reserve` must be from 0 to below 1, not ";
    let rate = "`breaker.failure_rate` must be above 0 and at most 1, not ";
    let cases = [
        (
            "priority",
            "critical_reserve",
            "1",
            reserve,
            "1: nothing would be left for other jobs",
            "reserve = 0.2`",
        ),
        ("priority", "critical_reserve", "1.5", reserve, "1.5: nothing would be left for other jobs", ""),
        (
            "priority",
            "critical_reserve",
            "20",
            reserve,
            "20: nothing would be left",
            "`critical_reserve = 0.2` for 20 %",
        ),
        ("priority", "critical_reserve", "100", reserve, "100: nothing", "write `critical_reserve = 0.2`"),
        ("priority", "critical_reserve", "-0.1", reserve, "-0.1", ""),
        ("priority", "critical_reserve", "nan", reserve, "nan", ""),
        ("priority", "critical_reserve", "inf", reserve, "inf", ""),
        ("breaker", "failure_rate", "0", rate, "0", "write `failure_rate = 0.5`"),
        ("breaker", "failure_rate", "0.0", rate, "0.0", ""),
        ("breaker", "failure_rate", "80", rate, "80", "write `failure_rate = 0.8` for 80 %"),
        ("breaker", "failure_rate", "1e999", rate, "1e999", ""),
        ("retry", "budget", "0", "`retry.budget` must be above 0 and at most 1, not ", "0", "budget = 0.2`"),
        ("retry", "budget", "20", "`retry.budget` must be above 0", "", "write `budget = 0.2` for 20 %"),
    ];
    for (table, key, value, range, found, help) in cases {
        let text = bulkhead(&format!("{table}.{key} = {value}"));
        folder.reject_one(&text, (3, table.len() + key.len() + 5), &format!("{range}{found}"), help);
    }
    for (line, label) in [
        ("pressure.warn = 0", "`pressure.warn` must be above 0"),
        ("pressure.reject = 1.1", "`pressure.reject` must be above 0 and at most 1"),
        ("breaker.slow_rate = 2", "`breaker.slow_rate` must be above 0"),
    ] {
        let text = bulkhead(&format!("max_queue = 1\n{line}"));
        folder.reject_one(&text, (4, line.rfind("= ").unwrap() + 3), label, "");
    }
    folder.reject_one(
        &bulkhead("breaker = { slow_rate = \"0.2\" }"),
        (3, 25),
        "`breaker.slow_rate` must be a share such as 0.2, not a string",
        "write `slow_rate = 0.2` without the quotes",
    );
    folder.reject_one(
        &bulkhead("breaker = { slow_rate = \"20%\" }"),
        (3, 25),
        "`breaker.slow_rate` must be a share such as 0.2, not a string",
        "write `slow_rate = 1.0`",
    );
}

#[test]
fn rate_outside_its_range_is_rejected() {
    let folder = Folder::new();
    let cases = [
        ("per_second = 0", "`rate_limit.per_second` must be above 0 and at most 1000000000, not 0", "= 100`"),
        ("per_second = -1.5", "not -1.5", "write `per_second = 100`"),
        ("per_second = 1000000001", "not 1000000001", "write `per_second = 1000000000`"),
        ("per_second = nan", "not nan", ""),
        ("per_second = +inf", "not +inf", ""),
        ("per_second = 99999999999999999999999999999999999999999", "not a number that large", ""),
        ("per_second = \"5\"", "must be a number, not a string", "write `per_second = 5` without the quotes"),
        ("per_second = \".5\"", "must be a number, not a string", "write `per_second = 100`"),
        ("per_second = \"5/s\"", "must be a number, not a string", "write `per_second = 100`"),
        ("per_second = true", "must be a number, not a boolean", ""),
        ("per_second = 1, burst = 0", "`rate_limit.burst` must be from 1 to 1000000000, not 0", "burst = 1`"),
        ("per_second = 1, burst = 1.5", "must be a whole number, not a decimal number", ""),
        ("per_second = 1, per = \"tennant\"", "cannot be \"tennant\"", "did you mean `\"tenant\"`?"),
        ("per_second = 1, per = \"client\"", "cannot be \"client\"", "one of `\"bulkhead\"`, `\"tenant\"`"),
    ];
    for (entries, message, help) in cases {
        let line = format!("rate_limit = {{ {entries} }}");
        folder.reject_one(&bulkhead(&line), (3, line.rfind("= ").unwrap() + 3), message, help);
    }
}

#[test]
fn admission_keys_reject_values_outside_their_range() {
    let folder = Folder::new();
    let cases = [
        (
            "breaker = { window = \"99ms\" }",
            "`breaker.window` must be from 100ms to 365d, not 99ms",
            "\"10s\"",
        ),
        ("breaker = { open_for = \"0s\" }", "`breaker.open_for` must be from 1ms", "\"5s\""),
        ("breaker = { slow_call = \"0s\" }", "`breaker.slow_call` must be from 1ms", ""),
        ("breaker = { min_calls = 0 }", "`breaker.min_calls` must be from 1 to 1000000, not 0", ""),
        ("breaker = { probes = 1001 }", "`breaker.probes` must be from 1 to 1000", "write `probes = 1000`"),
        ("tenants = { max_in_flight = 0 }", "`tenants.max_in_flight` must be from 1 to 1000000, not 0", ""),
        ("tenants = { max_queue = -1 }", "`tenants.max_queue` must be from 0 to 1000000, not -1", ""),
        ("tenants = { max_in_flight = \"two\" }", "must be a whole number", "write `max_in_flight = 2`"),
        ("overflow = \"evict_oldest\"", "`overflow` cannot be", "did you mean `\"evict-oldest\"`?"),
        (
            "retry = { attempts = 1 }",
            "`retry.attempts` must be from 2 to 100, not 1: the first attempt counts",
            "write `attempts = 2`",
        ),
        ("retry = { attempts = 101 }", "`retry.attempts` must be from 2 to 100, not 101", "= 100`"),
        ("poison = { crashes = 0 }", "`poison.crashes` must be from 1 to 1000, not 0", "crashes = 1`"),
        ("poison = { within = \"0s\" }", "`poison.within` must be from 1ms to 365d", "within = \"3d\"`"),
        ("poison = { within = 72 }", "must be a duration with a unit", "write `within = \"72s\"`"),
        ("retry = 2", "`retry` must be a table, not a number", "write `retry = { attempts = 2 }`"),
        ("breaker = true", "`breaker` must be a table, not a boolean", "[bulkhead.a.breaker]"),
    ];
    for (line, message, help) in cases {
        folder.reject_one(&bulkhead(line), (3, line.rfind("= ").unwrap() + 3), message, help);
    }
}

#[test]
fn admission_tables_require_their_main_key() {
    let folder = Folder::new();
    let cases = [
        (
            "rate_limit = { burst = 5 }",
            "`rate_limit` needs `per_second`",
            "add `per_second = 100`, or remove",
        ),
        ("priority = {}", "`priority` needs `critical_reserve`", "add `critical_reserve = 0.2`, or remove"),
        (
            "tenants = {}",
            "`tenants` sets neither `isolate` nor `max_in_flight`",
            "add `isolate = true`, `max",
        ),
        ("rate_limit.burst = 5", "`rate_limit` needs `per_second`", ""),
    ];
    for (line, message, help) in cases {
        folder.reject_one(&bulkhead(line), (3, 1), message, help);
    }
    folder.reject_one(&bulkhead("[bulkhead.a.rate_limit]\nburst = 5"), (3, 13), "needs `per_second`", "");
    let text = format!(
        "[defaults]\nrate_limit = {{ burst = 5 }}\n{}[bulkhead.b]\nexec = [\"tool\"]\n",
        bulkhead("")
    );
    folder.reject_one(&text, (2, 1), "`rate_limit` needs `per_second`", "");
}

#[test]
fn defaults_fill_in_missing_keys_in_a_table() {
    let folder = Folder::new();
    let text = "[defaults]\nrate_limit = { burst = 5 }\ntenants = {}\n[bulkhead.a]\nexec = [\"tool\"]\n\
                rate_limit = { per_second = 1 }\ntenants = { max_queue = 0 }\n";
    let config = folder.accept(text);
    let rate_limit = RateLimitConfig { per_second: 1.0, burst: 5, per: RatePer::Bulkhead };
    assert_eq!(config.bulkheads[0].rate_limit, Some(rate_limit));
    assert_eq!(
        config.bulkheads[0].tenants,
        Some(TenantsConfig { max_in_flight: None, max_queue: Some(0), isolation: None })
    );
}

#[test]
fn invalid_key_is_not_also_reported_as_missing() {
    let folder = Folder::new();
    let cases = [
        ("rate_limit = { per_second = 0 }", 29, "must be above 0"),
        ("rate_limit = { rate = 5 }", 16, "unknown key `rate`"),
        ("rate_limit = 5", 14, "must be a table"),
        ("tenants = { max_queu = 5 }", 13, "unknown key `max_queu`"),
        ("tenants = { isolat = true, max_active = 5 }", 13, "unknown key `isolat`"),
        ("tenants = { isolate = 5, max_active = 5 }", 23, "must be `true` or `false`"),
        ("retry = { attemps = 3 }", 11, "unknown key `attemps`"),
        ("breaker = { slow_cal = \"1s\", slow_rate = 0.5 }", 13, "unknown key `slow_cal`"),
        ("breaker = { slow_call = 1, slow_rate = 0.5 }", 25, "not a bare number"),
        ("max_queue = \"x\"\noverflow = \"evict-oldest\"\npressure = {}", 13, "`max_queue`"),
    ];
    for (lines, column, message) in cases {
        folder.reject_one(&bulkhead(lines), (3, column), message, "");
    }
}

#[test]
fn evict_oldest_overflow_requires_a_queue() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("overflow = \"evict-oldest\""),
        (3, 12),
        "`overflow` (\"evict-oldest\") needs a queue (`max_queue` is 0, the default)",
        "write `max_queue = 1` or more, or `overflow = \"reject\"`",
    );
    let text = format!("[defaults]\noverflow = \"evict-oldest\"\n{}", bulkhead("max_queue = 0"));
    folder.reject_one(
        &text,
        (5, 13),
        "(\"evict-oldest\", from [defaults]) needs a queue (`max_queue` is 0)",
        "",
    );
    folder.accept(&text.replace("max_queue = 0", "overflow = \"reject\""));
    folder.accept(&text.replace("max_queue = 0", "max_queue = 1"));
}

#[test]
fn bulkhead_with_pressure_requires_a_queue() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("pressure = { warn = 0.5 }"),
        (3, 1),
        "`pressure` needs a queue (`max_queue` is 0, the default)",
        "write `max_queue = 1` or more, or remove `pressure`",
    );
    let text = format!("[defaults]\nmax_queue = 0\n{}", bulkhead("pressure = {}"));
    folder.reject_one(&text, (5, 1), "(`max_queue` is 0, from [defaults])", "");
    folder.accept(&text.replace("max_queue = 0", "max_queue = 1"));
    let config = folder.accept(&format!("[defaults]\npressure = {{ warn = 0.5 }}\n{}", bulkhead("")));
    assert_eq!(config.bulkheads[0].pressure, PressureConfig { warn: 0.5, reject: 1.0 });
}

#[test]
fn pressure_warn_cannot_exceed_pressure_reject() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("max_queue = 5\npressure = { warn = 0.9, reject = 0.5 }"),
        (4, 21),
        "`pressure.warn` (0.9) exceeds `pressure.reject` (0.5)",
        "set `reject` to at least 0.9, or `warn` to at most 0.5",
    );
    let early = accept_one("max_queue = 5\npressure = { reject = 0.5 }");
    assert_eq!(early.pressure, PressureConfig { warn: 0.5, reject: 0.5 });
}

#[test]
fn slow_rate_requires_slow_call() {
    let folder = Folder::new();
    folder.reject_one(
        &bulkhead("breaker = { slow_rate = 0.5 }"),
        (3, 25),
        "`breaker.slow_rate` needs `breaker.slow_call`, which sets when a job counts as slow",
        "add `slow_call = \"1s\"`, or remove `slow_rate`",
    );
    let text =
        format!("[defaults]\nbreaker = {{ slow_rate = 0.5 }}\n{}", bulkhead("breaker.slow_call = \"2s\""));
    let breaker = folder.accept(&text).bulkheads.remove(0).breaker.unwrap();
    assert_eq!((breaker.slow_call, breaker.slow_rate), (Some(ms(2_000)), 0.5));
    assert_eq!(accept_one("breaker.slow_call = \"2s\"").breaker.unwrap().slow_rate, 1.0);
}

#[test]
fn unknown_key_does_not_hide_other_errors() {
    let folder = Folder::new();
    for line in [
        "breaker = { foo = 1, slow_rate = 0.5 }",
        "rate_limit = { foo = 1, per_second = 0 }",
        "max_queue = 1\npressure = { foo = 1, warn = 1, reject = 0.5 }",
    ] {
        assert_eq!(folder.reject(&bulkhead(line)).len(), 2, "{line}");
    }
}

#[test]
fn all_admission_problems_are_reported_together() {
    let problems = Folder::new().reject(&bulkhead(
        "overflow = \"evict-oldest\"\npriority = { critical_reserve = 1 }\npressure = { warn = 2 }\n\
         rate_limit = { burst = 0 }\ntenants = {}\nbreaker = { slow_rate = 1, probes = 0 }",
    ));
    let lines: Vec<_> = problems.iter().map(|problem| problem.at.unwrap().line).collect();
    assert_eq!(lines, [3, 4, 5, 5, 6, 6, 7, 8, 8], "{problems:#?}");
}

#[test]
fn summary_shows_enabled_and_disabled_tables() {
    let folder = Folder::new();
    let summary = folder.accept(&bulkhead("")).summary();
    for line in [
        "overflow = \"reject\"",
        "# pressure: there is no queue",
        "# priority: off",
        "# rate_limit: off",
        "# tenants: off",
        "# breaker: off",
        "# retry: off",
        "# poison: off",
        "# fallback: none",
    ] {
        assert!(summary.lines().any(|there| there == line), "{line} is not in\n{summary}");
    }
    let lines = "max_queue = 1\nrate_limit = { per_second = 0.5 }\ntenants = { max_in_flight = 3 }\nbreaker = {}\n\
                 retry = {}\npoison = {}";
    let summary = folder.accept(&bulkhead(lines)).summary();
    for line in [
        "pressure = { warn = 0.8, reject = 1.0 }",
        "rate_limit = { per_second = 0.5, burst = 1, per = \"bulkhead\" }",
        "tenants = { max_in_flight = 3 }",
        "retry = { attempts = 2, budget = 0.2 }",
        "poison = { crashes = 3, within = \"3d\" }",
        "breaker = { window = \"10s\", min_calls = 20, failure_rate = 0.5, open_for = \"5s\", probes = 1 }",
    ] {
        assert!(summary.lines().any(|there| there == line), "{line} is not in\n{summary}");
    }
}

#[test]
fn summary_keeps_pressure_set_in_defaults() {
    let folder = Folder::new();
    let text = format!(
        "[defaults]\npressure = {{ warn = 0.5, reject = 0.6 }}\n{}[bulkhead.b]\nexec = [\"tool\"]\nmax_queue = 3\n",
        bulkhead("")
    );
    let config = folder.accept(&text);
    assert_eq!(folder.again(&config), config);
}

#[test]
fn json_values_use_configuration_file_syntax() {
    let lines = "max_queue = 1\noverflow = \"evict-oldest\"\nrate_limit = { per_second = 5, per = \"tenant\" }\n\
                 breaker = { slow_call = \"1s\" }\npoison = {}";
    let json = serde_json::to_value(accept_one(lines)).unwrap();
    assert_eq!(json["overflow"], "evict-oldest");
    assert_eq!(json["pressure"], serde_json::json!({ "warn": 0.8, "reject": 1.0 }));
    assert_eq!(json["rate_limit"], serde_json::json!({ "per_second": 5.0, "burst": 5, "per": "tenant" }));
    assert_eq!(json["poison"], serde_json::json!({ "crashes": 3, "within": "3d" }));
    assert_eq!((&json["retry"], &json["fallback"]), (&serde_json::Value::Null, &serde_json::json!([])));
    assert_eq!((&json["breaker"]["slow_call"], &json["priority"]), (&"1s".into(), &serde_json::Value::Null));
}

const ADAPTIVE: &str = "adaptive = { max = 6, target = \"50ms\" }";

#[test]
fn adaptive_limit_requires_max_and_target() {
    let folder = Folder::new();
    let file = folder.accept(&bulkhead(&format!("processes = 2\nmax_in_flight = 3\n{ADAPTIVE}")));
    let adaptive = file.bulkheads[0].adaptive.clone().unwrap();
    let target = Duration::from_millis(50);
    assert_eq!(adaptive, AdaptiveConfig { min: 1, max: 6, target, mode: AdaptiveMode::Enforce });
    let missing = "adaptive = { target = \"50ms\" }";
    folder.reject_one(&bulkhead(missing), (3, 1), "`adaptive` needs `max`", "add `max = 1`");
    let missing = "adaptive = { max = 1 }";
    folder.reject_one(&bulkhead(missing), (3, 1), "`adaptive` needs `target`", "add `target = \"50ms\"`");
    let crossed = "max_in_flight = 9\nadaptive = { min = 4, max = 3, target = \"1s\" }";
    folder.reject_one(&bulkhead(crossed), (4, 20), "`adaptive.min` (4) exceeds `adaptive.max` (3)", "");
}

#[test]
fn adaptive_max_cannot_exceed_permits() {
    let folder = Folder::new();
    let message = "`adaptive.max` (6) exceeds `processes` (2) × `max_in_flight` (1, the default)";
    let text = bulkhead(&format!("processes = 2\n{ADAPTIVE}"));
    folder.reject_one(&text, (4, 20), message, "set `max` to at most 2, or raise `processes`");
    let closed = bulkhead(&format!("max_in_flight = 0\n{ADAPTIVE}"));
    folder.reject_one(&closed, (4, 20), "`max_in_flight` (0)", "write `max_in_flight = 1` or more");
    // The problem is reported at the bulkhead's own key, because the values in `[defaults]` can be valid for other
    // bulkheads.
    let text = format!("[defaults]\nprocesses = 6\n{ADAPTIVE}\n{}", bulkhead("processes = 5"));
    let message = "`adaptive.max` (6, from [defaults]) exceeds `processes` (5)";
    folder.reject_one(&text, (6, 13), message, "");
}

#[test]
fn adaptive_max_cannot_exceed_isolated_tenant_permits() {
    let folder = Folder::new();
    let isolated = format!("max_in_flight = 6\ntenants = {{ isolate = true }}\n{ADAPTIVE}\n");
    let tenant = |key: &str| bulkhead(&format!("{isolated}tenant.acme = {{ {key} }}"));
    folder.accept(&tenant("max_queue = 3"));
    folder.accept(&tenant("processes = 3, max_in_flight = 2"));
    let message = "exceeds `processes` (1, the default) × `tenant.acme.max_in_flight` (5)";
    folder.reject_one(&tenant("max_in_flight = 5"), (6, 33), message, "set `max` to at most 5");
    // A limit on the jobs of a tenant that shares workers does not change the number of permits.
    let common = format!("max_in_flight = 6\n{ADAPTIVE}\ntenant.acme = {{ max_in_flight = 5 }}");
    folder.accept(&bulkhead(&common));
}

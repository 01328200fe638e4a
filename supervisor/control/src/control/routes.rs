//! The table of what can be asked over HTTP. The router and `GET /openapi.json` are both made from it, so that
//! neither has what the other lacks.

use axum::Router;
use axum::routing::{self, MethodRouter};
use bulkhead_api::{
    Advice, Bulkheads, Change, CrashReport, Crashes, Done, Readiness, Reloaded, Replay, Snapshot,
    TenantChange,
};
use schemars::{JsonSchema, SchemaGenerator};

use super::http::{self, JSON, Shared};
use super::{advice, crashes, dashboard, jobs, metrics, openapi, reload, streams, watch};

/// One method on one path.
pub(super) struct Route {
    /// In small letters.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// Its name in the document.
    pub(super) id: &'static str,
    pub(super) about: &'static str,
    handler: fn() -> MethodRouter<Shared>,
    /// What may stand behind the `?`.
    pub(super) query: &'static [Parameter],
    /// Headers that say something here.
    pub(super) headers: &'static [Parameter],
    pub(super) body: Option<Content>,
    /// What is answered if all is well.
    pub(super) answer: Answer,
    /// Other answers than those of every route, all of them problem documents.
    pub(super) problems: &'static [u16],
}

pub(super) type Content = (&'static str, Schema);
pub(super) type Answer = (u16, &'static [Content]);

/// What a value looks like.
#[derive(Clone, Copy)]
pub(super) enum Schema {
    Text,
    Bytes,
    Count,
    Positive,
    Boolean,
    OneOf(&'static [&'static str]),
    Object,
    /// That of a document's type.
    Of(fn(&mut SchemaGenerator) -> schemars::Schema),
}

/// What a request may say beside its path and its body.
pub(super) struct Parameter(pub(super) &'static str, pub(super) Schema, pub(super) &'static str);

/// Answers that every route may have: a request that makes no sense, somebody who may not, one that did not
/// come in time, and a data plane that does not answer.
pub(super) const PROBLEMS: &[u16] = &[400, 403, 408, 503];

/// What needs no token over TCP.
pub(super) const OPEN: &[&str] = &["/healthz", "/readyz", "/metrics"];

/// What is asked again and again by those who only look on, or answered without end.
const FOR_ONLOOKERS: &[&str] = &["/", "/openapi.json", "/metrics", "/v1/events", "/v1/watch"];

/// Whether a request that begins so is from somebody who only looks on.
pub(super) fn is_for_onlookers(head: &[u8]) -> bool {
    let Some(target) = head.strip_prefix(b"GET ") else { return false };
    let Some(end) = target.iter().position(|byte| b" ?\r\n".contains(byte)) else { return false };
    let path = &target[..end];
    let is_of_bulkhead = path.starts_with(b"/v1/bulkheads/");
    FOR_ONLOOKERS.iter().any(|looks| looks.as_bytes() == path) || is_of_bulkhead && path.ends_with(b"/logs")
}

/// What is asked by those who decide whether the supervisor is well.
const FOR_HEALTH: &[&str] = &["/healthz", "/readyz"];

/// Whether this is a whole request for that: one that is not all there could hold a place for long.
pub(super) fn asks_for_health(head: &[u8]) -> bool {
    let Some(target) = head.strip_prefix(b"GET ").or(head.strip_prefix(b"HEAD ")) else { return false };
    let end = target.iter().position(|byte| b" ?\r\n".contains(byte)).unwrap_or(target.len());
    let is_whole = head.windows(4).any(|bytes| bytes == b"\r\n\r\n");
    is_whole && FOR_HEALTH.iter().any(|path| path.as_bytes() == &target[..end])
}

const LINES: &str = "application/x-ndjson";
const EVENTS: &str = "text/event-stream";

macro_rules! route {
    ($method:ident $path:literal $id:literal $handler:path, $about:literal, $answer:expr $(, $field:ident: $value:expr)*) => {
        Route {
            $($field: $value,)*
            ..Route {
                method: stringify!($method),
                path: $path,
                id: $id,
                about: $about,
                handler: || routing::$method($handler),
                query: &[],
                headers: &[],
                body: None,
                answer: $answer,
                problems: &[],
            }
        }
    };
}

const fn json<T: JsonSchema>() -> Content {
    (JSON, Schema::Of(SchemaGenerator::subschema_for::<T>))
}

const OBJECT: Content = (JSON, Schema::Object);

const TENANT: Parameter =
    Parameter("tenant", Schema::Text, "One tenant's part of it, where tenants are apart.");
const BULKHEAD: Parameter = Parameter("bulkhead", Schema::Text, "Only what concerns this one.");
const SINCE: Parameter = Parameter("since", Schema::Count, "Only what came after this one.");
const LIMIT: Parameter = Parameter("limit", Schema::Count, "At most so many, the newest.");
const FOLLOW: Parameter = Parameter("follow", Schema::Boolean, "Whether what comes is wanted too.");

pub(super) const ROUTES: &[Route] = &[
    route!(get "/healthz" "healthz" http::healthz, "Whether the data plane turns.",
        (200, &[("text/plain; charset=utf-8", Schema::Text)])),
    route!(get "/readyz" "readyz" http::readyz, "Whether jobs can be sent. 503 has the same document.",
        (200, &[json::<Readiness>()]),
        query: &[Parameter("bulkhead", Schema::Text, "Asks for one.")], problems: &[404]),
    route!(get "/openapi.json" "openapi" openapi::show, "This document.", (200, &[OBJECT])),
    route!(get "/metrics" "metrics" metrics::show, "All metrics, in the format that `Accept` prefers.",
        (200, &[("application/openmetrics-text; version=1.0.0; charset=utf-8", Schema::Text),
            ("text/plain; version=0.0.4; charset=utf-8", Schema::Text)])),
    route!(get "/v1/config" "config" openapi::config, "The configuration in force, without its secrets.",
        (200, &[OBJECT])),
    route!(get "/v1/bulkheads" "listBulkheads" http::bulkheads, "The state of every bulkhead.",
        (200, &[json::<Bulkheads>()])),
    route!(get "/v1/bulkheads/{name}" "showBulkhead" http::bulkhead, "The state of a bulkhead.",
        (200, &[json::<Snapshot>()]), query: &[TENANT], problems: &[404, 409]),
    route!(patch "/v1/bulkheads/{name}" "changeBulkhead" http::change,
        "Puts other numbers in force, at once and without dropping a job.", (200, &[json::<Snapshot>()]),
        body: Some(json::<Change>()), problems: &[404, 409, 413, 415]),
    route!(patch "/v1/bulkheads/{name}/tenants/{tenant}" "changeTenant" http::change_tenant,
        "Puts other numbers in force for one tenant.", (200, &[json::<TenantChange>()]),
        body: Some(json::<TenantChange>()), problems: &[404, 409, 413, 415]),
    route!(post "/v1/bulkheads/{name}/jobs" "submitJob" jobs::submit,
        "Runs a job: the body is the payload, the answer its result.",
        (200, &[("application/octet-stream", Schema::Bytes)]),
        headers: JOB_HEADERS, body: Some(("application/octet-stream", Schema::Bytes)),
        problems: &[404, 413, 422, 429, 499, 502, 504]),
    route!(get "/v1/bulkheads/{name}/logs" "showLogs" streams::logs, "What its workers wrote to stdout and stderr.",
        (200, &[(LINES, Schema::Text)]), query: &[FOLLOW, LIMIT], problems: &[404]),
    route!(get "/v1/bulkheads/{name}/advice" "showAdvice" advice::show,
        "What its limits should be, from what was seen, with the reasons.", (200, &[json::<Advice>()]), problems: &[404]),
    route!(post "/v1/bulkheads/{name}/restart" "restart" http::restart, "Replaces its workers, one by one.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/drain" "drain" http::drain, "It takes no more jobs.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/resume" "resume" http::resume, "It takes jobs again.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/reset" "reset" http::reset,
        "Clears its breaker, restart history and quarantine.", (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/reload" "reload" reload::over_http,
        "Reads the configuration again and puts it in force, or says what would change.", (200, &[json::<Reloaded>()]),
        query: &[Parameter("dry_run", Schema::Boolean, "Only says what would change.")], problems: &[409, 422, 500]),
    route!(get "/v1/crashes" "listCrashes" crashes::list, "The crash reports, the oldest first.",
        (200, &[json::<Crashes>()]), query: &[BULKHEAD, LIMIT], problems: &[404]),
    route!(get "/v1/crashes/{id}" "showCrash" crashes::show, "A crash report.", (200, &[json::<CrashReport>()]),
        problems: &[404, 500]),
    route!(post "/v1/crashes/{id}/replay" "replayCrash" crashes::replay, "Runs the job of a crash report again.",
        (200, &[json::<Replay>()]),
        query: &[Parameter("job", Schema::Count, "Which of its jobs.")], problems: &[404, 409, 422, 429, 500]),
    route!(get "/v1/events" "events" streams::events,
        "Events: those kept and those that come, or, with `follow=false`, those kept.",
        (200, &[(EVENTS, Schema::Text), (LINES, Schema::Text)]),
        query: &[SINCE, BULKHEAD, LIMIT, FOLLOW], problems: &[404]),
    route!(get "/v1/watch" "watch" watch::show,
        "The state of every bulkhead, at once and every second, and events, in one stream that does not end.",
        (200, &[(EVENTS, Schema::Text)]), query: &[SINCE, LIMIT]),
    route!(get "/" "dashboard" dashboard::page, "The dashboard, for browsers.",
        (200, &[("text/html; charset=utf-8", Schema::Text)])),
];

const JOB_HEADERS: &[Parameter] = &[
    Parameter("Bulkhead-Operation", Schema::Text, "What the handler is to do."),
    Parameter("Bulkhead-Deadline-Ms", Schema::Positive, "How long the job may take, in milliseconds."),
    Parameter(
        "Bulkhead-Priority",
        Schema::OneOf(&["critical", "normal", "best-effort"]),
        "How much it matters.",
    ),
    Parameter("Bulkhead-Tenant", Schema::Text, "On whose behalf."),
    Parameter("Bulkhead-Cost", Schema::Positive, "What it counts against a rate limit."),
    Parameter("Bulkhead-Idempotent", Schema::Boolean, "Whether it may run twice."),
    Parameter("traceparent", Schema::Text, "A trace context of the W3C; the worker is given it."),
];

pub(super) fn router() -> Router<Shared> {
    ROUTES.iter().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_on_is_known_by_the_first_line() {
        for line in [
            "GET /metrics HTTP/1.1\r\n",
            "GET /v1/events?since=5 HTTP/1.1",
            "GET /v1/bulkheads/a/logs?follow HTTP/1.1",
            "GET / HTTP/1.1",
        ] {
            assert!(is_for_onlookers(line.as_bytes()), "{line}");
        }
        for line in [
            "",
            "GET",
            "GET ",
            "GET /metrics",
            "GET /metric HTTP/1.1",
            "HEAD /metrics HTTP/1.1",
            "POST /v1/events HTTP/1.1",
            "GET /healthz HTTP/1.1",
            "GET /healthz?x=/metrics HTTP/1.1",
            "GET /v1/bulkheads HTTP/1.1",
            "GET /v1/bulkheads/logs-of HTTP/1.1",
            "POST /v1/bulkheads/a/jobs HTTP/1.1",
        ] {
            assert!(!is_for_onlookers(line.as_bytes()), "{line}");
        }
        // Whatever is there, and nothing else.
        let paths: Vec<_> = ROUTES.iter().map(|route| route.path).collect();
        assert!(FOR_ONLOOKERS.iter().all(|path| paths.contains(path)));
    }

    #[test]
    fn whole_requests_for_health_are_known() {
        for head in
            ["GET /healthz HTTP/1.1\r\n\r\n", "HEAD /readyz?bulkhead=b HTTP/1.1\r\nHost: x\r\n\r\nrest"]
        {
            assert!(asks_for_health(head.as_bytes()), "{head}");
        }
        for head in [
            "",
            "GET ",
            "GET /healthz HTTP/1.1\r\nHost: x\r\n",
            "POST /healthz HTTP/1.1\r\n\r\n",
            "GET /healthzs HTTP/1.1\r\n\r\n",
            "GET /v1/config?/healthz HTTP/1.1\r\n\r\n",
        ] {
            assert!(!asks_for_health(head.as_bytes()), "{head}");
        }
        let paths: Vec<_> = ROUTES.iter().map(|route| route.path).collect();
        assert!(FOR_HEALTH.iter().all(|path| paths.contains(path) && OPEN.contains(path)));
    }
}

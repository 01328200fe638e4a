//! The table of all HTTP routes, from which the routers and the OpenAPI document are built, so that they always agree.
//! Rejects a query where a route has no parameters. The handlers are in other modules, and `admin_socket`, `tcp` and
//! `jobs_http` check the sender.

use std::future::{Ready, ready};

use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use axum::{Router, routing};
use bulkhead_api::{
    Advice, Bulkheads, Change, CrashReport, Crashes, Done, JobProgress, Jobs, Readiness, Reloaded, Replay,
    Snapshot, TenantChange, Vocabulary as _,
};
use bulkhead_shared::limits::truncate;
use schemars::{JsonSchema, SchemaGenerator};

use super::Shared;
use super::openapi::{Content, Parameter, Route, SUBMIT_JOB, Schema, document};
use super::paths::HEALTH_PATHS;
use super::responses::{JSON, problem};
use super::{
    advice, bulkheads, config, crashes, dashboard, jobs, metrics, readiness, reload, streams, upgrade, watch,
};

/// Maximum number of bytes of a rejected query to quote in the error message.
const QUERY_BYTES_SHOWN: usize = 200;

const NDJSON: &str = "application/x-ndjson";
const EVENT_STREAM: &str = "text/event-stream";

macro_rules! route {
    ($method:ident $path:literal $id:literal $handler:path, $about:literal, $response:expr $(, $field:ident: $value:expr)*) => {
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
                response: $response,
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
    Parameter("tenant", Schema::Text, "Shows only this tenant. Works only if tenants are isolated.");
const BULKHEAD: Parameter = Parameter("bulkhead", Schema::Text, "Returns only the entries of this bulkhead.");
const SINCE: Parameter = Parameter("since", Schema::Count, "Returns only events after this sequence number.");
const LIMIT: Parameter =
    Parameter("limit", Schema::Count, "Maximum number of entries; the newest are returned.");
const FOLLOW: Parameter = Parameter(
    "follow",
    Schema::Boolean,
    "If true, the response stays open, and new entries are sent as they occur.",
);

const ROUTES: &[Route] = &[
    route!(get "/healthz" "healthz" readiness::healthz, "Reports whether the data plane responds.",
        (200, &[("text/plain; charset=utf-8", Schema::Text)])),
    route!(get "/readyz" "readyz" readiness::readyz, "Reports whether jobs can be sent. The response \
                                                      with status 503 contains the same document.",
        (200, &[json::<Readiness>()]),
        query: &[Parameter("bulkhead", Schema::Text, "Checks only this bulkhead.")], problems: &[404]),
    route!(get "/openapi.json" "openapi" show_document, "This document.", (200, &[OBJECT])),
    route!(get "/metrics" "metrics" metrics::show, "All metrics, in the format that `Accept` prefers.",
        (200, &[("application/openmetrics-text; version=1.0.0; charset=utf-8", Schema::Text),
            ("text/plain; version=0.0.4; charset=utf-8", Schema::Text)])),
    route!(get "/v1/config" "config" config::show, "The configuration in effect, without secrets.",
        (200, &[OBJECT])),
    route!(get "/v1/bulkheads" "listBulkheads" bulkheads::bulkheads, "The state of every bulkhead.",
        (200, &[json::<Bulkheads>()])),
    route!(get "/v1/bulkheads/{name}" "showBulkhead" bulkheads::bulkhead, "The state of a bulkhead.",
        (200, &[json::<Snapshot>()]), query: &[TENANT], problems: &[404, 409]),
    route!(patch "/v1/bulkheads/{name}" "changeBulkhead" bulkheads::change,
        "Changes a bulkhead's limits immediately, without dropping a job.", (200, &[json::<Snapshot>()]),
        body: Some(json::<Change>()), problems: &[404, 409, 413, 415]),
    route!(patch "/v1/bulkheads/{name}/tenants/{tenant}" "changeTenant" bulkheads::change_tenant,
        "Changes the limits of a tenant.", (200, &[json::<TenantChange>()]),
        body: Some(json::<TenantChange>()), problems: &[404, 409, 413, 415]),
    route!(post "/v1/bulkheads/{name}/jobs" "submitJob" jobs::submit,
        "Runs a job: the body is the payload, the response the result.",
        (200, &[("application/octet-stream", Schema::Bytes)]),
        headers: JOB_HEADERS, body: Some(("application/octet-stream", Schema::Bytes)),
        problems: &[404, 413, 422, 429, 499, 502, 504]),
    route!(get "/v1/jobs" "listJobs" bulkheads::jobs,
        "Jobs whose clients are waiting for the outcome, oldest first.", (200, &[json::<Jobs>()]),
        query: &[
            Parameter("bulkhead", Schema::Text, "Returns only jobs in this bulkhead."),
            Parameter("state", Schema::OneOf(JobProgress::WORDS), "Returns only jobs in this state."),
            Parameter("limit", Schema::Count,
                "Maximum number of jobs, 100 by default and at most 1000; the oldest are returned."),
        ], problems: &[404]),
    route!(post "/v1/bulkheads/{name}/jobs/{job}/cancel" "cancelJob" bulkheads::cancel,
        "Cancels a job in this bulkhead. The client receives the outcome `cancelled`.", (200, &[json::<Done>()]),
        problems: &[404]),
    route!(get "/v1/bulkheads/{name}/logs" "showLogs" streams::logs, "The output of the workers: stdout and stderr.",
        (200, &[(NDJSON, Schema::Text)]),
        query: &[
            Parameter("since", Schema::Count, "Returns only lines after this sequence number."), FOLLOW, LIMIT,
        ], problems: &[404]),
    route!(get "/v1/bulkheads/{name}/advice" "showAdvice" advice::show,
        "Recommended limits, based on measurements, with the reason for each limit.", (200, &[json::<Advice>()]), problems: &[404]),
    route!(post "/v1/bulkheads/{name}/restart" "restart" bulkheads::restart, "Replaces the workers, one by one.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/drain" "drain" bulkheads::drain, "Makes the bulkhead reject new jobs.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/resume" "resume" bulkheads::resume, "Makes the bulkhead accept jobs again.",
        (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/bulkheads/{name}/reset" "reset" bulkheads::reset,
        "Resets the breaker, the restart history and the quarantine.", (200, &[json::<Done>()]), problems: &[404, 409]),
    route!(post "/v1/reload" "reload" reload::over_http,
        "Rereads and applies the configuration. With `dry_run`, only reports the changes.", (200, &[json::<Reloaded>()]),
        query: &[Parameter("dry_run", Schema::Boolean, "Reports the changes without applying them.")], problems: &[409, 422, 500]),
    route!(post "/v1/upgrade" "upgrade" upgrade::over_http,
        "Replaces the supervisor's program without losing a job. The response contains a line for each step. Available \
         only over the admin socket.",
        (200, &[(NDJSON, Schema::Text)]),
        query: &[Parameter("program", Schema::Text, "Path of the new program. Default: the path by which the supervisor was started."),
            Parameter("force", Schema::Boolean, "Continues even if a bulkhead that is ready has failed in the new program."),
            Parameter("unmanaged", Schema::Boolean, "Required if no service manager follows the main process.")],
        problems: &[409, 422]),
    route!(get "/v1/crashes" "listCrashes" crashes::list, "The crash reports, oldest first.",
        (200, &[json::<Crashes>()]), query: &[BULKHEAD, LIMIT], problems: &[404]),
    route!(get "/v1/crashes/{id}" "showCrash" crashes::show, "A crash report.", (200, &[json::<CrashReport>()]),
        problems: &[404, 500]),
    route!(post "/v1/crashes/{id}/replay" "replayCrash" crashes::replay, "Runs the job of a crash report again.",
        (200, &[json::<Replay>()]),
        query: &[Parameter("job", Schema::Count, "Index of the job in the report.")], problems: &[404, 409, 422, 429, 500]),
    route!(get "/v1/events" "events" streams::events,
        "The stored events and then new events; with `follow=false`, only the stored events.",
        (200, &[(EVENT_STREAM, Schema::Text), (NDJSON, Schema::Text)]),
        query: &[SINCE, BULKHEAD, LIMIT, FOLLOW], problems: &[404]),
    route!(get "/v1/watch" "watch" watch::show,
        "An endless stream of events and of the state of every bulkhead, which is sent immediately and \
         then every second.",
        (200, &[(EVENT_STREAM, Schema::Text)]), query: &[SINCE, LIMIT]),
    route!(get "/" "dashboard" dashboard::page, "The dashboard, for browsers.",
        (200, &[("text/html; charset=utf-8", Schema::Text)])),
];

const JOB_HEADERS: &[Parameter] = &[
    Parameter("Bulkhead-Operation", Schema::Text, "Operation that the handler performs."),
    Parameter("Bulkhead-Deadline-Ms", Schema::Positive, "Deadline of the job, in milliseconds."),
    Parameter("Bulkhead-Run-Limit-Ms", Schema::Positive, "Time limit of each attempt, in milliseconds."),
    Parameter(
        "Bulkhead-Priority",
        Schema::OneOf(&["critical", "normal", "best-effort"]),
        "Priority of the job.",
    ),
    Parameter("Bulkhead-Tenant", Schema::Text, "Tenant of the job."),
    Parameter("Bulkhead-Cost", Schema::Count, "Cost of the job against a rate limit; 0 counts as 1."),
    Parameter("Bulkhead-Idempotent", Schema::Boolean, "True if the job can safely run twice."),
    Parameter(jobs::TRACEPARENT, Schema::Text, "W3C trace context, which is passed on to the worker."),
];

/// Handler for the OpenAPI document. Not an `async` function, because its future would have a type that depends on the
/// table of routes, which contains this handler.
fn show_document() -> Ready<Response> {
    ready(axum::Json(document(ROUTES)).into_response())
}

/// Builds the router of the admin API.
pub(super) fn router() -> Router<Shared> {
    router_of(|_| true)
}

/// Builds the router for `jobs_http`. Applies `protect` to the route for jobs, but not to the routes for health checks.
pub(super) fn jobs_router(
    protect: impl FnOnce(MethodRouter<Shared>) -> MethodRouter<Shared>,
) -> Router<Shared> {
    let health = router_of(|route| HEALTH_PATHS.contains(&route.path));
    let jobs = ROUTES.iter().find(|route| route.id == SUBMIT_JOB);
    match jobs {
        Some(route) => health.route(route.path, protect(handler_of(route))),
        None => health,
    }
}

fn router_of(is_wanted: impl Fn(&Route) -> bool) -> Router<Shared> {
    let routes = ROUTES.iter().filter(|route| is_wanted(route));
    routes.fold(Router::new(), |router, route| router.route(route.path, handler_of(route)))
}

fn handler_of(route: &Route) -> MethodRouter<Shared> {
    let handler = (route.handler)();
    // For a route with query parameters, the extractor rejects unknown keys.
    let handler =
        if route.query.is_empty() { handler.layer(middleware::from_fn(reject_query)) } else { handler };
    handler.layer(middleware::from_fn(reject_transfer_codings))
}

/// Rejects requests with a transfer coding other than `chunked`, because the body would be passed on in encoded form.
async fn reject_transfer_codings(request: Request, next: Next) -> Response {
    if has_unsupported_coding(request.headers()) {
        let detail = "the only supported transfer coding is `chunked`";
        return problem(StatusCode::BAD_REQUEST, detail);
    }
    next.run(request).await
}

fn has_unsupported_coding(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::TRANSFER_ENCODING).iter();
    let codings =
        values.flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
    let mut codings = codings.filter(|coding| !coding.is_empty());
    // `chunked` must not be applied twice.
    codings.next().is_some_and(|first| !first.eq_ignore_ascii_case(b"chunked")) || codings.next().is_some()
}

/// Rejects requests that have a query string. Used for routes without query parameters, which would otherwise ignore
/// the query.
async fn reject_query(request: Request, next: Next) -> Response {
    match request.uri().query().filter(|query| !query.is_empty()) {
        None => next.run(request).await,
        Some(query) => {
            let query = truncate(query, QUERY_BYTES_SHOWN);
            let detail = format!(
                "{} does not accept a query, but the request has \"{}\"",
                request.uri().path(),
                query.escape_debug()
            );
            problem(StatusCode::BAD_REQUEST, &detail)
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::super::paths::{HEALTH_PATHS, READER_PATHS, WITHOUT_TOKEN};
    use super::*;

    #[test]
    fn paths_with_special_rules_have_routes() {
        let paths: Vec<_> = ROUTES.iter().map(|route| route.path).collect();
        assert!([WITHOUT_TOKEN, HEALTH_PATHS, READER_PATHS].concat().iter().all(|path| paths.contains(path)));
    }

    #[test]
    fn only_chunked_transfer_coding_is_supported() {
        let is_supported = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::TRANSFER_ENCODING, HeaderValue::from_static(value));
            }
            !has_unsupported_coding(&headers)
        };
        for values in [&[][..], &["chunked"], &["Chunked"], &[", chunked ,"]] {
            assert!(is_supported(values), "{values:?}");
        }
        for values in [
            &["gzip"][..],
            &["gzip, chunked"],
            &["gzip", "chunked"],
            &["identity,chunked"],
            &["chunked, chunked"],
            &["xchunked"],
        ] {
            assert!(!is_supported(values), "{values:?}");
        }
    }

    #[test]
    fn openapi_document_has_no_dangling_references() {
        let document = document(ROUTES);
        let text = document.to_string();
        for (at, _) in text.match_indices("#/components/schemas/") {
            let name = text[at + "#/components/schemas/".len()..].split('"').next().unwrap_or_default();
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
        let mut ids: Vec<&str> = ROUTES.iter().map(|route| route.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), ROUTES.len());
        assert!(ids.contains(&SUBMIT_JOB));
    }
}

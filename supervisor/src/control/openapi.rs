//! What describes the supervisor to programs: `GET /openapi.json`, made from the table of routes, and
//! `GET /v1/config`, without secrets.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::http::{PROBLEM, Shared, problem};
use super::routes::{Answer, Content, OPEN, PROBLEMS, Parameter, ROUTES, Route, Schema};
use crate::config::Config;

/// What stands in the place of a secret.
const REDACTED: &str = "[redacted]";

pub(super) async fn show() -> Response {
    axum::Json(document()).into_response()
}

pub(super) async fn config(State(control): State<Shared>) -> Response {
    match redacted(&control.config()) {
        Ok(config) => axum::Json(config).into_response(),
        Err(error) => problem(axum::http::StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// The configuration without the values of workers' variables. The token itself is not part of it.
fn redacted(config: &Config) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(config)?;
    for (bulkhead, told) in
        config.bulkheads.iter().zip(value["bulkheads"].as_array_mut().into_iter().flatten())
    {
        let env: Map<String, Value> =
            bulkhead.env.iter().map(|(name, _)| (name.clone(), json!(REDACTED))).collect();
        told["env"] = Value::Object(env);
    }
    Ok(value)
}

fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Bulkhead",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The admin API of bulkhead-supervisor.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    })
}

fn operation(route: &Route) -> Value {
    let mut parameters: Vec<Value> = path_parameters(route.path);
    parameters.extend(route.query.iter().map(|parameter| described(parameter, "query")));
    parameters.extend(route.headers.iter().map(|parameter| described(parameter, "header")));
    let is_open = OPEN.contains(&route.path);
    let mut operation = json!({
        "operationId": route.id,
        "summary": route.about,
        "parameters": parameters,
        "responses": responses(route, is_open),
        // Over the Unix socket nobody needs it.
        "security": if is_open { json!([]) } else { json!([{"token": []}, {}]) },
    });
    if let Some(body) = route.body {
        operation["requestBody"] = json!({"required": true, "content": content(&[body])});
    }
    operation
}

fn path_parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let told = |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    names.map(told).collect()
}

fn described(Parameter(name, shape, about): &Parameter, place: &str) -> Value {
    json!({"name": name, "in": place, "description": about, "schema": schema(*shape)})
}

fn responses(route: &Route, is_open: bool) -> Value {
    let (status, contents): Answer = route.answer;
    let mut responses = Map::new();
    responses.insert(
        status.to_string(),
        json!({"description": "What was asked for.", "content": content(contents)}),
    );
    let unknown = (!is_open).then_some(401);
    for status in PROBLEMS.iter().chain(route.problems).copied().chain(unknown) {
        let mut contents = content(&[(PROBLEM, Schema::Named("Problem"))]);
        // Whether it is ready is told in the same words if it is not.
        if route.id == "readyz" && status == 503 {
            contents["application/json"] = json!({"schema": schema(Schema::Named("Readiness"))});
        }
        responses.insert(status.to_string(), json!({"description": meaning(status), "content": contents}));
    }
    Value::Object(responses)
}

fn content(contents: &[Content]) -> Value {
    let told = contents.iter().map(|(kind, shape)| (kind.to_string(), json!({"schema": schema(*shape)})));
    Value::Object(told.collect())
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "The request makes no sense.",
        401 => "The token is missing or wrong.",
        403 => "Whoever asks may not, or another site asks through a browser.",
        404 => "There is no such thing.",
        408 => "The request did not come whole in time.",
        409 => "Not in this state.",
        413 => "The body is too large.",
        415 => "The body is not JSON.",
        422 => "The handler failed, or there is nothing that could be done.",
        429 => "Slow down.",
        499 => "The job was cancelled.",
        502 => "The worker died with the job in its hands.",
        503 => "Not now.",
        504 => "The deadline has passed.",
        _ => "Something went wrong here.",
    }
}

fn schema(shape: Schema) -> Value {
    match shape {
        Schema::Text => json!({"type": "string"}),
        Schema::Bytes => json!({"type": "string", "format": "binary"}),
        Schema::Count => json!({"type": "integer", "minimum": 0, "maximum": 1_000_000_000}),
        Schema::Positive => json!({"type": "integer", "minimum": 1, "maximum": 1_000_000_000}),
        Schema::Boolean => json!({"type": "boolean"}),
        Schema::OneOf(words) => json!({"type": "string", "enum": words}),
        Schema::Named(name) => json!({"$ref": format!("#/components/schemas/{name}")}),
    }
}

fn schemas() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    let text = json!({"type": "string"});
    let rate = |has_per: bool| {
        let mut rate = json!({
            "type": "object", "required": ["per_second"], "additionalProperties": false,
            "properties": {"per_second": {"type": "number", "exclusiveMinimum": 0}, "burst": {"type": "integer", "minimum": 1}},
        });
        if has_per {
            rate["properties"]["per"] = json!({"type": "string", "enum": ["bulkhead", "tenant"]});
        }
        rate
    };
    let setting = json!({"type": ["integer", "string", "null"]});
    json!({
        "Object": {"type": "object"},
        "Done": {
            "type": "object", "required": ["bulkhead", "done"],
            "properties": {"bulkhead": text, "done": text},
        },
        "Readiness": {
            "type": "object", "required": ["status", "degraded"],
            "properties": {"status": text, "degraded": {"type": "array", "items": {"type": "object"}}},
        },
        "Changes": {
            "type": "object", "required": ["dry_run", "bulkheads", "supervisor", "access", "ignored"],
            "properties": {
                "dry_run": {"type": "boolean"},
                "bulkheads": {"type": "array", "items": {
                    "type": "object", "required": ["bulkhead", "change", "keys", "replaces_workers"],
                    "properties": {
                        "bulkhead": text,
                        "change": {"type": "string", "enum": ["added", "removed", "changed", "rebuilt"]},
                        "keys": {"type": "array", "items": text},
                        "replaces_workers": {"type": "boolean"},
                    },
                }},
                "supervisor": {"type": "array", "items": text},
                "access": {"type": "boolean"},
                "ignored": {"type": "array", "items": text},
            },
        },
        "Crashes": {
            "type": "object", "required": ["crashes"],
            "properties": {"crashes": {"type": "array", "items": {"type": "object"}}},
        },
        "Bulkheads": {
            "type": "object", "required": ["bulkheads"],
            "properties": {"bulkheads": {"type": "array", "items": schema(Schema::Named("Bulkhead"))}},
        },
        "Bulkhead": {
            "type": "object",
            "required": ["name", "state", "service", "limit", "in_flight", "queued", "rejected", "breaker", "workers"],
            "properties": {
                "name": text,
                "state": {"type": "string", "enum": ["starting", "ready", "degraded", "failed", "draining"]},
                "service": {"type": "string", "enum": ["ok", "degraded", "failing"]}, "service_cause": text,
                "limit": count, "in_flight": count, "available": count, "queued": count,
                "queue_capacity": count, "queue_available": count, "done": count, "failed": count,
                "crashed": count, "deadline_exceeded": count, "cancelled": count, "restarts": count,
                "rejected": {"type": "object", "additionalProperties": count},
                "breaker": {"type": "string", "enum": ["closed", "open", "half_open", "forced_open"]},
                "workers": {"type": "array", "items": {"type": "object"}},
            },
        },
        "Advice": {
            "type": "object",
            "required": ["bulkhead", "watched_ms", "jobs", "enough", "seen", "advice", "kept"],
            "properties": {
                "bulkhead": text, "watched_ms": count, "jobs": count, "enough": {"type": "boolean"}, "missing": text,
                "seen": seen_schema(),
                "advice": {"type": "array", "items": {
                    "type": "object", "required": ["key", "proposed", "reason"],
                    "properties": {"key": text, "now": setting, "proposed": setting, "reason": text},
                }},
                "kept": {"type": "array", "items": {
                    "type": "object", "required": ["key", "reason"],
                    "properties": {"key": text, "now": setting, "reason": text},
                }},
            },
        },
        "Change": {
            "type": "object", "additionalProperties": false,
            "properties": {
                "max_in_flight": count, "processes": {"type": "integer", "minimum": 1}, "max_queue": count,
                "rate_limit": {"anyOf": [rate(true), {"type": "null"}]},
                "breaker": {"type": "string", "enum": ["forced_open", "auto"]},
            },
        },
        "TenantChange": {
            "type": "object", "additionalProperties": false,
            "properties": {
                "max_in_flight": {"type": "integer", "minimum": 1}, "processes": {"type": "integer", "minimum": 1},
                "max_queue": count, "rate_limit": rate(false),
            },
        },
        "Problem": {
            "type": "object", "required": ["type", "title", "status", "detail"],
            "description": "RFC 9457. That of a job has the fields of its outcome.",
            "properties": {
                "type": text, "title": text, "status": {"type": "integer"}, "detail": text,
                "outcome": {"type": "string", "enum": ["failed", "rejected", "deadline_exceeded", "crashed", "cancelled"]},
                "reason": {"type": ["string", "null"]}, "job": {"type": ["string", "null"]}, "bulkhead": text, "attempts": count,
                "queued_ms": {"type": "number"}, "ran_ms": {"type": "number"}, "deadline_ms": {"type": "number"},
                "worker_pid": count, "executed": {"type": "string", "enum": ["no", "yes", "unknown"]},
                "retryable": {"type": "boolean"}, "retry_after_ms": {"type": "number"}, "code": text,
                "fault": {"type": "string", "enum": ["caller", "dependency"]}, "exit_code": {"type": "integer"},
                "signal": text, "trace_id": text,
            },
        },
    })
}

fn seen_schema() -> Value {
    let (count, number) = (json!({"type": "integer", "minimum": 0}), json!({"type": "number", "minimum": 0}));
    let marks = |of: &Value| json!({"type": "object", "required": ["p50", "p99", "max"], "properties": {"p50": of, "p99": of, "max": of}});
    let share = json!({"type": "number", "minimum": 0, "maximum": 1});
    json!({
        "type": "object",
        "required": ["concurrency", "demand", "queued", "limit", "time_at_limit", "rejected", "queue_ms", "run_ms"],
        "properties": {
            "busy_ms": count, "concurrency": marks(&count), "demand": marks(&count), "queued": marks(&count),
            "limit": count, "time_at_limit": share, "time_short_of_workers": share, "ran": count,
            "queue_ms": marks(&number), "run_ms": marks(&number), "run_mean_ms": number,
            "rejected": {"type": "object", "additionalProperties": count},
            "deadline_exceeded": {"type": "object", "properties": {"queued": count, "running": count}},
            "processors_per_job": {"type": ["number", "null"]}, "rss_max_bytes": {"type": ["integer", "null"]},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_refers_to_nothing_that_it_lacks() {
        let document = document();
        let text = document.to_string();
        for (at, _) in text.match_indices("#/components/schemas/") {
            let name = text[at + "#/components/schemas/".len()..].split('"').next().unwrap_or_default();
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
        let mut ids: Vec<&str> = ROUTES.iter().map(|route| route.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), ROUTES.len());
    }

    #[test]
    fn a_configuration_is_told_without_the_values_of_variables() {
        let text = "[supervisor]\nsocket = \"/run/x/jobs.sock\"\n[bulkhead.b]\nexec = [\"cat\"]\n\
                    env = { KEY = \"sesame\" }\n";
        let config = crate::config::parse(text, "/etc/workers.toml".as_ref()).unwrap();
        let told = redacted(&config).unwrap();
        assert!(!told.to_string().contains("sesame"));
        assert_eq!(told["bulkheads"][0]["env"]["KEY"], REDACTED);
        assert_eq!(told["supervisor"]["socket"], "/run/x/jobs.sock");
    }
}

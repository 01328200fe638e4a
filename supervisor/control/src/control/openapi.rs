//! Defines the types that describe a route, and generates the OpenAPI document of all routes (`GET /openapi.json`).
//! `routes` contains the table of routes, and builds the router from the same table. This module does not handle
//! requests.

use axum::http::StatusCode;
use axum::routing::MethodRouter;
use bulkhead_api::{Problem, Readiness};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Map, Value, json};

use super::Shared;
use super::paths::WITHOUT_TOKEN;
use super::responses::{PROBLEM, retry_headers};
use super::{jobs, outcomes};

/// Operation ID of the route for submitting jobs.
pub(super) const SUBMIT_JOB: &str = "submitJob";

/// A route and its description for the OpenAPI document.
pub(super) struct Route {
    /// HTTP method in lower case.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// Operation ID of the route in the OpenAPI document.
    pub(super) id: &'static str,
    pub(super) about: &'static str,
    pub(super) handler: fn() -> MethodRouter<Shared>,
    pub(super) query: &'static [Parameter],
    /// Request headers that the handler of this route reads.
    pub(super) headers: &'static [Parameter],
    pub(super) body: Option<Content>,
    /// Status code of a successful response, and the types of content that its body can have.
    pub(super) response: Success,
    /// Status codes with which this route can return a problem document, in addition to those in `PROBLEMS`.
    pub(super) problems: &'static [u16],
}

pub(super) type Content = (&'static str, Schema);
pub(super) type Success = (u16, &'static [Content]);

/// Schema of a parameter or of a body.
#[derive(Clone, Copy)]
pub(super) enum Schema {
    Text,
    Bytes,
    Count,
    Positive,
    Boolean,
    OneOf(&'static [&'static str]),
    Object,
    /// Schema of a JSON document, generated from the corresponding Rust type.
    Of(fn(&mut SchemaGenerator) -> schemars::Schema),
}

/// Name, schema and description of a query parameter or header.
pub(super) struct Parameter(pub(super) &'static str, pub(super) Schema, pub(super) &'static str);

/// Status codes with which every route can return a problem document: for an invalid request, a forbidden request, a
/// timeout, and an unresponsive data plane.
const PROBLEMS: &[u16] = &[400, 403, 408, 503];

/// Builds the OpenAPI document that describes `routes`.
pub(super) fn document(routes: &[Route]) -> Value {
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for route in routes {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = schemas.operation(route);
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
            "schemas": schemas.all(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    })
}

/// Schema generators for JSON documents. Responses need serialization schemas, and requests need deserialization
/// schemas.
struct Schemas {
    responses: SchemaGenerator,
    requests: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        let mut settings = SchemaSettings::draft2020_12();
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
        // Default values are removed, because they apply only when a document is deserialized.
        settings.transforms.push(Box::new(RecursiveTransform(|schema: &mut schemars::Schema| {
            schema.remove("default");
        })));
        let requests = settings.clone().for_deserialize().into_generator();
        Self { responses: settings.for_serialize().into_generator(), requests }
    }
}

impl Schemas {
    /// Returns the schemas of all documents that routes refer to.
    fn all(mut self) -> Map<String, Value> {
        let mut all = self.responses.take_definitions(true);
        // If a type is used in both requests and responses, its request schema is kept, because that schema requires
        // fewer fields.
        all.extend(self.requests.take_definitions(true));
        all
    }

    fn operation(&mut self, route: &Route) -> Value {
        let mut parameters: Vec<Value> = path_parameters(route.path);
        parameters.extend(route.query.iter().map(|parameter| parameter_object(parameter, "query")));
        parameters.extend(route.headers.iter().map(|parameter| parameter_object(parameter, "header")));
        let is_open = WITHOUT_TOKEN.contains(&route.path);
        let mut operation = json!({
            "operationId": route.id,
            "summary": route.about,
            "parameters": parameters,
            "responses": self.responses(route, is_open),
            // The empty requirement applies to the Unix socket, which requires no token.
            "security": if is_open { json!([]) } else { json!([{"token": []}, {}]) },
        });
        if let Some(body) = route.body {
            operation["requestBody"] =
                json!({"required": true, "content": content(&[body], &mut self.requests)});
        }
        operation
    }

    fn responses(&mut self, route: &Route, is_open: bool) -> Value {
        let (status, contents): Success = route.response;
        let mut responses = Map::new();
        responses.insert(
            status.to_string(),
            json!({
                "description": "The requested data.",
                "headers": headers(route, status),
                "content": content(contents, &mut self.responses),
            }),
        );
        let unknown = (!is_open).then_some(401);
        for status in PROBLEMS.iter().chain(route.problems).copied().chain(unknown) {
            let mut contents = content(
                &[(PROBLEM, Schema::Of(SchemaGenerator::subschema_for::<Problem>))],
                &mut self.responses,
            );
            // The response of `/readyz` with status 503 contains the same document as a successful response.
            if route.id == "readyz" && status == 503 {
                contents["application/json"] = json!({"schema": self.responses.subschema_for::<Readiness>()});
            }
            responses.insert(
                status.to_string(),
                json!({
                    "description": status_description(status),
                    "headers": headers(route, status),
                    "content": contents,
                }),
            );
        }
        Value::Object(responses)
    }
}

/// Returns descriptions of the headers that a response of the route can have.
fn headers(route: &Route, status: u16) -> Value {
    let is_job = route.id == SUBMIT_JOB;
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let header = |about: &str, kind: &str| json!({"description": about, "schema": {"type": kind}});
    let mut headers: Map<String, Value> = retry_headers(is_job, status)
        .map(|(name, _)| {
            (name.to_owned(), header("Number of seconds to wait before the next request.", "integer"))
        })
        .collect();
    for (name, field, kind) in outcomes::HEADERS {
        if is_job || headers.contains_key(*name) {
            headers.insert((*name).to_owned(), header(&format!("The `{field}` field of the outcome."), kind));
        }
    }
    if is_job {
        headers.insert(jobs::TRACEPARENT.to_owned(), header("W3C trace context of the job.", "string"));
    }
    Value::Object(headers)
}

fn path_parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let entries = |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    names.map(entries).collect()
}

fn parameter_object(Parameter(name, schema, about): &Parameter, location: &str) -> Value {
    json!({"name": name, "in": location, "description": about, "schema": schema.plain()})
}

fn content(contents: &[Content], generator: &mut SchemaGenerator) -> Value {
    let entries = contents.iter().map(|(kind, schema)| {
        let schema = match schema {
            Schema::Of(of_type) => json!(of_type(generator)),
            plain => plain.plain(),
        };
        (kind.to_string(), json!({"schema": schema}))
    });
    Value::Object(entries.collect())
}

fn status_description(status: u16) -> &'static str {
    match status {
        400 => "The request is invalid.",
        401 => "The token is missing or wrong.",
        403 => "The client does not have permission, or the request came from a page on another site.",
        404 => "The requested object does not exist.",
        408 => "The complete request was not received in time.",
        409 => "The current state does not permit the request.",
        413 => "The body is too large.",
        415 => "The body is not JSON.",
        422 => "The handler failed, or the request could not be executed.",
        429 => "Too many requests.",
        499 => "The job was cancelled.",
        502 => "The job's worker died.",
        503 => "Temporarily unavailable.",
        504 => "The deadline has passed.",
        _ => "Unexpected error.",
    }
}

impl Schema {
    /// Returns a self-contained schema. JSON documents are described only as objects, without their fields.
    fn plain(self) -> Value {
        match self {
            Self::Text => json!({"type": "string"}),
            Self::Bytes => json!({"type": "string", "format": "binary"}),
            Self::Count => json!({"type": "integer", "minimum": 0, "maximum": 1_000_000_000}),
            Self::Positive => json!({"type": "integer", "minimum": 1, "maximum": 1_000_000_000}),
            Self::Boolean => json!({"type": "boolean"}),
            Self::OneOf(words) => json!({"type": "string", "enum": words}),
            Self::Object | Self::Of(_) => json!({"type": "object"}),
        }
    }
}

//! `GET /openapi.json`: how a route is described, and the document that describes them all to programs.

use axum::routing::MethodRouter;
use bulkhead_api::{Problem, Readiness};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Map, Value, json};

use super::Shared;
use super::answers::PROBLEM;
use super::paths::OPEN;

/// One method on one path.
pub(super) struct Route {
    /// In small letters.
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    /// Its name in the document.
    pub(super) id: &'static str,
    pub(super) about: &'static str,
    pub(super) handler: fn() -> MethodRouter<Shared>,
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

/// Answers that every route may have: a request that makes no sense, a client that may not, one that did not
/// come in time, and a data plane that does not answer.
const PROBLEMS: &[u16] = &[400, 403, 408, 503];

/// The document of these routes.
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

/// Schemas of documents, from their types: of what is answered as it is written, of what is asked as it is read.
struct Schemas {
    answered: SchemaGenerator,
    asked: SchemaGenerator,
}

impl Default for Schemas {
    fn default() -> Self {
        let mut settings = SchemaSettings::draft2020_12();
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
        // What a reader assumes is none of the document's business.
        settings.transforms.push(Box::new(RecursiveTransform(|schema: &mut schemars::Schema| {
            schema.remove("default");
        })));
        let asked = settings.clone().for_deserialize().into_generator();
        Self { answered: settings.for_serialize().into_generator(), asked }
    }
}

impl Schemas {
    /// All that were referred to.
    fn all(mut self) -> Map<String, Value> {
        let mut all = self.answered.take_definitions(true);
        // What is both may lack what a request need not have.
        all.extend(self.asked.take_definitions(true));
        all
    }

    fn operation(&mut self, route: &Route) -> Value {
        let mut parameters: Vec<Value> = path_parameters(route.path);
        parameters.extend(route.query.iter().map(|parameter| described(parameter, "query")));
        parameters.extend(route.headers.iter().map(|parameter| described(parameter, "header")));
        let is_open = OPEN.contains(&route.path);
        let mut operation = json!({
            "operationId": route.id,
            "summary": route.about,
            "parameters": parameters,
            "responses": self.responses(route, is_open),
            // Over the Unix socket it is not needed.
            "security": if is_open { json!([]) } else { json!([{"token": []}, {}]) },
        });
        if let Some(body) = route.body {
            operation["requestBody"] =
                json!({"required": true, "content": content(&[body], &mut self.asked)});
        }
        operation
    }

    fn responses(&mut self, route: &Route, is_open: bool) -> Value {
        let (status, contents): Answer = route.answer;
        let mut responses = Map::new();
        responses.insert(
            status.to_string(),
            json!({"description": "What was asked for.", "content": content(contents, &mut self.answered)}),
        );
        let unknown = (!is_open).then_some(401);
        for status in PROBLEMS.iter().chain(route.problems).copied().chain(unknown) {
            let mut contents = content(
                &[(PROBLEM, Schema::Of(SchemaGenerator::subschema_for::<Problem>))],
                &mut self.answered,
            );
            // Whether it is ready is told in the same words if it is not.
            if route.id == "readyz" && status == 503 {
                contents["application/json"] = json!({"schema": self.answered.subschema_for::<Readiness>()});
            }
            responses
                .insert(status.to_string(), json!({"description": meaning(status), "content": contents}));
        }
        Value::Object(responses)
    }
}

fn path_parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let told = |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}});
    names.map(told).collect()
}

fn described(Parameter(name, shape, about): &Parameter, place: &str) -> Value {
    json!({"name": name, "in": place, "description": about, "schema": shape.plain()})
}

fn content(contents: &[Content], generator: &mut SchemaGenerator) -> Value {
    let told = contents.iter().map(|(kind, shape)| {
        let schema = match shape {
            Schema::Of(of_type) => json!(of_type(generator)),
            plain => plain.plain(),
        };
        (kind.to_string(), json!({"schema": schema}))
    });
    Value::Object(told.collect())
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "The request makes no sense.",
        401 => "The token is missing or wrong.",
        403 => "The client may not, or another site asks through a browser.",
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

impl Schema {
    /// Of what is no document.
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

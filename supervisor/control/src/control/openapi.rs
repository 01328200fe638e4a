//! What describes the supervisor to programs: `GET /openapi.json`, made from the table of routes, and
//! `GET /v1/config`, without secrets.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bulkhead_api::{Problem, Readiness};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Map, Value, json};

use super::http::{PROBLEM, Shared, problem};
use super::routes::{Answer, Content, OPEN, PROBLEMS, Parameter, ROUTES, Route, Schema};
use bulkhead_config::Config;

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
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for route in ROUTES {
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
            // Over the Unix socket nobody needs it.
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
        let config = bulkhead_config::parse(text, "/etc/workers.toml".as_ref()).unwrap();
        let told = redacted(&config).unwrap();
        assert!(!told.to_string().contains("sesame"));
        assert_eq!(told["bulkheads"][0]["env"]["KEY"], REDACTED);
        assert_eq!(told["supervisor"]["socket"], "/run/x/jobs.sock");
    }
}

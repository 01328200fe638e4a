//! Handles `GET /v1/config`, which shows the active configuration. The values of environment variables are redacted,
//! and secret files are shown only as paths. `reload` changes the active configuration.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bulkhead_config::Config;
use serde_json::{Map, Value, json};

use super::Shared;
use super::responses::problem;

/// Text that replaces a secret.
const REDACTED: &str = "[redacted]";

pub(super) async fn show(State(control): State<Shared>) -> Response {
    match redacted(&control.config()) {
        Ok(config) => axum::Json(config).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// Returns the configuration as JSON, with the resource limits that the sandbox sets. The values of the workers'
/// environment variables are redacted. For values that come from files, only the paths are shown. The token of the
/// admin API is not part of the configuration.
fn redacted(config: &Config) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(config)?;
    for (bulkhead, entry) in
        config.bulkheads.iter().zip(value["bulkheads"].as_array_mut().into_iter().flatten())
    {
        let env: Map<String, Value> =
            bulkhead.env.iter().map(|(name, _)| (name.clone(), json!(REDACTED))).collect();
        entry["env"] = Value::Object(env);
        let files: Map<String, Value> =
            bulkhead.env_files.iter().map(|(name, path)| (name.clone(), json!(path))).collect();
        entry["env_files"] = Value::Object(files);
        entry["sandbox_rlimits"] = serde_json::to_value(bulkhead.sandbox_rlimits())?;
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_document_redacts_environment_values() {
        let text = "[supervisor]\nsocket = \"/run/x/jobs.sock\"\n[bulkhead.b]\nexec = [\"cat\"]\n\
                    env = { KEY = \"sesame\" }\n";
        let config = bulkhead_config::parse(text, "/etc/workers.toml".as_ref()).unwrap();
        let shown = redacted(&config).unwrap();
        assert!(!shown.to_string().contains("sesame"));
        assert_eq!(shown["bulkheads"][0]["env"]["KEY"], REDACTED);
        assert_eq!(shown["supervisor"]["socket"], "/run/x/jobs.sock");
        let of_sandbox = json!([
            { "resource": "fsize", "limit": 4_u64 << 30 },
            { "resource": "nproc", "limit": 1024 },
        ]);
        assert_eq!(shown["bulkheads"][0]["sandbox_rlimits"], of_sandbox);
    }
}

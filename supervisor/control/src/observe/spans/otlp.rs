//! Encodes job spans and sends them to a collector, with the necessary subset of OpenTelemetry's OTLP/HTTP with JSON.
//! The standard environment variables for OpenTelemetry exporters configure the collector. `export` queues the spans
//! and decides about batches and retries.

use std::fmt;
use std::pin::pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::http::{Request, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::millis;
use bulkhead_plane::span::JobSpan;

/// Environment variable with the complete URL of the collector.
const TRACES_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";

/// Environment variable with the base URL of the collector. The path for spans is appended to it.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Environment variable with the service name that is sent with the spans.
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";

const SERVICE_NAME_DEFAULT: &str = "bulkhead";

/// Maximum time for sending a message, from resolving the address of the collector to receiving the response.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Number that represents `SPAN_KIND_SERVER` in OTLP messages.
const KIND_SERVER: u32 = 2;

/// Number that represents `STATUS_CODE_ERROR` in OTLP messages.
const STATUS_ERROR: u32 = 2;

/// Flags of every span. They state that the span is sampled, and that its parent span comes from another process.
const FLAGS: u32 = 0x01 | 0x100 | 0x200;

/// Address of the collector, and the service name that is sent with the spans.
#[derive(Debug)]
pub(super) struct Collector {
    endpoint: Uri,
    host: String,
    port: u16,
    service: String,
}

/// Error for a message that could not be sent or was not accepted by the collector.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub(super) struct SendError {
    why: String,
    /// True if sending the message again might succeed.
    pub(super) is_retryable: bool,
}

impl SendError {
    fn retryable(why: impl fmt::Display) -> Self {
        Self { why: why.to_string(), is_retryable: true }
    }

    /// Creates the error for a message whose sending task was interrupted.
    pub(super) fn ended() -> Self {
        Self::retryable("the request was interrupted")
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.endpoint.path())
    }
}

impl Collector {
    /// Returns the collector configured by environment variables, or `None` if no collector is configured.
    /// The error is a message for the log.
    pub(super) fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, String> {
        let read = |name| variable(name).filter(|value| !value.is_empty());
        let (name, address) = match (read(TRACES_ENDPOINT), read(ENDPOINT)) {
            (Some(whole), _) => (TRACES_ENDPOINT, whole),
            (None, Some(base)) => (ENDPOINT, format!("{}/v1/traces", base.trim_end_matches('/'))),
            (None, None) => return Ok(None),
        };
        let endpoint: Uri =
            address.parse().map_err(|error| format!("{name} is not a valid address: {error}"))?;
        if endpoint.scheme_str() != Some("http") {
            return Err(format!(
                "{name} must start with http://, because encryption is not supported: use a collector on this \
                 machine, which can forward the spans"
            ));
        }
        let authority = endpoint.authority().ok_or_else(|| format!("the address in {name} has no host"))?;
        Ok(Some(Self {
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(80),
            service: read(SERVICE_NAME).unwrap_or_else(|| SERVICE_NAME_DEFAULT.to_owned()),
            endpoint,
        }))
    }

    /// Encodes a message that contains the given spans.
    pub(super) fn render(&self, spans: &[Box<JobSpan>]) -> Vec<u8> {
        let resource = attributes([("service.name", json!(self.service))]);
        let spans: Vec<Value> = spans.iter().map(|span| render(span)).collect();
        let scope = json!({"name": "bulkhead", "version": env!("CARGO_PKG_VERSION")});
        json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": scope, "spans": spans}],
        }]})
        .to_string()
        .into_bytes()
    }

    pub(super) async fn send(&self, message: Bytes) -> Result<(), SendError> {
        let status = tokio::time::timeout(SEND_TIMEOUT, self.post(message))
            .await
            .map_err(|_| {
                SendError::retryable(format!(
                    "the collector did not respond within {} s",
                    SEND_TIMEOUT.as_secs()
                ))
            })?
            .map_err(SendError::retryable)?;
        match status {
            status if status.is_success() => Ok(()),
            // OTLP defines these status codes as retryable.
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => Err(SendError::retryable(format!("status {status}"))),
            status => Err(SendError { why: format!("status {status}"), is_retryable: false }),
        }
    }

    /// Sends a message on a new connection. Connections are not reused, because there are few messages and each is
    /// large.
    async fn post(&self, message: Bytes) -> Result<StatusCode, Box<dyn std::error::Error + Send + Sync>> {
        // Brackets around an IPv6 address are part of the URL, but not of the host name.
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let socket = TcpStream::connect((host, self.port)).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
        let request = Request::post(self.endpoint.path_and_query().map_or("/", |path| path.as_str()))
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONNECTION, "close")
            .body(Body::from(message))?;
        let (mut connection, mut response) = (pin!(connection), pin!(sender.send_request(request)));
        let response = tokio::select! {
            response = &mut response => response,
            // The response may have arrived just before the connection closed.
            _ = &mut connection => response.await,
        };
        Ok(response?.status())
    }
}

/// Returns the name of a span. All spans of a bulkhead have the same name.
pub(super) fn name(span: &JobSpan) -> String {
    format!("job {}", span.bulkhead)
}

fn render(span: &JobSpan) -> Value {
    let outcome = &span.outcome;
    let status = match outcome.is_error {
        true => {
            json!({"code": STATUS_ERROR, "message": outcome.message.as_deref().unwrap_or(outcome.outcome)})
        }
        false => json!({}),
    };
    let values = [
        ("bulkhead.name", json!(&*span.bulkhead)),
        ("bulkhead.operation", json!(&*span.operation)),
        ("bulkhead.tenant", json!(&*span.tenant)),
        ("bulkhead.priority", json!(span.priority.name())),
        ("bulkhead.outcome", json!(outcome.outcome)),
        ("bulkhead.reason", json!(outcome.reason.as_deref())),
        ("bulkhead.executed", json!(outcome.executed.name())),
        ("bulkhead.job", json!(outcome.job.map(|job| job.to_string()))),
        ("bulkhead.served_by", json!(&*outcome.served_by)),
        ("bulkhead.attempts", json!(outcome.attempts)),
        ("bulkhead.queued_ms", json!(millis(outcome.queued))),
        ("bulkhead.ran_ms", json!(millis(outcome.ran))),
        ("bulkhead.worker_pid", json!(outcome.worker_pid)),
        ("bulkhead.payload_bytes", json!(span.payload_bytes)),
    ];
    json!({
        "traceId": span.own.trace_id(),
        "spanId": span.own.span_id(),
        "parentSpanId": span.parent.span_id(),
        "flags": FLAGS,
        "name": name(span),
        "kind": KIND_SERVER,
        "startTimeUnixNano": nanos(span.began),
        "endTimeUnixNano": nanos(span.began + span.took),
        "attributes": attributes(values),
        "status": status,
    })
}

/// Encodes attributes with their types. Null values are omitted.
fn attributes<const N: usize>(values: [(&str, Value); N]) -> Vec<Value> {
    let one = |(key, value): (&str, Value)| {
        let value = match value {
            Value::Null => return None,
            Value::String(text) => json!({"stringValue": text}),
            // In JSON, OTLP encodes 64-bit integers as strings, because some parsers only support smaller integers.
            Value::Number(number) if !number.is_f64() => json!({"intValue": number.to_string()}),
            number => json!({"doubleValue": number}),
        };
        Some(json!({"key": key, "value": value}))
    };
    values.into_iter().filter_map(one).collect()
}

/// Formats a time as the number of nanoseconds since 1970.
fn nanos(at: SystemTime) -> String {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(given: &[(&str, &str)]) -> Result<Option<String>, String> {
        let given: Vec<(String, String)> = given.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let variable = |name: &str| Some(given.iter().find(|(key, _)| key == name)?.1.clone());
        Ok(Collector::find(variable)?.map(|collector| format!("{collector} {}", collector.service)))
    }

    #[test]
    fn environment_variables_select_span_collector() {
        assert_eq!(find(&[]), Ok(None));
        assert_eq!(find(&[(ENDPOINT, ""), (SERVICE_NAME, "x")]), Ok(None));
        let found = |given: &[(&str, &str)]| find(given).unwrap().unwrap();
        let base = (ENDPOINT, "http://127.0.0.1:4318");
        assert_eq!(found(&[base]), "http://127.0.0.1:4318/v1/traces bulkhead");
        assert_eq!(found(&[(ENDPOINT, "http://otel/a/")]), "http://otel:80/a/v1/traces bulkhead");
        let whole = (TRACES_ENDPOINT, "http://[::1]:1/x?y=z");
        assert_eq!(found(&[base, whole, (SERVICE_NAME, "images")]), "http://[::1]:1/x images");
        for wrong in ["https://otel:4318", "otel:4318", "http://", "localhost", "grpc://otel", "http://a b"] {
            assert!(find(&[(ENDPOINT, wrong)]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn span_attributes_have_typed_values() {
        let all = [("a", json!("x")), ("b", json!(7)), ("c", json!(0.5)), ("d", Value::Null)];
        let reported = json!([
            {"key": "a", "value": {"stringValue": "x"}},
            {"key": "b", "value": {"intValue": "7"}},
            {"key": "c", "value": {"doubleValue": 0.5}},
        ]);
        assert_eq!(json!(attributes(all)), reported);
    }
}

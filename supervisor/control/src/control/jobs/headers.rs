//! Parses the headers of a job request over HTTP into the options of the job. `jobs` calls this module, and rejects a
//! job with invalid headers. The data plane applies the bulkhead's limits to the options. `tokens` reads the header
//! with the token.

use std::time::Duration;

use axum::http::HeaderMap;
use bulkhead_shared::JobOptions;
use bulkhead_shared::job::header_number;
use bulkhead_shared::limits::{OPERATION_BYTES_MAX, TENANT_BYTES_MAX, truncate};
use bulkhead_shared::trace::Traceparent;

use super::TRACEPARENT;

/// Job options, parsed from the request headers.
pub(super) struct JobHeaders<'h> {
    pub(super) options: JobOptions<&'h str>,
    pub(super) traceparent: Option<Traceparent>,
}

impl<'h> JobHeaders<'h> {
    /// Parses the headers of a job request. The error is a message for the client.
    pub(super) fn parse(headers: &'h HeaderMap) -> Result<Self, String> {
        let options = JobOptions { cost: 1, ..JobOptions::default() };
        let mut job = Self { options, traceparent: None };
        for name in headers.keys().filter(|name| name.as_str().starts_with("bulkhead-")) {
            let mut values = headers.get_all(name).iter();
            let (Some(value), None) = (values.next(), values.next()) else {
                return Err(format!("the {name} header occurs more than once"));
            };
            let value = std::str::from_utf8(value.as_bytes())
                .map_err(|_| format!("the value of the {name} header is not UTF-8"))?;
            job.set(name.as_str(), value).map_err(|why| format!("the {name} header is invalid: {why}"))?;
        }
        // As W3C Trace Context requires, a `traceparent` that is invalid or occurs more than once is ignored.
        let mut given = headers.get_all(TRACEPARENT).iter();
        if let (Some(value), None) = (given.next(), given.next()) {
            job.traceparent = value.to_str().ok().and_then(Traceparent::parse);
        }
        Ok(job)
    }

    fn set(&mut self, name: &str, value: &'h str) -> Result<(), String> {
        let number = || format!("'{}' is not a valid number", truncate(value, 32).escape_debug());
        match name {
            "bulkhead-operation" => self.options.operation = text(value, OPERATION_BYTES_MAX)?,
            "bulkhead-tenant" => self.options.tenant = text(value, TENANT_BYTES_MAX)?,
            "bulkhead-priority" => self.options.priority = truncate(value, 32).parse()?,
            "bulkhead-deadline-ms" => self.options.deadline = Some(millis(value).ok_or_else(number)?),
            "bulkhead-run-limit-ms" => self.options.run_limit = Some(millis(value).ok_or_else(number)?),
            "bulkhead-cost" => self.options.cost = header_number(value).ok_or_else(number)?,
            "bulkhead-idempotent" => {
                self.options.is_idempotent = value.parse().map_err(|_| "write true or false")?;
            }
            _ => return Err("unknown header; see the documentation about jobs over HTTP".into()),
        }
        Ok(())
    }
}

/// Maximum deadline and run limit, in milliseconds, that are passed on to the data plane. Longer values are reduced.
/// The data plane then applies the bulkhead's own limits.
const LIMIT_MS_MAX: u64 = 366 * 24 * 3600 * 1000;

fn millis(value: &str) -> Option<Duration> {
    let ms: u64 = header_number(value).filter(|ms| *ms > 0)?;
    Some(Duration::from_millis(ms.min(LIMIT_MS_MAX)))
}

fn text(value: &str, max: usize) -> Result<&str, String> {
    if value.len() > max { Err(format!("the value is longer than {max} bytes")) } else { Ok(value) }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn read(pairs: &[(&'static str, &str)]) -> Result<String, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let job = JobHeaders::parse(&headers)?;
        Ok(format!(
            "{} {} {:?} {} {} {} {:?}",
            job.options.operation,
            job.options.tenant,
            job.options.deadline,
            job.options.priority,
            job.options.cost,
            job.options.is_idempotent,
            job.traceparent
        ))
    }

    #[test]
    fn invalid_job_headers_are_rejected() {
        assert_eq!(read(&[("accept", "x")]).unwrap(), "  None normal 1 false None");
        let all = [
            ("bulkhead-operation", "decode"),
            ("bulkhead-tenant", "acme"),
            ("bulkhead-deadline-ms", "250"),
            ("bulkhead-priority", "best-effort"),
            ("bulkhead-cost", "7"),
            ("bulkhead-idempotent", "true"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ];
        assert!(read(&all).unwrap().starts_with("decode acme Some(250ms) best-effort 7 true Some(00-0af"));
        assert!(read(&[all[6], all[6]]).unwrap().ends_with(" None"), "two trace headers count as none");
        let wrong = [
            ("bulkhead-deadline-ms", "0"),
            ("bulkhead-deadline-ms", "-1"),
            ("bulkhead-deadline-ms", "1.5"),
            ("bulkhead-deadline-ms", "99999999999999999999"),
            ("bulkhead-deadline-ms", "+5"),
            ("bulkhead-deadline-ms", ""),
            ("bulkhead-run-limit-ms", "0"),
            ("bulkhead-run-limit-ms", "+5"),
            ("bulkhead-run-limit-ms", "1s"),
            ("bulkhead-cost", "-1"),
            ("bulkhead-cost", "+1"),
            ("bulkhead-cost", "4294967296"),
            ("bulkhead-priority", "urgent"),
            ("bulkhead-idempotent", "yes"),
            ("bulkhead-idempotent", "1"),
            ("bulkhead-idempotent", "True"),
            ("bulkhead-idempotent", ""),
            ("bulkhead-dealine-ms", "5"),
        ];
        for (name, value) in wrong {
            assert!(read(&[(name, value)]).is_err(), "{name}: {value}");
        }
        assert!(read(&[("bulkhead-tenant", &"x".repeat(257))]).is_err());
        assert!(read(&[("bulkhead-tenant", "a"), ("bulkhead-tenant", "b")]).is_err());
    }
}

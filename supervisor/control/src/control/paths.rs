//! Lists the paths of the HTTP API that have special rules, and recognizes some of them in the first bytes of a
//! request. `waiting` and `connections` do this before the request is parsed, to choose a permit and a thread. `tcp`,
//! `jobs_http`, `routes` and `openapi` compare complete paths. The handlers of these paths are in `routes`.

/// Paths that can be requested over TCP without a token.
pub(super) const WITHOUT_TOKEN: &[&str] = &["/healthz", "/readyz", "/metrics"];

/// Path for starting an upgrade. Requests for this path over TCP are refused.
pub(super) const UPGRADE_PATH: &str = "/v1/upgrade";

/// Paths served by the low-priority reader thread, because clients poll them or their responses are endless streams. The
/// thread also serves the logs of bulkheads.
pub(super) const READER_PATHS: &[&str] = &["/", "/openapi.json", "/metrics", "/v1/events", "/v1/watch"];

/// Returns true if the low-priority reader thread should serve a request that begins with `head`.
pub(super) fn is_for_readers(head: &[u8]) -> bool {
    let Some(target) = head.strip_prefix(b"GET ") else { return false };
    let Some(end) = target.iter().position(|byte| b" ?\r\n".contains(byte)) else { return false };
    let path = &target[..end];
    let is_of_bulkhead = path.starts_with(b"/v1/bulkheads/");
    READER_PATHS.iter().any(|known| known.as_bytes() == path) || is_of_bulkhead && path.ends_with(b"/logs")
}

/// Paths of health checks.
pub(super) const HEALTH_PATHS: &[&str] = &["/healthz", "/readyz"];

/// Returns true if `head` is a complete request for a health check. An incomplete request does not count,
/// because it could hold a permit for a long time.
pub(super) fn is_health_check(head: &[u8]) -> bool {
    let Some(target) = head.strip_prefix(b"GET ").or(head.strip_prefix(b"HEAD ")) else { return false };
    let end = target.iter().position(|byte| b" ?\r\n".contains(byte)).unwrap_or(target.len());
    let is_complete = head.windows(4).any(|bytes| bytes == b"\r\n\r\n");
    is_complete && HEALTH_PATHS.iter().any(|path| path.as_bytes() == &target[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_requests_are_recognized_by_request_line() {
        for line in [
            "GET /metrics HTTP/1.1\r\n",
            "GET /v1/events?since=5 HTTP/1.1",
            "GET /v1/bulkheads/a/logs?follow HTTP/1.1",
            "GET / HTTP/1.1",
        ] {
            assert!(is_for_readers(line.as_bytes()), "{line}");
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
            assert!(!is_for_readers(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn only_fully_received_health_checks_are_recognized() {
        for head in
            ["GET /healthz HTTP/1.1\r\n\r\n", "HEAD /readyz?bulkhead=b HTTP/1.1\r\nHost: x\r\n\r\nrest"]
        {
            assert!(is_health_check(head.as_bytes()), "{head}");
        }
        for head in [
            "",
            "GET ",
            "GET /healthz HTTP/1.1\r\nHost: x\r\n",
            "POST /healthz HTTP/1.1\r\n\r\n",
            "GET /healthzs HTTP/1.1\r\n\r\n",
            "GET /v1/config?/healthz HTTP/1.1\r\n\r\n",
        ] {
            assert!(!is_health_check(head.as_bytes()), "{head}");
        }
    }
}

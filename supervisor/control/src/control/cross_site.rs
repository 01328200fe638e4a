//! Rejects requests that pages of other sites send, unless a user follows a link. The check relies on the headers in
//! which browsers state the origin of a request. Other programs do not send these headers, but do not add stored
//! credentials either. `http` and `tcp` call this; `tcp` and `admin_socket` check tokens and users.

use axum::extract::Request;
use axum::http::{HeaderMap, Method, header};
use axum::response::Response;
use bulkhead_shared::RejectReason;

use super::outcomes::reject_request;

/// Returns true if a request with this method can change state.
pub(super) fn changes_state(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Returns a response that rejects a request from a page on another site, or `None` if the request is acceptable.
/// Following a link from another site is acceptable.
pub(super) fn rejection(request: &Request) -> Option<Response> {
    let (headers, is_change) = (request.headers(), changes_state(request.method()));
    let forbid = |why: &str| reject_request(request, RejectReason::Forbidden, why);
    if is_change && (has_other_origin(headers) || comes_from_another_site(headers)) {
        return Some(forbid("web pages from other sites cannot change anything through this API"));
    }
    if comes_from_another_site(headers) && !is_navigation(headers) {
        return Some(forbid("web pages from other sites cannot use this API"));
    }
    None
}

/// Returns true if the request was sent by a form, script or frame from another origin. Sandboxed frames count as
/// another origin.
fn has_other_origin(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok());
    headers.get_all(header::ORIGIN).iter().any(|origin| {
        let site = origin.to_str().ok().and_then(|text| text.split_once("://")).map(|(_, site)| site);
        match (site, host) {
            (Some(site), Some(host)) => !site.eq_ignore_ascii_case(host),
            _ => true,
        }
    })
}

/// Returns true if the request was sent by a page from another origin. This includes `same-site` requests, because
/// other ports of this host and other hosts in this domain are not trusted.
fn comes_from_another_site(headers: &HeaderMap) -> bool {
    headers.get_all("sec-fetch-site").iter().any(|site| {
        ["cross-site", "same-site"].iter().any(|other| site.as_bytes().eq_ignore_ascii_case(other.as_bytes()))
    })
}

/// Returns true if the request loads a page that the user opens, for example by following a link. Such requests are
/// safe, because the page that contains the link cannot read the response.
fn is_navigation(headers: &HeaderMap) -> bool {
    let is = |name, value| headers.get(name).is_some_and(|found| found == value);
    is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_rejected(method: &str, pairs: &[(&'static str, &str)]) -> bool {
        let mut request = Request::builder().method(method).header("host", "localhost:9464");
        for (name, value) in pairs {
            request = request.header(*name, *value);
        }
        rejection(&request.body(axum::body::Body::empty()).unwrap()).is_some()
    }

    #[test]
    fn write_requests_from_other_sites_are_rejected() {
        for method in ["POST", "PATCH", "DELETE"] {
            assert!(
                !is_rejected(method, &[]) && !is_rejected(method, &[("origin", "http://localhost:9464")])
            );
            for origin in ["null", "http://localhost", "http://localhost:9465", "https://evil.example", ""] {
                assert!(is_rejected(method, &[("origin", origin)]), "{origin}");
            }
            for site in ["cross-site", "same-site", "Cross-Site"] {
                assert!(is_rejected(method, &[("sec-fetch-site", site)]), "{site}");
                let visit = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
                assert!(is_rejected(method, &[&visit[..], &[("sec-fetch-site", site)]].concat()), "{site}");
            }
            for site in ["same-origin", "none"] {
                assert!(!is_rejected(method, &[("sec-fetch-site", site)]), "{site}");
            }
        }
    }

    #[test]
    fn other_sites_can_link_to_pages_but_not_send_requests() {
        let from = |site, mode, dest| {
            is_rejected(
                "GET",
                &[("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", dest)],
            )
        };
        assert!(!from("cross-site", "navigate", "document") && !from("same-origin", "cors", "empty"));
        assert!(from("cross-site", "no-cors", "script") && from("same-site", "cors", "empty"));
        assert!(from("cross-site", "navigate", "iframe") && from("cross-site", "navigate", "object"));
    }
}

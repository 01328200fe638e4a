//! Protection against cross-site requests: pages of other sites can link to the dashboard, and nothing else.
//! Browsers state the origin of a request and add stored credentials; other programs do neither.

use axum::extract::Request;
use axum::http::{HeaderMap, Method, header};
use axum::response::Response;
use bulkhead_shared::RejectReason;

use super::jobs;

/// Returns true if a request with this method changes something.
pub(super) fn is_change(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Refuses requests from pages of other sites, except for links that the user follows.
pub(super) fn refuse(request: &Request) -> Option<Response> {
    let (headers, is_change) = (request.headers(), is_change(request.method()));
    let forbid = |why: &str| jobs::turned_away(request, RejectReason::Forbidden, why);
    if is_change && (has_other_origin(headers) || is_sent_by_another_site(headers)) {
        return Some(forbid("a page of another site may not change anything here"));
    }
    if is_sent_by_another_site(headers) && !is_visit(headers) {
        return Some(forbid("a page of another site may not use anything of this one"));
    }
    None
}

/// True if the request comes from a form, a script or a frame (sandboxed or not) of another origin.
fn has_other_origin(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok());
    headers.get_all(header::ORIGIN).iter().any(|origin| {
        let place = origin.to_str().ok().and_then(|text| text.split_once("://")).map(|(_, place)| place);
        match (place, host) {
            (Some(place), Some(host)) => !place.eq_ignore_ascii_case(host),
            _ => true,
        }
    })
}

/// `same-site` means another port of this host or another host of this domain. Neither is trusted.
fn is_sent_by_another_site(headers: &HeaderMap) -> bool {
    headers.get_all("sec-fetch-site").iter().any(|site| {
        ["cross-site", "same-site"].iter().any(|other| site.as_bytes().eq_ignore_ascii_case(other.as_bytes()))
    })
}

/// True if the user navigates to one of our pages. The other site's page cannot read the response.
fn is_visit(headers: &HeaderMap) -> bool {
    let is = |name, value| headers.get(name).is_some_and(|said| said == value);
    is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(method: &str, pairs: &[(&'static str, &str)]) -> bool {
        let mut request = Request::builder().method(method).header("host", "localhost:9464");
        for (name, value) in pairs {
            request = request.header(*name, *value);
        }
        refuse(&request.body(axum::body::Body::empty()).unwrap()).is_some()
    }

    #[test]
    fn pages_of_other_sites_are_told_apart() {
        for method in ["POST", "PATCH", "DELETE"] {
            assert!(!refused(method, &[]) && !refused(method, &[("origin", "http://localhost:9464")]));
            for origin in ["null", "http://localhost", "http://localhost:9465", "https://evil.example", ""] {
                assert!(refused(method, &[("origin", origin)]), "{origin}");
            }
            for site in ["cross-site", "same-site", "Cross-Site"] {
                assert!(refused(method, &[("sec-fetch-site", site)]), "{site}");
                let visit = [("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")];
                assert!(refused(method, &[&visit[..], &[("sec-fetch-site", site)]].concat()), "{site}");
            }
            for site in ["same-origin", "none"] {
                assert!(!refused(method, &[("sec-fetch-site", site)]), "{site}");
            }
        }
    }

    #[test]
    fn other_sites_may_link_here_and_use_nothing() {
        let from = |site, mode, dest| {
            refused("GET", &[("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", dest)])
        };
        assert!(!from("cross-site", "navigate", "document") && !from("same-origin", "cors", "empty"));
        assert!(from("cross-site", "no-cors", "script") && from("same-site", "cors", "empty"));
        assert!(from("cross-site", "navigate", "iframe") && from("cross-site", "navigate", "object"));
    }
}

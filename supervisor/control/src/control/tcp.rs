//! The admin API over TCP, for clients that have the token. The network is not trusted. Web pages in the
//! browser of a user who has the token are not trusted either.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bulkhead_shared::RejectReason;
use tokio::net::{TcpListener, TcpStream};

use super::Shared;
use super::admin_socket::CONNECTIONS_MAX;
use super::connections::{Dispatcher, LAST_ACCEPT_TIMEOUT, has_waiting};
use super::cross_site::{self, changes_state};
use super::http::complete;
use super::paths::WITHOUT_TOKEN;
use super::responses::{JSON, problem};
use super::waiting::WaitingConnections;
use super::{Control, http, jobs};
use bulkhead_config::Token;
use bulkhead_linux::listener::stop_new_connections;

/// Returns true if there is exactly one `Authorization` header and it contains the token.
fn has_token(token: &Token, headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return false };
    token_in(value).is_some_and(|secret| token.is(&secret))
}

/// Returns the secret in an `Authorization` header. The secret is a bearer token or, as browsers send it, the
/// password for any user name.
fn token_in(value: &HeaderValue) -> Option<Vec<u8>> {
    let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("Bearer") {
        return Some(rest.trim().into());
    }
    if !scheme.eq_ignore_ascii_case("Basic") {
        return None;
    }
    let pair = STANDARD.decode(rest.trim()).ok()?;
    let colon = pair.iter().position(|&byte| byte == b':')?;
    Some(pair[colon + 1..].to_vec())
}

/// Authentication challenges in a response to a request without a token. The second one makes a browser ask
/// the user for a password.
const CHALLENGES: [&str; 2] = ["Bearer realm=\"bulkhead\"", "Basic realm=\"bulkhead\", charset=\"UTF-8\""];

/// Checks that requests over TCP must pass.
#[derive(Clone)]
pub(super) struct RequestCheck {
    token: Token,
    /// Listening address if it is a loopback address, otherwise `None`. If set, the `Host` header must name
    /// this machine.
    own: Option<IpAddr>,
}

/// Registers the listening socket with the current runtime, and creates the check for its requests.
pub(super) fn register(
    socket: std::net::TcpListener,
    token: Token,
) -> io::Result<(TcpListener, RequestCheck)> {
    socket.set_nonblocking(true)?;
    let address = socket.local_addr()?;
    tracing::info!("http on {address}");
    let own = address.ip().is_loopback().then_some(address.ip());
    Ok((TcpListener::from_std(socket)?, RequestCheck { token, own }))
}

/// Accepts connections until the control plane ends. Connections are not checked, because each request must
/// contain the token.
pub(super) async fn accept_all(control: &Control, listener: TcpListener, dispatcher: Dispatcher<TcpStream>) {
    let mut waiting = WaitingConnections::new(dispatcher, CONNECTIONS_MAX);
    let mut accept_next = async || {
        loop {
            waiting.add(accept(&listener).await);
        }
    };
    control.until_shutdown(accept_next()).await;
    // Connections in the backlog are still accepted, so that these clients get a response instead of a reset.
    // If the kernel cannot stop new connections, a client that connects at the last moment is still reset.
    let _ = stop_new_connections(&listener);
    if has_waiting(&listener) {
        let _ = tokio::time::timeout(LAST_ACCEPT_TIMEOUT, accept_next()).await;
    }
    // Passes on the connections in the backlog that the accept loop has not reached.
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    for _ in 0..CONNECTIONS_MAX {
        let Ok(socket) = rustix::net::accept_with(&listener, flags) else { return };
        if let Ok(socket) = TcpStream::from_std(socket.into()) {
            waiting.add(socket);
        }
    }
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        // An error is ignored. Without this option, responses in small pieces are only slower.
        let _ = socket.set_nodelay(true);
        return socket;
    }
}

/// Builds the router for TCP, which rejects requests that do not pass the check.
pub(super) fn router(control: Shared, check: RequestCheck) -> Router {
    http::router(control).layer(from_fn_with_state(check, check_request)).layer(from_fn(complete))
}

async fn check_request(State(check): State<RequestCheck>, request: Request, next: Next) -> Response {
    match check.rejection(&request) {
        Some(rejection) => rejection,
        None => next.run(request).await,
    }
}

impl RequestCheck {
    fn rejection(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        // Health probes with HTTP/1.0 may not send a `Host` header, but only need paths without a token.
        // Browsers always send the header.
        let is_open = WITHOUT_TOKEN.contains(&request.uri().path());
        let is_probe = is_open && !changes_state(request.method()) && !headers.contains_key(header::HOST);
        if !is_probe && !self.names_this_machine(headers) {
            let detail = "the Host header does not name this machine: use localhost, 127.0.0.1 or the configured \
                          address";
            return Some(jobs::reject_request(request, RejectReason::Forbidden, detail));
        }
        if let Some(rejection) = cross_site::rejection(request) {
            return Some(rejection);
        }
        if !is_open && !has_token(&self.token, headers) {
            return Some(unauthorized(request));
        }
        // Payloads of jobs can have any content type. A form of another site could send such a payload with
        // stored credentials, but the origin check above has already rejected such a request.
        let is_change = changes_state(request.method());
        if is_change && has_body(headers) && !request.uri().path().ends_with("/jobs") && !is_json(headers) {
            let detail = "the body must be JSON, with the header `Content-Type: application/json`";
            return Some(problem(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
        }
        None
    }

    /// Returns true if the `Host` header names this machine. Prevents DNS rebinding, in which a web page
    /// reaches a service that only listens locally by a foreign name that resolves to this machine.
    fn names_this_machine(&self, headers: &HeaderMap) -> bool {
        let Some(own) = self.own else { return true };
        let mut values = headers.get_all(header::HOST).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        let Some(authority) = value.to_str().ok().and_then(|text| text.parse::<Authority>().ok()) else {
            return false;
        };
        let host = authority.host();
        // The remaining text is checked, because the parser accepts any text as a port and skips a user name
        // before the host.
        let Some(rest) = authority.as_str().strip_prefix(host) else { return false };
        if !rest.is_empty() && rest.strip_prefix(':').is_none_or(|port| port.parse::<u16>().is_err()) {
            return false;
        }
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        host.eq_ignore_ascii_case("localhost")
            || address.is_ok_and(|address| {
                address == own
                    || address == IpAddr::from([127, 0, 0, 1])
                    || address == IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])
            })
    }
}

fn unauthorized(request: &Request) -> Response {
    let detail = "send the header `Authorization: Bearer TOKEN` with the token of http_token_file; in a browser, \
                  enter any user name and the token as the password";
    let mut response = jobs::reject_request(request, RejectReason::Unauthenticated, detail);
    for challenge in CHALLENGES {
        response.headers_mut().append(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0")
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(JSON)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn tcp_requests_require_the_exact_token() {
        let token = Token::new(b"a-secret-of-sixteen");
        let accepts = |value: &str| super::has_token(&token, &headers(&[("authorization", value)]));
        assert!(accepts("Bearer a-secret-of-sixteen") && accepts("bearer  a-secret-of-sixteen "));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Basic a-secret-of-sixteen",
            "Bearer a-secret-of-sixteem",
            "Bearer a-secret-of-sixteen2",
            "a-secret-of-sixteen",
        ] {
            assert!(!accepts(wrong), "{wrong}");
        }
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        for pair in ["x:a-secret-of-sixteen", ":a-secret-of-sixteen"] {
            assert!(accepts(&basic(pair)) && accepts(&basic(pair).replace("Basic", "basic")), "{pair}");
        }
        for pair in
            ["", "a-secret-of-sixteen", "a-secret-of-sixteen:", "x:y:a-secret-of-sixteen", "x:a-secret"]
        {
            assert!(!accepts(&basic(pair)), "{pair}");
        }
        let good = ("authorization", "Bearer a-secret-of-sixteen");
        assert!(!super::has_token(&token, &headers(&[good, good])), "a repeated header is rejected");
        assert!(!super::has_token(&token, &HeaderMap::new()));
    }

    #[test]
    fn foreign_host_names_are_rejected() {
        let check = |own: Option<&str>| RequestCheck {
            token: Token::new(b""),
            own: own.map(|text| text.parse().unwrap()),
        };
        let is_for =
            |own: Option<&str>, host: &str| check(own).names_this_machine(&headers(&[("host", host)]));
        for host in
            ["localhost", "LOCALHOST:9464", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:9464", "127.0.0.9"]
        {
            assert!(is_for(Some("127.0.0.9"), host), "{host}");
        }
        for host in [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example:9464",
            "10.0.0.1",
            "",
            "127.0.0.8",
            "localhost:evil.com",
            "localhost:",
            "127.0.0.1:65536",
            "evil.com@localhost",
            "evil.com:80@127.0.0.1",
        ] {
            assert!(!is_for(Some("127.0.0.9"), host), "{host}");
        }
        assert!(!check(Some("127.0.0.1")).names_this_machine(&HeaderMap::new()));
        assert!(is_for(None, "bulkhead.example"), "without a known address, any host name is accepted");
    }
}

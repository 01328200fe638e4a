//! Accepts connections to the admin API over TCP, and checks each request before a handler receives the request.
//! Requests need a token, except for health checks and metrics. Web pages on other sites are not trusted, because a
//! browser can store the token. `connections` serves the connections, and `routes` lists the handlers.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use bulkhead_shared::RejectReason;
use tokio::net::{TcpListener, TcpStream};

use super::Shared;
use super::admin_socket::CONNECTIONS_MAX;
use super::connections::{Admission, Dispatcher, LAST_ACCEPT_TIMEOUT, has_waiting};
use super::cross_site::{self, changes_state};
use super::http::complete;
use super::outcomes::reject_request;
use super::paths::{HEALTH_PATHS, UPGRADE_PATH, WITHOUT_TOKEN};
use super::responses::{JSON, problem};
use super::tokens::{ReadOnly, TokenTable};
use super::waiting::{ListenerRules, WAITING_MAX, WaitingConnections};
use super::{Control, http, tokens};
use bulkhead_config::{Role, Token};
use bulkhead_linux::listener::{has_handshakes, stop_new_connections};

/// Maximum number of connections to accept from the backlog of a listener that is closing.
const BACKLOG_MAX: usize = 4096;

/// Interval between checks for unfinished TCP handshakes while a listener is closing.
const HANDSHAKE_INTERVAL: Duration = Duration::from_millis(5);

/// Authentication challenges in the response to a request without a token. The second challenge makes a browser ask the
/// user for a password.
const CHALLENGES: [&str; 2] = ["Bearer realm=\"bulkhead\"", "Basic realm=\"bulkhead\", charset=\"UTF-8\""];

/// Data for checking requests received over TCP.
#[derive(Clone)]
pub(super) struct RequestCheck {
    /// The admin token, which grants all permissions.
    token: Token,
    /// IP address of the listener if it is a loopback address, otherwise `None`. On a loopback address, the `Host`
    /// header of each request must name this machine.
    own: Option<IpAddr>,
}

/// Registers the listening socket with the current runtime. Also returns the checks to apply to requests on this
/// socket.
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

/// Accepts admin API connections until the control plane shuts down.
pub(super) async fn accept_all(control: &Control, listener: TcpListener, dispatcher: Dispatcher<TcpStream>) {
    let rules = ListenerRules {
        served_max: CONNECTIONS_MAX,
        waiting_max: WAITING_MAX,
        keeps_alive: false,
        refusal: "too many connections to the admin API are open; try again later",
    };
    let waiting = WaitingConnections::new(dispatcher, rules, Arc::default());
    accept_until_shutdown(control, (listener, control.inherited.http), waiting).await;
}

/// Accepts connections until the control plane shuts down. Accepts them from any client, because each request must
/// contain the token. `is_inherited` is true if the service manager owns the listener.
pub(super) async fn accept_until_shutdown(
    control: &Control,
    (listener, is_inherited): (TcpListener, bool),
    mut waiting: WaitingConnections<TcpStream>,
) {
    let mut listening = control.handover.watch_listening();
    let mut accept_next = async || {
        loop {
            let is_listening = *listening.borrow_and_update();
            tokio::select! {
                socket = accept(&listener), if is_listening => waiting.add(socket),
                _ = listening.changed() => {}
            }
        }
    };
    control.until_shutdown(accept_next()).await;
    // Connections in the backlog are accepted by another supervisor, or by the next process of the service.
    if is_inherited || !control.handover.is_listening() {
        return;
    }
    // Connections in the backlog are still accepted, so that these clients get a response instead of a reset. If the
    // kernel cannot stop new connections, a client that connects at the last moment may still be reset.
    let _ = stop_new_connections(&listener);
    let accept_last = async {
        // The backlog is checked last, because a connection enters it as soon as its handshake has ended.
        while has_handshakes(&listener) || has_waiting(&listener) {
            let _ = tokio::time::timeout(HANDSHAKE_INTERVAL, accept_next()).await;
        }
    };
    let _ = tokio::time::timeout(LAST_ACCEPT_TIMEOUT, accept_last).await;
    // Accepts the connections that are still in the backlog after the time limit.
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    for _ in 0..BACKLOG_MAX {
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
        // Errors are ignored, because without this option responses sent in small pieces are merely slower.
        let _ = socket.set_nodelay(true);
        return socket;
    }
}

/// Builds the router for requests over TCP. Requests that fail the check are rejected.
pub(super) fn router(control: Shared, check: RequestCheck) -> Router {
    let complete = from_fn_with_state(control.counters.clone(), complete);
    let check = from_fn_with_state((check, control.clone()), check_request);
    http::router(control).layer(check).layer(complete)
}

async fn check_request(
    State((check, control)): State<(RequestCheck, Shared)>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    mut request: Request,
    next: Next,
) -> Response {
    match check.check(&request, &control.tokens) {
        Ok(Permission::Open) => return next.run(request).await,
        Ok(Permission::Full) => {}
        Ok(Permission::Read) => {
            request.extensions_mut().insert(ReadOnly);
        }
        Err(rejection) => return *rejection,
    }
    admission.progress.set_identified();
    next.run(request).await
}

enum Permission {
    /// The request has no valid token and needs none.
    Open,
    Full,
    Read,
}

impl RequestCheck {
    fn check(&self, request: &Request, tokens: &TokenTable) -> Result<Permission, Box<Response>> {
        let is_open = WITHOUT_TOKEN.contains(&request.uri().path());
        if let Some(rejection) = self.rejection(request) {
            return Err(rejection.into());
        }
        let permission = match self.permission(request, tokens) {
            Err(_) if is_open => Permission::Open,
            permission => permission?,
        };
        if request.uri().path() == UPGRADE_PATH {
            let detail = "an upgrade can execute any program, so it is only possible over the admin socket";
            return Err(problem(StatusCode::FORBIDDEN, detail).into());
        }
        // Payloads can have any content type. A form on another site could send a payload with stored credentials, but
        // the origin check has already rejected such requests.
        let is_change = changes_state(request.method());
        let is_job = request.uri().path().ends_with("/jobs");
        if is_change && has_body(request.headers()) && !is_job && !is_json(request.headers()) {
            let detail =
                "the body must be JSON, and the request needs the `Content-Type: application/json` header";
            return Err(problem(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail).into());
        }
        Ok(permission)
    }

    /// Returns the permission granted by the token of a request.
    fn permission(&self, request: &Request, tokens: &TokenTable) -> Result<Permission, Box<Response>> {
        let forbid = |why| Err(reject_request(request, RejectReason::Forbidden, why).into());
        let secret = tokens::secret(request.headers()).ok_or_else(|| Box::new(unauthorized(request)))?;
        if self.token.is(&secret) {
            return Ok(Permission::Full);
        }
        match tokens.find(&secret).map(|token| token.role) {
            Some(Role::Read) if changes_state(request.method()) => {
                forbid("this token can only read: use the token from http_token_file")
            }
            Some(Role::Read) => Ok(Permission::Read),
            Some(Role::Jobs) => forbid("this token can only be used to submit jobs at the jobs_http address"),
            None => Err(unauthorized(request).into()),
        }
    }

    /// Rejects requests from pages on other sites, and requests whose `Host` header names another host.
    fn rejection(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let path = request.uri().path();
        // Load balancers check the health under any host name, and HTTP/1.0 health probes send no host name. Browsers
        // always send `Host`.
        let is_nameless = WITHOUT_TOKEN.contains(&path) && !headers.contains_key(header::HOST);
        let is_probe = !changes_state(request.method()) && (HEALTH_PATHS.contains(&path) || is_nameless);
        if !is_probe && !self.names_this_machine(headers) {
            let detail = "the Host header does not name this machine: use localhost, 127.0.0.1 or the configured \
                          address";
            return Some(reject_request(request, RejectReason::Forbidden, detail));
        }
        cross_site::rejection(request)
    }

    /// Returns true if the `Host` header names this machine. Prevents DNS rebinding, in which a web page uses a foreign
    /// name that resolves to this machine to reach a service that only listens locally.
    fn names_this_machine(&self, headers: &HeaderMap) -> bool {
        let Some(own) = self.own else { return true };
        let mut values = headers.get_all(header::HOST).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return false };
        let Some(authority) = value.to_str().ok().and_then(|text| text.parse::<Authority>().ok()) else {
            return false;
        };
        let host = authority.host();
        // The remaining text is checked, because the parser accepts any text as a port and skips a user name before the
        // host.
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
    let detail = "send the `Authorization: Bearer TOKEN` header with the token from http_token_file; in a browser, \
                  enter any user name and the token as the password";
    let mut response = reject_request(request, RejectReason::Unauthenticated, detail);
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

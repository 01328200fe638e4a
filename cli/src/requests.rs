//! Sends the commands' requests to a supervisor's admin API, over the admin socket or over TCP. Converts unsuccessful
//! responses to errors. `target` parses the address, and each command prints its own results.

use std::fmt;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use bulkhead_api::Problem;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use interprocess::local_socket::tokio::Stream;
use interprocess::local_socket::tokio::prelude::*;
use interprocess::local_socket::{GenericFilePath, ToFsName};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::args::Args;
use crate::output::{Failure, escape, exit};
use crate::target::Target;

/// Maximum length of a line in a stream, in bytes. Supervisors never send longer lines.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Maximum time to wait for the supervisor to begin its response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a response that is read in full, in bytes. Supervisors never send larger responses.
const RESPONSE_BYTES_MAX: usize = 256 << 20;

/// Number of lines to buffer while several streams are followed.
const LINES_WAITING_MAX: usize = 64;

/// Sends a request and returns the response, whose body has not been read yet.
pub(crate) async fn request(args: &Args, method: Method, path: &str) -> Result<Response<Incoming>, Failure> {
    request_with(args, method, path, String::new()).await
}

pub(crate) async fn request_with(
    args: &Args,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, Failure> {
    let target = args.target()?;
    let response = send_in_time(&target, method, path, body).await?;
    if response.status().is_success() { Ok(response) } else { Err(failure_of(&target, response).await) }
}

/// Sends a GET request. Returns the status and the body if the status is 200 or 503. Otherwise, returns an error.
pub(crate) async fn get_any(args: &Args, path: &str) -> Result<(StatusCode, Vec<u8>), Failure> {
    let target = args.target()?;
    let response = send_in_time(&target, Method::GET, path, String::new()).await?;
    match response.status() {
        status @ (StatusCode::OK | StatusCode::SERVICE_UNAVAILABLE) => Ok((status, read(response).await?)),
        _ => Err(failure_of(&target, response).await),
    }
}

async fn send_in_time(
    target: &Target,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, Failure> {
    let response = tokio::time::timeout(RESPONSE_TIMEOUT, send(target, method, path, body)).await;
    response.unwrap_or_else(|_| {
        let silence = format!("the supervisor did not respond within {} s", RESPONSE_TIMEOUT.as_secs());
        Err(unreachable(target, &silence))
    })
}

/// Converts an unsuccessful response to the error that the command reports.
async fn failure_of(target: &Target, response: Response<Incoming>) -> Failure {
    let status = response.status();
    if let (StatusCode::UNAUTHORIZED, Target::Host(host)) = (status, target) {
        let message = match &host.token_file {
            Some(file) => {
                format!("the supervisor at {target} does not accept the token in {}", file.display())
            }
            None => format!(
                "the supervisor at {target} requires a token: use --token-file or BULKHEAD_TOKEN_FILE"
            ),
        };
        return Failure::new(exit::FORBIDDEN, message);
    }
    let body = read(response).await.unwrap_or_default();
    let problem: Problem = serde_json::from_slice(&body).unwrap_or_default();
    let detail = match problem.detail.is_empty() {
        true => format!(
            "the response from {target} has status {status}: check that this address belongs to a supervisor"
        ),
        false => problem.detail,
    };
    let code = match status {
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => exit::INVALID,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => exit::FORBIDDEN,
        StatusCode::NOT_FOUND => exit::NOT_FOUND,
        StatusCode::CONFLICT | StatusCode::TOO_MANY_REQUESTS => exit::TRY_LATER,
        StatusCode::SERVICE_UNAVAILABLE => exit::UNREACHABLE,
        _ => exit::FAILED,
    };
    Failure::new(code, escape(&detail))
}

pub(crate) fn unreachable(target: &Target, error: &dyn fmt::Display) -> Failure {
    let message = match target {
        Target::Socket(path) => format!(
            "failed to reach the admin socket {}: {error}; is the supervisor running? If the socket is \
             elsewhere, use --admin or BULKHEAD_ADMIN, or name the jobs socket in the same directory with --socket \
             or BULKHEAD_SOCKET",
            path.display()
        ),
        Target::Host(_) => format!(
            "failed to reach the supervisor at {target}: {error}; is the supervisor running, and is this the \
             address of `http` in its configuration?"
        ),
    };
    Failure::new(exit::UNREACHABLE, message)
}

async fn send(
    target: &Target,
    method: Method,
    path: &str,
    body: String,
) -> Result<Response<Incoming>, Failure> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::ACCEPT, "application/json")
        .header(header::CONTENT_TYPE, "application/json");
    let (request, body) = (request, Full::new(Bytes::from(body)));
    let fail = |error: hyper::http::Error| Failure::new(exit::USAGE, error.to_string());
    match target {
        Target::Socket(socket) => {
            let request = request.header(header::HOST, "bulkhead").body(body).map_err(fail)?;
            exchange(target, connect(target, socket).await?, request).await
        }
        Target::Host(host) => {
            let mut request = request.header(header::HOST, &host.authority).body(body).map_err(fail)?;
            if let Some(token) = host.authorization()? {
                request.headers_mut().insert(header::AUTHORIZATION, token);
            }
            let stream = TcpStream::connect((host.name.as_str(), host.port)).await;
            let stream = stream.map_err(|error| unreachable(target, &error))?;
            exchange(target, stream, request).await
        }
    }
}

async fn connect(target: &Target, socket: &Path) -> Result<Stream, Failure> {
    let connected = match socket.to_fs_name::<GenericFilePath>() {
        Ok(name) => Stream::connect(name).await,
        Err(error) => Err(error),
    };
    connected.map_err(|error| match error.kind() {
        std::io::ErrorKind::PermissionDenied => Failure::new(
            exit::FORBIDDEN,
            format!(
                "this user does not have permission to use the admin socket {}: run the command as the supervisor's \
                 user or as root",
                socket.display()
            ),
        ),
        _ => unreachable(target, &error),
    })
}

async fn exchange(
    target: &Target,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Failure> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| unreachable(target, &error))?;
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(|error| unreachable(target, &error))
}

fn read_failure(error: &dyn fmt::Display) -> Failure {
    Failure::new(exit::UNREACHABLE, format!("failed to read the supervisor's response: {error}"))
}

pub(crate) async fn read(response: Response<Incoming>) -> Result<Vec<u8>, Failure> {
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    Ok(body.map_err(|error| read_failure(&error))?.to_bytes().to_vec())
}

/// Returns the text of a JSON object that confirms a change. A response without such an object comes from a program
/// other than a supervisor, such as a proxy.
pub(crate) async fn read_confirmation(response: Response<Incoming>) -> Result<String, Failure> {
    let body = read(response).await?;
    document::<Map<String, Value>>(&body)?;
    Ok(String::from_utf8_lossy(&body).trim_end().to_owned())
}

/// Requests a JSON document from the supervisor and parses it.
pub(crate) async fn get<T: DeserializeOwned>(args: &Args, path: &str) -> Result<T, Failure> {
    document(&read(request(args, Method::GET, path).await?).await?)
}

/// Requests a document that contains one JSON object per line. Returns the lines.
pub(crate) async fn get_lines(args: &Args, path: &str) -> Result<Vec<String>, Failure> {
    let body = read(request(args, Method::GET, path).await?).await?;
    let lines: Vec<String> = String::from_utf8_lossy(&body).lines().map(str::to_owned).collect();
    // Lines that begin with a colon are comments.
    let is_foreign = |line: &String| !line.is_empty() && !line.starts_with(['{', ':']);
    if lines.iter().any(is_foreign) {
        return Err(foreign_response("a line is not a JSON object"));
    }
    Ok(lines)
}

/// Parses the body of a response, which must be a JSON object.
pub(crate) fn document<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    // Serde would also accept an array for a structure, and any value for `Value`.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(foreign_response("the body is not a JSON object"));
    }
    serde_json::from_slice(body).map_err(|error| parse_failure(&error))
}

pub(crate) fn parse_failure(error: &serde_json::Error) -> Failure {
    foreign_response(error)
}

fn foreign_response(problem: impl fmt::Display) -> Failure {
    Failure::new(exit::FAILED, format!("failed to parse the supervisor's response: {problem}"))
}

/// Percent-encodes a name for use in a path.
pub(crate) fn percent_encoded(name: &str) -> String {
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    name.bytes().map(|b| if is_plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

// Endless responses.

/// Passes each line of the responses to `handle` as it arrives, with the index of the response. Returns when all
/// responses have ended, a second after all but the first of several have ended, or when the user presses ^C. In the
/// second case, the first response is the event stream, which does not end when the followed bulkheads are removed.
pub(crate) async fn follow(
    responses: Vec<Response<Incoming>>,
    mut handle: impl FnMut(usize, &str) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let (sender, mut lines) = mpsc::channel(LINES_WAITING_MAX);
    let (alive, mut others) = mpsc::channel::<()>(1);
    let has_others = responses.len() > 1;
    for (index, response) in responses.into_iter().enumerate() {
        let alive = (index > 0).then(|| alive.clone());
        let sending = send_lines(index, response, sender.clone());
        tokio::spawn(async move {
            sending.await;
            drop(alive);
        });
    }
    drop((sender, alive));
    let mut others_ended = pin!(async {
        others.recv().await;
        // An event about an upgrade can arrive later than the ends of the other streams.
        tokio::time::sleep(Duration::from_secs(1)).await;
    });
    // Waits for ^C with a single future in all iterations, because a signal that arrives between two futures would be
    // missed.
    let mut interrupt = pin!(tokio::signal::ctrl_c());
    loop {
        let line = tokio::select! {
            biased;
            _ = &mut interrupt => return Ok(exit::CANCELLED),
            line = lines.recv() => line,
            () = &mut others_ended, if has_others => return Ok(exit::OK),
        };
        match line {
            Some((index, line)) => handle(index, &line?)?,
            None => return Ok(exit::OK),
        }
    }
}

async fn send_lines(
    index: usize,
    response: Response<Incoming>,
    lines: mpsc::Sender<(usize, Result<String, Failure>)>,
) {
    let mut body = response.into_body();
    let mut partial = Vec::new();
    while let Some(frame) = body.frame().await {
        let data = match frame {
            Ok(frame) => frame.into_data().unwrap_or_default(),
            Err(error) => return drop(lines.send((index, Err(read_failure(&error)))).await),
        };
        partial.extend_from_slice(&data);
        while let Some(end) = partial.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = partial.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if lines.send((index, Ok(line))).await.is_err() {
                return;
            }
        }
        if partial.len() > LINE_BYTES_MAX {
            let failure = Failure::new(exit::FAILED, "the supervisor sent a line that is too long");
            return drop(lines.send((index, Err(failure))).await);
        }
    }
}

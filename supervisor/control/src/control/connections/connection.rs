//! Wraps a socket of the HTTP server and enforces a time limit for each phase of a request. If hyper cannot parse a
//! request, replaces hyper's error response with a problem document. `service` passes these sockets to hyper, which
//! reads the requests. `progress` tracks open connections and chooses one to close if another client waits.

use std::future::Future as _;
use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::REQUEST_TIMEOUT;
use super::progress::Progress;
use crate::control::outcomes;

/// Maximum time that a kept-alive connection waits for the next request. Proxies usually close unused connections
/// sooner, so the proxy rather than the supervisor closes such a connection.
const IDLE_TIMEOUT: Duration = Duration::from_secs(75);

/// Maximum time that a client with a valid token can go without reading its response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time to wait for the client to close the connection after the response has been sent.
const LINGER_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of bytes that are read and discarded while waiting for the client to close the connection.
const LINGER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A connection from which hyper reads requests and to which hyper writes responses.
pub(super) struct Connection<S> {
    socket: S,
    progress: Arc<Progress>,
    timer: Pin<Box<Sleep>>,
    phase: Phase,
    /// Response that replaces hyper's own response, and the number of its bytes that have already been written.
    replacement: Option<(Vec<u8>, usize)>,
}

#[derive(PartialEq)]
enum Phase {
    /// Waiting for the first byte of a request.
    Idle,
    /// Part of the request's head has arrived.
    Head,
    /// The handler is processing the request, or the response is being sent. The connection itself enforces no time
    /// limit in this phase.
    Serving,
    /// The client is not reading, although there is data to send.
    Stalled,
    /// The response has been sent. Further input is discarded for a short time, because closing a socket with unread
    /// bytes would reset the connection, and the client could lose the response.
    Lingering { bytes_left: usize },
}

impl<S> Connection<S> {
    /// Wraps an accepted socket. The first request has a shorter time limit than later requests, because any client can
    /// connect.
    pub(super) fn new(socket: S, progress: Arc<Progress>, accepted: Instant) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(accepted + REQUEST_TIMEOUT));
        Self { socket, progress, timer, phase: Phase::Head, replacement: None }
    }

    fn enter(&mut self, phase: Phase, limit: Duration) {
        self.phase = phase;
        self.timer.as_mut().reset(Instant::now() + limit);
    }

    /// Updates the phase when the current request has been answered or the next request has been received.
    fn update_phase(&mut self) {
        match (self.progress.is_waiting(), &self.phase) {
            (true, Phase::Serving | Phase::Stalled) if self.replacement.is_none() => {
                self.enter(Phase::Idle, IDLE_TIMEOUT)
            }
            (false, Phase::Idle | Phase::Head) => self.phase = Phase::Serving,
            _ => {}
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Closes a connection whose request did not arrive in time. If part of the request has arrived, first sends an
    /// error to the client.
    fn time_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.timer.as_mut().poll(cx));
        if self.phase == Phase::Head {
            let response = outcomes::raw(StatusCode::REQUEST_TIMEOUT, "the request did not arrive in time");
            // Errors are ignored, because the client may not read the response.
            let _ = Pin::new(&mut self.socket).poll_write(cx, &response);
        }
        Poll::Ready(Err(ErrorKind::TimedOut.into()))
    }

    /// Writes the response that is sent in place of hyper's own response.
    fn write_replacement(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((bytes, written)) = &mut self.replacement {
            if *written == bytes.len() {
                self.replacement = None;
                break;
            }
            let result = Pin::new(&mut self.socket).poll_write(cx, &bytes[*written..]);
            match result {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(count)) => *written += count,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return self.stall(cx),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns `Pending`, or an error if the client has not read its response for too long or must make room for
    /// another client.
    fn stall<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if self.progress.is_displaced() {
            return Poll::Ready(Err(ErrorKind::TimedOut.into()));
        }
        self.progress.stalled();
        if self.phase != Phase::Stalled {
            let limit = if self.progress.is_identified() { READ_TIMEOUT } else { REQUEST_TIMEOUT };
            self.enter(Phase::Stalled, limit);
        }
        self.timer.as_mut().poll(cx).map(|()| Err(ErrorKind::TimedOut.into()))
    }
}

/// Returns the status of the response that hyper generates for a request that it cannot parse.
fn status_of(slices: &[IoSlice<'_>]) -> Option<StatusCode> {
    let line = slices.iter().find(|slice| !slice.is_empty())?;
    let code = line.strip_prefix(b"HTTP/1.1 ").or(line.strip_prefix(b"HTTP/1.0 "))?.get(..3)?;
    StatusCode::from_bytes(code).ok()
}

fn explanation(status: StatusCode) -> &'static str {
    match status {
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => "the request head is too large",
        StatusCode::URI_TOO_LONG => "the request path is too long",
        _ => "the request is not valid HTTP/1.1",
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.update_phase();
        let before = buffer.filled().len();
        match Pin::new(&mut self.socket).poll_read(cx, buffer) {
            Poll::Pending if matches!(self.phase, Phase::Idle | Phase::Head) => self.time_out(cx),
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                if self.phase == Phase::Idle && buffer.filled().len() > before {
                    self.enter(Phase::Head, REQUEST_TIMEOUT);
                }
                Poll::Ready(result)
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.update_phase();
        // A response that is written while no request is being served was generated by hyper.
        if self.progress.is_waiting()
            && self.replacement.is_none()
            && let Some(status) = status_of(slices)
        {
            self.replacement = Some((outcomes::raw(status, explanation(status)), 0));
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        if result.is_ready() {
            // The time limit for a client without a valid token covers the rest of the response.
            if self.phase != Phase::Stalled || self.progress.is_identified() {
                self.phase = Phase::Serving;
            }
            return result;
        }
        self.stall(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_replacement(cx))?;
        ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
        self.progress.flushed();
        self.update_phase();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !matches!(self.phase, Phase::Lingering { .. }) {
            ready!(self.write_replacement(cx))?;
            ready!(Pin::new(&mut self.socket).poll_shutdown(cx))?;
            self.enter(Phase::Lingering { bytes_left: LINGER_BYTES_MAX }, LINGER_TIMEOUT);
        }
        let mut discarded = [std::mem::MaybeUninit::uninit(); 4096];
        loop {
            if self.timer.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buffer = ReadBuf::uninit(&mut discarded);
            match ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => return Poll::Ready(Ok(())),
            }
            let count = buffer.filled().len();
            match &mut self.phase {
                Phase::Lingering { bytes_left } if *bytes_left > count => *bytes_left -= count,
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};

    use super::super::Active;
    use super::*;

    /// Writes until the client has to read. Returns the end of the time limit, or an error if the connection must close.
    fn stall(connection: &mut Connection<DuplexStream>) -> io::Result<Instant> {
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(result) = Pin::new(&mut *connection).poll_write(&mut cx, &[0; 8]) {
            result?;
        }
        Ok(connection.timer.deadline())
    }

    #[tokio::test]
    async fn only_client_with_token_extends_time_limit_by_reading() {
        for is_identified in [false, true] {
            let (socket, mut client) = duplex(8);
            let (active, progress) = (Active::new(), Progress::new(false));
            let _guard = active.add(progress.clone());
            let mut connection = Connection::new(socket, progress.clone(), Instant::now());
            progress.begin_request();
            if is_identified {
                progress.set_identified();
            }
            let end = stall(&mut connection).unwrap();
            client.read_exact(&mut [0; 8]).await.unwrap();
            assert_eq!(stall(&mut connection).unwrap() != end, is_identified);
            // Without a token, the client makes room for another client.
            assert_eq!(active.close_idle(), !is_identified);
            assert_eq!(stall(&mut connection).is_ok(), is_identified);
        }
    }
}

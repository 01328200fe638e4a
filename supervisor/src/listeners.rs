//! The listening sockets of a supervisor, whether it has opened them, or has got them from the service manager or from the
//! previous supervisor of an upgrade.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use bulkhead_config::Token;
use bulkhead_control::control::RunMode;
use bulkhead_control::sockets::InheritedSockets;

/// Listening sockets of a supervisor.
pub(crate) struct Listeners {
    /// The jobs socket.
    pub(crate) jobs: Option<UnixListener>,
    /// The mode, with the admin socket.
    pub(crate) mode: RunMode,
    /// The TCP listener of `http`, and its token.
    pub(crate) http: Option<(TcpListener, Token)>,
    /// The TCP listener of `jobs_http`.
    pub(crate) jobs_http: Option<TcpListener>,
    /// Sockets that belong to the service manager.
    pub(crate) inherited: InheritedSockets,
}

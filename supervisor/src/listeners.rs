//! Holds the listening sockets of a supervisor during the start. `supervisor` opens the sockets or receives them from
//! the service manager. `take_over` receives the sockets from a predecessor during an upgrade.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;

use bulkhead_config::Token;
use bulkhead_control::control::RunMode;
use bulkhead_control::sockets::InheritedSockets;

/// Listening sockets of a supervisor.
pub(crate) struct Listeners {
    /// The jobs socket.
    pub(crate) jobs: Option<UnixListener>,
    /// Mode of the supervisor: standalone with the admin socket, or embedded in an application.
    pub(crate) mode: RunMode,
    /// The `http` TCP listener, and its token.
    pub(crate) http: Option<(TcpListener, Token)>,
    /// The `jobs_http` TCP listener.
    pub(crate) jobs_http: Option<TcpListener>,
    /// Sockets that were passed in by the service manager.
    pub(crate) inherited: InheritedSockets,
}

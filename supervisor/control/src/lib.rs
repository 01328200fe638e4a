//! The control plane: the admin API over HTTP, its dashboard and metrics, events and logs, advice, crash reports, and
//! reload. It asks the data plane by commands and hears from it by notices; it never touches a job's socket.

mod advice;
pub mod control;
pub mod observe;
pub mod sockets;

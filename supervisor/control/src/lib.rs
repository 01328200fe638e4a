//! The control plane: the admin API over HTTP, the dashboard, metrics, events, logs, advice, crash reports, and reload.
//! It sends commands to the data plane and receives notices from it. It never touches the connections of clients that
//! submit jobs.

mod advice;
pub mod control;
pub mod observe;
pub mod sockets;

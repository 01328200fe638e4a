//! Implements the control plane, which serves the admin API, jobs over HTTP, the dashboard, metrics, events and logs.
//! Also performs reloads and upgrades, stores crash reports, and computes advice. The control plane sends commands to
//! the data plane and receives notices. Only the data plane decides about jobs and serves the jobs socket.

mod advice;
pub mod control;
pub mod observe;
pub mod sockets;

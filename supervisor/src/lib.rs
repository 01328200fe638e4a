//! The supervisor as a library: everything but the reading of arguments.
//!
//! One thread, the data plane, owns every socket and every decision; the control plane (HTTP, events,
//! logs, signals) runs beside it and reads snapshots; the keeper, a process of its own, starts and ends
//! the workers.

mod access;
mod advice;
pub mod args;
mod bounds;
pub mod check;
pub mod command;
pub use bulkhead_config as config;
mod confinement;
pub mod control;
pub mod counters;
pub mod crash;
pub mod demand;
mod descriptors;
pub mod doctor;
pub mod entry;
mod inherited;
pub use bulkhead_keeper as keeper;
mod latency;
mod limits;
pub mod notices;
pub mod observe;
mod open_files;
mod program;
pub mod reload;
pub mod scrape;
mod service;
pub mod shard;
pub mod sockets;
pub mod span;
mod succession;
pub mod supervisor;
mod tally;
mod threads;
mod worker_ids;

//! The supervisor as a library: everything but the reading of arguments.
//!
//! One thread, the data plane, owns every socket and every decision; the control plane (HTTP, events,
//! logs, signals) runs beside it and reads snapshots; the keeper, a process of its own, starts and ends
//! the workers.

pub use bulkhead_control::{control, observe, sockets};
pub(crate) use bulkhead_plane::{
    access, confinement, latency, limits, lock, open_files, program, service, tally, threads, worker_ids,
};
pub use bulkhead_plane::{command, counters, crash, demand, entry, notices, reload, scrape, span};

pub mod args;
pub mod check;
pub use bulkhead_config as config;
#[path = "../dataplane/src/descriptors.rs"]
mod descriptors;
pub mod doctor;
mod inherited;
pub use bulkhead_keeper as keeper;
#[path = "../dataplane/src/lib.rs"]
pub mod shard;
pub mod supervisor;

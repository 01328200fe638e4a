//! The supervisor as a library: everything but the reading of arguments.
//!
//! One thread, the data plane, owns every socket and every decision; the control plane (HTTP, events,
//! logs, signals) runs beside it and reads snapshots; the keeper, a process of its own, starts and ends
//! the workers.

pub use bulkhead_config as config;
pub use bulkhead_control::observe;
pub use bulkhead_keeper as keeper;

pub mod args;
pub mod check;
pub mod doctor;
mod embedded;
mod inherited;
pub mod own_folder;
pub mod supervisor;

pub use embedded::{Builder, KeeperProgram, LocalSupervisor, StartError, Supervisor, keeper_main_if_asked};
pub use supervisor::RunError;

//! The supervisor as a library.
//!
//! - The data plane is one thread that owns every job connection and every decision.
//! - The control plane (HTTP, events, logs, signals) runs on separate threads and reads snapshots.
//! - The keeper is a separate process that starts and ends the workers.
//!
//! An application can embed a supervisor with [`Supervisor`] or [`LocalSupervisor`]. The program
//! `bulkhead-supervisor` parses [`args::Args`] and calls [`supervisor::run`].

pub use bulkhead_config as config;
pub use bulkhead_control::observe;
pub use bulkhead_keeper as keeper;

mod activation;
pub mod args;
pub mod check;
pub mod doctor;
mod embedded;
mod inherited;
mod listeners;
pub mod own_folder;
pub mod pages;
pub mod supervisor;
pub mod take_over;

pub use embedded::{Builder, KeeperProgram, LocalSupervisor, StartError, Supervisor, keeper_main_if_asked};
pub use supervisor::RunError;

//! Library that implements the supervisor.
//!
//! - The data plane is one thread that owns every job connection and every decision.
//! - The control plane (HTTP, events, logs, signals) runs on separate threads and reads snapshots.
//! - The keeper is a separate process that starts and stops the workers.
//!
//! An application can embed a supervisor with [`Supervisor`] or [`LocalSupervisor`]. The `bulkhead-supervisor` program
//! parses [`args::Args`] and calls [`supervisor::run`].

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

/// If this process was started as a keeper or a symbolizer, performs that role and does not return. Must be called at
/// the beginning of `main`.
#[doc(hidden)]
pub fn run_hidden_mode() {
    let argument = std::env::args_os().nth(1).unwrap_or_default();
    if argument == keeper::KEEPER_ARGUMENT {
        keeper::run_as_keeper();
    }
    if argument == bulkhead_plane::program::SYMBOLIZE_ARGUMENT {
        let folders: Vec<String> = std::env::args().skip(2).collect();
        bulkhead_symbolizer::run_as_symbolizer(&folders);
    }
}

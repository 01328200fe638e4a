//! Defines and encodes the messages between supervisor and keeper. `client` sends the orders, and `process` executes
//! them and sends the reports. The data plane decides about the orders.
//!
//! - `orders`: orders from the supervisor, and their encoding.
//! - `reports`: reports from the keeper.
//! - [`confinement`]: the requested confinement of a worker, and the confinement read back from the kernel.
//! - `layer_support`: the layers of confinement that this machine supports.
//! - `guard`: arguments and message of the guard of an embedded supervisor.
//! - [`socket`]: the socket between supervisor and keeper.

pub(crate) mod confinement;
mod guard;
mod layer_support;
mod orders;
mod reports;
pub(crate) mod socket;

pub(crate) use guard::{GUARDED_ARGUMENT, GuardReady, PROBE_ARGUMENT, VERSION};
pub use layer_support::LayerSupport;
pub use orders::{KEEPER_ARGUMENT, ORDER_BYTES_MAX, Rlimit, SpawnOrder};
pub(crate) use orders::{Order, SERVICE_MANAGER_VARIABLES, SPAWN_DESCRIPTORS};
pub use reports::{Exit, Report, TemplateReport, Usage};
pub(crate) use reports::{REPORT_BYTES_MAX, ReportMessage, STEP_BYTES_MAX};

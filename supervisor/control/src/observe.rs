//! What operators see: events, the output of workers, log lines. It owns rings of bounded size and never
//! touches a job.

pub mod crashes;
pub mod events;
pub mod logging;
pub(crate) mod metrics;
pub mod output;
pub mod process;
pub mod spans;

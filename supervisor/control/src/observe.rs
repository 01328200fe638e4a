//! Observability: events, workers' output, crash reports, log lines, metrics and spans. All buffers are bounded, and
//! nothing in this module influences how jobs are handled.

pub mod crashes;
pub mod events;
pub mod logging;
pub(crate) mod metrics;
pub mod output;
pub mod process;
pub mod spans;
pub mod symbolizer;

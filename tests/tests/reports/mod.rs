//! Reports about jobs and workers: crash reports, events, metrics and spans.

mod backtraces;
mod consistency;
mod crash_reports;
mod events;
mod hangs;
mod metrics;
mod traces;

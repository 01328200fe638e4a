//! The `bulkhead` command, the reports that operators read with it, and the bench.

mod advise;
mod bench;
mod commands;
mod operate;
pub(crate) mod running;
mod service;
mod service_manager;
mod submit_input;
mod top;

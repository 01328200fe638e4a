//! The `bulkhead` command, and the reports that operators read with it.

mod advise;
mod commands;
mod operate;
mod running;
mod service;
mod service_manager;
mod submit_input;
mod top;

//! Tests of running supervisors. All groups run in a single program, so that while tests in one group wait, tests in
//! another can use the processors.

mod admin_api;
mod clients;
mod command_line;
mod confinement;
mod ending;
mod fleet;
mod jobs;
mod lifecycle;
mod reports;
mod tenants;
mod workers;

//! Tests of running supervisors. All groups of tests run in a single program, because most tests spend their time
//! waiting and other tests can use the processors meanwhile.

mod admin_api;
mod clients;
mod command_line;
mod confinement;
mod fleet;
mod jobs;
mod lifecycle;
mod reports;
mod tenants;
mod workers;

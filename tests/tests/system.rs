//! Tests of running supervisors. A single program runs them, so that the threads that wait in one group leave the
//! processors to the tests of another.

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

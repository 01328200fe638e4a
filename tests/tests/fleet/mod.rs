//! Durable jobs on several hosts, with real NATS servers, which `.ci/run` unpacks. The tests report that they did not
//! run if the servers are missing.

mod chaos;
mod commands;
mod failures;
mod jobs;
mod limits;
mod outages;
mod security;
mod tenants;

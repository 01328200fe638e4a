//! Durable jobs on several hosts, with real NATS servers. `.ci/run` unpacks the server's program. Without it, the tests
//! report that they did not run.

mod chaos;
mod commands;
mod failures;
mod jobs;
mod limits;
mod outages;
mod security;
mod tenants;

//! Durable jobs on several hosts, over NATS JetStream.

pub mod decide;
pub mod names;
pub mod record;

//! Contains the modules that communicate with the NATS servers. The agent, the client library and `operate` use them to
//! read and write records, and to prepare streams. `decide` makes all decisions about jobs.

pub(crate) mod connection;
pub(crate) mod ledger;
pub(crate) mod messages;
pub(crate) mod refusals;
pub(crate) mod streams;
pub(crate) mod unreadable;

//! Everything that crosses the connection to the servers. This module decides nothing.

pub(crate) mod connection;
pub(crate) mod ledger;
pub(crate) mod messages;
pub(crate) mod refusals;
pub(crate) mod streams;

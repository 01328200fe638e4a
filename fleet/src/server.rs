//! Communication with the NATS servers. This module makes no decisions.

pub(crate) mod connection;
pub(crate) mod ledger;
pub(crate) mod messages;
pub(crate) mod refusals;
pub(crate) mod streams;
pub(crate) mod unreadable;

//! The simulated fleet.

pub(crate) mod random;
pub(crate) mod server;
pub(crate) mod world;

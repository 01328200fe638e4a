//! The simulated fleet.

pub(crate) mod faults;
pub(crate) mod random;
pub(crate) mod requests;
pub(crate) mod server;
pub(crate) mod world;

//! The simulated fleet.

pub mod random;
pub mod server;
pub mod world;

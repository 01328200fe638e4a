//! Parts of the simulation: random numbers from a seed, a world that acts like the data plane, the workers
//! and the clients, and a model of the rules that checks every step.

pub(crate) mod coverage;
pub(crate) mod journal;
pub(crate) mod model;
pub(crate) mod random;
pub(crate) mod settings;
pub(crate) mod world;

/// The caller's record of a job. Neither `Clone` nor `Copy`, so that policy cannot return the same record
/// with two outcomes.
#[derive(Debug)]
pub(crate) struct Tag(pub(crate) u64);

//! Parts of the simulation: random numbers from a seed, a world that acts like the data plane, workers and
//! clients, and a model of the rules that checks every step.

pub(crate) mod coverage;
pub(crate) mod journal;
pub(crate) mod model;
pub(crate) mod random;
pub(crate) mod settings;
pub(crate) mod world;

/// Caller's record of a job. Neither `Clone` nor `Copy`, so that policy cannot use the same record for two
/// answers.
#[derive(Debug)]
pub(crate) struct Tag(pub(crate) u64);

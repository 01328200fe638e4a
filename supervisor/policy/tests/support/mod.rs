//! The parts of the simulation: numbers from a seed, a world that does what the shell and the workers
//! would do, and a model of the rules that judges every step.

pub(crate) mod claims;
pub(crate) mod coverage;
pub(crate) mod model;
pub(crate) mod random;
pub(crate) mod settings;
pub(crate) mod world;

/// The caller's record of a job. It is neither `Clone` nor `Copy`, so the policy cannot answer twice with
/// one and the same.
#[derive(Debug)]
pub(crate) struct Tag(pub(crate) u64);

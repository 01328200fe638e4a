//! Parts of the simulation: seeded random numbers, a world that stands in for the data plane, workers and clients, and
//! a model of the rules that checks every step.

pub(crate) mod coverage;
pub(crate) mod journal;
pub(crate) mod model;
pub(crate) mod random;
pub(crate) mod settings;
pub(crate) mod world;

/// The caller's record of a job. Cannot be cloned or copied, so that the bulkhead cannot return the same record with
/// two outcomes.
#[derive(Debug)]
pub(crate) struct Tag(pub(crate) u64);

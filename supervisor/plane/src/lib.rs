//! What the data plane and the control plane say to each other, and what both know of a bulkhead: commands one way and
//! notices the other, both bounded; the programs and rules that follow from the configuration, translated into the
//! keeper's orders; counters that they share without a lock.
//!
//! It runs nothing: no thread, no loop, no socket is its own.
#![expect(
    missing_docs,
    reason = "the library of the supervisor documents what others than the two planes may use"
)]

pub mod access;
pub mod bounds;
pub mod command;
pub mod confinement;
pub mod counters;
pub mod crash;
pub mod demand;
pub mod entry;
pub mod latency;
pub mod limits;
pub mod lock;
pub mod notices;
pub mod open_files;
pub mod possible;
pub mod program;
pub mod reload;
pub mod scrape;
pub mod service;
pub mod span;
pub mod tally;
pub mod threads;
pub mod windows;
pub mod worker_ids;

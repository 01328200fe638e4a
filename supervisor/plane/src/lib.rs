//! The interface between the data plane and the control plane, with the following parts.
//!
//! - commands to the data plane, and notices from it, both over bounded channels
//! - resolved programs and confinement, translated from the configuration into orders for the keeper
//! - lock-free counters shared by both planes
//!
//! This crate does not run any threads or event loops, and does not own any sockets.
#![expect(
    missing_docs,
    reason = "users see these items only through the supervisor library, which documents them"
)]

pub mod access;
pub mod bulkhead_counters;
pub mod command;
pub mod confinement;
pub mod counters;
pub mod crash;
pub mod demand;
pub mod handover;
pub mod latency;
pub mod limits;
pub mod lock;
pub mod notices;
pub mod open_files;
pub mod peer_check;
pub mod possible_series;
pub mod program;
pub mod reload;
pub mod rlimits;
pub mod scrape;
pub mod service;
pub mod span;
pub mod threads;
pub mod windows;
pub mod worker_ids;

//! Connects the parts of the data plane to each other, to the sockets and to the event loop. Each submodule carries out
//! the actions requested by one part.

mod commands;
mod fallback;
mod handover;
mod keeper;
mod leases;
mod links;
mod memory;
mod reload;
mod replays;
mod reports;
pub(crate) mod samples;
mod sessions;
mod templates;
mod tenants;

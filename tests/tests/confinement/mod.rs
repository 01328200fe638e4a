//! Confinement of workers and programs: layers, identities, limits, and attempts to break out.

mod attempts;
mod bounds;
mod exec_programs;
mod forked;
mod identity;
mod layers;
mod network;
mod programs;
mod subuid;
mod traces;

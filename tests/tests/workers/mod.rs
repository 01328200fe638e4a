//! Workers: start, failure, replacement, recycling and stop, and the hosts of programs and libraries.

mod crash_matrix;
mod fork;
mod hosts;
mod recovery;
mod recycling;
mod secrets;
mod spares;
mod starts;
mod stopping;

//! Start, upgrade and shutdown of supervisors, including embedded supervisors.

mod embedded;
mod surroundings;
mod survival;
mod threads;
mod upgrade;
mod while_open;

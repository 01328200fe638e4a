//! Start and end of supervisors, including embedded supervisors.

mod embedded;
mod survival;
mod threads;
mod while_open;

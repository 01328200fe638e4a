//! Start and end of supervisors, embedded ones included.

mod embedded;
mod survival;
mod threads;
mod while_open;

//! Groups the wrappers of system calls that start, await or kill processes. The keeper and the supervisor's end of the
//! keeper decide when to call these wrappers.

pub mod fork;
pub mod liveness;
pub mod process_tree;
pub mod scheduler;
pub mod sibling;
pub mod vfork;
pub mod wait;

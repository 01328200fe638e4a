//! Starts processes, waits for them, and kills them.

pub mod fork;
pub mod liveness;
pub mod process_tree;
pub mod scheduler;
pub mod sibling;
pub mod vfork;
pub mod wait;

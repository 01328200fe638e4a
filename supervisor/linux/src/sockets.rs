//! Sockets: peers, passed descriptors, and queues.

pub mod listener;
pub mod peer;
pub mod scm_rights;
pub mod unread;

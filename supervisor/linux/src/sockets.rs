//! Sockets: listeners, peers, passed descriptors, and unread data.

pub mod listener;
pub mod peer;
pub mod scm_rights;
pub mod unread;

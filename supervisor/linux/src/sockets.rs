//! Sockets: listeners, messages, peers, passed descriptors, and unread data.

pub mod listener;
pub mod packets;
pub mod peer;
pub mod scm_rights;
pub mod unread;

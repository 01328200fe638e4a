//! Groups the wrappers of system calls for sockets, such as listeners, packets, peers, passed descriptors, unread
//! data and notifications of the service manager. `lib.rs` exports them to the other crates of the supervisor. No wrapper knows the frames of a protocol.

pub mod listener;
pub mod notify;
pub mod packets;
pub mod peer;
pub mod scm_rights;
pub mod unread;

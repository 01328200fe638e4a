//! Clients: the library, the protocol, access control, memory, and misuse.

mod access;
mod client;
mod descriptors;
mod hostile;
mod memory;
mod memory_files;
mod protocol;
mod reconnect;

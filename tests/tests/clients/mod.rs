//! Clients: the library, the protocol, access control, memory, misuse, and the Python package.

mod access;
mod client;
mod descriptors;
mod hostile;
mod memory;
mod memory_files;
mod protocol;
mod python;
mod reconnect;

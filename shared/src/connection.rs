//! Converts between a non-blocking stream socket and frames, for clients, the supervisor and workers.
//!
//! [`Inbox`] keeps the rest of a partly received frame, and [`Outbox`] keeps bytes that the socket has not
//! taken yet. Neither holds memory while idle. One read receives all available frames, and one write sends
//! all waiting frames.
//!
//! Small payloads are stored inline in shared buffers. A large payload is announced first, so that the
//! receiver can reject it before any of its bytes are stored.

mod inbox;
mod outbox;
mod pool;

pub use inbox::{Batch, Inbox, Item, Received, Scratch};
pub use outbox::{Outbox, Payload, disable_sendfile};
pub use pool::BufferPool;

#[cfg(test)]
mod tests;

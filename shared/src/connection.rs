//! Turns a non-blocking stream socket into frames and back, for every party alike.
//!
//! [`Inbox`] keeps what is left of a half-received frame and [`Outbox`] what the socket has not taken
//! yet; neither holds memory while nothing is under way. One read takes as many frames as there are,
//! one write sends as many as wait. Small payloads travel inside the shared buffers; a large one is
//! announced first, so that its receiver can refuse it before a byte of it is stored.

mod inbox;
mod outbox;
mod pool;

pub use inbox::{Batch, Inbox, Item, Received, Scratch};
pub use outbox::{Outbox, Payload, send_without_signals};
pub use pool::BufferPool;

#[cfg(test)]
mod tests;

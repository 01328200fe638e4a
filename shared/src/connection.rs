//! Sends and receives frames over a non-blocking stream socket. Clients, the supervisor and workers use this
//! module.
//!
//! [`Inbox`] stores the received part of an incomplete frame, and [`Outbox`] stores bytes that the socket has not
//! accepted yet. An idle inbox holds no memory, and an idle outbox holds at most a small buffer. One read can receive
//! many frames, and one write can send many.
//!
//! Small payloads are stored inline in shared buffers. A large payload is announced first, so that the
//! receiver can reject the payload before storing any of it.

mod inbox;
mod outbox;
mod pool;

pub use inbox::{Batch, Inbox, Item, Received, Scratch};
pub use outbox::{Outbox, Payload, disable_sendfile};
pub use pool::BufferPool;

#[cfg(test)]
mod tests;

//! Who may do what on the jobs socket.

use serde::Serialize;

/// `[[access]]`: what one user or group may do. Whoever fits no entry may do nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessConfig {
    /// Whom it is for, by the credentials of the peer.
    pub who: Who,
    /// Bulkheads that they may use, at least one, each in the file; `None`: all.
    pub bulkheads: Option<Vec<String>>,
    /// Tenants that their jobs may name, at least one; `None`: any, or none at all.
    pub tenants: Option<Vec<String>>,
}

/// A user or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// A user.
    Uid(u32),
    /// A group.
    Gid(u32),
}

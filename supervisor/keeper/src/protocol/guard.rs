//! The arguments of the guard, the message that it sends, and the version of the protocol. The guard is the process
//! between the keeper and an application that embeds a supervisor. `client::detached` starts the guard, and
//! `process::guard` implements it.

use bincode::{BorrowDecode, Encode};

use super::LayerSupport;

/// Second command-line argument of a keeper that has a guard. The third argument is then [`VERSION`].
pub(crate) const GUARDED_ARGUMENT: &str = "guarded";

/// Fourth command-line argument of a keeper that has a guard. Makes the guard report which layers of confinement the
/// machine supports.
pub(crate) const PROBE_ARGUMENT: &str = "first";

/// Version of the order and report formats. The messages themselves carry no version, because both ends are usually the
/// same program. If the keeper is a separate program, both versions must be equal.
pub(crate) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/2");

/// The only message that the guard sends. Carries a pidfd of the keeper and, if `ids` is `Ok`, a descriptor of the user
/// namespace.
#[derive(Debug, Encode, BorrowDecode)]
pub(crate) struct GuardReady {
    pub(crate) keeper: u32,
    pub(crate) layers: Vec<LayerSupport>,
    /// First and last subordinate ID, or the reason why there are no subordinate IDs.
    pub(crate) ids: Result<(u32, u32), String>,
}

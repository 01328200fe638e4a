//! Arguments and message of the guard, the process between an application that embeds a supervisor and the
//! keeper.

use bincode::{BorrowDecode, Encode};

use super::LayerSupport;

/// Second command-line argument of a keeper that is started with a guard. The third argument is [`VERSION`].
pub(crate) const GUARDED_ARGUMENT: &str = "guarded";

/// Fourth command-line argument of a keeper. Makes the guard report the layers that the machine supports.
pub(crate) const PROBE_ARGUMENT: &str = "first";

/// Version of the order and report formats. The messages themselves carry no version, because both ends are usually the
/// same program. If the keeper is a separate program, both versions must be equal.
pub(crate) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "/2");

/// The guard's only message. It carries the keeper's pidfd. If `ids` is `Ok`, it also carries a descriptor of the
/// user namespace.
#[derive(Debug, Encode, BorrowDecode)]
pub(crate) struct GuardReady {
    pub(crate) keeper: u32,
    pub(crate) layers: Vec<LayerSupport>,
    /// First and last subordinate ID, or the reason why there are no subordinate IDs.
    pub(crate) ids: Result<(u32, u32), String>,
}

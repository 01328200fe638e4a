//! Describes whether one layer of confinement is available on this machine, and why not. `probe` creates the
//! descriptions by trying the layers. `bulkhead-supervisor doctor` shows them, and `plane` decides from them which
//! layers a worker gets. This file itself probes nothing.

use bincode::{BorrowDecode, Encode};
use serde::Serialize;

/// A layer of confinement, and whether it is available.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Encode, BorrowDecode)]
pub struct LayerSupport {
    /// Name of the layer.
    pub layer: String,
    /// True if the layer is available.
    #[serde(rename = "available")]
    pub is_available: bool,
    /// Details about the layer if it is available, such as a version or a path.
    pub found: Option<String>,
    /// Reason why the layer is not available, for example a kernel error.
    pub why_not: Option<String>,
    /// Advice for an administrator on how to make the layer available.
    pub what_to_do: Option<String>,
}

impl LayerSupport {
    /// Creates the entry for `layer` from the result of a trial.
    pub fn of(layer: &str, tried: Result<Option<String>, String>, what_to_do: &str) -> Self {
        let is_available = tried.is_ok();
        let what_to_do = (!is_available).then(|| what_to_do.into());
        let (found, why_not) = match tried {
            Ok(found) => (found, None),
            Err(why_not) => (None, Some(why_not)),
        };
        Self { layer: layer.into(), is_available, found, why_not, what_to_do }
    }
}

//! Checks on the repository itself: the structure of the code, and links to and between documentation pages.

use std::path::{Path, PathBuf};

mod links;
mod structure;

/// Returns the root folder of the repository.
fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

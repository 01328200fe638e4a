//! Checks that a peer's HELLO frame offers a protocol version that the supervisor supports. The frame handlers of links
//! and sessions call this check for workers and clients. They check the other fields of the frame and close the
//! connection after an error.

use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION};
use bulkhead_shared::limits::truncate;

/// Checks that the supervisor supports one of the peer's protocol versions. If not, returns an error message
/// that ends with `help`.
pub(super) fn check_version(hello: &Hello<'_>, help: &str) -> Result<(), String> {
    let Hello { version_min, version_max, .. } = *hello;
    if (version_min..=version_max).contains(&PROTOCOL_VERSION) {
        return Ok(());
    }
    let (name, version) = (truncate(hello.name, 64), truncate(hello.version, 64));
    Err(format!(
        "{name} {version} supports protocol versions {version_min} to {version_max}, but this supervisor \
         supports version {PROTOCOL_VERSION}: {help}"
    ))
}

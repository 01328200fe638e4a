//! Connects to the NATS servers.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event};

use crate::names::escape;
use crate::server::refusals::Refusals;
use crate::settings::Nats;

/// Timeout for the first connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to wait for the response to a request.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum delay between attempts to reconnect.
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);

/// Error from the first connection attempt.
#[derive(Debug)]
pub struct ConnectError(String);

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConnectError {}

/// Connects to the servers. If `waits` is true, retries until a server is available.
pub(crate) async fn connect(nats: &Nats, name: &str, waits: bool) -> Result<Client, ConnectError> {
    Ok(connect_with_refusals(nats, name, waits).await?.0)
}

/// Connects like [`connect`]. Also returns a [`Refusals`] that records permission errors from the server.
pub(crate) async fn connect_with_refusals(
    nats: &Nats,
    name: &str,
    waits: bool,
) -> Result<(Client, Refusals), ConnectError> {
    let refusals = Refusals::new();
    let recorded = refusals.clone();
    let servers = nats.servers.join(",");
    let fail = |error: &dyn fmt::Display| ConnectError(format!("failed to connect to {servers}: {error}"));
    let mut options = credentials(nats).await?;
    options = options
        .name(name)
        .ping_interval(nats.ping)
        .request_timeout(Some(REQUEST_TIMEOUT))
        .connection_timeout(CONNECT_TIMEOUT)
        .reconnect_delay_callback(|attempts| {
            RECONNECT_DELAY_MAX.min(Duration::from_millis(50) * u32::try_from(attempts).unwrap_or(u32::MAX))
        })
        .event_callback(move |event| {
            report(&event);
            if let Event::ServerError(error) = &event {
                recorded.report(&error.to_string());
            }
            async {}
        });
    if let Some(tenant) = &nats.tenant {
        options = options.custom_inbox_prefix(format!("_INBOX_{}", escape(tenant)));
    }
    if let Some(ca) = &nats.ca {
        std::fs::metadata(ca)
            .map_err(|error| ConnectError(format!("failed to read {}: {error}", ca.display())))?;
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if waits {
        options = options.retry_on_initial_connect();
    }
    let client = options.connect(&nats.servers).await.map_err(|error| fail(&error))?;
    Ok((client, refusals))
}

async fn credentials(nats: &Nats) -> Result<ConnectOptions, ConnectError> {
    let options = ConnectOptions::new();
    if let Some(file) = &nats.credentials {
        check_secret(file)?;
        let read = options.credentials_file(file).await;
        return read.map_err(|error| ConnectError(format!("failed to read {}: {error}", file.display())));
    }
    if let Some(file) = &nats.nkey {
        check_secret(file)?;
        let seed = std::fs::read_to_string(file)
            .map_err(|error| ConnectError(format!("failed to read {}: {error}", file.display())))?;
        return Ok(options.nkey(seed.trim().to_owned()));
    }
    Ok(options)
}

/// Returns an error if a file with secrets is accessible to its group or to other users.
fn check_secret(file: &Path) -> Result<(), ConnectError> {
    let metadata = std::fs::metadata(file)
        .map_err(|error| ConnectError(format!("failed to read {}: {error}", file.display())))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(ConnectError(format!(
            "{} has mode {mode:04o}, so other users can read the secret; run: chmod 600 {}",
            file.display(),
            file.display()
        )));
    }
    Ok(())
}

fn report(event: &Event) {
    match event {
        Event::Connected => tracing::info!("connected to a fleet server"),
        Event::Disconnected => tracing::warn!("the connection to the server was lost; reconnecting"),
        other => tracing::warn!("server connection: {other}"),
    }
}

//! Connects to the NATS servers with the configured credentials, and reports when a connection is lost. The agent, its
//! lanes, submitters and operators each open a connection here. `async-nats` reconnects.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event};
use tokio::sync::watch;

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
    connect_with(nats, name, waits, |_| {}).await
}

/// Connects to the servers. Also returns a [`Refusals`] that receives permission errors from the server.
pub(crate) async fn connect_with_refusals(
    nats: &Nats,
    name: &str,
) -> Result<(Client, Refusals), ConnectError> {
    let refusals = Refusals::new();
    let receiver = refusals.clone();
    let client = connect_with(nats, name, false, move |event| {
        if let Event::ServerError(error) = event {
            receiver.report(&error.to_string());
        }
    });
    Ok((client.await?, refusals))
}

/// Receiver that is notified when a connection is lost.
#[derive(Clone, Debug)]
pub(crate) struct Loss(watch::Receiver<bool>);

impl Loss {
    /// Returns true if the connection has been lost, even if the client has already reconnected.
    pub(crate) fn has_happened(&self) -> bool {
        // If the client's task has panicked, the sender has been dropped, and the connection counts as lost.
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits until the connection is lost.
    pub(crate) async fn happens(&mut self) {
        let _ = self.0.wait_for(|is_lost| *is_lost).await;
    }
}

/// Connects like [`connect`], and retries until a server is available. Also returns a [`Loss`] for the connection.
pub(crate) async fn connect_with_loss(nats: &Nats, name: &str) -> Result<(Client, Loss), ConnectError> {
    let (sender, receiver) = watch::channel(false);
    let client = connect_with(nats, name, true, move |event| {
        if matches!(event, Event::Disconnected) {
            sender.send_replace(true);
        }
    });
    Ok((client.await?, Loss(receiver)))
}

async fn connect_with(
    nats: &Nats,
    name: &str,
    waits: bool,
    on_event: impl Fn(&Event) + Send + Sync + 'static,
) -> Result<Client, ConnectError> {
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
            on_event(&event);
            async {}
        });
    if let Some(tenant) = &nats.tenant {
        options = options.custom_inbox_prefix(format!("_INBOX_{}", escape(tenant)));
    }
    // Applies to all servers, because the addresses that a server announces to its clients do not begin with `tls://`.
    options = options.require_tls(nats.requires_tls());
    if let Some(ca) = &nats.ca {
        std::fs::metadata(ca)
            .map_err(|error| ConnectError(format!("failed to read {}: {error}", ca.display())))?;
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if waits {
        options = options.retry_on_initial_connect();
    }
    options.connect(&nats.servers).await.map_err(|error| fail(&error))
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
        Event::Closed => tracing::debug!("closed a connection to a fleet server"),
        other => tracing::warn!("server connection: {other}"),
    }
}

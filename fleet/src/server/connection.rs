//! Connects to the NATS servers with the configured credentials, and reports when a connection is lost. Also checks the
//! files with credentials. The agent, its lanes, submitters and operators each open a connection here. `async-nats`
//! reconnects.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event};
use nkeys::{KeyPair, KeyPairType};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::names::escape;
use crate::server::refusals::Refusals;
use crate::settings::Nats;

/// Timeout for a connection attempt to one server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a submitter retries its first connection. A server can restart during this time.
const CONNECT_RETRY_TIMEOUT: Duration = Duration::from_secs(15);
/// Delay between two attempts of a submitter to open its first connection.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(250);
/// Maximum time to wait for the response to a request.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum delay between attempts to reconnect.
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);

/// First line of a certificate in a PEM file.
const CERTIFICATE: &[u8] = b"-----BEGIN CERTIFICATE-----";

/// Error from the first connection attempt, or from the files that it needs.
#[derive(Debug)]
pub struct ConnectError {
    message: String,
    /// True if a later attempt can succeed without a change of the configuration.
    is_temporary: bool,
}

impl ConnectError {
    fn permanent(message: String) -> Self {
        Self { message, is_temporary: false }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ConnectError {}

/// Connects to the servers. If `waits` is true, retries until a server is available.
pub(crate) async fn connect(nats: &Nats, name: &str, waits: bool) -> Result<Client, ConnectError> {
    connect_with(nats, name, waits, |_| {}).await
}

/// Connects to the servers, and retries for up to [`CONNECT_RETRY_TIMEOUT`] if no server is available. Also returns a
/// [`Refusals`] that receives permission errors from the server.
pub(crate) async fn connect_with_refusals(
    nats: &Nats,
    name: &str,
) -> Result<(Client, Refusals), ConnectError> {
    let refusals = Refusals::new();
    let mut last_error = None;
    let attempts = async {
        loop {
            let receiver = refusals.clone();
            let client = connect_with(nats, name, false, move |event| {
                if let Event::ServerError(error) = event {
                    receiver.report(&error.to_string());
                }
            });
            match client.await {
                Err(error) if error.is_temporary => last_error = Some(error.message),
                result => return result,
            }
            sleep(CONNECT_RETRY_DELAY).await;
        }
    };
    match timeout(CONNECT_RETRY_TIMEOUT, attempts).await {
        Ok(result) => Ok((result?, refusals)),
        Err(_) => {
            let seconds = CONNECT_RETRY_TIMEOUT.as_secs();
            let cause = last_error.unwrap_or_else(|| connect_message(nats, &"no response"));
            Err(ConnectError { message: format!("{cause} (tried for {seconds} s)"), is_temporary: true })
        }
    }
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
    let mut options = credentials(nats)?;
    check_certificates(nats)?;
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
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if waits {
        options = options.retry_on_initial_connect();
    }
    options.connect(&nats.servers).await.map_err(|error| ConnectError {
        message: connect_message(nats, &error),
        is_temporary: matches!(
            error.kind(),
            ConnectErrorKind::Dns
                | ConnectErrorKind::TimedOut
                | ConnectErrorKind::Io
                | ConnectErrorKind::MaxReconnects
        ),
    })
}

fn connect_message(nats: &Nats, cause: &dyn fmt::Display) -> String {
    format!("failed to connect to {}: {cause}", nats.servers.join(","))
}

/// Checks the files that the settings name, without connecting to a server. Each connection checks them again.
pub fn check_files(nats: &Nats) -> Result<(), ConnectError> {
    credentials(nats)?;
    check_certificates(nats)
}

fn credentials(nats: &Nats) -> Result<ConnectOptions, ConnectError> {
    let options = ConnectOptions::new();
    if let Some(file) = &nats.credentials {
        let text = read_secret(file)?;
        return options.credentials(&text).map_err(|error| {
            let file = file.display();
            ConnectError::permanent(format!(
                "{file} does not contain the JWT and the seed of a user: {error}"
            ))
        });
    }
    if let Some(file) = &nats.nkey {
        let seed = read_secret(file)?.trim().to_owned();
        let cause = match KeyPair::from_seed(&seed) {
            Ok(pair) if pair.key_pair_type() == KeyPairType::User => return Ok(options.nkey(seed)),
            Ok(_) => "the NKey does not belong to a user".to_owned(),
            Err(error) => error.to_string(),
        };
        let message = format!("{} does not contain the seed of a user's NKey: {cause}", file.display());
        return Err(ConnectError::permanent(message));
    }
    Ok(options)
}

fn check_certificates(nats: &Nats) -> Result<(), ConnectError> {
    let Some(file) = &nats.ca else { return Ok(()) };
    let text = std::fs::read(file).map_err(|error| unreadable(file, &error))?;
    if text.windows(CERTIFICATE.len()).any(|part| part == CERTIFICATE) {
        return Ok(());
    }
    Err(ConnectError::permanent(format!("{} does not contain a PEM certificate", file.display())))
}

/// Reads a file with secrets. Returns an error if the file is accessible to its group or to other users.
fn read_secret(file: &Path) -> Result<String, ConnectError> {
    let metadata = std::fs::metadata(file).map_err(|error| unreadable(file, &error))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(ConnectError::permanent(format!(
            "{} has mode {mode:04o}, so other users can read the secret; run: chmod 600 {}",
            file.display(),
            file.display()
        )));
    }
    std::fs::read_to_string(file).map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &std::io::Error) -> ConnectError {
    ConnectError::permanent(format!("failed to read {}: {error}", file.display()))
}

fn report(event: &Event) {
    match event {
        Event::Connected => tracing::info!("connected to a fleet server"),
        Event::Disconnected => tracing::warn!("the connection to the server was lost; reconnecting"),
        Event::Closed => tracing::debug!("closed a connection to a fleet server"),
        other => tracing::warn!("server connection: {other}"),
    }
}

//! Reads and checks the configuration file `fleet.toml`, and formats the effective settings. The agent and the commands
//! use these [`Settings`]. The limits of a bulkhead's workers are in the supervisor's own configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_nats::ServerAddr;
use bulkhead_linux::runtime_dir;
use serde::{Deserialize, Deserializer};

use crate::names::LANES;

/// Longest duration that the configuration accepts.
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Contents of `fleet.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Settings for the connection to the servers.
    pub nats: Nats,
    /// Settings of the agent on this host.
    #[serde(default)]
    pub agent: Agent,
    /// Settings of the fleet's streams. These settings must be the same on all hosts.
    #[serde(default)]
    pub streams: Streams,
    /// Settings of the fleet's bulkheads, by name. An agent serves only bulkheads that its supervisor also has.
    #[serde(default)]
    pub bulkhead: BTreeMap<String, Bulkhead>,
}

/// Settings for the connection to the servers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nats {
    /// Addresses of the servers.
    pub servers: Vec<String>,
    /// File with a user's credentials (JWT and seed).
    pub credentials: Option<PathBuf>,
    /// File with the seed of an NKey.
    pub nkey: Option<PathBuf>,
    /// PEM file with CA certificates. The default is the system's certificates.
    pub ca: Option<PathBuf>,
    /// Tenant that the user belongs to. The tenant's permissions require an inbox prefix that contains the tenant's
    /// name.
    pub tenant: Option<String>,
    /// Interval between pings. The connection is closed after two unanswered pings.
    #[serde(default = "ping", deserialize_with = "duration")]
    pub ping: Duration,
}

/// Settings of the agent on one host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Agent {
    /// Name of the host, unique within the fleet. The default is the machine's name.
    pub name: Option<String>,
    /// Jobs socket of the supervisor.
    pub socket: Option<PathBuf>,
    /// Admin socket of the supervisor. The default is `admin.sock` in the same folder as the jobs socket.
    pub admin: Option<PathBuf>,
    /// Address at which the agent serves metrics and health checks. `None` disables the HTTP server.
    pub http: Option<std::net::SocketAddr>,
    /// Maximum time that a stopping agent waits for jobs in progress.
    #[serde(deserialize_with = "duration")]
    pub drain_timeout: Duration,
}

/// Settings of the fleet's streams.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Streams {
    /// Number of replicas: 1, 3 or 5.
    pub replicas: u32,
    /// Maximum total size of all waiting jobs, in bytes.
    #[serde(deserialize_with = "size")]
    pub max_bytes: u64,
    /// Maximum total size of all records, in bytes.
    #[serde(deserialize_with = "size")]
    pub ledger_max_bytes: u64,
    /// Maximum total size of all dead letters, in bytes. When the limit is reached, the oldest dead letters are
    /// deleted.
    #[serde(deserialize_with = "size")]
    pub dead_max_bytes: u64,
    /// Time without a heartbeat after which a host is considered lost.
    #[serde(deserialize_with = "duration")]
    pub host_lost_after: Duration,
    /// Retention time for records in the ledger.
    #[serde(deserialize_with = "duration")]
    pub ledger_keep: Duration,
    /// Retention time for dead letters.
    #[serde(deserialize_with = "duration")]
    pub dead_keep: Duration,
    /// Maximum number of jobs that one tenant can have waiting in one bulkhead.
    pub tenant_backlog: u32,
}

/// Settings of a bulkhead in the fleet.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Bulkhead {
    /// Fraction of the supervisor's permits that the fleet's jobs can use, above 0 and at most 1.
    pub share: f64,
    /// Number of lanes: 1, 2, 4, 8 or 16. Each lane is a separate consumer, which delivers the jobs of some of the
    /// tenants. The lanes take turns.
    pub lanes: u8,
    /// Maximum number of attempts to run an idempotent job.
    pub attempts: u32,
    /// Maximum deadline of a job. Also used as the default deadline.
    #[serde(deserialize_with = "duration")]
    pub deadline_max: Duration,
}

impl Default for Agent {
    fn default() -> Self {
        let drain_timeout = Duration::from_secs(30);
        Self { name: None, socket: None, admin: None, http: None, drain_timeout }
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            replicas: 1,
            max_bytes: 10 << 30,
            ledger_max_bytes: 20 << 30,
            dead_max_bytes: 1 << 30,
            host_lost_after: Duration::from_secs(20),
            ledger_keep: Duration::from_secs(6 * 3600),
            dead_keep: Duration::from_secs(14 * 24 * 3600),
            tenant_backlog: 1000,
        }
    }
}

impl Default for Bulkhead {
    fn default() -> Self {
        Self { share: 1.0, lanes: 1, attempts: 3, deadline_max: Duration::from_secs(3600) }
    }
}

/// Errors in a configuration file.
#[derive(Debug)]
pub struct SettingsError(Vec<String>);

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for SettingsError {}

impl Settings {
    /// Reads a configuration file. Relative paths are resolved against the file's folder. Reports all errors at once.
    pub fn read(file: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| SettingsError(vec![format!("failed to read {}: {error}", file.display())]))?;
        let mut settings: Self = toml::from_str(&text).map_err(|error| {
            SettingsError(vec![format!("{}: {}", file.display(), error.to_string().trim_end())])
        })?;
        settings.resolve_paths(file.parent().unwrap_or(Path::new(".")));
        let errors = settings.errors();
        if errors.is_empty() {
            return Ok(settings);
        }
        Err(SettingsError(errors.into_iter().map(|error| format!("{}: {error}", file.display())).collect()))
    }

    fn resolve_paths(&mut self, folder: &Path) {
        let Self { nats, agent, .. } = self;
        let paths =
            [&mut nats.credentials, &mut nats.nkey, &mut nats.ca, &mut agent.socket, &mut agent.admin];
        paths.into_iter().flatten().for_each(|path| *path = folder.join(&*path));
    }

    /// Returns one message for each rule that the settings violate.
    fn errors(&self) -> Vec<String> {
        let mut errors = self.nats.errors();
        errors.extend(self.streams.errors());
        for (name, bulkhead) in &self.bulkhead {
            errors
                .extend(bulkhead.errors(&self.streams).into_iter().map(|e| format!("[bulkhead.{name}] {e}")));
            let is_name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b);
            if !(1..=64).contains(&name.len()) || !name.bytes().all(is_name) {
                errors.push(format!(
                    "[bulkhead.{name}] is not a valid bulkhead name: use 1 to 64 characters from a-z, 0-9, '.', '_' and '-'"
                ));
            }
        }
        errors
    }

    /// Formats the effective settings as a configuration file.
    pub fn to_toml(&self) -> String {
        let (socket, admin) = self.supervisor();
        let (nats, agent, streams) = (&self.nats, &self.agent, &self.streams);
        let mut text = "[nats]\n".to_owned();
        push(&mut text, "servers", Some(format!("{:?}", nats.servers)));
        push(&mut text, "credentials", nats.credentials.as_deref().map(path));
        push(&mut text, "nkey", nats.nkey.as_deref().map(path));
        push(&mut text, "ca", nats.ca.as_deref().map(path));
        push(&mut text, "tenant", nats.tenant.as_ref().map(|tenant| format!("{tenant:?}")));
        push(&mut text, "ping", Some(time(nats.ping)));
        text.push_str("\n[agent]\n");
        push(&mut text, "name", Some(format!("{:?}", self.host())));
        push(&mut text, "socket", Some(path(&socket)));
        push(&mut text, "admin", Some(path(&admin)));
        push(&mut text, "http", agent.http.map(|address| format!("\"{address}\"")));
        push(&mut text, "drain_timeout", Some(time(agent.drain_timeout)));
        text.push_str("\n[streams]\n");
        push(&mut text, "replicas", Some(streams.replicas.to_string()));
        push(&mut text, "max_bytes", Some(streams.max_bytes.to_string()));
        push(&mut text, "ledger_max_bytes", Some(streams.ledger_max_bytes.to_string()));
        push(&mut text, "dead_max_bytes", Some(streams.dead_max_bytes.to_string()));
        push(&mut text, "host_lost_after", Some(time(streams.host_lost_after)));
        push(&mut text, "ledger_keep", Some(time(streams.ledger_keep)));
        push(&mut text, "dead_keep", Some(time(streams.dead_keep)));
        push(&mut text, "tenant_backlog", Some(streams.tenant_backlog.to_string()));
        for (name, bulkhead) in &self.bulkhead {
            text.push_str(&format!("\n[bulkhead.{name:?}]\n"));
            push(&mut text, "share", Some(format!("{:?}", bulkhead.share)));
            push(&mut text, "lanes", Some(bulkhead.lanes.to_string()));
            push(&mut text, "attempts", Some(bulkhead.attempts.to_string()));
            push(&mut text, "deadline_max", Some(time(bulkhead.deadline_max)));
        }
        text
    }

    /// Returns the name of this host.
    pub fn host(&self) -> String {
        self.agent.name.clone().unwrap_or_else(machine_name)
    }

    /// Returns the paths of the supervisor's jobs socket and admin socket.
    pub fn supervisor(&self) -> (PathBuf, PathBuf) {
        let socket = self.agent.socket.clone().unwrap_or_else(default_socket);
        let admin = self.agent.admin.clone().unwrap_or_else(|| socket.with_file_name("admin.sock"));
        (socket, admin)
    }
}

impl Nats {
    /// Creates settings for a connection without credentials.
    pub fn new(servers: Vec<String>) -> Self {
        Self { servers, credentials: None, nkey: None, ca: None, tenant: None, ping: ping() }
    }

    /// Returns true if the address of at least one server begins with `tls://`.
    pub(crate) fn requires_tls(&self) -> bool {
        self.servers.iter().any(|server| server.trim_start().to_ascii_lowercase().starts_with("tls://"))
    }

    fn errors(&self) -> Vec<String> {
        let mut errors = Vec::new();
        if self.servers.is_empty() {
            errors.push("[nats] servers is empty: add a server, such as \"nats://127.0.0.1:4222\"".into());
        }
        errors.extend(self.servers.iter().filter_map(|server| address_error(server)));
        if self.credentials.is_some() && self.nkey.is_some() {
            errors.push("[nats] sets both credentials and nkey: remove one of the two keys".into());
        }
        if self.ca.is_some() && !self.requires_tls() {
            errors.push("[nats] ca requires server addresses that begin with tls://".into());
        }
        if self.ping < Duration::from_millis(100) {
            errors.push("[nats] ping is below 100ms: use a longer time".into());
        }
        errors
    }
}

/// Returns a message if the address of a server is not valid.
fn address_error(address: &str) -> Option<String> {
    let cause = match address.parse::<ServerAddr>() {
        Ok(server) if !server.is_websocket() => return None,
        Ok(_) => "WebSocket connections are not supported".to_owned(),
        Err(error) => error.to_string(),
    };
    Some(format!(
        "[nats] servers contains {address:?}: {cause}; use an address such as \"nats://127.0.0.1:4222\" or \
         \"tls://n1:4222\""
    ))
}

impl Streams {
    /// Returns the time after which the server redelivers an unacknowledged message.
    pub fn ack_wait(&self) -> Duration {
        self.host_lost_after / 2
    }

    fn errors(&self) -> Vec<String> {
        let mut errors = Vec::new();
        if ![1, 3, 5].contains(&self.replicas) {
            errors.push(format!("[streams] replicas = {}: use 1, 3 or 5", self.replicas));
        }
        if self.host_lost_after < Duration::from_secs(2) {
            errors.push(
                "[streams] host_lost_after is below 2s: short pauses would look like lost hosts".into(),
            );
        }
        for (key, bytes) in [
            ("max_bytes", self.max_bytes),
            ("ledger_max_bytes", self.ledger_max_bytes),
            ("dead_max_bytes", self.dead_max_bytes),
        ] {
            if bytes < 64 << 10 {
                errors.push(format!("[streams] {key} is below 64KiB: no job would fit"));
            }
        }
        if self.tenant_backlog == 0 {
            errors.push("[streams] tenant_backlog is 0: no tenant could submit a job".into());
        }
        for (key, time) in [("ledger_keep", self.ledger_keep), ("dead_keep", self.dead_keep)] {
            if time < Duration::from_secs(60) {
                errors.push(format!("[streams] {key} is below 1m: use a longer time"));
            }
        }
        errors
    }
}

impl Bulkhead {
    fn errors(&self, streams: &Streams) -> Vec<String> {
        let mut errors = Vec::new();
        if !(self.share > 0.0 && self.share <= 1.0) {
            errors.push(format!("share = {}: use a number above 0 and at most 1", self.share));
        }
        if !self.lanes.is_power_of_two() || self.lanes > LANES {
            errors.push(format!("lanes = {}: use 1, 2, 4, 8 or {LANES}", self.lanes));
        }
        if self.attempts == 0 {
            errors.push("attempts = 0: the first run counts, so use at least 1".into());
        }
        if self.deadline_max + streams.host_lost_after >= streams.ledger_keep {
            errors.push(
                "deadline_max and host_lost_after together must be below ledger_keep, so that no record expires \
                 before its job ends: lower deadline_max, or raise ledger_keep"
                    .into(),
            );
        }
        if self.deadline_max.is_zero() {
            errors.push("deadline_max is zero: use a longer time".into());
        }
        errors
    }
}

/// Appends a line that sets `key` to `value`. Does nothing if `value` is `None`.
fn push(text: &mut String, key: &str, value: Option<String>) {
    if let Some(value) = value {
        text.push_str(&format!("{key} = {value}\n"));
    }
}

fn path(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

fn time(time: Duration) -> String {
    format!("\"{}\"", humantime::format_duration(time))
}

fn ping() -> Duration {
    Duration::from_secs(5)
}

fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    let time = humantime::parse_duration(&text).map_err(|error| {
        serde::de::Error::custom(format!("{error}; use a duration such as \"500ms\", \"2s\" or \"1h 30m\""))
    })?;
    if time > TIME_MAX {
        return Err(serde::de::Error::custom("the duration is longer than a year"));
    }
    Ok(time)
}

/// Size units in bytes.
const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Bytes(u64),
        Text(String),
    }
    let parse = |text: &str| {
        let (number, factor) = UNITS
            .iter()
            .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
            .unwrap_or((text, 1));
        number.trim().parse::<u64>().ok()?.checked_mul(factor)
    };
    let size = match Written::deserialize(from)? {
        Written::Bytes(bytes) => Some(bytes),
        Written::Text(text) => parse(&text),
    };
    size.filter(|size| *size <= i64::MAX as u64).ok_or_else(|| {
        serde::de::Error::custom("use a size such as \"64KiB\", \"512MiB\" or a number of bytes")
    })
}

fn machine_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn default_socket() -> PathBuf {
    runtime_dir::of_process().join("bulkhead/jobs.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Settings, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("fleet.toml");
        std::fs::write(&file, text).unwrap();
        Settings::read(&file).map_err(|error| error.to_string())
    }

    const SERVERS: &str = "[nats]\nservers = [\"nats://127.0.0.1:4222\"]\n";

    #[test]
    fn documented_fleet_example_is_valid() {
        let page = include_str!("../../docs/fleet.md");
        let example = page.split("```toml fleet.toml\n").nth(1).unwrap().split("```").next().unwrap();
        let settings = read(example).unwrap();
        assert_eq!(settings.streams.replicas, 3);
        assert_eq!(settings.bulkhead["thumbnail"].lanes, 4);
        let printed = settings.to_toml();
        assert_eq!(read(&printed).unwrap().to_toml(), printed);
        assert!(settings.nats.ca.unwrap().is_absolute());
    }

    #[test]
    fn every_violated_rule_is_reported() {
        let text = format!(
            "{SERVERS}[streams]\nreplicas = 2\nhost_lost_after = \"1s\"\nmax_bytes = 100\ntenant_backlog = 0\n\
             ledger_keep = \"30m\"\n[bulkhead.B]\nshare = 0.0\nlanes = 3\nattempts = 0\n"
        );
        let errors = read(&text).unwrap_err();
        for part in [
            "replicas = 2",
            "host_lost_after is",
            "max_bytes is",
            "tenant_backlog is",
            "share = 0",
            "lanes = 3",
            "attempts = 0",
            "ledger_keep",
            "is not a valid bulkhead name",
        ] {
            assert!(errors.contains(part), "{part}: {errors}");
        }
        assert!(errors.lines().all(|line| line.contains("fleet.toml: ")), "{errors}");
    }

    #[test]
    fn parse_errors_give_the_line() {
        for (line, part) in [
            ("[agent]\ndrain_timeout = \"soon\"", "use a duration such as"),
            ("[streams]\nmax_bytes = \"10GB\"", "use a size such as"),
            ("[streams]\nreplica = 3", "unknown field `replica`"),
            ("[agent]\nhttp = \"9466\"", "http"),
        ] {
            let error = read(&format!("{SERVERS}{line}\n")).unwrap_err();
            assert!(error.contains(part) && error.contains("line 4"), "{error}");
        }
    }

    #[test]
    fn credentials_and_nkey_are_mutually_exclusive() {
        let error = read(&format!("{SERVERS}credentials = \"a\"\nnkey = \"b\"\nca = \"c\"\n")).unwrap_err();
        assert!(error.contains("both credentials and nkey") && error.contains("tls://"), "{error}");
    }
}

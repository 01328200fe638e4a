//! Reads and validates the configuration file, and defines the meaning and default of each key. Returns either plain
//! values or all errors at once. This crate does not start processes or change files.
//!
//! Data flow: `loading` reads the files into `sources`. `reader` and `values` read each key as declared in `keys`, and
//! `file` holds the values and their positions. `relations` then checks rules that span several keys, and `programs`
//! checks files on disk. The result is either a [`Config`] or the problems that `diagnostics` has collected, as
//! [`ConfigErrors`].

mod checked;
pub mod defaults;
mod diagnostics;
mod file;
mod identities;
mod ids;
mod json_schema;
mod key;
mod keys;
mod loading;
mod programs;
mod reader;
mod relations;
mod resolved;
mod rlimits;
mod schema;
mod sources;
mod summary;
mod syntax;
mod system_calls;
mod table;
#[cfg(test)]
mod tests;
mod token;
mod units;
mod values;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

pub use bulkhead_linux::rlimits::Resource;
pub use bulkhead_policy::{
    AdaptiveLimits as AdaptiveConfig, AdaptiveMode, BreakerLimits as BreakerConfig, Health, Overflow,
    PoisonLimits as PoisonConfig, Pressure as PressureConfig, RateLimit as RateLimitConfig, RatePer, Recycle,
    Restart, RestartPolicy, RetryLimits as RetryConfig, Start, StartMode,
};
pub use checked::{Config, OTHER_TENANTS};
use diagnostics::Problems;
pub use diagnostics::{ConfigErrors, Position, Problem};
pub use ids::UidRange;
pub use json_schema::json_schema;
pub use key::{DefaultValue, Key, Kind, OnReload};
pub use keys::access::{AccessConfig, Role, TokenFile, Who};
pub use keys::admission::PriorityConfig;
pub use keys::bulkhead::{BulkheadConfig, Program};
pub use keys::confinement::{CgroupConfig, Layer, Network, Profile, SandboxConfig, SandboxUser};
pub use keys::exec::{ExitStatus, Files};
pub use keys::supervisor::{HttpConfig, SupervisorConfig};
pub use keys::tenants::{IsolationConfig, TenantConfig, TenantsConfig};
pub use relations::admission::{overflow_needs_queue, pressure_needs_queue};
pub use rlimits::Rlimit;
pub use schema::{needs_restart, reference, replaces_workers};
use sources::Sources;
pub use summary::WorkerIds;
pub use token::Token;
pub use units::{format_duration, format_size};

/// Reads and validates a configuration file, together with the files in the folder `conf.d` next to it.
///
/// Files in `conf.d` whose names end in `.toml` add bulkheads and access rules, in the order of their names. These
/// files must be writable only by root and the supervisor's user. The programs, libraries and folders named in the
/// files must exist. Changes nothing on disk.
///
/// # Errors
///
/// Returns all problems in the files, or the reasons why files cannot be read.
///
/// ```
/// use bulkhead_config as config;
/// let errors = config::load("/nonexistent/workers.toml".as_ref()).unwrap_err();
/// assert!(errors.to_string().contains("/nonexistent/workers.toml"));
/// ```
pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
    let (sources, problems) = loading::read(path)?;
    check(sources, problems, &ProcessEnv::of_process())
}

/// Reads and validates a configuration file for an embedded supervisor. Unlike [`load`], this function rejects keys
/// that configure sockets, because an embedded supervisor has none.
///
/// # Errors
///
/// Returns all problems in the files, or the reasons why files cannot be read.
pub fn load_embedded(path: &Path) -> Result<Config, ConfigErrors> {
    let (sources, problems) = loading::read(path)?;
    check(sources, problems, &ProcessEnv { is_embedded: true, ..ProcessEnv::of_process() })
}

/// Returns the default path of the configuration file, which is used if the command line does not specify a path. The
/// path is the value of `BULKHEAD_CONFIG`, or `/etc/bulkhead/workers.toml` for root, or `bulkhead/workers.toml` in the
/// user's configuration folder (`XDG_CONFIG_HOME`, or `~/.config`). Returns `None` if the user has no such folder.
pub fn default_path() -> Option<PathBuf> {
    default_path_in(rustix::process::geteuid().is_root(), |name| std::env::var_os(name))
}

fn default_path_in(is_root: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = set(defaults::CONFIG_VARIABLE) {
        return Some(path);
    }
    if is_root {
        return Some(defaults::CONFIG_OF_ROOT.into());
    }
    // A relative XDG_CONFIG_HOME is ignored, as the XDG specification requires.
    let folder = set("XDG_CONFIG_HOME").filter(|folder| folder.is_absolute());
    Some(folder.or_else(|| Some(set("HOME")?.join(".config")))?.join(defaults::CONFIG_OF_USER))
}

/// Validates `text` as the contents of a configuration file at `path`, which does not have to exist. Relative paths in
/// the text are resolved against the folder of `path`. The folder `conf.d` is not read.
///
/// # Errors
///
/// Returns all problems in the text.
///
/// ```
/// use bulkhead_config as config;
/// let text = "
///     [supervisor]
///     socket = '/run/bulkhead/jobs.sock'
///     [bulkhead.upper]
///     exec = ['tr', 'a-z', 'A-Z']
/// ";
/// let config = config::parse(text, "/etc/workers.toml".as_ref())?;
/// assert_eq!(config.bulkheads[0].processes, 1);
///
/// let errors = config::parse(&text.replace("exec", "exce"), "/etc/workers.toml".as_ref()).unwrap_err();
/// assert_eq!(errors.problems()[0].help.as_deref(), Some("did you mean `exec`?"));
/// # Ok::<(), config::ConfigErrors>(())
/// ```
pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigErrors> {
    parse_in(text, path, &ProcessEnv::of_process())
}

/// Validates the text of a configuration file for an embedded supervisor. Keys that configure sockets are
/// rejected, because an embedded supervisor has none.
///
/// # Errors
///
/// Returns all problems in the text.
///
/// ```
/// use bulkhead_config as config;
/// let text = "
///     [bulkhead.upper]
///     exec = ['tr', 'a-z', 'A-Z']
/// ";
/// let config = config::parse_embedded(text, "/etc/workers.toml".as_ref())?;
/// assert!(config.supervisor.socket.as_os_str().is_empty());
/// # Ok::<(), config::ConfigErrors>(())
/// ```
pub fn parse_embedded(text: &str, path: &Path) -> Result<Config, ConfigErrors> {
    parse_in(text, path, &ProcessEnv { is_embedded: true, ..ProcessEnv::of_process() })
}

/// Properties of the current process that affect how a configuration file is interpreted.
#[derive(Debug, Clone)]
struct ProcessEnv {
    root: bool,
    runtime_dir: Option<PathBuf>,
    search_path: Option<OsString>,
    /// Folder that contains the credentials of a systemd unit (`CREDENTIALS_DIRECTORY`).
    credentials: Option<PathBuf>,
    /// True for an embedded supervisor, which has no sockets.
    is_embedded: bool,
}

impl ProcessEnv {
    fn of_process() -> Self {
        Self {
            root: rustix::process::geteuid().is_root(),
            runtime_dir: bulkhead_linux::runtime_dir::of_user(),
            search_path: std::env::var_os("PATH"),
            credentials: std::env::var_os(defaults::CREDENTIALS_VARIABLE)
                .map(PathBuf::from)
                .filter(|folder| folder.is_absolute()),
            is_embedded: false,
        }
    }

    fn default_socket(&self) -> Option<PathBuf> {
        let base = if self.root {
            Some(PathBuf::from(defaults::RUNTIME_DIR_OF_ROOT))
        } else {
            self.runtime_dir.clone()
        };
        Some(base?.join(defaults::RUNTIME_FOLDER).join(defaults::SOCKET_NAME))
    }
}

fn parse_in(text: &str, path: &Path, process_env: &ProcessEnv) -> Result<Config, ConfigErrors> {
    check(loading::from_text(path, text)?, Problems::default(), process_env)
}

/// Checks the contents of all configuration files. `problems` contains the problems already found while the files were
/// being read.
fn check(sources: Sources, mut problems: Problems, process_env: &ProcessEnv) -> Result<Config, ConfigErrors> {
    let documents = loading::parse(&sources, &mut problems);
    if !problems.is_empty() {
        return Err(problems.into_errors(sources));
    }
    let document = loading::merge(&sources, documents, &mut problems);
    let raw = file::read(&document, &mut problems);
    let mut checker = relations::Checker { sources: &sources, process_env, problems: &mut problems };
    let config = checker.check(raw);
    if problems.is_empty() { Ok(config) } else { Err(problems.into_errors(sources)) }
}

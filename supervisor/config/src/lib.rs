//! Reads and validates the configuration file. Returns plain values, or all errors at once. Defines the
//! meaning and the default of each key. This crate only reads: it starts no process and changes no file.
//!
//! Data flow: `reader` and `values` read each key as its row in `keys` declares, and `file` holds the values
//! with their positions. `relations` then checks rules that span several keys, and `programs` checks files on
//! disk. The result is a [`Config`], or the problems that `diagnostics` has collected as [`ConfigErrors`].

mod checked;
pub mod defaults;
mod diagnostics;
mod file;
mod identities;
mod ids;
mod json_schema;
mod key;
mod keys;
mod programs;
mod reader;
mod relations;
mod resolved;
mod rlimits;
mod schema;
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
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

pub use bulkhead_linux::rlimits::Resource;
pub use bulkhead_policy::{
    AdaptiveLimits as AdaptiveConfig, AdaptiveMode, BreakerLimits as BreakerConfig, Health, Overflow,
    PoisonLimits as PoisonConfig, Pressure as PressureConfig, RateLimit as RateLimitConfig, RatePer, Recycle,
    Restart, RestartPolicy, RetryLimits as RetryConfig, Start, StartMode,
};
pub use checked::{Config, OTHER_TENANTS};
pub use diagnostics::{ConfigErrors, Position, Problem};
use diagnostics::{Problems, shown};
pub use ids::UidRange;
pub use json_schema::json_schema;
pub use key::{DefaultValue, Key, Kind, OnReload};
pub use keys::access::{AccessConfig, Who};
pub use keys::admission::PriorityConfig;
pub use keys::bulkhead::{BulkheadConfig, Program};
pub use keys::confinement::{CgroupConfig, Layer, Profile, SandboxConfig, SandboxUser};
pub use keys::exec::{ExitStatus, Files};
pub use keys::supervisor::{HttpConfig, SupervisorConfig};
pub use keys::tenants::{IsolationConfig, TenantConfig, TenantsConfig};
pub use relations::admission::{overflow_needs_queue, pressure_needs_queue};
pub use rlimits::Rlimit;
pub use schema::{needs_restart, reference, replaces_workers};
pub use summary::WorkerIds;
pub use token::Token;
use toml::de::DeTable;
pub use units::{format_duration, format_size};

/// Reads and validates a configuration file.
///
/// Also checks that the programs, libraries and folders that the file names exist. Creates and changes
/// nothing on disk.
///
/// # Errors
///
/// Returns all problems of the file, or the reason why the file cannot be read.
///
/// ```
/// use bulkhead_config as config;
/// let errors = config::load("/nonexistent/workers.toml".as_ref()).unwrap_err();
/// assert!(errors.to_string().contains("/nonexistent/workers.toml"));
/// ```
pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
    parse(&read(path)?, path)
}

/// Reads and validates a configuration file for an embedded supervisor. Keys that configure sockets are
/// rejected, because an embedded supervisor has none.
///
/// # Errors
///
/// Returns all problems of the file, or the reason why the file cannot be read.
pub fn load_embedded(path: &Path) -> Result<Config, ConfigErrors> {
    parse_embedded(&read(path)?, path)
}

fn read(path: &Path) -> Result<String, ConfigErrors> {
    let bytes = read_bounded(path).map_err(|error| {
        let message = format!("cannot read {}: {error}", shown(&path.to_string_lossy()));
        ConfigErrors::of_file(path, message, "pass a configuration file that this user can read")
    })?;
    if bytes.len() as u64 > defaults::FILE_BYTES_MAX {
        let max = units::format_size(defaults::FILE_BYTES_MAX);
        let message = format!("{} is larger than {max}", shown(&path.to_string_lossy()));
        return Err(ConfigErrors::of_file(
            path,
            message,
            "pass a configuration file, which is a text file in the TOML format",
        ));
    }
    String::from_utf8(bytes).map_err(|error| not_utf8(path, &error))
}

/// Reads at most one byte more than the maximum size, so that the caller can detect larger files. Does not
/// block on a FIFO.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    let kind = file.metadata()?;
    if !kind.is_file() {
        let what = if kind.is_dir() {
            "the path is a directory"
        } else {
            "the path is not a regular file; a pipe such as `<(...)` cannot be read again at a reload"
        };
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let mut bytes = Vec::new();
    file.take(defaults::FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn not_utf8(path: &Path, error: &std::string::FromUtf8Error) -> ConfigErrors {
    let at = error.utf8_error().valid_up_to();
    let byte = error.as_bytes().get(at).copied().unwrap_or_default();
    let mut problems = Problems::default();
    problems.report(
        at..at + 1,
        format!("the file is not UTF-8: byte 0x{byte:02x}"),
        "save the file as UTF-8, the only encoding of TOML",
    );
    // The lossy conversion does not change the text before the invalid byte, so the position is correct.
    problems.into_errors(path, &String::from_utf8_lossy(error.as_bytes()))
}

/// Validates the text of a configuration file that is, or will be, at `path`. Relative paths in the text are
/// resolved against the folder of `path`.
///
/// # Errors
///
/// Returns all problems of the text.
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
/// Returns all problems of the text.
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

/// Properties of the current process that affect the meaning of a configuration file.
#[derive(Debug, Clone)]
struct ProcessEnv {
    root: bool,
    runtime_dir: Option<PathBuf>,
    search_path: Option<OsString>,
    /// True for an embedded supervisor, which has no sockets.
    is_embedded: bool,
}

impl ProcessEnv {
    fn of_process() -> Self {
        // According to the XDG specification, a relative XDG_RUNTIME_DIR must be ignored.
        let runtime_dir =
            std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute());
        Self {
            root: rustix::process::geteuid().is_root(),
            runtime_dir,
            search_path: std::env::var_os("PATH"),
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
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let absolute = std::path::absolute(path).map_err(|error| {
        let message = format!("cannot find the folder of \"{}\": {error}", shown(&path.to_string_lossy()));
        ConfigErrors::of_file(path, message, "pass the absolute path of the configuration file")
    })?;
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    if folder.to_str().is_none() {
        // Paths in the checked configuration must be UTF-8, because they are also shown as text.
        let message = format!("the name of the folder \"{}\" is not UTF-8", shown(&folder.to_string_lossy()));
        return Err(ConfigErrors::of_file(
            path,
            message,
            "rename the folder, or move the file to another folder",
        ));
    }
    let mut problems = Problems::default();
    let (document, syntax_errors) = DeTable::parse_recoverable(text);
    syntax::report(text, &syntax_errors, &mut problems);
    if !problems.is_empty() {
        return Err(problems.into_errors(path, text));
    }
    let raw = file::read(document.get_ref(), &mut problems);
    let mut checker = relations::Checker { folder, process_env, problems: &mut problems };
    let config = checker.check(&absolute, raw);
    if problems.is_empty() { Ok(config) } else { Err(problems.into_errors(path, text)) }
}

//! Defines the description of a configuration key, with its kind of value, its default and the effect of a reload. The
//! reader of the file, error messages, the reference and the JSON schema use these descriptions. `keys` declares the
//! keys themselves, and `values` checks values against their kinds.

use std::fmt;
use std::time::Duration;

use bulkhead_linux::rlimits::Resource;
use serde::{Serialize, Serializer};

use super::rlimits::{Measure, meaning};
use super::{defaults, units};

pub(super) const TOP_LEVEL: &str = "";
pub(super) const ACCESS: &str = "access";
pub(super) const SUPERVISOR: &str = "supervisor";
pub(super) const BULKHEAD: &str = "bulkhead.NAME";
pub(super) const TENANTS: &str = "bulkhead.NAME.tenants";
pub(super) const TENANT: &str = "bulkhead.NAME.tenant.TENANT";
pub(super) const TENANT_RATE_LIMIT: &str = "bulkhead.NAME.tenant.TENANT.rate_limit";
pub(super) const RLIMITS: &str = "bulkhead.NAME.rlimits";

/// A key of the configuration file.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The table that contains the key: `supervisor`, `bulkhead.NAME`, `bulkhead.NAME.restart`, …
    pub table: &'static str,
    /// Name of the key within the table.
    pub name: &'static str,
    /// Kind of the value.
    pub kind: Kind,
    /// Default value, or a description of what the supervisor does if the key is absent.
    pub default: DefaultValue,
    /// Description of the key for the reference documentation.
    pub about: &'static str,
    /// Valid example value for a key without a default.
    pub(super) example: &'static str,
    /// Effect of a reload that changes the value of this key.
    pub on_reload: OnReload,
}

/// Kind of a configuration value. `Display` writes a short description, such as "a duration".
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A duration such as `"1m 30s"`, at least the given minimum and at most a year.
    Duration(Duration),
    /// A size such as `"64MiB"`, or a number of bytes.
    Size {
        /// Minimum size.
        min: u64,
        /// Maximum size.
        max: u64,
    },
    /// A whole number.
    Count {
        /// Minimum value.
        min: u64,
        /// Maximum value.
        max: u64,
    },
    /// A fraction between 0 and 1.
    Share {
        /// True if 0 is allowed.
        none: bool,
        /// True if 1 is allowed. Otherwise the value must be below 1.
        all: bool,
    },
    /// A number, possibly with a fractional part, that is above 0 and at most the given maximum.
    Number(u64),
    /// `true` or `false`.
    Boolean,
    /// `true`, `false`, or a table of permitted connections.
    Network,
    /// A file mode such as `"0600"`.
    Mode,
    /// A path. Relative paths are resolved against the folder of the configuration file.
    Path,
    /// Any other string.
    Text,
    /// A word from a fixed list.
    Word(&'static [&'static str]),
    /// An array of words from a fixed list.
    Words(&'static [&'static str]),
    /// A program and its arguments.
    Program,
    /// An ordered array of at most the given number of names.
    Names(usize),
    /// An array of at most the given number of paths. Relative paths are resolved against the folder of the
    /// configuration file.
    Paths(usize),
    /// A range of user IDs such as `"200000-200999"`.
    Ids,
    /// A table of environment variables, or of files that contain their values.
    Environment,
    /// An array of exit statuses.
    Statuses,
    /// A value for setrlimit(2).
    Limit(Resource),
    /// A table.
    Table,
    /// An array of at most the given number of tables.
    Tables(usize),
}

/// Value that applies if a key is absent, or a description of what the supervisor does in that case. `Display` writes
/// the value as TOML, or the description.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    /// A duration.
    Duration(Duration),
    /// A number of bytes.
    Size(u64),
    /// A number.
    Count(u64),
    /// A fraction.
    Share(f64),
    /// A number that can have a fractional part.
    Number(f64),
    /// `true` or `false`.
    Boolean(bool),
    /// A file mode, written in octal digits.
    Mode(u32),
    /// A word from a fixed list.
    Word(&'static str),
    /// A description of the default behaviour, for keys that have no default value or whose default is computed.
    Described(&'static str),
}

/// Effect of a reload that changes the value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnReload {
    /// The new value takes effect immediately.
    Applies,
    /// The workers are replaced, because they receive the value when they start or connect.
    ReplacesWorkers,
    /// The new value takes effect only after a restart of the supervisor.
    NeedsRestart,
}

/// Names that other systems use for a bulkhead's settings, such as `replicas`. Each name is listed with the keys that
/// correspond to it, and each key with its meaning.
pub(super) const SYNONYMS: &[(&str, &[(&str, &str)])] = &[
    (
        "timeout",
        &[("deadline", "the waiting and running time of a job"), ("run_limit", "the running time alone")],
    ),
    ("replicas", PROCESSES),
    ("workers", PROCESSES),
    ("concurrency", &[("max_in_flight", "concurrent jobs in each worker process"), PROCESSES[0]]),
    (
        "memory",
        &[
            ("cgroup.memory", "all processes of a worker"),
            ("rlimits.as", "the address space of each process"),
        ],
    ),
];
const PROCESSES: &[(&str, &str)] = &[("processes", "worker processes")];

/// Keys to suggest if a file contains a plain value in place of a table. For example, the author of `sandbox =
/// "strict"` most likely meant `sandbox.profile`. The boolean is true if the key's value is a string.
pub(super) const MAIN_KEYS: &[(&str, &str, bool)] = &[
    ("sandbox", "profile", true),
    ("rate_limit", "per_second", false),
    ("retry", "attempts", false),
    ("restart", "policy", true),
    ("start", "mode", true),
];

/// Keys that select the program of a bulkhead. Not allowed in `[defaults]`, because all bulkheads would then run the
/// same program.
pub(super) const PROGRAM_KEYS: &[&str] = &["command", "library", "entry", "exec"];

/// Names of the tables that contain per-tenant settings. Not allowed in `[defaults]`.
pub(super) const TENANT_KEYS: &[&str] = &["tenant"];

/// Returns true for bulkhead keys that are not allowed in `[defaults]`.
pub(super) fn is_not_allowed_in_defaults(name: &str) -> bool {
    PROGRAM_KEYS.contains(&name) || TENANT_KEYS.contains(&name)
}

/// Returns the key `name` of the table `table`, if `keys` contains it.
pub(super) fn find(keys: &[Key], table: &str, name: &str) -> Option<Key> {
    keys.iter().find(|key| key.table == table && key.name == name).copied()
}

/// Formats words as a comma-separated list for a message or the reference documentation.
pub(super) fn format_list(words: &[&str]) -> String {
    words.iter().map(|word| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", ")
}

/// Returns the heading of a table, such as `[supervisor]` or `[[access]]`.
pub(super) fn heading(table: &str) -> String {
    if table == ACCESS { format!("[[{table}]]") } else { format!("[{table}]") }
}

impl Key {
    /// Returns the dotted path of the key, such as `bulkhead.NAME.restart.backoff`.
    pub fn path(&self) -> String {
        if self.table == TOP_LEVEL { self.name.to_owned() } else { format!("{}.{}", self.table, self.name) }
    }

    /// Creates a key whose value is a table. The key has no description, because each key inside the table has a
    /// description.
    pub(super) const fn of_table(table: &'static str, name: &'static str) -> Self {
        let default = DefaultValue::Described("none");
        Self { table, name, kind: Kind::Table, default, example: "", about: "", on_reload: OnReload::Applies }
    }

    /// Returns a valid example value as TOML.
    pub(super) fn example(&self) -> String {
        match self.default {
            _ if self.kind == Kind::Boolean => "true".to_owned(),
            DefaultValue::Described(_) => self.example.to_owned(),
            default => default.toml().unwrap_or_default(),
        }
    }
}

impl DefaultValue {
    /// Returns the default value as TOML, or `None` if the default is a description.
    pub(super) fn toml(&self) -> Option<String> {
        match *self {
            Self::Duration(duration) => Some(units::duration_literal(&duration)),
            Self::Size(bytes) => Some(format!("\"{}\"", units::format_size(bytes))),
            Self::Count(count) => Some(count.to_string()),
            Self::Share(share) => Some(units::share_literal(&share)),
            Self::Number(number) => Some(number.to_string()),
            Self::Boolean(on) => Some(on.to_string()),
            Self::Mode(mode) => Some(format!("\"{mode:04o}\"")),
            Self::Word(word) => Some(format!("\"{word}\"")),
            Self::Described(_) => None,
        }
    }
}

/// Serializes the value in machine-readable form, with sizes in bytes.
impl Serialize for DefaultValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Duration(duration) => units::serialize_duration(&duration, serializer),
            Self::Size(number) | Self::Count(number) => serializer.serialize_u64(number),
            Self::Share(number) | Self::Number(number) => serializer.serialize_f64(number),
            Self::Boolean(is_on) => serializer.serialize_bool(is_on),
            Self::Mode(mode) => serializer.serialize_u32(mode),
            Self::Word(word) | Self::Described(word) => serializer.serialize_str(word),
        }
    }
}

impl fmt::Display for DefaultValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.toml()) {
            (Self::Described(words), _) => f.write_str(words),
            (_, toml) => write!(f, "`{}`", toml.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Duration(min) if min.is_zero() => f.write_str("duration"),
            Self::Duration(min) => write!(f, "duration, at least {}", units::format_duration(min)),
            Self::Size { min: 0, max: defaults::NUMBER_MAX } => f.write_str("size"),
            Self::Size { min, max: defaults::NUMBER_MAX } => {
                write!(f, "size, at least {}", units::size_bound(min))
            }
            Self::Size { min, max } => write!(f, "size, {min} to {}", units::format_size(max)),
            Self::Count { min, max: defaults::NUMBER_MAX } => write!(f, "number, at least {min}"),
            Self::Count { min, max } => write!(f, "number, {min} to {max}"),
            Self::Share { none, all } => {
                write!(
                    f,
                    "share, {} 0 {} 1",
                    if none { "from" } else { "above" },
                    if all { "to" } else { "to below" }
                )
            }
            Self::Number(max) => write!(f, "whole or fractional number above 0 and at most {max}"),
            Self::Boolean => f.write_str("`true` or `false`"),
            Self::Network => {
                let max = defaults::TCP_PORTS_MAX;
                write!(
                    f,
                    "`true`, `false`, or a table with `tcp_ports` (array of ports, 1 to 65535, at most {max}) and \
                     `udp` (`true` or `false`, default `false`)"
                )
            }
            Self::Mode => f.write_str("octal digits as a string"),
            Self::Path => f.write_str("path"),
            Self::Text => f.write_str("string"),
            Self::Word(words) => f.write_str(&format_list(words)),
            Self::Words(words) => write!(f, "array of {}", format_list(words)),
            Self::Program => f.write_str("array of strings"),
            Self::Names(max) => write!(f, "array of names, at most {max}"),
            Self::Paths(max) => write!(f, "array of paths, at most {max}"),
            Self::Ids => f.write_str("range of IDs as a string"),
            Self::Environment => f.write_str("table of strings"),
            Self::Statuses => f.write_str("array of numbers, 0 to 255"),
            Self::Limit(resource) => f.write_str(match meaning(resource).0 {
                Measure::Bytes => "size or `\"unlimited\"`",
                Measure::Count => "number or `\"unlimited\"`",
                Measure::Seconds => "duration, number of seconds, or `\"unlimited\"`",
                Measure::Microseconds => "duration, number of microseconds, or `\"unlimited\"`",
                Measure::Zero => "`0`",
            }),
            Self::Table => f.write_str("table"),
            Self::Tables(max) => write!(f, "array of at most {max} tables"),
        }
    }
}

//! What a row says of a key, in the forms that the reader, its error messages, the reference for the
//! documentation and the schema for editors take it in. The rows themselves are in `keys`.

use std::fmt;
use std::time::Duration;

use bulkhead_linux::rlimits::Resource;
use serde::{Serialize, Serializer};

use super::rlimits::{Measure, meaning};
use super::{defaults, units};

pub(super) const TOP: &str = "";
pub(super) const ACCESS: &str = "access";
pub(super) const SUPERVISOR: &str = "supervisor";
pub(super) const BULKHEAD: &str = "bulkhead.NAME";
pub(super) const TENANTS: &str = "bulkhead.NAME.tenants";
pub(super) const TENANT: &str = "bulkhead.NAME.tenant.TENANT";
pub(super) const TENANT_RATE_LIMIT: &str = "bulkhead.NAME.tenant.TENANT.rate_limit";
pub(super) const RLIMITS: &str = "bulkhead.NAME.rlimits";

/// One key of the configuration file.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// The table it belongs to: `supervisor`, `bulkhead.NAME`, `bulkhead.NAME.restart`, …
    pub table: &'static str,
    /// Its name in that table.
    pub name: &'static str,
    /// What its value looks like.
    pub kind: Kind,
    /// What holds without it.
    pub default: Preset,
    /// What it does.
    pub about: &'static str,
    /// A value that would do, where there is no default.
    pub(super) example: &'static str,
    /// What another value does to a supervisor that runs.
    pub on_reload: OnReload,
}

/// What a value looks like. `Display` says it in a few words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// `"1m 30s"`, from the shortest that makes sense up to a year.
    Duration(Duration),
    /// `"64MiB"`, or a number of bytes.
    Size {
        /// The smallest that makes sense.
        min: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// A whole number.
    Count {
        /// The smallest that makes sense.
        min: u64,
        /// The largest that is allowed.
        max: u64,
    },
    /// A fraction of a whole, from 0 to 1.
    Share {
        /// Whether 0 itself is allowed.
        none: bool,
        /// Whether 1 itself is allowed; otherwise something is left to others.
        all: bool,
    },
    /// A number above 0, whole or not, up to the largest that is allowed.
    Number(u64),
    /// `true` or `false`.
    Boolean,
    /// `"0600"`.
    Mode,
    /// A path; a relative one starts at the file's folder.
    Path,
    /// Any other text.
    Text,
    /// One of a few words.
    Word(&'static [&'static str]),
    /// Some of a few words, or none.
    Words(&'static [&'static str]),
    /// A program and its arguments.
    Program,
    /// Names, in order, or none, and the most that are allowed.
    Names(usize),
    /// Paths, or none, and the most that are allowed; relative ones start at the file's folder.
    Paths(usize),
    /// The first and the last of some user ids: `"200000-200999"`.
    Ids,
    /// A table of strings.
    Environment,
    /// Exit statuses, or none.
    Statuses,
    /// A value of setrlimit(2).
    Limit(Resource),
    /// A table with keys of its own.
    Table,
    /// Any number of such tables.
    Tables(usize),
}

/// What holds without a key. `Display` gives the value as TOML, or says it in words.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Preset {
    /// A duration.
    Duration(Duration),
    /// A number of bytes.
    Size(u64),
    /// A number.
    Count(u64),
    /// A fraction.
    Share(f64),
    /// A number, whole or not.
    Number(f64),
    /// Whether something is on.
    Boolean(bool),
    /// Octal digits.
    Mode(u32),
    /// A word.
    Word(&'static str),
    /// Something that is worked out, or nothing at all.
    Described(&'static str),
}

/// What a reload does with another value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnReload {
    /// It holds from then on.
    Holds,
    /// The workers are replaced, since they were started with it, or told it when they were welcomed.
    ReplacesWorkers,
    /// It is passed over until the next start.
    Waits,
}

/// Names that other systems have for keys of a bulkhead, each with the keys it may mean and what these bound.
pub(super) const SYNONYMS: &[(&str, &[(&str, &str)])] = &[
    ("timeout", &[("deadline", "a job with its wait"), ("run_limit", "its run alone")]),
    ("replicas", PROCESSES),
    ("workers", PROCESSES),
    ("concurrency", &[("max_in_flight", "jobs at once in each worker process"), PROCESSES[0]]),
    (
        "memory",
        &[("cgroup.memory", "all processes of a worker"), ("rlimits.as", "the address space of each")],
    ),
];
const PROCESSES: &[(&str, &str)] = &[("processes", "worker processes")];

/// Keys by which a table is most often meant, and whether they are text: `sandbox = "strict"` is its profile.
pub(super) const PRINCIPAL: &[(&str, &str, bool)] = &[
    ("sandbox", "profile", true),
    ("rate_limit", "per_second", false),
    ("retry", "attempts", false),
    ("restart", "policy", true),
    ("start", "mode", true),
];

/// The key `name` of `table`, if it is one of `keys`.
pub(super) fn find(keys: &[Key], table: &str, name: &str) -> Option<Key> {
    keys.iter().find(|key| key.table == table && key.name == name).copied()
}

/// Words as a message or the reference lists them.
pub(super) fn in_list(words: &[&str]) -> String {
    words.iter().map(|word| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", ")
}

/// How the heading of a table is written.
pub(super) fn heading(table: &str) -> String {
    if table == ACCESS { format!("[[{table}]]") } else { format!("[{table}]") }
}

impl Key {
    /// Table and name: `bulkhead.NAME.restart.backoff`.
    pub fn path(&self) -> String {
        if self.table == TOP { self.name.to_owned() } else { format!("{}.{}", self.table, self.name) }
    }

    /// A table without a default, whose keys say what it is for.
    pub(super) const fn of_table(table: &'static str, name: &'static str) -> Self {
        let default = Preset::Described("none");
        Self { table, name, kind: Kind::Table, default, example: "", about: "", on_reload: OnReload::Holds }
    }

    /// A value that would do, as TOML.
    pub(super) fn example(&self) -> String {
        match self.default {
            _ if self.kind == Kind::Boolean => "true".to_owned(),
            Preset::Described(_) => self.example.to_owned(),
            default => default.toml().unwrap_or_default(),
        }
    }
}

impl Preset {
    /// The value as it would stand in the file, if it is one.
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

/// As a value for programs: sizes in bytes.
impl Serialize for Preset {
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

impl fmt::Display for Preset {
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
            Self::Number(max) => write!(f, "number, whole or not, above 0 to {max}"),
            Self::Boolean => f.write_str("`true` or `false`"),
            Self::Mode => f.write_str("octal digits as a string"),
            Self::Path => f.write_str("path"),
            Self::Text => f.write_str("string"),
            Self::Word(of) => f.write_str(&in_list(of)),
            Self::Words(of) => write!(f, "array of {}", in_list(of)),
            Self::Program => f.write_str("array of strings"),
            Self::Names(max) => write!(f, "array of names, at most {max}"),
            Self::Paths(max) => write!(f, "array of paths, at most {max}"),
            Self::Ids => f.write_str("range of ids as a string"),
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
            Self::Tables(max) => write!(f, "array of tables, at most {max}"),
        }
    }
}

//! The resources of setrlimit(2) by name, and what kind of value each takes. Setting them is the keeper's.

use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::reader::{Field, TableReader};
use crate::schema::{Key, Kind, OnReload, Preset, RLIMITS};
use crate::table::{Part, Write, Written, braced};
use crate::values;

/// One limit of setrlimit(2), hard = soft.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rlimit {
    /// What is limited.
    pub resource: Resource,
    /// In the resource's own unit (bytes, seconds for `cpu`, microseconds for `rttime`, else a count);
    /// `None` is unlimited.
    #[serde(serialize_with = "serialize_limit")]
    pub limit: Option<u64>,
}

fn serialize_limit<S: Serializer>(limit: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
    match limit {
        Some(limit) => serializer.serialize_u64(*limit),
        None => serializer.serialize_str(UNLIMITED),
    }
}

/// The word for no limit.
pub(super) const UNLIMITED: &str = "unlimited";

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    Bytes,
    Count,
    Seconds,
    Microseconds,
    /// Only zero: a core dump would carry a job's payload to a disk nobody asked for.
    Zero,
}

/// One row for each resource; `bulkhead-linux` has what the kernel calls it.
macro_rules! resources {
    ($($(#[doc = $sentence:literal])+ $resource:ident = $name:literal, $measure:ident;)+) => {
        /// A resource of setrlimit(2).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Resource {
            $($(#[doc = $sentence])+ $resource,)+
        }

        impl Resource {
            /// Every resource, in the order of [`BulkheadConfig::rlimits`](crate::BulkheadConfig::rlimits).
            pub const ALL: [Resource; 16] = [$(Self::$resource),+];

            /// Its name in the file: that of setrlimit(2) in lower case, without `RLIMIT_`.
            ///
            /// ```
            /// use bulkhead_config::Resource;
            /// assert_eq!(Resource::Nofile.name(), "nofile");
            /// ```
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$resource => $name,)+
                }
            }

            pub(super) const fn measure(self) -> Measure {
                match self {
                    $(Self::$resource => Measure::$measure,)+
                }
            }

            /// One sentence for the reference.
            const fn about(self) -> &'static str {
                match self {
                    $(Self::$resource => concat!($($sentence),+).trim_ascii_start(),)+
                }
            }
        }
    };
}

resources! {
    /// Address space. Runtimes that reserve much of it (Go, V8, sanitizers) do not start under a tight one.
    As = "as", Bytes;
    /// Processor time, summed over the worker's life; for `exec`, of each program.
    Cpu = "cpu", Seconds;
    /// Open descriptors.
    Nofile = "nofile", Count;
    /// Processes and threads of the worker's user, those outside this bulkhead included; does not bind root.
    Nproc = "nproc", Count;
    /// Size of any file the worker writes.
    Fsize = "fsize", Bytes;
    /// Core dumps: always 0, which is never a dump. The kernel is told 1 byte, with which a program in `kernel.core_pattern` gets none either.
    Core = "core", Zero;
    /// Data segment and heap.
    Data = "data", Bytes;
    /// Stack of the main thread.
    Stack = "stack", Bytes;
    /// Locked memory.
    Memlock = "memlock", Bytes;
    /// Resident memory; Linux accepts and ignores it, `recycle.rss` does not.
    Rss = "rss", Bytes;
    /// File locks; Linux accepts and ignores it.
    Locks = "locks", Count;
    /// Signals that may be pending for the worker's user.
    Sigpending = "sigpending", Count;
    /// POSIX message queues of the worker's user.
    Msgqueue = "msgqueue", Bytes;
    /// Ceiling of the nice value, written as 20 − nice.
    Nice = "nice", Count;
    /// Ceiling of the real-time priority.
    Rtprio = "rtprio", Count;
    /// Processor time under a real-time policy without a blocking call; a number is microseconds.
    Rttime = "rttime", Microseconds;
}

impl Serialize for Resource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// The keys of `rlimits`.
pub(super) fn keys() -> Vec<Key> {
    Resource::ALL.map(key).to_vec()
}

fn key(resource: Resource) -> Key {
    Key {
        table: RLIMITS,
        name: resource.name(),
        kind: Kind::Limit(resource),
        default: match resource {
            Resource::Core => Preset::Count(0),
            Resource::Fsize => Preset::Described("4GiB; without a sandbox the supervisor's own"),
            Resource::Nproc => Preset::Described(
                "1024 where it counts for each worker: with a user id or a user namespace of its own; else the supervisor's own",
            ),
            _ => Preset::Described("the supervisor's own"),
        },
        example: match resource.measure() {
            Measure::Bytes => "\"1GiB\"",
            Measure::Count => "64",
            Measure::Seconds => "\"60s\"",
            Measure::Microseconds => "\"200ms\"",
            Measure::Zero => "0",
        },
        about: resource.about(),
        on_reload: OnReload::ReplacesWorkers,
    }
}

/// `rlimits`, in the order of [`Resource::ALL`].
pub(crate) struct RawRlimits([Field<Option<u64>>; Resource::ALL.len()]);

impl Part for RawRlimits {
    fn read_inside(table: Option<&mut TableReader<'_, '_>>, name: &'static str) -> Self {
        let Some(mut table) = table.and_then(|table| table.table(name, RLIMITS)) else {
            return Self(Resource::ALL.map(|_| Field::Absent));
        };
        Self(
            Resource::ALL.map(|resource| {
                table.take(resource.name(), |key, value| values::limit(key, resource, value))
            }),
        )
    }

    fn over_part(self, defaults: &Self) -> Self {
        let mut own = self.0;
        for (own, default) in own.iter_mut().zip(&defaults.0) {
            *own = own.or(default);
        }
        Self(own)
    }
}

impl RawRlimits {
    /// What was written, and `core`.
    pub(super) fn checked(&self) -> Vec<Rlimit> {
        let written = Resource::ALL.into_iter().zip(&self.0);
        written
            .filter_map(|(resource, field)| match (resource, field.given()) {
                (Resource::Core, _) => Some(Rlimit { resource, limit: Some(0) }),
                (_, Some(given)) => Some(Rlimit { resource, limit: given.value }),
                (_, None) => None,
            })
            .collect()
    }
}

impl Write for Vec<Rlimit> {
    fn written(&self, _: Kind) -> Option<Written> {
        let limits: Vec<_> =
            self.iter().map(|rlimit| format!("{} = {}", rlimit.resource.name(), toml(rlimit))).collect();
        Some(Written::Toml(braced(&limits)))
    }
}

fn toml(rlimit: &Rlimit) -> String {
    let scalar = match (rlimit.limit, rlimit.resource.measure()) {
        (None, _) => Preset::Word(UNLIMITED),
        (Some(bytes), Measure::Bytes) => Preset::Size(bytes),
        (Some(seconds), Measure::Seconds) => Preset::Duration(Duration::from_secs(seconds)),
        (Some(number), _) => Preset::Count(number),
    };
    scalar.toml().unwrap_or_default()
}

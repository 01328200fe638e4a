//! The resources of setrlimit(2) by name, and what kind of value each takes. Setting them is the keeper's.

use serde::{Serialize, Serializer};

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

/// A resource of setrlimit(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Resource {
    /// Address space, bytes.
    As,
    /// Processor time over the worker's whole life, seconds.
    Cpu,
    /// Highest descriptor number plus one.
    Nofile,
    /// Processes of the user; does not bind root.
    Nproc,
    /// Size of a file it writes, bytes.
    Fsize,
    /// Size of a core dump, bytes; always 0.
    Core,
    /// Data segment and heap, bytes.
    Data,
    /// Stack of the main thread, bytes.
    Stack,
    /// Locked memory, bytes.
    Memlock,
    /// Resident memory, bytes; Linux ignores it.
    Rss,
    /// File locks; Linux ignores it.
    Locks,
    /// Pending signals.
    Sigpending,
    /// POSIX message queues, bytes.
    Msgqueue,
    /// Ceiling of the nice value, as 20 − nice.
    Nice,
    /// Ceiling of the real-time priority.
    Rtprio,
    /// Real-time processor time without a blocking call, microseconds.
    Rttime,
}

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

impl Resource {
    /// Every resource, in the order of [`BulkheadConfig::rlimits`](super::BulkheadConfig::rlimits).
    pub const ALL: [Resource; 16] = [
        Self::As,
        Self::Cpu,
        Self::Nofile,
        Self::Nproc,
        Self::Fsize,
        Self::Core,
        Self::Data,
        Self::Stack,
        Self::Memlock,
        Self::Rss,
        Self::Locks,
        Self::Sigpending,
        Self::Msgqueue,
        Self::Nice,
        Self::Rtprio,
        Self::Rttime,
    ];

    /// Its name in the file: that of setrlimit(2) in lower case, without `RLIMIT_`.
    ///
    /// ```
    /// use bulkhead_config::Resource;
    /// assert_eq!(Resource::Nofile.name(), "nofile");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::As => "as",
            Self::Cpu => "cpu",
            Self::Nofile => "nofile",
            Self::Nproc => "nproc",
            Self::Fsize => "fsize",
            Self::Core => "core",
            Self::Data => "data",
            Self::Stack => "stack",
            Self::Memlock => "memlock",
            Self::Rss => "rss",
            Self::Locks => "locks",
            Self::Sigpending => "sigpending",
            Self::Msgqueue => "msgqueue",
            Self::Nice => "nice",
            Self::Rtprio => "rtprio",
            Self::Rttime => "rttime",
        }
    }

    pub(super) const fn measure(self) -> Measure {
        match self {
            Self::As
            | Self::Fsize
            | Self::Data
            | Self::Stack
            | Self::Memlock
            | Self::Rss
            | Self::Msgqueue => Measure::Bytes,
            Self::Cpu => Measure::Seconds,
            Self::Rttime => Measure::Microseconds,
            Self::Core => Measure::Zero,
            Self::Nofile | Self::Nproc | Self::Locks | Self::Sigpending | Self::Nice | Self::Rtprio => {
                Measure::Count
            }
        }
    }

    /// One sentence for the reference.
    pub(super) const fn about(self) -> &'static str {
        match self {
            Self::As => {
                "Address space. Runtimes that reserve much of it (Go, V8, sanitizers) do not start under a tight one."
            }
            Self::Cpu => "Processor time, summed over the worker's life; for `exec`, of each program.",
            Self::Nofile => "Open descriptors.",
            Self::Nproc => {
                "Processes and threads of the worker's user, those outside this bulkhead included; does not bind root."
            }
            Self::Fsize => "Size of any file the worker writes.",
            Self::Core => {
                "Core dumps: always 0, which is never a dump. The kernel is told 1 byte, with which a program in `kernel.core_pattern` gets none either."
            }
            Self::Data => "Data segment and heap.",
            Self::Stack => "Stack of the main thread.",
            Self::Memlock => "Locked memory.",
            Self::Rss => "Resident memory; Linux accepts and ignores it, `recycle.rss` does not.",
            Self::Locks => "File locks; Linux accepts and ignores it.",
            Self::Sigpending => "Signals that may be pending for the worker's user.",
            Self::Msgqueue => "POSIX message queues of the worker's user.",
            Self::Nice => "Ceiling of the nice value, written as 20 − nice.",
            Self::Rtprio => "Ceiling of the real-time priority.",
            Self::Rttime => {
                "Processor time under a real-time policy without a blocking call; a number is microseconds."
            }
        }
    }
}

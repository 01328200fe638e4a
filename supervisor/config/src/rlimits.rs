//! The resources of setrlimit(2) as keys of the file: what kind of value each takes, and what it is for. Setting them
//! is the keeper's.

use bulkhead_linux::rlimits::Resource;
use serde::{Serialize, Serializer};

/// One limit of setrlimit(2), hard = soft.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rlimit {
    /// What is limited.
    #[serde(serialize_with = "serialize_name")]
    pub resource: Resource,
    /// In the resource's own unit (bytes, seconds for `cpu`, microseconds for `rttime`, else a count);
    /// `None` is unlimited.
    #[serde(serialize_with = "serialize_limit")]
    pub limit: Option<u64>,
}

fn serialize_name<S: Serializer>(resource: &Resource, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(resource.name())
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
    /// Only zero: a core dump would carry a job's payload to a disk.
    Zero,
}

/// What a limit of this resource counts, and one sentence for the reference.
pub(super) const fn meaning(resource: Resource) -> (Measure, &'static str) {
    use Measure::{Bytes, Count, Microseconds, Seconds, Zero};
    match resource {
        Resource::As => (
            Bytes,
            "Address space. Runtimes that reserve much of it (Go, V8, sanitizers) do not start under a tight one.",
        ),
        Resource::Cpu => {
            (Seconds, "Processor time, summed over the worker's life; for `exec`, of each program.")
        }
        Resource::Nofile => (Count, "Open descriptors."),
        Resource::Nproc => (
            Count,
            "Processes and threads of the worker's user, those outside this bulkhead included; does not bind root.",
        ),
        Resource::Fsize => (Bytes, "Size of any file the worker writes."),
        Resource::Core => (
            Zero,
            "Core dumps: always 0, which is never a dump. The kernel is told 1 byte, with which a program in \
             `kernel.core_pattern` gets none either.",
        ),
        Resource::Data => (Bytes, "Data segment and heap."),
        Resource::Stack => (Bytes, "Stack of the main thread."),
        Resource::Memlock => (Bytes, "Locked memory."),
        Resource::Rss => (Bytes, "Resident memory; Linux accepts and ignores it, `recycle.rss` does not."),
        Resource::Locks => (Count, "File locks; Linux accepts and ignores it."),
        Resource::Sigpending => (Count, "Signals that may be pending for the worker's user."),
        Resource::Msgqueue => (Bytes, "POSIX message queues of the worker's user."),
        Resource::Nice => (Count, "Ceiling of the nice value, written as 20 − nice."),
        Resource::Rtprio => (Count, "Ceiling of the real-time priority."),
        Resource::Rttime => (
            Microseconds,
            "Processor time under a real-time policy without a blocking call; a number is microseconds.",
        ),
    }
}

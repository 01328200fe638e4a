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

/// A row for each resource: the sentence of the reference, and what its limit counts.
macro_rules! meanings {
    ($($(#[doc = $sentence:literal])+ $resource:ident = $measure:ident;)+) => {
        /// What a limit of this resource counts, and one sentence for the reference.
        pub(super) const fn meaning(resource: Resource) -> (Measure, &'static str) {
            match resource {
                $(Resource::$resource => (Measure::$measure, concat!($($sentence),+).trim_ascii_start()),)+
            }
        }
    };
}

meanings! {
    /// Address space. Runtimes that reserve much of it (Go, V8, sanitizers) do not start under a tight one.
    As = Bytes;
    /// Processor time, summed over the worker's life; for `exec`, of each program.
    Cpu = Seconds;
    /// Open descriptors.
    Nofile = Count;
    /// Processes and threads of the worker's user, those outside this bulkhead included; does not bind root.
    Nproc = Count;
    /// Size of any file the worker writes.
    Fsize = Bytes;
    /// Core dumps: always 0, which is never a dump. The kernel is told 1 byte, with which a program in `kernel.core_pattern` gets none either.
    Core = Zero;
    /// Data segment and heap.
    Data = Bytes;
    /// Stack of the main thread.
    Stack = Bytes;
    /// Locked memory.
    Memlock = Bytes;
    /// Resident memory; Linux accepts and ignores it, `recycle.rss` does not.
    Rss = Bytes;
    /// File locks; Linux accepts and ignores it.
    Locks = Count;
    /// Signals that may be pending for the worker's user.
    Sigpending = Count;
    /// POSIX message queues of the worker's user.
    Msgqueue = Bytes;
    /// Ceiling of the nice value, written as 20 − nice.
    Nice = Count;
    /// Ceiling of the real-time priority.
    Rtprio = Count;
    /// Processor time under a real-time policy without a blocking call; a number is microseconds.
    Rttime = Microseconds;
}

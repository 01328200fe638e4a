//! Units and descriptions of the keys in the `rlimits` table. Each key stands for a setrlimit(2) resource. The keeper
//! sets the limits.

use bulkhead_linux::rlimits::Resource;
use serde::{Serialize, Serializer};

/// A resource limit, as in setrlimit(2). The value is both the soft and the hard limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rlimit {
    /// The limited resource.
    #[serde(serialize_with = "serialize_name")]
    pub resource: Resource,
    /// Maximum value. The unit depends on the resource: bytes, seconds for `cpu`, microseconds for `rttime`, or a
    /// count. `None` means unlimited.
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

/// Word for "no limit" in the configuration file.
pub(super) const UNLIMITED: &str = "unlimited";

/// Unit of a resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    Bytes,
    Count,
    Seconds,
    Microseconds,
    /// The limit must be 0, because a core dump would write a job's payload to disk.
    Zero,
}

/// Declares the description and the unit of each resource. Each row declares one resource.
macro_rules! meanings {
    ($($(#[doc = $sentence:literal])+ $resource:ident = $measure:ident;)+) => {
        /// Returns the unit of a limit on this resource, and the description of the resource in the documentation.
        pub(super) const fn meaning(resource: Resource) -> (Measure, &'static str) {
            match resource {
                $(Resource::$resource => (Measure::$measure, concat!($($sentence),+).trim_ascii_start()),)+
            }
        }
    };
}

meanings! {
    /// Maximum size of the address space. Runtimes that reserve large amounts of address space (Go, V8,
    /// sanitizers) do not start if the limit is low.
    As = Bytes;
    /// Maximum processor time that a worker can use during its life. With `exec`, the maximum for each
    /// program.
    Cpu = Seconds;
    /// Maximum number of open file descriptors.
    Nofile = Count;
    /// Maximum number of processes and threads of the user that the worker runs as, including those outside
    /// this bulkhead. Does not apply to root.
    Nproc = Count;
    /// Maximum size of each file that the worker writes.
    Fsize = Bytes;
    /// Maximum size of core dumps. Always 0, which disables core dumps. The limit in the kernel is set to 1
    /// byte, so that a program named in `kernel.core_pattern` gets no dump either.
    Core = Zero;
    /// Maximum total size of data segment and heap.
    Data = Bytes;
    /// Maximum stack size of the main thread.
    Stack = Bytes;
    /// Maximum amount of memory that can be locked.
    Memlock = Bytes;
    /// Maximum resident memory. Linux accepts this limit but ignores it; use `recycle.rss` instead.
    Rss = Bytes;
    /// Maximum number of file locks. Linux accepts this limit but ignores it.
    Locks = Count;
    /// Maximum number of pending signals for the user that the worker runs as.
    Sigpending = Count;
    /// Maximum total size of POSIX message queues for the user that the worker runs as.
    Msgqueue = Bytes;
    /// Highest priority that the worker can give itself, written as 20 minus the nice value.
    Nice = Count;
    /// Highest real-time priority that the worker can give itself.
    Rtprio = Count;
    /// Maximum processor time that a real-time thread can use without a blocking call. A number without a
    /// unit is in microseconds.
    Rttime = Microseconds;
}

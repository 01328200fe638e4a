//! Resources of setrlimit(2) as keys of the file: the kind and the description of each. The keeper sets the
//! limits.

use bulkhead_linux::rlimits::Resource;
use serde::{Serialize, Serializer};

/// A limit of setrlimit(2), hard = soft.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rlimit {
    /// Limited resource.
    #[serde(serialize_with = "serialize_name")]
    pub resource: Resource,
    /// Limit in the unit of the resource: bytes, seconds for `cpu`, microseconds for `rttime`, otherwise a
    /// count. `None` is unlimited.
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

/// Unit of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Measure {
    Bytes,
    Count,
    Seconds,
    Microseconds,
    /// Only zero is allowed, because a core dump would write a job's payload to disk.
    Zero,
}

/// Declares the resources, one row each: the description for the reference, and the unit.
macro_rules! meanings {
    ($($(#[doc = $sentence:literal])+ $resource:ident = $measure:ident;)+) => {
        /// Returns the unit of a limit on this resource, and the description for the reference.
        pub(super) const fn meaning(resource: Resource) -> (Measure, &'static str) {
            match resource {
                $(Resource::$resource => (Measure::$measure, concat!($($sentence),+).trim_ascii_start()),)+
            }
        }
    };
}

meanings! {
    /// Maximum address space. Runtimes that reserve much of it (Go, V8, sanitizers) do not start with a low
    /// limit.
    As = Bytes;
    /// Maximum processor time over the worker's life; with `exec`, of each program.
    Cpu = Seconds;
    /// Maximum number of open descriptors.
    Nofile = Count;
    /// Maximum number of processes and threads of the worker's user, including those outside this bulkhead.
    /// Does not apply to root.
    Nproc = Count;
    /// Maximum size of each file that the worker writes.
    Fsize = Bytes;
    /// Core dumps: always 0, which disables them. The kernel limit is 1 byte, so that a program in
    /// `kernel.core_pattern` gets no dump either.
    Core = Zero;
    /// Maximum size of data segment and heap.
    Data = Bytes;
    /// Maximum stack of the main thread.
    Stack = Bytes;
    /// Maximum locked memory.
    Memlock = Bytes;
    /// Resident memory. Linux accepts and ignores this limit; use `recycle.rss` instead.
    Rss = Bytes;
    /// File locks. Linux accepts and ignores this limit.
    Locks = Count;
    /// Maximum number of pending signals of the worker's user.
    Sigpending = Count;
    /// Maximum size of POSIX message queues of the worker's user.
    Msgqueue = Bytes;
    /// Ceiling of the nice value, written as 20 − nice.
    Nice = Count;
    /// Ceiling of the real-time priority.
    Rtprio = Count;
    /// Maximum processor time under a real-time policy without a blocking call. A number is in microseconds.
    Rttime = Microseconds;
}

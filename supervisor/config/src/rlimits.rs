//! The resources of setrlimit(2): a row for each, with what kind of value it takes. Setting them is the keeper's.

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
            pub(super) const fn about(self) -> &'static str {
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

//! Reads the resource usage of the supervisor's own process from `/proc`.

use std::fs;
use std::sync::OnceLock;

use bulkhead_linux::process_tree::read_proc_file;
use rustix::process::{Resource, getrlimit};

/// Resource usage of the supervisor's process, in the units used by the metrics.
pub(super) struct OwnProcess {
    pub(super) cpu_seconds: f64,
    pub(super) virtual_bytes: f64,
    pub(super) resident_bytes: f64,
    pub(super) threads: f64,
    /// Start time of the process, in seconds since the machine booted.
    started_after: f64,
}

impl OwnProcess {
    /// Reads `/proc/self/stat`. Returns `None` if `/proc` is not mounted.
    pub(super) fn read() -> Option<Self> {
        let stat = read_proc_file("/proc/self/stat").ok()?;
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
        // Fields are numbered from 1, as in proc_pid_stat(5). The first field after the name is field 3.
        let field = |number: usize| Some(fields.get(number - 3)?.parse::<u64>().ok()? as f64);
        let ticks = rustix::param::clock_ticks_per_second().max(1) as f64;
        Some(Self {
            cpu_seconds: (field(14)? + field(15)?) / ticks,
            threads: field(20)?,
            started_after: field(22)? / ticks,
            virtual_bytes: field(23)?,
            resident_bytes: field(24)? * rustix::param::page_size() as f64,
        })
    }

    /// Returns the number of open descriptors. Since Linux 6.2, this is the size of `/proc/self/fd`. On older kernels
    /// the size is 0, so the entries are counted.
    pub(super) fn open_fds() -> Option<f64> {
        let folder = "/proc/self/fd";
        match fs::metadata(folder).ok()?.len() {
            0 => Some(fs::read_dir(folder).ok()?.count() as f64),
            count => Some(count as f64),
        }
    }

    pub(super) fn max_fds() -> Option<f64> {
        getrlimit(Resource::Nofile).current.map(|limit| limit as f64)
    }

    pub(super) fn start_time(&self) -> Option<f64> {
        Some(booted_at()? as f64 + self.started_after)
    }
}

/// Returns the boot time of the machine in seconds since 1970. The value is cached, because reading
/// `/proc/stat` is slow: the kernel adds up the interrupts of all processors.
fn booted_at() -> Option<u64> {
    static BOOTED_AT: OnceLock<Option<u64>> = OnceLock::new();
    *BOOTED_AT.get_or_init(|| {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
    })
}

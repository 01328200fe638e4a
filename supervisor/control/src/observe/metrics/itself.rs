//! What the supervisor's own process takes, as `/proc` says.

use std::fs;
use std::sync::OnceLock;

use bulkhead_linux::process_tree::read_small;
use rustix::process::{Resource, getrlimit};

/// What `/proc` says of it, in the units of the metrics.
pub(super) struct Own {
    pub(super) cpu_seconds: f64,
    pub(super) virtual_bytes: f64,
    pub(super) resident_bytes: f64,
    pub(super) threads: f64,
    /// Seconds from boot to start.
    started_after: f64,
}

impl Own {
    /// `None` without `/proc`.
    pub(super) fn read() -> Option<Self> {
        let stat = read_small("/proc/self/stat").ok()?;
        let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
        // As proc_pid_stat(5) numbers them, from the third on.
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

    /// Since Linux 6.2 it is the size of the folder; before, that is 0.
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

/// Seconds since 1970. To learn them the kernel counts all interrupts of all processors, so they are asked for once.
fn booted_at() -> Option<u64> {
    static BOOTED_AT: OnceLock<Option<u64>> = OnceLock::new();
    *BOOTED_AT.get_or_init(|| {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
    })
}

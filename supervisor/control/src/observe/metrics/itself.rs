//! What the supervisor's own process takes, as `/proc` says.

use std::fs;
use std::sync::OnceLock;

use bulkhead_linux::process_tree::read_small;

use super::families::{self, Family};
use super::text::Page;

/// Writes what there is; without `/proc` nothing.
pub(super) fn write(page: &mut Page) {
    let Some(own) = read_stat() else { return };
    let number = |page: &mut Page, family: &'static Family, value: Option<u64>| {
        if let Some(value) = value {
            page.family(family);
            page.sample(&[], value);
        }
    };
    page.family(&families::CPU);
    page.sample(&[], own.cpu_seconds);
    number(page, &families::OPEN_FDS, open_fds());
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    number(page, &families::MAX_FDS, limit);
    number(page, &families::VIRTUAL, Some(own.virtual_bytes));
    number(page, &families::RESIDENT, Some(own.resident_bytes));
    number(page, &families::THREADS, Some(own.threads));
    if let Some(booted) = booted_at() {
        page.family(&families::START_TIME);
        page.sample(&[], booted as f64 + own.started_after);
    }
}

/// Since Linux 6.2 it is the size of the folder; before, that is 0.
fn open_fds() -> Option<u64> {
    let folder = "/proc/self/fd";
    match fs::metadata(folder).ok()?.len() {
        0 => Some(fs::read_dir(folder).ok()?.count() as u64),
        count => Some(count),
    }
}

struct Own {
    cpu_seconds: f64,
    virtual_bytes: u64,
    resident_bytes: u64,
    threads: u64,
    /// Seconds from boot to start.
    started_after: f64,
}

fn read_stat() -> Option<Own> {
    let stat = read_small("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_ascii_whitespace().collect();
    // As proc_pid_stat(5) numbers them, from the third on.
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let ticks = rustix::param::clock_ticks_per_second().max(1) as f64;
    Some(Own {
        cpu_seconds: (field(14)? + field(15)?) as f64 / ticks,
        threads: field(20)?,
        started_after: field(22)? as f64 / ticks,
        virtual_bytes: field(23)?,
        resident_bytes: field(24)? * rustix::param::page_size() as u64,
    })
}

/// Seconds since 1970. To learn them the kernel counts all interrupts of all processors, so they are asked for once.
fn booted_at() -> Option<u64> {
    static BOOTED_AT: OnceLock<Option<u64>> = OnceLock::new();
    *BOOTED_AT.get_or_init(|| {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
    })
}

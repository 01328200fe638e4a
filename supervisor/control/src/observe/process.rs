//! Reads the resource usage of processes, and the size of the machine's memory, from `/proc`. The control plane uses
//! the values for metrics, snapshots and advice, and to find workers that exceed their memory limit. The data plane
//! decides what happens to these workers.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::read_proc_file;

/// Maximum age of the cached resident sizes.
const CACHE_AGE_MAX: Duration = Duration::from_secs(1);

/// Cache of the resident sizes of processes. Each process is read at most once per second.
#[derive(Debug, Default)]
pub struct ResidentSizes(Mutex<Cache>);

#[derive(Debug, Default)]
struct Cache {
    started_at: Option<Instant>,
    bytes_by_pid: HashMap<u32, u64>,
}

impl ResidentSizes {
    /// Returns the resident size of a process in bytes, at most one second old. Returns `None` if the process
    /// no longer exists.
    pub fn bytes(&self, pid: u32) -> Option<u64> {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if cache.started_at.is_none_or(|started_at| started_at.elapsed() >= CACHE_AGE_MAX) {
            *cache = Cache { started_at: Some(Instant::now()), bytes_by_pid: HashMap::new() };
        }
        if let Some(bytes) = cache.bytes_by_pid.get(&pid) {
            return Some(*bytes);
        }
        let bytes = resident_bytes(pid)?;
        cache.bytes_by_pid.insert(pid, bytes);
        Some(bytes)
    }
}

/// Returns the peak resident size of a process in bytes, and the processor time in milliseconds used by the process and
/// its reaped children. Returns `None` if the process no longer exists.
pub fn peak_usage(pid: u32) -> Option<(u64, u64)> {
    let status = read_proc_file(&format!("/proc/{pid}/status")).ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = peak.trim().split(' ').next()?.parse().ok()?;
    Some((kib * 1024, processor_ms(pid, 4)?))
}

/// Returns the sum, in milliseconds, of the first `times` processor times in `/proc/PID/stat`. The first two are the
/// user and system time of the process itself, and the next two are those of its reaped children.
fn processor_ms(pid: u32, times: usize) -> Option<u64> {
    let stat = read_proc_file(&format!("/proc/{pid}/stat")).ok()?;
    let fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let used: u64 = fields.skip(11).take(times).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
    Some(used * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Returns the size of this machine's memory in bytes, or `None` if the size is unknown.
pub fn machine_memory() -> Option<u64> {
    let about = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = about.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(total.trim().split(' ').next()?.parse::<u64>().ok()? * 1024)
}

/// Returns the resident size of a process in bytes, or `None` if the process no longer exists.
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let statm = read_proc_file(&format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// Returns the resident size of a process in bytes and its processor time in milliseconds, or `None` if the
/// process no longer exists.
pub fn usage(pid: u32) -> Option<(u64, u64)> {
    Some((resident_bytes(pid)?, processor_ms(pid, 2)?))
}

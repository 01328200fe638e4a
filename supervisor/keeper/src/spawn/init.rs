//! Contains the code that the two kinds of first process of a PID namespace share: dropping rights, and encoding exit
//! reports. `worker` is the first process for a single worker, and `template` that for a template and its workers.
//! `child.rs` starts both after the fork.

pub(super) mod template;
pub(super) mod worker;

use std::os::fd::RawFd;

use bulkhead_linux::descriptors::close_all_except;
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::protocol::{Exit, Usage};
use crate::wait;

/// Size of an exit status report in bytes: the status from `wait(2)` and three resource usage values.
const STATUS_BYTES: usize = 4 + 3 * 8;

/// Drops all capabilities except `capabilities`, or all capabilities if these cannot be kept. Closes all descriptors
/// except `kept`.
fn become_init(capabilities: CapabilitySet, kept: &mut [RawFd]) {
    let none = CapabilitySet::empty();
    let set = |all| {
        let sets = CapabilitySets { effective: all, permitted: all, inheritable: none };
        rustix::thread::set_capabilities(None, sets)
    };
    // Fails only if the process has no capabilities to drop.
    let _ = set(capabilities).or_else(|_| set(none));
    // Sets the name shown in process lists. Cannot fail, because the name is short enough.
    let _ = rustix::thread::set_name(c"bulkhead-init");
    // SAFETY: sets a flag of this process, which prevents processes in the namespace from inspecting it.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    // SAFETY: this process uses no other descriptors from here on.
    let _ = unsafe { close_all_except(0, kept) };
}

fn encode(status: i32, usage: &Usage) -> [u8; STATUS_BYTES] {
    let mut bytes = [0; STATUS_BYTES];
    let (head, tail) = bytes.split_at_mut(4);
    head.copy_from_slice(&status.to_le_bytes());
    let numbers = [usage.user_us, usage.system_us, usage.maxrss_kib];
    for (to, from) in tail.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&from.to_le_bytes());
    }
    bytes
}

/// Decodes an exit status report. Returns `None` if the bytes do not describe an exited process.
fn decode(bytes: &[u8; STATUS_BYTES]) -> Option<(Exit, Usage)> {
    let (status, numbers) = bytes.split_first_chunk()?;
    let (&[user, system, resident], []) = numbers.as_chunks::<8>() else { return None };
    let [user_us, system_us, maxrss_kib] = [user, system, resident].map(u64::from_le_bytes);
    Some((wait::exit(i32::from_le_bytes(*status))?, Usage { user_us, system_us, maxrss_kib }))
}

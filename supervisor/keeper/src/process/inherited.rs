//! Attributes of a template that its workers inherit and that any process of its user can change from outside: recorded
//! when the template is ready, and restored before each fork, so that no job changes them for the workers after it.
#![expect(unsafe_code, reason = "attributes of another process are read and set by raw system calls")]

use std::fs;

use bulkhead_linux::errno;
use bulkhead_linux::process_tree::read_small;
use rustix::io::Errno;

/// Size of the largest attribute in bytes: a set of 8,192 processors.
const BYTES_MAX: usize = 1024;

/// Number of limits that Linux has.
const LIMITS: usize = 16;

const OF_A_PROCESS: usize = 1;

struct Attribute {
    name: &'static str,
    /// `None`: the kernel does not have it, or does not tell.
    get: fn(u32) -> Option<Vec<u8>>,
    set: fn(u32, &[u8]) -> Result<(), Errno>,
}

const ATTRIBUTES: [Attribute; 6] = [
    Attribute {
        name: "processors",
        get: |pid| told(libc::SYS_sched_getaffinity, |to| [pid as usize, BYTES_MAX, to, 0]),
        set: |pid, mask| call(libc::SYS_sched_setaffinity, [pid as usize, mask.len(), at(mask), 0]).map(drop),
    },
    // Policy, priority and slice; behind the processors, since some policies depend on these.
    Attribute {
        name: "scheduling",
        get: |pid| {
            let size = size_of::<libc::sched_attr>();
            let mut bytes = vec![0; size];
            call(libc::SYS_sched_getattr, [pid as usize, bytes.as_mut_ptr() as usize, size, 0]).ok()?;
            Some(bytes)
        },
        set: |pid, bytes| call(libc::SYS_sched_setattr, [pid as usize, at(bytes), 0, 0]).map(drop),
    },
    Attribute {
        name: "I/O priority",
        get: |pid| {
            let value = call(libc::SYS_ioprio_get, [OF_A_PROCESS, pid as usize, 0, 0]).ok()?;
            Some(value.to_ne_bytes().to_vec())
        },
        set: |pid, bytes| {
            let value = usize::from_ne_bytes(bytes.try_into().unwrap_or_default());
            call(libc::SYS_ioprio_set, [OF_A_PROCESS, pid as usize, value, 0]).map(drop)
        },
    },
    Attribute {
        name: "limits",
        get: |pid| {
            let mut all = vec![0; LIMITS * size_of::<libc::rlimit64>()];
            for (number, limit) in all.chunks_mut(size_of::<libc::rlimit64>()).enumerate() {
                call(libc::SYS_prlimit64, [pid as usize, number, 0, limit.as_mut_ptr() as usize]).ok()?;
            }
            Some(all)
        },
        set: |pid, all| {
            let mut limits = all.chunks(size_of::<libc::rlimit64>()).enumerate();
            limits.try_for_each(|(number, limit)| {
                call(libc::SYS_prlimit64, [pid as usize, number, at(limit), 0]).map(drop)
            })
        },
    },
    Attribute {
        name: "out-of-memory score",
        get: |pid| read(pid, "oom_score_adj"),
        set: |pid, text| write(pid, "oom_score_adj", text),
    },
    Attribute {
        name: "timer slack",
        get: |pid| read(pid, "timerslack_ns"),
        set: |pid, text| write(pid, "timerslack_ns", text),
    },
];

/// Values of all [`ATTRIBUTES`].
pub(super) struct Inherited([Option<Vec<u8>>; ATTRIBUTES.len()]);

impl Inherited {
    pub(super) fn of(pid: u32) -> Self {
        Self(ATTRIBUTES.map(|attribute| (attribute.get)(pid)))
    }

    /// Restores what has changed since. `is_template` is asked before anything is set, because a process that has ended
    /// can have given its number to another one. Errors: the name of what could not be restored, and the reason.
    pub(super) fn restore(
        &self,
        pid: u32,
        is_template: impl Fn() -> bool,
    ) -> Result<(), (&'static str, Errno)> {
        for (Attribute { name, get, set }, recorded) in ATTRIBUTES.iter().zip(&self.0) {
            let Some(recorded) = recorded else { continue };
            if get(pid).as_ref() == Some(recorded) || !is_template() {
                continue;
            }
            set(pid, recorded).map_err(|errno| (*name, errno))?;
            if get(pid).as_ref() != Some(recorded) {
                return Err((name, Errno::PERM));
            }
        }
        Ok(())
    }
}

/// Address of bytes that a system call reads.
fn at(bytes: &[u8]) -> usize {
    bytes.as_ptr() as usize
}

/// What a call that returns a size writes to the buffer whose address it gets.
fn told(number: libc::c_long, arguments: impl Fn(usize) -> [usize; 4]) -> Option<Vec<u8>> {
    let mut bytes = vec![0; BYTES_MAX];
    let length = call(number, arguments(bytes.as_mut_ptr() as usize)).ok()?;
    bytes.truncate(length);
    Some(bytes)
}

fn call(number: libc::c_long, [a, b, c, d]: [usize; 4]) -> Result<usize, Errno> {
    // SAFETY: the calls above read and write so many bytes of buffers that outlive them, and touch no other memory.
    let result = unsafe { libc::syscall(number, a, b, c, d) };
    errno::check(result).map(|()| result as usize)
}

fn read(pid: u32, file: &str) -> Option<Vec<u8>> {
    Some(read_small(&format!("/proc/{pid}/{file}")).ok()?.into_bytes())
}

fn write(pid: u32, file: &str, text: &[u8]) -> Result<(), Errno> {
    fs::write(format!("/proc/{pid}/{file}"), text).map_err(|error| errno::of(&error, Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_changed_from_outside_is_restored() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = child.id();
        let before = Inherited::of(pid);
        assert!(before.0.iter().all(Option::is_some));
        for (attribute, recorded) in ATTRIBUTES.iter().zip(&before.0) {
            let mut other = recorded.clone().unwrap();
            match attribute.name {
                // The soft limit of open files, which is the one number 7.
                "limits" => other[7 * 16..7 * 16 + 8].copy_from_slice(&17_u64.to_ne_bytes()),
                "out-of-memory score" => other = b"900\n".to_vec(),
                "timer slack" => other = b"77000\n".to_vec(),
                "I/O priority" => other = (3_usize << 13).to_ne_bytes().to_vec(),
                // Batch processing.
                "scheduling" => other[4..8].copy_from_slice(&3_u32.to_ne_bytes()),
                _ => {
                    let first = other.iter().position(|byte| *byte != 0).unwrap();
                    let lowest = other[first] & other[first].wrapping_neg();
                    other.fill(0);
                    other[first] = lowest;
                }
            }
            // To lower the score again, or to set the slack, takes privileges.
            if (attribute.set)(pid, &other).is_err() {
                continue;
            }
            let is_restored = before.restore(pid, || true);
            if attribute.name != "out-of-memory score" || rustix::process::geteuid().is_root() {
                assert_eq!(is_restored, Ok(()), "{}", attribute.name);
                assert_eq!((attribute.get)(pid), *recorded, "{}", attribute.name);
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! Process attributes of a template that workers inherit and that other processes of the same user can
//! change. The keeper records the attributes when the template is ready and restores them before each fork,
//! so that no job can change the attributes of later workers.
#![expect(
    unsafe_code,
    reason = "reading and setting attributes of another process requires raw system calls"
)]

use std::fs;
use std::io::Read;

/// Size of the buffer for the value of an attribute, in bytes. The largest value is a processor set, with one bit for
/// each of up to 8,192 processors.
const VALUE_BYTES: usize = 1024;

type Value = [u8; VALUE_BYTES];

/// Number of resource limits in Linux, and the size of one limit in bytes.
const LIMITS: usize = 16;
const LIMIT_BYTES: usize = size_of::<libc::rlimit64>();

const IOPRIO_WHO_PROCESS: usize = 1;

/// Name, getter and setter of a process attribute. The getter returns `false` if the attribute is not available on this
/// kernel.
type Attribute = (&'static str, fn(usize, &mut Value) -> bool, fn(usize, &Value));

const ATTRIBUTES: [Attribute; 6] = [
    (
        "processors",
        |pid, to| syscall(libc::SYS_sched_getaffinity, [pid, VALUE_BYTES, to.as_mut_ptr() as usize, 0]) > 0,
        |pid, mask| {
            syscall(libc::SYS_sched_setaffinity, [pid, VALUE_BYTES, mask.as_ptr() as usize, 0]);
        },
    ),
    // Scheduling policy, priority and time slice.
    (
        "scheduling",
        |pid, to| {
            let size = size_of::<libc::sched_attr>();
            syscall(libc::SYS_sched_getattr, [pid, to.as_mut_ptr() as usize, size, 0]) == 0
        },
        |pid, value| {
            syscall(libc::SYS_sched_setattr, [pid, value.as_ptr() as usize, 0, 0]);
        },
    ),
    (
        "I/O priority",
        |pid, to| {
            let priority = syscall(libc::SYS_ioprio_get, [IOPRIO_WHO_PROCESS, pid, 0, 0]);
            to[..2].copy_from_slice(&(priority as u16).to_ne_bytes());
            priority >= 0
        },
        |pid, value| {
            let priority = u16::from_ne_bytes([value[0], value[1]]);
            syscall(libc::SYS_ioprio_set, [IOPRIO_WHO_PROCESS, pid, priority.into(), 0]);
        },
    ),
    (
        "limits",
        |pid, to| {
            let mut limits = to.chunks_mut(LIMIT_BYTES).take(LIMITS).enumerate();
            limits.all(|(at, to)| syscall(libc::SYS_prlimit64, [pid, at, 0, to.as_mut_ptr() as usize]) == 0)
        },
        |pid, value| {
            for (at, limit) in value.chunks(LIMIT_BYTES).take(LIMITS).enumerate() {
                syscall(libc::SYS_prlimit64, [pid, at, limit.as_ptr() as usize, 0]);
            }
        },
    ),
    (
        "out-of-memory score",
        |pid, to| read(&format!("/proc/{pid}/oom_score_adj"), to),
        |pid, text| write(&format!("/proc/{pid}/oom_score_adj"), text),
    ),
    (
        "timer slack",
        |pid, to| read(&format!("/proc/{pid}/timerslack_ns"), to),
        |pid, text| write(&format!("/proc/{pid}/timerslack_ns"), text),
    ),
];

/// Values of all [`ATTRIBUTES`], recorded so that they can be restored.
pub(super) struct RecordedAttributes([Option<Box<Value>>; ATTRIBUTES.len()]);

impl RecordedAttributes {
    pub(super) fn record(pid: u32) -> Self {
        Self(ATTRIBUTES.map(|attribute| value(attribute, pid)))
    }

    /// Restores each attribute that has changed. Calls `is_template` before setting an attribute, because the PID of an
    /// exited process can be reused. If an attribute cannot be restored, returns its name as the error.
    pub(super) fn restore(&self, pid: u32, is_template: impl Fn() -> bool) -> Result<(), &'static str> {
        for (attribute, recorded) in ATTRIBUTES.into_iter().zip(&self.0) {
            let Some(recorded) = recorded else { continue };
            if value(attribute, pid).as_ref() != Some(recorded) && is_template() {
                let (name, _, set) = attribute;
                set(pid as usize, recorded);
                if value(attribute, pid).as_ref() != Some(recorded) {
                    return Err(name);
                }
            }
        }
        Ok(())
    }
}

fn value((_, get, _): Attribute, pid: u32) -> Option<Box<Value>> {
    let mut value = Box::new([0; VALUE_BYTES]);
    get(pid as usize, &mut value).then_some(value)
}

fn syscall(number: libc::c_long, [a, b, c, d]: [usize; 4]) -> libc::c_long {
    // SAFETY: the calls above access only a value that is borrowed for the call, and pass its true size.
    unsafe { libc::syscall(number, a, b, c, d) }
}

fn read(path: &str, to: &mut Value) -> bool {
    fs::File::open(path).and_then(|mut file| file.read(to)).is_ok()
}

fn write(path: &str, text: &Value) {
    let _ = fs::write(path, text.split(|byte| *byte == 0).next().unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_template_attributes_are_restored() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id();
        let before = RecordedAttributes::record(pid);
        assert!(before.0.iter().all(Option::is_some));
        for (attribute, recorded) in ATTRIBUTES.into_iter().zip(&before.0) {
            let (name, _, set) = attribute;
            let recorded = recorded.as_ref().unwrap();
            let mut other = recorded.clone();
            match name {
                // Changes the soft limit on open files, because any process is allowed to change it.
                "limits" => other[7 * 16..7 * 16 + 8].copy_from_slice(&17_u64.to_ne_bytes()),
                "out-of-memory score" => other[..4].copy_from_slice(b"900\0"),
                "timer slack" => other[..6].copy_from_slice(b"77000\0"),
                "I/O priority" => other[..2].copy_from_slice(&(3_u16 << 13).to_ne_bytes()),
                // Sets the policy `SCHED_BATCH`.
                "scheduling" => other[4..8].copy_from_slice(&3_u32.to_ne_bytes()),
                _ => {
                    let first = other.iter().position(|byte| *byte != 0).unwrap();
                    let lowest = other[first] & other[first].wrapping_neg();
                    other.fill(0);
                    other[first] = lowest;
                }
            }
            set(pid as usize, &other);
            // The old score cannot be restored without a privilege, because it is lower than the new score.
            if before.restore(pid, || true) == Err("out-of-memory score") {
                continue;
            }
            assert_eq!(value(attribute, pid).as_ref(), Some(recorded), "{name}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

//! Reads the state of a process from `/proc`, because the keeper does not trust the child's own reports. The keeper
//! does this when a worker is confined, and again when the worker's program runs. The callers decide what happens if
//! the state differs from the order. Landlock rules are not visible in `/proc`, so the child itself tests them.

use std::fs;
use std::io;
use std::path::Path;

use bulkhead_linux::process_tree::read_proc_file;
use bulkhead_linux::rlimits::Resource;

use crate::protocol::Rlimit;
use crate::protocol::confinement::{Namespaces, Observed};

/// Names, as used in `/proc`, of the namespaces that a worker can have for itself.
const NAMESPACE_NAMES: [&str; 6] = ["user", "pid", "ipc", "uts", "mnt", "net"];

fn parse_filter_count(status: &str) -> u32 {
    let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Namespaces and seccomp filters of the keeper, with which those of workers are compared.
pub(super) struct KeeperStatus {
    namespaces: [Option<std::path::PathBuf>; NAMESPACE_NAMES.len()],
    /// Number of seccomp filters that apply to the keeper itself.
    pub(super) filter_count: u32,
}

impl KeeperStatus {
    pub(super) fn read() -> Self {
        let namespaces = NAMESPACE_NAMES.map(|name| fs::read_link(format!("/proc/self/ns/{name}")).ok());
        Self {
            namespaces,
            filter_count: parse_filter_count(&read_proc_file("/proc/self/status").unwrap_or_default()),
        }
    }

    /// Returns the namespaces of a process that differ from the keeper's.
    pub(super) fn differing_namespaces(&self, pid: u32) -> io::Result<Namespaces> {
        let mut differs = [false; NAMESPACE_NAMES.len()];
        for ((name, own), differs) in NAMESPACE_NAMES.iter().zip(&self.namespaces).zip(&mut differs) {
            // `None` means that the kernel does not support this kind of namespace.
            let Some(own) = own else { continue };
            *differs = fs::read_link(format!("/proc/{pid}/ns/{name}"))? != *own;
        }
        let [user, pid, ipc, uts, mount, network] = differs;
        Ok(Namespaces { user, pid: pid && ipc && uts, mount, network, proc: false })
    }
}

pub(super) fn open_descriptors(pid: u32) -> io::Result<u32> {
    let path = format!("/proc/{pid}/fd");
    match fs::read_dir(&path) {
        Ok(entries) => Ok(entries.count() as u32),
        // The folder of a process that runs as another user cannot be listed. Since Linux 6.2, the size of the folder
        // is the number of open descriptors.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Ok(fs::metadata(&path)?.len() as u32)
        }
        Err(error) => Err(error),
    }
}

/// Reads the `/proc/PID/status` file of a process into `observed`. Returns the number of seccomp filters, or 0 if the
/// kernel does not report it.
pub(super) fn read_status(pid: u32, observed: &mut Observed) -> io::Result<u32> {
    let text = read_proc_file(&format!("/proc/{pid}/status"))?;
    parse_status(&text, observed);
    Ok(parse_filter_count(&text))
}

fn parse_status(text: &str, observed: &mut Observed) {
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let number = |name| field(name).and_then(|value| value.parse::<u32>().ok());
    // If the value is missing, assumes that the process has all capabilities.
    let set = |name| field(name).and_then(|value| u64::from_str_radix(value, 16).ok()).unwrap_or(u64::MAX);
    let single_id = |name| {
        let mut ids = field(name)?.split_whitespace().map(|id| id.parse::<u32>().ok());
        let first = ids.next()??;
        ids.all(|id| id == Some(first)).then_some(first)
    };
    observed.no_new_privs = number("NoNewPrivs") == Some(1);
    observed.seccomp = number("Seccomp").unwrap_or(0);
    // Kernels before 4.3 have no ambient set.
    let ambient = if field("CapAmb").is_some() { set("CapAmb") } else { 0 };
    observed.capabilities = set("CapEff") | set("CapPrm") | set("CapInh") | ambient;
    observed.bounding = set("CapBnd");
    (observed.uid, observed.gid) = (single_id("Uid"), single_id("Gid"));
    observed.groups = field("Groups").map_or(u32::MAX, |groups| groups.split_whitespace().count() as u32);
}

/// Returns the name of the first limit in `ordered` that is not in effect for the process, as spelled in
/// `/proc/PID/limits`. Skips the `deferred` resource, whose limit is set later.
pub(super) fn limit_mismatch(
    pid: u32,
    ordered: &[Rlimit],
    deferred: u32,
) -> io::Result<Option<&'static str>> {
    let text = read_proc_file(&format!("/proc/{pid}/limits"))?;
    let is_wrong = |limit: &&Rlimit| {
        limit.resource != deferred && limit_of(&text, limit.resource) != Some((limit.soft, limit.hard))
    };
    Ok(ordered.iter().find(is_wrong).map(|limit| limit_name(limit.resource)))
}

/// Returns the name of the first limit in `ordered` that the process's actual limit exceeds.
pub(super) fn limit_exceeded(pid: u32, ordered: &[Rlimit]) -> io::Result<Option<&'static str>> {
    let text = read_proc_file(&format!("/proc/{pid}/limits"))?;
    let is_wrong = |limit: &&Rlimit| {
        let found = limit_of(&text, limit.resource);
        found.is_none_or(|(soft, hard)| soft > limit.soft || hard > limit.hard)
    };
    Ok(ordered.iter().find(is_wrong).map(|limit| limit_name(limit.resource)))
}

/// Returns the soft limit and hard limit of a resource from the text of `/proc/PID/limits`.
fn limit_of(text: &str, resource: u32) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix(limit_name(resource)))?;
    let mut numbers = line.split_whitespace().map(|number| match number {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    });
    Some((numbers.next()??, numbers.next()??))
}

fn limit_name(resource: u32) -> &'static str {
    Resource::from_number(resource).map_or("unknown", Resource::label)
}

/// Returns true if a process is in the control group with the path `leaf`.
pub(super) fn is_in_cgroup(pid: u32, leaf: &Path) -> bool {
    let Ok(text) = read_proc_file(&format!("/proc/{pid}/cgroup")) else { return false };
    let own = text.lines().find_map(|line| line.strip_prefix("0::"));
    own.is_some_and(|own| Path::new(own).file_name() == leaf.file_name())
}

/// Returns the PID of the process that contains a thread, both in this PID namespace and in the process's own PID
/// namespace.
pub(super) fn process_of_thread(thread: u32) -> io::Result<(u32, u32)> {
    let text = read_proc_file(&format!("/proc/{thread}/status"))?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    let process = field("Tgid:").and_then(|value| value.trim().parse().ok());
    let inner = field("NStgid:").and_then(|value| value.split_whitespace().last()?.parse().ok());
    let process = process.ok_or(io::ErrorKind::InvalidData)?;
    Ok((process, inner.unwrap_or(process)))
}

/// PID of the parent of a process, and the PID that the process has in its own PID namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NamespacePids {
    pub(super) parent: u32,
    pub(super) inner: u32,
}

pub(super) fn namespace_pids(pid: u32) -> io::Result<NamespacePids> {
    let text = read_proc_file(&format!("/proc/{pid}/status"))?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().last());
    let number = |name| field(name).and_then(|value| value.parse().ok()).ok_or(io::ErrorKind::InvalidData);
    Ok(NamespacePids { parent: number("PPid:")?, inner: number("NSpid:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_status_file_is_parsed() {
        let text = "Name:\tx\nUid:\t7\t7\t7\t7\nGid:\t7\t8\t7\t7\nGroups:\t4 24 \nCapInh:\t0000000000000000\n\
            CapPrm:\t0000000000000001\nCapEff:\t0000000000000002\nCapBnd:\t000000ffffffffff\n\
            CapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";
        let mut observed = Observed::default();
        parse_status(text, &mut observed);
        let expected = Observed {
            no_new_privs: true,
            seccomp: 2,
            capabilities: 3,
            bounding: 0xff_ffff_ffff,
            uid: Some(7),
            gid: None,
            groups: 2,
            ..Observed::default()
        };
        assert_eq!(observed, expected);
        parse_status("", &mut observed);
        assert_eq!((observed.capabilities, observed.seccomp), (u64::MAX, 0));
    }

    #[test]
    fn rlimits_are_found_by_resource_number() {
        let [cpu, nofile, nice, address_space] =
            ["cpu", "nofile", "nice", "as"].map(|name| Resource::from_name(name).unwrap().number());
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
            Max cpu time              60                   61                   seconds   \n\
            Max open files            1024                 unlimited            files     \n\
            Max nice priority         0                    0                    \n";
        assert_eq!(limit_of(text, cpu), Some((60, 61)));
        assert_eq!(limit_of(text, nofile), Some((1024, u64::MAX)));
        assert_eq!(limit_of(text, nice), Some((0, 0)));
        assert_eq!(limit_of(text, address_space), None);
        let own = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let bound = |value: Option<u64>| value.unwrap_or(u64::MAX);
        let resource = nofile;
        let right = Rlimit { resource, soft: bound(own.current), hard: bound(own.maximum) };
        let wrong = Rlimit { soft: 3, ..right };
        let mismatch = |limits: &[Rlimit]| limit_mismatch(std::process::id(), limits, u32::MAX).unwrap();
        assert_eq!(mismatch(&[right]), None);
        assert_eq!(mismatch(&[right, wrong]), Some("Max open files"));
        assert_eq!(limit_mismatch(std::process::id(), &[wrong], resource).unwrap(), None);
        let exceeded = |limit| limit_exceeded(std::process::id(), &[limit]).unwrap();
        assert_eq!(exceeded(wrong), Some("Max open files"));
        assert_eq!(exceeded(Rlimit { soft: u64::MAX, hard: u64::MAX, ..right }), None);
    }

    #[test]
    fn process_shares_its_own_namespaces() {
        let own = KeeperStatus::read();
        assert_eq!(own.differing_namespaces(std::process::id()).unwrap(), Namespaces::default());
        assert_eq!(process_of_thread(std::process::id()).unwrap().0, std::process::id());
        assert!(open_descriptors(std::process::id()).unwrap() >= 3);
    }
}

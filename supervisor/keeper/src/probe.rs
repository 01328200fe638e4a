//! Determines which layers of confinement are available to this process, by trying each layer. `doctor` prints the
//! results, and the `plane` crate decides which workers can start without a layer. Nothing in this module confines a
//! worker.
//!
//! Kernel versions and settings are only hints, because a distribution, a container or a security module can
//! forbid what the kernel supports. Each trial has a time limit, and removes the processes, control groups
//! and mounts that it created.
#![expect(unsafe_code, reason = "there are no safe wrappers for most of the calls that the probes make")]

mod cgroup;
mod child;
mod landlock;
mod namespaces;

use std::io;

use bulkhead_linux::errno::check;
use nix::sys::socket::{getsockopt, sockopt::PeerPidfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::thread::{CapabilitySet, capabilities};

use self::child::TrialError;
use crate::confine::seccomp::{self, FatalAction};
use crate::protocol::LayerSupport;

impl LayerSupport {
    /// Creates the entry for a layer. Used for layers whose trial only succeeds or fails, without any details.
    fn without_details(layer: &str, tried: Result<(), impl Into<TrialError>>, what_to_do: &str) -> Self {
        Self::of(layer, tried.map(|()| None).map_err(|why| why.into().error_text()), what_to_do)
    }
}

/// Tries all layers of confinement, which usually takes a few milliseconds. A blocked trial is stopped after a few
/// seconds.
pub fn probe() -> Vec<LayerSupport> {
    let mut layers = landlock::probe();
    layers.extend(probe_seccomp());
    layers.extend(namespaces::probe());
    layers.extend(cgroup::probe());
    layers.extend(probe_descriptors());
    layers.extend(probe_capabilities());
    layers.push(probe_yama());
    layers.push(LayerSupport::without_details("no_new_privs", child::run_trial(no_new_privs), KERNEL_ADVICE));
    disable(&mut layers, &std::env::var(DISABLED_LAYERS).unwrap_or_default());
    layers.push(tree_end(&layers));
    layers.push(forked_workers(&layers));
    layers.push(probe_stacks());
    layers
}

fn is_available(layers: &[LayerSupport], name: &str) -> bool {
    layers.iter().any(|support| support.layer == name && support.is_available)
}

/// Name of the layer that [`probe`] reports as available if a template can fork workers in a sandbox (`start.mode =
/// "fork"`).
pub const FORKED_WORKERS: &str = "forked workers";

/// Checks the layers that isolate forked workers from each other. Also checks whether the kernel lists the
/// children of a thread, which the keeper needs to find the processes that workers leave behind.
fn forked_workers(layers: &[LayerSupport]) -> LayerSupport {
    let required = ["landlock scopes", "seccomp", "no_new_privs", TREE_END];
    let tried = match required.into_iter().find(|name| !is_available(layers, name)) {
        Some(layer) => Err(format!("{layer} is missing")),
        None => crate::spawn::can_list_children()
            .map(|()| None)
            .map_err(|errno| format!("/proc does not list the children of a thread: {}", error_text(errno))),
    };
    let what_to_do = "`start.mode = \"fork\"` works only with `profile = \"none\"`: fix the missing layer, or run \
                      a kernel built with CONFIG_PROC_CHILDREN";
    LayerSupport::of(FORKED_WORKERS, tried, what_to_do)
}

/// Name of the layer that [`probe`] reports as available if the kernel kills all descendants of a worker that dies
/// under the `default` profile.
pub const TREE_END: &str = "tree end";

/// Checks whether each worker can have a separate PID namespace with a separate `/proc` on this machine.
fn tree_end(layers: &[LayerSupport]) -> LayerSupport {
    let has = |name: &str| is_available(layers, name);
    let namespaces = ["pid namespace", "ipc namespace", "uts namespace", "mount namespace", "own /proc"];
    let missing = namespaces.into_iter().find(|name| !has(name));
    let may_create = has("CAP_SYS_ADMIN") || has("user namespace");
    let tried = match missing.or((!may_create).then_some("user namespace")) {
        None => Ok(Some("by the kernel: each worker has a separate pid namespace".to_owned())),
        Some(layer) => Err(format!(
            "{layer} is missing: under `default`, as under `none`, the keeper kills the processes that a worker leaves \
             behind; if the keeper and the supervisor are killed at the same instant, processes that left their session \
             survive"
        )),
    };
    LayerSupport::of(
        TREE_END,
        tried,
        "set `KillMode=control-group` (or `mixed`) in the unit, or fix the missing layer",
    )
}

/// Environment variable with a comma-separated list of layers to treat as missing. Used to test configurations for
/// machines that support fewer layers.
pub(crate) const DISABLED_LAYERS: &str = "BULKHEAD_WITHOUT";

fn disable(layers: &mut [LayerSupport], disabled: &str) {
    let variable_name = |support: &LayerSupport| match support.layer.as_str() {
        "other users" => "identity".to_owned(),
        "cgroup leaf" => "cgroup".to_owned(),
        layer => layer.replace(' ', "_"),
    };
    let is_disabled =
        |support: &LayerSupport| disabled.split(',').any(|name| name.trim() == variable_name(support));
    for support in layers.iter_mut().filter(|support| is_disabled(support)) {
        let what_to_do = Some("remove the layer from this variable".into());
        let why_not = Some(format!("{DISABLED_LAYERS} disables the layer"));
        *support = LayerSupport { is_available: false, found: None, why_not, what_to_do, ..support.clone() };
    }
}

fn no_new_privs() -> Result<(), TrialError> {
    child::limit_run_time();
    rustix::thread::set_no_new_privs(true)?;
    if rustix::thread::no_new_privs()? { Ok(()) } else { Err(TrialError::NotEnforced) }
}

/// Returns the operating system's message for an error number.
fn error_text(errno: Errno) -> String {
    io::Error::from(errno).to_string()
}

const KERNEL_ADVICE: &str = "run a newer kernel";

fn probe_seccomp() -> [LayerSupport; 3] {
    let action = |action| seccomp_action(action).map_err(TrialError::from);
    let filtered = action(libc::SECCOMP_RET_KILL_PROCESS).and_then(|()| try_filter(FatalAction::Kill));
    let named = filtered.and_then(|()| try_filter(FatalAction::Notify));
    [
        LayerSupport::without_details(
            "seccomp",
            filtered,
            "run a kernel that was built with CONFIG_SECCOMP_FILTER",
        ),
        LayerSupport::without_details(
            "seccomp notify",
            named.and_then(|()| action(libc::SECCOMP_RET_USER_NOTIF)),
            "forbidden system calls are not reported by name; run a newer kernel, or do not run the \
             supervisor inside another supervisor's sandbox",
        ),
        LayerSupport::without_details("seccomp kill", action(libc::SECCOMP_RET_KILL_PROCESS), KERNEL_ADVICE),
    ]
}

fn try_filter(fatal_action: FatalAction) -> Result<(), TrialError> {
    let filter = seccomp::test_filter(fatal_action);
    child::run_trial(|| {
        child::limit_run_time();
        rustix::thread::set_no_new_privs(true)?;
        filter.install()?;
        if seccomp::is_test_filter_active() { Ok(()) } else { Err(TrialError::NotEnforced) }
    })
}

fn seccomp_action(action: u32) -> Result<(), Errno> {
    // SAFETY: the call only reads the number that the pointer refers to.
    check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &action) })
}

fn probe_descriptors() -> [LayerSupport; 3] {
    [
        LayerSupport::without_details(
            "pidfd",
            pidfd_open(getpid(), PidfdFlags::empty()).map(drop),
            KERNEL_ADVICE,
        ),
        LayerSupport::without_details("peer pidfd", peer_pidfd(), "run kernel 6.5 or later"),
        LayerSupport::without_details("close_range", close_range(), KERNEL_ADVICE),
    ]
}

/// Checks that a Unix socket can provide a pidfd of the peer process in addition to the PID.
fn peer_pidfd() -> Result<(), Errno> {
    let (socket, _peer) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    getsockopt(&socket, PeerPidfd).map(drop).map_err(|errno| Errno::from_raw_os_error(errno as i32))
}

/// Checks that `close_range` works, by passing a descriptor number that is never open.
fn close_range() -> Result<(), Errno> {
    const NONE: libc::c_uint = libc::c_uint::MAX;
    // SAFETY: no descriptor has this number.
    check(unsafe { libc::syscall(libc::SYS_close_range, NONE, NONE, 0) })
}

fn probe_capabilities() -> [LayerSupport; 3] {
    let own = capabilities(None).map(|sets| sets.effective);
    let tried = |wanted| match own {
        Ok(own) if own.contains(wanted) => Ok(None),
        Ok(_) => Err("this user lacks the capability".to_owned()),
        Err(errno) => Err(error_text(errno)),
    };
    [
        LayerSupport::of("other users", other_users(own), "needed for `user`: run the supervisor as root"),
        LayerSupport::of(
            "CAP_SYS_ADMIN",
            tried(CapabilitySet::SYS_ADMIN),
            "not needed if user namespaces are available",
        ),
        LayerSupport::of(
            "CAP_SYS_RESOURCE",
            tried(CapabilitySet::SYS_RESOURCE),
            "needed only for limits above the supervisor's own: raise the supervisor's limits (ulimit -H, LimitNOFILE=)",
        ),
    ]
}

/// Checks for the privileges needed to start a worker as another user, give the worker a folder, and inspect and kill
/// the worker.
fn other_users(own: Result<CapabilitySet, Errno>) -> Result<Option<String>, String> {
    let needed = [
        ("CAP_SETUID", CapabilitySet::SETUID),
        ("CAP_SETGID", CapabilitySet::SETGID),
        ("CAP_CHOWN", CapabilitySet::CHOWN),
        ("CAP_KILL", CapabilitySet::KILL),
        ("CAP_DAC_OVERRIDE", CapabilitySet::DAC_OVERRIDE),
        ("CAP_SYS_PTRACE", CapabilitySet::SYS_PTRACE),
    ];
    let own = own.map_err(error_text)?;
    let missing: Vec<&str> =
        needed.iter().filter(|(_, one)| !own.contains(*one)).map(|(name, _)| *name).collect();
    if missing.is_empty() { Ok(None) } else { Err(format!("this user lacks {}", missing.join(", "))) }
}

/// Checks whether Yama restricts tracing. With such a restriction, processes of the same user are protected from each
/// other, as with Landlock.
fn probe_yama() -> LayerSupport {
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let (tried, what_to_do) = match std::fs::read_to_string(path).as_deref().map(str::trim) {
        Ok("0") => (
            Err("kernel.yama.ptrace_scope is 0".to_owned()),
            "set kernel.yama.ptrace_scope = 1 with sysctl; until then, Landlock and separate users are used instead",
        ),
        Ok(scope) => (Ok(Some(format!("kernel.yama.ptrace_scope is {scope}"))), ""),
        Err(_) => (
            Err("this kernel has no Yama".to_owned()),
            "boot with `yama` in `lsm=`; until then, Landlock and separate users are used instead",
        ),
    };
    LayerSupport::of("yama", tried, what_to_do)
}

/// Name of the layer that [`probe`] reports as available if the keeper can sample the stacks of workers.
const STACKS: &str = "stacks";

/// Checks whether the keeper can trace its workers, in order to sample their stacks.
fn probe_stacks() -> LayerSupport {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let is_root = rustix::process::geteuid().is_root();
    let can_trace = capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_PTRACE));
    // The process does not exist, so any error other than ESRCH comes from a filter or a security module.
    let filtered =
        nix::sys::ptrace::seize(nix::unistd::Pid::from_raw(i32::MAX), nix::sys::ptrace::Options::empty());
    let (tried, what_to_do) = if scope.trim() == "3" {
        (
            Err("kernel.yama.ptrace_scope is 3".to_owned()),
            "set kernel.yama.ptrace_scope = 2 or lower, and reboot",
        )
    } else if is_root && !can_trace {
        (Err("root lacks CAP_SYS_PTRACE".to_owned()), "start the container with `--cap-add SYS_PTRACE`")
    } else if filtered != Err(nix::errno::Errno::ESRCH) {
        (
            Err("a filter forbids ptrace".to_owned()),
            "allow `ptrace` in the seccomp profile of the container or unit",
        )
    } else {
        (Ok(None), "")
    };
    LayerSupport::of(STACKS, tried, what_to_do)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn descriptors_open() -> usize {
        std::fs::read_dir("/proc/self/fd").unwrap().count()
    }

    #[test]
    fn probe_reports_each_layer_once() {
        let start = Instant::now();
        let layers = probe();
        // Even on a busy machine, the probe takes much less time than this limit. A trial that is never stopped would
        // exceed any limit.
        assert!(start.elapsed() < Duration::from_secs(300));
        let mut names: Vec<_> = layers.iter().map(|support| &support.layer).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), layers.len());
        for support in &layers {
            assert_eq!(support.is_available, support.why_not.is_none(), "{support:?}");
            assert_eq!(support.is_available, support.what_to_do.is_none(), "{support:?}");
        }
        // This layer is always available, because every supported kernel has `pidfd_open`.
        let pidfd = layers.iter().find(|support| support.layer == "pidfd").unwrap();
        assert!(pidfd.is_available);
    }

    #[test]
    fn probe_does_not_confine_this_process() {
        probe();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let of_ours = |line: &&str| line.starts_with("NoNewPrivs:") || line.starts_with("Seccomp:");
        let ours: Vec<_> = status.lines().filter(of_ours).collect();
        assert!(ours.iter().all(|line| line.ends_with('0')), "{ours:?}");
    }

    /// The test runs in a separate process, because other tests open and close descriptors in this process.
    #[test]
    fn probe_leaves_no_descriptors_or_mounts_behind() {
        const MARK: &str = "BULKHEAD_TEST_PROBE";
        if std::env::var_os(MARK).is_none() {
            let module = module_path!().split_once("::").unwrap().1;
            let name = format!("{module}::probe_leaves_no_descriptors_or_mounts_behind");
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(MARK, "");
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
            return;
        }
        let state = || {
            let names = ["user", "net", "ipc", "uts", "pid_for_children", "mnt"];
            let read = |name: &str| std::fs::read_link(format!("/proc/thread-self/ns/{name}")).unwrap();
            let mounts = std::fs::read("/proc/thread-self/mountinfo").unwrap();
            (descriptors_open(), names.map(read), mounts)
        };
        // The measurement is repeated if necessary, because other programs can mount file systems at any time.
        let leaves_nothing = |_| {
            let before = state();
            (0..5).for_each(|_| drop(probe()));
            state() == before
        };
        assert!((0..20).any(leaves_nothing));
        assert!(cgroup::leaves().is_empty());
    }
}

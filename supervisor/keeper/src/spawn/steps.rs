//! Contains two tables of the steps that a forked child performs to become a worker, and the code of the steps.
//! `child.rs` runs the tables. The keeper prepares all data before the fork, so no step allocates memory or can panic.
//!
//! The first table is for the first process of new namespaces, the second for the process that executes the worker's
//! program. A child reports a failed step by its number, which the keeper turns into text with `describe`.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use bulkhead_linux::descriptors::close_all_except;
use bulkhead_linux::errno::check;
use bulkhead_linux::rlimits::{OPEN_FILES, Resource};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Pid, Signal, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::mounts::covers::Covers;
use super::mounts::root::{self, PrivateRoot};
use super::plan::{OomSettings, Plan};
use super::prepared::ChildConnections;
use super::progress::{self, StepError, StepFailure};
use super::{LANDLOCK_STEP, LINK_FD, ROOT_STEP, SECCOMP_STEP, SpawnError, mounts};
use crate::confine::landlock::RestrictError;
use crate::protocol::Rlimit;
use crate::protocol::confinement::Identity;

/// Umask of workers. Files created by a worker are accessible only to the worker's user.
const UMASK: Mode = Mode::RWXG.union(Mode::RWXO);

/// Highest signal number.
const SIGNAL_MAX: i32 = 64;

/// Highest possible capability number.
const CAPABILITY_MAX: libc::c_ulong = 63;

pub(super) type Step = fn(&Plan<'_>) -> Result<(), StepError>;

/// Steps of the first process in a worker's new namespaces.
///
/// The child of a privileged keeper creates the root folder while it is still root, so that it can access every folder
/// above the granted paths. It enters a user namespace afterwards. The child of an unprivileged keeper needs the user
/// namespace first, because it has the right to mount only in that namespace.
pub(super) const NAMESPACE_STEPS: [(&str, Step); 14] = [
    ("session", session),
    ("out-of-memory score", oom_score),
    ("working directory", enter_directory_early),
    ("parent-death signal", parent_death_signal),
    ("user namespace", user_namespace_before_root),
    ("identity in the user namespace", identity_before_root),
    ("parent-death signal after the identity", parent_death_signal),
    (ROOT_STEP, private_root),
    ("own /proc", private_proc),
    ("own /dev/shm", private_shared_memory),
    ("cgroup namespace", cgroup_namespace),
    ("user namespace", user_namespace_after_root),
    ("identity in the user namespace", identity_after_root),
    ("parent-death signal after the identity", parent_death_signal),
];

/// Steps of the process that executes the worker's program. The `rustix` functions used here are plain wrappers for
/// system calls.
///
/// Limits are set before the child changes its user and drops its capabilities, because raising a limit requires a
/// capability. Actions that a limit or filter could prevent come before that limit or filter. The limit on open files
/// is set last, when no more descriptors have to be passed, because it also limits the descriptors in flight for all
/// processes of the user.
pub(super) const WORKER_STEPS: [(&str, Step); 22] = [
    ("signals", signals),
    ("session", session),
    ("out-of-memory score", oom_score_without_namespaces),
    ("umask", umask),
    ("priority", priority),
    ("stdio", stdio),
    ("descriptors", descriptors),
    ("child subreaper", child_subreaper),
    (COVERS_STEP, covers),
    ("temporary file system", private_temporary),
    (RLIMIT_STEP, rlimits),
    ("bounding set", bounding_set),
    (DIRECTORY_STEP, working_directory_before_identity),
    ("identity", identity),
    ("capabilities", capabilities),
    ("parent-death signal", parent_death_signal),
    (DIRECTORY_STEP, working_directory),
    ("no_new_privs", no_new_privs),
    (LANDLOCK_STEP, landlock),
    (SECCOMP_STEP, seccomp),
    (RLIMIT_STEP, open_files),
    (EXEC_STEP, exec),
];

const COVERS_STEP: &str = "paths that the worker's user cannot reach";
const RLIMIT_STEP: &str = "rlimit";
const DIRECTORY_STEP: &str = "working directory";
const EXEC_STEP: &str = "exec";

/// Value of `detail` if the Landlock step failed because the kernel accepted the rules but does not enforce them.
const LANDLOCK_NOT_ENFORCED: u32 = 1;

/// Number of the step that forks the worker. This step is not part of a table, because it runs between the two tables
/// of steps.
pub(super) const WORKER_FORK_STEP: u32 = u32::MAX;

/// Number of the step that prepares the first process of a template's PID namespace.
pub(super) const TEMPLATE_INIT_STEP: u32 = u32::MAX - 1;

impl ChildConnections {
    /// Describes the step at which a child failed.
    pub(crate) fn describe(&self, failure: &StepFailure) -> SpawnError {
        let step = describe(failure, self.root.as_deref(), self.covers.as_deref());
        let errno = Errno::from_raw_os_error(failure.errno);
        SpawnError { step: if errno == Errno::NOENT { self.with_missing_path(step) } else { step }, errno }
    }

    /// Appends the missing path to the name of the step. Otherwise, the error message would name only the configured
    /// program.
    fn with_missing_path(&self, step: String) -> String {
        match step.as_str() {
            EXEC_STEP if self.program.exists() => format!(
                "{EXEC_STEP}: the interpreter in the first line (check for CRLF line endings) or the loader does not \
                 exist"
            ),
            EXEC_STEP => format!("{EXEC_STEP} {}", self.program.display()),
            DIRECTORY_STEP => format!("{DIRECTORY_STEP} {}", self.directory.display()),
            _ => step,
        }
    }
}

fn describe(failure: &StepFailure, root: Option<&PrivateRoot>, covers: Option<&Covers>) -> String {
    let mut steps = NAMESPACE_STEPS.iter().chain(&WORKER_STEPS);
    match steps.nth(failure.step as usize).map(|(name, _)| *name) {
        Some(RLIMIT_STEP) => format!("{RLIMIT_STEP} {}", rlimit_name(failure.detail)),
        Some(ROOT_STEP) => {
            let what = root.map(|root| root.describe(failure.detail)).unwrap_or_default();
            format!("{ROOT_STEP}: {what}")
        }
        Some(LANDLOCK_STEP) if failure.detail == LANDLOCK_NOT_ENFORCED => {
            format!("{LANDLOCK_STEP} check: the kernel accepted the rules but does not enforce them")
        }
        Some(COVERS_STEP) => {
            let what = covers.map(|covers| covers.describe(failure.detail)).unwrap_or_default();
            format!("{COVERS_STEP}: {what}")
        }
        Some(name) => name.to_owned(),
        None if failure.step == WORKER_FORK_STEP => "pid namespace".to_owned(),
        None if failure.step == TEMPLATE_INIT_STEP => {
            "read of the first process's children in /proc, which `start.mode = \"fork\"` \
             needs (CONFIG_PROC_CHILDREN)"
                .to_owned()
        }
        None => "unknown".to_owned(),
    }
}

fn rlimit_name(resource: u32) -> &'static str {
    Resource::from_number(resource).map_or("unknown", Resource::name)
}

/// Waits until the keeper has written the ID maps of the user namespace that was created by the fork.
fn user_namespace_before_root(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().namespaces.user || plan.prepared.confinement.makes_root_first() {
        return Ok(());
    }
    Ok(progress::request_id_maps(plan.prepared.progress.as_fd())?)
}

/// Creates a user namespace once the root folder exists, and waits until the keeper has written the namespace's ID
/// maps.
fn user_namespace_after_root(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().namespaces.user || !plan.prepared.confinement.makes_root_first() {
        return Ok(());
    }
    // SAFETY: the process has one thread, and shares no state that the call changes.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    Ok(progress::request_id_maps(plan.prepared.progress.as_fd())?)
}

fn identity_before_root(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.prepared.confinement.makes_root_first() { Ok(()) } else { identity_in_namespace(plan) }
}

fn identity_after_root(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.prepared.confinement.makes_root_first() { identity_in_namespace(plan) } else { Ok(()) }
}

/// Switches to the worker's user in the new user namespace, and keeps all capabilities in this namespace. Even with
/// these capabilities, a process cannot create files as a user that is not mapped.
fn identity_in_namespace(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().namespaces.user {
        return Ok(());
    }
    // Fails if the keeper is unprivileged. This is harmless, because such a keeper has no supplementary groups that
    // would give access.
    let _ = rustix::thread::set_thread_groups(&[]);
    set_identity(plan.layers().identity.unwrap_or(plan.keeper_identity))
}

/// Switches to the worker's user. Does nothing if an earlier step has already switched to this user in a new user
/// namespace.
fn identity(plan: &Plan<'_>) -> Result<(), StepError> {
    match plan.layers().identity {
        Some(identity) if !plan.layers().namespaces.user => {
            rustix::thread::set_thread_groups(&[])?;
            set_identity(identity)?;
            if plan.layers().subordinate_ids {
                restore_dumpable();
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Lets the keeper read this process's files in `/proc` again. After a process has changed its user, the kernel
/// otherwise requires capabilities that the keeper has only in its own user namespace.
fn restore_dumpable() {
    // SAFETY: sets a flag of this process. If this fails, the keeper cannot read the process's state, and
    // reports that.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
}

fn set_identity(Identity { uid, gid }: Identity) -> Result<(), StepError> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

fn private_root(plan: &Plan<'_>) -> Result<(), StepError> {
    let confinement = &plan.prepared.confinement;
    let Some(root) = &confinement.root else { return Ok(()) };
    // The worker can run as a different user, who must be able to traverse the folders created here.
    rustix::process::umask(Mode::empty());
    root.enter()?;
    // The Landlock rules already cover the system's files. The new mounts must be added.
    let Some(ruleset) = &confinement.ruleset else { return Ok(()) };
    root.expanded().iter().try_for_each(|folder| ruleset.add_readable(folder))?;
    Ok(ruleset.add_private_mounts(confinement.has_tmp())?)
}

/// Mounts a private `/proc` in the system's root folder. A private root folder already has a private `/proc`.
fn private_proc(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().namespaces.proc {
        return Ok(());
    }
    root::mount_private_proc()?;
    let Some(ruleset) = &plan.prepared.confinement.ruleset else { return Ok(()) };
    Ok(ruleset.add_private_mounts(false)?)
}

/// Mounts the worker's temporary folder at `/dev/shm`, as in a private root folder. Named shared memory and
/// semaphores are then private to the worker and count as temporary files.
fn private_shared_memory(plan: &Plan<'_>) -> Result<(), StepError> {
    plan.prepared.confinement.shared_memory.as_deref().map_or(Ok(()), bind_shared_memory)
}

fn bind_shared_memory(folder: &CStr) -> Result<(), StepError> {
    match mounts::mount(Some(folder), c"/dev/shm", None, libc::MS_BIND, None) {
        Err(Errno::NOENT) => Ok(()), // The system has no such folder.
        result => Ok(result?),
    }
}

/// If the worker has a private root folder, makes the worker's control group the root of the visible hierarchy. This
/// hides the group's path on the machine.
fn cgroup_namespace(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().namespaces.mount {
        return Ok(());
    }
    // SAFETY: this process has one thread, and nothing in it depends on the previous namespace.
    match check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }) {
        Err(Errno::INVAL) => Ok(()), // The kernel has no control groups.
        result => Ok(result?),
    }
}

/// Mounts granted paths that lie in folders that the worker's user cannot traverse. Does nothing if the worker has a
/// private root folder.
fn covers(plan: &Plan<'_>) -> Result<(), StepError> {
    let confinement = &plan.prepared.confinement;
    let Some(covers) = &confinement.covers else { return Ok(()) };
    let mask = rustix::process::umask(Mode::empty());
    let entered = covers.enter(confinement.ruleset.as_ref(), plan.layers().namespaces.proc);
    rustix::process::umask(mask);
    entered
}

/// If the worker uses the system's root folder, mounts a temporary file system over the worker's temporary folder.
fn private_temporary(plan: &Plan<'_>) -> Result<(), StepError> {
    let confinement = &plan.prepared.confinement;
    let Some((folder, options)) = &confinement.private_temporary else { return Ok(()) };
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    mounts::mount(Some(c"tmpfs"), folder, Some(c"tmpfs"), flags, Some(options))?;
    bind_shared_memory(folder)?;
    let Some(ruleset) = &confinement.ruleset else { return Ok(()) };
    Ok(ruleset.add_temporary(folder)?)
}

/// Drops the capability bounding set, so that the worker cannot gain capabilities by executing a program. Must run
/// before the process changes its user, because dropping the set requires a capability that is lost with the change.
fn bounding_set(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().no_capabilities {
        return Ok(());
    }
    for capability in 0..=CAPABILITY_MAX {
        // SAFETY: changes a set of this process. Without the necessary capability the call fails, which is harmless,
        // because with no_new_privs, executing a program grants no capabilities.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    Ok(())
}

fn capabilities(plan: &Plan<'_>) -> Result<(), StepError> {
    if !plan.layers().no_capabilities {
        return Ok(());
    }
    // SAFETY: clears the ambient set of this process. Fails only on a kernel without ambient capabilities.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn no_new_privs(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.layers().no_new_privs { Ok(rustix::thread::set_no_new_privs(true)?) } else { Ok(()) }
}

fn landlock(plan: &Plan<'_>) -> Result<(), StepError> {
    let Some(ruleset) = &plan.prepared.confinement.ruleset else { return Ok(()) };
    ruleset.restrict().map_err(|unrestricted| match unrestricted {
        RestrictError::Rejected(errno) => errno.into(),
        RestrictError::NotEnforced => StepError { errno: Errno::PERM, detail: LANDLOCK_NOT_ENFORCED },
    })?;
    // SAFETY: this process no longer uses the descriptor, and runs no destructors.
    unsafe { libc::close(ruleset.descriptor().as_raw_fd()) };
    Ok(())
}

/// Installs the seccomp filter, which is the last layer. Then waits until the keeper has checked all layers.
fn seccomp(plan: &Plan<'_>) -> Result<(), StepError> {
    let confinement = &plan.prepared.confinement;
    let listener = confinement.filter.as_ref().map(|filter| filter.install()).transpose()?.flatten();
    if confinement.is_any() {
        progress::report_confined(plan.prepared.progress.as_fd(), listener)?;
    }
    Ok(())
}

/// Restores the default handling of signals. The keeper ignores signals that would terminate it, and blocks SIGCHLD.
/// The program must not inherit these settings.
fn signals(_: &Plan<'_>) -> Result<(), StepError> {
    // Uses the raw system call, because the C library refuses to change the two signals that it reserves.
    const DEFAULT: [u64; 4] = [0; 4];
    const NONE: u64 = 0;
    let nowhere = std::ptr::null_mut::<u64>();
    for signal in 1..=SIGNAL_MAX {
        // SAFETY: all zeros is the default action of every signal. The kernel refuses signals that cannot be
        // changed.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &DEFAULT, nowhere, size_of_val(&NONE)) };
    }
    // SAFETY: the set of signals has this size, and the old set is not requested.
    let result = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &NONE, nowhere, size_of_val(&NONE))
    };
    Ok(check(result as i32)?)
}

fn session(_: &Plan<'_>) -> Result<(), StepError> {
    match rustix::process::setsid() {
        // Both tables contain this step. Without a PID namespace, one process runs both tables, so it already leads a
        // session when it reaches this step again.
        Err(Errno::PERM) if rustix::process::getsid(None)? == rustix::process::getpid() => {}
        other => drop(other?),
    }
    Ok(())
}

/// Makes the kernel kill the worker first when memory runs out. Must run before the process changes its user, because
/// afterwards the process could no longer write the file.
fn oom_score(plan: &Plan<'_>) -> Result<(), StepError> {
    let OomSettings { is_protected, worker_score } = plan.original.oom;
    // Formats the number without an allocation. A leading zero would make the number octal.
    let digits: [u8; 4] = [1000, 100, 10, 1].map(|unit| b'0' + (worker_score / unit % 10) as u8);
    let first = digits.iter().position(|&digit| digit != b'0').unwrap_or(digits.len() - 1);
    let written = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty())
        .and_then(|file| rustix::io::write(file, &digits[first..]));
    match written {
        // If the write fails, the worker keeps the keeper's score, which is higher than the supervisor's. This is
        // acceptable unless the supervisor is protected.
        Err(errno) if is_protected => Err(errno.into()),
        _ => Ok(()),
    }
}

/// Sets the out-of-memory score if there are no new namespaces. If there are new namespaces, this process has inherited
/// the score from the first process, which has already set it.
fn oom_score_without_namespaces(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.layers().namespaces.any() { Ok(()) } else { oom_score(plan) }
}

fn umask(_: &Plan<'_>) -> Result<(), StepError> {
    rustix::process::umask(UMASK);
    Ok(())
}

/// Restores the nice value that the keeper had when it was started. The child has its own session, so the kernel does
/// not schedule it in the keeper's autogroup.
fn priority(plan: &Plan<'_>) -> Result<(), StepError> {
    // The supervisor may run with a real-time policy, which a worker must not inherit. An error means that there is no
    // such policy.
    let ordinary = libc::sched_param { sched_priority: 0 };
    // SAFETY: the pointer refers to a local variable. The call affects this thread.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, &raw const ordinary) };
    Ok(rustix::process::setpriority_process(None, plan.original.nice)?)
}

/// Sets up the standard streams. Standard input is the keeper's `/dev/null` or, if the worker is a host of programs,
/// the file that contains the rules for these programs.
fn stdio(plan: &Plan<'_>) -> Result<(), StepError> {
    if let Some(rules) = &plan.prepared.confinement.program_rules {
        duplicate_to(rules, libc::STDIN_FILENO)?;
    }
    duplicate_to(&plan.prepared.stdout, libc::STDOUT_FILENO)?;
    duplicate_to(&plan.prepared.stderr, libc::STDERR_FILENO)?;
    if let Some(hosted_file) = &plan.prepared.confinement.hosted_file {
        rustix::io::fcntl_setfd(hosted_file, rustix::io::FdFlags::empty())?;
    }
    Ok(duplicate_to(&plan.prepared.link, LINK_FD)?)
}

/// Duplicates a descriptor to the given number. If this number is already in use, the previous descriptor is closed.
pub(crate) fn duplicate_to(descriptor: &OwnedFd, number: RawFd) -> rustix::io::Result<()> {
    // SAFETY: the replaced descriptor is a standard stream or, in the child, the keeper's socket. Nothing in this
    // process continues to use the replaced descriptor.
    check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })
}

fn child_subreaper(_: &Plan<'_>) -> Result<(), StepError> {
    // The kernel treats any nonzero value as true.
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

fn rlimits(plan: &Plan<'_>) -> Result<(), StepError> {
    let limits = plan.prepared.rlimits.iter();
    limits.clone().filter(|limit| limit.resource != OPEN_FILES).try_for_each(set_limit)?;
    // Raises the limit on open files here, because later steps lack the right to raise it.
    let (_, hard) = plan.original.open_files;
    let mut raised = limits.filter(|limit| limit.resource == OPEN_FILES && limit.hard > hard);
    raised.try_for_each(|limit| set_limit(&Rlimit { soft: limit.hard, ..*limit }))
}

/// Sets the limit on open files. If the spawn order contains no such limit, the worker gets the limit that the keeper
/// had when it was started. For a confined worker, this default is at most three quarters of the keeper's hard limit.
/// With a higher limit, a worker could prevent the keeper from starting other workers, because descriptors that a
/// worker sends to itself but never receives count against the limits of all processes of the user.
fn open_files(plan: &Plan<'_>) -> Result<(), StepError> {
    if let Some(ordered) = plan.prepared.rlimits.iter().find(|limit| limit.resource == OPEN_FILES) {
        return set_limit(ordered);
    }
    let (soft, hard) = plan.original.open_files;
    let hard = if plan.prepared.confinement.is_any() { hard - hard / 4 } else { hard };
    set_limit(&Rlimit { resource: OPEN_FILES, soft: soft.min(hard), hard })
}

fn set_limit(limit: &Rlimit) -> Result<(), StepError> {
    let value = libc::rlimit { rlim_cur: limit.soft, rlim_max: limit.hard };
    // SAFETY: the pointer refers to a local variable. The kernel refuses a resource that does not exist.
    let result = check(unsafe { libc::setrlimit(limit.resource as _, &value) });
    result.map_err(|errno| StepError { errno, detail: limit.resource })
}

/// Makes the kernel kill the child when the keeper dies. Must be repeated after a change of user, because the kernel
/// then clears the setting.
fn parent_death_signal(plan: &Plan<'_>) -> Result<(), StepError> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // If this process is in a new PID namespace, the keeper's PID is not visible here. The keeper was still alive when
    // it allowed this process to continue.
    let is_numbered = !plan.layers().namespaces.pid;
    if !is_numbered || rustix::process::getppid() == Some(plan.keeper) {
        Ok(())
    } else {
        Err(Errno::SRCH.into())
    }
}

/// Closes all descriptors except standard input, output and error, the link, the file that a host loads or runs, and
/// descriptors for later steps. The descriptors for later steps are close-on-exec.
fn descriptors(plan: &Plan<'_>) -> Result<(), StepError> {
    let prepared = plan.prepared;
    let ruleset = prepared.confinement.ruleset.as_ref().map(|ruleset| ruleset.descriptor().as_raw_fd());
    let executable = prepared.confinement.executable.as_ref().map(AsRawFd::as_raw_fd);
    let hosted_file = prepared.confinement.hosted_file.as_ref().map(AsRawFd::as_raw_fd);
    let progress = prepared.progress.as_raw_fd();
    let [ruleset, executable, hosted_file] =
        [ruleset, executable, hosted_file].map(|one| one.unwrap_or(progress));
    // SAFETY: the descriptors are copies of the keeper's, and nothing in this process uses them.
    Ok(unsafe { close_all_except(LINK_FD + 1, &mut [progress, ruleset, executable, hosted_file]) }?)
}

fn working_directory(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.prepared.confinement.executable.is_some() {
        return Ok(());
    }
    Ok(rustix::process::chdir(plan.prepared.directory.as_c_str())?)
}

/// Enters the working directory before the process changes to the worker's user. Does nothing if there are new
/// namespaces, because their first process has already entered the directory.
fn working_directory_before_identity(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.layers().namespaces.any() { Ok(()) } else { enter_directory_early(plan) }
}

/// Enters the working directory before the process changes to the worker's user, who might not be able to enter it.
/// Does nothing if the program is executed by path, because the directory is then entered later.
fn enter_directory_early(plan: &Plan<'_>) -> Result<(), StepError> {
    if plan.prepared.confinement.executable.is_none() {
        return Ok(());
    }
    Ok(rustix::process::chdir(plan.prepared.directory.as_c_str())?)
}

fn exec(plan: &Plan<'_>) -> Result<(), StepError> {
    let (arguments, environment) = (plan.arguments.as_ptr(), plan.environment.as_ptr());
    if let Some(executable) = &plan.prepared.confinement.executable {
        let (program, here) = (executable.as_raw_fd(), c"".as_ptr());
        // SAFETY: both lists are null-terminated, and `plan` owns the lists and their strings. The path
        // is NUL-terminated.
        return Ok(check(unsafe {
            libc::syscall(libc::SYS_execveat, program, here, arguments, environment, libc::AT_EMPTY_PATH)
        } as i32)?);
    }
    // SAFETY: both lists are null-terminated, and `plan` owns the lists and their strings.
    Ok(check(unsafe { libc::execve(plan.prepared.program.as_ptr(), arguments, environment) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documentation_lists_all_start_steps_in_order() {
        let page = include_str!("../../../../docs/keeper.md");
        let section = page.split("## The steps of a worker").nth(1).unwrap().split("## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        let documented: Vec<_> = rows.filter(|first| !matches!(*first, "step" | "---")).collect();
        let steps: Vec<_> = NAMESPACE_STEPS.iter().chain(&WORKER_STEPS).map(|(name, _)| *name).collect();
        assert_eq!(documented, steps);
    }
}

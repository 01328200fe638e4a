//! The steps of a child: two tables, and what is in them.
//!
//! The first table is for the first process of new namespaces, the second for the process that becomes the
//! worker's program. Each step is system calls on what was prepared, and can only succeed or be named.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use bulkhead_linux::descriptors::close_all_but;
use bulkhead_linux::errno::check;
use bulkhead_linux::rlimits::{OPEN_FILES, Resource};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Pid, Signal, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::progress::{self, Failure, Stop};
use super::root::Root;
use super::shown::Shown;
use super::{LINK_FD, Oom, Plan};
use crate::Rlimit;
use crate::confine::landlock::Unrestricted;
use crate::confinement::Identity;

/// What a worker creates is its user's own business: readable and writable by no other user.
const UMASK: Mode = Mode::RWXG.union(Mode::RWXO);

/// The last number of a signal.
const SIGNAL_MAX: i32 = 64;

/// The last number that a capability can have.
const CAPABILITY_MAX: libc::c_ulong = 63;

pub(super) type Step = fn(&Plan<'_>) -> Result<(), Stop>;

/// Of the first process in new namespaces.
///
/// A privileged keeper's child makes the root folder while it is still root, so that no folder above what
/// the worker is given is closed to it, and enters a user namespace afterwards. Any other needs the user
/// namespace first, for the right to mount.
pub(super) const OUTER: [(&str, Step); 14] = [
    ("session", session),
    ("out-of-memory score", memory_score),
    ("working directory", enter_directory),
    ("parent-death signal", parent_death_signal),
    ("user namespace", user_namespace_before_root),
    ("identity in the user namespace", identity_before_root),
    ("parent-death signal after the identity", parent_death_signal),
    (ROOT, private_root),
    ("own /proc", own_proc),
    ("own /dev/shm", own_shared_memory),
    ("cgroup namespace", own_cgroup),
    ("user namespace", user_namespace_after_root),
    ("identity in the user namespace", identity_after_root),
    ("parent-death signal after the identity", parent_death_signal),
];

/// Of the process that becomes the worker's program. The wrappers of `rustix` used here are bare system calls.
///
/// Limits come before the identity and the capabilities, since to raise one takes a capability; and what
/// a limit or a filter could hinder is done before it is set. That of open files also bounds what a process
/// may hand over, counting what others of its user have under way; so it comes when nothing is any more.
pub(super) const INNER: [(&str, Step); 22] = [
    ("signals", signals),
    ("session", session),
    ("out-of-memory score", inherited_memory_score),
    ("umask", umask),
    ("priority", priority),
    ("stdio", stdio),
    ("descriptors", descriptors),
    ("child subreaper", child_subreaper),
    (SHOWN, shown),
    ("temporary file system", own_temporary),
    (RLIMIT, rlimits),
    ("bounding set", bounding_set),
    ("working directory", working_directory_before_identity),
    ("identity", identity),
    ("capabilities", capabilities),
    ("parent-death signal", parent_death_signal),
    ("working directory", working_directory),
    ("no_new_privs", no_new_privs),
    (LANDLOCK, landlock),
    (SECCOMP, seccomp),
    (RLIMIT, open_files),
    ("exec", exec),
];

pub(super) const ROOT: &str = "mount namespace";
const SHOWN: &str = "what its user cannot reach";
pub(super) const LANDLOCK: &str = "landlock";
pub(super) const SECCOMP: &str = "seccomp";
const RLIMIT: &str = "rlimit";

/// What the step of Landlock says where its rules have been taken and are not in force.
const LANDLOCK_UNTRUE: u32 = 1;

/// The number of the fork between the tables.
pub(super) const PID_NAMESPACE: u32 = u32::MAX;

/// The number of what the first process beside a template needs.
pub(super) const NEST: u32 = u32::MAX - 1;

/// What a child that failed was about.
pub(super) fn describe(failure: &Failure, root: Option<&Root>, shown: Option<&Shown>) -> String {
    let mut steps = OUTER.iter().chain(&INNER);
    match steps.nth(failure.step as usize).map(|(name, _)| *name) {
        Some(RLIMIT) => format!("{RLIMIT} {}", rlimit_name(failure.detail)),
        Some(ROOT) => {
            let what = root.map(|root| root.describe(failure.detail)).unwrap_or_default();
            format!("{ROOT}: {what}")
        }
        Some(LANDLOCK) if failure.detail == LANDLOCK_UNTRUE => {
            format!("{LANDLOCK} read-back: the kernel took the rules, and what they forbid succeeds")
        }
        Some(SHOWN) => {
            let what = shown.map(|shown| shown.describe(failure.detail)).unwrap_or_default();
            format!("{SHOWN}: {what}")
        }
        Some(name) => name.to_owned(),
        None if failure.step == PID_NAMESPACE => "pid namespace".to_owned(),
        None if failure.step == NEST => {
            "read of the first process's children in /proc, which `start.mode = \"fork\"` \
             takes (CONFIG_PROC_CHILDREN)"
                .to_owned()
        }
        None => "unknown".to_owned(),
    }
}

fn rlimit_name(resource: u32) -> &'static str {
    Resource::numbered(resource).map_or("unknown", Resource::name)
}

/// The fork has made the namespace; waits until the keeper has said which users there are in it.
fn user_namespace_before_root(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().namespaces.user || plan.prepared.barriers.root_comes_first() {
        return Ok(());
    }
    Ok(progress::want_map(plan.prepared.progress.as_fd())?)
}

/// The same for a namespace that is made only now.
fn user_namespace_after_root(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().namespaces.user || !plan.prepared.barriers.root_comes_first() {
        return Ok(());
    }
    // SAFETY: the process has one thread, and does not share what it leaves.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    Ok(progress::want_map(plan.prepared.progress.as_fd())?)
}

fn identity_before_root(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.prepared.barriers.root_comes_first() { Ok(()) } else { inner_identity(plan) }
}

fn identity_after_root(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.prepared.barriers.root_comes_first() { inner_identity(plan) } else { Ok(()) }
}

/// In a user namespace a process has all rights, but can make no file as a user that there is not. So it
/// becomes the worker's user at once, which takes no right from it.
fn inner_identity(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().namespaces.user {
        return Ok(());
    }
    // Refused where the keeper has no privileges: then it has no groups to give up that matter to others.
    let _ = rustix::thread::set_thread_groups(&[]);
    become_one(plan.terms().identity.unwrap_or(plan.own))
}

/// Outside of user namespaces; in one, it has been done.
fn identity(plan: &Plan<'_>) -> Result<(), Stop> {
    match plan.terms().identity {
        Some(identity) if !plan.terms().namespaces.user => {
            rustix::thread::set_thread_groups(&[])?;
            become_one(identity)?;
            if plan.terms().subordinate {
                be_readable();
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A process that has changed its user shows nothing of itself but to those who may look at any. The keeper has the
/// user namespace, but is not one of these.
fn be_readable() {
    // SAFETY: sets a flag of this process. If it is not set, the keeper cannot read it back, and says so.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
}

fn become_one(Identity { uid, gid }: Identity) -> Result<(), Stop> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    Ok(rustix::thread::set_thread_res_uid(uid, uid, uid)?)
}

fn private_root(plan: &Plan<'_>) -> Result<(), Stop> {
    let barriers = &plan.prepared.barriers;
    let Some(root) = &barriers.root else { return Ok(()) };
    // The worker, perhaps another user, is to go through its folders.
    rustix::process::umask(Mode::empty());
    root.enter()?;
    // The rules know the files of the system, not what has been mounted just now.
    let Some(ruleset) = &barriers.ruleset else { return Ok(()) };
    root.opened().iter().try_for_each(|folder| ruleset.add_given(folder))?;
    Ok(ruleset.add_mounted(barriers.has_tmp())?)
}

/// On the system's root folder; a root folder of its own has one already.
fn own_proc(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().namespaces.proc {
        return Ok(());
    }
    super::root::mount_own_proc()?;
    let Some(ruleset) = &plan.prepared.barriers.ruleset else { return Ok(()) };
    Ok(ruleset.add_mounted(false)?)
}

/// Shows the worker's temporary folder at `/dev/shm`, as with a private root folder. So shared memory and semaphores
/// that programs create by name belong to this worker alone, and count as temporary files.
fn own_shared_memory(plan: &Plan<'_>) -> Result<(), Stop> {
    plan.prepared.barriers.shared_memory.as_deref().map_or(Ok(()), show_as_shared_memory)
}

fn show_as_shared_memory(folder: &CStr) -> Result<(), Stop> {
    match super::mounts::mount(Some(folder), c"/dev/shm", None, libc::MS_BIND, None) {
        Err(Errno::NOENT) => Ok(()), // A system without that.
        result => Ok(result?),
    }
}

/// With a root folder of its own, its control group is the top of what it sees of them: where it lies on this machine
/// is of no concern in there.
fn own_cgroup(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().namespaces.mount {
        return Ok(());
    }
    // SAFETY: this process has one thread, and nothing in it depends on what it leaves.
    match check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }) {
        Err(Errno::INVAL) => Ok(()), // A kernel without control groups.
        result => Ok(result?),
    }
}

/// Without a root folder of its own.
fn shown(plan: &Plan<'_>) -> Result<(), Stop> {
    let barriers = &plan.prepared.barriers;
    let Some(shown) = &barriers.shown else { return Ok(()) };
    let mask = rustix::process::umask(Mode::empty());
    let entered = shown.enter(barriers.ruleset.as_ref(), plan.terms().namespaces.proc);
    rustix::process::umask(mask);
    entered
}

/// In the place of its folder, on the system's root folder.
fn own_temporary(plan: &Plan<'_>) -> Result<(), Stop> {
    let barriers = &plan.prepared.barriers;
    let Some((folder, options)) = &barriers.own_temporary else { return Ok(()) };
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    super::mounts::mount(Some(c"tmpfs"), folder, Some(c"tmpfs"), flags, Some(options))?;
    show_as_shared_memory(folder)?;
    let Some(ruleset) = &barriers.ruleset else { return Ok(()) };
    Ok(ruleset.add_temporary(folder)?)
}

/// The right to get any capability by executing something. Before the identity, which takes along the
/// capability that this takes.
fn bounding_set(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().no_capabilities {
        return Ok(());
    }
    for capability in 0..=CAPABILITY_MAX {
        // SAFETY: changes a set of this process. A process without that right has nothing to lose by executing,
        // once it has given up new privileges.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
    }
    Ok(())
}

/// All of them.
fn capabilities(plan: &Plan<'_>) -> Result<(), Stop> {
    if !plan.terms().no_capabilities {
        return Ok(());
    }
    // SAFETY: changes a set of this process; only a kernel without such a set refuses.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

fn no_new_privs(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.terms().no_new_privs { Ok(rustix::thread::set_no_new_privs(true)?) } else { Ok(()) }
}

fn landlock(plan: &Plan<'_>) -> Result<(), Stop> {
    let Some(ruleset) = &plan.prepared.barriers.ruleset else { return Ok(()) };
    ruleset.restrict().map_err(|unrestricted| match unrestricted {
        Unrestricted::Refused(errno) => errno.into(),
        Unrestricted::Untrue => Stop { errno: Errno::PERM, detail: LANDLOCK_UNTRUE },
    })?;
    // SAFETY: it is not used any more in this process, which drops nothing.
    unsafe { libc::close(ruleset.descriptor().as_raw_fd()) };
    Ok(())
}

/// The last barrier, and the keeper's look at all of them.
fn seccomp(plan: &Plan<'_>) -> Result<(), Stop> {
    let barriers = &plan.prepared.barriers;
    let listener = barriers.filter.as_ref().map(|filter| filter.install()).transpose()?.flatten();
    if barriers.are_any() {
        progress::ready(plan.prepared.progress.as_fd(), listener)?;
    }
    Ok(())
}

/// The keeper ignores what ends a process, and blocks SIGCHLD; both would survive `execve`.
fn signals(_: &Plan<'_>) -> Result<(), Stop> {
    // The kernel's own structures: the C library's calls refuse the two signals that it uses itself.
    const DEFAULT: [u64; 4] = [0; 4];
    const NONE: u64 = 0;
    let nowhere = std::ptr::null_mut::<u64>();
    for signal in 1..=SIGNAL_MAX {
        // SAFETY: all zeros is the default of every signal; what cannot be changed is refused.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &DEFAULT, nowhere, size_of_val(&NONE)) };
    }
    // SAFETY: the set of signals has this size, and the old one is not asked for.
    let result = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &NONE, nowhere, size_of_val(&NONE))
    };
    Ok(check(result as i32)?)
}

fn session(_: &Plan<'_>) -> Result<(), Stop> {
    match rustix::process::setsid() {
        // Both tables want one, and there is a fork between them only for a pid namespace.
        Err(Errno::PERM) if rustix::process::getsid(None)? == rustix::process::getpid() => {}
        other => drop(other?),
    }
    Ok(())
}

/// It is a worker that the kernel should end when memory runs out. Only here does the file belong to the user that
/// this process still is.
fn memory_score(plan: &Plan<'_>) -> Result<(), Stop> {
    let Oom { is_spared, workers } = plan.standing.oom;
    // Without an allocation, as everything here; a leading zero would make it octal.
    let digits: [u8; 4] = [1000, 100, 10, 1].map(|unit| b'0' + (workers / unit % 10) as u8);
    let first = digits.iter().position(|&digit| digit != b'0').unwrap_or(digits.len() - 1);
    let written = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty())
        .and_then(|file| rustix::io::write(file, &digits[first..]));
    match written {
        // With the score of the keeper, which is above the supervisor's, it is not worse off than others.
        Err(errno) if is_spared => Err(errno.into()),
        _ => Ok(()),
    }
}

/// In namespaces, the first process there has set it for all.
fn inherited_memory_score(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.terms().namespaces.any() { Ok(()) } else { memory_score(plan) }
}

fn umask(_: &Plan<'_>) -> Result<(), Stop> {
    rustix::process::umask(UMASK);
    Ok(())
}

/// That of before the keeper was started. In a session of its own, the child is out of the keeper's autogroup.
fn priority(plan: &Plan<'_>) -> Result<(), Stop> {
    // The supervisor's unit may be served before all others, and a worker must not. Where it is not, there
    // is nothing to give up.
    let ordinary = libc::sched_param { sched_priority: 0 };
    // SAFETY: the pointer is to a local; the call is about this thread.
    unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, &raw const ordinary) };
    Ok(rustix::process::setpriority_process(None, plan.standing.nice)?)
}

/// Standard input is the keeper's own, `/dev/null`, or what a host of programs is told.
fn stdio(plan: &Plan<'_>) -> Result<(), Stop> {
    if let Some(rules) = &plan.prepared.barriers.program_rules {
        put_at(rules, libc::STDIN_FILENO)?;
    }
    put_at(&plan.prepared.stdout, libc::STDOUT_FILENO)?;
    put_at(&plan.prepared.stderr, libc::STDERR_FILENO)?;
    if let Some(hosted) = &plan.prepared.barriers.hosted {
        rustix::io::fcntl_setfd(hosted, rustix::io::FdFlags::empty())?;
    }
    Ok(put_at(&plan.prepared.link, LINK_FD)?)
}

/// Makes a number mean this descriptor, whatever it meant before.
pub(crate) fn put_at(descriptor: &OwnedFd, number: RawFd) -> rustix::io::Result<()> {
    // SAFETY: what had the number is standard input, output or error, or in the child the keeper's
    // socket: nothing that this process owns and goes on using.
    check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })
}

fn child_subreaper(_: &Plan<'_>) -> Result<(), Stop> {
    // The kernel takes any number but zero for yes.
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

fn rlimits(plan: &Plan<'_>) -> Result<(), Stop> {
    let limits = plan.prepared.rlimits.iter();
    limits.clone().filter(|limit| limit.resource != OPEN_FILES).try_for_each(set_limit)?;
    // Only here may it still be raised.
    let (_, hard) = plan.standing.open_files;
    let mut raised = limits.filter(|limit| limit.resource == OPEN_FILES && limit.hard > hard);
    raised.try_for_each(|limit| set_limit(&Rlimit { soft: limit.hard, ..*limit }))
}

/// What was ordered, or what the keeper was started with before it took all that it may have. A confined
/// worker gets no more than three quarters of that: what it hands to itself and does not read counts against
/// all of its user, and is not to keep the keeper from starting others.
fn open_files(plan: &Plan<'_>) -> Result<(), Stop> {
    if let Some(ordered) = plan.prepared.rlimits.iter().find(|limit| limit.resource == OPEN_FILES) {
        return set_limit(ordered);
    }
    let (soft, hard) = plan.standing.open_files;
    let hard = if plan.prepared.barriers.are_any() { hard - hard / 4 } else { hard };
    set_limit(&Rlimit { resource: OPEN_FILES, soft: soft.min(hard), hard })
}

fn set_limit(limit: &Rlimit) -> Result<(), Stop> {
    let value = libc::rlimit { rlim_cur: limit.soft, rlim_max: limit.hard };
    // SAFETY: the pointer is to a local; a resource that does not exist is refused.
    let result = check(unsafe { libc::setrlimit(limit.resource as _, &value) });
    result.map_err(|errno| Stop { errno, detail: limit.resource })
}

/// The second net, should the keeper be killed. A change of the identity takes it away.
fn parent_death_signal(plan: &Plan<'_>) -> Result<(), Stop> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent outside of the namespace has no number here. That it lives shows when it lets us go on.
    let is_numbered = !plan.terms().namespaces.pid;
    if !is_numbered || rustix::process::getppid() == Some(plan.keeper) {
        Ok(())
    } else {
        Err(Errno::SRCH.into())
    }
}

/// Closes all but the standard ones, the link, what a host loads or runs, and what the steps to come need, which is
/// marked to be closed by `execve`.
fn descriptors(plan: &Plan<'_>) -> Result<(), Stop> {
    let prepared = plan.prepared;
    let ruleset = prepared.barriers.ruleset.as_ref().map(|ruleset| ruleset.descriptor().as_raw_fd());
    let executable = prepared.barriers.executable.as_ref().map(AsRawFd::as_raw_fd);
    let hosted = prepared.barriers.hosted.as_ref().map(AsRawFd::as_raw_fd);
    let progress = prepared.progress.as_raw_fd();
    let [ruleset, executable, hosted] = [ruleset, executable, hosted].map(|one| one.unwrap_or(progress));
    // SAFETY: they are copies of the keeper's, and nothing in this process uses them.
    Ok(unsafe { close_all_but(LINK_FD + 1, &mut [progress, ruleset, executable, hosted]) }?)
}

fn working_directory(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.prepared.barriers.executable.is_some() {
        return Ok(());
    }
    Ok(rustix::process::chdir(plan.prepared.directory.as_c_str())?)
}

/// Where the worker's user cannot go there by itself, and nothing can be shown to it.
fn working_directory_before_identity(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.terms().namespaces.any() { Ok(()) } else { enter_directory(plan) }
}

/// The same in namespaces, where it becomes the worker's user early.
fn enter_directory(plan: &Plan<'_>) -> Result<(), Stop> {
    if plan.prepared.barriers.executable.is_none() {
        return Ok(());
    }
    Ok(rustix::process::chdir(plan.prepared.directory.as_c_str())?)
}

fn exec(plan: &Plan<'_>) -> Result<(), Stop> {
    let (arguments, environment) = (plan.arguments.as_ptr(), plan.environment.as_ptr());
    if let Some(executable) = &plan.prepared.barriers.executable {
        let (program, here) = (executable.as_raw_fd(), c"".as_ptr());
        // SAFETY: both lists end with a null pointer, and they and what they point to live in `plan`; the text ends
        // with NUL.
        return Ok(check(unsafe {
            libc::syscall(libc::SYS_execveat, program, here, arguments, environment, libc::AT_EMPTY_PATH)
        } as i32)?);
    }
    // SAFETY: both lists end with a null pointer, and they and what they point to live in `plan`.
    Ok(check(unsafe { libc::execve(plan.prepared.program.as_ptr(), arguments, environment) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_each_step_in_order() {
        let page = include_str!("../../../../docs/keeper.md");
        let section = page.split("## The steps of a worker").nth(1).unwrap().split("## ").next().unwrap();
        let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        let told: Vec<_> = rows.filter(|first| !matches!(*first, "step" | "---")).collect();
        let steps: Vec<_> = OUTER.iter().chain(&INNER).map(|(name, _)| *name).collect();
        assert_eq!(told, steps);
    }
}

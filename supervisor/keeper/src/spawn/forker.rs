//! The second thread of the keeper, which forks all workers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bulkhead_linux::wait::thread_has_children;
use bulkhead_linux::{errno, vfork};
use rustix::io::Errno;

use super::child::Plan;
use super::prepared::Prepared;
use super::{exit, user_namespace};
use crate::confine::cgroup;
use crate::protocol::confinement::{Identity, Namespaces};
use crate::wait::{self, Waited};

/// The kind of child that the thread forks.
pub(crate) enum Job {
    Worker(Box<Prepared>),
    /// Exits immediately.
    Child,
    /// Exits immediately and leaves a child that does the same.
    Grandchild,
}

/// Scheduling and memory settings that the keeper was started with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OriginalSettings {
    /// Nice value, which workers get too.
    pub(crate) nice: i32,
    /// How likely the kernel is to kill a process when memory runs out.
    pub(crate) oom: OomSettings,
    /// Soft and hard limit of open files.
    pub(crate) open_files: (u64, u64),
}

/// Preference of the kernel when memory runs out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OomSettings {
    /// True if the supervisor is protected by a negative score, which workers must not inherit.
    pub(crate) is_protected: bool,
    /// `oom_score_adj` of workers.
    pub(crate) worker_score: i32,
}

/// The second thread of the keeper, which is the parent of all workers. It lives as long as the process,
/// because the kernel sends the parent-death signal when the parent thread ends.
pub(crate) struct Forker {
    jobs: SyncSender<Job>,
    results: Receiver<io::Result<u32>>,
}

impl Forker {
    /// Starts the thread. `original` has the settings that the keeper was started with. Workers get these
    /// instead of the keeper's raised settings.
    pub(crate) fn start(original: OriginalSettings) -> io::Result<Self> {
        let (jobs, todo) = sync_channel::<Job>(0);
        let (done, results) = sync_channel(1);
        std::thread::Builder::new().name("forker".into()).spawn(move || {
            for job in todo {
                let result = fork(&job, original);
                drop(job); // Closes copies of the child's descriptors before the keeper reports the child.
                if done.send(result).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs, results })
    }

    /// Forks and returns the child's pid. Blocks until the fork is done.
    pub(crate) fn fork(&self, job: Job) -> io::Result<u32> {
        let gone = || io::Error::other("the forking thread has ended");
        self.jobs.send(job).map_err(|_| gone())?;
        self.results.recv().map_err(|_| gone())?
    }
}

fn fork(job: &Job, original: OriginalSettings) -> io::Result<u32> {
    let plan = match job {
        Job::Worker(prepared) => Some(Plan {
            prepared,
            arguments: vfork::null_terminated(&prepared.arguments),
            environment: vfork::null_terminated(&prepared.environment),
            keeper: rustix::process::getpid(),
            keeper_identity: Identity {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            original,
        }),
        Job::Child | Job::Grandchild => None,
    };
    let namespaces = plan.as_ref().map_or(Namespaces::default(), Plan::fork_namespaces);
    let cgroup = plan.as_ref().and_then(|plan| plan.prepared.cgroup.as_ref());
    let user_namespace = plan.as_ref().and_then(|plan| plan.prepared.confinement.user_namespace.as_deref());
    let forked = match user_namespace {
        None => clone(namespaces, cgroup)?,
        Some(user_namespace) => user_namespace::clone(user_namespace, namespaces, cgroup)?,
    };
    match forked {
        0 => match plan {
            Some(plan) => plan.run(),
            None => {
                if matches!(job, Job::Grandchild) {
                    // Both processes only exit.
                    let _ = clone(Namespaces::default(), None);
                }
                exit(0)
            }
        },
        pid => Ok(pid),
    }
}

/// Forks, and returns 0 in the child, which is in new namespaces and in the given control group.
///
/// This is the bare system call, without the C library's preparations for a child that continues to run. The
/// child is a copy of only this thread, and makes only system calls until it executes a program or exits.
pub(super) fn clone(namespaces: Namespaces, cgroup: Option<&OwnedFd>) -> Result<u32, Errno> {
    clone_as(namespaces, cgroup, 0)
}

/// Forks like `clone`, with an additional flag.
pub(super) fn clone_as(
    namespaces: Namespaces,
    cgroup: Option<&OwnedFd>,
    flag: libc::c_int,
) -> Result<u32, Errno> {
    let rows = [
        (namespaces.user, libc::CLONE_NEWUSER),
        (namespaces.pid, libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS),
        (namespaces.mount || namespaces.proc, libc::CLONE_NEWNS),
        (namespaces.network, libc::CLONE_NEWNET),
    ];
    let wanted = rows.iter().filter(|(is_wanted, _)| *is_wanted);
    let flags = wanted.fold(flag, |flags, (_, flag)| flags | flag);
    if let Some(cgroup) = cgroup {
        // SAFETY: see `clone` for the child.
        return unsafe { cgroup::fork_into(cgroup.as_fd(), flags) }.map(|pid| pid as u32);
    }
    let flags = flags | libc::SIGCHLD;
    const NONE: usize = 0;
    // SAFETY: without a stack and without shared memory this is a fork; see `clone` for the child.
    match unsafe { libc::syscall(libc::SYS_clone, flags as usize, NONE, NONE, NONE, NONE) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as u32),
    }
}

/// Returns the name of the step for a failed fork.
pub(crate) fn fork_step(namespaces: Namespaces) -> &'static str {
    if namespaces.any() { "fork into new namespaces" } else { "fork" }
}

/// Tests whether this kernel distinguishes workers from processes that workers leave behind. The keeper
/// relies on this. Called on the first thread, before there is any worker.
pub(crate) fn distinguishes_orphans(forker: &Forker) -> io::Result<bool> {
    let child = forker.fork(Job::Child)?;
    let sees_workers = thread_has_children();
    wait::wait(child as i32, 0);
    let child = forker.fork(Job::Grandchild)?;
    wait::wait(child as i32, 0);
    // Now the grandchild is an orphan, and dead or about to be.
    let sees_orphans = matches!(wait::wait(-1, libc::__WNOTHREAD), Waited::Ended { .. });
    while !matches!(wait::wait(-1, 0), Waited::NoChild) {}
    Ok(!sees_workers && sees_orphans)
}

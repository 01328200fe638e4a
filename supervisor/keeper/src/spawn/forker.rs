//! Runs the keeper's second thread, which forks workers, templates and short-lived check processes. The main thread
//! prepares each child, waits until the fork is done, and reaps the child. In a forked worker, `child` performs all
//! further steps. Workers of a template are forked by the template instead.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bulkhead_linux::vfork;
use bulkhead_linux::wait::thread_has_children;

use super::clone::clone;
use super::path_check::PathCheck;
use super::plan::{OriginalSettings, Plan};
use super::prepared::Prepared;
use super::{exit, user_namespace};
use crate::protocol::confinement::{Identity, Namespaces};
use crate::wait::{self, Waited};

/// Kind of child to fork.
pub(crate) enum Job {
    Worker(Box<Prepared>),
    PathCheck(PathCheck),
    /// Exits immediately.
    Child,
    /// Exits immediately and leaves behind a child that also exits immediately.
    Grandchild,
}

/// The keeper's second thread, which is the parent of all workers. The thread must run until the process exits, because
/// the kernel sends the parent-death signal as soon as the parent thread exits.
pub(crate) struct Forker {
    jobs: SyncSender<Job>,
    results: Receiver<io::Result<u32>>,
}

impl Forker {
    /// Starts the thread that forks workers. `original` holds the settings that the keeper had when it was started.
    /// Workers get these settings instead of the keeper's current settings.
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

    /// Forks and returns the child's PID. Blocks until the fork is done.
    pub(crate) fn fork(&self, job: Job) -> io::Result<u32> {
        let gone = || io::Error::other("the forking thread has exited");
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
        Job::PathCheck(_) | Job::Child | Job::Grandchild => None,
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
                match job {
                    Job::PathCheck(check) => check.run(),
                    // The child and the grandchild only exit.
                    Job::Grandchild => _ = clone(Namespaces::default(), None),
                    Job::Worker(_) | Job::Child => {}
                }
                exit(0)
            }
        },
        pid => Ok(pid),
    }
}

/// Returns the name of the step that is reported if the fork fails.
pub(crate) fn fork_step(namespaces: Namespaces) -> &'static str {
    if namespaces.any() { "fork into new namespaces" } else { "fork" }
}

/// Tests whether this kernel lets a thread wait only for orphans, and not for children of the forking thread. The
/// keeper relies on this to tell workers from the processes that they leave behind. Must be called on the first thread,
/// before any worker exists.
pub(crate) fn distinguishes_orphans(forker: &Forker) -> io::Result<bool> {
    let child = forker.fork(Job::Child)?;
    let sees_workers = thread_has_children();
    wait::wait(child as i32, 0);
    let child = forker.fork(Job::Grandchild)?;
    wait::wait(child as i32, 0);
    // The grandchild is now an orphan, and has exited or is about to exit.
    let sees_orphans = matches!(wait::wait(-1, libc::__WNOTHREAD), Waited::Ended { .. });
    while !matches!(wait::wait(-1, 0), Waited::NoChild) {}
    Ok(!sees_workers && sees_orphans)
}

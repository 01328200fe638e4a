//! The fork, and the steps of the child until it executes the worker's program.
//!
//! The child is a copy of one of two threads, and other threads' locks can be held forever in the copy. So
//! between the fork and `execve`, the child makes only raw system calls on prepared data, allocates nothing
//! and cannot panic. A table, [`steps`], lists its steps. If a step fails, the supervisor gets the step's
//! name, and the worker does not start.
//!
//! - `barriers`: the confinement, prepared before the fork.
//! - `progress`: messages between the child and the keeper.
//! - `programs`: the rules that a host of programs receives about its own confinement.
//! - `root`: a private root folder.
//! - `machine`: hides the machine's entries in a private `/proc`.
//! - `mounts`: a single mount.
//! - `covers`: mounts for paths that the worker's user cannot reach.
//! - `entered`: the fork into an existing user namespace.
//! - `ended`: the first process of a pid namespace, which is the worker's parent.
//! - `nest`: the first process of a pid namespace with a template, which forks workers as its siblings.
#![expect(unsafe_code, reason = "fork, execve and the calls in a forked child have no safe wrapper")]

mod barriers;
mod covers;
mod ended;
mod entered;
mod machine;
mod mounts;
mod nest;
mod programs;
mod progress;
mod root;
mod steps;

use std::ffi::{CString, c_char};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bulkhead_linux::{errno, vfork};
use bulkhead_shared::worker_protocol::PROGRAM_VARIABLE;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::Pid;

use self::covers::Covers;
use self::progress::{StepError, StepFailure};
use self::root::PrivateRoot;
use self::steps::{NAMESPACE_STEPS, WORKER_STEPS};
use super::confine::cgroup;
use super::confinement::{Identity, Namespaces, TemporaryFiles};
use super::{Rlimit, SPAWN_DESCRIPTORS, SpawnOrder};

pub(super) use self::barriers::{FilterCache, PreparedConfinement};
pub(super) use self::ended::read_status;
pub(super) use self::nest::{ChildExit, EXIT_BYTES_MAX, NAMED_CHILDREN_MAX, Order as InitOrder};
pub(super) use self::progress::{Progress, let_continue, read as read_progress};
pub(super) use self::steps::duplicate_to;

/// Descriptor of the worker's link. In the keeper, this number belongs to the order socket. So no other
/// descriptor of the keeper has one of the numbers that a child needs.
pub(super) const LINK_FD: RawFd = 3;

/// Variable that names the folder for temporary files.
const TMPDIR_VARIABLE: &str = "TMPDIR=";

/// Variable that names the user's home folder. A worker's only home is the folder for temporary files.
const HOME_VARIABLE: &str = "HOME=";

/// Folder for temporary files in a private root folder.
const PRIVATE_TMP: &str = "/tmp";

/// Exit code of a child that failed before `execve`. The code is never shown.
const FAILED_EXIT_CODE: i32 = 127;

/// A child of the forking thread.
pub(super) enum Job {
    /// A worker.
    Worker(Box<Prepared>),
    /// Exits immediately.
    Child,
    /// Exits immediately and leaves a child that does the same.
    Grandchild,
}

/// Everything that a worker's child needs, prepared before the fork.
pub(super) struct Prepared {
    program: CString,
    directory: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    rlimits: Vec<Rlimit>,
    link: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
    progress: OwnedFd,
    /// The keeper's end of `progress`, of which the child has a copy.
    keeper_end: RawFd,
    /// Control group in which the child starts.
    cgroup: Option<OwnedFd>,
    /// Pipe on which the first process of a pid namespace reports how the worker ended.
    status: Option<OwnedFd>,
    /// Socket on which the first process of a template's namespace reports exits and receives orders to kill.
    nest: Option<OwnedFd>,
    confinement: PreparedConfinement,
}

/// The program of a worker, as ordered.
pub(super) struct Program {
    pub(super) program: CString,
    pub(super) directory: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    pub(super) rlimits: Vec<Rlimit>,
}

impl Program {
    /// Converts an order. Sets `TMPDIR` and `HOME` to the temporary folder, if there is one.
    pub(super) fn new(order: &SpawnOrder<'_>, temporary: Option<&Path>) -> Result<Self, SpawnError> {
        let texts = |list: &[&str]| list.iter().map(|item| c_string(item)).collect::<Result<Vec<_>, _>>();
        let mut environment = texts(&order.environment)?;
        let has_private_tmp = matches!(order.confinement.layers.temporary, TemporaryFiles::PrivateTmp(_));
        let home = temporary.or(has_private_tmp.then_some(Path::new(PRIVATE_TMP)));
        for (variable, folder) in [(TMPDIR_VARIABLE, temporary), (HOME_VARIABLE, home)] {
            let has_own = order.environment.iter().any(|one| one.starts_with(variable));
            if let Some(folder) = folder.filter(|_| !has_own) {
                environment.push(c_string(&format!("{variable}{}", folder.display()))?);
            }
        }
        Ok(Self {
            program: c_string(order.program)?,
            directory: c_string(order.directory)?,
            arguments: texts(&order.arguments)?,
            environment,
            rlimits: order.rlimits.clone(),
        })
    }
}

fn c_string(text: &str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError::new("order", Errno::INVAL))
}

/// Reason why a worker does not start: the failed step and the error number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpawnError {
    pub(super) step: String,
    pub(super) errno: Errno,
}

impl SpawnError {
    pub(super) fn new(step: &str, errno: Errno) -> Self {
        Self { step: step.to_owned(), errno }
    }

    pub(super) fn from_io(step: &str, error: &io::Error) -> Self {
        Self::new(step, errno::from_io(error, Errno::IO))
    }
}

/// The keeper's ends of the connections to a child.
pub(super) struct ChildConnections {
    /// Progress of the child: see [`Progress`].
    pub(super) progress: OwnedFd,
    /// See [`read_status`].
    pub(super) status: Option<OwnedFd>,
    /// See [`InitOrder`].
    pub(super) nest: Option<OwnedFd>,
    /// Describe failed steps.
    root: Option<Arc<PrivateRoot>>,
    covers: Option<Arc<Covers>>,
    /// Number of the child's descriptors in addition to those of every worker and the progress socket.
    pub(super) extra_descriptors: u32,
}

impl ChildConnections {
    /// Describes the failure of a child.
    pub(super) fn describe(&self, failure: &StepFailure) -> SpawnError {
        let step = steps::describe(failure, self.root.as_deref(), self.covers.as_deref());
        SpawnError { step, errno: Errno::from_raw_os_error(failure.errno) }
    }
}

impl Prepared {
    /// Combines everything that the child needs.
    pub(super) fn new(
        program: Program,
        descriptors: Vec<OwnedFd>,
        confinement: PreparedConfinement,
        cgroup: Option<OwnedFd>,
        is_template: bool,
    ) -> Result<(Box<Self>, ChildConnections), SpawnError> {
        let has_low_number = descriptors.iter().any(|descriptor| descriptor.as_raw_fd() <= LINK_FD);
        let descriptors: [OwnedFd; SPAWN_DESCRIPTORS] =
            descriptors.try_into().map_err(|_| SpawnError::new("descriptors", Errno::MFILE))?;
        if has_low_number {
            return Err(SpawnError::new("descriptors", Errno::BADF));
        }
        let [link, stdout, stderr] = descriptors;
        let (ours, progress) = progress::pair().map_err(|errno| SpawnError::new("fork", errno))?;
        let has_first = confinement.layers.namespaces.pid;
        let nest = (has_first && is_template).then(crate::socket::pair).transpose();
        let (nest_ours, nest) = nest.map_err(|error| SpawnError::from_io("fork", &error))?.unzip();
        let status = (has_first && !is_template).then(|| {
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
                .map_err(|errno| SpawnError::new("fork", errno))
        });
        let (status_ours, status) = status.transpose()?.unzip();
        let (root, covers) = (confinement.root(), confinement.covers());
        let expected = [confinement.executable.is_some(), confinement.hosted_file.is_some()];
        let extra_descriptors = expected.into_iter().map(u32::from).sum();
        let Program { program, directory, arguments, mut environment, rlimits } = program;
        if let Some(hosted_file) = &confinement.hosted_file {
            environment.push(c_string(&format!("{PROGRAM_VARIABLE}={}", hosted_file.as_raw_fd()))?);
        }
        let prepared = Self {
            program,
            directory,
            arguments,
            environment,
            rlimits,
            link,
            stdout,
            stderr,
            progress,
            keeper_end: ours.as_raw_fd(),
            cgroup,
            status,
            nest,
            confinement,
        };
        let connections = ChildConnections {
            progress: ours,
            status: status_ours,
            nest: nest_ours,
            root,
            covers,
            extra_descriptors,
        };
        Ok((Box::new(prepared), connections))
    }
}

/// Scheduling and memory settings of the keeper before it takes precedence.
#[derive(Clone, Copy, Debug)]
pub(super) struct OriginalSettings {
    /// Nice value, which workers get too.
    pub(super) nice: i32,
    /// Preference of the kernel when memory runs out.
    pub(super) oom: OomSettings,
    /// Soft and hard limit of open files.
    pub(super) open_files: (u64, u64),
}

/// Preference of the kernel when memory runs out.
#[derive(Clone, Copy, Debug)]
pub(super) struct OomSettings {
    /// True if the supervisor is protected by a negative score, which workers must not inherit.
    pub(super) is_protected: bool,
    /// `oom_score_adj` of workers.
    pub(super) worker_score: i32,
}

/// The second thread of the keeper, which is the parent of all workers. It lives as long as the process,
/// because the kernel sends the parent-death signal when the parent thread ends.
pub(super) struct Forker {
    jobs: SyncSender<Job>,
    results: Receiver<io::Result<u32>>,
}

impl Forker {
    /// Starts the thread. `original` has the settings that the keeper was started with, so that workers do
    /// not get the keeper's raised settings.
    pub(super) fn start(original: OriginalSettings) -> io::Result<Self> {
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
    pub(super) fn fork(&self, job: Job) -> io::Result<u32> {
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
        Some(user_namespace) => entered::clone(user_namespace, namespaces, cgroup)?,
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
fn clone(namespaces: Namespaces, cgroup: Option<&OwnedFd>) -> Result<u32, Errno> {
    clone_as(namespaces, cgroup, 0)
}

/// Forks like `clone`, with an additional flag.
fn clone_as(namespaces: Namespaces, cgroup: Option<&OwnedFd>, flag: libc::c_int) -> Result<u32, Errno> {
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

/// Checks that the first process of a nest can list its children.
pub(super) fn can_list_children() -> Result<(), Errno> {
    nest::open_children().map(drop)
}

/// Returns the name of the step for a failed fork.
pub(super) fn fork_step(namespaces: Namespaces) -> &'static str {
    if namespaces.any() { "fork into new namespaces" } else { "fork" }
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process without running anything that the parent registered.
    unsafe { libc::_exit(code) }
}

/// Input of the steps. Borrows from the data prepared before the fork, which outlives it.
struct Plan<'p> {
    prepared: &'p Prepared,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    keeper: Pid,
    /// User and group of the keeper.
    keeper_identity: Identity,
    original: OriginalSettings,
}

impl Plan<'_> {
    fn layers(&self) -> &super::confinement::Layers {
        &self.prepared.confinement.layers
    }

    /// Returns the namespaces that the fork creates. A user namespace can also be created later.
    fn fork_namespaces(&self) -> Namespaces {
        let wanted = self.layers().namespaces;
        Namespaces { user: wanted.user && !self.prepared.confinement.makes_root_first(), ..wanted }
    }

    fn run(&self) -> ! {
        // Otherwise this process would wait forever for a keeper that died before the parent-death signal was
        // set.
        // SAFETY: the keeper's copy stays open, and nothing in this process uses this one.
        unsafe { libc::close(self.prepared.keeper_end) };
        let namespaces = self.layers().namespaces;
        if namespaces.any() {
            self.run_steps(0, &NAMESPACE_STEPS);
        }
        if namespaces.pid {
            self.fork_worker();
        }
        self.run_steps(NAMESPACE_STEPS.len(), &WORKER_STEPS);
        exit(FAILED_EXIT_CODE)
    }

    /// Executes the steps of a table. `first` is the number of the first step.
    fn run_steps(&self, first: usize, table: &[(&str, steps::Step)]) {
        for (number, (_, step)) in table.iter().enumerate() {
            if let Err(error) = step(self) {
                self.fail((first + number) as u32, error);
            }
        }
    }

    fn fail(&self, step: u32, StepError { errno, detail }: StepError) -> ! {
        progress::report_failure(
            self.prepared.progress.as_fd(),
            &StepFailure { step, detail, errno: errno.raw_os_error() },
        );
        exit(FAILED_EXIT_CODE)
    }

    /// Forks the worker. This process stays as the first process of the pid namespace, and is the worker's
    /// parent.
    fn fork_worker(&self) {
        let failed = |step, errno: Errno| -> ! { self.fail(step, errno.into()) };
        let fork = || {
            clone(Namespaces::default(), None).unwrap_or_else(|errno| failed(steps::WORKER_FORK_STEP, errno))
        };
        if let Some(nest) = &self.prepared.nest {
            let children =
                nest::open_children().unwrap_or_else(|errno| failed(steps::TEMPLATE_INIT_STEP, errno));
            match fork() {
                0 => drop(children),
                template => nest::run(template, nest, children),
            }
            return;
        }
        match (fork(), &self.prepared.status) {
            (0, _) => {}
            (worker, Some(status)) => ended::run(worker, status),
            (_, None) => exit(FAILED_EXIT_CODE),
        }
    }
}

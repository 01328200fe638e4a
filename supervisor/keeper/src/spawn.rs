//! The fork, and what the child does until it is the worker's program.
//!
//! The child is a copy of one thread of two, with locks perhaps held for ever: between the fork and
//! `execve` it makes raw system calls on what was prepared, allocates nothing and cannot panic. Its way
//! is a table, [`steps`]; a step that fails is named to the supervisor, and the worker does not start.
//!
//! - `barriers`: what confines it, made ready before the fork.
//! - `progress`: what it and the keeper say to each other meanwhile.
//! - `programs`: what a host of programs is told of its own rules.
//! - `root`: a root folder of its own.
//! - `machine`: what the `/proc` in there does not show.
//! - `mounts`: one mount.
//! - `shown`: what it is given and its user cannot reach.
//! - `entered`: the fork into a user namespace that there is already.
//! - `ended`: the first process of a pid namespace, which the worker is a child of.
//! - `nest`: the same with a template, which forks workers beside itself.
#![expect(unsafe_code, reason = "fork, execve, and what a forked child may do, have no safe form")]

mod barriers;
mod ended;
mod entered;
mod machine;
mod mounts;
mod nest;
mod programs;
mod progress;
mod root;
mod shown;
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

use self::progress::{Failure, Stop};
use self::root::Root;
use self::shown::Shown;
use self::steps::{INNER, OUTER};
use super::confine::cgroup;
use super::confinement::{Identity, Namespaces, Temporary};
use super::{Rlimit, SPAWN_DESCRIPTORS, SpawnOrder};

pub(super) use self::barriers::{Barriers, Filters};
pub(super) use self::ended::read as read_status;
pub(super) use self::nest::{END_BYTES_MAX, End, NAMED_MAX, Order as NestOrder};
pub(super) use self::progress::{Progress, go_on, read as read_progress};
pub(super) use self::steps::put_at;

/// The worker's link. In the keeper this number is its own socket, so that none of the descriptors it
/// ever receives or opens is in the way of the ones a child puts in place.
pub(super) const LINK_FD: RawFd = 3;

/// The variable that names a folder for temporary files.
const TEMPORARY: &str = "TMPDIR=";

/// The variable that names the user's own folder. A worker has no other than for temporary files.
const HOME: &str = "HOME=";

/// Where a worker with a root folder of its own has its temporary files.
const OWN_TMP: &str = "/tmp";

/// The exit code of a child that failed on its way; it is never shown.
const FAILED: i32 = 127;

/// A child of the forking thread can be one of these.
pub(super) enum Job {
    /// A worker.
    Worker(Box<Prepared>),
    /// One that ends at once.
    Child,
    /// One that ends at once and leaves behind one that does.
    Grandchild,
}

/// Everything a worker's child needs, made before the fork.
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
    /// The keeper's end of that, of which the child has a copy.
    other_end: RawFd,
    /// Where it starts.
    cgroup: Option<OwnedFd>,
    /// Where the first process of a pid namespace tells how the worker ended.
    status: Option<OwnedFd>,
    /// The same of a template and all that it forks; it is told there what to kill.
    nest: Option<OwnedFd>,
    barriers: Barriers,
}

/// What an order says of a worker's program.
pub(super) struct Program {
    pub(super) program: CString,
    pub(super) directory: CString,
    pub(super) arguments: Vec<CString>,
    pub(super) environment: Vec<CString>,
    pub(super) rlimits: Vec<Rlimit>,
}

impl Program {
    /// From an order; `TMPDIR` and `HOME` are its temporary folder, if it has one.
    pub(super) fn new(order: &SpawnOrder<'_>, temporary: Option<&Path>) -> Result<Self, Refusal> {
        let texts = |list: &[&str]| list.iter().map(|item| text(item)).collect::<Result<Vec<_>, _>>();
        let mut environment = texts(&order.environment)?;
        let own_tmp = matches!(order.confinement.terms.temporary, Temporary::FileSystem(_));
        let home = temporary.or(own_tmp.then_some(Path::new(OWN_TMP)));
        for (variable, folder) in [(TEMPORARY, temporary), (HOME, home)] {
            let has_own = order.environment.iter().any(|one| one.starts_with(variable));
            if let Some(folder) = folder.filter(|_| !has_own) {
                environment.push(text(&format!("{variable}{}", folder.display()))?);
            }
        }
        Ok(Self {
            program: text(order.program)?,
            directory: text(order.directory)?,
            arguments: texts(&order.arguments)?,
            environment,
            rlimits: order.rlimits.clone(),
        })
    }
}

fn text(text: &str) -> Result<CString, Refusal> {
    CString::new(text).map_err(|_| Refusal::new("order", Errno::INVAL))
}

/// Why a worker does not start: a step that failed, and an error's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) step: String,
    pub(super) errno: Errno,
}

impl Refusal {
    pub(super) fn new(step: &str, errno: Errno) -> Self {
        Self { step: step.to_owned(), errno }
    }

    pub(super) fn of(step: &str, error: &io::Error) -> Self {
        Self::new(step, errno::of(error, Errno::IO))
    }
}

/// The ends of a child's descriptors that stay with the keeper.
pub(super) struct Ends {
    /// How far it has come: see [`Progress`].
    pub(super) progress: OwnedFd,
    /// See [`read_status`].
    pub(super) status: Option<OwnedFd>,
    /// See [`NestOrder`].
    pub(super) nest: Option<OwnedFd>,
    /// To name what failed.
    root: Option<Arc<Root>>,
    shown: Option<Arc<Shown>>,
    /// Descriptors of the child beside those of every worker and that for progress.
    pub(super) beside: u32,
}

impl Ends {
    /// What a child that failed was about.
    pub(super) fn refusal(&self, failure: &Failure) -> Refusal {
        let step = steps::describe(failure, self.root.as_deref(), self.shown.as_deref());
        Refusal { step, errno: Errno::from_raw_os_error(failure.errno) }
    }
}

impl Prepared {
    /// Puts together what the child needs.
    pub(super) fn new(
        program: Program,
        descriptors: Vec<OwnedFd>,
        barriers: Barriers,
        cgroup: Option<OwnedFd>,
        is_template: bool,
    ) -> Result<(Box<Self>, Ends), Refusal> {
        let in_the_way = descriptors.iter().any(|descriptor| descriptor.as_raw_fd() <= LINK_FD);
        let descriptors: [OwnedFd; SPAWN_DESCRIPTORS] =
            descriptors.try_into().map_err(|_| Refusal::new("descriptors", Errno::MFILE))?;
        if in_the_way {
            return Err(Refusal::new("descriptors", Errno::BADF));
        }
        let [link, stdout, stderr] = descriptors;
        let (ours, progress) = progress::pair().map_err(|errno| Refusal::new("fork", errno))?;
        let has_first = barriers.terms.namespaces.pid;
        let nest = (has_first && is_template).then(crate::socket::pair).transpose();
        let (nest_ours, nest) = nest.map_err(|error| Refusal::of("fork", &error))?.unzip();
        let status = (has_first && !is_template).then(|| {
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)
                .map_err(|errno| Refusal::new("fork", errno))
        });
        let (status_ours, status) = status.transpose()?.unzip();
        let (root, shown) = (barriers.root(), barriers.shown());
        let expected = [barriers.executable.is_some(), barriers.hosted.is_some()];
        let beside = expected.into_iter().map(u32::from).sum();
        let Program { program, directory, arguments, mut environment, rlimits } = program;
        if let Some(hosted) = &barriers.hosted {
            environment.push(text(&format!("{PROGRAM_VARIABLE}={}", hosted.as_raw_fd()))?);
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
            other_end: ours.as_raw_fd(),
            cgroup,
            status,
            nest,
            barriers,
        };
        let ends = Ends { progress: ours, status: status_ours, nest: nest_ours, root, shown, beside };
        Ok((Box::new(prepared), ends))
    }
}

/// How the keeper stands with the kernel before it takes precedence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    /// The nice value, which workers get.
    pub(super) nice: i32,
    /// Which process the kernel ends first when memory runs out.
    pub(super) oom: Oom,
    /// How many files it may have open, and how far it may raise that.
    pub(super) open_files: (u64, u64),
}

/// Which process goes when memory runs out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Oom {
    /// Whether the supervisor is to be spared, which workers must not inherit.
    pub(super) is_spared: bool,
    /// The `oom_score_adj` of workers.
    pub(super) workers: i32,
}

/// The second thread of the keeper: the parent of all workers. It lives as long as the process, since
/// the parent-death signal is that of the thread.
pub(super) struct Forker {
    jobs: SyncSender<Job>,
    results: Receiver<io::Result<u32>>,
}

impl Forker {
    /// `standing` is how the keeper was started, which workers are not to profit from.
    pub(super) fn start(standing: Standing) -> io::Result<Self> {
        let (jobs, todo) = sync_channel::<Job>(0);
        let (done, results) = sync_channel(1);
        std::thread::Builder::new().name("forker".into()).spawn(move || {
            for job in todo {
                let result = fork(&job, standing);
                drop(job); // Closes our copies of the child's descriptors before the keeper reports it.
                if done.send(result).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { jobs, results })
    }

    /// Forks, and returns the child's number when it runs. The caller waits meanwhile.
    pub(super) fn fork(&self, job: Job) -> io::Result<u32> {
        let gone = || io::Error::other("the forking thread has ended");
        self.jobs.send(job).map_err(|_| gone())?;
        self.results.recv().map_err(|_| gone())?
    }
}

fn fork(job: &Job, standing: Standing) -> io::Result<u32> {
    let plan = match job {
        Job::Worker(prepared) => Some(Plan {
            prepared,
            arguments: vfork::pointers(&prepared.arguments),
            environment: vfork::pointers(&prepared.environment),
            keeper: rustix::process::getpid(),
            own: Identity {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            standing,
        }),
        Job::Child | Job::Grandchild => None,
    };
    let namespaces = plan.as_ref().map_or(Namespaces::default(), Plan::forked_into);
    let cgroup = plan.as_ref().and_then(|plan| plan.prepared.cgroup.as_ref());
    let entered = plan.as_ref().and_then(|plan| plan.prepared.barriers.entered.as_deref());
    let forked = match entered {
        None => clone(namespaces, cgroup)?,
        Some(entered) => entered::clone(entered, namespaces, cgroup)?,
    };
    match forked {
        0 => match plan {
            Some(plan) => plan.run(),
            None => {
                if matches!(job, Job::Grandchild) {
                    // Both only exit.
                    let _ = clone(Namespaces::default(), None);
                }
                exit(0)
            }
        },
        pid => Ok(pid),
    }
}

/// Forks, and returns twice: 0 in the child, which is in namespaces and a control group of its own.
///
/// The bare call, without what the C library does for programs that go on: the child, a copy of this
/// thread alone, makes nothing but system calls until it is replaced or gone.
fn clone(namespaces: Namespaces, cgroup: Option<&OwnedFd>) -> Result<u32, Errno> {
    clone_as(namespaces, cgroup, 0)
}

/// The same with a further flag.
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
        // SAFETY: see above for the child.
        return unsafe { cgroup::fork_into(cgroup.as_fd(), flags) }.map(|pid| pid as u32);
    }
    let flags = flags | libc::SIGCHLD;
    const NONE: usize = 0;
    // SAFETY: without a stack and without shared memory this is a fork; see above for the child.
    match unsafe { libc::syscall(libc::SYS_clone, flags as usize, NONE, NONE, NONE, NONE) } {
        -1 => Err(errno::last()),
        pid => Ok(pid as u32),
    }
}

/// Whether the first process of a nest can tell its children.
pub(super) fn first_process_sees_children() -> Result<(), Errno> {
    nest::children().map(drop)
}

/// What it is called if the fork fails.
pub(super) fn fork_step(namespaces: Namespaces) -> &'static str {
    if namespaces.any() { "fork into new namespaces" } else { "fork" }
}

fn exit(code: i32) -> ! {
    // SAFETY: ends the process, without a thing being run that the parent registered.
    unsafe { libc::_exit(code) }
}

/// What the steps work on; borrowed from, and as good as, what was prepared before the fork.
struct Plan<'p> {
    prepared: &'p Prepared,
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    keeper: Pid,
    /// The user the keeper runs as.
    own: Identity,
    standing: Standing,
}

impl Plan<'_> {
    fn terms(&self) -> &super::confinement::Terms {
        &self.prepared.barriers.terms
    }

    /// The namespaces that the fork makes; a user namespace can also come later.
    fn forked_into(&self) -> Namespaces {
        let wanted = self.terms().namespaces;
        Namespaces { user: wanted.user && !self.prepared.barriers.root_comes_first(), ..wanted }
    }

    fn run(&self) -> ! {
        // Or else it would wait for ever for the word of a keeper that died before the parent-death signal was
        // set.
        // SAFETY: the keeper's copy stays, and nothing of this process uses it.
        unsafe { libc::close(self.prepared.other_end) };
        let namespaces = self.terms().namespaces;
        if namespaces.any() {
            self.take(0, &OUTER);
        }
        if namespaces.pid {
            self.become_two();
        }
        self.take(OUTER.len(), &INNER);
        exit(FAILED)
    }

    /// Takes the steps of a table, the first of which has this number.
    fn take(&self, first: usize, table: &[(&str, steps::Step)]) {
        for (number, (_, step)) in table.iter().enumerate() {
            if let Err(stop) = step(self) {
                self.stop((first + number) as u32, stop);
            }
        }
    }

    fn stop(&self, step: u32, Stop { errno, detail }: Stop) -> ! {
        progress::fail(
            self.prepared.progress.as_fd(),
            &Failure { step, detail, errno: errno.raw_os_error() },
        );
        exit(FAILED)
    }

    /// The first process of the pid namespace stays behind; the worker is its child.
    fn become_two(&self) {
        let failed = |step, errno: Errno| -> ! { self.stop(step, errno.into()) };
        let fork =
            || clone(Namespaces::default(), None).unwrap_or_else(|errno| failed(steps::PID_NAMESPACE, errno));
        if let Some(nest) = &self.prepared.nest {
            let children = nest::children().unwrap_or_else(|errno| failed(steps::NEST, errno));
            match fork() {
                0 => drop(children),
                template => nest::keep(template, nest, children),
            }
            return;
        }
        match (fork(), &self.prepared.status) {
            (0, _) => {}
            (worker, Some(status)) => ended::keep(worker, status),
            (_, None) => exit(FAILED),
        }
    }
}

//! The fork, and what the child does until it is the worker's program.
//!
//! The child is a copy of one thread of two, with locks perhaps held for ever: between the fork and
//! `execve` it makes raw system calls on what was prepared, allocates nothing and cannot panic. Its way
//! is a table, [`STEPS`]; a step that fails is named to the supervisor, and the worker does not start.
#![expect(unsafe_code, reason = "fork, execve, and what a forked child may do, have no safe form")]

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, Signal};

use super::{Rlimit, SPAWN_DESCRIPTORS};

/// The worker's link. In the keeper this number is its own socket, so that none of the descriptors it
/// ever receives or opens is in the way of the ones a child puts in place.
pub(super) const LINK_FD: RawFd = 3;

/// What a worker creates is its user's own business: readable and writable by nobody else.
const UMASK: Mode = Mode::RWXG.union(Mode::RWXO);

/// The last number of a signal.
const SIGNAL_MAX: i32 = 64;

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
    error: OwnedFd,
}

impl Prepared {
    /// Takes an order apart. Returns the other end of the error pipe as well: what [`read_failure`] reads.
    pub(super) fn new(
        texts: &[u8],
        argument_count: u32,
        rlimits: Vec<Rlimit>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Box<Self>, OwnedFd), (&'static str, Errno)> {
        let in_the_way = descriptors.iter().any(|descriptor| descriptor.as_raw_fd() <= LINK_FD);
        let descriptors: [OwnedFd; SPAWN_DESCRIPTORS] =
            descriptors.try_into().map_err(|_| ("descriptors", Errno::MFILE))?;
        if in_the_way {
            return Err(("descriptors", Errno::BADF));
        }
        let [link, stdout, stderr] = descriptors;
        let (program, directory, arguments, environment) =
            split_texts(texts, argument_count as usize).ok_or(("order", Errno::INVAL))?;
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (reader, error) = rustix::pipe::pipe_with(flags).map_err(|errno| ("fork", errno))?;
        let prepared =
            Self { program, directory, arguments, environment, rlimits, link, stdout, stderr, error };
        Ok((Box::new(prepared), reader))
    }
}

type Texts = (CString, CString, Vec<CString>, Vec<CString>);

fn split_texts(texts: &[u8], argument_count: usize) -> Option<Texts> {
    let mut texts = texts.split_inclusive(|&byte| byte == 0).map(CStr::from_bytes_with_nul);
    let program = texts.next()?.ok()?.to_owned();
    let directory = texts.next()?.ok()?.to_owned();
    let mut rest = texts.map(|text| text.map(CStr::to_owned)).collect::<Result<Vec<_>, _>>().ok()?;
    if argument_count > rest.len() {
        return None;
    }
    let environment = rest.split_off(argument_count);
    Some((program, directory, rest, environment))
}

/// What a child says down the error pipe when it fails: two numbers and an error's.
struct Failure {
    step: u32,
    detail: u32,
    errno: i32,
}

impl Failure {
    const BYTES: usize = 12;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let numbers = [self.step.to_le_bytes(), self.detail.to_le_bytes(), self.errno.to_le_bytes()];
        for (to, from) in bytes.chunks_exact_mut(4).zip(numbers) {
            to.copy_from_slice(&from);
        }
        bytes
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let number = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        Self {
            step: u32::from_le_bytes(number(0)),
            detail: u32::from_le_bytes(number(4)),
            errno: i32::from_le_bytes(number(8)),
        }
    }
}

/// How far a child has come.
pub(super) enum Progress {
    /// Still on its way, or stuck on a file system.
    Underway,
    /// It is the worker's program (or was killed before it came to that).
    Executed,
    /// The step with this name failed.
    Failed { step: String, errno: i32 },
}

/// Reads the error pipe of a child.
pub(super) fn read_failure(pipe: &OwnedFd) -> Progress {
    let mut bytes = [0; Failure::BYTES];
    match rustix::io::retry_on_intr(|| rustix::io::read(pipe, &mut bytes)) {
        Ok(Failure::BYTES) => {
            let Failure { step, detail, errno } = Failure::decode(&bytes);
            let name = STEPS.get(step as usize).map_or("unknown", |(name, _)| *name);
            let step = if name == RLIMIT { format!("{name} {}", rlimit_name(detail)) } else { name.into() };
            Progress::Failed { step, errno }
        }
        Err(Errno::AGAIN) => Progress::Underway,
        Ok(_) | Err(_) => Progress::Executed,
    }
}

const RLIMIT: &str = "rlimit";

fn rlimit_name(resource: u32) -> &'static str {
    #[expect(clippy::unnecessary_cast, reason = "the constants' type differs between C libraries")]
    const NAMES: [(u32, &str); 16] = [
        (libc::RLIMIT_AS as u32, "as"),
        (libc::RLIMIT_CORE as u32, "core"),
        (libc::RLIMIT_CPU as u32, "cpu"),
        (libc::RLIMIT_DATA as u32, "data"),
        (libc::RLIMIT_FSIZE as u32, "fsize"),
        (libc::RLIMIT_LOCKS as u32, "locks"),
        (libc::RLIMIT_MEMLOCK as u32, "memlock"),
        (libc::RLIMIT_MSGQUEUE as u32, "msgqueue"),
        (libc::RLIMIT_NICE as u32, "nice"),
        (libc::RLIMIT_NOFILE as u32, "nofile"),
        (libc::RLIMIT_NPROC as u32, "nproc"),
        (libc::RLIMIT_RSS as u32, "rss"),
        (libc::RLIMIT_RTPRIO as u32, "rtprio"),
        (libc::RLIMIT_RTTIME as u32, "rttime"),
        (libc::RLIMIT_SIGPENDING as u32, "sigpending"),
        (libc::RLIMIT_STACK as u32, "stack"),
    ];
    NAMES.iter().find(|(number, _)| *number == resource).map_or("unknown", |(_, name)| name)
}

/// The second thread of the keeper: the parent of all workers. It lives as long as the process, since
/// the parent-death signal is that of the thread.
pub(super) struct Forker {
    jobs: SyncSender<Job>,
    results: Receiver<io::Result<u32>>,
}

impl Forker {
    /// `nice` is what workers get.
    pub(super) fn start(nice: i32) -> io::Result<Self> {
        let (jobs, todo) = sync_channel::<Job>(0);
        let (done, results) = sync_channel(1);
        std::thread::Builder::new().name("forker".into()).spawn(move || {
            for job in todo {
                let result = fork(&job, nice);
                drop(job); // Closes our copies of the child's descriptors before anybody hears of it.
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

fn fork(job: &Job, nice: i32) -> io::Result<u32> {
    let plan = match job {
        Job::Worker(prepared) => Some(Plan {
            prepared,
            arguments: pointers(&prepared.arguments),
            environment: pointers(&prepared.environment),
            keeper: rustix::process::getpid(),
            nice,
        }),
        Job::Child | Job::Grandchild => None,
    };
    // SAFETY: the child, a copy of this thread alone, makes nothing but raw calls until it is replaced
    // or gone: see `Plan::run` and its steps.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => match plan {
            Some(plan) => plan.run(),
            None => {
                if matches!(job, Job::Grandchild) {
                    // SAFETY: as above; both only exit.
                    unsafe { libc::fork() };
                }
                exit(0)
            }
        },
        pid => Ok(pid as u32),
    }
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect()
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
    nice: i32,
}

/// Why a step failed; `detail` is the resource's number for limits.
struct Stop {
    errno: i32,
    detail: u32,
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self { errno: errno.raw_os_error(), detail: 0 }
    }
}

type Step = fn(&Plan<'_>) -> Result<(), Stop>;

/// The way of a child, in this order. The wrappers of `rustix` used here are bare system calls.
const STEPS: [(&str, Step); 10] = [
    ("signals", signals),
    ("session", session),
    ("priority", priority),
    ("stdio", stdio),
    ("child subreaper", child_subreaper),
    (RLIMIT, rlimits),
    ("parent-death signal", parent_death_signal),
    ("descriptors", descriptors),
    ("working directory", working_directory),
    ("exec", exec),
];

impl Plan<'_> {
    fn run(&self) -> ! {
        for (number, (_, step)) in STEPS.iter().enumerate() {
            if let Err(Stop { errno, detail }) = step(self) {
                let failure = Failure { step: number as u32, detail, errno };
                // If even this fails, the supervisor sees a worker that ends at once with this code.
                let _ = rustix::io::write(&self.prepared.error, &failure.encode());
                break;
            }
        }
        exit(FAILED)
    }
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
    rustix::process::setsid()?;
    rustix::process::umask(UMASK);
    Ok(())
}

/// The keeper may have a better one. In a session of its own, the child is out of its autogroup already.
fn priority(plan: &Plan<'_>) -> Result<(), Stop> {
    Ok(rustix::process::setpriority_process(None, plan.nice)?)
}

/// Standard input is the keeper's own, `/dev/null`.
fn stdio(plan: &Plan<'_>) -> Result<(), Stop> {
    put_at(&plan.prepared.stdout, libc::STDOUT_FILENO)?;
    put_at(&plan.prepared.stderr, libc::STDERR_FILENO)?;
    Ok(put_at(&plan.prepared.link, LINK_FD)?)
}

/// Makes a number mean this descriptor, whatever it meant before.
pub(super) fn put_at(descriptor: &OwnedFd, number: RawFd) -> rustix::io::Result<()> {
    // SAFETY: what had the number is standard input, output or error, or in the child the keeper's
    // socket: nothing that anybody here owns and goes on using.
    check(unsafe { libc::dup2(descriptor.as_raw_fd(), number) })
}

fn child_subreaper(_: &Plan<'_>) -> Result<(), Stop> {
    // The kernel takes any number but zero for yes.
    Ok(rustix::process::set_child_subreaper(Some(Pid::INIT))?)
}

fn rlimits(plan: &Plan<'_>) -> Result<(), Stop> {
    for limit in &plan.prepared.rlimits {
        let value = libc::rlimit { rlim_cur: limit.soft, rlim_max: limit.hard };
        // SAFETY: the pointer is to a local; a resource that does not exist is refused.
        let result = check(unsafe { libc::setrlimit(limit.resource as _, &value) });
        result.map_err(|errno| Stop { errno: errno.raw_os_error(), detail: limit.resource })?;
    }
    Ok(())
}

/// The second net, should the keeper be killed. What comes later must not change the identity, which
/// takes the signal away.
fn parent_death_signal(plan: &Plan<'_>) -> Result<(), Stop> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() == Some(plan.keeper) { Ok(()) } else { Err(Errno::SRCH.into()) }
}

/// The error pipe has to live until `execve`, so all is marked to be closed by that.
fn descriptors(_: &Plan<'_>) -> Result<(), Stop> {
    let (first, last) = (LINK_FD as libc::c_uint + 1, libc::c_uint::MAX);
    // SAFETY: changes a flag of descriptors, and closes none.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) };
    Ok(check(result as i32)?)
}

fn working_directory(plan: &Plan<'_>) -> Result<(), Stop> {
    Ok(rustix::process::chdir(plan.prepared.directory.as_c_str())?)
}

fn exec(plan: &Plan<'_>) -> Result<(), Stop> {
    let (arguments, environment) = (plan.arguments.as_ptr(), plan.environment.as_ptr());
    // SAFETY: both lists end with a null pointer, and they and what they point to live in `plan`.
    Ok(check(unsafe { libc::execve(plan.prepared.program.as_ptr(), arguments, environment) })?)
}

fn check(result: i32) -> rustix::io::Result<()> {
    if result != -1 {
        return Ok(());
    }
    // SAFETY: the address of this thread's `errno`, always there.
    Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() }))
}

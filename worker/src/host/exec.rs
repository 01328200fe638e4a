//! Implements `exec`, which runs an unmodified program for each job. The program reads the payload from standard input
//! and writes the result to standard output, or uses files in the job's folder. Standard error goes to the log.
//! `launch` starts the program, and `orphans` kills what it leaves behind.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bulkhead_linux::{rlimits, signals};
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, statat};
use rustix::io::{Errno, ioctl_fionread};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::folder::{Folder, Folders};
use super::launch::{self, ChildSetup, Environment, Launch, Program};
use super::log_lines::{LogLines, SharedLog};
use super::orphans::Orphans;
use crate::context::{Ctx, Job};
use crate::log;
use crate::reply::{HandlerError, Reply};
use crate::rules::{Rules, Temporary};
use crate::server::Server;

/// Maximum number of trailing bytes of standard error to include in a job's error message.
const TAIL_BYTES: usize = 4 * 1024;

/// Interval between checks for remaining descendants of a program that has exited.
const LEFT_CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// The program to run, its limits, and the meanings of its exit statuses. The supervisor passes these settings to
/// the host as arguments.
#[derive(Default)]
pub(super) struct Plan {
    program: String,
    arguments: Vec<String>,
    rlimits: Vec<(Resource, Rlimit)>,
    /// Maximum time to wait for the end of a program's output after the program has exited.
    output_grace: Duration,
    /// Exit statuses that mean success, an error caused by the caller, or a retryable failure.
    ok: Vec<i32>,
    caller: Vec<i32>,
    retryable: Vec<i32>,
    /// Names of the payload file and the result file in the job's folder. If either name is set, this folder
    /// is the working directory of the program.
    input: Option<String>,
    output: Option<String>,
}

impl Plan {
    pub(super) fn parse(mut arguments: &[&str]) -> Option<Self> {
        // The supervisor sets the same limit for workers. The limit is smaller than any core dump, but not 0,
        // because with 0 the kernel would still pipe core dumps to a crash handler.
        let core = (Resource::Core, Rlimit { current: Some(1), maximum: Some(1) });
        let mut plan = Self { rlimits: vec![core], ..Self::default() };
        while let [option, text, ref rest @ ..] = *arguments {
            match option {
                "--rlimit" => plan.rlimits.push(parse_rlimit(text)?),
                "--output-grace-us" => plan.output_grace = Duration::from_micros(text.parse().ok()?),
                "--ok" => plan.ok.push(text.parse().ok()?),
                "--caller" => plan.caller.push(text.parse().ok()?),
                "--retryable" => plan.retryable.push(text.parse().ok()?),
                "--input" => plan.input = Some(text.to_owned()),
                "--output" => plan.output = Some(text.to_owned()),
                "--" => {
                    plan.program = text.to_owned();
                    plan.arguments = rest.iter().map(|&text| text.to_owned()).collect();
                    return Some(plan);
                }
                _ => return None,
            }
            arguments = rest;
        }
        None
    }

    fn has_files(&self) -> bool {
        self.input.is_some() || self.output.is_some()
    }
}

fn parse_rlimit(text: &str) -> Option<(Resource, Rlimit)> {
    let (name, value) = text.split_once('=')?;
    let resource = rlimits::Resource::from_name(name)?.to_rustix();
    let current = if value == "unlimited" { None } else { Some(value.parse::<u64>().ok()?) };
    // The hard limit is one second higher, so that the kernel sends SIGXCPU, which shows the cause, before
    // SIGKILL.
    let maximum = current.map(|n| if name == "cpu" { n.saturating_add(1) } else { n });
    Some((resource, Rlimit { current, maximum }))
}

/// Checks at startup that this limit can be set for programs. An impossible limit would make every job fail.
fn check_limit(resource: Resource, limit: Rlimit) -> Result<(), HandlerError> {
    let own = getrlimit(resource);
    if own.maximum.is_none_or(|most| limit.maximum.is_some_and(|wanted| wanted <= most)) {
        return Ok(());
    }
    // A privileged host can raise the limit. The attempt is undone, because the limit is for programs only.
    let raised = Rlimit { current: own.current, maximum: limit.maximum };
    setrlimit(resource, raised).and_then(|()| setrlimit(resource, own)).map_err(|_| {
        let name = rlimits::Resource::from_number(resource as u32).map_or("", rlimits::Resource::name);
        let wanted = limit.current.map_or_else(|| "unlimited".to_owned(), |wanted| wanted.to_string());
        // The host's own limit on open files is lower than the supervisor's limit, so its value would be misleading.
        let message = format!(
            "rlimit {name}: {wanted} is above the hard limit of the supervisor: lower `rlimits.{name}`, or raise the \
             supervisor's limit (`Limit{}=` in its systemd unit)",
            name.to_ascii_uppercase()
        );
        HandlerError::new("rlimits", message)
    })
}

/// Serves jobs until the supervisor stops the host.
pub(super) fn run(plan: Plan) -> ExitCode {
    if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        log::line(format_args!("failed to become a child subreaper: {error}"));
        return ExitCode::FAILURE;
    }
    let (orphans, requests) = Orphans::new();
    let orphans = Arc::new(orphans);
    let handler_orphans = orphans.clone();
    let server = Server::new()
        .init(move |_| Host::new(plan, handler_orphans))
        .raw_handler(|job, ctx: &Ctx<Host>| ctx.state().run_program(job, ctx));
    let serving = std::thread::Builder::new().name("dispatch".into()).spawn(move || {
        let code = server.serve();
        // `main` cannot return the status, because the first thread is still serving orphans.
        std::process::exit(if code == ExitCode::SUCCESS { 0 } else { 2 });
    });
    if let Err(error) = serving {
        log::line(format_args!("failed to start a thread: {error}"));
        return ExitCode::FAILURE;
    }
    orphans.serve(&requests);
    ExitCode::SUCCESS
}

/// State shared by all jobs of the host.
struct Host {
    plan: Plan,
    log: SharedLog,
    /// Path that is passed to `execve`.
    place: String,
    environment: Environment,
    rules: Arc<Rules>,
    folders: Folders,
    orphans: Arc<Orphans>,
}

impl Host {
    fn new(mut plan: Plan, orphans: Arc<Orphans>) -> Result<Self, HandlerError> {
        let failed = |attempted: &str, error: io::Error| {
            HandlerError::new("confinement", format!("failed to {attempted}: {error}"))
        };
        plan.rlimits.iter().try_for_each(|(resource, limit)| check_limit(*resource, *limit))?;
        // Raises the limit on open descriptors, because the host needs several descriptors for each program.
        // Programs get the original limit.
        let open_files = getrlimit(Resource::Nofile);
        plan.rlimits.insert(0, (Resource::Nofile, open_files));
        let raised = Rlimit { current: open_files.maximum, maximum: open_files.maximum };
        setrlimit(Resource::Nofile, raised)
            .map_err(|error| failed("raise the limit on open files", error.into()))?;
        let mut rules = Rules::inherited().map_err(|error| failed("read the rules for programs", error))?;
        let place = match super::inherited_program() {
            Some(program) => {
                let place = super::place(&program);
                rules.grant_program(program);
                place
            }
            None => plan.program.clone(),
        };
        launch::check(&plan.program, &place).map_err(|message| HandlerError::new("program", message))?;
        // Creates the rules once at startup, to detect errors that would affect every program.
        rules.for_program(None).map_err(|error| failed("create Landlock rules for a program", error))?;
        if rules.exposes_temporary_files() {
            log::line(
                "programs in this worker can read each other's temporary files because `read` or `write` \
                 grants a parent directory of these files",
            );
        }
        let rules = Arc::new(rules);
        let folders = Folders::new(rules.clone()).map_err(|error| failed("start a thread", error))?;
        let environment = Environment::new(rules.temporary().map(|temporary| temporary.path.as_path()));
        Ok(Self { plan, log: SharedLog::default(), place, environment, rules, folders, orphans })
    }

    fn run_program(&self, job: &Job, ctx: &Ctx<Self>) -> Reply {
        let failed = |error: io::Error| {
            let program = &self.plan.program;
            let message = format!("failed to start {program}: {}", launch::describe(&error, program));
            Reply::Failed(HandlerError::new("spawn", message).retryable())
        };
        let folder = match self.folders.make() {
            Ok(folder) => folder,
            Err(error) => {
                let message = format!("failed to create the program's temporary directory: {error}");
                return Reply::Failed(HandlerError::new("spawn", message).retryable());
            }
        };
        let reply = match self.write_input(folder.as_ref(), job) {
            Ok(()) => match self.start(folder.as_ref(), ctx) {
                Ok(program) => self.finish(program, job, folder.as_ref(), ctx),
                Err(error) => failed(error),
            },
            Err(error) => {
                let name = self.plan.input.as_deref().unwrap_or_default();
                let is_full = error.kind() == io::ErrorKind::StorageFull;
                let advice = if is_full { "; raise `sandbox.tmp` to allow more" } else { "" };
                let message = format!("failed to write the payload to the file `{name}`: {error}{advice}");
                let error = HandlerError::new("io", message);
                Reply::Failed(if is_full { error.caller() } else { error })
            }
        };
        if let Some(folder) = folder {
            self.folders.remove(folder);
        }
        reply
    }

    /// Writes the payload to the program's input file, if one is configured.
    fn write_input(&self, folder: Option<&Folder>, job: &Job) -> io::Result<()> {
        let Some(name) = &self.plan.input else { return Ok(()) };
        let folder = folder.ok_or(io::ErrorKind::NotFound)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(folder.place(), name, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(job.payload())
    }

    /// Reads the program's output file. Must be called only after all processes of the program are gone. Does
    /// not follow symbolic links, and does not block on a FIFO.
    fn file_output(&self, name: &str, folder: Option<&Folder>, most: u64) -> Result<Vec<u8>, HandlerError> {
        let none = |why: &dyn std::fmt::Display| {
            HandlerError::new(
                "no_output",
                format!("the program exited and left no result in the file `{name}`: {why}"),
            )
        };
        let folder = folder.ok_or_else(|| none(&"the job has no directory"))?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        folder.restore_owner_rights();
        let file = match openat(folder.place(), name, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Err(none(&"the file is a symbolic link")),
            file => file.map_err(|error| none(&error))?,
        };
        let found = fstat(&file).map_err(|error| none(&error))?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(none(&"the file is not a regular file"));
        }
        let mut output = Vec::new();
        File::from(file).take(most + 1).read_to_end(&mut output).map_err(|error| none(&error))?;
        if output.len() as u64 > most {
            let message = format!("the file `{name}` is larger than max_result ({most} bytes)");
            return Err(HandlerError::new(RESULT_TOO_LARGE, message));
        }
        Ok(output)
    }

    /// Starts the job's program.
    fn start(&self, folder: Option<&Folder>, ctx: &Ctx<Self>) -> io::Result<Program> {
        let ruleset = self.rules.for_program(folder.map(Folder::place))?;
        let hidden_folder = self.rules.temporary().map(Temporary::hidden_folder).transpose()?.flatten();
        let environment = self.environment.for_job(ctx, folder.map(|folder| folder.path.as_path()))?;
        let program = (self.plan.program.as_str(), self.place.as_str());
        let launch = Launch::new(program, &self.plan.arguments, environment)?;
        let setup = ChildSetup {
            rlimits: &self.plan.rlimits,
            ruleset: ruleset.as_ref(),
            hidden_folder: hidden_folder.as_ref().map(AsFd::as_fd),
            directory: folder.filter(|_| self.plan.has_files()).map(Folder::place),
        };
        self.orphans.start(|| launch.start(&setup), Program::id)
    }

    /// Waits for the program to exit, and kills its remaining descendants. No process of the program is left when
    /// this function returns.
    fn finish(&self, mut program: Program, job: &Job, folder: Option<&Folder>, ctx: &Ctx<Self>) -> Reply {
        let pid = program.id();
        let exchanged = self.exchange(&mut program, job.payload(), folder, ctx);
        let must_kill = !matches!(exchanged, Ok(Run { end: Ending::Exited | Ending::Incomplete(_), .. }));
        self.orphans.unprotect(pid);
        if must_kill {
            // Kills only the program's own process. `finish_cleanup` kills the descendants.
            program.kill();
        }
        let status = program.wait();
        self.orphans.finish_cleanup(pid);
        match (exchanged, status) {
            (Ok(mut run), Ok(status)) => {
                run.read_rest(ctx.result_bytes_max());
                self.reply(run, pid, status, folder, ctx.result_bytes_max())
            }
            (Err(error), _) | (_, Err(error)) => {
                let message = format!("failed to communicate with {}: {error}", self.plan.program);
                Reply::Failed(HandlerError::new("io", message))
            }
        }
    }

    /// Writes the payload and reads the output. Returns when the program has exited and its output has ended,
    /// or when the job must end.
    fn exchange(
        &self,
        program: &mut Program,
        payload: &[u8],
        folder: Option<&Folder>,
        ctx: &Ctx<Self>,
    ) -> io::Result<Run> {
        let cancelled = ctx.cancellation()?;
        // Closes standard input immediately if there is nothing to write.
        let mut unsent = if self.plan.input.is_some() { &[][..] } else { payload };
        let mut stdin = program.stdin.take().filter(|_| !unsent.is_empty());
        let stdout = program.stdout.take();
        let (logged, stdout) = if self.plan.output.is_some() { (stdout, None) } else { (None, stdout) };
        let mut run = Run {
            stdout,
            logged,
            stderr: program.stderr.take(),
            output: Vec::new(),
            log: [LogLines::new(&self.log), LogLines::new(&self.log)],
            tail: Vec::new(),
            end: Ending::Exited,
        };
        let most = ctx.result_bytes_max();
        let mut until: Option<Instant> = None;
        loop {
            let sources = [
                (Some(cancelled), PollFlags::IN),
                (Some(program.child.pidfd.as_fd()).filter(|_| until.is_none()), PollFlags::IN),
                (stdin.as_ref().map(AsFd::as_fd), PollFlags::OUT),
                (run.stdout.as_ref().map(AsFd::as_fd), PollFlags::IN),
                (run.logged.as_ref().map(AsFd::as_fd), PollFlags::IN),
                (run.stderr.as_ref().map(AsFd::as_fd), PollFlags::IN),
            ];
            let mut timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
            if run.stdout.is_none() {
                timeout = timeout.map(|time| time.min(LEFT_CHECK_INTERVAL));
            }
            let [is_cancelled, has_ended, takes_input, has_output, has_logged, has_errors] =
                wait(sources, timeout);
            if takes_input {
                write_stdin(&mut stdin, &mut unsent);
            }
            if has_output && run.read_output() == 0 {
                run.stdout = None;
            }
            if has_logged && run.read_logged() == 0 {
                run.logged = None;
            }
            if has_errors && run.read_errors() == 0 {
                run.stderr = None;
            }
            if run.output.len() as u64 > most {
                run.end = Ending::TooLarge;
                return Ok(run);
            }
            if has_ended {
                if self.plan.output_grace.is_zero() || program.has_crashed()? {
                    return Ok(run);
                }
                self.orphans.protect(program.id());
                until = Some(Instant::now() + self.plan.output_grace);
            }
            let may_write = run.stdout.is_some()
                || until.is_some() && self.plan.output.is_some() && self.orphans.has_orphans(program.id());
            if until.is_some() && !may_write {
                return Ok(run);
            }
            if is_cancelled {
                run.end = Ending::Cancelled;
                return Ok(run);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                let result = match (&run.stdout, self.plan.output.as_deref(), folder) {
                    (Some(stdout), ..) => Some(fstat(stdout)?),
                    (None, Some(name), Some(folder)) => {
                        statat(folder.place(), name, AtFlags::SYMLINK_NOFOLLOW).ok()
                    }
                    _ => None,
                };
                let holders = result.map(|result| self.orphans.holders(program.id(), &result));
                if run.stdout.is_some() || holders.as_ref().is_some_and(|holders| !holders.is_empty()) {
                    run.end = Ending::Incomplete(holders.unwrap_or_default());
                }
                return Ok(run);
            }
        }
    }

    fn reply(&self, run: Run, process: u32, status: ExitStatus, folder: Option<&Folder>, most: u64) -> Reply {
        let tail = String::from_utf8_lossy(&run.tail).trim_end().to_owned();
        if let Ending::Cancelled = run.end {
            return Reply::Failed(HandlerError::new(
                "cancelled",
                "the program was killed because the job was cancelled",
            ));
        }
        if let Ending::TooLarge = run.end {
            let message = format!("the program wrote more than max_result ({most} bytes)");
            return Reply::Failed(HandlerError::new(RESULT_TOO_LARGE, message));
        }
        if let Some(signal) = status.signal() {
            let name = signals::known_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned);
            let mut message = format!("the program was killed by {name}");
            append(&mut message, &tail);
            return Reply::ProgramCrashed { process, signal, message };
        }
        let status = status.code().unwrap_or(0);
        let failed = |error, output| Reply::Exited { status, error: Some(error), output };
        if !self.plan.ok.contains(&status) {
            let mut message = tail;
            if let Ending::Incomplete(holders) = &run.end {
                let note = incomplete(self.plan.output.as_deref(), holders, self.plan.output_grace).message;
                message = if message.is_empty() { note } else { format!("{message}; {note}") };
            }
            let error = HandlerError::new(format!("exit_{status}"), message);
            let error = if self.plan.retryable.contains(&status) { error.retryable() } else { error };
            let error = if self.plan.caller.contains(&status) { error.caller() } else { error };
            return failed(error, run.output);
        }
        if let Ending::Incomplete(holders) = &run.end {
            let output = self.plan.output.as_deref();
            let written = output.and_then(|name| self.file_output(name, folder, most).ok());
            let error = incomplete(output, holders, self.plan.output_grace);
            return failed(error, written.unwrap_or(run.output));
        }
        match self.plan.output.as_deref().map(|name| self.file_output(name, folder, most)) {
            None => Reply::Exited { status, error: None, output: run.output },
            Some(Ok(output)) => Reply::Exited { status, error: None, output },
            Some(Err(mut error)) => {
                append(&mut error.message, &tail);
                failed(error, Vec::new())
            }
        }
    }
}

fn append(message: &mut String, tail: &str) {
    if !tail.is_empty() {
        message.push_str(": ");
        message.push_str(tail);
    }
}

/// Returns the error for output that did not end within the `grace` period after the program had exited. `file` is the
/// name of the output file, or `None` for standard output. `holders` contains the names of processes that had the
/// output open.
fn incomplete(file: Option<&str>, holders: &[String], grace: Duration) -> HandlerError {
    let output = file.map_or_else(|| "standard output".to_owned(), |name| format!("file `{name}`"));
    let holders = if holders.is_empty() { "another process".to_owned() } else { holders.join(", ") };
    let message = format!(
        "the program exited, but the {output} was still open in {holders} after {} ms, so the remaining \
         processes were killed: have the program wait for child processes, redirect the output of child \
         processes, or raise `output_grace`; `output_grace = \"0s\"` drops output that is written after the \
         exit",
        grace.as_millis()
    );
    HandlerError::new("output_incomplete", message)
}

enum Ending {
    Exited,
    /// The program exited, but other processes kept its output open for longer than `output_grace`. Contains the
    /// names of these processes.
    Incomplete(Vec<String>),
    Cancelled,
    TooLarge,
}

/// The output of a program, and the reason why the host stopped reading it.
struct Run {
    /// Standard output, if it is the result.
    stdout: Option<PipeReader>,
    /// Standard output, if the result is a file. It is forwarded to the log.
    logged: Option<PipeReader>,
    stderr: Option<PipeReader>,
    output: Vec<u8>,
    /// Lines of `logged` and `stderr`.
    log: [LogLines; 2],
    tail: Vec<u8>,
    end: Ending,
}

impl Run {
    /// Reads the bytes that remain in the pipes after the program has exited. Must be called only after all
    /// processes of the program are gone. Does not wait for other processes that still hold the pipes open.
    fn read_rest(&mut self, most: u64) {
        if !matches!(self.end, Ending::Exited | Ending::Incomplete(_)) {
            return;
        }
        let held =
            |pipe: Option<BorrowedFd<'_>>| pipe.and_then(|pipe| ioctl_fionread(pipe).ok()).unwrap_or(0);
        let sources = [
            (held(self.stdout.as_ref().map(AsFd::as_fd)), most, Self::read_output as fn(&mut Self) -> usize),
            (held(self.logged.as_ref().map(AsFd::as_fd)), u64::MAX, Self::read_logged),
            (held(self.stderr.as_ref().map(AsFd::as_fd)), u64::MAX, Self::read_errors),
        ];
        for (mut left, most, read) in sources {
            while left > 0 && self.output.len() as u64 <= most {
                match read(self) as u64 {
                    0 => break,
                    count => left = left.saturating_sub(count),
                }
            }
        }
        if self.output.len() as u64 > most {
            self.end = Ending::TooLarge;
        }
    }

    /// Reads standard output once. Returns the number of bytes read.
    fn read_output(&mut self) -> usize {
        read_some(&mut self.stdout, |bytes| self.output.extend_from_slice(bytes))
    }

    /// Reads standard output once, and forwards it to the log. Returns the number of bytes read.
    fn read_logged(&mut self) -> usize {
        read_some(&mut self.logged, |bytes| self.log[0].write(bytes))
    }

    /// Reads standard error once. Returns the number of bytes read.
    fn read_errors(&mut self) -> usize {
        read_some(&mut self.stderr, |bytes| {
            self.log[1].write(bytes);
            keep_tail(&mut self.tail, bytes);
        })
    }
}

/// Waits for at most `most` until at least one of the sources is ready. Returns which sources are ready.
fn wait<const N: usize>(
    sources: [(Option<BorrowedFd<'_>>, PollFlags); N],
    most: Option<Duration>,
) -> [bool; N] {
    let polled = sources.iter().filter_map(|&(fd, flags)| Some(PollFd::from_borrowed_fd(fd?, flags)));
    let mut polled: Vec<_> = polled.collect();
    let most = most.and_then(|most| Timespec::try_from(most).ok());
    let is_any = poll(&mut polled, most.as_ref()).is_ok();
    let mut polled = polled.iter();
    sources
        .map(|(fd, _)| fd.and_then(|_| polled.next()).is_some_and(|one| is_any && !one.revents().is_empty()))
}

/// Writes as much of the payload as the pipe accepts. Does not fail if the program has closed standard input.
fn write_stdin(stdin: &mut Option<PipeWriter>, unsent: &mut &[u8]) {
    let Some(pipe) = stdin else { return };
    match pipe.write(unsent) {
        Ok(count) => *unsent = &unsent[count..],
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            return;
        }
        Err(_) => *unsent = &[],
    }
    if unsent.is_empty() {
        *stdin = None;
    }
}

/// Reads a pipe once. Returns the number of bytes read.
fn read_some(pipe: &mut Option<impl Read>, mut take: impl FnMut(&[u8])) -> usize {
    let mut buffer = [0; 64 * 1024];
    let Some(source) = pipe else { return 0 };
    let count = source.read(&mut buffer).unwrap_or(0);
    take(&buffer[..count]);
    count
}

/// Keeps the last bytes of standard error for the job's error message.
fn keep_tail(tail: &mut Vec<u8>, bytes: &[u8]) {
    tail.extend_from_slice(bytes);
    if tail.len() > TAIL_BYTES {
        tail.drain(..tail.len() - TAIL_BYTES);
    }
}

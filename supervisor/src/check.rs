//! Implements `--check --start`: starts a worker for each bulkhead as the supervisor would, with the bulkhead's
//! template if there is one, and reports why workers fail to start. Sends no jobs.
//!
//! The check binds no sockets and locks only user IDs that no running supervisor uses, so it can run next to a
//! supervisor with the same configuration.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bulkhead_config::{BulkheadConfig, Config, WorkerIds};
use bulkhead_keeper::{self as keeper, Keeper, Observed, Report, TemplateReport};
use bulkhead_plane::confinement::{SandboxSupport, WorkerIdentity};
use bulkhead_plane::program::{self, Program};
use bulkhead_plane::worker_ids::IdUse;
use bulkhead_shared::client_protocol::{Hello, PROTOCOL_VERSION};
use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::frame::{HEADER_BYTES, Header, MAGIC, kind};
use bulkhead_shared::limits::FRAME_OVERHEAD_BYTES_MAX;
use bulkhead_shared::text::escape;
use bulkhead_shared::worker_protocol::{Extend, Status, WorkerWelcome};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::supervisor::{RunError, system};

/// Maximum time that the keeper can take to execute an order.
const ORDER_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time that a worker can take to exit after it has closed the link.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a frame that a worker sends before it is ready, in bytes.
const FRAME_BYTES_MAX: usize = 64 * 1024;

/// Maximum number of bytes of a worker's output that are quoted in an error message.
const OUTPUT_BYTES_MAX: u64 = 4096;

/// Returns the source of user IDs for workers. For root, the source is always [`WorkerIds::Host`], and starting a
/// worker then shows whether root can change user IDs.
pub fn worker_ids(config: &Config) -> WorkerIds {
    if rustix::process::geteuid().is_root() {
        return WorkerIds::Host;
    }
    let support = SandboxSupport::probe(config, IdUse::Check);
    match (support.ids(), support.subordinate()) {
        (None, _) => WorkerIds::None,
        (Some(_), None) => WorkerIds::Host,
        (Some(_), Some(_)) => WorkerIds::Subordinate,
    }
}

/// Starts a worker for each bulkhead, one after another. Writes a TOML comment to `out` for each worker that started,
/// and returns a sentence for each worker that did not.
///
/// Must be called before the process has started any other thread.
pub fn start_each(config: &Config, out: &mut impl Write) -> Result<Vec<String>, RunError> {
    let host = program::require_host(config, None)?;
    let support = SandboxSupport::probe(config, IdUse::Check);
    keeper::become_subreaper().map_err(system("become a child subreaper"))?;
    let mut keeper = Keeper::start(Path::new("/proc/self/exe")).map_err(system("start the keeper"))?;
    if let Some(ids) = support.subordinate() {
        keeper.send_subordinate_ids(ids).map_err(system("start the keeper"))?;
    }
    let mut failures = Vec::new();
    let mut check = StartCheck { keeper, ordered: 0, exits: BTreeMap::new() };
    for bulkhead in &config.bulkheads {
        let program = Program::new(bulkhead, host.as_deref(), &support);
        let name = &bulkhead.name;
        match check.start(&program, bulkhead, &support) {
            Ok(observed) => {
                let line = format!("# bulkhead '{name}' starts: {}", describe(&program, &observed));
                writeln!(out, "{line}").map_err(system("write to standard output"))?;
            }
            Err(why) => failures.push(format!("bulkhead '{name}' does not start: {why}")),
        }
        for warning in program.sandbox().warnings() {
            writeln!(out, "#   {warning}").map_err(system("write to standard output"))?;
        }
    }
    check.keeper.shut_down().map_err(system("stop the keeper"))?;
    Ok(failures)
}

fn describe(program: &Program, observed: &Observed) -> String {
    let snapshot = program.sandbox().describe(observed);
    let number = |id: Option<u32>| id.map_or_else(|| "?".to_owned(), |id| id.to_string());
    let namespaces = match snapshot.namespaces.as_slice() {
        [] => "none".to_owned(),
        names => names.join(", "),
    };
    let landlock = snapshot.landlock.map_or_else(|| "none".to_owned(), |version| version.to_string());
    format!(
        "profile \"{}\", user {} ({}), namespaces {namespaces}, landlock {landlock}, seccomp {}",
        snapshot.profile,
        number(snapshot.uid),
        snapshot.identity,
        snapshot.seccomp,
    )
}

/// State of a start check: the keeper, and the processes that the keeper was asked to start.
struct StartCheck {
    keeper: Keeper,
    /// Number of workers and templates that the keeper was asked to start. Also the spawn number of the most recent
    /// process.
    ordered: u64,
    /// Exits reported by the keeper but not yet returned by [`StartCheck::take_exit`], by spawn number.
    exits: BTreeMap<u64, keeper::Exit>,
}

/// A worker or template that the keeper was ordered to start.
struct StartedProcess {
    number: u64,
    /// Threads that read the standard output and standard error of the process.
    readers: [JoinHandle<String>; 2],
}

/// Result of starting and stopping a worker or template.
struct StartResult {
    process: StartedProcess,
    ready: Result<(), StartFailure>,
    exit: keeper::Exit,
}

impl StartResult {
    /// Waits until the process closes its standard output and standard error. If the process did not become ready,
    /// returns an error that quotes the output.
    fn into_result(self, what: &str) -> Result<(), String> {
        let output: String =
            self.process.readers.into_iter().filter_map(|reader| reader.join().ok()).collect();
        match self.ready {
            Ok(()) => Ok(()),
            Err(StartFailure::Closed(status)) => {
                let status = status.map(|status| format!(": {}", escape(&status))).unwrap_or_default();
                let how = describe_exit(self.exit);
                Err(format!("{what} exited before it was ready ({how}){status}{}", quote_output(&output)))
            }
            Err(StartFailure::Other(why)) => Err(format!("{what} {why}{}", quote_output(&output))),
        }
    }
}

impl StartCheck {
    /// Starts a worker, from a template if the bulkhead has one. Stops the worker and the template when the
    /// worker is ready or has failed.
    fn start(
        &mut self,
        program: &Program,
        bulkhead: &BulkheadConfig,
        support: &SandboxSupport,
    ) -> Result<Observed, String> {
        if let Some(obstacle) = program.sandbox().obstacle() {
            return Err(obstacle.to_owned());
        }
        let ids = support.ids();
        let id = match (program.sandbox().identity(), &ids) {
            (WorkerIdentity::Each, Some(ids)) => Some(ids.allocate().map_err(text)?),
            _ => None,
        };
        if program.is_forked() {
            return self.start_forked(program, bulkhead, id);
        }
        let (observed, result) =
            self.start_worker(program, bulkhead, |keeper, number, link, stdout, stderr| {
                keeper.spawn(&program.order(number, id), link, stdout, stderr)
            })?;
        result.into_result(program.path_for_messages()).map(|()| observed)
    }

    /// Starts a template, and a worker that is forked from the template.
    fn start_forked(
        &mut self,
        program: &Program,
        bulkhead: &BulkheadConfig,
        id: Option<u32>,
    ) -> Result<Observed, String> {
        let what = format!("the template of {}", program.path_for_messages());
        let template = self.order(|keeper, number, stdout, stderr| {
            keeper.spawn_template(&program.template_order(number, id), stdout, stderr)
        })?;
        let number = template.number;
        self.spawned(number).map_err(|why| format!("failed to start {what}: {why}"))?;
        let ready = self.await_template(number, bulkhead.start.ready)?;
        let forked = ready.is_ok().then(|| {
            self.start_worker(program, bulkhead, |keeper, worker, link, stdout, stderr| {
                keeper.fork((worker, number), link, stdout, stderr)
            })
        });
        // The template is stopped first, because it might hold the worker's output open.
        let exit = self.stop(number, Duration::ZERO)?;
        StartResult { process: template, ready, exit }.into_result(&what)?;
        let (observed, result) = forked.ok_or_else(keeper_timeout)??;
        result
            .into_result(&format!("{}, forked from the template,", program.path_for_messages()))
            .map(|()| observed)
    }

    /// Starts a worker, waits until the worker is ready or has failed, and stops it.
    fn start_worker(
        &mut self,
        program: &Program,
        bulkhead: &BulkheadConfig,
        send_order: impl FnOnce(&mut Keeper, u64, OwnedFd, OwnedFd, OwnedFd) -> io::Result<()>,
    ) -> Result<(Observed, StartResult), String> {
        let (link, theirs) = UnixStream::pair().map_err(text)?;
        let ordered = self.order(|keeper, number, stdout, stderr| {
            send_order(keeper, number, theirs.into(), stdout, stderr)
        })?;
        let number = ordered.number;
        let observed = self
            .spawned(number)
            .map_err(|why| format!("failed to start {}: {why}", program.path_for_messages()))?;
        let ready = handshake(link, program, bulkhead);
        // A worker that has closed the link is about to exit, and its exit status explains the failure. Any other
        // worker is killed immediately.
        let timeout =
            if matches!(ready, Err(StartFailure::Closed(_))) { EXIT_TIMEOUT } else { Duration::ZERO };
        let exit = self.stop(number, timeout)?;
        Ok((observed, StartResult { process: ordered, ready, exit }))
    }

    /// Orders the keeper to start a worker or template under the next spawn number, and starts reading the output of
    /// the new process.
    fn order(
        &mut self,
        send_order: impl FnOnce(&mut Keeper, u64, OwnedFd, OwnedFd) -> io::Result<()>,
    ) -> Result<StartedProcess, String> {
        let (stdout, stdout_write) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| text(errno.into()))?;
        let (stderr, stderr_write) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| text(errno.into()))?;
        self.ordered += 1;
        let number = self.ordered;
        send_order(&mut self.keeper, number, stdout_write, stderr_write).map_err(text)?;
        Ok(StartedProcess { number, readers: [read_in_background(stdout), read_in_background(stderr)] })
    }

    /// Waits for a report from the keeper for which `wanted` returns a value, and returns this value. Returns `None` if
    /// no such report arrives within `timeout`.
    fn wait<T>(
        &mut self,
        timeout: Duration,
        mut wanted: impl FnMut(Report) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let deadline = Instant::now() + timeout;
        loop {
            let Some(report) = self.keeper.wait(deadline).map_err(text)? else { return Ok(None) };
            if let Report::Exited { worker, exit, .. } = &report {
                self.exits.insert(*worker, *exit);
            }
            if let Some(found) = wanted(report) {
                return Ok(Some(found));
            }
        }
    }

    fn spawned(&mut self, number: u64) -> Result<Observed, String> {
        let spawned = self.wait(ORDER_TIMEOUT, |report| match report {
            Report::Spawned { worker, observed, .. } if worker == number => Some(Ok(observed)),
            Report::SpawnFailed { worker, step, error } if worker == number => {
                Some(Err(format!("{step}: {error}{}", keeper::spawn_failure_advice(&step, &error))))
            }
            _ => None,
        })?;
        spawned.unwrap_or_else(|| Err(keeper_timeout()))
    }

    /// Waits until a template is able to fork workers. The outer error is a failure of the keeper, and the inner error
    /// is a failure of the template.
    fn await_template(&mut self, number: u64, max: Duration) -> Result<Result<(), StartFailure>, String> {
        let (mut deadline, mut status) = (Instant::now() + max, None);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let report = self.wait(left, |report| match report {
                Report::Template { worker, message } if worker == number => Some(Some(message)),
                Report::Exited { worker, .. } if worker == number => Some(None),
                _ => None,
            })?;
            match report {
                Some(Some(TemplateReport::Ready)) => return Ok(Ok(())),
                Some(Some(TemplateReport::Extend(more))) => {
                    deadline = deadline.max(Instant::now() + more.min(max));
                }
                Some(Some(TemplateReport::Status(text) | TemplateReport::Refused(text))) => {
                    status = Some(text)
                }
                Some(None) => return Ok(Err(StartFailure::Closed(status))),
                None => return Ok(Err(StartFailure::Other("did not become ready in time".into()))),
            }
        }
    }

    /// Waits until the process exits, and kills it if it does not exit within `timeout`. Returns the exit
    /// status.
    fn stop(&mut self, number: u64, timeout: Duration) -> Result<keeper::Exit, String> {
        if let Some(exit) = self.take_exit(number, timeout)? {
            return Ok(exit);
        }
        self.keeper.kill(number).map_err(text)?;
        self.take_exit(number, ORDER_TIMEOUT)?.ok_or_else(keeper_timeout)
    }

    /// Waits until the process exits. Returns the exit status, or `None` if the process did not exit within
    /// `timeout`.
    fn take_exit(&mut self, number: u64, timeout: Duration) -> Result<Option<keeper::Exit>, String> {
        if !self.exits.contains_key(&number) {
            self.wait(timeout, |report| {
                matches!(report, Report::Exited { worker, .. } if worker == number).then_some(())
            })?;
        }
        Ok(self.exits.remove(&number))
    }
}

fn text(error: io::Error) -> String {
    error.to_string()
}

fn quote_output(output: &str) -> String {
    let lines: String = output.lines().map(|line| format!("\n    {}", escape(line))).collect();
    if lines.is_empty() { String::new() } else { format!("; output:{lines}") }
}

/// Reads a pipe to its end on a separate thread, so that the worker never blocks on a full pipe. The thread returns the
/// first [`OUTPUT_BYTES_MAX`] bytes.
fn read_in_background(pipe: OwnedFd) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut pipe = std::fs::File::from(pipe);
        let mut start = Vec::new();
        // Errors are ignored. Output that cannot be read is then missing from the report.
        let _ = (&mut pipe).take(OUTPUT_BYTES_MAX).read_to_end(&mut start);
        let _ = io::copy(&mut pipe, &mut io::sink());
        String::from_utf8_lossy(&start).into_owned()
    })
}

fn keeper_timeout() -> String {
    format!("the keeper did not respond within {ORDER_TIMEOUT:?}")
}

fn describe_exit(exit: keeper::Exit) -> String {
    match exit {
        keeper::Exit::Code(code) => format!("exit code {code}"),
        keeper::Exit::Signal { number, .. } => format!("signal {}", bulkhead_linux::signals::name(number)),
        keeper::Exit::Oom => "out of memory".to_owned(),
        keeper::Exit::Violation { call } => match keeper::syscall_name(call) {
            "" => "made a system call that the sandbox forbids".to_owned(),
            name => format!("made the system call {name}, which the sandbox forbids"),
        },
    }
}

/// Reason why a worker or template did not become ready.
enum StartFailure {
    /// The process closed the link. Contains the last status message from the process, or a hint.
    Closed(Option<String>),
    /// Any other failure. The text completes a sentence that begins with the name of the program.
    Other(String),
}

/// Performs the handshake with a worker, and waits until the worker is ready.
fn handshake(mut link: UnixStream, program: &Program, bulkhead: &BulkheadConfig) -> Result<(), StartFailure> {
    let timeout_error = |deadline: Instant, message: &'static str| {
        move |error: io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => StartFailure::Other(message.into()),
            _ if Instant::now() > deadline => StartFailure::Other(message.into()),
            _ => StartFailure::Closed(None),
        }
    };
    let deadline = Instant::now() + bulkhead.start.handshake;
    let too_late = "did not send HELLO in time; a program without the SDK needs `exec`";
    let first = frame(&mut link, deadline).map_err(timeout_error(deadline, too_late));
    let (header, metadata) = first.map_err(|failure| match (failure, &bulkhead.program) {
        (StartFailure::Closed(_), bulkhead_config::Program::Command { .. }) => StartFailure::Closed(Some(
            "a program that does not use the worker SDK needs `exec` instead of `command`".to_owned(),
        )),
        (other, _) => other,
    })?;
    let hello = codec::decode::<Hello<'_>>(&metadata, &[]);
    let Ok((hello, _)) = hello.map_err(|_| ()).and_then(|hello| {
        if header.kind == kind::HELLO && header.number == MAGIC { Ok(hello) } else { Err(()) }
    }) else {
        return Err(StartFailure::Other("did not send HELLO; a program without the SDK needs `exec`".into()));
    };
    if !(hello.version_min..=hello.version_max).contains(&PROTOCOL_VERSION) {
        return Err(StartFailure::Other(format!(
            "supports protocol versions {} to {}, not {PROTOCOL_VERSION}: build it with a matching SDK",
            hello.version_min, hello.version_max
        )));
    }
    let deadline = Instant::now() + bulkhead.start.ready;
    welcome(&mut link, program, bulkhead)
        .map_err(timeout_error(deadline, "did not read the welcome frame in time"))?;
    await_ready(&mut link, deadline, bulkhead.start.ready)
}

fn welcome(link: &mut UnixStream, program: &Program, bulkhead: &BulkheadConfig) -> io::Result<()> {
    let welcome = WorkerWelcome {
        version: PROTOCOL_VERSION,
        frame_bytes_max: u32::try_from(bulkhead.max_result + FRAME_OVERHEAD_BYTES_MAX as u64)
            .unwrap_or(u32::MAX),
        capabilities: 0,
        slot: 0,
        generation: 1,
        max_in_flight: bulkhead.max_in_flight,
        heartbeat_ms: 0,
        result_bytes_max: bulkhead.max_result,
        bulkhead: &bulkhead.name,
    };
    let seal = program.sandbox().seal().map(|seal| (tag::SEAL, seal));
    let mut metadata = Vec::new();
    codec::encode(&welcome, seal.as_slice(), &mut metadata).map_err(io::Error::other)?;
    let metadata_length = metadata.len() as u16; // `encode` has checked the length.
    let length = u32::from(metadata_length);
    let header = Header { length, kind: kind::WORKER_WELCOME, flags: 0, metadata_length, number: MAGIC };
    link.write_all(&[&header.encode()[..], &metadata].concat())
}

fn await_ready(link: &mut UnixStream, mut deadline: Instant, max: Duration) -> Result<(), StartFailure> {
    let mut status = None;
    loop {
        let (header, metadata) = match frame(link, deadline) {
            Ok(frame) => frame,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(StartFailure::Other("did not become ready in time".into()));
            }
            Err(_) => return Err(StartFailure::Closed(status)),
        };
        match header.kind {
            kind::READY => return Ok(()),
            kind::EXTEND_START => {
                let more = codec::decode::<Extend>(&metadata, &[]).map_or(0, |(extend, _)| extend.more_ms);
                // A request for more time never shortens the time left.
                deadline = deadline.max(Instant::now() + Duration::from_millis(more.into()).min(max));
            }
            kind::STATUS => {
                let said = codec::decode::<Status<'_>>(&metadata, &[]);
                status = said.ok().map(|(said, _)| said.text.to_owned()).or(status);
            }
            _ => {}
        }
    }
}

/// Reads the next frame from the link. Returns the frame's header and metadata, and discards the payload.
fn frame(link: &mut UnixStream, deadline: Instant) -> io::Result<(Header, Vec<u8>)> {
    let mut read = |buffer: &mut [u8]| {
        let left = deadline.saturating_duration_since(Instant::now());
        link.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        link.read_exact(buffer)
    };
    let mut bytes = [0; HEADER_BYTES];
    read(&mut bytes)?;
    let header = Header::decode(&bytes);
    if header.check().is_err() || header.length as usize > FRAME_BYTES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; header.length as usize];
    read(&mut body)?;
    body.truncate(header.metadata_length.into());
    Ok((header, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line of a worker's quoted output is indented. Control characters are escaped, and tabs are kept.
    #[test]
    fn quoted_worker_output_contains_no_control_characters() {
        let actual = quote_output("one\ttwo\n\x1b[31mred\x07\rover\0");
        assert_eq!(actual, "; output:\n    one\ttwo\n    \\u{1b}[31mred\\u{7}\\rover\\u{0}");
    }
}

//! Support for end-to-end tests. Starts real supervisors, each in a temporary folder, and observes their processes and
//! admin sockets. There are no mocks.

pub mod attempts;
pub mod browser;
pub mod confined;
mod ending;
pub mod fleet;
pub mod http;
pub mod ledger;
pub mod machine;
pub mod manager;
pub mod openmetrics;
pub mod ports;
pub mod subuid;
pub mod tenants;
mod watchdog;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bulkhead_api::{Bulkheads, Snapshot};
pub use ending::{SetOnDrop, in_time, output, output_within};

use bulkhead_client::{Client, Job, JobError, Reply, blocking};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// Configuration without a sandbox, for workers that report their PID. In a sandbox, a worker knows only its
/// PID in the PID namespace.
pub const SAME_NUMBERS: &str = "[defaults.sandbox]\nprofile = \"none\"\n";

/// Maximum time to wait for a condition, which on an idle machine becomes true almost immediately. This limit
/// only determines how long a failure takes, and is generous because other tests run at the same time.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Maximum duration of a future that [`run`] drives. Every test takes less time by default. The limit for all tests
/// together is longer, so that a hanging test fails under its own name.
pub const RUN_MAX: Duration = Duration::from_secs(15 * 60);

/// Waits until `condition` returns a value. If this takes longer than [`PATIENCE`], panics with a message
/// that contains `what`.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    const PAUSE_MIN: Duration = Duration::from_millis(2);
    const PAUSE_MAX: Duration = Duration::from_millis(20);
    let began = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        let waited = began.elapsed();
        assert!(waited < PATIENCE, "waited {PATIENCE:?} without success: {what}");
        // Checks at increasing intervals, because a check can cost a request or a scan of `/proc`.
        std::thread::park_timeout((waited / 16).clamp(PAUSE_MIN, PAUSE_MAX));
    }
}

/// Number of heavy tests that are running, and a condition variable that is notified when a heavy test ends.
static HEAVY: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// Permit to run a heavy test. Dropping the permit admits the next test.
#[must_use]
pub struct HeavyPermit(());

/// Waits until fewer heavy tests of this program are running than there are processors. A test is heavy if it
/// keeps a processor busy for seconds.
pub fn heavy() -> HeavyPermit {
    let permits = std::thread::available_parallelism().map_or(1, NonZero::get);
    let (running, has_ended) = &HEAVY;
    let running = running.lock().unwrap_or_else(PoisonError::into_inner);
    let is_full = |running: &mut usize| *running >= permits;
    *has_ended.wait_while(running, is_full).unwrap_or_else(PoisonError::into_inner) += 1;
    HeavyPermit(())
}

impl Drop for HeavyPermit {
    fn drop(&mut self) {
        let (running, has_ended) = &HEAVY;
        *running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        has_ended.notify_one();
    }
}

/// Returns the folder that contains the workspace's programs. The programs are built once per test process.
pub fn programs() -> PathBuf {
    static BUILD: Once = Once::new();
    let own = std::env::current_exe().expect("a test has a path");
    let beside = own.parent().expect("a program lies in a folder");
    // Tests are in target/PROFILE/deps, programs in target/PROFILE.
    let folder = if beside.ends_with("deps") { beside.parent().unwrap_or(beside) } else { beside }.to_owned();
    watchdog::record_test();
    BUILD.call_once(|| {
        let mut cargo = Command::new(env!("CARGO"));
        // With a test target, cargo selects the same features as `cargo test --workspace`, so that nothing is compiled
        // twice.
        cargo.args(["build", "--quiet", "--workspace", "--bins", "--test", "architecture"]);
        cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
        // `RUSTC_BOOTSTRAP` is set for `--report-time`, and would cause recompilations.
        cargo.env_remove("RUSTC_BOOTSTRAP");
        match folder.file_name().and_then(|name| name.to_str()) {
            None | Some("debug") => {}
            Some(profile) => drop(cargo.args(["--profile", profile])),
        }
        assert!(cargo.status().expect("cargo runs").success(), "the workspace does not build");
        // The ledger program, which is not in `deps`, has no time limit.
        if beside.ends_with("deps") {
            watchdog::start();
        }
    });
    folder
}

/// A running supervisor. The process is killed on drop.
pub struct Supervisor {
    /// The supervisor process.
    pub child: Child,
    /// Folder with the configuration, the sockets and the log.
    pub folder: TempDir,
}

impl Supervisor {
    /// Starts a supervisor with the bulkheads that the TOML text `bulkheads` defines. In this text, `MISBEHAVE` stands
    /// for the path of a worker that misbehaves on request. Returns when the first start of every bulkhead has
    /// finished.
    pub fn start(bulkheads: &str) -> Self {
        Self::start_with("", bulkheads)
    }

    /// Starts a supervisor like [`Supervisor::start`], with additional keys in the `[supervisor]` table.
    pub fn start_with(supervisor_keys: &str, bulkheads: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::launch(folder, supervisor_keys, bulkheads).until_ready()
    }

    /// Waits until every bulkhead has started or failed to start.
    pub fn until_ready(mut self) -> Self {
        wait_for("the supervisor is ready", || {
            if let Some(status) = self.child.try_wait().expect("our own child") {
                panic!("the supervisor exited with {status}:\n{}", self.log());
            }
            (self.try_get("/readyz")?.0 == 200).then_some(())
        });
        self
    }

    /// Starts a supervisor with additional arguments and environment variables.
    pub fn start_as(arguments: &[&str], variables: &[(&str, &str)], bulkheads: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::launch_as(folder, (arguments, variables), "", bulkheads).until_ready()
    }

    /// Starts a supervisor in `folder`. Does not wait until the supervisor is ready.
    pub fn launch(folder: TempDir, supervisor_keys: &str, bulkheads: &str) -> Self {
        Self::launch_as(folder, (&[], &[]), supervisor_keys, bulkheads)
    }

    /// Starts a supervisor in `folder` with additional environment variables. Does not wait until the supervisor is
    /// ready.
    pub fn launch_with_variables(
        folder: TempDir,
        variables: &[(&str, &str)],
        supervisor_keys: &str,
        bulkheads: &str,
    ) -> Self {
        Self::launch_as(folder, (&[], variables), supervisor_keys, bulkheads)
    }

    fn launch_as(
        folder: TempDir,
        (arguments, variables): (&[&str], &[(&str, &str)]),
        supervisor_keys: &str,
        bulkheads: &str,
    ) -> Self {
        let mut command = Command::new(programs().join("bulkhead-supervisor"));
        command.envs(variables.iter().copied());
        Self::launch_by(command, folder, arguments, (supervisor_keys, bulkheads))
    }

    /// Starts a supervisor on a simulated kernel that lacks `SO_PASSRIGHTS`, as Linux did before version 6.16.
    pub fn start_on_older_kernel(bulkheads: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = Command::new(programs().join("older-kernel"));
        command.arg(programs().join("bulkhead-supervisor"));
        Self::launch_by(command, folder, &[], ("", bulkheads)).until_ready()
    }

    /// Starts a supervisor in `folder` through a wrapper command such as `env`. Does not wait until the supervisor
    /// is ready.
    pub fn launch_under(wrapper: &[&str], folder: TempDir, supervisor_keys: &str, bulkheads: &str) -> Self {
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(programs().join("bulkhead-supervisor"));
        Self::launch_by(command, folder, &[], (supervisor_keys, bulkheads))
    }

    fn launch_by(
        mut command: Command,
        folder: TempDir,
        arguments: &[&str],
        (supervisor_keys, bulkheads): (&str, &str),
    ) -> Self {
        write_config(folder.path(), supervisor_keys, bulkheads);
        let log = std::fs::File::create(folder.path().join("log")).expect("a writable folder");
        let child = command
            .arg("--config")
            .arg(folder.path().join("workers.toml"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the supervisor's program runs");
        Self { child, folder }
    }

    /// Replaces the configuration file atomically.
    pub fn configure(&self, supervisor_keys: &str, bulkheads: &str) {
        write_config(self.folder.path(), supervisor_keys, bulkheads);
    }

    /// Returns the path of the jobs socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("jobs.sock")
    }

    /// Returns the PID of the supervisor.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the PID of the keeper.
    pub fn keeper(&self) -> u32 {
        wait_for("the keeper is running", || {
            children(self.pid()).into_iter().find(|&pid| name(pid).is_some_and(|n| n == "bulkhead-keeper"))
        })
    }

    /// Returns the text that the supervisor has written to standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Sends a signal to the supervisor.
    pub fn signal(&self, signal: Signal) {
        kill_pid(self.pid(), signal);
    }

    /// Stops the supervisor with SIGSTOP until the returned value is dropped.
    pub fn pause(&self) -> PausedSupervisor<'_> {
        self.signal(Signal::SIGSTOP);
        PausedSupervisor(self)
    }

    /// Waits until the supervisor has exited.
    pub fn wait(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_for("the supervisor exits", || child.try_wait().expect("our own child"))
    }

    /// Returns a `bulkhead` command that connects to this supervisor.
    pub fn command(&self) -> Command {
        let mut command = Command::new(programs().join("bulkhead"));
        command.arg("--socket").arg(self.socket());
        command.arg("--admin").arg(self.folder.path().join("admin.sock"));
        command
    }

    /// Sends a GET request to the admin socket. Returns the status and the body, or `None` if no process is
    /// listening on the socket.
    pub fn try_get(&self, path: &str) -> Option<(u16, String)> {
        self.request("GET", path)
    }

    /// Sends a GET request to the admin socket. Returns the response body as JSON.
    pub fn get(&self, path: &str) -> Value {
        // On a busy machine, the data plane can take longer to respond than the control plane waits.
        let (status, body) = wait_for("the data plane answers", || {
            let answer = self.try_get(path).expect("the admin socket answers");
            (!answer.1.contains("data plane is not responding")).then_some(answer)
        });
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }

    /// Waits until a crash report is available, and returns the report. Waiting is necessary because an outcome can
    /// name a report that is not available yet.
    pub fn crash_report(&self, id: &str) -> Value {
        wait_for("the crash report can be read", || {
            let (status, body) = self.try_get(&format!("/v1/crashes/{id}"))?;
            (status == 200).then(|| serde_json::from_str(&body).expect("JSON"))
        })
    }

    /// Sends a POST request to the admin socket. Returns the status and the body.
    pub fn post(&self, path: &str) -> (u16, String) {
        self.request("POST", path).expect("the admin socket answers")
    }

    /// Sends a PATCH request to the admin socket. Returns the status and the body.
    pub fn patch(&self, path: &str, body: &str) -> (u16, Value) {
        let admin = self.folder.path().join("admin.sock");
        let (status, answer) = request(&admin, "PATCH", path, body).expect("the admin socket answers");
        (status, serde_json::from_str(&answer).expect("JSON"))
    }

    /// Changes a bulkhead's limits with a PATCH request. Returns the bulkhead's new snapshot.
    pub fn resize(&self, bulkhead: &str, body: &str) -> Value {
        let (status, answer) = self.patch(&format!("/v1/bulkheads/{bulkhead}"), body);
        assert_eq!(status, 200, "{body}: {answer}");
        answer
    }

    /// Returns all events of one kind that the supervisor still retains.
    pub fn events(&self, kind: &str) -> Vec<Value> {
        let (status, lines) = self.try_get("/v1/events?follow=false").expect("the admin socket answers");
        assert_eq!(status, 200, "{lines}");
        let parsed = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        parsed.filter(|event| event["kind"] == kind).collect()
    }

    /// Waits for at least `count` events of one kind, and returns them.
    pub fn wait_events(&self, kind: &str, count: usize) -> Vec<Value> {
        wait_for(&format!("there are {count} events of kind {kind}"), || {
            Some(self.events(kind)).filter(|events| events.len() >= count)
        })
    }

    /// Returns the path of a file in the supervisor's folder, which is also the working folder of workers.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the size of a file in bytes, or 0 if the file does not exist.
    pub fn file_bytes(&self, name: &str) -> usize {
        std::fs::metadata(self.file(name)).map_or(0, |about| about.len() as usize)
    }

    /// Creates an empty file in the supervisor's folder to signal workers.
    pub fn touch(&self, name: &str) {
        std::fs::write(self.file(name), "").expect("a writable folder");
    }

    fn request(&self, method: &str, path: &str) -> Option<(u16, String)> {
        request(&self.folder.path().join("admin.sock"), method, path, "")
    }

    /// Returns the snapshot of a bulkhead.
    pub fn snapshot(&self, bulkhead: &str) -> Value {
        self.get(&format!("/v1/bulkheads/{bulkhead}"))
    }

    /// Returns the deserialized snapshot of a bulkhead.
    pub fn state(&self, bulkhead: &str) -> Snapshot {
        serde_json::from_value(self.snapshot(bulkhead)).expect("a snapshot")
    }

    /// Returns a numeric field of a bulkhead's snapshot.
    pub fn number(&self, bulkhead: &str, field: &str) -> u64 {
        self.snapshot(bulkhead)[field].as_u64().unwrap_or_else(|| panic!("{field} is not a number"))
    }

    /// Returns the PIDs of a bulkhead's workers.
    pub fn worker_pids(&self, bulkhead: &str) -> Vec<u32> {
        self.state(bulkhead).workers.iter().filter_map(|worker| worker.pid).collect()
    }

    /// Waits until a numeric field of a bulkhead's snapshot has the given value.
    pub fn wait_number(&self, bulkhead: &str, field: &str, value: u64) {
        wait_for(&format!("{field} of {bulkhead} is {value}"), || {
            (self.number(bulkhead, field) == value).then_some(())
        });
    }
}

/// A supervisor that was stopped with SIGSTOP. Dropping this value resumes the supervisor, even if the test panics.
/// Otherwise, scoped threads that wait for the supervisor would never end.
#[must_use]
pub struct PausedSupervisor<'s>(&'s Supervisor);

impl Drop for PausedSupervisor<'_> {
    fn drop(&mut self) {
        self.0.signal(Signal::SIGCONT);
    }
}

/// Connects to a socket. Sets the read and write timeouts to [`PATIENCE`].
pub fn dial(path: &Path) -> std::io::Result<UnixStream> {
    let socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}

fn write_config(folder: &Path, supervisor_keys: &str, bulkheads: &str) {
    let misbehave = programs().join("misbehave");
    let config = format!(
        "[supervisor]\nsocket = \"jobs.sock\"\nadmin = \"admin.sock\"\n{supervisor_keys}\n{}",
        bulkheads.replace("MISBEHAVE", misbehave.to_str().expect("an ordinary path"))
    );
    let config = if config.contains("sandbox") { config } else { config + &sandbox() };
    let next = folder.join("workers.toml.next");
    std::fs::write(&next, config).expect("a writable folder");
    std::fs::rename(&next, folder.join("workers.toml")).expect("a writable folder");
}

fn request(admin: &Path, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut socket = dial(admin).ok()?;
    let length = body.len();
    write!(
        socket,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Some((status, if is_chunked { dechunk(body) } else { body.to_owned() }))
}

/// Checks continuously that a supervisor's counters add up: every submitted job has an outcome, is in flight, or is
/// queued. Each check uses snapshots of all bulkheads taken at the same moment. A bulkhead named `entry` must not be
/// the fallback of another bulkhead.
pub struct Auditor {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64, String>>,
}

impl Auditor {
    /// Starts a thread that repeatedly checks whether a supervisor's counters are consistent.
    pub fn of(supervisor: &Supervisor) -> Self {
        let admin = supervisor.folder.path().join("admin.sock");
        let is_over = Arc::new(AtomicBool::new(false));
        let told = is_over.clone();
        let thread = std::thread::spawn(move || {
            let mut looks = 0;
            loop {
                let is_last = told.load(Ordering::SeqCst);
                let began = Instant::now();
                let Some((200, body)) = request(&admin, "GET", "/v1/bulkheads", "") else {
                    return Err(format!("the admin socket did not answer within {:?}", began.elapsed()));
                };
                let all: Bulkheads = serde_json::from_str(&body).map_err(|error| error.to_string())?;
                audit(&all.bulkheads)?;
                looks += 1;
                if is_last {
                    return Ok(looks);
                }
                std::thread::park_timeout(Duration::from_millis(1));
            }
        });
        Self { is_over, thread }
    }

    /// Checks the counters one last time. Panics if any check failed.
    pub fn finish(self) {
        self.is_over.store(true, Ordering::SeqCst);
        match self.thread.join().expect("the auditor does not panic") {
            Ok(looks) => assert!(looks > 0, "the counters were never checked"),
            Err(why) => panic!("the counters do not balance: {why}"),
        }
    }
}

fn audit(bulkheads: &[Snapshot]) -> Result<(), String> {
    let outcomes = |of: &Snapshot| {
        of.done + of.failed + of.crashed + of.deadline_exceeded + of.cancelled + of.rejections()
    };
    let sum = |what: &dyn Fn(&Snapshot) -> u64| bulkheads.iter().map(what).sum::<u64>();
    let submitted = sum(&|of| of.submitted);
    let open = sum(&|of| of.in_flight + of.queued);
    let ended = sum(&outcomes);
    if submitted != ended + open {
        return Err(format!("{submitted} submitted, {ended} ended, {open} open: {bulkheads:?}"));
    }
    // No jobs come to `entry` from other bulkheads, so its own counters balance. These counters include jobs
    // that run in its fallbacks.
    for of in bulkheads.iter().filter(|of| of.name == "entry") {
        if of.submitted != outcomes(of) + of.in_flight + of.queued + of.elsewhere {
            return Err(format!("the counters of one bulkhead do not balance: {of:?}"));
        }
    }
    Ok(())
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the supervisor's log:\n{}", self.log());
        }
        // Fails if the supervisor has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn dechunk(mut body: &str) -> String {
    let mut whole = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let Ok(size) = usize::from_str_radix(size, 16) else { break };
        if size == 0 || rest.len() < size {
            break;
        }
        whole.push_str(&rest[..size]);
        body = rest[size..].trim_start_matches("\r\n");
    }
    whole
}

/// Sends a signal to a process, if the process still exists.
pub fn kill_pid(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid as i32), signal);
    // The signal is delivered to one thread, which may be scheduled late. Until then, the other threads keep running.
    if signal == Signal::SIGSTOP {
        wait_for("all threads of the process have stopped", || has_stopped(pid).then_some(()));
    }
}

/// Returns true if every thread of a process is stopped or dead.
fn has_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.all(|stat| stat[stat.rfind(')').unwrap_or(0) + 1..].trim_start().starts_with(['T', 't', 'Z', 'X']))
}

/// Returns the state letter of a process and the PID of its parent, or `None` if the process does not exist. A
/// zombie still exists.
fn stat(pid: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Returns true if at least one thread of a process is alive.
pub fn is_alive(pid: u32) -> bool {
    // If only the main thread is dead, the other threads still hold the process's sockets.
    let has_other_threads = || threads(pid) > 1;
    stat(pid).is_some_and(|(state, _)| state != 'Z' || has_other_threads())
}

/// Returns the name of a process, which the kernel limits to 15 bytes.
pub fn name(pid: u32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned())
}

/// Returns the PID of a process's parent.
pub fn parent(pid: u32) -> Option<u32> {
    stat(pid).map(|(_, parent)| parent)
}

/// Returns the PIDs of a process's living children.
pub fn children(parent: u32) -> Vec<u32> {
    all_pids().into_iter().filter(|&pid| stat(pid).is_some_and(|(s, p)| p == parent && s != 'Z')).collect()
}

/// Returns the PIDs of all living processes whose command line contains `marker`.
pub fn processes_with(marker: &str) -> Vec<u32> {
    let holds = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(marker)
    };
    all_pids().into_iter().filter(holds).filter(|&pid| is_alive(pid)).collect()
}

/// Environment variable that names the folder of a service. Keepers inherit the variable, although their command lines
/// do not name the folder.
const FOLDER_VARIABLE: &str = "BULKHEAD_TEST_FOLDER";

/// Returns the PIDs of all living processes that belong to a folder: their working directory is in the folder, or their
/// command line or `FOLDER_VARIABLE` contains the path. Zombies have none of these.
fn processes_of(folder: &Path) -> Vec<u32> {
    let text = folder.to_str().expect("an ordinary path");
    let variable = format!("{FOLDER_VARIABLE}={text}");
    let contains = |file: String, text: &str| {
        let bytes = std::fs::read(file).unwrap_or_default();
        bytes.windows(text.len()).any(|part| part == text.as_bytes())
    };
    let belongs = |pid: &u32| {
        std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(folder))
            || contains(format!("/proc/{pid}/cmdline"), text)
            || contains(format!("/proc/{pid}/environ"), &variable)
    };
    all_pids().into_iter().filter(belongs).collect()
}

fn all_pids() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("/proc");
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Returns true if this kernel lets a socket refuse descriptors (Linux 6.16 and later).
pub fn refuses_descriptors() -> bool {
    let release = nix::sys::utsname::uname().expect("a kernel has a name");
    let release = release.release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 16)
}

/// Returns the number of open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Returns the number of threads of a process.
pub fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// Returns the resident memory of a process, in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Counts how often each item occurs, for use in assertion messages.
pub fn tally<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeMap<T, usize> {
    let mut counts = BTreeMap::new();
    for item in items {
        *counts.entry(item).or_insert(0) += 1;
    }
    counts
}

/// Runs a future that may block its thread, because the client's tasks run on other threads of the runtime. Panics if
/// the future takes longer than [`RUN_MAX`].
pub fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime starts")
        .block_on(async {
            let limited = tokio::time::timeout(RUN_MAX, Box::pin(future));
            limited.await.unwrap_or_else(|_| panic!("the test takes longer than {RUN_MAX:?}"))
        })
}

/// Result of a job.
pub type Ended = Result<Reply, JobError>;
/// Task that waits for the outcome of a job.
pub type Running = tokio::task::JoinHandle<Ended>;

/// Connects a client to the supervisor.
pub async fn connect(supervisor: &Supervisor) -> Client {
    Client::connect(supervisor.socket()).await.unwrap()
}

/// Submits the job in a new task.
pub fn spawn(job: Job) -> Running {
    tokio::spawn(job.send())
}

/// Returns the outcome of a job as text: `ok`, or the outcome and the reason as in `rejected/queue_full`.
pub fn outcome(result: &Result<Reply, JobError>) -> String {
    match result {
        Ok(_) => "ok".into(),
        Err(error) => match error.outcome() {
            Some(outcome) => {
                format!("{}/{}", outcome.verdict.name(), outcome.verdict.reason().unwrap_or_default())
            }
            None => format!("no outcome: {error}"),
        },
    }
}

/// Returns the result of a job, or `None` if the deadline passed before a worker began the job. On a busy machine,
/// a worker can begin a job too late.
fn begun(result: Ended) -> Option<Ended> {
    (outcome(&result) != "deadline_exceeded/queued").then_some(result)
}

/// Sends the job repeatedly until a worker begins an attempt before the job's deadline. Returns the outcome of this
/// attempt.
pub async fn overrun(job: &Job) -> Ended {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if let Some(result) = begun(job.clone().send().await) {
            return result;
        }
    }
    panic!("no worker begins the job before the deadline")
}

/// Sends the job repeatedly with the blocking client until a worker begins an attempt before the job's deadline.
/// Returns the outcome of this attempt.
pub fn overrun_blocking(job: &blocking::Job) -> Ended {
    wait_for("a worker begins the job before the deadline", || begun(job.clone().send()))
}

/// Returns the sandbox settings that tests use by default. Workers run as the test's user, and can execute the
/// workspace's programs and write to the folder that contains the configuration.
fn sandbox() -> String {
    let programs = programs();
    let programs = programs.to_str().expect("an ordinary path");
    format!("\n[defaults.sandbox]\nuser = \"shared\"\nwrite = [\".\"]\nread = [\"{programs}\"]\n")
}

/// Compiles C source code into a shared library. Dropping the returned `TempDir` deletes the library.
pub fn compile_library(source: &str, flags: &[&str]) -> (TempDir, PathBuf) {
    compile("cc", "library.c", source, &[&["-std=gnu11"], flags].concat()).unwrap_or_else(|error| {
        panic!("these tests need a C compiler named `cc` (Debian: apt-get install gcc libc6-dev): {error}")
    })
}

/// Compiles C++ source code into a shared library. Without a C++ compiler, prints a note and returns `None`.
pub fn compile_cpp_library(source: &str, flags: &[&str]) -> Option<(TempDir, PathBuf)> {
    let compiled = compile("c++", "library.cpp", source, flags);
    let report = |error| not_run!("the test needs a C++ compiler named `c++`: {error}");
    compiled.map_err(report).ok()
}

/// Compiles source code into a shared library. Returns an error if the compiler cannot be started.
fn compile(compiler: &str, file: &str, source: &str, flags: &[&str]) -> std::io::Result<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join(file), folder.path().join("library.so"));
    std::fs::write(&input, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/include");
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-shared", "-fPIC"]);
    command.args(flags).arg("-I").arg(include).arg("-o").arg(&output).arg(&input);
    let run = command.output()?;
    assert!(run.status.success(), "{compiler} failed:\n{}", String::from_utf8_lossy(&run.stderr));
    Ok((folder, output))
}

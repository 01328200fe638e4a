//! Starts the parts of a supervisor in the right order: keeper, sockets, control plane. Then runs the data plane, and
//! waits for the other threads when it has ended. `main` calls [`run`] for a standalone supervisor, and `embedded` uses
//! `Ready`. The control plane decides when the supervisor stops, except with `--while-open`.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bulkhead_config::defaults::{ADMIN_MODE, FOLDER_MODE};
use bulkhead_config::{Config, HttpConfig, SupervisorConfig, Token};
use bulkhead_control::control::handover::{HandoverOptions, ProcessEnd, SuccessorProgram};
use bulkhead_control::control::upgrade::TAKE_OVER_ARGUMENT;
use bulkhead_control::control::{self, ActiveConfig, ControlThread, Options, RunMode};
use bulkhead_control::observe::symbolizer::SymbolizerOptions;
use bulkhead_control::observe::{crashes, spans};
use bulkhead_control::sockets::{BoundSocket, InheritedSockets, Sockets};
use bulkhead_dataplane::{Components, DataPlane, descriptors};
use bulkhead_keeper::{self as keeper, Keeper};
use bulkhead_linux::liveness::{self, LivenessDescriptor};
use bulkhead_linux::peer::UnrelatedProcesses;
use bulkhead_linux::scheduler::set_time_slice;
use bulkhead_plane::command::CommandSender;
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::lock::retry_while_taken;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_plane::worker_ids::IdUse;

use crate::activation::ActivatedSockets;
use crate::listeners::Listeners;
use crate::take_over::{self, Link, TakeOver};

/// Error that is returned if the supervisor could not be started or did not stop cleanly.
#[derive(thiserror::Error)]
pub enum RunError {
    /// A socket could not be bound.
    #[error("failed to {0}")]
    Bind(#[from] bulkhead_control::sockets::BindError),
    /// The `http` or `jobs_http` address could not be bound, or the `http` token could not be read.
    #[error("failed to serve {served} on {key} = \"{address}\": {problem}")]
    Tcp {
        /// API that is served at this address.
        served: &'static str,
        /// Configuration key that sets this address.
        key: &'static str,
        /// Listening address.
        address: std::net::SocketAddr,
        /// Cause, and suggested fix.
        problem: String,
    },
    /// The folder for crash reports could not be opened.
    #[error("failed to {0}")]
    Crashes(#[from] bulkhead_control::observe::crashes::OpenError),
    /// A bulkhead needs the host program for `exec` or `library`, but the host program cannot be found.
    #[error(transparent)]
    NoHost(#[from] program::HostNotFound),
    /// During an upgrade, the other supervisor exited, and this supervisor could not continue alone.
    #[error("failed to complete the upgrade; see the log for the reason")]
    Upgrade,
    /// A system call failed.
    #[error("failed to {0}: {1}")]
    System(&'static str, #[source] std::io::Error),
}

bulkhead_shared::debug_by_display!(RunError);

/// Scheduler slice of the supervisor, the keeper and all workers. This is the shortest slice that Linux allows. The
/// default is several milliseconds. With short slices, processes that share a processor wait less for each other.
pub(crate) const SLICE: Duration = Duration::from_micros(100);

/// Returns a function that wraps an I/O error in a [`RunError`]. `what` names the operation that failed.
pub(crate) fn system(what: &'static str) -> impl Fn(std::io::Error) -> RunError {
    move |error| RunError::System(what, error)
}

/// Blocks the signals that a supervisor handles, until [`run`] has started the supervisor. Must be called before the
/// process has started any other thread.
pub fn defer_signals() -> Result<(), RunError> {
    crate::inherited::defer_signals().map_err(system("block signals"))
}

/// Runs a supervisor until a signal stops it. If `while_open` is set, the supervisor also stops immediately when the
/// peer of that descriptor is gone. This function affects the whole process: the process becomes a child subreaper and
/// handles SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2.
///
/// Must be called before the process has started any other thread.
///
/// During an upgrade, `link` connects this supervisor to the predecessor from which it takes over.
pub fn run(
    config: Config,
    while_open: Option<LivenessDescriptor>,
    link: Option<Link>,
) -> Result<(), RunError> {
    // The link is duplicated, so that a failed start can be reported to the predecessor.
    let failure_link = link.as_ref().and_then(|link| link.try_clone().ok());
    let result = start(config, while_open.as_ref().map(|_| ()), link);
    let ready = result.inspect_err(|error| {
        if let Some(link) = &failure_link {
            link.fail(&error.to_string());
        }
    })?;
    drop(failure_link);
    // From here on, the control plane handles signals.
    crate::inherited::unblock_signals().map_err(system("unblock signals"))?;
    if let Some(while_open) = while_open {
        let commands = ready.commands.clone();
        let stop = move || {
            tracing::warn!(
                "the descriptor passed to --while-open was closed, or the process that it watches has \
                 exited: stopping immediately"
            );
            for _ in 0..2 {
                let _ = commands.stop();
            }
        };
        liveness::spawn_watcher(while_open, stop).map_err(system("start a thread"))?;
    }
    ready.run()
}

/// Starts all parts of a supervisor except for the data plane.
fn start(config: Config, while_open: Option<()>, link: Option<Link>) -> Result<Ready, RunError> {
    let activated = ActivatedSockets::take()
        .map_err(system("use the sockets that the service manager passes (LISTEN_FDS)"))?;
    let taken = link.map(|link| link.take_over(&config).map(|taken| (link, taken))).transpose();
    let taken = taken.map_err(system("take over from the previous supervisor"))?;
    if let Some((_, taken)) = &taken {
        taken.restore_limits();
    }
    let soft_limits = take_over::soft_limits();
    let program = successor_program(while_open.is_some());
    crate::inherited::reset_signals().map_err(system("reset inherited signals"))?;
    crate::inherited::require_open_files().map_err(system("open enough files"))?;
    let host = program::require_host(&config, None)?;
    let support = SandboxSupport::probe(&config, IdUse::Run);
    if let (Some(ids), Some((_, taken))) = (support.ids(), &taken) {
        ids.inherit(taken.permanent_ids.clone());
    }
    // These settings must be made before the keeper starts, because the keeper inherits the state of this process.
    keeper::become_subreaper().map_err(system("become a child subreaper"))?;
    bulkhead_linux::peer::check_proc_visibility().map_err(system(
        "distinguish workers from clients in /proc; mount the /proc of this PID namespace, without hidepid \
         (ProtectProc=default in a systemd unit)",
    ))?;
    // Errors are ignored, because short slices are optional, and old kernels do not support them.
    let _ = set_time_slice(SLICE);
    let keeper = Keeper::start(Path::new("/proc/self/exe")).map_err(system("start the keeper"))?;
    // The limits are raised only after the keeper has started, so that workers keep the original limits.
    crate::inherited::raise_limits(&config);
    let open_files = OpenFiles::raise(descriptors::reserve(), control::tcp_descriptors);
    let prerequisites = Prerequisites {
        config,
        host,
        support,
        keeper,
        open_files,
        threads: ThreadMonitor::default(),
        program,
        soft_limits,
    };
    Ready::prepare(prerequisites, taken, |config| open_sockets(config, activated))
}

/// Returns the program that an upgrade starts as this supervisor's successor, or the reason why this supervisor cannot
/// be upgraded.
fn successor_program(ends_with_other: bool) -> Result<SuccessorProgram, String> {
    if ends_with_other {
        return Err("a supervisor with --while-open stops with the program that started it, so it cannot be upgraded: \
                    upgrade that program"
            .to_owned());
    }
    if std::process::id() == 1 {
        return Err(
            "the first process of a container cannot be upgraded because the container stops with it: start \
                    another container, or start the supervisor under an init process"
                .to_owned(),
        );
    }
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == TAKE_OVER_ARGUMENT) {
        arguments.drain(at..(at + 2).min(arguments.len()));
    }
    // The path is not resolved, so that the path still leads to the current program after an update of the package or
    // link.
    let name = PathBuf::from(arguments.first().ok_or("the name of the program is unknown")?);
    let path = if name.components().count() > 1 {
        std::path::absolute(&name).map_err(|error| error.to_string())?
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path).map(|folder| folder.join(&name)).find(|path| path.is_file());
        found.ok_or_else(|| format!("there is no program '{}' in PATH: use --program", name.display()))?
    };
    Ok(SuccessorProgram { path, arguments })
}

/// Everything that must be available before the other parts of a supervisor can start: the configuration, the running
/// keeper, and the results of probing this machine.
pub(crate) struct Prerequisites {
    pub(crate) config: Config,
    pub(crate) host: Option<PathBuf>,
    pub(crate) support: SandboxSupport,
    pub(crate) keeper: Keeper,
    pub(crate) open_files: OpenFiles,
    pub(crate) threads: ThreadMonitor,
    /// Program that an upgrade starts as this supervisor's successor, or the reason why this supervisor cannot be
    /// upgraded.
    pub(crate) program: Result<SuccessorProgram, String>,
    pub(crate) soft_limits: Vec<(u32, u64)>,
}

/// A supervisor whose parts have been started, except for the data plane.
pub(crate) struct Ready {
    pub(crate) data_plane: DataPlane,
    pub(crate) commands: CommandSender,
    pub(crate) control: ControlThread,
    pub(crate) span_thread: Option<spans::SpanThread>,
    pub(crate) threads: ThreadMonitor,
    pub(crate) counters: Arc<SharedCounters>,
    /// Ensures that during an upgrade, the old and the new process exit in the right order.
    end: Arc<ProcessEnd>,
    drain_timeout: Duration,
    /// The jobs socket and the admin socket. `None` in an embedded supervisor.
    sockets: Option<Arc<Sockets>>,
}

impl Ready {
    /// Starts all parts except for the data plane. `open` creates the listening sockets, unless they are taken over
    /// from a predecessor.
    pub(crate) fn prepare(
        prerequisites: Prerequisites,
        mut taken: Option<(Link, TakeOver)>,
        open: impl FnOnce(&SupervisorConfig) -> Result<Listeners, RunError>,
    ) -> Result<Self, RunError> {
        let Prerequisites { config, host, support, mut keeper, open_files, threads, program, soft_limits } =
            prerequisites;
        if let Some(ids) = support.subordinate() {
            keeper.send_subordinate_ids(ids).map_err(system("start the keeper"))?;
        }
        if let Some(lifeline) = taken.as_mut().and_then(|(_, taken)| taken.own_lifeline()) {
            keeper.send_lifeline(Arc::new(lifeline)).map_err(system("start the keeper"))?;
        }
        let (file, support) = (Arc::new(config), Arc::new(support));
        let mut config = file.clone();
        open_files.lower_max_clients(&mut config);
        let taking_over = system("take over from the previous supervisor");
        let lock = taken.as_mut().map(|(_, taken)| taken.crashes_lock(&config.supervisor)).transpose();
        let store = crashes::Store::with_lock(&config.supervisor, lock.map_err(&taking_over)?.flatten())?;
        let crashes_lock = store.lock_descriptor().map_err(system("duplicate a descriptor"))?;
        let (listeners, predecessor) = match taken {
            None => (open(&config.supervisor)?, None),
            Some((link, taken)) => {
                let (listeners, predecessor) =
                    taken.listeners(link, &config.supervisor).map_err(&taking_over)?;
                (listeners, Some(predecessor))
            }
        };
        let Listeners { jobs: listener, mode, http, jobs_http, inherited } = listeners;
        let sockets = match &mode {
            RunMode::Standalone { sockets, .. } => Some(sockets.clone()),
            RunMode::Embedded => None,
        };
        let unrelated = Arc::<UnrelatedProcesses>::default();
        let end = Arc::<ProcessEnd>::default();
        let handover = HandoverOptions { program, predecessor, soft_limits, end: end.clone() };
        let drain_timeout = config.supervisor.drain_timeout;
        let (notices, notice_receiver) = bulkhead_plane::notices::channels();
        let counters = Arc::new(SharedCounters::default());
        let (spans, span_thread) =
            spans::start(counters.clone(), &threads).map_err(system("start the thread for spans"))?.unzip();
        let own_uid = rustix::process::geteuid().as_raw();
        let labels: Arc<[String]> = config.labelled_tenants().into();
        let active_config = ActiveConfig {
            config: file,
            support: support.clone(),
            open_files,
            own_uid,
            labels: labels.clone(),
        };
        let symbols = config.supervisor.crash_symbols.iter().map(|path| path.to_string_lossy().into_owned());
        let symbolizer = SymbolizerOptions {
            keeper: keeper.launcher(),
            support: support.clone(),
            symbols: symbols.collect(),
        };
        let parts = Components {
            config: config.clone(),
            support,
            listener,
            keeper,
            notices,
            spans,
            counters: counters.clone(),
            host,
            labels,
            threads: threads.clone(),
            unrelated: unrelated.clone(),
        };
        let (data_plane, commands) = DataPlane::new(parts).map_err(system("prepare the event loop"))?;
        let options = Options {
            mode,
            commands: commands.clone(),
            notices: notice_receiver,
            counters: counters.clone(),
            active_config,
            symbolizer,
            crashes: crashes::start(store, &threads).map_err(system("start the thread for crash reports"))?,
            own_uid,
            config,
            http,
            jobs_http,
            inherited,
            threads: threads.clone(),
            handover,
            crashes_lock,
            unrelated,
        };
        let control = control::start(options).map_err(system("start the control plane"))?;
        Ok(Self {
            data_plane,
            commands,
            control,
            span_thread,
            threads,
            counters,
            end,
            drain_timeout,
            sockets,
        })
    }

    pub(crate) fn run(self) -> Result<(), RunError> {
        let data_plane = self.data_plane;
        let result = run_data_plane(|| data_plane.run(), &self.threads, &self.counters);
        self.control.join();
        // Dropping sockets that this supervisor serves removes their files.
        let handed_over = self.sockets.filter(|sockets| !sockets.has_owned());
        self.span_thread.into_iter().for_each(spans::SpanThread::finish);
        if let (true, Some(sockets)) = (self.end.wait(self.drain_timeout), handed_over) {
            // A successor that was killed could not remove the files.
            sockets.set_owner(true);
        }
        result.map_err(system("run the event loop"))?;
        if self.end.has_failed() { Err(RunError::Upgrade) } else { Ok(()) }
    }
}

/// Creates the listening sockets of a standalone supervisor, except for those passed in by the service manager.
fn open_sockets(config: &SupervisorConfig, activated: ActivatedSockets) -> Result<Listeners, RunError> {
    let inherited = InheritedSockets {
        jobs: activated.jobs.is_some(),
        admin: activated.admin.is_some(),
        http: activated.http.is_some(),
        jobs_http: activated.jobs_http.is_some(),
    };
    let is_jobs_inherited = activated.jobs.is_some();
    let bind = |path: &Path, modes: (u32, u32), listener: Option<UnixListener>| match listener {
        Some(listener) => BoundSocket::inherit(path, listener),
        None => BoundSocket::bind(path, modes.0, modes.1),
    };
    let mut jobs = bind(&config.socket, (config.socket_mode, config.folder_mode), activated.jobs)?;
    let mut admin = bind(&config.admin, (ADMIN_MODE, FOLDER_MODE), activated.admin)?;
    let http = match (&config.http, activated.http) {
        (None, Some(_)) => return Err(not_configured("http")),
        (http, listener) => http.as_ref().map(|http| open_http(http, listener)).transpose()?,
    };
    let jobs_http = match (config.jobs_http, activated.jobs_http) {
        (None, Some(_)) => return Err(not_configured("jobs_http")),
        (Some(_), Some(listener)) => Some(listener),
        (address, None) => address.map(|address| bind_tcp("jobs", "jobs_http", address)).transpose()?,
    };
    if config.folder_mode != FOLDER_MODE && !is_jobs_inherited {
        warn_about_closed_folder(&config.socket);
    }
    let jobs_listener = jobs.take_listener().map_err(system("take the jobs socket"))?;
    let admin_listener = admin.take_listener().map_err(system("take the admin socket"))?;
    let sockets = Arc::new(Sockets { jobs: jobs.into(), admin: admin.into() });
    let mode = RunMode::Standalone { admin: admin_listener, sockets };
    Ok(Listeners { jobs: Some(jobs_listener), mode, http, jobs_http, inherited })
}

/// Returns the error for a TCP socket that the service manager passed in but whose key is not set in the configuration.
fn not_configured(key: &str) -> RunError {
    let problem =
        format!("the service manager passed in this socket, but `{key}` is not set in the configuration");
    system("use a socket")(std::io::Error::other(problem))
}

/// Runs the data plane until it stops. If the data plane fails or panics, stops the other threads. By then, the keeper
/// has been dropped, which kills the workers.
fn run_data_plane(
    run: impl FnOnce() -> std::io::Result<()>,
    threads: &ThreadMonitor,
    counters: &SharedCounters,
) -> std::io::Result<()> {
    let result = catch_unwind(AssertUnwindSafe(run));
    if matches!(result, Ok(Ok(()))) {
        return Ok(());
    }
    threads.begin_shutdown();
    threads.exit_after_timeout();
    counters.has_ended.store(true, Ordering::SeqCst);
    result.unwrap_or_else(|_| Err(std::io::Error::other("the data plane panicked")))
}

/// Binds the TCP address of the admin API, unless the service manager passes in the socket, and reads the token. The
/// token file might have changed since the configuration was checked.
fn open_http(
    http: &HttpConfig,
    activated: Option<std::net::TcpListener>,
) -> Result<(std::net::TcpListener, Token), RunError> {
    let (served, key, address) = ("the admin API", "http", http.address);
    let token = Token::read(&http.token_file).map_err(|(why, help)| RunError::Tcp {
        served,
        key,
        address,
        problem: format!("{why}; {help}"),
    })?;
    Ok((activated.map_or_else(|| bind_tcp(served, key, address), Ok)?, token))
}

/// Binds a TCP listener to an address. Retries briefly, because an exiting supervisor might still use the address.
fn bind_tcp(
    served: &'static str,
    key: &'static str,
    address: std::net::SocketAddr,
) -> Result<std::net::TcpListener, RunError> {
    let bind = || std::net::TcpListener::bind(address);
    let is_taken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    retry_while_taken(bind, is_taken).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => "stop the program that uses the port, or choose another port",
            std::io::ErrorKind::AddrNotAvailable => {
                "the address does not belong to this machine: choose another address"
            }
            std::io::ErrorKind::PermissionDenied => "only root can use ports below 1024: choose another port",
            _ => "choose another address",
        };
        RunError::Tcp { served, key, address, problem: format!("{error}; {hint}") }
    })
}

/// Logs a warning if users to whom `[[access]]` grants access cannot reach the jobs socket, because of the mode of the
/// socket's folder. The supervisor does not change existing folders.
fn warn_about_closed_folder(socket: &Path) {
    const OTHERS_SEARCH: u32 = 0o011;
    let Some(folder) = socket.parent() else { return };
    let mode = std::fs::metadata(folder).map_or(OTHERS_SEARCH, |found| found.permissions().mode());
    if mode & OTHERS_SEARCH == 0 {
        tracing::warn!(
            "the directory {} has mode {:04o}, so other users cannot reach the jobs socket: run `chmod 755` \
             on the directory to admit the users in [[access]]",
            folder.display(),
            mode & 0o7777
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;
    use std::time::Instant;

    const MARK: &str = "BULKHEAD_TEST_PANICS";

    /// Stand-in for the keeper. In a real supervisor, dropping the keeper kills the workers.
    struct Owned;

    impl Drop for Owned {
        fn drop(&mut self) {
            println!("\nthe keeper has ended");
        }
    }

    /// Not a real test. Another test runs this function in a child process to simulate a supervisor whose data plane
    /// panics.
    #[test]
    fn helper_child_data_plane_panics() {
        if std::env::var_os(MARK).is_none() {
            return;
        }
        // This monitor does not exit the process after the shutdown timeout, which a busy machine could exceed.
        let (threads, counters) = (ThreadMonitor::embedded(), Arc::new(SharedCounters::default()));
        threads.mark_started();
        let control_counters = counters.clone();
        let wait_for_end = move || {
            let until = Instant::now() + Duration::from_secs(60);
            while !control_counters.has_ended.load(Ordering::SeqCst) && Instant::now() < until {
                std::thread::yield_now();
            }
        };
        let control = threads.spawn("control", wait_for_end).unwrap();
        let owned = Owned;
        let result = run_data_plane(
            move || {
                let _owned = owned;
                panic!("as a test")
            },
            &threads,
            &counters,
        );
        control.join().unwrap();
        assert!(counters.has_ended.load(Ordering::SeqCst), "the other threads were not stopped");
        println!("\nthe rest has ended, lost: {:?}, {}", threads.lost(), result.unwrap_err());
    }

    /// If the data plane panics, the keeper is dropped before the remaining threads are stopped.
    #[test]
    fn data_plane_panic_stops_supervisor_with_error() {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "supervisor::tests::helper_child_data_plane_panics", "--nocapture"])
            .env(MARK, "")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&ended.stdout);
        let keeper = output.find("the keeper has ended").unwrap_or_else(|| panic!("{ended:?}"));
        let rest = output.find("the rest has ended, lost: None, the data plane panicked");
        assert!(rest.is_some_and(|rest| rest > keeper), "{ended:?}");
        assert!(ended.status.success(), "{ended:?}");
    }
}

//! Ordered start (keeper, sockets, control plane, data plane) and stop of a supervisor.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bulkhead_config::defaults::{ADMIN_MODE, FOLDER_MODE};
use bulkhead_config::{Config, HttpConfig, SupervisorConfig, Token};
use bulkhead_control::control::{self, ControlThread, InForce, Options, Place};
use bulkhead_control::observe::{crashes, spans};
use bulkhead_control::sockets::{Bound, Sockets};
use bulkhead_dataplane::{Components, DataPlane, descriptors};
use bulkhead_keeper::{self as keeper, Keeper};
use bulkhead_linux::lifeline::{self, Lifeline};
use bulkhead_linux::schedule::shorten_slice;
use bulkhead_plane::command::Commander;
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::lock::try_while_taken;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::threads::Fate;
use bulkhead_plane::worker_ids::Claim;

/// An error that keeps a supervisor from running.
#[derive(thiserror::Error)]
pub enum RunError {
    /// A socket could not be bound.
    #[error("failed to {0}")]
    Bind(#[from] bulkhead_control::sockets::BindError),
    /// The address of `http` could not be bound, or its token could not be read.
    #[error("failed to serve the admin API on http = \"{0}\": {1}")]
    Http(std::net::SocketAddr, String),
    /// The folder for crash reports could not be opened.
    #[error("failed to {0}")]
    Crashes(#[from] bulkhead_control::observe::crashes::OpenError),
    /// The host program for C libraries and plain programs is missing.
    #[error(transparent)]
    NoHost(#[from] program::NoHost),
    /// A system call failed.
    #[error("failed to {0}: {1}")]
    System(&'static str, #[source] std::io::Error),
}

bulkhead_shared::debug_by_display!(RunError);

/// Scheduler slice of the supervisor, the keeper and all workers: the shortest that Linux allows. Default
/// slices last milliseconds. Short slices bound how long a process waits for a processor that another of
/// these processes uses.
pub(crate) const SLICE: Duration = Duration::from_micros(100);

/// Returns a function that wraps an I/O error; `what` is the failed operation.
pub(crate) fn system(what: &'static str) -> impl Fn(std::io::Error) -> RunError {
    move |error| RunError::System(what, error)
}

/// Runs a supervisor until a signal stops it, or stops it at once when `lifeline` reaches its end. Changes
/// the whole process: makes it a child subreaper and handles SIGTERM, SIGINT, SIGHUP and SIGUSR1.
///
/// Must be called before any other thread has been started.
pub fn run(config: Config, lifeline: Option<Lifeline>) -> Result<(), RunError> {
    crate::inherited::reset_signals().map_err(system("reset inherited signals"))?;
    crate::inherited::require_open_files().map_err(system("open enough files"))?;
    let host = program::require_host(&config)?;
    let support = SandboxSupport::find(&config, Claim::Lasting);
    // Before the keeper starts, because the keeper inherits the state of this process.
    keeper::become_subreaper().map_err(system("become a child subreaper"))?;
    bulkhead_linux::peer::check_sight().map_err(system(
        "distinguish workers from clients in /proc; mount the /proc of this PID namespace, without hidepid \
         (ProtectProc=default in a unit of systemd)",
    ))?;
    // Best effort: old kernels do not support this, and jobs are served anyway.
    let _ = shorten_slice(SLICE);
    let keeper = Keeper::start(Path::new("/proc/self/exe")).map_err(system("start the keeper"))?;
    // After the start of the keeper, so that workers keep the original limits.
    crate::inherited::raise_limits(&config);
    let open_files = OpenFiles::raise(descriptors::reserve(), DESCRIPTORS_HTTP);
    let basis = Basis { config, host, support, keeper, open_files, fate: Fate::default() };
    let ready = Ready::prepare(basis, open_sockets)?;
    if let Some(lifeline) = lifeline {
        let commander = ready.commander.clone();
        let stop = move || {
            tracing::warn!(
                "the descriptor of --while-open was closed, or the process has ended: stopping at once"
            );
            for _ in 0..2 {
                let _ = commander.stop();
            }
        };
        lifeline::at_the_end_of(lifeline, stop).map_err(system("start a thread"))?;
    }
    ready.run()
}

/// The configuration, the keeper, and the results of probing this machine.
pub(crate) struct Basis {
    pub(crate) config: Config,
    pub(crate) host: Option<PathBuf>,
    pub(crate) support: SandboxSupport,
    pub(crate) keeper: Keeper,
    pub(crate) open_files: OpenFiles,
    pub(crate) fate: Fate,
}

/// Listening sockets of a supervisor: the jobs socket, the admin socket (in [`Place`]), and the TCP listener
/// of `http`.
pub(crate) type Ways = (Option<UnixListener>, Place, Option<(std::net::TcpListener, Token)>);

/// A supervisor with everything started except the data plane.
pub(crate) struct Ready {
    pub(crate) data_plane: DataPlane,
    pub(crate) commander: Commander,
    pub(crate) control: ControlThread,
    pub(crate) span_thread: Option<spans::SpanThread>,
    pub(crate) fate: Fate,
    pub(crate) pulse: Arc<SharedCounters>,
}

impl Ready {
    /// Starts everything except the data plane. `open` creates the listening sockets.
    pub(crate) fn prepare(
        basis: Basis,
        open: impl FnOnce(&SupervisorConfig) -> Result<Ways, RunError>,
    ) -> Result<Self, RunError> {
        let Basis { config, host, support, mut keeper, open_files, fate } = basis;
        if let Some(ids) = support.subordinate() {
            keeper.give(ids).map_err(system("start the keeper"))?;
        }
        let (file, support) = (Arc::new(config), Arc::new(support));
        let mut config = file.clone();
        open_files.leave_room(&mut config);
        let store = crashes::Store::of(&config.supervisor)?;
        let (listener, place, http) = open(&config.supervisor)?;
        let (notices, received) = bulkhead_plane::notices::ways();
        let pulse = Arc::new(SharedCounters::default());
        let (spans, span_thread) =
            spans::start(pulse.clone(), &fate).map_err(system("start the thread for spans"))?.unzip();
        let own = rustix::process::geteuid().as_raw();
        let labels: Arc<[String]> = config.labelled_tenants().into();
        let in_force =
            InForce { config: file, support: support.clone(), open_files, own, labels: labels.clone() };
        let parts = Components {
            config: config.clone(),
            support,
            listener,
            keeper,
            notices,
            spans,
            pulse: pulse.clone(),
            host,
            labels,
            fate: fate.clone(),
        };
        let (data_plane, commander) = DataPlane::new(parts).map_err(system("prepare the event loop"))?;
        let options = Options {
            place,
            commander: commander.clone(),
            notices: received,
            pulse: pulse.clone(),
            in_force,
            crashes: crashes::start(store, &fate).map_err(system("start the thread for crash reports"))?,
            own,
            config,
            http,
            fate: fate.clone(),
        };
        let control = control::start(options).map_err(system("start the control plane"))?;
        Ok(Self { data_plane, commander, control, span_thread, fate, pulse })
    }

    pub(crate) fn run(self) -> Result<(), RunError> {
        let data_plane = self.data_plane;
        let ran = run_data_plane(|| data_plane.run(), &self.fate, &self.pulse);
        self.control.join();
        self.span_thread.into_iter().for_each(spans::SpanThread::settle);
        ran.map_err(system("run the event loop"))
    }
}

/// Binds the sockets of a standalone supervisor.
fn open_sockets(config: &SupervisorConfig) -> Result<Ways, RunError> {
    let mut jobs = Bound::bind(&config.socket, config.socket_mode, config.folder_mode)?;
    let mut admin = Bound::bind(&config.admin, ADMIN_MODE, FOLDER_MODE)?;
    let http = config.http.as_ref().map(open_http).transpose()?;
    if config.folder_mode != FOLDER_MODE {
        warn_of_closed_folder(&config.socket);
    }
    let jobs_listener = jobs.take_listener().map_err(system("take the jobs socket"))?;
    let admin_listener = admin.take_listener().map_err(system("take the admin socket"))?;
    let sockets = Arc::new(Sockets { jobs: jobs.into(), admin: admin.into() });
    Ok((Some(jobs_listener), Place::Process { admin: admin_listener, sockets }, http))
}

/// Runs the data plane. After an error or a panic, tells the other threads to end. By then the keeper has
/// been dropped, which ends the workers.
fn run_data_plane(
    run: impl FnOnce() -> std::io::Result<()>,
    fate: &Fate,
    pulse: &SharedCounters,
) -> std::io::Result<()> {
    let ran = catch_unwind(AssertUnwindSafe(run));
    if matches!(ran, Ok(Ok(()))) {
        return Ok(());
    }
    fate.expect_end();
    fate.end_in_time();
    pulse.is_over.store(true, Ordering::SeqCst);
    ran.unwrap_or_else(|_| Err(std::io::Error::other("the data plane panicked")))
}

/// Binds the address and reads the token again, because the file may have changed since the configuration was
/// checked.
fn open_http(http: &HttpConfig) -> Result<(std::net::TcpListener, Token), RunError> {
    let failed = |why: String| RunError::Http(http.address, why);
    let token = Token::read(&http.token_file).map_err(|(why, help)| failed(format!("{why}; {help}")))?;
    let bind = || std::net::TcpListener::bind(http.address);
    let is_taken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    let socket = try_while_taken(bind, is_taken).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => "end the program that uses the port, or choose another port",
            std::io::ErrorKind::AddrNotAvailable => "not an address of this machine: choose another address",
            std::io::ErrorKind::PermissionDenied => "ports below 1024 need root: choose another port",
            _ => "choose another address",
        };
        failed(format!("{error}; {hint}"))
    })?;
    Ok((socket, token))
}

/// Warns if the folder of the jobs socket keeps out users that `[[access]]` admits. The supervisor does not
/// change the mode of an existing folder.
fn warn_of_closed_folder(socket: &Path) {
    const OTHERS_SEARCH: u32 = 0o011;
    let Some(folder) = socket.parent() else { return };
    let mode = std::fs::metadata(folder).map_or(OTHERS_SEARCH, |found| found.permissions().mode());
    if mode & OTHERS_SEARCH == 0 {
        tracing::warn!(
            "the folder {} has the mode {:04o}, so other users cannot reach the jobs socket: run `chmod 755` on the \
             folder to let in the users of [[access]]",
            folder.display(),
            mode & 0o7777
        );
    }
}

/// Maximum number of descriptors for clients of `http`: connections, and for each job a connection to the
/// data plane with two ends.
const DESCRIPTORS_HTTP: u64 = control::TCP_CONNECTIONS_MAX as u64 + 2 * control::JOBS_MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;

    const MARK: &str = "BULKHEAD_TEST_PANICS";

    /// Stands in for the keeper, which ends the workers when dropped.
    struct Owned;

    impl Drop for Owned {
        fn drop(&mut self) {
            println!("\nthe keeper has ended");
        }
    }

    /// Not a test, but the child process of the test below: a supervisor whose data plane panics.
    #[test]
    fn helper() {
        if std::env::var_os(MARK).is_none() {
            return;
        }
        let (fate, pulse) = (Fate::default(), Arc::new(SharedCounters::default()));
        fate.begin();
        let seen = pulse.clone();
        let goes_on = move || {
            while !seen.is_over.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        let control = fate.spawn("control", goes_on).unwrap();
        let owned = Owned;
        let ran = run_data_plane(
            move || {
                let _owned = owned;
                panic!("as a test")
            },
            &fate,
            &pulse,
        );
        control.join().unwrap();
        println!("\nthe rest has ended, lost: {:?}, {}", fate.lost(), ran.unwrap_err());
    }

    /// The keeper ends before the remaining threads.
    #[test]
    fn data_plane_panic_stops_the_supervisor_with_an_error() {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "supervisor::tests::helper", "--nocapture"])
            .env(MARK, "")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&ended.stdout);
        let keeper = told.find("the keeper has ended").unwrap_or_else(|| panic!("{ended:?}"));
        let rest = told.find("the rest has ended, lost: None, the data plane panicked");
        assert!(rest.is_some_and(|rest| rest > keeper), "{ended:?}");
        assert!(ended.status.success(), "{ended:?}");
    }
}

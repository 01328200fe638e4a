//! Start and stop, in order: keeper, sockets, control plane, data plane; and back.

use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bulkhead_config::defaults::{ADMIN_MODE, FOLDER_MODE};
use bulkhead_config::{Config, HttpConfig, Token};
use bulkhead_control::control::{self, Options, Place};
use bulkhead_control::observe::{crashes, spans};
use bulkhead_control::sockets::{Bound, Sockets};
use bulkhead_dataplane::descriptors;
use bulkhead_dataplane::{DataPlane, Parts};
use bulkhead_keeper::{self as keeper, Keeper};
use bulkhead_linux::lifeline::{self, Lifeline};
use bulkhead_linux::schedule::shorten_slice;
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::lock::try_while_taken;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::threads::Fate;

/// Why a supervisor could not run.
#[derive(thiserror::Error)]
pub enum RunError {
    /// A socket could not be had.
    #[error("failed to {0}")]
    Bind(#[from] bulkhead_control::sockets::BindError),
    /// The admin API could not be served over TCP.
    #[error("failed to serve the admin API on http = \"{0}\": {1}")]
    Http(std::net::SocketAddr, String),
    /// Crash reports could not be kept where they are to be.
    #[error("failed to {0}")]
    Crashes(#[from] bulkhead_control::observe::crashes::OpenError),
    /// The host for C libraries and plain programs is missing.
    #[error(transparent)]
    NoHost(#[from] program::NoHost),
    /// The kernel refused something.
    #[error("failed to {0}: {1}")]
    System(&'static str, #[source] std::io::Error),
}

bulkhead_shared::debug_by_display!(RunError);

/// The slice of the supervisor, the keeper and all workers: the shortest that Linux grants, where the ordinary one has
/// milliseconds, so that a process that waits for the processor of a busy one of them waits no longer than that.
pub(crate) const SLICE: Duration = Duration::from_micros(100);

/// Runs a supervisor until it is told to stop by a signal, or at once when `lifeline` comes to its end. The process is this supervisor's alone: it
/// becomes a child subreaper, and takes SIGTERM, SIGINT, SIGHUP and SIGUSR1.
///
/// Call it before any other thread has been started.
pub fn run(config: Config, lifeline: Option<Lifeline>) -> Result<(), RunError> {
    let system = |what: &'static str| move |error: std::io::Error| RunError::System(what, error);
    crate::inherited::reset_signals().map_err(system("reset inherited signals"))?;
    crate::inherited::require_open_files().map_err(system("open enough files"))?;
    let host = program::require_host(&config)?;
    let support = Arc::new(SandboxSupport::find(&config));
    // First of all: the keeper copies whatever this process has become.
    keeper::become_subreaper().map_err(system("become a child subreaper"))?;
    bulkhead_linux::peer::check_sight().map_err(system(
        "tell workers from clients by /proc; mount that of this PID namespace, without hidepid \
         (ProtectProc=default in a unit of systemd)",
    ))?;
    // Where Linux does not, jobs are served all the same.
    let _ = shorten_slice(SLICE);
    let mut keeper = Keeper::start(Path::new("/proc/self/exe")).map_err(system("start the keeper"))?;
    if let Some(ids) = support.subordinate() {
        keeper.give(ids).map_err(system("start the keeper"))?;
    }
    // Workers keep what there was.
    crate::inherited::raise_limits(&config);
    let open_files = OpenFiles::raise(descriptors::reserve(), DESCRIPTORS_HTTP);
    let file = Arc::new(config);
    let mut config = file.clone();
    open_files.leave_room(&mut config);
    let store = crashes::Store::of(&config.supervisor)?;
    let (socket_mode, folder_mode) = (config.supervisor.socket_mode, config.supervisor.folder_mode);
    let mut jobs = Bound::bind(&config.supervisor.socket, socket_mode, folder_mode)?;
    let mut admin = Bound::bind(&config.supervisor.admin, ADMIN_MODE, FOLDER_MODE)?;
    let http = config.supervisor.http.as_ref().map(open_http).transpose()?;
    if folder_mode != FOLDER_MODE {
        warn_of_closed_folder(&config.supervisor.socket);
    }

    let (notices, received) = bulkhead_plane::notices::ways();
    let pulse = Arc::new(SharedCounters::default());
    let fate = Fate::default();
    let (span_sender, span_thread) =
        spans::start(pulse.clone(), &fate).map_err(system("start the thread for spans"))?.unzip();
    let own = rustix::process::geteuid().as_raw();
    let labels: Arc<[String]> = config.labelled_tenants().into();
    let in_force =
        control::InForce { config: file, support: support.clone(), open_files, own, labels: labels.clone() };
    let parts = Parts {
        config: config.clone(),
        support,
        listener: Some(jobs.take_listener().map_err(system("take the jobs socket"))?),
        keeper,
        notices,
        spans: span_sender,
        pulse: pulse.clone(),
        host,
        labels,
        fate: fate.clone(),
    };
    let pulse_of_run = pulse.clone();
    let (data_plane, commander) = DataPlane::new(parts).map_err(system("prepare the event loop"))?;
    if let Some(lifeline) = lifeline {
        let commander = commander.clone();
        let stop = move || {
            tracing::warn!("the descriptor of --while-open has come to its end: stopping at once");
            for _ in 0..2 {
                let _ = commander.stop();
            }
        };
        lifeline::at_the_end_of(lifeline, stop).map_err(system("start a thread"))?;
    }
    let admin_listener = admin.take_listener().map_err(system("take the admin socket"))?;
    let sockets = Arc::new(Sockets { jobs: jobs.into(), admin: admin.into() });
    let options = Options {
        place: Place::Process { admin: admin_listener, sockets },
        commander,
        notices: received,
        pulse,
        in_force,
        crashes: crashes::start(store, &fate).map_err(system("start the thread for crash reports"))?,
        own,
        config,
        http,
        fate: fate.clone(),
    };
    let control = control::start(options).map_err(system("start the control plane"))?;
    let ran = run_data_plane(|| data_plane.run(), &fate, &pulse_of_run);
    control.join();
    span_thread.into_iter().for_each(spans::SpanThread::settle);
    ran.map_err(system("run the event loop"))
}

/// A panic there ends all else as an error does. It has dropped the keeper, which ends the workers.
pub(crate) fn run_data_plane(
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

/// Binds the address, and reads the token anew: the file may have been changed since it was checked.
fn open_http(http: &HttpConfig) -> Result<(std::net::TcpListener, Token), RunError> {
    let failed = |why: String| RunError::Http(http.address, why);
    let token = Token::read(&http.token_file).map_err(|(why, help)| failed(format!("{why}; {help}")))?;
    let bind = || std::net::TcpListener::bind(http.address);
    let is_taken = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
    let socket = try_while_taken(bind, is_taken).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => "another program listens there: end it, or choose another port",
            std::io::ErrorKind::AddrNotAvailable => "this machine does not have the address",
            std::io::ErrorKind::PermissionDenied => "ports below 1024 are root's: choose another one",
            _ => "choose another address",
        };
        failed(format!("{error}; {hint}"))
    })?;
    Ok((socket, token))
}

/// A folder that was there before keeps its mode, and may keep out users that the entries of `[[access]]` let in.
fn warn_of_closed_folder(socket: &Path) {
    const OTHERS_SEARCH: u32 = 0o011;
    let Some(folder) = socket.parent() else { return };
    let mode = std::fs::metadata(folder).map_or(OTHERS_SEARCH, |found| found.permissions().mode());
    if mode & OTHERS_SEARCH == 0 {
        tracing::warn!(
            "the folder {} has the mode {:04o}, so that no other user gets to the jobs socket in it: \
             `chmod 755` it for those whom [[access]] lets in",
            folder.display(),
            mode & 0o7777
        );
    }
}

/// Descriptors that clients of the address of `http` can take up: connections, and jobs that need a
/// connection to the data plane, which has two ends.
const DESCRIPTORS_HTTP: u64 = control::TCP_CONNECTIONS_MAX as u64 + 2 * control::JOBS_MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;

    const MARK: &str = "BULKHEAD_TEST_PANICS";

    /// Stands for the keeper, which ends the workers when it is dropped.
    struct Owned;

    impl Drop for Owned {
        fn drop(&mut self) {
            println!("\nthe keeper has ended");
        }
    }

    /// Not a test: this program, started again, is a supervisor whose data plane panics beside another thread.
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

    #[test]
    fn a_panic_of_the_data_plane_is_the_end_of_all_else_and_an_error() {
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

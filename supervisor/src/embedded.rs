//! A supervisor inside an application's process. Leaves the rest of the process unchanged: installs no signal
//! handlers, changes no limits or environment variables, has no child processes, and binds no sockets.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use bulkhead_client::{Client, Connector, blocking};
use bulkhead_config::Config;
use bulkhead_control::control::RunMode;
use bulkhead_dataplane::descriptors;
use bulkhead_keeper::{KEEPER_ARGUMENT, Keeper};
use bulkhead_linux::scheduler::set_time_slice;
use bulkhead_plane::command::{Command, CommandSendError, CommandSender};
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_shared::in_process;
use tokio::sync::oneshot;

use crate::supervisor::{Listeners, Prerequisites, Ready, RunError, SLICE, system};

mod local;
mod parts;

pub use local::LocalSupervisor;

/// True once [`keeper_main_if_asked`] was called in this process.
static MAY_BE_KEEPER: AtomicBool = AtomicBool::new(false);

/// Runs the keeper if this process was started as a keeper, and does not return in that case. An application
/// that uses [`KeeperProgram::ThisProgram`] must call this function first in `main`, before starting other
/// threads.
///
/// ```no_run
/// bulkhead_supervisor::keeper_main_if_asked();
/// // The application begins here.
/// ```
pub fn keeper_main_if_asked() {
    if is_started_as_keeper() {
        bulkhead_keeper::run_as_keeper();
    }
    MAY_BE_KEEPER.store(true, Ordering::SeqCst);
}

fn is_started_as_keeper() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == KEEPER_ARGUMENT)
}

/// The program to execute as the keeper of an embedded supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeeperProgram {
    /// The application itself. Its `main` must call [`keeper_main_if_asked`] first.
    #[default]
    ThisProgram,
    /// Another program that calls [`keeper_main_if_asked`], such as `bulkhead-supervisor`. The program must
    /// be built with the same version of this library. A path without `/` is not searched in `PATH`.
    Program(PathBuf),
}

/// An error while starting an embedded supervisor.
#[derive(thiserror::Error)]
pub enum StartError {
    /// The keeper should be this program, but the program did not call [`keeper_main_if_asked`].
    #[error(
        "failed to start the keeper: this program did not call `keeper_main_if_asked`: call this function at the \
         start of `main`, or set another program with `keeper`"
    )]
    NotAKeeper,
    /// This process was started as a keeper, but runs the application.
    #[error(
        "failed to start a supervisor: this process was started as a keeper: call `keeper_main_if_asked` at the \
         start of `main`"
    )]
    IsToBeKeeper,
    /// The configuration was read for a supervisor with sockets.
    #[error(
        "failed to start a supervisor: the configuration is for a supervisor with sockets: read the file with \
         `config::load_embedded` or `config::parse_embedded`"
    )]
    HasSockets,
    /// An error that a standalone supervisor can report as well.
    #[error(transparent)]
    Run(#[from] RunError),
}

bulkhead_shared::debug_by_display!(StartError);

/// Options for starting an embedded supervisor; see [`Supervisor::builder`].
#[must_use = "a builder does nothing until `start` is called"]
#[derive(Clone, Debug)]
pub struct Builder {
    config: Config,
    keeper: KeeperProgram,
    host: Option<PathBuf>,
}

impl Builder {
    /// Sets the program to execute as the keeper.
    pub fn keeper(mut self, program: KeeperProgram) -> Self {
        self.keeper = program;
        self
    }

    /// Sets the host program for C libraries and plain programs (`library` and `exec`). The default is the
    /// `bulkhead-worker` next to this program or in `PATH`.
    pub fn host(mut self, program: impl Into<PathBuf>) -> Self {
        self.host = Some(program.into());
        self
    }

    /// Starts the supervisor like [`Builder::start_blocking`], but without blocking the caller. Works with
    /// every async runtime. Dropping the future stops the supervisor.
    pub async fn start(self) -> Result<Supervisor, StartError> {
        let (sender, started) = oneshot::channel();
        let start = move || drop(sender.send(self.start_blocking()));
        let thread = std::thread::Builder::new().name("bulkhead-start".into());
        thread.spawn(start).map_err(system("start a thread"))?;
        started.await.unwrap_or_else(|_| Err(system("start")(io::Error::other("a panic")).into()))
    }

    /// Starts the supervisor on separate threads. Blocks for about ten milliseconds until the keeper runs.
    /// Workers start in the background, and jobs are queued until a worker is ready.
    pub fn start_blocking(self) -> Result<Supervisor, StartError> {
        let keeper = self.check()?;
        let (sender, prepared) = std::sync::mpsc::sync_channel(1);
        let run = move || {
            let ready = match self.prepare(&keeper) {
                Ok(ready) => ready,
                Err(error) => {
                    // Never fails, because the receiver waits for this message.
                    let _ = sender.send(Err(error));
                    return Ok(());
                }
            };
            let _ = sender.send(Ok(ready.commands.clone()));
            ready.run()
        };
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(run).map_err(system("start a thread"))?;
        let ended = |_| system("start")(io::Error::other("the thread of the supervisor has panicked"));
        let commands = prepared.recv().map_err(ended)??;
        Ok(Supervisor { commands, thread: Some(thread), owner: std::process::id() })
    }

    /// Starts the supervisor with its data plane on the caller's thread, which saves a thread switch per job.
    /// The data plane only makes progress inside [`LocalSupervisor::run_until`]. The other parts run on
    /// separate threads.
    pub fn start_local(self) -> Result<LocalSupervisor, StartError> {
        let keeper = self.check()?;
        // Writes to closed connections must not raise SIGPIPE in the application.
        bulkhead_shared::connection::disable_sendfile();
        let prepare = move || self.prepare(&keeper);
        // On a separate thread, because `prepare` changes the signal mask and the scheduler slice of its
        // thread.
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(prepare).map_err(system("start a thread"))?;
        let panicked = |_| system("start")(io::Error::other("the starting thread has panicked"));
        let ready = thread.join().map_err(panicked)??;
        Ok(LocalSupervisor::new(ready))
    }

    /// Validates the options and returns the path of the keeper's program.
    fn check(&self) -> Result<PathBuf, StartError> {
        if is_started_as_keeper() {
            return Err(StartError::IsToBeKeeper);
        }
        if !self.config.supervisor.socket.as_os_str().is_empty() {
            return Err(StartError::HasSockets);
        }
        match &self.keeper {
            KeeperProgram::ThisProgram if !MAY_BE_KEEPER.load(Ordering::SeqCst) => {
                Err(StartError::NotAKeeper)
            }
            KeeperProgram::ThisProgram => Ok("/proc/self/exe".into()),
            KeeperProgram::Program(program) => Ok(program.clone()),
        }
    }

    /// Starts everything except the data plane. Must run on a thread of the supervisor, because the threads
    /// started here inherit its signal mask and scheduler slice.
    fn prepare(self, keeper: &Path) -> Result<Ready, RunError> {
        // The application's signals must be handled on the application's threads.
        let all = nix::sys::signal::SigSet::all();
        all.thread_set_mask().map_err(|errno| system("block signals")(errno.into()))?;
        // Best effort: old kernels do not support this, and jobs are served anyway.
        let _ = set_time_slice(SLICE);
        let Self { config, host, .. } = self;
        let host = match host {
            Some(host) => Some(host),
            None => program::require_host(&config)?,
        };
        let (keeper, found) = Keeper::start_detached(keeper).map_err(system("start the keeper"))?;
        let support = SandboxSupport::from_probe(&config, found);
        crate::inherited::warn_about_limits(&config);
        let open_files = OpenFiles::keep(descriptors::reserve(), |_| 0);
        let prerequisites =
            Prerequisites { config, host, support, keeper, open_files, threads: ThreadMonitor::embedded() };
        Ready::prepare(prerequisites, |_| {
            Ok(Listeners { jobs: None, mode: RunMode::Embedded, http: None, jobs_http: None })
        })
    }
}

/// Returns the function that opens in-process connections to the data plane.
fn connector(commands: &CommandSender) -> Connector {
    let commands = commands.clone();
    Arc::new(move || {
        let (here, there) = in_process::pair();
        commands.send(Command::AddInProcessClient { end: there }).map_err(|error| match error {
            CommandSendError::Busy => io::Error::other(error),
            CommandSendError::Ended => io::Error::new(io::ErrorKind::NotConnected, error),
        })?;
        Ok(here)
    })
}

/// A supervisor in this process that runs on separate threads.
///
/// Dropping the value stops the supervisor like [`Supervisor::shutdown`], and blocks for up to `drain_timeout`.
///
/// ```no_run
/// use bulkhead_supervisor::{Supervisor, config, keeper_main_if_asked};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     keeper_main_if_asked();
///     let supervisor = Supervisor::start_blocking(config::load_embedded("workers.toml".as_ref())?)?;
///     let client = supervisor.blocking_client()?;
///     let reply = client.job("thumbnail", b"...".to_vec()).send()?;
///     println!("{} bytes", reply.payload().len());
///     supervisor.shutdown()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Supervisor {
    commands: CommandSender,
    /// `None` once the thread was joined.
    thread: Option<JoinHandle<Result<(), RunError>>>,
    /// Process id of the creator. A forked child has a copy of this value, but not the thread.
    owner: u32,
}

impl Supervisor {
    /// Starts a supervisor with this program as its keeper; see [`keeper_main_if_asked`] and
    /// [`Builder::start`].
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start().await
    }

    /// Starts a supervisor like [`Supervisor::start`], and blocks until its keeper runs.
    pub fn start_blocking(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start_blocking()
    }

    /// Returns a builder to start a supervisor with further options.
    ///
    /// ```no_run
    /// use bulkhead_supervisor::{KeeperProgram, Supervisor, config};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let config = config::load_embedded("workers.toml".as_ref())?;
    /// let keeper = KeeperProgram::Program("/usr/bin/bulkhead-supervisor".into());
    /// let supervisor = Supervisor::builder(config).keeper(keeper).start_blocking()?;
    /// # drop(supervisor);
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(config: Config) -> Builder {
        Builder { config, keeper: KeeperProgram::default(), host: None }
    }

    /// Creates a client with a separate connection, which is shared by the clones of the client. Must be
    /// called within a tokio runtime.
    ///
    /// ```no_run
    /// # async fn example(supervisor: bulkhead_supervisor::Supervisor) -> Result<(), Box<dyn std::error::Error>> {
    /// let reply = supervisor.client().job("thumbnail", b"...".to_vec()).tenant("acme").send().await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub fn client(&self) -> Client {
        Client::in_process(connector(&self.commands))
    }

    /// Creates a blocking client with a separate connection. Fails if the client's thread cannot be started.
    pub fn blocking_client(&self) -> io::Result<blocking::Client> {
        blocking::Client::in_process(connector(&self.commands))
    }

    /// Stops the supervisor without blocking. Running and queued jobs get up to `drain_timeout` to finish,
    /// and new jobs are rejected with `draining`. A second call ends all jobs at once.
    pub fn stop(&self) {
        // A send error means that the supervisor has already ended.
        let _ = self.commands.stop();
    }

    /// Stops the supervisor like [`Supervisor::stop`], and waits until all its processes have ended,
    /// including the descendants of workers. Blocks the caller, so do not call it on a thread of an async
    /// runtime that must not block.
    ///
    /// Returns an error with the reason if the supervisor has already ended, or does not end cleanly. A
    /// forked child also gets an error, because the child has only a copy of the supervisor.
    pub fn shutdown(mut self) -> Result<(), RunError> {
        check_owner(self.owner)?;
        self.stop();
        self.wait()
    }

    fn wait(&mut self) -> Result<(), RunError> {
        let panicked = || system("run")(io::Error::other("the thread of the supervisor has panicked"));
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            None => Ok(()),
        }
    }
}

/// Rejects calls from a forked child, which has a copy of the supervisor but none of its threads.
fn check_owner(owner: u32) -> Result<(), RunError> {
    if owner == std::process::id() {
        return Ok(());
    }
    let why = format!("the supervisor belongs to process {owner}, and this process is a fork of it");
    Err(system("use the supervisor")(io::Error::other(why)))
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if self.thread.is_none() || self.owner != std::process::id() {
            return;
        }
        self.stop();
        if let Err(error) = self.wait() {
            tracing::error!("{error}");
        }
    }
}

//! A supervisor inside an application's process. Does not affect the rest of the process: it installs no signal
//! handlers, changes no limits or environment variables, has no child processes, and binds no sockets.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use bulkhead_client::{Client, Connector, blocking};
use bulkhead_config::Config;
use bulkhead_control::control::RunMode;
use bulkhead_control::sockets::InheritedSockets;
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

use crate::listeners::Listeners;
use crate::supervisor::{Prerequisites, Ready, RunError, SLICE, system};

mod local;
mod parts;

pub use local::LocalSupervisor;

/// True once this process has called [`keeper_main_if_asked`].
static MAY_BE_KEEPER: AtomicBool = AtomicBool::new(false);

/// If this process was started as a keeper or a symbolizer, performs that role and does not return. An application that
/// uses [`KeeperProgram::ThisProgram`] must call this function at the beginning of `main`, before it starts other
/// threads.
///
/// ```no_run
/// bulkhead_supervisor::keeper_main_if_asked();
/// // The application begins here.
/// ```
pub fn keeper_main_if_asked() {
    crate::run_hidden_mode();
    MAY_BE_KEEPER.store(true, Ordering::SeqCst);
}

fn is_started_as_keeper() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == KEEPER_ARGUMENT)
}

/// Program to execute as the keeper of an embedded supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeeperProgram {
    /// The program of this process. Its `main` must begin with a call to [`keeper_main_if_asked`].
    #[default]
    ThisProgram,
    /// Another program: either `bulkhead-supervisor` or a program whose `main` calls [`keeper_main_if_asked`]. Must be
    /// built from the same version of this library. A relative path is resolved against the current directory when the
    /// supervisor starts. `PATH` is not searched, even if the path contains no `/`.
    Program(PathBuf),
}

/// Error that occurred while starting an embedded supervisor.
#[derive(thiserror::Error)]
pub enum StartError {
    /// The program of this process is configured as the keeper but has not called [`keeper_main_if_asked`].
    #[error(
        "failed to start the keeper: this program did not call `keeper_main_if_asked`: call this function at the \
         start of `main`, or set another program with `keeper`"
    )]
    NotAKeeper,
    /// This process was started as a keeper but runs the application instead, because it has not called
    /// [`keeper_main_if_asked`].
    #[error(
        "failed to start a supervisor: this process was started as a keeper: call `keeper_main_if_asked` at the \
         start of `main`"
    )]
    IsToBeKeeper,
    /// The configuration was loaded for a standalone supervisor, which listens on sockets.
    #[error(
        "failed to start a supervisor: the configuration is for a supervisor with sockets: read the file with \
         `config::load_embedded` or `config::parse_embedded`"
    )]
    HasSockets,
    /// An error that can also occur in a standalone supervisor.
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

    /// Sets the path of the host program for bulkheads with `library` or `exec`. A relative path is resolved against
    /// the current directory when the supervisor starts. By default, `bulkhead-worker` is searched for next to the
    /// current executable and in `PATH`.
    pub fn host(mut self, program: impl Into<PathBuf>) -> Self {
        self.host = Some(program.into());
        self
    }

    /// Starts the supervisor as [`Builder::start_blocking`] does, but without blocking the calling thread. Works with
    /// every async runtime. Dropping the future stops the supervisor.
    pub async fn start(self) -> Result<Supervisor, StartError> {
        let (sender, started) = oneshot::channel();
        let start = move || drop(sender.send(self.start_blocking()));
        let thread = std::thread::Builder::new().name("bulkhead-start".into());
        thread.spawn(start).map_err(system("start a thread"))?;
        started.await.unwrap_or_else(|_| Err(system("start")(io::Error::other("a panic")).into()))
    }

    /// Starts the supervisor on separate threads. Blocks for about ten milliseconds, until the keeper is running.
    /// Workers start in the background, and jobs are queued until a worker is ready.
    pub fn start_blocking(self) -> Result<Supervisor, StartError> {
        let keeper = self.check()?;
        let (sender, prepared) = std::sync::mpsc::sync_channel(1);
        let run = move || {
            let ready = match self.prepare(&keeper) {
                Ok(ready) => ready,
                Err(error) => {
                    // Sending cannot fail, because the receiver waits for this message.
                    let _ = sender.send(Err(error));
                    return Ok(());
                }
            };
            let _ = sender.send(Ok(ready.commands.clone()));
            ready.run()
        };
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(run).map_err(system("start a thread"))?;
        let ended = |_| system("start")(io::Error::other("the supervisor thread panicked"));
        let commands = prepared.recv().map_err(ended)??;
        Ok(Supervisor { commands, thread: Some(thread), owner: std::process::id() })
    }

    /// Starts a supervisor whose data plane runs on the caller's thread, which saves a thread switch per job. The data
    /// plane makes progress only inside [`LocalSupervisor::run_until`]. The rest of the supervisor runs on separate
    /// threads.
    pub fn start_local(self) -> Result<LocalSupervisor, StartError> {
        let keeper = self.check()?;
        // `sendfile` on a closed connection would raise SIGPIPE in the application.
        bulkhead_shared::connection::disable_sendfile();
        let prepare = move || self.prepare(&keeper);
        // `prepare` runs on a separate thread, because it changes the signal mask and scheduler slice of its thread.
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(prepare).map_err(system("start a thread"))?;
        let panicked =
            |_| system("start")(io::Error::other("the thread that starts the supervisor panicked"));
        let ready = thread.join().map_err(panicked)??;
        Ok(LocalSupervisor::new(ready))
    }

    /// Checks that the supervisor can be started with these options. Returns the path of the keeper's
    /// program.
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
            // The path is made absolute, because the program is executed again if the keeper is lost.
            KeeperProgram::Program(program) => {
                Ok(std::path::absolute(program).map_err(system("start the keeper"))?)
            }
        }
    }

    /// Starts all parts of the supervisor except for the data plane. Must run on one of the supervisor's threads,
    /// because new threads inherit the current thread's signal mask and scheduler slice.
    fn prepare(self, keeper: &Path) -> Result<Ready, RunError> {
        // All signals are blocked, because the application's signals must be handled on its own threads.
        let all = nix::sys::signal::SigSet::all();
        all.thread_set_mask().map_err(|errno| system("block signals")(errno.into()))?;
        // Errors are ignored, because short slices are optional, and old kernels do not support them.
        let _ = set_time_slice(SLICE);
        let Self { config, host, .. } = self;
        // The path is made absolute, because the keeper and the workers have other working directories.
        let host = host.map(std::path::absolute).transpose().map_err(system("find the host program"))?;
        let host = program::require_host(&config, host)?;
        let (keeper, found) = Keeper::start_detached(keeper).map_err(system("start the keeper"))?;
        let support = SandboxSupport::from_probe(&config, found);
        crate::inherited::warn_about_limits(&config);
        let open_files = OpenFiles::keep(descriptors::reserve(), |_| 0);
        let prerequisites = Prerequisites {
            config,
            host,
            support,
            keeper,
            open_files,
            threads: ThreadMonitor::embedded(),
            program: Err("an embedded supervisor is part of its application".to_owned()),
            soft_limits: Vec::new(),
        };
        Ready::prepare(prerequisites, None, |_| {
            let inherited = InheritedSockets::default();
            Ok(Listeners { jobs: None, mode: RunMode::Embedded, http: None, jobs_http: None, inherited })
        })
    }
}

/// Returns a function that opens in-process connections to the data plane.
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

/// A supervisor that runs on separate threads of the current process.
///
/// Dropping this value stops the supervisor like [`Supervisor::shutdown`], which blocks for up to
/// `drain_timeout`.
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
    /// Thread of the data plane, or `None` once the thread has been joined.
    thread: Option<JoinHandle<Result<(), RunError>>>,
    /// PID of the process that created the supervisor. A child forked by that process has a copy of the supervisor but
    /// none of its threads.
    owner: u32,
}

impl Supervisor {
    /// Starts a supervisor that uses the program of this process as its keeper; see [`keeper_main_if_asked`] and
    /// [`Builder::start`].
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start().await
    }

    /// Starts a supervisor like [`Supervisor::start`], but blocks until the keeper is running.
    pub fn start_blocking(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start_blocking()
    }

    /// Returns a builder for starting a supervisor with additional options.
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

    /// Creates a client with a new connection, which all clones of the client share. Must be called within a
    /// tokio runtime.
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

    /// Begins to stop the supervisor, without blocking. Running jobs have up to `drain_timeout` to finish.
    /// Queued and new jobs are rejected as `draining`. A second call stops the supervisor immediately.
    pub fn stop(&self) {
        // Fails only if the supervisor has already stopped.
        let _ = self.commands.stop();
    }

    /// Stops the supervisor like [`Supervisor::stop`], and waits until all processes that it has started have exited,
    /// including the descendants of workers. Must not be called on a thread that must not block, such as a thread of
    /// an async runtime.
    ///
    /// Returns an error if the supervisor had already failed, or does not stop cleanly. Always returns an error in a
    /// forked child, which has only a copy of this value.
    pub fn shutdown(mut self) -> Result<(), RunError> {
        check_owner(self.owner)?;
        self.stop();
        self.wait()
    }

    fn wait(&mut self) -> Result<(), RunError> {
        let panicked = || system("run")(io::Error::other("the supervisor thread panicked"));
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            None => Ok(()),
        }
    }
}

/// Returns an error if this process is a forked child, which has a copy of the supervisor but none of the supervisor's
/// threads.
fn check_owner(owner: u32) -> Result<(), RunError> {
    if owner == std::process::id() {
        return Ok(());
    }
    let why =
        format!("the supervisor belongs to process {owner}, and this process was forked from that process");
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

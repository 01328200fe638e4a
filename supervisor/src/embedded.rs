//! A supervisor in an application's own process. It takes nothing of the process: no signal, no limit, no child, no
//! environment, no socket's path.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use bulkhead_client::{Client, Connector, blocking};
use bulkhead_config::Config;
use bulkhead_control::control::Place;
use bulkhead_dataplane::descriptors;
use bulkhead_keeper::{KEEPER_ARGUMENT, Keeper};
use bulkhead_linux::schedule::shorten_slice;
use bulkhead_plane::command::{Command, Commander, Unheard};
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::threads::Fate;
use bulkhead_shared::in_process;
use tokio::sync::oneshot;

use crate::supervisor::{Basis, Ready, RunError, SLICE, system};

mod local;
mod parts;

pub use local::LocalSupervisor;

/// Whether [`keeper_main_if_asked`] was called in this process.
static MAY_BE_KEEPER: AtomicBool = AtomicBool::new(false);

/// Becomes the keeper, if this process was started to be one, and does not return then. It is to be the first thing in
/// the `main` of an application that is its own keeper ([`KeeperProgram::ThisProgram`]), before there is another thread.
///
/// ```no_run
/// bulkhead_supervisor::keeper_main_if_asked();
/// // The application begins here.
/// ```
pub fn keeper_main_if_asked() {
    if is_asked_to_be_keeper() {
        bulkhead_keeper::run_as_keeper();
    }
    MAY_BE_KEEPER.store(true, Ordering::SeqCst);
}

fn is_asked_to_be_keeper() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == KEEPER_ARGUMENT)
}

/// The program that the keeper of an embedded supervisor is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeeperProgram {
    /// The application itself, which calls [`keeper_main_if_asked`] first thing in `main`.
    #[default]
    ThisProgram,
    /// A program that does: `bulkhead-supervisor`, of the version of this library, or one of the application's own. A path
    /// without `/` is not searched for.
    Program(PathBuf),
}

/// Why a supervisor could not be started.
#[derive(thiserror::Error)]
pub enum StartError {
    /// The keeper is to be this program, which cannot be one.
    #[error(
        "failed to start the keeper: it is to be this program, which did not call `keeper_main_if_asked`: call it \
         first thing in `main`, or name another program with `keeper`"
    )]
    NotAKeeper,
    /// This process was started as a keeper, and goes on as the application.
    #[error(
        "failed to start a supervisor: this process was started to be a keeper: call `keeper_main_if_asked` first \
         thing in `main`"
    )]
    IsToBeKeeper,
    /// The configuration was read for a supervisor with sockets.
    #[error(
        "failed to start a supervisor: the configuration is one of a supervisor with sockets: read it with \
         `config::load_embedded` or `config::parse_embedded`"
    )]
    HasSockets,
    /// What a supervisor of its own process can fail with, too.
    #[error(transparent)]
    Run(#[from] RunError),
}

bulkhead_shared::debug_by_display!(StartError);

/// What a supervisor is started with; see [`Supervisor::builder`].
#[must_use = "nothing is started before `start`"]
#[derive(Clone, Debug)]
pub struct Builder {
    config: Config,
    keeper: KeeperProgram,
    host: Option<PathBuf>,
}

impl Builder {
    /// The program that the keeper is.
    pub fn keeper(mut self, program: KeeperProgram) -> Self {
        self.keeper = program;
        self
    }

    /// The host of C libraries and plain programs (`library` and `exec`), in the place of the `bulkhead-worker` that is
    /// found beside this program or in `PATH`.
    pub fn host(mut self, program: impl Into<PathBuf>) -> Self {
        self.host = Some(program.into());
        self
    }

    /// Starts the supervisor like [`Builder::start_blocking`], and blocks nothing. Needs no particular async runtime. If
    /// the future is dropped, the supervisor ends.
    pub async fn start(self) -> Result<Supervisor, StartError> {
        let (sender, started) = oneshot::channel();
        let start = move || drop(sender.send(self.start_blocking()));
        let thread = std::thread::Builder::new().name("bulkhead-start".into());
        thread.spawn(start).map_err(system("start a thread"))?;
        started.await.unwrap_or_else(|_| Err(system("start")(io::Error::other("a panic")).into()))
    }

    /// Starts the supervisor on separate threads. Blocks for some ten milliseconds, until the keeper runs. Workers
    /// start meanwhile, and jobs wait for the workers.
    pub fn start_blocking(self) -> Result<Supervisor, StartError> {
        let keeper = self.check()?;
        let (sender, prepared) = std::sync::mpsc::sync_channel(1);
        let run = move || {
            let ready = match self.prepare(&keeper) {
                Ok(ready) => ready,
                Err(error) => {
                    // Its receiver waits for it.
                    let _ = sender.send(Err(error));
                    return Ok(());
                }
            };
            let _ = sender.send(Ok(ready.commander.clone()));
            ready.run()
        };
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(run).map_err(system("start a thread"))?;
        let ended = |_| system("start")(io::Error::other("the thread of the supervisor has panicked"));
        let commander = prepared.recv().map_err(ended)??;
        Ok(Supervisor { commander, thread: Some(thread), owner: std::process::id() })
    }

    /// Starts the supervisor with its data plane on the caller's thread: it runs while it is driven, see
    /// [`LocalSupervisor::run_until`], and a job takes one hop less. Its other threads are its own.
    pub fn start_local(self) -> Result<LocalSupervisor, StartError> {
        let keeper = self.check()?;
        // What peers do is no reason to end the application, whatever it does about signals.
        bulkhead_shared::connection::send_without_signals();
        let prepare = move || self.prepare(&keeper);
        // Not here: what is prepared blocks signals, and has a slice of its own.
        let thread = std::thread::Builder::new().name("bulkhead".into());
        let thread = thread.spawn(prepare).map_err(system("start a thread"))?;
        let panicked = |_| system("start")(io::Error::other("the thread that starts it has panicked"));
        let ready = thread.join().map_err(panicked)??;
        Ok(LocalSupervisor::new(ready))
    }

    /// The keeper's program.
    fn check(&self) -> Result<PathBuf, StartError> {
        if is_asked_to_be_keeper() {
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

    /// Starts all but the data plane. On a thread of the supervisor's own, whose signal mask and slice the others inherit.
    fn prepare(self, keeper: &Path) -> Result<Ready, RunError> {
        // What comes for the application is to be handled on the application's threads.
        let all = nix::sys::signal::SigSet::all();
        all.thread_set_mask().map_err(|errno| system("block signals")(errno.into()))?;
        // Where Linux does not, jobs are served all the same.
        let _ = shorten_slice(SLICE);
        let Self { config, host, .. } = self;
        let host = match host {
            Some(host) => Some(host),
            None => program::require_host(&config)?,
        };
        let (keeper, found) = Keeper::start_beside(keeper).map_err(system("start the keeper"))?;
        let support = SandboxSupport::found(&config, found);
        crate::inherited::warn_of_limits(&config);
        let open_files = OpenFiles::keep(descriptors::reserve(), 0);
        let basis = Basis { config, host, support, keeper, open_files, fate: Fate::of_embedded() };
        Ready::prepare(basis, |_| Ok((None, Place::Application, None)))
    }
}

/// What connects a client.
fn connector(commander: &Commander) -> Connector {
    let commander = commander.clone();
    Arc::new(move || {
        let (here, there) = in_process::pair();
        commander.send(Command::Connect { end: there }).map_err(|unheard| match unheard {
            Unheard::Busy => io::Error::other(unheard),
            Unheard::Ended => io::Error::new(io::ErrorKind::NotConnected, unheard),
        })?;
        Ok(here)
    })
}

/// A supervisor in this process, with threads of its own.
///
/// When it is dropped, it stops as with [`Supervisor::shutdown`]: within `drain_timeout`, which is waited for.
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
    commander: Commander,
    /// `None` once it was waited for.
    thread: Option<JoinHandle<Result<(), RunError>>>,
    /// The process that has started it. What is forked off has a copy of this, and no thread.
    owner: u32,
}

impl Supervisor {
    /// Starts a supervisor whose keeper is this program; see [`keeper_main_if_asked`] and [`Builder::start`].
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start().await
    }

    /// Starts a supervisor like [`Supervisor::start`], and blocks until its keeper is there.
    pub fn start_blocking(config: Config) -> Result<Self, StartError> {
        Self::builder(config).start_blocking()
    }

    /// A supervisor that is started with more than its configuration.
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

    /// A client of its own connection; clones of it share that. Call it within a tokio runtime.
    ///
    /// ```no_run
    /// # async fn example(supervisor: bulkhead_supervisor::Supervisor) -> Result<(), Box<dyn std::error::Error>> {
    /// let reply = supervisor.client().job("thumbnail", b"...".to_vec()).tenant("acme").send().await?;
    /// # drop(reply);
    /// # Ok(())
    /// # }
    /// ```
    pub fn client(&self) -> Client {
        Client::in_process(connector(&self.commander))
    }

    /// The same without async. Errors are those of starting a thread.
    pub fn blocking_client(&self) -> io::Result<blocking::Client> {
        blocking::Client::in_process(connector(&self.commander))
    }

    /// Has it stop: jobs in hand get as long as `drain_timeout`, and new ones are told `draining`. A second time, all is
    /// ended at once. Waits for nothing.
    pub fn stop(&self) {
        // If it is not heard, the supervisor has ended.
        let _ = self.commander.stop();
    }

    /// Has it stop, as [`Supervisor::stop`] does, and waits until nothing of it is left, no worker and no process of a
    /// worker's. Blocks: within an async runtime, call it where blocking is allowed.
    ///
    /// Errors tell that it has ended before, and why, or did not end well; or that this is the copy of a process that was
    /// forked off, which ends nothing.
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

/// A process that was forked off has a copy of a supervisor, and none of its threads.
fn check_owner(owner: u32) -> Result<(), RunError> {
    if owner == std::process::id() {
        return Ok(());
    }
    let why = format!("it is that of process {owner}, of which this one was forked off");
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

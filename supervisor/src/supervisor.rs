//! Start and stop, in order: keeper, sockets, control plane, data plane; and back.

use std::path::Path;
use std::sync::Arc;

use crate::config::Config;
use crate::control::{self, Options};
use crate::keeper::{self, Keeper};
use crate::program;
use crate::shard::{Parts, Pulse, Shard};
use crate::sockets::Bound;

/// Why a supervisor could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A socket could not be had.
    #[error("failed to {0}")]
    Bind(#[from] crate::sockets::BindError),
    /// The host for C libraries and plain programs is missing.
    #[error(
        "failed to find the program bulkhead-worker, which runs the `exec` and `library` of bulkhead '{0}': \
         install it beside bulkhead-supervisor, or in PATH"
    )]
    NoHost(String),
    /// The kernel refused something.
    #[error("failed to {0}: {1}")]
    System(&'static str, #[source] std::io::Error),
}

/// Runs a supervisor until it is told to stop by a signal. The process is this supervisor's alone: it
/// becomes a child subreaper, and takes SIGTERM, SIGINT, SIGHUP and SIGUSR1.
///
/// Call it before any other thread has been started.
pub fn run(config: Config) -> Result<(), RunError> {
    let system = |what: &'static str| move |error: std::io::Error| RunError::System(what, error);
    let host = program::find_host();
    if host.is_none()
        && let Some(needy) = config.bulkheads.iter().find(|b| program::needs_host(b))
    {
        return Err(RunError::NoHost(needy.name.clone()));
    }
    // First of all: the keeper copies whatever this process has become.
    keeper::become_subreaper().map_err(system("become a child subreaper"))?;
    let keeper = Keeper::start(Path::new("/proc/self/exe")).map_err(system("start the keeper"))?;
    raise_descriptor_limit();
    let mut jobs = Bound::bind(&config.supervisor.socket, config.supervisor.socket_mode)?;
    let mut admin = Bound::bind(&config.supervisor.admin, 0o600)?;

    let (notices, received) = tokio::sync::mpsc::channel(crate::command::NOTICES_MAX);
    let pulse = Arc::new(Pulse::default());
    let bulkheads: Vec<String> = config.bulkheads.iter().map(|b| b.name.clone()).collect();
    let watched = config.bulkheads.iter().filter(|b| b.recycle.rss.is_some());
    let recycle_rss = watched.map(|b| b.name.clone()).collect();
    let parts = Parts {
        config,
        listener: jobs.take_listener().map_err(system("take the jobs socket"))?,
        keeper,
        notices,
        pulse: pulse.clone(),
        host,
    };
    let (shard, commander) = Shard::new(parts).map_err(system("prepare the event loop"))?;
    let own = rustix::process::geteuid().as_raw();
    let options = Options {
        admin: admin.take_listener().map_err(system("take the admin socket"))?,
        commander,
        notices: received,
        pulse,
        bulkheads,
        recycle_rss,
        allowed_uids: vec![own, 0],
    };
    let control = control::start(options).map_err(system("start the control plane"))?;
    let ran = shard.run();
    control.join();
    ran.map_err(system("run the event loop"))
}

/// Each worker takes a handful of descriptors. Workers themselves keep the limit that the keeper was
/// started with.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Whoever cannot raise it runs with what there is, and hears when it is used up.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

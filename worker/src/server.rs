//! Putting a worker together: its handlers, what they share, and [`serve`].

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;

use bulkhead_shared::worker_protocol::LINK_VARIABLE;

use crate::context::{Ctx, Job, Listener, StartCtx};
use crate::link::{self, Reader, Writer};
use crate::ownership;
use crate::pool::{Pool, panic_text};
use crate::reply::{HandlerError, Reply};
use crate::template::{self, Template};

/// Started by hand, or otherwise not as a worker.
const USAGE: u8 = 2;

/// Serves jobs with one function, whatever their operation, until the supervisor ends the worker.
///
/// Returns only if the program was not started as a worker, or the supervisor refused it.
pub fn serve<R, F>(handler: F) -> ExitCode
where
    R: Into<Vec<u8>>,
    F: Fn(&Job, &Ctx) -> Result<R, HandlerError> + Send + Sync + 'static,
{
    Server::new().handler(handler).serve()
}

type BoxedInit<S> = Box<dyn FnOnce(&StartCtx) -> Result<S, HandlerError> + Send>;
type BoxedHandler<S> = Box<dyn Fn(&Job, &Ctx<S>) -> Reply + Send + Sync>;
type BeforeFork<S> = Box<dyn FnMut(&mut S) + Send>;
type AfterFork<S> = Box<dyn FnOnce(&mut S, &StartCtx) -> Result<(), HandlerError> + Send>;

/// A worker with several operations, and something they share.
///
/// ```no_run
/// use bulkhead_worker::{HandlerError, Server};
///
/// struct Model(Vec<u8>);
///
/// fn main() -> std::process::ExitCode {
///     Server::new()
///         .init(|start| {
///             start.status("loading the model");
///             Ok::<_, std::io::Error>(Model(std::fs::read("model.bin")?))
///         })
///         .operation("size", |_job, ctx| Ok(ctx.state().0.len().to_string()))
///         .operation("echo", |job, _ctx| Ok(job.payload().to_vec()))
///         .serve()
/// }
/// ```
pub struct Server<S = ()> {
    init: BoxedInit<S>,
    before_fork: Option<BeforeFork<S>>,
    after_fork: Option<AfterFork<S>>,
    operations: HashMap<String, BoxedHandler<S>>,
    fallback: Option<BoxedHandler<S>>,
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl Server {
    /// A worker without handlers, which share nothing.
    pub fn new() -> Self {
        Self::started_by(Box::new(|_| Ok(())))
    }

    /// Has `init` run before the first job, on the thread that will run it, and which stays as long as the
    /// worker while other handler threads come and go. What it makes is shared by all handlers as
    /// [`Ctx::state`]. It may take `start.ready`, and ask for more. If it fails, the
    /// worker does not start, and the reason is shown to operators.
    ///
    /// Comes before the handlers, which depend on its type.
    pub fn init<S, E, I>(self, init: I) -> Server<S>
    where
        E: Into<HandlerError>,
        I: FnOnce(&StartCtx) -> Result<S, E> + Send + 'static,
    {
        let init: BoxedInit<S> = Box::new(move |start| init(start).map_err(Into::into));
        Server::started_by(init)
    }
}

impl<S> Server<S> {
    fn started_by(init: BoxedInit<S>) -> Self {
        let operations = HashMap::new();
        Self { init, before_fork: None, after_fork: None, operations, fallback: None }
    }
}

impl<S: Send + Sync + 'static> Server<S> {
    /// With `start.mode = "fork"`: runs in the template before each fork. No thread may be left afterwards.
    #[must_use]
    pub fn before_fork<F>(mut self, hook: F) -> Self
    where
        F: FnMut(&mut S) + Send + 'static,
    {
        self.before_fork = Some(Box::new(hook));
        self
    }

    /// With `start.mode = "fork"`: runs in each worker before its first job, on the thread that will run it. What all
    /// workers would have alike (random generators of the program's own), share (offsets of open files, connections)
    /// or lack (threads, timers, locks of files) is made anew here. If it fails, the worker does not start.
    #[must_use]
    pub fn after_fork<E, F>(mut self, hook: F) -> Self
    where
        E: Into<HandlerError>,
        F: FnOnce(&mut S, &StartCtx) -> Result<(), E> + Send + 'static,
    {
        self.after_fork = Some(Box::new(move |state, start| hook(state, start).map_err(Into::into)));
        self
    }

    /// Serves one operation.
    #[must_use]
    pub fn operation<R, F>(mut self, name: impl Into<String>, handler: F) -> Self
    where
        R: Into<Vec<u8>>,
        F: Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.operations.insert(name.into(), boxed(handler));
        self
    }

    /// Serves every operation that has no handler of its own. Without it those fail as
    /// `unknown_operation`.
    #[must_use]
    pub fn handler<R, F>(mut self, handler: F) -> Self
    where
        R: Into<Vec<u8>>,
        F: Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.fallback = Some(boxed(handler));
        self
    }

    /// The same for a handler that can say more than a result or an error.
    #[doc(hidden)]
    #[must_use]
    pub fn raw_handler<F>(mut self, handler: F) -> Self
    where
        F: Fn(&Job, &Ctx<S>) -> Reply + Send + Sync + 'static,
    {
        self.fallback = Some(Box::new(handler));
        self
    }

    /// Serves jobs until the supervisor ends the worker. Returns only if the program was not started as
    /// a worker, or the supervisor refused it.
    pub fn serve(self) -> ExitCode {
        let Some(link) = link::inherited() else {
            eprintln!(
                "run me under bulkhead-supervisor: this program is a worker. In workers.toml:\n\n    \
                 [bulkhead.NAME]\n    command = [\"{}\"]",
                std::env::args().next().unwrap_or_default().escape_debug()
            );
            return ExitCode::from(USAGE);
        };
        // Others of our user are not to read our memory or take our descriptors.
        let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
        let claimed = ownership::claim().map_err(|error| format!("madvise(MADV_WIPEONFORK): {error}"));
        let started = claimed
            .and_then(|()| if template::is_wanted() { self.open_template(link) } else { self.open(link) });
        started.unwrap_or_else(|message| {
            eprintln!("the worker cannot start: {message}");
            ExitCode::FAILURE
        })
    }

    /// Initialises once, and goes on in each process that is forked from here on.
    fn open_template(self, socket: OwnedFd) -> Result<ExitCode, String> {
        let template = Arc::new(Template::new(socket)?);
        let Self { init, mut before_fork, after_fork, operations, fallback } = self;
        let context = StartCtx { to: Listener::Keeper(template.clone()) };
        let made = catch_unwind(AssertUnwindSafe(|| init(&context)))
            .unwrap_or_else(|panic| Err(HandlerError::new("panic", panic_text(&*panic))));
        ownership::end_forked_process();
        let refused = |message: String| {
            template.refuse(&message);
            message
        };
        let mut state = made
            .map_err(|error| refused(format!("initialisation failed: {}: {}", error.code, error.message)))?;
        let before = || {
            before_fork.iter_mut().for_each(|hook| hook(&mut state));
            ownership::end_forked_process();
        };
        let link = template.serve(before).map_err(refused)?;
        // From here on this is a worker, and the link has taken the place of the template's socket.
        ownership::claim().map_err(|error| error.to_string())?;
        drop((context, template));
        let init: BoxedInit<S> = Box::new(move |start| {
            after_fork.map_or(Ok(()), |hook| hook(&mut state, start))?;
            Ok(state)
        });
        Server { operations, fallback, ..Server::started_by(init) }.open(link)
    }

    fn open(self, link: OwnedFd) -> Result<ExitCode, String> {
        let text = |error: std::io::Error| error.to_string();
        let signals = termination().map_err(text)?;
        let writer = Arc::new(Writer::new(&link).map_err(text)?);
        let mut reader = Reader::new();
        let welcome = link::shake_hands(&link, &mut reader, &writer)?;
        let Self { init, operations, fallback, .. } = self;
        let handler =
            move |job: &Job, ctx: &Ctx<S>| match operations.get(ctx.operation()).or(fallback.as_ref()) {
                Some(handler) => handler(job, ctx),
                None => {
                    let message =
                        format!("this worker has no operation '{}'", ctx.operation().escape_debug());
                    Reply::Failed(HandlerError::new("unknown_operation", message).caller())
                }
            };
        let pool = Pool::new(link, welcome, reader, writer, Box::new(handler)).map_err(text)?;
        Ok(pool.run(&signals, init))
    }
}

fn boxed<S, R, F>(handler: F) -> BoxedHandler<S>
where
    R: Into<Vec<u8>>,
    F: Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
{
    Box::new(move |job, ctx| match handler(job, ctx) {
        Ok(result) => Reply::Result(result.into()),
        Err(error) => Reply::Failed(error),
    })
}

/// A descriptor that becomes readable on SIGTERM. The variable that named the link stays set: changing
/// the environment is not safe once a C library has started threads, and the descriptor itself is closed
/// in children.
fn termination() -> std::io::Result<OwnedFd> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGTERM, theirs)?;
    debug_assert!(std::env::var_os(LINK_VARIABLE).is_some());
    Ok(ours.into())
}

//! [`serve`], and the type [`Server`], which defines a worker with several handlers and shared state. Takes over the
//! inherited link, or initialises a template that forks workers. `pool` then runs the jobs, and `link` exchanges the
//! frames.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;

use bulkhead_shared::limits::truncate;
use bulkhead_shared::template_protocol::{TEXT_BYTES_MAX, TemplateMessage};
use bulkhead_shared::worker_protocol::LINK_VARIABLE;

use crate::context::{Ctx, Job, StartCtx, StatusReceiver};
use crate::crash_recorder;
use crate::link::{self, Reader, Writer};
use crate::log;
use crate::ownership;
use crate::pool::{Handler, Pool, run_user_code};
use crate::reply::{HandlerError, Reply};
use crate::template::{self, Template};

/// Exit status of a program that was not started as a worker.
const USAGE: u8 = 2;

/// Serves jobs of all operations with one function until the supervisor stops the worker.
///
/// Returns only if the program was not started as a worker, or if the worker cannot start.
pub fn serve<R, F>(handler: F) -> ExitCode
where
    R: Into<Vec<u8>>,
    F: Fn(&Job, &Ctx) -> Result<R, HandlerError> + Send + Sync + 'static,
{
    Server::new().handler(handler).serve()
}

type BoxedInit<S> = Box<dyn FnOnce(&StartCtx) -> Result<S, HandlerError> + Send>;
type BoxedHandler<S> = Box<Handler<S>>;
type BeforeFork<S> = Box<dyn FnMut(&mut S) + Send>;
type BeforeSeal = fn() -> Result<(), HandlerError>;
type AfterFork<S> = Box<dyn FnOnce(&mut S, &StartCtx) -> Result<(), HandlerError> + Send>;

/// A worker with several operations and shared state.
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
///
/// [`Server::init`] must be called first and only once, because it sets the type of the handlers' state. Any
/// other order does not compile.
///
/// ```compile_fail
/// use bulkhead_worker::{HandlerError, Server};
///
/// Server::new()
///     .operation("echo", |job, _ctx| Ok(job.payload().to_vec()))
///     .init(|_| Ok::<_, HandlerError>(()));
/// ```
///
/// ```compile_fail
/// use bulkhead_worker::{HandlerError, Server};
///
/// Server::new().init(|_| Ok::<_, HandlerError>(())).init(|_| Ok::<_, HandlerError>(()));
/// ```
///
/// ```compile_fail
/// use bulkhead_worker::{HandlerError, Server};
///
/// Server::new().before_fork(|()| {}).init(|_| Ok::<_, HandlerError>(()));
/// ```
pub struct Server<S = (), Stage = Configured> {
    init: BoxedInit<S>,
    before_fork: Option<BeforeFork<S>>,
    after_fork: Option<AfterFork<S>>,
    operations: BTreeMap<String, BoxedHandler<S>>,
    fallback: Option<BoxedHandler<S>>,
    /// The first method call that replaced a value set by an earlier call. `serve` reports this call as an error.
    repeated: Option<String>,
    /// Stack size of the handler threads in bytes, or `None` for the default of the standard library.
    stack_bytes: Option<usize>,
    /// Function that runs in each worker after `init` and the hooks. Creates everything that the SDK needs for jobs and
    /// that the seal would forbid.
    before_seal: Option<BeforeSeal>,
    stage: PhantomData<Stage>,
}

/// Typestate of a [`Server`] on which [`init`](Server::init) can still be called.
#[derive(Debug)]
pub enum Blank {}

/// Typestate of a [`Server`] on which `init`, a handler or a hook has been set.
#[derive(Debug)]
pub enum Configured {}

impl Default for Server<(), Blank> {
    fn default() -> Self {
        Self::new()
    }
}

impl Server<(), Blank> {
    /// Creates a worker without handlers and without state.
    pub fn new() -> Self {
        Self::started_by(Box::new(|_| Ok(())))
    }

    /// Sets the function that runs before the first job and creates the state that all handlers share.
    /// Handlers access the state with [`Ctx::state`]. `init` runs on the first handler thread, which lives as
    /// long as the worker. Other handler threads start and exit as needed.
    ///
    /// `init` must return within the `start.ready` time limit, but can ask for more time. If `init` fails, the worker
    /// does not start, and operators see the reason.
    ///
    /// Must be called before handlers and hooks are added, because these depend on the type of the state.
    pub fn init<S, E, I>(self, init: I) -> Server<S>
    where
        E: Into<HandlerError>,
        I: FnOnce(&StartCtx) -> Result<S, E> + Send + 'static,
    {
        let init: BoxedInit<S> = Box::new(move |start| init(start).map_err(Into::into));
        Server::started_by(init)
    }
}

impl<S, Stage> Server<S, Stage> {
    fn started_by(init: BoxedInit<S>) -> Self {
        Self {
            init,
            before_fork: None,
            after_fork: None,
            operations: BTreeMap::new(),
            fallback: None,
            repeated: None,
            stack_bytes: None,
            before_seal: None,
            stage: PhantomData,
        }
    }

    pub(crate) fn stack_bytes(self, bytes: usize) -> Self {
        Self { stack_bytes: Some(bytes), ..self }
    }

    fn configured(self) -> Server<S> {
        Server {
            init: self.init,
            before_fork: self.before_fork,
            after_fork: self.after_fork,
            operations: self.operations,
            fallback: self.fallback,
            repeated: self.repeated,
            stack_bytes: self.stack_bytes,
            before_seal: self.before_seal,
            stage: PhantomData,
        }
    }
}

impl<S> Server<S> {
    #[cfg(feature = "tokio")]
    pub(crate) fn before_seal(self, prepare: BeforeSeal) -> Self {
        Self { before_seal: Some(prepare), ..self }
    }

    /// Records a repeated method call. `is_again` is true if the call has replaced the value set by an earlier call.
    fn set(mut self, is_again: bool, call: impl FnOnce() -> String) -> Self {
        self.repeated = self.repeated.or_else(|| is_again.then(call));
        self
    }

    fn with_fallback(mut self, handler: BoxedHandler<S>) -> Self {
        let is_again = self.fallback.replace(handler).is_some();
        self.set(is_again, || "handler".into())
    }
}

impl<S: Send + Sync + 'static, Stage> Server<S, Stage> {
    /// Sets a hook that runs in the template before each fork (`start.mode = "fork"`). The process must have
    /// a single thread when the hook returns.
    #[must_use]
    pub fn before_fork<F>(self, hook: F) -> Server<S>
    where
        F: FnMut(&mut S) + Send + 'static,
    {
        let mut server = self.configured();
        let is_again = server.before_fork.replace(Box::new(hook)).is_some();
        server.set(is_again, || "before_fork".into())
    }

    /// Sets a hook that runs in each forked worker before the first job, on the first handler thread
    /// (`start.mode = "fork"`). All forked workers start with the same state in the program's random number
    /// generators, and share file offsets and connections. They do not inherit the template's threads, timers
    /// or file locks. The hook must recreate whatever the worker needs. If the hook fails, the worker does
    /// not start.
    #[must_use]
    pub fn after_fork<E, F>(self, hook: F) -> Server<S>
    where
        E: Into<HandlerError>,
        F: FnOnce(&mut S, &StartCtx) -> Result<(), E> + Send + 'static,
    {
        let mut server = self.configured();
        let hook: AfterFork<S> = Box::new(move |state, start| hook(state, start).map_err(Into::into));
        let is_again = server.after_fork.replace(hook).is_some();
        server.set(is_again, || "after_fork".into())
    }

    /// Sets the handler for one operation.
    #[must_use]
    pub fn operation<R, F>(self, name: impl Into<String>, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        let (mut server, name) = (self.configured(), name.into());
        let is_again = server.operations.insert(name.clone(), boxed(handler)).is_some();
        server.set(is_again, || format!("operation({name:?})"))
    }

    /// Sets the handler for all operations that have no handler of their own. If this handler is not set,
    /// jobs with such operations fail with the code `unknown_operation`.
    #[must_use]
    pub fn handler<R, F>(self, handler: F) -> Server<S>
    where
        R: Into<Vec<u8>>,
        F: Fn(&Job, &Ctx<S>) -> Result<R, HandlerError> + Send + Sync + 'static,
    {
        self.configured().with_fallback(boxed(handler))
    }

    /// Sets a handler that can return any kind of [`Reply`].
    #[doc(hidden)]
    #[must_use]
    pub fn raw_handler<F>(self, handler: F) -> Server<S>
    where
        F: Fn(&Job, &Ctx<S>) -> Reply + Send + Sync + 'static,
    {
        self.configured().with_fallback(Box::new(handler))
    }

    /// Serves jobs until the supervisor stops the worker. Returns only if the program was not started as a
    /// worker, or if the worker cannot start.
    pub fn serve(mut self) -> ExitCode {
        let Some(link) = link::inherited(LINK_VARIABLE).filter(link::is_socket) else {
            log::line(format_args!(
                "this program is a worker, which bulkhead-supervisor must start. In workers.toml:\n\n    \
                 [bulkhead.NAME]\n    command = [\"{}\"]",
                std::env::args().next().unwrap_or_default().escape_debug()
            ));
            return ExitCode::from(USAGE);
        };
        // Prevents other processes of the same user from reading this process's memory or taking its
        // descriptors.
        let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
        if let Some(call) = self.repeated.take() {
            let message = format!("`{call}` of `Server` was called twice: remove one of the calls");
            self.init = Box::new(|_| Err(HandlerError::new("server", message)));
        }
        let claimed = ownership::mark_worker().map_err(|error| format!("madvise(MADV_WIPEONFORK): {error}"));
        let started = claimed
            .and_then(|()| if template::is_wanted() { self.open_template(link) } else { self.open(link) });
        started.unwrap_or_else(|message| {
            log::line(format_args!("the worker cannot start: {message}"));
            ExitCode::FAILURE
        })
    }

    /// Initialises the template, which then forks workers. Serves jobs in each forked worker. Returns in the
    /// template only on an error.
    fn open_template(self, socket: OwnedFd) -> Result<ExitCode, String> {
        let template = Arc::new(Template::new(socket)?);
        let Self {
            init, mut before_fork, after_fork, operations, fallback, stack_bytes, before_seal, ..
        } = self;
        let context = StartCtx { to: StatusReceiver::Keeper(template.clone()) };
        let made = run_user_code(|| init(&context)).and_then(|made| made);
        let refused = |message: String| {
            template.report(TemplateMessage::StartFailed(truncate(&message, TEXT_BYTES_MAX)));
            message
        };
        let mut state = made
            .map_err(|error| refused(format!("initialisation failed: {}: {}", error.code, error.message)))?;
        let before = || {
            before_fork.iter_mut().for_each(|hook| hook(&mut state));
            ownership::end_forked_process();
        };
        let link = template.serve(before).map_err(refused)?;
        // This process is now a forked worker, and the link has replaced the template's socket.
        ownership::mark_worker().map_err(|error| error.to_string())?;
        drop((context, template));
        let init: BoxedInit<S> = Box::new(move |start| {
            after_fork.map_or(Ok(()), |hook| hook(&mut state, start))?;
            Ok(state)
        });
        Server::<S> { operations, fallback, stack_bytes, before_seal, ..Server::started_by(init) }.open(link)
    }

    fn open(self, link: OwnedFd) -> Result<ExitCode, String> {
        let text = |error: std::io::Error| error.to_string();
        let signals = termination().map_err(text)?;
        let writer = Arc::new(Writer::new(&link).map_err(text)?);
        let mut reader = Reader::new();
        let mut welcome = link::handshake(&link, &mut reader, &writer)?;
        welcome.journal_file.take().into_iter().for_each(crash_recorder::install);
        let Self { init, operations, fallback, stack_bytes, before_seal, .. } = self;
        let init = move |start: &StartCtx| {
            let state = init(start)?;
            ownership::end_forked_process();
            before_seal.map_or(Ok(()), |prepare| prepare())?;
            Ok(state)
        };
        let handler =
            move |job: &Job, ctx: &Ctx<S>| match operations.get(ctx.operation()).or(fallback.as_ref()) {
                Some(handler) => handler(job, ctx),
                None => {
                    let known: Vec<String> = operations.keys().map(|name| format!("{name:?}")).collect();
                    let message = format!(
                        "this worker has no operation {:?}; available operations: {}",
                        ctx.operation(),
                        if known.is_empty() { "none".into() } else { known.join(", ") }
                    );
                    Reply::Failed(HandlerError::new("unknown_operation", message).caller())
                }
            };
        let pool = Pool::new(link, welcome, reader, writer, Box::new(handler), stack_bytes).map_err(text)?;
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

/// Returns a descriptor that becomes readable on SIGTERM. Does not unset the environment variable that contains the
/// link's descriptor number, because changing the environment is unsafe once a C library has started threads. Child
/// processes inherit the variable, but not the descriptor.
fn termination() -> std::io::Result<OwnedFd> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGTERM, theirs)?;
    debug_assert!(std::env::var_os(LINK_VARIABLE).is_some());
    Ok(ours.into())
}

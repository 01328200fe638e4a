//! Runs the main thread of the control plane, which serves the admin API, handles signals, stores events and reads the
//! workers' output. Sends commands to the data plane and receives notices, but owns no jobs. `readers` and `jobs_http`
//! have separate threads.

mod admin_socket;
mod advice;
mod bulkheads;
mod config;
mod connections;
mod crashes;
mod cross_site;
mod dashboard;
pub mod handover;
mod http;
mod jobs;
mod jobs_http;
mod metrics;
mod openapi;
mod outcomes;
mod paths;
mod readers;
mod readiness;
mod reload;
mod responses;
mod routes;
mod sockets;
mod stop;
mod streams;
mod take_over;
mod tcp;
mod temporary;
mod tokens;
pub mod upgrade;
mod waiting;
mod watch;
mod watchdog;

use admin_socket::CONNECTIONS_MAX;

/// Returns the maximum number of descriptors that TCP clients can use at the same time.
pub fn tcp_descriptors(config: &SupervisorConfig) -> u64 {
    // Each job needs two descriptors, one for each end of its connection to the data plane.
    const ADMIN: usize = CONNECTIONS_MAX
        + waiting::WAITING_MAX
        + waiting::HEALTH_MAX
        + waiting::REFUSED_MAX
        + 2 * jobs::JOBS_MAX;
    let admin = config.http.as_ref().map_or(0, |_| ADMIN as u64);
    admin + jobs_http::descriptors(config)
}

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use bulkhead_api::{CrashReport, EventKind, Severity, Snapshot, Victim};
use bulkhead_linux::notify;
use futures_util::StreamExt;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook_tokio::Signals;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::observe::crashes::{CrashThread, Crashes};
use crate::observe::events::Events;
use crate::observe::output::Output;
use crate::observe::process::{self, ResidentSizes};
use crate::observe::symbolizer::{self, Symbolizer, SymbolizerOptions};
use crate::sockets::{InheritedSockets, Sockets};
use bulkhead_config::{Config, SupervisorConfig, Token};
use bulkhead_linux::peer::UnrelatedProcesses;
use bulkhead_plane::command::{
    Command, CommandSender, DroppableNotice, Event, REPLAYS_MAX, SteerError, WorkerProcess,
};
use bulkhead_plane::counters::SharedCounters;
use bulkhead_plane::handover::inherited;
use bulkhead_plane::notices::{Milestone, Notice, NoticeReceiver};
use bulkhead_plane::threads::{ThreadMonitor, panic_on_request};

use connections::{Dispatcher, Queue};
use handover::{Handover, HandoverOptions};
pub use reload::ActiveConfig;
use reload::Reloads;

/// Signals with which operators control a standalone supervisor.
pub const HANDLED_SIGNALS: [i32; 5] = [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2];

/// Interval between memory checks of workers for which `recycle.rss` is set.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval between checks for suppressed events that have not been reported yet.
const SUPPRESSED_INTERVAL: Duration = Duration::from_secs(1);

/// Pause between batches when reaping orphans.
const REAP_PAUSE: Duration = Duration::from_millis(10);

/// Maximum time to wait for open streams and unfinished responses when the control plane shuts down.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(4);

/// Maximum number of times to yield to the runtime while waiting for the last output of an exited worker. The wait is
/// limited, because another process can hold the pipe open.
const TAIL_READ_YIELDS_MAX: u32 = 64;

/// Maximum number of bytes of standard error output to include in a `worker_exited` event. A crash report contains
/// more.
const EVENT_TAIL_BYTES: usize = 2 * 1024;

/// Mode in which the supervisor runs: in its own process or embedded in an application.
pub enum RunMode {
    /// The supervisor runs in its own process. It handles signals, notifies the service manager and has sockets.
    Standalone {
        /// The bound admin socket.
        admin: UnixListener,
        /// The jobs socket and the admin socket. The control plane periodically checks that the socket files still
        /// exist.
        sockets: Arc<Sockets>,
    },
    /// The supervisor runs in an application's process. It handles no signals, does not notify the service manager, and
    /// has no sockets.
    Embedded,
}

/// Arguments for starting the control plane.
pub struct Options {
    /// Mode in which the supervisor runs: in its own process or embedded in an application.
    pub mode: RunMode,
    /// Sender of commands to the data plane.
    pub commands: CommandSender,
    /// Receiver of notices from the data plane. The control plane shuts down when the channel closes.
    pub notices: NoticeReceiver,
    /// Counters that the control plane shares with the data plane.
    pub counters: Arc<SharedCounters>,
    /// The active configuration, along with the data needed to reload the configuration file.
    pub active_config: ActiveConfig,
    /// Handle for accessing crash reports, and handle to the thread that stores the reports.
    pub crashes: (Crashes, CrashThread),
    /// Options for starting symbolizers.
    pub symbolizer: SymbolizerOptions,
    /// ID of the user who can connect to the admin socket, in addition to root.
    pub own_uid: u32,
    /// Configuration that is active at startup.
    pub config: Arc<Config>,
    /// The listening TCP socket and the token. `None` if `http` is not configured.
    pub http: Option<(TcpListener, Token)>,
    /// The bound TCP socket for jobs, if `jobs_http` is configured.
    pub jobs_http: Option<TcpListener>,
    /// Flags that show which listening sockets belong to the service manager.
    pub inherited: InheritedSockets,
    /// Monitor for the essential threads. If one of them exits early, the supervisor shuts down.
    pub threads: ThreadMonitor,
    /// Options for upgrading this supervisor, and the predecessor's state if this supervisor was started by an upgrade.
    pub handover: HandoverOptions,
    /// Lock on the folder for crash reports.
    pub crashes_lock: Option<OwnedFd>,
    /// Cache of processes that are known not to be descendants of the supervisor.
    pub unrelated: Arc<UnrelatedProcesses>,
}

type Shared = Arc<Control>;

/// State shared by all parts of the control plane.
pub(crate) struct Control {
    commands: CommandSender,
    events: Events,
    output: Arc<Output>,
    crashes: Crashes,
    symbolizer: Symbolizer,
    /// Recent resource usage of the workers.
    usage: Mutex<advice::UsageSamples>,
    /// Cache of the resident sizes of workers.
    resident_sizes: ResidentSizes,
    /// Permits that limit the number of concurrent replays.
    replays: Arc<Semaphore>,
    reloads: Reloads,
    readiness: readiness::Readiness,
    sockets: sockets::SocketFiles,
    /// Flags that show which listening sockets belong to the service manager.
    inherited: InheritedSockets,
    is_started: AtomicBool,
    is_stopping: AtomicBool,
    /// Task that waits for `drain_notice` and then begins the drain. Set once the supervisor has been asked to stop.
    drain_notice: Mutex<Option<AbortHandle>>,
    /// True if the supervisor is embedded in an application.
    is_embedded: bool,
    /// Permits that limit the number of concurrent streams.
    streams: Arc<Semaphore>,
    /// State of `GET /v1/watch`.
    watch: watch::Watch,
    handover: Handover,
    /// Cache of processes that are known not to be descendants of the supervisor.
    unrelated: Arc<UnrelatedProcesses>,
    /// Marker to which each unfinished job request over HTTP holds a reference. The reference count shows whether any
    /// such requests are unfinished.
    job_requests: Arc<()>,
    /// Permits that limit the number of concurrent jobs submitted over the admin API.
    jobs: Arc<Semaphore>,
    /// Permits that limit the number of connections to the data plane for `jobs_http` clients.
    token_jobs: Arc<Semaphore>,
    tokens: tokens::TokenTable,
    jobs_http: jobs_http::JobsHttpCounters,
    counters: Arc<SharedCounters>,
    /// The active configuration, which a reload replaces.
    config: RwLock<Arc<Config>>,
    /// True once the control plane must shut down.
    shutdown: tokio::sync::watch::Sender<bool>,
}

/// Handle to the control plane's main thread.
#[derive(Debug)]
pub struct ControlThread(JoinHandle<()>);

impl ControlThread {
    /// Waits until the control plane has shut down. The shutdown begins when the notice channel closes.
    pub fn join(self) {
        // A panic in the thread has already been reported.
        let _ = self.0.join();
    }
}

/// Starts the control plane. From then on, a standalone supervisor handles signals.
pub fn start(options: Options) -> io::Result<ControlThread> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Options {
        mode,
        commands,
        notices,
        counters,
        active_config,
        crashes,
        symbolizer,
        own_uid,
        config,
        http,
        jobs_http,
        inherited,
        threads,
        handover,
        crashes_lock,
        unrelated,
    } = options;
    let (crashes, crash_thread) = crashes;
    let symbolizer = symbolizer::start(symbolizer, crashes.native_sender(), &threads)?;
    let (admin, sockets) = match mode {
        RunMode::Standalone { admin, sockets } => (Some(admin), Some(sockets)),
        RunMode::Embedded => (None, None),
    };
    let is_embedded = admin.is_none();
    let admin_copy = admin.as_ref().map(|admin| admin.try_clone().map(OwnedFd::from)).transpose()?;
    let tcp = tcp_listeners(&config.supervisor, http.as_ref().map(|(socket, _)| socket), jobs_http.as_ref())?;
    let (handover, predecessor) = Handover::new(handover, crashes_lock, tcp);
    admin.as_ref().map_or(Ok(()), |admin| admin.set_nonblocking(true))?;
    let control = Arc::new(Control {
        commands,
        events: Events::default(),
        output: Arc::default(),
        crashes,
        symbolizer,
        usage: Mutex::default(),
        resident_sizes: ResidentSizes::default(),
        replays: Arc::new(Semaphore::new(REPLAYS_MAX)),
        reloads: Reloads::new(active_config),
        readiness: readiness::Readiness::default(),
        sockets: sockets::SocketFiles::new(sockets, admin_copy),
        inherited,
        is_started: AtomicBool::new(false),
        is_stopping: AtomicBool::new(false),
        drain_notice: Mutex::default(),
        is_embedded,
        streams: Arc::new(Semaphore::new(streams::STREAMS_MAX)),
        watch: watch::Watch::default(),
        handover,
        unrelated,
        job_requests: Arc::default(),
        jobs: Arc::new(Semaphore::new(jobs::JOBS_MAX)),
        token_jobs: Arc::new(Semaphore::new(config.supervisor.jobs_http_max)),
        tokens: tokens::TokenTable::new(&config),
        jobs_http: jobs_http::JobsHttpCounters::default(),
        counters: counters.clone(),
        config: RwLock::new(config),
        shutdown: tokio::sync::watch::channel(false).0,
    });
    let (local, tcp, signals) = {
        let _within = runtime.enter();
        let listener = admin.map(tokio::net::UnixListener::from_std).transpose()?;
        let tcp = http.map(|(socket, token)| tcp::register(socket, token)).transpose()?;
        let signals = (!is_embedded)
            .then(|| Ok::<_, io::Error>((Signals::new(HANDLED_SIGNALS)?, Signals::new([SIGCHLD])?)));
        (listener.map(|listener| (listener, own_uid)), tcp, signals.transpose()?)
    };
    let (serving, reader_queues) = serving(local, tcp, &control.shutdown);
    let readers = readers::start(control.clone(), reader_queues, &threads)?;
    let jobs_http =
        jobs_http.map(|socket| jobs_http::start(control.clone(), socket, &threads)).transpose()?;
    let tasks = threads.clone();
    let run = move || {
        runtime.block_on(async {
            if let Some((signals, deaths)) = signals {
                tokio::spawn(tasks.wrap_task("signals", stop::handle_signals(control.clone(), signals)));
                tokio::spawn(tasks.wrap_task("orphans", reap_orphans(control.clone(), deaths)));
            }
            let served = tokio::spawn(tasks.wrap_task("admin API", serve(control.clone(), serving)));
            if let Some(predecessor) = predecessor {
                tokio::spawn(take_over::run(control.clone(), predecessor));
            }
            tokio::spawn(tasks.wrap_task("reload", reload::watch(control.clone())));
            tokio::spawn(tasks.wrap_task("sockets", sockets::watch(control.clone())));
            tokio::spawn(tasks.wrap_task("temporary directories", temporary::watch(control.clone())));
            tokio::spawn(tasks.wrap_task("memory", watch_memory(control.clone())));
            tokio::spawn(tasks.wrap_task("advice", advice::watch(control.clone())));
            tokio::spawn(tasks.wrap_task("events", report_suppressed(control.clone())));
            tokio::spawn(tasks.wrap_task("on request", panic_on_request("CONTROL")));
            tokio::spawn(tasks.wrap_task("watchdog", watchdog::watch(control.clone())));
            handle_notices(&control, notices, &counters).await;
            if control.handover.is_on_probation() {
                // The predecessor serves the listeners and socket files again once this process has exited.
                control.handover.set_listening(false);
                control.sockets.set_owner(false);
            }
            control.report_stopped();
            control.events.wake_readers();
            control.shutdown.send_replace(true);
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, served).await;
        });
        // The readers' thread also exits on shutdown. A panic in the thread has already been reported.
        let _ = readers.join();
        let _ = jobs_http.map(JoinHandle::join);
        // The runtime and `control` hold the last senders of requests to the crash thread. When the senders are
        // dropped, the crash thread exits.
        drop(runtime);
        drop(control);
        crash_thread.finish();
        crate::observe::logging::finish();
    };
    Ok(ControlThread(threads.spawn("control", run)?))
}

type Local = (tokio::net::UnixListener, u32);
type Tcp = (tokio::net::TcpListener, tcp::RequestCheck);

/// Listeners of the admin API, each with a queue of connections for the main thread.
struct Serving {
    local: (Option<Local>, Dispatcher<UnixStream>, Queue<UnixStream>),
    tcp: Option<(Tcp, Dispatcher<TcpStream>, Queue<TcpStream>)>,
}

/// Creates two channels for each listener: one to the main thread and one to the low-priority reader thread.
fn serving(
    local: Option<Local>,
    tcp: Option<Tcp>,
    shutdown: &tokio::sync::watch::Sender<bool>,
) -> (Serving, readers::ReaderQueues) {
    let (dispatcher, own, local_readers) =
        connections::channels(shutdown.subscribe(), admin_socket::ADMITTED_MAX);
    let local = (local, dispatcher, own);
    let (tcp, tcp_readers) = tcp
        .map(|tcp| {
            let max = CONNECTIONS_MAX + waiting::HEALTH_MAX;
            let (dispatcher, own, readers) = connections::channels(shutdown.subscribe(), max);
            let check = tcp.1.clone();
            ((tcp, dispatcher, own), (readers, check))
        })
        .unzip();
    (Serving { local, tcp }, readers::ReaderQueues { local: local_readers, tcp: tcp_readers })
}

/// Accepts and serves connections until the control plane shuts down.
async fn serve(control: Arc<Control>, serving: Serving) {
    let Serving { local: (listener, dispatcher, queue), tcp } = serving;
    let router = http::router(control.clone());
    let local = async {
        let accept = async {
            match listener {
                Some((listener, own_uid)) => {
                    admin_socket::accept_all(&control, listener, own_uid, dispatcher).await
                }
                None => control.until_shutdown(std::future::pending()).await,
            }
        };
        tokio::join!(accept, connections::serve(queue, router))
    };
    let over_tcp = async {
        if let Some(((listener, check), dispatcher, queue)) = tcp {
            let router = tcp::router(control.clone(), check);
            tokio::join!(tcp::accept_all(&control, listener, dispatcher), connections::serve(queue, router));
        }
    };
    tokio::join!(local, over_tcp);
}

/// Reaps exited orphans that this process has inherited. For example, process 1 of a container inherits the orphans
/// left by `docker exec`.
async fn reap_orphans(control: Arc<Control>, mut deaths: Signals) {
    while deaths.next().await.is_some() {
        while control.commands.request(|reply| Command::ReapOrphans { reply }).await != Some(false) {
            tokio::time::sleep(REAP_PAUSE).await;
        }
    }
}

async fn handle_notices(control: &Control, mut notices: NoticeReceiver, counters: &SharedCounters) {
    let mut dropped = 0;
    while let Some(notice) = notices.recv().await {
        match notice {
            Notice::Output(output) => {
                control.output.read(output);
            }
            Notice::Droppable(DroppableNotice::Event(mut event)) => {
                if let EventKind::WorkerExited { pid, .. } = event.kind {
                    let tail = control.stderr_tail(pid).await;
                    event.stderr_tail = tail.map(|tail| tail_of(&tail, EVENT_TAIL_BYTES).to_owned());
                }
                control.events.add(*event);
            }
            Notice::Droppable(DroppableNotice::Crash { mut report, permit, record }) => {
                control.add_stderr_tail(&mut report).await;
                let id = report.id;
                control.crashes.add(report, permit);
                if let Some(record) = record {
                    control.symbolizer.submit(id, record);
                }
            }
            Notice::Milestone(Milestone::Started) => control.report_started(),
            Notice::Milestone(Milestone::Stopping) => {
                control.set_stopping();
            }
        }
        let now_dropped = counters.notices_dropped.load(Ordering::Relaxed);
        if now_dropped > dropped {
            tracing::error!(
                "{} events were dropped because too many occurred in a short time",
                now_dropped - dropped
            );
            dropped = now_dropped;
        }
    }
}

impl Control {
    fn config(&self) -> Arc<Config> {
        self.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the active configuration.
    fn set_config(&self, config: Arc<Config>) {
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
    }

    /// Runs a task until it completes or the control plane shuts down.
    async fn until_shutdown(&self, task: impl Future<Output = ()>) {
        let mut shutdown = self.shutdown.subscribe();
        tokio::select! {
            () = task => {}
            _ = shutdown.wait_for(|has_begun| *has_begun) => {}
        }
    }

    /// Runs a task at a fixed interval until the control plane shuts down. A run that is in progress at shutdown is
    /// completed.
    async fn every<T: Future<Output = ()>>(
        self: Arc<Self>,
        interval: Duration,
        task: impl Fn(Arc<Self>) -> T,
    ) {
        let mut shutdown = self.shutdown.subscribe();
        let mut interval = tokio::time::interval(interval);
        loop {
            tokio::select! {
                _ = interval.tick() => {}
                _ = shutdown.wait_for(|has_begun| *has_begun) => return,
            }
            task(self.clone()).await;
        }
    }

    /// Reports to the data plane each worker whose resident size exceeds `recycle.rss`. The data plane decides whether
    /// to replace the worker.
    async fn check_memory(&self) {
        let limits = self.reloads.rss_limits();
        if limits.is_empty() {
            return;
        }
        let Some(processes) = self.commands.request(|reply| Command::WorkerProcesses { reply }).await else {
            return;
        };
        for WorkerProcess { bulkhead, pid, generation, .. } in processes {
            let Some(max) = limits.get(&*bulkhead) else { continue };
            let Some(rss_bytes) = process::resident_bytes(pid).filter(|bytes| bytes > max) else { continue };
            // If the command queue is full, the command is dropped, and the next check reports the worker
            // again.
            let bulkhead = bulkhead.as_ref().to_owned();
            let _ = self.commands.send(Command::ReportMemory { bulkhead, pid, generation, rss_bytes });
        }
    }

    fn report_started(&self) {
        self.is_started.store(true, Ordering::SeqCst);
        self.handover.started.notify_one();
        tracing::info!(bulkheads = self.reloads.count(), "ready");
        self.notify_systemd(&[NotifyState::Ready]);
    }

    /// Notifies the service manager, if there is one. Does nothing while another process is the main process of the
    /// service, as during an upgrade. Also does nothing in an embedded supervisor, because notifications are the
    /// application's responsibility.
    fn notify_systemd(&self, states: &[NotifyState<'_>]) {
        let message: String = states.iter().map(|state| format!("{state}\n")).collect();
        if !self.is_embedded
            && self.handover.is_main()
            && let Err(error) = notify::notify(&message)
        {
            tracing::warn!("failed to notify the service manager: {error}");
        }
    }

    /// Returns true if any job request over HTTP is still unfinished.
    fn has_job_requests(&self) -> bool {
        Arc::strong_count(&self.job_requests) > 1
    }

    fn report_stopped(&self) {
        self.events.add(Event::new(Severity::Info, None, EventKind::Stopped {}));
    }

    /// Adds the end of the worker's standard error output to a crash report. Reports about `exec` programs already
    /// contain the program's output.
    async fn add_stderr_tail(&self, report: &mut CrashReport) {
        if report.victim == Victim::Worker {
            report.stderr_tail = self.stderr_tail(report.pid).await;
        }
    }

    /// Returns the end of an exited process's standard error output.
    async fn stderr_tail(&self, pid: u32) -> Option<String> {
        for _ in 0..TAIL_READ_YIELDS_MAX {
            if !self.output.has_open_stderr(pid) {
                break;
            }
            tokio::task::yield_now().await;
        }
        self.output.tail(pid)
    }

    /// Requests a snapshot of one bulkhead, or of all bulkheads, from the data plane. Adds the resource usage
    /// from `/proc`. Returns `None` if the data plane does not respond in time.
    async fn snapshots(&self, bulkhead: Option<&str>) -> Option<Vec<Snapshot>> {
        let bulkhead = bulkhead.map(str::to_owned);
        let mut snapshots = self.commands.request(|reply| Command::Snapshot { bulkhead, reply }).await?;
        snapshots.iter_mut().for_each(add_usage);
        // After a reload, the data plane has added bulkheads at the end.
        let config = self.config();
        let names = config.bulkheads.iter().map(|bulkhead| bulkhead.name.as_str());
        let positions: HashMap<&str, usize> = names.zip(0..).collect();
        snapshots
            .sort_by_key(|snapshot| positions.get(snapshot.name.as_str()).copied().unwrap_or(usize::MAX));
        Some(snapshots)
    }

    /// Requests a snapshot of one tenant's part of a bulkhead. Adds the workers' resource usage from `/proc`.
    async fn tenant_snapshot(
        &self,
        bulkhead: &str,
        tenant: String,
    ) -> Option<Result<Box<Snapshot>, SteerError>> {
        let bulkhead = bulkhead.to_owned();
        let request = self.commands.request(|reply| Command::TenantSnapshot { bulkhead, tenant, reply });
        let mut snapshot = request.await?;
        snapshot.iter_mut().for_each(|snapshot| add_usage(snapshot));
        Some(snapshot)
    }
}

/// Returns duplicates of the TCP listeners, with the name and the configured address of each.
fn tcp_listeners(
    config: &SupervisorConfig,
    http: Option<&TcpListener>,
    jobs_http: Option<&TcpListener>,
) -> io::Result<Vec<(&'static str, String, OwnedFd)>> {
    let http = config.http.as_ref().map(|http| http.address).zip(http);
    let jobs_http = config.jobs_http.zip(jobs_http);
    let named = [(inherited::HTTP, http), (inherited::JOBS_HTTP, jobs_http)];
    let present = named.into_iter().filter_map(|(name, found)| found.map(|found| (name, found)));
    present
        .map(|(name, (address, socket))| Ok((name, address.to_string(), socket.try_clone()?.into())))
        .collect()
}

/// Returns the last `bytes_max` bytes of `text`, or slightly fewer if a character would otherwise be split.
fn tail_of(text: &str, bytes_max: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes_max);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

/// Adds the workers' resource usage, read from `/proc`, to a snapshot.
fn add_usage(snapshot: &mut Snapshot) {
    for worker in &mut snapshot.workers {
        if let Some((rss_bytes, cpu_ms)) = worker.pid.and_then(process::usage) {
            worker.rss_bytes = Some(rss_bytes);
            worker.cpu_ms = Some(cpu_ms);
        }
    }
}

/// Periodically reports the number of suppressed events, until the control plane shuts down.
async fn report_suppressed(control: Arc<Control>) {
    control.every(SUPPRESSED_INTERVAL, |control| async move { control.events.report_suppressed() }).await;
}

async fn watch_memory(control: Arc<Control>) {
    control.every(MEMORY_INTERVAL, |control| async move { control.check_memory().await }).await;
}

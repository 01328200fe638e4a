//! Reloads the configuration on SIGHUP or on an HTTP request, one reload at a time. Also keeps the active
//! configuration. A separate thread reads and validates the file. Only a configuration without errors is sent to the
//! data plane, which applies it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bulkhead_api::{Changes, ConfigProblem, EventKind, RejectedConfig, Reloaded, Severity};
use sd_notify::NotifyState;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore, oneshot};

use super::Control;
use super::Shared;
use super::responses::{parse_bool, problem, problem_with, stuck};
use bulkhead_config::{self as config, Config, ConfigErrors, Profile};
use bulkhead_plane::command::{Command, Event, SteerError};
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::reload::{self, LiveDropped, Reload, SpecInputs, effective_config};
use bulkhead_plane::scrape::ReloadCounts;

/// Maximum time to read the configuration file and check the programs and folders named in it. Shorter than the time
/// limit for an HTTP request.
const READ_TIMEOUT: Duration = Duration::from_secs(7);

/// Maximum number of configuration problems to list in an event. The HTTP response lists all problems.
const EVENT_PROBLEMS_MAX: usize = 10;

/// The active configuration, and the data needed to read a new version of the configuration file.
#[derive(Clone)]
pub struct ActiveConfig {
    /// The most recently applied configuration. A key that can only be changed by a restart keeps the value that it had
    /// when the supervisor started.
    pub config: Arc<Config>,
    /// Confinement layers and user IDs that are available on this machine.
    pub support: Arc<SandboxSupport>,
    /// Limit on open files, which determines the maximum number of clients.
    pub open_files: OpenFiles,
    /// User ID of the supervisor itself.
    pub own_uid: u32,
    /// Names of the tenants that have separate labels in the metrics. These names do not change while the supervisor
    /// runs.
    pub labels: Arc<[String]>,
}

/// State of configuration reloads: the active configuration, pending requests, and counters.
pub(super) struct Reloads {
    active_config: tokio::sync::Mutex<ActiveConfig>,
    /// Semaphore that allows only one thread at a time to read the configuration file.
    reader: Arc<Semaphore>,
    /// Notified on SIGHUP. Several signals that arrive before the next reload starts cause only one reload.
    requested: Notify,
    cached: Mutex<CachedValues>,
    counts: Mutex<ReloadCounts>,
}

/// Values from the active configuration that are needed often.
#[derive(Default)]
struct CachedValues {
    bulkheads: Vec<String>,
    /// Value of `recycle.rss` in bytes for each bulkhead that sets this key.
    recycle_rss: Arc<HashMap<String, u64>>,
    /// Lowest and highest limit that any bulkhead sets for the size of a worker's temporary folder, in bytes. `None` if
    /// no bulkhead limits this size.
    temporary_bytes: Option<(u64, u64)>,
}

impl CachedValues {
    fn of(config: &Config) -> Self {
        let confined = config.bulkheads.iter().filter(|b| b.sandbox.profile != Profile::None);
        let limits_bytes = confined.map(|b| b.sandbox.tmp_bytes).filter(|bytes| *bytes > 0);
        let rss_limits = config.bulkheads.iter().filter_map(|b| Some((b.name.clone(), b.recycle.rss?)));
        Self {
            bulkheads: config.bulkheads.iter().map(|b| b.name.clone()).collect(),
            recycle_rss: Arc::new(rss_limits.collect()),
            temporary_bytes: limits_bytes.clone().min().zip(limits_bytes.max()),
        }
    }
}

/// Reason for rejecting a reload.
#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error("{0}")]
    Config(#[from] ConfigErrors),
    #[error(
        "failed to find bulkhead-worker, which runs `exec` and `library` for bulkhead '{0}': \
         install bulkhead-worker next to bulkhead-supervisor, or in PATH"
    )]
    HostNotFound(String),
    #[error("{0}")]
    Steer(#[from] SteerError),
    #[error("{}", SteerError::Upgrading)]
    Upgrading,
    #[error("the data plane is not responding")]
    Stuck,
    #[error(
        "reading the configuration and the files that it names did not finish within {READ_TIMEOUT:?}: check \
         whether a file system with the configuration, a program or a directory hangs"
    )]
    ReadTimeout,
    #[error("failed to read the configuration: {0}")]
    Internal(String),
}

/// A validated new configuration, with its differences from the active configuration.
struct Prepared {
    after: Arc<Config>,
    changes: Changes,
    reload: Reload,
    /// Maximum number of clients that the limit on open files allows.
    max_clients: usize,
}

impl Reloads {
    pub(super) fn new(active_config: ActiveConfig) -> Self {
        Self {
            cached: Mutex::new(CachedValues::of(&active_config.config)),
            active_config: tokio::sync::Mutex::new(active_config),
            reader: Arc::new(Semaphore::new(1)),
            requested: Notify::new(),
            counts: Mutex::default(),
        }
    }

    fn cached(&self) -> MutexGuard<'_, CachedValues> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the user ID under which the workers of each bulkhead run. Contains only bulkheads whose workers share a
    /// single user ID.
    pub(super) async fn permanent_ids(&self) -> BTreeMap<String, u32> {
        let support = self.active_config.lock().await.support.clone();
        support.ids().map(|ids| ids.permanent()).unwrap_or_default()
    }

    /// Locks the user IDs that the predecessor had locked. Called in the successor after the predecessor has exited.
    pub(super) async fn lock_inherited_ids(&self) {
        if let Some(ids) = self.active_config.lock().await.support.ids() {
            ids.lock_inherited();
        }
    }

    pub(super) fn has(&self, bulkhead: &str) -> bool {
        self.cached().bulkheads.iter().any(|name| name == bulkhead)
    }

    pub(super) fn count(&self) -> usize {
        self.cached().bulkheads.len()
    }

    pub(super) fn rss_limits(&self) -> Arc<HashMap<String, u64>> {
        self.cached().recycle_rss.clone()
    }

    pub(super) fn temporary_bytes(&self) -> Option<(u64, u64)> {
        self.cached().temporary_bytes
    }

    /// Returns the reload counters for the metrics.
    pub(super) fn counts(&self) -> ReloadCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, is_success: bool) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *(if is_success { &mut counts.succeeded } else { &mut counts.rejected }) += 1;
        counts.was_successful = is_success;
    }

    pub(super) fn request(&self) {
        self.requested.notify_one();
    }
}

/// Reloads the configuration on SIGHUP until the control plane shuts down. All signals that arrive during a reload
/// cause a single further reload.
pub(super) async fn watch(control: Arc<Control>) {
    let mut shutdown = control.shutdown.subscribe();
    loop {
        tokio::select! {
            () = control.reloads.requested.notified() => {}
            _ = shutdown.wait_for(|has_begun| *has_begun) => return,
        }
        // All other results have been reported as events.
        if let Err(refused @ ReloadError::Upgrading) = reload(&control, false).await {
            let path = control.reloads.active_config.lock().await.config.path.clone();
            control.report_reload(&path, &Err(refused));
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReloadQuery {
    #[serde(default, deserialize_with = "parse_bool")]
    dry_run: Option<bool>,
}

pub(super) async fn over_http(State(control): State<Shared>, Query(query): Query<ReloadQuery>) -> Response {
    let dry_run = query.dry_run == Some(true);
    // The reload runs as a separate task so that it is completed even if the client disconnects.
    let task = tokio::spawn(async move { reload(&control, dry_run).await });
    match task.await {
        Ok(Ok(changes)) => axum::Json(Reloaded { dry_run, changes }).into_response(),
        Ok(Err(error)) => error.into_response(),
        Err(_) => stuck(),
    }
}

impl IntoResponse for ReloadError {
    fn into_response(self) -> Response {
        let detail = self.to_string();
        match self {
            Self::Config(errors) => {
                let problems = errors.problems().iter().map(describe).collect();
                let fields = RejectedConfig { errors: problems, file: errors.path().display().to_string() };
                let Value::Object(fields) = json!(fields) else {
                    unreachable!("structs serialize to objects")
                };
                problem_with(StatusCode::UNPROCESSABLE_ENTITY, &detail, fields)
            }
            Self::HostNotFound(_) => problem(StatusCode::UNPROCESSABLE_ENTITY, &detail),
            Self::Steer(_) | Self::Upgrading => problem(StatusCode::CONFLICT, &detail),
            Self::Stuck => stuck(),
            Self::ReadTimeout => problem(StatusCode::SERVICE_UNAVAILABLE, &detail),
            Self::Internal(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, &detail),
        }
    }
}

/// Returns the document that describes an error in the configuration.
fn describe(problem: &config::Problem) -> ConfigProblem {
    ConfigProblem {
        file: problem.file.display().to_string(),
        line: problem.at.map(|at| at.line),
        column: problem.at.map(|at| at.column),
        message: problem.message.clone(),
        help: problem.help.clone(),
    }
}

/// Reads the file and applies the new configuration. A dry run changes nothing and emits no event.
async fn reload(control: &Control, dry_run: bool) -> Result<Changes, ReloadError> {
    // The lock is held until the reload has finished, so that reloads run one at a time.
    let mut active_config = control.reloads.active_config.lock().await;
    if dry_run {
        let Prepared { mut changes, reload, .. } = prepare(&control.reloads, &active_config).await?;
        let (reply, receiver) = oneshot::channel();
        let command = Command::TryReload { reload: Box::new(reload), reply };
        control.commands.send(command).map_err(|_| ReloadError::Stuck)?;
        add_dropped_live_changes(&mut changes, receiver.await.map_err(|_| ReloadError::Stuck)?);
        return Ok(changes);
    }
    if control.handover.is_upgrading() {
        return Err(ReloadError::Upgrading);
    }
    control.recreate_sockets();
    let is_ready = control.is_started.load(Ordering::SeqCst);
    if is_ready {
        notify_reloading(control);
    }
    let result = apply(control, &mut active_config).await;
    if is_ready {
        control.notify_systemd(&[NotifyState::Ready]);
    }
    control.report_reload(&active_config.config.path, &result);
    result
}

async fn apply(control: &Control, active_config: &mut ActiveConfig) -> Result<Changes, ReloadError> {
    let Prepared { after, mut changes, reload, max_clients } =
        prepare(&control.reloads, active_config).await?;
    if !changes.is_empty() {
        reload.log_warnings();
        let (reply, receiver) = oneshot::channel();
        let command = Command::Reload { reload: Box::new(reload), reply };
        control.commands.send(command).map_err(|_| ReloadError::Stuck)?;
        // There is no time limit for the reply, because after a timeout it would be unknown which configuration is
        // active. The data plane always replies or shuts down.
        add_dropped_live_changes(&mut changes, receiver.await.map_err(|_| ReloadError::Stuck)??);
    }
    let after = effective_config(&active_config.config.supervisor, Arc::unwrap_or_clone(after));
    active_config.config = Arc::new(after);
    let mut shown = active_config.config.clone();
    Arc::make_mut(&mut shown).supervisor.max_clients = max_clients;
    control.set_config(shown);
    if changes.access {
        control.tokens.update(&active_config.config);
    }
    let cached = CachedValues::of(&active_config.config);
    let names: HashSet<&str> = cached.bulkheads.iter().map(String::as_str).collect();
    control.output.keep_only(&names);
    control.events.keep_only(&names);
    control.keep_usage(&names);
    *control.reloads.cached() = cached;
    Ok(changes)
}

fn add_dropped_live_changes(changes: &mut Changes, mut dropped: LiveDropped) {
    for change in &mut changes.bulkheads {
        change.live_dropped = dropped.remove(&*change.bulkhead).unwrap_or_default();
    }
}

/// Reads the configuration file and prepares the reload. This happens on a separate thread, because a disk can be slow
/// and a network file system can hang forever. The caller waits only for a limited time, and shutdown does not wait at
/// all. No other such thread is started while this one hangs.
async fn prepare(reloads: &Reloads, active_config: &ActiveConfig) -> Result<Prepared, ReloadError> {
    let Ok(permit) = reloads.reader.clone().try_acquire_owned() else { return Err(ReloadError::ReadTimeout) };
    let active_config = active_config.clone();
    let (done, read_file) = oneshot::channel();
    let read = move || {
        let prepared = read(&active_config);
        // The permit must be released before the result is sent. Otherwise, the next reload could find no
        // permit.
        drop(permit);
        let _ = done.send(prepared);
    };
    let thread = std::thread::Builder::new().name("reload".into()).spawn(read);
    thread.map_err(|error| ReloadError::Internal(error.to_string()))?;
    match tokio::time::timeout(READ_TIMEOUT, read_file).await {
        Ok(Ok(prepared)) => prepared,
        Ok(Err(_)) => {
            Err(ReloadError::Internal("the thread that reads the configuration panicked".to_owned()))
        }
        Err(_) => Err(ReloadError::ReadTimeout),
    }
}

fn read(active_config: &ActiveConfig) -> Result<Prepared, ReloadError> {
    let before = &active_config.config;
    let after = Arc::new(config::load(&before.path)?);
    let host = program::find_host();
    if host.is_none()
        && let Some(bulkhead) = after.bulkheads.iter().find(|b| program::needs_host(b))
    {
        return Err(ReloadError::HostNotFound(bulkhead.name.clone()));
    }
    active_config.support.withhold(&after);
    let changes = reload::changes(before, &after);
    let mut bounded = after.clone();
    active_config.open_files.lower_max_clients(&mut bounded);
    let limits = DataPlaneLimits::new(&bounded.supervisor);
    let ActiveConfig { support, labels, own_uid, .. } = active_config;
    let inputs = SpecInputs { host: host.as_deref(), support, labels };
    let reload = reload::prepare(&changes, before, &after, limits, (inputs, *own_uid));
    Ok(Prepared { after, changes, reload, max_clients: bounded.supervisor.max_clients })
}

/// Notifies systemd that a reload has begun. If the service has `Type=notify-reload`, systemd considers the reload to
/// be in progress until it receives READY=1.
fn notify_reloading(control: &Control) {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => control.notify_systemd(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("failed to notify the service manager: {error}"),
    }
}

impl Control {
    fn report_reload(&self, path: &Path, result: &Result<Changes, ReloadError>) {
        self.reloads.record(result.is_ok());
        let file = path.display().to_string();
        let (severity, what) = match result {
            Ok(changes) => (Severity::Info, EventKind::ConfigReloaded { file, changes: changes.clone() }),
            Err(error) => (Severity::Warning, error.event(file)),
        };
        self.events.add(Event::new(severity, None, what));
    }
}

impl ReloadError {
    fn event(&self, file: String) -> EventKind {
        let Self::Config(errors) = self else {
            let message = Some(Some(self.to_string()));
            return EventKind::ConfigRejected {
                file,
                line: None,
                message,
                errors: None,
                errors_in_all: None,
            };
        };
        let problems = errors.problems();
        let first = problems.first();
        EventKind::ConfigRejected {
            file: first.map_or(file, |problem| problem.file.display().to_string()),
            line: Some(first.and_then(|problem| problem.at).map(|at| at.line)),
            message: Some(first.map(|problem| problem.message.clone())),
            errors: Some(
                problems.iter().take(EVENT_PROBLEMS_MAX).map(|problem| json!(describe(problem))).collect(),
            ),
            errors_in_all: Some(problems.len()),
        }
    }
}

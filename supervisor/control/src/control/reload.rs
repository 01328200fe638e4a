//! Reload of the configuration, on SIGHUP or over HTTP, one at a time. A separate thread reads and validates
//! the whole file. Only a configuration without errors goes to the data plane.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bulkhead_api::{Changes, Reloaded, Severity, What};
use sd_notify::NotifyState;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{Notify, Semaphore, oneshot};

use super::Control;
use super::Shared;
use super::answers::{problem, problem_with, stuck, switch};
use bulkhead_config::{self as config, Config, ConfigErrors, Profile};
use bulkhead_plane::command::{Command, Event, SteerError};
use bulkhead_plane::confinement::SandboxSupport;
use bulkhead_plane::limits::DataPlaneLimits;
use bulkhead_plane::open_files::OpenFiles;
use bulkhead_plane::program;
use bulkhead_plane::reload::{self, LiveDropped, Reload, SpecInputs, after_reload};
use bulkhead_plane::scrape::ReloadCounts;

/// Time limit for reading the file and checking its programs and folders. Shorter than the time limit of a
/// request.
const READ_WITHIN: Duration = Duration::from_secs(7);

/// Maximum number of problems in one event. The HTTP response lists all problems.
const PROBLEMS_TOLD_MAX: usize = 10;

/// The configuration in force, and the inputs for resolving another version of it.
#[derive(Clone)]
pub struct InForce {
    /// The configuration as last loaded, except that keys that need a restart keep their first values.
    pub config: Arc<Config>,
    /// Sandbox support of this machine.
    pub support: Arc<SandboxSupport>,
    /// The limit of open files in force.
    pub open_files: OpenFiles,
    /// The supervisor's own user.
    pub own: u32,
    /// Tenants that have a metrics label. Fixed at the start.
    pub labels: Arc<[String]>,
}

/// The configuration in force, and the number of reloads.
pub(super) struct Reloads {
    in_force: tokio::sync::Mutex<InForce>,
    /// Permit of the thread that reads the file.
    reader: Arc<Semaphore>,
    /// Set by SIGHUP. Several signals count as one until the reload starts.
    wanted: Notify,
    names: Mutex<Names>,
    counts: Mutex<ReloadCounts>,
}

/// Cached values of the configuration in force.
#[derive(Default)]
struct Names {
    bulkheads: Vec<String>,
    /// Bulkheads with `recycle.rss`, and its value in bytes.
    recycle_rss: Arc<HashMap<String, u64>>,
    /// Minimum and maximum size limit of the temporary folders on disk.
    temporary_bytes: Option<(u64, u64)>,
}

impl Names {
    fn of(config: &Config) -> Self {
        let confined = config.bulkheads.iter().filter(|b| b.sandbox.profile != Profile::None);
        let bounds = confined.map(|b| b.sandbox.tmp_bytes).filter(|bytes| *bytes > 0);
        let watched = config.bulkheads.iter().filter_map(|b| Some((b.name.clone(), b.recycle.rss?)));
        Self {
            bulkheads: config.bulkheads.iter().map(|b| b.name.clone()).collect(),
            recycle_rss: Arc::new(watched.collect()),
            temporary_bytes: bounds.clone().min().zip(bounds.max()),
        }
    }
}

/// Reasons why a reload is rejected.
#[derive(Debug, thiserror::Error)]
enum Rejection {
    #[error("{0}")]
    Config(#[from] ConfigErrors),
    #[error(
        "bulkhead '{0}' has an `exec` or a `library`, which the program bulkhead-worker runs, and that is not \
         found: install it beside bulkhead-supervisor, or in PATH"
    )]
    NoHost(String),
    #[error("{0}")]
    Steer(#[from] SteerError),
    #[error("the data plane does not answer")]
    Stuck,
    #[error(
        "reading the configuration, or looking at what it names, took more than {READ_WITHIN:?} or still hangs: see \
         whether its file system, and those of the programs and folders in it, answer"
    )]
    Hangs,
    #[error("the supervisor failed to read its configuration: {0}")]
    Broke(String),
}

/// A configuration that was read and validated, with the changes that put it in force.
struct Prepared {
    after: Arc<Config>,
    changes: Changes,
    reload: Reload,
}

impl Reloads {
    pub(super) fn new(in_force: InForce) -> Self {
        Self {
            names: Mutex::new(Names::of(&in_force.config)),
            in_force: tokio::sync::Mutex::new(in_force),
            reader: Arc::new(Semaphore::new(1)),
            wanted: Notify::new(),
            counts: Mutex::default(),
        }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has(&self, bulkhead: &str) -> bool {
        self.names().bulkheads.iter().any(|name| name == bulkhead)
    }

    pub(super) fn count(&self) -> usize {
        self.names().bulkheads.len()
    }

    pub(super) fn watched(&self) -> Arc<HashMap<String, u64>> {
        self.names().recycle_rss.clone()
    }

    pub(super) fn temporary_bytes(&self) -> Option<(u64, u64)> {
        self.names().temporary_bytes
    }

    /// Returns the number of reloads, for the metrics.
    pub(super) fn counts(&self) -> ReloadCounts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, is_success: bool) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *(if is_success { &mut counts.succeeded } else { &mut counts.rejected }) += 1;
        counts.was_successful = is_success;
    }

    /// Requests a reload.
    pub(super) fn want(&self) {
        self.wanted.notify_one();
    }
}

/// Reloads on each SIGHUP until the control plane ends. Any number of signals during a reload cause one more
/// reload.
pub(super) async fn obey(control: Arc<Control>) {
    let mut end = control.end.subscribe();
    loop {
        tokio::select! {
            () = control.reloads.wanted.notified() => {}
            _ = end.wait_for(|is_over| *is_over) => return,
        }
        // An event reports the result.
        let _ = reload(&control, false).await;
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReloadQuery {
    #[serde(default, deserialize_with = "switch")]
    dry_run: Option<bool>,
}

pub(super) async fn over_http(State(control): State<Shared>, Query(query): Query<ReloadQuery>) -> Response {
    let dry_run = query.dry_run == Some(true);
    // A reload that has started is completed even if the client disconnects.
    let task = tokio::spawn(async move { reload(&control, dry_run).await });
    match task.await {
        Ok(Ok(changes)) => axum::Json(Reloaded { dry_run, changes }).into_response(),
        Ok(Err(rejection)) => rejection.into_response(),
        Err(_) => stuck(),
    }
}

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let detail = self.to_string();
        match self {
            Self::Config(errors) => {
                let fields = [("file", json!(errors.path())), ("errors", json!(errors.problems()))];
                let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                problem_with(StatusCode::UNPROCESSABLE_ENTITY, &detail, fields)
            }
            Self::NoHost(_) => problem(StatusCode::UNPROCESSABLE_ENTITY, &detail),
            Self::Steer(_) => problem(StatusCode::CONFLICT, &detail),
            Self::Stuck => stuck(),
            Self::Hangs => problem(StatusCode::SERVICE_UNAVAILABLE, &detail),
            Self::Broke(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, &detail),
        }
    }
}

/// Reads the file and puts it in force. A dry run changes nothing and emits no event.
async fn reload(control: &Control, dry_run: bool) -> Result<Changes, Rejection> {
    // Reloads run one at a time.
    let mut in_force = control.reloads.in_force.lock().await;
    if dry_run {
        let Prepared { mut changes, reload, .. } = prepare(&control.reloads, &in_force).await?;
        let (reply, answer) = oneshot::channel();
        let command = Command::TryReload { reload: Box::new(reload), reply };
        control.commander.send(command).map_err(|_| Rejection::Stuck)?;
        note_dropped(&mut changes, answer.await.map_err(|_| Rejection::Stuck)?);
        return Ok(changes);
    }
    control.renew_sockets();
    let is_ready = control.is_started.load(Ordering::SeqCst);
    if is_ready {
        announce_reload(control);
    }
    let result = apply(control, &mut in_force).await;
    if is_ready {
        control.notify_systemd(&[NotifyState::Ready]);
    }
    control.tell_reload(&in_force.config.path, &result);
    result
}

async fn apply(control: &Control, in_force: &mut InForce) -> Result<Changes, Rejection> {
    let Prepared { after, mut changes, reload } = prepare(&control.reloads, in_force).await?;
    if !changes.is_empty() {
        reload.log_warnings();
        let (reply, answer) = oneshot::channel();
        let command = Command::Reload { reload: Box::new(reload), reply };
        control.commander.send(command).map_err(|_| Rejection::Stuck)?;
        // Waits without a time limit, because otherwise it would be unknown which configuration is in force.
        // The data plane answers or ends.
        note_dropped(&mut changes, answer.await.map_err(|_| Rejection::Stuck)??);
    }
    let after = after_reload(&in_force.config.supervisor, Arc::unwrap_or_clone(after));
    in_force.config = Arc::new(after);
    control.put_in_force(in_force.config.clone());
    let names = Names::of(&in_force.config);
    let kept: HashSet<&str> = names.bulkheads.iter().map(String::as_str).collect();
    control.output.keep_only(&kept);
    control.events.keep_only(&kept);
    control.keep_works(&kept);
    *control.reloads.names() = names;
    Ok(changes)
}

fn note_dropped(changes: &mut Changes, mut dropped: LiveDropped) {
    for change in &mut changes.bulkheads {
        change.live_dropped = dropped.remove(&*change.bulkhead).unwrap_or_default();
    }
}

/// Reads the file on a separate thread, because a disk can be slow and a network file system can hang
/// forever. The thread is waited for within a time limit, and not at shutdown. While one thread hangs, no
/// other one is started.
async fn prepare(reloads: &Reloads, in_force: &InForce) -> Result<Prepared, Rejection> {
    let Ok(place) = reloads.reader.clone().try_acquire_owned() else { return Err(Rejection::Hangs) };
    let in_force = in_force.clone();
    let (done, read_file) = oneshot::channel();
    let read = move || {
        let prepared = read(&in_force);
        // Must happen before the result is sent, so that the next reload can start.
        drop(place);
        let _ = done.send(prepared);
    };
    let thread = std::thread::Builder::new().name("reload".into()).spawn(read);
    thread.map_err(|error| Rejection::Broke(error.to_string()))?;
    match tokio::time::timeout(READ_WITHIN, read_file).await {
        Ok(Ok(prepared)) => prepared,
        Ok(Err(_)) => Err(Rejection::Broke("the thread that reads it has panicked".to_owned())),
        Err(_) => Err(Rejection::Hangs),
    }
}

fn read(in_force: &InForce) -> Result<Prepared, Rejection> {
    let before = &in_force.config;
    let after = Arc::new(config::load(&before.path)?);
    let host = program::find_host();
    if host.is_none()
        && let Some(needy) = after.bulkheads.iter().find(|b| program::needs_host(b))
    {
        return Err(Rejection::NoHost(needy.name.clone()));
    }
    let changes = reload::changes(before, &after);
    let mut bounded = after.clone();
    in_force.open_files.leave_room(&mut bounded);
    let limits = DataPlaneLimits::new(&bounded.supervisor);
    let InForce { support, labels, own, .. } = in_force;
    let inputs = SpecInputs { host: host.as_deref(), support, labels };
    let reload = reload::prepare(&changes, before, &after, limits, (inputs, *own));
    Ok(Prepared { after, changes, reload })
}

/// Notifies systemd, which then waits for READY=1 (`Type=notify-reload`).
fn announce_reload(control: &Control) {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => control.notify_systemd(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!("the service manager could not be told: {error}"),
    }
}

impl Control {
    fn tell_reload(&self, path: &Path, result: &Result<Changes, Rejection>) {
        self.reloads.record(result.is_ok());
        let file = path.display().to_string();
        let (severity, what) = match result {
            Ok(changes) => (Severity::Info, What::ConfigReloaded { file, changes: changes.clone() }),
            Err(rejection) => (Severity::Warning, rejection.event(file)),
        };
        self.events.add(Event::new(severity, None, what));
    }
}

impl Rejection {
    fn event(&self, file: String) -> What {
        let Self::Config(errors) = self else {
            let message = Some(Some(self.to_string()));
            return What::ConfigRejected { file, line: None, message, errors: None, errors_in_all: None };
        };
        let problems = errors.problems();
        let first = problems.first();
        What::ConfigRejected {
            file,
            line: Some(first.and_then(|problem| problem.at).map(|at| at.line)),
            message: Some(first.map(|problem| problem.message.clone())),
            errors: Some(problems.iter().take(PROBLEMS_TOLD_MAX).map(|problem| json!(problem)).collect()),
            errors_in_all: Some(problems.len()),
        }
    }
}

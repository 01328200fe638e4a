//! Performs the predecessor's side of an upgrade. Starts the successor, hands over to it, and resumes serving if a step
//! fails. `take_over` implements the successor's side, and the data plane hands over the connections.
//!
//! | process that exits | when | result |
//! | --- | --- | --- |
//! | the successor | before SWITCH | this supervisor has kept serving |
//! | the successor (or it hangs) | until the main process changes | it is killed; this supervisor resumes serving |
//! | the successor | afterwards | this supervisor exits with an error, so that the service manager restarts the service |
//! | this supervisor | any | the successor continues to serve, unless the service manager stops it |

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::connect_info::ConnectInfo;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bulkhead_api::{EventKind, Severity, UpgradeStep};
use bulkhead_linux::packets::{self, Outbox};
use bulkhead_linux::{notify, sibling};
use bulkhead_plane::command::{Command, Event};
use bulkhead_plane::handover::{
    self, BulkheadState, Failed, HandoverCommand, Hello, InheritedName, MESSAGE_BYTES_MAX, Nothing, Numbers,
    State as PredecessorState, SwitchState, TenantState, VERSION, WorkerId, inherited, kind,
};
use bulkhead_plane::program;
use bulkhead_policy::RatePer;
use futures_util::stream;
use rustix::process::{Signal, pidfd_send_signal};
use sd_notify::NotifyState;
use serde::Deserialize;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, timeout};

use super::connections::Admission;
use super::handover::{Incoming, Link, register, send_command, wait_for_end};
use super::responses::{parse_bool, problem};
use super::{Control, Shared};

/// Command-line option that makes a program start as a successor. The value is the number of an inherited descriptor.
pub const TAKE_OVER_ARGUMENT: &str = "--take-over";

/// Maximum time to wait for the first message from a successor that has just been started.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time that a successor can take to start, in addition to the largest value of `start.ready` in its
/// configuration.
const READY_MARGIN: Duration = Duration::from_secs(10);

/// Maximum time that the successor can take to confirm that it is serving clients.
const ACTIVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for which the predecessor and the successor both run before the successor becomes the main process. A failure
/// during this time does not require a restart of the service.
const PROBATION: Duration = Duration::from_secs(10);

/// Interval at which the predecessor sends PINGs to the successor until the successor becomes the main process.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// Number of consecutive PINGs without a reply after which a successor counts as hung.
const UNANSWERED_PINGS_MAX: u32 = 3;

/// Maximum time to wait for a killed successor's workers to exit. No client data is read in the meantime, so the sum of
/// this time and `ACTIVE_TIMEOUT` must be below the time limit for a client's hello.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum time to wait until the service manager confirms that all messages from this process have been processed.
const BARRIER_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time to wait until clients have read the last responses to jobs over HTTP. Begins when the longest deadline
/// that a job can have has passed.
const LAST_RESPONSE_TIMEOUT: Duration = Duration::from_secs(600);

/// Interval between checks for unfinished HTTP requests.
const REQUESTS_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum number of progress reports about an upgrade that wait to be sent to the client.
const STEPS_MAX: usize = 16;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UpgradeQuery {
    program: Option<PathBuf>,
    #[serde(default, deserialize_with = "parse_bool")]
    force: Option<bool>,
    #[serde(default, deserialize_with = "parse_bool")]
    unmanaged: Option<bool>,
}

/// Reason why an upgrade cannot begin.
#[derive(Debug)]
enum Refusal {
    UnderWay(String),
    Impossible(String),
}

/// Handles `POST /v1/upgrade`. The response contains a line for each step of the upgrade.
pub(super) async fn over_http(
    State(control): State<Shared>,
    ConnectInfo(admission): ConnectInfo<Admission>,
    Query(query): Query<UpgradeQuery>,
) -> Response {
    admission.progress.lift_time_limit();
    let steps = match begin(&control, query) {
        Ok(steps) => steps,
        Err(Refusal::UnderWay(why)) => return problem(StatusCode::CONFLICT, &why),
        Err(Refusal::Impossible(why)) => return problem(StatusCode::UNPROCESSABLE_ENTITY, &why),
    };
    let lines = stream::unfold(steps, async |mut steps| {
        let step: UpgradeStep = steps.recv().await?;
        let mut line = serde_json::to_vec(&step).unwrap_or_default();
        line.push(b'\n');
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), steps))
    });
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}

/// Begins an upgrade in response to SIGUSR2.
pub(super) fn on_signal(control: &Shared) {
    if let Err(Refusal::UnderWay(why) | Refusal::Impossible(why)) = begin(control, UpgradeQuery::default()) {
        tracing::error!("SIGUSR2 had no effect: {why}");
    }
}

/// Starts a task that performs the upgrade. Returns a receiver for reports about the steps of the upgrade.
fn begin(control: &Shared, query: UpgradeQuery) -> Result<mpsc::Receiver<UpgradeStep>, Refusal> {
    use std::sync::atomic::Ordering::SeqCst;
    let impossible = |why: &str| Err(Refusal::Impossible(why.to_owned()));
    let program = match &control.handover.program {
        Ok(program) => program.clone(),
        Err(why) => return impossible(why),
    };
    if std::env::var_os("NOTIFY_SOCKET").is_none() && query.unmanaged != Some(true) {
        return impossible(
            "this supervisor was started without NOTIFY_SOCKET, and a service manager that watches the \
             process ID would mistake the switch to the new main process for a crash; if none does, use \
             `bulkhead upgrade --unmanaged`",
        );
    }
    if control.is_stopping.load(SeqCst) {
        return impossible("the supervisor is stopping");
    }
    if !control.is_started.load(SeqCst) {
        return Err(Refusal::UnderWay("the supervisor is starting; try again later".to_owned()));
    }
    if !control.handover.begin() {
        let why = "an upgrade is under way, or the previous supervisor has not finished its last jobs; try again later";
        return Err(Refusal::UnderWay(why.to_owned()));
    }
    let (sender, steps) = mpsc::channel(STEPS_MAX);
    let mut program = program;
    program.path = query.program.unwrap_or(program.path);
    let upgrade = Upgrade {
        control: control.clone(),
        program,
        is_forced: query.force == Some(true),
        steps: Mutex::new(Some(sender)),
    };
    tokio::spawn(upgrade.run());
    Ok(steps)
}

/// A failed step of an upgrade, and the reason for the failure.
struct StepFailure(&'static str, String);

fn failed(step: &'static str) -> impl Fn(io::Error) -> StepFailure {
    move |error| StepFailure(step, error.to_string())
}

struct Upgrade {
    control: Shared,
    program: super::handover::SuccessorProgram,
    is_forced: bool,
    /// Channel for reporting the steps of the upgrade to the client. Set to `None` after the last step, which completes
    /// the response.
    steps: Mutex<Option<mpsc::Sender<UpgradeStep>>>,
}

/// The successor that this supervisor has started.
struct Successor {
    pid: u32,
    pidfd: AsyncFd<OwnedFd>,
    link: Arc<Link>,
    /// Descriptor that becomes readable when the successor and its keepers have exited.
    lifeline: Option<AsyncFd<OwnedFd>>,
    version: String,
}

/// Result of the probation period, during which the predecessor and the successor both run and the predecessor is still
/// the main process.
enum Probation {
    Passed,
    /// Both supervisors are stopping.
    Stopping,
}

impl Upgrade {
    async fn run(self) {
        let mut successor = None;
        let mut listener = None;
        match self.hand_over(&mut successor, &mut listener).await {
            Ok((successor, Probation::Passed)) => self.leave(successor).await,
            // This supervisor is already stopping because of the signal.
            Ok((successor, Probation::Stopping)) => {
                self.report(UpgradeStep::new("stopped"));
                self.watch_stop(successor).await;
            }
            Err(StepFailure(step, message)) => {
                if let Some(successor) = &successor {
                    successor.kill().await;
                }
                self.take_back(listener).await;
                self.report_failure(step, message);
            }
        }
    }

    /// Resumes serving clients after a failed upgrade.
    async fn take_back(&self, listener: Option<UnixListener>) {
        let control = &self.control;
        control.handover.end.wait_for(None);
        control.handover.set_other(None);
        self.send(HandoverCommand::TakeBack(listener.filter(|_| !control.handover.is_listening()))).await;
        control.sockets.set_owner(true);
        control.handover.set_listening(true);
        control.unrelated.set_other_root(None);
        control.crashes.take_over().await;
        control.handover.end_upgrade();
    }

    fn report_failure(&self, step: &'static str, message: String) {
        let is_stopping = self.control.handover.is_stopping();
        let what = EventKind::UpgradeFailed { step: step.into(), message: message.clone() };
        self.control.events.add(Event::new(Severity::Critical, None, what));
        let last = UpgradeStep::new(if is_stopping { "stopped" } else { "failed" });
        self.report(UpgradeStep { message: Some(message), ..last });
    }

    /// Reports a step of the upgrade to the client, unless the client has disconnected.
    fn report(&self, step: UpgradeStep) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let is_last = matches!(&*step.step, "finished" | "failed" | "stopped");
        if let Some(steps) = &*steps {
            let _ = steps.try_send(step);
        }
        steps.take_if(|_| is_last);
    }

    async fn send(&self, command: HandoverCommand) {
        let command = Command::Handover(Box::new(command));
        // The supervisor shuts down if the data plane is stuck or has stopped.
        if let Err(error) = send_command(&self.control.commands, command).await {
            tracing::error!("an upgrade step had no effect: {error}");
        }
    }

    /// Hands over to a successor. If this fails, the caller must kill the successor and resume serving.
    async fn hand_over<'s>(
        &self,
        started: &'s mut Option<Successor>,
        listener: &mut Option<UnixListener>,
    ) -> Result<(&'s Successor, Probation), StepFailure> {
        let control = &self.control;
        let handover = &control.handover;
        // Only the data plane and its keepers hold the write end. The read end therefore becomes readable when they
        // have exited.
        let (lifeline, (bulkheads, tenants, jobs)) = {
            let (reader, writer) = io::pipe().map_err(failed("start"))?;
            let lifeline = Arc::new(OwnedFd::from(writer));
            (OwnedFd::from(reader), self.prepare(lifeline).await?)
        };
        *listener = jobs;
        let successor = started.insert(self.start_program()?);
        control.unrelated.set_other_root(Some(successor.pid));
        let what = EventKind::UpgradeStarted {
            program: self.program.path.display().to_string(),
            pid: successor.pid,
        };
        control.events.add(Event::new(Severity::Info, None, what));
        self.report(UpgradeStep { pid: Some(successor.pid), ..UpgradeStep::new("started") });

        let (version, start_limit) = self.greet(successor).await?;
        successor.version = version;
        let (reader, writer) = io::pipe().map_err(failed("state"))?;
        successor.lifeline = Some(register(reader.into()).map_err(failed("state"))?);
        let lifelines = (lifeline, OwnedFd::from(writer));
        let transfer = self
            .send_state(successor, (&bulkheads, &tenants), lifelines, listener.as_ref())
            .await
            .map_err(failed("state"))?;
        let limit = start_limit.saturating_add(READY_MARGIN);
        successor.expect(control, kind::READY, limit, "ready").await?;
        self.report(UpgradeStep { pid: Some(successor.pid), ..UpgradeStep::new("ready") });

        let state = self.switch(transfer).await?;
        // Until the successor accepts connections, clients wait in the backlog.
        handover.set_listening(false);
        // From here on, this process waits for the successor to exit before it exits itself.
        handover.end.wait_for(successor.pidfd.get_ref().try_clone().ok());
        self.send_switch(successor, state).await.map_err(failed("switch"))?;
        successor.expect(control, kind::ACTIVE, ACTIVE_TIMEOUT, "active").await?;
        control.sockets.set_owner(false);
        handover.set_other(Some(successor.link.clone()));
        self.send(HandoverCommand::Release).await;
        let what = EventKind::UpgradeSwitched { pid: successor.pid, version: successor.version.clone() };
        control.events.add(Event::new(Severity::Info, None, what));
        self.report(UpgradeStep {
            pid: Some(successor.pid),
            version: Some(successor.version.clone()),
            ..UpgradeStep::new("switched")
        });
        let probation = self.probation(successor).await?;
        if matches!(probation, Probation::Passed) {
            // The service manager must know the new main process. Otherwise, it would kill the successor when this
            // process exits.
            name_main_process(successor.pid).await.map_err(failed("main"))?;
        }
        Ok((successor, probation))
    }

    async fn prepare(
        &self,
        lifeline: Arc<OwnedFd>,
    ) -> Result<(Vec<BulkheadState>, Vec<TenantState>, Option<UnixListener>), StepFailure> {
        let request = |reply| Command::Handover(Box::new(HandoverCommand::Prepare { lifeline, reply }));
        let prepared = self.control.commands.request(request).await;
        let stuck = || StepFailure("start", "the data plane is not responding".to_owned());
        let prepared = prepared.ok_or_else(stuck)?;
        let (mut bulkheads, mut tenants, listener) = prepared.map_err(|error| StepFailure("start", error))?;
        let config = self.control.config();
        for state in &mut bulkheads {
            if let Some(bulkhead) = config.bulkheads.iter().find(|bulkhead| bulkhead.name == state.name) {
                let limits = program::limits(bulkhead, &Arc::default());
                let rate = limits.rate_limit.map(|it| (it.per_second, it.burst, it.per == RatePer::Tenant));
                state.file = Numbers {
                    processes: Some(limits.processes),
                    max_in_flight: Some(limits.max_in_flight),
                    max_queue: Some(limits.max_queue),
                    rate_limit: rate,
                };
            }
        }
        for state in &mut tenants {
            let bulkhead = config.bulkheads.iter().find(|bulkhead| bulkhead.name == state.bulkhead);
            let own = bulkhead.and_then(|bulkhead| bulkhead.tenant.get(&state.tenant)).copied();
            let own = own.unwrap_or_default();
            let rate = own.rate_limit.map(|it| (it.per_second, it.burst, it.per == RatePer::Tenant));
            state.file = Numbers {
                processes: own.processes,
                max_in_flight: own.max_in_flight,
                max_queue: own.max_queue,
                rate_limit: rate,
            };
        }
        Ok((bulkheads, tenants, listener))
    }

    fn start_program(&self) -> Result<Successor, StepFailure> {
        let (here, there) = packets::pair(MESSAGE_BYTES_MAX).map_err(failed("start"))?;
        let mut arguments = self.program.arguments.clone();
        arguments.extend([TAKE_OVER_ARGUMENT.into(), there.as_raw_fd().to_string().into()]);
        // Withheld, because each main process has its own watchdog, and because sockets are passed in messages.
        let withheld = ["WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];
        let started = sibling::spawn(&self.program.path, &arguments, &withheld, there.as_fd());
        let child = started.map_err(|error| {
            let path = self.program.path.display();
            let help = match error.raw_os_error() {
                Some(libc::EINVAL) => {
                    "; the first process of a container or PID namespace cannot be upgraded because nothing could \
                     become the parent of the new program: start the supervisor under an init process"
                }
                _ => "",
            };
            StepFailure("start", format!("{path} cannot be started: {error}{help}"))
        })?;
        Ok(Successor {
            pid: child.pid.as_raw_pid() as u32,
            pidfd: register(child.pidfd).map_err(failed("start"))?,
            link: Arc::new(Link::new(here).map_err(failed("start"))?),
            lifeline: None,
            version: String::new(),
        })
    }

    /// Receives the successor's HELLO message. Returns the version of the successor's program, and the maximum time
    /// that the successor's bulkheads may need to start.
    async fn greet(&self, successor: &Successor) -> Result<(String, Duration), StepFailure> {
        let hello = successor.expect(&self.control, kind::HELLO, HELLO_TIMEOUT, "hello").await?;
        let Hello { oldest, newest, program, start_limit_ms } = hello.message().map_err(failed("hello"))?;
        if !(oldest..=newest).contains(&VERSION) {
            let message = format!(
                "the program {program} supports versions {oldest} to {newest} of the handover protocol, but this \
                 supervisor uses version {VERSION}: restart the service instead"
            );
            return Err(StepFailure("hello", message));
        }
        Ok((program.to_owned(), Duration::from_millis(start_limit_ms)))
    }

    /// Sends the state and the descriptors to the successor. Returns this supervisor's end of the transfer socket.
    async fn send_state(
        &self,
        successor: &Successor,
        (bulkheads, tenants): (&[BulkheadState], &[TenantState]),
        (lifeline, of_successor): (OwnedFd, OwnedFd),
        listener: Option<&UnixListener>,
    ) -> io::Result<OwnedFd> {
        let (control, link) = (&self.control, &successor.link);
        let (here, there) = packets::pair(MESSAGE_BYTES_MAX)?;
        let mut descriptors = control.sockets.descriptors()?;
        descriptors.push((inherited::LIFELINE, String::new(), lifeline));
        descriptors.push((inherited::SUCCESSOR_LIFELINE, String::new(), of_successor));
        descriptors.push((inherited::TRANSFER, String::new(), there));
        if let Some(listener) = listener {
            descriptors.push((inherited::JOBS, String::new(), listener.try_clone()?.into()));
        }
        for (name, address, socket) in &control.handover.tcp {
            descriptors.push((name, address.clone(), socket.try_clone()?));
        }
        if let Some(lock) = &control.handover.crashes_lock {
            let folder = control.config().supervisor.crash_dir.clone().unwrap_or_default();
            descriptors.push((inherited::CRASHES_LOCK, folder.display().to_string(), lock.try_clone()?));
        }
        for (name, place, descriptor) in descriptors {
            let message = InheritedName { name, place: &place };
            link.send(kind::INHERITED, &message, Some(descriptor)).await?;
        }
        for state in bulkheads {
            link.send(kind::BULKHEAD, state, None).await?;
        }
        for state in tenants.iter().filter(|state| state.file != state.live) {
            link.send(kind::TENANT, state, None).await?;
        }
        for (bulkhead, id) in control.reloads.permanent_ids().await {
            link.send(kind::WORKER_ID, &WorkerId { bulkhead: &bulkhead, id }, None).await?;
        }
        let state = PredecessorState {
            version: VERSION,
            pid: std::process::id(),
            is_forced: self.is_forced,
            soft_limits: control.handover.soft_limits.clone(),
            activated: control.inherited.names(),
        };
        link.send(kind::STATE, &state, None).await?;
        Ok(here)
    }

    /// Returns the longest deadline that any job can have.
    fn longest_deadline(&self) -> Duration {
        let config = self.control.config();
        config.bulkheads.iter().map(|bulkhead| bulkhead.deadline_max).max().unwrap_or_default()
    }

    async fn switch(&self, transfer: OwnedFd) -> Result<SwitchState, StepFailure> {
        let (reply, receiver) = oneshot::channel();
        self.send(HandoverCommand::Switch { transfer, reply }).await;
        // The reply can take a few seconds, because the data plane waits for clients to return their leases.
        receiver.await.map_err(|_| StepFailure("switch", "the supervisor is stopping".to_owned()))
    }

    async fn send_switch(&self, successor: &Successor, state: SwitchState) -> io::Result<()> {
        let SwitchState { held, quarantined, mut switch } = state;
        switch.events_after += self.control.events.last_number();
        for held in &held {
            successor.link.send(kind::HELD_AT_SWITCH, held, None).await?;
        }
        for entry in &quarantined {
            successor.link.send(kind::QUARANTINED, entry, None).await?;
        }
        successor.link.send(kind::SWITCH, &switch, None).await
    }

    /// Waits for the end of the probation period, during which both programs run. Returns an error if the successor
    /// exits or its data plane stops responding.
    async fn probation(&self, successor: &Successor) -> Result<Probation, StepFailure> {
        let control = &self.control;
        let end = Instant::now() + PROBATION;
        let ended = || StepFailure("serve", "the new program has exited".to_owned());
        let mut pings = tokio::time::interval(PING_INTERVAL);
        // If this supervisor was paused, the successor still gets time to respond.
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut unanswered = 0;
        loop {
            tokio::select! {
                biased;
                () = control.handover.stopping() => return Ok(Probation::Stopping),
                message = successor.link.receive() => match message {
                    Ok(Some(message)) if message.kind == kind::STOP => {
                        control.stop_with_other();
                        return Ok(Probation::Stopping);
                    }
                    Ok(Some(message)) if message.kind == kind::PONG => unanswered = 0,
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => return Err(ended()),
                },
                _ = successor.ended() => return Err(ended()),
                () = tokio::time::sleep_until(end), if unanswered == 0 => return Ok(Probation::Passed),
                _ = pings.tick() => {
                    if unanswered == UNANSWERED_PINGS_MAX {
                        let limit = (PING_INTERVAL * UNANSWERED_PINGS_MAX).as_secs();
                        let message = format!("the new program has not responded for {limit} s");
                        return Err(StepFailure("serve", message));
                    }
                    unanswered += 1;
                    // An error has the same effect as an unanswered PING.
                    let _ = successor.link.send_now(kind::PING);
                }
            }
        }
    }

    /// Makes the successor the main process. From then on, this process only completes its remaining jobs and then
    /// exits.
    async fn leave(&self, successor: &Successor) {
        let control = &self.control;
        let handover = &control.handover;
        handover.set_main(false);
        handover.end.wait_for(None);
        let _ = successor.link.send(kind::MAIN, &Nothing {}, None).await;
        let what = EventKind::UpgradeFinished { pid: successor.pid, version: successor.version.clone() };
        control.events.add(Event::new(Severity::Info, None, what));
        self.report(UpgradeStep {
            pid: Some(successor.pid),
            version: Some(successor.version.clone()),
            ..UpgradeStep::new("finished")
        });
        let ended = async {
            control.jobs_http.close_all().await;
            while control.has_job_requests() {
                tokio::time::sleep(REQUESTS_INTERVAL).await;
            }
        };
        let limit = self.longest_deadline() + LAST_RESPONSE_TIMEOUT;
        let requests = async {
            if timeout(limit, ended).await.is_err() {
                tracing::warn!(
                    "some HTTP clients have not read the responses to their jobs; closing their connections"
                );
            }
            self.send(HandoverCommand::Leave).await;
        };
        let watched = self.watch_stop(successor);
        tokio::join!(requests, watched);
    }

    /// Waits until the successor has exited. If the successor was the main process, stops this supervisor with an
    /// error.
    async fn watch_stop(&self, successor: &Successor) {
        let control = &self.control;
        // The successor closes the link when all workers of this supervisor have exited.
        let mut is_linked = true;
        loop {
            tokio::select! {
                // The successor's last messages are read even if it has already exited.
                biased;
                message = successor.link.receive(), if is_linked => match message {
                    Ok(Some(message)) if message.kind == kind::STOP => control.stop_with_other(),
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => is_linked = false,
                },
                () = successor.ended() => break,
            }
        }
        // If this is still the main process, both supervisors are stopping because the service manager stopped the
        // service.
        if !control.handover.is_main() {
            tracing::error!(
                "the new program has exited: stopping, so that the service manager restarts the service"
            );
            control.handover.end.fail();
            for _ in 0..2 {
                let _ = control.commands.stop();
            }
        }
    }
}

impl Successor {
    /// Waits until the successor's process has exited.
    async fn ended(&self) {
        wait_for_end(&self.pidfd).await;
    }

    /// Kills the successor and waits for its workers to exit.
    async fn kill(&self) {
        // Fails only if the process has already exited.
        let _ = pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        self.ended().await;
        if let Some(lifeline) = &self.lifeline
            && timeout(WORKERS_TIMEOUT, wait_for_end(lifeline)).await.is_err()
        {
            tracing::warn!("the workers of the new program did not exit in time");
        }
    }

    /// Waits for a message of the kind `kind` and ignores other messages. Returns an error if the successor reports a
    /// failure.
    async fn expect(
        &self,
        control: &Control,
        wanted: u8,
        limit: Duration,
        step: &'static str,
    ) -> Result<Incoming, StepFailure> {
        let failure = |message: &str| StepFailure(step, message.to_owned());
        let receive = async {
            loop {
                match self.link.receive().await.map_err(failed(step))? {
                    Some(message) if message.kind == wanted => return Ok(message),
                    Some(message) if message.kind == kind::FAILED => {
                        let Failed { message } = message.message().map_err(failed(step))?;
                        return Err(failure(message));
                    }
                    Some(_) => {}
                    None => {
                        return Err(failure(
                            "the new program has exited; its messages are in the supervisor's log",
                        ));
                    }
                }
            }
        };
        tokio::select! {
            biased;
            received = timeout(limit, receive) => match received {
                Ok(received) => received,
                Err(_) => Err(StepFailure(
                    step,
                    format!("the new program did not reach this step within {} s", limit.as_secs()),
                )),
            },
            () = control.handover.stopping() => Err(failure("the supervisor is stopping")),
        }
    }
}

/// Tells the service manager which process is the new main process, and waits until it has processed the message.
/// Returns an error if the message could not be sent.
async fn name_main_process(pid: u32) -> io::Result<()> {
    let Some(manager) = notify::connect()? else { return Ok(()) };
    manager.send(NotifyState::MainPid(pid).to_string().as_bytes())?;
    if let Err(error) = await_notification(&manager).await {
        tracing::warn!("failed to wait for the service manager: {error}");
    }
    Ok(())
}

/// Waits until the service manager has processed all earlier messages.
async fn await_notification(manager: &UnixDatagram) -> io::Result<()> {
    let (reader, writer) = io::pipe()?;
    let mut outbox = Outbox::default();
    outbox.push(b"BARRIER=1".to_vec(), vec![writer.into()]);
    if !outbox.flush(manager)? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    // The service manager closes its copy of the write end when it has processed the message.
    let reader = register(OwnedFd::from(reader))?;
    match timeout(BARRIER_TIMEOUT, reader.readable()).await {
        Ok(closed) => closed.map(drop),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the service manager is not responding")),
    }
}

/// Version of the protocol between predecessor and successor in an upgrade.
pub const HANDOVER_VERSION: u16 = handover::VERSION;

//! Performs the successor's side of an upgrade: starts all workers while the predecessor is serving, then takes over.
//! If the takeover fails, stops this supervisor, and the predecessor continues. `upgrade` contains the predecessor's
//! side. The data plane moves the connections and permits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use bulkhead_api::{EventKind, Severity, Word};
use bulkhead_plane::command::{Command, Event};
use bulkhead_plane::handover::{Failed, HandoverCommand, Held, Nothing, Quarantined, Switch, kind};
use bulkhead_policy::BulkheadState;
use sd_notify::NotifyState;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::Shared;
use super::handover::{Link, Predecessor, register, send_command, wait_for_end};

/// Takes over from a predecessor. Stops this supervisor if the takeover fails.
pub(super) async fn run(control: Shared, predecessor: Predecessor) {
    let Predecessor { link, pid, is_forced, bulkheads, tenants, lifeline, transfer, jobs } = predecessor;
    let started = Link::new(link).and_then(|link| Ok((Arc::new(link), register(lifeline)?)));
    let (link, lifeline) = match started {
        Ok(started) => started,
        Err(error) => return give_up(&control, &error.to_string()),
    };
    control.unrelated.set_other_root(Some(pid));
    let was_ready: Vec<String> =
        bulkheads.iter().filter(|state| state.is_ready).map(|state| state.name.clone()).collect();
    let prepared = async {
        let (reply, receiver) = oneshot::channel();
        send(&control, HandoverCommand::Restore { bulkheads, tenants, reply }).await?;
        receiver.await.map_err(|_| "the data plane has stopped".to_owned())??;
        control.handover.started.notified().await;
        if is_forced { Ok(()) } else { check_states(&control, &was_ready).await }
    };
    let prepared = tokio::select! {
        prepared = prepared => prepared,
        () = ended(&link) => Err("the previous supervisor has exited".to_owned()),
        () = control.handover.stopping() => Err("a signal stopped the new program".to_owned()),
    };
    if let Err(why) = prepared {
        let _ = link.send(kind::FAILED, &Failed { message: &why }, None).await;
        return give_up(&control, &why);
    }
    if let Err(error) = take_over(&control, &link, transfer).await {
        return give_up(&control, &error.to_string());
    }
    // From here on, this supervisor keeps serving even if the predecessor fails. ACTIVE is sent before the first
    // connection is accepted, so a predecessor that has not received it knows that there are no jobs here.
    let _ = link.send(kind::ACTIVE, &Nothing {}, None).await;
    if let Err(error) = send_command(&control.commands, Command::Listen(jobs)).await {
        return give_up(&control, &error.to_string());
    }
    control.sockets.set_owner(true);
    control.handover.set_other(Some(link.clone()));
    control.handover.set_listening(true);
    report(&control, |pid, version| EventKind::UpgradeSwitched { pid, version });
    serve_beside(&control, &link, &lifeline).await;
    // All of the predecessor's workers have exited.
    if let Err(error) = send(&control, HandoverCommand::PredecessorEnded).await {
        tracing::error!("the permits of the previous supervisor stay reserved: {error}");
    }
    control.unrelated.set_other_root(None);
    control.reloads.lock_inherited_ids().await;
    control.crashes.take_over().await;
    control.handover.set_other(None);
    control.handover.end.wait_for(None);
    // The predecessor may have exited before it could send MAIN, although the service manager already knows the new
    // main process.
    control.handover.set_main(true);
    control.notify_systemd(&[NotifyState::Watchdog]);
    control.handover.predecessor_ended();
    report(&control, |pid, version| EventKind::UpgradeFinished { pid, version });
}

fn report(control: &Shared, what: impl FnOnce(u32, String) -> EventKind) {
    let what = what(std::process::id(), env!("CARGO_PKG_VERSION").to_owned());
    control.events.add(Event::new(Severity::Info, None, what));
}

async fn send(control: &Shared, command: HandoverCommand) -> Result<(), String> {
    let command = Command::Handover(Box::new(command));
    send_command(&control.commands, command).await.map_err(|error| error.to_string())
}

/// Stops this supervisor after a failed takeover, and makes the process exit with an error.
fn give_up(control: &Shared, why: &str) {
    tracing::error!("the upgrade failed: {why}");
    control.handover.end.fail();
    for _ in 0..2 {
        let _ = control.commands.stop();
    }
}

/// Waits until the predecessor has closed the link. Does not discard any messages, because the predecessor sends none
/// until the successor is ready.
async fn ended(link: &Link) {
    while let Ok(Some(_)) = link.receive().await {}
}

/// Returns an error if a bulkhead that was ready in the predecessor has failed to start in this supervisor.
async fn check_states(control: &Shared, was_ready: &[String]) -> Result<(), String> {
    let snapshots = control.snapshots(None).await.ok_or("the data plane is not responding")?;
    let has_failed = |state: &Word<BulkheadState>| {
        [BulkheadState::Failed, BulkheadState::Degraded].iter().any(|failed| *state == *failed)
    };
    let failed = snapshots.into_iter().find(|snapshot| {
        let was_ready = was_ready.contains(&snapshot.name);
        was_ready && snapshot.limit == 0 && has_failed(&snapshot.state)
    });
    match failed {
        None => Ok(()),
        Some(snapshot) => {
            let detail = snapshot.detail.map(|detail| format!(": {detail}")).unwrap_or_default();
            Err(format!(
                "the bulkhead '{}' is ready in the previous supervisor, but no worker has started in the new one{detail}; \
                 use --force to upgrade anyway",
                snapshot.name
            ))
        }
    }
}

/// Receives the predecessor's state and takes over.
async fn take_over(control: &Shared, link: &Link, transfer: OwnedFd) -> io::Result<()> {
    let (mut held, mut quarantined) = (Vec::<Held>::new(), Vec::<Quarantined>::new());
    link.send(kind::READY, &Nothing {}, None).await?;
    let switch: Switch = loop {
        let message = tokio::select! {
            message = link.receive() => message?,
            () = control.handover.stopping() => return Err(io::Error::other("a signal stopped the new program")),
        };
        let message = message.ok_or_else(|| io::Error::other("the previous supervisor has exited"))?;
        match message.kind {
            kind::HELD_AT_SWITCH => held.push(message.message()?),
            kind::QUARANTINED => quarantined.push(message.message()?),
            kind::SWITCH => break message.message()?,
            _ => {}
        }
    };
    control.events.continue_after(switch.events_after);
    let (reply, receiver) = oneshot::channel();
    let tokens = control.tokens.all();
    let command = HandoverCommand::TakeOver { held, quarantined, switch, transfer, tokens, reply };
    send(control, command).await.map_err(io::Error::other)?;
    receiver.await.map_err(|_| io::Error::other("the data plane has stopped"))
}

/// Answers a PING once the data plane has responded. Runs as a separate task, so that a data plane that hangs does not
/// delay the processing of the predecessor's other messages.
async fn answer(control: Shared, link: Arc<Link>) {
    if control.is_healthy().await {
        // If there is no answer, the predecessor sends another PING.
        let _ = link.send_now(kind::PONG);
    }
}

/// Handles the predecessor's messages until the predecessor and its keepers have exited.
async fn serve_beside(control: &Shared, link: &Arc<Link>, lifeline: &AsyncFd<OwnedFd>) {
    let mut is_linked = true;
    loop {
        tokio::select! {
            // The predecessor's last messages are read even if it has already exited.
            biased;
            message = link.receive(), if is_linked => match message {
                Ok(Some(message)) => match message.kind {
                    kind::MAIN => {
                        control.handover.set_main(true);
                        let awaited = lifeline.as_fd().try_clone_to_owned().ok();
                        control.handover.end.wait_for(awaited);
                        // Sent immediately, because the predecessor may have sent its last watchdog message so long ago
                        // that the time limit is about to expire.
                        control.notify_systemd(&[NotifyState::Watchdog]);
                    }
                    kind::STOP => control.stop_with_other(),
                    kind::PING => drop(tokio::spawn(answer(control.clone(), link.clone()))),
                    _ => {}
                },
                Ok(None) | Err(_) => is_linked = false,
            },
            () = wait_for_end(lifeline) => return,
        }
    }
}

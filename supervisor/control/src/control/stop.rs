//! Handles the signals of the supervisor process, and waits for `drain_notice` before a stop. During the notice,
//! `/readyz` responds with 503 while jobs are still accepted. Load balancers then choose another host before the first
//! job is rejected. The data plane drains the jobs, and `reload` and `upgrade` do the work of SIGHUP and SIGUSR2.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bulkhead_config::format_duration;
use bulkhead_plane::command::{Command, CommandSendError};
use futures_util::StreamExt;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};
use signal_hook_tokio::Signals;

use super::{Control, upgrade};

/// Handles signals until the process exits.
pub(super) async fn handle_signals(control: Arc<Control>, mut signals: Signals) {
    while let Some(signal) = signals.next().await {
        let sent = match signal {
            SIGHUP => {
                control.reloads.request();
                Ok(())
            }
            SIGUSR1 => control.commands.send(Command::Summarise),
            SIGUSR2 => {
                upgrade::on_signal(&control);
                Ok(())
            }
            _ if control.handover.signalled() => stop(&control),
            // The predecessor or successor received the same signal, and its STOP message arrived first.
            _ => Ok(()),
        };
        if let Err(error) = sent {
            tracing::error!("signal {signal} had no effect: {error}");
        }
    }
}

/// Stops the supervisor. The first call waits for `drain_notice` and then begins the drain. The second call stops the
/// supervisor immediately.
fn stop(control: &Arc<Control>) -> Result<(), CommandSendError> {
    let duration = control.config().supervisor.drain_notice;
    let mut notice = control.drain_notice.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(notice) = &*notice {
        if !notice.is_finished() {
            notice.abort();
            control.commands.stop()?;
        }
        return control.commands.stop();
    }
    if duration.is_zero() || control.is_stopping.load(Ordering::SeqCst) {
        return control.commands.stop();
    }
    *notice = Some(tokio::spawn(drain_after(control.clone(), duration)).abort_handle());
    Ok(())
}

async fn drain_after(control: Arc<Control>, notice: Duration) {
    control.set_stopping();
    tracing::info!(
        "stopping in {}: until then, /readyz responds with 503, but jobs are still accepted",
        format_duration(notice)
    );
    tokio::time::sleep(notice).await;
    if let Err(error) = control.commands.stop() {
        tracing::error!("failed to begin the drain after drain_notice: {error}");
    }
}

impl Control {
    /// Stops this supervisor because the predecessor or successor is stopping during an upgrade. The first call begins
    /// an orderly stop, and the second call stops the supervisor immediately.
    pub(super) fn stop_with_other(self: &Arc<Self>) {
        if !self.handover.stop_received() {
            return;
        }
        if let Err(error) = stop(self) {
            tracing::error!(
                "upgrade: the other supervisor is stopping, but this supervisor failed to stop: {error}"
            );
        }
    }

    /// Makes `/readyz` respond with 503, and notifies the service manager.
    pub(super) fn set_stopping(&self) {
        if !self.is_stopping.swap(true, Ordering::SeqCst) {
            self.notify_systemd(&[NotifyState::Stopping]);
        }
    }
}

//! The watchdog of the service manager (`WatchdogSec=` of systemd). The service manager restarts a supervisor
//! that sends no messages, so messages are sent only while both planes respond.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

use super::Control;

/// Minimum interval between two messages.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// Sends a message in every half of the service manager's time limit in which the data plane responds, until
/// the control plane ends. Sends nothing without a time limit, or in an embedded supervisor, because only the
/// application knows whether it is healthy.
pub(super) async fn watch(control: Arc<Control>) {
    let limit = sd_notify::watchdog_enabled().filter(|_| !control.is_embedded);
    let Some(limit) = limit else {
        return control.until_shutdown(std::future::pending()).await;
    };
    let send_if_healthy = |control: Arc<Control>| async move {
        if control.is_healthy().await {
            control.notify_systemd(&[NotifyState::Watchdog]);
        }
    };
    control.every((limit / 2).max(INTERVAL_MIN), send_if_healthy).await;
}

//! Sends messages to the service manager's watchdog (`WatchdogSec=` in systemd) while both planes respond. The service
//! manager restarts a supervisor that stops sending messages. `readiness` checks whether the data plane responds.
//! Workers that do not respond are handled by the data plane.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

use super::Control;

/// Minimum interval between messages.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// Sends the service manager two messages per watchdog period while the data plane responds, until the control plane
/// shuts down. Sends nothing if no watchdog is configured, or in an embedded supervisor, where only the application
/// knows whether it is healthy.
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

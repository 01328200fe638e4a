//! Passes permission errors from the server to the requests that they concern. If a client has no permission for a
//! request, the server does not respond to the request. Instead, the server sends a separate error that names the
//! subject. `connection` reports each error, and `fleet` waits for it.

use std::future::Future;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

/// Maximum number of unread errors that are kept for a slow receiver.
const ERRORS_MAX: usize = 256;

/// Permission errors that the server reports for a connection.
#[derive(Clone, Debug)]
pub(crate) struct Refusals(broadcast::Sender<String>);

impl Refusals {
    pub(crate) fn new() -> Self {
        Self(broadcast::Sender::new(ERRORS_MAX))
    }

    /// Records a permission error from the server. Ignores all other errors.
    pub(crate) fn report(&self, error: &str) {
        if error.to_ascii_lowercase().contains("permissions violation") {
            // Sending fails if no request is waiting for a permission error. The failure is harmless.
            let _ = self.0.send(error.to_owned());
        }
    }

    /// Returns a future that waits for the next permission error for `subject`. Must be called before the request is
    /// sent, because errors that were reported earlier are missed.
    pub(crate) fn of(&self, subject: &str) -> impl Future<Output = String> {
        let quoted = format!("\"{subject}\"").to_ascii_lowercase();
        let mut errors = self.0.subscribe();
        async move {
            loop {
                match errors.recv().await {
                    Ok(error) if error.to_ascii_lowercase().contains(&quoted) => return error,
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    // Unreachable, because the channel stays open as long as `self` exists.
                    Err(RecvError::Closed) => std::future::pending().await,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn refusal_is_reported_only_for_its_subject() {
        let refusals = Refusals::new();
        let [other, acme] = ["other", "acme"].map(|tenant| format!("bh.job.b.n.3.{tenant}"));
        let (other, acme) = (refusals.of(&other), refusals.of(&acme));
        refusals.report("Permissions Violation for Publish to \"bh.job.b.n.3.other\"");
        refusals.report("slow consumer \"bh.job.b.n.3.acme\"");
        assert!(other.await.contains("other"));
        assert!(acme.now_or_never().is_none());
    }

    #[tokio::test]
    async fn earlier_refusal_does_not_affect_later_requests() {
        let refusals = Refusals::new();
        refusals.report("Permissions Violation for Publish to \"bh.job.b.n.3.acme\"");
        assert!(refusals.of("bh.job.b.n.3.acme").now_or_never().is_none());
    }
}

//! Permission errors from the server. The server reports them separately, and never responds to a request that lacks
//! permission.

use tokio::sync::watch;

/// The latest permission error that the server reported for a connection.
#[derive(Clone, Debug)]
pub(crate) struct Refusals(watch::Sender<String>);

impl Refusals {
    /// Creates an instance that contains no error yet.
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(String::new()))
    }

    /// Records a permission error from the server. Ignores all other errors.
    pub(crate) fn report(&self, error: &str) {
        if error.to_ascii_lowercase().contains("permissions violation") {
            self.0.send_replace(error.to_owned());
        }
    }

    /// Waits until the server reports a permission error for `subject`, and returns the error message.
    pub(crate) async fn of(&self, subject: &str) -> String {
        let quoted = format!("\"{subject}\"").to_ascii_lowercase();
        let is_own = |error: &String| error.to_ascii_lowercase().contains(&quoted);
        let mut receiver = self.0.subscribe();
        let found = receiver.wait_for(is_own).await.map(|error| error.clone());
        match found {
            Ok(error) => error,
            // Unreachable, because `self` owns the sender.
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn refusal_is_reported_only_for_its_subject() {
        let refusals = Refusals::new();
        refusals.report("Permissions Violation for Publish to \"bh.job.b.n.3.other\"");
        assert!(refusals.of("bh.job.b.n.3.other").await.contains("other"));
        let other = refusals.of("bh.job.b.n.3.acme");
        assert!(tokio::time::timeout(std::time::Duration::from_millis(1), other).await.is_err());
        refusals.report("slow consumer \"bh.job.b.n.3.acme\"");
        assert_eq!(*refusals.0.borrow(), "Permissions Violation for Publish to \"bh.job.b.n.3.other\"");
    }
}

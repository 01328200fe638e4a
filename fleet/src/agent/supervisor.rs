//! Connects the agent to the supervisor on this host, and polls the state of the bulkheads over the admin API. Each
//! poll opens or closes the gates and adjusts the number of permits. `runner` submits the jobs through this connection.
//! The agent neither starts nor configures the supervisor.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use bulkhead_api::{BulkheadState, Bulkheads, Snapshot};
use bulkhead_client::Client;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::Request;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::Shared;
use super::permits::TenantLimits;

/// Interval between polls of the admin API.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between polls while the supervisor does not respond.
const POLL_INTERVAL_DOWN: Duration = Duration::from_millis(250);
/// Maximum time to wait for a response from the admin API.
const POLL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a response, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The supervisor on this host.
pub(crate) struct Supervisor {
    socket: PathBuf,
    admin: PathBuf,
    client: OnceLock<Client>,
}

impl Supervisor {
    pub(crate) fn new(settings: &crate::settings::Settings) -> Self {
        let (socket, admin) = settings.supervisor();
        Self { socket, admin, client: OnceLock::new() }
    }

    /// Returns the client for the jobs socket, or `None` if no connection attempt has succeeded yet. After the first
    /// success, the client reconnects automatically.
    pub(crate) fn client(&self) -> Option<&Client> {
        self.client.get()
    }

    async fn connect(&self) {
        if self.client.get().is_none()
            && let Ok(client) = Client::connect(&self.socket).await
        {
            // Jobs do not wait for the supervisor to be restarted, because another host can usually run them sooner.
            let _ = self.client.set(client.reconnect_timeout(Duration::ZERO));
        }
    }

    async fn bulkheads(&self) -> Result<Vec<Snapshot>, String> {
        let socket = UnixStream::connect(&self.admin).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let request =
            Request::get("/v1/bulkheads").header("Host", "bulkhead").body(Empty::<bytes::Bytes>::new());
        let request = request.map_err(|error| error.to_string())?;
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("status {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| error.to_string())?.to_bytes();
        let bulkheads: Bulkheads = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        Ok(bulkheads.bulkheads)
    }
}

/// Polls the supervisor. Opens the gates of bulkheads that accept jobs, and adjusts the number of permits of each
/// bulkhead.
pub(crate) async fn poll(shared: Arc<Shared>) {
    let supervisor = &shared.supervisor;
    let mut was_reachable = true;
    loop {
        let answer = tokio::time::timeout(POLL_TIMEOUT, supervisor.bulkheads()).await;
        let answer = answer.unwrap_or_else(|_| Err(format!("no response within {POLL_TIMEOUT:?}")));
        if answer.is_ok() {
            supervisor.connect().await;
        }
        if let Err(error) = answer.as_ref()
            && was_reachable
        {
            let admin = supervisor.admin.display();
            tracing::warn!(
                "the supervisor at {admin} cannot be reached: {error}; the agent pulls no jobs until it responds"
            );
        }
        was_reachable = answer.is_ok();
        apply(&shared, answer.as_deref().unwrap_or_default());
        let is_steady = was_reachable && shared.clock.is_measured();
        tokio::time::sleep(if is_steady { POLL_INTERVAL } else { POLL_INTERVAL_DOWN }).await;
    }
}

fn apply(shared: &Shared, snapshots: &[Snapshot]) {
    // No jobs are pulled while the clock offset is unknown, because jobs could be rejected as late before their
    // deadlines.
    let can_take = shared.supervisor.client().is_some() && shared.clock.is_measured();
    for served in shared.bulkheads.values() {
        let snapshot = snapshots.iter().find(|snapshot| snapshot.name == served.name);
        let is_shared = snapshot.is_none_or(is_rate_limit_shared);
        served.is_rate_limit_shared.store(is_shared, Ordering::Relaxed);
        let is_isolated = snapshot.is_some_and(has_isolated_tenants);
        served.is_isolated.store(is_isolated, Ordering::Relaxed);
        let limit = snapshot.map_or(0, limit);
        let share = |limit: u64| ((limit as f64 * served.settings.share).floor() as usize).max(1);
        if limit > 0 {
            served.permits.resize(share(limit));
        }
        let tenant_limits = snapshot.filter(|_| is_isolated).map(|snapshot| TenantLimits {
            by_tenant: tenant_limits(snapshot)
                .into_iter()
                .map(|(name, limit)| (name.to_owned(), share(limit)))
                .collect(),
            default: share(limit_per_tenant(snapshot)),
        });
        served.tenant_permits.lock().unwrap_or_else(PoisonError::into_inner).set_limits(tenant_limits);
        served.gate.set_ready(can_take && limit > 0);
    }
}

/// Returns true if the tenants of a bulkhead have separate workers. A supervisor that does not report this is
/// recognised by workers that name a tenant, or by a ready bulkhead without permits.
fn has_isolated_tenants(snapshot: &Snapshot) -> bool {
    snapshot.isolated
        || snapshot.workers.iter().any(|worker| worker.tenant.is_some())
        || (snapshot.state == BulkheadState::Ready && snapshot.limit == 0)
}

/// Returns true if a rate limit applies to all tenants together. Isolated tenants have separate rate limits.
fn is_rate_limit_shared(snapshot: &Snapshot) -> bool {
    !has_isolated_tenants(snapshot) && snapshot.rate_limit.as_ref().is_some_and(|rate| rate.per == "bulkhead")
}

/// Returns the number of jobs that a bulkhead can run at once, or 0 if it accepts no jobs.
fn limit(snapshot: &Snapshot) -> u64 {
    let is = |state: BulkheadState| snapshot.state == state;
    if has_isolated_tenants(snapshot) {
        // The first job of a tenant makes the supervisor start workers for the tenant, so there must be permits for one
        // more tenant.
        let mut new_tenant = limit_per_tenant(snapshot);
        if snapshot.isolated {
            // The limit of some tenants can be higher than the bulkhead's, which can be 0.
            new_tenant = new_tenant.max(1);
        }
        let limit = snapshot.limit.saturating_add(new_tenant);
        return if is(BulkheadState::Draining) { 0 } else { limit };
    }
    if is(BulkheadState::Ready) || is(BulkheadState::Degraded) { snapshot.limit } else { 0 }
}

/// Returns the number of jobs that a new isolated tenant can run at once.
fn limit_per_tenant(snapshot: &Snapshot) -> u64 {
    u64::from(snapshot.processes) * u64::from(snapshot.max_in_flight)
}

/// Returns the number of jobs that each isolated tenant with workers can run at once.
fn tenant_limits(snapshot: &Snapshot) -> BTreeMap<&str, u64> {
    // A worker and its replacement have the same slot, and only one of them runs jobs.
    let mut slots = BTreeMap::new();
    for worker in snapshot.workers.iter().filter(|worker| !worker.spare) {
        // An older supervisor does not report `max_in_flight`.
        let max_in_flight = worker.max_in_flight.unwrap_or(snapshot.max_in_flight);
        if let Some(tenant) = &worker.tenant {
            slots.insert((tenant.as_str(), worker.slot), u64::from(max_in_flight));
        }
    }
    let mut limits = BTreeMap::new();
    slots.into_iter().for_each(|((tenant, _), permits)| *limits.entry(tenant).or_default() += permits);
    limits
}

#[cfg(test)]
mod tests {
    use bulkhead_api::{Rate, Worker};

    use super::*;

    fn snapshot(state: BulkheadState, limit: u64) -> Snapshot {
        Snapshot { state: state.into(), limit, processes: 2, max_in_flight: 4, ..Snapshot::default() }
    }

    #[test]
    fn limit_of_isolated_tenants_covers_one_more_tenant() {
        let isolated = |state, limit| Snapshot { isolated: true, ..snapshot(state, limit) };
        for state in [BulkheadState::Ready, BulkheadState::Starting, BulkheadState::Degraded] {
            assert_eq!(limit(&isolated(state, 0)), 8);
        }
        assert_eq!(limit(&isolated(BulkheadState::Ready, 13)), 21);
        assert_eq!(limit(&isolated(BulkheadState::Draining, 8)), 0);
        // Some tenants may have a higher limit.
        assert_eq!(limit(&Snapshot { max_in_flight: 0, ..isolated(BulkheadState::Ready, 0) }), 1);
        // This supervisor does not report whether tenants are isolated.
        assert_eq!(limit(&snapshot(BulkheadState::Ready, 0)), 8);
        let worker = Worker { tenant: Some("acme".into()), ..Worker::default() };
        assert!(has_isolated_tenants(&Snapshot {
            workers: vec![worker],
            ..snapshot(BulkheadState::Starting, 0)
        }));
        assert!(!has_isolated_tenants(&snapshot(BulkheadState::Starting, 0)));
    }

    #[test]
    fn tenant_limits_follow_the_workers() {
        let worker = |tenant: Option<&str>, slot, max_in_flight, spare| Worker {
            tenant: tenant.map(str::to_owned),
            slot,
            max_in_flight,
            spare,
            ..Worker::default()
        };
        let workers = vec![
            worker(Some("acme"), 0, Some(3), false),
            worker(Some("acme"), 1, Some(3), false),
            // This worker is the replacement of the second worker.
            worker(Some("acme"), 1, Some(3), false),
            worker(Some("acme"), 2, Some(3), true),
            worker(Some("quiet"), 0, None, false),
            worker(None, 0, Some(3), false),
        ];
        let snapshot = Snapshot { workers, ..snapshot(BulkheadState::Ready, 10) };
        assert_eq!(tenant_limits(&snapshot), BTreeMap::from([("acme", 6), ("quiet", 4)]));
        assert_eq!(limit_per_tenant(&snapshot), 8);
    }

    #[test]
    fn rate_limit_is_shared_unless_tenants_have_their_own() {
        let rate = |per: &'static str| Some(Rate { per: per.into(), ..Rate::default() });
        let shared = Snapshot { rate_limit: rate("bulkhead"), ..Snapshot::default() };
        assert!(is_rate_limit_shared(&shared));
        // If the bulkhead as a whole has no rate limit, only the rate limit of a single tenant can cause a rejection.
        assert!(!is_rate_limit_shared(&Snapshot::default()));
        assert!(!is_rate_limit_shared(&Snapshot { rate_limit: rate("tenant"), ..Snapshot::default() }));
        assert!(!is_rate_limit_shared(&Snapshot { isolated: true, ..shared }));
    }

    #[test]
    fn bulkhead_that_is_not_ready_accepts_no_jobs() {
        assert_eq!(limit(&snapshot(BulkheadState::Degraded, 3)), 3);
        for (state, value) in
            [(BulkheadState::Degraded, 0), (BulkheadState::Starting, 0), (BulkheadState::Draining, 8)]
        {
            assert_eq!(limit(&snapshot(state, value)), 0);
        }
    }
}

//! The agent for one host. It pulls jobs for the bulkheads of the local supervisor and records their outcomes. All
//! decisions about jobs are made in [`decide`](crate::decide).

mod clock;
mod gate;
mod held;
mod http;
mod metrics;
mod permits;
mod presence;
mod pulls;
mod runner;
mod supervisor;
mod watch;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bulkhead_linux::notify;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::decide::{Faults, Rules};
use crate::job::HEADER_BYTES_RESERVED;
use crate::names::JOBS;
use crate::random;
use crate::server::connection;
use crate::server::messages::{ApiError, api};
use crate::server::streams;
use crate::settings::{Bulkhead, Settings};
use clock::Clock;
use gate::Gate;
use held::Held;
use metrics::Metrics;
use permits::{Permit, Permits, TenantPermits};
use supervisor::Supervisor;

/// Interval at which a starting agent checks whether the servers respond.
const START_RETRY: Duration = Duration::from_secs(1);

/// A bulkhead that the agent serves.
struct Served {
    name: String,
    settings: Bulkhead,
    rules: Rules,
    /// Current value of [`Rules::is_rate_limit_shared`], which can change while the agent runs.
    is_rate_limit_shared: AtomicBool,
    /// Current value of [`Rules::is_isolated`], which can change while the agent runs.
    is_isolated: AtomicBool,
    permits: Permits,
    tenant_permits: Mutex<TenantPermits>,
    gate: Gate,
}

/// The permits that a job holds.
struct JobPermits {
    tenant: Option<Permit>,
    bulkhead: Permit,
}

/// State shared by all tasks of an agent.
struct Shared {
    host: String,
    /// ID of this process, unique among all agents that have ever run on the same host.
    instance: String,
    client: async_nats::Client,
    supervisor: Supervisor,
    bulkheads: BTreeMap<String, Arc<Served>>,
    settings: Settings,
    held: Held,
    clock: Clock,
    metrics: Metrics,
    /// Notified when a pull has failed, because the consumer might have been replaced.
    pull_failed: Notify,
}

/// Error that stops an agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The connection to the NATS servers failed.
    #[error(transparent)]
    Connect(#[from] connection::ConnectError),
    /// The fleet's streams or consumers have not been created, or do not match the configuration.
    #[error("{0}")]
    NotPrepared(String),
    /// The metrics address cannot be bound.
    #[error("failed to listen on {0}: {1}")]
    Listen(std::net::SocketAddr, std::io::Error),
    /// An essential task ended unexpectedly.
    #[error("an essential task ended: {0}; see the log for the reason")]
    TaskEnded(String),
}

/// Runs an agent until `stop` completes. Then stops pulling jobs, and waits up to `drain_timeout` for the jobs in
/// progress. `faults` is set only by tests.
pub async fn run(
    settings: Settings,
    faults: Faults,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let client =
        connection::connect(&settings.nats, &format!("bulkhead-fleet {}", settings.host()), true).await?;
    let mut stop = std::pin::pin!(stop);
    tokio::select! {
        ready = wait_until_prepared(&client, &settings) => ready?,
        () = &mut stop => return Ok(()),
    }
    let shared = Arc::new(Shared::new(client, settings, faults));
    let mut tasks = JoinSet::new();
    if let Some(address) = shared.settings.agent.http {
        let listener = tokio::net::TcpListener::bind(address).await;
        let listener = listener.map_err(|error| AgentError::Listen(address, error))?;
        tasks.spawn(http::serve(listener, shared.clone()));
    }
    tasks.spawn(supervisor::poll(shared.clone()));
    tasks.spawn(presence::announce(shared.clone()));
    tasks.spawn(watch::run(shared.clone()));
    tasks.spawn(watch::check_consumers(shared.clone()));
    tasks.spawn(held::keep(shared.clone()));
    for served in shared.bulkheads.values() {
        for lane in 0..served.settings.lanes {
            tasks.spawn(pulls::run(shared.clone(), served.clone(), lane));
        }
    }
    tracing::info!(host = shared.host, bulkheads = shared.bulkheads.len(), "agent started");
    let _ = notify::notify("READY=1");
    tokio::select! {
        () = stop => {}
        ended = tasks.join_next() => return Err(AgentError::TaskEnded(format!("{ended:?}"))),
    }
    let _ = notify::notify("STOPPING=1");
    drain(&shared).await;
    tasks.shutdown().await;
    Ok(())
}

/// Waits until the servers respond. Fails if the fleet's streams do not exist, or if a consumer does not match the
/// configuration.
async fn wait_until_prepared(client: &async_nats::Client, settings: &Settings) -> Result<(), AgentError> {
    loop {
        match problem(client, settings).await {
            Ok(None) => return Ok(()),
            Ok(Some(problem)) => return Err(AgentError::NotPrepared(problem)),
            Err(error) => tracing::warn!("the servers are not ready: {}; trying again", error.description),
        }
        tokio::time::sleep(START_RETRY).await;
    }
}

/// Returns the reason why the agent cannot use the fleet's streams and consumers, if there is one.
async fn problem(client: &async_nats::Client, settings: &Settings) -> Result<Option<String>, ApiError> {
    const STREAM_NOT_FOUND: u64 = 10059;
    match api::<Value>(client, &format!("STREAM.INFO.{JOBS}"), Value::Null).await {
        Ok(_) => {}
        Err(error) if error.err_code == STREAM_NOT_FOUND => {
            return Ok(Some(format!("the fleet has no {JOBS} stream; run: bulkhead fleet init")));
        }
        Err(error) => return Err(error),
    }
    let mismatches: Vec<_> = streams::mismatches(client, settings).await?.into_values().collect();
    Ok((!mismatches.is_empty()).then(|| mismatches.join("\n")))
}

async fn drain(shared: &Shared) {
    shared.bulkheads.values().for_each(|served| served.gate.drain());
    let timeout = shared.settings.agent.drain_timeout;
    tracing::info!(held = shared.held.len(), "draining for at most {timeout:?}");
    if tokio::time::timeout(timeout, shared.held.until_empty()).await.is_err() {
        tracing::warn!(
            held = shared.held.len(),
            "drain_timeout expired with jobs still held: idempotent jobs will run again, and the others will end as \
             host_lost"
        );
    }
    let _ = tokio::time::timeout(Duration::from_secs(1), shared.client.flush()).await;
}

/// Returns the maximum size of a result, in bytes. This limit can change whenever the client reconnects to a server.
fn result_bytes_max(client: &async_nats::Client) -> usize {
    client.max_payload().saturating_sub(HEADER_BYTES_RESERVED)
}

impl Served {
    /// Returns the permits of a tenant, or `None` if tenants are not isolated.
    fn permits_of(&self, tenant: &str) -> Option<Arc<Permits>> {
        self.tenant_permits.lock().unwrap_or_else(PoisonError::into_inner).of(tenant)
    }

    /// Waits for the permits for a job. Requests the tenant's permit first, so that the jobs of a tenant at its limit
    /// do not keep other tenants' jobs waiting.
    async fn acquire(&self, of_tenant: Option<&Permits>) -> JobPermits {
        let tenant = match of_tenant {
            Some(set) => Some(set.acquire().await),
            None => None,
        };
        JobPermits { tenant, bulkhead: self.permits.acquire().await }
    }
}

impl Shared {
    fn new(client: async_nats::Client, settings: Settings, faults: Faults) -> Self {
        let bulkheads = settings.bulkhead.iter().map(|(name, of)| {
            let rules = Rules {
                ack_wait: settings.streams.ack_wait(),
                host_lost_after: settings.streams.host_lost_after,
                attempts_max: of.attempts,
                result_bytes_max: result_bytes_max(&client),
                is_rate_limit_shared: true,
                is_isolated: false,
                faults,
            };
            let served = Served {
                name: name.clone(),
                settings: of.clone(),
                rules,
                is_rate_limit_shared: AtomicBool::new(true),
                is_isolated: AtomicBool::new(false),
                permits: Permits::new(),
                tenant_permits: Mutex::default(),
                gate: Gate::new(),
            };
            (name.clone(), Arc::new(served))
        });
        Self {
            host: settings.host(),
            instance: random::text(),
            supervisor: Supervisor::new(&settings),
            bulkheads: bulkheads.collect(),
            held: Held::default(),
            clock: Clock::default(),
            metrics: Metrics::new(settings.bulkhead.keys()),
            pull_failed: Notify::new(),
            client,
            settings,
        }
    }
}

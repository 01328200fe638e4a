//! Pulls the messages of one lane. A lane is the JetStream consumer for some of a bulkhead's tenants, and a permit
//! allows one job to run. The agent starts [`run`] for each lane, and [`runner`] processes the jobs that get a permit.
//!
//! Each pull requests one message more than the lane's share of the free permits. A message that gets no permit within
//! a second is returned to the server, because another host might run the job sooner. While no permit is returned or
//! acquired, the lane still pulls up to 16 messages every two seconds, in a short pull. The outcome of a job whose
//! deadline has passed is recorded without a permit.
//!
//! Other pulls expire after five seconds, because pulls that never expire can stall after a leader change. A pull is abandoned
//! if its heartbeats fail to arrive.
//!
//! Each lane has its own connection, because a message with unreadable headers breaks the connection that receives it.
//! Running jobs and other lanes use other connections. If only the lane's connection is lost, the lane searches for
//! unreadable messages and deletes them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream;
use async_nats::{Client, Message, Subscriber};
use futures_util::StreamExt;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::held::in_progress;
use super::metrics::count;
use super::permits::Permits;
use super::runner::{self, Delivered};
use super::{Served, Shared};
use crate::decide::outcome::tenant_full_delay;
use crate::decide::{self, RETURN_DELAY_MAX, RETURN_DELAY_MIN};
use crate::names::{JOBS, consumer, parse_job_subject};
use crate::random;
use crate::server::connection::{Loss, connect_with_loss};
use crate::server::unreadable;

/// Duration of one pull.
const PULL_TIME: Duration = Duration::from_secs(5);
/// Interval between the server's heartbeats while a pull is idle.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Time without a heartbeat after which the agent abandons a pull.
const SILENCE_MAX: Duration = Duration::from_millis(2500);
/// Delay after a failed pull, and before a new attempt to connect.
const PAUSE: Duration = Duration::from_millis(250);
/// Maximum time that a lane without free permits waits for a change before it checks again.
const FULL_PAUSE: Duration = Duration::from_millis(25);
/// Maximum time that a lane without free permits pulls no messages. Limits the delay until the outcome of a job whose
/// deadline has passed.
const RECHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Number of messages that a lane without free permits pulls when it checks again. The server delivers returned messages
/// before others, so with a small number, a few jobs with a long deadline would hide all jobs behind them.
const RECHECK_BATCH: usize = 16;
/// Duration of a pull that only checks for jobs whose deadline has passed. Short, so that other hosts with free permits
/// get new jobs.
const RECHECK_PULL_TIME: Duration = Duration::from_millis(250);
/// Maximum time that a pulled message waits for a permit.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum time that a lane waits before it returns the job of a tenant that already has enough waiting jobs.
const TENANT_FULL_PAUSE: Duration = Duration::from_millis(5);
/// Minimum interval between two deliveries of messages that a lane has returned because their tenants were at their
/// limits. The server delivers these before messages that have not been delivered yet.
const RETURN_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of messages per pull.
const BATCH_MAX: usize = 256;
/// Prefix of the reply subjects of delivered jobs, to which the agent sends acknowledgements.
const ACKNOWLEDGEMENTS: &str = "$JS.ACK.";
/// Status code that the server sends when a pull expires.
const TIMED_OUT: u16 = 408;
/// Status of a heartbeat.
const IDLE: u16 = 100;
/// Status codes that the server sends if the consumer has been deleted or does not exist. A consumer whose leader has
/// changed has the same status codes.
const CONSUMER_GONE: [u16; 2] = [409, 503];

/// A JetStream consumer for some of a bulkhead's tenants, and the state of its pulls.
struct Lane {
    shared: Arc<Shared>,
    served: Arc<Served>,
    consumer: String,
    waiting: Arc<Waiting>,
    dispatch: mpsc::Sender<(Delivered, Instant)>,
}

/// Messages that a lane has received and that are waiting for a permit.
#[derive(Debug)]
struct Waiting {
    count: AtomicUsize,
    /// Number of jobs whose deadline has passed and that are being decided without a permit. The lane pulls no messages
    /// meanwhile unless a permit is free.
    late: AtomicUsize,
    /// Number of messages that were returned because their tenants were at their limits, and whose redelivery is still
    /// pending.
    returned: Arc<AtomicUsize>,
    /// Value of [`Permits::moves`] when a message was last given back, and the time. `None` if a message has received a
    /// permit since then.
    last_return: Mutex<Option<(u64, Instant)>>,
}

impl Waiting {
    fn last_return(&self) -> MutexGuard<'_, Option<(u64, Instant)>> {
        self.last_return.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the lane checks for jobs whose deadline has passed.
    fn checked(&self) {
        if let Some((_, time)) = &mut *self.last_return() {
            *time = Instant::now();
        }
    }

    /// Returns true if a lane without free permits must not pull another message yet. Otherwise, the message that the
    /// lane has given back could arrive again at once.
    fn is_blocked(&self, moves: u64) -> bool {
        self.last_return()
            .is_some_and(|(at_return, time)| at_return == moves && time.elapsed() < RECHECK_INTERVAL)
    }
}

/// Counts a job that is decided without a permit until the guard is dropped.
struct LateGuard(Arc<Waiting>);

impl LateGuard {
    fn new(waiting: Arc<Waiting>) -> Self {
        waiting.late.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for LateGuard {
    fn drop(&mut self) {
        self.0.late.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Pulls the jobs of one lane until the agent stops.
pub(crate) async fn run(shared: Arc<Shared>, served: Arc<Served>, index: u8) {
    let waiting = Arc::new(Waiting {
        count: AtomicUsize::new(0),
        late: AtomicUsize::new(0),
        returned: Arc::default(),
        last_return: Mutex::default(),
    });
    let (dispatch, received) = mpsc::channel(2 * BATCH_MAX);
    let dispatcher = dispatch_all(shared.clone(), served.clone(), waiting.clone(), received);
    let consumer = consumer(&served.name, index);
    let lane = Lane { shared, served, consumer, waiting, dispatch };
    tokio::join!(lane.pull_all(), dispatcher);
}

impl Lane {
    async fn pull_all(self) {
        let name = format!("bulkhead-fleet {} {}", self.shared.host, self.consumer);
        let mut search_start = 1;
        loop {
            let connects = self.connects();
            let (client, loss) = match connect_with_loss(&self.shared.settings.nats, &name).await {
                Ok(connected) => connected,
                Err(error) => {
                    tracing::warn!("{error}; trying again");
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            self.pull_from(client, loss).await;
            // If the agent's other connection was not lost, the loss of this connection was caused by an unreadable
            // message.
            let client = &self.shared.client;
            if client.connection_state() == State::Connected && self.connects() == connects {
                search_start = unreadable::delete(client, &self.served.name, search_start).await;
            }
        }
    }

    /// Returns the number of times that the agent's other connection has been established.
    fn connects(&self) -> u64 {
        self.shared.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Pulls messages until the connection is lost.
    async fn pull_from(&self, client: Client, mut loss: Loss) {
        while !loss.has_happened() {
            let inbox = client.new_inbox();
            match client.subscribe(inbox.clone()).await {
                Ok(mut subscriber) => self.pull_into(&client, &inbox, &mut subscriber, &mut loss).await,
                Err(error) => tracing::warn!("failed to subscribe: {error}; trying again"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Pulls messages until the subscription must be renewed.
    async fn pull_into(&self, client: &Client, inbox: &str, subscriber: &mut Subscriber, loss: &mut Loss) {
        loop {
            self.served.gate.until_open().await;
            if loss.has_happened() {
                return;
            }
            let (batch, is_recheck) = self.batch();
            if batch == 0 {
                let _ = tokio::time::timeout(FULL_PAUSE, self.served.permits.until_moved()).await;
                let has_returned = self.waiting.last_return().is_some();
                if has_returned && self.served.settings.lanes > 1 {
                    // Lanes that have given a message back compete for the next permit. A random delay ensures that no
                    // lane is always first.
                    tokio::time::sleep(FULL_PAUSE.mul_f64(random::fraction())).await;
                }
                continue;
            }
            let mut request = json!({
                "batch": batch,
                "expires": PULL_TIME.as_nanos() as u64,
                "idle_heartbeat": HEARTBEAT.as_nanos() as u64,
            });
            if is_recheck {
                // The next check follows after RECHECK_INTERVAL, even if no message is waiting now.
                self.waiting.checked();
                request = json!({ "batch": batch, "expires": RECHECK_PULL_TIME.as_nanos() as u64 });
            }
            let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{JOBS}.{}", self.consumer);
            let sent = client.publish_with_reply(subject, inbox.to_owned(), request.to_string().into());
            if sent.await.is_err() || !self.receive(subscriber, loss, batch).await {
                return;
            }
        }
    }

    /// Returns the number of messages to request: the lane's share of the free permits plus one, minus the messages
    /// that are already waiting. After the lane has given a message back, it requests no message until a permit is
    /// returned or acquired, or until [`RECHECK_INTERVAL`] has passed.
    ///
    /// Also returns true if the lane only checks for jobs whose deadline has passed.
    fn batch(&self) -> (usize, bool) {
        let (free, moves) = (self.served.permits.free(), self.served.permits.moves());
        let is_late_pending = self.waiting.late.load(Ordering::Relaxed) > 0;
        if free == 0 && (is_late_pending || self.waiting.is_blocked(moves)) {
            return (0, false);
        }
        let is_recheck =
            free == 0 && self.waiting.last_return().is_some_and(|(at_return, _)| at_return == moves);
        let part = free / usize::from(self.served.settings.lanes);
        let wanted = if is_recheck { RECHECK_BATCH } else { part + 1 };
        (wanted.saturating_sub(self.waiting.count.load(Ordering::Relaxed)).min(BATCH_MAX), is_recheck)
    }

    /// Receives the messages of one pull. Returns false if the subscription must be renewed.
    async fn receive(&self, subscriber: &mut Subscriber, loss: &mut Loss, batch: usize) -> bool {
        let mut left = batch;
        while left > 0 {
            let next = tokio::select! {
                // Messages that arrived before the loss of the connection are still processed.
                biased;
                next = tokio::time::timeout(SILENCE_MAX, subscriber.next()) => next,
                // The pull is still pending on the server. Dropping the subscription cancels it.
                () = self.served.gate.until_closed() => return false,
                () = loss.happens() => return false,
            };
            // No heartbeat has arrived, because the leader has changed or the connection is broken.
            let Ok(Some(message)) = next else { return false };
            match control_status(&message) {
                None => {
                    left -= 1;
                    self.received(message).await;
                }
                Some(IDLE) => {}
                Some(TIMED_OUT) => return true,
                Some(status) => {
                    if CONSUMER_GONE.contains(&status) {
                        self.shared.pull_failed.notify_one();
                    }
                    tracing::debug!(
                        status,
                        "a pull request to {} ended: {:?}",
                        self.consumer,
                        message.description
                    );
                    tokio::time::sleep(PAUSE).await;
                    return true;
                }
            }
        }
        true
    }

    async fn received(&self, message: Message) {
        let Some(delivered) = self.read(message) else { return };
        if delivered.message.delivery > 1
            && let Some(counters) = self.shared.metrics.of(&self.served.name)
        {
            count(&counters.redelivered);
        }
        let (sequence, reply) = (delivered.message.stream_sequence, delivered.reply.clone());
        if !self.shared.held.hold(sequence, reply.clone()) {
            return in_progress(&self.shared, reply).await;
        }
        self.waiting.count.fetch_add(1, Ordering::Relaxed);
        if self.dispatch.send((delivered, Instant::now() + WAIT_MAX)).await.is_err() {
            self.shared.held.release(sequence);
        }
    }

    /// Reads the properties of a delivered message. Returns `None` if the subject is not a valid job subject. The
    /// server then keeps redelivering the message until an operator removes it.
    fn read(&self, message: Message) -> Option<Delivered> {
        let reply = message.reply.clone()?;
        let names = parse_job_subject(&message.subject)?;
        let context = jetstream::new(self.shared.client.clone());
        let message = jetstream::Message { message, context };
        let info = message.info().ok()?;
        let published = u64::try_from(info.published.unix_timestamp_nanos()).ok()?;
        let properties = decide::Message {
            stream_sequence: info.stream_sequence,
            delivery: u64::try_from(info.delivered).ok()?,
            published: Duration::from_nanos(published),
        };
        Some(Delivered { message: properties, names, reply, content: message.message })
    }
}

/// Returns the status of a message about a pull, or `None` for a job. The first header line of a job can also contain a
/// status, because older servers, such as 2.11, store the line that the submitter sent. Only jobs can be acknowledged.
fn control_status(message: &Message) -> Option<u16> {
    let is_job = message.reply.as_ref().is_some_and(|reply| reply.starts_with(ACKNOWLEDGEMENTS));
    message.status.map(|status| status.as_u16()).filter(|_| !is_job)
}

/// Runs each received job as soon as a permit is free, or gives it back at its time limit. Lanes receive permits in the
/// order in which they requested them, as long as permits become free within [`WAIT_MAX`]. If there is no free permit, a
/// job whose deadline has passed does not wait for one.
async fn dispatch_all(
    shared: Arc<Shared>,
    served: Arc<Served>,
    waiting: Arc<Waiting>,
    mut received: mpsc::Receiver<(Delivered, Instant)>,
) {
    while let Some((delivered, limit)) = received.recv().await {
        let of_tenant = served.permits_of(&delivered.names.1);
        if let Some(permits) = of_tenant.clone().filter(|permits| permits.free() == 0) {
            waiting.count.fetch_sub(1, Ordering::Relaxed);
            wait_beside_lane(&shared, &served, &waiting.returned, permits, delivered, limit).await;
            continue;
        }
        if served.permits.free() == 0 && runner::is_late(&shared, &served, &delivered) {
            let (shared, served) = (shared.clone(), served.clone());
            let guard = LateGuard::new(waiting.clone());
            waiting.count.fetch_sub(1, Ordering::Relaxed);
            tokio::spawn(async move {
                runner::run_without_permit(&shared, &served, delivered, RETURN_DELAY_MIN).await;
                drop(guard);
            });
            continue;
        }
        let permits = tokio::select! {
            biased;
            () = served.gate.until_closed() => Err(RETURN_DELAY_MIN),
            permits = served.acquire(of_tenant.as_deref()) => Ok(permits),
            () = tokio::time::sleep_until(limit) => {
                *waiting.last_return() = Some((served.permits.moves(), Instant::now()));
                // If many messages wait, a longer delay for some of them lets the lane receive the messages behind them.
                // The others can take a permit that becomes free meanwhile.
                let is_crowded = waiting.count.load(Ordering::Relaxed) > RECHECK_BATCH / 2;
                let delay = tenant_full_delay(delivered.message.delivery, random::fraction());
                Err(if is_crowded { delay } else { RETURN_DELAY_MIN })
            }
        };
        waiting.count.fetch_sub(1, Ordering::Relaxed);
        match permits {
            Ok(permits) => {
                *waiting.last_return() = None;
                runner::spawn(&shared, &served, delivered, permits);
            }
            Err(delay) => runner::give_back(&shared, &served, delivered, delay).await,
        }
    }
}

/// Makes a job wait for one of its tenant's permits, while the lane continues with other tenants' jobs. If enough of
/// the tenant's jobs are waiting, returns the job after a short time, so that the lane is not busy with returning jobs.
async fn wait_beside_lane(
    shared: &Arc<Shared>,
    served: &Arc<Served>,
    returned: &Arc<AtomicUsize>,
    permits: Arc<Permits>,
    delivered: Delivered,
    limit: Instant,
) {
    let mut waiting = permits.try_wait();
    if waiting.is_none() {
        let _ = tokio::time::timeout(TENANT_FULL_PAUSE, permits.until_moved()).await;
        waiting = permits.try_wait();
    }
    let Some(waiting) = waiting else {
        let count = u32::try_from(returned.fetch_add(1, Ordering::Relaxed)).unwrap_or(u32::MAX);
        let mut delay = tenant_full_delay(delivered.message.delivery, random::fraction());
        if delivered.message.delivery > 1 {
            delay = delay.max(RETURN_INTERVAL.saturating_mul(count)).min(RETURN_DELAY_MAX);
        }
        let returned = returned.clone();
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            returned.fetch_sub(1, Ordering::Relaxed);
        });
        return runner::give_back(shared, served, delivered, delay).await;
    };
    let (shared, served) = (shared.clone(), served.clone());
    tokio::spawn(async move {
        let acquired = tokio::select! {
            biased;
            () = served.gate.until_closed() => None,
            acquired = served.acquire(Some(&permits)) => Some(acquired),
            () = tokio::time::sleep_until(limit) => None,
        };
        drop(waiting);
        match acquired {
            Some(acquired) => runner::spawn(&shared, &served, delivered, acquired),
            None => runner::give_back(&shared, &served, delivered, RETURN_DELAY_MIN).await,
        }
    });
}

#[cfg(test)]
mod tests {
    use async_nats::StatusCode;

    use super::*;

    fn message(status: Option<u16>, reply: Option<&str>) -> Message {
        Message {
            subject: "bh.job.b.n.2.acme".into(),
            reply: reply.map(Into::into),
            payload: "".into(),
            headers: None,
            status: status.map(|status| StatusCode::from_u16(status).unwrap()),
            description: None,
            length: 0,
        }
    }

    #[test]
    fn job_with_a_status_is_not_a_control_message() {
        let reply = "$JS.ACK.BH_JOBS.b_n_0.1.7.7.1764000000000000000.0";
        for status in [None, Some(IDLE), Some(TIMED_OUT), Some(409), Some(503), Some(404)] {
            assert_eq!(control_status(&message(status, Some(reply))), None, "{status:?}");
            assert_eq!(control_status(&message(status, None)), status);
        }
    }
}

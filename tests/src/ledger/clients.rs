//! Clients that send many concurrent jobs over several connections, cancel some, and record every outcome.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, JobError};
use bulkhead_shared::{Executed, Priority};

use super::chaos::Random;
use super::{AHEAD, BULKHEADS, Bulkhead, Plan, worker};
use crate::PATIENCE;

/// Number of client connections, each of which has up to `LANES` jobs in flight.
pub const CONNECTIONS: usize = 4;
const LANES: usize = 12;

/// Maximum time to wait for the outcomes of the last jobs.
const LAST_OUTCOMES_WITHIN: Duration = Duration::from_secs(60);

/// A client's record of a job.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name of the job's bulkhead.
    pub bulkhead: &'static str,
    /// Operation of the job.
    pub operation: String,
    /// Outcome of the job.
    pub told: Told,
    /// True if the job was marked as idempotent.
    pub is_idempotent: bool,
}

/// Outcome of a job as seen by the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The job has no outcome yet.
    Nothing,
    /// The client cancelled the job.
    Dropped,
    /// The client received the correct result.
    Ok,
    /// The client received the result of another job.
    WrongResult,
    /// Any other outcome.
    Ended {
        /// Outcome and reason, such as `rejected/queue_full`.
        name: String,
        /// Whether the supervisor reports the job as executed.
        executed: Executed,
    },
    /// The connection was lost. This is a fault, because the supervisor must not exit under load.
    Lost(String),
}

impl Told {
    /// Returns the label for this outcome in the statistics.
    pub fn name(&self) -> String {
        match self {
            Self::Nothing => "no outcome".into(),
            Self::Dropped => "dropped by the client".into(),
            Self::Ok => "ok".into(),
            Self::WrongResult => "wrong result".into(),
            Self::Ended { name, .. } => name.clone(),
            Self::Lost(why) => format!("lost: {why}"),
        }
    }

    /// Returns true if the outcome is `ok`.
    pub fn is_ok(&self) -> bool {
        matches!(self, Self::Ok)
    }

    /// Returns true if the supervisor reports that the job was executed.
    pub fn says_executed(&self) -> bool {
        matches!(self, Self::Ended { executed: Executed::Yes, .. })
    }

    /// Returns true if the supervisor reports that the job was not executed.
    pub fn says_not_executed(&self) -> bool {
        matches!(self, Self::Ended { executed: Executed::No, .. })
    }
}

/// Connects several clients to the jobs socket and runs [`drive`].
pub fn run(socket: &Path, plan: Plan, round: u64) -> HashMap<u64, Entry> {
    on_this_thread(async {
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(Client::connect(socket).await.expect("the supervisor runs"));
        }
        drive(clients, plan, round).await
    })
}

/// Runs a future on a single-threaded runtime, with a `LocalSet` for tasks.
pub fn on_this_thread<T>(future: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

/// Sends jobs until the time is up, and waits for the last outcomes. Returns the clients' records by job
/// number. Each `round` uses different job numbers. Must run within a `LocalSet`.
pub async fn drive(clients: Vec<Client>, plan: Plan, round: u64) -> HashMap<u64, Entry> {
    let book = Rc::new(RefCell::new(HashMap::new()));
    for client in &clients {
        // Connects first, because some deadlines are shorter than the time needed to connect.
        let asked = client.job("missing", "").deadline(LAST_OUTCOMES_WITHIN).send().await;
        assert!(asked.is_err_and(|error| error.outcome().is_some()), "the supervisor responds");
    }
    let until = Instant::now() + plan.lasts;
    let mut lanes = tokio::task::JoinSet::new();
    for (connection, client) in clients.into_iter().enumerate() {
        for lane in 0..LANES {
            let number = (connection * LANES + lane) as u64;
            let lane = Lane {
                client: client.clone(),
                random: Random::new(plan.seed ^ (number << 32) ^ 0xA5A5),
                next: (round << 56) | (number << 40),
                book: book.clone(),
                has_hangs: plan.has_hangs,
            };
            lanes.spawn_local(lane.run(until));
        }
    }
    // Jobs without an outcome stay `Nothing`, which counts as a fault.
    let _ = tokio::time::timeout(plan.lasts + LAST_OUTCOMES_WITHIN, async {
        while let Some(ended) = lanes.join_next().await {
            ended.expect("no lane panics");
        }
    })
    .await;
    book.take()
}

/// Waits until every bulkhead has run its maximum number of jobs at once. This proves that no permit was lost.
pub async fn fill_all(client: &Client) {
    // An adaptive limit can stay below the maximum for a while.
    for bulkhead in BULKHEADS.iter().filter(|bulkhead| !bulkhead.keys.contains("adaptive")) {
        let began = Instant::now();
        while let Err(told) = fill(client, bulkhead).await {
            let name = bulkhead.name;
            assert!(began.elapsed() < PATIENCE, "{name}: not all permits can be used at once: {told:?}");
        }
    }
}

/// Runs as many jobs at once as the bulkhead allows. Each job waits until all of them are running. Returns the error
/// messages of the jobs that failed.
async fn fill(client: &Client, bulkhead: &Bulkhead) -> Result<(), Vec<String>> {
    let operation = format!("meet {}", worker::now_us());
    let jobs = (0..bulkhead.bound()).map(|_| {
        let job = client.job(bulkhead.name, worker::payload(0, 8)).operation(&*operation);
        tokio::task::spawn_local(job.deadline(LAST_OUTCOMES_WITHIN).send())
    });
    let mut told = Vec::new();
    for job in jobs.collect::<Vec<_>>() {
        told.extend(job.await.expect("the job does not panic").err().map(|error| error.to_string()));
    }
    if told.is_empty() { Ok(()) } else { Err(told) }
}

/// A task that sends random jobs one after another.
struct Lane {
    client: Client,
    random: Random,
    next: u64,
    book: Rc<RefCell<HashMap<u64, Entry>>>,
    has_hangs: bool,
}

impl Lane {
    async fn run(mut self, until: Instant) {
        while Instant::now() < until {
            let number = self.next;
            self.next += 1;
            let is_idempotent = self.random.below(2) == 0;
            let bulkhead = BULKHEADS[self.random.below(BULKHEADS.len())].name;
            let operation = self.operation();
            let mut entry =
                Entry { bulkhead, operation: operation.clone(), told: Told::Nothing, is_idempotent };
            self.book.borrow_mut().insert(number, entry.clone());
            entry.told = self.one(number, bulkhead, operation, is_idempotent).await;
            self.book.borrow_mut().insert(number, entry);
        }
    }

    /// Returns a randomly chosen operation for the next job.
    fn operation(&mut self) -> String {
        let random = &mut self.random;
        match random.below(1000) {
            0..5 => "die".to_owned(),
            5..10 if self.has_hangs => "hang".to_owned(),
            10..13 if self.has_hangs => "freeze".to_owned(),
            13..15 => "chains".to_owned(),
            15..400 => format!("sleep {}", random.below(3_000)),
            _ => String::new(),
        }
    }

    /// Sends a job, and returns its outcome.
    async fn one(
        &mut self,
        number: u64,
        bulkhead: &'static str,
        operation: String,
        is_idempotent: bool,
    ) -> Told {
        let random = &mut self.random;
        let bytes = if random.below(20) == 0 { 100_000 } else { 16 };
        let is_alike = bulkhead == AHEAD && random.below(50) > 0;
        let (priority, tenant) = match is_alike {
            true => (Priority::Normal, ""),
            false => (
                [Priority::BestEffort, Priority::Normal, Priority::Critical][random.below(3)],
                ["", "acme", "mallory"][random.below(3)],
            ),
        };
        let deadline = if operation == "hang" { 200 } else { [5, 50, 500, 5_000][random.below(4)] };
        let payload = worker::payload(number, bytes);
        let mut job = self
            .client
            .job(bulkhead, payload.clone())
            .operation(operation)
            .priority(priority)
            .tenant(tenant)
            .idempotent(is_idempotent)
            .deadline(Duration::from_millis(deadline));
        if random.below(50) == 0 {
            job = job.traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        }
        if random.below(100) == 0 {
            // Dropping the future cancels the job, whatever its state.
            let patience = Duration::from_micros(random.below(5_000) as u64);
            return match tokio::time::timeout(patience, job.send()).await {
                Ok(result) => told(&payload, result),
                Err(_) => Told::Dropped,
            };
        }
        told(&payload, job.send().await)
    }
}

fn told(payload: &[u8], result: Result<bulkhead_client::Reply, JobError>) -> Told {
    match result {
        Ok(reply) if reply.payload() == payload => Told::Ok,
        Ok(_) => Told::WrongResult,
        Err(error) => match error.outcome() {
            Some(outcome) => Told::Ended {
                name: crate::outcome(&Err(error.clone())),
                executed: outcome.verdict.executed(),
            },
            None => Told::Lost(error.to_string()),
        },
    }
}

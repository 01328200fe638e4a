//! The clients' side of the ledger: many jobs at once over several connections, some of which are cancelled, and
//! what each was told.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bulkhead_client::{Client, JobError};
use bulkhead_shared::{Executed, Priority};

use super::chaos::Random;
use super::{AHEAD, BULKHEADS, Plan, worker};

/// Connections, and jobs at once on each.
const CONNECTIONS: usize = 4;
const LANES: usize = 12;

/// How long the last jobs may take to have their outcomes.
const LAST_OUTCOMES_WITHIN: Duration = Duration::from_secs(60);

/// What a client knows of a job at the end.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What it was told.
    pub told: Told,
    /// What it had said.
    pub is_idempotent: bool,
}

/// What a client was told of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// Not yet anything.
    Nothing,
    /// The client did not want to know any more.
    Dropped,
    /// The result, which was that of this job.
    Ok,
    /// Another job's result.
    WrongResult,
    /// Another outcome.
    Ended {
        /// Outcome and reason.
        name: String,
        /// Whether it may have run.
        executed: Executed,
    },
    /// The connection was lost: the supervisor never ends during the load.
    Lost(String),
}

impl Told {
    /// For the tally.
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

    /// Whether it is `ok`.
    pub fn is_ok(&self) -> bool {
        matches!(self, Self::Ok)
    }

    /// Whether the supervisor denies that it ran.
    pub fn says_not_executed(&self) -> bool {
        matches!(self, Self::Ended { executed: Executed::No, .. })
    }
}

/// Sends jobs until time is up, waits for the last outcomes, and returns every job by its number. Numbers of
/// another `round` are others.
pub fn run(socket: &Path, plan: Plan, round: u64) -> HashMap<u64, Entry> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let book = Rc::new(RefCell::new(HashMap::new()));
        let until = Instant::now() + plan.lasts;
        let mut lanes = tokio::task::JoinSet::new();
        for connection in 0..CONNECTIONS {
            let client = Client::connect(socket).await.expect("the supervisor runs");
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
        // What is not answered by then stays `Nothing`, and is a fault.
        let _ = tokio::time::timeout(plan.lasts + LAST_OUTCOMES_WITHIN, async {
            while let Some(ended) = lanes.join_next().await {
                ended.expect("no lane panics");
            }
        })
        .await;
        book.take()
    })
}

/// One job after the other.
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
            self.book.borrow_mut().insert(number, Entry { told: Told::Nothing, is_idempotent });
            let told = self.one(number, is_idempotent).await;
            self.book.borrow_mut().insert(number, Entry { told, is_idempotent });
        }
    }

    async fn one(&mut self, number: u64, is_idempotent: bool) -> Told {
        let random = &mut self.random;
        let bulkhead = BULKHEADS[random.below(BULKHEADS.len())].name;
        let operation = match random.below(1000) {
            0..5 => "die".to_owned(),
            5..10 if self.has_hangs => "hang".to_owned(),
            10..400 => format!("sleep {}", random.below(3_000)),
            _ => String::new(),
        };
        let bytes = if random.below(20) == 0 { 100_000 } else { 16 };
        let is_alike = bulkhead == AHEAD && random.below(50) > 0;
        let (priority, tenant) = match is_alike {
            true => (Priority::Normal, ""),
            false => (
                [Priority::BestEffort, Priority::Normal, Priority::Critical][random.below(3)],
                ["", "acme", "mallory"][random.below(3)],
            ),
        };
        let deadline = if operation == "hang" { 200 } else { [50, 500, 5_000][random.below(3)] };
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
            // The future is dropped: the job is cancelled, wherever it is.
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

//! A model of the server: a work queue with redelivery, and a ledger with expected sequence numbers. Behaviour that is
//! rare on real servers is frequent here.

use std::collections::BTreeMap;

use bulkhead_fleet::decide::{Write, WriteResult};
use bulkhead_fleet::record::{Record, Stored};

use super::random::Random;

/// Time in milliseconds.
pub(crate) type Ms = u64;

/// A stored job.
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    /// Index of the job.
    pub(crate) job: usize,
    /// Time at which the job was stored.
    pub(crate) published: Ms,
    /// Number of deliveries.
    pub(crate) deliveries: u64,
    /// Earliest time at which the message can be delivered.
    pub(crate) available: Ms,
    /// Number of times that the message will still be delivered although it has been acknowledged.
    pub(crate) ghosts: u32,
}

/// All records about one job in the ledger.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    /// All records of the job, oldest first. The last record is current.
    pub(crate) history: Vec<Stored>,
    /// A write that the server has accepted but not yet stored, and the time at which the server will store it.
    pub(crate) in_process: Option<(Ms, Record)>,
}

/// Returns true if the record stands for a message that no agent can decode.
pub(crate) fn is_foreign(record: &Record) -> bool {
    record.nonce.is_empty()
}

/// The server.
#[derive(Debug)]
pub(crate) struct Server {
    /// False during an outage, when the server neither receives requests nor responds.
    pub(crate) is_up: bool,
    /// Messages by stream sequence.
    pub(crate) queue: BTreeMap<u64, Queued>,
    /// Records by job.
    pub(crate) ledgers: Vec<Ledger>,
    ack_wait: Ms,
    next_message: u64,
    next_record: u64,
}

impl Server {
    /// Creates an empty server.
    pub(crate) fn new(jobs: usize, ack_wait: Ms) -> Self {
        Self {
            is_up: true,
            queue: BTreeMap::new(),
            ledgers: vec![Ledger::default(); jobs],
            ack_wait,
            next_message: 1,
            next_record: 1,
        }
    }

    /// Stores a job.
    pub(crate) fn publish(&mut self, job: usize, now: Ms) {
        let queued = Queued { job, published: now, deliveries: 0, available: now, ghosts: 0 };
        self.queue.insert(self.next_message, queued);
        self.next_message += 1;
    }

    /// Delivers one of the available messages, which is not always the oldest. A real server also reorders
    /// messages, because it has several replicas and lanes.
    pub(crate) fn pull(&mut self, now: Ms, random: &mut Random) -> Option<(u64, Queued)> {
        let ready: Vec<u64> = self
            .queue
            .iter()
            .filter(|(_, message)| message.available <= now)
            .map(|(&seq, _)| seq)
            .take(3)
            .collect();
        let sequence = *ready.get(random.below(ready.len() as u64) as usize)?;
        let message = self.queue.get_mut(&sequence)?;
        message.deliveries += 1;
        message.available = now + self.ack_wait;
        let delivered = message.clone();
        if message.ghosts > 0 {
            message.ghosts -= 1;
            if message.ghosts == 0 {
                self.queue.remove(&sequence);
            }
        }
        Some((sequence, delivered))
    }

    /// Acknowledges a message. An acknowledgement of an earlier delivery also counts. A few messages are delivered once
    /// more although they have been acknowledged.
    pub(crate) fn acknowledge(&mut self, sequence: u64, now: Ms, random: &mut Random) {
        let Some(message) = self.queue.get_mut(&sequence) else { return };
        if random.chance(3) {
            message.ghosts = 1;
            message.available = now + random.below(2000);
        } else {
            self.queue.remove(&sequence);
        }
    }

    /// Restarts the `ack_wait` timer, after which a message is redelivered.
    pub(crate) fn in_progress(&mut self, sequence: u64, now: Ms) {
        if let Some(message) = self.queue.get_mut(&sequence) {
            message.available = now + self.ack_wait;
        }
    }

    /// Schedules the redelivery of a message after `delay`.
    pub(crate) fn negative_acknowledge(&mut self, sequence: u64, delay: Ms, now: Ms) {
        if let Some(message) = self.queue.get_mut(&sequence) {
            message.available = now + delay;
        }
    }

    /// Forgets that some messages have been delivered, as a server can do during a leader change.
    pub(crate) fn change_leader(&mut self, now: Ms, random: &mut Random) {
        for message in self.queue.values_mut() {
            if message.deliveries > 0 && random.chance(10) {
                message.deliveries -= 1;
                message.available = now;
            }
        }
    }

    /// Begins a write that will be stored at `stored_at`. Returns the response if the write is rejected, and `None` if
    /// it is accepted.
    pub(crate) fn begin_write(&mut self, job: usize, write: &Write, stored_at: Ms) -> Option<WriteResult> {
        let ledger = &mut self.ledgers[job];
        if ledger.in_process.is_some() {
            return Some(WriteResult::Pending);
        }
        let last = ledger.history.last().map_or(0, |stored| stored.sequence);
        if write.expects.is_some_and(|expected| expected != last) {
            return Some(WriteResult::Conflict(last));
        }
        ledger.in_process = Some((stored_at, write.record.clone()));
        None
    }

    /// Stores a job's pending write. Returns the new sequence number and the replaced record.
    pub(crate) fn store(&mut self, job: usize) -> Option<(u64, Option<Stored>)> {
        let ledger = &mut self.ledgers[job];
        let (_, record) = ledger.in_process.take()?;
        let sequence = self.next_record;
        self.next_record += 1;
        let replaced = ledger.history.last().cloned();
        ledger.history.push(Stored { sequence, record });
        Some((sequence, replaced))
    }

    /// Replaces a job's record unconditionally, as a client other than an agent could. Returns false if another write
    /// is pending.
    pub(crate) fn overwrite(&mut self, job: usize, record: Record) -> bool {
        let ledger = &mut self.ledgers[job];
        if ledger.in_process.is_some() {
            return false;
        }
        ledger.history.push(Stored { sequence: self.next_record, record });
        self.next_record += 1;
        true
    }

    /// Returns a job's current record or, in one of ten reads, a stale record.
    pub(crate) fn read(&mut self, job: usize, random: &mut Random) -> Option<Stored> {
        let history = &self.ledgers[job].history;
        let age = if random.chance(10) { random.below(3) as usize } else { 0 };
        history.len().checked_sub(1 + age).map(|index| history[index].clone())
    }
}

//! Memory of waiting data: incomplete frames, waiting jobs with names and records, and frames that workers have not
//! read. All memory is charged to holders (`shares.rs` has the tree). When the limit is exceeded, this part chooses the
//! memory to free, and `wiring` frees the memory.

use std::collections::HashMap;

use bulkhead_policy::Bulkhead;
use bulkhead_shared::{JobId, Priority, RejectReason};
use foldhash::quality::RandomState;

use super::JobData;
use super::shares::{self, Holder, Kind, Owner, Shares};
use super::slab::{BulkheadIndex, CompartmentIndex};

/// Minimum memory of an incomplete small frame for which the connection is closed.
pub(super) const FRAME_BYTES_MIN: usize = 4 * 1024;

/// Fixed memory of a waiting job: its entries in tables here, in policy and in the session.
pub(super) const JOB_BYTES: usize =
    size_of::<JobData>() + Bulkhead::<Box<JobData>>::JOB_BYTES + REQUEST_BYTES;

/// Memory of a request in a session's table, which may be half empty, and in the list of waiting jobs.
const REQUEST_BYTES: usize =
    2 * size_of::<(u64, (CompartmentIndex, JobId))>() + 2 * size_of::<(CompartmentIndex, JobId)>();

/// Memory for a tenant with jobs: another copy of the name, the numbers, and the place in the fair queue.
const TENANT_BYTES: usize = 512;

/// Maximum number of entries in a list of waiting jobs beyond twice the number of waiting jobs.
const STALE_MAX: usize = 64;

/// Memory charged for a job, with the holder.
#[derive(Clone, Copy, Default)]
pub(super) struct Charge {
    holder: Holder,
    bytes: usize,
    is_waiting: bool,
}

/// Last counted size of memory that is not charged to a job, such as an incomplete frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted {
    holder: Holder,
    bytes: usize,
    kind: Kind,
}

impl Counted {
    /// Returns the size of `bytes` that cannot be freed early.
    pub(super) fn fixed(holder: Holder, bytes: usize) -> Self {
        Self { holder, bytes, kind: Kind::Fixed }
    }

    /// Returns the size of an incomplete frame that can be discarded.
    pub(super) fn frame(holder: Holder, bytes: usize) -> Self {
        Self { holder, bytes, kind: Kind::Frame }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Memory that must be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    /// This number of bytes of the payloads that arrive by HTTP.
    Spool(usize),
    /// The incomplete frame of a connection.
    Frame(Holder),
    /// The newest waiting job of the lowest priority, of a connection in a bulkhead.
    Job(Holder),
}

/// Kind of memory charged to a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ChargeKind {
    /// The job waits here.
    Waiting,
    /// The payload is kept while a worker has the job, because another worker may need it.
    Kept,
    /// The job is prefetched. It is charged for the memory that a waiting job would hold here.
    Prefetched,
}

/// Waiting jobs of a connection in a bulkhead, newest last. Some entries may refer to jobs that no longer wait.
#[derive(Default)]
struct Waiting {
    /// Compartment and job, indexed by the code of the priority.
    stacks: [Vec<(CompartmentIndex, JobId)>; Priority::ALL.len()],
    jobs: usize,
}

pub(super) struct Memory {
    shares: Shares,
    waiting: HashMap<Holder, Waiting, RandomState>,
    /// Holder of bytes that workers have not read.
    workers: Holder,
    /// Holder of the supervisor's own jobs (replays).
    own: Holder,
    /// Holder of payloads that arrive by HTTP without a known length.
    spool: Holder,
    spooled: usize,
}

impl Memory {
    pub(super) fn new(own_uid: u32) -> Self {
        let mut shares = Shares::default();
        let workers = shares.open(Owner::Workers, 0);
        // Session numbers start at 1.
        let own = shares.open(Owner::User(own_uid), 0);
        let spool = shares.open(Owner::User(own_uid), u64::MAX);
        Self { shares, waiting: HashMap::default(), workers, own, spool, spooled: 0 }
    }

    /// Returns the memory held in the data plane, in bytes.
    pub(super) fn held(&self) -> usize {
        self.shares.held() - self.spooled
    }

    /// Returns the memory held in the data plane and for payloads that arrive by HTTP, in bytes.
    pub(super) fn held_in_all(&self) -> usize {
        self.shares.held()
    }

    // Connections.

    /// Adds a connection of a user.
    pub(super) fn open(&mut self, uid: u32, connection: u64) -> Holder {
        self.shares.open(Owner::User(uid), connection)
    }

    /// Releases the memory that a closed connection still holds, apart from the memory of jobs.
    pub(super) fn close(&mut self, connection: Holder, counted: Counted) {
        self.recount(counted, Counted::fixed(connection, 0));
        self.shares.close(connection);
    }

    /// Returns the holder for a connection in a bulkhead.
    pub(super) fn leaf(&mut self, connection: Holder, bulkhead: BulkheadIndex) -> Holder {
        self.shares.leaf(connection, bulkhead)
    }

    /// Returns true if a connection may hold `more` bytes, within `most` bytes for all. Other holders may then have to
    /// free memory, which happens when the bytes are held.
    pub(super) fn can_hold(
        &self,
        connection: Holder,
        bulkhead: Option<BulkheadIndex>,
        more: usize,
        most: usize,
    ) -> bool {
        self.shares.can_hold_share(connection, bulkhead, more, most)
    }

    /// Replaces a counted size.
    pub(super) fn recount(&mut self, was: Counted, is: Counted) {
        if was != is {
            // Adds before subtracting, so that the holder is not forgotten in between.
            self.shares.add(is.holder, is.kind, is.bytes);
            self.shares.subtract(was.holder, was.kind, was.bytes);
        }
    }

    /// Updates the size of the bytes that workers have not read.
    pub(super) fn recount_workers(&mut self, was: usize, is: usize) {
        let holder = self.workers;
        self.recount(Counted::fixed(holder, was), Counted::fixed(holder, is));
    }

    /// Updates the size of the payloads that arrive by HTTP.
    pub(super) fn set_spooled(&mut self, is: usize) {
        let (holder, was) = (self.spool, std::mem::replace(&mut self.spooled, is));
        self.recount(Counted::frame(holder, was), Counted::frame(holder, is));
    }

    /// Releases memory of the payloads that arrive by HTTP.
    pub(super) fn release_spooled(&mut self, bytes: usize) {
        self.set_spooled(self.spooled - bytes);
    }

    /// Returns the number of bytes that each owner can always hold.
    pub(super) fn equal_share(&self, most: usize) -> usize {
        self.shares.equal_share(most)
    }

    // Jobs.

    /// Charges the client of a job in a bulkhead. `connection` is `None` if the client is gone, or if the supervisor
    /// itself submitted the job.
    pub(super) fn charge(
        &mut self,
        record: &mut JobData,
        kind: ChargeKind,
        connection: Option<Holder>,
        bulkhead: BulkheadIndex,
    ) -> Holder {
        debug_assert_eq!(record.charge.bytes, 0, "memory is already held for the job");
        let is_waiting = kind == ChargeKind::Waiting;
        let bytes = match kind {
            ChargeKind::Waiting => record.footprint(),
            ChargeKind::Kept => record.payload_bytes(),
            ChargeKind::Prefetched => {
                record.footprint() + record.held.copy.as_ref().map_or(0, |copy| copy.len())
            }
        };
        let holder = match connection {
            Some(connection) => self.shares.leaf(connection, bulkhead),
            None => self.own,
        };
        self.shares.add(holder, if is_waiting { Kind::Job } else { Kind::Fixed }, bytes);
        record.charge = Charge { holder, bytes, is_waiting };
        holder
    }

    /// Lists a job that was charged as waiting. `is_waiting` tells which of the jobs listed earlier still wait.
    pub(super) fn list_waiting(
        &mut self,
        (holder, priority): (Holder, Priority),
        entry: (CompartmentIndex, JobId),
        is_waiting: impl Fn(CompartmentIndex, JobId) -> bool,
    ) {
        let waiting = self.waiting.entry(holder).or_default();
        waiting.jobs += 1;
        let most = 2 * waiting.jobs + STALE_MAX;
        let stack = &mut waiting.stacks[usize::from(priority.code())];
        // The cost is amortised, because at least as many entries were added since the last removal.
        if stack.len() >= most {
            stack.retain(|&(compartment, job)| is_waiting(compartment, job));
            stack.shrink_to(most);
        }
        stack.push(entry);
    }

    /// Releases the memory charged for a job.
    pub(super) fn discharge(&mut self, charge: &mut Charge) {
        let Charge { holder, bytes, is_waiting } = std::mem::take(charge);
        if bytes == 0 {
            return;
        }
        if is_waiting && let Some(waiting) = self.waiting.get_mut(&holder) {
            waiting.jobs -= 1;
            if waiting.jobs == 0 {
                self.waiting.remove(&holder);
                if self.waiting.is_empty() {
                    self.waiting = HashMap::default();
                }
            }
        }
        self.shares.subtract(holder, if is_waiting { Kind::Job } else { Kind::Fixed }, bytes);
    }

    // Eviction.

    /// Chooses the memory to free when more than `most` bytes are held, in favour of the connection and bulkhead in
    /// `wants`.
    pub(super) fn next_eviction(
        &mut self,
        wants: Option<(Holder, Option<BulkheadIndex>)>,
        most: usize,
    ) -> Option<Eviction> {
        Some(match self.shares.next_eviction(wants, most)? {
            shares::Eviction::Frame(spool) if spool == self.spool => {
                Eviction::Spool((self.shares.held() - most).min(self.spooled))
            }
            shares::Eviction::Frame(holder) => Eviction::Frame(self.shares.connection(holder)),
            shares::Eviction::Job(leaf) => Eviction::Job(leaf),
        })
    }

    /// Returns the newest job of the lowest priority that a holder has listed. The job may not wait any more, and the
    /// number may belong to another job by now. The entry is removed.
    pub(super) fn pop_waiting(&mut self, holder: Holder) -> Option<(CompartmentIndex, JobId)> {
        self.waiting.get_mut(&holder)?.stacks.iter_mut().find_map(Vec::pop)
    }
}

impl Charge {
    /// Returns true if the job waits, and this holder is charged for the job.
    pub(super) fn is_of_waiting(&self, holder: Holder) -> bool {
        self.is_waiting && self.holder == holder
    }
}

/// Returns the reason for rejecting data that does not fit into `most` bytes.
pub(super) fn memory_full_rejection(most: usize) -> (RejectReason, String) {
    let message = format!(
        "waiting data has reached the limit max_buffered ({most} bytes), and no other client has more \
         waiting data than this client"
    );
    (RejectReason::Overloaded, message)
}

impl JobData {
    /// Returns the memory held for a waiting job, in bytes.
    fn footprint(&self) -> usize {
        let tenant = if self.tenant.is_empty() { 0 } else { TENANT_BYTES + 2 * self.tenant.len() };
        let trace = if self.trace.is_some() { size_of::<super::Trace>() } else { 0 };
        let fallback = if self.fallback.is_some() { size_of::<super::FallbackState>() } else { 0 };
        JOB_BYTES + self.operation.len() + tenant + trace + fallback + self.payload_bytes()
    }

    /// Returns the size of the payload, in memory or in a file.
    fn payload_bytes(&self) -> usize {
        self.held.bytes() + self.held.file.as_ref().map_or(0, |file| file.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabIndex;

    fn job(number: u64) -> (CompartmentIndex, JobId) {
        (CompartmentIndex::from_number(0), JobId(number))
    }

    fn charge_waiting(memory: &mut Memory, connection: Holder, number: u64, priority: Priority) -> JobData {
        let mut record = JobData { priority, ..JobData::default() };
        let holder =
            memory.charge(&mut record, ChargeKind::Waiting, Some(connection), BulkheadIndex::from_number(0));
        memory.list_waiting((holder, priority), job(number), |_, _| true);
        record
    }

    #[test]
    fn evicts_newest_job_of_lowest_priority_of_largest_client() {
        let mut memory = Memory::new(0);
        let (small, large) = (memory.open(1, 1), memory.open(2, 2));
        let mut jobs = vec![charge_waiting(&mut memory, small, 1, Priority::default())];
        for (number, priority) in [(2, Priority::ALL[1]), (3, Priority::ALL[0]), (4, Priority::ALL[0])] {
            jobs.push(charge_waiting(&mut memory, large, number, priority));
        }
        let most = memory.held() - 1;
        let Some(Eviction::Job(holder)) = memory.next_eviction(None, most) else { panic!("no job") };
        let lowest = usize::from(Priority::ALL[0].code()) < usize::from(Priority::ALL[1].code());
        assert_eq!(memory.pop_waiting(holder), Some(job(if lowest { 4 } else { 2 })));
        assert!(jobs[3].charge.is_of_waiting(holder) && !jobs[0].charge.is_of_waiting(holder));
        jobs.iter_mut().for_each(|record| memory.discharge(&mut record.charge));
        assert_eq!(memory.held(), 0);
        assert_eq!(memory.next_eviction(None, 0), None);
    }

    #[test]
    fn evicts_spooled_payloads_as_far_as_necessary() {
        let mut memory = Memory::new(0);
        memory.set_spooled(1000);
        assert_eq!((memory.held(), memory.held_in_all()), (0, 1000));
        assert_eq!(memory.next_eviction(None, 700), Some(Eviction::Spool(300)));
        memory.set_spooled(700);
        assert_eq!(memory.next_eviction(None, 700), None);
    }
}

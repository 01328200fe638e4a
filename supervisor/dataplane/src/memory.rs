//! Memory used by waiting data: incomplete frames, waiting jobs with their names and records, and frames that workers
//! have not read. All of this memory is charged to holders (see `shares.rs`). When the limit is exceeded, this module
//! chooses the memory to free, and the wiring frees it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bulkhead_plane::counters::SpoolCounters;
use bulkhead_policy::Bulkhead;
use bulkhead_shared::{JobId, Priority, RejectReason};
use foldhash::quality::RandomState;

use super::JobData;
use super::shares::{self, Holder, Kind, Owner, Shares};
use super::slab::{BulkheadIndex, CompartmentIndex};

/// Minimum size, in bytes, of an incomplete frame whose connection can be closed to free memory.
pub(super) const FRAME_BYTES_MIN: usize = 4 * 1024;

/// Fixed memory overhead of a waiting job, in bytes. Includes the job's table entries in this module, in policy and in
/// the session.
pub(super) const JOB_BYTES: usize =
    size_of::<JobData>() + Bulkhead::<Box<JobData>>::JOB_BYTES + REQUEST_BYTES;

/// Total size in bytes of a request's entries in the session's table and in the list of waiting jobs. Each entry is
/// counted twice, because up to half of a table can be unused.
const REQUEST_BYTES: usize =
    2 * size_of::<(u64, (CompartmentIndex, JobId))>() + 2 * size_of::<(CompartmentIndex, JobId)>();

/// Memory overhead of a tenant that has jobs, in bytes. Covers the tenant's name, counters and entry in the fair queue.
const TENANT_BYTES: usize = 512;

/// Connection number that stands for payloads arriving over HTTP. No session uses this number.
const SPOOL_CONNECTION: u64 = u64::MAX;

/// Number of entries that a list of waiting jobs can have in addition to twice the number of waiting jobs. Outdated
/// entries are removed when a list reaches this limit.
const STALE_MAX: usize = 64;

/// Memory charged for a job, and the holder that is charged.
#[derive(Clone, Copy, Default)]
pub(super) struct Charge {
    holder: Holder,
    bytes: usize,
    is_waiting: bool,
}

/// Most recently counted size and holder of memory that is not charged to a job, such as an incomplete frame.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted {
    holder: Holder,
    bytes: usize,
    kind: Kind,
}

impl Counted {
    /// Creates a record for memory that cannot be freed while it is in use.
    pub(super) fn fixed(holder: Holder, bytes: usize) -> Self {
        Self { holder, bytes, kind: Kind::Fixed }
    }

    /// Creates a record of the memory used by an incomplete frame. Such a frame can be discarded to free the memory.
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
    /// Part of the payload bytes in a spool. Contains the index of the spool and the number of bytes to free.
    Spool(usize, usize),
    /// The incomplete frame arriving on this connection.
    Frame(Holder),
    /// The newest waiting job with the lowest priority, among the jobs submitted over one connection to one
    /// bulkhead.
    Job(Holder),
}

/// Reason why memory is charged for a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ChargeKind {
    /// The job is waiting with its payload.
    Waiting,
    /// A worker has the job, but the payload is kept because it might have to be sent to another worker.
    Kept,
    /// The job is prefetched, and is charged like a waiting job.
    Prefetched,
}

/// Waiting jobs submitted over one connection to one bulkhead, from oldest to newest. Can also contain outdated entries
/// for jobs that no longer wait.
#[derive(Default)]
struct Waiting {
    /// The compartment and ID of each waiting job, in one stack per priority class.
    stacks: [Vec<(CompartmentIndex, JobId)>; Priority::ALL.len()],
    jobs: usize,
}

pub(super) struct Memory {
    shares: Shares,
    waiting: HashMap<Holder, Waiting, RandomState>,
    /// Holder that is charged for bytes that were sent to workers but that the workers have not read yet.
    workers: Holder,
    /// Holder that is charged for replays, which are jobs submitted by the supervisor itself.
    own: Holder,
    /// Spools for payloads of unknown length that arrive over HTTP. Each spool belongs to one user or token.
    spools: Vec<Spool>,
}

/// Payloads of unknown length that the control plane is receiving for one user or token.
struct Spool {
    counters: Arc<SpoolCounters>,
    holder: Holder,
    /// Total size of the payloads in bytes, as last counted.
    counted: usize,
}

impl Memory {
    pub(super) fn new(own_uid: u32, own_spool: Arc<SpoolCounters>) -> Self {
        let mut shares = Shares::default();
        let workers = shares.open(Owner::Workers, 0);
        // Connection number 0 is not used by any session, because session numbers start at 1.
        let own = shares.open(Owner::User(own_uid), 0);
        let mut memory = Self { shares, waiting: HashMap::default(), workers, own, spools: Vec::new() };
        memory.add_spool(Owner::User(own_uid), own_spool);
        memory
    }

    /// Adds a spool that counts a user's or token's payloads of unknown length. Also removes the spools that the
    /// control plane no longer uses.
    pub(super) fn add_spool(&mut self, owner: Owner, counters: Arc<SpoolCounters>) {
        let Self { shares, spools, .. } = self;
        spools.retain(|spool| {
            let is_used = spool.counted > 0 || Arc::strong_count(&spool.counters) > 1;
            if !is_used {
                shares.close(spool.holder);
            }
            is_used
        });
        let holder = shares.open(owner, SPOOL_CONNECTION);
        spools.push(Spool { counters, holder, counted: 0 });
    }

    /// Returns the amount of memory held in the data plane, in bytes.
    pub(super) fn held(&self) -> usize {
        self.shares.held() - self.spools.iter().map(|spool| spool.counted).sum::<usize>()
    }

    /// Returns the amount of memory held in the data plane and by payloads arriving over HTTP, in bytes.
    pub(super) fn held_in_all(&self) -> usize {
        self.shares.held()
    }

    // Connections.

    pub(super) fn open(&mut self, owner: Owner, connection: u64) -> Holder {
        self.shares.open(owner, connection)
    }

    /// Releases the memory of a closed connection, except for the memory of its jobs.
    pub(super) fn close(&mut self, connection: Holder, counted: Counted) {
        self.recount(counted, Counted::fixed(connection, 0));
        self.shares.close(connection);
    }

    pub(super) fn leaf(&mut self, connection: Holder, bulkhead: BulkheadIndex) -> Holder {
        self.shares.leaf(connection, bulkhead)
    }

    /// Returns true if a connection can hold `more` additional bytes when `most` is the limit for all holders together.
    /// Other holders might have to free memory to make room.
    pub(super) fn can_hold(
        &self,
        connection: Holder,
        bulkhead: Option<BulkheadIndex>,
        more: usize,
        most: usize,
    ) -> bool {
        self.shares.can_hold_share(connection, bulkhead, more, most)
    }

    /// Updates the recorded size of memory that was already counted.
    pub(super) fn recount(&mut self, was: Counted, is: Counted) {
        if was != is {
            // Adds the new size before subtracting the old one. Otherwise, the holder could temporarily hold no memory
            // and would be removed.
            self.shares.add(is.holder, is.kind, is.bytes);
            self.shares.subtract(was.holder, was.kind, was.bytes);
        }
    }

    /// Updates the number of bytes that were sent to workers but that the workers have not read yet.
    pub(super) fn recount_workers(&mut self, was: usize, is: usize) {
        let holder = self.workers;
        self.recount(Counted::fixed(holder, was), Counted::fixed(holder, is));
    }

    /// Updates the sizes of payloads that are arriving over HTTP.
    pub(super) fn recount_spools(&mut self) {
        for index in 0..self.spools.len() {
            let SpoolCounters { held, bytes_to_free, .. } = &*self.spools[index].counters;
            let unwanted = bytes_to_free.load(Ordering::Relaxed);
            let held = held.load(Ordering::Relaxed);
            self.recount_spool(index, held.saturating_sub(unwanted));
        }
    }

    fn recount_spool(&mut self, index: usize, is: usize) {
        let spool = &mut self.spools[index];
        let (holder, was) = (spool.holder, std::mem::replace(&mut spool.counted, is));
        self.recount(Counted::frame(holder, was), Counted::frame(holder, is));
    }

    /// Asks the control plane to free memory held by a spool.
    pub(super) fn free_spool(&mut self, index: usize, bytes: usize) {
        let spool = &self.spools[index];
        spool.counters.bytes_to_free.fetch_add(bytes, Ordering::Relaxed);
        spool.counters.free_requested.notify_waiters();
        self.recount_spool(index, spool.counted - bytes);
    }

    /// Returns the number of bytes guaranteed to each owner, regardless of how much other owners hold.
    pub(super) fn equal_share(&self, most: usize) -> usize {
        self.shares.equal_share(most)
    }

    // Jobs.

    /// Charges a job's memory to the client that submitted the job. `connection` is `None` if the client is gone or if
    /// the supervisor itself submitted the job.
    pub(super) fn charge(
        &mut self,
        record: &mut JobData,
        kind: ChargeKind,
        connection: Option<Holder>,
        bulkhead: BulkheadIndex,
    ) -> Holder {
        debug_assert_eq!(record.charge.bytes, 0, "the job already holds memory");
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

    /// Adds a job to the holder's list of waiting jobs. The callback `is_waiting` returns true if a job that was added
    /// earlier is still waiting.
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
        // At least half of the entries are outdated at this point, so the cost of removing outdated entries is
        // amortized.
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

    /// Returns memory to free if more than `most` bytes are held in total. `wants` contains the connection and the
    /// bulkhead for which memory is needed.
    pub(super) fn next_eviction(
        &mut self,
        wants: Option<(Holder, Option<BulkheadIndex>)>,
        most: usize,
    ) -> Option<Eviction> {
        Some(match self.shares.next_eviction(wants, most)? {
            shares::Eviction::Frame(holder) => {
                match self.spools.iter().position(|spool| spool.holder == holder) {
                    Some(index) => {
                        Eviction::Spool(index, (self.shares.held() - most).min(self.spools[index].counted))
                    }
                    None => Eviction::Frame(self.shares.connection(holder)),
                }
            }
            shares::Eviction::Job(leaf) => Eviction::Job(leaf),
        })
    }

    /// Takes the newest job of the lowest priority class from a holder's list. The entry can be outdated: the job might
    /// no longer be waiting, and its ID might even belong to another job.
    pub(super) fn pop_waiting(&mut self, holder: Holder) -> Option<(CompartmentIndex, JobId)> {
        self.waiting.get_mut(&holder)?.stacks.iter_mut().find_map(Vec::pop)
    }
}

impl Charge {
    /// Returns true if this charge is for a waiting job of the given holder.
    pub(super) fn is_of_waiting(&self, holder: Holder) -> bool {
        self.is_waiting && self.holder == holder
    }
}

/// Returns the reason and the message for rejecting data that does not fit into `most` bytes.
pub(super) fn memory_full_rejection(most: usize) -> (RejectReason, String) {
    let message = format!(
        "max_buffered ({most} bytes) has been reached, and this user, connection or bulkhead has used up \
         its equal share: submit fewer jobs at once, or raise the limit"
    );
    (RejectReason::Overloaded, message)
}

impl JobData {
    /// Returns the amount of memory that a waiting job holds, in bytes.
    fn footprint(&self) -> usize {
        let tenant = if self.tenant.is_empty() { 0 } else { TENANT_BYTES + 2 * self.tenant.len() };
        let trace = if self.trace.is_some() { size_of::<super::Trace>() } else { 0 };
        let fallback = if self.fallback.is_some() { size_of::<super::FallbackState>() } else { 0 };
        JOB_BYTES + self.operation.len() + tenant + trace + fallback + self.payload_bytes()
    }

    /// Returns the size of the payload in bytes, whether it is in memory or in a file.
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
    fn evicts_newest_low_priority_job_of_largest_client_first() {
        let mut memory = Memory::new(0, Arc::default());
        let (small, large) = (memory.open(Owner::User(1), 1), memory.open(Owner::User(2), 2));
        let mut jobs = vec![charge_waiting(&mut memory, small, 1, Priority::default())];
        for (number, priority) in [(2, Priority::ALL[1]), (3, Priority::ALL[0]), (4, Priority::ALL[0])] {
            jobs.push(charge_waiting(&mut memory, large, number, priority));
        }
        let most = memory.held() - 1;
        let Some(Eviction::Job(holder)) = memory.next_eviction(None, most) else {
            panic!("expected the eviction of a job")
        };
        let lowest = usize::from(Priority::ALL[0].code()) < usize::from(Priority::ALL[1].code());
        assert_eq!(memory.pop_waiting(holder), Some(job(if lowest { 4 } else { 2 })));
        assert!(jobs[3].charge.is_of_waiting(holder) && !jobs[0].charge.is_of_waiting(holder));
        jobs.iter_mut().for_each(|record| memory.discharge(&mut record.charge));
        assert_eq!(memory.held(), 0);
        assert_eq!(memory.next_eviction(None, 0), None);
    }

    #[test]
    fn evicts_only_as_many_spooled_bytes_as_necessary() {
        let own = Arc::new(SpoolCounters::default());
        let mut memory = Memory::new(0, own.clone());
        own.held.store(1000, Ordering::Relaxed);
        memory.recount_spools();
        assert_eq!((memory.held(), memory.held_in_all()), (0, 1000));
        assert_eq!(memory.next_eviction(None, 700), Some(Eviction::Spool(0, 300)));
        memory.free_spool(0, 300);
        assert_eq!(memory.next_eviction(None, 700), None);
        assert_eq!(own.bytes_to_free.load(Ordering::Relaxed), 300);
    }

    #[test]
    fn removes_unused_spool_of_a_token() {
        let mut memory = Memory::new(0, Arc::default());
        let first = Arc::new(SpoolCounters::default());
        first.held.store(100, Ordering::Relaxed);
        memory.add_spool(Owner::Token(1), first.clone());
        memory.recount_spools();
        memory.add_spool(Owner::Token(2), Arc::default());
        assert_eq!(
            (memory.spools.len(), memory.held_in_all()),
            (2, 100),
            "the supervisor's own unused spool must be removed too"
        );
        first.held.store(0, Ordering::Relaxed);
        drop(first);
        memory.recount_spools();
        memory.add_spool(Owner::Token(3), Arc::default());
        assert_eq!((memory.spools.len(), memory.held_in_all()), (1, 0));
    }
}

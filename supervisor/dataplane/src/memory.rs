//! Memory of waiting data: incomplete frames, waiting jobs with names and records, and frames that workers have not
//! read. All memory is charged to holders (`shares.rs` has the tree). When the limit is exceeded, this file frees the
//! memory that the tree selects.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bulkhead_plane::counters::SpoolCounters;
use bulkhead_policy::{Bulkhead, Event};
use bulkhead_shared::{JobId, Priority, RejectReason};
use foldhash::quality::RandomState;

use super::bulkheads::Compartment;
use super::shares::{Giver, Holder, Kind, Owner, Shares};
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId};
use super::{DataPlane, Incoming, JobData};

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

/// Number of a spool among the connections of its owner. No session has this number.
const SPOOL_CONNECTION: u64 = u64::MAX;

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
    pub(super) holder: Holder,
    pub(super) bytes: usize,
    pub(super) kind: Kind,
}

/// Waiting jobs of a connection in a bulkhead, newest last. Some entries may refer to jobs that no longer wait.
#[derive(Default)]
struct Waiting {
    /// Compartment and job, indexed by the code of the priority.
    stacks: [Vec<(CompartmentIndex, JobId)>; Priority::ALL.len()],
    jobs: usize,
}

pub(super) struct Memory {
    pub(super) shares: Shares,
    waiting: HashMap<Holder, Waiting, RandomState>,
    /// Holder of bytes that workers have not read.
    workers: Holder,
    /// Holder of the supervisor's own jobs (replays).
    own: Holder,
    /// Payloads that arrive over HTTP without a known length, by user or token.
    spools: Vec<Spool>,
}

/// Payloads of unknown length that the control plane receives for one user or token.
struct Spool {
    counters: Arc<SpoolCounters>,
    holder: Holder,
    /// Size of the payloads as last counted, in bytes.
    counted: usize,
}

impl Memory {
    pub(super) fn new(own_uid: u32, own_spool: Arc<SpoolCounters>) -> Self {
        let mut shares = Shares::default();
        let workers = shares.open(Owner::Workers, 0);
        // Session numbers start at 1.
        let own = shares.open(Owner::User(own_uid), 0);
        let mut memory = Self { shares, waiting: HashMap::default(), workers, own, spools: Vec::new() };
        memory.add_spool(Owner::User(own_uid), own_spool);
        memory
    }

    /// Starts to count payloads of unknown length for a user or token. Forgets spools that the control plane no
    /// longer uses.
    pub(super) fn add_spool(&mut self, owner: Owner, counters: Arc<SpoolCounters>) {
        let Self { shares, spools, .. } = self;
        spools.retain(|spool| {
            let is_used = spool.counted > 0 || Arc::strong_count(&spool.counters) > 1;
            if !is_used {
                shares.close(spool.holder);
            }
            is_used
        });
        let holder = self.shares.open(owner, SPOOL_CONNECTION);
        self.spools.push(Spool { counters, holder, counted: 0 });
    }

    /// Returns the memory held in the data plane, in bytes.
    pub(super) fn held(&self) -> usize {
        self.shares.held() - self.spools.iter().map(|spool| spool.counted).sum::<usize>()
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
        let of = |bytes| Counted { holder, bytes, kind: Kind::Fixed };
        self.recount(of(was), of(is));
    }

    /// Updates the size of the payloads in a spool.
    fn recount_spool(&mut self, index: usize, is: usize) {
        let spool = &mut self.spools[index];
        let (holder, was) = (spool.holder, std::mem::replace(&mut spool.counted, is));
        let of = |bytes| Counted { holder, bytes, kind: Kind::Frame };
        self.recount(of(was), of(is));
    }

    fn recount_spools(&mut self) {
        for index in 0..self.spools.len() {
            let SpoolCounters { held, bytes_to_free, .. } = &*self.spools[index].counters;
            let unwanted = bytes_to_free.load(Ordering::Relaxed);
            let held = held.load(Ordering::Relaxed);
            self.recount_spool(index, held.saturating_sub(unwanted));
        }
    }

    /// Asks the control plane to free memory of a spool.
    fn free_spool(&mut self, index: usize, bytes_max: usize) {
        let spool = &self.spools[index];
        let freed = (self.shares.held() - bytes_max).min(spool.counted);
        spool.counters.bytes_to_free.fetch_add(freed, Ordering::Relaxed);
        spool.counters.free_requested.notify_waiters();
        self.recount_spool(index, spool.counted - freed);
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
        self.held.bytes() + self.held.file.as_ref().map_or(0, |file| file.bytes)
    }
}

impl DataPlane {
    /// Returns the holder of a job: the client, in the bulkhead that has the job.
    fn holder_of(&mut self, session: SessionId, bulkhead: BulkheadIndex) -> Holder {
        match self.sessions.holder(session) {
            Some(connection) => self.memory.shares.leaf(connection, bulkhead),
            None => self.memory.own,
        }
    }

    /// Charges a job's client for the memory that `count` returns. Returns the holder and the job's priority.
    fn charge(
        &mut self,
        (compartment, job): (CompartmentIndex, JobId),
        is_waiting: bool,
        count: impl Fn(&JobData) -> usize,
    ) -> Option<(Holder, Priority)> {
        let Compartment { policy, bulkhead, .. } = &mut self.compartments[compartment];
        let Some(record) = policy.record_mut(job) else {
            debug_assert!(false, "{job} was just taken or dispatched, but has no record");
            return None;
        };
        debug_assert_eq!(record.charge.bytes, 0, "memory is already held for the job");
        let (bulkhead, session, bytes, class) = (*bulkhead, record.session, count(record), record.priority);
        let holder = self.holder_of(session, bulkhead);
        self.memory.shares.add(holder, if is_waiting { Kind::Job } else { Kind::Fixed }, bytes);
        let record = self.compartments[compartment].policy.record_mut(job)?;
        record.charge = Charge { holder, bytes, is_waiting };
        Some((holder, class))
    }

    /// Charges a job that starts to wait.
    pub(super) fn charge_waiting(&mut self, compartment: CompartmentIndex, job: JobId) {
        if let Some((holder, class)) = self.charge((compartment, job), true, JobData::footprint) {
            self.list_waiting(holder, class, (compartment, job));
        }
    }

    fn list_waiting(&mut self, holder: Holder, class: Priority, entry: (CompartmentIndex, JobId)) {
        let waiting = self.memory.waiting.entry(holder).or_default();
        waiting.jobs += 1;
        let most = 2 * waiting.jobs + STALE_MAX;
        let stack = &mut waiting.stacks[usize::from(class.code())];
        // The cost is amortised, because at least as many entries were added since the last removal.
        if stack.len() >= most {
            let compartments = &self.compartments;
            stack.retain(|&(place, job)| compartments.get(place).is_some_and(|at| at.policy.is_waiting(job)));
            stack.shrink_to(most);
        }
        stack.push(entry);
    }

    /// Charges a payload that is kept while a worker has the job, because another worker may need it.
    pub(super) fn charge_kept(&mut self, compartment: CompartmentIndex, job: JobId) {
        self.charge((compartment, job), false, JobData::payload_bytes);
    }

    /// Charges a prefetched job for the memory that a waiting job would hold here.
    pub(super) fn charge_ahead(&mut self, compartment: CompartmentIndex, job: JobId) {
        let copied = |record: &JobData| record.held.copy.as_ref().map_or(0, |copy| copy.len());
        self.charge((compartment, job), false, |record| record.footprint() + copied(record));
    }

    /// Returns true if a connection may hold `more` bytes. Other holders may then have to free memory, which happens
    /// in [`DataPlane::settle_memory`] when the bytes are held.
    pub(super) fn may_hold(&self, connection: Holder, bulkhead: Option<BulkheadIndex>, more: usize) -> bool {
        self.memory.shares.may_have(connection, bulkhead, more, self.limits.buffered_bytes_max)
    }

    /// Publishes the held memory, and the share that payloads received by HTTP can always hold.
    pub(super) fn tell_memory(&self) {
        self.reporter.counters.buffered.store(self.memory.held(), Ordering::Relaxed);
        let share = self.memory.shares.equal_share(self.limits.buffered_bytes_max);
        self.reporter.counters.spool_share.store(share, Ordering::Relaxed);
    }

    /// Enforces the memory limit. The holders furthest over a fair share free memory, in favour of the connection in
    /// `wants`.
    pub(super) fn settle_memory(&mut self, wants: Option<(Holder, Option<BulkheadIndex>)>) {
        self.memory.recount_spools();
        if self.leases.bytes > 0 {
            self.settle_files(self.memory.shares.held());
        }
        while let Some(giver) = self.memory.shares.giver(wants, self.limits.buffered_bytes_max) {
            let before = self.memory.shares.held();
            let spool = |holder| self.memory.spools.iter().position(|spool| spool.holder == holder);
            match giver {
                Giver::Frame(holder) => match spool(holder) {
                    Some(spool) => self.memory.free_spool(spool, self.limits.buffered_bytes_max),
                    None => self.give_frame(self.memory.shares.connection(holder)),
                },
                Giver::Job(leaf) => self.give_job(leaf),
            }
            if self.memory.shares.held() >= before {
                debug_assert!(false, "{giver:?} gave nothing");
                return;
            }
        }
    }

    /// Rejects the newest waiting job of the lowest priority.
    fn give_job(&mut self, leaf: Holder) {
        let Some(waiting) = self.memory.waiting.get_mut(&leaf) else { return };
        for stack in &mut waiting.stacks {
            while let Some((compartment, job)) = stack.pop() {
                let Some(entry) = self.compartments.get_mut(compartment) else { continue };
                // The number may belong to another job by now.
                let is_its =
                    |record: &mut Box<JobData>| record.charge.is_waiting && record.charge.holder == leaf;
                if entry.policy.is_waiting(job) && entry.policy.record_mut(job).is_some_and(is_its) {
                    self.apply(compartment, Event::MemoryExhausted { job }, Incoming::None);
                    return;
                }
            }
        }
    }

    pub(super) fn memory_full(&self) -> (RejectReason, String) {
        let most = self.limits.buffered_bytes_max;
        let message = format!(
            "waiting data holds max_buffered ({most} bytes), and this client holds no less than other clients"
        );
        (RejectReason::Overloaded, message)
    }
}

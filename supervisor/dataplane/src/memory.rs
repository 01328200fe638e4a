//! The memory of what waits: half-received frames, waiting jobs with their names and records, and what is on its
//! way to workers. Each is charged to the one it is held for (`shares.rs` has the tree), and here is what gives.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use bulkhead_policy::{Bulkhead, Event};
use bulkhead_shared::{JobId, Priority, RejectReason};
use foldhash::quality::RandomState;

use super::bulkheads::Compartment;
use super::shares::{Giver, Holder, Kind, Owner, Shares};
use super::slab::{BulkheadIndex, CompartmentIndex, SessionId};
use super::{DataPlane, Incoming, JobData};

/// A small frame that is half received is given up only if it holds more than that: less is no worth a connection.
pub(super) const FRAME_BYTES_MIN: usize = 4 * 1024;

/// What a waiting job takes in tables, whatever it is called: here, in the policy and in its session.
pub(super) const JOB_BYTES: usize =
    size_of::<JobData>() + Bulkhead::<Box<JobData>>::JOB_BYTES + REQUEST_BYTES;

/// By a session's table of requests, which is half empty, and by the list of what can be given up.
const REQUEST_BYTES: usize =
    2 * size_of::<(u64, (CompartmentIndex, JobId))>() + 2 * size_of::<(CompartmentIndex, JobId)>();

/// The name of a tenant is kept once more while it has jobs, with its numbers and its place in the turns.
const TENANT_BYTES: usize = 512;

/// Entries of a list of waiting jobs that may be about jobs that wait no more.
const STALE_MAX: usize = 64;

/// What is held for a job, and its holder.
#[derive(Clone, Copy, Default)]
pub(super) struct Charge {
    holder: Holder,
    bytes: usize,
    is_waiting: bool,
}

/// What is held all the time, as it was counted last.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted {
    pub(super) holder: Holder,
    pub(super) bytes: usize,
    pub(super) kind: Kind,
}

/// The jobs of one connection in one bulkhead that wait, the newest last; some of them do not any more.
#[derive(Default)]
struct Waiting {
    /// By the code of the priority: the compartment and the job.
    stacks: [Vec<(CompartmentIndex, JobId)>; Priority::ALL.len()],
    jobs: usize,
}

pub(super) struct Memory {
    pub(super) shares: Shares,
    waiting: HashMap<Holder, Waiting, RandomState>,
    /// What workers have not read yet.
    workers: Holder,
    /// What is the supervisor's own affair: jobs that are run again.
    own: Holder,
    /// Payloads that come in by HTTP without saying how long they are.
    spool: Holder,
    spooled: usize,
}

impl Memory {
    pub(super) fn new(own_uid: u32) -> Self {
        let mut shares = Shares::default();
        let workers = shares.open(Owner::Workers, 0);
        // Sessions count from 1.
        let own = shares.open(Owner::User(own_uid), 0);
        let spool = shares.open(Owner::User(own_uid), u64::MAX);
        Self { shares, waiting: HashMap::default(), workers, own, spool, spooled: 0 }
    }

    /// All that is held in the data plane.
    pub(super) fn held(&self) -> usize {
        self.shares.held() - self.spooled
    }

    /// Another sum of something that is held all the time.
    pub(super) fn recount(&mut self, was: Counted, is: Counted) {
        if was != is {
            // First what is added, so that its holder is never forgotten in between.
            self.shares.add(is.holder, is.kind, is.bytes);
            self.shares.subtract(was.holder, was.kind, was.bytes);
        }
    }

    /// Another sum of what workers have not read.
    pub(super) fn recount_workers(&mut self, was: usize, is: usize) {
        let holder = self.workers;
        let of = |bytes| Counted { holder, bytes, kind: Kind::Fixed };
        self.recount(of(was), of(is));
    }

    fn spooled(&mut self, is: usize) {
        let (holder, was) = (self.spool, std::mem::replace(&mut self.spooled, is));
        let of = |bytes| Counted { holder, bytes, kind: Kind::Frame };
        self.recount(of(was), of(is));
    }

    /// Gives back what was held for a job.
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
    /// Bytes that are held for it while it waits.
    fn footprint(&self) -> usize {
        let tenant = if self.tenant.is_empty() { 0 } else { TENANT_BYTES + 2 * self.tenant.len() };
        let trace = if self.trace.is_some() { size_of::<super::Trace>() } else { 0 };
        let fallback = if self.fallback.is_some() { size_of::<super::FallbackState>() } else { 0 };
        JOB_BYTES + self.operation.len() + tenant + trace + fallback + self.payload_bytes()
    }

    /// Bytes of its payload, here or in a file.
    fn payload_bytes(&self) -> usize {
        self.held.bytes() + self.held.file.as_ref().map_or(0, |file| file.bytes)
    }
}

impl DataPlane {
    /// The holder of a job: its client, for the bulkhead that has it.
    fn holder_of(&mut self, session: SessionId, bulkhead: BulkheadIndex) -> Holder {
        match self.sessions.holder(session) {
            Some(connection) => self.memory.shares.leaf(connection, bulkhead),
            None => self.memory.own,
        }
    }

    /// Holds for a job from now on what `count` says, for its client. Returns the holder, and the job's priority.
    fn charge(
        &mut self,
        (compartment, job): (CompartmentIndex, JobId),
        is_waiting: bool,
        count: impl Fn(&JobData) -> usize,
    ) -> Option<(Holder, Priority)> {
        let Compartment { policy, bulkhead, .. } = &mut self.compartments[compartment];
        let Some(record) = policy.cargo_mut(job) else {
            debug_assert!(false, "{job} was just taken or dispatched, and is not there");
            return None;
        };
        debug_assert_eq!(record.charge.bytes, 0, "something is held for it already");
        let (bulkhead, session, bytes, class) = (*bulkhead, record.session, count(record), record.priority);
        let holder = self.holder_of(session, bulkhead);
        self.memory.shares.add(holder, if is_waiting { Kind::Job } else { Kind::Fixed }, bytes);
        let record = self.compartments[compartment].policy.cargo_mut(job)?;
        record.charge = Charge { holder, bytes, is_waiting };
        Some((holder, class))
    }

    /// A job waits from now on.
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
        // As many have come as are looked at.
        if stack.len() >= most {
            let compartments = &self.compartments;
            stack.retain(|&(place, job)| compartments.get(place).is_some_and(|at| at.policy.is_waiting(job)));
            stack.shrink_to(most);
        }
        stack.push(entry);
    }

    /// A job that a worker has holds its payload nevertheless, since another worker may want it.
    pub(super) fn charge_kept(&mut self, compartment: CompartmentIndex, job: JobId) {
        self.charge((compartment, job), false, JobData::payload_bytes);
    }

    /// A job that waits ahead of a worker holds what it would hold here.
    pub(super) fn charge_ahead(&mut self, compartment: CompartmentIndex, job: JobId) {
        let copied = |record: &JobData| record.held.copy.as_ref().map_or(0, |copy| copy.len());
        self.charge((compartment, job), false, |record| record.footprint() + copied(record));
    }

    /// Whether a connection may hold so much more. What that takes from others, they give by
    /// [`DataPlane::settle_memory`], once it is held.
    pub(super) fn may_hold(&self, connection: Holder, bulkhead: Option<BulkheadIndex>, more: usize) -> bool {
        self.memory.shares.may_have(connection, bulkhead, more, self.limits.buffered_bytes_max)
    }

    fn look_at_spool(&mut self) {
        let unwanted = self.reporter.pulse.spool_unwanted.load(Ordering::Relaxed);
        let spooled = self.reporter.pulse.spooled.load(Ordering::Relaxed);
        self.memory.spooled(spooled.saturating_sub(unwanted));
    }

    /// Tells the control plane what is held here, and what payloads that come in there may hold in any case.
    pub(super) fn tell_memory(&self) {
        self.reporter.pulse.buffered.store(self.memory.held(), Ordering::Relaxed);
        let share = self.memory.shares.equal_share(self.limits.buffered_bytes_max);
        self.reporter.pulse.spool_share.store(share, Ordering::Relaxed);
    }

    /// If more is held than may be, those furthest over their share give, for what a connection has just sent.
    pub(super) fn settle_memory(&mut self, wants: Option<(Holder, Option<BulkheadIndex>)>) {
        self.look_at_spool();
        if self.leases.bytes > 0 {
            self.settle_files(self.memory.shares.held());
        }
        while let Some(giver) = self.memory.shares.giver(wants, self.limits.buffered_bytes_max) {
            let before = self.memory.shares.held();
            match giver {
                Giver::Frame(spool) if spool == self.memory.spool => self.give_spool(),
                Giver::Frame(holder) => self.give_frame(self.memory.shares.connection(holder)),
                Giver::Job(leaf) => self.give_job(leaf),
            }
            if self.memory.shares.held() >= before {
                debug_assert!(false, "{giver:?} gave nothing");
                return;
            }
        }
    }

    fn give_spool(&mut self) {
        let over = self.memory.shares.held() - self.limits.buffered_bytes_max;
        let given = over.min(self.memory.spooled);
        self.reporter.pulse.spool_unwanted.fetch_add(given, Ordering::Relaxed);
        self.reporter.pulse.spool_called.notify_waiters();
        self.memory.spooled(self.memory.spooled - given);
    }

    /// The newest job of the lowest class that waits.
    fn give_job(&mut self, leaf: Holder) {
        let Some(waiting) = self.memory.waiting.get_mut(&leaf) else { return };
        for stack in &mut waiting.stacks {
            while let Some((compartment, job)) = stack.pop() {
                let Some(entry) = self.compartments.get_mut(compartment) else { continue };
                // Its number may be another job's by now.
                let is_its =
                    |record: &mut Box<JobData>| record.charge.is_waiting && record.charge.holder == leaf;
                if entry.policy.is_waiting(job) && entry.policy.cargo_mut(job).is_some_and(is_its) {
                    self.apply(compartment, Event::GiveUp { job }, Incoming::None);
                    return;
                }
            }
        }
    }

    pub(super) fn memory_full(&self) -> (RejectReason, String) {
        let most = self.limits.buffered_bytes_max;
        let message =
            format!("what waits holds max_buffered ({most} bytes), and its client no less than others");
        (RejectReason::Overloaded, message)
    }
}

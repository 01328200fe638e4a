//! What a bulkhead looks like from outside, for snapshots and for the invariants that tests check.

use std::sync::Arc;
use std::time::Duration;

use bulkhead_shared::{RejectReason, Verdict};

use super::{Bulkhead, Mode};
use crate::breaker::BreakerState;
use crate::messages::WorkerId;
use crate::time::Time;
use crate::workers::{Role, SlotState};

const REASONS: usize = 18;
const _: () = assert!(RejectReason::ALL.len() < REASONS);

/// How many jobs ended how, since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the outcome of that name")]
pub struct Counters {
    /// Jobs that asked to be taken, whatever became of them.
    pub submitted: u64,
    pub ok: u64,
    pub failed: u64,
    pub deadline_exceeded: u64,
    pub crashed: u64,
    pub cancelled: u64,
    /// By the code of the [`RejectReason`].
    pub rejected: [u64; REASONS],
    /// Replies for jobs that were answered already, or that the worker never had.
    pub late_replies: u64,
}

impl Counters {
    pub(super) fn count(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Ok => self.ok += 1,
            Verdict::Failed(_) => self.failed += 1,
            Verdict::Rejected { reason, .. } => self.rejected[reason.code() as usize] += 1,
            Verdict::DeadlineQueued | Verdict::DeadlineRunning => self.deadline_exceeded += 1,
            Verdict::Crashed { .. } => self.crashed += 1,
            Verdict::Cancelled { .. } => self.cancelled += 1,
        }
    }

    /// Jobs that have their outcome.
    pub fn outcomes(&self) -> u64 {
        self.ok
            + self.failed
            + self.deadline_exceeded
            + self.crashed
            + self.cancelled
            + self.rejected.iter().sum::<u64>()
    }
}

/// The state of a bulkhead in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkheadState {
    /// No worker is ready, and none has failed yet.
    Starting,
    /// Every slot has a worker that is ready.
    Ready,
    /// Some slot has none.
    Degraded,
    /// No slot has a worker or will have one soon.
    Failed,
    /// It takes no jobs.
    Draining,
}

impl BulkheadState {
    /// The word used in every interface.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
            Self::Draining => "draining",
        }
    }
}

/// One worker from outside.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct WorkerView {
    pub id: WorkerId,
    pub slot: u32,
    pub pid: Option<u32>,
    pub state: &'static str,
    pub uptime: Duration,
    pub in_flight: u32,
    pub served: u64,
    /// How often the slot has had another worker before.
    pub restarts: u64,
    /// How the worker before this one ended.
    pub last_exit: Option<String>,
    /// Whether it fills its slot; otherwise it is coming or going.
    pub is_current: bool,
}

/// One tenant from outside.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct TenantView {
    pub name: Arc<str>,
    pub in_flight: u32,
    pub queued: usize,
    /// Jobs that asked to be taken, since the tenant was last forgotten.
    pub submitted: u64,
    /// How many of them were refused at once.
    pub rejected: u64,
}

impl<T> Bulkhead<T> {
    /// The tenants that have most jobs here, at most so many; whoever names no tenant is not among them.
    pub fn tenants(&self, most: usize) -> Vec<TenantView> {
        let mut views: Vec<TenantView> = self
            .tenants
            .iter()
            .map(|(id, tenant)| TenantView {
                name: self.tenants.name(id).clone(),
                in_flight: tenant.in_flight,
                queued: self.queue.len_of_tenant(id.0),
                submitted: tenant.submitted,
                rejected: tenant.rejected,
            })
            .collect();
        let load = |view: &TenantView| (view.in_flight as usize + view.queued, view.submitted);
        views.sort_unstable_by(|a, b| load(b).cmp(&load(a)).then_with(|| a.name.cmp(&b.name)));
        views.truncate(most);
        views
    }

    /// What was counted since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Where its breaker stands.
    pub fn breaker(&self) -> BreakerState {
        self.breaker.state()
    }

    /// Jobs that wait.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Jobs that a worker has and a client waits for.
    pub fn in_flight(&self) -> u64 {
        self.workers.iter().flatten().map(|w| u64::from(w.wanted)).sum()
    }

    /// Jobs that may run at once now: `max_in_flight` for each worker that is ready.
    pub fn limit(&self) -> u64 {
        u64::from(self.ready) * u64::from(self.limits.max_in_flight)
    }

    /// Permits that are free now.
    pub fn available(&self) -> u64 {
        let max = u64::from(self.limits.max_in_flight);
        self.workers.iter().flatten().filter(|w| w.counted).map(|w| max - w.jobs.len() as u64).sum()
    }

    /// How many jobs may wait now.
    pub fn queue_capacity(&self) -> usize {
        self.waiting_max()
    }

    /// How often a worker was started again.
    pub fn restarts(&self) -> u64 {
        self.slots.iter().map(|slot| slot.spawns.saturating_sub(1)).sum()
    }

    /// Whether the first start of every slot has ended, well or not.
    pub fn has_settled(&self) -> bool {
        self.slots.iter().all(|slot| slot.has_settled)
    }

    /// What went wrong last with its workers, for people; empty if nothing did.
    pub fn last_trouble(&self) -> &str {
        &self.last_trouble
    }

    /// Its state in one word.
    pub fn state(&self) -> BulkheadState {
        if self.mode != Mode::Open {
            return BulkheadState::Draining;
        }
        let slots = self.slots.len() as u32;
        let ready_slots = self
            .slots
            .iter()
            .filter(|slot| match slot.state {
                SlotState::Occupied(place) => {
                    self.workers[place as usize].as_ref().is_some_and(|w| w.counted)
                }
                _ => false,
            })
            .count() as u32;
        match (ready_slots, self.live_slots) {
            (ready, _) if ready == slots => BulkheadState::Ready,
            (0, 0) => BulkheadState::Failed,
            _ if !self.has_settled() => BulkheadState::Starting,
            _ => BulkheadState::Degraded,
        }
    }

    /// Its workers, by slot.
    pub fn workers(&self, now: Time) -> Vec<WorkerView> {
        let mut views: Vec<WorkerView> = self
            .workers
            .iter()
            .flatten()
            .map(|worker| {
                let slot = &self.slots[worker.slot as usize];
                WorkerView {
                    id: worker.id,
                    slot: worker.slot,
                    pid: worker.pid,
                    state: worker.state_name(),
                    uptime: now.since(worker.spawned_at),
                    in_flight: worker.jobs.len() as u32,
                    served: worker.served,
                    restarts: slot.spawns.saturating_sub(1),
                    last_exit: slot.last_exit.clone(),
                    is_current: worker.role == Role::Current,
                }
            })
            .collect();
        views.sort_by_key(|view| (view.slot, view.id.generation));
        views
    }
}

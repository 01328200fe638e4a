//! Slots: their workers, their successors, and the times at which workers start.

use std::time::Duration;

use bulkhead_policy::{Activity, KillReason, RestartCause, RestartPolicy, Time, WorkerId};
use bulkhead_shared::RejectReason;

use super::{Cause, Dead, Model, Phase, Worker};

/// A slot's failure history is cleared once the slot's worker has been ready for this time and has completed a job.
const HISTORY_CLEARED_AFTER: Duration = Duration::from_secs(60);

/// Minimum interval between starts in a bulkhead after more than ten consecutive workers have died during their
/// first jobs.
const RESTART_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// Minimum interval between attempts to start a worker in a slot whose workers have failed too often.
const PROBE_INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Minimum time between the failure of a successor and the start of the next successor.
const SUCCESSOR_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// Interval between attempts to start a worker for which no user ID is free.
const ID_RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Slot {
    pub(super) state: SlotState,
    pub(super) is_spare_slot: bool,
    failures: Vec<Time>,
    streak: u32,
    is_probing: bool,
    /// State that the slot had before the bulkhead was scaled to zero, saved only if the slot was waiting for its next
    /// worker.
    saved_state: Option<SlotState>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) enum SlotState {
    #[default]
    Empty,
    /// A worker is going to be started in the slot.
    Awaiting,
    /// The slot is not needed for the configured number of workers and spares.
    Closed,
    Occupied {
        current: u32,
        successor: Option<u32>,
    },
    Waiting {
        until: Time,
    },
    Stopped {
        probe_at: Option<Time>,
    },
    /// The slot's worker was removed in the current step. The `NextStart` value says when the next worker must start,
    /// if at all.
    Vacant(NextStart),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NextStart {
    Now,
    /// The next worker starts at this time, because many workers in a row died during their first jobs.
    At(Time),
    /// The next worker starts after a delay of at most this duration.
    AfterAtMost(Duration),
    Failed,
    Never,
}

impl SlotState {
    /// Returns true if the slot must not get a worker yet.
    fn waits(self, now: Time) -> bool {
        match self {
            Self::Waiting { until: at } | Self::Stopped { probe_at: Some(at) } => at > now,
            state => matches!(state, Self::Stopped { probe_at: None }),
        }
    }
}

impl Slot {
    pub(super) fn is_live(&self) -> bool {
        match self.state {
            SlotState::Occupied { .. } | SlotState::Waiting { .. } | SlotState::Awaiting => true,
            SlotState::Vacant(next) => !matches!(next, NextStart::Failed | NextStart::Never),
            SlotState::Empty | SlotState::Closed | SlotState::Stopped { .. } => false,
        }
    }

    pub(super) fn new(is_spare_slot: bool) -> Self {
        Self { is_spare_slot, ..Self::default() }
    }

    fn forget(&mut self) {
        *self = Self { state: self.state, ..Self::new(self.is_spare_slot) };
    }
}

impl Model {
    /// Returns the number of slots that have a worker or will get one, excluding slots whose workers have failed too
    /// often.
    pub(super) fn live_slots(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_live() && !slot.is_spare_slot).count()
    }

    /// Returns true if the worker belongs to the slot and has not left it.
    pub(super) fn is_in(worker: &Worker, slot: u32) -> bool {
        worker.slot == slot && worker.left.is_none()
    }

    /// Releases the slots of replaced workers that have finished all their jobs, without waiting for these workers to
    /// exit.
    pub(super) fn release_slots(&mut self) {
        let leaves = |worker: &&Worker| {
            let is_done = worker.jobs.is_empty() && worker.prefetched.is_empty() && worker.is_alive();
            let is_draining = matches!(worker.phase, Phase::Draining { .. });
            is_done && is_draining && worker.left.is_none() && !self.is_wanted(worker)
        };
        let leaving: Vec<(u32, u32)> =
            self.workers.values().filter(leaves).map(|worker| (worker.id.place, worker.slot)).collect();
        self.release_count += 1;
        for (place, slot) in leaving {
            self.coverage.see("released its slot");
            let left = Some(self.release_count);
            self.workers.entry(place).and_modify(|worker| worker.left = left);
            if self.slots[slot as usize].state == SlotState::Awaiting && self.activity == Activity::Started {
                self.open(slot as usize);
            }
        }
    }

    pub(super) fn spawn(&mut self, id: WorkerId, slot: u32, restart_cause: Option<RestartCause>) {
        self.release_slots();
        assert!(!self.is_stopping(), "a worker was started while the bulkhead is stopping");
        assert!(id.generation > self.newest_generation, "a generation was used twice");
        assert!(!self.workers.contains_key(&id.place), "a place was used by two workers");
        self.newest_generation = id.generation;
        let state = self.slots[slot as usize].state;
        let successor_to = match state {
            SlotState::Occupied { current, successor: None } => Some(current),
            SlotState::Occupied { .. } => panic!("slot {slot} already has a successor"),
            SlotState::Vacant(NextStart::Now | NextStart::AfterAtMost(_)) => None,
            SlotState::Waiting { until } if until <= self.now => None,
            SlotState::Stopped { probe_at } if probe_at.is_some_and(|at| at <= self.now) => {
                self.coverage.see("probe");
                None
            }
            // A rolling restart that was waiting can now continue in a slot whose worker is gone.
            SlotState::Vacant(_) if self.rolling.remove(&slot) => None,
            SlotState::Vacant(_) => panic!("slot {slot} must not get a worker: {state:?}"),
            _ if self.step.cause == Cause::Reset => None,
            _ if self.rolling.remove(&slot) => None,
            _ => panic!("slot {slot} got a worker although the rules do not allow it: {state:?}"),
        };
        if let Some(current) = successor_to {
            self.check_no_spare_expected(slot);
            self.check_succession(slot, current, restart_cause);
        }
        self.slots[slot as usize].state = match successor_to {
            Some(current) => SlotState::Occupied { current, successor: Some(id.place) },
            None => SlotState::Occupied { current: id.place, successor: None },
        };
        let worker = Worker::new(id, slot, self.now, &self.limits);
        let stands_by = successor_to.is_some() && restart_cause == Some(RestartCause::Jobs);
        self.workers.insert(id.place, Worker { stands_by, ..worker });
        // A slot has one worker, and at most one successor or one replaced worker.
        let of_slot = self.workers.values().filter(|worker| Self::is_in(worker, slot)).count();
        assert!(of_slot <= 2, "slot {slot} has {of_slot} workers");
    }

    /// Checks that there is a reason to replace a healthy worker.
    fn check_succession(&mut self, slot: u32, current: u32, cause: Option<RestartCause>) {
        let worker = &self.workers[&current];
        if cause == Some(RestartCause::Jobs) {
            assert!(
                worker.is_at_job_limit || self.limits.recycle.jobs.is_some() && worker.begun > 0,
                "slot {slot} was recycled without a reason"
            );
            let is_at_it = worker.phase == Phase::Ready || worker.is_at_job_limit;
            assert!(is_at_it && worker.is_alive(), "the worker is already leaving");
            assert!(worker.next_replacement_at <= self.now, "the next successor was started too soon");
            return;
        }
        assert!(worker.phase == Phase::Ready && worker.is_alive(), "the worker is already leaving");
        self.check_standby(slot, current);
    }

    /// Records the exit of a worker. Its descendants are reaped later.
    pub(super) fn worker_dead(&mut self, id: WorkerId, dead: Dead) {
        let now = self.now;
        let Some(worker) = self.live_mut(id) else { return };
        worker.dead = Some(dead);
        worker.jobs.clear();
        let is_proven = worker.ready_at.is_some_and(|at| now.since(at) >= HISTORY_CLEARED_AFTER);
        let (slot, served) = (worker.charged_slot as usize, worker.served);
        if is_proven && served > 0 {
            self.coverage.see("history cleared");
            self.slots[slot].forget();
        }
        if self.hand_over_to_standby(id.place) {
            self.coverage.see("standby takes over after a death");
        }
    }

    /// Removes a dead worker once all its descendants are gone.
    pub(super) fn swept(&mut self, id: WorkerId) {
        let worker = self.workers.get(&id.place).filter(|worker| worker.id == id);
        if let Some(dead) = worker.and_then(|worker| worker.dead) {
            self.worker_gone(id, dead);
        }
    }

    /// Removes a worker and decides what happens to its slot.
    pub(super) fn worker_gone(&mut self, id: WorkerId, dead: Dead) {
        let Dead { lacks_id, is_failure, is_clean, is_early_death } = dead;
        let worker = self.workers.remove(&id.place).expect("the worker must be in the model");
        let slot = worker.slot as usize;
        // The worker was killed while starting, because a restart or a program change had made it outdated.
        let is_unwanted = worker.killed == Some(KillReason::NotNeeded);
        if self.slots[slot].state == SlotState::Awaiting && self.activity == Activity::Started {
            self.open(slot);
        }
        let SlotState::Occupied { current, successor } = self.slots[slot].state else { return };
        if successor == Some(id.place) {
            self.coverage.see("successor failed");
            self.slots[slot].state = SlotState::Occupied { current, successor: None };
            if is_unwanted {
                return;
            }
            let pause = self.limits.restart.backoff_max.max(SUCCESSOR_INTERVAL_MIN);
            let pause = if lacks_id { ID_RETRY_INTERVAL } else { pause };
            let after = self.now + pause;
            self.workers.entry(current).and_modify(|worker| worker.next_replacement_at = after);
            self.rolling.clear();
            self.is_restarting = false;
            for worker in self.workers.values_mut().filter(|worker| worker.has_old_program) {
                worker.retry_replacement_at = Some(after);
            }
        } else if current == id.place {
            self.slots[slot].state = match successor {
                _ if self.is_stopping() => SlotState::Empty,
                Some(current) => SlotState::Occupied { current, successor: None },
                None if is_unwanted => SlotState::Vacant(NextStart::Now),
                None if lacks_id => SlotState::Waiting { until: self.now + ID_RETRY_INTERVAL },
                None => SlotState::Vacant(match self.limits.restart.policy {
                    RestartPolicy::Never if !(is_clean && worker.is_at_job_limit) => NextStart::Never,
                    RestartPolicy::OnFailure if is_clean && !worker.is_at_job_limit => NextStart::Never,
                    _ if is_failure => self.next(worker.charged_slot as usize),
                    _ => self.next_fit(is_early_death),
                }),
            };
            self.owe_if_none_is_left(slot);
        }
    }

    fn owe_if_none_is_left(&mut self, slot: usize) {
        let has_ended =
            matches!(self.slots[slot].state, SlotState::Vacant(NextStart::Failed | NextStart::Never));
        if has_ended && self.live_slots() == 0 && !self.slots[slot].is_spare_slot {
            self.reject_queue(RejectReason::Unavailable);
        }
    }

    /// Decides when the next worker starts after a healthy worker has ended. The start is immediate unless more than
    /// ten workers in a row in this bulkhead have died during their first jobs.
    fn next_fit(&mut self, is_early_death: bool) -> NextStart {
        self.early_deaths = if is_early_death { self.early_deaths + 1 } else { 0 };
        if self.early_deaths <= 10 {
            return NextStart::Now;
        }
        let at = self.last_spaced_start.map_or(self.now, |last| last + RESTART_INTERVAL_MIN).max(self.now);
        self.last_spaced_start = Some(at);
        if at <= self.now {
            return NextStart::Now;
        }
        self.coverage.see("many early deaths");
        NextStart::At(at)
    }

    /// Applies the restart rules after a worker has failed. The first restart is immediate. Each later restart is
    /// delayed by a random time, whose maximum doubles with each failure. After more than `max` failures within
    /// `within`, the slot stops.
    fn next(&mut self, slot: usize) -> NextStart {
        let (now, limits) = (self.now, &self.limits.restart);
        let slot = &mut self.slots[slot];
        slot.streak += 1;
        slot.failures.push(now);
        // Failures beyond the previous `max` were dropped. Dropped failures do not count under a higher `max` either.
        let forgotten = slot.failures.len().saturating_sub(limits.max as usize + 1);
        slot.failures.drain(..forgotten);
        let recent = slot.failures.iter().filter(|&&at| now.since(at) <= limits.within).count();
        if slot.is_probing || recent > limits.max as usize {
            slot.is_probing = true;
            return NextStart::Failed;
        }
        match slot.streak {
            1 => NextStart::Now,
            streak => {
                let ceiling = limits.backoff.saturating_mul(1 << (streak - 2).min(30));
                NextStart::AfterAtMost(ceiling.min(limits.backoff_max))
            }
        }
    }

    pub(super) fn backoff(&mut self, slot: u32, delay: Duration) {
        match self.slots[slot as usize].state {
            SlotState::Vacant(NextStart::AfterAtMost(ceiling)) => {
                assert!(delay <= ceiling, "slot {slot} waits {delay:?}, but must wait at most {ceiling:?}");
            }
            SlotState::Vacant(NextStart::At(at)) => {
                assert_eq!(self.now + delay, at, "slot {slot} starts its next worker at the wrong time")
            }
            _ => panic!("slot {slot} waits {delay:?} without a reason"),
        }
        self.slots[slot as usize].state = SlotState::Waiting { until: self.now + delay };
    }

    /// Allows another replacement attempt for each outdated worker whose retry is due.
    pub(super) fn replace_again(&mut self) {
        let now = self.now;
        for worker in self.workers.values_mut() {
            if worker.retry_replacement_at.is_some_and(|at| at <= now) {
                self.rolling.insert(worker.slot);
            }
        }
    }

    pub(super) fn reset(&mut self) {
        (self.early_deaths, self.last_spaced_start) = (0, None);
        self.slots.iter_mut().for_each(Slot::forget);
    }

    // Number of slots.

    /// Returns true if the worker fills its slot or is the slot's successor.
    pub(super) fn is_wanted(&self, worker: &Worker) -> bool {
        let place = worker.id.place;
        matches!(self.slots[worker.slot as usize].state,
            SlotState::Occupied { current, successor } if current == place || successor == Some(place))
    }

    /// Allows workers to start in slots that were stopped under the previous restart policy.
    pub(super) fn start_stopped(&mut self) {
        let is_given_up = |state: &SlotState| matches!(state, SlotState::Stopped { probe_at: None });
        for slot in 0..self.slots.len() {
            let entry = &mut self.slots[slot];
            entry.saved_state = entry.saved_state.filter(|state| !is_given_up(state));
            if is_given_up(&entry.state) {
                self.open(slot);
            }
        }
    }

    /// Opens or closes slots until their number matches the limits.
    pub(super) fn resize_slots(&mut self) {
        let at_work = self.limits.processes as usize;
        let wanted = at_work + self.limits.start.spares as usize;
        self.keep_most_useful_slots(false, at_work);
        self.keep_most_useful_slots(true, wanted);
        while self.slots.len() < wanted {
            self.slots.push(Slot { state: SlotState::Closed, ..Slot::default() });
        }
        for slot in 0..self.slots.len() {
            let was_reserve = self.slots[slot].is_spare_slot;
            self.slots[slot].is_spare_slot = slot >= at_work;
            if slot < wanted && slot >= at_work && !was_reserve {
                self.slots[slot].state = SlotState::Closed;
            }
            match (slot < wanted, self.slots[slot].state) {
                (true, SlotState::Closed) => self.open(slot),
                (false, SlotState::Closed) => {}
                (false, _) => self.slots[slot].state = SlotState::Closed,
                (true, _) => {}
            }
        }
        self.reject_without_workers();
    }

    /// Exchanges slots so that the slots beyond `count` are the least useful ones of their kind.
    fn keep_most_useful_slots(&mut self, is_spare_slot: bool, count: usize) {
        loop {
            let of_kind = (0..self.slots.len()).filter(|&slot| {
                self.slots[slot].is_spare_slot == is_spare_slot && self.slots[slot].state != SlotState::Closed
            });
            let (kept, surplus): (Vec<usize>, Vec<usize>) = of_kind.partition(|&slot| slot < count);
            let Some(&least) = kept.iter().min_by_key(|&&slot| self.usefulness(slot)) else { return };
            let Some(&most) = surplus.iter().rev().max_by_key(|&&slot| self.usefulness(slot)) else { return };
            if self.usefulness(least) >= self.usefulness(most) {
                return;
            }
            let is_ready = matches!(self.usefulness(most), 3 | 4);
            self.coverage.see(if is_ready { "ready worker changes its slot" } else { "slots exchanged" });
            self.exchange_slots(least, most);
        }
    }

    fn exchange_slots(&mut self, one: usize, other: usize) {
        let renumbered = |slot: usize| match slot {
            slot if slot == one => other,
            slot if slot == other => one,
            slot => slot,
        };
        self.slots.swap(one, other);
        for worker in self.workers.values_mut() {
            worker.slot = renumbered(worker.slot as usize) as u32;
            worker.charged_slot = renumbered(worker.charged_slot as usize) as u32;
        }
        self.rolling = self.rolling.iter().map(|&slot| renumbered(slot as usize) as u32).collect();
        self.withheld.iter_mut().for_each(|(_, slot, _)| *slot = renumbered(*slot));
    }

    /// Returns a rank that is higher the sooner the slot can run jobs.
    fn usefulness(&self, slot: usize) -> u32 {
        let entry = &self.slots[slot];
        let saved_state = entry.saved_state.filter(|state| state.waits(self.now));
        match saved_state.unwrap_or(entry.state) {
            SlotState::Stopped { .. } => 0,
            SlotState::Occupied { current, .. } => {
                let worker = &self.workers[&current];
                match worker.phase {
                    _ if !worker.is_alive() || self.is_stuck(worker) => 1,
                    Phase::Spawned | Phase::Initializing { .. } => 2,
                    Phase::Ready => 3 + u32::from(!worker.jobs.is_empty()),
                    Phase::Draining { .. } => 1,
                }
            }
            _ => 1,
        }
    }

    /// Opens a slot for a new worker. If another worker still occupies the slot, the new worker starts after
    /// that worker is gone.
    pub(super) fn open(&mut self, slot: usize) {
        if self.activity != Activity::ScaledToZero && self.restore_backoff(slot) {
            return;
        }
        let is_free = self.workers.values().all(|worker| !Self::is_in(worker, slot as u32));
        self.slots[slot].state = match self.activity {
            Activity::ScaledToZero => SlotState::Empty,
            Activity::Started if is_free => SlotState::Vacant(NextStart::Now),
            Activity::Started | Activity::StartAnnounced => SlotState::Awaiting,
        };
    }

    /// Restores the backoff or stopped state that the slot had before the bulkhead was scaled to zero.
    fn restore_backoff(&mut self, slot: usize) -> bool {
        let now = self.now;
        let state = self.slots[slot].saved_state.take().filter(|state| state.waits(now));
        if let Some(state) = state {
            self.coverage.see("backoff continues after scaling to zero");
            self.slots[slot].state = state;
        }
        state.is_some()
    }

    pub(super) fn start(&mut self) {
        if self.is_stopping() {
            return;
        }
        self.activity = Activity::Started;
        for slot in 0..self.slots.len() {
            if matches!(self.slots[slot].state, SlotState::Empty | SlotState::Awaiting) {
                self.open(slot);
            }
        }
    }

    pub(super) fn announce_start(&mut self) {
        if self.activity != Activity::ScaledToZero || self.is_stopping() {
            return;
        }
        self.coverage.see("start announced");
        self.activity = Activity::StartAnnounced;
        for slot in 0..self.slots.len() {
            if self.slots[slot].state == SlotState::Empty && !self.restore_backoff(slot) {
                self.slots[slot].state = SlotState::Awaiting;
            }
        }
    }

    /// Slots whose time has come during an announced start wait for the start instead.
    pub(super) fn end_waits_of_announced_start(&mut self) {
        let now = self.now;
        let is_due = |state| match state {
            SlotState::Waiting { until: at } | SlotState::Stopped { probe_at: Some(at) } => at <= now,
            _ => false,
        };
        if self.activity == Activity::StartAnnounced {
            for slot in self.slots.iter_mut().filter(|slot| is_due(slot.state)) {
                slot.state = SlotState::Awaiting;
            }
        }
    }

    pub(super) fn scale_to_zero(&mut self) {
        if self.activity == Activity::ScaledToZero || self.is_stopping() {
            return;
        }
        self.coverage.see("scales to zero");
        self.activity = Activity::ScaledToZero;
        self.idle_since = None;
        for slot in self.slots.iter_mut().filter(|slot| slot.state != SlotState::Closed) {
            if matches!(slot.state, SlotState::Waiting { .. } | SlotState::Stopped { .. }) {
                slot.saved_state = Some(slot.state);
            }
            slot.state = SlotState::Empty;
        }
        self.reject_without_workers();
    }

    fn reject_without_workers(&mut self) {
        if self.live_slots() == 0 {
            self.reject_queue(RejectReason::Unavailable);
        }
    }

    pub(super) fn update_slots(&mut self) {
        let (now, cause, is_stopping) = (self.now, self.step.cause, self.is_stopping());
        let probe_at = now + self.limits.restart.backoff_max.max(PROBE_INTERVAL_MIN);
        for slot in &mut self.slots {
            slot.state = match slot.state {
                SlotState::Vacant(NextStart::Failed) => SlotState::Stopped { probe_at: Some(probe_at) },
                SlotState::Vacant(NextStart::Never) => SlotState::Stopped { probe_at: None },
                SlotState::Vacant(next) => panic!("{next:?} did not follow"),
                state => state,
            };
            let (SlotState::Waiting { until: at } | SlotState::Stopped { probe_at: Some(at) }) = slot.state
            else {
                continue;
            };
            assert!(cause != Cause::Tick || at > now, "a slot should have had a worker since {at:?}");
            assert!(cause != Cause::Reset || is_stopping, "a reset must not leave a slot empty");
        }
    }
}

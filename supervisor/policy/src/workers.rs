//! Stores the workers and slots of a bulkhead. All changes go through functions such as [`Workers::edit`] and
//! [`Workers::set_slot`], which also update all derived values. These are the number of permits, the tables for
//! choosing a worker, the links between workers and slots, and the timers. `bulkhead/life.rs` decides when workers
//! start and end.
//!
//! The limit also covers replaced workers. Jobs that are still running in a replaced worker count as overcommit of the
//! worker's slot. Each slot has a share of the permits. The overcommit first uses the part of this share that does not
//! count towards the limit, which is the whole share while the slot has no ready worker. After that, it uses permits of
//! the slot's new worker. It uses permits of other slots only if it exceeds the share.

use std::ops::Range;
use std::time::Duration;

use crate::ending::RestartCause;
use crate::growth::reserve_one;
use crate::limits::Limits;
use crate::load::WorkersByLoad;
use crate::messages::WorkerId;
use crate::restart::FailureHistory;
use crate::time::{Time, earlier};
use crate::timers::Timers;
use crate::worker::{Assignment, Exclusivity, Phase, SilenceCheck, SlotExchange, Worker};

/// Maximum number of prefetched jobs per worker.
const PREFETCHED_MAX: usize = 64;

/// A place for one worker. During a replacement, the slot also has a successor or a replaced worker.
#[derive(Default)]
pub(crate) struct Slot {
    pub(crate) state: SlotState,
    pub(crate) is_spare_slot: bool,
    pub(crate) successor: Option<u32>,
    /// Number of replaced workers that still occupy the slot.
    pub(crate) replaced: u32,
    permits: SlotPermits,
    pub(crate) record: SlotRecord,
}

/// Permit counts for a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SlotPermits {
    /// Number of jobs that are still running in replaced workers.
    overcommit: u32,
    /// Number of permits in use that count towards the limit.
    in_use: u32,
    /// Number of permits in use, including those that do not count towards the limit.
    held: u32,
}

#[derive(Default)]
pub(crate) struct SlotRecord {
    pub(crate) failures: FailureHistory,
    pub(crate) restarts: u64,
    /// State of the slot before the bulkhead was scaled to zero. Saved only if the slot was waiting for its next
    /// worker, and until the worker may start.
    pub(crate) saved_state: Option<SlotState>,
    /// True if the slot has had a worker before. Starting the slot's next worker then counts as a restart.
    pub(crate) has_had_worker: bool,
    /// Reason for the exit of the slot's last worker, if recorded.
    pub(crate) last_end: Option<RestartCause>,
    /// True once the slot's first worker has become ready or has failed to start.
    pub(crate) has_settled: bool,
    pub(crate) last_exit: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// The slot has no worker, because the bulkhead has not been started, is scaled to zero, or is stopping.
    #[default]
    Empty,
    /// The next worker starts when [`Event::Start`](crate::Event::Start) arrives or the previous worker is gone.
    Awaiting,
    /// The slot is not needed for the configured number of workers.
    Closed,
    /// The worker with this table index fills the slot.
    Occupied(u32),
    /// The next worker will start at this time.
    Backoff { until: Time },
    /// The slot is stopped, because its workers failed too often or `restart.policy` does not allow a restart. If
    /// `probe_at` is set, another attempt is made at that time.
    Stopped { probe_at: Option<Time> },
}

impl SlotState {
    /// Returns the table index of the worker that fills the slot, or `None` if no worker fills the slot.
    pub(crate) fn worker(self) -> Option<u32> {
        if let Self::Occupied(place) = self { Some(place) } else { None }
    }

    /// Returns the time at which the next worker starts, or `None` if no time is set.
    pub(crate) fn next_start(self) -> Option<Time> {
        match self {
            Self::Backoff { until } => Some(until),
            Self::Stopped { probe_at } => probe_at,
            _ => None,
        }
    }

    /// Returns true if the slot has a worker or will get one. Returns false for a stopped slot, even if a worker will
    /// later be started there as a probe.
    pub(crate) fn is_live(self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Backoff { .. } | Self::Awaiting)
    }

    /// Returns true if the slot has a worker, or will get one when the previous worker is gone.
    pub(crate) fn is_occupied(self) -> bool {
        matches!(self, Self::Occupied(_) | Self::Awaiting)
    }

    /// Returns true if the slot should have a worker, even if no worker is going to start.
    pub(crate) fn is_wanted(self) -> bool {
        !matches!(self, Self::Empty | Self::Closed)
    }
}

impl Slot {
    /// Returns true if the slot is for jobs and has a worker or will get one.
    pub(crate) fn is_live(&self) -> bool {
        self.state.is_live() && !self.is_spare_slot
    }
}

/// Numbers derived from the state of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Derived {
    is_available: bool,
    /// Number of the worker's free permits that cannot be used because the worker is stalled.
    stalled_permits: u32,
    /// Number of permits that the worker contributes to the limit.
    permits: u32,
    /// Number of the worker's jobs that are charged to a slot as overcommit.
    overcommit: u32,
    /// Number of jobs in flight in the worker, or `None` if the worker cannot be given another job.
    load_level: Option<u32>,
}

impl Derived {
    fn of(worker: &Worker, limits: &Limits) -> Self {
        let is_available = worker.is_available();
        let level = worker.jobs.len() as u32;
        // Prefetched jobs count as started, because the worker may already have started these jobs.
        let left = worker.jobs_left(limits).saturating_sub(worker.prefetched.len() as u64);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let capacity = limits.max_in_flight.min(worker.sent_max_in_flight).min(level.saturating_add(left));
        Self {
            is_available,
            stalled_permits: if is_available && worker.is_stalled {
                capacity.saturating_sub(level)
            } else {
                0
            },
            permits: if is_available { capacity } else { 0 },
            overcommit: if worker.assignment.is_overcommit() { level } else { 0 },
            load_level: (worker.takes_jobs() && level < capacity).then_some(level),
        }
    }
}

struct Entry {
    worker: Worker,
    derived: Derived,
    /// Number of jobs prefetched to the worker, or `None` if no more jobs can be prefetched. Not part of [`Derived`],
    /// because the value also depends on recent run times.
    prefetch_level: Option<u32>,
}

/// Totals over all workers and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Number of workers whose permits count towards the limit.
    pub(crate) ready: u32,
    /// Number of free permits of stalled workers. A stalled worker was late in starting a job, and gets no jobs until
    /// its next sign of life.
    pub(crate) stalled_permits: u64,
    /// Total number of permits that count towards the limit.
    pub(crate) permits: u64,
    /// Number of permits in use that count towards the limit.
    pub(crate) in_use: u32,
    /// Number of permits in use, including those that do not count towards the limit.
    pub(crate) held: u32,
    /// Number of slots that have a worker or will get one.
    pub(crate) live_slots: u32,
}

/// All workers and slots of a bulkhead.
#[derive(Default)]
pub(crate) struct Workers {
    table: Vec<Option<Entry>>,
    free_places: Vec<u32>,
    last_generation: u32,
    timers: Timers,
    /// Workers whose timers must be updated after the current event.
    touched: Vec<u32>,
    slots: Vec<Slot>,
    slot_timers: Timers,
    totals: Totals,
    by_load: WorkersByLoad,
    /// Workers to which more jobs can be prefetched, grouped by their number of prefetched jobs.
    prefetch_candidates: WorkersByLoad,
    /// Worker reserved for the first waiting suspect job. It receives no new jobs until it is idle and can run
    /// the suspect job alone.
    reserved: Option<u32>,
    /// Smoothed average of the time that a job spends in a worker, in nanoseconds.
    service_ns: u64,
    /// Workers that receive no more jobs. Their remaining prefetched jobs must be recalled.
    to_recall: Vec<u32>,
    /// Replaced workers that have finished all their jobs since the last event.
    finished: Vec<u32>,
}

impl Workers {
    pub(crate) fn new(slots: usize, spare_slots: usize) -> Self {
        let mut workers = Self::default();
        workers.slots.reserve_exact(slots + spare_slots);
        workers.slots.resize_with(slots, Slot::default);
        workers.slots.extend((0..spare_slots).map(|_| Slot { is_spare_slot: true, ..Slot::default() }));
        workers
    }

    // Workers.

    pub(crate) fn get(&self, place: u32) -> Option<&Worker> {
        self.table.get(place as usize)?.as_ref().map(|entry| &entry.worker)
    }

    /// Returns the worker with this ID, or `None` if the worker has exited. Frames from exited workers are invalid.
    pub(crate) fn by_id(&self, id: WorkerId) -> Option<&Worker> {
        self.get(id.place).filter(|worker| worker.id == id && !worker.is_dead())
    }

    /// Returns the worker that fills a slot, even if the worker has exited.
    pub(crate) fn of_slot(&self, slot: u32) -> Option<&Worker> {
        self.get(self.slot(slot).state.worker()?)
    }

    /// Returns true if the worker fills a job slot, even if the worker has been killed.
    pub(crate) fn fills_job_slot(&self, worker: &Worker) -> bool {
        worker.assignment.is_current() && !self.slot(worker.assignment.slot()).is_spare_slot
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Worker> {
        self.table.iter().flatten().map(|entry| &entry.worker)
    }

    pub(crate) fn places(&self) -> Range<u32> {
        0..self.table.len() as u32
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.iter().all(Option::is_none)
    }

    /// Adds a worker that is about to be started, and returns its ID.
    pub(crate) fn insert(&mut self, limits: &Limits, now: Time, assignment: Assignment) -> WorkerId {
        let place = self.free_places.pop().unwrap_or_else(|| {
            reserve_one(&mut self.table);
            self.table.push(None);
            self.table.len() as u32 - 1
        });
        self.last_generation = self.last_generation.wrapping_add(1);
        let id = WorkerId { place, generation: self.last_generation };
        let worker = Worker::new(id, assignment, now, limits);
        let derived = Derived::of(&worker, limits);
        self.table[place as usize] = Some(Entry { worker, derived, prefetch_level: None });
        self.link(place, assignment, true);
        self.touched.push(place);
        id
    }

    /// Removes a worker after its process and all descendants have exited.
    pub(crate) fn remove(&mut self, limits: &Limits, place: u32) -> Option<Worker> {
        let assignment = self.get(place)?.assignment;
        self.link(place, assignment, false);
        let Entry { worker, mut derived, mut prefetch_level } = self.table[place as usize].take()?;
        self.by_load.set_level(place, &mut derived.load_level, None);
        self.prefetch_candidates.set_level(place, &mut prefetch_level, None);
        self.reserved = self.reserved.filter(|&reserved| reserved != place);
        self.timers.clear(place);
        self.free_places.push(place);
        self.count(derived, Derived::default());
        self.update_slots(limits, assignment);
        self.touch_slot(assignment.slot());
        Some(worker)
    }

    /// Applies a change to a worker's jobs and updates all derived values. Updates the worker's timer only if
    /// `next_begin_check` is set.
    #[inline]
    pub(crate) fn edit_jobs<R>(
        &mut self,
        limits: &Limits,
        place: u32,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        let worker = &mut self.table.get_mut(place as usize)?.as_mut()?.worker;
        let result = change(worker);
        if worker.next_begin_check.is_some() {
            self.touch(place);
        }
        self.update(limits, place);
        Some(result)
    }

    /// Applies a change to a worker and updates all derived values. The change must not affect the worker's assignment.
    pub(crate) fn edit<R>(
        &mut self,
        limits: &Limits,
        place: u32,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        self.touch(place);
        self.edit_jobs(limits, place, change)
    }

    /// Applies a change that can affect a worker's assignment, and updates all derived values.
    pub(crate) fn reassign<R>(
        &mut self,
        limits: &Limits,
        place: u32,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        let before = self.get(place)?.assignment;
        self.link(place, before, false);
        let result = self.edit(limits, place, change);
        let after = self.get(place)?.assignment;
        self.link(place, after, true);
        for assignment in [before, after] {
            self.touch_slot(assignment.slot());
            self.update_slots(limits, assignment);
        }
        result
    }

    /// Applies a change to a worker and updates all derived values. Does nothing if the worker has exited.
    pub(crate) fn edit_by_id<R>(
        &mut self,
        limits: &Limits,
        id: WorkerId,
        change: impl FnOnce(&mut Worker) -> R,
    ) -> Option<R> {
        self.by_id(id)?;
        self.edit(limits, id.place, change)
    }

    /// Applies a change that affects only the timer of a worker.
    pub(crate) fn edit_timing<R>(&mut self, place: u32, change: impl FnOnce(&mut Worker) -> R) -> Option<R> {
        let result = change(&mut self.table.get_mut(place as usize)?.as_mut()?.worker);
        self.touch(place);
        Some(result)
    }

    /// Records a sign of life from a worker without postponing the worker's timer. Returns true if the worker
    /// was silent.
    #[inline]
    pub(crate) fn record_sign_of_life(&mut self, limits: &Limits, id: WorkerId, now: Time) -> bool {
        let Some(Some(Entry { worker, .. })) = self.table.get_mut(id.place as usize) else { return false };
        if worker.id != id || worker.is_dead() {
            return false;
        }
        worker.last_heard_at = now;
        worker.excused_silences = 0;
        let was_silent = worker.silence != SilenceCheck::None;
        worker.silence = SilenceCheck::None;
        let was_stalled = std::mem::take(&mut worker.is_stalled);
        if was_silent {
            self.touch(id.place);
        }
        if was_stalled {
            self.update(limits, id.place);
        }
        was_silent
    }

    // Slots.

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(crate) fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    pub(crate) fn slot_numbers(&self) -> Range<u32> {
        0..self.slots.len() as u32
    }

    pub(crate) fn record(&mut self, slot: u32) -> &mut SlotRecord {
        &mut self.slots[slot as usize].record
    }

    /// Adds closed slots until the number of slots is `count`.
    pub(crate) fn add_slots(&mut self, count: usize) {
        while self.slots.len() < count {
            self.slots.push(Slot { state: SlotState::Closed, ..Slot::default() });
        }
    }

    pub(crate) fn set_slot(&mut self, limits: &Limits, slot: u32, state: SlotState) {
        let waiting_state =
            if state == SlotState::Empty { self.slot(slot).record.saved_state } else { Some(state) };
        self.set_slot_timer(slot, waiting_state.and_then(SlotState::next_start));
        self.edit_slot(limits, slot, |slot| slot.state = state);
    }

    /// Turns a job slot into a spare slot, or a spare slot into a job slot. The worker stays in the slot.
    pub(crate) fn set_spare_slot(&mut self, limits: &Limits, slot: u32, is_spare_slot: bool) {
        self.edit_slot(limits, slot, |slot| slot.is_spare_slot = is_spare_slot);
        if let Some(place) = self.slot(slot).state.worker() {
            self.reassign(limits, place, |worker| {
                if worker.assignment.is_active() || worker.assignment.is_spare() {
                    worker.assignment = Assignment::of_slot(slot, is_spare_slot);
                }
            });
        }
    }

    /// Exchanges the numbers of two slots of the same kind. Both slots keep their workers, timers and records.
    pub(crate) fn exchange_slots(&mut self, exchange: SlotExchange) {
        let SlotExchange(one, other) = exchange;
        self.slots.swap(one as usize, other as usize);
        for entry in self.table.iter_mut().flatten() {
            entry.worker.assignment.renumber(exchange);
        }
        let at = self.slot_timers.at(one);
        self.set_slot_timer(one, self.slot_timers.at(other));
        self.set_slot_timer(other, at);
    }

    fn set_slot_timer(&mut self, slot: u32, at: Option<Time>) {
        match at {
            Some(at) => self.slot_timers.set(slot, at),
            None => self.slot_timers.clear(slot),
        }
    }

    fn edit_slot(&mut self, limits: &Limits, slot: u32, change: impl FnOnce(&mut Slot)) {
        let entry = &mut self.slots[slot as usize];
        self.totals.live_slots -= u32::from(entry.is_live());
        change(entry);
        self.totals.live_slots += u32::from(entry.is_live());
        self.update_slot(limits, slot);
    }

    // Timers.

    pub(crate) fn next_deadline(&self) -> Option<Time> {
        earlier(self.timers.next(), self.slot_timers.next())
    }

    /// Returns a slot whose next worker is due to start, and clears the slot's timer. If the bulkhead is scaled to zero,
    /// the worker starts with the next job.
    pub(crate) fn pop_due_slot(&mut self, now: Time) -> Option<u32> {
        self.slot_timers.pop_due(now)
    }

    /// Returns a worker whose timer has fired. The caller must then check the worker's deadlines. If the worker does
    /// not need to send heartbeats, it is no longer considered silent.
    pub(crate) fn pop_due(&mut self, limits: &Limits, is_stopping: bool, now: Time) -> Option<u32> {
        self.set_timers(limits, is_stopping);
        let place = self.timers.pop_due(now)?;
        self.edit_timing(place, |worker| {
            if !worker.owes_heartbeats() {
                worker.last_heard_at = now;
            }
            if !worker.is_silent(now, limits.health.missed) {
                worker.silence = SilenceCheck::None;
            }
        });
        Some(place)
    }

    /// Sets the timer of each changed worker to the worker's next deadline.
    pub(crate) fn set_timers(&mut self, limits: &Limits, is_stopping: bool) {
        for index in 0..self.touched.len() {
            let place = self.touched[index];
            let Some(worker) = self.get(place) else { continue };
            match self.due(limits, is_stopping, worker) {
                // Each frame postpones the worker's deadline, but not the worker's timer. When the timer fires, the
                // deadline is checked.
                Some(at) => self.timers.set_at_latest(place, at),
                None => self.timers.clear(place),
            }
        }
        self.touched.clear();
    }

    #[inline]
    fn touch(&mut self, place: u32) {
        if self.touched.last() != Some(&place) {
            self.touched.push(place);
        }
    }

    fn touch_slot(&mut self, slot: u32) {
        if let Some(place) = self.slot(slot).state.worker() {
            self.touch(place);
        }
    }

    /// Returns the time of a worker's next deadline.
    fn due(&self, limits: &Limits, is_stopping: bool, worker: &Worker) -> Option<Time> {
        let silence = match worker.silence {
            SilenceCheck::None => Some(worker.last_heard_at + worker.silence_max(limits.health.missed)),
            SilenceCheck::Observing { until } => Some(until),
            SilenceCheck::AwaitingResult => None,
        };
        match worker.phase {
            Phase::Handshaking { until } => Some(until),
            Phase::Initializing { until } if worker.has_dispatch_thread => earlier(Some(until), silence),
            Phase::Initializing { until } => Some(until),
            Phase::Ready | Phase::Draining => {
                let begun_or_killed = earlier(worker.next_begin_check, worker.kill_at);
                let due = earlier(silence, begun_or_killed);
                // A silent worker is not replaced until the cause of its silence is known.
                if worker.silence != SilenceCheck::None {
                    return due;
                }
                let has_age_limit = worker.assignment.is_current() && !worker.assignment.is_at_job_limit();
                let age = limits.recycle.age.filter(|_| has_age_limit).map(|age| {
                    (worker.spawned_at + age).max(worker.next_replacement_at).max(worker.next_age_check)
                });
                let replacement = earlier(
                    worker.retry_replacement_at(),
                    self.successor_check_at(limits, is_stopping, worker),
                );
                earlier(due, earlier(age, replacement))
            }
            Phase::Killing(_) | Phase::Dead(_) => None,
        }
    }

    /// Returns the time of the next attempt to start a successor for a worker that has been given its last job. For a
    /// standby, returns the next time to check whether the slot's worker is idle.
    fn successor_check_at(&self, limits: &Limits, is_stopping: bool, worker: &Worker) -> Option<Time> {
        let can_start = || {
            let slot = self.slot(worker.assignment.slot());
            slot.successor.is_none() && slot.replaced == 0 && !is_stopping && !limits.has_spares()
        };
        let is_due = worker.is_standby() || worker.is_leaving_at_job_limit() && can_start();
        is_due.then_some(worker.next_replacement_at)
    }

    // Choice of workers.

    /// Returns the worker with the fewest jobs among the workers that can be given another job.
    pub(crate) fn least_loaded(&self) -> Option<u32> {
        self.by_load.least_loaded()
    }

    /// Returns true if the worker can be given another job.
    pub(crate) fn can_take_job(&self, id: WorkerId) -> bool {
        let entry = self.table.get(id.place as usize).and_then(Option::as_ref);
        entry.is_some_and(|entry| entry.worker.id == id && entry.derived.load_level.is_some())
    }

    /// Returns the number of permits that a worker contributes to the limit.
    pub(crate) fn permits_of(&self, place: u32) -> u32 {
        self.table[place as usize].as_ref().map_or(0, |entry| entry.derived.permits)
    }

    /// Returns the total number of free permits of all workers that can be given a job.
    pub(crate) fn free_permits(&self) -> u64 {
        let able = self.table.iter().flatten().filter(|entry| entry.derived.load_level.is_some());
        able.map(|Entry { worker, derived, .. }| {
            (derived.permits as usize).saturating_sub(worker.jobs.len()) as u64
        })
        .sum()
    }

    /// Returns the worker with the fewest prefetched jobs among the workers to which another job can be prefetched.
    pub(crate) fn prefetch_candidate(&self) -> Option<u32> {
        self.prefetch_candidates.least_loaded()
    }

    pub(crate) fn reserved(&self) -> Option<u32> {
        self.reserved
    }

    pub(crate) fn pop_to_recall(&mut self) -> Option<u32> {
        self.to_recall.pop()
    }

    /// Removes and returns one replaced worker that has finished all its jobs since the last event.
    pub(crate) fn pop_finished(&mut self) -> Option<u32> {
        self.finished.pop()
    }

    // Derived numbers.

    #[inline]
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(crate) fn service_ns(&self) -> u64 {
        self.service_ns
    }

    /// Records the time that a job spent in a worker.
    pub(crate) fn record_service_time(&mut self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.service_ns = self.service_ns - self.service_ns / 8 + took / 8;
    }

    fn update(&mut self, limits: &Limits, place: u32) {
        let Some(Entry { worker, derived, prefetch_level }) = &mut self.table[place as usize] else { return };
        if worker.exclusivity == Exclusivity::Draining && worker.is_available() {
            self.reserved = Some(place);
        } else if self.reserved == Some(place) {
            self.reserved = None;
            if worker.exclusivity == Exclusivity::Draining {
                worker.exclusivity = Exclusivity::Shared;
            }
        }
        let mut after = Derived::of(worker, limits);
        let load_level = after.load_level;
        after.load_level = derived.load_level;
        self.by_load.set_level(place, &mut after.load_level, load_level);
        let before = std::mem::replace(derived, after);
        let lookahead = limits.lookahead;
        if !lookahead.is_zero() || prefetch_level.is_some() || !worker.prefetched.is_empty() {
            let depth = prefetch_depth(lookahead, self.service_ns);
            let level = worker.prefetched.len();
            let has_room = level < depth && (level as u64) < worker.jobs_left(limits);
            let can_prefetch = has_room && worker.can_prefetch(after.permits);
            let level = can_prefetch.then_some(level as u32);
            self.prefetch_candidates.set_level(place, prefetch_level, level);
            if !worker.prefetched.is_empty() && !worker.takes_jobs() {
                self.to_recall.push(place);
            }
        }
        if worker.is_finished() {
            self.finished.push(place);
        }
        let assignment = worker.assignment;
        if before.overcommit != after.overcommit {
            let overcommit = &mut self.slots[assignment.charged_slot() as usize].permits.overcommit;
            *overcommit = *overcommit + after.overcommit - before.overcommit;
        }
        self.count(before, after);
        self.update_slots(limits, assignment);
    }

    /// Adds a worker to its slot's records (successor, replaced workers, overcommit), or removes the worker if
    /// `is_added` is false.
    fn link(&mut self, place: u32, assignment: Assignment, is_added: bool) {
        if let Assignment::Successor { slot, .. } = assignment {
            self.slots[slot as usize].successor = is_added.then_some(place);
        }
        if let Some(slot) = assignment.unreleased_slot() {
            let replaced = &mut self.slots[slot as usize].replaced;
            *replaced = if is_added { *replaced + 1 } else { *replaced - 1 };
        }
        if !is_added && let Some(Entry { derived, .. }) = &mut self.table[place as usize] {
            let overcommit = &mut self.slots[assignment.charged_slot() as usize].permits.overcommit;
            *overcommit -= std::mem::take(&mut derived.overcommit);
        }
    }

    /// Updates the totals after a worker's derived numbers have changed.
    fn count(&mut self, before: Derived, after: Derived) {
        let totals = &mut self.totals;
        totals.ready = totals.ready + u32::from(after.is_available) - u32::from(before.is_available);
        totals.stalled_permits =
            totals.stalled_permits + u64::from(after.stalled_permits) - u64::from(before.stalled_permits);
        totals.permits = totals.permits + u64::from(after.permits) - u64::from(before.permits);
    }

    fn update_slots(&mut self, limits: &Limits, assignment: Assignment) {
        self.update_slot(limits, assignment.slot());
        if let Assignment::Replaced { charged_slot, .. } | Assignment::Displaced { charged_slot, .. } =
            assignment
        {
            self.update_slot(limits, charged_slot);
        }
    }

    /// Recomputes a slot's permit counts, and updates the totals.
    fn update_slot(&mut self, limits: &Limits, slot: u32) {
        let before = self.slot(slot).permits;
        let after = self.permits_of_slot(limits, slot);
        self.slots[slot as usize].permits = after;
        self.totals.held = self.totals.held + after.held - before.held;
        self.totals.in_use = self.totals.in_use + after.in_use - before.in_use;
    }

    fn permits_of_slot(&self, limits: &Limits, slot: u32) -> SlotPermits {
        let Slot { state, is_spare_slot, permits: SlotPermits { overcommit, .. }, .. } = *self.slot(slot);
        let (current, share) = match state {
            // Workers in spare slots do not add permits. Their running jobs are charged to the last job slot that they
            // filled.
            _ if is_spare_slot => (None, 0),
            SlotState::Occupied(place) => (self.table[place as usize].as_ref(), limits.max_in_flight),
            SlotState::Closed => (None, 0),
            _ => (None, limits.max_in_flight),
        };
        let (taken, permits, excess) = match current {
            Some(Entry { worker, derived, .. }) if derived.is_available => {
                let level = worker.jobs.len() as u32;
                // A job that runs alone uses all permits of its worker.
                let is_shared = worker.exclusivity == Exclusivity::Shared;
                (if is_shared { level } else { level.max(derived.permits) }, derived.permits, overcommit)
            }
            Some(Entry { worker, .. }) if worker.assignment.is_active() => {
                (0, 0, worker.jobs.len() as u32 + overcommit)
            }
            _ => (0, 0, overcommit),
        };
        // The part of the slot's share that does not count towards the limit absorbs the overcommit first. While new
        // limits are being applied, a worker can still have its previous number of permits.
        let in_use = taken + excess.saturating_sub(share.saturating_sub(permits));
        SlotPermits { overcommit, in_use, held: taken + excess }
    }

    /// Recomputes all derived numbers and checks that the stored numbers are equal to the results.
    #[cfg(debug_assertions)]
    pub(crate) fn check(&self, limits: &Limits, is_stopping: bool) {
        let mut totals = Totals::default();
        let mut links = vec![(None, 0, 0); self.slots.len()];
        for (place, entry) in self.table.iter().enumerate() {
            let Some(Entry { worker, derived, .. }) = entry else { continue };
            assert_eq!(*derived, Derived::of(worker, limits), "numbers of {:?}", worker.id);
            totals.ready += u32::from(derived.is_available);
            totals.stalled_permits += u64::from(derived.stalled_permits);
            totals.permits += u64::from(derived.permits);
            let assignment = worker.assignment;
            links[assignment.charged_slot() as usize].2 += derived.overcommit;
            if let Some(slot) = assignment.unreleased_slot() {
                links[slot as usize].1 += 1;
            }
            if matches!(assignment, Assignment::Successor { .. }) {
                links[assignment.slot() as usize].0 = Some(place as u32);
            }
            let is_current = self.slot(assignment.slot()).state.worker() == Some(place as u32);
            assert_eq!(is_current, assignment.is_current(), "slot of {:?}", worker.id);
            assert_eq!(
                worker.exclusivity == Exclusivity::Draining,
                self.reserved == Some(place as u32),
                "reservation of {:?}",
                worker.id
            );
            let (due, timer) = (self.due(limits, is_stopping, worker), self.timers.at(place as u32));
            assert!(due.is_none_or(|due| timer.is_some_and(|at| at <= due)), "timer of {:?}", worker.id);
        }
        for (slot, &(successor, replaced, overcommit)) in self.slots.iter().zip(&links) {
            assert_eq!(
                (slot.successor, slot.replaced, slot.permits.overcommit),
                (successor, replaced, overcommit)
            );
        }
        for (number, slot) in self.slots.iter().enumerate() {
            assert_eq!(slot.permits, self.permits_of_slot(limits, number as u32), "permits of slot {number}");
            totals.in_use += slot.permits.in_use;
            totals.held += slot.permits.held;
            totals.live_slots += u32::from(slot.is_live());
        }
        assert_eq!(self.totals, totals);
    }
}

/// Returns the number of jobs to prefetch so that their total run time is about `lookahead`. The result is based on
/// recent run times.
fn prefetch_depth(lookahead: Duration, service_ns: u64) -> usize {
    let lookahead = u64::try_from(lookahead.as_nanos()).unwrap_or(u64::MAX);
    usize::try_from(lookahead / service_ns.max(1)).unwrap_or(PREFETCHED_MAX).min(PREFETCHED_MAX)
}

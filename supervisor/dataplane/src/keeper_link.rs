//! Connection to the keeper: timeout, replacement, and the workers to order when there is a keeper again.
//! `reports.rs` applies the keeper's reports.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use bulkhead_keeper::{Keeper, Report};
use bulkhead_policy::{Time, WorkerId};

use super::background::Background;
use super::slab::CompartmentIndex;

/// Timeout for answers of the keeper, which usually answers within milliseconds.
const PONG_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum lifetime of a keeper. An earlier death counts as an early death.
const LIFETIME_MIN: Duration = Duration::from_secs(10);

/// Pause before the fourth keeper in a row. The pause doubles with each further early death, up to sixteen times this
/// value.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct KeeperLink {
    /// `None` while the keeper is being replaced. The previous keeper is then lost, with all workers.
    keeper: Option<Box<Keeper>>,
    since: Time,
    /// Number of consecutive early deaths.
    early_deaths: u32,
    /// Time of the oldest unanswered request.
    pinged_at: Option<Time>,
    /// Reports that could not be handled on arrival.
    deferred_reports: VecDeque<Report>,
    /// Workers to order.
    worker_orders: VecDeque<WorkerOrder>,
}

/// A worker to order when there is a keeper and the iteration has time.
pub(super) struct WorkerOrder {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    pub(super) slot: u32,
}

impl KeeperLink {
    pub(super) fn new(keeper: Keeper) -> Self {
        Self {
            keeper: Some(Box::new(keeper)),
            since: Time::ZERO,
            early_deaths: 0,
            pinged_at: None,
            deferred_reports: VecDeque::new(),
            worker_orders: VecDeque::new(),
        }
    }

    /// Returns the keeper. Fails while the keeper is being replaced.
    pub(super) fn serving(&mut self) -> io::Result<&mut Keeper> {
        self.keeper.as_deref_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    pub(super) fn is_being_replaced(&self) -> bool {
        self.keeper.is_none()
    }

    /// Returns the keeper's pid, or `None` while the keeper is being replaced.
    pub(super) fn pid(&self) -> Option<u32> {
        self.keeper.as_ref().map(|keeper| keeper.pid())
    }

    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.keeper.as_ref().map(|keeper| keeper.as_raw_fd())
    }

    // Orders.

    /// Reaps ended orphans, see [`Keeper::reap_orphans`]. While the keeper is being replaced, the replacement reaps
    /// all orphans.
    pub(super) fn reap_orphans(&mut self) -> bool {
        self.serving().is_ok_and(|keeper| keeper.reap_orphans())
    }

    /// Queues a worker to be ordered.
    pub(super) fn queue_worker(&mut self, order: WorkerOrder) {
        self.worker_orders.push_back(order);
    }

    /// Returns the next worker that can be ordered now.
    pub(super) fn next_worker_order(&mut self) -> Option<WorkerOrder> {
        if self.is_being_replaced() { None } else { self.worker_orders.pop_front() }
    }

    /// Returns true if a worker can be ordered now.
    pub(super) fn has_worker_orders(&self) -> bool {
        !self.worker_orders.is_empty() && !self.is_being_replaced()
    }

    /// Removes a worker from the queue. Returns true if the worker was queued.
    pub(super) fn cancel_worker_order(&mut self, compartment: CompartmentIndex, worker: WorkerId) -> bool {
        let found =
            self.worker_orders.iter().position(|it| it.compartment == compartment && it.worker == worker);
        found.map(|at| self.worker_orders.remove(at)).is_some()
    }

    /// Kills a worker, and requests an answer from the keeper.
    pub(super) fn kill(&mut self, spawn: u64, now: Time) {
        if let Ok(keeper) = self.serving() {
            // An error means that the keeper is gone. The socket reports this as well.
            let _ = keeper.kill(spawn);
            self.ping(now);
        }
    }

    /// Requests an answer from the keeper after an important order. The timeout starts now, unless another answer is
    /// already due.
    pub(super) fn ping(&mut self, now: Time) {
        if self.pinged_at.is_none() && self.serving().and_then(Keeper::ping).is_ok() {
            self.pinged_at = Some(now);
        }
    }

    /// Returns true if an answer is due.
    pub(super) fn awaits_pong(&self) -> bool {
        self.pinged_at.is_some()
    }

    /// Restarts the timeout after a pause of the supervisor, which could not receive an answer during the pause.
    pub(super) fn restart_timeout(&mut self, now: Time) {
        self.pinged_at = self.pinged_at.map(|_| now);
    }

    /// Kills a keeper that is stopped or stuck, because such a keeper neither kills workers nor reports deaths. The
    /// keeper's end of the socket closes, and the rest follows as after a crash of the keeper. Returns true if the
    /// keeper was killed.
    pub(super) fn kill_if_silent(&mut self, now: Time) -> bool {
        let is_silent = self.pinged_at.is_some_and(|at| now.since(at) >= PONG_TIMEOUT);
        if is_silent {
            self.pinged_at = None;
            // Fails only if the keeper has just ended.
            let _ = self.serving().and_then(Keeper::kill_keeper);
        }
        is_silent
    }

    // Reports.

    /// Records that the keeper has sent a report, which counts as an answer.
    pub(super) fn report_received(&mut self) {
        self.pinged_at = None;
    }

    pub(super) fn defer_report(&mut self, report: Report) {
        self.deferred_reports.push_back(report);
    }

    pub(super) fn next_deferred_report(&mut self) -> Option<Report> {
        self.deferred_reports.pop_front()
    }

    // Replacement.

    /// Starts the replacement of a lost keeper. If keepers have died repeatedly, a pause comes first.
    pub(super) fn replace(&mut self, now: Time, background: &mut Background) {
        let is_again = now.since(self.since) < LIFETIME_MIN;
        self.early_deaths = if is_again { self.early_deaths + 1 } else { 0 };
        self.pinged_at = None;
        let lost = self.keeper.take().expect("a keeper can be lost only once");
        background.replace_keeper(lost, pause_after(self.early_deaths));
    }

    /// Puts a new keeper into service. The queued workers can then be ordered.
    pub(super) fn install(&mut self, keeper: Box<Keeper>, now: Time) {
        self.since = now;
        self.keeper = Some(keeper);
    }

    /// Ends the keeper with all workers, and waits for the end. If a keeper is being started, waits for that keeper
    /// first.
    pub(super) fn end(self, background: &Background) -> io::Result<()> {
        self.keeper.map_or_else(|| background.last_keeper(), Ok)?.shut_down()
    }
}

/// Returns the pause before the next keeper after `early_deaths` consecutive early deaths.
fn pause_after(early_deaths: u32) -> Duration {
    match early_deaths.checked_sub(3) {
        Some(doublings) => RESTART_PAUSE * (1 << doublings.min(4)),
        None => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_begins_with_the_fourth_keeper_and_has_an_end() {
        let pauses_ms: Vec<u128> =
            (0..10).map(|early_deaths| pause_after(early_deaths).as_millis()).collect();
        assert_eq!(pauses_ms, [0, 0, 0, 100, 200, 400, 800, 1600, 1600, 1600]);
    }
}

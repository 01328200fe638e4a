//! Connection to the keeper. Checks that the keeper responds, replaces a lost keeper, and queues the workers to start.
//! `wiring/keeper.rs` applies the keeper's reports.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use bulkhead_keeper::{Keeper, Report};
use bulkhead_policy::{Time, WorkerId};

use super::background::Background;
use super::slab::CompartmentIndex;

/// Maximum time to wait for a reply from the keeper. The keeper usually replies within milliseconds.
const PONG_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum lifetime of a keeper. If a keeper dies sooner, its death counts as early.
const LIFETIME_MIN: Duration = Duration::from_secs(10);

/// Delay before a new keeper is started if three keepers in a row have died early. Doubles with each further early
/// death, up to sixteen times this value.
const RESTART_PAUSE: Duration = Duration::from_millis(100);

pub(super) struct KeeperLink {
    state: State,
    since: Time,
    /// Number of consecutive keepers that have died early.
    early_deaths: u32,
    /// Time of the ping whose reply is outstanding, or `None` if no reply is outstanding.
    pinged_at: Option<Time>,
    /// Reports from the keeper that have been received but not handled yet.
    deferred_reports: VecDeque<Report>,
    /// Orders to start workers that have not been sent to the keeper yet.
    worker_orders: VecDeque<WorkerOrder>,
}

/// State of the keeper. Workers exist only while a keeper is running.
enum State {
    Running(Box<Keeper>),
    /// The background thread is starting another keeper.
    Replacing,
    /// No new keeper could be started, so the supervisor stops.
    Failed,
}

/// An order to start a worker. It is sent once a keeper is running and the limit on orders per iteration allows it.
#[derive(Clone, Copy)]
pub(super) struct WorkerOrder {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    pub(super) slot: u32,
}

impl KeeperLink {
    pub(super) fn new(keeper: Keeper) -> Self {
        Self {
            state: State::Running(Box::new(keeper)),
            since: Time::ZERO,
            early_deaths: 0,
            pinged_at: None,
            deferred_reports: VecDeque::new(),
            worker_orders: VecDeque::new(),
        }
    }

    /// Returns the keeper, or an error if no keeper is running.
    pub(super) fn serving(&mut self) -> io::Result<&mut Keeper> {
        match &mut self.state {
            State::Running(keeper) => Ok(keeper),
            State::Replacing | State::Failed => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn running(&self) -> Option<&Keeper> {
        match &self.state {
            State::Running(keeper) => Some(keeper),
            State::Replacing | State::Failed => None,
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.running().is_some()
    }

    /// Returns the keeper's PID, or `None` if no keeper is running.
    pub(super) fn pid(&self) -> Option<u32> {
        self.running().map(Keeper::pid)
    }

    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.running().map(Keeper::as_raw_fd)
    }

    // Orders.

    /// Reaps orphans that have exited (see [`Keeper::reap_orphans`]). Does nothing while the keeper is being replaced,
    /// because the background thread then reaps all orphans.
    pub(super) fn reap_orphans(&mut self) -> bool {
        self.serving().is_ok_and(|keeper| keeper.reap_orphans())
    }

    /// Adds a worker to the start queue.
    pub(super) fn queue_worker(&mut self, order: WorkerOrder) {
        self.worker_orders.push_back(order);
    }

    /// Returns the next worker to start, or `None` if the start queue is empty or there is no keeper.
    pub(super) fn next_worker_order(&mut self) -> Option<WorkerOrder> {
        if self.is_running() { self.worker_orders.pop_front() } else { None }
    }

    /// Returns true if a keeper is running and there are workers to start.
    pub(super) fn has_worker_orders(&self) -> bool {
        !self.worker_orders.is_empty() && self.is_running()
    }

    /// Removes a worker from the start queue. Returns true if the worker was in the queue.
    pub(super) fn cancel_worker_order(&mut self, compartment: CompartmentIndex, worker: WorkerId) -> bool {
        let found =
            self.worker_orders.iter().position(|it| it.compartment == compartment && it.worker == worker);
        found.map(|at| self.worker_orders.remove(at)).is_some()
    }

    /// Orders the keeper to kill a worker. Also pings the keeper, to check that the keeper still responds.
    pub(super) fn kill(&mut self, spawn: u64, now: Time) {
        if let Ok(keeper) = self.serving() {
            // An error means that the keeper is gone, which the socket also reports.
            let _ = keeper.kill(spawn);
            self.ping(now);
        }
    }

    /// Pings the keeper after an important order and starts the timeout for the reply. Does nothing if an earlier ping
    /// has not been answered yet.
    pub(super) fn ping(&mut self, now: Time) {
        if self.pinged_at.is_none() && self.serving().and_then(Keeper::ping).is_ok() {
            self.pinged_at = Some(now);
        }
    }

    /// Returns true if a reply from the keeper is outstanding.
    pub(super) fn awaits_pong(&self) -> bool {
        self.pinged_at.is_some()
    }

    /// Restarts the timeout for the keeper's reply after the supervisor was paused, because no reply could be received
    /// during the pause.
    pub(super) fn restart_timeout(&mut self, now: Time) {
        self.pinged_at = self.pinged_at.map(|_| now);
    }

    /// Kills a keeper that does not reply, because a keeper that is stopped or stuck neither kills workers nor reports
    /// deaths. The death of the keeper closes the socket, which is handled like a crash of the keeper. Returns true if
    /// the keeper was killed.
    pub(super) fn kill_if_silent(&mut self, now: Time) -> bool {
        let is_silent = self.pinged_at.is_some_and(|at| now.since(at) >= PONG_TIMEOUT);
        if is_silent {
            self.pinged_at = None;
            // Fails only if the keeper has just exited on its own.
            let _ = self.serving().and_then(Keeper::kill_keeper);
        }
        is_silent
    }

    // Reports.

    /// Records that the keeper has sent a report. Any report counts as a reply.
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

    /// Starts replacing a lost keeper. The new keeper starts after a delay if several consecutive keepers died
    /// early. Does nothing if no keeper is running.
    pub(super) fn replace(&mut self, now: Time, background: &mut Background) {
        let lost = match std::mem::replace(&mut self.state, State::Replacing) {
            State::Running(lost) => lost,
            other => return self.state = other,
        };
        let is_again = now.since(self.since) < LIFETIME_MIN;
        self.early_deaths = if is_again { self.early_deaths + 1 } else { 0 };
        self.pinged_at = None;
        background.replace_keeper(lost, pause_after(self.early_deaths));
    }

    /// Installs a new keeper and returns its descriptor. The workers in the start queue can then be started. If the
    /// keeper could not be started, returns the error, and the supervisor must stop.
    pub(super) fn install(&mut self, keeper: io::Result<Box<Keeper>>, now: Time) -> io::Result<RawFd> {
        self.since = now;
        match keeper {
            Ok(keeper) => {
                let descriptor = keeper.as_raw_fd();
                self.state = State::Running(keeper);
                Ok(descriptor)
            }
            Err(error) => {
                self.state = State::Failed;
                Err(error)
            }
        }
    }

    /// Shuts down the keeper and all workers, and waits for the keeper to exit. If the keeper is still being started,
    /// waits until it has started before shutting it down.
    pub(super) fn end(self, background: &Background) -> io::Result<()> {
        match self.state {
            State::Running(keeper) => keeper.shut_down(),
            State::Replacing => background.last_keeper()?.shut_down(),
            State::Failed => Ok(()),
        }
    }
}

/// Returns the delay before the next keeper starts, given the number of consecutive keepers that died early.
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
    fn keeper_restart_is_delayed_after_three_early_deaths() {
        let pauses_ms: Vec<u128> =
            (0..10).map(|early_deaths| pause_after(early_deaths).as_millis()).collect();
        assert_eq!(pauses_ms, [0, 0, 0, 100, 200, 400, 800, 1600, 1600, 1600]);
    }
}

//! The keeper as the data plane has it: whether it answers, whether it is being replaced, and which workers wait to be
//! ordered until it is. What it reports is applied in `reports.rs`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use bulkhead_keeper::{Keeper, Report};
use bulkhead_policy::{Time, WorkerId};

use super::background::Background;
use super::slab::CompartmentIndex;

/// How long the keeper may take to answer: it turns in milliseconds, unless the machine hardly does.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// A keeper that lived so long is not one that dies at once.
const PROVEN_AFTER: Duration = Duration::from_secs(10);

/// The pause before the fourth keeper in a row; it doubles up to sixteen times itself.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct KeeperLink {
    /// `None` while it is being replaced: the one before is lost, and with it all workers.
    keeper: Option<Box<Keeper>>,
    since: Time,
    /// How often in a row it died soon after its start.
    deaths: u32,
    /// Since when an answer is due.
    asked_at: Option<Time>,
    /// What it said while something else was being done.
    late_reports: VecDeque<Report>,
    /// Workers that are to be ordered.
    wanted: VecDeque<Wanted>,
}

/// A worker that is ordered as soon as there is a keeper, and time.
pub(super) struct Wanted {
    pub(super) compartment: CompartmentIndex,
    pub(super) worker: WorkerId,
    pub(super) slot: u32,
}

impl KeeperLink {
    pub(super) fn new(keeper: Keeper) -> Self {
        Self {
            keeper: Some(Box::new(keeper)),
            since: Time::ZERO,
            deaths: 0,
            asked_at: None,
            late_reports: VecDeque::new(),
            wanted: VecDeque::new(),
        }
    }

    /// The one that there is. While it is being replaced, an order to it fails.
    pub(super) fn serving(&mut self) -> io::Result<&mut Keeper> {
        self.keeper.as_deref_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.keeper.is_none()
    }

    /// Its process; `None` while it is being replaced.
    pub(super) fn pid(&self) -> Option<u32> {
        self.keeper.as_ref().map(|keeper| keeper.pid())
    }

    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.keeper.as_ref().map(|keeper| keeper.as_raw_fd())
    }

    // Orders.

    /// Reaps ended orphans; see [`Keeper::reap_orphans`]. While the keeper is being replaced, that reaps all.
    pub(super) fn reap_orphans(&mut self) -> bool {
        self.serving().is_ok_and(|keeper| keeper.reap_orphans())
    }

    /// Has a worker wait until it is ordered.
    pub(super) fn want(&mut self, wanted: Wanted) {
        self.wanted.push_back(wanted);
    }

    /// A worker that can be ordered now.
    pub(super) fn next_wanted(&mut self) -> Option<Wanted> {
        if self.is_replaced() { None } else { self.wanted.pop_front() }
    }

    /// Whether there is a worker that can be ordered now.
    pub(super) fn has_wanted(&self) -> bool {
        !self.wanted.is_empty() && !self.is_replaced()
    }

    /// A worker that waits to be ordered is not wanted any more. Returns whether it waited.
    pub(super) fn forget_wanted(&mut self, compartment: CompartmentIndex, worker: WorkerId) -> bool {
        let found = self.wanted.iter().position(|it| it.compartment == compartment && it.worker == worker);
        found.map(|at| self.wanted.remove(at)).is_some()
    }

    /// Has a worker killed, and wants to hear that it was.
    pub(super) fn kill(&mut self, spawn: u64, now: Time) {
        if let Ok(keeper) = self.serving() {
            // An error means that the keeper is gone, which its socket says as well.
            let _ = keeper.kill(spawn);
            self.ask(now);
        }
    }

    /// Wants to hear from the keeper, after an order that matters. Its answer is due from then on.
    pub(super) fn ask(&mut self, now: Time) {
        if self.asked_at.is_none() && self.serving().and_then(Keeper::ping).is_ok() {
            self.asked_at = Some(now);
        }
    }

    /// Whether an answer is due.
    pub(super) fn is_asked(&self) -> bool {
        self.asked_at.is_some()
    }

    /// This process did not run for a while: that the keeper was not heard says nothing.
    pub(super) fn excuse(&mut self, now: Time) {
        self.asked_at = self.asked_at.map(|_| now);
    }

    /// Kills a keeper that is stopped, or stuck: it would leave workers unkilled and deaths unnoticed for ever. Its end
    /// of the socket closes, and the rest is as if it had died by itself. Returns whether it was killed.
    pub(super) fn kill_if_silent(&mut self, now: Time) -> bool {
        let is_silent = self.asked_at.is_some_and(|at| now.since(at) >= ANSWERS_WITHIN);
        if is_silent {
            self.asked_at = None;
            // It can only have ended meanwhile.
            let _ = self.serving().and_then(Keeper::kill_keeper);
        }
        is_silent
    }

    // Reports.

    /// A report was heard: it answers.
    pub(super) fn heard(&mut self) {
        self.asked_at = None;
    }

    pub(super) fn put_off(&mut self, report: Report) {
        self.late_reports.push_back(report);
    }

    pub(super) fn late_report(&mut self) -> Option<Report> {
        self.late_reports.pop_front()
    }

    // Its loss.

    /// It is lost: has another one started, after a pause if it dies again and again.
    pub(super) fn replace(&mut self, now: Time, background: &mut Background) {
        let is_again = now.since(self.since) < PROVEN_AFTER;
        self.deaths = if is_again { self.deaths + 1 } else { 0 };
        self.asked_at = None;
        let lost = self.keeper.take().expect("a keeper is lost once");
        background.replace_keeper(lost, pause_after(self.deaths));
    }

    /// There is another one: the workers that were wanted meanwhile can be ordered.
    pub(super) fn serve(&mut self, keeper: Box<Keeper>, now: Time) {
        self.since = now;
        self.keeper = Some(keeper);
    }

    /// Ends it, with all workers. Waits for that, and for one that is just being started.
    pub(super) fn end(self, background: &Background) -> io::Result<()> {
        self.keeper.map_or_else(|| background.last_keeper(), Ok)?.end()
    }
}

/// The pause before the next keeper, after so many in a row that died soon.
fn pause_after(deaths: u32) -> Duration {
    match deaths.checked_sub(3) {
        Some(doublings) => PAUSE * (1 << doublings.min(4)),
        None => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_begins_with_the_fourth_keeper_and_has_an_end() {
        let pauses_ms: Vec<u128> = (0..10).map(|deaths| pause_after(deaths).as_millis()).collect();
        assert_eq!(pauses_ms, [0, 0, 0, 100, 200, 400, 800, 1600, 1600, 1600]);
    }
}

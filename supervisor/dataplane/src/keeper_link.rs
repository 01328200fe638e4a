//! The keeper as the data plane has it: whether it answers, whether it is being replaced, and which workers wait to be
//! ordered until it is. What it reports is applied in `reports.rs`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use bulkhead_keeper::{Keeper, Report, SpawnOrder};
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
    state: State,
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

enum State {
    Serving(Box<Keeper>),
    /// The one before is lost, and with it all workers.
    Replaced,
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
            state: State::Serving(Box::new(keeper)),
            since: Time::ZERO,
            deaths: 0,
            asked_at: None,
            late_reports: VecDeque::new(),
            wanted: VecDeque::new(),
        }
    }

    fn keeper(&mut self) -> io::Result<&mut Keeper> {
        match &mut self.state {
            State::Serving(keeper) => Ok(keeper),
            State::Replaced => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    pub(super) fn is_replaced(&self) -> bool {
        matches!(self.state, State::Replaced)
    }

    /// Its process; `None` while it is being replaced.
    pub(super) fn pid(&self) -> Option<u32> {
        match &self.state {
            State::Serving(keeper) => Some(keeper.pid()),
            State::Replaced => None,
        }
    }

    pub(super) fn descriptor(&self) -> Option<RawFd> {
        match &self.state {
            State::Serving(keeper) => Some(keeper.as_raw_fd()),
            State::Replaced => None,
        }
    }

    // Orders.

    pub(super) fn spawn(
        &mut self,
        order: &SpawnOrder<'_>,
        link: OwnedFd,
        (stdout, stderr): (OwnedFd, OwnedFd),
    ) -> io::Result<()> {
        self.keeper()?.spawn(order, link, stdout, stderr)
    }

    pub(super) fn spawn_template(
        &mut self,
        order: &SpawnOrder<'_>,
        (stdout, stderr): (OwnedFd, OwnedFd),
    ) -> io::Result<()> {
        self.keeper()?.spawn_template(order, stdout, stderr)
    }

    /// Has a template fork a worker.
    pub(super) fn fork(
        &mut self,
        (spawn, template): (u64, u64),
        link: OwnedFd,
        (stdout, stderr): (OwnedFd, OwnedFd),
    ) -> io::Result<()> {
        self.keeper()?.fork((spawn, template), link, stdout, stderr)
    }

    /// Reaps ended orphans; see [`Keeper::reap_orphans`]. While the keeper is being replaced, that reaps all.
    pub(super) fn reap_orphans(&mut self) -> bool {
        self.keeper().is_ok_and(|keeper| keeper.reap_orphans())
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
        if let Ok(keeper) = self.keeper() {
            // An error means that the keeper is gone, which its socket says as well.
            let _ = keeper.kill(spawn);
            self.ask(now);
        }
    }

    /// Wants to hear from the keeper, after an order that matters. Its answer is due from then on.
    pub(super) fn ask(&mut self, now: Time) {
        if self.asked_at.is_none() && self.keeper().and_then(Keeper::ping).is_ok() {
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
            let _ = self.keeper().and_then(Keeper::kill_keeper);
        }
        is_silent
    }

    // Reports.

    /// Sends orders that wait for the socket.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.keeper()?.flush()
    }

    /// The next report, if there is one.
    pub(super) fn receive(&mut self) -> io::Result<Option<Report>> {
        self.keeper()?.receive()
    }

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
        match std::mem::replace(&mut self.state, State::Replaced) {
            State::Serving(lost) => background.replace_keeper(lost, pause_after(self.deaths)),
            State::Replaced => unreachable!("a keeper is lost once"),
        }
    }

    /// There is another one: the workers that were wanted meanwhile can be ordered.
    pub(super) fn serve(&mut self, keeper: Box<Keeper>, now: Time) {
        self.since = now;
        self.state = State::Serving(keeper);
    }

    /// Ends it, with all workers. Waits for that, and for one that is just being started.
    pub(super) fn end(self, background: &Background) -> io::Result<()> {
        match self.state {
            State::Serving(keeper) => keeper.end(),
            State::Replaced => background.last_keeper()?.end(),
        }
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

//! Whose frames are read next. Users take turns, and the connections of each user among themselves, so that a
//! client that floods, on however many connections, is waited for by itself alone. What one turn of the loop reads
//! from clients is bounded, since the answers of workers wait for its end.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use foldhash::quality::RandomState;

use super::DataPlane;
use super::slab::SessionIndex;

/// Bytes that one connection is read at once, while others wait.
const QUANTUM_BYTES: usize = 4 * 1024;

/// The same of a connection that has the turn to itself.
const ALONE_BYTES: usize = 16 * 1024;

/// What may be read from clients in one turn, in bytes, where each frame counts as [`FRAME_COST`] more: a few
/// hundred small jobs.
const TURN_COST_MAX: usize = 64 * 1024;

/// The time after which a turn reads no further client: to let go of one costs more than to read from it.
const TURN_TIME: Duration = Duration::from_micros(100);

/// What a frame costs beside its bytes.
const FRAME_COST: usize = 256;

/// What frames that were refused as they came count for before a connection is read as one that can wait, and what
/// a job that was taken makes up for: it can wait if more than four in five are refused.
const REFUSED_MAX: u32 = 256;
const TAKEN_COUNTS: u32 = 4;

/// Those that share a turn: a user's connections.
type Uid = u32;

/// Where a connection stands with its user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    is_waiting: bool,
    /// The user's round in which it was read last, and how much.
    round: u64,
    bytes: usize,
    /// Nothing more comes than what waits in the socket, and that can wait for the connections that stay.
    pub(super) is_read_closed: bool,
    /// See [`REFUSED_MAX`].
    refused: u32,
}

/// The connections of one user that have something to be read.
#[derive(Default)]
struct User {
    /// Those that have been read little in this round: they go first. So a connection with a job now and then does
    /// not wait for those that always have more.
    fresh: VecDeque<SessionIndex>,
    backlog: VecDeque<SessionIndex>,
    /// By numbers that are never used again.
    round: u64,
    /// How many of the backlog are still to be read in this round.
    left: usize,
}

/// Sessions that wait to be read.
#[derive(Default)]
pub(super) struct Turns {
    users: HashMap<Uid, User, RandomState>,
    /// Those with connections that wait, in order.
    order: VecDeque<Uid>,
    rounds: u64,
    waiting: usize,
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// A connection has, or may have, something to be read.
    pub(super) fn wait(&mut self, uid: Uid, index: SessionIndex, standing: &mut Standing) {
        if std::mem::replace(&mut standing.is_waiting, true) {
            return;
        }
        self.waiting += 1;
        let rounds = &mut self.rounds;
        let user = self.users.entry(uid).or_insert_with(|| {
            self.order.push_back(uid);
            *rounds += 1;
            User { round: *rounds, ..User::default() }
        });
        standing.enter(user.round);
        let is_fresh = standing.bytes < QUANTUM_BYTES;
        if is_fresh { user.fresh.push_back(index) } else { user.backlog.push_back(index) }
    }

    /// The next connection, and its user's round. It may have been closed since.
    fn next(&mut self) -> Option<(SessionIndex, u64)> {
        let uid = self.order.pop_front()?;
        let user = self.users.get_mut(&uid)?;
        let next = user.fresh.pop_front().or_else(|| {
            if user.left == 0 {
                self.rounds += 1;
                (user.round, user.left) = (self.rounds, user.backlog.len());
            }
            user.left = user.left.saturating_sub(1);
            user.backlog.pop_front()
        });
        let round = user.round;
        self.waiting -= usize::from(next.is_some());
        if user.fresh.is_empty() && user.backlog.is_empty() {
            self.users.remove(&uid);
        } else {
            self.order.push_back(uid);
        }
        next.map(|index| (index, round))
    }
}

impl Standing {
    /// A frame was refused before there was a job.
    pub(super) fn refuse(&mut self) {
        self.refused = (self.refused + 1).min(2 * REFUSED_MAX);
    }

    /// A job was taken.
    #[inline]
    pub(super) fn take_job(&mut self) {
        self.refused = self.refused.saturating_sub(TAKEN_COUNTS);
    }

    /// Whether what comes may wait for the others: nothing more does than what is in the socket, or hardly any of it
    /// is worth anything.
    pub(super) fn can_wait(&self) -> bool {
        self.is_read_closed || self.refused >= REFUSED_MAX
    }

    /// It is its turn, in this round.
    fn begin(&mut self, round: u64) {
        self.is_waiting = false;
        self.enter(round);
    }

    fn enter(&mut self, round: u64) {
        if self.round != round {
            (self.round, self.bytes) = (round, 0);
        }
    }
}

impl DataPlane {
    /// Reads from those that wait, as much as one turn may.
    pub(super) fn read_clients(&mut self) {
        if !self.sessions.turns.is_empty() {
            let (began, mut cost) = (Instant::now(), 0);
            while cost < TURN_COST_MAX
                && (cost == 0 || began.elapsed() < TURN_TIME)
                && let Some(next) = self.sessions.turns.next()
            {
                let most = if self.sessions.turns.is_empty() { ALONE_BYTES } else { QUANTUM_BYTES };
                cost += self.read_client(next, most);
            }
        }
        if self.sessions.may_read_patient(self.now) {
            let began = Instant::now();
            while began.elapsed() < TURN_TIME
                && let Some(next) = self.sessions.patient.next()
            {
                self.read_client(next, QUANTUM_BYTES);
            }
            self.sessions.patience.spend(began);
        }
    }

    /// Reads once. Returns what that cost, also of one that is gone now: a crowd that leaves is bounded like one that
    /// speaks.
    fn read_client(&mut self, (index, round): (SessionIndex, u64), most: usize) -> usize {
        // A place that was given to another meanwhile has not waited.
        let session = self.sessions.slab.get_mut(index);
        let Some(session) = session.filter(|session| session.standing.is_waiting) else { return 0 };
        session.standing.begin(round);
        let before = session.inbox.frames_begun();
        let bytes = self.session_readable(index, most);
        let cost = bytes + FRAME_COST;
        let Some(session) = self.sessions.get_mut(index) else { return cost };
        session.standing.bytes = session.standing.bytes.saturating_add(bytes);
        let frames = session.inbox.frames_begun().saturating_sub(before) as usize;
        cost + FRAME_COST * frames
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabIndex;

    /// Connections with users, each of which always has more.
    struct Crowd {
        turns: Turns,
        standings: Vec<Standing>,
        uids: Vec<Uid>,
    }

    impl Crowd {
        fn new(uids: Vec<Uid>) -> Self {
            let standings = vec![Standing::default(); uids.len()];
            let mut crowd = Self { turns: Turns::default(), standings, uids };
            (0..crowd.uids.len()).for_each(|index| crowd.wait(index));
            crowd
        }

        fn wait(&mut self, index: usize) {
            self.turns.wait(self.uids[index], SessionIndex::from_number(index), &mut self.standings[index]);
        }

        /// Reads one, which then waits again if there is more.
        fn read(&mut self, bytes: usize, has_more: impl Fn(usize) -> bool) -> usize {
            let (index, round) = self.turns.next().unwrap();
            let index = index.number();
            self.standings[index].begin(round);
            self.standings[index].bytes += bytes;
            if has_more(index) {
                self.wait(index);
            }
            index
        }
    }

    #[test]
    fn users_take_turns_whatever_their_connections() {
        let mut uids = vec![1; 200];
        uids.push(2);
        let mut crowd = Crowd::new(uids);
        let read: Vec<usize> = (0..1000).map(|_| crowd.read(QUANTUM_BYTES, |_| true)).collect();
        let of_the_second = read.iter().filter(|&&index| index == 200).count();
        assert!((499..=501).contains(&of_the_second), "{of_the_second}");
        let mut counts = [0; 200];
        read.iter().filter(|&&index| index < 200).for_each(|&index| counts[index] += 1);
        assert!(counts.iter().all(|count| (2..=3).contains(count)), "{counts:?}");
    }

    #[test]
    fn one_that_sends_little_does_not_wait_for_those_that_always_have_more() {
        let mut crowd = Crowd::new(vec![1; 201]);
        for _ in 0..200 {
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        crowd.read(10, |index| index != 200);
        for _ in 0..1000 {
            crowd.wait(200);
            assert_eq!(crowd.read(10, |index| index != 200), 200);
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        // Nor do all the others wait for it: what goes first in a round is no more than what goes in it.
        let mut its_own = 0;
        for _ in 0..1000 {
            crowd.wait(200);
            its_own += usize::from(crowd.read(QUANTUM_BYTES, |index| index != 200) == 200);
        }
        assert!(its_own <= 2 * 1000 / 200 + 2, "{its_own}");
    }

    #[test]
    fn one_can_wait_that_leaves_or_whose_frames_are_refused() {
        let mut leaves = Standing::default();
        assert!(!leaves.can_wait());
        leaves.is_read_closed = true;
        assert!(leaves.can_wait());
        let after = |refused: u32| {
            let mut standing = Standing::default();
            for _ in 0..1000 {
                (0..refused).for_each(|_| standing.refuse());
                standing.take_job();
            }
            standing.can_wait()
        };
        assert_eq!([0, 4, 5].map(after), [false, false, true]);
        // It is soon taken for what it is again.
        let mut standing = Standing::default();
        (0..1_000_000).for_each(|_| standing.refuse());
        (0..65).for_each(|_| standing.take_job());
        assert!(!standing.can_wait());
    }

    #[test]
    fn nothing_is_left_of_those_who_have_nothing() {
        let mut crowd = Crowd::new((0..50).map(|n| n % 7).collect());
        crowd.wait(3);
        for _ in 0..50 {
            crowd.read(1, |_| false);
        }
        assert!(crowd.turns.next().is_none());
        assert!(crowd.turns.is_empty() && crowd.turns.users.is_empty() && crowd.turns.order.is_empty());
    }
}

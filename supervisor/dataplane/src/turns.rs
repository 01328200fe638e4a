//! Fair order of reading clients. Users take turns, and so do the connections of each user. A client that floods
//! therefore delays only itself, whatever its number of connections. The amount read from clients per iteration is
//! bounded, because workers' answers wait for the end of the iteration.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use foldhash::quality::RandomState;

use super::DataPlane;
use super::shares::Owner;
use super::slab::SessionIndex;

/// Maximum number of bytes read at once from a connection while others wait.
const QUANTUM_BYTES: usize = 4 * 1024;

/// Maximum number of bytes read at once from the only waiting connection.
const ALONE_BYTES: usize = 16 * 1024;

/// Maximum cost of reading clients per iteration, in bytes plus [`FRAME_COST`] for each frame. This is enough for a
/// few hundred small jobs.
const TURN_COST_MAX: usize = 64 * 1024;

/// Time after which an iteration reads no further client. Closing a client takes longer than reading from a client.
const TURN_TIME: Duration = Duration::from_micros(100);

/// Fixed cost of a frame, added to the number of bytes.
const FRAME_COST: usize = 256;

/// Number of rejected frames after which a connection can wait for others. An accepted job compensates for
/// [`TAKEN_COUNTS`] rejections, so a connection can wait if more than four in five frames are rejected.
const REFUSED_MAX: u32 = 256;
const TAKEN_COUNTS: u32 = 4;

/// State of a connection in the order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    is_waiting: bool,
    /// The user's round of the last read, and the number of bytes read in that round.
    round: u64,
    bytes: usize,
    /// True if the peer has closed its side. The bytes that are left in the socket can wait for other connections.
    pub(super) is_read_closed: bool,
    /// Weighted number of rejected frames, see [`REFUSED_MAX`].
    refused: u32,
}

/// Connections of a user with input.
#[derive(Default)]
struct User {
    /// Connections from which little was read in this round. These come first, so that a connection with an
    /// occasional job does not wait for connections that always have input.
    fresh: VecDeque<SessionIndex>,
    backlog: VecDeque<SessionIndex>,
    /// Current round. Round numbers are never reused.
    round: u64,
    /// Number of connections in the backlog that are not read in this round yet.
    left: usize,
}

/// Sessions that wait to be read.
#[derive(Default)]
pub(super) struct Turns {
    users: HashMap<Owner, User, RandomState>,
    /// Users with waiting connections, in order.
    order: VecDeque<Owner>,
    rounds: u64,
    waiting: usize,
}

impl Turns {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Queues a connection that may have input.
    pub(super) fn wait(&mut self, owner: Owner, index: SessionIndex, standing: &mut Standing) {
        if std::mem::replace(&mut standing.is_waiting, true) {
            return;
        }
        self.waiting += 1;
        let rounds = &mut self.rounds;
        let user = self.users.entry(owner).or_insert_with(|| {
            self.order.push_back(owner);
            *rounds += 1;
            User { round: *rounds, ..User::default() }
        });
        standing.enter(user.round);
        let is_fresh = standing.bytes < QUANTUM_BYTES;
        if is_fresh { user.fresh.push_back(index) } else { user.backlog.push_back(index) }
    }

    /// Returns the next connection, which may have been closed, and the user's round.
    fn next(&mut self) -> Option<(SessionIndex, u64)> {
        let owner = self.order.pop_front()?;
        let user = self.users.get_mut(&owner)?;
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
            self.users.remove(&owner);
        } else {
            self.order.push_back(owner);
        }
        next.map(|index| (index, round))
    }
}

impl Standing {
    /// Counts a frame that was rejected before becoming a job.
    pub(super) fn refuse(&mut self) {
        self.refused = (self.refused + 1).min(2 * REFUSED_MAX);
    }

    /// Counts an accepted job.
    #[inline]
    pub(super) fn take_job(&mut self) {
        self.refused = self.refused.saturating_sub(TAKEN_COUNTS);
    }

    /// Returns true if the connection can wait for others, because the peer has closed the connection or most frames
    /// are rejected.
    pub(super) fn can_wait(&self) -> bool {
        self.is_read_closed || self.refused >= REFUSED_MAX
    }

    /// Begins a read of the connection in this round.
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
    /// Reads from waiting clients, up to the maximum per iteration.
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

    /// Reads once. Returns the cost, even if the client is gone afterwards, so that disconnecting clients are bounded
    /// like others.
    fn read_client(&mut self, (index, round): (SessionIndex, u64), most: usize) -> usize {
        // An index that was reused meanwhile belongs to a session that is not waiting.
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

    /// Connections that always have input, with users.
    struct Crowd {
        turns: Turns,
        standings: Vec<Standing>,
        owners: Vec<Owner>,
    }

    impl Crowd {
        fn new(owners: Vec<Owner>) -> Self {
            let standings = vec![Standing::default(); owners.len()];
            let mut crowd = Self { turns: Turns::default(), standings, owners };
            (0..crowd.owners.len()).for_each(|index| crowd.wait(index));
            crowd
        }

        fn wait(&mut self, index: usize) {
            self.turns.wait(self.owners[index], SessionIndex::from_number(index), &mut self.standings[index]);
        }

        /// Reads a connection, and queues the connection again if there is more input.
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
        let mut owners = vec![Owner::User(1); 200];
        owners.push(Owner::User(2));
        let mut crowd = Crowd::new(owners);
        let read: Vec<usize> = (0..1000).map(|_| crowd.read(QUANTUM_BYTES, |_| true)).collect();
        let of_the_second = read.iter().filter(|&&index| index == 200).count();
        assert!((499..=501).contains(&of_the_second), "{of_the_second}");
        let mut counts = [0; 200];
        read.iter().filter(|&&index| index < 200).for_each(|&index| counts[index] += 1);
        assert!(counts.iter().all(|count| (2..=3).contains(count)), "{counts:?}");
    }

    #[test]
    fn quiet_connection_does_not_wait_for_busy_ones() {
        let mut crowd = Crowd::new(vec![Owner::User(1); 201]);
        for _ in 0..200 {
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        crowd.read(10, |index| index != 200);
        for _ in 0..1000 {
            crowd.wait(200);
            assert_eq!(crowd.read(10, |index| index != 200), 200);
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        // The other connections do not wait for this one either, because a connection that has used its quantum no
        // longer comes first in the round.
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
        // Some accepted jobs are enough for the connection to count as ordinary again.
        let mut standing = Standing::default();
        (0..1_000_000).for_each(|_| standing.refuse());
        (0..65).for_each(|_| standing.take_job());
        assert!(!standing.can_wait());
    }

    #[test]
    fn nothing_is_left_of_those_who_have_nothing() {
        let mut crowd = Crowd::new((0..50).map(|n| Owner::User(n % 7)).collect());
        crowd.wait(3);
        for _ in 0..50 {
            crowd.read(1, |_| false);
        }
        assert!(crowd.turns.next().is_none());
        assert!(crowd.turns.is_empty() && crowd.turns.users.is_empty() && crowd.turns.order.is_empty());
    }
}

//! Decides the order in which clients are read, and how many bytes each read can take. Users take turns, and so do the
//! connections of each user, so a user that floods the supervisor delays only itself. `Sessions` owns one queue for
//! ordinary connections and one for connections with low priority. `wiring/sessions.rs` performs the reads and limits
//! their cost per iteration.

use foldhash::quality::RandomState;
use std::collections::{HashMap, VecDeque};

use crate::shares::Owner;
use crate::slab::SessionIndex;

/// Maximum number of bytes read from a connection at a time while other connections are waiting.
pub(super) const QUANTUM_BYTES: usize = 4 * 1024;

/// Maximum number of bytes read from a connection at a time if no other connection is waiting.
const QUANTUM_BYTES_ALONE: usize = 16 * 1024;

/// Fixed cost of a frame, charged in addition to the number of bytes in the frame.
const FRAME_COST: usize = 256;

/// Number of rejected frames after which a connection has low priority. Each accepted job compensates for
/// [`JOB_WEIGHT`] rejected frames. A connection therefore has low priority if more than four out of five frames are
/// rejected.
const REJECTED_MAX: u32 = 256;
const JOB_WEIGHT: u32 = 4;

/// State of a connection in the fair queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueueState {
    is_waiting: bool,
    /// Scheduling round in which the connection was last read. The `bytes` field counts the bytes read in that round.
    round: u64,
    bytes: usize,
    /// True if the client has closed its side of the connection. Bytes that remain in the socket are then read with low
    /// priority.
    is_read_closed: bool,
    /// Number of rejected frames, reduced by [`JOB_WEIGHT`] for each accepted job (see [`REJECTED_MAX`]).
    rejected: u32,
}

/// A user's connections that have pending input.
#[derive(Default)]
struct User {
    /// Connections from which few bytes have been read in the current round. They come first, so that a connection with
    /// occasional jobs does not wait for connections that always have input.
    fresh: VecDeque<SessionIndex>,
    backlog: VecDeque<SessionIndex>,
    /// Number of the user's current scheduling round. Round numbers are never reused.
    round: u64,
    /// Number of connections in the backlog that have not been read in the current round yet.
    backlog_left: usize,
}

/// Connections that are waiting to be read.
#[derive(Default)]
pub(super) struct FairQueue {
    users: HashMap<Owner, User, RandomState>,
    /// Users with waiting connections, in the order in which they are served.
    order: VecDeque<Owner>,
    rounds: u64,
    waiting: usize,
}

impl FairQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Queues a connection that might have pending input.
    pub(super) fn push(&mut self, owner: Owner, index: SessionIndex, queue_state: &mut QueueState) {
        if std::mem::replace(&mut queue_state.is_waiting, true) {
            return;
        }
        self.waiting += 1;
        let rounds = &mut self.rounds;
        let user = self.users.entry(owner).or_insert_with(|| {
            self.order.push_back(owner);
            *rounds += 1;
            User { round: *rounds, ..User::default() }
        });
        queue_state.enter(user.round);
        let is_fresh = queue_state.bytes < QUANTUM_BYTES;
        if is_fresh { user.fresh.push_back(index) } else { user.backlog.push_back(index) }
    }

    /// Returns the next connection for which `begin` returns true. `begin` is called with a connection and the current
    /// scheduling round of the connection's user. It must return false if the connection was closed while it was
    /// queued.
    pub(super) fn begin_read(
        &mut self,
        mut begin: impl FnMut(SessionIndex, u64) -> bool,
    ) -> Option<SessionIndex> {
        loop {
            let (index, round) = self.next()?;
            if begin(index, round) {
                return Some(index);
            }
        }
    }

    /// Returns the maximum number of bytes to read from the connection that was returned last.
    pub(super) fn quantum(&self) -> usize {
        if self.is_empty() { QUANTUM_BYTES_ALONE } else { QUANTUM_BYTES }
    }

    /// Returns the next connection, and the current scheduling round of the connection's user. The connection might
    /// have been closed while it was queued.
    fn next(&mut self) -> Option<(SessionIndex, u64)> {
        let owner = self.order.pop_front()?;
        let user = self.users.get_mut(&owner)?;
        let next = user.fresh.pop_front().or_else(|| {
            if user.backlog_left == 0 {
                self.rounds += 1;
                (user.round, user.backlog_left) = (self.rounds, user.backlog.len());
            }
            user.backlog_left = user.backlog_left.saturating_sub(1);
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

/// Returns the cost of a read, which is the number of bytes plus a fixed cost per frame.
pub(super) fn read_cost(bytes: usize, frames: usize) -> usize {
    bytes + FRAME_COST * (1 + frames)
}

impl QueueState {
    /// Counts a frame that was rejected before it became a job.
    pub(super) fn count_rejection(&mut self) {
        self.rejected = (self.rejected + 1).min(2 * REJECTED_MAX);
    }

    #[inline]
    pub(super) fn count_job(&mut self) {
        self.rejected = self.rejected.saturating_sub(JOB_WEIGHT);
    }

    /// Returns true if the connection has low priority. This is the case if the client has closed its side, or if
    /// most of the connection's frames are rejected.
    pub(super) fn is_low_priority(&self) -> bool {
        self.is_read_closed || self.rejected >= REJECTED_MAX
    }

    /// Records that the client has closed its side of the connection.
    pub(super) fn close_read(&mut self) {
        self.is_read_closed = true;
    }

    pub(super) fn is_read_closed(&self) -> bool {
        self.is_read_closed
    }

    /// Begins a read from the connection in the given scheduling round. Returns false if the connection is not queued,
    /// which means that another session has reused the index.
    pub(super) fn try_begin(&mut self, round: u64) -> bool {
        let is_waiting = self.is_waiting;
        if is_waiting {
            self.begin(round);
        }
        is_waiting
    }

    /// Completes a read and returns its cost.
    pub(super) fn end_read(&mut self, bytes: usize, frames: usize) -> usize {
        self.bytes = self.bytes.saturating_add(bytes);
        read_cost(bytes, frames)
    }

    /// Begins a read from the connection in the given scheduling round.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabIndex;

    /// Simulated connections of several users, all with pending input.
    struct Crowd {
        turns: FairQueue,
        queue_states: Vec<QueueState>,
        owners: Vec<Owner>,
    }

    impl Crowd {
        fn new(owners: Vec<Owner>) -> Self {
            let queue_states = vec![QueueState::default(); owners.len()];
            let mut crowd = Self { turns: FairQueue::default(), queue_states, owners };
            (0..crowd.owners.len()).for_each(|index| crowd.push(index));
            crowd
        }

        fn push(&mut self, index: usize) {
            self.turns.push(
                self.owners[index],
                SessionIndex::from_number(index),
                &mut self.queue_states[index],
            );
        }

        /// Reads from the next connection, and queues the connection again if it has more input.
        fn read(&mut self, bytes: usize, has_more: impl Fn(usize) -> bool) -> usize {
            let (index, round) = self.turns.next().unwrap();
            let index = index.number();
            self.queue_states[index].begin(round);
            self.queue_states[index].bytes += bytes;
            if has_more(index) {
                self.push(index);
            }
            index
        }
    }

    #[test]
    fn users_take_turns_regardless_of_their_connection_counts() {
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
    fn quiet_connection_is_read_before_busy_connections() {
        let mut crowd = Crowd::new(vec![Owner::User(1); 201]);
        for _ in 0..200 {
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        crowd.read(10, |index| index != 200);
        for _ in 0..1000 {
            crowd.push(200);
            assert_eq!(crowd.read(10, |index| index != 200), 200);
            crowd.read(QUANTUM_BYTES, |index| index != 200);
        }
        // Connection 200 is served before the others only until it has used up its quantum, so the others are not
        // delayed.
        let mut its_own = 0;
        for _ in 0..1000 {
            crowd.push(200);
            its_own += usize::from(crowd.read(QUANTUM_BYTES, |index| index != 200) == 200);
        }
        assert!(its_own <= 2 * 1000 / 200 + 2, "{its_own}");
    }

    #[test]
    fn closed_and_mostly_rejected_connections_have_low_priority() {
        let mut leaves = QueueState::default();
        assert!(!leaves.is_low_priority());
        leaves.is_read_closed = true;
        assert!(leaves.is_low_priority());
        let after = |rejected: u32| {
            let mut queue_state = QueueState::default();
            for _ in 0..1000 {
                (0..rejected).for_each(|_| queue_state.count_rejection());
                queue_state.count_job();
            }
            queue_state.is_low_priority()
        };
        assert_eq!([0, 4, 5].map(after), [false, false, true]);
        // A few accepted jobs are enough to restore the normal priority.
        let mut queue_state = QueueState::default();
        (0..1_000_000).for_each(|_| queue_state.count_rejection());
        (0..65).for_each(|_| queue_state.count_job());
        assert!(!queue_state.is_low_priority());
    }

    #[test]
    fn queue_is_empty_after_all_input_has_been_read() {
        let mut crowd = Crowd::new((0..50).map(|n| Owner::User(n % 7)).collect());
        crowd.push(3);
        for _ in 0..50 {
            crowd.read(1, |_| false);
        }
        assert!(crowd.turns.next().is_none());
        assert!(crowd.turns.is_empty() && crowd.turns.users.is_empty() && crowd.turns.order.is_empty());
    }
}

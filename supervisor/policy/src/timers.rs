//! Timers identified by small numbers. Most timers are set in chronological order, because the jobs in one bulkhead
//! usually have the same limit. Such timers are stored in a queue, in which setting and clearing take O(1). All other
//! timers are stored in a binary heap with an index of positions, in which both take O(log n). Clearing a timer leaves
//! an empty place in the queue. The number of empty places is bounded by the number of set timers.

use std::collections::VecDeque;

use crate::time::Time;

/// Encoded position of a timer. If [`IN_QUEUE`] is set, the other bits are a place number in the queue. Otherwise, the
/// value is an index in the heap.
type Position = u32;

const ABSENT: Position = u32::MAX;
const IN_QUEUE: Position = 1 << 31;
/// Mask that makes place numbers in the queue wrap around.
const PLACE_MASK: u32 = (1 << 30) - 1;

/// Number of stale places that the queue can always contain without being compacted, even if few timers are set.
const STALE_MAX: usize = 64;

/// Timers identified by number. Numbers should be small, because the table has an entry for every number up to the
/// highest one.
#[derive(Default)]
pub struct Timers {
    /// Places in the queue, ordered by time. The first and the last place always belong to timers that are set. A place
    /// between them is stale if its timer was cleared or moved.
    queue: VecDeque<(Time, u32)>,
    /// Place number of the first entry in `queue`. Wraps around.
    first: u32,
    /// Number of set timers in the queue.
    queued_timers: usize,
    heap: Vec<(Time, u32)>,
    position: Vec<Position>,
}

impl Timers {
    /// Memory used by a timer's table entries, in bytes.
    pub(crate) const ENTRY_BYTES: usize = size_of::<(Time, u32)>() + size_of::<Position>();

    /// Returns the time of the earliest timer.
    #[inline]
    pub fn next(&self) -> Option<Time> {
        self.earliest().map(|(at, _)| at)
    }

    #[inline]
    fn earliest(&self) -> Option<(Time, u32)> {
        match (self.queue.front(), self.heap.first()) {
            (Some(&queue), Some(&heap)) => Some(if queue.0 <= heap.0 { queue } else { heap }),
            (queue, heap) => queue.or(heap).copied(),
        }
    }

    /// Clears the earliest timer if it is due at `now`. Returns the timer's number.
    pub fn pop_due(&mut self, now: Time) -> Option<u32> {
        let (at, number) = self.earliest()?;
        (at <= now).then(|| {
            self.clear(number);
            number
        })
    }

    /// Sets the timer with this number, or moves it to another time.
    pub fn set(&mut self, number: u32, at: Time) {
        let index = number as usize;
        if self.position.len() <= index {
            self.position.resize(index + 1, ABSENT);
        }
        let position = self.position[index];
        if position & IN_QUEUE == 0 {
            self.heap[position as usize].0 = at;
            return self.restore_order(position as usize);
        }
        if position != ABSENT {
            if self.queue[self.place(position)].0 == at {
                return;
            }
            self.clear(number);
        }
        if self.queue.back().is_none_or(|last| last.0 <= at) {
            self.position[index] = self.position_of(self.queue.len());
            self.queue.push_back((at, number));
            self.queued_timers += 1;
        } else {
            self.heap.push((at, number));
            self.position[index] = self.heap.len() as u32 - 1;
            self.restore_order(self.heap.len() - 1);
        }
    }

    /// Ensures that the timer with this number fires no later than `at`. A timer that is already set to an earlier time
    /// is not moved, so that frequent postponements cost nothing. When the timer fires, the caller must compare the
    /// time with the actual deadline.
    pub fn set_at_latest(&mut self, number: u32, at: Time) {
        if self.at(number).is_none_or(|set| set > at) {
            self.set(number, at);
        }
    }

    /// Returns the time of the timer with this number, or `None` if it is not set.
    pub(crate) fn at(&self, number: u32) -> Option<Time> {
        match *self.position.get(number as usize)? {
            ABSENT => None,
            position if position & IN_QUEUE == 0 => Some(self.heap[position as usize].0),
            position => Some(self.queue[self.place(position)].0),
        }
    }

    /// Clears the timer with this number. Does nothing if the timer is not set.
    pub fn clear(&mut self, number: u32) {
        let Some(position) = self.position.get_mut(number as usize) else { return };
        match std::mem::replace(position, ABSENT) {
            ABSENT => {}
            position if position & IN_QUEUE == 0 => {
                let place = position as usize;
                self.heap.swap_remove(place);
                if let Some(&(_, moved)) = self.heap.get(place) {
                    self.position[moved as usize] = position;
                    self.restore_order(place);
                }
            }
            _ => {
                self.queued_timers -= 1;
                self.compact();
            }
        }
    }

    // The queue.

    /// Returns the encoded position of the entry at index `place` of the queue.
    fn position_of(&self, place: usize) -> Position {
        IN_QUEUE | (self.first.wrapping_add(place as u32) & PLACE_MASK)
    }

    fn place(&self, position: Position) -> usize {
        (position.wrapping_sub(self.first) & PLACE_MASK) as usize
    }

    fn is_live(&self, place: usize) -> bool {
        self.queue
            .get(place)
            .is_some_and(|(_, number)| self.position[*number as usize] == self.position_of(place))
    }

    /// Removes stale places from both ends of the queue. If too many stale places remain in the middle, removes these
    /// as well.
    fn compact(&mut self) {
        while !self.queue.is_empty() && !self.is_live(0) {
            self.queue.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        while !self.queue.is_empty() && !self.is_live(self.queue.len() - 1) {
            self.queue.pop_back();
        }
        if self.queue.len() > 2 * self.queued_timers + STALE_MAX {
            let mut kept = 0;
            for place in 0..self.queue.len() {
                if self.is_live(place) {
                    let entry = self.queue[place];
                    self.position[entry.1 as usize] = self.position_of(kept);
                    self.queue[kept] = entry;
                    kept += 1;
                }
            }
            self.queue.truncate(kept);
        }
    }

    // The heap.

    fn restore_order(&mut self, place: usize) {
        let place = self.sift_up(place);
        self.sift_down(place);
    }

    fn sift_up(&mut self, mut place: usize) -> usize {
        while place > 0 {
            let parent = (place - 1) / 2;
            if self.heap[parent] <= self.heap[place] {
                break;
            }
            self.swap(parent, place);
            place = parent;
        }
        place
    }

    fn sift_down(&mut self, mut place: usize) {
        loop {
            let left = 2 * place + 1;
            if left >= self.heap.len() {
                return;
            }
            let right = left + 1;
            let earliest =
                if right < self.heap.len() && self.heap[right] < self.heap[left] { right } else { left };
            if self.heap[place] <= self.heap[earliest] {
                return;
            }
            self.swap(place, earliest);
            place = earliest;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.position[self.heap[a].1 as usize] = a as u32;
        self.position[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Setting and clearing timers many times leaves only a bounded number of stale places in the queue.
    #[test]
    fn timers_set_in_order_use_bounded_space() {
        let mut timers = Timers::default();
        // One timer stays at the front of the queue while later timers are set and cleared.
        timers.set(0, Time(0));
        for n in 1..100_000_u32 {
            timers.set(1 + n % 10, Time(u64::from(n)));
            if n % 3 == 0 {
                timers.clear(1 + n % 10);
            }
            assert!(timers.queue.len() <= 2 * timers.queued_timers + STALE_MAX + 1, "{}", timers.queue.len());
            assert!(timers.heap.is_empty());
        }
        assert_eq!(timers.pop_due(Time(0)), Some(0));
        assert_eq!(timers.pop_due(Time(0)), None);
        let mut due = Vec::new();
        while let Some(number) = timers.pop_due(Time(u64::MAX)) {
            due.push(number);
        }
        assert_eq!(due.len(), 6, "of the last ten timers, those that were not cleared must remain");
        assert!(timers.queue.is_empty() && timers.next().is_none());
    }

    #[test]
    fn queue_positions_wrap_around() {
        let mut timers = Timers { first: PLACE_MASK - 2, ..Timers::default() };
        for number in 0..5 {
            timers.set(number, Time(u64::from(number)));
        }
        timers.clear(1);
        timers.set(2, Time(9));
        let order: Vec<u32> = std::iter::from_fn(|| timers.pop_due(Time(9))).collect();
        assert_eq!(order, [0, 3, 4, 2]);
        timers.first = u32::MAX;
        timers.set(3, Time(1));
        timers.set(4, Time(2));
        timers.clear(3);
        assert_eq!(timers.pop_due(Time(9)), Some(4));
    }

    #[test]
    fn timers_match_ordered_set_under_random_use() {
        let mut timers = Timers::default();
        let mut model: Vec<Option<Time>> = vec![None; 50];
        let mut state = 7_u64;
        for step in 0..20_000_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (state >> 33) as u32 % 50;
            // The times are random in some phases and mostly ascending in the others.
            let at = Time(if step / 1000 % 2 == 0 { (state >> 20) % 1000 } else { step + (state >> 20) % 3 });
            match (state >> 60) % 4 {
                0 => {
                    timers.clear(number);
                    model[number as usize] = None;
                }
                1 => {
                    let due: BTreeSet<_> =
                        (0..50).filter(|&n| model[n as usize].is_some_and(|t| t <= at)).collect();
                    match timers.pop_due(at) {
                        Some(number) => {
                            assert!(due.contains(&number));
                            model[number as usize] = None;
                        }
                        None => assert!(due.is_empty()),
                    }
                }
                _ => {
                    timers.set(number, at);
                    model[number as usize] = Some(at);
                }
            }
            assert_eq!(timers.next(), model.iter().flatten().min().copied());
        }
    }
}

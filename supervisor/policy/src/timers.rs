//! One timer for each of many small numbers. Most timers are set in the order of their times, because jobs of
//! one bulkhead usually have the same limit. These timers stand in a queue, where setting and clearing are
//! O(1). All others stand in a binary heap with an index of positions, where both are O(log n). A cleared
//! timer leaves only an empty place in the queue, and the number of empty places is bounded by the number of
//! set timers.

use std::collections::VecDeque;

use crate::time::Time;

/// Position of a number: an index in the heap or, with [`IN_LINE`], the number of a place in the queue.
type Position = u32;

const ABSENT: Position = u32::MAX;
const IN_LINE: Position = 1 << 31;
/// Place numbers wrap around at this mask.
const PLACE_MASK: u32 = (1 << 30) - 1;

/// Number of empty places in the queue that are always tolerated.
const EMPTY_MAX: usize = 64;

/// Timers by number. Numbers should be small, because the table has an entry for each number up to the
/// highest.
#[derive(Default)]
pub struct Timers {
    /// The queue, ordered by time. The first and the last place are always set. A place in between is stale
    /// if its timer was cleared or moved.
    line: VecDeque<(Time, u32)>,
    /// Number of the first place. Wraps around.
    first: u32,
    /// Number of set timers in the queue.
    standing: usize,
    heap: Vec<(Time, u32)>,
    position: Vec<Position>,
}

impl Timers {
    /// Memory per timer, in bytes.
    pub(crate) const ENTRY_BYTES: usize = size_of::<(Time, u32)>() + size_of::<Position>();

    /// Returns the time of the next timer.
    #[inline]
    pub fn next(&self) -> Option<Time> {
        self.least().map(|(at, _)| at)
    }

    #[inline]
    fn least(&self) -> Option<(Time, u32)> {
        match (self.line.front(), self.heap.first()) {
            (Some(&line), Some(&heap)) => Some(if line.0 <= heap.0 { line } else { heap }),
            (line, heap) => line.or(heap).copied(),
        }
    }

    /// Clears and returns one timer that is due at `now`.
    pub fn pop_due(&mut self, now: Time) -> Option<u32> {
        let (at, number) = self.least()?;
        (at <= now).then(|| {
            self.clear(number);
            number
        })
    }

    /// Sets or moves the timer of `number`.
    pub fn set(&mut self, number: u32, at: Time) {
        let index = number as usize;
        if self.position.len() <= index {
            self.position.resize(index + 1, ABSENT);
        }
        let position = self.position[index];
        if position & IN_LINE == 0 {
            self.heap[position as usize].0 = at;
            return self.settle(position as usize);
        }
        if position != ABSENT {
            if self.line[self.place(position)].0 == at {
                return;
            }
            self.clear(number);
        }
        if self.line.back().is_none_or(|last| last.0 <= at) {
            self.position[index] = self.numbered(self.line.len());
            self.line.push_back((at, number));
            self.standing += 1;
        } else {
            self.heap.push((at, number));
            self.position[index] = self.heap.len() as u32 - 1;
            self.settle(self.heap.len() - 1);
        }
    }

    /// Ensures that the timer of `number` is due no later than `at`. An earlier timer stays, so that a caller
    /// that often postpones a timer does no work. The caller must check its own deadline when the timer
    /// fires.
    pub fn set_at_latest(&mut self, number: u32, at: Time) {
        if self.at(number).is_none_or(|set| set > at) {
            self.set(number, at);
        }
    }

    fn at(&self, number: u32) -> Option<Time> {
        match *self.position.get(number as usize)? {
            ABSENT => None,
            position if position & IN_LINE == 0 => Some(self.heap[position as usize].0),
            position => Some(self.line[self.place(position)].0),
        }
    }

    /// Clears the timer of `number`, if set.
    pub fn clear(&mut self, number: u32) {
        let Some(position) = self.position.get_mut(number as usize) else { return };
        match std::mem::replace(position, ABSENT) {
            ABSENT => {}
            position if position & IN_LINE == 0 => {
                let place = position as usize;
                self.heap.swap_remove(place);
                if let Some(&(_, moved)) = self.heap.get(place) {
                    self.position[moved as usize] = position;
                    self.settle(place);
                }
            }
            _ => {
                self.standing -= 1;
                self.close_up();
            }
        }
    }

    // The queue.

    /// Returns the number of a place in the queue.
    fn numbered(&self, place: usize) -> Position {
        IN_LINE | (self.first.wrapping_add(place as u32) & PLACE_MASK)
    }

    fn place(&self, position: Position) -> usize {
        (position.wrapping_sub(self.first) & PLACE_MASK) as usize
    }

    fn stands_at(&self, place: usize) -> bool {
        self.line
            .get(place)
            .is_some_and(|(_, number)| self.position[*number as usize] == self.numbered(place))
    }

    /// Removes stale places from both ends of the queue, and all stale places if there are too many.
    fn close_up(&mut self) {
        while !self.line.is_empty() && !self.stands_at(0) {
            self.line.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        while !self.line.is_empty() && !self.stands_at(self.line.len() - 1) {
            self.line.pop_back();
        }
        if self.line.len() > 2 * self.standing + EMPTY_MAX {
            let mut kept = 0;
            for place in 0..self.line.len() {
                if self.stands_at(place) {
                    let entry = self.line[place];
                    self.position[entry.1 as usize] = self.numbered(kept);
                    self.line[kept] = entry;
                    kept += 1;
                }
            }
            self.line.truncate(kept);
        }
    }

    // The heap.

    fn settle(&mut self, place: usize) {
        let place = self.rise(place);
        self.sink(place);
    }

    fn rise(&mut self, mut place: usize) -> usize {
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

    fn sink(&mut self, mut place: usize) {
        loop {
            let left = 2 * place + 1;
            if left >= self.heap.len() {
                return;
            }
            let right = left + 1;
            let least =
                if right < self.heap.len() && self.heap[right] < self.heap[left] { right } else { left };
            if self.heap[place] <= self.heap[least] {
                return;
            }
            self.swap(place, least);
            place = least;
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

    /// The number of empty places is bounded by the number of set timers.
    #[test]
    fn timers_set_in_order_take_bounded_space() {
        let mut timers = Timers::default();
        // One timer stays at the front while later timers come and go.
        timers.set(0, Time(0));
        for n in 1..100_000_u32 {
            timers.set(1 + n % 10, Time(u64::from(n)));
            if n % 3 == 0 {
                timers.clear(1 + n % 10);
            }
            assert!(timers.line.len() <= 2 * timers.standing + EMPTY_MAX + 1, "{}", timers.line.len());
            assert!(timers.heap.is_empty());
        }
        assert_eq!(timers.pop_due(Time(0)), Some(0));
        assert_eq!(timers.pop_due(Time(0)), None);
        let mut due = Vec::new();
        while let Some(number) = timers.pop_due(Time(u64::MAX)) {
            due.push(number);
        }
        assert_eq!(due.len(), 6, "the last ten, without those that were cleared");
        assert!(timers.line.is_empty() && timers.next().is_none());
    }

    #[test]
    fn the_numbers_of_places_may_begin_anew() {
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
    fn agrees_with_an_ordered_set_under_random_use() {
        let mut timers = Timers::default();
        let mut model: Vec<Option<Time>> = vec![None; 50];
        let mut state = 7_u64;
        for step in 0..20_000_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (state >> 33) as u32 % 50;
            // The order of times alternates between random and mostly ascending.
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

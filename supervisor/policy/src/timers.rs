//! One timer for each of many small numbers: a binary heap that knows where each number stands, so
//! that a timer is set, moved and cleared in O(log n) and leaves nothing behind.

use crate::time::Time;

const ABSENT: u32 = u32::MAX;

/// Timers by number; the numbers are to be small, since there is a place for each up to the highest.
#[derive(Default)]
pub struct Timers {
    heap: Vec<(Time, u32)>,
    /// By number: where in the heap it stands.
    position: Vec<u32>,
}

impl Timers {
    /// Bytes that a timer takes.
    pub(crate) const ENTRY_BYTES: usize = size_of::<(Time, u32)>() + size_of::<u32>();

    /// When the next timer is due.
    pub fn next(&self) -> Option<Time> {
        self.heap.first().map(|(at, _)| *at)
    }

    /// Takes out one timer that is due.
    pub fn pop_due(&mut self, now: Time) -> Option<u32> {
        let &(at, number) = self.heap.first()?;
        (at <= now).then(|| {
            self.clear(number);
            number
        })
    }

    /// Sets, or moves, the timer of `number`.
    pub fn set(&mut self, number: u32, at: Time) {
        let index = number as usize;
        if self.position.len() <= index {
            self.position.resize(index + 1, ABSENT);
        }
        let place = match self.position[index] {
            ABSENT => {
                self.heap.push((at, number));
                self.heap.len() - 1
            }
            place => {
                self.heap[place as usize].0 = at;
                place as usize
            }
        };
        self.position[index] = place as u32;
        self.settle(place);
    }

    /// Sees to it that the timer of `number` is due at `at` at the latest. One that is due earlier stays: a caller
    /// that moves it again and again looks anew when it is due.
    pub fn set_at_latest(&mut self, number: u32, at: Time) {
        let place = self.position.get(number as usize).copied().filter(|&place| place != ABSENT);
        if place.is_none_or(|place| self.heap[place as usize].0 > at) {
            self.set(number, at);
        }
    }

    /// Clears the timer of `number`, if it has one.
    pub fn clear(&mut self, number: u32) {
        let Some(&place) = self.position.get(number as usize) else { return };
        if place == ABSENT {
            return;
        }
        self.position[number as usize] = ABSENT;
        let place = place as usize;
        self.heap.swap_remove(place);
        if let Some(&(_, moved)) = self.heap.get(place) {
            self.position[moved as usize] = place as u32;
            self.settle(place);
        }
    }

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

    #[test]
    fn agrees_with_an_ordered_set_under_random_use() {
        let mut timers = Timers::default();
        let mut model: Vec<Option<Time>> = vec![None; 50];
        let mut state = 7_u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (state >> 33) as u32 % 50;
            let at = Time((state >> 20) % 1000);
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

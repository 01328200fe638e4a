//! Groups workers by their number of jobs, and finds the worker with the fewest jobs. In case of a tie, chooses the
//! worker with the lowest number, because its caches are the warmest. Every operation takes constant time for up to 64
//! workers, and examines one more machine word for every 64 additional workers. `workers` adds only workers that can be
//! given a job, and `bulkhead/permits.rs` checks the limit.

/// Workers, grouped by their number of jobs. The number changes by at most one at a time, so the lowest number is cheap
/// to track.
#[derive(Default)]
pub(crate) struct WorkersByLoad {
    /// Bitmaps of workers. The index of a bitmap is the number of jobs that each of its workers has.
    levels: Vec<Vec<u64>>,
    lowest: usize,
    count: usize,
}

impl WorkersByLoad {
    /// Moves a worker to the bitmap for `is` jobs. `was` contains the worker's previous number of jobs, and is set to
    /// `is`. `None` means that the worker is in no bitmap.
    pub(crate) fn set_level(&mut self, worker: u32, was: &mut Option<u32>, is: Option<u32>) {
        if *was != is {
            if let Some(level) = std::mem::replace(was, is) {
                self.remove(worker, level);
            }
            if let Some(level) = is {
                self.insert(worker, level);
            }
        }
    }

    fn insert(&mut self, worker: u32, level: u32) {
        let (level, word) = (level as usize, worker as usize / 64);
        if self.levels.len() <= level {
            self.levels.resize_with(level + 1, Vec::new);
        }
        let words = &mut self.levels[level];
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        debug_assert_eq!(words[word] & (1 << (worker % 64)), 0, "entered twice");
        words[word] |= 1 << (worker % 64);
        self.lowest = if self.count == 0 { level } else { self.lowest.min(level) };
        self.count += 1;
    }

    fn remove(&mut self, worker: u32, level: u32) {
        let word = &mut self.levels[level as usize][worker as usize / 64];
        debug_assert_ne!(*word & (1 << (worker % 64)), 0, "the worker is missing from its load level");
        *word &= !(1 << (worker % 64));
        self.count -= 1;
        while self.count > 0 && self.levels[self.lowest].iter().all(|&w| w == 0) {
            self.lowest += 1;
        }
    }

    pub(crate) fn least_loaded(&self) -> Option<u32> {
        if self.count == 0 {
            return None;
        }
        let (index, word) = self.levels[self.lowest].iter().enumerate().find(|(_, w)| **w != 0)?;
        Some(index as u32 * 64 + word.trailing_zeros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_least_loaded_worker_with_lowest_number() {
        let mut load = WorkersByLoad::default();
        assert_eq!(load.least_loaded(), None);
        load.insert(70, 0);
        load.insert(3, 0);
        assert_eq!(load.least_loaded(), Some(3));
        load.remove(3, 0);
        load.insert(3, 1);
        assert_eq!(load.least_loaded(), Some(70));
        load.remove(70, 0);
        assert_eq!(load.least_loaded(), Some(3));
        load.remove(3, 1);
        assert_eq!(load.least_loaded(), None);
        load.insert(9, 2);
        load.insert(8, 0);
        assert_eq!(load.least_loaded(), Some(8));
    }
}

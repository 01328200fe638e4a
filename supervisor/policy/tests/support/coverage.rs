//! Counts how often a simulation reaches each situation. A simulation that never reaches a required situation fails.

use std::collections::BTreeMap;

#[derive(Default)]
pub(crate) struct Coverage(BTreeMap<String, u64>);

impl Coverage {
    pub(crate) fn see(&mut self, what: &str) {
        match self.0.get_mut(what) {
            Some(count) => *count += 1,
            None => {
                self.0.insert(what.to_owned(), 1);
            }
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what.clone()).or_default() += count;
        }
    }

    pub(crate) fn print(&self) {
        for (what, count) in &self.0 {
            println!("{count:>8}  {what}");
        }
    }

    /// Panics if any situation in `all` never occurred, and lists the missing situations.
    pub(crate) fn demand(&self, all: &[&str]) {
        let missing: Vec<_> = all.iter().filter(|what| !self.0.contains_key(**what)).collect();
        assert!(missing.is_empty(), "the simulation never reached {missing:?}");
    }
}

//! Records of begun jobs, shared by policy, world and model.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bulkhead_policy::{Claims, WorkerId};

/// Records of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registry(Arc<Mutex<HashMap<WorkerId, Numbers>>>);

/// Record of one worker.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// Number of the last job begun, as written by the worker.
    pub(crate) begun: u64,
    /// Number up to which jobs were recalled.
    pub(crate) taken: u64,
    /// Number of the last job begun at the first recall in this step.
    pub(crate) seen: Option<u64>,
    /// True if the worker begins its next job just as that job is recalled.
    pub(crate) will_race: bool,
    /// Number of the job that was begun and recalled at the same time.
    pub(crate) raced: Option<u64>,
}

impl Registry {
    fn all(&self) -> MutexGuard<'_, HashMap<WorkerId, Numbers>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn with<R>(&self, worker: WorkerId, look: impl FnOnce(&mut Numbers) -> R) -> R {
        look(self.all().entry(worker).or_default())
    }

    pub(crate) fn begun(&self, worker: WorkerId) -> u64 {
        self.with(worker, |numbers| numbers.begun)
    }

    /// Returns the number of the last job begun at the first recall in this step.
    pub(crate) fn seen(&self, worker: WorkerId) -> u64 {
        self.with(worker, |numbers| numbers.seen.unwrap_or(numbers.begun))
    }

    pub(crate) fn next_step(&self) {
        self.all().values_mut().for_each(|numbers| numbers.seen = None);
    }

    pub(crate) fn forget(&self, worker: WorkerId) {
        self.all().remove(&worker);
    }

    pub(crate) fn claims(&self, worker: WorkerId) -> Box<dyn Claims> {
        Box::new(Of(self.clone(), worker))
    }
}

#[derive(Debug)]
struct Of(Registry, WorkerId);

impl Claims for Of {
    fn begun(&self) -> u64 {
        self.0.begun(self.1)
    }

    fn take_back(&self, up_to: u64) -> u64 {
        self.0.with(self.1, |numbers| {
            let begun = numbers.begun;
            numbers.seen.get_or_insert(begun);
            numbers.taken = up_to;
            if std::mem::take(&mut numbers.will_race) && begun < up_to {
                numbers.begun += 1;
                numbers.raced = Some(numbers.begun);
            }
            begun
        })
    }
}

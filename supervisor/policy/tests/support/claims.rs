//! The workers' records of begun jobs, shared by the policy, the world and the model.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bulkhead_policy::{Claims, WorkerId};

/// The numbers of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registry(Arc<Mutex<HashMap<WorkerId, Numbers>>>);

/// The record of one worker.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// The job begun last, by what the worker has written.
    pub(crate) begun: u64,
    /// The last that was taken back.
    pub(crate) taken: u64,
    /// Last job begun when the policy first took jobs back in this step.
    pub(crate) seen: Option<u64>,
    /// Whether the worker begins its next job just as that is taken back.
    pub(crate) will_race: bool,
    /// The job with which it did.
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

    /// Returns the last job begun when the policy took jobs back.
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

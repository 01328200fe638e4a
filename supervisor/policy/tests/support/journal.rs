//! Worker journals to which the bulkhead under test, the simulated world and the model have access.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use bulkhead_policy::{JobJournal, WorkerId};

/// Journals of all workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registry(Arc<Mutex<HashMap<WorkerId, Record>>>);

/// Journal of one worker.
#[derive(Debug, Default)]
pub(crate) struct Record {
    /// Sequence number of the last job started, as written by the worker.
    pub(crate) begun: u64,
    /// Sequence number of the last recalled job.
    pub(crate) recalled_up_to: u64,
    /// Sequence number of the last job that the worker had started before the first recall in this step.
    pub(crate) begun_at_recall: Option<u64>,
    /// True to simulate a worker that starts its next job just as that job is recalled.
    pub(crate) begins_during_recall: bool,
    /// Sequence number of the job that the worker started just as the job was recalled.
    pub(crate) begun_during_recall: Option<u64>,
}

impl Registry {
    fn all(&self) -> MutexGuard<'_, HashMap<WorkerId, Record>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn with<R>(&self, worker: WorkerId, look: impl FnOnce(&mut Record) -> R) -> R {
        look(self.all().entry(worker).or_default())
    }

    pub(crate) fn begun(&self, worker: WorkerId) -> u64 {
        self.with(worker, |record| record.begun)
    }

    /// Returns the sequence number of the last job that the worker had started before the first recall in this step.
    pub(crate) fn begun_at_recall(&self, worker: WorkerId) -> u64 {
        self.with(worker, |record| record.begun_at_recall.unwrap_or(record.begun))
    }

    pub(crate) fn next_step(&self) {
        self.all().values_mut().for_each(|record| record.begun_at_recall = None);
    }

    pub(crate) fn forget(&self, worker: WorkerId) {
        self.all().remove(&worker);
    }

    pub(crate) fn journal(&self, worker: WorkerId) -> Box<dyn JobJournal> {
        Box::new(WorkerJournal(self.clone(), worker))
    }
}

#[derive(Debug)]
struct WorkerJournal(Registry, WorkerId);

impl JobJournal for WorkerJournal {
    fn begun(&self) -> u64 {
        self.0.begun(self.1)
    }

    fn recall(&self, up_to: u64) -> u64 {
        self.0.with(self.1, |record| {
            let begun = record.begun;
            record.begun_at_recall.get_or_insert(begun);
            record.recalled_up_to = up_to;
            if std::mem::take(&mut record.begins_during_recall) && begun < up_to {
                record.begun += 1;
                record.begun_during_recall = Some(record.begun);
            }
            begun
        })
    }
}

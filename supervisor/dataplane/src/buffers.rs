//! Memory that is used again and again, so that a job costs no allocation that could be spared.

use bulkhead_policy::Action;
use bulkhead_shared::connection::{BufferPool, Scratch};

use super::JobData;

/// Records of past jobs whose memory is kept.
const RECORDS_KEPT_MAX: usize = 4096;

#[derive(Default)]
#[expect(clippy::vec_box, reason = "the boxes are what is kept: policy carries a record along in one")]
pub(super) struct Buffers {
    pub(super) scratch: Scratch,
    pub(super) pool: BufferPool,
    pub(super) actions: Vec<Action<Box<JobData>>>,
    /// Of jobs that are over.
    records: Vec<Box<JobData>>,
}

impl Buffers {
    /// A record in memory that was used before, if there is some.
    pub(super) fn record(&mut self, record: JobData) -> Box<JobData> {
        match self.records.pop() {
            Some(mut kept) => {
                *kept = record;
                kept
            }
            None => Box::new(record),
        }
    }

    /// Keeps the memory of a record for the next job.
    pub(super) fn keep_record(&mut self, mut cargo: Box<JobData>) {
        if self.records.len() < RECORDS_KEPT_MAX {
            *cargo = JobData::default();
            self.records.push(cargo);
        }
    }
}

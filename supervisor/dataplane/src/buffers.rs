//! Keeps memory for reuse, to avoid allocations per job: read buffers, lists of actions, and job records. The event
//! loop and the wiring take memory from here and return it afterwards. The limit on the memory of waiting jobs is
//! enforced in `memory`.

use bulkhead_policy::Action;
use bulkhead_shared::connection::{BufferPool, Scratch};

use super::JobData;

/// Maximum number of job records that are kept for reuse.
const RECORDS_KEPT_MAX: usize = 4096;

#[derive(Default)]
#[expect(clippy::vec_box, reason = "policy stores boxed records, so the boxes themselves are reused")]
pub(super) struct Buffers {
    pub(super) scratch: Scratch,
    pub(super) pool: BufferPool,
    /// Buffer for messages that the predecessor sends during an upgrade. Otherwise empty.
    pub(super) transfer: Vec<u8>,
    pub(super) actions: Vec<Action<Box<JobData>>>,
    /// Records of finished jobs, kept so that their memory can be reused.
    records: Vec<Box<JobData>>,
}

impl Buffers {
    /// Boxes a record. Reuses the memory of a finished job's record if possible.
    pub(super) fn record(&mut self, record: JobData) -> Box<JobData> {
        match self.records.pop() {
            Some(mut kept) => {
                *kept = record;
                kept
            }
            None => Box::new(record),
        }
    }

    /// Keeps the memory of a finished job's record for reuse.
    pub(super) fn keep_record(&mut self, mut record: Box<JobData>) {
        if self.records.len() < RECORDS_KEPT_MAX {
            *record = JobData::default();
            self.records.push(record);
        }
    }
}

//! Builds the lists of jobs whose clients are waiting for the outcome, for `GET /v1/jobs`. Also finds a single job by
//! its ID, so that `wiring/commands.rs` can cancel the job. Does not change any job.
//!
//! A bulkhead can have millions of waiting jobs, and visiting all of them at once would delay jobs for too long.
//! [`JobListQueue`] therefore visits a bounded number of jobs per iteration. When all positions have been visited, the
//! queue describes the oldest jobs.

use std::collections::{BinaryHeap, VecDeque};

use bulkhead_api::{Job, Jobs, Text, millis};
use bulkhead_plane::command::{JobsRequest, SteerError};
use bulkhead_policy::{JobView, Time};
use bulkhead_shared::JobId;
use tokio::sync::oneshot;

use super::{BulkheadEntry, Bulkheads, Compartment, CompartmentIndex, Compartments, JobData};
use crate::slab::SessionId;

/// Maximum number of table entries visited per iteration, in the tables of jobs and of compartments. Includes empty
/// entries.
const VISITS_PER_ITERATION_MAX: usize = 8192;

/// Parts of the data plane from which a job list is built.
#[derive(Clone, Copy)]
pub(crate) struct JobListSource<'a> {
    pub(crate) bulkheads: &'a Bulkheads,
    pub(crate) compartments: &'a Compartments,
    /// Function that returns a client's name, or `None` if the client has disconnected.
    pub(crate) client: &'a dyn Fn(SessionId) -> Option<Text>,
    pub(crate) now: Time,
}

/// Queue of requested job lists. Only one list is built at a time.
#[derive(Default)]
pub(crate) struct JobListQueue(VecDeque<PartialList>);

struct PartialList {
    request: JobsRequest,
    reply: oneshot::Sender<Jobs>,
    /// Compartments that have not been visited completely. The last one in the list is visited next.
    left: Vec<CompartmentIndex>,
    /// Next position to visit in the last compartment of `left`.
    position: usize,
    /// Number of matching jobs found so far.
    total: u64,
    /// Heap that contains the oldest matching jobs found so far. The newest of these jobs is at the top.
    oldest: BinaryHeap<(Time, CompartmentIndex, JobId)>,
}

/// Returns the time at which the supervisor received a job.
fn received(view: &JobView<'_, Box<JobData>>) -> Time {
    let passed_on = view.record.fallback.as_ref().filter(|_| view.is_fallback);
    passed_on.map_or(view.received, |fallback| fallback.received())
}

impl Bulkheads {
    /// Finds a job in a bulkhead. Returns the job and the compartment that holds it.
    pub(crate) fn find_job<'a>(
        &self,
        compartments: &'a Compartments,
        now: Time,
        (bulkhead, job): (&str, JobId),
    ) -> Result<(CompartmentIndex, JobView<'a, Box<JobData>>), SteerError> {
        // A bulkhead that was removed from the configuration can still have jobs.
        let entries = self.slab.values().filter(|entry| &*entry.name == bulkhead);
        let parts: Vec<_> = entries.map(BulkheadEntry::compartments).collect();
        if parts.is_empty() {
            return Err(SteerError::NotFound);
        }
        let mut indices = parts.into_iter().flatten();
        let found = indices.find_map(|index| Some((index, compartments[index].policy.job(now, job)?)));
        found.ok_or_else(|| {
            let has_job = |entry: &&BulkheadEntry| {
                entry
                    .compartments()
                    .into_iter()
                    .any(|index| compartments[index].policy.job(now, job).is_some())
            };
            let holder = self.slab.values().find(has_job).map(|entry| entry.name.to_string());
            SteerError::UnknownJob { holder }
        })
    }
}

impl JobListQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn request(
        &mut self,
        source: &JobListSource<'_>,
        request: JobsRequest,
        reply: oneshot::Sender<Jobs>,
    ) {
        let is_wanted = |name: &str| request.bulkhead.as_deref().is_none_or(|wanted| wanted == name);
        // Bulkheads that were removed from the configuration can still have jobs.
        let wanted = source.bulkheads.iter().filter(|(_, entry)| is_wanted(&entry.name));
        let left = wanted.flat_map(|(_, entry)| entry.compartments()).collect();
        self.0.push_back(PartialList {
            request,
            reply,
            left,
            position: 0,
            total: 0,
            oldest: BinaryHeap::new(),
        });
        // If no other list is in progress, the list is usually complete immediately.
        if self.0.len() == 1 {
            self.advance(source);
        }
    }

    /// Continues building the first list in the queue.
    pub(crate) fn advance(&mut self, source: &JobListSource<'_>) {
        let Some(mut list) = self.0.pop_front() else { return };
        if list.reply.is_closed() {
            return;
        }
        list.visit(source);
        if list.left.is_empty() {
            let jobs = Jobs { jobs: list.describe(source), total: list.total };
            // The requester might be gone.
            let _ = list.reply.send(jobs);
        } else {
            self.0.push_front(list);
        }
    }
}

impl PartialList {
    fn visit(&mut self, source: &JobListSource<'_>) {
        let mut budget = VISITS_PER_ITERATION_MAX;
        while budget > 0
            && let Some(&index) = self.left.last()
        {
            let positions = self.compartment(source, index).map_or(0, |it| it.policy.job_positions());
            let end = positions.min(self.position + budget);
            budget = budget.saturating_sub(1 + end.saturating_sub(self.position));
            for position in self.position..end {
                self.visit_job(source, index, position);
            }
            self.position = end;
            if end >= positions {
                self.left.pop();
                self.position = 0;
            }
        }
    }

    /// Returns the compartment with this index, or `None` if the compartment was removed after the job list was
    /// requested. If the request is for a single bulkhead, also returns `None` if the index now belongs to a
    /// compartment of another bulkhead.
    fn compartment<'a>(
        &self,
        source: &JobListSource<'a>,
        index: CompartmentIndex,
    ) -> Option<&'a Compartment> {
        let compartment = source.compartments.get(index)?;
        let name = &source.bulkheads.owner(compartment).name;
        self.request.bulkhead.as_deref().is_none_or(|wanted| wanted == &**name).then_some(compartment)
    }

    fn visit_job(&mut self, source: &JobListSource<'_>, index: CompartmentIndex, position: usize) {
        let Some(view) = source.compartments[index].policy.job_at(source.now, position) else { return };
        if self.request.progress.is_some_and(|wanted| wanted != view.progress) {
            return;
        }
        self.total += 1;
        self.oldest.push((received(&view), index, view.id));
        if self.oldest.len() > self.request.limit {
            self.oldest.pop();
        }
    }

    /// Returns descriptions of the oldest matching jobs that still exist, oldest first.
    fn describe(&mut self, source: &JobListSource<'_>) -> Vec<Job> {
        let oldest = std::mem::take(&mut self.oldest).into_sorted_vec();
        let describe_one = |(at, index, id): (Time, CompartmentIndex, JobId)| {
            let compartment = self.compartment(source, index)?;
            let view = compartment.policy.job(source.now, id)?;
            let record = view.record;
            Some(Job {
                job: id.to_string(),
                bulkhead: source.bulkheads.owner(compartment).name.to_string(),
                state: view.progress.into(),
                age_ms: millis(source.now.since(at)),
                ran_ms: view.ran.map(millis),
                left_ms: millis(view.left),
                priority: record.priority.into(),
                tenant: record.tenant.to_string(),
                operation: record.operation.to_string(),
                client: (source.client)(record.session).unwrap_or_default(),
                worker_pid: view.worker_pid,
                attempts: record.earlier_attempts + view.attempts,
                payload_bytes: record.payload_bytes as u64,
                trace_id: record.trace_id().map(str::to_owned),
            })
        };
        oldest.into_iter().filter_map(describe_one).collect()
    }
}

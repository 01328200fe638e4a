//! Collects the numbers for the metrics, from all bulkheads at the same moment so that sums are consistent.

use std::collections::HashSet;
use std::sync::Arc;

use bulkhead_plane::possible::Possible;
use bulkhead_plane::scrape::{BulkheadNumbers, Scrape};
use bulkhead_plane::tally::Tally;
use bulkhead_policy::{Activity, Answer, BreakerState, Note, RestartCause, StaffView};
use bulkhead_shared::{RejectReason, Verdict};

use super::bulkheads::BulkheadEntry;
use super::bulkheads::{Compartment, Layout, Presence};
use super::slab::{BulkheadIndex, CompartmentIndex};
use super::{DataPlane, JobData};

/// Maximum number of workers shown per bulkhead, more than a machine can run.
const WORKERS_SHOWN_MAX: usize = 4096;

impl DataPlane {
    pub(super) fn scrape(&mut self) -> Scrape {
        self.update_possible();
        let mut bulkheads = Vec::with_capacity(self.bulkheads.values().count());
        bulkheads.extend(self.reported_bulkheads().map(|bulkhead| self.numbers(bulkhead)));
        Scrape {
            clients: self.sessions.clients as u64,
            buffered_bytes: self.memory.shares.held() as u64,
            memory_file_bytes: self.leases.bytes,
            labels: self.bulkheads.labels.clone(),
            bulkheads,
        }
    }

    /// Updates the set of possible metric series of each bulkhead.
    fn update_possible(&mut self) {
        let hosts: HashSet<Arc<str>> =
            self.bulkheads.iter().flat_map(|(_, entry)| entry.fallback.iter().cloned()).collect();
        let all: Vec<BulkheadIndex> = self.reported_bulkheads().collect();
        for index in all {
            let possible = self.possible(index, &hosts);
            self.bulkheads[index].possible.add(&possible);
        }
    }

    /// Returns the bulkheads to report. Removed bulkheads are included unless another bulkhead has the same name by
    /// now.
    fn reported_bulkheads(&self) -> impl Iterator<Item = BulkheadIndex> {
        let is_told = |entry: &BulkheadEntry| match entry.presence {
            Presence::Here => true,
            Presence::Leaving => !self.bulkheads.by_name.contains_key(&entry.name),
        };
        self.bulkheads.iter().filter(move |(_, entry)| is_told(entry)).map(|(index, _)| index)
    }

    fn numbers(&self, index: BulkheadIndex) -> BulkheadNumbers {
        let bulkhead = &self.bulkheads[index];
        let compartments: Vec<&Compartment> = match &bulkhead.layout {
            Layout::Shared(place) => vec![&self.compartments[*place]],
            Layout::Isolated(isolated) => {
                isolated.active.iter().map(|&place| &self.compartments[place]).collect()
            }
        };
        let policies = || compartments.iter().map(|compartment| &compartment.policy);
        let active = policies().filter(|policy| policy.activity() != Activity::Resting);
        let is_shared = matches!(bulkhead.layout, Layout::Shared(_));
        BulkheadNumbers {
            name: bulkhead.name.clone(),
            tally: bulkhead.tally.clone(),
            possible: bulkhead.possible,
            active: policies().map(|policy| policy.in_flight()).sum(),
            limit: policies().map(|policy| policy.limit()).sum(),
            adaptive: self.adaptive_of(index),
            queued: policies().map(|policy| policy.queued() as u64).sum(),
            queue_capacity: active.map(|policy| u64::from(policy.limits().max_queue)).sum(),
            breaker: self.breaker_of(index),
            state: self.state_of(index).0,
            service: bulkhead.service.service(self.now),
            workers: worker_views(&compartments),
            slots: if is_shared { self.limits_of(index).processes } else { 1 },
            memory_limit: bulkhead.memory_limit,
        }
    }

    fn possible(&self, index: BulkheadIndex, hosts: &HashSet<Arc<str>>) -> Possible {
        let bulkhead = &self.bulkheads[index];
        let mut possible = Possible::new(self.limits_of(index), bulkhead.tenant_limits().values());
        possible.has_access = self.acceptor.access.has_entries();
        possible.has_fallback = !bulkhead.fallback.is_empty();
        possible.has_guests = hosts.contains(&bulkhead.name);
        possible.was_opened = self.breaker_of(index) == BreakerState::ForcedOpen;
        possible
    }

    pub(super) fn tally_of(&mut self, compartment: CompartmentIndex) -> &mut Tally {
        &mut self.bulkheads[self.compartments[compartment].bulkhead].tally
    }

    /// Counts a worker that replaces another worker.
    pub(super) fn count_restart(&mut self, compartment: CompartmentIndex, cause: Option<RestartCause>) {
        if let Some(cause) = cause.filter(|_| !self.compartments[compartment].is_replay) {
            self.tally_of(compartment).restarts[cause as usize] += 1;
        }
    }

    /// Counts notes of policy that are counted nowhere else.
    pub(super) fn count_note(&mut self, compartment: CompartmentIndex, note: &Note) {
        if self.compartments[compartment].is_replay {
            return;
        }
        match note {
            Note::JobRetried { .. } => self.tally_of(compartment).retries += 1,
            Note::Breaker(transition) => self.tally_of(compartment).breaker(transition),
            _ => {}
        }
    }

    /// Counts the end of a job in the bulkhead that the client addressed.
    pub(super) fn count_end(&mut self, compartment: CompartmentIndex, cargo: &JobData, verdict: &Verdict) {
        let bulkhead = match &cargo.fallback {
            Some(fallback) => fallback.entry.0,
            None => self.compartments[compartment].bulkhead,
        };
        let (now, bulkhead) = (self.now, &mut self.bulkheads[bulkhead]);
        bulkhead.tally.end(cargo.priority, cargo.label, verdict);
        bulkhead.service.count(now, verdict);
    }

    /// Counts a job that a compartment answers, including jobs from other bulkheads.
    pub(super) fn count_answer(&mut self, compartment: CompartmentIndex, answer: &Answer<Box<JobData>>) {
        let tally = self.tally_of(compartment);
        if answer.job.is_some() {
            tally.time(answer.queued, (answer.attempts > 0).then_some(answer.ran));
        }
        let is_evicted = matches!(answer.verdict, Verdict::Rejected { reason: RejectReason::Evicted, .. });
        if is_evicted && let Some(tenant) = tally.tenants.get_mut(answer.cargo.label as usize) {
            tenant.evicted += 1;
        }
    }

    /// Counts the end of a job in a fallback.
    pub(super) fn count_guest_end(
        &mut self,
        compartment: CompartmentIndex,
        (entry, target): (BulkheadIndex, &str),
        verdict: &Verdict,
    ) {
        let host = self.tally_of(compartment);
        host.guests = host.guests.saturating_sub(1);
        self.bulkheads[entry].tally.fallback(target, verdict);
    }

    /// Returns the label of a tenant whose job was rejected before policy was involved.
    pub(super) fn label_of(&self, tenant: &str) -> u32 {
        let found = self.bulkheads.labels.binary_search_by(|label| label.as_str().cmp(tenant));
        found.unwrap_or(self.bulkheads.labels.len()) as u32
    }
}

/// Returns the workers of all parts. The slots of each part are numbered after those of the previous part.
fn worker_views(compartments: &[&Compartment]) -> Vec<StaffView> {
    let mut all = Vec::new();
    let mut first = 0;
    for compartment in compartments {
        let room = WORKERS_SHOWN_MAX.saturating_sub(all.len());
        let own = compartment.policy.staff().take(room);
        all.extend(own.map(|worker| StaffView { slot: worker.slot + first, ..worker }));
        first += compartment.policy.limits().processes;
    }
    all
}

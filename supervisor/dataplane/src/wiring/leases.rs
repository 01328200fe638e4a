//! Handles lease frames from clients, sends memory files to clients and workers, and performs the effects that `leases`
//! requests. `leases` decides which leases are granted, recalled or ended. `background` creates and frees the files.

use std::io;

use bulkhead_plane::access::{self, Grant};
use bulkhead_policy::{Time, WorkerId};
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::limits::TENANT_BYTES_MAX;
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{JobId, RejectReason, Verdict, codec};

use crate::DataPlane;
use crate::leases::{Budget, Effect, LeasedPayload, Leases, Loan, Offer, Sent};
use crate::links::Link;
use crate::memory_files::lend;
use crate::sessions::Violation;
use crate::slab::{BulkheadIndex, CompartmentIndex, LinkIndex, SessionId, SessionIndex};

impl DataPlane {
    fn perform_lease_effects(&mut self) {
        while let Some(effect) = self.leases.next_effect() {
            match effect {
                Effect::CreateFiles { lease, bytes } => self.background.make_files(lease, bytes),
                Effect::FreeFiles(files) => self.background.free_files(files),
                Effect::RejectRequest { client, request } => {
                    self.sessions.send_signal(client, kind::LEASE_REFUSED, request);
                }
                Effect::Recall { client, lease } => {
                    self.sessions.send_signal(client, kind::LEASE_ENDED, lease);
                }
                Effect::CountMisuse { client } => self.sessions.count_rejection(client.index),
                Effect::EndLoan { worker, lease } => {
                    self.links.send_to_spawn(worker, (kind::FILES_ENDED, lease), &Empty);
                }
            }
        }
    }

    fn lease_budget(&self) -> Budget {
        Budget {
            pooled_bytes_max: self.limits.pooled_bytes_max,
            buffered_bytes_max: self.limits.buffered_bytes_max as u64,
            waiting_bytes: self.memory.held_in_all() as u64,
        }
    }

    // Clients.

    /// Handles a frame in which a client requests, accepts or returns a lease.
    pub(crate) fn handle_lease_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<(), Violation> {
        let invalid = |error: codec::CodecError| Violation(RejectReason::Invalid, error.to_string());
        let client = self.sessions.id(index);
        if header.kind == kind::LEASE {
            let (wanted, _) = codec::decode::<LeaseRequest<'_>>(metadata, &[]).map_err(invalid)?;
            match self.bulkheads.find(wanted.bulkhead) {
                Some(bulkhead) if self.can_lease(index, bulkhead, &wanted) => {
                    let (budget, name) = (self.lease_budget(), self.bulkheads[bulkhead].name.clone());
                    self.leases.request(self.now, (client, header.number), name, &wanted, budget);
                }
                _ => self.leases.reject(client, header.number),
            }
        } else {
            codec::decode::<Empty>(metadata, &[]).map_err(invalid)?;
            match header.kind {
                kind::LEASE_RETURNED => self.leases.returned(client, header.number),
                _ => self.leases.accepted(client, header.number),
            }
        }
        self.perform_lease_effects();
        Ok(())
    }

    fn can_lease(&self, index: SessionIndex, bulkhead: BulkheadIndex, wanted: &LeaseRequest<'_>) -> bool {
        let is_granted = match &self.sessions[index].grant {
            Grant::Rules(rules) => {
                access::rejection_message(rules, (wanted.bulkhead, true), wanted.tenant).is_none()
            }
            _ => true,
        };
        is_granted
            && !self.bulkheads.needs_payload_bytes(bulkhead)
            && wanted.bytes <= self.bulkheads[bulkhead].max_payload
            && wanted.tenant.len() <= TENANT_BYTES_MAX
            && !self.is_stopping
    }

    /// Recalls the leases that a new or changed bulkhead no longer permits, because poison detection needs the bytes of
    /// each payload. This includes leases for bulkheads that use this bulkhead as a fallback.
    pub(crate) fn recall_leases_needing_bytes(&mut self, bulkhead: BulkheadIndex) {
        for name in self.bulkheads.needing_payload_bytes(bulkhead) {
            self.leases.recall_for_bulkhead(self.now, &name);
        }
        self.perform_lease_effects();
    }

    /// Calls `update` to change the leases, and then performs the resulting effects.
    pub(crate) fn update_leases<T>(&mut self, update: impl FnOnce(&mut Leases, Time) -> T) -> T {
        let result = update(&mut self.leases, self.now);
        self.perform_lease_effects();
        result
    }

    /// Recalls idle leases if the total size of waiting data and lease files exceeds the memory budget.
    pub(crate) fn recall_leases_over_budget(&mut self) {
        let budget = self.lease_budget();
        self.update_leases(|leases, now| leases.enforce_budget(now, budget));
    }

    /// Sends pending offers to clients. A failed write closes the client's session, so this must not be called while
    /// a client's frames are being handled.
    pub(crate) fn offer_leases(&mut self) {
        while let Some(offer) = self.leases.next_offer() {
            let sent = self.send_offer(&offer);
            self.update_leases(|leases, now| leases.offer_sent(now, offer, sent));
        }
    }

    fn send_offer(&mut self, offer: &Offer) -> Sent {
        // A reload may have changed the bulkhead after the client requested the lease.
        let bulkhead = self.bulkheads.find(&offer.bulkhead);
        let is_allowed = bulkhead.is_some_and(|bulkhead| !self.bulkheads.needs_payload_bytes(bulkhead));
        let client = self.sessions.of_mut(offer.client).filter(|_| is_allowed);
        let Some(client) = client.filter(|client| client.outbox.is_empty()) else { return Sent::NotNow };
        let receiver = (&mut self.unread_loans, &mut client.unread);
        if !client.end.can_lend(receiver.0, receiver.1) {
            return Sent::NotNow;
        }
        let frame = (kind::LEASED, offer.request);
        sent(client.end.lend(frame, offer.named, offer.files.of_client(), receiver))
    }

    pub(crate) fn end_leases_of_client(&mut self, client: SessionId) {
        if let Some(session) = self.sessions.of_mut(client) {
            session.end.release_files(&mut self.unread_loans, &mut session.unread);
        }
        self.update_leases(|leases, now| leases.client_gone(now, client));
    }

    pub(crate) fn check_leases(&mut self) {
        self.unread_loans.remove_closed();
        self.update_leases(Leases::check_deadlines);
    }

    // Jobs.

    /// Marks a lease as used by a job. Returns the payload. If the lease's files are lent to a worker, also returns
    /// this worker.
    pub(crate) fn begin_leased_job(
        &mut self,
        named: LeaseRef,
    ) -> Option<(Box<LeasedPayload>, Option<WorkerId>)> {
        let (payload, spawn) = self.leases.begin_job(named)?;
        let link = spawn.and_then(|spawn| self.links.of_spawn(spawn));
        Some((payload, link.map(Link::worker)))
    }

    /// Prepares a job's payload for sending to a worker. Also lends the files to the worker if possible.
    pub(crate) fn give_leased_payload(
        &mut self,
        index: LinkIndex,
        compartment: CompartmentIndex,
        job: JobId,
    ) -> (Option<LeaseRef>, Payload<'static>) {
        let Some(spawn) = self.links.get(index).map(Link::spawn) else { return (None, Payload::NONE) };
        let compartment = &mut self.compartments[compartment];
        let owner = &self.bulkheads[compartment.bulkhead];
        let payload = compartment.policy.record_mut(job).and_then(|record| record.held.file.as_deref_mut());
        let Some(payload) = payload else { return (None, Payload::NONE) };
        let (named, payload, loan) = self.leases.give(payload, spawn, &owner.name, owner.loaned_bytes_max);
        if let Some(loan) = loan {
            let sent = self.send_loan(index, &loan);
            self.leases.loan_sent(spawn, &loan, sent);
        }
        (named, payload)
    }

    fn send_loan(&mut self, index: LinkIndex, loan: &Loan) -> Sent {
        if !self.links[index].outbox.is_empty() {
            self.flush_link(index);
        }
        let Some(link) = self.links.get_mut(index).filter(|link| link.outbox.is_empty()) else {
            return Sent::NotNow;
        };
        if !self.unread_loans.can_lend(&link.socket, &mut link.unread) {
            return Sent::NotNow;
        }
        let files = loan.files.of_worker();
        let lent = lend(&link.socket, (kind::FILES, loan.named.lease), &loan.named, &files);
        if let Ok(bytes) = &lent {
            link.read_position.add_written(*bytes);
            self.unread_loans.lent(&mut link.unread);
        }
        sent(lent)
    }

    /// Ends a worker's access to a job's files. Called after the worker has replied to the job or returned the job.
    pub(crate) fn end_file_use(&mut self, (compartment, spawn): (CompartmentIndex, u64), job: JobId) {
        let record = self.compartments[compartment].policy.record_mut(job);
        let payload = record.and_then(|record| record.held.file.as_deref_mut());
        self.leases.worker_done(spawn, job, payload);
        self.perform_lease_effects();
    }

    /// Ends a job's use of a lease. If the job wrote its result to the result file, returns the location of the result.
    pub(crate) fn end_leased_job(
        &mut self,
        payload: LeasedPayload,
        job: Option<JobId>,
        verdict: &Verdict,
    ) -> Option<LeaseRef> {
        let is_answered = matches!(verdict, Verdict::Ok | Verdict::Failed(_));
        let links = &self.links;
        let is_alive = |spawn| links.of_spawn(spawn).is_some();
        let result = self.leases.end_job(self.now, payload, job, is_answered, is_alive);
        self.perform_lease_effects();
        result.filter(|_| *verdict == Verdict::Ok)
    }
}

fn sent<T>(result: io::Result<T>) -> Sent {
    match result {
        Ok(_) => Sent::Yes,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Sent::NotNow,
        Err(_) => Sent::Never,
    }
}

//! Leases of memory files: the client and the worker of each lease, and the end of a lease.
//!
//! A lease is for a single client, bulkhead and tenant. The first worker that gets a job with the lease is also lent
//! the files. From then on, no other worker gets the files. The lease ends when this worker is gone, or when the
//! worker could still write to the files although the job is over. A file that is in use therefore never contains
//! data of another client, tenant or worker. If a job goes to a different worker, the payload is sent as bytes.
//!
//! A lease ends with a recall. Jobs that the client sent before receiving the recall can still use the lease. If the
//! client does not return the lease in time, the lease is revoked.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bulkhead_plane::access::{self, Grant};
use bulkhead_plane::open_files;
use bulkhead_policy::{Time, WorkerId};
use bulkhead_shared::client_protocol::Submit;
use bulkhead_shared::codec;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::limits::TENANT_BYTES_MAX;
use bulkhead_shared::memory_files::{LeaseWanted, Named, WORTH_A_FILE_BYTES};
use bulkhead_shared::worker_protocol::Empty;
use bulkhead_shared::{JobId, RejectReason, Verdict};
use foldhash::quality::RandomState;

use super::memory_files::{Files, Lending, lend};
use super::sessions::{Stage as SessionStage, Violation};
use super::slab::{BulkheadIndex, CompartmentIndex, LinkIndex, SessionId, SessionIndex};
use super::unread_loans::UnreadLoans;
use super::{DataPlane, Endpoint};

/// Maximum number of leases per client.
const LEASES_MAX: usize = 64;

/// Maximum number of leases per client whose files are being made.
const CREATING_MAX: usize = 4;

/// Minimum size of a file, in bytes.
const FILE_BYTES_MIN: u64 = 256 * 1024;

/// Idle time after which a lease is recalled.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Time limit for the return of a recalled lease.
const RETURN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of revoked leases remembered per client. A client may still use such a lease until the client has
/// processed the recall.
const REVOKED_MAX: usize = LEASES_MAX;

/// Message for a client that uses a revoked lease.
const REVOKED: &str = "this lease was recalled and not returned in time; send the job again";

pub(super) struct Leases {
    by_number: HashMap<u64, Lease, RandomState>,
    /// Limit of open files of this process.
    open_files: u64,
    pub(super) lends: UnreadLoans,
    /// Number of the latest lease.
    last: u64,
    /// Total size of all live files, in bytes. Includes files of ended leases that are still in use by a job.
    pub(super) bytes: u64,
    /// Number of leases counted in `bytes`.
    live: u64,
    /// Clients to offer a lease when all answers of this iteration are sent.
    to_offer: Vec<SessionId>,
    /// Files that a worker may still read. The client has the outcome of the job, but the worker has not answered for
    /// the job. The first field is the worker's spawn number.
    lingering: Vec<(u64, JobId, Arc<Files>)>,
}

struct Lease {
    session: SessionId,
    /// Request number of the client.
    request: u64,
    bulkhead: Arc<str>,
    tenant: Box<str>,
    bytes: u64,
    /// `None` until the files are made.
    files: Option<Arc<Files>>,
    stage: Stage,
    is_busy: bool,
    loan: LoanState,
    /// Time of the last use.
    used_at: Time,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The files are being made.
    Creating,
    /// The files exist. The client has not confirmed the previous offer yet.
    Created,
    /// The files were sent to the client, which has not confirmed the lease.
    Offered,
    Held,
    Recalled(Time),
}

/// Worker that has the files, identified by spawn number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoanState {
    None,
    /// The worker has not confirmed the loan.
    Offered(u64),
    Confirmed(u64),
    /// The files must not be lent to another worker.
    Barred,
}

/// A job's payload in a memory file.
pub(super) struct LeasedPayload {
    lease: u64,
    files: Arc<Files>,
    pub(super) bytes: usize,
    /// Worker that has the payload, in the file or as bytes.
    at: Option<u64>,
    /// Worker that got a reference to the file instead of bytes.
    given_to: Option<u64>,
    /// Size of the result in bytes, if the result is in the result file.
    result: Option<u64>,
    /// True if the job can be retried. The payload then counts as held while a worker has the job.
    pub(super) is_kept: bool,
}

impl Leases {
    pub(super) fn new() -> Self {
        let limit = open_files::limit_in_force();
        Self {
            by_number: HashMap::default(),
            open_files: limit,
            lends: UnreadLoans::new(
                usize::try_from(limit / open_files::LIMIT_PER_UNREAD).unwrap_or(usize::MAX),
            ),
            last: 0,
            bytes: 0,
            live: 0,
            to_offer: Vec::new(),
            lingering: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_number.len()
    }

    /// Returns true if a client or a worker may have files.
    pub(super) fn any_live(&self) -> bool {
        self.live > 0
    }

    fn of_session(&self, session: SessionId) -> impl Iterator<Item = (u64, &Lease)> {
        let of = self.by_number.iter().filter(move |(_, lease)| lease.session == session);
        of.map(|(number, lease)| (*number, lease))
    }

    fn numbers(&self, is: impl Fn(&Lease) -> bool) -> Vec<u64> {
        self.by_number.iter().filter(|(_, lease)| is(lease)).map(|(number, _)| *number).collect()
    }
}

impl DataPlane {
    // Clients.

    /// Handles a client's frame about leases.
    pub(super) fn lease_frame(
        &mut self,
        index: SessionIndex,
        header: Header,
        metadata: &[u8],
    ) -> Result<(), Violation> {
        let invalid = |error: codec::CodecError| Violation(RejectReason::Invalid, error.to_string());
        if header.kind == kind::LEASE {
            let (wanted, _) = codec::decode::<LeaseWanted<'_>>(metadata, &[]).map_err(invalid)?;
            if !self.begin_lease(index, header.number, wanted) {
                self.sessions[index].queue_state.count_rejection();
                self.send_to_client(index, kind::LEASE_REFUSED, header.number);
            }
            return Ok(());
        }
        codec::decode::<Empty>(metadata, &[]).map_err(invalid)?;
        let number = header.number;
        let id = SessionId { index, epoch: self.sessions[index].epoch };
        let Some(lease) = self.leases.by_number.get_mut(&number).filter(|lease| lease.session == id) else {
            let session = &mut self.sessions[index];
            session.queue_state.count_rejection();
            if header.kind == kind::LEASE_RETURNED {
                session.revoked_leases.retain(|lost| *lost != number);
            }
            return Ok(());
        };
        // The client cannot know a lease that was not sent yet.
        if matches!(lease.stage, Stage::Creating | Stage::Created) {
            self.sessions[index].queue_state.count_rejection();
        } else if header.kind == kind::LEASE_RETURNED {
            self.end_lease(number);
        } else if lease.stage == Stage::Offered {
            lease.stage = Stage::Held;
        }
        self.offer_next(id);
        Ok(())
    }

    /// Returns true if this bulkhead or any fallback needs payload digests.
    fn needs_payload_bytes(&self, bulkhead: BulkheadIndex) -> bool {
        let entry = &self.bulkheads[bulkhead];
        let targets = entry.fallback.iter().filter_map(|name| self.bulkheads.by_name.get(name));
        entry.has_poison_detection
            || targets.into_iter().any(|target| self.bulkheads[*target].has_poison_detection)
    }

    /// Recalls the leases that a new or changed bulkhead no longer permits, because poison detection needs the bytes
    /// of each payload. Includes leases for bulkheads that use this bulkhead as a fallback.
    pub(super) fn recall_leases_needing_bytes(&mut self, bulkhead: BulkheadIndex) {
        let entry = &self.bulkheads[bulkhead];
        let mut needing = Vec::new();
        if self.needs_payload_bytes(bulkhead) {
            needing.push(entry.name.clone());
        }
        if entry.has_poison_detection {
            let falls_back = |other: &&BulkheadIndex| self.bulkheads[**other].fallback.contains(&entry.name);
            let others = self.bulkheads.by_name.values().filter(falls_back);
            needing.extend(others.map(|other| self.bulkheads[*other].name.clone()));
        }
        needing.iter().for_each(|name| self.recall_leases_of_bulkhead(name));
    }

    /// Starts to make a lease. Returns false if the request must be refused.
    fn begin_lease(&mut self, index: SessionIndex, request: u64, wanted: LeaseWanted<'_>) -> bool {
        let session = &self.sessions[index];
        let id = SessionId { index, epoch: session.epoch };
        let Some(&bulkhead) = self.bulkheads.by_name.get(wanted.bulkhead) else { return false };
        if let Grant::Entries(entries) = &session.grant
            && access::refusal(entries, (wanted.bulkhead, true), wanted.tenant).is_some()
        {
            return false;
        }
        let entry = &self.bulkheads[bulkhead];
        // Poison detection needs the bytes of each payload.
        let is_welcome =
            !self.needs_payload_bytes(bulkhead) && wanted.bytes <= entry.max_payload && !self.is_stopping;
        let is_making = |(_, lease): &(u64, &Lease)| lease.stage == Stage::Creating;
        let has_room = self.leases.of_session(id).count() < LEASES_MAX
            && self.leases.of_session(id).filter(is_making).count() < CREATING_MAX;
        if !is_welcome || !has_room || wanted.tenant.len() > TENANT_BYTES_MAX {
            return false;
        }
        let bytes = wanted.bytes.max(FILE_BYTES_MIN).next_power_of_two();
        let name = entry.name.clone();
        if !self.make_room_for_files(2 * bytes) {
            return false;
        }
        self.leases.last += 1;
        self.leases.live += 1;
        self.leases.bytes += 2 * bytes;
        let (number, used_at) = (self.leases.last, self.now);
        let lease = Lease {
            session: id,
            request,
            bulkhead: name,
            tenant: wanted.tenant.into(),
            bytes,
            files: None,
            stage: Stage::Creating,
            is_busy: false,
            loan: LoanState::None,
            used_at,
        };
        self.leases.by_number.insert(number, lease);
        self.background.make_files(number, bytes);
        self.schedule_checks();
        true
    }

    /// Returns true if memory files can take `more` bytes. Otherwise recalls idle leases to make room for a later
    /// request.
    fn make_room_for_files(&mut self, more: u64) -> bool {
        let (most, waiting) = (self.limits.pooled_bytes_max, self.memory.shares.held() as u64);
        let most = most.min((self.limits.buffered_bytes_max as u64).saturating_sub(waiting));
        if more > most {
            return false;
        }
        let over = (self.leases.bytes + more).saturating_sub(most);
        let live_max = open_files::leases_max(self.leases.open_files, self.limits.pooled_bytes_max);
        let is_full = self.leases.live >= live_max;
        self.recall_idle(over.max(u64::from(is_full)));
        over == 0 && !is_full
    }

    /// Recalls idle leases of at least `bytes` in total. The lease that has been idle the longest is recalled first.
    fn recall_idle(&mut self, bytes: u64) {
        let mut idle: Vec<_> = self
            .leases
            .by_number
            .iter()
            .filter(|(_, lease)| !lease.is_busy && lease.stage == Stage::Held)
            .map(|(number, lease)| (lease.used_at, *number, 2 * lease.bytes))
            .collect();
        idle.sort_unstable();
        let mut freed = 0;
        for (_, number, worth) in idle {
            if freed >= bytes {
                return;
            }
            freed += worth;
            self.recall(number);
        }
    }

    /// Recalls idle leases if waiting data and memory files together exceed the memory budget.
    pub(super) fn recall_leases_over_budget(&mut self, held: usize) {
        let room = (self.limits.buffered_bytes_max as u64).saturating_sub(held as u64);
        if self.leases.bytes <= room.min(self.limits.pooled_bytes_max) {
            return;
        }
        // The file of a waiting job is charged with the job. Recalled leases count as returned.
        let sum = |is: fn(&Lease) -> bool| -> u64 {
            self.leases.by_number.values().filter(|lease| is(lease)).map(|lease| 2 * lease.bytes).sum()
        };
        let (idle, given) =
            (sum(|lease| !lease.is_busy), sum(|lease| matches!(lease.stage, Stage::Recalled(_))));
        let over =
            idle.saturating_sub(room).max(self.leases.bytes.saturating_sub(self.limits.pooled_bytes_max));
        self.recall_idle(over.saturating_sub(given));
    }

    /// Handles the result of making the files of a lease.
    pub(super) fn files_created(&mut self, number: u64, bytes: u64, made: rustix::io::Result<Files>) {
        let lease = self.leases.by_number.get_mut(&number);
        match (made, lease) {
            (Ok(files), Some(lease)) => {
                (lease.stage, lease.files) = (Stage::Created, Some(Arc::new(files)));
                let session = lease.session;
                self.offer_next(session);
            }
            (made, _) => {
                self.leases.bytes -= 2 * bytes;
                self.leases.live -= 1;
                if let Ok(files) = made {
                    self.background.free_files(files);
                }
                self.decline_lease(number);
            }
        }
    }

    /// Schedules an offer to a client for the end of this iteration.
    fn offer_next(&mut self, session: SessionId) {
        // A client can send a thousand confirmations per iteration.
        if self.leases.to_offer.last() != Some(&session) {
            self.leases.to_offer.push(session);
        }
    }

    /// Offers pending leases. Must not run while frames of a client are being read, because a failed write closes the
    /// session.
    pub(super) fn offer_leases(&mut self) {
        // Each declined lease schedules another offer, at most as often as the client has leases.
        while !self.leases.to_offer.is_empty() {
            for session in std::mem::take(&mut self.leases.to_offer) {
                self.offer_one(session);
            }
        }
        // Sends the refusals.
        self.flush_connections();
    }

    /// Offers the next lease to a client that has confirmed the previous one.
    fn offer_one(&mut self, session: SessionId) {
        let of = || self.leases.of_session(session);
        let made = of().find(|(_, lease)| lease.stage == Stage::Created).map(|(number, _)| number);
        let is_behind = of().any(|(_, lease)| lease.stage == Stage::Offered);
        let Some(number) = made.filter(|_| !is_behind) else { return };
        // A reload may have changed the bulkhead since the request.
        let name = self.leases.by_number.get(&number).map(|lease| &lease.bulkhead);
        let bulkhead = name.and_then(|name| self.bulkheads.by_name.get(name).copied());
        let is_welcome = bulkhead.is_some_and(|bulkhead| !self.needs_payload_bytes(bulkhead));
        let Some(lease) = self.leases.by_number.get_mut(&number) else { return };
        let Some(files) = &lease.files else { return };
        let lends = &mut self.leases.lends;
        let client = self.sessions.of_mut(session).filter(|client| client.outbox.is_empty() && is_welcome);
        let is_sent = client.is_some_and(|client| {
            let (named, unread) = (Named { lease: number, bytes: lease.bytes }, &mut client.unread);
            let said = (kind::LEASED, lease.request);
            client.end.can_lend(lends, unread)
                && client.end.lend(said, named, files.of_client(), (lends, unread)).is_ok()
        });
        if is_sent {
            (lease.stage, lease.used_at) = (Stage::Offered, self.now);
        } else {
            // The client cannot receive files, or too many descriptors are in transit. The next lease can be offered.
            self.decline_lease(number);
            self.offer_next(session);
        }
    }

    /// Ends a lease that is not offered after all, and refuses the client's request.
    fn decline_lease(&mut self, number: u64) {
        if let Some((session, request)) = self.end_lease(number) {
            self.send_to_client(session.index, kind::LEASE_REFUSED, request);
        }
    }

    fn send_to_client(&mut self, index: SessionIndex, kind: u8, number: u64) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if session.stage == SessionStage::Open {
            let _ = session.outbox.push(kind, number, &Empty, &[], Payload::NONE);
            self.schedule_flush(Endpoint::Session(index));
        }
    }

    /// Recalls a lease from its client. The files are not lent to another worker afterwards.
    fn recall(&mut self, number: u64) {
        let lease = self.leases.by_number.get_mut(&number);
        let is_out = |lease: &&mut Lease| matches!(lease.stage, Stage::Held | Stage::Offered);
        let Some(lease) = lease.filter(is_out) else { return };
        lease.stage = Stage::Recalled(self.now);
        let user = std::mem::replace(&mut lease.loan, LoanState::Barred);
        let (session, bytes) = (lease.session, lease.bytes);
        self.end_loan(user, number, bytes);
        self.schedule_checks();
        if self.sessions.of(session).is_some() {
            self.send_to_client(session.index, kind::LEASE_ENDED, number);
        }
    }

    fn end_loan(&mut self, loan: LoanState, number: u64, bytes: u64) {
        let (LoanState::Offered(spawn) | LoanState::Confirmed(spawn)) = loan else { return };
        if let Some(&index) = self.links.by_spawn.get(&spawn) {
            self.links[index].lent_bytes -= 2 * bytes;
            let _ = self.links[index].outbox.push(kind::FILES_ENDED, number, &Empty, &[], Payload::NONE);
            self.schedule_flush(Endpoint::Link(index));
        }
    }

    /// Ends a lease. A job that uses the files keeps them until the job's end. Returns the client and the number of
    /// the client's request.
    fn end_lease(&mut self, number: u64) -> Option<(SessionId, u64)> {
        let lease = self.leases.by_number.remove(&number)?;
        self.end_loan(lease.loan, number, lease.bytes);
        // If the files are still being made, `files_created` subtracts the bytes later.
        if let Some(files) = lease.files {
            self.release_files(files);
        }
        Some((lease.session, lease.request))
    }

    fn release_files(&mut self, files: Arc<Files>) {
        if let Some(files) = Arc::into_inner(files) {
            self.leases.bytes -= 2 * files.bytes;
            self.leases.live -= 1;
            self.background.free_files(files);
        }
    }

    /// Ends all leases of a client that is gone.
    pub(super) fn end_leases_of_client(&mut self, session: SessionId) {
        if let Some(client) = self.sessions.of_mut(session) {
            client.end.release_files(&mut self.leases.lends, &mut client.unread);
            self.schedule_checks();
        }
        if self.leases.len() > 0 {
            let numbers: Vec<_> = self.leases.of_session(session).map(|(number, _)| number).collect();
            for number in numbers {
                self.end_lease(number);
            }
        }
    }

    /// Recalls the leases that a dead worker used, because the files must not be lent to another worker.
    pub(super) fn end_leases_of_worker(&mut self, spawn: u64) {
        while let Some(at) = self.leases.lingering.iter().position(|(at, ..)| *at == spawn) {
            let (_, _, files) = self.leases.lingering.swap_remove(at);
            self.release_files(files);
        }
        if self.leases.len() > 0 {
            let matches = |lease: &Lease| matches!(lease.loan, LoanState::Offered(at) | LoanState::Confirmed(at) if at == spawn);
            self.leases.numbers(matches).into_iter().for_each(|number| self.recall(number));
        }
    }

    /// Recalls all leases for a bulkhead. Called when the bulkhead starts to need payload digests.
    pub(super) fn recall_leases_of_bulkhead(&mut self, bulkhead: &str) {
        let matches = |lease: &Lease| *lease.bulkhead == *bulkhead;
        self.leases.numbers(matches).into_iter().for_each(|number| self.recall(number));
    }

    pub(super) fn check_leases(&mut self) {
        if self.leases.lends.remove_closed() {
            self.schedule_checks();
        }
        if self.leases.len() == 0 {
            return;
        }
        let now = self.now;
        let is_unused = |lease: &Lease| match lease.stage {
            Stage::Held => !lease.is_busy && now.since(lease.used_at) >= IDLE_MAX,
            Stage::Offered => now.since(lease.used_at) >= RETURN_TIMEOUT,
            _ => false,
        };
        for number in self.leases.numbers(is_unused) {
            self.refuse_created(number);
            self.recall(number);
        }
        let is_late = |lease: &Lease| {
            matches!(lease.stage, Stage::Recalled(since) if now.since(since) >= RETURN_TIMEOUT)
                && !lease.is_busy
                && now.since(lease.used_at) >= RETURN_TIMEOUT
        };
        for number in self.leases.numbers(is_late) {
            let Some((session, _)) = self.end_lease(number) else { continue };
            if let Some(client) = self.sessions.of_mut(session) {
                if client.revoked_leases.len() >= REVOKED_MAX {
                    client.revoked_leases.pop_front();
                }
                client.revoked_leases.push_back(number);
            }
            // The next lease of this client may have waited for the confirmation of the previous lease.
            self.offer_next(session);
        }
        self.schedule_checks();
    }

    /// Refuses the further leases of a client that has not confirmed an offer in time, so that the client does not
    /// wait for them any longer.
    fn refuse_created(&mut self, offered: u64) {
        let Some(lease) = self.leases.by_number.get(&offered) else { return };
        if lease.stage != Stage::Offered {
            return;
        }
        let session = lease.session;
        let is_made = |lease: &Lease| lease.session == session && lease.stage == Stage::Created;
        self.leases.numbers(is_made).into_iter().for_each(|number| self.decline_lease(number));
    }

    // Jobs.

    /// Checks a job whose payload is in a memory file. Returns the checked reference, or the reason for rejecting the
    /// job.
    pub(super) fn check_leased(
        &self,
        session: SessionId,
        submit: &Submit<'_>,
        (named, payload): (Option<Named>, usize),
    ) -> Result<Named, (RejectReason, String)> {
        let invalid = |message: &str| (RejectReason::Invalid, message.to_owned());
        let named = named.ok_or_else(|| invalid("the name of a lease must have 16 bytes"))?;
        let lease = match self.leases.by_number.get(&named.lease) {
            Some(lease) if lease.session == session => lease,
            // A client that was stopped for a while may not have received the recall.
            _ if self
                .sessions
                .of(session)
                .is_some_and(|client| client.revoked_leases.contains(&named.lease)) =>
            {
                return Err((RejectReason::Overloaded, REVOKED.to_owned()));
            }
            _ => {
                return Err(invalid(
                    "this client has no such lease: the lease was returned, or never belonged to this \
                     client; send the payload with the job, or ask for another lease",
                ));
            }
        };
        if lease.is_busy || !matches!(lease.stage, Stage::Held | Stage::Recalled(_)) {
            return Err(invalid("this lease is in use by another job, or was not taken"));
        }
        if matches!(lease.stage, Stage::Recalled(since) if self.now.since(since) >= RETURN_TIMEOUT) {
            return Err((RejectReason::Overloaded, REVOKED.to_owned()));
        }
        if *lease.bulkhead != *submit.bulkhead || *lease.tenant != *submit.tenant {
            return Err(invalid("this lease is for another bulkhead or tenant"));
        }
        if payload > 0 || named.bytes > lease.bytes || named.bytes <= WORTH_A_FILE_BYTES as u64 {
            return Err(invalid("the payload is not in the file of the lease, or too small for a file"));
        }
        Ok(named)
    }

    /// Marks a lease as used by a job. The reference must have been checked.
    pub(super) fn begin_leased_job(&mut self, named: Named) -> Option<Box<LeasedPayload>> {
        let lease = self.leases.by_number.get_mut(&named.lease)?;
        let files = lease.files.clone()?;
        lease.is_busy = true;
        let bytes = usize::try_from(named.bytes).unwrap_or(usize::MAX);
        Some(Box::new(LeasedPayload {
            lease: named.lease,
            files,
            bytes,
            at: None,
            given_to: None,
            result: None,
            is_kept: false,
        }))
    }

    /// Returns the worker that has the files of a lease.
    pub(super) fn user_of(&self, number: u64) -> Option<WorkerId> {
        let (LoanState::Offered(spawn) | LoanState::Confirmed(spawn)) =
            self.leases.by_number.get(&number)?.loan
        else {
            return None;
        };
        Some(self.links.of_spawn(spawn)?.worker)
    }

    /// Returns a job's payload in the form for this worker: a reference if the worker has the file, otherwise bytes.
    /// If no worker has the file, the file is lent to this worker for the next job.
    pub(super) fn leased_payload_for(
        &mut self,
        index: LinkIndex,
        compartment: CompartmentIndex,
        job: JobId,
    ) -> (Option<Named>, Payload<'static>) {
        let Some(link) = self.links.get(index) else { return (None, Payload::NONE) };
        let spawn = link.spawn;
        let bulkhead = self.owner(compartment).name.clone();
        let policy = &mut self.compartments[compartment].policy;
        let Some(leased) = policy.cargo_mut(job).and_then(|record| record.held.file.as_deref_mut()) else {
            return (None, Payload::NONE);
        };
        (leased.at, leased.given_to) = (Some(spawn), None);
        let (number, bytes) = (leased.lease, leased.bytes);
        let user = self.leases.by_number.get(&number).filter(|lease| lease.bulkhead == bulkhead);
        match user.map(|lease| lease.loan) {
            Some(LoanState::Confirmed(has)) if has == spawn => {
                leased.given_to = Some(spawn);
                (Some(Named { lease: number, bytes: bytes as u64 }), Payload::NONE)
            }
            Some(LoanState::None) => {
                let payload = Payload::File(leased.files.payload(), bytes);
                self.lend_to_worker(index, number);
                (None, payload)
            }
            _ => (None, Payload::File(leased.files.payload(), bytes)),
        }
    }

    /// Returns true if the loan fits within `lent_max`. Lent files count as memory of the worker, and must not be the
    /// reason for exceeding the memory limit.
    fn fits_loan_limit(&self, index: LinkIndex, number: u64) -> bool {
        let link = &self.links[index];
        let more = self.leases.by_number.get(&number).map_or(0, |lease| 2 * lease.bytes);
        let most = self.owner(link.compartment).loaned_bytes_max;
        most.is_none_or(|most| link.lent_bytes + more <= most)
    }

    fn lend_to_worker(&mut self, index: LinkIndex, number: u64) {
        if self.links[index].lending != Lending::Open || !self.fits_loan_limit(index, number) {
            return;
        }
        if !self.links[index].outbox.is_empty() {
            self.flush_link(index);
        }
        let Some(link) = self.links.get_mut(index) else { return };
        let Some(lease) = self.leases.by_number.get_mut(&number) else { return };
        let Some(files) = lease.files.as_ref().filter(|_| link.outbox.is_empty()) else { return };
        let lends = &mut self.leases.lends;
        if !lends.can_lend(&link.socket, &mut link.unread) {
            return;
        }
        let named = Named { lease: number, bytes: lease.bytes };
        match lend(&link.socket, (kind::FILES, number), &named, &files.of_worker()) {
            Ok(sent) => {
                link.read_position.add_written(sent);
                link.lent_bytes += 2 * lease.bytes;
                lends.lent(&mut link.unread);
                link.lending = Lending::Unacknowledged;
                lease.loan = LoanState::Offered(link.spawn);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => link.lending = Lending::Never,
        }
    }

    /// Handles a worker's confirmation of a loan.
    pub(super) fn loan_confirmed(&mut self, index: LinkIndex, number: u64) {
        let link = &mut self.links[index];
        if link.lending != Lending::Unacknowledged {
            return link.count_unknown_reply();
        }
        link.lending = Lending::Open;
        let spawn = link.spawn;
        if let Some(lease) = self.leases.by_number.get_mut(&number)
            && lease.loan == LoanState::Offered(spawn)
        {
            lease.loan = LoanState::Confirmed(spawn);
        }
    }

    /// Ends a worker's access to the files of a job that the worker has answered or returned. The worker no longer
    /// reads the payload or writes the result, even if the job is retried and ends elsewhere.
    pub(super) fn end_file_use(&mut self, (compartment, spawn): (CompartmentIndex, u64), job: JobId) {
        if let Some(record) = self.compartments[compartment].policy.cargo_mut(job)
            && let Some(leased) = record.held.file.as_deref_mut()
            && leased.at == Some(spawn)
        {
            (leased.at, leased.given_to) = (None, None);
        }
        // The client may have been answered earlier.
        while let Some(at) =
            self.leases.lingering.iter().position(|(at, left, _)| (*at, *left) == (spawn, job))
        {
            let (_, _, files) = self.leases.lingering.swap_remove(at);
            self.release_files(files);
        }
    }

    /// Records that a job's result is in the result file. Returns an error message if the worker does not have this
    /// file.
    pub(super) fn result_in_file(
        &mut self,
        (compartment, worker): (CompartmentIndex, WorkerId),
        spawn: u64,
        job: JobId,
        named: Named,
    ) -> Result<(), String> {
        let policy = &mut self.compartments[compartment].policy;
        if !policy.holds(worker, job) {
            return Ok(());
        }
        // A cancelled job may have no record any more.
        let Some(record) = policy.cargo_mut(job) else { return Ok(()) };
        let leased = record.held.file.as_deref_mut();
        let matches = |leased: &&mut LeasedPayload| {
            leased.lease == named.lease && leased.given_to == Some(spawn) && named.bytes <= leased.files.bytes
        };
        let leased = leased.filter(matches).ok_or("the worker reported a result in a file of another job")?;
        leased.result = Some(named.bytes);
        Ok(())
    }

    /// Ends a job's use of a lease. Returns the location of the result if the result is in the file.
    pub(super) fn end_leased_job(
        &mut self,
        leased: LeasedPayload,
        job: Option<JobId>,
        verdict: &Verdict,
    ) -> Option<Named> {
        let LeasedPayload { lease: number, files, at, result, .. } = leased;
        let is_answered = matches!(verdict, Verdict::Ok | Verdict::Failed(_));
        if let Some(lease) = self.leases.by_number.get_mut(&number) {
            lease.is_busy = false;
            lease.used_at = self.now;
            // The worker may still run the job, and could write a result after the next job has begun.
            if at.is_some() && !is_answered {
                self.recall(number);
            }
        }
        match (at.filter(|at| !is_answered && self.links.by_spawn.contains_key(at)), job) {
            (Some(at), Some(job)) => self.leases.lingering.push((at, job, files)),
            _ => self.release_files(files),
        }
        result.filter(|_| *verdict == Verdict::Ok).map(|bytes| Named { lease: number, bytes })
    }
}

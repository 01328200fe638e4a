//! Decides which memory file leases are granted, lent to a worker, recalled and revoked, and records each lease with its
//! client and worker. `wiring/leases.rs` passes in requests and jobs, and performs the effects that this part returns.
//! `memory_files` makes the system calls.
//!
//! A lease belongs to one client, one bulkhead and one tenant. The files are lent to at most one worker, the first that
//! can borrow them when it gets a job with the lease. The payloads of all other jobs are sent as bytes. The lease is
//! recalled, among other reasons, when this worker is gone, or when the job has ended but the worker could still write
//! to the files. A file in use therefore never contains data from another client, tenant or worker.
//!
//! Jobs that the client sent before it received the recall can still use the lease. If the client does not return the
//! lease in time, the lease is revoked.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bulkhead_plane::open_files;
use bulkhead_policy::Time;
use bulkhead_shared::connection::Payload;
use bulkhead_shared::limits::INLINE_PAYLOAD_BYTES_MAX;
use bulkhead_shared::memory_files::{LeaseRef, LeaseRequest};
use bulkhead_shared::{JobId, RejectReason};
use foldhash::quality::RandomState;

use super::memory_files::Files;
use super::slab::SessionId;

/// Maximum number of leases per client.
const LEASES_PER_CLIENT_MAX: usize = 64;

/// Maximum number of leases per client whose files are being created at the same time.
const CREATING_PER_CLIENT_MAX: usize = 4;

/// Minimum size of a memory file, in bytes.
const FILE_BYTES_MIN: u64 = 256 * 1024;

/// Time after which a lease that no job uses is recalled.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// Maximum time that a client has to return a recalled lease or to confirm an offer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of revoked leases remembered per client. A client might still use such a lease until it has processed
/// the recall.
const REVOKED_PER_CLIENT_MAX: usize = LEASES_PER_CLIENT_MAX;

const REVOKED: &str = "this lease was recalled, but not returned in time; send the job again";
const UNKNOWN: &str = "this client has no such lease: the lease was returned, or never belonged to this client; \
                       send the payload with the job, or request another lease";

/// An action for the caller to perform. Actions must be performed in order, immediately after the call that produced
/// them.
pub(super) enum Effect {
    /// Creates a lease's files. Afterwards, the caller must call [`Leases::files_created`].
    CreateFiles {
        lease: u64,
        bytes: u64,
    },
    FreeFiles(Files),
    /// Rejects a client's request for a lease.
    RejectRequest {
        client: SessionId,
        request: u64,
    },
    /// Asks a client to return a lease.
    Recall {
        client: SessionId,
        lease: u64,
    },
    /// Increments the counter of frames that a well-behaved client would never send.
    CountMisuse {
        client: SessionId,
    },
    /// Asks a worker to unmap a lease's files.
    EndLoan {
        worker: u64,
        lease: u64,
    },
}

/// A lease to offer to its client. After sending the offer, the caller must call [`Leases::offer_sent`].
pub(super) struct Offer {
    pub(super) client: SessionId,
    pub(super) request: u64,
    pub(super) bulkhead: Arc<str>,
    pub(super) named: LeaseRef,
    pub(super) files: Arc<Files>,
}

/// Files to lend to a worker. After sending the files, the caller must call [`Leases::loan_sent`].
pub(super) struct Loan {
    pub(super) named: LeaseRef,
    pub(super) files: Arc<Files>,
}

/// Result of trying to send memory files to a client or worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Yes,
    /// The files were not sent because the socket was full or too many descriptors were in transit.
    NotNow,
    /// The files were not sent, because this client or worker can never receive files.
    Never,
}

/// Memory limits for files.
#[derive(Clone, Copy)]
pub(super) struct Budget {
    /// Maximum total size of all files, in bytes (`max_pooled`).
    pub(super) pooled_bytes_max: u64,
    /// Maximum total size of all files and waiting data, in bytes (`max_buffered`).
    pub(super) buffered_bytes_max: u64,
    /// Total size of the waiting data in bytes, not including data in memory files.
    pub(super) waiting_bytes: u64,
}

impl Budget {
    fn room(&self) -> u64 {
        self.pooled_bytes_max.min(self.buffered_bytes_max.saturating_sub(self.waiting_bytes))
    }
}

struct Lease {
    client: SessionId,
    /// Number of the request in which the client asked for the lease.
    request: u64,
    bulkhead: Arc<str>,
    tenant: Box<str>,
    /// Size of each of the two files that belong to the lease, in bytes.
    bytes: u64,
    state: State,
    is_busy: bool,
    loan: LoanState,
    /// Time at which a job last used the lease.
    used_at: Time,
}

enum State {
    Creating,
    /// The files have been created but not offered to the client, because the client has not confirmed the previous
    /// offer.
    Created(Arc<Files>),
    Offered(Arc<Files>),
    Held(Arc<Files>),
    Recalled {
        files: Arc<Files>,
        at: Time,
    },
}

impl State {
    fn files(&self) -> Option<&Arc<Files>> {
        match self {
            Self::Creating => None,
            Self::Created(files)
            | Self::Offered(files)
            | Self::Held(files)
            | Self::Recalled { files, .. } => Some(files),
        }
    }
}

/// State of a loan of memory files to a worker. The worker is identified by its spawn number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoanState {
    None,
    /// The worker has not confirmed the loan yet.
    Offered(u64),
    Confirmed(u64),
    /// The files must not be lent to another worker.
    Barred,
}

impl LoanState {
    fn worker(self) -> Option<u64> {
        match self {
            Self::Offered(worker) | Self::Confirmed(worker) => Some(worker),
            Self::None | Self::Barred => None,
        }
    }
}

/// A worker that can map memory files.
struct Borrower {
    /// Total size of the files lent to the worker, in bytes.
    loaned_bytes: u64,
    state: BorrowerState,
}

#[derive(PartialEq, Eq)]
enum BorrowerState {
    CanBorrow,
    /// The worker has not confirmed the most recent loan. Until then, no other files are lent to the worker.
    Unconfirmed,
    /// No files are lent to this worker, because sending files to it failed.
    Unreachable,
}

/// A job's payload in a leased file.
pub(super) struct LeasedPayload {
    lease: u64,
    files: Arc<Files>,
    bytes: usize,
    /// Worker that received the payload. The worker received either a reference to the file or the payload's bytes.
    worker: Option<u64>,
    /// True if the worker received a reference to the file. False if the worker received the payload's bytes.
    is_by_name: bool,
    /// Size of the result in the result file, in bytes. `None` if the file does not contain the result.
    result_bytes: Option<u64>,
    /// True if the job can be retried. The payload then counts as waiting data even while a worker has the job.
    is_kept: bool,
}

impl LeasedPayload {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_kept(&self) -> bool {
        self.is_kept
    }

    pub(super) fn set_kept(&mut self, is_kept: bool) {
        self.is_kept = is_kept;
    }

    /// Records that a worker wrote the job's result to the result file. Returns false if the payload was not sent to
    /// this worker as a reference to the file.
    #[must_use]
    pub(super) fn result_written(&mut self, worker: u64, named: LeaseRef) -> bool {
        let is_valid = self.lease == named.lease
            && self.is_by_name
            && self.worker == Some(worker)
            && named.bytes <= self.files.bytes();
        if is_valid {
            self.result_bytes = Some(named.bytes);
        }
        is_valid
    }
}

pub(super) struct Leases {
    by_number: HashMap<u64, Lease, RandomState>,
    borrowers: HashMap<u64, Borrower, RandomState>,
    /// Revoked leases of each client. The client might still use them if it has not processed the recall yet.
    revoked: HashMap<SessionId, VecDeque<u64>, RandomState>,
    /// Files that a worker might still read although the client has already received the job's outcome, because the
    /// worker has not replied. Each entry starts with the worker's spawn number.
    lingering: Vec<(u64, JobId, Arc<Files>)>,
    /// Files of leases that ended during an upgrade because their clients' connections ended or were moved, with the
    /// times at which the leases ended. The clients might still be reading results.
    unreturned: VecDeque<(Time, Arc<Files>)>,
    /// Clients that are waiting to be offered a lease.
    to_offer: VecDeque<SessionId>,
    effects: VecDeque<Effect>,
    /// Maximum number of files that this process can have open.
    open_files_max: u64,
    last_number: u64,
    /// Highest lease number used by the predecessor. Clients might still use leases with numbers up to this one.
    last_number_before: u64,
    /// True if lease requests can be granted. False during an upgrade, when all leases are recalled from clients.
    is_lending: bool,
    /// Total size of all files that have not been freed, in bytes. Includes the files of ended leases as long as a job
    /// uses them.
    bytes: u64,
    /// Number of leases that are included in `bytes`.
    live: u64,
}

impl Leases {
    pub(super) fn new(open_files_max: u64) -> Self {
        Self {
            by_number: HashMap::default(),
            borrowers: HashMap::default(),
            revoked: HashMap::default(),
            lingering: Vec::new(),
            unreturned: VecDeque::new(),
            to_offer: VecDeque::new(),
            effects: VecDeque::new(),
            open_files_max,
            last_number: 0,
            last_number_before: 0,
            is_lending: true,
            bytes: 0,
            live: 0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if there are memory files that have not been freed.
    pub(super) fn any_live(&self) -> bool {
        self.live > 0
    }

    /// Returns true if [`Leases::check_deadlines`] must be called regularly.
    pub(super) fn needs_checks(&self) -> bool {
        !self.by_number.is_empty() || self.has_unreturned()
    }

    // Upgrades.

    /// Begins to reject all lease requests. The caller must then call [`Leases::recall_all_idle`] regularly.
    pub(super) fn stop_lending(&mut self, now: Time) {
        self.is_lending = false;
        for number in self.matching(|lease| matches!(lease.state, State::Created(_))) {
            self.reject_created(number);
        }
        self.recall_all_idle(now);
    }

    pub(super) fn lend_again(&mut self) {
        self.is_lending = true;
    }

    /// Recalls all leases that are not in use by a job.
    pub(super) fn recall_all_idle(&mut self, now: Time) {
        if self.by_number.is_empty() {
            return;
        }
        let is_idle =
            |lease: &Lease| !lease.is_busy && matches!(lease.state, State::Held(_) | State::Offered(_));
        self.matching(is_idle).into_iter().for_each(|number| self.recall(now, number));
    }

    /// Returns true if a client has a lease that is not in use by a job.
    pub(super) fn has_idle(&self) -> bool {
        self.by_number.values().any(|lease| !lease.is_busy)
    }

    /// Returns true if the client has a lease or is waiting for one.
    pub(super) fn has_any(&self, client: SessionId) -> bool {
        self.of_client(client).next().is_some()
    }

    /// Returns true if the client's connection can be moved to the successor. A client must return its leases first,
    /// unless the returns cannot be read (`hides_returns`).
    pub(super) fn allow_move(&self, client: SessionId, hides_returns: bool) -> bool {
        let is_recalled = |lease: &Lease| matches!(lease.state, State::Recalled { .. });
        self.of_client(client).all(|(_, lease)| hides_returns && is_recalled(lease))
    }

    /// Returns true if a client whose lease has ended might still be reading a result from the lease's files.
    pub(super) fn has_unreturned(&self) -> bool {
        !self.unreturned.is_empty()
    }

    /// Returns the most recent lease number.
    pub(super) fn last_number(&self) -> u64 {
        self.last_number
    }

    /// Continues the numbering of leases where the predecessor stopped.
    pub(super) fn continue_after(&mut self, number: u64) {
        self.last_number = self.last_number.max(number);
        self.last_number_before = self.last_number;
    }

    #[inline]
    pub(super) fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn of_client(&self, client: SessionId) -> impl Iterator<Item = (u64, &Lease)> {
        self.by_number
            .iter()
            .filter(move |(_, lease)| lease.client == client)
            .map(|(number, lease)| (*number, lease))
    }

    /// Returns the numbers of the leases for which `matches` returns true, in the order in which the leases were
    /// created.
    fn matching(&self, matches: impl Fn(&Lease) -> bool) -> Vec<u64> {
        let matching = self.by_number.iter().filter(|(_, lease)| matches(lease));
        let mut numbers: Vec<u64> = matching.map(|(number, _)| *number).collect();
        // Sorted, because clients can observe the order of the effects.
        numbers.sort_unstable();
        numbers
    }

    // Clients.

    /// Handles a lease request that was allowed by the access rules and by the bulkhead.
    pub(super) fn request(
        &mut self,
        now: Time,
        (client, request): (SessionId, u64),
        bulkhead: Arc<str>,
        wanted: &LeaseRequest<'_>,
        budget: Budget,
    ) {
        let is_creating = |(_, lease): &(u64, &Lease)| matches!(lease.state, State::Creating);
        let has_room = self.of_client(client).count() < LEASES_PER_CLIENT_MAX
            && self.of_client(client).filter(is_creating).count() < CREATING_PER_CLIENT_MAX;
        let bytes = wanted.bytes.max(FILE_BYTES_MIN).next_power_of_two();
        if !self.is_lending || !has_room || !self.make_room(now, 2 * bytes, budget) {
            return self.reject(client, request);
        }
        self.last_number += 1;
        self.live += 1;
        self.bytes += 2 * bytes;
        let lease = Lease {
            client,
            request,
            bulkhead,
            tenant: wanted.tenant.into(),
            bytes,
            state: State::Creating,
            is_busy: false,
            loan: LoanState::None,
            used_at: now,
        };
        self.by_number.insert(self.last_number, lease);
        self.effects.push_back(Effect::CreateFiles { lease: self.last_number, bytes });
    }

    pub(super) fn reject(&mut self, client: SessionId, request: u64) {
        self.effects.push_back(Effect::CountMisuse { client });
        self.effects.push_back(Effect::RejectRequest { client, request });
    }

    /// Handles a client's confirmation of an offer.
    pub(super) fn accepted(&mut self, client: SessionId, number: u64) {
        let Some(lease) = self.known_to(client, number) else { return };
        if let State::Offered(files) = &lease.state {
            lease.state = State::Held(files.clone());
        }
        self.schedule_offer(client);
    }

    /// Handles the return of a lease by a client.
    pub(super) fn returned(&mut self, client: SessionId, number: u64) {
        if self.known_to(client, number).is_some() {
            self.end(number);
            self.schedule_offer(client);
        } else if let Some(revoked) = self.revoked.get_mut(&client) {
            revoked.retain(|other| *other != number);
        }
    }

    /// Returns a lease if it has been offered to this client. Otherwise, counts a misuse and returns `None`.
    fn known_to(&mut self, client: SessionId, number: u64) -> Option<&mut Lease> {
        let is_sent = |lease: &&mut Lease| {
            lease.client == client && !matches!(lease.state, State::Creating | State::Created(_))
        };
        let lease = self.by_number.get_mut(&number).filter(is_sent);
        if lease.is_none() {
            self.effects.push_back(Effect::CountMisuse { client });
        }
        lease
    }

    /// Ends all leases of a client whose connection has ended or was moved to the successor. During an upgrade, a client
    /// can continue over another connection, so its files are kept for as long as it could take to return a lease.
    pub(super) fn client_gone(&mut self, now: Time, client: SessionId) {
        self.revoked.remove(&client);
        for number in self.matching(|lease| lease.client == client) {
            // A client that has not accepted a lease cannot have a result in it.
            if !self.is_lending && !matches!(self.by_number[&number].state, State::Offered(_)) {
                let files = self.by_number[&number].state.files().cloned();
                self.unreturned.extend(files.map(|files| (now, files)));
            }
            self.end(number);
        }
    }

    // Memory.

    /// Returns true if additional files of `more` bytes in total fit into the memory budget. If not, recalls idle
    /// leases to make room for a later request.
    fn make_room(&mut self, now: Time, more: u64, budget: Budget) -> bool {
        let most = budget.room();
        if more > most {
            return false;
        }
        let over = (self.bytes + more).saturating_sub(most);
        let is_full = self.live >= open_files::leases_max(self.open_files_max, budget.pooled_bytes_max);
        self.recall_idle(now, over.max(u64::from(is_full)));
        over == 0 && !is_full
    }

    /// Recalls idle leases with a total size of at least `bytes`, starting with the lease that has been idle the
    /// longest.
    fn recall_idle(&mut self, now: Time, bytes: u64) {
        let is_idle = |lease: &Lease| !lease.is_busy && matches!(lease.state, State::Held(_));
        let idle = self.by_number.iter().filter(|(_, lease)| is_idle(lease));
        let mut idle: Vec<_> =
            idle.map(|(number, lease)| (lease.used_at, *number, 2 * lease.bytes)).collect();
        idle.sort_unstable();
        let mut freed = 0;
        for (_, number, worth) in idle {
            if freed >= bytes {
                return;
            }
            freed += worth;
            self.recall(now, number);
        }
    }

    /// Recalls as many idle leases as necessary if the files and the waiting data exceed the memory budget.
    pub(super) fn enforce_budget(&mut self, now: Time, budget: Budget) {
        if self.bytes <= budget.room() {
            return;
        }
        // The file of a waiting job is already charged to the job. Recalled leases count as returned.
        let sum = |matches: fn(&Lease) -> bool| -> u64 {
            self.by_number.values().filter(|lease| matches(lease)).map(|lease| 2 * lease.bytes).sum()
        };
        let (idle, recalled) =
            (sum(|lease| !lease.is_busy), sum(|lease| matches!(lease.state, State::Recalled { .. })));
        let room = budget.buffered_bytes_max.saturating_sub(budget.waiting_bytes);
        let over = idle.saturating_sub(room).max(self.bytes.saturating_sub(budget.pooled_bytes_max));
        self.recall_idle(now, over.saturating_sub(recalled));
    }

    // Offers.

    /// Handles the result of creating a lease's files.
    pub(super) fn files_created(&mut self, number: u64, bytes: u64, created: rustix::io::Result<Files>) {
        match (created, self.by_number.get_mut(&number)) {
            (Ok(files), Some(lease)) if self.is_lending => {
                lease.state = State::Created(Arc::new(files));
                let client = lease.client;
                self.schedule_offer(client);
            }
            (created, lease) => {
                if let Some(Lease { client, request, .. }) = lease {
                    let effect = Effect::RejectRequest { client: *client, request: *request };
                    self.effects.push_back(effect);
                    self.by_number.remove(&number);
                }
                self.bytes -= 2 * bytes;
                self.live -= 1;
                self.effects.extend(created.ok().map(Effect::FreeFiles));
            }
        }
    }

    fn schedule_offer(&mut self, client: SessionId) {
        // A client can confirm a lease a thousand times in one iteration, but must be listed only once.
        if self.to_offer.back() != Some(&client) {
            self.to_offer.push_back(client);
        }
    }

    /// Returns the next lease to offer to a client that has confirmed its previous offer. Must not be called while a
    /// client's frames are being handled, because a failed write closes the client's session.
    pub(super) fn next_offer(&mut self) -> Option<Offer> {
        loop {
            let client = self.to_offer.pop_front()?;
            if self.of_client(client).any(|(_, lease)| matches!(lease.state, State::Offered(_))) {
                continue;
            }
            let offers = self.of_client(client).filter_map(|(number, lease)| match &lease.state {
                State::Created(files) => Some(Offer {
                    client,
                    request: lease.request,
                    bulkhead: lease.bulkhead.clone(),
                    named: LeaseRef { lease: number, bytes: lease.bytes },
                    files: files.clone(),
                }),
                _ => None,
            });
            if let Some(oldest) = offers.min_by_key(|offer| offer.named.lease) {
                return Some(oldest);
            }
        }
    }

    /// Handles the result of sending an offer. If the offer could not be sent, rejects the lease request and schedules
    /// the client's next offer.
    pub(super) fn offer_sent(&mut self, now: Time, offer: Offer, sent: Sent) {
        let Offer { client, request, named, files, .. } = offer;
        match self.by_number.get_mut(&named.lease) {
            Some(lease) if sent == Sent::Yes => {
                lease.state = State::Offered(files);
                lease.used_at = now;
            }
            _ => {
                // These references are dropped first, so that the files are freed when the lease ends.
                drop(files);
                self.end(named.lease);
                self.effects.push_back(Effect::RejectRequest { client, request });
                self.schedule_offer(client);
            }
        }
    }

    // End of leases.

    /// Asks the client to return a lease. From then on, the files of the lease are not lent to other workers.
    fn recall(&mut self, now: Time, number: u64) {
        let Some(lease) = self.by_number.get_mut(&number) else { return };
        let (State::Held(files) | State::Offered(files)) = &lease.state else { return };
        lease.state = State::Recalled { files: files.clone(), at: now };
        let (client, bytes) = (lease.client, lease.bytes);
        let loan = std::mem::replace(&mut lease.loan, LoanState::Barred);
        self.end_loan(loan, number, bytes);
        self.effects.push_back(Effect::Recall { client, lease: number });
    }

    fn end_loan(&mut self, loan: LoanState, lease: u64, bytes: u64) {
        if let Some(worker) = loan.worker()
            && let Some(borrower) = self.borrowers.get_mut(&worker)
        {
            borrower.loaned_bytes -= 2 * bytes;
            self.effects.push_back(Effect::EndLoan { worker, lease });
        }
    }

    /// Ends a lease. Files in use by a job are freed when the job ends.
    fn end(&mut self, number: u64) {
        let Some(lease) = self.by_number.remove(&number) else { return };
        self.end_loan(lease.loan, number, lease.bytes);
        // If the files are being created, `files_created` subtracts their size later.
        if let Some(files) = lease.state.files().cloned() {
            drop(lease);
            self.release(files);
        }
    }

    fn release(&mut self, files: Arc<Files>) {
        if let Some(files) = Arc::into_inner(files) {
            self.bytes -= 2 * files.bytes();
            self.live -= 1;
            self.effects.push_back(Effect::FreeFiles(files));
        }
    }

    /// Recalls all leases of a bulkhead. Called because the bulkhead now needs digests of payloads.
    pub(super) fn recall_for_bulkhead(&mut self, now: Time, bulkhead: &str) {
        let numbers = self.matching(|lease| *lease.bulkhead == *bulkhead);
        numbers.into_iter().for_each(|number| self.recall(now, number));
    }

    /// Ends a lease that has not been offered yet, and rejects the request for this lease.
    fn reject_created(&mut self, number: u64) {
        if let Some(Lease { client, request, state: State::Created(_), .. }) = self.by_number.get(&number) {
            self.effects.push_back(Effect::RejectRequest { client: *client, request: *request });
            self.end(number);
        }
    }

    /// Recalls leases that have been idle for too long and offers that were not confirmed in time. Revokes recalled
    /// leases that were not returned in time.
    pub(super) fn check_deadlines(&mut self, now: Time) {
        let is_over = |since: Time, most: Duration| now.since(since) >= most;
        while let Some((at, _)) = self.unreturned.front()
            && is_over(*at, RESPONSE_TIMEOUT)
            && let Some((_, files)) = self.unreturned.pop_front()
        {
            self.release(files);
        }
        for number in self.matching(|lease| {
            matches!(lease.state, State::Offered(_)) && is_over(lease.used_at, RESPONSE_TIMEOUT)
        }) {
            let client = self.by_number[&number].client;
            // Rejects the client's other requests, so that the client does not keep waiting for leases.
            for created in
                self.matching(|lease| lease.client == client && matches!(lease.state, State::Created(_)))
            {
                self.reject_created(created);
            }
            self.recall(now, number);
        }
        let is_idle = |lease: &Lease| {
            !lease.is_busy && matches!(lease.state, State::Held(_)) && is_over(lease.used_at, IDLE_MAX)
        };
        self.matching(is_idle).into_iter().for_each(|number| self.recall(now, number));
        let is_late = |lease: &Lease| {
            !lease.is_busy
                && matches!(lease.state, State::Recalled { at, .. } if is_over(at, RESPONSE_TIMEOUT))
                && is_over(lease.used_at, RESPONSE_TIMEOUT)
        };
        for number in self.matching(is_late) {
            let client = self.by_number[&number].client;
            self.end(number);
            let revoked = self.revoked.entry(client).or_default();
            if revoked.len() >= REVOKED_PER_CLIENT_MAX {
                revoked.pop_front();
            }
            revoked.push_back(number);
            self.schedule_offer(client);
        }
    }

    // Workers.

    /// Adds a worker that can map memory files.
    pub(super) fn worker_ready(&mut self, worker: u64) {
        self.borrowers.insert(worker, Borrower { loaned_bytes: 0, state: BorrowerState::CanBorrow });
    }

    /// Records that a worker has confirmed a loan. Returns false if the worker has no unconfirmed loan.
    pub(super) fn loan_confirmed(&mut self, worker: u64, number: u64) -> bool {
        let is_waiting = |borrower: &&mut Borrower| borrower.state == BorrowerState::Unconfirmed;
        let Some(borrower) = self.borrowers.get_mut(&worker).filter(is_waiting) else { return false };
        borrower.state = BorrowerState::CanBorrow;
        if let Some(lease) = self.by_number.get_mut(&number)
            && lease.loan == LoanState::Offered(worker)
        {
            lease.loan = LoanState::Confirmed(worker);
        }
        true
    }

    /// Recalls the leases whose files were lent to a worker that has died. These files must not be lent to
    /// another worker.
    pub(super) fn worker_gone(&mut self, now: Time, worker: u64) {
        self.borrowers.remove(&worker);
        self.release_lingering(|of, _| of == worker);
        let numbers = self.matching(|lease| lease.loan.worker() == Some(worker));
        numbers.into_iter().for_each(|number| self.recall(now, number));
    }

    fn release_lingering(&mut self, matches: impl Fn(u64, JobId) -> bool) {
        while let Some(at) = self.lingering.iter().position(|(worker, job, _)| matches(*worker, *job)) {
            let (_, _, files) = self.lingering.swap_remove(at);
            self.release(files);
        }
    }

    // Jobs.

    /// Validates a job whose payload is in a memory file. `inline_bytes` is the number of payload bytes that the job's
    /// frame contains.
    pub(super) fn check_job(
        &self,
        now: Time,
        client: SessionId,
        (bulkhead, tenant): (&str, &str),
        (named, inline_bytes): (LeaseRef, usize),
    ) -> Result<(), (RejectReason, &'static str)> {
        let invalid = |message| Err((RejectReason::Invalid, message));
        let revoked = Err((RejectReason::Overloaded, REVOKED));
        let Some(lease) = self.by_number.get(&named.lease).filter(|lease| lease.client == client) else {
            // A client that was stopped for a while may not have received the recall yet.
            let is_revoked = named.lease <= self.last_number_before
                || self.revoked.get(&client).is_some_and(|numbers| numbers.contains(&named.lease));
            return if is_revoked { revoked } else { invalid(UNKNOWN) };
        };
        match lease.state {
            State::Held(_) | State::Recalled { .. } if !lease.is_busy => {}
            _ => return invalid("this lease is in use by another job, or the client has not accepted it"),
        }
        if matches!(lease.state, State::Recalled { at, .. } if now.since(at) >= RESPONSE_TIMEOUT) {
            return revoked;
        }
        if *lease.bulkhead != *bulkhead || *lease.tenant != *tenant {
            return invalid("this lease is for another bulkhead or tenant");
        }
        if inline_bytes > 0 || named.bytes > lease.bytes || named.bytes <= INLINE_PAYLOAD_BYTES_MAX as u64 {
            return invalid(
                "the payload is not in the lease's memory file, or is too small for a memory file",
            );
        }
        Ok(())
    }

    /// Marks a lease as in use by a job that has been validated. Returns the job's payload, and the worker to which the
    /// lease's files are lent, if any.
    pub(super) fn begin_job(&mut self, named: LeaseRef) -> Option<(Box<LeasedPayload>, Option<u64>)> {
        let lease = self.by_number.get_mut(&named.lease)?;
        let files = lease.state.files()?.clone();
        lease.is_busy = true;
        let bytes = usize::try_from(named.bytes).unwrap_or(usize::MAX);
        let payload = LeasedPayload {
            lease: named.lease,
            files,
            bytes,
            worker: None,
            is_by_name: false,
            result_bytes: None,
            is_kept: false,
        };
        Some((Box::new(payload), lease.loan.worker()))
    }

    /// Prepares a job's payload for sending to a worker: as a reference if the worker has the file, and as bytes if
    /// not. If no worker has the files yet, also returns the files so that they can be lent to this worker for its next
    /// job. The total size of a worker's loans must not exceed `loaned_bytes_max`.
    pub(super) fn give(
        &self,
        payload: &mut LeasedPayload,
        worker: u64,
        bulkhead: &str,
        loaned_bytes_max: Option<u64>,
    ) -> (Option<LeaseRef>, Payload<'static>, Option<Loan>) {
        let lease = self.by_number.get(&payload.lease).filter(|lease| *lease.bulkhead == *bulkhead);
        payload.worker = Some(worker);
        payload.is_by_name = lease.is_some_and(|lease| lease.loan == LoanState::Confirmed(worker));
        if payload.is_by_name {
            return (
                Some(LeaseRef { lease: payload.lease, bytes: payload.bytes as u64 }),
                Payload::NONE,
                None,
            );
        }
        let can_borrow = |lease: &&Lease| {
            lease.loan == LoanState::None
                && self.borrowers.get(&worker).is_some_and(|borrower| {
                    let loaned_bytes = borrower.loaned_bytes + 2 * lease.bytes;
                    borrower.state == BorrowerState::CanBorrow
                        && loaned_bytes_max.is_none_or(|most| loaned_bytes <= most)
                })
        };
        let loan = lease.filter(can_borrow).map(|lease| Loan {
            named: LeaseRef { lease: payload.lease, bytes: lease.bytes },
            files: payload.files.clone(),
        });
        (None, Payload::File(payload.files.payload(), payload.bytes), loan)
    }

    /// Handles the result of lending files to a worker.
    pub(super) fn loan_sent(&mut self, worker: u64, loan: &Loan, sent: Sent) {
        let lease = self.by_number.get_mut(&loan.named.lease);
        let (Some(borrower), Some(lease)) = (self.borrowers.get_mut(&worker), lease) else { return };
        match sent {
            Sent::Yes => {
                borrower.loaned_bytes += 2 * lease.bytes;
                borrower.state = BorrowerState::Unconfirmed;
                lease.loan = LoanState::Offered(worker);
            }
            Sent::NotNow => {}
            Sent::Never => borrower.state = BorrowerState::Unreachable,
        }
    }

    /// Ends a worker's access to a job's files after the worker has replied or returned the job. The worker will not
    /// read the payload or write the result again, even if the job is retried on another worker.
    pub(super) fn worker_done(&mut self, worker: u64, job: JobId, payload: Option<&mut LeasedPayload>) {
        if let Some(payload) = payload.filter(|payload| payload.worker == Some(worker)) {
            (payload.worker, payload.is_by_name) = (None, false);
        }
        // The client may have received the outcome before the worker replied.
        self.release_lingering(|borrower, lingering| (borrower, lingering) == (worker, job));
    }

    /// Ends a job's use of a lease. Returns the location of the result if the result file contains it. `is_alive`
    /// returns true if the given worker still has a link.
    pub(super) fn end_job(
        &mut self,
        now: Time,
        payload: LeasedPayload,
        job: Option<JobId>,
        is_answered: bool,
        is_alive: impl Fn(u64) -> bool,
    ) -> Option<LeaseRef> {
        let LeasedPayload { lease: number, files, worker, result_bytes, .. } = payload;
        // A worker that has not replied may still be running the job, and could write a result after the next job has
        // started.
        let user = worker.filter(|_| !is_answered);
        if let Some(lease) = self.by_number.get_mut(&number) {
            lease.is_busy = false;
            lease.used_at = now;
            if user.is_some() {
                self.recall(now, number);
            }
        }
        match (user.filter(|worker| is_alive(*worker)), job) {
            (Some(worker), Some(job)) => self.lingering.push((worker, job, files)),
            _ => self.release(files),
        }
        result_bytes.map(|bytes| LeaseRef { lease: number, bytes })
    }
}

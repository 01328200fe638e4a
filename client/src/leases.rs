//! Tracks one connection's leases of memory files for large payloads and results; see
//! [`bulkhead_shared::memory_files`]. Chooses a free lease for a job, and decides when a lease is requested or
//! returned. `requests` sends the frames. The supervisor decides whether a lease is granted.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bulkhead_shared::memory_files::{FILES_PER_LEASE, LeaseRef, Mapping, is_whole};

/// Maximum number of pending requests for leases.
const LEASE_REQUESTS_MAX: usize = 4;

/// Maximum time that a lease can be idle and still be reused without first checking for an unread recall. Must be
/// shorter than the five seconds after which the supervisor revokes a recalled lease.
const FRESH_TIME: Duration = Duration::from_secs(4);

/// Pause after a refused lease request before the client sends another request.
const LEASE_RETRY_PAUSE: Duration = Duration::from_millis(250);

/// A lease of two memory files, one for the payload and one for the result. Only one job uses a lease at a time.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) number: u64,
    bulkhead: String,
    tenant: String,
    pub(crate) payload: Mapping,
    pub(crate) result: Mapping,
    result_file: OwnedFd,
    /// Time at which a job last used the lease.
    used_at: Instant,
}

impl Lease {
    fn is_fresh(&self) -> bool {
        self.used_at.elapsed() < FRESH_TIME
    }

    /// Returns true if the supervisor has not revoked the lease. Must be called after the result has been read.
    pub(crate) fn is_whole(&self) -> bool {
        is_whole(&self.result_file)
    }

    fn is_for(&self, bulkhead: &str, tenant: &str) -> bool {
        self.bulkhead == bulkhead && self.tenant == tenant
    }
}

/// Connection to which a lease is returned after use.
pub(crate) trait LeaseOwner: Send + Sync {
    /// Takes back a lease that is no longer needed.
    fn release_lease(&self, lease: Lease);
}

/// The leases of one connection.
#[derive(Default)]
pub(crate) struct Leases {
    free: Vec<Lease>,
    /// Bulkhead and tenant of each pending request for a lease, by request number.
    requested: HashMap<u64, (String, String)>,
    last_request: u64,
    refused_at: Option<Instant>,
    /// Leases in use, by lease number. The value is true if the supervisor has recalled the lease.
    in_use: HashMap<u64, bool>,
    /// Received descriptors whose frame has not been processed yet.
    pub(crate) received_files: Vec<OwnedFd>,
}

impl Leases {
    /// Takes a free lease for a payload of `bytes` bytes. If all free leases are too small, returns one of them as
    /// `TooSmall`, so that the caller can exchange it for a larger one. `has_read_all` returns true if everything
    /// that has arrived from the supervisor has been read.
    pub(crate) fn take(
        &mut self,
        (bulkhead, tenant): (&str, &str),
        bytes: usize,
        has_read_all: impl Fn() -> bool,
    ) -> LeaseSearch {
        let is_for = |lease: &Lease| lease.is_for(bulkhead, tenant);
        if self.free.iter().any(|lease| is_for(lease) && !lease.is_fresh()) && !has_read_all() {
            return LeaseSearch::MayBeRevoked;
        }
        let fits = |lease: &Lease| is_for(lease) && lease.payload.len() >= bytes;
        if let Some(at) = self.free.iter().rposition(fits) {
            let lease = self.free.swap_remove(at);
            self.in_use.insert(lease.number, false);
            return LeaseSearch::Found(lease);
        }
        if let Some(at) = self.free.iter().position(is_for) {
            return LeaseSearch::TooSmall(self.free.swap_remove(at));
        }
        LeaseSearch::None
    }

    /// Registers a request for a lease and returns the request number. Returns `None` if a request was refused too
    /// recently, or if too many requests are pending.
    pub(crate) fn request(&mut self, bulkhead: &str, tenant: &str) -> Option<u64> {
        let is_early = self.refused_at.is_some_and(|at| at.elapsed() < LEASE_RETRY_PAUSE);
        if is_early || self.requested.len() >= LEASE_REQUESTS_MAX {
            return None;
        }
        self.last_request += 1;
        self.requested.insert(self.last_request, (bulkhead.to_owned(), tenant.to_owned()));
        Some(self.last_request)
    }

    /// Returns true if a requested lease may still arrive.
    pub(crate) fn expects_lease(&self) -> bool {
        !self.requested.is_empty()
    }

    /// Handles a lease from the supervisor. Returns true if the lease can be used, false if its files cannot
    /// be mapped, and `None` if the lease was not requested.
    pub(crate) fn receive(&mut self, request: u64, lease_ref: LeaseRef) -> Option<bool> {
        let received_files = std::mem::take(&mut self.received_files);
        let (bulkhead, tenant) = self.requested.remove(&request)?;
        let mapped = map(lease_ref, received_files);
        let is_usable = mapped.is_ok();
        if let Ok((payload, result, result_file)) = mapped {
            let number = lease_ref.lease;
            let used_at = Instant::now();
            self.free.push(Lease { number, bulkhead, tenant, payload, result, result_file, used_at });
        } else {
            self.refused_at = Some(Instant::now());
        }
        Some(is_usable)
    }

    /// Handles the recall of a lease. Returns the lease number if the lease is free and must be returned
    /// immediately.
    pub(crate) fn recall(&mut self, number: u64) -> Option<u64> {
        if let Some(at) = self.free.iter().position(|lease| lease.number == number) {
            return Some(self.free.swap_remove(at).number);
        }
        // Ignores unknown lease numbers, because the client may have returned the lease before the recall arrived.
        if let Some(is_recalled) = self.in_use.get_mut(&number) {
            *is_recalled = true;
        }
        None
    }

    /// Handles a refused lease request. The client waits for [`LEASE_RETRY_PAUSE`] before it sends another request.
    pub(crate) fn refused(&mut self, request: u64) {
        self.requested.remove(&request);
        self.refused_at = Some(Instant::now());
    }

    /// Takes back a lease after a job has used it. Returns the lease number if the lease must be returned to the
    /// supervisor.
    pub(crate) fn release(&mut self, lease: Lease) -> Option<u64> {
        let number = lease.number;
        if self.in_use.remove(&number) == Some(true) {
            return Some(number);
        }
        self.free.push(Lease { used_at: Instant::now(), ..lease });
        None
    }

    /// Stops tracking a lease that is being returned to the supervisor.
    pub(crate) fn forget(&mut self, number: u64) {
        self.in_use.remove(&number);
    }
}

/// Result of searching for a free lease.
pub(crate) enum LeaseSearch {
    Found(Lease),
    TooSmall(Lease),
    /// A free lease exists but may have been revoked, because an unread frame could contain its recall.
    MayBeRevoked,
    None,
}

fn map(lease_ref: LeaseRef, files: Vec<OwnedFd>) -> io::Result<(Mapping, Mapping, OwnedFd)> {
    let [payload, result] = <[OwnedFd; FILES_PER_LEASE]>::try_from(files)
        .map_err(|_| io::Error::other("the message contains fewer memory files than it announces"))?;
    let mapped = Mapping::new(&result, lease_ref.bytes, false)?;
    Ok((Mapping::new(&payload, lease_ref.bytes, true)?, mapped, result))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recall can arrive after the client has returned the lease, for example after each cancelled job.
    #[test]
    fn recall_of_returned_lease_leaves_no_record() {
        let mut leases = Leases::default();
        for number in 0..1000 {
            leases.in_use.insert(number, false);
            leases.forget(number);
            assert_eq!(leases.recall(number), None);
        }
        assert!(leases.in_use.is_empty());
    }
}

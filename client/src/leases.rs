//! Memory files that this client was lent: large payloads are written there, and results read, see
//! [`bulkhead_shared::memory_files`].

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bulkhead_shared::memory_files::{FILES, Mapping, Named, is_whole};

/// Leases that this client asks for at once.
const ASKED_MAX: usize = 4;

/// A lease that has rested so long may have been called back, in a program that does not hear of it: such a one is lost
/// five seconds after that.
const FRESH_FOR: Duration = Duration::from_secs(4);

/// How long after a refusal it asks again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// One lease, of the use of one job at a time.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) number: u64,
    bulkhead: String,
    tenant: String,
    pub(crate) payload: Mapping,
    pub(crate) result: Mapping,
    result_file: OwnedFd,
    /// When a job had it last.
    used_at: Instant,
}

impl Lease {
    fn is_fresh(&self) -> bool {
        self.used_at.elapsed() < FRESH_FOR
    }

    /// Whether what was read of the result before this was there.
    pub(crate) fn is_whole(&self) -> bool {
        is_whole(&self.result_file)
    }

    fn is_for(&self, bulkhead: &str, tenant: &str) -> bool {
        self.bulkhead == bulkhead && self.tenant == tenant
    }
}

/// Whose leases they are.
pub(crate) trait TakesBack: Send + Sync {
    /// A lease is of no more use.
    fn take_back(&self, lease: Lease);
}

/// The leases of one connection.
#[derive(Default)]
pub(crate) struct Leases {
    free: Vec<Lease>,
    /// Bulkhead and tenant, by the number that was asked with.
    asked: HashMap<u64, (String, String)>,
    last_asked: u64,
    refused_at: Option<Instant>,
    /// Leases that are in use, each with whether it was called back.
    in_use: HashMap<u64, bool>,
    /// Descriptors that came, for the frame that says what they are.
    pub(crate) coming: Vec<OwnedFd>,
}

impl Leases {
    /// A lease for such a payload, and one to be given back for a larger one. `hears` says whether all is read that the
    /// supervisor has sent.
    pub(crate) fn take(
        &mut self,
        (bulkhead, tenant): (&str, &str),
        bytes: usize,
        hears: impl Fn() -> bool,
    ) -> Taken {
        let is_for = |lease: &Lease| lease.is_for(bulkhead, tenant);
        if self.free.iter().any(|lease| is_for(lease) && !lease.is_fresh()) && !hears() {
            return Taken::Doubtful;
        }
        let fits = |lease: &Lease| is_for(lease) && lease.payload.len() >= bytes;
        if let Some(at) = self.free.iter().rposition(fits) {
            let lease = self.free.swap_remove(at);
            self.in_use.insert(lease.number, false);
            return Taken::Lease(lease);
        }
        if let Some(at) = self.free.iter().position(is_for) {
            return Taken::TooSmall(self.free.swap_remove(at));
        }
        Taken::None
    }

    /// The number to ask for another one with, if it is time for that.
    pub(crate) fn ask(&mut self, bulkhead: &str, tenant: &str) -> Option<u64> {
        let is_early = self.refused_at.is_some_and(|at| at.elapsed() < ASK_AGAIN_AFTER);
        if is_early || self.asked.len() >= ASKED_MAX {
            return None;
        }
        self.last_asked += 1;
        self.asked.insert(self.last_asked, (bulkhead.to_owned(), tenant.to_owned()));
        Some(self.last_asked)
    }

    /// Whether a lease may be on its way.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.asked.is_empty()
    }

    /// A lease has come. Returns its number, if it was asked for, and whether it can be used.
    pub(crate) fn come(&mut self, asked_as: u64, named: Named) -> Option<bool> {
        let coming = std::mem::take(&mut self.coming);
        let (bulkhead, tenant) = self.asked.remove(&asked_as)?;
        let mapped = map(named, coming);
        let is_good = mapped.is_ok();
        if let Ok((payload, result, result_file)) = mapped {
            let number = named.lease;
            let used_at = Instant::now();
            self.free.push(Lease { number, bulkhead, tenant, payload, result, result_file, used_at });
        } else {
            self.refused_at = Some(Instant::now());
        }
        Some(is_good)
    }

    /// One is called back. Returns the number of one to be given back at once.
    pub(crate) fn ended(&mut self, number: u64) -> Option<u64> {
        if let Some(at) = self.free.iter().position(|lease| lease.number == number) {
            return Some(self.free.swap_remove(at).number);
        }
        // One that was given back meanwhile is none of ours.
        if let Some(is_called_back) = self.in_use.get_mut(&number) {
            *is_called_back = true;
        }
        None
    }

    /// One that was asked for is not to be had.
    pub(crate) fn refused(&mut self, asked_as: u64) {
        self.asked.remove(&asked_as);
        self.refused_at = Some(Instant::now());
    }

    /// A job has used it. Returns its number if it is to be given back.
    pub(crate) fn put_back(&mut self, lease: Lease) -> Option<u64> {
        let number = lease.number;
        if self.in_use.remove(&number) == Some(true) {
            return Some(number);
        }
        self.free.push(Lease { used_at: Instant::now(), ..lease });
        None
    }

    /// A lease that was in use is given back.
    pub(crate) fn forget(&mut self, number: u64) {
        self.in_use.remove(&number);
    }
}

/// What there is for a payload.
pub(crate) enum Taken {
    Lease(Lease),
    TooSmall(Lease),
    /// It may be over, and what says so was not heard yet.
    Doubtful,
    None,
}

fn map(named: Named, files: Vec<OwnedFd>) -> io::Result<(Mapping, Mapping, OwnedFd)> {
    let [payload, result] =
        <[OwnedFd; FILES]>::try_from(files).map_err(|_| io::Error::other("they did not come along"))?;
    let mapped = Mapping::new(&result, named.bytes, false)?;
    Ok((Mapping::new(&payload, named.bytes, true)?, mapped, result))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The supervisor calls back what it has not heard of yet that it was given back, as after each job that is cancelled.
    #[test]
    fn calls_for_leases_that_were_given_back_leave_nothing() {
        let mut leases = Leases::default();
        for number in 0..1000 {
            leases.in_use.insert(number, false);
            leases.forget(number);
            assert_eq!(leases.ended(number), None);
        }
        assert!(leases.in_use.is_empty());
    }
}

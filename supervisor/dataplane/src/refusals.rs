//! Telling operators which clients are turned away, at either socket and with single jobs: each once at first, and then
//! now and then how often. However many come, what is told of them is bounded.

use std::collections::HashMap;
use std::time::Duration;

use bulkhead_api::{Severity, What};
use bulkhead_plane::entry::{Refusal, SocketKind};
use bulkhead_policy::Time;
use bulkhead_shared::RejectReason;

use super::DataPlane;
use super::slab::BulkheadIndex;

/// What happens to the same again is told no more often than this.
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Users and bulkheads that are told of each by itself; all others are told of together.
const TOLD_MAX: usize = 64;

/// What refusals are told of together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// A user's. Its processes come and go as it likes.
    User(u32),
    /// Those of the workers of a bulkhead; `None` if it cannot be told of which.
    Worker(Option<BulkheadIndex>),
    /// Users beyond [`TOLD_MAX`], and clients of which nothing is known.
    Others,
}

/// What was told, and what was not yet.
pub(super) struct Told {
    at: Time,
    unreported: u64,
    last: (SocketKind, Refusal),
}

/// Clients that were turned away lately.
#[derive(Default)]
pub(super) struct Refusals(HashMap<Subject, Told>);

impl Refusals {
    /// What it is counted as.
    fn subject(&self, refusal: &Refusal, worker: impl FnOnce(&[u32]) -> Option<BulkheadIndex>) -> Subject {
        let subject = match refusal.peer {
            _ if !refusal.line.is_empty() => Subject::Worker(worker(&refusal.line)),
            Some(peer) => Subject::User(peer.uid),
            None => Subject::Others,
        };
        // There are no more bulkheads than the file has; users can be as many as there are numbers.
        let is_known = self.0.contains_key(&subject) || matches!(subject, Subject::Worker(_));
        if is_known || self.0.len() < TOLD_MAX { subject } else { Subject::Others }
    }

    /// Takes one in. Returns it if it is to be told now.
    fn add(
        &mut self,
        now: Time,
        subject: Subject,
        socket: SocketKind,
        refusal: Refusal,
    ) -> Option<(SocketKind, Refusal)> {
        if let Some(told) = self.0.get_mut(&subject) {
            told.unreported += 1;
            told.last = (socket, refusal);
            return None;
        }
        self.0.insert(subject, Told { at: now, unreported: 0, last: (socket, refusal.clone()) });
        Some((socket, refusal))
    }

    /// A bulkhead's place is another's from here on.
    pub(super) fn forget(&mut self, bulkhead: BulkheadIndex) {
        self.0.remove(&Subject::Worker(Some(bulkhead)));
    }

    /// What has become due, and how many each stands for. A subject that was quiet is forgotten.
    fn due(&mut self, now: Time) -> Vec<(Subject, u64, SocketKind, Refusal)> {
        let mut due = Vec::new();
        self.0.retain(|&subject, told| {
            if now < told.at + TELL_AGAIN_AFTER {
                return true;
            }
            if told.unreported == 0 {
                return false;
            }
            let (socket, refusal) = told.last.clone();
            due.push((subject, std::mem::take(&mut told.unreported), socket, refusal));
            told.at = now;
            true
        });
        due
    }
}

impl DataPlane {
    /// A connection was turned away.
    pub(super) fn note_refusal(&mut self, socket: SocketKind, refusal: Refusal) {
        let worker = |line: &[u32]| self.bulkhead_of_line(line);
        let subject = self.entrance.refusals.subject(&refusal, worker);
        if let Some((socket, refusal)) = self.entrance.refusals.add(self.now, subject, socket, refusal) {
            self.tell_refusal(subject, 1, socket, &refusal);
        }
        self.want_housekeeping();
    }

    pub(super) fn look_after_refusals(&mut self) {
        for (subject, count, socket, refusal) in self.entrance.refusals.due(self.now) {
            self.tell_refusal(subject, count, socket, &refusal);
        }
        if !self.entrance.refusals.0.is_empty() {
            self.want_housekeeping();
        }
    }

    /// The bulkhead with a worker in this line of ancestors.
    fn bulkhead_of_line(&self, line: &[u32]) -> Option<BulkheadIndex> {
        let mut links = self.links.values();
        let link = links.find(|link| link.pid().is_some_and(|pid| line.contains(&pid)))?;
        Some(self.compartments[link.compartment].bulkhead)
    }

    fn tell_refusal(&mut self, subject: Subject, count: u64, socket: SocketKind, refusal: &Refusal) {
        let (socket, reason) = (socket.name().into(), refusal.reason.name().into());
        let (uid, gid) = (refusal.peer.map(|peer| peer.uid), refusal.peer.map(|peer| peer.gid));
        let pid = refusal.peer.and_then(|peer| peer.pid);
        let (message, refused) = (refusal.message.to_string(), count);
        match subject {
            // No honest worker does that.
            Subject::Worker(bulkhead) => {
                let what = What::WorkerRefused { socket, uid, gid, pid, reason, message, refused };
                match bulkhead {
                    Some(bulkhead) => self.bulkhead_event(Severity::Critical, bulkhead, what),
                    None => self.event(Severity::Critical, None, what),
                }
            }
            Subject::User(_) | Subject::Others => {
                let is_forbidden = refusal.reason == RejectReason::Forbidden;
                // Others have gone before they could be looked at, as probes do.
                let severity = if is_forbidden { Severity::Warning } else { Severity::Info };
                let what = What::AccessRefused { socket, uid, gid, pid, reason, message, refused };
                self.event(severity, None, what);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabIndex;
    use bulkhead_linux::peer::Peer;

    fn refusal(uid: u32, line: &[u32]) -> Refusal {
        let peer = Peer { uid, gid: uid, pid: Some(uid) };
        Refusal { line: line.to_vec(), ..Refusal::forbidden(peer, "no".into()) }
    }

    #[test]
    fn a_crowd_is_told_of_now_and_then() {
        let mut refusals = Refusals::default();
        let mut told = 0;
        for n in 0..100_000u32 {
            let refusal = refusal(n % 1000, &[]);
            let subject = refusals.subject(&refusal, |_| None);
            told += usize::from(refusals.add(Time::ZERO, subject, SocketKind::Jobs, refusal).is_some());
        }
        // All subjects without a place of their own have one together.
        assert_eq!((told, refusals.0.len()), (TOLD_MAX + 1, TOLD_MAX + 1));
        assert!(refusals.due(Time::ZERO).is_empty());
        let later = Time::ZERO + TELL_AGAIN_AFTER;
        let due = refusals.due(later);
        let counted: u64 = due.iter().map(|(_, count, ..)| count).sum();
        assert_eq!((due.len(), counted), (TOLD_MAX + 1, 100_000 - told as u64));
        assert!(refusals.due(later).is_empty());
        assert!(refusals.due(later + TELL_AGAIN_AFTER).is_empty());
        assert!(refusals.0.is_empty());
        // Workers are not lost in a crowd.
        for uid in 0..100 {
            let refusal = refusal(uid, &[]);
            let subject = refusals.subject(&refusal, |_| None);
            refusals.add(later, subject, SocketKind::Jobs, refusal);
        }
        let (worker, place) = (refusal(7, &[3, 2, 1]), BulkheadIndex::from_number(5));
        assert_eq!(
            refusals.subject(&worker, |line| (line == [3, 2, 1]).then_some(place)),
            Subject::Worker(Some(BulkheadIndex::from_number(5)))
        );
        assert_eq!(worker.reason, RejectReason::Forbidden);
    }
}

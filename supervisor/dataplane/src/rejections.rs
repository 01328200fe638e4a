//! Reports rejected clients to operators, for both sockets and for single jobs. The first rejection is reported at
//! once, and later rejections are counted and reported at intervals. The number of events is bounded for any number
//! of clients.

use std::collections::HashMap;
use std::time::Duration;

use bulkhead_api::{Severity, What};
use bulkhead_plane::entry::{Refusal, SocketKind};
use bulkhead_policy::Time;
use bulkhead_shared::RejectReason;

use super::DataPlane;
use super::slab::BulkheadIndex;

/// Minimum interval between events about a subject.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of subjects before further users are reported together.
const SUBJECTS_MAX: usize = 64;

/// Subject of events about rejections. All rejections of a subject are reported together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// A user with all processes, because a user can start any number of them.
    User(u32),
    /// The workers of a bulkhead. `None` if the bulkhead is not known.
    Worker(Option<BulkheadIndex>),
    /// Users beyond [`SUBJECTS_MAX`], and clients of unknown identity.
    Others,
}

/// Last event about a subject, and the rejections after it.
pub(super) struct Reported {
    at: Time,
    unreported: u64,
    last: (SocketKind, Refusal),
}

/// Recently rejected clients.
#[derive(Default)]
pub(super) struct RejectionReports(HashMap<Subject, Reported>);

impl RejectionReports {
    /// Returns the subject of a rejection.
    fn subject(&self, refusal: &Refusal, worker: impl FnOnce(&[u32]) -> Option<BulkheadIndex>) -> Subject {
        let subject = match refusal.peer {
            _ if !refusal.line.is_empty() => Subject::Worker(worker(&refusal.line)),
            Some(peer) => Subject::User(peer.uid),
            None => Subject::Others,
        };
        // The number of bulkheads is bounded by the configuration, but the number of users is not.
        let is_known = self.0.contains_key(&subject) || matches!(subject, Subject::Worker(_));
        if is_known || self.0.len() < SUBJECTS_MAX { subject } else { Subject::Others }
    }

    /// Records a rejection. Returns the rejection if an event must be sent now.
    fn add(
        &mut self,
        now: Time,
        subject: Subject,
        socket: SocketKind,
        refusal: Refusal,
    ) -> Option<(SocketKind, Refusal)> {
        if let Some(reported) = self.0.get_mut(&subject) {
            reported.unreported += 1;
            reported.last = (socket, refusal);
            return None;
        }
        self.0.insert(subject, Reported { at: now, unreported: 0, last: (socket, refusal.clone()) });
        Some((socket, refusal))
    }

    /// Forgets a bulkhead whose index will be reused.
    pub(super) fn forget(&mut self, bulkhead: BulkheadIndex) {
        self.0.remove(&Subject::Worker(Some(bulkhead)));
    }

    /// Returns the subjects with a due event, and the number of rejections for each. Forgets subjects without new
    /// rejections.
    fn due(&mut self, now: Time) -> Vec<(Subject, u64, SocketKind, Refusal)> {
        let mut due = Vec::new();
        self.0.retain(|&subject, reported| {
            if now < reported.at + REPEAT_INTERVAL {
                return true;
            }
            if reported.unreported == 0 {
                return false;
            }
            let (socket, refusal) = reported.last.clone();
            due.push((subject, std::mem::take(&mut reported.unreported), socket, refusal));
            reported.at = now;
            true
        });
        due
    }
}

impl DataPlane {
    /// Records the rejection of a connection or a job.
    pub(super) fn report_rejection(&mut self, socket: SocketKind, refusal: Refusal) {
        let worker = |line: &[u32]| self.bulkhead_of_ancestors(line);
        let subject = self.acceptor.rejections.subject(&refusal, worker);
        if let Some((socket, refusal)) = self.acceptor.rejections.add(self.now, subject, socket, refusal) {
            self.send_rejection_event(subject, 1, socket, &refusal);
        }
        self.schedule_checks();
    }

    pub(super) fn report_skipped_rejections(&mut self) {
        for (subject, count, socket, refusal) in self.acceptor.rejections.due(self.now) {
            self.send_rejection_event(subject, count, socket, &refusal);
        }
        if !self.acceptor.rejections.0.is_empty() {
            self.schedule_checks();
        }
    }

    /// Returns the bulkhead with a worker among these ancestors.
    fn bulkhead_of_ancestors(&self, line: &[u32]) -> Option<BulkheadIndex> {
        let mut links = self.links.values();
        let link = links.find(|link| link.pid().is_some_and(|pid| line.contains(&pid)))?;
        Some(self.compartments[link.compartment].bulkhead)
    }

    fn send_rejection_event(&mut self, subject: Subject, count: u64, socket: SocketKind, refusal: &Refusal) {
        let (socket, reason) = (socket.name().into(), refusal.reason.name().into());
        let (uid, gid) = (refusal.peer.map(|peer| peer.uid), refusal.peer.map(|peer| peer.gid));
        let pid = refusal.peer.and_then(|peer| peer.pid);
        let (message, refused) = (refusal.message.to_string(), count);
        match subject {
            // An honest worker does not do that.
            Subject::Worker(bulkhead) => {
                let what = What::WorkerRefused { socket, uid, gid, pid, reason, message, refused };
                match bulkhead {
                    Some(bulkhead) => self.bulkhead_event(Severity::Critical, bulkhead, what),
                    None => self.event(Severity::Critical, None, what),
                }
            }
            Subject::User(_) | Subject::Others => {
                let is_forbidden = refusal.reason == RejectReason::Forbidden;
                // All other clients disconnected before being identified, as probes do.
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
        let mut rejections = RejectionReports::default();
        let mut reported = 0;
        for n in 0..100_000u32 {
            let refusal = refusal(n % 1000, &[]);
            let subject = rejections.subject(&refusal, |_| None);
            reported += usize::from(rejections.add(Time::ZERO, subject, SocketKind::Jobs, refusal).is_some());
        }
        // The subjects beyond the maximum share an entry.
        assert_eq!((reported, rejections.0.len()), (SUBJECTS_MAX + 1, SUBJECTS_MAX + 1));
        assert!(rejections.due(Time::ZERO).is_empty());
        let later = Time::ZERO + REPEAT_INTERVAL;
        let due = rejections.due(later);
        let counted: u64 = due.iter().map(|(_, count, ..)| count).sum();
        assert_eq!((due.len(), counted), (SUBJECTS_MAX + 1, 100_000 - reported as u64));
        assert!(rejections.due(later).is_empty());
        assert!(rejections.due(later + REPEAT_INTERVAL).is_empty());
        assert!(rejections.0.is_empty());
        // Workers keep separate entries when many users are rejected.
        for uid in 0..100 {
            let refusal = refusal(uid, &[]);
            let subject = rejections.subject(&refusal, |_| None);
            rejections.add(later, subject, SocketKind::Jobs, refusal);
        }
        let (worker, place) = (refusal(7, &[3, 2, 1]), BulkheadIndex::from_number(5));
        assert_eq!(
            rejections.subject(&worker, |line| (line == [3, 2, 1]).then_some(place)),
            Subject::Worker(Some(BulkheadIndex::from_number(5)))
        );
        assert_eq!(worker.reason, RejectReason::Forbidden);
    }
}

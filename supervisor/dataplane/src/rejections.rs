//! Decides when to report rejected connections to operators, and also jobs that were rejected for lack of permission.
//! The first rejection of a group of clients is reported immediately. Later ones are counted and reported at intervals,
//! so that the number of events does not grow with the number of clients. The wiring and the control plane reject the
//! clients.

use std::collections::HashMap;
use std::time::Duration;

use bulkhead_api::{EventKind, Severity};
use bulkhead_plane::peer_check::{ClientRejection, SocketKind};
use bulkhead_policy::Time;
use bulkhead_shared::RejectReason;

use super::slab::BulkheadIndex;

/// Minimum interval between events about the same group of clients.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of groups that are reported separately. Any further users are reported together as one group.
const SUBJECTS_MAX: usize = 64;

/// Group of clients whose rejections are reported together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Subject {
    /// All processes of a user. They are reported together because a user can start any number of processes.
    User(u32),
    /// The workers of a bulkhead. `None` if the bulkhead is unknown.
    Worker(Option<BulkheadIndex>),
    /// Clients whose identity is unknown, and users beyond the first [`SUBJECTS_MAX`] groups.
    Others,
}

/// Time of the last event about a group of clients, and the rejections since then.
struct Reported {
    at: Time,
    unreported: u64,
    last: (SocketKind, ClientRejection),
}

/// Recent rejections, by subject.
#[derive(Default)]
pub(super) struct RejectionReports(HashMap<Subject, Reported>);

impl RejectionReports {
    /// Returns the group that a rejected client belongs to.
    fn subject(
        &self,
        refusal: &ClientRejection,
        worker: impl FnOnce(&[u32]) -> Option<BulkheadIndex>,
    ) -> Subject {
        let subject = match refusal.peer {
            _ if !refusal.ancestry.is_empty() => Subject::Worker(worker(&refusal.ancestry)),
            Some(peer) => Subject::User(peer.uid),
            None => Subject::Others,
        };
        // The limit applies only to users, because the configuration limits the number of bulkheads.
        let is_known = self.0.contains_key(&subject) || matches!(subject, Subject::Worker(_));
        if is_known || self.0.len() < SUBJECTS_MAX { subject } else { Subject::Others }
    }

    /// Records a rejection. Returns an event if one is due. `worker` finds the worker among the given ancestors of a
    /// client process, and returns the bulkhead of the worker.
    pub(super) fn add(
        &mut self,
        now: Time,
        socket: SocketKind,
        refusal: ClientRejection,
        worker: impl FnOnce(&[u32]) -> Option<BulkheadIndex>,
    ) -> Option<RejectionEvent> {
        let subject = self.subject(&refusal, worker);
        if let Some(reported) = self.0.get_mut(&subject) {
            reported.unreported += 1;
            reported.last = (socket, refusal);
            return None;
        }
        let event = subject.event(1, socket, &refusal);
        self.0.insert(subject, Reported { at: now, unreported: 0, last: (socket, refusal) });
        Some(event)
    }

    /// Returns true if [`Self::due`] must be called later.
    pub(super) fn needs_checks(&self) -> bool {
        !self.0.is_empty()
    }

    /// Removes the entry for a bulkhead whose index will be reused.
    pub(super) fn forget(&mut self, bulkhead: BulkheadIndex) {
        self.0.remove(&Subject::Worker(Some(bulkhead)));
    }

    /// Returns the events that are due, each with the number of rejections since the previous event. Removes entries
    /// that have no new rejections.
    pub(super) fn due(&mut self, now: Time) -> Vec<RejectionEvent> {
        let mut due = Vec::new();
        self.0.retain(|&subject, reported| {
            if now < reported.at + REPEAT_INTERVAL {
                return true;
            }
            if reported.unreported == 0 {
                return false;
            }
            let count = std::mem::take(&mut reported.unreported);
            due.push(subject.event(count, reported.last.0, &reported.last.1));
            reported.at = now;
            true
        });
        due
    }
}

/// An event about one or more rejections, and its severity. Also contains the bulkhead if the rejected clients were
/// workers.
pub(super) type RejectionEvent = (Option<BulkheadIndex>, Severity, EventKind);

impl Subject {
    fn event(self, refused: u64, socket: SocketKind, refusal: &ClientRejection) -> RejectionEvent {
        let (socket, reason) = (socket.name().into(), refusal.reason.name().into());
        let (uid, gid) = (refusal.peer.map(|peer| peer.uid), refusal.peer.map(|peer| peer.gid));
        let pid = refusal.peer.and_then(|peer| peer.pid);
        let message = refusal.message.to_string();
        match self {
            // A well-behaved worker does not connect to this socket.
            Self::Worker(bulkhead) => {
                let what = EventKind::WorkerRefused { socket, uid, gid, pid, reason, message, refused };
                (bulkhead, Severity::Critical, what)
            }
            Self::User(_) | Self::Others => {
                let is_forbidden = refusal.reason == RejectReason::Forbidden;
                // The other clients disconnected before they were identified, for example because they only probed the
                // socket.
                let severity = if is_forbidden { Severity::Warning } else { Severity::Info };
                let what = EventKind::AccessRefused { socket, uid, gid, pid, reason, message, refused };
                (None, severity, what)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slab::SlabIndex;
    use bulkhead_linux::peer::Peer;

    fn refusal(uid: u32, line: &[u32]) -> ClientRejection {
        let peer = Peer { uid, gid: uid, pid: Some(uid) };
        ClientRejection { ancestry: line.to_vec(), ..ClientRejection::forbidden(peer, "no".into()) }
    }

    fn count(event: &RejectionEvent) -> u64 {
        match event.2 {
            EventKind::WorkerRefused { refused, .. } | EventKind::AccessRefused { refused, .. } => refused,
            _ => 0,
        }
    }

    #[test]
    fn reports_rejections_of_many_users_at_intervals() {
        let mut rejections = RejectionReports::default();
        let mut reported = 0;
        for n in 0..100_000u32 {
            let event = rejections.add(Time::ZERO, SocketKind::Jobs, refusal(n % 1000, &[]), |_| None);
            reported += event.as_ref().map_or(0, count);
        }
        // All users beyond the maximum share one entry.
        assert_eq!((reported as usize, rejections.0.len()), (SUBJECTS_MAX + 1, SUBJECTS_MAX + 1));
        assert!(rejections.due(Time::ZERO).is_empty());
        let later = Time::ZERO + REPEAT_INTERVAL;
        let due = rejections.due(later);
        let counted: u64 = due.iter().map(count).sum();
        assert_eq!((due.len(), counted), (SUBJECTS_MAX + 1, 100_000 - reported));
        assert!(rejections.due(later).is_empty());
        assert!(rejections.due(later + REPEAT_INTERVAL).is_empty());
        assert!(!rejections.needs_checks());
    }

    #[test]
    fn reports_rejected_workers_separately_from_users() {
        let mut rejections = RejectionReports::default();
        for uid in 0..100 {
            rejections.add(Time::ZERO, SocketKind::Jobs, refusal(uid, &[]), |_| None);
        }
        let bulkhead = BulkheadIndex::from_number(5);
        let worker = refusal(7, &[3, 2, 1]);
        let event = rejections
            .add(Time::ZERO, SocketKind::Jobs, worker, |line| (line == [3, 2, 1]).then_some(bulkhead));
        assert!(event.is_some_and(|event| event.0 == Some(bulkhead)));
        rejections.forget(bulkhead);
        let again = refusal(7, &[3, 2, 1]);
        assert!(rejections.add(Time::ZERO, SocketKind::Jobs, again, |_| Some(bulkhead)).is_some());
    }
}

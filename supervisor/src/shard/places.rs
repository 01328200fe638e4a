//! The places that clients share: one user alone may have all of them. If another finds none free, the connection
//! that has been idle for longest gives its place, of the user that has most.

use std::collections::HashMap;

use bulkhead_shared::RejectReason;

use super::Shard;
use super::sessions::Session;

impl Shard {
    /// The connection that is to go for one of this user: none if that user would have more than the one that gives,
    /// or if the one that gives has no idle ones.
    pub(super) fn idle_session_for(&self, uid: u32) -> Option<usize> {
        let clients = || self.sessions.iter().enumerate().filter_map(client);
        let mut counts = HashMap::new();
        clients().for_each(|(_, session)| *counts.entry(session.uid).or_insert(0_usize) += 1);
        let own = counts.remove(&uid).unwrap_or(0);
        let (giver, most) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        if own >= most {
            return None;
        }
        let mut of_giver: Vec<_> = clients().filter(|(_, session)| session.uid == giver).collect();
        of_giver.sort_unstable_by_key(|(_, session)| session.active_at);
        of_giver.into_iter().find(|(_, session)| Self::is_idle(session)).map(|(index, _)| index)
    }

    pub(super) fn close_idle(&mut self, index: usize) {
        let message = "this connection was idle, and its user has most of the connections that there may be \
                       (max_clients): another user needs one; connect again";
        self.refuse_session(index, RejectReason::Overloaded, message);
        self.flush_session(index);
        if self.sessions[index].is_some() {
            self.drop_session(index);
        }
    }
}

/// A connection of the jobs socket.
fn client((index, session): (usize, &Option<Session>)) -> Option<(usize, &Session)> {
    let session = session.as_ref()?;
    session.place.is_none().then_some((index, session))
}

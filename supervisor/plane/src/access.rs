//! Permissions of clients (`[[access]]`). The identity of a client is determined once, when it connects. Each
//! job then only checks the entries that match its client.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX, truncate};

use crate::entry::{self, Refusal};
use bulkhead_config::{AccessConfig, Config, Who};
use bulkhead_linux::peer::{self, Peer, UnrelatedProcesses};

/// Permissions of all clients.
pub struct Access {
    /// User id of the supervisor.
    own: u32,
    /// Entries, which apply to root and the supervisor's user too. If there are none, only these two have
    /// access, without restrictions.
    entries: Vec<Arc<Entry>>,
    /// Processes that connected before. Caches the identity check, which is the main cost of a new
    /// connection.
    unrelated: UnrelatedProcesses,
}

/// An entry of `[[access]]`. Stores bulkheads by name, because a reload can add and remove bulkheads.
pub struct Entry {
    who: Who,
    bulkheads: Option<HashSet<Box<str>>>,
    tenants: Option<HashSet<Box<str>>>,
}

/// Permissions of one client.
pub enum Grant {
    /// No restrictions.
    Everything,
    /// Everything that at least one of these entries allows.
    Entries(Box<[Arc<Entry>]>),
}

impl Grant {
    pub fn nothing() -> Self {
        Self::Entries(Box::default())
    }
}

impl Access {
    pub fn new(config: &Config, own: u32) -> Self {
        let set = |names: &Vec<String>| names.iter().map(|name| name.as_str().into()).collect();
        let entry = |AccessConfig { who, bulkheads, tenants }: &AccessConfig| {
            let (bulkheads, tenants) = (bulkheads.as_ref().map(set), tenants.as_ref().map(set));
            Arc::new(Entry { who: *who, bulkheads, tenants })
        };
        Self {
            own,
            entries: config.access.iter().map(entry).collect(),
            unrelated: UnrelatedProcesses::default(),
        }
    }

    /// True if `[[access]]` has entries.
    pub fn has_entries(&self) -> bool {
        !self.entries.is_empty()
    }

    /// True if the peer runs as the supervisor's user, which workers share unless they have another.
    pub fn is_own(&self, peer: Peer) -> bool {
        peer.uid == self.own
    }

    /// Rejects workers and their descendants.
    pub fn check_descent(&self, socket: &impl AsFd, peer: Peer) -> Result<(), Refusal> {
        entry::check_descent(socket, peer, &self.unrelated)
    }

    /// Returns the permissions of the client that connected this socket.
    pub fn grant(&self, peer: Peer, socket: &impl AsFd) -> Result<Grant, Refusal> {
        let (uid, own, entries) = (peer.uid, self.own, &self.entries);
        if entries.is_empty() {
            if self.is_own(peer) || uid == 0 {
                return Ok(Grant::Everything);
            }
            let message = format!("user {uid} cannot submit jobs here: only user {own} and root can");
            return Err(Refusal::forbidden(peer, message));
        }
        let fitting = fitting(entries, peer, socket).map_err(|error| Refusal::unknown(Some(peer), &error))?;
        if fitting.is_empty() {
            let message = format!(
                "user {uid} cannot submit jobs here: no [[access]] in the supervisor's configuration names \
                 that user or a group of that user"
            );
            return Err(Refusal::forbidden(peer, message));
        }
        Ok(Grant::Entries(fitting))
    }
}

impl Entry {
    fn reaches(&self, name: &str, is_there: bool) -> bool {
        self.bulkheads.as_ref().is_none_or(|some| is_there && some.contains(name))
    }

    fn takes(&self, tenant: &str) -> bool {
        self.tenants.as_ref().is_none_or(|some| some.contains(tenant))
    }
}

/// Returns the entries that match the process that connected this socket.
fn fitting(entries: &[Arc<Entry>], peer: Peer, socket: &impl AsFd) -> io::Result<Box<[Arc<Entry>]>> {
    let has_groups = entries.iter().any(|entry| matches!(entry.who, Who::Gid(_)));
    let mut groups = if has_groups { peer::groups(socket)? } else { Vec::new() };
    groups.push(peer.gid);
    let fits = |entry: &&Arc<Entry>| match entry.who {
        Who::Uid(uid) => uid == peer.uid,
        Who::Gid(gid) => groups.contains(&gid),
    };
    Ok(entries.iter().filter(fits).cloned().collect())
}

/// Returns the reason why a client with these entries must not send the job, or `None` if it may. Only
/// clients with access to all bulkheads can learn whether a bulkhead exists.
pub fn refusal(entries: &[Arc<Entry>], (name, is_there): (&str, bool), tenant: &str) -> Option<String> {
    let mut reaching = entries.iter().filter(|entry| entry.reaches(name, is_there)).peekable();
    let name = truncate(name, BULKHEAD_NAME_BYTES_MAX).escape_debug();
    if reaching.peek().is_none() {
        return Some(format!("you cannot use a bulkhead '{name}'"));
    }
    // An unknown bulkhead has no tenants to check. The job is then rejected as `not_found`.
    if !is_there || reaching.any(|entry| entry.takes(tenant)) {
        return None;
    }
    Some(match truncate(tenant, TENANT_BYTES_MAX) {
        "" => format!("each of your jobs for bulkhead '{name}' must name a permitted tenant"),
        tenant => {
            let tenant = tenant.escape_debug();
            format!("you cannot send jobs of tenant '{tenant}' to bulkhead '{name}'")
        }
    })
}

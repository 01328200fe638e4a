//! `[[access]]`: what each client may do. Its identity was found out once, when it connected; a job then costs a
//! look at the entries that fit its client.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX, cut};

use crate::entry::{self, Refusal};
use bulkhead_config::{AccessConfig, Config, Who};
use bulkhead_linux::peer::{self, Outsiders, Peer};

/// What each client may do.
pub struct Access {
    /// The supervisor's own user.
    own: u32,
    /// The entries, which bind root and the own user as well; without any, these two may do everything.
    entries: Vec<Arc<Entry>>,
    /// Processes that connected before: what a crowd of connections costs is mostly to find out their identity.
    outsiders: Outsiders,
}

/// One entry. Bulkheads come and go, and so go by their names.
pub struct Entry {
    who: Who,
    bulkheads: Option<HashSet<Box<str>>>,
    tenants: Option<HashSet<Box<str>>>,
}

/// What one client may do.
pub enum Grant {
    /// Everything.
    Everything,
    /// What any of these entries allows.
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
        Self { own, entries: config.access.iter().map(entry).collect(), outsiders: Outsiders::default() }
    }

    /// Whether some clients may do less than others.
    pub fn has_entries(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Whether it is the user that workers share, unless they are given another.
    pub fn is_own(&self, peer: Peer) -> bool {
        peer.uid == self.own
    }

    /// A worker may not connect, nor what it started.
    pub fn check_descent(&self, socket: &impl AsFd, peer: Peer) -> Result<(), Refusal> {
        entry::check_descent(socket, peer, &self.outsiders)
    }

    /// What the client that connected this socket may do.
    pub fn grant(&self, peer: Peer, socket: &impl AsFd) -> Result<Grant, Refusal> {
        let (uid, own, entries) = (peer.uid, self.own, &self.entries);
        if entries.is_empty() {
            if self.is_own(peer) || uid == 0 {
                return Ok(Grant::Everything);
            }
            let message = format!("user {uid} may not submit jobs here: only user {own} and root may");
            return Err(Refusal::forbidden(peer, message));
        }
        let fitting = fitting(entries, peer, socket).map_err(|error| Refusal::unknown(Some(peer), &error))?;
        if fitting.is_empty() {
            let message = format!(
                "user {uid} may not submit jobs here: no [[access]] in the supervisor's configuration is for \
                 that user or its groups"
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

/// The entries that are for the process that connected this socket.
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

/// Why a client that these entries fit may not send a job of this tenant to this bulkhead; `None` if it may.
/// Whether there is one of the name at all, is told only to clients that may use all.
pub fn refusal(entries: &[Arc<Entry>], (name, is_there): (&str, bool), tenant: &str) -> Option<String> {
    let mut reaching = entries.iter().filter(|entry| entry.reaches(name, is_there)).peekable();
    let name = cut(name, BULKHEAD_NAME_BYTES_MAX).escape_debug();
    if reaching.peek().is_none() {
        return Some(format!("you may not use a bulkhead '{name}'"));
    }
    // Without it there is nothing that tenants could be of.
    if !is_there || reaching.any(|entry| entry.takes(tenant)) {
        return None;
    }
    Some(match cut(tenant, TENANT_BYTES_MAX) {
        "" => format!("each of your jobs for bulkhead '{name}' must name a tenant that it may be of"),
        tenant => {
            let tenant = tenant.escape_debug();
            format!("you may not send jobs of tenant '{tenant}' to bulkhead '{name}'")
        }
    })
}

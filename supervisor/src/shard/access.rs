//! `[[access]]`: what each client may do. Who it is was found out once, when it connected; a job then costs a
//! look at the entries that fit its client.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::AsFd;

use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX, cut};

use crate::config::{AccessConfig, Config, Who};
use crate::entry::Refusal;
use crate::keeper::{self, Peer};

/// Who may do what.
pub(super) enum Access {
    /// The supervisor's own user, which this is, and root: everything.
    Own(u32),
    /// Those of the entries, root and the own user not excepted.
    Entries(Vec<Entry>),
}

/// One entry, with bulkheads by their places.
pub(super) struct Entry {
    who: Who,
    bulkheads: Option<HashSet<usize>>,
    tenants: Option<HashSet<Box<str>>>,
}

/// What one client may do.
pub(super) enum Grant {
    /// Everything.
    Everything,
    /// What any of the entries at these places allows.
    Entries(Box<[usize]>),
}

impl Grant {
    pub(super) fn nothing() -> Self {
        Self::Entries(Box::default())
    }
}

impl Access {
    pub(super) fn new(config: &Config, own: u32) -> Self {
        if config.access.is_empty() {
            return Self::Own(own);
        }
        let places: HashMap<&str, usize> =
            config.bulkheads.iter().enumerate().map(|(place, b)| (b.name.as_str(), place)).collect();
        let place = |name: &String| places.get(name.as_str()).copied();
        let entry = |entry: &AccessConfig| Entry {
            who: entry.who,
            bulkheads: entry.bulkheads.as_ref().map(|names| names.iter().filter_map(place).collect()),
            tenants: entry
                .tenants
                .as_ref()
                .map(|names| names.iter().map(|name| name.as_str().into()).collect()),
        };
        Self::Entries(config.access.iter().map(entry).collect())
    }

    /// What whoever connected this socket may do.
    pub(super) fn grant(&self, peer: Peer, socket: &impl AsFd) -> Result<Grant, Refusal> {
        let uid = peer.uid;
        let entries = match self {
            Self::Own(own) if uid == *own || uid == 0 => return Ok(Grant::Everything),
            Self::Own(own) => {
                let message = format!("user {uid} may not submit jobs here: only user {own} and root may");
                return Err(Refusal::forbidden(peer, message));
            }
            Self::Entries(entries) => entries,
        };
        let places = fitting(entries, peer, socket).map_err(|error| Refusal::unknown(Some(peer), &error))?;
        if places.is_empty() {
            let message = format!(
                "user {uid} may not submit jobs here: no [[access]] in the supervisor's configuration is for \
                 that user or its groups"
            );
            return Err(Refusal::forbidden(peer, message));
        }
        Ok(Grant::Entries(places))
    }

    /// Why a client may not send a job of this tenant to this bulkhead; `None` if it may. `place` is that of
    /// the bulkhead, if there is one of the name: whether there is, is told only to those who may use all.
    pub(super) fn refusal(
        &self,
        grant: &Grant,
        (name, place): (&str, Option<usize>),
        tenant: &str,
    ) -> Option<String> {
        let Grant::Entries(places) = grant else { return None };
        let entries = match self {
            Self::Own(_) => &[],
            Self::Entries(entries) => &entries[..],
        };
        let mut reaching = places.iter().map(|&at| &entries[at]).filter(|e| e.reaches(place)).peekable();
        let name = cut(name, BULKHEAD_NAME_BYTES_MAX).escape_debug();
        if reaching.peek().is_none() {
            return Some(format!("you may not use a bulkhead '{name}'"));
        }
        // There is nothing that tenants could be of.
        place?;
        if reaching.any(|entry| entry.takes(tenant)) {
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
}

impl Entry {
    fn reaches(&self, place: Option<usize>) -> bool {
        match (&self.bulkheads, place) {
            (None, _) => true,
            (Some(some), Some(place)) => some.contains(&place),
            (Some(_), None) => false,
        }
    }

    fn takes(&self, tenant: &str) -> bool {
        self.tenants.as_ref().is_none_or(|some| some.contains(tenant))
    }
}

/// The places of the entries that fit.
fn fitting(entries: &[Entry], peer: Peer, socket: &impl AsFd) -> io::Result<Box<[usize]>> {
    let has_groups = entries.iter().any(|entry| matches!(entry.who, Who::Gid(_)));
    let mut groups = if has_groups { keeper::groups(socket)? } else { Vec::new() };
    groups.push(peer.gid);
    let fits = |entry: &Entry| match entry.who {
        Who::Uid(uid) => uid == peer.uid,
        Who::Gid(gid) => groups.contains(&gid),
    };
    Ok(entries.iter().enumerate().filter(|(_, entry)| fits(entry)).map(|(place, _)| place).collect())
}

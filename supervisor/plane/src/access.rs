//! Permissions of clients, as configured in `[[access]]`. A client is identified once, when it connects. For
//! each job, only the rules that match the client are checked.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use bulkhead_shared::limits::{BULKHEAD_NAME_BYTES_MAX, TENANT_BYTES_MAX, truncate};

use crate::peer_check::{self, ClientRejection};
use bulkhead_config::{AccessConfig, Config, Who};
use bulkhead_linux::peer::{self, Peer, UnrelatedProcesses};

/// Permissions of all clients.
pub struct Access {
    /// User id of the supervisor.
    own_uid: u32,
    /// Access rules in the order of the file. They also apply to root and the supervisor's user. Without any
    /// rule, only these two users have access, and have no restrictions.
    rules: Vec<Arc<AccessRule>>,
    /// Cache of processes that are known not to descend from the supervisor. Without it, this check would be
    /// the main cost of a new connection.
    unrelated: UnrelatedProcesses,
}

/// A rule of `[[access]]`. The rule contains names of bulkheads, because a reload can add and remove
/// bulkheads.
pub struct AccessRule {
    who: Who,
    bulkheads: Option<HashSet<Box<str>>>,
    tenants: Option<HashSet<Box<str>>>,
}

/// Permissions of one client.
pub enum Grant {
    /// The client can use all bulkheads and all tenants.
    Unrestricted,
    /// The client can do what at least one of these rules allows.
    Rules(Box<[Arc<AccessRule>]>),
}

impl Grant {
    pub fn none() -> Self {
        Self::Rules(Box::default())
    }
}

impl Access {
    pub fn new(config: &Config, own_uid: u32) -> Self {
        let set = |names: &Vec<String>| names.iter().map(|name| name.as_str().into()).collect();
        let rule = |AccessConfig { who, bulkheads, tenants }: &AccessConfig| {
            let (bulkheads, tenants) = (bulkheads.as_ref().map(set), tenants.as_ref().map(set));
            Arc::new(AccessRule { who: *who, bulkheads, tenants })
        };
        Self {
            own_uid,
            rules: config.access.iter().map(rule).collect(),
            unrelated: UnrelatedProcesses::default(),
        }
    }

    pub fn has_rules(&self) -> bool {
        !self.rules.is_empty()
    }

    /// Returns true if the peer runs as the supervisor's user. Workers without a separate user also run as
    /// the supervisor's user.
    pub fn is_own_user(&self, peer: Peer) -> bool {
        peer.uid == self.own_uid
    }

    /// Rejects the peer if it is a worker or descends from one.
    pub fn check_descent(&self, socket: &impl AsFd, peer: Peer) -> Result<(), ClientRejection> {
        peer_check::check_descent(socket, peer, &self.unrelated)
    }

    /// Returns the permissions of the client at the other end of `socket`, or a rejection if it has none.
    pub fn grant(&self, peer: Peer, socket: &impl AsFd) -> Result<Grant, ClientRejection> {
        let (uid, own, rules) = (peer.uid, self.own_uid, &self.rules);
        if rules.is_empty() {
            if self.is_own_user(peer) || uid == 0 {
                return Ok(Grant::Unrestricted);
            }
            let message = format!("user {uid} cannot submit jobs here: only user {own} and root can");
            return Err(ClientRejection::forbidden(peer, message));
        }
        let matching_rules = matching_rules(rules, peer, socket)
            .map_err(|error| ClientRejection::unidentified(Some(peer), &error))?;
        if matching_rules.is_empty() {
            let message = format!(
                "user {uid} cannot submit jobs here: no [[access]] in the supervisor's configuration names \
                 that user or a group of that user"
            );
            return Err(ClientRejection::forbidden(peer, message));
        }
        Ok(Grant::Rules(matching_rules))
    }
}

impl AccessRule {
    fn allows_bulkhead(&self, name: &str, exists: bool) -> bool {
        self.bulkheads.as_ref().is_none_or(|some| exists && some.contains(name))
    }

    fn allows_tenant(&self, tenant: &str) -> bool {
        self.tenants.as_ref().is_none_or(|some| some.contains(tenant))
    }
}

/// Returns the rules that match the user or the groups of the peer process.
fn matching_rules(
    rules: &[Arc<AccessRule>],
    peer: Peer,
    socket: &impl AsFd,
) -> io::Result<Box<[Arc<AccessRule>]>> {
    let has_groups = rules.iter().any(|rule| matches!(rule.who, Who::Gid(_)));
    let mut groups = if has_groups { peer::groups(socket)? } else { Vec::new() };
    groups.push(peer.gid);
    let matches = |rule: &&Arc<AccessRule>| match rule.who {
        Who::Uid(uid) => uid == peer.uid,
        Who::Gid(gid) => groups.contains(&gid),
    };
    Ok(rules.iter().filter(matches).cloned().collect())
}

/// Returns the reason why the rules do not allow a client to submit a job, or `None` if they do. Only clients
/// with access to all bulkheads can learn whether a bulkhead exists.
pub fn rejection_message(
    rules: &[Arc<AccessRule>],
    (name, exists): (&str, bool),
    tenant: &str,
) -> Option<String> {
    let mut allowing = rules.iter().filter(|rule| rule.allows_bulkhead(name, exists)).peekable();
    let name = truncate(name, BULKHEAD_NAME_BYTES_MAX).escape_debug();
    if allowing.peek().is_none() {
        return Some(format!("you have no access to a bulkhead named '{name}'"));
    }
    // If the bulkhead does not exist, the tenant is not checked, because the caller rejects the job as
    // `not_found`.
    if !exists || allowing.any(|rule| rule.allows_tenant(tenant)) {
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

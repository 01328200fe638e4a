//! Writes the user and group ID maps of a child's new user namespace, for `starts`. Each map has one entry, which maps
//! an ID to itself. The existing namespace with subordinate IDs needs no maps; see `spawn::user_namespace`.

use std::fs;
use std::io;

use rustix::thread::{CapabilitySet, capabilities};

use crate::protocol::confinement::Identity;

/// Writes the ID maps for a child that is waiting in a new user namespace.
///
/// A keeper without CAP_SETGID must first deny `setgroups` to the child. Only then does the kernel accept the
/// map of the keeper's group. (Dropping a group can give access to files whose permissions exclude the
/// members of that group.) If the keeper has CAP_SETGID, the child itself drops its groups, and then the
/// right to set groups.
pub(super) fn write(pid: u32, identity: Option<Identity>) -> io::Result<()> {
    let own =
        || Identity { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
    let Identity { uid, gid } = identity.unwrap_or_else(own);
    let may_set_groups = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SETGID));
    if !may_set_groups {
        fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    }
    fs::write(format!("/proc/{pid}/gid_map"), format!("{gid} {gid} 1"))?;
    fs::write(format!("/proc/{pid}/uid_map"), format!("{uid} {uid} 1"))
}

//! The user and group id maps of a child's user namespace. Each map has a single id, which is the same inside
//! and outside.

use std::fs;
use std::io;

use rustix::thread::{CapabilitySet, capabilities};

use crate::protocol::confinement::Identity;

/// Writes the maps for a waiting child.
///
/// A keeper that may not change users must first deny `setgroups` to the child. Only then does the kernel
/// permit the map of the keeper's group, because a file can use a group to deny access to its members. With the
/// privilege, the child itself gives up its groups and then the right to set any.
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

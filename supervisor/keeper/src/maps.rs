//! Which users there are in a child's user namespace: one, which is the same inside and outside.

use std::fs;
use std::io;

use rustix::thread::{CapabilitySet, capabilities};

use super::confinement::Identity;

/// Writes the maps of a child that waits for it.
///
/// A keeper without the right to become another user must forbid the child to give up groups before it may map its
/// own, since a group can also be what keeps its members out. Others leave that to the child, which gives up
/// all of them, and then every right to have some.
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

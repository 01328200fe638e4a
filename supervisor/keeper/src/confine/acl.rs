//! Reads a file's POSIX access control list, and determines whether the list gives a user certain rights. Such a list
//! can give individual users rights that differ from the permission bits. `reach` calls this module, and checks the
//! permission bits itself. Access control lists are changed only in tests.

use std::path::Path;

use crate::protocol::confinement::Identity;

/// Name of the extended attribute that stores a file's access control list.
const ATTRIBUTE: &str = "system.posix_acl_access";

/// Maximum size of an extended attribute on Linux, in bytes.
const ATTRIBUTE_BYTES_MAX: usize = 64 * 1024;

/// Size of the version number before the first entry, in bytes.
const HEADER_BYTES: usize = 4;

const USER: u16 = 0x02;
const OWNING_GROUP: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Access control list of a file.
pub(super) struct AccessList(Vec<Entry>);

struct Entry {
    tag: u16,
    rights: u32,
    /// ID of a user or of a group.
    id: u32,
}

impl AccessList {
    /// Reads the access control list of a file. Returns `None` if the file does not have a list, or if reading the list
    /// fails.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let mut bytes = Vec::with_capacity(ATTRIBUTE_BYTES_MAX);
        rustix::io::retry_on_intr(|| {
            rustix::fs::getxattr(path, ATTRIBUTE, rustix::buffer::spare_capacity(&mut bytes))
        })
        .ok()?;
        Self::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let entries = bytes.get(HEADER_BYTES..)?.chunks_exact(8).map(|entry| {
            let number = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
            let id = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
            Entry { tag: number(0), rights: number(2).into(), id }
        });
        Some(Self(entries.collect()))
    }

    /// Returns true if the list gives this user all rights in `wanted`. The user must not own the file, because the
    /// permission bits apply to the owner, and must be in no group except its primary group. `group` is the file's
    /// group.
    pub(super) fn permits(&self, group: u32, identity: Identity, wanted: u32) -> bool {
        let Identity { uid, gid } = identity;
        let rights_of = |tag: u16| self.0.iter().filter(move |entry| entry.tag == tag);
        let mask = rights_of(MASK).next().map_or(u32::MAX, |entry| entry.rights);
        let grants = |entry: &Entry| entry.rights & mask & wanted == wanted;
        if let Some(entry) = rights_of(USER).find(|entry| entry.id == uid) {
            return grants(entry);
        }
        let owning = rights_of(OWNING_GROUP).filter(|_| group == gid);
        let mut groups = owning.chain(rights_of(GROUP).filter(|entry| entry.id == gid)).peekable();
        if groups.peek().is_some() {
            return groups.any(grants);
        }
        rights_of(OTHER).any(|entry| entry.rights & wanted == wanted)
    }
}

/// Grants a user rights to a file, in addition to the permission bits. Returns false if the file system does not
/// support access control lists.
#[cfg(test)]
pub(super) fn grant(path: &Path, user: u32, rights: u16) -> bool {
    use std::os::unix::fs::PermissionsExt;
    const OWNER: u16 = 0x01;
    let mode = std::fs::metadata(path).unwrap().permissions().mode() as u16;
    let entries = [
        (OWNER, mode >> 6 & 7, u32::MAX),
        (USER, rights, user),
        (OWNING_GROUP, mode >> 3 & 7, u32::MAX),
        (MASK, 7, u32::MAX),
        (OTHER, mode & 7, u32::MAX),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend(tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain(id.to_le_bytes()));
    }
    match rustix::fs::setxattr(path, ATTRIBUTE, &bytes, rustix::fs::XattrFlags::empty()) {
        Err(rustix::io::Errno::OPNOTSUPP) => false,
        set => set.map(|()| true).unwrap(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u32, u32)]) -> AccessList {
        AccessList(entries.iter().map(|&(tag, rights, id)| Entry { tag, rights, id }).collect())
    }

    #[test]
    fn access_list_is_evaluated_as_by_the_kernel() {
        let list = list(&[
            (USER, 7, 10),
            (USER, 0, 11),
            (OWNING_GROUP, 1, 0),
            (GROUP, 4, 20),
            (GROUP, 0, 21),
            (MASK, 5, 0),
            (OTHER, 1, 0),
        ]);
        let permits = |uid, gid, wanted| list.permits(30, Identity { uid, gid }, wanted);
        assert!(permits(10, 1, 5) && !permits(10, 1, 2), "the mask limits a user's rights");
        assert!(!permits(11, 20, 1), "a user's own entry takes precedence");
        assert!(permits(12, 20, 4) && !permits(12, 20, 1), "a group's entry takes precedence over others");
        assert!(permits(12, 30, 1) && !permits(12, 30, 4));
        assert!(!permits(12, 21, 1));
        assert!(permits(12, 1, 1) && !permits(12, 1, 4));
    }
}

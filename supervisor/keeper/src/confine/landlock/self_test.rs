//! Tests whether the rules are in force. Nothing in `/proc` reports this, and a filter of an outer sandbox
//! can make `landlock_restrict_self` succeed without executing it. So the child attempts something that no
//! rule allows.
//!
//! For a forked child: makes only system calls.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// An attempt that no rule allows, and that this process could make without the rules.
#[derive(Debug)]
pub(crate) enum ForbiddenAction {
    /// Lists the root folder.
    ListRoot,
    /// Creates a device node in this folder. Used if the root folder is given, because no rule allows device
    /// nodes.
    CreateDevice(CString),
    /// No attempt is possible: everything can be read, and there is no private folder.
    None,
}

/// Name of a node that does not exist, and a device that every process may use anyway.
const NODE_NAME: &str = "bulkhead-probe";
const NULL_DEVICE: (u32, u32) = (1, 3);

impl ForbiddenAction {
    /// Chooses the attempt, depending on whether the root folder is given and on the worker's temporary
    /// folder.
    pub(super) fn choose(root_is_given: bool, temporary: Option<&Path>) -> Self {
        let node =
            temporary.and_then(|folder| CString::new(folder.join(NODE_NAME).as_os_str().as_bytes()).ok());
        match node {
            _ if !root_is_given => Self::ListRoot,
            Some(node) => Self::CreateDevice(node),
            None => Self::None,
        }
    }

    /// Makes the attempt. Without rules the attempt can fail for other reasons: the user may not list the
    /// root folder, or lacks the capability for a device.
    pub(crate) fn attempt(&self) -> Result<(), Errno> {
        match self {
            Self::ListRoot => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::open(c"/", flags, Mode::empty()).map(drop)
            }
            Self::CreateDevice(node) => {
                let (major, minor) = NULL_DEVICE;
                let device = rustix::fs::makedev(major, minor);
                let made = rustix::fs::mknodat(CWD, node, FileType::CharacterDevice, Mode::RUSR, device);
                if made.is_ok() {
                    rustix::fs::unlink(node)?;
                }
                match made {
                    Err(Errno::PERM) => Ok(()), // Only after the rules were checked.
                    made => made,
                }
            }
            Self::None => Err(Errno::ACCESS),
        }
    }
}

//! Tests in a child whether its Landlock rules are enforced. `/proc` does not report the rules, and an outer sandbox
//! can make `landlock_restrict_self` succeed without any effect. The child therefore attempts an action that the rules
//! must deny. `landlock` installs the rules and evaluates the result.
//!
//! [`ForbiddenAction::attempt`] is safe in a forked child, because it makes only system calls.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// An action that no rule allows, attempted to test whether the rules are enforced. If the action succeeds, the rules
/// are not enforced. The action can also fail because the user lacks permission for it.
#[derive(Debug)]
pub(crate) enum ForbiddenAction {
    /// Lists the root folder.
    ListRoot,
    /// Creates a device node at this path, which no rule allows. Used if the rules grant access to the root folder, so
    /// that listing it would succeed.
    CreateDevice(CString),
    /// No action can be tested, because the rules allow reading all files, and the worker has no temporary folder.
    None,
}

/// Name and device number of the device node that the test tries to create. The node would be in the worker's own
/// folder, and would refer to a device that every process can access.
const NODE_NAME: &str = "bulkhead-probe";
const NULL_DEVICE: (u32, u32) = (1, 3);

impl ForbiddenAction {
    /// Chooses the forbidden action to attempt. The action is to list the root folder or, if the rules allow that, to
    /// create a device node.
    pub(super) fn choose(root_is_given: bool, temporary: Option<&Path>) -> Self {
        let node =
            temporary.and_then(|folder| CString::new(folder.join(NODE_NAME).as_os_str().as_bytes()).ok());
        match node {
            _ if !root_is_given => Self::ListRoot,
            Some(node) => Self::CreateDevice(node),
            None => Self::None,
        }
    }

    /// Attempts the action. Returns `Ok` if it succeeded, which means that the rules did not deny it. Listing the root
    /// folder can fail even without rules, if the user lacks permission.
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
                    Err(Errno::PERM) => Ok(()), // The kernel checks this after the Landlock rules.
                    made => made,
                }
            }
            Self::None => Err(Errno::ACCESS),
        }
    }
}

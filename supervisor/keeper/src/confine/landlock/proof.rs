//! Whether the rules are in force: nothing in `/proc` says so, and a filter above us can have
//! `landlock_restrict_self` succeed without being made. So the child tries what no rule gives.
//!
//! For a forked child: system calls and nothing else.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// What no rule gives, and this process could do without the rules.
#[derive(Debug)]
pub(crate) enum Forbidden {
    /// To list the root folder.
    Root,
    /// To make a device node in this folder, where the root folder is given: that is given nowhere.
    DeviceIn(CString),
    /// Nothing: all may be read and no folder is its own.
    Nothing,
}

/// A node that is not there, of a device that every process may use anyway.
const NAME: &str = "bulkhead-probe";
const NULL_DEVICE: (u32, u32) = (1, 3);

impl Forbidden {
    /// By whether the root folder is given, and the temporary folder that the worker has.
    pub(super) fn choose(root_is_given: bool, temporary: Option<&Path>) -> Self {
        let node = temporary.and_then(|folder| CString::new(folder.join(NAME).as_os_str().as_bytes()).ok());
        match node {
            _ if !root_is_given => Self::Root,
            Some(node) => Self::DeviceIn(node),
            None => Self::Nothing,
        }
    }

    /// Tries it. What keeps a process without rules from it is none of their doing: a root folder that its
    /// user may not list, or the capability that a device takes.
    pub(crate) fn attempt(&self) -> Result<(), Errno> {
        match self {
            Self::Root => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::open(c"/", flags, Mode::empty()).map(drop)
            }
            Self::DeviceIn(node) => {
                let (major, minor) = NULL_DEVICE;
                let device = rustix::fs::makedev(major, minor);
                let made = rustix::fs::mknodat(CWD, node, FileType::CharacterDevice, Mode::RUSR, device);
                if made.is_ok() {
                    rustix::fs::unlink(node)?;
                }
                match made {
                    Err(Errno::PERM) => Ok(()), // Only after the rules have been asked.
                    made => made,
                }
            }
            Self::Nothing => Err(Errno::ACCESS),
        }
    }
}

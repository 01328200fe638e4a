//! Encodes and decodes the Landlock rules of a worker for the processes that it starts. The keeper writes the rules to
//! a file, which the `exec` host or a template reads from standard input. The receiver derives and enforces the rules
//! of each process (`worker/src/rules.rs`). There is a separate grant for the temporary folder.
//!
//! Numbers are little-endian. The file begins with the handled rights and the scopes, 64 bits each. The grants follow.
//! Each grant consists of the granted rights (64 bits), the length of the path (32 bits) and the path. The first grant
//! is for the temporary folder; the path is empty if there is no temporary folder.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Maximum size of the encoded rules, in bytes.
pub const PROGRAM_RULES_BYTES_MAX: u64 = 64 << 20;

/// Landlock rights that are granted for a path, including everything below this path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// Absolute path in the worker's view of the file system.
    pub path: PathBuf,
    /// Bit mask of `LANDLOCK_ACCESS_FS_*` values.
    pub access: u64,
}

/// Landlock rules of a worker. The host that starts the programs derives the rules of each program from these rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgramRules {
    /// Bit mask of access rights that Landlock denies unless a grant includes them. 0 if Landlock is not used.
    pub handled: u64,
    /// Bit mask of `LANDLOCK_SCOPE_*` values.
    pub scoped: u64,
    /// Grant for the worker's temporary folder. Each program gets a subfolder of this folder.
    pub temporary: Option<Grant>,
    /// Grants for all paths other than the temporary folder.
    pub grants: Vec<Grant>,
}

impl ProgramRules {
    /// Encodes the rules.
    pub fn encode(&self) -> Vec<u8> {
        let nowhere = (Path::new(""), 0);
        let temporary = self.temporary.as_ref().map_or(nowhere, |grant| (&grant.path, grant.access));
        let grants = self.grants.iter().map(|grant| (grant.path.as_path(), grant.access));
        let mut bytes = Vec::with_capacity(16 + 64 * (self.grants.len() + 1));
        bytes.extend_from_slice(&self.handled.to_le_bytes());
        bytes.extend_from_slice(&self.scoped.to_le_bytes());
        for (path, access) in std::iter::once(temporary).chain(grants) {
            let path = path.as_os_str().as_bytes();
            bytes.extend_from_slice(&access.to_le_bytes());
            bytes.extend_from_slice(&(path.len() as u32).to_le_bytes());
            bytes.extend_from_slice(path);
        }
        bytes
    }

    /// Decodes rules. Returns `None` if the bytes are invalid.
    pub fn decode(mut bytes: &[u8]) -> Option<Self> {
        let rest = &mut bytes;
        let (handled, scoped) = (number(rest)?, number(rest)?);
        let temporary = Some(grant(rest)?).filter(|grant| !grant.path.as_os_str().is_empty());
        let mut grants = Vec::new();
        while !rest.is_empty() {
            grants.push(grant(rest)?);
        }
        Some(Self { handled, scoped, temporary, grants })
    }
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, others) = rest.split_first_chunk()?;
    *rest = others;
    Some(u64::from_le_bytes(*bytes))
}

fn grant(rest: &mut &[u8]) -> Option<Grant> {
    let access = number(rest)?;
    let (length, others) = rest.split_first_chunk()?;
    let (path, others) = others.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    *rest = others;
    Some(Grant { path: PathBuf::from(OsString::from_vec(path.to_vec())), access })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_rules_survive_encoding() {
        let grant = |path: &str, access| Grant { path: path.into(), access };
        let all = [
            ProgramRules::default(),
            ProgramRules {
                handled: u64::MAX,
                scoped: 3,
                temporary: Some(grant("/tmp/x", 7)),
                grants: vec![grant("/usr", 13), grant("/etc/hosts", 4)],
            },
            ProgramRules { handled: 1, grants: vec![grant("/", 1)], ..ProgramRules::default() },
        ];
        for rules in all {
            let bytes = rules.encode();
            assert_eq!(ProgramRules::decode(&bytes), Some(rules.clone()));
            for length in 0..bytes.len() {
                assert_ne!(ProgramRules::decode(&bytes[..length]), Some(rules.clone()));
            }
        }
        assert_eq!(ProgramRules::decode(&[0xff; 40]), None);
    }
}

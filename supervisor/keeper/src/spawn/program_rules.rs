//! Creates the file of Landlock rules that a worker applies to processes that it starts. Such a worker is a host, which
//! confines its `exec` programs, or a template, which confines its forked workers. The worker reads this sealed memory
//! file on its standard input and enforces the rules. Without Landlock, the file contains only the path of the
//! temporary folder.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use bulkhead_shared::program_rules::{Grant, ProgramRules};
use rustix::fs::{MemfdFlags, SealFlags};

use super::SpawnError;
use crate::confine::landlock::Ruleset;
use crate::protocol::confinement::{Layers, TemporaryFiles};

const STEP: &str = "rules for programs";

/// Mount point of [`TemporaryFiles::PrivateTmp`].
const PRIVATE_TMP: &str = "/tmp";

/// Creates a memory file that contains the rules for the worker's programs. The file offset is at the beginning of the
/// file.
pub(super) fn create_file(
    layers: &Layers,
    ruleset: Option<&Ruleset>,
    temporary: Option<&Path>,
) -> Result<OwnedFd, SpawnError> {
    let temporary = match layers.temporary {
        TemporaryFiles::PrivateTmp(_) => Some(Path::new(PRIVATE_TMP)),
        TemporaryFiles::None | TemporaryFiles::Folder | TemporaryFiles::MountedTmpfs(_) => temporary,
    };
    let rules = match ruleset {
        Some(ruleset) => ruleset.program_rules(temporary),
        None => ProgramRules {
            temporary: temporary.map(|path| Grant { path: path.to_owned(), access: 0 }),
            ..ProgramRules::default()
        },
    };
    sealed_memory_file(&rules.encode()).map_err(|error| SpawnError::from_io(STEP, &error))
}

fn sealed_memory_file(bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create(c"rules", flags)?);
    file.write_all(bytes)?;
    file.rewind()?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE,
    )?;
    Ok(file.into())
}

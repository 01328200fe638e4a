//! Opens the programs and libraries that a recorded process had mapped, and finds their unwind tables and debug
//! information. `record` parses the mappings. `unwind` and `names` use the files.
//!
//! A file is used only if its device and inode are those of the mapped file. The device is ignored on file systems for
//! which the kernel shows another device. The file may have been written by a hostile worker.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;

use object::read::ReadCache;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Endianness, Object, ObjectSection};
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, fstatfs, major, minor, open};

use crate::record::{Mapping, Mappings};

/// Maximum number of files that are opened for one process.
const MODULES_MAX: usize = 64;

/// Maximum size of a file in bytes. The limit can be high, because only the needed parts of a file are read.
const FILE_BYTES_MAX: i64 = 2 << 30;

/// Maximum size of a section in bytes.
const SECTION_BYTES_MAX: u64 = 256 << 20;

/// Types of file systems that return other device numbers from `stat` than they show in `/proc/PID/maps`. On overlayfs,
/// this was so before about Linux 6.8.
const BTRFS: u32 = 0x9123_683e;
const OVERLAYFS: u32 = 0x794c_7630;

/// Folder in which distributions install separate debug information.
const DEBUG_FOLDER: &str = "/usr/lib/debug";

pub(crate) type Elf<'m> = ElfFile64<'m, Endianness, &'m ReadCache<File>>;

/// A file that is mapped into the worker.
pub(crate) struct Module {
    data: ReadCache<File>,
    /// Difference between addresses in the worker and addresses in the file.
    pub(crate) bias: u64,
    pub(crate) build_id: Option<String>,
}

/// Sections of a file that are needed for unwinding.
pub(crate) struct UnwindSections {
    pub(crate) text: Option<(Range<u64>, Vec<u8>)>,
    pub(crate) eh_frame: Option<(Range<u64>, Vec<u8>)>,
    pub(crate) eh_frame_hdr: Option<(Range<u64>, Vec<u8>)>,
    pub(crate) got: Option<Range<u64>>,
}

impl Module {
    fn open(mapping: &Mapping<'_>) -> Option<Self> {
        let file = open_file(mapping.path, Some(mapping)).ok()?;
        let data = ReadCache::new(file);
        let (bias, build_id) = {
            let elf = Elf::parse(&data).ok()?;
            (bias(&elf, mapping)?, build_id(&elf))
        };
        Some(Self { data, bias, build_id })
    }

    pub(crate) fn elf(&self) -> Option<Elf<'_>> {
        Elf::parse(&self.data).ok()
    }

    pub(crate) fn unwind_sections(&self) -> Option<UnwindSections> {
        let elf = self.elf()?;
        let copy = |name: &str| {
            let section = elf.section_by_name(name)?;
            let data = section_data(&elf, name)?;
            Some((range(&section)?, data.into_owned()))
        };
        let got = elf.section_by_name(".got").and_then(|section| range(&section));
        let (text, eh_frame, eh_frame_hdr) = (copy(".text"), copy(".eh_frame"), copy(".eh_frame_hdr"));
        Some(UnwindSections { text, eh_frame, eh_frame_hdr, got })
    }

    /// Returns the file that contains this module's separate debug information, from the first folder in which there is
    /// such a file.
    pub(crate) fn debug_file(&self, folders: &[String]) -> Option<ReadCache<File>> {
        let id = self.build_id.as_ref()?;
        let (start, rest) = id.split_at_checked(2)?;
        let folders = folders.iter().map(String::as_str).chain([DEBUG_FOLDER]);
        let files = folders
            .filter_map(|folder| open_file(&format!("{folder}/.build-id/{start}/{rest}.debug"), None).ok());
        files
            .map(ReadCache::new)
            .find(|data| Elf::parse(data).ok().and_then(|elf| build_id(&elf)).as_ref() == Some(id))
    }
}

fn range<'m>(section: &impl ObjectSection<'m>) -> Option<Range<u64>> {
    Some(section.address()..section.address().checked_add(section.size())?)
}

/// Returns the data of a section, decompressed if necessary. Sections with debug information are often compressed.
pub(crate) fn section_data<'m>(elf: &Elf<'m>, name: &str) -> Option<Cow<'m, [u8]>> {
    let section = elf.section_by_name(name).filter(|section| section.size() <= SECTION_BYTES_MAX)?;
    let compressed = section.compressed_data().ok()?;
    let is_small = compressed.uncompressed_size <= SECTION_BYTES_MAX;
    is_small.then(|| compressed.decompress().ok()).flatten()
}

/// Returns the build ID as hexadecimal digits. A file with separate debug information is named after the build ID.
fn build_id(elf: &Elf<'_>) -> Option<String> {
    const BYTES: std::ops::RangeInclusive<usize> = 4..=64;
    let id = elf.build_id().ok()??;
    BYTES.contains(&id.len()).then(|| id.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the difference between the addresses in a mapping and the corresponding addresses in the file.
fn bias(elf: &Elf<'_>, mapping: &Mapping<'_>) -> Option<u64> {
    let endian = elf.endian();
    let headers = elf.elf_header().program_headers(endian, elf.data()).ok()?;
    let segment = headers.iter().find(|header| {
        let (offset, size) = (header.p_offset(endian), header.p_filesz(endian));
        // The kernel rounds the beginning of a mapping down to a page boundary.
        let page = offset & !0xfff;
        header.p_type(endian) == object::elf::PT_LOAD
            && header.p_flags(endian) & object::elf::PF_X != 0
            && (page..offset.saturating_add(size)).contains(&mapping.offset)
    })?;
    let in_file = mapping.offset.wrapping_sub(segment.p_offset(endian)).wrapping_add(segment.p_vaddr(endian));
    Some(mapping.start.wrapping_sub(in_file))
}

/// Opens a regular file. Fails if `mapping` is given and refers to another file.
fn open_file(path: &str, mapping: Option<&Mapping<'_>>) -> io::Result<File> {
    // `NONBLOCK` keeps `open` from blocking on a FIFO.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty())?;
    let found = fstat(&file)?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let is_mapped = mapping.is_none_or(|mapping| {
        is_mapped_file(&found, mapping, || fstatfs(&file).map_or(0, |found| found.f_type as u32))
    });
    if is_file && is_mapped && found.st_size <= FILE_BYTES_MAX {
        Ok(file.into())
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

/// Returns true if a mapping refers to the file. `file_system` determines the type of the file's file system.
fn is_mapped_file(file: &Stat, mapping: &Mapping<'_>, file_system: impl FnOnce() -> u32) -> bool {
    let is_same_device = (major(file.st_dev), minor(file.st_dev)) == mapping.device;
    file.st_ino == mapping.inode && (is_same_device || [BTRFS, OVERLAYFS].contains(&file_system()))
}

/// The modules of a process. A module is opened when it is first needed.
pub(crate) struct Modules<'r> {
    pub(crate) mappings: &'r Mappings<'r>,
    /// Folders with separate debug information.
    pub(crate) debug_folders: &'r [String],
    /// Modules that have been opened, by start address of the mapping. An entry is `None` if the file could not be
    /// used.
    opened: std::collections::BTreeMap<u64, Option<Module>>,
}

impl<'r> Modules<'r> {
    pub(crate) fn new(mappings: &'r Mappings<'r>, debug_folders: &'r [String]) -> Self {
        Self { mappings, debug_folders, opened: std::collections::BTreeMap::new() }
    }

    /// Opens the module that is mapped at an address. Returns the mapping and the module, or `None` if the module had
    /// already been opened or cannot be opened.
    pub(crate) fn open_at(&mut self, address: u64) -> Option<(Mapping<'r>, &Module)> {
        let mapping = *self.mappings.at(address)?;
        if self.opened.contains_key(&mapping.start) || self.opened.len() >= MODULES_MAX {
            return None;
        }
        let module = self.opened.entry(mapping.start).or_insert_with(|| Module::open(&mapping));
        Some((mapping, module.as_ref()?))
    }

    /// Returns the mapping that contains an address. Also returns the mapping's module if the module has been opened.
    pub(crate) fn at(&self, address: u64) -> Option<(&Mapping<'r>, Option<&Module>)> {
        let mapping = self.mappings.at(address)?;
        Some((mapping, self.opened.get(&mapping.start).and_then(Option::as_ref)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_ignored_where_maps_shows_another_device() {
        const EXT4: u32 = 0xef53;
        let file = fstat(File::open("/proc/self/exe").unwrap()).unwrap();
        let device = (major(file.st_dev), minor(file.st_dev));
        let mapping = Mapping { start: 0, end: 1, offset: 0, device, inode: file.st_ino, path: "/program" };
        let other_device = Mapping { device: (device.0 + 1, device.1), ..mapping };
        let other_file = Mapping { inode: file.st_ino + 1, ..mapping };
        for (file_system, ignores_device) in [(EXT4, false), (BTRFS, true), (OVERLAYFS, true)] {
            assert!(is_mapped_file(&file, &mapping, || file_system));
            assert_eq!(is_mapped_file(&file, &other_device, || file_system), ignores_device);
            assert!(!is_mapped_file(&file, &other_file, || file_system));
        }
    }
}

//! Checks whether a program or library works when a worker can open it only by descriptor, not by path. The file must
//! be an ELF file, which the kernel executes directly, and must not refer to other files relative to its own location.
//! `reach` asks this for files that the worker's user cannot access by path. Other dependencies are not checked.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

const MAGIC: [u8; 4] = *b"\x7fELF";

/// Values of the class and byte order fields in the ELF header of a supported file: 64-bit and little-endian.
const CLASS_AND_BYTE_ORDER: [u8; 2] = [2, 1];

const PROGRAM_HEADER_BYTES: usize = 56;
const PROGRAM_HEADERS_MAX: u16 = 256;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;

const DYNAMIC_BYTES_MAX: u64 = 64 * 1024;
const DT_STRTAB: u64 = 5;
const DT_RPATH: u64 = 15;
const DT_RUNPATH: u64 = 29;

/// Maximum size of a library search path (`DT_RPATH` or `DT_RUNPATH`), in bytes.
const SEARCH_PATH_BYTES_MAX: usize = 4096;

/// Returns true if the file is an ELF file, which the kernel executes directly.
pub(super) fn is_elf(path: &Path) -> bool {
    open(path).is_some()
}

/// Returns true if the file is an ELF file and its library search paths do not contain `$ORIGIN`, which stands for the
/// file's own folder.
pub(super) fn is_self_contained(path: &Path) -> bool {
    open(path).is_some_and(|file| {
        search_paths(&file).is_some_and(|paths| !paths.iter().any(|path| uses_origin(path)))
    })
}

fn open(path: &Path) -> Option<File> {
    // With these flags, opening the path does not block even if it is a named pipe.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let mut start = MAGIC;
    start.fill(0);
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    (is_file && file.read_exact_at(&mut start, 0).is_ok() && start == MAGIC).then_some(file)
}

fn uses_origin(search_path: &[u8]) -> bool {
    [&b"$ORIGIN"[..], b"${ORIGIN}"]
        .iter()
        .any(|word| search_path.windows(word.len()).any(|part| part == *word))
}

/// Returns the library search paths that the file contains, or `None` if the file has an unknown format.
fn search_paths(file: &File) -> Option<Vec<Vec<u8>>> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    let is_known =
        header[4..6] == CLASS_AND_BYTE_ORDER && usize::from(u16_at(&header, 54)?) == PROGRAM_HEADER_BYTES;
    let count = u16_at(&header, 56)?;
    if !is_known || count > PROGRAM_HEADERS_MAX {
        return None;
    }
    let mut table = vec![0; usize::from(count) * PROGRAM_HEADER_BYTES];
    file.read_exact_at(&mut table, u64_at(&header, 32)?).ok()?;
    let parts = || {
        table.chunks_exact(PROGRAM_HEADER_BYTES).filter_map(|part| {
            let kind = u32::from_le_bytes(part.get(..4)?.try_into().ok()?);
            Some((kind, u64_at(part, 8)?, u64_at(part, 16)?, u64_at(part, 32)?))
        })
    };
    let Some((_, offset, _, bytes)) = parts().find(|(kind, ..)| *kind == PT_DYNAMIC) else {
        return Some(Vec::new()); // The file is statically linked.
    };
    let mut entries = vec![0; bytes.min(DYNAMIC_BYTES_MAX) as usize];
    file.read_exact_at(&mut entries, offset).ok()?;
    let tags: Vec<(u64, u64)> =
        entries.chunks_exact(16).filter_map(|entry| Some((u64_at(entry, 0)?, u64_at(entry, 8)?))).collect();
    let strings = tags.iter().find(|(tag, _)| *tag == DT_STRTAB)?.1;
    let (_, offset, address, _) = parts().find(|(kind, _, address, bytes)| {
        *kind == PT_LOAD && strings.checked_sub(*address).is_some_and(|into| into < *bytes)
    })?;
    let text = |at: u64| {
        let mut text = vec![0; SEARCH_PATH_BYTES_MAX];
        let read = file.read_at(&mut text, (strings - address).checked_add(offset)?.checked_add(at)?).ok()?;
        text.truncate(read);
        text.truncate(text.iter().position(|&byte| byte == 0)?);
        Some(text)
    };
    tags.iter().filter(|(tag, _)| [DT_RPATH, DT_RUNPATH].contains(tag)).map(|(_, at)| text(*at)).collect()
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elf_search_path_relative_to_file_is_detected() {
        assert!(is_self_contained(&std::env::current_exe().unwrap()));
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("script"), "#!/bin/sh\n").unwrap();
        assert!(!is_elf(&path("script")) && !is_self_contained(&path("script")));
        std::fs::write(path("part.c"), "int part(void) { return 1; }\n").unwrap();
        let cc = |arguments: &[&str]| {
            let mut cc = std::process::Command::new("cc");
            cc.args(["-shared", "-fPIC", "part.c", "-o"]).args(arguments).current_dir(folder.path());
            assert!(cc.status().expect("a C compiler named `cc`").success());
        };
        cc(&["alone.so"]);
        cc(&["old.so", "-Wl,-rpath,/nowhere:$ORIGIN/lib", "-Wl,--disable-new-dtags"]);
        cc(&["new.so", "-Wl,-rpath,${ORIGIN}", "-Wl,--enable-new-dtags"]);
        cc(&["far.so", "-Wl,-rpath,/nowhere"]);
        let found = ["alone.so", "old.so", "new.so", "far.so"].map(|name| is_self_contained(&path(name)));
        assert_eq!(found, [true, false, false, true]);
        std::fs::write(path("cut.so"), &std::fs::read(path("alone.so")).unwrap()[..100]).unwrap();
        assert!(is_elf(&path("cut.so")) && !is_self_contained(&path("cut.so")));
    }
}

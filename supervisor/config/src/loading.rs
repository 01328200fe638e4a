//! Reads and parses the main file and the files in `conf.d`, and merges their tables into one document. This module
//! does not interpret keys; it only knows which tables are allowed in `conf.d`.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::diagnostics::{ConfigErrors, Problems, place, shown};
use super::sources::{Source, Sources};
use super::{defaults, syntax, units, values};

/// Mode bits that let the group or all other users modify a file.
const GROUP_WRITE: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Returns a configuration that consists only of the main file.
///
/// # Errors
///
/// Fails if the file's folder cannot be found, or if the folder's name is not UTF-8.
pub(super) fn from_text(path: &Path, text: &str) -> Result<Sources, ConfigErrors> {
    let fail = |message, help| Err(ConfigErrors::of_file(path, message, help));
    let absolute = match std::path::absolute(path) {
        Ok(absolute) => absolute,
        Err(error) => {
            let path = shown(&path.to_string_lossy());
            let message = format!("cannot find the directory of \"{path}\": {error}");
            return fail(message, "pass the absolute path of the configuration file");
        }
    };
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    if folder.to_str().is_none() {
        // Paths in a validated configuration must be UTF-8, because they are also displayed as text.
        let message =
            format!("the name of the directory \"{}\" is not UTF-8", shown(&folder.to_string_lossy()));
        return fail(message, "rename the directory, or move the file to another directory");
    }
    Ok(Sources::new(path, folder, text))
}

/// Reads the main file and the files in `conf.d`. Also returns any problems with the files in `conf.d`.
///
/// # Errors
///
/// Fails if the main file cannot be read.
pub(super) fn read(path: &Path) -> Result<(Sources, Problems), ConfigErrors> {
    let file_error = |(message, help): (String, String)| ConfigErrors::of_file(path, message, &help);
    let file = open(path).map_err(|error| file_error(unreadable(path, &error)))?;
    let mut problems = Problems::default();
    let mut sources = match read_text(path, file).map_err(file_error)? {
        Ok(text) => from_text(path, &text)?,
        Err(invalid) => {
            let sources = from_text(path, &invalid.lossy)?;
            invalid.report(0, &mut problems);
            sources
        }
    };
    add_fragments(&mut sources, &mut problems);
    Ok((sources, problems))
}

/// Reads the files in `conf.d`.
fn add_fragments(sources: &mut Sources, problems: &mut Problems) {
    let folder = sources.main().path.with_file_name(defaults::FRAGMENTS_FOLDER);
    let mut names = match names_in(&folder) {
        Ok(names) => names,
        Err(error) => {
            let start = sources.add_fragment(&folder, None);
            let (message, _) = unreadable(&folder, &error);
            let help = "replace it with a directory that this user can read, or delete it";
            return problems.report(start..start, message, help);
        }
    };
    names.sort();
    if names.len() > defaults::FRAGMENTS_MAX {
        let start = sources.add_fragment(&folder, None);
        let message = format!(
            "\"{}\" contains more than {} configuration files",
            shown(&folder.to_string_lossy()),
            defaults::FRAGMENTS_MAX
        );
        return problems.report(start..start, message, "define several bulkheads in one file");
    }
    for path in names {
        let unreadable = |error: io::Error| {
            let (message, _) = unreadable(&path, &error);
            (message, "replace it with a file that this user can read, or delete it".to_owned())
        };
        let read = open(&path).map_err(unreadable).and_then(|file| {
            check_owner(&path, &file)?;
            read_text(&path, file)
        });
        match read {
            Ok(Ok(text)) => drop(sources.add_fragment(&path, Some(&text))),
            Ok(Err(invalid)) => {
                let start = sources.add_fragment(&path, Some(&invalid.lossy));
                invalid.report(start, problems);
            }
            Err((message, help)) => {
                let start = sources.add_fragment(&path, None);
                problems.report(start..start, message, help);
            }
        }
    }
}

/// Parses all files into documents, and reports syntax errors. The main file's document comes first.
pub(super) fn parse<'s>(sources: &'s Sources, problems: &mut Problems) -> Vec<DeTable<'s>> {
    let files = std::iter::once(sources.main()).chain(sources.fragments());
    files.map(|source| parse_one(source, problems)).collect()
}

/// Merges the tables of all files into one document. Reports tables that are not allowed in `conf.d`.
pub(super) fn merge<'s>(
    sources: &Sources,
    documents: Vec<DeTable<'s>>,
    problems: &mut Problems,
) -> DeTable<'s> {
    let mut documents = documents.into_iter();
    let mut merged = documents.next().unwrap_or_default();
    documents.for_each(|fragment| add(sources, &mut merged, fragment, problems));
    merged
}

/// Adds the tables of one file in `conf.d` to the merged document.
fn add<'s>(sources: &Sources, document: &mut DeTable<'s>, fragment: DeTable<'s>, problems: &mut Problems) {
    for (key, value) in fragment {
        let name = key.get_ref().to_string();
        if matches!(&*name, "supervisor" | "defaults") {
            let message = format!("[{name}] is not allowed in {}", defaults::FRAGMENTS_FOLDER);
            let help = format!(
                "move the section to {}; a file in {} can contain only [bulkhead.NAME] and [[access]]",
                sources.main().path.display(),
                defaults::FRAGMENTS_FOLDER
            );
            problems.report(key.span(), message, help);
            continue;
        }
        let span = value.span();
        match (document.get_mut(name.as_str()).map(Spanned::get_mut), value.into_inner()) {
            // Keys that are not valid in any configuration file are reported later, when the merged document is read.
            (None, value) => drop(document.insert(key, Spanned::new(span, value))),
            (Some(DeValue::Table(all)), DeValue::Table(more)) if name == "bulkhead" => {
                add_bulkheads(sources, all, more, problems);
            }
            (Some(DeValue::Array(all)), DeValue::Array(more)) if name == "access" => {
                more.into_iter().for_each(|entry| all.push(entry));
            }
            (Some(_), value) => report_unmergeable(&name, &value, span, problems),
        }
    }
}

fn add_bulkheads<'s>(sources: &Sources, all: &mut DeTable<'s>, more: DeTable<'s>, problems: &mut Problems) {
    for (name, bulkhead) in more {
        let Some((first, _)) = all.get_key_value(name.get_ref().as_ref()) else {
            all.insert(name, bulkhead);
            continue;
        };
        let place = place(sources, first.span().start);
        problems.report(
            name.span(),
            format!("bulkhead `{}` is already defined in {place}", shown(name.get_ref())),
            "rename one of the bulkheads, or remove one of the sections",
        );
    }
}

/// Reports a key in a `conf.d` file that cannot be merged with the same key in another file, because the key is unknown
/// or its value has the wrong type. A wrong type in the other file is reported later, when the merged document is read.
fn report_unmergeable(name: &str, value: &DeValue<'_>, span: Range<usize>, problems: &mut Problems) {
    let found = values::type_name(value);
    match (name, value) {
        ("bulkhead", DeValue::Table(_)) | ("access", DeValue::Array(_)) => {}
        ("bulkhead", _) => {
            let message = format!("`bulkhead` must be a table, not {found}");
            problems.report(span, message, "write a [bulkhead.NAME] section for each bulkhead");
        }
        ("access", _) => {
            let message = format!("`access` must be an array of tables, not {found}");
            problems.report(span, message, "write one [[access]] section for each entry");
        }
        _ => problems.report(
            span,
            format!("unknown key `{}` at the top of the file", shown(name)),
            "write only [bulkhead.NAME] and [[access]]",
        ),
    }
}

/// Parses one file. Positions in the result are offsets into the whole configuration rather than into the file.
fn parse_one<'s>(source: &'s Source, problems: &mut Problems) -> DeTable<'s> {
    let (document, errors) = DeTable::parse_recoverable(source.text());
    let mut found = Problems::default();
    syntax::report(source.text(), &errors, &mut found);
    problems.append(found, source.start);
    moved_table(document.into_inner(), source.start)
}

fn moved_table(table: DeTable<'_>, by: usize) -> DeTable<'_> {
    if by == 0 {
        return table;
    }
    table.into_iter().map(|(name, value)| (moved(name, by), moved_value(value, by))).collect()
}

fn moved_value(value: Spanned<DeValue<'_>>, by: usize) -> Spanned<DeValue<'_>> {
    let span = moved_span(value.span(), by);
    let value = match value.into_inner() {
        DeValue::Table(table) => DeValue::Table(moved_table(table, by)),
        DeValue::Array(array) => {
            DeValue::Array(array.into_iter().map(|value| moved_value(value, by)).collect::<DeArray<'_>>())
        }
        value => value,
    };
    Spanned::new(span, value)
}

fn moved<T>(spanned: Spanned<T>, by: usize) -> Spanned<T> {
    Spanned::new(moved_span(spanned.span(), by), spanned.into_inner())
}

fn moved_span(span: Range<usize>, by: usize) -> Range<usize> {
    span.start + by..span.end + by
}

/// Returns the paths of the configuration files in a folder: those ending in `.toml`, except for hidden files, which
/// editors leave behind. Returns an empty list if the folder does not exist. Returns an error if the folder is a
/// symbolic link without a target. Otherwise, a reload that happens while the link is being replaced would remove the
/// folder's bulkheads.
fn names_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match folder.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
            Ok(_) => {
                return Err(io::Error::new(error.kind(), "the target of the symbolic link does not exist"));
            }
        },
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let bytes = name.as_bytes();
        if bytes.ends_with(b".toml") && !bytes.starts_with(b".") {
            names.push(folder.join(name));
        }
        if names.len() > defaults::FRAGMENTS_MAX {
            break;
        }
    }
    Ok(names)
}

fn unreadable(path: &Path, error: &io::Error) -> (String, String) {
    let message = format!("cannot read {}: {error}", shown(&path.to_string_lossy()));
    (message, "pass a configuration file that this user can read".to_owned())
}

/// Opens a file without blocking on a FIFO.
fn open(path: &Path) -> io::Result<File> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    let kind = file.metadata()?;
    if kind.is_file() {
        return Ok(file);
    }
    let what = if kind.is_dir() {
        "the path is a directory"
    } else {
        "the path is not a regular file; a pipe such as `<(...)` cannot be read again on reload"
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

/// Checks that only root and the supervisor's user can modify a file in `conf.d`. Any other user who could modify the
/// file could start arbitrary programs as workers.
fn check_owner(path: &Path, file: &File) -> Result<(), (String, String)> {
    let found = file.metadata().map_err(|error| unreadable(path, &error))?;
    let Some(who) = who_can_change(&found) else { return Ok(()) };
    let path = shown(&path.to_string_lossy());
    let message = format!("{path} cannot be used because {who}");
    Err((message, format!("run `chown root {path}` and `chmod go-w {path}`")))
}

/// Describes which users can modify a file. Returns `None` if only root and the supervisor's user can modify the file.
fn who_can_change(found: &Metadata) -> Option<String> {
    let (own_user, own_group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (mode, uid, gid) = (found.mode() & 0o7777, found.uid(), found.gid());
    if ![0, own_user].contains(&uid) {
        return Some(format!("user {uid} owns the file"));
    }
    if mode & OTHERS_WRITE != 0 {
        return Some(format!("every user can change the file (mode {mode:04o})"));
    }
    let is_group_foreign = ![0, own_group].contains(&gid);
    (mode & GROUP_WRITE != 0 && is_group_foreign)
        .then(|| format!("group {gid} can change the file (mode {mode:04o})"))
}

/// A file whose contents are not valid UTF-8.
struct InvalidText {
    /// Offset of the first byte that is not valid UTF-8.
    at: usize,
    byte: u8,
    /// File contents in which invalid bytes have been replaced. The text before `at` is unchanged, so positions before
    /// `at` are correct.
    lossy: String,
}

impl InvalidText {
    fn report(&self, start: usize, problems: &mut Problems) {
        let at = start + self.at;
        problems.report(
            at..at + 1,
            format!("the file is not UTF-8: byte 0x{:02x}", self.byte),
            "save the file as UTF-8, the only encoding that TOML allows",
        );
    }
}

/// Reads the text of a file. Reads at most one byte beyond the maximum size, which is enough to detect a file that is
/// too large.
fn read_text(path: &Path, file: File) -> Result<Result<String, InvalidText>, (String, String)> {
    let mut bytes = Vec::new();
    let read = file.take(defaults::FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(path, &error))?;
    if bytes.len() as u64 > defaults::FILE_BYTES_MAX {
        let max = units::format_size(defaults::FILE_BYTES_MAX);
        let message = format!("{} is larger than {max}", shown(&path.to_string_lossy()));
        return Err((message, "check the path: a configuration file is a TOML text file".to_owned()));
    }
    Ok(String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let byte = error.as_bytes().get(at).copied().unwrap_or_default();
        InvalidText { at, byte, lossy: String::from_utf8_lossy(error.as_bytes()).into_owned() }
    }))
}

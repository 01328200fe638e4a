//! Stores the contents of all files of a configuration, which are the main file and the files in `conf.d`. `loading`
//! reads the files, `diagnostics` quotes them in error messages, and `relations` resolves relative paths with their
//! folders.
//!
//! A position is an offset into the concatenated contents, so it also identifies the file. Modules that report problems
//! therefore do not have to know that there are several files.

use std::path::{Path, PathBuf};

use super::defaults;

/// A file that is part of a configuration.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Source {
    /// Path of the file, as shown in messages. For the main file, this is the path that the caller specified.
    pub(super) path: PathBuf,
    /// Absolute path of the folder that relative paths in the file are resolved against.
    pub(super) folder: PathBuf,
    /// Text of the file, without a byte order mark. `None` if the file could not be read.
    pub(super) text: Option<String>,
    /// Position of the file's first byte in the whole configuration.
    pub(super) start: usize,
}

impl Source {
    fn new(path: &Path, folder: PathBuf, text: Option<&str>, start: usize) -> Self {
        let text = text.map(|text| text.strip_prefix('\u{feff}').unwrap_or(text).to_owned());
        Self { path: path.to_owned(), folder, text, start }
    }

    pub(super) fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    /// Returns the absolute path of the file.
    pub(super) fn absolute(&self) -> PathBuf {
        self.path.file_name().map_or_else(|| self.path.clone(), |name| self.folder.join(name))
    }
}

/// All files that make up a configuration.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sources {
    main: Source,
    /// Files in `conf.d`, sorted by name.
    fragments: Vec<Source>,
}

impl Sources {
    /// Creates a configuration that consists of the main file. `folder` is the absolute path of the file's folder.
    pub(super) fn new(path: &Path, folder: &Path, text: &str) -> Self {
        Self { main: Source::new(path, folder.to_owned(), Some(text), 0), fragments: Vec::new() }
    }

    /// Creates a configuration whose main file could not be read.
    pub(super) fn unreadable(path: &Path) -> Self {
        Self { main: Source::new(path, PathBuf::new(), None, 0), fragments: Vec::new() }
    }

    /// Adds a file in `conf.d`. Returns the position of the file's first byte in the whole configuration.
    pub(super) fn add_fragment(&mut self, path: &Path, text: Option<&str>) -> usize {
        let last = self.fragments.last().unwrap_or(&self.main);
        // Leaves one position unused, so that the position after the last byte belongs to the preceding file.
        let start = last.start + last.text().len() + 1;
        let folder = self.main.folder.join(defaults::FRAGMENTS_FOLDER);
        self.fragments.push(Source::new(path, folder, text, start));
        start
    }

    pub(super) fn main(&self) -> &Source {
        &self.main
    }

    pub(super) fn fragments(&self) -> &[Source] {
        &self.fragments
    }

    /// Returns the file that contains a position.
    pub(super) fn at(&self, position: usize) -> &Source {
        let after = self.fragments.partition_point(|source| source.start <= position);
        after.checked_sub(1).map_or(&self.main, |index| &self.fragments[index])
    }
}

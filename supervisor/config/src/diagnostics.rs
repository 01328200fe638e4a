//! Problems in a configuration, which are collected while the files are read and then shown together in the style of
//! rustc. This module handles text and positions, and knows nothing about keys.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use serde::Serialize;

use super::sources::{Source, Sources};

/// Maximum number of problems that a report shows in full. If there are more problems, the report shows only the number
/// of the others. [`ConfigErrors::problems`] returns all problems.
const SHOWN_MAX: usize = 100;

/// Maximum number of characters that a message quotes from a file.
const QUOTED_CHARS_MAX: usize = 80;

/// All problems in a configuration, sorted by file and line.
///
/// `Display` writes plain text; [`render`](Self::render) can add colours for a terminal.
#[derive(Clone, PartialEq)]
pub struct ConfigErrors {
    sources: Box<Sources>,
    problems: Vec<Problem>,
}

/// A problem in a configuration file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// Path of the file that contains the problem: the configuration file or a file in `conf.d`.
    pub file: PathBuf,
    /// Position of the problem. `None` if the file as a whole could not be read.
    #[serde(flatten)]
    pub at: Option<Position>,
    /// Description of the problem, as a sentence without a full stop.
    pub message: String,
    /// Suggested correction.
    pub help: Option<String>,
    #[serde(skip)]
    span: Range<usize>,
}

/// A position in a file, as shown by editors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    /// Line number, starting at 1.
    pub line: usize,
    /// Column number in characters, starting at 1.
    pub column: usize,
}

impl ConfigErrors {
    /// Creates an error for a file that cannot be read at all.
    pub(super) fn of_file(path: &Path, message: String, help: &str) -> Self {
        let mut problems = Problems::default();
        problems.report(0..0, message, help);
        problems.into_errors(Sources::unreadable(path))
    }

    /// Returns the path of the configuration file, as given by the caller.
    pub fn path(&self) -> &Path {
        &self.sources.main().path
    }

    /// Returns all problems, sorted by file and line. There is at least one.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns the complete report, which shows each problem with its position, the source line and a suggested
    /// correction.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let mut report = String::new();
        for problem in self.problems.iter().take(SHOWN_MAX) {
            report.push_str(&self.render_one(&renderer, problem));
            report.push_str("\n\n");
        }
        report.push_str(&self.closing_line());
        report
    }

    fn render_one(&self, renderer: &Renderer, problem: &Problem) -> String {
        let source = self.sources.at(problem.span.start);
        let (path, text) = (source.path.to_string_lossy(), source.text());
        let title = Level::ERROR.primary_title(problem.message.as_str());
        let help = problem.help.as_deref().map(|help| Level::HELP.message(help));
        let group = match problem.at {
            Some(at) => {
                let start = problem.span.start - source.start;
                let line = line_range(text, start);
                let end = (problem.span.end - source.start).clamp(start, line.end);
                let span = start - line.start..end - line.start;
                title.element(
                    Snippet::source(&text[line])
                        .path(&*path)
                        .line_start(at.line)
                        .annotation(AnnotationKind::Primary.span(span)),
                )
            }
            None => title.element(Origin::path(&*path)),
        };
        renderer.render(&[group.elements(help)])
    }

    fn closing_line(&self) -> String {
        let count = self.problems.len();
        let mut line = match count {
            1 => format!("{}: 1 error", self.path().display()),
            _ => format!("{}: {count} errors", self.path().display()),
        };
        if count > SHOWN_MAX {
            line.push_str(&format!(", of which the first {SHOWN_MAX} are shown"));
        }
        annotate_snippets::normalize_untrusted_str(&line)
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for ConfigErrors {}

bulkhead_shared::debug_by_display!(ConfigErrors);

/// Returns the range of the line that contains `offset`, without the line ending.
fn line_range(text: &str, offset: usize) -> Range<usize> {
    let start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[offset..].find('\n').map_or(text.len(), |newline| offset + newline);
    let end = if text[start..end].ends_with('\r') && end > offset { end - 1 } else { end };
    start..end
}

/// Problems found while the configuration files are read.
#[derive(Debug, Default)]
pub(super) struct Problems {
    found: Vec<(Range<usize>, String, String)>,
}

impl Problems {
    /// Adds a problem. `span` is a range of positions in the configuration.
    pub(super) fn report(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        self.found.push((span, message.into(), help.into()));
    }

    /// Adds the problems found in one file. `start` is the position of the file's first byte in the whole
    /// configuration.
    pub(super) fn append(&mut self, of_file: Self, start: usize) {
        let moved = |(span, message, help): (Range<usize>, String, String)| {
            (span.start + start..span.end + start, message, help)
        };
        self.found.extend(of_file.found.into_iter().map(moved));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Returns true if a problem was reported inside `span`.
    pub(super) fn any_within(&self, span: &Range<usize>) -> bool {
        self.found.iter().any(|(found, ..)| span.start <= found.start && found.end <= span.end)
    }

    /// Converts the collected problems into an error with line and column numbers. Removes duplicates, because an
    /// invalid value in `[defaults]` is reported once per bulkhead.
    pub(super) fn into_errors(mut self, sources: Sources) -> ConfigErrors {
        self.found.sort_by(|a, b| (a.0.start, a.0.end, &a.1).cmp(&(b.0.start, b.0.end, &b.1)));
        self.found.dedup_by(|a, b| a.0 == b.0 && a.1 == b.1);
        let mut cursor = Cursor::new(sources.main());
        let problems = self
            .found
            .into_iter()
            .map(|(span, message, help)| {
                let source = sources.at(span.start);
                if source.start != cursor.source.start {
                    cursor = Cursor::new(source);
                }
                let start = char_start(source, span.start);
                let end = char_start(source, span.end.max(start));
                let at = source.text.is_some().then(|| cursor.advance_to(start));
                Problem { file: source.path.clone(), at, message, help: Some(help), span: start..end }
            })
            .collect();
        ConfigErrors { sources: Box::new(sources), problems }
    }
}

/// Rounds a position down to the start of a character. The TOML parser can return positions inside a character.
fn char_start(source: &Source, position: usize) -> usize {
    let text = source.text();
    let mut start = (position - source.start).min(text.len());
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    source.start + start
}

/// Formats a position as `path:line:column`.
pub(super) fn place(sources: &Sources, position: usize) -> String {
    let source = sources.at(position);
    let Position { line, column } = Cursor::new(source).advance_to(char_start(source, position));
    format!("{}:{line}:{column}", shown(&source.path.to_string_lossy()))
}

/// Converts ascending positions in a file to lines and columns in a single pass over the file.
struct Cursor<'s> {
    source: &'s Source,
    offset: usize,
    at: Position,
}

impl<'s> Cursor<'s> {
    fn new(source: &'s Source) -> Self {
        Self { source, offset: 0, at: Position { line: 1, column: 1 } }
    }

    fn advance_to(&mut self, position: usize) -> Position {
        let offset = position - self.source.start;
        for c in self.source.text()[self.offset..offset].chars() {
            if c == '\n' {
                self.at = Position { line: self.at.line + 1, column: 1 };
            } else {
                self.at.column += 1;
            }
        }
        self.offset = offset;
        self.at
    }
}

/// Escapes and truncates text from the file for use in a one-line message.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().take(QUOTED_CHARS_MAX).collect::<String>().escape_debug().to_string();
    if text.chars().nth(QUOTED_CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown.replace("\\'", "'").replace("\\\"", "\"")
}

/// Escapes one part of a dotted key, and adds quotes unless the part is valid as a bare TOML key.
pub(super) fn shown_key(name: &str) -> String {
    let bare = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    if !name.is_empty() && name.bytes().all(bare) { shown(name) } else { format!("\"{}\"", shown(name)) }
}

/// Returns the candidate that is most similar to the misspelled `word`, if any candidate is similar enough.
pub(super) fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    if word.len() > QUOTED_CHARS_MAX {
        return None;
    }
    let distance_max = word.chars().count().max(3) / 3;
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= distance_max)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

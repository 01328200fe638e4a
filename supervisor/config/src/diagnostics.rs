//! What is wrong with a file: collected while reading, then shown all at once, as rustc shows its errors.
//! Knows text and positions, not what any key means.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use serde::Serialize;

/// Problems shown in full; what is beyond is counted. [`ConfigErrors::problems`] has them all.
const SHOWN_MAX: usize = 100;

/// Characters of a text of the file that are repeated in a message.
const QUOTED_CHARS_MAX: usize = 80;

/// Everything that is wrong with a configuration file, in the order of the file.
///
/// `Display` is plain text; [`render`](Self::render) can colour it for a terminal.
#[derive(Clone, PartialEq)]
pub struct ConfigErrors {
    path: PathBuf,
    text: String,
    problems: Vec<Problem>,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// Where, unless the file as a whole could not be read.
    #[serde(flatten)]
    pub at: Option<Position>,
    /// What is wrong, in one sentence without a full stop.
    pub message: String,
    /// What to do instead.
    pub help: Option<String>,
    #[serde(skip)]
    span: Range<usize>,
}

/// A place in a file, as editors count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
}

impl ConfigErrors {
    /// An error about the file as a whole: it cannot be read.
    pub(super) fn of_file(path: &Path, message: String, help: &str) -> Self {
        let problem = Problem { at: None, message, help: Some(help.to_owned()), span: 0..0 };
        Self { path: path.to_owned(), text: String::new(), problems: vec![problem] }
    }

    /// The file, as it was named by the caller.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The problems, at least one, in the order of the file.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// The whole report: each problem with file, line, column, the line itself and a help line.
    pub fn render(&self, color: bool) -> String {
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        let path = self.path.to_string_lossy();
        let mut report = String::new();
        for problem in self.problems.iter().take(SHOWN_MAX) {
            report.push_str(&self.render_one(&renderer, &path, problem));
            report.push_str("\n\n");
        }
        report.push_str(&self.closing_line());
        report
    }

    fn render_one(&self, renderer: &Renderer, path: &str, problem: &Problem) -> String {
        let title = Level::ERROR.primary_title(problem.message.as_str());
        let help = problem.help.as_deref().map(|help| Level::HELP.message(help));
        let group = match problem.at {
            Some(at) => {
                let line = line_range(&self.text, problem.span.start);
                let end = problem.span.end.clamp(problem.span.start, line.end);
                let span = problem.span.start - line.start..end - line.start;
                title.element(
                    Snippet::source(&self.text[line])
                        .path(path)
                        .line_start(at.line)
                        .annotation(AnnotationKind::Primary.span(span)),
                )
            }
            None => title.element(Origin::path(path)),
        };
        renderer.render(&[group.elements(help)])
    }

    fn closing_line(&self) -> String {
        let count = self.problems.len();
        let mut line = match count {
            1 => format!("{}: 1 error", self.path.display()),
            _ => format!("{}: {count} errors", self.path.display()),
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

/// The line that `offset` is in, without its end.
fn line_range(text: &str, offset: usize) -> Range<usize> {
    let start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[offset..].find('\n').map_or(text.len(), |newline| offset + newline);
    let end = if text[start..end].ends_with('\r') && end > offset { end - 1 } else { end };
    start..end
}

/// Collects problems while a file is read.
#[derive(Debug, Default)]
pub(super) struct Problems {
    found: Vec<(Range<usize>, String, String)>,
}

impl Problems {
    /// Notes one problem; `span` is in bytes of the file.
    pub(super) fn report(&mut self, span: Range<usize>, message: impl Into<String>, help: impl Into<String>) {
        self.found.push((span, message.into(), help.into()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Whether something inside `span` was refused.
    pub(super) fn any_within(&self, span: &Range<usize>) -> bool {
        self.found.iter().any(|(found, ..)| span.start <= found.start && found.end <= span.end)
    }

    /// Gives each problem its line and column. The same problem reached in two ways, as a bad default is
    /// through each bulkhead, is told once.
    pub(super) fn into_errors(mut self, path: &Path, text: &str) -> ConfigErrors {
        self.found.sort_by(|a, b| (a.0.start, a.0.end, &a.1).cmp(&(b.0.start, b.0.end, &b.1)));
        self.found.dedup_by(|a, b| a.0 == b.0 && a.1 == b.1);
        let mut cursor = Cursor { text, offset: 0, at: Position { line: 1, column: 1 } };
        let problems = self
            .found
            .into_iter()
            .map(|(span, message, help)| {
                let start = char_start(text, span.start);
                let end = char_start(text, span.end.max(start));
                let at = Some(cursor.advance_to(start));
                Problem { at, message, help: Some(help), span: start..end }
            })
            .collect();
        ConfigErrors { path: path.to_owned(), text: text.to_owned(), problems }
    }
}

/// `offset`, or the start of the character that it falls into: the parser of TOML reports bytes.
fn char_start(text: &str, offset: usize) -> usize {
    let mut start = offset.min(text.len());
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    start
}

/// Counts lines and characters once over the whole file, however many problems it has.
struct Cursor<'t> {
    text: &'t str,
    offset: usize,
    at: Position,
}

impl Cursor<'_> {
    fn advance_to(&mut self, offset: usize) -> Position {
        for c in self.text[self.offset..offset].chars() {
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

/// A text of the file, safe to repeat in one line of a message.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().take(QUOTED_CHARS_MAX).collect::<String>().escape_debug().to_string();
    if text.chars().nth(QUOTED_CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown.replace("\\'", "'").replace("\\\"", "\"")
}

/// The same as part of a dotted name: quoted, unless it is a bare key of TOML.
pub(super) fn shown_key(name: &str) -> String {
    let bare = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    if !name.is_empty() && name.bytes().all(bare) { shown(name) } else { format!("\"{}\"", shown(name)) }
}

/// The candidate that `word` was most likely meant to be.
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

//! Errors of the TOML parser, with what to write instead. One a line, since the parser's recovery stumbles
//! over what an error leaves behind.

use std::ops::Range;

use super::diagnostics::{Problems, shown};

/// Lines whose syntax errors are shown; after so many the parser has lost its way.
const LINES_MAX: usize = 10;

/// Reports the first error of each line.
pub(super) fn report(text: &str, errors: &[toml::de::Error], problems: &mut Problems) {
    let mut errors: Vec<_> =
        errors.iter().map(|error| (error.span().unwrap_or(0..0), error.message())).collect();
    errors.sort_by_key(|(span, _)| span.start);
    let mut last_end = None;
    let mut lines = 0;
    for (span, message) in errors {
        if last_end.is_some_and(|end| span.start <= end) || lines == LINES_MAX {
            continue;
        }
        let rest = text.get(span.start..).unwrap_or_default();
        last_end = Some(span.start + rest.find('\n').unwrap_or(rest.len()));
        lines += 1;
        let written = text.get(span.clone()).unwrap_or_default();
        problems.report(span.clone(), plain(message), help(message, written, &span));
    }
}

/// The parser's sentence without the list of characters that could have followed.
fn plain(message: &str) -> &str {
    message.split_once(", expected ").map_or(message, |(what, _)| what)
}

fn help(message: &str, written: &str, span: &Range<usize>) -> String {
    let advice = match plain(message) {
        "string values must be quoted" if span.is_empty() => "write a value after the `=`",
        "string values must be quoted" => return format!("write \"{}\"", shown(written.trim())),
        "duplicate key" => "it was set above: keep one of the two",
        "key with no value" => "write `key = value`",
        "unexpected key or value" => "put each `key = value` on a line of its own",
        "invalid unquoted key" => "a key is made of A-Z, a-z, 0-9, `_` and `-`; quote any other",
        "invalid basic string" => {
            "a string ends on its line with `\"`; write special characters as `\\n`, `\\u0000`"
        }
        what if what.starts_with("unclosed table") => "close the heading with `]`",
        what if what.starts_with("cannot extend value") => {
            "write the table either in braces or as a section, not both"
        }
        _ => match message.split_once(", expected ") {
            Some((_, expected)) => return format!("expected {expected}"),
            None => "see https://toml.io for how TOML is written",
        },
    };
    advice.to_owned()
}

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
        if let Some(line) = rest.strip_prefix(':').filter(|_| plain(message) == "invalid unquoted key") {
            problems.report(span.clone(), "`:` in the place of `=`", colon_help(&text[..span.start], line));
            continue;
        }
        let written = text.get(span.clone()).unwrap_or_default();
        problems.report(span.clone(), plain(message), help(message, written, &span));
    }
}

/// The parser's sentence without the list of characters that could have followed.
fn plain(message: &str) -> &str {
    message.split_once(", expected ").map_or(message, |(what, _)| what)
}

/// Help for `key: value`, by what stands before and after the colon.
fn colon_help(before: &str, after: &str) -> String {
    let is_of_key = |c: char| c.is_ascii_alphanumeric() || "_-.\"".contains(c);
    let line = before.rsplit('\n').next().unwrap_or_default().trim_end();
    let key = &line[line.trim_end_matches(is_of_key).len()..];
    let value = after.lines().next().unwrap_or_default();
    // Within braces the next key is not part of the value.
    let value = if line.contains('{') { value.split([',', '}']).next().unwrap_or(value) } else { value };
    format!("TOML has `=` between a key and its value: write `{} = {}`", shown(key), shown(value.trim()))
}

fn help(message: &str, written: &str, span: &Range<usize>) -> String {
    let word = written.trim().to_lowercase();
    let advice = match plain(message) {
        "string values must be quoted" if span.is_empty() => "write a value after the `=`",
        "string values must be quoted" if matches!(&*word, "yes" | "on" | "true") => {
            "write `true`; only a text has quotes"
        }
        "string values must be quoted" if matches!(&*word, "no" | "off" | "false") => {
            "write `false`; only a text has quotes"
        }
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

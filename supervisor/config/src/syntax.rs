//! Reports errors from the TOML parser, with suggested corrections. Reports at most one error per line, because a
//! single mistake often causes several. `loading` runs the parser, and `reader` reports unknown keys and invalid
//! values.

use std::ops::Range;

use super::diagnostics::{Problems, shown};

/// Maximum number of lines for which to report syntax errors. Errors on further lines are unreliable.
const LINES_MAX: usize = 10;

/// Reports the first syntax error on each line.
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
            problems.report(span.clone(), "`:` in place of `=`", colon_help(&text[..span.start], line));
            continue;
        }
        let written = text.get(span.clone()).unwrap_or_default();
        problems.report(span.clone(), plain(message), help(message, written, &span));
    }
}

/// Removes the list of expected characters from a parser message.
fn plain(message: &str) -> &str {
    message.split_once(", expected ").map_or(message, |(what, _)| what)
}

/// Returns the help text for a line written as `key: value` instead of `key = value`. `before` and `after` are the
/// text on either side of the colon.
fn colon_help(before: &str, after: &str) -> String {
    let is_of_key = |c: char| c.is_ascii_alphanumeric() || "_-.\"".contains(c);
    let line = before.rsplit('\n').next().unwrap_or_default().trim_end();
    let key = &line[line.trim_end_matches(is_of_key).len()..];
    let value = after.lines().next().unwrap_or_default();
    // In an inline table, the value ends before the next key.
    let value = if line.contains('{') { value.split([',', '}']).next().unwrap_or(value) } else { value };
    format!("TOML uses `=` between a key and its value: write `{} = {}`", shown(key), shown(value.trim()))
}

fn help(message: &str, written: &str, span: &Range<usize>) -> String {
    let word = written.trim().to_lowercase();
    let advice = match plain(message) {
        "string values must be quoted" if span.is_empty() => "write a value after the `=`",
        "string values must be quoted" if matches!(&*word, "yes" | "on" | "true") => {
            "write `true`; only strings are quoted"
        }
        "string values must be quoted" if matches!(&*word, "no" | "off" | "false") => {
            "write `false`; only strings are quoted"
        }
        "string values must be quoted" => return format!("write \"{}\"", shown(written.trim())),
        "duplicate key" => "the key is already set above: remove one of the two lines",
        "key with no value" => "write `key = value`",
        "unexpected key or value" => "put each `key = value` on a separate line",
        "invalid unquoted key" => "a key consists of A-Z, a-z, 0-9, `_` and `-`; quote any other key",
        "invalid basic string" => {
            "end the string with `\"` on the same line; write special characters as `\\n`, `\\u0000`"
        }
        what if what.starts_with("unclosed table") => "close the heading with `]`",
        what if what.starts_with("cannot extend value") => {
            "write the table either in braces or as a section, not both"
        }
        _ => match message.split_once(", expected ") {
            Some((_, expected)) => return format!("expected {expected}"),
            None => "see https://toml.io for the syntax of TOML",
        },
    };
    advice.to_owned()
}

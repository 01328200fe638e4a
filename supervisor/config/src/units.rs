//! Conversion of durations and sizes between text and numbers. The callers write the error messages, because only the
//! callers know the key.

use std::time::Duration;

use serde::Serializer;

/// Reason why a string is not a valid duration or size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitError {
    /// The number has no unit, but a unit is required.
    NoUnit,
    /// The unit is `M`, which could mean minutes or months.
    AmbiguousMonth,
    /// The unit is a single letter, which is ambiguous. The fields contain the units to suggest: one for powers of
    /// 1024, and one for powers of 1000.
    AmbiguousPower(&'static str, &'static str),
    /// The value does not fit in 64 bits.
    TooLarge,
    /// The value is not a whole number of nanoseconds.
    TooFine,
    /// The text is not in the expected format.
    Malformed,
}

/// Parses a duration such as `"500ms"`, `"2s"` or `"1m 30s"`.
pub(super) fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(UnitError::NoUnit);
    }
    if text.split(|c: char| !c.is_alphabetic()).any(|unit| unit == "M") {
        return Err(UnitError::AmbiguousMonth);
    }
    humantime::parse_duration(text).map_err(|error| match error {
        humantime::DurationError::NumberOverflow => overflow(text),
        _ => UnitError::Malformed,
    })
}

/// Returns the actual error for a text that `humantime` rejects with `NumberOverflow`. A number can be too large or
/// have too many decimal places. The text can also be malformed, because `humantime` does not check it any further
/// after an overflow.
fn overflow(text: &str) -> UnitError {
    match without_fractions(text) {
        None => UnitError::Malformed,
        Some(whole) if humantime::parse_duration(&whole).is_ok() => UnitError::TooFine,
        Some(_) => UnitError::TooLarge,
    }
}

/// Removes the fractional part of each number in a duration. Returns `None` if the text does not match [the
/// pattern](duration_pattern).
fn without_fractions(text: &str) -> Option<String> {
    let of_number = |c: char| c.is_ascii_digit() || c.is_whitespace();
    let digits = |text: &str| text.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let mut whole = String::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c| !of_number(c)).unwrap_or(rest.len()));
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => after.split_at(after.find(|c| !of_number(c)).unwrap_or(after.len())),
            None => ("0", after),
        };
        let (unit, after) = after.split_at(after.find(|c: char| !c.is_alphabetic()).unwrap_or(after.len()));
        if !digits(number) || !digits(fraction) || !DURATION_UNITS.split('|').any(|known| known == unit) {
            return None;
        }
        whole += number;
        whole += unit;
        rest = after.trim_start();
    }
    Some(whole)
}

/// Units of duration that `humantime` supports, except for `M`, which this program rejects as ambiguous.
const DURATION_UNITS: &str = "nanos|nsec|ns|usec|us|µs|millis|msec|ms|seconds|second|secs|sec|s|minutes|minute|\
     mins|min|m|hours|hour|hrs|hr|h|days|day|d|weeks|week|wks|wk|w|months|month|years|year|yrs|yr|y";

/// Returns a regular expression that matches the durations accepted by `parse_duration`. Also matches durations that
/// are out of range.
pub(super) fn duration_pattern() -> String {
    format!(r"\s*(?:[0-9][0-9\s]*(?:\.\s*[0-9][0-9\s]*)?(?:{DURATION_UNITS})\s*)+")
}

/// Units of size, with the number of bytes in each. Single letters are not supported, because `256M` could mean 256 ×
/// 2²⁰ or 256 × 10⁶ bytes.
const SIZE_UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Parses a size such as `"64KiB"`, `"1.5GiB"`, `"10MB"` or `"4096"`.
pub(super) fn parse_size(text: &str) -> Result<u64, UnitError> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim_start());
    let scale = match SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
        Some((_, scale)) => *scale,
        None => return Err(wrong_size_unit(unit)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || (number.contains('.') && (fraction.is_empty() || scale == 1)) || fraction.len() > 9
    {
        return Err(UnitError::Malformed);
    }
    let all: u128 = format!("{whole}{fraction}").parse().map_err(|_| number_error(whole, fraction))?;
    let bytes =
        all.checked_mul(u128::from(scale)).ok_or(UnitError::TooLarge)? / 10u128.pow(fraction.len() as u32);
    u64::try_from(bytes).map_err(|_| UnitError::TooLarge)
}

/// Returns a regular expression that matches the sizes accepted by `parse_size`. Also matches sizes that are out of
/// range.
pub(super) fn size_pattern() -> String {
    let either_case = |c: char| format!("[{}{}]", c.to_ascii_lowercase(), c.to_ascii_uppercase());
    let spelt = |(name, _): &(&str, u64)| name.chars().map(either_case).collect::<String>();
    let (ones, scaled): (Vec<_>, Vec<_>) = SIZE_UNITS.iter().partition(|(_, scale)| *scale == 1);
    let list = |units: Vec<&(&str, u64)>| units.into_iter().map(spelt).collect::<Vec<_>>().join("|");
    let (ones, scaled) = (list(ones), list(scaled));
    format!(r"\s*(?:[0-9]+\s*(?:{ones})|[0-9]+(?:\.[0-9]{{1,9}})?\s*(?:{scaled}))\s*")
}

fn number_error(whole: &str, fraction: &str) -> UnitError {
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if digits(whole) && digits(fraction) { UnitError::TooLarge } else { UnitError::Malformed }
}

fn wrong_size_unit(unit: &str) -> UnitError {
    match unit {
        "k" | "K" | "Ki" | "ki" => UnitError::AmbiguousPower("KiB", "kB"),
        "m" | "M" | "Mi" | "mi" => UnitError::AmbiguousPower("MiB", "MB"),
        "g" | "G" | "Gi" | "gi" => UnitError::AmbiguousPower("GiB", "GB"),
        "t" | "T" | "Ti" | "ti" => UnitError::AmbiguousPower("TiB", "TB"),
        _ => UnitError::Malformed,
    }
}

/// Formats a duration as text, such as `1m 30s`. `parse_duration` converts the result back to the same duration.
pub fn format_duration(duration: Duration) -> String {
    const STEPS: [(u128, &str); 7] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
        (1, "ns"),
    ];
    let mut rest = duration.as_nanos();
    let mut parts = Vec::new();
    for (nanos, unit) in STEPS {
        if rest >= nanos {
            parts.push(format!("{}{unit}", rest / nanos));
            rest %= nanos;
        }
    }
    if parts.is_empty() { "0s".to_owned() } else { parts.join(" ") }
}

/// Formats a size as a whole number of the largest possible binary unit. `parse_size` converts the result back to the
/// same size.
pub fn format_size(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(scale, _)| bytes >= *scale && bytes.is_multiple_of(*scale)) {
        Some((scale, unit)) => format!("{}{unit}", bytes / scale),
        None => format!("{bytes}B"),
    }
}

/// Formats a minimum or maximum size for a message. Sizes below 1 KiB are shown without a unit.
pub(super) fn size_bound(bytes: u64) -> String {
    if bytes < 1 << 10 { bytes.to_string() } else { format_size(bytes) }
}

/// Formats a duration as TOML, including quotes.
pub(super) fn duration_literal(duration: &Duration) -> String {
    format!("\"{}\"", format_duration(*duration))
}

/// Formats a fraction with a decimal point, such as `1.0`.
pub(super) fn share_literal(share: &f64) -> String {
    format!("{share:?}")
}

pub(super) fn serialize_duration<S: Serializer>(
    duration: &Duration,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format_duration(*duration))
}

pub(super) fn serialize_duration_option<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => serialize_duration(duration, serializer),
        None => serializer.serialize_none(),
    }
}

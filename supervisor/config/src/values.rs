//! Converts single TOML values to Rust values. If a value is invalid, returns an error message with a suggested
//! correction. `reader` selects the function that matches the kind of the key, and reports the error. This module does
//! not access files, and does not check rules that involve several keys.

use std::ops::Deref;
use std::time::Duration;

use bulkhead_linux::rlimits::Resource;
use bulkhead_shared::Vocabulary;
use toml::de::{DeInteger, DeValue};

use super::defaults;
use super::diagnostics::{nearest, shown};
use super::ids::UidRange;
use super::key::{Key, Kind, format_list};
use super::rlimits::{Measure, UNLIMITED, meaning};
use super::units::{self, UnitError};

/// Reason for rejecting a value, and a suggested correction.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ValueError {
    pub(super) message: String,
    pub(super) help: String,
}

impl ValueError {
    pub(super) fn new(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { message: message.into(), help: help.into() }
    }
}

type ValueResult<T> = Result<T, ValueError>;

/// A configuration key, together with the full name of the key that error messages use.
pub(super) struct LabelledKey {
    pub(super) key: Key,
    /// Name of the key within the configuration of the bulkhead or supervisor, including the names of nested tables,
    /// such as `restart.backoff` or `tenant.acme.max_queue`.
    pub(super) label: String,
}

impl Deref for LabelledKey {
    type Target = Key;

    fn deref(&self) -> &Key {
        &self.key
    }
}

/// Returns a help text that suggests a value for a key, such as `` write `key = value` ``.
fn write_help(key: &LabelledKey, value: &str) -> String {
    format!("write `{} = {value}`", key.name)
}

pub(super) fn wrong_type(key: &LabelledKey, expected: &str, value: &DeValue<'_>) -> ValueError {
    let found = type_name(value);
    ValueError::new(
        format!("`{}` must be {expected}, not {found}", key.label),
        write_help(key, &key.example()),
    )
}

pub(super) fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a number",
        DeValue::Float(_) => "a decimal number",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}

/// Returns the TOML literal of a string or number.
pub(super) fn literal(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(format!("\"{}\"", shown(text))),
        DeValue::Integer(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Returns the help text for a string that should be an array of arguments. The supervisor does not split strings,
/// because it does not use a shell.
pub(super) fn split_help(name: &str, text: &str) -> String {
    if text.contains(['|', '>', '<', ';', '&', '$', '`', '*']) {
        let text = shown(text).replace('"', "\\\"");
        return format!(
            "the supervisor runs no shell: if the command needs a shell, write `{name} = [\"sh\", \"-c\", \
             \"{text}\"]`"
        );
    }
    let words: Vec<_> = text.split_whitespace().map(|word| format!("\"{}\"", shown(word))).collect();
    format!(
        "the supervisor runs no shell that would split the string: write `{name} = [{}]`",
        words.join(", ")
    )
}

/// Parses an integer. Numbers outside the range of `i128` are clamped, because no key accepts such numbers anyway.
fn integer(number: &DeInteger<'_>) -> i128 {
    let saturated = if number.as_str().starts_with('-') { i128::MIN } else { i128::MAX };
    i128::from_str_radix(number.as_str(), number.radix()).unwrap_or(saturated)
}

pub(super) fn duration(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<Duration> {
    let Kind::Duration(min) = key.kind else { return Err(wrong_kind(key)) };
    let duration = match value {
        DeValue::String(text) => duration_text(key, text)?,
        DeValue::Integer(number) => {
            let number = number.to_string();
            let is_nothing = number.bytes().all(|digit| digit == b'0') && !min.is_zero();
            return Err(ValueError::new(
                format!("`{}` must be a duration with a unit, not a bare number", key.label),
                if is_nothing { out_of_range_help(key) } else { unit_help(key, &number) },
            ));
        }
        other => return Err(wrong_type(key, "a duration as a string", other)),
    };
    if duration < min || duration > defaults::DURATION_MAX {
        let (min, max) = (units::format_duration(min), units::format_duration(defaults::DURATION_MAX));
        let given = units::format_duration(duration);
        return Err(ValueError::new(
            format!("`{}` must be from {min} to {max}, not {given}", key.label),
            out_of_range_help(key),
        ));
    }
    Ok(duration)
}

/// Returns the help text for a duration that is out of range. The help text for `queue_timeout` explains what to write
/// instead of zero.
fn out_of_range_help(key: &LabelledKey) -> String {
    match key.name {
        "queue_timeout" => {
            "to reject jobs instead of queueing them, set `max_queue = 0`; to let jobs wait until their \
             deadline, remove the key"
                .to_owned()
        }
        _ => write_help(key, &key.example()),
    }
}

fn duration_text(key: &LabelledKey, text: &str) -> ValueResult<Duration> {
    units::parse_duration(text).map_err(|error| {
        let message = format!("`{}` is not a duration: \"{}\"", key.label, shown(text));
        let help = match error {
            UnitError::NoUnit => unit_help(key, text.trim()),
            UnitError::AmbiguousMonth => {
                "`M` can mean a month: for minutes write `m`, as in \"5m\"".to_owned()
            }
            UnitError::TooLarge => {
                format!("the longest duration is \"{}\"", units::format_duration(defaults::DURATION_MAX))
            }
            UnitError::TooFine => {
                "a duration must be a whole number of nanoseconds, as in \"1.5ms\"".to_owned()
            }
            UnitError::AmbiguousPower(..) | UnitError::Malformed => {
                "write numbers with units, as in \"500ms\", \"2s\" or \"1m 30s\"".to_owned()
            }
        };
        ValueError::new(message, help)
    })
}

/// Suggests adding a unit to a duration written as a plain number.
fn unit_help(key: &LabelledKey, number: &str) -> String {
    let number = if number.len() <= 12 && !number.starts_with('-') { number } else { "5" };
    format!("{} for seconds, or \"{number}ms\" for milliseconds", write_help(key, &format!("\"{number}s\"")))
}

pub(super) fn size(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<u64> {
    let Kind::Size { min, max } = key.kind else { return Err(wrong_kind(key)) };
    let bytes = size_value(key, value)?;
    if bytes < i128::from(min) || bytes > i128::from(max) {
        let range = match max {
            defaults::NUMBER_MAX => format!("at least {}", units::size_bound(min)),
            _ => format!("from {min} to {} bytes ({})", max, units::format_size(max)),
        };
        return Err(ValueError::new(
            format!("`{}` must be {range}, not {}", key.label, shown_number(bytes)),
            write_help(key, &key.example()),
        ));
    }
    Ok(bytes as u64)
}

/// Reads a size without checking that it is in range.
fn size_value(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<i128> {
    match value {
        DeValue::Integer(number) => Ok(integer(number)),
        DeValue::String(text) => units::parse_size(text).map(i128::from).map_err(|error| {
            let message = format!("`{}` is not a size: \"{}\"", key.label, shown(text));
            let help = match error {
                UnitError::AmbiguousPower(binary, decimal) => {
                    let number = text.trim_end_matches(|c: char| c.is_alphabetic() || c.is_whitespace()).trim();
                    format!("write \"{number}{binary}\" for powers of 1024, or \"{number}{decimal}\" for powers of 1000")
                }
                UnitError::TooLarge => "the number of bytes must fit in 64 bits".to_owned(),
                _ => {
                    "write a number of bytes, or a number with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB, as in \"64MiB\""
                        .to_owned()
                }
            };
            ValueError::new(message, help)
        }),
        other => Err(wrong_type(key, "a size such as \"64MiB\" or a number of bytes", other)),
    }
}

fn shown_number(number: i128) -> String {
    match number {
        i128::MIN => "a number far below zero".to_owned(),
        i128::MAX => "a number that large".to_owned(),
        number => number.to_string(),
    }
}

pub(super) fn count<T: TryFrom<i128>>(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<T> {
    let Kind::Count { min, max } = key.kind else { return Err(wrong_kind(key)) };
    let number = whole_number(key, value)?;
    if number < i128::from(min) || number > i128::from(max) {
        let range = match max {
            defaults::NUMBER_MAX if number < i128::from(min) => format!("at least {min}"),
            defaults::NUMBER_MAX => format!("at most {max}"),
            _ => format!("from {min} to {max}"),
        };
        let nearest = number.clamp(i128::from(min), i128::from(max));
        let why = if key.name == "attempts" && number == 1 { ": the first attempt counts" } else { "" };
        let help = match write_help(key, &nearest.to_string()) {
            help if number == -1 => format!("{help}; `-1` does not mean unlimited, the maximum is {max}"),
            help => help,
        };
        return Err(ValueError::new(
            format!("`{}` must be {range}, not {}{why}", key.label, shown_number(number)),
            help,
        ));
    }
    T::try_from(number).map_err(|_| wrong_kind(key))
}

/// Reads an array of exit statuses. Rejects duplicates.
pub(super) fn statuses(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<Vec<u8>> {
    let DeValue::Array(array) = value else {
        return Err(wrong_type(key, "an array of exit statuses", value));
    };
    let mut statuses = Vec::new();
    for (index, element) in array.iter().enumerate() {
        let status = match element.get_ref() {
            DeValue::Integer(number) => {
                u8::try_from(integer(number)).map_err(|_| shown_number(integer(number)))
            }
            other => Err(type_name(other).to_owned()),
        };
        let status = status.map_err(|given| {
            let message =
                format!("`{}[{index}]` must be an exit status from 0 to 255, not {given}", key.label);
            ValueError::new(message, write_help(key, &key.example()))
        })?;
        if statuses.contains(&status) {
            return Err(ValueError::new(format!("`{}` lists {status} twice", key.label), "remove one"));
        }
        statuses.push(status);
    }
    Ok(statuses)
}

/// Reads a port number.
pub(super) fn port(label: &str, value: &DeValue<'_>) -> ValueResult<u16> {
    let given = match value {
        DeValue::Integer(number) => match u16::try_from(integer(number)) {
            Ok(port) if port > 0 => return Ok(port),
            _ => shown_number(integer(number)),
        },
        other => type_name(other).to_owned(),
    };
    let message = format!("`{label}` must be a port from 1 to 65535, not {given}");
    Err(ValueError::new(message, "write `tcp_ports = [443]`"))
}

fn whole_number(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<i128> {
    match value {
        DeValue::Integer(number) => Ok(integer(number)),
        DeValue::String(text) if text.trim().parse::<u32>().is_ok() => Err(ValueError::new(
            format!("`{}` must be a whole number, not a string", key.label),
            write_help(key, text.trim()),
        )),
        other => Err(wrong_type(key, "a whole number", other)),
    }
}

pub(super) fn share(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<f64> {
    let Kind::Share { none, all } = key.kind else { return Err(wrong_kind(key)) };
    let fits = |share: f64| (share > 0.0 || none && share == 0.0) && (share < 1.0 || all && share == 1.0);
    let share = fraction(key, "a share such as 0.2", value)?;
    if fits(share) {
        // TOML numbers can be negative zero.
        return Ok(share.abs());
    }
    let range = match (none, all) {
        (true, true) => "from 0 to 1",
        (true, false) => "from 0 to below 1",
        (false, true) => "above 0 and at most 1",
        (false, false) => "above 0 and below 1",
    };
    let why = if share >= 1.0 && !all { ": nothing would be left for other jobs" } else { "" };
    let percent = share / 100.0;
    let help = if share >= 2.0 && share.fract() == 0.0 && fits(percent) {
        format!("{} for {share} %", write_help(key, &units::share_literal(&percent)))
    } else {
        write_help(key, &key.example())
    };
    let message = format!("`{}` must be {range}, not {}{why}", key.label, shown_literal(value));
    Err(ValueError::new(message, help))
}

pub(super) fn number(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<f64> {
    let Kind::Number(max) = key.kind else { return Err(wrong_kind(key)) };
    let number = fraction(key, "a number", value)?;
    if number > 0.0 && number <= max as f64 {
        return Ok(number);
    }
    let nearest = if number > 0.0 { max.to_string() } else { key.example() };
    Err(ValueError::new(
        format!("`{}` must be above 0 and at most {max}, not {}", key.label, shown_literal(value)),
        write_help(key, &nearest),
    ))
}

pub(super) fn boolean(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<bool> {
    let intended = match value {
        DeValue::Boolean(boolean) => return Ok(*boolean),
        DeValue::Integer(number) => match integer(number) {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
        DeValue::String(text) => match text.trim().to_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some(true),
            "false" | "no" | "off" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    let help = match intended {
        Some(intended) => format!("{} without quotes", write_help(key, &intended.to_string())),
        None => format!("{} or `{} = false`", write_help(key, "true"), key.name),
    };
    Err(ValueError::new(format!("`{}` must be `true` or `false`, not {}", key.label, type_name(value)), help))
}

/// Reads an integer or floating-point number. The caller must reject infinities and NaN.
fn fraction(key: &LabelledKey, expected: &str, value: &DeValue<'_>) -> ValueResult<f64> {
    match value {
        DeValue::Integer(number) => Ok(integer(number) as f64),
        // Numbers too large for `f64` become infinite, which is out of range for every key.
        DeValue::Float(number) => Ok(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::String(text) if is_decimal(text.trim()) => Err(ValueError::new(
            format!("`{}` must be {expected}, not a string", key.label),
            format!("{} without the quotes", write_help(key, &shown(text.trim()))),
        )),
        other => Err(wrong_type(key, expected, other)),
    }
}

fn is_decimal(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.split_once('.') {
        Some((whole, fraction)) => digits(whole) && digits(fraction),
        None => digits(text),
    }
}

fn shown_literal(value: &DeValue<'_>) -> String {
    match value {
        DeValue::Integer(number) => shown_number(integer(number)),
        DeValue::Float(number) => shown(number.as_str()),
        DeValue::String(text) => shown(text),
        other => type_name(other).to_owned(),
    }
}

pub(super) fn mode(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<u32> {
    let help = |digits: &str| format!("{}: octal digits, quoted", write_help(key, &format!("\"{digits}\"")));
    let text = match value {
        DeValue::String(text) => text,
        DeValue::Integer(number) => {
            let digits = number.as_str();
            let digits = if octal(digits).is_some() { format!("0{digits}") } else { "0600".to_owned() };
            return Err(ValueError::new(
                format!("`{}` must be a string, not a number", key.label),
                help(&digits),
            ));
        }
        other => return Err(wrong_type(key, "octal digits as a string", other)),
    };
    octal(text).or_else(|| text.strip_prefix('0').and_then(octal)).ok_or_else(|| {
        ValueError::new(
            format!("`{}` is not a mode of three octal digits: \"{}\"", key.label, shown(text)),
            help("0600"),
        )
    })
}

fn octal(digits: &str) -> Option<u32> {
    let valid = digits.len() == 3 && digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
    if valid { u32::from_str_radix(digits, 8).ok() } else { None }
}

/// Reads a string that must not be empty. Rejects NUL bytes, which the kernel does not accept.
pub(super) fn text(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<String> {
    let expected = if key.kind == Kind::Path { "a path as a string" } else { "a string" };
    let DeValue::String(text) = value else { return Err(wrong_type(key, expected, value)) };
    path_text(&key.label, text, key)?;
    Ok(text.to_string())
}

/// Checks that the text of a path is not empty and does not contain a NUL byte.
pub(super) fn path_text(label: &str, text: &str, key: &LabelledKey) -> ValueResult<()> {
    if text.is_empty() {
        return Err(ValueError::new(format!("`{label}` is empty"), write_help(key, &key.example())));
    }
    no_nul(label, text)
}

pub(super) fn no_nul(label: &str, text: &str) -> ValueResult<()> {
    if text.contains('\0') {
        return Err(ValueError::new(
            format!("`{label}` contains a NUL byte, which the kernel treats as the end of a string"),
            "remove the `\\u0000`",
        ));
    }
    Ok(())
}

pub(super) fn word<T: Vocabulary>(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<T> {
    let Kind::Word(of) = key.kind else { return Err(wrong_kind(key)) };
    let DeValue::String(text) = value else { return Err(wrong_type(key, "a string", value)) };
    T::from_word(text).ok_or_else(|| not_one_of(&key.label, text, &text.to_lowercase().replace('_', "-"), of))
}

/// Checks that the text is one of the allowed words.
pub(super) fn check_word(label: &str, text: &str, words: &[&'static str]) -> ValueResult<()> {
    if words.contains(&text) {
        return Ok(());
    }
    Err(not_one_of(label, text, &text.to_lowercase().replace('-', "_"), words))
}

/// Returns the error for an unknown word. `intended` is the same word, written in the style of the allowed words. It is
/// used to find the closest match.
fn not_one_of(label: &str, text: &str, intended: &str, words: &[&'static str]) -> ValueError {
    let help = match nearest(intended, words.iter().copied()) {
        Some(word) => format!("did you mean `\"{word}\"`?"),
        None => {
            format!("write one of {}", format_list(words))
        }
    };
    ValueError::new(format!("`{label}` cannot be \"{}\"", shown(text)), help)
}

/// Reads a range of user IDs, such as `"200000-200999"`. Rejects ID 0, which is root.
pub(super) fn ids(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<UidRange> {
    let DeValue::String(text) = value else {
        return Err(wrong_type(key, "a string with the first and the last ID", value));
    };
    let help = || write_help(key, &key.example());
    let number = |digits: &str| {
        let digits = digits.trim();
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        // A number that does not fit in `u64` is out of range in any case.
        plain.then(|| digits.parse::<u64>().unwrap_or(u64::MAX))
    };
    let Some((first, last)) =
        text.split_once('-').and_then(|(first, last)| Some((number(first)?, number(last)?)))
    else {
        let message = format!("`{}` is not a range of IDs: \"{}\"", key.label, shown(text));
        return Err(ValueError::new(message, help()));
    };
    if first > last {
        let message = format!("`{}` has a first ID above its last ID: \"{}\"", key.label, shown(text));
        return Err(ValueError::new(message, write_help(key, &format!("\"{last}-{first}\""))));
    }
    if first == 0 || last > defaults::ID_MAX {
        let message =
            format!("`{}` must be from 1 to {}, not \"{}\"", key.label, defaults::ID_MAX, shown(text));
        return Err(ValueError::new(message, help()));
    }
    let max = defaults::WORKER_UIDS_MAX;
    if last - first >= max {
        let message = format!("`{}` has {} IDs, but the maximum is {max}", key.label, last - first + 1);
        let fewer = (first + max - 1).min(last);
        return Err(ValueError::new(
            message,
            format!("{} or fewer", write_help(key, &format!("\"{first}-{fewer}\""))),
        ));
    }
    // The conversion is lossless, because IDs are at most `ID_MAX`.
    Ok(UidRange { first: first as u32, last: last as u32 })
}

/// Returns the error for a value that is not an array of tables.
pub(super) fn not_tables(key: &LabelledKey, value: &DeValue<'_>) -> ValueError {
    let help = match value {
        DeValue::Table(_) => format!("write [[{}]], with double brackets, for each entry", key.name),
        _ => format!("write one [[{}]] section for each entry", key.name),
    };
    ValueError::new(format!("`{}` must be an array of tables, not {}", key.label, type_name(value)), help)
}

/// Returns the error for an array element that should be a table.
pub(super) fn not_a_table_of(key: &LabelledKey, index: usize, value: &DeValue<'_>) -> ValueError {
    let found = type_name(value);
    ValueError::new(
        format!("`{}[{index}]` must be a table, not {found}", key.label),
        format!("write one [[{}]] section for each entry, or `{} = {}`", key.name, key.name, key.example()),
    )
}

/// Reads a resource limit and converts it to the unit in which the resource is measured. Returns `None` if the resource
/// is unlimited.
pub(super) fn limit(key: &LabelledKey, resource: Resource, value: &DeValue<'_>) -> ValueResult<Option<u64>> {
    let measure = meaning(resource).0;
    if measure == Measure::Zero {
        return zero_limit(value);
    }
    if matches!(value, DeValue::String(text) if text == UNLIMITED) {
        return Ok(None);
    }
    let number = match (measure, value) {
        (Measure::Bytes, _) => size_value(key, value)?,
        (Measure::Seconds, _) => time_limit(key, value, 1_000_000_000)?,
        (Measure::Microseconds, _) => time_limit(key, value, 1_000)?,
        (Measure::Count | Measure::Zero, _) => count_limit(key, value)?,
    };
    // The kernel would treat a processor time limit of 0 as 1 second.
    let min = if measure == Measure::Seconds { 1 } else { 0 };
    if number < min || number > i128::from(defaults::NUMBER_MAX) {
        return Err(ValueError::new(
            format!("`{}` must be at least {min}, not {}", key.label, shown_number(number)),
            format!("{}, or \"{UNLIMITED}\"", write_help(key, &key.example())),
        ));
    }
    Ok(Some(number as u64))
}

/// Reads a time limit, which can be a duration or a plain number in the resource's unit. Checks that the limit is at
/// most `DURATION_MAX`.
fn time_limit(key: &LabelledKey, value: &DeValue<'_>, unit_nanos: u128) -> ValueResult<i128> {
    let number = match value {
        DeValue::String(text) => whole_units(duration_text(key, text)?, unit_nanos),
        DeValue::Integer(number) => integer(number),
        other => return Err(wrong_type(key, "a duration, a number or \"unlimited\"", other)),
    };
    if number > whole_units(defaults::DURATION_MAX, unit_nanos) {
        return Err(ValueError::new(
            format!(
                "`{}` must be at most {}, not {}",
                key.label,
                units::format_duration(defaults::DURATION_MAX),
                shown_literal(value)
            ),
            format!("{}, or \"{UNLIMITED}\"", write_help(key, &key.example())),
        ));
    }
    Ok(number)
}

/// Converts a duration to a whole number of units. Rounds up, so that a limit below one unit does not become 0.
fn whole_units(duration: Duration, unit_nanos: u128) -> i128 {
    i128::try_from(duration.as_nanos().div_ceil(unit_nanos)).unwrap_or(i128::MAX)
}

fn count_limit(key: &LabelledKey, value: &DeValue<'_>) -> ValueResult<i128> {
    match value {
        DeValue::String(text) if text.trim().parse::<u32>().is_err() => Err(ValueError::new(
            format!("`{}` must be a number or \"{UNLIMITED}\", not \"{}\"", key.label, shown(text)),
            write_help(key, &key.example()),
        )),
        _ => whole_number(key, value),
    }
}

fn zero_limit(value: &DeValue<'_>) -> ValueResult<Option<u64>> {
    match value {
        DeValue::Integer(number) if integer(number) == 0 => Ok(Some(0)),
        DeValue::String(text) if units::parse_size(text) == Ok(0) => Ok(Some(0)),
        _ => Err(ValueError::new(
            "`rlimits.core` must be 0 because a core dump would write a job's payload to disk",
            "remove `core`, or write `core = 0`",
        )),
    }
}

/// Returns the error for a key whose declared kind does not match the function that reads it. Such a mismatch is a bug
/// in this crate. A test reads every key to detect it.
pub(super) fn wrong_kind(key: &LabelledKey) -> ValueError {
    ValueError::new(
        format!("this version of Bulkhead cannot read `{}`", key.label),
        "this is a bug in Bulkhead, not an error in your file; remove the key and report the bug",
    )
}

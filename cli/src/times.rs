//! Parses the points in time that are given with `--since` and `--until`. Accepts a duration before now, a time of day
//! in UTC, or an RFC 3339 time. `args` uses these functions for `logs`, `events` and `crashes`. The commands themselves
//! filter by the parsed times.

use std::time::{Duration, SystemTime};

/// Length of a day. Unix time has no leap seconds.
const DAY: Duration = Duration::from_secs(86_400);

/// Parses a time. Returns an error if the time is in the future.
pub(crate) fn since(text: &str) -> Result<SystemTime, String> {
    let now = SystemTime::now();
    let time = parse(text, now)?;
    if time > now { Err("this time is in the future".into()) } else { Ok(time) }
}

/// Parses a time.
pub(crate) fn until(text: &str) -> Result<SystemTime, String> {
    parse(text, SystemTime::now())
}

/// Parses a point in time: a duration before `now`, an RFC 3339 time, or a time of day in UTC. A time of day stands
/// for its most recent occurrence before `now`.
fn parse(text: &str, now: SystemTime) -> Result<SystemTime, String> {
    if let Ok(ago) = humantime::parse_duration(text.strip_prefix('-').unwrap_or(text)) {
        let time = now.checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH);
        return Ok(time.max(SystemTime::UNIX_EPOCH));
    }
    time_of_day(text, now).or_else(|| rfc3339(text)).ok_or_else(|| {
        "use a time such as 10m (ten minutes ago), 14:07 (UTC) or 2026-11-21T14:07:35Z".to_owned()
    })
}

fn time_of_day(text: &str, now: SystemTime) -> Option<SystemTime> {
    let parts: Vec<&str> = text.split(':').collect();
    if !(2..=3).contains(&parts.len()) || !parts.iter().all(|part| part.len() == 2) {
        return None;
    }
    let date = humantime::format_rfc3339_seconds(now).to_string();
    let (date, _) = date.split_once('T')?;
    let seconds = if parts.len() == 2 { ":00" } else { "" };
    let time = humantime::parse_rfc3339(&format!("{date}T{text}{seconds}Z")).ok()?;
    if time > now { time.checked_sub(DAY) } else { Some(time) }
}

/// Parses an RFC 3339 time with a UTC offset or `Z`.
fn rfc3339(text: &str) -> Option<SystemTime> {
    let offset = text.len().checked_sub(6).and_then(|at| text.split_at_checked(at));
    let Some((time, offset)) = offset.filter(|(_, offset)| offset.starts_with(['+', '-'])) else {
        return humantime::parse_rfc3339(text).ok();
    };
    let (hours, minutes) = offset[1..].split_once(':')?;
    let (hours, minutes): (u64, u64) = (hours.parse().ok()?, minutes.parse().ok()?);
    let time = humantime::parse_rfc3339(&format!("{time}Z")).ok()?;
    let offset_length = Duration::from_secs((hours * 60 + minutes) * 60);
    match offset.starts_with('+') {
        _ if hours > 23 || minutes > 59 => None,
        true => time.checked_sub(offset_length),
        false => time.checked_add(offset_length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_durations_dates_and_times_of_day() {
        let at = |text: &str| humantime::parse_rfc3339(text).unwrap();
        let now = at("2026-11-21T14:07:35.500Z");
        for (text, time) in [
            ("10m", "2026-11-21T13:57:35.500Z"),
            ("-10m", "2026-11-21T13:57:35.500Z"),
            ("1h 30m", "2026-11-21T12:37:35.500Z"),
            ("0s", "2026-11-21T14:07:35.500Z"),
            ("14:07", "2026-11-21T14:07:00Z"),
            ("14:07:35", "2026-11-21T14:07:35Z"),
            ("14:08", "2026-11-20T14:08:00Z"),
            ("23:59", "2026-11-20T23:59:00Z"),
            ("2026-11-21T14:07:35Z", "2026-11-21T14:07:35Z"),
            ("2026-11-21T14:07:35.187Z", "2026-11-21T14:07:35.187Z"),
            ("2026-11-21T16:07:35+02:00", "2026-11-21T14:07:35Z"),
            ("2026-11-21T09:37:35-04:30", "2026-11-21T14:07:35Z"),
            ("100000years", "1970-01-01T00:00:00Z"),
        ] {
            assert_eq!(parse(text, now), Ok(at(time)), "{text}");
        }
        for text in [
            "",
            "10",
            "-",
            "soon",
            "24:00",
            "14:7",
            "14:60",
            "2026-11-21",
            "2026-11-21T14:07:35",
            "2026-11-21T14:07:35+2:00",
            "2026-11-21T14:07:35+24:00",
            "2026-11-21T14:07:35+ä:00",
            "ääääää",
        ] {
            assert!(parse(text, now).unwrap_err().contains("10m"), "{text}");
        }
        assert!(since("9999-01-01T00:00:00Z").unwrap_err().contains("future"));
        assert!(until("9999-01-01T00:00:00Z").is_ok());
    }
}

//! Crash reports: a table of them, one of them with all that is known, and its jobs run again. What a report
//! tells was said by whoever crashed: nothing of it reaches a terminal unescaped.

use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Method;
use serde_json::{Value, json};

use crate::admin::{encoded, get_json, read, request, table, text};
use crate::args::{Args, Crashes};
use crate::output::{self, Failure, exit, harmless};

/// Bytes of a payload that are shown.
const SHOWN_BYTES: usize = 256;

/// Bytes in a line of a payload that is no text.
const HEX_LINE_BYTES: usize = 16;

pub(crate) async fn run(args: &Args, crashes: &Crashes) -> Result<u8, Failure> {
    let Some(id) = &crashes.id else { return list(args, crashes).await };
    let report = get_json(args, &format!("/v1/crashes/{}", encoded(id))).await?;
    if let Some(file) = &crashes.output {
        return save(args, &report, crashes.job, file);
    }
    if args.json {
        output::line(&report.to_string())?;
    } else {
        output::line(describe(&report).trim_end())?;
    }
    Ok(exit::OK)
}

async fn list(args: &Args, crashes: &Crashes) -> Result<u8, Failure> {
    let wanted = [
        crashes.bulkhead.as_ref().map(|name| format!("bulkhead={}", encoded(name))),
        crashes.limit.map(|limit| format!("limit={limit}")),
    ];
    let query = wanted.into_iter().flatten().collect::<Vec<_>>().join("&");
    let all = get_json(args, &format!("/v1/crashes?{query}")).await?;
    if args.json {
        output::line(&all.to_string())?;
        return Ok(exit::OK);
    }
    let rows = all["crashes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut table =
        table(&["ID", "TIME", "BULKHEAD", "CAUSE", "COUNT", "OPERATION", "TENANT", "UPTIME", "SERVED"]);
    for row in rows {
        table.add_row([
            text(&row["id"]),
            seconds(&row["at"]),
            text(&row["bulkhead"]),
            cause_in_short(row),
            row["count"].as_u64().unwrap_or(1).to_string(),
            named(&row["operation"]),
            named(&row["tenant"]),
            duration(&row["uptime_ms"]),
            text(&row["served"]),
        ]);
    }
    output::line(&table.trim_fmt())?;
    Ok(exit::OK)
}

/// A moment without its fractions.
fn seconds(at: &Value) -> String {
    let at = text(at);
    at.split_once('.').map_or(at.clone(), |(whole, _)| format!("{whole}Z"))
}

/// In one word, so that the columns can be told apart by programs.
fn duration(ms: &Value) -> String {
    let Some(ms) = ms.as_u64() else { return "-".to_owned() };
    // Milliseconds say something only of a short life.
    let ms = if ms < 1000 { ms } else { ms / 1000 * 1000 };
    humantime::format_duration(Duration::from_millis(ms)).to_string().replace(' ', "")
}

/// The name of an operation or a tenant, in one word if it is one.
fn named(name: &Value) -> String {
    match name.as_str() {
        None | Some("") => "-".to_owned(),
        Some(_) => text(name),
    }
}

/// `SIGSEGV`, `exit:3`, `violation:ptrace`, `hung`, with `program:` before it if no worker died.
fn cause_in_short(crash: &Value) -> String {
    let cause = text(&crash["cause"]);
    let short = match (crash["exit_code"].as_i64(), crash["signal"].is_string(), &crash["system_call"]) {
        (Some(code), ..) => format!("exit:{code}"),
        (None, true, _) => text(&crash["signal"]),
        (None, false, call @ Value::String(_)) => format!("{cause}:{}", text(call)),
        (None, false, _) => cause,
    };
    if crash["victim"] == "program" { format!("program:{short}") } else { short }
}

// One of them.

fn describe(report: &Value) -> String {
    let mut lines = String::new();
    let mut put = |name: &str, value: String| lines.push_str(&format!("{name:<12} {value}\n"));
    put("id", text(&report["id"]));
    put("time", text(&report["at"]));
    if let Some(count @ 2..) = report["count"].as_u64() {
        put("count", format!("{count} like this; this is the last"));
    }
    put("bulkhead", text(&report["bulkhead"]));
    if report["tenant"].is_string() {
        put("tenant", named(&report["tenant"]));
    }
    let whose = if report["victim"] == "program" { "the program; its worker lives on" } else { "the worker" };
    put("cause", format!("{} ({whose})", text(&report["message"])));
    let stage = text(&report["stage"]);
    let (pid, slot, generation) = (&report["pid"], &report["slot"], &report["generation"]);
    put("worker", format!("pid {pid}, slot {slot}, generation {generation}, {stage}"));
    let (served, in_flight) = (&report["served"], &report["in_flight"]);
    let uptime = duration(&report["uptime_ms"]);
    put("life", format!("{uptime}, {served} jobs served, {in_flight} in flight"));
    if let Some(usage) = report["usage"].as_object() {
        let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0);
        let mib = number("max_rss_bytes") as f64 / 1_048_576.0;
        let (user, system) = (number("user_ms"), number("system_ms"));
        put("usage", format!("user {user}ms, system {system}ms, at most {mib:.1}MiB resident"));
    }
    if !report["confinement"].is_null() {
        put("confinement", text(&report["confinement"]));
    }
    lines.push_str(&jobs(report));
    if let Some(tail) = report["stderr_tail"].as_str() {
        lines.push_str("\nstderr\n");
        lines.push_str(&indented(&harmless(tail)));
    }
    lines
}

fn jobs(report: &Value) -> String {
    let mut lines = String::new();
    let jobs = report["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (place, job) in jobs.iter().enumerate() {
        let is_culprit = report["culprit"].as_u64() == Some(place as u64);
        lines.push_str(&format!("\njob {place}{}\n", if is_culprit { ", which did it" } else { "" }));
        lines.push_str(&indented(&describe_job(job)));
    }
    let omitted = report["in_flight"].as_u64().unwrap_or(0).saturating_sub(jobs.len() as u64);
    if omitted > 0 && report["victim"] == "worker" {
        lines.push_str(&format!("\nand {omitted} more jobs\n"));
    }
    lines
}

fn describe_job(job: &Value) -> String {
    let mut lines = String::new();
    let mut put = |name: &str, value: String| lines.push_str(&format!("{name:<10} {value}\n"));
    put("number", text(&job["job"]));
    if job["is_answered"] == true {
        put("note", "its client had been answered before; nothing else is known of it".to_owned());
        return lines;
    }
    put("operation", named(&job["operation"]));
    put("tenant", named(&job["tenant"]));
    if job["trace_id"].is_string() {
        put("trace", text(&job["trace_id"]));
    }
    put("ran", format!("{}, attempt {}", duration(&job["ran_ms"]), job["attempts"]));
    if job["is_unread"] == true {
        put("note", "the worker died before it read this job".to_owned());
    }
    if job["digest"].is_string() {
        put("digest", text(&job["digest"]));
    }
    let bytes = &job["payload_bytes"];
    let Some(payload) = payload(job) else {
        put("payload", format!("{bytes} bytes, too large to be kept"));
        return lines;
    };
    match payload.len() {
        0 => put("payload", "none".to_owned()),
        _ => put("payload", format!("{bytes} bytes, blake3 {}", text(&job["blake3"]))),
    }
    lines.push_str(&indented(&shown(&payload)));
    lines
}

fn payload(job: &Value) -> Option<Vec<u8>> {
    STANDARD.decode(job["payload"].as_str()?).ok()
}

/// The beginning of a payload: as text if it is text, or else in hexadecimal.
fn shown(payload: &[u8]) -> String {
    let begin = &payload[..payload.len().min(SHOWN_BYTES)];
    let whole = match std::str::from_utf8(begin) {
        Ok(text) => Some(text),
        // A character that was cut in two at the end of what is shown.
        Err(error) if error.error_len().is_none() => std::str::from_utf8(&begin[..error.valid_up_to()]).ok(),
        Err(_) => None,
    };
    let is_text = |text: &&str| !text.contains(|c: char| c.is_control() && !c.is_whitespace());
    let mut lines = match whole.filter(is_text) {
        Some(text) => harmless(text),
        None => begin.chunks(HEX_LINE_BYTES).map(hex_line).collect::<Vec<_>>().join("\n"),
    };
    if payload.len() > begin.len() {
        lines.push_str(&format!("\n[{} bytes more: see --output]", payload.len() - begin.len()));
    }
    lines
}

fn hex_line(bytes: &[u8]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x} ")).collect();
    let plain = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { '.' };
    format!("{hex:<48} {}", bytes.iter().map(plain).collect::<String>())
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Writes a payload to a file.
fn save(args: &Args, report: &Value, job: Option<usize>, file: &Path) -> Result<u8, Failure> {
    let jobs = report["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let culprit = report["culprit"].as_u64().and_then(|place| usize::try_from(place).ok());
    let place = match (job.or(culprit), jobs.len()) {
        (Some(place), count) if place < count => place,
        (None, 1) => 0,
        (None, count) if count > 1 => {
            let message = format!("{count} jobs were in flight, and any may have done it: name one by --job");
            return Err(Failure::new(exit::USAGE, message));
        }
        (_, count) => {
            return Err(Failure::new(exit::INVALID, format!("this report has {count} jobs")));
        }
    };
    let kept = payload(&jobs[place])
        .ok_or_else(|| Failure::new(exit::INVALID, format!("the payload of job {place} was not kept")))?;
    if file == Path::new("-") {
        output::raw(&kept)?;
        return Ok(exit::OK);
    }
    std::fs::write(file, &kept).map_err(|error| {
        Failure::new(exit::UNWRITTEN, format!("failed to write {}: {error}", file.display()))
    })?;
    if args.json {
        output::line(&json!({"file": file, "job": place, "payload_bytes": kept.len()}).to_string())?;
    } else {
        output::note(&format!("{} bytes of job {place} written to {}", kept.len(), file.display()));
    }
    Ok(exit::OK)
}

// Again.

pub(crate) async fn replay(args: &Args, id: &str, job: Option<u32>) -> Result<u8, Failure> {
    let query = job.map(|job| format!("?job={job}")).unwrap_or_default();
    let path = format!("/v1/crashes/{}/replay{query}", encoded(id));
    let body = read(request(args, Method::POST, &path).await?).await?;
    let fail = |error| Failure::new(exit::FAILED, format!("the supervisor's answer is no JSON: {error}"));
    let told: Value = serde_json::from_slice(&body).map_err(fail)?;
    if args.json {
        output::line(&told.to_string())?;
    } else {
        output::line(told_again(&told).trim_end())?;
    }
    Ok(if told["verdict"] == "not_run" { exit::TRY_LATER } else { exit::OK })
}

fn told_again(told: &Value) -> String {
    let mut lines = String::new();
    let mut put = |name: &str, value: String| lines.push_str(&format!("{name:<12} {value}\n"));
    let verdict = match told["verdict"].as_str() {
        Some("same") => "same: it crashes the same way",
        Some("different") => "different: it crashes, but not the same way",
        Some("no_crash") => "no crash: it does not crash in a fresh worker",
        _ => "not run: there was no worker for it",
    };
    put("verdict", verdict.to_owned());
    put("before", text(&told["before"]["message"]));
    for replay in told["replays"].as_array().map(Vec::as_slice).unwrap_or_default() {
        put("now", format!("job {}: {}", replay["job"], how_it_ended(replay)));
    }
    let last = told["replays"].as_array().and_then(|replays| replays.last());
    if let Some(tail) = last.and_then(|replay| replay["stderr_tail"].as_str()).filter(|tail| !tail.is_empty())
    {
        lines.push_str("\nstderr\n");
        lines.push_str(&indented(&harmless(tail)));
    }
    lines
}

fn how_it_ended(replay: &Value) -> String {
    let cause = &replay["cause"]["message"];
    let mut sentence = match (replay["outcome"].as_str(), cause.is_string()) {
        (_, true) => text(cause),
        (None, false) => return text(&replay["message"]),
        (Some("ok"), _) => "ended well".to_owned(),
        (Some("deadline_exceeded"), _) => "did not end before the bulkhead's deadline".to_owned(),
        (Some(outcome), _) => {
            format!("{}: {} {}", harmless(outcome), text(&replay["reason"]), text(&replay["message"]))
        }
    };
    if let (Some(pid), Some(ran)) = (replay["worker_pid"].as_u64(), replay["ran_ms"].as_f64()) {
        sentence.push_str(&format!(" (worker {pid}, after {ran:.1} ms)"));
    }
    sentence
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_report_steers_a_terminal() {
        let hostile = "\u{1b}[31m\u{9b}x\u{7f}\r\n\u{7}";
        let job = json!({
            "job": hostile, "operation": hostile, "tenant": hostile, "trace_id": hostile, "digest": hostile,
            "attempts": 1, "ran_ms": 1, "payload_bytes": 9, "payload": STANDARD.encode(hostile), "blake3": hostile,
        });
        let report = json!({
            "id": hostile, "at": hostile, "bulkhead": hostile, "tenant": hostile, "victim": hostile,
            "message": hostile, "stage": hostile, "pid": 1, "slot": 0, "generation": 1, "uptime_ms": 1, "served": 0,
            "in_flight": 1, "culprit": 0, "jobs": [job], "stderr_tail": hostile, "confinement": hostile,
            "cause": hostile, "signal": hostile,
        });
        let replay = json!({"job": 0, "outcome": hostile, "message": hostile, "reason": hostile,
            "stderr_tail": hostile});
        let told = json!({"verdict": "same", "before": {"message": hostile}, "replays": [replay]});
        for shown in [describe(&report), cause_in_short(&report), told_again(&told), seconds(&report["at"])] {
            assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        }
    }

    #[test]
    fn a_payload_is_shown_as_what_it_is() {
        assert_eq!(shown(b"two\nlines"), "two\nlines");
        assert_eq!(shown(b""), "");
        assert!(shown(b"\x00GIF").starts_with("00 47 49 46 "));
        assert!(shown(b"\x00GIF").ends_with(".GIF"));
        let long = shown(&"ß".repeat(1000).into_bytes());
        assert!(long.starts_with("ßß") && long.ends_with("[1744 bytes more: see --output]"), "{long}");
        let odd = shown(format!("x{}", "ß".repeat(1000)).as_bytes());
        assert!(odd.starts_with("xßß"), "{odd}");
    }

    #[test]
    fn causes_are_short_words() {
        let cases = [
            (json!({"cause": "signal", "signal": "SIGSEGV"}), "SIGSEGV"),
            (json!({"cause": "exit", "exit_code": 3}), "exit:3"),
            (json!({"cause": "hung"}), "hung"),
            (json!({"cause": "violation", "system_call": "ptrace"}), "violation:ptrace"),
            (json!({"cause": "signal", "signal": "SIGABRT", "victim": "program"}), "program:SIGABRT"),
        ];
        for (crash, short) in cases {
            assert_eq!(cause_in_short(&crash), short);
        }
    }
}

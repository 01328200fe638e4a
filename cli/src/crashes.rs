//! Implements `bulkhead crashes` and `bulkhead replay`, which list, show and replay crash reports. The reports contain
//! data from the crashed process, so all text is escaped before it reaches a terminal. The supervisor stores the
//! reports and runs the replays.

use std::path::Path;

use bulkhead_api::{
    Cause, CauseKind, CrashId, CrashJob, CrashReport, NativeCrash, NativeFrame, NativeThread, Replay,
    ReplayVerdict, ReplayedJob, Summary, Usage, Victim, Word,
};
use hyper::Method;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::admin::{known, print_json, short_duration, shown, table};
use crate::args::{Args, Crashes};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{document, get, parse_failure, percent_encoded, read, request};

/// Maximum number of payload bytes to show.
const PREVIEW_BYTES: usize = 256;

/// Number of registers per line.
const REGISTERS_PER_LINE: usize = 3;

/// Number of bytes per line of a binary payload.
const HEX_LINE_BYTES: usize = 16;

pub(crate) async fn run(args: &Args, crashes: &Crashes) -> Result<u8, Failure> {
    let Some(id) = &crashes.id else { return list(args, crashes).await };
    let path = format!("/v1/crashes/{}", resolve(args, id).await?);
    if let Some(file) = &crashes.output {
        return save(args, &get(args, &path).await?, crashes.job, file);
    }
    if args.json {
        return print_json(args, &path).await;
    }
    output::line(describe(&get(args, &path).await?).trim_end())?;
    Ok(exit::OK)
}

/// Resolves `selector` to the ID of a crash report. The selector is an ID, the beginning of an ID, or `last`.
async fn resolve(args: &Args, selector: &str) -> Result<String, Failure> {
    if selector.parse::<CrashId>().is_ok() {
        return Ok(selector.to_owned());
    }
    let bulkhead_api::Crashes { crashes } = get(args, "/v1/crashes").await?;
    let mut ids: Vec<CrashId> = crashes.iter().map(|crash| crash.id).collect();
    match selector {
        "last" => {
            ids = crashes.iter().max_by_key(|crash| crash.at).map(|crash| crash.id).into_iter().collect()
        }
        _ => ids.retain(|id| !selector.is_empty() && id.to_string().starts_with(selector)),
    }
    match &ids[..] {
        [] if selector == "last" => Err(Failure::new(exit::NOT_FOUND, "there are no crash reports")),
        [] => {
            let message = format!(
                "there is no crash report '{}'; `bulkhead crashes` lists all reports",
                selector.escape_debug()
            );
            Err(Failure::new(exit::NOT_FOUND, message))
        }
        [only] => Ok(only.to_string()),
        several => {
            let list: String = several.iter().map(|id| format!("\n  {id}")).collect();
            let count = several.len();
            let message = format!("'{selector}' is ambiguous: {count} IDs begin with this text:{list}");
            Err(Failure::new(exit::USAGE, message))
        }
    }
}

async fn list(args: &Args, crashes: &Crashes) -> Result<u8, Failure> {
    let of = crashes.bulkhead.as_ref().map(|name| format!("?bulkhead={}", percent_encoded(name)));
    let mut document: Value = get(args, &format!("/v1/crashes{}", of.unwrap_or_default())).await?;
    let parsed = bulkhead_api::Crashes::deserialize(&document);
    let bulkhead_api::Crashes { crashes: rows } = parsed.map_err(|error| parse_failure(&error))?;
    let mut rows: Vec<(usize, Summary)> = rows.into_iter().enumerate().collect();
    rows.retain(|(_, row)| {
        crashes.since.is_none_or(|since| row.at >= since)
            && crashes.cause.as_ref().is_none_or(|cause| has_cause(row, cause))
    });
    rows.drain(..rows.len().saturating_sub(crashes.limit.unwrap_or(usize::MAX)));
    if args.json {
        document["crashes"] = rows.iter().map(|(index, _)| document["crashes"][*index].clone()).collect();
        output::json(&document)?;
        return Ok(exit::OK);
    }
    let mut table =
        table(&["ID", "TIME", "BULKHEAD", "CAUSE", "COUNT", "OPERATION", "TENANT", "UPTIME", "SERVED"]);
    for (_, row) in &rows {
        table.add_row([
            row.id.to_string(),
            humantime::format_rfc3339_seconds(row.at).to_string(),
            shown(&row.bulkhead),
            short_cause(&row.cause, &row.victim),
            row.count.to_string(),
            name_or_dash(row.operation.as_deref()),
            name_or_dash(row.tenant.as_deref()),
            short_duration(row.uptime_ms),
            row.served.to_string(),
        ]);
    }
    output::line(&table.trim_fmt())?;
    Ok(exit::OK)
}

/// Returns the name of an operation or tenant, or a dash if the name is empty.
fn name_or_dash(name: Option<&str>) -> String {
    known(&name.filter(|name| !name.is_empty()))
}

/// Formats the cause of a crash, such as `SIGSEGV`, `exit:3`, `violation:ptrace` or `hung`. Adds the prefix
/// `program:` if a program crashed rather than the worker.
fn short_cause(cause: &Cause, victim: &Word<Victim>) -> String {
    let short = match (cause.exit_code, &cause.signal, &cause.system_call) {
        (Some(code), ..) => format!("exit:{code}"),
        (None, Some(signal), _) => shown(signal),
        (None, None, Some(call)) => format!("{}:{}", shown(&cause.kind), shown(call)),
        (None, None, None) => shown(&cause.kind),
    };
    if *victim == Victim::Program { format!("program:{short}") } else { short }
}

/// Returns true if the crash has the cause `wanted`, which is a kind such as `signal`, or a short form such as
/// `SIGSEGV`.
fn has_cause(crash: &Summary, wanted: &str) -> bool {
    let short = short_cause(&crash.cause, &crash.victim);
    let of_process = short.strip_prefix("program:").unwrap_or(&short);
    let kind = crash.cause.kind.as_str();
    [kind, &short, of_process].iter().any(|name| name.eq_ignore_ascii_case(wanted))
}

// Details.

fn describe(report: &CrashReport) -> String {
    let mut lines = String::new();
    let mut add = |name: &str, value: String| lines.push_str(&format!("{name:<12} {value}\n"));
    add("id", report.id.to_string());
    add("time", humantime::format_rfc3339_millis(report.at).to_string());
    if let count @ 2.. = report.count {
        add("count", format!("{count} crashes of this kind; only the last is shown"));
    }
    add("bulkhead", shown(&report.bulkhead));
    if let Some(tenant) = &report.tenant {
        add("tenant", name_or_dash(Some(tenant)));
    }
    let is_program = report.victim == Victim::Program;
    let whose = match (is_program, report.cause.kind == CauseKind::Deadline) {
        (_, true) => "the supervisor ended the job",
        (true, false) => "the program died; the worker continues",
        (false, false) => "the worker died",
    };
    add("cause", format!("{} ({whose})", shown(&report.cause.message)));
    let CrashReport { pid, slot, generation, served, in_flight, .. } = report;
    add("worker", format!("pid {pid}, slot {slot}, generation {generation}, {}", shown(&report.stage)));
    let uptime = short_duration(report.uptime_ms);
    add("life", format!("{uptime}, {served} jobs served, {in_flight} in flight"));
    if let Some(Usage { user_ms, system_ms, max_rss_bytes }) = report.usage {
        let mib = max_rss_bytes as f64 / 1_048_576.0;
        add("usage", format!("user {user_ms}ms, system {system_ms}ms, peak {mib:.1}MiB resident"));
    }
    if let Some(confinement) = &report.confinement {
        add("confinement", shown(confinement));
    }
    if let Some(stack) = &report.runtime_stack {
        lines.push_str("\nstacks written by the worker\n");
        lines.push_str(&indented(&escape(stack)));
    }
    lines.push_str(&report.native.as_ref().map(native).unwrap_or_default());
    lines.push_str(&jobs(report));
    if let Some(tail) = &report.stderr_tail {
        lines.push_str("\nstderr\n");
        lines.push_str(&indented(&escape(tail)));
    }
    lines
}

/// Formats the backtrace and the registers of a crash.
fn native(native: &NativeCrash) -> String {
    let mut lines = String::new();
    if let Some(reason) = &native.unavailable {
        lines.push_str(&format!("\nno backtrace: {}\n", shown(reason)));
    }
    for thread in &native.threads {
        let code = native.signal_code.map(|code| format!(", signal code {code}")).unwrap_or_default();
        let address =
            native.address.as_ref().map(|it| format!(", address {}", shown(it))).unwrap_or_default();
        lines.push_str(&format!("\nbacktrace of {}{code}{address}\n", thread_title(thread)));
        let frames: Vec<String> = thread.frames.iter().enumerate().map(frame).collect();
        lines.push_str(&indented(&frames.join("\n")));
        if thread.registers.is_empty() {
            continue;
        }
        let registers =
            thread.registers.iter().map(|(name, value)| format!("{:<4} {:<18}", shown(name), shown(value)));
        let rows: Vec<String> = registers.collect();
        let rows: Vec<String> =
            rows.chunks(REGISTERS_PER_LINE).map(|row| row.join("  ").trim_end().to_owned()).collect();
        lines.push_str(&format!("\nregisters\n{}", indented(&rows.join("\n"))));
    }
    lines
}

/// Formats a thread, such as `thread 4711 (decoder) of process 4710 (thumbnail), state S, waiting in futex_do_wait`.
fn thread_title(thread: &NativeThread) -> String {
    let name =
        |name: &Option<String>| name.as_ref().map(|it| format!(" ({})", shown(it))).unwrap_or_default();
    let process = thread.process.map(|process| format!(" of process {process}")).unwrap_or_default();
    let state = thread.state.as_ref().map(|state| format!(", state {}", shown(state))).unwrap_or_default();
    let wait =
        thread.waits_in.as_ref().map(|wait| format!(", waiting in {}", shown(wait))).unwrap_or_default();
    format!("thread {}{}{process}{}{state}{wait}", thread.id, name(&thread.name), name(&thread.program))
}

/// Formats a frame, such as `#0  walk_list at bad.c:3 (libbad.so+0x1120)`.
fn frame((index, frame): (usize, &NativeFrame)) -> String {
    let function = frame.function.as_ref().map_or_else(|| "??".to_owned(), shown);
    let line = frame.line.map(|line| format!(":{line}")).unwrap_or_default();
    let place = frame.file.as_ref().map(|file| format!(" at {}{line}", shown(file))).unwrap_or_default();
    let module = frame.module.as_ref().map(|module| format!("{}+", shown(module))).unwrap_or_default();
    format!("#{index:<2} {function}{place} ({module}{})", shown(&frame.offset))
}

fn jobs(report: &CrashReport) -> String {
    let mut lines = String::new();
    for (index, job) in report.jobs.iter().enumerate() {
        let is_culprit = report.culprit == Some(index);
        lines.push_str(&format!("\njob {index}{}\n", if is_culprit { " (culprit)" } else { "" }));
        lines.push_str(&indented(&describe_job(job)));
    }
    let omitted = (report.in_flight as usize).saturating_sub(report.jobs.len());
    if omitted > 0 && report.victim == Victim::Worker {
        lines.push_str(&format!("\nand {omitted} more jobs\n"));
    }
    lines
}

fn describe_job(job: &CrashJob) -> String {
    let mut lines = String::new();
    let mut add = |name: &str, value: String| lines.push_str(&format!("{name:<10} {value}\n"));
    add("number", shown(&job.job));
    if job.is_answered {
        add(
            "note",
            "the outcome was sent to the client before the crash; nothing else is known about the job"
                .to_owned(),
        );
        return lines;
    }
    add("operation", name_or_dash(Some(&job.operation)));
    add("tenant", name_or_dash(Some(&job.tenant)));
    if let Some(trace) = &job.trace_id {
        add("trace", shown(trace));
    }
    add("ran", format!("{}, attempt {}", short_duration(job.ran_ms), job.attempts));
    if job.is_unread {
        add("note", "the worker died before reading this job".to_owned());
    }
    if let Some(digest) = &job.digest {
        add("digest", shown(digest));
    }
    let bytes = job.payload_bytes;
    let Some(payload) = &job.payload else {
        add("payload", format!("{bytes} bytes, not stored in the report"));
        return lines;
    };
    match payload.len() {
        0 => add("payload", "none".to_owned()),
        _ => add("payload", format!("{bytes} bytes, blake3 {}", known(&job.blake3))),
    }
    lines.push_str(&indented(&preview(payload)));
    lines
}

/// Formats the beginning of a payload, as text if it is printable UTF-8 and otherwise in hexadecimal.
fn preview(payload: &[u8]) -> String {
    let start = &payload[..payload.len().min(PREVIEW_BYTES)];
    let whole = match std::str::from_utf8(start) {
        Ok(text) => Some(text),
        // If the preview ends in the middle of a character, that character is dropped.
        Err(error) if error.error_len().is_none() && start.len() < payload.len() => {
            std::str::from_utf8(&start[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    };
    let is_text = |text: &&str| !text.contains(|c: char| c.is_control() && !c.is_whitespace());
    let mut lines = match whole.filter(is_text) {
        Some(text) => escape(text),
        None => start.chunks(HEX_LINE_BYTES).map(hex_line).collect::<Vec<_>>().join("\n"),
    };
    if payload.len() > start.len() {
        lines.push_str(&format!("\n[{} more bytes: use --output]", payload.len() - start.len()));
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

/// Writes the payload of a job to a file.
fn save(args: &Args, report: &CrashReport, job: Option<usize>, file: &Path) -> Result<u8, Failure> {
    let jobs = &report.jobs;
    let index = match (job.or(report.culprit), jobs.len()) {
        (Some(index), count) if index < count => index,
        (None, 1) => 0,
        (None, count) if count > 1 => {
            let message =
                format!("{count} jobs were in flight, and the culprit is unknown: select a job with --job");
            return Err(Failure::new(exit::USAGE, message));
        }
        (_, count) => {
            return Err(Failure::new(
                exit::INVALID,
                format!("the report has no such job: it contains {count} jobs, numbered from 0"),
            ));
        }
    };
    let missing =
        || Failure::new(exit::INVALID, format!("the report does not contain the payload of job {index}"));
    let payload = jobs[index].payload.as_ref().ok_or_else(missing)?;
    if file == Path::new("-") {
        output::raw(payload)?;
        return Ok(exit::OK);
    }
    std::fs::write(file, payload).map_err(|error| {
        Failure::new(exit::OUTPUT_FAILED, format!("failed to write {}: {error}", file.display()))
    })?;
    if args.json {
        output::json(
            json!({"file": file.display().to_string(), "job": index, "payload_bytes": payload.len()}),
        )?;
    } else {
        output::to_stderr(&format!("{} bytes of job {index} written to {}", payload.len(), file.display()));
    }
    Ok(exit::OK)
}

// Replay.

pub(crate) async fn replay(args: &Args, id: &str, job: Option<u32>) -> Result<u8, Failure> {
    let query = job.map(|job| format!("?job={job}")).unwrap_or_default();
    let path = format!("/v1/crashes/{}/replay{query}", resolve(args, id).await?);
    let body = read(request(args, Method::POST, &path).await?).await?;
    let replay: Replay = document(&body)?;
    let code = if replay.verdict == ReplayVerdict::NotRun { exit::TRY_LATER } else { exit::OK };
    let printed = if args.json {
        output::json(&document::<Value>(&body)?)
    } else {
        output::line(describe_replay(&replay).trim_end())
    };
    printed.map_err(|failure| failure.or_code(code))?;
    Ok(code)
}

fn describe_replay(result: &Replay) -> String {
    let mut lines = String::new();
    let mut add = |name: &str, value: String| lines.push_str(&format!("{name:<12} {value}\n"));
    let verdict = match &result.verdict {
        Word::Known(ReplayVerdict::Same) => "same: the job crashed in the same way",
        Word::Known(ReplayVerdict::Different) => "different: the job crashed, but in a different way",
        Word::Known(ReplayVerdict::NoCrash) => "no crash: the job did not crash in a fresh worker",
        Word::Known(ReplayVerdict::NotRun) => "not run: no worker was available for the job",
        Word::Other(word) => &escape(word),
    };
    add("verdict", verdict.to_owned());
    add("before", shown(&result.before.message));
    for replay in &result.replays {
        add("now", format!("job {}: {}", replay.job, describe_result(replay)));
    }
    let tail = result.replays.last().and_then(|replay| replay.stderr_tail.as_ref());
    if let Some(tail) = tail.filter(|tail| !tail.is_empty()) {
        lines.push_str("\nstderr\n");
        lines.push_str(&indented(&escape(tail)));
    }
    lines
}

fn describe_result(replay: &ReplayedJob) -> String {
    let mut sentence = match (replay.outcome.as_deref(), &replay.cause) {
        (_, Some(cause)) => shown(&cause.message),
        (None, None) => return known(&replay.message),
        (Some("ok"), _) => "ended ok".to_owned(),
        (Some("deadline_exceeded"), _) => "did not finish before the bulkhead's deadline".to_owned(),
        (Some(outcome), _) => {
            let reason = replay.reason.clone().flatten();
            format!("{} ({}): {}", escape(outcome), known(&reason), known(&replay.message))
        }
    };
    if let (Some(pid), ran) = (replay.worker_pid, replay.ran_ms) {
        sentence.push_str(&format!(" (worker {pid}, after {ran:.1} ms)"));
    }
    sentence
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn crash_report_output_contains_no_control_characters() {
        let hostile = "\u{1b}[31m\u{9b}x\u{7f}\r\n\u{7}";
        let job = json!({
            "job": hostile, "operation": hostile, "tenant": hostile, "trace_id": hostile, "digest": hostile,
            "attempts": 1, "ran_ms": 1, "is_answered": false, "is_unread": false, "payload_bytes": 9,
            "payload": STANDARD.encode(hostile), "blake3": hostile,
        });
        let report = json!({
            "id": "20260307T101530123-0001", "at": "2026-03-07T10:15:30.123Z", "bulkhead": hostile, "tenant": hostile, "victim": hostile,
            "message": hostile, "stage": hostile, "pid": 1, "slot": 0, "generation": 1, "uptime_ms": 1, "served": 0,
            "in_flight": 1, "culprit": 0, "jobs": [job], "stderr_tail": hostile, "confinement": hostile,
            "cause": hostile, "signal": hostile,
        });
        for (field, value) in [("id", hostile), ("at", hostile)] {
            let mut odd = report.clone();
            odd[field] = json!(value);
            assert!(serde_json::from_value::<CrashReport>(odd).is_err(), "{field} accepts any text");
        }
        let report: CrashReport = serde_json::from_value(report).unwrap();
        let replay = json!({"job": 0, "outcome": hostile, "message": hostile, "reason": hostile, "cause": null,
            "operation": hostile, "tenant": hostile, "payload_bytes": 1, "ran_ms": 1.0, "verdict": hostile,
            "worker_pid": 1, "stderr_tail": hostile});
        let response = json!({"verdict": hostile, "before": {"cause": hostile, "message": hostile}, "replays": [replay],
            "bulkhead": hostile, "id": "20260307T101530123-0001"});
        let again = describe_replay(&serde_json::from_value(response).unwrap());
        for shown in [describe(&report), short_cause(&report.cause, &report.victim), again] {
            assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        }
    }

    #[test]
    fn payload_preview_shows_text_or_hex() {
        assert_eq!(preview(b"two\nlines"), "two\nlines");
        assert_eq!(preview(b""), "");
        assert!(preview(b"\x00GIF").starts_with("00 47 49 46 "));
        assert!(preview(b"\x00GIF").ends_with(".GIF"));
        assert!(preview(b"abc\xc3").starts_with("61 62 63 c3 "), "no byte of the payload is hidden");
        let long = preview(&"ß".repeat(1000).into_bytes());
        assert!(long.starts_with("ßß") && long.ends_with("[1744 more bytes: use --output]"), "{long}");
        let odd = preview(format!("x{}", "ß".repeat(1000)).as_bytes());
        assert!(odd.starts_with("xßß"), "{odd}");
    }

    #[test]
    fn crash_causes_have_short_forms() {
        let cases = [
            (json!({"cause": "signal", "signal": "SIGSEGV"}), "SIGSEGV"),
            (json!({"cause": "exit", "exit_code": 3}), "exit:3"),
            (json!({"cause": "hung"}), "hung"),
            (json!({"cause": "violation", "system_call": "ptrace"}), "violation:ptrace"),
            (json!({"cause": "signal", "signal": "SIGABRT", "victim": "program"}), "program:SIGABRT"),
        ];
        for (mut crash, short) in cases {
            crash["message"] = json!("");
            let victim = crash.get("victim").cloned().unwrap_or_else(|| json!("worker"));
            let victim = serde_json::from_value(victim).unwrap();
            assert_eq!(short_cause(&serde_json::from_value(crash).unwrap(), &victim), short);
        }
    }
}

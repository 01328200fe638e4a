//! `advise`: what the limits should be, as a table, the reasons, and what to type or paste to have it so.

use hyper::Method;
use serde_json::Value;

use crate::admin::{encoded, get_json, read, request, table, text};
use crate::args::Args;
use crate::output::{self, Failure, exit, harmless};

/// Keys that can be changed while the bulkhead runs, and the options that do.
const LIVE: [(&str, &str); 3] =
    [("processes", "--processes"), ("max_in_flight", "--max-in-flight"), ("max_queue", "--max-queue")];

pub(crate) async fn run(args: &Args, name: Option<&str>) -> Result<u8, Failure> {
    let all = match name {
        Some(name) => vec![of_one(args, name).await?],
        None => of_all(args).await?,
    };
    if args.json {
        // One that was asked for by name stands alone, as in `status`.
        let value = match (name, &all[..]) {
            (Some(_), [one]) => one.clone(),
            _ => serde_json::json!({ "bulkheads": all }),
        };
        output::line(&value.to_string())?;
        return Ok(exit::OK);
    }
    let told: Vec<String> = all.iter().map(describe).collect();
    output::line(told.join("\n\n").trim_end())?;
    Ok(exit::OK)
}

async fn of_one(args: &Args, name: &str) -> Result<Value, Failure> {
    get_json(args, &format!("/v1/bulkheads/{}/advice", encoded(name))).await
}

async fn of_all(args: &Args) -> Result<Vec<Value>, Failure> {
    let body = read(request(args, Method::GET, "/v1/bulkheads").await?).await?;
    let listed: Value = serde_json::from_slice(&body).unwrap_or_default();
    let bulkheads = listed["bulkheads"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut all = Vec::new();
    for name in bulkheads.iter().filter_map(|bulkhead| bulkhead["name"].as_str()) {
        match of_one(args, name).await {
            Ok(advice) => all.push(advice),
            // It was removed meanwhile.
            Err(failure) if failure.code() == exit::NOT_FOUND => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(all)
}

fn describe(advice: &Value) -> String {
    let mut parts = vec![head(advice)];
    let (items, kept) = (list(&advice["advice"]), list(&advice["kept"]));
    if items.is_empty() && !kept.is_empty() {
        parts.push("Nothing to change.".to_owned());
    }
    if !items.is_empty() {
        parts.push(changes(items));
    }
    let reasons: Vec<String> = items.iter().chain(kept).map(reason).collect();
    if !reasons.is_empty() {
        parts.push(reasons.join("\n"));
    }
    parts.extend(how_to(advice, items));
    parts.join("\n\n")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// What was seen, in short.
fn head(advice: &Value) -> String {
    let seconds = |value: &Value| std::time::Duration::from_secs(value.as_u64().unwrap_or(0) / 1000);
    let seen = &advice["seen"];
    let mut head = format!(
        "{}: {} jobs in {}, busy for {}; in flight p50 {}, p99 {}, at most {} of {}",
        text(&advice["bulkhead"]),
        text(&advice["jobs"]),
        humantime::format_duration(seconds(&advice["watched_ms"])),
        humantime::format_duration(seconds(&seen["busy_ms"])),
        text(&seen["concurrency"]["p50"]),
        text(&seen["concurrency"]["p99"]),
        text(&seen["concurrency"]["max"]),
        text(&seen["limit"]),
    );
    let rejected = seen["rejected"].as_object();
    let total: u64 = rejected.map_or(0, |counts| counts.values().filter_map(Value::as_u64).sum());
    if let Some(counts) = rejected.filter(|_| total > 0) {
        let by: Vec<String> =
            counts.iter().map(|(why, count)| format!("{} {count}", harmless(why))).collect();
        head += &format!("; {total} rejected ({})", by.join(", "));
    }
    if advice["enough"] != Value::Bool(true) {
        let is_silent = list(&advice["advice"]).is_empty() && list(&advice["kept"]).is_empty();
        let then = if is_silent { "too little to say anything" } else { "what follows is provisional" };
        head += &format!("\n{}: {then}", text(&advice["missing"]));
    }
    head
}

fn changes(items: &[Value]) -> String {
    let mut table = table(&["KEY", "NOW", "PROPOSED"]);
    for item in items {
        table.add_row([text(&item["key"]), text(&item["now"]), text(&item["proposed"])]);
    }
    table.trim_fmt()
}

fn reason(item: &Value) -> String {
    format!("{}: {}", text(&item["key"]), text(&item["reason"]))
}

/// The command that has it so at once, and the lines that have it so from then on.
fn how_to(advice: &Value, items: &[Value]) -> Vec<String> {
    let name = text(&advice["bulkhead"]);
    let option = |item: &Value| {
        let (_, option) = LIVE.iter().find(|(key, _)| item["key"] == *key)?;
        Some(format!(" {option} {}", text(&item["proposed"])))
    };
    let options: String = items.iter().filter_map(option).collect();
    let lines: Vec<String> = items
        .iter()
        .map(|item| format!("{} = {}", text(&item["key"]), harmless(&item["proposed"].to_string())))
        .collect();
    let command = (!options.is_empty()).then(|| format!("bulkhead resize {name}{options}"));
    // A name with a dot is quoted.
    let table =
        if name.contains('.') { format!("[bulkhead.{name:?}]") } else { format!("[bulkhead.{name}]") };
    let file = (!lines.is_empty()).then(|| format!("{table}\n{}", lines.join("\n")));
    command.into_iter().chain(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_bulkhead_is_told_what_to_type_and_what_to_paste() {
        let advice = json!({
            "bulkhead": "pdf.text", "watched_ms": 3_600_000, "jobs": 5000, "enough": true,
            "seen": {"busy_ms": 60_000, "limit": 4, "concurrency": {"p50": 1, "p99": 4, "max": 4}},
            "advice": [
                {"key": "processes", "now": 4, "proposed": 5, "reason": "\u{1b}[31mred"},
                {"key": "recycle.rss", "now": null, "proposed": "208MiB", "reason": "it leaks"},
            ],
            "kept": [{"key": "deadline", "now": "5s", "reason": "fine"}],
        });
        let told = describe(&advice);
        assert!(told.starts_with("pdf.text: 5000 jobs in 1h, busy for 1m; in flight p50 1,"), "{told}");
        let end = "bulkhead resize pdf.text --processes 5\n\n[bulkhead.\"pdf.text\"]\nprocesses = 5\n\
                   recycle.rss = \"208MiB\"";
        assert!(told.ends_with(end), "{told}");
        assert!(told.contains("deadline: fine") && !told.contains('\u{1b}'), "{told}");
    }

    #[test]
    fn nothing_to_change_and_nothing_to_say() {
        let mut advice =
            json!({"bulkhead": "b", "enough": true, "advice": [], "kept": [{"key": "k", "reason": "r"}]});
        assert!(describe(&advice).contains("Nothing to change.\n\nk: r"));
        advice["kept"] = json!([]);
        advice["enough"] = json!(false);
        advice["missing"] = json!("seen too little");
        assert!(describe(&advice).ends_with("seen too little: too little to say anything"));
    }
}

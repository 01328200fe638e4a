//! Implements `bulkhead advise`, which shows the recommended limits as a table, with reasons, the command to run, and
//! the lines for the configuration file. The supervisor computes the recommendations. This command changes nothing.

use bulkhead_api::{Advice, Bulkheads, Proposal, Setting, Snapshot};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::admin::{known, shown, table};
use crate::args::Args;
use crate::output::{self, Failure, escape, exit};
use crate::requests::{get, percent_encoded};

/// Configuration keys that can be changed while a bulkhead is running, with the corresponding options of `bulkhead
/// resize`.
const LIVE_KEYS: [(&str, &str); 3] =
    [("processes", "--processes"), ("max_in_flight", "--max-in-flight"), ("max_queue", "--max-queue")];

pub(crate) async fn run(args: &Args, name: Option<&str>) -> Result<u8, Failure> {
    if args.json {
        // The advice for a bulkhead that is named on the command line is printed on its own rather than in a list, as
        // in `status`.
        let shown_text: Value = match name {
            Some(name) => fetch_one(args, name).await?,
            None => serde_json::json!({ "bulkheads": fetch_all::<Value>(args).await? }),
        };
        output::json(&shown_text)?;
        return Ok(exit::OK);
    }
    let all = match name {
        Some(name) => vec![fetch_one(args, name).await?],
        None => fetch_all(args).await?,
    };
    let shown_text: Vec<String> = all.iter().map(describe).collect();
    output::line(shown_text.join("\n\n").trim_end())?;
    Ok(exit::OK)
}

async fn fetch_one<T: DeserializeOwned>(args: &Args, name: &str) -> Result<T, Failure> {
    get(args, &format!("/v1/bulkheads/{}/advice", percent_encoded(name))).await
}

async fn fetch_all<T: DeserializeOwned>(args: &Args) -> Result<Vec<T>, Failure> {
    let Bulkheads { bulkheads } = get(args, "/v1/bulkheads").await?;
    let mut all = Vec::new();
    for Snapshot { name, .. } in &bulkheads {
        match fetch_one(args, name).await {
            Ok(advice) => all.push(advice),
            // The bulkhead has been removed since the list of bulkheads was fetched.
            Err(failure) if failure.code() == exit::NOT_FOUND => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(all)
}

fn describe(advice: &Advice) -> String {
    let mut parts = vec![summary(advice)];
    let (items, kept) = (&advice.advice, &advice.kept);
    if items.is_empty() && !kept.is_empty() {
        parts.push("Nothing to change.".to_owned());
    }
    if !items.is_empty() {
        parts.push(changes(items));
    }
    let proposed = items.iter().map(|item| reason(&item.key, &item.reason));
    let reasons: Vec<String> =
        proposed.chain(kept.iter().map(|item| reason(&item.key, &item.reason))).collect();
    if !reasons.is_empty() {
        parts.push(reasons.join("\n"));
    }
    parts.extend(instructions(advice, items));
    parts.join("\n\n")
}

/// Summarises the observed load.
fn summary(advice: &Advice) -> String {
    let seconds = |ms: u64| std::time::Duration::from_secs(ms / 1000);
    let seen = &advice.seen;
    let mut summary = format!(
        "{}: {} jobs in {}, busy for {}; in flight p50 {}, p99 {}, at most {} of {}",
        shown(&advice.bulkhead),
        advice.jobs,
        humantime::format_duration(seconds(advice.watched_ms)),
        humantime::format_duration(seconds(seen.busy_ms)),
        seen.concurrency.p50,
        seen.concurrency.p99,
        seen.concurrency.max,
        seen.limit,
    );
    let total = seen.rejected.values().fold(0, |sum: u64, count| sum.saturating_add(*count));
    if total > 0 {
        let by = seen.rejected.iter().map(|(why, count)| format!("{} {count}", escape(why)));
        summary += &format!("; {total} rejected ({})", by.collect::<Vec<_>>().join(", "));
    }
    if !advice.enough {
        let is_empty = advice.advice.is_empty() && advice.kept.is_empty();
        let state = if is_empty { "no recommendations yet" } else { "the recommendations are provisional" };
        summary += &format!("\n{}: {state}", known(&advice.missing));
    }
    summary
}

fn changes(items: &[Proposal]) -> String {
    let mut table = table(&["KEY", "NOW", "PROPOSED"]);
    for item in items {
        table.add_row([shown(&item.key), plain(&item.now), plain(&item.proposed)]);
    }
    table.trim_fmt()
}

fn reason(key: &str, reason: &String) -> String {
    format!("{}: {}", shown(&key), shown(reason))
}

fn plain(setting: &Setting) -> String {
    match setting {
        Setting::Unset => "-".to_owned(),
        Setting::Count(count) => count.to_string(),
        Setting::Text(text) => shown(text),
    }
}

/// Returns the command that applies the changes immediately, and the configuration lines that make them permanent.
fn instructions(advice: &Advice, items: &[Proposal]) -> Vec<String> {
    let name = shown(&advice.bulkhead);
    let option = |item: &Proposal| {
        let (_, option) = LIVE_KEYS.iter().find(|(key, _)| item.key == *key)?;
        Some(format!(" {option} {}", plain(&item.proposed)))
    };
    let options: String = items.iter().filter_map(option).collect();
    let lines: Vec<String> = items
        .iter()
        .map(|item| {
            format!("{} = {}", shown(&item.key), escape(&serde_json::json!(item.proposed).to_string()))
        })
        .collect();
    let command = (!options.is_empty()).then(|| format!("bulkhead resize {name}{options}"));
    // TOML requires quotes around a name that contains a dot.
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
    fn advice_suggests_command_and_configuration() {
        let advice = json!({
            "bulkhead": "pdf.text", "watched_ms": 3_600_000, "jobs": 5000, "enough": true,
            "seen": {"busy_ms": 60_000, "limit": 4, "concurrency": {"p50": 1, "p99": 4, "max": 4}},
            "advice": [
                {"key": "processes", "now": 4, "proposed": 5, "reason": "\u{1b}[31mred"},
                {"key": "recycle.rss", "now": null, "proposed": "208MiB", "reason": "it leaks"},
            ],
            "kept": [{"key": "deadline", "now": "5s", "reason": "fine"}],
        });
        let actual = describe(&serde_json::from_value(advice).unwrap());
        assert!(actual.starts_with("pdf.text: 5000 jobs in 1h, busy for 1m; in flight p50 1,"), "{actual}");
        let end = "bulkhead resize pdf.text --processes 5\n\n[bulkhead.\"pdf.text\"]\nprocesses = 5\n\
                   recycle.rss = \"208MiB\"";
        assert!(actual.ends_with(end), "{actual}");
        assert!(actual.contains("deadline: fine") && !actual.contains('\u{1b}'), "{actual}");
    }

    #[test]
    fn empty_advice_gives_reason() {
        let mut advice =
            json!({"bulkhead": "b", "enough": true, "advice": [], "kept": [{"key": "k", "reason": "r"}]});
        let describe = |advice: &Value| describe(&serde_json::from_value(advice.clone()).unwrap());
        assert!(describe(&advice).contains("Nothing to change.\n\nk: r"));
        advice["kept"] = json!([]);
        advice["enough"] = json!(false);
        advice["missing"] = json!("not enough observations");
        assert!(describe(&advice).ends_with("not enough observations: no recommendations yet"));
    }
}

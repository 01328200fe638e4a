//! `bulkhead reload`: has the supervisor read its file again, and prints what that changes.

use hyper::Method;
use serde_json::Value;

use crate::admin::{read, request};
use crate::args::Args;
use crate::output::{self, Failure, exit, harmless};

pub(crate) async fn run(args: &Args, dry_run: bool) -> Result<u8, Failure> {
    let path = format!("/v1/reload?dry_run={dry_run}");
    let answer = request(args, Method::POST, &path).await.map_err(|failure| match failure.code() {
        // The file is not what it should be.
        exit::INVALID => failure.with_code(exit::USAGE),
        _ => failure,
    })?;
    let body = read(answer).await?;
    if args.json {
        output::line(String::from_utf8_lossy(&body).trim_end())?;
        return Ok(exit::OK);
    }
    let fail = |error| Failure::new(exit::FAILED, format!("the supervisor's answer is no JSON: {error}"));
    let changes: Value = serde_json::from_slice(&body).map_err(fail)?;
    for line in lines(&changes) {
        output::line(&harmless(&line))?;
    }
    if dry_run {
        output::line("a dry run: nothing was changed")?;
    }
    Ok(exit::OK)
}

fn lines(changes: &Value) -> Vec<String> {
    let bulkheads = changes["bulkheads"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut lines: Vec<String> = bulkheads.iter().map(bulkhead).collect();
    let (supervisor, ignored) = (keys(&changes["supervisor"]), keys(&changes["ignored"]));
    if !supervisor.is_empty() {
        lines.push(format!("[supervisor]: {supervisor}"));
    }
    if changes["access"] == true {
        lines.push("[[access]]: asked anew for each client".to_owned());
    }
    if lines.is_empty() {
        lines.push("nothing is different".to_owned());
    }
    if !ignored.is_empty() {
        lines.push(format!("[supervisor]: not {ignored}, which takes a restart of the supervisor"));
    }
    lines
}

fn bulkhead(change: &Value) -> String {
    let name = change["bulkhead"].as_str().unwrap_or_default();
    let keys = keys(&change["keys"]);
    match change["change"].as_str() {
        Some("added") => format!("{name}: added"),
        Some("removed") => format!("{name}: removed; it finishes what it has"),
        Some("rebuilt") => format!("{name}: begun anew ({keys}); the one before finishes what it has"),
        _ if change["replaces_workers"] == true => {
            format!("{name}: {keys}; its workers are replaced one after the other")
        }
        _ => format!("{name}: {keys}"),
    }
}

fn keys(list: &Value) -> String {
    let keys = list.as_array().map(Vec::as_slice).unwrap_or_default();
    keys.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
}

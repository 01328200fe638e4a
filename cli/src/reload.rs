//! Implements `bulkhead reload`, which makes the supervisor reload its configuration and prints the changes.

use bulkhead_api::{BulkheadChange, ChangeKind, Changes, Word};
use hyper::Method;

use crate::args::Args;
use crate::output::{self, Failure, escape, exit};
use crate::requests::{document, read_confirmation, request};

pub(crate) async fn run(args: &Args, dry_run: bool) -> Result<u8, Failure> {
    let path = format!("/v1/reload?dry_run={dry_run}");
    let response = request(args, Method::POST, &path).await.map_err(|failure| match failure.code() {
        // Errors in the configuration file are reported with the exit code for usage errors.
        exit::INVALID => failure.with_code(exit::USAGE),
        _ => failure,
    })?;
    let json = read_confirmation(response).await?;
    let changes: Changes = document(json.as_bytes())?;
    if args.json {
        output::json(json)?;
        return Ok(exit::OK);
    }
    for line in lines(&changes) {
        output::line(&escape(&line))?;
    }
    if dry_run {
        output::line("dry run: nothing was changed")?;
    }
    Ok(exit::OK)
}

fn lines(changes: &Changes) -> Vec<String> {
    let mut lines: Vec<String> = changes.bulkheads.iter().map(bulkhead).collect();
    let (supervisor, ignored) = (changes.supervisor.join(", "), changes.ignored.join(", "));
    if !supervisor.is_empty() {
        lines.push(format!("[supervisor]: {supervisor}"));
    }
    if changes.access {
        lines.push("[[access]]: changed; the new rules also apply to connected clients".to_owned());
    }
    if lines.is_empty() {
        lines.push("no changes".to_owned());
    }
    if !ignored.is_empty() {
        lines.push(format!(
            "[supervisor]: not applied: {ignored}; restart the supervisor to apply these changes"
        ));
    }
    lines
}

fn bulkhead(change: &BulkheadChange) -> String {
    let dropped = change.live_dropped.join(", ");
    match dropped.is_empty() {
        true => changed(change),
        false => format!(
            "{}; values set at runtime were dropped because they conflict with the configuration file: \
             {dropped}",
            changed(change)
        ),
    }
}

fn changed(change: &BulkheadChange) -> String {
    let (name, keys) = (&change.bulkhead, change.keys.join(", "));
    match &change.change {
        Word::Known(ChangeKind::Added) => format!("{name}: added"),
        Word::Known(ChangeKind::Removed) => format!("{name}: removed; accepted jobs can still finish"),
        Word::Known(ChangeKind::Rebuilt) => {
            format!("{name}: replaced by a new bulkhead ({keys}); accepted jobs can still finish")
        }
        Word::Known(ChangeKind::Changed) | Word::Other(_) if change.replaces_workers => {
            format!("{name}: {keys}; workers are replaced one at a time")
        }
        Word::Known(ChangeKind::Changed) | Word::Other(_) => format!("{name}: {keys}"),
    }
}

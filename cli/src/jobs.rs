//! Implements `bulkhead jobs` and `bulkhead cancel`, which list and cancel unfinished jobs.

use bulkhead_api::{Job, Jobs};
use hyper::Method;
use serde_json::Value;

use crate::admin::{known, short_duration, shown, table};
use crate::args::{Args, Cancel, ListJobs};
use crate::output::{self, Failure, escape, exit};
use crate::requests::{document, get, percent_encoded, read_confirmation, request};

pub(crate) async fn list(args: &Args, list: &ListJobs) -> Result<u8, Failure> {
    let of = list.name.as_ref().map(|name| format!("&bulkhead={}", percent_encoded(name)));
    let state = list.state.map(|state| format!("&state={}", state.name()));
    let path =
        format!("/v1/jobs?limit={}{}{}", list.lines, of.unwrap_or_default(), state.unwrap_or_default());
    let body: Value = get(args, &path).await?;
    if args.json {
        output::json(&body)?;
        return Ok(exit::OK);
    }
    let Jobs { jobs, total } = document(body.to_string().as_bytes())?;
    let mut table = table(&[
        "JOB",
        "BULKHEAD",
        "STATE",
        "AGE",
        "RAN",
        "LEFT",
        "PRIORITY",
        "TENANT",
        "OPERATION",
        "CLIENT",
        "WORKER",
        "ATTEMPT",
        "BYTES",
    ]);
    for job in &jobs {
        table.add_row(cells(job));
    }
    output::line(&table.trim_fmt())?;
    let omitted = total.saturating_sub(jobs.len() as u64);
    if omitted > 0 {
        output::to_stderr(&format!(
            "{omitted} newer jobs are not listed; use -n, a bulkhead name or --state"
        ));
    }
    Ok(exit::OK)
}

fn cells(job: &Job) -> [String; 13] {
    let duration = |ms: f64| short_duration(ms as u64);
    let text = |text: &str| known(&Some(text).filter(|text| !text.is_empty()).map(without_spaces));
    [
        shown(&job.job),
        shown(&job.bulkhead),
        shown(&job.state),
        duration(job.age_ms),
        job.ran_ms.map_or_else(|| "-".to_owned(), duration),
        duration(job.left_ms),
        shown(&job.priority),
        text(&job.tenant),
        text(&job.operation),
        text(&job.client),
        known(&job.worker_pid),
        job.attempts.to_string(),
        job.payload_bytes.to_string(),
    ]
}

/// Replaces the spaces in a value, so that programs can split a line of output into columns.
fn without_spaces(text: &str) -> String {
    text.replace(char::is_whitespace, "_")
}

pub(crate) async fn cancel(args: &Args, cancel: &Cancel) -> Result<u8, Failure> {
    let path = format!("/v1/bulkheads/{}/jobs/{}/cancel", percent_encoded(&cancel.name), cancel.job);
    let confirmation = read_confirmation(request(args, Method::POST, &path).await?).await?;
    if args.json {
        output::json(confirmation)?;
    } else {
        output::line(&format!("{}: job {} was cancelled", escape(&cancel.name), cancel.job))?;
    }
    Ok(exit::OK)
}

//! Implements `bulkhead-fleet status`, which shows agents, waiting jobs and streams. `operate` queries the servers.

use bulkhead_api::text::escape;
use bulkhead_fleet::operate::{Operator, Status};
use bulkhead_fleet::settings::Settings;
use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Value, json};

use super::output::{self, Failure, exit};

/// Runs the command.
pub(crate) async fn run(settings: &Settings, is_json: bool) -> Result<u8, Failure> {
    let operator = Operator::connect(settings).await.map_err(Failure::unreachable)?;
    let status = operator.status().await.map_err(Failure::unreachable)?;
    if is_json {
        output::json(&json!(status))?;
    } else {
        print(&status)?;
    }
    Ok(exit::OK)
}

fn print(status: &Status) -> Result<(), Failure> {
    let bulkheads = status.bulkheads.iter().map(|bulkhead| {
        let numbers =
            [bulkhead.pending.to_string(), bulkhead.tenants.to_string(), bulkhead.agents.to_string()];
        [vec![bulkhead.name.clone()], numbers.to_vec()].concat()
    });
    print_table(&["BULKHEAD", "PENDING", "TENANTS", "AGENTS"], bulkheads)?;
    output::line("")?;
    print_table(
        &["AGENT", "BULKHEAD", "TAKES JOBS", "IN FLIGHT/LIMIT", "CLOCK"],
        status.agents.iter().flat_map(agent_rows),
    )?;
    output::line("")?;
    let streams = status.streams.iter().map(|stream| {
        let used = 100.0 * stream.bytes as f64 / (stream.max_bytes.max(1)) as f64;
        let numbers = [stream.messages.to_string(), stream.bytes.to_string(), format!("{used:.1} %")];
        [vec![stream.name.clone()], numbers.to_vec(), vec![stream.replicas.to_string()]].concat()
    });
    print_table(&["STREAM", "MESSAGES", "BYTES", "USED", "REPLICAS"], streams)
}

fn agent_rows(agent: &Value) -> Vec<Vec<String>> {
    let host = escape(agent["host"].as_str().unwrap_or("?"));
    let clock = format!("{:+.3} s", agent["clock_offset_seconds"].as_f64().unwrap_or_default());
    let bulkheads = agent["bulkheads"].as_object().into_iter().flatten();
    let row = |(name, of): (&String, &Value)| {
        let takes = if of["takes_jobs"] == true { "yes" } else { "no" };
        let load = format!("{}/{}", of["in_flight"], of["limit"]);
        vec![host.clone(), escape(name), takes.to_owned(), load, clock.clone()]
    };
    bulkheads.map(row).collect()
}

/// Prints a table without borders.
pub(crate) fn print_table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> Result<(), Failure> {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header.to_vec());
    table.add_rows(rows);
    let text = table.to_string();
    let lines: Vec<_> = text.lines().map(str::trim_end).collect();
    output::line(&lines.join("\n"))
}

//! Non-interactive mode of `top`, which takes samples for one interval and prints the result as a table or as JSON.

use std::time::Duration;

use bulkhead_api::Snapshot;
use serde_json::{Value, json};

use super::columns::Column;
use super::events::Event;
use super::sample::{Bulkhead, Counts, RawSample, Sampler, counts, rates};
use crate::admin::table;
use crate::args::Args;
use crate::output::{self, Failure, exit};
use crate::severity;

/// Number of recent events to print.
const EVENTS_SHOWN: usize = 10;

pub(super) async fn run(args: &Args, interval: Duration) -> Result<u8, Failure> {
    let mut sampler = Sampler::new(args);
    let before = sampler.fetch().await?;
    tokio::time::sleep(interval).await;
    let now = sampler.fetch().await?;
    if args.json {
        output::json(as_json(&before, &now))?;
    } else {
        print(&before, &now)?;
    }
    Ok(exit::OK)
}

fn print(before: &RawSample, now: &RawSample) -> Result<(), Failure> {
    let columns = Column::all();
    let mut table = table(&columns.map(Column::title));
    let mut snapshots = now.snapshots.clone();
    severity::sort(&mut snapshots);
    for snapshot in &snapshots {
        let mut bulkhead = Bulkhead::new(snapshot);
        bulkhead.rates = now.rates_of(snapshot, before);
        table.add_row(columns.map(|column| column.text(&bulkhead)));
    }
    output::line(&table.trim_fmt())?;
    output::line("")?;
    let events = recent_events(before, now);
    events.into_iter().filter_map(Event::new).try_for_each(|event| output::line(&event.line))
}

fn as_json(before: &RawSample, now: &RawSample) -> Value {
    let document = |(document, snapshot): (&Value, &Snapshot)| {
        let mut document = document.clone();
        document["utilisation"] = json!(Bulkhead::new(snapshot).utilisation());
        document["per_second"] = now.rates_of(snapshot, before).map_or(Value::Null, |rates| {
            let Counts { ok, rejected, failed, late, crashed } = rates;
            json!({"ok": ok, "rejected": rejected, "failed": failed, "late": late, "crashed": crashed})
        });
        document
    };
    let bulkheads = now.bulkheads.iter().zip(&now.snapshots).filter(|(document, _)| document.is_object());
    json!({
        "interval_ms": u64::try_from((now.at - before.at).as_millis()).unwrap_or(u64::MAX),
        "bulkheads": bulkheads.map(document).collect::<Vec<_>>(),
        "events": recent_events(before, now),
    })
}

fn recent_events<'a>(before: &'a RawSample, now: &'a RawSample) -> Vec<&'a Value> {
    let all: Vec<&Value> = before.events.iter().chain(&now.events).collect();
    all[all.len().saturating_sub(EVENTS_SHOWN)..].to_vec()
}

impl RawSample {
    fn rates_of(&self, snapshot: &Snapshot, before: &Self) -> Option<Counts<f64>> {
        let earlier = before.snapshots.iter().find(|earlier| earlier.name == snapshot.name)?;
        let is_same_supervisor = !self.was_restarted;
        is_same_supervisor.then(|| rates(&counts(earlier), &counts(snapshot), self.at - before.at)).flatten()
    }
}

//! Metrics as text: the numbers of one moment, written family by family. It owns no number but those of the
//! control plane itself, and never touches the data plane.

mod families;
mod itself;
mod text;

use bulkhead_api::Service;
use bulkhead_policy::{BreakerState, BulkheadState, RestartCause, WORKER_STATES};
use bulkhead_shared::{CrashReason, Priority, RejectReason};

use super::process::Residents;
use bulkhead_config::OTHER_TENANTS;
use bulkhead_plane::scrape::{BulkheadNumbers, ReloadCounts, Scrape};
use bulkhead_plane::tally::{BOUNDS, Histogram, OUTCOMES};

use families::Family;
pub(crate) use text::Format;
use text::Page;

/// Everything, as one page.
pub(crate) fn render(
    scrape: &Scrape,
    reloads: ReloadCounts,
    residents: &Residents,
    format: Format,
) -> String {
    let mut page = Page::new(format);
    write(&mut page, scrape, reloads, residents);
    page.finish()
}

fn write(page: &mut Page, scrape: &Scrape, reloads: ReloadCounts, residents: &Residents) {
    write_jobs(page, &scrape.bulkheads);
    write_tenants(page, scrape);
    write_events(page, &scrape.bulkheads);
    page.family(&families::RELOADS);
    page.sample(&["success"], reloads.succeeded);
    page.sample(&["failure"], reloads.rejected);
    write_gauges(page, &scrape.bulkheads);
    write_workers(page, &scrape.bulkheads, residents);
    page.family(&families::CLIENTS);
    page.sample(&[], scrape.clients);
    page.family(&families::BUILD_INFO);
    page.sample(&[env!("CARGO_PKG_VERSION")], 1);
    page.family(&families::LAST_RELOAD);
    page.sample(&[], u8::from(reloads.was_successful));
    write_histogram(page, &families::QUEUE_WAIT, &scrape.bulkheads, |of| &of.tally.queue_wait);
    write_histogram(page, &families::EXECUTION, &scrape.bulkheads, |of| &of.tally.execution);
    write_histogram(page, &families::DURATION, &scrape.bulkheads, |of| &of.tally.duration);
    itself::write(page);
}

type Bulkheads<'s> = &'s [BulkheadNumbers];

/// Submitted, and what became of them.
fn write_jobs(page: &mut Page, bulkheads: Bulkheads<'_>) {
    page.family(&families::SUBMITTED);
    for (bulkhead, priority) in by_priority(bulkheads) {
        page.sample(&[&bulkhead.name, priority.name()], bulkhead.tally.submitted[priority as usize]);
    }
    page.family(&families::JOBS);
    for (bulkhead, priority) in by_priority(bulkheads) {
        let counts = OUTCOMES.into_iter().zip(bulkhead.tally.jobs[priority as usize]);
        page.samples(&[&bulkhead.name, priority.name()], counts);
    }
    page.family(&families::REJECTED);
    for (bulkhead, priority) in by_priority(bulkheads) {
        let rejected = &bulkhead.tally.rejected[priority as usize];
        let reasons = RejectReason::ALL.iter().filter(|reason| can_be_counted(**reason));
        let counts = reasons.map(|reason| (reason.name(), rejected[usize::from(reason.code())]));
        page.samples(&[&bulkhead.name, priority.name()], counts);
    }
    page.family(&families::CRASHED);
    for bulkhead in bulkheads {
        let crashed = &bulkhead.tally.crashed;
        let counts =
            CrashReason::ALL.iter().map(|reason| (reason.name(), crashed[usize::from(reason.code())]));
        page.samples(&[&bulkhead.name], counts);
    }
}

fn by_priority(bulkheads: Bulkheads<'_>) -> impl Iterator<Item = (&BulkheadNumbers, Priority)> {
    bulkheads.iter().flat_map(|bulkhead| Priority::ALL.map(|priority| (bulkhead, priority)))
}

/// A job for a bulkhead that there is not, or of a client that was not let in, belongs to no bulkhead.
const fn can_be_counted(reason: RejectReason) -> bool {
    !matches!(reason, RejectReason::NotFound | RejectReason::Unauthenticated)
}

fn write_tenants(page: &mut Page, scrape: &Scrape) {
    let labels = || scrape.labels.iter().map(String::as_str).chain([OTHER_TENANTS]);
    page.family(&families::TENANT_JOBS);
    for bulkhead in &scrape.bulkheads {
        for (label, tenant) in labels().zip(&bulkhead.tally.tenants) {
            page.samples(&[&bulkhead.name, label], OUTCOMES.into_iter().zip(tenant.jobs));
        }
    }
    page.family(&families::EVICTED);
    for bulkhead in &scrape.bulkheads {
        let evicted = bulkhead.tally.tenants.iter().map(|tenant| tenant.evicted);
        page.samples(&[&bulkhead.name], labels().zip(evicted));
    }
}

/// What happened on the way.
fn write_events(page: &mut Page, bulkheads: Bulkheads<'_>) {
    page.family(&families::FALLBACK);
    for bulkhead in bulkheads {
        for tally in &bulkhead.tally.fallback {
            page.samples(&[&bulkhead.name, &tally.target], OUTCOMES.into_iter().zip(tally.jobs));
        }
    }
    each(page, &families::RETRIES, bulkheads, |of| of.tally.retries);
    page.family(&families::RESTARTS);
    for bulkhead in bulkheads {
        let restarts = &bulkhead.tally.restarts;
        let counts = RestartCause::ALL.map(|cause| (cause.name(), restarts[cause as usize]));
        page.samples(&[&bulkhead.name], counts);
    }
    page.family(&families::TRANSITIONS);
    for bulkhead in bulkheads {
        for from in BreakerState::ALL {
            let others = BreakerState::ALL.into_iter().filter(|to| *to != from);
            let counts = others.map(|to| (to.name(), bulkhead.tally.breaker[from as usize][to as usize]));
            page.samples(&[&bulkhead.name, from.name()], counts);
        }
    }
    each(page, &families::LATE_REPLIES, bulkheads, |of| of.tally.late_replies);
}

fn write_gauges(page: &mut Page, bulkheads: Bulkheads<'_>) {
    each(page, &families::ACTIVE, bulkheads, |of| of.active);
    each(page, &families::LIMIT, bulkheads, |of| of.limit);
    each(page, &families::QUEUE_LENGTH, bulkheads, |of| of.queued);
    each(page, &families::QUEUE_CAPACITY, bulkheads, |of| of.queue_capacity);
    each(page, &families::ELSEWHERE, bulkheads, |of| of.tally.elsewhere);
    each(page, &families::GUESTS, bulkheads, |of| of.tally.guests);
    page.family(&families::BREAKER);
    for bulkhead in bulkheads {
        let states = BreakerState::ALL.map(|state| (state.name(), u64::from(state == bulkhead.breaker)));
        page.samples(&[&bulkhead.name], states);
    }
    page.family(&families::STATE);
    for bulkhead in bulkheads {
        let states = BulkheadState::ALL.map(|state| (state.name(), u64::from(state == bulkhead.state)));
        page.samples(&[&bulkhead.name], states);
    }
    page.family(&families::SERVICE);
    for bulkhead in bulkheads {
        let states = Service::ALL.map(|state| (state.name(), u64::from(state == bulkhead.service)));
        page.samples(&[&bulkhead.name], states);
    }
}

fn write_workers(page: &mut Page, bulkheads: Bulkheads<'_>, residents: &Residents) {
    page.family(&families::WORKERS);
    for bulkhead in bulkheads {
        let count = |state| bulkhead.workers.iter().filter(|worker| worker.state == state).count() as u64;
        page.samples(&[&bulkhead.name], WORKER_STATES.map(|state| (state, count(state))));
    }
    page.family(&families::WORKER_RSS);
    for bulkhead in bulkheads {
        for (slot, rss_bytes) in memory_by_slot(bulkhead, residents).into_iter().enumerate() {
            page.sample(&[&bulkhead.name, &slot.to_string()], rss_bytes);
        }
    }
    page.family(&families::MEMORY_LIMIT);
    for bulkhead in bulkheads {
        if let Some(limit) = bulkhead.memory_limit {
            page.sample(&[&bulkhead.name], limit);
        }
    }
}

/// Of the workers that fill their slots. Those that come or go beside them are not shown.
fn memory_by_slot(bulkhead: &BulkheadNumbers, residents: &Residents) -> Vec<u64> {
    let current = || bulkhead.workers.iter().filter(|worker| worker.is_current);
    let slots = current().map(|worker| worker.slot + 1).chain([bulkhead.slots]).max().unwrap_or_default();
    let mut memory = vec![0; slots as usize];
    for worker in current() {
        if let Some(rss_bytes) = worker.pid.and_then(|pid| residents.bytes(pid)) {
            memory[worker.slot as usize] = rss_bytes;
        }
    }
    memory
}

fn write_histogram(
    page: &mut Page,
    family: &'static Family,
    bulkheads: Bulkheads<'_>,
    histogram: impl Fn(&BulkheadNumbers) -> &Histogram,
) {
    page.family(family);
    for bulkhead in bulkheads {
        let Histogram { buckets, sum_ns } = histogram(bulkhead);
        let labels: &[&str] = &[&bulkhead.name];
        let mut count = 0;
        let bounds = BOUNDS.iter().map(|(_, text)| *text).chain(["+Inf"]);
        let up_to = |(bound, own): (&'static str, &u64)| {
            count += own;
            (bound, count)
        };
        page.buckets(labels, bounds.zip(buckets).map(up_to));
        page.line("_count", labels, count);
        page.line("_sum", labels, *sum_ns as f64 / 1e9);
    }
}

/// A family with one sample for each bulkhead.
fn each(
    page: &mut Page,
    family: &'static Family,
    bulkheads: Bulkheads<'_>,
    number: impl Fn(&BulkheadNumbers) -> u64,
) {
    page.family(family);
    for bulkhead in bulkheads {
        page.sample(&[&bulkhead.name], number(bulkhead));
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::fs;

    use super::families::{ALL, Kind};
    use super::*;

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");

    #[test]
    fn every_family_is_told_once_and_in_order() {
        let scrape = Scrape { clients: 0, labels: Vec::new().into(), bulkheads: Vec::new() };
        let mut page = Page::new(Format::OpenMetrics);
        write(&mut page, &scrape, ReloadCounts::default(), &Residents::default());
        let names: Vec<&str> = ALL.iter().map(|family| family.name).collect();
        assert_eq!(page.families, names);
        let of_kind = |family: &&&Family| family.kind == Kind::Counter;
        assert!(ALL.iter().filter(of_kind).all(|family| !family.name.ends_with("_total")));
        assert!(
            ALL.iter()
                .all(|family| family.help.ends_with('.') && !family.help.contains(['\\', '"', '\n', '|']))
        );
    }

    fn table() -> String {
        let mut table = String::from("| name | labels | |\n| --- | --- | --- |\n");
        for family in ALL {
            let suffix = if family.kind == Kind::Counter { "_total" } else { "" };
            let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (family.name, family.kind.name(), family.help);
            writeln!(table, "| `{name}{suffix}` | {} | {kind}: {help} |", labels.join(", ")).unwrap();
        }
        table
    }

    /// `UPDATE_DOCS=1 cargo test -p bulkhead-control --lib metrics` writes the table.
    #[test]
    fn the_documentation_names_every_metric() {
        let docs = fs::read_to_string(DOCS).unwrap();
        let (marker, end) = ("<!-- metrics -->\n", "<!-- end -->");
        let start = docs.find(marker).expect("the table has its place") + marker.len();
        let length = docs[start..].find(end).expect("the table has an end");
        let mut current = docs.clone();
        current.replace_range(start..start + length, &table());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(DOCS, current).unwrap();
            return;
        }
        assert!(docs == current, "docs/operations.md is not what is told; run this test with UPDATE_DOCS=1");
    }
}

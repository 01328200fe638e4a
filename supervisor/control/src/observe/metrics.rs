//! Metrics as text, rendered family by family from the numbers of one moment. Only the numbers about the
//! control plane itself are read here. This module never touches the data plane.

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

use families::Numbers;
use itself::Own;
pub(crate) use text::Format;
use text::Page;

/// Numbers of one moment.
struct Moment<'m> {
    scrape: &'m Scrape,
    reloads: ReloadCounts,
    residents: &'m Residents,
}

/// Renders all metrics as one page.
pub(crate) fn render(
    scrape: &Scrape,
    reloads: ReloadCounts,
    residents: &Residents,
    format: Format,
) -> String {
    let mut page = Page::new(format);
    write(&mut page, &Moment { scrape, reloads, residents });
    page.finish()
}

fn write(page: &mut Page, now: &Moment<'_>) {
    let own = Own::read();
    for family in families::ALL {
        match family.numbers {
            Numbers::Process(number) => {
                if let Some(number) = own.as_ref().and_then(number) {
                    page.family(&family.head);
                    page.sample(&[], number);
                }
                continue;
            }
            _ => page.family(&family.head),
        }
        for bulkhead in &now.scrape.bulkheads {
            match family.numbers {
                Numbers::Each(number) => page.sample(&[&bulkhead.name], number(bulkhead)),
                Numbers::Maybe(number) => {
                    number(bulkhead).into_iter().for_each(|number| page.sample(&[&bulkhead.name], number));
                }
                Numbers::Of(write) => write(page, bulkhead),
                Numbers::All(_) | Numbers::Process(_) => break,
            }
        }
        if let Numbers::All(write) = family.numbers {
            write(page, now);
        }
    }
}

fn write_submitted(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        page.sample(&[&of.name, priority.name()], of.tally.submitted[priority as usize]);
    }
}

fn write_jobs(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        let counts = OUTCOMES.into_iter().zip(of.tally.jobs[priority as usize]);
        page.samples(&[&of.name, priority.name()], counts);
    }
}

fn write_rejected(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        // `bulkhead_jobs` shows the number of rejected jobs from the start.
        if priority != Priority::Normal && of.tally.submitted[priority as usize] == 0 {
            continue;
        }
        let rejected = &of.tally.rejected[priority as usize];
        let counts = RejectReason::ALL.into_iter().filter_map(|reason| {
            let is_possible = of.possible.rejects(priority, reason);
            told(is_possible, reason.name(), rejected[usize::from(reason.code())])
        });
        page.samples(&[&of.name, priority.name()], counts);
    }
}

/// Returns the count, unless it is zero and cannot become anything else.
fn told(is_possible: bool, name: &'static str, count: u64) -> Option<(&'static str, u64)> {
    possible(is_possible, count).map(|count| (name, count))
}

fn write_crashed(page: &mut Page, of: &BulkheadNumbers) {
    let counts = CrashReason::ALL.map(|reason| (reason.name(), of.tally.crashed[usize::from(reason.code())]));
    page.samples(&[&of.name], counts);
}

fn tenant_labels<'m>(now: &Moment<'m>) -> impl Iterator<Item = &'m str> {
    now.scrape.labels.iter().map(String::as_str).chain([OTHER_TENANTS])
}

fn write_tenant_jobs(page: &mut Page, now: &Moment<'_>) {
    for of in &now.scrape.bulkheads {
        for (label, tenant) in tenant_labels(now).zip(&of.tally.tenants) {
            page.samples(&[&of.name, label], OUTCOMES.into_iter().zip(tenant.jobs));
        }
    }
}

fn write_evicted(page: &mut Page, now: &Moment<'_>) {
    for of in &now.scrape.bulkheads {
        let is_possible = of.possible.evicts();
        let evicted = of.tally.tenants.iter().map(|tenant| tenant.evicted);
        let counts = tenant_labels(now).zip(evicted).filter(|(_, count)| is_possible || *count > 0);
        page.samples(&[&of.name], counts);
    }
}

fn write_fallback(page: &mut Page, of: &BulkheadNumbers) {
    for tally in &of.tally.fallback {
        page.samples(&[&of.name, &tally.target], OUTCOMES.into_iter().zip(tally.jobs));
    }
}

fn write_restarts(page: &mut Page, of: &BulkheadNumbers) {
    let counts = RestartCause::ALL.into_iter().filter_map(|cause| {
        told(of.possible.restarts(cause), cause.name(), of.tally.restarts[cause as usize])
    });
    page.samples(&[&of.name], counts);
}

fn write_transitions(page: &mut Page, of: &BulkheadNumbers) {
    for from in BreakerState::ALL {
        let counts = BreakerState::ALL.into_iter().filter_map(|to| {
            told(of.possible.goes(from, to), to.name(), of.tally.breaker[from as usize][to as usize])
        });
        page.samples(&[&of.name, from.name()], counts);
    }
}

fn write_reloads(page: &mut Page, now: &Moment<'_>) {
    page.sample(&["success"], now.reloads.succeeded);
    page.sample(&["failure"], now.reloads.rejected);
}

fn write_breaker(page: &mut Page, of: &BulkheadNumbers) {
    let states = BreakerState::ALL
        .into_iter()
        .filter_map(|state| told(of.possible.is_state(state), state.name(), u64::from(state == of.breaker)));
    page.samples(&[&of.name], states);
}

fn write_state(page: &mut Page, of: &BulkheadNumbers) {
    page.samples(&[&of.name], BulkheadState::ALL.map(|state| (state.name(), u64::from(state == of.state))));
}

fn write_service(page: &mut Page, of: &BulkheadNumbers) {
    page.samples(&[&of.name], Service::ALL.map(|state| (state.name(), u64::from(state == of.service))));
}

fn write_workers(page: &mut Page, of: &BulkheadNumbers) {
    let count = |state| of.workers.iter().filter(|worker| worker.state == state).count() as u64;
    let is_lasting = |state| matches!(state, "ready" | "busy");
    let counts = WORKER_STATES.into_iter().filter_map(|state| told(is_lasting(state), state, count(state)));
    page.samples(&[&of.name], counts);
}

/// Returns the number, unless it is zero and cannot become anything else.
fn possible(is_possible: bool, number: u64) -> Option<u64> {
    (is_possible || number > 0).then_some(number)
}

fn spares(of: &BulkheadNumbers) -> Option<u64> {
    let spares = of.workers.iter().filter(|worker| worker.is_ready_spare).count();
    possible(of.possible.has_spares, spares as u64)
}

fn write_memory(page: &mut Page, now: &Moment<'_>) {
    for of in &now.scrape.bulkheads {
        for (slot, rss_bytes) in memory_by_slot(of, now.residents).into_iter().enumerate() {
            page.sample(&[&of.name, &slot.to_string()], rss_bytes);
        }
    }
}

fn write_adaptive_changes(page: &mut Page, of: &BulkheadNumbers) {
    if let Some(adaptive) = &of.adaptive {
        page.sample(&[&of.name, "up"], adaptive.raised);
        page.sample(&[&of.name, "down"], adaptive.lowered);
    }
}

/// Returns the resident size of the current worker in each slot. Replaced workers and spares are not
/// included.
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

fn write_histogram(page: &mut Page, of: &BulkheadNumbers, Histogram { buckets, sum_ns }: &Histogram) {
    let labels: &[&str] = &[&of.name];
    let mut count = 0;
    // In an empty histogram, the last bucket says as much as all buckets.
    let first = if buckets.iter().all(|own| *own == 0) { BOUNDS.len() } else { 0 };
    let bounds = BOUNDS.iter().map(|(_, text)| *text).chain(["+Inf"]);
    let up_to = |(bound, own): (&'static str, &u64)| {
        count += own;
        (bound, count)
    };
    page.buckets(labels, bounds.zip(buckets).skip(first).map(up_to));
    page.line("_count", labels, count);
    page.line("_sum", labels, *sum_ns as f64 / 1e9);
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::fs;

    use super::families::{ALL, Family};
    use super::text::Kind;
    use super::*;

    const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations/metrics.md");

    #[test]
    fn every_family_is_told_once_and_in_order() {
        let scrape = Scrape {
            clients: 0,
            buffered_bytes: 0,
            memory_file_bytes: 0,
            labels: Vec::new().into(),
            bulkheads: Vec::new(),
        };
        let mut page = Page::new(Format::OpenMetrics);
        let residents = Residents::default();
        write(
            &mut page,
            &Moment { scrape: &scrape, reloads: ReloadCounts::default(), residents: &residents },
        );
        let names: Vec<&str> = ALL.iter().map(|family| family.head.name).collect();
        assert_eq!(page.families, names);
        let of_kind = |family: &&Family| family.head.kind == Kind::Counter;
        assert!(ALL.iter().filter(of_kind).all(|family| !family.head.name.ends_with("_total")));
        assert!(
            ALL.iter().all(|family| family.head.help.ends_with('.')
                && !family.head.help.contains(['\\', '"', '\n', '|']))
        );
    }

    fn table() -> String {
        let mut table = String::from("| name | labels | |\n| --- | --- | --- |\n");
        for family in ALL {
            let suffix = if family.head.kind == Kind::Counter { "_total" } else { "" };
            let labels: Vec<String> = family.head.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (family.head.name, family.head.kind.name(), family.head.help);
            writeln!(table, "| `{name}{suffix}` | {} | {kind}: {help} |", labels.join(", ")).unwrap();
        }
        table
    }

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
        assert!(docs == current, "docs/operations/metrics.md is old; run this test with UPDATE_DOCS=1");
    }
}

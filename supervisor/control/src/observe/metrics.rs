//! Renders all metrics as text, one family after another, for `GET /metrics`. The caller passes in the values from the
//! data plane, which are a consistent snapshot. This module itself reads only the resource usage of the supervisor's
//! process and of its workers. `families` lists the metrics, and `text` implements the formats.

mod families;
mod own_process;
mod text;

use bulkhead_api::Service;
use bulkhead_policy::{BreakerState, BulkheadState, RestartCause, WORKER_STATES};
use bulkhead_shared::{CrashReason, Priority, RejectReason};

use super::process::ResidentSizes;
use bulkhead_config::OTHER_TENANTS;
use bulkhead_plane::bulkhead_counters::{BOUNDS, Histogram, OUTCOMES};
use bulkhead_plane::scrape::{BulkheadNumbers, ReloadCounts, Scrape};

use families::SampleSource;
use own_process::OwnProcess;
pub(crate) use text::Format;
use text::Page;

/// Numbers of connections and jobs on the `jobs_http` listener.
pub(crate) struct JobsHttpNumbers {
    pub(crate) connections: u64,
    pub(crate) refused: u64,
    pub(crate) unauthenticated: u64,
}

/// Values from which the metrics are rendered.
struct MetricInputs<'m> {
    scrape: &'m Scrape,
    /// Counts of the `jobs_http` listener. `None` if there is no such listener.
    jobs_http: Option<JobsHttpNumbers>,
    reloads: ReloadCounts,
    resident_sizes: &'m ResidentSizes,
}

/// Renders all metrics as one page.
pub(crate) fn render(
    scrape: &Scrape,
    jobs_http: Option<JobsHttpNumbers>,
    reloads: ReloadCounts,
    resident_sizes: &ResidentSizes,
    format: Format,
) -> String {
    let mut page = Page::new(format);
    write(&mut page, &MetricInputs { scrape, jobs_http, reloads, resident_sizes });
    page.finish()
}

fn write(page: &mut Page, inputs: &MetricInputs<'_>) {
    let own = OwnProcess::read();
    for family in families::ALL {
        match family.source {
            SampleSource::Process(number) => {
                if let Some(number) = own.as_ref().and_then(number) {
                    page.family(&family.info);
                    page.sample(&[], number);
                }
                continue;
            }
            _ => page.family(&family.info),
        }
        for bulkhead in &inputs.scrape.bulkheads {
            match family.source {
                SampleSource::Single(number) => page.sample(&[&bulkhead.name], number(bulkhead)),
                SampleSource::Optional(number) => {
                    number(bulkhead).into_iter().for_each(|number| page.sample(&[&bulkhead.name], number));
                }
                SampleSource::Several(write) => write(page, bulkhead),
                SampleSource::Global(_) | SampleSource::Process(_) => break,
            }
        }
        if let SampleSource::Global(write) = family.source {
            write(page, inputs);
        }
    }
}

fn write_jobs_http_connections(page: &mut Page, inputs: &MetricInputs<'_>) {
    inputs.jobs_http.iter().for_each(|numbers| page.sample(&[], numbers.connections));
}

fn write_jobs_http_refused(page: &mut Page, inputs: &MetricInputs<'_>) {
    if let Some(numbers) = &inputs.jobs_http {
        page.samples(&[], [("overloaded", numbers.refused), ("unauthenticated", numbers.unauthenticated)]);
    }
}

fn write_submitted(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        page.sample(&[&of.name, priority.name()], of.counters.submitted[priority as usize]);
    }
}

fn write_jobs(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        let counts = OUTCOMES.into_iter().zip(of.counters.jobs[priority as usize]);
        page.samples(&[&of.name, priority.name()], counts);
    }
}

fn write_rejected(page: &mut Page, of: &BulkheadNumbers) {
    for priority in Priority::ALL {
        // Priorities other than normal are omitted until jobs with such a priority have been submitted.
        // `bulkhead_jobs` shows the number of rejected jobs for all priorities from the start.
        if priority != Priority::Normal && of.counters.submitted[priority as usize] == 0 {
            continue;
        }
        let rejected = &of.counters.rejected[priority as usize];
        let counts = RejectReason::ALL.into_iter().filter_map(|reason| {
            let is_possible = of.possible.can_reject(priority, reason);
            named_if_possible(is_possible, reason.name(), rejected[usize::from(reason.code())])
        });
        page.samples(&[&of.name, priority.name()], counts);
    }
}

/// Returns a metric's label value together with its count. Returns `None` if the count is zero and can never increase.
fn named_if_possible(is_possible: bool, name: &'static str, count: u64) -> Option<(&'static str, u64)> {
    number_if_possible(is_possible, count).map(|count| (name, count))
}

fn write_crashed(page: &mut Page, of: &BulkheadNumbers) {
    let counts =
        CrashReason::ALL.map(|reason| (reason.name(), of.counters.crashed[usize::from(reason.code())]));
    page.samples(&[&of.name], counts);
}

fn tenant_labels<'m>(inputs: &MetricInputs<'m>) -> impl Iterator<Item = &'m str> {
    inputs.scrape.labels.iter().map(String::as_str).chain([OTHER_TENANTS])
}

fn write_tenant_jobs(page: &mut Page, inputs: &MetricInputs<'_>) {
    for of in &inputs.scrape.bulkheads {
        for (label, tenant) in tenant_labels(inputs).zip(&of.counters.tenants) {
            page.samples(&[&of.name, label], OUTCOMES.into_iter().zip(tenant.jobs));
        }
    }
}

fn write_evicted(page: &mut Page, inputs: &MetricInputs<'_>) {
    for of in &inputs.scrape.bulkheads {
        let is_possible = of.possible.can_evict();
        let evicted = of.counters.tenants.iter().map(|tenant| tenant.evicted);
        let counts = tenant_labels(inputs).zip(evicted).filter(|(_, count)| is_possible || *count > 0);
        page.samples(&[&of.name], counts);
    }
}

fn write_fallback(page: &mut Page, of: &BulkheadNumbers) {
    for fallback in &of.counters.fallback {
        page.samples(&[&of.name, &fallback.target], OUTCOMES.into_iter().zip(fallback.jobs));
    }
}

fn write_restarts(page: &mut Page, of: &BulkheadNumbers) {
    let counts = RestartCause::ALL.into_iter().filter_map(|cause| {
        named_if_possible(of.possible.can_restart(cause), cause.name(), of.counters.restarts[cause as usize])
    });
    page.samples(&[&of.name], counts);
}

fn write_transitions(page: &mut Page, of: &BulkheadNumbers) {
    for from in BreakerState::ALL {
        let counts = BreakerState::ALL.into_iter().filter_map(|to| {
            named_if_possible(
                of.possible.can_change(from, to),
                to.name(),
                of.counters.breaker[from as usize][to as usize],
            )
        });
        page.samples(&[&of.name, from.name()], counts);
    }
}

fn write_reloads(page: &mut Page, inputs: &MetricInputs<'_>) {
    page.sample(&["success"], inputs.reloads.succeeded);
    page.sample(&["failure"], inputs.reloads.rejected);
}

fn write_breaker(page: &mut Page, of: &BulkheadNumbers) {
    let states = BreakerState::ALL.into_iter().filter_map(|state| {
        named_if_possible(of.possible.can_be(state), state.name(), u64::from(state == of.breaker))
    });
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
    let counts = WORKER_STATES
        .into_iter()
        .filter_map(|state| named_if_possible(is_lasting(state), state, count(state)));
    page.samples(&[&of.name], counts);
}

/// Returns the number. Returns `None` if the number is zero and can never increase.
fn number_if_possible(is_possible: bool, number: u64) -> Option<u64> {
    (is_possible || number > 0).then_some(number)
}

fn spares(of: &BulkheadNumbers) -> Option<u64> {
    let spares = of.workers.iter().filter(|worker| worker.is_ready_spare).count();
    number_if_possible(of.possible.has_spares, spares as u64)
}

fn write_memory(page: &mut Page, inputs: &MetricInputs<'_>) {
    for of in &inputs.scrape.bulkheads {
        for (slot, rss_bytes) in memory_by_slot(of, inputs.resident_sizes).into_iter().enumerate() {
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

/// Returns the resident size of each slot's current worker, in bytes. Ignores replaced workers and spares.
fn memory_by_slot(bulkhead: &BulkheadNumbers, resident_sizes: &ResidentSizes) -> Vec<u64> {
    let current = || bulkhead.workers.iter().filter(|worker| worker.is_current);
    let slots = current().map(|worker| worker.slot + 1).chain([bulkhead.slots]).max().unwrap_or_default();
    let mut memory = vec![0; slots as usize];
    for worker in current() {
        if let Some(rss_bytes) = worker.pid.and_then(|pid| resident_sizes.bytes(pid)) {
            memory[worker.slot as usize] = rss_bytes;
        }
    }
    memory
}

fn write_histogram(page: &mut Page, of: &BulkheadNumbers, Histogram { buckets, sum_ns }: &Histogram) {
    let labels: &[&str] = &[&of.name];
    let mut count = 0;
    // If the histogram is empty, only the last bucket is written, because all others are zero as well.
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
    fn each_metric_family_is_written_once() {
        let scrape = Scrape {
            clients: 0,
            buffered_bytes: 0,
            memory_file_bytes: 0,
            labels: Vec::new().into(),
            bulkheads: Vec::new(),
        };
        let mut page = Page::new(Format::OpenMetrics);
        let resident_sizes = ResidentSizes::default();
        write(
            &mut page,
            &MetricInputs {
                scrape: &scrape,
                jobs_http: None,
                reloads: ReloadCounts::default(),
                resident_sizes: &resident_sizes,
            },
        );
        let names: Vec<&str> = ALL.iter().map(|family| family.info.name).collect();
        assert_eq!(page.families, names);
        let of_kind = |family: &&Family| family.info.kind == Kind::Counter;
        assert!(ALL.iter().filter(of_kind).all(|family| !family.info.name.ends_with("_total")));
        assert!(
            ALL.iter().all(|family| family.info.help.ends_with('.')
                && !family.info.help.contains(['\\', '"', '\n', '|']))
        );
    }

    fn table() -> String {
        let mut table = String::from("| name | labels | |\n| --- | --- | --- |\n");
        for family in ALL {
            let suffix = if family.info.kind == Kind::Counter { "_total" } else { "" };
            let labels: Vec<String> = family.info.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (family.info.name, family.info.kind.name(), family.info.help);
            writeln!(table, "| `{name}{suffix}` | {} | {kind}: {help} |", labels.join(", ")).unwrap();
        }
        table
    }

    #[test]
    fn documentation_lists_all_metrics() {
        let docs = fs::read_to_string(DOCS).unwrap();
        let (marker, end) = ("<!-- metrics -->\n", "<!-- end -->");
        let start = docs.find(marker).expect("the page has no start marker") + marker.len();
        let length = docs[start..].find(end).expect("the page has no end marker");
        let mut current = docs.clone();
        current.replace_range(start..start + length, &table());
        if std::env::var_os("UPDATE_DOCS").is_some() {
            fs::write(DOCS, current).unwrap();
            return;
        }
        assert!(
            docs == current,
            "docs/operations/metrics.md is out of date; run this test with UPDATE_DOCS=1"
        );
    }
}

//! Draws the page of a single bulkhead, with its table row, counters, busiest tenants and workers. `draw` calls this
//! file while such a page is open, and draws the rest of the screen. `app` holds the state and handles keys.

use bulkhead_api::Tenant;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};

use super::app::{App, Page};
use super::columns;
use super::sample::{Bulkhead, Worker};
use super::text::{fit, width};
use super::widgets::{bold, draw_line, table_head, table_row, take_top};
use crate::admin::WORKER_COLUMNS;

/// Number of screen rows reserved for workers. Tenants and counters use the remaining rows.
const WORKER_ROWS_RESERVED: usize = 4;

/// Width of a tenant's name in screen columns.
const TENANT_COLUMNS: usize = 20;

/// Draws the page of a bulkhead, after limiting the page's scroll position to the number of workers. Returns the number
/// of workers that fit on the page, or 1 if the page cannot be drawn.
pub(super) fn page(buffer: &mut Buffer, mut rest: Rect, app: &mut App) -> usize {
    let Page::Bulkhead { name, scroll } = &app.page else { return 1 };
    let (name, scroll) = (name.clone(), *scroll);
    let Some(bulkhead) = app.bulkhead(&name) else {
        draw_line(buffer, take_top(&mut rest, 1), &format!("{name} no longer exists"), Style::new());
        return 1;
    };
    let widths = columns::choose(&[bulkhead], usize::from(rest.width));
    if rest.height > 1 {
        table_head(buffer, take_top(&mut rest, 1), &widths);
    }
    table_row(buffer, take_top(&mut rest, 1), &widths, bulkhead);
    let room = usize::from(rest.height).saturating_sub(WORKER_ROWS_RESERVED);
    for (text, style) in detail_lines(bulkhead).into_iter().take(room) {
        draw_line(buffer, take_top(&mut rest, 1), &text, style);
    }
    let lines = worker_lines(&bulkhead.workers);
    let mut lines = lines.iter();
    if let Some(head) = lines.next() {
        draw_line(buffer, take_top(&mut rest, 1), head, bold());
    }
    let shown = usize::from(rest.height);
    let scroll = scroll.min(lines.len().saturating_sub(shown));
    for line in lines.skip(scroll).take(shown) {
        draw_line(buffer, take_top(&mut rest, 1), line, Style::new());
    }
    app.page = Page::Bulkhead { name, scroll };
    shown
}

fn detail_lines(bulkhead: &Bulkhead) -> Vec<(String, Style)> {
    let mut lines = Vec::new();
    let causes = bulkhead.detail.iter().chain(&bulkhead.service_cause);
    lines.extend(causes.map(|cause| (cause.clone(), Style::new().fg(Color::Red))));
    let breaker = format!("breaker   {}  restarts {}", bulkhead.breaker, bulkhead.restarts);
    lines.extend(bulkhead.facts.iter().chain([&breaker]).map(|fact| (fact.clone(), Style::new())));
    if !bulkhead.tenants.is_empty() {
        lines.push(("TENANT               INFLIGHT   QUEUED    SUBMITTED     REJECTED".to_owned(), bold()));
        lines.extend(bulkhead.tenants.iter().map(|tenant| (tenant_line(tenant), Style::new())));
    }
    lines
}

fn tenant_line(tenant: &Tenant) -> String {
    let Tenant { name, in_flight, queued, submitted, rejected } = tenant;
    let name = if name.is_empty() { "''" } else { name };
    format!("{} {in_flight:8} {queued:8} {submitted:12} {rejected:12}", fit(name, TENANT_COLUMNS))
}

/// Formats the workers as a table with a header line. If tenants have separate workers, a column names the
/// tenant.
fn worker_lines(workers: &[Worker]) -> Vec<String> {
    let has_tenants = workers.iter().any(|worker| worker.tenant.is_some());
    let tenant = |worker: &Worker| {
        let whose = worker.tenant.as_deref().unwrap_or_default();
        has_tenants.then(|| fit(&format!("'{whose}'"), TENANT_COLUMNS))
    };
    let head: Vec<String> = has_tenants
        .then(|| "TENANT".to_owned())
        .into_iter()
        .chain(WORKER_COLUMNS.map(String::from))
        .collect();
    let rows = workers.iter().map(|worker| tenant(worker).into_iter().chain(worker.cells.clone()).collect());
    let table: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = table.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            table.iter().map(|row| row.get(column).map_or(0, |cell| width(cell))).max().unwrap_or(0)
        })
        .collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| fit(cell, *width)).collect();
        cells.join(" ").trim_end().to_owned()
    };
    table.iter().map(line).collect()
}

//! Draws the screen into a buffer: header, footer, bulkhead table or the page of a single bulkhead, event pane, and
//! help. Parts that do not fit are left out, and stale data is dimmed. `app` owns the state and handles keys, and
//! `terminal` writes the buffer to the screen.

use std::time::{Duration, Instant};

use bulkhead_api::{Severity, Word};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::app::{App, ConnectionState, Mode, Page, window};
use super::columns;
use super::detail;
use super::events::Event;
use super::text::fit;
use super::widgets::{bold, draw_line, table_head, table_row, take_bottom, take_top};

/// Minimum screen height, in rows, for the event pane to be drawn.
const EVENT_PANE_HEIGHT_MIN: u16 = 10;

/// Minimum screen height, in rows, for the footer to be drawn.
const FOOTER_HEIGHT_MIN: u16 = 4;

const HELP: &[(&str, &str)] = &[
    ("↑ ↓ j k", "select a bulkhead, or scroll"),
    ("PgUp PgDn", "a page"),
    ("Home End", "the first or last row"),
    ("Enter", "open a bulkhead: workers, tenants, rejections, events"),
    ("Esc", "go back, clear the filter, or quit"),
    ("/", "filter by name; Enter applies the filter, Esc cancels"),
    ("s", "switch to the next sort order"),
    ("w n u r c", "sort by severity, name, utilisation, rejections or crashes"),
    ("p", "pause, continue"),
    ("Ctrl-Z", "suspend and return to the shell; `fg` continues"),
    ("q Ctrl-C", "quit"),
];

/// Draws the screen. Updates the scroll position and the number of rows per page in `app`.
pub(super) fn draw(buffer: &mut Buffer, app: &mut App, now: Instant) {
    let mut rest = buffer.area;
    let has_footer = rest.height >= FOOTER_HEIGHT_MIN;
    header(buffer, take_top(&mut rest, 1), app, now);
    if has_footer {
        footer(buffer, take_bottom(&mut rest, 1), app);
    }
    if app.mode == Mode::Help {
        return help(buffer, rest);
    }
    let events = if rest.height + 2 >= EVENT_PANE_HEIGHT_MIN { (rest.height / 4).min(10) } else { 0 };
    let events = take_bottom(&mut rest, events);
    app.page_rows = match &mut app.page {
        Page::List => list(buffer, rest, app),
        Page::Bulkhead { .. } => detail::page(buffer, rest, app),
    };
    event_pane(buffer, events, app);
    if matches!(app.connection_state(now), ConnectionState::Lost(_) | ConnectionState::Silent(_)) {
        // Stale data is dimmed.
        for part in [rest, events] {
            buffer.set_style(part, Style::new().add_modifier(Modifier::DIM));
        }
    }
}

// Header, footer and panes.

fn header(buffer: &mut Buffer, row: Rect, app: &App, now: Instant) {
    let seconds =
        |time: Duration| humantime::format_duration(Duration::from_secs(time.as_secs())).to_string();
    let every = humantime::format_duration(app.interval);
    let (status, style) = match app.connection_state(now) {
        ConnectionState::Live => (format!("every {every}"), bold()),
        ConnectionState::Paused => ("PAUSED".to_owned(), bold().fg(Color::Yellow)),
        ConnectionState::Silent(time) => {
            (format!("NO RESPONSE for {}", seconds(time)), bold().fg(Color::Yellow))
        }
        ConnectionState::Lost(time) => {
            (format!("NOT REACHABLE for {}", seconds(time)), bold().fg(Color::Red))
        }
    };
    let all = app.bulkheads();
    let not_ready = all.iter().filter(|bulkhead| bulkhead.state != "ready").count();
    let not_ok = all.iter().filter(|bulkhead| matches!(&*bulkhead.service, "degraded" | "failing")).count();
    let of = if all.len() == 1 { "bulkhead" } else { "bulkheads" };
    let mut text =
        format!("bulkhead top  {status}  {} {of}, {not_ready} not ready, {not_ok} not ok", all.len());
    if !app.filter.is_empty() {
        text.push_str(&format!("  filter: {}", app.filter));
    }
    draw_line(buffer, row, &text, style);
}

fn footer(buffer: &mut Buffer, row: Rect, app: &App) {
    let text = match (&app.mode, app.error(), &app.page) {
        (Mode::Filter { .. }, ..) => format!("/{}_  Enter applies the filter, Esc cancels", app.filter),
        (Mode::Help, ..) => format!("watching {} (press any key to go back)", app.socket),
        (Mode::Browse, Some(error), _) => error.to_owned(),
        (Mode::Browse, None, Page::List) => {
            let by = app.sort.name();
            format!("↑↓ select  Enter open  / filter  s sort: {by}  p pause  ? help  q quit")
        }
        (Mode::Browse, None, Page::Bulkhead { .. }) => {
            "↑↓ scroll  Esc back  p pause  ? help  q quit".to_owned()
        }
    };
    draw_line(buffer, row, &text, Style::new().add_modifier(Modifier::DIM));
}

fn event_pane(buffer: &mut Buffer, mut area: Rect, app: &App) {
    let whose = match &app.page {
        Page::List => None,
        Page::Bulkhead { name, .. } => Some(name.as_str()),
    };
    draw_line(buffer, take_top(&mut area, 1), "EVENTS", bold());
    for event in app.events.newest(usize::from(area.height), whose) {
        draw_line(buffer, take_top(&mut area, 1), &event.line, event_style(event));
    }
}

fn event_style(event: &Event) -> Style {
    match &event.severity {
        Word::Known(Severity::Info) | Word::Other(_) => Style::new(),
        Word::Known(Severity::Warning) => Style::new().fg(Color::Yellow),
        Word::Known(Severity::Critical) => Style::new().fg(Color::Red),
    }
}

fn help(buffer: &mut Buffer, mut rest: Rect) {
    for (keys, what) in HELP {
        draw_line(buffer, take_top(&mut rest, 1), &format!(" {} {what}", fit(keys, 10)), Style::new());
    }
}

// Table.

/// Draws the table rows that fit on the screen. Returns the number of rows per page.
fn list(buffer: &mut Buffer, mut rest: Rect, app: &mut App) -> usize {
    let rows = app.rows();
    let selected = app.selected(&rows);
    let widths = columns::choose(&rows, usize::from(rest.width));
    if rest.height > 1 {
        table_head(buffer, take_top(&mut rest, 1), &widths);
    }
    let page = usize::from(rest.height);
    let top = window(app.top, selected, page, rows.len());
    if rows.is_empty() {
        let none =
            if app.bulkheads().is_empty() { "there are no bulkheads" } else { "no name matches the filter" };
        draw_line(buffer, take_top(&mut rest, 1), none, Style::new());
    }
    for (index, bulkhead) in rows.iter().enumerate().skip(top).take(page) {
        let row = take_top(&mut rest, 1);
        table_row(buffer, row, &widths, bulkhead);
        if index == selected {
            buffer.set_style(row, Style::new().add_modifier(Modifier::REVERSED));
        }
    }
    app.top = top;
    page
}

#[cfg(test)]
mod tests;

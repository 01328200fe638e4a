//! Draws lines of text and rows of the bulkhead table for `draw` and `detail`. `columns` determines the contents and
//! widths of the columns.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::columns::{self, Column, ColumnWidth};
use super::sample::Bulkhead;
use super::text::{bar, fit, fit_right};

pub(super) fn take_top(rest: &mut Rect, rows: u16) -> Rect {
    let taken = Rect { height: rows.min(rest.height), ..*rest };
    rest.y += taken.height;
    rest.height -= taken.height;
    taken
}

pub(super) fn take_bottom(rest: &mut Rect, rows: u16) -> Rect {
    let height = rows.min(rest.height);
    rest.height -= height;
    Rect { y: rest.y + rest.height, height, ..*rest }
}

/// Draws a line of text. Truncates the text at the end of the row.
pub(super) fn draw_line(buffer: &mut Buffer, row: Rect, text: &str, style: Style) {
    if row.height > 0 && row.width > 0 {
        let columns = usize::from(row.width);
        buffer.set_stringn(row.x, row.y, fit(text, columns), columns, style);
    }
}

pub(super) fn bold() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

/// Returns the style in which a state is shown. The colour only repeats information that is also in the text.
pub(super) fn state_style(state: &str) -> Style {
    match state {
        "failed" | "failing" | "open" | "forced_open" => Style::new().fg(Color::Red),
        "degraded" | "half_open" => Style::new().fg(Color::Yellow),
        "draining" | "starting" => Style::new().fg(Color::Cyan),
        _ => Style::new(),
    }
}

pub(super) fn table_head(buffer: &mut Buffer, row: Rect, widths: &[ColumnWidth]) {
    cells(buffer, row, widths, |column| (column.title().to_owned(), bold()));
}

pub(super) fn table_row(buffer: &mut Buffer, row: Rect, widths: &[ColumnWidth], bulkhead: &Bulkhead) {
    cells(buffer, row, widths, |column| match column {
        Column::Load => (bar(bulkhead.utilisation(), columns::BAR_COLUMNS), Style::new()),
        Column::State => (bulkhead.state.clone(), state_style(&bulkhead.state)),
        Column::Service => (bulkhead.service.clone(), state_style(&bulkhead.service)),
        Column::Breaker => (bulkhead.breaker.clone(), state_style(&bulkhead.breaker)),
        other => (other.text(bulkhead), Style::new()),
    });
}

fn cells(buffer: &mut Buffer, row: Rect, widths: &[ColumnWidth], cell: impl Fn(Column) -> (String, Style)) {
    let mut x = row.x;
    for &(column, columns) in widths {
        let (text, style) = cell(column);
        let text = if column.is_number() { fit_right(&text, columns) } else { fit(&text, columns) };
        let columns = u16::try_from(columns).unwrap_or(u16::MAX);
        draw_line(buffer, Rect { x, width: columns, ..row }.intersection(row), &text, style);
        x = x.saturating_add(columns).saturating_add(1);
    }
}

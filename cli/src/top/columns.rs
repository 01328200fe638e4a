//! Defines the columns of the bulkhead table of `top` and their contents, and chooses the columns that fit a given
//! width. `widgets`, `detail` and `plain` show the values, and `sample` computes them.

use super::sample::{Bulkhead, Counts};
use super::text::{rate, short, width};

/// Width of a bar in screen columns.
pub(super) const BAR_COLUMNS: usize = 6;

/// Maximum width reserved for the name column, in screen columns. Longer names use the space that the other columns
/// leave free.
const NAME_COLUMNS_RESERVED_MAX: usize = 14;

/// A column of the table. The variants are in display order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Column {
    Name,
    State,
    Service,
    Workers,
    InFlight,
    Queue,
    Load,
    Ok,
    Rejected,
    Failed,
    Late,
    Crashed,
    Restarts,
    Breaker,
    P50,
    P99,
}

const BY_IMPORTANCE: [Column; 16] = [
    Column::Name,
    Column::State,
    Column::Service,
    Column::InFlight,
    Column::Queue,
    Column::Ok,
    Column::Rejected,
    Column::Failed,
    Column::Late,
    Column::Crashed,
    Column::Load,
    Column::Workers,
    Column::Breaker,
    Column::Restarts,
    Column::P99,
    Column::P50,
];

impl Column {
    /// Returns all columns in display order.
    pub(super) fn all() -> [Self; 16] {
        let mut all = BY_IMPORTANCE;
        all.sort();
        all
    }

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::State => "STATE",
            Self::Service => "SERVICE",
            Self::Workers => "WORKERS",
            Self::InFlight => "INFLIGHT",
            Self::Queue => "QUEUE",
            Self::Load => "LOAD",
            Self::Ok => "OK/s",
            Self::Rejected => "REJ/s",
            Self::Failed => "FAIL/s",
            Self::Late => "LATE/s",
            Self::Crashed => "CRASH/s",
            Self::Restarts => "RESTARTS",
            Self::Breaker => "BREAKER",
            Self::P50 => "P50",
            Self::P99 => "P99",
        }
    }

    pub(super) fn is_number(self) -> bool {
        !matches!(self, Self::Name | Self::State | Self::Service | Self::Load | Self::Breaker)
    }

    pub(super) fn text(self, bulkhead: &Bulkhead) -> String {
        let of = |rates: &Counts<f64>| match self {
            Self::Ok => rates.ok,
            Self::Rejected => rates.rejected,
            Self::Failed => rates.failed,
            Self::Late => rates.late,
            _ => rates.crashed,
        };
        match self {
            Self::Name => bulkhead.name.clone(),
            Self::State => bulkhead.state.clone(),
            Self::Service => bulkhead.service.clone(),
            Self::Workers => short(bulkhead.workers.len() as u64),
            Self::InFlight => format!("{}/{}", short(bulkhead.in_flight), short(bulkhead.limit)),
            Self::Queue => format!("{}/{}", short(bulkhead.queued), short(bulkhead.capacity)),
            Self::Load => format!("{:.0}%", bulkhead.utilisation() * 100.0),
            Self::Ok | Self::Rejected | Self::Failed | Self::Late | Self::Crashed => {
                bulkhead.rates.as_ref().map_or_else(|| "-".to_owned(), |rates| rate(of(rates)))
            }
            Self::Restarts => short(bulkhead.restarts),
            Self::Breaker => bulkhead.breaker.clone(),
            Self::P50 => bulkhead.p50.clone(),
            Self::P99 => bulkhead.p99.clone(),
        }
    }

    /// Returns the width, in screen columns, that this column needs for the title and the given rows.
    fn needed_width(self, rows: &[&Bulkhead]) -> usize {
        if self == Self::Load {
            return BAR_COLUMNS;
        }
        let widest = rows.iter().map(|row| width(&self.text(row))).max().unwrap_or(0);
        widest.max(self.title().len())
    }
}

/// A column of the table, and the column's width in screen columns.
pub(super) type ColumnWidth = (Column, usize);

/// Returns the table columns that fit in `columns` screen columns, in display order. One space separates the columns.
/// The name is always included.
pub(super) fn choose(rows: &[&Bulkhead], columns: usize) -> Vec<ColumnWidth> {
    let mut left = columns;
    let mut widths: Vec<ColumnWidth> = Vec::new();
    let name = Column::Name.needed_width(rows);
    for column in BY_IMPORTANCE {
        let width_taken = match column {
            Column::Name => name.min(NAME_COLUMNS_RESERVED_MAX).min(left),
            other => other.needed_width(rows),
        };
        let gap = usize::from(column != Column::Name);
        // Less important columns stay hidden even if they would fit, so that columns appear and disappear in a fixed
        // order.
        let Some(rest) = left.checked_sub(width_taken + gap) else { break };
        left = rest;
        widths.push((column, width_taken));
    }
    if let Some((_, width_taken)) = widths.first_mut() {
        *width_taken += left.min(name - (*width_taken).min(name));
    }
    widths.sort();
    widths
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bulkhead(name: &str) -> Bulkhead {
        let latency = json!({"run": {"p50": 1.5, "p99": 12.25}});
        super::super::sample::tests::bulkhead(&json!({
            "name": name, "state": "ready", "service": "ok", "limit": 8, "in_flight": 2, "queue_capacity": 100,
            "breaker": "closed", "has_breaker": true, "latency_ms": latency,
        }))
    }

    fn heads(rows: &[&Bulkhead], columns: usize) -> Vec<&'static str> {
        let widths = choose(rows, columns);
        let width_taken = widths.iter().map(|(_, width_taken)| width_taken + 1).sum::<usize>() - 1;
        assert!(width_taken <= columns, "{widths:?} in {columns}");
        widths.iter().map(|(column, _)| column.title()).collect()
    }

    #[test]
    fn narrow_table_keeps_most_important_columns() {
        let rows = [&bulkhead("thumbnail"), &bulkhead("ocr")];
        let at_76 =
            ["NAME", "STATE", "SERVICE", "INFLIGHT", "QUEUE", "OK/s", "REJ/s", "FAIL/s", "LATE/s", "CRASH/s"];
        assert_eq!(heads(&rows, 76), at_76);
        assert_eq!(heads(&rows, 40), ["NAME", "STATE", "SERVICE", "INFLIGHT", "QUEUE"]);
        assert_eq!(heads(&rows, 200).len(), 16);
        assert_eq!(heads(&rows, 3), ["NAME"]);
        for columns in 0..200 {
            let few = choose(&rows, columns);
            let more = choose(&rows, columns + 1);
            assert!(few.iter().all(|(column, _)| more.iter().any(|(other, _)| other == column)), "{columns}");
        }
    }

    #[test]
    fn name_column_uses_remaining_width() {
        let long = bulkhead(&"n".repeat(40));
        let name = |columns| choose(&[&long], columns)[0].1;
        assert_eq!((name(0), name(5), name(14)), (0, 5, 14));
        assert_eq!(name(300), 40);
        assert!(name(80) >= NAME_COLUMNS_RESERVED_MAX);
    }

    #[test]
    fn cells_show_dash_until_rates_are_known() {
        let mut one = bulkhead("b");
        let cells = |one: &Bulkhead| Column::all().map(|column| column.text(one)).join(" ");
        assert_eq!(cells(&one), "b ready ok 0 2/8 0/100 25% - - - - - 0 closed 1.50ms 12.25ms");
        one.rates = Some(Counts { ok: 20_000.0, rejected: 0.5, failed: 0.0, late: 1.0, crashed: 3.0 });
        assert_eq!(cells(&one), "b ready ok 0 2/8 0/100 25% 20k 0.5 0 1.0 3.0 0 closed 1.50ms 12.25ms");
    }
}

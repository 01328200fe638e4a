//! The figures as a table, or as JSON.

use serde::Serialize;

/// Which side of the target is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// The judged value is to be at most this.
    AtMost,
    /// The judged value is to be at least this.
    AtLeast,
    /// The figure itself is to be at most this, whatever its ratio.
    FigureAtMost,
    /// There is none.
    Told,
}

/// By how much the real one differs from the bare one, pair by pair.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Difference {
    pub(crate) mean: f64,
    /// Within these two it is with 95 % confidence.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    /// What the bare counterpart takes, where there is one.
    pub(crate) bare: Option<f64>,
    pub(crate) real: f64,
    /// The median of the ratios of real to bare, round by round.
    pub(crate) ratio: Option<f64>,
    pub(crate) target: Target,
    /// What the ratio is to be, or the figure itself where there is no ratio.
    pub(crate) limit: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) difference: Option<Difference>,
}

impl Figure {
    fn is_met(&self) -> bool {
        let judged = self.ratio.unwrap_or(self.real);
        match self.target {
            Target::AtMost => judged <= self.limit,
            Target::AtLeast => judged >= self.limit,
            Target::FigureAtMost => self.real <= self.limit,
            Target::Told => true,
        }
    }

    fn wish(&self) -> String {
        match self.target {
            Target::AtMost => format!("≤ {}", self.limit),
            Target::AtLeast => format!("≥ {}", self.limit),
            Target::FigureAtMost => format!("≤ {} {}", self.limit, self.unit),
            Target::Told => self.difference.map_or("–".to_owned(), |difference| {
                let Difference { mean, low, high } = difference;
                format!("{} (95 %: {} to {})", signed(mean), signed(low), signed(high))
            }),
        }
    }
}

/// Prints what was measured.
pub(crate) fn print(figures: &[Figure], is_json: bool) {
    if is_json {
        let lines: Vec<_> = figures
            .iter()
            .map(|figure| {
                let mut line = serde_json::json!(figure);
                line["met"] = figure.is_met().into();
                line
            })
            .collect();
        println!("{}", serde_json::json!({ "figures": lines }));
        return;
    }
    println!("{:<52} {:>12} {:>12} {:>7}  target", "", "bare", "real", "ratio");
    for figure in figures {
        let number = |value: Option<f64>| value.map_or("–".to_owned(), short);
        println!(
            "{:<52} {:>12} {:>12} {:>7}  {}{}",
            format!("{}, {}", figure.name, figure.unit),
            number(figure.bare),
            short(figure.real),
            number(figure.ratio),
            figure.wish(),
            if figure.is_met() { "" } else { "   MISSED" },
        );
    }
}

fn signed(value: f64) -> String {
    format!("{}{}", if value < 0.0 { '−' } else { '+' }, short(value.abs()))
}

/// Three digits that mean something.
fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2} M", value / 1e6),
        value if value >= 1e4 => format!("{:.1} k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

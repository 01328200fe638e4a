//! The figures as a table that grows while they are measured, as JSON, and as a plot.

use std::cell::RefCell;

use serde::Serialize;

/// Difference that [`Target::AtMostOrSlack`] allows whatever the ratio, in µs.
const SLACK_US: f64 = 10_000.0;

/// Which side of the target is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// The judged value is to be at most this.
    AtMost,
    /// The ratio must be at most this, or the figure at most [`SLACK_US`] above the bare figure.
    AtMostOrSlack,
    /// The judged value is to be at least this.
    AtLeast,
    /// The figure itself is to be at most this, whatever its ratio.
    FigureAtMost,
    /// The figure itself is to be at least this, whatever its ratio.
    FigureAtLeast,
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
    /// Bare and real, round by round.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rounds: Vec<(f64, f64)>,
}

impl Figure {
    /// A figure with nothing to compare it with, and without a target.
    pub(crate) fn alone(name: impl Into<String>, unit: &'static str, real: f64) -> Self {
        let (target, limit) = (Target::Told, f64::NAN);
        let (name, rounds) = (name.into(), Vec::new());
        Self { name, unit, bare: None, real, ratio: None, target, limit, difference: None, rounds }
    }

    /// The same with a target.
    pub(crate) fn wanted(self, target: Target, limit: f64) -> Self {
        Self { target, limit, ..self }
    }

    pub(crate) fn is_met(&self) -> bool {
        let judged = self.ratio.unwrap_or(self.real);
        match self.target {
            Target::AtMost => judged <= self.limit,
            Target::AtMostOrSlack => {
                judged <= self.limit || self.bare.is_some_and(|bare| self.real <= bare + SLACK_US)
            }
            Target::AtLeast => judged >= self.limit,
            Target::FigureAtMost => self.real <= self.limit,
            Target::FigureAtLeast => self.real >= self.limit,
            Target::Told => true,
        }
    }

    fn wish(&self) -> String {
        match self.target {
            Target::AtMost => format!("≤ {}", self.limit),
            Target::AtMostOrSlack => format!("≤ {} or {} ms more", self.limit, SLACK_US / 1e3),
            Target::AtLeast => format!("≥ {}", self.limit),
            Target::FigureAtMost => format!("≤ {} {}", self.limit, self.unit),
            Target::FigureAtLeast => format!("≥ {} {}", self.limit, self.unit),
            Target::Told => self.difference.map_or("–".to_owned(), |difference| {
                let Difference { mean, low, high } = difference;
                format!("{} (95 %: {} to {})", signed(mean), signed(low), signed(high))
            }),
        }
    }

    fn line(&self) -> String {
        let number = |value: Option<f64>| value.map_or("–".to_owned(), short);
        format!(
            "{:<60} {:>12} {:>12} {:>7}  {}{}",
            format!("{}, {}", self.name, self.unit),
            number(self.bare),
            short(self.real),
            number(self.ratio),
            self.wish(),
            if self.is_met() { "" } else { "   MISSED" },
        )
    }
}

/// What was measured so far. As a table, each figure is printed as soon as it is known.
pub(crate) struct Report {
    only: Option<String>,
    /// Whether what takes minutes is wanted without being named.
    wants_slow: bool,
    is_json: bool,
    figures: RefCell<Vec<Figure>>,
}

impl Report {
    /// A report of the figures whose name holds `only`.
    pub(crate) fn new(only: Option<String>, wants_slow: bool, is_json: bool) -> Self {
        Self { only, wants_slow, is_json, figures: RefCell::default() }
    }

    /// Whether figures of this name, or figures whose names begin like that, are wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// The same of figures that take minutes.
    pub(crate) fn wants_slow(&self, name: &str) -> bool {
        self.only.as_deref().map_or(self.wants_slow, |only| name.contains(only))
    }

    /// What the figures' names have to hold, if that was said.
    pub(crate) fn only(&self) -> Option<&str> {
        self.only.as_deref()
    }

    /// A figure that was measured; it is left out if it is not wanted.
    pub(crate) fn tell(&self, figure: Figure) {
        if !self.wants(&figure.name) {
            return;
        }
        let mut figures = self.figures.borrow_mut();
        if !self.is_json {
            if figures.is_empty() {
                println!("{:<60} {:>12} {:>12} {:>7}  target", "", "bare", "real", "ratio");
            }
            println!("{}", figure.line());
        }
        figures.push(figure);
    }

    /// All of them, in the order in which they were measured; as JSON, they are printed now.
    pub(crate) fn finish(self) -> Vec<Figure> {
        let figures = self.figures.into_inner();
        if self.is_json {
            let line = |figure: &Figure| {
                let mut line = serde_json::json!(figure);
                line["met"] = figure.is_met().into();
                line
            };
            println!("{}", serde_json::json!({ "figures": figures.iter().map(line).collect::<Vec<_>>() }));
        }
        figures
    }
}

fn signed(value: f64) -> String {
    format!("{}{}", if value < 0.0 { '−' } else { '+' }, short(value.abs()))
}

/// Three digits that mean something.
pub(crate) fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2} M", value / 1e6),
        value if value >= 1e4 => format!("{:.1} k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

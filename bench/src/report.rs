//! Collects the figures of all measurements, and compares each figure with its target. Prints a table while the
//! measurements run, or JSON at the end. Also determines which measurements were requested with `--only`. The modules
//! that measure choose the targets, and `plot` draws the figures.

use std::cell::RefCell;

use serde::Serialize;

/// Maximum difference between the real and the bare figure, in µs, that [`Target::AtMostOrSlack`] accepts regardless of
/// the ratio.
const SLACK_US: f64 = 10_000.0;

/// Kind of target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Target {
    /// The ratio must not exceed the limit. Without a ratio, the figure must not exceed the limit.
    AtMost,
    /// Either the ratio must not exceed the limit, or the figure must not exceed the bare figure by more than
    /// [`SLACK_US`].
    AtMostOrSlack,
    /// The ratio must reach the limit. Without a ratio, the figure must reach the limit.
    AtLeast,
    /// The figure must not exceed the limit, regardless of the ratio.
    FigureAtMost,
    /// The figure must reach the limit, regardless of the ratio.
    FigureAtLeast,
    /// The figure has no target.
    Told,
}

/// Difference between the two measured variants, as the mean of all pairs of rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Difference {
    pub(crate) mean: f64,
    /// Bounds of the 95 % confidence interval.
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    /// Figure for the bare counterpart, if there is one.
    pub(crate) bare: Option<f64>,
    pub(crate) real: f64,
    /// Median ratio of the real figure to the bare figure over all rounds.
    pub(crate) ratio: Option<f64>,
    pub(crate) target: Target,
    /// Limit that the target sets, or NaN if there is no target.
    pub(crate) limit: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) difference: Option<Difference>,
    /// Bare figure and real figure from each round.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rounds: Vec<(f64, f64)>,
}

impl Figure {
    /// Creates a figure that has neither a counterpart nor a target.
    pub(crate) fn alone(name: impl Into<String>, unit: &'static str, real: f64) -> Self {
        let (target, limit) = (Target::Told, f64::NAN);
        let (name, rounds) = (name.into(), Vec::new());
        Self { name, unit, bare: None, real, ratio: None, target, limit, difference: None, rounds }
    }

    /// Returns this figure with the given target.
    pub(crate) fn with_target(self, target: Target, limit: f64) -> Self {
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

    fn target_text(&self) -> String {
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
            self.target_text(),
            if self.is_met() { "" } else { "   MISSED" },
        )
    }
}

/// The figures measured so far. If the output is a table, each figure is printed immediately.
pub(crate) struct Report {
    only: Option<String>,
    /// True if slow measurements were requested in addition to the usual measurements.
    wants_slow: bool,
    is_json: bool,
    figures: RefCell<Vec<Figure>>,
}

impl Report {
    /// Creates a report for figures whose names contain `only`.
    pub(crate) fn new(only: Option<String>, wants_slow: bool, is_json: bool) -> Self {
        Self { only, wants_slow, is_json, figures: RefCell::default() }
    }

    /// Returns true if the name contains the value of `--only`, or if `--only` is not given.
    pub(crate) fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// Returns true if a figure that takes minutes to measure was requested; see [`Report::wants`].
    pub(crate) fn wants_slow(&self, name: &str) -> bool {
        self.only.as_deref().map_or(self.wants_slow, |only| name.contains(only))
    }

    /// Returns the text that the names of figures must contain, or `None` if all figures are requested.
    pub(crate) fn only(&self) -> Option<&str> {
        self.only.as_deref()
    }

    /// Adds a figure if it was requested.
    pub(crate) fn add(&self, figure: Figure) {
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

    /// Returns all figures in the order in which they were measured. If the output is JSON, prints them first.
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

/// Formats a number with about three significant digits.
pub(crate) fn short(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{:.2} M", value / 1e6),
        value if value >= 1e4 => format!("{:.1} k", value / 1e3),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

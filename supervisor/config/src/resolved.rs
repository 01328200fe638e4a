//! A value that holds, with the reason why: written, preset, or refused. What relations between keys need
//! in order to show a mistake where it was made.

use std::fmt::Display;
use std::ops::Range;

use super::reader::{Field, Given, Origin};

/// A value that holds, and why.
#[derive(Debug, Clone)]
pub(super) struct Resolved<T> {
    pub(super) value: T,
    /// Where the value was written, if it was.
    source: Field<()>,
}

impl<T: Clone> Field<T> {
    /// The value, or `preset` if there is none.
    pub(super) fn resolved(&self, preset: T) -> Resolved<T> {
        let source = match self {
            Self::Given(Given { span, origin, .. }) => {
                Field::Given(Given { value: (), span: span.clone(), origin: *origin })
            }
            Self::Absent => Field::Absent,
            Self::Refused => Field::Refused,
        };
        Resolved { value: self.value_or(preset), source }
    }

    /// The same without the reason.
    pub(super) fn value_or(&self, preset: T) -> T {
        self.given().map_or(preset, |given| given.value.clone())
    }

    /// The value of a key without a default.
    pub(super) fn value(&self) -> Option<T> {
        self.given().map(|given| given.value.clone())
    }
}

impl<T> Resolved<T> {
    /// Whether the bulkhead itself says so.
    pub(super) fn is_own(&self) -> bool {
        self.source.given().is_some_and(|given| given.origin == Origin::Own)
    }

    /// For a message: the value, and where it comes from if that is not where the message points.
    pub(super) fn told(&self, shown: impl Display) -> String {
        match &self.source {
            Field::Absent => format!("{shown}, the default"),
            Field::Given(given) if given.origin == Origin::Defaults => format!("{shown}, from [defaults]"),
            Field::Given(_) | Field::Refused => shown.to_string(),
        }
    }
}

/// The place to show when two values do not fit; `None` if that cannot be judged.
pub(super) fn blame<A, B>(a: &Resolved<A>, b: &Resolved<B>) -> Option<Range<usize>> {
    nearest(&[&a.source, &b.source])
}

/// The same of several.
pub(super) fn blame_one_of<T>(values: &[&Resolved<T>]) -> Option<Range<usize>> {
    nearest(&values.iter().map(|value| &value.source).collect::<Vec<_>>())
}

/// Returns the place nearest to the writer, the first of those that are equally near.
fn nearest(sources: &[&Field<()>]) -> Option<Range<usize>> {
    if sources.iter().any(|source| source.is_refused()) {
        return None;
    }
    let places = sources.iter().rev().filter_map(|source| source.given());
    places.max_by_key(|given| given.origin).map(|given| given.span.clone())
}

//! Values with their source: from the file, default, or invalid. Rules between keys use the source to report
//! a problem at the right position.

use std::fmt::Display;
use std::ops::Range;

use super::reader::{Field, Given, Origin};

/// A value and its source.
#[derive(Debug, Clone)]
pub(super) struct Resolved<T> {
    pub(super) value: T,
    /// Position of the value, if the file contains it.
    source: Field<()>,
}

impl<T: Clone> Field<T> {
    /// Returns the value or `default_value`, with the source.
    pub(super) fn resolved(&self, default_value: T) -> Resolved<T> {
        let source = match self {
            Self::Given(Given { span, origin, .. }) => {
                Field::Given(Given { value: (), span: span.clone(), origin: *origin })
            }
            Self::Absent => Field::Absent,
            Self::Invalid => Field::Invalid,
        };
        Resolved { value: self.value_or(default_value), source }
    }

    /// Returns the value or `default_value`.
    pub(super) fn value_or(&self, default_value: T) -> T {
        self.given().map_or(default_value, |given| given.value.clone())
    }

    /// Returns the value of a key without a default.
    pub(super) fn value(&self) -> Option<T> {
        self.given().map(|given| given.value.clone())
    }
}

impl<T> Resolved<T> {
    /// Returns true if the bulkhead itself sets the value.
    pub(super) fn is_own(&self) -> bool {
        self.source.given().is_some_and(|given| given.origin == Origin::Own)
    }

    /// Formats the value for a message. Adds the origin if the message points elsewhere.
    pub(super) fn with_origin(&self, shown: impl Display) -> String {
        match &self.source {
            Field::Absent => format!("{shown}, the default"),
            Field::Given(given) if given.origin == Origin::Defaults => format!("{shown}, from [defaults]"),
            Field::Given(_) | Field::Invalid => shown.to_string(),
        }
    }
}

/// Returns the position to report when two values do not fit. `None` if one of them is invalid or none is
/// in the file.
pub(super) fn report_position<A, B>(a: &Resolved<A>, b: &Resolved<B>) -> Option<Range<usize>> {
    nearest(&[&a.source, &b.source])
}

/// Returns the position to report when several values do not fit. `None` if one of them is invalid or none is
/// in the file.
pub(super) fn report_position_of<T>(values: &[&Resolved<T>]) -> Option<Range<usize>> {
    nearest(&values.iter().map(|value| &value.source).collect::<Vec<_>>())
}

/// Returns the position with the nearest origin; of equal ones, the first.
fn nearest(sources: &[&Field<()>]) -> Option<Range<usize>> {
    if sources.iter().any(|source| source.is_invalid()) {
        return None;
    }
    let places = sources.iter().rev().filter_map(|source| source.given());
    places.max_by_key(|given| given.origin).map(|given| given.span.clone())
}

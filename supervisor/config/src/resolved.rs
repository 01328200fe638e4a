//! Pairs a value with its source, which is the file, the default, or an invalid value in the file. `relations` checks
//! rules that span several keys. It reports problems at the position of the source.

use std::fmt::Display;
use std::ops::Range;

use super::reader::{Field, Given, Origin};

/// A value and its source.
#[derive(Debug, Clone)]
pub(super) struct Resolved<T> {
    pub(super) value: T,
    /// Position and origin of the value, if it is in the file.
    source: Field<()>,
}

impl<T: Clone> Field<T> {
    /// Returns the value and its source. The value is `default_value` if the file contains no valid value.
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

    /// Returns the value, or `default_value` if the file contains no valid value.
    pub(super) fn value_or(&self, default_value: T) -> T {
        self.given().map_or(default_value, |given| given.value.clone())
    }

    /// Returns the value, or `None` if the file contains no valid value.
    pub(super) fn value(&self) -> Option<T> {
        self.given().map(|given| given.value.clone())
    }
}

impl<T> Resolved<T> {
    /// Returns true if the value is set in the bulkhead's own table rather than in `[defaults]`.
    pub(super) fn is_own(&self) -> bool {
        self.source.given().is_some_and(|given| given.origin == Origin::Own)
    }

    /// Formats a value together with its origin, such as `5, the default`. Omits the origin if the value is in the
    /// bulkhead's own table.
    pub(super) fn with_origin(&self, shown: impl Display) -> String {
        match &self.source {
            Field::Absent => format!("{shown}, the default"),
            Field::Given(given) if given.origin == Origin::Defaults => format!("{shown}, from [defaults]"),
            Field::Given(_) | Field::Invalid => shown.to_string(),
        }
    }
}

/// Returns the position at which to report that two values contradict each other. Returns `None` if either value is
/// invalid or if neither is in the file.
pub(super) fn report_position<A, B>(a: &Resolved<A>, b: &Resolved<B>) -> Option<Range<usize>> {
    nearest(&[&a.source, &b.source])
}

/// Returns the position at which to report that several values contradict each other. Returns `None` if any of them is
/// invalid or if none is in the file.
pub(super) fn report_position_of<T>(values: &[&Resolved<T>]) -> Option<Range<usize>> {
    nearest(&values.iter().map(|value| &value.source).collect::<Vec<_>>())
}

/// Returns the position of the value with the most specific origin. If several values have this origin, returns the
/// position of the first value.
fn nearest(sources: &[&Field<()>]) -> Option<Range<usize>> {
    if sources.iter().any(|source| source.is_invalid()) {
        return None;
    }
    let places = sources.iter().rev().filter_map(|source| source.given());
    places.max_by_key(|given| given.origin).map(|given| given.span.clone())
}

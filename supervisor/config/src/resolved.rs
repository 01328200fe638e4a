//! A value that holds, with the reason why: written, preset, or refused. What relations between keys need
//! in order to show a mistake where it was made.

use std::fmt::Display;
use std::ops::Range;

use super::reader::{Field, Origin};

/// Where a resolved value comes from.
#[derive(Debug, Clone, PartialEq)]
enum Source {
    Written(Range<usize>, Origin),
    Preset,
    Refused,
}

/// A value that holds, and why.
#[derive(Debug, Clone)]
pub(super) struct Resolved<T> {
    pub(super) value: T,
    source: Source,
}

impl<T: Clone> Field<T> {
    /// The value, or `preset` if there is none.
    pub(super) fn resolved(&self, preset: T) -> Resolved<T> {
        match self {
            Field::Given(given) => Resolved {
                value: given.value.clone(),
                source: Source::Written(given.span.clone(), given.origin),
            },
            Field::Absent => Resolved { value: preset, source: Source::Preset },
            Field::Refused => Resolved { value: preset, source: Source::Refused },
        }
    }

    /// The same without the reason.
    pub(super) fn value_or(&self, preset: T) -> T {
        self.given().map_or(preset, |given| given.value.clone())
    }

    /// The value, or an empty one.
    pub(super) fn value_or_default(&self) -> T
    where
        T: Default,
    {
        self.value().unwrap_or_default()
    }

    /// The value of a key without a default.
    pub(super) fn value(&self) -> Option<T> {
        self.given().map(|given| given.value.clone())
    }
}

impl<T> Resolved<T> {
    /// Where the value was written; `None` if it was not, or was refused.
    fn place(&self) -> Option<(&Range<usize>, Origin)> {
        if let Source::Written(span, origin) = &self.source { Some((span, *origin)) } else { None }
    }

    /// Whether the bulkhead itself says so.
    pub(super) fn is_own(&self) -> bool {
        self.place().is_some_and(|(_, origin)| origin == Origin::Own)
    }

    /// For a message: the value, and where it comes from if that is not where the message points.
    pub(super) fn told(&self, shown: impl Display) -> String {
        match self.source {
            Source::Preset => format!("{shown}, the default"),
            Source::Written(_, Origin::Defaults) => format!("{shown}, from [defaults]"),
            Source::Written(_, Origin::Own | Origin::Tenant) | Source::Refused => shown.to_string(),
        }
    }
}

/// The place to show when two values do not fit; `None` if that cannot be judged.
pub(super) fn blame<A, B>(a: &Resolved<A>, b: &Resolved<B>) -> Option<Range<usize>> {
    if a.source == Source::Refused || b.source == Source::Refused {
        return None;
    }
    match (a.place(), b.place()) {
        (Some((a, near)), Some((b, far))) => Some(if near >= far { a.clone() } else { b.clone() }),
        (Some((place, _)), None) | (None, Some((place, _))) => Some(place.clone()),
        (None, None) => None,
    }
}

/// The same of several: the nearest to the writer, the first of those that are equally near.
pub(super) fn blame_one_of<T>(values: &[&Resolved<T>]) -> Option<Range<usize>> {
    if values.iter().any(|value| value.source == Source::Refused) {
        return None;
    }
    let places = values.iter().rev().filter_map(|value| value.place());
    places.max_by_key(|(_, origin)| *origin).map(|(place, _)| place.clone())
}

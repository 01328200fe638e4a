//! The keys of the file: a row for each, in a file for each subject, with the checked values that they become
//! unless those are policy's own types. To add a key: a row here, a field of the type that it becomes, and its use.

pub(crate) mod access;
pub(crate) mod admission;
pub(crate) mod bulkhead;
pub(crate) mod confinement;
pub(crate) mod exec;
pub(crate) mod life;
pub(crate) mod rlimits;
pub(crate) mod supervisor;
pub(crate) mod tenants;

/// Kinds that rows often have.
mod kinds {
    use std::time::Duration;

    use crate::defaults;
    use crate::key::Kind;
    use bulkhead_shared::Vocabulary;

    /// Any duration, also none.
    pub(super) const ANY: Duration = Duration::ZERO;
    /// Any duration but none.
    pub(super) const SOME: Duration = defaults::DURATION_MIN;
    /// A share that is something.
    pub(super) const PART: Kind = Kind::Share { none: false, all: true };

    pub(super) const fn at_least(min: Duration) -> Kind {
        Kind::Duration(min)
    }

    pub(super) const fn size(min: u64, max: u64) -> Kind {
        Kind::Size { min, max }
    }

    pub(super) const fn count(min: u64, max: u64) -> Kind {
        Kind::Count { min, max }
    }

    pub(super) const fn one_of<T: Vocabulary>() -> Kind {
        Kind::Word(T::WORDS)
    }
}

//! Declares the keys of all tables in the configuration file, one row per key, with a submodule for each subject. The
//! submodules also define most types of the validated values. `file` reads the tables, `schema` lists the keys, and
//! `relations` checks rules between keys and creates the validated values. To add a key, add a row in a submodule, a
//! field in the validated type, and the code that uses the field.

pub(crate) mod access;
pub(crate) mod admission;
pub(crate) mod bulkhead;
pub(crate) mod confinement;
pub(crate) mod exec;
pub(crate) mod lifecycle;
pub(crate) mod rlimits;
pub(crate) mod supervisor;
pub(crate) mod tenants;

/// Value kinds and limits shared by several keys.
mod kinds {
    use std::time::Duration;

    use crate::defaults;
    use crate::key::Kind;
    use bulkhead_shared::Vocabulary;

    /// Minimum for durations that can be zero.
    pub(super) const ANY_DURATION: Duration = Duration::ZERO;
    pub(super) const POSITIVE_DURATION: Duration = defaults::DURATION_MIN;
    /// A fraction above 0 and at most 1.
    pub(super) const POSITIVE_SHARE: Kind = Kind::Share { none: false, all: true };

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

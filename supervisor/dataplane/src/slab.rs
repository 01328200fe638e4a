//! Tables of objects that the data plane refers to by index. Each table has a separate index type, so that an
//! index cannot be used with another table.

use std::fmt::Debug;
use std::hash::Hash;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Index of an entry in a [`Slab`].
pub(super) trait SlabIndex: Copy + Eq + Ord + Hash + Debug {
    fn from_number(number: usize) -> Self;
    fn number(self) -> usize;
}

macro_rules! indices {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(super) struct $name(u32);

        impl SlabIndex for $name {
            #[inline]
            fn from_number(number: usize) -> Self {
                let fits = u32::try_from(number).is_ok();
                debug_assert!(fits, "an index must fit into 32 bits");
                Self(number as u32)
            }

            #[inline]
            fn number(self) -> usize {
                self.0 as usize
            }
        }
    )*};
}

/// Implements `Deref` for a type that keeps a [`Slab`] in its `slab` field. The type dereferences to this table.
macro_rules! owns_slab {
    ($owner:ty, $index:ty, $entry:ty) => {
        impl std::ops::Deref for $owner {
            type Target = $crate::slab::Slab<$index, $entry>;

            #[inline]
            fn deref(&self) -> &Self::Target {
                &self.slab
            }
        }

        impl std::ops::DerefMut for $owner {
            #[inline]
            fn deref_mut(&mut self) -> &mut Self::Target {
                &mut self.slab
            }
        }
    };
}
pub(super) use owns_slab;

indices! {
    /// Index of a client's session.
    SessionIndex;
    /// Index of a worker's link.
    LinkIndex;
    /// Index of a bulkhead.
    BulkheadIndex;
    /// Index of a compartment.
    CompartmentIndex;
}

/// Identifies a session. The epoch distinguishes the session from earlier and later sessions with the same
/// index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct SessionId {
    pub(super) index: SessionIndex,
    pub(super) epoch: u64,
}

/// Table of values accessed by index. The index of a removed value is reused immediately or, for a retired value, after
/// [`Slab::recycle`] is called.
pub(super) struct Slab<I, T> {
    places: Vec<Option<T>>,
    free: Vec<I>,
    /// Indices that can be reused from the end of the iteration on. Until then, events for the removed values might
    /// still be pending.
    freed: Vec<I>,
    index: PhantomData<I>,
}

impl<I, T> Default for Slab<I, T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new(), freed: Vec::new(), index: PhantomData }
    }
}

impl<I: SlabIndex, T> Slab<I, T> {
    /// Returns the index for the next value.
    pub(super) fn next(&self) -> I {
        self.free.last().copied().unwrap_or_else(|| I::from_number(self.places.len()))
    }

    pub(super) fn insert(&mut self, value: T) -> I {
        match self.free.pop() {
            Some(index) => {
                self.places[index.number()] = Some(value);
                index
            }
            None => {
                self.places.push(Some(value));
                I::from_number(self.places.len() - 1)
            }
        }
    }

    #[inline]
    pub(super) fn get(&self, index: I) -> Option<&T> {
        self.places.get(index.number())?.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: I) -> Option<&mut T> {
        self.places.get_mut(index.number())?.as_mut()
    }

    /// Removes a value. The index can be reused immediately.
    pub(super) fn remove(&mut self, index: I) -> Option<T> {
        let value = self.places.get_mut(index.number())?.take()?;
        self.free.push(index);
        Some(value)
    }

    /// Removes a value. Its index is not reused until [`Slab::recycle`] is called.
    pub(super) fn retire(&mut self, index: I) -> Option<T> {
        let value = self.places.get_mut(index.number())?.take()?;
        self.freed.push(index);
        Some(value)
    }

    /// Makes the indices of retired values available again. Called at the end of an iteration.
    pub(super) fn recycle(&mut self) {
        self.free.append(&mut self.freed);
    }

    /// Returns all indices in the table, including those without a value. The iterator does not borrow the table.
    pub(super) fn indices(&self) -> impl Iterator<Item = I> + use<I, T> {
        (0..self.places.len()).map(I::from_number)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (I, &T)> {
        let numbered = self.places.iter().enumerate();
        numbered.filter_map(|(number, value)| Some((I::from_number(number), value.as_ref()?)))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.places.iter().flatten()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().flatten()
    }
}

/// Panics if the value at the index was removed.
impl<I: SlabIndex, T> Index<I> for Slab<I, T> {
    type Output = T;

    #[inline]
    fn index(&self, index: I) -> &T {
        match self.get(index) {
            Some(value) => value,
            None => unreachable!("{index:?} has no entry: the index was used after the entry was removed"),
        }
    }
}

impl<I: SlabIndex, T> IndexMut<I> for Slab<I, T> {
    #[inline]
    fn index_mut(&mut self, index: I) -> &mut T {
        match self.get_mut(index) {
            Some(value) => value,
            None => unreachable!("{index:?} has no entry: the index was used after the entry was removed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retired_index_is_not_reused_in_the_same_iteration() {
        let mut slab: Slab<LinkIndex, &str> = Slab::default();
        let (first, second) = (slab.insert("first"), slab.insert("second"));
        assert_eq!(slab.retire(first), Some("first"));
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.retire(first), None);
        assert_ne!(slab.insert("third"), first);
        slab.recycle();
        assert_eq!(slab.next(), first);
        assert_eq!(slab.insert("fourth"), first);
        assert_eq!(slab.remove(second), Some("second"));
        assert_eq!(slab.insert("fifth"), second);
        let all: Vec<&str> = slab.values().copied().collect();
        assert_eq!(all, ["fourth", "fifth", "third"]);
        assert_eq!(slab.indices().count(), 3);
    }
}

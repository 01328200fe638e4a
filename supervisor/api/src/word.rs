//! Words of a fixed vocabulary. The code compares values; what is written and read is their names.

use std::fmt;

use bulkhead_shared::{Vocabulary, vocabulary};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Text;

/// A word of a vocabulary, or one that only a newer supervisor knows.
#[derive(Clone, PartialEq, Eq)]
pub enum Word<V> {
    /// One of the vocabulary.
    Known(V),
    /// Another one, as it was written.
    Other(Text),
}

impl<V: Vocabulary> Word<V> {
    /// The word itself.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Known(value) => value.name(),
            Self::Other(text) => text,
        }
    }
}

impl<V> Default for Word<V> {
    /// Nothing was said.
    fn default() -> Self {
        Self::Other(Text::Borrowed(""))
    }
}

impl<V> From<V> for Word<V> {
    fn from(value: V) -> Self {
        Self::Known(value)
    }
}

impl<V: Vocabulary> PartialEq<V> for Word<V> {
    fn eq(&self, other: &V) -> bool {
        matches!(self, Self::Known(value) if value == other)
    }
}

impl<V: Vocabulary> fmt::Display for Word<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl<V: Vocabulary> fmt::Debug for Word<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl<V: Vocabulary> Serialize for Word<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de, V: Vocabulary> Deserialize<'de> for Word<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let word = String::deserialize(deserializer)?;
        Ok(V::of(&word).map_or_else(|| Self::Other(word.into()), Self::Known))
    }
}

impl<V: Vocabulary> schemars::JsonSchema for Word<V> {
    fn schema_name() -> Text {
        std::any::type_name::<Self>().into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "enum": V::WORDS})
    }
}

vocabulary! {
    /// How well a bulkhead serves, by how the jobs of the last minute ended.
    Service {
        /// Nearly all jobs end `ok`, or there are too few to tell.
        Ok = "ok",
        /// Over 5 % do not.
        Degraded = "degraded",
        /// Over half do not.
        Failing = "failing",
    }
}

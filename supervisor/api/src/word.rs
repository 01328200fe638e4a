//! Words from fixed vocabularies. In the code, a word is an enum value. In a document, a word is the name of that
//! value. The documents in this crate use [`Word`] for such fields, so that an unknown word from another version is
//! kept unchanged.

use std::fmt;

use bulkhead_shared::{Vocabulary, vocabulary};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::Text;

/// A word from a vocabulary, or an unknown word from another version of the supervisor.
#[derive(Clone, PartialEq, Eq)]
pub enum Word<V> {
    /// A word from the vocabulary.
    Known(V),
    /// A word that this version does not know, kept unchanged.
    Other(Text),
}

impl<V: Vocabulary> Word<V> {
    /// Returns the word as text.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Known(value) => value.name(),
            Self::Other(text) => text,
        }
    }
}

impl<V> Default for Word<V> {
    /// Returns the empty word, which stands for an absent field.
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
        Ok(V::from_word(&word).map_or_else(|| Self::Other(word.into()), Self::Known))
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
    /// Service level of a bulkhead, computed from the outcomes of the last minute.
    Service {
        /// At most 5 % of the jobs ended with an outcome other than `ok`, or there were too few jobs to judge.
        Ok = "ok",
        /// More than 5 % of the jobs ended with an outcome other than `ok`.
        Degraded = "degraded",
        /// More than half of the jobs ended with an outcome other than `ok`.
        Failing = "failing",
    }
}

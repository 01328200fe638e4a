//! Enums with a fixed vocabulary. Each value has a word, and a wire number if it crosses a socket, declared
//! in one row.

/// A type whose values are written as words.
pub trait Vocabulary: Copy + PartialEq + 'static {
    /// All values.
    const ALL: &'static [Self];

    /// The words of all values.
    const WORDS: &'static [&'static str];

    /// Returns the word of the value, which all interfaces use.
    fn name(self) -> &'static str;

    /// Returns the value of a word.
    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|value| value.name() == word)
    }
}

/// Declares an enum with words: `Value = "word"`.
#[macro_export]
macro_rules! vocabulary {
    ($(#[$about:meta])* $name:ident { $($(#[$of_value:meta])* $value:ident = $word:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$of_value])* $value,)*
        }

        $crate::words!($name { $($value = $word,)* });
    };
}

/// Implements the words of an enum that is declared elsewhere.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($name:ident { $($value:ident = $word:expr,)* }) => {
        impl $name {
            /// All values, in the order of declaration.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$value),*];

            /// Returns the word of the value, which all interfaces use.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)*
                }
            }
        }

        impl $crate::Vocabulary for $name {
            const ALL: &'static [Self] = &<$name>::ALL;
            const WORDS: &'static [&'static str] = &[$($word),*];

            fn name(self) -> &'static str {
                <$name>::name(self)
            }
        }
    };
}

/// Declares an enum with words and wire numbers: `Value = 1 "word"`. A number never changes its meaning.
macro_rules! codes {
    ($(#[$about:meta])* $name:ident { $($(#[$of_value:meta])* $value:ident = $code:literal $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$of_value])* $value = $code,)*
        }

        $crate::words!($name { $($value = $word,)* });

        impl $name {
            /// Returns the number on the wire.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// Returns the value of a wire number, if this version knows it.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$value),)*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}
pub(crate) use codes;

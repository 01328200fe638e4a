//! Words of a fixed vocabulary: an enum of which each value has its word in one row, and its number where it has one
//! on the wire.

/// All that a field can say, each in one word.
pub trait Vocabulary: Copy + PartialEq + 'static {
    /// Every value.
    const ALL: &'static [Self];

    /// The words for them.
    const WORDS: &'static [&'static str];

    /// The word for it in every interface.
    fn name(self) -> &'static str;

    /// What a word stands for.
    fn of(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|value| value.name() == word)
    }
}

/// Declares an enum whose values have words: `Value = "word"`.
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

/// The words of an enum that is declared elsewhere.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($name:ident { $($value:ident = $word:expr,)* }) => {
        impl $name {
            /// Every value, in the order of the declaration.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$value),*];

            /// The word for it in every interface.
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

/// Declares an enum whose values have words, and numbers on the wire, which never change their meaning:
/// `Value = 1 "word"`.
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
            /// The number on the wire.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// What this number stands for on the wire, if this version knows it.
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

//! Declares enums whose values have fixed names, so that configuration, protocols, events and metrics use the same
//! names. Each row of a declaration contains a value, its name, and a wire number if the value is sent over a socket.
//! The enums themselves are declared by the modules that use them.

/// A type whose values have fixed names.
pub trait Vocabulary: Copy + PartialEq + 'static {
    /// All values.
    const ALL: &'static [Self];

    /// The names of all values, in the order of [`Vocabulary::ALL`].
    const WORDS: &'static [&'static str];

    /// Returns the name of the value. All interfaces use this name.
    fn name(self) -> &'static str;

    /// Returns the value with the given name, or `None` if no value has this name.
    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|value| value.name() == word)
    }
}

/// Declares an enum whose variants have names. A variant is declared in the form `Value = "name"`.
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

/// Implements `Vocabulary` for an existing enum.
#[doc(hidden)]
#[macro_export]
macro_rules! words {
    ($name:ident { $($value:ident = $word:expr,)* }) => {
        impl $name {
            /// All values, in the order of declaration.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$value),*];

            /// Returns the name of the value. All interfaces use this name.
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

/// Declares an enum whose variants have wire numbers and names. A variant is declared in the form `Value = 1 "name"`.
/// The meaning of a wire number never changes.
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
            /// Returns the wire number of the value.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// Returns the value with the given wire number. Returns `None` if this version does not know the
            /// number.
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

//! Reads HTTP client tokens from files, and compares them with the secrets that clients send. Only a hash of each token
//! is stored. `relations/http.rs` checks which tokens a configuration needs. The control plane extracts the secret from
//! a request and decides what the client is allowed to do.

use std::fmt;
use std::path::Path;

use bulkhead_linux::secret_file::{self, SecretFileError};

/// Allowed lengths of a token, in bytes.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

const MAKE_IT: &str = "create a token: (umask 077; head -c 32 /dev/urandom | base64 > FILE)";

/// An HTTP client's secret. Stored as a hash, which is compared in constant time.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(blake3::Hash);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Creates a token from its secret.
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::hash(secret))
    }

    /// Reads a token from a file that is writable only by the file's owner. An error consists of a description and a
    /// suggested correction.
    pub fn read(path: &Path) -> Result<Self, (String, &'static str)> {
        let shown = path.display();
        let not_a_token = || {
            let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
            let message =
                format!("{shown} does not contain a token of {least} to {most} visible ASCII characters");
            (message, MAKE_IT)
        };
        let text = secret_file::read(path, *TOKEN_BYTES.end() + 1).map_err(|error| match &error {
            SecretFileError::TooLarge(_) => not_a_token(),
            SecretFileError::Mode(_) => (format!("{shown} {error}"), error.help()),
            _ => (format!("{shown} {error}"), MAKE_IT),
        })?;
        let token = text.trim_ascii();
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            return Err(not_a_token());
        }
        Ok(Self::new(token))
    }

    /// Returns true if `secret` is the token's secret. Compares the hashes in constant time, so that the comparison
    /// does not reveal the length of the token.
    pub fn is(&self, secret: &[u8]) -> bool {
        self.0 == blake3::hash(secret)
    }

    /// Returns a number that identifies the token. The probability that two tokens share a number is negligible.
    pub fn id(&self) -> u32 {
        let [a, b, c, d, ..] = *self.0.as_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

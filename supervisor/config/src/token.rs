//! Reads and compares the token that protects the admin API over TCP.

use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Allowed lengths of a token in bytes.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// Mode bits that the token file must not have. The group can have read permission, and other users must have
/// no permission.
const NOT_FOR_OTHERS: u32 = 0o027;

const MAKE_IT: &str = "create a token: (umask 077; head -c 32 /dev/urandom | base64 > FILE)";

/// The token of the admin API over TCP. Only a hash is stored, which is compared in constant time.
#[derive(Clone)]
pub struct Token(blake3::Hash);

impl Token {
    /// Creates a token from the secret text.
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::hash(secret))
    }

    /// Reads the token from a file. An error consists of a description of the problem and a suggested
    /// correction.
    pub fn read(path: &Path) -> Result<Self, (String, &'static str)> {
        let shown = path.display();
        let unreadable = |error: io::Error| (format!("{shown} cannot be read: {error}"), MAKE_IT);
        // Prevents `open` from blocking if the path is a FIFO.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
        let file = file.map_err(unreadable)?;
        let about = file.metadata().map_err(unreadable)?;
        if !about.is_file() {
            return Err((format!("{shown} is not a regular file"), MAKE_IT));
        }
        let mode = about.permissions().mode() & 0o7777;
        if mode & NOT_FOR_OTHERS != 0 {
            let message =
                format!("{shown} has the mode {mode:04o}, so other users can read or change the token");
            return Err((
                message,
                "run `chmod 600` on the file; `chmod 640` is also accepted, and lets the file's group read \
                 the token",
            ));
        }
        let mut text = Vec::new();
        file.take(*TOKEN_BYTES.end() as u64 + 2).read_to_end(&mut text).map_err(unreadable)?;
        let token = text.trim_ascii();
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
            return Err((
                format!(
                    "{shown} does not contain a token, which has {least} to {most} visible ASCII characters"
                ),
                MAKE_IT,
            ));
        }
        Ok(Self::new(token))
    }

    /// Returns true if `secret` is the token. The comparison of hashes takes constant time and does not
    /// reveal the length of the token.
    pub fn is(&self, secret: &[u8]) -> bool {
        self.0 == blake3::hash(secret)
    }
}

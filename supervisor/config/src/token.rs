//! The token that opens the admin API over TCP, and the file that holds it.

use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Bytes of a token.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 16..=4096;

/// What others than its owner may not do to the token's file: its group may read it, others may do nothing.
const NOT_FOR_OTHERS: u32 = 0o027;

const MAKE_IT: &str = "make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE)";

/// The secret that opens the door. It is kept as a hash, which compares in constant time.
#[derive(Clone)]
pub struct Token(blake3::Hash);

impl Token {
    /// The token with this secret.
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::hash(secret))
    }

    /// Reads it from its file. Errors say what is wrong with the file, and what to do.
    pub fn read(path: &Path) -> Result<Self, (String, &'static str)> {
        let shown = path.display();
        let unreadable = |error: io::Error| (format!("{shown} cannot be read: {error}"), MAKE_IT);
        // A FIFO is not waited for.
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
                format!("{shown} has the mode {mode:04o}, so that others can read or change the token");
            return Err((message, "chmod 600 it; its group may read it at most"));
        }
        let mut text = Vec::new();
        file.take(*TOKEN_BYTES.end() as u64 + 2).read_to_end(&mut text).map_err(unreadable)?;
        let token = text.trim_ascii();
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            let (least, most) = (TOKEN_BYTES.start(), TOKEN_BYTES.end());
            return Err((
                format!("{shown} does not hold a token: {least} to {most} visible ASCII characters"),
                MAKE_IT,
            ));
        }
        Ok(Self::new(token))
    }

    /// Whether this is the secret. Hashes are equal in constant time, and tell nothing of how long the secret is.
    pub fn is(&self, secret: &[u8]) -> bool {
        self.0 == blake3::hash(secret)
    }
}

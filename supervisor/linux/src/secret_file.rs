//! Reads files with secrets, such as tokens and values of environment variables. Rejects a file that anyone but the
//! owner can change, or that others than the owner and the group can read. The contents are erased from memory when
//! they are dropped. Neither the owner of the file nor the meaning of the contents is checked.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::io::Errno;
use zeroize::Zeroizing;

use crate::errno;

/// Maximum size of an environment variable's value that is read from a file, in bytes.
pub const VARIABLE_BYTES_MAX: usize = 64 * 1024;

/// Mode bits that must not be set on a secret file. These are write permission for the group, and all permissions for
/// others.
const NOT_FOR_OTHERS: u32 = 0o027;

/// Content of a secret file. The memory is erased when the value is dropped.
pub type Secret = Zeroizing<Vec<u8>>;

/// Reason for rejecting a secret file. `Display` completes a sentence that begins with the path. It never reveals the
/// content of the file.
#[derive(Debug)]
pub enum SecretFileError {
    /// The file cannot be opened or read.
    Unreadable(io::Error),
    /// The path is a folder, a pipe or a device.
    NotRegular,
    /// The mode lets other users read or change the file.
    Mode(u32),
    /// The content exceeds this maximum size, in bytes.
    TooLarge(usize),
    /// The content contains a NUL byte.
    Nul,
}

impl SecretFileError {
    /// Returns the error number that best describes the reason.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Unreadable(error) => errno::from_io(error, Errno::IO),
            Self::NotRegular | Self::Nul => Errno::INVAL,
            Self::Mode(_) => Errno::PERM,
            Self::TooLarge(_) => Errno::FBIG,
        }
    }

    /// Returns a suggested correction.
    pub fn help(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => {
                "create the file, make it readable by the supervisor's user, or correct the path"
            }
            Self::NotRegular => "specify the path of a regular file",
            Self::Mode(_) => {
                "run `chmod 600` on the file; `chmod 640` is also accepted, and lets the file's group read it"
            }
            Self::TooLarge(_) => "use a smaller file, or pass the path of the file in `env` instead",
            Self::Nul => "encode the value as text, for example in base64",
        }
    }
}

impl fmt::Display for SecretFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "cannot be read: {error}"),
            Self::NotRegular => f.write_str("is not a regular file"),
            Self::Mode(mode) => {
                write!(f, "has mode {mode:04o}, so other users can read or change it")
            }
            Self::TooLarge(max) => write!(f, "is larger than {max} bytes"),
            Self::Nul => f.write_str("contains a NUL byte, which is not allowed in an environment variable"),
        }
    }
}

/// Reads a file of at most `max` bytes. Fails if the file's mode lets the group write to the file, or gives others any
/// permission.
///
/// Never blocks on a FIFO.
pub fn read(path: &Path, max: usize) -> Result<Secret, SecretFileError> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let file = file.map_err(SecretFileError::Unreadable)?;
    let about = file.metadata().map_err(SecretFileError::Unreadable)?;
    if !about.is_file() {
        return Err(SecretFileError::NotRegular);
    }
    let mode = about.mode() & 0o7777;
    if mode & NOT_FOR_OTHERS != 0 {
        return Err(SecretFileError::Mode(mode));
    }
    // Allocated in full, because a buffer that grows would leave a copy of the secret in freed memory.
    let mut content = Zeroizing::new(Vec::with_capacity(max + 2));
    let read = file.take(max as u64 + 1).read_to_end(&mut content);
    read.map_err(SecretFileError::Unreadable)?;
    if content.len() > max { Err(SecretFileError::TooLarge(max)) } else { Ok(content) }
}

/// Reads the value of an environment variable from a file. The value is the content without a final newline. It can
/// have at most [`VARIABLE_BYTES_MAX`] bytes, and must not contain a NUL byte.
pub fn read_variable(path: &Path) -> Result<Secret, SecretFileError> {
    const TOO_LARGE: SecretFileError = SecretFileError::TooLarge(VARIABLE_BYTES_MAX);
    // Reads one more byte, because a newline at the end does not count towards the maximum size.
    let mut content = read(path, VARIABLE_BYTES_MAX + 1).map_err(|error| match error {
        SecretFileError::TooLarge(_) => TOO_LARGE,
        error => error,
    })?;
    if content.last() == Some(&b'\n') {
        content.pop();
    }
    if content.len() > VARIABLE_BYTES_MAX {
        return Err(TOO_LARGE);
    }
    if content.contains(&0) { Err(SecretFileError::Nul) } else { Ok(content) }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn write(folder: &Path, content: &[u8], mode: u32) -> std::path::PathBuf {
        let path = folder.join("secret");
        let _ = fs::remove_file(&path);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn secret_value_omits_one_trailing_newline() {
        let folder = tempfile::tempdir().unwrap();
        let cases: [(&[u8], &[u8]); 6] = [
            (b"sesame\n", b"sesame"),
            (b"sesame", b"sesame"),
            (b"two\nlines\n\n", b"two\nlines\n"),
            (b"\r\n", b"\r"),
            (b"\xff\xfe=\n", b"\xff\xfe="),
            (b"", b""),
        ];
        for (content, expected) in cases {
            for mode in [0o600, 0o640, 0o400, 0o440] {
                assert_eq!(&**read_variable(&write(folder.path(), content, mode)).unwrap(), expected);
            }
        }
    }

    #[test]
    fn secret_value_is_limited_to_64_kib() {
        let folder = tempfile::tempdir().unwrap();
        let longest = vec![b'x'; VARIABLE_BYTES_MAX];
        let with_newline = [&longest[..], b"\n"].concat();
        for content in [&longest, &with_newline] {
            assert_eq!(*read_variable(&write(folder.path(), content, 0o600)).unwrap(), longest);
        }
        for more in [&b"x"[..], b"\n\n", b"x\n", &[b'x'; 4096]] {
            let error = read_variable(&write(folder.path(), &[&longest, more].concat(), 0o600)).unwrap_err();
            assert!(matches!(error, SecretFileError::TooLarge(_)), "{error:?}");
            assert_eq!(error.errno(), Errno::FBIG);
        }
    }

    #[test]
    fn secret_file_must_be_private() {
        let folder = tempfile::tempdir().unwrap();
        for mode in [0o604, 0o620, 0o644, 0o601, 0o602, 0o660] {
            let error = read_variable(&write(folder.path(), b"sesame", mode)).unwrap_err();
            assert!(matches!(error, SecretFileError::Mode(found) if found == mode), "{error:?}");
            assert!(!format!("{error} {error:?}").contains("sesame"));
        }
    }

    #[test]
    fn only_regular_files_without_nul_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let missing = read_variable(&folder.path().join("missing")).unwrap_err();
        assert_eq!(missing.errno(), Errno::NOENT);
        assert!(matches!(read_variable(folder.path()), Err(SecretFileError::NotRegular)));
        let fifo = folder.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &*name, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
            .unwrap();
        assert!(matches!(read_variable(&fifo), Err(SecretFileError::NotRegular)));
        let nul = read_variable(&write(folder.path(), b"a\0b", 0o600)).unwrap_err();
        assert!(matches!(nul, SecretFileError::Nul));
    }

    #[test]
    fn debug_output_of_errors_hides_the_content() {
        let folder = tempfile::tempdir().unwrap();
        let error = read_variable(&write(folder.path(), b"sesame\0", 0o600)).unwrap_err();
        assert!(!format!("{error:?} {error} {}", error.help()).contains("sesame"));
    }
}

//! The folder in which programs of the current user create their sockets.

use std::ffi::OsString;
use std::path::PathBuf;

/// Folder for the sockets of root, and of users without a folder of their own.
const SHARED: &str = "/run";

/// Returns the value of `XDG_RUNTIME_DIR`. Ignores a relative path and an empty value, as the XDG specification
/// requires.
#[must_use]
pub fn of_user() -> Option<PathBuf> {
    from_variable(std::env::var_os("XDG_RUNTIME_DIR"))
}

fn from_variable(value: Option<OsString>) -> Option<PathBuf> {
    value.map(PathBuf::from).filter(|folder| folder.is_absolute())
}

/// Returns `/run` for root, and for a user without a valid `XDG_RUNTIME_DIR`. Otherwise, returns the value of
/// `XDG_RUNTIME_DIR`.
#[must_use]
pub fn of_process() -> PathBuf {
    let is_root = rustix::process::geteuid().is_root();
    of_user().filter(|_| !is_root).unwrap_or_else(|| SHARED.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_runtime_dir_is_ignored() {
        let of = |value: &str| from_variable(Some(value.into()));
        assert_eq!(of("/run/user/1000"), Some(PathBuf::from("/run/user/1000")));
        for value in ["", "run/user", "./", "~/run"] {
            assert_eq!(of(value), None, "{value:?}");
        }
        assert_eq!(from_variable(None), None);
    }
}

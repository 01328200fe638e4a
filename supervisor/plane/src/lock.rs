//! Takes file locks, and retries locks and addresses that a killed supervisor still holds. The kernel releases them
//! only when the process's last thread has exited, which can take some time on a busy machine. Without retries, a
//! restarted supervisor could report that another supervisor is running. The callers choose the files and addresses.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Maximum time to wait for a lock or a socket address to become free. After this time, the supervisor assumes that a
/// running process is using the lock or address.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Interval between attempts to acquire a lock or a socket address.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Reason why a lock could not be taken.
#[derive(Debug)]
pub enum LockError {
    /// The file cannot be opened or created.
    Open(io::Error),
    /// Another process holds the lock.
    Held,
    /// The file system does not support the lock.
    Unsupported(Errno),
}

/// Takes an exclusive lock on a file. Creates the file with mode 0600 if it does not exist. The lock is
/// released when the returned file is closed.
pub fn lock(path: &Path) -> Result<File, LockError> {
    lock_with_timeout(RELEASE_TIMEOUT, path)
}

/// Calls `attempt` until it succeeds. Gives up after half a second, or when `is_taken` returns false for the error.
pub fn retry_while_taken<T, E>(
    attempt: impl FnMut() -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
) -> Result<T, E> {
    retry_for(RELEASE_TIMEOUT, attempt, is_taken)
}

fn lock_with_timeout(timeout: Duration, path: &Path) -> Result<File, LockError> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path).map_err(LockError::Open)?;
    let attempt = || flock(&file, FlockOperation::NonBlockingLockExclusive);
    match retry_for(timeout, attempt, |&errno| errno == Errno::WOULDBLOCK) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(LockError::Held),
        Err(errno) => Err(LockError::Unsupported(errno)),
    }
}

fn retry_for<T, E>(
    timeout: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(error) if is_taken(&error) && start.elapsed() < timeout => std::thread::sleep(RETRY_INTERVAL),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A waiting caller must get the lock if the holder releases it before the timeout.
    #[test]
    fn waits_for_lock_until_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock_with_timeout(Duration::ZERO, &path).unwrap();
        assert!(matches!(lock_with_timeout(RETRY_INTERVAL, &path), Err(LockError::Held)));
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || lock_with_timeout(Duration::from_secs(60), &path)
        });
        std::thread::sleep(RETRY_INTERVAL * 4);
        assert!(!waiting.is_finished());
        drop(held);
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn retries_lock_attempt_only_while_lock_is_held() {
        let missing = lock_with_timeout(Duration::from_secs(60), Path::new("/nowhere/lock"));
        assert!(matches!(missing, Err(LockError::Open(_))));
        let mut attempts = 0;
        let attempt = || {
            attempts += 1;
            Err::<(), _>(attempts)
        };
        assert_eq!(retry_for(Duration::from_secs(60), attempt, |&number| number < 3), Err(3));
    }
}

//! Retries for locks and addresses that a killed supervisor still holds. The kernel releases them when the
//! last thread of the process has exited, which on a busy machine is some time after the process appears
//! dead. A service manager that restarts the supervisor must not get the error that another one is running.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Maximum time to wait before a lock or address counts as held by another process.
const LET_GO_WITHIN: Duration = Duration::from_millis(500);

/// Interval between attempts.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// An error while taking a lock.
#[derive(Debug)]
pub enum NoLock {
    /// The file cannot be opened or created.
    Unopened(io::Error),
    /// Another process holds the lock.
    Held,
    /// The file system does not support the lock.
    Refused(Errno),
}

/// Locks a file with mode 0600, and creates the file if it is missing. The lock is released when the returned
/// file is closed.
pub fn lock(path: &Path) -> Result<File, NoLock> {
    lock_within(LET_GO_WITHIN, path)
}

/// Repeats `attempt` for up to half a second while its error satisfies `is_taken`.
pub fn try_while_taken<T, E>(
    attempt: impl FnMut() -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
) -> Result<T, E> {
    try_within(LET_GO_WITHIN, attempt, is_taken)
}

fn lock_within(within: Duration, path: &Path) -> Result<File, NoLock> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path).map_err(NoLock::Unopened)?;
    let attempt = || flock(&file, FlockOperation::NonBlockingLockExclusive);
    match try_within(within, attempt, |&errno| errno == Errno::WOULDBLOCK) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(NoLock::Held),
        Err(errno) => Err(NoLock::Refused(errno)),
    }
}

fn try_within<T, E>(
    within: Duration,
    mut attempt: impl FnMut() -> Result<T, E>,
    is_taken: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let began = Instant::now();
    loop {
        match attempt() {
            Err(error) if is_taken(&error) && began.elapsed() < within => std::thread::sleep(LOOK_EVERY),
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock that is released in time is taken.
    #[test]
    fn waits_for_a_lock_only_for_the_given_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock_within(Duration::ZERO, &path).unwrap();
        assert!(matches!(lock_within(LOOK_EVERY, &path), Err(NoLock::Held)));
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || lock_within(Duration::from_secs(60), &path)
        });
        std::thread::sleep(LOOK_EVERY * 4);
        assert!(!waiting.is_finished());
        drop(held);
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn other_failures_are_told_at_once() {
        let missing = lock_within(Duration::from_secs(60), Path::new("/nowhere/lock"));
        assert!(matches!(missing, Err(NoLock::Unopened(_))));
        let mut tries = 0;
        let attempt = || {
            tries += 1;
            Err::<(), _>(tries)
        };
        assert_eq!(try_within(Duration::from_secs(60), attempt, |&number| number < 3), Err(3));
    }
}

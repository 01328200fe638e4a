//! Allocates UIDs for workers. An allocated UID is not used by any other process on this host. The data plane's `links`
//! requests and frees the UIDs of workers. The keeper switches each worker to its UID.
//!
//! An ID is skipped if a user database, systemd, a process or another supervisor uses it. While a worker or bulkhead
//! has an ID, the supervisor locks one byte in a file shared by all supervisors. The byte's offset equals the ID. Two
//! supervisors therefore never use the same ID, and a supervisor blocks only the IDs that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{FcntlArg, fcntl};
use rustix::io::Errno;
use rustix::process::{Uid, getpriority_user};

use crate::lock::retry_while_taken;
use bulkhead_config::UidRange;
use bulkhead_config::defaults::WORKER_UIDS;
use bulkhead_keeper::{SUBORDINATE_IDS, SubordinateIds, TREE_END};

/// Lock file shared by all privileged supervisors on the host.
const LOCK_FILE: &str = "/run/bulkhead-uids.lock";

/// Lock file shared by all supervisors of an unprivileged user. The path is relative to the user's home folder
/// according to the user database. The path does not depend on environment variables, and other users cannot create the
/// file.
const OWN_LOCK_FILE: &str = ".local/state/bulkhead/worker-ids.lock";

/// Folder in which systemd records the UIDs of services with `DynamicUser=`. systemd allocates these UIDs from the
/// default range of `worker_uids`.
const SYSTEMD_IDS: &str = "/run/systemd/dynamic-uid";

/// Local user and group databases. Remote databases are not queried, because a query could block on the
/// network.
const DATABASES: [&str; 2] = ["/etc/passwd", "/etc/group"];

/// Files with the UID and GID mappings of the current user namespace.
const MAPS: [&str; 2] = ["/proc/self/uid_map", "/proc/self/gid_map"];

/// Maximum time to wait for the workers of a killed supervisor to exit. After their exit, each bulkhead can get the
/// same permanent ID as before. In unit tests, the timeout is longer, because a test's threads can be delayed.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 120 } else { 5 });

/// Interval at which to check whether an ID is still in use.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum number of IDs to check for one worker. The default range is smaller than this number, and checking all of it
/// takes about 20 ms. In a larger range, the next allocation continues after the last ID that was checked.
const CANDIDATES_MAX: u64 = 8192;

/// Allocator of UIDs for one supervisor's workers.
#[derive(Debug)]
pub struct IdAllocator {
    range: UidRange,
    /// UID and GID mappings of the current user namespace. An ID can be used only if all mappings contain it.
    maps: Vec<Vec<IdRange>>,
    id_use: IdUse,
    lock_path: PathBuf,
    state: Mutex<State>,
}

/// Purpose of the allocated IDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdUse {
    /// The IDs are for the workers of a running supervisor.
    Run,
    /// The IDs are for a check of the configuration. The bulkheads' permanent IDs are not locked, because a running
    /// supervisor may hold the locks.
    Check,
}

/// A range of IDs, as its first and last ID.
type IdRange = (u64, u64);

#[derive(Debug, Default)]
struct State {
    lock_file: Option<File>,
    /// IDs of the running workers.
    in_use: BTreeSet<u32>,
    /// Next ID to try, as an offset within the range. Allocation cycles through the range, so that an ID is reused as
    /// late as possible.
    next: u64,
    /// Permanent IDs, by bulkhead name.
    permanent: BTreeMap<String, u32>,
    /// Permanent IDs that are still locked by the previous supervisor during an upgrade.
    inherited: BTreeSet<u32>,
    database_ids: DatabaseIds,
}

/// IDs listed in the local user and group databases, and the modification times of the database files when they were
/// last read.
#[derive(Debug, Default)]
struct DatabaseIds {
    ids: BTreeSet<u32>,
    modified_at: Vec<Option<SystemTime>>,
}

impl IdAllocator {
    /// Creates an allocator for the `worker_uids` range, or for the default range if `worker_uids` is `None`. Fails if
    /// no ID in the range is mapped in this user namespace.
    pub fn new(worker_uids: Option<UidRange>, id_use: IdUse) -> Result<Self, String> {
        let read = |path: &str| std::fs::read_to_string(path).map(|text| parse_id_map(&text));
        let maps = MAPS.iter().filter_map(|path| read(path).ok()).collect();
        let range = worker_uids.unwrap_or(WORKER_UIDS);
        let ids = Self { range, maps, id_use, lock_path: LOCK_FILE.into(), state: Mutex::default() };
        if (range.first..=range.last).any(|id| ids.is_mapped(id)) {
            return Ok(ids);
        }
        Err(format!("none of the user IDs {range} is mapped in this user namespace (/proc/self/uid_map)"))
    }

    /// Creates an allocator for the IDs that `/etc/subuid` assigns to an unprivileged user. If `worker_uids` is set,
    /// restricts the allocator to that part of the range.
    fn subordinate(
        found: &SubordinateIds,
        worker_uids: Option<UidRange>,
        id_use: IdUse,
    ) -> Result<Self, String> {
        let whole = UidRange { first: found.first, last: found.last };
        let range = worker_uids.unwrap_or(whole);
        if range.first < whole.first || range.last > whole.last {
            return Err(format!(
                "`worker_uids` must be within {whole}, the range of this user in /etc/subuid"
            ));
        }
        let lock_path = own_lock_file(id_use)?;
        let ids = Self { range, maps: Vec::new(), id_use, lock_path, state: Mutex::default() };
        Ok(ids)
    }

    /// Allocates an ID that is not in use by any other worker. Fails with [`io::ErrorKind::ResourceBusy`] if no ID is
    /// free.
    pub fn allocate(&self) -> io::Result<u32> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..self.count().min(CANDIDATES_MAX) {
            let id = self.range.first + state.next as u32;
            state.next = (state.next + 1) % self.count();
            if !state.in_use.contains(&id) && !state.is_permanent(id) && self.acquire(&mut state, id)? {
                state.in_use.insert(id);
                return Ok(id);
            }
        }
        Err(self.exhausted_error("a worker", "start fewer `processes`"))
    }

    /// Frees the ID of a worker whose processes have all exited.
    pub fn free(&self, id: u32) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.in_use.remove(&id) {
            // If unlocking fails, the only effect is that other supervisors keep skipping this ID.
            let _ = self.set_lock(&mut state, id, libc::F_UNLCK);
        }
    }

    /// Returns the permanent ID of a bulkhead whose workers write files. If a path in `write` is owned by an ID in the
    /// range, that ID is used. Otherwise, the ID is derived from the path of the configuration file and the name of the
    /// bulkhead.
    pub fn permanent_id(&self, config: &Path, bulkhead: &str, write: &[PathBuf]) -> io::Result<u32> {
        // Accessing files and waiting for other supervisors can take a long time, so this happens before the mutex is
        // locked. The data plane locks this mutex as well.
        let owner = write.iter().find_map(|path| {
            let owner = std::fs::metadata(path).ok()?.uid();
            (self.range.first..=self.range.last).contains(&owner).then_some((path, owner))
        });
        if owner.is_none() {
            self.wait_for_predecessor(config, bulkhead);
        }
        let attempt = || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let id = match (owner, state.permanent.get(bulkhead)) {
                (Some((path, id)), _) => self.permanent_id_of_owner(&mut state, path, id)?,
                (None, Some(id)) => *id,
                (None, None) => self.derive_permanent_id(&mut state, config, bulkhead)?,
            };
            state.permanent.insert(bulkhead.to_owned(), id);
            Ok(id)
        };
        let is_taken = |error: &io::Error| error.kind() == ErrorKind::WouldBlock;
        retry_while_taken(attempt, is_taken).map_err(|error| match owner {
            Some((path, id)) if is_taken(&error) => in_use_error(path, id),
            _ => error,
        })
    }

    /// Reserves the ID of a folder's owner as a permanent ID. Bulkheads that write to the same folder share this ID.
    fn permanent_id_of_owner(&self, state: &mut State, path: &Path, id: u32) -> io::Result<u32> {
        if self.id_use == IdUse::Check || state.is_permanent(id) {
            return Ok(id);
        }
        if state.in_use.contains(&id) {
            return Err(in_use_error(path, id));
        }
        if self.lock(state, id)? { Ok(id) } else { Err(ErrorKind::WouldBlock.into()) }
    }

    /// Reserves a permanent ID in the upper half of the range. IDs of individual workers are allocated from the lower
    /// end upwards.
    fn derive_permanent_id(&self, state: &mut State, config: &Path, bulkhead: &str) -> io::Result<u32> {
        for id in self.derived(config, bulkhead) {
            let is_taken = state.in_use.contains(&id) || state.is_permanent(id);
            if !is_taken && (self.id_use == IdUse::Check || self.acquire(state, id)?) {
                return Ok(id);
            }
        }
        Err(self.exhausted_error("a bulkhead with a fixed user ID", "set `user` in `sandbox`"))
    }

    /// Returns the permanent IDs, by bulkhead name.
    pub fn permanent(&self) -> BTreeMap<String, u32> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).permanent.clone()
    }

    /// Takes over the permanent IDs of the predecessor in an upgrade. [`IdAllocator::lock_inherited`] locks the
    /// IDs after the predecessor has exited. IDs outside the range are ignored.
    pub fn inherit(&self, permanent: BTreeMap<String, u32>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for (bulkhead, id) in permanent {
            if (self.range.first..=self.range.last).contains(&id) {
                state.inherited.insert(id);
                state.permanent.insert(bulkhead, id);
            }
        }
    }

    /// Locks the inherited IDs. Before this call, other supervisors skip these IDs because workers are still running
    /// under them.
    pub fn lock_inherited(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for id in std::mem::take(&mut state.inherited) {
            // If the call fails, another supervisor has just locked the ID. The workers keep using the ID.
            let _ = self.lock(&mut state, id);
        }
    }

    fn exhausted_error(&self, wanted_by: &str, or: &str) -> io::Error {
        let message = format!(
            "no user ID of {} is free for {wanted_by} because users of this system, processes, and workers of this \
             and other supervisors use the whole range: set another or a larger range in `worker_uids` in \
             [supervisor], or {or}",
            self.range
        );
        io::Error::new(io::ErrorKind::ResourceBusy, message)
    }

    /// Returns candidates for a bulkhead's permanent ID, in the order in which to try them. For a given range, they
    /// depend only on the path of the configuration file and the name of the bulkhead.
    fn derived(&self, config: &Path, bulkhead: &str) -> impl Iterator<Item = u32> {
        let (first, count) = (self.range.first, self.count());
        let lower = count / 2;
        let upper = count - lower;
        let offset = fnv1a(&[config.as_os_str().as_bytes(), bulkhead.as_bytes()]) % upper;
        (0..upper).map(move |step| first + (lower + (offset + step) % upper) as u32)
    }

    /// Waits up to 5 s for the bulkhead's preferred permanent ID if another supervisor or process is using it. The ID
    /// is usually held by a killed supervisor whose workers are about to exit. If the ID does not become free, the
    /// caller chooses another ID.
    fn wait_for_predecessor(&self, config: &Path, bulkhead: &str) {
        let is_in_use = || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(id) = self.derived(config, bulkhead).next() else { return false };
            let is_ours = state.permanent.contains_key(bulkhead)
                || state.is_permanent(id)
                || state.in_use.contains(&id);
            if is_ours || self.id_use == IdUse::Check || !self.is_assignable(&mut state, id) {
                return false;
            }
            // An error is ignored here, because the caller tries to lock the ID again and reports any error.
            self.lock(&mut state, id).is_ok_and(|is_locked| !is_locked || is_used(id))
        };
        let start = Instant::now();
        while is_in_use() && start.elapsed() < PREDECESSOR_TIMEOUT {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    fn count(&self) -> u64 {
        u64::from(self.range.last - self.range.first) + 1
    }

    /// Locks an ID for this supervisor. Returns false if the ID is in use or cannot be assigned.
    fn acquire(&self, state: &mut State, id: u32) -> io::Result<bool> {
        if !self.is_assignable(state, id) || !self.lock(state, id)? {
            return Ok(false);
        }
        if is_used(id) {
            self.set_lock(state, id, libc::F_UNLCK)?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Returns true if the ID is mapped in this user namespace and the system has not assigned it to a user, group or
    /// service.
    fn is_assignable(&self, state: &mut State, id: u32) -> bool {
        self.is_mapped(id)
            && !state.database_ids.contains(id)
            && !Path::new(SYSTEMD_IDS).join(id.to_string()).exists()
    }

    /// Locks the byte for this ID in the shared lock file. Returns false if another supervisor has locked the byte.
    fn lock(&self, state: &mut State, id: u32) -> io::Result<bool> {
        self.set_lock(state, id, libc::F_WRLCK)
    }

    fn set_lock(&self, state: &mut State, id: u32, kind: libc::c_int) -> io::Result<bool> {
        let why = |error: io::Error| {
            io::Error::other(format!(
                "worker user IDs cannot be locked in the file {}: {error}; make the file writable, or set \
                 `user` in `sandbox`",
                self.lock_path.display()
            ))
        };
        if state.lock_file.is_none() {
            state.lock_file = Some(open_lock_file(&self.lock_path).map_err(why)?);
        }
        let Some(file) = &state.lock_file else { return Ok(false) };
        match fcntl(file, FcntlArg::F_OFD_SETLK(&byte_range(kind, libc::off_t::from(id), 1))) {
            Ok(_) => Ok(true),
            Err(nix::Error::EAGAIN | nix::Error::EACCES) => Ok(false),
            Err(error) => Err(why(error.into())),
        }
    }

    fn is_mapped(&self, id: u32) -> bool {
        let has =
            |map: &Vec<IdRange>| map.iter().any(|(first, last)| (*first..=*last).contains(&u64::from(id)));
        self.maps.iter().all(has)
    }
}

/// Unlocks all IDs. Closing the file would not be enough, because a forked child of the application that embeds the
/// supervisor can hold a copy of the descriptor.
impl Drop for IdAllocator {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &state.lock_file {
            // A length of 0 extends the range to the end of the file. If this fails, the IDs stay locked until all
            // copies of the descriptor are closed.
            let _ = fcntl(file, FcntlArg::F_OFD_SETLK(&byte_range(libc::F_UNLCK, 0, 0)));
        }
    }
}

fn byte_range(kind: libc::c_int, start: libc::off_t, bytes: libc::off_t) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: bytes,
        l_pid: 0,
    }
}

impl State {
    fn is_permanent(&self, id: u32) -> bool {
        self.permanent.values().any(|kept| *kept == id)
    }
}

impl DatabaseIds {
    fn contains(&mut self, id: u32) -> bool {
        let modified_at: Vec<_> = DATABASES
            .iter()
            .map(|path| std::fs::metadata(path).and_then(|found| found.modified()).ok())
            .collect();
        if modified_at != self.modified_at {
            let texts = DATABASES.iter().filter_map(|path| std::fs::read_to_string(path).ok());
            self.ids = texts.flat_map(|text| parse_ids(&text)).collect();
            self.modified_at = modified_at;
        }
        self.ids.contains(&id)
    }
}

/// Returns the IDs that `/etc/subuid` assigns to this user, or the reason why workers cannot use such IDs. `misses`
/// returns the reason why a feature is not available on this machine, and `find` looks up the IDs.
pub fn find_subordinate(
    misses: impl Fn(&str) -> Option<String>,
    find: impl FnOnce() -> Result<Arc<SubordinateIds>, String>,
    worker_uids: Option<UidRange>,
    id_use: IdUse,
) -> Result<(Arc<SubordinateIds>, IdAllocator), String> {
    const NEEDED: [&str; 3] = ["user namespace", TREE_END, "mount_setattr"];
    let resolve = || {
        NEEDED.into_iter().find_map(misses).map_or(Ok(()), Err)?;
        let found = find()?;
        let ids = IdAllocator::subordinate(&found, worker_uids, id_use)?;
        Ok((found, ids))
    };
    resolve().map_err(|why: String| format!("{SUBORDINATE_IDS}: {why}"))
}

/// Returns the path of the current user's lock file. Creates the file and its folder, except during a check of the
/// configuration.
fn own_lock_file(id_use: IdUse) -> Result<PathBuf, String> {
    let uid = rustix::process::geteuid();
    let user = nix::unistd::User::from_uid(uid.as_raw().into()).ok().flatten();
    let home = user.ok_or("the user database has no entry for this user")?.dir;
    let is_own = |path: &Path| std::fs::metadata(path).is_ok_and(|found| found.uid() == uid.as_raw());
    let useless = |why: &str| {
        format!(
            "a file in the user's home directory locks user IDs, so that no two workers share an ID, but {} {why}",
            home.display()
        )
    };
    if !is_own(&home) {
        return Err(useless("does not belong to this user"));
    }
    let path = home.join(OWN_LOCK_FILE);
    if id_use == IdUse::Run {
        open_lock_file(&path).map_err(|error| useless(&format!("cannot be written: {error}")))?;
    }
    Ok(path)
}

fn open_lock_file(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path)
}

/// Computes the FNV-1a hash. The hash must not change between versions, because permanent IDs depend on it.
fn fnv1a(texts: &[&[u8]]) -> u64 {
    const START: u64 = 0xcbf2_9ce4_8422_2325;
    const FACTOR: u64 = 0x0000_0100_0000_01b3;
    let bytes = texts.iter().flat_map(|text| text.iter().chain(&[0]));
    bytes.fold(START, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(FACTOR))
}

/// Returns true if any process runs under this UID.
fn is_used(id: u32) -> bool {
    getpriority_user(Uid::from_raw(id)) != Err(Errno::SRCH)
}

/// Returns all UIDs and GIDs in the text of a passwd or group file.
fn parse_ids(text: &str) -> BTreeSet<u32> {
    let fields = text.lines().map(|line| line.split(':').skip(2).take(2).filter_map(|id| id.parse().ok()));
    fields.flatten().collect()
}

/// Parses the text of `/proc/self/uid_map` or `/proc/self/gid_map`.
fn parse_id_map(text: &str) -> Vec<IdRange> {
    let span = |line: &str| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().ok());
        let (first, _, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        Some((first, first + count.checked_sub(1)?))
    };
    text.lines().filter_map(span).collect()
}

fn in_use_error(path: &Path, id: u32) -> io::Error {
    io::Error::other(format!(
        "user ID {id}, which owns {}, is in use by other workers on this host: stop the other workers, or `chown` the path",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "/etc/bulkhead/workers.toml";

    fn ids(first: u32, last: u32, folder: &Path) -> IdAllocator {
        let maps = vec![vec![(0, u64::from(u32::MAX))]];
        IdAllocator {
            range: UidRange { first, last },
            maps,
            id_use: IdUse::Run,
            lock_path: folder.join("locks"),
            state: Mutex::default(),
        }
    }

    #[test]
    fn worker_ids_are_reused_as_late_as_possible() {
        let folder = tempfile::tempdir().unwrap();
        let ids = ids(1_900_000_000, 1_900_000_002, folder.path());
        let taken: Vec<u32> = (0..3).map(|_| ids.allocate().unwrap()).collect();
        assert_eq!(taken, [1_900_000_000, 1_900_000_001, 1_900_000_002]);
        assert!(ids.allocate().unwrap_err().to_string().contains("1900000000-1900000002"));
        ids.free(1_900_000_001);
        assert_eq!(ids.allocate().unwrap(), 1_900_000_001);
        taken.into_iter().for_each(|id| ids.free(id));
        // The ID that was freed last is also allocated last.
        assert_eq!([ids.allocate().unwrap(), ids.allocate().unwrap()], [1_900_000_002, 1_900_000_000]);
    }

    #[test]
    fn freed_worker_ids_are_available_to_other_supervisors() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| ids(1_900_000_000, 1_900_000_009, folder.path()));
        for _ in 0..30 {
            one.free(one.allocate().unwrap());
        }
        let id = one.allocate().unwrap();
        let others: BTreeSet<u32> = (0..9).map(|_| other.allocate().unwrap()).collect();
        assert!(others.len() == 9 && !others.contains(&id));
        assert!(one.allocate().is_err() && other.allocate().is_err());
        // Freeing an ID that is not allocated has no effect.
        other.free(id);
        assert!(other.allocate().is_err());
    }

    #[test]
    fn two_supervisors_never_use_the_same_worker_id() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (
            ids(1_900_000_000, 1_900_000_003, folder.path()),
            ids(1_900_000_000, 1_900_000_003, folder.path()),
        );
        assert_eq!((one.allocate().unwrap(), other.allocate().unwrap()), (1_900_000_000, 1_900_000_001));
        assert_eq!((one.allocate().unwrap(), other.allocate().unwrap()), (1_900_000_002, 1_900_000_003));
        assert!(one.allocate().is_err() && other.allocate().is_err());
        drop(other);
        assert_eq!((one.allocate().unwrap(), one.allocate().unwrap()), (1_900_000_003, 1_900_000_001));
    }

    #[test]
    fn allocator_skips_assigned_and_unmapped_ids() {
        let folder = tempfile::tempdir().unwrap();
        // Each ID in the range is either assigned on every system (root, daemon, bin) or not mapped.
        let mut few = ids(0, 40, folder.path());
        few.maps = vec![vec![(0, 0)], vec![(0, 40)]];
        assert!(
            few.allocate()
                .unwrap_err()
                .to_string()
                .contains("0-40 is free for a worker because users of this system")
        );
        assert_eq!(parse_ids("a:x:5:6:::\nb:x:7:\n\nbroken\n"), BTreeSet::from([5, 6, 7]));
        assert_eq!(parse_id_map("         0          0 4294967295\n"), [(0, 4_294_967_294)]);
        assert_eq!(parse_id_map("0 1000 1\n1 100000 65536\n"), [(0, 0), (1, 65_536)]);
    }

    #[test]
    fn ids_of_running_processes_count_as_used() {
        let own = rustix::process::getuid().as_raw();
        assert!(is_used(own) || own == 0);
        assert!(!is_used(1_900_000_000));
    }

    #[test]
    fn bulkhead_with_write_paths_keeps_its_worker_id() {
        let folder = tempfile::tempdir().unwrap();
        let keep = |ids: &IdAllocator, name: &str| ids.permanent_id(Path::new(CONFIG), name, &[]).unwrap();
        let first = {
            let ids = ids(1_900_000_000, 1_900_000_999, folder.path());
            let first = keep(&ids, "a");
            assert!(first >= 1_900_000_500 && keep(&ids, "a") == first && keep(&ids, "b") != first);
            assert_ne!(ids.allocate().unwrap(), first);
            first
        };
        assert_eq!(keep(&ids(1_900_000_000, 1_900_000_999, folder.path()), "a"), first);
    }

    /// If an application forks, its child holds copies of all descriptors.
    #[test]
    fn dropped_allocator_unlocks_ids_despite_copied_descriptor() {
        let folder = tempfile::tempdir().unwrap();
        let one = ids(1_900_000_000, 1_900_000_003, folder.path());
        let taken = [one.allocate().unwrap(), one.permanent_id(Path::new(CONFIG), "a", &[]).unwrap()];
        let copy = one.state.lock().unwrap().lock_file.as_ref().unwrap().try_clone().unwrap();
        drop(one);
        let other = ids(1_900_000_000, 1_900_000_003, folder.path());
        let mut state = other.state.lock().unwrap();
        assert!(taken.iter().all(|id| other.lock(&mut state, *id).unwrap()));
        drop(copy);
    }

    #[test]
    fn bulkhead_waits_until_killed_supervisors_uid_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let (before, after) = (
            ids(1_900_000_000, 1_900_000_999, folder.path()),
            ids(1_900_000_000, 1_900_000_999, folder.path()),
        );
        let first = before.permanent_id(Path::new(CONFIG), "a", &[]).unwrap();
        let kept = std::thread::scope(|scope| {
            let kept = scope.spawn(|| after.permanent_id(Path::new(CONFIG), "a", &[]).unwrap());
            // The loop also ends if the thread has finished. The allocation has then failed, and `join` reports the
            // reason.
            while after.state.lock().is_ok_and(|state| state.lock_file.is_none()) && !kept.is_finished() {
                std::thread::yield_now();
            }
            // At this point, `after` has found that the ID is in use and is waiting until it is free.
            drop(before);
            kept.join().unwrap()
        });
        assert_eq!(kept, first);
    }

    #[test]
    fn bulkhead_uses_owner_of_write_path_as_worker_id() {
        let folder = tempfile::tempdir().unwrap();
        let owner = std::fs::metadata(folder.path()).unwrap().uid();
        let write = [folder.path().to_owned()];
        let ids = |folder: &Path| ids(owner, owner + 10, folder);
        let (one, other) = (ids(folder.path()), ids(folder.path()));
        assert_eq!(one.permanent_id(Path::new(CONFIG), "a", &write).unwrap(), owner);
        assert_eq!(one.permanent_id(Path::new(CONFIG), "b", &write).unwrap(), owner);
        let why = other.permanent_id(Path::new(CONFIG), "a", &write).unwrap_err().to_string();
        assert!(why.contains("is in use by other workers"), "{why}");
    }
}

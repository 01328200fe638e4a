//! Stores crash reports, in a folder if one is configured and otherwise in memory. A separate thread reads and writes
//! the reports, so that a slow disk delays neither jobs nor operators. Other threads send requests to this thread. The
//! data plane decides which crashes are reported.
//!
//! Only the supervisor should write the files, but each report is validated when it is read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc as blocking;
use std::time::Duration;

use bulkhead_api::{Cause, CauseKind, CrashId, CrashReport, NativeCrash, Stage, Summary, Word};
use rustix::fs::{FlockOperation, RenameFlags, flock};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use bulkhead_config::SupervisorConfig;
use bulkhead_plane::crash::REPORTS_WAITING_MAX;
use bulkhead_plane::lock::{self, LockError};
use bulkhead_plane::threads::ThreadMonitor;

/// Capacity of the channel to the thread that stores crash reports. The channel has room for the maximum number of
/// waiting reports, and for concurrent requests from operators.
const REQUESTS_MAX: usize = REPORTS_WAITING_MAX + 256;

/// Maximum size of a crash report's file, in bytes. Even reports with payloads of the maximum size are much smaller.
const FILE_BYTES_MAX: u64 = 2 * 1024 * 1024;

/// Approximate maximum total size, in bytes, of the crash reports kept in memory. If this size is exceeded, the oldest
/// reports are dropped.
const MEMORY_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Maximum number of entries that are read when the folder for crash reports is opened.
const FOLDER_ENTRIES_MAX: usize = 100_000;

/// Maximum time to wait for a reply from the thread that stores crash reports. If no reply arrives in time, the
/// client is asked to retry.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time, at shutdown, to wait for the remaining crash reports to be written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// Error for a folder in which crash reports cannot be kept. The message is worded to follow "failed to".
#[derive(Debug, thiserror::Error)]
#[error("keep crash reports in {}: {problem}", folder.display())]
pub struct OpenError {
    folder: PathBuf,
    problem: String,
}

/// Reason why a requested crash report cannot be returned.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// No report with this ID is stored. A report that existed earlier may have been dropped.
    #[error("there is no crash report with this ID")]
    NotFound,
    /// The file that should contain the report cannot be read, or its contents are invalid.
    #[error("the crash report file cannot be read: {0}")]
    Unreadable(String),
}

/// All stored crash reports.
#[derive(Debug, Default)]
pub struct Store {
    folder: Option<CrashFolder>,
    keep: usize,
    /// True if payloads are removed from crash reports before they are stored.
    drops_payloads: bool,
    reports: BTreeMap<CrashId, StoredReport>,
    /// IDs of the crash reports in each group. Each group has its own maximum, so a new report never evicts a report
    /// from another group.
    groups: [BTreeSet<CrashId>; GROUPS],
    memory_bytes: usize,
    /// True if the most recent attempt to write a report failed. While this is true, further failures are not logged.
    is_failing: bool,
}

/// Groups of reports. Each group has its own maximum number of stored reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    /// Reports about workers that failed to start.
    Start,
    /// Reports about jobs that were still running at their deadline.
    Late,
    /// All other reports.
    Crash,
}

const GROUPS: usize = 3;

impl Group {
    fn of(stage: &Word<Stage>, cause: &Cause) -> Self {
        match (stage, &cause.kind) {
            (_, kind) if *kind == CauseKind::Deadline => Self::Late,
            (stage, _) if *stage == Stage::Starting => Self::Start,
            _ => Self::Crash,
        }
    }

    /// Returns the maximum number of crash reports in this group. `keep` is the configured maximum (`crash_keep`).
    fn limit(self, keep: usize) -> usize {
        if self == Self::Late { keep.min(LATE_REPORTS_MAX) } else { keep }
    }
}

/// Maximum number of stored reports about jobs that missed their deadline.
const LATE_REPORTS_MAX: usize = 20;

#[derive(Debug)]
struct StoredReport {
    summary: Summary,
    /// The report and its approximate size in bytes. `None` if the report is stored only in a file.
    in_memory: Option<(Box<CrashReport>, usize)>,
    /// True if there is a file for this report. If the report is also in memory, the file contains an earlier version.
    has_file: bool,
}

impl Store {
    /// Creates a store for crash reports according to the configuration.
    pub fn new(config: &SupervisorConfig) -> Result<Self, OpenError> {
        Self::with_lock(config, None)
    }

    /// Creates a store for crash reports according to the configuration. `lock` is set during an upgrade. The lock is
    /// inherited from the previous supervisor, which keeps writing reports until it exits.
    pub fn with_lock(config: &SupervisorConfig, lock: Option<OwnedFd>) -> Result<Self, OpenError> {
        let mut store = Self::open_with(lock, config.crash_dir.as_deref(), config.crash_keep)?;
        store.drops_payloads = !config.crash_payloads;
        if let Some(folder) = &mut store.folder {
            // Only embedded supervisors have no jobs socket.
            folder.is_embedded = config.socket.as_os_str().is_empty();
        }
        Ok(store)
    }

    /// Returns a duplicate of the lock on the folder, or `None` if reports are kept in memory.
    pub fn lock_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let folder = self.folder.as_ref();
        folder.map(|folder| Ok(folder.lock.try_clone()?.into())).transpose()
    }

    /// Creates a store in `folder`, or in memory if `folder` is `None`. If the folder does not exist, it is created
    /// with mode 0700.
    #[cfg(test)]
    fn open(folder: Option<&Path>, keep: usize) -> Result<Self, OpenError> {
        Self::open_with(None, folder, keep)
    }

    fn open_with(lock: Option<OwnedFd>, folder: Option<&Path>, keep: usize) -> Result<Self, OpenError> {
        let open = |path: &Path| {
            CrashFolder::open(path, lock).map_err(|problem| OpenError { folder: path.to_owned(), problem })
        };
        let folder = folder.map(open).transpose()?;
        Ok(Self { folder, keep: keep.max(1), ..Self::default() })
    }

    /// Ends the shared use of the folder at the end of an upgrade. Loads the last reports written by the predecessor or
    /// by a failed successor.
    fn take_over(&mut self) {
        if let Some(folder) = &mut self.folder {
            folder.is_shared = false;
            folder.renew_lock();
        }
        self.load();
    }

    /// Loads all reports in the folder that were written by other supervisors.
    fn load(&mut self) {
        let loaded = self.load_new();
        let Some(folder) = &self.folder else { return };
        let path = folder.path.display();
        match loaded {
            Ok(skipped) => {
                if let Some(first) = skipped.first() {
                    let count = skipped.len();
                    tracing::warn!(
                        "ignored {count} files in {path} that are not crash reports, such as {first:?}"
                    );
                }
            }
            Err(error) => tracing::error!("the crash reports in {path} cannot be listed: {error}"),
        }
    }

    /// Loads the reports that the predecessor has written since the last call. Does nothing unless an upgrade is in
    /// progress.
    fn load_shared(&mut self) {
        if self.folder.as_ref().is_some_and(|folder| folder.is_shared) {
            // Errors and skipped files are not logged, because that would happen at each request.
            let _ = self.load_new();
        }
    }

    /// Loads the reports in the folder that are not in the store yet. Returns descriptions of the files that are not
    /// crash reports.
    fn load_new(&mut self) -> io::Result<Vec<String>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let (mut ids, mut skipped) = folder.list()?;
        ids.sort_unstable();
        // Only the contents of a report show which group it belongs to.
        let limits = [Group::Start, Group::Late, Group::Crash].map(|group| group.limit(self.keep));
        let surplus = ids.len().saturating_sub(limits.iter().sum());
        for id in ids.drain(..surplus) {
            folder.remove(id);
        }
        for id in ids {
            if self.reports.contains_key(&id) {
                continue;
            }
            match folder.read(id) {
                Ok(report) => {
                    self.groups[Group::of(&report.stage, &report.cause) as usize].insert(id);
                    let summary = report.summary();
                    self.reports.insert(id, StoredReport { summary, in_memory: None, has_file: true });
                }
                Err(error) => skipped.push(format!("{id}.json ({error})")),
            }
        }
        self.drop_surplus();
        Ok(skipped)
    }

    fn add(&mut self, mut report: Box<CrashReport>) {
        for job in &mut report.jobs {
            job.payload = job.payload.take().filter(|_| !self.drops_payloads);
            job.blake3 = job.payload.as_ref().map(|payload| blake3::hash(payload).to_hex().to_string());
        }
        self.groups[Group::of(&report.stage, &report.cause) as usize].insert(report.id);
        let is_new = report.count == 1;
        self.store(report, is_new);
        self.drop_surplus();
        while self.memory_bytes > MEMORY_BYTES_MAX && self.drop_oldest_in_memory() {}
    }

    /// Stores a report in a file or, if that is impossible, in memory.
    fn store(&mut self, report: Box<CrashReport>, is_new: bool) {
        let (id, summary) = (report.id, report.summary());
        let in_memory = if self.write(&report, is_new) {
            None
        } else {
            let bytes = report_size(&report);
            self.memory_bytes += bytes;
            Some((report, bytes))
        };
        let previous = self.reports.remove(&id);
        let has_file = in_memory.is_none() || previous.as_ref().is_some_and(|stored| stored.has_file);
        self.reports.insert(id, StoredReport { summary, in_memory, has_file });
        if let Some((_, bytes)) = previous.and_then(|stored| stored.in_memory) {
            self.memory_bytes -= bytes;
        }
    }

    /// Adds registers and a backtrace to a stored report. Does nothing if the report has been dropped.
    fn set_native(&mut self, id: CrashId, native: NativeCrash) {
        let Ok(mut report) = self.get(id) else { return };
        report.native = Some(native);
        let bytes = report_size(&report);
        match self.reports.get_mut(&id).and_then(|stored| stored.in_memory.as_mut()) {
            // A file with this ID may have been written by an earlier supervisor and must not be replaced.
            Some(in_memory) => {
                self.memory_bytes = self.memory_bytes - in_memory.1 + bytes;
                *in_memory = (report, bytes);
            }
            None => self.store(report, false),
        }
    }

    /// Writes a report to a file. Returns false if reports are not kept in a folder, or if the write fails.
    fn write(&mut self, report: &CrashReport, is_new: bool) -> bool {
        let Some(folder) = &mut self.folder else { return false };
        let written = folder.write(report, is_new).or_else(|error| {
            if error.kind() != io::ErrorKind::NotFound || folder.path.exists() {
                return Err(error);
            }
            folder.recreate()?;
            folder.write(report, is_new)
        });
        match written {
            Ok(()) => {
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!("crash reports can be written again");
                }
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    let path = folder.path.display();
                    tracing::error!(
                        "failed to write a crash report to {path}: {error}; crash reports are kept in memory \
                         until writing succeeds"
                    );
                }
                false
            }
        }
    }

    fn drop_surplus(&mut self) {
        for group in [Group::Start, Group::Late, Group::Crash] {
            while self.groups[group as usize].len() > group.limit(self.keep) {
                let Some(oldest) = self.groups[group as usize].first().copied() else { break };
                self.drop_one(oldest);
            }
        }
    }

    fn drop_one(&mut self, id: CrashId) {
        let Some(stored) = self.remove(id) else { return };
        if let Some((_, bytes)) = stored.in_memory {
            self.memory_bytes -= bytes;
        }
        if let Some(folder) = self.folder.as_ref().filter(|_| stored.has_file) {
            folder.remove(id);
        }
    }

    fn remove(&mut self, id: CrashId) -> Option<StoredReport> {
        self.groups.iter_mut().for_each(|group| _ = group.remove(&id));
        self.reports.remove(&id)
    }

    /// Drops the oldest in-memory report of the least important group that has one. Returns false if no report is in
    /// memory.
    fn drop_oldest_in_memory(&mut self) -> bool {
        let is_in_memory =
            |id: &&CrashId| self.reports.get(id).is_some_and(|stored| stored.in_memory.is_some());
        let oldest = self.groups.iter().find_map(|group| group.iter().find(is_in_memory)).copied();
        let Some(id) = oldest else { return false };
        self.drop_one(id);
        true
    }

    /// Returns summaries of all reports, oldest first.
    fn list(&mut self) -> Vec<Summary> {
        self.load_shared();
        self.reports.values().map(|stored| stored.summary.clone()).collect()
    }

    fn get(&mut self, id: CrashId) -> Result<Box<CrashReport>, ReadError> {
        if !self.reports.contains_key(&id) {
            self.load_shared();
        }
        let stored = self.reports.get(&id).ok_or(ReadError::NotFound)?;
        match (&stored.in_memory, &self.folder) {
            (Some((report, _)), _) => Ok(report.clone()),
            (None, None) => Err(ReadError::NotFound),
            (None, Some(folder)) => folder.read(id).map(Box::new).map_err(|error| {
                if error.kind() == io::ErrorKind::NotFound {
                    // The report's file was removed by another program.
                    self.remove(id);
                    return ReadError::NotFound;
                }
                ReadError::Unreadable(error.to_string())
            }),
        }
    }
}

/// Returns the approximate size of a report in memory, in bytes.
fn report_size(report: &CrashReport) -> usize {
    let jobs = report.jobs.iter().map(|job| {
        job.payload.as_ref().map_or(0, Vec::len) + job.operation.len() + job.tenant.len() + size_of_val(job)
    });
    let native = report.native.as_ref().map_or(0, NativeCrash::bytes);
    jobs.sum::<usize>()
        + native
        + report.stderr_tail.as_ref().map_or(0, String::len)
        + report.runtime_stack.as_ref().map_or(0, String::len)
        + size_of::<CrashReport>()
}

// Folder for crash reports.

/// A folder for crash reports, locked so that no other supervisor uses it.
#[derive(Debug)]
struct CrashFolder {
    path: PathBuf,
    lock: File,
    /// True in a successor until the predecessor has exited. Until then, the predecessor may still write to the folder.
    is_shared: bool,
    is_embedded: bool,
}

impl Drop for CrashFolder {
    /// Unlocks the folder of an embedded supervisor. Closing the file would not be enough, because a forked child of
    /// the application can hold a copy of the descriptor. A standalone supervisor can share the lock with its successor
    /// in an upgrade, so the kernel unlocks the folder when both have exited.
    fn drop(&mut self) {
        if self.is_embedded {
            // If this fails, the folder stays locked until all copies of the descriptor are closed.
            let _ = flock(&self.lock, FlockOperation::Unlock);
        }
    }
}

impl CrashFolder {
    fn open(path: &Path, lock: Option<OwnedFd>) -> Result<Self, String> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| format!("the directory for crash reports cannot be created: {error}"))?;
        let about = std::fs::metadata(path).map_err(|error| error.to_string())?;
        let own = rustix::process::geteuid().as_raw();
        if about.uid() != own {
            let owner = about.uid();
            return Err(format!(
                "the directory for crash reports belongs to user {owner}, but reports contain job payloads: \
                 run `chown` to give the directory to user {own}, or configure another `crash_dir`"
            ));
        }
        let mode = about.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(format!(
                "other users can access the directory for crash reports (mode {mode:04o}), but reports contain \
                 job payloads: run `chmod 700` on the directory, or configure another `crash_dir`"
            ));
        }
        std::fs::read_dir(path)
            .map_err(|error| format!("the directory for crash reports cannot be read: {error}"))?;
        let is_shared = lock.is_some();
        let lock = lock.map_or_else(|| Self::lock(path), |lock| Ok(lock.into()))?;
        Ok(Self { path: path.to_owned(), lock, is_shared, is_embedded: false })
    }

    /// Creates and locks the folder again after another program has removed it.
    fn recreate(&mut self) -> io::Result<()> {
        let path = self.path.clone();
        let mut created = Self::open(&path, None).map_err(io::Error::other)?;
        created.is_embedded = self.is_embedded;
        *self = created;
        tracing::warn!(
            "created the directory {} for crash reports again, because it was removed",
            path.display()
        );
        Ok(())
    }

    /// Locks the folder again if the predecessor has recreated the folder. The lock inherited from the predecessor then
    /// belongs to a removed file.
    fn renew_lock(&mut self) {
        let identity = |found: std::fs::Metadata| (found.dev(), found.ino());
        let current = std::fs::symlink_metadata(self.path.join(LOCK_FILE)).map(identity).ok();
        if current.is_none() || self.lock.metadata().map(identity).ok() == current {
            return;
        }
        match Self::lock(&self.path) {
            Ok(lock) => self.lock = lock,
            Err(problem) => tracing::error!("{}: {problem}", self.path.display()),
        }
    }

    /// Locks the folder. Without the lock, two supervisors would remove each other's reports.
    fn lock(path: &Path) -> Result<File, String> {
        lock::lock(&path.join(LOCK_FILE)).map_err(|why| match why {
            LockError::Held => {
                "another supervisor is using the directory for crash reports; stop the other supervisor, or \
                 configure another `crash_dir`"
                    .into()
            }
            LockError::Open(error) => format!("the lock file {LOCK_FILE} cannot be opened: {error}"),
            LockError::Unsupported(errno) => format!("the lock file {LOCK_FILE} cannot be locked: {errno}"),
        })
    }

    fn file(&self, id: CrashId) -> PathBuf {
        self.path.join(format!("{id}.json"))
    }

    /// Returns the IDs of all reports in the folder, and the names of all other files. Removes the files of writes that
    /// were interrupted.
    fn list(&self) -> io::Result<(Vec<CrashId>, Vec<String>)> {
        let (mut ids, mut others) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(&self.path)?.take(FOLDER_ENTRIES_MAX) {
            let name = entry?.file_name();
            let name = name.to_string_lossy();
            let id_before = |suffix| name.strip_suffix(suffix).and_then(|text| text.parse::<CrashId>().ok());
            if let Some(id) = id_before(REPORT_SUFFIX) {
                ids.push(id);
            } else if id_before(UNFINISHED_SUFFIX).is_some() {
                // Errors are ignored, because the supervisor tries again at the next start.
                if !self.is_shared {
                    let _ = std::fs::remove_file(self.path.join(&*name));
                }
            } else if name != LOCK_FILE {
                others.push(name.into_owned());
            }
        }
        Ok((ids, others))
    }

    fn read(&self, id: CrashId) -> io::Result<CrashReport> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        // `O_NONBLOCK` prevents `open` from blocking on a FIFO.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.file(id))?;
        if !file.metadata()?.is_file() {
            return Err(invalid("not a file".into()));
        }
        let mut text = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(invalid(format!("the file has more than {FILE_BYTES_MAX} bytes")));
        }
        let report: CrashReport =
            serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
        if report.id != id || !report.is_valid() {
            return Err(invalid("not a valid crash report".into()));
        }
        Ok(report)
    }

    /// Writes a report to its file atomically. A new report must not replace an existing file: if the clock was set
    /// back, the report's ID can be the same as that of an earlier supervisor's report.
    fn write(&self, report: &CrashReport, is_new: bool) -> io::Result<()> {
        let unfinished = self.path.join(format!("{}{UNFINISHED_SUFFIX}", report.id));
        let written = write_new(&unfinished, report).and_then(|()| {
            let (directory, target) = (rustix::fs::CWD, self.file(report.id));
            let flags = if is_new { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
            match rustix::fs::renameat_with(directory, &unfinished, directory, &target, flags) {
                // The file system does not support `RENAME_NOREPLACE`.
                Err(rustix::io::Errno::INVAL) if !target.exists() => std::fs::rename(&unfinished, &target),
                renamed => Ok(renamed?),
            }
        });
        if written.is_err() {
            // Errors are ignored, because the file may not exist.
            let _ = std::fs::remove_file(&unfinished);
        }
        written
    }

    fn remove(&self, id: CrashId) {
        if let Err(error) = std::fs::remove_file(self.file(id))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("failed to remove the crash report {}: {error}", self.file(id).display());
        }
    }
}

const LOCK_FILE: &str = ".lock";
const REPORT_SUFFIX: &str = ".json";
const UNFINISHED_SUFFIX: &str = ".json.new";

fn write_new(path: &Path, report: &CrashReport) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    file.write_all(&text)?;
    file.sync_all()
}

// Thread that stores the reports.

enum StoreRequest {
    Add {
        report: Box<CrashReport>,
        permit: OwnedSemaphorePermit,
    },
    /// Adds registers and a backtrace to a report.
    SetNative(CrashId, NativeCrash),
    List(oneshot::Sender<Vec<Summary>>),
    Get(CrashId, oneshot::Sender<Result<Box<CrashReport>, ReadError>>),
    /// Loads the last reports of a predecessor or failed successor, which has exited at the end of an upgrade.
    TakeOver,
}

/// Handle for sending requests to the thread that stores crash reports.
#[derive(Clone, Debug)]
pub struct Crashes(mpsc::Sender<StoreRequest>);

/// Handle for sending backtraces to the thread that stores crash reports. The handle does not keep the thread running.
#[derive(Clone, Debug)]
pub struct NativeSender(mpsc::WeakSender<StoreRequest>);

impl NativeSender {
    /// Adds registers and a backtrace to a report. Does nothing during shutdown or if the report has been dropped.
    pub fn set(&self, id: CrashId, native: NativeCrash) {
        // The channel has room for the backtraces of all reports that are waiting for one.
        self.0.upgrade().map(|sender| sender.try_send(StoreRequest::SetNative(id, native)));
    }
}

/// Handle to the thread that stores crash reports. The thread exits when all handles for sending requests have been
/// dropped.
#[derive(Debug)]
pub struct CrashThread(blocking::Receiver<()>);

/// Starts the thread that stores the reports.
pub fn start(store: Store, threads: &ThreadMonitor) -> io::Result<(Crashes, CrashThread)> {
    let (sender, mut requests) = mpsc::channel(REQUESTS_MAX);
    let (alive, ended) = blocking::channel::<()>();
    let run = move || {
        let _alive = alive;
        // A local variable, so that the folder is unlocked before `CrashThread::finish` returns.
        let mut store = store;
        store.load();
        while let Some(request) = requests.blocking_recv() {
            match request {
                StoreRequest::Add { report, permit } => {
                    store.add(report);
                    drop(permit);
                }
                StoreRequest::SetNative(id, native) => store.set_native(id, native),
                // If the client has disconnected, nobody receives the reply.
                StoreRequest::List(reply) => drop(reply.send(store.list())),
                StoreRequest::Get(id, reply) => drop(reply.send(store.get(id))),
                StoreRequest::TakeOver => store.take_over(),
            }
        }
    };
    threads.spawn("crashes", run)?;
    Ok((Crashes(sender), CrashThread(ended)))
}

impl CrashThread {
    /// Waits until all reports have been written. Stops waiting after a time limit, because a disk can hang.
    pub fn finish(self) {
        // The call returns when the thread exits, because the channel is then closed.
        let _ = self.0.recv_timeout(FINISH_TIMEOUT);
    }
}

impl Crashes {
    /// Sends a report to the thread that stores reports, which holds `permit` until the report is stored. Later
    /// requests see the report. Drops the report if the queue is full.
    pub fn add(&self, report: Box<CrashReport>, permit: OwnedSemaphorePermit) {
        if self.0.try_send(StoreRequest::Add { report, permit }).is_err() {
            tracing::error!("a crash report was dropped because too many are waiting to be written");
        }
    }

    /// Returns a sender for adding backtraces to reports.
    pub fn native_sender(&self) -> NativeSender {
        NativeSender(self.0.downgrade())
    }

    /// Returns summaries of all reports, from oldest to newest. Returns `None` if the thread that stores them is too
    /// busy.
    pub async fn list(&self) -> Option<Vec<Summary>> {
        self.request(StoreRequest::List).await
    }

    /// Returns the report with this ID. Returns `None` if the thread that stores reports is too busy.
    pub async fn get(&self, id: CrashId) -> Option<Result<Box<CrashReport>, ReadError>> {
        self.request(|reply| StoreRequest::Get(id, reply)).await
    }

    /// Loads the reports that a predecessor or failed successor wrote before it exited at the end of an upgrade.
    pub async fn take_over(&self) {
        // If the thread does not respond in time, the supervisor loads the reports at its next start.
        let _ = tokio::time::timeout(REPLY_TIMEOUT, self.0.send(StoreRequest::TakeOver)).await;
    }

    async fn request<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> StoreRequest) -> Option<T> {
        let (reply, receiver) = oneshot::channel();
        self.0.try_send(request(reply)).ok()?;
        tokio::time::timeout(REPLY_TIMEOUT, receiver).await.ok()?.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bulkhead_plane::crash::sample_report as report;
    use std::os::unix::fs::PermissionsExt;

    fn boxed(number: u32) -> Box<CrashReport> {
        Box::new(report(1_772_878_530_123, number, b"payload"))
    }

    fn numbers(store: &mut Store) -> Vec<String> {
        store.list().iter().map(|summary| summary.id.to_string()[19..].to_owned()).collect()
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn crash_store_keeps_newest_reports() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/crashes");
        let mut store = Store::open(Some(&path), 3).unwrap();
        store.load();
        for number in 1..=5 {
            store.add(boxed(number));
        }
        assert_eq!(numbers(&mut store), ["0003", "0004", "0005"]);
        assert_eq!(mode(&path), 0o700);
        let id = boxed(4).id;
        assert_eq!(mode(&path.join(format!("{id}.json"))), 0o600);
        let kept = store.get(id).unwrap();
        assert_eq!(kept.jobs[0].blake3.as_deref().unwrap(), blake3::hash(b"payload").to_hex().as_str());
        assert_eq!(store.get(boxed(1).id), Err(ReadError::NotFound));
        let error = Store::open(Some(&path), 3).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");
        drop(store);

        let mut again = Store::open(Some(&path), 2).unwrap();
        again.load();
        assert_eq!(numbers(&mut again), ["0004", "0005"]);
        assert_eq!(again.get(id).unwrap(), kept);
        std::fs::remove_file(path.join(format!("{id}.json"))).unwrap();
        assert_eq!(again.get(id), Err(ReadError::NotFound));
        assert_eq!(numbers(&mut again), ["0005"]);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 2, "one report and the lock file");
    }

    #[test]
    fn evicted_report_without_a_written_backtrace_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut store = Store::open(Some(&path), 1).unwrap();
        store.add(boxed(1));
        // The write fails, because there is a folder at the path of the unfinished file.
        let id = boxed(1).id;
        let obstacle = path.join(format!("{id}{UNFINISHED_SUFFIX}"));
        std::fs::create_dir(&obstacle).unwrap();
        store.set_native(id, NativeCrash::unavailable("no record"));
        assert!(store.get(id).unwrap().native.is_some());
        std::fs::remove_dir(obstacle).unwrap();
        store.add(boxed(2));
        assert_eq!(
            (numbers(&mut store), path.join(format!("{id}.json")).exists()),
            (vec!["0002".into()], false)
        );
    }

    #[test]
    fn removed_crash_folder_is_created_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut store = Store::open(Some(&path), 5).unwrap();
        store.add(boxed(1));
        std::fs::remove_dir_all(&path).unwrap();
        store.add(boxed(2));
        assert!(path.join(format!("{}.json", boxed(2).id)).exists());
        assert_eq!(mode(&path), 0o700);
        let error = Store::open(Some(&path), 5).unwrap_err().to_string();
        assert!(error.contains("another supervisor"), "{error}");
    }

    #[test]
    fn new_program_shows_crash_reports_written_by_the_old_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut old = Store::open(Some(&path), 5).unwrap();
        let lock = old.lock_descriptor().unwrap();
        let mut new = Store::open_with(lock, Some(&path), 5).unwrap();
        new.load();
        old.add(boxed(1));
        assert_eq!(new.get(boxed(1).id).unwrap(), old.get(boxed(1).id).unwrap());
        new.add(boxed(2));
        old.add(boxed(3));
        assert_eq!(numbers(&mut new), ["0001", "0002", "0003"]);
        // If the upgrade fails, the old program shows the new program's reports.
        drop(new);
        old.take_over();
        assert_eq!(numbers(&mut old), ["0001", "0002", "0003"]);
    }

    fn start_failure(number: u32, count: u32) -> Box<CrashReport> {
        let mut report = boxed(number);
        (report.stage, report.count) = (Stage::Starting.into(), count);
        report
    }

    #[test]
    fn start_failures_evict_only_other_start_failures() {
        for is_in_memory in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("crashes");
            let path = (!is_in_memory).then_some(&*path);
            let mut store = Store::open(path, 3).unwrap();
            store.add(boxed(1));
            (2..=9).for_each(|number| store.add(start_failure(number, 1)));
            assert_eq!(numbers(&mut store), ["0001", "0007", "0008", "0009"]);
            // A report with a higher count replaces the stored report, including its file.
            store.add(start_failure(8, 2));
            assert_eq!(numbers(&mut store), ["0001", "0007", "0008", "0009"]);
            let again = store.get(boxed(8).id).unwrap();
            assert_eq!((again.count, store.list()[2].count), (2, 2));
            (10..=13).for_each(|number| store.add(boxed(number)));
            assert_eq!(numbers(&mut store), ["0007", "0008", "0009", "0011", "0012", "0013"]);
            drop(store);
            let mut store = Store::open(path, 2).unwrap();
            store.load();
            // The store keeps two reports per group.
            let left: &[&str] = if is_in_memory { &[] } else { &["0008", "0009", "0012", "0013"] };
            assert_eq!(numbers(&mut store), left);
        }
    }

    #[test]
    fn late_job_reports_do_not_evict_crash_reports() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(Some(folder.path().join("crashes").as_path()), 30).unwrap();
        store.add(boxed(1));
        for number in 2..=29 {
            let mut report = boxed(number);
            report.cause = bulkhead_plane::crash::late_job_cause();
            store.add(report);
        }
        let kept: Vec<String> = (10..=29).map(|number| format!("{number:04}")).collect();
        assert_eq!(numbers(&mut store), [vec!["0001".to_owned()], kept].concat());
    }

    #[test]
    fn crash_store_ignores_unrelated_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut store = Store::open(Some(&path), 10).unwrap();
        store.add(boxed(1));
        let good = std::fs::read_to_string(path.join(format!("{}.json", boxed(1).id))).unwrap();
        drop(store);
        let put = |number: u32, text: &str| {
            std::fs::write(path.join(format!("{}.json", boxed(number).id)), text).unwrap();
        };
        put(2, "");
        put(3, &good[..good.len() / 2]);
        put(4, &good);
        put(5, &good.replace("-0001", "-0005").replace("\"b\"", "\"../b\""));
        put(6, &"[".repeat(100_000));
        put(7, &" ".repeat(FILE_BYTES_MAX as usize + 1));
        let link = path.join(format!("{}.json", boxed(8).id));
        std::os::unix::fs::symlink("/etc/passwd", link).unwrap();
        std::fs::create_dir(path.join(format!("{}.json", boxed(9).id))).unwrap();
        std::fs::write(path.join("notes.txt"), "mine").unwrap();
        std::fs::write(path.join(format!("{}.json.new", boxed(1).id)), "half").unwrap();
        let mut store = Store::open(Some(&path), 10).unwrap();
        store.load();
        assert_eq!(numbers(&mut store), ["0001"]);
        assert!(path.join("notes.txt").exists());
        assert!(!path.join(format!("{}.json.new", boxed(1).id)).exists());
    }

    #[test]
    fn unwritable_crash_report_stays_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut store = Store::open(Some(&path), 10).unwrap();
        store.add(boxed(1));
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        store.add(boxed(2));
        assert_eq!(store.get(boxed(2).id).unwrap().jobs[0].payload.as_deref(), Some(&b"payload"[..]));
        assert!(store.memory_bytes > 0);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        store.add(boxed(3));
        assert_eq!(numbers(&mut store), ["0001", "0002", "0003"]);
        assert!(path.join(format!("{}.json", boxed(3).id)).exists());
    }

    #[test]
    fn crash_report_never_overwrites_earlier_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let mut store = Store::open(Some(&path), 10).unwrap();
        store.add(boxed(1));
        drop(store);
        let file = path.join(format!("{}.json", boxed(1).id));
        let before = std::fs::read(&file).unwrap();
        let mut store = Store::open(Some(&path), 10).unwrap();
        let mut other = boxed(1);
        other.pid = 99;
        store.add(other);
        store.set_native(boxed(1).id, NativeCrash::unavailable("for a test"));
        assert_eq!(std::fs::read(&file).unwrap(), before);
        assert_eq!(store.get(boxed(1).id).unwrap().pid, 99);
    }

    #[test]
    fn backtrace_is_added_to_stored_report() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        let native = NativeCrash::unavailable("for a test");
        for folder in [None, Some(&*path)] {
            let mut store = Store::open(folder, 10).unwrap();
            store.add(boxed(1));
            store.set_native(boxed(1).id, native.clone());
            store.set_native(boxed(2).id, native.clone());
            let report = store.get(boxed(1).id).unwrap();
            assert_eq!((report.native.as_ref(), report.jobs[0].payload.is_some()), (Some(&native), true));
            assert_eq!(
                (numbers(&mut store), store.memory_bytes > 0),
                (vec!["0001".to_owned()], folder.is_none())
            );
        }
    }

    #[test]
    fn crash_store_limits_its_memory() {
        let mut store = Store::open(None, 10_000).unwrap();
        let payload = vec![7; bulkhead_api::PAYLOAD_BYTES_MAX];
        for number in 0..2000 {
            store.add(Box::new(report(1_772_878_530_123, number, &payload)));
        }
        assert!(store.memory_bytes <= MEMORY_BYTES_MAX, "{}", store.memory_bytes);
        assert!(store.reports.len() > 500);
        assert!(numbers(&mut store).contains(&"1999".to_owned()));
    }

    #[test]
    fn crash_folder_accessible_to_others_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("crashes");
        std::fs::create_dir(&path).unwrap();
        for bad in [0o755, 0o710, 0o707] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(bad)).unwrap();
            let error = Store::open(Some(&path), 10).unwrap_err().to_string();
            assert!(error.contains("chmod 700") && error.contains(&format!("{bad:04o}")), "{error}");
        }
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(Store::open(Some(&file), 10).is_err());
    }
}

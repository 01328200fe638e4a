//! Runs the symbolizers, which create the backtraces for crash reports. A separate thread processes one crash record or
//! stack sample at a time, and starts a new symbolizer process for each. The `symbolizer` crate contains the code of
//! these processes, which decodes the stacks.
//!
//! Each symbolizer has a separate keeper, so neither the data plane nor the workers' keeper knows about symbolizers. A
//! symbolizer's answer must not be trusted more than the crash record.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bulkhead_api::{CrashId, NATIVE_BYTES_MAX, NativeCrash};
use bulkhead_keeper::{Keeper, KeeperLauncher, Report, spawn_failure_advice};
use bulkhead_plane::confinement::{SandboxSupport, WorkerIdentity};
use bulkhead_plane::crash::{CrashRecord, RecordKind};
use bulkhead_plane::threads::ThreadMonitor;
use bulkhead_shared::crash_record::{
    HEADER_BYTES, Header, MAPS_OFFSET, RECORD_BYTES, RECORD_OFFSET, RECORDS_BYTES_MAX, STACK_OFFSET,
};
use rustix::fs::FallocateFlags;

use super::crashes::NativeSender;

/// Maximum number of records waiting for a symbolizer. Each record keeps a memory file open.
const RECORDS_WAITING_MAX: usize = 16;

/// Maximum time to spend on one record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time to wait for all processes of a symbolizer to exit. Their user ID can only be reused once all of them
/// have exited.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Spawn number of the symbolizer's process. It is the only process that this keeper starts.
const SPAWN_NUMBER: u64 = 1;

/// Handle for sending crash records to the thread that starts symbolizers.
#[derive(Clone, Debug)]
pub(crate) struct Symbolizer {
    requests: SyncSender<(CrashId, CrashRecord)>,
    results: NativeSender,
}

impl Symbolizer {
    /// Requests a backtrace for a crash report and returns immediately. The backtrace is added to the report later.
    pub(crate) fn submit(&self, id: CrashId, record: CrashRecord) {
        if self.requests.try_send((id, record)).is_err() {
            self.results
                .set(id, NativeCrash::unavailable("too many other crashes were waiting for the symbolizer"));
        }
    }
}

/// Everything needed to start symbolizers.
pub struct SymbolizerOptions {
    /// Launcher for the symbolizers' keepers.
    pub keeper: KeeperLauncher,
    /// Source of the user IDs under which symbolizers run.
    pub support: Arc<SandboxSupport>,
    /// Paths from `crash_symbols`.
    pub symbols: Vec<String>,
}

/// Starts the thread that starts symbolizers. The thread exits when all senders have been dropped.
pub(crate) fn start(
    options: SymbolizerOptions,
    results: NativeSender,
    threads: &ThreadMonitor,
) -> io::Result<Symbolizer> {
    let (requests, receiver) = sync_channel(RECORDS_WAITING_MAX);
    let symbolizer = Symbolizer { requests, results: results.clone() };
    threads.spawn("symbolizer", move || serve(&options, &receiver, &results))?;
    Ok(symbolizer)
}

fn serve(options: &SymbolizerOptions, requests: &Receiver<(CrashId, CrashRecord)>, results: &NativeSender) {
    while let Ok((id, record)) = requests.recv() {
        let began = Instant::now();
        let native = options.symbolize(&record).unwrap_or_else(|reason| NativeCrash::unavailable(&reason));
        results.set(id, native);
        // The pause limits symbolizers to about half of one processor's time, even if crashes are frequent.
        std::thread::sleep(began.elapsed());
    }
}

impl SymbolizerOptions {
    /// Runs a symbolizer on a record. Returns the backtraces, or the reason why there are none.
    fn symbolize(&self, record: &CrashRecord) -> Result<NativeCrash, String> {
        let deadline = Instant::now() + RECORD_TIMEOUT;
        let taken = match record.kind {
            RecordKind::Crash { signal } => take_crash_record(&record.file, signal),
            RecordKind::Sample => take_sample(&record.file),
        };
        let taken = taken.map_err(|error| format!("failed to read the thread records: {error}"))?;
        let none = if record.kind == RecordKind::Sample { NO_SAMPLE } else { NO_RECORD };
        let mut bytes = taken.ok_or_else(|| none.to_owned())?;
        let answer = self.run(record, &bytes, deadline);
        erase(&mut bytes);
        let answer = answer.map_err(|error| format!("the symbolizer failed: {error}"))?;
        serde_json::from_slice(&answer)
            .ok()
            .filter(NativeCrash::is_valid)
            .ok_or_else(|| "the symbolizer failed: it produced invalid output".to_owned())
    }

    /// Starts a symbolizer for a record and returns the symbolizer's answer.
    fn run(&self, record: &CrashRecord, bytes: &[u8], deadline: Instant) -> io::Result<Vec<u8>> {
        let sandbox = record.program.symbolizer_sandbox();
        if let Some(obstacle) = sandbox.obstacle() {
            return Err(io::Error::other(obstacle));
        }
        let ids = self.support.ids().filter(|_| sandbox.identity() == WorkerIdentity::Each);
        let id = ids.as_ref().map(|ids| ids.allocate()).transpose()?;
        let mut keeper = None;
        let answer = self.ask(&mut keeper, record, id, bytes, deadline);
        let is_gone = keeper.is_none_or(|keeper| has_ended(keeper).unwrap_or(false));
        // An ID must not be reused while processes with this ID may still be running.
        if let (Some(ids), Some(id), true) = (ids, id, is_gone) {
            ids.free(id);
        }
        answer
    }

    /// Starts a symbolizer, sends it the records, and returns its answer. Stores the keeper in `started`. If the keeper
    /// could not start a symbolizer, clears `started`, because the user ID is then unused.
    fn ask(
        &self,
        started: &mut Option<Keeper>,
        record: &CrashRecord,
        id: Option<u32>,
        bytes: &[u8],
        deadline: Instant,
    ) -> io::Result<Vec<u8>> {
        let (mut link, theirs) = UnixStream::pair()?;
        let program = self.program()?;
        let program = program.to_str().ok_or(ErrorKind::InvalidFilename)?;
        let order = record.program.symbolizer_order(program, &self.symbols, SPAWN_NUMBER, id);
        let null = || File::options().write(true).open("/dev/null").map(OwnedFd::from);
        let keeper = started.insert(self.keeper.clone().start()?);
        keeper.spawn(&order, theirs.into(), null()?, null()?)?;
        loop {
            match keeper.wait(deadline)? {
                Some(Report::Spawned { .. }) => break,
                Some(Report::SpawnFailed { step, error, .. }) => {
                    *started = None;
                    let advice = spawn_failure_advice(&step, &error);
                    return Err(io::Error::other(format!("{step}: {error}{advice}")));
                }
                Some(_) => {}
                None => return Err(ErrorKind::TimedOut.into()),
            }
        }
        let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        link.set_write_timeout(Some(left()))?;
        link.write_all(bytes)?;
        link.shutdown(Shutdown::Write)?;
        let (mut answer, mut part) = (Vec::new(), [0; 16 * 1024]);
        loop {
            link.set_read_timeout(Some(left()))?;
            match link.read(&mut part) {
                Ok(0) => return Ok(answer),
                Ok(count) if (answer.len() + count) as u64 <= NATIVE_BYTES_MAX => {
                    answer.extend(&part[..count])
                }
                Ok(_) => return Err(ErrorKind::FileTooLarge.into()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
                Err(error) => return Err(error),
            }
            if Instant::now() > deadline {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }

    /// Returns the path of the program that is started as the symbolizer, which is the keeper's program.
    fn program(&self) -> io::Result<PathBuf> {
        match self.keeper.program() {
            own if own == Path::new("/proc/self/exe") => own_program(),
            other => Ok(other.to_owned()),
        }
    }
}

/// Returns the path of the running program. If its file was replaced, for example by a new package, the path leads to
/// the new file.
fn own_program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    // The kernel appends the suffix to the path of a removed file.
    let replaced = path.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    let replaced = replaced.map(|path| PathBuf::from(OsStr::from_bytes(path)));
    Ok(replaced.filter(|path| path.is_file()).unwrap_or(path))
}

/// Explanations that crash reports contain in place of a backtrace.
const NO_RECORD: &str = "the worker wrote no record of its crash; its code may have handled the signal itself, or a \
                         thread without an alternate signal stack may have overflowed its stack";
const NO_SAMPLE: &str = "the threads of the process could not be stopped within 15 ms";

/// Copies a worker's crash record, so that the worker's remaining processes can no longer change it, and erases the
/// record in the file. Returns `None` if the worker did not write a record before `signal` killed it.
fn take_crash_record(file: &OwnedFd, signal: i32) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; RECORD_BYTES];
    fill(file, &mut bytes, RECORD_OFFSET)?;
    let erased = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Errors are ignored, because the file will soon be freed in any case.
    let _ = rustix::fs::fallocate(file, erased, RECORD_OFFSET as u64, RECORD_BYTES as u64);
    let header = bytes.first_chunk::<HEADER_BYTES>().and_then(Header::decode);
    // The previous signal handler may abort the process after the record has been written. The handler in Rust's
    // standard library does so after a stack overflow.
    let is_cause = |header: &Header| header.signal == signal || signal == libc::SIGABRT;
    let Some(header) = header.filter(is_cause) else { return Ok(None) };
    let (maps, stack) = (header.maps_bytes as usize, header.stack_bytes as usize);
    bytes.copy_within(STACK_OFFSET..STACK_OFFSET + stack, MAPS_OFFSET + maps);
    let end = MAPS_OFFSET + maps + stack;
    bytes[end..].fill(0);
    bytes.truncate(end);
    Ok(Some(bytes))
}

/// Reads the thread stacks that the keeper recorded in a file. Returns `None` if the file contains no stacks.
fn take_sample(file: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let mut count = [0; size_of::<u64>()];
    fill(file, &mut count, 0)?;
    let count = usize::try_from(u64::from_le_bytes(count)).unwrap_or(usize::MAX).min(RECORDS_BYTES_MAX);
    let mut bytes = vec![0; count];
    fill(file, &mut bytes, size_of::<u64>())?;
    Ok((count > 0).then_some(bytes))
}

/// Fills `bytes` with the contents of a file, starting at an offset.
fn fill(file: &OwnedFd, bytes: &mut [u8], offset: usize) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let at = (offset + filled) as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut bytes[filled..], at))? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(())
}

/// Overwrites a crash record in memory, because the recorded stack can contain secrets.
fn erase(bytes: &mut Vec<u8>) {
    bytes.fill(0);
    // Prevents the compiler from removing the writes to memory that is about to be freed.
    std::hint::black_box(bytes);
}

/// Kills the symbolizer. Returns true once all its processes have exited.
fn has_ended(mut keeper: Keeper) -> io::Result<bool> {
    let deadline = Instant::now() + END_TIMEOUT;
    keeper.kill(SPAWN_NUMBER)?;
    loop {
        match keeper.wait(deadline)? {
            Some(Report::Reaped { .. } | Report::SpawnFailed { .. }) => return Ok(true),
            Some(_) => {}
            None => return Ok(false),
        }
    }
}

impl std::fmt::Debug for SymbolizerOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SymbolizerOptions").finish_non_exhaustive()
    }
}

//! Ledger workers. They append a record to one file when a job begins and when it ends. A running job locks
//! one byte of another file. This file has one byte (a place) for each job that is allowed to run at the same
//! time. The kernel releases a dying process's locks before its death is visible.

use std::fs::{File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use bulkhead_worker::{HandlerError, Job, Server};
use nix::fcntl::{FcntlArg, fcntl};

/// Name of the file to which workers append records about their jobs.
const RECORDS: &str = "records";

/// Number of times that a job tries to lock each place before the job is recorded as exceeding the limit. A place is a
/// byte of a file and stands for a permit.
const SCANS: usize = 4;

/// Identifier of this worker in its records. The worker's first job sets the value.
static WORKER: OnceLock<u64> = OnceLock::new();

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The job's handler has started.
    Begun,
    /// The job's handler is about to return.
    Ended,
    /// The job began while the bulkhead was already running its maximum number of jobs. A `Held` record for each
    /// running job follows.
    OverBound,
    /// The job was already running when another job exceeded the limit.
    Held,
}

impl Mark {
    const ALL: [Self; 4] = [Self::Begun, Self::Ended, Self::OverBound, Self::Held];
}

/// An event in the life of a job, as recorded by a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Job number assigned by the client.
    pub job: u64,
    /// CLOCK_MONOTONIC time at which this attempt to run the job began, in µs. This time and the job number
    /// together identify the attempt.
    pub began_us: u64,
    /// CLOCK_MONOTONIC time of the record, in µs.
    pub at_us: u64,
    /// CLOCK_MONOTONIC time at which the worker's first job began, in µs. Identifies the worker.
    pub worker: u64,
    /// Kind of the record.
    pub mark: Mark,
}

impl Record {
    const BYTES: usize = 40;

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.job.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.began_us.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.at_us.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.worker.to_le_bytes());
        bytes[32] = self.mark as u8;
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let mark = Mark::ALL[usize::from(bytes[32])];
        Self { job: number(0), began_us: number(8), at_us: number(16), worker: number(24), mark }
    }

    /// Returns the attempt that this record describes.
    pub fn attempt(&self) -> Attempt {
        Attempt { job: self.job, began_us: self.began_us }
    }
}

/// An attempt to run a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    /// Job number assigned by the client.
    pub job: u64,
    /// CLOCK_MONOTONIC time at which the attempt began, in µs.
    pub began_us: u64,
}

impl Attempt {
    const BYTES: usize = 16;

    /// Creates a record about this attempt. The record contains the identifier of this worker.
    fn record(self, at_us: u64, mark: Mark) -> Record {
        // The identifier is set by the first job, because forked workers share everything that the template has set.
        let worker = *WORKER.get_or_init(|| self.began_us);
        Record { job: self.job, began_us: self.began_us, at_us, worker, mark }
    }

    fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.job.to_le_bytes());
        bytes[8..].copy_from_slice(&self.began_us.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self { job: number(0), began_us: number(8) }
    }
}

/// Reads all records, in the order in which they were written.
pub fn read(notes: &Path) -> Vec<Record> {
    let bytes = std::fs::read(notes.join(RECORDS)).unwrap_or_default();
    assert_eq!(bytes.len() % Record::BYTES, 0, "a record was written in part");
    bytes.chunks_exact(Record::BYTES).map(Record::decode).collect()
}

/// Returns a job's payload, which repeats the job number and is also the expected result. The operation, not the
/// payload, determines what the job does.
pub fn payload(job: u64, bytes: usize) -> Vec<u8> {
    job.to_le_bytes().repeat(bytes.div_ceil(8).max(1))
}

/// Runs a worker until the supervisor stops it.
pub fn serve(notes: &str, bulkhead: &str, bound: &str) -> ExitCode {
    let notes = PathBuf::from(notes);
    let places = notes.join(format!("places-{bulkhead}"));
    let bound: usize = bound.parse().expect("a number");
    // The file is open to all users, because workers can run as different users.
    let records = open(&notes.join(RECORDS)).expect("the records can be opened");
    Server::new()
        .handler(move |job: &Job, ctx: &bulkhead_worker::Ctx| {
            if let Some(("meet", round)) = ctx.operation().split_once(' ') {
                meet(&places, bound, round)?;
                return Ok(job.payload().to_vec());
            }
            let number = job.payload().first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let number = number.ok_or_else(|| HandlerError::new("no_number", "the payload has no number"))?;
            let attempt = Attempt { job: number, began_us: now_us() };
            // Each record is written with a single call in append mode, so that records are not interleaved.
            let write = |record: Record| (&records).write_all(&record.encode());
            write(attempt.record(attempt.began_us, Mark::Begun))?;
            let place = take_place(&places, bound, attempt)?;
            if let Place::None { since_us, holders } = &place {
                let over = attempt.record(*since_us, Mark::OverBound);
                let held = holders.iter().map(|holder| holder.record(*since_us, Mark::Held));
                let all: Vec<u8> = std::iter::once(over).chain(held).flat_map(Record::encode).collect();
                (&records).write_all(&all)?;
            }
            match ctx.operation().split_once(' ') {
                Some(("sleep", us)) => std::thread::sleep(Duration::from_micros(us.parse().unwrap_or(0))),
                _ if ctx.operation() == "die" => std::process::abort(),
                _ if ctx.operation() == "hang" => loop {
                    std::thread::park();
                },
                _ if ctx.operation() == "freeze" => freeze()?,
                _ if ctx.operation() == "chains" => start_chains()?,
                _ => {}
            }
            write(attempt.record(now_us(), Mark::Ended))?;
            drop(place);
            Ok(job.payload().to_vec())
        })
        .serve()
}

fn open(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().append(true).create(true).mode(0o666).open(path)?;
    // Fails unless this worker's user owns the file. It is enough if one worker succeeds.
    let _ = file.set_permissions(Permissions::from_mode(0o666));
    Ok(file)
}

/// Stops the whole worker process for a tenth of a second. As in a call that holds an interpreter's lock, no thread
/// reads the link or begins a job during this time.
fn freeze() -> std::io::Result<()> {
    let mut waker = spawn("sleep 0.1; kill -CONT $PPID")?;
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP)?;
    waker.wait()?;
    Ok(())
}

/// Starts chains of processes, in which each process starts its successor and exits. The chains outlive the job.
fn start_chains() -> std::io::Result<()> {
    let chains =
        "f() { [ $1 -gt 0 ] && f $(($1 - 1)) & exit 0; }; for chain in 1 2 3 4 5 6 7 8; do f 100 & done";
    spawn(chains)?.wait()?;
    Ok(())
}

/// Starts a shell script that runs alongside the job.
fn spawn(script: &str) -> std::io::Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// Returns the CLOCK_MONOTONIC time in µs. All processes share this clock.
pub fn now_us() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("there is a clock");
    now.tv_sec() as u64 * 1_000_000 + now.tv_nsec() as u64 / 1_000
}

/// Returns the `flock` structure for a write lock on one byte.
fn lock_of(byte: usize) -> nix::libc::flock {
    nix::libc::flock {
        l_type: nix::libc::F_WRLCK as i16,
        l_whence: nix::libc::SEEK_SET as i16,
        l_start: byte as i64,
        l_len: 1,
        l_pid: 0,
    }
}

/// Maximum time in µs that a job waits for the other jobs in its round. A round can fail while workers are being
/// replaced, but a later round then succeeds.
const MEETS_WITHIN_US: u64 = 1_000_000;

/// Waits until the bulkhead is running its maximum number of jobs. The first job that detects this state creates a
/// file, which releases the other jobs.
fn meet(places: &Path, bound: usize, round: &str) -> Result<(), HandlerError> {
    let began_us = now_us();
    let met = places.with_file_name(format!("met-{round}"));
    let Place::Taken(own) = take_place(places, bound, Attempt { job: 0, began_us })? else {
        return Err(HandlerError::new("no_place", "all places are taken"));
    };
    let is_held = |byte: &usize| {
        let mut lock = lock_of(*byte);
        // F_OFD_GETLK does not report the caller's own lock.
        fcntl(&own.file, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && lock.l_type != nix::libc::F_UNLCK as i16
    };
    while !met.exists() {
        if (0..bound).filter(is_held).count() + 1 == bound {
            File::create(&met)?;
        }
        if now_us() - began_us > MEETS_WITHIN_US {
            return Err(HandlerError::new("alone", "the other jobs of the round have not begun"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Result of [`take_place`]. Each place represents one of the bulkhead's permits.
enum Place {
    /// The attempt has taken a place by locking a byte of the file, and has written its identity there.
    Taken(TakenPlace),
    /// All places are taken. The attempts in `holders` have held the places since `since_us`, a time in µs.
    None { since_us: u64, holders: Vec<Attempt> },
}

/// A locked byte of a file. The byte stands for a permit. The lock must be released explicitly, because a forked child
/// shares the open file until the child executes another program.
struct TakenPlace {
    file: File,
    byte: usize,
}

impl Drop for TakenPlace {
    fn drop(&mut self) {
        let unlock = nix::libc::flock { l_type: nix::libc::F_UNLCK as i16, ..lock_of(self.byte) };
        fcntl(&self.file, FcntlArg::F_OFD_SETLK(&unlock)).expect("an own lock can be released");
    }
}

/// Tries to take one of `bound` places for an attempt to run a job.
fn take_place(places: &Path, bound: usize, attempt: Attempt) -> std::io::Result<Place> {
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o666).open(places)?;
    // Fails unless this worker's user owns the file. It is enough if one worker succeeds.
    let _ = file.set_permissions(Permissions::from_mode(0o666));
    let mut since_us = now_us();
    // Scans several times, because between two attempts one place can be freed and another taken.
    for byte in (0..SCANS).flat_map(|_| 0..bound) {
        if byte == 0 {
            since_us = now_us();
        }
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_of(byte))) {
            Ok(_) => {
                file.write_all_at(&attempt.encode(), (Attempt::BYTES * byte) as u64)?;
                return Ok(Place::Taken(TakenPlace { file, byte }));
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut names = vec![0; Attempt::BYTES * bound];
    file.read_exact_at(&mut names, 0)?;
    let (holders, _) = names.as_chunks();
    Ok(Place::None { since_us, holders: holders.iter().map(Attempt::decode).collect() })
}
